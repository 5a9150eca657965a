/*
reference.h -- the operations of a model as plain loops from their formulas: the first file to read.
reference_model.h makes a model of them.

Nothing here is fast: no threads, no vectors, no tiles. Above each operation is its formula, forward
and backward. The fast versions, llmc/ops/<op>.h for the CPU and llmc/ops/<op>.cuh for the GPU, are
tested against these loops, and these against finite differences (dev/test/ops/test_reference.c).

    B  sequences        T   tokens per sequence         N = B*T  tokens
    C  channels         NH  heads of queries            HS       size of a head, C/NH in GPT-2
    L  blocks           KV  heads of keys, and values   F        hidden units of the MLP
    V  vocabulary       Vp  vocabulary with padding

    dx  the gradient of the loss with respect to x, of the shape of x

A forward pass sets its outputs. A backward pass ADDS to its gradients, which start at zero: tensors
that are used twice, such as the residual stream and the token embedding, get a term from each use.
A tensor that a model does not have is NULL; the comments say what that means.

Real is double, or the type that REFERENCE_REAL names.

GPT-2: Radford et al., "Language models are unsupervised multitask learners", 2019. Later models
differ from it in the kinds of their operations: a row of ARCHITECTURES (model.h).
*/
#ifndef LLMC_REFERENCE_H
#define LLMC_REFERENCE_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "llmc/optim/adamw.h"
#include "llmc/ops/activation.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/ops/heads.h"
#include "llmc/ops/norm.h"
#include "llmc/ops/rope.h"
#include "llmc/ops/router.h"

#ifndef REFERENCE_REAL
#define REFERENCE_REAL double
#endif
typedef REFERENCE_REAL Real;

// -------------------------------------------------------------------------------------------------
// Token and position embeddings
//
//     out[b][t] = wte[tokens[b][t]] + wpe[t]
//
// out (B, T, C)    tokens (B, T), each below V    wte (Vp, C)
// wpe (T or more, C), or NULL for zeros

static inline void ref_embedding_forward(Real* out, const int* tokens, const Real* wte, const Real* wpe,
                                         size_t B, size_t T, size_t C) {
    for (size_t n = 0; n < B * T; n++) {
        for (size_t c = 0; c < C; c++) {
            out[n * C + c] = wte[(size_t)tokens[n] * C + c] + (wpe ? wpe[n % T * C + c] : 0);
        }
    }
}

static inline void ref_embedding_backward(Real* dwte, Real* dwpe, const Real* dout, const int* tokens,
                                          size_t B, size_t T, size_t C) {
    for (size_t n = 0; n < B * T; n++) {
        for (size_t c = 0; c < C; c++) {
            dwte[(size_t)tokens[n] * C + c] += dout[n * C + c];
            if (dwpe) {
                dwpe[n % T * C + c] += dout[n * C + c];
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Normalization of rows: Ba, Kiros and Hinton, 2016; without the mean, RMS: Zhang and Sennrich,
// 2019
//
//     mean = avg_c(inp)                norm = (inp - mean) rstd
//     rstd = 1 / sqrt(avg_c((inp - mean)^2) + eps)
//     out  = norm weight + bias
//
//     dinp = rstd (g - avg_c(g) - norm avg_c(g norm))    with g = dout weight
//
// out, inp (N, C)    mean, rstd (N), kept for the backward pass    weight, bias (C)
//
// RMS has no mean: it is 0, and the term avg_c(g) is missing. NULL for `weight` is ones, NULL for
// `bias` zeros. RMS_PLUS has the weight 1 + weight. A factor multiplies weights.

typedef struct {
    NormKind kind;
    const Real *weight, *bias;
    Real *mean, *rstd; // set by the forward pass; mean: if the kind has one
    Real eps, factor;
    size_t N, C;
} RefNorm;

// Returns the weight of column c.
static inline Real ref_norm_weight_(RefNorm norm, size_t c) {
    return norm.weight ? norm_parts(norm.kind).offset + norm.weight[c] : 1;
}

// Returns the number that a norm subtracts from a row.
static inline Real ref_norm_center_(NormKind kind, const Real* x, size_t C) {
    Real sum = 0;
    switch (kind) {
    case NORM_LAYER:
        for (size_t c = 0; c < C; c++) {
            sum += x[c];
        }
        return sum / C;
    case NORM_RMS:
    case NORM_RMS_PLUS:
    case NORM_RMS_ALONE:
        return 0;
    }
    return NAN;
}

static inline void ref_norm_forward(Real* out, const Real* inp, RefNorm norm) {
    const size_t C = norm.C;
    for (size_t n = 0; n < norm.N; n++) {
        const Real *x = inp + n * C, center = ref_norm_center_(norm.kind, x, C);
        Real squares = 0;
        for (size_t c = 0; c < C; c++) {
            squares += (x[c] - center) * (x[c] - center);
        }
        const Real rstd = norm.rstd[n] = 1 / sqrt(squares / C + norm.eps);
        for (size_t c = 0; c < C; c++) {
            const Real y = (x[c] - center) * rstd;
            out[n * C + c] = norm.factor * y * ref_norm_weight_(norm, c) + (norm.bias ? norm.bias[c] : 0);
        }
        if (norm.mean) {
            norm.mean[n] = center;
        }
    }
}

static inline void ref_norm_backward(Real* dinp, Real* dweight, Real* dbias, const Real* dout,
                                     const Real* inp, RefNorm norm) {
    const int has_mean = norm_parts(norm.kind).has_mean;
    const size_t C = norm.C;
    for (size_t n = 0; n < norm.N; n++) {
        const Real *x = inp + n * C, *d = dout + n * C;
        const Real center = has_mean ? norm.mean[n] : 0, rstd = norm.rstd[n];
        Real g_sum = 0, g_norm_sum = 0;
        for (size_t c = 0; c < C; c++) {
            const Real y = (x[c] - center) * rstd, g = norm.factor * d[c] * ref_norm_weight_(norm, c);
            g_sum += has_mean ? g : 0;
            g_norm_sum += g * y;
            if (dweight) {
                dweight[c] += norm.factor * d[c] * y;
            }
            if (dbias) {
                dbias[c] += d[c];
            }
        }
        for (size_t c = 0; c < C; c++) {
            const Real y = (x[c] - center) * rstd, g = norm.factor * d[c] * ref_norm_weight_(norm, c);
            dinp[n * C + c] += rstd * (g - g_sum / C - y * g_norm_sum / C);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Linear layer
//
//     out = inp weight^T + bias
//
//     dinp = dout weight    dweight = dout^T inp    dbias = sum_n dout
//
// out (N, OC)    inp (N, C)    weight (OC, C)    bias (OC), or NULL for none

typedef struct {
    size_t N, C, OC;
} RefLinear;

static inline void ref_linear_forward(Real* out, const Real* inp, const Real* weight, const Real* bias,
                                      RefLinear sizes) {
    const size_t N = sizes.N, C = sizes.C, OC = sizes.OC;
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            Real sum = bias ? bias[o] : 0;
            for (size_t c = 0; c < C; c++) {
                sum += inp[n * C + c] * weight[o * C + c];
            }
            out[n * OC + o] = sum;
        }
    }
}

static inline void ref_linear_backward(Real* dinp, Real* dweight, Real* dbias, const Real* dout,
                                       const Real* inp, const Real* weight, RefLinear sizes) {
    const size_t N = sizes.N, C = sizes.C, OC = sizes.OC;
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            const Real d = dout[n * OC + o];
            for (size_t c = 0; c < C; c++) {
                dinp[n * C + c] += d * weight[o * C + c];
                dweight[o * C + c] += d * inp[n * C + c];
            }
            if (dbias) {
                dbias[o] += d;
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Queries, keys and values. A row of qkv has NH heads of queries, then KV heads of keys, then KV
// heads of values, each of HS columns: QKV = (NH + 2 KV) HS. Values pass both operations unchanged.
//
// Norm of queries and of keys: RMS (above) of each head, with weights or without, or of all heads
// together
//
// out, inp (N, QKV)    qweight, kweight (HS), or of all heads (NH HS), (KV HS); NULL for ones
// rstd (N, NH + KV), or of all heads (N, 2), kept for the backward pass

typedef struct {
    size_t B, T, NH, KV, HS;
    size_t window;     // of attention
    Real scale;        // of scores; 0: 1 / sqrt(HS)
    Real cap;          // of scores; 0: none
    const Real* sinks; // (NH), or NULL
    const Real* drop;  // (B, NH, T, T) dropout's factors of probabilities, or NULL
} RefHeads;

typedef struct {
    HeadsKind kind;
    const Real *qweight, *kweight;
    Real *rstd, eps;
    int offset; // added to weights
} RefHeadNorm;

// Heads of a token's queries, or of its keys, as rows of one norm: rows, and columns of each.
typedef struct {
    size_t rows, cols;
} RefNormed_;

// Returns the rows of `heads` heads of queries or keys; none without a norm.
static inline RefNormed_ ref_normed_(HeadsKind kind, size_t heads, size_t HS) {
    switch (kind) {
    case HEADS_PLAIN:
    case HEADS_LATENT:
        return (RefNormed_){0, 0};
    case HEADS_NORM:
    case HEADS_UNIT_NORM:
        return (RefNormed_){heads, HS};
    case HEADS_ROW_NORM:
        return (RefNormed_){1, heads * HS};
    }
    return (RefNormed_){0, 0};
}

// Returns the norm of a token's queries, or of its keys.
static inline RefNorm ref_norm_of_heads_(RefHeadNorm norm, RefHeads heads, size_t n, int is_key) {
    const RefNormed_ q = ref_normed_(norm.kind, heads.NH, heads.HS),
                     k = ref_normed_(norm.kind, heads.KV, heads.HS);
    Real* rstd = norm.rstd + n * (q.rows + k.rows) + (is_key ? q.rows : 0);
    return (RefNorm){norm.offset ? NORM_RMS_PLUS : NORM_RMS,
                     is_key ? norm.kweight : norm.qweight,
                     NULL,
                     NULL,
                     rstd,
                     norm.eps,
                     1,
                     is_key ? k.rows : q.rows,
                     is_key ? k.cols : q.cols};
}

static inline void ref_heads_norm_forward(Real* out, const Real* inp, RefHeadNorm norm, RefHeads heads) {
    const size_t Q = heads.NH * heads.HS, K = heads.KV * heads.HS, QKV = Q + 2 * K;
    memcpy(out, inp, heads.B * heads.T * QKV * sizeof(Real));
    for (size_t n = 0; n < heads.B * heads.T && heads_parts(norm.kind).has_norm; n++) {
        const size_t q = n * QKV, k = q + Q;
        ref_norm_forward(out + q, inp + q, ref_norm_of_heads_(norm, heads, n, 0));
        ref_norm_forward(out + k, inp + k, ref_norm_of_heads_(norm, heads, n, 1));
    }
}

static inline void ref_heads_norm_backward(Real* dinp, Real* dqweight, Real* dkweight, const Real* dout,
                                           const Real* inp, RefHeadNorm norm, RefHeads heads) {
    const size_t Q = heads.NH * heads.HS, K = heads.KV * heads.HS, QKV = Q + 2 * K;
    for (size_t n = 0; n < heads.B * heads.T; n++) {
        const size_t q = n * QKV, k = q + Q, v = k + K;
        const int is_normed = heads_parts(norm.kind).has_norm;
        if (is_normed) {
            ref_norm_backward(dinp + q, dqweight, NULL, dout + q, inp + q,
                              ref_norm_of_heads_(norm, heads, n, 0));
            ref_norm_backward(dinp + k, dkweight, NULL, dout + k, inp + k,
                              ref_norm_of_heads_(norm, heads, n, 1));
        }
        for (size_t i = is_normed ? v : q; i < v + K; i++) {
            dinp[i] += dout[i];
        }
    }
}

// Rotary positions: Su et al., "RoFormer", 2021. Columns 2i and 2i + 1 of a head are a pair (e, o),
// which the position t turns by the angle a = t frequency[i]
//
//     (e, o) -> (e cos a - o sin a, o cos a + e sin a)
//
// The backward pass turns back. A query and a key that are turned so have a product that depends
// on the distance of their positions.
//
// out, inp (B, T, QKV)    frequency (HS / 2), 0 for pairs that do not turn; NULL: none turns
//
// The first `dims` columns of a head turn, pair i with the frequency f = base^(-2i / dims). For
// contexts longer than those of pretraining, f is scaled down: all by a factor (linear), or those
// whose wavelength 2 pi / f is long (Llama 3)
//
//     turns = original_context f / (2 pi)      rise = (turns - low) / (high - low), within 0 and 1
//     f -> f (rise + (1 - rise) / factor)
//
// where with yarn rise falls evenly from pair to pair, from 1 at the one that turns `high` times,
// rounded down, to 0 at the one that turns `low` times, rounded up. Or each pair has a divisor of
// its own (longrope), of two sets: by the length of the pass. With the last two, pairs that turn
// are multiplied by the attention factor.
//
// Frequencies are rounded to fp32, as other programs have them: at high positions this matters.

typedef struct {
    const Real* frequency;
    Real attention; // factor of pairs that turn
} RefRope;

// Returns how much of its frequency pair i keeps, from 1 to 0.
static inline Real ref_yarn_rise_(size_t i, size_t dims, Real base, RopeScaling scaling) {
    const Real turns[2] = {scaling.high_freq_factor, scaling.low_freq_factor};
    Real pair[2]; // base^(-2 pair / dims) original_context / (2 pi) = turns
    for (int end = 0; end < 2; end++) {
        pair[end] = (Real)dims / 2 * log(scaling.original_context / (2 * M_PI * turns[end])) / log(base);
        pair[end] = scaling.is_exact ? pair[end] : end == 0 ? floor(pair[end]) : ceil(pair[end]);
    }
    pair[0] = fmax(pair[0], 0), pair[1] = fmin(pair[1], (Real)dims - 1);
    if (pair[0] == pair[1]) {
        pair[1] += 0.001;
    }
    return 1 - fmin(fmax(((Real)i - pair[0]) / (pair[1] - pair[0]), 0), 1);
}

// Returns the frequency of pair i in a pass of T tokens.
static inline Real ref_rope_frequency_(size_t i, size_t T, RopeSettings s) {
    const RopeScaling scaling = s.scaling;
    const Real f = pow(s.base, -2.0 * (Real)i / (Real)s.dims);
    const Real turns = scaling.original_context * f / (2 * M_PI), low = scaling.low_freq_factor,
               high = scaling.high_freq_factor;
    Real rise = 0; // linear
    switch (scaling.kind) {
    case ROPE_LONG:
        return f / (T > (size_t)scaling.original_context ? s.factors->far : s.factors->near)[i];
    case ROPE_LLAMA3:
        rise = fmin(fmax((turns - low) / (high - low), 0), 1);
        break;
    case ROPE_YARN:
        rise = ref_yarn_rise_(i, (size_t)s.dims, s.base, scaling);
        break;
    case ROPE_LINEAR:
        break;
    case ROPE_PLAIN:
    case ROPE_KINDS:
        return f;
    }
    return f * (rise + (1 - rise) / scaling.factor);
}

// Sets the frequencies (HS / 2) of a pass of T tokens.
static inline void ref_rope_frequencies(Real* frequency, size_t T, RopeSettings settings) {
    for (size_t i = 0; i < (size_t)settings.HS / 2; i++) {
        frequency[i] = 2 * i < (size_t)settings.dims ? (float)ref_rope_frequency_(i, T, settings) : 0;
    }
}

static inline void ref_turn_(Real* out, const Real* inp, RefRope rope, size_t HS, Real t) {
    for (size_t i = 0; i < HS / 2; i++) {
        const Real f = rope.frequency[i], a = f > 0 ? rope.attention : 1, c = a * cos(t * f),
                   s = a * sin(t * f), e = inp[2 * i], o = inp[2 * i + 1];
        out[2 * i] += e * c - o * s;
        out[2 * i + 1] += o * c + e * s;
    }
}

// Adds inp to out, with its queries and keys turned from 0 to t (sign 1), or back (-1).
static inline void ref_rope_(Real* out, const Real* inp, RefRope rope, Real sign, RefHeads h) {
    const size_t heads = h.NH + 2 * h.KV;
    for (size_t i = 0; i < h.B * h.T * heads; i++) {
        const size_t t = i / heads % h.T, turned = rope.frequency && i % heads < h.NH + h.KV;
        if (turned) {
            ref_turn_(out + i * h.HS, inp + i * h.HS, rope, h.HS, sign * t);
        }
        for (size_t d = 0; d < h.HS && !turned; d++) {
            out[i * h.HS + d] += inp[i * h.HS + d];
        }
    }
}

static inline void ref_rope_forward(Real* out, const Real* inp, RefRope rope, RefHeads h) {
    memset(out, 0, h.B * h.T * (h.NH + 2 * h.KV) * h.HS * sizeof(Real));
    ref_rope_(out, inp, rope, 1, h);
}

static inline void ref_rope_backward(Real* dinp, const Real* dout, RefRope rope, RefHeads h) {
    ref_rope_(dinp, dout, rope, -1, h);
}

// -------------------------------------------------------------------------------------------------
// Causal multi-head attention: Vaswani et al., 2017; backward from lse: Dao et al., 2022; with keys
// and values for groups of NH / KV queries: Ainslie et al., 2023
//
//     score[t][u] = scale q[t] . k[u]                start[t] <= u <= t and t - u < window
//                   or cap tanh(scale q[t] . k[u] / cap): Gemma 2, 2024
//     lse[t]      = log(sum_u exp(score[t][u]))      p[t][u] = exp(score[t][u] - lse[t])
//     out[t]      = sum_u p[t][u] v[u]
//
// Dropout of probabilities has factors m[t][u], 0 or 1 / (1 - its probability): Srivastava et al.,
// 2014. p m takes the place of p in out and dv, and m (dout[t] . v[u]) that of the product in ds.
//
// A sink s of a head adds exp(s) to the sum in lse; it has no value. OpenAI, 2025
//
//     ds = - sum_t exp(s - lse[t]) dout[t] . out[t]
//
//     ds[t][u] = p[t][u] (dout[t] . v[u] - dout[t] . out[t]) scale (1 - (score[t][u] / cap)^2)
//     dq[t] = sum_u ds[t][u] k[u]    dk[u] = sum_t ds[t][u] q[t]    dv[u] = sum_t p[t][u] dout[t]
//
// qkv (B, T, QKV); query head h reads key and value head h / (NH / KV)
// out (B, T, NH, HS)    lse (B, NH, T), kept for the backward pass
// starts (B, T): where the document of token t starts in its row, at most t; NULL: at 0. A token
// attends only to its own document, and to the last `window` tokens up to itself; 0: to all.

static inline Real ref_dot_(const Real* x, const Real* y, size_t n) {
    Real sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

static inline Real ref_scale_(RefHeads heads) { return heads.scale > 0 ? heads.scale : 1 / sqrt(heads.HS); }

static inline Real ref_score_(const Real* q, const Real* k, RefHeads heads) {
    const Real score = ref_scale_(heads) * ref_dot_(q, k, heads.HS);
    return heads.cap > 0 ? heads.cap * tanh(score / heads.cap) : score;
}

// Returns dropout's factor of key u for query i of (B, NH, T).
static inline Real ref_drop_(RefHeads heads, size_t i, size_t u) {
    return heads.drop ? heads.drop[i * heads.T + u] : 1;
}

// Returns the derivative of a score by q . k.
static inline Real ref_score_slope_(Real score, RefHeads heads) {
    const Real y = heads.cap > 0 ? score / heads.cap : 0;
    return ref_scale_(heads) * (1 - y * y);
}

// A query: token t of head h of sequence b, its places in qkv and out, and the keys that it sees.
typedef struct {
    size_t t, start, row; // row: distance from one token's key to the next
    size_t q, k, v, out;  // k, v: of token 0
} RefQuery_;

static inline RefQuery_ ref_query_(size_t i, const int* starts, RefHeads heads) {
    const size_t T = heads.T, NH = heads.NH, KV = heads.KV, HS = heads.HS, window = heads.window;
    const size_t b = i / (NH * T), h = i / T % NH, t = i % T, group = NH / KV, row = (NH + 2 * KV) * HS;
    const size_t document = starts ? (size_t)starts[b * T + t] : 0, at = b * T * row;
    const size_t first = window > 0 && t + 1 > window ? t + 1 - window : 0;
    return (RefQuery_){t,
                       document > first ? document : first,
                       row,
                       at + t * row + h * HS,
                       at + (NH + h / group) * HS,
                       at + (NH + KV + h / group) * HS,
                       ((b * T + t) * NH + h) * HS};
}

static inline void ref_attention_forward(Real* out, Real* lse, const Real* qkv, const int* starts,
                                         RefHeads heads) {
    const size_t HS = heads.HS;
    for (size_t i = 0; i < heads.B * heads.NH * heads.T; i++) {
        const RefQuery_ at = ref_query_(i, starts, heads);
        const Real *q = qkv + at.q, *k = qkv + at.k, *v = qkv + at.v;
        const Real sink = heads.sinks ? heads.sinks[i / heads.T % heads.NH] : -INFINITY;
        Real* o = out + at.out;
        Real max = sink, sum = 0; // maximum of the scores: exp(score - max) cannot overflow
        for (size_t u = at.start; u <= at.t; u++) {
            max = fmax(max, ref_score_(q, k + u * at.row, heads));
        }
        for (size_t u = at.start; u <= at.t; u++) {
            sum += exp(ref_score_(q, k + u * at.row, heads) - max);
        }
        sum += exp(sink - max);
        lse[i] = max + log(sum);
        for (size_t d = 0; d < HS; d++) {
            o[d] = 0;
        }
        for (size_t u = at.start; u <= at.t; u++) {
            const Real p = exp(ref_score_(q, k + u * at.row, heads) - lse[i]), m = ref_drop_(heads, i, u);
            for (size_t d = 0; d < HS; d++) {
                o[d] += p * m * v[u * at.row + d];
            }
        }
    }
}

// dsinks (NH), or NULL
static inline void ref_attention_backward(Real* dqkv, Real* dsinks, const Real* dout, const Real* qkv,
                                          const Real* out, const Real* lse, const int* starts,
                                          RefHeads heads) {
    const size_t HS = heads.HS;
    for (size_t i = 0; i < heads.B * heads.NH * heads.T; i++) {
        const RefQuery_ at = ref_query_(i, starts, heads);
        const Real *q = qkv + at.q, *k = qkv + at.k, *v = qkv + at.v;
        Real *dq = dqkv + at.q, *dk = dqkv + at.k, *dv = dqkv + at.v;
        const Real *o = out + at.out, *d_o = dout + at.out;
        const Real average = ref_dot_(d_o, o, HS); // average of d_o . v, weighted by p
        if (dsinks) {
            const size_t h = i / heads.T % heads.NH;
            dsinks[h] -= exp(heads.sinks[h] - lse[i]) * average;
        }
        for (size_t u = at.start; u <= at.t; u++) {
            const size_t row = u * at.row;
            const Real score = ref_score_(q, k + row, heads), p = exp(score - lse[i]),
                       m = ref_drop_(heads, i, u);
            const Real ds = p * (m * ref_dot_(d_o, v + row, HS) - average) * ref_score_slope_(score, heads);
            for (size_t d = 0; d < HS; d++) {
                dq[d] += ds * k[row + d];
                dk[row + d] += ds * q[d];
                dv[row + d] += p * m * d_o[d];
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Activations. GELU in tanh form: Hendrycks and Gimpel, 2016
//
//     act  = x/2 (1 + tanh(v)) = x s      v = sqrt(2/pi) (x + 0.044715 x^3)
//     dx   = dact (s + 2 x s (1 - s) dv/dx)             s = 1 / (1 + exp(-2v))
//
// 1 + tanh(v) is 2 s, but loses digits where tanh(v) is near -1.
//
// SwiGLU: Shazeer, 2020; a gate g for each x, in front of them all
//
//     act = g s x        s = 1 / (1 + exp(-g))
//     dx  = dact g s     dg = dact x s (1 + g (1 - s))
//
// GeGLU: GELU in the place of g s
//
// Clamped: OpenAI, gpt-oss, 2025; a derivative beyond a limit is 0
//
//     act = h s (c + 1)    h = min(g, 7)    c = min(max(x, -7), 7)    s = 1 / (1 + exp(-1.702 h))
//     dx  = dact h s       dg = dact (c + 1) s (1 + 1.702 h (1 - s))
//
// The square of ReLU: So et al., 2021
//
//     act = max(x, 0)^2      dx = dact 2 max(x, 0)
//
// act (N, F)    pre: x (N, F); with a gate (g, x) (N, 2, F)

static inline double ref_sigmoid_(double x) { return 1 / (1 + exp(-x)); }

// Returns the activation of x, and its derivatives, given the gate of x, or anything.
typedef struct {
    Real act, dx, dgate;
} RefActivation_;

static inline RefActivation_ ref_activation_(Real x, Real gate, ActivationKind kind) {
    switch (kind) {
    case ACTIVATION_SWIGLU: {
        const Real s = ref_sigmoid_(gate);
        return (RefActivation_){gate * s * x, gate * s, x * s * (1 + gate * (1 - s))};
    }
    case ACTIVATION_CLAMPED: {
        const Real h = fmin(gate, 7), c = fmin(fmax(x, -7), 7), s = ref_sigmoid_(1.702 * h);
        return (RefActivation_){h * s * (c + 1), c == x ? h * s : 0,
                                (Real)(h == gate ? (c + 1) * s * (1 + 1.702 * h * (1 - s)) : 0)};
    }
    case ACTIVATION_RELU2: {
        const Real positive = fmax(x, 0);
        return (RefActivation_){positive * positive, 2 * positive, 0};
    }
    case ACTIVATION_GELU: {
        const double v = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x),
                     dv = sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x), s = ref_sigmoid_(2 * v);
        return (RefActivation_){(Real)(x * s), (Real)(s + 2 * x * s * (1 - s) * dv), 0};
    }
    case ACTIVATION_GEGLU: {
        const RefActivation_ gelu = ref_activation_(gate, 0, ACTIVATION_GELU);
        return (RefActivation_){gelu.act * x, gelu.act, gelu.dx * x};
    }
    }
    return (RefActivation_){NAN, NAN, NAN};
}

static inline void ref_activation_forward(Real* act, const Real* pre, size_t N, size_t F,
                                          ActivationKind kind) {
    const size_t gates = (size_t)activation_gates(kind);
    for (size_t i = 0; i < N * F; i++) {
        const Real *gate = pre + i / F * gates * F + i % F, *x = gate + (gates - 1) * F;
        act[i] = ref_activation_(*x, *gate, kind).act;
    }
}

static inline void ref_activation_backward(Real* dpre, const Real* dact, const Real* pre, size_t N, size_t F,
                                           ActivationKind kind) {
    const size_t gates = (size_t)activation_gates(kind);
    for (size_t i = 0; i < N * F; i++) {
        const size_t gate = i / F * gates * F + i % F, x = gate + (gates - 1) * F;
        const RefActivation_ y = ref_activation_(pre[x], pre[gate], kind);
        dpre[x] += dact[i] * y.dx;
        dpre[gate] += dact[i] * y.dgate; // 0 without a gate
    }
}

// -------------------------------------------------------------------------------------------------
// Router: which experts a token takes, and their weights in its sum
//
//     ROUTER_CHOSEN     the `used` largest logits l       w = softmax of l over these
//     ROUTER_SOFTMAX    the `used` largest logits l       w = p, p = softmax of l over all
//     ROUTER_SIGMOID    the `used` largest s + bias       w = factor s / sum of s over these
//                       with s = sigmoid(l)
//
// The lower one of equal scores is taken. The weights of the other experts have dw = 0:
//
//     CHOSEN, SOFTMAX    dl = w (dw - sum w dw), or p (dw - sum w dw)
//     SIGMOID            dl = w (1 - s) (dw - sum w dw / factor)
//
// Training also minimizes two losses, means over all tokens but padding. In a document of n tokens,
// of which count_e take expert e:
//
//     balance E sum_e f_e mean(q_e)    f_e = count_e / n, a constant    q = p, or s / sum_e s
//     z_loss lse^2                     lse = log(sum_e exp(l_e))
//
//     dl += dloss balance E q (f - sum q f), of SIGMOID times (1 - s)
//     dl += dloss 2 z_loss lse p
//
// logits, weights (B, T, E)    weights: 0 for experts that are not taken    bias (E), or NULL
// starts (B, T): where the document of a token starts in its row; NULL: a row is one document
// lengths (B): tokens of a row, the rest is padding; NULL: T
// dloss: the weight of a token in both losses, 1 / (number of tokens)

typedef struct {
    RouterKind kind;
    size_t B, T, E, used;
    Real factor, balance, z_loss;
    const Real* bias;
    const int *starts, *lengths;
    size_t groups, groups_used; // SIGMOID: of consecutive experts; 0: one group
} RefRouter;

// Sets p (E), the softmax of l; returns lse.
static inline Real ref_softmax_(Real* p, const Real* l, size_t E) {
    Real max = -INFINITY, sum = 0;
    for (size_t e = 0; e < E; e++) {
        max = fmax(max, l[e]);
    }
    for (size_t e = 0; e < E; e++) {
        sum += exp(l[e] - max);
    }
    for (size_t e = 0; e < E; e++) {
        p[e] = exp(l[e] - max) / sum;
    }
    return max + log(sum);
}

// Sets q (E): p, or s / sum s.
static inline void ref_router_distribution_(Real* q, const Real* l, const RefRouter* r) {
    Real sum = 0;
    ref_softmax_(q, l, r->E);
    for (size_t e = 0; e < r->E && r->kind == ROUTER_SIGMOID; e++) {
        sum += ref_sigmoid_(l[e]);
    }
    for (size_t e = 0; e < r->E && r->kind == ROUTER_SIGMOID; e++) {
        q[e] = ref_sigmoid_(l[e]) / sum;
    }
}

// Lowers the scores of experts in groups that a token does not use: those beyond the groups_used
// with the largest sums of their two largest scores.
static inline void ref_router_choose_groups_(Real* score, const RefRouter* r) {
    const size_t count = r->groups > 1 ? r->E / r->groups : 0;
    Real sums[ROUTER_MAX_EXPERTS];
    for (size_t g = 0; g < r->groups && count > 0; g++) {
        sums[g] = -INFINITY;
        for (size_t e = g * count; e < (g + 1) * count; e++) {
            for (size_t other = g * count; other < e; other++) {
                sums[g] = fmax(sums[g], score[e] + score[other]);
            }
        }
    }
    for (size_t e = 0; e < r->E && count > 0; e++) {
        size_t better = 0;
        for (size_t g = 0; g < r->groups; g++) {
            better += sums[g] > sums[e / count] || (sums[g] == sums[e / count] && g < e / count);
        }
        score[e] = better < r->groups_used ? score[e] : -INFINITY;
    }
}

// Sets w (E) to 1 for the experts that a token takes, to 0 for the others.
static inline void ref_router_choose_(Real* w, const Real* l, const RefRouter* r) {
    Real score[ROUTER_MAX_EXPERTS];
    for (size_t e = 0; e < r->E; e++) {
        score[e] = r->kind == ROUTER_SIGMOID ? ref_sigmoid_(l[e]) + (r->bias ? r->bias[e] : 0) : l[e];
        w[e] = 0;
    }
    ref_router_choose_groups_(score, r);
    for (size_t k = 0; k < r->used; k++) {
        size_t best = 0;
        for (size_t e = 1; e < r->E; e++) {
            best = score[e] > score[best] ? e : best;
        }
        w[best] = 1;
        score[best] = -INFINITY;
    }
}

static inline void ref_router_forward(Real* weights, const Real* logits, const RefRouter* r) {
    for (size_t n = 0; n < r->B * r->T; n++) {
        const Real* l = logits + n * r->E;
        Real *w = weights + n * r->E, q[ROUTER_MAX_EXPERTS], sum = 0;
        ref_router_choose_(w, l, r);
        ref_router_distribution_(q, l, r);
        for (size_t e = 0; e < r->E; e++) {
            sum += w[e] * q[e];
        }
        const Real scale = r->kind == ROUTER_SOFTMAX   ? 1
                           : r->kind == ROUTER_SIGMOID ? r->factor / sum
                                                       : 1 / sum;
        for (size_t e = 0; e < r->E; e++) {
            w[e] *= q[e] * scale;
        }
    }
}

// Adds the gradients of both losses to dl (E) of a token; f (E) is its document's.
static inline void ref_router_losses_backward_(Real* dl, const Real* l, const Real* f, Real dloss,
                                               const RefRouter* r) {
    Real p[ROUTER_MAX_EXPERTS], q[ROUTER_MAX_EXPERTS];
    const Real lse = ref_softmax_(p, l, r->E);
    ref_router_distribution_(q, l, r);
    const Real mean = ref_dot_(q, f, r->E);
    for (size_t e = 0; e < r->E; e++) {
        const Real slope = r->kind == ROUTER_SIGMOID ? 1 - ref_sigmoid_(l[e]) : 1;
        dl[e] += dloss * r->balance * r->E * q[e] * slope * (f[e] - mean);
        dl[e] += dloss * 2 * r->z_loss * lse * p[e];
    }
}

static inline int ref_router_is_token_(const RefRouter* r, size_t n) {
    return !r->lengths || n % r->T < (size_t)r->lengths[n / r->T];
}

// Sets f (E) of the document of token n, from the weights of all tokens.
static inline void ref_router_load_(Real* f, const Real* weights, const RefRouter* r, size_t n) {
    for (size_t e = 0; e < r->E; e++) {
        Real count = 0, tokens = 0;
        for (size_t m = n / r->T * r->T; m < n / r->T * r->T + r->T; m++) {
            const int is_together =
                ref_router_is_token_(r, m) && (!r->starts || r->starts[m] == r->starts[n]);
            count += is_together && weights[m * r->E + e] > 0;
            tokens += is_together;
        }
        f[e] = count / tokens;
    }
}

static inline void ref_router_backward(Real* dlogits, const Real* dweights, const Real* logits,
                                       const Real* weights, Real dloss, const RefRouter* r) {
    for (size_t n = 0; n < r->B * r->T; n++) {
        const Real *l = logits + n * r->E, *w = weights + n * r->E, *dw = dweights + n * r->E;
        Real p[ROUTER_MAX_EXPERTS], f[ROUTER_MAX_EXPERTS];
        const Real sum = ref_dot_(w, dw, r->E);
        ref_softmax_(p, l, r->E);
        for (size_t e = 0; e < r->E; e++) {
            const Real s = ref_sigmoid_(l[e]);
            dlogits[n * r->E + e] += r->kind == ROUTER_SIGMOID   ? w[e] * (1 - s) * (dw[e] - sum / r->factor)
                                     : r->kind == ROUTER_SOFTMAX ? w[e] * dw[e] - p[e] * sum
                                                                 : w[e] * (dw[e] - sum);
        }
        if (ref_router_is_token_(r, n)) {
            ref_router_load_(f, weights, r, n);
            ref_router_losses_backward_(dlogits + n * r->E, l, f, dloss, r);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Mixture of experts: Shazeer et al., 2017; the second matrix of the MLPs, and their sum
//
//     out = sum_e w_e (act_e proj_e^T + b_e)
//
//     dw_e = dout . (act_e proj_e^T + b_e)    dact_e = w_e dout proj_e
//     dproj_e = w_e dout^T act_e              db_e = sum_n w_e dout
//
// out (N, C)    weights (N, E)    act (N, E, F): each expert's hidden layer    proj (E, C, F)
// bias (E, C), or NULL

typedef struct {
    const Real *act, *weights, *proj, *bias;
    size_t N, E, F, C;
} RefExperts;

// Returns channel c of expert e's output for token n.
static inline Real ref_expert_out_(const RefExperts* x, size_t n, size_t e, size_t c) {
    const size_t row = e * x->C + c;
    return ref_dot_(x->act + (n * x->E + e) * x->F, x->proj + row * x->F, x->F) +
           (x->bias ? x->bias[row] : 0);
}

static inline void ref_experts_forward(Real* out, RefExperts x) {
    const size_t N = x.N, E = x.E, C = x.C;
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < C; c++) {
            out[n * C + c] = 0;
            for (size_t e = 0; e < E; e++) {
                out[n * C + c] += x.weights[n * E + e] * ref_expert_out_(&x, n, e, c);
            }
        }
    }
}

// dbias may be NULL
static inline void ref_experts_backward(Real* dact, Real* dweights, Real* dproj, Real* dbias,
                                        const Real* dout, RefExperts x) {
    const size_t E = x.E, F = x.F, C = x.C;
    for (size_t i = 0; i < x.N * E * C; i++) {
        const size_t n = i / (E * C), e = i / C % E, c = i % C, hidden = (n * E + e) * F,
                     row = (e * C + c) * F;
        const Real d = dout[n * C + c], w = x.weights[n * E + e];
        dweights[n * E + e] += d * ref_expert_out_(&x, n, e, c);
        if (dbias) {
            dbias[e * C + c] += w * d;
        }
        for (size_t f = 0; f < F; f++) {
            dact[hidden + f] += w * d * x.proj[row + f];
            dproj[row + f] += w * d * x.act[hidden + f];
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Residual sum: He et al., 2015. out = left + factor right, of n elements

static inline void ref_residual_forward(Real* out, const Real* left, const Real* right, Real factor,
                                        size_t n) {
    for (size_t i = 0; i < n; i++) {
        out[i] = left[i] + factor * right[i];
    }
}

static inline void ref_residual_backward(Real* dleft, Real* dright, const Real* dout, Real factor, size_t n) {
    for (size_t i = 0; i < n; i++) {
        dleft[i] += dout[i];
        dright[i] += factor * dout[i];
    }
}

// -------------------------------------------------------------------------------------------------
// Value embeddings: v_h += g_h table[token]_h, with g_h = 2 sigmoid(sum_c gate_hc inp_c) of the
// first G columns of inp (N, C)
//
// v are the last KV HS columns of qkv (N, QKV)    table (V, KV HS)    gate (KV, G)

typedef struct {
    size_t N, C, QKV, KV, HS, G;
} RefValues;

static inline Real ref_value_gate_(const Real* inp, const Real* gate, RefValues s, size_t n, size_t h) {
    Real z = 0;
    for (size_t c = 0; c < s.G; c++) {
        z += gate[h * s.G + c] * inp[n * s.C + c];
    }
    return 2 / (1 + exp(-z));
}

static inline void ref_values_forward(Real* qkv, const Real* inp, const Real* gate, const Real* table,
                                      const int* tokens, RefValues s) {
    for (size_t n = 0; n < s.N; n++) {
        for (size_t i = 0; i < s.KV * s.HS; i++) {
            qkv[n * s.QKV + s.QKV - s.KV * s.HS + i] +=
                ref_value_gate_(inp, gate, s, n, i / s.HS) * table[(size_t)tokens[n] * s.KV * s.HS + i];
        }
    }
}

static inline void ref_values_backward(Real* dinp, Real* dgate, Real* dtable, const Real* dqkv,
                                       const Real* inp, const Real* gate, const Real* table,
                                       const int* tokens, RefValues s) {
    for (size_t n = 0; n < s.N; n++) {
        for (size_t i = 0; i < s.KV * s.HS; i++) {
            const size_t h = i / s.HS, at = (size_t)tokens[n] * s.KV * s.HS + i;
            const Real g = ref_value_gate_(inp, gate, s, n, h),
                       dv = dqkv[n * s.QKV + s.QKV - s.KV * s.HS + i], dz = dv * table[at] * g * (1 - g / 2);
            dtable[at] += g * dv;
            for (size_t c = 0; c < s.G; c++) {
                dgate[h * s.G + c] += dz * inp[n * s.C + c];
                dinp[n * s.C + c] += dz * gate[h * s.G + c];
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Scales of the stream: out = a x + b x0, all of n elements; scales: a, b

static inline void ref_scale_forward(Real* out, const Real* x, const Real* x0, const Real* scales, size_t n) {
    for (size_t i = 0; i < n; i++) {
        out[i] = scales[0] * x[i] + scales[1] * x0[i];
    }
}

static inline void ref_scale_backward(Real* dx, Real* dx0, Real* dscales, const Real* dout, const Real* x,
                                      const Real* x0, const Real* scales, size_t n) {
    for (size_t i = 0; i < n; i++) {
        dx[i] += scales[0] * dout[i];
        dx0[i] += scales[1] * dout[i];
        dscales[0] += dout[i] * x[i];
        dscales[1] += dout[i] * x0[i];
    }
}

// -------------------------------------------------------------------------------------------------
// Classifier: softmax and cross-entropy (Goodfellow, Bengio and Courville, Deep Learning, 2016,
// section 6.2.2.3)
//
//     y       = softcap tanh(logits / softcap); logits, if softcap is 0
//     lse[n]  = log(sum_v exp(y[n][v]))          v < V: the padding has no probability
//     loss[n] = lse[n] - y[n][target[n]]         0 if target is NO_TARGET (cross_entropy.h)
//
// Training minimizes loss + z_loss lse^2 (the second term: de Brebisson and Vincent, 2016):
//
//     dy[n][v] = (exp(y[n][v] - lse[n]) (1 + 2 z_loss lse[n]) - [v = target[n]]) dloss
//     dlogits  = dy (1 - (y / softcap)^2)
//
// logits (N, Vp)    target, loss, lse (N)
// dloss: the weight of a token in the loss, 1 / (number of targets)

typedef struct {
    size_t N, V, Vp;
    Real softcap, z_loss;
} RefClassifier;

static inline Real ref_softcap_(Real x, Real softcap) {
    return softcap > 0 ? softcap * tanh(x / softcap) : x;
}

static inline void ref_classifier_forward(Real* loss, Real* lse, const Real* logits, const int* target,
                                          RefClassifier of) {
    const size_t V = of.V;
    for (size_t n = 0; n < of.N; n++) {
        const Real* x = logits + n * of.Vp;
        Real max = -INFINITY, sum = 0; // exp(y - max) cannot overflow
        for (size_t v = 0; v < V; v++) {
            max = fmax(max, ref_softcap_(x[v], of.softcap));
        }
        for (size_t v = 0; v < V; v++) {
            sum += exp(ref_softcap_(x[v], of.softcap) - max);
        }
        lse[n] = max + log(sum);
        loss[n] = target[n] == NO_TARGET ? 0 : lse[n] - ref_softcap_(x[target[n]], of.softcap);
    }
}

static inline void ref_classifier_backward(Real* dlogits, const Real* logits, const Real* lse,
                                           const int* target, Real dloss, RefClassifier of) {
    for (size_t n = 0; n < of.N; n++) {
        for (size_t v = 0; v < of.V && target[n] != NO_TARGET; v++) {
            const Real y = ref_softcap_(logits[n * of.Vp + v], of.softcap);
            const Real slope = of.softcap > 0 ? y / of.softcap : 0;
            const Real p = exp(y - lse[n]), is_target = v == (size_t)target[n];
            dlogits[n * of.Vp + v] +=
                (p * (1 + 2 * of.z_loss * lse[n]) - is_target) * dloss * (1 - slope * slope);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Distillation (Hinton, Vinyals and Dean, 2015): a teacher gives log-probabilities at temperature t
//
//     pt      = softmax(y / t)
//     kl[n]   = sum_v q[v] log(q[v] / pt[v])        q = exp(log_q[n])
//
// Training minimizes (1 - a) loss + z_loss lse^2 + a t^2 kl:
//
//     dy[n][v] = ((1 - a) (p - [v = target]) + 2 z_loss lse p + a t (pt - q[v])) dloss
//
// log_q (N, V)    kl (N): 0 if target is NO_TARGET

// Sets the log-probabilities of all V tokens, (N, V).
static inline void ref_log_probs(Real* log_probs, const Real* logits, Real t, RefClassifier of) {
    for (size_t n = 0; n < of.N; n++) {
        const Real* x = logits + n * of.Vp;
        Real max = -INFINITY, sum = 0;
        for (size_t v = 0; v < of.V; v++) {
            max = fmax(max, ref_softcap_(x[v], of.softcap) / t);
        }
        for (size_t v = 0; v < of.V; v++) {
            sum += exp(ref_softcap_(x[v], of.softcap) / t - max);
        }
        for (size_t v = 0; v < of.V; v++) {
            log_probs[n * of.V + v] = ref_softcap_(x[v], of.softcap) / t - max - log(sum);
        }
    }
}

// Student and teacher: log_pt (N, V) are the student's log-probabilities at temperature t; lse is
// set by ref_classifier_forward.
typedef struct {
    RefClassifier of;
    const Real *logits, *lse, *log_pt, *log_q;
    const int* target;
    Real dloss, a, t;
} RefDistill;

// Sets kl, and adds to dlogits.
static inline void ref_distill(Real* kl, Real* dlogits, RefDistill x) {
    const size_t V = x.of.V, Vp = x.of.Vp;
    for (size_t n = 0; n < x.of.N; n++) {
        kl[n] = 0;
        if (x.target[n] == NO_TARGET) {
            continue;
        }
        for (size_t v = 0; v < V; v++) {
            const Real own = x.log_pt[n * V + v], log_q = x.log_q[n * V + v], q = exp(log_q);
            const Real y = ref_softcap_(x.logits[n * Vp + v], x.of.softcap);
            const Real slope = x.of.softcap > 0 ? y / x.of.softcap : 0;
            const Real p = exp(y - x.lse[n]), is_target = v == (size_t)x.target[n];
            const Real dy =
                (1 - x.a) * (p - is_target) + 2 * x.of.z_loss * x.lse[n] * p + x.a * x.t * (exp(own) - q);
            kl[n] += q * (log_q - own);
            dlogits[n * Vp + v] += dy * x.dloss * (1 - slope * slope);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// AdamW: Loshchilov and Hutter, 2019; gradient clipping: Pascanu, Mikolov and Bengio, 2013
//
//     norm = sqrt(sum of the squares of all gradients)      clip = min(1, max_norm / norm)
//
//     g = clip grad                       m_hat = m / (1 - beta1^t)
//     m = beta1 m + (1 - beta1) g         v_hat = v / (1 - beta2^t)
//     v = beta2 v + (1 - beta2) g^2       param -= lr (m_hat / (sqrt(v_hat) + eps)
//                                                      + weight_decay param)
//
// With opt.decay == DECAY_CAUTIOUS only parameters decay that m moves toward zero
// (--cautious-decay): they have m's sign.
//
// param, grad, m, v (n)    clip is opt.grad_scale; t, the number of the update, counts from 1

static inline Real ref_gradient_norm(const Real* grad, size_t n) {
    Real squares = 0;
    for (size_t i = 0; i < n; i++) {
        squares += grad[i] * grad[i];
    }
    return sqrt(squares);
}

static inline Real ref_clip(Real norm, Real max_norm) { return norm > max_norm ? max_norm / norm : 1; }

static inline void ref_adamw(Real* param, const Real* grad, Real* m, Real* v, size_t n, AdamW opt) {
    const Real beta1 = opt.beta1, beta2 = opt.beta2, t = opt.t;
    for (size_t i = 0; i < n; i++) {
        const Real g = grad[i] * opt.grad_scale;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        const Real m_hat = m[i] / (1 - pow(beta1, t)), v_hat = v[i] / (1 - pow(beta2, t));
        const int decays = opt.decay == DECAY_ALL || (m[i] > 0 && param[i] > 0) || (m[i] < 0 && param[i] < 0);
        param[i] -= opt.lr * (m_hat / (sqrt(v_hat) + opt.eps) + (decays ? opt.weight_decay * param[i] : 0));
    }
}

#endif
