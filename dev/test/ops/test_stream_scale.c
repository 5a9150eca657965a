// test_stream_scale.c -- scales of the residual stream: both passes against reference.h, set and
// added to, at sizes that parts do not divide.
#include "llmc/ops/stream_scale.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

static void check(size_t n, GradientMode first, GradientMode mode) {
    float *x = ops_normal(n, 1), *x0 = ops_normal(n, 1), *scales = ops_normal(2, 1), *out = ops_floats(n),
          *dx = ops_normal(n, 1), *dx0 = first == GRADIENT_ADD ? ops_normal(n, 1) : ops_floats(n),
          *dscales = mode == GRADIENT_ADD ? ops_normal(2, 1) : ops_floats(2);
    double *want = ops_doubles(n), *want_dx = ops_doubles(n), *want_dx0 = ops_doubles(n),
           *want_scales = ops_doubles(2), *dout = ops_widen(dx, n), *wide_x = ops_widen(x, n),
           *wide_x0 = ops_widen(x0, n), *of = ops_widen(scales, 2);
    for (size_t i = 0; i < n; i++) {
        want_dx0[i] = first == GRADIENT_ADD ? (double)dx0[i] : 0;
    }
    for (int i = 0; i < 2; i++) {
        want_scales[i] = mode == GRADIENT_ADD ? (double)dscales[i] : 0;
    }
    const StreamScale s = {x, x0, scales, n};
    stream_scale_forward_cpu(out, &s);
    stream_scale_backward_cpu(dx, dx0, dscales, ops_doubles(2 * STREAM_PARTS), &s, first, mode);
    ref_scale_forward(want, wide_x, wide_x0, of, n);
    ref_scale_backward(want_dx, want_dx0, want_scales, dout, wide_x, wide_x0, of, n);
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(out[i], want[i], 1e-6, "out %zu of %zu", i, n);
        EXPECT_NEAR(dx[i], want_dx[i], 1e-6, "dx %zu of %zu", i, n);
        EXPECT_NEAR(dx0[i], want_dx0[i], 1e-6, "dx0 %zu of %zu", i, n);
    }
    EXPECT_NEAR(dscales[0], want_scales[0], 1e-6 * (double)n, "da of %zu", n);
    EXPECT_NEAR(dscales[1], want_scales[1], 1e-6 * (double)n, "db of %zu", n);
    ops_close("stream_scale");
}

TEST(stream_scale) {
    static const size_t sizes[] = {1, 31, 256, 1001, 5000};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        check(sizes[i], GRADIENT_SET, GRADIENT_ADD);
        check(sizes[i], GRADIENT_ADD, GRADIENT_SET);
    }
}
