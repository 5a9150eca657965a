/*
latents.h -- queries, keys and values out of latents (latent.h): the part of a layer of attention
between its first matrix and attention, on the CPU, with the matmuls of linear.h.

    q, c (N, query_rank), (N, rank)  = norms of the latents in `first`
    queries (N, NH HS), up           = q queries_up^T, c keys_up^T
    qkv (N, 3 NH HS)                 = of all of them

A step of decoding does without `up`.
*/
#ifndef LLMC_LATENTS_H
#define LLMC_LATENTS_H

#include "llmc/layers/attention_config.h"
#include "llmc/layers/linear.h"
#include "llmc/ops/latent.h"

// The latents of a layer; with sizes.rank 0 it has none.
typedef struct {
    LatentSizes sizes;
    Weight queries_up, keys_up;        // (NH HS, query_rank), (NH (P + V), rank)
    const float *q_weight, *kv_weight; // of norms
    float* first;                      // (N, R)
    float *q_raw, *q, *q_rstd;         // (N, query_rank), before the norm and after it; (N)
    float *kv_raw, *kv, *kv_rstd;      // (N, rank); (N)
    float *queries, *up;               // NULL: queries have no latent
    float* values;                     // (N, NH V); or the gradient of atty (N, NH HS)
    Linear* linear;
} Latents;

static inline Latents latents_of(const LayerPass* layer) {
    const ModelActivations* a = &layer->a;
    return (Latents){.sizes = attention_config_latents(layer->cfg, pass_tokens(layer->pass)),
                     .queries_up = layer->weights.queries_up,
                     .keys_up = layer->weights.keys_up,
                     .q_weight = layer->p.lnqw,
                     .kv_weight = layer->p.lnkvw,
                     .first = a->latent_first,
                     .q_raw = a->latent_q,
                     .q = a->latent_q_norm,
                     .q_rstd = a->latent_q_rstd,
                     .kv_raw = a->latent_kv,
                     .kv = a->latent_kv_norm,
                     .kv_rstd = a->latent_kv_rstd,
                     .queries = a->latent_queries,
                     .up = a->latent_up,
                     .values = a->att_values,
                     .linear = layer->linear};
}

static inline int latents_are_there(const Latents* x) { return x->sizes.rank > 0; }

static inline Norm latents_norm_(const float* weight, float* rstd, int N, int C) {
    return (Norm){NORM_RMS, LATENT_NORM_EPS, 1, weight, NULL, NULL, rstd, N, C};
}

// Sets qkv from `first`; of a step of decoding without what `up` gives.
static inline void latents_forward_cpu(float* qkv, const Latents* x, int is_step) {
    const LatentSizes s = x->sizes;
    const Norm of_kv = latents_norm_(x->kv_weight, x->kv_rstd, s.N, s.rank);
    latent_split_cpu(x->q_raw, x->kv_raw, x->first, s);
    norm_forward_cpu(x->kv, x->kv_raw, &of_kv);
    if (s.query_rank > 0) {
        const Norm of_q = latents_norm_(x->q_weight, x->q_rstd, s.N, s.query_rank);
        norm_forward_cpu(x->q, x->q_raw, &of_q);
        linear_forward_cpu(x->queries, x->q, &x->queries_up, s.N, x->linear);
    }
    if (!is_step) {
        linear_forward_cpu(x->up, x->kv, &x->keys_up, s.N, x->linear);
    }
    latent_heads_cpu(qkv, x->first, x->queries, is_step ? NULL : x->up, s);
}

// Gradients of parameters, or NULL, which a backward pass sets or adds to as `mode` says; and
// memory for those of the latents, before their norms and after them.
typedef struct {
    float *dq_weight, *dkv_weight, *dqueries_up, *dkeys_up;
    GradientMode mode;
    float *dq_raw, *dq, *dkv_raw, *dkv;
} LatentsGradients;

static inline LatentsGradients latents_gradients_of(const ModelParameters* d, const ModelActivations* a,
                                                    GradientMode mode) {
    return (LatentsGradients){.dq_weight = d->lnqw,
                              .dkv_weight = d->lnkvw,
                              .dqueries_up = d->qupw,
                              .dkeys_up = d->kvupw,
                              .mode = mode,
                              .dq_raw = a->dlatent_q,
                              .dq = a->dlatent_q_norm,
                              .dkv_raw = a->dlatent_kv,
                              .dkv = a->dlatent_kv_norm};
}

// Sets `first` to its gradient, given that of qkv, and the gradients of parameters. `queries` and
// `up` become gradients, too.
static inline void latents_backward_cpu(const Latents* x, const LatentsGradients* d, const float* dqkv) {
    const LatentSizes s = x->sizes;
    const Norm of_kv = latents_norm_(x->kv_weight, x->kv_rstd, s.N, s.rank);
    latent_heads_backward_cpu(x->first, x->queries, x->up, dqkv, s);
    linear_backward_cpu(d->dkv, (LinearGradients){d->dkeys_up, NULL, d->mode}, x->up, x->kv, &x->keys_up, s.N,
                        x->linear);
    norm_backward_cpu(d->dkv_raw, d->dkv_weight, NULL, d->dkv, x->kv_raw, &of_kv, GRADIENT_SET, d->mode);
    if (s.query_rank > 0) {
        const Norm of_q = latents_norm_(x->q_weight, x->q_rstd, s.N, s.query_rank);
        linear_backward_cpu(d->dq, (LinearGradients){d->dqueries_up, NULL, d->mode}, x->queries, x->q,
                            &x->queries_up, s.N, x->linear);
        norm_backward_cpu(d->dq_raw, d->dq_weight, NULL, d->dq, x->q_raw, &of_q, GRADIENT_SET, d->mode);
    }
    latent_join_cpu(x->first, d->dq_raw, d->dkv_raw, s);
}

// ---- generation ----

// Keeps what the cache has of the rows of a prefill, or of a step: `positions` of each.
static inline void latents_store_cpu(const Latents* x, LatentCache cache, const float* qkv, int sequence,
                                     const int* positions) {
    const LatentSizes s = x->sizes;
    const size_t rank = (size_t)s.rank, QKV = 3 * (size_t)s.NH * (size_t)s.HS;
    if (!positions) {
        latent_store_cpu(cache, x->kv, qkv, sequence, 0, s.N, s);
        return;
    }
    for (int n = 0; n < s.N; n++) {
        latent_store_cpu(cache, x->kv + (size_t)n * rank, qkv + (size_t)n * QKV, n, positions[n], 1, s);
    }
}

// Sets `values` in a step.
static inline void latents_cached_cpu(const Latents* x, LatentCache cache, const float* qkv,
                                      const int* positions, float scale, LatentScratch* scratch) {
    const Weight* up = &x->keys_up;
    const LatentWeight weight = {
        up->data, x->linear->is_quantized ? (const QuantizedBlock*)(const void*)up->data : NULL};
    latent_cached_cpu(x->values, qkv, positions, weight, scale, cache, scratch, x->sizes);
}

#endif
