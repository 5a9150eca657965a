// test_mlp.c -- the MLP of a block on the CPU against the reference: every kind, with biases and
// without, with matmuls in fp32 and in bf16, in sizes that mlp_bf16.h processes and in others.
#include "llmc/layers/mlp.h"
#include "dev/test/lib/mlp_case.h"

static uint32_t* packed(Linear* linear, Matrix right, int K, int N) {
    uint32_t* to = (uint32_t*)(void*)ops_floats(matmul_bf16_pairs(N, K));
    matmul_bf16_pack(linear->bf16.kernel.pack, to, right, K, N);
    return to;
}

static Weight weight_of(Linear* linear, const float* data, const float* bias, int OC, int C) {
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
                "%s of %s, %d x %d x %d, bias %d, part %g", what, mlp_kinds[p->kind], p->N, p->C, p->F,
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
    const Mlp mlp = {kind,
                     N,
                     weight_of(&linear, p.fcw, p.fcb, p.H, C),
                     weight_of(&linear, p.fcprojw, p.fcprojb, C, F),
                     fch,
                     act,
                     &linear};
    float *out = ops_floats(nc), *dinp = ops_floats(nc), *dfcw = ops_floats(hc), *dfcprojw = ops_floats(cf),
          *dfcb = has_bias ? ops_floats(p.H) : NULL, *dfcprojb = has_bias ? ops_floats(C) : NULL;
    const MlpGradients d = {dinp,     dfcw,         dfcb, dfcprojw,
                            dfcprojb, GRADIENT_SET, dfch, ops_floats(nh / 32 + 1)};
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
    for (ActivationKind kind = ACTIVATION_GELU; kind <= ACTIVATION_RELU2; kind++) {
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
