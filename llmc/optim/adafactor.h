/*
adafactor.h -- the Adafactor update: the contract, and the CPU version.

For a matrix, the second moment is kept as the means of its rows and columns. t counts from 1.

    g = grad * grad_scale                    beta2 = min(1 - t^-0.8, beta2_cap)
    row_i = beta2 row_i + (1 - beta2) mean_j(g_ij^2 + 1e-30)
    col_j = beta2 col_j + (1 - beta2) mean_i(g_ij^2 + 1e-30)
    u_ij = g_ij / sqrt(row_i col_j / mean(row))
    u = u / max(1, rms(u) / clip)
    with momentum: m = beta1 m + (1 - beta1) u, and u = m
    param -= rate u + lr weight_decay param

    rate = lr, or with ADAFACTOR_RELATIVE: min(lr, 1 / sqrt(t)) max(1e-3, rms(param))

For a vector v = beta2 v + (1 - beta2) (g^2 + 1e-30) and u = g / sqrt(v); the rest is the same.

    param, grad   (rows, cols) or (n)   fp32
    row           (rows)                fp32
    col           (cols)                fp32
    v             (n)                   fp32
    m             as param              fp32; NULL: no momentum

All state starts as zero. Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear
Memory Cost", arXiv 1804.04235; with a fixed rate it is transformers' Adafactor, with
ADAFACTOR_RELATIVE torch.optim.Adafactor. Sums are made for bands of rows first, whatever the number
of threads, so the bits do not depend on it.
*/
#ifndef LLMC_ADAFACTOR_H
#define LLMC_ADAFACTOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { ADAFACTOR_FIXED, ADAFACTOR_RELATIVE } AdafactorRate;

typedef struct {
    float lr, beta1;    // beta1 is only used with momentum
    float beta2_cap;    // 1: none
    float clip;         // upper bound of rms(u); 1 in the paper
    float weight_decay; // decoupled
    float grad_scale;   // factor of the gradient
    AdafactorRate rate; // fixed, or relative to the parameter
    int64_t t;          // number of the update, from 1
} Adafactor;

typedef struct {
    float* param;
    const float* grad;
    float *row, *col, *m; // m may be NULL
    size_t rows, cols;
} AdafactorMatrix;

#define ADAFACTOR_EPS 1e-30f // added to squares

enum { ADAFACTOR_BAND = 64 };

// Counts the bytes moved for a matrix of n elements: read grad three times, write param, read it
// once, or twice with a relative rate; read and write m. State of rows and columns is small.
static inline double adafactor_bytes(double n, Adafactor opt) {
    return (12 + 8 + (opt.rate == ADAFACTOR_RELATIVE ? 4 : 0) + (opt.beta1 > 0 ? 8 : 0)) * n;
}

static inline float adafactor_beta2(Adafactor opt) {
    return fminf((float)(1 - pow((double)opt.t, -0.8)), opt.beta2_cap);
}

// Returns the step size for a parameter of this RMS.
HOST_DEVICE float adafactor_rate(Adafactor opt, double rms) {
    return opt.rate == ADAFACTOR_FIXED
               ? opt.lr
               : (float)(fmin((double)opt.lr, 1 / sqrt((double)opt.t)) * fmax(1e-3, rms));
}

// ---- a matrix ----

static inline size_t adafactor_bands_(size_t rows) { return (rows + ADAFACTOR_BAND - 1) / ADAFACTOR_BAND; }

// Returns the scratch bytes for updating any matrix up to rows x cols.
static inline size_t adafactor_scratch_bytes(size_t rows, size_t cols) {
    return adafactor_bands_(rows) * (sizeof(double) + cols * sizeof(float)) + cols * sizeof(float);
}

// scratch: adafactor_scratch_bytes
void adafactor_update_cpu(AdafactorMatrix x, Adafactor opt, void* scratch);

// ---- a vector ----

// One thread: vectors are short.
void adafactor_vector_cpu(float* param, const float* grad, float* v, float* m, size_t n, Adafactor opt);

// ---- the two steps of an update ----

// Update the state of a matrix or a vector, set `u` to the clipped u, and return the rate. `u` may
// be the memory of the gradient. param is only read with ADAFACTOR_RELATIVE.
float adafactor_turn_cpu(AdafactorMatrix x, float* u, Adafactor opt, void* scratch);

float adafactor_turn_vector_cpu(float* u, const float* param, float* v, size_t n, Adafactor opt);

// Moves n weights by a part of the clipped u; m may be NULL. The rate is only read with
// ADAFACTOR_RELATIVE.
void adafactor_move_cpu(float* param, const float* u, float* m, size_t n, float rate, Adafactor opt);

#ifdef __cplusplus
}
#endif

#ifdef ADAFACTOR_IMPLEMENTATION

static size_t adafactor_band_rows_(size_t rows, size_t band) {
    const size_t left = rows - band * ADAFACTOR_BAND;
    return left < ADAFACTOR_BAND ? left : (size_t)ADAFACTOR_BAND;
}

// A matrix in the middle of its update.
typedef struct {
    AdafactorMatrix x;
    Adafactor opt;
    float beta2;
    double row_mean;    // mean(row)
    double* of_band;    // (bands)        sums of bands
    float* col_of_band; // (bands, cols)  sums of squares
    float* col_factor;  // (cols)         1 / sqrt(col)
} AdafactorWork_;

// Sets the rows of a band, and the sums of its columns.
static void adafactor_band_squares_(const AdafactorWork_* work, size_t band) {
    const size_t first = band * ADAFACTOR_BAND, cols = work->x.cols;
    float* sums = work->col_of_band + band * cols;
    memset(sums, 0, cols * sizeof(float));
    for (size_t i = first; i < first + adafactor_band_rows_(work->x.rows, band); i++) {
        const float* grad = work->x.grad + i * cols;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t j = 0; j < cols; j++) {
            const float g = grad[j] * work->opt.grad_scale, square = g * g + ADAFACTOR_EPS;
            sum += square;
            sums[j] += square;
        }
        work->x.row[i] = work->beta2 * work->x.row[i] + (1.0f - work->beta2) * (sum / (float)cols);
    }
}

// Sets the columns, from the sums of the bands.
static void adafactor_columns_(const AdafactorWork_* work) {
    const size_t cols = work->x.cols, bands = adafactor_bands_(work->x.rows);
#pragma omp parallel for schedule(static)
    for (size_t j = 0; j < cols; j++) {
        double sum = 0;
        for (size_t band = 0; band < bands; band++) {
            sum += work->col_of_band[band * cols + j];
        }
        const float mean = (float)(sum / (double)work->x.rows);
        work->x.col[j] = work->beta2 * work->x.col[j] + (1.0f - work->beta2) * mean;
        work->col_factor[j] = 1.0f / sqrtf(work->x.col[j]);
    }
}

// u_ij = grad_ij * this * col_factor_j
static float adafactor_row_factor_(const AdafactorWork_* work, size_t i) {
    return work->opt.grad_scale * (float)sqrt(work->row_mean / work->x.row[i]);
}

static double adafactor_band_u_squares_(const AdafactorWork_* work, size_t band) {
    const size_t first = band * ADAFACTOR_BAND, cols = work->x.cols;
    double total = 0;
    for (size_t i = first; i < first + adafactor_band_rows_(work->x.rows, band); i++) {
        const float *grad = work->x.grad + i * cols, factor = adafactor_row_factor_(work, i);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t j = 0; j < cols; j++) {
            const float u = grad[j] * factor * work->col_factor[j];
            sum += u * u;
        }
        total += sum;
    }
    return total;
}

static double adafactor_band_param_squares_(const AdafactorWork_* work, size_t band) {
    const size_t first = band * ADAFACTOR_BAND, cols = work->x.cols;
    double total = 0;
    for (size_t i = first; i < first + adafactor_band_rows_(work->x.rows, band); i++) {
        const float* param = work->x.param + i * cols;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t j = 0; j < cols; j++) {
            sum += param[j] * param[j];
        }
        total += sum;
    }
    return total;
}

// Returns the sum of squares of all bands.
static double adafactor_sum_(const AdafactorWork_* work,
                             double (*band_squares)(const AdafactorWork_*, size_t)) {
    const size_t bands = adafactor_bands_(work->x.rows);
#pragma omp parallel for schedule(static)
    for (size_t band = 0; band < bands; band++) {
        work->of_band[band] = band_squares(work, band);
    }
    double sum = 0;
    for (size_t band = 0; band < bands; band++) {
        sum += work->of_band[band];
    }
    return sum;
}

// Returns the root of the mean square of a whole matrix.
static double adafactor_rms_(const AdafactorWork_* work,
                             double (*band_squares)(const AdafactorWork_*, size_t)) {
    return sqrt(adafactor_sum_(work, band_squares) / ((double)work->x.rows * (double)work->x.cols));
}

// Numbers that turn the u of an element into its new value.
typedef struct {
    float keep, rate, beta1, clipped; // `clipped`: factor of u
} AdafactorStep_;

static AdafactorStep_ adafactor_step_(Adafactor opt, double u_rms, double param_rms) {
    const AdafactorStep_ step = {1.0f - opt.lr * opt.weight_decay, adafactor_rate(opt, param_rms), opt.beta1,
                                 (float)(1 / fmax(1, u_rms / opt.clip))};
    return step;
}

// Updates the mean of u, which is clipped.
static float adafactor_momentum_(float* m, float u, AdafactorStep_ step) {
    return *m = multiply_add(step.beta1, *m, (1.0f - step.beta1) * u);
}

static float adafactor_new_(float param, float* m, float u, AdafactorStep_ step) {
    return multiply_add(step.keep, param, -step.rate * (m ? adafactor_momentum_(m, u, step) : u));
}

static void adafactor_move_row_(const AdafactorWork_* work, size_t i, AdafactorStep_ step) {
    const size_t cols = work->x.cols;
    const float *grad = work->x.grad + i * cols, factor = adafactor_row_factor_(work, i);
    const float* col_factor = work->col_factor;
    float *param = work->x.param + i * cols, *m = work->x.m ? work->x.m + i * cols : NULL;
#pragma omp simd
    for (size_t j = 0; j < cols; j++) {
        const float u = grad[j] * factor * col_factor[j];
        param[j] = adafactor_new_(param[j], m ? m + j : NULL, u * step.clipped, step);
    }
}

static AdafactorWork_ adafactor_work_(AdafactorMatrix x, Adafactor opt, float beta2, void* scratch) {
    const size_t bands = adafactor_bands_(x.rows);
    AdafactorWork_ work = {x, opt, beta2, 0, (double*)scratch, NULL, NULL};
    work.col_of_band = (float*)(work.of_band + bands);
    work.col_factor = work.col_of_band + bands * x.cols;
    return work;
}

// Sets the rows, and the sums of the columns of all bands.
static void adafactor_squares_(const AdafactorWork_* work) {
    const size_t bands = adafactor_bands_(work->x.rows);
#pragma omp parallel for schedule(static)
    for (size_t band = 0; band < bands; band++) {
        adafactor_band_squares_(work, band);
    }
}

// Updates the state; returns the numbers of the step.
static AdafactorStep_ adafactor_means_(AdafactorWork_* work) {
    const AdafactorMatrix* x = &work->x;
    adafactor_squares_(work);
    adafactor_columns_(work);
    for (size_t i = 0; i < x->rows; i++) {
        work->row_mean += x->row[i] / (double)x->rows;
    }
    const double u_rms = adafactor_rms_(work, adafactor_band_u_squares_),
                 param_rms = work->opt.rate == ADAFACTOR_RELATIVE
                                 ? adafactor_rms_(work, adafactor_band_param_squares_)
                                 : 0;
    return adafactor_step_(work->opt, u_rms, param_rms);
}

void adafactor_update_cpu(AdafactorMatrix x, Adafactor opt, void* scratch) {
    AdafactorWork_ work = adafactor_work_(x, opt, adafactor_beta2(opt), scratch);
    const AdafactorStep_ step = adafactor_means_(&work);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < x.rows; i++) {
        adafactor_move_row_(&work, i, step);
    }
}

float adafactor_turn_cpu(AdafactorMatrix x, float* u, Adafactor opt, void* scratch) {
    AdafactorWork_ work = adafactor_work_(x, opt, adafactor_beta2(opt), scratch);
    const AdafactorStep_ step = adafactor_means_(&work);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < x.rows; i++) {
        const float* grad = x.grad + i * x.cols;
        const float factor = adafactor_row_factor_(&work, i);
        for (size_t j = 0; j < x.cols; j++) {
            u[i * x.cols + j] = grad[j] * factor * work.col_factor[j] * step.clipped;
        }
    }
    return step.rate;
}

void adafactor_move_cpu(float* param, const float* u, float* m, size_t n, float rate, Adafactor opt) {
    AdafactorStep_ step = adafactor_step_(opt, 0, 0);
    step.rate = opt.rate == ADAFACTOR_FIXED ? step.rate : rate;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        param[i] = adafactor_new_(param[i], m ? m + i : NULL, u[i], step);
    }
}

// Updates v; returns the numbers of the step.
static AdafactorStep_ adafactor_vector_means_(const float* param, const float* grad, float* v, size_t n,
                                              Adafactor opt) {
    const float beta2 = adafactor_beta2(opt);
    double squares = 0, weights = 0;
    for (size_t i = 0; i < n; i++) {
        const float g = grad[i] * opt.grad_scale;
        v[i] = beta2 * v[i] + (1.0f - beta2) * (g * g + ADAFACTOR_EPS);
        squares += (double)g * g / v[i];
        weights += opt.rate == ADAFACTOR_RELATIVE ? (double)param[i] * param[i] : 0;
    }
    return adafactor_step_(opt, sqrt(squares / (double)n), sqrt(weights / (double)n));
}

void adafactor_vector_cpu(float* param, const float* grad, float* v, float* m, size_t n, Adafactor opt) {
    const AdafactorStep_ step = adafactor_vector_means_(param, grad, v, n, opt);
    for (size_t i = 0; i < n; i++) {
        const float u = grad[i] * opt.grad_scale / sqrtf(v[i]) * step.clipped;
        param[i] = adafactor_new_(param[i], m ? m + i : NULL, u, step);
    }
}

float adafactor_turn_vector_cpu(float* u, const float* param, float* v, size_t n, Adafactor opt) {
    const AdafactorStep_ step = adafactor_vector_means_(param, u, v, n, opt);
    for (size_t i = 0; i < n; i++) {
        u[i] = u[i] * opt.grad_scale / sqrtf(v[i]) * step.clipped;
    }
    return step.rate;
}

#endif // ADAFACTOR_IMPLEMENTATION

#endif
