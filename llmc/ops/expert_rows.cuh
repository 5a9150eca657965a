/*
expert_rows.cuh -- rows that are sorted by expert: their tiles, and the results of a tile; for the
kernels of expert_matmul.cuh.
*/
#ifndef LLMC_EXPERT_ROWS_CUH
#define LLMC_EXPERT_ROWS_CUH

#include "llmc/base/sizes.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/experts.h"
#include "llmc/ops/gradient.h"

enum { EXPERT_SIDE = 128 }; // rows of a tile

// Instructions that multiply: wgmma where it can be used, or one kind, for tests and benches.
typedef enum { EXPERT_BY_DEFAULT, EXPERT_BY_MMA, EXPERT_BY_WGMMA } ExpertInstructions;

// The rows of experts. Without `first`, one matrix has all rows.
typedef struct {
    const int* first;
    int E, rows; // most rows with a token: padding to multiples of up to 128 does not count
    int all;     // rows in memory, of inp, out, dinp and dout; 0: unknown
    ExpertInstructions by;
} ExpertRows;

// Sizes of the matrix (OC, C) of an expert.
typedef struct {
    int C, OC;
} ExpertMatrix;

// Place of an operand's elements: the terms of a sum are neighbors, or `stride` elements apart.
typedef enum { EXPERT_ALONG, EXPERT_ACROSS } ExpertLayout;

// Returns the distance of rows of OC columns that sums run over.
static inline int expert_padded(int OC) { return ceil_div(OC, (int)EXPERT_PACK) * EXPERT_PACK; }

// ---- tiles of rows ----

// Up to 128 rows of expert e, from `row` on.
typedef struct {
    int e, row, rows;
} ExpertTile;

// Returns the rows of tile i of all experts: first the tiles of expert 0, then of 1 ... No rows:
// it is past the last one. Each warp looks for it.
__device__ inline ExpertTile expert_find(const ExpertRows& rows, int i) {
    const int lane = (int)threadIdx.x % 32;
    ExpertTile tile = {0, i * EXPERT_SIDE, rows.rows - i * EXPERT_SIDE};
    if (!rows.first) {
        return tile;
    }
    for (int e0 = 0; e0 < rows.E; e0 += 32) {
        const int e = e0 + lane, row = rows.first[min(e, rows.E)], end = rows.first[min(e + 1, rows.E)],
                  tiles = ceil_div(end - row, (int)EXPERT_SIDE), after = warp_scan(tiles);
        const unsigned has = __ballot_sync(0xffffffffu, after > i);
        if (has) {
            const int of = __ffs((int)has) - 1;
            tile.e = e0 + of;
            tile.row = __shfl_sync(0xffffffffu, row + (i - (after - tiles)) * EXPERT_SIDE, of);
            tile.rows = __shfl_sync(0xffffffffu, end, of) - tile.row;
            return tile;
        }
        i -= __shfl_sync(0xffffffffu, after, 31);
    }
    tile.rows = 0;
    return tile;
}

// Returns the most tiles of rows. An expert has at most one that is not full.
static inline int expert_tiles(const ExpertRows* rows) {
    return rows->first ? rows->rows / EXPERT_SIDE + int_min(rows->E, rows->rows)
                       : ceil_div(rows->rows, (int)EXPERT_SIDE);
}

// ---- results ----

// Results of a tile: up to 128 x 128, of which rows x cols exist.
template <class OUT> struct ExpertResult {
    OUT* data;
    size_t stride;
    int rows, cols;
    GradientMode mode;
};

// Stores, or adds, up to a pack of results.
template <class OUT>
__device__ inline void expert_store(OUT* to, const float* from, int count, int packs, GradientMode mode) {
    constexpr int SIZE = Pack<OUT>::SIZE;
    if (packs && count >= SIZE) {
        Pack<OUT> pack;
        float before[SIZE] = {};
        if (mode == GRADIENT_ADD) {
            unpack(before, load_pack(to));
        }
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            pack[i] = from_float<OUT>(before[i] + from[i]);
        }
        store_pack(to, pack);
        return;
    }
#pragma unroll
    for (int i = 0; i < SIZE; i++) { // without an index of run time: registers have none
        if (i < count) {
            to[i] = from_float<OUT>((mode == GRADIENT_ADD ? to_float(to[i]) : 0.0f) + from[i]);
        }
    }
}

#endif
