/*
activation.h -- GELU in its tanh form (Hendrycks and Gimpel, "Gaussian error linear units", 2016):
the contract, and the CPU version.

    u   = sqrt(2/pi) (x + 0.044715 x^3)
    out = x/2 (1 + tanh(u)) = x s        with s = sigmoid(2u), which loses no digits near 0
    d out / d x = s + 2 x s (1 - s) du/dx

    out, inp, dinp, dout    (n)    any shape

Both passes set their output. dinp may be dout.
*/
#ifndef LLMC_ACTIVATION_H
#define LLMC_ACTIVATION_H

#include <stddef.h>

#include "llmc/base/vec.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GELU_SCALE 0.7978845608f // sqrt(2/pi)

#define GELU_CUBIC 0.044715f

// Return the bytes of memory traffic of a pass over n elements.
static inline double gelu_forward_bytes(double n, double element_bytes) { return 2 * n * element_bytes; }

static inline double gelu_backward_bytes(double n, double element_bytes) { return 3 * n * element_bytes; }

// Returns e = exp(-2u), finite. Then s = 1 / (1 + e) and 1 - s = e s.
ALWAYS_INLINE Vec gelu_exp_(Vec x) {
    const Vec y = -2.0f * LOG2_E * GELU_SCALE * x * (1.0f + GELU_CUBIC * x * x);
    return vec_exp2(vec_min(vec_all(126.0f), y));
}

// GELU and its derivative of LANES elements, by an approximate reciprocal: precise to about 2e-7.
typedef struct {
    Vec out, derivative;
} GeluVec;

ALWAYS_INLINE GeluVec gelu_vec(Vec x) {
    const Vec e = gelu_exp_(x), s = vec_reciprocal(1.0f + e), out = x * s;
    const GeluVec y = {out, s + 2.0f * out * (e * s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x)};
    return y;
}

void gelu_forward_cpu(float* out, const float* inp, size_t n);

void gelu_backward_cpu(float* dinp, const float* dout, const float* inp, size_t n);

#ifdef __cplusplus
}
#endif

#ifdef ACTIVATION_IMPLEMENTATION

ALWAYS_INLINE Vec gelu_derivative_(Vec x) {
    const Vec e = gelu_exp_(x), s = 1.0f / (1.0f + e);
    return s + 2.0f * x * s * (e * s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x);
}

// Loads LANES elements, or the last n of an array, filled up with zeros.
ALWAYS_INLINE Vec gelu_load_(const float* p, size_t n) {
    if (n >= LANES) {
        return vec_load(p);
    }
    float padded[LANES] = {0};
    memcpy(padded, p, n * sizeof(float));
    return vec_load(padded);
}

ALWAYS_INLINE void gelu_store_(float* p, Vec v, size_t n) {
    if (n >= LANES) {
        vec_store(p, v);
    } else {
        memcpy(p, &v, n * sizeof(float));
    }
}

void gelu_forward_cpu(float* out, const float* inp, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += LANES) {
        const Vec x = gelu_load_(inp + i, n - i);
        gelu_store_(out + i, x / (1.0f + gelu_exp_(x)), n - i);
    }
}

void gelu_backward_cpu(float* dinp, const float* dout, const float* inp, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += LANES) {
        const Vec x = gelu_load_(inp + i, n - i);
        gelu_store_(dinp + i, gelu_load_(dout + i, n - i) * gelu_derivative_(x), n - i);
    }
}

#endif // ACTIVATION_IMPLEMENTATION

#endif
