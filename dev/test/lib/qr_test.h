/*
qr_test.h -- helpers for tests of qr.h: matrices of any rank, and the conditions that a basis meets.
*/
#ifndef DEV_QR_TEST_H
#define DEV_QR_TEST_H

#include "dev/test/lib/ops.h"

static const size_t QR_SIZES[] = {1, 2, 31, 33, 64, 97, 130};

// Ranks of a matrix: all rows are independent; only the first half of them; none, it is zero.
typedef enum { QR_FULL, QR_HALF, QR_NONE } QrRank;

// Returns a random matrix of n rows. Rows of the second half are sums of two of the first.
static inline float* qr_test_matrix(size_t n, QrRank rank) {
    float* z = ops_normal(n * n, rank == QR_NONE ? 0 : 3);
    for (size_t i = (n + 1) / 2; i < n && rank == QR_HALF; i++) {
        for (size_t k = 0; k < n; k++) {
            z[i * n + k] = z[(i - n / 2) * n + k] + z[k];
        }
    }
    return z;
}

static inline double qr_test_dot_(const float* a, const float* b, size_t n) {
    double sum = 0;
    for (size_t k = 0; k < n; k++) {
        sum += (double)a[k] * b[k];
    }
    return sum;
}

// Expects q q^T = 1, and z q^T to be lower triangular. A row meets n reflections, each of which
// rounds it by a few units.
static inline void qr_expect_basis(const float* q, const float* z, size_t n, QrRank rank) {
    const double tolerance = 4 * sqrt((double)n) * FLT_EPSILON;
    double unit = 0, upper = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < n; j++) {
            const double in_q = qr_test_dot_(q + i * n, q + j * n, n),
                         in_z = qr_test_dot_(z + i * n, q + j * n, n);
            unit = isfinite(in_q) ? fmax(unit, fabs(in_q - (i == j))) : INFINITY;
            upper = j > i ? fmax(upper, fabs(in_z)) : upper;
        }
        largest = fmax(largest, sqrt(qr_test_dot_(z + i * n, z + i * n, n)));
    }
    EXPECT(unit <= tolerance, "n %zu, rank %d: q q^T is off by %g", n, rank, unit);
    EXPECT(upper <= tolerance * largest, "n %zu, rank %d: z q^T has %g above its diagonal", n, rank, upper);
    for (size_t i = 0; i < n * n && rank == QR_NONE; i++) {
        EXPECT(q[i] == (i % (n + 1) == 0), "n %zu: element %zu of the identity is %g", n, i, (double)q[i]);
    }
}

#endif
