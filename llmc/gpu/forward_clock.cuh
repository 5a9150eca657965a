/*
forward_clock.cuh -- the time that the last forward pass of an update took on the GPU: how fast this
process is.
*/
#ifndef LLMC_FORWARD_CLOCK_CUH
#define LLMC_FORWARD_CLOCK_CUH

#include "llmc/gpu/gpu.cuh"

typedef struct {
    cudaEvent_t begin, end; // of the last forward pass that was timed
    int tokens;             // that it had; 0: none was timed in this update. Of the caller
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

// Around a forward pass. `record` is cudaEventRecordExternal in a graph, which so sets the event
// each time it is launched.
static inline void forward_clock_begin(ForwardClock* clock, unsigned record, const Gpu* gpu) {
    CUDA_CHECK(cudaEventRecordWithFlags(clock->begin, gpu->stream, record));
}
static inline void forward_clock_end(ForwardClock* clock, unsigned record, const Gpu* gpu) {
    CUDA_CHECK(cudaEventRecordWithFlags(clock->end, gpu->stream, record));
}

// The time for a token; 0: unknown. After the GPU was waited for.
static inline double forward_clock_pace_s(const ForwardClock* clock) {
    float ms = 0;
    if (clock->tokens == 0) {
        return 0;
    }
    if (cudaEventElapsedTime(&ms, clock->begin, clock->end) != cudaSuccess) {
        cudaGetLastError(); // clears the error: it is no reason to end a run
    }
    return ms / 1e3 / clock->tokens;
}

#endif
