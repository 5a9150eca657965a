/*
adamw8bit.cuh -- adamw8bit.h on the GPU: moments in 8 bits between two updates.

Blocks of 64 elements have a scale. A thread has four elements, so 16 lanes share a block.
adamw8bit_load and adamw8bit_store are the part of a kernel that knows the codes; between them it
updates the four as AdamW does.

    m, v              uint8   codes
    m_scale, v_scale  fp32    one for 64 elements, counted from the first

Codes are decoded by a table in shared memory, which a kernel copies from Code8Table at its start.

needs:   arrays start at multiples of 128 elements of a tensor, a warp's, and have room up to the
         next one. The elements after the tensor are zero, and stay zero; their codes may change
*/
#ifndef LLMC_ADAMW8BIT_CUH
#define LLMC_ADAMW8BIT_CUH

#include <assert.h>

#include "llmc/optim/adamw8bit.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/master_weights.cuh"

enum { ADAMW8BIT_LANES_ = ADAMW8BIT_BLOCK / 4, ADAMW8BIT_THREADS_ = 256 };

// ---- decoding ----

// Values of a code, signed and unsigned.
typedef struct {
    float m, v;
} Code8Pair;

// Values of all codes, in device memory: (256)
typedef struct {
    Code8Pair* values;
} Code8Table;

static inline void code8_table_open(Code8Table* table, Memory* memory) {
    Code8Pair values[256];
    for (int code = 0; code < 256; code++) {
        values[code].m = code8_value(code, CODE8_SIGNED);
        values[code].v = code8_value(code, CODE8_UNSIGNED);
    }
    table->values =
        (Code8Pair*)memory_take(memory, "scratch: codes of 8-bit moments", MEMORY_DEVICE, sizeof(values));
    if (!memory_is_dry(memory)) {
        gpu_upload(table->values, values, sizeof(values));
    }
}

// Copies the table to shared memory; all threads of a block of one dimension call it.
__device__ inline void code8_table_load(Code8Pair* shared, const Code8Pair* table) {
    for (int code = (int)threadIdx.x; code < 256; code += (int)blockDim.x) {
        shared[code] = table[code];
    }
    __syncthreads();
}

// ---- four elements ----

typedef struct {
    Elements<float, 4> m, v;
} AdamW8bitFour;

// Returns the moments of elements i ... i+3.
__device__ inline AdamW8bitFour adamw8bit_load(const AdamW8bitState& state, size_t i,
                                               const Code8Pair* shared) {
    const Elements<uint8_t, 4> m = elements_load<4>(state.m + i), v = elements_load<4>(state.v + i);
    const float m_scale = state.m_scale[i / ADAMW8BIT_BLOCK], v_scale = state.v_scale[i / ADAMW8BIT_BLOCK];
    AdamW8bitFour four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        four.v[k] = shared[v[k]].v * v_scale;
        four.m[k] = four.v[k] == 0.0f ? 0.0f : shared[m[k]].m * m_scale;
    }
    return four;
}

// Returns max |x| of a block to its 16 lanes, of `lanes` that call it. As integers, the bits of
// positive numbers have the same order, with infinity and NaN last.
__device__ inline float adamw8bit_largest_(const Elements<float, 4>& x, unsigned lanes) {
    int largest = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        largest = max(largest, (int)(float_bits(x[k]) & 0x7FFFFFFFu));
    }
#pragma unroll
    for (int distance = ADAMW8BIT_LANES_ / 2; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(lanes, largest, distance));
    }
    return float_of_bits((uint32_t)largest);
}

// Encodes the moments of elements i ... i+3, with the scales of their block. All lanes of the warp
// call it.
__device__ inline void adamw8bit_store(const AdamW8bitState& state, size_t i, const AdamW8bitFour& four) {
    const float m_scale = adamw8bit_largest_(four.m, 0xffffffffu),
                v_scale = adamw8bit_largest_(four.v, 0xffffffffu);
    const float of_m = code8_inverse(m_scale), of_v = code8_inverse(v_scale);
    Elements<uint8_t, 4> m, v;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        m[k] = (uint8_t)code8_encode(four.m[k] * of_m, CODE8_SIGNED);
        v[k] = (uint8_t)code8_encode(four.v[k] * of_v, CODE8_UNSIGNED);
    }
    __syncwarp(); // all lanes have read the scales: exchanging numbers does not order memory
    elements_store(state.m + i, m);
    elements_store(state.v + i, v);
    if (threadIdx.x % ADAMW8BIT_LANES_ == 0) {
        state.m_scale[i / ADAMW8BIT_BLOCK] = m_scale;
        state.v_scale[i / ADAMW8BIT_BLOCK] = v_scale;
    }
}

// ---- one moment, for other rules ----

// Returns the lanes that share a block with this one.
__device__ inline unsigned moment_lanes_() { return 0xffffu << (threadIdx.x & 16); }

// Returns elements i ... i+3 of a moment in 8 bits.
__device__ inline Elements<float, 4> moment_load(const Moment& moment, size_t i, const Code8Pair* values) {
    const Elements<uint8_t, 4> codes = elements_load<4>(moment.m8 + i);
    const float scale = moment.scale[i / ADAMW8BIT_BLOCK];
    Elements<float, 4> x;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        x[k] = values[codes[k]].m * scale;
    }
    return x;
}

// Keeps elements i ... i+3, and sets x to the values as they are kept. The 16 lanes of a block call
// it together.
__device__ inline void moment_store(const Moment& moment, size_t i, Elements<float, 4>* x,
                                    const Code8Pair* values) {
    const float scale = adamw8bit_largest_(*x, moment_lanes_()), inverse = code8_inverse(scale);
    Elements<uint8_t, 4> codes;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        codes[k] = (uint8_t)code8_encode((*x)[k] * inverse, CODE8_SIGNED);
        (*x)[k] = values[codes[k]].m * scale;
    }
    __syncwarp(moment_lanes_()); // all lanes have read the scale
    elements_store(moment.m8 + i, codes);
    if (threadIdx.x % ADAMW8BIT_LANES_ == 0) {
        moment.scale[i / ADAMW8BIT_BLOCK] = scale;
    }
}

// ---- a tensor ----

// A thread updates four elements.
// grid   ceil(n / 1024)      block   256      shared   2 KiB
// moves  adamw8bit_bytes, and the table of 2 KiB a block, mostly from L1. Bound by memory or, where
//        the bytes are fewest, by instructions: encoding takes some 40 an element and moment.
// order  every block of 64 on its own
template <class T, class G>
__global__ void __launch_bounds__(ADAMW8BIT_THREADS_)
    adamw8bit_kernel_(T* params, void* master, MasterWeights kind, const G* grads, uint8_t* m, uint8_t* v,
                      float* m_scale, float* v_scale, const Code8Pair* table, size_t n,
                      const __grid_constant__ AdamWStep step, const __grid_constant__ RoundingWords words) {
    SMEM_ARRAY(Code8Pair, shared, [256]);
    const size_t i = 4 * ((size_t)blockIdx.x * ADAMW8BIT_THREADS_ + threadIdx.x), of_warp = i - i % 128;
    code8_table_load(shared, table);
    if (of_warp >= n) {
        return; // the whole warp
    }
    const Weights<T> weights = {params, master, kind};
    const AdamW8bitState state = {m, v, m_scale, v_scale};
    const Elements<G, 4> g = elements_load<4>(grads + i);
    Elements<float, 4> x = weights_load<4>(weights, i);
    AdamW8bitFour four = adamw8bit_load(state, i, shared);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        adamw_element(&x[k], to_float(g[k]), &four.m[k], &four.v[k], step);
    }
    adamw8bit_store(state, i, four);
    weights_store(weights, i, x, words);
}

// Arguments of the update of a tensor of n elements.
template <class T> struct AdamW8bitUpdate {
    Weights<T> weights;
    Gradient grads;
    AdamW8bitState state;
    const Code8Table* table;
    AdamW opt;
    RoundingWords words;
};

template <class T>
static inline void adamw8bit_update(const AdamW8bitUpdate<T>& u, size_t n, const Gpu* gpu) {
    const unsigned blocks = (unsigned)ceil_div(n, (size_t)(4 * ADAMW8BIT_THREADS_));
    assert(n > 0);
    GRADIENT_DISPATCH(u.grads, T,
                      launch(adamw8bit_kernel_<T, G>, blocks, ADAMW8BIT_THREADS_, 0, gpu, u.weights.params,
                             u.weights.master, u.weights.kind, (const G*)u.grads.data, u.state.m, u.state.v,
                             u.state.m_scale, u.state.v_scale, u.table->values, n, adamw_step(u.opt),
                             u.words));
}

// Returns the bytes moved: reads the gradient, codes, scales and weights; writes all but the
// gradient.
static inline double adamw8bit_bytes(double n, DType params, DType grads, MasterWeights master) {
    const double moment = 1 + (double)sizeof(float) / ADAMW8BIT_BLOCK;
    return n * ((double)dtype_bytes(grads) + 4 * moment) + weights_bytes(n, params, master);
}

#endif
