// test_batch_queue.cu -- batch_queue.cuh: every batch is complete on the GPU before the work queued
// after it starts, however late copies and kernels run, even if the host reuses its memory at once.
#include "llmc/gpu/batch_queue.cuh"
#include "dev/test/lib/test.h"

enum { CAPACITY = 37, RANKS = 2, PUSHES = 4 * BATCH_SLOTS + 1 };

__host__ __device__ static int sequences_of(int count) { return (count + 3) / 4; }

// Returns a number that no two batches share.
__host__ __device__ static int digest_of(BatchArrays batch, int count) {
    unsigned digest = 0;
    for (int i = 0; i < count; i++) {
        digest = digest * 31u + (unsigned)batch.tokens[i] * 7u + (unsigned)batch.targets[i];
    }
    for (int i = 0; i < count * RANKS && batch.starts; i++) {
        digest = digest * 5u + (unsigned)batch.starts[i];
    }
    for (int i = 0; i < sequences_of(count) && batch.lengths; i++) {
        digest = digest * 3u + (unsigned)batch.lengths[i];
    }
    for (int i = 0; batch.sources && i < sequences_of(count); i++) {
        digest = digest * 3u + (unsigned)batch.sources[i];
    }
    digest += batch.targets_per_token ? (unsigned)(*batch.targets_per_token * 64.0f) : 0u;
    return (int)digest;
}

// One thread.
__global__ void digest_kernel(int* out, BatchArrays batch, int count) { *out = digest_of(batch, count); }

TEST(batch_queue) {
    Gpu gpu;
    BatchQueue queue;
    int wanted[PUSHES], got[PUSHES], tokens[CAPACITY], targets[CAPACITY], starts[CAPACITY * RANKS],
        lengths[CAPACITY], sources[CAPACITY];
    gpu_open(&gpu, 0);
    Memory memory = memory_on_gpu();
    batch_queue_open(&queue, &memory, CAPACITY, RANKS, &gpu);
    int* out = (int*)gpu_alloc(PUSHES, sizeof(int), "digests");
    for (int push = 0; push < PUSHES; push++) {
        const int count = push % 3 == 2 ? 1 : CAPACITY - push % 2, has_targets = push % 4 != 3;
        const float share = 1.0f / (float)(push + 1);
        const int has_lengths = push % 7 < 4;
        BatchArrays batch = {tokens,
                             has_targets ? targets : NULL,
                             push % 5 < 3 ? starts : NULL,
                             has_lengths ? lengths : NULL,
                             push % 6 < 3 ? sources : NULL,
                             has_lengths ? &share : NULL};
        for (int i = 0; i < count; i++) {
            tokens[i] = push * 3 + i % 5;
            targets[i] = push + i;
        }
        for (int i = 0; i < count * RANKS; i++) {
            starts[i] = push + i / 3;
        }
        for (int i = 0; i < sequences_of(count); i++) {
            lengths[i] = 2 * push + i;
            sources[i] = push + i % 3;
        }
        batch_queue_push(&queue, batch, (size_t)count, (size_t)sequences_of(count));
        launch(digest_kernel, 1, 1, 0, &gpu, out + push, queue.batch, count);
        batch.targets = has_targets ? targets : tokens;
        wanted[push] = digest_of(batch, count);
    }
    CUDA_CHECK(cudaMemcpyAsync(got, out, sizeof(got), cudaMemcpyDeviceToHost, gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    for (int push = 0; push < PUSHES; push++) {
        EXPECT(got[push] == wanted[push], "batch %d: %d, wanted %d", push, got[push], wanted[push]);
    }
    gpu_free(out);
    batch_queue_close(&queue);
    memory_close(&memory);
    gpu_close(&gpu);
}
