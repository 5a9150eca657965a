/*
activation.h -- the activation of an MLP's hidden layer: the contract, and the CPU version.

    ACTIVATION_GELU     act = x/2 (1 + tanh(v)) = x s     v = sqrt(2/pi) (x + 0.044715 x^3)
                        d act / d x = s + 2 x s (1 - s) dv/dx
                        with s = sigmoid(2v), which loses no digits near 0
    ACTIVATION_SWIGLU   act = g s u                       s = sigmoid(g)
                        d act / d g = u s (1 + g (1 - s))     d act / d u = g s
    ACTIVATION_GEGLU    act = GELU(g) u
                        d act / d g = u GELU'(g)              d act / d u = GELU(g)
    ACTIVATION_CLAMPED  act = h s (c + 1)                 h = min(g, 7)    s = sigmoid(1.702 h)
                        d act / d g = (c + 1) s (1 + 1.702 h (1 - s)), 0 above the limit
                        d act / d u = h s             c = u, at least -7, at most 7; 0 outside
    ACTIVATION_RELU2    act = max(x, 0)^2                 d act / d x = 2 max(x, 0)

    act, dact    (N, F)
    pre, dpre    (N, gates F)   x; or g, the gate, in the first F columns, and u, up, in the others

Both passes set their output. With one gate, dpre may be dact.

GELU in its tanh form: Hendrycks and Gimpel, "Gaussian error linear units", 2016; SwiGLU: Shazeer,
"GLU variants improve transformer", 2020; clamped: OpenAI, gpt-oss, 2025; the square of ReLU: So et
al., "Primer", 2021.
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

#define CLAMPED_LIMIT 7.0f

#define CLAMPED_SLOPE 1.702f

// X(kind, word, name): activations of one value; NAME_vec and NAME_precise_ here, NAME_value_ and
// NAME_slope_ in activation.cuh compute them.
// clang-format off
#define ACTIVATIONS_PLAIN(X) \
    X(ACTIVATION_GELU, "GELU", gelu) \
    X(ACTIVATION_RELU2, "squared ReLU", relu2)

// X(kind, word, name, gate, up): a function of a value times the activation of a gate, which UP_up_vec_,
// GATE_vec and GATE_precise_ here, and UP_up_ and GATE_gate_ in activation.cuh compute.
#define ACTIVATIONS_GATED(X) \
    X(ACTIVATION_SWIGLU, "SwiGLU", swiglu, silu, plain) \
    X(ACTIVATION_GEGLU, "GeGLU", geglu, gelu, plain) \
    X(ACTIVATION_CLAMPED, "clamped SwiGLU", clamped, limited, raised)
// clang-format on

#define ACTIVATION_VALUE_(kind, ...) kind,
#define ACTIVATION_WORD_(kind, word, ...)                                                                    \
    case kind:                                                                                               \
        return word;
#define ACTIVATION_CASE(kind, ...) case kind:

typedef enum { ACTIVATIONS_PLAIN(ACTIVATION_VALUE_) ACTIVATIONS_GATED(ACTIVATION_VALUE_) } ActivationKind;
#define ACTIVATION_ONE_(...) +1
#define ACTIVATION_COUNT (0 ACTIVATIONS_PLAIN(ACTIVATION_ONE_) ACTIVATIONS_GATED(ACTIVATION_ONE_))

static inline const char* activation_word(ActivationKind kind) {
    switch (kind) { ACTIVATIONS_PLAIN(ACTIVATION_WORD_) ACTIVATIONS_GATED(ACTIVATION_WORD_) }
    return "";
}

// Returns the columns of the hidden layer before the activation, in units of F.
static inline int activation_gates(ActivationKind kind) {
    switch (kind) {
        ACTIVATIONS_PLAIN(ACTIVATION_CASE)
        return 1;
        ACTIVATIONS_GATED(ACTIVATION_CASE)
        return 2;
    }
    return 0;
}

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

// Returns exp(-x), finite. Then s = 1 / (1 + e) and 1 - s = e s.
ALWAYS_INLINE Vec silu_exp_(Vec x) { return vec_exp2(vec_min(vec_all(126.0f), -LOG2_E * x)); }

ALWAYS_INLINE ActivationVec silu_of_(Vec x, Vec e, Vec s) {
    const Vec out = x * s;
    const ActivationVec y = {out, s + out * (e * s)};
    return y;
}

// Returns the gate of SwiGLU by an approximate reciprocal: precise to about 2e-7.
ALWAYS_INLINE ActivationVec silu_vec(Vec x) {
    const Vec e = silu_exp_(x);
    return silu_of_(x, e, vec_reciprocal(1.0f + e));
}

// Returns the gate of clamped SwiGLU, given e = exp(-CLAMPED_SLOPE h), finite, and s = 1 / (1 + e).
ALWAYS_INLINE ActivationVec limited_of_(Vec x, Vec h, Vec e, Vec s) {
    const Vec out = h * s;
    const ActivationVec y = {out,
                             vec_select(x > CLAMPED_LIMIT, vec_all(0.0f), s + CLAMPED_SLOPE * out * (e * s))};
    return y;
}

ALWAYS_INLINE ActivationVec limited_vec(Vec x) {
    const Vec h = vec_min(vec_all(CLAMPED_LIMIT), x), e = silu_exp_(CLAMPED_SLOPE * h); // NaN stays
    return limited_of_(x, h, e, vec_reciprocal(1.0f + e));
}

// Return what multiplies the gate, and its derivative.
ALWAYS_INLINE ActivationVec plain_up_vec_(Vec x) {
    const ActivationVec y = {x, vec_all(1.0f)};
    return y;
}

ALWAYS_INLINE ActivationVec raised_up_vec_(Vec x) {
    const Vec c = vec_max(vec_all(-CLAMPED_LIMIT), vec_min(vec_all(CLAMPED_LIMIT), x));
    const ActivationVec y = {1.0f + c, vec_select(c == x, vec_all(1.0f), vec_all(0.0f))};
    return y;
}

// An activation with a gate and its two derivatives, of LANES elements.
typedef struct {
    Vec out, by_gate, by_up;
} GatedVec;

ALWAYS_INLINE GatedVec gated_of_(ActivationVec gate, ActivationVec up) {
    const GatedVec y = {gate.out * up.out, up.out * gate.derivative, gate.out * up.derivative};
    return y;
}

// Define NAME_vec(gate, up) of each.
#define ACTIVATION_GATED_VEC_(kind, word, name, of, times)                                                   \
    ALWAYS_INLINE GatedVec name##_vec(Vec gate, Vec up) {                                                    \
        return gated_of_(of##_vec(gate), times##_up_vec_(up));                                               \
    }
ACTIVATIONS_GATED(ACTIVATION_GATED_VEC_)

void activation_forward_cpu(float* act, const float* pre, size_t N, size_t F, ActivationKind kind);

void activation_backward_cpu(float* dpre, const float* dact, const float* pre, size_t N, size_t F,
                             ActivationKind kind);

// Sets a row of act = scale times the activation, of a kind with a gate, of a row of pre.
void activation_row_cpu(float* act, const float* pre, float scale, size_t F, ActivationKind kind);

// Sets dpre of that row, and returns dscale, from dact.
float activation_row_backward_cpu(float* dpre, const float* dact, const float* pre, float scale, size_t F,
                                  ActivationKind kind);

#ifdef __cplusplus
}
#endif

#ifdef ACTIVATION_IMPLEMENTATION

ALWAYS_INLINE ActivationVec gelu_precise_(Vec x) {
    const Vec e = gelu_exp_(x), s = 1.0f / (1.0f + e);
    const ActivationVec y = {x / (1.0f + e),
                             s + 2.0f * x * s * (e * s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x)};
    return y;
}

ALWAYS_INLINE ActivationVec relu2_precise_(Vec x) { return relu2_vec(x); }

ALWAYS_INLINE ActivationVec silu_precise_(Vec x) {
    const Vec e = silu_exp_(x);
    return silu_of_(x, e, 1.0f / (1.0f + e));
}

ALWAYS_INLINE ActivationVec limited_precise_(Vec x) {
    const Vec h = vec_min(vec_all(CLAMPED_LIMIT), x), e = silu_exp_(CLAMPED_SLOPE * h);
    return limited_of_(x, h, e, 1.0f / (1.0f + e));
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

// Defines both passes of an activation of one value.
#define ACTIVATION_PASSES_(kind, word, name)                                                                 \
    static void name##_forward_(float* act, const float* pre, size_t N, size_t F) {                          \
        const size_t n = N * F;                                                                              \
        _Pragma("omp parallel for schedule(static)") for (size_t i = 0; i < n; i += LANES) {                 \
            activation_store_(act + i, name##_precise_(activation_load_(pre + i, n - i)).out, n - i);        \
        }                                                                                                    \
    }                                                                                                        \
    static void name##_backward_(float* dpre, const float* dact, const float* pre, size_t N, size_t F) {     \
        const size_t n = N * F;                                                                              \
        _Pragma("omp parallel for schedule(static)") for (size_t i = 0; i < n; i += LANES) {                 \
            const Vec slope = name##_precise_(activation_load_(pre + i, n - i)).derivative;                  \
            activation_store_(dpre + i, activation_load_(dact + i, n - i) * slope, n - i);                   \
        }                                                                                                    \
    }
ACTIVATIONS_PLAIN(ACTIVATION_PASSES_)

// Defines both passes of an activation of a gate and a value, of one row, too, and NAME_at_ of
// columns i, i + 1, ... of a row.
#define ACTIVATION_GATED_PASSES_(kind, word, name, of, times)                                                \
    ALWAYS_INLINE GatedVec name##_at_(const float* row, size_t i, size_t F) {                                \
        return gated_of_(of##_precise_(activation_load_(row + i, F - i)),                                    \
                         times##_up_vec_(activation_load_(row + F + i, F - i)));                             \
    }                                                                                                        \
    static void name##_forward_(float* act, const float* pre, size_t N, size_t F) {                          \
        _Pragma("omp parallel for schedule(static)") for (size_t n = 0; n < N; n++) {                        \
            for (size_t i = 0; i < F; i += LANES) {                                                          \
                activation_store_(act + n * F + i, name##_at_(pre + 2 * n * F, i, F).out, F - i);            \
            }                                                                                                \
        }                                                                                                    \
    }                                                                                                        \
    static void name##_backward_(float* dpre, const float* dact, const float* pre, size_t N, size_t F) {     \
        _Pragma("omp parallel for schedule(static)") for (size_t n = 0; n < N; n++) {                        \
            for (size_t i = 0; i < F; i += LANES) {                                                          \
                const GatedVec y = name##_at_(pre + 2 * n * F, i, F);                                        \
                const Vec d = activation_load_(dact + n * F + i, F - i);                                     \
                activation_store_(dpre + 2 * n * F + i, d * y.by_gate, F - i);                               \
                activation_store_(dpre + 2 * n * F + F + i, d * y.by_up, F - i);                             \
            }                                                                                                \
        }                                                                                                    \
    }                                                                                                        \
    static void name##_row_(float* act, const float* pre, float scale, size_t F) {                           \
        for (size_t i = 0; i < F; i += LANES) {                                                              \
            activation_store_(act + i, scale * name##_at_(pre, i, F).out, F - i);                            \
        }                                                                                                    \
    }                                                                                                        \
    static float name##_row_backward_(float* dpre, const float* dact, const float* pre, float scale,         \
                                      size_t F) {                                                            \
        Vec sum = vec_all(0.0f);                                                                             \
        for (size_t i = 0; i < F; i += LANES) {                                                              \
            const GatedVec y = name##_at_(pre, i, F);                                                        \
            const Vec d = activation_load_(dact + i, F - i), scaled = scale * d;                             \
            sum += d * y.out; /* beyond F, d is 0 */                                                         \
            activation_store_(dpre + i, scaled * y.by_gate, F - i);                                          \
            activation_store_(dpre + F + i, scaled * y.by_up, F - i);                                        \
        }                                                                                                    \
        return vec_hsum(sum);                                                                                \
    }
ACTIVATIONS_GATED(ACTIVATION_GATED_PASSES_)

#define ACTIVATION_ROW_(kind, word, name, ...)                                                               \
    case kind:                                                                                               \
        name##_row_(act, pre, scale, F);                                                                     \
        break;
#define ACTIVATION_ROW_BACKWARD_(kind, word, name, ...)                                                      \
    case kind:                                                                                               \
        return name##_row_backward_(dpre, dact, pre, scale, F);

void activation_row_cpu(float* act, const float* pre, float scale, size_t F, ActivationKind kind) {
    switch (kind) { // with a gate
        ACTIVATIONS_GATED(ACTIVATION_ROW_)
        ACTIVATIONS_PLAIN(ACTIVATION_CASE)
        break;
    }
}

float activation_row_backward_cpu(float* dpre, const float* dact, const float* pre, float scale, size_t F,
                                  ActivationKind kind) {
    switch (kind) {
        ACTIVATIONS_GATED(ACTIVATION_ROW_BACKWARD_)
        ACTIVATIONS_PLAIN(ACTIVATION_CASE)
        break;
    }
    return 0;
}

#define ACTIVATION_FORWARD_(kind, word, name, ...)                                                           \
    case kind:                                                                                               \
        name##_forward_(act, pre, N, F);                                                                     \
        break;
#define ACTIVATION_BACKWARD_(kind, word, name, ...)                                                          \
    case kind:                                                                                               \
        name##_backward_(dpre, dact, pre, N, F);                                                             \
        break;

void activation_forward_cpu(float* act, const float* pre, size_t N, size_t F, ActivationKind kind) {
    switch (kind) { ACTIVATIONS_PLAIN(ACTIVATION_FORWARD_) ACTIVATIONS_GATED(ACTIVATION_FORWARD_) }
}

void activation_backward_cpu(float* dpre, const float* dact, const float* pre, size_t N, size_t F,
                             ActivationKind kind) {
    switch (kind) { ACTIVATIONS_PLAIN(ACTIVATION_BACKWARD_) ACTIVATIONS_GATED(ACTIVATION_BACKWARD_) }
}

#endif // ACTIVATION_IMPLEMENTATION

#endif
