// test_mlp.c -- the MLP of a block on the CPU against the reference: every kind, with biases and
// without, with matmuls in fp32 and in bf16, in sizes that mlp_bf16.h processes and in others.
#include "llmc/layers/mlp.h"
#include "dev/test/lib/mlp_case.h"

static uint32_t* packed(Linear* linear, Matrix right, int K, int N) {
    uint32_t* to = (uint32_t*)(void*)ops_floats(matmul_bf16_pairs(N, K));
    matmul_bf16_pack(linear->bf16.kernel.pack, to, right, K, N);
    return to;
}

static Weight packed_weight_of(Linear* linear, const float* data, const float* bias, int OC, int C) {
    Weight w = {data, bias, NULL, NULL, OC, C};
    if (linear->is_bf16) {
        w.forward = packed(linear, matmul_bf16_forward_weight(data, C), C, OC);
        w.backward = packed(linear, matmul_bf16_backward_weight(data, C), OC, C);
    }
    return w;
}

// `part`: a rounding, in units of FLT_EPSILON; each matmul rounds two factors.
static void check(const char* what, const MlpCase* p, const float* got, const double* want,
                  const double* size, size_t n, double part, int matmuls) {
    EXPECT_NEAR(ops_error(got, want, size, n), 0, 2 * part * matmuls,
                "%s of %s, %d x %d x %d, bias %d, part %g", what, activation_word(p->kind), p->N, p->C, p->F,
                p->fcb != NULL, part);
}

static void test_size(ActivationKind kind, int is_bf16, int has_bias, int N, int C, int F) {
    const MlpCase p = mlp_case_open(kind, N, C, F, has_bias);
    const size_t nc = (size_t)N * C, nh = (size_t)N * p.H, hc = (size_t)p.H * C, cf = (size_t)C * F;
    // sums in fp32 have up to a hundred terms one after the other, whose roundings add up like the
    // square root
    const double part = is_bf16 ? 1 << 14 : 10;
    Memory memory = memory_on_host();
    Linear linear;
    linear_open(&linear, &memory, 0, (size_t)N, (size_t)int_max(C, F));
    if (is_bf16) {
        linear.is_bf16 = 1;
        matmul_bf16_open(&linear.bf16, &memory, bf16_kernel());
    }
    // at multiples of 64 bytes: packed data, and tiles
    float *fch = memory_take(&memory, "fch", MEMORY_DEVICE, nh * sizeof(float)),
          *dfch = memory_take(&memory, "dfch", MEMORY_DEVICE, nh * sizeof(float)),
          *act = memory_take(&memory, "act", MEMORY_DEVICE, (size_t)N * F * sizeof(float));
    const Mlp mlp = {.kind = kind,
                     .N = N,
                     .fc = packed_weight_of(&linear, p.fcw, p.fcb, p.H, C),
                     .proj = packed_weight_of(&linear, p.fcprojw, p.fcprojb, C, F),
                     .fch = fch,
                     .act = act,
                     .linear = &linear};
    float *out = ops_floats(nc), *dinp = ops_floats(nc), *dfcw = ops_floats(hc), *dfcprojw = ops_floats(cf),
          *dfcb = has_bias ? ops_floats(p.H) : NULL, *dfcprojb = has_bias ? ops_floats(C) : NULL;
    const MlpLayerGradients d = {
        .mlp = {dinp, dfcw, dfcb, dfcprojw, dfcprojb, GRADIENT_SET, dfch, ops_floats(nh / 32 + 1), NULL}};
    mlp_case_expect(&p);
    mlp_hidden_cpu(&mlp, p.inp);
    mlp_forward_cpu(out, &mlp);
    check("out", &p, out, p.out, p.out_size, nc, part, 2);
    mlp_activation_cpu(&mlp); // from fch
    mlp_backward_cpu(&mlp, &d, p.dout, p.inp);
    check("dinp", &p, dinp, p.dinp, p.dinp_size, nc, part, 3);
    check("dfcw", &p, dfcw, p.dfcw, p.dfcw_size, hc, part, 3);
    check("dfcprojw", &p, dfcprojw, p.dfcprojw, p.dfcprojw_size, cf, part, 2);
    if (has_bias) {
        check("dfcb", &p, dfcb, p.dfcb, p.dfcb_size, (size_t)p.H, part, 2);
        check("dfcprojb", &p, dfcprojb, p.dfcprojb, p.dfcprojb_size, (size_t)C, part, 1);
    }
    memory_close(&memory);
    ops_close("mlp");
}

TEST(mlp) {
    vec_flush_denormals(); // as the trainer does
    for (ActivationKind kind = 0; kind < ACTIVATION_COUNT; kind++) {
        for (int i = 0; i < 4; i++) {
            const int is_bf16 = i % 2, has_bias = i / 2;
            test_size(kind, is_bf16, has_bias, 1, 1, 1);
            test_size(kind, is_bf16, has_bias, 31, 33, 70);
            test_size(kind, is_bf16, has_bias, 64, 40, 33); // tokens in tiles, hidden units not
            test_size(kind, is_bf16, has_bias, 33, 40, 64); // the other way round
            test_size(kind, is_bf16, has_bias, 64, 33, 96); // both
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Experts

enum { B = 2, T = 37, N = B * T, C = 64, F = 96, E = 5, USED = 2, FS = 64 };

static const RouterLosses LOSSES = {0.25f, 0.125f, 1.0f / N};

// Inputs and parameters, in the order of MODEL_PARAMETERS; NULL without biases, or a shared expert.
typedef struct {
    RouterKind kind;
    ActivationKind activation;
    float *inp, *dout, *routerw, *routerwb, *fcw, *fcb, *fcprojw, *fcprojb, *sfcw, *sfcprojw;
} ExpertsCase;

typedef enum { PLAIN, WITH_SHARED, WITH_BIASES, EXPERTS_PARTS } ExpertsParts;

// Gradients and outputs, as floats or doubles.
enum { OUT, DINP, DROUTERW, DFCW, DFCPROJW, DSFCW, DSFCPROJW, DROUTERWB, DFCB, DFCPROJB, RESULTS };
static const char* const result_names[] = {"out",   "dinp",      "drouterw",  "dfcw", "dfcprojw",
                                           "dsfcw", "dsfcprojw", "drouterwb", "dfcb", "dfcprojb"};
static const size_t result_sizes[] = {N * C,     N* C,  E* C, E * 2 * F* C, E* C* F,
                                      2 * FS* C, C* FS, E,    E * 2 * F,    E* C};

// The first channel is 1: so nobody takes expert 3, and many take expert 1.
static ExpertsCase experts_case(RouterKind kind, ExpertsParts parts) {
    ExpertsCase p = {.kind = kind,
                     .activation = parts == WITH_BIASES ? ACTIVATION_CLAMPED : ACTIVATION_SWIGLU,
                     .inp = ops_normal(N * C, 1),
                     .dout = ops_normal(N * C, 1),
                     .routerw = ops_normal(E * C, 0.1f),
                     .fcw = ops_normal(E * 2 * F * C, 0.1f),
                     .fcprojw = ops_normal(E * C * F, 0.1f)};
    for (int n = 0; n < N; n++) {
        p.inp[n * C] = 1;
    }
    p.routerw[3 * C] = -50, p.routerw[1 * C] = 2;
    if (parts == WITH_SHARED) {
        p.sfcw = ops_normal(2 * FS * C, 0.1f), p.sfcprojw = ops_normal(C * FS, 0.1f);
    } else if (parts == WITH_BIASES) {
        p.routerwb = ops_normal(E, 0.5f), p.fcb = ops_normal(E * 2 * F, 3), p.fcprojb = ops_normal(E * C, 1);
    }
    return p;
}

static double* widened(const float* x, size_t n) { return x ? ops_widen(x, n) : NULL; }

static void experts_expect(double* want[RESULTS], const ExpertsCase* p) {
    const RefRouter router = {p->kind, B, T, E, USED, 1.5, LOSSES.balance, LOSSES.z_loss, NULL};
    const double *inp = ops_widen(p->inp, N * C), *dout = ops_widen(p->dout, N * C),
                 *routerw = ops_widen(p->routerw, E * C), *fcw = ops_widen(p->fcw, E * 2 * F * C),
                 *fcprojw = ops_widen(p->fcprojw, E * C * F);
    double *logits = ops_doubles(N * E), *weights = ops_doubles(N * E), *dlogits = ops_doubles(N * E),
           *dweights = ops_doubles(N * E), *fch = ops_doubles(N * E * 2 * F), *act = ops_doubles(N * E * F),
           *dfch = ops_doubles(N * E * 2 * F), *dact = ops_doubles(N * E * F);
    for (int i = 0; i < RESULTS; i++) {
        want[i] = ops_doubles(result_sizes[i]);
    }
    const RefExperts experts = {act, weights, fcprojw, widened(p->fcprojb, E * C), N, E, F, C};
    ref_linear_forward(logits, inp, routerw, widened(p->routerwb, E), (RefLinear){N, C, E});
    ref_router_forward(weights, logits, &router);
    ref_linear_forward(fch, inp, fcw, widened(p->fcb, E * 2 * F), (RefLinear){N, C, E * 2 * F});
    ref_activation_forward(act, fch, N * E, F, p->activation);
    ref_experts_forward(want[OUT], experts);
    ref_experts_backward(dact, dweights, want[DFCPROJW], want[DFCPROJB], dout, experts);
    ref_activation_backward(dfch, dact, fch, N * E, F, p->activation);
    ref_linear_backward(want[DINP], want[DFCW], want[DFCB], dfch, inp, fcw, (RefLinear){N, C, E * 2 * F});
    ref_router_backward(dlogits, dweights, logits, weights, LOSSES.dloss, &router);
    ref_linear_backward(want[DINP], want[DROUTERW], want[DROUTERWB], dlogits, inp, routerw,
                        (RefLinear){N, C, E});
    if (p->sfcw) {
        const double *sfcw = ops_widen(p->sfcw, 2 * FS * C), *sfcprojw = ops_widen(p->sfcprojw, C * FS);
        double *out = ops_doubles(N * C), *sfch = ops_doubles(N * 2 * FS), *sact = ops_doubles(N * FS),
               *dsfch = ops_doubles(N * 2 * FS), *dsact = ops_doubles(N * FS);
        ref_linear_forward(sfch, inp, sfcw, NULL, (RefLinear){N, C, 2 * FS});
        ref_activation_forward(sact, sfch, N, FS, ACTIVATION_SWIGLU);
        ref_linear_forward(out, sact, sfcprojw, NULL, (RefLinear){N, FS, C});
        ref_linear_backward(dsact, want[DSFCPROJW], NULL, dout, sact, sfcprojw, (RefLinear){N, FS, C});
        ref_activation_backward(dsfch, dsact, sfch, N, FS, ACTIVATION_SWIGLU);
        ref_linear_backward(want[DINP], want[DSFCW], NULL, dsfch, inp, sfcw, (RefLinear){N, C, 2 * FS});
        ref_residual_forward(want[OUT], want[OUT], out, 1, N * C);
    }
}

// Packs the matrices of all experts.
static Weight experts_weight(Linear* linear, const float* data, const float* bias, int OC, int cols) {
    Weight w = {data, bias, NULL, NULL, OC, cols};
    if (linear->is_bf16) {
        const size_t forward = matmul_bf16_pairs(OC, cols), backward = matmul_bf16_pairs(cols, OC);
        uint32_t *to = (uint32_t*)(void*)ops_floats(E * forward),
                 *back = (uint32_t*)(void*)ops_floats(E * backward);
        for (int e = 0; e < E; e++) {
            const float* of = data + (size_t)e * (size_t)OC * (size_t)cols;
            matmul_bf16_pack(linear->bf16.kernel.pack, to + e * forward, matmul_bf16_forward_weight(of, cols),
                             cols, OC);
            matmul_bf16_pack(linear->bf16.kernel.pack, back + e * backward,
                             matmul_bf16_backward_weight(of, cols), OC, cols);
        }
        w.forward = to, w.backward = back;
    }
    return w;
}

static float* aligned(Memory* memory, size_t n) {
    return (float*)memory_take(memory, "activations", MEMORY_DEVICE, n * sizeof(float));
}

static Mlp experts_open(const ExpertsCase* p, Memory* memory, Linear* linear) {
    const size_t M = router_rows(N, E, USED);
    Mlp mlp = {.kind = p->activation,
               .N = N,
               .fc = experts_weight(linear, p->fcw, p->fcb, 2 * F, C),
               .proj = experts_weight(linear, p->fcprojw, p->fcprojb, C, F),
               .fch = aligned(memory, M * 2 * F),
               .act = aligned(memory, M * F),
               .linear = linear};
    mlp.experts = (Experts){.router = {.kind = p->kind, .B = B, .T = T, .E = E, .used = USED, .factor = 1.5f},
                            .routerw = p->routerw,
                            .logits_bias = p->routerwb,
                            .in = aligned(memory, M * C),
                            .out = aligned(memory, M * C)};
    Router* r = &mlp.experts.router;
    r->logits = aligned(memory, N * E), r->scale = aligned(memory, M);
    r->chosen = (int*)(void*)aligned(memory, N * USED), r->rows = (int*)(void*)aligned(memory, N * USED);
    r->order = (int*)(void*)aligned(memory, M), r->first = (int*)(void*)aligned(memory, E + 1);
    if (p->sfcw) {
        mlp.experts.fc = packed_weight_of(linear, p->sfcw, NULL, 2 * FS, C);
        mlp.experts.proj = packed_weight_of(linear, p->sfcprojw, NULL, C, FS);
        mlp.experts.fch = aligned(memory, N * 2 * FS), mlp.experts.act = aligned(memory, N * FS);
    }
    return mlp;
}

// Runs both passes; gradients are set, then added to: twice as large.
static void experts_run(float* got[RESULTS], const ExpertsCase* p, int is_bf16) {
    const size_t M = router_rows(N, E, USED);
    Memory memory = memory_on_host();
    Linear linear;
    linear_open(&linear, &memory, 0, N, F);
    if (is_bf16) {
        linear.is_bf16 = 1;
        matmul_bf16_open(&linear.bf16, &memory, bf16_kernel());
    }
    const Mlp mlp = experts_open(p, &memory, &linear);
    for (int i = 0; i < RESULTS; i++) {
        got[i] = ops_floats(result_sizes[i]);
    }
    MlpLayerGradients d = {.mlp = {.dinp = got[DINP],
                                   .dfcw = got[DFCW],
                                   .dfcb = p->fcb ? got[DFCB] : NULL,
                                   .dfcprojw = got[DFCPROJW],
                                   .dfcprojb = p->fcprojb ? got[DFCPROJB] : NULL,
                                   .mode = GRADIENT_SET,
                                   .dfch = aligned(&memory, M * 2 * F)},
                           .drouterw = got[DROUTERW],
                           .dlogits_bias = p->routerwb ? got[DROUTERWB] : NULL,
                           .dshared_fcw = got[DSFCW],
                           .dshared_projw = got[DSFCPROJW],
                           .dlogits = aligned(&memory, N * E),
                           .dscale = aligned(&memory, M * (1 + F / 32)),
                           .losses = LOSSES};
    mlp_hidden_cpu(&mlp, p->inp);
    mlp_forward_cpu(got[OUT], &mlp);
    for (d.mlp.mode = GRADIENT_SET; d.mlp.mode <= GRADIENT_ADD; d.mlp.mode++) {
        mlp_activation_cpu(&mlp); // from fch
        mlp_backward_cpu(&mlp, &d, p->dout, p->inp);
    }
    EXPECT(router_count(&mlp.experts.router, 3) == 0 && router_count(&mlp.experts.router, 1) > N / 2,
           "loads of the experts");
    memory_close(&memory);
}

// Experts take their tokens by logits in fp32, so all take those of the reference. Their matmuls in
// bf16 round factors by 2^-9, which a few of them add up.
static void test_experts(RouterKind kind, ExpertsParts parts, int is_bf16) {
    const ExpertsCase p = experts_case(kind, parts);
    double* want[RESULTS];
    float* got[RESULTS];
    experts_expect(want, &p);
    experts_run(got, &p, is_bf16);
    for (int i = 0; i < RESULTS; i++) {
        if (i >= DSFCW && (i >= DROUTERWB ? WITH_BIASES : WITH_SHARED) != parts) {
            continue;
        }
        double error = 0, size = 0;
        const double times = i >= DROUTERW ? 2 : 1; // set, and added to
        for (size_t k = 0; k < result_sizes[i]; k++) {
            const double difference = got[i][k] - times * want[i][k];
            error += difference * difference, size += want[i][k] * want[i][k];
        }
        EXPECT_NEAR(sqrt(error / size), 0, is_bf16 ? 4 * 0x1p-7 : 64 * FLT_EPSILON,
                    "%s of kind %d, parts %d, bf16 %d", result_names[i], kind, parts, is_bf16);
    }
    ops_close("experts");
}

TEST(mlp_experts) {
    vec_flush_denormals();
    for (RouterKind kind = ROUTER_CHOSEN; kind <= ROUTER_SIGMOID; kind++) {
        for (int i = 0; i < 2 * EXPERTS_PARTS; i++) {
            test_experts(kind, i / 2, i % 2);
        }
    }
}
