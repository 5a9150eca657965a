/*
tiles.cuh -- tiles of matrices in shared memory, for matmuls by ldmatrix and mma_16816 (ptx.cuh).

A tile has rows of W elements, which lie W + Pack<X>::SIZE elements apart: an odd multiple of 16
bytes, so that the eight rows that ldmatrix reads at a time lie in different banks.
*/
#ifndef LLMC_TILES_CUH
#define LLMC_TILES_CUH

#include "llmc/gpu/gpu.cuh"

// Set if a multiprocessor has 100 KiB of shared memory: RTX 3090, 4090 and 5090, A40, L40S.
enum { TILE_MEMORY_IS_SMALL = GPU_SM == 86 || GPU_SM == 89 || GPU_SM >= 120 };

// Returns the distance of the rows of a tile.
template <class X> __host__ __device__ constexpr int tile_stride(int W) { return W + Pack<X>::SIZE; }

// Returns the address that a lane passes to ldmatrix for 16 x 16 elements: matrix 0 above 1, to the
// right 2 above 3. So lie a left operand by rows, and, transposed, a right one by columns.
template <class X, int W> __device__ inline const X* tile_16x16(const X* corner) {
    return corner + threadIdx.x % 16 * tile_stride<X>(W) + threadIdx.x % 32 / 16 * 8;
}

// Returns it for matrices 0 and 1 side by side, with 2 and 3 below. A right operand has this layout
// if its columns are the rows of the tile, and, transposed, a left one. mma_16816 reads b from two
// adjacent registers; the other order would cost two moves per pair.
template <class X, int W> __device__ inline const X* tile_right_16x16(const X* corner) {
    const int lane = threadIdx.x % 32;
    return corner + (lane % 8 + lane / 16 * 8) * tile_stride<X>(W) + lane / 8 % 2 * 8;
}

#endif
