/*
forward_clock.cuh -- times the last forward pass of a step on the GPU: how fast this rank is.
*/
#ifndef LLMC_FORWARD_CLOCK_CUH
#define LLMC_FORWARD_CLOCK_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/graph.cuh"

typedef struct {
    cudaEvent_t begin, end; // of the last forward pass that was timed
    int tokens;             // of that pass; 0: none was timed in this step
    int runs;               // the next pass is timed
} ForwardClock;

static inline void forward_clock_open(ForwardClock* clock) {
    clock->tokens = clock->runs = 0;
    CUDA_CHECK(cudaEventCreate(&clock->begin));
    CUDA_CHECK(cudaEventCreate(&clock->end));
}

static inline void forward_clock_close(ForwardClock* clock) {
    CUDA_CHECK(cudaEventDestroy(clock->end));
    CUDA_CHECK(cudaEventDestroy(clock->begin));
}

// Before each forward pass, even one that a graph makes: says its tokens; 0: it is not timed.
static inline void forward_clock_next(ForwardClock* clock, int tokens) {
    clock->runs = tokens > 0;
    clock->tokens = tokens > 0 ? tokens : clock->tokens;
}

// Records an event; a graph records it at every launch.
static inline void forward_clock_record_(cudaEvent_t event, const Gpu* gpu) {
    const int is_captured = graph_is_capturing(gpu->stream);
    CUDA_CHECK(cudaEventRecordWithFlags(event, gpu->stream,
                                        is_captured ? cudaEventRecordExternal : cudaEventRecordDefault));
}

// Record the start and end of a forward pass, if it is timed.
static inline void forward_clock_begin(ForwardClock* clock, const Gpu* gpu) {
    if (clock->runs) {
        forward_clock_record_(clock->begin, gpu);
    }
}
static inline void forward_clock_end(ForwardClock* clock, const Gpu* gpu) {
    if (clock->runs) {
        forward_clock_record_(clock->end, gpu);
    }
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
