/*
zero.cuh -- zero.h on GPUs: what moves between processes, and when.

Gradients are reduced on a stream of their own, beside the backward pass. In stage 2 a block leaves its gradients in one
of two buffers; its reduction reads that buffer while the next block fills the
other one. In stage 3 a pass collects the parameters of the next block while it computes one, in two buffers as well.
All of a micro-step's work joins the main stream at its end, so that a micro-step can be one CUDA graph.

    grads    stage 0, 1: full arrays                  G   written by the backward pass
             stage 2: group 0, then two blocks        G
    shard    (sharded)                                fp32   the sum of all micro-batches
    pieces   (W, shard of a group)                    G   what the processes send to this one
    params   stage 0 to 2: full arrays                T      read by the passes
             stage 3: group 0, then two blocks        T
    params_shard   stage 3: (sharded)                 T      what the update writes

With one process in stages 0 and 1 nothing moves, and shard is not there.

defines: ZeroGpu, ZERO_BLOCKS_IN_MEMORY, zero_open, zero_close, zero_parameter_bytes, zero_gradient_bytes, zero_parameter_layer,
         zero_forget_parameters, zero_parameters, zero_gradient_layer, zero_wait_for_buffer, zero_group_done, zero_idle_forward, zero_idle,
         zero_join, zero_reduce, zero_gradient, zero_update_gradient, zero_update_parameters, zero_gather_parameters,
         zero_collect
*/
#ifndef LLMC_ZERO_CUH
#define LLMC_ZERO_CUH

#include <assert.h>
#include <string.h>

#include "llmc/comm.h"
#include "llmc/comm_nccl.cuh"
#include "llmc/gpt2.h"
#include "llmc/gpu.cuh"
#include "llmc/zero.h"

enum { ZERO_BLOCKS_IN_MEMORY = 2, ZERO_THREADS_ = 256, ZERO_PER_THREAD_ = 4 };

typedef struct {
    ZeroPlan plan;
    GroupGpu group;
    Gpu main, comm; // the GPU with the main stream, and with that of what moves
    void* params;   // of the trainer, of type `dtype`
    Gradient grads; // of the trainer
    DType dtype;
    void* params_shard;              // stage 3
    float* shard;                    // NULL: the gradient stays in grads
    void* pieces;                    // NULL with one process
    int held[ZERO_BLOCKS_IN_MEMORY]; // stage 3: the block whose parameters each buffer will have; -1: none
    cudaEvent_t ready, done;         // gradients, or a buffer, may be read or overwritten; all is reduced
    cudaEvent_t sent[ZERO_BLOCKS_IN_MEMORY];     // a buffer of gradients may be overwritten
    cudaEvent_t gathered[ZERO_BLOCKS_IN_MEMORY]; // a buffer has its parameters
} ZeroGpu;

// ---- memory ----

static inline int zero_has_shard_(const ZeroPlan* plan) { return plan->size > 1 || plan->stage >= 2; }

// Room for the pieces of the largest group, and for a unit of fp32 of each process.
static inline size_t zero_pieces_bytes_(const ZeroPlan* plan, DType grads) {
    const size_t largest = zero_largest_group(plan) * dtype_bytes(grads);
    const size_t least = (size_t)plan->size * GPT2_SHARD_UNIT * sizeof(float);
    return plan->size == 1 ? 0 : largest > least ? largest : least;
}

// Bytes of all parameters in memory, and of all gradients, of the given types.
static inline size_t zero_parameter_bytes(const ZeroPlan* plan, DType type) {
    const size_t shard = plan->stage >= 3 ? zero_sharded_elements(plan) : 0;
    return (zero_params_elements(plan, ZERO_BLOCKS_IN_MEMORY) + shard) * dtype_bytes(type);
}
static inline size_t zero_gradient_bytes(const ZeroPlan* plan, DType type) {
    const size_t shard = zero_has_shard_(plan) ? zero_sharded_elements(plan) * sizeof(float) : 0;
    return zero_grads_elements(plan, ZERO_BLOCKS_IN_MEMORY) * dtype_bytes(type) + shard +
           zero_pieces_bytes_(plan, type);
}

static inline void zero_open_events_(ZeroGpu* z) {
    CUDA_CHECK(cudaEventCreateWithFlags(&z->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&z->done, cudaEventDisableTiming));
    for (int b = 0; b < ZERO_BLOCKS_IN_MEMORY; b++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&z->sent[b], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&z->gathered[b], cudaEventDisableTiming));
    }
}

// `params`, of type `dtype`, and `grads` are the trainer's, zero-filled. Collective.
static inline void zero_open(ZeroGpu* z, ZeroPlan plan, void* params, DType dtype, Gradient grads, Comm* comm,
                             const Gpu* gpu) {
    memset((void*)z, 0, sizeof(*z));
    z->plan = plan;
    z->params = params;
    z->dtype = dtype;
    z->grads = grads;
    z->main = z->comm = *gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&z->comm.stream, cudaStreamNonBlocking));
    zero_open_events_(z);
    if (plan.stage >= 3) {
        z->params_shard =
            gpu_alloc(zero_sharded_elements(&plan), dtype_bytes(dtype), "shard of the parameters");
    }
    if (zero_has_shard_(&plan)) {
        z->shard = (float*)gpu_alloc(zero_sharded_elements(&plan), sizeof(float), "shard of the gradient");
    }
    if (plan.size > 1) {
        z->pieces = gpu_alloc(zero_pieces_bytes_(&plan, grads.dtype), 1, "pieces of the gradient");
    }
    group_gpu_open(&z->group, comm);
}

// After all work on both streams.
static inline void zero_close(ZeroGpu* z) {
    group_gpu_close(&z->group);
    gpu_free(z->pieces);
    gpu_free(z->shard);
    gpu_free(z->params_shard);
    for (int b = 0; b < ZERO_BLOCKS_IN_MEMORY; b++) {
        CUDA_CHECK(cudaEventDestroy(z->gathered[b]));
        CUDA_CHECK(cudaEventDestroy(z->sent[b]));
    }
    CUDA_CHECK(cudaEventDestroy(z->done));
    CUDA_CHECK(cudaEventDestroy(z->ready));
    CUDA_CHECK(cudaStreamDestroy(z->comm.stream));
}

static inline char* zero_element_(void* array, DType dtype, size_t i) {
    return (char*)array + i * dtype_bytes(dtype);
}

// ---- parameters ----

// The layer under which the parameters of block l lie in `params`.
static inline int zero_parameter_layer(const ZeroPlan* plan, int l) {
    return plan->stage < 3 ? l : l % ZERO_BLOCKS_IN_MEMORY;
}

// Collects the parameters of block l from all processes, after all that is queued so far.
static inline void zero_gather_block_(ZeroGpu* z, int l) {
    const int b = l % ZERO_BLOCKS_IN_MEMORY;
    void* block = zero_element_(z->params, z->dtype, z->plan.once + (size_t)b * z->plan.block);
    const void* own = zero_element_(z->params_shard, z->dtype, zero_shard_begin(&z->plan, 1 + l));
    CUDA_CHECK(cudaEventRecord(z->ready, z->main.stream));
    CUDA_CHECK(cudaStreamWaitEvent(z->comm.stream, z->ready, 0));
    group_all_gather(block, own, zero_shard_elements(&z->plan, 1 + l), z->dtype, &z->group, z->comm.stream);
    CUDA_CHECK(cudaEventRecord(z->gathered[b], z->comm.stream));
    z->held[b] = l;
}

// Before a forward pass: the parameters of all blocks may have changed.
static inline void zero_forget_parameters(ZeroGpu* z) {
    for (int b = 0; b < ZERO_BLOCKS_IN_MEMORY; b++) {
        z->held[b] = -1;
    }
}

// Before block l, in a forward pass (direction 1) or a backward pass (-1): waits for its parameters, and starts to
// collect those of the block after it.
static inline void zero_parameters(ZeroGpu* z, int l, int direction) {
    const int next = l + direction, L = z->plan.groups - 1;
    if (z->plan.stage < 3) {
        return;
    }
    if (z->held[l % ZERO_BLOCKS_IN_MEMORY] != l) {
        zero_gather_block_(z, l);
    }
    CUDA_CHECK(cudaStreamWaitEvent(z->main.stream, z->gathered[l % ZERO_BLOCKS_IN_MEMORY], 0));
    if (0 <= next && next < L && z->held[next % ZERO_BLOCKS_IN_MEMORY] != next) {
        zero_gather_block_(z, next);
    }
}

// ---- a micro-step ----

// The layer under which the gradients of block l lie in `grads`.
static inline int zero_gradient_layer(const ZeroPlan* plan, int l) {
    return plan->stage < 2 ? l : l % ZERO_BLOCKS_IN_MEMORY;
}

// Gradients of group g, as the backward pass left them.
static inline void* zero_group_grads_(const ZeroGpu* z, int g) {
    const size_t block = (size_t)(g == 0 ? 0 : zero_gradient_layer(&z->plan, g - 1)) * z->plan.block;
    return zero_element_(z->grads.data, z->grads.dtype, g == 0 ? 0 : z->plan.once + block);
}

// Adds to shard (count), or sets it if `is_first`, the first `active` of the pieces (W, count), in order, in fp32.
// grid   count / 1024      block   256      shared   none
// moves  reads active G and writes 4 bytes an element, and reads 4 if not `is_first`. Bound by memory.
// order  fixed: that of the pieces
template <class G>
__global__ void __launch_bounds__(ZERO_THREADS_)
    zero_add_kernel_(float* shard, const G* pieces, size_t count, int active, int is_first) {
    const size_t i = ((size_t)blockIdx.x * ZERO_THREADS_ + threadIdx.x) * ZERO_PER_THREAD_;
    float sum[ZERO_PER_THREAD_];
#pragma unroll
    for (int k = 0; k < ZERO_PER_THREAD_; k++) {
        sum[k] = is_first ? 0.0f : shard[i + k];
    }
    for (int a = 0; a < active; a++) {
#pragma unroll
        for (int k = 0; k < ZERO_PER_THREAD_; k++) {
            sum[k] += to_float(pieces[(size_t)a * count + i + k]);
        }
    }
#pragma unroll
    for (int k = 0; k < ZERO_PER_THREAD_; k++) {
        shard[i + k] = sum[k];
    }
}

static inline dim3 zero_grid_(size_t count) {
    assert(count % (ZERO_THREADS_ * ZERO_PER_THREAD_) == 0);
    return dim3((unsigned)(count / (ZERO_THREADS_ * ZERO_PER_THREAD_)));
}

// Reduces group g on the stream of `gpu`. `sent` is recorded when its gradients may be overwritten; NULL: it is not.
template <class T>
static inline void zero_reduce_group_(ZeroGpu* z, int g, ZeroStep step, cudaEvent_t sent, const Gpu* gpu) {
    const size_t count = zero_shard_elements(&z->plan, g);
    void* pieces = zero_group_grads_(z, g);
    if (z->plan.size > 1) {
        group_all_to_all(z->pieces, pieces, count, z->grads.dtype, &z->group, gpu->stream);
        pieces = z->pieces;
    }
    if (sent && z->plan.size > 1) {
        CUDA_CHECK(cudaEventRecord(sent, gpu->stream));
    }
    GRADIENT_DISPATCH(z->grads, T,
                      launch(zero_add_kernel_<G>, zero_grid_(count), ZERO_THREADS_, 0, gpu,
                             z->shard + zero_shard_begin(&z->plan, g), (const G*)pieces, count, step.active,
                             (int)(step.micro_step == 0)));
    if (sent && z->plan.size == 1) {
        CUDA_CHECK(cudaEventRecord(sent, gpu->stream));
    }
}

// Before a kernel that is the first to write to the gradients of block l in a micro-step: what lay there must have
// been sent.
static inline void zero_wait_for_buffer(ZeroGpu* z, int l, int L) {
    if (z->plan.stage >= 2 && l >= 0 && l + ZERO_BLOCKS_IN_MEMORY < L) {
        CUDA_CHECK(cudaStreamWaitEvent(z->main.stream, z->sent[l % ZERO_BLOCKS_IN_MEMORY], 0));
    }
}

// After a backward pass has left the gradients of group g: in stage 2 their reduction, beside what follows.
template <class T> static inline void zero_group_done(ZeroGpu* z, int g, ZeroStep step) {
    if (z->plan.stage >= 2) {
        CUDA_CHECK(cudaEventRecord(z->ready, z->main.stream));
        CUDA_CHECK(cudaStreamWaitEvent(z->comm.stream, z->ready, 0));
        zero_reduce_group_<T>(z, g, step, g == 0 ? NULL : z->sent[(g - 1) % ZERO_BLOCKS_IN_MEMORY], &z->comm);
    }
}

// The end of a micro-step: what follows on the main stream comes after all reductions.
static inline void zero_join(ZeroGpu* z) {
    if (z->plan.stage >= 2) {
        CUDA_CHECK(cudaEventRecord(z->done, z->comm.stream));
        CUDA_CHECK(cudaStreamWaitEvent(z->main.stream, z->done, 0));
    }
}

// The part of a process that has no micro-batch: in a forward pass,
static inline void zero_idle_forward(ZeroGpu* z) {
    zero_forget_parameters(z);
    for (int l = 0; l < z->plan.groups - 1; l++) {
        zero_parameters(z, l, 1);
    }
}

// and in a whole micro-step.
template <class T> static inline void zero_idle(ZeroGpu* z, ZeroStep step) {
    zero_idle_forward(z);
    for (int l = z->plan.groups - 2; l >= 0; l--) {
        zero_parameters(z, l, -1);
        zero_group_done<T>(z, 1 + l, step);
    }
    zero_group_done<T>(z, 0, step);
    zero_join(z);
}

// ---- an update ----

// Rounds (count) to the type of the gradients.
// grid   count / 1024      block   256      shared   none
// moves  reads 4 bytes an element, writes G. Bound by memory.
// order  every element on its own
template <class G>
__global__ void __launch_bounds__(ZERO_THREADS_) zero_round_kernel_(G* to, const float* from) {
    const size_t i = ((size_t)blockIdx.x * ZERO_THREADS_ + threadIdx.x) * ZERO_PER_THREAD_;
#pragma unroll
    for (int k = 0; k < ZERO_PER_THREAD_; k++) {
        to[i + k] = from_float<G>(from[i + k]);
    }
}

// Sends the sums of stage 0 to all processes.
template <class T> static inline void zero_share_group_(ZeroGpu* z, int g) {
    const size_t count = zero_shard_elements(&z->plan, g);
    void* group = zero_group_grads_(z, g);
    void* own = zero_element_(group, z->grads.dtype, (size_t)z->plan.rank * count);
    GRADIENT_DISPATCH(z->grads, T,
                      launch(zero_round_kernel_<G>, zero_grid_(count), ZERO_THREADS_, 0, &z->main, (G*)own,
                             z->shard + zero_shard_begin(&z->plan, g)));
    group_all_gather(group, own, count, z->grads.dtype, &z->group, z->main.stream);
}

// After the last micro-step of an update: in stages 0 and 1 the reduction of all groups. `first` is the first
// micro-step, in which all had a micro-batch who have one at all.
template <class T> static inline void zero_reduce(ZeroGpu* z, ZeroStep first) {
    for (int g = 0; g < z->plan.groups && z->plan.stage < 2 && z->plan.size > 1; g++) {
        zero_reduce_group_<T>(z, g, first, NULL, &z->main);
        if (z->plan.stage == 0) {
            zero_share_group_<T>(z, g);
        }
    }
}

// The reduced gradient of which this process sums the squares: of its shards.
static inline Gradient zero_gradient(const ZeroGpu* z) {
    const Gradient shard = {z->shard, DTYPE_FP32};
    return z->shard ? shard : z->grads;
}

// And that of what it updates.
static inline Gradient zero_update_gradient(const ZeroGpu* z) {
    return z->plan.stage == 0 ? z->grads : zero_gradient(z);
}

// Where the update writes parameters: full arrays, or in stage 3 the shards.
static inline void* zero_update_parameters(const ZeroGpu* z) {
    return z->params_shard ? z->params_shard : z->params;
}

// After the update: sends each process's shards of the parameters to all; in stage 3 those of group 0.
static inline void zero_gather_parameters(ZeroGpu* z) {
    const int groups = z->plan.stage == 0 ? 0 : z->plan.stage < 3 ? z->plan.groups : 1;
    for (int g = 0; g < groups; g++) {
        const size_t count = zero_shard_elements(&z->plan, g);
        void* group = zero_element_(z->params, z->dtype, zero_group_begin(&z->plan, g));
        void* own =
            z->params_shard ? z->params_shard : zero_element_(group, z->dtype, (size_t)z->plan.rank * count);
        group_all_gather(group, own, count, z->dtype, &z->group, z->main.stream);
    }
}

// ---- copies of what is divided ----

// Collects `count` elements of each process's shard of group g, from element `at` of the shard on, in `group` on the
// host; NULL: not in this process.
static inline void zero_collect_chunk_(ZeroGpu* z, void* group, void* owned, DType type, int g, size_t at,
                                       size_t count) {
    const size_t shard = zero_shard_elements(&z->plan, g);
    const void* from = zero_element_(owned, type, zero_shard_begin(&z->plan, g) + at);
    void* own = zero_element_(z->pieces, type, (size_t)z->plan.rank * count);
    CUDA_CHECK(cudaMemcpyAsync(own, from, count * dtype_bytes(type), cudaMemcpyDefault, z->main.stream));
    group_all_gather(z->pieces, own, count, type, &z->group, z->main.stream); // (W, count)
    for (int r = 0; group && r < z->plan.size; r++) {
        CUDA_CHECK(cudaMemcpyAsync(zero_element_(group, type, (size_t)r * shard + at),
                                   zero_element_(z->pieces, type, (size_t)r * count),
                                   count * dtype_bytes(type), cudaMemcpyDeviceToHost, z->main.stream));
    }
}

// Collects an array of what each process updates, on the GPU or pinned: its groups first ... end - 1 in `groups` on the
// host; first = end: none in this process. Between updates: it passes through the buffer of pieces. Waits for the GPU.
static inline void zero_collect(ZeroGpu* z, void* groups, int first, int end, void* owned, DType type) {
    const int is_divided = z->plan.stage > 0 && z->plan.size > 1;
    const size_t room = zero_pieces_bytes_(&z->plan, z->grads.dtype) / dtype_bytes(type);
    const size_t most = room / (size_t)z->plan.size / GPT2_SHARD_UNIT * GPT2_SHARD_UNIT;
    const size_t begin = zero_group_begin(&z->plan, first);
    if (!is_divided && first < end) {
        const size_t count = zero_group_begin(&z->plan, end) - begin;
        CUDA_CHECK(cudaMemcpyAsync(groups, zero_element_(owned, type, begin), count * dtype_bytes(type),
                                   cudaMemcpyDefault, z->main.stream));
    }
    for (int g = 0; is_divided && g < z->plan.groups; g++) {
        const size_t shard = zero_shard_elements(&z->plan, g);
        void* group =
            first <= g && g < end ? zero_element_(groups, type, zero_group_begin(&z->plan, g) - begin) : NULL;
        for (size_t at = 0; at < shard; at += most) {
            zero_collect_chunk_(z, group, owned, type, g, at, shard - at < most ? shard - at : most);
        }
    }
    CUDA_CHECK(cudaStreamSynchronize(z->main.stream));
}

#endif
