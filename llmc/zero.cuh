/*
zero.cuh -- zero.h on GPUs: what moves between processes, and when.

Gradients are reduced on a stream of their own, beside the backward pass. In stage 2 a block leaves its gradients in one
of two buffers; its reduction reads that buffer while the next block fills the other one. All of a micro-step's
work joins the main stream at its end, so that a micro-step can be one CUDA graph.

    grads    stage 0, 1: full arrays                  G   written by the backward pass
             stage 2: group 0, then two blocks        G
    shard    (sharded)                                fp32   the sum of all micro-batches
    pieces   (W, shard of a group)                    G   what the processes send to this one
    params   full arrays                              T

With one process in stages 0 and 1 nothing moves, and shard is not there.

defines: ZeroGpu, zero_open, zero_close, zero_buffer_bytes, zero_gradient_layer, zero_wait_for_buffer, zero_group_done,
         zero_idle, zero_join, zero_reduce, zero_gradient, zero_update_gradient, zero_gather_parameters,
         zero_gather_master, zero_copy_owned
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
    Gpu main, comm; // the GPU with the main stream, and with that of reductions
    Gradient grads; // of the trainer
    float* shard;   // NULL: the gradient stays in grads
    void* pieces;   // NULL with one process
    cudaEvent_t ready, done,
        sent[ZERO_BLOCKS_IN_MEMORY]; // gradients are there; all is reduced; a buffer is free
} ZeroGpu;

// ---- memory ----

static inline int zero_has_shard_(const ZeroPlan* plan) { return plan->size > 1 || plan->stage >= 2; }

// Room for the pieces of the largest group, and for a unit of fp32 of each process.
static inline size_t zero_pieces_bytes_(const ZeroPlan* plan, DType grads) {
    const size_t largest = (plan->once > plan->block ? plan->once : plan->block) * dtype_bytes(grads);
    const size_t least = (size_t)plan->size * GPT2_SHARD_UNIT * sizeof(float);
    return plan->size == 1 ? 0 : largest > least ? largest : least;
}

// Bytes of the shard and of the pieces; gradients of the given type.
static inline size_t zero_buffer_bytes(const ZeroPlan* plan, DType grads) {
    return (zero_has_shard_(plan) ? zero_sharded_elements(plan) * sizeof(float) : 0) +
           zero_pieces_bytes_(plan, grads);
}

// `grads` are the trainer's, zero-filled. Collective.
static inline void zero_open(ZeroGpu* z, ZeroPlan plan, Gradient grads, Comm* comm, const Gpu* gpu) {
    memset((void*)z, 0, sizeof(*z));
    z->plan = plan;
    z->grads = grads;
    z->main = z->comm = *gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&z->comm.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&z->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&z->done, cudaEventDisableTiming));
    for (int b = 0; b < ZERO_BLOCKS_IN_MEMORY; b++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&z->sent[b], cudaEventDisableTiming));
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
    for (int b = 0; b < ZERO_BLOCKS_IN_MEMORY; b++) {
        CUDA_CHECK(cudaEventDestroy(z->sent[b]));
    }
    CUDA_CHECK(cudaEventDestroy(z->done));
    CUDA_CHECK(cudaEventDestroy(z->ready));
    CUDA_CHECK(cudaStreamDestroy(z->comm.stream));
}

// ---- a micro-step ----

// The layer under which the gradients of block l lie in `grads`.
static inline int zero_gradient_layer(const ZeroPlan* plan, int l) {
    return plan->stage < 2 ? l : l % ZERO_BLOCKS_IN_MEMORY;
}

static inline char* zero_element_(void* array, DType dtype, size_t i) {
    return (char*)array + i * dtype_bytes(dtype);
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

// The part of a process that has no micro-batch in a micro-step.
template <class T> static inline void zero_idle(ZeroGpu* z, ZeroStep step) {
    for (int g = z->plan.groups - 1; g >= 0; g--) {
        zero_group_done<T>(z, g, step);
    }
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

// After the update: sends each process's shards of the parameters, T, to all.
template <class T> static inline void zero_gather_parameters(ZeroGpu* z, T* params) {
    for (int g = 0; g < z->plan.groups && z->plan.stage > 0; g++) {
        T* group = params + zero_group_begin(&z->plan, g);
        const size_t count = zero_shard_elements(&z->plan, g);
        group_all_gather(group, group + (size_t)z->plan.rank * count, count, DTYPE_OF(T), &z->group,
                         z->main.stream);
    }
}

// ---- copies of what is divided ----

// Copies what this process updates from a full array to an array of its own, both fp32 on the host.
static inline void zero_copy_owned(const ZeroPlan* plan, float* owned, const float* full) {
    for (int g = 0; g < plan->groups; g++) {
        const size_t count = plan->stage == 0 ? zero_group_elements(plan, g) : zero_shard_elements(plan, g);
        const size_t first = plan->stage == 0 ? 0 : (size_t)plan->rank * count;
        const size_t at = plan->stage == 0 ? zero_group_begin(plan, g) : zero_shard_begin(plan, g);
        memcpy(owned + at, full + zero_group_begin(plan, g) + first, count * sizeof(float));
    }
}

// Collects `count` elements of each process's shard of group g, from element `at` of the shard on, in `full`, fp32 on
// the host; NULL: not in this process.
static inline void zero_gather_chunk_(ZeroGpu* z, float* full, const float* owned, int g, size_t at,
                                      size_t count) {
    const size_t shard = zero_shard_elements(&z->plan, g);
    float* all = (float*)z->pieces; // (W, count)
    group_all_gather(all, owned + zero_shard_begin(&z->plan, g) + at, count, DTYPE_FP32, &z->group,
                     z->main.stream);
    for (int r = 0; full && r < z->plan.size; r++) {
        CUDA_CHECK(cudaMemcpyAsync(full + zero_group_begin(&z->plan, g) + (size_t)r * shard + at,
                                   all + (size_t)r * count, count * sizeof(float), cudaMemcpyDeviceToHost,
                                   z->main.stream));
    }
}

// Collects an array of what each process updates, fp32 on the GPU, in `full` on the host, of the processes where it
// is not NULL. Between updates: it passes through the buffer of pieces. Waits for the GPU.
static inline void zero_gather_master(ZeroGpu* z, float* full, const float* owned) {
    const int is_divided = z->plan.stage > 0 && z->plan.size > 1;
    const size_t room = zero_pieces_bytes_(&z->plan, z->grads.dtype) / sizeof(float);
    const size_t most = room / (size_t)z->plan.size / GPT2_SHARD_UNIT * GPT2_SHARD_UNIT;
    if (!is_divided && full) {
        CUDA_CHECK(cudaMemcpyAsync(full, owned, zero_owned_elements(&z->plan) * sizeof(float),
                                   cudaMemcpyDeviceToHost, z->main.stream));
    }
    for (int g = 0; is_divided && g < z->plan.groups; g++) {
        const size_t shard = zero_shard_elements(&z->plan, g);
        for (size_t at = 0; at < shard; at += most) {
            zero_gather_chunk_(z, full, owned, g, at, shard - at < most ? shard - at : most);
        }
    }
    CUDA_CHECK(cudaStreamSynchronize(z->main.stream));
}

#endif
