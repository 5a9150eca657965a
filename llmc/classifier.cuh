/*
classifier.cuh -- classifier.h on the GPU: the same functions on T = float, bf16 or fp16, computed in fp32.

The maximum and the sum of exponentials of a row are found in one pass (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018). The backward pass needs the row a second time: it keeps a copy in
shared memory if a block can have that much, which saves reading it again; the results are the same.

NaN or +infinity among the logits gives a loss of NaN, unless the row does not count.

needs:   classifier.h gpu.cuh
defines: classifier_loss, classifier_backward, classifier_loss_bytes, classifier_backward_bytes
*/
#ifndef LLMC_CLASSIFIER_CUH
#define LLMC_CLASSIFIER_CUH

#include <float.h>

#include "classifier.h"
#include "gpu.cuh"

#define CLASSIFIER_THREADS 1024
#define CLASSIFIER_STATIC_BYTES                                                                              \
    (2 << 10) // at most: shared memory of block_sum and block_max, and the system's

static inline double classifier_loss_bytes(double N, double V, double element_bytes) {
    return N * V * element_bytes + 8 * N;
}
static inline double classifier_backward_bytes(double N, double Vp, double element_bytes) {
    return 2 * N * Vp * element_bytes + 8 * N; // a second reading comes from L2
}

// The largest element so far, and the sum of exp(element - max).
typedef struct {
    float max, sum;
} ClassifierSum_;

// Elements v ... v + WIDTH - 1 of a row, those from V on being left out. max never is NaN, but the sum is
// after a NaN. The fast exponential is wrong by 2 + 1.2 |x - max| units in the last place: nothing, where it
// counts.
template <int WIDTH, class T>
__device__ inline void classifier_take_(ClassifierSum_* s, const T* x, int v, int V) {
    float max = s->max;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        max = v + i < V ? fmaxf(max, to_float(x[i])) : max;
    }
    if (max > s->max) {
        s->sum *= __expf(s->max - max);
        s->max = max;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        s->sum += v + i < V ? __expf(to_float(x[i]) - max) : 0.0f;
    }
}

template <int WIDTH, class T> __device__ inline void classifier_load_(T* to, const T* from) {
    if constexpr (WIDTH == 1) {
        to[0] = from[0];
    } else {
        *reinterpret_cast<Pack<T>*>(to) = load_pack(from);
    }
}

template <int WIDTH, class T> __device__ inline void classifier_store_(T* to, const T* from) {
    if constexpr (WIDTH == 1) {
        to[0] = from[0];
    } else {
        store_pack(to, *reinterpret_cast<const Pack<T>*>(from));
    }
}

// A row by the whole block, also copied to `copy` unless that is NULL. It starts from a finite maximum, so
// that no thread subtracts -infinity from itself.
template <int WIDTH, class T> __device__ inline ClassifierSum_ classifier_row_(T* copy, const T* row, int V) {
    ClassifierSum_ mine = {-FLT_MAX, 0};
#pragma unroll 2
    for (int v = threadIdx.x * WIDTH; v < V; v += blockDim.x * WIDTH) {
        Pack<T> x;
        classifier_load_<WIDTH>(x.element, row + v);
        if (copy) {
            classifier_store_<WIDTH>(copy + v, x.element);
        }
        classifier_take_<WIDTH>(&mine, x.element, v, V);
    }
    const float max = block_max(mine.max);
    const ClassifierSum_ all = {max, block_sum(mine.sum * __expf(mine.max - max))};
    return all;
}

// A block per row.
// grid   N      block   up to 1024      shared   those of block_sum and block_max
// moves  N*V in, N fp32 out. Bound by memory.
// order  fixed: by V and T alone
// needs  Vp a multiple of WIDTH, and aligned addresses where that is a pack
template <class T, int WIDTH>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
    classifier_loss_kernel(float* loss, const T* logits, const int* target, int V, int Vp) {
    const T* row = logits + (size_t)blockIdx.x * Vp;
    const int hit = target[blockIdx.x];
    if (hit == NO_TARGET) {
        if (threadIdx.x == 0) {
            loss[blockIdx.x] = 0.0f;
        }
        return;
    }
    const ClassifierSum_ s = classifier_row_<WIDTH>((T*)NULL, row, V);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = logf(s.sum) + s.max - to_float(row[hit]);
    }
}

// A block per row: one pass for the sum, one that writes the gradient. A thread reads and writes the same
// elements in both, and the logit of the target is read before the barriers in between. On sm_100, 8 bytes
// spill at the 64 registers that 1024 threads leave; measured nowhere yet.
//
// grid   N      block   up to 1024      shared   those of block_sum and block_max; the row, if keep
// moves  N*Vp in, once more from L2 unless keep; N*Vp out. Bound by memory.
// order  fixed: by V and T alone
// needs  as classifier_loss_kernel
template <class T, int WIDTH>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
    classifier_backward_kernel(float* loss, T* logits, const int* target, float scale, int V, int Vp,
                               int keep) {
    SMEM_DYNAMIC(T, copy);
    T* row = logits + (size_t)blockIdx.x * Vp;
    const int hit = target[blockIdx.x];
    V = hit == NO_TARGET ? 0 : V; // a row that does not count is nothing but padding
    const float target_logit = V ? to_float(row[hit]) : 0.0f;
    const ClassifierSum_ s = classifier_row_<WIDTH>(keep ? copy : (T*)NULL, row, V);
    const float factor = scale / s.sum;
    const T* again = keep ? copy : row;
#pragma unroll 2
    for (int v = threadIdx.x * WIDTH; v < Vp; v += blockDim.x * WIDTH) {
        Pack<T> x = {};
        if (v < V) {
            classifier_load_<WIDTH>(x.element, again + v);
        }
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const float d = __expf(to_float(x[i]) - s.max) * factor - (v + i == hit ? scale : 0.0f);
            x[i] = from_float<T>(v + i < V ? d : 0.0f);
        }
        classifier_store_<WIDTH>(row + v, x.element);
    }
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = V ? logf(s.sum) + s.max - target_logit : 0.0f;
    }
}

// About four elements or packs to a thread in short rows.
static inline int classifier_threads_(int items) {
    const int threads = 32 * ceil_div(items, 4 * 32);
    return threads < CLASSIFIER_THREADS ? threads : CLASSIFIER_THREADS;
}

template <class T> static inline int classifier_width_(const T* logits, int Vp) {
    return Vp % Pack<T>::SIZE == 0 && (uintptr_t)logits % 16 == 0 ? Pack<T>::SIZE : 1;
}

template <class T>
static inline void classifier_loss(float* loss, const T* logits, const int* target, int N, int V, int Vp,
                                   const Gpu* gpu) {
    const int width = classifier_width_(logits, Vp);
    launch(width == 1 ? classifier_loss_kernel<T, 1> : classifier_loss_kernel<T, Pack<T>::SIZE>, N,
           classifier_threads_(Vp / width), 0, gpu, loss, logits, target, V, Vp);
}

template <class T>
static inline void classifier_backward(float* loss, T* logits, const int* target, float scale, int N, int V,
                                       int Vp, const Gpu* gpu) {
    const int width = classifier_width_(logits, Vp);
    const size_t row_bytes = (size_t)Vp * sizeof(T);
    const int keep = row_bytes + CLASSIFIER_STATIC_BYTES <= gpu->shared_bytes;
    launch(width == 1 ? classifier_backward_kernel<T, 1> : classifier_backward_kernel<T, Pack<T>::SIZE>, N,
           classifier_threads_(Vp / width), keep ? row_bytes : 0, gpu, loss, logits, target, scale, V, Vp,
           keep);
}

#endif
