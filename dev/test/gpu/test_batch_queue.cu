// test_batch_queue.cu -- batch_queue.cuh: every batch is complete on the GPU before the work queued
// after it starts, however late copies and kernels run, even if the host reuses its memory at once.
#include "llmc/gpu/batch_queue.cuh"
#include "dev/test/lib/test.h"

enum { CAPACITY = 37, PUSHES = 4 * BATCH_SLOTS + 1 };

// One thread: what the batch says, so that no two batches say the same.
__global__ void digest_kernel(int* out, const int* tokens, const int* targets, const int* starts, int count) {
    unsigned digest = 0;
    for (int i = 0; i < count; i++) {
        digest = digest * 31u + (unsigned)tokens[i] * 7u + (unsigned)targets[i];
        digest = starts ? digest * 5u + (unsigned)starts[i] : digest;
    }
    *out = (int)digest;
}

static int digest_of(const int* tokens, const int* targets, const int* starts, int count) {
    unsigned digest = 0;
    for (int i = 0; i < count; i++) {
        digest = digest * 31u + (unsigned)tokens[i] * 7u + (unsigned)targets[i];
        digest = starts ? digest * 5u + (unsigned)starts[i] : digest;
    }
    return (int)digest;
}

TEST(batch_queue) {
    Gpu gpu;
    BatchQueue queue;
    int wanted[PUSHES], got[PUSHES], tokens[CAPACITY], targets[CAPACITY], starts[CAPACITY];
    gpu_open(&gpu, 0);
    Memory memory = memory_on_gpu();
    batch_queue_open(&queue, &memory, CAPACITY, &gpu);
    int* out = (int*)gpu_alloc(PUSHES, sizeof(int), "digests");
    for (int push = 0; push < PUSHES; push++) {
        const int count = push % 3 == 2 ? 1 : CAPACITY - push % 2, has_targets = push % 4 != 3;
        const int* has_starts = push % 5 < 3 ? starts : NULL;
        for (int i = 0; i < count; i++) {
            tokens[i] = push * 3 + i % 5;
            targets[i] = push + i;
            starts[i] = push + i / 3;
        }
        batch_queue_push(&queue, tokens, has_targets ? targets : NULL, has_starts, (size_t)count);
        launch(digest_kernel, 1, 1, 0, &gpu, out + push, queue.tokens, queue.targets,
               (const int*)queue.starts, count);
        wanted[push] = digest_of(tokens, has_targets ? targets : tokens, has_starts, count);
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
