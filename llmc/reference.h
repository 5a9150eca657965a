/*
reference.h -- the model as plain loops from the formulas: the first file to read.

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

#include "llmc/optim/adamw.h"
#include "llmc/base/check.h"
#include "llmc/ops/activation.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/model/model.h"

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
// NULL for `mean` is RMS, where mean is 0 and the term avg_c(g) is missing. NULL for `weight` is
// ones, NULL for `bias` zeros.

static inline void ref_norm_forward(Real* out, Real* mean, Real* rstd, const Real* inp, const Real* weight,
                                    const Real* bias, Real eps, size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        const Real* x = inp + n * C;
        Real sum = 0, squares = 0;
        for (size_t c = 0; c < C && mean; c++) {
            sum += x[c];
        }
        const Real center = sum / C;
        for (size_t c = 0; c < C; c++) {
            squares += (x[c] - center) * (x[c] - center);
        }
        rstd[n] = 1 / sqrt(squares / C + eps);
        for (size_t c = 0; c < C; c++) {
            out[n * C + c] = (x[c] - center) * rstd[n] * (weight ? weight[c] : 1) + (bias ? bias[c] : 0);
        }
        if (mean) {
            mean[n] = center;
        }
    }
}

static inline void ref_norm_backward(Real* dinp, Real* dweight, Real* dbias, const Real* dout,
                                     const Real* inp, const Real* weight, const Real* mean, const Real* rstd,
                                     size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        const Real *x = inp + n * C, *d = dout + n * C, center = mean ? mean[n] : 0;
        Real g_sum = 0, g_norm_sum = 0;
        for (size_t c = 0; c < C; c++) {
            const Real norm = (x[c] - center) * rstd[n], g = d[c] * (weight ? weight[c] : 1);
            g_sum += mean ? g : 0;
            g_norm_sum += g * norm;
            if (dweight) {
                dweight[c] += d[c] * norm;
            }
            if (dbias) {
                dbias[c] += d[c];
            }
        }
        for (size_t c = 0; c < C; c++) {
            const Real norm = (x[c] - center) * rstd[n], g = d[c] * (weight ? weight[c] : 1);
            dinp[n * C + c] += rstd[n] * (g - g_sum / C - norm * g_norm_sum / C);
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

static inline void ref_linear_forward(Real* out, const Real* inp, const Real* weight, const Real* bias,
                                      size_t N, size_t C, size_t OC) {
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
                                       const Real* inp, const Real* weight, size_t N, size_t C, size_t OC) {
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
// Norm of each head of queries and of keys: RMS (above), with weights or without
//
// out, inp (N, QKV)    qweight, kweight (HS), or NULL for ones    rstd (N, NH + KV), kept for the
// backward pass; NULL: no norm, out = inp

static inline void ref_head_norm_forward(Real* out, Real* rstd, const Real* inp, const Real* qweight,
                                         const Real* kweight, Real eps, size_t N, size_t NH, size_t KV,
                                         size_t HS) {
    const size_t heads = NH + 2 * KV, normed = rstd ? NH + KV : 0;
    for (size_t i = 0; i < N * heads; i++) {
        const size_t n = i / heads, h = i % heads;
        if (h < normed) {
            ref_norm_forward(out + i * HS, NULL, rstd + n * normed + h, inp + i * HS,
                             h < NH ? qweight : kweight, NULL, eps, 1, HS);
        }
        for (size_t d = 0; d < HS && h >= normed; d++) {
            out[i * HS + d] = inp[i * HS + d];
        }
    }
}

static inline void ref_head_norm_backward(Real* dinp, Real* dqweight, Real* dkweight, const Real* dout,
                                          const Real* inp, const Real* qweight, const Real* kweight,
                                          const Real* rstd, size_t N, size_t NH, size_t KV, size_t HS) {
    const size_t heads = NH + 2 * KV, normed = rstd ? NH + KV : 0;
    for (size_t i = 0; i < N * heads; i++) {
        const size_t n = i / heads, h = i % heads;
        if (h < normed) {
            ref_norm_backward(dinp + i * HS, h < NH ? dqweight : dkweight, NULL, dout + i * HS, inp + i * HS,
                              h < NH ? qweight : kweight, NULL, rstd + n * normed + h, 1, HS);
        }
        for (size_t d = 0; d < HS && h >= normed; d++) {
            dinp[i * HS + d] += dout[i * HS + d];
        }
    }
}

// Norm of all heads of queries together, and of all heads of keys: RMS with weights
//
// qweight (NH HS)    kweight (KV HS)    rstd (N, 2), kept for the backward pass

static inline void ref_row_norm_forward(Real* out, Real* rstd, const Real* inp, const Real* qweight,
                                        const Real* kweight, Real eps, size_t N, size_t NH, size_t KV,
                                        size_t HS) {
    const size_t Q = NH * HS, K = KV * HS;
    for (size_t n = 0; n < N; n++) {
        const Real* q = inp + n * (Q + 2 * K);
        Real* o = out + n * (Q + 2 * K);
        ref_norm_forward(o, NULL, rstd + 2 * n, q, qweight, NULL, eps, 1, Q);
        ref_norm_forward(o + Q, NULL, rstd + 2 * n + 1, q + Q, kweight, NULL, eps, 1, K);
        for (size_t c = Q + K; c < Q + 2 * K; c++) {
            o[c] = q[c];
        }
    }
}

static inline void ref_row_norm_backward(Real* dinp, Real* dqweight, Real* dkweight, const Real* dout,
                                         const Real* inp, const Real* qweight, const Real* kweight,
                                         const Real* rstd, size_t N, size_t NH, size_t KV, size_t HS) {
    const size_t Q = NH * HS, K = KV * HS;
    for (size_t n = 0; n < N; n++) {
        const size_t q = n * (Q + 2 * K), k = q + Q;
        ref_norm_backward(dinp + q, dqweight, NULL, dout + q, inp + q, qweight, NULL, rstd + 2 * n, 1, Q);
        ref_norm_backward(dinp + k, dkweight, NULL, dout + k, inp + k, kweight, NULL, rstd + 2 * n + 1, 1, K);
        for (size_t v = k + K; v < k + 2 * K; v++) {
            dinp[v] += dout[v];
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
// contexts longer than those of pretraining, a factor scales f down: all (linear), or those whose
// wavelength 2 pi / f is long (Llama 3)
//
//     turns = original_context f / (2 pi)      rise = (turns - low) / (high - low), within 0 and 1
//     f -> f (rise + (1 - rise) / factor)
//
// Frequencies are rounded to fp32, as other programs have them: at high positions this matters.

static inline Real ref_scale_frequency_(Real f, RopeScaling scaling) {
    const Real turns = scaling.original_context * f / (2 * M_PI), low = scaling.low_freq_factor,
               high = scaling.high_freq_factor;
    switch (scaling.kind) {
    case ROPE_PLAIN:
        return f;
    case ROPE_LINEAR:
        return f / scaling.factor;
    case ROPE_LLAMA3:
        break;
    }
    const Real rise = fmin(fmax((turns - low) / (high - low), 0), 1);
    return f * (rise + (1 - rise) / scaling.factor);
}

static inline void ref_rope_frequencies(Real* frequency, size_t HS, size_t dims, Real base,
                                        RopeScaling scaling) {
    for (size_t i = 0; i < HS / 2; i++) {
        const Real f = pow(base, -2.0 * (Real)i / (Real)dims);
        frequency[i] = 2 * i < dims ? (float)ref_scale_frequency_(f, scaling) : 0;
    }
}

static inline void ref_turn_(Real* out, const Real* inp, const Real* frequency, size_t HS, Real t) {
    for (size_t i = 0; i < HS / 2; i++) {
        const Real c = cos(t * frequency[i]), s = sin(t * frequency[i]), e = inp[2 * i], o = inp[2 * i + 1];
        out[2 * i] += e * c - o * s;
        out[2 * i + 1] += o * c + e * s;
    }
}

// Adds inp to out, with its queries and keys turned from 0 to t (sign 1), or back (-1).
static inline void ref_rope_(Real* out, const Real* inp, const Real* frequency, Real sign, size_t B, size_t T,
                             size_t NH, size_t KV, size_t HS) {
    const size_t heads = NH + 2 * KV;
    for (size_t i = 0; i < B * T * heads; i++) {
        const size_t t = i / heads % T, turned = frequency && i % heads < NH + KV;
        if (turned) {
            ref_turn_(out + i * HS, inp + i * HS, frequency, HS, sign * t);
        }
        for (size_t d = 0; d < HS && !turned; d++) {
            out[i * HS + d] += inp[i * HS + d];
        }
    }
}

static inline void ref_rope_forward(Real* out, const Real* inp, const Real* frequency, size_t B, size_t T,
                                    size_t NH, size_t KV, size_t HS) {
    memset(out, 0, B * T * (NH + 2 * KV) * HS * sizeof(Real));
    ref_rope_(out, inp, frequency, 1, B, T, NH, KV, HS);
}

static inline void ref_rope_backward(Real* dinp, const Real* dout, const Real* frequency, size_t B, size_t T,
                                     size_t NH, size_t KV, size_t HS) {
    ref_rope_(dinp, dout, frequency, -1, B, T, NH, KV, HS);
}

// -------------------------------------------------------------------------------------------------
// Causal multi-head attention: Vaswani et al., 2017; backward from lse: Dao et al., 2022; with keys
// and values for groups of NH / KV queries: Ainslie et al., 2023
//
//     score[t][u] = q[t] . k[u] / sqrt(HS)           start[t] <= u <= t and t - u < window
//     lse[t]      = log(sum_u exp(score[t][u]))      p[t][u] = exp(score[t][u] - lse[t])
//     out[t]      = sum_u p[t][u] v[u]
//
//     ds[t][u] = p[t][u] (dout[t] . v[u] - dout[t] . out[t]) / sqrt(HS)
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

static inline Real ref_score_(const Real* q, const Real* k, size_t HS) {
    return ref_dot_(q, k, HS) / sqrt(HS);
}

// A query: token t of head h of sequence b, its places in qkv and out, and the keys that it sees.
typedef struct {
    size_t t, start, row; // row: distance from one token's key to the next
    size_t q, k, v, out;  // k, v: of token 0
} RefQuery_;

static inline RefQuery_ ref_query_(size_t i, const int* starts, size_t window, size_t T, size_t NH, size_t KV,
                                   size_t HS) {
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
                                         size_t window, size_t B, size_t T, size_t NH, size_t KV, size_t HS) {
    for (size_t i = 0; i < B * NH * T; i++) {
        const RefQuery_ at = ref_query_(i, starts, window, T, NH, KV, HS);
        const Real *q = qkv + at.q, *k = qkv + at.k, *v = qkv + at.v;
        Real* o = out + at.out;
        Real max = -INFINITY, sum = 0; // maximum of the scores: exp(score - max) cannot overflow
        for (size_t u = at.start; u <= at.t; u++) {
            max = fmax(max, ref_score_(q, k + u * at.row, HS));
        }
        for (size_t u = at.start; u <= at.t; u++) {
            sum += exp(ref_score_(q, k + u * at.row, HS) - max);
        }
        lse[i] = max + log(sum);
        for (size_t d = 0; d < HS; d++) {
            o[d] = 0;
        }
        for (size_t u = at.start; u <= at.t; u++) {
            const Real p = exp(ref_score_(q, k + u * at.row, HS) - lse[i]);
            for (size_t d = 0; d < HS; d++) {
                o[d] += p * v[u * at.row + d];
            }
        }
    }
}

static inline void ref_attention_backward(Real* dqkv, const Real* dout, const Real* qkv, const Real* out,
                                          const Real* lse, const int* starts, size_t window, size_t B,
                                          size_t T, size_t NH, size_t KV, size_t HS) {
    for (size_t i = 0; i < B * NH * T; i++) {
        const RefQuery_ at = ref_query_(i, starts, window, T, NH, KV, HS);
        const Real *q = qkv + at.q, *k = qkv + at.k, *v = qkv + at.v;
        Real *dq = dqkv + at.q, *dk = dqkv + at.k, *dv = dqkv + at.v;
        const Real *o = out + at.out, *d_o = dout + at.out;
        const Real average = ref_dot_(d_o, o, HS); // average of d_o . v, weighted by p
        for (size_t u = at.start; u <= at.t; u++) {
            const size_t row = u * at.row;
            const Real p = exp(ref_score_(q, k + row, HS) - lse[i]);
            const Real ds = p * (ref_dot_(d_o, v + row, HS) - average) / sqrt(HS);
            for (size_t d = 0; d < HS; d++) {
                dq[d] += ds * k[row + d];
                dk[row + d] += ds * q[d];
                dv[row + d] += p * d_o[d];
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
// The square of ReLU: So et al., 2021
//
//     act = max(x, 0)^2      dx = dact 2 max(x, 0)
//
// act (N, F)    pre: x (N, F); of SwiGLU (g, x) (N, 2, F)

static inline double ref_sigmoid_(double x) { return 1 / (1 + exp(-x)); }

// Returns the activation of x, and its derivatives, given the gate of x, or anything.
typedef struct {
    Real act, dx, dgate;
} RefActivation_;

static inline RefActivation_ ref_activation_(Real x, Real gate, ActivationKind kind) {
    if (kind == ACTIVATION_SWIGLU) {
        const Real s = ref_sigmoid_(gate);
        return (RefActivation_){gate * s * x, gate * s, x * s * (1 + gate * (1 - s))};
    }
    if (kind == ACTIVATION_RELU2) {
        const Real positive = fmax(x, 0);
        return (RefActivation_){positive * positive, 2 * positive, 0};
    }
    const double v = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x),
                 dv = sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x), s = ref_sigmoid_(2 * v);
    return (RefActivation_){(Real)(x * s), (Real)(s + 2 * x * s * (1 - s) * dv), 0};
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

// Sets w (E) to 1 for the experts that a token takes, to 0 for the others.
static inline void ref_router_choose_(Real* w, const Real* l, const RefRouter* r) {
    Real score[ROUTER_MAX_EXPERTS];
    for (size_t e = 0; e < r->E; e++) {
        score[e] = r->kind == ROUTER_SIGMOID ? ref_sigmoid_(l[e]) + (r->bias ? r->bias[e] : 0) : l[e];
        w[e] = 0;
    }
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

// Adds the gradients of both losses to dl (E) of a token; f (E) is that of its document.
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
//     out = sum_e w_e act_e proj_e^T
//
//     dw_e = dout . (act_e proj_e^T)    dact_e = w_e dout proj_e    dproj_e = w_e dout^T act_e
//
// out (N, C)    weights (N, E)    act (N, E, F): each expert's hidden layer    proj (E, C, F)

static inline void ref_experts_forward(Real* out, const Real* act, const Real* weights, const Real* proj,
                                       size_t N, size_t E, size_t F, size_t C) {
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < C; c++) {
            out[n * C + c] = 0;
            for (size_t e = 0; e < E; e++) {
                out[n * C + c] +=
                    weights[n * E + e] * ref_dot_(act + (n * E + e) * F, proj + (e * C + c) * F, F);
            }
        }
    }
}

static inline void ref_experts_backward(Real* dact, Real* dweights, Real* dproj, const Real* dout,
                                        const Real* act, const Real* weights, const Real* proj, size_t N,
                                        size_t E, size_t F, size_t C) {
    for (size_t i = 0; i < N * E * C; i++) {
        const size_t n = i / (E * C), e = i / C % E, c = i % C, hidden = (n * E + e) * F,
                     row = (e * C + c) * F;
        const Real d = dout[n * C + c], w = weights[n * E + e];
        dweights[n * E + e] += d * ref_dot_(act + hidden, proj + row, F);
        for (size_t f = 0; f < F; f++) {
            dact[hidden + f] += w * d * proj[row + f];
            dproj[row + f] += w * d * act[hidden + f];
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Residual sum: He et al., 2015. out = left + right, of n elements

static inline void ref_residual_forward(Real* out, const Real* left, const Real* right, size_t n) {
    for (size_t i = 0; i < n; i++) {
        out[i] = left[i] + right[i];
    }
}

static inline void ref_residual_backward(Real* dleft, Real* dright, const Real* dout, size_t n) {
    for (size_t i = 0; i < n; i++) {
        dleft[i] += dout[i];
        dright[i] += dout[i];
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

static inline Real ref_softcap_(Real x, Real softcap) {
    return softcap > 0 ? softcap * tanh(x / softcap) : x;
}

static inline void ref_classifier_forward(Real* loss, Real* lse, const Real* logits, const int* target,
                                          Real softcap, size_t N, size_t V, size_t Vp) {
    for (size_t n = 0; n < N; n++) {
        const Real* x = logits + n * Vp;
        Real max = -INFINITY, sum = 0; // exp(y - max) cannot overflow
        for (size_t v = 0; v < V; v++) {
            max = fmax(max, ref_softcap_(x[v], softcap));
        }
        for (size_t v = 0; v < V; v++) {
            sum += exp(ref_softcap_(x[v], softcap) - max);
        }
        lse[n] = max + log(sum);
        loss[n] = target[n] == NO_TARGET ? 0 : lse[n] - ref_softcap_(x[target[n]], softcap);
    }
}

static inline void ref_classifier_backward(Real* dlogits, const Real* logits, const Real* lse,
                                           const int* target, Real dloss, Real softcap, Real z_loss, size_t N,
                                           size_t V, size_t Vp) {
    for (size_t n = 0; n < N; n++) {
        for (size_t v = 0; v < V && target[n] != NO_TARGET; v++) {
            const Real y = ref_softcap_(logits[n * Vp + v], softcap), slope = softcap > 0 ? y / softcap : 0;
            const Real p = exp(y - lse[n]), is_target = v == (size_t)target[n];
            dlogits[n * Vp + v] += (p * (1 + 2 * z_loss * lse[n]) - is_target) * dloss * (1 - slope * slope);
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
static inline void ref_log_probs(Real* log_probs, const Real* logits, Real softcap, Real t, size_t N,
                                 size_t V, size_t Vp) {
    for (size_t n = 0; n < N; n++) {
        const Real* x = logits + n * Vp;
        Real max = -INFINITY, sum = 0;
        for (size_t v = 0; v < V; v++) {
            max = fmax(max, ref_softcap_(x[v], softcap) / t);
        }
        for (size_t v = 0; v < V; v++) {
            sum += exp(ref_softcap_(x[v], softcap) / t - max);
        }
        for (size_t v = 0; v < V; v++) {
            log_probs[n * V + v] = ref_softcap_(x[v], softcap) / t - max - log(sum);
        }
    }
}

// Sets kl, and adds to dlogits. log_pt (N, V) are the student's log-probabilities at temperature t
// and lse those of ref_classifier_forward.
static inline void ref_distill(Real* kl, Real* dlogits, const Real* logits, const Real* lse,
                               const Real* log_pt, const Real* log_q, const int* target, Real dloss, Real a,
                               Real t, Real softcap, Real z_loss, size_t N, size_t V, size_t Vp) {
    for (size_t n = 0; n < N; n++) {
        kl[n] = 0;
        if (target[n] == NO_TARGET) {
            continue;
        }
        for (size_t v = 0; v < V; v++) {
            const Real own = log_pt[n * V + v], q = exp(log_q[n * V + v]);
            const Real y = ref_softcap_(logits[n * Vp + v], softcap), slope = softcap > 0 ? y / softcap : 0;
            const Real p = exp(y - lse[n]), is_target = v == (size_t)target[n];
            const Real dy = (1 - a) * (p - is_target) + 2 * z_loss * lse[n] * p + a * t * (exp(own) - q);
            kl[n] += q * (log_q[n * V + v] - own);
            dlogits[n * Vp + v] += dy * dloss * (1 - slope * slope);
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
// (--cautious-decay): those of m's sign.
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

// -------------------------------------------------------------------------------------------------
// The model

// Parameters are those of the table in model.h. The struct points to the tensors of one layer.
#define REF_MEMBER_(name, ...) Real* name;
typedef struct {
    MODEL_PARAMETERS(REF_MEMBER_)
} RefParameters;

// Sizes of a model, and the numbers in its formulas.
typedef struct {
    size_t B, T, N, C, NH, KV, HS, Q, QKV, F, V, Vp;
    size_t G;     // columns before the activation for each one after it: 2 with gates
    size_t E, Fs; // experts, or 0; hidden units of the shared expert
    size_t A;     // columns of the hidden layers after the activation: F, of each expert
    const Architecture* kinds;
} RefSizes;

static inline RefSizes ref_sizes(ModelConfig cfg, size_t B, size_t T) {
    const Architecture* kinds = model_architecture(cfg.arch);
    const size_t NH = (size_t)cfg.NH, KV = (size_t)model_key_heads(cfg), HS = (size_t)model_head_size(cfg),
                 F = (size_t)model_hidden(cfg);
    RefSizes s; // all members are set
    s.B = B, s.T = T, s.N = B * T, s.C = (size_t)cfg.C;
    s.NH = NH, s.KV = KV, s.HS = HS, s.Q = NH * HS, s.QKV = (NH + 2 * KV) * HS;
    s.F = F, s.V = (size_t)cfg.V, s.Vp = (size_t)cfg.Vp;
    s.G = (size_t)activation_gates(kinds->activation);
    s.E = (size_t)cfg.E, s.Fs = (size_t)cfg.Fs;
    s.A = (size_t)model_mlps(cfg) * F;
    s.kinds = kinds;
    return s;
}

static inline size_t ref_qk_rstd_(RefSizes s) {
    const HeadsKind kind = s.kinds->heads;
    return kind == HEADS_PLAIN ? 0 : kind == HEADS_ROW_NORM ? 2 : s.NH + s.KV;
}

// clang-format off
// Activations: name, layers, columns for each of N = B*T tokens; without columns, the model does
// not have it. The gradients of the activations are a second such set.
#define REF_ACTIVATIONS(X)                                                                                    \
    X(embedded,      1,     s.kinds->has_embedding_norm ? s.C : 0)  /* (B, T, C)   the embedding, if it has a norm */ \
    X(embedded_rstd, 1,     s.kinds->has_embedding_norm)            /* (B, T)      */                         \
    X(stream,        L + 1, s.C)   /* (B, T, C)   the residual stream that enters block l, after the last one too */ \
    X(ln1,           L,     s.C)                                    /* (B, T, C)   */                         \
    X(ln1_mean,      L,     s.kinds->norm == NORM_LAYER)            /* (B, T)      */                         \
    X(ln1_rstd,      L,     1)                                      /* (B, T)      */                         \
    X(qkv,           L,     s.QKV)                                  /* (B, T, QKV) */                         \
    X(normed,        L,     s.QKV)                                  /* (B, T, QKV) after the norm of heads */ \
    X(qk_rstd,       L,     ref_qk_rstd_(s))                        /* (B, T, NH + KV), or (B, T, 2) */       \
    X(turned,        L,     s.QKV)                                  /* (B, T, QKV) after the rotation */      \
    X(atty,          L,     s.Q)                                    /* (B, T, NH, HS)  what the heads see */  \
    X(att_lse,       L,     s.NH)                                   /* (B, NH, T)  */                         \
    X(attproj,       L,     s.C)                                    /* (B, T, C)   what attention adds to the stream */ \
    X(residual2,     L,     s.C)                                    /* (B, T, C)   the stream after attention */ \
    X(ln2,           L,     s.C)                                    /* (B, T, C)   */                         \
    X(ln2_mean,      L,     s.kinds->norm == NORM_LAYER)            /* (B, T)      */                         \
    X(ln2_rstd,      L,     1)                                      /* (B, T)      */                         \
    X(router_logits, L,     s.E)                                    /* (B, T, E)   */                         \
    X(expert_weights, L,    s.E)                                    /* (B, T, E)   */                         \
    X(fch,           L,     s.G * s.A)                              /* (B, T, E, G, F)  the hidden layer of each MLP */ \
    X(fch_act,       L,     s.A)                                    /* (B, T, E, F) */                        \
    X(sfch,          L,     s.G * s.Fs)                             /* (B, T, G, Fs) of the shared expert */  \
    X(sfch_act,      L,     s.Fs)                                   /* (B, T, Fs)  */                         \
    X(shared,        L,     s.Fs > 0 ? s.C : 0)                     /* (B, T, C)   its output */              \
    X(routed,        L,     s.Fs > 0 ? s.C : 0)                     /* (B, T, C)   the others' */             \
    X(fcproj,        L,     s.C)                                    /* (B, T, C)   what the MLP adds to the stream */ \
    X(lnf,           1,     s.C)                                    /* (B, T, C)   */                         \
    X(lnf_mean,      1,     s.kinds->norm == NORM_LAYER)            /* (B, T)      */                         \
    X(lnf_rstd,      1,     1)                                      /* (B, T)      */                         \
    X(logits,        1,     s.Vp)                                   /* (B, T, Vp)  */                         \
    X(logits_lse,    1,     1)                                      /* (B, T)      */                         \
    X(losses,        1,     1)                                      /* (B, T)      */
// clang-format on

typedef struct {
    REF_ACTIVATIONS(REF_MEMBER_)
} RefActivations;
#undef REF_MEMBER_

typedef struct {
    ModelConfig cfg;
    RefSizes sizes;
    Real eps, softcap, z_loss;            // of norms; of the classifier
    Real router_balance, router_z;        // weights of the router's losses
    const int* lengths;                   // (B) tokens of each row, the rest is padding; NULL: T
    Real* frequency;                      // (HS / 2) of rotary positions, or NULL
    TensorRow rows[MODEL_PARAMETER_ROWS]; // layout of the tensors of params and grads
    size_t parameter_bytes, activation_bytes;
    Real *params, *grads, *acts, *dacts;
} RefModel;

// Returns the tensors of layer l in `memory`, which is params or grads; tensors that all layers
// share are the same for every l.
static inline RefParameters ref_parameters_(const RefModel* m, Real* memory, int l) {
    RefParameters p;
    const TensorRow* row = m->rows;
// for each row of the table: p.wte = its address, then the next row
#define REF_TENSOR_(name, ...)                                                                               \
    p.name = row->layers > 0 ? (Real*)tensor_at_layer(row, memory, l) : NULL;                                \
    row++;
    MODEL_PARAMETERS(REF_TENSOR_)
#undef REF_TENSOR_
    return p;
}

// Returns the tensors of layer l in acts or dacts.
static inline RefActivations ref_activations_(const RefModel* m, Real* memory, int l) {
    const RefSizes s = m->sizes;
    const size_t L = (size_t)m->cfg.L;
    RefActivations a;
// for each activation: a.stream = its address at layer l; then `memory` moves past all its layers
#define REF_TENSOR_(name, layers, cols)                                                                      \
    a.name = (cols) > 0 ? memory + ((layers) == 1 ? 0 : (size_t)l * s.N * (size_t)(cols)) : NULL;            \
    memory += (size_t)(layers)*s.N * (size_t)(cols);
    REF_ACTIVATIONS(REF_TENSOR_)
#undef REF_TENSOR_
    return a;
}

static inline Real* ref_frequencies_(ModelConfig cfg) {
    const size_t HS = (size_t)model_head_size(cfg);
    if (model_architecture(cfg.arch)->positions == POSITIONS_LEARNED) {
        return NULL;
    }
    Real* frequency = (Real*)check_alloc(HS / 2, sizeof(Real), "reference: frequencies");
    ref_rope_frequencies(frequency, HS, (size_t)model_rope_dims(cfg), model_rope_base(cfg), cfg.scaling);
    return frequency;
}

// Opens a model whose parameters are zero. The caller may change eps, the weights of losses, and
// lengths.
static inline void ref_model_open(RefModel* m, ModelConfig cfg, size_t B, size_t T) {
    const RefSizes s = ref_sizes(cfg, B, T);
    const size_t L = (size_t)cfg.L;
#define REF_COUNT_(name, layers, cols) +(size_t)(layers) * (size_t)(cols)
    m->cfg = cfg;
    m->sizes = s;
    m->eps = model_norm_eps(cfg);
    m->softcap = cfg.softcap;
    m->z_loss = m->router_balance = m->router_z = 0;
    m->lengths = NULL;
    m->frequency = ref_frequencies_(cfg);
    m->parameter_bytes = model_parameter_rows_of(m->rows, cfg, sizeof(Real));
    m->activation_bytes = s.N * (0 REF_ACTIVATIONS(REF_COUNT_)) * sizeof(Real);
    m->params = (Real*)check_alloc(m->parameter_bytes, 1, "reference: parameters");
    m->grads = (Real*)check_alloc(m->parameter_bytes, 1, "reference: gradients");
    m->acts = (Real*)check_alloc(m->activation_bytes, 1, "reference: activations");
    m->dacts = (Real*)check_alloc(m->activation_bytes, 1, "reference: gradients of activations");
#undef REF_COUNT_
}

static inline void ref_model_close(RefModel* m) {
    free(m->dacts);
    free(m->acts);
    free(m->grads);
    free(m->params);
    free(m->frequency);
}

static inline RefRouter ref_router_of_(const RefModel* m, const RefParameters* p, const int* starts) {
    const RefSizes s = m->sizes;
    return (RefRouter){.kind = s.kinds->router,
                       .B = s.B,
                       .T = s.T,
                       .E = s.E,
                       .used = (size_t)m->cfg.E_used,
                       .factor = model_router_factor(m->cfg),
                       .balance = m->router_balance,
                       .z_loss = m->router_z,
                       .bias = p->routerb,
                       .starts = starts,
                       .lengths = m->lengths};
}

// Returns the number of tokens of a batch, without padding.
static inline size_t ref_model_tokens_(const RefModel* m) {
    size_t tokens = m->lengths ? 0 : m->sizes.N;
    for (size_t b = 0; m->lengths && b < m->sizes.B; b++) {
        tokens += (size_t)m->lengths[b];
    }
    return tokens;
}

// Computes the MLP of a block, or its experts: fcproj from ln2.
static inline void ref_mlp_forward_(const RefModel* m, const RefParameters* p, const RefActivations* a) {
    const RefSizes s = m->sizes;
    const size_t N = s.N, C = s.C, F = s.F, E = s.E, Fs = s.Fs;
    const ActivationKind kind = s.kinds->activation;
    const RefRouter router = ref_router_of_(m, p, NULL);
    ref_linear_forward(a->fch, a->ln2, p->fcw, p->fcb, N, C, s.G * s.A);
    ref_activation_forward(a->fch_act, a->fch, N * s.A / F, F, kind);
    if (E == 0) {
        ref_linear_forward(a->fcproj, a->fch_act, p->fcprojw, p->fcprojb, N, F, C);
        return;
    }
    ref_linear_forward(a->router_logits, a->ln2, p->routerw, NULL, N, C, E);
    ref_router_forward(a->expert_weights, a->router_logits, &router);
    ref_experts_forward(Fs ? a->routed : a->fcproj, a->fch_act, a->expert_weights, p->fcprojw, N, E, F, C);
    if (Fs) { // the shared expert
        ref_linear_forward(a->sfch, a->ln2, p->sfcw, NULL, N, C, s.G * Fs);
        ref_activation_forward(a->sfch_act, a->sfch, N, Fs, kind);
        ref_linear_forward(a->shared, a->sfch_act, p->sfcprojw, NULL, N, Fs, C);
        ref_residual_forward(a->fcproj, a->routed, a->shared, N * C);
    }
}

// Goes through the same steps backward.
static inline void ref_mlp_backward_(const RefModel* m, const RefParameters* p, const RefParameters* dp,
                                     const RefActivations* a, const RefActivations* da, const int* starts) {
    const RefSizes s = m->sizes;
    const size_t N = s.N, C = s.C, F = s.F, E = s.E, Fs = s.Fs;
    const ActivationKind kind = s.kinds->activation;
    const RefRouter router = ref_router_of_(m, p, starts);
    if (Fs) {
        ref_residual_backward(da->routed, da->shared, da->fcproj, N * C);
        ref_linear_backward(da->sfch_act, dp->sfcprojw, NULL, da->shared, a->sfch_act, p->sfcprojw, N, Fs, C);
        ref_activation_backward(da->sfch, da->sfch_act, a->sfch, N, Fs, kind);
        ref_linear_backward(da->ln2, dp->sfcw, NULL, da->sfch, a->ln2, p->sfcw, N, C, s.G * Fs);
    }
    if (E) {
        ref_experts_backward(da->fch_act, da->expert_weights, dp->fcprojw, Fs ? da->routed : da->fcproj,
                             a->fch_act, a->expert_weights, p->fcprojw, N, E, F, C);
        ref_router_backward(da->router_logits, da->expert_weights, a->router_logits, a->expert_weights,
                            (Real)1 / ref_model_tokens_(m), &router);
        ref_linear_backward(da->ln2, dp->routerw, NULL, da->router_logits, a->ln2, p->routerw, N, C, E);
    } else {
        ref_linear_backward(da->fch_act, dp->fcprojw, dp->fcprojb, da->fcproj, a->fch_act, p->fcprojw, N, F,
                            C);
    }
    ref_activation_backward(da->fch, da->fch_act, a->fch, N * s.A / F, F, kind);
    ref_linear_backward(da->ln2, dp->fcw, dp->fcb, da->fch, a->ln2, p->fcw, N, C, s.G * s.A);
}

// Computes the norms of queries and keys: normed from qkv.
static inline void ref_qk_norm_forward_(const RefModel* m, const RefParameters* p, const RefActivations* a) {
    const RefSizes s = m->sizes;
    (s.kinds->heads == HEADS_ROW_NORM ? ref_row_norm_forward : ref_head_norm_forward)(
        a->normed, a->qk_rstd, a->qkv, p->qnormw, p->knormw, m->eps, s.N, s.NH, s.KV, s.HS);
}

static inline void ref_qk_norm_backward_(const RefModel* m, const RefParameters* p, const RefParameters* dp,
                                         const RefActivations* a, const RefActivations* da) {
    const RefSizes s = m->sizes;
    (s.kinds->heads == HEADS_ROW_NORM ? ref_row_norm_backward : ref_head_norm_backward)(
        da->qkv, dp->qnormw, dp->knormw, da->normed, a->qkv, p->qnormw, p->knormw, a->qk_rstd, s.N, s.NH,
        s.KV, s.HS);
}

// Computes block l. With the residual stream x, and weights of its own in each product:
//
//     y = norm(x)                      y = norm(x)
//     qkv = y W^T + b                  h = y W^T + b
//     y = attention(turn(norm(qkv)))   y = activation(h)
//     x = x + y W^T + b                x = x + y W^T + b, or a sum of experts
static inline void ref_block_forward_(RefModel* m, int l, const int* starts) {
    const RefSizes s = m->sizes;
    const size_t N = s.N, C = s.C, window = (size_t)model_window(m->cfg, l);
    const RefParameters p = ref_parameters_(m, m->params, l);
    const RefActivations a = ref_activations_(m, m->acts, l), next = ref_activations_(m, m->acts, l + 1);
    ref_norm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.stream, p.ln1w, p.ln1b, m->eps, N, C);
    ref_linear_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, N, C, s.QKV);
    ref_qk_norm_forward_(m, &p, &a);
    ref_rope_forward(a.turned, a.normed, m->frequency, s.B, s.T, s.NH, s.KV, s.HS);
    ref_attention_forward(a.atty, a.att_lse, a.turned, starts, window, s.B, s.T, s.NH, s.KV, s.HS);
    ref_linear_forward(a.attproj, a.atty, p.attprojw, p.attprojb, N, s.Q, C);
    ref_residual_forward(a.residual2, a.stream, a.attproj, N * C);
    ref_norm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, m->eps, N, C);
    ref_mlp_forward_(m, &p, &a);
    ref_residual_forward(next.stream, a.residual2, a.fcproj, N * C);
}

// Goes through the same steps backward; da, dp: gradients.
static inline void ref_block_backward_(RefModel* m, int l, const int* starts) {
    const RefSizes s = m->sizes;
    const size_t N = s.N, C = s.C, window = (size_t)model_window(m->cfg, l);
    const RefParameters p = ref_parameters_(m, m->params, l), dp = ref_parameters_(m, m->grads, l);
    const RefActivations a = ref_activations_(m, m->acts, l);
    const RefActivations da = ref_activations_(m, m->dacts, l), dnext = ref_activations_(m, m->dacts, l + 1);
    ref_residual_backward(da.residual2, da.fcproj, dnext.stream, N * C);
    ref_mlp_backward_(m, &p, &dp, &a, &da, starts);
    ref_norm_backward(da.residual2, dp.ln2w, dp.ln2b, da.ln2, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd, N,
                      C);
    ref_residual_backward(da.stream, da.attproj, da.residual2, N * C);
    ref_linear_backward(da.atty, dp.attprojw, dp.attprojb, da.attproj, a.atty, p.attprojw, N, s.Q, C);
    ref_attention_backward(da.turned, da.atty, a.turned, a.atty, a.att_lse, starts, window, s.B, s.T, s.NH,
                           s.KV, s.HS);
    ref_rope_backward(da.normed, da.turned, m->frequency, s.B, s.T, s.NH, s.KV, s.HS);
    ref_qk_norm_backward_(m, &p, &dp, &a, &da);
    ref_linear_backward(da.ln1, dp.qkvw, dp.qkvb, da.qkv, a.ln1, p.qkvw, N, C, s.QKV);
    ref_norm_backward(da.stream, dp.ln1w, dp.ln1b, da.ln1, a.stream, p.ln1w, a.ln1_mean, a.ln1_rstd, N, C);
}

// Returns the loss: the mean over the targets, without the z-loss. tokens, targets, starts (B, T);
// starts may be NULL.
static inline Real ref_model_forward(RefModel* m, const int* tokens, const int* targets, const int* starts) {
    const RefSizes s = m->sizes;
    const RefParameters p = ref_parameters_(m, m->params, 0);
    const RefActivations first = ref_activations_(m, m->acts, 0), a = ref_activations_(m, m->acts, m->cfg.L);
    Real* embedded = a.embedded ? a.embedded : first.stream;
    ref_embedding_forward(embedded, tokens, p.wte, p.wpe, s.B, s.T, s.C);
    if (a.embedded) {
        ref_norm_forward(first.stream, NULL, a.embedded_rstd, a.embedded, NULL, NULL, m->eps, s.N, s.C);
    }
    for (int l = 0; l < m->cfg.L; l++) {
        ref_block_forward_(m, l, starts);
    }
    ref_norm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, a.stream, p.lnfw, p.lnfb, m->eps, s.N, s.C);
    ref_linear_forward(a.logits, a.lnf, p.head ? p.head : p.wte, NULL, s.N, s.C, s.Vp);
    ref_classifier_forward(a.losses, a.logits_lse, a.logits, targets, m->softcap, s.N, s.V, s.Vp);
    Real sum = 0;
    for (size_t n = 0; n < s.N; n++) {
        sum += a.losses[n];
    }
    return sum / targets_count(targets, (int)s.N);
}

// Sets the gradients of the loss, and of the losses that are not printed, after the forward pass on
// the same batch.
static inline void ref_model_backward(RefModel* m, const int* tokens, const int* targets, const int* starts) {
    const RefSizes s = m->sizes;
    const RefParameters p = ref_parameters_(m, m->params, 0), dp = ref_parameters_(m, m->grads, 0);
    const RefActivations a = ref_activations_(m, m->acts, m->cfg.L),
                         da = ref_activations_(m, m->dacts, m->cfg.L),
                         dfirst = ref_activations_(m, m->dacts, 0);
    const Real dloss = (Real)1 / targets_count(targets, (int)s.N);
    memset(m->grads, 0, m->parameter_bytes);
    memset(m->dacts, 0, m->activation_bytes);
    ref_classifier_backward(da.logits, a.logits, a.logits_lse, targets, dloss, m->softcap, m->z_loss, s.N,
                            s.V, s.Vp);
    ref_linear_backward(da.lnf, p.head ? dp.head : dp.wte, NULL, da.logits, a.lnf, p.head ? p.head : p.wte,
                        s.N, s.C, s.Vp);
    ref_norm_backward(da.stream, dp.lnfw, dp.lnfb, da.lnf, a.stream, p.lnfw, a.lnf_mean, a.lnf_rstd, s.N,
                      s.C);
    for (int l = m->cfg.L - 1; l >= 0; l--) {
        ref_block_backward_(m, l, starts);
    }
    if (a.embedded) {
        ref_norm_backward(da.embedded, NULL, NULL, dfirst.stream, a.embedded, NULL, NULL, a.embedded_rstd,
                          s.N, s.C);
    }
    ref_embedding_backward(dp.wte, dp.wpe, a.embedded ? da.embedded : dfirst.stream, tokens, s.B, s.T, s.C);
}

#endif
