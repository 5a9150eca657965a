/*
heads.h -- queries and keys between their linear layer and attention: a norm of each head, or of all
heads of a token together, then rotary positions (rope.h).

    n = x r weight      r = 1 / sqrt(sum_c x^2 / HS + eps)      HEADS_NORM: weights (HS), one for
                                                                the queries and one for the keys
    n = x r weight      r over NH HS, or over KV HS columns     HEADS_ROW_NORM: as many weights
    n = x r                                                     HEADS_UNIT_NORM
    n = x                                                       HEADS_PLAIN, HEADS_LATENT
    out = n rotated by the position of its token

    dn      = dout rotated back
    dx      = r (g - x r mean(g x r))      g = dn weight
    dweight = sum of dn x r over tokens and heads

A weight is the element in memory plus an offset (norm.h). Without weights, rotation and norm
commute: dx is computed from out, which is kept anyway.

    qkv, dqkv     (N, QKV)      x becomes out, and dout dx, in place; values stay as they are
    raw           (N, (NH + KV) HS)   x, kept by norms with weights for the backward pass; NULL: not
                                kept
    rstd          (N, NH + KV)  fp32: r, kept by HEADS_UNIT_NORM for the backward pass
    positions     (N)           int32; NULL: as in the sequence, or in the rank's chunks of it
    cut           ranks that each have some of the heads (part.h): with HEADS_ROW_NORM, both passes
                  gather the sums of each token's x^2 and g x

The backward pass sets or adds to dqnormw and dknormw, according to `mode`; NULL is skipped. It
computes one head of one sequence at a time, or with HEADS_ROW_NORM one sequence, and adds up their
sums in a fixed order.
*/
#ifndef LLMC_HEADS_H
#define LLMC_HEADS_H

#include "llmc/base/host_device.h"
#include "llmc/base/token_chunks.h"
#include "llmc/comm/group.h"
#include "llmc/ops/attention_sizes.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/rope.h"

#include <math.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Norms of queries and keys: X(kind, has a norm, has weights, of all heads together, keeps rstd,
// comes from latents, which have norms of their own: latent.h).
// clang-format off
#define HEADS_KINDS(X) \
    X(HEADS_PLAIN,     0, 0, 0, 0, 0) \
    X(HEADS_NORM,      1, 1, 0, 0, 0) \
    X(HEADS_ROW_NORM,  1, 1, 1, 0, 0) \
    X(HEADS_UNIT_NORM, 1, 0, 0, 1, 0) \
    X(HEADS_LATENT,    0, 0, 0, 0, 1)
// clang-format on

#define HEADS_VALUE_(kind, ...) kind,
typedef enum { HEADS_KINDS(HEADS_VALUE_) } HeadsKind;
#undef HEADS_VALUE_

typedef struct {
    int has_norm, has_weights, is_together, keeps_rstd, has_latent;
} HeadsParts;

static inline HeadsParts heads_parts(HeadsKind kind) {
#define HEADS_ROW_(kind, ...) {__VA_ARGS__},
    static const HeadsParts rows[] = {HEADS_KINDS(HEADS_ROW_)};
#undef HEADS_ROW_
    return rows[kind];
}

// Sums over the queries of a token, and over its keys: of x^2, and in the backward pass of g x.
typedef struct {
    float squares[2], products[2];
} HeadsSums;

// Returns the sums of token n over the ranks, which have N tokens each.
HOST_DEVICE HeadsSums heads_sum_ranks(const HeadsSums* sums, int ranks, int N, int n) {
    HeadsSums all = sums[n];
    for (int r = 1; r < ranks; r++) {
        const HeadsSums of = sums[(size_t)r * N + n];
        for (int i = 0; i < 2; i++) {
            all.squares[i] += of.squares[i];
            all.products[i] += of.products[i];
        }
    }
    return all;
}

// The numbers of a norm of `columns`: r, and mean(g x r).
typedef struct {
    float r, mean;
} HeadsScale;

HOST_DEVICE HeadsScale heads_scale(float squares, float product, int columns, float eps) {
    const float r = 1.0f / sqrtf(squares / (float)columns + eps);
    const HeadsScale scale = {r, product * r / (float)columns};
    return scale;
}

// Memory (ranks, N) for the sums of all ranks, and the ranks. NULL: this one has all heads.
typedef struct {
    HeadsSums* sums;
    Group* group;
} HeadsCut;

typedef struct {
    HeadsKind kind;
    float eps, offset;
    AttentionSizes sizes;
    Rope rope;
    const int* positions;
    const float *qnormw, *knormw;
    float *raw, *rstd;
    HeadsCut cut;
} Heads;

// Returns 1 if queries and keys are used exactly as the linear layer computes them.
static inline int heads_do_nothing(const Heads* heads) {
    return !heads_parts(heads->kind).has_norm && !heads->rope.table;
}

// Collective, as the next one.
void heads_forward_cpu(float* qkv, const Heads* heads);

// Returns the bytes that a pass must move, angles from caches; norms with weights also keep or read
// their input.
static inline double heads_bytes(AttentionSizes sizes, HeadsKind kind, double element_bytes) {
    const double elements = (double)sizes.B * sizes.T * attention_query_key_size(sizes);
    return (heads_parts(kind).has_norm ? 3 : 2) * elements * element_bytes;
}

// Gradients of the weights, and memory for (B, NH + KV, HS) floats.
typedef struct {
    float *dqnormw, *dknormw;
    GradientMode mode;
    float* sums;
} HeadsGradients;

void heads_backward_cpu(float* dqkv, const HeadsGradients* d, const float* qkv, const Heads* heads);

#ifdef __cplusplus
}
#endif

#ifdef HEADS_IMPLEMENTATION

#include <string.h>

#include "llmc/base/vec.h"

static const float* heads_angles_(const Heads* heads, int n) {
    const int T = heads->sizes.T;
    return rope_at(heads->rope, heads->positions ? heads->positions[n]
                                                 : token_chunks_position(heads->sizes.chunks, n % T, T));
}

// Returns r of n columns.
static float heads_rstd_(const float* x, const Heads* heads, int n) {
    return heads_scale(vec_dot(x, x, n), 0, n, heads->eps).r;
}

// Normalizes n columns.
static void heads_weigh_(float* x, float r, const float* weight, const Heads* heads, int n) {
    for (int c = 0; c < n; c++) {
        x[c] *= r * (weight[c] + heads->offset);
    }
}

// Returns the sum of g x over n columns.
static float heads_product_(const float* dn, const float* x, const float* weight, const Heads* heads, int n) {
    Vec sum = vec_all(0.0f);
    float rest = 0;
    int c = 0;
    for (; c + LANES <= n; c += LANES) {
        sum += vec_load(dn + c) * vec_load(x + c) * (vec_load(weight + c) + heads->offset);
    }
    for (; c < n; c++) {
        rest += dn[c] * x[c] * (weight[c] + heads->offset);
    }
    return vec_hsum(sum) + rest;
}

// ---- norms of all heads together ----

// Returns the sums of this rank's columns of a token; dn is NULL in the forward pass.
static HeadsSums heads_sums_of_(const float* x, const float* dn, const Heads* heads) {
    const int Q = attention_queries_size(heads->sizes), K = attention_keys_size(heads->sizes);
    HeadsSums sums = {{vec_dot(x, x, Q), vec_dot(x + Q, x + Q, K)}, {0, 0}};
    if (dn) {
        sums.products[0] = heads_product_(dn, x, heads->qnormw, heads, Q);
        sums.products[1] = heads_product_(dn + Q, x + Q, heads->knormw, heads, K);
    }
    return sums;
}

// Gathers the sums of all tokens, if ranks have some of the heads each. x has `row` columns a
// token.
static void heads_gather_(const Heads* heads, const float* x, int row, const float* dn) {
    const int N = heads->sizes.B * heads->sizes.T, QKV = attention_qkv_size(heads->sizes);
    if (!heads->cut.sums) {
        return;
    }
    HeadsSums* own = heads->cut.sums + (size_t)heads->cut.group->rank * N;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        own[n] = heads_sums_of_(x + (size_t)n * row, dn ? dn + (size_t)n * QKV : NULL, heads);
    }
    group_all_gather_cpu((float*)heads->cut.sums, (const float*)own,
                         (size_t)N * sizeof(HeadsSums) / sizeof(float), heads->cut.group);
}

// Sets the numbers of the norms of token n, of the queries and of the keys.
static void heads_scales_(HeadsScale scales[2], const float* x, const float* dn, const Heads* heads, int n) {
    const int N = heads->sizes.B * heads->sizes.T, ranks = heads->cut.sums ? heads->cut.group->size : 1;
    const HeadsSums sums =
        heads->cut.sums ? heads_sum_ranks(heads->cut.sums, ranks, N, n) : heads_sums_of_(x, dn, heads);
    const int Q = attention_queries_size(heads->sizes), K = attention_keys_size(heads->sizes);
    scales[0] = heads_scale(sums.squares[0], sums.products[0], ranks * Q, heads->eps);
    scales[1] = heads_scale(sums.squares[1], sums.products[1], ranks * K, heads->eps);
}

// ---- passes ----

// Normalizes head h of a token, x (HS), if it has a norm of its own.
static void heads_norm_(float* x, const Heads* heads, int n, int h) {
    const int HS = heads->sizes.HS, NH = heads->sizes.NH;
    switch (heads->kind) {
    case HEADS_PLAIN:
    case HEADS_LATENT:
    case HEADS_ROW_NORM:
        return;
    case HEADS_NORM:
        heads_weigh_(x, heads_rstd_(x, heads, HS), h < NH ? heads->qnormw : heads->knormw, heads, HS);
        return;
    case HEADS_UNIT_NORM: {
        const float r = heads_rstd_(x, heads, HS);
        heads->rstd[(size_t)n * (NH + heads->sizes.KV) + h] = r;
        for (int c = 0; c < HS; c++) {
            x[c] *= r;
        }
        return;
    }
    }
}

// Processes the queries and keys of token n, in `row`.
static void heads_forward_row_(float* row, const Heads* heads, int n) {
    const int HS = heads->sizes.HS, columns = attention_query_key_size(heads->sizes);
    const int Q = heads->sizes.NH * HS;
    if (heads_parts(heads->kind).has_weights && heads->raw) {
        memcpy(heads->raw + (size_t)n * columns, row, (size_t)columns * sizeof(float));
    }
    if (heads_parts(heads->kind).is_together) {
        HeadsScale scales[2];
        heads_scales_(scales, row, NULL, heads, n);
        heads_weigh_(row, scales[0].r, heads->qnormw, heads, Q);
        heads_weigh_(row + Q, scales[1].r, heads->knormw, heads, columns - Q);
    }
    for (int h = 0; h < columns / HS; h++) {
        float* x = row + h * HS;
        heads_norm_(x, heads, n, h);
        if (heads->rope.table) {
            rope_turn(x, heads_angles_(heads, n), HS);
        }
    }
}

void heads_forward_cpu(float* qkv, const Heads* heads) {
    const int N = heads->sizes.B * heads->sizes.T, QKV = attention_qkv_size(heads->sizes);
    if (heads_do_nothing(heads)) {
        return;
    }
    heads_gather_(heads, qkv, QKV, NULL);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        heads_forward_row_(qkv + (size_t)n * QKV, heads, n);
    }
}

// Turns g (HS) into the gradient before a norm without weights, whose output is y.
static void heads_unit_backward_(float* g, const float* y, float rstd, int HS) {
    const float mean = vec_dot(g, y, HS) / (float)HS;
    for (int c = 0; c < HS; c++) {
        g[c] = rstd * (g[c] - y[c] * mean);
    }
}

// Turns dn (n) into the gradient before a norm with weights, whose input is x; adds to `sum`.
static void heads_norm_backward_(float* dn, float* sum, const float* x, HeadsScale scale, const float* weight,
                                 const Heads* heads, int n) {
    const float r = scale.r;
    for (int c = 0; c < n; c++) {
        sum[c] += dn[c] * (x[c] * r);
        dn[c] = r * (dn[c] * (weight[c] + heads->offset) - x[c] * r * scale.mean);
    }
}

// Does so for head h of a token.
static void heads_head_backward_(float* dn, float* sum, const float* x, const Heads* heads, int h) {
    const float* weight = h < heads->sizes.NH ? heads->qnormw : heads->knormw;
    const int HS = heads->sizes.HS;
    const HeadsScale scale =
        heads_scale(vec_dot(x, x, HS), heads_product_(dn, x, weight, heads, HS), HS, heads->eps);
    heads_norm_backward_(dn, sum, x, scale, weight, heads, HS);
}

// Rotates a head of token n back, if it has a position.
static void heads_turn_back_(float* d, const Heads* heads, int n) {
    if (heads->rope.table) {
        rope_turn_back(d, heads_angles_(heads, n), heads->sizes.HS);
    }
}

// Computes head h of sequence b; `sum` (HS) gets its part of the gradient of the weight.
static void heads_backward_head_(float* dqkv, float* sum, const float* qkv, const Heads* heads, int b,
                                 int h) {
    const AttentionSizes sizes = heads->sizes;
    const int HS = sizes.HS, count = sizes.NH + sizes.KV;
    const size_t QKV = (size_t)attention_qkv_size(sizes);
    for (int c = 0; c < HS && heads_parts(heads->kind).has_weights; c++) {
        sum[c] = 0;
    }
    for (int n = b * sizes.T; n < (b + 1) * sizes.T; n++) {
        const size_t head = (size_t)n * count + h, at = n * QKV + (size_t)h * HS;
        float* d = dqkv + at;
        switch (heads->kind) {
        case HEADS_PLAIN:
        case HEADS_LATENT:
        case HEADS_ROW_NORM:
            heads_turn_back_(d, heads, n);
            break;
        case HEADS_NORM:
            heads_turn_back_(d, heads, n);
            heads_head_backward_(d, sum, heads->raw + head * HS, heads, h);
            break;
        case HEADS_UNIT_NORM:
            heads_unit_backward_(d, qkv + at, heads->rstd[head], HS);
            heads_turn_back_(d, heads, n);
            break;
        }
    }
}

// Turns dqkv of sequence b into the gradient before norms of all heads together; sets `sum`
// ((NH + KV) HS) to its part of the gradients of the weights.
static void heads_backward_rows_(float* dqkv, float* sum, const Heads* heads, int b) {
    const AttentionSizes sizes = heads->sizes;
    const int Q = attention_queries_size(sizes), columns = attention_query_key_size(sizes);
    memset(sum, 0, (size_t)columns * sizeof(float));
    for (int n = b * sizes.T; n < (b + 1) * sizes.T; n++) {
        float* d = dqkv + (size_t)n * attention_qkv_size(sizes);
        const float* x = heads->raw + (size_t)n * columns;
        HeadsScale scales[2];
        heads_scales_(scales, x, d, heads, n);
        heads_norm_backward_(d, sum, x, scales[0], heads->qnormw, heads, Q);
        heads_norm_backward_(d + Q, sum + Q, x + Q, scales[1], heads->knormw, heads, columns - Q);
    }
}

// Sets or adds to dweight (n) the sums of `count` heads of n columns, from the first one on, of
// each of B sequences, whose sums are `row` floats apart.
static void heads_finish_weight_(float* dweight, const float* sums, int B, int row, int count, int n,
                                 GradientMode mode) {
    for (int c = 0; c < n && dweight; c++) {
        float sum = 0;
        for (int i = 0; i < B * count; i++) {
            sum += sums[(size_t)(i / count) * row + (size_t)(i % count) * n + c];
        }
        dweight[c] = sum + (mode == GRADIENT_ADD ? dweight[c] : 0.0f);
    }
}

// Computes norms of all heads together, a sequence at a time.
static void heads_row_norm_backward_(float* dqkv, const HeadsGradients* d, const Heads* heads) {
    const int B = heads->sizes.B, Q = attention_queries_size(heads->sizes), HS = heads->sizes.HS,
              columns = attention_query_key_size(heads->sizes), QKV = attention_qkv_size(heads->sizes);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < B * heads->sizes.T; n++) {
        for (int c = 0; c < columns; c += HS) {
            heads_turn_back_(dqkv + (size_t)n * QKV + c, heads, n);
        }
    }
    heads_gather_(heads, heads->raw, columns, dqkv);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        heads_backward_rows_(dqkv, d->sums + (size_t)b * columns, heads, b);
    }
    heads_finish_weight_(d->dqnormw, d->sums, B, columns, 1, Q, d->mode);
    heads_finish_weight_(d->dknormw, d->sums + Q, B, columns, 1, columns - Q, d->mode);
}

void heads_backward_cpu(float* dqkv, const HeadsGradients* d, const float* qkv, const Heads* heads) {
    const AttentionSizes sizes = heads->sizes;
    const int B = sizes.B, HS = sizes.HS, count = sizes.NH + sizes.KV;
    if (heads_parts(heads->kind).is_together) {
        heads_row_norm_backward_(dqkv, d, heads);
        return;
    }
    if (heads_do_nothing(heads)) {
        return;
    }
#pragma omp parallel for schedule(static)
    for (int i = 0; i < B * count; i++) {
        heads_backward_head_(dqkv, d->sums + (size_t)i * HS, qkv, heads, i / count, i % count);
    }
    if (heads_parts(heads->kind).has_weights) {
        heads_finish_weight_(d->dqnormw, d->sums, B, count * HS, sizes.NH, HS, d->mode);
        heads_finish_weight_(d->dknormw, d->sums + (size_t)sizes.NH * HS, B, count * HS, sizes.KV, HS,
                             d->mode);
    }
}

#endif // HEADS_IMPLEMENTATION

#endif
