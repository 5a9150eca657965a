/*
gated_norm.h -- RMS normalization of rows, times weights and an activated gate: the contract, and
the CPU version.

    rstd = 1 / sqrt(sum_c inp^2 / C + eps)    norm = inp rstd
    out  = weight norm silu(gate)

    out, inp, gate    (N, C)   one row per head of a token
    rstd              (N)      fp32; kept for the backward pass
    weight            (C)      C <= GATED_NORM_WIDEST

gated_norm_forward sets out and rstd. gated_norm_backward sets dinp and dgate, and sets or adds to
dweight, unless it is NULL, according to `mode`; dinp may be dout. With s = sigmoid(gate) and g =
dout weight gate s:

    dgate = dout weight norm s (1 + gate (1 - s))
    dinp  = rstd (g - norm sum_c(g norm) / C)       dweight = sum_n dout norm gate s

The sum over rows is one over blocks of rows, so its order is fixed.

As behind the delta rule (delta_rule.h) in Qwen3-Next, 2025.
*/
#ifndef LLMC_GATED_NORM_H
#define LLMC_GATED_NORM_H

#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GATED_NORM_WIDEST = 256 };

typedef struct {
    float eps;
    const float *gate, *weight;
    float* rstd;
    int N, C;
} GatedNorm;

// Return the bytes that a pass must move.
static inline double gated_norm_forward_bytes(double N, double C, double element_bytes) {
    return 3 * N * C * element_bytes + 4 * N;
}
static inline double gated_norm_backward_bytes(double N, double C, double element_bytes) {
    return 5 * N * C * element_bytes + 4 * N;
}

void gated_norm_forward_cpu(float* out, const float* inp, const GatedNorm* norm);

void gated_norm_backward_cpu(float* dinp, float* dgate, float* dweight, const float* dout, const float* inp,
                             const GatedNorm* norm, GradientMode mode);

#ifdef __cplusplus
}
#endif

#ifdef GATED_NORM_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "llmc/base/vec.h"
#include "llmc/ops/activation.h"

enum { GATED_NORM_BLOCKS_ = 64 }; // of rows, with a sum each

// A row of up to GATED_NORM_WIDEST columns, filled up with zeros to whole vectors.
typedef struct {
    float at[GATED_NORM_WIDEST + LANES];
} GatedRow_;

static const float* gated_row_(GatedRow_* to, const float* from, int C) {
    if (C % LANES == 0) {
        return from;
    }
    memset(to->at + C / LANES * LANES, 0, LANES * sizeof(float));
    return (const float*)memcpy(to->at, from, (size_t)C * sizeof(float));
}

static void gated_forward_row_(float* out, const float* inp, const GatedNorm* norm, size_t n) {
    const int C = norm->C;
    const float rstd = 1.0f / sqrtf(vec_dot(inp + n * C, inp + n * C, C) / C + norm->eps);
    GatedRow_ rows[3], y;
    const float *x = gated_row_(&rows[0], inp + n * C, C),
                *gate = gated_row_(&rows[1], norm->gate + n * C, C),
                *weight = gated_row_(&rows[2], norm->weight, C);
    for (int c = 0; c < C; c += LANES) {
        vec_store(y.at + c,
                  vec_load(weight + c) * (vec_load(x + c) * rstd) * silu_vec(vec_load(gate + c)).out);
    }
    memcpy(out + n * C, y.at, (size_t)C * sizeof(float));
    norm->rstd[n] = rstd;
}

void gated_norm_forward_cpu(float* out, const float* inp, const GatedNorm* norm) {
    assert(norm->C <= GATED_NORM_WIDEST);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < norm->N; n++) {
        gated_forward_row_(out, inp, norm, (size_t)n);
    }
}

// Sets dinp and dgate of a row, and adds to dweight.
static void gated_backward_row_(float* dinp, float* dgate, float* dweight, const float* dout,
                                const float* inp, const GatedNorm* norm, size_t n) {
    const int C = norm->C;
    const float rstd = norm->rstd[n];
    GatedRow_ rows[4], g, dz;
    const float *x = gated_row_(&rows[0], inp + n * C, C),
                *gate = gated_row_(&rows[1], norm->gate + n * C, C),
                *weight = gated_row_(&rows[2], norm->weight, C), *d = gated_row_(&rows[3], dout + n * C, C);
    Vec dots = vec_all(0.0f);
    for (int c = 0; c < C; c += LANES) {
        const ActivationVec silu = silu_vec(vec_load(gate + c));
        const Vec y = vec_load(x + c) * rstd, dy = vec_load(d + c), w = vec_load(weight + c);
        vec_store(dz.at + c, dy * w * y * silu.derivative);
        vec_store(dweight + c, vec_load(dweight + c) + dy * y * silu.out);
        vec_store(g.at + c, dy * w * silu.out);
        dots += dy * w * silu.out * y;
    }
    const float slope = vec_hsum(dots) / C;
    for (int c = 0; c < C; c++) {
        dinp[n * C + c] = rstd * (g.at[c] - x[c] * rstd * slope);
    }
    memcpy(dgate + n * C, dz.at, (size_t)C * sizeof(float));
}

void gated_norm_backward_cpu(float* dinp, float* dgate, float* dweight, const float* dout, const float* inp,
                             const GatedNorm* norm, GradientMode mode) {
    const int C = norm->C;
    GatedRow_ sums[GATED_NORM_BLOCKS_];
    assert(C <= GATED_NORM_WIDEST);
    memset(sums, 0, sizeof(sums));
#pragma omp parallel for schedule(static)
    for (int i = 0; i < GATED_NORM_BLOCKS_; i++) {
        const size_t N = (size_t)norm->N;
        for (size_t n = N * i / GATED_NORM_BLOCKS_; n < N * (i + 1) / GATED_NORM_BLOCKS_; n++) {
            gated_backward_row_(dinp, dgate, sums[i].at, dout, inp, norm, n);
        }
    }
    for (int c = 0; c < C && dweight; c++) {
        float sum = mode == GRADIENT_ADD ? dweight[c] : 0;
        for (int i = 0; i < GATED_NORM_BLOCKS_; i++) {
            sum += sums[i].at[c];
        }
        dweight[c] = sum;
    }
}

#endif // GATED_NORM_IMPLEMENTATION

#endif
