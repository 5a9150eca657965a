/*
value_embedding.cuh -- value_embedding.h on the GPU: the same functions on X = float, bf16 or fp16,
computed in fp32.
*/
#ifndef LLMC_VALUE_EMBEDDING_CUH
#define LLMC_VALUE_EMBEDDING_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/value_embedding.h"

template <class X> struct ValueEmbeddingGpu {
    ValueSizes sizes;
    int words; // rows of a table
    const X *inp, *gate, *table;
    const int* tokens;
};

// The token and head of a warp.
typedef struct {
    int n, h, lane;
} ValueWarp_;

__device__ inline ValueWarp_ value_warp_(const ValueSizes& s) {
    const int warp = blockIdx.x * 8 + threadIdx.x / 32;
    return {warp / s.KV, warp % s.KV, (int)threadIdx.x % 32};
}

// Returns the gate of a head, which a warp computes together.
template <class X>
__device__ inline float value_gate_(const ValueEmbeddingGpu<X>& v, int n, int h, int lane) {
    float z = 0;
    for (int c = lane; c < v.sizes.G; c += 32) {
        z += to_float(v.gate[h * v.sizes.G + c]) * to_float(v.inp[(size_t)n * v.sizes.C + c]);
    }
    return 2 / (1 + expf(-warp_sum(z)));
}

// One warp per token and head.
// grid   ceil(N KV / 8)      block   256      shared   none
// moves  2 N KV HS in, N KV HS out. Bound by memory.
// order  fixed
template <class X> __global__ void value_embedding_kernel(X* qkv, ValueEmbeddingGpu<X> v) {
    const ValueSizes s = v.sizes;
    const ValueWarp_ w = value_warp_(s);
    const int n = w.n, h = w.h, lane = w.lane;
    if (n >= s.N) {
        return;
    }
    const float g = value_gate_(v, n, h, lane);
    const X* row = v.table + value_row_at(s, v.tokens[n], h);
    X* to = qkv + value_at(s, n, h);
    for (int i = lane; i < s.HS; i += 32) {
        to[i] = from_float<X>(to_float(to[i]) + g * to_float(row[i]));
    }
}

// One warp per token and head.
// grid   ceil(N KV / 8)      block   256      shared   none
// moves  2 N KV HS in, N KV HS out. Bound by memory.
// order  fixed
template <class X>
__global__ void value_embedding_backward_kernel(X* dvalues, float* dz, const X* dqkv,
                                                ValueEmbeddingGpu<X> v) {
    const ValueSizes s = v.sizes;
    const ValueWarp_ w = value_warp_(s);
    const int n = w.n, h = w.h, lane = w.lane;
    if (n >= s.N) {
        return;
    }
    const float g = value_gate_(v, n, h, lane);
    const X *row = v.table + value_row_at(s, v.tokens[n], h), *dv = dqkv + value_at(s, n, h);
    X* to = dvalues + value_row_at(s, n, h);
    float sum = 0;
    for (int i = lane; i < s.HS; i += 32) {
        const float d = to_float(dv[i]);
        to[i] = from_float<X>(g * d);
        sum += d * to_float(row[i]);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        dz[(size_t)n * s.KV + h] = g * (1 - g / 2) * sum;
    }
}

// A thread adds to one of the first G columns of a token.
// grid   ceil(N G / 256)      block   256      shared   none
// moves  N KV fp32 and N G in, N G out
// order  fixed: by head
template <class X> __global__ void value_gate_input_kernel(X* dinp, const float* dz, ValueEmbeddingGpu<X> v) {
    const ValueSizes s = v.sizes;
    const int job = blockIdx.x * blockDim.x + threadIdx.x, n = job / s.G, c = job % s.G;
    if (n >= s.N) {
        return;
    }
    float sum = to_float(dinp[(size_t)n * s.C + c]);
    for (int h = 0; h < s.KV; h++) {
        sum += dz[(size_t)n * s.KV + h] * to_float(v.gate[h * s.G + c]);
    }
    dinp[(size_t)n * s.C + c] = from_float<X>(sum);
}

// Block p sums part p of the tokens; a thread has every 256th element of the gates.
// grid   VALUE_PARTS      block   256      shared   none
// moves  N KV fp32 and N G in, VALUE_PARTS KV G fp32 out
// order  fixed: by token
template <class X>
__global__ void value_gate_parts_kernel(float* parts, const float* dz, ValueEmbeddingGpu<X> v) {
    const ValueSizes s = v.sizes;
    const int each = (s.N + gridDim.x - 1) / gridDim.x, begin = min((int)blockIdx.x * each, s.N),
              end = min(begin + each, s.N);
    for (int e = threadIdx.x; e < s.KV * s.G; e += blockDim.x) {
        const int h = e / s.G, c = e % s.G;
        float sum = 0;
#pragma unroll 4
        for (int n = begin; n < end; n++) {
            sum += dz[(size_t)n * s.KV + h] * to_float(v.inp[(size_t)n * s.C + c]);
        }
        parts[(size_t)blockIdx.x * s.KV * s.G + e] = sum;
    }
}

// A thread adds up the parts of an element.
// grid   ceil(KV G / 256)      block   256      shared   none
// moves  VALUE_PARTS KV G fp32 in
// order  fixed: by part
template <class G>
__global__ void value_gate_sums_kernel(G* dgate, const float* parts, int elements, GradientMode mode) {
    const int e = blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= elements) {
        return;
    }
    float sum = mode == GRADIENT_ADD ? to_float(dgate[e]) : 0;
    for (int p = 0; p < VALUE_PARTS; p++) {
        sum += parts[(size_t)p * elements + e];
    }
    dgate[e] = from_float<G>(sum);
}

template <class X>
static inline void value_embedding_forward(X* qkv, ValueEmbeddingGpu<X> v, const Gpu* gpu) {
    launch(value_embedding_kernel<X>, ceil_div(v.sizes.N * v.sizes.KV, 8), 256, 0, gpu, qkv, v);
}

template <class X>
static inline void value_embedding_backward(X* dvalues, float* dz, const X* dqkv, ValueEmbeddingGpu<X> v,
                                            const Gpu* gpu) {
    launch(value_embedding_backward_kernel<X>, ceil_div(v.sizes.N * v.sizes.KV, 8), 256, 0, gpu, dvalues, dz,
           dqkv, v);
}

// `parts` has VALUE_PARTS KV G elements.
template <class X>
static inline void value_gate_backward(X* dinp, Gradient dgate, float* parts, const float* dz,
                                       ValueEmbeddingGpu<X> v, GradientMode mode, const Gpu* gpu) {
    const int elements = v.sizes.KV * v.sizes.G;
    launch(value_gate_input_kernel<X>, ceil_div(v.sizes.N * v.sizes.G, 256), 256, 0, gpu, dinp, dz, v);
    if (dgate.data) {
        launch(value_gate_parts_kernel<X>, VALUE_PARTS, 256, 0, gpu, parts, dz, v);
        GRADIENT_DISPATCH(dgate, X,
                          launch(value_gate_sums_kernel<G>, ceil_div(elements, 256), 256, 0, gpu,
                                 (G*)dgate.data, parts, elements, mode));
    }
}

#endif
