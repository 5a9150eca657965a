// Sizes of parts of a model.
#include "dev/test/lib/test.h"
#include "llmc/model/model.h"
#include "llmc/model/part.h"
#include "llmc/model/model.h"
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

static ModelConfig experts_of(int E) {
    ModelConfig cfg = whole_of("llama:135m", 1);
    cfg.arch = ARCH_GLM4MOE;
    cfg.E = E, cfg.E_used = 2, cfg.F = 64, cfg.Fs = 128;
    return cfg;
}

TEST(part_experts) {
    const ModelConfig cfg = experts_of(6), part = model_part_of(cfg, part_of(cfg, 3, 2));
    EXPECT(model_mlps(part) == 2 && part.E == 6 && model_groups(part) == 3, "sizes of a part");
    EXPECT(model_hidden_rows(part, 64) == 160 && model_expert_rows(part, 64) == 288, "rows of 64 tokens");
    EXPECT(model_hidden_rows(cfg, 64) == 288 && model_hidden_rows(whole_of("d12", 1), 64) == 64, "undivided");
}

// A norm of each head is in every rank; ranks cut one of all heads together.
TEST(part_norms) {
    static const struct {
        Arch arch;
        size_t whole, begin, count; // of the queries' norm; the part of rank 1 of 2
    } cases[] = {{ARCH_QWEN3, 16, 0, 16}, {ARCH_OLMO2, 64, 32, 32}};
    for (int i = 0; i < 2; i++) {
        const ModelConfig
            whole = {.arch = cases[i].arch, .L = 1, .NH = 4, .KV = 2, .C = 64, .F = 64, .V = 64, .Vp = 128},
            part = model_part_of(whole, part_of(whole, 2, 1));
        TensorRow rows[MODEL_PARAMETER_ROWS], all[MODEL_PARAMETER_ROWS], acts[MODEL_ACTIVATION_ROWS];
        model_parameter_rows(rows, part), model_parameter_rows(all, whole);
        model_activation_rows(acts, part, 2, 8, RECOMPUTE_NONE, 1, 0, 16);
        for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
            const PartRun run = part_run(&rows[r], whole, part.part, 0);
            EXPECT(strcmp(rows[r].name, "qnormw") ||
                       (all[r].cols == cases[i].whole && run.whole == cases[i].begin &&
                        run.count == cases[i].count),
                   "%zu elements from %zu of %zu", run.count, run.whole, all[r].cols);
        }
        for (int r = 0; r < MODEL_ACTIVATION_ROWS; r++) {
            EXPECT(strcmp(acts[r].name, "qk_sums") ||
                       tensor_elements(&acts[r]) == (i ? (size_t)(2 * 16 * 4) : 0),
                   "%zu sums", tensor_elements(&acts[r]));
        }
    }
}

TEST(part_sizes) {
    const ModelConfig cfg = whole_of("qwen3:0.6b", 4);
    const ModelConfig part = model_part_of(cfg, part_of(cfg, 4, 1));
    EXPECT(part.NH == 4 && model_key_heads(part) == 2 && model_head_size(part) == 128, "heads");
    EXPECT(model_groups(part) == 3 && model_group_layer(part, 2) == 1, "groups");
    const ModelConfig last = model_part_of(cfg, (ModelPart){.first_layer = 1, .layers = 1, .of_layers = 2});
    EXPECT(last.L == 1 && !model_has_first(last) && model_has_last(last), "the last stage");
    ModelConfig listed = cfg; // layers 2, 3, 9 and 12 of 14
    listed.L = 14, listed.window = 5;
    listed.windows[0] = 0x0c, listed.windows[1] = 0x12;
    listed.unrotated[0] = 0xf3, listed.unrotated[1] = 0xed; // all others
    const ModelConfig own =
        model_part_of(listed, (ModelPart){.first_layer = 3, .layers = 10, .of_layers = 14});
    EXPECT(own.windows[0] == 0x41 && own.windows[1] == 2 && own.unrotated[0] == 0xbe && own.unrotated[1] == 1,
           "lists of the layers of a stage: %x %x, %x %x", own.windows[0], own.windows[1], own.unrotated[0],
           own.unrotated[1]);
    char text[128];
    const ModelConfig xl = model_preset_config(model_preset_by_name("d48"), 1000);
    EXPECT(strcmp(part_uncut(text, sizeof(text), xl, 4, 8), "25 heads") == 0, "%s", text);
    EXPECT(!part_uncut(text, sizeof(text), xl, 5, 8), "5 parts of 25 heads");
    EXPECT(strcmp(part_uncut(text, sizeof(text), cfg, 16, 8), "8 heads of keys") == 0, "%s", text);
}
