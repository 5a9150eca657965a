// test_adamw.c -- ten updates against the reference; decay, clipping, bias correction; the norm.
#include "llmc/ops/gradient_norm.h"
#include "llmc/optim/adamw.h"
#include "llmc/base/threads.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

// Every scalar is exact in binary32, so the reference computes with the same ones.
static const AdamW defaults = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1, DECAY_ALL};

// In each of ten updates a parameter is rounded to half an epsilon of itself, and gets a step of at
// most a few lr that is exact to a few epsilon of its terms; the moments are sums of ten terms.
static void test_ten_updates(size_t n, AdamW opt) {
    float *param = ops_normal(n, 1), *m = ops_normal(n, 0), *v = ops_normal(n, 0);
    double *want = ops_widen(param, n), *want_m = ops_doubles(n), *want_v = ops_doubles(n),
           *magnitude = ops_doubles(n);
    for (size_t i = 0; i < n; i++) {
        magnitude[i] = fabs(param[i]) + 10 * opt.lr;
    }
    for (int step = 0; step < 10; step++, opt.t++) {
        float* grad = ops_normal(n, step % 2 ? 1 : 0.01f);
        const float* unchanged = ops_copy(grad, n);
        ref_adamw(want, ops_widen(grad, n), want_m, want_v, n, opt);
        adamw_update_cpu(param, grad, m, v, n, opt);
        EXPECT(ops_same_bits(grad, unchanged, n), "the update wrote to the gradient");
    }
    EXPECT_NEAR(ops_error(param, want, magnitude, n), 0, 10, "param, n = %zu, last t %d", n, (int)opt.t - 1);
    EXPECT_NEAR(ops_error(m, want_m, NULL, n), 0, 4, "m, n = %zu", n);
    EXPECT_NEAR(ops_error(v, want_v, NULL, n), 0, 4, "v, n = %zu", n);
    ops_close("ten updates");
}

TEST(sizes) {
    const size_t sizes[] = {1, 2, 15, 16, 17, 31, 33, 768, 1001};
    for (int i = 0; i < 9; i++) {
        test_ten_updates(sizes[i], defaults);
    }
    AdamW opt = defaults;
    opt.t = 100000; // the bias corrections are gone
    test_ten_updates(100, opt);
    opt = defaults;
    opt.grad_scale = 0.37f;
    // large enough to tell sqrt(v) + eps from sqrt(v + eps), and scaled gradients from others
    opt.eps = 0.1f;
    test_ten_updates(100, opt);
    opt.weight_decay = 2;
    opt.decay = DECAY_CAUTIOUS;
    test_ten_updates(1001, opt);
    opt.beta2 = 0.999f;
    opt.weight_decay = 0;
    test_ten_updates(100, opt);
}

// The first update moves a parameter by lr, whatever the size of its gradient.
TEST(first_update) {
    float param[] = {1, 1, 1, 1}, grad[] = {1e-3f, -1, 1e3f, 0}, m[4] = {0}, v[4] = {0};
    AdamW opt = defaults;
    opt.weight_decay = 0;
    adamw_update_cpu(param, grad, m, v, 4, opt);
    EXPECT_NEAR(param[0], 1 - 0.01, 2e-7, "gradient 0.001"); // eps is 1e-5 of it: 1e-7
    EXPECT_NEAR(param[1], 1 + 0.01, FLT_EPSILON, "gradient -1");
    EXPECT_NEAR(param[2], 1 - 0.01, FLT_EPSILON, "gradient 1000");
    EXPECT(param[3] == 1 && m[3] == 0 && v[3] == 0, "gradient 0: %g", param[3]);
}

// The decay acts on the parameter alone: it neither enters the moments nor is divided by them.
TEST(decay) {
    enum { N = 33 };
    float *grad = ops_normal(N, 0), *param = ops_normal(N, 1), *m = ops_normal(N, 0), *v = ops_normal(N, 0);
    const double* before = ops_widen(param, N);
    AdamW opt = defaults;
    for (opt.t = 1; opt.t <= 10; opt.t++) {
        adamw_update_cpu(param, grad, m, v, N, opt);
    }
    for (int i = 0; i < N; i++) {
        EXPECT(m[i] == 0 && v[i] == 0, "decay entered a moment: %g %g", m[i], v[i]);
        EXPECT_NEAR(param[i], before[i] * pow(1 - 0.01 * 0.1, 10), 10 * FLT_EPSILON * fabs(before[i]),
                    "element %d", i);
    }
    ops_close("decay");
}

// Clipping by a power of two is exact: the same bits as smaller gradients.
TEST(grad_scale) {
    enum { N = 33 };
    float *grad = ops_normal(N, 1), *small = ops_copy(grad, N), *param[2], *m[2], *v[2];
    for (int i = 0; i < N; i++) {
        small[i] *= 0.125f;
    }
    float* start = ops_normal(N, 1);
    for (int k = 0; k < 2; k++) {
        AdamW opt = defaults;
        opt.grad_scale = k ? 1 : 0.125f;
        param[k] = ops_copy(start, N), m[k] = ops_normal(N, 0), v[k] = ops_normal(N, 0);
        adamw_update_cpu(param[k], k ? small : grad, m[k], v[k], N, opt);
    }
    EXPECT(ops_same_bits(param[0], param[1], N) && ops_same_bits(m[0], m[1], N) &&
               ops_same_bits(v[0], v[1], N),
           "grad_scale 1/8 differs from gradients of an eighth");
    ops_close("grad_scale");
}

static double square_sum(const float* grad, size_t n, double* partial) {
    WideSum sum = {0, 0};
    gradient_square_sum_cpu(&sum, grad, n, partial);
    return wide_sum_value(sum);
}

// A lane adds at most GRADIENT_BLOCK / 16 squares one after the other: roundings of at most
// epsilon/2 of the sum, which add up like the square root of their number.
static void test_square_sum(size_t n) {
    float* grad = ops_normal(n, 0.1f);
    double* partial = ops_doubles(n / GRADIENT_BLOCK + 1);
    double want = 0;
    for (size_t i = 0; i < n; i++) {
        want += (double)grad[i] * grad[i];
    }
    const double tolerance = want * sqrt(GRADIENT_BLOCK / 16) / 2 * FLT_EPSILON;
    EXPECT_NEAR(square_sum(grad, n, partial), want, tolerance, "n = %zu", n);
    if (n > 0) {
        grad[n - 1] = NAN;
        EXPECT(isnan(square_sum(grad, n, partial)), "a NaN at %zu is lost", n - 1);
        grad[n - 1] = 1e6f; // nothing of the last element is left out
        EXPECT_NEAR(square_sum(grad, n, partial), 1e12, 1e6, "n = %zu, last element", n);
    }
    ops_close("square sum");
}

TEST(square_sums) {
    const size_t sizes[] = {0, 1, 15, 16, 17, 31, 33};
    for (int i = 0; i < 7; i++) {
        test_square_sum(sizes[i]);
    }
    for (size_t blocks = 1; blocks <= 3; blocks++) {
        for (size_t n = blocks * GRADIENT_BLOCK - 1; n <= blocks * GRADIENT_BLOCK + 1; n++) {
            test_square_sum(n);
        }
    }
}

// The blocks' sums are 2^54, 1, 1, ...: no 1 is lost, however many threads there are.
TEST(threads) {
    enum { N = 12 * GRADIENT_BLOCK + 7 };
    float *grad = ops_normal(N, 1), *start = ops_normal(N, 1), *apart = ops_normal(N, 0), *param[4], *m[4],
          *v[4];
    double* partial = ops_doubles(N / GRADIENT_BLOCK + 1);
    for (int i = 0; i < N; i += GRADIENT_BLOCK) {
        apart[i] = i == 0 ? 0x1p27f : 1;
    }
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        param[t] = ops_copy(start, N), m[t] = ops_normal(N, 0), v[t] = ops_normal(N, 0);
        adamw_update_cpu(param[t], grad, m[t], v[t], N, defaults);
        EXPECT(ops_same_bits(param[t], param[1], N), "param with %d threads", t);
        EXPECT(ops_same_bits(m[t], m[1], N) && ops_same_bits(v[t], v[1], N), "moments with %d threads", t);
        EXPECT(square_sum(apart, N, partial) == 0x1p54 + 12, "square sum with %d threads", t);
    }
    ops_close("threads");
}
