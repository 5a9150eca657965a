/*
rule_test.h -- helpers for tests of the optimizer's rules on the GPU: weights of all kinds in device
memory, and their expected values after an update.
*/
#ifndef DEV_RULE_TEST_H
#define DEV_RULE_TEST_H

#include "llmc/optim/master_weights.cuh"
#include "dev/test/lib/gpu_ops.h"

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

// The last kind of master weights that weights of T have, from MASTER_NONE on.
template <class T> static int rule_last_kind(void) {
    return DTYPE_OF(T) == DTYPE_BF16 ? MASTER_24 : MASTER_FP32;
}

// Returns true if weights of this kind hold every fp32 number.
static inline int rule_is_exact(MasterWeights kind) { return kind == MASTER_FP32 || kind == MASTER_SPLIT; }

// Returns the number nearest to x that T with master weights of this kind can hold.
template <class T> static float rule_kept_(float x, MasterWeights kind) {
    if (kind == MASTER_24) {
        const SplitFloat<int8_t> split = split_float<int8_t>(x);
        return split_join(split.upper, split.lower);
    }
    return kind == MASTER_NONE ? to_float(from_float<T>(x)) : x;
}

// Weights that T, with master weights of this kind, has exactly.
template <class T> static void rule_prepare(float* param, size_t n, MasterWeights kind) {
    for (size_t i = 0; i < n; i++) {
        param[i] = rule_kept_<T>(param[i], kind);
    }
}

template <class T> struct RuleWeights {
    Weights<T> weights;
    size_t n;
};

// The parameter of a weight.
template <class T> static T rule_upper_(float x, MasterWeights kind) {
    return from_float<T>(kind == MASTER_24      ? to_float(split_float<int8_t>(x).upper)
                         : kind == MASTER_SPLIT ? to_float(split_float<uint16_t>(x).upper)
                                                : x);
}

// Sets element i of the array of master weights.
static inline void rule_set_master_(void* master, size_t i, float x, MasterWeights kind) {
    if (kind == MASTER_FP32) {
        ((float*)master)[i] = x;
    } else if (kind == MASTER_SPLIT) {
        ((uint16_t*)master)[i] = split_float<uint16_t>(x).lower;
    } else if (kind == MASTER_24) {
        ((int8_t*)master)[i] = split_float<int8_t>(x).lower;
    }
}

// The weight that both are.
static inline float rule_join_(float param, const void* master, size_t i, MasterWeights kind) {
    const bf16 upper = from_float<bf16>(param);
    return kind == MASTER_FP32    ? ((const float*)master)[i]
           : kind == MASTER_SPLIT ? split_join(upper, ((const uint16_t*)master)[i])
           : kind == MASTER_24    ? split_join(upper, ((const int8_t*)master)[i])
                                  : param;
}

// Device memory with weights of these values, until rule_weights_close.
template <class T>
static RuleWeights<T> rule_weights_open(const float* x, size_t n, MasterWeights kind, const Gpu* gpu) {
    T* params = (T*)check_alloc(n, sizeof(T), "weights");
    void* master = check_alloc(n, sizeof(float), "master weights");
    for (size_t i = 0; i < n; i++) {
        params[i] = rule_upper_<T>(x[i], kind);
        rule_set_master_(master, i, x[i], kind);
    }
    RuleWeights<T> w = {{(T*)gpu_alloc(n, sizeof(T), "params"), NULL, kind}, n};
    CUDA_CHECK(cudaMemcpyAsync(w.weights.params, params, n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    if (kind != MASTER_NONE) {
        w.weights.master = gpu_alloc(n, master_bytes(kind), "master");
        CUDA_CHECK(cudaMemcpyAsync(w.weights.master, master, n * master_bytes(kind), cudaMemcpyHostToDevice,
                                   gpu->stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(master);
    free(params);
    return w;
}

// The values as an update reads them; the parameters are those, rounded to nearest.
template <class T> static float* rule_weights_close(RuleWeights<T>* w, const Gpu* gpu) {
    const MasterWeights kind = w->weights.kind;
    float *params = download(w->weights.params, w->n, gpu), *x = params;
    void* master = check_alloc(w->n, sizeof(float), "master weights");
    if (kind != MASTER_NONE) {
        x = ops_floats(w->n);
        CUDA_CHECK(cudaMemcpyAsync(master, w->weights.master, w->n * master_bytes(kind),
                                   cudaMemcpyDeviceToHost, gpu->stream));
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    }
    for (size_t i = 0; i < w->n && kind != MASTER_NONE; i++) {
        x[i] = rule_join_(params[i], master, i, kind);
        const float want = to_float(rule_upper_<T>(x[i], kind));
        EXPECT(params[i] == want, "%s, master %d: parameter %zu is %g, wanted %g", dtype_name(DTYPE_OF(T)),
               kind, i, params[i], want);
    }
    free(master);
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

// `got` (n) is `exact` rounded: without master weights stochastically to T, with these words.
template <class T>
static void rule_expect_rounded(const char* what, const float* got, const float* exact, size_t n,
                                MasterWeights kind, RoundingWords words) {
    for (size_t i = 0; i < n; i++) {
        const uint64_t word = words.first + i;
        const uint32_t random = rand_block(words.seed, words.stream, word / 4).word[word % 4];
        const float want = kind == MASTER_NONE ? to_float(round_stochastic<T>(exact[i], random))
                                               : rule_kept_<T>(exact[i], kind);
        if (got[i] != want) {
            EXPECT(0, "%s: params at %zu: %.9g, wanted %.9g", what, i, got[i], want);
            return;
        }
    }
}

#endif
