/*
activation.cuh -- activation.h on the GPU: the same functions on T = float, bf16 or fp16, computed
in fp32.
*/
#ifndef LLMC_ACTIVATION_CUH
#define LLMC_ACTIVATION_CUH

#include "llmc/ops/activation.h"
#include "llmc/gpu/gpu.cuh"

#define GELU_THREADS 256

// Returns -2u. __expf of it is off by up to 2 + 1.2 |2u| units in the last place, most where the
// result is x or nearly 0.
__device__ inline float gelu_exponent_(float x) {
    return -2.0f * GELU_SCALE * x * (1.0f + GELU_CUBIC * x * x);
}

__device__ inline float gelu_value_(float x) { return __fdividef(x, 1.0f + __expf(gelu_exponent_(x))); }

// __fdividef divides by at most e^87; larger values would make e s = inf * 0. fminf drops NaN, but
// it comes back through x.
__device__ inline float gelu_slope_(float x) {
    const float e = __expf(fminf(gelu_exponent_(x), 87.0f)), s = __fdividef(1.0f, 1.0f + e);
    return s + 2.0f * x * s * (e * s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x);
}

// A thread computes one pack. The last pack, or every one if packs = 0, goes element by element.
// grid   ceil(n / (256 SIZE))      block   256      shared   none
// moves  n in, n out. Bound by memory.
// order  fixed: no sums.
// needs  addresses that are multiples of 16 bytes, if packs = 1
template <class T> __global__ void gelu_forward_kernel(T* out, const T* inp, size_t n, int packs) {
    const size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::SIZE;
    if (packs && first + Pack<T>::SIZE <= n) {
        Pack<T> x = load_pack_once(inp + first);
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) {
            x[i] = from_float<T>(gelu_value_(to_float(x[i])));
        }
        store_pack(out + first, x);
        return;
    }
    for (size_t i = first; i < n && i < first + Pack<T>::SIZE; i++) {
        out[i] = from_float<T>(gelu_value_(to_float(inp[i])));
    }
}

// A thread computes one pack, like gelu_forward_kernel. dinp may be dout: a thread reads its
// elements before it writes them.
// grid   ceil(n / (256 SIZE))      block   256      shared   none
// moves  2n in, n out. Bound by memory.
// order  fixed: no sums.
// needs  addresses that are multiples of 16 bytes, if packs = 1
template <class T>
__global__ void gelu_backward_kernel(T* dinp, const T* dout, const T* inp, size_t n, int packs) {
    const size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::SIZE;
    if (packs && first + Pack<T>::SIZE <= n) {
        const Pack<T> x = load_pack_once(inp + first);
        Pack<T> d = load_pack_once(dout + first);
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) {
            d[i] = from_float<T>(to_float(d[i]) * gelu_slope_(to_float(x[i])));
        }
        store_pack(dinp + first, d);
        return;
    }
    for (size_t i = first; i < n && i < first + Pack<T>::SIZE; i++) {
        dinp[i] = from_float<T>(to_float(dout[i]) * gelu_slope_(to_float(inp[i])));
    }
}

static inline int gelu_aligned_(const void* a, const void* b, const void* c) {
    return ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0;
}

static inline unsigned gelu_blocks_(size_t n, size_t pack) {
    return (unsigned)ceil_div(n, GELU_THREADS * pack);
}

template <class T> static inline void gelu_forward(T* out, const T* inp, size_t n, const Gpu* gpu) {
    if (n > 0) {
        launch(gelu_forward_kernel<T>, gelu_blocks_(n, Pack<T>::SIZE), GELU_THREADS, 0, gpu, out, inp, n,
               gelu_aligned_(out, inp, inp));
    }
}

template <class T>
static inline void gelu_backward(T* dinp, const T* dout, const T* inp, size_t n, const Gpu* gpu) {
    if (n > 0) {
        launch(gelu_backward_kernel<T>, gelu_blocks_(n, Pack<T>::SIZE), GELU_THREADS, 0, gpu, dinp, dout, inp,
               n, gelu_aligned_(dinp, dout, inp));
    }
}

#endif
