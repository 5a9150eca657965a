/*
context_parallel.cuh -- context_parallel.h on GPUs, for elements X: float, bf16 or fp16. Rows travel
as they are stored; sums of gradients are fp32, rounded once.

All work is queued on the main stream: the next kernel needs what arrives.
*/
#ifndef LLMC_CONTEXT_PARALLEL_CUH
#define LLMC_CONTEXT_PARALLEL_CUH

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/parallel/context_parallel.h"

// Memory of a rank for one layer at a time, as ContextParallel has it; none if sequences are whole.
template <class X> struct ContextParallelGpu {
    const GroupGpu* group;
    X *kv, *dkv, *moved;
};

template <class X>
static inline void context_open(ContextParallelGpu<X>* c, Memory* memory, AttentionSizes sizes,
                                const GroupGpu* group) {
    const size_t n = context_elements(sizes);
    *c = ContextParallelGpu<X>{};
    c->group = group;
    X** const arrays[] = {&c->kv, &c->dkv, &c->moved};
    for (int i = 0; i < 3 && n > 0; i++) {
        *arrays[i] = (X*)memory_take(memory, "keys and values of other ranks", MEMORY_DEVICE, n * sizeof(X));
    }
}

enum { CONTEXT_THREADS_ = 128 };

// Rows of kv and of `moved` of a group of ranks.
typedef struct {
    AttentionSizes sizes;
    size_t columns, N; // of a row; rows of a rank
} ContextRows_;

static inline ContextRows_ context_rows_(AttentionSizes sizes) {
    const ContextRows_ rows = {sizes, 2 * (size_t)attention_keys_size(sizes),
                               (size_t)sizes.B * (size_t)sizes.T};
    return rows;
}

// Returns the place of the keys in row n of qkv.
HOST_DEVICE size_t context_keys_at_(ContextRows_ rows, size_t n) {
    return n * attention_qkv_size(rows.sizes) + attention_queries_size(rows.sizes);
}

// A block copies a row of qkv, W elements a thread at a time.
// grid   N      block   128      shared   none
// moves  N*2K in and out. Bound by memory.
// order  fixed: no sums
// needs  queries and 2K multiples of W
template <int W, class X>
__global__ void __launch_bounds__(CONTEXT_THREADS_)
    context_take_kernel(X* own, const X* qkv, ContextRows_ rows) {
    const size_t n = blockIdx.x, from = context_keys_at_(rows, n), to = n * rows.columns;
    for (size_t i = threadIdx.x * W; i < rows.columns; i += CONTEXT_THREADS_ * W) {
        elements_store(own + to + i, elements_load<W>(qkv + from + i));
    }
}

typedef enum { CONTEXT_TO_SEQUENCE_, CONTEXT_TO_RANKS_ } ContextWay_;

// A block copies a row of a rank to its place in the sequence, or back.
// grid   c*N      block   128      shared   none
// moves  c*N*2K in and out. Bound by memory.
// order  fixed: no sums
// needs  2K a multiple of W
template <int W, class X>
__global__ void __launch_bounds__(CONTEXT_THREADS_)
    context_place_kernel(X* to, const X* from, ContextRows_ rows, ContextWay_ way) {
    const size_t at = blockIdx.x * rows.columns, place = context_row(rows.sizes, blockIdx.x) * rows.columns;
    to += way == CONTEXT_TO_SEQUENCE_ ? place : at;
    from += way == CONTEXT_TO_SEQUENCE_ ? at : place;
    for (size_t i = threadIdx.x * W; i < rows.columns; i += CONTEXT_THREADS_ * W) {
        elements_store(to + i, elements_load<W>(from + i));
    }
}

// A block adds up a row of this rank's own keys and values in the pieces (c, N, 2K), in fp32.
// grid   N      block   128      shared   none
// moves  c*N*2K in, N*2K out. Bound by memory.
// order  fixed: of the ranks
// needs  queries and 2K multiples of W
template <int W, class X>
__global__ void __launch_bounds__(CONTEXT_THREADS_)
    context_sum_kernel(X* dqkv, const X* pieces, int ranks, ContextRows_ rows) {
    const size_t n = blockIdx.x, from = n * rows.columns, to = context_keys_at_(rows, n),
                 piece = rows.N * rows.columns;
    for (size_t i = threadIdx.x * W; i < rows.columns; i += CONTEXT_THREADS_ * W) {
        float sum[W] = {};
        for (int r = 0; r < ranks; r++) {
            const Elements<X, W> next = elements_load<W>(pieces + r * piece + from + i);
#pragma unroll
            for (int k = 0; k < W; k++) {
                sum[k] = r > 0 ? sum[k] + to_float(next[k]) : to_float(next[k]);
            }
        }
        Elements<X, W> rounded;
#pragma unroll
        for (int k = 0; k < W; k++) {
            rounded[k] = from_float<X>(sum[k]);
        }
        elements_store(dqkv + to + i, rounded);
    }
}

// Returns true if threads can take 16 bytes at a time; else they take one element.
template <class X> static inline int context_is_wide_(ContextRows_ rows) {
    const size_t W = 16 / sizeof(X);
    return rows.columns % W == 0 && (size_t)attention_queries_size(rows.sizes) % W == 0;
}

template <class X> static inline void context_take_(X* own, const X* qkv, ContextRows_ rows, const Gpu* gpu) {
    constexpr int W = 16 / sizeof(X);
    launch(context_is_wide_<X>(rows) ? context_take_kernel<W, X> : context_take_kernel<1, X>,
           (unsigned)rows.N, CONTEXT_THREADS_, 0, gpu, own, qkv, rows);
}

template <class X>
static inline void context_place_(X* to, const X* from, ContextRows_ rows, int ranks, ContextWay_ way,
                                  const Gpu* gpu) {
    constexpr int W = 16 / sizeof(X);
    launch(context_is_wide_<X>(rows) ? context_place_kernel<W, X> : context_place_kernel<1, X>,
           (unsigned)((size_t)ranks * rows.N), CONTEXT_THREADS_, 0, gpu, to, from, rows, way);
}

template <class X>
static inline void context_add_(X* dqkv, const X* pieces, int ranks, ContextRows_ rows, const Gpu* gpu) {
    constexpr int W = 16 / sizeof(X);
    launch(context_is_wide_<X>(rows) ? context_sum_kernel<W, X> : context_sum_kernel<1, X>, (unsigned)rows.N,
           CONTEXT_THREADS_, 0, gpu, dqkv, pieces, ranks, rows);
}

// Returns kv, which is valid until the next call.
template <class X>
static inline const X* context_gather(const ContextParallelGpu<X>* c, const X* qkv, AttentionSizes sizes,
                                      const Gpu* gpu) {
    const ContextRows_ rows = context_rows_(sizes);
    const size_t elements = rows.N * rows.columns;
    X* own = c->moved + (size_t)sizes.chunks.rank * elements;
    context_take_(own, qkv, rows, gpu);
    group_all_gather(c->moved, own, elements, DTYPE_OF(X), c->group, gpu->stream);
    context_place_(c->kv, (const X*)c->moved, rows, c->group->size, CONTEXT_TO_SEQUENCE_, gpu);
    return c->kv;
}

// Sets the columns of keys and values of dqkv. Overwrites kv.
template <class X>
static inline void context_sum(X* dqkv, const ContextParallelGpu<X>* c, AttentionSizes sizes,
                               const Gpu* gpu) {
    const ContextRows_ rows = context_rows_(sizes);
    const size_t elements = rows.N * rows.columns;
    context_place_(c->moved, (const X*)c->dkv, rows, c->group->size, CONTEXT_TO_RANKS_, gpu);
    group_all_to_all(c->kv, c->moved, elements, DTYPE_OF(X), c->group, gpu->stream);
    context_add_(dqkv, (const X*)c->kv, c->group->size, rows, gpu);
}

// Sets all (B, W), on the host, to words of each rank's tokens (B, T) on the GPU, losses for
// example.
template <class X>
static inline void context_gather_tokens(void* all, const ContextParallelGpu<X>* c, const void* own,
                                         AttentionSizes sizes, const Gpu* gpu) {
    const size_t N = (size_t)sizes.B * sizes.T;
    if (sizes.chunks.last == 0) {
        gpu_copy(all, own, N * sizeof(float), gpu);
        return;
    }
    const size_t count = N * (size_t)c->group->size;
    float* moved = (float*)check_alloc(count, sizeof(float), "words of other ranks");
    group_all_gather(c->kv, own, N, DTYPE_FP32, c->group, gpu->stream);
    gpu_copy(moved, c->kv, count * sizeof(float), gpu);
    for (size_t i = 0; i < count; i++) {
        memcpy((float*)all + context_row(sizes, i), moved + i, sizeof(float));
    }
    free(moved);
}

#endif
