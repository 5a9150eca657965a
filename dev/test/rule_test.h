/*
rule_test.h -- what the tests of the optimizer's rules on the GPU share: weights of all kinds in device memory, and what
they should be after an update.

defines: rule_padded, rule_spread, rule_round, rule_prepare, RuleWeights, rule_weights_open, rule_weights_close,
         rule_expect_near, rule_expect_rounded
*/
#ifndef DEV_RULE_TEST_H
#define DEV_RULE_TEST_H

#include "llmc/update.cuh"
#include "gpu_ops.h"

// Tensors start at multiples of this, and what is between them is theirs.
static inline size_t rule_padded(size_t n) { return (n + 127) / 128 * 128; }

// (n) random numbers over six decades.
static inline float* rule_spread(size_t n, float scale) {
    float *x = ops_normal(n, scale), *decade = ops_normal(n, 1);
    for (size_t i = 0; i < n; i++) {
        x[i] *= powf(10, -fabsf(fmodf(2 * decade[i], 6)));
    }
    return x;
}

template <class G> static float* rule_round(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] = to_float(from_float<G>(x[i]));
    }
    return x;
}

// Weights that T, with master weights of this kind, has exactly.
template <class T> static void rule_prepare(float* param, size_t n, MasterWeights kind) {
    if (kind == MASTER_NONE) {
        rule_round<T>(param, n);
    }
}

template <class T> struct RuleWeights {
    Weights<T> weights;
    size_t n;
};

static inline uint16_t rule_lower_half_(float x) { return split_float(x).lower; }

template <class T> static T rule_upper_(float x, MasterWeights kind) {
    return from_float<T>(kind == MASTER_SPLIT ? to_float(split_float(x).upper) : x);
}

// Device memory with weights of these values, until rule_weights_close.
template <class T>
static RuleWeights<T> rule_weights_open(const float* x, size_t n, MasterWeights kind, const Gpu* gpu) {
    T* upper = (T*)check_alloc(n, sizeof(T), "weights");
    uint16_t* lower = (uint16_t*)check_alloc(n, sizeof(uint16_t), "lower halves");
    for (size_t i = 0; i < n; i++) {
        upper[i] = rule_upper_<T>(x[i], kind);
        lower[i] = rule_lower_half_(x[i]);
    }
    RuleWeights<T> w = {{(T*)gpu_alloc(n, sizeof(T), "params"), NULL, kind}, n};
    w.weights.master = kind == MASTER_NONE ? NULL : gpu_alloc(n, master_bytes(kind), "master");
    CUDA_CHECK(cudaMemcpyAsync(w.weights.params, upper, n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    if (kind != MASTER_NONE) {
        CUDA_CHECK(cudaMemcpyAsync(w.weights.master,
                                   kind == MASTER_SPLIT ? (const void*)lower : (const void*)x,
                                   n * master_bytes(kind), cudaMemcpyHostToDevice, gpu->stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(lower);
    free(upper);
    return w;
}

// The values as an update reads them; the parameters are those, rounded to nearest.
template <class T> static float* rule_weights_close(RuleWeights<T>* w, const Gpu* gpu) {
    const MasterWeights kind = w->weights.kind;
    float *params = download(w->weights.params, w->n, gpu), *x = params;
    if (kind == MASTER_FP32) {
        x = download((const float*)w->weights.master, w->n, gpu);
    } else if (kind == MASTER_SPLIT) {
        uint16_t* lower = (uint16_t*)check_alloc(w->n, sizeof(uint16_t), "lower halves");
        CUDA_CHECK(cudaMemcpyAsync(lower, w->weights.master, w->n * sizeof(*lower), cudaMemcpyDeviceToHost,
                                   gpu->stream));
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        x = ops_floats(w->n);
        for (size_t i = 0; i < w->n; i++) {
            x[i] = split_join(from_float<bf16>(params[i]), lower[i]);
        }
        free(lower);
    }
    for (size_t i = 0; i < w->n && kind != MASTER_NONE; i++) {
        const float want = to_float(rule_upper_<T>(x[i], kind));
        EXPECT(params[i] == want, "%s, master %d: parameter %zu is %g, wanted %g", dtype_name(DTYPE_OF(T)),
               kind, i, params[i], want);
    }
    gpu_free(w->weights.master);
    gpu_free(w->weights.params);
    return x;
}

// |got - want| is at most `units` of FLT_EPSILON of |want| + `more`.
static inline void rule_expect_near(const char* what, const char* name, const float* got, const float* want,
                                    size_t n, double units, double more) {
    for (size_t i = 0; i < n; i++) {
        const double tolerance = units * FLT_EPSILON * (fabs(want[i]) + more) + FLT_MIN;
        if (!(fabs((double)got[i] - want[i]) <= tolerance)) {
            EXPECT(0, "%s: %s at %zu: %.9g, wanted %.9g, +- %.2g", what, name, i, got[i], want[i], tolerance);
            return;
        }
    }
}

// `got` (n) is `exact` rounded stochastically to T, with these words.
template <class T>
static void rule_expect_rounded(const char* what, const float* got, const float* exact, size_t n,
                                RoundingWords words) {
    for (size_t i = 0; i < n; i++) {
        const uint64_t word = words.first + i;
        const uint32_t random = rand_block(words.seed, words.stream, word / 4).word[word % 4];
        const float want = to_float(round_stochastic<T>(exact[i], random));
        if (got[i] != want) {
            EXPECT(0, "%s: params at %zu: %.9g, wanted %.9g", what, i, got[i], want);
            return;
        }
    }
}

#endif
