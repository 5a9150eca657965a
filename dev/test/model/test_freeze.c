// test_freeze.c -- freeze.h: lists of names, words and blocks; refused lists; where the backward
// pass ends, and how much work is left.
#include "llmc/model/freeze.h"
#include "dev/test/lib/test.h"

static const ModelConfig CFG = {.max_T = 40, .V = 157, .Vp = 256, .L = 3, .NH = 3, .C = 36};

static Freeze freeze_read(ModelConfig cfg, const char* list) {
    char error[ERROR_BYTES] = "";
    Freeze freeze;
    EXPECT(freeze_parse(&freeze, cfg, list, error), "%s", error);
    return freeze;
}

// Which parameters a list freezes in block l, by name and in order, with a blank after each.
static const char* frozen_of(ModelConfig cfg, const char* list, int l) {
    static char names[256];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const Freeze freeze = freeze_read(cfg, list);
    model_parameter_rows(rows, cfg);
    names[0] = '\0';
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (freeze_has(&freeze, i, l)) {
            strcat(strcat(names, rows[i].name), " ");
        }
    }
    return names;
}

static const char* frozen_in(const char* list, int l) { return frozen_of(CFG, list, l); }

TEST(lists) {
    static const struct {
        const char *list, *in_first, *in_last;
    } cases[] = {
        {"", "", ""},
        {"wte", "wte ", "wte "},
        {"wpe,wte", "wte wpe ", "wte wpe "},
        {"embeddings", "wte wpe ", "wte wpe "},
        {"attention", "qkvw qkvb attprojw attprojb ", "qkvw qkvb attprojw attprojb "},
        {"mlp[2]", "", "fcw fcb fcprojw fcprojb "},
        {"norms", "ln1w ln1b ln2w ln2b lnfw lnfb ", "ln1w ln1b ln2w ln2b lnfw lnfb "},
        {"ln?w[0-1]", "ln1w ln2w ", ""},
        {"wte.weight", "wte ", "wte "},
        {"transformer.wpe.weight", "wpe ", "wpe "},
        {"transformer.h.0.attn.c_attn", "qkvw qkvb ", ""},
        {"h.0.attn.c_attn.weight,h.2.mlp", "qkvw ", "fcw fcb fcprojw fcprojb "},
        {"h.*.ln_1.bias,ln_f", "ln1b lnfw lnfb ", "ln1b lnfw lnfb "},
        {"attn.c_proj", "attprojw attprojb ", "attprojw attprojb "},
        {"mlp.c_fc.weight[0-1]", "fcw ", ""},
        {"transformer.h.2", "", "ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb "},
        {"*b", "ln1b qkvb attprojb ln2b fcb fcprojb lnfb ", "ln1b qkvb attprojb ln2b fcb fcprojb lnfb "},
        {"blocks[0-1],lnf*",
         "ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb lnfw lnfb ", "lnfw lnfb "},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        EXPECT(strcmp(frozen_in(cases[i].list, 0), cases[i].in_first) == 0, "%s, block 0: %s", cases[i].list,
               frozen_in(cases[i].list, 0));
        EXPECT(strcmp(frozen_in(cases[i].list, 2), cases[i].in_last) == 0, "%s, block 2: %s", cases[i].list,
               frozen_in(cases[i].list, 2));
    }
}

// Norms after branches are norms of their blocks, and have names in files.
TEST(norms_after_branches) {
    static const ModelConfig gemma = {
        .max_T = 40, .V = 157, .Vp = 256, .L = 3, .NH = 3, .C = 36, .arch = ARCH_GEMMA2, .F = 20};
    const char* frozen = frozen_of(gemma, "norms", 2);
    EXPECT(strcmp(frozen, "ln1w ln1postw ln2w ln2postw lnfw ") == 0, "norms: %s", frozen);
    frozen = frozen_of(gemma, "blocks[1]", 1);
    EXPECT(strcmp(frozen, "ln1w qkvw attprojw ln1postw ln2w fcw fcprojw ln2postw ") == 0, "block: %s",
           frozen);
    frozen = frozen_of(gemma, "model.layers.0.post_feedforward_layernorm", 0);
    EXPECT(strcmp(frozen, "ln2postw ") == 0, "by name: %s", frozen);
}

// Biases of experts and of a router's logits are trained, with the matrices beside them.
TEST(expert_biases) {
    static const ModelConfig oss = {.max_T = 40,
                                    .V = 157,
                                    .Vp = 256,
                                    .L = 3,
                                    .NH = 3,
                                    .C = 36,
                                    .arch = ARCH_GPTOSS,
                                    .F = 20,
                                    .E = 4,
                                    .E_used = 2};
    static const char* const cases[][2] = {
        {"", ""},
        {"router", "routerw routerwb "},
        {"experts", "efcw efcb efcprojw efcprojb "},
        {"attention", "qkvw qkvb sinks attprojw attprojb "},
        {"mlp.experts", "efcw efcb efcprojw efcprojb "},
        {"self_attn.sinks", "sinks "},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        EXPECT(strcmp(frozen_of(oss, cases[i][0], 1), cases[i][1]) == 0, "%s: %s", cases[i][0],
               frozen_of(oss, cases[i][0], 1));
    }
}

// The bias of a router is frozen in any run, but alone it is nothing that a list names.
TEST(experts) {
    static const ModelConfig glm = {.max_T = 40,
                                    .V = 157,
                                    .Vp = 256,
                                    .L = 3,
                                    .NH = 3,
                                    .C = 36,
                                    .arch = ARCH_GLM4MOE,
                                    .F = 20,
                                    .E = 4,
                                    .E_used = 2,
                                    .Fs = 20};
    static const char* const cases[][2] = {
        {"", "routerb "},
        {"router", "routerw routerb "},
        {"experts", "routerb efcw efcprojw sfcw sfcprojw "},
        {"mlp", "routerw routerb efcw efcprojw sfcw sfcprojw "},
        {"mlp.shared_experts", "routerb sfcw sfcprojw "},
        {"mlp.experts", "routerb efcw efcprojw "},
    };
    char error[ERROR_BYTES] = "";
    Freeze freeze;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        EXPECT(strcmp(frozen_of(glm, cases[i][0], 1), cases[i][1]) == 0, "%s: %s", cases[i][0],
               frozen_of(glm, cases[i][0], 1));
    }
    EXPECT(freeze_of(glm, "").first_block == 0, "the backward pass reaches all blocks");
    EXPECT(!freeze_parse(&freeze, glm, "mlp.experts.2", error) && strstr(error, "only a part of efcw"), "%s",
           error);
    EXPECT(!freeze_parse(&freeze, CFG, "router", error) && strstr(error, "'router'; wanted wte"), "%s",
           error);
}

TEST(refusals) {
    static const char* const cases[][2] = {
        {"wtf", "'wtf'; wanted wte, wpe, ln1w"},
        {"wte,", "''"},
        {"embeddings ", "'embeddings '"},
        {"wte,head", "attention, mlp, norms, a pattern of these"},
        {"experts", "no parameter is called 'experts'"},
        {"h.3.attn", "'h.3.attn'; wanted wte, wpe"},
        {"h.0.att", "'h.0.att'"},
        {"transformer.attn.c_attn", "'transformer.attn.c_attn'"},
        {"wte.weight[0]", "wte.weight is outside of the blocks"},
        {"wte[0]", "wte is outside of the blocks"},
        {"blocks[3]", "blocks[3] is not NAME[BLOCK] or NAME[FIRST-LAST] with blocks of 0 to 2"},
        {"blocks[1-0]", "blocks[1-0] is not"},
        {"blocks[]", "blocks[] is not"},
        {"blocks[0", "blocks[0 is not"},
        {"blocks[99999999999]", "is not"},
        {"blocks[0]x", "is not"},
        {"*", "* leaves nothing to train"},
        {"embeddings,blocks,lnf?", "leaves nothing to train"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char error[ERROR_BYTES] = "";
        Freeze freeze;
        EXPECT(!freeze_parse(&freeze, CFG, cases[i][0], error), "%s", cases[i][0]);
        EXPECT(strstr(error, cases[i][1]), "%s: %s", cases[i][0], error);
    }
}

// Files of llama have qkvw and fcw in parts, which cannot be frozen alone.
TEST(parts_of_a_parameter) {
    static const ModelConfig llama = {
        .max_T = 40, .V = 157, .Vp = 256, .L = 3, .NH = 4, .C = 32, .arch = ARCH_LLAMA, .KV = 2, .F = 48};
    static const char* const wholes[] = {"self_attn",    "model.layers.1.self_attn",
                                         "layers.*.mlp", "self_attn.o_proj",
                                         "qkvw",         "model.embed_tokens.weight"};
    char error[ERROR_BYTES];
    Freeze freeze;
    for (size_t i = 0; i < sizeof(wholes) / sizeof(wholes[0]); i++) {
        EXPECT(freeze_parse(&freeze, llama, wholes[i], error), "%s: %s", wholes[i], error);
    }
    EXPECT(freeze_parse(&freeze, llama, "layers.1.self_attn,layers.1.mlp", error) &&
               freeze.in_block[1] != 0 && freeze.in_block[0] == 0,
           "block 1");
    EXPECT(!freeze_parse(&freeze, llama, "self_attn.q_proj", error) &&
               strstr(error, "self_attn.q_proj is only a part of qkvw; wanted all of it: qkvw"),
           "%s", error);
    EXPECT(!freeze_parse(&freeze, llama, "mlp.up_proj.weight", error) && strstr(error, "only a part of fcw"),
           "%s", error);
    EXPECT(!freeze_parse(&freeze, llama, "h.0.attn.c_attn", error) && strstr(error, "no parameter is called"),
           "%s", error);
}

// The pass ends at a block only if nothing below it is trained, the embeddings included; gradients
// begin at one in any case. What is frozen behind it is so in all blocks, or not.
TEST(first_block) {
    static const struct {
        const char* list;
        int first, first_copy, is_whole;
    } cases[] = {{"", 0, 0, 1},
                 {"embeddings", 0, 0, 1},
                 {"mlp,wpe", 0, 0, 1},
                 {"mlp[1]", 0, 0, 0},
                 {"blocks[0]", 0, 1, 1},
                 {"wte,blocks", 0, 3, 1},
                 {"embeddings,blocks[0]", 1, 1, 1},
                 {"embeddings,blocks[0],blocks[2]", 1, 1, 0},
                 {"embeddings,blocks[0-1],fcprojb", 2, 2, 1},
                 {"embeddings,blocks", 3, 3, 1},
                 {"embeddings,mlp,attention", 0, 0, 1}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const Freeze freeze = freeze_read(CFG, cases[i].list);
        const int first = freeze_first_copy(&freeze, CFG);
        EXPECT(freeze.first_block == cases[i].first, "%s: %d", cases[i].list, freeze.first_block);
        EXPECT(first == cases[i].first_copy, "%s: gradients from %d on", cases[i].list, first);
        EXPECT(freeze_is_whole(&freeze, CFG, first) == cases[i].is_whole, "%s is whole", cases[i].list);
    }
}

// Layers that share parameters have fewer blocks of them.
TEST(shared_copies) {
    ModelConfig pairs = CFG;
    pairs.L = 4;
    pairs.share = SHARE_PAIRS;
    const Freeze two = freeze_of(pairs, "blocks[0-1]"), mlp = freeze_of(pairs, "mlp,ln2?");
    EXPECT(freeze_first_copy(&two, pairs) == 1 && freeze_is_whole(&two, pairs, 1), "two");
    EXPECT(freeze_first_copy(&mlp, pairs) == 0, "mlp");
}

// 6 FLOP for each weight: 2 forward, 2 for its gradient, 2 for that of its input; T = 40 tokens.
TEST(work) {
    enum { T = 40 };
    const double C = CFG.C, all = model_flops_per_token(CFG, T);
    const double wte = CFG.Vp * C, wpe = CFG.max_T * C, block = 12 * C * C + 13 * C;
    const Freeze none = freeze_read(CFG, ""), embeddings = freeze_read(CFG, "embeddings"),
                 low = freeze_read(CFG, "embeddings,blocks[0-1]"), mlp = freeze_read(CFG, "mlp[1]");
    EXPECT(freeze_flops_per_token(&none, CFG, T) == all, "all");
    EXPECT(freeze_flops_per_token(&embeddings, CFG, T) == all - 2 * (wte + wpe), "without the embeddings");
    EXPECT(freeze_flops_per_token(&low, CFG, T) == all - 2 * (wte + wpe) - 2 * (4 * block + 4 * C * T),
           "up to block 2");
    EXPECT(freeze_flops_per_token(&mlp, CFG, T) == all - 2 * (8 * C * C + 5 * C), "without one MLP");
    EXPECT(freeze_count(&none, CFG) == 0, "none");
    EXPECT(freeze_count(&low, CFG) == CFG.V * C + wpe + 2 * block, "%.0f frozen", freeze_count(&low, CFG));
    const TensorSet both = tensor_bit(0) | tensor_bit(2); // wte, wpe
    EXPECT(none.rows == 0 && embeddings.rows == both && low.rows == both && mlp.rows == 0,
           "rows without state");
    EXPECT(freeze_has_classifier(&low, CFG) && !freeze_has_classifier(&mlp, CFG), "classifier");
}
