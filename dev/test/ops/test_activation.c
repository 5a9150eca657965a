// test_activation.c -- every activation and its derivatives against the reference, from the origin
// to the tails.
#include "llmc/ops/activation.h"
#include "llmc/base/threads.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

static double inner(double x) { return sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
static double inner_derivative(double x) { return sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x); }
static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

// The argument z of the sigmoid has a relative error of 2 epsilon or so, of which the share 1 - s
// reaches s: for z far below 0, where s is e^z, all of it. Below FLT_MIN precision ends.
static double sigmoid_magnitude(double z) {
    const double s = sigmoid(z);
    return s * (1 + fabs(z) * (1 - s)) + FLT_MIN / FLT_EPSILON;
}

// Magnitudes of an activation and its derivatives. In a derivative, 1 - s is known to epsilon/2
// only, which its factor multiplies.
typedef struct {
    double act, dx, dgate;
} Magnitude;

static Magnitude magnitude(double x, double gate, ActivationKind kind) {
    const double s = sigmoid_magnitude(kind == ACTIVATION_GELU ? 2 * inner(x) : gate);
    switch (kind) {
    case ACTIVATION_GELU:
        return (Magnitude){fabs(x) * s, (1 + fabs(2 * x * inner_derivative(x))) * s, 0};
    case ACTIVATION_RELU2:
        return (Magnitude){x * x + FLT_MIN, fabs(x), 0};
    case ACTIVATION_GEGLU: {
        const Magnitude gelu = magnitude(gate, 0, ACTIVATION_GELU);
        return (Magnitude){fabs(x) * gelu.act, gelu.act, fabs(x) * gelu.dx};
    }
    case ACTIVATION_CLAMPED: {
        const double h = fmin(gate, 7), c = fmin(fabs(x), 7) + 1, of_h = sigmoid_magnitude(1.702 * h);
        return (Magnitude){fabs(h) * c * of_h, fabs(h) * of_h, c * (1 + 1.702 * fabs(h)) * of_h};
    }
    case ACTIVATION_SWIGLU:
        return (Magnitude){fabs(gate * x) * s, fabs(gate) * s, fabs(x) * (1 + fabs(gate)) * s};
    }
    return (Magnitude){0, 0, 0};
}

static const double limit = 4;

// Compares both passes on (N, F) results, whose inputs are given.
static void check(const float* pre, size_t N, size_t F, ActivationKind kind) {
    const size_t n = N * F, gates = (size_t)activation_gates(kind);
    float *dact = ops_normal(n, 1), *act = ops_floats(n), *dpre = ops_floats(gates * n);
    double *want = ops_doubles(n), *want_dpre = ops_doubles(gates * n);
    double *act_size = ops_doubles(n), *dpre_size = ops_doubles(gates * n);
    const double* wide = ops_widen(pre, gates * n);
    for (size_t i = 0; i < n; i++) {
        const size_t gate = i / F * gates * F + i % F, x = gate + (gates - 1) * F;
        const Magnitude m = magnitude(pre[x], pre[gate], kind);
        act_size[i] = m.act;
        dpre_size[gate] = fabs(dact[i]) * m.dgate;
        dpre_size[x] = fabs(dact[i]) * m.dx;
    }
    ref_activation_forward(want, wide, N, F, kind);
    ref_activation_backward(want_dpre, ops_widen(dact, n), wide, N, F, kind);
    activation_forward_cpu(act, pre, N, F, kind);
    EXPECT_NEAR(ops_error(act, want, act_size, n), 0, limit, "act of %s, %zu x %zu", activation_word(kind), N,
                F);
    activation_backward_cpu(dpre, dact, pre, N, F, kind);
    EXPECT_NEAR(ops_error(dpre, want_dpre, dpre_size, gates * n), 0, limit, "dpre of %s, %zu x %zu",
                activation_word(kind), N, F);
    if (gates == 1) {
        activation_backward_cpu(dact, dact, pre, N, F, kind);
        EXPECT(ops_same_bits(dact, dpre, n), "dpre of %s is dact, %zu x %zu", activation_word(kind), N, F);
    }
}

TEST(sizes) {
    const size_t sizes[] = {31, 33, 768, 3 * 769};
    for (ActivationKind kind = 0; kind < ACTIVATION_COUNT; kind++) {
        for (size_t F = 1; F <= 2 * LANES + 1; F++) {
            check(ops_normal(2 * 3 * F, 2), 1 + F % 3, F, kind);
            ops_close("small sizes");
        }
        for (int i = 0; i < 4; i++) {
            check(ops_normal(4 * sizes[i], 2), 1 + i % 2, sizes[i], kind);
            ops_close("sizes");
        }
    }
}

// The other half of a pair, if there is one, is a moderate number.
TEST(range) {
    enum { POINTS = 24001 };
    float *gates = ops_normal(2 * POINTS, 1), *x = ops_normal(2 * POINTS, 1);
    for (int i = 0; i < POINTS; i++) {
        gates[i] = x[POINTS + i] = (float)(i - POINTS / 2) * 1e-3f; // -12 ... 12: not yet 0 or x
    }
    for (ActivationKind kind = 0; kind < ACTIVATION_COUNT; kind++) {
        check(gates, 1, POINTS, kind);
        check(x, 1, POINTS, kind);
    }
    const float far[] = {0, -0.0f, 1e-38f, -1e-38f, 1e-6f, 20, -20, 100, -100, 1e4f, -1e4f, 1};
    for (ActivationKind kind = 0; kind < ACTIVATION_COUNT; kind++) {
        check(far, 1, 6, kind);
        check(far + 6, 1, 6 / (size_t)activation_gates(kind), kind);
    }
    ops_close("range");
}

TEST(nan) {
    enum { F = LANES + 1 };
    for (ActivationKind kind = 0; kind < ACTIVATION_COUNT; kind++) {
        const int gates = activation_gates(kind);
        for (int at = 0; at < gates * F; at++) { // the last one of a row is alone in the rest
            float *pre = ops_normal(gates * F, 1), *dact = ops_normal(F, 1);
            float *act = ops_floats(F), *dpre = ops_floats(gates * F);
            pre[at] = NAN;
            activation_forward_cpu(act, pre, 1, F, kind);
            activation_backward_cpu(dpre, dact, pre, 1, F, kind);
            for (int i = 0; i < F; i++) {
                const float d = gates == 2 && at >= F ? dpre[i] : dpre[(gates - 1) * F + i];
                EXPECT(isnan(act[i]) == (i == at % F) && isnan(d) == (i == at % F),
                       "%s, NaN at %d, element %d", activation_word(kind), at, i);
            }
            ops_close("NaN");
        }
    }
}

TEST(threads) {
    enum { N = 53, F = 1003 };
    for (ActivationKind kind = 0; kind < ACTIVATION_COUNT; kind++) {
        const int gates = activation_gates(kind);
        float *pre = ops_normal(2 * N * F, 2), *dact = ops_normal(N * F, 1), *act[4], *dpre[4];
        for (int t = 1; t <= 3; t++) {
            threads_set(t);
            act[t] = ops_floats(N * F), dpre[t] = ops_floats(2 * N * F);
            activation_forward_cpu(act[t], pre, N, F, kind);
            activation_backward_cpu(dpre[t], dact, pre, N, F, kind);
            EXPECT(ops_same_bits(act[t], act[1], N * F), "%s with %d threads", activation_word(kind), t);
            EXPECT(ops_same_bits(dpre[t], dpre[1], (size_t)gates * N * F), "dpre of %s with %d threads",
                   activation_word(kind), t);
        }
        ops_close("threads");
    }
}
