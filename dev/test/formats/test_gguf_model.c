// test_gguf_model.c -- gguf_file.h, gguf_tensors.h, gguf_config.h and bpe_gguf.h: models and
// tokenizers that gguf.h wrote are read back, and written again as the same bytes; a file of
// gguf-py has its numbers; files that are damaged, or ask for what we do not compute, are refused.
#include "llmc/base/file.h"
#include "llmc/base/float16.h"
#include "llmc/base/gguf_file.h"
#include "llmc/formats/gguf.h"
#include "llmc/formats/gguf_config.h"
#include "llmc/formats/gguf_tensors.h"
#include "llmc/formats/hf_config.h"
#include "llmc/reference_model.h"
#include "llmc/tokenizer/bpe_gguf.h"
#include "llmc/tokenizer/tokenizer.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/test_element.h"
#include "dev/test/lib/whole_model.h"

#define FIXTURES "dev/ref/fixtures/"
#define MIXED FIXTURES "gguf/mixed.gguf"

enum { SEQUENCES = 2, TOKENS = 13 }; // of the fixtures

static const char* const models[] = {
    "llama",    "llama3",  "mistral",       "qwen2",         "qwen3",    "qwen3_tied", "arcee",
    "mixtral",  "olmoe",   "glm4moe",       "glm4moe_dense", "yarn",     "longrope",   "olmo2",
    "granite",  "smollm3", "longrope_near", "granite4",      "qwen3moe", "exaone4",    "olmo3",
    "nanochat", "gemma2",  "yarn_exact",    "gemma3",        "phi3",     "glm4",       "deepseek3"};
enum { MODELS = sizeof(models) / sizeof(models[0]) };

typedef struct {
    ModelConfig cfg;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    size_t elements;
    float* memory;
} Whole;

static Whole whole_open(const char* path, ModelConfig cfg) {
    Whole whole;
    whole.cfg = cfg;
    whole.elements = model_parameter_rows_of(whole.rows, cfg, sizeof(float)) / sizeof(float);
    whole.memory = (float*)check_alloc(whole.elements, sizeof(float), path);
    whole_model_read(path, cfg, whole.rows, whole.memory);
    return whole;
}

static void write_gguf(const char* path, const Whole* whole, GgufDtype dtype, const Bpe* bpe) {
    GgufWriter writer;
    const GgufModel model = {"fixture",          whole->cfg, dtype, bpe, bpe ? bpe->card : model_card_of(0),
                             GGUF_NO_START_TOKEN};
    gguf_create(&writer, path, &model);
    for (int g = 0; g < model_groups(whole->cfg); g++) {
        gguf_put(&writer, whole->rows, g,
                 (const char*)whole->memory + tensor_group_offset_bytes(whole->rows, g));
    }
    gguf_commit(&writer);
}

static void expect_same_bytes(const char* a, const char* b) {
    char *first, *second, error[ERROR_BYTES];
    size_t first_bytes, second_bytes;
    CHECK(file_try_read(a, 1 << 24, &first, &first_bytes, error), "%s", error);
    CHECK(file_try_read(b, 1 << 24, &second, &second_bytes, error), "%s", error);
    EXPECT(first_bytes == second_bytes && memcmp(first, second, first_bytes) == 0, "%s and %s", a, b);
    free(first);
    free(second);
}

// ---- models ----

static double loss_of(const Whole* whole, const int* tokens) {
    RefModel model;
    ref_model_open(&model, whole->cfg, SEQUENCES, TOKENS);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (size_t k = 0; k < tensor_elements(&whole->rows[i]); k++) {
            *(Real*)test_element(&model.rows[i], model.params, k) =
                *(const float*)test_element(&whole->rows[i], whole->memory, k);
        }
    }
    const double loss = ref_model_forward(&model, tokens, tokens + 1, NULL);
    ref_model_close(&model);
    return loss;
}

// The loss of the model that was written; transformers' own, unless it was adapted.
static void expect_loss(const Whole* read, const Whole* whole, const char* name, int is_adapted) {
    SafeTensors expected;
    char path[PATH_MAX];
    int tokens[SEQUENCES * TOKENS + 1];
    double wanted;
    if (read->cfg.max_T < TOKENS) {
        return; // cut to its window
    }
    snprintf(path, sizeof(path), FIXTURES "models/%s/expected.safetensors", name);
    safetensors_open(&expected, path);
    for (int i = 0; i < SEQUENCES * TOKENS + 1; i++) {
        tokens[i] = ((const int32_t*)safetensors_find(&expected, "tokens")->data)[i];
    }
    memcpy(&wanted, safetensors_find(&expected, "loss")->data, sizeof(wanted));
    const double found = loss_of(read, tokens);
    EXPECT_NEAR(found, is_adapted ? loss_of(whole, tokens) : wanted, is_adapted ? 1e-7 : 1e-5, "%s: loss",
                name);
    safetensors_close(&expected);
}

// Ranks read parts of groups: each element is the one of a whole read.
static void expect_parts(const char* path, const Whole* whole) {
    HfModel model;
    hf_model_open(&model, path, HF_LAST, whole->cfg, whole->cfg.arch);
    for (int g = 0; g < model_groups(whole->cfg); g++) {
        const size_t at = tensor_group_offset_bytes(whole->rows, g) / sizeof(float),
                     end_at = g + 1 < model_groups(whole->cfg)
                                  ? tensor_group_offset_bytes(whole->rows, g + 1) / sizeof(float)
                                  : whole->elements,
                     elements = end_at - at;
        const float* wanted = whole->memory + at;
        float* group = (float*)check_alloc(elements, sizeof(float), "group");
        for (size_t first = 0; first < elements; first += 777) {
            const size_t end = first + 777 < elements ? first + 777 : elements;
            memset(group, 0, elements * sizeof(float));
            hf_model_read(&model, whole->rows, g, first, end, group);
            EXPECT(memcmp(group + first, wanted + first, (end - first) * sizeof(float)) == 0, "%s: %zu", path,
                   first);
        }
        free(group);
    }
    hf_model_close(&model);
}

static Whole test_model(const char* name, const Whole* whole, GgufDtype dtype) {
    char path[PATH_MAX], again[PATH_MAX];
    snprintf(path, sizeof(path), "%s", test_path("model.gguf"));
    snprintf(again, sizeof(again), "%s", test_path("again.gguf"));
    write_gguf(path, whole, dtype, NULL);
    Whole read = whole_open(path, gguf_config_read(path));
    write_gguf(again, &read, dtype, NULL);
    if (dtype != GGUF_Q8_0) {
        expect_same_bytes(path, again);
    }
    const float offset = model_norm_offset(whole->cfg); // w + 1 is rounded to fp32
    for (size_t k = 0; k < whole->elements; k++) {
        const float wanted = whole->memory[k], found = read.memory[k];
        // 8 bits of a block whose largest number is below 1; bf16 has 8 bits, too
        const float tolerance =
            dtype == GGUF_F32 ? offset * (1 + fabsf(wanted)) * 0x1p-24f : fmaxf(fabsf(wanted), 1) / 128;
        EXPECT(fabsf(found - wanted) <= tolerance, "%s: %zu is %g, wanted %g", name, k, (double)found,
               (double)wanted);
    }
    return read;
}

// Changes what llama.cpp does not compute. Returns 1 if the weights have other sizes then.
static int adapt(ModelConfig* cfg) {
    const GgufArch* arch = &gguf_archs[cfg->arch];
    const int is_grouped = arch->fills_channels == 2 && model_key_heads(*cfg) != cfg->NH,
              grows = is_grouped || (arch->fills_channels && model_heads(*cfg) != cfg->C);
    cfg->HS = grows ? cfg->C / cfg->NH : cfg->HS;
    cfg->KV = is_grouped ? cfg->NH : cfg->KV;
    cfg->attention_scale = FAMILY_GRANITE >> cfg->arch & 1 ? cfg->attention_scale : 0;
    cfg->scaling.is_exact = 0;
    if (cfg->scaling.kind == ROPE_LONG && !arch->has_longrope) {
        memset(&cfg->scaling, 0, sizeof(cfg->scaling));
        memset(&cfg->rope_factors, 0, sizeof(cfg->rope_factors));
    }
    gguf_set_layers(cfg);
    return grows;
}

// Fills a model with numbers around 0.
static Whole random_open(const char* name, ModelConfig cfg) {
    Whole whole = {.cfg = cfg};
    whole.elements = model_parameter_rows_of(whole.rows, cfg, sizeof(float)) / sizeof(float);
    whole.memory = (float*)check_alloc(whole.elements, sizeof(float), name);
    for (int g = 0; g < model_groups(cfg); g++) {
        model_random_group(whole.rows, cfg, 3, g,
                           (char*)whole.memory + tensor_group_offset_bytes(whole.rows, g));
    }
    return whole;
}

TEST(read_back) {
    for (int i = 0; i < MODELS; i++) {
        char path[PATH_MAX], error[ERROR_BYTES];
        snprintf(path, sizeof(path), FIXTURES "models/%s", models[i]);
        const ModelConfig cfg = hf_config_read(path);
        ModelConfig adapted = cfg;
        const int has_other_sizes = !gguf_check(cfg, error) && adapt(&adapted);
        const int is_adapted = memcmp(&adapted, &cfg, sizeof(cfg)) != 0;
        if (!gguf_check(adapted, error)) {
            EXPECT(strcmp(models[i], "nanochat") == 0, "%s: %s", models[i], error);
            continue;
        }
        Whole whole = has_other_sizes ? random_open(path, adapted) : whole_open(path, adapted);
        for (int dtype = GGUF_F32; dtype <= GGUF_Q8_0; dtype++) {
            Whole read = test_model(models[i], &whole, (GgufDtype)dtype);
            if (dtype == GGUF_F32) {
                expect_loss(&read, &whole, models[i], is_adapted);
                expect_parts(test_path("model.gguf"), &read);
            }
            free(read.memory);
        }
        free(whole.memory);
    }
}

// GPT-2 has transposed matrices at Hugging Face and no keys of rotary positions.
TEST(gpt2) {
    const ModelConfig cfg = {.max_T = 16, .V = 100, .Vp = 128, .L = 2, .NH = 2, .C = 32};
    Whole whole = random_open("gpt2", cfg), again = test_model("gpt2", &whole, GGUF_F16);
    const ModelConfig read = gguf_config_read(test_path("model.gguf"));
    EXPECT(memcmp(&read, &cfg, sizeof(cfg)) == 0, "configuration");
    free(whole.memory);
    free(again.memory);
}

// ---- a file of gguf-py ----

TEST(file_of_gguf_py) {
    SafeTensorsSet set;
    char *text, error[ERROR_BYTES], name[64];
    size_t bytes, elements, tensors = 0;
    double sum;
    int length;
    gguf_tensors_open(&set, MIXED);
    CHECK(file_try_read(FIXTURES "gguf/sums.txt", 1 << 12, &text, &bytes, error), "%s", error);
    for (const char* at = text; sscanf(at, "%63s %zu %lf %n", name, &elements, &sum, &length) == 3;
         at += length, tensors++) {
        const SafeTensorsView* view = safetensors_set_find(&set, name);
        CHECK(view && view->elements == elements, "%s", name);
        float* values = (float*)check_alloc(elements, sizeof(float), name);
        safetensors_read_f32(view, values);
        double found = 0;
        for (size_t i = 0; i < elements; i++) {
            found += (double)values[i] * (double)(i % 7 + 1);
        }
        EXPECT_NEAR(found, sum, 1e-9, "%s", name);
        free(values);
    }
    EXPECT(tensors == 11 && set.files[0].num_tensors == 11, "%zu tensors", tensors);
    free(text);
    safetensors_set_close(&set);
    const ModelConfig cfg = gguf_config_read(MIXED);
    EXPECT(cfg.arch == ARCH_LLAMA && cfg.V == 48 && cfg.C == 64 && cfg.F == 64 && cfg.NH == 2 &&
               cfg.KV == 1 && !cfg.has_head,
           "sizes");
    Whole whole = whole_open(MIXED, cfg);
    free(whole.memory);
}

// ---- what is refused ----

static void body_read(const void* path) {
    const ModelConfig cfg = gguf_config_read((const char*)path);
    Whole whole = whole_open((const char*)path, cfg);
    free(whole.memory);
}

static char* fixture_copy(size_t* bytes) {
    char *text, error[ERROR_BYTES];
    CHECK(file_try_read(MIXED, 1 << 20, &text, bytes, error), "%s", error);
    return text;
}

static const char* write_bytes(const char* bytes, size_t count) {
    const char* path = test_path("bad.gguf");
    FILE* file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, count, file) == count && fclose(file) == 0, "%s", path);
    return path;
}

// Returns the place after a text.
static size_t after(const char* bytes, size_t count, const char* text) {
    const char* at = (const char*)memmem(bytes, count, text, strlen(text));
    CHECK(at, "the fixture has no %s", text);
    return (size_t)(at - bytes) + strlen(text);
}

TEST(refused) {
    static const struct {
        const char* after; // place of the change; "": the first byte
        long skip;         // bytes further on
        const char* bytes;
        size_t count;
        const char* wanted;
    } cases[] = {
        {"", 0, "GGUX", 4, "bad.gguf: magic number|wanted GGUF"},
        {"", 4, "\4", 1, "bad.gguf: version 4 of GGUF, wanted 2 or 3"},
        {"", 4, "\1", 1, "bad.gguf: version 1 of GGUF, wanted 2 or 3"},
        {"", 15, "\1", 1, "tensors and|wanted at most"},
        {"", 23, "\1", 1, "tensors and|wanted at most"},
        {"general.architecture", 12, "llamb", 5,
         "general.architecture is llamb|wanted one of gpt2, llama, qwen2"},
        {"llama.context_length", 0, "\x0D", 1, "key llama.context_length has values of type 13"},
        {"llama.context_length", 4, "\0\0\0\0", 4, "context"},
        {"llama.block_count", 4, "\2", 1, "bad.gguf: no tensor blk.1.attn_norm.weight"},
        {"llama.feed_forward_length", 4, "\x20", 1,
         "tensor blk.0.ffn_gate.weight is (64, 64), wanted (32, 64)"},
        {"llama.attention.head_count_kv", 4, "\2", 1,
         "tensor blk.0.attn_k.weight is (32, 64), wanted (64, 64)"},
        {"llama.rope.dimension_count", 4, "\3", 1,
         "rotary positions turn 3 of 32 channels of a head, wanted an even number"},
        {"llama.rope.freq_base", -4, "xase", 4, "llama.rope.freq_xase changes what the model computes"},
        {"blk.0.attn_q.weight", 4, "\xFF\xFF\xFF\xFF\xFF\xFF", 6, "tensor blk.0.attn_q.weight has"},
        {"blk.0.attn_q.weight", 0, "\5", 1, "tensor blk.0.attn_q.weight has 5 dimensions, wanted 1 to 4"},
        {"blk.0.attn_q.weight", 20, "\x0C", 1,
         "tensor blk.0.attn_q.weight is Q4_K (type 12), wanted F32, F16, BF16, Q8_0 or Q4_0"},
        {"blk.0.attn_q.weight", 24, "\1", 1, "tensor blk.0.attn_q.weight has 8192 bytes at|a multiple of 32"},
        {"blk.0.attn_q.weight", 28, "\1", 1,
         "tensor blk.0.attn_q.weight has 8192 bytes at|wanted them among"},
        {"blk.0.attn_q.weight", -8, "x", 1, "no tensor blk.0.attn_q.weight"},
        {"blk.0.attn_q.weight", -8, "k", 1, "blk.0.attn_k.weight appears twice"},
        {"blk.0.attn_q.weight", -3, "\n", 1, "byte 16 of a name is 10, wanted ASCII"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t bytes;
        char* text = fixture_copy(&bytes);
        memcpy(text + (long)after(text, bytes, cases[i].after) + cases[i].skip, cases[i].bytes,
               cases[i].count);
        EXPECT(test_dies(body_read, write_bytes(text, bytes), 1, cases[i].wanted), "case %zu: %s", i,
               cases[i].wanted);
        free(text);
    }
}

TEST(numbers_that_are_not_finite) {
    size_t bytes;
    char* text = fixture_copy(&bytes);
    SafeTensorsSet set;
    gguf_tensors_open(&set, MIXED);
    const size_t at = (size_t)(safetensors_set_find(&set, "blk.0.attn_q.weight")->data - set.files[0].map);
    safetensors_set_close(&set);
    memcpy(text + at + 2, "\x80\x7F", 2);
    EXPECT(test_dies(body_read, write_bytes(text, bytes), 1,
                     "tensor blk.0.attn_q.weight, element 1 is inf, wanted a finite"));
    free(text);
}

// A file that ends early is one clear line, wherever it ends.
TEST(cut) {
    size_t bytes;
    char* text = fixture_copy(&bytes);
    for (size_t count = 0; count + 64 < bytes; count += count < 1500 ? 61 : 4001) {
        EXPECT(test_dies(body_read, write_bytes(text, count), 1, "bad.gguf: "), "%zu bytes", count);
    }
    free(text);
}

// ---- tokenizers ----

// Returns the ids of a text, which the caller frees.
static int* ids_of(const Tokenizer* tokenizer, const char* text, size_t* count) {
    const size_t bytes = strlen(text);
    int* ids = (int*)check_alloc(bytes + 2, sizeof(int), "ids");
    *count = tokenizer_encode(tokenizer, text, bytes, ids);
    return ids;
}

// Writes a tokenizer into the file of a model that has 7 more tokens, and reads it. SentencePiece's
// in tokenizer.json may differ in where texts begin, which GGUF does not say.
static void test_tokenizer(const char* file, const char* pre, int is_same) {
    static const char text[] =
        "It's 12345 degrees, isn't it?  \n\n\tNo: the caf\xC3\xA9's th\xC3\xA9 <|endoftext|> 7x\r\n";
    char from[PATH_MAX], path[PATH_MAX];
    Tokenizer own, read;
    snprintf(from, sizeof(from), FIXTURES "%s", file);
    snprintf(path, sizeof(path), "%s", test_path("tokenizer.gguf"));
    tokenizer_open_file(&own, from);
    const ModelConfig cfg = {.max_T = 8,
                             .V = own.vocab_size + 7,
                             .Vp = model_padded_vocab(own.vocab_size + 7),
                             .L = 1,
                             .NH = 1,
                             .C = 8};
    Whole whole = {.cfg = cfg};
    whole.memory = (float*)check_alloc(model_parameter_rows_of(whole.rows, cfg, sizeof(float)), 1, file);
    write_gguf(path, &whole, GGUF_F32, own.bpe);
    EXPECT(strcmp(bpe_gguf_pre(own.bpe), pre) == 0 && tokenizer_is_in(path), "%s", file);
    tokenizer_open_file(&read, path);
    EXPECT(!is_same || tokenizer_is_same(&own, &read), "%s: %d tokens and %d, start %d and %d", file,
           own.vocab_size, read.vocab_size, own.eot, read.eot);
    size_t wanted, count;
    int *ids = ids_of(&own, text, &wanted), *found = ids_of(&read, text, &count);
    EXPECT(count == wanted && memcmp(ids, found, count * sizeof(int)) == 0, "%s: ids", file);
    EXPECT(tokenizer_is_end(&read, own.bpe->card.ends[0]) && read.eot == own.eot, "%s: its ends", file);
    EXPECT(strcmp(bpe_gguf_pre(read.bpe), pre) == 0, "%s: %s", file, bpe_gguf_pre(read.bpe));
    write_gguf(test_path("again.gguf"), &whole, GGUF_F32, read.bpe);
    expect_same_bytes(path, test_path("again.gguf"));
    tokenizer_write_hf(&read, &read.bpe->card, test_path(""), 8); // a checkpoint's files
    tokenizer_close(&own);
    tokenizer_open_file(&own, test_path(""));
    EXPECT(tokenizer_is_same(&own, &read), "%s: written for Hugging Face", file);
    remove(test_path("tokenizer.json"));
    remove(test_path("tokenizer.model"));
    tokenizer_close(&own);
    tokenizer_close(&read);
    free(ids);
    free(found);
    free(whole.memory);
}

TEST(tokenizers) {
    static const struct {
        const char *file, *pre;
        int is_same;
    } cases[] = {
        {"tokenizers/gpt2.json", "gpt-2", 1},           {"tokenizers/smollm2.json", "smollm", 1},
        {"tokenizers/qwen2.json", "qwen2", 1},          {"tokenizers/olmo.json", "olmo", 1},
        {"tokenizers/llama3.json", "llama-bpe", 1},     {"tokenizers/glm4.json", "dbrx", 1},
        {"sentencepiece/llama2.model", "default", 1},   {"sentencepiece/gemma.model", "default", 1},
        {"sentencepiece/crossing.model", "default", 1}, {"sentencepiece/llama2.json", "default", 0},
        {"sentencepiece/gemma.json", "default", 0},     {"sentencepiece/mistral.json", "default", 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        test_tokenizer(cases[i].file, cases[i].pre, cases[i].is_same);
    }
    EXPECT(!tokenizer_is_in(MIXED), "no tokenizer");
}
