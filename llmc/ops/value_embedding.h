/*
value_embedding.h -- value embeddings: a row of a table for each token's values, times a gate; the
contract, and the CPU version.

    v_nh   += g_nh table[tokens_n]_h           g_nh = 2 sigmoid(z_nh)    z_nh = sum_c gate_hc inp_nc

    dvalues_nh = g_nh dv_nh                     gradient of the table's rows, one for each token
    dz_nh      = g_nh (1 - g_nh / 2) sum_i dv_nhi table[tokens_n]_hi
    dinp_nc   += sum_h dz_nh gate_hc            dgate_hc (+)= sum_n dz_nh inp_nc

    qkv, dqkv      (N, QKV)       their last KV HS columns are v, dv
    inp, dinp      (N, C)         the first G columns make the gates
    gate, dgate    (KV, G)        dgate may be NULL
    table          (V, KV HS)     tokens (N), each below V
    dvalues        (N, KV HS)     dz   (N, KV)

embedding.h adds dvalues to the table's gradient. Gates of zeros are 1. Sums have a fixed order.

Zhou et al., "Value residual learning", 2024; Jordan et al., "modded-nanogpt", 2024; Karpathy's
nanochat has them in every other layer.
*/
#ifndef LLMC_VALUE_EMBEDDING_H
#define LLMC_VALUE_EMBEDDING_H

#include <stddef.h>

#include "llmc/base/host_device.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { VALUE_GATE_COLUMNS = 32 }; // of inp, at most
enum { VALUE_PARTS = 64 };        // sums of dgate on a GPU

typedef struct {
    int N, C, QKV, KV, HS, G;
} ValueSizes;

// No gate: the layer has none.
typedef struct {
    ValueSizes sizes;
    int words; // rows of a table
    const float *inp, *gate, *table;
    const int* tokens;
} ValueEmbedding;

// Returns the place of a head's values of a token in qkv, and in rows of a table.
HOST_DEVICE size_t value_at(const ValueSizes s, int n, int h) {
    return (size_t)n * (size_t)s.QKV + (size_t)(s.QKV - (s.KV - h) * s.HS);
}
HOST_DEVICE size_t value_row_at(const ValueSizes s, int row, int h) {
    return ((size_t)row * (size_t)s.KV + (size_t)h) * (size_t)s.HS;
}

// Return the bytes of memory traffic, without the gradient of the table.
static inline double value_embedding_bytes(double N, double columns, double element_bytes) {
    return 3 * N * columns * element_bytes;
}

void value_embedding_forward_cpu(float* qkv, const ValueEmbedding* v);

// Sets dvalues and dz.
void value_embedding_backward_cpu(float* dvalues, float* dz, const float* dqkv, const ValueEmbedding* v);

void value_gate_backward_cpu(float* dinp, float* dgate, const float* dz, const ValueEmbedding* v,
                             GradientMode mode);

#ifdef __cplusplus
}
#endif

#ifdef VALUE_EMBEDDING_IMPLEMENTATION

#include <math.h>

static float value_gate_(const ValueEmbedding* v, int n, int h) {
    const float *x = v->inp + (size_t)n * (size_t)v->sizes.C, *w = v->gate + (size_t)h * (size_t)v->sizes.G;
    float z = 0;
    for (int c = 0; c < v->sizes.G; c++) {
        z += w[c] * x[c];
    }
    return 2 / (1 + expf(-z));
}

void value_embedding_forward_cpu(float* qkv, const ValueEmbedding* v) {
    const ValueSizes s = v->sizes;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        for (int h = 0; h < s.KV; h++) {
            const float g = value_gate_(v, n, h), *row = v->table + value_row_at(s, v->tokens[n], h);
            float* to = qkv + value_at(s, n, h);
            for (int i = 0; i < s.HS; i++) {
                to[i] += g * row[i];
            }
        }
    }
}

void value_embedding_backward_cpu(float* dvalues, float* dz, const float* dqkv, const ValueEmbedding* v) {
    const ValueSizes s = v->sizes;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        for (int h = 0; h < s.KV; h++) {
            const float g = value_gate_(v, n, h), *row = v->table + value_row_at(s, v->tokens[n], h),
                        *dv = dqkv + value_at(s, n, h);
            float *to = dvalues + value_row_at(s, n, h), sum = 0;
            for (int i = 0; i < s.HS; i++) {
                to[i] = g * dv[i];
                sum += dv[i] * row[i];
            }
            dz[(size_t)n * (size_t)s.KV + (size_t)h] = g * (1 - g / 2) * sum;
        }
    }
}

// Sets or adds to the gradient of one head's gate.
static void value_gate_weight_(float* dgate, int h, const float* dz, const ValueEmbedding* v,
                               GradientMode mode) {
    const ValueSizes s = v->sizes;
    float sum[VALUE_GATE_COLUMNS] = {0};
    for (int n = 0; n < s.N; n++) {
        const float d = dz[(size_t)n * (size_t)s.KV + (size_t)h], *x = v->inp + (size_t)n * (size_t)s.C;
        for (int c = 0; c < s.G; c++) {
            sum[c] += d * x[c];
        }
    }
    float* to = dgate + (size_t)h * (size_t)s.G;
    for (int c = 0; c < s.G; c++) {
        to[c] = (mode == GRADIENT_ADD ? to[c] : 0) + sum[c];
    }
}

void value_gate_backward_cpu(float* dinp, float* dgate, const float* dz, const ValueEmbedding* v,
                             GradientMode mode) {
    const ValueSizes s = v->sizes;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        for (int h = 0; h < s.KV; h++) {
            const float d = dz[(size_t)n * (size_t)s.KV + (size_t)h], *w = v->gate + (size_t)h * (size_t)s.G;
            for (int c = 0; c < s.G; c++) {
                dinp[(size_t)n * (size_t)s.C + (size_t)c] += d * w[c];
            }
        }
    }
#pragma omp parallel for schedule(static)
    for (int h = 0; h < (dgate ? s.KV : 0); h++) {
        value_gate_weight_(dgate, h, dz, v, mode);
    }
}

#endif // VALUE_EMBEDDING_IMPLEMENTATION

#endif
