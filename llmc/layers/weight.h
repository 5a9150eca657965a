/*
weight.h -- a matrix of the model with its bias, in the forms that matmuls read.

    out (N, OC) = inp (N, C) weight^T + bias

A layer has its weights at hand, with their sizes: nothing looks a matrix up.
*/
#ifndef LLMC_WEIGHT_H
#define LLMC_WEIGHT_H

#include <stdint.h>

#include "llmc/base/enum_words.h"
#include "llmc/base/float8.h"
#include "llmc/model/model.h"

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

typedef struct {
    const floatX* data;                 // (OC, C); with --quantize its blocks of 8 bits
    const floatX* bias;                 // (OC), or NULL
    const uint32_t *forward, *backward; // packed in bf16 for both passes (bf16_weights.h), or NULL
    int OC, C;
    int in_fp8; // --matmul fp8 multiplies it in fp8 (matmul_fp8.h)
    WeightCodes fp8;
} Weight;

// Returns the matrix of expert e, with its bias, given expert 0's; its data are floatX, without
// copies. It is not multiplied in fp8.
static inline Weight weight_of_expert(const Weight* w, int e) {
    const WeightCodes none = {{NULL, NULL}, {NULL, NULL}};
    const size_t first = (size_t)e * (size_t)w->OC; // row
    return (Weight){
        w->data + first * (size_t)w->C, w->bias ? w->bias + first : NULL, NULL, NULL, w->OC, w->C, 0, none};
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

// Names the matrices in `p`, the parameters of a layer with or without experts, and their copies,
// whose members may be NULL.
static inline LayerWeights layer_weights(ModelConfig cfg, int has_experts, const ModelParameters* p,
                                         const PackedParameters* forward, const PackedParameters* backward) {
    const int C = cfg.C, Q = model_heads(cfg), first = model_attention_rows(cfg),
              out = model_attention_values(cfg), F = model_hidden(cfg), gates = model_gates(cfg),
              Fe = model_expert_hidden(cfg), Fs = has_experts ? cfg.Fs : 0, values = model_mixer_values(cfg);
    const WeightCodes none = {{NULL, NULL}, {NULL, NULL}};
    const Weight wte = {p->wte, NULL, forward->wte, backward->wte, cfg.Vp, C, 0, none},
                 head = {p->head, NULL, forward->head, backward->head, cfg.Vp, C, 0, none},
                 fc = {p->fcw, p->fcb, forward->fcw, backward->fcw, gates * F, C, 1, none},
                 fcproj = {p->fcprojw, p->fcprojb, forward->fcprojw, backward->fcprojw, C, F, 1, none},
                 efc = {p->efcw, p->efcb, forward->efcw, backward->efcw, gates * Fe, C, 0, none},
                 efcproj = {p->efcprojw, p->efcprojb, forward->efcprojw, backward->efcprojw, C, Fe, 0, none};
    const LayerWeights weights = {
        {p->qkvw, p->qkvb, forward->qkvw, backward->qkvw, first, C, 1, none},
        {p->qupw, NULL, forward->qupw, backward->qupw, Q, cfg.latent.query_rank, 0, none},
        {p->kvupw, NULL, forward->kvupw, backward->kvupw, model_latent_up(cfg), cfg.latent.rank, 0, none},
        {p->attgatew, NULL, forward->attgatew, backward->attgatew, Q, C, 0, none},
        {p->attprojw, p->attprojb, forward->attprojw, backward->attprojw, C, out, 0, none},
        {p->mixw, NULL, forward->mixw, backward->mixw, model_mixer_rows(cfg), C, 0, none},
        {p->mixzw, NULL, forward->mixzw, backward->mixzw, values, C, 0, none},
        {p->mixbaw, NULL, forward->mixbaw, backward->mixbaw, 2 * cfg.mixer.value_heads, C, 0, none},
        {p->mixoutw, NULL, forward->mixoutw, backward->mixoutw, C, values, 0, none},
        {p->routerw, p->routerwb, NULL, NULL, cfg.E, C, 0, none},
        has_experts ? efc : fc,
        has_experts ? efcproj : fcproj,
        {p->sfcw, NULL, forward->sfcw, backward->sfcw, gates * Fs, C, 1, none},
        {p->sfcprojw, NULL, forward->sfcprojw, backward->sfcprojw, C, Fs, 1, none},
        wte,
        cfg.has_head ? head : wte,
    };
    return weights;
}

#endif
