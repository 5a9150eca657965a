// test_llmc_bin.c -- llmc_bin.h: models read back as written, bf16 rounds to nearest even,
// PyTorch's files are read, damaged files are refused by name, and a failed write leaves the old
// file.
#define LLMC_BIN_IMPLEMENTATION

#include <signal.h>
#include <sys/resource.h>

#include "llmc/formats/llmc_bin.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/whole_model.h"
#include "dev/test/lib/test_element.h"

#define FIXTURES "dev/ref/fixtures/"

static const ModelConfig TINY = {.max_T = 6, .V = 5, .Vp = 8, .L = 2, .NH = 2, .C = 4};
static const ModelConfig LONG_TENSORS = {.max_T = 3, .V = 1000, .Vp = 1024, .L = 3, .NH = 1, .C = 130};

typedef struct {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    size_t bytes, elements; // of the allocation; of the tensors
    void* memory;
} TestModel;

static TestModel test_model_open(ModelConfig cfg) {
    TestModel model;
    model.bytes = model_parameter_rows(model.rows, cfg);
    model.memory = check_alloc(model.bytes, 1, "model");
    model.elements = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        model.elements += tensor_elements(&model.rows[i]);
    }
    return model;
}

// Element k of tensor i.
static float* element(const TestModel* model, int i, size_t k) {
    return (float*)test_element(&model->rows[i], model->memory, k);
}

static void read_model(const char* path, const TestModel* model) {
    whole_model_read(path, llmc_bin_read_config(path), model->rows, model->memory);
}

// Fills every tensor with numbers that all differ and need all their bits, but for the vocabulary's
// padding.
static TestModel test_model_random(ModelConfig cfg) {
    const TestModel model = test_model_open(cfg);
    uint64_t index = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.rows[i];
        for (size_t k = 0; k < row->layers * model_rows_in_files(row, cfg) * row->cols; k++) {
            *element(&model, i, k) = rand_normal(1, 2, index++);
        }
    }
    return model;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static int32_t word_of(TestFile file, int i) {
    int32_t word;
    memcpy(&word, file.data + 4 * i, 4);
    return word;
}

static int exists(const char* path) {
    struct stat info;
    return lstat(path, &info) == 0;
}

static int entries_of(const char* directory) {
    int count = 0;
    struct dirent* entry;
    DIR* dir = opendir(directory);
    while (dir && (entry = readdir(dir))) {
        count += entry->d_name[0] != '.';
    }
    if (dir) {
        closedir(dir);
    }
    return count;
}

// ---- round trips ----

static void expect_config(ModelConfig got, ModelConfig wanted) {
    EXPECT(got.max_T == wanted.max_T && got.V == wanted.V && got.Vp == wanted.Vp && got.L == wanted.L &&
               got.NH == wanted.NH && got.C == wanted.C,
           "%d %d %d %d %d %d", got.max_T, got.V, got.Vp, got.L, got.NH, got.C);
}

// Rows of the vocabulary that have no token are zero, whatever the file says.
TEST(padding) {
    const TestModel model = test_model_random(TINY), again = test_model_open(TINY);
    *element(&model, 0, 5 * 4) = *element(&model, 0, 8 * 4 - 1) = 1;
    whole_model_write_bin(test_path("padding.bin"), TINY, model.rows, model.memory, MODEL_FP32);
    read_model(test_path("padding.bin"), &again);
    for (int i = 5 * 4; i < 8 * 4; i++) {
        EXPECT(*element(&again, 0, i) == 0, "element %d", i);
    }
    EXPECT(*element(&again, 0, 5 * 4 - 1) != 0, "the last token");
    free(again.memory);
    free(model.memory);
}

// A run that cuts the vocabulary into slices has another padding in memory.
TEST(other_padding) {
    for (int Vp = 6; Vp <= 16; Vp += 10) {
        ModelConfig cfg = TINY;
        cfg.Vp = Vp;
        const TestModel model = test_model_random(TINY), again = test_model_open(cfg);
        whole_model_write_bin(test_path("padding.bin"), TINY, model.rows, model.memory, MODEL_FP32);
        memset(again.memory, 0xFF, again.bytes);
        read_model(test_path("padding.bin"), &again);
        for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
            const size_t used = model_rows_in_files(&model.rows[i], TINY) * model.rows[i].cols;
            for (size_t k = 0; k < tensor_elements(&again.rows[i]); k++) {
                const int is_padding = again.rows[i].init == INIT_VOCAB && k >= used;
                if (*element(&again, i, k) != (is_padding ? 0 : *element(&model, i, k))) {
                    EXPECT(0, "%d rows: element %zu of %s", Vp, k, again.rows[i].name);
                    break;
                }
            }
        }
        free(again.memory);
        free(model.memory);
    }
}

// The file is laid out as llm.c's: header, then the tensors without gaps.
static void test_layout(void) {
    const TestModel model = test_model_random(TINY);
    const char* path = test_path("layout.bin");
    whole_model_write_bin(path, TINY, model.rows, model.memory, MODEL_FP32);
    const TestFile file = test_read(path);
    const int32_t header[8] = {20240326, 3, 6, 5, 2, 2, 4, 8};
    EXPECT(memcmp(file.data, header, sizeof(header)) == 0, "header");
    for (int i = 8; i < 256; i++) {
        EXPECT(word_of(file, i) == 0, "unused word %d of the header", i);
    }
    EXPECT(file.bytes == 1024 + 4 * model.elements, "%zu bytes", file.bytes);
    size_t at = 1024;
    for (int i = 0; i < MODEL_PARAMETER_ROWS && at < file.bytes; i++) {
        const size_t bytes = 4 * tensor_layer_elements(&model.rows[i]);
        for (int l = 0; l < model.rows[i].layers; l++, at += bytes) {
            EXPECT(memcmp(file.data + at, tensor_at_layer(&model.rows[i], model.memory, l), bytes) == 0,
                   "tensor %s, layer %d", model.rows[i].name, l);
        }
    }
    free(file.data);
    free(model.memory);
}

// Also with tensors longer than one converted piece.
static void test_round_trip(ModelConfig cfg, ModelDtype dtype) {
    const TestModel model = test_model_random(cfg), back = test_model_open(cfg);
    const char* path = test_path("round_trip.bin");
    whole_model_write_bin(path, cfg, model.rows, model.memory, dtype);
    expect_config(llmc_bin_read_config(path), cfg);
    read_model(path, &back);
    size_t wrong = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (size_t k = 0; k < tensor_elements(&model.rows[i]); k++) {
            const float wanted = *element(&model, i, k), got = *element(&back, i, k);
            const float error = fabsf(got - wanted);
            wrong += dtype == MODEL_FP32 ? bits_of(got) != bits_of(wanted)
                                         : error > fabsf(wanted) / 256 || (bits_of(got) & 0xFFFF) != 0;
        }
    }
    EXPECT(wrong == 0, "%zu weights of %d layers of %d channels", wrong, cfg.L, cfg.C);
    EXPECT(!exists(test_path("round_trip.bin.part")), "the temporary file is gone");
    free(back.memory);
    free(model.memory);
}

TEST(special_values) {
    static const uint32_t special[] = {0x80000000, 0x00000001, 0x007FFFFF, 0x7F7FFFFF, 0xFF7FFFFF};
    const TestModel model = test_model_random(TINY), back = test_model_open(TINY);
    const char* path = test_path("special.bin");
    for (int i = 0; i < 5; i++) {
        // negative zero, subnormal and largest numbers
        *element(&model, 4, i) = float_of(special[i]);
    }
    whole_model_write_bin(path, TINY, model.rows, model.memory, MODEL_FP32);
    read_model(path, &back);
    for (int i = 0; i < 5; i++) {
        EXPECT(bits_of(*element(&back, 4, i)) == special[i], "%08x", special[i]);
    }
    free(back.memory);
    free(model.memory);
}

// ---- bf16 ----

// Rounds to 8 bits of significand as IEEE 754 says: to nearest, ties to even.
TEST(bf16_rounding) {
    static const struct {
        uint32_t from;
        uint16_t to;
    } cases[] = {
        {0x3F800000, 0x3F80}, {0xBF800000, 0xBF80}, // 1, -1: exact
        {0x3F808000, 0x3F80}, {0x3F818000, 0x3F82}, // ties: to the even neighbor, down and up
        {0xBF808000, 0xBF80}, {0xBF818000, 0xBF82}, // and the same for negative numbers
        {0x3F807FFF, 0x3F80}, {0x3F808001, 0x3F81}, // just below and above a tie
        {0x3F817FFF, 0x3F81}, {0x3F818001, 0x3F82}, //
        {0x3FFF8000, 0x4000}, {0x3FFF7FFF, 0x3FFF}, // the carry reaches the exponent
        {0x00000000, 0x0000}, {0x80000000, 0x8000}, // zeros keep their sign
        {0x00000001, 0x0000}, {0x00008000, 0x0000}, // subnormal numbers
        {0x00008001, 0x0001}, {0x00018000, 0x0002}, //
        {0x007FFFFF, 0x0080}, {0x807FFFFF, 0x8080}, // up to the smallest normal number
        {0x7F7F0000, 0x7F7F}, {0x7F7F7FFF, 0x7F7F}, // the largest
        {0x7F7F8000, 0x7F80}, {0x7F7FFFFF, 0x7F80}, // beyond it: infinity
        {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}, // infinities
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const uint16_t got = bf16_from_float(float_of(cases[i].from));
        EXPECT(got == cases[i].to, "%08x becomes %04x, wanted %04x", cases[i].from, got, cases[i].to);
    }
    static const uint32_t nans[] = {0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF};
    for (size_t i = 0; i < 5; i++) {
        const float back = bf16_to_float(bf16_from_float(float_of(nans[i])));
        EXPECT(isnan(back), "NaN %08x becomes %g", nans[i], (double)back);
    }
}

// Every bf16 number survives widening and rounding; and no other of them is nearer to a random fp32
// number.
TEST(bf16_exhaustive) {
    int changed = 0, farther = 0;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const float value = bf16_to_float((uint16_t)bits);
        changed += bits_of(value) != bits << 16 || (!isnan(value) && bf16_from_float(value) != bits);
    }
    Rand rng = rand_open(1, 1);
    for (int i = 0; i < 100000; i++) {
        const uint32_t bits = rand_u32(&rng) & 0xBFFFFFFF; // below 2
        const uint16_t rounded = bf16_from_float(float_of(bits)), low = (uint16_t)(bits >> 16);
        const double got = fabs((double)bf16_to_float(rounded) - float_of(bits));
        const double down = fabs((double)bf16_to_float(low) - float_of(bits));
        const double up = fabs((double)bf16_to_float((uint16_t)(low + 1)) - float_of(bits));
        farther += got > fmin(down, up);
    }
    EXPECT(changed == 0, "%d bf16 numbers change", changed);
    EXPECT(farther == 0, "%d numbers are not rounded to the nearest", farther);
}

// ---- files of others ----

// Written by PyTorch: the one is the other, rounded.
TEST(fixtures) {
    const ModelConfig cfg = {.max_T = 40, .V = 157, .Vp = 256, .L = 2, .NH = 3, .C = 36};
    const TestModel fp32 = test_model_open(cfg), bf16 = test_model_open(cfg);
    expect_config(llmc_bin_read_config(FIXTURES "gpt2_tiny.bin"), cfg);
    expect_config(llmc_bin_read_config(FIXTURES "gpt2_tiny_bf16.bin"), cfg);
    read_model(FIXTURES "gpt2_tiny.bin", &fp32);
    read_model(FIXTURES "gpt2_tiny_bf16.bin", &bf16);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        size_t wrong = 0;
        for (size_t k = 0; k < tensor_elements(&fp32.rows[i]); k++) {
            const uint16_t wanted = bf16_from_float(*element(&fp32, i, k));
            wrong += bits_of(*element(&bf16, i, k)) != (uint32_t)wanted << 16;
        }
        EXPECT(wrong == 0, "%zu weights of %s", wrong, fp32.rows[i].name);
    }
    EXPECT(*element(&fp32, 0, 156 * 36) != 0 && *element(&fp32, 0, 157 * 36) == 0, "the padding is zero");
    const char* path = test_path("again.bin"); // and what we write is the same file
    whole_model_write_bin(path, cfg, fp32.rows, fp32.memory, MODEL_BF16);
    const TestFile ours = test_read(path), theirs = test_read(FIXTURES "gpt2_tiny_bf16.bin");
    EXPECT(ours.bytes == theirs.bytes && memcmp(ours.data, theirs.data, ours.bytes) == 0, "byte by byte");
    free(theirs.data);
    free(ours.data);
    free(bf16.memory);
    free(fp32.memory);
}

// ---- damage ----

static void body_read(const void* path) {
    const ModelConfig cfg = llmc_bin_read_config((const char*)path);
    const TestModel model = test_model_open(cfg);
    read_model((const char*)path, &model);
    free(model.memory);
}

// Reading the file ends with status 1 and an error that contains its name and the words.
static void expect_refused(const char* path, const char* words) {
    char wanted[512];
    snprintf(wanted, sizeof(wanted), "error: %s: |%s", path, words);
    EXPECT(test_dies(body_read, path, 1, wanted), "%s", words);
}

static void expect_header_refused(TestFile good, int word, int32_t value, const char* words) {
    unsigned char* data = (unsigned char*)check_alloc(good.bytes, 1, "copy");
    memcpy(data, good.data, good.bytes);
    memcpy(data + 4 * word, &value, sizeof(value));
    expect_refused(test_write("header.bin", data, good.bytes), words);
    free(data);
}

static void test_bad_headers(TestFile good) {
    expect_header_refused(good, 0, 20240520, "magic number 20240520|wanted 20240326");
    expect_header_refused(good, 0, __builtin_bswap32(20240326), "magic number|wanted 20240326");
    expect_header_refused(good, 1, 2, "version 2|3 (fp32)|5 (bf16)");
    expect_header_refused(good, 1, 5, "bytes|wanted"); // bf16 would be half as long
    static const char* const names[6] = {"context", "vocabulary", "layers",
                                         "heads",   "channels",   "padded vocabulary"};
    static const int32_t absurd[] = {0, -1, INT32_MIN, INT32_MAX, 0x40000000};
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < 5; k++) {
            char words[64];
            snprintf(words, sizeof(words), "%s of %d", names[i], absurd[k]);
            expect_header_refused(good, 2 + i, absurd[k], words);
        }
    }
    expect_header_refused(good, 5, 3, "4 channels in 3 heads");
    expect_header_refused(good, 7, 4, "padded vocabulary of 4|vocabulary of 5");
    // a layer more than there is
    expect_header_refused(good, 4, 3, "bytes|wanted|3 layers of 4 channels");
    expect_header_refused(good, 4, 1000, "bytes|wanted");
    expect_header_refused(good, 6, 65536, "bytes|wanted");
}

static void test_bad_lengths(TestFile good) {
    expect_refused(test_path("missing.bin"), "No such file");
    expect_refused(test_path("missing/model.bin"), "No such file");
    expect_refused(test_tmpdir(), "a directory, wanted a file");
    EXPECT(mkfifo(test_path("fifo"), 0666) == 0, "a FIFO, which must not be waited for");
    expect_refused(test_path("fifo"), "fifo: not a regular file");
    expect_refused(test_write("empty.bin", "", 0), "0 bytes|header of 1024");
    expect_refused(test_write("short.bin", good.data, 1023), "1023 bytes|header of 1024");
    expect_refused(test_write("header_only.bin", good.data, 1024), "1024 bytes|wanted");
    expect_refused(test_write("truncated.bin", good.data, good.bytes - 1), "bytes|wanted");
    expect_refused(test_write("too_long.bin", good.data, good.bytes + 1), "bytes|wanted");
}

// The place of a weight that is not finite is named.
static void expect_weight_refused(ModelDtype dtype, const char* tensor, size_t k, float value,
                                  const char* words) {
    const TestModel model = test_model_random(TINY);
    const char* path = test_path("weight.bin");
    *(float*)test_element(row_called(model.rows, MODEL_PARAMETER_ROWS, tensor), model.memory, k) = value;
    whole_model_write_bin(path, TINY, model.rows, model.memory, dtype);
    expect_refused(path, words);
    free(model.memory);
}

// A weight that is finite, and would not be in bf16, is not written.
static void write_too_large(const void* path) {
    const TestModel model = test_model_random(TINY);
    *element(&model, 0, 31) = float_of(0x7F7FFFFF);
    whole_model_write_bin((const char*)path, TINY, model.rows, model.memory, MODEL_BF16);
}

TEST(bad_weights) {
    EXPECT(test_dies(write_too_large, test_path("large.bin"), EXIT_FAILURE,
                     "large.bin: tensor wte, element 31 is 3.40282e+38|--export-dtype fp32 works"),
           "");
    EXPECT(access(test_path("large.bin"), F_OK) != 0, "no file");
    const char* in_qkvw = "tensor qkvw, layer 1, row 2, column 3|nan";
    expect_weight_refused(MODEL_FP32, "qkvw", 48 + 2 * 4 + 3, NAN, in_qkvw); // (2, 12, 4)
    expect_weight_refused(MODEL_BF16, "qkvw", 48 + 2 * 4 + 3, NAN, in_qkvw);
    expect_weight_refused(MODEL_FP32, "wte", 0, INFINITY, "tensor wte, layer 0, row 0, column 0|inf");
    expect_weight_refused(MODEL_FP32, "lnfb", 3, -INFINITY, "tensor lnfb, layer 0, row 0, column 3|-inf");
    expect_weight_refused(MODEL_BF16, "wte", 31, INFINITY, "tensor wte, layer 0, row 7, column 3|inf");
}

// ---- failing writes ----

static void body_write(const void* path) {
    const TestModel model = test_model_random(LONG_TENSORS);
    whole_model_write_bin((const char*)path, LONG_TENSORS, model.rows, model.memory, MODEL_FP32);
    free(model.memory);
}

// Writes as if the disk were full after `disk_bytes`.
static rlim_t disk_bytes;

static void body_write_limited(const void* path) {
    const struct rlimit limit = {disk_bytes, disk_bytes};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    body_write(path);
}

static void expect_write_fails(void (*body)(const void*), const char* path, const char* words) {
    char wanted[512];
    snprintf(wanted, sizeof(wanted), "error: %s: cannot write|%s", path, words);
    EXPECT(test_dies(body, path, 1, wanted), "%s", words);
}

TEST(failing_writes) {
    char path[256];
    snprintf(path, sizeof(path), "%s", test_path("out/model.bin"));
    EXPECT(mkdir(test_path("out"), 0777) == 0, "directory");
    const rlim_t room[] = {0, 1024, 100000, (rlim_t)llmc_bin_bytes_(LONG_TENSORS, MODEL_FP32) - 1};
    for (int i = 0; i < 4; i++) {
        disk_bytes = room[i];
        expect_write_fails(body_write_limited, path, "File too large");
        EXPECT(entries_of(test_path("out")) == 0, "nothing is left of a failed write");
    }
    test_write("out/model.bin", "older", 5);
    expect_write_fails(body_write_limited, path, "File too large");
    const TestFile older = test_read(path);
    EXPECT(older.bytes == 5 && memcmp(older.data, "older", 5) == 0, "what was there is untouched");
    EXPECT(entries_of(test_path("out")) == 1, "and nothing beside it");
    free(older.data);

    expect_write_fails(body_write, test_path("nowhere/model.bin"), "No such file");
    expect_write_fails(body_write, test_path("out/model.bin/model.bin"), "Not a directory");
    mkdir(test_path("out/directory.bin"), 0777);
    expect_write_fails(body_write, test_path("out/directory.bin"), "Is a directory");
    EXPECT(entries_of(test_path("out")) == 2, "no temporary file beside the directory");

    body_write(path); // and over an older file
    EXPECT(llmc_bin_read_config(path).C == LONG_TENSORS.C && entries_of(test_path("out")) == 2, "replaced");
}

TEST(round_trips) {
    for (ModelDtype dtype = MODEL_FP32; dtype <= MODEL_BF16; dtype++) {
        test_round_trip(TINY, dtype);
        test_round_trip(LONG_TENSORS, dtype);
    }
}

TEST(layout) {
    test_layout();
    const TestFile good = test_read(test_path("layout.bin"));
    test_bad_headers(good);
    test_bad_lengths(good);
    free(good.data);
}
