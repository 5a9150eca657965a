/*
self_attention.h -- attention of a block with the linear layers in front of it and behind it, on the
CPU, with the matmuls of linear.h.

    qkv (N, QKV)                = inp weight^T + bias; queries and keys with their norms and
                                  positions (heads.h)
    atty (N, Q), lse (B, NH, T) = attention of qkv (attention.h), with sinks (sinks.h) if it has any
    out (N, C)                  = atty proj^T + bias; with gates: (atty sigmoid(inp gate^T)) proj^T

With a value embedding, values get it before attention (value_embedding.h).

With latents (latents.h) the first product is what they come from, and proj reads their values.

If several ranks cut these matrices (tensor_parallel.h), inp and out are the rows of this rank's
tokens; else of all.

If a rank has a part of each sequence, keys and values are gathered before attention, and their
gradients added up after it (context_parallel.h).

With matmuls in bf16, whole sequences, T and head size multiples of 32, and heads without norms,
qkv and its gradient are packed as in qkv_bf16.h. Attention with dropout is in fp32. With a cache,
keys (with their positions) and values are kept, and the tokens of a decoding step see all kept
before.
*/
#ifndef LLMC_SELF_ATTENTION_H
#define LLMC_SELF_ATTENTION_H

#include "llmc/base/memory.h"
#include "llmc/bf16/attention_bf16.h"
#include "llmc/ops/gate.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/heads.h"
#include "llmc/ops/sinks.h"
#include "llmc/ops/value_embedding.h"
#include "llmc/layers/attention_config.h"
#include "llmc/layers/latents.h"
#include "llmc/layers/linear.h"
#include "llmc/layers/pass.h"
#include "llmc/bf16/qkv_bf16.h"
#include "llmc/parallel/context_parallel.h"

// ---- attention in fp32 or bf16 ----

// Attention with factors in fp32 or in bf16. A step of decoding is always in fp32.
typedef struct {
    int is_bf16;
    AttentionScratch fp32;
    AttentionBf16Scratch bf16;
    ModelRopes ropes;
    ContextParallel context;
    LatentScratch latents; // of a step of decoding
    double* scores;        // largest ones of the model (qk_clip.h), while they are wanted; or NULL
} Attention;

static inline void attention_either_open(Attention* a, Memory* memory, int is_bf16, int T, int HS) {
    memset(a, 0, sizeof(*a));
    a->is_bf16 = is_bf16;
    attention_open(&a->fp32, memory, T, HS);
    if (is_bf16) {
        attention_bf16_open(&a->bf16, memory, bf16_kernel(), T, HS);
    }
}

static inline void attention_either_forward_cpu(const AttentionPass* pass, Attention* a) {
    if (a->is_bf16) {
        attention_bf16_forward_cpu(pass, &a->bf16);
    } else {
        attention_forward_cpu(pass, &a->fp32);
    }
}

static inline void attention_either_backward_cpu(const AttentionGradients* d, const AttentionPass* pass,
                                                 Attention* a) {
    if (a->is_bf16) {
        attention_bf16_backward_cpu(d, pass, &a->bf16);
    } else {
        attention_backward_cpu(d, pass, &a->fp32);
    }
}

// ---- the layer ----

// Opens the attention of a model, for micro-batches of up to these sizes.
static inline void self_attention_open(Attention* a, Memory* memory, int is_bf16, ModelConfig cfg,
                                       AttentionSizes sizes, Group* context) {
    const int W = attention_keys(sizes);
    attention_either_open(a, memory, is_bf16 && cfg.attention_dropout == 0, W, sizes.HS);
    attention_config_open_ropes(&a->ropes, memory, cfg, W, rope_open);
    context_open_cpu(&a->context, memory, sizes, context);
    if (model_has_latent(cfg)) {
        latent_open(&a->latents, memory, attention_config_latents(cfg, sizes.B), W);
    }
}

typedef struct {
    AttentionSizes sizes;
    const int* starts;    // (B, W), or NULL
    int window;           // tokens that a step of decoding sees, itself the last; 0: all
    Weight weight, proj;  // (QKV, C), (C, Q); of latents (R, C), (C, NH V)
    Weight gate;          // (Q, C), or no data
    float *gates, *gated; // (N, Q) of atty, before their sigmoid; atty with them
    Latents latents;
    const float* proj_bias;  // (C), or NULL
    Heads heads;             // norms and rotation of queries and keys
    const float* sinks;      // (NH), or NULL
    ValueEmbedding values;   // without its input; no gate: none
    size_t table_first;      // of its table among all
    float *qkv, *atty, *lse; // (N, QKV), (N, Q), (B, NH, T)
    TensorParallel tensor;
    AttentionCache cache; // keys and values that are kept; no data: none
    int sequence;         // prefill: its place in the cache
    const int* positions; // decode: of each row; else NULL
    Dropout dropout;      // of the weights of this rank's heads
    const int* lengths;   // (B), or NULL
    double* largest;      // (NH) scores, or NULL
    Linear* linear;
    Attention* attention;
} SelfAttention;

// Returns the value embedding of a layer, without its input.
static inline ValueEmbedding self_attention_values_of_(const LayerPass* layer) {
    const ModelParameters* p = &layer->p;
    const size_t first = attention_config_table(layer->cfg, layer->l);
    return (ValueEmbedding){.sizes = attention_config_values(layer->cfg, pass_tokens(layer->pass)),
                            .words = layer->cfg.V,
                            .gate = p->value_gate,
                            .table = p->value_gate ? p->value_table + first : NULL,
                            .tokens = layer->pass->inputs};
}

// Returns the dropout of the weights of a layer's heads, which tensor ranks divide.
static inline Dropout self_attention_dropout_(const LayerPass* layer) {
    const int first = layer->cfg.part.tensor_rank * layer->cfg.NH;
    return pass_dropout(layer->pass, layer->cfg.attention_dropout, dropout_of_head(layer_depth(layer), first),
                        0);
}

// Returns the attention of a layer; `window_starts` are for layers with a window.
static inline SelfAttention self_attention_of(const LayerPass* layer, const int* window_starts,
                                              Attention* attention) {
    const ModelConfig cfg = layer->cfg;
    const ModelActivations* a = &layer->a;
    const ModelParameters* p = &layer->p;
    const Pass* pass = layer->pass;
    const AttentionSizes sizes = attention_config_chunks(cfg, pass->B, pass->T, pass->positions.chunks);
    const int* positions = pass_is_step(pass) ? pass->positions.given : NULL;
    const Rope rope =
        attention_config_layer_rope(&attention->ropes, cfg, layer->l, positions ? 0 : attention_keys(sizes));
    return (SelfAttention){
        .sizes = sizes,
        .starts = model_window(cfg, layer->l) > 0 ? window_starts : pass->starts,
        .window = model_window(cfg, layer->l),
        .weight = layer->weights.qkv,
        .proj = layer->weights.attproj,
        .gate = layer->weights.gate,
        .gates = a->att_gate,
        .gated = a->att_gated,
        .latents = latents_of(layer),
        .proj_bias = p->attprojb,
        .heads = {model_architecture(cfg.arch)->heads,
                  model_norm_eps(cfg),
                  model_norm_offset(cfg),
                  sizes,
                  rope,
                  positions,
                  p->qnormw,
                  p->knormw,
                  a->qk_raw,
                  a->qk_rstd,
                  {(HeadsSums*)(void*)a->qk_sums, layer->tensor.group}},
        .sinks = p->sinks,
        .values = self_attention_values_of_(layer),
        .table_first = attention_config_table(cfg, layer->l),
        .qkv = a->qkv,
        .atty = a->atty,
        .lse = a->att_lse,
        .tensor = layer->tensor,
        .cache = {pass->cached ? a->kv : NULL, pass->cached},
        .sequence = pass->sequence,
        .positions = positions,
        .dropout = self_attention_dropout_(layer),
        .lengths = pass->lengths,
        .largest = attention->scores ? attention_config_scores_at(attention->scores, cfg, layer->l) : NULL,
        .linear = layer->linear,
        .attention = attention};
}

// Returns true if this rank has a part of each sequence.
static inline int self_attention_is_divided_(const SelfAttention* a) { return a->sizes.chunks.last > 0; }

static inline int self_attention_is_packed_(const SelfAttention* a) {
    return a->linear->is_bf16 && a->attention->is_bf16 && !a->cache.data && !self_attention_is_divided_(a) &&
           !weight_has_adapter(&a->weight.adapter) && !heads_parts(a->heads.kind).has_norm &&
           !latents_are_there(&a->latents) && !a->values.gate && attention_bf16_fits(a->sizes.T, a->sizes.HS);
}

static inline QkvBf16 self_attention_layer_(const SelfAttention* a) {
    return (QkvBf16){a->sizes,           a->weight.C,    a->weight.forward,
                     a->weight.backward, a->weight.bias, a->heads.rope};
}

// Returns the pass of attention; kv are gathered keys, or NULL.
static inline AttentionPass self_attention_pass_(const SelfAttention* a, const float* kv) {
    return (AttentionPass){a->sizes, a->starts,  a->qkv,     kv,        a->atty,
                           a->lse,   a->lengths, a->largest, a->dropout};
}

static inline LatentCache self_attention_latents_(const SelfAttention* a) {
    return (LatentCache){a->cache.data, a->cache.maxT};
}

// Keeps the keys and values in qkv, or their latents.
static inline void self_attention_store_(const SelfAttention* a) {
    if (latents_are_there(&a->latents)) {
        latents_store_cpu(&a->latents, self_attention_latents_(a), a->qkv, a->sequence, a->positions);
        return;
    }
    if (!a->positions) {
        attention_cache_store_cpu(a->cache, a->qkv, a->sequence, 0, a->sizes.T, a->sizes);
        return;
    }
    for (int b = 0; b < a->sizes.B; b++) {
        attention_cache_store_cpu(a->cache, a->qkv + (size_t)b * a->weight.OC, b, a->positions[b], 1,
                                  a->sizes);
    }
}

static inline ValueEmbedding self_attention_values_(const SelfAttention* a, const float* inp) {
    ValueEmbedding values = a->values;
    values.inp = inp;
    return values;
}

// Sets qkv before norms and positions.
static inline void self_attention_linear_(const SelfAttention* a, const float* inp, int N) {
    const int has_latents = latents_are_there(&a->latents);
    linear_forward_cpu(has_latents ? a->latents.first : a->qkv, inp, &a->weight, N, a->linear);
    if (has_latents) {
        latents_forward_cpu(a->qkv, &a->latents, a->positions != NULL);
    }
    if (a->values.gate) {
        const ValueEmbedding values = self_attention_values_(a, inp);
        value_embedding_forward_cpu(a->qkv, &values);
    }
}

// Sets what the queries of a step see.
static inline void self_attention_step_(const SelfAttention* a, const AttentionPass* pass) {
    if (latents_are_there(&a->latents)) {
        latents_cached_cpu(&a->latents, self_attention_latents_(a), a->qkv, a->positions, 1 / a->sizes.root,
                           &a->attention->latents);
    } else {
        attention_cached_cpu(pass, a->positions, a->window, a->cache, &a->attention->fp32);
    }
}

// Sets qkv, atty and lse; inp (N, C).
static inline void self_attention_keys_(const SelfAttention* a, const float* inp) {
    const int N = a->sizes.B * a->sizes.T;
    AttentionPass pass = self_attention_pass_(a, NULL);
    if (self_attention_is_packed_(a)) {
        const QkvBf16 layer = self_attention_layer_(a);
        uint32_t* qkv = (uint32_t*)(void*)a->qkv;
        qkv_bf16_forward_cpu(qkv, &layer, inp, &a->linear->bf16);
        attention_bf16_packed_forward_cpu(qkv, &pass, &a->attention->bf16);
        return;
    }
    self_attention_linear_(a, inp, N);
    heads_forward_cpu(a->qkv, &a->heads);
    if (a->cache.data) {
        self_attention_store_(a);
    }
    if (a->positions) {
        self_attention_step_(a, &pass);
        return;
    }
    if (self_attention_is_divided_(a)) {
        pass.kv = context_gather_cpu(&a->attention->context, a->qkv, a->sizes);
    }
    attention_either_forward_cpu(&pass, a->attention);
}

// Sets what heads see, with sinks.
static inline void self_attention_heads_(const SelfAttention* a, const float* inp) {
    self_attention_keys_(a, inp);
    if (a->sinks) {
        sinks_forward_cpu(a->atty, a->lse, a->sinks, a->sizes);
    }
}

static inline size_t self_attention_elements_(const SelfAttention* a) {
    return (size_t)a->tensor.cut.N * (size_t)a->proj.C;
}

// Returns the output of the heads (N, Q), with gates if they have any, or without padding.
static inline const float* self_attention_result_(const SelfAttention* a) {
    if (latents_are_there(&a->latents)) {
        if (!a->positions) {
            latent_values_cpu(a->latents.values, a->atty, a->latents.sizes);
        }
        return a->latents.values;
    }
    if (!a->gate.data) {
        return a->atty;
    }
    gate_forward_cpu(a->gated, a->atty, a->gates, self_attention_elements_(a));
    return a->gated;
}

// Sets out. Collective.
static inline void self_attention_forward_cpu(float* out, const SelfAttention* a, const float* inp) {
    const float* all = tensor_gather_cpu(&a->tensor, 0, inp);
    self_attention_heads_(a, all);
    if (a->gate.data) {
        linear_forward_cpu(a->gates, all, &a->gate, a->tensor.cut.N, a->linear);
    }
    linear_forward_cpu(tensor_part(&a->tensor, out), self_attention_result_(a), &a->proj, a->tensor.cut.N,
                       a->linear);
    tensor_sum_cpu(&a->tensor, out, a->proj_bias);
}

// Gradients of parameters, or NULL, which a backward pass sets or adds to as `mode` says; dinp,
// which it sets; and memory that it uses.
typedef struct {
    float *dinp, *dqkvw, *dqkvb, *dqnormw, *dknormw, *dsinks, *dgatew, *dprojw, *dprojb;
    float *dvalue_gate, *dvalue_table; // that of all layers
    GradientMode mode;
    float* datty;                  // (N, Q); may be dinp
    float* dgates;                 // (N, Q)
    float* part;                   // (N, C)
    float* dqkv;                   // (N, QKV)
    float* sums;                   // (B, QKV)
    float *dvalues, *dvalue_gates; // (N, KV HS), (N, KV)
    LatentsGradients latents;
} SelfAttentionGradients;

// Returns the gradients of a layer: `d` has its parameters' gradients, `a` has memory.
static inline SelfAttentionGradients
self_attention_gradients_of(const ModelParameters* d, const ModelActivations* a, GradientMode mode) {
    return (SelfAttentionGradients){.dinp = a->branch,
                                    .dqkvw = d->qkvw,
                                    .dqkvb = d->qkvb,
                                    .dqnormw = d->qnormw,
                                    .dknormw = d->knormw,
                                    .dsinks = d->sinks,
                                    .dgatew = d->attgatew,
                                    .dprojw = d->attprojw,
                                    .dprojb = d->attprojb,
                                    .dvalue_gate = d->value_gate,
                                    .dvalue_table = d->value_table,
                                    .mode = mode,
                                    .datty = a->branch,
                                    .dgates = a->datt_gate,
                                    .part = a->dpart,
                                    .dqkv = a->dqkv,
                                    .sums = a->dfch,
                                    .dvalues = a->dvalues,
                                    .dvalue_gates = a->dvalue_gates,
                                    .latents = latents_gradients_of(d, a, mode)};
}

// Sets dqkv; if sequences are divided, from the rank's queries, and from the gradients of its keys
// that all ranks have.
static inline void self_attention_backward_qkv_(const SelfAttention* a, float* dqkv, const float* dout) {
    const ContextParallel* context = &a->attention->context;
    const int is_divided = self_attention_is_divided_(a);
    const float* kv = is_divided ? context_gather_cpu(context, a->qkv, a->sizes) : NULL;
    const AttentionPass pass = self_attention_pass_(a, kv);
    const AttentionGradients d = {dout, dqkv, context->dkv};
    attention_either_backward_cpu(&d, &pass, a->attention);
    if (is_divided) {
        context_sum_cpu(dqkv, context, a->sizes);
    }
}

// Sets the gradients of a value embedding and of its gates, from dqkv.
static inline void self_attention_values_backward_(const SelfAttention* a, const SelfAttentionGradients* d,
                                                   const float* inp) {
    const ValueEmbedding values = self_attention_values_(a, inp);
    const EmbeddingSizes sizes = {
        a->sizes.B,      a->sizes.T, values.sizes.KV * values.sizes.HS, values.words, a->sizes.T,
        a->sizes.chunks, 0};
    value_embedding_backward_cpu(d->dvalues, d->dvalue_gates, d->dqkv, &values);
    if (d->dvalue_table) {
        embedding_backward_cpu(d->dvalue_table + a->table_first, NULL, d->dvalues, values.tokens, sizes,
                               d->mode, d->mode);
    }
}

// Returns the gradient of atty, given that of the result.
static inline const float* self_attention_datty_(const SelfAttention* a, const SelfAttentionGradients* d) {
    if (!latents_are_there(&a->latents)) {
        return d->datty;
    }
    latent_values_backward_cpu(a->latents.values, d->datty, a->latents.sizes);
    return a->latents.values;
}

// Sets dinp (N, C), which may be datty (N, Q), and sets or adds to all gradients except the
// projection's; inp (N, C).
static inline void self_attention_heads_backward_(const SelfAttention* a, const SelfAttentionGradients* d,
                                                  float* dinp, const float* inp) {
    const int N = a->sizes.B * a->sizes.T;
    const float* dout = self_attention_datty_(a, d);
    if (d->dsinks) {
        sinks_backward_cpu(d->dsinks, dout, a->atty, a->lse, a->sinks, a->sizes, d->mode);
    }
    if (self_attention_is_packed_(a)) {
        const QkvBf16 layer = self_attention_layer_(a);
        const AttentionBf16Gradient dqkv = {(uint32_t*)(void*)d->dqkv, d->sums, a->heads.rope};
        const QkvBf16Gradients gradients = {dinp, d->dqkvw, d->dqkvb, d->mode};
        const AttentionPass pass = self_attention_pass_(a, NULL);
        attention_bf16_packed_backward_cpu(dqkv, dout, (const uint32_t*)(const void*)a->qkv, &pass,
                                           &a->attention->bf16);
        qkv_bf16_backward_cpu(&layer, &gradients, dqkv, inp, &a->linear->bf16);
        return;
    }
    self_attention_backward_qkv_(a, d->dqkv, dout);
    if (a->values.gate) {
        self_attention_values_backward_(a, d, inp);
    }
    const HeadsGradients dheads = {d->dqnormw, d->dknormw, d->mode, d->sums};
    heads_backward_cpu(d->dqkv, &dheads, a->qkv, &a->heads);
    const float* dlinear = d->dqkv;
    if (latents_are_there(&a->latents)) {
        latents_backward_cpu(&a->latents, &d->latents, d->dqkv);
        dlinear = a->latents.first;
    }
    linear_backward_cpu(dinp, (LinearGradients){d->dqkvw, d->dqkvb, d->mode}, dlinear, inp, &a->weight, N,
                        a->linear);
    if (a->values.gate) {
        const ValueEmbedding values = self_attention_values_(a, inp);
        value_gate_backward_cpu(dinp, d->dvalue_gate, d->dvalue_gates, &values, d->mode);
    }
}

// Turns datty, the gradient of the heads' output with gates, into that without them.
static inline void self_attention_gates_backward_(const SelfAttention* a, const SelfAttentionGradients* d) {
    if (a->gate.data) {
        gate_backward_cpu(d->datty, d->dgates, d->datty, a->atty, a->gates, self_attention_elements_(a));
    }
}

// Adds the gradient through the gates to dinp.
static inline void self_attention_gates_finish_(const SelfAttention* a, const SelfAttentionGradients* d,
                                                float* dinp, const float* inp) {
    const int N = a->tensor.cut.N;
    if (a->gate.data) {
        linear_backward_cpu(d->part, (LinearGradients){d->dgatew, NULL, d->mode}, d->dgates, inp, &a->gate, N,
                            a->linear);
        residual_forward_cpu(dinp, dinp, d->part, (size_t)N * (size_t)a->gate.C);
    }
}

// Sets and adds to gradients. dqkv is undefined afterwards. Collective.
static inline void self_attention_backward_cpu(const SelfAttention* a, const SelfAttentionGradients* d,
                                               const float* dout, const float* inp) {
    const TensorParallel* tensor = &a->tensor;
    const float *all_dout = tensor_gather_cpu(tensor, 0, dout), *all_inp = tensor_gather_cpu(tensor, 1, inp);
    tensor_bias_backward_cpu(tensor, d->dprojb, dout, d->mode);
    linear_backward_cpu(d->datty,
                        (LinearGradients){d->dprojw, tensor_is_cut(tensor->cut) ? NULL : d->dprojb, d->mode},
                        all_dout, self_attention_result_(a), &a->proj, tensor->cut.N, a->linear);
    self_attention_gates_backward_(a, d);
    self_attention_heads_backward_(a, d, tensor_part(tensor, d->dinp), all_inp);
    self_attention_gates_finish_(a, d, tensor_part(tensor, d->dinp), all_inp);
    tensor_sum_cpu(tensor, d->dinp, NULL);
}

#endif
