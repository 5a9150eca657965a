// test_gate.c -- gates of attention's output: the forward pass against its formula, the backward
// pass against differences, in place.
#include <math.h>

#include "llmc/ops/gate.h"
#include "dev/test/lib/ops.h"

static double gated(double x, double gate) { return x / (1 + exp(-gate)); }

TEST(gate) {
    enum { N = 77 };
    const double step = 1e-5; // whose square is the error of a difference
    float *x = ops_normal(N, 2), *gate = ops_normal(N, 4), *dout = ops_normal(N, 1), *out = ops_copy(x, N),
          *dx = ops_copy(dout, N), *dgate = ops_floats(N);
    gate_backward_cpu(dx, dgate, dx, x, gate, N);
    gate_forward_cpu(out, out, gate, N);
    for (int i = 0; i < N; i++) {
        const double by_x = (gated(x[i] + step, gate[i]) - gated(x[i] - step, gate[i])) / (2 * step),
                     by_gate = (gated(x[i], gate[i] + step) - gated(x[i], gate[i] - step)) / (2 * step);
        EXPECT_NEAR(out[i], gated(x[i], gate[i]), 8 * FLT_EPSILON * fabsf(x[i]), "out %d", i);
        EXPECT_NEAR(dx[i], dout[i] * by_x, 8 * FLT_EPSILON * fabsf(dout[i]), "dx %d", i);
        EXPECT_NEAR(dgate[i], dout[i] * by_gate, 8 * FLT_EPSILON * fabsf(dout[i] * x[i]), "dgate %d", i);
    }
    ops_close("gate");
}
