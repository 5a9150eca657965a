/*
attention_mma.cuh -- the kernels of attention.cuh on tiles of mma_16816, for every type and width.

The method is FlashAttention-2 (Dao, 2023). A block of four warps keeps a tile of rows of one head
in shared memory. It streams the rows that interact with them through shared memory, tile by tile,
and loads the next tile while it computes. A warp owns 16 M rows of the block's tile. Scores and
probabilities exist only in registers: 16 M x COLS in a warp.

Tiles that lie entirely in earlier documents are skipped.

    kernel      block's rows    stream          matmuls
    forward     queries         keys, values    s = q k^T, out += p v
    scores      queries         keys            s = q k^T
    query grad  q, dout         keys, values    s = q k^T, dp = dout v^T, dq += ds k
    key grads   keys, values    q, dout         s^T = k q^T, dp^T = v dout^T, dv += p^T dout,
                                                dk += ds^T q

A block of the key grads kernel streams q and dout of all heads that read its keys, one after the
other.

The query grad kernel runs first. It owns the rows of dout, so it also computes delta = sum dout
out. The backward pass computes s and dp twice (7 matmuls instead of 5). In return every sum has one
owner: no atomics, a fixed order, no fp32 copy of dq.

All kernels are built from two matmuls of tiles, attention_dot_ and attention_mix_. bf16 and fp16
use tensor cores; fp32 uses multiply-adds in the same layout as mma_16816's results: element e of
part (m, n) in lane l = 4g + t is row 16m + g + 8(e / 2), column 8n + 2t + e % 2.

Heads have up to 256 elements. In shared memory they are padded with zeros to 16, 32, 64, 80, 96,
128 or 256; with documents to 32, 64, 128 or 256, with a cap of scores to 64, 128 or 256. If a row
of a head is not a multiple of 16 bytes, it is copied element by element.
*/
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include "llmc/ops/attention.h"
#include "llmc/ops/attention_tiles.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/gpu/tiles.cuh"

// The widest heads that kernels are compiled for, one of the widths above. A program with small
// heads only compiles faster with less.
#ifndef ATTENTION_WIDEST
#define ATTENTION_WIDEST 256
#endif

enum { ATTENTION_WARPS = 4, ATTENTION_THREADS = 32 * ATTENTION_WARPS };

// Tile sizes of each kernel for heads of up to W, chosen with ptxas -v (CUDA 13). On sm_90a only
// key grads in 16 bits spill: 4 to 16 bytes at W = 64 to 128, with some masks. Two blocks
// fit on a multiprocessor of an A100 (65,536 registers, 164 KiB; one for fp32 at W = 128), and one
// fits into 99 KiB. On a multiprocessor with no more than that, tiles of 16 bits are smaller, so
// that two blocks fit as well, except in the backward pass at W = 128: a single block has one warp
// per scheduler. On an H200, at W = 64 in 16 bits, all other sizes that were tried are slower
// (dev/LOG.md, 2026-11-26); other widths have not been timed.
//     M 16-row tiles of a warp COLS rows of a tile of the stream
//     STEP columns of scores at a time, at most COLS KEEP see AttentionLeft_
// With heads wider than 128 (WIDE), a thread needs 128 registers for the sums of 16 rows. So key
// grads take a block for dv and another one for dk, and compute s twice. In fp32 the backward pass
// then takes 163 KiB.
template <class X, int W> struct AttentionTiling_ {
    static constexpr bool HALF = sizeof(X) == 2;
    static constexpr int STRIDE =
        W + Pack<X>::SIZE; // an odd multiple of 16 bytes: no bank conflicts between rows
    static constexpr bool SMALL = HALF && TILE_MEMORY_IS_SMALL && W >= 64;
    static constexpr bool WIDE = W > 128;
    static constexpr int FORWARD_M = WIDE ? 1 : SMALL ? (W <= 80 ? 2 : 1) : HALF || W <= 64 ? 2 : 1;
    static constexpr int FORWARD_COLS = WIDE              ? (HALF ? 32 : 8)
                                        : SMALL           ? (W <= 96 ? 32 : 16)
                                        : HALF && W <= 96 ? 64
                                        : HALF || W <= 64 ? 32
                                                          : 16;
    static constexpr int FORWARD_KEEP = HALF && W <= 64 ? W / 16 : 0;
    static constexpr int BACKWARD_M = HALF && W <= 96 && !SMALL ? 2 : 1;
    static constexpr int BACKWARD_COLS = WIDE                        ? (HALF ? 16 : 8)
                                         : SMALL && W == 96          ? 16
                                         : HALF && W == 64 && !SMALL ? 64
                                         : HALF || W <= 64           ? 32
                                                                     : 16;
    static constexpr int BACKWARD_STEP = HALF && W == 128 ? 32 : HALF || !WIDE ? 16 : 8;
    static constexpr int KEYS_KEEP_K = !HALF || W == 80 || W == 96 || WIDE ? 0 : W / 16;
    static constexpr int KEYS_KEEP_V = !HALF || W >= 64 ? 0 : W / 16;
    static constexpr int QUERIES_KEEP = !HALF || WIDE ? 0 : W == 80 || W == 96 ? 3 : W / 16;
    static constexpr int KEYS_PARTS = WIDE ? 2 : 1; // blocks that share a tile of keys
    static constexpr size_t FORWARD_BYTES =
        (size_t)(16 * ATTENTION_WARPS * FORWARD_M + 4 * FORWARD_COLS) * STRIDE * sizeof(X);
    static constexpr size_t BACKWARD_BYTES =
        (size_t)(2 * 16 * ATTENTION_WARPS * BACKWARD_M + 4 * BACKWARD_COLS) * STRIDE * sizeof(X);
    static constexpr bool FITS = BACKWARD_BYTES <= 99 << 10; // some GPUs have no more
    static_assert(FORWARD_BYTES <= 99 << 10 && (FITS || (WIDE && !HALF && BACKWARD_BYTES <= 163 << 10)),
                  "blocks fit; in fp32 with wide heads, on other GPUs");
    static_assert(!SMALL || WIDE || (FORWARD_BYTES <= 49 << 10 && (W == 128 || BACKWARD_BYTES <= 49 << 10)),
                  "two blocks fit, with the 1 KiB that each takes besides");
};

// ---- between global and shared memory ----

// Returns the first `count` elements (none if negative), then zeros.
template <class X> __device__ inline Pack<X> attention_gather_(const X* from, int count) {
    Pack<X> pack;
#pragma unroll
    for (int i = 0; i < Pack<X>::SIZE; i++) {
        pack[i] = i < count ? from[i] : from_float<X>(0.0f);
    }
    return pack;
}

// Starts to copy a tile of ROWS rows of the head; the whole block calls it. Rows from `count` on
// and columns from HS on become 0. A thread stays in its column, so the address of its next row
// costs one addition.
template <class X, int ROWS, int W>
__device__ inline void attention_load_(X* tile, const X* rows, size_t stride, int count,
                                       const AttentionSize& size) {
    constexpr int SIZE = Pack<X>::SIZE, PACKS = W / SIZE, STRIDE = W + SIZE;
    constexpr int STEP = ATTENTION_THREADS / PACKS; // rows at a time
    const int row = threadIdx.x / PACKS, d = threadIdx.x % PACKS * SIZE;
    if (ATTENTION_THREADS % PACKS != 0 && row >= STEP) {
        return;
    }
    if (size.packs) {
        X* to = tile + row * STRIDE + d;
        const X* from = rows + row * stride + d;
        const int there = d < size.HS ? count - row : 0;
#pragma unroll
        for (int r = 0; r < ROWS; r += STEP) {
            if (ROWS % STEP == 0 || row + r < ROWS) {
                cp_async_16(to + r * STRIDE, from + r * stride, r < there ? 16 : 0);
            }
        }
    } else {
#pragma unroll 1
        for (int r = row; r < ROWS; r += STEP) {
            store_pack(tile + r * STRIDE + d,
                       attention_gather_(rows + r * stride + d, r < count ? size.HS - d : 0));
        }
    }
}

// Starts to copy two tiles, one after the other: k and v, or q and dout, from `row` of T on.
template <class X, int ROWS, int W>
__device__ inline void attention_load_two_(X* tiles, const X* first, size_t first_stride, const X* second,
                                           size_t second_stride, int row, int T, const AttentionSize& size) {
    const int count = T - row;
    attention_load_<X, ROWS, W>(tiles, first + row * first_stride, first_stride, count, size);
    attention_load_<X, ROWS, W>(tiles + ROWS * (W + Pack<X>::SIZE), second + row * second_stride,
                                second_stride, count, size);
}

// Returns the place of the pair of tiles that starts at `row`, a multiple of ROWS. The stream has
// room for two pairs of tiles of ROWS rows.
template <class X, int ROWS, int W> __device__ inline X* attention_stage_(X* stream, int row) {
    return stream + row / ROWS % 2 * 2 * ROWS * (W + Pack<X>::SIZE);
}

template <class X, int ROWS, int W>
__device__ inline void attention_stream_(X* stream, const X* first, size_t first_stride, const X* second,
                                         size_t second_stride, int row, int T, const AttentionSize& size) {
    attention_load_two_<X, ROWS, W>(attention_stage_<X, ROWS, W>(stream, row), first, first_stride, second,
                                    second_stride, row, T, size);
}

// Returns the first key that a query sees, which is stored after the elements of its row in shared
// memory.
template <class X, int W> __device__ inline int& attention_first_key_(X* row) {
    return *reinterpret_cast<int*>(row + W);
}
template <class X, int W> __device__ inline int attention_first_key_(const X* row) {
    return *reinterpret_cast<const int*>(row + W);
}

// Stores the first key of each of ROWS queries, from `row` on; the whole block calls it. Queries
// past the last token see the same keys as that token.
template <class X, AttentionMask MASK, int ROWS, int W>
__device__ inline void attention_load_starts_(X* tile, const int* starts, int row, int T) {
    static_assert(ROWS <= ATTENTION_THREADS, "a thread for every row");
    if (MASK != ATTENTION_CAUSAL && threadIdx.x < ROWS) {
        attention_first_key_<X, W>(tile + threadIdx.x * (W + Pack<X>::SIZE)) =
            attention_start_of<MASK>(starts, min(row + (int)threadIdx.x, T - 1));
    }
}

// Waits until all copies that the block started have arrived, and all its threads have finished
// reading the previous tiles.
__device__ inline void attention_wait_(void) {
    cp_async_wait_all();
    __syncthreads();
}

// Writes a warp's first `count` rows through a tile in shared memory. No thread may have read that
// tile since the block's last barrier, and no other warp may use it any more.
template <class X, int M, int W>
__device__ inline void attention_store_(X* to, size_t stride, int count, const AttentionSize& size, X* tile,
                                        const float (&acc)[M][W / 8][4]) {
    constexpr int SIZE = Pack<X>::SIZE, PACKS = W / SIZE;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < M * W / 4; i++) {
        const int m = i / (W / 4), n = i / 2 % (W / 8), half = i % 2;
        attention_store_pair(tile + (16 * m + 8 * half + lane / 4) * (W + SIZE) + 8 * n + lane % 4 * 2,
                             acc[m][n][2 * half], acc[m][n][2 * half + 1]);
    }
    __syncwarp();
    for (int i = lane; i < 16 * M * PACKS; i += 32) {
        const int row = i / PACKS, d = i % PACKS * SIZE;
        const Pack<X> pack = load_pack(tile + row * (W + SIZE) + d);
        if (row < count && d < size.HS && size.packs) {
            store_pack(to + row * stride + d, pack);
        }
        for (int e = 0; e < SIZE && row < count && d + e < size.HS && !size.packs; e++) {
            to[row * stride + d + e] = pack[e];
        }
    }
}

// ---- matmuls of tiles, by one warp ----

// A warp's 16 M rows, W wide, as the left operand of attention_dot_. The first KEEP groups of 16
// columns stay in registers; the others are read again at each use.
template <class X, int M, int W, int KEEP> struct AttentionLeft_ {
    const X* rows; // in shared memory
    unsigned kept[M][KEEP > 0 ? KEEP : 1][4];
};

template <class X, int M, int W, int KEEP>
__device__ inline void attention_left_(AttentionLeft_<X, M, W, KEEP>& left, const X* rows) {
    left.rows = rows;
#pragma unroll
    for (int i = 0; i < M * KEEP; i++) {
        const int m = i % M, k = i / M;
        ldmatrix_x4(left.kept[m][k], tile_16x16<X, W>(rows + 16 * m * (W + Pack<X>::SIZE) + 16 * k));
    }
}

// Sets a to columns 16k ... 16k+15 of rows 16m ... 16m+15; k is known at compile time.
template <class X, int M, int W, int KEEP>
__device__ inline void attention_left_operand_(unsigned (&a)[4], const AttentionLeft_<X, M, W, KEEP>& left,
                                               int m, int k) {
    if (k >= KEEP) {
        ldmatrix_x4(a, tile_16x16<X, W>(left.rows + 16 * m * (W + Pack<X>::SIZE) + 16 * k));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = left.kept[m][k][i];
    }
}

// Sets s (16 M, 8 N) = left . right^T, with right (8 N, W) in shared memory.
template <class X, int M, int N, int W, int KEEP>
__device__ inline void attention_dot_(float (&s)[M][N][4], const AttentionLeft_<X, M, W, KEEP>& left,
                                      const X* right) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        s[i / 4 / N][i / 4 % N][i % 4] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < W / 16; k++) {
        unsigned a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            attention_left_operand_(a[m], left, m, k);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(b, tile_right_16x16<X, W>(right + 8 * n * (W + Pack<X>::SIZE) + 16 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16816<X>(s[m][n], a[m], b[0], b[1]);
                mma_16816<X>(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

__device__ inline void attention_add_dot_(float& sum, const Pack<float>& x, const Pack<float>& y) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum += x[i] * y[i];
    }
}

template <int M, int N, int W, int KEEP>
__device__ inline void attention_dot_(float (&s)[M][N][4], const AttentionLeft_<float, M, W, KEEP>& left,
                                      const float* right) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        s[i / 4 / N][i / 4 % N][i % 4] = 0.0f;
    }
#pragma unroll 2
    for (int d = 0; d < W; d += 4) {
        Pack<float> x[2 * M];
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            x[i] = load_pack(left.rows + (8 * i + g) * (W + 4) + d);
        }
#pragma unroll
        for (int j = 0; j < 2 * N; j++) {
            const Pack<float> y = load_pack(right + (j / 2 * 8 + 2 * t + j % 2) * (W + 4) + d);
#pragma unroll
            for (int i = 0; i < 2 * M; i++) {
                attention_add_dot_(s[i / 2][j / 2][i % 2 * 2 + j % 2], x[i], y);
            }
        }
    }
}

// Adds p . right to acc (16 M, 8 D), with p (16 M, 8 N) in registers and rounded to X, right (8 N,
// 8 D) in shared memory. The result of one matmul already has the layout of the next one's left
// operand.
template <class X, int M, int N, int D>
__device__ inline void attention_mix_(float (&acc)[M][D][4], const float (&p)[M][N][4], const X* right) {
    constexpr int W = 8 * D;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned a[M][4], b[4];
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            const float* two = &p[i / 4][n + i % 4 / 2][i % 2 * 2];
            a[i / 4][i % 4] = attention_pair<X>(two[0], two[1]);
        }
#pragma unroll
        for (int d = 0; d < D; d += 2) {
            ldmatrix_x4_trans(b, tile_16x16<X, W>(right + 8 * n * (W + Pack<X>::SIZE) + 8 * d));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16816<X>(acc[m][d], a[m], b[0], b[1]);
                mma_16816<X>(acc[m][d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Adds p . right in fp32. A row of p is spread over four lanes, which exchange its elements.
template <int M, int N, int D>
__device__ inline void attention_mix_(float (&acc)[M][D][4], const float (&p)[M][N][4], const float* right) {
    constexpr int W = 8 * D;
    const float* columns = right + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8 * N; j++) {
        float x[2 * M];
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            x[i] = __shfl_sync(0xffffffffu, p[i / 2][j / 8][i % 2 * 2 + j % 2], j % 8 / 2, 4);
        }
#pragma unroll
        for (int d = 0; d < D; d++) {
            const float2 y = *reinterpret_cast<const float2*>(columns + j * (W + 4) + 8 * d);
#pragma unroll
            for (int i = 0; i < 2 * M; i++) {
                acc[i / 2][d][i % 2 * 2] += x[i] * y.x;
                acc[i / 2][d][i % 2 * 2 + 1] += x[i] * y.y;
            }
        }
    }
}

template <int M, int N> __device__ inline void attention_scale_(float (&x)[M][N][4], float factor) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        x[i / 4 / N][i / 4 % N][i % 4] *= factor;
    }
}

// Sums 16 columns over ROWS rows: lane t < 4 gets columns 8n + 2t + e in sums[n][e]. On tensor
// cores it is a matmul with a matrix of ones.
template <class X, int ROWS, int W>
__device__ inline void attention_sum_16_columns_(float (&sums)[2][4], const X* corner) {
    constexpr int STRIDE = W + Pack<X>::SIZE;
    if constexpr (sizeof(X) == 2) {
        const unsigned one = attention_pair<X>(1.0f, 1.0f), ones[4] = {one, one, one, one};
        unsigned b[4];
#pragma unroll
        for (int row = 0; row < ROWS; row += 16) {
            ldmatrix_x4_trans(b, tile_16x16<X, W>(corner + row * STRIDE));
            mma_16816<X>(sums[0], ones, b[0], b[1]);
            mma_16816<X>(sums[1], ones, b[2], b[3]);
        }
    } else {
        const X* columns = corner + threadIdx.x % 4 * 2;
#pragma unroll 4
        for (int row = 0; row < ROWS; row++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[i / 2][i % 2] += columns[row * STRIDE + i / 2 * 8 + i % 2];
            }
        }
    }
}

// Sums the columns of a tile that all warps of the block have written: ROWS rows of one head of
// sequence b, from `row` and `column` of dqkv on; the whole block calls it. Rows from T on are 0.
// The destination is computed here: if kept from the start of the kernel, it would need registers.
template <class X, int ROWS, int W>
__device__ inline void attention_column_sums_(float* partial, const X* tile, int b, int column, int row,
                                              const AttentionSize& size) {
    const int lane = threadIdx.x % 32;
    // tiles before this one
    const size_t tiles = (size_t)b * size.tiles + row / ROWS;
    float* to = partial + tiles * attention_stride(size) + column;
    for (int d = threadIdx.x / 32 * 16; d < W; d += 16 * ATTENTION_WARPS) {
        float sums[2][4] = {};
        attention_sum_16_columns_<X, ROWS, W>(sums, tile + d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int c = d + i / 2 * 8 + 2 * lane + i % 2;
            if (lane < 4 && c < size.HS) {
                to[c] = sums[i / 2][i % 2];
            }
        }
    }
}

// ---- forward ----

// Sets scores with keys of earlier documents to -infinity. `queries` are the rows in shared memory.
template <class X, int W, int M, int N>
__device__ inline void attention_mask_earlier_(float (&s)[M][N][4], const X* queries, int u0) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int row = 0; row < 2 * M; row++) {
        const int first = attention_first_key_<X, W>(queries + (8 * row + g) * (W + Pack<X>::SIZE));
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            if (u0 + 8 * (i / 2) + 2 * t + i % 2 < first) {
                s[row / 2][i / 2][row % 2 * 2 + i % 2] = -INFINITY;
            }
        }
    }
}

// Return whether all, or some, of the queries see the key, judging by documents only: it may still
// be later.
template <class X, AttentionMask MASK, int ROWS, int W>
__device__ inline bool attention_all_see_(const X* queries, int key) {
    return MASK == ATTENTION_CAUSAL ||
           attention_first_key_<X, W>(queries + (ROWS - 1) * (W + Pack<X>::SIZE)) <= key;
}
template <class X, AttentionMask MASK, int W>
__device__ inline bool attention_some_see_(const X* queries, int key) {
    return MASK == ATTENTION_CAUSAL || attention_first_key_<X, W>(queries) <= key;
}

// Attends from the warp's queries, which start at row0, to keys u0 ... u0+8N-1. These are in shared
// memory, followed by their values.
template <class X, AttentionMask MASK, int M, int N, int W, int KEEP>
__device__ inline void attention_forward_tile_(float (&acc)[M][W / 8][4], AttentionSoftmax<M>& softmax,
                                               const AttentionLeft_<X, M, W, KEEP>& left, const X* keys,
                                               int row0, int u0, const AttentionSize& size) {
    const float scale = attention_exponent<MASK>(size);
    float s[M][N][4];
    attention_dot_(s, left, keys);
    attention_cap<MASK>(s, size);
    if (u0 + 8 * N - 1 > row0) {
        attention_mask_later(s, row0, u0);
    }
    if (!attention_all_see_<X, MASK, 16 * M, W>(left.rows, u0)) {
        attention_mask_earlier_<X, W>(s, left.rows, u0);
    }
    float largest[M][2], factor[M][2];
    if (attention_largest(largest, s, softmax, scale)) {
        attention_raise(factor, softmax, largest);
        attention_rescale(acc, factor);
    }
    attention_probabilities(s, softmax, scale);
    attention_mix_(acc, s, keys + 8 * N * (W + Pack<X>::SIZE));
}

// A block owns ROWS queries of one head. The last queries go first, because they see the most keys.
// grid   heads * ceil(T / ROWS)      block   128      shared   q, and 2 x (k, v)
// moves  B*T*QKV in, B*T*Q out, B*NH*T fp32 out. Tiles of a head are read again from L2.
//        Bound by tensor cores (fp32: by multiply-adds), then by shared memory.
// order  fixed
// needs  HS <= W
// Spills 36 and 28 bytes on sm_120 at W = 80 and 128: tile sizes are chosen for sm_80 and sm_90a,
// where nothing spills.
template <class X, int W, AttentionMask MASK>
__global__ void __launch_bounds__(ATTENTION_THREADS, sizeof(X) == 2 ? 1 : 2)
    attention_forward_kernel_(X* out, float* lse, const X* qkv, const X* kv, const int* starts,
                              AttentionSize size) {
    typedef AttentionTiling_<X, W> Tiling;
    constexpr int M = Tiling::FORWARD_M, COLS = Tiling::FORWARD_COLS, ROWS = 16 * ATTENTION_WARPS * M;
    constexpr int STRIDE = Tiling::STRIDE;
    SMEM_DYNAMIC(X, q_tile);
    X* stream = q_tile + ROWS * STRIDE;
    const AttentionHead at = attention_query_head<MASK>(size);
    starts = attention_starts_of<MASK>(starts, at);
    const size_t stride = attention_stride(size), key_stride = attention_key_stride<MASK>(size);
    const X *q = qkv + at.in_q, *k = (attention_is_general(MASK) ? kv : qkv) + at.in_k, *v = k + size.K;
    const int t0 = (size.tiles - 1 - (int)(blockIdx.x % size.tiles)) * ROWS,
              last = attention_last<MASK>(size), shift = attention_shift<MASK>(t0, size);
    const int mine = 16 * M * (threadIdx.x / 32), row0 = t0 + mine, keys = min(t0 + ROWS, size.T) + shift;
    const int from =
        MASK != ATTENTION_CAUSAL ? attention_start_of<MASK>(starts, t0 + shift) / COLS * COLS : 0;

    attention_load_<X, ROWS, W>(q_tile, q + t0 * stride, stride, size.T - t0, size);
    attention_load_starts_<X, MASK, ROWS, W>(q_tile, starts, t0 + shift, last);
    attention_stream_<X, COLS, W>(stream, k, key_stride, v, key_stride, from, last, size);
    attention_wait_();
    AttentionLeft_<X, M, W, Tiling::FORWARD_KEEP> left;
    attention_left_(left, q_tile + mine * STRIDE);
    AttentionSoftmax<M> softmax;
    attention_softmax_open(softmax);
    float acc[M][W / 8][4] = {};
    for (int u0 = from; u0 < keys; u0 += COLS) {
        if (u0 + COLS < keys) {
            attention_stream_<X, COLS, W>(stream, k, key_stride, v, key_stride, u0 + COLS, last, size);
        }
        // Otherwise the whole warp skips the tile: it is above the diagonal, or in earlier
        // documents.
        if (row0 < size.T && u0 < row0 + shift + 16 * M &&
            attention_some_see_<X, MASK, W>(left.rows, u0 + COLS - 1)) {
            const X* tile = attention_stage_<X, COLS, W>(stream, u0);
            attention_forward_tile_<X, MASK, M, COLS / 8, W>(acc, softmax, left, tile, row0 + shift, u0,
                                                             size);
        }
        attention_wait_();
    }
    attention_finish(acc, lse + at.in_lse, softmax, row0, size.T);
    attention_store_<X, M, W>(out + at.in_out + row0 * (size_t)size.Q, size.Q, size.T - row0, size,
                              q_tile + mine * STRIDE, acc);
}

// ---- the largest score ----

// Returns the larger of `most` and the products of the warp's queries, from position row0 on, with
// keys u0 ... u0+8N-1 that they see. Queries from position `real` on do not count.
template <class X, int N, int M, int W, int KEEP>
__device__ inline float attention_largest_product_(float most, const AttentionLeft_<X, M, W, KEEP>& left,
                                                   const X* keys, int row0, int u0, int real) {
    const int end = real - row0 - threadIdx.x % 32 / 4;
    float s[M][N][4];
    attention_dot_(s, left, keys);
    if (u0 + 8 * N - 1 > row0) {
        attention_mask_later(s, row0, u0);
    }
    if (!attention_all_see_<X, ATTENTION_GENERAL, 16 * M, W>(left.rows, u0)) {
        attention_mask_earlier_<X, W>(s, left.rows, u0);
    }
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / 4 / N, e = i % 4;
        most = 16 * m + 8 * (e / 2) < end ? fmaxf(most, s[m][i / 4 % N][e]) : most;
    }
    return most;
}

// Raises a number that is not negative: then the order of doubles is that of their bits.
__device__ inline void attention_raise_(double* largest, float x) {
    const double wide = x;
    unsigned long long bits;
    memcpy(&bits, &wide, sizeof(bits));
    atomicMax((unsigned long long*)largest, bits);
}

// Raises the largest scores (NH): a block owns ROWS queries of one head, as in the forward pass,
// and streams the keys only. Padding, behind `lengths` tokens of each sequence, does not count.
// grid   heads * ceil(T / ROWS)      block   128      shared   q, and 2 x k
// moves  B*T*(Q+K) in, once more per tile from L2. Bound by tensor cores (fp32: by multiply-adds):
//        half the matmuls of the forward pass.
// order  any: a maximum does not depend on it
// needs  HS <= W
template <class X, int W>
__global__ void __launch_bounds__(ATTENTION_THREADS, sizeof(X) == 2 ? 1 : 2)
    attention_scores_kernel_(double* largest, const X* qkv, const X* kv, const int* starts,
                             const int* lengths, AttentionSize size) {
    typedef AttentionTiling_<X, W> Tiling;
    constexpr AttentionMask MASK = ATTENTION_GENERAL;
    constexpr int M = Tiling::FORWARD_M, COLS = Tiling::FORWARD_COLS, ROWS = 16 * ATTENTION_WARPS * M;
    constexpr int STRIDE = Tiling::STRIDE;
    SMEM_DYNAMIC(X, q_tile);
    X* stream = q_tile + ROWS * STRIDE;
    const int head = blockIdx.x / size.tiles;
    const AttentionHead at = attention_query_head<MASK>(size);
    starts = attention_starts_of<MASK>(starts, at);
    const size_t stride = attention_stride(size), key_stride = attention_key_stride<MASK>(size);
    const X *q = qkv + at.in_q, *k = kv + at.in_k;
    const int t0 = (size.tiles - 1 - (int)(blockIdx.x % size.tiles)) * ROWS,
              last = attention_last<MASK>(size), shift = attention_shift<MASK>(t0, size),
              real = lengths ? min(last, lengths[head / size.NH]) : last;
    const int mine = 16 * M * (threadIdx.x / 32), row0 = t0 + mine + shift,
              keys = t0 + shift < real ? min(min(t0 + ROWS, size.T) + shift, real) : 0;
    const int from = attention_start_of<MASK>(starts, t0 + shift) / COLS * COLS;

    attention_load_<X, ROWS, W>(q_tile, q + t0 * stride, stride, size.T - t0, size);
    attention_load_starts_<X, MASK, ROWS, W>(q_tile, starts, t0 + shift, last);
    attention_load_<X, COLS, W>(stream, k + from * key_stride, key_stride, last - from, size);
    attention_wait_();
    AttentionLeft_<X, M, W, Tiling::FORWARD_KEEP> left;
    attention_left_(left, q_tile + mine * STRIDE);
    float most = 0;
    for (int u0 = from, stage = 0; u0 < keys; u0 += COLS, stage ^= 1) {
        const int next = u0 + COLS;
        if (next < keys) {
            attention_load_<X, COLS, W>(stream + (stage ^ 1) * COLS * STRIDE, k + next * key_stride,
                                        key_stride, last - next, size);
        }
        if (u0 < row0 + 16 * M && attention_some_see_<X, MASK, W>(left.rows, next - 1)) {
            most = attention_largest_product_<X, COLS / 8>(most, left, stream + stage * COLS * STRIDE, row0,
                                                           u0, real);
        }
        attention_wait_();
    }
    most = warp_max(most);
    if (threadIdx.x % 32 == 0 && most > 0) {
        attention_raise_(largest + head % size.NH, most * size.scale.scale);
    }
}

// ---- backward ----

// A lane's share of the warp's rows of out, rows 8i + lane / 4: the four lanes of a row share its
// packs in turn.
template <class X, int M, int W> struct AttentionOut_ {
    static constexpr int SIZE = Pack<X>::SIZE, PACKS = ceil_div(W / SIZE, 4);
    Pack<X> packs[2 * M][PACKS];
};

// Loads the lane's share from global memory. Rows from `count` on and columns from HS on become 0.
template <class X, int M, int W>
__device__ inline void attention_load_out_(AttentionOut_<X, M, W>& mine, const X* out, int count,
                                           const AttentionSize& size) {
    typedef AttentionOut_<X, M, W> Out;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * M * Out::PACKS; i++) {
        const int row = i / Out::PACKS * 8 + lane / 4, d = (i % Out::PACKS * 4 + lane % 4) * Out::SIZE;
        const X* from = out + row * (size_t)size.Q + d;
        const int left = row < count ? size.HS - d : 0;
        mine.packs[i / Out::PACKS][i % Out::PACKS] =
            size.packs && left > 0 ? load_pack_once(from) : attention_gather_(from, left);
    }
}

// Sets rows to (lse * ATTENTION_LOG2_E, delta) of rows 8i + lane / 4, and to zeros from `count` on.
// dout is in shared memory.
template <class X, int M, int W>
__device__ inline void attention_delta_(float2 (&rows)[M][2], const AttentionOut_<X, M, W>& out,
                                        const X* dout, const float* lse, int count) {
    typedef AttentionOut_<X, M, W> Out;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int row = 8 * i + lane / 4;
        float delta = 0.0f;
#pragma unroll
        for (int j = 0; j < Out::PACKS; j++) {
            const int d = (4 * j + lane % 4) * Out::SIZE;
            if (d < W) {
                const Pack<X> x = load_pack(dout + row * (W + Out::SIZE) + d);
#pragma unroll
                for (int e = 0; e < Out::SIZE; e++) {
                    delta += to_float(x[e]) * to_float(out.packs[i][j][e]);
                }
            }
        }
        rows[i / 2][i % 2] =
            make_float2(row < count ? lse[row] * ATTENTION_LOG2_E : 0.0f, attention_row_sum(delta));
    }
}

// Adds to dq of the warp's queries, which start at row0, the part of keys u0 ... u0+8N-1. `rows`
// has lse and delta of the queries.
template <class X, AttentionMask MASK, int M, int N, int W, int KEEP>
__device__ inline void
attention_queries_step_(float (&dq)[M][W / 8][4], const AttentionLeft_<X, M, W, KEEP>& q,
                        const AttentionLeft_<X, M, W, KEEP>& dout, const X* keys, const X* values,
                        const float2 (&rows)[M][2], int row0, int u0, const AttentionSize& size) {
    float s[M][N][4], ds[M][N][4];
    attention_dot_(s, q, keys);
    attention_cap<MASK>(s, size);
    if (u0 + 8 * N - 1 > row0) {
        attention_mask_later(s, row0, u0);
    }
    if (!attention_all_see_<X, MASK, 16 * M, W>(q.rows, u0)) {
        attention_mask_earlier_<X, W>(s, q.rows, u0);
    }
    attention_dot_(ds, dout, values);
    attention_gradient_of_queries<MASK>(s, ds, rows, attention_exponent<MASK>(size));
    attention_mix_(dq, ds, keys);
}

// A block owns ROWS queries of one head. The last queries go first, because they see the most keys.
// Also sets `rows` for the key grads kernel, and its part of `sums`.
// grid   heads * ceil(T / ROWS)      block   128      shared   q, dout, and 2 x (k, v)
// moves  B*T*(QKV + 2 Q) in, B*T*Q out, B*NH*T fp32 in, 2 * B*NH*T fp32 out, Q fp32 out per tile of
//        rows.
//        Tiles of a head are read again from L2.
//        Bound by tensor cores (fp32: by multiply-adds), then by shared memory.
// order  fixed: keys in order
// needs  HS <= W
template <class X, int W, AttentionMask MASK>
__global__ void __launch_bounds__(ATTENTION_THREADS, sizeof(X) == 2 ? 1 : 2)
    attention_backward_queries_kernel_(X* dqkv, float2* rows, float* sums, const X* dout, const X* qkv,
                                       const X* kv, const X* out, const float* lse, const int* starts,
                                       AttentionSize size, int Tp) {
    typedef AttentionTiling_<X, W> Tiling;
    constexpr int M = Tiling::BACKWARD_M, COLS = Tiling::BACKWARD_COLS, ROWS = 16 * ATTENTION_WARPS * M;
    constexpr int STRIDE = Tiling::STRIDE, STEP = Tiling::BACKWARD_STEP;
    SMEM_DYNAMIC(X, q_tile);
    X *d_tile = q_tile + ROWS * STRIDE, *stream = d_tile + ROWS * STRIDE;
    const AttentionHead at = attention_query_head<MASK>(size);
    starts = attention_starts_of<MASK>(starts, at);
    const size_t stride = attention_stride(size), key_stride = attention_key_stride<MASK>(size);
    const X *q = qkv + at.in_q, *k = (attention_is_general(MASK) ? kv : qkv) + at.in_k, *v = k + size.K,
            *d = dout + at.in_out;
    const int t0 = (size.tiles - 1 - (int)(blockIdx.x % size.tiles)) * ROWS,
              last = attention_last<MASK>(size), shift = attention_shift<MASK>(t0, size),
              keys = min(t0 + ROWS, size.T) + shift;
    const int mine = 16 * M * (threadIdx.x / 32), row0 = t0 + mine;
    const int from =
        MASK != ATTENTION_CAUSAL ? attention_start_of<MASK>(starts, t0 + shift) / COLS * COLS : 0;

    attention_load_two_<X, ROWS, W>(q_tile, q, stride, d, size.Q, t0, size.T, size);
    attention_load_starts_<X, MASK, ROWS, W>(q_tile, starts, t0 + shift, last);
    attention_stream_<X, COLS, W>(stream, k, key_stride, v, key_stride, from, last, size);
    AttentionOut_<X, M, W> mine_out; // in flight while the tiles arrive
    attention_load_out_(mine_out, out + at.in_out + row0 * (size_t)size.Q, size.T - row0, size);
    attention_wait_();
    float2 mine_rows[M][2];
    attention_delta_(mine_rows, mine_out, d_tile + mine * STRIDE, lse + at.in_lse + row0, size.T - row0);
    attention_store_rows(rows + blockIdx.x / size.tiles * (size_t)Tp + row0, mine_rows);
    AttentionLeft_<X, M, W, Tiling::QUERIES_KEEP> left_q, left_d;
    attention_left_(left_q, q_tile + mine * STRIDE);
    attention_left_(left_d, d_tile + mine * STRIDE);
    float dq[M][W / 8][4] = {};
    for (int u0 = from; u0 < keys; u0 += COLS) {
        if (u0 + COLS < keys) {
            attention_stream_<X, COLS, W>(stream, k, key_stride, v, key_stride, u0 + COLS, last, size);
        }
#pragma unroll 1
        for (int i = 0; i < COLS; i += STEP) {
            if (row0 < size.T && u0 + i < row0 + shift + 16 * M &&
                // some query sees some key
                attention_some_see_<X, MASK, W>(left_q.rows, u0 + i + STEP - 1)) {
                const X* k_step = attention_stage_<X, COLS, W>(stream, u0) + i * STRIDE;
                attention_queries_step_<X, MASK, M, STEP / 8, W>(dq, left_q, left_d, k_step,
                                                                 k_step + COLS * STRIDE, mine_rows,
                                                                 row0 + shift, u0 + i, size);
            }
        }
        attention_wait_();
    }
    attention_scale_(dq, size.scale.scale);
    attention_store_<X, M, W>(dqkv + at.in_q + row0 * stride, stride, size.T - row0, size,
                              q_tile + mine * STRIDE, dq);
    if (!attention_is_general(MASK) || sums) { // not for gathered keys
        __syncthreads();
        const int head = blockIdx.x / size.tiles;
        attention_column_sums_<X, ROWS, W>(sums, q_tile, head / size.NH, head % size.NH * size.HS, t0, size);
    }
}

// Adds to sums[0] and [1], dk and dv, the parts of the warp's keys, which start at row0, and of the
// queries at positions t ... t+8N-1. If two blocks share the keys, sums[0] is dk of the block with
// `is_dk`, and dv of the other one. `rows` has lse and delta of the queries.
template <class X, AttentionMask MASK, int PARTS, int M, int N, int W, int KEEP_K, int KEEP_V>
__device__ inline void
attention_keys_step_(float (&sums)[3 - PARTS][M][W / 8][4], const AttentionLeft_<X, M, W, KEEP_K>& k,
                     const AttentionLeft_<X, M, W, KEEP_V>& v, const X* queries, const X* dout,
                     const float2* rows, const AttentionStarts<MASK>& first_key, int row0, int t, int is_dk,
                     const AttentionSize& size) {
    const int last = attention_last<MASK>(size);
    const float scale = attention_exponent<MASK>(size);
    float s[M][N][4], ds[M][N][4];
    attention_dot_(s, k, queries);
    attention_cap<MASK>(s, size);
    if (t < row0 + 16 * M - 1) {
        attention_mask_earlier_queries(s, row0, t);
    }
    if (MASK != ATTENTION_CAUSAL && first_key[min(t + 8 * N, last) - 1] > row0) {
        attention_mask_later_queries(s, first_key, row0, t, last);
    }
    if (PARTS == 1 || is_dk) {
        attention_dot_(ds, v, dout);
        attention_gradient_of_keys<MASK>(s, ds, rows, scale);
    } else {
        attention_probabilities_of_keys(s, rows, scale);
    }
    if (PARTS == 1) {
        attention_mix_(sums[2 - PARTS], s, dout);
        attention_mix_(sums[0], ds, queries);
    } else if (is_dk) {
        attention_mix_(sums[0], ds, queries);
    } else {
        attention_mix_(sums[0], s, dout);
    }
}

// A block owns ROWS keys of one key head and their values; or two blocks, one for each gradient.
// The first keys go first, because the most queries see them. Also sets its part of `sums`.
// grid   key heads * ceil(T / ROWS), twice if WIDE      block   128
// shared k, v, and 2 x (q, dout)
// moves  B*T*(QKV + Q) in, B*T*2K out, 2 * B*NH*T fp32 in, 2 K fp32 out per tile of rows.
//        Tiles of a head are read again from L2.
//        Bound by tensor cores (fp32: by multiply-adds), then by shared memory.
// order  fixed: the heads that read the keys in order, and the queries of each
// needs  HS <= W
// Spills 4 to 16 bytes on sm_90a at W = 64 to 128 in 16 bits, with some masks: two kinds of
// addresses for ldmatrix save moves, but need one register too many.
template <class X, int W, AttentionMask MASK>
__global__ void __launch_bounds__(ATTENTION_THREADS, sizeof(X) == 2 ? 1 : 2)
    attention_backward_keys_kernel_(X* dqkv, X* dkv, float* sums, const X* dout, const X* qkv, const X* kv,
                                    const float2* rows, const int* starts, AttentionSize size, int Tp) {
    typedef AttentionTiling_<X, W> Tiling;
    constexpr int M = Tiling::BACKWARD_M, COLS = Tiling::BACKWARD_COLS, ROWS = 16 * ATTENTION_WARPS * M;
    constexpr int STRIDE = Tiling::STRIDE, STEP = Tiling::BACKWARD_STEP, PARTS = Tiling::KEYS_PARTS;
    SMEM_DYNAMIC(X, k_tile);
    X *v_tile = k_tile + ROWS * STRIDE, *stream = v_tile + ROWS * STRIDE;
    const unsigned block = blockIdx.x / PARTS; // unsigned: fewer registers
    const int is_dk = blockIdx.x % PARTS, key_head = block / size.tiles, group = size.NH / size.KV;
    // offsets of the first head that reads the keys
    const AttentionHead at = attention_head<MASK>(key_head / size.KV, key_head % size.KV * group, size);
    const AttentionStarts<MASK> first_key = {starts, (int)at.in_starts};
    const size_t stride = attention_stride(size), key_stride = attention_key_stride<MASK>(size);
    const X *q = qkv + at.in_q, *k = (attention_is_general(MASK) ? kv : qkv) + at.in_k, *v = k + size.K,
            *d = dout + at.in_out;
    const int u0 = (int)(block % size.tiles) * ROWS, mine = 16 * M * (threadIdx.x / 32), row0 = u0 + mine,
              last = attention_last<MASK>(size);
    // first query that sees the keys
    const int first = attention_is_general(MASK) ? token_chunks_from(size.chunks, u0, size.T) : u0;
    rows += key_head * group * (size_t)Tp;

    attention_load_two_<X, ROWS, W>(k_tile, k, key_stride, v, key_stride, u0, last, size);
    attention_stream_<X, COLS, W>(stream, q, stride, d, size.Q, first, size.T, size);
    attention_wait_();
    AttentionLeft_<X, M, W, Tiling::KEYS_KEEP_K> left_k;
    AttentionLeft_<X, M, W, Tiling::KEYS_KEEP_V> left_v;
    attention_left_(left_k, k_tile + mine * STRIDE);
    attention_left_(left_v, v_tile + mine * STRIDE);
    float grads[3 - PARTS][M][W / 8][4] = {};
    for (int left = group; left > 0; left--) {
        int shift = attention_shift<MASK>(first, size);
        for (int t0 = first; t0 < size.T && (MASK == ATTENTION_CAUSAL || first_key[t0 + shift] < u0 + ROWS);
             t0 += COLS) {
            shift = attention_shift<MASK>(t0, size);
            if (t0 + COLS < size.T) {
                attention_stream_<X, COLS, W>(stream, q, stride, d, size.Q, t0 + COLS, size.T, size);
            }
#pragma unroll 1
            for (int i = 0; i < COLS; i += STEP) {
                const int t = t0 + shift + i; // position of the first query
                if (row0 < last && t0 + i < size.T && t + STEP > row0 &&
                    // some query sees some key
                    (MASK == ATTENTION_CAUSAL || first_key[t] < row0 + 16 * M)) {
                    const X* q_step = attention_stage_<X, COLS, W>(stream, t0) + i * STRIDE;
                    attention_keys_step_<X, MASK, PARTS, M, STEP / 8, W>(
                        grads, left_k, left_v, q_step, q_step + COLS * STRIDE, rows + t0 + i, first_key, row0,
                        t, is_dk, size);
                }
            }
            attention_wait_();
        }
        q += size.HS;
        d += size.HS;
        rows += Tp;
        if (left > 1) { // the next head's queries
            attention_stream_<X, COLS, W>(stream, q, stride, d, size.Q, first, size.T, size);
            attention_wait_();
        }
    }
    attention_scale_(grads[0], PARTS == 1 || is_dk ? size.scale.scale : 1.0f);
    // dv follows K columns after dk
    const int own = PARTS > 1 && !is_dk ? size.K : 0;
    X* to = (attention_is_general(MASK) ? dkv : dqkv) + at.in_k + row0 * key_stride;
    attention_store_<X, M, W>(to + own, key_stride, last - row0, size, k_tile + mine * STRIDE, grads[0]);
    if constexpr (PARTS == 1) {
        attention_store_<X, M, W>(to + size.K, key_stride, last - row0, size, v_tile + mine * STRIDE,
                                  grads[1]);
    }
    if (!attention_is_general(MASK) || sums) { // not for gathered keys
        __syncthreads();
        const int b = key_head / size.KV, column = size.Q + key_head % size.KV * size.HS;
        attention_column_sums_<X, ROWS, W>(sums, k_tile, b, column + own, u0, size);
        if (PARTS == 1) {
            attention_column_sums_<X, ROWS, W>(sums, v_tile, b, column + size.K, u0, size);
        }
    }
}

#endif
