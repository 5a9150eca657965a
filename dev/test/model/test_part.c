// Parts of a model: sizes, and the places of their elements in the whole.
#include "dev/test/lib/test.h"
#include "llmc/model/part.h"
#include "llmc/model/presets.h"

static ModelConfig whole_of(const char* preset, int t) {
    ModelConfig cfg = model_preset_config(model_preset_by_name(preset), 1000);
    cfg.Vp = model_padded_vocab_of_ranks(cfg.V = 1000, t);
    cfg.L = 2;
    return cfg;
}

// Rank j of those that cut matrices, or divide experts.
static ModelPart part_of(ModelConfig cfg, int ranks, int j) {
    return cfg.E > 0 ? (ModelPart){.expert_ranks = ranks, .expert_rank = j}
                     : (ModelPart){.tensor_ranks = ranks, .tensor_rank = j};
}

// Copies a whole model, whose elements have their numbers as values, into the parts of `ranks`, and
// back into zeros.
static void take_and_put(ModelConfig cfg, int ranks) {
    TensorRow rows[MODEL_PARAMETER_ROWS], part_rows[MODEL_PARAMETER_ROWS];
    const size_t bytes = model_parameter_rows_of(rows, cfg, sizeof(float));
    float *whole = (float*)check_alloc(bytes, 1, "whole"), *back = (float*)check_alloc(bytes, 1, "back");
    for (size_t i = 0; i < bytes / sizeof(float); i++) {
        whole[i] = (float)(i % 16777213);
    }
    for (int j = 0; j < ranks; j++) {
        const ModelPart which = part_of(cfg, ranks, j);
        const ModelConfig part_cfg = model_part_of(cfg, which);
        const size_t part_bytes = model_parameter_rows_of(part_rows, part_cfg, sizeof(float));
        char* part = (char*)check_alloc(part_bytes, 1, "part");
        for (int direction = PART_TAKE; direction <= PART_PUT; direction++) {
            float* to = direction == PART_TAKE ? whole : back;
            for (int g = 0; g < model_groups(part_cfg); g++) {
                for (int G = 0; G < model_groups(cfg); G++) {
                    const PartGroup a = {part_rows, g, part + tensor_group_offset_bytes(part_rows, g)},
                                    b = {rows, G, (char*)to + tensor_group_offset_bytes(rows, G)};
                    part_copy_group((PartCopy)direction, a, which, b, cfg);
                }
            }
        }
        free(part);
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int k = 0; k < rows[i].layers; k++) {
            EXPECT(memcmp(tensor_at_layer(&rows[i], whole, k), tensor_at_layer(&rows[i], back, k),
                          tensor_layer_elements(&rows[i]) * sizeof(float)) == 0,
                   "%s, copy %d, %d ranks", rows[i].name, k, ranks);
        }
    }
    free(whole);
    free(back);
}

TEST(part_take_put) {
    take_and_put(whole_of("d12", 4), 4);
    take_and_put(whole_of("d12", 3), 3);
    take_and_put(whole_of("d48", 5), 5);
    take_and_put(whole_of("llama:135m", 3), 3);
    take_and_put(whole_of("qwen2:1.5b", 2), 2); // two heads of keys
    take_and_put(whole_of("qwen3:0.6b", 8), 8);
}

static ModelConfig experts_of(int E) {
    ModelConfig cfg = whole_of("llama:135m", 1);
    cfg.arch = ARCH_GLM4MOE;
    cfg.E = E, cfg.E_used = 2, cfg.F = 64, cfg.Fs = 128;
    return cfg;
}

TEST(part_experts) {
    const ModelConfig cfg = experts_of(6), part = model_part_of(cfg, part_of(cfg, 3, 2));
    take_and_put(cfg, 2);
    take_and_put(cfg, 3);
    take_and_put(cfg, 6);
    EXPECT(model_mlps(part) == 2 && part.E == 6 && model_groups(part) == 3, "sizes of a part");
    EXPECT(model_hidden_rows(part, 64) == 160 && model_expert_rows(part, 64) == 288, "rows of 64 tokens");
    EXPECT(model_hidden_rows(cfg, 64) == 288 && model_hidden_rows(whole_of("d12", 1), 64) == 64, "undivided");
}

// Every element of a part has the same place by both functions.
static void places(ModelConfig cfg, int t) {
    TensorRow rows[MODEL_PARAMETER_ROWS], part_rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(rows, cfg, sizeof(float));
    model_parameter_rows_of(part_rows, model_part_of(cfg, part_of(cfg, t, 0)), sizeof(float));
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &part_rows[i];
        const size_t elements = tensor_layer_elements(row);
        for (int j = 0; j < t && elements > 0; j++) {
            for (size_t at = 0; at < elements;) {
                const PartRun run = part_run(row, cfg, part_of(cfg, t, j), at);
                const PartRun place = part_place(&rows[i], cfg, t, run.whole);
                const size_t part = place.part % elements, rank = place.part / elements,
                             wanted = row->split == SPLIT_NONE ? 0 : (size_t)j;
                EXPECT(part == at && rank == wanted, "%s: element %zu of rank %d at %zu of %zu", row->name,
                       at, j, part, rank);
                at += run.count < place.count ? run.count : place.count;
            }
        }
    }
}

TEST(part_places) {
    places(whole_of("d12", 4), 4);
    places(whole_of("llama:135m", 3), 3);
    places(whole_of("qwen3:0.6b", 8), 8);
}

TEST(part_sizes) {
    const ModelConfig cfg = whole_of("qwen3:0.6b", 4);
    const ModelConfig part = model_part_of(cfg, part_of(cfg, 4, 1));
    EXPECT(part.NH == 4 && model_key_heads(part) == 2 && model_head_size(part) == 128, "heads");
    EXPECT(model_groups(part) == 3 && model_group_layer(part, 2) == 1, "groups");
    const ModelConfig last = model_part_of(cfg, (ModelPart){.first_layer = 1, .layers = 1, .of_layers = 2});
    EXPECT(last.L == 1 && !model_has_first(last) && model_has_last(last), "the last stage");
    char text[128];
    const ModelConfig xl = model_preset_config(model_preset_by_name("d48"), 1000);
    EXPECT(strcmp(part_uncut(text, sizeof(text), xl, 4, 8), "25 heads") == 0, "%s", text);
    EXPECT(!part_uncut(text, sizeof(text), xl, 5, 8), "5 parts of 25 heads");
    EXPECT(strcmp(part_uncut(text, sizeof(text), cfg, 16, 8), "8 heads of keys") == 0, "%s", text);
}
