/*
gguf_file.h -- a GGUF file in memory: its pairs. gguf_tensors.h has its tensors.

    "GGUF", u32 2 or 3, u64 tensors, u64 pairs
    pairs             key, u32 type, value; an array: u32 type, u64 count, values
    tensor infos      name, u32 dimensions, u64 each (fastest first), u32 type, u64 offset
    data              at a multiple of general.alignment, as each tensor is

Little endian; a string is a u64 length and its bytes. Nothing is trusted: counts, lengths, types,
repeated keys. Names must have 1 to GGUF_NAME - 1 printable bytes. An error ends the program.
*/
#ifndef LLMC_GGUF_FILE_H
#define LLMC_GGUF_FILE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { GGUF_ALIGN = 32, GGUF_NAME = 128, GGUF_MAX_NAMES = 1 << 17 };

// Types of values, as files number them: X(name, bytes; 0: not of a fixed size)
// clang-format off
#define GGUF_TYPES_(X) \
    X(U8, 1) X(I8, 1) X(U16, 2) X(I16, 2) X(U32, 4) X(I32, 4) X(FLOAT, 4) X(BOOL, 1) X(STRING, 0) \
    X(ARRAY, 0) X(U64, 8) X(I64, 8) X(DOUBLE, 8)
#define GGUF_TYPE_VALUE_(name, bytes) GGUF_##name,
// clang-format on
typedef enum { GGUF_TYPES_(GGUF_TYPE_VALUE_) GGUF_TYPES } GgufType;

// Bytes of a file, without a terminating zero.
typedef struct {
    const char* text;
    size_t length;
} GgufText;

typedef struct {
    char name[GGUF_NAME];
    int is_list;
    GgufType type; // of each value
    size_t count;  // values; 1: no list
    const unsigned char* values;
} GgufPair;

typedef struct {
    const char* path;
    unsigned char* map;
    size_t bytes, at; // at: end of what was read
    GgufPair* pairs;  // sorted by name
    size_t num_pairs, num_tensors;
} GgufFile;

// True if a file begins like GGUF.
int gguf_is_file(const char* path);

// Opens a file and reads its header up to the tensor infos.
void gguf_file_open(GgufFile* f, const char* path);
void gguf_file_close(GgufFile* f);

// Read the next part of the header: a number of so many bytes, a name.
uint64_t gguf_take_number(GgufFile* f, size_t bytes);
void gguf_take_name(GgufFile* f, char name[GGUF_NAME]);

// Returns the pair of this key; NULL: none.
const GgufPair* gguf_pair(const GgufFile* f, const char* key);

// Returns number or truth value i. NAN: the pair is NULL, or has no such number.
double gguf_number(const GgufPair* pair, size_t i);

// Returns a string, or the next one of a list: `at` is 0 before the first, and there must be a next
// one. Empty: the pair is NULL, or has none.
GgufText gguf_text(const GgufPair* pair, size_t* at);

// True if the pair is a string with this text.
int gguf_pair_is(const GgufPair* pair, const char* text);

#ifdef __cplusplus
}
#endif

#ifdef GGUF_FILE_IMPLEMENTATION

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/mapped_file.h"

// ---- the header ----

static const unsigned char* gguf_take_(GgufFile* f, uint64_t bytes) {
    CHECK(bytes <= f->bytes - f->at, "%s: the header ends after %zu bytes, wanted %llu more", f->path,
          f->bytes, (unsigned long long)(bytes - (f->bytes - f->at)));
    f->at += bytes;
    return f->map + f->at - bytes;
}

uint64_t gguf_take_number(GgufFile* f, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, gguf_take_(f, bytes), bytes);
    return value;
}

void gguf_take_name(GgufFile* f, char name[GGUF_NAME]) {
    const uint64_t length = gguf_take_number(f, 8);
    CHECK(0 < length && length < GGUF_NAME, "%s: a name has %llu bytes, wanted 1 to %d", f->path,
          (unsigned long long)length, GGUF_NAME - 1);
    memcpy(name, gguf_take_(f, length), length);
    name[length] = '\0';
    for (uint64_t i = 0; i < length; i++) {
        CHECK(' ' <= name[i] && name[i] <= '~', "%s: byte %llu of a name is %d, wanted ASCII", f->path,
              (unsigned long long)i, (unsigned char)name[i]);
    }
}

#define GGUF_TYPE_BYTES_(name, bytes) bytes,
static size_t gguf_value_bytes_(GgufType type) {
    static const unsigned char bytes[GGUF_TYPES] = {GGUF_TYPES_(GGUF_TYPE_BYTES_)};
    return bytes[type];
}

static void gguf_take_pair_(GgufFile* f, GgufPair* pair) {
    gguf_take_name(f, pair->name);
    uint64_t type = gguf_take_number(f, 4);
    pair->is_list = type == GGUF_ARRAY;
    type = pair->is_list ? gguf_take_number(f, 4) : type;
    CHECK(type < GGUF_TYPES && type != GGUF_ARRAY,
          "%s: key %s has values of type %d, wanted numbers or strings", f->path, pair->name, (int)type);
    pair->type = (GgufType)type;
    pair->count = pair->is_list ? gguf_take_number(f, 8) : 1;
    pair->values = f->map + f->at;
    const size_t bytes = gguf_value_bytes_(pair->type);
    CHECK(pair->count <= f->bytes, "%s: key %s: %zu values in %zu bytes", f->path, pair->name, pair->count,
          f->bytes);
    gguf_take_(f, pair->count * bytes);
    for (size_t i = 0; i < pair->count && bytes == 0; i++) {
        gguf_take_(f, gguf_take_number(f, 8));
    }
}

static int gguf_by_name_(const void* a, const void* b) { return strcmp((const char*)a, (const char*)b); }

// Reads the header of a file in memory.
static void gguf_parse_(GgufFile* f) {
    const uint64_t magic = gguf_take_number(f, 4);
    CHECK(magic == 0x46554747, "%s: magic number %#llx, wanted GGUF", f->path, (unsigned long long)magic);
    const uint64_t version = gguf_take_number(f, 4);
    CHECK(version == 2 || version == 3, "%s: version %llu of GGUF, wanted 2 or 3", f->path,
          (unsigned long long)version);
    f->num_tensors = gguf_take_number(f, 8);
    f->num_pairs = gguf_take_number(f, 8);
    const size_t room = f->bytes / 14, most = room < GGUF_MAX_NAMES ? room : GGUF_MAX_NAMES;
    CHECK(f->num_tensors <= most && f->num_pairs <= most,
          "%s: %zu tensors and %zu pairs in %zu bytes, wanted at most %zu", f->path, f->num_tensors,
          f->num_pairs, f->bytes, most);
    f->pairs = (GgufPair*)check_alloc(f->num_pairs + 1, sizeof(GgufPair), f->path);
    for (size_t i = 0; i < f->num_pairs; i++) {
        gguf_take_pair_(f, &f->pairs[i]);
    }
    qsort(f->pairs, f->num_pairs, sizeof(GgufPair), gguf_by_name_);
    for (size_t i = 1; i < f->num_pairs; i++) {
        CHECK(strcmp(f->pairs[i - 1].name, f->pairs[i].name) != 0, "%s: key %s appears twice", f->path,
              f->pairs[i].name);
    }
}

int gguf_is_file(const char* path) {
    char error[ERROR_BYTES], magic[4];
    const int fd = file_open_regular(path, error);
    const int is_gguf = fd >= 0 && read(fd, magic, 4) == 4 && memcmp(magic, "GGUF", 4) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return is_gguf;
}

void gguf_file_open(GgufFile* f, const char* path) {
    char error[ERROR_BYTES];
    memset(f, 0, sizeof(*f));
    f->path = path;
    CHECK(mapped_path(path, &f->map, &f->bytes, error), "%s", error);
    gguf_parse_(f);
}

void gguf_file_close(GgufFile* f) {
    if (f->map) {
        munmap(f->map, f->bytes);
    }
    free(f->pairs);
}

// ---- pairs ----

const GgufPair* gguf_pair(const GgufFile* f, const char* key) {
    return (const GgufPair*)bsearch(key, f->pairs, f->num_pairs, sizeof(GgufPair), gguf_by_name_);
}

double gguf_number(const GgufPair* pair, size_t i) {
    const size_t bytes = pair && i < pair->count ? gguf_value_bytes_(pair->type) : 0;
    const int signed_types = 1 << GGUF_I8 | 1 << GGUF_I16 | 1 << GGUF_I32 | 1 << GGUF_I64;
    uint64_t bits = 0;
    float single;
    double real;
    if (bytes == 0) {
        return (double)NAN;
    }
    memcpy(&bits, pair->values + i * bytes, bytes);
    memcpy(&single, &bits, sizeof(single));
    memcpy(&real, &bits, sizeof(real));
    const int left = 64 - 8 * (int)bytes; // shifted there and back, bits get their sign
    return pair->type == GGUF_FLOAT         ? (double)single
           : pair->type == GGUF_DOUBLE      ? real
           : signed_types >> pair->type & 1 ? (double)((int64_t)(bits << left) >> left)
                                            : (double)bits;
}

GgufText gguf_text(const GgufPair* pair, size_t* at) {
    GgufText text = {"", 0};
    uint64_t length;
    if (pair && pair->type == GGUF_STRING && pair->count > 0) {
        memcpy(&length, pair->values + *at, sizeof(length));
        text.text = (const char*)pair->values + *at + sizeof(length);
        text.length = length;
        *at += sizeof(length) + length;
    }
    return text;
}

int gguf_pair_is(const GgufPair* pair, const char* text) {
    size_t at = 0;
    const GgufText found = gguf_text(pair && !pair->is_list ? pair : NULL, &at);
    return found.length == strlen(text) && memcmp(found.text, text, found.length) == 0;
}

#endif // GGUF_FILE_IMPLEMENTATION

#endif
