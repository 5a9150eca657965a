/*
matmul_bf16.h -- the linear layer of matmul.h with factors rounded to bf16 and sums in fp32, on the
CPU.

    out, dout     (N, OC)   fp32, as are inp, dinp, bias and dweight
    weight                  packed twice: for out = inp weight^T, and for dinp = dout weight

A packed weight serves all matmuls until the weight changes (bf16_weights.h). They read half the
bytes of fp32, and pack only their other factor. dweight packs both.

The left factor is packed one slab at a time. A slab has a part for each thread: as many rows as
fill half of an L2 cache. A thread multiplies its part with one panel (32 columns) of the right
factor after another. It processes a block of k at a time, which stays in its L1 cache while it
meets all rows of the part; meanwhile the next block is prefetched. Sums stay in their own tiles
until the last value of k: of the slab, or of the whole matmul if the right factor is already
packed. Each result is a sum over k in an order that does not depend on the number of threads.

Processors prefetch data that is read in memory order, but not 128 bytes in each of 32 rows. So
results are written past the caches, or collected into whole rows where they are added.

A caller may process the tiles of results itself, while they are in a cache: MatmulBf16.finish. One
thread finishes the tiles of a row in their order, MATMUL_BF16_PART_PANELS at a time.
*/
#ifndef LLMC_MATMUL_BF16_H
#define LLMC_MATMUL_BF16_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/memory.h"
#include "llmc/base/sizes.h"
#include "llmc/bf16/tile_kernels.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    // values of k of a panel in a block: 32 KiB in an L1 cache
    MATMUL_BF16_BLOCK_K = 512,
    // tiles of rows times values of k in a part: 1 MiB in an L2 cache
    MATMUL_BF16_PART = 16 * 1024,
    MATMUL_BF16_PART_TILES = 16,          // tiles of rows in a part; more if K is small
    MATMUL_BF16_PART_PANELS = 8,          // panels that a thread processes at a time
    MATMUL_BF16_SLAB_RIGHT = 4096 * 1024, // columns times values of k in a slab: 8 MiB
    // results of at least this size are written past the caches
    MATMUL_BF16_STREAM_BYTES = 1 << 20,
    // contiguous floats that are packed in sequence: long enough to be prefetched
    MATMUL_BF16_PACKED = 512,
    // tiles of sums, if a slab has several blocks of k
    MATMUL_BF16_TILES = MATMUL_BF16_PART / MATMUL_BF16_BLOCK_K,
    MATMUL_BF16_IN_OUT = MATMUL_BF16_PART / MATMUL_BF16_PART_TILES, // values of k in one slab
    MATMUL_BF16_SUMS = 512 // tiles of sums, if k has several slabs: 2 MiB
};

// Memory for packed slabs, one per process. A matmul touches no more of it than it needs.
typedef struct {
    Bf16Kernel kernel;
    int threads;
    uint32_t *right, *left;
    float* tiles; // (threads, MATMUL_BF16_TILES, 32, 32)
    float* sums;  // (threads, MATMUL_BF16_SUMS, 32, 32); or else the sums of the left factor's rows
} MatmulBf16Scratch;

// Returns the pairs of a packed factor with `lines` lines (rows of a left, columns of a right one).
static inline size_t matmul_bf16_pairs(int lines, int k) {
    return (size_t)int_ceil_div(lines, BF16_TILE) * bf16_steps(k) * BF16_STEP_PAIRS;
}

// Allocates scratch for as many threads as the next parallel region would have: one allocation,
// large enough for huge pages.
void matmul_bf16_open(MatmulBf16Scratch* scratch, Memory* memory, Bf16Kernel kernel);

// A factor: a matrix, or all of it packed, with its tiles of 32 rows (left) or columns (right)
// `tile` pairs apart.
typedef struct {
    Matrix matrix;
    const uint32_t* packed; // or NULL
    size_t tile;
    // a left factor, packed in the memory of its own rows of `out`; K is at most MATMUL_BF16_IN_OUT
    int is_in_out;
} MatmulBf16Factor;

static inline MatmulBf16Factor matmul_bf16_matrix(Matrix matrix) {
    return (MatmulBf16Factor){matrix, NULL, 0, 0};
}

// Returns the factor, all K values, that matmul_bf16_pack or matmul_bf16_pack_left packed.
static inline MatmulBf16Factor matmul_bf16_packed(const uint32_t* packed, int K) {
    return (MatmulBf16Factor){{NULL, 0, 0}, packed, matmul_bf16_pairs(1, K), 0};
}

// A tile of a matmul whose sums are final.
typedef struct {
    float* sums;         // (32, 32)
    int row, col;        // its first row and column in the result
    int rows, cols;      // up to 32
    float* out;          // its place in `out`
    size_t stride;       // distance of rows at `out`
    const float* bias;   // bias of these columns, or NULL
    int is_added;        // add to `out` instead of setting it
    const void* context; // context of the matmul
} MatmulBf16Tile;

// Returns the offset of a tile in a matrix of M rows whose tiles follow each other in memory: (N /
// 32, M / 32, 32, 32).
size_t matmul_bf16_tile_at(int M, int row, int col);

// A matmul: sets or adds to out (M, N) left (M, K) right (K, N) + bias (N), according to `mode`;
// out is row-major without gaps.
typedef struct {
    float* out;
    MatmulBf16Factor left, right;
    int M, N, K;
    GradientMode mode;
    const float* bias; // or NULL
    // (M) sums of the left factor's rows before rounding, set or added to according to `mode`; or
    // NULL
    float* row_sums;
    // processes each MatmulBf16Tile instead of storing it, with `out` NULL; or NULL
    Bf16Finish finish;
    const void* context; // context of these tiles
    // memory that `finish` reads, at matmul_bf16_tile_at, to be prefetched; or NULL
    const float* read;
    // panels of half the columns, with `finish` and a packed right factor: panel p of the first
    // half, then of the second half, then the next p; 0: panels in their order
    int paired;
} MatmulBf16;

// Returns a matmul that sets out (M, N) to left (M, K) right (K, N).
static inline MatmulBf16 matmul_bf16_of(float* out, MatmulBf16Factor left, MatmulBf16Factor right, int M,
                                        int N, int K) {
    return (MatmulBf16){out, left, right, M, N, K, GRADIENT_SET, NULL, NULL, NULL, NULL, NULL, 0};
}

// Packs a right factor (K, N) into matmul_bf16_pairs(N, K).
void matmul_bf16_pack(Bf16Pack pack, uint32_t* to, Matrix right, int K, int N);

// Packs a left factor (M, K) into matmul_bf16_pairs(M, K).
void matmul_bf16_pack_left(Bf16Pack pack, uint32_t* to, Matrix left, int M, int K);

void matmul_bf16_product_cpu(MatmulBf16 m, MatmulBf16Scratch* scratch);

// ---- the layer ----

// Return the weight as a right factor: of the forward pass, and of dinp.
static inline Matrix matmul_bf16_forward_weight(const float* weight, int C) {
    return (Matrix){weight, 1, (size_t)C};
}

static inline Matrix matmul_bf16_backward_weight(const float* weight, int C) {
    return (Matrix){weight, (size_t)C, 1};
}

// Sets out (N, OC).
void matmul_bf16_forward_cpu(float* out, const float* inp, const uint32_t* packed, const float* bias,
                             MatmulSizes sizes, MatmulBf16Scratch* scratch);

// Sets dinp (N, C).
void matmul_bf16_backward_input_cpu(float* dinp, const float* dout, const uint32_t* packed, MatmulSizes sizes,
                                    MatmulBf16Scratch* scratch);

// Sets or adds to dweight (OC, C), and to dbias (OC), the sums of dout over N, which may be NULL.
void matmul_bf16_backward_weight_cpu(float* dweight, float* dbias, const float* dout, const float* inp,
                                     MatmulSizes sizes, GradientMode mode, MatmulBf16Scratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef MATMUL_BF16_IMPLEMENTATION

#include <assert.h>

#include "llmc/base/threads.h"

static size_t matmul_bf16_left_(int threads) {
    return (size_t)threads * MATMUL_BF16_PART / BF16_STEP * BF16_STEP_PAIRS;
}

static size_t matmul_bf16_right_(void) { return MATMUL_BF16_SLAB_RIGHT / 2; }

static size_t matmul_bf16_tiles_(int threads) {
    return (size_t)threads * MATMUL_BF16_TILES * BF16_TILE * BF16_TILE;
}

static size_t matmul_bf16_sums_(int threads) {
    return (size_t)threads * MATMUL_BF16_SUMS * BF16_TILE * BF16_TILE;
}

void matmul_bf16_open(MatmulBf16Scratch* scratch, Memory* memory, Bf16Kernel kernel) {
    const int threads = threads_max();
    const size_t right = matmul_bf16_right_(), left = matmul_bf16_left_(threads),
                 tiles = matmul_bf16_tiles_(threads), sums = matmul_bf16_sums_(threads);
    scratch->kernel = kernel;
    scratch->threads = threads;
    scratch->right = (uint32_t*)memory_take_unset(memory, "scratch: packed factors of matmul", MEMORY_DEVICE,
                                                  (right + left + tiles + sums) * sizeof(uint32_t));
    if (scratch->right) {
        scratch->left = scratch->right + right;
        scratch->tiles = (float*)(void*)(scratch->left + left);
        scratch->sums = scratch->tiles + tiles;
    }
}

size_t matmul_bf16_tile_at(int M, int row, int col) {
    const size_t tile = (size_t)(col / BF16_TILE) * int_ceil_div(M, BF16_TILE) + row / BF16_TILE;
    return tile * BF16_TILE * BF16_TILE;
}

// A slab of a matmul: rows [i0, i1), columns [j0, j1), values of k from k0 on, and its packed
// factors: tile t of the left one is at left + t * left_tile, and so on.
typedef struct {
    int i0, i1, j0, j1, k0, k;
    const uint32_t *left, *right;
    size_t left_tile, right_tile;
    // sums of its rows and columns until the last value of k, tile after tile; NULL: they are added
    // to out
    float* sums;
} MatmulBf16Slab_;

// Returns the tiles of rows in a part of a slab with k values of k.
static int matmul_bf16_part_tiles_(int k) { return MATMUL_BF16_PART / BF16_STEP / bf16_steps(k); }

// Returns the values of k in a slab, the same for any number of threads: more, if the matrix has
// few rows.
static int matmul_bf16_slab_k_(int M, int K) {
    const int tiles = int_min(int_ceil_div(M, BF16_TILE), MATMUL_BF16_PART_TILES);
    return matmul_step_(K, MATMUL_BF16_PART / tiles / BF16_STEP * BF16_STEP, BF16_STEP);
}

// Piece that a thread packs at a time: many lines if they are contiguous in memory, many values of
// k if these are.
typedef struct {
    int lines, k;
} MatmulBf16Piece_;

static MatmulBf16Piece_ matmul_bf16_piece_(int k_contiguous) {
    return k_contiguous ? (MatmulBf16Piece_){BF16_TILE, MATMUL_BF16_PACKED}
                        : (MatmulBf16Piece_){MATMUL_BF16_PACKED, 2 * BF16_STEP};
}

// Packs `cols` columns of a right factor and k values of k; threads share the work.
static void matmul_bf16_pack_panels_(Bf16Pack pack, uint32_t* to, Matrix right, int k, int cols) {
    const MatmulBf16Piece_ piece = matmul_bf16_piece_(right.col != 1);
#pragma omp for schedule(static) collapse(2)
    for (int j = 0; j < cols; j += piece.lines) {
        for (int p = 0; p < k; p += piece.k) {
            bf16_pack_right(pack, to + matmul_bf16_pairs(j, k) + matmul_bf16_pairs(1, p),
                            matmul_bf16_pairs(1, k), matrix_at(right, p, j), int_min(piece.k, k - p),
                            int_min(piece.lines, cols - j));
        }
    }
}

// Sets the sums of `lines` lines over k values of k; lines are contiguous in memory.
static void matmul_bf16_sum_lines_(float* sums, const float* from, size_t stride, int lines, int k) {
    int i = 0;
    for (; i + LANES <= lines; i += LANES) {
        Vec sum = vec_all(0.0f);
        for (int p = 0; p < k; p++) {
            sum += vec_load(from + p * stride + i);
        }
        vec_store(sums + i, sum);
    }
    for (; i < lines; i++) {
        sums[i] = 0;
        for (int p = 0; p < k; p++) {
            sums[i] += from[p * stride + i];
        }
    }
}

// Packs `rows` rows of a left factor and k values of k. `sums`, unless NULL, gets the sums of the
// rows over each piece of k (pieces, rows); k is not contiguous then.
static void matmul_bf16_pack_rows_(Bf16Pack pack, uint32_t* to, Matrix left, int rows, int k, float* sums) {
    const MatmulBf16Piece_ piece = matmul_bf16_piece_(left.col == 1);
#pragma omp for schedule(static) collapse(2)
    for (int i = 0; i < rows; i += piece.lines) {
        for (int p = 0; p < k; p += piece.k) {
            const int lines = int_min(piece.lines, rows - i), values = int_min(piece.k, k - p);
            const Matrix from = matrix_at(left, i, p);
            bf16_pack_left(pack, to + matmul_bf16_pairs(i, k) + matmul_bf16_pairs(1, p),
                           matmul_bf16_pairs(1, k), from, lines, values);
            if (sums) { // while the piece is in a cache
                matmul_bf16_sum_lines_(sums + (size_t)(p / piece.k) * rows + i, from.data, left.col, lines,
                                       values);
            }
        }
    }
}

void matmul_bf16_pack(Bf16Pack pack, uint32_t* to, Matrix right, int K, int N) {
#pragma omp parallel
    matmul_bf16_pack_panels_(pack, to, right, K, N);
}

void matmul_bf16_pack_left(Bf16Pack pack, uint32_t* to, Matrix left, int M, int K) {
#pragma omp parallel
    matmul_bf16_pack_rows_(pack, to, left, M, K, NULL);
}

// Returns 1 if these are the last values of k, after which the sums are final.
static int matmul_bf16_is_final_(const MatmulBf16* m, const MatmulBf16Slab_* slab) {
    return !slab->sums || slab->k0 + slab->k >= m->K;
}

// Returns the number of panel j of a slab in the whole right factor.
static int matmul_bf16_panel_(const MatmulBf16* m, const MatmulBf16Slab_* slab, int j) {
    const int panel = slab->j0 / BF16_TILE + j;
    return m->paired ? panel / 2 + panel % 2 * m->paired : panel;
}

// Returns panel j of a slab's packed right factor.
static const uint32_t* matmul_bf16_right_of_(const MatmulBf16* m, const MatmulBf16Slab_* slab, int j) {
    const int panel = matmul_bf16_panel_(m, slab, j) - slab->j0 / BF16_TILE;
    return slab->right + (ptrdiff_t)panel * (ptrdiff_t)slab->right_tile;
}

// Returns tile i of panel j.
static MatmulBf16Tile matmul_bf16_tile_(const MatmulBf16* m, const MatmulBf16Slab_* slab, float* sums, int i,
                                        int j) {
    const int row = slab->i0 + i * BF16_TILE, col = matmul_bf16_panel_(m, slab, j) * BF16_TILE;
    const int is_first = slab->sums || slab->k0 == 0; // out is set to the sums, not added to
    return (MatmulBf16Tile){sums,
                            row,
                            col,
                            int_min(BF16_TILE, slab->i1 - row),
                            int_min(BF16_TILE, slab->j1 - slab->j0 - j * BF16_TILE),
                            m->out ? m->out + (size_t)row * m->N + col : NULL,
                            (size_t)m->N,
                            is_first && m->bias ? m->bias + col : NULL,
                            !is_first || m->mode == GRADIENT_ADD,
                            m->context};
}

// Sets or adds to a row of results the sums.
static void matmul_bf16_store_row_(const MatmulBf16Tile* tile, float* to, const float* sums, int cols) {
    const float* bias = tile->bias;
    int j = 0;
    for (; j + LANES <= cols; j += LANES) {
        const Vec sum = vec_load(sums + j);
        vec_store(to + j, tile->is_added ? vec_load(to + j) + sum : bias ? vec_load(bias + j) + sum : sum);
    }
    for (; j < cols; j++) {
        to[j] = tile->is_added ? to[j] + sums[j] : bias ? bias[j] + sums[j] : sums[j];
    }
}

static void matmul_bf16_store_(const void* of, int begin, int end) {
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        matmul_bf16_store_row_(tile, tile->out + i * tile->stride, tile->sums + i * BF16_TILE, tile->cols);
    }
}

// Writes large results past the caches: whole lines, so memory need not be read first.
static void matmul_bf16_stream_(const void* of, int begin, int end) {
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        for (int j = 0; j < tile->cols; j += LANES) {
            const Vec sum = vec_load(tile->sums + i * BF16_TILE + j);
            vec_stream(tile->out + i * tile->stride + j, tile->bias ? vec_load(tile->bias + j) + sum : sum);
        }
    }
}

static Bf16Finish matmul_bf16_finish_(const MatmulBf16* m, const MatmulBf16Slab_* slab) {
    const int streams = (slab->sums || slab->k == m->K) && m->mode == GRADIENT_SET && m->N % 16 == 0 &&
                        (uintptr_t)m->out % 64 == 0 &&
                        (size_t)m->M * m->N * sizeof(float) >= MATMUL_BF16_STREAM_BYTES;
    return m->finish ? m->finish : streams ? matmul_bf16_stream_ : matmul_bf16_store_;
}

// A part of a slab: tiles [i0, i1), panels [j0, j1).
typedef struct {
    int i0, i1, j0, j1;
} MatmulBf16Part_;

// Panel j of a part, with one block of k.
typedef struct {
    const MatmulBf16* m;
    const MatmulBf16Slab_* slab;
    MatmulBf16Part_ part;
    float* sums; // room for one tile, or for all of the part's rows if k has several blocks
    Bf16Finish finish;
    int j, k, block; // k: the first value of k in the slab; block: values of k
} MatmulBf16Pass_;

// Returns tile i of a pass.
static MatmulBf16Tile matmul_bf16_sums_of_(const MatmulBf16Pass_* pass, int i) {
    enum { TILE = BF16_TILE * BF16_TILE };
    const MatmulBf16Slab_* slab = pass->slab;
    const int panels = int_ceil_div(slab->j1 - slab->j0, BF16_TILE);
    const int tile = pass->block >= slab->k ? 0 : i - pass->part.i0;
    float* sums =
        slab->sums ? slab->sums + ((size_t)i * panels + pass->j) * TILE : pass->sums + (size_t)tile * TILE;
    return matmul_bf16_tile_(pass->m, slab, sums, i, pass->j);
}

// Multiplies all tiles of a part with a block of a panel. Each tile finishes the one before, and
// prefetches a share of the next block and the place of its own sums; past the last panel this is
// memory that nobody reads.
static void matmul_bf16_pass_(const MatmulBf16Pass_* pass, const Bf16Kernel* kernel) {
    const MatmulBf16Slab_* slab = pass->slab;
    const int i0 = pass->part.i0, i1 = pass->part.i1, k = pass->k;
    const int steps = bf16_steps(int_min(pass->block, slab->k - k)), is_last = k + pass->block >= slab->k;
    const int is_begun = k > 0 || (slab->sums && slab->k0 > 0);
    const int is_final = is_last && matmul_bf16_is_final_(pass->m, slab);
    const size_t at = (size_t)(k / BF16_STEP) * BF16_STEP_PAIRS;
    const uint32_t* right = matmul_bf16_right_of_(pass->m, slab, pass->j) + at;
    const uint32_t* next =
        is_last ? matmul_bf16_right_of_(pass->m, slab, pass->j + 1) : right + (size_t)steps * BF16_STEP_PAIRS;
    // cache lines prefetched with each step
    const int lines = int_ceil_div(BF16_STEP_PAIRS / BF16_LINE_PAIRS, i1 - i0);
    const int touches = is_final && pass->finish == matmul_bf16_store_;
    const float* read = is_final ? pass->m->read : NULL;
    MatmulBf16Tile before;
    for (int i = i0; i < i1; i++) {
        const MatmulBf16Tile tile = matmul_bf16_sums_of_(pass, i);
        const Bf16Ahead ahead = {next + (size_t)(i - i0) * steps * lines * BF16_LINE_PAIRS,
                                 lines,
                                 int_ceil_div(BF16_TILE, steps),
                                 read      ? read + matmul_bf16_tile_at(pass->m->M, tile.row, tile.col)
                                 : touches ? tile.out
                                           : NULL,
                                 read ? BF16_TILE : tile.stride,
                                 is_final && i > i0 ? pass->finish : NULL,
                                 &before};
        kernel->product(tile.sums, BF16_TILE, is_begun ? tile.sums : NULL, BF16_TILE,
                        slab->left + i * slab->left_tile + at, right, steps, &ahead);
        before = tile;
    }
    if (is_final) {
        pass->finish(&before, 0, BF16_TILE);
    }
}

static void matmul_bf16_part_(const MatmulBf16* m, const MatmulBf16Slab_* slab, const Bf16Kernel* kernel,
                              float* sums, MatmulBf16Part_ part) {
    const int block = matmul_step_(slab->k, MATMUL_BF16_BLOCK_K, BF16_STEP);
    MatmulBf16Pass_ pass = {m, slab, part, sums, matmul_bf16_finish_(m, slab), 0, 0, block};
    for (pass.j = part.j0; pass.j < part.j1; pass.j++) {
        for (pass.k = 0; pass.k < slab->k; pass.k += block) {
            matmul_bf16_pass_(&pass, kernel);
        }
    }
}

// Returns 1 if results are added to a matrix in memory by whole rows: if the right factor is small.
static int matmul_bf16_adds_rows_(const MatmulBf16* m, const MatmulBf16Slab_* slab) {
    return m->mode == GRADIENT_ADD && slab->k == m->K && slab->k <= MATMUL_BF16_BLOCK_K && !m->finish;
}

// Adds a part with one block of k: computes the sums of a tile of rows and many panels, then adds
// them all.
static void matmul_bf16_add_rows_(const MatmulBf16* m, const MatmulBf16Slab_* slab, const Bf16Kernel* kernel,
                                  float* sums, MatmulBf16Part_ part) {
    for (int j0 = part.j0; j0 < part.j1; j0 += MATMUL_BF16_TILES) {
        const int panels = int_min(MATMUL_BF16_TILES, part.j1 - j0), stride = panels * BF16_TILE;
        for (int i = part.i0; i < part.i1; i++) {
            for (int j = 0; j < panels; j++) {
                kernel->product(sums + j * BF16_TILE, stride, NULL, 0, slab->left + i * slab->left_tile,
                                slab->right + (j0 + j) * slab->right_tile, bf16_steps(slab->k),
                                &bf16_nothing_ahead);
            }
            const MatmulBf16Tile first = matmul_bf16_tile_(m, slab, sums, i, j0);
            const int cols = int_min(stride, slab->j1 - slab->j0 - j0 * BF16_TILE);
            for (int r = 0; r < first.rows; r++) {
                matmul_bf16_store_row_(&first, first.out + r * first.stride, sums + r * stride, cols);
            }
        }
    }
}

// Cut of a slab into parts, enough of them for all threads. If a caller finishes the tiles, the cut
// along the columns is the same for any number of threads: the same MATMUL_BF16_PART_PANELS panels
// form one part.
typedef struct {
    int tiles, panels, row_parts, col_parts;
} MatmulBf16Cut_;

static MatmulBf16Cut_ matmul_bf16_cut_(const MatmulBf16* m, const MatmulBf16Slab_* slab, int threads) {
    const int tiles = int_ceil_div(slab->i1 - slab->i0, BF16_TILE),
              panels = int_ceil_div(slab->j1 - slab->j0, BF16_TILE);
    const int least = int_ceil_div(tiles, matmul_bf16_part_tiles_(slab->k)), wanted = MATMUL_TASKS * threads;
    const int groups = int_ceil_div(panels, MATMUL_BF16_PART_PANELS);
    MatmulBf16Cut_ cut = {tiles, panels, least,
                          int_min(panels, int_max(groups, int_ceil_div(wanted, least)))};
    if (matmul_bf16_adds_rows_(m, slab)) {
        cut.row_parts = int_min(tiles, int_max(least, wanted));
        cut.col_parts = 1;
    } else if (m->finish) {
        cut.row_parts = int_min(tiles, int_max(least, int_ceil_div(wanted, groups)));
        cut.col_parts = groups;
    }
    return cut;
}

static MatmulBf16Part_ matmul_bf16_part_of_(const MatmulBf16* m, const MatmulBf16Cut_* cut, int r, int c) {
    const int i0 = (int)((int64_t)cut->tiles * r / cut->row_parts),
              i1 = (int)((int64_t)cut->tiles * (r + 1) / cut->row_parts);
    if (m->finish) {
        return (MatmulBf16Part_){i0, i1, c * MATMUL_BF16_PART_PANELS,
                                 int_min((c + 1) * MATMUL_BF16_PART_PANELS, cut->panels)};
    }
    return (MatmulBf16Part_){i0, i1, (int)((int64_t)cut->panels * c / cut->col_parts),
                             (int)((int64_t)cut->panels * (c + 1) / cut->col_parts)};
}

// Multiplies all parts of a slab. Parts with the same rows go to the same thread as far as
// possible, which has them in its L2 cache.
static void matmul_bf16_multiply_(const MatmulBf16* m, const MatmulBf16Slab_* slab,
                                  const MatmulBf16Scratch* scratch) {
    const MatmulBf16Cut_ cut = matmul_bf16_cut_(m, slab, scratch->threads);
    const int by_rows = matmul_bf16_adds_rows_(m, slab);
    float* sums = scratch->tiles + matmul_bf16_tiles_(1) * (size_t)thread_index();
#pragma omp for schedule(static)
    for (int t = 0; t < cut.row_parts * cut.col_parts; t++) {
        const MatmulBf16Part_ part = matmul_bf16_part_of_(m, &cut, t / cut.col_parts, t % cut.col_parts);
        (by_rows ? matmul_bf16_add_rows_ : matmul_bf16_part_)(m, slab, &scratch->kernel, sums, part);
    }
}

// Returns the rows that the threads process at a time, in a slab with k values of k.
static int matmul_bf16_rows_(const MatmulBf16* m, int k, const MatmulBf16Scratch* scratch) {
    return matmul_step_(m->M, scratch->threads * matmul_bf16_part_tiles_(k) * BF16_TILE, BF16_TILE);
}

// Sets or adds to the sums of a slab's rows: the sums of its pieces of k in their order.
static void matmul_bf16_add_sums_(const MatmulBf16* m, const MatmulBf16Slab_* slab, const float* sums) {
    const int rows = slab->i1 - slab->i0, is_added = slab->k0 > 0 || m->mode == GRADIENT_ADD;
    const int pieces = int_ceil_div(slab->k, matmul_bf16_piece_(m->left.matrix.col == 1).k);
#pragma omp for schedule(static) nowait
    for (int i = 0; i < rows; i++) {
        float sum = 0;
        for (int p = 0; p < pieces; p++) {
            sum += sums[(size_t)p * rows + i];
        }
        m->row_sums[slab->i0 + i] = sum + (is_added ? m->row_sums[slab->i0 + i] : 0.0f);
    }
}

// Copies the left factor of a slab whose results will overwrite it.
static void matmul_bf16_copy_left_(const MatmulBf16* m, const MatmulBf16Slab_* slab, uint32_t* to) {
    assert(slab->k == m->K);
#pragma omp for schedule(static)
    for (int i = slab->i0; i < slab->i1; i += BF16_TILE) {
        memcpy(to + matmul_bf16_pairs(i - slab->i0, m->K), m->left.packed + i / BF16_TILE * m->left.tile,
               matmul_bf16_pairs(1, m->K) * sizeof(uint32_t));
    }
}

// Packs the left factor of a slab, if it is not packed yet, and multiplies.
static void matmul_bf16_slab_(const MatmulBf16* m, MatmulBf16Slab_* slab, MatmulBf16Scratch* scratch) {
    float* sums = m->row_sums && slab->j0 == 0 ? scratch->sums : NULL;
    if (m->left.packed && !m->left.is_in_out) {
        slab->left_tile = m->left.tile;
        slab->left = m->left.packed + slab->i0 / BF16_TILE * slab->left_tile + matmul_bf16_pairs(1, slab->k0);
    } else {
        slab->left_tile = matmul_bf16_pairs(1, slab->k);
        slab->left = scratch->left;
        if (m->left.is_in_out) {
            matmul_bf16_copy_left_(m, slab, scratch->left);
        } else {
            matmul_bf16_pack_rows_(scratch->kernel.pack, scratch->left,
                                   matrix_at(m->left.matrix, slab->i0, slab->k0), slab->i1 - slab->i0,
                                   slab->k, sums);
        }
    }
    if (sums) {
        matmul_bf16_add_sums_(m, slab, sums);
    }
    matmul_bf16_multiply_(m, slab, scratch);
}

// Multiplies with a packed right factor: slabs of k follow each other, and their sums stay in
// scratch.
static void matmul_bf16_by_packed_(const MatmulBf16* m, MatmulBf16Slab_ slab, int step_k,
                                   MatmulBf16Scratch* scratch) {
    const int is_deep = step_k < m->K, rows = matmul_bf16_rows_(m, step_k, scratch);
    const int unit = MATMUL_BF16_PART_PANELS * BF16_TILE;
    const int most = scratch->threads * MATMUL_BF16_SUMS / int_ceil_div(rows, BF16_TILE) * BF16_TILE;
    const int cols = is_deep ? matmul_step_(m->N, most / unit * unit, unit) : m->N;
    slab.sums = is_deep ? scratch->sums : NULL;
    slab.right_tile = m->right.tile;
    for (slab.i0 = 0; slab.i0 < m->M; slab.i0 += rows) {
        slab.i1 = int_min(slab.i0 + rows, m->M);
        for (slab.j0 = 0; slab.j0 < m->N; slab.j0 += cols) {
            slab.j1 = int_min(slab.j0 + cols, m->N);
            for (slab.k0 = 0; slab.k0 < m->K; slab.k0 += step_k) {
                slab.k = int_min(step_k, m->K - slab.k0);
                slab.right =
                    m->right.packed + slab.j0 / BF16_TILE * slab.right_tile + matmul_bf16_pairs(1, slab.k0);
                matmul_bf16_slab_(m, &slab, scratch);
            }
        }
    }
}

// Multiplies with a right factor that is not packed: packs each slab of it once, for all rows.
static void matmul_bf16_by_slabs_(const MatmulBf16* m, MatmulBf16Slab_ slab, int step_k,
                                  MatmulBf16Scratch* scratch) {
    const int most = MATMUL_BF16_SLAB_RIGHT / step_k / BF16_TILE * BF16_TILE;
    const int cols = matmul_step_(m->N, most, BF16_TILE);
    slab.right = scratch->right;
    for (slab.k0 = 0; slab.k0 < m->K; slab.k0 += step_k) {
        slab.k = int_min(step_k, m->K - slab.k0);
        slab.right_tile = matmul_bf16_pairs(1, slab.k);
        const int rows = matmul_bf16_rows_(m, slab.k, scratch);
        for (slab.j0 = 0; slab.j0 < m->N; slab.j0 += cols) {
            slab.j1 = int_min(slab.j0 + cols, m->N);
            matmul_bf16_pack_panels_(scratch->kernel.pack, scratch->right,
                                     matrix_at(m->right.matrix, slab.k0, slab.j0), slab.k, slab.j1 - slab.j0);
            for (slab.i0 = 0; slab.i0 < m->M; slab.i0 += rows) {
                slab.i1 = int_min(slab.i0 + rows, m->M);
                matmul_bf16_slab_(m, &slab, scratch);
            }
        }
    }
}

void matmul_bf16_product_cpu(MatmulBf16 m, MatmulBf16Scratch* scratch) {
    if (m.M == 0 || m.K == 0) { // a rank without tokens
        return;
    }
    const int step_k = matmul_bf16_slab_k_(m.M, m.K);
#pragma omp parallel
    {
        MatmulBf16Slab_ slab;
        memset(&slab, 0, sizeof(slab));
        scratch->kernel.begin();
        (m.right.packed ? matmul_bf16_by_packed_ : matmul_bf16_by_slabs_)(&m, slab, step_k, scratch);
        scratch->kernel.end();
    }
}

void matmul_bf16_forward_cpu(float* out, const float* inp, const uint32_t* packed, const float* bias,
                             MatmulSizes sizes, MatmulBf16Scratch* scratch) {
    const MatmulBf16Factor left = matmul_bf16_matrix((Matrix){inp, (size_t)sizes.C, 1}),
                           right = matmul_bf16_packed(packed, sizes.C);
    MatmulBf16 m = matmul_bf16_of(out, left, right, sizes.N, sizes.OC, sizes.C);
    m.bias = bias;
    matmul_bf16_product_cpu(m, scratch);
}

void matmul_bf16_backward_input_cpu(float* dinp, const float* dout, const uint32_t* packed, MatmulSizes sizes,
                                    MatmulBf16Scratch* scratch) {
    const MatmulBf16Factor left = matmul_bf16_matrix((Matrix){dout, (size_t)sizes.OC, 1}),
                           right = matmul_bf16_packed(packed, sizes.OC);
    matmul_bf16_product_cpu(matmul_bf16_of(dinp, left, right, sizes.N, sizes.C, sizes.OC), scratch);
}

void matmul_bf16_backward_weight_cpu(float* dweight, float* dbias, const float* dout, const float* inp,
                                     MatmulSizes sizes, GradientMode mode, MatmulBf16Scratch* scratch) {
    const MatmulBf16Factor left = matmul_bf16_matrix((Matrix){dout, 1, (size_t)sizes.OC}),
                           right = matmul_bf16_matrix((Matrix){inp, (size_t)sizes.C, 1});
    MatmulBf16 m = matmul_bf16_of(dweight, left, right, sizes.OC, sizes.C, sizes.N);
    m.row_sums = dbias;
    m.mode = mode;
    matmul_bf16_product_cpu(m, scratch);
}

#endif // MATMUL_BF16_IMPLEMENTATION

#endif
