/*
self_attention.cuh -- self_attention.h on the GPU: attention of a block with the linear layer in
front of it.

    qkv (N, QKV)               = inp weight^T + bias
    out (N, Q), lse (B, NH, T) = attention of qkv (attention.h)
*/
#ifndef LLMC_SELF_ATTENTION_CUH
#define LLMC_SELF_ATTENTION_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/linear.cuh"
#include "llmc/ops/attention.cuh"

typedef struct {
    AttentionSizes sizes;
    const int* starts;               // (B, T), or NULL
    Weight weight;                   // (QKV, C)
    floatX *qkv, *out;               // (N, QKV), (N, Q)
    float* lse;                      // (B, NH, T)
    AttentionCacheGpu<floatX> cache; // keys and values that are kept; no data: none
    int sequence;                    // prefill: its place in the cache
    const int* positions;            // a step of decoding: of each row; else NULL
    LinearGpu* linear;
    AttentionGpu* attention;
} SelfAttentionGpu;

static inline SelfAttentionGpu self_attention_of(ModelConfig cfg, const Weight* weight,
                                                 const ModelActivations* a, const Pass* pass,
                                                 LinearGpu* linear, AttentionGpu* attention) {
    SelfAttentionGpu layer;
    layer.sizes = attention_sizes(pass->B, pass->T, cfg.NH, cfg.NH, model_head_size(cfg));
    layer.starts = pass->starts;
    layer.weight = *weight;
    layer.qkv = a->qkv;
    layer.out = a->atty;
    layer.lse = a->att_lse;
    layer.cache = {pass->cached ? a->kv : NULL, pass->cached};
    layer.sequence = pass->sequence;
    layer.positions = pass_is_step(pass) ? pass->positions.given : NULL;
    layer.linear = linear;
    layer.attention = attention;
    return layer;
}

// Sets qkv, out and lse; inp (N, C).
static inline void self_attention_forward(const SelfAttentionGpu* a, const floatX* inp) {
    const int N = a->sizes.B * a->sizes.T;
    const Gpu* gpu = a->linear->gpu;
    linear_forward(a->qkv, inp, &a->weight, N, a->linear);
    if (a->cache.data) {
        attention_cache_store(a->cache, a->qkv, a->positions, a->sequence, a->sizes, gpu);
    }
    if (a->positions) {
        attention_cached(a->out, a->qkv, a->positions, 0, a->cache, a->sizes, gpu);
    } else {
        attention_forward(a->out, a->lse, a->qkv, a->starts, a->sizes, a->attention, gpu);
    }
}

// Gradients of parameters, without data if frozen, which the backward pass sets or adds to as
// `mode` says; dinp (N, C), which it sets; and memory that it uses.
typedef struct {
    floatX* dinp;
    Gradient dqkvw, dqkvb;
    GradientMode mode;
    floatX* dqkv; // (N, QKV)
} SelfAttentionGradientsGpu;

// Sets and adds to gradients. dout is (N, Q), inp (N, C); dinp may be dout.
static inline void self_attention_backward(const SelfAttentionGpu* a, const SelfAttentionGradientsGpu* d,
                                           const floatX* dout, const floatX* inp) {
    attention_backward(d->dqkv, d->dqkvb, dout, a->qkv, a->out, a->lse, a->starts, a->sizes, d->mode,
                       a->attention, a->linear->gpu);
    linear_backward(d->dinp, d->dqkvw, d->dqkv, inp, &a->weight, a->sizes.B * a->sizes.T, d->mode, a->linear);
}

#endif
