/*
expert_matmul.cuh -- matmuls of rows that are sorted by expert with the matrix of each expert, on
the GPU.

    expert_matmul_forward           out  = inp weight_e^T           for the rows of expert e
    expert_matmul_backward_input    dinp = dout weight_e            for the rows of expert e
    expert_matmul_backward_weight   dweight_e = dout^T inp          over the rows of expert e

    inp, dinp   (M, C)         C a multiple of EXPERT_PACK
    out         (M, OC)
    dout        (M, OC)        rows are expert_padded(OC) elements apart, with zeros after OC
    weight      (E, OC, C)     dweight     (E, OC, C)
    first       (E + 1)        int32 on the GPU: expert e has rows first[e] ... first[e+1]-1

X is float, bf16 or fp16; sums are fp32. Results may have another type than X. They are set, or
added to, as `mode` says; the gradient of an expert without rows is 0.

Blocks find their tiles from `first` on the GPU: the host needs not know how many rows an expert
has, so a graph can repeat these matmuls. Rows after first[E] are neither read nor written.

A block of four warps computes 128 x 128 elements, a warp 64 x 64 of them. Both operands pass
through shared memory, DEPTH elements of each sum at a time; the next ones are on their way
meanwhile. Each element is one sum in a fixed order, the same for any number of rows: a token has
the same bits in every batch.
*/
#ifndef LLMC_EXPERT_MATMUL_CUH
#define LLMC_EXPERT_MATMUL_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/gpu/tiles.cuh"
#include "llmc/ops/expert_rows.cuh"
#include "llmc/ops/expert_wgmma.cuh"
#include "llmc/ops/gradient.h"

enum { EXPERT_WARP_SIDE = 64, EXPERT_WARPS = 4, EXPERT_THREADS = 32 * EXPERT_WARPS };

// Sizes of tiles. Two blocks fit on a multiprocessor: up to 230 registers (sm_90a, CUDA 13), no
// spills.
template <class X> struct ExpertTiling_ {
    static constexpr int DEPTH = 64 / (int)sizeof(X), STAGES = TILE_MEMORY_IS_SMALL ? 2 : 4;
    static constexpr int ALONG = EXPERT_SIDE * tile_stride<X>(DEPTH),
                         ACROSS = DEPTH * tile_stride<X>(EXPERT_SIDE);
    static constexpr int OPERAND = ALONG > ACROSS ? ALONG : ACROSS; // elements of a stage
    static constexpr size_t BYTES = (size_t)STAGES * 2 * OPERAND * sizeof(X);
    static_assert(BYTES <= 81 << 10 && (!TILE_MEMORY_IS_SMALL || BYTES <= 41 << 10), "two blocks fit");
};

// ---- operands ----

// One side of a tile of results: up to 128 rows or columns, `side` of which exist.
template <class X> struct ExpertOperand_ {
    const X* data;
    size_t stride;
    int side;
};

// Starts to copy ROWS x COLS elements; the whole block calls it. Rows from `rows` and columns from
// `cols` on become 0. A thread stays in its column.
template <class X, int ROWS, int COLS>
__device__ inline void expert_load_(X* tile, const X* from, size_t stride, int rows, int cols) {
    constexpr int SIZE = Pack<X>::SIZE, PACKS = COLS / SIZE, STEP = EXPERT_THREADS / PACKS;
    static_assert(EXPERT_THREADS % PACKS == 0 && ROWS % STEP == 0, "threads have equal shares");
    const int row = (int)threadIdx.x / PACKS, col = (int)threadIdx.x % PACKS * SIZE;
    const int there = col < cols ? rows - row : 0;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP) {
        cp_async_16(tile + (row + r) * tile_stride<X>(COLS) + col, from + (row + r) * stride + col,
                    r < there ? 16 : 0);
    }
}

// Starts to copy elements k ... k + DEPTH-1, of K, of the sums.
template <class X, ExpertLayout LAYOUT>
__device__ inline void expert_load_operand_(X* tile, const ExpertOperand_<X>& operand, int k, int K) {
    constexpr int DEPTH = ExpertTiling_<X>::DEPTH;
    if constexpr (LAYOUT == EXPERT_ALONG) {
        expert_load_<X, EXPERT_SIDE, DEPTH>(tile, operand.data + k, operand.stride, operand.side, K - k);
    } else {
        expert_load_<X, DEPTH, EXPERT_SIDE>(tile, operand.data + k * operand.stride, operand.stride, K - k,
                                            operand.side);
    }
}

// Returns element i of a side in step k of the sums, in a tile of operands.
template <ExpertLayout LAYOUT, class X> __device__ inline const X* expert_at_(const X* tile, int i, int k) {
    constexpr int ALONG = tile_stride<X>(ExpertTiling_<X>::DEPTH), ACROSS = tile_stride<X>(EXPERT_SIDE);
    return LAYOUT == EXPERT_ALONG ? tile + i * ALONG + k : tile + k * ACROSS + i;
}

// Loads 16 x 16 elements of the left operand, from row i on.
template <ExpertLayout LAYOUT, class X>
__device__ inline void expert_left_(unsigned (&a)[4], const X* tile, int i, int k) {
    const X* corner = expert_at_<LAYOUT>(tile, i, k);
    if constexpr (LAYOUT == EXPERT_ALONG) {
        ldmatrix_x4(a, tile_16x16<X, ExpertTiling_<X>::DEPTH>(corner));
    } else {
        ldmatrix_x4_trans(a, tile_right_16x16<X, EXPERT_SIDE>(corner));
    }
}

// Loads 16 columns of the right operand, from column i on.
template <ExpertLayout LAYOUT, class X>
__device__ inline void expert_right_(unsigned (&b)[4], const X* tile, int i, int k) {
    const X* corner = expert_at_<LAYOUT>(tile, i, k);
    if constexpr (LAYOUT == EXPERT_ALONG) {
        ldmatrix_x4(b, tile_right_16x16<X, ExpertTiling_<X>::DEPTH>(corner));
    } else {
        ldmatrix_x4_trans(b, tile_16x16<X, EXPERT_SIDE>(corner));
    }
}

// ---- the sums of a tile ----

// Results of a warp, in the layout of mma_16816 (ptx.cuh).
typedef float ExpertSums_[EXPERT_WARP_SIDE / 16][EXPERT_WARP_SIDE / 8][4];

// Adds DEPTH products to each sum of the warp whose rows start at `row` and columns at `col`.
template <ExpertLayout LEFT, ExpertLayout RIGHT, class X>
__device__ inline void expert_multiply_(ExpertSums_& sums, const X* left, const X* right, int row, int col) {
#pragma unroll
    for (int k = 0; k < ExpertTiling_<X>::DEPTH; k += 16) {
        unsigned a[EXPERT_WARP_SIDE / 16][4], b[4];
#pragma unroll
        for (int m = 0; m < EXPERT_WARP_SIDE / 16; m++) {
            expert_left_<LEFT>(a[m], left, row + 16 * m, k);
        }
#pragma unroll
        for (int n = 0; n < EXPERT_WARP_SIDE / 8; n += 2) {
            expert_right_<RIGHT>(b, right, col + 8 * n, k);
#pragma unroll
            for (int m = 0; m < EXPERT_WARP_SIDE / 16; m++) {
                mma_16816<X>(sums[m][n], a[m], b[0], b[1]);
                mma_16816<X>(sums[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <ExpertLayout LEFT, ExpertLayout RIGHT>
__device__ inline void expert_multiply_(ExpertSums_& sums, const float* left, const float* right, int row,
                                        int col) {
    constexpr int ROWS = EXPERT_WARP_SIDE / 8, COLS = EXPERT_WARP_SIDE / 4;
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
#pragma unroll 2
    for (int k = 0; k < ExpertTiling_<float>::DEPTH; k++) {
        float x[ROWS], y[COLS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            x[i] = *expert_at_<LEFT>(left, row + 8 * i + g, k);
        }
#pragma unroll
        for (int j = 0; j < COLS; j++) {
            y[j] = *expert_at_<RIGHT>(right, col + j / 2 * 8 + 2 * t + j % 2, k);
        }
#pragma unroll
        for (int i = 0; i < ROWS * COLS; i++) {
            const int m = i / COLS, n = i % COLS;
            sums[m / 2][n / 2][m % 2 * 2 + n % 2] += x[m] * y[n];
        }
    }
}

// Sets the sums, over K. The block's next use of `memory` needs a barrier first.
template <ExpertLayout LEFT, ExpertLayout RIGHT, class X>
__device__ inline void expert_sums_(ExpertSums_& sums, X* memory, const ExpertOperand_<X>& left,
                                    const ExpertOperand_<X>& right, int K) {
    constexpr int DEPTH = ExpertTiling_<X>::DEPTH, STAGES = ExpertTiling_<X>::STAGES,
                  OPERAND = ExpertTiling_<X>::OPERAND;
    const int warp = (int)threadIdx.x / 32, row = warp / 2 * EXPERT_WARP_SIDE,
              col = warp % 2 * EXPERT_WARP_SIDE, steps = ceil_div(K, DEPTH);
    const auto load = [&](int step) {
        X* stage = memory + step % STAGES * 2 * OPERAND;
        if (step < steps) {
            expert_load_operand_<X, LEFT>(stage, left, step * DEPTH, K);
            expert_load_operand_<X, RIGHT>(stage + OPERAND, right, step * DEPTH, K);
        }
        cp_async_commit(); // also of no copies: then each step waits for as many groups
    };
    for (int step = 0; step < STAGES - 1; step++) {
        load(step);
    }
    for (int step = 0; step < steps; step++) {
        const X* stage = memory + step % STAGES * 2 * OPERAND;
        cp_async_wait<STAGES - 2>();
        __syncthreads(); // also: nobody reads the stage before this one any more
        load(step + STAGES - 1);
        expert_multiply_<LEFT, RIGHT>(sums, stage, stage + OPERAND, row, col);
    }
}

// ---- results ----

// Writes the sums of a warp, 16 rows at a time, through its part of `memory`.
template <class OUT>
__device__ inline void expert_write_(const ExpertResult<OUT>& out, const ExpertSums_& sums, float* memory) {
    constexpr int SIZE = Pack<OUT>::SIZE, PACKS = EXPERT_WARP_SIDE / SIZE,
                  STRIDE = tile_stride<float>(EXPERT_WARP_SIDE);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, row0 = warp / 2 * EXPERT_WARP_SIDE,
              col0 = warp % 2 * EXPERT_WARP_SIDE, packs = out.stride % SIZE == 0;
    float* tile = memory + warp * 16 * STRIDE;
#pragma unroll
    for (int m = 0; m < EXPERT_WARP_SIDE / 16; m++) {
#pragma unroll
        for (int i = 0; i < EXPERT_WARP_SIDE / 4; i++) {
            const int n = i / 2, half = i % 2;
            *reinterpret_cast<float2*>(tile + (8 * half + lane / 4) * STRIDE + 8 * n + lane % 4 * 2) =
                make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
        }
        __syncwarp();
        for (int i = lane; i < 16 * PACKS; i += 32) {
            const int r = i / PACKS, c = i % PACKS * SIZE, row = row0 + 16 * m + r, col = col0 + c;
            if (row < out.rows && col < out.cols) {
                expert_store(out.data + row * out.stride + col, tile + r * STRIDE + c, out.cols - col, packs,
                             out.mode);
            }
        }
        __syncwarp();
    }
}

// Computes the tile of a block.
template <ExpertLayout LEFT, ExpertLayout RIGHT, class OUT, class X>
__device__ inline void expert_tile_(const ExpertResult<OUT>& out, const ExpertOperand_<X>& left,
                                    const ExpertOperand_<X>& right, int K) {
    SMEM_DYNAMIC(X, memory);
    ExpertSums_ sums = {};
    expert_sums_<LEFT, RIGHT>(sums, memory, left, right, K);
    __syncthreads();
    expert_write_(out, sums, reinterpret_cast<float*>(memory));
}

// ---- kernels ----

// A block computes a tile of out (forward, K = C, width = OC) or dinp (K = OC, width = C).
// grid   tiles * ceil(width / 128)      block   128      shared   up to 81 KiB
// moves  each row width / 128 times, each matrix once for 128 rows of its expert, mostly from L2;
//        M*width out. Bound by tensor cores if experts have hundreds of rows.
// order  fixed
// needs  C and the distance `stride` of inp's rows multiples of a pack, aligned addresses
template <ExpertLayout WEIGHT, class OUT, class X>
__global__ void __launch_bounds__(EXPERT_THREADS)
    expert_rows_kernel(OUT* out, const X* inp, const X* weight, ExpertRows rows, int K, int stride, int width,
                       GradientMode mode) {
    const int columns = ceil_div(width, (int)EXPERT_SIDE), col = (int)blockIdx.x % columns * EXPERT_SIDE;
    const ExpertTile tile = expert_find(rows, (int)blockIdx.x / columns);
    if (tile.rows <= 0) {
        return;
    }
    const X* matrix = weight + (size_t)tile.e * K * width;
    const ExpertResult<OUT> result = {out + (size_t)tile.row * width + col, (size_t)width, tile.rows,
                                      width - col, mode};
    const ExpertOperand_<X> left = {inp + (size_t)tile.row * stride, (size_t)stride, tile.rows},
                            right = {WEIGHT == EXPERT_ALONG ? matrix + (size_t)col * K : matrix + col,
                                     (size_t)(WEIGHT == EXPERT_ALONG ? K : width), width - col};
    expert_tile_<EXPERT_ALONG, WEIGHT>(result, left, right, K);
}

// A block computes a tile of the gradient of a matrix.
// grid   E * ceil(OC / 128) * ceil(C / 128)      block   128      shared   up to 81 KiB
// moves  each row of dout C / 128 times and of inp OC / 128 times, mostly from L2; E*OC*C out, and
//        in if added to. Bound by tensor cores if experts have hundreds of rows.
// order  fixed
// needs  C and the distance `stride` of dout's rows multiples of a pack, aligned addresses
template <class OUT, class X>
__global__ void __launch_bounds__(EXPERT_THREADS)
    expert_weight_kernel(OUT* dweight, const X* dout, const X* inp, ExpertRows rows, int C, int OC,
                         int stride, GradientMode mode) {
    const int columns = ceil_div(C, (int)EXPERT_SIDE), tiles = ceil_div(OC, (int)EXPERT_SIDE) * columns,
              e = (int)blockIdx.x / tiles, i = (int)blockIdx.x % tiles;
    const int row = i / columns * EXPERT_SIDE, col = i % columns * EXPERT_SIDE;
    const int begin = rows.first ? rows.first[e] : 0, end = rows.first ? rows.first[e + 1] : rows.rows;
    if (begin == end && mode == GRADIENT_ADD) {
        return;
    }
    const ExpertResult<OUT> result = {dweight + ((size_t)e * OC + row) * C + col, (size_t)C, OC - row,
                                      C - col, mode};
    const ExpertOperand_<X> left = {dout + (size_t)begin * stride + row, (size_t)stride, stride - row},
                            right = {inp + (size_t)begin * C + col, (size_t)C, C - col};
    expert_tile_<EXPERT_ACROSS, EXPERT_ACROSS>(result, left, right, end - begin);
}

// ---- launchers ----

// Returns 1 if kernels of type X can use wgmma for these rows.
template <class X> static inline int expert_can_wgmma(const ExpertRows* rows) {
    return PTX_HAS_WGMMA && sizeof(X) == 2 && rows->first && rows->all > 0;
}

template <class X> static inline int expert_uses_wgmma_(const ExpertRows* rows) {
    return rows->by != EXPERT_BY_MMA && expert_can_wgmma<X>(rows);
}

// Returns the blocks of a grid.
static inline unsigned expert_grid_(size_t tiles, int C) {
    CHECK(tiles <= INT_MAX, "matmul of experts: %zu tiles do not fit into a grid", tiles);
    CHECK(C % EXPERT_PACK == 0, "matmul of experts: %d columns, wanted a multiple of %d", C,
          (int)EXPERT_PACK);
    return (unsigned)tiles;
}

// Computes `width` columns, each a sum of K products.
template <ExpertLayout WEIGHT, class OUT, class X>
static inline void expert_matmul_rows_(OUT* out, const X* inp, const X* weight, const ExpertRows* rows,
                                       ExpertMatrix matrix, GradientMode mode, const Gpu* gpu) {
    const int C = matrix.C, is_along = WEIGHT == EXPERT_ALONG, K = is_along ? C : matrix.OC,
              width = is_along ? matrix.OC : C;
    const size_t tiles = (size_t)expert_tiles(rows) * ceil_div(width, (int)EXPERT_SIDE);
    const unsigned grid = expert_grid_(tiles, C);
#if PTX_HAS_WGMMA
    if constexpr (sizeof(X) == 2) {
        if (expert_uses_wgmma_<X>(rows)) {
            expert_wgmma_rows<WEIGHT>(out, inp, weight, rows, matrix, mode, gpu);
            return;
        }
    }
#endif
    launch(expert_rows_kernel<WEIGHT, OUT, X>, grid, EXPERT_THREADS, ExpertTiling_<X>::BYTES, gpu, out, inp,
           weight, *rows, K, expert_padded(K), width, mode);
}

// Sets out, which may be fp32 or of X.
template <class OUT, class X>
static inline void expert_matmul_forward(OUT* out, const X* inp, const X* weight, const ExpertRows* rows,
                                         ExpertMatrix matrix, const Gpu* gpu) {
    expert_matmul_rows_<EXPERT_ALONG>(out, inp, weight, rows, matrix, GRADIENT_SET, gpu);
}

// Sets or adds to dinp.
template <class X>
static inline void expert_matmul_backward_input(X* dinp, const X* dout, const X* weight,
                                                const ExpertRows* rows, ExpertMatrix matrix,
                                                GradientMode mode, const Gpu* gpu) {
    expert_matmul_rows_<EXPERT_ACROSS>(dinp, dout, weight, rows, matrix, mode, gpu);
}

template <class OUT, class X>
static inline void expert_matmul_weight_(OUT* dweight, const X* dout, const X* inp, const ExpertRows* rows,
                                         ExpertMatrix matrix, GradientMode mode, const Gpu* gpu) {
    const int C = matrix.C, OC = matrix.OC;
    const size_t tiles = (size_t)rows->E * ceil_div(OC, (int)EXPERT_SIDE) * ceil_div(C, (int)EXPERT_SIDE);
    const unsigned grid = expert_grid_(tiles, C);
#if PTX_HAS_WGMMA
    if constexpr (sizeof(X) == 2) {
        if (expert_uses_wgmma_<X>(rows)) {
            expert_wgmma_weight(dweight, dout, inp, rows, matrix, mode, gpu);
            return;
        }
    }
#endif
    launch(expert_weight_kernel<OUT, X>, grid, EXPERT_THREADS, ExpertTiling_<X>::BYTES, gpu, dweight, dout,
           inp, *rows, C, OC, expert_padded(OC), mode);
}

// Sets or adds to dweight.
template <class X>
static inline void expert_matmul_backward_weight(Gradient dweight, const X* dout, const X* inp,
                                                 const ExpertRows* rows, ExpertMatrix matrix,
                                                 GradientMode mode, const Gpu* gpu) {
    GRADIENT_DISPATCH(dweight, X,
                      expert_matmul_weight_((G*)dweight.data, dout, inp, rows, matrix, mode, gpu));
}

#endif
