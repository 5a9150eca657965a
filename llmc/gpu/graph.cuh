/*
graph.cuh -- captures repeated work as a CUDA graph: work that a stream got once is then launched as
a whole.

A micro-step is captured the second time it is due: the first time chooses algorithms and loads
kernels. A graph is valid as long as its arguments stay the same.
*/
#ifndef LLMC_GRAPH_CUH
#define LLMC_GRAPH_CUH

#include <stddef.h>

#include "llmc/gpu/gpu.cuh"

// Start and end a capture: in between, the stream records work without doing it; the end returns a
// graph, which the caller destroys.
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

// True during a capture of the stream.
static inline int graph_is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status == cudaStreamCaptureStatusActive;
}

// Graph of a micro-step; zeros at first.
typedef struct {
    int T, window;     // length of its sequences; tokens that a token attends to, or 0
    int times[2];      // how often it was due: without documents, with them
    float dloss;       // gradient of the losses in the captured graph,
    const int* starts; // and its documents, or NULL
    cudaGraphExec_t graph;
} StepGraph;

static inline void step_graph_close(StepGraph* g) {
    if (g->graph) {
        CUDA_CHECK(cudaGraphExecDestroy(g->graph));
    }
}

// Counts the micro-step, with sequences of T tokens. Returns whether to make it as a graph this
// time: it was made before.
static inline int step_graph_is_due_(StepGraph* g, int T, int window, const int* starts) {
    if (g->T != T || g->window != window) {
        step_graph_close(g);
        *g = StepGraph{T, window, {0, 0}, 0, NULL, NULL};
    }
    return g->times[starts != NULL]++ > 0;
}

// Does the work of a micro-step with sequences of T tokens and a window: as a graph from the second
// time on, if it `may_repeat`. Captures the graph, unless the last capture had the same arguments.
// Returns true if a graph has done the work.
template <class Work>
static inline int step_graph_run(StepGraph* g, int may_repeat, int T, int window, const int* starts,
                                 float dloss, Work work, const Gpu* gpu) {
    if (!may_repeat || !step_graph_is_due_(g, T, window, starts)) {
        work();
        return 0;
    }
    if (!g->graph || g->dloss != dloss || g->starts != starts) {
        graph_capture_begin(gpu);
        work();
        const cudaGraphExec_t graph = graph_capture_end(gpu);
        step_graph_close(g); // frees memory, which a capture may forbid
        g->graph = graph;
        g->dloss = dloss;
        g->starts = starts;
    }
    CUDA_CHECK(cudaGraphLaunch(g->graph, gpu->stream));
    return 1;
}

#endif
