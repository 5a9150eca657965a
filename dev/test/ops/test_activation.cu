// test_activation.cu -- every activation on the GPU against reference.h: every type, odd sizes,
// addresses, extremes, in place.
#include "llmc/ops/activation.cuh"
#include "llmc/reference.h"
#include "dev/test/lib/gpu_ops.h"

// One rounding to T; the fast exponential and division are wrong by up to 2^-19 of the factors;
// below the normal numbers of fp16 the rounding is absolute.
template <class T>
static void compare(const float* got, const double* want, const double* factor, size_t n, ActivationKind kind,
                    const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], roundoff<T>() * fabs(want[i]) + 0x1p-19 * factor[i] + 0x1p-25,
                    "%s of %s, element %zu of %zu, %s", what, activation_word(kind), i, n,
                    dtype_name(DTYPE_OF(T)));
    }
}

// The factors of a result that an error of the sigmoid multiplies, in act (N, F) and in dpre.
static void factors(double* of_act, double* of_dpre, const float* pre, const float* dact, size_t N, size_t F,
                    ActivationKind kind) {
    const size_t gates = (size_t)activation_gates(kind);
    for (size_t i = 0; i < N * F; i++) {
        const size_t gate = i / F * gates * F + i % F, x = gate + (gates - 1) * F;
        const int is_raised = kind == ACTIVATION_CLAMPED; // x + 1, and a sigmoid that is steeper
        const double other = (gates == 2 ? fabs(pre[gate]) : 1) * (1 + is_raised);
        of_act[i] = (fabs(pre[x]) + is_raised) * other;
        of_dpre[x] = fabs(dact[i]) * other;
        of_dpre[gate] = gates == 2 ? fabs(dact[i]) * (fabs(pre[x]) + is_raised) * (1 + other) : of_dpre[gate];
    }
}

template <class T>
static void test_size(size_t N, size_t F, ActivationKind kind, size_t shift, const Gpu* gpu) {
    const size_t n = N * F, h = (size_t)activation_gates(kind) * n;
    float *x = ops_normal(h, 3), *d = ops_normal(n, 1);
    double *want = ops_doubles(n), *want_dpre = ops_doubles(h), *of_act = ops_doubles(n),
           *of_dpre = ops_doubles(h);
    for (size_t i = 0; i < h; i += 7) { // where sigmoid or 1 - sigmoid is nearly 0
        x[i] = x[i] < 0 ? -30.0f - (float)(i % 100) : 30.0f + (float)(i % 100);
    }
    float* nothing = ops_floats(h); // NaN: all must be set
    T *pre = upload<T>(x, h, shift, gpu), *dact = upload<T>(d, n, shift, gpu);
    T *act = upload<T>(nothing, n, shift, gpu), *dpre = upload<T>(nothing, h, shift, gpu);
    factors(of_act, of_dpre, x, d, N, F, kind);
    activation_forward(act, pre, N, F, kind, gpu);
    ref_activation_forward(want, ops_widen(x, h), N, F, kind);
    compare<T>(download(act, n, gpu), want, of_act, n, kind, "forward");

    activation_backward(dpre, dact, pre, N, F, kind, gpu);
    ref_activation_backward(want_dpre, ops_widen(d, n), ops_widen(x, h), N, F, kind);
    const float* first = download(dpre, h, gpu);
    compare<T>(first, want_dpre, of_dpre, h, kind, "backward");
    if (h == n) {
        activation_backward(dact, dact, pre, N, F, kind, gpu);
        EXPECT(ops_same_bits(download(dact, n, gpu), first, n), "backward of %s in place, %zu elements",
               activation_word(kind), n);
    }
    gpu_free(dpre - shift);
    gpu_free(act - shift);
    gpu_free(dact - shift);
    gpu_free(pre - shift);
    ops_close("sizes");
}

template <class T> static void test_nan(ActivationKind kind, const Gpu* gpu) {
    enum { F = 40, BAD = 3 };
    const int gates = activation_gates(kind);
    for (int half = 0; half < gates; half++) {
        float *x = ops_normal(gates * F, 1), *d = ops_normal(F, 1);
        x[half * F + BAD] = NAN;
        T *pre = upload<T>(x, gates * F, 0, gpu), *dact = upload<T>(d, F, 0, gpu);
        T *act = upload<T>(d, F, 0, gpu), *dpre = upload<T>(x, gates * F, 0, gpu);
        activation_forward(act, pre, 1, F, kind, gpu);
        activation_backward(dpre, dact, pre, 1, F, kind, gpu);
        const float *y = download(act, F, gpu), *g = download(dpre, gates * F, gpu);
        for (int i = 0; i < F; i++) {
            EXPECT(isnan(y[i]) == (i == BAD) && isnan(g[i]) == (i == BAD), "%s, element %d: %g %g",
                   activation_word(kind), i, y[i], g[i]);
        }
        gpu_free(dpre);
        gpu_free(act);
        gpu_free(dact);
        gpu_free(pre);
        ops_close("nan");
    }
}

template <class T> static void test_type(const Gpu* gpu) {
    const size_t sizes[] = {1, 7, 8, 31, 33, 768, 2049, 5000};
    for (int i = 0; i < ACTIVATION_COUNT; i++) {
        const ActivationKind kind = (ActivationKind)i;
        for (size_t F : sizes) {
            test_size<T>(1 + F % 3, F, kind, 0, gpu);
        }
        test_size<T>(2, 1000, kind, 1, gpu); // no pack can be read here
        test_nan<T>(kind, gpu);
    }
}

TEST_TYPES(activation)
