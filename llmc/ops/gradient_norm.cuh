/*
gradient_norm.cuh -- gradient_norm.h on the GPU: gradients of type T, or fp32.
*/
#ifndef LLMC_GRADIENT_NORM_CUH
#define LLMC_GRADIENT_NORM_CUH

#include <assert.h>
#include <limits.h>
#include <string.h>

#include "llmc/base/wide_sum.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/gradient.h"
#include "llmc/ops/gradient_norm.h"

enum { NORM_SUM_THREADS_ = 1024, NORM_THREADS_ = 256, NORM_UNITS_ = 16 };

// Scratch for partial sums.
typedef struct {
    WideSum* partial; // (units / NORM_UNITS_) sums of NORM_UNITS_ units each
    int units;        // blocks of GRADIENT_BLOCK elements
} GradientNorm;

// Takes scratch for gradients of n elements, a multiple of GRADIENT_BLOCK.
static inline void gradient_norm_open(GradientNorm* norm, Memory* memory, size_t n) {
    const size_t units = n / GRADIENT_BLOCK;
    assert(n % GRADIENT_BLOCK == 0 && units <= INT_MAX);
    norm->units = (int)units;
    norm->partial = (WideSum*)memory_take(memory, "scratch: gradient norm", MEMORY_DEVICE,
                                          ceil_div(units, (size_t)NORM_UNITS_) * sizeof(WideSum));
}

// Returns the sum of squares of a unit to all lanes of a warp: a lane adds up 32 elements, a tree
// adds up the lanes. fp16 cannot overflow it: 65504^2 * 1024 is 4e12. Other types give infinity if
// gradients exceed 1e17, and the caller should see that.
template <class G> __device__ inline float unit_square_sum_(const G* unit) {
    constexpr int N = Pack<G>::SIZE;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < GRADIENT_BLOCK; i += 32 * N) {
        const Pack<G> pack = load_pack_once(unit + i + N * (threadIdx.x % 32));
#pragma unroll
        for (int k = 0; k < N; k++) {
            sum = fmaf(to_float(pack[k]), to_float(pack[k]), sum);
        }
    }
    return warp_sum(sum);
}

// A warp sums two units in fp32. The sums of units, warps and blocks are added as WideSum, so the
// result does not depend on where the array is cut, at multiples of a unit.
// grid   units / 16, rounded up      block   256      shared   8 WideSum
// moves  reads n G. Bound by memory.
// order  fixed, and the same on every GPU
template <class G>
__global__ void __launch_bounds__(NORM_THREADS_)
    square_sum_kernel_(WideSum* partial, const G* grads, int units) {
    SMEM_ARRAY(WideSum, of_warp, [NORM_THREADS_ / 32]);
    const int warp = threadIdx.x / 32, first = blockIdx.x * NORM_UNITS_;
    WideSum sum = {0, 0};
    for (int k = warp; k < NORM_UNITS_; k += NORM_THREADS_ / 32) {
        if (first + k < units) {
            wide_sum_add(&sum, unit_square_sum_(grads + (size_t)(first + k) * GRADIENT_BLOCK));
        }
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < NORM_THREADS_ / 32; w++) {
            wide_sum_merge(&sum, of_warp[w]);
        }
        partial[blockIdx.x] = sum;
    }
}

// Returns the sum over a warp to lane 0.
__device__ inline WideSum warp_wide_sum_(WideSum sum) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const WideSum other = {__shfl_down_sync(0xffffffffu, sum.high, distance),
                               __shfl_down_sync(0xffffffffu, sum.low, distance)};
        wide_sum_merge(&sum, other);
    }
    return sum;
}

// One block adds up n sums, and sets the result, or adds to it.
// grid   1      block   1024      shared   32 WideSum
// moves  reads n WideSum. Bound by latency.
// order  fixed
static __global__ void __launch_bounds__(NORM_SUM_THREADS_)
    sum_kernel_(WideSum* result, const WideSum* partial, int n, GradientMode mode) {
    SMEM_ARRAY(WideSum, of_warp, [32]);
    WideSum sum = {0, 0};
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < n; i += NORM_SUM_THREADS_) {
        wide_sum_merge(&sum, partial[i]);
    }
    sum = warp_wide_sum_(sum);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = warp_wide_sum_(of_warp[threadIdx.x % 32]);
    if (threadIdx.x == 0) {
        if (mode == GRADIENT_ADD) {
            wide_sum_merge(&sum, *result);
        }
        *result = sum;
    }
}

// Sets *result, in device memory, to the sum of squares of n gradients, before scaling by
// grad_scale, or adds it. n is a multiple of GRADIENT_BLOCK, at most as large as `norm` was opened
// for. NaN and infinity in any of them survive. Merging the sums of several parts, or ranks, gives
// the same bits as one sum over the whole gradient.
template <class T>
static inline void gradient_square_sum_of(WideSum* result, Gradient grads, size_t n, GradientMode mode,
                                          GradientNorm* norm, const Gpu* gpu) {
    const int units = (int)(n / GRADIENT_BLOCK), blocks = ceil_div(units, (int)NORM_UNITS_);
    assert((uintptr_t)grads.data % 16 == 0 && n % GRADIENT_BLOCK == 0 && units <= norm->units);
    if (blocks > 0) {
        GRADIENT_DISPATCH(grads, T,
                          launch(square_sum_kernel_<G>, blocks, NORM_THREADS_, 0, gpu, norm->partial,
                                 (const G*)grads.data, units));
    }
    launch(sum_kernel_, 1, NORM_SUM_THREADS_, 0, gpu, result, norm->partial, blocks, mode);
}

// Sets *result to the sum of squares of as many gradients as `norm` was opened for.
template <class T>
static inline void gradient_square_sum(WideSum* result, Gradient grads, GradientNorm* norm, const Gpu* gpu) {
    gradient_square_sum_of<T>(result, grads, (size_t)norm->units * GRADIENT_BLOCK, GRADIENT_SET, norm, gpu);
}

static inline double gradient_square_sum_bytes(double n, DType grads) {
    return n * (double)dtype_bytes(grads);
}

#endif
