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
} BatchQueue;

// Return the bytes that batch_queue_open allocates on the GPU, and in pinned memory.
static inline size_t batch_queue_pinned_bytes(size_t capacity) {
    return BATCH_SLOTS * 3 * capacity * sizeof(int);
}
static inline size_t batch_queue_planned_bytes(size_t capacity) {
    return batch_queue_pinned_bytes(capacity) + 3 * capacity * sizeof(int);
}

// Opens a queue for batches of up to `capacity` tokens. `gpu` must stay valid.
static inline void batch_queue_open(BatchQueue* queue, size_t capacity, const Gpu* gpu) {
    memset(queue, 0, sizeof(*queue));
    queue->gpu = gpu;
    queue->capacity = capacity;
    queue->tokens = (int*)gpu_alloc(capacity, sizeof(int), "tokens");
    queue->targets = (int*)gpu_alloc(capacity, sizeof(int), "targets");
    queue->starts_memory = (int*)gpu_alloc(capacity, sizeof(int), "starts of documents");
    CUDA_CHECK(cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking));
    for (int slot = 0; slot < BATCH_SLOTS; slot++) {
        queue->pinned[slot] = (int*)gpu_alloc_pinned(3 * capacity, sizeof(int), "tokens");
        queue->staging[slot] = (int*)gpu_alloc(3 * capacity, sizeof(int), "tokens");
        CUDA_CHECK(cudaEventCreateWithFlags(&queue->arrived[slot], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&queue->used[slot], cudaEventDisableTiming));
    }
}

static inline void batch_queue_close(BatchQueue* queue) {
    for (int slot = 0; slot < BATCH_SLOTS; slot++) {
        CUDA_CHECK(cudaEventDestroy(queue->used[slot]));
        CUDA_CHECK(cudaEventDestroy(queue->arrived[slot]));
        gpu_free(queue->staging[slot]);
        gpu_free_pinned(queue->pinned[slot]);
    }
    CUDA_CHECK(cudaStreamDestroy(queue->stream));
    gpu_free(queue->starts_memory);
    gpu_free(queue->targets);
    gpu_free(queue->tokens);
}

// Sets tokens, and targets and starts unless they are NULL, for work queued on gpu->stream from now
// on. The arguments are on the host and may be reused at once.
static inline void batch_queue_push(BatchQueue* queue, const int* tokens, const int* targets,
                                    const int* starts, size_t count) {
    const int slot = queue->next;
    const size_t bytes = count * sizeof(int);
    assert(count <= queue->capacity);
    queue->next = (slot + 1) % BATCH_SLOTS;
    CUDA_CHECK(cudaEventSynchronize(queue->used[slot])); // an event that was never recorded does not wait
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

#endif
