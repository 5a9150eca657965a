// test_thrift.c -- thrift.h: reads structs in the compact protocol as its description says, and
// never reads past their end, whatever the bytes.
#include "llmc/base/check.h"
#include "llmc/base/rand.h"
#include "llmc/data/thrift.h"
#include "dev/test/lib/test.h"

// In exactly its bytes of memory, so that a sanitizer sees every step beyond them. The caller frees
// data.
static ThriftReader reader(const char* bytes, size_t count, unsigned char** data) {
    *data = (unsigned char*)malloc(count ? count : 1);
    CHECK(*data, "no memory");
    memcpy(*data, bytes, count);
    return thrift_reader(*data, count);
}

TEST(numbers) {
    static const struct {
        const char* bytes;
        size_t count;
        int64_t value;
    } cases[] = {
        {"\x00", 1, 0},
        {"\x01", 1, -1},
        {"\x02", 1, 1},
        {"\xac\x02", 2, 150},
        {"\xff\xff\xff\xff\x0f", 5, INT32_MIN},
        {"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", 10, INT64_MAX},
        {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 10, INT64_MIN},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        unsigned char* data;
        ThriftReader in = reader(cases[i].bytes, cases[i].count, &data);
        const int64_t value = thrift_zigzag(&in);
        EXPECT(value == cases[i].value && !in.wrong && thrift_left(&in) == 0, "case %zu: %lld", i,
               (long long)value);
        in = thrift_reader(data, cases[i].count - 1);
        EXPECT(thrift_zigzag(&in) == 0 || cases[i].count > 1, "case %zu, cut", i);
        EXPECT(in.wrong && thrift_u8(&in) == 0 && thrift_varint(&in) == 0, "case %zu: errors persist", i);
        free(data);
    }
    unsigned char* data;
    ThriftReader in = reader("\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", 11, &data);
    thrift_varint(&in);
    EXPECT(in.wrong && strstr(in.wrong, "64 bits"), "too long");
    free(data);
}

// One struct with a field of every type: read where known, else stepped over.
static const char EVERY[] = "\x11"                           // 1: true
                            "\x12"                           // 2: false
                            "\x13\xfe"                       // 3: i8 -2
                            "\x14\x03"                       // 4: i16 -2
                            "\x15\xac\x02"                   // 5: i32 150
                            "\x16\x04"                       // 6: i64 2
                            "\x17\0\0\0\0\0\0\xf0\x3f"       // 7: double
                            "\x18\x03xyz"                    // 8: string
                            "\x19\x28\x01k\x02ll"            // 9: two strings
                            "\x1a\x31\x01\x02\x01"           // 10: set of three bools, a byte each
                            "\x1b\x02\x85\x01p\x02\x01q\x04" // 11: map of two strings to i32
                            "\x1c\x15\x02\x1c\x00\x00"       // 12: struct of a number and a struct
                            "\x1d"
                            "0123456789abcdef" // 13: UUID
                            "\x05\x80\x01\x08" // 64, as a number of its own: i32 4
                            "\x1b\x00"         // 65: empty map
                            "\x19\xf3\x10"
                            "0123456789abcdef" // 66: list of 16 bytes, its length on its own
                            "\x00!";           // end, and what follows

TEST(fields) {
    unsigned char* data;
    ThriftReader in = reader(EVERY, sizeof(EVERY) - 1, &data);
    ThriftField field = {0, 0};
    static const int64_t wanted[7] = {0, 1, 0, -2, -2, 150, 2};
    int fields = 0;
    while (thrift_field(&in, &field)) {
        fields++;
        if (field.id <= 6) {
            const int64_t number = thrift_number(&in, field);
            EXPECT(number == wanted[field.id], "field %d: %lld", field.id, (long long)number);
        } else if (field.id == 8) {
            const ThriftReader text = thrift_string(&in, field.type);
            EXPECT(thrift_left(&text) == 3 && memcmp(text.at, "xyz", 3) == 0, "a string");
        } else if (field.id == 9) {
            EXPECT(thrift_list(&in, field, THRIFT_STRING) == 2, "a list");
            EXPECT(*thrift_string(&in, THRIFT_STRING).at == 'k' &&
                       *thrift_string(&in, THRIFT_STRING).at == 'l',
                   "");
        } else if (field.id == 64) {
            EXPECT(thrift_number(&in, field) == 4, "a number after a long step");
        } else {
            thrift_skip(&in, field);
        }
    }
    EXPECT(!in.wrong && fields == 16 && field.id == 66, "%d fields, %s", fields, in.wrong ? in.wrong : "");
    EXPECT(thrift_u8(&in) == '!', "what follows the struct");
    free(data);
}

// Reads a struct of unknown fields.
static const char* skip_all(const unsigned char* bytes, size_t count) {
    ThriftReader in = thrift_reader(bytes, count);
    ThriftField field = {0, 0};
    while (thrift_field(&in, &field)) {
        thrift_skip(&in, field);
    }
    return in.wrong;
}

TEST(damage) {
    const size_t whole = sizeof(EVERY) - 2; // without what follows
    for (size_t count = 0; count < whole; count++) {
        unsigned char* data;
        reader(EVERY, count, &data);
        EXPECT(skip_all(data, count), "cut after %zu bytes", count);
        free(data);
    }
    Rand rng = rand_open(5, 1);
    for (int i = 0; i < 20000; i++) {
        unsigned char* data;
        reader(EVERY, whole, &data);
        data[rand_u32(&rng) % whole] = (unsigned char)rand_u32(&rng);
        data[rand_u32(&rng) % whole] ^= (unsigned char)(1 << rand_u32(&rng) % 8);
        skip_all(data, whole); // the sanitizer looks on
        free(data);
    }
}

TEST(wrong_types) {
    static const struct {
        const char *bytes, *wanted;
        size_t count;
    } cases[] = {
        {"\x18\x01z", "a number is of another type", 3},     {"\x1f", "unknown type", 1},
        {"\x19\xf5\xff\xff\x7f", "longer than the data", 5}, {"\x18\x7fz", "end too early", 3},
        {"\x05\x80\x80\x08\x02", "out of range", 5},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        unsigned char* data;
        ThriftReader in = reader(cases[i].bytes, cases[i].count, &data);
        ThriftField field = {0, 0};
        if (thrift_field(&in, &field) && i == 0) {
            EXPECT(thrift_number(&in, field) == 0, "");
        } else {
            thrift_skip(&in, field);
        }
        EXPECT(in.wrong && strstr(in.wrong, cases[i].wanted), "%s instead of %s",
               in.wrong ? in.wrong : "accepted", cases[i].wanted);
        free(data);
    }
    char deep[100];
    memset(deep, 0x1C, sizeof(deep)); // a struct in a struct in a struct
    EXPECT(strstr(skip_all((const unsigned char*)deep, sizeof(deep)), "too deep"), "depth");
}
