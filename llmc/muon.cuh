/*
muon.cuh -- muon.h on the GPU, for the layers of a tensor together.

    params, master, grads    T, as in update.cuh, T or fp32
    b                        fp32   momentum, updated
    row_squares              fp32   NULL: X stays as it is

The products of all matrices of some layers are one call (matmul_batch), in bf16, for fp32 weights in fp32; the number of
layers is chosen to fill a GPU. What is added to a product is added by cublasLt: no kernel comes between two products.

    sums       of u's squares, and the new momentum
    X          u / norm, packed: matrix after matrix
    products   15
    rows       of X: with row_squares, these and the sums of squares
    weights

The gram matrix A is that of the shorter side. X and A take turns with a second copy.

needs:   tensors start at multiples of four elements in every array
defines: MuonTensor, MuonGpu, muon_planned_bytes, muon_open, muon_close, MuonUpdate, muon_update, muon_bytes
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
    size_t at, stride;  // in the parameters, master weights and gradients: of the first layer, to the next
    size_t b, b_stride; // in the momentum
    size_t row_squares, row_squares_stride;
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
    float* sums;     // (matrices, MUON_BLOCKS_)
    float* row_sums; // (matrices, rows)
} MuonGpu;

// ---- open and close ----

// The layers that are updated together: in groups as equal as they can be.
static inline int muon_group_layers_(const MuonTensor* t) {
    const size_t layer = (size_t)t->parts * t->rows * t->cols, most = ceil_div(MUON_GROUP_ELEMENTS, layer);
    const int groups = ceil_div(t->layers, (int)(most < (size_t)t->layers ? most : (size_t)t->layers));
    return ceil_div(t->layers, groups);
}

// Elements of X and of A, matrices, and their rows.
typedef struct {
    size_t x, a, matrices, rows;
} MuonSizes_;

static inline size_t muon_max_(size_t a, size_t b) { return a > b ? a : b; }

static inline MuonSizes_ muon_sizes_(const MuonTensor* tensors, int count) {
    MuonSizes_ sizes = {0, 0, 0, 0};
    for (int i = 0; i < count; i++) {
        const MuonTensor* t = &tensors[i];
        const size_t matrices = (size_t)muon_group_layers_(t) * t->parts, rows = matrices * t->rows;
        const size_t side = (size_t)int_min(t->rows, t->cols);
        sizes.x = muon_max_(sizes.x, rows * t->cols);
        sizes.a = muon_max_(sizes.a, matrices * side * side);
        sizes.matrices = muon_max_(sizes.matrices, matrices);
        sizes.rows = muon_max_(sizes.rows, rows);
    }
    return sizes;
}

// Device memory for these tensors of T.
template <class T> static inline size_t muon_planned_bytes(const MuonTensor* tensors, int count) {
    const MuonSizes_ sizes = muon_sizes_(tensors, count);
    return 2 * (sizes.x + sizes.a) * sizeof(typename MuonReal_<T>::Type) +
           (sizes.matrices * MUON_BLOCKS_ + sizes.rows) * sizeof(float);
}

template <class T> static inline void muon_open(MuonGpu* muon, const MuonTensor* tensors, int count) {
    const MuonSizes_ sizes = muon_sizes_(tensors, count);
    const size_t bytes = sizeof(typename MuonReal_<T>::Type);
    for (int i = 0; i < 2; i++) {
        muon->x[i] = gpu_alloc(sizes.x, bytes, "muon: matrices");
        muon->a[i] = gpu_alloc(sizes.a, bytes, "muon: their squares");
    }
    muon->sums = (float*)gpu_alloc(sizes.matrices * MUON_BLOCKS_, sizeof(float), "muon: sums of squares");
    muon->row_sums = (float*)gpu_alloc(sizes.rows, sizeof(float), "muon: sums of rows");
}

static inline void muon_close(MuonGpu* muon) {
    gpu_free(muon->row_sums);
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
    Muon opt;
    float rate, keep; // of the weights
} MuonLaunch_;

// The matrix of a block: where it starts, and the elements of it that the block has.
typedef struct {
    size_t at, b, row_squares, begin, end;
    uint64_t word;
} MuonMatrix_;

__device__ inline MuonMatrix_ muon_matrix_(const MuonLaunch_& s) {
    const MuonTensor& t = s.tensor;
    const size_t n = (size_t)t.rows * t.cols, unit = 4 * MUON_THREADS_;
    const size_t layer = (size_t)s.first_layer + blockIdx.y / t.parts, part = blockIdx.y % t.parts;
    const size_t share = ceil_div(n, (size_t)MUON_BLOCKS_ * unit) * unit, begin = blockIdx.x * share;
    MuonMatrix_ matrix;
    matrix.at = t.at + layer * t.stride + part * n;
    matrix.b = t.b + layer * t.b_stride + part * n;
    matrix.row_squares = t.row_squares + layer * t.row_squares_stride + part * t.rows;
    matrix.begin = begin;
    matrix.end = begin + share < n ? begin + share : n;
    matrix.word = ((uint64_t)(t.group + layer) << 40) + t.start + part * n;
    return matrix;
}

// b, or with the new b Nesterov's: momentum b + (1 - momentum) g.
template <int W>
__device__ inline Elements<float, W> muon_mix_(const Elements<float, W>& b, const Elements<float, W>& g,
                                               const Muon& opt) {
    Elements<float, W> mixed;
#pragma unroll
    for (int e = 0; e < W; e++) {
        mixed[e] = fmaf(opt.momentum, b[e], (1.0f - opt.momentum) * (g[e] * opt.grad_scale));
    }
    return mixed;
}

// A block updates the momentum of a 64th of a matrix, and sums the squares of u.
// grid   64, matrices      block   256      shared   128 bytes
// moves  the gradient in, the momentum in and out. Bound by memory.
// order  fixed
template <class G, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_momentum_kernel_(float* sums, float* momentum, const G* grads,
                          const __grid_constant__ MuonLaunch_ s) {
    const MuonMatrix_ matrix = muon_matrix_(s);
    float sum = 0;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        const Elements<float, W> g = elements_convert<float>(elements_load<W>(grads + matrix.at + i));
        const Elements<float, W> b = muon_mix_(elements_load<W>(momentum + matrix.b + i), g, s.opt);
        const Elements<float, W> u = muon_mix_(b, g, s.opt);
        elements_store(momentum + matrix.b + i, b);
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
    const float factor = 1.0f / (norm + (float)MUON_EPS);
    X* to = x + (size_t)blockIdx.y * s.tensor.rows * s.tensor.cols;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        const Elements<float, W> g = elements_convert<float>(elements_load<W>(grads + matrix.at + i));
        Elements<float, W> u = muon_mix_(elements_load<W>(momentum + matrix.b + i), g, s.opt);
#pragma unroll
        for (int e = 0; e < W; e++) {
            u[e] *= factor;
        }
        elements_store(to + i, elements_convert<X>(u));
    }
}

// A warp updates the running mean of a row's squares.
// grid   ceil(rows / 8), matrices      block   256      shared   none
// moves  X in. Bound by memory.
// order  fixed
template <class X>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_rows_kernel_(float* row_squares, float* row_sums, const X* x,
                      const __grid_constant__ MuonLaunch_ s) {
    const MuonTensor& t = s.tensor;
    const int row = (int)(blockIdx.x * (MUON_THREADS_ / 32) + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    const size_t of_all = (size_t)blockIdx.y * t.rows + row;
    float sum = 0;
    if (row >= t.rows) {
        return; // the whole warp
    }
    for (int col = lane; col < t.cols; col += 32) {
        const float element = to_float(x[of_all * t.cols + col]);
        sum = fmaf(element, element, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        float* mean = row_squares + muon_matrix_(s).row_squares + row;
        *mean = fmaf(s.opt.rows_beta2, *mean, (1.0f - s.opt.rows_beta2) * (sum / (float)t.cols));
        row_sums[of_all] = sum;
    }
}

// 1 / the root of a row's mean, not yet times the factor that keeps the norm.
__device__ inline float muon_row_factor_(float mean) { return 1.0f / sqrtf(fmaxf(mean, MUON_ROW_SQUARES)); }

// The factor that keeps the norm of X, from all rows of a matrix; for every thread of a block.
__device__ inline float muon_norm_factor_(const float* means, const float* sums, int rows) {
    float before = 0, after = 0;
    for (int row = (int)threadIdx.x; row < rows; row += MUON_THREADS_) {
        const float factor = muon_row_factor_(means[row]);
        before += sums[row];
        after += sums[row] * factor * factor;
    }
    before = block_sum(before);
    after = block_sum(after);
    return after > 0 ? sqrtf(before / after) : 0.0f;
}

// A block updates the weights of a 64th of a matrix; with row_squares it divides rows of X first.
// grid   64, matrices      block   256      shared   128 bytes
// moves  X in, the weights in and out. Bound by memory.
// order  fixed
template <class T, class X, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_kernel_(T* params, void* master, MasterWeights kind, const X* x, const float* row_squares,
                 const float* row_sums, uint64_t seed, uint64_t stream,
                 const __grid_constant__ MuonLaunch_ s) {
    const MuonMatrix_ matrix = muon_matrix_(s);
    const Weights<T> all = {params, master, kind}, weights = weights_from(all, matrix.at);
    const RoundingWords words = {seed, stream, matrix.word};
    const size_t rows = (size_t)s.tensor.rows, cols = (size_t)s.tensor.cols;
    const X* from = x + blockIdx.y * rows * cols;
    const float* means = row_squares ? row_squares + matrix.row_squares : NULL;
    const float norm = means ? muon_norm_factor_(means, row_sums + blockIdx.y * rows, (int)rows) : 1.0f;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        const Elements<float, W> u = elements_convert<float>(elements_load<W>(from + i));
        const float factor = means ? norm * muon_row_factor_(means[(uint32_t)i / (uint32_t)cols]) : 1.0f;
        Elements<float, W> p = weights_load<W>(weights, i);
#pragma unroll
        for (int e = 0; e < W; e++) {
            p[e] = fmaf(decay_keep(s.keep, s.opt.decay, u[e], p[e]), p[e], -(s.rate * (u[e] * factor)));
        }
        weights_store(weights, i, p, words);
    }
}

// ---- products ----

// One of the steps that make all singular values of the X about 1; out is another array.
template <class X>
static inline void muon_step_(X* out, X* const a[2], const X* x, const MuonTensor* t, int matrices,
                              MatmulGpu* matmul) {
    const int tall = t->rows > t->cols, side = int_min(t->rows, t->cols), length = tall ? t->rows : t->cols;
    const MatmulBatch gram = {side, side, length, tall, !tall, matrices, 1.0f, 0.0f},
                      square = {side, side, side, 0, 0, matrices, MUON_AA, MUON_A},
                      step = {t->rows, t->cols, side, 0, 0, matrices, 1.0f, MUON_X};
    matmul_batch(a[0], (const X*)NULL, x, x, gram, matmul);
    matmul_batch(a[1], (const X*)a[0], (const X*)a[0], (const X*)a[0], square, matmul);
    matmul_batch(out, x, tall ? x : (const X*)a[1], tall ? (const X*)a[1] : x, step, matmul);
}

// Returns where the result is: x[0] or x[1].
template <class X>
static inline const X* muon_orthogonalize_(MuonGpu* muon, const MuonTensor* t, int matrices,
                                           MatmulGpu* matmul) {
    X *const x[2] = {(X*)muon->x[0], (X*)muon->x[1]}, *const a[2] = {(X*)muon->a[0], (X*)muon->a[1]};
    for (int i = 0; i < MUON_ITERATIONS; i++) {
        muon_step_(x[(i + 1) % 2], a, (const X*)x[i % 2], t, matrices, matmul);
    }
    return x[MUON_ITERATIONS % 2];
}

// ---- the update ----

// All that the update takes; as above.
template <class T> struct MuonUpdate {
    Weights<T> weights;
    Gradient grads;
    float *b, *row_squares;
    MuonGpu* muon;
    Muon opt;
    int64_t t; // number of this update, from 1
    uint64_t seed;
    MatmulGpu* matmul;
};

template <class T, class G, int W>
static inline void muon_update_group_(const MuonUpdate<T>& u, const MuonLaunch_& s, int layers,
                                      const Gpu* gpu) {
    typedef typename MuonReal_<T>::Type X;
    const int matrices = layers * s.tensor.parts;
    const dim3 grid(MUON_BLOCKS_, (unsigned)matrices);
    const G* grads = (const G*)u.grads.data;
    launch(muon_momentum_kernel_<G, W>, grid, MUON_THREADS_, 0, gpu, u.muon->sums, u.b, grads, s);
    launch(muon_start_kernel_<X, G, W>, grid, MUON_THREADS_, 0, gpu, (X*)u.muon->x[0], u.muon->sums, u.b,
           grads, s);
    const X* x = muon_orthogonalize_<X>(u.muon, &s.tensor, matrices, u.matmul);
    if (u.row_squares) {
        launch(muon_rows_kernel_<X>, dim3((unsigned)ceil_div(s.tensor.rows, MUON_THREADS_ / 32), grid.y),
               MUON_THREADS_, 0, gpu, u.row_squares, u.muon->row_sums, x, s);
    }
    launch(muon_kernel_<T, X, W>, grid, MUON_THREADS_, 0, gpu, u.weights.params, u.weights.master,
           u.weights.kind, x, u.row_squares, u.muon->row_sums, u.seed,
           rounding_words(u.seed, u.t, 0, 0).stream, s);
}

template <class T, class G>
static inline void muon_update_(const MuonTensor* t, const MuonUpdate<T>& u, const Gpu* gpu) {
    const int most = muon_group_layers_(t);
    const float rate = u.opt.lr * muon_factor(u.opt, (size_t)t->rows, (size_t)t->cols);
    MuonLaunch_ s = {*t, 0, u.opt, rate, t->decay ? 1.0f - u.opt.lr * u.opt.weight_decay : 1.0f};
    for (; s.first_layer < t->layers; s.first_layer += most) {
        const int layers = int_min(most, t->layers - s.first_layer);
        if (t->cols % 4 == 0) {
            muon_update_group_<T, G, 4>(u, s, layers, gpu);
        } else {
            muon_update_group_<T, G, 1>(u, s, layers, gpu);
        }
    }
}

// Updates all layers of a tensor, on the stream of `gpu`, which is matmul's.
template <class T>
static inline void muon_update(const MuonTensor* t, const MuonUpdate<T>& u, const Gpu* gpu) {
    assert(t->parts > 0 && t->layers > 0 && (size_t)t->parts * t->rows * t->cols > 0);
    assert((t->at | t->stride | t->b | t->b_stride | t->start) % 4 == 0);
    assert((size_t)t->rows * t->cols <= UINT32_MAX);
    GRADIENT_DISPATCH(u.grads, T, muon_update_<T, G>(t, u, gpu));
}

// Of n elements: kernels only, products apart.
template <class T> static inline double muon_bytes(double n, DType grads, MasterWeights master) {
    const size_t x = sizeof(typename MuonReal_<T>::Type);
    return n * (double)(2 * dtype_bytes(grads) + 3 * sizeof(float) + 2 * x) +
           weights_bytes(n, DTYPE_OF(T), master);
}

#endif
