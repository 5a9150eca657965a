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

The rows of P and Q are orthonormal and near the eigenvectors of left and right. One step of a power
iteration renews each before the next update whose number is a multiple of `every` past the first:

    P = orthonormal rows (qr.h) of  P (left / mean + SOAP_SHIFT),  mean = trace(left) / rows

The first update only starts left, right, P (from the identity) and Q, and does not move weights: a
basis is never made of the gradient that it turns. SOAP_SHIFT, which the paper does not have, keeps
directions that no gradient has in place, where rounding would turn them at random.

    param, grad, m, v   (parts * rows, cols)   fp32; the state starts as zeros
    left, left_basis    (parts, rows, rows)    fp32; NULL: P is the identity
    right, right_basis  (parts, cols, cols)    fp32; NULL: Q is the identity

`parts` matrices, such as those of q, k and v, lie one below the other; each is updated alone.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321.

needs:   all of grad; each rank that updates elements begin ... end-1 updates all of the state
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
    size_t parts, rows, cols;
    size_t begin, end; // elements to update
} SoapMatrix;

// True if update t renews the bases.
static inline int soap_renews(Soap opt) { return (opt.adam.t - 1) % opt.every == 0; }

// Returns AdamW's numbers in the bases: the first update moved nothing.
AdamWStep soap_step(Soap opt);

// Counts the operations of the matmuls and the bases of an update, for one part; a side of 0 is not
// turned.
double soap_flops(double rows, double cols, double left, double right, int every);

// Returns the scratch bytes for a part of rows x cols.
size_t soap_scratch_bytes(size_t rows, size_t cols);

void soap_update_cpu(SoapMatrix x, Soap opt, void* memory, MatmulScratch* matmul);

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

static void soap_move_(const SoapMatrix* part, const float* step, AdamWStep adam) {
    float* param = part->param;
#pragma omp parallel for simd schedule(static)
    for (size_t i = part->begin; i < part->end; i++) {
        const float keep = decay_keep(adam.keep, adam.opt.decay, step[i], param[i]);
        param[i] = multiply_add(keep, param[i], -adam.opt.lr * step[i]);
    }
}

// Updates the moments and the weights.
static void soap_adam_part_(const SoapMatrix* part, Soap opt, const SoapWork_* work) {
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
    soap_move_(part, soap_turn_back_(work->turned, work->step, part, work), adam);
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

// Updates the statistics of a side of n by square, and its basis if that is due.
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

static void soap_update_part_(const SoapMatrix* part, Soap opt, const SoapWork_* work) {
    const size_t n = part->rows * part->cols;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        work->g[i] = part->grad[i] * opt.adam.grad_scale;
    }
    if (opt.adam.t > 1) {
        soap_adam_part_(part, opt, work);
    }
    soap_learn_part_(part, opt, work);
}

// Returns the square of part k of a side.
static SoapSide soap_side_of_part_(SoapSide side, size_t n, size_t k) {
    const SoapSide of_part = {side.mean ? side.mean + k * n * n : NULL,
                              side.basis ? side.basis + k * n * n : NULL};
    return of_part;
}

// Maps an element of the whole tensor to the part of n elements that starts at `at`.
static size_t soap_in_part_(size_t element, size_t at, size_t n) {
    const size_t in_part = element > at ? element - at : 0;
    return in_part < n ? in_part : n;
}

void soap_update_cpu(SoapMatrix x, Soap opt, void* memory, MatmulScratch* matmul) {
    const SoapWork_ work = soap_work_(&x, memory, matmul);
    for (size_t k = 0; k < x.parts; k++) {
        const size_t n = x.rows * x.cols, at = k * n;
        const SoapMatrix part = {x.param + at,
                                 x.grad + at,
                                 x.m + at,
                                 x.v + at,
                                 soap_side_of_part_(x.left, x.rows, k),
                                 soap_side_of_part_(x.right, x.cols, k),
                                 1,
                                 x.rows,
                                 x.cols,
                                 soap_in_part_(x.begin, at, n),
                                 soap_in_part_(x.end, at, n)};
        soap_update_part_(&part, opt, &work);
    }
}

#endif // SOAP_IMPLEMENTATION

#endif
