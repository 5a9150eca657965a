/*
attention_cudnn.cuh -- attention.cuh's functions by cuDNN, for bf16 and fp16: `make USE_CUDNN=1`.

AttentionCudnn makes its plans and allocates its workspace when it is opened, for B sequences of
exactly T tokens. The kernels of attention.cuh handle everything else: other shapes, generation,
documents (starts), gathered keys, a cap of scores, fp32, and what cuDNN refuses; attention_note
says which case applies.

Queries, keys and values are read in place, as (B, NH, T, HS) and (B, KV, T, HS) with the strides of
qkv (B, T, QKV). cuDNN's statistics are our lse, natural logarithms in the same layout (B, NH, T),
so each backward pass can follow either forward pass.

The backward pass is set to be deterministic. For this, cuDNN before 9.25 needs a matrix of
probabilities in its workspace on Hopper, 2 B NH T T bytes: 1.5 GiB for GPT-2 124M at B = 64. The
memory plan of a run counts that much for any version.

Run on an H200 with cuDNN 9.19 and cudnn-frontend 1.32.
*/
#ifndef LLMC_ATTENTION_CUDNN_CUH
#define LLMC_ATTENTION_CUDNN_CUH

#define CUDNN_FRONTEND_SKIP_JSON_LIB // not needed here, and slow to compile
#include <cstring>                   // missing in cudnn-frontend
#include <cudnn_frontend.h>

#define CUDNN_CHECK(call)                                                                                    \
    do {                                                                                                     \
        const cudnnStatus_t status_ = (call);                                                                \
        CHECK_CALL(status_ == CUDNN_STATUS_SUCCESS, "cuDNN: %s: %s", #call, cudnnGetErrorString(status_));   \
    } while (0)

#define CUDNN_FRONTEND_CHECK(call)                                                                           \
    do {                                                                                                     \
        cudnn_frontend::error_t error_ = (call);                                                             \
        CHECK(error_.is_good(), "cuDNN: %s: %s", #call, error_.get_message().c_str());                       \
    } while (0)

typedef cudnn_frontend::graph::Graph CudnnGraph;
typedef std::shared_ptr<cudnn_frontend::graph::Tensor_attributes> CudnnTensor;

// Plans of both passes over micro-batches of (B, T); both are NULL if cuDNN refuses one of them.
typedef struct {
    AttentionFlash flash; // handles what cuDNN does not
    AttentionSizes sizes;
    DType dtype;
    cudnnHandle_t handle;
    CudnnGraph *forward, *backward;
    void* workspace; // shared by both passes, one at a time
    char note[512];
} AttentionCudnn;

// Names of the tensors in the graphs.
enum { CUDNN_Q = 1, CUDNN_K, CUDNN_V, CUDNN_OUT, CUDNN_LSE, CUDNN_DOUT, CUDNN_DQ, CUDNN_DK, CUDNN_DV };

// Describes `tensor` as (B, heads, T, HS) in rows of `row` elements: Q for out, QKV for qkv.
static inline void attention_cudnn_heads_(cudnn_frontend::graph::Tensor_attributes& tensor, int name,
                                          const AttentionCudnn* a, int64_t heads, int64_t row) {
    const int64_t T = a->sizes.T, HS = a->sizes.HS;
    tensor.set_uid(name).set_dim({a->sizes.B, heads, T, HS}).set_stride({T * row, HS, row, 1});
}

static inline CudnnTensor attention_cudnn_input_(CudnnGraph* graph, int name, const AttentionCudnn* a,
                                                 int64_t heads, int64_t row) {
    cudnn_frontend::graph::Tensor_attributes tensor;
    attention_cudnn_heads_(tensor, name, a, heads, row);
    return graph->tensor(tensor);
}

static inline void attention_cudnn_output_(const CudnnTensor& tensor, int name, const AttentionCudnn* a,
                                           int64_t heads, int64_t row) {
    attention_cudnn_heads_(*tensor, name, a, heads, row);
    tensor->set_output(true);
}

static inline void attention_cudnn_lse_(cudnn_frontend::graph::Tensor_attributes& tensor,
                                        const AttentionCudnn* a) {
    const int64_t T = a->sizes.T, NH = a->sizes.NH;
    tensor.set_uid(CUDNN_LSE).set_dim({a->sizes.B, NH, T, 1}).set_stride({NH * T, T, 1, 1});
    tensor.set_data_type(cudnn_frontend::DataType_t::FLOAT);
}

static inline CudnnGraph* attention_cudnn_graph_(DType dtype) {
    typedef cudnn_frontend::DataType_t Type;
    CudnnGraph* graph = new CudnnGraph();
    graph->set_io_data_type(dtype == DTYPE_BF16 ? Type::BFLOAT16 : Type::HALF);
    graph->set_intermediate_data_type(Type::FLOAT).set_compute_data_type(Type::FLOAT);
    return graph;
}

// Returns the attributes of both passes: causal, scores times 1 / root.
template <class Attributes> static inline Attributes attention_cudnn_attributes_(const AttentionCudnn* a) {
    Attributes attributes;
    attributes.set_diagonal_alignment(cudnn_frontend::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0)
        .set_attn_scale(1.0f / a->sizes.root);
    return attributes;
}

static inline CudnnGraph* attention_cudnn_forward_graph_(const AttentionCudnn* a) {
    typedef cudnn_frontend::graph::SDPA_attributes Attributes;
    CudnnGraph* graph = attention_cudnn_graph_(a->dtype);
    const int64_t row = attention_qkv_size(a->sizes), NH = a->sizes.NH, KV = a->sizes.KV;
    const CudnnTensor q = attention_cudnn_input_(graph, CUDNN_Q, a, NH, row),
                      k = attention_cudnn_input_(graph, CUDNN_K, a, KV, row),
                      v = attention_cudnn_input_(graph, CUDNN_V, a, KV, row);
    Attributes attributes = attention_cudnn_attributes_<Attributes>(a);
    attributes.set_generate_stats(true);
    const auto results = graph->sdpa(q, k, v, attributes);
    attention_cudnn_output_(results[0], CUDNN_OUT, a, NH, attention_queries_size(a->sizes));
    attention_cudnn_lse_(*results[1], a);
    results[1]->set_output(true);
    return graph;
}

static inline CudnnGraph* attention_cudnn_backward_graph_(const AttentionCudnn* a) {
    typedef cudnn_frontend::graph::SDPA_backward_attributes Attributes;
    CudnnGraph* graph = attention_cudnn_graph_(a->dtype);
    const int64_t row = attention_qkv_size(a->sizes), NH = a->sizes.NH, KV = a->sizes.KV,
                  Q = attention_queries_size(a->sizes);
    const CudnnTensor q = attention_cudnn_input_(graph, CUDNN_Q, a, NH, row),
                      k = attention_cudnn_input_(graph, CUDNN_K, a, KV, row),
                      v = attention_cudnn_input_(graph, CUDNN_V, a, KV, row),
                      out = attention_cudnn_input_(graph, CUDNN_OUT, a, NH, Q),
                      dout = attention_cudnn_input_(graph, CUDNN_DOUT, a, NH, Q);
    cudnn_frontend::graph::Tensor_attributes lse;
    attention_cudnn_lse_(lse, a);
    Attributes attributes = attention_cudnn_attributes_<Attributes>(a);
    attributes.set_deterministic_algorithm(true);
    const auto results = graph->sdpa_backward(q, k, v, out, dout, graph->tensor(lse), attributes);
    for (int i = 0; i < 3; i++) {
        attention_cudnn_output_(results[i], CUDNN_DQ + i, a, i == 0 ? NH : KV, row);
    }
    return graph;
}

// Returns 1 if cuDNN accepts the graph; if not, 0 and its reason in the note.
static inline int attention_cudnn_plan_(AttentionCudnn* a, CudnnGraph* graph, const char* pass) {
    cudnn_frontend::error_t error = graph->build(a->handle, {cudnn_frontend::HeurMode_t::A});
    if (error.is_bad()) {
        snprintf(a->note, sizeof(a->note), "own kernels: cuDNN refuses the %s pass: %s", pass,
                 error.get_message().c_str());
        a->note[strcspn(a->note, "\n")] = '\0';
    }
    return error.is_good();
}

static inline void attention_cudnn_drop_(AttentionCudnn* a) {
    delete a->forward;
    delete a->backward;
    a->forward = a->backward = NULL;
}

static inline void attention_cudnn_allocate_(AttentionCudnn* a, Memory* memory) {
    int64_t forward = 0, backward = 0;
    CUDNN_FRONTEND_CHECK(a->forward->get_workspace_size(forward));
    CUDNN_FRONTEND_CHECK(a->backward->get_workspace_size(backward));
    const size_t bytes = (size_t)(forward > backward ? forward : backward);
    a->workspace = memory_take(memory, "scratch: cuDNN's workspace", MEMORY_DEVICE, bytes);
    snprintf(a->note, sizeof(a->note), "cuDNN %s, workspace %.1f MiB",
             cudnn_frontend::detail::convert_version_to_str(cudnnGetVersion()).c_str(),
             (double)bytes / (1 << 20));
}

// Opens attention on the current device, for micro-batches of these sizes and of type X. Only cuDNN
// knows the size of its workspace: a dry ledger counts the most that it may take. Its tiles have up
// to 128 rows, and its parts are aligned to 256 bytes.
template <class X>
static inline void attention_gpu_open(AttentionCudnn* a, Memory* memory, AttentionSizes sizes, int shortest) {
    memset((void*)a, 0, sizeof(*a));
    attention_gpu_open<X>(&a->flash, memory, sizes, shortest);
    a->sizes = sizes;
    a->dtype = DTYPE_OF(X);
    if (a->dtype == DTYPE_FP32 || sizes.cap > 0) {
        snprintf(a->note, sizeof(a->note),
                 "own kernels: cuDNN's are for bf16 and fp16, without a cap of scores");
        return;
    }
    if (memory_is_dry(memory)) {
        const size_t heads = (size_t)sizes.B * sizes.NH, rows = (size_t)(sizes.T + 127) / 128 * 128;
        memory_count(memory, "scratch: cuDNN's workspace", MEMORY_DEVICE,
                     2 * heads * rows * (rows + 2) + 1024);
        return;
    }
    CUDNN_CHECK(cudnnCreate(&a->handle));
    a->forward = attention_cudnn_forward_graph_(a);
    a->backward = attention_cudnn_backward_graph_(a);
    if (attention_cudnn_plan_(a, a->forward, "forward") &&
        attention_cudnn_plan_(a, a->backward, "backward")) {
        attention_cudnn_allocate_(a, memory);
    } else {
        attention_cudnn_drop_(a);
    }
}

static inline void attention_gpu_by(AttentionCudnn* a, AttentionInstructions by) {
    attention_gpu_by(&a->flash, by);
    if (by != ATTENTION_DEFAULT) {
        snprintf(a->note, sizeof(a->note), "own kernels, by %s", by == ATTENTION_BY_WGMMA ? "wgmma" : "mma");
    }
}

static inline void attention_gpu_way(AttentionCudnn* a, int way) { attention_gpu_way(&a->flash, way); }

// Own kernels race only where cuDNN does nothing.
template <class X>
static inline int attention_ways(const AttentionCudnn* a, AttentionSizes sizes, int is_backward) {
    return a->forward && a->flash.by == ATTENTION_DEFAULT ? 1
                                                          : attention_ways<X>(&a->flash, sizes, is_backward);
}
static inline AttentionInstructions attention_by(const AttentionCudnn* a) { return a->flash.by; }

static inline void attention_gpu_close(AttentionCudnn* a) {
    attention_cudnn_drop_(a);
    if (a->handle) {
        CUDNN_CHECK(cudnnDestroy(a->handle));
    }
}

static inline float* attention_sums(const AttentionCudnn* a) { return a->flash.sums; }

// Returns a note for the start of a run: which code computes attention of full micro-batches.
static inline const char* attention_note(const AttentionCudnn* a) { return a->note; }

template <class X> static inline int attention_cudnn_takes_(const AttentionCudnn* a, AttentionSizes sizes) {
    return a->forward && a->flash.by == ATTENTION_DEFAULT && a->dtype == DTYPE_OF(X) &&
           attention_same_sizes(a->sizes, sizes);
}

static inline void attention_cudnn_run_(const AttentionCudnn* a, const CudnnGraph* graph,
                                        std::unordered_map<int64_t, void*> tensors, const Gpu* gpu) {
    CUDNN_CHECK(cudnnSetStream(a->handle, gpu->stream));
    CUDNN_FRONTEND_CHECK(graph->execute(a->handle, tensors, a->workspace));
}

template <class X>
static inline void attention_forward(const AttentionPassGpu<X>* pass, const AttentionCudnn* a,
                                     const Gpu* gpu) {
    if (pass->starts || pass->kv || !attention_cudnn_takes_<X>(a, pass->sizes)) {
        attention_forward(pass, &a->flash, gpu);
        return;
    }
    // cuDNN's list of tensors is not const
    X* q = const_cast<X*>(pass->qkv);
    X *k = q + attention_queries_size(pass->sizes), *v = k + attention_keys_size(pass->sizes);
    attention_cudnn_run_(
        a, a->forward,
        {{CUDNN_Q, q}, {CUDNN_K, k}, {CUDNN_V, v}, {CUDNN_OUT, pass->out}, {CUDNN_LSE, pass->lse}}, gpu);
}

template <class X>
static inline void attention_backward(const AttentionGradientsGpu<X>* d, const AttentionPassGpu<X>* pass,
                                      AttentionCudnn* a, const Gpu* gpu) {
    const AttentionSizes sizes = pass->sizes;
    if (pass->starts || pass->kv || !attention_cudnn_takes_<X>(a, sizes)) {
        attention_backward(d, pass, &a->flash, gpu);
        return;
    }
    X* q = const_cast<X*>(pass->qkv);
    // first columns
    const int k = attention_queries_size(sizes), v = k + attention_keys_size(sizes);
    attention_cudnn_run_(a, a->backward,
                         {{CUDNN_Q, q},
                          {CUDNN_K, q + k},
                          {CUDNN_V, q + v},
                          {CUDNN_OUT, pass->out},
                          {CUDNN_LSE, pass->lse},
                          {CUDNN_DOUT, const_cast<X*>(d->dout)},
                          {CUDNN_DQ, d->dqkv},
                          {CUDNN_DK, d->dqkv + k},
                          {CUDNN_DV, d->dqkv + v}},
                         gpu);
    if (d->dbias.data) { // groups of at least 64 rows need no more floats than the tiles' sums
        column_sums(d->dbias, a->flash.sums, (const X*)d->dqkv, sizes.B * sizes.T, attention_qkv_size(sizes),
                    d->mode, gpu);
    }
}

#endif
