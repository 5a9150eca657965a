/*
tensor_parallel.cuh -- tensor_parallel.h on GPUs: tensors of the stream are floatX, sums are fp32.

Parts travel as floatX, and a sum is rounded once, after the bias and the residual:

    out (R, C) = residual + (part_0 + part_1 + ... + bias)

All is queued on the main stream, which may be captured: the next kernel needs it anyway. Without
slices the matmul adds the bias and the residual.
*/
#ifndef LLMC_TENSOR_PARALLEL_CUH
#define LLMC_TENSOR_PARALLEL_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/elements.cuh"
#include "llmc/ops/norm.cuh"
#include "llmc/parallel/tensor_parallel.h"
#include "llmc/parallel/zero.cuh"

// The slices of a process in a pass.
typedef struct {
    TensorParallel cut; // without memory
    const GroupGpu* group;
    floatX *gathered, *parts, *arrived; // those of TensorParallel
    const Gpu* gpu;
} TensorParallelGpu;

static inline int tensor_is_sliced(const TensorParallelGpu* tp) { return tensor_is_sliced(&tp->cut); }
static inline TensorTokens tensor_rows(const TensorParallelGpu* tp) { return tensor_rows(&tp->cut); }

static inline floatX* tensor_part(const TensorParallelGpu* tp, int i, floatX* out) {
    return tensor_is_sliced(tp) ? tp->parts + (size_t)i * tp->cut.N * tp->cut.C : out;
}

// Returns the bias or residual that the matmul of a slice adds: NULL if there are slices, because
// tensor_sum does that.
static inline const floatX* tensor_of_matmul(const TensorParallelGpu* tp, const floatX* added) {
    return tensor_is_sliced(tp) ? NULL : added;
}

// ---- exchange ----

static inline GroupMove tensor_gpu_move_(const TensorParallelGpu* tp, int peer, const floatX* data,
                                         TensorTokens tokens, int sends) {
    const GroupMove move = {peer, (void*)data, (size_t)tokens.count * tp->cut.C * sizeof(floatX), sends};
    return move;
}

static inline const floatX* tensor_gather(const TensorParallelGpu* tp, int which, const floatX* rows) {
    const int ranks = tp->group->size;
    const size_t C = (size_t)tp->cut.C;
    floatX* all = tp->gathered + (size_t)which * tp->cut.N * C;
    if (ranks == 1 || !tp->cut.cuts_tokens) {
        return rows;
    }
    GroupMove moves[2 * MODEL_MAX_SLICES];
    for (int r = 0; r < ranks; r++) {
        const TensorTokens from = tensor_rows_of(&tp->cut, r);
        moves[2 * r] = tensor_gpu_move_(tp, r, all + from.first * C, from, 0);
        moves[2 * r + 1] = tensor_gpu_move_(tp, r, rows, tensor_rows(tp), 1);
    }
    group_exchange(moves, 2 * ranks, tp->group, tp->gpu->stream);
    return all;
}

// Sends the part of each slice to the processes that have its rows; sets `arrived`.
static inline void tensor_gpu_exchange_parts_(const TensorParallelGpu* tp) {
    const int ranks = tp->group->size, slices = tp->cut.slices;
    const TensorTokens own = tensor_rows(tp);
    const size_t C = (size_t)tp->cut.C;
    GroupMove moves[2 * MODEL_MAX_SLICES];
    int count = 0;
    for (int r = 0; r < ranks; r++) {
        const TensorTokens to = tensor_rows_of(&tp->cut, r);
        for (int i = 0; i < slices; i++) {
            floatX* arrived = tp->arrived + (size_t)(r * slices + i) * own.count * C;
            moves[count++] = tensor_gpu_move_(tp, r, tensor_part(tp, i, NULL) + to.first * C, to, 1);
            moves[count++] = tensor_gpu_move_(tp, r, arrived, own, 0);
        }
    }
    group_exchange(moves, count, tp->group, tp->gpu->stream);
}

// Gathers all (s, bytes), in which this process has set its slices. Collective.
static inline void tensor_gather_slices(const TensorParallelGpu* tp, void* all, size_t bytes) {
    const size_t own = (size_t)tp->cut.slices * bytes;
    assert(bytes % sizeof(float) == 0);
    if (tp->group->size > 1) {
        group_all_gather(all, (char*)all + (size_t)tp->cut.first * bytes, own / sizeof(float), DTYPE_FP32,
                         tp->group, tp->gpu->stream);
    }
}

// ---- the sum ----

// Rows of a block; threads and elements of a thread where the elements lie in one row.
enum { TENSOR_ROWS_ = 8, TENSOR_THREADS_ = 256, TENSOR_PER_THREAD_ = 4 };

// A warp adds up 32 WIDTH columns of a row: the parts (slices, rows, C) in their order, then bias
// (C), then residual (rows, C), each of which may be NULL.
// grid   (ceil(rows / 8), ceil(C / (32 WIDTH)))      block   (32, 8)      shared   none
// moves  (slices + 1) rows*C in, rows*C out; bias stays in L2. Bound by memory.
// order  slice after slice
// needs  C a multiple of WIDTH, and aligned addresses where that is a pack
template <class T, int WIDTH>
__global__ void tensor_sum_kernel(T* out, const T* residual, const T* parts, const T* bias, int slices,
                                  int rows, int C) {
    const int n = (int)(blockIdx.x * TENSOR_ROWS_ + threadIdx.y),
              c = (int)(blockIdx.y * 32 + threadIdx.x) * WIDTH;
    if (n >= rows || c >= C) {
        return;
    }
    const size_t at = (size_t)n * C + c, stride = (size_t)rows * C;
    float sum[WIDTH] = {};
    for (int i = 0; i < slices + 2; i++) {
        const T* from = i < slices   ? parts + (size_t)i * stride + at
                        : i > slices ? (residual ? residual + at : NULL)
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

// Sets out (rows, C) to the sum of parts (slices, rows, C), of bias and of residual; out may be
// residual.
template <class T>
static inline void tensor_sum_parts(T* out, const T* residual, const T* parts, const T* bias, int slices,
                                    int rows, int C, const Gpu* gpu) {
    const uintptr_t addresses = (uintptr_t)out | (uintptr_t)residual | (uintptr_t)parts | (uintptr_t)bias;
    const int is_packed = C % Pack<T>::SIZE == 0 && addresses % 16 == 0,
              width = is_packed ? Pack<T>::SIZE : 1;
    if (rows > 0) {
        launch(is_packed ? tensor_sum_kernel<T, Pack<T>::SIZE> : tensor_sum_kernel<T, 1>,
               dim3((unsigned)ceil_div(rows, (int)TENSOR_ROWS_), (unsigned)ceil_div(C, 32 * width)),
               dim3(32, TENSOR_ROWS_), 0, gpu, out, residual, parts, bias, slices, rows, C);
    }
}

// Sets out (R, C) to residual plus the sum of the parts of all slices and of bias (C); both may be
// NULL. Collective.
static inline void tensor_sum(const TensorParallelGpu* tp, floatX* out, const floatX* residual,
                              const floatX* bias) {
    if (!tensor_is_sliced(tp)) {
        return;
    }
    const int has_others = tp->group->size > 1;
    if (has_others) {
        tensor_gpu_exchange_parts_(tp);
    }
    tensor_sum_parts(out, residual, (const floatX*)(has_others ? tp->arrived : tp->parts), bias, tp->cut.of,
                     tensor_rows(tp).count, tp->cut.C, tp->gpu);
}

// ---- gradients of tensors that are not cut ----

// `of` has no `grads`; they may be of another type than its copies.
typedef struct {
    WholeGradients of;
    Gradient grads;
} WholeGradientsGpu;

// Opens them for the model's gradients, laid out by `rows`, which must outlive them.
static inline void whole_gradients_gpu_open(WholeGradientsGpu* w, Memory* memory, ModelConfig cfg,
                                            const ZeroPlan* plan, const TensorRow* rows, Gradient grads) {
    whole_gradients_open(&w->of, memory, cfg, plan, rows, NULL);
    w->grads = grads;
}

// Returns the gradient of a row in the copy of a slice that begins there. One without data has the
// type of the others, too.
static inline Gradient whole_gradients_in_(const WholeGradientsGpu* w, int row, Gradient gradient,
                                           float* copy) {
    const TensorRow* r = &w->of.rows[row];
    if (r->split != SPLIT_NONE || r->kind == KIND_EMBEDDING) {
        return gradient;
    }
    const size_t bytes = (size_t)((char*)gradient.data - (char*)tensor_at_layer(r, w->grads.data, 0));
    float* moved = gradient.data ? copy + w->of.begin[row] + bytes / r->element_bytes : NULL;
    return Gradient{moved, DTYPE_FP32};
}

static inline void whole_gradients_at_slice(const WholeGradientsGpu* w, ModelGradients* d, int i) {
    if (w->of.count == 0) {
        return; // without slices
    }
    float* copy = w->of.copies + (size_t)(w->of.first + i) * w->of.count;
    int row = 0;
#define WHOLE_GRADIENT_(name, ...)                                                                           \
    d->name = whole_gradients_in_(w, row, d->name, copy);                                                    \
    row++;
    MODEL_PARAMETERS(WHOLE_GRADIENT_)
#undef WHOLE_GRADIENT_
}

// Sets grads (count) to the sum of copies (slices, stride), of which each has `count` there.
// grid   count / 1024      block   256      shared   none
// moves  4 slices bytes an element in, G out. Bound by memory.
// order  slice after slice
template <class G>
__global__ void __launch_bounds__(TENSOR_THREADS_)
    whole_gradients_sum_kernel(G* grads, const float* copies, size_t stride, int slices) {
    const size_t i = ((size_t)blockIdx.x * TENSOR_THREADS_ + threadIdx.x) * TENSOR_PER_THREAD_;
    Elements<float, TENSOR_PER_THREAD_> sum = elements_load<TENSOR_PER_THREAD_>(copies + i);
    for (int s = 1; s < slices; s++) {
        const Elements<float, TENSOR_PER_THREAD_> copy =
            elements_load<TENSOR_PER_THREAD_>(copies + (size_t)s * stride + i);
#pragma unroll
        for (int k = 0; k < TENSOR_PER_THREAD_; k++) {
            sum[k] += copy[k];
        }
    }
    elements_store(grads + i, elements_convert<G>(sum));
}

// Sets the model's gradients to the sums over all slices, after a backward pass: tensors occupy
// whole units of TENSOR_SHARD_UNIT elements, one for each block of threads. Collective.
template <class T>
static inline void whole_gradients_sum(const WholeGradientsGpu* w, const GroupGpu* group, const Gpu* gpu) {
    const WholeGradients* of = &w->of;
    if (of->count > 0 && group->size > 1) {
        group_all_gather(of->copies, of->copies + (size_t)of->first * of->count,
                         (size_t)of->slices * of->count, DTYPE_FP32, group, gpu->stream);
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (of->has >> i & 1) {
            const TensorRow* row = &of->rows[i];
            GRADIENT_DISPATCH(w->grads, T,
                              launch(whole_gradients_sum_kernel<G>,
                                     (unsigned)(tensor_room_in_group(row) / TENSOR_SHARD_UNIT),
                                     TENSOR_THREADS_, 0, gpu, (G*)tensor_at_layer(row, w->grads.data, 0),
                                     (const float*)of->copies + of->begin[i], of->count, of->of));
        }
    }
}

// Returns the gradient of slice i. `first` is the gradient of this process's first slice, which may
// have no data.
static inline Gradient tensor_gradient_of_(const TensorParallelGpu* tp, Gradient gradient, int i) {
    if (gradient.data && i > 0) {
        gradient.data = (float*)gradient.data + (size_t)i * tp->cut.whole;
    }
    return gradient;
}

// Does what norm_backward does, for the rows of this process; the sums of `d` are those of its
// first slice, and get the sums over the token slice.
template <class T>
static inline void tensor_norm_backward(const TensorParallelGpu* tp, T* dinp, GradientMode dinp_mode,
                                        const NormGradients* d, const T* dout, const T* inp,
                                        const NormGpu<T>* norm, NormScratch* scratch) {
    for (int i = 0; i < tp->cut.slices; i++) {
        const TensorTokens tokens = tensor_own_slice(&tp->cut, i);
        const size_t at = (size_t)tokens.first * tp->cut.C;
        NormGpu<T> of_slice = *norm;
        of_slice.N = tokens.count;
        of_slice.mean = norm->mean ? norm->mean + tokens.first : NULL;
        of_slice.rstd = norm->rstd + tokens.first;
        const E4m3Rows codes =
            d->codes.codes ? E4m3Rows{d->codes.codes + at, d->codes.scales + tokens.first} : d->codes;
        const NormGradients slice = {tensor_gradient_of_(tp, d->dweight, i),
                                     tensor_gradient_of_(tp, d->dbias, i),
                                     d->mode,
                                     tensor_gradient_of_(tp, d->dinp_sum, i),
                                     d->sum_mode,
                                     codes};
        norm_backward(dinp + at, dinp_mode, &slice, dout + at, inp + at, &of_slice, scratch, tp->gpu);
    }
}

// Does what norm_dinp_sum does, likewise.
template <class T>
static inline void tensor_norm_dinp_sum(const TensorParallelGpu* tp, Gradient sum, GradientMode mode,
                                        const T* dinp, NormScratch* scratch) {
    for (int i = 0; i < tp->cut.slices; i++) {
        const TensorTokens tokens = tensor_own_slice(&tp->cut, i);
        norm_dinp_sum(tensor_gradient_of_(tp, sum, i), mode, dinp + (size_t)tokens.first * tp->cut.C,
                      tokens.count, tp->cut.C, scratch, tp->gpu);
    }
}

#endif
