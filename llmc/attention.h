/*
attention.h -- causal multi-head self-attention: the contract, and the CPU version.

    q, k, v  = the three parts of a token's row of qkv, head h at columns h*HS ... of each
    s[t][u]  = q[t] . k[u] / sqrt(HS)           starts[t] <= u <= t
    p[t]     = softmax(s[t])                    lse[t] = log sum_u exp(s[t][u])
    out[t]   = sum_u p[t][u] v[u]

    dp[t][u] = dout[t] . v[u]                   delta[t] = dout[t] . out[t]
    ds       = p (dp - delta) / sqrt(HS)
    dq[t]    = sum_u ds[t][u] k[u]     dk[u] = sum_t ds[t][u] q[t]     dv[u] = sum_t p[t][u] dout[t]

    qkv, dqkv     (B, T, 3, NH, HS)   packed as the linear layer writes it; C = NH*HS
    out, dout     (B, T, C)
    starts        (B, T)              int32, place in the row where the document of token t starts: never
                                      above t, never falling along a row. A token sees its own document only.
                                      NULL: the row is one document
    lse           (B, NH, T)          fp32, kept for the backward pass

Both passes set their outputs.

As in flash attention (Dao et al., 2022), probabilities exist only for ATTENTION_ROWS queries of one head at a
time and are computed again, from lse, in the backward pass. Earlier documents than those of the first of
these queries are skipped. A thread takes a whole head; all products are tiles of matmul.h.

Generation keeps the keys and values of each text, and then computes one token of each at a time:

    cache         (B, 2, NH, maxT, HS)   keys, then values, of B texts of up to maxT tokens

attention_cache_store sets those of some tokens of one text from rows of qkv; attention_cached sets out (R, C) for
the queries in qkv (R, 3, NH, HS), row r being token positions[r] of text r, whose keys and values are stored.

defines: AttentionSizes, AttentionScratch, attention_open, attention_close, attention_forward_cpu,
         attention_backward_cpu, attention_flops, attention_backward_flops,
         attention_forward_bytes, attention_backward_bytes, AttentionCache, attention_cache_store_cpu, attention_cached_cpu,
         attention_scratch_bytes
*/
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

#include <assert.h>
#include <math.h>

#include "llmc/base/check.h"
#include "llmc/base/int.h"
#include "llmc/base/vec.h"
#include "llmc/gradient.h"
#include "llmc/matmul.h"

#define ATTENTION_TILES 4
#define ATTENTION_ROWS (ATTENTION_TILES * MATMUL_TILE_ROWS) // queries at a time
#define ATTENTION_KEYS 768                    // rows of probabilities are in blocks of so many keys
#define ATTENTION_SKIP (3 * MATMUL_TILE_COLS) // keys of other documents are skipped in such steps
static_assert(ATTENTION_SKIP % MATMUL_TILE_ROWS == 0 && ATTENTION_KEYS % ATTENTION_SKIP == 0,
              "whole tiles are skipped");

typedef struct {
    int B, T;  // sequences, and their tokens
    int C, NH; // channels, in heads of HS = C/NH
} AttentionSizes;

// One thread's working memory. Tp is T rounded up to ATTENTION_KEYS, HSp is HS rounded up to MATMUL_TILE_COLS.
typedef struct {
    float *k_by_key,
        *v_by_key; // (Tp / MATMUL_TILE_COLS, HS, MATMUL_TILE_COLS)   right matrices of q k^T and dout v^T
    float *k_by_dim,
        *v_by_dim; // (HSp / MATMUL_TILE_COLS, Tp, MATMUL_TILE_COLS)  right matrices of ds k and p v
    float *q_block, *dout_block; // (HSp / MATMUL_TILE_COLS, ATTENTION_ROWS, MATMUL_TILE_COLS)
    float *p,
        *ds; // (ATTENTION_TILES, Tp / ATTENTION_KEYS, MATMUL_TILE_ROWS, ATTENTION_KEYS): left matrices, packed as they arise
    float* left; // (ATTENTION_ROWS, MATMUL_TILE_ROWS)
} AttentionScratch_;

typedef struct {
    AttentionScratch_* of_thread;
    float* memory;
    int T, HS;
} AttentionScratch;

enum { ATTENTION_PARTS_ = 9 }; // of AttentionScratch_

// Sets the floats of each part, in its order; returns those of all.
static inline size_t attention_parts_(size_t sizes[ATTENTION_PARTS_], int T, int HS) {
    const size_t Tp = int_round_up(T, ATTENTION_KEYS), HSp = int_round_up(HS, MATMUL_TILE_COLS);
    const size_t panels = Tp * HSp, rows = ATTENTION_ROWS * HSp, block = ATTENTION_ROWS * Tp;
    const size_t parts[ATTENTION_PARTS_] = {
        panels, panels, panels, panels, rows, rows, block, block, (size_t)ATTENTION_ROWS * MATMUL_TILE_ROWS};
    size_t sum = 0;
    for (int i = 0; i < ATTENTION_PARTS_; i++) {
        sizes[i] = parts[i];
        sum += parts[i];
    }
    return sum;
}

// Scratch for sequences up to T and heads of size HS <= ATTENTION_KEYS, for as many threads as the next parallel region
// would have.
static inline size_t attention_scratch_bytes(int T, int HS) {
    size_t sizes[ATTENTION_PARTS_];
    return (size_t)threads_max() *
           (attention_parts_(sizes, T, HS) * sizeof(float) + sizeof(AttentionScratch_));
}

static inline void attention_open(AttentionScratch* scratch, int T, int HS) {
    CHECK(HS <= ATTENTION_KEYS, "attention: heads of size %d, wanted at most %d", HS, ATTENTION_KEYS);
    size_t sizes[ATTENTION_PARTS_];
    const size_t per_thread = attention_parts_(sizes, T, HS);
    const int threads = threads_max();
    scratch->T = T;
    scratch->HS = HS;
    scratch->memory = (float*)check_alloc(per_thread * threads, sizeof(float), "attention: scratch");
    scratch->of_thread =
        (AttentionScratch_*)check_alloc(threads, sizeof(AttentionScratch_), "attention: scratch");
    float* at = scratch->memory;
    for (int i = 0; i < threads; i++) {
        AttentionScratch_* s = &scratch->of_thread[i];
        float** const parts[ATTENTION_PARTS_] = {&s->k_by_key, &s->v_by_key, &s->k_by_dim,
                                                 &s->v_by_dim, &s->q_block,  &s->dout_block,
                                                 &s->p,        &s->ds,       &s->left};
        for (int j = 0; j < ATTENTION_PARTS_; j++) {
            *parts[j] = at;
            at += sizes[j];
        }
    }
}

static inline void attention_close(AttentionScratch* scratch) {
    free(scratch->memory);
    free(scratch->of_thread);
}

// Multiply-adds of the causal half, times two: q k^T and p v; backward s again, dp, dv, dq and dk.
static inline double attention_flops(double B, double T, double C) { return 2 * B * T * T * C; }
static inline double attention_backward_flops(double B, double T, double C) { return 5 * B * T * T * C; }

// The least that each pass moves, if tiles are read again from a cache. A GPU's backward pass does 7 / 5 of its FLOP, and
// has two more numbers for each head.
static inline double attention_forward_bytes(double B, double T, double C, double NH, double element_bytes) {
    return B * T * (4 * C * element_bytes + 4 * NH);
}
static inline double attention_backward_bytes(double B, double T, double C, double NH, double element_bytes) {
    return B * T * (12 * C * element_bytes + (4 + 2 * 8) * NH);
}

// Where element (tile 0, row 0, key u) of a packed block of probabilities is; rows are ATTENTION_KEYS apart.
static inline size_t attention_at_(int u) {
    return (size_t)(u / ATTENTION_KEYS) * MATMUL_TILE_ROWS * ATTENTION_KEYS + u % ATTENTION_KEYS;
}

// Where the block of key u ends.
static inline int attention_block_end_(int u, int keys) {
    return int_min((u / ATTENTION_KEYS + 1) * ATTENTION_KEYS, keys);
}

static inline int attention_start_(const int* starts, int t) { return starts ? starts[t] : 0; }

// From which key on anything is computed for the queries from t0 on.
static inline int attention_from_(const int* starts, int t0) {
    return attention_start_(starts, t0) / ATTENTION_SKIP * ATTENTION_SKIP;
}

// Packs the T rows of one head (row stride 3C) for products over the head's dimensions (k_by_key, v_by_key).
static inline void attention_pack_by_key_(float* to, const float* rows, size_t stride, int T, int HS) {
    const Matrix m = {rows, 1, stride};
    for (int u = 0; u < T; u += MATMUL_TILE_COLS) {
        matmul_pack_panel(to + (size_t)u * HS, m, 0, u, HS, int_min(MATMUL_TILE_COLS, T - u));
    }
}

// Packs `n` rows for products over the rows; panels of different dimensions are `capacity` rows apart.
static inline void attention_pack_by_dim_(float* to, const float* rows, size_t stride, int n, int capacity,
                                          int HS) {
    const Matrix m = {rows, stride, 1};
    for (int d = 0; d < HS; d += MATMUL_TILE_COLS) {
        matmul_pack_panel(to + (size_t)capacity * d, m, 0, d, n, int_min(MATMUL_TILE_COLS, HS - d));
    }
}

// scores(rows, keys) = left . right^T for the keys from ... keys-1; left (rows, HS) has row stride `stride`.
static inline void attention_scores_(float* scores, const float* left, size_t stride,
                                     const float* right_by_key, int rows, int from, int keys, int HS) {
    const Matrix m = {left, stride, 1};
    for (int u = from; u < keys; u += MATMUL_TILE_COLS) {
        matmul_rows(scores + attention_at_(u), ATTENTION_KEYS, rows, MATMUL_TILE_COLS, m,
                    right_by_key + (size_t)u * HS, HS, NULL, GRADIENT_SET);
    }
}

// out(rows, HS) = weights(rows, keys) . right(keys, HS) for the keys from ... keys-1; out has row stride
// `stride`.
static inline void attention_mix_(float* out, size_t stride, const float* weights, const float* right_by_dim,
                                  int capacity, int rows, int from, int keys, int HS) {
    for (int u = from; u < keys; u = attention_block_end_(u, keys)) {
        const Matrix m = {weights + attention_at_(u), ATTENTION_KEYS, 1};
        for (int d = 0; d < HS; d += MATMUL_TILE_COLS) {
            matmul_rows(out + d, stride, rows, int_min(MATMUL_TILE_COLS, HS - d), m,
                        right_by_dim + (size_t)capacity * d + (size_t)u * MATMUL_TILE_COLS,
                        attention_block_end_(u, keys) - u, NULL, u == from ? GRADIENT_SET : GRADIENT_ADD);
        }
    }
}

// out(keys, HS) of the keys u0 ... = weights(queries, keys)^T . right(queries, HS), over the `queries` of a
// block.
static inline void attention_scatter_(float* out, size_t stride, const float* weights, size_t tile_floats,
                                      const float* right, float* left, int queries, int u0, int keys, int HS,
                                      GradientMode mode) {
    for (int t = 0; t < queries; t++) {
        const float* row = weights + t / MATMUL_TILE_ROWS * tile_floats +
                           t % MATMUL_TILE_ROWS * ATTENTION_KEYS + attention_at_(u0);
        memcpy(left + t * MATMUL_TILE_ROWS, row, MATMUL_TILE_ROWS * sizeof(float));
    }
    const Matrix m = {left, 1, MATMUL_TILE_ROWS};
    for (int d = 0; d < HS; d += MATMUL_TILE_COLS) {
        matmul_rows(out + d, stride, keys, int_min(MATMUL_TILE_COLS, HS - d), m,
                    right + (size_t)ATTENTION_ROWS * d, queries, NULL, mode);
    }
}

// `x` for the keys `start` ... keys-1 of those from u on, `other` for the rest.
ALWAYS_INLINE Vec attention_seen_(Vec x, Vec other, int u, int start, int keys) {
    return u >= start && u + LANES <= keys
               ? x
               : vec_select(vec_first(keys - u) & ~vec_first(start - u), x, other);
}

// A row of scores becomes exp(scale s - shift), and 0 where a key is not seen: before `start`, from `keys`
// on. From key `from` to `end`, multiples of LANES; returns the sum.
ALWAYS_INLINE float attention_exp_row_(float* row, int start, int keys, int from, int end, float scale,
                                       float shift) {
    Vec sum = vec_all(0.0f);
    for (int u0 = from; u0 < end; u0 = attention_block_end_(u0, end)) {
        float* block = row + attention_at_(u0) - u0;
        for (int u = u0; u < attention_block_end_(u0, end); u += LANES) {
            const Vec e = vec_exp(vec_load(block + u) * scale - shift);
            const Vec kept = attention_seen_(e, vec_all(0.0f), u, start, keys);
            vec_store(block + u, kept);
            sum += kept;
        }
    }
    return vec_hsum(sum);
}

ALWAYS_INLINE float attention_max_row_(const float* row, int start, int keys) {
    Vec max = vec_all(-INFINITY), others = max; // two, as one maximum waits for the one before
    for (int u0 = start / LANES * LANES; u0 < keys; u0 = attention_block_end_(u0, keys)) {
        const float* block = row + attention_at_(u0) - u0;
        const int end = attention_block_end_(u0, keys);
        int u = u0;
        for (; u + LANES < end; u += 2 * LANES) {
            max = vec_max(attention_seen_(vec_load(block + u), max, u, start, keys), max);
            others =
                vec_max(attention_seen_(vec_load(block + u + LANES), others, u + LANES, start, keys), others);
        }
        for (; u < end; u += LANES) {
            max = vec_max(attention_seen_(vec_load(block + u), max, u, start, keys), max);
        }
    }
    return vec_hmax(vec_max(max, others));
}

// Replaces ds, the gradient of the probabilities, by p (ds - delta) scale, the gradient of the scores.
ALWAYS_INLINE void attention_softmax_backward_row_(float* ds, const float* p, int from, int end, float delta,
                                                   float scale) {
    for (int u0 = from; u0 < end; u0 = attention_block_end_(u0, end)) {
        const size_t block = attention_at_(u0);
        for (int i = 0; i < attention_block_end_(u0, end) - u0; i += LANES) {
            vec_store(ds + block + i, vec_load(p + block + i) * (vec_load(ds + block + i) - delta) * scale);
        }
    }
}

// One head of one sequence. Token t is row t of each tensor: those of qkv and dqkv are `stride` apart and have
// the keys C and the values 2C behind the queries; those of out and dout are C apart.
typedef struct {
    const float *qkv, *dout;
    float *out, *lse, *dqkv;
    const int* starts; // (T), or NULL
    int C, HS;
    size_t stride;              // 3C
    int capacity;               // rows of a panel by dimension: scratch->T, rounded up
    AttentionScratch_* scratch; // of the thread
} AttentionHeadCpu_;

// Head `index` of B * NH, without scratch. Only the forward pass leaves dqkv and dout NULL.
static inline AttentionHeadCpu_ attention_head_cpu_(int index, AttentionSizes sizes, const float* qkv,
                                                    float* out, float* lse, float* dqkv, const float* dout,
                                                    const int* starts) {
    const int b = index / sizes.NH, HS = sizes.C / sizes.NH;
    const size_t first = (size_t)b * sizes.T, column = (size_t)(index % sizes.NH) * HS; // first: its token
    const size_t stride = 3 * (size_t)sizes.C, at = first * sizes.C + column;
    AttentionHeadCpu_ head;
    head.qkv = qkv + first * stride + column;
    head.dqkv = dqkv ? dqkv + first * stride + column : NULL;
    head.out = out + at;
    head.dout = dout ? dout + at : NULL;
    head.lse = lse + (size_t)index * sizes.T;
    head.starts = starts ? starts + first : NULL;
    head.C = sizes.C;
    head.HS = HS;
    head.stride = stride;
    head.capacity = 0;
    head.scratch = NULL;
    return head;
}

// Gives it the scratch of the thread.
static inline AttentionHeadCpu_ attention_head_with_(AttentionHeadCpu_ head, AttentionScratch* scratch) {
    head.capacity = int_round_up(scratch->T, ATTENTION_KEYS);
    head.scratch = &scratch->of_thread[thread_index()];
    return head;
}

// delta of token t.
static inline float attention_delta_(const AttentionHeadCpu_* head, int t) {
    const float *out = head->out + (size_t)t * head->C, *dout = head->dout + (size_t)t * head->C;
    return vec_dot(out, dout, head->HS);
}

// Queries t0 ... t0+rows-1: scores, softmax, out.
static inline void attention_forward_tile_(const AttentionHeadCpu_* head, int t0, int rows) {
    const AttentionScratch_* s = head->scratch;
    const int C = head->C, HS = head->HS;
    const float scale = 1.0f / sqrtf((float)HS);
    const int keys = t0 + rows, from = attention_from_(head->starts, t0);
    attention_scores_(s->p, head->qkv + t0 * head->stride, head->stride, s->k_by_key, rows, from, keys, HS);
    float inverse[MATMUL_TILE_ROWS];
    for (int i = 0; i < rows; i++) {
        float* row = s->p + i * ATTENTION_KEYS;
        const int start = attention_start_(head->starts, t0 + i);
        const float max = attention_max_row_(row, start, t0 + i + 1) * scale;
        const float sum =
            attention_exp_row_(row, start, t0 + i + 1, from, int_round_up(keys, LANES), scale, max);
        head->lse[t0 + i] = max + logf(sum);
        inverse[i] = 1.0f / sum;
    }
    float* out = head->out + (size_t)t0 * C;
    attention_mix_(out, C, s->p, s->v_by_dim, head->capacity, rows, from, keys, HS);
    for (int i = 0; i < rows; i++) {
        for (int d = 0; d < HS; d++) {
            out[(size_t)i * C + d] *= inverse[i];
        }
    }
}

static inline void attention_forward_cpu(float* out, float* lse, const float* qkv, const int* starts,
                                         AttentionSizes sizes, AttentionScratch* scratch) {
    const int T = sizes.T, C = sizes.C, HS = C / sizes.NH;
    assert(T <= scratch->T && HS == scratch->HS);
#pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < sizes.B * sizes.NH; h++) {
        const AttentionHeadCpu_ head =
            attention_head_with_(attention_head_cpu_(h, sizes, qkv, out, lse, NULL, NULL, starts), scratch);
        const AttentionScratch_* s = head.scratch;
        attention_pack_by_key_(s->k_by_key, head.qkv + C, head.stride, T, HS);
        attention_pack_by_dim_(s->v_by_dim, head.qkv + 2 * C, head.stride, T, head.capacity, HS);
        for (int t = 0; t < T; t += MATMUL_TILE_ROWS) {
            attention_forward_tile_(&head, t, int_min(MATMUL_TILE_ROWS, T - t));
        }
    }
}

// Probabilities p and their gradients ds of the queries t0 ... t0+rows-1 over the keys from ... keys-1 (those of
// the block), then dq.
static inline void attention_backward_tile_(const AttentionHeadCpu_* head, float* p, float* ds, int t0,
                                            int rows, int from, int keys) {
    const AttentionScratch_* s = head->scratch;
    const int C = head->C, HS = head->HS;
    const float scale = 1.0f / sqrtf((float)HS);
    attention_scores_(p, head->qkv + t0 * head->stride, head->stride, s->k_by_key, rows, from, keys, HS);
    attention_scores_(ds, head->dout + (size_t)t0 * C, C, s->v_by_key, rows, from, keys, HS);
    for (int i = 0; i < rows; i++) {
        const int end = int_round_up(keys, LANES);
        attention_exp_row_(p + i * ATTENTION_KEYS, attention_start_(head->starts, t0 + i), t0 + i + 1, from,
                           end, scale, head->lse[t0 + i]);
        attention_softmax_backward_row_(ds + i * ATTENTION_KEYS, p + i * ATTENTION_KEYS, from, end,
                                        attention_delta_(head, t0 + i), scale);
    }
    attention_mix_(head->dqkv + t0 * head->stride, head->stride, ds, s->k_by_dim, head->capacity, rows, from,
                   t0 + rows, HS);
}

// Queries t0 ... t0+rows-1 (a block of ATTENTION_ROWS). dk and dv of the block's own keys are set here, those of
// earlier keys are added to: block after block, in a fixed order.
static inline void attention_backward_block_(const AttentionHeadCpu_* head, int t0, int rows) {
    const AttentionScratch_* s = head->scratch;
    const int C = head->C, HS = head->HS;
    const size_t tile_floats = (size_t)head->capacity * MATMUL_TILE_ROWS;
    const int from = attention_from_(head->starts, t0), keys = t0 + rows;
    for (int i = 0; i < rows; i += MATMUL_TILE_ROWS) {
        const size_t tile = i / MATMUL_TILE_ROWS * tile_floats;
        attention_backward_tile_(head, s->p + tile, s->ds + tile, t0 + i, int_min(MATMUL_TILE_ROWS, rows - i),
                                 from, keys);
    }
    attention_pack_by_dim_(s->q_block, head->qkv + t0 * head->stride, head->stride, rows, ATTENTION_ROWS, HS);
    attention_pack_by_dim_(s->dout_block, head->dout + (size_t)t0 * C, C, rows, ATTENTION_ROWS, HS);
    for (int u = from; u < keys; u += MATMUL_TILE_ROWS) {
        const GradientMode mode = u >= t0 ? GRADIENT_SET : GRADIENT_ADD;
        const int count = int_min(MATMUL_TILE_ROWS, keys - u);
        float *dk = head->dqkv + u * head->stride + C, *dv = dk + C;
        attention_scatter_(dk, head->stride, s->ds, tile_floats, s->q_block, s->left, rows, u, count, HS,
                           mode);
        attention_scatter_(dv, head->stride, s->p, tile_floats, s->dout_block, s->left, rows, u, count, HS,
                           mode);
    }
}

static inline void attention_backward_cpu(float* dqkv, const float* dout, const float* qkv, const float* out,
                                          const float* lse, const int* starts, AttentionSizes sizes,
                                          AttentionScratch* scratch) {
    const int T = sizes.T, C = sizes.C, HS = C / sizes.NH;
    assert(T <= scratch->T && HS == scratch->HS);
#pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < sizes.B * sizes.NH; h++) {
        const AttentionHeadCpu_ head =
            attention_head_with_(attention_head_cpu_(h, sizes, qkv, (float*)out, (float*)lse, dqkv, dout,
                                                     starts), // only reads out and lse
                                 scratch);
        const AttentionScratch_* s = head.scratch;
        attention_pack_by_key_(s->k_by_key, head.qkv + C, head.stride, T, HS);
        attention_pack_by_key_(s->v_by_key, head.qkv + 2 * C, head.stride, T, HS);
        attention_pack_by_dim_(s->k_by_dim, head.qkv + C, head.stride, T, head.capacity, HS);
        for (int t = 0; t < T; t += ATTENTION_ROWS) {
            attention_backward_block_(&head, t, int_min(ATTENTION_ROWS, T - t));
        }
    }
}

// ---- generation ----

// What is cached, and how much room there is.
typedef struct {
    float* data; // (B, 2, NH, maxT, HS)
    int maxT, C, NH;
} AttentionCache;

// The keys of a head of text b; its values are C*maxT elements behind them.
static inline float* attention_cache_head_(AttentionCache cache, int b, int h) {
    return cache.data + (size_t)cache.maxT * (2 * (size_t)b * cache.C + (size_t)h * (cache.C / cache.NH));
}

// The tokens first ... first+count-1 of text b, which are the rows of qkv (count, 3C).
static inline void attention_cache_store_cpu(AttentionCache cache, const float* qkv, int b, int first,
                                             int count) {
    const int C = cache.C, HS = C / cache.NH;
    for (int h = 0; h < cache.NH; h++) {
        float* keys = attention_cache_head_(cache, b, h) + (size_t)first * HS;
        float* values = keys + (size_t)C * cache.maxT;
        for (int t = 0; t < count; t++) {
            const float* row = qkv + (size_t)t * 3 * C + (size_t)h * HS;
            memcpy(keys + (size_t)t * HS, row + C, (size_t)HS * sizeof(float));
            memcpy(values + (size_t)t * HS, row + 2 * C, (size_t)HS * sizeof(float));
        }
    }
}

// scores[u ... u+LANES-1] = scale q . k of LANES keys; lanes from `last` on repeat the last key's.
static inline void attention_cached_scores_(float* scores, const float* q, const float* keys, int u, int last,
                                            int HS, float scale) {
    Vec sum[LANES];
    float rest[LANES] = {0}; // of the dimensions that fill no vector
    for (int i = 0; i < LANES; i++) {
        const float* k = keys + (size_t)int_min(u + i, last) * HS;
        int d = 0;
        sum[i] = vec_all(0.0f);
        for (; d + LANES <= HS; d += LANES) {
            sum[i] += vec_load(q + d) * vec_load(k + d);
        }
        for (; d < HS; d++) {
            rest[i] += q[d] * k[d];
        }
    }
    vec_transpose(sum);
    Vec total = vec_load(rest);
    for (int i = 0; i < LANES; i++) {
        total += sum[i];
    }
    vec_store(scores + u, total * scale);
}

// Scores become exp(score - max), and 0 from `keys` on, up to the end of a vector. Returns their sum.
static inline float attention_cached_softmax_(float* scores, int keys) {
    Vec max = vec_all(-INFINITY), sum = vec_all(0.0f);
    for (int u = 0; u < keys; u += LANES) {
        max = vec_max(vec_load(scores + u), max); // those behind the last key are copies of its score
    }
    const float shift = vec_hmax(max);
    for (int u = 0; u < keys; u += LANES) {
        const Vec p = vec_select(vec_first(keys - u), vec_exp(vec_load(scores + u) - shift), vec_all(0.0f));
        vec_store(scores + u, p);
        sum += p;
    }
    return vec_hsum(sum);
}

// out (HS) = weights (keys) . values (keys, HS) / sum
static inline void attention_cached_mix_(float* out, const float* weights, const float* values, int keys,
                                         int HS, float sum) {
    int d = 0;
    for (; d + 2 * LANES <= HS; d += 2 * LANES) {
        Vec low = vec_all(0.0f), high = vec_all(0.0f);
        for (int u = 0; u < keys; u++) {
            low += weights[u] * vec_load(values + (size_t)u * HS + d);
            high += weights[u] * vec_load(values + (size_t)u * HS + d + LANES);
        }
        vec_store(out + d, low / sum);
        vec_store(out + d + LANES, high / sum);
    }
    for (; d < HS; d++) {
        float total = 0;
        for (int u = 0; u < keys; u++) {
            total += weights[u] * values[(size_t)u * HS + d];
        }
        out[d] = total / sum;
    }
}

static inline void attention_cached_cpu(float* out, const float* qkv, const int* positions, int rows,
                                        AttentionCache cache, AttentionScratch* scratch) {
    const int C = cache.C, NH = cache.NH, HS = C / NH;
    assert(cache.maxT <= scratch->T && HS == scratch->HS);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < rows * NH; i++) {
        const int r = i / NH, h = i % NH, keys = positions[r] + 1;
        const float* q = qkv + (size_t)r * 3 * C + (size_t)h * HS;
        const float* k = attention_cache_head_(cache, r, h);
        float* scores = scratch->of_thread[thread_index()].p;
        for (int u = 0; u < keys; u += LANES) {
            attention_cached_scores_(scores, q, k, u, keys - 1, HS, 1.0f / sqrtf((float)HS));
        }
        const float sum = attention_cached_softmax_(scores, keys);
        attention_cached_mix_(out + (size_t)r * C + (size_t)h * HS, scores, k + (size_t)C * cache.maxT, keys,
                              HS, sum);
    }
}

#endif
