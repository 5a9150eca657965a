// test_families.c -- families.h, hf_config.h and hf_model.h with the models that transformers saved
// (dev/ref/make_model_fixtures.py): they have its logits, loss and gradient, and are written as it
// wrote them.
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/base/float16.h"
#include "llmc/formats/hf_config.h"
#include "llmc/formats/hf_config_write.h"
#include "llmc/formats/hf_model.h"
#include "llmc/reference_model.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/test_element.h"
#include "dev/test/lib/whole_model.h"

#define FIXTURES "dev/ref/fixtures/models/"

enum { SEQUENCES = 2, TOKENS = 13 }; // of the fixtures

static const char* const names[] = {"llama",         "llama3",          "mistral",      "qwen2",
                                    "qwen3",         "qwen3_tied",      "arcee",        "nanochat",
                                    "mixtral",       "qwen3moe",        "olmoe",        "glm4moe",
                                    "yarn",          "yarn_exact",      "longrope",     "longrope_near",
                                    "olmo2",         "granite",         "gemma2",       "smollm3",
                                    "olmo3",         "exaone4",         "granite4",     "gemma3",
                                    "phi3",          "gptoss",          "gptoss_mxfp4", "glm4",
                                    "glm4moe_dense", "glm4moe_groups",  "qwen35",       "lfm2",
                                    "deepseek3",     "deepseek3_plain", "llmc_llama",   "llmc_nanochat"};
enum { FAMILIES = sizeof(names) / sizeof(names[0]) };

typedef struct {
    char path[PATH_MAX];
    ModelConfig cfg;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    float* memory;
} Family;

static Family family_open(const char* name) {
    Family family;
    snprintf(family.path, sizeof(family.path), FIXTURES "%s", name);
    family.cfg = hf_config_read(family.path);
    family.memory =
        (float*)check_alloc(model_parameter_rows_of(family.rows, family.cfg, sizeof(float)), 1, name);
    whole_model_read(family.path, family.cfg, family.rows, family.memory);
    return family;
}

// ---- what a model computes ----

// Opens the reference with the weights of a family.
static void reference_open(RefModel* model, const Family* family) {
    ref_model_open(model, family->cfg, SEQUENCES, TOKENS);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (size_t k = 0; k < tensor_elements(&family->rows[i]); k++) {
            *(Real*)test_element(&model->rows[i], model->params, k) =
                *(const float*)test_element(&family->rows[i], family->memory, k);
        }
    }
}

static void expect_logits(const RefModel* model, const SafeTensors* expected, const char* name,
                          double tolerance) {
    const Real* logits = ref_activations_(model, model->acts, model->cfg.L).logits;
    const size_t V = (size_t)model->cfg.V, Vp = (size_t)model->cfg.Vp;
    float wanted[SEQUENCES * TOKENS * 64];
    const SafeTensorsView* view = safetensors_find(expected, "logits");
    EXPECT(view && view->elements == SEQUENCES * TOKENS * V && V <= 64, "%s: the fixture", name);
    safetensors_read_f32(view, wanted);
    double worst = 0;
    for (size_t i = 0; i < SEQUENCES * TOKENS * V; i++) {
        const Real logit = ref_softcap_(logits[i / V * Vp + i % V], (Real)model->cfg.softcap);
        worst = fmax(worst, fabs(logit - (double)wanted[i]));
    }
    EXPECT(worst < tolerance, "%s: a logit differs by %g", name, worst);
}

static double expected_number(const SafeTensors* expected, const char* name) {
    double number;
    memcpy(&number, safetensors_find(expected, name)->data, sizeof(number));
    return number;
}

// Sets the tokens of a fixture, one more than its sequences have.
static void read_tokens(int tokens[SEQUENCES * TOKENS + 1], const SafeTensors* expected) {
    const int32_t* text = (const int32_t*)safetensors_find(expected, "tokens")->data;
    for (int i = 0; i < SEQUENCES * TOKENS + 1; i++) {
        tokens[i] = text[i];
    }
}

// transformers keeps norms and rotary positions in fp32, so its numbers are within a few units of
// the last place of fp32, 1e-7, times what a few layers make of it; the delta rule is in fp32, too.
static void test_numbers(const char* name) {
    Family family = family_open(name);
    const int is_delta = model_mixer(family.cfg) == MIXER_DELTA;
    RefModel model;
    SafeTensors expected;
    char path[PATH_MAX];
    int tokens[SEQUENCES * TOKENS + 1];
    snprintf(path, sizeof(path), FIXTURES "%s/expected.safetensors", name);
    safetensors_open(&expected, path);
    read_tokens(tokens, &expected);
    reference_open(&model, &family);
    const double loss = ref_model_forward(&model, tokens, tokens + 1, NULL);
    expect_logits(&model, &expected, name, is_delta ? 5e-5 : 1e-5);
    EXPECT_NEAR(loss, expected_number(&expected, "loss"), 1e-6, "%s: loss", name);
    ref_model_backward(&model, tokens, tokens + 1, NULL);
    const double norm = ref_gradient_norm(model.grads, model.parameter_bytes / sizeof(Real)),
                 wanted = expected_number(&expected, "norm");
    EXPECT_NEAR(norm, wanted, fmax(is_delta ? 5e-5 : 1e-5, 2e-6 * wanted), "%s: gradient norm", name);
    safetensors_close(&expected);
    ref_model_close(&model);
    free(family.memory);
}

TEST(numbers) {
    for (int i = 0; i < FAMILIES; i++) {
        test_numbers(names[i]);
    }
}

// Layers with other rotary positions have the numbers of positions.txt.
static void test_positions(const Family* family, const char* line) {
    RefModel model;
    SafeTensors expected;
    char *text, error[ERROR_BYTES];
    size_t bytes;
    int tokens[SEQUENCES * TOKENS + 1];
    double loss = 0, norm = 0;
    CHECK(file_try_read(FIXTURES "positions.txt", 1 << 12, &text, &bytes, error), "%s", error);
    const char* at = strstr(text, line);
    EXPECT(at && sscanf(at + strlen(line), ": %lf %lf", &loss, &norm) == 2, "%s", line);
    free(text);
    safetensors_open(&expected, FIXTURES "llama/expected.safetensors");
    read_tokens(tokens, &expected);
    safetensors_close(&expected);
    reference_open(&model, family);
    EXPECT_NEAR(ref_model_forward(&model, tokens, tokens + 1, NULL), loss, 1e-6, "%s: loss", line);
    ref_model_backward(&model, tokens, tokens + 1, NULL);
    EXPECT_NEAR(ref_gradient_norm(model.grads, model.parameter_bytes / sizeof(Real)), norm, 1e-5,
                "%s: gradient norm", line);
    ref_model_close(&model);
}

TEST(positions_by_layer) {
    Family family = family_open("llama");
    family.cfg.unrotated[0] = 2;
    test_positions(&family, "unrotated");
    free(family.memory);
    family = family_open("qwen3");
    family.cfg.window_rope_base = 100, family.cfg.window_scaling = (RopeScaling){ROPE_LINEAR, 2};
    test_positions(&family, "by window");
    free(family.memory);
}

// ---- files ----

// Writes a model in a type that holds its weights exactly.
static void write_as(const Family* family, const char* directory, SafeTensorsDtype dtype) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    void* memory =
        check_alloc(model_parameter_rows_of(rows, family->cfg, safetensors_dtype_bytes(dtype)), 1, "model");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (size_t k = 0; k < tensor_elements(&rows[i]); k++) {
            const float x = *(const float*)test_element(&family->rows[i], family->memory, k);
            const uint16_t narrow = dtype == SAFETENSORS_BF16 ? bf16_from_float(x) : fp16_from_float(x);
            memcpy(test_element(&rows[i], memory, k),
                   dtype == SAFETENSORS_F32 ? (const void*)&x : (const void*)&narrow, rows[i].element_bytes);
        }
    }
    hf_config_write(directory, family->cfg, dtype, model_card_of(family->cfg.V - 1), NULL);
    whole_model_write(directory, family->cfg, rows, memory, dtype);
    free(memory);
}

// The weights of a family have the bytes that transformers gave them, and nothing else does.
static void expect_same_files(const char* theirs, const char* ours, const char* name) {
    SafeTensorsSet a, b;
    size_t tensors = 0;
    safetensors_set_open(&a, theirs, "model");
    safetensors_set_open(&b, ours, "model");
    for (size_t f = 0; f < a.num_files; f++) {
        for (size_t t = 0; t < a.files[f].num_tensors; t++, tensors++) {
            const SafeTensorsView* view = &a.files[f].tensors[t];
            const SafeTensorsView* again = safetensors_set_require(&b, view->name, view->ndim, view->shape);
            EXPECT(again->dtype == view->dtype && memcmp(again->data, view->data, view->bytes) == 0, "%s: %s",
                   name, view->name);
        }
    }
    EXPECT(b.num_files == 1 && b.files[0].num_tensors == tensors, "%s: %zu tensors, wanted %zu", name,
           b.files[0].num_tensors, tensors);
    safetensors_set_close(&a);
    safetensors_set_close(&b);
}

static SafeTensorsDtype dtype_of(const char* directory) {
    SafeTensorsSet set;
    safetensors_set_open(&set, directory, "model");
    const SafeTensorsDtype dtype = set.files[0].tensors[0].dtype;
    safetensors_set_close(&set);
    return dtype;
}

// The directory has these weights, bit by bit.
static void expect_same_weights(const char* directory, const Family* family, const char* name) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    float* memory = (float*)check_alloc(model_parameter_rows_of(rows, family->cfg, sizeof(float)), 1, name);
    whole_model_read(directory, family->cfg, rows, memory);
    for (int row = 0; row < MODEL_PARAMETER_ROWS; row++) {
        int differs = 0;
        for (size_t k = 0; k < tensor_elements(&rows[row]); k++) {
            differs += memcmp(test_element(&rows[row], memory, k),
                              test_element(&family->rows[row], family->memory, k), sizeof(float)) != 0;
        }
        EXPECT(!differs, "%s: %d elements of %s", name, differs, rows[row].name);
    }
    free(memory);
}

// Blocks of MXFP4 are written as the numbers that they are.
TEST(written_again) {
    for (int i = 0; i < FAMILIES; i++) {
        const Family family = family_open(names[i]);
        const char* directory = test_path(names[i]);
        EXPECT(mkdir(directory, 0777) == 0, "%s", directory);
        write_as(&family, directory, dtype_of(family.path));
        if (strcmp(names[i], "gptoss_mxfp4") == 0) {
            expect_same_weights(directory, &family, names[i]);
        } else {
            expect_same_files(family.path, directory, names[i]);
        }
        const ModelConfig cfg = hf_config_read(directory);
        EXPECT(memcmp(&cfg, &family.cfg, sizeof(cfg)) == 0, "%s: its configuration", names[i]);
        free(family.memory);
    }
}

// Ranks read parts of groups: each element is the one of a whole read.
TEST(read_in_parts) {
    for (int i = 0; i < FAMILIES; i++) {
        const Family family = family_open(names[i]);
        HfModel model;
        hf_model_open(&model, family.path, HF_LAST, family.cfg, family.cfg.arch);
        for (int g = 0; g < model_groups(family.cfg); g++) {
            const size_t at = tensor_group_offset_bytes(family.rows, g) / sizeof(float);
            const size_t elements = 50000; // more than a group has
            float* group = (float*)check_alloc(elements, sizeof(float), "group");
            for (size_t first = 0; first < elements; first += 777) {
                memset(group, 0x55, elements * sizeof(float));
                hf_model_read(&model, family.rows, g, first, first + 777, group);
                for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
                    const TensorRow* row = &family.rows[r];
                    const size_t begin = tensor_offset_in_group(row) / sizeof(float);
                    for (size_t k = 0; k < tensor_layer_elements(row) && tensor_is_in_group(row, g); k++) {
                        const size_t e = begin + k;
                        EXPECT(e < first || e >= first + 777 || group[e] == family.memory[at + e],
                               "%s: %s, element %zu from %zu on", names[i], row->name, k, first);
                    }
                }
            }
            free(group);
        }
        hf_model_close(&model);
        free(family.memory);
    }
}

// ---- experts from a dense model ----

// Each expert has the dense model's MLP, routers differ from layer to layer, and everything else is
// the same; the weights of a token's experts add up to 1, so the loss is the dense one's.
static void test_upcycled(const char* name, Arch arch) {
    Family dense = family_open(name), sparse = dense;
    double losses[2];
    int tokens[SEQUENCES * TOKENS + 1];
    sparse.cfg.arch = arch, sparse.cfg.E = 3, sparse.cfg.E_used = 2;
    sparse.memory =
        (float*)check_alloc(model_parameter_rows_of(sparse.rows, sparse.cfg, sizeof(float)), 1, name);
    whole_model_read(dense.path, sparse.cfg, sparse.rows, sparse.memory);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const char* name_of_dense = sparse.rows[i].name + (sparse.rows[i].experts > 1); // fcw
        const TensorRow* row = row_called(dense.rows, MODEL_PARAMETER_ROWS, name_of_dense);
        const size_t of_dense = tensor_layer_elements(row);
        for (size_t k = 0; k < tensor_elements(&sparse.rows[i]); k++) {
            const size_t all = tensor_layer_elements(&sparse.rows[i]), l = k / all;
            const float x = *(const float*)test_element(&sparse.rows[i], sparse.memory, k);
            const int is_router = sparse.rows[i].kind == KIND_ROUTER;
            EXPECT(
                is_router
                    ? x != 0 && x != ((float*)tensor_at_layer(&sparse.rows[i], sparse.memory, !l))[k % all]
                    : x == *(const float*)test_element(row, dense.memory, l * of_dense + k % all % of_dense),
                "%s: %s, element %zu", name, sparse.rows[i].name, k);
        }
    }
    for (int i = 0; i < SEQUENCES * TOKENS + 1; i++) {
        tokens[i] = (7 * i + 3) % dense.cfg.V;
    }
    for (int i = 0; i < 2; i++) {
        RefModel model;
        reference_open(&model, i ? &sparse : &dense);
        losses[i] = ref_model_forward(&model, tokens, tokens + 1, NULL);
        ref_model_close(&model);
    }
    EXPECT_NEAR(losses[1], losses[0], 1e-13 * losses[0], "%s: loss", name); // of float64
    free(dense.memory);
    free(sparse.memory);
}

TEST(upcycled) {
    test_upcycled("llama", ARCH_MIXTRAL);
    test_upcycled("mistral", ARCH_MIXTRAL);
    test_upcycled("qwen3_tied", ARCH_QWEN3MOE);
}

// ---- experts in one tensor ----

// Declares the tensors of a set in the names of transformers 5, or writes them: those of experts
// are one for each layer.
static void put_fused(SafeTensorsWriter* writer, const SafeTensorsSet* set, ModelConfig cfg, int declares) {
    const char* moe = cfg.arch == ARCH_MIXTRAL ? "block_sparse_moe" : "mlp";
    const char* const parts[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    const size_t C = (size_t)cfg.C, F = (size_t)model_expert_hidden(cfg), E = (size_t)cfg.E;
    const size_t shapes[2][3] = {{E, 2 * F, C}, {E, C, F}};
    for (size_t f = 0; f < set->num_files; f++) {
        for (size_t t = 0; t < set->files[f].num_tensors; t++) {
            const SafeTensorsView* view = &set->files[f].tensors[t];
            const char* at = strstr(view->name, "block_sparse_moe");
            char name[128];
            snprintf(name, sizeof(name), at ? "%.*smlp%s" : "%.*s%s", at ? (int)(at - view->name) : 100,
                     view->name, at ? at + strlen("block_sparse_moe") : "");
            if (!strstr(view->name, ".experts.") && declares) {
                safetensors_writer_declare(writer, name, view->dtype, view->ndim, view->shape);
            } else if (!strstr(view->name, ".experts.")) {
                safetensors_write_raw(writer, view->data, view->bytes);
            }
        }
    }
    for (int l = cfg.dense_layers; l < cfg.L; l++) {
        for (int down = 0; down < 2; down++) {
            char name[128];
            snprintf(name, sizeof(name), "model.layers.%d.mlp.experts.%s", l,
                     down ? "down_proj" : "gate_up_proj");
            if (declares) {
                safetensors_writer_declare(writer, name, set->files[0].tensors[0].dtype, 3, shapes[down]);
                continue;
            }
            for (int k = 0; k < cfg.E * (down ? 1 : 2); k++) {
                const char* part = parts[cfg.arch == ARCH_MIXTRAL][down ? 2 : k % 2];
                snprintf(name, sizeof(name), "model.layers.%d.%s.experts.%d.%s.weight", l, moe,
                         down ? k : k / 2, part);
                const SafeTensorsView* view = safetensors_set_find(set, name);
                CHECK(view, "%s", name);
                safetensors_write_raw(writer, view->data, view->bytes);
            }
        }
    }
}

// Writes a model with fused experts; with `layer`, also tensors of a layer that predicts a further
// token.
static void write_fused(const Family* family, const char* directory, int layer) {
    static const size_t one[] = {1};
    static const uint16_t zero = 0;
    char path[PATH_MAX], error[ERROR_BYTES], *config, name[64];
    size_t bytes;
    SafeTensorsSet set;
    SafeTensorsWriter writer;
    snprintf(path, sizeof(path), FIXTURES "%.40s/config.json", strrchr(family->path, '/') + 1);
    CHECK(file_try_read(path, 1 << 16, &config, &bytes, error), "%s", error);
    snprintf(name, sizeof(name), "%.40s/config.json", strrchr(directory, '/') + 1);
    test_write(name, config, bytes);
    free(config);
    snprintf(path, sizeof(path), "%.200s/model.safetensors", directory);
    safetensors_set_open(&set, family->path, "model");
    safetensors_writer_open(&writer, path);
    put_fused(&writer, &set, family->cfg, 1);
    for (int i = 0; i < 2 && layer; i++) {
        snprintf(name, sizeof(name), "model.layers.%d.%s", layer, i ? "enorm.weight" : "eh_proj.weight");
        safetensors_writer_declare(&writer, name, SAFETENSORS_BF16, 1, one);
    }
    safetensors_writer_begin(&writer);
    put_fused(&writer, &set, family->cfg, 0);
    for (int i = 0; i < 2 && layer; i++) {
        safetensors_write_raw(&writer, &zero, sizeof(zero));
    }
    safetensors_writer_commit(&writer);
    safetensors_set_close(&set);
}

// Experts that transformers 5 saved as it has them in memory are the same weights, and layers that
// predict further tokens are left out.
TEST(fused_experts) {
    static const char* const experts[] = {"mixtral", "qwen3moe",      "olmoe",
                                          "glm4moe", "glm4moe_dense", "deepseek3"};
    for (int i = 0; i < 6; i++) {
        const Family family = family_open(experts[i]);
        char name[32];
        snprintf(name, sizeof(name), "fused_%s", experts[i]);
        const char* directory = test_path(name);
        EXPECT(mkdir(directory, 0777) == 0, "%s", directory);
        write_fused(&family, directory, i >= 3 ? family.cfg.L : 0);
        expect_same_weights(directory, &family, experts[i]);
        free(family.memory);
    }
}

// ---- a language model among others ----

// Names of a language model inside one that sees pictures: bare or whole ones with a prefix, and a
// tensor that is not of the language model.
typedef struct {
    const char *prefix, *picture;
    int is_bare;
} Pictures;

// Writes a family's model inside such a model.
static void write_with_pictures(const Family* family, const char* directory, Pictures names) {
    static const size_t one[] = {1};
    static const float zero = 0;
    char path[PATH_MAX], error[ERROR_BYTES], *config, text[8192], name[160];
    size_t bytes;
    SafeTensorsSet set;
    SafeTensorsWriter writer;
    snprintf(path, sizeof(path), "%.200s/config.json", family->path);
    CHECK(file_try_read(path, 1 << 12, &config, &bytes, error), "%s", error);
    const int length = snprintf(
        text, sizeof(text), "{\"vocab_size\": 7, \"text_config\": %s, \"model_type\": \"gemma3\"}", config);
    free(config);
    snprintf(name, sizeof(name), "%.40s/config.json", strrchr(directory, '/') + 1);
    test_write(name, text, (size_t)length);
    snprintf(path, sizeof(path), "%.200s/model.safetensors", directory);
    safetensors_set_open(&set, family->path, "model");
    safetensors_writer_open(&writer, path);
    safetensors_writer_declare(&writer, names.picture, SAFETENSORS_F32, 1, one);
    for (size_t t = 0; t < set.files[0].num_tensors; t++) {
        const SafeTensorsView* view = &set.files[0].tensors[t];
        const char* bare = file_tensor_bare_name(view->name);
        snprintf(name, sizeof(name), "%s%s", names.prefix, names.is_bare ? bare : view->name);
        safetensors_writer_declare(&writer, name, view->dtype, view->ndim, view->shape);
    }
    safetensors_writer_begin(&writer);
    safetensors_write_raw(&writer, &zero, sizeof(zero));
    for (size_t t = 0; t < set.files[0].num_tensors; t++) {
        safetensors_write_raw(&writer, set.files[0].tensors[t].data, set.files[0].tensors[t].bytes);
    }
    safetensors_writer_commit(&writer);
    safetensors_set_close(&set);
}

// The language model is read from old files and new ones; the rest is left out.
TEST(with_pictures) {
    static const Pictures forms[] = {
        {"language_model.", "vision_tower.vision_model.post_layernorm.bias", 0},
        {"model.language_model.", "model.multi_modal_projector.mm_soft_emb_norm.weight", 1}};
    const Family family = family_open("gemma3");
    for (int i = 0; i < 2; i++) {
        char name[32];
        snprintf(name, sizeof(name), "pictures_%d", i);
        const char* directory = test_path(name);
        TensorRow rows[MODEL_PARAMETER_ROWS];
        const size_t size = model_parameter_rows_of(rows, family.cfg, sizeof(float));
        float* memory = (float*)check_alloc(size, 1, "a model");
        EXPECT(mkdir(directory, 0777) == 0, "%s", directory);
        write_with_pictures(&family, directory, forms[i]);
        const ModelConfig cfg = hf_config_read(directory);
        EXPECT(memcmp(&cfg, &family.cfg, sizeof(cfg)) == 0, "form %d: its configuration", i);
        whole_model_read(directory, cfg, rows, memory);
        EXPECT(memcmp(memory, family.memory, size) == 0, "form %d: its weights", i);
        free(memory);
    }
    free(family.memory);
}
