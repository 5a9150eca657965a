// test_self_attention.c -- the attention of a block in every architecture: both passes against
// plain loops in double, in fp32 and, packed or not, in bf16; windows; decoding step by step.
#include "llmc/layers/self_attention.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

// One layer with random parameters, and the activations of a pass.
typedef struct {
    ModelConfig cfg;
    Memory memory;
    TensorRow parameter_rows[MODEL_PARAMETER_ROWS], activation_rows[MODEL_ACTIVATION_ROWS];
    ModelParameters params;
    ModelActivations acts;
    Linear linear;
    Attention attention;
    int* window_starts;
} Layer;

static ModelConfig config(Arch arch, int C, int NH, int KV, int HS, int window) {
    ModelConfig cfg = {.max_T = 128, .V = 8, .Vp = 128, .L = 1, .NH = NH, .C = C, .arch = arch};
    cfg.KV = KV, cfg.HS = HS, cfg.window = window, cfg.windows[0] = window > 0;
    return cfg;
}

// Scores with a scale of their own and a cap that some of them reach.
static ModelConfig capped(ModelConfig cfg) {
    cfg.attention_scale = 0.2f, cfg.attention_softcap = 3;
    return cfg;
}

// Takes memory for a pass over (B, T), for training or, if `decodes`, for decoding B sequences.
static void layer_open(Layer* layer, ModelConfig cfg, int B, int T, int is_bf16, int decodes) {
    *layer = (Layer){.cfg = cfg, .memory = memory_on_host()};
    TensorRow* rows = layer->activation_rows;
    const size_t params = model_parameter_rows(layer->parameter_rows, cfg),
                 acts = decodes ? model_activation_rows(rows, cfg, B, T, RECOMPUTE_NEVER, 1, 0, 1)
                                : model_activation_rows(rows, cfg, B, T, RECOMPUTE_NONE, 1, 0, 1);
    float* memory = ops_normal(params / sizeof(float), 0.2f);
    tensor_rows_bind(&layer->params, layer->parameter_rows, MODEL_PARAMETER_ROWS, memory);
    tensor_rows_bind(&layer->acts, rows, MODEL_ACTIVATION_ROWS, ops_floats(acts / sizeof(float)));
    linear_open(&layer->linear, &layer->memory, 0, (size_t)B * T, (size_t)model_hidden(cfg));
    if (is_bf16) {
        linear_open_bf16(&layer->linear, &layer->memory, layer->parameter_rows, memory, PACKED_KINDS);
        linear_pack(&layer->linear);
    }
    self_attention_open(&layer->attention, &layer->memory, is_bf16, cfg, attention_config_sizes(cfg, B, T),
                        NULL);
    layer->window_starts = ops_below((size_t)B * T, 1);
}

static SelfAttention attention_of(Layer* layer, const Pass* pass) {
    const LayerPass of = {.cfg = layer->cfg,
                          .pass = pass,
                          .p = layer->params,
                          .a = layer->acts,
                          .weights = linear_weights(&layer->linear, layer->cfg, &layer->params, 0),
                          .linear = &layer->linear};
    layer->linear.few = pass_is_step(pass);
    if (layer->cfg.window > 0) {
        pass_window_starts_cpu(layer->window_starts, pass, layer->cfg.window);
    }
    return self_attention_of(&of, layer->window_starts, &layer->attention);
}

// The reference of the layer, in double.
typedef struct {
    double *qkv, *normed, *turned, *rstd, *out, *lse;
    double *dinp, *dqkvw, *dqkvb, *dqnormw, *dknormw, *dsinks;
} Wanted;

static double* widen(const float* x, size_t n) { return x ? ops_widen(x, n) : NULL; }

static Wanted wanted(const Layer* layer, const float* inp, const float* dout, const int* starts, int B,
                     int T) {
    const ModelConfig cfg = layer->cfg;
    const Architecture* kinds = model_architecture(cfg.arch);
    const size_t N = (size_t)B * T, C = cfg.C, NH = cfg.NH, KV = model_key_heads(cfg),
                 HS = model_head_size(cfg), QKV = model_qkv_size(cfg), Q = NH * HS;
    const ModelWidths widths = model_widths(cfg);
    const size_t query_norm = (size_t)widths.query_norm, key_norm = (size_t)widths.key_norm;
    const int by_window = cfg.window > 0 && cfg.window_rope_base > 0,
              turns = kinds->positions == POSITIONS_ROPE && !(cfg.unrotated[0] & 1);
    const RopeSettings settings = attention_config_rope(&cfg, by_window, T);
    double *frequency = ops_doubles(HS), *w = ops_widen(layer->params.qkvw, QKV * C),
           *b = widen(layer->params.qkvb, QKV), *q = widen(layer->params.qnormw, query_norm),
           *k = widen(layer->params.knormw, key_norm), *x = ops_widen(inp, N * C),
           *sinks = widen(layer->params.sinks, NH);
    const RefRope rope = {turns ? frequency : NULL, rope_attention(settings.scaling)};
    Wanted r = {ops_doubles(N * QKV), ops_doubles(N * QKV),    ops_doubles(N * QKV),  NULL,
                ops_doubles(N * Q),   ops_doubles(N * NH),     ops_doubles(N * C),    ops_doubles(QKV * C),
                ops_doubles(QKV),     ops_doubles(query_norm), ops_doubles(key_norm), ops_doubles(NH)};
    double *dturned = ops_doubles(N * QKV), *dnormed = ops_doubles(N * QKV), *dqkv = ops_doubles(N * QKV);
    r.rstd = kinds->heads == HEADS_PLAIN ? NULL : ops_doubles(N * (NH + KV));
    for (int i = 0; i < model_rope_dims(cfg) / 2; i++) {
        frequency[i] = rope_frequency(settings, i, T > settings.scaling.original_context ? T : 0);
    }
    ref_linear_forward(r.qkv, x, w, b, (RefLinear){N, C, QKV});
    const RefHeads heads = {B, T, NH, KV, HS, cfg.window, cfg.attention_scale, cfg.attention_softcap, sinks};
    const RefHeadNorm norm = {
        kinds->heads, q, k, r.rstd, model_norm_eps(cfg), norm_parts(kinds->norm).offset};
    ref_heads_norm_forward(r.normed, r.qkv, norm, heads);
    ref_rope_forward(r.turned, r.normed, rope, heads);
    ref_attention_forward(r.out, r.lse, r.turned, starts, heads);
    ref_attention_backward(dturned, sinks ? r.dsinks : NULL, ops_widen(dout, N * Q), r.turned, r.out, r.lse,
                           starts, heads);
    ref_rope_backward(dnormed, dturned, rope, heads);
    ref_heads_norm_backward(dqkv, q ? r.dqnormw : NULL, k ? r.dknormw : NULL, dnormed, r.qkv, norm, heads);
    ref_linear_backward(r.dinp, r.dqkvw, b ? r.dqkvb : NULL, dqkv, x, w, (RefLinear){N, C, QKV});
    return r;
}

// `limit`: of the errors of results, in FLT_EPSILON of the largest element.
static void check(ModelConfig cfg, int B, int T, const int* starts, int is_bf16, double limit) {
    const char* word = model_architecture(cfg.arch)->word;
    Layer layer;
    layer_open(&layer, cfg, B, T, is_bf16, 0);
    const size_t N = (size_t)B * T, C = cfg.C, Q = model_heads(cfg), QKV = model_qkv_size(cfg),
                 query_norm = (size_t)model_widths(cfg).query_norm,
                 key_norm = (size_t)model_widths(cfg).key_norm;
    float *inp = ops_normal(N * C, 1), *dout = ops_normal(N * Q, 1), *dqkvw = ops_floats(QKV * C),
          *dqkvb = layer.params.qkvb ? ops_floats(QKV) : NULL, *dqnormw = ops_floats(query_norm),
          *dknormw = ops_floats(key_norm), *dinp = ops_floats(N * C),
          *dsinks = layer.params.sinks ? ops_floats((size_t)cfg.NH) : NULL;
    const Pass pass = {.starts = starts, .B = B, .T = T, .acts = &layer.acts};
    const SelfAttention a = attention_of(&layer, &pass);
    const SelfAttentionGradients d = {.dqkvw = dqkvw,
                                      .dqkvb = dqkvb,
                                      .dqnormw = dqnormw,
                                      .dknormw = dknormw,
                                      .dsinks = dsinks,
                                      .mode = GRADIENT_SET,
                                      .datty = dout,
                                      .dqkv = layer.acts.dqkv,
                                      .sums = layer.acts.dfch};
    self_attention_heads_(&a, inp);
    self_attention_heads_backward_(&a, &d, dinp, inp);
    const Wanted w = wanted(&layer, inp, dout, starts, B, T);
    EXPECT_NEAR(ops_error(a.atty, w.out, NULL, N * Q), 0, limit, "%s: out of %d x %d, bf16 %d", word, B, T,
                is_bf16);
    EXPECT_NEAR(ops_error(dinp, w.dinp, NULL, N * C), 0, limit, "%s: dinp of %d x %d, bf16 %d", word, B, T,
                is_bf16);
    EXPECT_NEAR(ops_error(dqkvw, w.dqkvw, NULL, QKV * C), 0, limit, "%s: dqkvw of %d x %d, bf16 %d", word, B,
                T, is_bf16);
    if (dqkvb) {
        EXPECT_NEAR(ops_error(dqkvb, w.dqkvb, NULL, QKV), 0, limit, "%s: dqkvb of %d x %d, bf16 %d", word, B,
                    T, is_bf16);
    }
    if (dsinks) {
        EXPECT_NEAR(ops_error(dsinks, w.dsinks, NULL, (size_t)cfg.NH), 0, limit, "%s: dsinks, bf16 %d", word,
                    is_bf16);
    }
    if (layer.params.qnormw && T > 1) { // with one key, all gradients of scores are 0
        EXPECT_NEAR(ops_error(dqnormw, w.dqnormw, NULL, query_norm), 0, limit, "%s: dqnormw, bf16 %d", word,
                    is_bf16);
        EXPECT_NEAR(ops_error(dknormw, w.dknormw, NULL, key_norm), 0, limit, "%s: dknormw, bf16 %d", word,
                    is_bf16);
    }
    memory_close(&layer.memory);
    ops_close(word);
}

// (B, T): documents of up to `longest` tokens.
static int* documents(int B, int T, int longest) {
    int *starts = ops_below((size_t)B * T, longest), start = 0;
    for (int n = 0; n < B * T; n++) {
        start = n % T == 0 || starts[n] == 0 ? n % T : start;
        starts[n] = start;
    }
    return starts;
}

// test_gpt2.c and test_latent.c have the architectures with latents.
static int has_latents(Arch arch) { return heads_parts(model_architecture(arch)->heads).has_latent; }

static void check_all(int is_bf16, double limit) {
    const int T[] = {1, 31, 64};
    for (int arch = 0; arch < ARCH_COUNT; arch++) {
        for (int i = 0; i < 3 && !has_latents((Arch)arch); i++) {
            // more columns of queries than channels
            ModelConfig cfg = config((Arch)arch, 24, 6, 2, 32, 0);
            check(cfg, 2, T[i], NULL, is_bf16, limit);
            cfg = config((Arch)arch, 64, 3, 1, 8, 0); // and fewer
            cfg.rope_dims = 4;
            check(cfg, 1, T[i], documents(1, T[i], 20), is_bf16, limit);
        }
    }
    check(config(ARCH_MISTRAL, 24, 6, 2, 32, 7), 2, 64, NULL, is_bf16, limit);
    check(config(ARCH_QWEN3, 24, 6, 2, 32, 7), 2, 64, documents(2, 64, 20), is_bf16, limit);
    check(config(ARCH_LLAMA, 32, 3, 1, 64, 0), 2, 96, NULL, is_bf16, limit);
    check(capped(config(ARCH_MISTRAL, 24, 6, 2, 32, 7)), 2, 64, documents(2, 64, 20), is_bf16, limit);
    check(capped(config(ARCH_LLAMA, 32, 2, 1, 256, 0)), 1, 40, NULL, is_bf16, limit);
}

// Returns a Llama with the scaling, for an original context of 20.
static ModelConfig scaled(ModelConfig cfg, RopeScalingKind kind) {
    cfg.scaling = (RopeScaling){kind, 4, 1, 2, 20, 1.25f};
    for (int i = 0; i < model_head_size(cfg) / 2; i++) {
        cfg.rope_factors.near[i] = 1 + 0.1f * (float)i, cfg.rope_factors.far[i] = 2 + (float)i;
    }
    return cfg;
}

// Returns a model whose layer has rotary positions of its own kind: none; those of a window.
static ModelConfig unrotated(ModelConfig cfg) {
    cfg.unrotated[0] = 1;
    return cfg;
}
static ModelConfig by_window(ModelConfig cfg) {
    cfg.window_rope_base = 50, cfg.window_scaling = (RopeScaling){ROPE_LINEAR, 2};
    return cfg;
}

static void check_positions(int is_bf16, double limit) {
    const int T[] = {19, 64, 96}; // within the original context, and packed in tiles
    for (int i = 0; i < 3; i++) {
        for (int kind = ROPE_LINEAR; kind < ROPE_KINDS; kind++) {
            check(scaled(config(ARCH_LLAMA, 24, 6, 2, 32, 0), (RopeScalingKind)kind), 2, T[i], NULL, is_bf16,
                  limit);
        }
        check(scaled(config(ARCH_QWEN3, 24, 6, 2, 32, 7), ROPE_YARN), 2, T[i], documents(2, T[i], 20),
              is_bf16, limit);
        check(unrotated(config(ARCH_LLAMA, 24, 6, 2, 32, 0)), 2, T[i], NULL, is_bf16, limit);
        check(unrotated(config(ARCH_QWEN3, 24, 6, 2, 32, 7)), 2, T[i], NULL, is_bf16, limit);
        check(by_window(config(ARCH_MISTRAL, 24, 6, 2, 32, 7)), 2, T[i], NULL, is_bf16, limit);
    }
}

// Scores, of some units here, err by some FLT_EPSILON, and everything by as many.
TEST(self_attention) {
    check_all(0, 100);
    check_positions(0, 100);
}

// Each factor of a matmul is rounded by up to 2^-9 of it, and scores of some units by as much.
TEST(self_attention_bf16) {
    check_all(1, 0.04 / FLT_EPSILON);
    check_positions(1, 0.04 / FLT_EPSILON);
}

// Packed or not, queries and keys are rounded after the turn: results differ by roundings of bf16
// at most where fp32 falls on the other side, so hardly at all.
TEST(self_attention_packed) {
    enum { B = 2, T = 96 };
    const ModelConfig cfg = config(ARCH_LLAMA, 64, 6, 2, 64, 0);
    Layer layer;
    layer_open(&layer, cfg, B, T, 1, 0);
    const size_t Q = model_heads(cfg), QKV = model_qkv_size(cfg);
    float *inp = ops_normal((size_t)B * T * 64, 1), *qkv = ops_floats(B * T * QKV),
          *out = ops_floats(B * T * Q), *lse = ops_floats((size_t)B * T * cfg.NH);
    const Pass pass = {.B = B, .T = T, .acts = &layer.acts};
    const SelfAttention a = attention_of(&layer, &pass);
    EXPECT(self_attention_is_packed_(&a), "not packed");
    self_attention_heads_(&a, inp);
    linear_forward_cpu(qkv, inp, &a.weight, B * T, a.linear);
    heads_forward_cpu(qkv, &a.heads);
    attention_bf16_forward_cpu(&(AttentionPass){a.sizes, NULL, qkv, NULL, out, lse, NULL, NULL},
                               &layer.attention.bf16);
    double *want = ops_widen(out, B * T * Q), difference = 0;
    EXPECT_NEAR(ops_error(a.atty, want, NULL, B * T * Q), 0, 0.01 / FLT_EPSILON, "out");
    for (size_t i = 0; i < B * T * Q; i++) {
        difference += fabs(a.atty[i] - out[i]) / (double)(B * T * Q);
    }
    EXPECT(difference < 1e-4, "mean difference %g", difference);
    memory_close(&layer.memory);
    ops_close("packed");
}

// A prefill and steps of decoding give what the whole sequence gives, in windows, too.
static void check_decoding(ModelConfig cfg) {
    enum { T = 20, PREFILL = 9 };
    const char* word = model_architecture(cfg.arch)->word;
    const size_t C = cfg.C, Q = model_heads(cfg);
    float* inp = ops_normal(T * C, 1);
    Layer layer;
    layer_open(&layer, cfg, 2, T, 0, 1);
    const Pass whole = {.B = 1, .T = T, .acts = &layer.acts}; // without a cache
    const SelfAttention all = attention_of(&layer, &whole);
    self_attention_heads_(&all, inp);
    const float* want = ops_copy(all.atty, T * Q);
    for (int b = 0; b < 2; b++) { // the second sequence has read less
        const Pass prefill = {.B = 1, .T = PREFILL - b, .acts = &layer.acts, .cached = T, .sequence = b};
        const SelfAttention a = attention_of(&layer, &prefill);
        self_attention_heads_(&a, inp);
    }
    for (int t = PREFILL; t < T; t++) {
        const int positions[2] = {t, t - 1};
        const Pass step = {.B = 2, .T = 1, .acts = &layer.acts, .cached = T, .positions.given = positions};
        const SelfAttention a = attention_of(&layer, &step);
        float* rows = ops_copy(inp + (size_t)(t - 1) * C, 2 * C);
        memcpy(rows, inp + (size_t)t * C, C * sizeof(float));
        memcpy(rows + C, inp + (size_t)(t - 1) * C, C * sizeof(float));
        self_attention_heads_(&a, rows);
        for (int b = 0; b < 2; b++) {
            for (size_t c = 0; c < Q; c++) {
                EXPECT_NEAR(a.atty[b * Q + c], want[(size_t)positions[b] * Q + c], 1e-5,
                            "%s: sequence %d, token %d, column %zu", word, b, positions[b], c);
            }
        }
    }
    memory_close(&layer.memory);
    ops_close("decoding");
}

TEST(self_attention_decoding) {
    for (int arch = 0; arch < ARCH_COUNT; arch++) {
        if (!has_latents((Arch)arch)) {
            check_decoding(config((Arch)arch, 24, 6, 2, 16, 0));
        }
    }
    check_decoding(config(ARCH_MISTRAL, 24, 3, 1, 8, 7));
    check_decoding(config(ARCH_QWEN3, 24, 3, 3, 8, 1));
    for (int kind = ROPE_LINEAR; kind < ROPE_KINDS; kind++) {
        check_decoding(scaled(config(ARCH_LLAMA, 24, 6, 2, 16, 0), (RopeScalingKind)kind));
    }
    check_decoding(unrotated(config(ARCH_LLAMA, 24, 6, 2, 16, 0)));
    check_decoding(by_window(config(ARCH_MISTRAL, 24, 6, 2, 16, 7)));
    check_decoding(capped(config(ARCH_QWEN3, 24, 3, 3, 8, 5)));
}
