/*
activation.h -- the activation of an MLP's hidden layer: the contract, and the CPU version.

    ACTIVATION_GELU     act = x/2 (1 + tanh(v)) = x s     v = sqrt(2/pi) (x + 0.044715 x^3)
                        d act / d x = s + 2 x s (1 - s) dv/dx
                        with s = sigmoid(2v), which loses no digits near 0
    ACTIVATION_SWIGLU   act = g s u                       s = sigmoid(g)
                        d act / d g = u s (1 + g (1 - s))     d act / d u = g s
    ACTIVATION_RELU2    act = max(x, 0)^2                 d act / d x = 2 max(x, 0)

    act, dact    (N, F)
    pre, dpre    (N, gates F)   x; or g, the gate, in the first F columns, and u, up, in the others

Both passes set their output. With one gate, dpre may be dact.

GELU in its tanh form: Hendrycks and Gimpel, "Gaussian error linear units", 2016; SwiGLU: Shazeer,
"GLU variants improve transformer", 2020; the square of ReLU: So et al., "Primer", 2021.
*/
#ifndef LLMC_ACTIVATION_H
#define LLMC_ACTIVATION_H

#include <stddef.h>

#include "llmc/base/enum_words.h"
#include "llmc/base/vec.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GELU_SCALE 0.7978845608f // sqrt(2/pi)

#define GELU_CUBIC 0.044715f

// Activations and their names.
// clang-format off
#define ACTIVATION_WORDS(X) \
    X(ACTIVATION_GELU, "GELU") \
    X(ACTIVATION_SWIGLU, "SwiGLU") \
    X(ACTIVATION_RELU2, "squared ReLU")
// clang-format on
typedef enum { ACTIVATION_WORDS(WORDS_VALUE) } ActivationKind;

static inline const char* activation_word(ActivationKind kind) {
    static const char* const words[] = {ACTIVATION_WORDS(WORDS_NAME)};
    return words[kind];
}

// Returns the columns of the hidden layer before the activation, in units of F.
static inline int activation_gates(ActivationKind kind) { return kind == ACTIVATION_SWIGLU ? 2 : 1; }

// Return the bytes of memory traffic of a pass over n = N F results.
static inline double activation_forward_bytes(double n, double element_bytes, ActivationKind kind) {
    return (activation_gates(kind) + 1) * n * element_bytes;
}

static inline double activation_backward_bytes(double n, double element_bytes, ActivationKind kind) {
    return (2 * activation_gates(kind) + 1) * n * element_bytes;
}

// Returns e = exp(-2v), finite. Then s = 1 / (1 + e) and 1 - s = e s.
ALWAYS_INLINE Vec gelu_exp_(Vec x) {
    const Vec y = -2.0f * LOG2_E * GELU_SCALE * x * (1.0f + GELU_CUBIC * x * x);
    return vec_exp2(vec_min(vec_all(126.0f), y));
}

// An activation and its derivative, of LANES elements.
typedef struct {
    Vec out, derivative;
} ActivationVec;

// Returns GELU by an approximate reciprocal: precise to about 2e-7.
ALWAYS_INLINE ActivationVec gelu_vec(Vec x) {
    const Vec e = gelu_exp_(x), s = vec_reciprocal(1.0f + e), out = x * s;
    const ActivationVec y = {out, s + 2.0f * out * (e * s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x)};
    return y;
}

ALWAYS_INLINE ActivationVec relu2_vec(Vec x) {
    const Vec positive = vec_max(vec_all(0.0f), x); // NaN stays
    const ActivationVec y = {positive * positive, 2.0f * positive};
    return y;
}

// SwiGLU and its two derivatives, of LANES elements.
typedef struct {
    Vec out, by_gate, by_up;
} SwigluVec;

// Returns exp(-gate), finite. Then s = 1 / (1 + e) and 1 - s = e s.
ALWAYS_INLINE Vec swiglu_exp_(Vec gate) { return vec_exp2(vec_min(vec_all(126.0f), -LOG2_E * gate)); }

ALWAYS_INLINE SwigluVec swiglu_of_(Vec gate, Vec up, Vec e, Vec s) {
    const Vec swish = gate * s;
    const SwigluVec y = {swish * up, up * (s + swish * (e * s)), swish};
    return y;
}

// Returns SwiGLU by an approximate reciprocal: precise to about 2e-7.
ALWAYS_INLINE SwigluVec swiglu_vec(Vec gate, Vec up) {
    const Vec e = swiglu_exp_(gate);
    return swiglu_of_(gate, up, e, vec_reciprocal(1.0f + e));
}

void activation_forward_cpu(float* act, const float* pre, size_t N, size_t F, ActivationKind kind);

void activation_backward_cpu(float* dpre, const float* dact, const float* pre, size_t N, size_t F,
                             ActivationKind kind);

// Sets a row of act = scale SwiGLU of a row of pre.
void swiglu_row_cpu(float* act, const float* pre, float scale, size_t F);

// Sets dpre of that row, and returns dscale, from dact.
float swiglu_row_backward_cpu(float* dpre, const float* dact, const float* pre, float scale, size_t F);

#ifdef __cplusplus
}
#endif

#ifdef ACTIVATION_IMPLEMENTATION

ALWAYS_INLINE Vec gelu_derivative_(Vec x) {
    const Vec e = gelu_exp_(x), s = 1.0f / (1.0f + e);
    return s + 2.0f * x * s * (e * s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x);
}

// Loads LANES elements, or the last n of an array, filled up with zeros.
ALWAYS_INLINE Vec activation_load_(const float* p, size_t n) {
    if (n >= LANES) {
        return vec_load(p);
    }
    float padded[LANES] = {0};
    memcpy(padded, p, n * sizeof(float));
    return vec_load(padded);
}

ALWAYS_INLINE void activation_store_(float* p, Vec v, size_t n) {
    if (n >= LANES) {
        vec_store(p, v);
    } else {
        memcpy(p, &v, n * sizeof(float));
    }
}

static void gelu_forward_(float* out, const float* inp, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += LANES) {
        const Vec x = activation_load_(inp + i, n - i);
        activation_store_(out + i, x / (1.0f + gelu_exp_(x)), n - i);
    }
}

static void gelu_backward_(float* dinp, const float* dout, const float* inp, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += LANES) {
        const Vec x = activation_load_(inp + i, n - i);
        activation_store_(dinp + i, activation_load_(dout + i, n - i) * gelu_derivative_(x), n - i);
    }
}

static void relu2_forward_(float* out, const float* inp, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += LANES) {
        activation_store_(out + i, relu2_vec(activation_load_(inp + i, n - i)).out, n - i);
    }
}

static void relu2_backward_(float* dinp, const float* dout, const float* inp, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += LANES) {
        const Vec derivative = relu2_vec(activation_load_(inp + i, n - i)).derivative;
        activation_store_(dinp + i, activation_load_(dout + i, n - i) * derivative, n - i);
    }
}

// Returns SwiGLU of columns i, i + 1, ... of a row.
ALWAYS_INLINE SwigluVec swiglu_at_(const float* row, size_t i, size_t F) {
    const Vec gate = activation_load_(row + i, F - i), up = activation_load_(row + F + i, F - i),
              e = swiglu_exp_(gate);
    return swiglu_of_(gate, up, e, 1.0f / (1.0f + e));
}

static void swiglu_forward_(float* act, const float* pre, size_t N, size_t F) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        for (size_t i = 0; i < F; i += LANES) {
            activation_store_(act + n * F + i, swiglu_at_(pre + 2 * n * F, i, F).out, F - i);
        }
    }
}

static void swiglu_backward_(float* dpre, const float* dact, const float* pre, size_t N, size_t F) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        for (size_t i = 0; i < F; i += LANES) {
            const SwigluVec y = swiglu_at_(pre + 2 * n * F, i, F);
            const Vec d = activation_load_(dact + n * F + i, F - i);
            activation_store_(dpre + 2 * n * F + i, d * y.by_gate, F - i);
            activation_store_(dpre + 2 * n * F + F + i, d * y.by_up, F - i);
        }
    }
}

void swiglu_row_cpu(float* act, const float* pre, float scale, size_t F) {
    for (size_t i = 0; i < F; i += LANES) {
        activation_store_(act + i, scale * swiglu_at_(pre, i, F).out, F - i);
    }
}

float swiglu_row_backward_cpu(float* dpre, const float* dact, const float* pre, float scale, size_t F) {
    Vec sum = vec_all(0.0f);
    for (size_t i = 0; i < F; i += LANES) {
        const SwigluVec y = swiglu_at_(pre, i, F);
        const Vec d = activation_load_(dact + i, F - i), scaled = scale * d;
        sum += d * y.out; // beyond F, d is 0
        activation_store_(dpre + i, scaled * y.by_gate, F - i);
        activation_store_(dpre + F + i, scaled * y.by_up, F - i);
    }
    return vec_hsum(sum);
}

void activation_forward_cpu(float* act, const float* pre, size_t N, size_t F, ActivationKind kind) {
    if (kind == ACTIVATION_SWIGLU) {
        swiglu_forward_(act, pre, N, F);
    } else {
        (kind == ACTIVATION_GELU ? gelu_forward_ : relu2_forward_)(act, pre, N * F);
    }
}

void activation_backward_cpu(float* dpre, const float* dact, const float* pre, size_t N, size_t F,
                             ActivationKind kind) {
    if (kind == ACTIVATION_SWIGLU) {
        swiglu_backward_(dpre, dact, pre, N, F);
    } else {
        (kind == ACTIVATION_GELU ? gelu_backward_ : relu2_backward_)(dpre, dact, pre, N * F);
    }
}

#endif // ACTIVATION_IMPLEMENTATION

#endif
