/*
master_weights.cuh -- master weights and stochastic rounding, for every rule of the optimizer on the
GPU.

An update reads a weight as fp32, computes, and writes it back:

    master weights          read                 written
    MASTER_FP32             the master weight    it, and the parameter: rounded to nearest
    MASTER_SPLIT            both halves          both halves: the parameter is rounded to nearest
    MASTER_24               both parts           both parts: 8 bits in place of the lower half
    MASTER_NONE             the parameter        the parameter, rounded stochastically

Split master weights need bf16, which is the upper half of an fp32 number: beside the parameter only
the 16 lower bits are stored. All finite numbers are exact. A tie is rounded away from zero.
MASTER_24 stores a number r from -127 to 126 instead: the weight is the parameter plus r / 127 of
half the distance to the next bf16 number, rounded to the nearest of these (FlashOptim: arXiv
2602.23349). If two such pairs are the same weight, the one with the nearer parameter is used, so a
weight that is stored as fp32 comes back with the same bits.

Stochastic rounding goes up or down with the probabilities that make the result right on average, so
updates smaller than half a unit in the last place are not lost for ever. In update t element i of
layer l of a tensor uses word l 2^40 + i of stream s + t of `seed` (rand.h), s being the stream of
the tensor's name: the word does not depend on the launch, the shards, or other tensors.
*/
#ifndef LLMC_MASTER_WEIGHTS_CUH
#define LLMC_MASTER_WEIGHTS_CUH

#include <assert.h>
#include <string.h>

#include "llmc/base/float16.h"
#include "llmc/base/rand.h"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/optimizer.h"

// Returns the bytes of a master weight beside its parameter.
__host__ __device__ inline size_t master_bytes(MasterWeights master) {
    return master == MASTER_FP32    ? sizeof(float)
           : master == MASTER_SPLIT ? sizeof(uint16_t)
           : master == MASTER_24    ? sizeof(int8_t)
                                    : 0;
}

// ---- stochastic rounding ----

// Rounds x to one of its two neighbors in T, with `random` uniform: on average exactly x, to 2^-32
// of the distance of the neighbors. Numbers of T stay as they are, NaN and infinity too; a finite x
// stays finite.
template <class T> __host__ __device__ inline T round_stochastic(float x, uint32_t random);

template <> __host__ __device__ inline float round_stochastic<float>(float x, uint32_t random) {
    (void)random;
    return x;
}

// Adds a random lower half, which carries or not, and cuts it off: bf16 is the upper half of a
// float.
template <> __host__ __device__ inline bf16 round_stochastic<bf16>(float x, uint32_t random) {
    const uint32_t sign = float_bits(x) & 0x80000000u, magnitude = float_bits(x) ^ sign,
                   largest = 0x7F7F0000u;
    const uint32_t sum = (magnitude + (random >> 16)) & 0xFFFF0000u, rounded = sum < largest ? sum : largest;
    return from_float<bf16>(magnitude < 0x7F800000u ? float_of_bits(sign | rounded) : x);
}

// The neighbors of x in fp16 are multiples of `unit`: 2^-10 of the power of two below |x|, at least
// 2^-24. All steps are exact: multiplications by powers of two, and fewer than 2048 units.
template <> __host__ __device__ inline fp16 round_stochastic<fp16>(float x, uint32_t random) {
    // 113: 2^-14
    const uint32_t exponent = float_bits(fabsf(x)) >> 23, e = exponent > 113 ? exponent : 113;
    if (exponent == 255) {
        return from_float<fp16>(x);
    }
    const float unit = float_of_bits((e - 10) << 23), per_unit = float_of_bits((264 - e) << 23);
    const float units = fabsf(x) * per_unit, whole = floorf(units);
    const float up = random < (uint32_t)((units - whole) * 0x1p32f) ? 1.0f : 0.0f;
    return from_float<fp16>(copysignf(fminf((whole + up) * unit, 65504.0f), x));
}

// ---- split master weights ----

__host__ __device__ inline bf16 bf16_of_bits_(uint32_t bits) {
    const uint16_t half = (uint16_t)bits;
    bf16 x;
    memcpy((void*)&x, &half, sizeof(x));
    return x;
}

// Parts of a split weight. L is uint16_t for all lower bits, int8_t for MASTER_24.
template <class L> struct SplitFloat {
    bf16 upper;
    L lower;
};

template <class L> __host__ __device__ inline SplitFloat<L> split_float(float x);

// A NaN keeps no bits in the lower half: there it could round up to -0.
template <> __host__ __device__ inline SplitFloat<uint16_t> split_float(float x) {
    const uint32_t bits = x == x ? float_bits(x) : 0x7FC00000u;
    const SplitFloat<uint16_t> split = {bf16_of_bits_((bits + 0x8000u) >> 16), (uint16_t)bits};
    return split;
}

__host__ __device__ inline float split_join(bf16 upper, uint16_t lower) {
    const uint32_t rounded_up = lower >> 15;
    return float_of_bits(((float_bits(to_float(upper)) >> 16) - rounded_up) << 16 | lower);
}

// Splits x. The lower half is the signed distance to the upper one: 32768 are half the way to the
// next number. 127 would be that half; it is nearer to the next number, as its -127.
template <> __host__ __device__ inline SplitFloat<int8_t> split_float(float x) {
    const SplitFloat<uint16_t> exact = split_float<uint16_t>(x);
    const int r = ((int16_t)exact.lower * 127 + 16384) >> 15;
    const uint32_t upper = float_bits(to_float(exact.upper)) >> 16;
    const SplitFloat<int8_t> split = {bf16_of_bits_(upper + (r == 127)), (int8_t)(r == 127 ? -127 : r)};
    return split;
}

__host__ __device__ inline float split_join(bf16 upper, int8_t r) {
    const int distance = (r * 65536 + (r < 0 ? -127 : 127)) / 254;
    return float_of_bits(float_bits(to_float(upper)) + (uint32_t)distance);
}

// ---- weights ----

// Random words: element i uses word `first` + i.
typedef struct {
    uint64_t seed, stream, first;
} RoundingWords;

// Returns the words of update t for a tensor, from word `first` on. `stream` is the tensor's; t is
// above 0, so first values (TensorRow.stream) have others.
HOST_DEVICE RoundingWords rounding_words(uint64_t seed, uint64_t stream, int64_t t, uint64_t first) {
    const RoundingWords words = {seed, stream + (uint64_t)t, first};
    return words;
}

// Selects a word without an index, which would put the words into memory.
__device__ inline uint32_t rounding_word_(const RandBlock& random, int i) {
    return i < 2 ? (i == 0 ? random.word[0] : random.word[1]) : (i == 2 ? random.word[2] : random.word[3]);
}

template <class T, int W>
__device__ inline Elements<T, W> weights_round_(const Elements<float, W>& x, const RoundingWords& words,
                                                size_t i) {
    const uint64_t word = words.first + i;
    const RandBlock random = rand_block(words.seed, words.stream, word / 4);
    Elements<T, W> rounded;
#pragma unroll
    for (int k = 0; k < W; k++) {
        rounded[k] =
            round_stochastic<T>(x[k], W == 4 ? random.word[k] : rounding_word_(random, (int)(word % 4)));
    }
    return rounded;
}

// Weights of a tensor in device memory.
template <class T> struct Weights {
    T* params;
    void* master; // as many, of the type of `kind`; not read with MASTER_NONE
    MasterWeights kind;
};

// Returns the weights from these elements on, of the parameters and of the master weights.
template <class T>
__host__ __device__ inline Weights<T> weights_from(const Weights<T>& w, size_t params, size_t master) {
    const Weights<T> part = {w.params + params, (char*)w.master + master * master_bytes(w.kind), w.kind};
    return part;
}

template <class L, int W, class T>
__device__ inline Elements<float, W> weights_load_split_(const Weights<T>& w, size_t i) {
    const Elements<T, W> upper = elements_load<W>(w.params + i);
    const Elements<L, W> lower = elements_load<W>((const L*)w.master + i);
    Elements<float, W> x;
#pragma unroll
    for (int k = 0; k < W; k++) {
        x[k] = split_join(upper[k], lower[k]);
    }
    return x;
}

// Load and store elements i ... i+W-1. W is 1; or W is 4, i a multiple of 4, and the tensor aligned
// to four elements.
template <int W, class T> __device__ inline Elements<float, W> weights_load(const Weights<T>& w, size_t i) {
    if (w.kind == MASTER_FP32) {
        return elements_load<W>((const float*)w.master + i);
    }
    if constexpr (DTYPE_OF(T) == DTYPE_BF16) {
        if (w.kind == MASTER_SPLIT) {
            return weights_load_split_<uint16_t, W>(w, i);
        }
        if (w.kind == MASTER_24) {
            return weights_load_split_<int8_t, W>(w, i);
        }
    }
    return elements_convert<float>(elements_load<W>(w.params + i));
}

template <class L, class T, int W>
__device__ inline void weights_store_split_(const Weights<T>& w, size_t i, const Elements<float, W>& x) {
    Elements<T, W> upper;
    Elements<L, W> lower;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const SplitFloat<L> split = split_float<L>(x[k]);
        upper[k] = split.upper;
        lower[k] = split.lower;
    }
    elements_store(w.params + i, upper);
    elements_store((L*)w.master + i, lower);
}

template <class T, int W>
__device__ inline void weights_store(const Weights<T>& w, size_t i, const Elements<float, W>& x,
                                     const RoundingWords& words) {
    if (w.kind == MASTER_NONE) { // for T = float the words are not used and not computed
        elements_store(w.params + i, weights_round_<T>(x, words, i));
        return;
    }
    if constexpr (DTYPE_OF(T) == DTYPE_BF16) {
        if (w.kind == MASTER_SPLIT) {
            weights_store_split_<uint16_t>(w, i, x);
            return;
        }
        if (w.kind == MASTER_24) {
            weights_store_split_<int8_t>(w, i, x);
            return;
        }
    }
    elements_store((float*)w.master + i, x);
    elements_store(w.params + i, elements_convert<T>(x));
}

// Sets four parameters to fp32 values, as if these were their master weights, and leaves those.
template <class T>
__device__ inline void weights_store_params(const Weights<T>& w, const Elements<float, 4>& x) {
    Elements<T, 4> params = elements_convert<T>(x);
    if constexpr (DTYPE_OF(T) == DTYPE_BF16) {
#pragma unroll
        for (int k = 0; k < 4 && w.kind > MASTER_FP32; k++) {
            params[k] =
                w.kind == MASTER_SPLIT ? split_float<uint16_t>(x[k]).upper : split_float<int8_t>(x[k]).upper;
        }
    }
    elements_store(w.params, params);
}

// ---- numbers of an update ----

// Numbers for the update of one element, for all rules. Rate and decay belong to its tensor.
typedef struct {
    float beta1, beta2, grad_scale;
    float v_correction; // AdamW: 1 / (1 - beta2^t)
    float momentum;     // SGD
    Decay decay;        // not Adafactor
} UpdateScalars;
typedef struct {
    float keep; // 1 - lr weight_decay
    float step; // lr; for AdamW lr / (1 - beta1^t)
    float eps;
} UpdateRates;

enum { WEIGHTS_THREADS_ = 256, WEIGHTS_PIECE = 4 * WEIGHTS_THREADS_ }; // elements of a block

// Copies weights to fp32, four elements a thread.
// grid   count / 1024      block   256      shared   none
// moves  the weights in, 4 bytes an element out. Bound by memory.
// order  every element on its own
template <class T>
__global__ void __launch_bounds__(WEIGHTS_THREADS_)
    weights_widen_kernel_(float* to, T* params, void* master, MasterWeights kind) {
    const Weights<T> weights = {params, master, kind};
    const size_t i = 4 * ((size_t)blockIdx.x * WEIGHTS_THREADS_ + threadIdx.x);
    elements_store(to + i, weights_load<4>(weights, i));
}

// Copies the first `count` weights to fp32; count is a multiple of WEIGHTS_PIECE.
template <class T>
static inline void weights_widen(float* to, const Weights<T>& weights, size_t count, const Gpu* gpu) {
    assert(count % WEIGHTS_PIECE == 0);
    launch(weights_widen_kernel_<T>, (unsigned)(count / WEIGHTS_PIECE), WEIGHTS_THREADS_, 0, gpu, to,
           weights.params, weights.master, weights.kind);
}

// Returns the bytes that an update reads and writes for n weights.
static inline double weights_bytes(double n, DType params, MasterWeights master) {
    const size_t p = dtype_bytes(params);
    return n * (double)(master == MASTER_FP32 ? 2 * sizeof(float) + p : 2 * (p + master_bytes(master)));
}

#endif
