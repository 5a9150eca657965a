/*
batch_queue.cuh -- copies batches to the GPU, through pinned memory and on a stream of their own,
while the GPU works on earlier ones.

    tokens, targets            (capacity)         int32
    starts                     (capacity, ranks)  int32: of whole sequences, which `ranks` share
    lengths                    (capacity)         int32: of sequences, at most one for each token
    sources                    (capacity)         int32: of each sequence, of the training data
    targets_per_token          (1)                fp32 (counted.h)
    random                     (BATCH_RANDOM)     words of random numbers in training (dropout.h)

`batch` has them on the GPU, at fixed addresses: valid for work queued on gpu->stream between one
push and the next; the last five are NULL if the last push had none.

The host waits only in batch_queue_push, and only for the batch BATCH_SLOTS pushes ago.
*/
#ifndef LLMC_BATCH_QUEUE_CUH
#define LLMC_BATCH_QUEUE_CUH

#include "llmc/gpu/gpu.cuh"

enum { BATCH_SLOTS = 3, BATCH_ARRAYS = 7, BATCH_RANDOM = 6 };

typedef struct {
    const int *tokens, *targets, *starts, *lengths, *sources;
    const float* targets_per_token;
    const void* random;
} BatchArrays;

typedef struct {
    const Gpu* gpu;
    cudaStream_t stream;       // stream of the copies
    size_t capacity;           // in tokens
    int ranks;                 // that share the sequences
    int* memory[BATCH_ARRAYS]; // on the GPU; all is copied as ints
    BatchArrays batch;
    int *pinned[BATCH_SLOTS], *staging[BATCH_SLOTS];     // all arrays, on the host; on the GPU
    cudaEvent_t arrived[BATCH_SLOTS], used[BATCH_SLOTS]; // copied into staging; staging free again
    int next;                                            // next slot
} BatchQueue;

// Opens a queue for batches of up to `capacity` tokens of sequences that `ranks` share. `gpu` must
// stay valid.
static inline void batch_queue_open(BatchQueue* queue, Memory* memory, size_t capacity, int ranks,
                                    const Gpu* gpu) {
    const char* kind = "scratch: batches";
    const size_t counts[BATCH_ARRAYS] = {capacity, capacity,    capacity * (size_t)ranks, capacity, capacity,
                                         1,        BATCH_RANDOM};
    size_t bytes = 0;
    memset(queue, 0, sizeof(*queue));
    queue->gpu = gpu;
    queue->capacity = capacity;
    queue->ranks = ranks;
    for (int i = 0; i < BATCH_ARRAYS; i++) {
        const size_t array = counts[i] * sizeof(int);
        queue->memory[i] = (int*)memory_take(memory, kind, MEMORY_DEVICE, array);
        bytes += array;
    }
    for (int slot = 0; slot < BATCH_SLOTS; slot++) {
        queue->pinned[slot] = (int*)memory_take(memory, "staging: batches", MEMORY_PINNED, bytes);
        queue->staging[slot] = (int*)memory_take(memory, kind, MEMORY_DEVICE, bytes);
    }
    if (memory_is_dry(memory)) {
        return;
    }
    CUDA_CHECK(cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking));
    for (int slot = 0; slot < BATCH_SLOTS; slot++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&queue->arrived[slot], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&queue->used[slot], cudaEventDisableTiming));
    }
}

static inline void batch_queue_close(BatchQueue* queue) {
    for (int slot = 0; slot < BATCH_SLOTS; slot++) {
        CUDA_CHECK(cudaEventDestroy(queue->used[slot]));
        CUDA_CHECK(cudaEventDestroy(queue->arrived[slot]));
    }
    CUDA_CHECK(cudaStreamDestroy(queue->stream));
}

// Starts the copy of a slot's `end` elements; gpu->stream waits for it.
static inline void batch_queue_send_(BatchQueue* queue, int slot, size_t end) {
    CUDA_CHECK(cudaMemcpyAsync(queue->staging[slot], queue->pinned[slot], end * sizeof(int),
                               cudaMemcpyHostToDevice, queue->stream));
    CUDA_CHECK(cudaEventRecord(queue->arrived[slot], queue->stream));
    CUDA_CHECK(cudaStreamWaitEvent(queue->gpu->stream, queue->arrived[slot], 0));
}

// Sets `batch` for work queued on gpu->stream from now on, from arrays of `count` tokens in
// `sequences` on the host, which may be reused at once. Without targets, they are the tokens.
static inline void batch_queue_push(BatchQueue* queue, BatchArrays host, size_t count, size_t sequences) {
    const void* const arrays[BATCH_ARRAYS] = {host.tokens,  host.targets ? host.targets : host.tokens,
                                              host.starts,  host.lengths,
                                              host.sources, host.targets_per_token,
                                              host.random};
    const size_t counts[BATCH_ARRAYS] = {
        count, count, count * (size_t)queue->ranks, sequences, sequences, 1, BATCH_RANDOM};
    const int slot = queue->next;
    size_t bytes[BATCH_ARRAYS], end = 0;
    assert(count <= queue->capacity);
    queue->next = (slot + 1) % BATCH_SLOTS;
    // an event that was never recorded does not wait
    CUDA_CHECK(cudaEventSynchronize(queue->used[slot]));
    for (int i = 0; i < BATCH_ARRAYS; i++) {
        bytes[i] = arrays[i] ? counts[i] * sizeof(int) : 0;
        if (bytes[i] > 0) {
            memcpy(queue->pinned[slot] + end, arrays[i], bytes[i]);
        }
        end += bytes[i] / sizeof(int);
    }
    batch_queue_send_(queue, slot, end);
    end = 0;
    for (int i = 0; i < BATCH_ARRAYS; i++) {
        if (bytes[i] > 0) {
            CUDA_CHECK(cudaMemcpyAsync(queue->memory[i], queue->staging[slot] + end, bytes[i],
                                       cudaMemcpyDeviceToDevice, queue->gpu->stream));
        }
        end += bytes[i] / sizeof(int);
    }
    queue->batch = BatchArrays{queue->memory[0],
                               queue->memory[1],
                               host.starts ? queue->memory[2] : NULL,
                               host.lengths ? queue->memory[3] : NULL,
                               host.sources ? queue->memory[4] : NULL,
                               host.targets_per_token ? (const float*)(const void*)queue->memory[5] : NULL,
                               host.random ? queue->memory[6] : NULL};
    CUDA_CHECK(cudaEventRecord(queue->used[slot], queue->gpu->stream));
}

#endif
