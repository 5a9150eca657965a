/*
experts.h -- the rows of experts' matrices, as the router sorts them (router.h): the contract, and
the CPU version. C channels of N tokens, M rows, F hidden units of an expert.

    experts_gather    rows[m] = tokens[token of m]                 zeros for padding
    experts_sum       tokens[n] (+)= sum over the rows m of n of rows[m], in the order of `chosen`
    experts_activate  act[m] = scale[m] activation(gate, up)       of a kind with a gate
    experts_bias      rows[m] += scale[m] bias_e                   of the expert e that has row m

    tokens    (N, C)     rows       (M, C)         bias  (E, C)
    act, dact (M, F)     fch, dfch  (M, 2 F)   gate in the first F columns, up in the others

Only the first `first[E]` rows count; act of padding is 0. experts_activate_backward sets

    dfch[m] = scale[m] dact[m] activation'(gate, up)     dscale[m] = dact[m] . activation(gate, up)

and leaves padding as it is. experts_bias_backward sets or adds to dbias, and adds to dscale:

    dbias_e (+)= sum over the rows m of e of scale[m] drows[m]     dscale[m] += bias_e . drows[m]
*/
#ifndef LLMC_EXPERTS_H
#define LLMC_EXPERTS_H

#include "llmc/ops/activation.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/router.h"

#ifdef __cplusplus
extern "C" {
#endif

// Columns that the GPU copies together: there C and F are multiples of it.
enum { EXPERT_PACK = 8 };

void experts_gather_cpu(float* rows, const float* tokens, const Router* router, int C);

// Return the bytes that these must move for N tokens and their M rows, experts_sum in new memory:
// tokens that several experts take are read once.
static inline double experts_gather_bytes(double N, double M, double C, double element_bytes) {
    return (N + M) * C * element_bytes;
}
static inline double experts_sum_bytes(double N, double M, double C, double element_bytes) {
    return (M + 2 * N) * C * element_bytes;
}

// Sets tokens, or adds to them, as `mode` says.
void experts_sum_cpu(float* tokens, const float* rows, const Router* router, int C, GradientMode mode);

void experts_activate_cpu(float* act, const float* fch, const Router* router, int F, ActivationKind kind);

// dact is not changed.
void experts_activate_backward_cpu(float* dfch, float* dscale, const float* dact, const float* fch,
                                   const Router* router, int F, ActivationKind kind);

void experts_bias_cpu(float* rows, const float* bias, const Router* router, int C);

// dbias may be NULL. The bits do not depend on the number of threads.
void experts_bias_backward_cpu(float* dbias, float* dscale, const float* drows, const float* bias,
                               const Router* router, int C, GradientMode mode);

#ifdef __cplusplus
}
#endif

#ifdef EXPERTS_IMPLEMENTATION

#include <string.h>

#include "llmc/base/vec.h"

void experts_gather_cpu(float* rows, const float* tokens, const Router* router, int C) {
    const int M = router->first[router->E];
#pragma omp parallel for schedule(static)
    for (int m = 0; m < M; m++) {
        const int place = router->order[m];
        float* row = rows + (size_t)m * C;
        if (place < 0) {
            memset(row, 0, (size_t)C * sizeof(float));
        } else {
            memcpy(row, tokens + (size_t)(place / router->used) * C, (size_t)C * sizeof(float));
        }
    }
}

void experts_sum_cpu(float* tokens, const float* rows, const Router* router, int C, GradientMode mode) {
    const int N = router->B * router->T, used = router->used;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        float* token = tokens + (size_t)n * C;
        for (int k = 0; k < used; k++) {
            const float* row = rows + (size_t)router->rows[(size_t)n * used + k] * C;
            const int is_first = k == 0 && mode == GRADIENT_SET;
            for (int c = 0; c < C; c++) {
                token[c] = is_first ? row[c] : token[c] + row[c];
            }
        }
    }
}

void experts_activate_cpu(float* act, const float* fch, const Router* router, int F, ActivationKind kind) {
    const int M = router->first[router->E];
#pragma omp parallel for schedule(static)
    for (int m = 0; m < M; m++) {
        float* row = act + (size_t)m * F;
        if (router->order[m] < 0) {
            memset(row, 0, (size_t)F * sizeof(float));
        } else {
            activation_row_cpu(row, fch + (size_t)m * 2 * F, router->scale[m], (size_t)F, kind);
        }
    }
}

void experts_activate_backward_cpu(float* dfch, float* dscale, const float* dact, const float* fch,
                                   const Router* router, int F, ActivationKind kind) {
    const int M = router->first[router->E];
#pragma omp parallel for schedule(static)
    for (int m = 0; m < M; m++) {
        if (router->order[m] >= 0) {
            dscale[m] =
                activation_row_backward_cpu(dfch + (size_t)m * 2 * F, dact + (size_t)m * F,
                                            fch + (size_t)m * 2 * F, router->scale[m], (size_t)F, kind);
        }
    }
}

void experts_bias_cpu(float* rows, const float* bias, const Router* router, int C) {
    for (int e = 0; e < router->E; e++) {
#pragma omp parallel for schedule(static)
        for (int m = router->first[e]; m < router->first[e] + router_count(router, e); m++) {
            for (int c = 0; c < C; c++) {
                rows[(size_t)m * C + c] += router->scale[m] * bias[(size_t)e * C + c];
            }
        }
    }
}

// Sums the columns [begin, end) of expert e over its rows, in order.
static void experts_bias_sum_(float* dbias, const float* drows, const Router* router, int e, int C, int begin,
                              int end, GradientMode mode) {
    float* to = dbias + (size_t)e * C;
    for (int c = begin; c < end && mode == GRADIENT_SET; c++) {
        to[c] = 0;
    }
    for (int m = router->first[e]; m < router->first[e + 1]; m++) {
        for (int c = begin; c < end; c++) {
            to[c] += router->scale[m] * drows[(size_t)m * C + c];
        }
    }
}

void experts_bias_backward_cpu(float* dbias, float* dscale, const float* drows, const float* bias,
                               const Router* router, int C, GradientMode mode) {
    enum { COLUMNS = 64 }; // of a thread at a time
    const int blocks = (C + COLUMNS - 1) / COLUMNS;
    for (int e = 0; e < router->E; e++) {
#pragma omp parallel for schedule(static)
        for (int i = 0; i < (dbias ? blocks : 0); i++) {
            const int end = (i + 1) * COLUMNS < C ? (i + 1) * COLUMNS : C;
            experts_bias_sum_(dbias, drows, router, e, C, i * COLUMNS, end, mode);
        }
#pragma omp parallel for schedule(static)
        for (int m = router->first[e]; m < router->first[e + 1]; m++) {
            dscale[m] += vec_dot(bias + (size_t)e * C, drows + (size_t)m * C, C);
        }
    }
}

#endif // EXPERTS_IMPLEMENTATION

#endif
