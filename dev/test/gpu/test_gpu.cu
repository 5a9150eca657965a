// test_gpu.cu -- gpu.cuh: memory, sums, conversions and 16-byte loads.
#include "llmc/gpu/gpu.cuh"
#include "dev/test/lib/test.h"

// One block; x (n), n at most the number of threads. Each thread writes the sum and the maximum of
// x, each found twice in a row: once of x and, in the same shared memory, as half the sum of 2 x.
__global__ void reduce_kernel(float* out, const float* x, int n) {
    const float mine = (int)threadIdx.x < n ? x[threadIdx.x] : 0.0f;
    const float sum = block_sum(mine), sum_again = block_sum(2 * mine) / 2;
    const float max = block_max(mine), max_again = block_max(2 * mine) / 2;
    out[2 * threadIdx.x] = sum == sum_again ? sum : NAN;
    out[2 * threadIdx.x + 1] = max == max_again ? max : NAN;
}

// Each thread sets out to the sum of x over the threads below, found twice in a row.
__global__ void scan_kernel(int* out, const int* x) {
    const int below = block_scan(x[threadIdx.x]), again = block_scan(2 * x[threadIdx.x]);
    out[threadIdx.x] = 2 * below == again ? below : -1;
}

// Copies n elements, a multiple of a pack, through T.
template <class T> __global__ void copy_kernel(T* out, const T* x, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::SIZE;
    if (i < n) {
        store_pack(out + i, load_pack_once(x + i));
    }
}

static void test_reductions(const Gpu* gpu, int threads, int n) {
    float host[1024], got[2048], sum = 0, max = 0;
    for (int i = 0; i < n; i++) {
        host[i] = (float)(i * 7 % 64) - 20;
        sum += host[i];
        max = fmaxf(max, host[i]);
    }
    float* x = (float*)gpu_alloc(1024, sizeof(float), "x");
    float* out = (float*)gpu_alloc(2048, sizeof(float), "out");
    CUDA_CHECK(cudaMemcpyAsync(x, host, (size_t)n * sizeof(float), cudaMemcpyHostToDevice, gpu->stream));
    launch(reduce_kernel, 1, threads, 0, gpu, out, x, n);
    CUDA_CHECK(
        cudaMemcpyAsync(got, out, 2 * (size_t)threads * sizeof(float), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int t = 0; t < threads; t++) { // small integers: exact in any order
        EXPECT(got[2 * t] == sum && got[2 * t + 1] == max, "thread %d of %d, n %d: %g %g, wanted %g %g", t,
               threads, n, got[2 * t], got[2 * t + 1], sum, max);
    }
    gpu_free(out);
    gpu_free(x);
}

static void test_scan(const Gpu* gpu, int threads) {
    int host[1024], got[1024], below = 0;
    int *x = (int*)gpu_alloc(1024, sizeof(int), "x"), *out = (int*)gpu_alloc(1024, sizeof(int), "out");
    for (int i = 0; i < threads; i++) {
        host[i] = i * 7 % 64;
    }
    gpu_copy(x, host, (size_t)threads * sizeof(int), gpu);
    launch(scan_kernel, 1, threads, 0, gpu, out, x);
    gpu_copy(got, out, (size_t)threads * sizeof(int), gpu);
    for (int t = 0; t < threads; t++) {
        EXPECT(got[t] == below, "scan: thread %d of %d: %d, wanted %d", t, threads, got[t], below);
        below += host[t];
    }
    gpu_free(out);
    gpu_free(x);
}

template <class T> static void test_packs(const Gpu* gpu, int n) {
    T host[512], got[512];
    for (int i = 0; i < n; i++) {
        host[i] = from_float<T>((float)i - 0.5f);
    }
    T *x = (T*)gpu_alloc(512, sizeof(T), "x"), *out = (T*)gpu_alloc(512, sizeof(T), "out");
    CUDA_CHECK(cudaMemcpyAsync(x, host, (size_t)n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    launch(copy_kernel<T>, ceil_div(n, 64), 64, 0, gpu, out, x, n);
    CUDA_CHECK(cudaMemcpyAsync(got, out, (size_t)n * sizeof(T), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    EXPECT(memcmp(got, host, (size_t)n * sizeof(T)) == 0, "%d elements of %s", n, dtype_name(DTYPE_OF(T)));
    gpu_free(out);
    gpu_free(x);
}

// Memory is zero before gpu_alloc returns: zeros that come later would wipe out what a stream has
// written.
static void test_alloc(const Gpu* gpu) {
    unsigned *x = (unsigned*)gpu_alloc(2, sizeof(unsigned), "x"), got[2];
    CUDA_CHECK(cudaMemsetAsync(x, 0xFF, sizeof(unsigned), gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(got, x, sizeof(got), cudaMemcpyDeviceToHost));
    EXPECT(got[0] == 0xFFFFFFFF && got[1] == 0, "new memory, one word set: %x %x", got[0], got[1]);
    gpu_free(x);
}

// The peak is what was held at the same time, to the byte, and nothing that another program holds.
static void test_peak(void) {
    const double mib = 1 << 20;
    EXPECT(gpu_peak_mib() == 0, "before the first block: %g MiB", gpu_peak_mib());
    void *a = gpu_alloc(3 << 20, 1, "a"), *b = gpu_alloc(1 << 20, 1, "b");
    gpu_free(a);
    void *c = gpu_alloc(1 << 20, 2, "c"), *none = gpu_alloc(0, 1, "none");
    EXPECT(gpu_peak_mib() == 4, "3 and 1, then 1 and 2: %g MiB", gpu_peak_mib());
    void* d = gpu_alloc((1 << 20) + 1, 1, "d");
    EXPECT(gpu_peak_mib() == 4 + 1 / mib, "1, 2, and 1 and a byte: %g MiB", gpu_peak_mib());
    gpu_free(d);
    gpu_free(none);
    gpu_free(c);
    gpu_free(b);
    gpu_free(NULL);
    EXPECT(gpu_memory_()->now_bytes == 0, "%zu bytes are still counted", gpu_memory_()->now_bytes);
}

// An error that stays in the GPU may be of any work before the call that finds it; one of the call
// itself does not stay.
static void test_error_note(void) {
    EXPECT(strstr(gpu_error_note_(cudaSuccess), "maybe of earlier work"), "what every call finds: no note");
    EXPECT(gpu_error_note_(cudaErrorInvalidValue)[0] == '\0', "of this call: %s",
           gpu_error_note_(cudaErrorInvalidValue));
}

// A copy is over when gpu_copy returns: the source may be written over, the result be read.
static void test_copy(const Gpu* gpu) {
    float host[64], got[64] = {0};
    float* x = (float*)gpu_alloc(64, sizeof(float), "x");
    for (int i = 0; i < 64; i++) {
        host[i] = (float)i;
    }
    gpu_copy(x, host, sizeof(host), gpu);
    memset(host, 0xFF, sizeof(host));
    gpu_copy(got, x, sizeof(got), gpu);
    for (int i = 0; i < 64; i++) {
        EXPECT(got[i] == (float)i, "element %d is %g", i, got[i]);
    }
    gpu_free(x);
}

TEST(gpu) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_peak();
    test_alloc(&gpu);
    test_error_note();
    test_copy(&gpu);
    test_reductions(&gpu, 32, 31);
    test_reductions(&gpu, 96, 96);
    test_reductions(&gpu, 1024, 1000);
    test_scan(&gpu, 32);
    test_scan(&gpu, 96);
    test_scan(&gpu, 1024);
    test_packs<float>(&gpu, 4);
    test_packs<bf16>(&gpu, 312);
    test_packs<fp16>(&gpu, 512);
    gpu_close(&gpu);
}
