/*
gpu_ops.h -- helpers for tests of GPU operations, in addition to ops.h: arrays on the device, and
the rounding of a type.
*/
#ifndef DEV_GPU_OPS_H
#define DEV_GPU_OPS_H

#include "llmc/gpu/gpu.cuh"
#include "dev/test/lib/ops.h"

// Defines a test that runs test_type for each type of the trainer.
#define TEST_TYPES(name)                                                                                     \
    TEST(name) {                                                                                             \
        Gpu gpu;                                                                                             \
        gpu_open(&gpu, 0);                                                                                   \
        test_type<float>(&gpu);                                                                              \
        test_type<bf16>(&gpu);                                                                               \
        UNSANITIZED(test_type<fp16>(&gpu));                                                                  \
        gpu_close(&gpu);                                                                                     \
    }

// Half a unit in the last place of 1.
template <class T> static double roundoff(void) {
    return DTYPE_OF(T) == DTYPE_FP32 ? 0x1p-24 : DTYPE_OF(T) == DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
}

// Rounds x to T.
template <class T> static void round_to(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] = to_float(from_float<T>(x[i]));
    }
}

// Returns random numbers that T can hold.
template <class T> static float* normal(size_t n, float scale) {
    float* x = ops_normal(n, scale);
    round_to<T>(x, n);
    return x;
}

// Returns device memory that is all NaN, so that unset elements show.
template <class T> static T* unset(size_t n, const Gpu* gpu) {
    T* memory = (T*)gpu_alloc(n, sizeof(T), "test");
    CUDA_CHECK(cudaMemsetAsync(memory, 0xFF, n * sizeof(T), gpu->stream));
    return memory;
}

// Returns device memory `shift` elements past an aligned address, filled with x rounded to T.
template <class T> static T* upload_rounded(const float* x, size_t n, size_t shift, const Gpu* gpu) {
    T *host = (T*)check_alloc(n, sizeof(T), "host"), *memory = (T*)gpu_alloc(n + shift, sizeof(T), "test");
    for (size_t i = 0; i < n; i++) {
        host[i] = from_float<T>(x[i]);
    }
    CUDA_CHECK(cudaMemcpyAsync(memory + shift, host, n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(host);
    return memory + shift;
}

// Returns the same, and rounds x, too.
template <class T> static T* upload(float* x, size_t n, size_t shift, const Gpu* gpu) {
    round_to<T>(x, n);
    return upload_rounded<T>(x, n, shift, gpu);
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

// Downloads an array, and frees it.
template <class T> static float* take_back(T* x, size_t n, const Gpu* gpu) {
    float* wide = download(x, n, gpu);
    gpu_free(x);
    return wide;
}

static inline float* absolute(const float* x, size_t n) {
    float* result = ops_floats(n);
    for (size_t i = 0; i < n; i++) {
        result[i] = fabsf(x[i]);
    }
    return result;
}

static inline int* upload_ints(const int* x, size_t n, const Gpu* gpu) {
    int* memory = (int*)gpu_alloc(n, sizeof(int), "test");
    CUDA_CHECK(cudaMemcpyAsync(memory, x, n * sizeof(int), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    return memory;
}

#endif
