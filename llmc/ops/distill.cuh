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

// Sets the gradients of a row whose target is element `hit`; log_sum is log2 of the sum of
// exp((z - most) / t).
template <int WIDTH, class T>
__device__ inline void distill_set_(T* row, const T* teacher, int hit, const DistillRow_* r, float most,
                                    float log_sum, float teacher_softcap, CrossEntropy of) {
    float y[Pack<T>::SIZE], z[Pack<T>::SIZE];
    for (int v = threadIdx.x * WIDTH; v < of.Vp; v += blockDim.x * WIDTH) {
        distill_load_<WIDTH>(y, row, v, of.V, of.softcap);
        distill_load_<WIDTH>(z, teacher, v, of.V, teacher_softcap);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const float q = exp2_approx(fmaf(z[i] - most, r->over_t, -log_sum)),
                        dy = r->of_p * distill_p_(y[i], r) + r->of_pt * (distill_pt_(y[i], r) - q);
            y[i] = (dy - (v + i == hit ? r->of_hit : 0.0f)) * distill_slope_(y[i], of.softcap);
        }
        distill_store_<WIDTH>(row, y, v, of.V);
    }
}

// Returns the divergence of a row from its sums.
__device__ inline float distill_kl_(const DistillSums_* s, const DistillRow_* r, Distill how) {
    return s->difference / s->sum / how.temperature + (r->lse - s->max) / how.temperature +
           CROSS_ENTROPY_LN2 * (-r->shift - log2f(s->sum));
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
    distill_set_<WIDTH>(row, other, hit, &r, s.max, log2f(s.sum), teacher_softcap, of);
    if (threadIdx.x == 0) {
        kl[n] = distill_kl_(&s, &r, how);
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

// Sets *y to that of the thread's kept token, leaves -infinity, and sums up with the whole block.
// id < 0: the thread has none.
template <class T>
__device__ inline DistillKept_ distill_take_kept_(float* y, T* row, int id, float log_prob, float softcap,
                                                  float lse, float over_t) {
    DistillKept_ mine = {0, 0};
    if (id >= 0) {
        *y = distill_y_(to_float(row[id]), softcap);
        row[id] = from_float<T>(-INFINITY);
        mine.q = exp2_approx(log_prob * CROSS_ENTROPY_LOG2E);
        mine.sum_t = exp2_approx((*y - lse) * over_t);
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

// Probabilities r and R of the tokens that are not kept, and the logarithm of what kept q are
// divided by.
typedef struct {
    float rest, own, log_all;
} DistillOthers_;

// q: sum of the kept q; others, sum_t: sums of exp((y - lse) / t) of tokens that are not kept, and
// of all.
__device__ inline DistillOthers_ distill_other_(float q, float others, float sum_t) {
    const DistillOthers_ o = {q < 1 ? 1 - q : 0.0f, fmaxf(others / sum_t, FLT_MIN),
                              q > 1 ? CROSS_ENTROPY_LN2 * log2f(q) : 0.0f};
    return o;
}

// Returns the part in kl of the tokens that are not kept.
__device__ inline float distill_other_kl_(DistillOthers_ o) {
    return o.rest > 0 ? o.rest * CROSS_ENTROPY_LN2 * log2f(o.rest / o.own) : 0.0f;
}

// Returns the gradient of a kept token.
__device__ inline float distill_kept_dlogit_(float y, float q, int is_hit, const DistillRow_* r,
                                             float softcap) {
    const float dy = r->of_p * distill_p_(y, r) + r->of_pt * (distill_pt_(y, r) - q);
    return (dy - (is_hit ? r->of_hit : 0.0f)) * distill_slope_(y, softcap);
}

// One block per row; thread i has kept token i.
// grid   N      block   512      shared   those of block_sum
// moves  N*V in, mostly twice from L2; N*Vp out; 8 N k in. Bound by memory.
// order  fixed
// needs  k <= 256, and as distill_logits_kernel
template <class T, int WIDTH>
__global__ void __launch_bounds__(DISTILL_THREADS_, 2)
    distill_kept_kernel(float* kl, T* logits, KeptTokens kept, const float* loss, const int* target,
                        float scale, CrossEntropy of, Distill how) {
    const int n = blockIdx.x, i = threadIdx.x, k = kept.k, hit = target[n];
    const int id = i < k ? kept.ids[(size_t)n * k + i] : -1;
    const float log_prob = i < k ? kept.log_probs[(size_t)n * k + i] : 0.0f;
    float y = 0;
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
    const DistillKept_ sums = distill_take_kept_(&y, row, id, log_prob, of.softcap, lse, over_t);
    const float others = distill_others_<WIDTH>(row, of.V, of.softcap, lse, over_t),
                sum_t = others + sums.sum_t;
    const DistillOthers_ other = distill_other_(sums.q, others, sum_t);
    const DistillRow_ r = distill_row_(lse, sum_t, scale, of, how);
    distill_set_others_<WIDTH>(row, hit, &r, r.of_pt * (1 - other.rest / other.own), of);
    __syncthreads(); // before others' gradients are replaced
    float divergence = 0;
    if (id >= 0) {
        const float log_q = log_prob - other.log_all, q = exp2_approx(log_q * CROSS_ENTROPY_LOG2E),
                    log_pt = CROSS_ENTROPY_LN2 * fmaf(y - lse, over_t, r.shift);
        divergence = q * (log_q - log_pt);
        row[id] = from_float<T>(distill_kept_dlogit_(y, q, id == hit, &r, of.softcap));
    }
    divergence = block_sum(divergence);
    if (i == 0) {
        kl[n] = divergence + distill_other_kl_(other);
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

// ---- slices of the vocabulary ----

// A teacher's logits of a slice (N, Vp), or, if they are NULL, its kept tokens of all words.
template <class T> struct DistillTeacherGpu {
    const T* logits;
    int Vp;
    float softcap;
    KeptTokens kept;
};

// Returns the element of a slice, whose words start with `first`, that is the thread's kept token
// of row n; -1: none.
__device__ inline int distill_own_(KeptTokens kept, int n, int first, int V) {
    const int i = threadIdx.x, id = i < kept.k ? kept.ids[(size_t)n * kept.k + i] - first : -1;
    return id < V ? id : -1;
}

// Sums up the kept tokens of a row, and the others. The row keeps its bits.
template <int WIDTH, class T>
__device__ inline DistillSlice distill_slice_kept_(T* row, int id, float log_prob, int V, float softcap,
                                                   float lse, float over_t) {
    const T before = id >= 0 ? row[id] : from_float<T>(0.0f);
    float y = 0, difference = 0;
    const DistillKept_ sums = distill_take_kept_(&y, row, id, log_prob, softcap, lse, over_t);
    const float others = distill_others_<WIDTH>(row, V, softcap, lse, over_t); // a barrier
    if (id >= 0) {
        row[id] = before;
        difference =
            exp2_approx(log_prob * CROSS_ENTROPY_LOG2E) * (log_prob - CROSS_ENTROPY_LN2 * (y - lse) * over_t);
    }
    const DistillSlice all = {0, sums.q, block_sum(difference), others, sums.sum_t};
    return all;
}

// One block per row sets the sums of a slice, whose words start with `first`. `whole` has the
// numbers of all slices together (cross_entropy.cuh).
// grid   N      block   512      shared   those of block_sum and block_max
// moves  N*V in from both models; 20 N out; 8 N k in. Bound by memory.
// order  fixed
// needs  k <= 256, and as distill_logits_kernel
template <class T, int WIDTH>
__global__ void __launch_bounds__(DISTILL_THREADS_)
    distill_slice_kernel(DistillSlice* sums, T* logits, DistillTeacherGpu<T> teacher, const float* loss,
                         const CrossEntropySum* whole, const int* target, int first, CrossEntropy of,
                         Distill how) {
    const int n = blockIdx.x, V = target[n] == NO_TARGET ? 0 : of.V;
    const float lse = loss[n] + whole[n].target, over_t = CROSS_ENTROPY_LOG2E / how.temperature;
    T* row = logits + (size_t)n * of.Vp;
    DistillSlice all;
    if (teacher.logits) {
        const DistillSums_ s = distill_sums_<WIDTH>((const T*)row, teacher.logits + (size_t)n * teacher.Vp, V,
                                                    of.softcap, teacher.softcap, lse, over_t);
        all = DistillSlice{s.max, s.sum, s.difference, s.sum_t, 0};
    } else {
        const int id = distill_own_(teacher.kept, n, first, V);
        const float log_prob =
            id >= 0 ? teacher.kept.log_probs[(size_t)n * teacher.kept.k + threadIdx.x] : 0.0f;
        all = distill_slice_kept_<WIDTH>(row, id, log_prob, V, of.softcap, lse, over_t);
    }
    if (threadIdx.x == 0) {
        sums[n] = all;
    }
}

// Returns the divergence of a row from the sums of all slices.
__device__ inline float distill_whole_kl_(DistillSlice all, int is_kept, float lse, CrossEntropy of,
                                          Distill how) {
    const float sum_t = all.sum_t + all.kept_t;
    const DistillRow_ r = distill_row_(lse, sum_t, 1.0f, of, how);
    if (!is_kept) {
        const DistillSums_ s = {all.most, all.q, all.difference, sum_t};
        return distill_kl_(&s, &r, how);
    }
    const DistillOthers_ other = distill_other_(all.q, all.sum_t, sum_t);
    return expf(-other.log_all) * (all.difference + all.q * (CROSS_ENTROPY_LN2 * -r.shift - other.log_all)) +
           distill_other_kl_(other);
}

// One thread per row adds up the sums of all slices (slices, N), leaves them in the first one's
// place, and sets kl.
// grid   ceil(N / 256)      block   256      shared   none
// moves  20 slices N in, 24 N out. Bound by the launch.
// order  slice after slice
static __global__ void distill_combine_kernel(float* kl, DistillSlice* sums, int is_kept, const float* loss,
                                              const CrossEntropySum* whole, const int* target, int slices,
                                              CrossEntropy of, Distill how) {
    const int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n >= of.N) {
        return;
    }
    DistillSlice all = {sums[n].most, 0, 0, 0, 0};
    for (int i = 1; i < slices; i++) {
        all.most = fmaxf(all.most, sums[(size_t)i * of.N + n].most);
    }
    for (int i = 0; i < slices; i++) {
        const DistillSlice s = sums[(size_t)i * of.N + n];
        const float factor = exp2_approx((s.most - all.most) * (CROSS_ENTROPY_LOG2E / how.temperature));
        all.q += s.q * factor;
        all.difference += s.difference * factor;
        all.sum_t += s.sum_t;
        all.kept_t += s.kept_t;
    }
    sums[n] = all;
    kl[n] =
        target[n] == NO_TARGET ? 0.0f : distill_whole_kl_(all, is_kept, loss[n] + whole[n].target, of, how);
}

// One block per row turns the logits of a slice, whose words start with `first`, into their
// gradient.
// grid   N      block   512      shared   none
// moves  N*V in from both models; N*Vp out; 8 N k in. Bound by memory.
// order  every element on its own
// needs  as distill_slice_kernel
template <class T, int WIDTH>
__global__ void __launch_bounds__(DISTILL_THREADS_)
    distill_slice_backward_kernel(T* logits, DistillTeacherGpu<T> teacher, const DistillSlice* sums,
                                  const float* loss, const CrossEntropySum* whole, const int* target,
                                  int first, float scale, CrossEntropy of, Distill how) {
    const int n = blockIdx.x, hit = target[n] - first;
    const DistillSlice all = sums[n];
    const float lse = loss[n] + whole[n].target, sum_t = all.sum_t + all.kept_t;
    const DistillRow_ r = distill_row_(lse, sum_t, scale, of, how);
    T* row = logits + (size_t)n * of.Vp;
    if (target[n] == NO_TARGET) {
        distill_clear_(row, of.Vp);
        return;
    }
    if (teacher.logits) {
        distill_set_<WIDTH>(row, teacher.logits + (size_t)n * teacher.Vp, hit, &r, all.most, log2f(all.q),
                            teacher.softcap, of);
        return;
    }
    const int id = distill_own_(teacher.kept, n, first, of.V);
    const float y = id >= 0 ? distill_y_(to_float(row[id]), of.softcap) : 0.0f;
    const DistillOthers_ other = distill_other_(all.q, all.sum_t, sum_t);
    __syncthreads(); // before kept logits are replaced
    distill_set_others_<WIDTH>(row, hit, &r, r.of_pt * (1 - other.rest / other.own), of);
    __syncthreads(); // before others' gradients are replaced
    if (id >= 0) {
        const float log_q = teacher.kept.log_probs[(size_t)n * teacher.kept.k + threadIdx.x] - other.log_all;
        row[id] = from_float<T>(
            distill_kept_dlogit_(y, exp2_approx(log_q * CROSS_ENTROPY_LOG2E), id == hit, &r, of.softcap));
    }
}

template <class T>
static inline int distill_fits_(const T* logits, const DistillTeacherGpu<T>* teacher, CrossEntropy of) {
    const int pack = Pack<T>::SIZE;
    return of.Vp % pack == 0 && teacher->Vp % pack == 0 && (uintptr_t)logits % 16 == 0 &&
           (uintptr_t)teacher->logits % 16 == 0;
}

// Sets the sums (N) of a slice, whose words start with `first`, once the losses are known.
template <class T>
static inline void distill_slice(DistillSlice* sums, T* logits, DistillTeacherGpu<T> teacher,
                                 const float* loss, const CrossEntropySum* whole, const int* target,
                                 int first, CrossEntropy of, Distill how, const Gpu* gpu) {
    launch(distill_fits_(logits, &teacher, of) ? distill_slice_kernel<T, Pack<T>::SIZE>
                                               : distill_slice_kernel<T, 1>,
           of.N, DISTILL_THREADS_, 0, gpu, sums, logits, teacher, loss, whole, target, first, of, how);
}

// Sets kl (N) and the sums of whole rows, in the place of the first slice's, from the sums of all
// slices (slices, N).
static inline void distill_combine(float* kl, DistillSlice* sums, int is_kept, const float* loss,
                                   const CrossEntropySum* whole, const int* target, int slices,
                                   CrossEntropy of, Distill how, const Gpu* gpu) {
    const int threads = 256;
    launch(distill_combine_kernel, ceil_div(of.N, threads), threads, 0, gpu, kl, sums, is_kept, loss, whole,
           target, slices, of, how);
}

// Turns the logits of a slice into their gradient.
template <class T>
static inline void distill_slice_backward(T* logits, DistillTeacherGpu<T> teacher, const DistillSlice* sums,
                                          const float* loss, const CrossEntropySum* whole, const int* target,
                                          int first, float scale, CrossEntropy of, Distill how,
                                          const Gpu* gpu) {
    launch(distill_fits_(logits, &teacher, of) ? distill_slice_backward_kernel<T, Pack<T>::SIZE>
                                               : distill_slice_backward_kernel<T, 1>,
           of.N, DISTILL_THREADS_, 0, gpu, logits, teacher, sums, loss, whole, target, first, scale, of, how);
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
