/*
latents.cuh -- latents.h on the GPU: queries, keys and values out of latents, with the matmuls of
linear.cuh.

    q, c (N, query_rank), (N, rank)  = norms of the latents in `first`
    queries (N, NH HS), up           = q queries_up^T, c keys_up^T
    qkv (N, 3 NH HS)                 = of all of them

A step of decoding does without `up`.
*/
#ifndef LLMC_LATENTS_CUH
#define LLMC_LATENTS_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/attention_config.h"
#include "llmc/layers/linear.cuh"
#include "llmc/ops/latent.cuh"
#include "llmc/ops/norm_backward.cuh"

// The latents of a layer; with sizes.rank 0 it has none.
typedef struct {
    LatentSizes sizes;
    Weight queries_up, keys_up;         // (NH HS, query_rank), (NH (P + V), rank)
    const floatX *q_weight, *kv_weight; // of norms
    floatX* first;                      // (N, R)
    floatX *q_raw, *q;                  // (N, query_rank), before the norm and after it
    floatX *kv_raw, *kv;                // (N, rank)
    float *q_rstd, *kv_rstd;            // (N)
    floatX *queries, *up;               // NULL: queries have no latent
    floatX* values;                     // (N, NH V); or the gradient of atty (N, NH HS)
    LinearGpu* linear;
} LatentsGpu;

static inline LatentsGpu latents_of(const LayerPassGpu* layer) {
    const ModelActivations* a = &layer->a;
    LatentsGpu x;
    x.sizes = attention_config_latents(layer->cfg, pass_tokens(layer->pass));
    x.queries_up = layer->weights.queries_up, x.keys_up = layer->weights.keys_up;
    x.q_weight = layer->p.lnqw, x.kv_weight = layer->p.lnkvw;
    x.first = a->latent_first;
    x.q_raw = a->latent_q, x.q = a->latent_q_norm, x.q_rstd = a->latent_q_rstd;
    x.kv_raw = a->latent_kv, x.kv = a->latent_kv_norm, x.kv_rstd = a->latent_kv_rstd;
    x.queries = a->latent_queries, x.up = a->latent_up;
    x.values = a->att_values;
    x.linear = layer->linear;
    return x;
}

static inline int latents_are_there(const LatentsGpu* x) { return x->sizes.rank > 0; }

static inline NormGpu<floatX> latents_norm_(const floatX* weight, float* rstd, int N, int C) {
    return {NORM_RMS, LATENT_NORM_EPS, 1, weight, NULL, NULL, rstd, N, C, {}};
}

// Sets qkv from `first`; of a step of decoding without what `up` gives.
static inline void latents_forward(floatX* qkv, const LatentsGpu* x, int is_step) {
    const LatentSizes s = x->sizes;
    const Gpu* gpu = x->linear->gpu;
    const NormGpu<floatX> of_kv = latents_norm_(x->kv_weight, x->kv_rstd, s.N, s.rank);
    latent_split(x->q_raw, x->kv_raw, (const floatX*)x->first, s, gpu);
    norm_forward(x->kv, (const floatX*)x->kv_raw, &of_kv, gpu);
    if (s.query_rank > 0) {
        const NormGpu<floatX> of_q = latents_norm_(x->q_weight, x->q_rstd, s.N, s.query_rank);
        norm_forward(x->q, (const floatX*)x->q_raw, &of_q, gpu);
        linear_forward(x->queries, x->q, &x->queries_up, s.N, x->linear);
    }
    if (!is_step) {
        linear_forward(x->up, x->kv, &x->keys_up, s.N, x->linear);
    }
    latent_heads(qkv, (const floatX*)x->first, (const floatX*)x->queries,
                 is_step ? (const floatX*)NULL : (const floatX*)x->up, s, gpu);
}

// Gradients of parameters, without data if frozen, which a backward pass sets or adds to as `mode`
// says; and memory for those of the latents, before their norms and after them.
typedef struct {
    Gradient dq_weight, dkv_weight, dqueries_up, dkeys_up;
    GradientMode mode;
    floatX *dq_raw, *dq, *dkv_raw, *dkv;
    NormScratch* scratch;
} LatentsGradientsGpu;

static inline LatentsGradientsGpu latents_gradients_of(const ModelGradients* d, const ModelActivations* a,
                                                       GradientMode mode, NormScratch* scratch) {
    return {d->lnqw,      d->lnkvw,          d->qupw,       d->kvupw,           mode,
            a->dlatent_q, a->dlatent_q_norm, a->dlatent_kv, a->dlatent_kv_norm, scratch};
}

static inline void latents_norm_backward_(floatX* dinp, Gradient dweight, const LatentsGradientsGpu* d,
                                          const floatX* dout, const floatX* inp, const NormGpu<floatX>* norm,
                                          const Gpu* gpu) {
    const Gradient none = {NULL, dweight.dtype};
    const NormGradients dnorm = {dweight, none, d->mode, none, d->mode, {}};
    norm_backward(dinp, GRADIENT_SET, &dnorm, dout, inp, norm, d->scratch, gpu);
}

// Sets `first` to its gradient, given that of qkv, and the gradients of parameters. `queries` and
// `up` become gradients, too.
static inline void latents_backward(const LatentsGpu* x, const LatentsGradientsGpu* d, const floatX* dqkv) {
    const LatentSizes s = x->sizes;
    const Gpu* gpu = x->linear->gpu;
    const NormGpu<floatX> of_kv = latents_norm_(x->kv_weight, x->kv_rstd, s.N, s.rank);
    latent_heads_backward(x->first, x->queries, x->up, dqkv, s, gpu);
    linear_backward(d->dkv, {d->dkeys_up, d->mode}, x->up, x->kv, &x->keys_up, s.N, x->linear);
    latents_norm_backward_(d->dkv_raw, d->dkv_weight, d, d->dkv, x->kv_raw, &of_kv, gpu);
    if (s.query_rank > 0) {
        const NormGpu<floatX> of_q = latents_norm_(x->q_weight, x->q_rstd, s.N, s.query_rank);
        linear_backward(d->dq, {d->dqueries_up, d->mode}, x->queries, x->q, &x->queries_up, s.N, x->linear);
        latents_norm_backward_(d->dq_raw, d->dq_weight, d, d->dq, x->q_raw, &of_q, gpu);
    }
    latent_join(x->first, (const floatX*)d->dq_raw, (const floatX*)d->dkv_raw, s, gpu);
}

// Sets `values` in a step of decoding.
static inline void latents_cached(const LatentsGpu* x, LatentCacheGpu<floatX> cache, const floatX* qkv,
                                  const int* positions, float scale) {
    const Weight* up = &x->keys_up;
    LatentWeightGpu<floatX> weight = {up->data, {}};
    if (x->linear->is_quantized) {
        weight = {NULL, quantized_gpu_bind(up->data, (size_t)up->OC * up->C)};
    }
    latent_cached(x->values, qkv, positions, weight, scale, cache, x->sizes, x->linear->gpu);
}

#endif
