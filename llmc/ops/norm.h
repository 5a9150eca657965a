/*
norm.h -- normalization of rows, by mean and variance or by their square alone (RMS), and the
residual sum before it: the contract, and the CPU version.

    NORM_LAYER       mean = sum_c inp / C    rstd = 1 / sqrt(sum_c (inp - mean)^2 / C + eps)
                     out  = norm weight + bias                 with norm = (inp - mean) rstd
    NORM_RMS         rstd = 1 / sqrt(sum_c inp^2 / C + eps)
                     out  = norm weight factor                 with norm = inp rstd
    NORM_RMS_PLUS    out  = norm (1 + weight) factor
    NORM_RMS_ALONE   out  = norm: RMS without weights

    out, inp, dout, dinp     (N, C)   one row per token
    mean, rstd               (N)      fp32; kept for the backward pass
    weight, bias             (C)      and dweight, dbias

A kind that lacks mean, weight or bias has NULL there, and NULL for its gradient. All is computed in
fp32 and rounded once, as in OLMo and Gemma; Llama rounds norm, then its product with the weight.

A residual sum adds the output of a branch of a block, `right`, to the stream before it, `left`:

    sum (N, C) = left + factor right, or left + norm of right; the second term with dropout
                 (dropout.h), if the sum has any

norm_forward sets its outputs; residual_norm_forward also sets inp to such a sum in the same pass.
norm_backward sets or adds to dinp according to `dinp_mode`, and to dweight and dbias according to
`mode`; dweight or dbias may be NULL.

    dinp_c (+)= rstd (g_c - sum g / C - norm_c sum(g norm) / C)    with g = dout weight;
                RMS lacks the term sum g / C, and its weight is all that multiplies norm

norm_unit is RMS_ALONE in place, on (N, C). Its backward pass needs only its result:

    dx_c = rstd (dx_c - x_c sum(dx x) / C)

Layer normalization: Ba, Kiros and Hinton, 2016; RMS: Zhang and Sennrich, 2019.
*/
#ifndef LLMC_NORM_H
#define LLMC_NORM_H

#include <stddef.h>

#include "llmc/ops/dropout.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NORM_EPS 1e-5f // GPT-2's

// X(kind, has a mean, has a weight, has a bias, added to the weight)
// clang-format off
#define NORM_KINDS(X) \
    X(NORM_LAYER,     1, 1, 1, 0) \
    X(NORM_RMS,       0, 1, 0, 0) \
    X(NORM_RMS_PLUS,  0, 1, 0, 1) \
    X(NORM_RMS_ALONE, 0, 0, 0, 0)
// clang-format on

#define NORM_VALUE_(kind, ...) kind,
typedef enum { NORM_KINDS(NORM_VALUE_) } NormKind;
#undef NORM_VALUE_

#define NORM_ONE_(...) +1
#define NORM_KINDS_COUNT (0 NORM_KINDS(NORM_ONE_))

typedef struct {
    int has_mean, has_weight, has_bias, offset;
} NormParts;

static inline NormParts norm_parts(NormKind kind) {
#define NORM_ROW_(kind, ...) {__VA_ARGS__},
    static const NormParts rows[] = {NORM_KINDS(NORM_ROW_)};
#undef NORM_ROW_
    return rows[kind];
}

// Return the bytes of memory traffic; each of `groups` groups of rows has its own partial sums,
// which pass through memory.
static inline double norm_forward_bytes(double N, double C, double element_bytes) {
    return 2 * N * C * element_bytes + 8 * N;
}

static inline double norm_backward_bytes(double N, double C, double element_bytes, double groups) {
    return 4 * N * C * element_bytes + 8 * N + 3 * 8 * C * groups;
}

// Returns the bytes of memory traffic of norm_unit, either way.
static inline double norm_unit_bytes(double N, double C, double element_bytes) {
    return 2 * N * C * element_bytes + 4 * N;
}

// A norm of N rows, with what its forward pass keeps.
typedef struct {
    NormKind kind;
    float eps, factor;          // 1: no factor; kinds of RMS with weights only
    const float *weight, *bias; // (C)
    float *mean, *rstd;         // (N), which the forward pass sets
    int N, C;
} Norm;

// A residual sum of rows.
typedef struct {
    const float *left, *right; // (N, C)
    float factor;              // 1: no factor
    const Norm* norm;          // of right; NULL: none
    Dropout dropout;           // of what is added to left
} ResidualSum;

void norm_forward_cpu(float* out, const float* inp, const Norm* norm);

// inp may not be left if the sum has a norm.
void residual_norm_forward_cpu(float* inp, float* out, const ResidualSum* sum, const Norm* norm);

// Sets out (N, C) to the sum; out may not be left if it has a norm.
void residual_sum_cpu(float* out, const ResidualSum* sum, int N, int C);

// Sets out = factor inp, n elements; out may be inp.
void residual_scale_cpu(float* out, const float* inp, float factor, size_t n);

// Sets out = left + right, n elements.
void residual_forward_cpu(float* out, const float* left, const float* right, size_t n);

void norm_backward_cpu(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                       const Norm* norm, GradientMode dinp_mode, GradientMode mode);

// Normalizes x (N, C) in place, and sets rstd (N).
void norm_unit_forward_cpu(float* x, float* rstd, int N, int C, float eps);

// Turns dx (N, C), the gradient of the normalized x, into the gradient of x before, in place.
void norm_unit_backward_cpu(float* dx, const float* x, const float* rstd, int N, int C);

#ifdef __cplusplus
}
#endif

#ifdef NORM_IMPLEMENTATION

#include <math.h>

#include "llmc/base/host_device.h"
#include "llmc/base/sizes.h"
#include "llmc/base/vec.h"

// Returns the sum of a row. LANES partial sums keep the additions short and independent; their
// order is fixed.
static float norm_sum_(const float* x, int C) {
    Vec sum = vec_all(0.0f);
    int c = 0;
    for (; c + LANES <= C; c += LANES) {
        sum += vec_load(x + c);
    }
    float total = vec_hsum(sum);
    for (; c < C; c++) {
        total += x[c];
    }
    return total;
}

// Returns the sum of (x - mean)^2 over a row.
static float norm_square_(const float* x, float mean, int C) {
    Vec sum = vec_all(0.0f);
    int c = 0;
    for (; c + LANES <= C; c += LANES) {
        const Vec d = vec_load(x + c) - mean;
        sum += d * d;
    }
    float total = vec_hsum(sum);
    for (; c < C; c++) {
        total += (x[c] - mean) * (x[c] - mean);
    }
    return total;
}

// Normalizes row n of NORM_LAYER.
static void norm_layer_row_(float* out, const float* inp, const Norm* norm, int n) {
    const int C = norm->C;
    const float *weight = norm->weight, *bias = norm->bias;
    const float m = norm_sum_(inp, C) / C;
    const float r = 1.0f / sqrtf(norm_square_(inp, m, C) / C + norm->eps);
    for (int c = 0; c < C; c++) {
        out[c] = (inp[c] - m) * r * weight[c] + bias[c];
    }
    norm->mean[n] = m;
    norm->rstd[n] = r;
}

// Returns x of column c times its weight, if RMS has any.
ALWAYS_INLINE float norm_weigh_(float x, const Norm* norm, float offset, int c) {
    return norm->weight ? x * ((norm->weight[c] + offset) * norm->factor) : x;
}

static float norm_offset_(const Norm* norm) { return (float)norm_parts(norm->kind).offset; }

static void norm_rms_row_(float* out, const float* inp, const Norm* norm, int n) {
    const float offset = norm_offset_(norm),
                r = 1.0f / sqrtf(norm_square_(inp, 0, norm->C) / norm->C + norm->eps);
    for (int c = 0; c < norm->C; c++) {
        out[c] = norm_weigh_(inp[c] * r, norm, offset, c);
    }
    norm->rstd[n] = r;
}

typedef void (*NormRow_)(float* out, const float* inp, const Norm* norm, int n);

static NormRow_ norm_row_of_(const Norm* norm) {
    switch (norm->kind) {
    case NORM_LAYER:
        return norm_layer_row_;
    case NORM_RMS:
    case NORM_RMS_PLUS:
    case NORM_RMS_ALONE:
        return norm_rms_row_;
    }
    return NULL;
}

void norm_forward_cpu(float* out, const float* inp, const Norm* norm) {
    const int N = norm->N, C = norm->C;
    const NormRow_ norm_row = norm_row_of_(norm);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        norm_row(out + (size_t)n * C, inp + (size_t)n * C, norm, n);
    }
}

// Sets row n, `to`, of a residual sum of C columns.
ALWAYS_INLINE void residual_row_(float* to, const ResidualSum* sum, NormRow_ norm_row, int n, int C) {
    const float *left = sum->left + (size_t)n * C, *right = sum->right + (size_t)n * C;
    if (norm_row) {
        norm_row(to, right, sum->norm, n);
    }
    if (dropout_is_on(&sum->dropout)) {
        dropout_row_cpu(to, left, norm_row ? to : right, &sum->dropout, norm_row ? 1 : sum->factor, n, C);
        return;
    }
    if (norm_row) {
        for (int c = 0; c < C; c++) {
            to[c] += left[c];
        }
        return;
    }
    for (int c = 0; c < C; c++) {
        to[c] = multiply_add(sum->factor, right[c], left[c]);
    }
}

void residual_norm_forward_cpu(float* inp, float* out, const ResidualSum* sum, const Norm* norm) {
    const int N = norm->N, C = norm->C;
    const NormRow_ norm_row = norm_row_of_(norm), right_row = sum->norm ? norm_row_of_(sum->norm) : NULL;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const size_t row = (size_t)n * C;
        residual_row_(inp + row, sum, right_row, n, C);
        norm_row(out + row, inp + row, norm, n);
    }
}

void residual_sum_cpu(float* out, const ResidualSum* sum, int N, int C) {
    const NormRow_ right_row = sum->norm ? norm_row_of_(sum->norm) : NULL;
    if (!right_row && sum->factor == 1 && !dropout_is_on(&sum->dropout)) {
        residual_forward_cpu(out, sum->left, sum->right, (size_t)N * (size_t)C);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        residual_row_(out + (size_t)n * C, sum, right_row, n, C);
    }
}

void residual_scale_cpu(float* out, const float* inp, float factor, size_t n) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        out[i] = factor * inp[i];
    }
}

void residual_forward_cpu(float* out, const float* left, const float* right, size_t n) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        out[i] = left[i] + right[i];
    }
}

// Sets or adds to row n of dinp of NORM_LAYER.
static void norm_layer_backward_row_(float* dinp, const float* dout, const float* inp, const Norm* norm,
                                     int n, GradientMode dinp_mode) {
    const int C = norm->C;
    const float *weight = norm->weight, mean = norm->mean[n], rstd = norm->rstd[n];
    Vec sums = vec_all(0.0f), dots = vec_all(0.0f);
    int c = 0;
    for (; c + LANES <= C; c += LANES) {
        const Vec g = vec_load(dout + c) * vec_load(weight + c);
        sums += g;
        dots += g * (vec_load(inp + c) - mean);
    }
    float sum = vec_hsum(sums), dot = vec_hsum(dots);
    for (; c < C; c++) {
        sum += dout[c] * weight[c];
        dot += dout[c] * weight[c] * (inp[c] - mean);
    }
    const float shift = sum / C, slope = dot * rstd * rstd / C;
    for (c = 0; c < C; c++) {
        const float change = rstd * (dout[c] * weight[c] - shift - (inp[c] - mean) * slope);
        dinp[c] = (dinp_mode == GRADIENT_ADD ? dinp[c] : 0.0f) + change;
    }
}

// Sets or adds to row n of dinp of RMS.
static void norm_rms_backward_row_(float* dinp, const float* dout, const float* inp, const Norm* norm, int n,
                                   GradientMode dinp_mode) {
    const int C = norm->C;
    const float *weight = norm->weight, rstd = norm->rstd[n], offset = norm_offset_(norm),
                factor = norm->factor;
    Vec dots = vec_all(0.0f);
    int c = 0;
    for (; c + LANES <= C; c += LANES) {
        const Vec d = vec_load(dout + c);
        dots += (weight ? d * ((vec_load(weight + c) + offset) * factor) : d) * vec_load(inp + c);
    }
    float dot = vec_hsum(dots);
    for (; c < C; c++) {
        dot += norm_weigh_(dout[c], norm, offset, c) * inp[c];
    }
    const float slope = dot * rstd * rstd / C;
    for (c = 0; c < C; c++) {
        const float change = rstd * (norm_weigh_(dout[c], norm, offset, c) - inp[c] * slope);
        dinp[c] = (dinp_mode == GRADIENT_ADD ? dinp[c] : 0.0f) + change;
    }
}

typedef void (*NormBackwardRow_)(float* dinp, const float* dout, const float* inp, const Norm* norm, int n,
                                 GradientMode dinp_mode);

static NormBackwardRow_ norm_backward_row_of_(const Norm* norm) {
    switch (norm->kind) {
    case NORM_LAYER:
        return norm_layer_backward_row_;
    case NORM_RMS:
    case NORM_RMS_PLUS:
    case NORM_RMS_ALONE:
        return norm_rms_backward_row_;
    }
    return NULL;
}

enum { NORM_COLUMNS_ = 4 * LANES }; // columns that a thread sums at a time

static void norm_finish_columns_(float* to, const float* sum, float factor, int c0, int cols,
                                 GradientMode mode) {
    for (int c = 0; to && c < cols; c++) {
        to[c0 + c] = multiply_add(factor, sum[c], mode == GRADIENT_ADD ? to[c0 + c] : 0.0f);
    }
}

// Sums the parameters' gradients over the rows, from column c0 on. Each thread owns a few columns,
// so the sums follow the order of the rows.
static void norm_backward_columns_(float* dweight, float* dbias, const float* dout, const float* inp,
                                   const Norm* norm, int c0, GradientMode mode) {
    const int cols = int_min(NORM_COLUMNS_, norm->C - c0);
    const int N = norm->N, C = norm->C;
    float weight_sum[NORM_COLUMNS_] = {0}, bias_sum[NORM_COLUMNS_] = {0};
    for (int n = 0; n < N; n++) {
        const float *d = dout + (size_t)n * C + c0, *x = inp + (size_t)n * C + c0;
        const float m = norm->mean ? norm->mean[n] : 0.0f, r = norm->rstd[n];
        for (int c = 0; c < cols; c++) {
            weight_sum[c] += d[c] * (x[c] - m) * r;
            bias_sum[c] += d[c];
        }
    }
    norm_finish_columns_(dweight, weight_sum, norm->factor, c0, cols, mode);
    norm_finish_columns_(dbias, bias_sum, 1, c0, cols, mode);
}

void norm_backward_cpu(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                       const Norm* norm, GradientMode dinp_mode, GradientMode mode) {
    const int N = norm->N, C = norm->C;
    const NormBackwardRow_ backward_row = norm_backward_row_of_(norm);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int n = 0; n < N; n++) {
            const size_t row = (size_t)n * C;
            backward_row(dinp + row, dout + row, inp + row, norm, n, dinp_mode);
        }
#pragma omp for schedule(static)
        for (int c0 = 0; c0 < (dweight || dbias ? C : 0); c0 += NORM_COLUMNS_) {
            norm_backward_columns_(dweight, dbias, dout, inp, norm, c0, mode);
        }
    }
}

void norm_unit_forward_cpu(float* x, float* rstd, int N, int C, float eps) {
    const Norm norm = {NORM_RMS_ALONE, eps, 1, NULL, NULL, NULL, rstd, N, C};
    norm_forward_cpu(x, x, &norm);
}

void norm_unit_backward_cpu(float* dx, const float* x, const float* rstd, int N, int C) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        float* d = dx + (size_t)n * C;
        const float *row = x + (size_t)n * C, slope = vec_dot(d, row, C) / C;
        for (int c = 0; c < C; c++) {
            d[c] = rstd[n] * (d[c] - row[c] * slope);
        }
    }
}

#endif // NORM_IMPLEMENTATION

#endif
