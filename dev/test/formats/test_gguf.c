// test_gguf.c -- gguf.h: a written file is read back as the format says: header, key-value pairs,
// tokenizer, and every number of every tensor in each of the four types.
#define GGUF_IMPLEMENTATION

#include "llmc/formats/gguf.h"
#include "dev/test/lib/test.h"

static const ModelConfig CFG = {.max_T = 6, .V = 261, .Vp = 384, .L = 2, .NH = 2, .C = 64};
// no whole blocks
static const ModelConfig NARROW = {.max_T = 6, .V = 5, .Vp = 128, .L = 1, .NH = 2, .C = 4};

typedef struct {
    const char* path;
    char* data;
    size_t bytes, at;
} Reader;

static const void* take(Reader* r, size_t bytes) {
    CHECK(bytes <= r->bytes - r->at, "%s: ends at %zu", r->path, r->at);
    r->at += bytes;
    return r->data + r->at - bytes;
}

static uint32_t take_u32(Reader* r) {
    uint32_t value;
    memcpy(&value, take(r, 4), 4);
    return value;
}

static uint64_t take_u64(Reader* r) {
    uint64_t value;
    memcpy(&value, take(r, 8), 8);
    return value;
}

// A string, as text for comparisons.
static const char* take_string(Reader* r) {
    static char texts[4][128];
    static int next = 0;
    char* text = texts[next++ % 4];
    const uint64_t length = take_u64(r);
    const void* from = take(r, length);
    snprintf(text, sizeof(texts[0]), "%.*s", (int)length, (const char*)from);
    return text;
}

static void expect_u32(Reader* r, const char* key, uint32_t wanted) {
    const char* found = take_string(r);
    EXPECT(strcmp(found, key) == 0 && take_u32(r) == 4, "%s, wanted %s", found, key);
    const uint32_t value = take_u32(r);
    EXPECT(value == wanted, "%s is %u", key, value);
}

static void expect_string(Reader* r, const char* key, const char* wanted) {
    const char* found = take_string(r);
    EXPECT(strcmp(found, key) == 0 && take_u32(r) == 8, "%s, wanted %s", found, key);
    const char* value = take_string(r);
    EXPECT(strcmp(value, wanted) == 0, "%s is %s", key, value);
}

static void expect_bool(Reader* r, const char* key, int wanted) {
    const char* found = take_string(r);
    EXPECT(strcmp(found, key) == 0 && take_u32(r) == 7, "%s, wanted %s", found, key);
    EXPECT(*(const char*)take(r, 1) == wanted, "%s", key);
}

// An array, its elements not yet taken.
static void expect_array(Reader* r, const char* key, uint32_t type, uint64_t count) {
    const char* found = take_string(r);
    EXPECT(strcmp(found, key) == 0 && take_u32(r) == 9 && take_u32(r) == type, "%s, wanted %s", found, key);
    EXPECT(take_u64(r) == count, "elements of %s", key);
}

static void expect_tokenizer(Reader* r, const Bpe* bpe, GgufStart start, int V) {
    if (!bpe) {
        expect_string(r, "tokenizer.ggml.model", "no_vocab");
        expect_u32(r, "gpt2.vocab_size", (uint32_t)V);
        return;
    }
    expect_string(r, "tokenizer.ggml.model", "gpt2");
    expect_string(r, "tokenizer.ggml.pre", "gpt-2");
    expect_array(r, "tokenizer.ggml.tokens", 8, (uint64_t)V);
    for (int id = 0; id < V; id++) {
        const char* token = take_string(r);
        const char* wanted = id == 0     ? "!"
                             : id == 220 ? "\xC4\xA0"
                             : id == 256 ? "th"
                             : id == 257 ? "the"
                             : id == 258 ? "<|endoftext|>"
                             : id >= 259 ? id == 259 ? "[PAD259]" : "[PAD260]"
                                         : NULL;
        EXPECT(!wanted || strcmp(token, wanted) == 0, "token %d is %s", id, token);
    }
    expect_array(r, "tokenizer.ggml.token_type", 5, (uint64_t)V);
    for (int id = 0; id < V; id++) {
        EXPECT(take_u32(r) == (id < 258 ? 1u : id == 258 ? 3u : 5u), "type of token %d", id);
    }
    expect_array(r, "tokenizer.ggml.merges", 8, 2);
    EXPECT(strcmp(take_string(r), "t h") == 0 && strcmp(take_string(r), "th e") == 0, "merges");
    expect_u32(r, "tokenizer.ggml.bos_token_id", 258);
    expect_u32(r, "tokenizer.ggml.eos_token_id", 258);
    expect_u32(r, "tokenizer.ggml.unknown_token_id", 258);
    expect_bool(r, "tokenizer.ggml.add_bos_token", start == GGUF_START_TOKEN);
    expect_bool(r, "tokenizer.ggml.add_eos_token", 0);
}

static void expect_pairs(Reader* r, ModelConfig cfg, int file_type, const Bpe* bpe, GgufStart start) {
    expect_string(r, "general.architecture", "gpt2");
    expect_string(r, "general.type", "model");
    expect_string(r, "general.name", "my run");
    expect_string(r, "general.size_label", cfg.L == 2 ? "117K" : "0.30K");
    expect_u32(r, "general.alignment", 32);
    expect_u32(r, "general.file_type", (uint32_t)file_type);
    expect_u32(r, "general.quantization_version", 2);
    expect_u32(r, "gpt2.context_length", (uint32_t)cfg.max_T);
    expect_u32(r, "gpt2.embedding_length", (uint32_t)cfg.C);
    expect_u32(r, "gpt2.block_count", (uint32_t)cfg.L);
    expect_u32(r, "gpt2.feed_forward_length", (uint32_t)(4 * cfg.C));
    expect_u32(r, "gpt2.attention.head_count", (uint32_t)cfg.NH);
    float epsilon;
    EXPECT(strcmp(take_string(r), "gpt2.attention.layer_norm_epsilon") == 0 && take_u32(r) == 6, "epsilon");
    memcpy(&epsilon, take(r, 4), 4);
    EXPECT(epsilon == 1e-5f, "%g", (double)epsilon);
    expect_tokenizer(r, bpe, start, cfg.V);
}

// Number i of a tensor's data.
static float value_of(const char* data, uint32_t type, size_t i) {
    uint16_t bits;
    float value;
    if (type == 8) {
        const char* block = data + i / 32 * 34;
        memcpy(&bits, block, 2);
        return fp16_to_float(bits) * (float)(signed char)block[2 + i % 32];
    }
    memcpy(&bits, data + 2 * i, 2);
    memcpy(&value, data + (type == 0 ? 4 * i : 0), 4);
    return type == 0 ? value : type == 1 ? fp16_to_float(bits) : bf16_to_float(bits);
}

// The largest error that rounding to a type may make of x, in a block whose largest number is
// `largest`.
static double error_of(uint32_t type, float x, float largest) {
    return type == 0   ? 0
           : type == 1 ? fabs(x) * 0x1p-11 + 0x1p-25
           // half a step, and the rounding of its scale
           : type == 8 ? largest / 127 * 0.5 + largest * 0x1p-10
                       : fabs(x) * 0x1p-8;
}

static void expect_tensor(Reader* r, const FileTensor* tensor, const TensorRow* row, ModelConfig cfg, int l,
                          const float* x, uint32_t type, size_t data_begin) {
    const FileTensorName text = file_tensor_name(tensor->gguf_name, l, 0);
    const char* name = text.text;
    const int is_vector = row->kind == KIND_VECTOR;
    const size_t rows = model_rows_in_files(row, cfg);
    const char* found = take_string(r);
    EXPECT(strcmp(found, name) == 0, "%s, wanted %s", found, name);
    EXPECT(take_u32(r) == (is_vector ? 1u : 2u) && take_u64(r) == row->cols, "%s: columns", name);
    EXPECT(is_vector || take_u64(r) == rows, "%s: rows", name);
    const uint32_t found_type = take_u32(r);
    EXPECT(found_type == type, "%s: type %u, wanted %u", name, found_type, type);
    const uint64_t offset = take_u64(r);
    EXPECT(offset % 32 == 0 && data_begin % 32 == 0, "%s: alignment", name);
    const char* data = r->data + data_begin + offset;
    for (size_t i = 0; i < rows * row->cols; i++) {
        float largest = 0;
        for (size_t k = i / 32 * 32; k < i / 32 * 32 + 32 && k < rows * row->cols; k++) {
            largest = fmaxf(largest, fabsf(x[k]));
        }
        const float got = value_of(data, found_type, i);
        if (!(fabs((double)got - x[i]) <= error_of(found_type, x[i], largest))) {
            EXPECT_NEAR(got, x[i], error_of(found_type, x[i], largest), "%s, element %zu", name, i);
            return;
        }
    }
}

// Where the data starts: after the infos, which come twice through the reader.
static size_t data_begin(Reader r, size_t tensors) {
    for (size_t i = 0; i < tensors; i++) {
        take_string(&r);
        const uint32_t ndim = take_u32(&r);
        take(&r, 8 * ndim + 4 + 8);
    }
    return (r.at + 31) / 32 * 32;
}

static void test_file(ModelConfig cfg, GgufDtype dtype, const Bpe* bpe, GgufStart start) {
    static const int file_types[4] = {0, 1, 32, 7};
    static const uint32_t types[4] = {0, 1, 30, 8};
    char error[ERROR_BYTES];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    float* memory = (float*)check_alloc(model_parameter_rows(rows, cfg), 1, "model");
    for (int g = 0; g < model_groups(cfg); g++) {
        model_random_group(rows, cfg, 3, g, (char*)memory + tensor_group_offset_bytes(rows, g));
    }
    const char* path = test_path("model.gguf");
    GgufWriter writer;
    const GgufModel model = {"out/my run/", cfg, dtype, bpe, bpe ? bpe->card : model_card_of(0), start};
    gguf_create(&writer, path, &model);
    for (int g = model_groups(cfg) - 1; g >= 0; g--) { // in any order
        gguf_put(&writer, rows, g, (const char*)memory + tensor_group_offset_bytes(rows, g));
    }
    gguf_commit(&writer);
    Reader r = {path, NULL, 0, 0};
    CHECK(file_try_read(path, (size_t)1 << 28, &r.data, &r.bytes, error), "%s", error);
    const size_t tensors = 12 * (size_t)cfg.L + 4;
    EXPECT(memcmp(take(&r, 4), "GGUF", 4) == 0 && take_u32(&r) == 3 && take_u64(&r) == tensors, "header");
    EXPECT(take_u64(&r) == (bpe ? 23u : 15u), "number of pairs");
    expect_pairs(&r, cfg, file_types[dtype], bpe, start);
    const size_t begin = data_begin(r, tensors);
    const FileTensor* table = file_tensors();
    for (const FileTensor* t = table; t < table + FILE_TENSOR_ROWS; t++) {
        const TensorRow* row = &rows[t->row];
        const int is_matrix = row->kind != KIND_VECTOR && strcmp(row->name, "wpe") != 0;
        const uint32_t type = !is_matrix ? 0 : dtype == GGUF_Q8_0 && row->cols % 32 ? 1 : types[dtype];
        for (int l = 0; l < file_tensor_layers(t, t->gguf_name, rows, cfg.arch); l++) {
            expect_tensor(&r, t, row, cfg, l, (float*)tensor_at_layer(row, memory, l), type, begin);
        }
    }
    EXPECT(r.bytes % 32 == 0, "%zu bytes", r.bytes);
    free(r.data);
    free(memory);
}

// A model whose element 5 of the MLP's first matrix in block 1 has a value, in a file.
typedef struct {
    GgufDtype dtype;
    float value;
} Large;

static void write_large(const void* context) {
    const Large* large = (const Large*)context;
    const ModelConfig cfg = {16, 64, 128, 2, 2, 32, SHARE_OFF};
    TensorRow rows[MODEL_PARAMETER_ROWS];
    GgufWriter writer;
    float* memory = (float*)check_alloc(model_parameter_rows(rows, cfg), 1, "model");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (strcmp(rows[i].name, "fcw") == 0) {
            ((float*)tensor_at_layer(&rows[i], memory, 1))[5] = large->value;
        }
    }
    const GgufModel model = {"large", cfg, large->dtype, NULL, model_card_of(0), GGUF_NO_START_TOKEN};
    gguf_create(&writer, test_path("large.gguf"), &model);
    for (int g = 0; g < model_groups(cfg); g++) {
        gguf_put(&writer, rows, g, (const char*)memory + tensor_group_offset_bytes(rows, g));
    }
    gguf_commit(&writer);
    free(memory);
}

// A number is in the file as one, or an error by name.
static void test_large(void) {
    static const struct {
        Large large;
        const char* error; // NULL: it fits
    } cases[] = {
        {{GGUF_F16, 65519}, NULL},           {{GGUF_F16, 65520}, "65520, wanted|bf16 works"},
        {{GGUF_F16, -7e4f}, "-70000"},       {{GGUF_BF16, 3e38f}, NULL},
        {{GGUF_BF16, 3.4e38f}, "f32 works"}, {{GGUF_F32, 3.4e38f}, NULL},
        {{GGUF_Q8_0, 8321039.5f}, NULL},     {{GGUF_Q8_0, 8321040}, "bf16 works"},
        {{GGUF_Q8_0, 3e38f}, "bf16 works"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char words[256];
        snprintf(words, sizeof(words), "large.gguf: tensor blk.1.ffn_up.weight, element 5 is |%s",
                 cases[i].error ? cases[i].error : "");
        unlink(test_path("large.gguf"));
        EXPECT(cases[i].error ? test_dies(write_large, &cases[i].large, EXIT_FAILURE, words)
                              : test_dies(write_large, &cases[i].large, 0, ""),
               "%g", (double)cases[i].large.value);
        EXPECT((access(test_path("large.gguf"), F_OK) == 0) == !cases[i].error, "a file");
    }
}

static void test_names(void) {
    static const char* const names[][2] = {
        {"out/124M", "124M"},           {"x.gguf", "x"}, {"/a/b.c.gguf", "b.c"},
        {"out/124M//", "124M"},         {"/", ""},       {".gguf", ".gguf"},
        {"a\xFF\xC3\xA9", "a?\xC3\xA9"}};
    // as model_weight_count_rounded_notation of gguf 0.19.0
    static const struct {
        double parameters;
        const char* wanted;
    } labels[] = {{124439808, "124M"}, {1557611200, "1.6B"}, {9949999, "10M"}, {9400000, "9.4M"},
                  {1000, "1.0K"},      {292, "0.29K"},       {175e9, "175B"},  {2e12, "2.0T"}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        EXPECT(strcmp(gguf_title_(names[i][0]).text, names[i][1]) == 0, "%s", gguf_title_(names[i][0]).text);
    }
    for (size_t i = 0; i < sizeof(labels) / sizeof(labels[0]); i++) {
        const GgufText_ found = gguf_size_label_(labels[i].parameters);
        EXPECT(strcmp(found.text, labels[i].wanted) == 0, "%s, wanted %s", found.text, labels[i].wanted);
    }
}

TEST(gguf) {
    test_large();
    test_names();
    static const int pairs[2][2] = {{83, 71}, {256, 68}}; // t h, th e
    Bpe bpe;
    bpe_open_merges(&bpe, pairs, 2, "test");
    for (int dtype = GGUF_F32; dtype <= GGUF_Q8_0; dtype++) {
        test_file(CFG, (GgufDtype)dtype, &bpe, dtype == GGUF_F16 ? GGUF_NO_START_TOKEN : GGUF_START_TOKEN);
        test_file(NARROW, (GgufDtype)dtype, NULL, GGUF_START_TOKEN);
    }
    bpe_close(&bpe);
}

// A tokenizer of SentencePiece's kind: tokens of any characters, with their types and scores.
TEST(gguf_sentence) {
    Bpe bpe;
    char error[ERROR_BYTES];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    GgufWriter writer;
    bpe_open(&bpe, "dev/ref/fixtures/sentencepiece/gemma.model");
    ModelConfig cfg = NARROW;
    cfg.V = bpe.vocab_size + 1;
    float* memory = (float*)check_alloc(model_parameter_rows(rows, cfg), 1, "model");
    const GgufModel model = {"run", cfg, GGUF_F32, &bpe, bpe.card, GGUF_START_TOKEN};
    gguf_create(&writer, test_path("model.gguf"), &model);
    for (int g = 0; g < model_groups(cfg); g++) {
        gguf_put(&writer, rows, g, (const char*)memory + tensor_group_offset_bytes(rows, g));
    }
    gguf_commit(&writer);
    Reader r = {"model.gguf", NULL, 0, 0};
    CHECK(file_try_read(test_path("model.gguf"), (size_t)1 << 28, &r.data, &r.bytes, error), "%s", error);
    const char* key = (const char*)memmem(r.data, r.bytes, "tokenizer.ggml.model", 20);
    r.at = (size_t)(key - r.data) - 8;
    expect_string(&r, "tokenizer.ggml.model", "llama");
    expect_string(&r, "tokenizer.ggml.pre", "default");
    expect_array(&r, "tokenizer.ggml.tokens", 8, (uint64_t)cfg.V);
    static const struct {
        const char* token;
        uint32_t type;
    } wanted[] = {{"<pad>", 3}, {"<eos>", 3}, {"<bos>", 3}, {"<unk>", 2}, {"<start_of_turn>", 3}, {"  ", 4}};
    int newlines = -1, zero = -1, piece = -1; // ids of a word, of a byte, of a piece
    for (int id = 0; id < cfg.V; id++) {
        const char* token = take_string(&r);
        EXPECT(id > 5 || strcmp(token, wanted[id].token) == 0, "token %d is %s", id, token);
        newlines = strcmp(token, "\n\n") == 0 ? id : newlines;
        zero = strcmp(token, "<0x00>") == 0 ? id : zero;
        piece = strcmp(token, "\xE2\x96\x81the") == 0 ? id : piece;
        EXPECT(id != bpe.vocab_size || strncmp(token, "[PAD", 4) == 0, "%s", token);
    }
    expect_array(&r, "tokenizer.ggml.scores", 6, (uint64_t)cfg.V);
    for (int id = 0; id < cfg.V; id++) {
        float score;
        memcpy(&score, take(&r, 4), 4);
        EXPECT(id == piece ? score < 0 : id != newlines || score == 0, "token %d: %g", id, (double)score);
    }
    expect_bool(&r, "tokenizer.ggml.add_space_prefix", 0);
    expect_bool(&r, "tokenizer.ggml.remove_extra_whitespaces", 0);
    expect_array(&r, "tokenizer.ggml.token_type", 5, (uint64_t)cfg.V);
    for (int id = 0; id < cfg.V; id++) {
        const uint32_t type = take_u32(&r), other = id == newlines ? 4
                                                    : id == zero   ? 6
                                                    : id == piece  ? 1
                                                                   : type;
        EXPECT(type == (id <= 5                ? wanted[id].type
                        : id == bpe.vocab_size ? 5
                                               : other),
               "token %d: %u", id, type);
    }
    expect_u32(&r, "tokenizer.ggml.bos_token_id", 2);
    expect_u32(&r, "tokenizer.ggml.eos_token_id", 1);
    expect_u32(&r, "tokenizer.ggml.unknown_token_id", 3);
    expect_u32(&r, "tokenizer.ggml.padding_token_id", 0);
    expect_bool(&r, "tokenizer.ggml.add_bos_token", 1);
    EXPECT(newlines > 0 && zero > 0 && piece > 0, "");
    free(r.data);
    free(memory);
    bpe_close(&bpe);
}

// llama.cpp cuts words out of a text if they are user-defined, and looks for Phi's tokens if "phi3"
// is in the name.
TEST(gguf_words) {
    Bpe bpe;
    size_t bytes;
    char *data, error[ERROR_BYTES];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    GgufWriter w;
    bpe_open(&bpe, "dev/ref/fixtures/tokenizers/gpt2.json");
    ModelConfig cfg = NARROW;
    cfg.V = bpe.vocab_size;
    float* memory = (float*)check_alloc(model_parameter_rows(rows, cfg), 1, "model");
    const GgufModel model = {"my phi3", cfg, GGUF_F32, &bpe, bpe.card, GGUF_START_TOKEN};
    gguf_create(&w, test_path("words.gguf"), &model);
    for (int g = 0; g < model_groups(cfg); g++) {
        gguf_put(&w, rows, g, (const char*)memory + tensor_group_offset_bytes(rows, g));
    }
    gguf_commit(&w);
    CHECK(file_try_read(test_path("words.gguf"), (size_t)1 << 28, &data, &bytes, error), "%s", error);
    EXPECT(!memmem(data, bytes, "general.name", 12), "has a name");
    Reader r = {"words.gguf", data, bytes, 0};
    r.at = (size_t)((char*)memmem(data, bytes, "tokenizer.ggml.token_type", 25) - data) - 8;
    expect_array(&r, "tokenizer.ggml.token_type", 5, (uint64_t)cfg.V);
    for (int id = 0; id < cfg.V; id++) {
        const uint32_t type = take_u32(&r);
        EXPECT((type == 4) == (id == 414 || id >= 640), "type of token %d: %u", id, type);
    }
    free(data);
    free(memory);
    bpe_close(&bpe);
}

// A model that llama.cpp's loader refuses is refused here, by the name of an option.
#define OLMO3_ .arch = ARCH_OLMO3, .C = 128, .NH = 4, .has_head = 1
#define GPTOSS_ .arch = ARCH_GPTOSS, .C = 128, .NH = 4, .has_head = 1, .E = 4, .E_used = 2
#define QWEN35_ .arch = ARCH_QWEN35, .C = 128, .NH = 4
#define YARN_ .scaling = {ROPE_YARN, 4, 1, 32, 8}
TEST(what_llama_cpp_holds) {
    static const struct {
        ModelConfig cfg;
        const char* wanted; // NULL: it can
    } cases[] = {
        {{.arch = ARCH_QWEN2, .C = 128, .NH = 3, .HS = 32}, "not 3 x 32 of 128; wanted such a --head-size"},
        {{.arch = ARCH_QWEN2, .C = 128, .NH = 4, .HS = 64}, "not 4 x 64 of 128; wanted such a --head-size"},
        {{.arch = ARCH_QWEN2, .C = 128, .NH = 4, .HS = 32}, NULL},
        {{.arch = ARCH_QWEN3, .C = 128, .NH = 3, .HS = 32}, NULL},
        {{.arch = ARCH_OLMOE, .C = 128, .NH = 4, .HS = 32}, "--own-head on"},
        {{.arch = ARCH_OLMOE, .C = 128, .NH = 4, .HS = 32, .has_head = 1}, NULL},
        {{.arch = ARCH_OLMOE, .C = 128, .NH = 4, .HS = 32, .KV = 2, .has_head = 1}, "not 2 and 4"},
        {{.arch = ARCH_QWEN3MOE, .C = 128, .NH = 4, .HS = 32}, NULL},
        {{.arch = ARCH_NANOCHAT, .C = 128, .NH = 4, .HS = 32}, "llama.cpp has no nanochat"},
        {{.arch = ARCH_LLAMA, .C = 128, .NH = 4, .scaling = {ROPE_LONG, 4, 0, 0, 8}}, NULL},
        {{.arch = ARCH_ARCEE, .C = 128, .NH = 4, .scaling = {ROPE_LLAMA3, 4, 1, 4, 8}}, NULL},
        {{.arch = ARCH_ARCEE, .C = 128, .NH = 4, .scaling = {ROPE_LONG, 4, 0, 0, 8}}, "arcee has no factors"},
        {{.arch = ARCH_QWEN3, .C = 128, .NH = 4, .scaling = {ROPE_LLAMA3, 4, 1, 4, 8}},
         "qwen3 has no factors"},
        {{.arch = ARCH_QWEN3, .C = 128, .NH = 4, .scaling = {ROPE_YARN, 4, 1, 32, 8}}, NULL},
        {{.arch = ARCH_QWEN3, .C = 128, .NH = 4, .scaling = {ROPE_YARN, 4, 1, 32, 8, 1, 1}},
         "truncate is false"},
        {{.arch = ARCH_LLAMA, .C = 128, .NH = 4, .L = 2, .unrotated = {2}},
         "layer 1 of llama with 2 layers has rotary"},
        {{.arch = ARCH_QWEN3, .C = 128, .NH = 4, .window = 4, .windows = {1}, .window_rope_base = 100},
         "layers of qwen3 with a window have the rotary base 10000, unscaled"},
        {{.arch = ARCH_QWEN3, .C = 128, .NH = 4, .HS = 32, .attention_scale = 0.0625f}, "not by 16"},
        {{.arch = ARCH_LLAMA, .C = 128, .NH = 4, .HS = 32, .attention_softcap = 50},
         "no caps of scores and of logits, not 50 and 0"},
        {{.arch = ARCH_SMOLLM3, .C = 128, .NH = 4, .L = 5, .unrotated = {8}}, NULL},
        {{.arch = ARCH_SMOLLM3, .C = 128, .NH = 4, .L = 5, .unrotated = {4}},
         "layer 2 of smollm3 with 5 layers has rotary"},
        {{OLMO3_, .L = 5}, NULL},
        {{OLMO3_, .L = 5, .window = 4, .windows = {0x17}}, NULL},
        {{OLMO3_, .L = 5, .window = 4, .windows = {7}}, "layer 4 of olmo2 with 5 layers has a window"},
        {{OLMO3_, .L = 4, .window = 4, .windows = {7}, YARN_, .window_rope_base = 1e4f}, NULL},
        {{OLMO3_, .L = 4, .window = 4, .windows = {7}, YARN_},
         "layers of olmo2 with a window have the rotary base 10000, unscaled"},
        {{.arch = ARCH_EXAONE4, .C = 128, .NH = 4, .L = 3, .scaling = {ROPE_LLAMA3, 4, 1, 4, 8}}, NULL},
        {{.arch = ARCH_EXAONE4, .C = 128, .NH = 4, .L = 3, .window = 4, .windows = {7}}, NULL},
        {{.arch = ARCH_EXAONE4, .C = 128, .NH = 4, .L = 4, .window = 4, .windows = {7}, .unrotated = {8}},
         "layer 3 of exaone4 with 4 layers has rotary"},
        {{.arch = ARCH_EXAONE4, .C = 128, .NH = 4, .L = 64},
         "layer 0 of exaone4 with 64 layers has a window"},
        {{.arch = ARCH_GRANITE4, .C = 128, .NH = 4, .L = 2, .unrotated = {3}},
         "layer 0 of granite with 2 layers has rotary"},
        {{.arch = ARCH_GEMMA3, .C = 128, .NH = 4, .L = 7, .window = 4, .windows = {0x5f}}, NULL},
        {{.arch = ARCH_GEMMA3,
          .C = 128,
          .NH = 4,
          .L = 7,
          .window = 4,
          .windows = {0x5f},
          .attention_scale = 0.125f},
         "by 5.65685, not by 8"},
        {{.arch = ARCH_GEMMA3,
          .C = 128,
          .NH = 4,
          .L = 7,
          .window = 4,
          .windows = {0x5f},
          .window_rope_base = 1e4f,
          .scaling = {ROPE_LINEAR, 8}},
         NULL},
        {{.arch = ARCH_GEMMA3,
          .C = 128,
          .NH = 4,
          .L = 7,
          .window = 4,
          .windows = {0x5f},
          .scaling = {ROPE_LINEAR, 8}},
         "layers of gemma3 with a window have the rotary base 10000, unscaled"},
        {{.arch = ARCH_GEMMA3, .C = 128, .NH = 4, .L = 7, .window = 4, .windows = {0x7f}},
         "layer 5 of gemma3 with 7 layers has no window"},
        {{.arch = ARCH_GEMMA3, .C = 128, .NH = 4, .L = 2}, "layer 0 of gemma3 with 2 layers has a window"},
        {{.arch = ARCH_PHI3, .C = 128, .NH = 4, .scaling = {ROPE_LONG, 4, 0, 0, 8}}, NULL},
        {{.arch = ARCH_PHI3, .C = 128, .NH = 4, .scaling = {ROPE_LLAMA3, 4, 1, 4, 8}}, "phi3 has no factors"},
        {{.arch = ARCH_PHI3, .C = 128, .NH = 4, .HS = 64}, "not 4 x 64 of 128"},
        {{.arch = ARCH_GLM4, .C = 128, .NH = 4, .HS = 64}, NULL},
        {{GPTOSS_, .L = 3, .window = 4, .windows = {5}, YARN_}, NULL},
        {{GPTOSS_, .L = 3, .window = 4, .windows = {5}, .scaling = {ROPE_YARN, 4, 1, 32, 8, 0, 1}},
         "truncate is false"},
        {{GPTOSS_, .L = 3, .window = 4, .windows = {7}}, "layer 1 of gpt-oss with 3 layers has no window"},
        {{GPTOSS_, .L = 3}, "layer 0 of gpt-oss with 3 layers has a window"},
        {{QWEN35_, .L = 5, .mixed = {0x17}, .mixer = {4, 2, 4, 16, 16}}, NULL},
        {{QWEN35_, .L = 3, .mixed = {7}, .mixer = {4, 2, 4, 16, 16}}, NULL},
        {{QWEN35_, .L = 2, .mixer = {4, 2, 4, 16, 16}}, NULL},
        {{QWEN35_, .L = 4, .mixed = {6}, .mixer = {4, 2, 4, 16, 16}},
         "every n-th layer of qwen35 has attention"},
        {{QWEN35_, .L = 4, .mixed = {7}, .mixer = {4, 2, 4, 16, 32}}, "of the same size, not of 16 and 32"},
        {{.arch = ARCH_LFM2, .C = 128, .NH = 4, .L = 4, .mixed = {6}, .mixer = {.taps = 3}}, NULL},
        {{.arch = ARCH_LFM2, .C = 128, .NH = 4, .HS = 64}, "not 4 x 64 of 128"},
        {{.arch = ARCH_GRANITE, .C = 128, .NH = 4, .HS = 64, .scaling = {ROPE_LLAMA3, 4, 1, 4, 8}}, NULL},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char error[ERROR_BYTES] = "";
        const int can = gguf_check(cases[i].cfg, error);
        EXPECT(cases[i].wanted ? !can && strstr(error, cases[i].wanted) : can, "case %zu: %s", i, error);
    }
}

// ---- scalings of rotary positions ----

// Expects a number behind its key, or behind the name of a tensor's data.
static void expect_float(const char* data, size_t bytes, const char* key, double wanted) {
    const char* at = memmem(data, bytes, key, strlen(key));
    float value = NAN;
    if (at) {
        memcpy(&value, at + strlen(key) + 4, sizeof(value)); // type 6
    }
    EXPECT_NEAR(value, wanted, 1e-6 * wanted, "%s", key);
}

// Writes a model with zeros for weights, and returns the file.
static char* write_zeros(ModelConfig cfg, size_t* bytes) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    char *data, error[ERROR_BYTES];
    GgufWriter w;
    const GgufModel model = {"scaled", cfg, GGUF_F32, NULL, model_card_of(0), GGUF_NO_START_TOKEN};
    char* memory = (char*)check_alloc(model_parameter_rows_of(rows, cfg, sizeof(float)), 1, "model");
    gguf_create(&w, test_path("scaled.gguf"), &model);
    for (int g = 0; g < model_groups(cfg); g++) {
        gguf_put(&w, rows, g, memory + tensor_group_offset_bytes(rows, g));
    }
    gguf_commit(&w);
    free(memory);
    CHECK(file_try_read(test_path("scaled.gguf"), 1 << 20, &data, bytes, error), "%s", error);
    return data;
}

// Writes a Llama with a scaling, and returns the file.
static char* write_scaled(RopeScaling scaling, size_t* bytes) {
    ModelConfig cfg = {.max_T = 64, .V = 5, .Vp = 128, .L = 1, .NH = 2, .C = 16, .arch = ARCH_LLAMA, .F = 8};
    cfg.scaling = scaling;
    for (int i = 0; i < 4 && scaling.kind == ROPE_LONG; i++) {
        cfg.rope_factors.near[i] = 1 + (float)i, cfg.rope_factors.far[i] = 10 + (float)i;
    }
    return write_zeros(cfg, bytes);
}

// llama.cpp knows these windows: the file has them, and the whole context.
TEST(windows_in_file) {
    ModelConfig cfg = {.max_T = 64,
                       .V = 5,
                       .Vp = 128,
                       .L = 4,
                       .NH = 2,
                       .C = 16,
                       .arch = ARCH_OLMO3,
                       .F = 8,
                       .has_head = 1,
                       .window = 9,
                       .windows = {7}};
    size_t bytes;
    char* data = write_zeros(cfg, &bytes);
    EXPECT(memmem(data, bytes, "olmo2.context_length\4\0\0\0\100\0\0\0", 28), "context");
    EXPECT(memmem(data, bytes, "olmo2.attention.sliding_window\4\0\0\0\11\0\0\0", 38), "window");
    EXPECT(memmem(data, bytes, "sliding_window_pattern\11\0\0\0\7\0\0\0\4\0\0\0\0\0\0\0\1\1\1\0", 42),
           "layers");
    free(data);
}

// Returns the elements of a tensor of fp32 in a file.
static const float* tensor_of(const char* data, size_t bytes, const char* name) {
    const char *begin = data, *info = memmem(data, bytes, name, strlen(name));
    CHECK(info, "%s", name);
    Reader r = {name, (char*)data, bytes, (size_t)(info - begin) + strlen(name)};
    const uint32_t ndim = take_u32(&r);
    take(&r, 8 * ndim + 4);
    const uint64_t offset = take_u64(&r);
    r.at = 0;
    take(&r, 8);
    const uint64_t tensors = take_u64(&r);
    const char* first = memmem(data, bytes, "token_embd.weight", 17);
    CHECK(first, "no embedding");
    r.at = (size_t)(first - begin) - 8;
    return (const float*)(const void*)(data + data_begin(r, tensors) + offset);
}

// Writes a model of an architecture whose element i of each parameter is i + 1, and returns the
// file.
static char* write_counted(ModelConfig cfg, size_t* bytes) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    char *data, error[ERROR_BYTES];
    GgufWriter w;
    const GgufModel model = {"counted", cfg, GGUF_F32, NULL, model_card_of(0), GGUF_NO_START_TOKEN};
    char* memory = (char*)check_alloc(model_parameter_rows_of(rows, cfg, sizeof(float)), 1, "model");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (size_t k = 0; k < rows[i].rows * rows[i].cols; k++) {
            ((float*)tensor_at_layer(&rows[i], memory, 0))[k] = (float)k + 1;
        }
    }
    gguf_create(&w, test_path("counted.gguf"), &model);
    for (int g = 0; g < model_groups(cfg); g++) {
        gguf_put(&w, rows, g, memory + tensor_group_offset_bytes(rows, g));
    }
    gguf_commit(&w);
    free(memory);
    CHECK(file_try_read(test_path("counted.gguf"), 1 << 20, &data, bytes, error), "%s", error);
    return data;
}

// Norms of Gemma have what the model adds to them; Phi's queries, keys and values are one matrix,
// with the halves of heads that turn apart; GLM's gate and up are one, and its pairs stay.
TEST(norms_and_fused) {
    ModelConfig cfg = {.max_T = 64, .V = 5, .Vp = 128, .L = 1, .NH = 2, .C = 16, .KV = 1, .F = 8};
    size_t bytes;
    cfg.arch = ARCH_GEMMA3, cfg.window = 4, cfg.windows[0] = 1, cfg.window_rope_base = 100;
    char* data = write_counted(cfg, &bytes);
    static const char* const norms[] = {"blk.0.attn_norm.weight", "blk.0.post_ffw_norm.weight",
                                        "output_norm.weight"};
    for (int i = 0; i < 3; i++) {
        EXPECT(tensor_of(data, bytes, norms[i])[3] == 5, "%s: %g", norms[i],
               (double)tensor_of(data, bytes, norms[i])[3]);
    }
    EXPECT(tensor_of(data, bytes, "blk.0.attn_q_norm.weight")[1] == 4, "its third element is its second");
    expect_float(data, bytes, "gemma3.rope.freq_base_swa", 100);
    EXPECT(memmem(data, bytes, "sliding_window\4\0\0\0\4\0\0\0", 22), "window");
    EXPECT(memmem(data, bytes, "context_length\4\0\0\0\100\0\0\0", 22), "all of the context");
    free(data);
    cfg = (ModelConfig){.max_T = 64, .V = 5, .Vp = 128, .L = 1, .NH = 2, .C = 16, .KV = 1, .F = 8};
    cfg.arch = ARCH_PHI3, cfg.has_head = 1;
    data = write_counted(cfg, &bytes);
    static const int lines[] = {0, 2, 4, 6, 1, 3, 5, 7}; // of a head
    const float* qkv = tensor_of(data, bytes, "blk.0.attn_qkv.weight");
    for (int i = 0; i < 32; i++) {
        const int line = i < 24 ? i / 8 * 8 + lines[i % 8] : i;
        EXPECT(qkv[16 * i] == (float)(16 * line + 1), "line %d: %g", i, (double)qkv[16 * i]);
    }
    EXPECT(tensor_of(data, bytes, "blk.0.ffn_up.weight")[8 * 16] == 8 * 16 + 1, "up after gate");
    EXPECT(memmem(data, bytes, "sliding_window\4\0\0\0\0\0\0\0", 22), "no window");
    free(data);
    cfg.arch = ARCH_GLM4, cfg.rope_dims = 4;
    data = write_counted(cfg, &bytes);
    EXPECT(tensor_of(data, bytes, "blk.0.attn_k.weight")[16] == 16 * 16 + 17, "pairs stay");
    EXPECT(tensor_of(data, bytes, "blk.0.post_attention_norm.weight")[3] == 4, "a norm without offset");
    free(data);
}

TEST(scalings) {
    size_t bytes;
    char* data = write_scaled((RopeScaling){ROPE_YARN, 8, 1.5f, 24, 32, 1.5f}, &bytes);
    EXPECT(memmem(data, bytes, "\4\0\0\0\0\0\0\0yarn", 12), "type");
    expect_float(data, bytes, "llama.rope.scaling.factor", 8);
    expect_float(data, bytes, "llama.rope.scaling.yarn_beta_fast", 24);
    expect_float(data, bytes, "llama.rope.scaling.yarn_beta_slow", 1.5);
    expect_float(data, bytes, "llama.rope.scaling.attn_factor", 1.5 / 1.2079441541679836);
    EXPECT(memmem(data, bytes, "original_context_length\4\0\0\0\40\0\0\0", 31), "context");
    EXPECT(!memmem(data, bytes, "rope_factors", 12), "yarn has no tensor");
    free(data);
    data = write_scaled((RopeScaling){ROPE_LONG, 4, 0, 0, 16, 1.25f}, &bytes);
    static const float factors[2][8] = {{10, 11, 12, 13}, {1, 2, 3, 4}}; // gaps up to 32 bytes
    EXPECT(memmem(data, bytes, "\10\0\0\0\0\0\0\0longrope", 16), "type");
    expect_float(data, bytes, "llama.rope.scaling.attn_factor", 1.25);
    EXPECT(memmem(data, bytes, factors, sizeof(factors)), "factors");
    EXPECT(memmem(data, bytes, "rope_factors_long.weight", 24) <
               memmem(data, bytes, "rope_factors_short.weight", 25),
           "names");
    free(data);
}
