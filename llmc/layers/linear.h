/*
linear.h -- the layers that read a model's matrices (weight.h), on the CPU: floats, or with
--quantize blocks of 8 bits; with --matmul bf16 the copies that bf16_weights.h keeps. With --matmul
fp8, and only in micro-steps of training, qkv, fc and fcproj are multiplied in fp8.

    out[n][o]  = sum_c inp[n][c] weight[o][c] + bias[o]
    encoded[n] = wte[tokens[n]] + wpe[position of n]; some models normalize it, or have a factor

    out      (N, OC)     inp      (N, C)     weight   (OC, C)     bias   (OC), may be NULL
    encoded  (B*T, C)    tokens   (B*T)      wte      (Vp, C)     wpe    (maxT, C)

The forward pass sets its output. For the few rows of a step of decoding it only waits for the
weights: then `few` is set, and matvec.h reads them fastest. After a change of the matrices,
linear_pack makes their copies again.
*/
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H

#include "llmc/base/memory.h"
#include "llmc/ops/adapter.h"
#include "llmc/ops/embedding.h"
#include "llmc/model/model.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/matmul.h"
#include "llmc/ops/matmul_fp8.h"
#include "llmc/ops/norm.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/bf16/matvec.h"
#include "llmc/layers/bf16_weights.h"
#include "llmc/ops/q8.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/layers/pass.h"
#include "llmc/layers/weight.h"
#include "llmc/parallel/tensor_parallel.h"

typedef struct {
    int is_quantized; // matrices are blocks
    int is_bf16;      // matmuls read copies of matrices
    int few;          // inputs have few rows
    int has_fp8;      // --matmul fp8
    int in_fp8;       // now: in passes of training
    MatmulScratch matmul;
    QuantizedScratch quantized; // if they are
    MatmulBf16Scratch bf16;     // if they do
    Bf16Weights packed;
    MatmulFp8Scratch fp8;   // with --matmul fp8
    AdapterScratch adapter; // if the model has one
    // blocks under an adapter: room for some rows of a matrix in fp32; NULL: none
    float* panel;
} Linear;

enum { LINEAR_PANEL_FLOATS = 1 << 21 }; // of such rows, 8 MiB

// A layer in a pass: its sizes, parameters, activations and matrices.
typedef struct {
    ModelConfig cfg; // of the part that this rank has
    int l;
    const Pass* pass;
    ModelParameters p;
    ModelActivations a;
    LayerWeights weights;
    TensorParallel tensor;
    Linear* linear;
} LayerPass;

// Return the depth of the layer in the whole model; and the dropout of a tensor of the stream.
static inline int layer_depth(const LayerPass* layer) { return layer->cfg.part.first_layer + layer->l; }
static inline Dropout layer_dropout(const LayerPass* layer, uint32_t place) {
    return pass_dropout(layer->pass, layer->cfg.dropout, place, tensor_rows(layer->tensor.cut).first);
}

// Returns a norm of the layer's residual stream, of the R rows that this rank has.
static inline Norm layer_norm(const LayerPass* layer, const float* weight, const float* bias, float* mean,
                              float* rstd) {
    const ModelConfig cfg = layer->cfg;
    return (Norm){model_norm(cfg),
                  model_norm_eps(cfg),
                  1,
                  weight,
                  bias,
                  mean,
                  rstd,
                  tensor_rows(layer->tensor.cut).count,
                  cfg.C};
}

// Returns the norm before the classifier, given any layer in the pass. It also divides the logits.
static inline Norm layer_last_norm(const LayerPass* layer) {
    const ModelActivations* a = &layer->a;
    Norm norm = layer_norm(layer, layer->p.lnfw, layer->p.lnfb, a->lnf_mean, a->lnf_rstd);
    norm.factor = model_logits_factor(layer->cfg);
    return norm;
}

// Opens matmuls for inputs of up to N rows and C columns.
static inline void linear_open(Linear* linear, Memory* memory, int is_quantized, size_t N, size_t C) {
    linear->is_quantized = is_quantized;
    linear->is_bf16 = linear->few = linear->has_fp8 = linear->in_fp8 = 0;
    linear->packed.kinds = 0;
    linear->panel = NULL;
    matmul_open(&linear->matmul, memory);
    if (is_quantized) {
        quantized_open(&linear->quantized, memory, N, C);
    }
}

// Switches to matmuls in bf16: keeps `kinds` of copies (bf16_weights.h) of the fp32 matrices, laid
// out by `rows`.
static inline void linear_open_bf16(Linear* linear, Memory* memory, const TensorRow* rows, void* params,
                                    int kinds) {
    linear->is_bf16 = 1;
    matmul_bf16_open(&linear->bf16, memory, bf16_kernel());
    bf16_weights_open(&linear->packed, memory, rows, params, kinds, linear->bf16.kernel.pack_away);
}

// Opens matmuls in fp8 for inputs of up to N rows.
static inline void linear_open_fp8(Linear* linear, Memory* memory, ModelConfig cfg, size_t N) {
    const size_t matrix = model_largest_matrix(cfg), rows = matrix / (size_t)cfg.C;
    linear->has_fp8 = 1;
    matmul_fp8_open(&linear->fp8, memory, N * (rows > (size_t)cfg.C ? rows : (size_t)cfg.C), matrix);
}

// Opens the products of the model's adapter, if it has one, for inputs of up to N rows.
static inline void linear_open_adapter(Linear* linear, Memory* memory, ModelConfig cfg, size_t N) {
    const size_t most = model_adapter_rows(cfg);
    if (most > 0) {
        adapter_open(&linear->adapter, memory, &linear->matmul, N, most, model_adapter_widest(cfg));
    }
    if (most > 0 && linear->is_quantized) {
        linear->panel = (float*)memory_take(memory, "scratch: rows of matrices", MEMORY_DEVICE,
                                            LINEAR_PANEL_FLOATS * sizeof(float));
    }
}

// Say that the passes up to linear_trained belong to a micro-step of training.
static inline void linear_trains(Linear* linear) { linear->in_fp8 = linear->has_fp8; }
static inline void linear_trained(Linear* linear) { linear->in_fp8 = 0; }

// Makes the copies again, after a change of the matrices.
static inline void linear_pack(Linear* linear) {
    if (linear->is_bf16) {
        bf16_weights_pack(&linear->packed);
    }
}

// Returns true if a parameter, given by its row in the table, has copies.
static inline int linear_packs(const Linear* linear, int row) {
    return linear->is_bf16 && bf16_weights_has(&linear->packed, row);
}

// Names the gradients of a layer's adapters, `d`, which a backward pass sets or adds to as `mode`
// says.
static inline void linear_adapter_gradients(LayerWeights* w, const ModelParameters* d, GradientMode mode) {
    const AdapterGradient all[ADAPT_MATRICES] = {{d->qkvw_a, d->qkvw_b},
                                                 {d->attprojw_a, d->attprojw_b},
                                                 {d->fcw_a, d->fcw_b},
                                                 {d->fcprojw_a, d->fcprojw_b}};
    layer_adapter_gradients(w, all, mode);
}

// Returns the matrices of layer l, whose parameters are `p`, with their copies. If several ranks
// cut them, the sum of their parts adds the biases into the stream (tensor_parallel.h).
static inline LayerWeights linear_weights(const Linear* linear, ModelConfig cfg, const ModelParameters* p,
                                          int l) {
    const PackedParameters forward = bf16_weights_at_layer(&linear->packed, l, PACKED_FORWARD),
                           backward = bf16_weights_at_layer(&linear->packed, l, PACKED_BACKWARD);
    LayerWeights w = layer_weights(cfg, model_layer_has(cfg, LAYERS_EXPERTS, l), p, &forward, &backward);
    w.attproj.bias = model_is_cut(cfg) ? NULL : w.attproj.bias;
    w.fcproj.bias = model_is_cut(cfg) ? NULL : w.fcproj.bias;
    return w;
}

static inline const QuantizedBlock* linear_blocks_(const Weight* weight) {
    return (const QuantizedBlock*)(const void*)weight->data;
}

// Returns the matrix of expert e, given expert 0's, in all its forms.
static inline Weight linear_expert(const Linear* linear, const Weight* w, int e) {
    Weight expert = weight_of_expert(w, e);
    if (linear->is_quantized) {
        const size_t blocks = (size_t)e * (size_t)w->OC * (size_t)(w->C / QUANTIZED_BLOCK);
        expert.data = (const float*)(const void*)(linear_blocks_(w) + blocks);
    }
    expert.forward = w->forward ? w->forward + (size_t)e * matmul_bf16_pairs(w->OC, w->C) : NULL;
    expert.backward = w->backward ? w->backward + (size_t)e * matmul_bf16_pairs(w->C, w->OC) : NULL;
    return expert;
}

// Returns rows of a matrix that fit into the panel.
static inline int linear_panel_rows_(const Weight* w) {
    return int_min(w->OC, int_max(1, LINEAR_PANEL_FLOATS / w->C));
}

// Sets the panel to `rows` rows of a matrix in blocks, from row o on.
static inline void linear_expand_(const Weight* w, int o, int rows, Linear* linear) {
    const size_t C = (size_t)w->C, blocks = C / QUANTIZED_BLOCK;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < rows; i++) {
        quantized_decode(linear->panel + (size_t)i * C, linear_blocks_(w) + (size_t)(o + i) * blocks, C);
    }
}

// Sets out from a matrix in blocks as numbers, without rounding inp: an adapter trains beside it.
static inline void linear_forward_panels_(float* out, const float* inp, const Weight* w, int N,
                                          Linear* linear) {
    const int rows = linear_panel_rows_(w);
    for (int o = 0; o < w->OC; o += rows) {
        const int some = int_min(rows, w->OC - o);
        linear_expand_(w, o, some, linear);
        matmul_forward_columns_cpu(out + o, (size_t)w->OC, inp, linear->panel, w->bias ? w->bias + o : NULL,
                                   (MatmulSizes){N, w->C, some}, &linear->matmul);
    }
}

static inline void linear_backward_panels_(float* dinp, const float* dout, const Weight* w, int N,
                                           Linear* linear) {
    const int rows = linear_panel_rows_(w);
    for (int o = 0; o < w->OC; o += rows) {
        const int some = int_min(rows, w->OC - o);
        linear_expand_(w, o, some, linear);
        matmul_backward_columns_cpu(dinp, dout + o, (size_t)w->OC, linear->panel,
                                    (MatmulSizes){N, w->C, some}, o == 0 ? GRADIENT_SET : GRADIENT_ADD,
                                    &linear->matmul);
    }
}

static inline void linear_forward_base_(float* out, const float* inp, const Weight* w, int N,
                                        Linear* linear) {
    const MatmulSizes sizes = {N, w->C, w->OC};
    if (linear->in_fp8 && w->in_fp8) {
        matmul_fp8_forward_cpu(out, inp, w->data, w->bias, sizes, &linear->fp8, &linear->matmul);
    } else if (linear->panel && !linear->few) {
        linear_forward_panels_(out, inp, w, N, linear);
    } else if (linear->is_quantized) {
        q8_matmul_cpu(out, inp, linear_blocks_(w), w->bias, sizes, &linear->quantized);
    } else if (linear->is_bf16 && linear->few) {
        matvec_bf16_forward_cpu(out, inp, w->forward, w->bias, sizes);
    } else if (linear->is_bf16) {
        matmul_bf16_forward_cpu(out, inp, w->forward, w->bias, sizes, &linear->bf16);
    } else if (linear->few) {
        matvec_forward_cpu(out, inp, w->data, w->bias, sizes);
    } else {
        matmul_forward_cpu(out, inp, w->data, w->bias, sizes, &linear->matmul);
    }
}

static inline void linear_forward_cpu(float* out, const float* inp, const Weight* w, int N, Linear* linear) {
    const WeightAdapter* x = &w->adapter;
    linear_forward_base_(out, inp, w, N, linear);
    if (weight_has_adapter(x)) {
        adapter_forward_cpu(out, inp, x->a, x->b, x->shape, (MatmulSizes){N, w->C, w->OC}, &linear->adapter);
    }
}

// Gradients of parameters: (OC, C) and (OC), each or NULL, set or added to as `mode` says.
typedef struct {
    float *dweight, *dbias;
    GradientMode mode;
} LinearGradients;

static inline void linear_backward_weight_(LinearGradients d, const float* dout, const float* inp,
                                           const Weight* w, int N, Linear* linear) {
    const MatmulSizes sizes = {N, w->C, w->OC};
    if (d.dweight && linear->is_bf16) { // reads dout once for both
        matmul_bf16_backward_weight_cpu(d.dweight, d.dbias, dout, inp, sizes, d.mode, &linear->bf16);
        return;
    }
    if (d.dweight) {
        matmul_backward_weight_cpu(d.dweight, dout, inp, sizes, d.mode, &linear->matmul);
    }
    if (d.dbias) {
        matmul_backward_bias_cpu(d.dbias, dout, N, w->OC, d.mode);
    }
}

// Sets or adds to the gradients of the matrix's adapter.
static inline void linear_backward_adapter_(const float* dout, const float* inp, const Weight* w, int N,
                                            Linear* linear) {
    const WeightAdapter* x = &w->adapter;
    if (weight_has_adapter(x)) {
        adapter_backward_weights_cpu((float*)x->da, (float*)x->db, dout, inp, x->a, x->b, x->shape,
                                     (MatmulSizes){N, w->C, w->OC}, x->mode, &linear->adapter);
    }
}

// Sets dinp (N, C), which may be inp, and the gradients of parameters and of the adapter.
static inline void linear_backward_cpu(float* dinp, LinearGradients d, const float* dout, const float* inp,
                                       const Weight* w, int N, Linear* linear) {
    const MatmulSizes sizes = {N, w->C, w->OC};
    linear_backward_weight_(d, dout, inp, w, N, linear);
    linear_backward_adapter_(dout, inp, w, N, linear);
    if (linear->in_fp8 && w->in_fp8) {
        matmul_fp8_backward_input_cpu(dinp, dout, w->data, sizes, &linear->fp8, &linear->matmul);
    } else if (linear->panel) {
        linear_backward_panels_(dinp, dout, w, N, linear);
    } else if (linear->is_bf16) {
        matmul_bf16_backward_input_cpu(dinp, dout, w->backward, sizes, &linear->bf16);
    } else {
        matmul_backward_input_cpu(dinp, dout, w->data, sizes, &linear->matmul);
    }
    if (weight_has_adapter(&w->adapter)) {
        adapter_backward_input_cpu(dinp, w->adapter.a, w->adapter.shape, sizes, &linear->adapter);
    }
}

static inline void linear_embed_(float* encoded, const int* tokens, const Weight* wte, const float* wpe,
                                 EmbeddingBatch batch, const Linear* linear) {
    if (linear->is_quantized) {
        q8_embedding_cpu(encoded, tokens, linear_blocks_(wte), wpe, batch);
    } else {
        embedding_forward_cpu(encoded, tokens, wte->data, wpe, batch);
    }
}

// Sets encoded (R, C), if tensor ranks cut wte. A rank's part is zero for tokens whose rows other
// ranks have.
static inline void linear_embedding_cut_(const LayerPass* layer) {
    const Pass* pass = layer->pass;
    const Weight* wte = &layer->weights.wte;
    const EmbeddingWords words = {layer->tensor.cut.rank * wte->OC, wte->OC};
    const TensorTokens rows = tensor_rows(layer->tensor.cut);
    linear_embed_(layer->tensor.parts, pass->inputs, wte, NULL,
                  embedding_slice(pass_tokens(pass), wte->C, words), layer->linear);
    tensor_sum_cpu(&layer->tensor, layer->a.encoded, NULL);
    if (layer->p.wpe) {
        embedding_positions_cpu(layer->a.encoded, layer->p.wpe, rows.first, rows.count, pass->T,
                                pass->positions, wte->C);
    }
}

// Sets encoded (R, C) from the embeddings of tokens and of positions. Collective.
static inline void linear_embedding_sum_(const LayerPass* layer) {
    const Pass* pass = layer->pass;
    const ModelActivations* a = &layer->a;
    if (tensor_is_cut(layer->tensor.cut)) {
        linear_embedding_cut_(layer);
    } else {
        linear_embed_(a->encoded, pass->inputs, &layer->weights.wte, layer->p.wpe,
                      embedding_batch(pass->B, pass->T, layer->cfg.C, pass->positions), layer->linear);
    }
    const int R = tensor_rows(layer->tensor.cut).count, C = layer->cfg.C;
    const float factor = model_embedding_factor(layer->cfg);
    if (a->encoded_rstd) {
        norm_unit_forward_cpu(a->encoded, a->encoded_rstd, R, C, model_norm_eps(layer->cfg));
    }
    if (factor != 1) {
        residual_scale_cpu(a->encoded, a->encoded, factor, (size_t)R * (size_t)C);
    }
}

// Applies dropout to x (R, C), encoded or its gradient, in place.
static inline void linear_embedding_dropout_(float* x, const LayerPass* layer) {
    const Dropout dropout = layer_dropout(layer, dropout_of_embedding());
    if (dropout_is_on(&dropout)) {
        dropout_cpu(x, x, &dropout, 1, tensor_rows(layer->tensor.cut).count, layer->cfg.C);
    }
}

// Sets encoded (R, C), the residual stream that enters the first block. Collective.
static inline void linear_embedding_cpu(const LayerPass* layer) {
    linear_embedding_sum_(layer);
    linear_embedding_dropout_(layer->a.encoded, layer);
}

// Turns dencoded (R, C), the gradient of encoded, into that of the sum of embeddings, in place. A
// norm needs encoded without dropout: it is set again. Collective.
static inline void linear_embedding_backward_cpu(float* dencoded, const LayerPass* layer) {
    const ModelActivations* a = &layer->a;
    const int R = tensor_rows(layer->tensor.cut).count, C = layer->cfg.C;
    const float factor = model_embedding_factor(layer->cfg);
    linear_embedding_dropout_(dencoded, layer);
    if (a->encoded_rstd && layer->pass->dropout && layer->cfg.dropout > 0) {
        linear_embedding_sum_(layer);
    }
    if (a->encoded_rstd) {
        norm_unit_backward_cpu(dencoded, a->encoded, a->encoded_rstd, R, C);
    }
    if (factor != 1) {
        residual_scale_cpu(dencoded, dencoded, factor, (size_t)R * (size_t)C);
    }
}

#endif
