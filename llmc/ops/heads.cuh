/*
heads.cuh -- heads.h on the GPU: the same functions on X = float, bf16 or fp16, computed in fp32.

A block processes one head of HEADS_TOKENS tokens, a warp one of these tokens at a time. Lane i has
the pairs of columns i and i + 32, so heads have up to 128 columns. Heads that only turn have a
kernel of their own: a thread turns the same 16 bytes of HEADS_TURNED heads of a token.

heads_backward leaves the sums of a block in `sums`, for B * NH heads, then B * KV ones, and
column_sums.cuh adds them up in a fixed order.

Norms of all heads together have kernels of their own, before the turn: in the forward pass a block
has the queries or the keys of a token, in the backward pass those of HEADS_TOKENS tokens.
*/
#ifndef LLMC_HEADS_CUH
#define LLMC_HEADS_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/heads.h"

enum {
    HEADS_WARPS = 8,
    HEADS_TOKENS = 64,
    HEADS_COLUMNS_ = 4, // of a lane, in two pairs
    HEADS_TURNED = 4,
    HEADS_TURN_THREADS = 256,
    HEADS_ROW_THREADS = 512,
    HEADS_ROW_COLUMNS_ = 16, // most columns of a thread, of all heads together
    HEADS_WIDEST = 32 * HEADS_COLUMNS_
};

// Heads, like those of heads.h, of type X.
template <class X> struct HeadsGpu {
    HeadsKind kind;
    float eps;
    AttentionSizes sizes;
    Rope rope;
    const int* positions;
    const X *qnormw, *knormw;
    X* raw;
    float* rstd;
};

template <class X> static inline int heads_do_nothing(const HeadsGpu<X>* heads) {
    return heads->kind == HEADS_PLAIN && !heads->rope.table;
}

// ---- a lane's columns of a head ----

template <class X> struct alignas(2 * sizeof(X)) HeadsPair_ { X e, o; };

// Returns the first column of the lane's pair i.
__device__ inline int heads_column_(int i) { return 2 * ((int)threadIdx.x % 32 + 32 * i); }

// Loads the lane's columns of a head; columns from HS on are 0.
template <class X> __device__ inline void heads_load_(float (&x)[HEADS_COLUMNS_], const X* head, int HS) {
#pragma unroll
    for (int i = 0; i < HEADS_COLUMNS_ / 2; i++) {
        const int c = heads_column_(i);
        x[2 * i] = x[2 * i + 1] = 0.0f;
        if (c < HS) {
            const HeadsPair_<X> pair = *reinterpret_cast<const HeadsPair_<X>*>(head + c);
            x[2 * i] = to_float(pair.e);
            x[2 * i + 1] = to_float(pair.o);
        }
    }
}

__device__ inline void heads_copy_(float (&to)[HEADS_COLUMNS_], const float (&from)[HEADS_COLUMNS_]) {
#pragma unroll
    for (int i = 0; i < HEADS_COLUMNS_; i++) {
        to[i] = from[i];
    }
}

template <class X> __device__ inline void heads_store_(X* head, const float (&x)[HEADS_COLUMNS_], int HS) {
#pragma unroll
    for (int i = 0; i < HEADS_COLUMNS_ / 2; i++) {
        const int c = heads_column_(i);
        if (c < HS) {
            const HeadsPair_<X> pair = {from_float<X>(x[2 * i]), from_float<X>(x[2 * i + 1])};
            *reinterpret_cast<HeadsPair_<X>*>(head + c) = pair;
        }
    }
}

// Turns the lane's pairs by its columns of the angles, forward (sign 1) or back (-1).
__device__ inline void heads_turn_(float (&x)[HEADS_COLUMNS_], const float (&angles)[HEADS_COLUMNS_],
                                   float sign) {
#pragma unroll
    for (int i = 0; i < HEADS_COLUMNS_; i += 2) {
        const float c = angles[i], s = sign * angles[i + 1], e = x[i], o = x[i + 1];
        x[i] = e * c - o * s;
        x[i + 1] = o * c + e * s;
    }
}

// Returns the product of two rows of the warp, to all lanes.
__device__ inline float heads_dot_(const float (&x)[HEADS_COLUMNS_], const float (&y)[HEADS_COLUMNS_]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HEADS_COLUMNS_; i++) {
        sum += x[i] * y[i];
    }
    return warp_sum(sum);
}

template <class X>
__device__ inline float heads_rstd_(const float (&x)[HEADS_COLUMNS_], const HeadsGpu<X>& heads) {
    return 1.0f / sqrtf(heads_dot_(x, x) / (float)heads.sizes.HS + heads.eps);
}

template <class X> __device__ inline const float* heads_angles_(const HeadsGpu<X>& heads, int n) {
    const int T = heads.sizes.T;
    return rope_at(heads.rope, heads.positions ? heads.positions[n]
                                               : token_chunks_position(heads.sizes.chunks, n % T, T));
}

// Loads the lane's columns of the weights of head h.
template <class X>
__device__ inline void heads_weight_(float (&weight)[HEADS_COLUMNS_], const HeadsGpu<X>& heads, int h) {
    heads_load_(weight, h < heads.sizes.NH ? heads.qnormw : heads.knormw, heads.sizes.HS);
}

// Offsets of head h of token n: in qkv, in raw, and in rstd.
typedef struct {
    size_t in_qkv, in_raw, in_rstd;
} HeadsPlace_;

__device__ inline HeadsPlace_ heads_place_(const AttentionSizes& sizes, int n, int h) {
    const size_t head = (size_t)n * (sizes.NH + sizes.KV) + h;
    return {(size_t)n * attention_qkv_size(sizes) + h * sizes.HS, head * sizes.HS, head};
}

// ---- kernels ----

// grid   ceil(N / 64), NH + KV      block   256 = 8 tokens at a time      shared   none
// moves  N*(NH + KV)*HS in and out, with weights also to raw; angles from L2. Bound by memory.
// order  fixed
// needs  HS even and at most 128
template <class X>
__global__ void __launch_bounds__(32 * HEADS_WARPS) heads_forward_kernel(X* qkv, HeadsGpu<X> heads, int N) {
    const int HS = heads.sizes.HS, h = (int)blockIdx.y, first = (int)blockIdx.x * HEADS_TOKENS,
              end = min(first + HEADS_TOKENS, N);
    float x[HEADS_COLUMNS_], next[HEADS_COLUMNS_] = {}, angles[HEADS_COLUMNS_] = {}, weight[HEADS_COLUMNS_];
    const auto load = [&](int n) { // a token ahead
        if (n < end) {
            heads_load_(next, qkv + heads_place_(heads.sizes, n, h).in_qkv, HS);
        }
    };
    if (heads.kind == HEADS_NORM) {
        heads_weight_(weight, heads, h);
    }
    load(first + (int)threadIdx.x / 32);
    for (int n = first + (int)threadIdx.x / 32; n < end; n += HEADS_WARPS) {
        const HeadsPlace_ at = heads_place_(heads.sizes, n, h);
        heads_copy_(x, next);
        load(n + HEADS_WARPS);
        if (heads.rope.table) {
            heads_load_(angles, heads_angles_(heads, n), HS);
        }
        if (heads.kind == HEADS_NORM && heads.raw) {
            heads_store_(heads.raw + at.in_raw, x, HS);
        }
        if (heads.kind != HEADS_PLAIN) {
            const float r = heads_rstd_(x, heads);
#pragma unroll
            for (int i = 0; i < HEADS_COLUMNS_; i++) {
                x[i] *= heads.kind == HEADS_NORM ? r * weight[i] : r;
            }
            if (heads.kind == HEADS_UNIT_NORM && threadIdx.x % 32 == 0) {
                heads.rstd[at.in_rstd] = r;
            }
        }
        if (heads.rope.table) {
            heads_turn_(x, angles, 1.0f);
        }
        heads_store_(qkv + at.in_qkv, x, HS);
    }
}

// Turns g into the gradient before a norm: r (g - x r mean(g x r)).
__device__ inline void heads_norm_backward_(float (&g)[HEADS_COLUMNS_], const float (&x)[HEADS_COLUMNS_],
                                            float r, float mean) {
#pragma unroll
    for (int i = 0; i < HEADS_COLUMNS_; i++) {
        g[i] = r * (g[i] - x[i] * mean);
    }
}

// Adds up the sums of the block's warps, in order: sets `to` (HS).
__device__ inline void heads_block_sums_(float* to, const float (&sum)[HEADS_COLUMNS_], int HS) {
    SMEM_ARRAY(float, of_warp, [HEADS_WARPS][HEADS_WIDEST]);
#pragma unroll
    for (int i = 0; i < HEADS_COLUMNS_; i++) {
        of_warp[threadIdx.x / 32][heads_column_(i / 2) + i % 2] = sum[i];
    }
    __syncthreads();
    for (int c = (int)threadIdx.x; c < HS; c += 32 * HEADS_WARPS) {
        float total = 0.0f;
        for (int w = 0; w < HEADS_WARPS; w++) {
            total += of_warp[w][c];
        }
        to[c] = total;
    }
}

// grid   ceil(N / 64), NH + KV      block   256 = 8 tokens at a time      shared   4 KiB
// moves  2*N*(NH + KV)*HS in, half of it out (without a norm 1 in, 1 out); HS fp32 out per block.
//        Bound by memory.
// order  fixed
// needs  HS even and at most 128
template <class X>
__global__ void __launch_bounds__(32 * HEADS_WARPS)
    heads_backward_kernel(X* dqkv, float* sums, const X* qkv, HeadsGpu<X> heads, int N) {
    const AttentionSizes sizes = heads.sizes;
    const int HS = sizes.HS, h = (int)blockIdx.y, first = (int)blockIdx.x * HEADS_TOKENS,
              end = min(first + HEADS_TOKENS, N);
    float g[HEADS_COLUMNS_], x[HEADS_COLUMNS_] = {}, next_g[HEADS_COLUMNS_] = {}, next_x[HEADS_COLUMNS_] = {},
                             angles[HEADS_COLUMNS_] = {}, weight[HEADS_COLUMNS_], sum[HEADS_COLUMNS_] = {};
    const auto load = [&](int n) { // a token ahead
        if (n < end) {
            const HeadsPlace_ at = heads_place_(sizes, n, h);
            heads_load_(next_g, dqkv + at.in_qkv, HS);
            if (heads.kind != HEADS_PLAIN) {
                heads_load_(next_x, heads.kind == HEADS_NORM ? heads.raw + at.in_raw : qkv + at.in_qkv, HS);
            }
        }
    };
    if (heads.kind == HEADS_NORM) {
        heads_weight_(weight, heads, h);
    }
    load(first + (int)threadIdx.x / 32);
    for (int n = first + (int)threadIdx.x / 32; n < end; n += HEADS_WARPS) {
        const HeadsPlace_ at = heads_place_(sizes, n, h);
        heads_copy_(g, next_g);
        heads_copy_(x, next_x);
        load(n + HEADS_WARPS);
        if (heads.rope.table) {
            heads_load_(angles, heads_angles_(heads, n), HS);
        }
        if (heads.kind == HEADS_UNIT_NORM) { // x r is the output, turned, as is g
            heads_norm_backward_(g, x, heads.rstd[at.in_rstd], heads_dot_(g, x) / (float)HS);
        }
        if (heads.rope.table) {
            heads_turn_(g, angles, -1.0f);
        }
        if (heads.kind == HEADS_NORM) {
            const float r = heads_rstd_(x, heads);
#pragma unroll
            for (int i = 0; i < HEADS_COLUMNS_; i++) {
                x[i] *= r;
                sum[i] += g[i] * x[i];
                g[i] *= weight[i];
            }
            heads_norm_backward_(g, x, r, heads_dot_(g, x) / (float)HS);
        }
        heads_store_(dqkv + at.in_qkv, g, HS);
    }
    if (heads.kind == HEADS_NORM) { // query heads, then key heads, of all groups of tokens
        const size_t groups = gridDim.x, of_queries = groups * sizes.NH;
        const size_t row = h < sizes.NH ? blockIdx.x * (size_t)sizes.NH + h
                                        : of_queries + blockIdx.x * (size_t)sizes.KV + h - sizes.NH;
        heads_block_sums_(sums + row * HS, sum, HS);
    }
}

// ---- the turn alone ----

// Turns a pack by `angles`.
template <class X>
__device__ inline void heads_turn_pack_(X* to, const Pack<X>& from, const float (&angles)[Pack<X>::SIZE],
                                        float sign) {
    constexpr int SIZE = Pack<X>::SIZE;
    float x[SIZE];
    Pack<X> turned;
    unpack(x, from);
#pragma unroll
    for (int i = 0; i < SIZE; i += 2) {
        const float c = angles[i], s = sign * angles[i + 1];
        turned[i] = from_float<X>(x[i] * c - x[i + 1] * s);
        turned[i + 1] = from_float<X>(x[i + 1] * c + x[i] * s);
    }
    store_pack(to, turned);
}

// A thread turns a pack of heads g, g + groups ... of token n, forward (sign 1) or back (-1): the
// threads of a warp have packs side by side.
// grid   ceil(N groups HS / 8 / 256), groups = ceil((NH + KV) / 4)      block   256      shared
//        none
// moves  N*(NH + KV)*HS in and out; angles from L1, (NH + KV) / 4 times HS fp32 a token. Bound by
//        memory: 4*N*(NH + KV)*HS bytes in 16 bits, of llama:1b with 8192 tokens 84 MB, on an H200
//        at 4.8 TB/s at least 17.5 us.
// order  fixed
// needs  HS a multiple of a pack
template <class X>
__global__ void __launch_bounds__(HEADS_TURN_THREADS)
    heads_turn_kernel(X* x, HeadsGpu<X> heads, float sign, int N) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int HS = heads.sizes.HS, count = heads.sizes.NH + heads.sizes.KV,
              groups = ceil_div(count, (int)HEADS_TURNED), packs = HS / SIZE;
    const size_t i = (size_t)blockIdx.x * HEADS_TURN_THREADS + threadIdx.x;
    const int n = (int)(i / (groups * packs)), in_token = (int)(i % (groups * packs)), g = in_token / packs,
              col = in_token % packs * SIZE;
    if (n >= N) {
        return;
    }
    X* token = x + (size_t)n * attention_qkv_size(heads.sizes) + col;
    const float* from = heads_angles_(heads, n) + col;
    Pack<X> pack[HEADS_TURNED];
    float angles[SIZE];
#pragma unroll
    for (int j = 0; j < HEADS_TURNED; j++) {
        if (g + j * groups < count) {
            pack[j] = load_pack(token + (g + j * groups) * HS);
        }
    }
#pragma unroll
    for (int j = 0; j < SIZE; j += 4) {
        unpack(angles + j, load_pack(from + j));
    }
#pragma unroll
    for (int j = 0; j < HEADS_TURNED; j++) {
        if (g + j * groups < count) {
            heads_turn_pack_(token + (g + j * groups) * HS, pack[j], angles, sign);
        }
    }
}

// ---- norms of all heads together ----

// The queries of a token, or its keys: their place in qkv, in raw and in the columns of both, their
// columns, and their weights.
template <class X> struct HeadsRow_ {
    size_t in_qkv, in_raw;
    int cols;
    const X* weight;
};

template <class X> __device__ inline HeadsRow_<X> heads_row_(const HeadsGpu<X>& heads, int n, int is_keys) {
    const AttentionSizes sizes = heads.sizes;
    const int Q = attention_queries_size(sizes), K = attention_keys_size(sizes), first = is_keys ? Q : 0;
    return {(size_t)n * attention_qkv_size(sizes) + first, (size_t)n * (Q + K) + first, is_keys ? K : Q,
            is_keys ? heads.knormw : heads.qnormw};
}

// A block normalizes the queries, or the keys, of a token.
// grid   N, 2      block   512      shared   128 bytes
// moves  N*(NH + KV)*HS in and out, also to raw. Bound by memory.
// order  fixed
template <class X>
__global__ void __launch_bounds__(HEADS_ROW_THREADS) heads_row_forward_kernel(X* qkv, HeadsGpu<X> heads) {
    const HeadsRow_<X> row = heads_row_(heads, (int)blockIdx.x, (int)blockIdx.y);
    X* x = qkv + row.in_qkv;
    float squares = 0.0f;
    for (int c = (int)threadIdx.x; c < row.cols; c += HEADS_ROW_THREADS) {
        const float value = to_float(x[c]);
        squares += value * value;
        if (heads.raw) {
            heads.raw[row.in_raw + c] = x[c];
        }
    }
    const float r = 1.0f / sqrtf(block_sum(squares) / (float)row.cols + heads.eps);
    for (int c = (int)threadIdx.x; c < row.cols; c += HEADS_ROW_THREADS) {
        x[c] = from_float<X>(to_float(x[c]) * r * to_float(row.weight[c]));
    }
}

// A block turns dqkv of the queries, or the keys, of up to 64 tokens into the gradient before their
// norm, a token at a time; sets its sums for the weights.
// grid   ceil(N / 64), 2      block   512      shared   128 bytes
// moves  2*N*(NH + KV)*HS in, half of it out; (NH + KV)*HS fp32 out per block. Bound by memory.
// order  fixed
// needs  at most 16 * 512 columns
template <class X>
__global__ void __launch_bounds__(HEADS_ROW_THREADS)
    heads_row_backward_kernel(X* dqkv, float* sums, HeadsGpu<X> heads, int N) {
    const int is_keys = (int)blockIdx.y, first = (int)blockIdx.x * HEADS_TOKENS;
    const size_t queries = (size_t)gridDim.x * attention_queries_size(heads.sizes);
    float sum[HEADS_ROW_COLUMNS_] = {};
    for (int n = first; n < min(first + HEADS_TOKENS, N); n++) {
        const HeadsRow_<X> row = heads_row_(heads, n, is_keys);
        float g[HEADS_ROW_COLUMNS_] = {}, x[HEADS_ROW_COLUMNS_] = {}, squares = 0.0f, product = 0.0f;
#pragma unroll
        for (int i = 0; i < HEADS_ROW_COLUMNS_; i++) {
            const int c = (int)threadIdx.x + i * HEADS_ROW_THREADS;
            if (c < row.cols) {
                g[i] = to_float(dqkv[row.in_qkv + c]);
                x[i] = to_float(heads.raw[row.in_raw + c]);
                squares += x[i] * x[i];
                product += g[i] * to_float(row.weight[c]) * x[i];
            }
        }
        const float r = 1.0f / sqrtf(block_sum(squares) / (float)row.cols + heads.eps),
                    mean = block_sum(product) * r / (float)row.cols;
#pragma unroll
        for (int i = 0; i < HEADS_ROW_COLUMNS_; i++) {
            const int c = (int)threadIdx.x + i * HEADS_ROW_THREADS;
            if (c < row.cols) {
                sum[i] += g[i] * (x[i] * r);
                dqkv[row.in_qkv + c] = from_float<X>(r * (g[i] * to_float(row.weight[c]) - x[i] * r * mean));
            }
        }
    }
    const int cols = heads_row_(heads, 0, is_keys).cols;
    float* to = sums + (is_keys ? queries : 0) + (size_t)blockIdx.x * cols;
#pragma unroll
    for (int i = 0; i < HEADS_ROW_COLUMNS_; i++) {
        const int c = (int)threadIdx.x + i * HEADS_ROW_THREADS;
        if (c < cols) {
            to[c] = sum[i];
        }
    }
}

// ---- launchers ----

// Returns the heads without a norm of their own: those that have one together only turn.
template <class X> static inline HeadsGpu<X> heads_alone_(const HeadsGpu<X>* heads) {
    HeadsGpu<X> alone = *heads;
    alone.kind = heads->kind == HEADS_ROW_NORM ? HEADS_PLAIN : heads->kind;
    return alone;
}

template <class X> static inline dim3 heads_grid_(const HeadsGpu<X>* heads) {
    const AttentionSizes sizes = heads->sizes;
    CHECK(sizes.HS % 2 == 0 && sizes.HS <= HEADS_WIDEST,
          "norms and positions of heads: heads of size %d, wanted an even number, at most %d", sizes.HS,
          (int)HEADS_WIDEST);
    return dim3((unsigned)ceil_div(sizes.B * sizes.T, (int)HEADS_TOKENS), (unsigned)(sizes.NH + sizes.KV));
}

// Returns 1 if heads_turn_kernel computes what heads without a norm of their own need.
template <class X> static inline int heads_only_turn_(const HeadsGpu<X>* alone) {
    return alone->kind == HEADS_PLAIN && alone->sizes.HS % Pack<X>::SIZE == 0;
}

template <class X>
static inline void heads_turn_all_(X* x, const HeadsGpu<X>* alone, float sign, const Gpu* gpu) {
    const int N = alone->sizes.B * alone->sizes.T,
              groups = ceil_div(alone->sizes.NH + alone->sizes.KV, (int)HEADS_TURNED);
    const size_t threads = (size_t)N * (size_t)(groups * (alone->sizes.HS / Pack<X>::SIZE));
    launch(heads_turn_kernel<X>, (unsigned)ceil_div(threads, (size_t)HEADS_TURN_THREADS), HEADS_TURN_THREADS,
           0, gpu, x, *alone, sign, N);
}

template <class X> static inline void heads_forward(X* qkv, const HeadsGpu<X>* heads, const Gpu* gpu) {
    const HeadsGpu<X> alone = heads_alone_(heads);
    const int N = heads->sizes.B * heads->sizes.T;
    if (heads->kind == HEADS_ROW_NORM) {
        launch(heads_row_forward_kernel<X>, dim3((unsigned)N, 2), HEADS_ROW_THREADS, 0, gpu, qkv, *heads);
    }
    if (heads_do_nothing(&alone)) {
        return;
    }
    if (heads_only_turn_(&alone)) {
        heads_turn_all_(qkv, &alone, 1.0f, gpu);
    } else {
        launch(heads_forward_kernel<X>, heads_grid_(heads), 32 * HEADS_WARPS, 0, gpu, qkv, alone, N);
    }
}

// Returns the floats of `sums`.
static inline size_t heads_sums(AttentionSizes sizes) {
    return (size_t)ceil_div(sizes.B * sizes.T, (int)HEADS_TOKENS) * attention_query_key_size(sizes);
}

// Gradients of the weights, without data if frozen, and memory for heads_sums floats.
typedef struct {
    Gradient dqnormw, dknormw;
    GradientMode mode;
    float* sums;
} HeadsGradientsGpu;

// Sets or adds to the gradients of the weights, from the sums of `queries` and `keys` rows of so
// many columns.
template <class X>
static inline void heads_finish_(const HeadsGradientsGpu* d, int queries, int query_cols, int keys,
                                 int key_cols, const Gpu* gpu) {
    const float* of_keys = d->sums + (size_t)queries * query_cols;
    if (d->dqnormw.data) {
        column_sums_finish<X>(&d->dqnormw, 1, (const float*)d->sums, queries, query_cols, query_cols, d->mode,
                              gpu);
    }
    if (d->dknormw.data) {
        column_sums_finish<X>(&d->dknormw, 1, of_keys, keys, key_cols, key_cols, d->mode, gpu);
    }
}

template <class X>
static inline void heads_row_backward_(X* dqkv, const HeadsGradientsGpu* d, const HeadsGpu<X>* heads,
                                       const Gpu* gpu) {
    const int N = heads->sizes.B * heads->sizes.T, groups = ceil_div(N, (int)HEADS_TOKENS),
              Q = attention_queries_size(heads->sizes), K = attention_keys_size(heads->sizes),
              most = HEADS_ROW_COLUMNS_ * HEADS_ROW_THREADS;
    CHECK(Q <= most, "norm of all heads together: %d columns, wanted at most %d", Q, most);
    launch(heads_row_backward_kernel<X>, dim3((unsigned)groups, 2), HEADS_ROW_THREADS, 0, gpu, dqkv, d->sums,
           *heads, N);
    heads_finish_<X>(d, groups, Q, groups, K, gpu);
}

template <class X>
static inline void heads_backward(X* dqkv, const HeadsGradientsGpu* d, const X* qkv, const HeadsGpu<X>* heads,
                                  const Gpu* gpu) {
    const AttentionSizes sizes = heads->sizes;
    const int HS = sizes.HS;
    const HeadsGpu<X> alone = heads_alone_(heads);
    if (heads_only_turn_(&alone) && !heads_do_nothing(&alone)) {
        heads_turn_all_(dqkv, &alone, -1.0f, gpu);
    } else if (!heads_do_nothing(&alone)) {
        const dim3 grid = heads_grid_(heads);
        launch(heads_backward_kernel<X>, grid, 32 * HEADS_WARPS, 0, gpu, dqkv, d->sums, qkv, alone,
               sizes.B * sizes.T);
        if (alone.kind == HEADS_NORM) {
            heads_finish_<X>(d, (int)grid.x * sizes.NH, HS, (int)grid.x * sizes.KV, HS, gpu);
        }
    }
    if (heads->kind == HEADS_ROW_NORM) {
        heads_row_backward_(dqkv, d, heads, gpu);
    }
}

#endif
