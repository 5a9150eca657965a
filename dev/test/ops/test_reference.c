// test_reference.c -- llmc/reference.h against finite differences in double: each operation, then
// the whole model; AdamW and GELU against closed forms.
#include "llmc/ops/gradient_norm.h"
#include "llmc/reference_model.h"
#include "dev/test/lib/ops.h"

// An operation: `forward` sets out from x; `backward` adds to dx, given dout. The loss is sum(out
// dout).
typedef struct Operation {
    const char* name;
    void (*forward)(const struct Operation* op);
    void (*backward)(const struct Operation* op);
    size_t out_n, x_n[4]; // elements; 0 ends the inputs
    double *out, *dout, *x[4], *dx[4];
    double *kept, *kept_too; // mean and rstd, lse
    const int* starts;
    ActivationKind activation;
    RouterKind router;
    double softcap, scale, z_loss, balance;
    double factor;              // of norms
    double weight, temperature; // of a teacher
} Operation;

static double* doubles(size_t n) { return ops_widen(ops_normal(n, 1), n); }

static double loss(const void* arg) {
    const Operation* op = arg;
    double sum = 0;
    op->forward(op);
    for (size_t i = 0; i < op->out_n; i++) {
        sum += op->out[i] * op->dout[i];
    }
    return sum;
}

// Every backward pass computes the gradient of the loss, and a second pass doubles it.
static void test_operation(Operation op) {
    op.out = ops_doubles(op.out_n), op.dout = doubles(op.out_n);
    op.kept = ops_doubles(op.out_n), op.kept_too = ops_doubles(op.out_n);
    for (int i = 0; i < 4 && op.x_n[i]; i++) {
        op.x[i] = doubles(op.x_n[i]), op.dx[i] = ops_doubles(op.x_n[i]);
    }
    op.forward(&op);
    op.backward(&op);
    for (int i = 0; i < 4 && op.x_n[i]; i++) {
        ops_expect_gradient(op.name, loss, &op, op.x[i], op.dx[i], op.x_n[i]);
    }
    op.forward(&op); // for `kept`
    op.backward(&op);
    for (int i = 0; i < 4 && op.x_n[i]; i++) {
        for (size_t j = 0; j < op.x_n[i]; j++) {
            op.dx[i][j] /= 2;
        }
        ops_expect_gradient(op.name, loss, &op, op.x[i], op.dx[i], op.x_n[i]);
    }
    ops_close(op.name);
}

// -------------------------------------------------------------------------------------------------
// Operations

enum { B = 2, T = 5, N = B * T, NH = 2, HS = 3, C = NH * HS, OC = 4, V = 7, Vp = 9 };

// Four heads in two groups, of two pairs each.
enum { GROUPED = 4, GROUPS = 2, PAIRS = 2, QKV = (GROUPED + 2 * GROUPS) * 2 * PAIRS };

static const int tokens[N] = {3, 0, 3, 6, 1, 2, 2, 2, 5, 3}; // some more than once, some not at all
static const int targets[N] = {1, 6, NO_TARGET, 0, 0, 3, 5, NO_TARGET, 2, 4};
static const int starts[N] = {0, 0, 2, 2, 2, 0, 1, 1, 1, 4}; // documents of one token and more
static const int lengths[B] = {T, T - 1};                    // routers: the last one is padding

static void embedding_forward(const Operation* op) {
    ref_embedding_forward(op->out, tokens, op->x[0], op->x[1], B, T, C);
}
static void embedding_backward(const Operation* op) {
    ref_embedding_backward(op->dx[0], op->dx[1], op->dout, tokens, B, T, C);
}

static RefNorm norm_of(const Operation* op, NormKind kind) {
    return (RefNorm){kind,       op->x[1], op->x[2], kind == NORM_LAYER ? op->kept : NULL, op->kept_too, 1e-5,
                     op->factor, N,        C};
}

static void norm_forward(const Operation* op) {
    ref_norm_forward(op->out, op->x[0], norm_of(op, NORM_LAYER));
}
static void norm_backward(const Operation* op) {
    ref_norm_backward(op->dx[0], op->dx[1], op->dx[2], op->dout, op->x[0], norm_of(op, NORM_LAYER));
}

static void plus_forward(const Operation* op) {
    ref_norm_forward(op->out, op->x[0], norm_of(op, NORM_RMS_PLUS));
}
static void plus_backward(const Operation* op) {
    ref_norm_backward(op->dx[0], op->dx[1], NULL, op->dout, op->x[0], norm_of(op, NORM_RMS_PLUS));
}

// RMS, with weights if there is a second input.
static void rms_forward(const Operation* op) { ref_norm_forward(op->out, op->x[0], norm_of(op, NORM_RMS)); }
static void rms_backward(const Operation* op) {
    ref_norm_backward(op->dx[0], op->dx[1], NULL, op->dout, op->x[0], norm_of(op, NORM_RMS));
}

static void linear_forward(const Operation* op) {
    ref_linear_forward(op->out, op->x[0], op->x[1], op->x[2], (RefLinear){N, C, OC});
}
static void linear_backward(const Operation* op) {
    ref_linear_backward(op->dx[0], op->dx[1], op->dx[2], op->dout, op->x[0], op->x[1], (RefLinear){N, C, OC});
}

// With sinks if there is a second input.
static void attention_forward(const Operation* op) {
    ref_attention_forward(op->out, op->kept, op->x[0], op->starts,
                          (RefHeads){B, T, NH, NH, HS, 0, op->scale, op->softcap, op->x[1]});
}
static void attention_backward(const Operation* op) {
    ref_attention_backward(op->dx[0], op->x[1] ? op->dx[1] : NULL, op->dout, op->x[0], op->out, op->kept,
                           op->starts, (RefHeads){B, T, NH, NH, HS, 0, op->scale, op->softcap, op->x[1]});
}

static void grouped_forward(const Operation* op) {
    ref_attention_forward(op->out, op->kept, op->x[0], op->starts,
                          (RefHeads){B, T, GROUPED, GROUPS, 2 * PAIRS, 2, op->scale, op->softcap});
}
static void grouped_backward(const Operation* op) {
    ref_attention_backward(op->dx[0], NULL, op->dout, op->x[0], op->out, op->kept, op->starts,
                           (RefHeads){B, T, GROUPED, GROUPS, 2 * PAIRS, 2, op->scale, op->softcap});
}

static const RefHeads grouped = {B, T, GROUPED, GROUPS, 2 * PAIRS, 0};

static RefHeadNorm head_norm_of(const Operation* op, HeadsKind kind) {
    return (RefHeadNorm){kind, op->x[1], op->x[2], op->kept, 1e-5, (int)op->factor};
}

static void head_norm_forward(const Operation* op) {
    ref_heads_norm_forward(op->out, op->x[0], head_norm_of(op, HEADS_NORM), grouped);
}
static void head_norm_backward(const Operation* op) {
    ref_heads_norm_backward(op->dx[0], op->dx[1], op->dx[2], op->dout, op->x[0], head_norm_of(op, HEADS_NORM),
                            grouped);
}

static void row_norm_forward(const Operation* op) {
    ref_heads_norm_forward(op->out, op->x[0], head_norm_of(op, HEADS_ROW_NORM), grouped);
}
static void row_norm_backward(const Operation* op) {
    ref_heads_norm_backward(op->dx[0], op->dx[1], op->dx[2], op->dout, op->x[0],
                            head_norm_of(op, HEADS_ROW_NORM), grouped);
}

static const double frequency[PAIRS] = {1, 0.1};

static void rope_forward(const Operation* op) {
    ref_rope_forward(op->out, op->x[0], (RefRope){frequency, 1}, grouped);
}
static void rope_backward(const Operation* op) {
    ref_rope_backward(op->dx[0], op->dout, (RefRope){frequency, 1}, grouped);
}

static void activation_forward(const Operation* op) {
    ref_activation_forward(op->out, op->x[0], N, C, op->activation);
}
static void activation_backward(const Operation* op) {
    ref_activation_backward(op->dx[0], op->dout, op->x[0], N, C, op->activation);
}

static void residual_forward(const Operation* op) {
    ref_residual_forward(op->out, op->x[0], op->x[1], 0.7, op->out_n);
}
static void residual_backward(const Operation* op) {
    ref_residual_backward(op->dx[0], op->dx[1], op->dout, 0.7, op->out_n);
}

// Computes what training minimizes. All tokens have equal weights, because the operation has no
// other gradient.
static void classifier_forward(const Operation* op) {
    ref_classifier_forward(op->out, op->kept, op->x[0], targets, (RefClassifier){N, V, Vp, op->softcap, 0});
    for (int n = 0; n < N; n++) {
        op->out[n] += targets[n] == NO_TARGET ? 0 : op->z_loss * op->kept[n] * op->kept[n];
        op->dout[n] = 0.25;
    }
}
static void classifier_backward(const Operation* op) {
    ref_classifier_backward(op->dx[0], op->x[0], op->kept, targets, 0.25,
                            (RefClassifier){N, V, Vp, op->softcap, op->z_loss});
}

// The log-probabilities of a teacher.
static void teacher_of(double* log_q, const Operation* op) {
    double logits[N * Vp];
    for (int i = 0; i < N * Vp; i++) {
        logits[i] = sin(3 * i);
    }
    ref_log_probs(log_q, logits, op->temperature, (RefClassifier){N, V, Vp, 0, 0});
}

// Computes what training with a teacher minimizes, or its gradient.
static void distill_pass(const Operation* op, double* dlogits) {
    double log_pt[N * V], log_q[N * V], kl[N];
    teacher_of(log_q, op);
    ref_log_probs(log_pt, op->x[0], op->temperature, (RefClassifier){N, V, Vp, op->softcap, 0});
    ref_classifier_forward(op->out, op->kept, op->x[0], targets, (RefClassifier){N, V, Vp, op->softcap, 0});
    ref_distill(kl, dlogits,
                (RefDistill){{N, V, Vp, op->softcap, op->z_loss},
                             op->x[0],
                             op->kept,
                             log_pt,
                             log_q,
                             targets,
                             0.25,
                             op->weight,
                             op->temperature});
    for (int n = 0; n < N; n++) {
        const double z = targets[n] == NO_TARGET ? 0 : op->z_loss * op->kept[n] * op->kept[n];
        op->out[n] =
            (1 - op->weight) * op->out[n] + z + op->weight * op->temperature * op->temperature * kl[n];
        op->dout[n] = 0.25;
    }
}
static void distill_forward(const Operation* op) {
    double unused[N * Vp] = {0};
    distill_pass(op, unused);
}
static void distill_backward(const Operation* op) { distill_pass(op, op->dx[0]); }

// ---- experts ----

enum { E = 5, USED = 2 };

static const double expert_bias[E] = {0.3, -0.1, 0, 0.2, -0.4};

static RefRouter router_of(const Operation* op) {
    return (RefRouter){op->router, B, T, E, USED, 1.5, op->balance, op->z_loss, expert_bias, NULL, NULL};
}

// Returns the sum of both losses over all tokens but padding.
static double router_losses(const RefRouter* r, const double* logits, const double* weights) {
    double f[E], q[E], sum = 0;
    for (int n = 0; n < N; n++) {
        const double lse = ref_softmax_(q, logits + n * E, E);
        if (n % T >= (r->lengths ? r->lengths[n / T] : T)) {
            continue;
        }
        ref_router_load_(f, weights, r, (size_t)n);
        ref_router_distribution_(q, logits + n * E, r);
        sum += r->balance * E * ref_dot_(f, q, E) + r->z_loss * lse * lse;
    }
    return sum;
}

// The last output is the sum of both losses, each token weighs 0.25.
static void router_forward(const Operation* op) {
    const RefRouter r = router_of(op);
    ref_router_forward(op->out, op->x[0], &r);
    op->out[N * E] = router_losses(&r, op->x[0], op->out);
    op->dout[N * E] = 0.25;
}
static void router_backward(const Operation* op) {
    const RefRouter r = router_of(op);
    ref_router_backward(op->dx[0], op->dout, op->x[0], op->out, 0.25, &r);
}

static RefExperts experts_of(const Operation* op) {
    return (RefExperts){op->x[0], op->x[1], op->x[2], op->x[3], N, E, OC, C};
}
static void experts_forward(const Operation* op) { ref_experts_forward(op->out, experts_of(op)); }
static void experts_backward(const Operation* op) {
    ref_experts_backward(op->dx[0], op->dx[1], op->dx[2], op->dx[3], op->dout, experts_of(op));
}

TEST(operations) {
    // clang-format off
    const Operation operations[] = {
        {"embedding",  embedding_forward,  embedding_backward,  .out_n = N * C,  .x_n = {Vp * C, (T + 1) * C}},
        {"tokens",     embedding_forward,  embedding_backward,  .out_n = N * C,  .x_n = {Vp * C}},
        {"layer norm", norm_forward,       norm_backward,       .out_n = N * C,  .x_n = {N * C, C, C}, .factor = 1},
        {"rms",        rms_forward,        rms_backward,        .out_n = N * C,  .x_n = {N * C, C}, .factor = 2},
        {"rms plus",   plus_forward,       plus_backward,       .out_n = N * C,  .x_n = {N * C, C}, .factor = 0.3},
        {"rms alone",  rms_forward,        rms_backward,        .out_n = N * C,  .x_n = {N * C}, .factor = 1},
        {"linear",     linear_forward,     linear_backward,     .out_n = N * OC, .x_n = {N * C, OC * C, OC}},
        {"attention",  attention_forward,  attention_backward,  .out_n = N * C,  .x_n = {N * 3 * C}},
        {"documents",  attention_forward,  attention_backward,  .out_n = N * C,  .x_n = {N * 3 * C}, .starts = starts},
        {"scale",      attention_forward,  attention_backward,  .out_n = N * C,  .x_n = {N * 3 * C}, .scale = 0.3},
        {"sinks",      attention_forward,  attention_backward,  .out_n = N * C,  .x_n = {N * 3 * C, NH}, .starts = starts},
        {"cap",        attention_forward,  attention_backward,  .out_n = N * C,  .x_n = {N * 3 * C}, .softcap = 0.5, .starts = starts},
        {"cap, group", grouped_forward,    grouped_backward,    .out_n = N * GROUPED * 2 * PAIRS, .x_n = {N * QKV}, .softcap = 0.5, .scale = 0.7},
        {"groups",     grouped_forward,    grouped_backward,    .out_n = N * GROUPED * 2 * PAIRS, .x_n = {N * QKV}, .starts = starts},
        {"head norm",  head_norm_forward,  head_norm_backward,  .out_n = N * QKV, .x_n = {N * QKV, 2 * PAIRS, 2 * PAIRS}},
        {"head plus",  head_norm_forward,  head_norm_backward,  .out_n = N * QKV, .x_n = {N * QKV, 2 * PAIRS, 2 * PAIRS}, .factor = 1},
        {"unit norm",  head_norm_forward,  head_norm_backward,  .out_n = N * QKV, .x_n = {N * QKV}},
        {"row norm",   row_norm_forward,   row_norm_backward,   .out_n = N * QKV, .x_n = {N * QKV, GROUPED * 2 * PAIRS, GROUPS * 2 * PAIRS}},
        {"chosen",     router_forward,     router_backward,     .out_n = N * E + 1, .x_n = {N * E}, .router = ROUTER_CHOSEN},
        {"softmax",    router_forward,     router_backward,     .out_n = N * E + 1, .x_n = {N * E}, .router = ROUTER_SOFTMAX},
        {"sigmoid",    router_forward,     router_backward,     .out_n = N * E + 1, .x_n = {N * E}, .router = ROUTER_SIGMOID},
        {"balance",    router_forward,     router_backward,     .out_n = N * E + 1, .x_n = {N * E}, .router = ROUTER_CHOSEN, .balance = 0.3, .z_loss = 0.1},
        {"balance s",  router_forward,     router_backward,     .out_n = N * E + 1, .x_n = {N * E}, .router = ROUTER_SIGMOID, .balance = 0.3, .z_loss = 0.1},
        {"experts",    experts_forward,    experts_backward,    .out_n = N * C, .x_n = {N * E * OC, N * E, E * C * OC}},
        {"with biases", experts_forward,   experts_backward,    .out_n = N * C, .x_n = {N * E * OC, N * E, E * C * OC, E * C}},
        {"rope",       rope_forward,       rope_backward,       .out_n = N * QKV, .x_n = {N * QKV}},
        {"gelu",       activation_forward, activation_backward, .out_n = N * C,  .x_n = {N * C}, .activation = ACTIVATION_GELU},
        {"swiglu",     activation_forward, activation_backward, .out_n = N * C,  .x_n = {2 * N * C}, .activation = ACTIVATION_SWIGLU},
        {"geglu",      activation_forward, activation_backward, .out_n = N * C,  .x_n = {2 * N * C}, .activation = ACTIVATION_GEGLU},
        {"clamped",    activation_forward, activation_backward, .out_n = N * C,  .x_n = {2 * N * C}, .activation = ACTIVATION_CLAMPED},
        {"relu2",      activation_forward, activation_backward, .out_n = N * C,  .x_n = {N * C}, .activation = ACTIVATION_RELU2},
        {"residual",   residual_forward,   residual_backward,   .out_n = N * C,  .x_n = {N * C, N * C}},
        {"classifier", classifier_forward, classifier_backward, .out_n = N,      .x_n = {N * Vp}},
        {"softcap",    classifier_forward, classifier_backward, .out_n = N,      .x_n = {N * Vp}, .softcap = 2},
        {"z-loss",     classifier_forward, classifier_backward, .out_n = N,      .x_n = {N * Vp}, .z_loss = 0.25},
        {"both",       classifier_forward, classifier_backward, .out_n = N,      .x_n = {N * Vp}, .softcap = 2, .z_loss = 0.25},
        {"teacher",    distill_forward,    distill_backward,    .out_n = N,      .x_n = {N * Vp}, .weight = 0.3, .temperature = 1},
        {"tempered",   distill_forward,    distill_backward,    .out_n = N,      .x_n = {N * Vp}, .weight = 0.7, .temperature = 2.5, .softcap = 2, .z_loss = 0.25}};
    // clang-format on
    for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++) {
        test_operation(operations[i]);
    }
}

// Turned heads keep their norms, and their products depend on the distance of positions alone.
TEST(rope) {
    const double one[8] = {1, 2, 3, 4, 5, 6, 7, 8}, frequencies[4] = {1, 0.1, 0.01, 0.001};
    const double want[8] = {-1.27223251272, -1.838864985141, 1.683928640731, 4.707906576486,
                            4.81777716753,  6.147277703506,  6.975968536024, 8.020963968527};
    double inp[2 * 9 * 8] = {0}, out[2 * 9 * 8];
    for (int t = 0; t < 9; t++) { // a query, and no key that differs
        memcpy(inp + 8 * t, one, sizeof(one));
    }
    ref_rope_forward(out, inp, (RefRope){frequencies, 1}, (RefHeads){1, 9, 1, 0, 8, 0});
    for (int i = 0; i < 8; i++) {
        EXPECT_NEAR(out[3 * 8 + i], want[i], 1e-11, "element %d of position 3", i);
    }
    for (int t = 2; t < 9; t++) {
        EXPECT_NEAR(ref_dot_(out + t * 8, out + (t - 2) * 8, 8), ref_dot_(out + 2 * 8, out, 8), 1e-12,
                    "positions %d and %d", t, t - 2);
    }
}

// -------------------------------------------------------------------------------------------------
// The model

// The loss that training minimizes.
static double model_loss(const void* model) {
    RefModel* m = (RefModel*)model;
    const double loss = ref_model_forward(m, tokens, targets, starts);
    const RefActivations a = ref_activations_(m, m->acts, m->cfg.L);
    double squares = 0, of_router = 0;
    for (int n = 0; n < N; n++) {
        squares += targets[n] == NO_TARGET ? 0 : a.logits_lse[n] * a.logits_lse[n];
    }
    for (int l = 0; l < (m->cfg.E ? m->cfg.L : 0); l++) {
        const RefParameters p = ref_parameters_(m, m->params, l);
        const RefActivations layer = ref_activations_(m, m->acts, l);
        const RefRouter router = ref_router_of_(m, &p, starts);
        of_router += router_losses(&router, layer.router_logits, layer.expert_weights);
    }
    return loss + m->z_loss * squares / targets_count(targets, N) + of_router / (double)ref_model_tokens_(m);
}

// Two blocks, more positions than tokens, documents, targets that do not count. A second pass sets
// the same gradients.
static void test_model(ModelConfig cfg, double z_loss) {
    RefModel model;
    ref_model_open(&model, cfg, B, T);
    model.z_loss = z_loss;
    model.router_balance = 0.2, model.router_z = 0.1;
    model.lengths = lengths;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const size_t n = tensor_layer_elements(&model.rows[i]);
        for (int l = 0; l < model.rows[i].layers; l++) {
            // small: scores and logits are smooth over the steps of the differences
            memcpy(tensor_at_layer(&model.rows[i], model.params, l), ops_widen(ops_normal(n, 0.5f), n),
                   n * sizeof(Real));
        }
    }
    for (int pass = 0; pass < 2; pass++) {
        model_loss(&model);
        ref_model_backward(&model, tokens, targets, starts);
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.rows[i];
        char what[64];
        snprintf(what, sizeof(what), "%s of %s", row->name, model_architecture(cfg.arch)->word);
        for (int l = 0; l < row->layers; l++) {
            ops_expect_gradient(what, model_loss, &model, (Real*)tensor_at_layer(row, model.params, l),
                                (Real*)tensor_at_layer(row, model.grads, l), tensor_layer_elements(row));
        }
    }
    ref_model_close(&model);
    ops_close(model_architecture(cfg.arch)->word);
}

TEST(model) {
    for (Arch arch = ARCH_GPT2; arch < ARCH_COUNT; arch++) {
        ModelConfig cfg = {T + 2, V, Vp, 2, NH, C, SHARE_OFF};
        if (arch != ARCH_GPT2) { // wide heads, one of keys, a window in layer 0
            cfg.arch = arch, cfg.KV = 1, cfg.HS = 4;
            cfg.F = 5;
            cfg.has_head = arch != ARCH_LLAMA;
            cfg.window = 2, cfg.windows[0] = 1;
            cfg.softcap = arch == ARCH_NANOCHAT ? 3 : 0;
        }
        // and larger embeddings, since norms of small ones are steep
        if (arch >= ARCH_OLMO2) {
            cfg.embedding_factor = 3, cfg.residual_factor = 0.22f, cfg.logits_divisor = 1.5f;
        }
        if (model_mixer(cfg) != MIXER_NONE) {
            cfg.mixer = mixer_parts(model_mixer(cfg)).has_heads ? (ModelMixer){3, 1, 2, 3, 2}
                                                                : (ModelMixer){.taps = 3};
            cfg.mixed[0] = 2;
        }
        if (model_architecture(arch)->router != ROUTER_NONE) {
            cfg.E = E, cfg.E_used = USED, cfg.router_factor = 1.5f;
            cfg.Fs = model_architecture(arch)->router == ROUTER_SIGMOID ? 3 : 0;
        }
        if (model_has_latent(cfg)) {
            cfg.KV = 0, cfg.rope_dims = 2, cfg.HS = 5, cfg.latent = (ModelLatent){3, 2, 3, 0};
            test_model(cfg, 0);
            cfg.latent.query_rank = 0;
        }
        test_model(cfg, arch == ARCH_NANOCHAT ? 0.01 : 0);
        if (model_architecture(arch)->has_additions) {
            cfg.has_scales = 1;
            test_model(cfg, 0);
            cfg.has_values = 1, cfg.has_scales = 0, cfg.KV = 2;
            test_model(cfg, 0);
        }
    }
}

// ---- numbers of another implementation: PyTorch in float64, by automatic differentiation ----

// Element i of layer l of a parameter is a fraction, the same for everybody.
static void set_parameter(const RefModel* model, const char* name, int r, int is_norm) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->rows[i];
        for (int l = 0; l < row->layers && strcmp(row->name, name) == 0; l++) {
            Real* x = (Real*)tensor_at_layer(row, model->params, l);
            for (size_t e = 0; e < tensor_layer_elements(row); e++) {
                const size_t u = (7919 * e + 104729 * (size_t)r + 1299709 * (size_t)l + 17) % 2003;
                x[e] = ((double)u / 2003 - 0.5) / 2 + is_norm;
            }
        }
    }
}

static void set_parameters(const RefModel* model) {
    static const struct {
        const char* name;
        int number, is_norm;
    } of[] = {{"wte", 0, 0},       {"wpe", 1, 0},          {"ln1w", 2, 1},       {"ln1b", 3, 0},
              {"qkvw", 4, 0},      {"qkvb", 5, 0},         {"qnormw", 6, 1},     {"knormw", 7, 1},
              {"attprojw", 8, 0},  {"attprojb", 9, 0},     {"ln2w", 10, 1},      {"ln2b", 11, 0},
              {"routerw", 12, 0},  {"routerb", 13, 0},     {"fcw", 14, 0},       {"fcb", 15, 0},
              {"fcprojw", 16, 0},  {"fcprojb", 17, 0},     {"sfcw", 18, 0},      {"sfcprojw", 19, 0},
              {"lnfw", 20, 1},     {"lnfb", 21, 0},        {"head", 22, 0},      {"ln1postw", 23, 1},
              {"ln2postw", 24, 1}, {"sinks", 25, 0},       {"routerwb", 26, 0},  {"efcw", 14, 0},
              {"efcb", 15, 0},     {"efcprojw", 16, 0},    {"efcprojb", 17, 0},  {"attgatew", 27, 0},
              {"mixw", 28, 0},     {"mixzw", 29, 0},       {"mixbaw", 30, 0},    {"mixconvw", 31, 0},
              {"mixdecay", 32, 0}, {"mixstep", 33, 0},     {"mixnormw", 34, 1},  {"mixoutw", 35, 0},
              {"lnqw", 36, 1},     {"lnkvw", 37, 1},       {"qupw", 38, 0},      {"kvupw", 39, 0},
              {"scales", 40, 0},   {"value_table", 41, 0}, {"value_gate", 42, 0}};
    enum { COUNT = sizeof(of) / sizeof(of[0]) };
    EXPECT((int)COUNT + 2 * ADAPT_MATRICES == (int)MODEL_PARAMETER_ROWS,
           "a parameter without a number; adapters (adapter.h) have none here");
    for (int i = 0; i < (int)COUNT; i++) {
        set_parameter(model, of[i].name, of[i].number, of[i].is_norm);
    }
}

// Returns the norm of the gradient of a parameter; NULL: of all.
static double gradient_norm_of(const RefModel* model, const char* name) {
    double squares = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->rows[i];
        for (int l = 0; l < row->layers && (!name || strcmp(row->name, name) == 0); l++) {
            const double norm =
                ref_gradient_norm((Real*)tensor_at_layer(row, model->grads, l), tensor_layer_elements(row));
            squares += norm * norm;
        }
    }
    return sqrt(squares);
}

typedef struct {
    const char* name;
    Arch arch;
    int is_tied, window, windows;
    float softcap;
    double loss, all, qkvw, fcw;
    int F, Fs, rope_dims; // of experts
} Numbers;

static void test_numbers(const Numbers* of) {
    enum { SEQUENCES = 2, LENGTH = 13, WORDS = 61 };
    ModelConfig cfg = {32, WORDS, WORDS, 2, 4, 24, SHARE_OFF};
    if (of->arch != ARCH_GPT2) {
        cfg.arch = of->arch, cfg.KV = 2, cfg.HS = 8, cfg.F = 40, cfg.has_head = !of->is_tied;
        cfg.window = of->window, cfg.windows[0] = (uint8_t)of->windows, cfg.softcap = of->softcap;
    }
    if (of->F) {
        cfg.E = 4, cfg.E_used = 2, cfg.F = of->F, cfg.Fs = of->Fs;
        cfg.router_factor = 1.5f, cfg.rope_dims = of->rope_dims;
    }
    int inputs[SEQUENCES * LENGTH], wanted[SEQUENCES * LENGTH];
    for (int n = 0; n < SEQUENCES * LENGTH; n++) {
        inputs[n] = (7 * n + 3) % WORDS, wanted[n] = (5 * n + 1) % WORDS;
    }
    RefModel model;
    ref_model_open(&model, cfg, SEQUENCES, LENGTH);
    model.eps = 1e-5; // in fp32 it is another number
    set_parameters(&model);
    EXPECT_NEAR(ref_model_forward(&model, inputs, wanted, NULL), of->loss, 1e-11, "loss of %s", of->name);
    ref_model_backward(&model, inputs, wanted, NULL);
    // ten digits behind the point
    EXPECT_NEAR(gradient_norm_of(&model, NULL), of->all, 1e-10, "gradients of %s", of->name);
    EXPECT_NEAR(gradient_norm_of(&model, "qkvw"), of->qkvw, 1e-10, "dqkvw of %s", of->name);
    EXPECT_NEAR(gradient_norm_of(&model, of->F ? "efcw" : "fcw"), of->fcw, 1e-10, "dfcw of %s", of->name);
    ref_model_close(&model);
}

TEST(numbers) {
    // clang-format off
    static const Numbers all[] = {
        {"gpt2",          ARCH_GPT2,     1, 0, 0, 0,  4.290830375500, 1.6933245341, 0.5965374894, 0.5581727707},
        {"llama",         ARCH_LLAMA,    0, 0, 0, 0,  4.363795163635, 2.2202719515, 1.1102960374, 0.5131512371},
        {"llama, tied",   ARCH_LLAMA,    1, 0, 0, 0,  4.809518486133, 2.4266498360, 0.9606594184, 0.5993502472},
        {"mistral",       ARCH_MISTRAL,  0, 5, 3, 0,  4.346565661162, 2.2485112093, 1.1397423848, 0.5152394519},
        {"qwen2",         ARCH_QWEN2,    0, 0, 0, 0,  4.363879275304, 2.3873923255, 1.2289670304, 0.4983649979},
        {"qwen3",         ARCH_QWEN3,    0, 0, 0, 0,  4.420367283364, 2.1661770373, 0.8671731297, 0.5478425286},
        {"qwen3, window", ARCH_QWEN3,    0, 4, 1, 0,  4.513625054053, 2.1476788194, 0.9695827869, 0.5627402368},
        {"arcee",         ARCH_ARCEE,    0, 0, 0, 0,  4.426125700856, 2.4653273005, 1.2526759040, 0.6072004806},
        {"nanochat",      ARCH_NANOCHAT, 0, 0, 0, 15, 4.641563986912, 1.8199061655, 0.3232428814, 0.5654724936},
        {"mixtral",       ARCH_MIXTRAL,  0, 0, 0, 0,  4.415350906166, 2.2755851388, 1.2493561877, 0.3861565958, 40, 0, 0},
        {"qwen3moe",      ARCH_QWEN3MOE, 0, 0, 0, 0,  4.548083070254, 2.2122834067, 1.1144756104, 0.2836267519, 16, 0, 0},
        {"olmoe",         ARCH_OLMOE,    0, 0, 0, 0,  4.574493892994, 2.2771765135, 1.1475974172, 0.2389532654, 16, 0, 0},
        {"glm4moe",       ARCH_GLM4MOE,  0, 0, 0, 0,  4.449169933989, 2.3379041824, 1.1996038099, 0.3432610416, 16, 16, 4}};
    // clang-format on
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        test_numbers(&all[i]);
    }
}

// Llama 3 with a context of 256: these frequencies turn 40, 4.1, 0.4 and 0.04 times. Between 1 and
// 4 they are mixed.
TEST(frequencies) {
    double plain[4], linear[4], llama[4], partial[4];
    ref_rope_frequencies(plain, 9, (RopeSettings){0, 8, 8, 10000});
    ref_rope_frequencies(linear, 9, (RopeSettings){0, 8, 8, 10000, {ROPE_LINEAR, 4}});
    ref_rope_frequencies(llama, 9, (RopeSettings){0, 8, 8, 10000, {ROPE_LLAMA3, 8, 1, 4, 256}});
    ref_rope_frequencies(partial, 9, (RopeSettings){0, 8, 4, 10000});
    for (int i = 0; i < 4; i++) {
        EXPECT_NEAR(plain[i], pow(0.1, i), 6e-8 * plain[i], "plain %d", i);
        EXPECT_NEAR(linear[i], pow(0.1, i) / 4, 6e-8 * linear[i], "linear %d", i);
        EXPECT_NEAR(llama[i], i < 2 ? plain[i] : plain[i] / 8, 6e-8 * llama[i], "Llama 3 %d", i);
    }
    ref_rope_frequencies(llama, 9, (RopeSettings){0, 2, 2, 1, {ROPE_LLAMA3, 8, 1, 4, 16}});
    const double rise = (16 / (2 * M_PI) - 1) / 3;
    EXPECT_NEAR(llama[0], rise + (1 - rise) / 8, 1e-7, "mixed");
    EXPECT(partial[0] == 1 && partial[2] == 0 && partial[3] == 0, "half of a head turns");
    EXPECT_NEAR(partial[1], 0.01, 1e-9, "the second pair of half a head");
}

// -------------------------------------------------------------------------------------------------
// Closed forms

TEST(gelu_is_the_tanh_form) {
    for (double x = -7; x < 7; x += 0.37) {
        double out;
        ref_activation_forward(&out, &x, 1, 1, ACTIVATION_GELU);
        EXPECT_NEAR(out, x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))), 1e-14, "at %g", x);
    }
}

// With a gradient that stays the same, m_hat is g and v_hat is g^2 after any number of updates.
TEST(adamw) {
    AdamW opt = {0.01f, 0.9f, 0.95f, 0.125f, 0.1f, 0.5f, 1, DECAY_ALL};
    double param = 3, want = 3, m = 0, v = 0;
    const double grad = -4, g = opt.grad_scale * grad;
    for (; opt.t <= 5; opt.t++) {
        ref_adamw(&param, &grad, &m, &v, 1, opt);
        want -= opt.lr * (g / (fabs(g) + opt.eps) + opt.weight_decay * want);
        EXPECT_NEAR(param, want, 1e-14, "update %d", (int)opt.t);
    }
}

TEST(clipping) {
    const double grad[2] = {3, -4};
    EXPECT(ref_gradient_norm(grad, 2) == 5, "norm %g", ref_gradient_norm(grad, 2));
    EXPECT(ref_clip(5, 1) == 0.2 && ref_clip(0.5, 1) == 1 && ref_clip(0, 1) == 1, "clipping");
}
