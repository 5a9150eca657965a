/*
q8.cuh -- q8.h on the GPU: weights in 8 bits, inputs and results of T = float, bf16 or fp16.

    out[n][o] = add[n][o] + sum_c inp[n][c] scale[o][c / 32] q[o][c] + bias[o]

    out     (N, OC)       T
    add     (N, OC)       T; may be NULL, or out
    inp     (N, C)        T; C a multiple of 32
    weight  q (OC, C)     int8
            scales (OC, C / 32)  fp16
    bias    (OC)          T; may be NULL

The blocks of a file are taken apart, so that a pack of numbers is one load. A kernel that reads the
weights once multiplies up to QUANTIZED_ROWS rows of input, which stay as they are. For more rows
quantized_expand makes a matrix of T for matmul_forward. q8_embedding is embedding_forward with an
8-bit matrix.
*/
#ifndef LLMC_Q8_CUH
#define LLMC_Q8_CUH

#include <assert.h>
#include <limits.h>

#include "llmc/ops/embedding.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/q8.h"

enum { QUANTIZED_ROWS = 8, QUANTIZED_THREADS_ = 256, QUANTIZED_LOAD_ = 16 };

typedef struct {
    const int8_t* q;    // (OC, C), at a multiple of 16 bytes
    const fp16* scales; // (OC, C / 32)
} QuantizedGpu;

// Return the bytes of a matrix of `elements`, a multiple of 32, and the matrix in such memory; on
// the host or the GPU.
static inline size_t quantized_gpu_bytes(size_t elements) {
    const size_t bytes = elements + elements / QUANTIZED_BLOCK * sizeof(uint16_t);
    return (bytes + 15) / 16 * 16;
}
static inline QuantizedGpu quantized_gpu_bind(const void* memory, size_t elements) {
    const int8_t* q = (const int8_t*)memory;
    return {q, (const fp16*)(const void*)(q + elements)};
}

// Takes the blocks of a matrix of `elements` apart in `staging`, quantized_gpu_bytes on the host,
// and queues the copy to `memory`, equally large on the GPU.
static inline void quantized_upload(void* memory, void* staging, const QuantizedBlock* blocks,
                                    size_t elements, const Gpu* gpu) {
    const size_t count = elements / QUANTIZED_BLOCK;
    char *q = (char*)staging, *scales = q + elements;
    for (size_t b = 0; b < count; b++) {
        memcpy(q + b * QUANTIZED_BLOCK, blocks[b].q, QUANTIZED_BLOCK);
        memcpy(scales + b * sizeof(uint16_t), &blocks[b].scale, sizeof(uint16_t));
    }
    CUDA_CHECK(cudaMemcpyAsync(memory, staging, elements + count * sizeof(uint16_t), cudaMemcpyHostToDevice,
                               gpu->stream));
}

// Loads COUNT 8-bit numbers (4, 8 or 16) at a multiple of COUNT bytes.
template <int COUNT> __device__ inline void quantized_load_(float to[COUNT], const int8_t* from) {
    struct alignas(COUNT) {
        int word[COUNT / 4];
    } words;
    memcpy(&words, __builtin_assume_aligned(from, COUNT), sizeof(words));
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        to[i] = (float)(int8_t)(words.word[i / 4] >> 8 * (i % 4));
    }
}

// A warp computes one column of the result: each lane one pack of columns of `weight` at a time,
// for all rows.
// grid   ceil(OC / 8)      block   256      shared   none
// moves  1.06 OC*C, N*C, N*OC of `add` in, N*OC out. Bound by memory for few rows.
// order  fixed: it follows from C alone, so a row has the same bits for any N. fmaf leaves the
//        compiler no choice.
// needs  N <= ROWS; inp and weight.q at multiples of 16 bytes
template <class T, int ROWS>
__global__ void __launch_bounds__(QUANTIZED_THREADS_)
    q8_matmul_kernel(T* out, const T* add, const T* inp, QuantizedGpu weight, const T* bias, int N, int C,
                     int OC) {
    const int lane = (int)threadIdx.x % 32, o = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (o >= OC) {
        return;
    }
    constexpr int SIZE = Pack<T>::SIZE;
    float sum[ROWS] = {}, w[SIZE];
    for (int c = lane * SIZE; c < C; c += 32 * SIZE) {
        const size_t at = (size_t)o * C + c;
        const float scale = to_float(weight.scales[at / QUANTIZED_BLOCK]);
        quantized_load_<SIZE>(w, weight.q + at);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Pack<T> x = load_pack(inp + (size_t)min(r, N - 1) * C + c);
            float dot = 0;
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                dot = fmaf(w[i], to_float(x[i]), dot);
            }
            sum[r] = fmaf(scale, dot, sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float total = warp_sum(sum[r]);
        if (lane == 0 && r < N) {
            const size_t at = (size_t)r * OC + o;
            const float b = bias ? to_float(bias[o]) : 0.0f, a = add ? to_float(add[at]) : 0.0f;
            out[at] = from_float<T>(a + (total + b));
        }
    }
}

// Sets out (N, OC) for N <= QUANTIZED_ROWS rows.
template <class T>
static inline void q8_matmul(T* out, const T* add, const T* inp, QuantizedGpu weight, const T* bias,
                             MatmulSizes sizes, const Gpu* gpu) {
    const int N = sizes.N, C = sizes.C, OC = sizes.OC;
    assert(N >= 1 && N <= QUANTIZED_ROWS && C % QUANTIZED_BLOCK == 0);
    const auto kernel = N == 1   ? q8_matmul_kernel<T, 1>
                        : N <= 4 ? q8_matmul_kernel<T, 4>
                                 : q8_matmul_kernel<T, QUANTIZED_ROWS>;
    launch(kernel, (unsigned)ceil_div(OC, QUANTIZED_THREADS_ / 32), QUANTIZED_THREADS_, 0, gpu, out, add, inp,
           weight, bias, N, C, OC);
}

// A thread expands 16 numbers.
// grid   ceil(elements / 4096)      block   256      shared   none
// moves  1.06 elements in, elements out. Bound by memory.
// order  fixed: no sums.
// needs  elements a multiple of 32; addresses at multiples of 16 bytes
template <class T> __global__ void quantized_expand_kernel(T* out, QuantizedGpu weight, size_t elements) {
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * QUANTIZED_LOAD_;
    if (at >= elements) {
        return;
    }
    const float scale = to_float(weight.scales[at / QUANTIZED_BLOCK]);
    float w[QUANTIZED_LOAD_];
    quantized_load_<QUANTIZED_LOAD_>(w, weight.q + at);
#pragma unroll
    for (int i = 0; i < QUANTIZED_LOAD_; i += Pack<T>::SIZE) {
        Pack<T> pack;
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; j++) {
            pack[j] = from_float<T>(scale * w[i + j]);
        }
        store_pack(out + at + i, pack);
    }
}

// Sets out, `elements` of T, to the rounded values of the blocks.
template <class T>
static inline void quantized_expand(T* out, QuantizedGpu weight, size_t elements, const Gpu* gpu) {
    const size_t per_block = (size_t)QUANTIZED_THREADS_ * QUANTIZED_LOAD_;
    launch(quantized_expand_kernel<T>, (unsigned)ceil_div(elements, per_block), QUANTIZED_THREADS_, 0, gpu,
           out, weight, elements);
}

// A thread computes one element. wte has the rows of batch.words; the embedding of any other token
// is zeros.
// grid   ceil(N*C / 256)      block   256      shared   none
// moves  N*C of 8 bits and N*C of wpe in, N*C out. Small compared with a matmul.
// order  fixed: no sums.
template <class X>
__global__ void q8_embedding_kernel(X* out, const int* tokens, QuantizedGpu wte, const X* wpe,
                                    EmbeddingBatch batch) {
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x, C = (size_t)batch.C;
    const int n = (int)(at / C), c = (int)(at % C);
    if (n < batch.N) {
        const int row = embedding_row(batch.words, tokens[n]);
        const size_t from = (size_t)(row < 0 ? 0 : row) * C + c;
        const float value = to_float(wte.scales[from / QUANTIZED_BLOCK]) * (float)wte.q[from];
        const float token = row < 0 ? 0.0f : value;
        const float position =
            wpe ? to_float(wpe[(size_t)embedding_position(batch.positions, n, batch.T) * C + c]) : 0.0f;
        out[at] = from_float<X>(token + position);
    }
}

// Does the same as embedding_forward, from 8 bits.
template <class X>
static inline void q8_embedding(X* out, const int* tokens, QuantizedGpu wte, const X* wpe,
                                EmbeddingBatch batch, const Gpu* gpu) {
    const size_t elements = (size_t)batch.N * batch.C;
    launch(q8_embedding_kernel<X>, (unsigned)ceil_div(elements, (size_t)QUANTIZED_THREADS_),
           QUANTIZED_THREADS_, 0, gpu, out, tokens, wte, wpe, batch);
}

#endif
