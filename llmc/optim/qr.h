/*
qr.h -- an orthonormal basis from the rows of a square matrix: the contract, and the CPU version.

    z = l q      l: lower triangular, q: orthonormal rows

This is the QR decomposition of the transpose of z.

    z       (n, n)   fp32, overwritten
    q       (n, n)   fp32, set
    factors (n)      fp32, scratch

Rows 0 ... i of q span the same space as rows 0 ... i of z. Householder reflections make q, so it is
orthonormal to fp32's precision for any z, even with linearly dependent rows. If z is zero, q is the
identity. l may have negative numbers on its diagonal.

A reflection is I - factor v v^T; v takes the place of the end of a row of z. A panel of QR_PANEL
rows is reflected first, then each row below it by all reflections of the panel, while it is in the
cache. Every row is the work of one thread, so the bits do not depend on their number.

needs:   finite numbers, whose squares are within fp32's range
*/
#ifndef LLMC_QR_H
#define LLMC_QR_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QR_PANEL = 32 }; // rows

// Counts the operations for a matrix of n rows: half of them for the reflections, half for q.
static inline double qr_flops(double n) { return 8.0 / 3 * n * n * n; }

void qr_rows_cpu(float* q, float* z, float* factors, size_t n);

#ifdef __cplusplus
}
#endif

#ifdef QR_IMPLEMENTATION

#include <math.h>
#include <string.h>

// Returns the inner product of two vectors.
static float qr_dot_(const float* a, const float* b, size_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t k = 0; k < n; k++) {
        sum += a[k] * b[k];
    }
    return sum;
}

// Replaces x by the v of the reflection that moves x onto the first axis. Returns its factor.
static float qr_reflection_(float* x, size_t n) {
    const float norm = sqrtf(qr_dot_(x, x, n));
    if (!(norm > 0)) {
        return 0;
    }
    for (size_t k = 0; k < n; k++) {
        x[k] /= norm;
    }
    const float first = fabsf(x[0]);
    x[0] = copysignf(1 + first, x[0]); // away from zero, so that nothing cancels
    return 1 / (1 + first);
}

static void qr_reflect_(float* x, const float* v, float factor, size_t n) {
    const float along = factor * qr_dot_(x, v, n);
#pragma omp simd
    for (size_t k = 0; k < n; k++) {
        x[k] -= along * v[k];
    }
}

// Reflects row j by reflections first ... end-1.
static void qr_reflect_row_(float* z, const float* factors, size_t n, size_t j, size_t first, size_t end) {
    for (size_t i = first; i < end; i++) {
        qr_reflect_(z + j * n + i, z + i * n + i, factors[i], n - i);
    }
}

static size_t qr_panel_end_(size_t first, size_t n) { return first + QR_PANEL < n ? first + QR_PANEL : n; }

static void qr_panel_(float* z, float* factors, size_t n, size_t first, size_t end) {
    for (size_t i = first; i < end; i++) {
        qr_reflect_row_(z, factors, n, i, first, i);
        factors[i] = qr_reflection_(z + i * n + i, n - i);
    }
}

// Sets rows first ... end-1 of q: axis j, reflected by j ... 0. A v stays in the cache meanwhile.
static void qr_basis_(float* q, const float* z, const float* factors, size_t n, size_t first, size_t end) {
    memset(q + first * n, 0, (end - first) * n * sizeof(float));
    for (size_t i = end; i-- > 0;) {
        for (size_t j = i > first ? i : first; j < end; j++) {
            q[j * n + j] = i == j ? 1 : q[j * n + j];
            qr_reflect_(q + j * n + i, z + i * n + i, factors[i], n - i);
        }
    }
}

void qr_rows_cpu(float* q, float* z, float* factors, size_t n) {
    for (size_t first = 0; first < n; first += QR_PANEL) {
        const size_t end = qr_panel_end_(first, n);
        qr_panel_(z, factors, n, first, end);
#pragma omp parallel for schedule(static)
        for (size_t j = end; j < n; j++) {
            qr_reflect_row_(z, factors, n, j, first, end);
        }
    }
#pragma omp parallel for schedule(static, 1)
    for (size_t first = 0; first < n; first += QR_PANEL) {
        qr_basis_(q, z, factors, n, first, qr_panel_end_(first, n));
    }
}

#endif // QR_IMPLEMENTATION

#endif
