/*
soap.h -- the SOAP update of a matrix, AdamW in the eigenbases of the gradient's statistics: the
contract, and the CPU version.

    g = grad * grad_scale
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) (P g Q^T)^2                     element by element
    param -= lr (P^T (m^ / (sqrt(v^) + eps)) Q + weight_decay param)

    m^ = P m Q^T / (1 - beta1^(t-1)),  v^ = v / (1 - beta2^(t-1))

    left  = beta2 left  + (1 - beta2) g g^T
    right = beta2 right + (1 - beta2) g^T g

The rows of P and Q are orthonormal and near the eigenvectors of left and right. Each is renewed at
the end of updates 1, 1 + every, 1 + 2 every, ..., by one step of a power iteration:

    P = orthonormal rows (qr.h) of  P (left / mean + SOAP_SHIFT),  mean = trace(left) / rows

The first update does not move weights. It only starts left, right, P and Q (from the identity),
because a basis is not applied to the gradient that it was made from. SOAP_SHIFT is not in the
paper: without it, rounding would turn directions without any gradient at random.

    param, grad, m, v   (rows, cols)   fp32; the state starts as zeros
    left, left_basis    (rows, rows)   fp32; NULL: P is the identity
    right, right_basis  (cols, cols)   fp32; NULL: Q is the identity

The matrices of q, k and v, for example, are updated one by one.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321.
*/
#ifndef LLMC_SOAP_H
#define LLMC_SOAP_H

#include <stddef.h>

#include "llmc/ops/matmul.h"
#include "llmc/optim/adamw.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SOAP_SHIFT 1e-4f // of the mean eigenvalue

typedef struct {
    AdamW adam;
    int every; // updates between two renewals of the bases
} Soap;

// The statistics of one side, and the basis that they make. NULL: the side is not turned.
typedef struct {
    float *mean, *basis;
} SoapSide;

typedef struct {
    float* param;
    const float* grad;
    float *m, *v;
    SoapSide left, right;
    size_t rows, cols;
} SoapMatrix;

// True if update t renews the bases.
static inline int soap_renews(Soap opt) { return (opt.adam.t - 1) % opt.every == 0; }

// Returns AdamW's numbers in the bases: the first update moved nothing.
AdamWStep soap_step(Soap opt);

// Counts the operations of the matmuls and the bases of an update; a side of 0 is not turned.
double soap_flops(double rows, double cols, double left, double right, int every);

// Returns the bytes of scratch memory for a matrix of rows x cols.
size_t soap_scratch_bytes(size_t rows, size_t cols);

void soap_update_cpu(SoapMatrix x, Soap opt, void* memory, MatmulScratch* matmul);

// The two steps of an update. The first sets `step`, which may be x.grad, to P^T (...) Q and
// updates the state; the second moves n weights by a part of it.
void soap_turn_cpu(SoapMatrix x, float* step, Soap opt, void* memory, MatmulScratch* matmul);

void soap_move_cpu(float* param, const float* step, size_t n, Soap opt);

#ifdef __cplusplus
}
#endif

#ifdef SOAP_IMPLEMENTATION

#include <string.h>

#include "llmc/base/host_device.h"
#include "llmc/optim/qr.h"

AdamWStep soap_step(Soap opt) {
    opt.adam.t--;
    return adamw_step(opt.adam);
}

double soap_flops(double rows, double cols, double left, double right, int every) {
    // three turns and the statistics; a basis is a matmul and its QR
    const double matmuls = 4 * 2 * rows * cols * (left + right);
    return matmuls +
           (2 * left * left * left + qr_flops(left) + 2 * right * right * right + qr_flops(right)) / every;
}

// Four matrices of a part's size; a square of the longer side, and its factors.
typedef struct {
    float *g, *step, *turned, *between;
    float *square, *factors;
    MatmulScratch* matmul;
} SoapWork_;

static size_t soap_longer_(size_t rows, size_t cols) { return rows > cols ? rows : cols; }

size_t soap_scratch_bytes(size_t rows, size_t cols) {
    const size_t side = soap_longer_(rows, cols);
    return (4 * rows * cols + side * side + side) * sizeof(float);
}

static SoapWork_ soap_work_(const SoapMatrix* part, void* memory, MatmulScratch* matmul) {
    const size_t n = part->rows * part->cols, side = soap_longer_(part->rows, part->cols);
    SoapWork_ work;
    work.g = (float*)memory;
    work.step = work.g + n;
    work.turned = work.step + n;
    work.between = work.turned + n;
    work.square = work.between + n;
    work.factors = work.square + side * side;
    work.matmul = matmul;
    return work;
}

// Sets work->turned to P x Q^T. Returns the array of the result: x itself if no side is turned.
static const float* soap_turn_(float* out, const float* x, const SoapMatrix* part, const SoapWork_* work) {
    const int rows = (int)part->rows, cols = (int)part->cols;
    if (part->left.basis) {
        float* to = part->right.basis ? work->between : out;
        matmul_backward_input_cpu(to, part->left.basis, x, (MatmulSizes){rows, cols, rows}, work->matmul);
        x = to;
    }
    if (part->right.basis) {
        matmul_forward_cpu(out, x, part->right.basis, NULL, (MatmulSizes){rows, cols, cols}, work->matmul);
        x = out;
    }
    return x;
}

// Returns P^T x Q, in out, unless no side is turned.
static const float* soap_turn_back_(float* out, const float* x, const SoapMatrix* part,
                                    const SoapWork_* work) {
    const int rows = (int)part->rows, cols = (int)part->cols;
    if (part->left.basis) {
        float* to = part->right.basis ? work->between : out;
        matmul_backward_weight_cpu(to, part->left.basis, x, (MatmulSizes){rows, cols, rows}, GRADIENT_SET,
                                   work->matmul);
        x = to;
    }
    if (part->right.basis) {
        matmul_backward_input_cpu(out, x, part->right.basis, (MatmulSizes){rows, cols, cols}, work->matmul);
        x = out;
    }
    return x;
}

// Sets the step of AdamW in the bases, from the gradient and m in them; out may be m.
static void soap_adam_(float* out, const float* g, const float* m, float* v, size_t n, AdamWStep adam) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        v[i] = multiply_add(adam.opt.beta2, v[i], (1.0f - adam.opt.beta2) * g[i] * g[i]);
        out[i] = m[i] * adam.m_correction / (sqrtf(v[i] * adam.v_correction) + adam.opt.eps);
    }
}

void soap_move_cpu(float* param, const float* step, size_t n, Soap opt) {
    const AdamWStep adam = soap_step(opt);
    n = opt.adam.t > 1 ? n : 0;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float keep = decay_keep(adam.keep, adam.opt.decay, step[i], param[i]);
        param[i] = multiply_add(keep, param[i], -adam.opt.lr * step[i]);
    }
}

// Updates the moments; returns the step of the weights.
static const float* soap_adam_part_(const SoapMatrix* part, Soap opt, const SoapWork_* work) {
    const size_t n = part->rows * part->cols;
    const AdamWStep adam = soap_step(opt);
    float* m = part->m;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        m[i] = multiply_add(adam.opt.beta1, m[i], (1.0f - adam.opt.beta1) * work->g[i]);
    }
    const float *turned_m = soap_turn_(work->step, m, part, work),
                *turned_g = soap_turn_(work->turned, work->g, part, work);
    soap_adam_(work->step, turned_g, turned_m, part->v, n, adam);
    return soap_turn_back_(work->turned, work->step, part, work);
}

// mean = beta mean + (1 - beta) square
static void soap_mix_(float* mean, const float* square, size_t n, float beta) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        mean[i] = multiply_add(beta, mean[i], (1.0f - beta) * square[i]);
    }
}

static void soap_set_identity_(float* basis, size_t n) {
    memset(basis, 0, n * n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        basis[i * n + i] = 1;
    }
}

// Sets the matrix whose rows make the next basis: a step of the power iteration.
static void soap_power_(float* square, SoapSide side, size_t n, MatmulScratch* matmul) {
    const int rows = (int)n;
    double trace = 0;
    for (size_t i = 0; i < n; i++) {
        trace += side.mean[i * n + i];
    }
    const float scale = trace > 0 ? (float)((double)n / trace) : 0;
    matmul_backward_input_cpu(square, side.basis, side.mean, (MatmulSizes){rows, rows, rows}, matmul);
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n * n; i++) {
        square[i] = multiply_add(scale, square[i], SOAP_SHIFT * side.basis[i]);
    }
}

// Updates the statistics of a side of n with `square`, and its basis if that is due.
static void soap_side_(SoapSide side, size_t n, Soap opt, const SoapWork_* work) {
    soap_mix_(side.mean, work->square, n * n, opt.adam.beta2);
    if (opt.adam.t == 1) {
        soap_set_identity_(side.basis, n);
    }
    if (soap_renews(opt)) {
        soap_power_(work->square, side, n, work->matmul);
        qr_rows_cpu(side.basis, work->square, work->factors, n);
    }
}

static void soap_learn_part_(const SoapMatrix* part, Soap opt, const SoapWork_* work) {
    const int rows = (int)part->rows, cols = (int)part->cols;
    const float* g = work->g;
    if (part->left.basis) {
        matmul_forward_cpu(work->square, g, g, NULL, (MatmulSizes){rows, cols, rows}, work->matmul);
        soap_side_(part->left, part->rows, opt, work);
    }
    if (part->right.basis) {
        matmul_backward_weight_cpu(work->square, g, g, (MatmulSizes){rows, cols, cols}, GRADIENT_SET,
                                   work->matmul);
        soap_side_(part->right, part->cols, opt, work);
    }
}

// Updates the state, and returns the step of the weights, in the scratch memory that `work` gets;
// NULL in the first update.
static const float* soap_make_step_(const SoapMatrix* x, Soap opt, SoapWork_* work) {
    const size_t n = x->rows * x->cols;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        work->g[i] = x->grad[i] * opt.adam.grad_scale;
    }
    return opt.adam.t > 1 ? soap_adam_part_(x, opt, work) : NULL;
}

void soap_turn_cpu(SoapMatrix x, float* step, Soap opt, void* memory, MatmulScratch* matmul) {
    SoapWork_ work = soap_work_(&x, memory, matmul);
    const float* made = soap_make_step_(&x, opt, &work);
    if (made) {
        memcpy(step, made, x.rows * x.cols * sizeof(float));
    }
    soap_learn_part_(&x, opt, &work);
}

void soap_update_cpu(SoapMatrix x, Soap opt, void* memory, MatmulScratch* matmul) {
    SoapWork_ work = soap_work_(&x, memory, matmul);
    const float* made = soap_make_step_(&x, opt, &work);
    if (made) {
        soap_move_cpu(x.param, made, x.rows * x.cols, opt);
    }
    soap_learn_part_(&x, opt, &work);
}

#endif // SOAP_IMPLEMENTATION

#endif
