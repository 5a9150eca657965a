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

Arrays, whose buckets the map places (map_walk.h):

    grads    GRADIENTS      G      written by the backward pass
    sums     SUMS           fp32   sum of the replica's micro-batches
    shard    REDUCED        fp32   sum of all; `sums` with one level
    pieces   (shards, slice of a bucket's gradients)   G   received from the ranks of the replica
    params   PARAMETERS     T      read by the passes
    params_slices  stage 3: KEPT   T   written by the update

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
#include "llmc/model/map.h"
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
    const Map* map;
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

// Return the groups of parameters; the layers; and the buffer of a layer.
static inline int zero_groups_(const ZeroGpu* z) { return model_groups(z->map->cfg); }
static inline int zero_layers_(const ZeroGpu* z) { return model_copies(z->map->cfg); }
static inline int zero_buffer_(int l) { return l % ZERO_LAYERS_IN_MEMORY; }

static inline int zero_has_shard_(const ZeroPlan* plan) { return plan->size > 1 || plan->stage >= 2; }
static inline int zero_has_levels_(const ZeroPlan* plan) { return zero_replicas(plan) > 1; }

static inline size_t zero_most_(size_t a, size_t b) { return a > b ? a : b; }

// Returns the bytes of the buffer of pieces: room for the gradients of a bucket, `largest` at most,
// for the sums that replicas send to each other, first copied from the host if they are there, and
// for a unit of fp32 from each rank.
static inline size_t zero_pieces_bytes_(const ZeroPlan* plan, size_t largest, ZeroShards location,
                                        DType grads) {
    const size_t copies = location == ZERO_SHARDS_ON_HOST ? 2 : 1,
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
    z->gathered = (cudaEvent_t*)check_alloc((size_t)zero_groups_(z), sizeof(cudaEvent_t), "events");
    for (int g = 0; g < zero_groups_(z); g++) {
        zero_open_event_(&z->gathered[g]);
    }
}

static inline void zero_close_events_(ZeroGpu* z) {
    for (int g = 0; g < zero_groups_(z); g++) {
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
static inline void zero_connect(const ZeroPlan* plan, const MapOf* of, Grid grid, DType grads, Comm* comm,
                                const Gpu* gpu) {
    const size_t largest = map_totals(of, grid_rank(&grid)).largest_gradient,
                 pieces = zero_pieces_bytes_(plan, largest, ZERO_SHARDS_ON_GPU, grads),
                 most = (size_t)64 << 20, small = (size_t)comm->size * TENSOR_SHARD_UNIT,
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
    const size_t* elements = z->map->totals.elements;
    if (z->plan.stage >= 3) {
        z->params_slices = memory_take(memory, params, place, elements[MAP_KEPT] * dtype_bytes(z->dtype));
    }
    if (zero_has_shard_(&z->plan)) {
        z->sums = z->shard = (float*)memory_take(memory, grads, place, elements[MAP_SUMS] * sizeof(float));
    }
    if (zero_has_levels_(&z->plan)) {
        z->shard = (float*)memory_take(memory, grads, place, elements[MAP_REDUCED] * sizeof(float));
    }
    if (on_host) {
        memory_set_moves(memory_count(memory, params, place, 0), 2 * micro_steps, 1);
        memory_set_moves(memory_count(memory, grads, place, 0), micro_steps + 1, micro_steps);
    }
}

// Opens the parts of a rank. `params`, of type `dtype`, and `grads` are the model's, filled with
// zeros.
static inline void zero_open(ZeroGpu* z, Memory* memory, ZeroPlan plan, const Map* map, ZeroShards location,
                             double micro_steps, void* params, DType dtype, Gradient grads,
                             const GridGroupsGpu* groups, const Gpu* gpu) {
    memset((void*)z, 0, sizeof(*z));
    z->plan = plan;
    z->map = map;
    z->groups = groups;
    z->location = location;
    z->params = params;
    z->dtype = dtype;
    z->grads = grads;
    z->main = z->comm = *gpu;
    zero_take_slices_(z, memory, micro_steps);
    if (plan.size > 1) {
        z->pieces =
            memory_take(memory, "gradients: pieces", MEMORY_DEVICE,
                        zero_pieces_bytes_(&plan, map->totals.largest_gradient, location, grads.dtype));
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

static inline char* zero_element_(const void* array, DType dtype, size_t i) {
    return (char*)array + i * dtype_bytes(dtype);
}

// Return where a bucket begins: its gradients, as the backward pass leaves them, with divided
// experts first those on the tokens of the first neighbor; its parameters, while they are in
// memory; what this rank has of its sums and of its reduced gradient.
static inline void* zero_grads_of_(const ZeroGpu* z, const Bucket* b) {
    return zero_element_(z->grads.data, z->grads.dtype, b->in[MAP_GRADIENTS].begin);
}
static inline void* zero_params_of_(const ZeroGpu* z, const Bucket* b) {
    return zero_element_(z->params, z->dtype, b->in[MAP_PARAMETERS].begin);
}
static inline float* zero_sums_of_(const ZeroGpu* z, const Bucket* b) {
    return z->sums + b->in[MAP_SUMS].begin;
}
static inline float* zero_reduced_of_(const ZeroGpu* z, const Bucket* b) {
    return z->shard + b->in[MAP_REDUCED].begin;
}

// Returns where the elements of a bucket that this rank owns begin among the parameters that it
// keeps.
static inline size_t zero_owned_in_kept(const Bucket* b) {
    return b->in[MAP_KEPT].begin + (b->in[MAP_OWNED].from - b->in[MAP_KEPT].from);
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

// Returns the ranks that divide a bucket among themselves: of a replica, or with the same experts.
static inline const GroupGpu* zero_ranks_(const ZeroGpu* z, const Bucket* b) {
    return b->ranks < z->map->of.data ? &z->groups->same_experts : &z->groups->replica;
}

// Returns all ranks that divide the trained bucket of group g, of all replicas.
static inline const GroupGpu* zero_peers(const ZeroGpu* z, int g) {
    return zero_has_levels_(&z->plan) ? &z->groups->data : zero_ranks_(z, map_trained(z->map, g));
}

// Returns the place of this rank's slice in `count` elements of all of a bucket.
static inline void* zero_slice_in_(const ZeroGpu* z, const Bucket* b, void* all, DType type, size_t count) {
    const GroupGpu* ranks = zero_ranks_(z, b);
    return zero_element_(all, type, (size_t)ranks->rank * (count / (size_t)ranks->size));
}

// Copies between the host and the GPU on the stream of communication; does nothing if both are the
// same.
static inline void zero_copy_(ZeroGpu* z, void* to, const void* from, size_t bytes) {
    if (to != from) {
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, z->comm.stream));
    }
}

// Gathers the slices of `count` elements of a bucket from the ranks that have them in `all`. This
// rank's lies at `slice`.
static inline void zero_gather_slices_(ZeroGpu* z, const Bucket* b, void* all, const void* slice, DType type,
                                       size_t count) {
    const GroupGpu* ranks = zero_ranks_(z, b);
    const size_t elements = count / (size_t)ranks->size;
    if (z->location == ZERO_SHARDS_ON_HOST) {
        void* own = zero_slice_in_(z, b, all, type, count);
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

// Gathers the shards of `count` elements of a bucket from all ranks that have them: first within
// this rank's slice, at `slice`, then all slices in `all`; NULL: only within the slice.
static inline void zero_gather_(ZeroGpu* z, const Bucket* b, void* all, void* slice, DType type,
                                size_t count) {
    if (zero_has_levels_(&z->plan)) {
        void* on_gpu = all ? zero_slice_in_(z, b, all, type, count) : z->pieces;
        zero_gather_shards_(z, slice, on_gpu, type, count / (size_t)z->plan.shards);
    }
    if (all) {
        zero_gather_slices_(z, b, all, slice, type, count);
    }
}

// ---- parameters ----

// Returns how many groups are gathered after an update: those of which a rank updates less than it
// keeps.
static inline int zero_gathered_groups_(const ZeroGpu* z) {
    const int is_kept_in_slices = z->plan.stage >= 3 && !zero_has_levels_(&z->plan);
    return is_kept_in_slices ? 1 : map_is_divided(z->map) ? zero_groups_(z) : 0;
}

// Sends each rank's shards of a bucket to all ranks that keep them; in stage 3 all keep group 0.
static inline void zero_gather_bucket_(ZeroGpu* z, const Bucket* b) {
    void *all = z->plan.stage < 3 || b->layer < 0 ? zero_params_of_(z, b) : NULL,
         *slice = z->params_slices ? zero_element_(z->params_slices, z->dtype, b->in[MAP_KEPT].begin)
                                   : zero_slice_in_(z, b, all, z->dtype, b->elements);
    zero_gather_(z, b, all, slice, z->dtype, b->elements);
}

// Gathers the buckets of all kinds up to `last`.
static inline void zero_gather_kinds_(ZeroGpu* z, MapKind last) {
    const int groups = zero_gathered_groups_(z);
    if (groups == 0) {
        return;
    }
    zero_fork_(z);
    for (int g = 0; g < groups; g++) {
        for (int i = map_group(z->map, g).first; i < map_group(z->map, g).end; i++) {
            if (z->map->buckets[i].kind <= last) {
                zero_gather_bucket_(z, &z->map->buckets[i]);
            }
        }
        CUDA_CHECK(cudaEventRecord(z->gathered[g], z->comm.stream));
    }
    zero_forget_(z);
    z->is_updated = 1;
}

// Gather the parameters: after an update the trained ones, and all of them after all shards were
// set.
static inline void zero_gather_parameters(ZeroGpu* z) { zero_gather_kinds_(z, MAP_TRAINED); }
static inline void zero_gather_all_parameters(ZeroGpu* z) { zero_gather_kinds_(z, MAP_FROZEN); }

// Waits until no parameters are on their way; call it before anything but a pass reads them.
// Setting shards needs no wait: a rank never receives its own, and the next
// zero_gather_all_parameters overwrites those still on their way.
static inline void zero_wait_for_parameters(ZeroGpu* z) {
    const int groups = zero_gathered_groups_(z);
    if (groups > 0) {
        zero_wait_(z->main.stream,
                   // test_ranks.sh: before checksums, and before memory is freed
                   z->gathered[groups - 1]);
    }
}

// Waits for a group that was gathered after the last update, unless a forward pass has done so
// since.
static inline void zero_wait_for_group_(ZeroGpu* z, int g, cudaStream_t stream) {
    if (z->is_updated && g < zero_gathered_groups_(z)) {
        zero_wait_(stream, z->gathered[g]);
    }
}

// Stage 3: gathers the parameters of block k from the replica.
static inline void zero_gather_block_(ZeroGpu* z, int k) {
    // test_ranks.sh: only graphs with replicas need it
    zero_wait_for_group_(z, 1 + k, z->comm.stream);
    for (int i = map_group(z->map, 1 + k).first; i < map_group(z->map, 1 + k).end; i++) {
        const Bucket* b = &z->map->buckets[i];
        const void* slice = zero_element_(z->params_slices, z->dtype, b->in[MAP_KEPT].begin);
        zero_gather_slices_(z, b, zero_params_of_(z, b), slice, z->dtype, b->elements);
    }
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
    if (0 <= next && next < zero_layers_(z)) {
        zero_fetch_layer_(z, next);
    }
}

// Waits for the parameters outside of blocks, before a forward pass.
static inline void zero_begin_forward(ZeroGpu* z) { zero_wait_for_group_(z, 0, z->main.stream); }

// True if the forward pass of a micro-step waits for other ranks.
static inline int zero_forward_waits(const ZeroGpu* z, MicroStep step) {
    return z->plan.stage >= 3 || (step.number == 0 && zero_gathered_groups_(z) > 0);
}

// Waits for the parameters of layer l, in a forward pass (direction 1) or a backward pass (-1).
static inline void zero_parameters(ZeroGpu* z, int l, int direction) {
    if (z->plan.stage >= 3) {
        zero_fetch_(z, l, l + direction);
    } else {
        zero_wait_for_group_(z, 1 + l, z->main.stream);
    }
    z->is_updated = z->is_updated && l < zero_layers_(z) - 1;
}

// ---- a micro-step ----

// Adds the first `active` of the pieces, in order and in fp32, to shard (count), which counts as
// zero if `is_first`.
// grid   count / 1024      block   256      shared   none
// moves  reads active G and writes 4 bytes an element, and reads 4 if not `is_first`. Bound by
//        memory.
// order  fixed: that of the pieces
template <class G>
__global__ void __launch_bounds__(ZERO_THREADS_)
    zero_add_kernel_(float* shard, const G* pieces, ZeroPieces of, int active, int is_first) {
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

// Records that a bucket has left its buffer, which may be overwritten.
static inline void zero_sent_(ZeroGpu* z, const Bucket* b) {
    if (b->layer >= 0) {
        CUDA_CHECK(cudaEventRecord(z->sent[zero_buffer_(model_copy(z->map->cfg, b->layer))], z->comm.stream));
    }
}

// Reduces a bucket within the replica, or among the ranks with the same experts: the gradients on
// the tokens of all neighbors, in the order of the ranks that have the tokens.
template <class T> static inline void zero_reduce_slices_(ZeroGpu* z, const Bucket* b, MicroStep step) {
    const GroupGpu* ranks = zero_ranks_(z, b);
    const DType type = z->grads.dtype;
    const ZeroPieces of = {b->in[MAP_SUMS].count, b->elements, b->copies};
    void *grads = zero_grads_of_(z, b), *pieces = ranks->size > 1 ? z->pieces : grads;
    for (size_t k = 0; k < (size_t)b->copies && pieces != grads; k++) {
        group_all_to_all(zero_element_(pieces, type, k * b->elements),
                         zero_element_(grads, type, k * b->elements), of.count, type, ranks, z->comm.stream);
    }
    if (pieces != grads) { // else they are still to be added
        zero_sent_(z, b);
    }
    GRADIENT_DISPATCH(z->grads, T,
                      launch(zero_add_kernel_<G>, zero_grid_(of.count), ZERO_THREADS_, 0, &z->comm,
                             zero_sums_of_(z, b), (const G*)pieces, of, zero_adds_(&z->plan, step),
                             zero_is_first_(&z->plan, step)));
    if (pieces == grads) {
        zero_sent_(z, b);
    }
}

// Adds up the sums of a bucket of all replicas, in their order: a reduction of NCCL has an order of
// its own, which may depend on how machines are connected. Sums on the host pass through the buffer
// of pieces.
static inline void zero_reduce_replicas_(ZeroGpu* z, const Bucket* b) {
    const size_t count = b->in[MAP_REDUCED].count, all = b->in[MAP_SUMS].count;
    float *sums = zero_sums_of_(z, b), *pieces = (float*)z->pieces,
          *from = z->location == ZERO_SHARDS_ON_HOST ? pieces + all : sums;
    const ZeroPieces arrived = {count, 0, 1};
    zero_copy_(z, from, sums, all * sizeof(float));
    group_all_to_all(pieces, from, count, DTYPE_FP32, &z->groups->replicas, z->comm.stream);
    launch(zero_add_kernel_<float>, zero_grid_(count), ZERO_THREADS_, 0, &z->comm, zero_reduced_of_(z, b),
           (const float*)pieces, arrived, z->groups->replicas.size, 1);
}

// Waits until the buffer for the gradients of layer l, or of the parameters outside of blocks (-1),
// has been sent. Call it before the first kernel of a micro-step that writes there.
static inline void zero_wait_for_buffer(ZeroGpu* z, int l) {
    if (z->map->of.ring_gradients == 0) {
        return;
    }
    if (l < 0) {
        zero_wait_(z->main.stream, z->reduced);
    } else if (l + ZERO_LAYERS_IN_MEMORY < zero_layers_(z)) {
        CUDA_CHECK(cudaStreamWaitEvent(z->main.stream, z->sent[zero_buffer_(l)], 0));
    }
}

// Gradients of all parameters: the members of ModelParameters, all of one type.
#define ZERO_GRADIENT_(name, ...) Gradient name;
typedef struct {
    MODEL_PARAMETERS(ZERO_GRADIENT_)
} ModelGradients;
#undef ZERO_GRADIENT_

// Returns the gradients of layer l, and of what is outside of the blocks. Those of frozen
// parameters have no data.
static inline ModelGradients zero_bind_gradients(const ZeroGpu* z, int l) {
    const DType type = z->grads.dtype;
    const ModelParameters at = map_bind(z->map, MAP_GRADIENTS, z->grads.data, dtype_bytes(type), l);
#define ZERO_GRADIENT_(name, ...) {(void*)at.name, type},
    return ModelGradients{MODEL_PARAMETERS(ZERO_GRADIENT_)};
#undef ZERO_GRADIENT_
}

// Clears the gradients of layer l that its backward pass does not set: where layers take turns in
// the same memory, it still has those of another layer.
static inline void zero_clear_unset(ZeroGpu* z, int l) {
    const Map* m = z->map;
    const Bucket* b = map_trained(m, model_group(m->cfg, l));
    const size_t bytes = dtype_bytes(z->grads.dtype);
    MapSpan unset;
    for (size_t at = 0; b && m->of.ring_gradients > 0 && map_next_unset(m, b, &at, &unset);) {
        for (int copy = 0; copy < b->copies; copy++) {
            void* first = zero_element_(z->grads.data, z->grads.dtype, unset.begin + copy * b->elements);
            CUDA_CHECK(cudaMemsetAsync(first, 0, unset.count * bytes, z->main.stream));
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

// Sends the sums of a bucket to all ranks, to where the backward pass left its gradients.
template <class T> static inline void zero_share_(ZeroGpu* z, const Bucket* b) {
    const DType type = z->grads.dtype;
    const MapSpan own = b->in[MAP_REDUCED];
    void* all = zero_grads_of_(z, b);
    GRADIENT_DISPATCH(z->grads, T,
                      launch(zero_round_kernel_<G>, zero_grid_(own.count), ZERO_THREADS_, 0, &z->comm,
                             (G*)all + own.from, zero_reduced_of_(z, b)));
    zero_gather_(z, b, all, zero_slice_in_(z, b, all, type, b->elements), type, b->elements);
}

// Reduces a bucket, as its stage does; all ranks get the sum of an embedding apart.
template <class T> static inline void zero_reduce_(ZeroGpu* z, const Bucket* b, MicroStep step) {
    zero_reduce_slices_<T>(z, b, step);
    if (zero_has_levels_(&z->plan) && step.is_last) {
        zero_reduce_replicas_(z, b);
    }
    if (z->plan.stage == 0 || (b->kind == MAP_EMBEDDING && step.is_last)) {
        zero_share_<T>(z, b);
    }
}

// Starts to reduce the gradients of group g, if it has any and this micro-step reduces. Call it
// when the backward pass has completed them: for the last block first, and at the end, outside of a
// graph, for an embedding's apart, then for group 0.
template <class T> static inline void zero_group_done(ZeroGpu* z, int g, MicroStep step) {
    const Bucket* b = map_trained(z->map, g);
    const int is_computed = b && (b->kind != MAP_EMBEDDING || model_has_first(z->map->cfg));
    if (!zero_reduces(&z->plan, step) || (g > 0 && !is_computed)) {
        return; // without a fork, which a graph would have to join
    }
    zero_fork_(z);
    if (is_computed) {
        zero_reduce_<T>(z, b, step);
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
static inline void zero_end_update(ZeroGpu* z, int g) { zero_sent_(z, map_trained(z->map, g)); }

static inline void zero_join_(ZeroGpu* z) {
    CUDA_CHECK(cudaEventRecord(z->joined, z->comm.stream));
    CUDA_CHECK(cudaStreamWaitEvent(z->main.stream, z->joined, 0));
}

// Makes the main stream wait for all updates.
static inline void zero_join_updates(ZeroGpu* z) { zero_join_(z); }

// Returns the gradient of group g.
static inline Gradient zero_group_gradient(const ZeroGpu* z, int g) {
    return Gradient{zero_grads_of_(z, map_trained(z->map, g)), z->grads.dtype};
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
    if (zero_reduces(&z->plan, step) && map_trained(z->map, zero_layers_(z))) { // of the last block
        zero_join_(z);
    }
}

// Sets the state that a micro-step leaves behind, after a graph has made it.
static inline void zero_replayed(ZeroGpu* z) {
    for (int b = 0; b < ZERO_LAYERS_IN_MEMORY; b++) {
        z->resident[b] = b < zero_layers_(z) ? b : -1;
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

// Sets *sum, on the GPU, to the sum of squares of this rank's part of the reduced gradient that
// counts. The main stream has waited for it.
template <class T> static inline void zero_square_sum(WideSum* sum, const ZeroGpu* z, GradientNorm* norm) {
    const Gradient all = zero_gradient(z);
    GradientMode mode = GRADIENT_SET;
    MapSpan span = {0, 0, 0};
    int i = 0;
    do {
        i = map_counted(z->map, i, &span); // the last one is empty
        if (span.count > 0 || mode == GRADIENT_SET) {
            const Gradient part = {zero_element_(all.data, all.dtype, span.begin), all.dtype};
            gradient_square_sum_of<T>(sum, part, span.count, mode, norm, &z->main);
        }
        mode = GRADIENT_ADD;
    } while (i > 0);
}

// Returns the parameters that are kept, which the update writes.
static inline void* zero_update_parameters(const ZeroGpu* z) {
    return z->params_slices ? z->params_slices : z->params;
}

// Returns the gradient of wte as an embedding, laid out like wte; without data unless it is summed
// apart. After the last micro-step and zero_wait_for_gradient, in all ranks, the sum.
static inline Gradient zero_embedding_gradient(const ZeroGpu* z) {
    const Gradient none = {NULL, z->grads.dtype};
    return map_embedding(z->map) ? zero_group_gradient(z, zero_groups_(z)) : none;
}

// Adds `more` to sum (count), each element in fp32 and rounded once.
// grid   ceil(count / 1024)      block   256      shared   none
// moves  S and G in, S out. Bound by memory.
// order  every element on its own
// needs  padding up to a multiple of 4 elements
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
    launch(zero_join_kernel_<S, G>, (unsigned)ceil_div(count, per_block), ZERO_THREADS_, 0, &z->main, sum,
           more, count);
}

// Adds it to what a space has of the gradient of the classifier.
template <class T> static inline void zero_add_embedding_(ZeroGpu* z, Gradient to, MapSpace space) {
    const Map* m = z->map;
    const Gradient embedding = zero_embedding_gradient(z);
    const MapRange own = map_range(m, m->shards[map_embedding(m)->first].tensor, -1, space);
    if (own.count > 0) {
        const size_t at = map_range_at(m, &own, space);
        GRADIENT_DISPATCH(embedding, T, {
            const G* more = (const G*)embedding.data + own.before;
            if (to.dtype == DTYPE_FP32) {
                zero_join_gradients_(z, (float*)to.data + at, more, own.count);
            } else {
                zero_join_gradients_(z, (G*)to.data + at, more, own.count);
            }
        });
    }
}

// Adds it to the reduced gradient of the classifier, once an update.
template <class T> static inline void zero_add_embedding(ZeroGpu* z) {
    zero_wait_for_gradient(z);
    zero_add_embedding_<T>(z, zero_gradient(z), MAP_REDUCED);
    if (z->plan.stage == 0 && z->shard) {
        zero_add_embedding_<T>(z, z->grads, MAP_GRADIENTS);
    }
}

// Makes exchanges of an update among the ranks that divide group g. The main stream waits for them.
static inline void zero_exchange(ZeroGpu* z, int g, const GroupMove* moves, int count) {
    zero_fork_(z);
    group_exchange(moves, count, zero_peers(z, g), z->comm.stream);
    zero_join_(z);
}

// ---- copies of divided arrays ----

// Gathers elements at ... at + count - 1 of each rank's shard of a bucket in `all`, the whole
// bucket on the host; NULL: not in this rank. `mine` is this rank's.
static inline void zero_collect_chunk_(ZeroGpu* z, const Bucket* b, void* all, const void* mine, DType type,
                                       size_t at, size_t count) {
    const MapSpan own = b->in[MAP_OWNED];
    const size_t bytes = count * dtype_bytes(type), shards = (size_t)b->ranks;
    // (shards, count)
    zero_copy_(z, zero_element_(z->pieces, type, own.from / own.count * count), mine, bytes);
    zero_gather_(z, b, z->pieces, zero_slice_in_(z, b, z->pieces, type, shards * count), type,
                 shards * count);
    for (size_t i = 0; all && i < shards; i++) {
        zero_copy_(z, zero_element_(all, type, i * own.count + at), zero_element_(z->pieces, type, i * count),
                   bytes);
    }
}

// Gathers a bucket of an owned array in `all`, which has the whole bucket on the host; NULL: not in
// this rank. Of each rank's shard it gathers elements first ... first + count - 1; `mine` are this
// rank's, on the GPU or on the host. Call it between updates: the data pass through the buffer of
// pieces, after all other communication. Collective. Waits for the GPU.
static inline void zero_collect_some(ZeroGpu* z, const Bucket* b, void* all, const void* mine, DType type,
                                     size_t first, size_t count) {
    const size_t bytes = dtype_bytes(type),
                 room = zero_pieces_bytes_(&z->plan, z->map->totals.largest_gradient, z->location,
                                           z->grads.dtype),
                 most = room / bytes / (size_t)z->plan.size / TENSOR_SHARD_UNIT * TENSOR_SHARD_UNIT;
    zero_fork_(z);
    if (!map_is_divided(z->map) && all) {
        zero_copy_(z, zero_element_(all, type, first), mine, count * bytes);
    }
    for (size_t i = 0; map_is_divided(z->map) && i < count; i += most) {
        zero_collect_chunk_(z, b, all, (const char*)mine + i * bytes, type, first + i,
                            count - i < most ? count - i : most);
    }
    CUDA_CHECK(cudaStreamSynchronize(z->comm.stream));
}

// Gathers all elements of the shards.
static inline void zero_collect(ZeroGpu* z, const Bucket* b, void* all, const void* mine, DType type) {
    zero_collect_some(z, b, all, mine, type, 0, b->in[MAP_OWNED].count);
}

#endif
