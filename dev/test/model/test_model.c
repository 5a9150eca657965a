// test_model.c -- model.h: published sizes, a layout without overlaps, pointers, shared memory of
// recomputation, names, and random weights.
#include "llmc/model/presets.h"
#include "llmc/model/model.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/test_element.h"

static const ModelConfig TINY = {.max_T = 40, .V = 157, .Vp = 256, .L = 3, .NH = 3, .C = 36};
enum { B = 2, T = 7 };

static ModelConfig config_of(const ModelPreset* model) {
    return model_preset_config(model, model->V ? model->V : GPT2_VOCAB);
}

// ---- sizes and names ----

TEST(vocab) {
    EXPECT(model_padded_vocab(50257) == 50304, "GPT-2's");
    EXPECT(model_padded_vocab(50304) == 50304 && model_padded_vocab(1) == 128,
           "multiples stay, small ones grow");
}

// Parameters as published, and as OpenAI's and Hugging Face's checkpoints have them.
TEST(published_sizes) {
    static const struct {
        const char* name;
        double parameters;
    } published[] = {
        {"gpt2:d12", 124439808},     {"gpt2:d24", 354823168},     {"gpt2:d36", 774030080},
        {"d48", 1557611200},         {"gpt3:c768", 125226240},    {"llama:135m", 134515008},
        {"llama:360m", 361821120},   {"llama:1.1b", 1100048384},  {"llama:1b", 1235814400},
        {"qwen2:0.5b", 494032768},   {"qwen2:1.5b", 1543714304},  {"qwen2:3b", 3085938688},
        {"qwen2:7b", 7615616512},    {"qwen3:0.6b", 596049920},   {"qwen3:1.7b", 1720574976},
        {"llama:3b", 3212749824},    {"llama:8b", 8030261248},    {"llama:70b", 70553706496},
        {"mistral:7b", 7248023552},  {"qwen3:4b", 4022468096},    {"qwen3:8b", 8190735360},
        {"nanochat:d12", 185597952}, {"nanochat:d20", 560988160}, {"smollm3:3b", 3075098624},
        {"olmo3:7b", 7298011136},    {"olmo3:32b", 32233522176},  {"granite:2b", 2533539840},
        {"granite:8b", 8170864640},  {"granite4:1b", 1631750144}, {"granite4:3b", 3402836480},
        {"nanochat:d12", 185597952}, {"nanochat:d20", 560988160}, {"gemma3:270m", 268098176},
        {"gemma3:1b", 999885952},    {"phi3:mini", 3821079552},   {"glm4:9b", 9400279040},
        {"olmo2:1b", 1484916736},    {"olmo2:7b", 7298617344},    {"gemma2:2b", 2614341888},
        {"gemma2:9b", 9241705984},   {"gemma3:4b", 3880263168},   {"exaone4:1.2b", 1279391488},
    };
    for (size_t i = 0; i < sizeof(published) / sizeof(published[0]); i++) {
        const ModelPreset* model = model_preset_by_name(published[i].name);
        const double got = model ? model_count_parameters(config_of(model)) : 0;
        EXPECT(got == published[i].parameters, "%s has %.0f", published[i].name, got);
    }
    const ModelPreset* largest = model_preset_by_name("gpt3:c12288");
    EXPECT_NEAR(largest ? model_count_parameters(config_of(largest)) : 0, 175e9, 1e9, "beyond 32 bits");
}

// All parameters, and those that a token is multiplied with.
TEST(sizes_with_experts) {
    static const struct {
        const char* name;
        double millions, active;
    } published[] = {
        {"moe:8x124m", 293.494, 123.6},          {"mixtral:8x7b", 46702.793, 12879.9},
        {"olmoe:1b-7b", 6919.162, 1282.0},       {"qwen3moe:30b-a3b", 30532.123, 3353.0},
        {"gpt-oss:20b", 20914.757, 4187.4},      {"moonlight:16b", 15960.110, 2914.8},
        {"deepseek3:671b", 671026.419, 37552.3},
    };
    for (size_t i = 0; i < sizeof(published) / sizeof(published[0]); i++) {
        const ModelPreset* model = model_preset_by_name(published[i].name);
        const ModelConfig cfg = model ? config_of(model) : TINY;
        EXPECT_NEAR(model_count_parameters(cfg) / 1e6, published[i].millions, 5e-4, "%s", published[i].name);
        EXPECT_NEAR(model_count_active(cfg) / 1e6, published[i].active, 0.05, "%s: active",
                    published[i].name);
    }
}

// The sum over the tensors, by hand.
static double count_by_formula(ModelConfig cfg, int V) {
    const double C = cfg.C;
    return V * C + cfg.max_T * C + cfg.L * (12 * C * C + 13 * C) + 2 * C;
}

// FORMATS of the field: d6 ... d84 of GPT-2 and c384 ... c12288 of GPT-3.
TEST(names) {
    static const struct {
        const char* name;
        int L, C, NH, max_T;
    } wanted[] = {
        {"gpt2:d6", 6, 384, 6, 1024},       {"gpt2:d12", 12, 768, 12, 1024},
        {"gpt2:d24", 24, 1024, 16, 1024},   {"gpt2:d36", 36, 1280, 20, 1024},
        {"gpt2:d48", 48, 1600, 25, 1024},   {"gpt2:d60", 60, 1920, 30, 1024},
        {"gpt2:d72", 72, 2880, 30, 1024},   {"gpt2:d84", 84, 3456, 36, 1024},
        {"gpt3:c384", 6, 384, 6, 2048},     {"gpt3:c768", 12, 768, 12, 2048},
        {"gpt3:c1024", 24, 1024, 16, 2048}, {"gpt3:c1536", 24, 1536, 16, 2048},
        {"gpt3:c2048", 24, 2048, 16, 2048}, {"gpt3:c2560", 32, 2560, 32, 2048},
        {"gpt3:c4096", 32, 4096, 32, 2048}, {"gpt3:c5140", 40, 5120, 40, 2048},
        {"gpt3:c5120", 40, 5120, 40, 2048}, {"gpt3:c12288", 96, 12288, 96, 2048},
        {"gpt2", 12, 768, 12, 1024},        {"gpt2-medium", 24, 1024, 16, 1024},
        {"gpt2-large", 36, 1280, 20, 1024}, {"gpt2-xl", 48, 1600, 25, 1024},
    };
    const int wanted_count = sizeof(wanted) / sizeof(wanted[0]);
    int count;
    model_presets(&count);
    EXPECT(count > wanted_count, "%d models, wanted these %d, and those of other architectures", count,
           wanted_count);
    for (int i = 0; i < wanted_count; i++) {
        const ModelPreset* m = model_preset_by_name(wanted[i].name);
        EXPECT(m && m->L == wanted[i].L && m->C == wanted[i].C && m->NH == wanted[i].NH &&
                   m->max_T == wanted[i].max_T,
               "%s", wanted[i].name);
        EXPECT(m && m->C % m->NH == 0, "%s: heads", wanted[i].name);
        const char* colon = strchr(wanted[i].name, ':');
        EXPECT(!colon || model_preset_by_name(colon + 1) == (colon[1] == 'd' ? m : NULL),
               "%s without its prefix", wanted[i].name);
        const ModelConfig cfg = m ? config_of(m) : TINY;
        EXPECT(model_count_parameters(cfg) == count_by_formula(cfg, cfg.V), "%s: sum", wanted[i].name);
    }
    static const char* const unknown[] = {"",          "d",     "d1",        "d7", "d121",
                                          "gpt2-tiny", "gpt2:", "gpt2:c768", "D12"};
    for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
        EXPECT(!model_preset_by_name(unknown[i]), "\"%s\" is no name", unknown[i]);
    }
}

TEST(flops) {
    const ModelConfig cfg = {1024, GPT2_VOCAB, 50304, 12, 12, 768, SHARE_OFF};
    const double wanted = 6 * count_by_formula(cfg, 50304) + 6.0 * 12 * 768 * 1024;
    EXPECT(model_flops_per_token(cfg, 1024) == wanted, "%.0f", model_flops_per_token(cfg, 1024));
    // 4 heads of 16 in 48 channels, 2 of keys, a gate; windows of 4 in the first of 3 layers: its
    // queries see 4 - 4 * 4 / (2 * 32) = 3.75 keys on average, the others 16. A looked-up wte costs
    // nothing.
    // clang-format off
    const ModelConfig qwen3 = {
        .max_T = 64, .V = 100, .Vp = 128, .L = 3, .NH = 4, .C = 48,
        .arch = ARCH_QWEN3, .KV = 2, .HS = 16, .F = 80, .window = 4, .windows = {1}};
    // clang-format on
    ModelConfig own = qwen3;
    own.has_head = 1;
    const double block = 48 * (64 + 32 + 32) + 48 * 64 + 3 * 48 * 80 + 2 * 48 + 2 * 16,
                 want = 6 * (3 * block + 48 + 128 * 48) + 12 * 64 * (3.75 + 16 + 16);
    EXPECT(model_flops_per_token(qwen3, 32) == want, "%.0f, wanted %.0f", model_flops_per_token(qwen3, 32),
           want);
    EXPECT(model_flops_per_token(own, 32) == want, "own head: %.0f", model_flops_per_token(own, 32));
}

// ---- the layout ----

static size_t row_bytes(const TensorRow* row) { return tensor_elements(row) * row->element_bytes; }

// May the two lie on each other? Only what lives inside a block and what lives in the classifier.
static int may_share(const TensorRow* a, const TensorRow* b) {
    return (a->life == LIVE_BLOCK && b->life == LIVE_CLASSIFIER) ||
           (a->life == LIVE_CLASSIFIER && b->life == LIVE_BLOCK);
}

static size_t layer_bytes(const TensorRow* row) { return tensor_layer_elements(row) * row->element_bytes; }

// Returns true if layer l of a tensor and layer k of another overlap.
static int overlap(const TensorRow* a, int l, const TensorRow* b, int k) {
    char* memory = NULL;
    const char *x = (char*)tensor_at_layer(a, memory, l), *y = (char*)tensor_at_layer(b, memory, k);
    return x < y + layer_bytes(b) && y < x + layer_bytes(a);
}

// One allocation: layers inside it, aligned, none on another that lives at the same time.
static void expect_layout(const TensorRow* rows, int count, size_t bytes) {
    for (int i = 0; i < count; i++) {
        const TensorRow* row = &rows[i];
        const size_t end =
            row->offset_bytes + (size_t)(row->layers - 1) * row->layer_bytes + layer_bytes(row);
        EXPECT((layer_bytes(row) > 0 || row->layers == 0) &&
                   tensor_elements(row) == row->layers * row->rows * row->cols,
               "%s", row->name);
        EXPECT(row->offset_bytes % (TENSOR_ALIGN * row->element_bytes) == 0 && end <= bytes,
               "%s is at %zu ... %zu of %zu", row->name, row->offset_bytes, end, bytes);
        for (int j = 0; j < i; j++) {
            for (int l = 0; l < row->layers * rows[j].layers; l++) {
                EXPECT(may_share(row, &rows[j]) ||
                           !overlap(row, l / rows[j].layers, &rows[j], l % rows[j].layers),
                       "%s lies on %s", row->name, rows[j].name);
            }
        }
    }
}

// No more memory than what lives at a time, and alignment.
static void expect_tight(const TensorRow* rows, int count, size_t bytes) {
    size_t of_life[5] = {0};
    for (int i = 0; i < count; i++) {
        of_life[rows[i].life] += (row_bytes(&rows[i]) + 511) / 512 * 512;
    }
    const size_t shared =
        of_life[LIVE_BLOCK] > of_life[LIVE_CLASSIFIER] ? of_life[LIVE_BLOCK] : of_life[LIVE_CLASSIFIER];
    const size_t all = of_life[LIVE_ALWAYS] + of_life[LIVE_PASS] + of_life[LIVE_SENT] + shared;
    EXPECT(bytes <= all + 512, "%zu bytes in all, wanted %zu", bytes, all);
}

// The shapes that files of the field rely on, in their order.
TEST(parameter_rows) {
    static const struct {
        const char* name;
        int layers, rows, cols, decay;
    } wanted[] = {
        {"wte", 1, 256, 36, 1},     {"wpe", 1, 40, 36, 1},     {"ln1w", 3, 1, 36, 0},
        {"ln1b", 3, 1, 36, 0},      {"qkvw", 3, 108, 36, 1},   {"qkvb", 3, 1, 108, 0},
        {"attprojw", 3, 36, 36, 1}, {"attprojb", 3, 1, 36, 0}, {"ln2w", 3, 1, 36, 0},
        {"ln2b", 3, 1, 36, 0},      {"fcw", 3, 144, 36, 1},    {"fcb", 3, 1, 144, 0},
        {"fcprojw", 3, 36, 144, 1}, {"fcprojb", 3, 1, 36, 0},  {"lnfw", 1, 1, 36, 0},
        {"lnfb", 1, 1, 36, 0},
    };
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const size_t bytes = model_parameter_rows(rows, TINY);
    expect_layout(rows, MODEL_PARAMETER_ROWS, bytes);
    int present = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        present += !tensor_is_absent(&rows[i]);
    }
    EXPECT(present == (int)(sizeof(wanted) / sizeof(wanted[0])), "%d tensors", present);
    for (int i = 0; i < present; i++) {
        const TensorRow* row = row_called(rows, MODEL_PARAMETER_ROWS, wanted[i].name);
        EXPECT(i == 0 || row > row_called(rows, MODEL_PARAMETER_ROWS, wanted[i - 1].name), "the order");
        const TensorKind kind = !row->decay           ? KIND_VECTOR
                                : row->name[0] == 'w' ? KIND_EMBEDDING
                                                      : KIND_MATRIX;
        EXPECT(row->kind == kind, "%s is of kind %d", row->name, row->kind);
        EXPECT(row->layers == wanted[i].layers && row->rows == (size_t)wanted[i].rows &&
                   row->cols == (size_t)wanted[i].cols && row->decay == wanted[i].decay,
               "%s is %d x %zu x %zu", row->name, row->layers, row->rows, row->cols);
    }
}

// A block is as long as the layer with the most tensors, whatever the tensors that others have.
TEST(blocks_of_kinds) {
    static const char* const named[] = {"qwen35:0.8b", "lfm2:350m", "delta:25m"};
    for (int m = 0; m < 3; m++) {
        ModelConfig cfg = config_of(model_preset_by_name(named[m]));
        for (int l = 0; l < cfg.L; l++) {
            if (l % 4 != 3) {
                layer_add(cfg.mixed, l);
            }
        }
        TensorRow rows[MODEL_PARAMETER_ROWS];
        const size_t bytes = model_parameter_rows(rows, cfg);
        size_t most = 0, once = 0;
        for (int l = 2; l < 4; l++) {
            size_t block = 0;
            once = 0;
            for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
                const size_t room = tensor_is_absent(&rows[i]) ? 0 : tensor_room_in_group(&rows[i]);
                block += rows[i].in_block && tensor_has_layer(&rows[i], l) ? room : 0;
                once += rows[i].in_block ? 0 : room;
            }
            most = block > most ? block : most;
        }
        EXPECT(bytes == (once + (size_t)cfg.L * most) * sizeof(floatX),
               "%s: %zu bytes, %zu outside, %zu a block", named[m], bytes, once, most);
    }
}

static int is_word_of(const char* list, const char* word) {
    char padded[64];
    snprintf(padded, sizeof(padded), " %s ", word);
    return strstr(list, padded) != NULL;
}

// Returns the names of the absent rows, in order, with a blank after each: without experts also
// without theirs, and sinks, and likewise without norms after branches.
static const char* absent_rows(const TensorRow* rows, int count, int has_experts, int has_after,
                               int has_latent) {
    static const char of_after[] =
        " ln1postw ln2postw ln1post_in ln1post_rstd ln2post_in ln2post_rstd dbranch ";
    static const char of_experts[] =
        " sinks routerw routerwb routerb efcw efcb efcprojw efcprojb efch efch_act sfcw sfcprojw "
        "router_logits "
        "chosen expert_rows expert_order expert_first expert_scale sfch sfch_act expert_in "
        "expert_out dexpert_scale drouter_logits ";
    static const char of_mixers[] =
        " attgatew mixw mixzw mixbaw mixconvw mixdecay mixstep mixnormw mixoutw att_gate mix mixconv mixz "
        "mixba "
        "mixo mix_rstd mixy mix_inputs mix_state att_gated datt_gate dmix dmixconv dmixz dmixba dmixy dpart ";
    static const char of_latents[] =
        " lnqw lnkvw qupw kvupw latent_q latent_kv latent_q_norm latent_kv_norm latent_q_rstd "
        "latent_kv_rstd latent_first latent_queries latent_up att_values dlatent_q "
        "dlatent_kv dlatent_q_norm dlatent_kv_norm ";
    static const char of_ranks[] =
        " gathered parts arrived qk_sums word_rows all_logits expert_counts arrived_in "
        "arrived_out arrived_scale darrived_scale arrived_order arrived_first ";
    static const char of_adapters[] = " qkvw_a qkvw_b attprojw_a attprojw_b fcw_a fcw_b fcprojw_a fcprojw_b ";
    static const char of_additions[] =
        " scales value_table value_gate dfirst below scaled scale_parts dvalues dvalue_gates value_parts ";
    static char names[256];
    names[0] = '\0';
    for (int i = 0; i < count; i++) {
        const int is_absent = tensor_is_absent(&rows[i]),
                  is_left_out = (!has_experts && is_word_of(of_experts, rows[i].name)) ||
                                (!has_after && is_word_of(of_after, rows[i].name)) ||
                                (!has_latent && is_word_of(of_latents, rows[i].name)) ||
                                is_word_of(of_mixers, rows[i].name) || is_word_of(of_ranks, rows[i].name) ||
                                is_word_of(of_adapters, rows[i].name) ||
                                is_word_of(of_additions, rows[i].name);
        EXPECT(!is_absent || (rows[i].layers == 0 && tensor_copy(&rows[i], 2) == 0), "%s", rows[i].name);
        EXPECT(is_absent || !is_left_out, "%s without experts, slices or ranks that divide them",
               rows[i].name);
        if (is_absent && !is_left_out) {
            strcat(strcat(names, rows[i].name), " ");
        }
    }
    return names;
}

// Each architecture has the tensors that its kinds need, and no others.
TEST(architectures) {
    static const struct {
        Arch arch;
        const char *parameters, *activations;
        double weights_per_block, weights_once; // vectors of C = 36, without wte (157 rows) and wpe
    } cases[] = {
        // GPT-2: 4 vectors, 3 C + 4 C + 2 C biases, 12 C C; others: NH 3, KV 1, HS 10, F 50
        {ARCH_GPT2, "qnormw knormw head ", "encoded_rstd qk_raw qk_rstd kv ", 13 * 36 + 12 * 36 * 36, 2 * 36},
        {ARCH_LLAMA, "wpe ln1b qkvb qnormw knormw attprojb ln2b fcb fcprojb lnfb head ",
         "encoded_rstd ln1_mean qk_raw qk_rstd ln2_mean lnf_mean kv ", 2 * 36 + 36 * (50 + 30 + 3 * 50), 36},
        {ARCH_QWEN2, "wpe ln1b qnormw knormw attprojb ln2b fcb fcprojb lnfb head ",
         "encoded_rstd ln1_mean qk_raw qk_rstd ln2_mean lnf_mean kv ", 50 + 2 * 36 + 36 * (50 + 30 + 3 * 50),
         36},
        {ARCH_QWEN3, "wpe ln1b qkvb attprojb ln2b fcb fcprojb lnfb head ",
         "encoded_rstd ln1_mean qk_rstd ln2_mean lnf_mean kv ", 20 + 2 * 36 + 36 * (50 + 30 + 3 * 50), 36},
        {ARCH_ARCEE, "wpe ln1b qkvb qnormw knormw attprojb ln2b fcb fcprojb lnfb head ",
         "encoded_rstd ln1_mean qk_raw qk_rstd ln2_mean lnf_mean kv ", 2 * 36 + 36 * (50 + 30 + 2 * 50), 36},
        {ARCH_NANOCHAT, "wpe ln1w ln1b qkvb qnormw knormw attprojb ln2w ln2b fcb fcprojb lnfw lnfb ",
         "ln1_mean qk_raw ln2_mean lnf_mean kv ", 36 * (50 + 30 + 2 * 50), 157 * 36},
        // 4 experts with a row of the router each; a shared one with 20 hidden units
        {ARCH_MIXTRAL,
         "wpe ln1b qkvb qnormw knormw sinks attprojb ln2b fcw fcb fcprojw fcprojb routerwb routerb efcb "
         "efcprojb "
         "sfcw sfcprojw lnfb head ",
         "encoded_rstd ln1_mean qk_raw qk_rstd ln2_mean fch fch_act sfch sfch_act lnf_mean kv ",
         2 * 36 + 36 * (50 + 30 + 4 + 4 * 3 * 50), 36},
        {ARCH_OLMOE,
         "wpe ln1b qkvb sinks attprojb ln2b fcw fcb fcprojw fcprojb routerwb routerb efcb efcprojb sfcw "
         "sfcprojw "
         "lnfb head ",
         "encoded_rstd ln1_mean qk_rstd ln2_mean fch fch_act sfch sfch_act lnf_mean kv ",
         30 + 10 + 2 * 36 + 36 * (50 + 30 + 4 + 4 * 3 * 50), 36},
        {ARCH_GLM4MOE,
         "wpe ln1b sinks attprojb ln2b fcw fcb fcprojw fcprojb routerwb efcb efcprojb lnfb head ",
         "encoded_rstd ln1_mean qk_rstd ln2_mean fch fch_act lnf_mean kv ",
         50 + 20 + 2 * 36 + 4 + 36 * (50 + 30 + 4 + 4 * 3 * 50 + 3 * 20), 36},
        // latents of 6 and 8 columns, a key of 4; 3 heads of 10, values of 5
        {ARCH_DEEPSEEK3,
         "wpe ln1b qkvb qnormw knormw sinks attprojb ln2b fcw fcb fcprojw fcprojb routerwb efcb efcprojb "
         "lnfb head ",
         "encoded_rstd ln1_mean qk_raw qk_rstd ln2_mean fch fch_act lnf_mean kv ",
         6 + 8 + 2 * 36 + 4 + 36 * (6 + 8 + 4 + 15) + 30 * 6 + 3 * 11 * 8 + 36 * (4 + 4 * 3 * 50 + 3 * 20),
         36},
        // biases of all, and of each expert; 3 sinks
        {ARCH_GPTOSS, "wpe ln1b qnormw knormw ln2b fcw fcb fcprojw fcprojb routerb sfcw sfcprojw lnfb head ",
         "encoded_rstd ln1_mean qk_raw qk_rstd ln2_mean fch fch_act sfch sfch_act lnf_mean kv ",
         50 + 36 + 2 * 36 + 4 + 4 * (100 + 36) + 3 + 36 * (50 + 30 + 4 + 4 * 3 * 50), 36},
        // two norms a block, after its branches, and those of all queries and keys; four norms
        {ARCH_OLMO2, "wpe ln1w ln1b qkvb attprojb ln2w ln2b fcb fcprojb lnfb head ",
         "encoded_rstd ln1 ln1_mean ln1_rstd qk_rstd ln2 ln2_mean ln2_rstd lnf_mean kv ",
         30 + 10 + 2 * 36 + 36 * (50 + 30 + 3 * 50), 36},
        {ARCH_GEMMA2, "wpe ln1b qkvb qnormw knormw attprojb ln2b fcb fcprojb lnfb head ",
         "encoded_rstd ln1_mean qk_raw qk_rstd ln2_mean lnf_mean kv ", 4 * 36 + 36 * (50 + 30 + 3 * 50), 36},
        {ARCH_GEMMA3, "wpe ln1b qkvb attprojb ln2b fcb fcprojb lnfb head ",
         "encoded_rstd ln1_mean qk_rstd ln2_mean lnf_mean kv ", 20 + 4 * 36 + 36 * (50 + 30 + 3 * 50), 36},
        {ARCH_GLM4, "wpe ln1b qnormw knormw attprojb ln2b fcb fcprojb lnfb head ",
         "encoded_rstd ln1_mean qk_raw qk_rstd ln2_mean lnf_mean kv ", 50 + 4 * 36 + 36 * (50 + 30 + 3 * 50),
         36},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ModelConfig cfg = TINY;
        TensorRow rows[MODEL_PARAMETER_ROWS], activations[MODEL_ACTIVATION_ROWS];
        const char* word = model_architecture(cases[i].arch)->word;
        if (cases[i].arch != ARCH_GPT2) {
            cfg.arch = cases[i].arch, cfg.KV = 1, cfg.HS = 10, cfg.F = 50;
        }
        cfg.has_head = cases[i].arch == ARCH_NANOCHAT;
        const int has_experts = model_architecture(cfg.arch)->router != ROUTER_NONE,
                  has_after = model_has_norms_after(cfg);
        cfg.E = has_experts ? 4 : 0, cfg.E_used = has_experts ? 2 : 0;
        cfg.Fs = model_architecture(cfg.arch)->router == ROUTER_SIGMOID ? 20 : 0;
        if (model_has_latent(cfg)) {
            cfg.KV = 0, cfg.rope_dims = 4, cfg.latent = (ModelLatent){6, 8, 5, 0};
        }
        const double wpe = cases[i].arch == ARCH_GPT2 ? 40 * 36 : 0,
                     wanted = 157 * 36 + wpe + 3 * cases[i].weights_per_block + cases[i].weights_once;
        const size_t bytes = model_parameter_rows(rows, cfg);
        expect_layout(rows, MODEL_PARAMETER_ROWS, bytes);
        EXPECT(strcmp(absent_rows(rows, MODEL_PARAMETER_ROWS, has_experts, has_after, model_has_latent(cfg)),
                      cases[i].parameters) == 0,
               "%s lacks %s", word,
               absent_rows(rows, MODEL_PARAMETER_ROWS, has_experts, has_after, model_has_latent(cfg)));
        EXPECT(model_count_parameters(cfg) == wanted, "%s: %.0f parameters, wanted %.0f", word,
               model_count_parameters(cfg), wanted);
        const size_t room = model_activation_rows(activations, cfg, B, T, RECOMPUTE_NONE, cfg.L, 0, B * T);
        expect_layout(activations, MODEL_ACTIVATION_ROWS, room);
        EXPECT(
            strcmp(absent_rows(activations, MODEL_ACTIVATION_ROWS, has_experts, has_after,
                               model_has_latent(cfg)),
                   cases[i].activations) == 0,
            "%s lacks %s", word,
            absent_rows(activations, MODEL_ACTIVATION_ROWS, has_experts, has_after, model_has_latent(cfg)));
    }
}

TEST(activation_rows) {
    TensorRow rows[MODEL_ACTIVATION_ROWS];
    model_activation_rows(rows, TINY, B, T, RECOMPUTE_ACTIVATION, TINY.L, 0, B * T);
    EXPECT(may_share(row_called(rows, MODEL_ACTIVATION_ROWS, "logits"),
                     row_called(rows, MODEL_ACTIVATION_ROWS, "fch_act")),
           "the logits have memory of their own");
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        const size_t bytes = model_activation_rows(rows, TINY, B, T, recompute, TINY.L, 0, B * T);
        expect_layout(rows, MODEL_ACTIVATION_ROWS, bytes);
        expect_tight(rows, MODEL_ACTIVATION_ROWS, bytes);
    }
    for (int i = 0; i < MODEL_ACTIVATION_ROWS; i++) {
        const size_t tokens = strcmp(rows[i].name, "kv") == 0 ? 0 : B * T;
        EXPECT(rows[i].rows == tokens || rows[i].cols == 0, "%s has %zu rows", rows[i].name, rows[i].rows);
    }
    model_activation_rows(rows, TINY, B, T, RECOMPUTE_ACTIVATION, TINY.L, 0, 3);
    for (int i = 0; i < MODEL_ACTIVATION_ROWS; i++) {
        EXPECT(rows[i].cols == 0 || rows[i].rows == (strcmp(rows[i].name, "logits") == 0 ? 3
                                                     : strcmp(rows[i].name, "kv") == 0   ? 0
                                                                                         : B * T),
               "%s has %zu rows with chunks of 3", rows[i].name, rows[i].rows);
    }
    EXPECT(row_called(rows, MODEL_ACTIVATION_ROWS, "logits")->cols == 256, "logits are padded");
    EXPECT(row_called(rows, MODEL_ACTIVATION_ROWS, "qkv")->cols == 108, "queries, keys and values");
    EXPECT(row_called(rows, MODEL_ACTIVATION_ROWS, "att_lse")->cols == 3, "one a head");
    EXPECT(row_called(rows, MODEL_ACTIVATION_ROWS, "dfch")->cols == 144, "four times as wide");
}

// A stage keeps what its backward pass reads for each micro-batch in flight, and has one copy of
// the rest, but two of the stream's gradient. Only the last stage has a classifier.
TEST(places) {
    enum { PLACES = 3 };
    const ModelPart first = {.layers = 2, .of_layers = 4, .places = PLACES},
                    last = {.first_layer = 2, .layers = 2, .of_layers = 4};
    ModelConfig cfg = TINY;
    TensorRow rows[MODEL_ACTIVATION_ROWS];
    ModelActivations all = {0}, previous = {0};
    cfg.L = 2, cfg.part = first;
    const size_t bytes = model_activation_rows(rows, cfg, B, T, RECOMPUTE_ACTIVATION, cfg.L, 0, B * T);
    char* memory = (char*)check_alloc(bytes, 1, "activations");
    tensor_rows_bind(&all, rows, MODEL_ACTIVATION_ROWS, memory);
    for (int place = 0; place < PLACES; place++) {
        const ModelActivations at = model_activations_of(all, rows, 3 + place),
                               next = model_activations_of(all, rows, 4 + place);
        EXPECT(at.branch == all.branch && at.fch_act == all.fch_act, "%d", place);
        EXPECT(at.dresidual != next.dresidual, "gradient of micro-batch %d", place);
        memset(at.encoded, place + 1, B * T * (size_t)cfg.C * sizeof(float));
        memset(at.residual3, place + 1, 2 * B * T * (size_t)cfg.C * sizeof(float));
        memset(at.att_lse, place + 1, 2 * B * T * (size_t)cfg.NH * sizeof(float));
        EXPECT(place == 0 || at.encoded > previous.encoded, "place %d", place);
        previous = at;
    }
    for (int place = 0; place < PLACES; place++) {
        const ModelActivations at = model_activations_of(all, rows, place);
        const size_t end = 2 * B * T * (size_t)cfg.NH * sizeof(float) - 1;
        EXPECT(*(char*)at.encoded == place + 1 && ((char*)at.att_lse)[end] == place + 1, "place %d", place);
    }
    EXPECT(!all.logits && !all.lnf && !all.losses && all.encoded, "the first stage has no classifier");
    free(memory);
    cfg.part = last;
    model_activation_rows(rows, cfg, B, T, RECOMPUTE_ACTIVATION, cfg.L, 0, B * T);
    EXPECT(!tensor_is_absent(row_called(rows, MODEL_ACTIVATION_ROWS, "logits")), "the last stage has");
}

// Rows of experts have room for 31 rows of padding each; routing is kept at every level.
TEST(expert_rows) {
    ModelConfig cfg = TINY;
    TensorRow rows[MODEL_ACTIVATION_ROWS];
    cfg.arch = ARCH_GLM4MOE, cfg.F = 50, cfg.E = 4, cfg.E_used = 2, cfg.Fs = 20;
    const size_t M = (2 * B * T + 4 * 31) / 32 * 32;
    model_activation_rows(rows, cfg, B, T, RECOMPUTE_BLOCK, cfg.L, 0, B * T);
    for (int i = 0; i < MODEL_ACTIVATION_ROWS; i++) {
        const char* name = rows[i].name;
        const int is_row = is_word_of(" expert_order expert_scale efch efch_act expert_in expert_out "
                                      "dexpert_scale ",
                                      name),
                  is_kept = is_word_of(" router_logits chosen expert_rows expert_order expert_first "
                                       "expert_scale ",
                                       name);
        EXPECT(!is_row || rows[i].rows == M, "%s has %zu rows, wanted %zu", name, rows[i].rows, M);
        EXPECT(!is_kept || rows[i].layers == cfg.L, "%s has %d layers", name, rows[i].layers);
    }
    EXPECT(row_called(rows, MODEL_ACTIVATION_ROWS, "expert_first")->cols == 5, "ends of 4 experts");
    EXPECT(row_called(rows, MODEL_ACTIVATION_ROWS, "sfch")->cols == 40, "gate and up of the shared expert");
}

// Which tensors are one for all layers at each level, exactly; each level shares what the last one
// did.
TEST(recompute) {
    static const char* const shared[5] = {
        " ",
        " fch_act ",
        " fch_act ln1 ln2 ",
        " fch_act ln1 ln2 fch ",
        " fch_act ln1 ln2 ln1_mean ln1_rstd qkv atty att_lse residual2 ln2_mean ln2_rstd fch ",
    };
    static const char* const per_block = " fch_act ln1 ln2 ln1_mean ln1_rstd qkv atty att_lse residual2 "
                                         "ln2_mean ln2_rstd fch residual3 kv ";
    size_t last_bytes = SIZE_MAX;
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
        TensorRow rows[MODEL_ACTIVATION_ROWS];
        const size_t bytes = model_activation_rows(rows, TINY, B, T, level, TINY.L, 0, B * T);
        for (int i = 0; i < MODEL_ACTIVATION_ROWS; i++) {
            const int kept = is_word_of(per_block, rows[i].name) && !is_word_of(shared[level], rows[i].name);
            const int copies = rows[i].rows * rows[i].cols == 0 ? 0 : kept ? TINY.L : 1;
            EXPECT(rows[i].layers == copies, "level %d: %d copies of %s", level, rows[i].layers,
                   rows[i].name);
        }
        EXPECT(bytes < last_bytes, "level %d takes less memory than the one before", level);
        last_bytes = bytes;
    }
}

// Generation keeps keys and values of all layers, and one block of the rest for as many tokens as
// it reads at once; it has no room for what a backward pass needs.
TEST(never) {
    TensorRow rows[MODEL_ACTIVATION_ROWS];
    model_activation_rows(rows, TINY, B, T, RECOMPUTE_NEVER, TINY.L, 0, B);
    for (int i = 0; i < MODEL_ACTIVATION_ROWS; i++) {
        const char* name = rows[i].name;
        const int is_cache = strcmp(name, "kv") == 0;
        const int is_trained = is_word_of(" losses dresidual dqkv dfch ", name);
        const size_t tokens = is_cache                      ? B * T
                              : is_trained                  ? 0
                              : strcmp(name, "logits") == 0 ? B
                              : B > T                       ? B
                                                            : T;
        const int copies = tokens * rows[i].cols == 0 ? 0 : is_cache ? TINY.L : 1;
        EXPECT((rows[i].rows == tokens || rows[i].cols == 0) && rows[i].layers == copies,
               "%s: %d layers of %zu tokens", name, rows[i].layers, rows[i].rows);
        EXPECT(!is_cache || rows[i].cols == 2 * (size_t)TINY.C, "keys and values");
    }
}

// Blocks that the backward pass does not come to are not kept: they share the memory of the first
// one that is.
TEST(first_block) {
    TensorRow rows[MODEL_ACTIVATION_ROWS];
    for (int first = 0; first <= TINY.L; first++) {
        for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
            const int kept = first < TINY.L ? TINY.L - first : 1;
            const size_t bytes = model_activation_rows(rows, TINY, B, T, level, TINY.L, first, B * T);
            const TensorRow *stream = row_called(rows, MODEL_ACTIVATION_ROWS, "residual3"),
                            *qkv = row_called(rows, MODEL_ACTIVATION_ROWS, "qkv");
            char* memory = (char*)check_alloc(bytes, 1, "activations");
            ModelActivations all = {0};
            expect_layout(rows, MODEL_ACTIVATION_ROWS, bytes);
            EXPECT(stream->layers == kept && qkv->layers == (level == RECOMPUTE_BLOCK ? 1 : kept),
                   "from block %d on, level %d: %d copies", first, level, stream->layers);
            tensor_rows_bind(&all, rows, MODEL_ACTIVATION_ROWS, memory);
            for (int l = 0; l < TINY.L; l++) {
                const ModelActivations at = model_activations_at_layer(all, rows, l);
                const size_t copy = l > first ? (size_t)(l - first) : 0;
                EXPECT((char*)at.residual3 == memory + stream->offset_bytes + copy * stream->layer_bytes,
                       "block %d of those from %d on", l, first);
            }
            free(memory);
        }
    }
}

// ---- pointers ----

// The rows name the members; a member is found by name here, to be independent of their offsets.
TEST(parameter_pointers) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    char* memory = (char*)check_alloc(model_parameter_rows(rows, TINY), 1, "parameters");
    ModelParameters p;
    tensor_rows_bind(&p, rows, MODEL_PARAMETER_ROWS, memory);
#define SAME_(name_, ...)                                                                                    \
    const TensorRow* of_##name_ = row_called(rows, MODEL_PARAMETER_ROWS, #name_);                            \
    EXPECT((char*)p.name_ == (of_##name_->layers ? memory + of_##name_->offset_bytes : NULL), #name_);
    MODEL_PARAMETERS(SAME_)
#undef SAME_
    const ptrdiff_t block =
        (ptrdiff_t)(row_called(rows, MODEL_PARAMETER_ROWS, "ln1w")->layer_bytes / sizeof(floatX));
    for (int l = 0; l < TINY.L; l++) {
        const ModelParameters at = model_parameters_at_layer(p, rows, l);
        EXPECT(at.wte == p.wte && at.wpe == p.wpe && at.lnfw == p.lnfw && at.lnfb == p.lnfb, "one for all");
        const ptrdiff_t at_l = l * block;
        EXPECT(at.qkvw == p.qkvw + at_l && at.qkvb == p.qkvb + at_l, "layer %d: qkv", l);
        EXPECT(at.fcw == p.fcw + at_l && at.fcprojw == p.fcprojw + at_l, "layer %d: MLP", l);
        EXPECT(at.ln1w == p.ln1w + at_l && at.fcprojb == p.fcprojb + at_l, "layer %d: vectors", l);
    }
    free(memory);
}

static void test_activation_pointers(int recompute) {
    TensorRow rows[MODEL_ACTIVATION_ROWS];
    char* memory = (char*)check_alloc(model_activation_rows(rows, TINY, B, T, recompute, TINY.L, 0, B * T), 1,
                                      "activations");
    ModelActivations a;
    tensor_rows_bind(&a, rows, MODEL_ACTIVATION_ROWS, memory);
#define SAME_(name_, ...)                                                                                    \
    const TensorRow* of_##name_ = row_called(rows, MODEL_ACTIVATION_ROWS, #name_);                           \
    EXPECT((char*)a.name_ == (of_##name_->layers ? memory + of_##name_->offset_bytes : NULL), #name_);
    MODEL_ACTIVATIONS(SAME_)
#undef SAME_
    for (int l = 0; l < TINY.L; l++) {
        const ModelActivations at = model_activations_at_layer(a, rows, l);
        const int gelu = recompute >= RECOMPUTE_ACTIVATION ? 0 : l,
                  norm = recompute >= RECOMPUTE_NORMS ? 0 : l, mlp = recompute >= RECOMPUTE_MLP ? 0 : l,
                  block = recompute >= RECOMPUTE_BLOCK ? 0 : l;
        EXPECT(at.encoded == a.encoded && at.logits == a.logits && at.dqkv == a.dqkv, "one for all");
        EXPECT(at.fch_act == a.fch_act + gelu * B * T * 144, "level %d, layer %d: GELU", recompute, l);
        EXPECT(at.ln1 == a.ln1 + norm * B * T * 36, "level %d, layer %d: norm", recompute, l);
        EXPECT(at.fch == a.fch + mlp * B * T * 144, "level %d, layer %d: before GELU", recompute, l);
        EXPECT(at.qkv == a.qkv + block * B * T * 108 && at.ln2_rstd == a.ln2_rstd + block * B * T,
               "level %d, layer %d: attention and statistics", recompute, l);
        EXPECT(at.residual3 == a.residual3 + l * B * T * 36, "level %d, layer %d: stream", recompute, l);
    }
    free(memory);
}

// Equal parts, of at most 64 MiB of fp32 logits and a token.
TEST(classifier_chunk) {
    const ModelConfig large = {.Vp = 50304, .V = 50257};
    EXPECT(model_classifier_chunk(large, 256) == 256, "one chunk");
    EXPECT(model_classifier_chunk(large, 1024) == 256, "four equal chunks");
    EXPECT(model_classifier_chunk(large, 8192) == 1024, "no more than eight");
    EXPECT(model_classifier_chunk(TINY, 7) == 7, "one chunk");
}

// ---- the weights of a new model ----

// Mean and standard deviation of one layer of a random tensor.
static void expect_normal(const TensorRow* row, int l, double std) {
    const size_t rows = strcmp(row->name, "wte") == 0 ? (size_t)TINY.V : row->rows;
    const double n = (double)(rows * row->cols);
    double sum = 0, squares = 0;
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < row->cols; c++) {
            const double x = model_initial_value(row, TINY, 42, l, r, c);
            sum += x;
            squares += x * x;
        }
    }
    EXPECT_NEAR(sum / n, 0, 5 * std / sqrt(n), "mean of %s, layer %d", row->name, l);
    EXPECT_NEAR(sqrt(squares / n), std, 5 * std / sqrt(2 * n), "deviation of %s, layer %d", row->name, l);
}

TEST(initial_values) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const double std = 0.02 * sqrt(768.0 / 36); // of TINY's 36 channels
    const ModelConfig published = {1024, GPT2_VOCAB, 50304, 12, 12, 768, SHARE_OFF},
                      wide = {1024, GPT2_VOCAB, 50304, 48, 25, 1600, SHARE_OFF};
    model_parameter_rows(rows, TINY);
    EXPECT(model_initial_std(&rows[0], published) == 0.02 && model_initial_std(&rows[0], wide) == 0.02,
           "GPT-2's own");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &rows[i];
        const char last = row->name[strlen(row->name) - 1];
        const int is_norm = strncmp(row->name, "ln", 2) == 0, is_matrix = row->decay;
        const int is_projection = strstr(row->name, "proj") != NULL;
        for (int l = 0; l < row->layers; l++) {
            if (is_matrix) {
                expect_normal(row, l, is_projection ? std / sqrt(6) : std); // 2L = 6
            } else {
                const float wanted = is_norm && last == 'w' ? 1 : 0, at = (float)row->cols - 1;
                EXPECT(model_initial_value(row, TINY, 42, l, 0, 0) == wanted, "%s", row->name);
                EXPECT(model_initial_value(row, TINY, 42, l, 0, (size_t)at) == wanted, "end of %s",
                       row->name);
            }
        }
    }
}

// Padding rows of wte are zero; no other tensor loses rows, not even wpe with as many of them as
// wte.
TEST(padding) {
    ModelConfig cfg = TINY;
    cfg.max_T = cfg.Vp;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows(rows, cfg);
    int zero_wte = 0, zero_wpe = 0;
    for (size_t r = 0; r < (size_t)cfg.Vp; r++) {
        const int is_zero =
            model_initial_value(row_called(rows, MODEL_PARAMETER_ROWS, "wte"), cfg, 42, 0, r, 5) == 0;
        EXPECT(is_zero == (r >= (size_t)cfg.V), "row %zu of wte", r);
        zero_wte += is_zero;
        zero_wpe += model_initial_value(row_called(rows, MODEL_PARAMETER_ROWS, "wpe"), cfg, 42, 0, r, 5) == 0;
    }
    EXPECT(zero_wte == cfg.Vp - cfg.V, "%d zero rows in wte", zero_wte);
    EXPECT(zero_wpe == 0, "%d zero rows in wpe", zero_wpe);
}

// The value is a function of the seed, the tensor and the place, and its bits never change.
TEST(determinism) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows(rows, TINY);
    const TensorRow *wte = row_called(rows, MODEL_PARAMETER_ROWS, "wte"),
                    *wpe = row_called(rows, MODEL_PARAMETER_ROWS, "wpe"),
                    *qkvw = row_called(rows, MODEL_PARAMETER_ROWS, "qkvw"),
                    *attprojw = row_called(rows, MODEL_PARAMETER_ROWS, "attprojw");
    const float value = model_initial_value(qkvw, TINY, 42, 1, 2, 3);
    EXPECT(value == model_initial_value(qkvw, TINY, 42, 1, 2, 3), "again");
    EXPECT(value != model_initial_value(qkvw, TINY, 43, 1, 2, 3), "another seed");
    EXPECT(value != model_initial_value(qkvw, TINY, 42, 0, 2, 3), "another layer");
    EXPECT(value != model_initial_value(qkvw, TINY, 42, 1, 3, 3), "another row");
    EXPECT(value != model_initial_value(qkvw, TINY, 42, 1, 2, 4), "another column");
    EXPECT(model_initial_value(wte, TINY, 42, 0, 2, 3) != model_initial_value(wpe, TINY, 42, 0, 2, 3),
           "another tensor");
    EXPECT(model_initial_value(wte, TINY, 42, 0, 0, 0) == -0x1.49dd32p-7f, "pinned");
    EXPECT(value == -0x1.500b2cp-7f, "pinned, in the middle");
    EXPECT(model_initial_value(attprojw, TINY, 42, 2, 35, 35) == 0x1.4138ap-7f, "pinned, scaled");
}

TEST(activation_pointers) {
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        test_activation_pointers(recompute);
    }
}
