/*
attention.h -- causal multi-head self-attention: the contract, and the CPU version.

    q, k, v  = the three parts of a token's row of qkv, head h at columns h*HS ... of each; the
               NH / KV heads of a group, q of heads j NH / KV ..., read k and v of head j
    s[t][u]  = q[t] . k[u] / root               starts[t] <= u <= t
               with a cap: cap c[t][u], c[t][u] = tanh(q[t] . k[u] / (cap root))
    p[t]     = softmax(s[t])                    lse[t] = log sum_u exp(s[t][u])
    out[t]   = sum_u p[t][u] v[u]               with dropout: p m, as below (dropout.h)

    dp[t][u] = dout[t] . v[u]                   delta[t] = dout[t] . out[t]
    ds       = p (dp - delta) / root            with a cap: times 1 - c^2
    dq[t]    = sum_u ds[t][u] k[u]     dk[u] = sum_t ds[t][u] q[t]     dv[u] = sum_t p[t][u] dout[t]
               dk and dv are also summed over the heads of the group
               with dropout: p m in dv, dp m in ds; delta is the same

    qkv, dqkv     (B, T, QKV)         as the linear layer writes it: NH*HS columns of queries,
                                      KV*HS of keys, KV*HS of values
    out, dout     (B, T, Q)           Q = NH*HS
    starts        (B, T)              int32, position in the row where the document of token t
                                      starts: never above t, never falling along a row. A token sees
                                      only its own document. NULL: the row is one document
    lse           (B, NH, T)          fp32, kept for the backward pass

Both passes set their outputs.

If sequences are divided among ranks (token_chunks.h), a rank has the queries of its chunks, and
gathered keys and values of all W tokens of each sequence:

    kv, dkv       (B, W, 2K)          K = KV*HS columns of keys, then as many of values

Tensors with T then have the rank's tokens, and `starts` is (B, W). Keys and values in qkv are not
read, and their gradients in dqkv are not set: dkv has the gradients of all tokens, from the rank's
queries. The bits of each query are the same as in a whole sequence.

As in flash attention (Dao et al., 2022), probabilities exist only for a few queries of one head at
a time, and the backward pass recomputes them from lse. The forward pass holds the probabilities of
a tile of queries and all keys, the backward pass of ATTENTION_SQUARE queries and as many keys. Keys
are skipped if their document ended before the first of these queries. All matmuls are tiles of
matmul.h.

In the forward pass a thread processes a whole head, in the backward pass a whole group. With too
few groups for the threads, the backward pass is divided by keys and by queries, and computes s and
dp twice; the bits are the same.

Generation keeps the keys and values of each sequence, and then decodes one token of each at a time:

    cache         (B, 2, KV, maxT, HS)   keys, then values, of B sequences of up to maxT tokens

attention_cache_store stores keys and values of some tokens of one sequence from rows of qkv;
attention_cached sets out (B, Q) and lse for the queries in qkv (B, QKV), with T = 1. Row b is token
positions[b] of sequence b, whose keys and values are stored. It sees the last `window` tokens up to
itself; 0: all.
*/
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

#include <assert.h>
#include <math.h>

#include "llmc/base/enum_words.h"
#include "llmc/base/memory.h"
#include "llmc/base/sizes.h"
#include "llmc/base/vec.h"
#include "llmc/ops/attention_sizes.h"
#include "llmc/ops/dropout.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/matmul.h"
#include "llmc/ops/softcap.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ATTENTION_KEYS 768 // forward: a row of probabilities is stored in blocks of this size

#define ATTENTION_SQUARE 96 // backward: queries, and keys, at a time; p and ds occupy 36 KiB each

// On GPUs, a multiple of the rows of a tile; chunks are multiples of it.
enum { ATTENTION_ROW_ALIGN = 128 };

// keys of other documents are skipped in steps of this size
#define ATTENTION_SKIP (3 * MATMUL_TILE_COLS)

// Instructions that compute attention on GPUs (attention_wgmma.cuh). By default mma, as wgmma has
// not been measured yet.
#define ATTENTION_WORDS(X)                                                                                   \
    X(ATTENTION_DEFAULT, "auto")                                                                             \
    X(ATTENTION_BY_MMA, "mma") X(ATTENTION_BY_WGMMA, "wgmma") X(ATTENTION_RACED, "race")
typedef enum { ATTENTION_WORDS(WORDS_VALUE) } AttentionInstructions;

static_assert(ATTENTION_SKIP % MATMUL_TILE_ROWS == 0 && ATTENTION_SQUARE % ATTENTION_SKIP == 0 &&
                  ATTENTION_KEYS % ATTENTION_SQUARE == 0,
              "whole tiles are skipped");

// Working memory of one thread. Tp is T rounded up to ATTENTION_KEYS, HSp is HS rounded up to
// MATMUL_TILE_COLS.
typedef struct {
    // right matrices of q k^T and dout v^T (Tp / MATMUL_TILE_COLS, HS, MATMUL_TILE_COLS)
    float *k_by_key, *v_by_key;
    // right matrices of ds k and p v (HSp / MATMUL_TILE_COLS, Tp, MATMUL_TILE_COLS)
    float *k_by_dim, *v_by_dim;
    // right matrices of ds^T q and p^T dout (HSp / MATMUL_TILE_COLS,
    // ATTENTION_SQUARE, MATMUL_TILE_COLS)
    float *q_block, *dout_block;
    float* row_p;  // left matrix of p v (Tp / ATTENTION_KEYS, MATMUL_TILE_ROWS, ATTENTION_KEYS)
    float *p, *ds; // (ATTENTION_SQUARE, ATTENTION_SQUARE): queries by keys
} AttentionScratch_;

typedef struct {
    AttentionScratch_* of_thread;
    int T, HS;
} AttentionScratch;

// Allocates scratch for up to T keys of a sequence and heads of size HS, for as many threads as the
// next parallel region would have.
void attention_open(AttentionScratch* scratch, Memory* memory, int T, int HS);

// Return the FLOP of the causal half: forward q k^T and p v; backward s again, dp, dv, dq and dk.
static inline double attention_forward_flops(AttentionSizes sizes) {
    return 2.0 * sizes.B * sizes.T * attention_keys(sizes) * attention_queries_size(sizes);
}

static inline double attention_backward_flops(AttentionSizes sizes) {
    return 5.0 * sizes.B * sizes.T * attention_keys(sizes) * attention_queries_size(sizes);
}

// Return the least memory traffic of each pass, if tiles are read again from a cache. The GPU's
// backward pass takes 7 / 5 of this FLOP, and moves two more numbers per head and token.
static inline double attention_forward_bytes(AttentionSizes sizes, double element_bytes) {
    const double tokens = (double)sizes.B * sizes.T, QKV = attention_qkv_size(sizes);
    return tokens * ((QKV + attention_queries_size(sizes)) * element_bytes + 4 * sizes.NH);
}

static inline double attention_backward_bytes(AttentionSizes sizes, double element_bytes) {
    const double tokens = (double)sizes.B * sizes.T, Q = attention_queries_size(sizes);
    // dq, qkv, out and dout
    const double QKV = attention_qkv_size(sizes), queries = Q + QKV + 2 * Q,
                 keys = QKV - Q + QKV + Q; // dk and dv, qkv, dout
    return tokens * ((queries + keys) * element_bytes + (4 + 2 * 8) * sizes.NH);
}

// Arrays that both passes read, and that the forward pass sets.
typedef struct {
    AttentionSizes sizes;
    const int* starts; // or NULL
    const float* qkv;
    const float* kv; // gathered keys and values; NULL: use qkv's own
    float *out, *lse;
    const int* lengths; // (B) tokens of each whole sequence, the rest is padding; NULL: all
    double* largest;    // (NH) raised to the largest score, if any is larger; NULL: not wanted
    Dropout dropout;    // of the weights of head 0, by query; the other heads' places follow
} AttentionPass;

// Raises the largest score of head `index` of B * NH. Threads may do so in any order.
static inline void attention_raise_largest(const AttentionPass* pass, int index, float score) {
    double* largest = pass->largest + index % pass->sizes.NH;
#pragma omp critical(attention_largest)
    *largest = fmax(*largest, (double)score);
}

// Returns how many of a tile's queries of head `index` of B * NH are no padding.
static inline int attention_real_rows_(const AttentionPass* pass, int index, int t0, int count) {
    const int length = pass->lengths ? pass->lengths[index / pass->sizes.NH] : t0 + count;
    return int_max(0, int_min(count, length - t0));
}

// Arrays that the backward pass reads besides, and that it sets.
typedef struct {
    const float* dout;
    float *dqkv, *dkv; // dkv: with gathered keys
} AttentionGradients;

// Return the first row of keys, and the distance between two.
static inline const float* attention_pass_keys(const AttentionPass* pass) {
    return pass->kv ? pass->kv : pass->qkv + attention_queries_size(pass->sizes);
}
static inline size_t attention_pass_key_stride(const AttentionPass* pass) {
    return pass->kv ? 2 * (size_t)attention_keys_size(pass->sizes) : (size_t)attention_qkv_size(pass->sizes);
}

// Returns the gradient of the first row of keys.
static inline float* attention_pass_dkeys(const AttentionPass* pass, const AttentionGradients* d) {
    return pass->kv ? d->dkv : d->dqkv + attention_queries_size(pass->sizes);
}

// Returns the offset of key u of the first row in row_p; rows are ATTENTION_KEYS apart.
static inline size_t attention_at_(int u) {
    return (size_t)(u / ATTENTION_KEYS) * MATMUL_TILE_ROWS * ATTENTION_KEYS + u % ATTENTION_KEYS;
}

// Returns the end of the block of key u.
static inline int attention_block_end_(int u, int keys) {
    return int_min((u / ATTENTION_KEYS + 1) * ATTENTION_KEYS, keys);
}

// Queries t0 ... t0+count-1 of a sequence: rows row ... row+count-1 of each tensor.
typedef struct {
    int row, t0, count;
} AttentionQueries_;

// Returns the queries from `row` on that follow each other, up to the end of a tile. Tiles of
// `tile` queries start at multiples of that in the sequence, whatever part of it a rank has: so
// tiles of keys end where tiles of queries do.
static inline AttentionQueries_ attention_queries_(AttentionSizes sizes, int row, int tile) {
    const int t0 = token_chunks_position(sizes.chunks, row, sizes.T);
    const int end = token_chunks_end(sizes.chunks, row, sizes.T);
    const AttentionQueries_ queries = {row, t0, int_min(tile - t0 % tile, end - row)};
    return queries;
}

static inline int attention_start_(const int* starts, int t) { return starts ? starts[t] : 0; }

// Returns the first key for which anything is computed for the queries from t0 on.
static inline int attention_from_(const int* starts, int t0) {
    return attention_start_(starts, t0) / ATTENTION_SKIP * ATTENTION_SKIP;
}

// Rows of a matrix that is set or added to, `stride` apart.
typedef struct {
    float* data;
    size_t stride;
    int count;
} AttentionRows_;

// Sets scores(rows, keys) = left(rows, HS) right(keys, HS)^T, up to the end of the last panel.
static inline void attention_scores_(AttentionRows_ scores, Matrix left, const float* right_by_key, int keys,
                                     int HS) {
    for (int u = 0; u < keys; u += MATMUL_TILE_COLS) {
        matmul_rows(scores.data + u, scores.stride, scores.count, MATMUL_TILE_COLS, left,
                    right_by_key + (size_t)u * HS, HS, NULL, GRADIENT_SET);
    }
}

// Sets or adds to out(rows, HS) weights(rows, keys) right(keys, HS). `right_by_dim` points at the
// first key in the first panel; panels are `capacity` keys apart.
static inline void attention_mix_(AttentionRows_ out, Matrix weights, const float* right_by_dim, int capacity,
                                  int keys, int HS, GradientMode mode) {
    for (int d = 0; d < HS; d += MATMUL_TILE_COLS) {
        matmul_rows(out.data + d, out.stride, out.count, int_min(MATMUL_TILE_COLS, HS - d), weights,
                    right_by_dim + (size_t)capacity * d, keys, NULL, mode);
    }
}

// Returns `x` for keys u, u + 1, ... from `start` to keys-1, and `other` for the rest.
ALWAYS_INLINE Vec attention_seen_(Vec x, Vec other, int u, int start, int keys) {
    return u >= start && u + LANES <= keys
               ? x
               : vec_select(vec_first(keys - u) & ~vec_first(start - u), x, other);
}

// Replaces scores of a row by exp(scale s - shift), or by 0 for keys before `start` and from `keys`
// on. Covers keys `from` to `end`, multiples of LANES; returns the sum.
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

// Replaces products of a row, keys `from` to `end`, multiples of LANES, by their capped tanh.
ALWAYS_INLINE void attention_cap_row_(float* row, int from, int end, float width) {
    for (int u0 = from; u0 < end; u0 = attention_block_end_(u0, end)) {
        float* block = row + attention_at_(u0) - u0;
        for (int u = u0; u < attention_block_end_(u0, end); u += LANES) {
            vec_store(block + u, softcap_tanh_vec(vec_load(block + u), width));
        }
    }
}

ALWAYS_INLINE float attention_max_row_(const float* row, int start, int keys) {
    Vec max = vec_all(-INFINITY), others = max; // two, because one maximum waits for the one before
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

// One head of queries of one sequence, and the keys that it reads. Rows of q and dq are `stride`
// apart, rows of k, v and their gradients `key_stride`, rows of out and dout `out_stride`.
typedef struct {
    AttentionSizes sizes;
    const float *q, *k, *v, *dout;
    float *out, *lse, *dq, *dk, *dv;
    const int* starts;          // of the sequence, or NULL
    int HS, is_first, is_whole; // size of a head; the first of its group; of a whole sequence
    AttentionScale scale;
    size_t stride, key_stride, out_stride;
    int capacity;               // rows between panels by dimension: scratch->T, rounded up
    AttentionScratch_* scratch; // scratch of the thread
    Dropout dropout;            // of the head's weights, by row of the sequence
} AttentionHeadCpu_;

// Returns delta of the query in row `row`.
static inline float attention_delta_(const AttentionHeadCpu_* head, int row) {
    const size_t at = (size_t)row * head->out_stride;
    return vec_dot(head->out + at, head->dout + at, head->HS);
}

// ---- forward ----

// Applies dropout to a row of probabilities, keys `from` to `end`, of the query in row `row`.
static inline void attention_drop_row_(float* p, const Dropout* dropout, int row, int from, int end) {
    float m[ATTENTION_SQUARE];
    for (int u = from, count; u < end; u += count) {
        float* block = p + attention_at_(u); // of whole squares
        count = int_min(ATTENTION_SQUARE - u % ATTENTION_SQUARE, end - u);
        dropout_factors_cpu(m, dropout, row, u, count);
        for (int i = 0; i < count; i++) {
            block[i] *= m[i];
        }
    }
}

// Sets out and lse of a tile of queries. Returns the largest score of its first `real` ones.
static inline float attention_forward_tile_(const AttentionHeadCpu_* head, AttentionQueries_ tile, int real) {
    const AttentionScratch_* s = head->scratch;
    const size_t stride = head->out_stride;
    const int HS = head->HS, rows = tile.count, keys = tile.t0 + rows,
              from = attention_from_(head->starts, tile.t0);
    const AttentionScale scale = head->scale;
    const Matrix queries = {head->q + tile.row * head->stride, head->stride, 1};
    for (int u = from; u < keys; u = attention_block_end_(u, keys)) {
        const AttentionRows_ scores = {s->row_p + attention_at_(u), ATTENTION_KEYS, rows};
        attention_scores_(scores, queries, s->k_by_key + (size_t)u * HS, attention_block_end_(u, keys) - u,
                          HS);
    }
    float inverse[MATMUL_TILE_ROWS], largest = -INFINITY;
    for (int i = 0; i < rows; i++) {
        float* row = s->row_p + i * ATTENTION_KEYS;
        const int start = attention_start_(head->starts, tile.t0 + i), end = tile.t0 + i + 1;
        if (scale.width > 0) {
            attention_cap_row_(row, from, int_round_up(keys, LANES), scale.width);
        }
        const float max = attention_max_row_(row, start, end) * scale.factor;
        const float sum =
            attention_exp_row_(row, start, end, from, int_round_up(keys, LANES), scale.factor, max);
        head->lse[tile.row + i] = max + logf(sum);
        inverse[i] = 1.0f / sum;
        if (dropout_is_on(&head->dropout)) {
            attention_drop_row_(row, &head->dropout, tile.row + i, from, end);
        }
        largest = i < real ? fmaxf(largest, max) : largest;
    }
    float* out = head->out + tile.row * stride;
    for (int u = from; u < keys; u = attention_block_end_(u, keys)) {
        const Matrix p = {s->row_p + attention_at_(u), ATTENTION_KEYS, 1};
        attention_mix_((AttentionRows_){out, stride, rows}, p, s->v_by_dim + (size_t)u * MATMUL_TILE_COLS,
                       head->capacity, attention_block_end_(u, keys) - u, HS,
                       u == from ? GRADIENT_SET : GRADIENT_ADD);
    }
    for (int i = 0; i < rows; i++) {
        for (int d = 0; d < HS; d++) {
            out[i * stride + d] *= inverse[i];
        }
    }
    return largest;
}

void attention_forward_cpu(const AttentionPass* pass, AttentionScratch* scratch);

// ---- backward ----

// Returns 1 if `threads` finish sooner with work that is divided: of 7 / 5 of the FLOP each does
// its share, while `groups` busy ones would take as long as one group does.
static inline int attention_backward_divides(int groups, int threads) { return 7 * groups < 5 * threads; }

void attention_backward_cpu(const AttentionGradients* d, const AttentionPass* pass,
                            AttentionScratch* scratch);

// ---- keys and values of earlier tokens ----

// Keys and values of sequences of up to maxT tokens.
typedef struct {
    float* data; // (B, 2, KV, maxT, HS)
    int maxT;
} AttentionCache;

// Returns the offset of the keys of head j of sequence b, and how much later its values follow.
HOST_DEVICE size_t attention_cache_at_(int maxT, int b, int j, AttentionSizes sizes) {
    return (size_t)maxT * sizes.HS * (2 * (size_t)b * sizes.KV + j);
}
HOST_DEVICE size_t attention_cache_values_(int maxT, AttentionSizes sizes) {
    return (size_t)maxT * attention_keys_size(sizes);
}

// Returns the first key that the query at `position` sees.
HOST_DEVICE int attention_cached_first(int position, int window) {
    return window > 0 && position >= window ? position + 1 - window : 0;
}

// Stores tokens first ... first+count-1 of sequence b, the rows of qkv (count, QKV).
void attention_cache_store_cpu(AttentionCache cache, const float* qkv, int b, int first, int count,
                               AttentionSizes sizes);

void attention_cached_cpu(const AttentionPass* pass, const int* positions, int window, AttentionCache cache,
                          AttentionScratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef ATTENTION_IMPLEMENTATION

enum { ATTENTION_PARTS_ = 9 }; // arrays in AttentionScratch_

// Sets the size of each array, in floats, in the order of the struct; returns their sum.
static size_t attention_parts_(size_t sizes[ATTENTION_PARTS_], int T, int HS) {
    const size_t Tp = int_round_up(T, ATTENTION_KEYS), HSp = int_round_up(HS, MATMUL_TILE_COLS);
    const size_t panels = Tp * HSp, block = ATTENTION_SQUARE * HSp,
                 square = ATTENTION_SQUARE * ATTENTION_SQUARE;
    const size_t parts[ATTENTION_PARTS_] = {
        panels, panels, panels, panels, block, block, MATMUL_TILE_ROWS * Tp, square, square};
    size_t sum = 0;
    for (int i = 0; i < ATTENTION_PARTS_; i++) {
        sizes[i] = parts[i];
        sum += parts[i];
    }
    return sum;
}

void attention_open(AttentionScratch* scratch, Memory* memory, int T, int HS) {
    size_t sizes[ATTENTION_PARTS_];
    const size_t threads = (size_t)threads_max(), floats = threads * attention_parts_(sizes, T, HS);
    float* at = (float*)memory_take(memory, "scratch: attention", MEMORY_DEVICE, floats * sizeof(float));
    scratch->T = T;
    scratch->HS = HS;
    scratch->of_thread = (AttentionScratch_*)memory_take(memory, "scratch: attention", MEMORY_DEVICE,
                                                         threads * sizeof(AttentionScratch_));
    for (size_t i = 0; i < threads && at; i++) {
        AttentionScratch_* s = &scratch->of_thread[i];
        float** const parts[ATTENTION_PARTS_] = {&s->k_by_key, &s->v_by_key, &s->k_by_dim,
                                                 &s->v_by_dim, &s->q_block,  &s->dout_block,
                                                 &s->row_p,    &s->p,        &s->ds};
        for (int j = 0; j < ATTENTION_PARTS_; j++) {
            *parts[j] = at;
            at += sizes[j];
        }
    }
}

// Packs rows `first` to `end` for matmuls over the head's dimensions (k_by_key, v_by_key).
static void attention_pack_by_key_(float* to, const float* rows, size_t stride, int first, int end, int HS) {
    const Matrix m = {rows, 1, stride};
    for (int u = first; u < end; u += MATMUL_TILE_COLS) {
        matmul_pack_panel(to + (size_t)u * HS, m, 0, u, HS, int_min(MATMUL_TILE_COLS, end - u));
    }
}

// Packs `n` rows for matmuls over the rows; panels of different dimensions are `capacity` rows
// apart.
static void attention_pack_by_dim_(float* to, const float* rows, size_t stride, int n, int capacity, int HS) {
    const Matrix m = {rows, stride, 1};
    for (int d = 0; d < HS; d += MATMUL_TILE_COLS) {
        matmul_pack_panel(to + (size_t)capacity * d, m, 0, d, n, int_min(MATMUL_TILE_COLS, HS - d));
    }
}

// Sets or adds to out(keys, HS) weights(queries, keys)^T right(queries, HS), for a tile of keys of
// a square; rows of out are `row` apart. Not inlined, for the same reason as matmul_rows.
static __attribute__((noinline)) void attention_scatter_(float* out, size_t row, const float* weights,
                                                         const float* right, int keys, int queries, int HS,
                                                         GradientMode mode) {
    for (int d = 0; d < HS; d += MATMUL_TILE_COLS) {
        matmul_rows_transposed(out + d, row, keys, int_min(MATMUL_TILE_COLS, HS - d), weights,
                               ATTENTION_SQUARE, right + (size_t)ATTENTION_SQUARE * d, queries, mode);
    }
}

// Values of a query that give its probabilities and their gradients. It sees the keys from `start`
// to its own position t.
typedef struct {
    int start, t;
    float lse, delta;
} AttentionQuery_;

// Processes a row of a square, keys u0 ... end-1, multiples of LANES: products q . k become p =
// exp(s - lse), and dp becomes ds = p (dp - delta) scale, with a cap also times its slope; both
// become 0 for keys that the query does not see.
ALWAYS_INLINE void attention_softmax_backward_row_(float* p, float* ds, AttentionQuery_ query, int u0,
                                                   int end, AttentionScale scale, int is_capped) {
    for (int u = u0; u < end; u += LANES, p += LANES, ds += LANES) {
        Vec s = vec_load(p), dp = vec_load(ds) - query.delta;
        if (is_capped) {
            s = softcap_tanh_vec(s, scale.width);
            dp *= softcap_slope_vec(s);
        }
        const Vec e = vec_exp(s * scale.factor - query.lse);
        const Vec kept = attention_seen_(e, vec_all(0.0f), u, query.start, query.t + 1);
        vec_store(p, kept);
        vec_store(ds, kept * (dp * scale.scale));
    }
}

// A pass over all heads; d is NULL in the forward pass.
typedef struct {
    AttentionSizes sizes;
    const AttentionPass* pass;
    const AttentionGradients* d;
    AttentionScratch* scratch;
} AttentionHeads_;

// Returns the dropout of head h in sequence b.
static Dropout attention_head_dropout_(const AttentionPass* pass, int b, int h) {
    Dropout dropout = pass->dropout;
    dropout.place += (uint32_t)h;
    dropout.first += b * pass->sizes.T;
    return dropout;
}

// Returns head `index` of B * NH, with the scratch of this thread.
static AttentionHeadCpu_ attention_head_cpu_(const AttentionHeads_* heads, int index) {
    const AttentionPass* pass = heads->pass;
    const AttentionGradients* d = heads->d;
    const AttentionSizes sizes = heads->sizes;
    const int b = index / sizes.NH, h = index % sizes.NH, HS = sizes.HS, group = attention_group(sizes);
    const size_t first = (size_t)b * sizes.T, stride = (size_t)attention_qkv_size(sizes),
                 Q = (size_t)attention_queries_size(sizes), KHS = (size_t)attention_keys_size(sizes),
                 q = first * stride + (size_t)h * HS, out = first * Q + (size_t)h * HS,
                 key_stride = attention_pass_key_stride(pass),
                 k = (size_t)b * attention_keys(sizes) * key_stride + (size_t)(h / group) * HS;
    const float* keys = attention_pass_keys(pass) + k;
    float* dkeys = d ? attention_pass_dkeys(pass, d) + k : NULL;
    const AttentionHeadCpu_ head = {.sizes = sizes,
                                    .q = pass->qkv + q,
                                    .k = keys,
                                    .v = keys + KHS,
                                    .dout = d ? d->dout + out : NULL,
                                    .out = pass->out + out,
                                    .lse = pass->lse + (size_t)index * sizes.T,
                                    .dq = d ? d->dqkv + q : NULL,
                                    .dk = dkeys,
                                    .dv = d ? dkeys + KHS : NULL,
                                    .starts = pass->starts ? pass->starts + (size_t)b * attention_keys(sizes)
                                                           : NULL,
                                    .HS = HS,
                                    .is_first = h % group == 0,
                                    .is_whole = sizes.chunks.last == 0,
                                    .scale = attention_scale(sizes.root, sizes.cap),
                                    .stride = stride,
                                    .key_stride = key_stride,
                                    .out_stride = Q,
                                    .capacity = int_round_up(heads->scratch->T, ATTENTION_KEYS),
                                    .scratch = &heads->scratch->of_thread[thread_index()],
                                    .dropout = attention_head_dropout_(pass, b, h)};
    return head;
}

static void attention_check_(const AttentionPass* pass, const AttentionScratch* scratch) {
    assert(attention_keys(pass->sizes) <= scratch->T && pass->sizes.HS == scratch->HS);
    assert(pass->sizes.NH % pass->sizes.KV == 0 && (pass->kv || pass->sizes.chunks.last == 0));
    (void)pass;
    (void)scratch;
}

void attention_forward_cpu(const AttentionPass* pass, AttentionScratch* scratch) {
    const AttentionSizes sizes = pass->sizes;
    const AttentionHeads_ heads = {sizes, pass, NULL, scratch};
    const int W = attention_keys(sizes), HS = sizes.HS;
    attention_check_(pass, scratch);
#pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < sizes.B * sizes.NH; h++) {
        const AttentionHeadCpu_ head = attention_head_cpu_(&heads, h);
        const AttentionScratch_* s = head.scratch;
        attention_pack_by_key_(s->k_by_key, head.k, head.key_stride, 0, W, HS);
        attention_pack_by_dim_(s->v_by_dim, head.v, head.key_stride, W, head.capacity, HS);
        AttentionQueries_ tile;
        float largest = -INFINITY;
        for (int row = 0; row < sizes.T; row += tile.count) {
            tile = attention_queries_(sizes, row, MATMUL_TILE_ROWS);
            const int real = attention_real_rows_(pass, h, tile.t0, tile.count);
            largest = fmaxf(largest, attention_forward_tile_(&head, tile, real));
        }
        if (pass->largest) {
            attention_raise_largest(pass, h, largest);
        }
    }
}

// Square of a block of queries and keys u0 ... u1-1.
typedef struct {
    AttentionQueries_ block;
    int u0, u1;
} AttentionSquare_;

// Returns how many keys of the square a tile of its queries sees; none if that is 0 or less.
static int attention_tile_keys_(const AttentionSquare_* x, AttentionQueries_ tile) {
    return int_min(x->u1, tile.t0 + tile.count) - x->u0;
}

// Returns the tile of the block's queries that starts at its query i.
static AttentionQueries_ attention_tile(const AttentionQueries_* block, int i) {
    const int t0 = block->t0 + i;
    return (AttentionQueries_){block->row + i, t0,
                               int_min(MATMUL_TILE_ROWS - t0 % MATMUL_TILE_ROWS, block->count - i)};
}

// Turns scores and dp of a tile of queries, from the square's query i on, into p and ds.
static void attention_softmax_backward_tile_(const AttentionHeadCpu_* head, const AttentionSquare_* x,
                                             AttentionQueries_ tile, int i, const AttentionQuery_* queries) {
    const int end = x->u0 + int_round_up(attention_tile_keys_(x, tile), LANES);
    const int drops = dropout_is_on(&head->dropout), count = drops ? end - x->u0 : 0;
    float m[ATTENTION_SQUARE];
    for (; i < tile.row - x->block.row + tile.count; i++) {
        const size_t at = (size_t)i * ATTENTION_SQUARE;
        float *p = head->scratch->p + at, *ds = head->scratch->ds + at;
        if (drops) {
            dropout_factors_cpu(m, &head->dropout, x->block.row + i, x->u0, count);
        }
        for (int k = 0; k < count; k++) {
            ds[k] *= m[k];
        }
        if (head->scale.width > 0) {
            attention_softmax_backward_row_(p, ds, queries[i], x->u0, end, head->scale, 1);
        } else {
            attention_softmax_backward_row_(p, ds, queries[i], x->u0, end, head->scale, 0);
        }
        for (int k = 0; k < count; k++) {
            p[k] *= m[k];
        }
    }
}

// Sets p and ds of a square. All tiles of queries are multiplied with the keys, then with the
// values, while these are in the L1 cache.
static void attention_backward_scores_(const AttentionHeadCpu_* head, const AttentionSquare_* x,
                                       const AttentionQuery_* queries) {
    const AttentionScratch_* s = head->scratch;
    const int HS = head->HS;
    const size_t right = (size_t)x->u0 * HS, stride = head->out_stride;
    AttentionQueries_ tile;
    for (int i = 0; i < x->block.count; i += tile.count) {
        tile = attention_tile(&x->block, i);
        const AttentionRows_ p = {s->p + (size_t)i * ATTENTION_SQUARE, ATTENTION_SQUARE, tile.count};
        const Matrix q = {head->q + tile.row * head->stride, head->stride, 1};
        attention_scores_(p, q, s->k_by_key + right, attention_tile_keys_(x, tile), HS);
    }
    for (int i = 0; i < x->block.count; i += tile.count) {
        tile = attention_tile(&x->block, i);
        const AttentionRows_ dp = {s->ds + (size_t)i * ATTENTION_SQUARE, ATTENTION_SQUARE, tile.count};
        const Matrix dout = {head->dout + tile.row * stride, stride, 1};
        attention_scores_(dp, dout, s->v_by_key + right, attention_tile_keys_(x, tile), HS);
    }
    for (int i = 0; i < x->block.count; i += tile.count) {
        tile = attention_tile(&x->block, i);
        attention_softmax_backward_tile_(head, x, tile, i, queries);
    }
}

// Sets or adds to dq, according to `mode`, the square's part.
static void attention_backward_queries_(const AttentionHeadCpu_* head, const AttentionSquare_* x,
                                        GradientMode mode) {
    const AttentionScratch_* s = head->scratch;
    AttentionQueries_ tile;
    for (int i = 0; i < x->block.count; i += tile.count) {
        tile = attention_tile(&x->block, i);
        const int keys = attention_tile_keys_(x, tile);
        if (keys > 0) {
            const AttentionRows_ dq = {head->dq + tile.row * head->stride, head->stride, tile.count};
            const Matrix ds = {s->ds + (size_t)i * ATTENTION_SQUARE, ATTENTION_SQUARE, 1};
            attention_mix_(dq, ds, s->k_by_dim + (size_t)x->u0 * MATMUL_TILE_COLS, head->capacity, keys,
                           head->HS, mode);
        }
    }
}

// Adds the square's part of dk and dv. In a whole sequence, the first head of a group sets them for
// the keys at the square's own queries, because no earlier square has these.
static void attention_backward_keys_(const AttentionHeadCpu_* head, const AttentionSquare_* x) {
    const AttentionScratch_* s = head->scratch;
    const int HS = head->HS, t0 = x->block.t0;
    for (int u = x->u0; u < x->u1; u += MATMUL_TILE_ROWS) {
        const int i = int_max(0, u - t0); // first query of the first tile that sees u
        const int keys = int_min(MATMUL_TILE_ROWS, x->u1 - u), queries = x->block.count - i;
        const size_t at = (size_t)i * ATTENTION_SQUARE + u - x->u0, right = (size_t)i * MATMUL_TILE_COLS;
        const GradientMode mode = head->is_whole && head->is_first && u >= t0 ? GRADIENT_SET : GRADIENT_ADD;
        float *dk = head->dk + u * head->key_stride, *dv = head->dv + u * head->key_stride;
        attention_scatter_(dk, head->key_stride, s->ds + at, s->q_block + right, keys, queries, HS, mode);
        attention_scatter_(dv, head->key_stride, s->p + at, s->dout_block + right, keys, queries, HS, mode);
    }
}

// Returns the first key of the squares of queries from t0 on, and of all queries of an undivided
// block: so dq has the same bits.
static int attention_block_from_(const AttentionHeadCpu_* head, int t0) {
    return attention_from_(head->starts, t0 / ATTENTION_SQUARE * ATTENTION_SQUARE);
}

// Part of the backward pass of a head: the squares with keys u0 ... u1-1, and the gradients that
// are computed from them.
typedef struct {
    int u0, u1;
    int queries, keys; // true if dq, and dk and dv, are computed
} AttentionPart_;

// Processes a block of queries, up to ATTENTION_SQUARE: sets dq of these tokens, and sets or adds
// to dk and dv of them and of earlier ones. Blocks follow each other in a fixed order.
static void attention_backward_block_(const AttentionHeadCpu_* head, AttentionQueries_ block,
                                      const AttentionPart_* part) {
    const AttentionScratch_* s = head->scratch;
    const int HS = head->HS, row = block.row, count = block.count,
              from = attention_block_from_(head, block.t0), end = int_min(part->u1, block.t0 + count);
    const size_t stride = head->out_stride;
    AttentionQuery_ queries[ATTENTION_SQUARE];
    if (int_max(from, part->u0) >= end) {
        return;
    }
    for (int i = 0; i < count; i++) {
        queries[i] = (AttentionQuery_){attention_start_(head->starts, block.t0 + i), block.t0 + i,
                                       head->lse[row + i], attention_delta_(head, row + i)};
    }
    if (part->keys) {
        attention_pack_by_dim_(s->q_block, head->q + row * head->stride, head->stride, count,
                               ATTENTION_SQUARE, HS);
        attention_pack_by_dim_(s->dout_block, head->dout + row * stride, stride, count, ATTENTION_SQUARE, HS);
    }
    for (int u = int_max(from, part->u0); u < end; u += ATTENTION_SQUARE) {
        const AttentionSquare_ x = {block, u, int_min(u + ATTENTION_SQUARE, end)};
        attention_backward_scores_(head, &x, queries);
        if (part->queries) {
            attention_backward_queries_(head, &x, u == from ? GRADIENT_SET : GRADIENT_ADD);
        }
        if (part->keys) {
            attention_backward_keys_(head, &x);
        }
    }
}

// Packs the keys and values that a part reads.
static void attention_backward_pack_(const AttentionHeadCpu_* head, const AttentionPart_* part) {
    const AttentionScratch_* s = head->scratch;
    attention_pack_by_key_(s->k_by_key, head->k, head->key_stride, part->u0, part->u1, head->HS);
    attention_pack_by_key_(s->v_by_key, head->v, head->key_stride, part->u0, part->u1, head->HS);
    if (part->queries) {
        attention_pack_by_dim_(s->k_by_dim + (size_t)part->u0 * MATMUL_TILE_COLS,
                               head->k + part->u0 * head->key_stride, head->key_stride, part->u1 - part->u0,
                               head->capacity, head->HS);
    }
}

// Clears dk and dv of a part: not every key has a query among the rank's.
static void attention_backward_clear_(const AttentionHeadCpu_* head, const AttentionPart_* part) {
    for (int u = part->u0; u < part->u1; u++) {
        memset(head->dk + u * head->key_stride, 0, (size_t)head->HS * sizeof(float));
        memset(head->dv + u * head->key_stride, 0, (size_t)head->HS * sizeof(float));
    }
}

// Computes a part for all heads of group `index` of B * KV, one after the other.
static void attention_backward_group_(const AttentionHeads_* heads, int index, AttentionPart_ part) {
    const int T = heads->sizes.T, group = attention_group(heads->sizes);
    for (int h = index * group; h < (index + 1) * group; h++) {
        const AttentionHeadCpu_ head = attention_head_cpu_(heads, h);
        if (head.is_first) {
            attention_backward_pack_(&head, &part);
        }
        if (head.is_first && !head.is_whole) {
            attention_backward_clear_(&head, &part);
        }
        AttentionQueries_ block;
        for (int row = 0; row < T; row += block.count) {
            block = attention_queries_(heads->sizes, row, ATTENTION_SQUARE);
            attention_backward_block_(&head, block, &part);
        }
    }
}

// Computes dq of ATTENTION_SQUARE queries of head `index` of B * NH, from `row` on.
static void attention_backward_head_queries_(const AttentionHeads_* heads, int index, int row) {
    const AttentionHeadCpu_ head = attention_head_cpu_(heads, index);
    const int end = int_min(row + ATTENTION_SQUARE, heads->sizes.T);
    AttentionQueries_ block;
    for (; row < end; row += block.count) {
        block = attention_queries_(heads->sizes, row, ATTENTION_SQUARE);
        block.count = int_min(block.count, end - row);
        const AttentionPart_ part = {attention_block_from_(&head, block.t0), block.t0 + block.count, 1, 0};
        attention_backward_pack_(&head, &part);
        attention_backward_block_(&head, block, &part);
    }
}

// Divides a backward pass by keys for dk and dv, then by queries for dq.
static void attention_backward_divided_(const AttentionHeads_* heads) {
    const AttentionSizes sizes = heads->sizes;
    const int W = attention_keys(sizes), key_blocks = int_ceil_div(W, ATTENTION_SQUARE),
              blocks = int_ceil_div(sizes.T, ATTENTION_SQUARE);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic) nowait
        for (int i = 0; i < sizes.B * sizes.KV * key_blocks; i++) {
            const int u = i % key_blocks * ATTENTION_SQUARE;
            const AttentionPart_ part = {u, int_min(u + ATTENTION_SQUARE, W), 0, 1};
            attention_backward_group_(heads, i / key_blocks, part);
        }
#pragma omp for schedule(dynamic)
        // the last queries see the most keys
        for (int i = 0; i < sizes.B * sizes.NH * blocks; i++) {
            attention_backward_head_queries_(heads, i / blocks, (blocks - 1 - i % blocks) * ATTENTION_SQUARE);
        }
    }
}

void attention_backward_cpu(const AttentionGradients* d, const AttentionPass* pass,
                            AttentionScratch* scratch) {
    const AttentionHeads_ heads = {pass->sizes, pass, d, scratch};
    const int groups = pass->sizes.B * pass->sizes.KV;
    attention_check_(pass, scratch);
    if (attention_backward_divides(groups, threads_max())) {
        attention_backward_divided_(&heads);
        return;
    }
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < groups; i++) {
        attention_backward_group_(&heads, i, (AttentionPart_){0, attention_keys(pass->sizes), 1, 1});
    }
}

void attention_cache_store_cpu(AttentionCache cache, const float* qkv, int b, int first, int count,
                               AttentionSizes sizes) {
    const size_t HS = (size_t)sizes.HS, KHS = (size_t)attention_keys_size(sizes),
                 QKV = (size_t)attention_qkv_size(sizes);
    for (int j = 0; j < sizes.KV; j++) {
        float* keys = cache.data + attention_cache_at_(cache.maxT, b, j, sizes) + first * HS;
        float* values = keys + attention_cache_values_(cache.maxT, sizes);
        for (int t = 0; t < count; t++) {
            const float* k = qkv + t * QKV + attention_queries_size(sizes) + j * HS;
            memcpy(keys + t * HS, k, HS * sizeof(float));
            memcpy(values + t * HS, k + KHS, HS * sizeof(float));
        }
    }
}

// Sets scores[u ... u+LANES-1] to those of LANES keys; lanes after `last` repeat the last key.
static void attention_cached_scores_(float* scores, const float* q, const float* keys, int u, int last,
                                     int HS, AttentionScale scale) {
    Vec sum[LANES];
    float rest[LANES] = {0}; // sums over the dimensions that fill no vector
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
    if (scale.width > 0) {
        total = softcap_tanh_vec(total, scale.width);
    }
    vec_store(scores + u, total * scale.factor);
}

// Replaces scores by exp(score - max), and by 0 from `keys` on, up to the end of a vector. Returns
// their sum, and sets lse.
static float attention_cached_softmax_(float* scores, int keys, float* lse) {
    Vec max = vec_all(-INFINITY), sum = vec_all(0.0f);
    for (int u = 0; u < keys; u += LANES) {
        // scores after the last key are copies of its score
        max = vec_max(vec_load(scores + u), max);
    }
    const float shift = vec_hmax(max);
    for (int u = 0; u < keys; u += LANES) {
        const Vec p = vec_select(vec_first(keys - u), vec_exp(vec_load(scores + u) - shift), vec_all(0.0f));
        vec_store(scores + u, p);
        sum += p;
    }
    *lse = shift + logf(vec_hsum(sum));
    return vec_hsum(sum);
}

// Sets out (HS) = weights (keys) . values (keys, HS) / sum.
static void attention_cached_mix_(float* out, const float* weights, const float* values, int keys, int HS,
                                  float sum) {
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

// Sets out and lse of head i of all queries, which sees `count` keys (count, HS) and their values.
static void attention_cached_head_(const AttentionPass* pass, int i, const float* keys, const float* values,
                                   int count, float* scores) {
    const AttentionSizes sizes = pass->sizes;
    const float* q =
        pass->qkv + (size_t)(i / sizes.NH) * attention_qkv_size(sizes) + (size_t)(i % sizes.NH) * sizes.HS;
    for (int u = 0; u < count; u += LANES) {
        attention_cached_scores_(scores, q, keys, u, count - 1, sizes.HS,
                                 attention_scale(sizes.root, sizes.cap));
    }
    const float sum = attention_cached_softmax_(scores, count, pass->lse + i);
    attention_cached_mix_(pass->out + (size_t)i * sizes.HS, scores, values, count, sizes.HS, sum);
}

void attention_cached_cpu(const AttentionPass* pass, const int* positions, int window, AttentionCache cache,
                          AttentionScratch* scratch) {
    const AttentionSizes sizes = pass->sizes;
    const int NH = sizes.NH, HS = sizes.HS;
    assert(sizes.T == 1 && cache.maxT <= scratch->T && HS == scratch->HS && NH % sizes.KV == 0);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < sizes.B * NH; i++) {
        const int b = i / NH, h = i % NH, first = attention_cached_first(positions[b], window);
        const float* k = cache.data + (size_t)first * HS +
                         attention_cache_at_(cache.maxT, b, h / attention_group(sizes), sizes);
        attention_cached_head_(pass, i, k, k + attention_cache_values_(cache.maxT, sizes),
                               positions[b] + 1 - first, scratch->of_thread[thread_index()].row_p);
    }
}

#endif // ATTENTION_IMPLEMENTATION

#endif
