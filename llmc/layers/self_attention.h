/*
self_attention.h -- attention of a block with the linear layer in front of it, on the CPU, with whatever matmuls the model has
(linear.h).

    qkv (N, 3C) = inp qkvw^T + qkvb        out (N, C), lse (B, NH, T) = attention of qkv (attention.h)

With matmuls in bf16, and T and a head's size that are multiples of 32, qkv and its gradient are packed as qkv_bf16.h does it.
*/
#ifndef LLMC_SELF_ATTENTION_H
#define LLMC_SELF_ATTENTION_H

#include "llmc/bf16/attention_bf16.h"
#include "llmc/ops/gradient.h"
#include "llmc/layers/linear.h"
#include "llmc/bf16/qkv_bf16.h"

typedef struct {
    AttentionSizes sizes;
    const int* starts;        // (B, T), or NULL
    const float *qkvw, *qkvb; // (3C, C), (3C)
    float *qkv, *out, *lse;   // (N, 3C), (N, C), (B, NH, T)
    Linear* linear;
    Attention* attention;
} SelfAttention;

static inline int self_attention_is_packed_(const SelfAttention* a) {
    return a->linear->is_bf16 && attention_bf16_fits(a->sizes.T, a->sizes.C / a->sizes.NH);
}

static inline QkvBf16 self_attention_layer_(const SelfAttention* a) {
    return (QkvBf16){a->sizes, linear_packed(a->linear, a->qkvw, PACKED_FORWARD),
                     linear_packed(a->linear, a->qkvw, PACKED_BACKWARD), a->qkvb};
}

// Sets qkv, out and lse; inp (N, C).
static inline void self_attention_forward_cpu(const SelfAttention* a, const float* inp) {
    const int N = a->sizes.B * a->sizes.T, C = a->sizes.C;
    if (self_attention_is_packed_(a)) {
        const QkvBf16 layer = self_attention_layer_(a);
        uint32_t* qkv = (uint32_t*)(void*)a->qkv;
        qkv_bf16_forward_cpu(qkv, &layer, inp, &a->linear->bf16);
        attention_bf16_packed_forward_cpu(a->out, a->lse, qkv, a->starts, a->sizes, &a->attention->bf16);
    } else {
        linear_forward_cpu(a->qkv, inp, a->qkvw, a->qkvb, N, C, 3 * C, a->linear);
        attention_either_forward_cpu(a->out, a->lse, a->qkv, a->starts, a->sizes, a->attention);
    }
}

// What a backward pass sets, or adds to as `mode` says: gradients of parameters, or NULL, and dinp (N, C), which it sets. And
// memory that it uses.
typedef struct {
    float *dinp, *dqkvw, *dqkvb;
    GradientMode mode;
    float* dqkv; // (N, 3C)
    float* sums; // (B, 3C)
} SelfAttentionGradients;

// dout and inp are (N, C); dinp may be dout. dqkv is undefined afterwards.
static inline void self_attention_backward_cpu(const SelfAttention* a, const SelfAttentionGradients* d,
                                               const float* dout, const float* inp) {
    const int N = a->sizes.B * a->sizes.T, C = a->sizes.C;
    if (self_attention_is_packed_(a)) {
        const QkvBf16 layer = self_attention_layer_(a);
        const AttentionBf16Gradient dqkv = {(uint32_t*)(void*)d->dqkv, d->sums};
        const QkvBf16Gradients gradients = {d->dinp, d->dqkvw, d->dqkvb, d->mode};
        attention_bf16_packed_backward_cpu(dqkv, dout, (const uint32_t*)(const void*)a->qkv, a->out, a->lse,
                                           a->starts, a->sizes, &a->attention->bf16);
        qkv_bf16_backward_cpu(&layer, &gradients, dqkv, inp, &a->linear->bf16);
        return;
    }
    attention_either_backward_cpu(d->dqkv, dout, a->qkv, a->out, a->lse, a->starts, a->sizes, a->attention);
    linear_backward_weight_cpu(d->dqkvw, d->dqkvb, d->dqkv, inp, N, C, 3 * C, d->mode, a->linear);
    linear_backward_input_cpu(d->dinp, d->dqkv, a->qkvw, N, C, 3 * C, a->linear);
}

#endif
