/*
thrift.h -- reads structs in Thrift's compact protocol from untrusted memory.

    ThriftReader in = thrift_reader(data, bytes);
    ThriftField field = {0, 0};
    while (thrift_field(&in, &field)) { // of a struct
        switch (field.id) {
        case 1: rows = thrift_number(&in, field); break;
        default: thrift_skip(&in, field);
        }
    }
    if (in.wrong) { ... }

A field is a byte with its type and the step to its number, then its value: numbers as varints (7
bits per byte, lowest first) with the sign in the lowest bit, strings with their length, lists with
their length and type, structs as fields up to a zero. github.com/apache/thrift,
doc/specs/thrift-compact-protocol.md.

No function reads beyond the end, whatever the bytes are. `wrong` keeps the first error; after it,
every number is 0, every list and string is empty and every struct at its end, so that one check at
the end is enough.
*/
#ifndef LLMC_THRIFT_H
#define LLMC_THRIFT_H

#include <stddef.h>
#include <stdint.h>

// ---- bytes, read from the front ----

typedef struct {
    const unsigned char *at, *end;
    const char* wrong; // first error, NULL: none. After it, everything reads as zero.
} ThriftReader;

static inline ThriftReader thrift_reader(const unsigned char* bytes, size_t count) {
    const ThriftReader in = {bytes, bytes + count, NULL};
    return in;
}

static inline size_t thrift_left(const ThriftReader* in) { return (size_t)(in->end - in->at); }

static inline int thrift_wrong(ThriftReader* in, const char* what) {
    in->wrong = in->wrong ? in->wrong : what;
    in->at = in->end;
    return 0;
}

// Returns the next `count` bytes, or NULL.
static inline const unsigned char* thrift_take(ThriftReader* in, uint64_t count) {
    const unsigned char* bytes = in->at;
    if (in->wrong || count > thrift_left(in)) {
        thrift_wrong(in, "the data end too early");
        return NULL;
    }
    in->at += count;
    return bytes;
}

static inline unsigned thrift_u8(ThriftReader* in) {
    const unsigned char* byte = thrift_take(in, 1);
    return byte ? *byte : 0;
}

// Reads seven bits per byte, lowest first; the eighth means that more follow.
static inline uint64_t thrift_varint(ThriftReader* in) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        const unsigned byte = thrift_u8(in);
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            return value;
        }
    }
    thrift_wrong(in, "a number has more than 64 bits");
    return 0;
}

// Reads a small number of either sign: 0 -1 1 -2 2 are stored as 0 1 2 3 4.
static inline int64_t thrift_zigzag(ThriftReader* in) {
    const uint64_t value = thrift_varint(in);
    return (int64_t)(value >> 1 ^ (0 - (value & 1)));
}

// ---- Thrift's compact protocol ----

enum {
    THRIFT_STOP,
    THRIFT_TRUE, // a field of type bool has its value in its type
    THRIFT_FALSE,
    THRIFT_I8,
    THRIFT_I16,
    THRIFT_I32,
    THRIFT_I64,
    THRIFT_DOUBLE,
    THRIFT_STRING,
    THRIFT_LIST,
    THRIFT_SET,
    THRIFT_MAP,
    THRIFT_STRUCT,
    THRIFT_UUID,
    THRIFT_MAX_DEPTH = 16, // deepest nesting of skipped values
};

typedef struct {
    int id, type;
} ThriftField;

// Moves to the next field of a struct: 1 if its value follows; 0 at the end. `field` starts with id
// 0.
static inline int thrift_field(ThriftReader* in, ThriftField* field) {
    const unsigned header = thrift_u8(in);
    field->type = header & 15;
    if (field->type == THRIFT_STOP) {
        return 0;
    }
    const int64_t id = header >> 4 ? field->id + (int64_t)(header >> 4) : thrift_zigzag(in);
    if (id < INT16_MIN || id > INT16_MAX) {
        thrift_wrong(in, "a field's number is out of range");
    }
    field->id = (int)id;
    return !in->wrong;
}

// Reads the length of a list or set; every element takes at least a byte.
static inline size_t thrift_list_(ThriftReader* in, int* element_type) {
    const unsigned header = thrift_u8(in);
    const uint64_t count = header >> 4 == 15 ? thrift_varint(in) : header >> 4;
    *element_type = header & 15;
    if (count > thrift_left(in)) {
        thrift_wrong(in, "a list is longer than the data");
        return 0;
    }
    return (size_t)count;
}

// Reads the length of a field that must be a list of this type.
static inline size_t thrift_list(ThriftReader* in, ThriftField field, int wanted) {
    int type = wanted;
    const size_t count = field.type == THRIFT_LIST ? thrift_list_(in, &type) : 0;
    if (field.type != THRIFT_LIST || (count && type != wanted)) {
        thrift_wrong(in, "a list is of another type");
    }
    return in->wrong ? 0 : count;
}

static inline int64_t thrift_number(ThriftReader* in, ThriftField field) {
    if (field.type == THRIFT_TRUE || field.type == THRIFT_FALSE) {
        return field.type == THRIFT_TRUE;
    }
    if (field.type == THRIFT_I8) {
        return (int8_t)thrift_u8(in);
    }
    if (field.type < THRIFT_I16 || field.type > THRIFT_I64) {
        return thrift_wrong(in, "a number is of another type");
    }
    return thrift_zigzag(in);
}

static inline ThriftReader thrift_string(ThriftReader* in, int type) {
    const uint64_t count = type == THRIFT_STRING ? thrift_varint(in) : 0;
    if (type != THRIFT_STRING) {
        thrift_wrong(in, "a string is of another type");
    }
    const unsigned char* bytes = thrift_take(in, count);
    return thrift_reader(bytes ? bytes : in->end, bytes ? (size_t)count : 0);
}

static inline void thrift_skip_(ThriftReader* in, int type, int depth);

static inline void thrift_skip_element_(ThriftReader* in, int type, int depth) {
    if (type == THRIFT_TRUE || type == THRIFT_FALSE) {
        thrift_u8(in); // outside a struct a bool is a byte
    } else {
        thrift_skip_(in, type, depth);
    }
}

static inline void thrift_skip_all_(ThriftReader* in, int type, int depth) {
    int key = THRIFT_I8, value = 0;
    uint64_t count = 0;
    if (type != THRIFT_MAP) {
        count = thrift_list_(in, &value);
    } else if ((count = thrift_varint(in)) > 0) {
        const unsigned types = thrift_u8(in);
        key = (int)types >> 4;
        value = types & 15;
    }
    for (uint64_t i = 0; i < count && !in->wrong; i++) {
        if (type == THRIFT_MAP) {
            thrift_skip_element_(in, key, depth);
        }
        thrift_skip_element_(in, value, depth);
    }
}

// Skips a value of any type.
static inline void thrift_skip_(ThriftReader* in, int type, int depth) {
    ThriftField field = {0, 0};
    switch (depth > 0 ? type : THRIFT_STOP) {
    case THRIFT_TRUE:
    case THRIFT_FALSE:
        break;
    case THRIFT_I8:
        thrift_take(in, 1);
        break;
    case THRIFT_I16:
    case THRIFT_I32:
    case THRIFT_I64:
        thrift_varint(in);
        break;
    case THRIFT_DOUBLE:
        thrift_take(in, 8);
        break;
    case THRIFT_STRING:
        thrift_take(in, thrift_varint(in));
        break;
    case THRIFT_LIST:
    case THRIFT_SET:
    case THRIFT_MAP:
        thrift_skip_all_(in, type, depth - 1);
        break;
    case THRIFT_STRUCT:
        while (thrift_field(in, &field)) {
            thrift_skip_(in, field.type, depth - 1);
        }
        break;
    case THRIFT_UUID:
        thrift_take(in, 16);
        break;
    default:
        thrift_wrong(in, depth > 0 ? "a value is of an unknown type" : "values are nested too deeply");
    }
}

static inline void thrift_skip(ThriftReader* in, ThriftField field) {
    thrift_skip_(in, field.type, THRIFT_MAX_DEPTH);
}

#endif
