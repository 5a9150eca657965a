/*
decode.h -- a model that generates: the forward pass over rows of several sequences, on the CPU.

    decoder_prefill    forgets sequence number `sequence` and reads `count` <= T tokens of a new one
    decoder_step    reads one more token of each sequence, ids[i] at positions[i]

Both return the logits that follow what they read, (1, Vp) or (sequences, Vp) in fp32, valid until the next call. The
logits of a sequence depend on its own tokens alone, bit for bit.
*/
#ifndef LLMC_DECODE_H
#define LLMC_DECODE_H

#include "llmc/ops/attention.h"
#include "llmc/bf16/attention_bf16.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/activation.h"
#include "llmc/model/model.h"
#include "llmc/ops/norm.h"
#include "llmc/layers/linear.h"
#include "llmc/layers/text_rows.h"

typedef struct {
    // Of the caller, who sets them before decoder_open_cpu and keeps what they point to.
    ModelConfig cfg;
    int sequences, T; // at a time; tokens of each at most
    ModelParameters params;
    const TensorRow* parameter_rows;
    Linear* linear;
    Attention* attention;

    TensorRow rows[MODEL_ACTIVATION_ROWS];
    ModelActivations acts;
} Decoder;

// `memory` has room for decoder_activation_rows. Between two steps training needs none of it.
static inline void decoder_open_cpu(Decoder* model, void* memory) {
    decoder_activation_rows(model->rows, model->cfg, model->sequences, model->T);
    tensor_rows_bind(&model->acts, model->rows, MODEL_ACTIVATION_ROWS, memory);
}

// All that reads the weights of a block.
static inline void decoder_linear_(Decoder* model, SequenceRows rows, float* out, const float* inp,
                                   const float* weight, const float* bias, int C, int OC) {
    (rows.positions ? linear_few_cpu : linear_forward_cpu)(out, inp, weight, bias, rows.count, C, OC,
                                                           model->linear);
}

// Stores the keys and values in qkv, and sets atty.
static inline void decoder_attention_(Decoder* model, SequenceRows rows, float* kv) {
    const ModelActivations a = model->acts;
    const int C = model->cfg.C, NH = model->cfg.NH;
    const AttentionCache cache = {kv, model->T, C, NH};
    if (rows.positions) {
        for (int r = 0; r < rows.count; r++) {
            attention_cache_store_cpu(cache, a.qkv + (size_t)r * 3 * C, r, rows.positions[r], 1);
        }
        attention_cached_cpu(a.atty, a.qkv, rows.positions, rows.count, cache, &model->attention->fp32);
    } else {
        const AttentionSizes sizes = {1, rows.count, C, NH};
        attention_cache_store_cpu(cache, a.qkv, rows.sequence, 0, rows.count);
        attention_either_forward_cpu(a.atty, a.att_lse, a.qkv, NULL, sizes, model->attention);
    }
}

// Block l: turns `residual` (N, C) into that after the block, residual3. They may be the same.
static inline void decoder_block_(Decoder* model, int l, SequenceRows rows, const float* residual) {
    const int N = rows.count, C = model->cfg.C, F = model_hidden(model->cfg),
              QKV = model_qkv_size(model->cfg);
    const ModelParameters p = model_parameters_at_layer(model->params, model->parameter_rows, l);
    const ModelActivations a = model_activations_at_layer(model->acts, model->rows, l);
    layernorm_forward_cpu(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C);
    decoder_linear_(model, rows, a.qkv, a.ln1, p.qkvw, p.qkvb, C, QKV);
    decoder_attention_(model, rows, a.kv);
    decoder_linear_(model, rows, a.branch, a.atty, p.attprojw, p.attprojb, C, C);
    residual_layernorm_forward_cpu(a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual, a.branch, p.ln2w,
                                   p.ln2b, N, C);
    decoder_linear_(model, rows, a.fch, a.ln2, p.fcw, p.fcb, C, F);
    gelu_forward_cpu(a.fch_gelu, a.fch, (size_t)N * F);
    decoder_linear_(model, rows, a.branch, a.fch_gelu, p.fcprojw, p.fcprojb, F, C);
    residual_forward_cpu(a.residual3, a.residual2, a.branch, (size_t)N * C);
}

// Sets lnf (N, C).
static inline void decoder_forward_(Decoder* model, SequenceRows rows) {
    const ModelActivations a = model->acts;
    const EmbeddingPositions positions = {rows.positions, NULL};
    const int C = model->cfg.C;
    linear_embedding_cpu(a.encoded, rows.ids, model->params, 1, rows.count, positions, C, model->linear);
    for (int l = 0; l < model->cfg.L; l++) {
        decoder_block_(model, l, rows, l == 0 ? a.encoded : a.residual3);
    }
    layernorm_forward_cpu(a.lnf, a.lnf_mean, a.lnf_rstd, a.residual3, model->params.lnfw, model->params.lnfb,
                          rows.count, C);
}

// The logits (count, Vp) that follow `count` rows of lnf, the first of them `first`.
static inline const float* decoder_logits_(Decoder* model, int first, int count) {
    const int C = model->cfg.C;
    linear_few_cpu(model->acts.logits, model->acts.lnf + (size_t)first * C, model->params.wte, NULL, count, C,
                   model->cfg.Vp, model->linear);
    return model->acts.logits;
}

static inline const float* decoder_prefill_cpu(Decoder* model, int sequence, const int* ids, int count) {
    const SequenceRows rows = {ids, count, sequence, NULL};
    decoder_forward_(model, rows);
    return decoder_logits_(model, count - 1, 1);
}

static inline const float* decoder_step_cpu(Decoder* model, const int* ids, const int* positions,
                                            int sequences) {
    const SequenceRows rows = {ids, sequences, 0, positions};
    decoder_forward_(model, rows);
    return decoder_logits_(model, 0, sequences);
}

#endif
