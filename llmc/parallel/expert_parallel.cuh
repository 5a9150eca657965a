/*
expert_parallel.cuh -- expert_parallel.h on the GPU: the same rounds, by NCCL.

The host must know how many rows travel. So it reads the counts of all ranks in the forward pass of
a layer and waits for the GPU: such a pass is no CUDA graph. The backward pass finds them in pinned
memory, which keeps the counts of each layer.

Rows travel on a stream of their own. In a pass without a cache there is memory for those of two
rounds: the rows of the next one travel while the main stream computes on these.
*/
#ifndef LLMC_EXPERT_PARALLEL_CUH
#define LLMC_EXPERT_PARALLEL_CUH

#include <stddef.h>

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/model/model.h"
#include "llmc/ops/router.cuh"
#include "llmc/parallel/expert_parallel.h"

enum { EXPERT_SETS = 2 };

// Memory for rows that arrive from a rank.
typedef struct {
    void *in, *out;        // (rows, C)
    float *scale, *dscale; // (rows)
} ExpertRowsGpu;

// Parts of a model that all of its layers with divided experts share; zeros if none are divided.
typedef struct {
    int* counts;                // (L, e, E) in pinned memory
    ExpertRowsGpu next;         // of every second round; NULL: none
    cudaStream_t stream;        // on which rows travel
    cudaEvent_t ready, arrived; // last work of the main stream; last rows that were sent
} ExpertTrafficGpu;

// The expert group of a layer.
typedef struct {
    const GroupGpu* group;           // NULL: nothing is divided
    int *counts, *on_host;           // (e, E) of expert_parallel.h, on the GPU and in pinned memory
    ExpertRowsGpu rows[EXPERT_SETS]; // of rounds, in turn
    int sets;                        // 1: all rounds use the first
    int *order, *first;              // (rows), (E / e + 1)
    const ExpertTrafficGpu* traffic;
    const Gpu* gpu;
} ExpertParallelGpu;

// Takes memory as large as the activation at this member.
static inline void* expert_take_(Memory* memory, const TensorRow* rows, size_t member) {
    int i = 0;
    while (rows[i].member != member) {
        i++;
    }
    return memory_take(memory, "rows of experts: the next", MEMORY_DEVICE,
                       array_bytes(tensor_elements(&rows[i]), rows[i].element_bytes));
}

// Opens the shared parts for the part of a model, with these activations. A model that only
// generates (`is_cached`) has no second set.
static inline void expert_traffic_open(ExpertTrafficGpu* t, Memory* memory, ModelConfig cfg,
                                       const TensorRow* rows, int is_cached) {
    int least, greatest;
    if (!model_divides_experts(cfg)) {
        return;
    }
    t->counts = (int*)memory_take(memory, "staging: rows of experts", MEMORY_PINNED,
                                  (size_t)cfg.L * cfg.part.expert_ranks * cfg.E * sizeof(int));
    if (!is_cached) {
        t->next.in = expert_take_(memory, rows, offsetof(ModelActivations, arrived_in));
        t->next.out = expert_take_(memory, rows, offsetof(ModelActivations, arrived_out));
        t->next.scale = (float*)expert_take_(memory, rows, offsetof(ModelActivations, arrived_scale));
        t->next.dscale = (float*)expert_take_(memory, rows, offsetof(ModelActivations, darrived_scale));
    }
    if (!memory_is_dry(memory)) {
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CUDA_CHECK(cudaStreamCreateWithPriority(&t->stream, cudaStreamNonBlocking, greatest));
        CUDA_CHECK(cudaEventCreateWithFlags(&t->ready, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&t->arrived, cudaEventDisableTiming));
    }
}

// Closes the shared parts. Their stream must have finished.
static inline void expert_traffic_close(ExpertTrafficGpu* t) {
    if (t->stream) {
        CUDA_CHECK(cudaEventDestroy(t->arrived));
        CUDA_CHECK(cudaEventDestroy(t->ready));
        CUDA_CHECK(cudaStreamDestroy(t->stream));
    }
}

// Returns e.
static inline int expert_parallel_ranks(const ExpertParallelGpu* x) { return x->group ? x->group->size : 1; }

// An array of rows, and memory for those that arrive.
typedef struct {
    void *own, *arrived[EXPERT_SETS]; // (M), (rows)
    size_t bytes;                     // of a row
} ExpertArrayGpu;

enum { EXPERT_COUNT_WARPS_ = 8, EXPERT_COUNT_THREADS_ = 32 * EXPERT_COUNT_WARPS_ };

// ---- counts ----

// A warp counts the rows of an expert: those before the padding, which is less than a tile.
// grid   ceil(E / 8)      block   256 = 8 experts      shared   none
// moves  32 places for each expert in. Bound by latency.
// order  fixed: no sums
static __global__ void __launch_bounds__(EXPERT_COUNT_THREADS_) expert_count_kernel(int* counts, Router r) {
    const int e = (int)(blockIdx.x * EXPERT_COUNT_WARPS_ + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    if (e >= r.E) {
        return; // the whole warp
    }
    const int begin = r.first[e], end = r.first[e + 1], m = end - 1 - lane;
    const unsigned padding = __ballot_sync(0xffffffffu, m >= begin && r.order[m] < 0);
    if (lane == 0) {
        counts[e] = end - begin - __popc(padding);
    }
}

// Sets the counts from the router of each rank, after its forward pass. Collective. Waits for the
// GPU.
static inline void expert_counts(const ExpertParallelGpu* x, const Router* own) {
    int* mine = x->counts + (size_t)x->group->rank * own->E;
    const size_t bytes = (size_t)x->group->size * own->E * sizeof(int);
    launch(expert_count_kernel, (unsigned)ceil_div(own->E, (int)EXPERT_COUNT_WARPS_), EXPERT_COUNT_THREADS_,
           0, x->gpu, mine, *own);
    // bytes of ints move like those of floats
    group_all_gather(x->counts, mine, (size_t)own->E, DTYPE_FP32, x->group, x->gpu->stream);
    CUDA_CHECK(cudaMemcpyAsync(x->on_host, x->counts, bytes, cudaMemcpyDeviceToHost, x->gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(x->gpu->stream));
}

// ---- rows ----

// Rows of a rank in the experts of another one.
typedef struct {
    size_t first, rows; // with padding
    int tokens;         // rows without padding
} ExpertSpan_;

// Returns the rows of the tokens of rank `from` in the experts of rank `to`.
static inline ExpertSpan_ expert_span_(const ExpertParallelGpu* x, const Router* own, int from, int to) {
    const int experts = own->E / x->group->size;
    const int* counts = x->on_host + (size_t)from * own->E;
    ExpertSpan_ span = {0, 0, 0};
    for (int e = 0; e < (to + 1) * experts; e++) {
        const size_t rows = (size_t)ceil_div(counts[e], (int)ROUTER_TILE) * ROUTER_TILE;
        span.first += e < to * experts ? rows : 0;
        span.rows += e < to * experts ? 0 : rows;
        span.tokens += e < to * experts ? 0 : counts[e];
    }
    return span;
}

// Sets first and order of the rows that arrive. A block tells padding from tokens of its expert.
// grid   E / e      block   1024      shared   4 bytes
// moves  4 bytes for each row out. Bound by latency.
// order  fixed: no sums
static __global__ void __launch_bounds__(ROUTER_BLOCK)
    expert_arrive_kernel(int* first, int* order, const int* counts, int experts) {
    SMEM_ARRAY(int, begin, [1]);
    const int e = (int)threadIdx.x,
              rows = e < experts ? ceil_div(counts[e], (int)ROUTER_TILE) * ROUTER_TILE : 0,
              below = block_scan(rows), expert = (int)blockIdx.x;
    if (blockIdx.x == 0 && e < experts) {
        first[e] = below;
    }
    if (blockIdx.x == 0 && e == experts - 1) {
        first[experts] = below + rows;
    }
    if (e == expert) {
        begin[0] = below;
    }
    __syncthreads();
    const int count = counts[expert], all = ceil_div(count, (int)ROUTER_TILE) * ROUTER_TILE;
    for (int m = (int)threadIdx.x; m < all; m += ROUTER_BLOCK) {
        order[begin[0] + m] = m < count ? 0 : -1;
    }
}

// Returns the router of the rows that arrive from a rank, in this set: its experts are those of
// this rank, and each row counts as a token with one expert. `order` only tells padding (-1) from
// tokens.
static inline Router expert_arrived(const ExpertParallelGpu* x, const Router* own, int from, int set) {
    const int experts = own->E / x->group->size, rank = x->group->rank;
    Router arrived = *own;
    arrived.B = arrived.used = 1;
    arrived.T = expert_span_(x, own, from, rank).tokens;
    arrived.E = experts;
    arrived.first = x->first;
    arrived.order = x->order;
    arrived.scale = x->rows[set].scale;
    launch(expert_arrive_kernel, (unsigned)experts, ROUTER_BLOCK, 0, x->gpu, x->first, x->order,
           (const int*)x->counts + (size_t)from * own->E + (size_t)rank * experts, experts);
    return arrived;
}

// Arrays that move together.
enum { EXPERT_ARRAYS_ = 3 }; // at most
typedef struct {
    ExpertArrayGpu arrays[EXPERT_ARRAYS_];
    int count;
} ExpertMoves;

typedef enum { EXPERT_SEND_, EXPERT_RETURN_ } ExpertWay_;

// Moves the rows of round k: this rank's own ones to another rank's experts, while those of a third
// rank arrive; or the results back.
static inline void expert_move_(const ExpertParallelGpu* x, const Router* own, int k, const ExpertMoves* of,
                                ExpertWay_ way) {
    const ExpertRound round = expert_round(x->group->rank, x->group->size, k);
    const ExpertSpan_ mine = expert_span_(x, own, x->group->rank, round.to),
                      theirs = expert_span_(x, own, round.from, x->group->rank);
    GroupMove moves[2 * EXPERT_ARRAYS_];
    int all = 0;
    for (int i = 0; i < of->count; i++) {
        const ExpertArrayGpu* a = &of->arrays[i];
        const GroupMove own_rows = {round.to, (char*)a->own + mine.first * a->bytes, mine.rows * a->bytes,
                                    way == EXPERT_SEND_},
                        arrived = {round.from, a->arrived[k % x->sets], theirs.rows * a->bytes,
                                   way == EXPERT_RETURN_};
        if (mine.rows > 0) {
            moves[all++] = own_rows;
        }
        if (theirs.rows > 0) {
            moves[all++] = arrived;
        }
    }
    group_exchange(moves, all, x->group, x->traffic->stream);
}

// Makes the next transfer of rows wait for all work queued on the main stream so far.
static inline void expert_fork_(const ExpertParallelGpu* x) {
    CUDA_CHECK(cudaEventRecord(x->traffic->ready, x->gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(x->traffic->stream, x->traffic->ready, 0));
}

// Sends the rows of round k, if there is such a round, and marks when they have arrived.
static inline void expert_send_(const ExpertParallelGpu* x, const Router* own, int k,
                                const ExpertMoves* sent) {
    if (k < x->group->size) {
        expert_move_(x, own, k, sent, EXPERT_SEND_);
        CUDA_CHECK(cudaEventRecord(x->traffic->arrived, x->traffic->stream));
    }
}

// Runs all rounds of a layer. Each sends rows, calls compute(rank that they came from, their set),
// which queues work on the main stream, and returns its results. Rows of round k + 1 are sent
// before the results of round k, so they arrive in the meantime. Rows of round k + 2 are sent after
// these results, whose memory they reuse.
template <class Compute>
static inline void expert_rounds(const ExpertParallelGpu* x, const Router* own, const ExpertMoves* sent,
                                 const ExpertMoves* returned, Compute compute) {
    const int e = x->group->size;
    const cudaStream_t main = x->gpu->stream;
    expert_fork_(x);
    expert_send_(x, own, 0, sent);
    for (int k = 0; k < e; k++) {
        CUDA_CHECK(cudaStreamWaitEvent(main, x->traffic->arrived, 0));
        if (x->sets > 1) {
            expert_send_(x, own, k + 1, sent);
        }
        compute(expert_round(x->group->rank, e, k).from, k % x->sets);
        expert_fork_(x);
        expert_move_(x, own, k, returned, EXPERT_RETURN_);
        if (x->sets == 1) {
            expert_send_(x, own, k + 1, sent);
        }
    }
    CUDA_CHECK(cudaEventRecord(x->traffic->arrived, x->traffic->stream));
    CUDA_CHECK(cudaStreamWaitEvent(main, x->traffic->arrived, 0));
}

#endif
