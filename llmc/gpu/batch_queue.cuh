/*
batch_queue.cuh -- copies batches to the GPU, through pinned memory and on a stream of their own,
while the GPU works on earlier ones.

    tokens, targets, starts    (capacity)   int32, on the GPU, at fixed addresses: valid for work
                                            queued on gpu->stream between one push and the next;
                                            starts is NULL if the last push had none

The host waits only in batch_queue_push, and only for the batch BATCH_SLOTS pushes ago.
*/
#ifndef LLMC_BATCH_QUEUE_CUH
#define LLMC_BATCH_QUEUE_CUH

#include "llmc/gpu/gpu.cuh"

enum { BATCH_SLOTS = 3 };

typedef struct {
    const Gpu* gpu;
    cudaStream_t stream;                                 // stream of the copies
    size_t capacity;                                     // in tokens
    int *tokens, *targets;                               // on the GPU
    int *starts, *starts_memory;                         // NULL, or starts_memory; on the GPU
    int *pinned[BATCH_SLOTS], *staging[BATCH_SLOTS];     // (3, capacity) on the host; on the GPU
    cudaEvent_t arrived[BATCH_SLOTS], used[BATCH_SLOTS]; // copied into staging; staging free again
    int next;                                            // next slot
    // (capacity, kept) tokens that a teacher's file keeps, and their log-probabilities, on the GPU
    int* kept_ids;
    float* kept_log_probs;
} BatchQueue;

// Opens a queue for batches of up to `capacity` tokens. `gpu` must stay valid.
static inline void batch_queue_open(BatchQueue* queue, Memory* memory, size_t capacity, const Gpu* gpu) {
    const char* kind = "scratch: batches";
    const size_t bytes = capacity * sizeof(int);
    memset(queue, 0, sizeof(*queue));
    queue->gpu = gpu;
    queue->capacity = capacity;
    queue->tokens = (int*)memory_take(memory, kind, MEMORY_DEVICE, bytes);
    queue->targets = (int*)memory_take(memory, kind, MEMORY_DEVICE, bytes);
    queue->starts_memory = (int*)memory_take(memory, kind, MEMORY_DEVICE, bytes);
    for (int slot = 0; slot < BATCH_SLOTS; slot++) {
        queue->pinned[slot] = (int*)memory_take(memory, "staging: batches", MEMORY_PINNED, 3 * bytes);
        queue->staging[slot] = (int*)memory_take(memory, kind, MEMORY_DEVICE, 3 * bytes);
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

// Sets tokens, and targets and starts unless they are NULL, for work queued on gpu->stream from now
// on. The arguments are on the host and may be reused at once.
static inline void batch_queue_push(BatchQueue* queue, const int* tokens, const int* targets,
                                    const int* starts, size_t count) {
    const int slot = queue->next;
    const size_t bytes = count * sizeof(int);
    assert(count <= queue->capacity);
    queue->next = (slot + 1) % BATCH_SLOTS;
    // an event that was never recorded does not wait
    CUDA_CHECK(cudaEventSynchronize(queue->used[slot]));
    int *pinned = queue->pinned[slot], *staging = queue->staging[slot];
    memcpy(pinned, tokens, bytes);
    memcpy(pinned + count, targets ? targets : tokens, bytes);
    if (starts) {
        memcpy(pinned + 2 * count, starts, bytes);
    }
    CUDA_CHECK(
        cudaMemcpyAsync(staging, pinned, (starts ? 3 : 2) * bytes, cudaMemcpyHostToDevice, queue->stream));
    CUDA_CHECK(cudaEventRecord(queue->arrived[slot], queue->stream));
    CUDA_CHECK(cudaStreamWaitEvent(queue->gpu->stream, queue->arrived[slot], 0));
    CUDA_CHECK(cudaMemcpyAsync(queue->tokens, staging, bytes, cudaMemcpyDeviceToDevice, queue->gpu->stream));
    CUDA_CHECK(cudaMemcpyAsync(queue->targets, staging + count, bytes, cudaMemcpyDeviceToDevice,
                               queue->gpu->stream));
    queue->starts = starts ? queue->starts_memory : NULL;
    if (starts) {
        CUDA_CHECK(cudaMemcpyAsync(queue->starts, staging + 2 * count, bytes, cudaMemcpyDeviceToDevice,
                                   queue->gpu->stream));
    }
    CUDA_CHECK(cudaEventRecord(queue->used[slot], queue->gpu->stream));
}

// Opens room for k tokens that a teacher's file keeps for each token.
static inline void batch_queue_open_kept(BatchQueue* queue, Memory* memory, int k) {
    const size_t count = queue->capacity * (size_t)k;
    const char* kind = "scratch: kept tokens";
    queue->kept_ids = (int*)memory_take(memory, kind, MEMORY_DEVICE, count * sizeof(int));
    queue->kept_log_probs = (float*)memory_take(memory, kind, MEMORY_DEVICE, count * sizeof(float));
}

// Sets the kept tokens of the batch that was pushed, and waits for the copy of ordinary memory.
static inline void batch_queue_push_kept(BatchQueue* queue, const int* ids, const float* log_probs,
                                         size_t count) {
    cudaStream_t stream = queue->gpu->stream;
    CUDA_CHECK(cudaMemcpyAsync(queue->kept_ids, ids, count * sizeof(int), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(queue->kept_log_probs, log_probs, count * sizeof(float),
                               cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream)); // the loader reuses its memory
}

#endif
