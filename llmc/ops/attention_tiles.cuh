/*
attention_tiles.cuh -- what all kernels of attention share: sizes and places of heads, masks,
softmax and its gradient on tiles of scores in registers.

A tile has the layout of the results of mma_16816 and wgmma (ptx.cuh): element e of part (m, n) in
lane l = 4g + t is row 16m + g + 8(e / 2), column 8n + 2t + e % 2.
*/
#ifndef LLMC_ATTENTION_TILES_CUH
#define LLMC_ATTENTION_TILES_CUH

#include <float.h>

#include "llmc/ops/attention.h"
#include "llmc/ops/gradient.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/ops/softcap.cuh"

#define ATTENTION_LOG2_E 1.4426950408889634f // e^x = 2^(x ATTENTION_LOG2_E)

// Earlier keys that a query sees: all, or only keys of its document, as given by `starts`; or, in
// general, either of these, with keys of the same rows or gathered ones. The last one also caps
// scores. Kernels are compiled for each, because looking at documents, at chunks, and a cap, need
// registers; only the general ones for heads wider than 128.
typedef enum { ATTENTION_CAUSAL, ATTENTION_DOCUMENTS, ATTENTION_GENERAL, ATTENTION_CAPPED } AttentionMask;
__host__ __device__ constexpr bool attention_is_general(AttentionMask mask) {
    return mask >= ATTENTION_GENERAL;
}

// Arrays that both passes read, and that the forward pass sets (attention.h).
template <class X> struct AttentionPassGpu {
    AttentionSizes sizes;
    const int* starts; // or NULL
    const X* qkv;
    const X* kv; // gathered keys and values; NULL: use qkv's own
    X* out;
    float* lse;
};

// Returns the keys for general kernels: gathered ones, or those in qkv.
template <class X> static inline const X* attention_general_keys(const AttentionPassGpu<X>* pass) {
    return pass->kv ? pass->kv : pass->qkv + attention_queries_size(pass->sizes);
}

// Further arrays that the backward pass reads, and those that it sets. dbias is set or added to
// according to `mode`, unless it has no data; with gathered keys it never has.
template <class X> struct AttentionGradientsGpu {
    const X* dout;
    X *dqkv, *dkv; // dkv: with gathered keys
    Gradient dbias;
    GradientMode mode;
};

// Scratch of the backward pass. `rows` has (lse * ATTENTION_LOG2_E, delta) of every row of every
// head; Tp is T rounded up to ATTENTION_ROW_ALIGN, and rows from T on in the last tile are zeros.
// `sums` has the column sums of every tile of dqkv.
typedef struct {
    float2* rows; // (B, NH, Tp)
    float* sums;  // (B, tiles, QKV)
    size_t capacity, sums_capacity;
    unsigned* taken; // counter of tiles, 0 between passes (attention_wgmma.cuh)
    AttentionInstructions by;
    int way; // with ATTENTION_RACED or ATTENTION_BY_WGMMA: see attention_gpu_way
    int HS, is_capped;
} AttentionFlash;

// Arguments of all kernels. A block's index modulo `tiles` is its tile, the quotient its head, so
// blocks that run at the same time share keys and values in the L2 cache.
typedef struct {
    int T, NH, KV, HS, tiles;
    int Q, K; // columns of the queries and of the keys in qkv, of Q + 2 K
    AttentionScale scale;
    int packs;          // rows of heads can be read and written 16 bytes at a time
    TokenChunks chunks; // of general kernels
    int key_row;        // of general kernels: distance between rows of keys
} AttentionSize;

// Offsets of the block's head: of its q in qkv, of the k that it reads in qkv or kv (v follows K
// later), in out, lse and starts.
typedef struct {
    size_t in_q, in_k, in_out, in_lse, in_starts;
} AttentionHead;

__host__ __device__ inline size_t attention_stride(const AttentionSize& size) {
    return (size_t)size.Q + 2 * size.K;
}

// Return the number of keys of a sequence, the distance between their rows, and the column of the
// first one where rows of keys begin: in qkv, or in general at the keys.
template <AttentionMask MASK> __device__ inline int attention_last(const AttentionSize& size) {
    return attention_is_general(MASK) ? token_chunks_length(size.chunks, size.T) : size.T;
}
template <AttentionMask MASK> __device__ inline size_t attention_key_stride(const AttentionSize& size) {
    return attention_is_general(MASK) ? (size_t)size.key_row : attention_stride(size);
}
template <AttentionMask MASK> __device__ inline int attention_key_column(const AttentionSize& size) {
    return attention_is_general(MASK) ? 0 : size.Q;
}

// Returns the distance from the rows of a tile of queries, the first being `row`, to their
// positions in the sequence.
template <AttentionMask MASK> __device__ inline int attention_shift(int row, const AttentionSize& size) {
    return attention_is_general(MASK) ? token_chunks_position(size.chunks, row, size.T) - row : 0;
}

// Returns the offsets of head h of sequence b.
template <AttentionMask MASK>
__device__ inline AttentionHead attention_head(size_t b, int h, const AttentionSize& size) {
    const size_t token = b * size.T, stride = attention_stride(size), key = b * attention_last<MASK>(size);
    AttentionHead at;
    at.in_q = token * stride + h * size.HS;
    at.in_k = key * attention_key_stride<MASK>(size) + attention_key_column<MASK>(size) +
              h / (size.NH / size.KV) * size.HS;
    at.in_out = token * size.Q + h * size.HS;
    at.in_lse = (b * size.NH + h) * size.T;
    at.in_starts = key;
    return at;
}

// Returns the offsets of the block's head, if there is one block for each head of queries.
template <AttentionMask MASK>
__device__ inline AttentionHead attention_query_head(const AttentionSize& size) {
    const int head = blockIdx.x / size.tiles;
    return attention_head<MASK>(head / size.NH, head % size.NH, size);
}

// Returns the first key that query t sees; general kernels may have no documents.
template <AttentionMask MASK> __device__ inline int attention_start_of(const int* starts, int t) {
    return attention_is_general(MASK) && !starts ? 0 : starts[t];
}

// Returns the starts of the block's sequence.
template <AttentionMask MASK>
__device__ inline const int* attention_starts_of(const int* starts, const AttentionHead& at) {
    return MASK == ATTENTION_CAUSAL || (attention_is_general(MASK) && !starts) ? starts
                                                                               : starts + at.in_starts;
}

template <class X> __device__ inline unsigned attention_pair(float low, float high);
template <> __device__ inline unsigned attention_pair<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}
template <> __device__ inline unsigned attention_pair<fp16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <class X> __device__ inline void attention_store_pair(X* to, float low, float high) {
    *reinterpret_cast<unsigned*>(to) = attention_pair<X>(low, high);
}
__device__ inline void attention_store_pair(float* to, float low, float high) {
    *reinterpret_cast<float2*>(to) = make_float2(low, high);
}

// ---- scores ----

// Turns products q . k into s: with a cap, into t of softcap.h.
template <AttentionMask MASK, int M, int N>
__device__ inline void attention_cap(float (&s)[M][N][4], const AttentionSize& size) {
    if constexpr (MASK == ATTENTION_CAPPED) {
#pragma unroll
        for (int i = 0; i < M * N * 4; i++) {
            float& x = s[i / 4 / N][i / 4 % N][i % 4];
            x = softcap_tanh(x, size.scale.width);
        }
    }
}

// Returns the factor by which s becomes an exponent of 2.
template <AttentionMask MASK> __device__ inline float attention_exponent(const AttentionSize& size) {
    return ATTENTION_LOG2_E * (MASK == ATTENTION_CAPPED ? size.scale.factor : size.scale.scale);
}

// Returns the derivative of a score by q . k, without `scale`. A masked s is -infinity: its
// gradient is 0, which must not be multiplied by infinity.
template <AttentionMask MASK> __device__ inline float attention_slope(float s) {
    return MASK == ATTENTION_CAPPED ? softcap_slope(fmaxf(s, -1.0f)) : 1.0f;
}

// ---- softmax ----

// State of each row of a warp: about the largest s so far times `scale`, and the lane's share
// of the sum of the probabilities 2^(s * scale - max).
template <int M> struct AttentionSoftmax { float max[M][2], sum[M][2]; };

template <int M> __device__ inline void attention_softmax_open(AttentionSoftmax<M>& softmax) {
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        softmax.max[i / 2][i % 2] = -FLT_MAX;
        softmax.sum[i / 2][i % 2] = 0.0f;
    }
}

// Sets scores with keys later than the query to -infinity. Queries start at row0, keys at u0.
template <int M, int N> __device__ inline void attention_mask_later(float (&s)[M][N][4], int row0, int u0) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / 4 / N, n = i / 4 % N, e = i % 4;
        if (u0 + 8 * n + 2 * t + e % 2 > row0 + 16 * m + 8 * (e / 2) + g) {
            s[m][n][e] = -INFINITY;
        }
    }
}

// Return the maximum, or the sum, over the four lanes that share a row, to all four.
__device__ inline float attention_row_max_(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float attention_row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// `max` is raised only if the largest score exceeds it by more than this. Probabilities are then up
// to 2^8, which fp16 represents as precisely as 1. Sums are rescaled in the first tile of a row and
// hardly ever again.
#define ATTENTION_SLACK 8.0f

// Sets the largest score of each row in this tile, times `scale`. Returns whether one exceeds its
// `max` by more than ATTENTION_SLACK.
template <int M, int N>
__device__ inline bool attention_largest(float (&largest)[M][2], const float (&s)[M][N][4],
                                         const AttentionSoftmax<M>& softmax, float scale) {
    bool grew = false;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int m = i / 2, half = i % 2;
        float x = -INFINITY;
#pragma unroll
        for (int j = 0; j < 2 * N; j++) {
            x = fmaxf(x, s[m][j / 2][2 * half + j % 2]);
        }
        largest[m][half] = attention_row_max_(x) * scale;
        grew |= largest[m][half] > softmax.max[m][half] + ATTENTION_SLACK;
    }
    return grew;
}

// Gives rows with a score more than ATTENTION_SLACK above `max` a new `max`, and rescales their
// sums of probabilities to it. Sets the factor of all other sums of each row.
template <int M>
__device__ inline void attention_raise(float (&factor)[M][2], AttentionSoftmax<M>& softmax,
                                       const float (&largest)[M][2]) {
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int m = i / 2, half = i % 2;
        float& max = softmax.max[m][half];
        const float next = largest[m][half] > max + ATTENTION_SLACK ? largest[m][half] : max;
        factor[m][half] = exp2_approx(max - next);
        max = next;
        softmax.sum[m][half] *= factor[m][half];
    }
}

template <int M, int D>
__device__ inline void attention_rescale(float (&acc)[M][D][4], const float (&factor)[M][2]) {
#pragma unroll
    for (int i = 0; i < 4 * M * D; i++) {
        acc[i / 4 / D][i / 4 % D][i % 4] *= factor[i / 4 / D][i % 4 / 2];
    }
}

// Turns scores into probabilities relative to `max`. As `max` is always finite, masked keys get
// probability 0. The result of a row depends on no other row.
template <int M, int N>
__device__ inline void attention_probabilities(float (&s)[M][N][4], AttentionSoftmax<M>& softmax,
                                               float scale) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / 4 / N, e = i % 4;
        float& p = s[m][i / 4 % N][e];
        p = exp2_approx(fmaf(p, scale, -softmax.max[m][e / 2]));
        softmax.sum[m][e / 2] += p;
    }
}

// Sets acc to acc / sum, and lse to the log of the sum of e^s, for the warp's rows, which start at
// row0.
template <int M, int D>
__device__ inline void attention_finish(float (&acc)[M][D][4], float* lse, const AttentionSoftmax<M>& softmax,
                                        int row0, int T) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int m = i / 2, half = i % 2, row = row0 + 8 * i + lane / 4;
        const float sum = attention_row_sum(softmax.sum[m][half]), inverse = 1.0f / sum;
#pragma unroll
        for (int j = 0; j < 2 * D; j++) {
            acc[m][j / 2][2 * half + j % 2] *= inverse;
        }
        if (lane % 4 == 0 && row < T) {
            lse[row] = softmax.max[m][half] / ATTENTION_LOG2_E + logf(sum);
        }
    }
}

// ---- backward ----

enum { ATTENTION_ROWS_LEAST = 64 }; // rows of a tile, at least

static inline int attention_padded(int T) { return ceil_div(T, ATTENTION_ROW_ALIGN) * ATTENTION_ROW_ALIGN; }

template <int M> __device__ inline void attention_store_rows(float2* to, const float2 (&rows)[M][2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        if (lane % 4 == 0) {
            to[8 * i + lane / 4] = rows[i / 2][i % 2];
        }
    }
}

// Turns s and dp of one score into p and ds. The factor 1 / root of ds is applied to the sums
// at the end. If s is -infinity, both become 0.
template <AttentionMask MASK>
__device__ inline void attention_gradient_(float& s, float& dp, float shift, float delta, float scale) {
    const float slope = attention_slope<MASK>(s);
    s = exp2_approx(s * scale - shift);
    dp = s * (dp - delta) * slope;
}

// Turns s and dp into p and ds, where the warp's rows are keys and the columns queries. `rows` has
// lse and delta of the queries.
template <AttentionMask MASK, int M, int N>
__device__ inline void attention_gradient_of_keys(float (&s)[M][N][4], float (&dp)[M][N][4],
                                                  const float2* rows, float scale) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float4 two =
            // queries 8n + 2t and 8n + 2t + 1
            *reinterpret_cast<const float4*>(rows + 8 * n + 2 * t);
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            const int m = i / 4, e = i % 4;
            attention_gradient_<MASK>(s[m][n][e], dp[m][n][e], e % 2 ? two.z : two.x, e % 2 ? two.w : two.y,
                                      scale);
        }
    }
}

// Turns s into p, likewise.
template <int M, int N>
__device__ inline void attention_probabilities_of_keys(float (&s)[M][N][4], const float2* rows, float scale) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float4 two = *reinterpret_cast<const float4*>(rows + 8 * n + 2 * t);
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            float& p = s[i / 4][n][i % 4];
            p = exp2_approx(p * scale - (i % 2 ? two.z : two.x));
        }
    }
}

// Sets scores with queries earlier than the key to -infinity. The warp's keys start at u0, queries
// at t0.
template <int M, int N>
__device__ inline void attention_mask_earlier_queries(float (&s)[M][N][4], int u0, int t0) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / 4 / N, n = i / 4 % N, e = i % 4;
        if (u0 + 16 * m + 8 * (e / 2) + g > t0 + 8 * n + 2 * t + e % 2) {
            s[m][n][e] = -INFINITY;
        }
    }
}

// Array whose element t is the first key that query t sees. The row of `starts` is kept as an
// index: a pointer needs one more register.
template <AttentionMask MASK> struct AttentionStarts {
    const int* starts;
    int row;
    __device__ int operator[](int t) const { return attention_start_of<MASK>(starts, row + t); }
};

// Sets scores with queries of later documents to -infinity.
template <AttentionMask MASK, int M, int N>
__device__ inline void attention_mask_later_queries(float (&s)[M][N][4], AttentionStarts<MASK> first_key,
                                                    int u0, int t0, int T) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        const int n = i / 2, before = first_key[min(t0 + 8 * n + 2 * t + i % 2, T - 1)] - u0 - g;
#pragma unroll
        for (int row = 0; row < 2 * M; row++) {
            if (8 * row < before) {
                s[row / 2][n][row % 2 * 2 + i % 2] = -INFINITY;
            }
        }
    }
}

// Turns s and dp into p and ds, where the warp's rows are queries and the columns keys.
template <AttentionMask MASK, int M, int N>
__device__ inline void attention_gradient_of_queries(float (&s)[M][N][4], float (&dp)[M][N][4],
                                                     const float2 (&rows)[M][2], float scale) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / 4 / N, n = i / 4 % N, e = i % 4;
        attention_gradient_<MASK>(s[m][n][e], dp[m][n][e], rows[m][e / 2].x, rows[m][e / 2].y, scale);
    }
}

// ---- launchers ----

static inline AttentionSize attention_size(AttentionSizes sizes) {
    assert(sizes.NH % sizes.KV == 0);
    AttentionSize size = {};
    size.T = sizes.T;
    size.NH = sizes.NH;
    size.KV = sizes.KV;
    size.HS = sizes.HS;
    size.Q = attention_queries_size(sizes);
    size.K = attention_keys_size(sizes);
    size.scale = attention_scale(sizes.root, sizes.cap);
    size.chunks = sizes.chunks;
    return size;
}

// Checks that no tile of queries has parts of two chunks.
static inline void attention_check_chunks(AttentionSizes sizes) {
    CHECK(sizes.T % (2 * ATTENTION_ROW_ALIGN) == 0,
          "attention: chunks of %d / 2 tokens, wanted a multiple of %d", sizes.T, (int)ATTENTION_ROW_ALIGN);
}

// Returns the number of blocks, one for each tile of `rows` of the T rows of each of the `heads`
// heads. Sets size->tiles.
static inline unsigned attention_grid(AttentionSize* size, int T, size_t heads, int rows) {
    size->tiles = ceil_div(T, rows);
    CHECK(heads * size->tiles <= INT_MAX, "attention: %zu heads of %d tiles do not fit into a grid", heads,
          size->tiles);
    return (unsigned)(heads * size->tiles);
}

template <class X> static inline int attention_packs(int HS, const X* a, const X* b, const X* c, const X* d) {
    const uintptr_t addresses = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d;
    return HS % Pack<X>::SIZE == 0 && addresses % 16 == 0;
}

#endif
