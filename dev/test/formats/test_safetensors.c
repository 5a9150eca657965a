// test_safetensors.c -- safetensors.h: tensors read back as written, a file has the layout of the
// format, and 16-bit numbers are rounded correctly. Every fault of a file is an error that names
// it, never a read out of bounds.
//
//     test_formats --write_tensors FILE    writes the tensors for dev/ref/check_safetensors.py
//     test_formats --print_tensors FILE    prints all tensors: name, dtype, shape, values or bytes
#define SAFETENSORS_IMPLEMENTATION

#include <glob.h>
#include <signal.h>
#include <sys/resource.h>

#include "llmc/base/rand.h"
#include "llmc/base/vec.h"
#include "llmc/formats/safetensors.h"
#include "dev/test/lib/test.h"

// A file of this header, with ' for ", and n bytes of data.
static TestFile file_make(const char* header, size_t data_bytes) {
    const uint64_t length = strlen(header);
    TestFile file = {NULL, 8 + length + data_bytes};
    file.data = (unsigned char*)check_alloc(file.bytes, 1, "file");
    memcpy(file.data, &length, 8);
    for (size_t i = 0; i < length; i++) {
        file.data[8 + i] = header[i] == '\'' ? '"' : (unsigned char)header[i];
    }
    for (size_t i = 0; i < data_bytes; i++) {
        file.data[8 + length + i] = (unsigned char)(i + 1);
    }
    return file;
}

// Returns true if the text contains every one of the words, separated by '|'.
static int has_words(const char* text, const char* wanted) {
    char words[1024];
    int ok = 1;
    snprintf(words, sizeof(words), "%s", wanted);
    for (char *save = NULL, *word = strtok_r(words, "|", &save); word; word = strtok_r(NULL, "|", &save)) {
        ok = ok && strstr(text, word);
    }
    return ok;
}

// ---- the checksum ----

TEST(checksum) {
    // from the reference implementation (PyPI xxhash 3), of the first bytes of (7 i^2 + 13 i + i/8)
    // mod 256
    static const struct {
        size_t bytes;
        uint64_t value;
    } cases[] = {
        {1, UINT64_C(0xe934a84adb052768)},   {3, UINT64_C(0xd7506c288cd49551)},
        {4, UINT64_C(0xa9af56653e86c01c)},   {7, UINT64_C(0xeec54f473c926887)},
        {8, UINT64_C(0xfad7a44e6e70f81f)},   {12, UINT64_C(0xef7516befb7115b3)},
        {15, UINT64_C(0x80a19d1d37671dbe)},  {16, UINT64_C(0x5789814ed7d95500)},
        {31, UINT64_C(0x1ebc1bcd7af11bad)},  {32, UINT64_C(0xf2a94d120cbffb78)},
        {33, UINT64_C(0x8f6d91e7b4d6e408)},  {39, UINT64_C(0x5fd89cdf99525a0d)},
        {40, UINT64_C(0x6b544e22d4ce7c1f)},  {44, UINT64_C(0x886a38d1fa1dce32)},
        {47, UINT64_C(0x79351d8d288ff52f)},  {63, UINT64_C(0xcfaf1b5c3f85545c)},
        {64, UINT64_C(0xcefe6bf42869916f)},  {65, UINT64_C(0x4a3c0de05d888f97)},
        {100, UINT64_C(0x0ae8ff5c6ccfcdeb)}, {255, UINT64_C(0x3fbec206646e7ce8)},
        {256, UINT64_C(0x1c96b25ed5418f5b)}, {1000, UINT64_C(0xca2e71a21c395352)},
    };
    unsigned char data[1000];
    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (unsigned char)(i * i * 7 + i * 13 + (i >> 3));
    }
    EXPECT(xxh64("", 0) == UINT64_C(0xef46db3751d8e999), "nothing");
    EXPECT(xxh64("abc", 3) == UINT64_C(0x44bc2cf5ad770999), "abc");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const uint64_t got = xxh64(data, cases[i].bytes);
        EXPECT(got == cases[i].value, "%zu bytes: %016llx", cases[i].bytes, (unsigned long long)got);
    }
    const uint64_t whole = xxh64(data, sizeof(data));
    for (size_t piece = 1; piece < 100; piece++) { // however it is cut
        Xxh64 hash;
        xxh64_open(&hash);
        for (size_t at = 0; at < sizeof(data); at += piece) {
            xxh64_add(&hash, data + at, piece < sizeof(data) - at ? piece : sizeof(data) - at);
        }
        EXPECT(xxh64_value(&hash) == whole, "pieces of %zu", piece);
    }
}

TEST(checksum_of_files) {
    const size_t sizes[] = {0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 700001}; // a block is 2^18
    unsigned char* data = (unsigned char*)check_alloc(700001, 1, "data");
    uint64_t value = 0;
    char error[ERROR_BYTES];
    Rand rng = rand_open(1, 1);
    for (size_t i = 0; i < 700001; i++) {
        data[i] = (unsigned char)rand_u32(&rng);
    }
    for (int i = 0; i < 6; i++) {
        const char* path = test_write("sum.bin", data, sizes[i]);
        EXPECT(file_checksum(path, &value, error) && value == xxh64(data, sizes[i]), "%zu bytes", sizes[i]);
    }
    EXPECT(!file_checksum(test_path("nothing.bin"), &value, error) && strstr(error, "No such file"), "%s",
           error);
    EXPECT(!file_checksum(test_tmpdir(), &value, error) && strstr(error, "a directory"), "%s", error);
    EXPECT(mkfifo(test_path("fifo.bin"), 0666) == 0, "");
    EXPECT(!file_checksum(test_path("fifo.bin"), &value, error) && strstr(error, "not a regular"), "%s",
           error);
    free(data);
}

// ---- numbers of 16 bits ----

typedef struct {
    const char* name;
    float (*widen)(uint16_t);
    uint16_t (*round)(float);
    int fraction_bits, max_exponent; // of the pattern: all ones in the exponent
} Half;

static const Half HALVES[2] = {{"fp16", fp16_to_float, fp16_from_float, 10, 31},
                               {"bf16", bf16_to_float, bf16_from_float, 7, 255}};

// Returns the value that IEEE 754 gives a pattern without its sign. The pattern of infinity has the
// value that follows the largest finite one.
static double half_value(const Half* half, unsigned bits) {
    const int e = (int)(bits >> half->fraction_bits), bias = half->max_exponent / 2;
    const int one = 1 << half->fraction_bits, fraction = (int)bits & (one - 1);
    return ldexp(e ? one + fraction : fraction, (e ? e : 1) - bias - half->fraction_bits);
}

// All 65536 patterns: their value, and back.
static void test_half_patterns(const Half* half) {
    const unsigned infinity = (unsigned)half->max_exponent << half->fraction_bits;
    int wrong_value = 0, wrong_back = 0;
    for (unsigned bits = 0; bits < 0x10000; bits++) {
        const unsigned magnitude = bits & 0x7FFF;
        const float value = half->widen((uint16_t)bits);
        const double wanted = magnitude == infinity ? (double)INFINITY : half_value(half, magnitude);
        wrong_value += magnitude > infinity ? !isnan(value) : (double)fabsf(value) != wanted;
        wrong_value += !signbit(value) != !(bits & 0x8000);
        wrong_back += half->round(value) != bits;
    }
    EXPECT(wrong_value == 0, "%s: %d values", half->name, wrong_value);
    EXPECT(wrong_back == 0, "%s: %d patterns do not come back", half->name, wrong_back);
}

// Between any two neighbors: the middle rounds to the even one, and the values next to the middle
// to their side.
static void test_half_rounding(const Half* half) {
    const unsigned infinity = (unsigned)half->max_exponent << half->fraction_bits;
    int wrong = 0;
    for (unsigned low = 0; low < infinity; low++) {
        const float middle = (float)((half_value(half, low) + half_value(half, low + 1)) / 2);
        const unsigned even = low + (low & 1);
        wrong += half->round(middle) != even || half->round(-middle) != (even | 0x8000);
        wrong += half->round(nextafterf(middle, 0)) != low;
        wrong += half->round(nextafterf(middle, INFINITY)) != low + 1;
    }
    EXPECT(wrong == 0, "%s: %d of %u boundaries", half->name, wrong, infinity);
    EXPECT(half->round(3.4e38f) == infinity || half->max_exponent == 255, "%s: a large number", half->name);
    static const uint32_t nans[] = {0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F802000};
    for (int i = 0; i < 6; i++) {
        const float back = half->widen(half->round(float_of_bits(nans[i])));
        EXPECT(isnan(back) && !signbit(back) == !(nans[i] >> 31), "%s: NaN %08x", half->name, nans[i]);
    }
}

// A checksum of many conversions.
static uint64_t half_fingerprint(const Half* half) {
    Rand rng = rand_open(1, 1);
    Xxh64 hash;
    xxh64_open(&hash);
    for (unsigned i = 0; i < 0x20000; i++) {
        const uint16_t rounded = half->round(float_of_bits(rand_u32(&rng)));
        const uint32_t wide = float_bits(half->widen((uint16_t)i));
        xxh64_add(&hash, &rounded, sizeof(rounded));
        xxh64_add(&hash, &wide, sizeof(wide));
    }
    return xxh64_value(&hash);
}

// The last test: the trainer flushes subnormal floats to zero, and that changes no conversion.
TEST(halves_flushed) {
    const uint64_t before[2] = {half_fingerprint(&HALVES[0]), half_fingerprint(&HALVES[1])};
    vec_flush_denormals();
    EXPECT(half_fingerprint(&HALVES[0]) == before[0], "fp16");
    EXPECT(half_fingerprint(&HALVES[1]) == before[1], "bf16");
}

// ---- writing, and reading it again ----

// The file, byte by byte, as the format's description has it.
TEST(layout) {
    char error[ERROR_BYTES];
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                                 "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                                 "\"b\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[8,10]},"
                                 "\"c\":{\"dtype\":\"U8\",\"shape\":[3,0],\"data_offsets\":[10,10]}}";
    // 1, -2; 1.5
    static const unsigned char data[10] = {0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0, 0xC0, 0x3F};
    const size_t length = strlen(header), begin = (8 + length + 63) / 64 * 64;
    const size_t shape_a[] = {2}, shape_c[] = {3, 0};
    const char* path = test_path("layout.safetensors");
    SafeTensorsWriter writer;
    safetensors_writer_open(&writer, path);
    safetensors_writer_declare(&writer, "a", SAFETENSORS_F32, 1, shape_a);
    safetensors_writer_declare(&writer, "b", SAFETENSORS_BF16, 0, NULL);
    safetensors_writer_declare(&writer, "c", SAFETENSORS_U8, 2, shape_c);
    safetensors_writer_begin(&writer);
    safetensors_write_raw(&writer, data, 8);
    safetensors_write_raw(&writer, data + 8, 2);
    const uint64_t sum = safetensors_writer_commit(&writer);

    const TestFile file = test_read(path);
    uint64_t header_bytes;
    memcpy(&header_bytes, file.data, 8);
    EXPECT(8 + header_bytes == begin && file.bytes == begin + sizeof(data), "%zu bytes", file.bytes);
    EXPECT(file.data[0] == (begin - 8) % 256 && file.data[1] == (begin - 8) / 256, "little endian");
    EXPECT(memcmp(file.data + 8, header, length) == 0, "header: %.*s", (int)length, file.data + 8);
    for (size_t i = 8 + length; i < begin; i++) {
        EXPECT(file.data[i] == ' ', "byte %zu", i);
    }
    EXPECT(memcmp(file.data + begin, data, sizeof(data)) == 0, "data");
    uint64_t again = 0;
    EXPECT(file_checksum(path, &again, error) && again == sum && sum == xxh64(file.data, file.bytes),
           "checksum");
    EXPECT(access(test_path("layout.safetensors.part"), F_OK) != 0, "the temporary file is gone");
    free(file.data);
}

// Every pattern of 16 bits is among these bits, for every dtype.
static unsigned char* some_bytes(size_t bytes) {
    unsigned char* data = (unsigned char*)check_alloc(bytes, 1, "data");
    Rand rng = rand_open(3, 1);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (unsigned char)rand_u32(&rng);
    }
    return data;
}

typedef struct {
    int ndim;
    size_t shape[SAFETENSORS_MAX_DIMS];
    size_t elements;
} Shape;

static const Shape SHAPES[] = {
    {0, {0}, 1},
    {1, {0}, 0},
    {1, {1}, 1},
    {2, {3, 5}, 15},
    {3, {7, 0, 2}, 0},
    {8, {1, 2, 1, 3, 1, 2, 1, 1}, 12},
    {2, {2, 16385}, 32770},
    {4, {0, 1u << 31, 1u << 31, 1}, 0},
};
enum { NUM_SHAPES = sizeof(SHAPES) / sizeof(SHAPES[0]) };

// In an order that keeps data aligned.
TEST(round_trip_raw) {
    static const size_t widths[4] = {8, 4, 2, 1};
    unsigned char* data = some_bytes(32770 * 8);
    char name[64];
    SafeTensorsWriter writer;
    SafeTensors st;
    const char* path = test_path("raw.safetensors");
    safetensors_writer_open(&writer, path);
    for (int writing = 0; writing < 2; writing++) {
        for (int k = 0; k < 4 * SAFETENSORS_DTYPES * NUM_SHAPES; k++) {
            const SafeTensorsDtype dtype = (SafeTensorsDtype)(k / NUM_SHAPES % SAFETENSORS_DTYPES);
            const Shape* shape = &SHAPES[k % NUM_SHAPES];
            const size_t bytes = shape->elements * safetensors_dtype_bytes(dtype), half = bytes / 2;
            snprintf(name, sizeof(name), "%s.%d", safetensors_dtype_name(dtype), k % NUM_SHAPES);
            if (safetensors_dtype_bytes(dtype) != widths[k / NUM_SHAPES / SAFETENSORS_DTYPES]) {
                continue;
            }
            if (!writing) {
                safetensors_writer_declare(&writer, name, dtype, shape->ndim, shape->shape);
            } else { // in two pieces
                safetensors_write_raw(&writer, data, half);
                safetensors_write_raw(&writer, data + half, bytes - half);
            }
        }
        if (!writing) {
            safetensors_writer_begin(&writer);
        }
    }
    safetensors_writer_commit(&writer);

    safetensors_open(&st, path);
    EXPECT(st.num_tensors == SAFETENSORS_DTYPES * NUM_SHAPES, "%zu tensors", st.num_tensors);
    for (int k = 0; k < SAFETENSORS_DTYPES * NUM_SHAPES; k++) {
        const SafeTensorsDtype dtype = (SafeTensorsDtype)(k / NUM_SHAPES);
        const Shape* shape = &SHAPES[k % NUM_SHAPES];
        snprintf(name, sizeof(name), "%s.%d", safetensors_dtype_name(dtype), k % NUM_SHAPES);
        const SafeTensorsView* view = safetensors_require(&st, name, shape->ndim, shape->shape);
        EXPECT(view == safetensors_find(&st, name) && strcmp(view->name, name) == 0, "%s", name);
        EXPECT(view->elements == shape->elements && view->dtype == dtype, "%s", name);
        EXPECT((uintptr_t)view->data % safetensors_dtype_bytes(dtype) == 0, "%s is aligned", name);
        EXPECT(memcmp(view->data, data, view->bytes) == 0, "%s", name);
    }
    safetensors_close(&st);
    free(data);
}

// The elements of a tensor, rounded to its type.
static void write_f32(SafeTensorsWriter* writer, SafeTensorsDtype dtype, const float* data, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const uint16_t narrow =
            dtype == SAFETENSORS_BF16 ? bf16_from_float(data[i]) : fp16_from_float(data[i]);
        const void* from = dtype == SAFETENSORS_F32 ? (const void*)&data[i] : &narrow;
        safetensors_write_raw(writer, from, safetensors_dtype_bytes(dtype));
    }
}

// fp32 into each type and back, element by element on one side, in pieces on the other.
TEST(round_trip_f32) {
    char error[ERROR_BYTES];
    enum { N = 40003 };
    static const SafeTensorsDtype dtypes[3] = {SAFETENSORS_F32, SAFETENSORS_F16, SAFETENSORS_BF16};
    float *data = (float*)check_alloc(N, 4, "data"), *back = (float*)check_alloc(N, 4, "data");
    const size_t shape[1] = {N};
    const char* path = test_path("f32.safetensors");
    SafeTensorsWriter writer;
    SafeTensors st;
    for (size_t i = 0; i < N; i++) {
        data[i] = rand_normal(1, 2, i);
    }
    safetensors_writer_open(&writer, path);
    for (int i = 0; i < 3; i++) {
        safetensors_writer_declare(&writer, safetensors_dtype_name(dtypes[i]), dtypes[i], 1, shape);
    }
    safetensors_writer_begin(&writer);
    for (int i = 0; i < 3; i++) {
        write_f32(&writer, dtypes[i], data, N);
    }
    const uint64_t sum = safetensors_writer_commit(&writer);
    uint64_t again = 0;
    EXPECT(file_checksum(path, &again, error) && again == sum, "checksum");

    safetensors_open(&st, path);
    for (int i = 0; i < 3; i++) {
        const SafeTensorsView* view = safetensors_require(&st, safetensors_dtype_name(dtypes[i]), 1, shape);
        size_t wrong = 0;
        for (int part = 0; part < 2; part++) {
            if (part) {
                memset(back, 0, N * 4);
                safetensors_read_f32_part(view, 0, 7, back);
                safetensors_read_f32_part(view, 7, 0, back + 7);
                safetensors_read_f32_part(view, 7, N - 7, back + 7);
            } else {
                safetensors_read_f32(view, back);
            }
            for (size_t k = 0; k < N; k++) {
                wrong += back[k] != (i == 0   ? data[k]
                                     : i == 1 ? fp16_to_float(fp16_from_float(data[k]))
                                              : bf16_to_float(bf16_from_float(data[k])));
            }
        }
        EXPECT(wrong == 0, "%s: %zu numbers", view->name, wrong);
    }
    safetensors_close(&st);
    free(back);
    free(data);
}

TEST(metadata) {
    const char* path = test_path("metadata.safetensors");
    const char* odd = "line\nquote\" back\\slash \x01 \xC3\xA9 \xF0\x9F\x8C\x8D";
    SafeTensorsWriter writer;
    SafeTensors st;
    safetensors_writer_open(&writer, path);
    safetensors_writer_metadata(&writer, "step", "1000");
    safetensors_writer_metadata(&writer, "a key", odd);
    safetensors_writer_metadata(&writer, "nothing", "");
    safetensors_writer_begin(&writer);
    safetensors_writer_commit(&writer);
    safetensors_open(&st, path);
    EXPECT(st.num_tensors == 0 && st.num_metadata == 4, "%zu %zu", st.num_tensors, st.num_metadata);
    EXPECT(strcmp(safetensors_metadata(&st, "format"), "pt") == 0, "format");
    EXPECT(strcmp(safetensors_metadata(&st, "step"), "1000") == 0, "step");
    EXPECT(strcmp(safetensors_metadata(&st, "a key"), odd) == 0, "%s", safetensors_metadata(&st, "a key"));
    EXPECT(strcmp(safetensors_metadata(&st, "nothing"), "") == 0, "nothing");
    EXPECT(!safetensors_metadata(&st, "absent") && !safetensors_find(&st, "absent"), "absent");
    safetensors_close(&st);
}

// ---- headers of others ----

// Odd but right: any order, blanks, escapes, no metadata or null, keys of others, no alignment.
TEST(foreign) {
    const TestFile file =
        file_make(" \n{ 'z.\\u00e9\\ud83c\\udf0d\\/' :\n{'shape':[ 1 , 2],\t'data_offsets':[1,5],"
                  "'dtype':'I16','note':{'x':[null]}},'e':{'dtype':'F32','shape':[0],'data_offsets':[5,5]},"
                  "'__metadata__':null,\r'a':{'data_offsets':[0,1],'dtype':'BOOL','shape':[]}} \n ",
                  5);
    SafeTensors st;
    safetensors_open(&st, test_write("foreign.safetensors", file.data, file.bytes));
    const SafeTensorsView* z = safetensors_find(&st, "z.\xC3\xA9\xF0\x9F\x8C\x8D/");
    int16_t values[2];
    EXPECT(st.num_tensors == 3 && st.num_metadata == 0 && z, "%zu tensors", st.num_tensors);
    if (z) {
        memcpy(values, z->data, sizeof(values));
        EXPECT(values[0] == 0x0302 && values[1] == 0x0504, "%x %x", values[0], values[1]);
    }
    EXPECT(safetensors_find(&st, "a") && safetensors_find(&st, "a")->data[0] == 1, "a");
    EXPECT(safetensors_find(&st, "e") && safetensors_find(&st, "e")->elements == 0, "e");
    safetensors_close(&st);
    free(file.data);
}

// The first and the last character of each length in UTF-8, as escapes; in either case of digits.
TEST(unicode) {
    static const char wanted[] = "\x01\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEE\x80\x80\xEF\xBF\xBF"
                                 "\xF0\x90\x80\x80\xF4\x8F\xBF\xBF\"\\/\b\f\n\r\t";
    const TestFile file =
        file_make("{'__metadata__':{'k':'\\u0001\\u007f\\u0080\\u07FF\\u0800\\ud7ff\\ue000\\uFFfF"
                  "\\ud800\\udc00\\uDBFF\\uDFFF\\\'\\\\\\/\\b\\f\\n\\r\\t'}}",
                  0);
    SafeTensors st;
    safetensors_open(&st, test_write("unicode.safetensors", file.data, file.bytes));
    EXPECT(strcmp(safetensors_metadata(&st, "k"), wanted) == 0, "%s", safetensors_metadata(&st, "k"));
    safetensors_close(&st);
    free(file.data);
}

// A file cannot be opened: the error starts with its name and contains the words.
static void expect_refused(const char* path, const char* words) {
    SafeTensors st;
    const int opened = safetensors_try_open(&st, path);
    const size_t length = strlen(path);
    EXPECT(!opened, "wanted: %s", words);
    if (opened) {
        safetensors_close(&st);
        return;
    }
    EXPECT(strncmp(st.error, path, length) == 0 && strncmp(st.error + length, ": ", 2) == 0, "%s", st.error);
    EXPECT(has_words(st.error, words), "\"%s\", wanted \"%s\"", st.error, words);
    EXPECT(!strchr(st.error, '\n'), "one line: %s", st.error);
}

#define ENTRY "'dtype':'F32','shape':[1],'data_offsets':[0,4]"
#define TENSOR(name) "'" name "':{" ENTRY "}"

TEST(bad_headers) {
    static const struct {
        const char* header;
        size_t data_bytes;
        const char* words;
    } cases[] = {
        // syntax
        {"", 0, "byte 8: found the end of the text, wanted '{'"},
        {" []", 0, "byte 9: found '[', wanted '{'"},
        {"[]", 0, "byte 8: found '[', wanted '{'"},
        {"{", 0, "byte 9: found the end of the text"},
        {"{}x", 0, "byte 10: found 'x', wanted nothing but blanks"},
        {"{}{}", 0, "byte 10: found '{'"},
        {"{,}", 0, "byte 9: found ',', wanted '\"'"},
        {"{" TENSOR("a") ",}", 4, "found '}', wanted '\"'"},
        {"{" TENSOR("a") " " TENSOR("b") "}", 4, "found '\"', wanted ',' or '}'"},
        {"{'a' {" ENTRY "}}", 4, "byte 13: found '{', wanted ':'"},
        {"{'a':[]}", 0, "byte 13: found '[', wanted '{'"},
        {"{'a':null}", 0, "byte 13: found 'n', wanted '{'"},
        {"{'a':{" ENTRY "}", 4, "found the end of the text, wanted ',' or '}'"},
        {"{'a", 0, "byte 11: found the end of the text, wanted the end of a string"},
        {"{a:{" ENTRY "}}", 4, "byte 9: found 'a', wanted '\"'"},
        {"{/**/}", 0, "byte 9: found '/'"},
        {"{'a':{'dtype':'F32','shape':[1,],'data_offsets':[0,4]}}", 4, "found ']', wanted a whole number"},
        {"{'a':{'dtype':'F32','shape':[1 2],'data_offsets':[0,4]}}", 4, "found '2', wanted ',' or ']'"},
        {"{'a':{'dtype':'F32','shape':[1,'data_offsets':[0,4]}}", 4, "found '\"', wanted a whole number"},
        {"{'a':{'dtype':'F32','shape':{},'data_offsets':[0,4]}}", 4, "found '{', wanted '['"},
        // strings
        {"{'\\x':{" ENTRY "}}", 4, "byte 11: found 'x', wanted one of"},
        {"{'\\", 0, "byte 11: found the end of the text"},
        {"{'\\u12", 0, "wanted \\u and four digits"},
        {"{'\\u12g4':{" ENTRY "}}", 4, "byte 10: found '\\'|four digits"},
        {"{'\\u0000':{" ENTRY "}}", 4, "not zero"},
        {"{'\\ud83c':{" ENTRY "}}", 4, "a pair"},
        {"{'\\ud83c\\u0041':{" ENTRY "}}", 4, "a pair"},
        {"{'\\udf0d\\ud83c':{" ENTRY "}}", 4, "a pair"},
        {"{'\\ud800':{" ENTRY "}}", 4, "a pair"},
        {"{'\\udbff\\udbff':{" ENTRY "}}", 4, "a pair"},
        {"{'\\udc00':{" ENTRY "}}", 4, "a pair"},
        {"{'\\udfff\\udfff':{" ENTRY "}}", 4, "a pair"},
        {"{'a\nb':{" ENTRY "}}", 4, "byte 11: found the byte 0x0a, wanted no control character"},
        {"{'a\\nb':{" ENTRY "}}", 4, "byte 9: found '\"', wanted a name without control characters"},
        {"{'\\u007f':{" ENTRY "}}", 4, "a name without control characters"},
        {"{'\xFF':{" ENTRY "}}", 4, "byte 10: found the byte 0xff, wanted UTF-8"},
        {"{'\xC0\xAF':{" ENTRY "}}", 4, "wanted UTF-8"},
        {"{'\xED\xA0\x80':{" ENTRY "}}", 4, "wanted UTF-8"},
        {"{'\xE2\x82", 0, "wanted UTF-8"},
        {"{'':{" ENTRY "}}", 4, "byte 9: a name of 0 bytes, wanted 1 to 511"},
        // numbers
        {"{'a':{'dtype':'F32','shape':[-1],'data_offsets':[0,4]}}", 4, "found '-', wanted a whole number"},
        {"{'a':{'dtype':'F32','shape':[1.0],'data_offsets':[0,4]}}", 4, "found '.', wanted ',' or ']'"},
        {"{'a':{'dtype':'F32','shape':[1e0],'data_offsets':[0,4]}}", 4, "found 'e'"},
        {"{'a':{'dtype':'F32','shape':[01],'data_offsets':[0,4]}}", 4, "found '1', wanted no digits after"},
        {"{'a':{'dtype':'F32','shape':['1'],'data_offsets':[0,4]}}", 4, "found '\"', wanted a whole number"},
        {"{'a':{'dtype':'F32','shape':[18446744073709551616],'data_offsets':[0,4]}}", 4,
         "a number above 18446744073709551615"},
        {"{'a':{'dtype':'F32','shape':[99999999999999999999999999],'data_offsets':[0,4]}}", 4,
         "a number above"},
        // entries
        {"{'a':{}}", 0, "tensor a: no dtype"},
        {"{'a':{'dtype':'F32','data_offsets':[0,4]}}", 4, "tensor a: no shape"},
        {"{'a':{'dtype':'F32','shape':[1]}}", 4, "tensor a: no data_offsets"},
        {"{'a':{" ENTRY ",'dtype':'F32'}}", 4, "tensor a: key dtype appears twice"},
        {"{'a':{" ENTRY ",'shape':[1]}}", 4, "tensor a: key shape appears twice"},
        {"{'a':{" ENTRY ",'strides':[1}}}", 4, "found '}', wanted ',' or ']'"},
        {"{'a':{'dtype':'f32','shape':[1],'data_offsets':[0,4]}}", 4,
         "tensor a: dtype f32, wanted F32, F16 or BF16"},
        {"{'a':{'dtype':'F4','shape':[8],'data_offsets':[0,4]}}", 4,
         "tensor a: dtype F4, wanted F32, F16 or BF16"},
        {"{'a':{'dtype':1,'shape':[1],'data_offsets':[0,4]}}", 4, "found '1', wanted '\"'"},
        {"{'a':{'dtype':'F32','shape':[1,1,1,1,1,1,1,1,1],'data_offsets':[0,4]}}", 4, "more than 8 numbers"},
        {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[4]}}", 4, "tensor a: 1 data_offsets, wanted 2"},
        {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[]}}", 4, "tensor a: 0 data_offsets, wanted 2"},
        {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[0,4,8]}}", 4, "more than 2 numbers"},
        // sizes and places
        {"{'a':{'dtype':'F32','shape':[4294967296,4294967296],'data_offsets':[0,4]}}", 4,
         "tensor a: shape (4294967296, 4294967296) is too large"},
        {"{'a':{'dtype':'F32','shape':[4611686018427387905],'data_offsets':[0,4]}}", 4,
         "tensor a: shape (4611686018427387905) is too large"}, // 4 bytes, if the product wrapped
        {"{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,4]}}", 4,
         "tensor a: 4 bytes, wanted 8 for F32 of shape (2)"},
        {"{'a':{'dtype':'F32','shape':[0],'data_offsets':[0,4]}}", 4, "tensor a: 4 bytes, wanted 0"},
        {"{'a':{'dtype':'F32','shape':[],'data_offsets':[0,0]}}", 0, "tensor a: 0 bytes, wanted 4"},
        {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[4,0]}}", 4, "tensor a: data_offsets [4, 0]"},
        {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[0,4]}}", 3,
         "tensor a: data_offsets [0, 4] in 3 bytes of data|truncated"},
        {"{'a':{'dtype':'U8','shape':[4],'data_offsets':[18446744073709551612,18446744073709551615]}}", 4,
         "tensor a: data_offsets [18446744073709551612"},
        {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[4,8]}}", 8,
         "tensor a: starts at byte 4 of the data, wanted 0: a hole"},
        {"{'a':{'dtype':'U8','shape':[4],'data_offsets':[0,4]},'b':{'dtype':'U8','shape':[4],"
         "'data_offsets':[3,7]}}",
         7, "tensor b: starts at byte 3 of the data, wanted 4: an overlap"},
        {"{'a':{'dtype':'U8','shape':[4],'data_offsets':[0,4]},'b':{'dtype':'U8','shape':[4],"
         "'data_offsets':[5,9]}}",
         9, "tensor b: starts at byte 5 of the data, wanted 4: a hole"},
        {"{" TENSOR("a") "," TENSOR("b") "}", 4, "starts at byte 0 of the data, wanted 4: an overlap"},
        {"{'a':{'dtype':'U8','shape':[4],'data_offsets':[0,4]},'e':{'dtype':'U8','shape':[0],"
         "'data_offsets':[2,2]}}",
         4, "tensor e: starts at byte 2 of the data, wanted 4: an overlap"},
        {"{" TENSOR("a") "}", 5, "1 bytes after the last tensor, wanted none"},
        {"{}", 1, "1 bytes after the last tensor"},
        {"{" TENSOR("a") ",'a':{'dtype':'F32','shape':[1],'data_offsets':[4,8]}}", 8,
         "tensor a appears twice"},
        {"{" TENSOR("a") ",'\\u0061':{'dtype':'F32','shape':[1],'data_offsets':[4,8]}}", 8,
         "tensor a appears twice"},
        // metadata
        {"{'__metadata__':[]}", 0, "found '[', wanted '{'"},
        {"{'__metadata__':{'a':1}}", 0, "found '1', wanted '\"'"},
        {"{'__metadata__':{'a':{}}}", 0, "found '{', wanted '\"'"},
        {"{'__metadata__':{'a':'1','b':'2','a':'3'}}", 0, "key a appears twice"},
        {"{'__metadata__':{},'__metadata__':{}}", 0, "__metadata__ appears twice"},
        {"{'__metadata__':{'a':'1'}", 0, "found the end of the text"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const TestFile file = file_make(cases[i].header, cases[i].data_bytes);
        expect_refused(test_write("bad.safetensors", file.data, file.bytes), cases[i].words);
        free(file.data);
    }
}

TEST(bad_files) {
    static const unsigned char zero[16] = {0};
    const uint64_t lengths[] = {100000001, 9, UINT64_MAX, (uint64_t)1 << 63, 0x4847464544434241};
    expect_refused(test_path("missing.safetensors"), "cannot read: No such file");
    expect_refused(test_tmpdir(), "a directory, wanted a file");
    EXPECT(mkfifo(test_path("fifo"), 0666) == 0, "a FIFO, which must not be waited for");
    expect_refused(test_path("fifo"), "fifo: not a regular file");
    expect_refused(test_write("empty.safetensors", "", 0), "0 bytes, wanted a safetensors file");
    expect_refused(test_write("short.safetensors", zero, 7), "7 bytes, wanted a safetensors file");
    expect_refused(test_write("zero.safetensors", zero, 8), "byte 8: found the end of the text, wanted '{'");
    for (int i = 0; i < 5; i++) {
        unsigned char bytes[16] = {0};
        char words[64];
        memcpy(bytes, &lengths[i], 8);
        snprintf(words, sizeof(words), "a header of %llu bytes", (unsigned long long)lengths[i]);
        expect_refused(test_write("length.safetensors", bytes, 16), words);
    }
    // a header that is in the file (a hole on the disk) and yet too long
    const char* sparse = test_write("sparse.safetensors", &lengths[0], 8);
    EXPECT(truncate(sparse, 100000009) == 0, "truncate");
    expect_refused(sparse, "a header of 100000001 bytes, wanted at most 100000000, in a file of 100000009");
    // names as long as they may be, and longer
    for (size_t length = 511; length <= 512; length++) {
        char header[1024] = "{'";
        memset(header + 2, 'n', length);
        strcpy(header + 2 + length, "':{" ENTRY "}}");
        const TestFile file = file_make(header, 4);
        const char* path = test_write("long.safetensors", file.data, file.bytes);
        SafeTensors st;
        if (length == 512) {
            expect_refused(path, "byte 9: a name of 512 bytes, wanted 1 to 511");
        } else if (safetensors_try_open(&st, path)) {
            safetensors_close(&st);
        } else {
            EXPECT(0, "%s", st.error);
        }
        free(file.data);
    }
}

// ---- damage ----

// Opens a file that lies in exactly its bytes of memory, so that the address sanitizer sees all
// that is read.
static int memory_open(SafeTensors* st, const unsigned char* data, size_t bytes) {
    memset(st, 0, sizeof(*st));
    st->path = safetensors_copy_("memory");
    st->map = (unsigned char*)malloc(bytes ? bytes : 1);
    memcpy(st->map, data, bytes);
    st->map_bytes = bytes;
    return safetensors_parse_(st);
}

static void memory_close(SafeTensors* st) {
    free(st->map);
    st->map = NULL;
    safetensors_close(st);
}

// Reads everything that an opened file offers, within bounds.
static void read_all(const SafeTensors* st) {
    size_t total = 0;
    for (size_t i = 0; i < st->num_tensors; i++) {
        const SafeTensorsView* view = &st->tensors[i];
        total += view->bytes;
        EXPECT(view->data >= st->map + 8 && view->bytes <= (size_t)(st->map + st->map_bytes - view->data),
               "%s", view->name);
        volatile uint64_t sum = xxh64(view->data, view->bytes);
        (void)sum;
        if (view->dtype <= SAFETENSORS_BF16) {
            float* wide = (float*)malloc(view->elements * 4 + 1);
            safetensors_read_f32(view, wide);
            free(wide);
        }
        EXPECT(safetensors_find(st, view->name) == view, "%s", view->name);
    }
    EXPECT(total <= st->map_bytes, "%zu bytes", total);
    for (size_t i = 0; i < st->num_metadata; i++) {
        EXPECT(safetensors_metadata(st, st->metadata[i].key) == st->metadata[i].value, "metadata");
    }
}

// Every other value of every byte; each of them is refused or harmless. A change of the data is no
// concern of the header: it is the checksum that sees it.
static void test_flips(TestFile good) {
    int accepted = 0, refused = 0;
    for (size_t at = 0; at < good.bytes; at++) {
        for (int flip = 1; flip < 256; flip++) {
            SafeTensors st;
            good.data[at] ^= (unsigned char)flip;
            if (memory_open(&st, good.data, good.bytes)) {
                read_all(&st);
                accepted++;
            } else {
                EXPECT(strncmp(st.error, "memory: ", 8) == 0 && st.error[8], "byte %zu: %s", at, st.error);
                refused++;
            }
            memory_close(&st);
            good.data[at] ^= (unsigned char)flip;
        }
    }
    EXPECT(accepted > 0 && refused > accepted, "%d accepted, %d refused", accepted, refused);
}

// A file cut at any length is refused, in memory and on disk.
static void test_truncations(TestFile good) {
    for (size_t bytes = 0; bytes < good.bytes; bytes++) {
        SafeTensors st;
        EXPECT(!memory_open(&st, good.data, bytes), "%zu bytes", bytes);
        memory_close(&st);
        expect_refused(test_write("truncated.safetensors", good.data, bytes), "");
    }
    unsigned char* longer = (unsigned char*)check_alloc(good.bytes + 1, 1, "copy");
    memcpy(longer, good.data, good.bytes);
    expect_refused(test_write("longer.safetensors", longer, good.bytes + 1), "1 bytes after the last tensor");
    free(longer);
}

TEST(damage) {
    const TestFile good = file_make("{'__metadata__':{'format':'pt','\\u00e9':'\\n'},"
                                    "'wte.weight':{'dtype':'F32','shape':[2,1],'data_offsets':[0,8]},"
                                    "'s':{'dtype':'F16','shape':[],'data_offsets':[8,10]},"
                                    "'n':{'dtype':'U8','shape':[0],'data_offsets':[10,10]}}  ",
                                    10);
    SafeTensors st;
    EXPECT(memory_open(&st, good.data, good.bytes), "%s", st.error);
    read_all(&st);
    memory_close(&st);
    test_flips(good);
    test_truncations(good);
    free(good.data);
}

// ---- finding and requiring ----

// Writes tensors of one element, of the given names, whose values are 1, 2, ...
static const char* write_named(const char* file, const char* const* names, size_t count) {
    const size_t shape[2] = {1, 1};
    const char* path = test_path(file);
    SafeTensorsWriter writer;
    safetensors_writer_open(&writer, path);
    for (size_t i = 0; i < count; i++) {
        safetensors_writer_declare(&writer, names[i], SAFETENSORS_F32, 2, shape);
    }
    safetensors_writer_begin(&writer);
    for (size_t i = 0; i < count; i++) {
        const float value = (float)(i + 1);
        safetensors_write_raw(&writer, &value, sizeof(value));
    }
    safetensors_writer_commit(&writer);
    return path;
}

static float value_of(const SafeTensorsView* view) {
    float value = NAN;
    if (view && view->elements == 1) {
        safetensors_read_f32(view, &value);
    }
    return value;
}

typedef struct {
    const char* path;
    const char* name;
    int ndim;
    size_t shape[2];
} Requirement;

static void body_open(const void* path) {
    SafeTensors st;
    safetensors_open(&st, (const char*)path);
}

static void body_require(const void* arg) {
    const Requirement* r = (const Requirement*)arg;
    SafeTensors st;
    safetensors_open(&st, r->path);
    safetensors_require(&st, r->name, r->ndim, r->shape);
}

static void body_set_require(const void* arg) {
    const Requirement* r = (const Requirement*)arg;
    SafeTensorsSet set;
    safetensors_set_open(&set, r->path, "model");
    safetensors_set_require(&set, r->name, r->ndim, r->shape);
}

static void expect_requirement(Requirement r, const char* words) {
    EXPECT(test_dies(body_require, &r, EXIT_FAILURE, words), "%s", words);
    EXPECT(test_dies(body_set_require, &r, EXIT_FAILURE, words), "%s", words);
}

TEST(requirements) {
    static const char* const names[] = {"transformer.h.3.attn.c_attn.weight"};
    const char* path = write_named("require.safetensors", names, 1);
    const char* name = names[0];
    expect_requirement((Requirement){path, name, 2, {1024, 3072}},
                       "require.safetensors: tensor transformer.h.3.attn.c_attn.weight is (1, 1), wanted "
                       "(1024, 3072)");
    expect_requirement((Requirement){path, name, 1, {1, 0}}, "is (1, 1), wanted (1)");
    expect_requirement((Requirement){path, name, 0, {0, 0}}, "is (1, 1), wanted ()");
    expect_requirement((Requirement){path, "ln_f.bias", 1, {768, 0}},
                       "require.safetensors: no tensor ln_f.bias, wanted one of shape (768)");
    expect_requirement((Requirement){test_path("missing"), name, 1, {1, 0}}, "missing: cannot read: No such");
    EXPECT(test_dies(body_open, test_tmpdir(), EXIT_FAILURE, "error: |a directory, wanted a file"),
           "a directory");
}

static void body_read_integers(const void* path) {
    SafeTensors st;
    float value[2];
    safetensors_open(&st, (const char*)path);
    safetensors_read_f32(safetensors_find(&st, "state"), value);
}

TEST(wrong_dtype) {
    const TestFile file = file_make("{'state':{'dtype':'I64','shape':[1],'data_offsets':[0,8]}}", 8);
    const char* path = test_write("state.safetensors", file.data, file.bytes);
    EXPECT(test_dies(body_read_integers, path, EXIT_FAILURE,
                     "state.safetensors: tensor state is I64, wanted F32, F16 or BF16"),
           "as fp32");
    free(file.data);
}

// ---- models in several files ----

// Makes a directory with two shards: a.safetensors with x and y, b.safetensors with z and a y of
// its own.
static void make_shards(const char* name) {
    static const char *const a[] = {"transformer.x", "y"}, *const b[] = {"spare", "y", "z"};
    char path[128];
    EXPECT(mkdir(test_path(name), 0777) == 0, "%s", name);
    snprintf(path, sizeof(path), "%s/a.safetensors", name);
    write_named(path, a, 2);
    snprintf(path, sizeof(path), "%s/b.safetensors", name);
    write_named(path, b, 3);
}

static const char* write_index(const char* text) {
    char json[4096];
    size_t n = 0;
    for (; text[n] && n < sizeof(json); n++) {
        json[n] = text[n] == '\'' ? '"' : text[n];
    }
    test_write("model/model.safetensors.index.json", json, n);
    return test_path("model");
}

TEST(set) {
    SafeTensorsSet set;
    make_shards("model");
    const char* path = write_index("{'metadata':{'total_size':16,'more':[1.5e-3,-0,true,null,{'\\n':[]}]},\n"
                                   "'weight_map':{'z':'b.safetensors','transformer.x':'a.safetensors',"
                                   "'y':'b.safetensors'},'other':false}\n");
    safetensors_set_open(&set, path, "model");
    EXPECT(set.num_files == 2 && set.num_places == 3, "%zu files", set.num_files);
    EXPECT(value_of(safetensors_set_find(&set, "transformer.x")) == 1, "transformer.x");
    EXPECT(value_of(safetensors_set_find(&set, "y")) == 2, "y of the file that the index names");
    EXPECT(value_of(safetensors_set_find(&set, "z")) == 3, "z");
    EXPECT(!safetensors_set_find(&set, "spare") && !safetensors_set_find(&set, "w"), "not in the index");
    safetensors_set_close(&set);

    const char* one = write_named("model/model.safetensors", (const char* const[]){"x"}, 1);
    safetensors_set_open(&set, path, "model"); // one file comes before an index
    EXPECT(set.num_files == 1 && value_of(safetensors_set_find(&set, "x")) == 1, "one file");
    EXPECT(!safetensors_set_find(&set, "z"), "nothing else");
    safetensors_set_close(&set);
    safetensors_set_open(&set, one, "model");
    EXPECT(value_of(safetensors_set_find(&set, "x")) == 1, "the file itself");
    safetensors_set_close(&set);
    unlink(one);
}

static void expect_set_refused(const char* path, const char* words) {
    SafeTensorsSet set;
    if (safetensors_set_try_open(&set, path, "model")) {
        EXPECT(0, "opened, wanted: %s", words);
        safetensors_set_close(&set);
        return;
    }
    EXPECT(strncmp(set.error, path, strlen(path)) == 0, "%s", set.error);
    EXPECT(has_words(set.error, words), "\"%s\", wanted \"%s\"", set.error, words);
}

TEST(bad_sets) {
    static const char* const cases[][2] = {
        {"", "index.json: byte 0: found the end of the text, wanted '{'"},
        {"[]", "byte 0: found '[', wanted '{'"},
        {"{}", "index.json: no weight_map"},
        {"{'weight_map':{}}", "index.json: no weight_map"},
        {"{'weight_map':[]}", "found '[', wanted '{'"},
        {"{'weight_map':{'x':1}}", "found '1', wanted '\"'"},
        {"{'weight_map':{'y':'a.safetensors'}} x", "found 'x', wanted nothing but blanks"},
        {"{'weight_map':{'y':'a.safetensors'},'weight_map':{'y':'a.safetensors'}}",
         "weight_map appears twice"},
        {"{'weight_map':{'y':'a.safetensors','y':'b.safetensors'}}", "key y appears twice"},
        {"{'weight_map':{'w':'a.safetensors'}}", "index.json: tensor w is not in |/model/a.safetensors"},
        {"{'weight_map':{'y':'c.safetensors'}}", "/model/c.safetensors: cannot read: No such file"},
        {"{'weight_map':{'y':'../model/a.safetensors'}}",
         "index.json: tensor y: a file called|beside the index"},
        {"{'weight_map':{'y':''}}", "a file called \"\""},
        {"{'weight_map':{'y':'.'}}", "a directory, wanted a file"},
        {"{'weight_map':{'y':'model.safetensors.index.json'}}", "wanted at most|not a safetensors file"},
        {"{'metadata':}", "found '}', wanted a value"},
        {"{'metadata':-}", "found '}', wanted a digit"},
        {"{'metadata':1.}", "wanted a digit"},
        {"{'metadata':1e}", "wanted a digit"},
        {"{'metadata':01}", "found '1'"},
        {"{'metadata':nul}", "wanted a value"},
        {"{'metadata':[1 2]}", "found '2', wanted ','"},
        {"{'metadata':[1,]}", "wanted a value"},
        {"{'metadata':{'a':1,}}", "found '}', wanted '\"'"},
        {"{'metadata':{1:1}}", "found '1', wanted '\"'"},
        {"{'metadata':[", "the end of the text"},
        {"{'metadata':{", "the end of the text"},
        {"{'metadata':'", "the end of the text"},
        {"{'metadata':[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "the end of the text"},
        {"{'metadata':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{''"
         ":"
         "{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{'':{",
         "the end of the text"},
    };
    make_shards("model");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_set_refused(write_index(cases[i][0]), cases[i][1]);
    }
    test_write("model/c.safetensors", "x", 1);
    expect_set_refused(write_index("{'weight_map':{'x':'b.safetensors','y':'c.safetensors'}}"),
                       "index.json: tensor x is not in |b.safetensors");
    expect_set_refused(write_index("{'weight_map':{'z':'b.safetensors','y':'c.safetensors'}}"),
                       "/model/c.safetensors: 1 bytes, wanted a safetensors file");
    unlink(test_path("model/model.safetensors.index.json"));
    expect_set_refused(test_path("model"), "no model.safetensors and no model.safetensors.index.json");
    expect_set_refused(test_path("nowhere"), "cannot read: No such file");
}

// ---- failing writes ----

static void body_write(const void* path) {
    const size_t shape[1] = {300000};
    float* data = (float*)check_alloc(300000, sizeof(float), "data");
    SafeTensorsWriter writer;
    safetensors_writer_open(&writer, (const char*)path);
    safetensors_writer_declare(&writer, "a", SAFETENSORS_F32, 1, shape);
    safetensors_writer_declare(&writer, "b", SAFETENSORS_BF16, 1, shape);
    safetensors_writer_begin(&writer);
    safetensors_write_raw(&writer, data, 300000 * sizeof(float));
    safetensors_write_raw(&writer, data, 300000 * sizeof(uint16_t));
    safetensors_writer_commit(&writer);
    free(data);
}

// Writes as if the disk were full after `disk_bytes`.
static rlim_t disk_bytes;

static void limit_writes(void) {
    const struct rlimit limit = {disk_bytes, disk_bytes};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
}

static void body_write_limited(const void* path) {
    limit_writes();
    body_write(path);
}

// Less than a buffer: only the flush at the end can see that it fails.
static void body_write_small_limited(const void* path) {
    SafeTensorsWriter writer;
    limit_writes();
    safetensors_writer_open(&writer, (const char*)path);
    safetensors_writer_begin(&writer);
    safetensors_writer_commit(&writer);
}

static void expect_write_fails(void (*body)(const void*), const char* path, const char* words) {
    char wanted[512];
    glob_t left;
    snprintf(wanted, sizeof(wanted), "error: %s: cannot write|%s", path, words);
    EXPECT(test_dies(body, path, EXIT_FAILURE, wanted), "%s", words);
    snprintf(wanted, sizeof(wanted), "%s*", path);
    EXPECT(glob(wanted, 0, NULL, &left) == GLOB_NOMATCH, "nothing is left of a failed write");
    globfree(&left);
}

TEST(failing_writes) {
    const rlim_t room[] = {0, 100, 192, 1000000, 192 + 6 * 300000 - 1};
    const char* path = test_path("limited.safetensors");
    struct stat info;
    for (int i = 0; i < 5; i++) {
        disk_bytes = room[i];
        expect_write_fails(body_write_limited, path, "File too large");
    }
    disk_bytes = 0;
    expect_write_fails(body_write_small_limited, path, "File too large");
    expect_write_fails(body_write, test_path("nowhere/a.safetensors"), "No such file");
    disk_bytes = 192 + 6 * 300000; // and with just enough room
    body_write(path);
    EXPECT(stat(path, &info) == 0 && (rlim_t)info.st_size == disk_bytes, "%lld bytes",
           (long long)info.st_size);
}

// ---- for dev/ref/check_safetensors.py ----

// i64 (2,3), f32 (5), f16 (2,2,2), bf16 (3), u16 (), u8 (0,4)
COMMAND(write_tensors) { // FILE
    const int64_t i64[6] = {0, 1, -1, INT64_MAX, INT64_MIN, 42};
    const float f32[5] = {0.1f, -0.0f, INFINITY, 1e-45f, 3.4e38f};
    const float f16[8] = {0.1f, -65504, 65520, 1e-7f, 5.9604645e-8f, 2049, 2051, -0.0f};
    const float bf16[3] = {0.1f, 1e-40f, -3.4e38f};
    const uint16_t u16 = 50256;
    const size_t shapes[5][3] = {{2, 3, 0}, {5, 0, 0}, {2, 2, 2}, {3, 0, 0}, {0, 4, 0}};
    SafeTensorsWriter writer;
    CHECK(argc == 1, "%d arguments; wanted FILE", argc);
    safetensors_writer_open(&writer, argv[0]);
    safetensors_writer_metadata(&writer, "quote\"", "line\n\xC3\xA9");
    safetensors_writer_declare(&writer, "i64", SAFETENSORS_I64, 2, shapes[0]);
    safetensors_writer_declare(&writer, "f32", SAFETENSORS_F32, 1, shapes[1]);
    safetensors_writer_declare(&writer, "f16", SAFETENSORS_F16, 3, shapes[2]);
    safetensors_writer_declare(&writer, "bf16", SAFETENSORS_BF16, 1, shapes[3]);
    safetensors_writer_declare(&writer, "u16", SAFETENSORS_U16, 0, NULL);
    safetensors_writer_declare(&writer, "u8", SAFETENSORS_U8, 2, shapes[4]);
    safetensors_writer_begin(&writer);
    safetensors_write_raw(&writer, i64, sizeof(i64));
    write_f32(&writer, SAFETENSORS_F32, f32, 5);
    write_f32(&writer, SAFETENSORS_F16, f16, 8);
    write_f32(&writer, SAFETENSORS_BF16, bf16, 3);
    safetensors_write_raw(&writer, &u16, sizeof(u16));
    printf("%016llx\n", (unsigned long long)safetensors_writer_commit(&writer));
    return EXIT_SUCCESS;
}

COMMAND(print_tensors) { // FILE
    SafeTensors st;
    CHECK(argc == 1, "%d arguments; wanted FILE", argc);
    safetensors_open(&st, argv[0]);
    for (size_t i = 0; i < st.num_tensors; i++) {
        const SafeTensorsView* view = &st.tensors[i];
        printf("%s %s %s", view->name, safetensors_dtype_name(view->dtype),
               safetensors_shape_text_(view->ndim, view->shape).text);
        for (size_t k = 0; view->dtype <= SAFETENSORS_BF16 && k < view->elements; k++) {
            float value;
            safetensors_read_f32_part(view, k, 1, &value);
            printf(" %08x", float_bits(value)); // the bits of the fp32 number
        }
        for (size_t k = 0; view->dtype > SAFETENSORS_BF16 && k < view->bytes; k++) {
            printf("%s%02x", k ? "" : " ", view->data[k]);
        }
        printf("\n");
    }
    for (size_t i = 0; i < st.num_metadata; i++) {
        printf("metadata ");
        json_print_string(stdout, st.metadata[i].key, strlen(st.metadata[i].key));
        printf(" ");
        json_print_string(stdout, st.metadata[i].value, strlen(st.metadata[i].value));
        printf("\n");
    }
    safetensors_close(&st);
    return EXIT_SUCCESS;
}

TEST(halves) {
    for (int i = 0; i < 2; i++) {
        test_half_patterns(&HALVES[i]);
        test_half_rounding(&HALVES[i]);
    }
}
