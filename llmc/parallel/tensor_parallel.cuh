/*
tensor_parallel.cuh -- tensor_parallel.h on GPUs: tensors of the stream are floatX, sums are fp32.

Parts travel as floatX, and a sum is rounded once, after the bias and the residual:

    out (R, C) = residual + (part_0 + part_1 + ... + bias)

All is queued on the main stream, which may be captured: the next kernel needs it anyway. With one
rank the matmul adds the bias and the residual.
*/
#ifndef LLMC_TENSOR_PARALLEL_CUH
#define LLMC_TENSOR_PARALLEL_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/elements.cuh"
#include "llmc/parallel/tensor_parallel.h"
#include "llmc/parallel/zero.cuh"

// A pass on a GPU, with the memory of TensorParallel.
typedef struct {
    TensorCut cut;
    const GroupGpu* group;
    floatX *gathered, *parts, *arrived;
    const Gpu* gpu;
} TensorParallelGpu;

static inline floatX* tensor_part(const TensorParallelGpu* tp, floatX* out) {
    return tensor_is_cut(tp->cut) ? tp->parts : out;
}

// Returns the residual that the matmul of a part adds: NULL if there are several parts, because
// tensor_sum adds it.
static inline const floatX* tensor_residual(const TensorParallelGpu* tp, const floatX* residual) {
    return tensor_is_cut(tp->cut) ? NULL : residual;
}

// ---- exchange ----

static inline GroupMove tensor_gpu_move_(const TensorParallelGpu* tp, int peer, const floatX* data,
                                         TensorTokens tokens, int sends) {
    const GroupMove move = {peer, (void*)data, (size_t)tokens.count * tp->cut.C * sizeof(floatX), sends};
    return move;
}

static inline const floatX* tensor_gather(const TensorParallelGpu* tp, int which, const floatX* rows) {
    const TensorCut cut = tp->cut;
    const size_t C = (size_t)cut.C;
    floatX* all = tp->gathered + (size_t)which * cut.N * C;
    if (!tensor_is_cut(cut) || !cut.cuts_tokens) {
        return rows;
    }
    GroupMove moves[2 * MODEL_MAX_TENSOR_RANKS];
    for (int r = 0; r < cut.ranks; r++) {
        const TensorTokens from = tensor_tokens(cut, r);
        moves[2 * r] = tensor_gpu_move_(tp, r, all + from.first * C, from, 0);
        moves[2 * r + 1] = tensor_gpu_move_(tp, r, rows, tensor_rows(cut), 1);
    }
    group_exchange(moves, 2 * cut.ranks, tp->group, tp->gpu->stream);
    return all;
}

// Sends the rows of this rank's part to the ranks that have them; sets `arrived`.
static inline void tensor_gpu_exchange_parts_(const TensorParallelGpu* tp) {
    const TensorCut cut = tp->cut;
    const TensorTokens own = tensor_rows(cut);
    const size_t C = (size_t)cut.C;
    GroupMove moves[2 * MODEL_MAX_TENSOR_RANKS];
    for (int r = 0; r < cut.ranks; r++) {
        const TensorTokens to = tensor_tokens(cut, r);
        moves[2 * r] = tensor_gpu_move_(tp, r, tp->parts + to.first * C, to, 1);
        moves[2 * r + 1] = tensor_gpu_move_(tp, r, tp->arrived + (size_t)r * own.count * C, own, 0);
    }
    group_exchange(moves, 2 * cut.ranks, tp->group, tp->gpu->stream);
}

// Gathers all (t, bytes), in which this rank has set its own. Collective.
static inline void tensor_gather_all(const TensorParallelGpu* tp, void* all, size_t bytes) {
    assert(bytes % sizeof(float) == 0);
    if (tensor_is_cut(tp->cut)) {
        group_all_gather(all, (char*)all + (size_t)tp->cut.rank * bytes, bytes / sizeof(float), DTYPE_FP32,
                         tp->group, tp->gpu->stream);
    }
}

// ---- the sum ----

// Rows of a block; threads and elements of a thread where a block has a unit of elements.
enum { TENSOR_ROWS_ = 8, TENSOR_THREADS_ = 256, TENSOR_PER_THREAD_ = TENSOR_SHARD_UNIT / TENSOR_THREADS_ };

// A warp adds up 32 WIDTH columns of a row: the parts (ranks, rows, C) in their order, then bias
// (C), then residual (rows, C), each of which may be NULL.
// grid   (ceil(rows / 8), ceil(C / (32 WIDTH)))      block   (32, 8)      shared   none
// moves  (ranks + 1) rows*C in, rows*C out; bias stays in L2. Bound by memory.
// order  rank after rank
// needs  C a multiple of WIDTH, and aligned addresses where that is a pack
template <class T, int WIDTH>
__global__ void tensor_sum_kernel(T* out, const T* residual, const T* parts, const T* bias, int ranks,
                                  int rows, int C) {
    const int n = (int)(blockIdx.x * TENSOR_ROWS_ + threadIdx.y),
              c = (int)(blockIdx.y * 32 + threadIdx.x) * WIDTH;
    if (n >= rows || c >= C) {
        return;
    }
    const size_t at = (size_t)n * C + c, stride = (size_t)rows * C;
    float sum[WIDTH] = {};
    for (int i = 0; i < ranks + 2; i++) {
        const T* from = i < ranks   ? parts + (size_t)i * stride + at
                        : i > ranks ? (residual ? residual + at : NULL)
                                    : (bias ? bias + c : NULL);
        if (from) {
            const Elements<T, WIDTH> x = elements_load<WIDTH>(from);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                sum[k] += to_float(x[k]);
            }
        }
    }
    Elements<T, WIDTH> rounded;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        rounded[k] = from_float<T>(sum[k]);
    }
    elements_store(out + at, rounded);
}

// Sets out (rows, C) to the sum of parts (ranks, rows, C), of bias and of residual; out may be
// residual.
template <class T>
static inline void tensor_sum_parts(T* out, const T* residual, const T* parts, const T* bias, int ranks,
                                    int rows, int C, const Gpu* gpu) {
    const uintptr_t addresses = (uintptr_t)out | (uintptr_t)residual | (uintptr_t)parts | (uintptr_t)bias;
    const int is_packed = C % Pack<T>::SIZE == 0 && addresses % 16 == 0,
              width = is_packed ? Pack<T>::SIZE : 1;
    if (rows > 0) {
        launch(is_packed ? tensor_sum_kernel<T, Pack<T>::SIZE> : tensor_sum_kernel<T, 1>,
               dim3((unsigned)ceil_div(rows, (int)TENSOR_ROWS_), (unsigned)ceil_div(C, 32 * width)),
               dim3(32, TENSOR_ROWS_), 0, gpu, out, residual, parts, bias, ranks, rows, C);
    }
}

// Sets out (R, C) to residual plus the sum of the parts of all ranks and of bias (C); both may be
// NULL. Collective.
static inline void tensor_sum(const TensorParallelGpu* tp, floatX* out, const floatX* residual,
                              const floatX* bias) {
    if (!tensor_is_cut(tp->cut)) {
        return;
    }
    tensor_gpu_exchange_parts_(tp);
    tensor_sum_parts(out, residual, (const floatX*)tp->arrived, bias, tp->cut.ranks,
                     tensor_rows(tp->cut).count, tp->cut.C, tp->gpu);
}

// ---- gradients of tensors that are not cut ----

// Copies the parts of an array to mail, one after the other; a block copies a unit.
// grid   units      block   256      shared   none
// moves  G in, G out. Bound by memory.
template <class G>
__global__ void __launch_bounds__(TENSOR_THREADS_)
    tensor_parts_take_kernel(G* mail, const G* array, const uint32_t* numbers) {
    const size_t i = threadIdx.x * TENSOR_PER_THREAD_;
    elements_store(
        mail + (size_t)blockIdx.x * TENSOR_SHARD_UNIT + i,
        elements_load<TENSOR_PER_THREAD_>(array + (size_t)numbers[blockIdx.x] * TENSOR_SHARD_UNIT + i));
}

// Sets the parts of an array to the sums of the mail (ranks, units, TENSOR_SHARD_UNIT).
// grid   units      block   256      shared   none
// moves  ranks G in, G out. Bound by memory.
// order  rank after rank, in fp32; rounded once
template <class G>
__global__ void __launch_bounds__(TENSOR_THREADS_)
    tensor_parts_sum_kernel(G* array, const G* mail, const uint32_t* numbers, int ranks) {
    const size_t i = threadIdx.x * TENSOR_PER_THREAD_, stride = (size_t)gridDim.x * TENSOR_SHARD_UNIT;
    float sum[TENSOR_PER_THREAD_] = {};
    for (int r = 0; r < ranks; r++) {
        const Elements<G, TENSOR_PER_THREAD_> part = elements_load<TENSOR_PER_THREAD_>(
            mail + (size_t)r * stride + (size_t)blockIdx.x * TENSOR_SHARD_UNIT + i);
#pragma unroll
        for (int k = 0; k < TENSOR_PER_THREAD_; k++) {
            sum[k] += to_float(part[k]);
        }
    }
    Elements<G, TENSOR_PER_THREAD_> rounded;
#pragma unroll
    for (int k = 0; k < TENSOR_PER_THREAD_; k++) {
        rounded[k] = from_float<G>(sum[k]);
    }
    elements_store(array + (size_t)numbers[blockIdx.x] * TENSOR_SHARD_UNIT + i, rounded);
}

template <class G>
static inline void tensor_parts_put_(G* array, const G* mail, TensorUnits parts, int ranks, const Gpu* gpu) {
    launch(tensor_parts_sum_kernel<G>, (unsigned)parts.count, TENSOR_THREADS_, 0, gpu, array, mail,
           (const uint32_t*)parts.numbers, ranks);
}

template <class G>
static inline void tensor_parts_sum_array_(G* array, G* mail, TensorUnits parts, const GroupGpu* group,
                                           const Gpu* gpu) {
    const size_t elements = parts.count * TENSOR_SHARD_UNIT;
    G* own = mail + (size_t)group->rank * elements;
    launch(tensor_parts_take_kernel<G>, (unsigned)parts.count, TENSOR_THREADS_, 0, gpu, own, (const G*)array,
           (const uint32_t*)parts.numbers);
    group_all_gather(mail, own, elements, DTYPE_OF(G), group, gpu->stream);
    tensor_parts_put_(array, (const G*)mail, parts, group->size, gpu);
}

// Replaces the parts in the reduced gradient of a step, for which the main stream has waited, by
// their sums over the group. Collective.
template <class T>
static inline void tensor_parts_sum(const TensorParts* p, const ZeroGpu* z, const GroupGpu* group,
                                    const Gpu* gpu) {
    const Gradient arrays[] = {zero_gradient(z), z->grads};
    const TensorUnits parts[] = {p->reduced, p->whole};
    for (int i = 0; i < 2; i++) {
        if (parts[i].count > 0) {
            GRADIENT_DISPATCH(arrays[i], T,
                              tensor_parts_sum_array_((G*)arrays[i].data, (G*)p->mail, parts[i], group, gpu));
        }
    }
}

#endif
