/*
muon.h -- the Muon update of a matrix: the contract, and the CPU version.

    g = grad * grad_scale
    b = momentum b + (1 - momentum) g
    u = momentum b + (1 - momentum) g                        Nesterov's momentum
    X = U V^T, approximately, where u = U S V^T
    param -= lr f X + lr weight_decay param

    f = sqrt(max(1, rows / cols))          MUON_SPECTRAL
    f = 0.2 sqrt(max(rows, cols))          MUON_RMS: takes AdamW's lr and weight_decay

X comes from five steps of a Newton-Schulz iteration, which only needs matmuls. They bring singular
values to about 1:

    X = u / (margin |u| + 1e-7)            |u|: the root of the sum of squares
    A = X X^T,  B = b A + c A A,  X = a X + B X         rows <= cols
    A = X^T X,  B = b A + c A A,  X = a X + X B         else: A is the smaller one

    MUON_JORDAN           a = 3.4445, b = -4.7750, c = 2.0315 in all steps, margin 1. Values end
                          between about 0.7 and 1.2, small ones below
    MUON_POLAR_EXPRESS    other numbers in each step, margin 1.02: each a x + b x^3 + c x^5 is the
                          one nearest to 1 on the interval that the steps before it left of
                          [0.001, 1] (no lower end below 1/50 of the upper one). To stay in it with
                          the roundings of bf16, all steps but the last one divide x by 1.02.
                          Values from 0.001 on end within 0.15 of 1

    param, grad, b    (rows, cols)   fp32; b starts as zero
    b in 8 bits       codes, and a scale for each 64 elements (adamw8bit.h): u is made of b as it
                      is kept. cols are a multiple of 64
    row_squares       (rows)         fp32, starts as zero; NULL: X stays as it is

The matrices of q, k and v, for example, are updated one by one. With row_squares (NorMuon),

    row_squares_i = rows_beta2 row_squares_i + (1 - rows_beta2) mean_j(X_ij^2)

X_i is divided by the root of row_squares_i, and X is scaled back to its norm, as in the authors'
program. Their paper gives the update a root mean square of 0.2: so does MUON_RMS, if all singular
values are 1.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; MUON_RMS: Liu et
al., arXiv 2502.16982; NorMuon: Li et al., arXiv 2510.05491; MUON_POLAR_EXPRESS: Amsel et al., arXiv
2505.16932.
*/
#ifndef LLMC_MUON_H
#define LLMC_MUON_H

#include <string.h>

#include "llmc/optim/adamw.h"
#include "llmc/optim/adamw8bit.h"
#include "llmc/base/enum_words.h"
#include "llmc/ops/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

// --muon-scale
// clang-format off
#define MUON_SCALE_WORDS(X) X(MUON_SPECTRAL, "spectral") X(MUON_RMS, "rms")

// --muon-polynomial
#define MUON_POLYNOMIAL_WORDS(X) X(MUON_JORDAN, "jordan") X(MUON_POLAR_EXPRESS, "polar-express")

// --muon-momentum
#define MUON_MOMENTUM_WORDS(X) X(MUON_FP32, "fp32") X(MUON_8BIT, "8bit")

// clang-format on
typedef enum { MUON_SCALE_WORDS(WORDS_VALUE) } MuonScale;
typedef enum { MUON_POLYNOMIAL_WORDS(WORDS_VALUE) } MuonPolynomial;
typedef enum { MUON_MOMENTUM_WORDS(WORDS_VALUE) } MuonMomentum;

typedef struct {
    float lr, momentum, weight_decay;
    float grad_scale; // factor of the gradient
    float rows_beta2; // only used with row_squares
    MuonScale scale;
    Decay decay;
    MuonPolynomial polynomial;
} Muon;

typedef struct {
    float* param;
    const float* grad;
    Moment b;
    float* row_squares; // or NULL
    size_t rows, cols;
    const float* u; // from muon_operand_cpu, in place of grad and b; NULL: computed here
} MuonMatrix;

typedef struct {
    void* memory; // muon_scratch_bytes of the largest matrix
    MatmulScratch* matmul;
} MuonScratch;

#define MUON_EPS 1e-7 // added to the norm

#define MUON_ROW_SQUARES 1e-10f // lower bound of a row's mean square

#define MUON_ROWS_BETA2 0.95f // of NorMuon's authors

enum { MUON_ITERATIONS = 5 };

// Coefficients of a step: of X, of A and of A A.
typedef struct {
    float x, a, aa;
} MuonCoefficients;

typedef struct {
    float margin; // factor of the norm
    MuonCoefficients steps[MUON_ITERATIONS];
} MuonIteration;

// Returns the numbers of an iteration. test_optimizers.c derives the second row.
static inline const MuonIteration* muon_iteration(MuonPolynomial polynomial) {
    // clang-format off
#define MUON_JORDAN_STEP_ {3.4445f, -4.7750f, 2.0315f}
    static const MuonIteration iterations[] = {
        {1.0f, {MUON_JORDAN_STEP_, MUON_JORDAN_STEP_, MUON_JORDAN_STEP_, MUON_JORDAN_STEP_, MUON_JORDAN_STEP_}},
        {1.02f, {{8.156554525f, -22.48329293f, 15.87876992f},
                 {4.042929935f, -2.808917466f, 0.5000178451f},
                 {3.891667802f, -2.772484153f, 0.5060648178f},
                 {3.285753658f, -2.368129493f, 0.4644902423f},
                 {2.346541326f, -1.709782838f, 0.4232355117f}}},
    };
#undef MUON_JORDAN_STEP_
    // clang-format on
    return &iterations[polynomial];
}

// Returns the momentum of update t, from 1: 0.85, rising to 0.95 in 300 updates.
static inline float muon_momentum(int64_t t) { return (float)(0.85 + 0.1 * fmin((double)(t - 1) / 300, 1)); }

float muon_factor(Muon opt, size_t rows, size_t cols);

// Counts the operations of the matmuls.
double muon_flops(double rows, double cols);

// Returns the scratch bytes for rows x cols.
size_t muon_scratch_bytes(size_t rows, size_t cols);

// Updates b (n) and sets u (n): any elements of a matrix; in 8 bits from the start of a block.
void muon_operand_cpu(float* u, const float* grad, Moment b, size_t n, Muon opt);

void muon_update_cpu(MuonMatrix x, Muon opt, const MuonScratch* scratch);

// The two steps of an update. The first returns X (rows, cols), in the scratch memory; the second
// moves n elements, from x.param on, by `by`, a part of X.
const float* muon_turn_cpu(MuonMatrix x, Muon opt, const MuonScratch* scratch);

void muon_move_cpu(MuonMatrix x, Muon opt, const float* by, size_t n);

#ifdef __cplusplus
}
#endif

#ifdef MUON_IMPLEMENTATION

#include "llmc/ops/gradient_norm.h"
#include "llmc/base/host_device.h"
#include "llmc/base/wide_sum.h"

float muon_factor(Muon opt, size_t rows, size_t cols) {
    const double r = (double)rows, c = (double)cols;
    return (float)(opt.scale == MUON_SPECTRAL ? sqrt(fmax(1, r / c)) : 0.2 * sqrt(fmax(r, c)));
}

static size_t muon_side_(size_t rows, size_t cols) { return rows < cols ? rows : cols; }

double muon_flops(double rows, double cols) {
    const double s = fmin(rows, cols), l = fmax(rows, cols);
    return MUON_ITERATIONS * (4 * s * s * l + 2 * s * s * s);
}

// Two matrices of the size of X, two Gram matrices, and room for sums.
typedef struct {
    double* sums; // sums over blocks of u, or over rows of X
    float *x, *next, *gram, *polynomial;
} MuonWork_;

static size_t muon_sums_(size_t rows, size_t cols) {
    const size_t blocks = rows * cols / GRADIENT_BLOCK + 1;
    return rows > blocks ? rows : blocks;
}

size_t muon_scratch_bytes(size_t rows, size_t cols) {
    const size_t side = muon_side_(rows, cols);
    return muon_sums_(rows, cols) * sizeof(double) + (2 * rows * cols + 2 * side * side) * sizeof(float);
}

static MuonWork_ muon_work_(MuonMatrix part, const MuonScratch* scratch) {
    const size_t n = part.rows * part.cols, side = muon_side_(part.rows, part.cols);
    MuonWork_ work;
    work.sums = (double*)scratch->memory;
    work.x = (float*)(work.sums + muon_sums_(part.rows, part.cols));
    work.next = work.x + n;
    work.gram = work.next + n;
    work.polynomial = work.gram + side * side;
    return work;
}

// Returns momentum b + (1 - momentum) g: the new b; from the new b, Nesterov's u.
ALWAYS_INLINE float muon_mix_(float b, float grad, Muon opt) {
    return multiply_add(opt.momentum, b, (1.0f - opt.momentum) * (grad * opt.grad_scale));
}

// Does so with b in 8 bits, block by block.
static void muon_operand_8bit_(float* u, const float* grad, Moment b, size_t n, Muon opt) {
    const MomentTables tables = moment_tables();
#pragma omp parallel for schedule(static)
    for (size_t at = 0; at < n; at += ADAMW8BIT_BLOCK) {
        const size_t count = n - at < ADAMW8BIT_BLOCK ? n - at : ADAMW8BIT_BLOCK;
        const Moment block = moment_from(b, at);
        float mixed[ADAMW8BIT_BLOCK];
        moment_read(mixed, block, count, &tables);
        for (size_t i = 0; i < count; i++) {
            mixed[i] = muon_mix_(mixed[i], grad[at + i], opt);
        }
        moment_write(block, mixed, count, &tables);
        for (size_t i = 0; i < count; i++) {
            u[at + i] = muon_mix_(mixed[i], grad[at + i], opt);
        }
    }
}

void muon_operand_cpu(float* u, const float* grad, Moment b, size_t n, Muon opt) {
    if (b.m8) {
        muon_operand_8bit_(u, grad, b, n, opt);
        return;
    }
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float mixed = muon_mix_(b.m[i], grad[i], opt);
        b.m[i] = mixed;
        u[i] = muon_mix_(mixed, grad[i], opt);
    }
}

// Sets x to u / (margin |u| + MUON_EPS).
static void muon_direction_(MuonMatrix part, Muon opt, const MuonWork_* work) {
    const size_t n = part.rows * part.cols;
    float* x = work->x;
    if (part.u) {
        memcpy(x, part.u, n * sizeof(float));
    } else {
        muon_operand_cpu(x, part.grad, part.b, n, opt);
    }
    WideSum squares = {0, 0};
    gradient_square_sum_cpu(&squares, x, n, work->sums);
    const double margin = (double)muon_iteration(opt.polynomial)->margin;
    const float scale = (float)(1 / (margin * sqrt(wide_sum_value(squares)) + MUON_EPS));
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        x[i] *= scale;
    }
}

// polynomial = a gram + aa gram gram, side x side. The Gram matrix is its own transpose.
static void muon_polynomial_(const MuonWork_* work, size_t side, MuonCoefficients k, MatmulScratch* matmul) {
    const int s = (int)side;
    matmul_forward_cpu(work->polynomial, work->gram, work->gram, NULL, (MatmulSizes){s, s, s}, matmul);
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < side * side; i++) {
        work->polynomial[i] = multiply_add(k.a, work->gram[i], k.aa * work->polynomial[i]);
    }
}

// Makes one step of the iteration, from x to x.
static void muon_iterate_(MuonWork_* work, size_t rows, size_t cols, MuonCoefficients k,
                          MatmulScratch* matmul) {
    const int r = (int)rows, c = (int)cols;
    const float* x = work->x;
    float* next = work->next;
    if (r <= c) {
        matmul_forward_cpu(work->gram, x, x, NULL, (MatmulSizes){r, c, r}, matmul);
        muon_polynomial_(work, rows, k, matmul);
        matmul_backward_input_cpu(next, work->polynomial, x, (MatmulSizes){r, c, r}, matmul);
    } else {
        matmul_backward_weight_cpu(work->gram, x, x, (MatmulSizes){r, c, c}, GRADIENT_SET, matmul);
        muon_polynomial_(work, cols, k, matmul);
        matmul_forward_cpu(next, x, work->polynomial, NULL, (MatmulSizes){r, c, c}, matmul);
    }
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < rows * cols; i++) {
        next[i] += k.x * x[i];
    }
    work->next = work->x;
    work->x = next;
}

// Divides the rows of x by the root of the running mean of their squares, and rescales x to its
// norm before.
static void muon_balance_rows_(MuonMatrix part, Muon opt, const MuonWork_* work) {
    float* mean = part.row_squares;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < part.rows; i++) {
        const float* x = work->x + i * part.cols;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t j = 0; j < part.cols; j++) {
            sum += (double)x[j] * x[j];
        }
        work->sums[i] = sum;
        mean[i] = opt.rows_beta2 * mean[i] + (1.0f - opt.rows_beta2) * (float)(sum / (double)part.cols);
    }
    double before = 0, after = 0;
    for (size_t i = 0; i < part.rows; i++) {
        before += work->sums[i];
        after += work->sums[i] / fmaxf(mean[i], MUON_ROW_SQUARES);
    }
    const double norm = after > 0 ? sqrt(before / after) : 0;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < part.rows; i++) {
        const float factor = (float)(norm / sqrt(fmaxf(mean[i], MUON_ROW_SQUARES)));
        for (size_t j = 0; j < part.cols; j++) {
            work->x[i * part.cols + j] *= factor;
        }
    }
}

void muon_move_cpu(MuonMatrix x, Muon opt, const float* by, size_t n) {
    const float rate = opt.lr * muon_factor(opt, x.rows, x.cols), keep = 1.0f - opt.lr * opt.weight_decay;
    float* param = x.param;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        param[i] = multiply_add(decay_keep(keep, opt.decay, by[i], param[i]), param[i], -rate * by[i]);
    }
}

const float* muon_turn_cpu(MuonMatrix part, Muon opt, const MuonScratch* scratch) {
    MuonWork_ work = muon_work_(part, scratch);
    muon_direction_(part, opt, &work);
    for (int k = 0; k < MUON_ITERATIONS; k++) {
        muon_iterate_(&work, part.rows, part.cols, muon_iteration(opt.polynomial)->steps[k], scratch->matmul);
    }
    if (part.row_squares) {
        muon_balance_rows_(part, opt, &work);
    }
    return work.x;
}

void muon_update_cpu(MuonMatrix x, Muon opt, const MuonScratch* scratch) {
    muon_move_cpu(x, opt, muon_turn_cpu(x, opt, scratch), x.rows * x.cols);
}

#endif // MUON_IMPLEMENTATION

#endif
