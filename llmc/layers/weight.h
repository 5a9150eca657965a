/*
weight.h -- a matrix of the model with its bias, in the forms that matmuls read.

    out (N, OC) = inp (N, C) weight^T + bias

A layer has its weights at hand, with their sizes: nothing looks a matrix up.
*/
#ifndef LLMC_WEIGHT_H
#define LLMC_WEIGHT_H

#include <stdint.h>
#include <string.h>

#include "llmc/base/enum_words.h"
#include "llmc/base/float8.h"
#include "llmc/model/model.h"
#include "llmc/ops/adapter.h"
#include "llmc/ops/gradient.h"

// --matmul
// clang-format off
#define MATMUL_WORDS(X) \
    X(MATMUL_FP32, "fp32") \
    X(MATMUL_BF16, "bf16") \
    X(MATMUL_AUTO, "auto") \
    X(MATMUL_FP8, "fp8")
// clang-format on
typedef enum { MATMUL_WORDS(WORDS_VALUE) } MatmulPrecision;

// A matrix in E4M3 and its transpose, as of the last update: on a GPU with --matmul fp8. Without
// codes each matmul quantizes it.
typedef struct {
    E4m3Rows rows, turned; // (OC, C), (C, OC)
} WeightCodes;

// The adapter of a matrix (adapter.h), and in a backward pass its gradients, of the parameters'
// gradients' type.
typedef struct {
    AdapterShape shape;
    const floatX *a, *b;
    void *da, *db;
    GradientMode mode;
} WeightAdapter;

static inline int weight_has_adapter(const WeightAdapter* x) { return x->shape.rank > 0; }

typedef struct {
    const floatX* data;                 // (OC, C); with --quantize its blocks of 8 bits
    const floatX* bias;                 // (OC), or NULL
    const uint32_t *forward, *backward; // packed in bf16 for both passes (bf16_weights.h), or NULL
    int OC, C;
    int in_fp8; // --matmul fp8 multiplies it in fp8 (matmul_fp8.h)
    WeightCodes fp8;
    WeightAdapter adapter;
} Weight;

// Returns a matrix (OC, C) with its bias, without codes and adapter.
static inline Weight weight_of(const floatX* data, const floatX* bias, int OC, int C) {
    Weight w;
    memset((void*)&w, 0, sizeof(w));
    w.data = data;
    w.bias = bias;
    w.OC = OC;
    w.C = C;
    return w;
}

// Returns the matrix of expert e, with its bias, given expert 0's; its data are floatX, without
// copies. It is not multiplied in fp8.
static inline Weight weight_of_expert(const Weight* w, int e) {
    const size_t first = (size_t)e * (size_t)w->OC; // row
    return weight_of(w->data + first * (size_t)w->C, w->bias ? w->bias + first : NULL, w->OC, w->C);
}

// Packed copies of the matrices, as members of the same names.
#define PACKED_MEMBER_(name, ...) const uint32_t* name;
typedef struct {
    MODEL_PARAMETERS(PACKED_MEMBER_)
} PackedParameters;
#undef PACKED_MEMBER_

// Matrices of a block, the embedding, and the classifier, which may be the embedding. In a layer
// with experts, fc and fcproj are expert 0's, and the others' follow them; shared: the expert that
// all tokens take; ..._up: out of latents; gate: of attention's output; mix...: of a mixer
// (mixer.h).
typedef struct {
    Weight qkv, queries_up, keys_up, gate, attproj, mix, mixz, mixba, mixout, router, fc, fcproj, shared_fc,
        shared_fcproj, wte, head;
} LayerWeights;

// Names the adapter of a matrix.
static inline WeightAdapter weight_adapter_(ModelConfig cfg, AdaptedMatrix m, const floatX* a,
                                            const floatX* b) {
    const WeightAdapter adapter = {model_adapter_shape(cfg, m), a, b, NULL, NULL, GRADIENT_SET};
    return adapter;
}

// Names the adapters in `p`; in a layer with experts these have none.
static inline void layer_adapters_(LayerWeights* w, ModelConfig cfg, int has_experts,
                                   const ModelParameters* p) {
    if (!model_has_adapter(cfg)) {
        return;
    }
    w->qkv.adapter = weight_adapter_(cfg, ADAPT_QKV, p->qkvw_a, p->qkvw_b);
    w->attproj.adapter = weight_adapter_(cfg, ADAPT_ATTPROJ, p->attprojw_a, p->attprojw_b);
    if (!has_experts) {
        w->fc.adapter = weight_adapter_(cfg, ADAPT_FC, p->fcw_a, p->fcw_b);
        w->fcproj.adapter = weight_adapter_(cfg, ADAPT_FCPROJ, p->fcprojw_a, p->fcprojw_b);
    }
}

// Names the matrices in `p`, the parameters of a layer with or without experts, and their copies,
// whose members may be NULL.
static inline LayerWeights layer_weights(ModelConfig cfg, int has_experts, const ModelParameters* p,
                                         const PackedParameters* forward, const PackedParameters* backward) {
    const int C = cfg.C, Q = model_heads(cfg), first = model_attention_rows(cfg),
              out = model_attention_values(cfg), F = model_hidden(cfg), gates = model_gates(cfg),
              Fe = model_expert_hidden(cfg), Fs = has_experts ? cfg.Fs : 0, values = model_mixer_values(cfg);
    LayerWeights w;
#define WEIGHT_(matrix, weight, bias, OC, C)                                                                 \
    matrix = weight_of(p->weight, bias, OC, C);                                                              \
    matrix.forward = forward->weight;                                                                        \
    matrix.backward = backward->weight;
    WEIGHT_(w.qkv, qkvw, p->qkvb, first, C)
    WEIGHT_(w.queries_up, qupw, NULL, Q, cfg.latent.query_rank)
    WEIGHT_(w.keys_up, kvupw, NULL, model_latent_up(cfg), cfg.latent.rank)
    WEIGHT_(w.gate, attgatew, NULL, Q, C)
    WEIGHT_(w.attproj, attprojw, p->attprojb, C, out)
    WEIGHT_(w.mix, mixw, NULL, model_mixer_rows(cfg), C)
    WEIGHT_(w.mixz, mixzw, NULL, values, C)
    WEIGHT_(w.mixba, mixbaw, NULL, 2 * cfg.mixer.value_heads, C)
    WEIGHT_(w.mixout, mixoutw, NULL, C, values)
    WEIGHT_(w.shared_fc, sfcw, NULL, gates * Fs, C)
    WEIGHT_(w.shared_fcproj, sfcprojw, NULL, C, Fs)
    WEIGHT_(w.wte, wte, NULL, cfg.Vp, C)
    WEIGHT_(w.head, head, NULL, cfg.Vp, C)
    if (has_experts) {
        WEIGHT_(w.fc, efcw, p->efcb, gates * Fe, C)
        WEIGHT_(w.fcproj, efcprojw, p->efcprojb, C, Fe)
    } else {
        WEIGHT_(w.fc, fcw, p->fcb, gates * F, C)
        WEIGHT_(w.fcproj, fcprojw, p->fcprojb, C, F)
    }
#undef WEIGHT_
    w.router = weight_of(p->routerw, p->routerwb, cfg.E, C); // always fp32
    w.head = cfg.has_head ? w.head : w.wte;
    w.qkv.in_fp8 = w.shared_fc.in_fp8 = w.shared_fcproj.in_fp8 = 1;
    w.fc.in_fp8 = w.fcproj.in_fp8 = !has_experts;
    layer_adapters_(&w, cfg, has_experts, p);
    return w;
}

// Gradients of the factors of an adapter.
typedef struct {
    void *a, *b;
} AdapterGradient;

// Names the gradients of a layer's adapters: of the matrices qkv, attproj, fc, fcproj.
static inline void layer_adapter_gradients(LayerWeights* w, const AdapterGradient d[ADAPT_MATRICES],
                                           GradientMode mode) {
    WeightAdapter* const all[ADAPT_MATRICES] = {&w->qkv.adapter, &w->attproj.adapter, &w->fc.adapter,
                                                &w->fcproj.adapter};
    for (int m = 0; m < ADAPT_MATRICES; m++) {
        all[m]->da = d[m].a;
        all[m]->db = d[m].b;
        all[m]->mode = mode;
    }
}

#endif
