// test_activation.cu -- GELU on the GPU against reference.h: every type, odd sizes, addresses,
// extremes, in place.
#include "llmc/ops/activation.cuh"
#include "llmc/reference.h"
#include "dev/test/lib/gpu_ops.h"

// One rounding to T; the fast exponential and division are wrong by up to 2^-19 of the factor x or
// d; below the normal numbers of fp16 the rounding is absolute.
template <class T>
static void compare(const float* got, const double* want, const float* factor, size_t n, const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], roundoff<T>() * fabs(want[i]) + 0x1p-19 * fabs(factor[i]) + 0x1p-25,
                    "%s, element %zu of %zu, %s", what, i, n, dtype_name(DTYPE_OF(T)));
    }
}

template <class T> static void test_size(size_t n, size_t shift, const Gpu* gpu) {
    float *x = ops_normal(n, 3), *d = ops_normal(n, 1);
    double *want = ops_doubles(n), *want_dinp = ops_doubles(n);
    for (size_t i = 0; i < n; i += 7) { // where sigmoid or 1 - sigmoid is nearly 0
        x[i] = x[i] < 0 ? -30.0f - (float)i : 30.0f + (float)i;
    }
    float* nothing = ops_floats(n); // NaN: all must be set
    T *inp = upload<T>(x, n, shift, gpu), *dout = upload<T>(d, n, shift, gpu);
    T *out = upload<T>(nothing, n, shift, gpu), *dinp = upload<T>(nothing, n, shift, gpu);
    gelu_forward(out, inp, n, gpu);
    ref_activation_forward(want, ops_widen(x, n), 1, n, ACTIVATION_GELU);
    compare<T>(download(out, n, gpu), want, x, n, "forward");

    gelu_backward(dinp, dout, inp, n, gpu);
    ref_activation_backward(want_dinp, ops_widen(d, n), ops_widen(x, n), 1, n, ACTIVATION_GELU);
    const float* first = download(dinp, n, gpu);
    compare<T>(first, want_dinp, d, n, "backward");
    gelu_backward(dout, dout, inp, n, gpu);
    EXPECT(ops_same_bits(download(dout, n, gpu), first, n), "backward in place, %zu elements", n);
    gpu_free(dinp - shift);
    gpu_free(out - shift);
    gpu_free(dout - shift);
    gpu_free(inp - shift);
    ops_close("sizes");
}

template <class T> static void test_nan(const Gpu* gpu) {
    enum { N = 40 };
    float *x = ops_normal(N, 1), *d = ops_normal(N, 1);
    x[3] = NAN;
    T *inp = upload<T>(x, N, 0, gpu), *dout = upload<T>(d, N, 0, gpu), *out = upload<T>(d, N, 0, gpu);
    gelu_forward(out, inp, N, gpu);
    gelu_backward(dout, dout, inp, N, gpu);
    const float *y = download(out, N, gpu), *g = download(dout, N, gpu);
    for (int i = 0; i < N; i++) {
        EXPECT(isnan(y[i]) == (i == 3) && isnan(g[i]) == (i == 3), "element %d: %g %g", i, y[i], g[i]);
    }
    gpu_free(out);
    gpu_free(dout);
    gpu_free(inp);
    ops_close("nan");
}

template <class T> static void test_type(const Gpu* gpu) {
    const size_t sizes[] = {1, 7, 8, 31, 33, 768, 2049, 5000};
    for (size_t n : sizes) {
        test_size<T>(n, 0, gpu);
    }
    test_size<T>(1000, 1, gpu); // no pack can be read here
    test_nan<T>(gpu);
}

TEST(activation) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_type<float>(&gpu);
    test_type<bf16>(&gpu);
    UNSANITIZED(test_type<fp16>(&gpu));
    gpu_close(&gpu);
}
