/*
reference_latent.h -- what latent attention does between its matrices and attention, as plain loops
from its formulas; reference.h has the rest.
*/
#ifndef LLMC_REFERENCE_LATENT_H
#define LLMC_REFERENCE_LATENT_H

#include "llmc/reference.h"

// -------------------------------------------------------------------------------------------------
// Heads out of latents: DeepSeek-AI, "DeepSeek-V2", 2024
//
//     query[h] = q[h]                                D channels that turn, then P that do not
//     key[h]   = [turning; the first P of up[h]]     `turning` is the same for all heads
//     value[h] = the last V of up[h]                 HS = D + P channels, the rest of them zeros
//
//     dturning = sum_h dkey[h]'s first D
//
// first (N, R): of each token queries, unless these come from a latent (q (N, NH, HS) then), the
// latent (rank), and turning (D)    up (N, NH, P + V)    qkv (N, 3, NH, HS)

typedef struct {
    size_t N, NH, HS, D, V, query_rank, rank;
} RefLatent;

static inline size_t ref_latent_queries(RefLatent s) { return s.query_rank ? s.query_rank : s.NH * s.HS; }
static inline size_t ref_latent_first(RefLatent s) { return ref_latent_queries(s) + s.rank + s.D; }
static inline size_t ref_latent_up(RefLatent s) { return s.NH * (s.HS - s.D + s.V); }

// Element (n, which, h, d) of qkv comes from `first` or `up`, or from q, or is zero: NULL.
static inline Real* ref_latent_source_(Real* first, Real* q, Real* up, RefLatent s, size_t n, size_t which,
                                       size_t h, size_t d) {
    const size_t P = s.HS - s.D, R = ref_latent_first(s);
    Real *row = first + n * R, *head = up + (n * s.NH + h) * (P + s.V);
    switch (which) {
    case 0:
        return s.query_rank ? q + (n * s.NH + h) * s.HS + d : row + h * s.HS + d;
    case 1:
        return d < s.D ? row + ref_latent_queries(s) + s.rank + d : head + d - s.D;
    default:
        return d < s.V ? head + P + d : NULL;
    }
}

static inline void ref_latent_heads_forward(Real* qkv, Real* first, Real* q, Real* up, RefLatent s) {
    for (size_t i = 0; i < s.N * 3 * s.NH * s.HS; i++) {
        const size_t d = i % s.HS, h = i / s.HS % s.NH, which = i / s.HS / s.NH % 3;
        const Real* from = ref_latent_source_(first, q, up, s, i / s.HS / s.NH / 3, which, h, d);
        qkv[i] = from ? *from : 0;
    }
}

static inline void ref_latent_heads_backward(Real* dfirst, Real* dq, Real* dup, const Real* dqkv,
                                             RefLatent s) {
    for (size_t i = 0; i < s.N * 3 * s.NH * s.HS; i++) {
        const size_t d = i % s.HS, h = i / s.HS % s.NH, which = i / s.HS / s.NH % 3;
        Real* to = ref_latent_source_(dfirst, dq, dup, s, i / s.HS / s.NH / 3, which, h, d);
        if (to) {
            *to += dqkv[i];
        }
    }
}

// Latents: columns of `first` as rows of their own, which have norms, and back.
static inline void ref_latent_columns(Real* out, const Real* first, RefLatent s, size_t begin, size_t cols) {
    for (size_t i = 0; i < s.N * cols; i++) {
        out[i] = first[i / cols * ref_latent_first(s) + begin + i % cols];
    }
}
static inline void ref_latent_columns_backward(Real* dfirst, const Real* dout, RefLatent s, size_t begin,
                                               size_t cols) {
    for (size_t i = 0; i < s.N * cols; i++) {
        dfirst[i / cols * ref_latent_first(s) + begin + i % cols] += dout[i];
    }
}

// Values without the zeros: out (N, NH, V) from atty (N, NH, HS).
static inline void ref_latent_values_forward(Real* out, const Real* atty, RefLatent s) {
    for (size_t i = 0; i < s.N * s.NH * s.V; i++) {
        out[i] = atty[i / s.V * s.HS + i % s.V];
    }
}
static inline void ref_latent_values_backward(Real* datty, const Real* dout, RefLatent s) {
    for (size_t i = 0; i < s.N * s.NH * s.V; i++) {
        datty[i / s.V * s.HS + i % s.V] += dout[i];
    }
}

#endif
