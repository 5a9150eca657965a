/*
gate.cuh -- gate.h on the GPU: the same functions on X = float, bf16 or fp16, computed in fp32.
*/
#ifndef LLMC_GATE_CUH
#define LLMC_GATE_CUH

#include "llmc/gpu/elements.cuh"
#include "llmc/ops/gate.h"

__device__ inline float gate_sigmoid_(float x) { return 1.0f / (1.0f + expf(-x)); }

// A thread computes a pack, or an element.
// grid   ceil(n / (256 WIDTH))      block   256      shared   none
// moves  2n in, n out. Bound by memory.
// order  fixed: no sums.
// needs  n a multiple of WIDTH; addresses of 16 bytes if WIDTH is a pack
template <class X, int WIDTH>
__global__ void gate_forward_kernel(X* out, const X* inp, const X* gate, size_t n) {
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
    float x[WIDTH], g[WIDTH];
    if (at >= n) {
        return;
    }
    load_floats<WIDTH>(x, inp + at);
    load_floats<WIDTH>(g, gate + at);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        x[i] *= gate_sigmoid_(g[i]);
    }
    store_floats<WIDTH>(out + at, x);
}

// A thread computes a pack, or an element; dinp may be dout: it reads them before it writes.
// grid   ceil(n / (256 WIDTH))      block   256      shared   none
// moves  3n in, 2n out. Bound by memory.
// order  fixed: no sums.
// needs  n a multiple of WIDTH; addresses of 16 bytes if WIDTH is a pack
template <class X, int WIDTH>
__global__ void gate_backward_kernel(X* dinp, X* dgate, const X* dout, const X* inp, const X* gate,
                                     size_t n) {
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
    float x[WIDTH], g[WIDTH], d[WIDTH];
    if (at >= n) {
        return;
    }
    load_floats<WIDTH>(x, inp + at);
    load_floats<WIDTH>(g, gate + at);
    load_floats<WIDTH>(d, dout + at);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const float s = gate_sigmoid_(g[i]);
        g[i] = d[i] * x[i] * s * (1.0f - s);
        d[i] *= s;
    }
    store_floats<WIDTH>(dgate + at, g);
    store_floats<WIDTH>(dinp + at, d);
}

static inline int gate_has_packs_(size_t n, size_t size, uintptr_t addresses) {
    return n % size == 0 && addresses % 16 == 0;
}

template <class X>
static inline void gate_forward(X* out, const X* inp, const X* gate, size_t n, const Gpu* gpu) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int packs = gate_has_packs_(n, SIZE, (uintptr_t)out | (uintptr_t)inp | (uintptr_t)gate);
    launch(packs ? gate_forward_kernel<X, SIZE> : gate_forward_kernel<X, 1>,
           (unsigned)ceil_div(n, (size_t)(packs ? 256 * SIZE : 256)), 256, 0, gpu, out, inp, gate, n);
}

template <class X>
static inline void gate_backward(X* dinp, X* dgate, const X* dout, const X* inp, const X* gate, size_t n,
                                 const Gpu* gpu) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int packs = gate_has_packs_(
        n, SIZE, (uintptr_t)dinp | (uintptr_t)dgate | (uintptr_t)dout | (uintptr_t)inp | (uintptr_t)gate);
    launch(packs ? gate_backward_kernel<X, SIZE> : gate_backward_kernel<X, 1>,
           (unsigned)ceil_div(n, (size_t)(packs ? 256 * SIZE : 256)), 256, 0, gpu, dinp, dgate, dout, inp,
           gate, n);
}

#endif
