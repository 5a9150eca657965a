/*
graph.cuh -- work that repeats as a CUDA graph: what a stream is given is captured once, then
launched as a whole.

A micro-step is captured when it is done for the second time: the first time chooses algorithms and
loads kernels. The graph fits as long as its arguments stay what they were.
*/
#ifndef LLMC_GRAPH_CUH
#define LLMC_GRAPH_CUH

#include <stddef.h>

#include "llmc/gpu/gpu.cuh"

// From here on the stream keeps what it is given, and does nothing; the end makes a graph of it,
// which the caller destroys.
static inline void graph_capture_begin(const Gpu* gpu) {
    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
}
static inline cudaGraphExec_t graph_capture_end(const Gpu* gpu) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return executable;
}

// A micro-step; zeros at first.
typedef struct {
    int times[2];      // that it was due: without documents, with them
    float dloss;       // the graph was captured for this gradient of the losses,
    const int* starts; // and with or without documents
    cudaGraphExec_t graph;
} StepGraph;

// Whether the micro-step is to be a graph this time: it was done before.
static inline int step_graph_is_due(StepGraph* g, const int* starts) {
    return g->times[starts != NULL]++ > 0;
}

// Whether there is a graph for these arguments.
static inline int step_graph_fits(const StepGraph* g, float dloss, const int* starts) {
    return g->graph && g->dloss == dloss && g->starts == starts;
}

// Takes a graph that was captured for these arguments, instead of the one before.
static inline void step_graph_set(StepGraph* g, cudaGraphExec_t graph, float dloss, const int* starts) {
    if (g->graph) {
        CUDA_CHECK(cudaGraphExecDestroy(g->graph));
    }
    g->graph = graph;
    g->dloss = dloss;
    g->starts = starts;
}

static inline void step_graph_close(StepGraph* g) {
    if (g->graph) {
        CUDA_CHECK(cudaGraphExecDestroy(g->graph));
    }
}

#endif
