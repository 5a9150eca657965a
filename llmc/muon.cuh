/*
muon.cuh -- muon.h on the GPU, for the layers of a tensor together.

    params, master, grads    T, as in update.cuh, T or fp32
    m                        fp32   momentum, updated

The products of all matrices of some layers are one call (matmul_batch), in bf16, for fp32 weights in fp32; the number of
layers is chosen to fill a GPU. What is added to a product is added by cublasLt: no kernel comes between two products.

    sums       of u's squares, and the new momentum
    X          u / norm, packed: matrix after matrix
    products   15
    weights

The gram matrix A is that of the shorter side. X and A take turns with a second copy.

needs:   tensors start at multiples of four elements in every array
defines: MuonTensor, MuonGpu, muon_planned_bytes, muon_open, muon_close, MuonUpdate, muon_update, muon_bytes, muon_flops
*/
#ifndef LLMC_MUON_CUH
#define LLMC_MUON_CUH

#include <assert.h>

#include "llmc/gpu.cuh"
#include "llmc/matmul.cuh"
#include "llmc/muon.h"
#include "llmc/update.cuh"

// Elements of X that are worth a group of layers: 4 of the MLP of GPT-2 124M.
#define MUON_GROUP_ELEMENTS ((size_t)8 << 20)
// Threads of a block; blocks that share a matrix, so many for any size that there are enough for a GPU and their sums
// are quickly added.
enum { MUON_THREADS_ = 256, MUON_BLOCKS_ = 64 };

// The layers of a tensor, by their places in elements.
typedef struct {
    size_t at, stride;     // in the parameters, master weights and gradients: of the first layer, to the next
    size_t m, m_stride;    // in the momentum
    int layers;            //
    int parts, rows, cols; // a layer has `parts` matrices of rows x cols, below each other
    int group;             // of the first layer, and
    size_t start;          // where the tensor starts in it: RoundingWords
    int decay;             // whether weights decay
} MuonTensor;

// X is fp32 for fp32 weights, bf16 for 16-bit weights.
template <class T> struct MuonReal_ { typedef bf16 Type; };
template <> struct MuonReal_<float> { typedef float Type; };

// Scratch memory for the largest of some tensors.
typedef struct {
    void *x[2], *a[2];
    float* sums; // (matrices, MUON_BLOCKS_)
} MuonGpu;

// ---- open and close ----

// The layers that are updated together: in groups as equal as they can be.
static inline int muon_group_layers_(const MuonTensor* t) {
    const size_t layer = (size_t)t->parts * t->rows * t->cols, most = ceil_div(MUON_GROUP_ELEMENTS, layer);
    const int groups = ceil_div(t->layers, (int)(most < (size_t)t->layers ? most : (size_t)t->layers));
    return ceil_div(t->layers, groups);
}

// Elements of X and of A, and matrices.
typedef struct {
    size_t x, a, matrices;
} MuonSizes_;

static inline MuonSizes_ muon_sizes_(const MuonTensor* tensors, int count) {
    MuonSizes_ sizes = {0, 0, 0};
    for (int i = 0; i < count; i++) {
        const MuonTensor* t = &tensors[i];
        const size_t matrices = (size_t)muon_group_layers_(t) * t->parts, side = (size_t)int_min(t->rows, t->cols);
        const size_t x = matrices * t->rows * t->cols, a = matrices * side * side;
        sizes.x = x > sizes.x ? x : sizes.x;
        sizes.a = a > sizes.a ? a : sizes.a;
        sizes.matrices = matrices > sizes.matrices ? matrices : sizes.matrices;
    }
    return sizes;
}

// Device memory for these tensors of T.
template <class T> static inline size_t muon_planned_bytes(const MuonTensor* tensors, int count) {
    const MuonSizes_ sizes = muon_sizes_(tensors, count);
    return 2 * (sizes.x + sizes.a) * sizeof(typename MuonReal_<T>::Type) +
           sizes.matrices * MUON_BLOCKS_ * sizeof(float);
}

template <class T> static inline void muon_open(MuonGpu* muon, const MuonTensor* tensors, int count) {
    const MuonSizes_ sizes = muon_sizes_(tensors, count);
    const size_t bytes = sizeof(typename MuonReal_<T>::Type);
    for (int i = 0; i < 2; i++) {
        muon->x[i] = gpu_alloc(sizes.x, bytes, "muon: matrices");
        muon->a[i] = gpu_alloc(sizes.a, bytes, "muon: their squares");
    }
    muon->sums = (float*)gpu_alloc(sizes.matrices * MUON_BLOCKS_, sizeof(float), "muon: sums of squares");
}

static inline void muon_close(MuonGpu* muon) {
    gpu_free(muon->sums);
    for (int i = 0; i < 2; i++) {
        gpu_free(muon->a[i]);
        gpu_free(muon->x[i]);
    }
}

// ---- kernels ----

// What all kernels of a group get.
typedef struct {
    MuonTensor tensor;
    int first_layer;
    float momentum, grad_scale;
    float rate, keep; // of the weights
    int cautious;     // weights decay only where the update makes them smaller
} MuonLaunch_;

// The matrix of a block: where it starts, and the elements of it that the block has.
typedef struct {
    size_t at, m, begin, end;
    uint64_t word;
} MuonMatrix_;

__device__ inline MuonMatrix_ muon_matrix_(const MuonLaunch_& s) {
    const MuonTensor& t = s.tensor;
    const size_t n = (size_t)t.rows * t.cols, layer = (size_t)s.first_layer + blockIdx.y / t.parts;
    const size_t in_layer = blockIdx.y % t.parts * n, unit = 4 * MUON_THREADS_;
    const size_t share = ceil_div(n, (size_t)MUON_BLOCKS_ * unit) * unit, begin = blockIdx.x * share;
    const MuonMatrix_ matrix = {t.at + layer * t.stride + in_layer, t.m + layer * t.m_stride + in_layer, begin,
                                begin + share < n ? begin + share : n,
                                ((uint64_t)(t.group + layer) << 40) + t.start + in_layer};
    return matrix;
}

// W elements of Nesterov's momentum: u = (1 - momentum) g + momentum m, with the new m.
template <int W>
__device__ inline Elements<float, W> muon_nesterov_(const Elements<float, W>& g, const Elements<float, W>& m,
                                                    const MuonLaunch_& s) {
    Elements<float, W> u;
#pragma unroll
    for (int e = 0; e < W; e++) {
        u[e] = fmaf(s.momentum, m[e], (1.0f - s.momentum) * (g[e] * s.grad_scale));
    }
    return u;
}

// A block updates the momentum of a 64th of a matrix, and sums the squares of u.
// grid   64, matrices      block   256      shared   128 bytes
// moves  the gradient in, the momentum in and out. Bound by memory.
// order  fixed
template <class G, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_momentum_kernel_(float* sums, float* momentum, const G* grads, const __grid_constant__ MuonLaunch_ s) {
    const MuonMatrix_ matrix = muon_matrix_(s);
    float* m_of = momentum + matrix.m;
    float sum = 0;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        const Elements<float, W> g = elements_convert<float>(elements_load<W>(grads + matrix.at + i));
        Elements<float, W> m = elements_load<W>(m_of + i);
#pragma unroll
        for (int e = 0; e < W; e++) {
            m[e] = fmaf(s.momentum, m[e], (1.0f - s.momentum) * (g[e] * s.grad_scale));
        }
        elements_store(m_of + i, m);
        const Elements<float, W> u = muon_nesterov_(g, m, s);
#pragma unroll
        for (int e = 0; e < W; e++) {
            sum = fmaf(u[e], u[e], sum);
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        sums[(size_t)blockIdx.y * MUON_BLOCKS_ + blockIdx.x] = sum;
    }
}

// A block sets a 64th of a matrix X.
// grid   64, matrices      block   256      shared   128 bytes
// moves  the gradient and the momentum in, X out. Bound by memory.
// order  fixed
template <class X, class G, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_start_kernel_(X* x, const float* sums, const float* momentum, const G* grads,
                       const __grid_constant__ MuonLaunch_ s) {
    const MuonMatrix_ matrix = muon_matrix_(s);
    const float* of_blocks = sums + (size_t)blockIdx.y * MUON_BLOCKS_;
    const float norm = sqrtf(block_sum(threadIdx.x < MUON_BLOCKS_ ? of_blocks[threadIdx.x] : 0.0f));
    const float factor = 1.0f / (norm + MUON_EPS);
    X* to = x + (size_t)blockIdx.y * s.tensor.rows * s.tensor.cols;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        const Elements<float, W> g = elements_convert<float>(elements_load<W>(grads + matrix.at + i));
        Elements<float, W> u = muon_nesterov_(g, elements_load<W>(momentum + matrix.m + i), s);
#pragma unroll
        for (int e = 0; e < W; e++) {
            u[e] *= factor;
        }
        elements_store(to + i, elements_convert<X>(u));
    }
}

// A block updates the weights of a 64th of a matrix.
// grid   64, matrices      block   256      shared   none
// moves  X in, the weights in and out. Bound by memory.
// order  every element on its own
template <class T, class X, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_kernel_(T* params, void* master, MasterWeights kind, const X* x, uint64_t seed, uint64_t stream,
                 const __grid_constant__ MuonLaunch_ s) {
    const MuonMatrix_ matrix = muon_matrix_(s);
    const Weights<T> all = {params, master, kind}, weights = weights_from(all, matrix.at);
    const RoundingWords words = {seed, stream, matrix.word};
    const X* from = x + (size_t)blockIdx.y * s.tensor.rows * s.tensor.cols;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        const Elements<float, W> u = elements_convert<float>(elements_load<W>(from + i));
        Elements<float, W> p = weights_load<W>(weights, i);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float keep = s.cautious && !(u[e] * p[e] > 0) ? 1.0f : s.keep;
            p[e] = fmaf(keep, p[e], -(s.rate * u[e]));
        }
        weights_store(weights, i, p, words);
    }
}

// ---- products ----

// One of the steps that make all singular values of the X about 1; out is another array.
template <class X>
static inline void muon_step_(X* out, X* const a[2], const X* x, const MuonTensor* t, int matrices, MatmulGpu* matmul) {
    const int tall = t->rows > t->cols, side = int_min(t->rows, t->cols), length = tall ? t->rows : t->cols;
    const MatmulBatch gram = {side, side, length, tall, !tall, matrices, 1.0f, 0.0f},
                      square = {side, side, side, 0, 0, matrices, MUON_C, MUON_B},
                      step = {t->rows, t->cols, side, 0, 0, matrices, 1.0f, MUON_A};
    matmul_batch(a[0], (const X*)NULL, x, x, gram, matmul);
    matmul_batch(a[1], (const X*)a[0], (const X*)a[0], (const X*)a[0], square, matmul);
    matmul_batch(out, x, tall ? x : (const X*)a[1], tall ? (const X*)a[1] : x, step, matmul);
}

// Returns where the result is: x[0] or x[1].
template <class X>
static inline const X* muon_orthogonalize_(MuonGpu* muon, const MuonTensor* t, int matrices, MatmulGpu* matmul) {
    X *const x[2] = {(X*)muon->x[0], (X*)muon->x[1]}, *const a[2] = {(X*)muon->a[0], (X*)muon->a[1]};
    for (int i = 0; i < MUON_STEPS; i++) {
        muon_step_(x[(i + 1) % 2], a, (const X*)x[i % 2], t, matrices, matmul);
    }
    return x[MUON_STEPS % 2];
}

// ---- the update ----

// All that the update takes; as above.
template <class T> struct MuonUpdate {
    Weights<T> weights;
    Gradient grads;
    float* m;
    MuonGpu* muon;
    Muon opt;
    uint64_t seed;
    MatmulGpu* matmul; // of 16-bit weights for bf16
};

template <class T, class G, int W>
static inline void muon_update_group_(const MuonUpdate<T>& u, const MuonLaunch_& s, int layers, const Gpu* gpu) {
    typedef typename MuonReal_<T>::Type X;
    const int matrices = layers * s.tensor.parts;
    const dim3 grid(MUON_BLOCKS_, (unsigned)matrices);
    const G* grads = (const G*)u.grads.data;
    launch(muon_momentum_kernel_<G, W>, grid, MUON_THREADS_, 0, gpu, u.muon->sums, u.m, grads, s);
    launch(muon_start_kernel_<X, G, W>, grid, MUON_THREADS_, 0, gpu, (X*)u.muon->x[0], u.muon->sums, u.m, grads, s);
    const X* x = muon_orthogonalize_<X>(u.muon, &s.tensor, matrices, u.matmul);
    launch(muon_kernel_<T, X, W>, grid, MUON_THREADS_, 0, gpu, u.weights.params, u.weights.master, u.weights.kind, x,
           u.seed, rounding_words(u.seed, u.opt.t, 0, 0).stream, s);
}

template <class T, class G>
static inline void muon_update_(const MuonTensor* t, const MuonUpdate<T>& u, const Gpu* gpu) {
    const int most = muon_group_layers_(t);
    MuonLaunch_ s = {*t,
                     0,
                     muon_momentum(u.opt),
                     u.opt.grad_scale,
                     u.opt.lr * muon_scale(u.opt, (size_t)t->rows, (size_t)t->cols),
                     t->decay ? 1.0f - u.opt.lr * u.opt.weight_decay : 1.0f,
                     u.opt.cautious};
    for (; s.first_layer < t->layers; s.first_layer += most) {
        const int layers = int_min(most, t->layers - s.first_layer);
        if ((size_t)t->rows * t->cols % 4 == 0) {
            muon_update_group_<T, G, 4>(u, s, layers, gpu);
        } else {
            muon_update_group_<T, G, 1>(u, s, layers, gpu);
        }
    }
}

// Updates all layers of a tensor, on the stream of `gpu`, which is matmul's.
template <class T> static inline void muon_update(const MuonTensor* t, const MuonUpdate<T>& u, const Gpu* gpu) {
    assert(t->parts > 0 && t->layers > 0 && (size_t)t->parts * t->rows * t->cols > 0);
    assert((t->at | t->stride | t->m | t->m_stride | t->start) % 4 == 0);
    GRADIENT_DISPATCH(u.grads, T, muon_update_<T, G>(t, u, gpu));
}

// Of n elements: kernels only, products apart.
template <class T> static inline double muon_bytes(double n, DType grads, MasterWeights master) {
    const size_t x = sizeof(typename MuonReal_<T>::Type);
    return n * (double)(2 * dtype_bytes(grads) + 3 * sizeof(float) + 2 * x) + weights_bytes(n, DTYPE_OF(T), master);
}

// Of the products of one matrix.
static inline double muon_flops(double rows, double cols) {
    const double side = rows < cols ? rows : cols;
    return MUON_STEPS * 2 * (2 * rows * cols * side + side * side * side);
}

#endif
