/*
decode.cuh -- decode.h on the GPU. Weights and activations are floatX, matrices also blocks of 8 bits.

A step of all sequences is always the same work: from the second one on, it is one CUDA graph.
*/
#ifndef LLMC_DECODE_CUH
#define LLMC_DECODE_CUH

#include <assert.h>
#include <string.h>

#include "llmc/gpu/floatx.cuh"

#include "llmc/ops/attention.cuh"
#include "llmc/ops/embedding.h"
#include "llmc/model/model.h"
#include "llmc/ops/norm.cuh"
#include "llmc/layers/linear.cuh"
#include "llmc/gpu/graph.cuh"
#include "llmc/layers/text_rows.h"
#include "llmc/parallel/zero.cuh"

// Tokens on their way to the GPU, and logits on their way back.
typedef struct {
    int capacity;          // tokens
    int *pinned, *tokens;  // (2, capacity) tokens and their positions, on the host; on the GPU
    floatX* logits_pinned; // (sequences, Vp) as they are on the GPU,
    float* logits;         // and as fp32
    int steps; // so far: the first one is not captured, since it chooses algorithms and loads kernels
    cudaGraphExec_t step; // of all sequences
} DecoderQueue;

typedef struct {
    // Of the caller, who sets them before decoder_open and keeps what they point to.
    ModelConfig cfg;
    int sequences, T; // at a time; tokens of each at most
    int use_graph;
    ModelParameters params;
    const TensorRow* parameter_rows;
    ZeroGpu* zero;
    LinearGpu* linear;
    AttentionGpu* attention;
    const Gpu* gpu;

    TensorRow rows[MODEL_ACTIVATION_ROWS];
    ModelActivations acts;
    DecoderQueue queue;
} DecoderGpu;

static inline size_t decoder_queue_tokens_(int sequences, int T) {
    return 2 * (size_t)(T > sequences ? T : sequences);
}

// What decoder_open allocates on the GPU, and on the host.
static inline size_t decoder_planned_bytes(int sequences, int T) {
    return decoder_queue_tokens_(sequences, T) * sizeof(int);
}
static inline size_t decoder_host_bytes(ModelConfig cfg, int sequences, int T) {
    return decoder_queue_tokens_(sequences, T) * sizeof(int) +
           (size_t)sequences * cfg.Vp * (sizeof(floatX) + sizeof(float));
}

static inline void decoder_queue_open_(DecoderQueue* queue, ModelConfig cfg, int sequences, int T) {
    const size_t logits = (size_t)sequences * cfg.Vp;
    queue->capacity = T > sequences ? T : sequences;
    queue->tokens = (int*)gpu_alloc(2 * (size_t)queue->capacity, sizeof(int), "tokens of sequences");
    queue->pinned = (int*)gpu_alloc_pinned(2 * (size_t)queue->capacity, sizeof(int), "tokens of sequences");
    queue->logits_pinned = (floatX*)gpu_alloc_pinned(logits, sizeof(floatX), "logits of sequences");
    queue->logits = (float*)check_alloc(logits, sizeof(float), "logits of sequences");
    queue->steps = 0;
    queue->step = NULL;
}

static inline void decoder_queue_close_(DecoderQueue* queue) {
    if (queue->step) {
        CUDA_CHECK(cudaGraphExecDestroy(queue->step));
    }
    free(queue->logits);
    gpu_free_pinned(queue->logits_pinned);
    gpu_free_pinned(queue->pinned);
    gpu_free(queue->tokens);
}

// `memory`, on the GPU, has room for decoder_activation_rows. Between two steps training needs none of it.
static inline void decoder_open(DecoderGpu* model, void* memory) {
    decoder_activation_rows(model->rows, model->cfg, model->sequences, model->T);
    tensor_rows_bind(&model->acts, model->rows, MODEL_ACTIVATION_ROWS, memory);
    decoder_queue_open_(&model->queue, model->cfg, model->sequences, model->T);
}

static inline void decoder_close(DecoderGpu* model) { decoder_queue_close_(&model->queue); }

// Stores the keys and values in qkv, and sets atty.
static inline void decoder_attention_(DecoderGpu* model, SequenceRows rows, floatX* kv) {
    const ModelActivations a = model->acts;
    const int C = model->cfg.C, NH = model->cfg.NH;
    const AttentionCacheGpu<floatX> cache = {kv, model->T, C, NH};
    attention_cache_store(cache, a.qkv, rows.positions, rows.sequence, rows.count, model->gpu);
    if (rows.positions) {
        attention_cached(a.atty, a.qkv, rows.positions, rows.count, cache, model->gpu);
    } else {
        attention_forward(a.atty, a.att_lse, a.qkv, (const int*)NULL, 1, rows.count, C, NH, model->attention,
                          model->gpu);
    }
}

// Block l: turns `residual` (N, C) into that after the block, residual3. They may be the same.
static inline void decoder_block_(DecoderGpu* model, int l, SequenceRows rows, const floatX* residual) {
    const Gpu* gpu = model->gpu;
    LinearGpu* linear = model->linear;
    const int N = rows.count, C = model->cfg.C, F = model_hidden(model->cfg),
              QKV = model_qkv_size(model->cfg);
    const ModelParameters p =
        model_parameters_at_copy(model->params, model->parameter_rows,
                                 zero_parameter_block(&model->zero->plan, model_copy(model->cfg, l)));
    const ModelActivations a = model_activations_at_layer(model->acts, model->rows, l);
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, gpu);
    linear_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, N, C, QKV, linear);
    decoder_attention_(model, rows, a.kv);
    linear_forward_residual(a.residual2, residual, a.atty, p.attprojw, p.attprojb, N, C, C, linear);
    layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, gpu);
    linear_forward_gelu(a.fch_gelu, a.fch, a.ln2, p.fcw, p.fcb, N, C, F, linear);
    linear_forward_residual(a.residual3, a.residual2, a.fch_gelu, p.fcprojw, p.fcprojb, N, F, C, linear);
}

// Sets the logits (count, Vp) that follow the last `count` rows.
static inline void decoder_forward_(DecoderGpu* model, SequenceRows rows, int count) {
    const ModelConfig cfg = model->cfg;
    const ModelActivations a = model->acts;
    const EmbeddingPositions positions = {rows.positions, NULL};
    model->linear->matmul->settings.autotune = 0; // so that the bits are the same in each run
    zero_begin_forward(model->zero);
    linear_embedding(a.encoded, rows.ids, model->params, 1, rows.count, positions, model->linear);
    for (int l = 0; l < cfg.L; l++) {
        zero_parameters(model->zero, model_copy(cfg, l), 1);
        decoder_block_(model, l, rows, l == 0 ? a.encoded : a.residual3);
    }
    layernorm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, a.residual3, model->params.lnfw, model->params.lnfb,
                      rows.count, cfg.C, model->gpu);
    linear_logits(a.logits, a.lnf + (size_t)(rows.count - count) * cfg.C, model->params.wte, count,
                  model->linear);
}

// All work of one call: the ints on the host to the GPU, and `count` rows of logits back.
static inline void decoder_work_(DecoderGpu* model, SequenceRows rows, int count) {
    DecoderQueue* queue = &model->queue;
    const cudaStream_t stream = model->gpu->stream;
    CUDA_CHECK(cudaMemcpyAsync(queue->tokens, queue->pinned, 2 * (size_t)queue->capacity * sizeof(int),
                               cudaMemcpyHostToDevice, stream));
    decoder_forward_(model, rows, count);
    CUDA_CHECK(cudaMemcpyAsync(queue->logits_pinned, model->acts.logits,
                               (size_t)count * model->cfg.Vp * sizeof(floatX), cudaMemcpyDeviceToHost,
                               stream));
}

// The same as a graph.
static inline void decoder_replay_(DecoderGpu* model, SequenceRows rows, int count) {
    DecoderQueue* queue = &model->queue;
    if (!queue->step) {
        graph_capture_begin(model->gpu);
        decoder_work_(model, rows, count);
        queue->step = graph_capture_end(model->gpu);
    }
    CUDA_CHECK(cudaGraphLaunch(queue->step, model->gpu->stream));
}

// Waits for the GPU.
static inline const float* decoder_logits_(DecoderGpu* model, int count) {
    DecoderQueue* queue = &model->queue;
    CUDA_CHECK(cudaStreamSynchronize(model->gpu->stream));
    for (size_t i = 0; i < (size_t)count * model->cfg.Vp; i++) {
        queue->logits[i] = to_float(queue->logits_pinned[i]);
    }
    return queue->logits;
}

static inline const float* decoder_prefill(DecoderGpu* model, int sequence, const int* ids, int count) {
    DecoderQueue* queue = &model->queue;
    const SequenceRows rows = {queue->tokens, count, sequence, NULL};
    assert(count <= queue->capacity && sequence < model->sequences);
    memcpy(queue->pinned, ids, (size_t)count * sizeof(int));
    decoder_work_(model, rows, 1);
    return decoder_logits_(model, 1);
}

static inline const float* decoder_step(DecoderGpu* model, const int* ids, const int* positions,
                                        int sequences) {
    DecoderQueue* queue = &model->queue;
    const SequenceRows rows = {queue->tokens, sequences, 0, queue->tokens + queue->capacity};
    assert(sequences == model->sequences);
    memcpy(queue->pinned, ids, (size_t)sequences * sizeof(int));
    memcpy(queue->pinned + queue->capacity, positions, (size_t)sequences * sizeof(int));
    if (!model->use_graph || queue->steps++ == 0) {
        decoder_work_(model, rows, sequences);
    } else {
        decoder_replay_(model, rows, sequences);
    }
    return decoder_logits_(model, sequences);
}

#endif
