/*
zero.cuh -- zero.h on GPUs: the communication of ranks, and when it happens.

Communication has a stream of its own:

    The gradients of a layer are reduced beside the backward pass of the layers below it. In stages
        2 and 3 a layer leaves them in one of two buffers, and the next layer fills the other one.
    The gradients of group 0 are complete last. They are reduced beside the next micro-step, up to
        its classifier.
    After an update, the trained parameters are gathered group by group, beside a forward pass that
        uses those already gathered. Everything else that reads them waits for all of them.
    In stage 3 a pass gathers the parameters of the next layer beside the computation of this one,
        in two buffers. The next forward pass starts with the two layers with which the backward
        pass ends.
    With two levels, the sums of the replicas are added up beside the last micro-step, after the
        replica's own reduction.

Here a layer is one whose parameters have a place of their own in memory: layer k is block k.

A micro-step without the reduction of group 0 can be one CUDA graph: events that it waits for are
recorded outside of it, and it joins the work that it starts.

    grads    stage 0, 1: full arrays                  G   written by the backward pass
             stage 2: group 0, then two layers        G   also with --update-in-backward
             divided experts: these layers on the tokens of the first neighbor, then on those of
             the next one, ...
    sums     (ZERO_SLICES)                            fp32   sum of the replica's micro-batches
    shard    (ZERO_SHARDS)                            fp32   sum of all; `sums` with one level
    pieces   (shards, slice of a group's gradients)   G   received from the ranks of the replica
    params   stage 0 to 2: full arrays                T      read by the passes
             stage 3: group 0, then two layers        T
    params_slices  stage 3: (ZERO_SLICES)             T      written by the update

In stage 3 the slices of parameters and sums can be in pinned memory of the host
(ZERO_SHARDS_ON_HOST). Before they are sent to other ranks, they are copied to the GPU: NCCL
registers memory while a graph is captured, which not all memory allows. The kernels that add to
gradients, sum their squares and update read and write the slices across the bus.

With one rank in stages 0 and 1 nothing is sent, and sums and shard are NULL.
*/
#ifndef LLMC_ZERO_CUH
#define LLMC_ZERO_CUH

#include <assert.h>
#include <string.h>

#include "llmc/comm/comm.h"
#include "llmc/comm/comm_nccl.cuh"
#include "llmc/model/tensors.h"
#include "llmc/parallel/groups.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/graph.cuh"
#include "llmc/ops/gradient_norm.cuh"
#include "llmc/parallel/zero.h"

enum { ZERO_LAYERS_IN_MEMORY = 2, ZERO_VARIANTS = 4, ZERO_THREADS_ = 256, ZERO_PER_THREAD_ = 4 };

typedef enum { ZERO_SHARDS_ON_GPU, ZERO_SHARDS_ON_HOST } ZeroShards;

typedef struct {
    ZeroPlan plan;
    ZeroShards location;
    const GridGroupsGpu* groups;
    Gpu main, comm; // the GPU with the main stream, and with the stream of communication
    void* params;   // the model's, of type `dtype`
    Gradient grads; // the model's
    DType dtype;
    void* params_slices; // stage 3
    float *sums, *shard; // NULL: the gradient stays in grads
    void* pieces;        // NULL with one rank
    // Stage 3: layer whose parameters are in a buffer or on their way to it, -1: none; true if the
    // main stream must wait.
    int resident[ZERO_LAYERS_IN_MEMORY], in_flight[ZERO_LAYERS_IN_MEMORY];
    // parameters may be on their way: no forward pass since the update has waited for all
    int is_updated;
    cudaEvent_t ready, joined; // last work of the main stream; of the other stream
    // group 0 is reduced, and with it all groups of the micro-step
    cudaEvent_t reduced;
    cudaEvent_t sent[ZERO_LAYERS_IN_MEMORY];    // a buffer of gradients may be overwritten
    cudaEvent_t arrived[ZERO_LAYERS_IN_MEMORY]; // a buffer has its parameters
    // (groups) a group has the parameters of the last update
    cudaEvent_t* gathered;
} ZeroGpu;

// ---- memory ----

// Return the layers, and the buffer of a layer.
static inline int zero_layers(const ZeroPlan* plan) { return plan->groups - 1; }
static inline int zero_buffer_(int l) { return l % ZERO_LAYERS_IN_MEMORY; }

static inline int zero_has_shard_(const ZeroPlan* plan) { return plan->size > 1 || plan->stage >= 2; }
static inline int zero_has_levels_(const ZeroPlan* plan) { return zero_replicas(plan) > 1; }

static inline size_t zero_most_(size_t a, size_t b) { return a > b ? a : b; }

// Returns the bytes of the buffer of pieces: room for the largest group's gradients, for the sums
// that replicas send to each other, first copied from the host if they are there, and for a unit of
// fp32 from each rank.
static inline size_t zero_pieces_bytes_(const ZeroPlan* plan, ZeroShards location, DType grads) {
    const size_t largest = zero_largest_gradient(plan), copies = location == ZERO_SHARDS_ON_HOST ? 2 : 1,
                 sums =
                     zero_has_levels_(plan) ? copies * (largest / (size_t)plan->shards) * sizeof(float) : 0,
                 least = (size_t)plan->size * TENSOR_SHARD_UNIT * sizeof(float);
    return plan->size == 1 ? 0 : zero_most_(largest * dtype_bytes(grads), zero_most_(sums, least));
}

static inline void zero_open_event_(cudaEvent_t* event) {
    CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

static inline void zero_open_events_(ZeroGpu* z) {
    zero_open_event_(&z->ready);
    zero_open_event_(&z->joined);
    zero_open_event_(&z->reduced);
    for (int b = 0; b < ZERO_LAYERS_IN_MEMORY; b++) {
        zero_open_event_(&z->sent[b]);
        zero_open_event_(&z->arrived[b]);
    }
    z->gathered = (cudaEvent_t*)check_alloc((size_t)z->plan.groups, sizeof(cudaEvent_t), "events");
    for (int g = 0; g < z->plan.groups; g++) {
        zero_open_event_(&z->gathered[g]);
    }
}

static inline void zero_close_events_(ZeroGpu* z) {
    for (int g = 0; g < z->plan.groups; g++) {
        CUDA_CHECK(cudaEventDestroy(z->gathered[g]));
    }
    free(z->gathered);
    for (int b = 0; b < ZERO_LAYERS_IN_MEMORY; b++) {
        CUDA_CHECK(cudaEventDestroy(z->arrived[b]));
        CUDA_CHECK(cudaEventDestroy(z->sent[b]));
    }
    CUDA_CHECK(cudaEventDestroy(z->reduced));
    CUDA_CHECK(cudaEventDestroy(z->joined));
    CUDA_CHECK(cudaEventDestroy(z->ready));
}

// Marks the parameters in all buffers as stale, in stage 3.
static inline void zero_forget_(ZeroGpu* z) {
    for (int b = 0; b < ZERO_LAYERS_IN_MEMORY; b++) {
        z->resident[b] = -1;
    }
}

// Sends `bytes` bytes by each operation that ZeRO will use, so that the library allocates its
// memory now.
static inline void zero_connect_groups_(const GridGroupsGpu* groups, void* to, const void* from, size_t bytes,
                                        cudaStream_t stream) {
    const size_t count = bytes / (size_t)groups->data.size / sizeof(float);
    group_all_gather(to, from, count, DTYPE_FP32, &groups->data, stream);
    group_all_to_all(to, from, count, DTYPE_FP32, &groups->replica, stream);
    group_all_gather(to, from, count, DTYPE_FP32, &groups->replica, stream);
    if (groups->same_experts.size > 1) {
        group_all_to_all(to, from, count, DTYPE_FP32, &groups->same_experts, stream);
        group_all_gather(to, from, count, DTYPE_FP32, &groups->same_experts, stream);
    }
    if (groups->replicas.size > 1) {
        group_all_gather(to, from, count, DTYPE_FP32, &groups->replicas, stream);
        group_all_to_all(to, from, count, DTYPE_FP32, &groups->replicas, stream);
    }
}

// Opens the groups for the next model, and connects their GPUs. NCCL allocates gigabytes at the
// first use of each operation, and again for large messages; so the plan of the rest knows what
// memory is left. Collective.
static inline void zero_connect(const ZeroPlan* plan, Grid grid, DType grads, Comm* comm, const Gpu* gpu) {
    const size_t pieces = zero_pieces_bytes_(plan, ZERO_SHARDS_ON_GPU, grads), most = (size_t)64 << 20,
                 small = (size_t)comm->size * TENSOR_SHARD_UNIT,
                 large = grid_is_plain(grid.shape) && pieces < most ? pieces : most;
    GridGroupsGpu* groups = (GridGroupsGpu*)check_alloc(1, sizeof(GridGroupsGpu), "groups of GPUs");
    grid_groups_gpu_open(groups, grid, plan, comm);
    comm->gpus = groups;
    if (grid_is_plain(grid.shape) && plan->size == 1) {
        return; // each rank has a whole model
    }
    void *to = gpu_alloc(large, 1, "what connects GPUs"), *from = gpu_alloc(large, 1, "what connects GPUs");
    comm_progress(comm, COMM_SETUP, -1, "connecting GPUs");
    const size_t sizes[] = {large, small};
    for (int i = 0; i < 2; i++) {
        grid_groups_gpu_connect(groups, to, from, sizes[i], gpu->stream);
        zero_connect_groups_(groups, to, from, sizes[i], gpu->stream);
    }
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(from);
    gpu_free(to);
}

// Opens the stream. Communication has the highest priority: if it waited behind all blocks of a
// matmul, every rank would wait for the slowest one. Updates during the backward pass, of a single
// rank, have the lowest.
static inline void zero_open_stream_(ZeroGpu* z) {
    int least, greatest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&z->comm.stream, cudaStreamNonBlocking,
                                            z->groups->all.size > 1 ? greatest : least));
}

// Takes the slices of this rank. If they are on the host, each of the `micro_steps` of an update
// reads the parameters in both passes and adds to the gradient, and the norm and the update read
// the gradient.
static inline void zero_take_slices_(ZeroGpu* z, Memory* memory, double micro_steps) {
    const int on_host = z->location == ZERO_SHARDS_ON_HOST;
    const MemoryPlace place = on_host ? MEMORY_PINNED : MEMORY_DEVICE;
    const char *params = on_host ? "shard of the parameters" : "parameters: slices",
               *grads = on_host ? "shard of the gradients" : "gradients: slices";
    const size_t slices = zero_count(&z->plan, ZERO_SLICES), shards = zero_count(&z->plan, ZERO_SHARDS);
    if (z->plan.stage >= 3) {
        z->params_slices = memory_take(memory, params, place, slices * dtype_bytes(z->dtype));
    }
    if (zero_has_shard_(&z->plan)) {
        z->sums = z->shard = (float*)memory_take(memory, grads, place, slices * sizeof(float));
    }
    if (zero_has_levels_(&z->plan)) {
        z->shard = (float*)memory_take(memory, grads, place, shards * sizeof(float));
    }
    if (on_host) {
        memory_set_moves(memory_count(memory, params, place, 0), 2 * micro_steps, 1);
        memory_set_moves(memory_count(memory, grads, place, 0), micro_steps + 1, micro_steps);
    }
}

// Opens the parts of a rank. `params`, of type `dtype`, and `grads` are the model's, filled with
// zeros.
static inline void zero_open(ZeroGpu* z, Memory* memory, ZeroPlan plan, ZeroShards location,
                             double micro_steps, void* params, DType dtype, Gradient grads,
                             const GridGroupsGpu* groups, const Gpu* gpu) {
    memset((void*)z, 0, sizeof(*z));
    z->plan = plan;
    z->groups = groups;
    z->location = location;
    z->params = params;
    z->dtype = dtype;
    z->grads = grads;
    z->main = z->comm = *gpu;
    zero_take_slices_(z, memory, micro_steps);
    if (plan.size > 1) {
        z->pieces = memory_take(memory, "gradients: pieces", MEMORY_DEVICE,
                                zero_pieces_bytes_(&plan, location, grads.dtype));
    }
    if (memory_is_dry(memory)) {
        return;
    }
    zero_open_stream_(z);
    zero_open_events_(z);
    zero_forget_(z);
}

// Closes it, once both streams are done.
static inline void zero_close(ZeroGpu* z) {
    zero_close_events_(z);
    CUDA_CHECK(cudaStreamDestroy(z->comm.stream));
}

static inline char* zero_element_(void* array, DType dtype, size_t i) {
    return (char*)array + i * dtype_bytes(dtype);
}

// ---- the two streams ----

// Makes the other stream wait for all work that the main stream has so far.
static inline void zero_fork_(ZeroGpu* z) {
    CUDA_CHECK(cudaEventRecord(z->ready, z->main.stream));
    CUDA_CHECK(cudaStreamWaitEvent(z->comm.stream, z->ready, 0));
}

// Waits for an event that is recorded outside of graphs; a graph may wait for it.
static inline void zero_wait_(cudaStream_t stream, cudaEvent_t event) {
    const int is_captured = graph_is_capturing(stream);
    CUDA_CHECK(cudaStreamWaitEvent(stream, event, is_captured ? cudaEventWaitExternal : 0));
}

// Returns the ranks that divide group g among themselves: of a replica, or with the same experts.
static inline const GroupGpu* zero_ranks_(const ZeroGpu* z, int g) {
    const int has_others = zero_is_block(&z->plan, g) && z->plan.experts > 1;
    return has_others ? &z->groups->same_experts : &z->groups->replica;
}

// Returns all ranks that divide group g, of all replicas.
static inline const GroupGpu* zero_peers(const ZeroGpu* z, int g) {
    return zero_has_levels_(&z->plan) ? &z->groups->data : zero_ranks_(z, g);
}

// Returns the place of this rank's slice in `count` elements of all of group g.
static inline void* zero_slice_in_(const ZeroGpu* z, int g, void* all, DType type, size_t count) {
    const GroupGpu* ranks = zero_ranks_(z, g);
    return zero_element_(all, type, (size_t)ranks->rank * (count / (size_t)ranks->size));
}

// Copies between the host and the GPU on the stream of communication; does nothing if both are the
// same.
static inline void zero_copy_(ZeroGpu* z, void* to, const void* from, size_t bytes) {
    if (to != from) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, z->comm.stream));
    }
}

// Gathers the slices of `count` elements of group g from the ranks that have them in `all`. This
// rank's lies at `slice`.
static inline void zero_gather_slices_(ZeroGpu* z, int g, void* all, const void* slice, DType type,
                                       size_t count) {
    const GroupGpu* ranks = zero_ranks_(z, g);
    const size_t elements = count / (size_t)ranks->size;
    if (z->location == ZERO_SHARDS_ON_HOST) {
        void* own = zero_slice_in_(z, g, all, type, count);
        zero_copy_(z, own, slice, elements * dtype_bytes(type));
        slice = own;
    }
    group_all_gather(all, slice, elements, type, ranks, z->comm.stream);
}

// Gathers the shards within a slice of `count` elements from the ranks with the same slice. A slice
// on the host passes through `on_gpu`.
static inline void zero_gather_shards_(ZeroGpu* z, void* slice, void* on_gpu, DType type, size_t count) {
    const size_t shard = count / (size_t)z->groups->replicas.size,
                 before = (size_t)z->groups->replicas.rank * shard;
    void *there = z->location == ZERO_SHARDS_ON_HOST ? on_gpu : slice,
         *own = zero_element_(there, type, before);
    zero_copy_(z, own, zero_element_(slice, type, before), shard * dtype_bytes(type));
    group_all_gather(there, own, shard, type, &z->groups->replicas, z->comm.stream);
    zero_copy_(z, slice, there, count * dtype_bytes(type));
}

// Gathers the shards of `count` elements of group g from all ranks that have them: first within
// this rank's slice, at `slice`, then all slices in `all`; NULL: only within the slice.
static inline void zero_gather_(ZeroGpu* z, int g, void* all, void* slice, DType type, size_t count) {
    if (zero_has_levels_(&z->plan)) {
        void* on_gpu = all ? zero_slice_in_(z, g, all, type, count) : z->pieces;
        zero_gather_shards_(z, slice, on_gpu, type, count / (size_t)z->plan.shards);
    }
    if (all) {
        zero_gather_slices_(z, g, all, slice, type, count);
    }
}

// ---- parameters ----

// Returns how many groups are gathered after an update: those of which a rank updates less than it
// keeps.
static inline int zero_gathered_groups_(const ZeroPlan* plan) {
    const int is_alone = plan->stage == 0 || plan->size == 1;
    return plan->stage >= 3 ? (zero_has_levels_(plan) ? plan->groups : 1) : is_alone ? 0 : plan->groups;
}

// Sends each rank's shards of a part of the parameters to all ranks that keep them.
static inline void zero_gather_part_(ZeroGpu* z, ZeroPart part) {
    const int groups = zero_gathered_groups_(&z->plan);
    if (groups == 0) {
        return;
    }
    zero_fork_(z);
    for (int g = 0; g < groups; g++) {
        const size_t count = zero_part_elements(&z->plan, g, part);
        void *all = NULL, *slice;
        if (z->plan.stage < 3 || g == 0) {
            all = zero_element_(z->params, z->dtype, zero_part_begin(&z->plan, g, part));
        }
        slice = z->params_slices ? zero_element_(z->params_slices, z->dtype, zero_slice_begin(&z->plan, g))
                                 : zero_slice_in_(z, g, all, z->dtype, count);
        if (count > 0) {
            zero_gather_(z, g, all, slice, z->dtype, count);
        }
        CUDA_CHECK(cudaEventRecord(z->gathered[g], z->comm.stream));
    }
    zero_forget_(z);
    z->is_updated = 1;
}

// Gather the parameters: after an update the trained ones, and all of them after all shards were
// set.
static inline void zero_gather_parameters(ZeroGpu* z) { zero_gather_part_(z, ZERO_TRAINED); }
static inline void zero_gather_all_parameters(ZeroGpu* z) {
    zero_gather_part_(z, ZERO_FROZEN);
    zero_gather_part_(z, ZERO_TRAINED);
}

// Waits until no parameters are on their way; call it before anything but a pass reads them.
// Setting shards needs no wait: a rank never receives its own, and the next
// zero_gather_all_parameters overwrites those still on their way.
static inline void zero_wait_for_parameters(ZeroGpu* z) {
    const int groups = zero_gathered_groups_(&z->plan);
    if (groups > 0) {
        zero_wait_(z->main.stream,
                   // test_ranks.sh: before checksums, and before memory is freed
                   z->gathered[groups - 1]);
    }
}

// Returns the place of block k among the blocks in `params`.
static inline int zero_parameter_block(const ZeroPlan* plan, int k) {
    return plan->stage < 3 ? k : zero_buffer_(k);
}

// Waits for a group that was gathered after the last update, unless a forward pass has done so
// since.
static inline void zero_wait_for_group_(ZeroGpu* z, int g, cudaStream_t stream) {
    if (z->is_updated && g < zero_gathered_groups_(&z->plan)) {
        zero_wait_(stream, z->gathered[g]);
    }
}

// Stage 3: gathers the parameters of block k from the replica.
static inline void zero_gather_block_(ZeroGpu* z, int k) {
    const size_t at = z->plan.once + (size_t)zero_parameter_block(&z->plan, k) * z->plan.block;
    const void* slice = zero_element_(z->params_slices, z->dtype, zero_slice_begin(&z->plan, 1 + k));
    // test_ranks.sh: only graphs with replicas need it
    zero_wait_for_group_(z, 1 + k, z->comm.stream);
    zero_gather_slices_(z, 1 + k, zero_element_(z->params, z->dtype, at), slice, z->dtype, z->plan.block);
}

// Stage 3: gathers the parameters of layer l, after all work queued so far, unless a buffer has
// them.
static inline void zero_fetch_layer_(ZeroGpu* z, int l) {
    const int b = zero_buffer_(l);
    if (z->resident[b] == l) {
        return;
    }
    zero_fork_(z);
    zero_gather_block_(z, l);
    CUDA_CHECK(cudaEventRecord(z->arrived[b], z->comm.stream));
    z->resident[b] = l;
    z->in_flight[b] = 1;
}

// Waits for the parameters of layer l, and starts to gather those of layer `next`, if it exists.
static inline void zero_fetch_(ZeroGpu* z, int l, int next) {
    const int b = zero_buffer_(l);
    zero_fetch_layer_(z, l);
    if (z->in_flight[b]) {
        CUDA_CHECK(cudaStreamWaitEvent(z->main.stream, z->arrived[b], 0));
        z->in_flight[b] = 0;
    }
    if (0 <= next && next < zero_layers(&z->plan)) {
        zero_fetch_layer_(z, next);
    }
}

// Waits for the parameters outside of blocks, before a forward pass.
static inline void zero_begin_forward(ZeroGpu* z) { zero_wait_for_group_(z, 0, z->main.stream); }

// True if the forward pass of a micro-step waits for other ranks.
static inline int zero_forward_waits(const ZeroPlan* plan, MicroStep step) {
    return plan->stage >= 3 || (step.number == 0 && zero_gathered_groups_(plan) > 0);
}

// Waits for the parameters of layer l, in a forward pass (direction 1) or a backward pass (-1).
static inline void zero_parameters(ZeroGpu* z, int l, int direction) {
    if (z->plan.stage >= 3) {
        zero_fetch_(z, l, l + direction);
    } else {
        zero_wait_for_group_(z, 1 + l, z->main.stream);
    }
    z->is_updated = z->is_updated && l < zero_layers(&z->plan) - 1;
}

// ---- a micro-step ----

// Returns the place of block k among the blocks in `grads`.
static inline int zero_gradient_block(const ZeroPlan* plan, int k) {
    return plan->shares_buffer ? zero_buffer_(k) : k - plan->first_block;
}

// Returns the elements from the gradients of blocks on the tokens of a neighbor to those on the
// next one's: of all blocks in memory.
static inline size_t zero_neighbor_elements(const ZeroPlan* plan) {
    return plan->shares_buffer ? (size_t)ZERO_LAYERS_IN_MEMORY * plan->trained_block
                               : zero_gradient_begin(plan, plan->groups) - plan->trained_once;
}

// Returns the begin of the gradients of group g, as the backward pass leaves them; with divided
// experts, on the tokens of the first neighbor.
static inline size_t zero_grads_begin_(const ZeroPlan* plan, int g) {
    const size_t end = zero_grads_elements(plan, ZERO_LAYERS_IN_MEMORY);
    return g == 0 ? 0
           : g == plan->groups
               ? end - zero_trained_elements(plan, g)
               : plan->trained_once + (size_t)zero_gradient_block(plan, g - 1) * plan->trained_block;
}

static inline void* zero_group_grads_(const ZeroGpu* z, int g) {
    return zero_element_(z->grads.data, z->grads.dtype, zero_grads_begin_(&z->plan, g));
}

// Pieces of a gradient: (copies, ranks, count), with `stride` elements between copies. Number a in
// the order of the ranks that have the tokens is copy a % copies from rank a / copies.
typedef struct {
    size_t count, stride;
    int copies;
} ZeroPieces_;

// Adds the first `active` of the pieces, in order and in fp32, to shard (count), which counts as
// zero if `is_first`.
// grid   count / 1024      block   256      shared   none
// moves  reads active G and writes 4 bytes an element, and reads 4 if not `is_first`. Bound by
//        memory.
// order  fixed: that of the pieces
template <class G>
__global__ void __launch_bounds__(ZERO_THREADS_)
    zero_add_kernel_(float* shard, const G* pieces, ZeroPieces_ of, int active, int is_first) {
    const size_t i = ((size_t)blockIdx.x * ZERO_THREADS_ + threadIdx.x) * ZERO_PER_THREAD_;
    Elements<float, ZERO_PER_THREAD_> sum = {};
    if (!is_first) {
        sum = elements_load<ZERO_PER_THREAD_>(shard + i);
    }
    for (int a = 0; a < active; a++) {
        const size_t at = (size_t)(a % of.copies) * of.stride + (size_t)(a / of.copies) * of.count;
        const Elements<G, ZERO_PER_THREAD_> piece = elements_load<ZERO_PER_THREAD_>(pieces + at + i);
#pragma unroll
        for (int k = 0; k < ZERO_PER_THREAD_; k++) {
            sum[k] += to_float(piece[k]);
        }
    }
    elements_store(shard + i, sum);
}

static inline dim3 zero_grid_(size_t count) {
    assert(count % (ZERO_THREADS_ * ZERO_PER_THREAD_) == 0);
    return dim3((unsigned)(count / (ZERO_THREADS_ * ZERO_PER_THREAD_)));
}

// Adds the pieces of group g to the sums.
template <class T>
static inline void zero_add_(ZeroGpu* z, int g, const void* pieces, ZeroPieces_ of, MicroStep step) {
    float* sums = z->sums + zero_slice_begin(&z->plan, g);
    GRADIENT_DISPATCH(z->grads, T,
                      launch(zero_add_kernel_<G>, zero_grid_(of.count), ZERO_THREADS_, 0, &z->comm, sums,
                             (const G*)pieces, of, zero_adds_(&z->plan, step),
                             zero_is_first_(&z->plan, step)));
}

// Records that group g has left its buffer, which may be overwritten.
static inline void zero_sent_(ZeroGpu* z, int g) {
    if (g > 0 && g < z->plan.groups) {
        CUDA_CHECK(cudaEventRecord(z->sent[zero_buffer_(g - 1)], z->comm.stream));
    }
}

// Sends each of the copies of the gradients of group g to the ranks that divide it, to `pieces`.
static inline void zero_send_copies_(ZeroGpu* z, int g, ZeroPieces_ sent, ZeroPieces_ arrived) {
    const DType type = z->grads.dtype;
    for (size_t i = 0; i < (size_t)sent.copies; i++) {
        group_all_to_all(zero_element_(z->pieces, type, i * arrived.stride),
                         zero_element_(zero_group_grads_(z, g), type, i * sent.stride), sent.count, type,
                         zero_ranks_(z, g), z->comm.stream);
    }
}

// Reduces group g within the replica, or among the ranks with the same experts: those on the tokens
// of all neighbors, in the order of the ranks that have the tokens.
template <class T> static inline void zero_reduce_slices_(ZeroGpu* z, int g, MicroStep step) {
    const ZeroPlan* plan = &z->plan;
    const size_t count = zero_slice_elements(plan, g);
    const int copies = zero_is_block(plan, g) ? plan->experts : 1;
    const ZeroPieces_ sent = {count, zero_neighbor_elements(plan), copies},
                      arrived = {count, zero_trained_elements(plan, g), copies};
    if (zero_ranks_(z, g)->size == 1) {
        zero_add_<T>(z, g, zero_group_grads_(z, g), sent, step);
        zero_sent_(z, g);
        return;
    }
    zero_send_copies_(z, g, sent, arrived);
    zero_sent_(z, g);
    zero_add_<T>(z, g, z->pieces, arrived, step);
}

// Adds up the sums of group g of all replicas, in their order: a reduction of NCCL has an order of
// its own, which may depend on how machines are connected. Sums on the host pass through the buffer
// of pieces.
static inline void zero_reduce_replicas_(ZeroGpu* z, int g) {
    const size_t count = zero_shard_elements(&z->plan, g), all = zero_slice_elements(&z->plan, g);
    float *sums = z->sums + zero_slice_begin(&z->plan, g), *shard = z->shard + zero_shard_begin(&z->plan, g),
          *pieces = (float*)z->pieces, *from = z->location == ZERO_SHARDS_ON_HOST ? pieces + all : sums;
    const ZeroPieces_ arrived = {count, 0, 1};
    zero_copy_(z, from, sums, all * sizeof(float));
    group_all_to_all(pieces, from, count, DTYPE_FP32, &z->groups->replicas, z->comm.stream);
    launch(zero_add_kernel_<float>, zero_grid_(count), ZERO_THREADS_, 0, &z->comm, shard,
           (const float*)pieces, arrived, z->groups->replicas.size, 1);
}

// Waits until the buffer for the gradients of layer l, or of the parameters outside of blocks (-1),
// has been sent. Call it before the first kernel of a micro-step that writes there.
static inline void zero_wait_for_buffer(ZeroGpu* z, int l) {
    if (!z->plan.shares_buffer) {
        return;
    }
    if (l < 0) {
        zero_wait_(z->main.stream, z->reduced);
    } else if (l + ZERO_LAYERS_IN_MEMORY < zero_layers(&z->plan)) {
        CUDA_CHECK(cudaStreamWaitEvent(z->main.stream, z->sent[zero_buffer_(l)], 0));
    }
}

// Gradients of all parameters: the members of ModelParameters, all of one type.
#define ZERO_GRADIENT_(name, ...) Gradient name;
typedef struct {
    MODEL_PARAMETERS(ZERO_GRADIENT_)
} ModelGradients;
#undef ZERO_GRADIENT_

// Returns the gradients of layer l: .qkvw is its. Those of frozen parameters have no data.
static inline ModelGradients zero_gradients_at_layer(const ZeroGpu* z, const TensorRow* gradient_rows,
                                                     ModelConfig cfg, const Freeze* freeze, int l) {
    const int at = zero_gradient_block(&z->plan, model_copy(cfg, l));
    const TensorRow* row = gradient_rows;
    ModelGradients grads;
#define ZERO_GRADIENT_(name, ...)                                                                            \
    grads.name.data =                                                                                        \
        freeze_has(freeze, (int)(row - gradient_rows), l) || tensor_is_absent(row)                           \
            ? NULL                                                                                           \
            : tensor_at_layer(row, z->grads.data, row->place == PLACE_BLOCK ? at : tensor_copy(row, l));     \
    grads.name.dtype = z->grads.dtype;                                                                       \
    row++;
    MODEL_PARAMETERS(ZERO_GRADIENT_)
#undef ZERO_GRADIENT_
    return grads;
}

// Clears the gradients of the frozen parameters of layer l. Where layers take turns
// in the same memory, it still has those of another layer, and this layer's backward pass does not
// set them.
static inline void zero_clear_frozen(ZeroGpu* z, const TensorRow* gradient_rows, ModelConfig cfg,
                                     const Freeze* freeze, int l) {
    const int k = model_copy(cfg, l), clears = z->plan.shares_buffer && zero_has_gradient(&z->plan, 1 + k);
    for (int i = 0; i < MODEL_PARAMETER_ROWS && clears; i++) {
        const TensorRow* row = &gradient_rows[i];
        const int is_frozen =
            row->place == PLACE_BLOCK && zero_has_row(&z->plan, i) && freeze_has(freeze, i, l);
        if (is_frozen) {
            CUDA_CHECK(cudaMemsetAsync(tensor_at_layer(row, z->grads.data, zero_gradient_block(&z->plan, k)),
                                       0, tensor_layer_elements(row) * row->element_bytes, z->main.stream));
        }
    }
}

// Rounds (count) to the type of the gradients.
// grid   count / 1024      block   256      shared   none
// moves  reads 4 bytes an element, writes G. Bound by memory.
// order  every element on its own
template <class G>
__global__ void __launch_bounds__(ZERO_THREADS_) zero_round_kernel_(G* to, const float* from) {
    const size_t i = ((size_t)blockIdx.x * ZERO_THREADS_ + threadIdx.x) * ZERO_PER_THREAD_;
    elements_store(to + i, elements_convert<G>(elements_load<ZERO_PER_THREAD_>(from + i)));
}

// Sends the sums of a group to all ranks, to where the backward pass left its gradients.
template <class T> static inline void zero_share_group_(ZeroGpu* z, int g) {
    const DType type = z->grads.dtype;
    const size_t count = zero_shard_elements(&z->plan, g);
    const size_t trained = zero_trained_elements(&z->plan, g);
    void *group = zero_group_grads_(z, g), *slice = zero_slice_in_(z, g, group, type, trained);
    void* own = zero_element_(group, type, (size_t)zero_shard_of(&z->plan, g, z->plan.rank).part * count);
    GRADIENT_DISPATCH(z->grads, T,
                      launch(zero_round_kernel_<G>, zero_grid_(count), ZERO_THREADS_, 0, &z->comm, (G*)own,
                             z->shard + zero_shard_begin(&z->plan, g)));
    zero_gather_(z, g, group, slice, type, trained);
}

// Reduces group g, as its stage does; all ranks get the sum of an embedding apart.
template <class T> static inline void zero_reduce_group_(ZeroGpu* z, int g, MicroStep step) {
    zero_reduce_slices_<T>(z, g, step);
    if (zero_has_levels_(&z->plan) && step.is_last) {
        zero_reduce_replicas_(z, g);
    }
    if (z->plan.stage == 0 || (g == z->plan.groups && step.is_last)) {
        zero_share_group_<T>(z, g);
    }
}

// Starts to reduce the gradients of group g, if it has any and this micro-step reduces. Call it
// when the backward pass has completed them: for the last block first, and at the end, outside of a
// graph, for an embedding's apart, then for group 0.
template <class T> static inline void zero_group_done(ZeroGpu* z, int g, MicroStep step) {
    const int is_computed = g < z->plan.groups || z->plan.sums_embedding,
              has_gradient = zero_has_gradient(&z->plan, g) && is_computed;
    if (!zero_reduces(&z->plan, step) || (g > 0 && !has_gradient)) {
        return; // without a fork, which a graph would have to join
    }
    zero_fork_(z);
    if (has_gradient) {
        zero_reduce_group_<T>(z, g, step);
    }
    if (g == 0) {
        CUDA_CHECK(cudaEventRecord(z->reduced, z->comm.stream));
    }
}

// Returns the kind of a micro-step: those of one kind communicate alike, so they can share a graph.
static inline int zero_variant(const ZeroPlan* plan, MicroStep step) {
    // the last one
    const int differs = plan->size > 1 && (plan->stage < 2 || zero_has_levels_(plan));
    return (step.number > 0) + 2 * (differs && step.is_last);
}

// Returns the stream for an update during the backward pass, which takes the place of a reduction;
// it waits for the gradient.
static inline const Gpu* zero_begin_update(ZeroGpu* z) {
    zero_fork_(z);
    return &z->comm;
}

// Ends the update of group g: its gradient may be overwritten.
static inline void zero_end_update(ZeroGpu* z, int g) { zero_sent_(z, g); }

static inline void zero_join_(ZeroGpu* z) {
    CUDA_CHECK(cudaEventRecord(z->joined, z->comm.stream));
    CUDA_CHECK(cudaStreamWaitEvent(z->main.stream, z->joined, 0));
}

// Makes the main stream wait for all updates.
static inline void zero_join_updates(ZeroGpu* z) { zero_join_(z); }

// Returns the gradient of group g.
static inline Gradient zero_group_gradient(const ZeroGpu* z, int g) {
    const Gradient group = {zero_group_grads_(z, g), z->grads.dtype};
    return group;
}

// Returns an array of all gradients in which only group g exists. For one rank.
static inline Gradient zero_gradient_at_group(const ZeroGpu* z, int g) {
    const size_t before = zero_gradient_begin(&z->plan, g) * dtype_bytes(z->grads.dtype);
    const Gradient all = {(void*)((uintptr_t)zero_group_grads_(z, g) - before), z->grads.dtype};
    return all;
}

// Starts a micro-step. The first one of an update does the same work whether a forward pass came
// before it or not.
static inline void zero_begin(ZeroGpu* z, MicroStep step) {
    if (step.number == 0) {
        zero_forget_(z);
        z->is_updated = 1;
    }
}

// Ends a micro-step up to group 0: the main stream waits for the reductions of the blocks, if any.
// A graph has nothing else to join.
static inline void zero_join(ZeroGpu* z, MicroStep step) {
    if (zero_reduces(&z->plan, step) && z->plan.first_block < z->plan.groups - 1) {
        zero_join_(z);
    }
}

// Sets the state that a micro-step leaves behind, after a graph has made it.
static inline void zero_replayed(ZeroGpu* z) {
    for (int b = 0; b < ZERO_LAYERS_IN_MEMORY; b++) {
        z->resident[b] = b < zero_layers(&z->plan) ? b : -1;
    }
    z->is_updated = 0;
}

// ---- an update ----

// Waits for the reduced gradient, after the last micro-step.
static inline void zero_wait_for_gradient(ZeroGpu* z) {
    if (zero_has_shard_(&z->plan)) {
        zero_wait_(z->main.stream, z->reduced);
    }
}

// Returns the reduced gradient of this rank's shards, whose squares it sums.
static inline Gradient zero_gradient(const ZeroGpu* z) {
    const Gradient shard = {z->shard, DTYPE_FP32};
    return z->shard ? shard : z->grads;
}

// Returns the gradient of the elements that this rank updates.
static inline Gradient zero_update_gradient(const ZeroGpu* z) {
    return z->plan.stage == 0 ? z->grads : zero_gradient(z);
}

// Sets *sum, on the GPU, to the sum of squares of spans (zero_counted_spans) of the reduced
// gradient, for which the main stream has waited.
template <class T>
static inline void zero_square_sum(WideSum* sum, const ZeroGpu* z, const ZeroSpan* spans, int count,
                                   GradientNorm* norm) {
    const Gradient all = zero_gradient(z);
    GradientMode mode = GRADIENT_SET;
    for (int i = 0; i < count; i++) {
        for (size_t k = 0; k < (size_t)spans[i].copies; k++, mode = GRADIENT_ADD) {
            const size_t at = spans[i].begin + k * spans[i].stride;
            const Gradient span = {(char*)all.data + at * dtype_bytes(all.dtype), all.dtype};
            gradient_square_sum_of<T>(sum, span, spans[i].count, mode, norm, &z->main);
        }
    }
}

// Returns the parameters that are kept (zero_kept_cut), which the update writes.
static inline void* zero_update_parameters(const ZeroGpu* z) {
    return z->params_slices ? z->params_slices : z->params;
}

// Returns the gradient of wte as an embedding, laid out like wte; without data unless it is summed
// apart. After the last micro-step and zero_wait_for_gradient, in all ranks, the sum.
static inline Gradient zero_embedding_gradient(const ZeroGpu* z) {
    const Gradient none = {NULL, z->grads.dtype};
    return z->plan.embedding > 0 ? zero_group_gradient(z, z->plan.groups) : none;
}

// Adds `more` to sum (count), each element in fp32 and rounded once.
// grid   ceil(count / 1024)      block   256      shared   none
// moves  S and G in, S out. Bound by memory.
// order  every element on its own
// needs  count a multiple of 4
template <class S, class G>
__global__ void __launch_bounds__(ZERO_THREADS_) zero_join_kernel_(S* sum, const G* more, size_t count) {
    const size_t i = ((size_t)blockIdx.x * ZERO_THREADS_ + threadIdx.x) * ZERO_PER_THREAD_;
    if (i < count) {
        Elements<S, ZERO_PER_THREAD_> x = elements_load<ZERO_PER_THREAD_>(sum + i);
        const Elements<G, ZERO_PER_THREAD_> y = elements_load<ZERO_PER_THREAD_>(more + i);
#pragma unroll
        for (int k = 0; k < ZERO_PER_THREAD_; k++) {
            x[k] = from_float<S>(to_float(x[k]) + to_float(y[k]));
        }
        elements_store(sum + i, x);
    }
}

template <class S, class G>
static inline void zero_join_gradients_(ZeroGpu* z, S* sum, const G* more, size_t count) {
    const size_t per_block = ZERO_THREADS_ * ZERO_PER_THREAD_;
    if (count > 0) {
        launch(zero_join_kernel_<S, G>, (unsigned)ceil_div(count, per_block), ZERO_THREADS_, 0, &z->main, sum,
               more, count);
    }
}

// Adds it to the reduced gradient of the classifier, once an update.
template <class T> static inline void zero_add_embedding(ZeroGpu* z) {
    const Gradient embedding = zero_embedding_gradient(z);
    const ZeroWte own = zero_wte_in_shard(&z->plan);
    zero_wait_for_gradient(z);
    if (z->shard) {
        GRADIENT_DISPATCH(z->grads, T,
                          zero_join_gradients_(z, z->shard + own.in_shard,
                                               (const G*)embedding.data + own.in_wte, own.count));
    }
    if (z->plan.stage == 0 || !z->shard) {
        GRADIENT_DISPATCH(
            z->grads, T,
            zero_join_gradients_(z, (G*)z->grads.data, (const G*)embedding.data, z->plan.embedding));
    }
}

// Makes exchanges of an update among the ranks that divide group g. The main stream waits for them.
static inline void zero_exchange(ZeroGpu* z, int g, const GroupMove* moves, int count) {
    zero_fork_(z);
    group_exchange(moves, count, zero_peers(z, g), z->comm.stream);
    zero_join_(z);
}

// ---- copies of divided arrays ----

// Elements of a piece.
typedef struct {
    size_t first, count;
} ZeroElements;

// Elements `at` and following of each rank's `shard` elements.
typedef struct {
    size_t shard, at, count;
} ZeroChunk_;

// Gathers a chunk of group g from all ranks that divide it in `all` on the host; NULL: not in this
// rank. `mine` is this rank's.
static inline void zero_collect_chunk_(ZeroGpu* z, int g, void* all, const void* mine, DType type,
                                       ZeroChunk_ chunk) {
    const GroupGpu* ranks = zero_peers(z, g);
    const size_t bytes = chunk.count * dtype_bytes(type);
    void* own = zero_element_(z->pieces, type, (size_t)ranks->rank * chunk.count);
    zero_copy_(z, own, mine, bytes);
    // (ranks, count)
    group_all_gather(z->pieces, own, chunk.count, type, ranks, z->comm.stream);
    for (int r = 0; all && r < ranks->size; r++) {
        const int part = zero_shard_of(&z->plan, g, zero_rank_of(&z->plan, g, r)).part;
        const size_t to = (size_t)part * chunk.shard + chunk.at;
        zero_copy_(z, zero_element_(all, type, to), zero_element_(z->pieces, type, (size_t)r * chunk.count),
                   bytes);
    }
}

// Gathers a part of group g of an owned array in `group`, which has the whole group on the host;
// NULL: not in this rank. `piece` selects elements of each rank's piece (zero_piece); `mine` are
// this rank's, on the GPU or on the host. Call it between updates: the data pass through the buffer
// of pieces, after all other communication. Collective. Waits for the GPU.
static inline void zero_collect_some(ZeroGpu* z, void* group, int g, ZeroPart part, ZeroElements piece,
                                     const void* mine, DType type) {
    const size_t room = zero_pieces_bytes_(&z->plan, z->location, z->grads.dtype) / dtype_bytes(type);
    const size_t most = room / (size_t)z->plan.size / TENSOR_SHARD_UNIT * TENSOR_SHARD_UNIT;
    const size_t shard = zero_piece(&z->plan, g, part).count,
                 before = zero_part_begin(&z->plan, g, part) - zero_group_begin(&z->plan, g);
    void* all = group ? zero_element_(group, type, before) : NULL;
    zero_fork_(z);
    if (!zero_is_divided(&z->plan) && all) {
        zero_copy_(z, zero_element_(all, type, piece.first), mine, piece.count * dtype_bytes(type));
    }
    for (size_t i = 0; zero_is_divided(&z->plan) && i < piece.count; i += most) {
        const size_t count = piece.count - i < most ? piece.count - i : most;
        const ZeroChunk_ chunk = {shard, piece.first + i, count};
        zero_collect_chunk_(z, g, all, (const char*)mine + i * dtype_bytes(type), type, chunk);
    }
    CUDA_CHECK(cudaStreamSynchronize(z->comm.stream));
}

// Gathers all elements of the pieces.
static inline void zero_collect(ZeroGpu* z, void* group, int g, ZeroPart part, const void* mine, DType type) {
    const ZeroElements all = {0, zero_piece(&z->plan, g, part).count};
    zero_collect_some(z, group, g, part, all, mine, type);
}

#endif
