/*
attention_bf16.h -- attention of attention.h with the factors of its six products rounded to bf16, on the CPU: the same
arguments and results. Scores, softmax and sums stay fp32.

A thread takes a whole head, and ATTENTION_BF16_ROWS queries of it at a time. Probabilities exist in fp32 for one tile of
32 queries; for dk and dv, which sum over queries, they are kept as bf16, transposed, until the block of queries is done.

defines: AttentionBf16Scratch, attention_bf16_open, attention_bf16_close, attention_bf16_forward_cpu,
         attention_bf16_backward_cpu, Attention, attention_either_bytes, attention_either_open, attention_either_close,
         attention_either_forward_cpu, attention_either_backward_cpu,
         attention_bf16_scratch_bytes
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
#include "llmc/gradient.h"

enum {
    ATTENTION_BF16_TILES = 4, // of queries in a block
    ATTENTION_BF16_ROWS = ATTENTION_BF16_TILES * BF16_TILE,
    // Keys that the backward pass takes at a time: 32 rows of p and of ds, in fp32, then fit into the L1 cache.
    ATTENTION_BF16_KEYS = 4 * BF16_TILE,
    ATTENTION_BF16_KEYS_STRIDE = ATTENTION_BF16_KEYS + 16 // as for the rows below
};

// One thread's working memory. Tp and HSp are T and HS rounded up to 32; a step has BF16_STEP_PAIRS.
typedef struct {
    float *p, *ds;  // of a tile of queries: forward p (32, Tp), backward both (32, ATTENTION_BF16_KEYS);
                    // rows have some room behind them
    float *dk, *dv; // (Tp, HSp) each, while they are summed: what a tile loads and stores lies together
    uint32_t *query, *dout;        // left, the tile's rows over the dimensions: (HSp / 32 steps)
    uint32_t* row;                 // left, its p or ds over the keys: (Tp / 32 steps)
    uint32_t *k_by_key, *v_by_key; // right, keys over dimensions: (Tp / 32 panels, HSp / 32 steps)
    uint32_t *k_by_dim, *v_by_dim; // right, dimensions over keys: (HSp / 32 panels, Tp / 32 steps)
    uint32_t *p_by_key,
        *ds_by_key; // left, keys over the queries of the block: (Tp / 32 tiles, ATTENTION_BF16_TILES steps)
    uint32_t *q_by_dim,
        *dout_by_dim; // right, dimensions over these: (HSp / 32 panels, ATTENTION_BF16_TILES steps)
} AttentionBf16Scratch_;

typedef struct {
    Bf16Kernel kernel;
    AttentionBf16Scratch_* of_thread;
    uint32_t* pairs;
    float* rows;
    int T, HS;
} AttentionBf16Scratch;

enum { ATTENTION_BF16_PARTS_ = 11 }; // of pairs, in AttentionBf16Scratch_

// Sets the pairs of each part, in its order; returns those of all.
static inline size_t attention_bf16_parts_(size_t sizes[ATTENTION_BF16_PARTS_], int T, int HS) {
    const size_t keys = (size_t)bf16_steps(T), dims = (size_t)bf16_steps(HS), step = BF16_STEP_PAIRS;
    const size_t tile = dims * step, head = keys * dims * step;
    const size_t block = keys * ATTENTION_BF16_TILES * step, queries = dims * ATTENTION_BF16_TILES * step;
    const size_t parts[ATTENTION_BF16_PARTS_] = {tile, tile,  keys * step, head,    head,   head,
                                                 head, block, block,       queries, queries};
    size_t sum = 0;
    for (int i = 0; i < ATTENTION_BF16_PARTS_; i++) {
        sizes[i] = parts[i];
        sum += parts[i];
    }
    return sum;
}

// Floats from a row of p to the next in the forward pass; of p, which both passes use; and of ds.
static inline size_t attention_bf16_stride_(int T) { return (size_t)int_round_up(T, BF16_TILE) + 16; }
static inline size_t attention_bf16_p_(int T) {
    const size_t forward = attention_bf16_stride_(T), backward = ATTENTION_BF16_KEYS_STRIDE;
    return (forward > backward ? forward : backward) * BF16_TILE;
}
static inline size_t attention_bf16_ds_(void) { return (size_t)ATTENTION_BF16_KEYS_STRIDE * BF16_TILE; }
static inline size_t attention_bf16_dk_(int T, int HS) {
    return (size_t)int_round_up(T, BF16_TILE) * int_round_up(HS, BF16_TILE);
}
// All floats of a thread.
static inline size_t attention_bf16_floats_(int T, int HS) {
    return attention_bf16_p_(T) + attention_bf16_ds_() + 2 * attention_bf16_dk_(T, HS);
}

// What attention_bf16_open allocates.
static inline size_t attention_bf16_scratch_bytes(int T, int HS) {
    size_t sizes[ATTENTION_BF16_PARTS_];
    return (size_t)threads_max() *
           (attention_bf16_parts_(sizes, T, HS) * sizeof(uint32_t) +
            attention_bf16_floats_(T, HS) * sizeof(float) + sizeof(AttentionBf16Scratch_));
}

// Scratch for sequences up to T and heads of size HS.
static inline void attention_bf16_open(AttentionBf16Scratch* scratch, Bf16Kernel kernel, int T, int HS) {
    size_t sizes[ATTENTION_BF16_PARTS_];
    const size_t per_thread = attention_bf16_parts_(sizes, T, HS), floats = attention_bf16_floats_(T, HS);
    const int threads = threads_max();
    scratch->kernel = kernel;
    scratch->T = T;
    scratch->HS = HS;
    scratch->pairs = (uint32_t*)check_alloc(per_thread * threads, sizeof(uint32_t), "attention: scratch");
    scratch->rows = (float*)check_alloc(floats * threads, sizeof(float), "attention: scratch");
    scratch->of_thread =
        (AttentionBf16Scratch_*)check_alloc(threads, sizeof(AttentionBf16Scratch_), "attention: scratch");
    uint32_t* at = scratch->pairs;
    for (int i = 0; i < threads; i++) {
        AttentionBf16Scratch_* s = &scratch->of_thread[i];
        uint32_t** const parts[ATTENTION_BF16_PARTS_] = {
            &s->query,    &s->dout,     &s->row,       &s->k_by_key, &s->v_by_key,   &s->k_by_dim,
            &s->v_by_dim, &s->p_by_key, &s->ds_by_key, &s->q_by_dim, &s->dout_by_dim};
        for (int j = 0; j < ATTENTION_BF16_PARTS_; j++) {
            *parts[j] = at;
            at += sizes[j];
        }
        s->p = scratch->rows + i * floats;
        s->ds = s->p + attention_bf16_p_(T);
        s->dk = s->ds + attention_bf16_ds_();
        s->dv = s->dk + attention_bf16_dk_(T, HS);
    }
}

static inline void attention_bf16_close(AttentionBf16Scratch* scratch) {
    free(scratch->of_thread);
    free(scratch->rows);
    free(scratch->pairs);
}

// A head, and what its thread works with.
typedef struct {
    AttentionHeadCpu_ at;
    Bf16Kernel kernel;
    AttentionBf16Scratch_ s;
    size_t Tp; // T rounded up
    size_t
        row; // from a row of p to the next: not a multiple of a page, which would make rows share lines of a cache
} AttentionBf16Head_;

static inline AttentionBf16Head_ attention_bf16_head_(AttentionHeadCpu_ at,
                                                      const AttentionBf16Scratch* scratch) {
    const AttentionBf16Head_ head = {at, scratch->kernel, scratch->of_thread[thread_index()],
                                     (size_t)int_round_up(scratch->T, BF16_TILE),
                                     attention_bf16_stride_(scratch->T)};
    return head;
}

// From which key on anything is computed for the queries from t0 on: the first of a tile.
static inline int attention_bf16_from_(const int* starts, int t0) {
    return attention_start_(starts, t0) / BF16_TILE * BF16_TILE;
}

// Packs n rows as right factors over the dimensions: panels of keys.
static inline void attention_bf16_pack_by_key_(Bf16Pack pack, uint32_t* to, const float* rows, size_t stride,
                                               int n, int HS) {
    const Matrix m = {rows, 1, stride};
    bf16_pack_right(pack, to, (size_t)bf16_steps(HS) * BF16_STEP_PAIRS, m, 0, 0, HS, n);
}

// And over the rows: panels of dimensions are `steps` apart.
static inline void attention_bf16_pack_by_dim_(Bf16Pack pack, uint32_t* to, const float* rows, size_t stride,
                                               int n, int steps, int HS) {
    const Matrix m = {rows, stride, 1};
    bf16_pack_right(pack, to, (size_t)steps * BF16_STEP_PAIRS, m, 0, 0, n, HS);
}

// scores (32, keys from ... keys-1) = left . right^T, whole tiles of them; rows are `stride` apart.
static inline void attention_bf16_scores_(const AttentionBf16Head_* head, float* scores, size_t stride,
                                          const uint32_t* left, const uint32_t* right_by_key, int from,
                                          int keys) {
    const int steps = bf16_steps(head->at.HS);
    for (int u = from; u < keys; u += BF16_TILE) {
        const Bf16Out out = {scores + (u - from), stride, BF16_TILE, BF16_TILE};
        bf16_tile(&head->kernel, out, NULL, GRADIENT_SET, left,
                  right_by_key + (size_t)(u / BF16_TILE * steps) * BF16_STEP_PAIRS, steps);
    }
}

// out (rows, HS), set or added to, = left . right over `steps` steps; panels of the right factor are `panel` steps apart.
static inline void attention_bf16_mix_(const AttentionBf16Head_* head, Bf16Out out, GradientMode mode,
                                       const uint32_t* left, const uint32_t* right_by_dim, int steps,
                                       int panel) {
    for (int d = 0; d < head->at.HS; d += BF16_TILE) {
        const Bf16Out part = {out.data + d, out.stride, out.rows, int_min(BF16_TILE, out.cols - d)};
        bf16_tile(&head->kernel, part, NULL, mode, left,
                  right_by_dim + (size_t)(d / BF16_TILE * panel) * BF16_STEP_PAIRS, steps);
    }
}

// out (rows, HS) = the packed row (rows, keys from ... keys-1) . right.
static inline void attention_bf16_mix_keys_(const AttentionBf16Head_* head, Bf16Out out,
                                            const uint32_t* right_by_dim, int from, int keys) {
    attention_bf16_mix_(head, out, GRADIENT_SET, head->s.row,
                        right_by_dim + (size_t)(from / BF16_STEP) * BF16_STEP_PAIRS, bf16_steps(keys - from),
                        (int)(head->Tp / BF16_STEP));
}

// ---- forward ----

// Queries t0 ... t0+rows-1: scores, softmax, out.
static inline void attention_bf16_forward_tile_(const AttentionBf16Head_* head, int t0, int rows) {
    const AttentionHeadCpu_* at = &head->at;
    const Matrix query = {at->qkv + t0 * at->stride, at->stride, 1};
    const float scale = 1.0f / sqrtf((float)at->HS);
    const int keys = t0 + rows, from = attention_bf16_from_(at->starts, t0);
    bf16_pack_left(head->kernel.pack, head->s.query, 0, query, 0, 0, rows, at->HS);
    attention_bf16_scores_(head, head->s.p + from, head->row, head->s.query, head->s.k_by_key, from, keys);
    float inverse[BF16_TILE];
    for (int i = 0; i < rows; i++) {
        float* row = head->s.p + i * head->row;
        const int start = attention_start_(at->starts, t0 + i);
        const float max = attention_max_row_(row, ATTENTION_KEYS, start, t0 + i + 1) * scale;
        const float sum = attention_exp_row_(row, ATTENTION_KEYS, start, t0 + i + 1, from,
                                             int_round_up(keys, LANES), scale, max);
        at->lse[t0 + i] = max + logf(sum);
        inverse[i] = 1.0f / sum;
    }
    const Bf16Out out = {at->out + (size_t)t0 * at->C, (size_t)at->C, rows, at->HS};
    const Matrix p = {head->s.p, head->row, 1};
    bf16_pack_left(head->kernel.pack, head->s.row, 0, p, 0, from, rows, keys - from);
    attention_bf16_mix_keys_(head, out, head->s.v_by_dim, from, keys);
    for (int i = 0; i < rows; i++) {
        for (int d = 0; d < at->HS; d++) {
            out.data[i * out.stride + d] *= inverse[i];
        }
    }
}

static inline void attention_bf16_forward_cpu(float* out, float* lse, const float* qkv, const int* starts,
                                              AttentionSizes sizes, AttentionBf16Scratch* scratch) {
    const int T = sizes.T, C = sizes.C, HS = C / sizes.NH;
    assert(T <= scratch->T && HS == scratch->HS);
#pragma omp parallel
    {
        scratch->kernel.begin();
#pragma omp for schedule(dynamic)
        for (int h = 0; h < sizes.B * sizes.NH; h++) {
            const AttentionBf16Head_ head = attention_bf16_head_(
                attention_head_cpu_(h, sizes, qkv, out, lse, NULL, NULL, starts), scratch);
            const float *keys = head.at.qkv + C, *values = keys + C;
            attention_bf16_pack_by_key_(head.kernel.pack, head.s.k_by_key, keys, head.at.stride, T, HS);
            attention_bf16_pack_by_dim_(head.kernel.pack, head.s.v_by_dim, values, head.at.stride, T,
                                        (int)(head.Tp / BF16_STEP), HS);
            for (int t = 0; t < T; t += BF16_TILE) {
                attention_bf16_forward_tile_(&head, t, int_min(BF16_TILE, T - t));
            }
        }
        scratch->kernel.end();
    }
}

// ---- backward ----

// Keeps p or ds (rows, keys from ... keys-1) of a tile of queries, transposed, for dk and dv: step `tile` of each of its tiles
// of keys.
static inline void attention_bf16_keep_(const AttentionBf16Head_* head, uint32_t* by_key,
                                        const float* weights, int tile, int rows, int from, int keys) {
    const Matrix m = {weights, 1, ATTENTION_BF16_KEYS_STRIDE};
    const size_t steps = ATTENTION_BF16_TILES * BF16_STEP_PAIRS;
    bf16_pack_left(head->kernel.pack, by_key + from / BF16_TILE * steps + (size_t)tile * BF16_STEP_PAIRS,
                   steps, m, 0, 0, keys - from, rows);
}

// A tile of queries in a block: queries t0 ... t0+rows-1, with their deltas.
typedef struct {
    int t0, rows, tile;
    float delta[BF16_TILE];
} AttentionBf16Queries_;

// Probabilities and their gradients of a tile of queries over the keys from ... keys-1, at most ATTENTION_BF16_KEYS; kept for
// dk and dv, and ds packed for dq from `row` on.
static inline void attention_bf16_backward_keys_(const AttentionBf16Head_* head,
                                                 const AttentionBf16Queries_* q, uint32_t* row, int from,
                                                 int keys) {
    const AttentionHeadCpu_* at = &head->at;
    const AttentionBf16Scratch_* s = &head->s;
    const float scale = 1.0f / sqrtf((float)at->HS);
    const int end = int_round_up(keys - from, LANES);
    attention_bf16_scores_(head, s->p, ATTENTION_BF16_KEYS_STRIDE, s->query, s->k_by_key, from, keys);
    attention_bf16_scores_(head, s->ds, ATTENTION_BF16_KEYS_STRIDE, s->dout, s->v_by_key, from, keys);
    for (int i = 0; i < q->rows; i++) {
        float *p = s->p + i * ATTENTION_BF16_KEYS_STRIDE, *ds = s->ds + i * ATTENTION_BF16_KEYS_STRIDE;
        const int t = q->t0 + i;
        attention_exp_row_(p, ATTENTION_KEYS, attention_start_(at->starts, t) - from, t + 1 - from, 0, end,
                           scale, at->lse[t]);
        attention_softmax_backward_row_(ds, p, ATTENTION_KEYS, 0, end, q->delta[i], scale);
    }
    const Matrix ds = {s->ds, ATTENTION_BF16_KEYS_STRIDE, 1};
    bf16_pack_left(head->kernel.pack, row, 0, ds, 0, 0, q->rows, keys - from);
    attention_bf16_keep_(head, s->p_by_key, s->p, q->tile, q->rows, from, keys);
    attention_bf16_keep_(head, s->ds_by_key, s->ds, q->tile, q->rows, from, keys);
}

// Tile `tile` of a block: probabilities and their gradients of the queries t0 ... t0+rows-1 over the keys from ...
// t0+rows-1, then dq.
static inline void attention_bf16_backward_tile_(const AttentionBf16Head_* head, int tile, int t0, int rows,
                                                 int from) {
    const AttentionHeadCpu_* at = &head->at;
    const Matrix query = {at->qkv + t0 * at->stride, at->stride, 1},
                 dout = {at->dout + (size_t)t0 * at->C, (size_t)at->C, 1};
    const int keys = t0 + rows;
    AttentionBf16Queries_ q = {t0, rows, tile, {0}};
    bf16_pack_left(head->kernel.pack, head->s.query, 0, query, 0, 0, rows, at->HS);
    bf16_pack_left(head->kernel.pack, head->s.dout, 0, dout, 0, 0, rows, at->HS);
    for (int i = 0; i < rows; i++) {
        q.delta[i] = attention_delta_(at, t0 + i);
    }
    for (int u = from; u < keys; u += ATTENTION_BF16_KEYS) {
        attention_bf16_backward_keys_(head, &q,
                                      head->s.row + (size_t)((u - from) / BF16_STEP) * BF16_STEP_PAIRS, u,
                                      int_min(u + ATTENTION_BF16_KEYS, keys));
    }
    const Bf16Out dq = {at->dqkv + t0 * at->stride, at->stride, rows, at->HS};
    attention_bf16_mix_keys_(head, dq, head->s.k_by_dim, from, keys);
}

// From a row of dk or dv in scratch to the next.
static inline size_t attention_bf16_dims_(const AttentionBf16Head_* head) {
    return (size_t)int_round_up(head->at.HS, BF16_TILE);
}

// dk or dv, in scratch, of the tile of keys at u from the tiles of queries `first` ... `tiles`-1 of a block.
static inline void attention_bf16_scatter_(const AttentionBf16Head_* head, float* sums, GradientMode mode,
                                           const uint32_t* by_key, const uint32_t* right_by_dim, int u,
                                           int first, int tiles) {
    const size_t dims = attention_bf16_dims_(head);
    const Bf16Out out = {sums + u * dims, dims, BF16_TILE, (int)dims};
    attention_bf16_mix_(head, out, mode,
                        by_key + (size_t)(u / BF16_TILE * ATTENTION_BF16_TILES + first) * BF16_STEP_PAIRS,
                        right_by_dim + (size_t)first * BF16_STEP_PAIRS, tiles - first, ATTENTION_BF16_TILES);
}

// Queries t0 ... t0+rows-1, a block. dk and dv of the block's own keys are set here, those of earlier keys are added to:
// block after block, in a fixed order. A key is seen by no tile of queries before its own.
static inline void attention_bf16_backward_block_(const AttentionBf16Head_* head, int t0, int rows) {
    const AttentionHeadCpu_* at = &head->at;
    const AttentionBf16Scratch_* s = &head->s;
    const int from = attention_bf16_from_(at->starts, t0), keys = t0 + rows, tiles = bf16_steps(rows);
    for (int i = 0; i < rows; i += BF16_TILE) {
        attention_bf16_backward_tile_(head, i / BF16_TILE, t0 + i, int_min(BF16_TILE, rows - i), from);
    }
    attention_bf16_pack_by_dim_(head->kernel.pack, s->q_by_dim, at->qkv + t0 * at->stride, at->stride, rows,
                                ATTENTION_BF16_TILES, at->HS);
    attention_bf16_pack_by_dim_(head->kernel.pack, s->dout_by_dim, at->dout + (size_t)t0 * at->C,
                                (size_t)at->C, rows, ATTENTION_BF16_TILES, at->HS);
    for (int u = from; u < keys; u += BF16_TILE) {
        const GradientMode mode = u >= t0 ? GRADIENT_SET : GRADIENT_ADD;
        const int first = int_max(u - t0, 0) / BF16_TILE;
        attention_bf16_scatter_(head, s->dk, mode, s->ds_by_key, s->q_by_dim, u, first, tiles);
        attention_bf16_scatter_(head, s->dv, mode, s->p_by_key, s->dout_by_dim, u, first, tiles);
    }
}

// Sets dk and dv of all T keys to the sums in scratch.
static inline void attention_bf16_set_keys_(const AttentionBf16Head_* head, int T) {
    const AttentionHeadCpu_* at = &head->at;
    const size_t dims = attention_bf16_dims_(head);
    float *dk = at->dqkv + at->C, *dv = dk + at->C;
    bf16_copy_rows(dk, at->stride, head->s.dk, dims, T, at->HS);
    bf16_copy_rows(dv, at->stride, head->s.dv, dims, T, at->HS);
}

static inline void attention_bf16_backward_cpu(float* dqkv, const float* dout, const float* qkv,
                                               const float* out, const float* lse, const int* starts,
                                               AttentionSizes sizes, AttentionBf16Scratch* scratch) {
    const int T = sizes.T, C = sizes.C, HS = C / sizes.NH;
    assert(T <= scratch->T && HS == scratch->HS);
#pragma omp parallel
    {
        scratch->kernel.begin();
#pragma omp for schedule(dynamic)
        for (int h = 0; h < sizes.B * sizes.NH; h++) {
            const AttentionBf16Head_ head = attention_bf16_head_(
                attention_head_cpu_(h, sizes, qkv, (float*)out, (float*)lse, dqkv, dout, starts), // only read
                scratch);
            const float *keys = head.at.qkv + C, *values = keys + C;
            attention_bf16_pack_by_key_(head.kernel.pack, head.s.k_by_key, keys, head.at.stride, T, HS);
            attention_bf16_pack_by_key_(head.kernel.pack, head.s.v_by_key, values, head.at.stride, T, HS);
            attention_bf16_pack_by_dim_(head.kernel.pack, head.s.k_by_dim, keys, head.at.stride, T,
                                        (int)(head.Tp / BF16_STEP), HS);
            for (int t = 0; t < T; t += ATTENTION_BF16_ROWS) {
                attention_bf16_backward_block_(&head, t, int_min(ATTENTION_BF16_ROWS, T - t));
            }
            attention_bf16_set_keys_(&head, T);
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
