// cusim_graph.cpp -- stream capture and graphs.
//
// While a stream is captured, its work becomes nodes of a graph. An event that is recorded in it
// and waited for by a second stream brings that stream into the same capture (a fork); a wait in
// the other direction joins it again. At the end everything captured must be joined to the stream
// where the capture started. A node depends on the one before it in its stream and on the events
// its stream has waited for, on nothing else: lazy and random orders run a graph's nodes in other
// orders that these dependencies allow.
#include "cusim_stream.h"

#include <algorithm>
#include <memory>

struct Node {
    Operation operation;
    std::vector<int> after; // indexes of earlier nodes
};

struct CUgraph_st {
    std::vector<Node> nodes;
};
struct CUgraphExec_st {
    std::shared_ptr<const std::vector<Node>> nodes; // also held by launches that have not run yet
};

struct Capture {
    unsigned long number;
    cudaStreamCaptureMode mode;
    CUstream_st* origin;
    CUgraph_st* graph;
    bool spoiled; // by a call that is not allowed
};

static std::vector<Capture*>& captures() { // in progress
    static auto* list = new std::vector<Capture*>;
    return *list;
}

static Capture* capture_by_number(unsigned long number) {
    for (Capture* capture : captures()) {
        if (capture->number == number) {
            return capture;
        }
    }
    return nullptr;
}

// ---- what a capture forbids ----

bool capture_spoil(CUstream_st* stream) {
    if (stream->capture) {
        stream->capture->spoiled = true;
    }
    return stream->capture != nullptr;
}

cudaError_t synchronizing_call() {
    bool forbidden = false;
    for (Capture* capture : captures()) {
        if (capture->mode != cudaStreamCaptureModeRelaxed) {
            capture->spoiled = forbidden = true;
        }
    }
    return forbidden ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// The legacy stream would wait for streams that are captured, unless they are non-blocking.
cudaError_t stream_accepts(cudaStream_t handle) {
    const CUstream_st* stream = stream_of(handle);
    if (stream->capture) {
        return stream->capture->spoiled ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
    }
    if (stream != stream_of(nullptr)) {
        return cudaSuccess;
    }
    for (CUstream_st* other : all_streams()) {
        if (other->capture && !other->nonblocking) {
            capture_spoil(other);
            return failed(cudaErrorStreamCaptureImplicit);
        }
    }
    return cudaSuccess;
}

// ---- capturing ----

void capture_add(CUstream_st* stream, Operation operation) {
    std::vector<Node>& nodes = stream->capture->graph->nodes;
    nodes.push_back({std::move(operation), stream->after});
    stream->after.assign(1, (int)nodes.size() - 1);
}

void capture_record(CUstream_st* stream, CUevent_st* event) {
    event->capture = stream->capture->number;
    event->after = stream->after;
    event->point = nullptr;
}

static void add_dependencies(CUstream_st* stream, const std::vector<int>& nodes) {
    for (int node : nodes) {
        if (std::find(stream->after.begin(), stream->after.end(), node) == stream->after.end()) {
            stream->after.push_back(node);
        }
    }
}

// Waits where the event, the stream or both belong to a capture.
cudaError_t capture_wait(CUstream_st* stream, CUevent_st* event) {
    if (!event->capture) {
        if (!event->point) {
            return cudaSuccess; // never recorded
        }
        capture_spoil(stream); // a graph waits for outside work only with cudaEventWaitExternal
        return failed(cudaErrorStreamCaptureIsolation);
    }
    Capture* capture = capture_by_number(event->capture);
    if (!capture) {
        capture_spoil(stream);
        return failed(cudaErrorCapturedEvent);
    }
    if (capture->spoiled) {
        return failed(cudaErrorStreamCaptureInvalidated);
    }
    if (stream->capture && stream->capture != capture) {
        stream->capture->spoiled = capture->spoiled = true;
        return failed(cudaErrorStreamCaptureMerge);
    }
    if (stream == stream_of(nullptr)) {
        capture->spoiled = true;
        return failed(cudaErrorStreamCaptureImplicit);
    }
    stream->capture = capture;
    add_dependencies(stream, event->after);
    return cudaSuccess;
}

// Returns true if the stream where the capture started comes after every node.
static bool is_joined(const Capture* capture) {
    const std::vector<Node>& nodes = capture->graph->nodes;
    std::vector<char> reached(nodes.size(), 0);
    for (int node : capture->origin->after) {
        reached[(size_t)node] = 1;
    }
    for (size_t i = nodes.size(); i-- > 0;) {
        if (!reached[i]) {
            // nodes point to earlier ones, so no later node can reach this one any more
            return false;
        }
        for (int node : nodes[i].after) {
            reached[(size_t)node] = 1;
        }
    }
    return true;
}

static void release_streams(const Capture* capture) {
    for (CUstream_st* stream : all_streams()) {
        if (stream->capture == capture) {
            stream->capture = nullptr;
            stream->after.clear();
        }
    }
}

extern "C" {

cudaError_t CUDARTAPI cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    static unsigned long number = 0;
    CUstream_st* stream = stream_of(handle);
    if (stream == stream_of(nullptr)) {
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    if (stream->capture) {
        return failed(cudaErrorIllegalState);
    }
    stream->capture = new Capture{++number, mode, stream, new CUgraph_st(), false};
    captures().push_back(stream->capture);
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    Capture* capture = stream_of(handle)->capture;
    *graph = nullptr;
    if (!capture) {
        return failed(cudaErrorIllegalState);
    }
    if (capture->origin != stream_of(handle)) {
        capture->spoiled = true;
        return failed(cudaErrorStreamCaptureUnmatched);
    }
    const cudaError_t error = capture->spoiled      ? cudaErrorStreamCaptureInvalidated
                              : !is_joined(capture) ? cudaErrorStreamCaptureUnjoined
                                                    : cudaSuccess;
    release_streams(capture);
    captures().erase(std::find(captures().begin(), captures().end(), capture));
    if (error == cudaSuccess) {
        *graph = capture->graph;
    } else {
        delete capture->graph;
    }
    delete capture;
    return error == cudaSuccess ? cudaSuccess : failed(error);
}

cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    const Capture* capture = stream_of(handle)->capture;
    *status = !capture           ? cudaStreamCaptureStatusNone
              : capture->spoiled ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
}

// ---- running ----

// Chooses which of the ready nodes runs.
static size_t choose(const std::vector<int>& ready) {
    switch (config.streams) {
    case STREAMS_EAGER:
        return 0;
    case STREAMS_LAZY:
        return ready.size() - 1;
    default:
        return random_below((uint32_t)ready.size());
    }
}

// Launch of a graph.
struct Launch {
    std::shared_ptr<const std::vector<Node>> nodes;
    std::vector<Steps> steps;             // steps of nodes that may have to wait
    std::vector<std::vector<int>> before; // nodes that wait for this one
    std::vector<size_t> missing;          // number of nodes that each one waits for
    std::vector<int> ready;
    size_t left; // nodes still to run
};

static std::shared_ptr<Launch> launch_begin(std::shared_ptr<const std::vector<Node>> nodes,
                                            CUstream_st* stream) {
    const auto l = std::make_shared<Launch>();
    l->nodes = std::move(nodes);
    l->left = l->nodes->size();
    l->steps.resize(l->left);
    l->before.resize(l->left);
    l->missing.resize(l->left);
    for (size_t i = 0; i < l->left; i++) {
        const Node& node = (*l->nodes)[i];
        if (node.operation.begin) {
            l->steps[i] = node.operation.begin(stream);
        }
        l->missing[i] = node.after.size();
        for (int other : node.after) {
            l->before[(size_t)other].push_back((int)i);
        }
        if (l->missing[i] == 0) {
            l->ready.push_back((int)i);
        }
    }
    return l;
}

// Does a step of a ready node. A finished node makes others ready.
static Step node_step(Launch* l, size_t chosen) {
    const size_t i = (size_t)l->ready[chosen];
    if (l->steps[i]) {
        const Step step = l->steps[i]();
        if (step != STEP_DONE) {
            return step;
        }
    } else {
        operation_run((*l->nodes)[i].operation);
    }
    l->ready.erase(l->ready.begin() + (long)chosen);
    for (int node : l->before[i]) {
        if (--l->missing[(size_t)node] == 0) {
            l->ready.push_back(node);
        }
    }
    l->left--;
    return STEP_MOVED;
}

// Does a step of a launch. If the chosen node cannot progress before other processes do, perhaps
// another one can.
static Step launch_step(Launch* l) {
    if (l->left == 0) {
        return STEP_DONE;
    }
    Step step = node_step(l, choose(l->ready));
    for (size_t i = 0; step == STEP_STUCK && i < l->ready.size(); i++) {
        step = node_step(l, i);
    }
    return step;
}

extern "C" {

cudaError_t CUDARTAPI cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
    *out = new CUgraphExec_st{std::make_shared<const std::vector<Node>>(graph->nodes)};
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph,
                                                    unsigned long long) {
    return cudaGraphInstantiate(out, graph, 0);
}
cudaError_t CUDARTAPI cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t CUDARTAPI cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    const cudaError_t error = stream_accepts(stream);
    if (error == cudaSuccess) {
        enqueue_steps(stream, [nodes = executable->nodes](CUstream_st* on) {
            return [launch = launch_begin(nodes, on)] { return launch_step(launch.get()); };
        });
    }
    return error;
}

// Returns only the number of nodes.
cudaError_t CUDARTAPI cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    if (nodes) {
        return failed(cudaErrorNotSupported);
    }
    *count = graph->nodes.size();
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
// Frees memory: no manual says that a capture allows it.
cudaError_t CUDARTAPI cudaGraphExecDestroy(cudaGraphExec_t executable) {
    const cudaError_t error = synchronizing_call();
    if (error != cudaSuccess) {
        return error;
    }
    delete executable;
    return cudaSuccess;
}
}
