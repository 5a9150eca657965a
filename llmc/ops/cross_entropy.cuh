/*
cross_entropy.cuh -- cross_entropy.h on the GPU: the same functions on T = float, bf16 or fp16,
computed in fp32.

The maximum and the sum of exponentials of a row are computed in one pass (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018). The backward pass needs the row twice. If it
fits into shared memory, the block keeps a copy there instead of reading it again; the results are
the same.

Exponentials are powers of 2: exp(x - max) is 2^(x log2(e) + shift), one fused multiply-add before
the hardware's exp2. The shift is rounded, but the error cancels: all terms of a row and the loss
use the same shift. The gradient's scale is added to the shift, which is then rounded once more. The
effect is as if all logits of the row were off by half a unit in the last place of the largest one;
they are not known more precisely than that.

A softcap also uses the hardware's exp2: its relative error is up to 2^-19.

NaN or +infinity among the logits gives a loss of NaN, unless the row does not count.

For a slice of the vocabulary, each row has a CrossEntropySum, and also a CrossEntropyTop where
is_top is wanted.
*/
#ifndef LLMC_CROSS_ENTROPY_CUH
#define LLMC_CROSS_ENTROPY_CUH

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <stdint.h>

#include "llmc/ops/cross_entropy.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/ops/softcap.cuh"

#define CROSS_ENTROPY_LOG2E 1.44269504f
#define CROSS_ENTROPY_LN2 0.69314718f
#define CROSS_ENTROPY_THREADS 1024
// Upper bound of the static shared memory: of block_sum and block_max, and the system's.
#define CROSS_ENTROPY_STATIC_BYTES (2 << 10)

// Largest element so far, shift = -max log2(e), and the sum of 2^(element log2(e) + shift).
typedef struct {
    float max, shift, sum;
} SoftmaxSum_;

// Returns y of a logit (cross_entropy.h).
template <bool CAPPED> __device__ inline float cross_entropy_y_(float x, float softcap) {
    if constexpr (CAPPED) {
        return softcap * softcap_tanh(x, softcap);
    } else {
        return x;
    }
}

// Returns dy / dlogit, given y.
template <bool CAPPED> __device__ inline float cross_entropy_slope_(float y, float softcap) {
    if constexpr (CAPPED) {
        return softcap_slope(y / softcap);
    } else {
        return 1.0f;
    }
}

// Returns e^logit times 2^shift. Results below the smallest normal number become 0, which does not
// matter here.
__device__ inline float cross_entropy_exp_(float logit, float shift) {
    return exp2_approx(fmaf(logit, CROSS_ENTROPY_LOG2E, shift));
}

// Adds WIDTH elements of a row. A NaN makes the sum NaN, but never max.
template <int WIDTH> __device__ inline void cross_entropy_take_(SoftmaxSum_* s, const float* x) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        s->max = fmaxf(s->max, x[i]);
    }
    const float shift = -CROSS_ENTROPY_LOG2E * s->max;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        sum += cross_entropy_exp_(x[i], shift);
    }
    s->sum = fmaf(s->sum, exp2_approx(shift - s->shift), sum);
    s->shift = shift;
}

template <int WIDTH, class T> __device__ inline Pack<T> cross_entropy_load_(const T* from) {
    if constexpr (WIDTH == 1) {
        Pack<T> x = {};
        x[0] = from[0];
        return x;
    } else {
        return load_pack(from);
    }
}

// Sets y for elements v ... v + WIDTH - 1 of a row; -infinity from element V on.
template <int WIDTH, bool CAPPED, class T>
__device__ inline void cross_entropy_load_tail_(float* y, const T* row, int v, int V, float softcap) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        y[i] = v + i < V ? cross_entropy_y_<CAPPED>(to_float(row[v + i]), softcap) : -INFINITY;
    }
}

template <int WIDTH, bool CAPPED, class T>
__device__ inline void cross_entropy_unpack_(float* y, const Pack<T>& logits, float softcap) {
    unpack(y, logits);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        y[i] = cross_entropy_y_<CAPPED>(y[i], softcap);
    }
}

template <int WIDTH, class T> __device__ inline void cross_entropy_store_(T* to, const Pack<T>& x) {
    if constexpr (WIDTH == 1) {
        to[0] = x[0];
    } else {
        store_pack(to, x);
    }
}

// Numbers of a row's gradient: dy = factor e^y 2^shift, except for the target.
typedef struct {
    float shift, factor, softcap;
} CrossEntropyScale_;

// Stores dlogits of y; 0 from element `count` on.
template <int WIDTH, bool CAPPED, class T>
__device__ inline void cross_entropy_store_exp_(T* to, const float* y, CrossEntropyScale_ s, int count) {
    Pack<T> pack = {};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const float dy = s.factor * cross_entropy_exp_(y[i], s.shift);
        pack[i] = from_float<T>(i < count ? dy * cross_entropy_slope_<CAPPED>(y[i], s.softcap) : 0.0f);
    }
    cross_entropy_store_<WIDTH>(to, pack);
}

// Sums up a row with the whole block. Also copies it to `copy` unless that is NULL, except for the
// tail: the pack that crosses V. The next pack is loaded while one is processed. The maximum starts
// finite, so that no thread subtracts infinity from infinity.
template <int WIDTH, bool CAPPED, class T>
__device__ inline SoftmaxSum_ cross_entropy_row_(T* copy, const T* row, int V, float softcap) {
    const int full = V - V % WIDTH, stride = blockDim.x * WIDTH;
    SoftmaxSum_ mine = {-FLT_MAX / 2, CROSS_ENTROPY_LOG2E * (FLT_MAX / 2), 0};
    int v = threadIdx.x * WIDTH;
    Pack<T> next = {};
    float y[Pack<T>::SIZE];
    if (v < full) {
        next = cross_entropy_load_<WIDTH>(row + v);
    }
    while (v < full) {
        if (copy) {
            cross_entropy_store_<WIDTH>(copy + v, next);
        }
        cross_entropy_unpack_<WIDTH, CAPPED>(y, next, softcap);
        v += stride;
        if (v < full) {
            next = cross_entropy_load_<WIDTH>(row + v);
        }
        cross_entropy_take_<WIDTH>(&mine, y);
    }
    if (v < V) {
        cross_entropy_load_tail_<WIDTH, CAPPED>(y, row, v, V, softcap);
        cross_entropy_take_<WIDTH>(&mine, y);
    }
    const float max = block_max(mine.max), shift = -CROSS_ENTROPY_LOG2E * max;
    const SoftmaxSum_ all = {max, shift, block_sum(mine.sum * exp2_approx(shift - mine.shift))};
    return all;
}

// Returns log(sum) - y of the target in nats. The shift, which is in both, cancels.
__device__ inline float cross_entropy_nats_(const SoftmaxSum_* s, float target) {
    return CROSS_ENTROPY_LN2 * (log2f(s->sum) - fmaf(target, CROSS_ENTROPY_LOG2E, s->shift));
}

// Replaces the logits of a row by their gradient, except the target's part, and by 0 from V on. A
// thread reads and writes the same elements as in cross_entropy_row_. `again` is the row or its
// copy.
template <int WIDTH, bool CAPPED, class T>
__device__ inline void cross_entropy_probabilities_(T* row, const T* again, CrossEntropyScale_ s, int V,
                                                    int Vp) {
    const int full = V - V % WIDTH, stride = blockDim.x * WIDTH;
    int v = threadIdx.x * WIDTH;
    Pack<T> next = {};
    float y[Pack<T>::SIZE];
    if (v < full) {
        next = cross_entropy_load_<WIDTH>(again + v);
    }
    while (v < full) {
        const int here = v;
        cross_entropy_unpack_<WIDTH, CAPPED>(y, next, s.softcap);
        v += stride;
        if (v < full) {
            next = cross_entropy_load_<WIDTH>(again + v);
        }
        cross_entropy_store_exp_<WIDTH, CAPPED>(row + here, y, s, WIDTH);
    }
    for (; v < Vp; v += stride) { // the tail, and padding
        cross_entropy_load_tail_<WIDTH, CAPPED>(y, row, v, V, s.softcap);
        cross_entropy_store_exp_<WIDTH, CAPPED>(row + v, y, s, V - v);
    }
}

// One block per row.
// grid   N      block   up to 1024      shared   of block_sum and block_max
// moves  N*V in, N fp32 out. Bound by memory.
// order  fixed: depends on V and T only
// needs  Vp a multiple of WIDTH; aligned addresses if WIDTH is a pack
template <class T, int WIDTH, bool CAPPED>
__global__ void __launch_bounds__(CROSS_ENTROPY_THREADS)
    cross_entropy_loss_kernel(float* loss, const T* logits, const int* target, CrossEntropy of) {
    const T* row = logits + (size_t)blockIdx.x * of.Vp;
    const int hit = target[blockIdx.x];
    if (hit == NO_TARGET) {
        if (threadIdx.x == 0) {
            loss[blockIdx.x] = 0.0f;
        }
        return;
    }
    const SoftmaxSum_ s = cross_entropy_row_<WIDTH, CAPPED>((T*)NULL, row, of.V, of.softcap);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = cross_entropy_nats_(&s, cross_entropy_y_<CAPPED>(to_float(row[hit]), of.softcap));
    }
}

// One block per row; a thread stops at the first logit that beats the target's. y rises with the
// logits, so a softcap changes nothing.
// grid   N      block   up to 1024      shared   none
// moves  N*V in, N int32 out. Bound by memory.
// order  fixed
template <class T>
__global__ void __launch_bounds__(CROSS_ENTROPY_THREADS)
    cross_entropy_top_kernel(int* is_top, const T* logits, const int* target, int V, int Vp) {
    const T* row = logits + (size_t)blockIdx.x * Vp;
    const int hit = target[blockIdx.x];
    int is_beaten = hit == NO_TARGET;
    const float target_logit = is_beaten ? 0.0f : to_float(row[hit]);
    for (int v = threadIdx.x; v < V && !is_beaten; v += blockDim.x) {
        const float logit = to_float(row[v]); // NaN beats
        is_beaten = !(logit < target_logit || (logit == target_logit && v >= hit));
    }
    const int is_any_beaten = __syncthreads_or(is_beaten);
    if (threadIdx.x == 0) {
        is_top[blockIdx.x] = !is_any_beaten;
    }
}

// One block per row: one pass for the sum, one that writes the gradient. Then the thread that wrote
// the target's element corrects it. The target's logit is read first, before it is overwritten.
//
// grid   N      block   up to 1024      shared   of block_sum and block_max; the row, if keep
// moves  N*Vp in, once more from L2 unless keep; N*Vp out. Bound by memory.
// order  fixed: depends on V and T only
// needs  as cross_entropy_loss_kernel; scale > 0
// A softcap spills 20 bytes: 1024 threads leave 64 registers to each.
template <class T, int WIDTH, bool CAPPED>
__global__ void __launch_bounds__(CROSS_ENTROPY_THREADS)
    cross_entropy_backward_kernel(float* loss, T* logits, const int* target, float scale, CrossEntropy of,
                                  int keep) {
    SMEM_DYNAMIC(T, copy);
    T* row = logits + (size_t)blockIdx.x * of.Vp;
    const int hit = target[blockIdx.x];
    const int V = hit == NO_TARGET ? 0 : of.V; // a row that does not count is all padding
    const float y = V ? cross_entropy_y_<CAPPED>(to_float(row[hit]), of.softcap) : 0.0f;
    const SoftmaxSum_ sum = cross_entropy_row_<WIDTH, CAPPED>(keep ? copy : (T*)NULL, row, V, of.softcap);
    const float lse = CROSS_ENTROPY_LN2 * (log2f(sum.sum) - sum.shift);
    const CrossEntropyScale_ s = {sum.shift + log2f(scale / sum.sum), 1.0f + 2.0f * of.z_loss * lse,
                                  of.softcap};
    if (keep) {
        cross_entropy_probabilities_<WIDTH, CAPPED>(row, copy, s, V, of.Vp);
    } else {
        cross_entropy_probabilities_<WIDTH, CAPPED>(row, row, s, V, of.Vp);
    }
    if (V && hit / WIDTH % blockDim.x == threadIdx.x) {
        row[hit] = from_float<T>((s.factor * cross_entropy_exp_(y, s.shift) - scale) *
                                 cross_entropy_slope_<CAPPED>(y, of.softcap));
    }
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = V ? cross_entropy_nats_(&sum, y) : 0.0f;
    }
}

// Returns the threads of a block: about four elements or packs each in short rows.
static inline int cross_entropy_threads_(int items) {
    const int threads = 32 * ceil_div(items, 4 * 32);
    return threads < CROSS_ENTROPY_THREADS ? threads : CROSS_ENTROPY_THREADS;
}

template <class T> static inline int cross_entropy_width_(const T* logits, int Vp) {
    return Vp % Pack<T>::SIZE == 0 && (uintptr_t)logits % 16 == 0 ? Pack<T>::SIZE : 1;
}

template <class T, bool CAPPED>
static inline void cross_entropy_launch_loss_(float* loss, const T* logits, const int* target,
                                              CrossEntropy of, const Gpu* gpu) {
    const int width = cross_entropy_width_(logits, of.Vp);
    launch(width == 1 ? cross_entropy_loss_kernel<T, 1, CAPPED>
                      : cross_entropy_loss_kernel<T, Pack<T>::SIZE, CAPPED>,
           of.N, cross_entropy_threads_(of.Vp / width), 0, gpu, loss, logits, target, of);
}

template <class T>
static inline void cross_entropy_loss(float* loss, const T* logits, const int* target, CrossEntropy of,
                                      const Gpu* gpu) {
    (of.softcap > 0 ? cross_entropy_launch_loss_<T, true>
                    : cross_entropy_launch_loss_<T, false>)(loss, logits, target, of, gpu);
}

template <class T>
static inline void cross_entropy_top(int* is_top, const T* logits, const int* target, CrossEntropy of,
                                     const Gpu* gpu) {
    launch(cross_entropy_top_kernel<T>, of.N, cross_entropy_threads_(of.Vp), 0, gpu, is_top, logits, target,
           of.V, of.Vp);
}

template <class T, bool CAPPED>
static inline void cross_entropy_launch_backward_(float* loss, T* logits, const int* target, float scale,
                                                  CrossEntropy of, const Gpu* gpu) {
    const int width = cross_entropy_width_(logits, of.Vp);
    const size_t row_bytes = (size_t)of.Vp * sizeof(T);
    const int keep = row_bytes + CROSS_ENTROPY_STATIC_BYTES <= gpu->shared_bytes;
    launch(width == 1 ? cross_entropy_backward_kernel<T, 1, CAPPED>
                      : cross_entropy_backward_kernel<T, Pack<T>::SIZE, CAPPED>,
           of.N, cross_entropy_threads_(of.Vp / width), keep ? row_bytes : 0, gpu, loss, logits, target,
           scale, of, keep);
}

template <class T>
static inline void cross_entropy_backward(float* loss, T* logits, const int* target, float scale,
                                          CrossEntropy of, const Gpu* gpu) {
    (of.softcap > 0 ? cross_entropy_launch_backward_<T, true>
                    : cross_entropy_launch_backward_<T, false>)(loss, logits, target, scale, of, gpu);
}

// ---- slices of the vocabulary ----

// Numbers of a row's logits in a slice, or in all: shift = -max log2(e), the sum of
// 2^(y log2(e) + shift), and y of the target; 0: another slice has it.
typedef struct {
    float shift, sum, target;
} CrossEntropySum;

// The largest logit of a row in a slice, NaN if any is; and its token, the first of equal ones.
typedef struct {
    float logit;
    int word;
} CrossEntropyTop;

// One block per row: the numbers of a slice's logits, which start with token `first`.
// grid   N      block   up to 1024      shared   of block_sum and block_max
// moves  N*V in, 3N fp32 out. Bound by memory.
// order  fixed: depends on V and T only
// needs  as cross_entropy_loss_kernel
template <class T, int WIDTH, bool CAPPED>
__global__ void __launch_bounds__(CROSS_ENTROPY_THREADS)
    cross_entropy_slice_kernel(CrossEntropySum* sums, const T* logits, const int* target, int first,
                               CrossEntropy of) {
    const T* row = logits + (size_t)blockIdx.x * of.Vp;
    const int hit = target[blockIdx.x] - first, V = target[blockIdx.x] == NO_TARGET ? 0 : of.V;
    const SoftmaxSum_ s = cross_entropy_row_<WIDTH, CAPPED>((T*)NULL, row, V, of.softcap);
    if (threadIdx.x == 0) {
        const int has_target = 0 <= hit && hit < V;
        const float y = has_target ? cross_entropy_y_<CAPPED>(to_float(row[hit]), of.softcap) : 0.0f;
        sums[blockIdx.x] = CrossEntropySum{s.shift, s.sum, y};
    }
}

// One thread per row adds up the numbers of all slices (slices, N), and sets the loss. With one
// slice they keep their bits. `whole` may be the first slice's.
// grid   ceil(N / 256)      block   256      shared   none
// moves  3 slices N fp32 in, 4N out. Bound by the launch.
// order  slice after slice
static __global__ void cross_entropy_combine_kernel(float* loss, CrossEntropySum* whole,
                                                    const CrossEntropySum* sums, const int* target,
                                                    int slices, int N) {
    const int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n >= N) {
        return;
    }
    CrossEntropySum all = sums[n];
    for (int i = 1; i < slices; i++) {
        all.shift = fminf(all.shift, sums[(size_t)i * N + n].shift);
    }
    all.sum = all.target = 0;
    for (int i = 0; i < slices; i++) {
        const CrossEntropySum s = sums[(size_t)i * N + n];
        all.sum += s.sum * exp2_approx(all.shift - s.shift);
        all.target += s.target;
    }
    const SoftmaxSum_ row = {0, all.shift, all.sum};
    whole[n] = all;
    loss[n] = target[n] == NO_TARGET ? 0.0f : cross_entropy_nats_(&row, all.target);
}

// One block per row turns the logits of a slice, which start with token `first`, into their
// gradient. `whole` has the numbers of all slices together.
// grid   N      block   up to 1024      shared   none
// moves  N*Vp in, N*Vp out. Bound by memory.
// order  every element on its own
// needs  as cross_entropy_loss_kernel; scale > 0
template <class T, int WIDTH, bool CAPPED>
__global__ void __launch_bounds__(CROSS_ENTROPY_THREADS)
    cross_entropy_slice_backward_kernel(T* logits, const CrossEntropySum* whole, const int* target, int first,
                                        float scale, CrossEntropy of) {
    T* row = logits + (size_t)blockIdx.x * of.Vp;
    const int hit = target[blockIdx.x] - first, V = target[blockIdx.x] == NO_TARGET ? 0 : of.V;
    const CrossEntropySum w = whole[blockIdx.x];
    const float lse = CROSS_ENTROPY_LN2 * (log2f(w.sum) - w.shift);
    const CrossEntropyScale_ s = {w.shift + log2f(scale / w.sum), 1.0f + 2.0f * of.z_loss * lse, of.softcap};
    cross_entropy_probabilities_<WIDTH, CAPPED>(row, row, s, V, of.Vp);
    if (0 <= hit && hit < V && hit / WIDTH % blockDim.x == threadIdx.x) {
        row[hit] = from_float<T>((s.factor * cross_entropy_exp_(w.target, s.shift) - scale) *
                                 cross_entropy_slope_<CAPPED>(w.target, of.softcap));
    }
}

// Returns the one of two that comes first: the larger logit, of equal ones the first token. NaN
// stays.
__device__ inline CrossEntropyTop cross_entropy_first_(CrossEntropyTop a, CrossEntropyTop b) {
    const int is_first = a.logit > b.logit || (a.logit == b.logit && a.word < b.word) || a.logit != a.logit;
    return is_first ? a : b;
}

// One warp per row finds the largest logit of a slice, which starts with token `first`; -infinity
// if it has none.
// grid   ceil(N / 8)      block   (32, 8)      shared   none
// moves  N*V in, 8N out. Bound by memory.
// order  fixed
template <class T>
__global__ void cross_entropy_slice_top_kernel(CrossEntropyTop* tops, const T* logits, int first,
                                               CrossEntropy of) {
    const int n = (int)(blockIdx.x * blockDim.y + threadIdx.y);
    if (n >= of.N) {
        return;
    }
    const T* row = logits + (size_t)n * of.Vp;
    CrossEntropyTop top = {-INFINITY, INT_MAX};
    for (int v = (int)threadIdx.x; v < of.V; v += 32) {
        top = cross_entropy_first_(top, CrossEntropyTop{to_float(row[v]), first + v});
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const CrossEntropyTop other = {__shfl_xor_sync(0xffffffffu, top.logit, distance),
                                       __shfl_xor_sync(0xffffffffu, top.word, distance)};
        top = cross_entropy_first_(top, other);
    }
    if (threadIdx.x == 0) {
        tops[n] = top;
    }
}

// One thread per row compares the largest logits of all slices (slices, N) with the target.
// grid   ceil(N / 256)      block   256      shared   none
// moves  8 slices N in, 4N out. Bound by the launch.
// order  fixed
static __global__ void cross_entropy_combine_top_kernel(int* is_top, const CrossEntropyTop* tops,
                                                        const int* target, int slices, int N) {
    const int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n >= N) {
        return;
    }
    CrossEntropyTop top = tops[n];
    for (int i = 1; i < slices; i++) {
        top = cross_entropy_first_(top, tops[(size_t)i * N + n]);
    }
    is_top[n] = target[n] != NO_TARGET && top.logit == top.logit && top.word == target[n];
}

template <class T, bool CAPPED>
static inline void cross_entropy_launch_slice_(CrossEntropySum* sums, const T* logits, const int* target,
                                               int first, CrossEntropy of, const Gpu* gpu) {
    const int width = cross_entropy_width_(logits, of.Vp);
    launch(width == 1 ? cross_entropy_slice_kernel<T, 1, CAPPED>
                      : cross_entropy_slice_kernel<T, Pack<T>::SIZE, CAPPED>,
           of.N, cross_entropy_threads_(of.Vp / width), 0, gpu, sums, logits, target, first, of);
}

// Sets the numbers (N) of a slice's logits (N, Vp), which start with token `first`.
template <class T>
static inline void cross_entropy_slice(CrossEntropySum* sums, const T* logits, const int* target, int first,
                                       CrossEntropy of, const Gpu* gpu) {
    (of.softcap > 0 ? cross_entropy_launch_slice_<T, true>
                    : cross_entropy_launch_slice_<T, false>)(sums, logits, target, first, of, gpu);
}

enum { CROSS_ENTROPY_COMBINE_THREADS_ = 256 };

// Sets the losses (N), and the numbers of whole rows (N) from the numbers of all slices (slices,
// N). They may be in the same place as the numbers of the first slice.
static inline void cross_entropy_combine(float* loss, CrossEntropySum* whole, const CrossEntropySum* sums,
                                         const int* target, int slices, int N, const Gpu* gpu) {
    const int threads = CROSS_ENTROPY_COMBINE_THREADS_;
    launch(cross_entropy_combine_kernel, ceil_div(N, threads), threads, 0, gpu, loss, whole, sums, target,
           slices, N);
}

template <class T, bool CAPPED>
static inline void cross_entropy_launch_slice_backward_(T* logits, const CrossEntropySum* whole,
                                                        const int* target, int first, float scale,
                                                        CrossEntropy of, const Gpu* gpu) {
    const int width = cross_entropy_width_(logits, of.Vp);
    launch(width == 1 ? cross_entropy_slice_backward_kernel<T, 1, CAPPED>
                      : cross_entropy_slice_backward_kernel<T, Pack<T>::SIZE, CAPPED>,
           of.N, cross_entropy_threads_(of.Vp / width), 0, gpu, logits, whole, target, first, scale, of);
}

// Turns the logits (N, Vp) of a slice, which start with token `first`, into their gradient.
template <class T>
static inline void cross_entropy_slice_backward(T* logits, const CrossEntropySum* whole, const int* target,
                                                int first, float scale, CrossEntropy of, const Gpu* gpu) {
    (of.softcap > 0
         ? cross_entropy_launch_slice_backward_<T, true>
         : cross_entropy_launch_slice_backward_<T, false>)(logits, whole, target, first, scale, of, gpu);
}

// Sets the largest logits (N) of a slice, which start with token `first`.
template <class T>
static inline void cross_entropy_slice_top(CrossEntropyTop* tops, const T* logits, int first, CrossEntropy of,
                                           const Gpu* gpu) {
    const int rows = 8;
    launch(cross_entropy_slice_top_kernel<T>, ceil_div(of.N, rows), dim3(32, rows), 0, gpu, tops, logits,
           first, of);
}

// Sets is_top (N) from the largest logits of all slices (slices, N).
static inline void cross_entropy_combine_top(int* is_top, const CrossEntropyTop* tops, const int* target,
                                             int slices, int N, const Gpu* gpu) {
    const int threads = CROSS_ENTROPY_COMBINE_THREADS_;
    launch(cross_entropy_combine_top_kernel, ceil_div(N, threads), threads, 0, gpu, is_top, tops, target,
           slices, N);
}

// ---- the sum of losses ----

enum { LOSSES_THREADS_ = 1024 };

__device__ inline double warp_sum_double_(double x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
}

// Returns the sum over a block of LOSSES_THREADS_; only thread 0 gets it.
__device__ inline double losses_block_sum_(double x) {
    SMEM_ARRAY(double, of_warp, [32]);
    x = warp_sum_double_(x);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = x;
    }
    __syncthreads();
    return warp_sum_double_(of_warp[threadIdx.x % 32]);
}

// Appends the sum of N losses, in double, to a list with `count` entries. Thread t adds up losses
// t, t + 1024, ..., and a tree adds up the threads.
// grid   1      block   1024      shared   32 doubles
// moves  reads N fp32. Bound by latency.
// order  fixed
static __global__ void __launch_bounds__(LOSSES_THREADS_)
    sum_losses_kernel_(double* sums, int64_t* count, const float* losses, int N) {
    double sum = 0;
#pragma unroll 8
    for (int i = (int)threadIdx.x; i < N; i += LOSSES_THREADS_) {
        sum += (double)losses[i];
    }
    sum = losses_block_sum_(sum);
    if (threadIdx.x == 0) {
        sums[(*count)++] = sum;
    }
}

// Appends the sum of the losses (N): sums[(*count)++], both in device memory, so that one CUDA
// graph serves all micro-steps. The list must have room.
static inline void sum_losses(double* sums, int64_t* count, const float* losses, int N, const Gpu* gpu) {
    launch(sum_losses_kernel_, 1, LOSSES_THREADS_, 0, gpu, sums, count, losses, N);
}

static inline double sum_losses_bytes(double N) { return 4 * N; }

// Block s adds the losses (B, T) of the sequences of source s to sums[s].
// grid   the sources      block   1024      shared   256 bytes
// moves  B*T fp32 in. Bound by latency.
// order  fixed
static __global__ void __launch_bounds__(LOSSES_THREADS_)
    sum_source_losses_kernel_(double* sums, const float* losses, const int* sources, int B, int T) {
    double sum = 0;
    for (int b = 0; b < B; b++) {
        if (sources[b] != (int)blockIdx.x) {
            continue;
        }
        for (int t = (int)threadIdx.x; t < T; t += LOSSES_THREADS_) {
            sum += (double)losses[(size_t)b * (size_t)T + (size_t)t];
        }
    }
    sum = losses_block_sum_(sum);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] += sum;
    }
}

// Adds the losses (B, T) of sequences to the sum of each source (count). Sequence b comes from
// sources[b].
static inline void sum_source_losses(double* sums, int count, const float* losses, const int* sources, int B,
                                     int T, const Gpu* gpu) {
    launch(sum_source_losses_kernel_, (unsigned)count, LOSSES_THREADS_, 0, gpu, sums, losses, sources, B, T);
}

#endif
