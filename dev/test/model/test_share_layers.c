// test_share_layers.c -- share_layers.h: the words of --share-layers, which layers share a copy,
// and files: a model with shared layers writes the same file as one with separate equal layers, and
// reads it back.
#include "llmc/formats/gguf.h"
#include "llmc/formats/hf_config_write.h"
#include "llmc/formats/hf_model.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/model/share_layers.h"
#include "llmc/model/map.h"
#include <sys/stat.h>

#include "dev/test/lib/test.h"
#include "dev/test/lib/whole_model.h"

// The copy of each layer, one digit each.
static const struct {
    const char *word, *copies;
    int blocks; // of parameters
} CASES[] = {
    {"off", "012345", 6},    {"all", "000000", 1},       {"pairs", "001122", 3},  {"loop:1", "000000", 1},
    {"loop:2", "010101", 2}, {"loop:0003", "012012", 3}, {"loop:6", "012345", 6},
};
enum { NUM_CASES = sizeof(CASES) / sizeof(CASES[0]) };

static ModelConfig config_of(const char* word) {
    ModelConfig cfg = {.max_T = 6, .V = 5, .Vp = 8, .L = 6, .NH = 2, .C = 32};
    char error[ERROR_BYTES] = "";
    EXPECT(share_parse(&cfg.share, cfg.L, word, error), "%s", error);
    return cfg;
}

static int layer_of_digit(const char* copies, int l) { return copies[l] - '0'; }

// A backward pass, from the last layer on: the first visit of each copy.
static void expect_visits(ModelConfig cfg, const char* word, const char* copies) {
    unsigned seen = 0;
    for (int l = cfg.L - 1; l >= 0; l--) {
        const unsigned copy = 1u << layer_of_digit(copies, l);
        EXPECT(share_gradient_mode(cfg, l, GRADIENT_SET) == (seen & copy ? GRADIENT_ADD : GRADIENT_SET),
               "%s, layer %d", word, l);
        seen |= copy;
    }
}

TEST(layers) {
    for (int i = 0; i < NUM_CASES; i++) {
        const ModelConfig cfg = config_of(CASES[i].word);
        TensorRow rows[MODEL_PARAMETER_ROWS];
        model_parameter_rows(rows, cfg);
        EXPECT(model_copies(cfg) == CASES[i].blocks && model_groups(cfg) == 1 + CASES[i].blocks,
               "%s: %d blocks", CASES[i].word, model_copies(cfg));
        for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
            const char* copies = !rows[r].in_block ? "0" : CASES[i].copies;
            const int uses = tensor_is_absent(&rows[r]) ? 0 : (int)strlen(copies);
            EXPECT(rows[r].uses == uses, "%s: %d uses of %s", CASES[i].word, rows[r].uses, rows[r].name);
            for (int l = 0; l < rows[r].uses; l++) {
                const int copy = layer_of_digit(copies, l),
                          lowest = (int)(strchr(copies, copies[l]) - copies);
                EXPECT(tensor_copy(&rows[r], l) == copy && tensor_lowest_layer(&rows[r], copy) == lowest,
                       "%s: layer %d of %s has copy %d", CASES[i].word, l, rows[r].name,
                       tensor_copy(&rows[r], l));
                EXPECT(rows[r].place == PLACE_ONCE ||
                           (model_copy(cfg, l) == copy &&
                            model_group_layer(cfg, tensor_group(&rows[r], l)) == lowest),
                       "%s: layer %d of %s", CASES[i].word, l, rows[r].name);
            }
        }
        expect_visits(cfg, CASES[i].word, CASES[i].copies);
    }
    EXPECT(share_is_loop(config_of("loop:2")) && share_is_loop(config_of("loop:3")) &&
               !share_is_loop(config_of("all")) && !share_is_loop(config_of("pairs")) &&
               !share_is_loop(config_of("loop:6")),
           "loops of several blocks");
}

TEST(refusals) {
    static const struct {
        const char* word;
        int L;
        const char* error;
    } cases[] = {
        {"frog", 4, "'frog'; wanted off, all, pairs or loop:K"},
        {"attention", 4,
         "wanted off, all, pairs or loop:K with K of 1 or more; all shares attention and MLP"},
        {"", 4, "''; wanted"},
        {"loop", 4, "'loop'; wanted"},
        {"loop:", 4, "'loop:'; wanted"},
        {"loop:0", 4, "'loop:0'; wanted"},
        {"loop:-2", 4, "'loop:-2'; wanted"},
        {"loop:2x", 4, "'loop:2x'; wanted"},
        {"loop:99999999999", 4, "wanted off"},
        {"loop:3", 4, "loop:3 with 4 layers; wanted a multiple of 3"},
        {"loop:8", 4, "loop:8 with 4 layers; wanted a multiple of 8"},
        {"pairs", 3, "pairs with 3 layers; wanted a multiple of 2"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char error[ERROR_BYTES] = "";
        int share;
        EXPECT(!share_parse(&share, cases[i].L, cases[i].word, error), "%s", cases[i].word);
        EXPECT(strstr(error, cases[i].error), "%s: %s", cases[i].word, error);
    }
}

// ---- counts ----

TEST(counts) {
    const ModelConfig off = config_of("off"), all = config_of("all");
    const double C = off.C, block = 12 * C * C + 13 * C, parameters = model_count_parameters(off);
    EXPECT(model_count_stored(off) == parameters, "not shared: %.0f", model_count_stored(off));
    EXPECT(model_count_stored(all) == parameters - 5 * block, "all: %.0f", model_count_stored(all));
    EXPECT(model_count_parameters(all) == parameters &&
               model_flops_per_token(all, 6) == model_flops_per_token(off, 6),
           "the model that is computed is the same");
}

// Which lists of --freeze mean the same for layers with the same parameters.
TEST(freeze) {
    static const struct {
        const char *share, *list;
        int is_good, first_copy;
        double frozen; // MLPs and attentions, in memory
    } cases[] = {
        {"all", "mlp", 1, 0, 1},
        {"all", "mlp[0]", 0, 0, 0},
        {"pairs", "mlp[0-3]", 1, 0, 2},
        {"pairs", "mlp[0-2]", 0, 0, 0},
        {"loop:3", "mlp[1],mlp[4]", 1, 0, 1},
        {"pairs", "embeddings,blocks[0-3]", 1, 2, -1},
        {"loop:3", "embeddings,blocks[0],blocks[3]", 1, 1, -1},
        {"all", "embeddings,blocks", 1, 1, -1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const ModelConfig cfg = config_of(cases[i].share);
        const Freeze freeze = freeze_of(cfg, cases[i].list);
        char error[ERROR_BYTES] = "";
        EXPECT(freeze_check_shared(&freeze, cfg, error) == cases[i].is_good, "%s: %s: %s", cases[i].share,
               cases[i].list, error);
        EXPECT(cases[i].is_good ||
                   strstr(error, "is the same one (--share-layers); wanted both frozen, or neither"),
               "%s", error);
        EXPECT(!cases[i].is_good || freeze_first_copy(&freeze, cfg) == cases[i].first_copy, "%s: %s: %d",
               cases[i].share, cases[i].list, freeze_first_copy(&freeze, cfg));
        EXPECT(!cases[i].is_good || cases[i].frozen < 0 ||
                   freeze_count(&freeze, cfg) == cases[i].frozen * (8 * cfg.C * cfg.C + 5 * cfg.C),
               "%s: %s: %.0f frozen", cases[i].share, cases[i].list, freeze_count(&freeze, cfg));
    }
}

// Each process owns a part of every block, and their parts are all that is in memory, once.
TEST(owned) {
    enum { SIZE = 3 };
    for (int i = 0; i < NUM_CASES; i++) {
        const ModelConfig cfg = config_of(CASES[i].word);
        MapOf of = map_of_model(cfg);
        size_t count = 0;
        of.stage = 1;
        of.data = of.replica = SIZE;
        for (int rank = 0; rank < SIZE; rank++) {
            Memory memory = memory_on_host();
            Map m;
            map_open(&m, &memory, MEMORY_HOST, &of, rank);
            EXPECT(m.num_buckets == 1 + CASES[i].blocks, "%s: %d buckets", CASES[i].word, m.num_buckets);
            for (const Shard* s = m.shards; s < m.shards + m.num_shards; s++) {
                count += map_has(&m, s, MAP_OWNED) ? s->piece.count : 0;
            }
            memory_close(&memory);
        }
        EXPECT((double)count == model_count_stored(cfg), "%s: %zu elements", CASES[i].word, count);
    }
}

// ---- files ----

typedef struct {
    ModelConfig cfg;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    size_t bytes;
    void* memory;
} TestModel;

static TestModel test_model_open(ModelConfig cfg) {
    TestModel model = {.cfg = cfg};
    model.bytes = model_parameter_rows(model.rows, cfg);
    model.memory = check_alloc(model.bytes, 1, "model");
    return model;
}

// Numbers that all differ, but for the vocabulary's padding.
static TestModel test_model_random(ModelConfig cfg) {
    const TestModel model = test_model_open(cfg);
    uint64_t index = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int k = 0; k < model.rows[i].layers; k++) {
            float* tensor = tensor_at_layer(&model.rows[i], model.memory, k);
            for (size_t j = 0; j < model_rows_in_files(&model.rows[i], cfg) * model.rows[i].cols; j++) {
                tensor[j] = rand_normal(1, 2, index++);
            }
        }
    }
    return model;
}

// Returns the model with parameters of its own for each layer.
static TestModel model_unshared(const TestModel* from) {
    ModelConfig cfg = from->cfg;
    cfg.share = SHARE_OFF;
    const TestModel model = test_model_open(cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = 0; l < model.rows[i].layers; l++) {
            memcpy(tensor_at_layer(&model.rows[i], model.memory, l),
                   tensor_at_layer(&from->rows[i], from->memory, tensor_copy(&from->rows[i], l)),
                   tensor_layer_elements(&model.rows[i]) * sizeof(float));
        }
    }
    return model;
}

static void write_gguf(const char* path, const TestModel* model) {
    GgufWriter writer;
    const GgufModel file = {"model", model->cfg, GGUF_Q8_0, NULL, model_card_of(0), GGUF_START_TOKEN};
    gguf_create(&writer, path, &file);
    for (int g = 0; g < model_groups(model->cfg); g++) {
        gguf_put(&writer, model->rows, g, (char*)model->memory + tensor_group_offset_bytes(model->rows, g));
    }
    gguf_commit(&writer);
}

// In all formats, with "shared" or "whole" as the name.
static void write_files(const TestModel* model, const char* name) {
    char file[64], *directory = strdup(test_path(name));
    CHECK(directory, "no memory");
    mkdir(directory, 0777);
    hf_config_write(directory, model->cfg, SAFETENSORS_F32, model_card_of(4), NULL);
    whole_model_write(directory, model->cfg, model->rows, model->memory, SAFETENSORS_F32);
    snprintf(file, sizeof(file), "%s.bin", name);
    whole_model_write_bin(test_path(file), model->cfg, model->rows, model->memory, MODEL_BF16);
    whole_model_write_bin(test_path(name[0] == 's' ? "s32.bin" : "w32.bin"), model->cfg, model->rows,
                          model->memory, MODEL_FP32);
    snprintf(file, sizeof(file), "%s.gguf", name);
    write_gguf(test_path(file), model);
    free(directory);
}

static void expect_same_file(const char* word, const char* a, const char* b) {
    const TestFile x = test_read(test_path(a)), y = test_read(test_path(b));
    EXPECT(x.bytes == y.bytes && memcmp(x.data, y.data, x.bytes) == 0, "%s: %s and %s", word, a, b);
    free(x.data);
    free(y.data);
}

// Reads with the layers shared.
static void expect_reads(const TestModel* model, const char* name) {
    const TestModel read = test_model_open(model->cfg);
    whole_model_read(test_path(name), read.cfg, read.rows, read.memory);
    EXPECT(memcmp(read.memory, model->memory, model->bytes) == 0, "%s", name);
    free(read.memory);
}

// Several files: each tensor is in one of them, and all are there.
static void expect_several(const TestModel* model, const char* word) {
    HfModelFile files[8];
    char name[64];
    const int count = hf_model_files(files, model->cfg, SAFETENSORS_F32, 60e3);
    const char* directory = strdup(test_path("several"));
    CHECK(directory, "no memory");
    mkdir(directory, 0777);
    for (int f = 0; f < count; f++) {
        const char* memory = (char*)model->memory + tensor_group_offset_bytes(model->rows, files[f].first);
        hf_model_file_name(name, HF_LAST, f, count);
        hf_model_write(directory, name, files[f], model->cfg, model->rows, memory, SAFETENSORS_F32);
    }
    EXPECT(count > 1, "%s: %d files", word, count);
    hf_config_write(directory, model->cfg, SAFETENSORS_F32, model_card_of(4), NULL);
    hf_model_write_index(directory, HF_LAST, files, count, model->cfg, SAFETENSORS_F32);
    expect_reads(model, "several");
    const TestModel whole = model_unshared(model);
    expect_reads(&whole, "several");
    free(whole.memory);
    for (int f = 0; f < count; f++) {
        hf_model_file_name(name, HF_LAST, f, count);
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", directory, name);
        unlink(path);
    }
    free((char*)directory);
}

TEST(files) {
    for (int i = 0; i < NUM_CASES; i++) {
        const TestModel model = test_model_random(config_of(CASES[i].word)), whole = model_unshared(&model);
        write_files(&model, "shared");
        write_files(&whole, "whole");
        expect_same_file(CASES[i].word, "shared/model.safetensors", "whole/model.safetensors");
        expect_same_file(CASES[i].word, "shared.bin", "whole.bin");
        expect_same_file(CASES[i].word, "shared.gguf", "whole.gguf");
        expect_reads(&model, "whole");
        expect_reads(&model, "w32.bin");
        expect_reads(&whole, "shared");
        expect_reads(&whole, "s32.bin");
        expect_several(&model, CASES[i].word);
        free(whole.memory);
        free(model.memory);
    }
}

static void read_pairs(const void* path) {
    const TestModel read = test_model_open(config_of("pairs"));
    whole_model_read((const char*)path, read.cfg, read.rows, read.memory);
}

// One number of layer 3 differs.
TEST(unequal) {
    const TestModel model = test_model_random(config_of("pairs")), whole = model_unshared(&model);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (whole.rows[i].member == offsetof(ModelParameters, fcb)) {
            ((float*)tensor_at_layer(&whole.rows[i], whole.memory, 3))[17] += 1;
        }
    }
    write_files(&whole, "whole");
    EXPECT(test_dies(read_pairs, test_path("whole"), 1,
                     "error: |model.safetensors: tensor transformer.h.3.mlp.c_fc.bias differs from "
                     "transformer.h.2.mlp.c_fc.bias, wanted equal ones"),
           "safetensors");
    EXPECT(test_dies(read_pairs, test_path("w32.bin"), 1,
                     "error: |w32.bin: tensor fcb, layer 3 differs from layer 2, wanted equal ones"),
           "llm.c's file");
    free(whole.memory);
    free(model.memory);
}
