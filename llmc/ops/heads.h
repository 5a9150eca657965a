/*
heads.h -- queries and keys between their linear layer and attention: a norm of each head, then
rotary positions (rope.h).

    n = x r weight      r = 1 / sqrt(sum_c x^2 / HS + eps)      HEADS_NORM: weights (HS), one for
                                                                the queries and one for the keys
    n = x r                                                     HEADS_UNIT_NORM
    n = x                                                       HEADS_PLAIN
    out = n turned by the position of its token

    dn      = dout turned back
    dx      = r (g - x r mean(g x r))      g = dn weight
    dweight = sum of dn x r over tokens and heads

Without weights the turn and the norm can change places: dx is computed from out, which is kept
anyway.

    qkv, dqkv     (N, QKV)      x becomes out, and dout dx, in place; values stay as they are
    raw           (N, (NH + KV) HS)   x, kept by HEADS_NORM for the backward pass; NULL: not kept
    rstd          (N, NH + KV)  fp32: r, kept by HEADS_UNIT_NORM for the backward pass
    positions     (N)           int32; NULL: n modulo T

The backward pass sets or adds to dqnormw and dknormw (HS), according to `mode`; NULL is skipped. It
computes a head of a sequence at a time, and adds the sums of these up in a fixed order.
*/
#ifndef LLMC_HEADS_H
#define LLMC_HEADS_H

#include "llmc/ops/attention.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/rope.h"

#ifdef __cplusplus
extern "C" {
#endif

// Norms of queries and keys: none; of each head, with weights; of all heads together, with weights
// (not computed here yet); of each head, without weights.
typedef enum { HEADS_PLAIN, HEADS_NORM, HEADS_ROW_NORM, HEADS_UNIT_NORM } HeadsKind;

typedef struct {
    HeadsKind kind;
    float eps;
    AttentionSizes sizes;
    Rope rope;
    const int* positions;
    const float *qnormw, *knormw;
    float *raw, *rstd;
} Heads;

// Returns 1 if queries and keys are what the linear layer computes.
static inline int heads_do_nothing(const Heads* heads) {
    return heads->kind == HEADS_PLAIN && !heads->rope.table;
}

void heads_forward_cpu(float* qkv, const Heads* heads);

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

#include <math.h>
#include <string.h>

#include "llmc/base/vec.h"

static const float* heads_angles_(const Heads* heads, int n) {
    return rope_at(heads->rope, heads->positions ? heads->positions[n] : n % heads->sizes.T);
}

static float heads_rstd_(const float* x, const Heads* heads) {
    const int HS = heads->sizes.HS;
    return 1.0f / sqrtf(vec_dot(x, x, HS) / (float)HS + heads->eps);
}

// Normalizes head h of a token, x (HS).
static void heads_norm_(float* x, const Heads* heads, int n, int h) {
    const int HS = heads->sizes.HS, NH = heads->sizes.NH;
    const float r = heads_rstd_(x, heads);
    if (heads->kind == HEADS_UNIT_NORM) {
        heads->rstd[(size_t)n * (NH + heads->sizes.KV) + h] = r;
        for (int c = 0; c < HS; c++) {
            x[c] *= r;
        }
        return;
    }
    const float* weight = h < NH ? heads->qnormw : heads->knormw;
    for (int c = 0; c < HS; c++) {
        x[c] *= r * weight[c];
    }
}

// Processes the queries and keys of token n, in `row`.
static void heads_forward_row_(float* row, const Heads* heads, int n) {
    const int HS = heads->sizes.HS, columns = attention_query_key_size(heads->sizes);
    if (heads->kind == HEADS_NORM && heads->raw) {
        memcpy(heads->raw + (size_t)n * columns, row, (size_t)columns * sizeof(float));
    }
    for (int h = 0; h < columns / HS; h++) {
        float* x = row + h * HS;
        if (heads->kind != HEADS_PLAIN) {
            heads_norm_(x, heads, n, h);
        }
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

// Turns dn (HS) into the gradient before a norm with weights, whose input is x; adds to `sum`.
static void heads_norm_backward_(float* dn, float* sum, const float* x, const float* weight,
                                 const Heads* heads) {
    const int HS = heads->sizes.HS;
    const float r = heads_rstd_(x, heads);
    for (int c = 0; c < HS; c++) {
        sum[c] += dn[c] * (x[c] * r);
        dn[c] *= weight[c];
    }
    const float mean = vec_dot(dn, x, HS) * r / (float)HS;
    for (int c = 0; c < HS; c++) {
        dn[c] = r * (dn[c] - x[c] * r * mean);
    }
}

// Computes head h of sequence b; `sum` (HS) gets its part of the gradient of the weight.
static void heads_backward_head_(float* dqkv, float* sum, const float* qkv, const Heads* heads, int b,
                                 int h) {
    const AttentionSizes sizes = heads->sizes;
    const int HS = sizes.HS, count = sizes.NH + sizes.KV;
    const size_t QKV = (size_t)attention_qkv_size(sizes);
    for (int c = 0; c < HS && heads->kind == HEADS_NORM; c++) {
        sum[c] = 0;
    }
    for (int n = b * sizes.T; n < (b + 1) * sizes.T; n++) {
        const size_t head = (size_t)n * count + h, at = n * QKV + (size_t)h * HS;
        float* d = dqkv + at;
        if (heads->kind == HEADS_UNIT_NORM) {
            heads_unit_backward_(d, qkv + at, heads->rstd[head], HS);
        }
        if (heads->rope.table) {
            rope_turn_back(d, heads_angles_(heads, n), HS);
        }
        if (heads->kind == HEADS_NORM) {
            heads_norm_backward_(d, sum, heads->raw + head * HS, h < sizes.NH ? heads->qnormw : heads->knormw,
                                 heads);
        }
    }
}

// Sets or adds to dweight (HS) the sums of `count` heads, from the first one on, of each of B
// sequences of `heads` heads.
static void heads_finish_weight_(float* dweight, const float* sums, int B, int heads, int count, int HS,
                                 GradientMode mode) {
    for (int c = 0; c < HS && dweight; c++) {
        float sum = 0;
        for (int i = 0; i < B * count; i++) {
            sum += sums[((size_t)(i / count) * heads + i % count) * HS + c];
        }
        dweight[c] = sum + (mode == GRADIENT_ADD ? dweight[c] : 0.0f);
    }
}

void heads_backward_cpu(float* dqkv, const HeadsGradients* d, const float* qkv, const Heads* heads) {
    const AttentionSizes sizes = heads->sizes;
    const int B = sizes.B, HS = sizes.HS, count = sizes.NH + sizes.KV;
    if (heads_do_nothing(heads)) {
        return;
    }
#pragma omp parallel for schedule(static)
    for (int i = 0; i < B * count; i++) {
        heads_backward_head_(dqkv, d->sums + (size_t)i * HS, qkv, heads, i / count, i % count);
    }
    if (heads->kind == HEADS_NORM) {
        heads_finish_weight_(d->dqnormw, d->sums, B, count, sizes.NH, HS, d->mode);
        heads_finish_weight_(d->dknormw, d->sums + (size_t)sizes.NH * HS, B, count, sizes.KV, HS, d->mode);
    }
}

#endif // HEADS_IMPLEMENTATION

#endif
