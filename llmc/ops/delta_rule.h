/*
delta_rule.h -- the gated delta rule, linear attention whose cache is one matrix a head: the
contract, and the CPU version.

For each token, value head h has a query and a key of key head h Hk / Hv, rounded down, and

    q = x_q / |x_q| / sqrt(dk)   k = x_k / |x_k|       |x|^2 = sum x^2 + 1e-6
    f = exp(g)                   g = -exp(A_log) softplus(a + dt_bias)
    beta = sigmoid(b)

The state S (dk, dv) decays, and is corrected where it is wrong at k:

    P = f S      u = beta (v - P^T k)      S' = P + k u^T      out = S'^T q

It is 0 before the first token of a document.

    qkv, dqkv         (N, R)            R = 2 Hk dk + Hv dv: the columns of x_q, of x_k, and of v
    ba, dba           (N, 2 Hv)         b in the first Hv columns, then a
    A_log, dt_bias    (Hv)              fp32, and their gradients
    out, dout         (N, Hv dv)        N = B*T
    starts            (B, T)            int32, position in the row where the document of token t
                                        starts; NULL: the row is one document
    state             (B, Hv, dk, dv)   fp32

delta_rule_forward sets out, and `state` after the last token of each sequence unless it is NULL.
delta_rule_backward sets dqkv and dba, and sets or adds to dA_log and ddt_bias, unless they are
NULL, according to `mode`; it computes the states again from the inputs. dk and dv are multiples of
8, up to DELTA_RULE_WIDEST. delta_rule_step, with T = 1, reads one more token of each sequence, and
updates `state`.

Both passes go from chunk to chunk of C = 64 tokens. In a chunk with the state S0 before it, with
rows for tokens and D[i][j] the product of f of tokens j+1 ... i (1 for i = j, 0 for i < j):

    A[i][j] = beta_i D[i][j] k_i.k_j for i > j      P[i][j] = D[i][j] q_i.k_j
    (I + A) U = diag(beta) (V - diag(carry) K S0)   carry[i]: the product of f of tokens 0 ... i
    out = diag(carry) Q S0 + P U
    S1 = carry[C-1] S0 + (diag(keep) K)^T U         keep[j] = D[C-1][j]

A token that starts a document has f = 0, which separates documents in D, carry and keep. The
backward pass, given dS1:

    dU = P^T dout + diag(keep) K dS1                (I + A)^T dR = dU
    dP = tril(dout U^T) D                           M = -diag(beta) tril(dR U^T, -1) D
    dV = diag(beta) dR                              db_i = (1 - beta_i) dR_i . U_i
    dQ = diag(carry) dout S0^T + dP K
    dK = row + col                                  row = M K - diag(beta carry) dR S0^T
                                                    col = dP^T Q + M^T K + diag(keep) U dS1^T
    N[i][j] = (dout U^T)[i][j] P[i][j] - (dR U^T)[i][j] A[i][j] for i > j
    dG_i = sum_j N[i][j] - sum_j N[j][i] + q_i.dQ_i + k_i.row_i - k_i.col_i, of these three only the
           terms with a state; dG_C-1 += <dS1, S1>
    dg_t = sum of dG_i, i >= t of the chunk and the document
    dS0 = carry[C-1] dS1 + (diag(carry) Q)^T dout - (diag(beta carry) K)^T dR

All matmuls are tiles of matmul.h. A thread processes a value head of a sequence, in the backward
pass the value heads of a key head, one after the other: the order of all sums is fixed.

Yang, Kautz and Hatamizadeh, "Gated delta networks", 2024; chunks: Yang et al., "Parallelizing
linear transformers with the delta rule over sequence length", 2024; as in Qwen3-Next, 2025.
*/
#ifndef LLMC_DELTA_RULE_H
#define LLMC_DELTA_RULE_H

#include <stddef.h>

#include "llmc/base/memory.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { DELTA_RULE_CHUNK = 64, DELTA_RULE_WIDEST = 256 };

#define DELTA_RULE_EPS 1e-6f // of |x|^2

typedef struct {
    int B, T;   // sequences, and their tokens
    int Hk, Hv; // heads of queries and keys; heads of values, a multiple of Hk
    int dk, dv; // columns of a query or key; of a value
} DeltaSizes;

// Return the columns of a row of qkv, and of out; and the elements of the state of a sequence.
static inline int delta_rule_columns(DeltaSizes s) { return 2 * s.Hk * s.dk + s.Hv * s.dv; }
static inline int delta_rule_out_columns(DeltaSizes s) { return s.Hv * s.dv; }
static inline size_t delta_rule_state_size(DeltaSizes s) { return (size_t)s.Hv * s.dk * s.dv; }

// Returns the FLOP of a forward pass: four matmuls with states, and four halves inside of chunks.
// The backward pass takes three times as many.
static inline double delta_rule_forward_flops(DeltaSizes s) {
    const double tokens = (double)s.B * s.T * s.Hv;
    return 2 * tokens * (3.0 * s.dk * s.dv + DELTA_RULE_CHUNK * (s.dk + s.dv));
}

// Arrays that passes read, and that the forward pass sets.
typedef struct {
    DeltaSizes sizes;
    const int* starts; // or NULL
    const float *qkv, *ba, *A_log, *dt_bias;
    float *out, *state; // state: or NULL
} DeltaPass;

typedef struct {
    const float* dout;
    float *dqkv, *dba, *dA_log, *ddt_bias;
    GradientMode mode;
} DeltaGradients;

// Working memory of one thread; the squares are (CHUNK, CHUNK), the rows (CHUNK, DELTA_ROW_).
typedef struct {
    float *q, *k, *u, *dr, *dq, *dk; // rows
    float *decay, *a, *p, *dp, *m;   // squares: D, -A, P, dP, M
    float *k_by_token, *u_by_token;  // right matrices of k^T and U^T
    float *s_by_dim, *ds_by_dim;     // panels of S^T and dS^T
    float *ds, *states, *values;     // dS; the states between chunks; U of all chunks
} DeltaScratch_;

typedef struct {
    DeltaScratch_* of_thread;
    float* sums; // (B, Hv, 2): the parts of dA_log and ddt_bias
    DeltaSizes sizes;
} DeltaScratch;

// Allocates scratch for passes of up to T tokens in a sequence, for as many threads as the next
// parallel region would have; a backward pass goes over B sequences at a time. T = 0: for no
// backward pass.
void delta_rule_open(DeltaScratch* scratch, Memory* memory, DeltaSizes sizes);

void delta_rule_forward_cpu(const DeltaPass* pass, DeltaScratch* scratch);

void delta_rule_backward_cpu(const DeltaGradients* d, const DeltaPass* pass, DeltaScratch* scratch);

void delta_rule_step_cpu(const DeltaPass* pass);

#ifdef __cplusplus
}
#endif

#ifdef DELTA_RULE_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <string.h>

#include "llmc/base/sizes.h"
#include "llmc/base/threads.h"
#include "llmc/base/vec.h"
#include "llmc/ops/matmul.h"

enum {
    DELTA_C_ = DELTA_RULE_CHUNK,
    // distance of rows, a constant because left matrices are also read transposed, and not a power
    // of two, so that the rows lie in different sets of the L1 cache
    DELTA_ROW_ = DELTA_RULE_WIDEST + 16,
    DELTA_COLS_ = MATMUL_TILE_COLS,
    DELTA_PARTS_ = 18,    // arrays in DeltaScratch_
    DELTA_STEP_COLS_ = 64 // columns of a state that a step updates at a time
};

static_assert(DELTA_C_ % DELTA_COLS_ == 0, "a chunk is whole panels");

// Returns n rounded up to whole panels.
static int delta_padded_(int n) { return int_round_up(n, DELTA_COLS_); }

static size_t delta_state_floats_(DeltaSizes s) { return (size_t)s.dk * delta_padded_(s.dv); }

// ---- memory ----

// Sets the size of each array, in floats, in the order of the struct; returns their sum.
static size_t delta_parts_(size_t parts[DELTA_PARTS_], DeltaSizes s) {
    const size_t rows = DELTA_C_ * DELTA_ROW_, square = DELTA_C_ * DELTA_C_, state = delta_state_floats_(s),
                 values = (size_t)DELTA_C_ * delta_padded_(s.dv), panel = (size_t)s.dv * DELTA_COLS_,
                 chunks = (size_t)int_ceil_div(s.T, DELTA_C_), trains = chunks > 0;
    const size_t sizes[DELTA_PARTS_] = {rows,
                                        rows,
                                        trains * rows,
                                        trains * rows,
                                        trains * rows,
                                        trains * rows,
                                        square,
                                        square,
                                        square,
                                        trains * square,
                                        trains * square,
                                        (size_t)s.dk * DELTA_C_,
                                        trains * s.dv * DELTA_C_,
                                        trains * panel,
                                        trains * panel,
                                        trains * state,
                                        (chunks + 1) * state,
                                        chunks * values};
    size_t sum = 0;
    for (int i = 0; i < DELTA_PARTS_; i++) {
        parts[i] = sizes[i];
        sum += sizes[i];
    }
    return sum;
}

void delta_rule_open(DeltaScratch* scratch, Memory* memory, DeltaSizes sizes) {
    size_t parts[DELTA_PARTS_];
    const size_t threads = (size_t)threads_max(), sums = (size_t)sizes.B * sizes.Hv * 2,
                 floats = sums + threads * delta_parts_(parts, sizes);
    float* at = (float*)memory_take(memory, "scratch: delta rule", MEMORY_DEVICE, floats * sizeof(float));
    scratch->of_thread = (DeltaScratch_*)memory_take(memory, "scratch: delta rule", MEMORY_DEVICE,
                                                     threads * sizeof(DeltaScratch_));
    scratch->sizes = sizes;
    scratch->sums = at;
    at = at ? at + sums : NULL;
    for (size_t i = 0; i < threads && at; i++) {
        DeltaScratch_* s = &scratch->of_thread[i];
        float** const arrays[DELTA_PARTS_] = {
            &s->q,          &s->k,        &s->u,         &s->dr, &s->dq,     &s->dk,
            &s->decay,      &s->a,        &s->p,         &s->dp, &s->m,      &s->k_by_token,
            &s->u_by_token, &s->s_by_dim, &s->ds_by_dim, &s->ds, &s->states, &s->values};
        for (int j = 0; j < DELTA_PARTS_; j++) {
            *arrays[j] = at;
            at += parts[j];
        }
    }
}

// ---- matmuls of a chunk ----

// Sets or adds to out(rows, cols) left(rows, k) panel(k), for a left matrix of rows.
static void delta_product_(float* out, size_t stride, int rows, int cols, Matrix left, const float* panel,
                           int k, GradientMode mode) {
    for (int i = 0; i < rows; i += MATMUL_TILE_ROWS) {
        matmul_rows(out + i * stride, stride, int_min(MATMUL_TILE_ROWS, rows - i), cols,
                    matrix_at(left, i, 0), panel, k, NULL, mode);
    }
}

// Sets or adds to out(rows, cols) square panel, for a square whose elements above the diagonal are
// 0.
static void delta_lower_(float* out, size_t stride, int rows, int cols, const float* square,
                         const float* panel, GradientMode mode) {
    for (int i = 0; i < rows; i += MATMUL_TILE_ROWS) {
        const Matrix left = {square + i * DELTA_C_, DELTA_C_, 1};
        matmul_rows(out + i * stride, stride, int_min(MATMUL_TILE_ROWS, rows - i), cols, left, panel,
                    int_min(i + MATMUL_TILE_ROWS, rows), NULL, mode);
    }
}

// Adds to out(rows, COLS) square^T panel. Not inlined, as matmul_rows.
__attribute__((noinline)) static void delta_lower_transposed_(float* out, int rows, const float* square,
                                                              const float* panel) {
    for (int j = 0; j < rows; j += MATMUL_TILE_ROWS) {
        matmul_rows_transposed(out + j * DELTA_COLS_, DELTA_COLS_, int_min(MATMUL_TILE_ROWS, rows - j),
                               DELTA_COLS_, square + j * DELTA_C_ + j, DELTA_C_, panel + j * DELTA_COLS_,
                               rows - j, GRADIENT_ADD);
    }
}

// Adds to a panel of a state (dk, COLS) rows^T panel, for `count` rows of dk columns.
__attribute__((noinline)) static void delta_outer_(float* state, const float* rows, const float* panel,
                                                   int count, int dk) {
    for (int i = 0; i < dk; i += MATMUL_TILE_ROWS) {
        matmul_rows_transposed(state + i * DELTA_COLS_, DELTA_COLS_, int_min(MATMUL_TILE_ROWS, dk - i),
                               DELTA_COLS_, rows + i, DELTA_ROW_, panel, count, GRADIENT_ADD);
    }
}

// Sets the lower half of a square, and more of its panels, to left right^T; left: rows of k
// columns.
static void delta_dots_(float* square, Matrix left, const float* right_by_token, int count, int k) {
    for (int j = 0; j < count; j += DELTA_COLS_) {
        delta_product_(square + j * DELTA_C_ + j, DELTA_C_, count - j, DELTA_COLS_, matrix_at(left, j, 0),
                       right_by_token + (size_t)j * k, k, GRADIENT_SET);
    }
}

// Packs rows^T, `count` rows of k columns, as a right matrix.
static void delta_pack_by_token_(float* to, const float* rows, int count, int k) {
    for (int j = 0; j < count; j += DELTA_COLS_) {
        matmul_pack_panel(to + (size_t)j * k, (Matrix){rows, 1, DELTA_ROW_}, 0, j, k,
                          int_min(DELTA_COLS_, count - j));
    }
}

// Packs columns d ... d+COLS-1 of rows, or as many as there are.
static void delta_pack_by_dim_(float* to, const float* rows, size_t stride, int count, int d, int columns) {
    matmul_pack_panel(to, (Matrix){rows, stride, 1}, 0, d, count, int_min(DELTA_COLS_, columns - d));
}

// Sets row i of `to` to factor[i] times row i of a panel; they may be the same.
static void delta_scale_(float* to, const float* panel, const float* factor, int count) {
    for (int i = 0; i < count; i++) {
        for (int c = 0; c < DELTA_COLS_; c++) {
            to[i * DELTA_COLS_ + c] = factor[i] * panel[i * DELTA_COLS_ + c];
        }
    }
}

// Adds factor times panel row j to row i.
ALWAYS_INLINE void delta_add_row_(float* panel, int i, int j, float factor) {
    for (int c = 0; c < DELTA_COLS_; c++) {
        panel[i * DELTA_COLS_ + c] += factor * panel[j * DELTA_COLS_ + c];
    }
}

// Solves (I + A) x = panel in place, given a = -A.
static void delta_solve_(float* panel, const float* a, int count) {
    for (int i0 = 0; i0 < count; i0 += MATMUL_TILE_ROWS) {
        const int end = int_min(i0 + MATMUL_TILE_ROWS, count);
        if (i0 > 0) {
            matmul_rows(panel + i0 * DELTA_COLS_, DELTA_COLS_, end - i0, DELTA_COLS_,
                        (Matrix){a + i0 * DELTA_C_, DELTA_C_, 1}, panel, i0, NULL, GRADIENT_ADD);
        }
        for (int i = i0 + 1; i < end; i++) {
            for (int j = i0; j < i; j++) {
                delta_add_row_(panel, i, j, a[i * DELTA_C_ + j]);
            }
        }
    }
}

// Solves (I + A)^T x = panel in place.
__attribute__((noinline)) static void delta_solve_transposed_(float* panel, const float* a, int count) {
    for (int j0 = (count - 1) / MATMUL_TILE_ROWS * MATMUL_TILE_ROWS; j0 >= 0; j0 -= MATMUL_TILE_ROWS) {
        const int end = int_min(j0 + MATMUL_TILE_ROWS, count);
        if (end < count) {
            matmul_rows_transposed(panel + j0 * DELTA_COLS_, DELTA_COLS_, end - j0, DELTA_COLS_,
                                   a + end * DELTA_C_ + j0, DELTA_C_, panel + end * DELTA_COLS_, count - end,
                                   GRADIENT_ADD);
        }
        for (int j = end - 2; j >= j0; j--) {
            for (int i = j + 1; i < end; i++) {
                delta_add_row_(panel, j, i, a[i * DELTA_C_ + j]);
            }
        }
    }
}

// ---- a chunk ----

// A value head of a sequence: its first token in each array.
typedef struct {
    DeltaSizes sizes;
    const int* starts;
    const float *q, *k, *v, *b, *a, *dout;
    float *out, *dq, *dk, *dv, *db, *da;
    float A, dt_bias;            // A = -exp(A_log)
    size_t row, out_row, ba_row; // distances of tokens
    DeltaScratch_* scratch;      // of the thread
} DeltaHead_;

// Tokens t0 ... t0+count-1 of a value head.
typedef struct {
    int t0, count;
    int has_past, has_next; // documents that started before, or continue after it
    // r = 1 / |x|; the others as above; slope: the derivative of g by a
    float rq[DELTA_C_], rk[DELTA_C_], f[DELTA_C_], g[DELTA_C_], slope[DELTA_C_], beta[DELTA_C_],
        carry[DELTA_C_], keep[DELTA_C_];
} DeltaChunk_;

static int delta_is_start_(const DeltaHead_* head, int t) {
    return head->starts ? head->starts[t] == t : t == 0;
}

static DeltaHead_ delta_head_(const DeltaPass* pass, const DeltaGradients* d, int b, int h,
                              DeltaScratch_* scratch) {
    const DeltaSizes s = pass->sizes;
    const size_t token = (size_t)b * s.T, row = (size_t)delta_rule_columns(s), out_row = (size_t)s.Hv * s.dv,
                 ba_row = 2 * (size_t)s.Hv, key_head = (size_t)(h / (s.Hv / s.Hk)),
                 q = token * row + key_head * s.dk, k = q + (size_t)s.Hk * s.dk,
                 v = token * row + 2 * (size_t)s.Hk * s.dk + (size_t)h * s.dv,
                 out = token * out_row + (size_t)h * s.dv, gate = token * ba_row + (size_t)h;
    DeltaHead_ head = {.sizes = s,
                       .starts = pass->starts ? pass->starts + token : NULL,
                       .q = pass->qkv + q,
                       .k = pass->qkv + k,
                       .v = pass->qkv + v,
                       .b = pass->ba + gate,
                       .a = pass->ba + gate + s.Hv,
                       .out = pass->out + out,
                       .A = -expf(pass->A_log[h]),
                       .dt_bias = pass->dt_bias[h],
                       .row = row,
                       .out_row = out_row,
                       .ba_row = ba_row,
                       .scratch = scratch};
    if (d) {
        head.dout = d->dout + out;
        head.dq = d->dqkv + q, head.dk = d->dqkv + k, head.dv = d->dqkv + v;
        head.db = d->dba + gate, head.da = d->dba + gate + s.Hv;
    }
    return head;
}

// Sets y = scale x / |x|; returns 1 / |x|.
static float delta_unit_(float* y, const float* x, float scale, int n) {
    const float r = 1.0f / sqrtf(vec_dot(x, x, n) + DELTA_RULE_EPS);
    for (int i = 0; i < n; i++) {
        y[i] = r * scale * x[i];
    }
    return r;
}

static float delta_sigmoid_(float x) { return 1.0f / (1.0f + expf(-x)); }

// Sets the gates of token i of a chunk.
static void delta_gates_(DeltaChunk_* x, const DeltaHead_* head, int i) {
    const size_t at = (size_t)(x->t0 + i) * head->ba_row;
    const float a = head->a[at] + head->dt_bias, softplus = a > 20 ? a : log1pf(expf(a));
    x->g[i] = head->A * softplus;
    x->f[i] = delta_is_start_(head, x->t0 + i) ? 0.0f : expf(x->g[i]);
    x->slope[i] = head->A * delta_sigmoid_(a);
    x->beta[i] = delta_sigmoid_(head->b[at]);
}

// Sets D, carry and keep. Products of f, not exponentials of sums of g: so a document's start is 0.
static void delta_decays_(DeltaChunk_* x, float* decay) {
    memset(decay, 0, DELTA_C_ * DELTA_C_ * sizeof(float));
    for (int i = 0; i < x->count; i++) {
        float* row = decay + i * DELTA_C_;
        x->carry[i] = (i > 0 ? x->carry[i - 1] : 1.0f) * x->f[i];
        for (int j = 0; j < i; j++) {
            row[j] = x->f[i] * row[j - DELTA_C_];
        }
        row[i] = 1;
    }
    memcpy(x->keep, decay + (x->count - 1) * DELTA_C_, sizeof(x->keep));
}

// Multiplies the lower half of a square by D and, if it is not NULL, row i by factor[i]. `first` is
// 0 with the diagonal, 1 without. The rest becomes 0.
static void delta_mask_(float* square, const float* decay, const float* factor, int count, int first) {
    for (int i = 0; i < count; i++) {
        float* row = square + i * DELTA_C_;
        const float scale = factor ? factor[i] : 1.0f;
        for (int j = 0; j <= i - first; j++) {
            row[j] *= scale * decay[i * DELTA_C_ + j];
        }
        memset(row + i - first + 1, 0, (size_t)(DELTA_C_ - 1 - i + first) * sizeof(float));
    }
}

// Reads the chunk from t0 on: its gates, k and -A, with has_q also q and P.
static void delta_chunk_open_(DeltaChunk_* x, const DeltaHead_* head, int t0, int has_q) {
    const DeltaScratch_* s = head->scratch;
    const int dk = head->sizes.dk, T = head->sizes.T, count = int_min(DELTA_C_, T - t0);
    const Matrix q = {s->q, DELTA_ROW_, 1}, k = {s->k, DELTA_ROW_, 1};
    float negative[DELTA_C_];
    x->t0 = t0;
    x->count = count;
    x->has_past = !delta_is_start_(head, t0);
    x->has_next = t0 + count < T && !delta_is_start_(head, t0 + count);
    for (int i = 0; i < count; i++) {
        const size_t at = (size_t)(t0 + i) * head->row;
        x->rk[i] = delta_unit_(s->k + i * DELTA_ROW_, head->k + at, 1, dk);
        if (has_q) {
            x->rq[i] = delta_unit_(s->q + i * DELTA_ROW_, head->q + at, 1 / sqrtf((float)dk), dk);
        }
        delta_gates_(x, head, i);
        negative[i] = -x->beta[i];
    }
    delta_decays_(x, s->decay);
    delta_pack_by_token_(s->k_by_token, s->k, count, dk);
    delta_dots_(s->a, k, s->k_by_token, count, dk);
    delta_mask_(s->a, s->decay, negative, count, 1);
    if (has_q) {
        delta_dots_(s->p, q, s->k_by_token, count, dk);
        delta_mask_(s->p, s->decay, NULL, count, 0);
    }
}

// Sets U (count, COLS) for columns d, ... of values, given the panel of the state with these
// columns.
static void delta_values_(float* u, const DeltaChunk_* x, const DeltaHead_* head, const float* state, int d) {
    const DeltaScratch_* s = head->scratch;
    const int count = x->count;
    float known[DELTA_C_ * DELTA_COLS_];
    delta_pack_by_dim_(u, head->v + x->t0 * head->row, head->row, count, d, head->sizes.dv);
    if (x->has_past) {
        delta_product_(known, DELTA_COLS_, count, DELTA_COLS_, (Matrix){s->k, DELTA_ROW_, 1}, state,
                       head->sizes.dk, GRADIENT_SET);
        for (int i = 0; i < count; i++) {
            for (int c = i * DELTA_COLS_; c < (i + 1) * DELTA_COLS_; c++) {
                u[c] -= x->carry[i] * known[c];
            }
        }
    }
    delta_scale_(u, u, x->beta, count);
    delta_solve_(u, s->a, count);
}

// Sets out for these columns.
static void delta_out_(const DeltaChunk_* x, const DeltaHead_* head, const float* state, const float* u,
                       int d) {
    const DeltaScratch_* s = head->scratch;
    const int count = x->count, cols = int_min(DELTA_COLS_, head->sizes.dv - d);
    float* out = head->out + x->t0 * head->out_row + d;
    if (x->has_past) {
        float of_state[DELTA_C_ * DELTA_COLS_];
        delta_product_(of_state, DELTA_COLS_, count, DELTA_COLS_, (Matrix){s->q, DELTA_ROW_, 1}, state,
                       head->sizes.dk, GRADIENT_SET);
        delta_scale_(of_state, of_state, x->carry, count);
        for (int i = 0; i < count; i++) {
            memcpy(out + i * head->out_row, of_state + i * DELTA_COLS_, (size_t)cols * sizeof(float));
        }
    }
    delta_lower_(out, head->out_row, count, cols, s->p, u, x->has_past ? GRADIENT_ADD : GRADIENT_SET);
}

// Sets a panel of the state after the chunk; it may be that of the state before.
static void delta_next_(float* next, const DeltaChunk_* x, const DeltaHead_* head, const float* state,
                        const float* u) {
    const int dk = head->sizes.dk;
    const float carry = x->carry[x->count - 1];
    float kept[DELTA_C_ * DELTA_COLS_];
    for (int i = 0; i < dk * DELTA_COLS_; i++) {
        next[i] = x->has_past ? carry * state[i] : 0.0f;
    }
    delta_scale_(kept, u, x->keep, x->count);
    delta_outer_(next, head->scratch->k, kept, x->count, dk);
}

// ---- forward ----

// Copies the state (dk, dv) from its panels.
static void delta_state_copy_(float* to, const float* panels, DeltaSizes s) {
    for (int d = 0; d < s.dv; d += DELTA_COLS_) {
        for (int i = 0; i < s.dk; i++) {
            memcpy(to + (size_t)i * s.dv + d, panels + ((size_t)d * s.dk + i * DELTA_COLS_),
                   (size_t)int_min(DELTA_COLS_, s.dv - d) * sizeof(float));
        }
    }
}

static void delta_check_(const DeltaPass* pass) {
    const DeltaSizes s = pass->sizes;
    assert(s.Hv % s.Hk == 0 && s.dk % 8 == 0 && s.dv % 8 == 0 && s.dk <= DELTA_RULE_WIDEST &&
           s.dv <= DELTA_RULE_WIDEST);
    (void)s;
}

void delta_rule_forward_cpu(const DeltaPass* pass, DeltaScratch* scratch) {
    const DeltaSizes s = pass->sizes;
    delta_check_(pass);
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < s.B * s.Hv; i++) {
        const DeltaHead_ head =
            delta_head_(pass, NULL, i / s.Hv, i % s.Hv, &scratch->of_thread[thread_index()]);
        float *states = head.scratch->states, u[DELTA_C_ * DELTA_COLS_];
        for (int t = 0; t < s.T; t += DELTA_C_) {
            DeltaChunk_ x;
            delta_chunk_open_(&x, &head, t, 1);
            for (int d = 0; d < s.dv; d += DELTA_COLS_) {
                float* state = states + (size_t)d * s.dk;
                delta_values_(u, &x, &head, state, d);
                delta_out_(&x, &head, state, u, d);
                delta_next_(state, &x, &head, state, u);
            }
        }
        if (pass->state) {
            delta_state_copy_(pass->state + (size_t)i * s.dk * s.dv, states, s);
        }
    }
}

// ---- backward ----

// Sets the states between chunks, and U of each.
static void delta_states_(const DeltaHead_* head) {
    const DeltaSizes s = head->sizes;
    const size_t state_floats = delta_state_floats_(s);
    for (int t = 0; t < s.T; t += DELTA_C_) {
        float *state = head->scratch->states + (size_t)(t / DELTA_C_) * state_floats,
              *values = head->scratch->values + (size_t)t * delta_padded_(s.dv);
        DeltaChunk_ x;
        delta_chunk_open_(&x, head, t, 0);
        for (int d = 0; d < s.dv; d += DELTA_COLS_) {
            float *u = values + d * DELTA_C_, *panel = state + (size_t)d * s.dk;
            delta_values_(u, &x, head, panel, d);
            delta_next_(panel + state_floats, &x, head, panel, u);
        }
    }
}

// Copies a panel into columns d, ... of rows.
static void delta_to_rows_(float* rows, const float* panel, int count, int d) {
    for (int i = 0; i < count; i++) {
        memcpy(rows + i * DELTA_ROW_ + d, panel + i * DELTA_COLS_, DELTA_COLS_ * sizeof(float));
    }
}

// Sets dV, and the rows of U and of dR.
static void delta_values_backward_(const DeltaChunk_* x, const DeltaHead_* head, const float* values) {
    const DeltaScratch_* s = head->scratch;
    const int dv = head->sizes.dv, dk = head->sizes.dk, count = x->count;
    float dout[DELTA_C_ * DELTA_COLS_], dr[DELTA_C_ * DELTA_COLS_];
    for (int d = 0; d < dv; d += DELTA_COLS_) {
        const int cols = int_min(DELTA_COLS_, dv - d);
        delta_pack_by_dim_(dout, head->dout + x->t0 * head->out_row, head->out_row, count, d, dv);
        memset(dr, 0, sizeof(dr));
        if (x->has_next) {
            delta_product_(dr, DELTA_COLS_, count, DELTA_COLS_, (Matrix){s->k, DELTA_ROW_, 1},
                           s->ds + (size_t)d * dk, dk, GRADIENT_SET);
            delta_scale_(dr, dr, x->keep, count);
        }
        delta_lower_transposed_(dr, count, s->p, dout);
        delta_solve_transposed_(dr, s->a, count);
        for (int i = 0; i < count; i++) {
            float* to = head->dv + (x->t0 + i) * head->row + d;
            for (int c = 0; c < cols; c++) {
                to[c] = x->beta[i] * dr[i * DELTA_COLS_ + c];
            }
        }
        delta_to_rows_(s->u, values + d * DELTA_C_, count, d);
        delta_to_rows_(s->dr, dr, count, d);
    }
}

// Sets dG to its terms of N, given dout U^T and dR U^T. The diagonal does not decay: it is left
// out, not added and subtracted, since it may be far larger than all else.
static void delta_scores_decay_(float* dG, const float* dp, const float* m, const DeltaScratch_* s,
                                int count) {
    memset(dG, 0, DELTA_C_ * sizeof(float));
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < i; j++) {
            const int at = i * DELTA_C_ + j;
            const float n = dp[at] * s->p[at] + m[at] * s->a[at];
            dG[i] += n;
            dG[j] -= n;
        }
    }
}

// Sets dP and M, and the part of dG inside of the chunk.
static void delta_scores_backward_(float* dG, const DeltaChunk_* x, const DeltaHead_* head) {
    const DeltaScratch_* s = head->scratch;
    const int dv = head->sizes.dv, count = x->count;
    const Matrix dout = {head->dout + x->t0 * head->out_row, head->out_row, 1}, dr = {s->dr, DELTA_ROW_, 1};
    float negative[DELTA_C_];
    for (int i = 0; i < count; i++) {
        negative[i] = -x->beta[i];
    }
    delta_pack_by_token_(s->u_by_token, s->u, count, dv);
    delta_dots_(s->dp, dout, s->u_by_token, count, dv);
    delta_dots_(s->m, dr, s->u_by_token, count, dv);
    delta_scores_decay_(dG, s->dp, s->m, s, count);
    delta_mask_(s->dp, s->decay, NULL, count, 0);
    delta_mask_(s->m, s->decay, negative, count, 1);
}

// Packs columns d, ... of state^T (dv, dk), from the panels of the state.
static void delta_pack_state_(float* to, const float* state, DeltaSizes s, int d) {
    for (int e = 0; e < s.dv; e += DELTA_COLS_) {
        matmul_pack_panel(to + (size_t)e * DELTA_COLS_, (Matrix){state + (size_t)e * s.dk, 1, DELTA_COLS_}, 0,
                          d, int_min(DELTA_COLS_, s.dv - e), int_min(DELTA_COLS_, s.dk - d));
    }
}

// Sets panel (count, COLS) to factor[i] times row i of left state^T, where there is a state.
static void delta_from_state_(float* panel, Matrix left, const float* state_by_dim, const float* factor,
                              int has_state, int count, int dv) {
    if (!has_state) {
        memset(panel, 0, (size_t)count * DELTA_COLS_ * sizeof(float));
        return;
    }
    delta_product_(panel, DELTA_COLS_, count, DELTA_COLS_, left, state_by_dim, dv, GRADIENT_SET);
    delta_scale_(panel, panel, factor, count);
}

// Adds to dG of each token `sign` times the product of its panel row with columns d, ... of its
// row.
static void delta_add_dots_(float* dG, const float* rows, const float* panel, float sign, int count, int d,
                            int columns) {
    for (int i = 0; i < count; i++) {
        dG[i] += sign * vec_dot(rows + i * DELTA_ROW_ + d, panel + i * DELTA_COLS_,
                                int_min(DELTA_COLS_, columns - d));
    }
}

// Sets the rows of dQ and dK, and adds to dG. state: before the chunk; ds: after it.
static void delta_keys_backward_(float* dG, const DeltaChunk_* x, const DeltaHead_* head,
                                 const float* state) {
    const DeltaScratch_* s = head->scratch;
    const int dk = head->sizes.dk, dv = head->sizes.dv, count = x->count;
    const Matrix dout = {head->dout + x->t0 * head->out_row, head->out_row, 1}, u = {s->u, DELTA_ROW_, 1},
                 dr = {s->dr, DELTA_ROW_, 1};
    float q[DELTA_C_ * DELTA_COLS_], k[DELTA_C_ * DELTA_COLS_], row[DELTA_C_ * DELTA_COLS_],
        col[DELTA_C_ * DELTA_COLS_], factor[DELTA_C_];
    for (int i = 0; i < count; i++) {
        factor[i] = -x->beta[i] * x->carry[i];
    }
    for (int d = 0; d < dk; d += DELTA_COLS_) {
        delta_pack_by_dim_(q, s->q, DELTA_ROW_, count, d, dk);
        delta_pack_by_dim_(k, s->k, DELTA_ROW_, count, d, dk);
        if (x->has_past) {
            delta_pack_state_(s->s_by_dim, state, head->sizes, d);
        }
        delta_from_state_(row, dout, s->s_by_dim, x->carry, x->has_past, count, dv);
        delta_add_dots_(dG, s->q, row, 1, count, d, dk);
        delta_lower_(row, DELTA_COLS_, count, DELTA_COLS_, s->dp, k, GRADIENT_ADD);
        delta_to_rows_(s->dq, row, count, d);
        delta_from_state_(row, dr, s->s_by_dim, factor, x->has_past, count, dv);
        delta_add_dots_(dG, s->k, row, 1, count, d, dk);
        delta_lower_(row, DELTA_COLS_, count, DELTA_COLS_, s->m, k, GRADIENT_ADD);
        if (x->has_next) {
            delta_pack_state_(s->ds_by_dim, s->ds, head->sizes, d);
        }
        delta_from_state_(col, u, s->ds_by_dim, x->keep, x->has_next, count, dv);
        delta_add_dots_(dG, s->k, col, -1, count, d, dk);
        delta_lower_transposed_(col, count, s->dp, q);
        delta_lower_transposed_(col, count, s->m, k);
        for (int i = 0; i < count * DELTA_COLS_; i++) {
            col[i] += row[i];
        }
        delta_to_rows_(s->dk, col, count, d);
    }
}

// Turns dS after the chunk into dS before it.
static void delta_state_backward_(const DeltaChunk_* x, const DeltaHead_* head) {
    const DeltaScratch_* s = head->scratch;
    const int dk = head->sizes.dk, dv = head->sizes.dv, count = x->count;
    const float carry = x->carry[count - 1];
    float dout[DELTA_C_ * DELTA_COLS_], dr[DELTA_C_ * DELTA_COLS_], factor[DELTA_C_];
    for (int i = 0; i < count; i++) {
        factor[i] = -x->beta[i] * x->carry[i];
    }
    for (int d = 0; d < dv; d += DELTA_COLS_) {
        float* ds = s->ds + (size_t)d * dk;
        for (int i = 0; i < dk * DELTA_COLS_; i++) {
            ds[i] *= carry;
        }
        delta_pack_by_dim_(dout, head->dout + x->t0 * head->out_row, head->out_row, count, d, dv);
        delta_pack_by_dim_(dr, s->dr, DELTA_ROW_, count, d, dv);
        delta_scale_(dout, dout, x->carry, count);
        delta_scale_(dr, dr, factor, count);
        delta_outer_(ds, s->q, dout, count, dk);
        delta_outer_(ds, s->k, dr, count, dk);
    }
}

// Sets or adds to the gradient of x (n), given the gradient dy of y = scale x / |x|.
static void delta_unit_backward_(float* dx, const float* y, const float* dy, float r, float scale, int n,
                                 GradientMode mode) {
    const float along = vec_dot(y, dy, n) / (scale * scale);
    for (int i = 0; i < n; i++) {
        const float change = r * scale * (dy[i] - y[i] * along);
        dx[i] = mode == GRADIENT_ADD ? dx[i] + change : change;
    }
}

// Sets db and da, and adds to the sums of dA_log and ddt_bias. `next` is <dS1, S1>.
static void delta_gates_backward_(double sums[2], const float* dG, float next, const DeltaChunk_* x,
                                  const DeltaHead_* head) {
    const DeltaScratch_* s = head->scratch;
    float dg = next;
    for (int i = x->count - 1; i >= 0; i--) {
        const size_t at = (size_t)(x->t0 + i) * head->ba_row, row = (size_t)i * DELTA_ROW_;
        dg = x->f[i] > 0 ? dg + dG[i] : 0.0f; // a document's first token does not decay
        head->da[at] = x->slope[i] * dg;
        head->db[at] = (1.0f - x->beta[i]) * vec_dot(s->dr + row, s->u + row, head->sizes.dv);
        sums[0] += dg * x->g[i];
        sums[1] += head->da[at];
    }
}

// Sets the gradients of a value head, or adds to those of queries and keys, as `mode` says; sets
// its sums of dA_log and ddt_bias.
static void delta_head_backward_(float sums[2], const DeltaHead_* head, GradientMode mode) {
    const DeltaSizes sizes = head->sizes;
    const DeltaScratch_* s = head->scratch;
    const size_t state_floats = delta_state_floats_(sizes);
    const float scale = 1 / sqrtf((float)sizes.dk);
    double total[2] = {0, 0};
    delta_states_(head);
    for (int t = int_round_up(sizes.T, DELTA_C_) - DELTA_C_; t >= 0; t -= DELTA_C_) {
        const float* state = s->states + (size_t)(t / DELTA_C_) * state_floats;
        float dG[DELTA_C_];
        DeltaChunk_ x;
        delta_chunk_open_(&x, head, t, 1);
        if (!x.has_next) {
            memset(s->ds, 0, state_floats * sizeof(float));
        }
        delta_values_backward_(&x, head, s->values + (size_t)t * delta_padded_(sizes.dv));
        delta_scores_backward_(dG, &x, head);
        delta_keys_backward_(dG, &x, head, state);
        delta_gates_backward_(total, dG, vec_dot(s->ds, state + state_floats, (int)state_floats), &x, head);
        if (x.has_past) {
            delta_state_backward_(&x, head);
        }
        for (int i = 0; i < x.count; i++) {
            const size_t row = (size_t)i * DELTA_ROW_, at = (size_t)(t + i) * head->row;
            delta_unit_backward_(head->dq + at, s->q + row, s->dq + row, x.rq[i], scale, sizes.dk, mode);
            delta_unit_backward_(head->dk + at, s->k + row, s->dk + row, x.rk[i], 1, sizes.dk, mode);
        }
    }
    sums[0] = (float)total[0], sums[1] = (float)total[1];
}

// Sets the gradients of `count` sequences from `first` on; those of A_log and ddt_bias as `mode`
// says.
static void delta_sequences_backward_(const DeltaGradients* d, const DeltaPass* pass, DeltaScratch* scratch,
                                      int first, int count, GradientMode mode) {
    const DeltaSizes s = pass->sizes;
    const int group = s.Hv / s.Hk;
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < count * s.Hk; i++) {
        for (int j = 0; j < group; j++) {
            const int b = i / s.Hk, h = i % s.Hk * group + j;
            const DeltaHead_ head = delta_head_(pass, d, first + b, h, &scratch->of_thread[thread_index()]);
            delta_head_backward_(scratch->sums + 2 * (b * s.Hv + h), &head,
                                 j == 0 ? GRADIENT_SET : GRADIENT_ADD);
        }
    }
    for (int h = 0; h < s.Hv; h++) {
        float sums[2] = {0, 0};
        for (int b = 0; b < count; b++) {
            sums[0] += scratch->sums[2 * (b * s.Hv + h)];
            sums[1] += scratch->sums[2 * (b * s.Hv + h) + 1];
        }
        if (d->dA_log) {
            d->dA_log[h] = (mode == GRADIENT_ADD ? d->dA_log[h] : 0.0f) + sums[0];
        }
        if (d->ddt_bias) {
            d->ddt_bias[h] = (mode == GRADIENT_ADD ? d->ddt_bias[h] : 0.0f) + sums[1];
        }
    }
}

void delta_rule_backward_cpu(const DeltaGradients* d, const DeltaPass* pass, DeltaScratch* scratch) {
    const int B = pass->sizes.B, most = scratch->sizes.B;
    delta_check_(pass);
    assert(pass->sizes.T <= scratch->sizes.T);
    for (int first = 0; first == 0 || first < B; first += most) {
        delta_sequences_backward_(d, pass, scratch, first, int_min(most, B - first),
                                  first == 0 ? d->mode : GRADIENT_ADD);
    }
}

// ---- generation ----

// Updates columns d, ... of the state of a value head, and sets out there.
static void delta_step_columns_(float* out, float* state, const float* v, const float* q, const float* k,
                                const DeltaChunk_* x, DeltaSizes s, int d) {
    const int cols = int_min(DELTA_STEP_COLS_, s.dv - d);
    float known[DELTA_STEP_COLS_] = {0}, sum[DELTA_STEP_COLS_] = {0}, u[DELTA_STEP_COLS_];
    for (int i = 0; i < s.dk; i++) {
        for (int c = 0; c < cols; c++) {
            known[c] += k[i] * state[(size_t)i * s.dv + d + c];
        }
    }
    for (int c = 0; c < cols; c++) {
        u[c] = x->beta[0] * (v[d + c] - x->f[0] * known[c]);
    }
    for (int i = 0; i < s.dk; i++) {
        float* row = state + (size_t)i * s.dv + d;
        for (int c = 0; c < cols; c++) {
            row[c] = x->f[0] * row[c] + k[i] * u[c];
            sum[c] += q[i] * row[c];
        }
    }
    memcpy(out + d, sum, (size_t)cols * sizeof(float));
}

void delta_rule_step_cpu(const DeltaPass* pass) {
    const DeltaSizes s = pass->sizes;
    delta_check_(pass);
    assert(s.T == 1);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < s.B * s.Hv; i++) {
        const int never[1] = {-1}; // no token starts a document
        const DeltaPass step = {s, NULL, pass->qkv, pass->ba, pass->A_log, pass->dt_bias, pass->out, NULL};
        DeltaHead_ head = delta_head_(&step, NULL, i / s.Hv, i % s.Hv, NULL);
        float q[DELTA_RULE_WIDEST], k[DELTA_RULE_WIDEST];
        DeltaChunk_ x;
        x.t0 = 0;
        head.starts = never;
        delta_gates_(&x, &head, 0);
        delta_unit_(q, head.q, 1 / sqrtf((float)s.dk), s.dk);
        delta_unit_(k, head.k, 1, s.dk);
        for (int d = 0; d < s.dv; d += DELTA_STEP_COLS_) {
            delta_step_columns_(head.out, pass->state + (size_t)i * s.dk * s.dv, head.v, q, k, &x, s, d);
        }
    }
}

#endif // DELTA_RULE_IMPLEMENTATION

#endif
