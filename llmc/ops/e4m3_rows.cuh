/*
e4m3_rows.cuh -- rows of T = float, bf16 or fp16 in E4M3, with a scale for each (float8.h): by a
kernel of its own, and in kernels that have a row in registers.

Codes and scales belong to the numbers that are stored, rounded to T, whichever kernel makes
them, and have the bits of float8.h.
*/
#ifndef LLMC_E4M3_ROWS_CUH
#define LLMC_E4M3_ROWS_CUH

#include <assert.h>

#include "llmc/base/float8.h"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/ptx.cuh"

enum { E4M3_UNIT = 16 }; // of columns: cublasLt reads rows in 16 bytes

// ---- in kernels ----

// Returns the largest magnitude (e4m3_magnitude) of a pack.
template <class T> __device__ inline uint32_t e4m3_largest(const Pack<T>& pack) {
    float x[Pack<T>::SIZE];
    uint32_t largest = 0;
    unpack<T>(x, pack);
#pragma unroll
    for (int i = 0; i < Pack<T>::SIZE; i++) {
        largest = max(largest, e4m3_magnitude(x[i]));
    }
    return largest;
}

// Returns the largest of a row's threads: a warp, or the whole block.
__device__ inline uint32_t e4m3_row_largest(uint32_t x) {
    return blockDim.x == 32 ? warp_max(x) : block_max(x, 0u);
}

// Stores the codes of a pack of a row whose scale is 1 / inverse, for the matmul that follows: in
// the caches.
template <class T> __device__ inline void e4m3_store_pack(uint8_t* to, const Pack<T>& pack, float inverse) {
    constexpr int SIZE = Pack<T>::SIZE;
    Elements<uint8_t, SIZE> codes;
    float x[SIZE];
    unpack<T>(x, pack);
#pragma unroll
    for (int i = 0; i < SIZE; i += 2) {
        const unsigned two = e4m3_from_floats(x[i] * inverse, x[i + 1] * inverse);
        codes[i] = (uint8_t)two;
        codes[i + 1] = (uint8_t)(two >> 8);
    }
    elements_store_kept(to, codes);
}

// Returns the inverse of the scale of row n, which `first`, one of its threads, stores.
__device__ inline float e4m3_scale(const E4m3Rows& to, size_t n, uint32_t largest, bool first) {
    const int exponent = e4m3_exponent(largest);
    if (first) {
        to.scales[n] = e4m3_power(exponent);
    }
    return e4m3_power(-exponent);
}

// ---- a kernel of its own ----

// A warp quantizes a row, which it reads twice, the second time from a cache.
// grid   ceil(rows / 8)      block   (32, 8)      shared   none
// moves  rows*cols in, rows*cols bytes and rows fp32 out. Bound by memory.
// order  none that counts: the largest of a row is the same in any.
// needs  cols a multiple of 16, x and codes aligned to 16 bytes
template <class T>
__global__ void __launch_bounds__(256) e4m3_rows_kernel(E4m3Rows to, const T* x, int rows, int cols) {
    constexpr int SIZE = Pack<T>::SIZE;
    const int lane = (int)threadIdx.x, n = (int)(blockIdx.x * blockDim.y + threadIdx.y);
    if (n >= rows) {
        return;
    }
    const T* from = x + (size_t)n * cols;
    uint32_t largest = 0;
    for (int c = lane * SIZE; c < cols; c += 32 * SIZE) {
        largest = max(largest, e4m3_largest(load_pack(from + c)));
    }
    const float inverse = e4m3_scale(to, (size_t)n, warp_max(largest), lane == 0);
    for (int c = lane * SIZE; c < cols; c += 32 * SIZE) {
        e4m3_store_pack(to.codes + (size_t)n * cols + c, load_pack(from + c), inverse);
    }
}

// Sets codes (rows, cols) and scales (rows) of x.
template <class T> static inline void e4m3_rows(E4m3Rows to, const T* x, int rows, int cols, const Gpu* gpu) {
    assert(cols % E4M3_UNIT == 0);
    launch(e4m3_rows_kernel<T>, (unsigned)ceil_div(rows, 8), dim3(32, 8), 0, gpu, to, x, rows, cols);
}

#endif
