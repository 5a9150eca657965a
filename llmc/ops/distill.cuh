/*
distill.cuh -- distill.h on the GPU: the same functions on T = float, bf16 or fp16, computed in
fp32; and the sum of divergences.

cross_entropy_loss sets the losses first, and with them lse = loss + y[target]. A block then reads
its row twice, the second time mostly from L2: once for the sums, once for the gradient.
Exponentials are powers of 2 by the hardware (cross_entropy.cuh). If the vocabulary is cut into
slices, a row is read once for the sums of a slice, and once more for its gradient.
*/
#ifndef LLMC_DISTILL_CUH
#define LLMC_DISTILL_CUH

#include <float.h>
#include <stdint.h>

#include "llmc/base/wide_sum.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/ops/cross_entropy.cuh"
#include "llmc/ops/distill.h"

enum { DISTILL_THREADS_ = 512 };

// Returns y of a logit. -infinity, which stands past the end of a row, stays.
__device__ inline float distill_y_(float x, float softcap) {
    return softcap == 0 || x == -INFINITY ? x : softcap * softcap_tanh(x, softcap);
}

__device__ inline float distill_slope_(float y, float softcap) {
    return softcap > 0 ? softcap_slope(y / softcap) : 1.0f;
}

// Sets y for elements v ... v + WIDTH - 1 of a row; -infinity from element V on.
template <int WIDTH, class T>
__device__ inline void distill_load_(float* y, const T* row, int v, int V, float softcap) {
    if constexpr (WIDTH > 1) {
        if (v + WIDTH <= V) {
            unpack(y, load_pack(row + v));
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (WIDTH == 1 || v + WIDTH > V) {
            y[i] = v + i < V ? to_float(row[v + i]) : -INFINITY;
        }
        y[i] = distill_y_(y[i], softcap);
    }
}

// Stores gradients; 0 from element V on.
template <int WIDTH, class T> __device__ inline void distill_store_(T* row, const float* dy, int v, int V) {
    Pack<T> pack = {};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        pack[i] = from_float<T>(v + i < V ? dy[i] : 0.0f);
    }
    if constexpr (WIDTH == 1) {
        row[v] = pack[0];
    } else {
        store_pack(row + v, pack);
    }
}

template <class T> __device__ inline void distill_clear_(T* row, int Vp) {
    for (int v = threadIdx.x; v < Vp; v += blockDim.x) {
        row[v] = from_float<T>(0.0f);
    }
}

// Numbers of a row: p = exp(y - lse), log2(pt) = (y - lse) over_t + shift, and dy without the
// teacher = of_p p + of_pt pt, minus of_hit for the target.
typedef struct {
    float lse, over_t, shift, of_p, of_pt, of_hit;
} DistillRow_;

// sum_t is the sum of exp((y - lse) / t).
__device__ inline DistillRow_ distill_row_(float lse, float sum_t, float scale, CrossEntropy of,
                                           Distill how) {
    const float a = how.weight, t = how.temperature;
    const DistillRow_ row = {lse,           CROSS_ENTROPY_LOG2E / t,
                             -log2f(sum_t), scale * (1.0f - a + 2.0f * of.z_loss * lse),
                             scale * a * t, scale * (1.0f - a)};
    return row;
}

__device__ inline float distill_p_(float y, const DistillRow_* r) {
    return exp2_approx((y - r->lse) * CROSS_ENTROPY_LOG2E);
}
__device__ inline float distill_pt_(float y, const DistillRow_* r) {
    return exp2_approx(fmaf(y - r->lse, r->over_t, r->shift));
}

// ---- a teacher's logits ----

// Adds WIDTH elements, those below V, to the sums of a thread; s->most is the largest z so far.
template <int WIDTH>
__device__ inline void distill_take_(DistillSlice* s, const float* y, const float* z, int v, int V, float lse,
                                     float over_t) {
    float max = s->most;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        max = fmaxf(max, z[i]);
    }
    const float before = exp2_approx((s->most - max) * over_t);
    s->q *= before;
    s->difference *= before;
    s->most = max;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (v + i < V) {
            const float e = exp2_approx((z[i] - max) * over_t);
            s->q += e;
            s->difference = fmaf(e, z[i] - y[i], s->difference);
            s->sum_t += exp2_approx((y[i] - lse) * over_t);
        }
    }
}

// Sums up a row with the whole block.
template <int WIDTH, class T>
__device__ inline DistillSlice distill_sums_(const T* row, const T* teacher, int V, float softcap,
                                             float teacher_softcap, float lse, float over_t) {
    DistillSlice mine = {-FLT_MAX / 2, 0, 0, 0};
    float y[Pack<T>::SIZE], z[Pack<T>::SIZE];
    for (int v = threadIdx.x * WIDTH; v < V; v += blockDim.x * WIDTH) {
        distill_load_<WIDTH>(y, row, v, V, softcap);
        distill_load_<WIDTH>(z, teacher, v, V, teacher_softcap);
        distill_take_<WIDTH>(&mine, y, z, v, V, lse, over_t);
    }
    const float most = block_max(mine.most), factor = exp2_approx((mine.most - most) * over_t);
    const DistillSlice all = {most, block_sum(mine.q * factor), block_sum(mine.difference * factor),
                              block_sum(mine.sum_t)};
    return all;
}

// Sets the gradients of a row whose target is element `hit`, given the sums of the whole row.
template <int WIDTH, class T>
__device__ inline void distill_set_(T* row, const T* teacher, int hit, const DistillRow_* r,
                                    const DistillSlice* s, float teacher_softcap, CrossEntropy of) {
    const float log_sum = log2f(s->q);
    float y[Pack<T>::SIZE], z[Pack<T>::SIZE];
    for (int v = threadIdx.x * WIDTH; v < of.Vp; v += blockDim.x * WIDTH) {
        distill_load_<WIDTH>(y, row, v, of.V, of.softcap);
        distill_load_<WIDTH>(z, teacher, v, of.V, teacher_softcap);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const float q = exp2_approx(fmaf(z[i] - s->most, r->over_t, -log_sum)),
                        dy = r->of_p * distill_p_(y[i], r) + r->of_pt * (distill_pt_(y[i], r) - q);
            y[i] = (dy - (v + i == hit ? r->of_hit : 0.0f)) * distill_slope_(y[i], of.softcap);
        }
        distill_store_<WIDTH>(row, y, v, of.V);
    }
}

// Returns the divergence of a row from its sums.
__device__ inline float distill_kl_(const DistillSlice* s, const DistillRow_* r, Distill how) {
    return s->difference / s->q / how.temperature + (r->lse - s->most) / how.temperature +
           CROSS_ENTROPY_LN2 * (-r->shift - log2f(s->q));
}

// A teacher's logits (N, Vp), of the whole vocabulary or of a slice.
template <class T> struct DistillTeacherGpu {
    const T* logits;
    int Vp;
    float softcap;
};

// Tokens that learn: their targets and losses, and of slices the numbers of all slices together
// (cross_entropy.cuh).
typedef struct {
    const int* target;            // (N)
    const float* loss;            // (N)
    const CrossEntropySum* whole; // (N), or NULL
    float scale;                  // weight of a token in the gradient
    CrossEntropy of;
    Distill how;
} DistillTokensGpu;

// One block per row. A thread reads and writes the same elements in both passes.
// grid   N      block   512      shared   of block_sum and block_max
// moves  N*V in from both models, mostly twice from L2; N*Vp out. Bound by memory.
// order  fixed
// needs  both Vp multiples of WIDTH; aligned addresses if WIDTH is a pack
template <class T, int WIDTH>
__global__ void __launch_bounds__(DISTILL_THREADS_)
    distill_logits_kernel(float* kl, T* logits, DistillTeacherGpu<T> teacher, DistillTokensGpu x) {
    const int n = blockIdx.x, V = x.of.V, hit = x.target[n];
    T* row = logits + (size_t)n * x.of.Vp;
    const T* other = teacher.logits + (size_t)n * teacher.Vp;
    if (hit == NO_TARGET) {
        distill_clear_(row, x.of.Vp);
        if (threadIdx.x == 0) {
            kl[n] = 0.0f;
        }
        return;
    }
    const float lse = x.loss[n] + distill_y_(to_float(row[hit]), x.of.softcap),
                over_t = CROSS_ENTROPY_LOG2E / x.how.temperature;
    // has a barrier
    const DistillSlice s = distill_sums_<WIDTH>(row, other, V, x.of.softcap, teacher.softcap, lse, over_t);
    const DistillRow_ r = distill_row_(lse, s.sum_t, x.scale, x.of, x.how);
    distill_set_<WIDTH>(row, other, hit, &r, &s, teacher.softcap, x.of);
    if (threadIdx.x == 0) {
        kl[n] = distill_kl_(&s, &r, x.how);
    }
}

template <class T>
static inline int distill_fits_(const T* logits, const DistillTeacherGpu<T>& teacher, CrossEntropy of) {
    const int pack = Pack<T>::SIZE;
    return of.Vp % pack == 0 && teacher.Vp % pack == 0 && (uintptr_t)logits % 16 == 0 &&
           (uintptr_t)teacher.logits % 16 == 0;
}

// Sets loss, which x does not need to have, and kl.
template <class T>
static inline void distill_logits(float* loss, float* kl, T* logits, DistillTeacherGpu<T> teacher,
                                  DistillTokensGpu x, const Gpu* gpu) {
    x.loss = loss;
    cross_entropy_loss(loss, (const T*)logits, x.target, x.of, gpu);
    launch(distill_fits_(logits, teacher, x.of) ? distill_logits_kernel<T, Pack<T>::SIZE>
                                                : distill_logits_kernel<T, 1>,
           x.of.N, DISTILL_THREADS_, 0, gpu, kl, logits, teacher, x);
}

// ---- slices of the vocabulary ----

// One block per row sets the sums of a slice.
// grid   N      block   512      shared   of block_sum and block_max
// moves  N*V in from both models; 16 N out. Bound by memory.
// order  fixed
// needs  as distill_logits_kernel
template <class T, int WIDTH>
__global__ void __launch_bounds__(DISTILL_THREADS_)
    distill_slice_kernel(DistillSlice* sums, const T* logits, DistillTeacherGpu<T> teacher,
                         DistillTokensGpu x) {
    const int n = blockIdx.x, V = x.target[n] == NO_TARGET ? 0 : x.of.V;
    const float lse = x.loss[n] + x.whole[n].target, over_t = CROSS_ENTROPY_LOG2E / x.how.temperature;
    const DistillSlice all =
        distill_sums_<WIDTH>(logits + (size_t)n * x.of.Vp, teacher.logits + (size_t)n * teacher.Vp, V,
                             x.of.softcap, teacher.softcap, lse, over_t);
    if (threadIdx.x == 0) {
        sums[n] = all;
    }
}

// One thread per row adds up the sums of all slices (slices, N), leaves them in the first one's
// place, and sets kl.
// grid   ceil(N / 256)      block   256      shared   none
// moves  16 slices N in, 20 N out. Bound by the launch.
// order  slice after slice
static __global__ void distill_combine_kernel(float* kl, DistillSlice* sums, int slices, DistillTokensGpu x) {
    const int n = (int)(blockIdx.x * blockDim.x + threadIdx.x), N = x.of.N;
    if (n >= N) {
        return;
    }
    DistillSlice all = {sums[n].most, 0, 0, 0};
    for (int i = 1; i < slices; i++) {
        all.most = fmaxf(all.most, sums[(size_t)i * N + n].most);
    }
    for (int i = 0; i < slices; i++) {
        const DistillSlice s = sums[(size_t)i * N + n];
        const float factor = exp2_approx((s.most - all.most) * (CROSS_ENTROPY_LOG2E / x.how.temperature));
        all.q += s.q * factor;
        all.difference += s.difference * factor;
        all.sum_t += s.sum_t;
    }
    sums[n] = all;
    const DistillRow_ r = distill_row_(x.loss[n] + x.whole[n].target, all.sum_t, 1.0f, x.of, x.how);
    kl[n] = x.target[n] == NO_TARGET ? 0.0f : distill_kl_(&all, &r, x.how);
}

// One block per row turns the logits of a slice, whose vocabulary rows start with `first`, into
// their gradient.
// grid   N      block   512      shared   none
// moves  N*V in from both models; N*Vp out. Bound by memory.
// order  every element on its own
// needs  as distill_logits_kernel
template <class T, int WIDTH>
__global__ void __launch_bounds__(DISTILL_THREADS_)
    distill_slice_backward_kernel(T* logits, DistillTeacherGpu<T> teacher, const DistillSlice* sums,
                                  int first, DistillTokensGpu x) {
    const int n = blockIdx.x, hit = x.target[n] - first;
    const DistillSlice all = sums[n];
    const DistillRow_ r = distill_row_(x.loss[n] + x.whole[n].target, all.sum_t, x.scale, x.of, x.how);
    T* row = logits + (size_t)n * x.of.Vp;
    if (x.target[n] == NO_TARGET) {
        distill_clear_(row, x.of.Vp);
        return;
    }
    distill_set_<WIDTH>(row, teacher.logits + (size_t)n * teacher.Vp, hit, &r, &all, teacher.softcap, x.of);
}

// Sets the sums (N) of a slice, once the losses are known.
template <class T>
static inline void distill_slice(DistillSlice* sums, const T* logits, DistillTeacherGpu<T> teacher,
                                 DistillTokensGpu x, const Gpu* gpu) {
    launch(distill_fits_(logits, teacher, x.of) ? distill_slice_kernel<T, Pack<T>::SIZE>
                                                : distill_slice_kernel<T, 1>,
           x.of.N, DISTILL_THREADS_, 0, gpu, sums, logits, teacher, x);
}

// Sets kl (N) and the sums of whole rows, in the place of the first slice's, from the sums of all
// slices (slices, N).
static inline void distill_combine(float* kl, DistillSlice* sums, int slices, DistillTokensGpu x,
                                   const Gpu* gpu) {
    const int threads = 256;
    launch(distill_combine_kernel, ceil_div(x.of.N, threads), threads, 0, gpu, kl, sums, slices, x);
}

// Turns the logits of a slice into their gradient.
template <class T>
static inline void distill_slice_backward(T* logits, DistillTeacherGpu<T> teacher, const DistillSlice* sums,
                                          int first, DistillTokensGpu x, const Gpu* gpu) {
    launch(distill_fits_(logits, teacher, x.of) ? distill_slice_backward_kernel<T, Pack<T>::SIZE>
                                                : distill_slice_backward_kernel<T, 1>,
           x.of.N, DISTILL_THREADS_, 0, gpu, logits, teacher, sums, first, x);
}

// ---- the sum of divergences ----

enum { DIVERGENCE_THREADS_ = 256 };

// Adds N divergences to a sum: thread t adds up t, t + 256, ...
// grid   1      block   256      shared   256 WideSum
// moves  reads N fp32. Bound by latency.
// order  does not show in the result
static __global__ void __launch_bounds__(DIVERGENCE_THREADS_)
    sum_divergences_kernel_(WideSum* sum, const float* kl, int N) {
    SMEM_ARRAY(WideSum, of_thread, [DIVERGENCE_THREADS_]);
    WideSum mine = {0, 0};
    for (int n = threadIdx.x; n < N; n += DIVERGENCE_THREADS_) {
        wide_sum_add(&mine, kl[n]);
    }
    of_thread[threadIdx.x] = mine;
    for (int half = DIVERGENCE_THREADS_ / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) {
            wide_sum_merge(&of_thread[threadIdx.x], of_thread[threadIdx.x + half]);
        }
    }
    if (threadIdx.x == 0) {
        wide_sum_merge(sum, of_thread[0]);
    }
}

static inline void sum_divergences(WideSum* sum, const float* kl, int N, const Gpu* gpu) {
    launch(sum_divergences_kernel_, 1, DIVERGENCE_THREADS_, 0, gpu, sum, kl, N);
}

#endif
