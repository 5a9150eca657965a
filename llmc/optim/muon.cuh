/*
muon.cuh -- muon.h on the GPU, for the layers of a tensor together.

    params, master, grads    T, as in master_weights.cuh, T or fp32
    b                        momentum, fp32 or in 8 bits, updated
    row_squares              fp32   NULL: X stays as it is

One call (matmul_batch) multiplies the matrices of several layers, as many as fill a GPU: in bf16,
or in fp32 if the weights are fp32. cublasLt adds the other terms, so no kernel runs between two
matmuls.

    sums       squares of u, and the new momentum
    X          u / (margin norm), packed: matrix after matrix
    matmuls    15
    rows       with row_squares: their means and the norm of X
    weights

The Gram matrix A has the size of the shorter side. X and A alternate with a second copy.

If parts of a matrix belong to several ranks (owners.h), each computes its elements of u, and of the
new momentum, by muon_operand; muon_turn makes X of a whole matrix, and muon_move changes the
weights of a part. The bits are the same.

Kernels read four elements at a time if all places of a tensor are multiples of four.
*/
#ifndef LLMC_MUON_CUH
#define LLMC_MUON_CUH

#include <assert.h>

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/matmul.cuh"
#include "llmc/optim/adamw8bit.cuh"
#include "llmc/optim/muon.h"
#include "llmc/optim/master_weights.cuh"

// Elements of X that make a group of layers large enough: 4 layers of the MLP of GPT-2 124M.
#define MUON_GROUP_ELEMENTS ((size_t)8 << 20)
// Threads of a block, and most blocks that share a matrix: enough for a GPU, and few enough to add
// their sums quickly.
enum { MUON_THREADS_ = 256, MUON_BLOCKS_ = 64 };

// Place of the first layer in an array, and distance to the next one, in elements.
typedef struct {
    size_t first, step;
} MuonPlace;

// The layers of a tensor.
typedef struct {
    MuonPlace params, master, grads, b, row_squares;
    int layers;
    int parts, rows, cols; // a layer has `parts` matrices of rows x cols, one below the other
    int group;             // group of the first layer
    MuonPlace words;       // RoundingWords
    uint64_t stream;
    int decay;    // true if weights decay
    int by_layer; // each layer is updated alone
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

// Returns how many layers are updated together, in groups as equal as possible.
static inline int muon_group_layers_(const MuonTensor* t) {
    if (t->by_layer) {
        return 1;
    }
    const size_t layer = (size_t)t->parts * t->rows * t->cols, most = ceil_div(MUON_GROUP_ELEMENTS, layer);
    const int groups = ceil_div(t->layers, (int)(most < (size_t)t->layers ? most : (size_t)t->layers));
    return ceil_div(t->layers, groups);
}

// Sizes of a group: elements of X and of A, matrices, and their rows.
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

// Takes memory for these tensors of T.
template <class T>
static inline void muon_open(MuonGpu* muon, Memory* memory, const MuonTensor* tensors, int count) {
    const MuonSizes_ sizes = muon_sizes_(tensors, count);
    const size_t bytes = sizeof(typename MuonReal_<T>::Type);
    const char* kind = "scratch: muon";
    for (int i = 0; i < 2; i++) {
        muon->x[i] = memory_take(memory, kind, MEMORY_DEVICE, sizes.x * bytes);
        muon->a[i] = memory_take(memory, kind, MEMORY_DEVICE, sizes.a * bytes);
    }
    muon->sums =
        (float*)memory_take(memory, kind, MEMORY_DEVICE, sizes.matrices * MUON_BLOCKS_ * sizeof(float));
    muon->row_sums = (float*)memory_take(memory, kind, MEMORY_DEVICE, sizes.rows * sizeof(float));
}

// ---- kernels ----

// Arguments of all kernels of a group.
typedef struct {
    MuonTensor tensor;
    int first_layer;
    Muon opt;
    float rate, keep;   // learning rate and decay factor of the weights
    float* row_squares; // or NULL
} MuonLaunch_;

// The matrix of a block: its layer, its begin in the layer, and the elements that the block has.
typedef struct {
    size_t layer, start, begin, end;
} MuonMatrix_;

// Returns the number of elements of a matrix for each block; the last block may have fewer.
__host__ __device__ inline size_t muon_share_(const MuonTensor& t) {
    const size_t unit = 4 * MUON_THREADS_;
    return ceil_div((size_t)t.rows * t.cols, MUON_BLOCKS_ * unit) * unit;
}

__device__ inline MuonMatrix_ muon_matrix_(const MuonLaunch_& s) {
    const MuonTensor& t = s.tensor;
    const size_t n = (size_t)t.rows * t.cols, share = muon_share_(t), begin = blockIdx.x * share;
    const MuonMatrix_ matrix = {(size_t)s.first_layer + blockIdx.y / t.parts, blockIdx.y % t.parts * n, begin,
                                begin + share < n ? begin + share : n};
    return matrix;
}

// Returns the place of a layer in an array.
__host__ __device__ inline size_t muon_at_(MuonPlace place, size_t layer) {
    return place.first + layer * place.step;
}

// Returns the running means of a matrix's rows.
__device__ inline float* muon_row_squares_(const MuonMatrix_& matrix, const MuonLaunch_& s) {
    return s.row_squares + muon_at_(s.tensor.row_squares, matrix.layer) + matrix.start / s.tensor.cols;
}

// Returns momentum b + (1 - momentum) g: the new b; from the new b, Nesterov's u.
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

// Source of u: an array; or, if that is NULL, the momentum and the gradient, both complete.
template <class G> struct MuonSource_ {
    Moment momentum;
    const G* grads;
    const float* u;
    const Code8Pair* codes; // of a momentum in 8 bits; read through the cache
};

// Returns elements i ... of the momentum. In 8 bits a thread has four: W is 4.
template <int W>
__device__ inline Elements<float, W> muon_load_(const Moment& momentum, size_t i, const Code8Pair* codes) {
    if constexpr (W == 4) {
        if (momentum.m8) {
            return moment_load(momentum, i, codes);
        }
    }
    return elements_load<W>(momentum.m + i);
}

// Keeps elements i ... of the momentum, and sets b to the values as they are kept.
template <int W>
__device__ inline void muon_store_(const Moment& momentum, size_t i, Elements<float, W>* b,
                                   const Code8Pair* codes) {
    if constexpr (W == 4) {
        if (momentum.m8) {
            moment_store(momentum, i, b, codes);
            return;
        }
    }
    elements_store(momentum.m + i, *b);
}

typedef enum { MUON_READ_, MUON_UPDATE_ } MuonMomentum_;

// Returns elements i ... of a matrix of u. With MUON_UPDATE_ it also updates their momentum, unless
// u is an array: then the momentum is already updated.
template <MuonMomentum_ MOMENTUM, int W, class G>
__device__ inline Elements<float, W> muon_u_(const MuonSource_<G>& from, const MuonMatrix_& matrix, size_t i,
                                             const MuonLaunch_& s) {
    if (from.u) {
        return elements_load<W>(from.u + matrix.start + i);
    }
    const G* grads = from.grads + muon_at_(s.tensor.grads, matrix.layer) + matrix.start;
    const size_t at = muon_at_(s.tensor.b, matrix.layer) + matrix.start + i;
    const Elements<float, W> g = elements_convert<float>(elements_load<W>(grads + i));
    Elements<float, W> b = muon_load_<W>(from.momentum, at, from.codes);
    if (MOMENTUM == MUON_UPDATE_) {
        b = muon_mix_(b, g, s.opt);
        muon_store_(from.momentum, at, &b, from.codes);
    }
    return muon_mix_(b, g, s.opt);
}

// A thread updates the momentum of W elements of a layer and sets u.
// grid   ceil(elements / 256 W)      block   256      shared   none
// moves  the gradient in, the momentum in and out, u out. Bound by memory.
// order  every element on its own
template <class G, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_operand_kernel_(float* u, const __grid_constant__ MuonSource_<G> from,
                         const __grid_constant__ MuonLaunch_ s) {
    const MuonTensor& t = s.tensor;
    const size_t i = W * ((size_t)blockIdx.x * MUON_THREADS_ + threadIdx.x), layer = (size_t)s.first_layer;
    if (i >= (size_t)t.parts * t.rows * t.cols) {
        return;
    }
    const Elements<float, W> g =
        elements_convert<float>(elements_load<W>(from.grads + muon_at_(t.grads, layer) + i));
    const size_t at = muon_at_(t.b, layer) + i;
    Elements<float, W> b = muon_mix_(muon_load_<W>(from.momentum, at, from.codes), g, s.opt);
    muon_store_(from.momentum, at, &b, from.codes);
    elements_store(u + i, muon_mix_(b, g, s.opt));
}

// A block updates the momentum of its share of a matrix, and sums the squares of u.
// grid   up to 64, matrices      block   256      shared   128 bytes
// moves  the gradient in, the momentum in and out; or u in. Bound by memory.
// order  fixed
template <class G, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_sums_kernel_(float* sums, const __grid_constant__ MuonSource_<G> from,
                      const __grid_constant__ MuonLaunch_ s) {
    const MuonMatrix_ matrix = muon_matrix_(s);
    float sum = 0;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        const Elements<float, W> u = muon_u_<MUON_UPDATE_, W>(from, matrix, i, s);
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

// A block sets its share of a matrix X.
// grid   up to 64, matrices      block   256      shared   128 bytes
// moves  the gradient and the momentum in, or u; X out. Bound by memory.
// order  fixed
template <class X, class G, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_start_kernel_(X* x, const float* sums, float margin, const __grid_constant__ MuonSource_<G> from,
                       const __grid_constant__ MuonLaunch_ s) {
    const MuonMatrix_ matrix = muon_matrix_(s);
    const float* of_blocks = sums + (size_t)blockIdx.y * MUON_BLOCKS_;
    const float norm = sqrtf(block_sum(threadIdx.x < gridDim.x ? of_blocks[threadIdx.x] : 0.0f));
    const float factor = 1.0f / fmaf(margin, norm, (float)MUON_EPS);
    X* to = x + (size_t)blockIdx.y * s.tensor.rows * s.tensor.cols;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        Elements<float, W> u = muon_u_<MUON_READ_, W>(from, matrix, i, s);
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
    muon_rows_kernel_(float* row_sums, const X* x, const __grid_constant__ MuonLaunch_ s) {
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
        float* mean = muon_row_squares_(muon_matrix_(s), s) + row;
        *mean = fmaf(s.opt.rows_beta2, *mean, (1.0f - s.opt.rows_beta2) * (sum / (float)t.cols));
        row_sums[of_all] = sum;
    }
}

// Returns 1 / the root of a row's mean, without the factor that keeps the norm.
__device__ inline float muon_row_factor_(float mean) { return 1.0f / sqrtf(fmaxf(mean, MUON_ROW_SQUARES)); }

// Returns the factor that keeps the norm of X, from all rows of a matrix, to every thread of a
// block.
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

// A block updates the weights of its share of a matrix; with row_squares it divides rows of X
// first.
// grid   up to 64, matrices      block   256      shared   128 bytes
// moves  X in, the weights in and out. Bound by memory.
// order  fixed
template <class T, class X, int W>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_kernel_(const __grid_constant__ Weights<T> all, const X* x, const float* row_sums, uint64_t seed,
                 int64_t update, const __grid_constant__ MuonLaunch_ s) {
    const MuonTensor& t = s.tensor;
    const MuonMatrix_ matrix = muon_matrix_(s);
    const Weights<T> weights =
        weights_from(all, muon_at_(t.params, matrix.layer), muon_at_(t.master, matrix.layer));
    const RoundingWords words = rounding_words(seed, t.stream, update, muon_at_(t.words, matrix.layer));
    const size_t rows = (size_t)t.rows, cols = (size_t)t.cols;
    const X* from = x + blockIdx.y * rows * cols;
    const float* means = s.row_squares ? muon_row_squares_(matrix, s) : NULL;
    const float norm = means ? muon_norm_factor_(means, row_sums + blockIdx.y * rows, (int)rows) : 1.0f;
    for (size_t i = matrix.begin + W * threadIdx.x; i < matrix.end; i += W * MUON_THREADS_) {
        const size_t own = matrix.start + i;
        const Elements<float, W> u = elements_convert<float>(elements_load<W>(from + i));
        const float factor = means ? norm * muon_row_factor_(means[(uint32_t)i / (uint32_t)cols]) : 1.0f;
        Elements<float, W> p = weights_load<W>(weights, own);
#pragma unroll
        for (int e = 0; e < W; e++) {
            p[e] = fmaf(decay_keep(s.keep, s.opt.decay, u[e], p[e]), p[e], -(s.rate * (u[e] * factor)));
        }
        weights_store(weights, own, p, words);
    }
}

// A block sets its share of a matrix to X in fp32, with row_squares divided by rows.
// grid   up to 64, 1      block   256      shared   128 bytes
// moves  X in, 4 bytes an element out. Bound by memory.
// order  fixed
template <class X>
__global__ void __launch_bounds__(MUON_THREADS_)
    muon_turn_kernel_(float* turned, const X* x, const float* row_sums,
                      const __grid_constant__ MuonLaunch_ s) {
    const MuonMatrix_ matrix = muon_matrix_(s);
    const float* means = s.row_squares;
    const float norm = means ? muon_norm_factor_(means, row_sums, s.tensor.rows) : 1.0f;
    for (size_t i = matrix.begin + threadIdx.x; i < matrix.end; i += MUON_THREADS_) {
        const float factor =
            means ? norm * muon_row_factor_(means[(uint32_t)i / (uint32_t)s.tensor.cols]) : 1.0f;
        turned[i] = to_float(x[i]) * factor;
    }
}

// ---- matmuls ----

// One step that brings all singular values of the X closer to 1; out is another array.
template <class X>
static inline void muon_step_(X* out, X* const a[2], const X* x, MuonCoefficients k, const MuonTensor* t,
                              int matrices, MatmulGpu* matmul) {
    const int tall = t->rows > t->cols, side = int_min(t->rows, t->cols), length = tall ? t->rows : t->cols;
    const MatmulBatch gram = {side, side, length, tall, !tall, matrices, 1.0f, 0.0f},
                      square = {side, side, side, 0, 0, matrices, k.aa, k.a},
                      step = {t->rows, t->cols, side, 0, 0, matrices, 1.0f, k.x};
    matmul_batch(a[0], (const X*)NULL, x, x, gram, matmul);
    matmul_batch(a[1], (const X*)a[0], (const X*)a[0], (const X*)a[0], square, matmul);
    matmul_batch(out, x, tall ? x : (const X*)a[1], tall ? (const X*)a[1] : x, step, matmul);
}

// Makes all steps. Returns the array of the result: x[0] or x[1].
template <class X>
static inline const X* muon_orthogonalize_(MuonGpu* muon, MuonPolynomial polynomial, const MuonTensor* t,
                                           int matrices, MatmulGpu* matmul) {
    X *const x[2] = {(X*)muon->x[0], (X*)muon->x[1]}, *const a[2] = {(X*)muon->a[0], (X*)muon->a[1]};
    for (int i = 0; i < MUON_ITERATIONS; i++) {
        muon_step_(x[(i + 1) % 2], a, (const X*)x[i % 2], muon_iteration(polynomial)->steps[i], t, matrices,
                   matmul);
    }
    return x[MUON_ITERATIONS % 2];
}

// Chooses the algorithms of an update's matmuls: makes them once, on any content of the scratch
// memory.
template <class T>
static inline void muon_choose_matmuls(MuonGpu* muon, const MuonTensor* t, MatmulGpu* matmul) {
    muon_orthogonalize_<typename MuonReal_<T>::Type>(muon, MUON_JORDAN, t, muon_group_layers_(t) * t->parts,
                                                     matmul);
}

// ---- the update ----

// Arguments of the update.
template <class T> struct MuonUpdate {
    Weights<T> weights;
    Gradient grads;
    Moment b;
    float* row_squares;
    MuonGpu* muon;
    Muon opt;
    int64_t t; // number of the update, from 1
    uint64_t seed;
    MatmulGpu* matmul;
    float* u;               // operand of one matrix, complete; NULL: momentum and gradient make it
    const Code8Pair* codes; // if b has codes
};

template <class T>
static inline MuonLaunch_ muon_launch_(const MuonTensor* t, const MuonUpdate<T>& u, int layer) {
    const float rate = u.opt.lr * muon_factor(u.opt, (size_t)t->rows, (size_t)t->cols);
    const MuonLaunch_ s = {
        *t, layer, u.opt, rate, t->decay ? 1.0f - u.opt.lr * u.opt.weight_decay : 1.0f, u.row_squares};
    return s;
}

// Returns how many elements a thread reads at a time: 4 if all places are multiples of that.
static inline int muon_width_(const MuonTensor* t) {
    const size_t weights =
                     t->params.first | t->params.step | t->master.first | t->master.step | t->words.first,
                 gradients = t->grads.first | t->grads.step | t->b.first | t->b.step;
    return ((size_t)t->cols | weights | gradients) % 4 == 0 ? 4 : 1;
}

template <class T, class G>
static inline void muon_operand_(const MuonTensor* t, const MuonUpdate<T>& u, int layer, const Gpu* gpu) {
    const MuonLaunch_ s = muon_launch_(t, u, layer);
    const int width = muon_width_(t);
    const size_t elements = (size_t)t->parts * t->rows * t->cols;
    const unsigned blocks = (unsigned)ceil_div(elements, (size_t)width * MUON_THREADS_);
    const MuonSource_<G> from = {u.b, (const G*)u.grads.data, NULL, u.codes};
    assert(width == 4 || !u.b.m8);
    if (width == 4) {
        launch(muon_operand_kernel_<G, 4>, blocks, MUON_THREADS_, 0, gpu, u.u, from, s);
    } else {
        launch(muon_operand_kernel_<G, 1>, blocks, MUON_THREADS_, 0, gpu, u.u, from, s);
    }
}

// Sets u of a layer, and updates its momentum.
template <class T>
static inline void muon_operand(const MuonTensor* t, const MuonUpdate<T>& u, int layer, const Gpu* gpu) {
    GRADIENT_DISPATCH(u.grads, T, muon_operand_<T, G>(t, u, layer, gpu));
}

// Numbers of a move: param = keep param - rate x, with the random words of update t.
typedef struct {
    float rate, keep;
    Decay decay;
    uint64_t seed;
    int64_t t;
} MuonMove;

// Moves the weights of a layer by x, its packed matrices, on the stream of `gpu`.
template <class T>
static inline void muon_move(const MuonTensor* t, const Weights<T>& weights, const float* x, MuonMove move,
                             int layer, const Gpu* gpu) {
    MuonLaunch_ s = {*t, layer, {}, move.rate, move.keep, NULL};
    const dim3 grid((unsigned)ceil_div((size_t)t->rows * t->cols, muon_share_(*t)), (unsigned)t->parts);
    const float* no_rows = NULL;
    s.opt.decay = move.decay;
    if (muon_width_(t) == 4) {
        launch(muon_kernel_<T, float, 4>, grid, MUON_THREADS_, 0, gpu, weights, x, no_rows, move.seed, move.t,
               s);
    } else {
        launch(muon_kernel_<T, float, 1>, grid, MUON_THREADS_, 0, gpu, weights, x, no_rows, move.seed, move.t,
               s);
    }
}

// Returns the grid of the kernels of some layers.
static inline dim3 muon_grid_(const MuonTensor& t, int layers) {
    return dim3((unsigned)ceil_div((size_t)t.rows * t.cols, muon_share_(t)), (unsigned)(layers * t.parts));
}

// Returns the X of some layers.
template <class T, class G, int W>
static inline const typename MuonReal_<T>::Type* muon_x_(const MuonUpdate<T>& u, const MuonLaunch_& s,
                                                         int layers, const Gpu* gpu) {
    typedef typename MuonReal_<T>::Type X;
    const dim3 grid = muon_grid_(s.tensor, layers);
    const MuonSource_<G> from = {u.b, (const G*)u.grads.data, u.u, u.codes};
    assert(W == 4 || u.u || !u.b.m8);
    launch(muon_sums_kernel_<G, W>, grid, MUON_THREADS_, 0, gpu, u.muon->sums, from, s);
    launch(muon_start_kernel_<X, G, W>, grid, MUON_THREADS_, 0, gpu, (X*)u.muon->x[0], u.muon->sums,
           muon_iteration(u.opt.polynomial)->margin, from, s);
    const X* x = muon_orthogonalize_<X>(u.muon, u.opt.polynomial, &s.tensor, (int)grid.y, u.matmul);
    if (u.row_squares) {
        launch(muon_rows_kernel_<X>, dim3((unsigned)ceil_div(s.tensor.rows, MUON_THREADS_ / 32), grid.y),
               MUON_THREADS_, 0, gpu, u.muon->row_sums, x, s);
    }
    return x;
}

template <class T, class G, int W>
static inline void muon_update_group_(const MuonUpdate<T>& u, const MuonLaunch_& s, int layers,
                                      const Gpu* gpu) {
    typedef typename MuonReal_<T>::Type X;
    const X* x = muon_x_<T, G, W>(u, s, layers, gpu);
    launch(muon_kernel_<T, X, W>, muon_grid_(s.tensor, layers), MUON_THREADS_, 0, gpu, u.weights, x,
           u.muon->row_sums, u.seed, u.t, s);
}

// Sets u.u, the operand of a matrix, to its X. u.row_squares are those of the matrix.
template <class T> static inline void muon_turn(const MuonTensor* t, const MuonUpdate<T>& u, const Gpu* gpu) {
    typedef typename MuonReal_<T>::Type X;
    const MuonLaunch_ s = muon_launch_(t, u, 0);
    const X* x = t->cols % 4 == 0 ? muon_x_<T, float, 4>(u, s, 1, gpu) : muon_x_<T, float, 1>(u, s, 1, gpu);
    launch(muon_turn_kernel_<X>, muon_grid_(*t, 1), MUON_THREADS_, 0, gpu, u.u, x,
           (const float*)u.muon->row_sums, s);
}

template <class T, class G>
static inline void muon_update_(const MuonTensor* t, const MuonUpdate<T>& u, int first, int end,
                                const Gpu* gpu) {
    const int most = muon_group_layers_(t);
    for (int layer = first; layer < end; layer += most) {
        const MuonLaunch_ s = muon_launch_(t, u, layer);
        const int layers = int_min(most, end - layer);
        if (muon_width_(t) == 4) {
            muon_update_group_<T, G, 4>(u, s, layers, gpu);
        } else {
            muon_update_group_<T, G, 1>(u, s, layers, gpu);
        }
    }
}

// Updates layers first ... end-1 of a tensor, on the stream of `gpu`, which is matmul's.
template <class T>
static inline void muon_update(const MuonTensor* t, const MuonUpdate<T>& u, int first, int end,
                               const Gpu* gpu) {
    assert(t->parts > 0 && t->layers > 0 && (size_t)t->parts * t->rows * t->cols > 0);
    assert((size_t)t->rows * t->cols <= UINT32_MAX);
    GRADIENT_DISPATCH(u.grads, T, muon_update_<T, G>(t, u, first, end, gpu));
}

// Returns the bytes moved by Muon's own kernels for n elements, without its matmuls.
template <class T> static inline double muon_bytes(double n, DType grads, MasterWeights master) {
    const size_t x = sizeof(typename MuonReal_<T>::Type);
    return n * (double)(2 * dtype_bytes(grads) + 3 * sizeof(float) + 2 * x) +
           weights_bytes(n, DTYPE_OF(T), master);
}

#endif
