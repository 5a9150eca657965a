/*
results.cuh -- results of an update, or of the batches of a validation, that the host reads back: on
the GPU and in pinned memory.

Kernels append losses, add to statistics, and set the rest; the host reads all of it at once, and
waits.
*/
#ifndef LLMC_RESULTS_CUH
#define LLMC_RESULTS_CUH

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/wide_sum.h"
#include "llmc/gpu/gpu.cuh"

typedef struct {
    WideSum square_sum;          // of the gradient
    WideSum divergence;          // sum over the tokens of all micro-steps
    unsigned long long checksum; // of the parameters
    int64_t count;               // number of losses
    double losses[];             // sum of each micro-step
} StepResult;

static inline size_t step_result_bytes(int64_t losses) {
    return sizeof(StepResult) + (size_t)losses * sizeof(double);
}

typedef struct {
    StepResult *on_gpu, *on_host;
    double *statistics, *statistics_on_host; // sums over micro-steps, on the GPU and on the host
    size_t statistics_bytes;                 // 0: none
    int64_t max_losses;                      // capacity
    // losses that the host has not read yet, of batches that the GPU runs ahead with
    int64_t waiting;
    const Gpu* gpu;
} StepResults;

// Opens the results, with this many statistics. `gpu` must stay valid.
static inline void step_results_open(StepResults* r, Memory* memory, int64_t max_losses, size_t statistics,
                                     const Gpu* gpu) {
    const size_t bytes = step_result_bytes(max_losses);
    r->max_losses = max_losses;
    r->gpu = gpu;
    r->on_gpu = (StepResult*)memory_take(memory, "scratch: results", MEMORY_DEVICE, bytes);
    r->on_host = (StepResult*)memory_take(memory, "staging: results", MEMORY_PINNED, bytes);
    r->statistics_bytes = statistics * sizeof(double);
    r->statistics = r->statistics_on_host = NULL;
    if (statistics > 0) {
        r->statistics = (double*)memory_take(memory, "scratch: results", MEMORY_DEVICE, r->statistics_bytes);
        r->statistics_on_host =
            (double*)memory_take(memory, "staging: results", MEMORY_PINNED, r->statistics_bytes);
    }
}

// Forgets all losses, divergences and statistics; call it before the first micro-step of an update,
// and the first batch of a validation.
static inline void step_results_clear(StepResults* r) {
    CUDA_CHECK(cudaMemsetAsync(&r->on_gpu->count, 0, sizeof(r->on_gpu->count), r->gpu->stream));
    CUDA_CHECK(cudaMemsetAsync(&r->on_gpu->divergence, 0, sizeof(r->on_gpu->divergence), r->gpu->stream));
    if (r->statistics) {
        CUDA_CHECK(cudaMemsetAsync(r->statistics, 0, r->statistics_bytes, r->gpu->stream));
    }
    r->waiting = 0;
}

// Queues the copy of the statistics to the host.
static inline void step_results_copy_statistics(StepResults* r, cudaStream_t stream) {
    if (r->statistics) {
        CUDA_CHECK(cudaMemcpyAsync(r->statistics_on_host, r->statistics, r->statistics_bytes,
                                   cudaMemcpyDeviceToHost, stream));
    }
}

// Copies the result, its first `losses` losses and the statistics to the host, and waits for them.
static inline const StepResult* step_results_read(StepResults* r, int64_t losses) {
    assert(losses <= r->max_losses);
    CUDA_CHECK(cudaMemcpyAsync(r->on_host, r->on_gpu, step_result_bytes(losses), cudaMemcpyDeviceToHost,
                               r->gpu->stream));
    step_results_copy_statistics(r, r->gpu->stream);
    CUDA_CHECK(cudaStreamSynchronize(r->gpu->stream));
    return r->on_host;
}

// Counts a loss that kernels append, and that the host does not read yet.
static inline void step_results_expect(StepResults* r) { r->waiting++; }

static inline int step_results_are_full(const StepResults* r) { return r->waiting == r->max_losses; }

// Waits for the expected losses, and sets those just before `end`.
static inline void step_results_collect(StepResults* r, double* end) {
    const int64_t count = r->waiting;
    if (count > 0) {
        memcpy(end - count, step_results_read(r, count)->losses, (size_t)count * sizeof(double));
        step_results_clear(r);
    }
}

#endif
