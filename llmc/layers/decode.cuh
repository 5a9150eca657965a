/*
decode.cuh -- decode.h on the GPU: the queue between the host's tokens and the model, and the graph
of a step.

    decoder_prefill, decoder_step    read tokens as decode.h says

Their argument `forward(const Pass* pass, int count)` runs the model, and returns the logits (count,
Vp) on the GPU that follow the last `count` rows of the pass.

Both return the logits that follow what they read, (1, Vp) or (sequences, Vp) in fp32, valid until
the next call. A step of all sequences is always the same work: from the second one on, it is one
CUDA graph.
*/
#ifndef LLMC_DECODE_CUH
#define LLMC_DECODE_CUH

#include <assert.h>
#include <string.h>

#include "llmc/gpu/floatx.cuh"

#include "llmc/gpu/graph.cuh"
#include "llmc/layers/decode.h"

// Tokens on their way to the GPU, and logits on their way back.
typedef struct {
    int capacity;          // tokens
    int *pinned, *tokens;  // (2, capacity) tokens and their positions, on the host; on the GPU
    floatX* logits_pinned; // (sequences, Vp) as they are on the GPU,
    float* logits;         // and as fp32
    // so far: the first one is not captured, since it chooses algorithms and loads kernels
    int steps;
    cudaGraphExec_t step; // of all sequences
} DecoderQueue;

typedef struct {
    Decoder decoder;
    int Vp; // of the whole model
    int use_graph;
    const Gpu* gpu;
    DecoderQueue queue;
} DecoderGpu;

static inline void decoder_queue_open_(DecoderQueue* queue, Memory* memory, int Vp, int sequences, int T) {
    const size_t logits = (size_t)sequences * Vp, capacity = (size_t)(T > sequences ? T : sequences),
                 tokens_bytes = 2 * capacity * sizeof(int);
    queue->capacity = (int)capacity;
    queue->tokens = (int*)memory_take(memory, "texts", MEMORY_DEVICE, tokens_bytes);
    queue->pinned = (int*)memory_take(memory, "staging: tokens", MEMORY_PINNED, tokens_bytes);
    queue->logits_pinned =
        (floatX*)memory_take(memory, "staging: logits", MEMORY_PINNED, logits * sizeof(floatX));
    queue->logits = (float*)memory_take(memory, "staging: logits", MEMORY_HOST, logits * sizeof(float));
    queue->steps = 0;
    queue->step = NULL;
}

// Opens a decoder; for `acts`, on the GPU, see decoder_bind. `gpu` must outlive it.
static inline void decoder_open(DecoderGpu* d, Memory* memory, ModelConfig cfg, int sequences, int T,
                                void* acts, int use_graph, const Gpu* gpu) {
    d->Vp = cfg.Vp * model_tensor_ranks(cfg);
    d->use_graph = use_graph;
    d->gpu = gpu;
    decoder_bind(&d->decoder, cfg, sequences, T, acts);
    decoder_queue_open_(&d->queue, memory, d->Vp, sequences, T);
}

static inline void decoder_close(DecoderGpu* d) {
    if (d->queue.step) {
        CUDA_CHECK(cudaGraphExecDestroy(d->queue.step));
    }
}

// Moves the ints on the host to the GPU, runs the model, and moves `count` rows of logits back.
template <class Forward>
static inline void decoder_work_(DecoderGpu* d, const Pass* pass, int count, Forward forward) {
    DecoderQueue* queue = &d->queue;
    const cudaStream_t stream = d->gpu->stream;
    CUDA_CHECK(cudaMemcpyAsync(queue->tokens, queue->pinned, 2 * (size_t)queue->capacity * sizeof(int),
                               cudaMemcpyHostToDevice, stream));
    const floatX* logits = forward(pass, count);
    CUDA_CHECK(cudaMemcpyAsync(queue->logits_pinned, logits, (size_t)count * d->Vp * sizeof(floatX),
                               cudaMemcpyDeviceToHost, stream));
}

// Does the same by a graph, which it captures first if none exists.
template <class Forward>
static inline void decoder_replay_(DecoderGpu* d, const Pass* pass, int count, Forward forward) {
    DecoderQueue* queue = &d->queue;
    if (!queue->step) {
        graph_capture_begin(d->gpu);
        decoder_work_(d, pass, count, forward);
        queue->step = graph_capture_end(d->gpu);
    }
    CUDA_CHECK(cudaGraphLaunch(queue->step, d->gpu->stream));
}

// Waits for the GPU.
static inline const float* decoder_logits_(DecoderGpu* d, int count) {
    DecoderQueue* queue = &d->queue;
    CUDA_CHECK(cudaStreamSynchronize(d->gpu->stream));
    for (size_t i = 0; i < (size_t)count * d->Vp; i++) {
        queue->logits[i] = to_float(queue->logits_pinned[i]);
    }
    return queue->logits;
}

template <class Forward>
static inline const float* decoder_prefill(DecoderGpu* d, int sequence, const int* ids, int count,
                                           Forward forward) {
    DecoderQueue* queue = &d->queue;
    const Pass pass = decoder_prefill_pass(&d->decoder, sequence, queue->tokens, count);
    assert(count <= queue->capacity && sequence < d->decoder.sequences);
    memcpy(queue->pinned, ids, (size_t)count * sizeof(int));
    decoder_work_(d, &pass, 1, forward);
    return decoder_logits_(d, 1);
}

template <class Forward>
static inline const float* decoder_step(DecoderGpu* d, const int* ids, const int* positions, int sequences,
                                        Forward forward) {
    DecoderQueue* queue = &d->queue;
    const Pass pass =
        decoder_step_pass(&d->decoder, queue->tokens, queue->tokens + queue->capacity, sequences);
    assert(sequences == d->decoder.sequences);
    memcpy(queue->pinned, ids, (size_t)sequences * sizeof(int));
    memcpy(queue->pinned + queue->capacity, positions, (size_t)sequences * sizeof(int));
    if (!d->use_graph || queue->steps++ == 0) {
        decoder_work_(d, &pass, sequences, forward);
    } else {
        decoder_replay_(d, &pass, sequences, forward);
    }
    return decoder_logits_(d, sequences);
}

#endif
