/*
matmul.h -- the linear layer: the contract, and the reference on the CPU.

    out[n][o] = sum_c inp[n][c] weight[o][c] + bias[o]

    out, dout     (N, OC)   N = B*T rows, one per token
    inp, dinp     (N, C)
    weight        (OC, C)
    bias          (OC)      may be NULL

matmul_forward sets out. Backward, in three parts so that a frozen tensor costs nothing:
matmul_backward_input sets dinp = dout weight; matmul_backward_weight and matmul_backward_bias set or add to
dweight = dout^T inp and dbias = the column sums of dout, as `mode` says (GRADIENT_SET in the first
micro-step).

The product of two matrices is made of tiles of TILE_ROWS x TILE_COLS results that stay in registers while k
runs (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 2008). A thread
takes some columns of the result, and perhaps not all rows. For BLOCK_K values of k at a time it copies
("packs") these columns of the right matrix into panels TILE_COLS wide, and strips of the left matrix into
tiles; both then come from its own L1 and L2 caches. Every result is one sum over k in the same order whatever
the number of threads, so the bits do not depend on it.

needs:   check.h threads.h vec.h
defines: GradientMode, Matrix, MatmulScratch, matmul_open, matmul_close, matmul_product_cpu,
matmul_forward_cpu, matmul_backward_input_cpu, matmul_backward_weight_cpu, matmul_backward_bias_cpu,
matmul_flops
*/
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#include <stddef.h>

#include "check.h"
#include "threads.h"
#include "vec.h"

typedef enum { GRADIENT_SET, GRADIENT_ADD } GradientMode;

// A matrix read in place: element (i, j) is data[i * row + j * col]. One of the two strides is 1.
typedef struct {
    const float* data;
    size_t row, col;
} Matrix;

// Tile: TILE_ROWS x 2 vectors of sums fill the registers, leaving some for the factors.
#define TILE_ROWS (VEC_REGISTERS == 32 ? 12 : 6)
#define TILE_STEP (TILE_ROWS / 3) // the last rows of a matrix are done in tiles of 1, 2 or 3 such steps
#define TILE_COLS (2 * LANES)
#define BLOCK_K 384    // a panel is 48 KiB with AVX-512, 24 KiB with AVX2
#define STRIP_TILES 8  // tiles of a packed strip of the left matrix: 144 KiB, 72 KiB
#define TASK_PANELS 12 // panels that one task packs: 576 KiB, 288 KiB
#define TASKS_PER_THREAD 3

// Memory for packed blocks, one set a process; no call of matmul_* allocates.
typedef struct {
    float* memory; // (threads, TASK_PANELS panels and then a strip)
} MatmulScratch;

static inline int matmul_ceil_div_(int a, int b) { return (a + b - 1) / b; }
static inline int matmul_min_(int a, int b) { return a < b ? a : b; }

static inline size_t matmul_panels_floats_(void) { return (size_t)TASK_PANELS * BLOCK_K * TILE_COLS; }
static inline size_t matmul_scratch_floats_(void) {
    return matmul_panels_floats_() + (size_t)STRIP_TILES * TILE_ROWS * BLOCK_K;
}

// For as many threads as the next parallel region would have.
static inline void matmul_open(MatmulScratch* scratch) {
    scratch->memory =
        (float*)check_alloc(threads_max() * matmul_scratch_floats_(), sizeof(float), "matmul: packed blocks");
}

static inline void matmul_close(MatmulScratch* scratch) { free(scratch->memory); }

// ---------------------------------------------------------------------------------------------------------------------
// Packing

// Packs `k` rows and `cols` <= TILE_COLS columns of the right matrix, from (k0, j0), into a panel (k,
// TILE_COLS); columns past `cols` become zero.
static inline void matmul_pack_panel_(float* panel, Matrix m, int k0, int j0, int k, int cols) {
    const float* from = m.data + k0 * m.row + j0 * m.col;
    if (cols == TILE_COLS && m.col == 1) {
        for (int i = 0; i < k; i++) {
            vec_store(panel + i * TILE_COLS, vec_load(from + i * m.row));
            vec_store(panel + i * TILE_COLS + LANES, vec_load(from + i * m.row + LANES));
        }
        return;
    }
    int done = 0; // rows packed so far; a transposed matrix goes in squares of LANES x LANES
    if (cols == TILE_COLS && m.row == 1) {
        for (; done + LANES <= k; done += LANES) {
            for (int half = 0; half < TILE_COLS; half += LANES) {
                Vec square[LANES];
                for (int j = 0; j < LANES; j++) {
                    square[j] = vec_load(from + done + (half + j) * m.col);
                }
                vec_transpose(square);
                for (int i = 0; i < LANES; i++) {
                    vec_store(panel + (done + i) * TILE_COLS + half, square[i]);
                }
            }
        }
    }
    for (int i = done; i < k; i++) {
        for (int j = 0; j < TILE_COLS; j++) {
            panel[i * TILE_COLS + j] = j < cols ? from[i * m.row + j * m.col] : 0.0f;
        }
    }
}

// A packed tile of the left matrix keeps the direction in which the matrix is contiguous: (TILE_ROWS,
// BLOCK_K) when its rows are, (BLOCK_K, TILE_ROWS) when its columns are; so packing is copying. Rows past
// `rows` stay undefined up to the next multiple of TILE_STEP: they only reach sums that are not stored. They
// are zeroed to keep NaN traps away.
static inline void matmul_pack_tile_(float* tile, Matrix m, int i0, int k0, int rows, int k) {
    const float* from = m.data + i0 * m.row + k0 * m.col;
    if (m.col == 1) {
        for (int i = 0; i < rows; i++) {
            memcpy(tile + i * BLOCK_K, from + i * m.row, k * sizeof(float));
        }
        memset(tile + rows * BLOCK_K, 0, (size_t)(TILE_ROWS - rows) * BLOCK_K * sizeof(float));
    } else if (rows == TILE_ROWS) {
        for (int j = 0; j < k; j++) {
            memcpy(tile + j * TILE_ROWS, from + j * m.col, TILE_ROWS * sizeof(float));
        }
    } else {
        for (int j = 0; j < k; j++) {
            for (int i = 0; i < TILE_ROWS; i++) {
                tile[j * TILE_ROWS + i] = i < rows ? from[i * m.row + j * m.col] : 0.0f;
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The tile: where the time goes

// sums(rows, TILE_COLS) = tile(rows, k) panel(k, TILE_COLS), into or onto `out` (row stride `stride`), plus
// `bias`. `rows_computed`, `tile_row` and `tile_col` are constants at every call: the sums live in registers.
ALWAYS_INLINE void matmul_tile_(float* out, size_t stride, int rows, int cols, const float* tile,
                                int tile_row, int tile_col, const float* panel, int k, const float* bias,
                                GradientMode mode, const int rows_computed) {
    Vec sum[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows_computed; i++) {
        sum[i][0] = sum[i][1] = vec_all(0.0f);
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows_computed;
         i++) { // results that are added to, or whose lines must be owned, come meanwhile
        __builtin_prefetch(out + (i < rows ? i : 0) * stride, 1);
        __builtin_prefetch(out + (i < rows ? i : 0) * stride + LANES, 1);
    }
    for (int p = 0; p < k; p++) {
        const Vec low = vec_load(panel + p * TILE_COLS), high = vec_load(panel + p * TILE_COLS + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows_computed; i++) {
            const float factor = tile[i * tile_row + p * tile_col];
            sum[i][0] += factor * low;
            sum[i][1] += factor * high;
        }
    }
    float edge[TILE_COLS]; // a row that ends inside the tile passes through here
    for (int j = 0; j < TILE_COLS; j++) {
        edge[j] = bias && j < cols ? bias[j] : 0.0f;
    }
    const Vec bias_low = vec_load(edge), bias_high = vec_load(edge + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < rows_computed; i++) {
        if (i >= rows) {
            break;
        }
        float* to = out + i * stride;
        const Vec low = sum[i][0] + bias_low, high = sum[i][1] + bias_high;
        if (cols == TILE_COLS) {
            vec_store(to, mode == GRADIENT_ADD ? vec_load(to) + low : low);
            vec_store(to + LANES, mode == GRADIENT_ADD ? vec_load(to + LANES) + high : high);
        } else {
            vec_store(edge, low);
            vec_store(edge + LANES, high);
            for (int j = 0; j < cols; j++) {
                to[j] = mode == GRADIENT_ADD ? to[j] + edge[j] : edge[j];
            }
        }
    }
}

// The tile for each number of rows and each direction of the left matrix.
static inline void matmul_tile_dispatch_(float* out, size_t stride, int rows, int cols, const float* tile,
                                         int by_rows, const float* panel, int k, const float* bias,
                                         GradientMode mode) {
#define MATMUL_TILE_(row, col, computed)                                                                     \
    matmul_tile_(out, stride, rows, cols, tile, row, col, panel, k, bias, mode, computed)
    switch ((by_rows ? 3 : 0) + (rows - 1) / TILE_STEP) {
    case 0:
        MATMUL_TILE_(1, TILE_ROWS, TILE_STEP);
        break;
    case 1:
        MATMUL_TILE_(1, TILE_ROWS, 2 * TILE_STEP);
        break;
    case 2:
        MATMUL_TILE_(1, TILE_ROWS, TILE_ROWS);
        break;
    case 3:
        MATMUL_TILE_(BLOCK_K, 1, TILE_STEP);
        break;
    case 4:
        MATMUL_TILE_(BLOCK_K, 1, 2 * TILE_STEP);
        break;
    default:
        MATMUL_TILE_(BLOCK_K, 1, TILE_ROWS);
        break;
    }
#undef MATMUL_TILE_
}

// ---------------------------------------------------------------------------------------------------------------------
// The product

// A part of the result: rows [i0, i1), columns [j0, j1).
typedef struct {
    int i0, i1, j0, j1;
} MatmulTask_;

// The rows of the task times its packed panels, for k values of k from k0: a strip of rows is packed, then
// each panel meets all its tiles while it is in the L1 cache.
static inline void matmul_multiply_(float* out, size_t stride, Matrix left, MatmulTask_ task, int k0, int k,
                                    const float* panels, float* strip, const float* bias, GradientMode mode) {
    const size_t tile_floats = (size_t)TILE_ROWS * BLOCK_K;
    for (int i0 = task.i0; i0 < task.i1; i0 += STRIP_TILES * TILE_ROWS) {
        const int i1 = matmul_min_(i0 + STRIP_TILES * TILE_ROWS, task.i1);
        for (int i = i0; i < i1; i += TILE_ROWS) {
            matmul_pack_tile_(strip + (i - i0) / TILE_ROWS * tile_floats, left, i, k0,
                              matmul_min_(TILE_ROWS, i1 - i), k);
        }
        for (int j = task.j0; j < task.j1; j += TILE_COLS) {
            const float* panel = panels + (size_t)(j - task.j0) * BLOCK_K;
            for (int i = i0; i < i1; i += TILE_ROWS) {
                matmul_tile_dispatch_(out + (size_t)i * stride + j, stride, matmul_min_(TILE_ROWS, i1 - i),
                                      matmul_min_(TILE_COLS, task.j1 - j),
                                      strip + (i - i0) / TILE_ROWS * tile_floats, left.col == 1, panel, k,
                                      bias ? bias + j : NULL, mode);
            }
        }
    }
}

// One task, on one thread: for each block of k, packs its panels and multiplies.
static inline void matmul_task_(float* out, size_t stride, Matrix left, Matrix right, MatmulTask_ task, int K,
                                const float* bias, GradientMode mode, float* scratch) {
    for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
        const int k = matmul_min_(BLOCK_K, K - k0);
        for (int j = task.j0; j < task.j1; j += TILE_COLS) {
            matmul_pack_panel_(scratch + (size_t)(j - task.j0) * BLOCK_K, right, k0, j, k,
                               matmul_min_(TILE_COLS, task.j1 - j));
        }
        matmul_multiply_(out, stride, left, task, k0, k, scratch, scratch + matmul_panels_floats_(),
                         k0 == 0 ? bias : NULL, k0 == 0 ? mode : GRADIENT_ADD);
    }
}

// out(M, N) = left(M, K) right(K, N) + bias(N), set or added to as `mode` says; out is row-major without
// gaps.
static inline void matmul_product_cpu(float* out, Matrix left, Matrix right, int M, int N, int K,
                                      const float* bias, GradientMode mode, MatmulScratch* scratch) {
    const int col_groups = matmul_ceil_div_(N, TASK_PANELS * TILE_COLS);
    // rows are divided only as far as the threads need it: each division packs the panels once more
    const int row_groups = matmul_min_(matmul_ceil_div_(TASKS_PER_THREAD * threads_max(), col_groups),
                                       matmul_ceil_div_(M, STRIP_TILES * TILE_ROWS));
    const int tiles = matmul_ceil_div_(M, TILE_ROWS), panels = matmul_ceil_div_(N, TILE_COLS);
#pragma omp parallel for schedule(dynamic)
    for (int t = 0; t < row_groups * col_groups; t++) {
        const int r = t / col_groups, c = t % col_groups;
        const MatmulTask_ task = {
            (int)((int64_t)tiles * r / row_groups) * TILE_ROWS,
            matmul_min_(M, (int)((int64_t)tiles * (r + 1) / row_groups) * TILE_ROWS),
            (int)((int64_t)panels * c / col_groups) * TILE_COLS,
            matmul_min_(N, (int)((int64_t)panels * (c + 1) / col_groups) * TILE_COLS),
        };
        matmul_task_(out, N, left, right, task, K, bias, mode,
                     scratch->memory + thread_index() * matmul_scratch_floats_());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The layer

static inline double matmul_flops(double N, double C, double OC) { return 2 * N * C * OC; } // of one product

// Sets out (N, OC).
static inline void matmul_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                                      int N, int C, int OC, MatmulScratch* scratch) {
    const Matrix left = {inp, (size_t)C, 1}, right = {weight, 1, (size_t)C};
    matmul_product_cpu(out, left, right, N, OC, C, bias, GRADIENT_SET, scratch);
}

// Sets dinp (N, C).
static inline void matmul_backward_input_cpu(float* dinp, const float* dout, const float* weight, int N,
                                             int C, int OC, MatmulScratch* scratch) {
    const Matrix left = {dout, (size_t)OC, 1}, right = {weight, (size_t)C, 1};
    matmul_product_cpu(dinp, left, right, N, C, OC, NULL, GRADIENT_SET, scratch);
}

// Sets or adds to dweight (OC, C).
static inline void matmul_backward_weight_cpu(float* dweight, const float* dout, const float* inp, int N,
                                              int C, int OC, GradientMode mode, MatmulScratch* scratch) {
    const Matrix left = {dout, 1, (size_t)OC}, right = {inp, (size_t)C, 1};
    matmul_product_cpu(dweight, left, right, OC, C, N, NULL, mode, scratch);
}

// Sets or adds to dbias (OC). A thread sums whole columns, row after row: the order does not depend on the
// threads.
static inline void matmul_backward_bias_cpu(float* dbias, const float* dout, int N, int OC,
                                            GradientMode mode) {
    const int block = 4 * LANES;
#pragma omp parallel for schedule(static)
    for (int o0 = 0; o0 < OC; o0 += block) {
        const int cols = matmul_min_(block, OC - o0);
        float sum[4 * LANES] = {0};
        for (int n = 0; n < N; n++) {
            const float* row = dout + (size_t)n * OC + o0;
            for (int o = 0; o < cols; o++) {
                sum[o] += row[o];
            }
        }
        for (int o = 0; o < cols; o++) {
            dbias[o0 + o] = mode == GRADIENT_ADD ? dbias[o0 + o] + sum[o] : sum[o];
        }
    }
}

#endif
