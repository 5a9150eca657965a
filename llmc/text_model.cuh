/*
text_model.cuh -- text_model.h on the GPU. Weights and activations are floatX, matrices also blocks of 8 bits.

A step of all texts is always the same work: from the second one on, it is one CUDA graph.

defines: TextModelGpu, TextQueue, TextLinear, text_model_expanded_bytes, text_model_open, text_model_close,
         text_model_read, text_model_next,
         text_model_planned_bytes, text_model_host_bytes
*/
#ifndef LLMC_TEXT_MODEL_CUH
#define LLMC_TEXT_MODEL_CUH

#include <assert.h>
#include <string.h>

#include "llmc/precision.cuh"

#include "llmc/attention.cuh"
#include "llmc/encoder.cuh"
#include "llmc/gelu.cuh"
#include "llmc/gpt2.h"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/quantized.cuh"
#include "llmc/text_rows.h"
#include "llmc/zero.cuh"

// Tokens on their way to the GPU, and logits on their way back.
typedef struct {
    int capacity;          // tokens
    int *pinned, *tokens;  // (2, capacity) tokens and their positions, on the host; on the GPU
    floatX* logits_pinned; // (texts, Vp) as they are on the GPU,
    float* logits;         // and as fp32
    int steps; // so far: the first one is not captured, since it chooses algorithms and loads kernels
    cudaGraphExec_t step; // of all texts
} TextQueue;

typedef struct {
    // Of the caller, who sets them before text_model_open and keeps what they point to.
    GPT2Config cfg;
    int texts, T; // at a time; tokens of each at most
    int is_quantized;
    int use_graph;
    GPT2Parameters params;
    const TensorRow* parameter_rows;
    ZeroGpu* zero;
    MatmulGpu* matmul;
    AttentionGpu* attention;
    const Gpu* gpu;

    TensorRow rows[GPT2_ACTIVATION_ROWS];
    GPT2Activations acts;
    floatX* expanded; // if matrices are in 8 bits: room for one as floatX; else NULL
    TextQueue queue;
} TextModelGpu;

typedef struct {
    const floatX *weight, *bias; // (OC, C), or its blocks; (OC), or NULL
    int C, OC;
} TextLinear;

// Of the largest matrix of a block.
static inline size_t text_model_expanded_bytes(GPT2Config cfg) {
    return (size_t)gpt2_hidden(cfg) * cfg.C * sizeof(floatX);
}

static inline size_t text_queue_tokens_(int texts, int T) { return 2 * (size_t)(T > texts ? T : texts); }

// What text_model_open allocates on the GPU, and on the host.
static inline size_t text_model_planned_bytes(GPT2Config cfg, int texts, int T, int is_quantized) {
    return text_queue_tokens_(texts, T) * sizeof(int) + (is_quantized ? text_model_expanded_bytes(cfg) : 0);
}
static inline size_t text_model_host_bytes(GPT2Config cfg, int texts, int T) {
    return text_queue_tokens_(texts, T) * sizeof(int) +
           (size_t)texts * cfg.Vp * (sizeof(floatX) + sizeof(float));
}

static inline void text_queue_open_(TextQueue* queue, GPT2Config cfg, int texts, int T) {
    const size_t logits = (size_t)texts * cfg.Vp;
    queue->capacity = T > texts ? T : texts;
    queue->tokens = (int*)gpu_alloc(2 * (size_t)queue->capacity, sizeof(int), "tokens of texts");
    queue->pinned = (int*)gpu_alloc_pinned(2 * (size_t)queue->capacity, sizeof(int), "tokens of texts");
    queue->logits_pinned = (floatX*)gpu_alloc_pinned(logits, sizeof(floatX), "logits of texts");
    queue->logits = (float*)check_alloc(logits, sizeof(float), "logits of texts");
    queue->steps = 0;
    queue->step = NULL;
}

static inline void text_queue_close_(TextQueue* queue) {
    if (queue->step) {
        CUDA_CHECK(cudaGraphExecDestroy(queue->step));
    }
    free(queue->logits);
    gpu_free_pinned(queue->logits_pinned);
    gpu_free_pinned(queue->pinned);
    gpu_free(queue->tokens);
}

// `memory`, on the GPU, has room for text_activation_rows. Between two steps training needs none of it.
static inline void text_model_open(TextModelGpu* model, void* memory) {
    text_activation_rows(model->rows, model->cfg, model->texts, model->T);
    tensor_rows_bind(&model->acts, model->rows, GPT2_ACTIVATION_ROWS, memory);
    model->expanded = NULL;
    if (model->is_quantized) {
        model->expanded = (floatX*)gpu_alloc(text_model_expanded_bytes(model->cfg), 1, "expanded matrix");
    }
    text_queue_open_(&model->queue, model->cfg, model->texts, model->T);
}

static inline void text_model_close(TextModelGpu* model) {
    text_queue_close_(&model->queue);
    gpu_free(model->expanded);
}

static inline QuantizedGpu text_blocks_(TextLinear layer) {
    return quantized_gpu_bind(layer.weight, (size_t)layer.OC * layer.C);
}

// Sets out (N, OC) = add + inp weight^T + bias; add (N, OC) may be NULL. Few rows read blocks as they are; for more, the
// usual product reads them expanded.
static inline void text_linear_(TextModelGpu* model, floatX* out, const floatX* add, const floatX* inp,
                                TextLinear layer, int N) {
    const int C = layer.C, OC = layer.OC;
    const floatX* weight = layer.weight;
    if (model->is_quantized && N <= QUANTIZED_ROWS) {
        quantized_matmul(out, add, inp, text_blocks_(layer), layer.bias, N, C, OC, model->gpu);
        return;
    }
    if (model->is_quantized) {
        quantized_expand(model->expanded, text_blocks_(layer), (size_t)OC * C, model->gpu);
        weight = model->expanded;
    }
    if (add) {
        matmul_forward_residual(out, add, inp, weight, layer.bias, N, C, OC, model->matmul);
    } else {
        matmul_forward(out, inp, weight, layer.bias, N, C, OC, model->matmul);
    }
}

// The same, and GELU.
static inline void text_linear_gelu_(TextModelGpu* model, floatX* out, floatX* pre, const floatX* inp,
                                     TextLinear layer, int N) {
    if (model->is_quantized) {
        text_linear_(model, pre, NULL, inp, layer, N);
        gelu_forward(out, pre, (size_t)N * layer.OC, model->gpu);
    } else {
        matmul_forward_gelu(out, pre, inp, layer.weight, layer.bias, N, layer.C, layer.OC, model->matmul);
    }
}

// Sets encoded (N, C).
static inline void text_encode_(TextModelGpu* model, TextRows rows) {
    const GPT2Parameters p = model->params;
    const int C = model->cfg.C;
    const EncoderPositions positions = {rows.positions, NULL};
    floatX* encoded = model->acts.encoded;
    if (model->is_quantized) {
        const QuantizedGpu wte = quantized_gpu_bind(p.wte, (size_t)model->cfg.Vp * C);
        quantized_encoder(encoded, rows.ids, wte, p.wpe, rows.count, positions, C, model->gpu);
    } else {
        encoder_forward(encoded, rows.ids, p.wte, p.wpe, 1, rows.count, positions, C, model->gpu);
    }
}

// Sets the logits (count, Vp) of rows of lnf. Blocks of wte are never expanded: it is larger than what is to be saved.
static inline void text_classify_(TextModelGpu* model, const floatX* lnf, int count) {
    const int C = model->cfg.C, Vp = model->cfg.Vp, most = model->is_quantized ? QUANTIZED_ROWS : count;
    const TextLinear layer = {model->params.wte, NULL, C, Vp};
    for (int n = 0; n < count; n += most) {
        const int rows = count - n < most ? count - n : most;
        text_linear_(model, model->acts.logits + (size_t)n * Vp, NULL, lnf + (size_t)n * C, layer, rows);
    }
}

// Stores the keys and values in qkv, and sets atty.
static inline void text_attention_(TextModelGpu* model, TextRows rows, floatX* kv) {
    const GPT2Activations a = model->acts;
    const int C = model->cfg.C, NH = model->cfg.NH;
    const AttentionCacheGpu<floatX> cache = {kv, model->T, C, NH};
    attention_cache_store(cache, a.qkv, rows.positions, rows.text, rows.count, model->gpu);
    if (rows.positions) {
        attention_cached(a.atty, a.qkv, rows.positions, rows.count, cache, model->gpu);
    } else {
        attention_forward(a.atty, a.att_lse, a.qkv, (const int*)NULL, 1, rows.count, C, NH, model->attention,
                          model->gpu);
    }
}

// Block l: turns `residual` (N, C) into that after the block, residual3. They may be the same.
static inline void text_block_(TextModelGpu* model, int l, TextRows rows, const floatX* residual) {
    const Gpu* gpu = model->gpu;
    const int N = rows.count, C = model->cfg.C, F = gpt2_hidden(model->cfg), QKV = gpt2_qkv_size(model->cfg);
    const GPT2Parameters p =
        gpt2_parameters_at_copy(model->params, model->parameter_rows,
                                zero_parameter_block(&model->zero->plan, gpt2_copy(model->cfg, l)));
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->rows, l);
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, gpu);
    text_linear_(model, a.qkv, NULL, a.ln1, TextLinear{p.qkvw, p.qkvb, C, QKV}, N);
    text_attention_(model, rows, a.kv);
    text_linear_(model, a.residual2, residual, a.atty, TextLinear{p.attprojw, p.attprojb, C, C}, N);
    layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, gpu);
    text_linear_gelu_(model, a.fch_gelu, a.fch, a.ln2, TextLinear{p.fcw, p.fcb, C, F}, N);
    text_linear_(model, a.residual3, a.residual2, a.fch_gelu, TextLinear{p.fcprojw, p.fcprojb, F, C}, N);
}

// Sets the logits (count, Vp) that follow the last `count` rows.
static inline void text_forward_(TextModelGpu* model, TextRows rows, int count) {
    const GPT2Config cfg = model->cfg;
    const GPT2Activations a = model->acts;
    model->matmul->settings.autotune = 0; // so that the bits are the same in each run
    zero_begin_forward(model->zero);
    text_encode_(model, rows);
    for (int l = 0; l < cfg.L; l++) {
        zero_parameters(model->zero, gpt2_copy(cfg, l), 1);
        text_block_(model, l, rows, l == 0 ? a.encoded : a.residual3);
    }
    layernorm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, a.residual3, model->params.lnfw, model->params.lnfb,
                      rows.count, cfg.C, model->gpu);
    text_classify_(model, a.lnf + (size_t)(rows.count - count) * cfg.C, count);
}

// All work of one call: the ints on the host to the GPU, and `count` rows of logits back.
static inline void text_work_(TextModelGpu* model, TextRows rows, int count) {
    TextQueue* queue = &model->queue;
    const cudaStream_t stream = model->gpu->stream;
    CUDA_CHECK(cudaMemcpyAsync(queue->tokens, queue->pinned, 2 * (size_t)queue->capacity * sizeof(int),
                               cudaMemcpyHostToDevice, stream));
    text_forward_(model, rows, count);
    CUDA_CHECK(cudaMemcpyAsync(queue->logits_pinned, model->acts.logits,
                               (size_t)count * model->cfg.Vp * sizeof(floatX), cudaMemcpyDeviceToHost,
                               stream));
}

// The same as a graph.
static inline void text_replay_(TextModelGpu* model, TextRows rows, int count) {
    TextQueue* queue = &model->queue;
    const cudaStream_t stream = model->gpu->stream;
    if (!queue->step) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        text_work_(model, rows, count);
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&queue->step, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch(queue->step, stream));
}

// Waits for the GPU.
static inline const float* text_logits_(TextModelGpu* model, int count) {
    TextQueue* queue = &model->queue;
    CUDA_CHECK(cudaStreamSynchronize(model->gpu->stream));
    for (size_t i = 0; i < (size_t)count * model->cfg.Vp; i++) {
        queue->logits[i] = to_float(queue->logits_pinned[i]);
    }
    return queue->logits;
}

static inline const float* text_model_read(TextModelGpu* model, int text, const int* ids, int count) {
    TextQueue* queue = &model->queue;
    const TextRows rows = {queue->tokens, count, text, NULL};
    assert(count <= queue->capacity && text < model->texts);
    memcpy(queue->pinned, ids, (size_t)count * sizeof(int));
    text_work_(model, rows, 1);
    return text_logits_(model, 1);
}

static inline const float* text_model_next(TextModelGpu* model, const int* ids, const int* positions,
                                           int texts) {
    TextQueue* queue = &model->queue;
    const TextRows rows = {queue->tokens, texts, 0, queue->tokens + queue->capacity};
    assert(texts == model->texts);
    memcpy(queue->pinned, ids, (size_t)texts * sizeof(int));
    memcpy(queue->pinned + queue->capacity, positions, (size_t)texts * sizeof(int));
    if (!model->use_graph || queue->steps++ == 0) {
        text_work_(model, rows, texts);
    } else {
        text_replay_(model, rows, texts);
    }
    return text_logits_(model, texts);
}

#endif
