/*
self_attention.cuh -- self_attention.h on the GPU: attention of a block with the linear layers in
front of it and behind it.

    qkv (N, QKV)                = inp weight^T + bias; queries and keys with their norms and
                                  positions (heads.h)
    atty (N, Q), lse (B, NH, T) = attention of qkv (attention.h), with sinks (sinks.h) if it has any
    out (N, C)                  = residual + atty proj^T + bias; with gates:
                                  residual + (atty sigmoid(inp gate^T)) proj^T

With a value embedding, values get it before attention (value_embedding.h).

With latents (latents.cuh) the first product is what they come from, and proj reads their values.

If several ranks cut these matrices (tensor_parallel.cuh), inp, residual and out are the rows of
this rank's tokens; else of all. The gradient of proj's bias is computed where dout is made.

If a rank has a part of each sequence, keys and values are gathered before attention, and their
gradients added up after it (context_parallel.h).
*/
#ifndef LLMC_SELF_ATTENTION_CUH
#define LLMC_SELF_ATTENTION_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/attention_config.h"
#include "llmc/layers/latents.cuh"
#include "llmc/layers/linear.cuh"
#include "llmc/ops/attention.cuh"
#include "llmc/ops/attention_race.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/embedding.cuh"
#include "llmc/ops/gate.cuh"
#include "llmc/ops/heads.cuh"
#include "llmc/ops/norm.cuh"
#include "llmc/ops/sinks.cuh"
#include "llmc/ops/value_embedding.cuh"
#include "llmc/parallel/context_parallel.cuh"

typedef struct {
    AttentionSizes sizes;
    const int* starts;     // (B, W), or NULL
    int window;            // decoding: tokens that a token sees, including itself; 0: all
    Weight weight, proj;   // (QKV, C), (C, Q); of latents (R, C), (C, NH V)
    Weight gate;           // (Q, C), or no data
    floatX *gates, *gated; // (N, Q) of atty, before their sigmoid; atty with them
    LatentsGpu latents;
    const floatX* proj_bias;          // (C), or NULL
    HeadsGpu<floatX> heads;           // norms and rotation of queries and keys
    const floatX* sinks;              // (NH), or NULL
    ValueEmbeddingGpu<floatX> values; // without its input; no gate: none
    size_t table_first;               // of its table among all
    floatX *qkv, *atty;               // (N, QKV), (N, Q)
    float* lse;                       // (B, NH, T)
    AttentionCacheGpu<floatX> cache;  // keys and values that are kept; no data: none
    int sequence;                     // prefill: its place in the cache
    const int* positions;             // decoding: position of each row; else NULL
    const int* lengths;               // (B), or NULL
    double* largest;                  // (NH) scores, or NULL
    TensorParallelGpu tensor;
    LinearGpu* linear;
    AttentionGpu* attention;
    const ContextParallelGpu<floatX>* context;
} SelfAttentionGpu;

// Returns the value embedding of a layer, without its input.
static inline ValueEmbeddingGpu<floatX> self_attention_values_of_(const LayerPassGpu* of) {
    const ModelParameters* p = &of->p;
    const size_t first = attention_config_table(of->cfg, of->l);
    return {attention_config_values(of->cfg, pass_tokens(of->pass)), of->cfg.V,       NULL, p->value_gate,
            p->value_gate ? p->value_table + first : NULL,           of->pass->inputs};
}

// Returns the attention of a layer; `window_starts` are for layers with a window. `scores` are the
// largest ones of the model (qk_clip.h), while they are wanted; or NULL.
static inline SelfAttentionGpu self_attention_of(const LayerPassGpu* of, const int* window_starts,
                                                 const ModelRopes* ropes, AttentionGpu* attention,
                                                 const ContextParallelGpu<floatX>* context, double* scores) {
    const ModelConfig cfg = of->cfg;
    const ModelActivations* a = &of->a;
    const ModelParameters* p = &of->p;
    const Pass* pass = of->pass;
    SelfAttentionGpu layer;
    layer.sizes = attention_config_chunks(cfg, pass->B, pass->T, pass->positions.chunks);
    layer.starts = model_window(cfg, of->l) > 0 ? window_starts : pass->starts;
    layer.window = model_window(cfg, of->l);
    layer.weight = of->weights.qkv;
    layer.proj = of->weights.attproj;
    layer.gate = of->weights.gate;
    layer.gates = a->att_gate;
    layer.gated = a->att_gated;
    layer.latents = latents_of(of);
    layer.proj_bias = p->attprojb;
    layer.positions = pass_is_step(pass) ? pass->positions.given : NULL;
    layer.heads = {
        model_architecture(cfg.arch)->heads,
        model_norm_eps(cfg),
        model_norm_offset(cfg),
        layer.sizes,
        attention_config_layer_rope(ropes, cfg, of->l, layer.positions ? 0 : attention_keys(layer.sizes)),
        layer.positions,
        p->qnormw,
        p->knormw,
        a->qk_raw,
        a->qk_rstd,
        {(HeadsSums*)(void*)a->qk_sums, of->tensor.cut.ranks, of->tensor.group}};
    layer.sinks = p->sinks;
    layer.values = self_attention_values_of_(of);
    layer.table_first = attention_config_table(cfg, of->l);
    layer.qkv = a->qkv;
    layer.atty = a->atty;
    layer.lse = a->att_lse;
    layer.cache = {pass->cached ? a->kv : NULL, pass->cached};
    layer.sequence = pass->sequence;
    layer.lengths = pass->lengths;
    layer.largest = scores ? attention_config_scores_at(scores, cfg, of->l) : NULL;
    layer.tensor = of->tensor;
    layer.linear = of->linear;
    layer.attention = attention;
    layer.context = context;
    return layer;
}

// Returns true if this rank has a part of each sequence.
static inline int self_attention_is_divided_(const SelfAttentionGpu* a) { return a->sizes.chunks.last > 0; }

// Returns the pass of attention; kv are gathered keys, or NULL.
static inline AttentionPassGpu<floatX> self_attention_pass_(const SelfAttentionGpu* a, const floatX* kv) {
    return {a->sizes, a->starts, a->qkv, kv, a->atty, a->lse};
}

// Gathers the keys and values of all ranks, if sequences are divided; else returns NULL.
static inline const floatX* self_attention_gather_(const SelfAttentionGpu* a) {
    return self_attention_is_divided_(a)
               ? context_gather(a->context, (const floatX*)a->qkv, a->sizes, a->linear->gpu)
               : NULL;
}

static inline ValueEmbeddingGpu<floatX> self_attention_values_(const SelfAttentionGpu* a, const floatX* inp) {
    ValueEmbeddingGpu<floatX> values = a->values;
    values.inp = inp;
    return values;
}

// Sets qkv before norms and positions; inp (N, C).
static inline void self_attention_linear_(const SelfAttentionGpu* a, const floatX* inp) {
    const int has_latents = latents_are_there(&a->latents);
    linear_forward(has_latents ? a->latents.first : a->qkv, inp, &a->weight, a->sizes.B * a->sizes.T,
                   a->linear);
    if (has_latents) {
        latents_forward(a->qkv, &a->latents, a->positions != NULL);
    }
    if (a->values.gate) {
        value_embedding_forward(a->qkv, self_attention_values_(a, inp), a->linear->gpu);
    }
}

static inline LatentCacheGpu<floatX> self_attention_latents_(const SelfAttentionGpu* a) {
    return {a->cache.data, a->cache.maxT};
}

// Keeps the keys and values in qkv, or their latents.
static inline void self_attention_store_(const SelfAttentionGpu* a) {
    const Gpu* gpu = a->linear->gpu;
    if (latents_are_there(&a->latents)) {
        latent_store(self_attention_latents_(a), (const floatX*)a->latents.kv, (const floatX*)a->qkv,
                     a->positions, a->sequence, a->latents.sizes, gpu);
    } else {
        attention_cache_store(a->cache, a->qkv, a->positions, a->sequence, a->sizes, gpu);
    }
}

// Sets what the queries of a step see.
static inline void self_attention_step_(const SelfAttentionGpu* a, const AttentionPassGpu<floatX>* pass) {
    if (latents_are_there(&a->latents)) {
        latents_cached(&a->latents, self_attention_latents_(a), a->qkv, a->positions, 1 / a->sizes.root);
    } else {
        attention_cached(pass, a->positions, a->window, a->cache, a->linear->gpu);
    }
}

// Sets qkv, atty and lse; inp (N, C).
static inline void self_attention_heads_(const SelfAttentionGpu* a, const floatX* inp) {
    const Gpu* gpu = a->linear->gpu;
    self_attention_linear_(a, inp);
    heads_forward(a->qkv, &a->heads, gpu);
    if (a->cache.data) {
        self_attention_store_(a);
    }
    const AttentionPassGpu<floatX> pass =
        self_attention_pass_(a, a->positions ? NULL : self_attention_gather_(a));
    if (a->positions) {
        self_attention_step_(a, &pass);
    } else {
        attention_raced_forward(&pass, a->attention, a->linear->matmul);
    }
    if (a->largest) {
        attention_largest_scores(a->largest, &pass, a->lengths, gpu);
    }
    if (a->sinks) {
        sinks_forward(a->atty, a->lse, a->sinks, a->sizes, gpu);
    }
}

static inline size_t self_attention_elements_(const SelfAttentionGpu* a) {
    return (size_t)a->tensor.cut.N * (size_t)a->proj.C;
}

// Returns the output of the heads (N, Q), with gates if they have any, or without padding.
static inline const floatX* self_attention_result_(const SelfAttentionGpu* a) {
    if (latents_are_there(&a->latents)) {
        if (!a->positions) {
            latent_values(a->latents.values, (const floatX*)a->atty, a->latents.sizes, a->linear->gpu);
        }
        return a->latents.values;
    }
    if (!a->gate.data) {
        return a->atty;
    }
    gate_forward(a->gated, (const floatX*)a->atty, (const floatX*)a->gates, self_attention_elements_(a),
                 a->linear->gpu);
    return a->gated;
}

// Returns true in a pass over no tokens, which calls no library. All ranks that share tokens have
// such a pass together.
static inline int self_attention_is_idle_(const SelfAttentionGpu* a) { return a->tensor.cut.N == 0; }

// Sets out, which is not residual. Collective.
static inline void self_attention_forward_residual(floatX* out, const floatX* residual,
                                                   const SelfAttentionGpu* a, const floatX* inp) {
    const TensorParallelGpu* tensor = &a->tensor;
    const int N = tensor->cut.N;
    if (self_attention_is_idle_(a)) {
        return;
    }
    inp = tensor_gather(tensor, 0, inp);
    self_attention_heads_(a, inp);
    if (a->gate.data) {
        linear_forward(a->gates, inp, &a->gate, N, a->linear);
    }
    linear_forward_residual(tensor_part(tensor, out), tensor_residual(tensor, residual),
                            self_attention_result_(a), &a->proj, N, a->linear);
    tensor_sum(tensor, out, residual, a->proj_bias);
}

// Gradients of parameters, without data if frozen, which the backward pass sets or adds to as
// `mode` says; dinp, which it sets; and memory that it uses.
typedef struct {
    floatX* dinp;
    Gradient dqkvw, dqkvb, dqnormw, dknormw, dsinks, dgatew, dprojw;
    GradientMode mode;
    floatX* datty;  // (N, Q); may be dinp
    floatX* dgates; // (N, Q)
    floatX* part;   // (N, C)
    floatX* dqkv;   // (N, QKV)
    LatentsGradientsGpu latents;
    // of a value embedding: gradients, the second one of the tables of all layers; memory:
    // (N, KV HS), (N, KV), sums; the batch, sorted by token
    Gradient dvalue_gate, dvalue_table;
    floatX* dvalues;
    float *dvalue_gates, *value_parts;
    EmbeddingGpu* encoder;
} SelfAttentionGradientsGpu;

// Returns the gradients of a layer: `d` has its parameters' gradients, `a` has memory.
static inline SelfAttentionGradientsGpu self_attention_gradients_of(const ModelGradients* d,
                                                                    const ModelActivations* a,
                                                                    GradientMode mode, NormScratch* scratch,
                                                                    EmbeddingGpu* encoder) {
    return {a->branch,      d->qkvw,
            d->qkvb,        d->qnormw,
            d->knormw,      d->sinks,
            d->attgatew,    d->attprojw,
            mode,           a->branch,
            a->datt_gate,   a->dpart,
            a->dqkv,        latents_gradients_of(d, a, mode, scratch),
            d->value_gate,  d->value_table,
            a->dvalues,     a->dvalue_gates,
            a->value_parts, encoder};
}

// Sets dqkv, the gradient of the linear layer's output, and sets or adds to its bias's gradient. If
// heads, or other ranks' gradients, change dqkv after attention's backward pass, the bias is summed
// after them.
static inline void self_attention_backward_qkv_(const SelfAttentionGpu* a, const SelfAttentionGradientsGpu* d,
                                                const floatX* dout) {
    const Gpu* gpu = a->linear->gpu;
    const int divided = self_attention_is_divided_(a), plain = heads_do_nothing(&a->heads) && !divided,
              N = a->sizes.B * a->sizes.T;
    const Gradient none = {NULL, d->dqkvb.dtype};
    float* sums = attention_sums(a->attention);
    const HeadsGradientsGpu dheads = {d->dqnormw, d->dknormw, d->mode, sums};
    const AttentionPassGpu<floatX> pass = self_attention_pass_(a, self_attention_gather_(a));
    const AttentionGradientsGpu<floatX> dpass = {dout, d->dqkv, divided ? a->context->dkv : NULL,
                                                 plain ? d->dqkvb : none, d->mode};
    if (d->dsinks.data) {
        sinks_backward(d->dsinks, sums, dout, (const floatX*)a->atty, a->lse, a->sinks, a->sizes, d->mode,
                       gpu);
    }
    attention_raced_backward(&dpass, &pass, a->attention, a->linear->matmul);
    if (divided) { // adds the other ranks' gradients of this one's keys
        context_sum(d->dqkv, a->context, a->sizes, gpu);
    }
    heads_backward(d->dqkv, &dheads, (const floatX*)a->qkv, &a->heads, gpu);
    if (!plain && d->dqkvb.data) {
        column_sums(d->dqkvb, sums, (const floatX*)d->dqkv, N, attention_qkv_size(a->sizes), d->mode, gpu);
    }
}

// Sets the gradients of a value embedding and of its gates, from dqkv.
static inline void self_attention_values_backward_(const SelfAttentionGpu* a,
                                                   const SelfAttentionGradientsGpu* d, const floatX* inp) {
    const ValueEmbeddingGpu<floatX> values = self_attention_values_(a, inp);
    const EmbeddingSizes sizes = {
        a->sizes.B,      a->sizes.T, values.sizes.KV * values.sizes.HS, values.words, a->sizes.T,
        a->sizes.chunks, 0};
    const Gradient none = {NULL, d->dvalue_table.dtype};
    Gradient table = d->dvalue_table;
    value_embedding_backward(d->dvalues, d->dvalue_gates, (const floatX*)d->dqkv, values, a->linear->gpu);
    if (table.data) {
        table.data = (char*)table.data + a->table_first * dtype_bytes(table.dtype);
        embedding_backward(table, none, (const floatX*)d->dvalues, values.tokens, sizes, d->mode, d->mode,
                           d->encoder, a->linear->gpu);
    }
}

// Returns the gradient of atty, given that of the result.
static inline const floatX* self_attention_datty_(const SelfAttentionGpu* a,
                                                  const SelfAttentionGradientsGpu* d) {
    if (!latents_are_there(&a->latents)) {
        return d->datty;
    }
    latent_values_backward(a->latents.values, (const floatX*)d->datty, a->latents.sizes, a->linear->gpu);
    return a->latents.values;
}

// Turns datty, the gradient of the heads' output with gates, into that without them.
static inline void self_attention_gates_backward_(const SelfAttentionGpu* a,
                                                  const SelfAttentionGradientsGpu* d) {
    if (a->gate.data) {
        gate_backward(d->datty, d->dgates, (const floatX*)d->datty, (const floatX*)a->atty,
                      (const floatX*)a->gates, self_attention_elements_(a), a->linear->gpu);
    }
}

// Adds the gradient through the gates to dinp.
static inline void self_attention_gates_finish_(const SelfAttentionGpu* a, const SelfAttentionGradientsGpu* d,
                                                floatX* dinp, const floatX* inp) {
    const int N = a->tensor.cut.N;
    if (a->gate.data) {
        linear_backward(d->part, {d->dgatew, d->mode}, d->dgates, inp, &a->gate, N, a->linear);
        residual_sum(dinp, (const floatX*)dinp, (const floatX*)d->part, 1, (size_t)N * (size_t)a->gate.C,
                     a->linear->gpu);
    }
}

// Sets and adds to gradients. Collective.
static inline void self_attention_backward(const SelfAttentionGpu* a, const SelfAttentionGradientsGpu* d,
                                           const floatX* dout, const floatX* inp) {
    const TensorParallelGpu* tensor = &a->tensor;
    const int N = tensor->cut.N;
    if (self_attention_is_idle_(a)) {
        return;
    }
    dout = tensor_gather(tensor, 0, dout), inp = tensor_gather(tensor, 1, inp);
    floatX* dinp = tensor_part(tensor, d->dinp);
    linear_backward(d->datty, {d->dprojw, d->mode}, dout, self_attention_result_(a), &a->proj, N, a->linear);
    self_attention_gates_backward_(a, d);
    self_attention_backward_qkv_(a, d, self_attention_datty_(a, d));
    if (a->values.gate) {
        self_attention_values_backward_(a, d, inp);
    }
    const floatX* dlinear = d->dqkv;
    if (latents_are_there(&a->latents)) {
        latents_backward(&a->latents, &d->latents, d->dqkv);
        dlinear = a->latents.first;
    }
    linear_backward(dinp, {d->dqkvw, d->mode}, dlinear, inp, &a->weight, N, a->linear);
    if (a->values.gate) {
        value_gate_backward(dinp, d->dvalue_gate, d->value_parts, d->dvalue_gates,
                            self_attention_values_(a, inp), d->mode, a->linear->gpu);
    }
    self_attention_gates_finish_(a, d, dinp, inp);
    tensor_sum(tensor, d->dinp, NULL, NULL);
}

#endif
