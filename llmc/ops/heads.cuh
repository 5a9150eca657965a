/*
heads.cuh -- heads.h on the GPU: the same functions on X = float, bf16 or fp16, computed in fp32.

A block processes up to HEADS_TOGETHER heads of HEADS_TOKENS tokens, all of them queries or all of
them keys. As many lanes as a head has packs of 16 bytes, rounded up to a power of two, process
these heads of a token, all loaded at once: with heads of 128 in 16 bits, a warp has two tokens and
eight heads in flight. Rows that are not made of packs are read and written in pairs.

heads_backward leaves the sums of a block in `sums`, queries first, and column_sums.cuh adds them up
in a fixed order.

Norms over all heads together have separate kernels, before the rotation: in the forward pass a
block has the queries or the keys of one token, in the backward pass of HEADS_TOKENS tokens. If
ranks have some of the heads each, another kernel computes the sums that they gather first.
*/
#ifndef LLMC_HEADS_CUH
#define LLMC_HEADS_CUH

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/heads.h"

enum {
    HEADS_THREADS = 256,
    HEADS_TOKENS = 64,
    HEADS_TOGETHER = 4,
    HEADS_WIDEST = 256,
    HEADS_ROW_THREADS = 512,
    HEADS_ROW_COLUMNS_ = 16 // most columns of a thread, of all heads together
};

// HeadsCut on the GPU; a kernel does not read `group`.
typedef struct {
    HeadsSums* sums;
    int ranks;
    const GroupGpu* group;
} HeadsCutGpu;

// Heads (heads.h) of type X.
template <class X> struct HeadsGpu {
    HeadsKind kind;
    float eps, offset;
    AttentionSizes sizes;
    Rope rope;
    const int* positions;
    const X *qnormw, *knormw;
    X* raw;
    float* rstd;
    HeadsCutGpu cut;
};

template <class X> static inline int heads_do_nothing(const HeadsGpu<X>* heads) {
    return !heads_parts(heads->kind).has_norm && !heads->rope.table;
}

// ---- a lane's columns of a head ----

// A lane has ITEMS times WIDTH adjacent columns of a head, WIDTH a pack or 2: first ... first +
// WIDTH - 1, and those `step`, 2 step, ... after them. Columns from `end` on are zeros.
template <int WIDTH> struct HeadsLane_ {
    static constexpr int ITEMS = ceil_div(HEADS_WIDEST, 32 * WIDTH), COLUMNS = ITEMS * WIDTH;
    int first, step, end;
    __device__ int column(int item) const { return first + item * step; }
};

// Columns in registers, as they are in memory.
template <class X, int WIDTH> struct HeadsWords_ { Elements<X, WIDTH> item[HeadsLane_<WIDTH>::ITEMS]; };

// Loads the lane's columns of a head; zeros if it is out of range.
template <class X, int WIDTH>
__device__ inline void heads_load_(HeadsWords_<X, WIDTH>& words, const X* head, bool is_there,
                                   const HeadsLane_<WIDTH>& lane) {
#pragma unroll
    for (int i = 0; i < HeadsLane_<WIDTH>::ITEMS; i++) {
        words.item[i] = is_there && lane.column(i) < lane.end
                            ? elements_load_kept<WIDTH>(head + lane.column(i))
                            : Elements<X, WIDTH>{};
    }
}

template <class X, int WIDTH>
__device__ inline void heads_unpack_(float (&x)[HeadsLane_<WIDTH>::COLUMNS],
                                     const HeadsWords_<X, WIDTH>& words) {
#pragma unroll
    for (int i = 0; i < HeadsLane_<WIDTH>::ITEMS; i++) {
        elements_unpack(x + i * WIDTH, words.item[i]);
    }
}

template <class X, int WIDTH>
__device__ inline void heads_store_(X* head, const HeadsWords_<X, WIDTH>& words,
                                    const HeadsLane_<WIDTH>& lane) {
#pragma unroll
    for (int i = 0; i < HeadsLane_<WIDTH>::ITEMS; i++) {
        if (lane.column(i) < lane.end) {
            elements_store_kept(head + lane.column(i), words.item[i]);
        }
    }
}

template <class X, int WIDTH>
__device__ inline void heads_pack_(HeadsWords_<X, WIDTH>& words,
                                   const float (&x)[HeadsLane_<WIDTH>::COLUMNS]) {
#pragma unroll
    for (int i = 0; i < HeadsLane_<WIDTH>::COLUMNS; i++) {
        words.item[i / WIDTH][i % WIDTH] = from_float<X>(x[i]);
    }
}

// Loads the lane's columns of the angles of token n, four at a time; without positions, they stay
// as they are.
template <class X, int WIDTH>
__device__ inline void heads_angles_(float (&angles)[HeadsLane_<WIDTH>::COLUMNS], const HeadsGpu<X>& heads,
                                     int n, bool is_there, const HeadsLane_<WIDTH>& lane) {
    constexpr int STEP = WIDTH < 4 ? WIDTH : 4;
    const int T = heads.sizes.T;
    if (!is_there || !heads.rope.table) {
        return;
    }
    const float* from =
        rope_at(heads.rope,
                heads.positions ? heads.positions[n] : token_chunks_position(heads.sizes.chunks, n % T, T));
#pragma unroll
    for (int i = 0; i < HeadsLane_<WIDTH>::COLUMNS; i += STEP) {
        const int c = lane.column(i / WIDTH) + i % WIDTH;
        if (c < lane.end) {
            elements_unpack(angles + i, elements_load_kept<STEP>(from + c));
        }
    }
}

template <int COLUMNS> __device__ inline void heads_no_turn_(float (&angles)[COLUMNS]) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        angles[i] = i % 2 ? 0.0f : 1.0f;
    }
}

// Turns the lane's pairs by its columns of the angles, forward (sign 1) or back (-1).
template <int COLUMNS>
__device__ inline void heads_turn_(float (&x)[COLUMNS], const float (&angles)[COLUMNS], float sign) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) {
        const float c = angles[i], s = sign * angles[i + 1], e = x[i], o = x[i + 1];
        x[i] = e * c - o * s;
        x[i + 1] = o * c + e * s;
    }
}

// Returns the lane's part of the product of two heads.
template <int COLUMNS>
__device__ inline float heads_dot_(const float (&x)[COLUMNS], const float (&y)[COLUMNS]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

// Returns the mean over the columns of a head, to all of its `lanes` lanes; each has a sum.
__device__ inline float heads_mean_(float sum, float part, int lanes) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, sum, distance);
        sum += distance < lanes ? other : 0.0f;
    }
    return sum * part;
}

// ---- a block's heads ----

// Returns the number of blocks for `count` heads.
__host__ __device__ inline int heads_blocks_(int count) { return ceil_div(count, (int)HEADS_TOGETHER); }

// Heads first ... first + count - 1 of tokens token ... end - 1, `at_once` of these at a time: the
// thread has token n of `at_once`.
typedef struct {
    int first, count;
    int token, end, at_once, n;
    int is_keys;
} HeadsBlock_;

__device__ inline HeadsBlock_ heads_block_(const AttentionSizes& sizes, int N, int lanes) {
    const int i = (int)blockIdx.x, of_queries = heads_blocks_(sizes.NH), is_keys = i >= of_queries;
    const int first = is_keys ? sizes.NH + (i - of_queries) * HEADS_TOGETHER : i * HEADS_TOGETHER;
    const int count = min((int)HEADS_TOGETHER, (is_keys ? sizes.NH + sizes.KV : sizes.NH) - first);
    const int token = (int)blockIdx.y * HEADS_TOKENS;
    return {
        first,  count, token, min(token + HEADS_TOKENS, N), HEADS_THREADS / lanes, (int)threadIdx.x / lanes,
        is_keys};
}

template <int WIDTH> __device__ inline HeadsLane_<WIDTH> heads_lane_(int HS, int lanes) {
    return {(int)threadIdx.x % lanes * WIDTH, lanes * WIDTH, HS};
}

// Offsets of head h of token n: in qkv, in raw, and in rstd.
typedef struct {
    size_t in_qkv, in_raw, in_rstd;
} HeadsPlace_;

__device__ inline HeadsPlace_ heads_place_(const AttentionSizes& sizes, int n, int h) {
    const size_t head = (size_t)n * (sizes.NH + sizes.KV) + h;
    return {(size_t)n * attention_qkv_size(sizes) + h * sizes.HS, head * sizes.HS, head};
}

// Loads the lane's columns of the weight of keys, or of queries, if the kind has one.
template <HeadsKind KIND, class X, int WIDTH>
__device__ inline void heads_load_weight_(HeadsWords_<X, WIDTH>& to, const HeadsGpu<X>& heads, int is_keys,
                                          const HeadsLane_<WIDTH>& lane) {
    if constexpr (KIND == HEADS_NORM) {
        heads_load_(to, is_keys ? heads.knormw : heads.qnormw, true, lane);
    }
}

// ---- kernels ----

// Normalizes and turns heads; those without a norm by angles times `sign`, -1 to turn back.
// grid   blocks of heads, ceil(N / 64)      block   256 = 256 / lanes tokens at a time
// shared none
// moves  N*(NH + KV)*HS in and out, with weights also to raw; angles from L2, for HEADS_TOGETHER
//        heads once. Bound by memory.
// order  fixed
// needs  lanes >= HS / (ITEMS WIDTH), a power of two up to 32; HS a multiple of WIDTH; if that is a
//        pack, aligned addresses
template <class X, int WIDTH, HeadsKind KIND>
__global__ void __launch_bounds__(HEADS_THREADS, HeadsLane_<WIDTH>::ITEMS > 1 ? 2 : 4)
    heads_forward_kernel(X* qkv, HeadsGpu<X> heads, float sign, int N, int lanes) {
    const HeadsBlock_ block = heads_block_(heads.sizes, N, lanes);
    const HeadsLane_<WIDTH> lane = heads_lane_<WIDTH>(heads.sizes.HS, lanes);
    const float part = 1.0f / (float)heads.sizes.HS;
    float weight[HeadsLane_<WIDTH>::COLUMNS], angles[HeadsLane_<WIDTH>::COLUMNS];
    heads_no_turn_(angles);
    HeadsWords_<X, WIDTH> of_weight; // unpacked for each head, to spare registers
    heads_load_weight_<KIND>(of_weight, heads, block.is_keys, lane);
    for (int token = block.token; token < block.end; token += block.at_once) { // by whole warps
        const int n = token + block.n;
        const bool is_there = n < block.end;
        const HeadsPlace_ at = heads_place_(heads.sizes, n, block.first);
        HeadsWords_<X, WIDTH> words[HEADS_TOGETHER];
#pragma unroll
        for (int j = 0; j < HEADS_TOGETHER; j++) {
            heads_load_(words[j], qkv + at.in_qkv + j * heads.sizes.HS, is_there && j < block.count, lane);
        }
        heads_angles_(angles, heads, n, is_there, lane);
#pragma unroll
        for (int j = 0; j < HEADS_TOGETHER; j++) {
            const bool is_head = is_there && j < block.count; // others compute from zeros
            float x[HeadsLane_<WIDTH>::COLUMNS];
            heads_unpack_(x, words[j]);
            if constexpr (KIND == HEADS_NORM) {
                if (is_head && heads.raw) {
                    heads_store_(heads.raw + at.in_raw + j * heads.sizes.HS, words[j], lane);
                }
            }
            if constexpr (KIND != HEADS_PLAIN) {
                const float r = rsqrtf(heads_mean_(heads_dot_(x, x), part, lanes) + heads.eps);
                if constexpr (KIND == HEADS_NORM) {
                    heads_unpack_(weight, of_weight);
                }
#pragma unroll
                for (int i = 0; i < HeadsLane_<WIDTH>::COLUMNS; i++) {
                    x[i] *= KIND == HEADS_NORM ? r * (weight[i] + heads.offset) : r;
                }
                if (KIND == HEADS_UNIT_NORM && is_head && lane.first == 0) {
                    heads.rstd[at.in_rstd + j] = r;
                }
            }
            heads_turn_(x, angles, sign);
            if (is_head) {
                heads_pack_(words[j], x);
                heads_store_(qkv + at.in_qkv + j * heads.sizes.HS, words[j], lane);
            }
        }
    }
}

// Turns g into the gradient before a norm: r (g - x r mean(g x r)).
template <int COLUMNS>
__device__ inline void heads_norm_backward_(float (&g)[COLUMNS], const float (&x)[COLUMNS], float r,
                                            float mean) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        g[i] = r * (g[i] - x[i] * mean);
    }
}

// Adds up the threads' sums of the block's heads, in order: sets `to` (HS).
template <int WIDTH>
__device__ inline void heads_block_sums_(float* to, const float (&sum)[HeadsLane_<WIDTH>::COLUMNS],
                                         const HeadsBlock_& block, const HeadsLane_<WIDTH>& lane) {
    constexpr int COLUMNS = HeadsLane_<WIDTH>::COLUMNS;
    SMEM_ARRAY(float, of_tokens, [HEADS_THREADS * COLUMNS]);
    const int row = lane.step * HeadsLane_<WIDTH>::ITEMS; // columns of all lanes of a head
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        of_tokens[block.n * row + lane.column(i / WIDTH) + i % WIDTH] = sum[i];
    }
    __syncthreads();
    for (int c = (int)threadIdx.x; c < lane.end; c += HEADS_THREADS) {
        float total = 0.0f;
        for (int n = 0; n < block.at_once; n++) {
            total += of_tokens[n * row + c];
        }
        to[c] = total;
    }
}

// Turns dqkv into the gradient before norm and turn; sets the block's sums for the weights.
// grid   blocks of heads, ceil(N / 64)      block   256 = 256 / lanes tokens at a time
// shared 4 or 8 KiB
// moves  2*N*(NH + KV)*HS in, half of it out; HS fp32 out per block; angles as above. Bound by
//        memory.
// order  fixed
// needs  as above
template <class X, int WIDTH, HeadsKind KIND>
__global__ void __launch_bounds__(HEADS_THREADS, HeadsLane_<WIDTH>::ITEMS > 1 ? WIDTH / 2
                                                 : KIND == HEADS_NORM         ? 2
                                                                              : 3)
    heads_backward_kernel(X* dqkv, float* sums, const X* qkv, HeadsGpu<X> heads, int N, int lanes) {
    constexpr int COLUMNS = HeadsLane_<WIDTH>::COLUMNS;
    const int HS = heads.sizes.HS;
    const HeadsBlock_ block = heads_block_(heads.sizes, N, lanes);
    const HeadsLane_<WIDTH> lane = heads_lane_<WIDTH>(HS, lanes);
    const float part = 1.0f / (float)HS;
    float weight[COLUMNS], angles[COLUMNS], sum[COLUMNS] = {};
    heads_no_turn_(angles);
    HeadsWords_<X, WIDTH> of_weight;
    heads_load_weight_<KIND>(of_weight, heads, block.is_keys, lane);
    for (int token = block.token; token < block.end; token += block.at_once) { // by whole warps
        const int n = token + block.n;
        const bool is_there = n < block.end;
        const HeadsPlace_ at = heads_place_(heads.sizes, n, block.first);
        HeadsWords_<X, WIDTH> of_g[HEADS_TOGETHER], of_x[HEADS_TOGETHER];
#pragma unroll
        for (int j = 0; j < HEADS_TOGETHER; j++) {
            const bool is_head = is_there && j < block.count;
            heads_load_(of_g[j], dqkv + at.in_qkv + j * HS, is_head, lane);
            heads_load_(of_x[j], (KIND == HEADS_NORM ? heads.raw + at.in_raw : qkv + at.in_qkv) + j * HS,
                        is_head, lane);
        }
        heads_angles_(angles, heads, n, is_there, lane);
#pragma unroll
        for (int j = 0; j < HEADS_TOGETHER; j++) {
            const bool is_head = is_there && j < block.count; // others compute from zeros
            float g[COLUMNS], x[COLUMNS];
            heads_unpack_(g, of_g[j]);
            heads_unpack_(x, of_x[j]);
            if constexpr (KIND == HEADS_UNIT_NORM) { // x r is the output, turned, as is g
                const float r = is_head ? heads.rstd[at.in_rstd + j] : 0.0f;
                heads_norm_backward_(g, x, r, heads_mean_(heads_dot_(g, x), part, lanes));
            }
            heads_turn_(g, angles, -1.0f);
            if constexpr (KIND == HEADS_NORM) {
                const float squares = heads_mean_(heads_dot_(x, x), part, lanes),
                            r = rsqrtf(squares + heads.eps);
                heads_unpack_(weight, of_weight);
#pragma unroll
                for (int i = 0; i < COLUMNS; i++) {
                    x[i] *= r;
                    sum[i] += g[i] * x[i];
                    g[i] *= weight[i] + heads.offset;
                }
                heads_norm_backward_(g, x, r, heads_mean_(heads_dot_(g, x), part, lanes));
            }
            if (is_head) {
                heads_pack_(of_g[j], g);
                heads_store_(dqkv + at.in_qkv + j * HS, of_g[j], lane);
            }
        }
    }
    if constexpr (KIND == HEADS_NORM) { // blocks of queries, then of keys, of all groups of tokens
        const size_t groups = gridDim.y, of_queries = heads_blocks_(heads.sizes.NH),
                     of_keys = gridDim.x - of_queries;
        const size_t row = block.is_keys
                               ? groups * of_queries + blockIdx.y * of_keys + blockIdx.x - of_queries
                               : blockIdx.y * of_queries + blockIdx.x;
        heads_block_sums_<WIDTH>(sums + row * HS, sum, block, lane);
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

// A block sets the sums of this rank's queries, or keys, of a token; dqkv is NULL in the forward
// pass.
// grid   N, 2      block   512      shared   128 bytes
// moves  N*(NH + KV)*HS in, in the backward pass twice. Bound by memory.
// order  fixed
template <class X>
__global__ void __launch_bounds__(HEADS_ROW_THREADS)
    heads_row_sums_kernel(HeadsSums* sums, const X* qkv, const X* dqkv, HeadsGpu<X> heads) {
    const int n = (int)blockIdx.x, is_keys = (int)blockIdx.y;
    const HeadsRow_<X> row = heads_row_(heads, n, is_keys);
    const X* of = dqkv ? heads.raw + row.in_raw : qkv + row.in_qkv;
    float squares = 0.0f, product = 0.0f;
    for (int c = (int)threadIdx.x; c < row.cols; c += HEADS_ROW_THREADS) {
        const float x = to_float(of[c]);
        squares += x * x;
        if (dqkv) {
            product += to_float(dqkv[row.in_qkv + c]) * (to_float(row.weight[c]) + heads.offset) * x;
        }
    }
    squares = block_sum(squares), product = block_sum(product);
    if (threadIdx.x == 0) {
        sums[n].squares[is_keys] = squares;
        sums[n].products[is_keys] = product;
    }
}

// Returns the numbers of the norm of a token's queries, or keys: from the gathered sums, or if this
// rank has all heads, from its own.
template <class X>
__device__ inline HeadsScale heads_row_scale_(const HeadsGpu<X>& heads, int n, int is_keys, float squares,
                                              float product) {
    const int cols = heads_row_(heads, n, is_keys).cols;
    if (!heads.cut.sums) {
        return heads_scale(squares, product, cols, heads.eps);
    }
    const HeadsSums all = heads_sum_ranks(heads.cut.sums, heads.cut.ranks, heads.sizes.B * heads.sizes.T, n);
    return heads_scale(all.squares[is_keys], all.products[is_keys], heads.cut.ranks * cols, heads.eps);
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
    const float r = heads_row_scale_(heads, (int)blockIdx.x, (int)blockIdx.y, block_sum(squares), 0.0f).r;
    for (int c = (int)threadIdx.x; c < row.cols; c += HEADS_ROW_THREADS) {
        x[c] = from_float<X>(to_float(x[c]) * r * (to_float(row.weight[c]) + heads.offset));
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
                product += g[i] * (to_float(row.weight[c]) + heads.offset) * x[i];
            }
        }
        squares = block_sum(squares), product = block_sum(product);
        const HeadsScale scale = heads_row_scale_(heads, n, is_keys, squares, product);
        const float r = scale.r, mean = scale.mean;
#pragma unroll
        for (int i = 0; i < HEADS_ROW_COLUMNS_; i++) {
            const int c = (int)threadIdx.x + i * HEADS_ROW_THREADS;
            if (c < row.cols) {
                sum[i] += g[i] * (x[i] * r);
                const float w = to_float(row.weight[c]) + heads.offset;
                dqkv[row.in_qkv + c] = from_float<X>(r * (g[i] * w - x[i] * r * mean));
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

// Returns the heads without a norm over all heads together: with such a norm they are only rotated.
template <class X> static inline HeadsGpu<X> heads_alone_(const HeadsGpu<X>* heads) {
    HeadsGpu<X> alone = *heads;
    alone.kind = heads_parts(heads->kind).is_together ? HEADS_PLAIN : heads->kind;
    return alone;
}

template <class X> static inline dim3 heads_grid_(const HeadsGpu<X>* heads) {
    const AttentionSizes sizes = heads->sizes;
    CHECK(sizes.HS % 2 == 0 && sizes.HS <= HEADS_WIDEST,
          "norms and positions of heads: heads of size %d, wanted an even number, at most %d", sizes.HS,
          (int)HEADS_WIDEST);
    return dim3((unsigned)(heads_blocks_(sizes.NH) + heads_blocks_(sizes.KV)),
                (unsigned)ceil_div(sizes.B * sizes.T, (int)HEADS_TOKENS));
}

// Returns the lanes of a head, a power of two.
template <int WIDTH> static inline int heads_lanes_(int HS) {
    int lanes = 1;
    while (lanes * HeadsLane_<WIDTH>::COLUMNS < HS) {
        lanes *= 2;
    }
    return lanes;
}

template <class X, int WIDTH>
static inline decltype(&heads_forward_kernel<X, WIDTH, HEADS_PLAIN>) heads_forward_of_(HeadsKind kind) {
    switch (kind) {
    case HEADS_PLAIN:
    case HEADS_LATENT:
    case HEADS_ROW_NORM:
        break;
    case HEADS_NORM:
        return heads_forward_kernel<X, WIDTH, HEADS_NORM>;
    case HEADS_UNIT_NORM:
        return heads_forward_kernel<X, WIDTH, HEADS_UNIT_NORM>;
    }
    return heads_forward_kernel<X, WIDTH, HEADS_PLAIN>;
}

template <class X, int WIDTH>
static inline void heads_launch_forward_(X* x, const HeadsGpu<X>* heads, float sign, const Gpu* gpu) {
    launch(heads_forward_of_<X, WIDTH>(heads->kind), heads_grid_(heads), HEADS_THREADS, 0, gpu, x, *heads,
           sign, heads->sizes.B * heads->sizes.T, heads_lanes_<WIDTH>(heads->sizes.HS));
}

// Returns the kernel of a norm of each head.
template <class X, int WIDTH>
static inline decltype(&heads_backward_kernel<X, WIDTH, HEADS_NORM>) heads_backward_of_(HeadsKind kind) {
    switch (kind) {
    case HEADS_PLAIN:
    case HEADS_LATENT:
    case HEADS_ROW_NORM:
        break;
    case HEADS_NORM:
        return heads_backward_kernel<X, WIDTH, HEADS_NORM>;
    case HEADS_UNIT_NORM:
        return heads_backward_kernel<X, WIDTH, HEADS_UNIT_NORM>;
    }
    return NULL;
}

template <class X, int WIDTH>
static inline void heads_launch_backward_(X* dqkv, float* sums, const X* qkv, const HeadsGpu<X>* heads,
                                          const Gpu* gpu) {
    launch(heads_backward_of_<X, WIDTH>(heads->kind), heads_grid_(heads), HEADS_THREADS, 0, gpu, dqkv, sums,
           qkv, *heads, heads->sizes.B * heads->sizes.T, heads_lanes_<WIDTH>(heads->sizes.HS));
}

// Returns 1 if all rows of heads consist of packs.
template <class X> static inline int heads_packs_(const X* qkv, const X* dqkv, const HeadsGpu<X>* heads) {
    const uintptr_t all = (uintptr_t)qkv | (uintptr_t)dqkv | (uintptr_t)heads->qnormw |
                          (uintptr_t)heads->knormw | (uintptr_t)heads->raw | (uintptr_t)heads->rope.table;
    return heads->sizes.HS % Pack<X>::SIZE == 0 && all % sizeof(Pack<X>) == 0;
}

template <class X>
static inline void heads_forward_(X* x, const HeadsGpu<X>* alone, float sign, const Gpu* gpu) {
    (heads_packs_(x, x, alone) ? heads_launch_forward_<X, Pack<X>::SIZE>
                               : heads_launch_forward_<X, 2>)(x, alone, sign, gpu);
}

// Gathers the sums of norms of all heads together, if ranks have some of the heads each.
template <class X>
static inline void heads_gather_(const HeadsGpu<X>* heads, const X* qkv, const X* dqkv, const Gpu* gpu) {
    const unsigned N = (unsigned)(heads->sizes.B * heads->sizes.T);
    if (heads->cut.sums) {
        HeadsSums* own = heads->cut.sums + (size_t)heads->cut.group->rank * N;
        launch(heads_row_sums_kernel<X>, dim3(N, 2), HEADS_ROW_THREADS, 0, gpu, own, qkv, dqkv, *heads);
        group_all_gather(heads->cut.sums, own, N * sizeof(HeadsSums) / sizeof(float), DTYPE_FP32,
                         heads->cut.group, gpu->stream);
    }
}

template <class X> static inline void heads_forward(X* qkv, const HeadsGpu<X>* heads, const Gpu* gpu) {
    const HeadsGpu<X> alone = heads_alone_(heads);
    if (heads_parts(heads->kind).is_together) {
        heads_gather_(heads, (const X*)qkv, (const X*)NULL, gpu);
        launch(heads_row_forward_kernel<X>, dim3((unsigned)(heads->sizes.B * heads->sizes.T), 2),
               HEADS_ROW_THREADS, 0, gpu, qkv, *heads);
    }
    if (!heads_do_nothing(&alone)) {
        heads_forward_(qkv, &alone, 1.0f, gpu);
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
        column_sums_finish<X>(&d->dqnormw, 1, ColumnPartials<float>{d->sums, queries, query_cols, query_cols},
                              d->mode, gpu);
    }
    if (d->dknormw.data) {
        column_sums_finish<X>(&d->dknormw, 1, ColumnPartials<float>{of_keys, keys, key_cols, key_cols},
                              d->mode, gpu);
    }
}

template <class X>
static inline void heads_row_backward_(X* dqkv, const HeadsGradientsGpu* d, const HeadsGpu<X>* heads,
                                       const Gpu* gpu) {
    const int N = heads->sizes.B * heads->sizes.T, groups = ceil_div(N, (int)HEADS_TOKENS),
              Q = attention_queries_size(heads->sizes), K = attention_keys_size(heads->sizes),
              most = HEADS_ROW_COLUMNS_ * HEADS_ROW_THREADS;
    CHECK(Q <= most, "norm of all heads together: %d columns, wanted at most %d", Q, most);
    heads_gather_(heads, (const X*)NULL, (const X*)dqkv, gpu);
    launch(heads_row_backward_kernel<X>, dim3((unsigned)groups, 2), HEADS_ROW_THREADS, 0, gpu, dqkv, d->sums,
           *heads, N);
    heads_finish_<X>(d, groups, Q, groups, K, gpu);
}

// Computes heads with norms of their own.
template <class X>
static inline void heads_norm_backward_(X* dqkv, const HeadsGradientsGpu* d, const X* qkv,
                                        const HeadsGpu<X>* heads, const Gpu* gpu) {
    const AttentionSizes sizes = heads->sizes;
    const int groups = ceil_div(sizes.B * sizes.T, (int)HEADS_TOKENS);
    (heads_packs_(qkv, (const X*)dqkv, heads) ? heads_launch_backward_<X, Pack<X>::SIZE>
                                              : heads_launch_backward_<X, 2>)(dqkv, d->sums, qkv, heads, gpu);
    if (heads_parts(heads->kind).has_weights) {
        heads_finish_<X>(d, groups * heads_blocks_(sizes.NH), sizes.HS, groups * heads_blocks_(sizes.KV),
                         sizes.HS, gpu);
    }
}

template <class X>
static inline void heads_backward(X* dqkv, const HeadsGradientsGpu* d, const X* qkv, const HeadsGpu<X>* heads,
                                  const Gpu* gpu) {
    const HeadsGpu<X> alone = heads_alone_(heads);
    if (heads_parts(alone.kind).has_norm) {
        heads_norm_backward_(dqkv, d, qkv, &alone, gpu);
    } else if (alone.rope.table) {
        heads_forward_(dqkv, &alone, -1.0f, gpu);
    }
    if (heads_parts(heads->kind).is_together) {
        heads_row_backward_(dqkv, d, heads, gpu);
    }
}

#endif
