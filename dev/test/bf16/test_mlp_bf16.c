// test_mlp_bf16.c -- the MLP with bf16 matmuls: every kind and kernel against the reference, with
// biases and without, gradients set and added; the same bits for any number of threads.
#include "llmc/bf16/mlp_bf16.h"
#include "llmc/base/threads.h"
#include "dev/test/lib/bf16_kernels.h"
#include "dev/test/lib/mlp_case.h"

typedef struct {
    float *out, *dinp, *dfcw, *dfcb, *dfcprojw, *dfcprojb;
} Results;

static uint32_t* packed(const Bf16Kernel* kernel, Matrix right, int K, int N) {
    uint32_t* to = (uint32_t*)(void*)ops_floats(matmul_bf16_pairs(N, K));
    matmul_bf16_pack(kernel->pack, to, right, K, N);
    return to;
}

// Returns the results of both passes. GRADIENT_ADD adds to gradients of parameters that are already
// 1.
static Results results_of(const Bf16Kernel* kernel, const MlpCase* p, GradientMode mode) {
    const size_t nc = (size_t)p->N * p->C, hc = (size_t)p->H * p->C, cf = (size_t)p->C * p->F,
                 nh = (size_t)p->N * p->H;
    const float held = mode == GRADIENT_ADD ? 1 : 0;
    Results r = {ops_floats(nc),   ops_floats(nc), ops_floats(hc),
                 ops_floats(p->H), ops_floats(cf), ops_floats(p->C)};
    float* const gradients[] = {r.dfcw, r.dfcb, r.dfcprojw, r.dfcprojb};
    const size_t sizes[] = {hc, (size_t)p->H, cf, (size_t)p->C};
    for (int g = 0; g < 4 && mode == GRADIENT_ADD; g++) {
        for (size_t i = 0; i < sizes[g]; i++) {
            gradients[g][i] = held;
        }
    }
    Memory ledger = memory_on_host();
    MatmulBf16Scratch scratch;
    matmul_bf16_open(&scratch, &ledger, *kernel);
    const MlpBf16 mlp = {
        .kind = p->kind,
        .N = p->N,
        .C = p->C,
        .F = p->F,
        .fch = (float*)memory_take(&ledger, "fch", MEMORY_DEVICE, nh * sizeof(float)),
        .act = (uint32_t*)memory_take(&ledger, "act", MEMORY_DEVICE, (size_t)p->N * p->F * sizeof(float)),
        .fcw = packed(kernel, matmul_bf16_forward_weight(p->fcw, p->C), p->C, p->H),
        .fcprojw = packed(kernel, matmul_bf16_forward_weight(p->fcprojw, p->F), p->F, p->C),
        .fcw_backward = packed(kernel, matmul_bf16_backward_weight(p->fcw, p->C), p->H, p->C),
        .fcprojw_backward = packed(kernel, matmul_bf16_backward_weight(p->fcprojw, p->F), p->C, p->F),
        .fcb = p->fcb,
        .fcprojb = p->fcprojb};
    const MlpGradients d = {r.dinp,
                            r.dfcw,
                            p->fcb ? r.dfcb : NULL,
                            r.dfcprojw,
                            p->fcprojb ? r.dfcprojb : NULL,
                            mode,
                            (float*)memory_take(&ledger, "dfch", MEMORY_DEVICE, nh * sizeof(float)),
                            p->fcb ? ops_floats(nh / BF16_TILE) : NULL,
                            NULL};
    mlp_bf16_hidden_cpu(&mlp, p->inp, &scratch);
    mlp_bf16_forward_cpu(r.out, &mlp, &scratch);
    mlp_bf16_backward_cpu(&mlp, &d, p->dout, p->inp, &scratch);
    for (int g = 0; g < 4 && mode == GRADIENT_ADD; g++) {
        for (size_t i = 0; i < sizes[g]; i++) {
            gradients[g][i] -= held;
        }
    }
    memory_close(&ledger);
    return r;
}

// A rounding to bf16 is 2^-9, or 2^14 epsilons of fp32. Each matmul rounds two factors, and one
// epsilon of what was added to comes on top.
static void check(const char* what, const MlpCase* p, const float* got, const double* want,
                  const double* size, size_t n, int matmuls, const char* kernel, GradientMode mode) {
    double* sizes = ops_doubles(n);
    for (size_t i = 0; i < n; i++) {
        sizes[i] = size[i] + (mode == GRADIENT_ADD ? 0x1p-14 : 0);
    }
    EXPECT_NEAR(ops_error(got, want, sizes, n), 0, 2 * matmuls * (1 << 14),
                "%s of %s, %d x %d x %d, bias %d, %s", what, activation_word(p->kind), p->N, p->C, p->F,
                p->fcb != NULL, kernel);
}

static void test_size(const Bf16Kernel* kernel, ActivationKind kind, int N, int C, int F) {
    for (int i = 0; i < 4; i++) {
        const GradientMode mode = i / 2 ? GRADIENT_ADD : GRADIENT_SET;
        const MlpCase p = mlp_case_open(kind, N, C, F, i % 2);
        const size_t nc = (size_t)N * C, hc = (size_t)p.H * C, cf = (size_t)C * F;
        mlp_case_expect(&p);
        const Results r = results_of(kernel, &p, mode);
        check("out", &p, r.out, p.out, p.out_size, nc, 2, kernel->name, GRADIENT_SET);
        check("dinp", &p, r.dinp, p.dinp, p.dinp_size, nc, 3, kernel->name, GRADIENT_SET);
        check("dfcw", &p, r.dfcw, p.dfcw, p.dfcw_size, hc, 3, kernel->name, mode);
        check("dfcprojw", &p, r.dfcprojw, p.dfcprojw, p.dfcprojw_size, cf, 2, kernel->name, mode);
        if (p.fcb) {
            check("dfcb", &p, r.dfcb, p.dfcb, p.dfcb_size, (size_t)p.H, 2, kernel->name, mode);
            check("dfcprojb", &p, r.dfcprojb, p.dfcprojb, p.dfcprojb_size, (size_t)C, 1, kernel->name, mode);
        }
        ops_close("mlp");
    }
}

static void test_threads(const Bf16Kernel* kernel, ActivationKind kind, int N, int C, int F) {
    const MlpCase p = mlp_case_open(kind, N, C, F, 1);
    const int threads[] = {1, 2, 5}, before = threads_max();
    Results r[3];
    for (int t = 0; t < 3; t++) {
        threads_set(threads[t]);
        r[t] = results_of(kernel, &p, GRADIENT_SET);
        EXPECT(ops_same_bits(r[t].out, r[0].out, (size_t)N * C), "%s: out with %d threads",
               activation_word(kind), threads[t]);
        EXPECT(ops_same_bits(r[t].dinp, r[0].dinp, (size_t)N * C), "%s: dinp with %d threads",
               activation_word(kind), threads[t]);
        EXPECT(ops_same_bits(r[t].dfcw, r[0].dfcw, (size_t)p.H * C), "%s: dfcw with %d threads",
               activation_word(kind), threads[t]);
        EXPECT(ops_same_bits(r[t].dfcb, r[0].dfcb, (size_t)p.H), "%s: dfcb with %d threads",
               activation_word(kind), threads[t]);
    }
    threads_set(before);
    ops_close("threads");
}

TEST(mlp_bf16) {
    Bf16Kernel kernels[BF16_KERNELS];
    vec_flush_denormals(); // as the trainer does
    const int count = tested_kernels(kernels);
    for (ActivationKind kind = 0; kind < ACTIVATION_COUNT; kind++) {
        for (int k = 0; k < count; k++) {
            test_size(&kernels[k], kind, 32, 1, 32);
            test_size(&kernels[k], kind, 64, 33, 96);
        }
        test_size(&kernels[0], kind, 96, 24, 320);         // several parts of panels
        LARGE(test_size(&kernels[0], kind, 64, 1100, 64)); // several slabs of C
        test_threads(&kernels[0], kind, 160, 40, 352);
        LARGE(test_threads(&kernels[0], kind, 544, 1100, 160));
    }
}
