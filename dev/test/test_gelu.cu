// test_gelu.cu -- GELU on the GPU against the CPU: every type, odd sizes, addresses, extremes, in place.
#include "llmc/gelu.cuh"
#include "ops.h"

// Half a unit in the last place of 1.
template <class T> static double roundoff(void) {
    return DTYPE_OF(T) == DTYPE_FP32 ? 0x1p-24 : DTYPE_OF(T) == DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
}

// Device memory `shift` elements past an aligned address, filled with x rounded to T; x is rounded too.
template <class T> static T* upload(float* x, size_t n, size_t shift, const Gpu* gpu) {
    T *host = (T*)check_alloc(n, sizeof(T), "host"), *memory = (T*)gpu_alloc(n + shift, sizeof(T), "test");
    for (size_t i = 0; i < n; i++) {
        host[i] = from_float<T>(x[i]);
        x[i] = to_float(host[i]);
    }
    CUDA_CHECK(cudaMemcpyAsync(memory + shift, host, n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(host);
    return memory + shift;
}

template <class T> static float* download(const T* x, size_t n, const Gpu* gpu) {
    T* host = (T*)check_alloc(n, sizeof(T), "host");
    float* wide = ops_floats(n);
    CUDA_CHECK(cudaMemcpyAsync(host, x, n * sizeof(T), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (size_t i = 0; i < n; i++) {
        wide[i] = to_float(host[i]);
    }
    free(host);
    return wide;
}

// One rounding to T; the fast exponential and division are wrong by up to 2^-19 of the factor x or d; below
// the normal numbers of fp16 the rounding is absolute.
template <class T>
static void compare(const float* got, const float* want, const float* factor, size_t n, const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], roundoff<T>() * fabs(want[i]) + 0x1p-19 * fabs(factor[i]) + 0x1p-25,
                    "%s, element %zu of %zu, %s", what, i, n, dtype_name(DTYPE_OF(T)));
    }
}

template <class T> static void test_size(size_t n, size_t shift, const Gpu* gpu) {
    float *x = ops_normal(n, 3), *d = ops_normal(n, 1), *want = ops_floats(n);
    for (size_t i = 0; i < n; i += 7) { // where sigmoid or 1 - sigmoid is nearly 0
        x[i] = x[i] < 0 ? -30.0f - (float)i : 30.0f + (float)i;
    }
    float* nothing = ops_floats(n); // NaN: all must be set
    T *inp = upload<T>(x, n, shift, gpu), *dout = upload<T>(d, n, shift, gpu);
    T *out = upload<T>(nothing, n, shift, gpu), *dinp = upload<T>(nothing, n, shift, gpu);
    gelu_forward(out, inp, n, gpu);
    gelu_forward_cpu(want, x, n);
    compare<T>(download(out, n, gpu), want, x, n, "forward");

    gelu_backward(dinp, dout, inp, n, gpu);
    gelu_backward_cpu(want, d, x, n);
    const float* first = download(dinp, n, gpu);
    compare<T>(first, want, d, n, "backward");
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

int main(void) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_type<float>(&gpu);
    test_type<bf16>(&gpu);
    test_type<fp16>(&gpu);
    gpu_close(&gpu);
    return test_done("gelu on the GPU");
}
