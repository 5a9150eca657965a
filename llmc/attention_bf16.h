/*
attention_bf16.h -- attention of attention.h with the factors of its products rounded to bf16, on the CPU: the same arguments and
results. Scores, softmax and sums stay fp32.

A thread takes a whole head. Scores and probabilities exist in fp32 for one tile of 32 queries and 32 keys. While the machine
multiplies the next tile, vectors make exponentials of this one and pack them, rounded, as a factor of the next product.

    e[t][u] = 2^(c s[t][u] - shift[t])      c = log2(e) / sqrt(HS)      s = q k^T
    out[t]  = sum_u e[t][u] v[u] / sum_u e[t][u]

The shift is the score of the token with itself, roughly, so that the sum is at least 1 and one pass suffices. Where that is too
far below the largest score for fp32, it is the largest one, and the queries are computed again.

The backward pass takes ATTENTION_BF16_ROWS queries and as many keys at a time. No tile is transposed there: p and ds are right
factors, whose pairs are rows next to each other, and what comes out is dv and dk with exchanged rows and columns:

    dv^T = dout^T p        dk^T = q^T ds        dq = ds k        ds = p (dp - delta); 1 / sqrt(HS) is multiplied at last

defines: AttentionBf16Scratch, attention_bf16_open, attention_bf16_close, attention_bf16_forward_cpu,
         attention_bf16_backward_cpu, Attention, attention_either_bytes, attention_either_open, attention_either_close,
         attention_either_forward_cpu, attention_either_backward_cpu, attention_bf16_scratch_bytes
*/
#ifndef LLMC_ATTENTION_BF16_H
#define LLMC_ATTENTION_BF16_H

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/attention.h"
#include "llmc/base/check.h"
#include "llmc/base/int.h"
#include "llmc/base/threads.h"
#include "llmc/base/vec.h"
#include "llmc/bf16_tile.h"

enum {
    ATTENTION_BF16_TILES = 4, // of queries in a block of the backward pass, and of keys
    ATTENTION_BF16_ROWS = ATTENTION_BF16_TILES * BF16_TILE,
    ATTENTION_BF16_SQUARE_ = BF16_TILE * BF16_TILE // floats of a tile
};

// One thread's working memory. Tp and HSp are T and HS rounded up to 32; a step has BF16_STEP_PAIRS.
typedef struct {
    float *p, *ds;                 // two tiles each: one that is multiplied, and the one before
    float* sums;                   // (32, LANES): of e
    float* dq;                     // (ATTENTION_BF16_TILES, HSp / 32) tiles; forward the first of them is out
    float *dk, *dv;                // (Tp / 32, HSp / 32) tiles each, of dimensions over keys
    uint32_t *k_by_key, *v_by_key; // right, keys over dimensions: (Tp / 32 panels, HSp / 32 steps)
    uint32_t* by_dim; // right, dimensions over keys: (HSp / 32 panels, Tp / 32 steps); forward v, backward k
    uint32_t* row;    // forward: left, e of a tile of queries over the keys: (Tp / 32 steps)
    uint32_t *query, *dout; // left, queries over dimensions: (ATTENTION_BF16_TILES tiles, HSp / 32 steps)
    uint32_t *q_by_dim,
        *dout_by_dim;      // left, dimensions over queries: (HSp / 32 tiles, ATTENTION_BF16_TILES steps)
    uint32_t* ds_by_query; // left, queries over keys: (ATTENTION_BF16_TILES tiles, as many steps)
    uint32_t *p_by_key, *ds_by_key; // right, keys over queries: (ATTENTION_BF16_TILES panels, as many steps)
} AttentionBf16Scratch_;

typedef struct {
    Bf16Kernel kernel;
    AttentionBf16Scratch_* of_thread;
    uint32_t* memory;
    int T, HS;
} AttentionBf16Scratch;

// Takes the next `n` words of memory.
static inline uint32_t* attention_bf16_take_(uint32_t** at, size_t n) {
    uint32_t* taken = *at;
    *at += n;
    return taken;
}

// Sets the places in `memory`; returns the words of all: whole cache lines.
static inline size_t attention_bf16_place_(AttentionBf16Scratch_* s, uint32_t* memory, int T, int HS) {
    enum { TILES = ATTENTION_BF16_TILES, STEP = BF16_STEP_PAIRS, SQUARE = ATTENTION_BF16_SQUARE_ };
    const size_t keys = (size_t)bf16_steps(T), dims = (size_t)bf16_steps(HS);
    uint32_t* at = memory;
    float** const floats[] = {&s->p, &s->ds, &s->sums, &s->dq, &s->dk, &s->dv};
    const size_t float_sizes[] = {2 * SQUARE,           2 * SQUARE,
                                  BF16_TILE * LANES,    TILES * dims * SQUARE,
                                  keys * dims * SQUARE, keys * dims * SQUARE};
    uint32_t** const pairs[] = {&s->k_by_key,    &s->v_by_key, &s->by_dim,   &s->row,
                                &s->query,       &s->dout,     &s->q_by_dim, &s->dout_by_dim,
                                &s->ds_by_query, &s->p_by_key, &s->ds_by_key};
    const size_t head = keys * dims * STEP, block = TILES * dims * STEP, square = TILES * TILES * STEP;
    const size_t pair_sizes[] = {head,  head,  head,   keys * STEP, block, block,
                                 block, block, square, square,      square};
    for (size_t i = 0; i < sizeof(floats) / sizeof(floats[0]); i++) {
        *floats[i] = (float*)(void*)attention_bf16_take_(&at, float_sizes[i]);
    }
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        *pairs[i] = attention_bf16_take_(&at, pair_sizes[i]);
    }
    return (size_t)(at - memory);
}

static inline size_t attention_bf16_words_(int T, int HS) {
    AttentionBf16Scratch_ s;
    uint32_t* somewhere = (uint32_t*)(void*)&s;
    return attention_bf16_place_(&s, somewhere, T, HS);
}

// What attention_bf16_open allocates.
static inline size_t attention_bf16_scratch_bytes(int T, int HS) {
    return (size_t)threads_max() *
           (attention_bf16_words_(T, HS) * sizeof(uint32_t) + sizeof(AttentionBf16Scratch_));
}

// Scratch for sequences up to T and heads of size HS.
static inline void attention_bf16_open(AttentionBf16Scratch* scratch, Bf16Kernel kernel, int T, int HS) {
    const size_t words = attention_bf16_words_(T, HS);
    const int threads = threads_max();
    scratch->kernel = kernel;
    scratch->T = T;
    scratch->HS = HS;
    scratch->memory = (uint32_t*)check_alloc(words * threads, sizeof(uint32_t), "attention: scratch");
    scratch->of_thread =
        (AttentionBf16Scratch_*)check_alloc(threads, sizeof(AttentionBf16Scratch_), "attention: scratch");
    for (int i = 0; i < threads; i++) {
        attention_bf16_place_(&scratch->of_thread[i], scratch->memory + i * words, T, HS);
    }
}

static inline void attention_bf16_close(AttentionBf16Scratch* scratch) {
    free(scratch->of_thread);
    free(scratch->memory);
}

// A head, and what its thread works with.
typedef struct {
    AttentionHeadCpu_ at;
    Bf16Kernel kernel;
    AttentionBf16Scratch_ s;
    int T, dims, keys; // steps of HS, and of the scratch's T
    float scale, c;    // 1 / sqrt(HS); c as above
} AttentionBf16Head_;

static inline AttentionBf16Head_ attention_bf16_head_(AttentionHeadCpu_ at, int T,
                                                      const AttentionBf16Scratch* scratch) {
    const float scale = 1.0f / sqrtf((float)at.HS);
    const AttentionBf16Head_ head = {at,    scratch->kernel,   scratch->of_thread[thread_index()],
                                     T,     bf16_steps(at.HS), bf16_steps(scratch->T),
                                     scale, scale * LOG2_E};
    return head;
}

// From which key on anything is computed for the queries from t0 on: the first of a tile.
static inline int attention_bf16_from_(const int* starts, int t0) {
    return attention_start_(starts, t0) / BF16_TILE * BF16_TILE;
}

// Packs n rows as right factors over the dimensions: panels of keys.
static inline void attention_bf16_pack_by_key_(const AttentionBf16Head_* head, uint32_t* to,
                                               const float* rows, int n) {
    const Matrix m = {rows, 1, head->at.stride};
    bf16_pack_right(head->kernel.pack, to, (size_t)head->dims * BF16_STEP_PAIRS, m, 0, 0, head->at.HS, n);
}

// And over the rows: panels of dimensions.
static inline void attention_bf16_pack_by_dim_(const AttentionBf16Head_* head, uint32_t* to,
                                               const float* rows, int n) {
    const Matrix m = {rows, head->at.stride, 1};
    bf16_pack_right(head->kernel.pack, to, (size_t)head->keys * BF16_STEP_PAIRS, m, 0, 0, n, head->at.HS);
}

// ---- tiles of scores ----

// Queries t0 ... t0+rows-1 and the keys from u0 on. Rows past these queries are zero, as are their factors.
typedef struct {
    const AttentionBf16Head_* head;
    int t0, rows, u0;
    float *p, *ds;              // scores, then e or p; dout . v, then ds
    const float *shift, *delta; // of the queries
    uint32_t *p_by_key, *ds_by_key, *by_query;
} AttentionBf16Tile_;

// Turns row i of a tile of scores into e, zero where a key is not seen. Returns its sum, lane by lane.
ALWAYS_INLINE Vec attention_bf16_exp_row_(const AttentionBf16Tile_* tile, int i) {
    float* row = tile->p + i * BF16_TILE;
    const int t = tile->t0 + i, start = attention_start_(tile->head->at.starts, t);
    const int is_whole = start <= tile->u0 && tile->u0 + BF16_TILE <= t + 1;
    const Vec c = vec_all(tile->head->c), shift = vec_all(tile->shift[i]);
    Vec sum = vec_all(0.0f);
    for (int j = 0; j < BF16_TILE; j += LANES) {
        const Vec e = vec_exp2(vec_load(row + j) * c - shift);
        const Vec kept = is_whole ? e : attention_seen_(e, vec_all(0.0f), tile->u0 + j, start, t + 1);
        vec_store(row + j, kept);
        sum += kept;
    }
    return sum;
}

// square (32, 32) = left . right over the dimensions. `finish` takes `before` meanwhile.
static inline void attention_bf16_scores_(const AttentionBf16Head_* head, float* square, const uint32_t* left,
                                          const uint32_t* right, Bf16Finish finish,
                                          const AttentionBf16Tile_* before) {
    const Bf16Ahead ahead = {NULL, 0, int_ceil_div(BF16_TILE, head->dims), NULL, 0, finish, before};
    head->kernel.product(square, BF16_TILE, NULL, 0, left, right, head->dims, &ahead);
}

// ---- forward ----

// A Bf16Finish: e, its sums, and e packed.
static inline void attention_bf16_forward_finish_(const void* of, int begin, int end) {
    const AttentionBf16Tile_* tile = (const AttentionBf16Tile_*)of;
    float* sums = tile->head->s.sums;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        vec_store(sums + i * LANES, vec_load(sums + i * LANES) + attention_bf16_exp_row_(tile, i));
    }
    if (end == BF16_TILE) {
        tile->head->kernel.pack_tile(tile->by_query, NULL, NULL, tile->p);
    }
}

// Another: the largest scores, lane by lane, in place of the sums.
static inline void attention_bf16_max_finish_(const void* of, int begin, int end) {
    const AttentionBf16Tile_* tile = (const AttentionBf16Tile_*)of;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        const int t = tile->t0 + i, start = attention_start_(tile->head->at.starts, t);
        float* sums = tile->head->s.sums + i * LANES;
        Vec max = vec_load(sums);
        for (int j = 0; j < BF16_TILE; j += LANES) {
            const Vec score = vec_load(tile->p + i * BF16_TILE + j);
            max = vec_max(attention_seen_(score, max, tile->u0 + j, start, t + 1), max);
        }
        vec_store(sums, max);
    }
}

// Gives the scores of queries t0 ... t0+rows-1 to `finish`, a tile after the other.
static inline void attention_bf16_keys_(const AttentionBf16Head_* head, int t0, int rows, int from,
                                        const float* shift, float initial, Bf16Finish finish) {
    const AttentionBf16Scratch_* s = &head->s;
    AttentionBf16Tile_ before = {head, t0, rows, 0, NULL, NULL, shift, NULL, NULL, NULL, NULL};
    for (int i = 0; i < rows * LANES; i++) {
        s->sums[i] = initial;
    }
    for (int u = from; u < t0 + rows; u += BF16_TILE) {
        float* square = s->p + u / BF16_TILE % 2 * ATTENTION_BF16_SQUARE_;
        attention_bf16_scores_(head, square, s->query,
                               s->k_by_key + (size_t)(u / BF16_TILE * head->dims) * BF16_STEP_PAIRS,
                               u > from ? finish : NULL, &before);
        before.u0 = u;
        before.p = square;
        before.by_query = s->row + (size_t)((u - from) / BF16_TILE) * BF16_STEP_PAIRS;
    }
    finish(&before, 0, BF16_TILE);
}

// Sets the sums of e, and packs it; shift: about the score of each token with itself, or the largest one.
static inline void attention_bf16_exponentials_(const AttentionBf16Head_* head, int t0, int rows, int from,
                                                float* shift, float* sum) {
    const AttentionHeadCpu_* at = &head->at;
    const float most = 1e30f;
    int is_small = 1;
    for (int i = 0; i < rows; i++) {
        const float* q = at->qkv + (t0 + i) * at->stride;
        shift[i] = vec_dot(q, q + at->C, at->HS) * head->c;
    }
    attention_bf16_keys_(head, t0, rows, from, shift, 0, attention_bf16_forward_finish_);
    for (int i = 0; i < rows; i++) {
        sum[i] = vec_hsum(vec_load(head->s.sums + i * LANES));
        is_small &= sum[i] < most;
    }
    if (is_small) {
        return;
    }
    attention_bf16_keys_(head, t0, rows, from, shift, -INFINITY, attention_bf16_max_finish_);
    for (int i = 0; i < rows;
         i++) { // the other rows keep theirs: their bits do not depend on what comes later in the text
        shift[i] = sum[i] < most ? shift[i] : vec_hmax(vec_load(head->s.sums + i * LANES)) * head->c;
    }
    attention_bf16_keys_(head, t0, rows, from, shift, 0, attention_bf16_forward_finish_);
    for (int i = 0; i < rows; i++) {
        sum[i] = vec_hsum(vec_load(head->s.sums + i * LANES));
    }
}

// out of queries t0 ... t0+rows-1, dimensions from d on: a tile of sums divided by those of e.
static inline void attention_bf16_divide_(const AttentionHeadCpu_* at, const float* square, int t0, int rows,
                                          int d, const float* sum) {
    const int cols = int_min(BF16_TILE, at->HS - d);
    for (int i = 0; i < rows; i++) {
        const float* from = square + i * BF16_TILE;
        float* out = at->out + (size_t)(t0 + i) * at->C + d;
        const float inverse = 1.0f / sum[i];
        for (int j = 0; j < cols; j++) {
            out[j] = from[j] * inverse;
        }
    }
}

// Queries t0 ... t0+rows-1: scores, softmax, out.
static inline void attention_bf16_forward_tile_(const AttentionBf16Head_* head, int t0, int rows) {
    const AttentionHeadCpu_* at = &head->at;
    const AttentionBf16Scratch_* s = &head->s;
    const Matrix query = {at->qkv + t0 * at->stride, at->stride, 1};
    const int from = attention_bf16_from_(at->starts, t0), steps = bf16_steps(t0 + rows - from);
    float shift[BF16_TILE], sum[BF16_TILE];
    bf16_pack_left(head->kernel.pack, s->query, 0, query, 0, 0, rows, at->HS);
    attention_bf16_exponentials_(head, t0, rows, from, shift, sum);
    for (int i = 0; i < rows; i++) {
        at->lse[t0 + i] = shift[i] / LOG2_E + logf(sum[i]);
    }
    for (int d = 0; d < head->dims; d++) {
        const uint32_t* v = s->by_dim + (size_t)(d * head->keys + from / BF16_STEP) * BF16_STEP_PAIRS;
        float* square = s->dq + d * ATTENTION_BF16_SQUARE_;
        head->kernel.product(square, BF16_TILE, NULL, 0, s->row, v, steps, &bf16_nothing_ahead);
        attention_bf16_divide_(at, square, t0, rows, d * BF16_TILE, sum);
    }
}

static inline void attention_bf16_forward_cpu(float* out, float* lse, const float* qkv, const int* starts,
                                              AttentionSizes sizes, AttentionBf16Scratch* scratch) {
    const int T = sizes.T, C = sizes.C;
    assert(T <= scratch->T && C / sizes.NH == scratch->HS);
#pragma omp parallel
    {
        scratch->kernel.begin();
#pragma omp for schedule(dynamic)
        for (int h = 0; h < sizes.B * sizes.NH; h++) {
            const AttentionBf16Head_ head = attention_bf16_head_(
                attention_head_cpu_(h, sizes, qkv, out, lse, NULL, NULL, starts), T, scratch);
            attention_bf16_pack_by_key_(&head, head.s.k_by_key, head.at.qkv + C, T);
            attention_bf16_pack_by_dim_(&head, head.s.by_dim, head.at.qkv + 2 * C, T);
            for (int t = 0; t < T; t += BF16_TILE) {
                attention_bf16_forward_tile_(&head, t, int_min(BF16_TILE, T - t));
            }
        }
        scratch->kernel.end();
    }
}

// ---- backward ----

// A block of queries: t0 ... t0+rows-1.
typedef struct {
    int t0, rows;
    float shift[ATTENTION_BF16_ROWS], delta[ATTENTION_BF16_ROWS];
} AttentionBf16Block_;

// A Bf16Finish: scores become p.
static inline void attention_bf16_p_finish_(const void* of, int begin, int end) {
    const AttentionBf16Tile_* tile = (const AttentionBf16Tile_*)of;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        attention_bf16_exp_row_(tile, i);
    }
}

// Another, afterwards: ds, and both packed.
static inline void attention_bf16_ds_finish_(const void* of, int begin, int end) {
    const AttentionBf16Tile_* tile = (const AttentionBf16Tile_*)of;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        const float* p = tile->p + i * BF16_TILE;
        float* ds = tile->ds + i * BF16_TILE;
        const Vec delta = vec_all(tile->delta[i]);
        for (int j = 0; j < BF16_TILE; j += LANES) {
            vec_store(ds + j, vec_load(p + j) * (vec_load(ds + j) - delta));
        }
    }
    if (end == BF16_TILE) {
        tile->head->kernel.pack_tile(NULL, NULL, tile->p_by_key, tile->p);
        tile->head->kernel.pack_tile(tile->by_query, NULL, tile->ds_by_key, tile->ds);
    }
}

// Tile i of a block of queries, and tile j of a chunk of keys that begins at u0.
static inline AttentionBf16Tile_ attention_bf16_tile_(const AttentionBf16Head_* head,
                                                      const AttentionBf16Block_* block, int i, int u0, int j,
                                                      int n) {
    enum { TILES = ATTENTION_BF16_TILES, STEP = BF16_STEP_PAIRS };
    const AttentionBf16Scratch_* s = &head->s;
    const int row = i * BF16_TILE;
    return (AttentionBf16Tile_){head,
                                block->t0 + row,
                                int_min(BF16_TILE, block->rows - row),
                                u0 + j * BF16_TILE,
                                s->p + n % 2 * ATTENTION_BF16_SQUARE_,
                                s->ds + n % 2 * ATTENTION_BF16_SQUARE_,
                                block->shift + row,
                                block->delta + row,
                                s->p_by_key + (size_t)(j * TILES + i) * STEP,
                                s->ds_by_key + (size_t)(j * TILES + i) * STEP,
                                s->ds_by_query + (size_t)(i * TILES + j) * STEP};
}

// The first tile of keys that a block sees in the chunk from u0 on, and the end of those that tile i of it sees.
static inline int attention_bf16_first_(const AttentionBf16Head_* head, const AttentionBf16Block_* block,
                                        int u0) {
    return int_max(0, attention_bf16_from_(head->at.starts, block->t0) - u0) / BF16_TILE;
}
static inline int attention_bf16_end_(const AttentionBf16Block_* block, int i, int u0) {
    return int_min(ATTENTION_BF16_TILES, (block->t0 - u0) / BF16_TILE + i + 1);
}

// p and ds of a block and a chunk of keys, packed.
static inline void attention_bf16_probabilities_(const AttentionBf16Head_* head,
                                                 const AttentionBf16Block_* block, int u0) {
    const AttentionBf16Scratch_* s = &head->s;
    const size_t step = (size_t)head->dims * BF16_STEP_PAIRS;
    AttentionBf16Tile_ before;
    int n = 0;
    for (int i = 0; i < bf16_steps(block->rows); i++) {
        for (int j = attention_bf16_first_(head, block, u0); j < attention_bf16_end_(block, i, u0);
             j++, n++) {
            const AttentionBf16Tile_ tile = attention_bf16_tile_(head, block, i, u0, j, n);
            const size_t key = (size_t)(u0 / BF16_TILE + j) * step;
            attention_bf16_scores_(head, tile.p, s->query + i * step, s->k_by_key + key,
                                   n > 0 ? attention_bf16_p_finish_ : NULL, &before);
            attention_bf16_scores_(head, tile.ds, s->dout + i * step, s->v_by_key + key,
                                   n > 0 ? attention_bf16_ds_finish_ : NULL, &before);
            before = tile;
        }
    }
    attention_bf16_p_finish_(&before, 0, BF16_TILE);
    attention_bf16_ds_finish_(&before, 0, BF16_TILE);
}

// Sets or adds to a square: left . right over `steps` steps.
static inline void attention_bf16_add_(const AttentionBf16Head_* head, float* square, int is_added,
                                       const uint32_t* left, const uint32_t* right, int steps) {
    head->kernel.product(square, BF16_TILE, is_added ? square : NULL, BF16_TILE, left, right, steps,
                         &bf16_nothing_ahead);
}

// Adds what a chunk of keys has of dq, and the block of queries of dk and dv. The first chunk sets dq; the block to which the
// keys belong sets dk and dv. So blocks follow each other in a fixed order. Queries see no tiles of keys behind their own.
static inline void attention_bf16_chunk_(const AttentionBf16Head_* head, const AttentionBf16Block_* block,
                                         int u0, int is_first) {
    enum { TILES = ATTENTION_BF16_TILES, STEP = BF16_STEP_PAIRS };
    const AttentionBf16Scratch_* s = &head->s;
    const int first = attention_bf16_first_(head, block, u0), tiles = bf16_steps(block->rows);
    const int is_own = u0 == block->t0, end = attention_bf16_end_(block, tiles - 1, u0);
    attention_bf16_probabilities_(head, block, u0);
    for (int d = 0; d < head->dims; d++) {
        const uint32_t* k = s->by_dim + (size_t)(d * head->keys + u0 / BF16_STEP + first) * STEP;
        for (int i = 0; i < tiles; i++) {
            attention_bf16_add_(head, s->dq + (i * head->dims + d) * ATTENTION_BF16_SQUARE_, !is_first,
                                s->ds_by_query + (size_t)(i * TILES + first) * STEP, k,
                                attention_bf16_end_(block, i, u0) - first);
        }
        for (int j = first; j < end; j++) {
            const int i = is_own ? j : 0; // the first tile of queries that sees the keys
            const size_t square = (size_t)((u0 / BF16_TILE + j) * head->dims + d) * ATTENTION_BF16_SQUARE_;
            const size_t left = (size_t)(d * TILES + i) * STEP, right = (size_t)(j * TILES + i) * STEP;
            attention_bf16_add_(head, s->dk + square, !is_own, s->q_by_dim + left, s->ds_by_key + right,
                                tiles - i);
            attention_bf16_add_(head, s->dv + square, !is_own, s->dout_by_dim + left, s->p_by_key + right,
                                tiles - i);
        }
    }
}

// Packs the rows of q or dout of a block of queries: over dimensions, and over queries.
static inline void attention_bf16_pack_block_(const AttentionBf16Head_* head, uint32_t* by_query,
                                              uint32_t* by_dim, const float* rows, size_t stride, int n) {
    const Matrix m = {rows, stride, 1}, transposed = {rows, 1, stride};
    bf16_pack_left(head->kernel.pack, by_query, (size_t)head->dims * BF16_STEP_PAIRS, m, 0, 0, n,
                   head->at.HS);
    bf16_pack_left(head->kernel.pack, by_dim, (size_t)ATTENTION_BF16_TILES * BF16_STEP_PAIRS, transposed, 0,
                   0, head->at.HS, n);
}

// dq of queries t0 ... t0+rows-1: a row of squares times 1 / sqrt(HS).
static inline void attention_bf16_set_queries_(const AttentionBf16Head_* head, const float* squares, int t0,
                                               int rows) {
    const AttentionHeadCpu_* at = &head->at;
    for (int d = 0; d < at->HS; d += BF16_TILE, squares += ATTENTION_BF16_SQUARE_) {
        const int cols = int_min(BF16_TILE, at->HS - d);
        for (int i = 0; i < rows; i++) {
            float* dq = at->dqkv + (t0 + i) * at->stride + d;
            for (int j = 0; j < cols; j++) {
                dq[j] = squares[i * BF16_TILE + j] * head->scale;
            }
        }
    }
}

// Queries t0 ... t0+rows-1: dq, and what they have of dk and dv.
static inline void attention_bf16_backward_block_(const AttentionBf16Head_* head, int t0, int rows) {
    const AttentionHeadCpu_* at = &head->at;
    const AttentionBf16Scratch_* s = &head->s;
    const int from = attention_bf16_from_(at->starts, t0) / ATTENTION_BF16_ROWS * ATTENTION_BF16_ROWS;
    AttentionBf16Block_ block = {t0, rows, {0}, {0}};
    for (int i = 0; i < rows; i++) {
        block.shift[i] = at->lse[t0 + i] * LOG2_E;
        block.delta[i] = attention_delta_(at, t0 + i);
    }
    attention_bf16_pack_block_(head, s->query, s->q_by_dim, at->qkv + t0 * at->stride, at->stride, rows);
    attention_bf16_pack_block_(head, s->dout, s->dout_by_dim, at->dout + (size_t)t0 * at->C, (size_t)at->C,
                               rows);
    for (int u = from; u < t0 + rows; u += ATTENTION_BF16_ROWS) {
        attention_bf16_chunk_(head, &block, u, u == from);
    }
    for (int i = 0; i < rows; i += BF16_TILE) {
        attention_bf16_set_queries_(head, s->dq + i / BF16_TILE * head->dims * ATTENTION_BF16_SQUARE_, t0 + i,
                                    int_min(BF16_TILE, rows - i));
    }
}

// to (32, 32), rows `stride` apart, = the transpose of a square times `scale`.
static inline void attention_bf16_turn_(float* to, size_t stride, const float* square, float scale) {
    for (int i = 0; i < BF16_TILE; i += LANES) {
        for (int j = 0; j < BF16_TILE; j += LANES) {
            Vec row[LANES];
            for (int r = 0; r < LANES; r++) {
                row[r] = vec_load(square + (i + r) * BF16_TILE + j) * scale;
            }
            vec_transpose(row);
            for (int r = 0; r < LANES; r++) {
                vec_store(to + (j + r) * stride + i, row[r]);
            }
        }
    }
}

// Sets dk or dv of all T keys to the squares (dimensions, keys) in scratch times `scale`.
static inline void attention_bf16_set_keys_(const AttentionBf16Head_* head, float* to, const float* squares,
                                            float scale) {
    const size_t stride = head->at.stride;
    for (int u = 0; u < head->T; u += BF16_TILE) {
        for (int d = 0; d < head->at.HS; d += BF16_TILE, squares += ATTENTION_BF16_SQUARE_) {
            const int rows = int_min(BF16_TILE, head->T - u), cols = int_min(BF16_TILE, head->at.HS - d);
            float* at = to + u * stride + d;
            if (rows == BF16_TILE && cols == BF16_TILE) {
                attention_bf16_turn_(at, stride, squares, scale);
            } else {
                float turned[ATTENTION_BF16_SQUARE_];
                attention_bf16_turn_(turned, BF16_TILE, squares, scale);
                bf16_copy_rows(at, stride, turned, BF16_TILE, rows, cols);
            }
        }
    }
}

static inline void attention_bf16_backward_cpu(float* dqkv, const float* dout, const float* qkv,
                                               const float* out, const float* lse, const int* starts,
                                               AttentionSizes sizes, AttentionBf16Scratch* scratch) {
    const int T = sizes.T, C = sizes.C;
    assert(T <= scratch->T && C / sizes.NH == scratch->HS);
#pragma omp parallel
    {
        scratch->kernel.begin();
#pragma omp for schedule(dynamic)
        for (int h = 0; h < sizes.B * sizes.NH; h++) {
            const AttentionBf16Head_ head = attention_bf16_head_(
                attention_head_cpu_(h, sizes, qkv, (float*)out, (float*)lse, dqkv, dout, starts), // only read
                T, scratch);
            attention_bf16_pack_by_key_(&head, head.s.k_by_key, head.at.qkv + C, T);
            attention_bf16_pack_by_key_(&head, head.s.v_by_key, head.at.qkv + 2 * C, T);
            attention_bf16_pack_by_dim_(&head, head.s.by_dim, head.at.qkv + C, T);
            for (int t = 0; t < T; t += ATTENTION_BF16_ROWS) {
                attention_bf16_backward_block_(&head, t, int_min(ATTENTION_BF16_ROWS, T - t));
            }
            attention_bf16_set_keys_(&head, head.at.dqkv + C, head.s.dk, head.scale);
            attention_bf16_set_keys_(&head, head.at.dqkv + 2 * C, head.s.dv, 1.0f);
        }
        scratch->kernel.end();
    }
}

// ---- either ----

// Attention with factors in fp32 or in bf16. One token of each text at a time (attention_cached_cpu) is always fp32.
typedef struct {
    int is_bf16;
    AttentionScratch fp32;
    AttentionBf16Scratch bf16;
} Attention;

static inline size_t attention_either_bytes(int is_bf16, int T, int HS) {
    return attention_scratch_bytes(T, HS) + (is_bf16 ? attention_bf16_scratch_bytes(T, HS) : 0);
}

static inline void attention_either_open(Attention* a, int is_bf16, int T, int HS) {
    a->is_bf16 = is_bf16;
    attention_open(&a->fp32, T, HS);
    if (is_bf16) {
        attention_bf16_open(&a->bf16, bf16_kernel(), T, HS);
    }
}

static inline void attention_either_close(Attention* a) {
    if (a->is_bf16) {
        attention_bf16_close(&a->bf16);
    }
    attention_close(&a->fp32);
}

static inline void attention_either_forward_cpu(float* out, float* lse, const float* qkv, const int* starts,
                                                AttentionSizes sizes, Attention* a) {
    if (a->is_bf16) {
        attention_bf16_forward_cpu(out, lse, qkv, starts, sizes, &a->bf16);
    } else {
        attention_forward_cpu(out, lse, qkv, starts, sizes, &a->fp32);
    }
}

static inline void attention_either_backward_cpu(float* dqkv, const float* dout, const float* qkv,
                                                 const float* out, const float* lse, const int* starts,
                                                 AttentionSizes sizes, Attention* a) {
    if (a->is_bf16) {
        attention_bf16_backward_cpu(dqkv, dout, qkv, out, lse, starts, sizes, &a->bf16);
    } else {
        attention_backward_cpu(dqkv, dout, qkv, out, lse, starts, sizes, &a->fp32);
    }
}

#endif
