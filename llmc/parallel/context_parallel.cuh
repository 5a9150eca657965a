/*
context_parallel.cuh -- context_parallel.h on GPUs, for elements X: float, bf16 or fp16. Rows travel
as they are stored; sums of gradients are fp32, rounded once.

All work is queued on the main stream: the next kernel needs what arrives.
*/
#ifndef LLMC_CONTEXT_PARALLEL_CUH
#define LLMC_CONTEXT_PARALLEL_CUH

#include "llmc/comm/comm_nccl.cuh"
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

enum { CONTEXT_THREADS_ = 256 };

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

// One thread per element of N rows of qkv.
// grid   ceil(N*2K / 256)      block   256      shared   none
// moves  N*2K in and out. Bound by memory.
// order  fixed: no sums
template <class X> __global__ void context_take_kernel(X* own, const X* qkv, ContextRows_ rows) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / rows.columns;
    if (n < rows.N) {
        own[i] =
            qkv[n * attention_qkv_size(rows.sizes) + attention_queries_size(rows.sizes) + i % rows.columns];
    }
}

typedef enum { CONTEXT_TO_SEQUENCE_, CONTEXT_TO_RANKS_ } ContextWay_;

// One thread per element: from the rows of each rank to their places in the sequence, or back.
// grid   ceil(c*N*2K / 256)      block   256      shared   none
// moves  c*N*2K in and out. Bound by memory.
// order  fixed: no sums
template <class X>
__global__ void context_place_kernel(X* to, const X* from, ContextRows_ rows, size_t count, ContextWay_ way) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count * rows.columns) {
        const size_t column = i % rows.columns,
                     place = context_row(rows.sizes, i / rows.columns) * rows.columns + column;
        to[way == CONTEXT_TO_SEQUENCE_ ? place : i] = from[way == CONTEXT_TO_SEQUENCE_ ? i : place];
    }
}

// One thread per element of the rank's own rows adds up the pieces (c, N, 2K) in fp32.
// grid   ceil(N*2K / 256)      block   256      shared   none
// moves  c*N*2K in, N*2K out. Bound by memory.
// order  fixed: of the ranks
template <class X>
__global__ void context_sum_kernel(X* dqkv, const X* pieces, int ranks, ContextRows_ rows) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / rows.columns;
    if (n >= rows.N) {
        return;
    }
    float sum = to_float(pieces[i]);
    for (int r = 1; r < ranks; r++) {
        sum += to_float(pieces[(size_t)r * rows.N * rows.columns + i]);
    }
    dqkv[n * attention_qkv_size(rows.sizes) + attention_queries_size(rows.sizes) + i % rows.columns] =
        from_float<X>(sum);
}

static inline unsigned context_grid_(size_t elements) {
    return (unsigned)ceil_div(elements, (size_t)CONTEXT_THREADS_);
}

template <class X>
static inline void context_place_(X* to, const X* from, ContextRows_ rows, int ranks, ContextWay_ way,
                                  const Gpu* gpu) {
    const size_t count = (size_t)ranks * rows.N;
    launch(context_place_kernel<X>, context_grid_(count * rows.columns), CONTEXT_THREADS_, 0, gpu, to, from,
           rows, count, way);
}

// Returns kv, which is valid until the next call.
template <class X>
static inline const X* context_gather(const ContextParallelGpu<X>* c, const X* qkv, AttentionSizes sizes,
                                      const Gpu* gpu) {
    const ContextRows_ rows = context_rows_(sizes);
    const size_t elements = rows.N * rows.columns;
    X* own = c->moved + (size_t)sizes.chunks.rank * elements;
    launch(context_take_kernel<X>, context_grid_(elements), CONTEXT_THREADS_, 0, gpu, own, qkv, rows);
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
    launch(context_sum_kernel<X>, context_grid_(elements), CONTEXT_THREADS_, 0, gpu, dqkv, (const X*)c->kv,
           c->group->size, rows);
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
