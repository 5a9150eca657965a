/*
reference_recurrent.h -- operations of hybrid models as plain loops, continues reference.h: the
short convolution, the gated delta rule, and the gated norm.

Sizes and signatures as in reference.h; starts (B, T): where the document of token t starts in its
row, NULL: at 0.
*/
#ifndef LLMC_REFERENCE_RECURRENT_H
#define LLMC_REFERENCE_RECURRENT_H

#include "llmc/reference.h"
#include "llmc/ops/delta_rule.h"
#include "llmc/ops/short_conv.h"

static inline size_t ref_start_(const int* starts, size_t b, size_t t, size_t T) {
    return starts ? (size_t)starts[b * T + t] : 0;
}

// -------------------------------------------------------------------------------------------------
// Short convolution, causal, of each channel by itself
//
//     SILU     out[t] = silu(conv[t])      u = inp                            Qwen3-Next, 2025
//     GATED    out[t] = c[t] conv[t]       u = b x; b, c, x: thirds of inp    LFM 2, 2025
//
//     conv[t] = bias + sum_i weight[W-1-i] u[t-i]      i < W, t - i >= start[t]
//
//     du[t]             = sum_i weight[W-1-i] dconv[t+i]    over t + i of the same document
//     dweight[W-1-i]    = sum_t dconv[t] u[t-i]             dbias = sum_t dconv[t]
//
// inp (N, C), or (N, 3C) of GATED    out (N, C)    weight (C, W)    bias (C), NULL for zeros

typedef struct {
    ShortConvKind kind;
    size_t B, T, C, W;
    const int* starts;
    const Real *inp, *weight, *bias;
} RefConv;

// Returns u of token n, channel c.
static inline Real ref_conv_input_(const RefConv* x, size_t n, size_t c) {
    const Real* row = x->inp + n * (size_t)short_conv_columns(x->kind) * x->C + c;
    return x->kind == SHORT_CONV_GATED ? row[0] * row[2 * x->C] : row[0];
}

// Returns conv of token n, channel c.
static inline Real ref_conv_(const RefConv* x, size_t n, size_t c) {
    const size_t t = n % x->T, start = ref_start_(x->starts, n / x->T, t, x->T);
    Real sum = x->bias ? x->bias[c] : 0;
    for (size_t i = 0; i < x->W && start + i <= t; i++) {
        sum += x->weight[c * x->W + x->W - 1 - i] * ref_conv_input_(x, n - i, c);
    }
    return sum;
}

static inline void ref_conv_forward(Real* out, const RefConv* x) {
    for (size_t n = 0; n < x->B * x->T; n++) {
        for (size_t c = 0; c < x->C; c++) {
            const Real conv = ref_conv_(x, n, c);
            out[n * x->C + c] = x->kind == SHORT_CONV_GATED ? x->inp[n * 3 * x->C + x->C + c] * conv
                                                            : conv * ref_sigmoid_(conv);
        }
    }
}

// Adds the gradient du of u of token n, channel c, to the gradient of inp.
static inline void ref_conv_input_backward_(Real* dinp, Real du, const RefConv* x, size_t n, size_t c) {
    const size_t at = n * (size_t)short_conv_columns(x->kind) * x->C + c;
    const int is_gated = x->kind == SHORT_CONV_GATED;
    dinp[at] += is_gated ? du * x->inp[at + 2 * x->C] : du;
    if (is_gated) {
        dinp[at + 2 * x->C] += du * x->inp[at];
    }
}

static inline void ref_conv_backward(Real* dinp, Real* dweight, Real* dbias, const Real* dout,
                                     const RefConv* x) {
    for (size_t i = 0; i < x->B * x->T * x->C; i++) {
        const size_t n = i / x->C, c = i % x->C, t = n % x->T,
                     start = ref_start_(x->starts, n / x->T, t, x->T);
        const Real conv = ref_conv_(x, n, c), s = ref_sigmoid_(conv);
        Real dconv = dout[i] * s * (1 + conv * (1 - s));
        if (x->kind == SHORT_CONV_GATED) {
            const size_t gate = n * 3 * x->C + x->C + c;
            dconv = dout[i] * x->inp[gate];
            dinp[gate] += dout[i] * conv;
        }
        for (size_t j = 0; j < x->W && start + j <= t; j++) {
            const size_t tap = c * x->W + x->W - 1 - j;
            dweight[tap] += dconv * ref_conv_input_(x, n - j, c);
            ref_conv_input_backward_(dinp, dconv * x->weight[tap], x, n - j, c);
        }
        if (dbias) {
            dbias[c] += dconv;
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Gated delta rule: Yang, Kautz and Hatamizadeh, 2024. Each value head has a state S (dk, dv), zero
// at the start of a document. With the query and key of its key head, and f, beta in 0 ... 1:
//
//     q = rq x_q / sqrt(dk)    k = rk x_k        r = 1 / sqrt(sum x^2 + 1e-6)
//     g = -exp(A_log) softplus(a + dt_bias)      f = exp(g)      beta = sigmoid(b)
//
//     P = f S                          the state decays,
//     e = v - P^T k    u = beta e      is wrong by e at k,
//     S' = P + k u^T   o = S'^T q      and is corrected by u
//
// Backward, from the last token to the first, with dS of the tokens after it:
//
//     dS' = dS + q do^T        dq = S' do
//     du  = dS'^T k            dk = dS' u - P (beta du)     dv = beta du    dbeta = du . e
//     dP  = dS' - beta k du^T  dg = <dP, P>                 dS = f dP
//
//     dx_q = rq / sqrt(dk) (dq - y (y . dq))    y = rq x_q;  likewise dx_k
//     db = beta (1 - beta) dbeta    da = -exp(A_log) sigmoid(a + dt_bias) dg
//     dA_log = sum dg g    ddt_bias = sum da
//
// qkv (N, Hk dk + Hk dk + Hv dv): x_q, x_k, v    ba (N, Hv + Hv): b, a    A_log, dt_bias (Hv)
// out (N, Hv, dv)    states (N, Hv, dk, dv): S' of each token, kept for the backward pass
// Value head h reads query and key of key head h Hk / Hv, rounded down.

typedef struct {
    size_t B, T, Hk, Hv, dk, dv;
    const Real *qkv, *ba, *A_log, *dt_bias;
    const int* starts;
} RefDelta;

static inline size_t ref_delta_row_(const RefDelta* x) { return 2 * x->Hk * x->dk + x->Hv * x->dv; }

// A token of a value head: places of its inputs, and the numbers above.
typedef struct {
    size_t q_at, k_at, v_at, b_at, a_at;
    Real q[DELTA_RULE_WIDEST], k[DELTA_RULE_WIDEST], rq, rk, g, f, beta;
    int has_past; // is not the first of its document
} RefDeltaToken_;

// Sets y = r x; returns r.
static inline Real ref_delta_unit_(Real* y, const Real* x, size_t n) {
    const Real r = 1 / sqrt(ref_dot_(x, x, n) + 1e-6);
    for (size_t i = 0; i < n; i++) {
        y[i] = r * x[i];
    }
    return r;
}

static inline RefDeltaToken_ ref_delta_token_(const RefDelta* x, size_t n, size_t h) {
    const size_t key_head = h * x->Hk / x->Hv, at = n * ref_delta_row_(x);
    RefDeltaToken_ y = {.q_at = at + key_head * x->dk,
                        .k_at = at + (x->Hk + key_head) * x->dk,
                        .v_at = at + 2 * x->Hk * x->dk + h * x->dv,
                        .b_at = n * 2 * x->Hv + h,
                        .a_at = n * 2 * x->Hv + x->Hv + h,
                        .has_past = ref_start_(x->starts, n / x->T, n % x->T, x->T) < n % x->T};
    y.rq = ref_delta_unit_(y.q, x->qkv + y.q_at, x->dk);
    y.rk = ref_delta_unit_(y.k, x->qkv + y.k_at, x->dk);
    for (size_t i = 0; i < x->dk; i++) {
        y.q[i] /= sqrt(x->dk);
    }
    y.g = -exp(x->A_log[h]) * log1p(exp(x->ba[y.a_at] + x->dt_bias[h]));
    y.f = exp(y.g);
    y.beta = ref_sigmoid_(x->ba[y.b_at]);
    return y;
}

// Returns P of a token at (i, j).
static inline Real ref_delta_decayed_(const Real* states, const RefDelta* x, const RefDeltaToken_* y,
                                      size_t n, size_t h, size_t i, size_t j) {
    return y->has_past ? y->f * states[(((n - 1) * x->Hv + h) * x->dk + i) * x->dv + j] : 0;
}

// Returns e of a token at j.
static inline Real ref_delta_error_(const Real* states, const RefDelta* x, const RefDeltaToken_* y, size_t n,
                                    size_t h, size_t j) {
    Real e = x->qkv[y->v_at + j];
    for (size_t i = 0; i < x->dk; i++) {
        e -= ref_delta_decayed_(states, x, y, n, h, i, j) * y->k[i];
    }
    return e;
}

static inline void ref_delta_forward(Real* out, Real* states, const RefDelta* x) {
    for (size_t row = 0; row < x->B * x->T * x->Hv; row++) {
        const size_t n = row / x->Hv, h = row % x->Hv;
        const RefDeltaToken_ y = ref_delta_token_(x, n, h);
        for (size_t j = 0; j < x->dv; j++) {
            const Real u = y.beta * ref_delta_error_(states, x, &y, n, h, j);
            Real o = 0;
            for (size_t i = 0; i < x->dk; i++) {
                const Real s = ref_delta_decayed_(states, x, &y, n, h, i, j) + y.k[i] * u;
                states[(row * x->dk + i) * x->dv + j] = s;
                o += s * y.q[i];
            }
            out[row * x->dv + j] = o;
        }
    }
}

// Adds to dx the gradient of x from that of the unit vector y = r x, both times `scale`.
static inline void ref_delta_unit_backward_(Real* dx, const Real* y, const Real* dy, Real r, Real scale,
                                            size_t n) {
    const Real along = ref_dot_(y, dy, n) / scale; // y is scaled already
    for (size_t i = 0; i < n; i++) {
        dx[i] += r * scale * (dy[i] - y[i] / scale * along);
    }
}

// Adds the gradients of a token's q, k, v and b, given dS (dk, dv) of the tokens after it; sets the
// dS of the token before, and returns dg.
static inline Real ref_delta_token_backward_(Real* dqkv, Real* dba, Real* dS, const Real* dout,
                                             const Real* states, const RefDelta* x, const RefDeltaToken_* y,
                                             size_t n, size_t h) {
    const size_t dk = x->dk, dv = x->dv;
    Real dq[DELTA_RULE_WIDEST] = {0}, dkey[DELTA_RULE_WIDEST] = {0}, dbeta = 0, dg = 0;
    for (size_t j = 0; j < dv; j++) {
        const Real d = dout[(n * x->Hv + h) * dv + j], e = ref_delta_error_(states, x, y, n, h, j);
        Real du = 0;
        for (size_t i = 0; i < dk; i++) {
            dS[i * dv + j] += y->q[i] * d;
            du += dS[i * dv + j] * y->k[i];
        }
        dqkv[y->v_at + j] += y->beta * du;
        dbeta += du * e;
        for (size_t i = 0; i < dk; i++) {
            const Real P = ref_delta_decayed_(states, x, y, n, h, i, j);
            const Real S = P + y->k[i] * y->beta * e, dP = dS[i * dv + j] - y->beta * y->k[i] * du;
            dq[i] += S * d;
            dkey[i] += dS[i * dv + j] * y->beta * e - P * y->beta * du;
            dg += dP * P;
            dS[i * dv + j] = y->has_past ? y->f * dP : 0;
        }
    }
    ref_delta_unit_backward_(dqkv + y->q_at, y->q, dq, y->rq, 1 / sqrt(dk), dk);
    ref_delta_unit_backward_(dqkv + y->k_at, y->k, dkey, y->rk, 1, dk);
    dba[y->b_at] += y->beta * (1 - y->beta) * dbeta;
    return dg;
}

// dS (dk, dv): scratch
static inline void ref_delta_backward(Real* dqkv, Real* dba, Real* dA_log, Real* ddt_bias, Real* dS,
                                      const Real* dout, const Real* states, const RefDelta* x) {
    for (size_t i = 0; i < x->B * x->Hv; i++) {
        const size_t h = i % x->Hv;
        memset(dS, 0, x->dk * x->dv * sizeof(Real));
        for (size_t t = x->T; t-- > 0;) {
            const size_t n = i / x->Hv * x->T + t;
            const RefDeltaToken_ y = ref_delta_token_(x, n, h);
            const Real dg = ref_delta_token_backward_(dqkv, dba, dS, dout, states, x, &y, n, h),
                       da = -exp(x->A_log[h]) * ref_sigmoid_(x->ba[y.a_at] + x->dt_bias[h]) * dg;
            dba[y.a_at] += da;
            ddt_bias[h] += da;
            dA_log[h] += dg * y.g;
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Gated norm: Qwen3-Next, 2025
//
//     out = weight norm silu(gate)      norm = RMS of inp without weights, of each row
//
//     dgate = dout weight norm s (1 + gate (1 - s))      s = sigmoid(gate)
//     dinp and dweight: those of RMS, of dout silu(gate)
//
// out, inp, gate (N, C)    weight (C)    norm->rstd (N), kept for the backward pass

static inline void ref_gated_norm_forward(Real* out, const Real* inp, const Real* gate, RefNorm norm) {
    ref_norm_forward(out, inp, norm);
    for (size_t i = 0; i < norm.N * norm.C; i++) {
        out[i] *= gate[i] * ref_sigmoid_(gate[i]);
    }
}

// dnormed (N, C): scratch
static inline void ref_gated_norm_backward(Real* dinp, Real* dgate, Real* dweight, Real* dnormed,
                                           const Real* dout, const Real* inp, const Real* gate,
                                           RefNorm norm) {
    for (size_t i = 0; i < norm.N * norm.C; i++) {
        const Real s = ref_sigmoid_(gate[i]), y = inp[i] * norm.rstd[i / norm.C] * norm.weight[i % norm.C];
        dgate[i] += dout[i] * y * s * (1 + gate[i] * (1 - s));
        dnormed[i] = dout[i] * gate[i] * s;
    }
    ref_norm_backward(dinp, dweight, NULL, dnormed, inp, norm);
}

// -------------------------------------------------------------------------------------------------
// Gates of the output of attention's heads: Qiu et al., 2025
//
//     out = x s    dx = dout s    dgate = dout x s (1 - s)        s = sigmoid(gate)
//
// all of n elements

static inline void ref_gate_forward(Real* out, const Real* x, const Real* gate, size_t n) {
    for (size_t i = 0; i < n; i++) {
        out[i] = x[i] * ref_sigmoid_(gate[i]);
    }
}

static inline void ref_gate_backward(Real* dx, Real* dgate, const Real* dout, const Real* x, const Real* gate,
                                     size_t n) {
    for (size_t i = 0; i < n; i++) {
        const Real s = ref_sigmoid_(gate[i]);
        dx[i] += dout[i] * s;
        dgate[i] += dout[i] * x[i] * s * (1 - s);
    }
}

#endif
