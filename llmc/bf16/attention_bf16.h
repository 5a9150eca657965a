/*
attention_bf16.h -- attention.h's functions with the factors of matmuls rounded to bf16, on the CPU:
the same arguments and results. Scores, softmax and sums stay fp32.

A thread processes a whole head, or in the backward pass the heads that share keys. Scores and
probabilities exist in fp32 for one tile of 32 queries and 32 keys. While the matmul unit computes
the next tile, vector instructions turn this one into exponentials and pack them, rounded, as a
factor of the next matmul.

    e[t][u] = 2^(c s[t][u] - shift[t])      c = log2(e) / root      s = q k^T
    out[t]  = sum_u e[t][u] v[u] / sum_u e[t][u]
With a cap, c = log2(e) cap and s = tanh(q k^T / (cap root)); ds also has the factor 1 - s^2.

The shift is the score of the token with itself, so the sum is at least 1 and one pass suffices. If
that is too far below the largest score for fp32, the shift is the largest score, and the queries
are computed again.

The backward pass processes ATTENTION_BF16_ROWS queries and as many keys at a time. It transposes no
tile: p and ds are right factors, whose pairs are adjacent rows, and the results are dv and dk with
exchanged rows and columns:

    dv^T = dout^T p      dk^T = q^T ds      dq = ds k      ds = p (dp - delta)

The factor 1 / root is applied at the end.

q is packed twice, k and v are packed four times, head by head. If tokens and dimensions of a head
are whole tiles, the linear layers on both sides can write and read these directly, in the memory of
as many floats (qkv_bf16.h):

    packed qkv      of each sequence (NH, 2, T, HS), then (KV, 4, T, HS): the factors of
                    AttentionBf16Factors_
    packed dqkv     left factors (B*T, QKV) and (QKV, B*T): by tokens and by channels

Packed queries and keys may be turned (rope.h); then packed dqkv is turned back.

Chunks of sequences that are divided among ranks are whole tiles.
*/
#ifndef LLMC_ATTENTION_BF16_H
#define LLMC_ATTENTION_BF16_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/memory.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/rope.h"
#include "llmc/bf16/tile_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    ATTENTION_BF16_TILES = 4, // tiles of queries, and of keys, in a block of the backward pass
    ATTENTION_BF16_ROWS = ATTENTION_BF16_TILES * BF16_TILE,
    ATTENTION_BF16_SQUARE_ = BF16_TILE * BF16_TILE, // floats of a tile
    ATTENTION_BF16_QUERIES_ = 2,
    ATTENTION_BF16_KEYS_ = 4 // packed factors of q; of k and v
};

// Working memory of one thread. Tp and HSp are T and HS rounded up to 32; a step has
// BF16_STEP_PAIRS.
typedef struct {
    float *p, *ds; // two tiles each: one being multiplied, and the one before
    float* sums;   // (32, LANES): sums of e
    // (ATTENTION_BF16_TILES, HSp / 32) tiles; in the forward pass the first row is out
    float* dq;
    float *dk, *dv;           // (Tp / 32, HSp / 32) tiles each, dimensions by keys
    uint32_t *queries, *keys; // factors of heads that are not packed yet
    // forward: left, e of a tile of queries over the keys: (Tp / 32 steps)
    uint32_t* row;
    // left, a block: queries over dimensions, dimensions over queries
    uint32_t *dout, *dout_by_dim;
    // left, queries over keys: (ATTENTION_BF16_TILES tiles, as many steps)
    uint32_t* ds_by_query;
    // right, keys over queries: (ATTENTION_BF16_TILES panels, as many steps)
    uint32_t *p_by_key, *ds_by_key;
} AttentionBf16Scratch_;

typedef struct {
    Bf16Kernel kernel;
    AttentionBf16Scratch_* of_thread;
    int T, HS;
} AttentionBf16Scratch;

// ---- memory ----

// Allocates scratch for up to T keys of a sequence and heads of size HS.
void attention_bf16_open(AttentionBf16Scratch* scratch, Memory* memory, Bf16Kernel kernel, int T, int HS);

// ---- forward ----

void attention_bf16_forward_cpu(const AttentionPass* pass, AttentionBf16Scratch* scratch);

// ---- backward ----

void attention_bf16_backward_cpu(const AttentionGradients* d, const AttentionPass* pass,
                                 AttentionBf16Scratch* scratch);

// ---- packed by the linear layers ----

// Returns 1 if sequences and heads are whole tiles, as the functions below require.
static inline int attention_bf16_fits(int T, int HS) { return T % BF16_TILE == 0 && HS % BF16_TILE == 0; }

// Packs a tile (32, 32) of qkv (B*T, QKV), from row `row` and column `col` on, for both passes.
void attention_bf16_pack_qkv(const Bf16Kernel* kernel, uint32_t* qkv, const float* tile, int row, int col,
                             AttentionSizes sizes);

// Computes the forward pass from packed qkv; pass->qkv is NULL.
void attention_bf16_packed_forward_cpu(const uint32_t* qkv, const AttentionPass* pass,
                                       AttentionBf16Scratch* scratch);

// Results of the backward pass: packed dqkv, and its sums over each sequence (B, QKV).
typedef struct {
    uint32_t* packed; // memory of (B*T, QKV) floats
    float* sums;
    Rope rope; // by which queries and keys were turned
} AttentionBf16Gradient;

void attention_bf16_packed_backward_cpu(AttentionBf16Gradient dqkv, const float* dout, const uint32_t* qkv,
                                        const AttentionPass* pass, AttentionBf16Scratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef ATTENTION_BF16_IMPLEMENTATION

#include <assert.h>
#include <math.h>

#include "llmc/base/sizes.h"
#include "llmc/base/threads.h"
#include "llmc/base/vec.h"
#include "llmc/bf16/matmul_bf16.h"

// Returns the next `n` pairs of memory.
static uint32_t* attention_bf16_take_(uint32_t** at, size_t n) {
    uint32_t* taken = *at;
    *at += n;
    return taken;
}

// Sets the pointers into `memory`; returns the total of pairs, in whole cache lines.
static size_t attention_bf16_place_(AttentionBf16Scratch_* s, uint32_t* memory, int T, int HS) {
    enum { TILES = ATTENTION_BF16_TILES, STEP = BF16_STEP_PAIRS, SQUARE = ATTENTION_BF16_SQUARE_ };
    const size_t keys = (size_t)bf16_steps(T), dims = (size_t)bf16_steps(HS);
    const size_t block = TILES * dims * STEP, square = TILES * TILES * STEP;
    float** const floats[] = {&s->p, &s->ds, &s->sums, &s->dq, &s->dk, &s->dv};
    const size_t float_sizes[] = {2 * SQUARE,           2 * SQUARE,
                                  BF16_TILE * LANES,    TILES * dims * SQUARE,
                                  keys * dims * SQUARE, keys * dims * SQUARE};
    uint32_t** const pairs[] = {&s->queries,     &s->keys,        &s->row,      &s->dout,
                                &s->dout_by_dim, &s->ds_by_query, &s->p_by_key, &s->ds_by_key};
    const size_t pair_sizes[] = {ATTENTION_BF16_QUERIES_ * keys * dims * STEP,
                                 ATTENTION_BF16_KEYS_ * keys * dims * STEP,
                                 keys * STEP,
                                 block,
                                 block,
                                 square,
                                 square,
                                 square};
    uint32_t* at = memory;
    for (size_t i = 0; i < sizeof(floats) / sizeof(floats[0]); i++) {
        *floats[i] = (float*)(void*)attention_bf16_take_(&at, float_sizes[i]);
    }
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        *pairs[i] = attention_bf16_take_(&at, pair_sizes[i]);
    }
    return (size_t)(at - memory);
}

static size_t attention_bf16_words_(int T, int HS) {
    AttentionBf16Scratch_ s;
    uint32_t* somewhere = (uint32_t*)(void*)&s;
    return attention_bf16_place_(&s, somewhere, T, HS);
}

void attention_bf16_open(AttentionBf16Scratch* scratch, Memory* memory, Bf16Kernel kernel, int T, int HS) {
    const size_t words = attention_bf16_words_(T, HS), threads = (size_t)threads_max();
    uint32_t* at = (uint32_t*)memory_take(memory, "scratch: attention", MEMORY_DEVICE,
                                          words * threads * sizeof(uint32_t));
    scratch->kernel = kernel;
    scratch->T = T;
    scratch->HS = HS;
    scratch->of_thread = (AttentionBf16Scratch_*)memory_take(memory, "scratch: attention", MEMORY_DEVICE,
                                                             threads * sizeof(AttentionBf16Scratch_));
    for (size_t i = 0; i < threads && at; i++) {
        attention_bf16_place_(&scratch->of_thread[i], at + i * words, T, HS);
    }
}

// A pass over all heads, as in attention.h; q, k, v and their gradients are fp32 or packed.
typedef struct {
    AttentionSizes sizes;
    const AttentionPass* fp32;
    const AttentionGradients* d; // NULL in the forward pass
    const uint32_t* packed;      // qkv, or NULL
    AttentionBf16Gradient packed_gradient;
} AttentionBf16Pass_;

// Factors of a head: left ones of q (T, HS), right ones of k and v (W, HS). They are tiles of 32
// tokens over the dimensions, and of 32 dimensions over the tokens.
typedef struct {
    uint32_t *q_by_query, *q_by_dim, *k_by_key, *k_by_dim, *v_by_key, *v_by_dim;
    int queries, keys, dims; // tiles of queries and of keys, steps of dimensions
} AttentionBf16Factors_;

static AttentionBf16Factors_ attention_bf16_factors_(const uint32_t* queries, const uint32_t* keys,
                                                     AttentionSizes sizes) {
    const int tiles = bf16_steps(sizes.T), key_tiles = bf16_steps(attention_keys(sizes)),
              dims = bf16_steps(sizes.HS);
    const size_t n = (size_t)key_tiles * dims * BF16_STEP_PAIRS;
    uint32_t *q = (uint32_t*)queries, *k = (uint32_t*)keys; // packed already, or to be packed
    return (AttentionBf16Factors_){
        q,   q + (size_t)tiles * dims * BF16_STEP_PAIRS, k, k + n, k + 2 * n, k + 3 * n, tiles, key_tiles,
        dims};
}

// Returns the packed factors of head h of sequence b and of the keys that it reads.
static AttentionBf16Factors_ attention_bf16_packed_(const uint32_t* qkv, AttentionSizes sizes, int b, int h) {
    const size_t words = (size_t)sizes.T * sizes.HS / 2, // of a factor
        queries = (size_t)ATTENTION_BF16_QUERIES_ * sizes.NH, keys = (size_t)ATTENTION_BF16_KEYS_ * sizes.KV;
    const uint32_t* sequence = qkv + b * (queries + keys) * words;
    return attention_bf16_factors_(
        sequence + (size_t)ATTENTION_BF16_QUERIES_ * h * words,
        sequence + (queries + (size_t)ATTENTION_BF16_KEYS_ * (h / attention_group(sizes))) * words, sizes);
}

// Return the offset of tile t of tokens and tile d of dimensions in a factor over dimensions, and
// in one over queries or keys.
static size_t attention_bf16_over_dims_(const AttentionBf16Factors_* f, int t, int d) {
    return ((size_t)t * f->dims + d) * BF16_STEP_PAIRS;
}

static size_t attention_bf16_over_queries_(const AttentionBf16Factors_* f, int t, int d) {
    return ((size_t)d * f->queries + t) * BF16_STEP_PAIRS;
}

static size_t attention_bf16_over_keys_(const AttentionBf16Factors_* f, int t, int d) {
    return ((size_t)d * f->keys + t) * BF16_STEP_PAIRS;
}

// Head h of sequence b, and the working memory of its thread.
typedef struct {
    const AttentionBf16Pass_* pass;
    const Bf16Kernel* kernel;
    AttentionBf16Scratch_ s;
    AttentionBf16Factors_ f;
    int b, h, T, Q, HS;
    int q, k, v; // first columns in qkv
    // the first of its group; of a whole sequence, where that one sets dk and dv and the others add
    int is_first, is_whole;
    const int* starts; // of the sequence, or NULL
    float *out, *lse;
    const float* dout;
    AttentionScale scale;
    float c; // as above
} AttentionBf16Head_;

static AttentionBf16Head_ attention_bf16_head_(const AttentionBf16Pass_* pass, int index,
                                               const AttentionBf16Scratch* scratch) {
    const AttentionSizes sizes = pass->sizes;
    const int T = sizes.T, HS = sizes.HS, Q = attention_queries_size(sizes), b = index / sizes.NH,
              h = index % sizes.NH, group = attention_group(sizes), k = Q + h / group * HS;
    const size_t first = (size_t)b * T, at = first * Q + (size_t)h * HS;
    const AttentionScale scale = attention_scale(sizes.root, sizes.cap);
    const AttentionBf16Scratch_* s = &scratch->of_thread[thread_index()];
    const int* starts = pass->fp32->starts;
    const AttentionBf16Head_ head = {.pass = pass,
                                     .kernel = &scratch->kernel,
                                     .s = *s,
                                     .f = pass->packed ? attention_bf16_packed_(pass->packed, sizes, b, h)
                                                       : attention_bf16_factors_(s->queries, s->keys, sizes),
                                     .b = b,
                                     .h = h,
                                     .T = T,
                                     .Q = Q,
                                     .HS = HS,
                                     .q = h * HS,
                                     .k = k,
                                     .v = k + attention_keys_size(sizes),
                                     .is_first = h % group == 0,
                                     .is_whole = sizes.chunks.last == 0,
                                     .starts = starts ? starts + (size_t)b * attention_keys(sizes) : NULL,
                                     .out = pass->fp32->out + at,
                                     .lse = pass->fp32->lse + (size_t)index * T,
                                     .dout = pass->d ? pass->d->dout + at : NULL,
                                     .scale = scale,
                                     .c = scale.factor * LOG2_E};
    return head;
}

// Packs the factors of a head in fp32; only those that this pass needs. The backward pass packs the
// keys of a group once.
static void attention_bf16_pack_head_(const AttentionBf16Head_* head) {
    const AttentionBf16Factors_* f = &head->f;
    const AttentionBf16Pass_* pass = head->pass;
    const Bf16Pack pack = head->kernel->pack;
    const int T = head->T, W = attention_keys(pass->sizes), HS = head->HS, is_backward = head->dout != NULL;
    const size_t stride = (size_t)attention_qkv_size(pass->sizes),
                 key_stride = attention_pass_key_stride(pass->fp32),
                 over_dims = attention_bf16_over_dims_(f, 1, 0),
                 over_queries = attention_bf16_over_queries_(f, 0, 1),
                 over_keys = attention_bf16_over_keys_(f, 0, 1);
    const float *q = pass->fp32->qkv + (size_t)head->b * T * stride + head->q,
                *k = attention_pass_keys(pass->fp32) + (size_t)head->b * W * key_stride + head->k - head->Q,
                *v = k + attention_keys_size(pass->sizes);
    const Matrix queries = {q, stride, 1}, queries_across = {q, 1, stride}, keys = {k, key_stride, 1},
                 keys_across = {k, 1, key_stride}, values = {v, key_stride, 1},
                 values_across = {v, 1, key_stride};
    bf16_pack_left(pack, f->q_by_query, over_dims, queries, T, HS);
    if (is_backward) {
        bf16_pack_left(pack, f->q_by_dim, over_queries, queries_across, HS, T);
    } else {
        bf16_pack_right(pack, f->v_by_dim, over_keys, values, W, HS);
    }
    if (!is_backward || head->is_first) {
        bf16_pack_right(pack, f->k_by_key, over_dims, keys_across, HS, W);
    }
    if (is_backward && head->is_first) {
        bf16_pack_right(pack, f->k_by_dim, over_keys, keys, W, HS);
        bf16_pack_right(pack, f->v_by_key, over_dims, values_across, HS, W);
    }
}

// Returns the first key, the first of a tile, for which anything is computed for the queries from
// t0 on.
static int attention_bf16_from_(const int* starts, int t0) {
    return attention_start_(starts, t0) / BF16_TILE * BF16_TILE;
}

// Tile of queries t0 ... t0+rows-1 and keys from u0 on. Rows past these queries are zero, as are
// their factors.
typedef struct {
    const AttentionBf16Head_* head;
    int t0, rows, u0;
    float *p, *ds;              // scores, then e or p; dout . v, then ds
    const float *shift, *delta; // values of the queries
    uint32_t *p_by_key, *ds_by_key, *by_query;
} AttentionBf16Tile_;

// Returns s of one product q . k.
static float attention_bf16_score_(const AttentionBf16Head_* head, float product) {
    return head->scale.width > 0 ? tanhf(product / head->scale.width) : product;
}

// Turns row i of a tile of products q . k into s, if there is a cap.
ALWAYS_INLINE void attention_bf16_cap_row_(const AttentionBf16Tile_* tile, int i) {
    const float width = tile->head->scale.width;
    for (float* s = tile->p + i * BF16_TILE; width > 0 && s < tile->p + (i + 1) * BF16_TILE; s += LANES) {
        vec_store(s, softcap_tanh_vec(vec_load(s), width));
    }
}

// Turns row i of s into e, zero for keys that the query does not see. Returns its sum by lanes.
ALWAYS_INLINE Vec attention_bf16_exp_row_(const AttentionBf16Tile_* tile, int i) {
    float* row = tile->p + i * BF16_TILE;
    const int t = tile->t0 + i, start = attention_start_(tile->head->starts, t);
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

// Sets square (32, 32) = left . right over the dimensions, while `finish` processes `before`.
static void attention_bf16_scores_(const AttentionBf16Head_* head, float* square, const uint32_t* left,
                                   const uint32_t* right, Bf16Finish finish,
                                   const AttentionBf16Tile_* before) {
    const Bf16Ahead ahead = {NULL, 0, int_ceil_div(BF16_TILE, head->f.dims), NULL, 0, finish, before};
    head->kernel->product(square, BF16_TILE, NULL, 0, left, right, head->f.dims, &ahead);
}

// Bf16Finish that computes e, adds it to the sums, and packs it.
static void attention_bf16_forward_finish_(const void* of, int begin, int end) {
    const AttentionBf16Tile_* tile = (const AttentionBf16Tile_*)of;
    float* sums = tile->head->s.sums;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        attention_bf16_cap_row_(tile, i);
        vec_store(sums + i * LANES, vec_load(sums + i * LANES) + attention_bf16_exp_row_(tile, i));
    }
    if (end == BF16_TILE) {
        const Bf16TilePacked to = {tile->by_query, NULL, NULL, NULL};
        tile->head->kernel->pack_tile(&to, tile->p);
    }
}

// Bf16Finish that finds the largest products, lane by lane, and stores them in place of the sums.
static void attention_bf16_max_finish_(const void* of, int begin, int end) {
    const AttentionBf16Tile_* tile = (const AttentionBf16Tile_*)of;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        const int t = tile->t0 + i, start = attention_start_(tile->head->starts, t);
        float* sums = tile->head->s.sums + i * LANES;
        Vec max = vec_load(sums);
        for (int j = 0; j < BF16_TILE; j += LANES) {
            const Vec score = vec_load(tile->p + i * BF16_TILE + j);
            max = vec_max(attention_seen_(score, max, tile->u0 + j, start, t + 1), max);
        }
        vec_store(sums, max);
    }
}

// Computes the scores of a tile of queries and the keys from u on. Meanwhile, `finish` processes
// `before`, which is in the same memory: kernels store after that.
static AttentionBf16Tile_ attention_bf16_next_(const AttentionBf16Head_* head, AttentionQueries_ q, int u,
                                               int from, const float* shift, Bf16Finish finish,
                                               const AttentionBf16Tile_* before) {
    const AttentionBf16Scratch_* s = &head->s;
    uint32_t* by_query = s->row + (size_t)((u - from) / BF16_TILE) * BF16_STEP_PAIRS;
    attention_bf16_scores_(
        head, s->p, head->f.q_by_query + attention_bf16_over_dims_(&head->f, q.row / BF16_TILE, 0),
        head->f.k_by_key + attention_bf16_over_dims_(&head->f, u / BF16_TILE, 0), finish, before);
    return (AttentionBf16Tile_){head, q.t0, q.count, u, s->p, NULL, shift, NULL, NULL, NULL, by_query};
}

// Passes the scores of a tile of queries to `finish`, one tile of keys after the other, the
// queries' own keys first. If `sets_shift`, sets `shift` to the score of each query with itself.
static void attention_bf16_keys_(const AttentionBf16Head_* head, AttentionQueries_ q, int from, float* shift,
                                 int sets_shift, float initial, Bf16Finish finish) {
    AttentionBf16Tile_ before = attention_bf16_next_(head, q, q.t0, from, shift, NULL, NULL);
    for (int i = 0; i < q.count && sets_shift; i++) {
        shift[i] = attention_bf16_score_(head, before.p[i * BF16_TILE + i]) * head->c;
    }
    for (int i = 0; i < q.count * LANES; i++) {
        head->s.sums[i] = initial;
    }
    for (int u = from; u < q.t0; u += BF16_TILE) {
        before = attention_bf16_next_(head, q, u, from, shift, finish, &before);
    }
    finish(&before, 0, BF16_TILE);
}

// Sets the sums of e, and packs it, with the shifts as above.
static void attention_bf16_exponentials_(const AttentionBf16Head_* head, AttentionQueries_ q, int from,
                                         float* shift, float* sum) {
    const float most = 1e30f;
    int is_small = 1;
    attention_bf16_keys_(head, q, from, shift, 1, 0, attention_bf16_forward_finish_);
    for (int i = 0; i < q.count; i++) {
        sum[i] = vec_hsum(vec_load(head->s.sums + i * LANES));
        is_small &= sum[i] < most;
    }
    if (is_small) {
        return;
    }
    attention_bf16_keys_(head, q, from, shift, 0, -INFINITY, attention_bf16_max_finish_);
    // the other rows keep theirs: their bits do not depend on later tokens
    for (int i = 0; i < q.count; i++) {
        const float max = vec_hmax(vec_load(head->s.sums + i * LANES));
        shift[i] = sum[i] < most ? shift[i] : attention_bf16_score_(head, max) * head->c;
    }
    attention_bf16_keys_(head, q, from, shift, 0, 0, attention_bf16_forward_finish_);
    for (int i = 0; i < q.count; i++) {
        sum[i] = vec_hsum(vec_load(head->s.sums + i * LANES));
    }
}

// Sets out of a tile of queries, dimensions from d on: a tile of sums divided by the sums of e.
static void attention_bf16_divide_(const AttentionBf16Head_* head, const float* square, AttentionQueries_ q,
                                   int d, const float* sum) {
    const int cols = int_min(BF16_TILE, head->HS - d);
    for (int i = 0; i < q.count; i++) {
        const float* from = square + i * BF16_TILE;
        float* out = head->out + (size_t)(q.row + i) * head->Q + d;
        const float inverse = 1.0f / sum[i];
        for (int j = 0; j < cols; j++) {
            out[j] = from[j] * inverse;
        }
    }
}

// Sets out and lse of a tile of queries.
static void attention_bf16_forward_tile_(const AttentionBf16Head_* head, AttentionQueries_ q) {
    const int from = attention_bf16_from_(head->starts, q.t0);
    float shift[BF16_TILE] = {0}, sum[BF16_TILE]; // all are set, which gcc does not see
    attention_bf16_exponentials_(head, q, from, shift, sum);
    for (int i = 0; i < q.count; i++) {
        head->lse[q.row + i] = shift[i] / LOG2_E + logf(sum[i]);
    }
    for (int d = 0; d < head->f.dims; d++) {
        const uint32_t* v = head->f.v_by_dim + attention_bf16_over_keys_(&head->f, from / BF16_TILE, d);
        float* square = head->s.dq + d * ATTENTION_BF16_SQUARE_;
        head->kernel->product(square, BF16_TILE, NULL, 0, head->s.row, v, bf16_steps(q.t0 + q.count - from),
                              &bf16_nothing_ahead);
        attention_bf16_divide_(head, square, q, d * BF16_TILE, sum);
    }
}

// Returns the largest score of a tile of queries, without padding. Shifts need no maximum, so this
// computes the scores once more.
static float attention_bf16_largest_(const AttentionBf16Head_* head, AttentionQueries_ q) {
    const AttentionBf16Pass_* pass = head->pass;
    const int from = attention_bf16_from_(head->starts, q.t0),
              real = attention_real_rows_(pass->fp32, head->b * pass->sizes.NH, q.t0, q.count);
    float largest = -INFINITY;
    attention_bf16_keys_(head, q, from, NULL, 0, -INFINITY, attention_bf16_max_finish_);
    for (int i = 0; i < real; i++) {
        largest = fmaxf(largest, vec_hmax(vec_load(head->s.sums + i * LANES)));
    }
    return largest * head->scale.factor;
}

// Computes all tiles of one head.
static void attention_bf16_forward_head_(const AttentionBf16Head_* head) {
    const AttentionPass* pass = head->pass->fp32;
    AttentionQueries_ tile;
    float largest = -INFINITY;
    for (int row = 0; row < head->T; row += tile.count) {
        tile = attention_queries_(head->pass->sizes, row, BF16_TILE);
        largest = pass->largest ? fmaxf(largest, attention_bf16_largest_(head, tile)) : largest;
        attention_bf16_forward_tile_(head, tile);
    }
    if (pass->largest) {
        attention_raise_largest(pass, head->b * pass->sizes.NH + head->h, largest);
    }
}

// Runs a pass over all heads, which are packed, if they are not yet. One thread computes `group`
// heads, one after the other.
static void attention_bf16_each_head_(const AttentionBf16Pass_* pass, AttentionBf16Scratch* scratch,
                                      int group, void (*compute)(const AttentionBf16Head_* head)) {
    const AttentionSizes sizes = pass->sizes;
    assert(attention_keys(sizes) <= scratch->T && sizes.HS == scratch->HS && sizes.NH % sizes.KV == 0);
    // whole tiles of chunks: queries and keys have the same
    assert(sizes.chunks.last == 0 || sizes.T % (2 * BF16_TILE) == 0);
#pragma omp parallel
    {
        scratch->kernel.begin();
#pragma omp for schedule(dynamic)
        for (int first = 0; first < sizes.B * sizes.NH; first += group) {
            for (int h = first; h < first + group; h++) {
                const AttentionBf16Head_ head = attention_bf16_head_(pass, h, scratch);
                if (!pass->packed) {
                    attention_bf16_pack_head_(&head);
                }
                compute(&head);
            }
        }
        scratch->kernel.end();
    }
}

void attention_bf16_forward_cpu(const AttentionPass* pass, AttentionBf16Scratch* scratch) {
    const AttentionBf16Pass_ all = {.sizes = pass->sizes, .fp32 = pass};
    assert(pass->kv || pass->sizes.chunks.last == 0);
    attention_bf16_each_head_(&all, scratch, 1, attention_bf16_forward_head_);
}

// A block of queries.
typedef struct {
    AttentionQueries_ q;
    float shift[ATTENTION_BF16_ROWS], delta[ATTENTION_BF16_ROWS];
} AttentionBf16Block_;

// Turns row i of dp into (dp - delta) (1 - s^2), if there is a cap.
ALWAYS_INLINE void attention_bf16_slope_row_(const AttentionBf16Tile_* tile, int i) {
    const float* s = tile->p + i * BF16_TILE;
    float* ds = tile->ds + i * BF16_TILE;
    const Vec delta = vec_all(tile->delta[i]);
    for (int j = 0; j < BF16_TILE && tile->head->scale.width > 0; j += LANES) {
        vec_store(ds + j, (vec_load(ds + j) - delta) * softcap_slope_vec(vec_load(s + j)));
    }
}

// Bf16Finish that turns products q . k into p; with a cap also dp, which is complete, as above.
static void attention_bf16_p_finish_(const void* of, int begin, int end) {
    const AttentionBf16Tile_* tile = (const AttentionBf16Tile_*)of;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        attention_bf16_cap_row_(tile, i);
        attention_bf16_slope_row_(tile, i);
        attention_bf16_exp_row_(tile, i);
    }
}

// Bf16Finish that computes ds from p and dp, and packs p and ds.
static void attention_bf16_ds_finish_(const void* of, int begin, int end) {
    const AttentionBf16Tile_* tile = (const AttentionBf16Tile_*)of;
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        const float* p = tile->p + i * BF16_TILE;
        float* ds = tile->ds + i * BF16_TILE;
        const Vec delta = vec_all(tile->head->scale.width > 0 ? 0 : tile->delta[i]);
        for (int j = 0; j < BF16_TILE; j += LANES) {
            vec_store(ds + j, vec_load(p + j) * (vec_load(ds + j) - delta));
        }
    }
    if (end == BF16_TILE) {
        const Bf16TilePacked p = {NULL, NULL, tile->p_by_key, NULL},
                             ds = {tile->by_query, NULL, tile->ds_by_key, NULL};
        tile->head->kernel->pack_tile(&p, tile->p);
        tile->head->kernel->pack_tile(&ds, tile->ds);
    }
}

// Returns tile i of a block of queries, by tile j of a chunk of keys that starts at u0.
static AttentionBf16Tile_ attention_bf16_tile_(const AttentionBf16Head_* head,
                                               const AttentionBf16Block_* block, int i, int u0, int j,
                                               int n) {
    enum { TILES = ATTENTION_BF16_TILES, STEP = BF16_STEP_PAIRS };
    const AttentionBf16Scratch_* s = &head->s;
    const int row = i * BF16_TILE;
    return (AttentionBf16Tile_){head,
                                block->q.t0 + row,
                                int_min(BF16_TILE, block->q.count - row),
                                u0 + j * BF16_TILE,
                                s->p + n % 2 * ATTENTION_BF16_SQUARE_,
                                s->ds + n % 2 * ATTENTION_BF16_SQUARE_,
                                block->shift + row,
                                block->delta + row,
                                s->p_by_key + (size_t)(j * TILES + i) * STEP,
                                s->ds_by_key + (size_t)(j * TILES + i) * STEP,
                                s->ds_by_query + (size_t)(i * TILES + j) * STEP};
}

// Return the first tile of keys that a block sees in the chunk from u0 on, and the end of those
// that its tile i sees.
static int attention_bf16_first_(const AttentionBf16Head_* head, const AttentionBf16Block_* block, int u0) {
    return int_max(0, attention_bf16_from_(head->starts, block->q.t0) - u0) / BF16_TILE;
}

static int attention_bf16_end_(const AttentionBf16Block_* block, int i, int u0) {
    return int_min(ATTENTION_BF16_TILES, (block->q.t0 - u0) / BF16_TILE + i + 1);
}

// Sets p and ds of a block and a chunk of keys, packed.
static void attention_bf16_probabilities_(const AttentionBf16Head_* head, const AttentionBf16Block_* block,
                                          int u0) {
    const AttentionBf16Factors_* f = &head->f;
    AttentionBf16Tile_ before;
    int n = 0;
    for (int i = 0; i < bf16_steps(block->q.count); i++) {
        for (int j = attention_bf16_first_(head, block, u0); j < attention_bf16_end_(block, i, u0);
             j++, n++) {
            const AttentionBf16Tile_ tile = attention_bf16_tile_(head, block, i, u0, j, n);
            const size_t query = attention_bf16_over_dims_(f, block->q.row / BF16_TILE + i, 0),
                         key = attention_bf16_over_dims_(f, u0 / BF16_TILE + j, 0);
            attention_bf16_scores_(head, tile.p, f->q_by_query + query, f->k_by_key + key,
                                   n > 0 ? attention_bf16_p_finish_ : NULL, &before);
            attention_bf16_scores_(head, tile.ds, head->s.dout + attention_bf16_over_dims_(f, i, 0),
                                   f->v_by_key + key, n > 0 ? attention_bf16_ds_finish_ : NULL, &before);
            before = tile;
        }
    }
    attention_bf16_p_finish_(&before, 0, BF16_TILE);
    attention_bf16_ds_finish_(&before, 0, BF16_TILE);
}

// Sets or adds to a square left . right over `steps` steps.
static void attention_bf16_add_(const AttentionBf16Head_* head, float* square, int is_added,
                                const uint32_t* left, const uint32_t* right, int steps) {
    head->kernel->product(square, BF16_TILE, is_added ? square : NULL, BF16_TILE, left, right, steps,
                          &bf16_nothing_ahead);
}

// Adds a chunk's part to dq, and the block's part to dk and dv. The first chunk sets dq; of a whole
// sequence, in the first head of a group, the block that owns the keys sets dk and dv. So blocks
// follow each other in a fixed order. Queries see no tiles of keys after their own.
static void attention_bf16_chunk_(const AttentionBf16Head_* head, const AttentionBf16Block_* block, int u0,
                                  int is_first) {
    enum { TILES = ATTENTION_BF16_TILES, STEP = BF16_STEP_PAIRS, SQUARE = ATTENTION_BF16_SQUARE_ };
    const AttentionBf16Scratch_* s = &head->s;
    const AttentionBf16Factors_* f = &head->f;
    const int first = attention_bf16_first_(head, block, u0), tiles = bf16_steps(block->q.count);
    const int own = (block->q.t0 - u0) / BF16_TILE, // tile of keys where the queries start
        is_added = own > 0 || !head->is_first || !head->is_whole,
              end = attention_bf16_end_(block, tiles - 1, u0);
    attention_bf16_probabilities_(head, block, u0);
    for (int d = 0; d < f->dims; d++) {
        const uint32_t* k = f->k_by_dim + attention_bf16_over_keys_(f, u0 / BF16_TILE + first, d);
        for (int i = 0; i < tiles; i++) {
            attention_bf16_add_(head, s->dq + (i * f->dims + d) * SQUARE, !is_first,
                                s->ds_by_query + (size_t)(i * TILES + first) * STEP, k,
                                attention_bf16_end_(block, i, u0) - first);
        }
        for (int j = first; j < end; j++) {
            const int i = int_max(0, j - own); // first tile of queries that sees the keys
            const size_t square = (size_t)((u0 / BF16_TILE + j) * f->dims + d) * SQUARE,
                         right = (size_t)(j * TILES + i) * STEP;
            attention_bf16_add_(head, s->dk + square, is_added,
                                f->q_by_dim +
                                    attention_bf16_over_queries_(f, block->q.row / BF16_TILE + i, d),
                                s->ds_by_key + right, tiles - i);
            attention_bf16_add_(head, s->dv + square, is_added,
                                s->dout_by_dim + (size_t)(d * TILES + i) * STEP, s->p_by_key + right,
                                tiles - i);
        }
    }
}

// Packs dout of a block of queries, over dimensions and over queries.
static void attention_bf16_pack_dout_(const AttentionBf16Head_* head, AttentionQueries_ q) {
    const size_t Q = (size_t)head->Q;
    const float* dout = head->dout + q.row * Q;
    const Matrix by_query = {dout, Q, 1}, by_dim = {dout, 1, Q};
    bf16_pack_left(head->kernel->pack, head->s.dout, attention_bf16_over_dims_(&head->f, 1, 0), by_query,
                   q.count, head->HS);
    bf16_pack_left(head->kernel->pack, head->s.dout_by_dim, (size_t)ATTENTION_BF16_TILES * BF16_STEP_PAIRS,
                   by_dim, head->HS, q.count);
}

// A square of dqkv: tile t of the tokens, columns of the tile of dimensions that starts at col, d
// dimensions after the start of its head. `across`: dimensions by tokens, the form of dk and dv.
typedef struct {
    int t, col, d, across;
    float scale; // factor still to be applied
} AttentionBf16Square_;

// Sets to (32, 32), rows `stride` apart, to the square or its transpose.
static void attention_bf16_copy_(float* to, size_t stride, const float* square, int across) {
    for (int i = 0; i < BF16_TILE; i += LANES) {
        for (int j = 0; j < BF16_TILE; j += LANES) {
            Vec row[LANES];
            for (int r = 0; r < LANES; r++) {
                row[r] = vec_load(square + (i + r) * BF16_TILE + j);
            }
            if (across) {
                vec_transpose(row);
            }
            for (int r = 0; r < LANES; r++) {
                vec_store(to + (across ? (j + r) * stride + i : (i + r) * stride + j), row[r]);
            }
        }
    }
}

// Sets the square's part of dqkv in fp32.
static void attention_bf16_set_rows_(const AttentionBf16Head_* head, const float* square,
                                     AttentionBf16Square_ of) {
    const AttentionBf16Pass_* pass = head->pass;
    const int is_key = of.across, T = is_key ? attention_keys(pass->sizes) : head->T, t = of.t * BF16_TILE,
              rows = int_min(BF16_TILE, T - t), cols = int_min(BF16_TILE, head->HS - of.d);
    const size_t stride =
                     is_key ? attention_pass_key_stride(pass->fp32) : (size_t)attention_qkv_size(pass->sizes),
                 token = (size_t)head->b * T + t;
    float* to = (is_key ? attention_pass_dkeys(pass->fp32, pass->d) - head->Q : pass->d->dqkv) +
                token * stride + of.col;
    if (rows == BF16_TILE && cols == BF16_TILE) {
        attention_bf16_copy_(to, stride, square, of.across);
    } else {
        float tile[ATTENTION_BF16_SQUARE_];
        attention_bf16_copy_(tile, BF16_TILE, square, of.across);
        bf16_copy_rows(to, stride, tile, BF16_TILE, rows, cols);
    }
}

// Sets the square's part of dqkv packed, by tokens and by channels.
static void attention_bf16_set_packed_(const AttentionBf16Head_* head, const float* square,
                                       AttentionBf16Square_ of) {
    const int tokens = head->pass->sizes.B * head->T, channels = attention_qkv_size(head->pass->sizes);
    const int row = head->b * head->T / BF16_TILE + of.t, col = of.col / BF16_TILE;
    uint32_t *by_token = head->pass->packed_gradient.packed + row * matmul_bf16_pairs(1, channels) +
                         (size_t)col * BF16_STEP_PAIRS,
             *by_channel = head->pass->packed_gradient.packed + matmul_bf16_pairs(tokens, channels) +
                           col * matmul_bf16_pairs(1, tokens) + (size_t)row * BF16_STEP_PAIRS;
    const Bf16TilePacked to = {of.across ? by_channel : by_token, of.across ? by_token : by_channel, NULL,
                               NULL};
    head->kernel->pack_tile(&to, square);
}

// Turns a square of dq or dk back, in place.
static void attention_bf16_turn_back_(const AttentionBf16Head_* head, float* square,
                                      AttentionBf16Square_ of) {
    for (int i = 0; i < BF16_TILE; i++) {
        const float* angles = rope_at(head->pass->packed_gradient.rope, of.t * BF16_TILE + i) + of.d;
        if (!of.across) {
            rope_turn_back(square + i * BF16_TILE, angles, BF16_TILE);
            continue;
        }
        for (int d = 0; d < BF16_TILE; d += 2) { // pairs are in two rows, tokens in columns
            float *e = square + d * BF16_TILE + i, *o = e + BF16_TILE;
            float pair[2] = {*e, *o};
            rope_turn_back(pair, angles + d, 2);
            *e = pair[0];
            *o = pair[1];
        }
    }
}

// Sets the square's part of dqkv; scales the square, and turns it back, in place.
static void attention_bf16_set_(const AttentionBf16Head_* head, float* square, AttentionBf16Square_ of) {
    for (int i = 0; i < ATTENTION_BF16_SQUARE_; i += LANES) {
        vec_store(square + i, vec_load(square + i) * of.scale);
    }
    if (head->pass->packed_gradient.rope.table && of.col < attention_query_key_size(head->pass->sizes)) {
        attention_bf16_turn_back_(head, square, of);
    }
    if (head->pass->packed_gradient.packed) {
        attention_bf16_set_packed_(head, square, of);
    } else {
        attention_bf16_set_rows_(head, square, of);
    }
}

// Returns the sums of dqkv over the tokens of a sequence, from column `col` on.
static float* attention_bf16_sums_(const AttentionBf16Head_* head, int col) {
    return head->pass->packed_gradient.sums + (size_t)head->b * attention_qkv_size(head->pass->sizes) + col;
}

// Sets dq of tile t of the tokens. Tile 0 sets its sums, the others add to them.
static void attention_bf16_set_queries_(const AttentionBf16Head_* head, float* squares, int t) {
    for (int d = 0; d < head->f.dims; d++) {
        float* square = squares + d * ATTENTION_BF16_SQUARE_;
        const AttentionBf16Square_ of = {t, head->q + d * BF16_TILE, d * BF16_TILE, 0, head->scale.scale};
        attention_bf16_set_(head, square, of);
        for (int j = 0; j < BF16_TILE && head->pass->packed_gradient.packed; j += LANES) {
            float* sums = attention_bf16_sums_(head, of.col + j);
            Vec sum = t == 0 ? vec_all(0.0f) : vec_load(sums);
            for (int i = 0; i < BF16_TILE; i++) {
                sum += vec_load(square + i * BF16_TILE + j);
            }
            vec_store(sums, sum);
        }
    }
}

// Sets dk or dv of all keys, columns from `col` on, from squares in scratch, dimensions by keys.
static void attention_bf16_set_keys_(const AttentionBf16Head_* head, int col, float* squares, float scale) {
    for (int d = 0; d < head->f.dims; d++) {
        Vec sums[BF16_TILE];
        memset(sums, 0, sizeof(sums));
        for (int t = 0; t < head->f.keys; t++) {
            float* square = squares + (size_t)(t * head->f.dims + d) * ATTENTION_BF16_SQUARE_;
            const AttentionBf16Square_ of = {t, col + d * BF16_TILE, d * BF16_TILE, 1, scale};
            attention_bf16_set_(head, square, of);
            for (int i = 0; i < BF16_TILE; i++) {
                for (int j = 0; j < BF16_TILE; j += LANES) {
                    sums[i] += vec_load(square + i * BF16_TILE + j);
                }
            }
        }
        for (int i = 0; i < BF16_TILE && head->pass->packed_gradient.packed; i++) {
            attention_bf16_sums_(head, col + d * BF16_TILE)[i] = vec_hsum(sums[i]);
        }
    }
}

// Processes a block of queries: sets dq, and adds their part of dk and dv.
static void attention_bf16_backward_block_(const AttentionBf16Head_* head, AttentionQueries_ q) {
    const int from = attention_bf16_from_(head->starts, q.t0) / ATTENTION_BF16_ROWS * ATTENTION_BF16_ROWS;
    AttentionBf16Block_ block = {q, {0}, {0}};
    for (int i = 0; i < q.count; i++) {
        const size_t row = (size_t)(q.row + i) * head->Q;
        block.shift[i] = head->lse[q.row + i] * LOG2_E;
        block.delta[i] = vec_dot(head->out + row, head->dout + row, head->HS);
    }
    attention_bf16_pack_dout_(head, q);
    for (int u = from; u < q.t0 + q.count; u += ATTENTION_BF16_ROWS) {
        attention_bf16_chunk_(head, &block, u, u == from);
    }
    for (int i = 0; i < bf16_steps(q.count); i++) {
        attention_bf16_set_queries_(head, head->s.dq + i * head->f.dims * ATTENTION_BF16_SQUARE_,
                                    q.row / BF16_TILE + i);
    }
}

// Clears the sums of dk and dv: not every key has a query among the rank's.
static void attention_bf16_clear_keys_(const AttentionBf16Head_* head) {
    const size_t squares = (size_t)head->f.keys * head->f.dims * ATTENTION_BF16_SQUARE_;
    memset(head->s.dk, 0, squares * sizeof(float));
    memset(head->s.dv, 0, squares * sizeof(float));
}

static void attention_bf16_backward_head_(const AttentionBf16Head_* head) {
    if (head->is_first && !head->is_whole) {
        attention_bf16_clear_keys_(head);
    }
    AttentionQueries_ block;
    for (int row = 0; row < head->T; row += block.count) {
        block = attention_queries_(head->pass->sizes, row, ATTENTION_BF16_ROWS);
        attention_bf16_backward_block_(head, block);
    }
    // all heads of the group have added
    if ((head->h + 1) % attention_group(head->pass->sizes) == 0) {
        attention_bf16_set_keys_(head, head->k, head->s.dk, head->scale.scale);
        attention_bf16_set_keys_(head, head->v, head->s.dv, 1.0f);
    }
}

void attention_bf16_backward_cpu(const AttentionGradients* d, const AttentionPass* pass,
                                 AttentionBf16Scratch* scratch) {
    const AttentionBf16Pass_ all = {.sizes = pass->sizes, .fp32 = pass, .d = d};
    assert(pass->kv || pass->sizes.chunks.last == 0);
    attention_bf16_each_head_(&all, scratch, attention_group(pass->sizes), attention_bf16_backward_head_);
}

void attention_bf16_pack_qkv(const Bf16Kernel* kernel, uint32_t* qkv, const float* tile, int row, int col,
                             AttentionSizes sizes) {
    const int T = sizes.T, HS = sizes.HS, heads = col / HS; // heads of q, k and v before this one
    const int is_query = heads < sizes.NH, is_key = heads < sizes.NH + sizes.KV,
              h = is_query ? heads : (heads - sizes.NH) % sizes.KV * attention_group(sizes);
    const AttentionBf16Factors_ f = attention_bf16_packed_(qkv, sizes, row / T, h);
    const size_t over_dims = attention_bf16_over_dims_(&f, row % T / BF16_TILE, col % HS / BF16_TILE),
                 over_tokens = attention_bf16_over_keys_(&f, row % T / BF16_TILE, col % HS / BF16_TILE);
    const Bf16TilePacked q = {f.q_by_query + over_dims, f.q_by_dim + over_tokens, NULL, NULL},
                         k = {NULL, NULL, f.k_by_dim + over_tokens, f.k_by_key + over_dims},
                         v = {NULL, NULL, f.v_by_dim + over_tokens, f.v_by_key + over_dims};
    kernel->pack_tile(is_query ? &q : is_key ? &k : &v, tile);
}

void attention_bf16_packed_forward_cpu(const uint32_t* qkv, const AttentionPass* pass,
                                       AttentionBf16Scratch* scratch) {
    const AttentionBf16Pass_ all = {.sizes = pass->sizes, .fp32 = pass, .packed = qkv};
    attention_bf16_each_head_(&all, scratch, 1, attention_bf16_forward_head_);
}

void attention_bf16_packed_backward_cpu(AttentionBf16Gradient dqkv, const float* dout, const uint32_t* qkv,
                                        const AttentionPass* pass, AttentionBf16Scratch* scratch) {
    const AttentionGradients d = {dout, NULL, NULL};
    const AttentionBf16Pass_ all = {pass->sizes, pass, &d, qkv, dqkv};
    attention_bf16_each_head_(&all, scratch, attention_group(pass->sizes), attention_bf16_backward_head_);
}

#endif // ATTENTION_BF16_IMPLEMENTATION

#endif
