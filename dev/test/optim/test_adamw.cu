// test_adamw.cu -- the gradient's norm, and sums of losses. test_optimizer.cu tests the update.
#include "llmc/ops/cross_entropy.cuh"
#include "llmc/ops/gradient_norm.cuh"
#include "llmc/optim/adamw.cuh"
#include "dev/test/lib/ops.h"

// ---- arrays on the device ----

// x (n), in host memory, as elements of T on the device; the caller frees it.
template <class T> static T* upload(const float* x, size_t n, const Gpu* gpu) {
    T* host = (T*)check_alloc(n, sizeof(T), "host");
    for (size_t i = 0; i < n; i++) {
        host[i] = from_float<T>(x[i]);
    }
    T* device = (T*)gpu_alloc(n, sizeof(T), "device");
    CUDA_CHECK(cudaMemcpyAsync(device, host, n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(host);
    return device;
}

template <class T> static float* rounded(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] = to_float(from_float<T>(x[i]));
    }
    return x;
}

// ---- the gradient's norm ----

// The sum over `parts` equal parts of n gradients, merged. T is the type of the weights, G of the
// gradients.
template <class T, class G>
static double square_sum(const float* grad, size_t n, size_t parts, const Gpu* gpu) {
    const size_t count = n / parts;
    WideSum sum = {0, 0}, part;
    GradientNorm norm;
    Memory memory = memory_on_gpu();
    gradient_norm_open(&norm, &memory, count);
    WideSum* result = (WideSum*)gpu_alloc(1, sizeof(WideSum), "square sum");
    CUDA_CHECK(cudaMemset(result, 0xFF, sizeof(WideSum)));
    G* device_grad = upload<G>(grad, n, gpu);
    for (size_t p = 0; p < parts; p++) {
        const Gradient gradient = {device_grad + p * count, DTYPE_OF(G)};
        gradient_square_sum<T>(result, gradient, &norm, gpu);
        CUDA_CHECK(cudaMemcpyAsync(&part, result, sizeof(part), cudaMemcpyDeviceToHost, gpu->stream));
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        wide_sum_merge(&sum, part);
    }
    gpu_free(result);
    gpu_free(device_grad);
    memory_close(&memory);
    return wide_sum_value(sum);
}

// A lane adds 32 squares in fp32, a tree of 5 levels the lanes: fewer than 40 roundings of half an
// epsilon, which add up like the square root of their number.
template <class T, class G> static void test_square_sum(size_t n, const Gpu* gpu) {
    float* grad = rounded<G>(ops_normal(n, 0.1f), n);
    double want = 0;
    for (size_t i = 0; i < n; i++) {
        want += (double)grad[i] * grad[i];
    }
    const double got = square_sum<T, G>(grad, n, 1, gpu);
    EXPECT_NEAR(got, want, want * sqrt(40) / 2 * FLT_EPSILON, "%s, n %zu", dtype_name(DTYPE_OF(G)), n);
    EXPECT((square_sum<T, G>(grad, n, 1, gpu) == got), "two runs differ");
    for (size_t i = 0; i < n; i++) {
        grad[i] = 1;
    }
    EXPECT((square_sum<T, G>(grad, n, 1, gpu) == (double)n), "ones");
    grad[n - 1] = INFINITY;
    EXPECT((square_sum<T, G>(grad, n, 1, gpu) == INFINITY), "an infinity at the end is lost");
    grad[n / 2] = NAN;
    EXPECT((isnan(square_sum<T, G>(grad, n, 1, gpu))), "a NaN is lost");
    ops_close("square sum");
}

// Magnitudes from 2^-10 to 2^10: sums of doubles would depend on the cuts.
template <class T, class G> static void test_cuts(const Gpu* gpu) {
    const size_t units = 60, n = units * GRADIENT_BLOCK, cuts[] = {2, 3, 5, 12, units};
    float* grad = ops_normal(n, 1);
    for (size_t i = 0; i < n; i++) {
        grad[i] *= ldexpf(1, (int)(i / GRADIENT_BLOCK * 7 % 21) - 10);
    }
    const double want = square_sum<T, G>(grad, n, 1, gpu);
    for (int i = 0; i < 5; i++) {
        const double got = square_sum<T, G>(grad, n, cuts[i], gpu);
        EXPECT(got == want, "%s: %.17g in %zu parts, %.17g in one", dtype_name(DTYPE_OF(G)), got, cuts[i],
               want);
    }
    ops_close("cuts");
}

template <class T, class G> static void test_square_sums(const Gpu* gpu) {
    const size_t units[] = {1, 7, 8, 9, NORM_UNITS_, NORM_UNITS_ + 1, 5 * NORM_UNITS_ + 3};
    for (int i = 0; i < 7; i++) {
        test_square_sum<T, G>(units[i] * GRADIENT_BLOCK, gpu);
    }
    test_cuts<T, G>(gpu);
}

// The largest fp16 everywhere: 65504^2 n is far beyond fp16 and far below the end of fp32. In bf16
// the sums of the units are 2^52, 1 and 1: only a double holds them all.
static void test_square_sum_range(const Gpu* gpu) {
    const size_t n = (2 * NORM_UNITS_ + 1) * GRADIENT_BLOCK;
    float* grad = ops_floats(n);
    for (size_t i = 0; i < n; i++) {
        grad[i] = 65504;
    }
    const double want = 65504.0 * 65504.0 * (double)n;
    EXPECT_NEAR((square_sum<fp16, fp16>(grad, n, 1, gpu)), want, want * 1e-6, "fp16");
    memset(grad, 0, n * sizeof(float));
    grad[0] = 0x1p26f; // 2^52
    grad[GRADIENT_BLOCK] = grad[n - GRADIENT_BLOCK] = 1;
    EXPECT((square_sum<bf16, bf16>(grad, n, 1, gpu) == 0x1p52 + 2), "units are not summed in double");
    ops_close("square sum range");
}

// ---- losses ----

// Each sum goes behind the ones before.
static void test_sum_losses(int N, const Gpu* gpu) {
    double want = 0, sums[4] = {NAN, NAN, NAN, NAN};
    int64_t count = 1;
    float* losses = ops_normal((size_t)N, 2);
    for (int i = 0; i < N; i++) {
        losses[i] += 10;
        want += losses[i];
    }
    double* device_sums = (double*)gpu_alloc(4, sizeof(double), "sums");
    int64_t* device_count = (int64_t*)gpu_alloc(1, sizeof(int64_t), "count");
    CUDA_CHECK(cudaMemcpy(device_sums, sums, sizeof(sums), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(device_count, &count, sizeof(count), cudaMemcpyHostToDevice));
    float* device = upload<float>(losses, (size_t)N, gpu);
    losses[N - 1] = NAN;
    float* device_nan = upload<float>(losses, (size_t)N, gpu);
    sum_losses(device_sums, device_count, device, N, gpu);
    sum_losses(device_sums, device_count, device_nan, N, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaMemcpy(sums, device_sums, sizeof(sums), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(&count, device_count, sizeof(count), cudaMemcpyDeviceToHost));
    EXPECT(count == 3 && isnan(sums[0]) && isnan(sums[3]), "N %d: %d sums, or one elsewhere", N, (int)count);
    EXPECT_NEAR(sums[1], want, want * 1e-14, "N %d", N);
    EXPECT(isnan(sums[2]), "N %d: a NaN is lost", N);
    gpu_free(device_nan);
    gpu_free(device);
    gpu_free(device_count);
    gpu_free(device_sums);
    ops_close("losses");
}

// Each source gets the losses of its sequences, on top of what it has; one has none.
static void test_source_losses(int B, int T, const Gpu* gpu) {
    enum { SOURCES = 4 };
    double want[SOURCES] = {1, 2, 3, 4}, sums[SOURCES];
    const size_t N = (size_t)B * (size_t)T;
    float* losses = ops_normal(N, 3);
    int* sources = (int*)check_alloc((size_t)B, sizeof(int), "sources");
    double* device_sums = (double*)gpu_alloc(SOURCES, sizeof(double), "sums");
    CUDA_CHECK(cudaMemcpy(device_sums, want, sizeof(want), cudaMemcpyHostToDevice));
    for (int b = 0; b < B; b++) {
        sources[b] = b * 7 % 5 % (SOURCES - 1);
        for (int t = 0; t < T; t++) {
            want[sources[b]] += losses[b * T + t];
        }
    }
    float* device = upload<float>(losses, N, gpu);
    int* device_sources = (int*)gpu_alloc((size_t)B, sizeof(int), "sources");
    CUDA_CHECK(cudaMemcpy(device_sources, sources, (size_t)B * sizeof(int), cudaMemcpyHostToDevice));
    sum_source_losses(device_sums, SOURCES, device, device_sources, B, T, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaMemcpy(sums, device_sums, sizeof(sums), cudaMemcpyDeviceToHost));
    for (int s = 0; s < SOURCES; s++) {
        EXPECT_NEAR(sums[s], want[s], 1e-12 * (double)N, "B %d, T %d, source %d", B, T, s);
    }
    gpu_free(device_sources);
    gpu_free(device);
    gpu_free(device_sums);
    free(sources);
    ops_close("losses of sources");
}

static void test_bytes(void) { EXPECT(gradient_square_sum_bytes(10, DTYPE_FP16) == 20, "2 each"); }

TEST(adamw) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_square_sums<float, float>(&gpu);
    test_square_sums<bf16, float>(&gpu);
    test_square_sums<bf16, bf16>(&gpu);
    UNSANITIZED((test_square_sums<fp16, float>(&gpu), test_square_sums<fp16, fp16>(&gpu)));
    test_square_sum_range(&gpu);
    const int sizes[] = {1, 31, 33, 768, 1025, 5000};
    for (int i = 0; i < 6; i++) {
        test_sum_losses(sizes[i], &gpu);
        test_source_losses(1 + i * 3, sizes[5 - i], &gpu);
    }
    test_bytes();
    gpu_close(&gpu);
}
