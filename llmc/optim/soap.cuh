/*
soap.cuh -- soap.h on the GPU, a layer of a tensor after the other.

    params, master, grads    T, as in master_weights.cuh, T or fp32
    state                    fp32, of whole tensors, updated

Matmuls in fp32 (or --tf32) turn the gradient and its mean, qr.cuh renews the bases, and kernels of
a thread an element do the rest. The matrices of a layer are multiplied together (matmul_batch). No
step of an update waits for the host.

needs:   tensors start at multiples of four elements in every array except the square matrices
*/
#ifndef LLMC_SOAP_CUH
#define LLMC_SOAP_CUH

#include "llmc/optim/qr.cuh"
#include "llmc/optim/muon.cuh"
#include "llmc/optim/soap.h"

enum { SOAP_THREADS_ = 256, SOAP_BLOCKS_ = 64 }; // of a block; most blocks of a matrix

// The layers of a tensor; b and row_squares of `matrices` are unused.
typedef struct {
    MuonTensor matrices;
    MuonPlace moments[2];    // m and v
    MuonPlace left, right;   // statistics; bases lie as they do
    int has_left, has_right; // the sides that are turned
    int row;                 // the row of its parameters
} SoapTensor;

// Scratch memory for the largest layer of some tensors.
typedef struct {
    float *g, *step, *turned, *between; // (parts, rows, cols)
    float *square, *power;              // (parts, longer side, longer side)
    float* factors;                     // (parts, longer side)
} SoapGpu;

// ---- open and close ----

static inline void soap_open(SoapGpu* soap, Memory* memory, const SoapTensor* tensors, int count) {
    size_t elements = 0, squares = 0, factors = 0;
    for (int i = 0; i < count; i++) {
        const MuonTensor* t = &tensors[i].matrices;
        const size_t parts = (size_t)t->parts, side = (size_t)int_max(t->rows, t->cols),
                     n = parts * t->rows * t->cols;
        elements = n > elements ? n : elements;
        squares = parts * side * side > squares ? parts * side * side : squares;
        factors = parts * side > factors ? parts * side : factors;
    }
    float** const of_elements[] = {&soap->g, &soap->step, &soap->turned, &soap->between};
    float** const of_squares[] = {&soap->square, &soap->power};
    for (int i = 0; i < 4; i++) {
        *of_elements[i] =
            (float*)memory_take(memory, "scratch: soap", MEMORY_DEVICE, elements * sizeof(float));
    }
    for (int i = 0; i < 2; i++) {
        *of_squares[i] = (float*)memory_take(memory, "scratch: soap", MEMORY_DEVICE, squares * sizeof(float));
    }
    soap->factors = (float*)memory_take(memory, "scratch: soap", MEMORY_DEVICE, factors * sizeof(float));
}

// ---- kernels ----

// Sets g to the scaled gradient; with m, which is not NULL after the first update, also updates it.
// grid   ceil(n / 256)      block   256      shared   none
// moves  the gradient in, g out, m in and out. Bound by memory.
// order  every element on its own
template <class G>
__global__ void __launch_bounds__(SOAP_THREADS_)
    soap_gradient_kernel_(float* g, float* m, const G* grads, size_t n, float grad_scale, float beta1) {
    const size_t i = (size_t)blockIdx.x * SOAP_THREADS_ + threadIdx.x;
    if (i < n) {
        const float scaled = to_float(grads[i]) * grad_scale;
        g[i] = scaled;
        if (m) {
            m[i] = fmaf(beta1, m[i], (1.0f - beta1) * scaled);
        }
    }
}

// Sets the step of AdamW in the bases; out may be m.
// grid   ceil(n / 256)      block   256      shared   none
// moves  g and m in, v in and out, the step out. Bound by memory.
// order  every element on its own
static __global__ void __launch_bounds__(SOAP_THREADS_)
    soap_adam_kernel_(float* out, const float* g, const float* m, float* v, size_t n,
                      const __grid_constant__ AdamWStep adam) {
    const size_t i = (size_t)blockIdx.x * SOAP_THREADS_ + threadIdx.x;
    if (i < n) {
        const float mean = fmaf(adam.opt.beta2, v[i], (1.0f - adam.opt.beta2) * g[i] * g[i]);
        v[i] = mean;
        out[i] = m[i] * adam.m_correction / (sqrtf(mean * adam.v_correction) + adam.opt.eps);
    }
}

// Sets squares of n rows to the identity.
// grid   ceil(n n / 256), matrices      block   256      shared   none
// moves  the squares out
// order  every element on its own
static __global__ void __launch_bounds__(SOAP_THREADS_) soap_identity_kernel_(float* basis, int n) {
    const size_t i = (size_t)blockIdx.x * SOAP_THREADS_ + threadIdx.x, elements = (size_t)n * n;
    if (i < elements) {
        basis[blockIdx.y * elements + i] = i % ((size_t)n + 1) == 0;
    }
}

// power = power / (mean eigenvalue) + SOAP_SHIFT basis, for squares of n rows. Each block computes
// the trace.
// grid   up to 64, matrices      block   256      shared   128 bytes
// moves  power in and out, the basis in. Bound by memory.
// order  fixed
static __global__ void __launch_bounds__(SOAP_THREADS_)
    soap_power_kernel_(float* power, const float* mean, const float* basis, int n) {
    const size_t elements = (size_t)n * n, matrix = blockIdx.y * elements;
    float trace = 0;
    for (int i = (int)threadIdx.x; i < n; i += SOAP_THREADS_) {
        trace += mean[matrix + (size_t)i * n + i];
    }
    trace = block_sum(trace);
    const float scale = trace > 0 ? (float)n / trace : 0.0f;
    for (size_t i = (size_t)blockIdx.x * SOAP_THREADS_ + threadIdx.x; i < elements;
         i += (size_t)gridDim.x * SOAP_THREADS_) {
        power[matrix + i] = fmaf(scale, power[matrix + i], SOAP_SHIFT * basis[matrix + i]);
    }
}

// ---- the update ----

// Arguments of the update. The arrays of state are those of all tensors.
template <class T> struct SoapUpdate {
    Weights<T> weights;
    Gradient grads;
    float *m, *v;
    SoapSide left, right;
    SoapGpu* soap;
    Soap opt;
    uint64_t seed;
    MatmulGpu* matmul;
};

// A layer: its matrices in the arrays of state.
typedef struct {
    int parts, rows, cols;
    float *m, *v;
    SoapSide left, right; // NULL: the side is not turned
    const SoapGpu* soap;
    MatmulGpu* matmul;
} SoapLayer_;

static inline size_t soap_elements_(const SoapLayer_* x) { return (size_t)x->parts * x->rows * x->cols; }

static inline SoapSide soap_side_at_(SoapSide side, int is_turned, MuonPlace place, int layer) {
    const SoapSide none = {NULL, NULL};
    const size_t at = place.first + (size_t)layer * place.step;
    const SoapSide of_layer = {side.mean + at, side.basis + at};
    return is_turned ? of_layer : none;
}

template <class T>
static inline SoapLayer_ soap_layer_(const SoapTensor* t, const SoapUpdate<T>& u, int layer) {
    const MuonPlace *m = &t->moments[0], *v = &t->moments[1];
    const SoapLayer_ x = {t->matrices.parts,
                          t->matrices.rows,
                          t->matrices.cols,
                          u.m + m->first + (size_t)layer * m->step,
                          u.v + v->first + (size_t)layer * v->step,
                          soap_side_at_(u.left, t->has_left, t->left, layer),
                          soap_side_at_(u.right, t->has_right, t->right, layer),
                          u.soap,
                          u.matmul};
    return x;
}

typedef enum { SOAP_INTO_, SOAP_BACK_ } SoapTurn_;

// Turns x into the bases, or back, in out. Returns the array of the result: x itself if no side is
// turned.
static inline const float* soap_turn_(float* out, const float* x, const SoapLayer_* l, SoapTurn_ turn) {
    const int back = turn == SOAP_BACK_;
    const MatmulBatch left = {l->rows, l->cols, l->rows, back, 0, l->parts, 1.0f, 0.0f},
                      right = {l->rows, l->cols, l->cols, 0, !back, l->parts, 1.0f, 0.0f};
    const float* none = NULL;
    if (l->left.basis) {
        float* to = l->right.basis ? l->soap->between : out;
        matmul_batch(to, none, (const float*)l->left.basis, x, left, l->matmul);
        x = to;
    }
    if (l->right.basis) {
        matmul_batch(out, none, x, (const float*)l->right.basis, right, l->matmul);
        x = out;
    }
    return x;
}

static inline unsigned soap_blocks_(size_t n) { return (unsigned)ceil_div(n, (size_t)SOAP_THREADS_); }

// Updates v and returns the step of the weights.
static inline const float* soap_step_of_layer_(const SoapLayer_* x, AdamWStep adam, const Gpu* gpu) {
    const SoapGpu* s = x->soap;
    const size_t n = soap_elements_(x);
    const float *m = soap_turn_(s->step, x->m, x, SOAP_INTO_),
                *g = soap_turn_(s->turned, s->g, x, SOAP_INTO_);
    launch(soap_adam_kernel_, soap_blocks_(n), SOAP_THREADS_, 0, gpu, s->step, g, m, x->v, n, adam);
    return soap_turn_(s->turned, s->step, x, SOAP_BACK_);
}

// Renews the bases of a side of n.
static inline void soap_renew_(SoapSide side, int n, const SoapLayer_* x, int is_first, const Gpu* gpu) {
    const size_t elements = (size_t)n * n;
    const unsigned parts = (unsigned)x->parts, blocks = soap_blocks_(elements);
    const MatmulBatch power = {n, n, n, 0, 0, x->parts, 1.0f, 0.0f};
    if (is_first) {
        launch(soap_identity_kernel_, dim3(blocks, parts), SOAP_THREADS_, 0, gpu, side.basis, n);
    }
    matmul_batch(x->soap->power, (const float*)NULL, (const float*)side.basis, (const float*)side.mean, power,
                 x->matmul);
    launch(soap_power_kernel_, dim3((unsigned)int_min((int)blocks, SOAP_BLOCKS_), parts), SOAP_THREADS_, 0,
           gpu, x->soap->power, side.mean, side.basis, n);
    qr_rows(side.basis, x->soap->power, x->soap->factors, n, x->parts, gpu);
}

// Updates the statistics of a side of n with the matmul `gram`, and its bases if that is due.
static inline void soap_learn_side_(SoapSide side, MatmulBatch gram, const SoapLayer_* x, Soap opt,
                                    const Gpu* gpu) {
    const SoapGpu* s = x->soap;
    const size_t bytes = (size_t)gram.batch * gram.rows * gram.cols * sizeof(float);
    if (!side.basis) {
        return;
    }
    matmul_batch(s->square, (const float*)side.mean, (const float*)s->g, (const float*)s->g, gram, x->matmul);
    CUDA_CHECK(cudaMemcpyAsync(side.mean, s->square, bytes, cudaMemcpyDeviceToDevice, gpu->stream));
    if (soap_renews(opt)) {
        soap_renew_(side, gram.rows, x, opt.adam.t == 1, gpu);
    }
}

// Return the matmuls of the statistics of each side.
static inline MatmulBatch soap_gram_left_(const SoapLayer_* x, float beta) {
    return MatmulBatch{x->rows, x->rows, x->cols, 0, 1, x->parts, 1.0f - beta, beta};
}
static inline MatmulBatch soap_gram_right_(const SoapLayer_* x, float beta) {
    return MatmulBatch{x->cols, x->cols, x->rows, 1, 0, x->parts, 1.0f - beta, beta};
}

static inline void soap_learn_layer_(const SoapLayer_* x, Soap opt, const Gpu* gpu) {
    soap_learn_side_(x->left, soap_gram_left_(x, opt.adam.beta2), x, opt, gpu);
    soap_learn_side_(x->right, soap_gram_right_(x, opt.adam.beta2), x, opt, gpu);
}

static inline void soap_choose_side_(SoapSide side, MatmulBatch gram, const SoapLayer_* x) {
    const float *g = x->soap->g, *none = NULL, *mean = side.mean;
    const MatmulBatch power = {gram.rows, gram.rows, gram.rows, 0, 0, x->parts, 1.0f, 0.0f};
    if (side.basis) {
        matmul_batch(x->soap->square, mean, g, g, gram, x->matmul);
        matmul_batch(x->soap->square, none, mean, mean, power, x->matmul);
    }
}

// Chooses the algorithms of an update's matmuls: makes them once, on any content of the scratch
// memory.
static inline void soap_choose_matmuls(SoapGpu* soap, const SoapTensor* t, MatmulGpu* matmul) {
    const SoapSide scratch = {soap->power, soap->power}, none = {NULL, NULL};
    const SoapLayer_ x = {t->matrices.parts,
                          t->matrices.rows,
                          t->matrices.cols,
                          NULL,
                          NULL,
                          t->has_left ? scratch : none,
                          t->has_right ? scratch : none,
                          soap,
                          matmul};
    soap_turn_(soap->step, soap->g, &x, SOAP_INTO_);
    soap_turn_(soap->step, soap->g, &x, SOAP_BACK_);
    soap_choose_side_(x.left, soap_gram_left_(&x, 0.5f), &x);
    soap_choose_side_(x.right, soap_gram_right_(&x, 0.5f), &x);
}

// Sets `step`, the gradient of the matrices of a layer, to the step of its weights, and updates the
// state. The first update has no step.
template <class T>
static inline void soap_turn(const SoapTensor* t, float* step, const SoapUpdate<T>& u, const Gpu* gpu) {
    const AdamW adam = u.opt.adam;
    const SoapLayer_ x = soap_layer_(t, u, 0);
    const size_t n = soap_elements_(&x);
    launch(soap_gradient_kernel_<float>, soap_blocks_(n), SOAP_THREADS_, 0, gpu, u.soap->g,
           adam.t > 1 ? x.m : NULL, (const float*)step, n, adam.grad_scale, adam.beta1);
    if (adam.t > 1) {
        CUDA_CHECK(cudaMemcpyAsync(step, soap_step_of_layer_(&x, soap_step(u.opt), gpu), n * sizeof(float),
                                   cudaMemcpyDeviceToDevice, gpu->stream));
    }
    soap_learn_layer_(&x, u.opt, gpu);
}

template <class T, class G>
static inline void soap_update_layer_(const SoapTensor* t, const SoapUpdate<T>& u, int layer,
                                      const Gpu* gpu) {
    const AdamW adam = u.opt.adam;
    const SoapLayer_ x = soap_layer_(t, u, layer);
    const size_t n = soap_elements_(&x);
    const MuonPlace grads = t->matrices.grads;
    launch(soap_gradient_kernel_<G>, soap_blocks_(n), SOAP_THREADS_, 0, gpu, u.soap->g,
           adam.t > 1 ? x.m : NULL, (const G*)u.grads.data + grads.first + (size_t)layer * grads.step, n,
           adam.grad_scale, adam.beta1);
    if (adam.t > 1) {
        const MuonMove move = {adam.lr, t->matrices.decay ? 1.0f - adam.lr * adam.weight_decay : 1.0f,
                               adam.decay, u.seed, adam.t};
        muon_move(&t->matrices, u.weights, soap_step_of_layer_(&x, soap_step(u.opt), gpu), move, layer, gpu);
    }
    soap_learn_layer_(&x, u.opt, gpu);
}

// Updates layers first ... end-1 of a tensor, on the stream of `gpu`, which is matmul's.
template <class T>
static inline void soap_update(const SoapTensor* t, const SoapUpdate<T>& u, int first, int end,
                               const Gpu* gpu) {
    for (int layer = first; layer < end; layer++) {
        GRADIENT_DISPATCH(u.grads, T, (soap_update_layer_<T, G>(t, u, layer, gpu)));
    }
}

#endif
