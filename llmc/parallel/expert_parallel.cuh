/*
expert_parallel.cuh -- expert_parallel.h on the GPU: the same rounds, by NCCL.

The host must know how many rows travel. So it reads the counts of all ranks in each pass of a layer
and waits for the GPU: such a pass is no CUDA graph. All other work is queued on the main stream.
*/
#ifndef LLMC_EXPERT_PARALLEL_CUH
#define LLMC_EXPERT_PARALLEL_CUH

#include <assert.h>

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/router.cuh"
#include "llmc/parallel/expert_parallel.h"

// The expert group of a layer, with memory for the rows that arrive.
typedef struct {
    const GroupGpu* group; // NULL: nothing is divided
    int *counts, *on_host; // (e, E) as in expert_parallel.h, on the GPU and in pinned memory
    void *in, *out;        // (rows, C)
    float *scale, *dscale; // (rows)
    int *order, *first;    // (rows), (E / e + 1)
    const Gpu* gpu;
} ExpertParallelGpu;

// Returns e.
static inline int expert_parallel_ranks(const ExpertParallelGpu* x) { return x->group ? x->group->size : 1; }

// An array of rows, and memory for those that arrive.
typedef struct {
    void *own, *arrived; // (M), (rows)
    size_t bytes;        // of a row
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

// Lets the host know the counts, which the GPU has; waits for it.
static inline void expert_counts_read(const ExpertParallelGpu* x, const Router* own) {
    const size_t bytes = (size_t)x->group->size * own->E * sizeof(int);
    CUDA_CHECK(cudaMemcpyAsync(x->on_host, x->counts, bytes, cudaMemcpyDeviceToHost, x->gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(x->gpu->stream));
}

// Sets the counts from the router of each rank, after its forward pass. Collective.
static inline void expert_counts(const ExpertParallelGpu* x, const Router* own) {
    int* mine = x->counts + (size_t)x->group->rank * own->E;
    launch(expert_count_kernel, (unsigned)ceil_div(own->E, (int)EXPERT_COUNT_WARPS_), EXPERT_COUNT_THREADS_,
           0, x->gpu, mine, *own);
    // bytes of ints move like those of floats
    group_all_gather(x->counts, mine, (size_t)own->E, DTYPE_FP32, x->group, x->gpu->stream);
    expert_counts_read(x, own);
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

// Returns the router of the rows that arrive from a rank: its experts are those of this rank, and
// each row counts as a token with one expert. `order` only tells padding (-1) from tokens. Scale is
// memory.
static inline Router expert_arrived(const ExpertParallelGpu* x, const Router* own, int from) {
    const int experts = own->E / x->group->size, rank = x->group->rank;
    Router arrived = *own;
    arrived.B = arrived.used = 1;
    arrived.T = expert_span_(x, own, from, rank).tokens;
    arrived.E = experts;
    arrived.first = x->first;
    arrived.order = x->order;
    arrived.scale = x->scale;
    launch(expert_arrive_kernel, (unsigned)experts, ROUTER_BLOCK, 0, x->gpu, x->first, x->order,
           (const int*)x->counts + (size_t)from * own->E + (size_t)rank * experts, experts);
    return arrived;
}

enum { EXPERT_ARRAYS_ = 3 }; // at most, that move together

typedef enum { EXPERT_SEND_, EXPERT_RETURN_ } ExpertWay_;

// Moves rows between this rank's own, of the experts of rank `to`, and those that arrived.
static inline void expert_move_(const ExpertParallelGpu* x, const Router* own, ExpertRound round,
                                const ExpertArrayGpu* arrays, int count, ExpertWay_ way) {
    const ExpertSpan_ mine = expert_span_(x, own, x->group->rank, round.to),
                      theirs = expert_span_(x, own, round.from, x->group->rank);
    GroupMove moves[2 * EXPERT_ARRAYS_];
    int all = 0;
    assert(count <= EXPERT_ARRAYS_);
    for (int i = 0; i < count; i++) {
        const size_t bytes = arrays[i].bytes;
        const GroupMove own_rows = {round.to, (char*)arrays[i].own + mine.first * bytes, mine.rows * bytes,
                                    way == EXPERT_SEND_},
                        arrived = {round.from, arrays[i].arrived, theirs.rows * bytes, way == EXPERT_RETURN_};
        if (mine.rows > 0) {
            moves[all++] = own_rows;
        }
        if (theirs.rows > 0) {
            moves[all++] = arrived;
        }
    }
    group_exchange(moves, all, x->group, x->gpu->stream);
}

// Move rows of `count` arrays: to the experts of a round, or back to where they came from.
static inline void expert_send(const ExpertParallelGpu* x, const Router* own, ExpertRound round,
                               const ExpertArrayGpu* arrays, int count) {
    expert_move_(x, own, round, arrays, count, EXPERT_SEND_);
}

static inline void expert_return(const ExpertParallelGpu* x, const Router* own, ExpertRound round,
                                 const ExpertArrayGpu* arrays, int count) {
    expert_move_(x, own, round, arrays, count, EXPERT_RETURN_);
}

#endif
