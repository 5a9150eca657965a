// test_gated_norm.c -- the gated norm: both passes against the reference, in place, gradients set
// and added, any number of threads.
#include "llmc/base/threads.h"
#include "llmc/ops/gated_norm.h"
#include "llmc/reference_recurrent.h"
#include "dev/test/lib/ops.h"

// Each result is a product of few factors, or a sum of as many as there are rows.
static void check(int N, int C) {
    const size_t n = (size_t)N * C;
    const double limit = 16 + 2 * sqrt(N);
    float *inp = ops_normal(n, 2), *gate = ops_normal(n, 2), *weight = ops_normal(C, 1),
          *dout = ops_normal(n, 1);
    float *out = ops_floats(n), *rstd = ops_floats(N), *dinp = ops_floats(n), *dgate = ops_floats(n),
          *dweight = ops_floats(C), *same = ops_copy(dout, n);
    const GatedNorm norm = {1e-6f, gate, weight, rstd, N, C};
    const RefNorm ref = {NORM_RMS, ops_widen(weight, C), NULL, NULL, ops_doubles(N), 1e-6f, 1, N, C};
    double *x = ops_widen(inp, n), *z = ops_widen(gate, n), *y = ops_doubles(n), *dx = ops_doubles(n),
           *dz = ops_doubles(n), *dw = ops_doubles(C);
    ref_gated_norm_forward(y, x, z, ref);
    ref_gated_norm_backward(dx, dz, dw, ops_doubles(n), ops_widen(dout, n), x, z, ref);
    gated_norm_forward_cpu(out, inp, &norm);
    gated_norm_backward_cpu(dinp, dgate, dweight, dout, inp, &norm, GRADIENT_SET);
    EXPECT_NEAR(ops_error(out, y, NULL, n), 0, 16, "out of %d x %d", N, C);
    EXPECT_NEAR(ops_error(dinp, dx, NULL, n), 0, 16, "dinp of %d x %d", N, C);
    EXPECT_NEAR(ops_error(dgate, dz, NULL, n), 0, 16, "dgate of %d x %d", N, C);
    EXPECT_NEAR(ops_error(dweight, dw, NULL, C), 0, limit, "dweight of %d x %d", N, C);
    float* twice = ops_copy(dweight, C);
    threads_set(1);
    gated_norm_backward_cpu(same, dgate, twice, same, inp, &norm, GRADIENT_ADD);
    threads_set(3);
    EXPECT(ops_same_bits(dinp, same, n), "in place, by one thread: %d x %d", N, C);
    gated_norm_backward_cpu(same, dgate, NULL, dout, inp, &norm, GRADIENT_SET); // frozen
    EXPECT(ops_same_bits(dinp, same, n), "without dweight: %d x %d", N, C);
    for (int c = 0; c < C; c++) {
        EXPECT_NEAR(twice[c], 2 * dweight[c], limit * FLT_EPSILON * (1 + fabsf(dweight[c])),
                    "added, column %d", c);
    }
    ops_close("gated norm");
}

TEST(gated_norm) {
    threads_set(3);
    check(1, 8), check(33, 24), check(200, 128), check(65, 256), check(3, 40);
}
