// test_activation.c -- GELU and its derivative against the reference, from the origin to the tails.
#include "llmc/ops/activation.h"
#include "llmc/base/threads.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

static double inner(double x) { return sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
static double inner_derivative(double x) { return sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x); }
static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

// The argument 2u of the sigmoid has a relative error of 2 epsilon or so, of which the share 1 - s
// reaches s: for u far below 0, where s is e^2u, all of it. In the derivative, 1 - s is known to
// epsilon/2 only, which 2x du/dx multiplies. Below FLT_MIN precision ends.
static double forward_magnitude(double x) {
    const double u = inner(x), s = sigmoid(2 * u);
    return fabs(x) * (s * (1 + fabs(2 * u) * (1 - s)) + FLT_MIN / FLT_EPSILON);
}

static double derivative_magnitude(double x) {
    const double u = inner(x), s = sigmoid(2 * u), slope = fabs(2 * x * inner_derivative(x));
    return (1 + slope) * (s * (1 + fabs(2 * u) * (1 - s)) + FLT_MIN / FLT_EPSILON);
}

static const double limit = 4;

static void check(const float* inp, size_t n) {
    float *dout = ops_normal(n, 1), *out = ops_floats(n), *dinp = ops_floats(n);
    double *want = ops_doubles(n), *want_dinp = ops_doubles(n), *magnitude = ops_doubles(n);
    const double* wide = ops_widen(inp, n);
    ref_gelu_forward(want, wide, n);
    ref_gelu_backward(want_dinp, ops_widen(dout, n), wide, n);
    for (size_t i = 0; i < n; i++) {
        magnitude[i] = forward_magnitude(inp[i]);
    }
    gelu_forward_cpu(out, inp, n);
    EXPECT_NEAR(ops_error(out, want, magnitude, n), 0, limit, "out, %zu elements", n);
    for (size_t i = 0; i < n; i++) {
        magnitude[i] = fabs(dout[i]) * derivative_magnitude(inp[i]);
    }
    gelu_backward_cpu(dinp, dout, inp, n);
    EXPECT_NEAR(ops_error(dinp, want_dinp, magnitude, n), 0, limit, "dinp, %zu elements", n);
    gelu_backward_cpu(dout, dout, inp, n); // in place
    EXPECT(ops_same_bits(dout, dinp, n), "dinp is dout, %zu elements", n);
}

TEST(sizes) {
    for (size_t n = 1; n <= 2 * LANES + 1; n++) {
        check(ops_normal(n, 2), n);
        ops_close("small sizes");
    }
    const size_t sizes[] = {31, 33, 768, 3 * 769};
    for (int i = 0; i < 4; i++) {
        check(ops_normal(sizes[i], 2), sizes[i]);
        ops_close("sizes");
    }
}

TEST(range) {
    enum { POINTS = 24001 };
    float* inp = ops_floats(POINTS);
    for (int i = 0; i < POINTS; i++) {
        inp[i] = (float)(i - POINTS / 2) * 1e-3f; // -12 ... 12, where it is not yet 0 or x
    }
    check(inp, POINTS);
    const float far[] = {0, -0.0f, 1e-38f, -1e-38f, 1e-6f, 20, -20, 100, -100, 1e4f, -1e4f};
    check(far, 11);
    ops_close("range");
}

TEST(nan) {
    for (size_t at = 0; at <= LANES; at++) { // the last one is alone in the rest
        float *inp = ops_normal(LANES + 1, 1), *dout = ops_normal(LANES + 1, 1);
        float *out = ops_floats(LANES + 1), *dinp = ops_floats(LANES + 1);
        inp[at] = NAN;
        gelu_forward_cpu(out, inp, LANES + 1);
        gelu_backward_cpu(dinp, dout, inp, LANES + 1);
        for (size_t i = 0; i <= LANES; i++) {
            EXPECT(isnan(out[i]) == (i == at) && isnan(dinp[i]) == (i == at), "NaN at %zu, element %zu", at,
                   i);
        }
        ops_close("NaN");
    }
}

TEST(threads) {
    enum { N = 50003 };
    float *inp = ops_normal(N, 2), *dout = ops_normal(N, 1), *out[4], *dinp[4];
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        out[t] = ops_floats(N), dinp[t] = ops_floats(N);
        gelu_forward_cpu(out[t], inp, N);
        gelu_backward_cpu(dinp[t], dout, inp, N);
        EXPECT(ops_same_bits(out[t], out[1], N), "out with %d threads", t);
        EXPECT(ops_same_bits(dinp[t], dinp[1], N), "dinp with %d threads", t);
    }
    ops_close("threads");
}
