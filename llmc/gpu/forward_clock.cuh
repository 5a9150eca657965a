/*
forward_clock.cuh -- times the last forward pass of an update on the GPU: how fast this rank is.
*/
#ifndef LLMC_FORWARD_CLOCK_CUH
#define LLMC_FORWARD_CLOCK_CUH

#include "llmc/gpu/gpu.cuh"

typedef struct {
    cudaEvent_t begin, end; // of the last forward pass that was timed
    int tokens;             // tokens of that pass, set by the caller; 0: none was timed in this update
} ForwardClock;

static inline void forward_clock_open(ForwardClock* clock) {
    clock->tokens = 0;
    CUDA_CHECK(cudaEventCreate(&clock->begin));
    CUDA_CHECK(cudaEventCreate(&clock->end));
}

static inline void forward_clock_close(ForwardClock* clock) {
    CUDA_CHECK(cudaEventDestroy(clock->end));
    CUDA_CHECK(cudaEventDestroy(clock->begin));
}

// Record the start and end of a forward pass. In a graph, `record` is cudaEventRecordExternal,
// which sets the event at every launch.
static inline void forward_clock_begin(ForwardClock* clock, unsigned record, const Gpu* gpu) {
    CUDA_CHECK(cudaEventRecordWithFlags(clock->begin, gpu->stream, record));
}
static inline void forward_clock_end(ForwardClock* clock, unsigned record, const Gpu* gpu) {
    CUDA_CHECK(cudaEventRecordWithFlags(clock->end, gpu->stream, record));
}

// Returns the time per token; 0 if unknown. The GPU must have finished.
static inline double forward_clock_pace_s(const ForwardClock* clock) {
    float ms = 0;
    if (clock->tokens == 0) {
        return 0;
    }
    if (cudaEventElapsedTime(&ms, clock->begin, clock->end) != cudaSuccess) {
        cudaGetLastError(); // clears the error: no reason to end a run
    }
    return ms / 1e3 / clock->tokens;
}

#endif
