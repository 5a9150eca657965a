/*
latent.cuh -- latent.h on the GPU: the same functions on X = float, bf16 or fp16, computed in fp32.

A block moves the rows of one token. Generation has a kernel for one query per sequence, with one
block per head: it reads positions on the GPU, so a step can be one CUDA graph.
*/
#ifndef LLMC_LATENT_CUH
#define LLMC_LATENT_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/latent.h"
#include "llmc/ops/q8.cuh"

enum { LATENT_THREADS = 256, LATENT_CACHED_THREADS = 128 };

// Loops over the columns c of a row that the thread has.
#define LATENT_COLUMNS_(c, columns) for (int c = (int)threadIdx.x; c < (columns); c += (int)blockDim.x)

// A block sets the latents of a token from `first`, or its columns of `first` from them.
// grid   N      block   256      shared   none
// moves  N (query_rank + rank) in and out. Bound by memory.
// order  fixed: no sums.
template <class X> __global__ void latent_split_kernel(X* q, X* c, const X* first, LatentSizes s) {
    const size_t n = blockIdx.x;
    const X* row = first + n * latent_first(s);
    LATENT_COLUMNS_(i, s.query_rank) { q[n * s.query_rank + i] = row[i]; }
    LATENT_COLUMNS_(i, s.rank) { c[n * s.rank + i] = row[latent_queries(s) + i]; }
}
template <class X> __global__ void latent_join_kernel(X* dfirst, const X* dq, const X* dc, LatentSizes s) {
    const size_t n = blockIdx.x;
    X* row = dfirst + n * latent_first(s);
    LATENT_COLUMNS_(i, s.query_rank) { row[i] = dq[n * s.query_rank + i]; }
    LATENT_COLUMNS_(i, s.rank) { row[latent_queries(s) + i] = dc[n * s.rank + i]; }
}

template <class X>
static inline void latent_split(X* q, X* c, const X* first, LatentSizes s, const Gpu* gpu) {
    launch(latent_split_kernel<X>, (unsigned)s.N, LATENT_THREADS, 0, gpu, q, c, first, s);
}
template <class X>
static inline void latent_join(X* dfirst, const X* dq, const X* dc, LatentSizes s, const Gpu* gpu) {
    launch(latent_join_kernel<X>, (unsigned)s.N, LATENT_THREADS, 0, gpu, dfirst, dq, dc, s);
}

// A block sets queries, keys and values of a token. q: NULL if they have no latent; up: NULL in a
// step of decoding.
// grid   N      block   256      shared   none
// moves  N (NH HS + NH (P + V)) in, 3 N NH HS out. Bound by memory.
// order  fixed: no sums.
template <class X>
__global__ void latent_heads_kernel(X* qkv, const X* first, const X* q, const X* up, LatentSizes s) {
    const size_t n = blockIdx.x;
    const int Q = s.NH * s.HS, P = s.HS - s.D;
    const X *row = first + n * latent_first(s), *queries = q ? q + n * Q : row,
            *turning = row + latent_turning(s);
    X *to = qkv + n * 3 * Q, *values = to + 2 * Q;
    LATENT_COLUMNS_(i, Q) {
        const int h = i / s.HS, d = i % s.HS;
        const X zero = from_float<X>(0.0f);
        const X* of_head = up ? up + n * latent_up(s) + h * latent_head_up(s) : NULL;
        to[i] = queries[i];
        to[Q + i] = d < s.D ? turning[d] : of_head ? of_head[d - s.D] : zero;
        values[i] = of_head && d < s.value ? of_head[P + d] : zero;
    }
}

// A block does so backward; threads 0 ... D - 1 each sum a channel of the key that turns.
// grid   N      block   256      shared   none
// moves  3 N NH HS in, N (NH HS + NH (P + V)) out. Bound by memory.
// order  fixed: head by head
template <class X>
__global__ void latent_heads_backward_kernel(X* dfirst, X* dq, X* dup, const X* dqkv, LatentSizes s) {
    const size_t n = blockIdx.x;
    const int Q = s.NH * s.HS, P = s.HS - s.D;
    const X *from = dqkv + n * 3 * Q, *keys = from + Q, *values = keys + Q;
    X *row = dfirst + n * latent_first(s), *queries = dq ? dq + n * Q : row, *up = dup + n * latent_up(s);
    LATENT_COLUMNS_(i, Q) { queries[i] = from[i]; }
    LATENT_COLUMNS_(i, latent_up(s)) {
        const int h = i / latent_head_up(s), j = i % latent_head_up(s);
        up[i] = j < P ? keys[h * s.HS + s.D + j] : values[h * s.HS + j - P];
    }
    LATENT_COLUMNS_(d, s.D) {
        float sum = 0.0f;
        for (int h = 0; h < s.NH; h++) {
            sum += to_float(keys[h * s.HS + d]);
        }
        row[latent_turning(s) + d] = from_float<X>(sum);
    }
}

template <class X>
static inline void latent_heads(X* qkv, const X* first, const X* q, const X* up, LatentSizes s,
                                const Gpu* gpu) {
    launch(latent_heads_kernel<X>, (unsigned)s.N, LATENT_THREADS, 0, gpu, qkv, first, q, up, s);
}
template <class X>
static inline void latent_heads_backward(X* dfirst, X* dq, X* dup, const X* dqkv, LatentSizes s,
                                         const Gpu* gpu) {
    launch(latent_heads_backward_kernel<X>, (unsigned)s.N, LATENT_THREADS, 0, gpu, dfirst, dq, dup, dqkv, s);
}

// A block takes the padding out of what a token's heads see, or puts it into the gradient.
// grid   N      block   256      shared   none
// moves  N NH V in, and N NH V or N NH HS out. Bound by memory.
// order  fixed: no sums.
template <class X> __global__ void latent_values_kernel(X* values, const X* atty, LatentSizes s) {
    const size_t n = blockIdx.x;
    LATENT_COLUMNS_(i, s.NH * s.value) {
        values[n * s.NH * s.value + i] = atty[n * s.NH * s.HS + i / s.value * s.HS + i % s.value];
    }
}
template <class X> __global__ void latent_values_backward_kernel(X* datty, const X* dvalues, LatentSizes s) {
    const size_t n = blockIdx.x;
    LATENT_COLUMNS_(i, s.NH * s.HS) {
        const int h = i / s.HS, d = i % s.HS;
        datty[n * s.NH * s.HS + i] =
            d < s.value ? dvalues[(n * s.NH + h) * s.value + d] : from_float<X>(0.0f);
    }
}

template <class X> static inline void latent_values(X* values, const X* atty, LatentSizes s, const Gpu* gpu) {
    launch(latent_values_kernel<X>, (unsigned)s.N, LATENT_THREADS, 0, gpu, values, atty, s);
}
template <class X>
static inline void latent_values_backward(X* datty, const X* dvalues, LatentSizes s, const Gpu* gpu) {
    launch(latent_values_backward_kernel<X>, (unsigned)s.N, LATENT_THREADS, 0, gpu, datty, dvalues, s);
}

// ---- generation ----

// Latents and turned keys, like LatentCache, of type X.
template <class X> struct LatentCacheGpu {
    X* data; // (B, maxT, rank + D)
    int maxT;
};

// A block keeps a row: token positions[r] of sequence r or, without positions, token r of sequence
// `sequence`.
// grid   N      block   256      shared   none
// moves  N (rank + D) in and out. Bound by launching.
// order  fixed: no sums.
template <class X>
__global__ void latent_store_kernel(LatentCacheGpu<X> cache, const X* c, const X* qkv, const int* positions,
                                    int sequence, LatentSizes s) {
    const int r = (int)blockIdx.x, b = positions ? r : sequence, t = positions ? positions[r] : r,
              Q = s.NH * s.HS;
    X* to = cache.data + ((size_t)b * cache.maxT + t) * latent_kept(s);
    LATENT_COLUMNS_(i, latent_kept(s)) {
        to[i] = i < s.rank ? c[(size_t)r * s.rank + i] : qkv[(size_t)r * 3 * Q + Q + i - s.rank];
    }
}

template <class X>
static inline void latent_store(LatentCacheGpu<X> cache, const X* c, const X* qkv, const int* positions,
                                int sequence, LatentSizes s, const Gpu* gpu) {
    launch(latent_store_kernel<X>, (unsigned)s.N, LATENT_THREADS, 0, gpu, cache, c, qkv, positions, sequence,
           s);
}

// The matrix that makes up: of X, or of 8 bits if data is NULL.
template <class X> struct LatentWeightGpu {
    const X* data; // (NH (P + V), rank)
    QuantizedGpu q8;
};

template <class X> __device__ inline float latent_weight_(const LatentWeightGpu<X>& up, size_t at) {
    return up.data ? to_float(up.data[at])
                   : to_float(up.q8.scales[at / QUANTIZED_BLOCK]) * (float)up.q8.q[at];
}

// A block computes one head of row r, the query of token positions[r] of sequence r: first what the
// query is to latents, then tiles of keys, one per thread, then the values, one per warp.
// grid   rows * NH      block   128      shared   (2 rank + D + 128) floats
// moves  the latents of each sequence up to its position, for each head; the matrix once for each
//        sequence. Bound by memory.
// order  fixed, and the same for any number of sequences
template <class X>
__global__ void latent_cached_kernel(X* values, const X* qkv, const int* positions, LatentWeightGpu<X> up,
                                     float scale, LatentCacheGpu<X> cache, LatentSizes s) {
    SMEM_DYNAMIC(float, query); // (rank + D), sums of latents (rank), weights of a tile of keys
    float *acc = query + latent_kept(s), *p = acc + s.rank;
    const int r = blockIdx.x / s.NH, h = blockIdx.x % s.NH, tid = threadIdx.x, P = s.HS - s.D,
              keys = positions[r] + 1, row = latent_kept(s);
    const X *q = qkv + (size_t)r * 3 * s.NH * s.HS + h * s.HS,
            *kept = cache.data + (size_t)r * cache.maxT * row;
    const size_t of_head = (size_t)h * latent_head_up(s) * s.rank;
    LATENT_COLUMNS_(i, row) {
        float sum = i < s.rank ? 0.0f : to_float(q[i - s.rank]);
        for (int j = 0; j < P && i < s.rank; j++) {
            sum += to_float(q[s.D + j]) * latent_weight_(up, of_head + (size_t)j * s.rank + i);
        }
        query[i] = sum * scale;
        if (i < s.rank) {
            acc[i] = 0.0f;
        }
    }
    __syncthreads();
    float max = -INFINITY, sum = 0.0f;
    for (int u0 = 0; u0 < keys; u0 += LATENT_CACHED_THREADS) {
        const int count = min(keys - u0, (int)LATENT_CACHED_THREADS);
        float score = tid < count ? 0.0f : -INFINITY;
        for (int i = 0; i < row && tid < count; i++) {
            score += query[i] * to_float(kept[(size_t)(u0 + tid) * row + i]);
        }
        const float before = max;
        max = fmaxf(max, block_max(score));
        // `rescale` is 0 in the first tile, whose sums are 0.
        const float weight = expf(score - max), rescale = expf(before - max);
        p[tid] = weight;
        sum = sum * rescale + block_sum(weight); // also makes p visible
        LATENT_COLUMNS_(i, s.rank) {
            float total = acc[i] * rescale;
            for (int j = 0; j < count; j++) {
                total += p[j] * to_float(kept[(size_t)(u0 + j) * row + i]);
            }
            acc[i] = total;
        }
    } // no thread writes p again before block_max has seen all threads
    __syncthreads();
    for (int v = tid / 32; v < s.value; v += LATENT_CACHED_THREADS / 32) {
        float total = 0.0f;
        for (int i = tid % 32; i < s.rank; i += 32) {
            total += acc[i] * latent_weight_(up, of_head + (size_t)(P + v) * s.rank + i);
        }
        total = warp_sum(total) / sum;
        if (tid % 32 == 0) {
            values[(size_t)blockIdx.x * s.value + v] = from_float<X>(total);
        }
    }
}

template <class X>
static inline void latent_cached(X* values, const X* qkv, const int* positions, LatentWeightGpu<X> up,
                                 float scale, LatentCacheGpu<X> cache, LatentSizes s, const Gpu* gpu) {
    const size_t bytes = (2 * (size_t)s.rank + s.D + LATENT_CACHED_THREADS) * sizeof(float);
    CHECK(bytes <= 48 << 10, "attention: latents of %d channels, wanted at most 5,000", s.rank);
    launch(latent_cached_kernel<X>, (unsigned)(s.N * s.NH), LATENT_CACHED_THREADS, bytes, gpu, values, qkv,
           positions, up, scale, cache, s);
}

#endif
