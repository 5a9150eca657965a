/*
matmul_bf16.h -- the linear layer of matmul.h with factors rounded to bf16 and sums in fp32, on the CPU.

    out, dout     (N, OC)   fp32, as are inp, dinp, bias and dweight
    weight                  packed twice: for out = inp weight^T, and for dinp = dout weight

matmul_bf16_pack packs a weight, on all cores, whenever it has changed; products with it then read half the bytes of fp32
and pack only their other factor. dweight packs both. A factor is packed by all threads together, a slab of it at a time
that the caches of the processor hold; then each thread multiplies parts of the result, with a block of K of one panel of
the right factor in its L1 cache while the rows of the left one pass by. Every result is a sum over k in an order that
does not depend on the threads.

defines: MatmulBf16Scratch, matmul_bf16_scratch_bytes, matmul_bf16_open, matmul_bf16_close, matmul_bf16_pairs, matmul_bf16_pack, MatmulBf16,
         matmul_bf16_forward_weight, matmul_bf16_backward_weight,
         matmul_bf16_product_cpu, matmul_bf16_forward_cpu, matmul_bf16_backward_input_cpu,
         matmul_bf16_backward_weight_cpu
*/
#ifndef LLMC_MATMUL_BF16_H
#define LLMC_MATMUL_BF16_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/check.h"
#include "llmc/base/int.h"
#include "llmc/base/threads.h"
#include "llmc/bf16_tile.h"
#include "llmc/gradient.h"
#include "llmc/matmul.h"

enum {
    MATMUL_BF16_BLOCK_K = 384, // of a panel, and of a tile of rows: 24 KiB each, in a L1 cache of 48 KiB
    MATMUL_BF16_SLAB_K = 6 * MATMUL_BF16_BLOCK_K,
    MATMUL_BF16_SLAB_ROWS = 2048, // of the left factor: 9 MiB
    MATMUL_BF16_SLAB_COLS = 4096, // of the right one: 18 MiB
    MATMUL_BF16_PART_TILES = 8    // parts of the result have at most 8 x 8 tiles: 256 KiB
};

// Memory for packed slabs, one set a process. A product touches no more of it than it needs.
typedef struct {
    Bf16Kernel kernel;
    uint32_t *left, *right;
} MatmulBf16Scratch;

// Pairs of a packed factor of so many lines (rows of the left, columns of the right one).
static inline size_t matmul_bf16_pairs(int lines, int k) {
    return (size_t)int_ceil_div(lines, BF16_TILE) * bf16_steps(k) * BF16_STEP_PAIRS;
}

static inline size_t matmul_bf16_left_(void) {
    return matmul_bf16_pairs(MATMUL_BF16_SLAB_ROWS, MATMUL_BF16_SLAB_K);
}
static inline size_t matmul_bf16_right_(void) {
    return matmul_bf16_pairs(MATMUL_BF16_SLAB_COLS, MATMUL_BF16_SLAB_K);
}

// What matmul_bf16_open allocates.
static inline size_t matmul_bf16_scratch_bytes(void) {
    return (matmul_bf16_left_() + matmul_bf16_right_()) * sizeof(uint32_t);
}

static inline void matmul_bf16_open(MatmulBf16Scratch* scratch, Bf16Kernel kernel) {
    const size_t left = matmul_bf16_left_(), right = matmul_bf16_right_();
    scratch->kernel = kernel;
    scratch->left = (uint32_t*)check_alloc_unset(left, sizeof(uint32_t), "matmul: packed factors");
    scratch->right = (uint32_t*)check_alloc_unset(right, sizeof(uint32_t), "matmul: packed factors");
}

static inline void matmul_bf16_close(MatmulBf16Scratch* scratch) {
    free(scratch->left);
    free(scratch->right);
}

// out (M, N) = left (M, K) right (K, N) + bias (N), set or added to as `mode` says; out is row-major without gaps.
typedef struct {
    float* out;
    Matrix left, right;
    const uint32_t* packed; // the whole right factor, packed; NULL: `right` is read
    int M, N, K;
    const float* bias; // or NULL
    GradientMode mode;
} MatmulBf16;

// A slab of a product: rows [i0, i1), columns [j0, j1) and values of k from k0 on, and where its factors are packed:
// tile t of the left one at left + t * left_tile, and so on.
typedef struct {
    int i0, i1, j0, j1, k0, k;
    const uint32_t *left, *right;
    size_t left_tile, right_tile;
} MatmulBf16Slab_;

// Packs columns [j0, j1) of a right factor, and k values from k0 on: a thread takes a block of k of a panel.
static inline void matmul_bf16_pack_panels_(uint32_t* to, Matrix right, int j0, int j1, int k0, int k) {
#pragma omp for schedule(static) collapse(2)
    for (int j = j0; j < j1; j += BF16_TILE) {
        for (int p = 0; p < k; p += MATMUL_BF16_BLOCK_K) {
            bf16_pack_right(to + matmul_bf16_pairs(j - j0, k) + matmul_bf16_pairs(1, p), right, k0 + p, j,
                            int_min(MATMUL_BF16_BLOCK_K, k - p), int_min(BF16_TILE, j1 - j));
        }
    }
}

// The same of rows [i0, i1) of a left factor.
static inline void matmul_bf16_pack_rows_(uint32_t* to, Matrix left, int i0, int i1, int k0, int k) {
#pragma omp for schedule(static) collapse(2)
    for (int i = i0; i < i1; i += BF16_TILE) {
        for (int p = 0; p < k; p += MATMUL_BF16_BLOCK_K) {
            bf16_pack_left(to + matmul_bf16_pairs(i - i0, k) + matmul_bf16_pairs(1, p), left, i, k0 + p,
                           int_min(BF16_TILE, i1 - i), int_min(MATMUL_BF16_BLOCK_K, k - p));
        }
    }
}

// Packs a right factor (K, N) into matmul_bf16_pairs(N, K).
static inline void matmul_bf16_pack(uint32_t* to, Matrix right, int K, int N) {
#pragma omp parallel
    matmul_bf16_pack_panels_(to, right, 0, N, 0, K);
}

// Tiles [i0, i1) x [j0, j1) of a slab, block by block of k.
static inline void matmul_bf16_part_(const MatmulBf16* m, const MatmulBf16Slab_* slab,
                                     const Bf16Kernel* kernel, int i0, int i1, int j0, int j1) {
    const int step = matmul_step_(slab->k, MATMUL_BF16_BLOCK_K, BF16_STEP);
    for (int k = 0; k < slab->k; k += step) {
        const size_t at = (size_t)(k / BF16_STEP) * BF16_STEP_PAIRS;
        const int steps = bf16_steps(int_min(step, slab->k - k)), is_first = slab->k0 + k == 0;
        for (int j = j0; j < j1; j++) {
            const int col = slab->j0 + j * BF16_TILE;
            for (int i = i0; i < i1; i++) {
                const int row = slab->i0 + i * BF16_TILE;
                const Bf16Out out = {m->out + (size_t)row * m->N + col, (size_t)m->N,
                                     int_min(BF16_TILE, slab->i1 - row), int_min(BF16_TILE, slab->j1 - col)};
                bf16_tile(kernel, out, m->bias ? m->bias + col : NULL, is_first ? m->mode : GRADIENT_ADD,
                          slab->left + i * slab->left_tile + at, slab->right + j * slab->right_tile + at,
                          steps);
            }
        }
    }
}

// All parts of a slab: small enough for a cache, and enough of them to divide among the threads.
static inline void matmul_bf16_multiply_(const MatmulBf16* m, const MatmulBf16Slab_* slab,
                                         const Bf16Kernel* kernel) {
    const int tiles = int_ceil_div(slab->i1 - slab->i0, BF16_TILE),
              panels = int_ceil_div(slab->j1 - slab->j0, BF16_TILE);
    const int wanted = MATMUL_TASKS * threads_max();
    const int least_rows = int_ceil_div(tiles, MATMUL_BF16_PART_TILES);
    const int col_parts = int_min(
        panels, int_max(int_ceil_div(panels, MATMUL_BF16_PART_TILES), int_ceil_div(wanted, least_rows)));
    const int row_parts = int_min(tiles, int_max(least_rows, int_ceil_div(wanted, col_parts)));
#pragma omp for schedule(dynamic)
    for (int t = 0; t < row_parts * col_parts; t++) {
        const int r = t % row_parts, c = t / row_parts;
        matmul_bf16_part_(m, slab, kernel, (int)((int64_t)tiles * r / row_parts),
                          (int)((int64_t)tiles * (r + 1) / row_parts), (int)((int64_t)panels * c / col_parts),
                          (int)((int64_t)panels * (c + 1) / col_parts));
    }
}

// Columns [j0, j1) and values of k from k0 on: by each thread, which does its share.
static inline void matmul_bf16_columns_(const MatmulBf16* m, MatmulBf16Slab_ slab,
                                        MatmulBf16Scratch* scratch) {
    const int step = matmul_step_(m->M, MATMUL_BF16_SLAB_ROWS, BF16_TILE);
    if (m->packed) {
        slab.right_tile = matmul_bf16_pairs(1, m->K);
        slab.right = m->packed + slab.j0 / BF16_TILE * slab.right_tile + matmul_bf16_pairs(1, slab.k0);
    } else {
        matmul_bf16_pack_panels_(scratch->right, m->right, slab.j0, slab.j1, slab.k0, slab.k);
        slab.right_tile = matmul_bf16_pairs(1, slab.k);
        slab.right = scratch->right;
    }
    slab.left = scratch->left;
    slab.left_tile = matmul_bf16_pairs(1, slab.k);
    for (slab.i0 = 0; slab.i0 < m->M; slab.i0 += step) {
        slab.i1 = int_min(slab.i0 + step, m->M);
        matmul_bf16_pack_rows_(scratch->left, m->left, slab.i0, slab.i1, slab.k0, slab.k);
        matmul_bf16_multiply_(m, &slab, &scratch->kernel);
    }
}

static inline void matmul_bf16_product_cpu(MatmulBf16 m, MatmulBf16Scratch* scratch) {
    const int step_k = matmul_step_(m.K, MATMUL_BF16_SLAB_K, BF16_STEP);
    const int step_cols = m.packed ? m.N : matmul_step_(m.N, MATMUL_BF16_SLAB_COLS, BF16_TILE);
#pragma omp parallel
    {
        MatmulBf16Slab_ slab;
        memset(&slab, 0, sizeof(slab));
        scratch->kernel.begin();
        for (slab.k0 = 0; slab.k0 < m.K; slab.k0 += step_k) {
            slab.k = int_min(step_k, m.K - slab.k0);
            for (slab.j0 = 0; slab.j0 < m.N; slab.j0 += step_cols) {
                slab.j1 = int_min(slab.j0 + step_cols, m.N);
                matmul_bf16_columns_(&m, slab, scratch);
            }
        }
        scratch->kernel.end();
    }
}

// ---- the layer ----

// As a right factor: of the forward pass, and of dinp.
static inline Matrix matmul_bf16_forward_weight(const float* weight, int C) {
    return (Matrix){weight, 1, (size_t)C};
}
static inline Matrix matmul_bf16_backward_weight(const float* weight, int C) {
    return (Matrix){weight, (size_t)C, 1};
}

// Sets out (N, OC).
static inline void matmul_bf16_forward_cpu(float* out, const float* inp, const uint32_t* packed,
                                           const float* bias, int N, int C, int OC,
                                           MatmulBf16Scratch* scratch) {
    const Matrix left = {inp, (size_t)C, 1}, none = {NULL, 0, 0};
    matmul_bf16_product_cpu((MatmulBf16){out, left, none, packed, N, OC, C, bias, GRADIENT_SET}, scratch);
}

// Sets dinp (N, C).
static inline void matmul_bf16_backward_input_cpu(float* dinp, const float* dout, const uint32_t* packed,
                                                  int N, int C, int OC, MatmulBf16Scratch* scratch) {
    const Matrix left = {dout, (size_t)OC, 1}, none = {NULL, 0, 0};
    matmul_bf16_product_cpu((MatmulBf16){dinp, left, none, packed, N, C, OC, NULL, GRADIENT_SET}, scratch);
}

// Sets or adds to dweight (OC, C).
static inline void matmul_bf16_backward_weight_cpu(float* dweight, const float* dout, const float* inp, int N,
                                                   int C, int OC, GradientMode mode,
                                                   MatmulBf16Scratch* scratch) {
    const Matrix left = {dout, 1, (size_t)OC}, right = {inp, (size_t)C, 1};
    matmul_bf16_product_cpu((MatmulBf16){dweight, left, right, NULL, OC, C, N, NULL, mode}, scratch);
}

#endif
