/*
matmul.h -- the linear layer: the contract, and the CPU version.

    out[n][o] = sum_c inp[n][c] weight[o][c] + bias[o]

    out, dout     (N, OC)   N = B*T rows, one per token
    inp, dinp     (N, C)
    weight        (OC, C)
    bias          (OC)      may be NULL

matmul_forward sets out. Backward, in three parts so that a frozen tensor costs nothing:
matmul_backward_input sets dinp = dout weight; matmul_backward_weight and matmul_backward_bias set
or add to dweight = dout^T inp and dbias = the column sums of dout, according to `mode`
(GRADIENT_SET in the first micro-step).

A matmul is computed in tiles of MATMUL_TILE_ROWS x MATMUL_TILE_COLS results that stay in registers
while k runs (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS
2008). For MATMUL_BLOCK_K values of k at a time, all threads together pack the left matrix into
tiles of MATMUL_TILE_ROWS rows. Then each thread packs MATMUL_WIDE_PANELS panels of the right
matrix, MATMUL_TILE_COLS columns each, multiplies all tiles with them while they are in its L2
cache, and continues with the next panels. It processes the tiles of MATMUL_PASS_ROWS rows at a
time, which fit into L2 with the panels; a panel stays in the L1 cache, or close to it, while it
meets these tiles. Both are read in order, so hardware prefetching works. The right matrix is packed
again only if the left one has more rows than the scratch, or if the panels are too few for all
threads. Every result is one sum over k in the same order for any number of threads, so the bits do
not depend on it.
*/
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#include <assert.h>
#include <stddef.h>

#include "llmc/base/memory.h"
#include "llmc/base/check.h"
#include "llmc/base/sizes.h"
#include "llmc/base/threads.h"
#include "llmc/base/vec.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

// A matrix read in place: element (i, j) is data[i * row + j * col]. One of the two strides is 1.
typedef struct {
    const float* data;
    size_t row, col;
} Matrix;

// Returns the part of a matrix from element (i, j) on.
static inline Matrix matrix_at(Matrix m, int i, int j) {
    m.data += i * m.row + j * m.col;
    return m;
}

// Sizes of a linear layer: rows, columns of its input, and of its output.
typedef struct {
    int N, C, OC;
} MatmulSizes;

// Tile: MATMUL_TILE_ROWS x 2 vectors of sums fill the registers, with some left for the factors.
#define MATMUL_TILE_ROWS (VEC_REGISTERS == 32 ? 12 : 6)

// The last rows are computed in tiles of two steps, one step, and single rows.
#define MATMUL_TILE_STEP (MATMUL_TILE_ROWS / 3)

#define MATMUL_TILE_COLS (2 * LANES)

#define MATMUL_UNROLL 8 // values of k in one iteration of a tile's loop

#define MATMUL_BLOCK_K 384 // a panel is 48 KiB with AVX-512, 24 KiB with AVX2

#define MATMUL_PASS_ROWS 96 // rows of the left matrix: 144 KiB of tiles

#define MATMUL_BLOCK_ROWS 1056 // rows of the left matrix per thread: 1584 KiB of tiles

// panels that are packed together, so that a long piece of each row is read
#define MATMUL_WIDE_PANELS 4

#define MATMUL_WIDE_TILES 8 // tiles that are packed together

#define MATMUL_FETCH_ROWS 4 // rows that are prefetched ahead of packing

#define MATMUL_TASKS 3 // tasks per thread, if enough rows and columns exist

static_assert(MATMUL_PASS_ROWS % MATMUL_TILE_ROWS == 0 && MATMUL_BLOCK_ROWS % MATMUL_TILE_ROWS == 0,
              "blocks are whole tiles");

// Columns of panels, and rows of tiles, that are packed together.
enum {
    MATMUL_WIDE_COLS_ = MATMUL_WIDE_PANELS * MATMUL_TILE_COLS,
    MATMUL_WIDE_ROWS_ = MATMUL_WIDE_TILES * MATMUL_TILE_ROWS
};

// Memory for packed blocks, one per process; no call of matmul_* allocates.
typedef struct {
    float* memory; // (threads, panels), then tiles of all threads
} MatmulScratch;

static inline size_t matmul_panels_floats_(void) { return (size_t)MATMUL_BLOCK_K * MATMUL_WIDE_COLS_; }

// Returns the floats of one thread's scratch. It is a whole number of huge pages: with small ones,
// the placement of pages decides what stays in the L2 cache, and a matmul could be a fifth slower
// in one process than in the next.
static inline size_t matmul_scratch_floats_(void) {
    const size_t page = CHECK_HUGE_PAGE / sizeof(float),
                 floats = matmul_panels_floats_() + (size_t)MATMUL_BLOCK_K * MATMUL_BLOCK_ROWS;
    return (floats + page - 1) / page * page;
}

// Allocates scratch for as many threads as the next parallel region would have.
static inline void matmul_open(MatmulScratch* scratch, Memory* memory) {
    const size_t floats = (size_t)threads_max() * matmul_scratch_floats_();
    scratch->memory = (float*)memory_take(memory, "scratch: packed blocks of matmul", MEMORY_DEVICE,
                                          floats * sizeof(float));
}

// ---- packing ----

// Packs `k` rows and `cols` <= MATMUL_TILE_COLS columns of the right matrix, from (k0, j0), into a
// panel (k, MATMUL_TILE_COLS); columns past `cols` become zero.
void matmul_pack_panel(float* panel, Matrix m, int k0, int j0, int k, int cols);

// ---- the tile: where the time goes ----

// Stores a row of results, or adds it, up to column `cols`.
ALWAYS_INLINE void matmul_store_row_(float* to, Vec low, Vec high, int cols, GradientMode mode) {
    if (cols == MATMUL_TILE_COLS) {
        vec_store(to, mode == GRADIENT_ADD ? vec_load(to) + low : low);
        vec_store(to + LANES, mode == GRADIENT_ADD ? vec_load(to + LANES) + high : high);
        return;
    }
    float edge[MATMUL_TILE_COLS];
    vec_store(edge, low);
    vec_store(edge + LANES, high);
    for (int j = 0; j < cols; j++) {
        to[j] = mode == GRADIENT_ADD ? to[j] + edge[j] : edge[j];
    }
}

// Adds the terms of one value of k, which is `at` floats further in each row of the left matrix.
// Rows are addressed from every third one, which needs few enough registers for the addresses.
ALWAYS_INLINE void matmul_tile_step_(Vec (*sum)[2], const float* const* third, size_t row, size_t at,
                                     const float* panel, const int rows) {
    const Vec low = vec_load(panel), high = vec_load(panel + LANES);
    VEC_UNROLL(12)
    for (int i = 0; i < rows; i++) {
        const Vec factor = vec_all(third[i / 3][i % 3 * row + at]);
        vec_add_product(&sum[i][0], factor, low);
        vec_add_product(&sum[i][1], factor, high);
    }
}

// Sets or adds to out(rows, cols) left(rows, k) panel(k, MATMUL_TILE_COLS) + bias(cols). Element
// (i, p) of left is left[i * row + p * col]. `rows` is a constant at every call, so the sums live
// in registers.
ALWAYS_INLINE void matmul_tile_(float* out, size_t stride, int cols, const float* left, size_t row,
                                size_t col, const float* panel, int k, const float* bias, GradientMode mode,
                                const int rows) {
    Vec sum[MATMUL_TILE_ROWS][2];
    const float* third[MATMUL_TILE_ROWS / 3];
    // Prefetch results that are added to, or whose cache lines the core must own.
    VEC_UNROLL(12)
    for (int i = 0; i < rows; i++) {
        __builtin_prefetch(out + i * stride, 1);
        __builtin_prefetch(out + i * stride + LANES, 1);
        sum[i][0] = sum[i][1] = vec_all(0.0f);
        if (i % 3 == 0) {
            third[i / 3] = left + i * row;
        }
    }
    // Unrolled, because on a core that two threads share the loop's own instructions cost a tenth
    // of a matmul. Two loops, because gcc's own code for a remainder keeps the sums in memory.
    int p = 0;
    for (; p + MATMUL_UNROLL <= k; p += MATMUL_UNROLL) {
        VEC_UNROLL(MATMUL_UNROLL)
        for (int u = p; u < p + MATMUL_UNROLL; u++) {
            matmul_tile_step_(sum, third, row, u * col, panel + u * MATMUL_TILE_COLS, rows);
        }
    }
    for (; p < k; p++) {
        matmul_tile_step_(sum, third, row, p * col, panel + p * MATMUL_TILE_COLS, rows);
    }
    float edge[MATMUL_TILE_COLS] = {0};
    if (bias) {
        memcpy(edge, bias, (size_t)cols * sizeof(float));
    }
    const Vec bias_low = vec_load(edge), bias_high = vec_load(edge + LANES);
    VEC_UNROLL(12)
    for (int i = 0; i < rows; i++) {
        matmul_store_row_(out + i * stride, sum[i][0] + bias_low, sum[i][1] + bias_high, cols, mode);
    }
}

// Computes up to MATMUL_TILE_ROWS rows, in tiles of fixed sizes; `left` as in matmul_tile_.
ALWAYS_INLINE void matmul_tiles_(float* out, size_t stride, int rows, int cols, const float* left, size_t row,
                                 size_t col, const float* panel, int k, const float* bias,
                                 GradientMode mode) {
    if (rows == MATMUL_TILE_ROWS) {
        matmul_tile_(out, stride, cols, left, row, col, panel, k, bias, mode, MATMUL_TILE_ROWS);
        return;
    }
    while (rows > 0) {
        int done = 1;
        if (rows >= 2 * MATMUL_TILE_STEP) {
            done = 2 * MATMUL_TILE_STEP;
            matmul_tile_(out, stride, cols, left, row, col, panel, k, bias, mode, 2 * MATMUL_TILE_STEP);
        } else if (rows >= MATMUL_TILE_STEP) {
            done = MATMUL_TILE_STEP;
            matmul_tile_(out, stride, cols, left, row, col, panel, k, bias, mode, MATMUL_TILE_STEP);
        } else {
            matmul_tile_(out, stride, cols, left, row, col, panel, k, bias, mode, 1);
        }
        rows -= done;
        out += done * stride;
        left += done * row;
    }
}

// Sets or adds to up to MATMUL_TILE_ROWS rows of out. `left` is a matrix with contiguous rows (col
// 1), or a packed tile (row 1, col MATMUL_TILE_ROWS). Not inlined: among a caller's other variables
// gcc finds too few registers for the sums and addresses.
__attribute__((noinline)) void matmul_rows(float* out, size_t stride, int rows, int cols, Matrix left,
                                           const float* panel, int k, const float* bias, GradientMode mode);

// Sets or adds to up to MATMUL_TILE_ROWS rows of out, for a left matrix with contiguous columns,
// `col` floats apart, a constant.
ALWAYS_INLINE void matmul_rows_transposed(float* out, size_t stride, int rows, int cols, const float* left,
                                          const int col, const float* panel, int k, GradientMode mode) {
    matmul_tiles_(out, stride, rows, cols, left, 1, (size_t)col, panel, k, NULL, mode);
}

// ---- the whole matmul ----

// Returns the size of equal steps, multiples of `unit`, that cover n and are not longer than `max`,
// itself a multiple; 0 for n = 0.
static inline int matmul_step_(int n, int max, int unit) {
    const int steps = int_max(int_ceil_div(n, max), 1);
    return int_ceil_div(int_ceil_div(n, steps), unit) * unit;
}

// ---- the layer ----

// Returns the FLOP of one matmul.
static inline double matmul_flops(double N, double C, double OC) { return 2 * N * C * OC; }

// Sets out (N, OC).
void matmul_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                        MatmulSizes sizes, MatmulScratch* scratch);

// Sets dinp (N, C).
void matmul_backward_input_cpu(float* dinp, const float* dout, const float* weight, MatmulSizes sizes,
                               MatmulScratch* scratch);

// Sets or adds to dweight (OC, C).
void matmul_backward_weight_cpu(float* dweight, const float* dout, const float* inp, MatmulSizes sizes,
                                GradientMode mode, MatmulScratch* scratch);

// Multiply with only some rows of a weight, (OC, C): set as many columns of out, whose rows are
// `stride` apart; set or add to dinp from as many columns of dout.
void matmul_forward_columns_cpu(float* out, size_t stride, const float* inp, const float* weight,
                                const float* bias, MatmulSizes sizes, MatmulScratch* scratch);
void matmul_backward_columns_cpu(float* dinp, const float* dout, size_t stride, const float* weight,
                                 MatmulSizes sizes, GradientMode mode, MatmulScratch* scratch);

// Sets or adds to dbias (OC). Each thread sums whole columns, row after row: the order does not
// depend on the number of threads.
void matmul_backward_bias_cpu(float* dbias, const float* dout, int N, int OC, GradientMode mode);

#ifdef __cplusplus
}
#endif

#ifdef MATMUL_IMPLEMENTATION

// Prefetches `floats` floats, in whole cache lines from the first one on.
ALWAYS_INLINE void matmul_fetch_(const float* at, int floats) {
    enum { LINE = 16 };
    for (int i = 0; i < floats; i += LINE) {
        __builtin_prefetch(at + i);
    }
}

// Copies `k` rows from `from` on, `row` apart, into `count` panels or tiles of `width` columns,
// which lie one after the other. `width` and `count` are constants.
ALWAYS_INLINE void matmul_pack_rows_(float* to, const float* from, size_t row, int k, const int width,
                                     const int count) {
    for (int i = 0; i < k; i++, from += row) {
        matmul_fetch_(from + MATMUL_FETCH_ROWS * row, width * count);
        VEC_UNROLL(8)
        for (int j = 0; j < count; j++) {
            memcpy(to + (size_t)j * width * k + i * width, from + j * width, (size_t)width * sizeof(float));
        }
    }
}

void matmul_pack_panel(float* panel, Matrix m, int k0, int j0, int k, int cols) {
    const float* from = m.data + k0 * m.row + j0 * m.col;
    if (cols == MATMUL_TILE_COLS && m.col == 1) {
        matmul_pack_rows_(panel, from, m.row, k, MATMUL_TILE_COLS, 1);
        return;
    }
    int done = 0; // rows packed so far; a transposed matrix is packed in squares of LANES x LANES
    if (cols == MATMUL_TILE_COLS && m.row == 1) {
        for (; done + LANES <= k; done += LANES) {
            for (int half = 0; half < MATMUL_TILE_COLS; half += LANES) {
                Vec square[LANES];
                for (int j = 0; j < LANES; j++) {
                    square[j] = vec_load(from + done + (half + j) * m.col);
                }
                vec_transpose(square);
                for (int i = 0; i < LANES; i++) {
                    vec_store(panel + (done + i) * MATMUL_TILE_COLS + half, square[i]);
                }
            }
        }
    }
    for (int i = done; i < k; i++) {
        for (int j = 0; j < MATMUL_TILE_COLS; j++) {
            panel[i * MATMUL_TILE_COLS + j] = j < cols ? from[i * m.row + j * m.col] : 0.0f;
        }
    }
}

// Transposes LANES columns of a tile's rows, which are `row` apart. If the number of rows is not a
// multiple of LANES, the last vector of a column overlaps the next column, which is written after
// it. The last column is written exactly: another thread may have packed the next tile.
ALWAYS_INLINE void matmul_pack_square_(float* tile, const float* from, size_t row) {
    Vec square[MATMUL_TILE_ROWS + LANES - 1];
    for (int i = 0; i < MATMUL_TILE_ROWS; i += LANES) {
        for (int j = i; j < i + LANES; j++) {
            square[j] = j < MATMUL_TILE_ROWS ? vec_load(from + j * row) : vec_all(0.0f);
        }
        vec_transpose(square + i);
    }
    for (int p = 0; p < LANES - 1; p++) {
        for (int i = 0; i < MATMUL_TILE_ROWS; i += LANES) {
            vec_store(tile + p * MATMUL_TILE_ROWS + i, square[i + p]);
        }
    }
    for (int i = 0; i < MATMUL_TILE_ROWS; i += LANES) {
        memcpy(tile + (LANES - 1) * MATMUL_TILE_ROWS + i, &square[i + LANES - 1],
               (MATMUL_TILE_ROWS - i < LANES ? MATMUL_TILE_ROWS - i : LANES) * sizeof(float));
    }
}

// Packs `rows` <= MATMUL_TILE_ROWS rows and `k` columns of the left matrix, from (i0, k0), as (k,
// MATMUL_TILE_ROWS); rows past `rows` become zero.
static void matmul_pack_tile_(float* tile, Matrix m, int i0, int k0, int rows, int k) {
    const float* from = m.data + i0 * m.row + k0 * m.col;
    int done = 0; // columns packed so far
    if (rows == MATMUL_TILE_ROWS && m.row == 1) {
        matmul_pack_rows_(tile, from, m.col, k, MATMUL_TILE_ROWS, 1);
        done = k;
    } else if (rows == MATMUL_TILE_ROWS) {
        for (; done + LANES <= k; done += LANES) {
            matmul_pack_square_(tile + done * MATMUL_TILE_ROWS, from + done, m.row);
        }
    }
    for (int p = done; p < k; p++) {
        for (int i = 0; i < MATMUL_TILE_ROWS; i++) {
            tile[p * MATMUL_TILE_ROWS + i] = i < rows ? from[i * m.row + p * m.col] : 0.0f;
        }
    }
}

// Packs `k` rows and `cols` <= MATMUL_WIDE_COLS_ columns of the right matrix, from (k0, j0), into
// panels.
static void matmul_pack_panels_(float* panels, Matrix m, int k0, int j0, int k, int cols) {
    if (m.col == 1 && cols == MATMUL_WIDE_COLS_) {
        matmul_pack_rows_(panels, m.data + k0 * m.row + j0, m.row, k, MATMUL_TILE_COLS, MATMUL_WIDE_PANELS);
        return;
    }
    for (int j = 0; j < cols; j += MATMUL_TILE_COLS) {
        matmul_pack_panel(panels + (size_t)j * k, m, k0, j0 + j, k, int_min(MATMUL_TILE_COLS, cols - j));
    }
}

// Packs `rows` <= MATMUL_WIDE_ROWS_ rows and `k` columns of the left matrix, from (i0, k0), into
// tiles.
static void matmul_pack_tiles_(float* tiles, Matrix m, int i0, int k0, int rows, int k) {
    if (m.row == 1 && rows == MATMUL_WIDE_ROWS_) {
        matmul_pack_rows_(tiles, m.data + i0 + k0 * m.col, m.col, k, MATMUL_TILE_ROWS, MATMUL_WIDE_TILES);
        return;
    }
    for (int i = 0; i < rows; i += MATMUL_TILE_ROWS) {
        matmul_pack_tile_(tiles + (size_t)i * k, m, i0 + i, k0, int_min(MATMUL_TILE_ROWS, rows - i), k);
    }
}

__attribute__((noinline)) void matmul_rows(float* out, size_t stride, int rows, int cols, Matrix left,
                                           const float* panel, int k, const float* bias, GradientMode mode) {
    if (left.col == 1) {
        matmul_tiles_(out, stride, rows, cols, left.data, left.row, 1, panel, k, bias, mode);
    } else {
        matmul_tiles_(out, stride, rows, cols, left.data, 1, MATMUL_TILE_ROWS, panel, k, bias, mode);
    }
}

// A part of the result: rows [i0, i1), columns [j0, j1).
typedef struct {
    int i0, i1, j0, j1;
} MatmulPart_;

// A matmul: sets or adds to out(M, N) left(M, K) right(K, N) + bias(N), according to `mode`; rows
// of out are `stride` apart.
typedef struct {
    float* out;
    size_t stride;
    Matrix left, right;
    int M, N, K;
    const float* bias;
    GradientMode mode;
    MatmulScratch* scratch;
    int threads;
} MatmulProduct_;

// Multiplies the part's rows with its columns, for `k` values of k from k0: all tiles with all
// panels.
static void matmul_block_(const MatmulProduct_* x, MatmulPart_ part, int k0, int k, const float* tiles,
                          const float* panels) {
    const size_t stride = x->stride;
    const float* bias = k0 == 0 ? x->bias : NULL;
    const GradientMode mode = k0 == 0 ? x->mode : GRADIENT_ADD;
    for (int j = part.j0; j < part.j1; j += MATMUL_TILE_COLS) {
        for (int i = part.i0; i < part.i1; i += MATMUL_TILE_ROWS) {
            const Matrix tile = {tiles + (size_t)(i - part.i0) * k, 1, MATMUL_TILE_ROWS};
            matmul_rows(x->out + i * stride + j, stride, int_min(MATMUL_TILE_ROWS, part.i1 - i),
                        int_min(MATMUL_TILE_COLS, part.j1 - j), tile, panels + (size_t)(j - part.j0) * k, k,
                        bias ? bias + j : NULL, mode);
        }
    }
}

// Multiplies the part's rows with its columns, up to MATMUL_WIDE_COLS_, for `k` values of k from
// k0. `tiles` are the packed rows.
static void matmul_task_(const MatmulProduct_* x, MatmulPart_ part, int k0, int k, const float* tiles) {
    float* panels = x->scratch->memory + thread_index() * matmul_panels_floats_();
    const int step = matmul_step_(part.i1 - part.i0, MATMUL_PASS_ROWS, MATMUL_TILE_ROWS);
    matmul_pack_panels_(panels, x->right, k0, part.j0, k, part.j1 - part.j0);
    for (int i = part.i0; i < part.i1; i += step) {
        const MatmulPart_ pass = {i, int_min(i + step, part.i1), part.j0, part.j1};
        matmul_block_(x, pass, k0, k, tiles + (size_t)(i - part.i0) * k, panels);
    }
}

// Computes rows [i0, i1) of the result for `k` values of k from k0, by all threads of a parallel
// region. Each task has its own columns; if these are too few, tasks also divide the rows.
static void matmul_rows_by_all_threads_(const MatmulProduct_* x, int i0, int i1, int k0, int k) {
    float* tiles = x->scratch->memory + x->threads * matmul_panels_floats_();
#pragma omp for schedule(static)
    for (int i = i0; i < i1; i += MATMUL_WIDE_ROWS_) {
        matmul_pack_tiles_(tiles + (size_t)(i - i0) * k, x->left, i, k0, int_min(MATMUL_WIDE_ROWS_, i1 - i),
                           k);
    }
    const int rows = i1 - i0, col_tasks = int_ceil_div(x->N, MATMUL_WIDE_COLS_);
    const int wanted = int_ceil_div(MATMUL_TASKS * x->threads, col_tasks); // tasks along the rows
    const int parts = int_min(wanted, int_ceil_div(rows, MATMUL_PASS_ROWS));
    const int step = int_round_up(int_ceil_div(rows, parts), MATMUL_TILE_ROWS);
    const int row_tasks = int_ceil_div(rows, step);
#pragma omp for schedule(dynamic)
    for (int t = 0; t < col_tasks * row_tasks; t++) {
        const int i = i0 + t % row_tasks * step, j = t / row_tasks * MATMUL_WIDE_COLS_;
        const MatmulPart_ part = {i, int_min(i + step, i1), j, int_min(j + MATMUL_WIDE_COLS_, x->N)};
        matmul_task_(x, part, k0, k, tiles + (size_t)(i - i0) * k);
    }
}

static void matmul_product_(MatmulProduct_ x) {
    x.threads = threads_max();
    if (x.N == 0) {
        return; // no columns: an adapter's first product on a rank without rows
    }
    const int step_k = matmul_step_(x.K, MATMUL_BLOCK_K, LANES);
    const int step_rows = matmul_step_(x.M, x.threads * MATMUL_BLOCK_ROWS, MATMUL_TILE_ROWS);
#pragma omp parallel
    for (int i0 = 0; i0 < x.M; i0 += step_rows) {
        for (int k0 = 0; k0 < x.K; k0 += step_k) {
            matmul_rows_by_all_threads_(&x, i0, int_min(i0 + step_rows, x.M), k0, int_min(step_k, x.K - k0));
        }
    }
}

void matmul_forward_columns_cpu(float* out, size_t stride, const float* inp, const float* weight,
                                const float* bias, MatmulSizes sizes, MatmulScratch* scratch) {
    const Matrix left = {inp, (size_t)sizes.C, 1}, right = {weight, 1, (size_t)sizes.C};
    matmul_product_((MatmulProduct_){out, stride, left, right, sizes.N, sizes.OC, sizes.C, bias, GRADIENT_SET,
                                     scratch, 0});
}

void matmul_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                        MatmulSizes sizes, MatmulScratch* scratch) {
    matmul_forward_columns_cpu(out, (size_t)sizes.OC, inp, weight, bias, sizes, scratch);
}

void matmul_backward_columns_cpu(float* dinp, const float* dout, size_t stride, const float* weight,
                                 MatmulSizes sizes, GradientMode mode, MatmulScratch* scratch) {
    const Matrix left = {dout, stride, 1}, right = {weight, (size_t)sizes.C, 1};
    matmul_product_((MatmulProduct_){dinp, (size_t)sizes.C, left, right, sizes.N, sizes.C, sizes.OC, NULL,
                                     mode, scratch, 0});
}

void matmul_backward_input_cpu(float* dinp, const float* dout, const float* weight, MatmulSizes sizes,
                               MatmulScratch* scratch) {
    matmul_backward_columns_cpu(dinp, dout, (size_t)sizes.OC, weight, sizes, GRADIENT_SET, scratch);
}

void matmul_backward_weight_cpu(float* dweight, const float* dout, const float* inp, MatmulSizes sizes,
                                GradientMode mode, MatmulScratch* scratch) {
    const Matrix left = {dout, 1, (size_t)sizes.OC}, right = {inp, (size_t)sizes.C, 1};
    matmul_product_((MatmulProduct_){dweight, (size_t)sizes.C, left, right, sizes.OC, sizes.C, sizes.N, NULL,
                                     mode, scratch, 0});
}

void matmul_backward_bias_cpu(float* dbias, const float* dout, int N, int OC, GradientMode mode) {
    enum { VECTORS = 4, BLOCK = VECTORS * LANES };
    const int whole = OC / BLOCK * BLOCK;
#pragma omp parallel for schedule(static)
    for (int o0 = 0; o0 < whole; o0 += BLOCK) {
        Vec sum[VECTORS] = {{0}};
        for (int n = 0; n < N; n++) {
            for (int i = 0; i < VECTORS; i++) {
                sum[i] += vec_load(dout + (size_t)n * OC + o0 + i * LANES);
            }
        }
        for (int i = 0; i < VECTORS; i++) {
            float* to = dbias + o0 + i * LANES;
            vec_store(to, mode == GRADIENT_ADD ? vec_load(to) + sum[i] : sum[i]);
        }
    }
    for (int o = whole; o < OC; o++) {
        float sum = 0;
        for (int n = 0; n < N; n++) {
            sum += dout[(size_t)n * OC + o];
        }
        dbias[o] = mode == GRADIENT_ADD ? dbias[o] + sum : sum;
    }
}

#endif // MATMUL_IMPLEMENTATION

#endif
