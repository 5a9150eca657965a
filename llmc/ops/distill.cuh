/*
distill.cuh -- distill.h on the GPU: the same functions on T = float, bf16 or fp16, computed in
fp32; and the sum of divergences.

cross_entropy_loss sets the losses first, and with them lse = loss + y[target]. A block then reads
its row twice, the second time mostly from L2: once for the sums, once for the gradient.
Exponentials are powers of 2 by the hardware (cross_entropy.cuh).
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

// Returns y of a logit. -infinity, which marks a kept token, stays; so does NaN.
__device__ inline float distill_y_(float x, float softcap) {
    if (softcap == 0 || x == -INFINITY || x != x) {
        return x;
    }
    const float e = exp2_approx(fminf(x * (-2.0f * CROSS_ENTROPY_LOG2E / softcap), 60.0f));
    return softcap * __fdividef(1.0f - e, 1.0f + e);
}

__device__ inline float distill_slope_(float y, float softcap) {
    return softcap > 0 ? 1.0f - (y / softcap) * (y / softcap) : 1.0f;
}

// Sets y to those of elements v ... v + WIDTH - 1 of a row; -infinity from element V on.
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
// teacher = of_p p + of_pt pt, but for the target: less of_hit.
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

// Largest z so far; sums of e = exp((z - max) / t), and of e (z - y); and of exp((y - lse) / t).
typedef struct {
    float max, sum, difference, sum_t;
} DistillSums_;

// Adds WIDTH elements, those below V.
template <int WIDTH>
__device__ inline void distill_take_(DistillSums_* s, const float* y, const float* z, int v, int V, float lse,
                                     float over_t) {
    float max = s->max;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        max = fmaxf(max, z[i]);
    }
    const float before = exp2_approx((s->max - max) * over_t);
    s->sum *= before;
    s->difference *= before;
    s->max = max;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (v + i < V) {
            const float e = exp2_approx((z[i] - max) * over_t);
            s->sum += e;
            s->difference = fmaf(e, z[i] - y[i], s->difference);
            s->sum_t += exp2_approx((y[i] - lse) * over_t);
        }
    }
}

// Sums up a row with the whole block.
template <int WIDTH, class T>
__device__ inline DistillSums_ distill_sums_(const T* row, const T* teacher, int V, float softcap,
                                             float teacher_softcap, float lse, float over_t) {
    DistillSums_ mine = {-FLT_MAX / 2, 0, 0, 0};
    float y[Pack<T>::SIZE], z[Pack<T>::SIZE];
    for (int v = threadIdx.x * WIDTH; v < V; v += blockDim.x * WIDTH) {
        distill_load_<WIDTH>(y, row, v, V, softcap);
        distill_load_<WIDTH>(z, teacher, v, V, teacher_softcap);
        distill_take_<WIDTH>(&mine, y, z, v, V, lse, over_t);
    }
    const float max = block_max(mine.max), factor = exp2_approx((mine.max - max) * over_t);
    const DistillSums_ all = {max, block_sum(mine.sum * factor), block_sum(mine.difference * factor),
                              block_sum(mine.sum_t)};
    return all;
}

// One block per row. A thread reads and writes the same elements in both passes.
// grid   N      block   512      shared   those of block_sum and block_max
// moves  N*V in from both models, mostly twice from L2; N*Vp out. Bound by memory.
// order  fixed
// needs  both Vp multiples of WIDTH, and aligned addresses where that is a pack
template <class T, int WIDTH>
__global__ void __launch_bounds__(DISTILL_THREADS_)
    distill_logits_kernel(float* kl, T* logits, const T* teacher, int teacher_Vp, float teacher_softcap,
                          const float* loss, const int* target, float scale, CrossEntropy of, Distill how) {
    const int n = blockIdx.x, V = of.V, hit = target[n];
    T* row = logits + (size_t)n * of.Vp;
    const T* other = teacher + (size_t)n * teacher_Vp;
    if (hit == NO_TARGET) {
        distill_clear_(row, of.Vp);
        if (threadIdx.x == 0) {
            kl[n] = 0.0f;
        }
        return;
    }
    const float lse = loss[n] + distill_y_(to_float(row[hit]), of.softcap),
                over_t = CROSS_ENTROPY_LOG2E / how.temperature;
    const DistillSums_ s =
        distill_sums_<WIDTH>(row, other, V, of.softcap, teacher_softcap, lse, over_t); // a barrier
    const DistillRow_ r = distill_row_(lse, s.sum_t, scale, of, how);
    const float log_sum = log2f(s.sum);
    float y[Pack<T>::SIZE], z[Pack<T>::SIZE];
    for (int v = threadIdx.x * WIDTH; v < of.Vp; v += blockDim.x * WIDTH) {
        distill_load_<WIDTH>(y, row, v, V, of.softcap);
        distill_load_<WIDTH>(z, other, v, V, teacher_softcap);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const float q = exp2_approx(fmaf(z[i] - s.max, over_t, -log_sum)),
                        dy = r.of_p * distill_p_(y[i], &r) + r.of_pt * (distill_pt_(y[i], &r) - q);
            y[i] = (dy - (v + i == hit ? r.of_hit : 0.0f)) * distill_slope_(y[i], of.softcap);
        }
        distill_store_<WIDTH>(row, y, v, V);
    }
    if (threadIdx.x == 0) {
        kl[n] = s.difference / s.sum / how.temperature + (lse - s.max) / how.temperature +
                CROSS_ENTROPY_LN2 * (-r.shift - log_sum);
    }
}

template <class T>
static inline void distill_logits(float* loss, float* kl, T* logits, const T* teacher, int teacher_Vp,
                                  float teacher_softcap, const int* target, float scale, CrossEntropy of,
                                  Distill how, const Gpu* gpu) {
    const int pack = Pack<T>::SIZE, fits = of.Vp % pack == 0 && teacher_Vp % pack == 0 &&
                                           (uintptr_t)logits % 16 == 0 && (uintptr_t)teacher % 16 == 0;
    cross_entropy_loss(loss, (const T*)logits, target, of, gpu);
    launch(fits ? distill_logits_kernel<T, Pack<T>::SIZE> : distill_logits_kernel<T, 1>, of.N,
           DISTILL_THREADS_, 0, gpu, kl, logits, teacher, teacher_Vp, teacher_softcap, loss, target, scale,
           of, how);
}

// ---- kept tokens ----

// Tokens of a row that a teacher keeps: their sums of q and of exp((y - lse) / t).
typedef struct {
    float q, sum_t;
} DistillKept_;

// Moves y of the kept tokens into shared memory, leaves -infinity, and sums up with the whole
// block, which is at least as large as k.
template <class T>
__device__ inline DistillKept_ distill_take_kept_(float* y, T* row, const int* ids, const float* log_probs,
                                                  int k, float softcap, float lse, float over_t) {
    const int i = threadIdx.x;
    DistillKept_ mine = {0, 0};
    if (i < k) {
        y[i] = distill_y_(to_float(row[ids[i]]), softcap);
        row[ids[i]] = from_float<T>(-INFINITY);
        mine.q = exp2_approx(log_probs[i] * CROSS_ENTROPY_LOG2E);
        mine.sum_t = exp2_approx((y[i] - lse) * over_t);
    }
    const DistillKept_ all = {block_sum(mine.q), block_sum(mine.sum_t)};
    return all;
}

// Returns the sum of exp((y - lse) / t) over the tokens that are not kept.
template <int WIDTH, class T>
__device__ inline float distill_others_(const T* row, int V, float softcap, float lse, float over_t) {
    float sum = 0, y[Pack<T>::SIZE];
    for (int v = threadIdx.x * WIDTH; v < V; v += blockDim.x * WIDTH) {
        distill_load_<WIDTH>(y, row, v, V, softcap);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            sum += exp2_approx((y[i] - lse) * over_t); // 0 beyond V
        }
    }
    return block_sum(sum);
}

// Sets the gradients of the tokens that are not kept.
template <int WIDTH, class T>
__device__ inline void distill_set_others_(T* row, int hit, const DistillRow_* r, float of_pt,
                                           CrossEntropy of) {
    float y[Pack<T>::SIZE];
    for (int v = threadIdx.x * WIDTH; v < of.Vp; v += blockDim.x * WIDTH) {
        distill_load_<WIDTH>(y, row, v, of.V, of.softcap);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const float dy = r->of_p * distill_p_(y[i], r) + of_pt * distill_pt_(y[i], r);
            y[i] = (dy - (v + i == hit ? r->of_hit : 0.0f)) * distill_slope_(y[i], of.softcap);
        }
        distill_store_<WIDTH>(row, y, v, of.V);
    }
}

// One block per row; thread i has kept token i.
// grid   N      block   512      shared   k fp32, and those of block_sum
// moves  N*V in, mostly twice from L2; N*Vp out; 8 N k in. Bound by memory.
// order  fixed
// needs  k <= 256, and as distill_logits_kernel
template <class T, int WIDTH>
__global__ void __launch_bounds__(DISTILL_THREADS_)
    distill_kept_kernel(float* kl, T* logits, KeptTokens kept, const float* loss, const int* target,
                        float scale, CrossEntropy of, Distill how) {
    SMEM_ARRAY(float, y, [DISTILL_MOST_KEPT]);
    const int n = blockIdx.x, i = threadIdx.x, k = kept.k, hit = target[n];
    const int* ids = kept.ids + (size_t)n * k;
    const float* log_probs = kept.log_probs + (size_t)n * k;
    T* row = logits + (size_t)n * of.Vp;
    if (hit == NO_TARGET) {
        distill_clear_(row, of.Vp);
        if (i == 0) {
            kl[n] = 0.0f;
        }
        return;
    }
    const float lse = loss[n] + distill_y_(to_float(row[hit]), of.softcap),
                over_t = CROSS_ENTROPY_LOG2E / how.temperature;
    __syncthreads(); // before the target's logit may be replaced
    const DistillKept_ sums = distill_take_kept_(y, row, ids, log_probs, k, of.softcap, lse, over_t);
    const float others = distill_others_<WIDTH>(row, of.V, of.softcap, lse, over_t),
                sum_t = others + sums.sum_t, rest = sums.q < 1 ? 1 - sums.q : 0.0f, // r
        own = fmaxf(others / sum_t, FLT_MIN),                                       // R
        log_all = sums.q > 1 ? CROSS_ENTROPY_LN2 * log2f(sums.q) : 0.0f;
    const DistillRow_ r = distill_row_(lse, sum_t, scale, of, how);
    distill_set_others_<WIDTH>(row, hit, &r, r.of_pt * (1 - rest / own), of);
    __syncthreads(); // before others' gradients are replaced
    float divergence = 0;
    if (i < k) {
        const float log_q = log_probs[i] - log_all, q = exp2_approx(log_q * CROSS_ENTROPY_LOG2E),
                    log_pt = CROSS_ENTROPY_LN2 * fmaf(y[i] - lse, over_t, r.shift),
                    dy = r.of_p * distill_p_(y[i], &r) + r.of_pt * (distill_pt_(y[i], &r) - q);
        divergence = q * (log_q - log_pt);
        row[ids[i]] =
            from_float<T>((dy - (ids[i] == hit ? r.of_hit : 0.0f)) * distill_slope_(y[i], of.softcap));
    }
    divergence = block_sum(divergence);
    if (i == 0) {
        kl[n] = divergence + (rest > 0 ? rest * CROSS_ENTROPY_LN2 * log2f(rest / own) : 0.0f);
    }
}

template <class T>
static inline void distill_kept(float* loss, float* kl, T* logits, KeptTokens kept, const int* target,
                                float scale, CrossEntropy of, Distill how, const Gpu* gpu) {
    const int fits = of.Vp % Pack<T>::SIZE == 0 && (uintptr_t)logits % 16 == 0;
    cross_entropy_loss(loss, (const T*)logits, target, of, gpu);
    launch(fits ? distill_kept_kernel<T, Pack<T>::SIZE> : distill_kept_kernel<T, 1>, of.N, DISTILL_THREADS_,
           0, gpu, kl, logits, kept, loss, target, scale, of, how);
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
