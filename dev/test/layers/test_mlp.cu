// test_mlp.cu -- the MLP of a block on the GPU against the reference, in fp32: every kind, with
// biases and without. The kernels are tested in every type by their own tests.
#define PRECISION_FP32
#include "llmc/layers/mlp.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/mlp_case.h"

// Sums in fp32 have up to a hundred terms one after the other, whose roundings add up like the
// square root; the activations' fast exponentials are wrong by 2^-19, 16 epsilons.
static void check(const char* what, const MlpCase* p, const float* got, const double* want,
                  const double* size, size_t n) {
    EXPECT_NEAR(ops_error(got, want, size, n), 0, 6 * 10 + 3 * 16, "%s of %s, %d x %d x %d, bias %d", what,
                activation_word(p->kind), p->N, p->C, p->F, p->fcb != NULL);
}

static void test_size(ActivationKind kind, int has_bias, int N, int C, int F, MatmulGpu* matmul) {
    const Gpu* gpu = matmul->gpu;
    const MlpCase p = mlp_case_open(kind, N, C, F, has_bias);
    const size_t nc = (size_t)N * C, nh = (size_t)N * p.H, hc = (size_t)p.H * C, cf = (size_t)C * F;
    float* const on_host[] = {p.inp,          p.dout,         p.fcw,          p.fcprojw,
                              ops_floats(nh), ops_floats(nh), ops_floats(nh), ops_floats(nc),
                              ops_floats(nc), ops_floats(hc), ops_floats(cf), ops_normal(nc, 1)};
    const size_t sizes[] = {nc, nc, hc, cf, nh, nh, nh, nc, nc, hc, cf, nc};
    enum { INP, DOUT, FCW, FCPROJW, FCH, ACT, DFCH, OUT, DINP, DFCW, DFCPROJW, RESIDUAL, ARRAYS };
    float* x[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) {
        x[i] = upload<float>(on_host[i], sizes[i], 0, gpu);
    }
    float *fcb = has_bias ? upload<float>(p.fcb, p.H, 0, gpu) : NULL,
          *fcprojb = has_bias ? upload<float>(p.fcprojb, C, 0, gpu) : NULL,
          *dfcb = has_bias ? upload<float>(ops_floats(p.H), p.H, 0, gpu) : NULL;
    LinearGpu linear = {};
    linear.matmul = matmul;
    linear.gpu = gpu;
    const MlpGpu mlp = {
        kind,   N,      {x[FCW], fcb, NULL, NULL, p.H, C}, {x[FCPROJW], fcprojb, NULL, NULL, C, F}, x[FCH],
        x[ACT], &linear};
    const MlpGradientsGpu d = {
        x[DINP], {x[DFCW], DTYPE_FP32}, {dfcb, DTYPE_FP32}, {x[DFCPROJW], DTYPE_FP32}, GRADIENT_SET, x[DFCH]};
    mlp_case_expect(&p);
    mlp_hidden(&mlp, x[INP]);
    mlp_forward_residual(x[OUT], x[RESIDUAL], &mlp);
    float* out = download(x[OUT], nc, gpu);
    double* want = ops_doubles(nc);
    for (size_t i = 0; i < nc; i++) {
        want[i] = p.out[i] + on_host[RESIDUAL][i];
        p.out_size[i] += fabs(on_host[RESIDUAL][i]);
    }
    check("out", &p, out, want, p.out_size, nc);
    mlp_activation(&mlp); // from fch
    mlp_backward(&mlp, &d, x[DOUT], x[INP]);
    check("dinp", &p, download(x[DINP], nc, gpu), p.dinp, p.dinp_size, nc);
    check("dfcw", &p, download(x[DFCW], hc, gpu), p.dfcw, p.dfcw_size, hc);
    check("dfcprojw", &p, download(x[DFCPROJW], cf, gpu), p.dfcprojw, p.dfcprojw_size, cf);
    if (has_bias) {
        check("dfcb", &p, download(dfcb, p.H, gpu), p.dfcb, p.dfcb_size, p.H);
        gpu_free(dfcb);
        gpu_free(fcprojb);
        gpu_free(fcb);
    }
    for (int i = 0; i < ARRAYS; i++) {
        gpu_free(x[i]);
    }
    ops_close("mlp");
}

TEST(mlp) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    MatmulGpu matmul;
    Memory memory = memory_on_gpu();
    const MatmulSettings settings = {0, GELU_FUSED, 1, 0, 0};
    matmul_gpu_open(&matmul, &memory, &gpu, settings);
    for (int i = 0; i < ACTIVATION_COUNT; i++) {
        const ActivationKind kind = (ActivationKind)i;
        for (int has_bias = 0; has_bias < 2; has_bias++) {
            test_size(kind, has_bias, 1, 1, 1, &matmul);
            test_size(kind, has_bias, 31, 33, 70, &matmul);
            test_size(kind, has_bias, 33, 64, 96, &matmul);
        }
    }
    matmul_gpu_close(&matmul);
    memory_close(&memory);
    gpu_close(&gpu);
}
