/*
delta_tiles.cuh -- matmuls of tiles for the kernels of delta_rule.cuh: 64 tokens of a block, 16 of
each warp.

A tile has rows of a multiple of 16 elements of X in shared memory. The results of a warp are 16
rows and 64 columns: element e of part n in lane l = 4g + t is row g + 8(e / 2), column
8n + 2t + e % 2. bf16 and fp16 use mma_16816, fp32 multiply-adds in its layout.
*/
#ifndef LLMC_DELTA_TILES_CUH
#define LLMC_DELTA_TILES_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/ops/delta_rule.h"

enum { DELTA_C = DELTA_RULE_CHUNK, DELTA_WARPS = 4, DELTA_THREADS = 32 * DELTA_WARPS };
static_assert((int)DELTA_C == 16 * DELTA_WARPS, "each token has a warp");

// Returns the distance of rows of n elements, a multiple of 16: an odd multiple of 16 bytes, so
// that eight rows lie in different banks.
template <class X> __host__ __device__ constexpr int delta_stride(int n) { return n + Pack<X>::SIZE; }

// Elements of a tile of 64 x 64.
template <class X> constexpr int DELTA_TILE = DELTA_C* delta_stride<X>(DELTA_C);

// Returns the tiles of the columns of a state with dk rows: 1, 2 or 4.
__host__ __device__ constexpr int delta_state_tiles(int dk) { return dk <= 64 ? 1 : dk <= 128 ? 2 : 4; }

__host__ __device__ constexpr int delta_padded(int n) { return ceil_div(n, 16) * 16; }

// A lane's place in the results of a warp: rows row and row + 8, columns col, col + 1, col + 8, ...
struct DeltaLane {
    int row, col;
};
__device__ inline DeltaLane delta_lane(void) {
    const int lane = (int)threadIdx.x % 32;
    return {(int)threadIdx.x / 32 * 16 + lane / 4, lane % 4 * 2};
}

// Starts to copy 64 rows of `cols` columns, of which `there` rows exist; the rest, up to `padded`
// columns, becomes 0. The whole block calls it.
template <class X>
__device__ inline void delta_load(X* tile, int stride, const X* from, size_t row, int there, int cols,
                                  int padded) {
    const int packs = padded / Pack<X>::SIZE;
    for (int i = (int)threadIdx.x; i < DELTA_C * packs; i += DELTA_THREADS) {
        const int r = i / packs, c = i % packs * Pack<X>::SIZE;
        cp_async_16(tile + r * stride + c, from + (size_t)r * row + c, r < there && c < cols ? 16 : 0);
    }
}

// Copies such a tile back, without what does not exist.
template <class X>
__device__ inline void delta_save(X* to, size_t row, const X* tile, int stride, int there, int cols) {
    const int packs = cols / Pack<X>::SIZE;
    for (int i = (int)threadIdx.x; i < there * packs; i += DELTA_THREADS) {
        const int r = i / packs, c = i % packs * Pack<X>::SIZE;
        store_pack(to + (size_t)r * row + c, load_pack(tile + r * stride + c));
    }
}

__device__ inline void delta_wait(void) {
    cp_async_wait_all();
    __syncthreads();
}

// Stores a warp's results, rounded, into a tile whose row 0 is row 0 of the block.
template <class X> __device__ inline void delta_store(X* tile, const float (&acc)[8][4]) {
    const DeltaLane at = delta_lane();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        tile[(at.row + i % 4 / 2 * 8) * delta_stride<X>(DELTA_C) + i / 4 * 8 + at.col + i % 2] =
            from_float<X>(acc[i / 4][i % 4]);
    }
}

// Returns the element of a tile at a lane's result i.
template <class X> __device__ inline float delta_at(const X* tile, DeltaLane at, int i) {
    return to_float(tile[(at.row + i % 4 / 2 * 8) * delta_stride<X>(DELTA_C) + i / 4 * 8 + at.col + i % 2]);
}

__device__ inline void delta_clear(float (&acc)[8][4]) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        acc[i / 4][i % 4] = 0.0f;
    }
}

// Multiplies the rows of a warp's results by factor, of 64 tokens.
__device__ inline void delta_scale_rows(float (&acc)[8][4], const float* factor, float sign) {
    const DeltaLane at = delta_lane();
    const float low = sign * factor[at.row], high = sign * factor[at.row + 8];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        acc[i / 4][i % 4] *= i % 4 < 2 ? low : high;
    }
}

// Adds left right to acc (16, 64), for `depth` terms, a multiple of 16. left is (16, depth) or,
// with LEFT_T, its transpose; right is (depth, 64) or, with RIGHT_T, its transpose; in shared
// memory.
template <bool LEFT_T, bool RIGHT_T, class X>
__device__ inline void delta_matmul(float (&acc)[8][4], const X* left, int left_stride, const X* right,
                                    int right_stride, int depth) {
    const int lane = (int)threadIdx.x % 32, down = lane % 16, across = lane / 16 * 8,
              down_right = lane % 8 + lane / 16 * 8, across_right = lane / 8 % 2 * 8; // tiles.cuh
    for (int k = 0; k < depth; k += 16) {
        unsigned a[4], b[4];
        if (LEFT_T) {
            ldmatrix_x4_trans(a, left + (k + down_right) * left_stride + across_right);
        } else {
            ldmatrix_x4(a, left + down * left_stride + k + across);
        }
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            if (RIGHT_T) {
                ldmatrix_x4(b, right + (8 * n + down_right) * right_stride + k + across_right);
            } else {
                ldmatrix_x4_trans(b, right + (k + down) * right_stride + 8 * n + across);
            }
            mma_16816<X>(acc[n], a, b[0], b[1]);
            mma_16816<X>(acc[n + 1], a, b[2], b[3]);
        }
    }
}

template <bool LEFT_T, bool RIGHT_T>
__device__ inline void delta_matmul(float (&acc)[8][4], const float* left, int left_stride,
                                    const float* right, int right_stride, int depth) {
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4 * 2;
    for (int k = 0; k < depth; k++) {
        const float low = LEFT_T ? left[k * left_stride + g] : left[g * left_stride + k],
                    high = LEFT_T ? left[k * left_stride + g + 8] : left[(g + 8) * left_stride + k];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int n = i / 2, c = 8 * n + t + i % 2;
            const float y = RIGHT_T ? right[c * right_stride + k] : right[k * right_stride + c];
            acc[n][i % 2] += low * y;
            acc[n][i % 2 + 2] += high * y;
        }
    }
}

// Returns the sum over the four lanes that share a row, to all four.
__device__ inline float delta_row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Stores a warp's results as rows of a (N, Hv, dv) array or of v, `row` apart, if they exist.
template <class X>
__device__ inline void delta_store_rows(X* to, size_t row, const float (&acc)[8][4], int count, int cols) {
    const DeltaLane at = delta_lane();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = at.row + i % 4 / 2 * 8, c = i / 4 * 8 + at.col + i % 2;
        if (r < count && c < cols) {
            to[(size_t)r * row + c] = from_float<X>(acc[i / 4][i % 4]);
        }
    }
}

// Adds the product of two tiles at a lane's elements to the numbers of its two rows.
template <class X>
__device__ inline void delta_row_dots(float (&dots)[2], const X* left, const float (&right)[8][4],
                                      float sign) {
    const DeltaLane at = delta_lane();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        dots[i % 4 / 2] += sign * delta_at(left, at, i) * right[i / 4][i % 4];
    }
}

// Adds numbers of a lane's two rows, summed over the four lanes of each, to those of the rows.
__device__ inline void delta_add_rows(float* to, float (&dots)[2]) {
    const DeltaLane at = delta_lane();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sum = delta_row_sum(dots[i]);
        if (threadIdx.x % 4 == 0) {
            to[at.row + 8 * i] += sum;
        }
    }
}

// ---- a state of 64 columns in registers ----

// Rows of a state that a warp has in registers: 16 (w + 4 i) ... of part i.
template <int KT> struct DeltaState { float part[KT][8][4]; };

// Stores a state, rounded, for the next matmuls.
template <int KT, class X> __device__ inline void delta_store_state(X* tile, const DeltaState<KT>& state) {
#pragma unroll
    for (int i = 0; i < KT; i++) {
        delta_store(tile + i * DELTA_TILE<X>, state.part[i]);
    }
}

// Multiplies a state by a number.
template <int KT> __device__ inline void delta_decay_state(DeltaState<KT>& state, float factor) {
#pragma unroll
    for (int i = 0; i < KT * 32; i++) {
        state.part[i / 32][i / 4 % 8][i % 4] *= factor;
    }
}

// Adds rows^T right to a state, for rows (64, dk) and right (64, 64).
template <int KT, class X>
__device__ inline void delta_add_outer(DeltaState<KT>& state, const X* rows, int stride, const X* right,
                                       int padded) {
#pragma unroll
    for (int i = 0; i < KT; i++) {
        const int row0 = (int)threadIdx.x / 32 * 16 + 64 * i;
        if (row0 < padded) {
            delta_matmul<true, false>(state.part[i], rows + row0, stride, right, delta_stride<X>(DELTA_C),
                                      DELTA_C);
        }
    }
}

// Stores a state in fp32.
template <int KT>
__device__ inline void delta_state_save(float* to, const DeltaState<KT>& state, DeltaSizes s, int cols) {
    const DeltaLane at = delta_lane();
#pragma unroll
    for (int i = 0; i < KT * 32; i++) {
        const int r = at.row + i / 32 * 64 + i % 4 / 2 * 8, c = i / 4 % 8 * 8 + at.col + i % 2;
        if (r < s.dk && c < cols) {
            to[(size_t)r * s.dv + c] = state.part[i / 32][i / 4 % 8][i % 4];
        }
    }
}

#endif
