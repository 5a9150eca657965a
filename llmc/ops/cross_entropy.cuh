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

NaN or +infinity among the logits gives a loss of NaN, unless the row does not count.
*/
#ifndef LLMC_CROSS_ENTROPY_CUH
#define LLMC_CROSS_ENTROPY_CUH

#include <assert.h>
#include <float.h>
#include <stdint.h>

#include "llmc/ops/cross_entropy.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/ptx.cuh"

#define CROSS_ENTROPY_LOG2E 1.44269504f
#define CROSS_ENTROPY_LN2 0.69314718f
#define CROSS_ENTROPY_THREADS 1024
// Upper bound of the static shared memory: that of block_sum and block_max, and the system's.
#define CROSS_ENTROPY_STATIC_BYTES (2 << 10)

// Largest element so far, shift = -max log2(e), and the sum of 2^(element log2(e) + shift).
typedef struct {
    float max, shift, sum;
} SoftmaxSum_;

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

// Loads elements v ... v + WIDTH - 1 of a row; -infinity from element V on.
template <int WIDTH, class T>
__device__ inline void cross_entropy_load_tail_(float* x, const T* row, int v, int V) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        x[i] = v + i < V ? to_float(row[v + i]) : -INFINITY;
    }
}

template <int WIDTH, class T> __device__ inline void cross_entropy_store_(T* to, const Pack<T>& x) {
    if constexpr (WIDTH == 1) {
        to[0] = x[0];
    } else {
        store_pack(to, x);
    }
}

// Stores e^x times 2^shift; 0 from element `count` on.
template <int WIDTH, class T>
__device__ inline void cross_entropy_store_exp_(T* to, const float* x, float shift, int count) {
    Pack<T> pack = {};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        pack[i] = from_float<T>(i < count ? cross_entropy_exp_(x[i], shift) : 0.0f);
    }
    cross_entropy_store_<WIDTH>(to, pack);
}

// Sums up a row with the whole block. Also copies it to `copy` unless that is NULL, except for the
// tail: the pack that crosses V. The next pack is loaded while one is processed. The maximum starts
// finite, so that no thread subtracts infinity from infinity.
template <int WIDTH, class T> __device__ inline SoftmaxSum_ cross_entropy_row_(T* copy, const T* row, int V) {
    const int full = V - V % WIDTH, stride = blockDim.x * WIDTH;
    SoftmaxSum_ mine = {-FLT_MAX / 2, CROSS_ENTROPY_LOG2E * (FLT_MAX / 2), 0};
    int v = threadIdx.x * WIDTH;
    Pack<T> next = {};
    float x[Pack<T>::SIZE];
    if (v < full) {
        next = cross_entropy_load_<WIDTH>(row + v);
    }
    while (v < full) {
        if (copy) {
            cross_entropy_store_<WIDTH>(copy + v, next);
        }
        unpack(x, next);
        v += stride;
        if (v < full) {
            next = cross_entropy_load_<WIDTH>(row + v);
        }
        cross_entropy_take_<WIDTH>(&mine, x);
    }
    if (v < V) {
        cross_entropy_load_tail_<WIDTH>(x, row, v, V);
        cross_entropy_take_<WIDTH>(&mine, x);
    }
    const float max = block_max(mine.max), shift = -CROSS_ENTROPY_LOG2E * max;
    const SoftmaxSum_ all = {max, shift, block_sum(mine.sum * exp2_approx(shift - mine.shift))};
    return all;
}

// Returns log(sum) - target_logit in nats. The shift, which is in both, cancels.
__device__ inline float cross_entropy_nats_(const SoftmaxSum_* s, float target_logit) {
    return CROSS_ENTROPY_LN2 * (log2f(s->sum) - fmaf(target_logit, CROSS_ENTROPY_LOG2E, s->shift));
}

// Replaces the logits of a row by e^logit times 2^shift, and by 0 from V on. A thread reads and
// writes the same elements as in cross_entropy_row_. `again` is the row or its copy.
template <int WIDTH, class T>
__device__ inline void cross_entropy_probabilities_(T* row, const T* again, float shift, int V, int Vp) {
    const int full = V - V % WIDTH, stride = blockDim.x * WIDTH;
    int v = threadIdx.x * WIDTH;
    Pack<T> next = {};
    float x[Pack<T>::SIZE];
    if (v < full) {
        next = cross_entropy_load_<WIDTH>(again + v);
    }
    while (v < full) {
        const int here = v;
        unpack(x, next);
        v += stride;
        if (v < full) {
            next = cross_entropy_load_<WIDTH>(again + v);
        }
        cross_entropy_store_exp_<WIDTH>(row + here, x, shift, WIDTH);
    }
    for (; v < Vp; v += stride) { // the tail, and padding
        cross_entropy_load_tail_<WIDTH>(x, row, v, V);
        cross_entropy_store_exp_<WIDTH>(row + v, x, shift, V - v);
    }
}

// One block per row.
// grid   N      block   up to 1024      shared   those of block_sum and block_max
// moves  N*V in, N fp32 out. Bound by memory.
// order  fixed: depends on V and T only
// needs  Vp a multiple of WIDTH, and aligned addresses where that is a pack
template <class T, int WIDTH>
__global__ void __launch_bounds__(CROSS_ENTROPY_THREADS)
    cross_entropy_loss_kernel(float* loss, const T* logits, const int* target, int V, int Vp) {
    const T* row = logits + (size_t)blockIdx.x * Vp;
    const int hit = target[blockIdx.x];
    if (hit == NO_TARGET) {
        if (threadIdx.x == 0) {
            loss[blockIdx.x] = 0.0f;
        }
        return;
    }
    const SoftmaxSum_ s = cross_entropy_row_<WIDTH>((T*)NULL, row, V);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = cross_entropy_nats_(&s, to_float(row[hit]));
    }
}

// One block per row; a thread stops at the first logit that beats the target's.
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
// grid   N      block   up to 1024      shared   those of block_sum and block_max; the row, if keep
// moves  N*Vp in, once more from L2 unless keep; N*Vp out. Bound by memory.
// order  fixed: depends on V and T only
// needs  as cross_entropy_loss_kernel; scale > 0
template <class T, int WIDTH>
__global__ void __launch_bounds__(CROSS_ENTROPY_THREADS)
    cross_entropy_backward_kernel(float* loss, T* logits, const int* target, float scale, int V, int Vp,
                                  int keep) {
    SMEM_DYNAMIC(T, copy);
    T* row = logits + (size_t)blockIdx.x * Vp;
    const int hit = target[blockIdx.x];
    V = hit == NO_TARGET ? 0 : V; // a row that does not count is all padding
    const float target_logit = V ? to_float(row[hit]) : 0.0f;
    const SoftmaxSum_ s = cross_entropy_row_<WIDTH>(keep ? copy : (T*)NULL, row, V);
    const float shift = s.shift + log2f(scale / s.sum);
    if (keep) {
        cross_entropy_probabilities_<WIDTH>(row, copy, shift, V, Vp);
    } else {
        cross_entropy_probabilities_<WIDTH>(row, row, shift, V, Vp);
    }
    if (V && hit / WIDTH % blockDim.x == threadIdx.x) {
        row[hit] = from_float<T>(cross_entropy_exp_(target_logit, shift) - scale);
    }
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = V ? cross_entropy_nats_(&s, target_logit) : 0.0f;
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

template <class T>
static inline void cross_entropy_loss(float* loss, const T* logits, const int* target, int N, int V, int Vp,
                                      const Gpu* gpu) {
    const int width = cross_entropy_width_(logits, Vp);
    launch(width == 1 ? cross_entropy_loss_kernel<T, 1> : cross_entropy_loss_kernel<T, Pack<T>::SIZE>, N,
           cross_entropy_threads_(Vp / width), 0, gpu, loss, logits, target, V, Vp);
}

template <class T>
static inline void cross_entropy_top(int* is_top, const T* logits, const int* target, int N, int V, int Vp,
                                     const Gpu* gpu) {
    launch(cross_entropy_top_kernel<T>, N, cross_entropy_threads_(Vp), 0, gpu, is_top, logits, target, V, Vp);
}

template <class T>
static inline void cross_entropy_backward(float* loss, T* logits, const int* target, float scale, int N,
                                          int V, int Vp, const Gpu* gpu) {
    const int width = cross_entropy_width_(logits, Vp);
    const size_t row_bytes = (size_t)Vp * sizeof(T);
    const int keep = row_bytes + CROSS_ENTROPY_STATIC_BYTES <= gpu->shared_bytes;
    launch(width == 1 ? cross_entropy_backward_kernel<T, 1> : cross_entropy_backward_kernel<T, Pack<T>::SIZE>,
           N, cross_entropy_threads_(Vp / width), keep ? row_bytes : 0, gpu, loss, logits, target, scale, V,
           Vp, keep);
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

// Appends the sum of N losses, in double, to a list with `count` entries. Thread t adds up losses
// t, t + 1024, ..., and a tree adds up the threads.
// grid   1      block   1024      shared   32 doubles
// moves  reads N fp32. Bound by latency.
// order  fixed
__global__ void __launch_bounds__(LOSSES_THREADS_)
    sum_losses_kernel_(double* sums, int64_t* count, const float* losses, int N) {
    SMEM_ARRAY(double, of_warp, [32]);
    double sum = 0;
#pragma unroll 8
    for (int i = (int)threadIdx.x; i < N; i += LOSSES_THREADS_) {
        sum += (double)losses[i];
    }
    sum = warp_sum_double_(sum);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = warp_sum_double_(of_warp[threadIdx.x % 32]);
    if (threadIdx.x == 0) {
        sums[(*count)++] = sum;
    }
}

// Appends the sum of the losses (N): sums[(*count)++], both in device memory, so that one CUDA
// graph serves all micro-steps. The list must have room.
static inline void sum_losses(double* sums, int64_t* count, const float* losses, int N, const Gpu* gpu) {
    assert(N > 0);
    launch(sum_losses_kernel_, 1, LOSSES_THREADS_, 0, gpu, sums, count, losses, N);
}

static inline double sum_losses_bytes(double N) { return 4 * N; }

#endif
