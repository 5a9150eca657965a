/*
activation.cuh -- activation.h on the GPU: the same functions on T = float, bf16 or fp16, computed
in fp32.

activation_forward_codes and activation_backward_codes also set the codes of the rows that they
store (e4m3_rows.cuh), while they have them in registers: of act (N, F), and of dpre (N, gates F).
*/
#ifndef LLMC_ACTIVATION_CUH
#define LLMC_ACTIVATION_CUH

#include <assert.h>

#include "llmc/ops/activation.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/e4m3_rows.cuh"

#define ACTIVATION_THREADS 256
#define ACTIVATION_ITEMS 4 // packs of a row that a thread holds for its codes
#define ACTIVATION_ROWS 8  // rows of a block, if a warp is enough for a row

// Returns -2v. __expf of it is off by up to 2 + 1.2 |2v| units in the last place, most where the
// result is x or nearly 0.
__device__ inline float gelu_exponent_(float x) {
    return -2.0f * GELU_SCALE * x * (1.0f + GELU_CUBIC * x * x);
}

__device__ inline float gelu_value_(float x) { return __fdividef(x, 1.0f + __expf(gelu_exponent_(x))); }

// __fdividef divides by at most e^87; larger values would make e s = inf * 0. fminf drops NaN, but
// it comes back through x.
__device__ inline float gelu_slope_(float x) {
    const float e = __expf(fminf(gelu_exponent_(x), 87.0f)), s = __fdividef(1.0f, 1.0f + e);
    return s + 2.0f * x * s * (e * s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x);
}

// NaN stays NaN.
__device__ inline float relu2_value_(float x) { return x <= 0.0f ? 0.0f : x * x; }
__device__ inline float relu2_slope_(float x) { return x <= 0.0f ? 0.0f : 2.0f * x; }

// Activations of one value: functions of x in a class, for the kernels.
#define ACTIVATION_CLASS_(kind, word, name)                                                                  \
    struct name##_activation_ {                                                                              \
        static constexpr int GATES = 1;                                                                      \
        static __device__ float value(float x) { return name##_value_(x); }                                  \
        static __device__ float slope(float x) { return name##_slope_(x); }                                  \
    };
ACTIVATIONS_PLAIN(ACTIVATION_CLASS_)

// A thread computes one pack. The last pack, or every one if packs = 0, goes element by element.
// grid   ceil(n / (256 SIZE))      block   256      shared   none
// moves  n in, n out. Bound by memory.
// order  fixed: no sums.
// needs  addresses that are multiples of 16 bytes, if packs = 1; a kind with one gate
template <class T, class ACTIVATION>
__global__ void activation_forward_kernel(T* out, const T* inp, size_t n, int packs) {
    const size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::SIZE;
    if (packs && first + Pack<T>::SIZE <= n) {
        Pack<T> x = load_pack_once(inp + first);
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) {
            x[i] = from_float<T>(ACTIVATION::value(to_float(x[i])));
        }
        store_pack(out + first, x);
        return;
    }
    for (size_t i = first; i < n && i < first + Pack<T>::SIZE; i++) {
        out[i] = from_float<T>(ACTIVATION::value(to_float(inp[i])));
    }
}

// A thread computes one pack, like activation_forward_kernel. dinp may be dout: a thread reads its
// elements before it writes them.
// grid   ceil(n / (256 SIZE))      block   256      shared   none
// moves  2n in, n out. Bound by memory.
// order  fixed: no sums.
// needs  addresses that are multiples of 16 bytes, if packs = 1; a kind with one gate
template <class T, class ACTIVATION>
__global__ void activation_backward_kernel(T* dinp, const T* dout, const T* inp, size_t n, int packs) {
    const size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::SIZE;
    if (packs && first + Pack<T>::SIZE <= n) {
        const Pack<T> x = load_pack_once(inp + first);
        Pack<T> d = load_pack_once(dout + first);
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) {
            d[i] = from_float<T>(to_float(d[i]) * ACTIVATION::slope(to_float(x[i])));
        }
        store_pack(dinp + first, d);
        return;
    }
    for (size_t i = first; i < n && i < first + Pack<T>::SIZE; i++) {
        dinp[i] = from_float<T>(to_float(dout[i]) * ACTIVATION::slope(to_float(inp[i])));
    }
}

// ---- with a gate: WIDTH elements of a row at a time, a pack or 1 ----

// The activation of a gate, and its slope. e is finite, as in gelu_slope_.
typedef struct {
    float value, slope;
} GateGpu;

__device__ inline GateGpu silu_gate_(float x) {
    const float e = __expf(fminf(-x, 87.0f)), s = __fdividef(1.0f, 1.0f + e), value = x * s;
    const GateGpu y = {value, s + value * (e * s)};
    return y;
}

__device__ inline GateGpu gelu_gate_(float x) {
    const float e = __expf(fminf(gelu_exponent_(x), 87.0f)), s = __fdividef(1.0f, 1.0f + e), value = x * s;
    const GateGpu y = {value, s + 2.0f * value * (e * s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x)};
    return y;
}

__device__ inline GateGpu limited_gate_(float x) {
    const float h = x > CLAMPED_LIMIT ? CLAMPED_LIMIT : x; // NaN stays
    const float e = __expf(fminf(-CLAMPED_SLOPE * h, 87.0f)), s = __fdividef(1.0f, 1.0f + e), value = h * s;
    const GateGpu y = {value, x > CLAMPED_LIMIT ? 0.0f : s + CLAMPED_SLOPE * value * (e * s)};
    return y;
}

// Returns the factor of the activation of a gate, and its slope.
__device__ inline GateGpu plain_up_(float x) {
    const GateGpu y = {x, 1.0f};
    return y;
}

__device__ inline GateGpu raised_up_(float x) {
    const float below = x > CLAMPED_LIMIT ? CLAMPED_LIMIT : x,
                c = below < -CLAMPED_LIMIT ? -CLAMPED_LIMIT : below;
    const GateGpu y = {1.0f + c, c == x ? 1.0f : 0.0f};
    return y;
}

// An activation with a gate, and its two derivatives.
typedef struct {
    float out, by_gate, by_up;
} GatedGpu;

__device__ inline GatedGpu gated_of_(GateGpu gate, GateGpu up) {
    const GatedGpu y = {gate.value * up.value, up.value * gate.slope, gate.value * up.slope};
    return y;
}

// Functions of a gate and a value in a class, for the kernels.
#define ACTIVATION_GATED_CLASS_(kind, word, name, of, times)                                                 \
    struct name##_activation_ {                                                                              \
        static constexpr int GATES = 2;                                                                      \
        static __device__ GatedGpu at(float gate, float up) {                                                \
            return gated_of_(of##_gate_(gate), times##_up_(up));                                             \
        }                                                                                                    \
    };
ACTIVATIONS_GATED(ACTIVATION_GATED_CLASS_)

template <int WIDTH, class T> __device__ inline Pack<T> activation_load_(const T* from) {
    if constexpr (WIDTH == 1) {
        Pack<T> x = {};
        x[0] = from[0];
        return x;
    } else {
        return load_pack_once(from);
    }
}

template <int WIDTH, class T> __device__ inline void activation_store_(T* to, const Pack<T>& x) {
    if constexpr (WIDTH == 1) {
        to[0] = x[0];
    } else {
        store_pack(to, x);
    }
}

// A thread computes WIDTH elements.
// grid   ceil(N F / (256 WIDTH))      block   256      shared   none
// moves  2 N F in, N F out. Bound by memory.
// order  fixed: no sums.
// needs  F a multiple of WIDTH; aligned addresses if WIDTH is a pack
template <class T, class ACTIVATION, int WIDTH>
__global__ void gated_forward_kernel(T* act, const T* pre, size_t n, int F) {
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
    if (at < n) {
        const T* gates = pre + at / F * 2 * F + at % F;
        const Pack<T> gate = activation_load_<WIDTH>(gates), up = activation_load_<WIDTH>(gates + F);
        Pack<T> out = {};
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            out[i] = from_float<T>(ACTIVATION::at(to_float(gate[i]), to_float(up[i])).out);
        }
        activation_store_<WIDTH>(act + at, out);
    }
}

// A thread computes WIDTH elements of both gradients.
// grid   ceil(N F / (256 WIDTH))      block   256      shared   none
// moves  3 N F in, 2 N F out. Bound by memory.
// order  fixed: no sums.
// needs  as gated_forward_kernel
template <class T, class ACTIVATION, int WIDTH>
__global__ void gated_backward_kernel(T* dpre, const T* dact, const T* pre, size_t n, int F) {
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
    if (at < n) {
        const size_t first = at / F * 2 * F + at % F;
        const Pack<T> gate = activation_load_<WIDTH>(pre + first),
                      up = activation_load_<WIDTH>(pre + first + F), d = activation_load_<WIDTH>(dact + at);
        Pack<T> dgate = {}, dup = {};
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const GatedGpu y = ACTIVATION::at(to_float(gate[i]), to_float(up[i]));
            dgate[i] = from_float<T>(to_float(d[i]) * y.by_gate);
            dup[i] = from_float<T>(to_float(d[i]) * y.by_up);
        }
        activation_store_<WIDTH>(dpre + first, dgate);
        activation_store_<WIDTH>(dpre + first + F, dup);
    }
}

// ---- rows with their codes ----

// Returns act at columns c ... of a row.
template <class T, class ACTIVATION> __device__ inline Pack<T> activation_pack_(const T* pre, int c, int F) {
    const Pack<T> x = load_pack_once(pre + c);
    Pack<T> out;
    if constexpr (ACTIVATION::GATES == 2) {
        const Pack<T> up = load_pack_once(pre + F + c);
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) {
            out[i] = from_float<T>(ACTIVATION::at(to_float(x[i]), to_float(up[i])).out);
        }
    } else {
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) {
            out[i] = from_float<T>(ACTIVATION::value(to_float(x[i])));
        }
    }
    return out;
}

// Sets dpre at columns c ... of each gate of a row.
template <class T, class ACTIVATION>
__device__ inline void activation_slopes_(Pack<T> (&dpre)[ACTIVATION::GATES], const T* dact, const T* pre,
                                          int c, int F) {
    const Pack<T> x = load_pack_once(pre + c), d = load_pack_once(dact + c);
    if constexpr (ACTIVATION::GATES == 2) {
        const Pack<T> up = load_pack_once(pre + F + c);
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) {
            const GatedGpu y = ACTIVATION::at(to_float(x[i]), to_float(up[i]));
            dpre[0][i] = from_float<T>(to_float(d[i]) * y.by_gate);
            dpre[1][i] = from_float<T>(to_float(d[i]) * y.by_up);
        }
    } else {
#pragma unroll
        for (int i = 0; i < Pack<T>::SIZE; i++) {
            dpre[0][i] = from_float<T>(to_float(d[i]) * ACTIVATION::slope(to_float(x[i])));
        }
    }
}

// Calls `use(k, c)` for each of the thread's packs k of a row of F columns, at column c.
template <class T, class USE> __device__ inline void activation_each_(int F, USE use) {
#pragma unroll
    for (int k = 0; k < ACTIVATION_ITEMS; k++) {
        const int c = (int)(threadIdx.x + k * blockDim.x) * Pack<T>::SIZE;
        if (c < F) {
            use(k, c);
        }
    }
}

// A warp, or a block, has a row, thread i the packs i, i + blockDim.x, ...
// grid   ceil(N / rows)      block   (32, 8 rows), or (threads, 1)      shared   128 bytes
// moves  gates N F in, N F and N F bytes out. Bound by memory.
// order  fixed: no sums
// needs  F <= 4 packs a thread, a multiple of 16; aligned addresses
template <class T, class ACTIVATION>
__global__ void __launch_bounds__(1024)
    activation_rows_forward_kernel(E4m3Rows codes, T* act, const T* pre, int N, int F) {
    const int n = (int)(blockIdx.x * blockDim.y + threadIdx.y);
    Pack<T> row[ACTIVATION_ITEMS];
    uint32_t largest = 0;
    if (n >= N) { // a whole warp, if each has a row
        return;
    }
    activation_each_<T>(F, [&](int k, int c) {
        row[k] = activation_pack_<T, ACTIVATION>(pre + (size_t)n * F * ACTIVATION::GATES, c, F);
        store_pack(act + (size_t)n * F + c, row[k]);
        largest = max(largest, e4m3_largest(row[k]));
    });
    const float inverse = e4m3_scale(codes, (size_t)n, e4m3_row_largest(largest), threadIdx.x == 0);
    activation_each_<T>(
        F, [&](int k, int c) { e4m3_store_pack(codes.codes + (size_t)n * F + c, row[k], inverse); });
}

// Likewise for the gradient. dpre may be dact if there is one gate.
// grid, block, shared, order, needs   as activation_rows_forward_kernel
// moves  (1 + gates) N F in, gates N F and gates N F bytes out. Bound by memory.
template <class T, class ACTIVATION>
__global__ void __launch_bounds__(1024)
    activation_rows_backward_kernel(E4m3Rows codes, T* dpre, const T* dact, const T* pre, int N, int F) {
    constexpr int GATES = ACTIVATION::GATES;
    const int n = (int)(blockIdx.x * blockDim.y + threadIdx.y);
    const size_t at = (size_t)n * F * GATES;
    Pack<T> row[ACTIVATION_ITEMS][GATES];
    uint32_t largest = 0;
    if (n >= N) {
        return;
    }
    activation_each_<T>(F, [&](int k, int c) {
        activation_slopes_<T, ACTIVATION>(row[k], dact + (size_t)n * F, pre + at, c, F);
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) {
            store_pack(dpre + at + gate * F + c, row[k][gate]);
            largest = max(largest, e4m3_largest(row[k][gate]));
        }
    });
    const float inverse = e4m3_scale(codes, (size_t)n, e4m3_row_largest(largest), threadIdx.x == 0);
    activation_each_<T>(F, [&](int k, int c) {
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) {
            e4m3_store_pack(codes.codes + at + gate * F + c, row[k][gate], inverse);
        }
    });
}

// ---- launches ----

static inline int activation_aligned_(const void* a, const void* b, const void* c) {
    return ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0;
}

static inline unsigned activation_blocks_(size_t n, size_t pack) {
    return (unsigned)ceil_div(n, ACTIVATION_THREADS * pack);
}

template <class T, class ACTIVATION>
static inline void gated_launch_forward_(T* act, const T* pre, size_t n, size_t F, int aligned,
                                         const Gpu* gpu) {
    const int packs = aligned && F % Pack<T>::SIZE == 0;
    launch(packs ? gated_forward_kernel<T, ACTIVATION, Pack<T>::SIZE>
                 : gated_forward_kernel<T, ACTIVATION, 1>,
           activation_blocks_(n, packs ? Pack<T>::SIZE : 1), ACTIVATION_THREADS, 0, gpu, act, pre, n, (int)F);
}

template <class T, class ACTIVATION>
static inline void gated_launch_backward_(T* dpre, const T* dact, const T* pre, size_t n, size_t F,
                                          int aligned, const Gpu* gpu) {
    const int packs = aligned && F % Pack<T>::SIZE == 0;
    launch(packs ? gated_backward_kernel<T, ACTIVATION, Pack<T>::SIZE>
                 : gated_backward_kernel<T, ACTIVATION, 1>,
           activation_blocks_(n, packs ? Pack<T>::SIZE : 1), ACTIVATION_THREADS, 0, gpu, dpre, dact, pre, n,
           (int)F);
}

template <class T>
static inline void activation_forward(T* act, const T* pre, size_t N, size_t F, ActivationKind kind,
                                      const Gpu* gpu) {
    const size_t n = N * F;
    const int aligned = activation_aligned_(act, pre, pre);
    if (n == 0) {
        return;
    }
    switch (kind) {
#define ACTIVATION_LAUNCH_(KIND, word, name)                                                                 \
    case KIND:                                                                                               \
        launch(activation_forward_kernel<T, name##_activation_>, activation_blocks_(n, Pack<T>::SIZE),       \
               ACTIVATION_THREADS, 0, gpu, act, pre, n, aligned);                                            \
        break;
        ACTIVATIONS_PLAIN(ACTIVATION_LAUNCH_)
#undef ACTIVATION_LAUNCH_
#define ACTIVATION_LAUNCH_(KIND, word, name, ...)                                                            \
    case KIND:                                                                                               \
        gated_launch_forward_<T, name##_activation_>(act, pre, n, F, aligned, gpu);                          \
        break;
        ACTIVATIONS_GATED(ACTIVATION_LAUNCH_)
#undef ACTIVATION_LAUNCH_
    }
}

template <class T>
static inline void activation_backward(T* dpre, const T* dact, const T* pre, size_t N, size_t F,
                                       ActivationKind kind, const Gpu* gpu) {
    const size_t n = N * F;
    const int aligned = activation_aligned_(dpre, dact, pre);
    if (n == 0) {
        return;
    }
    switch (kind) {
#define ACTIVATION_LAUNCH_(KIND, word, name)                                                                 \
    case KIND:                                                                                               \
        launch(activation_backward_kernel<T, name##_activation_>, activation_blocks_(n, Pack<T>::SIZE),      \
               ACTIVATION_THREADS, 0, gpu, dpre, dact, pre, n, aligned);                                     \
        break;
        ACTIVATIONS_PLAIN(ACTIVATION_LAUNCH_)
#undef ACTIVATION_LAUNCH_
#define ACTIVATION_LAUNCH_(KIND, word, name, ...)                                                            \
    case KIND:                                                                                               \
        gated_launch_backward_<T, name##_activation_>(dpre, dact, pre, n, F, aligned, gpu);                  \
        break;
        ACTIVATIONS_GATED(ACTIVATION_LAUNCH_)
#undef ACTIVATION_LAUNCH_
    }
}

// Returns the threads for a row of F columns with its codes; 0: it is too long for them.
template <class T> static inline int activation_row_threads_(size_t F) {
    const size_t threads = 32 * ceil_div(F, (size_t)(32 * ACTIVATION_ITEMS * Pack<T>::SIZE));
    return threads > 1024 ? 0 : (int)threads;
}

// Launches a kernel with a warp, or a block, for each row.
template <class KERNEL, class... ARGUMENTS>
static inline void activation_launch_rows_(KERNEL kernel, int threads, size_t N, const Gpu* gpu,
                                           ARGUMENTS... arguments) {
    const int rows = threads == 32 ? ACTIVATION_ROWS : 1;
    launch(kernel, (unsigned)ceil_div(N, (size_t)rows), dim3((unsigned)threads, (unsigned)rows), 0, gpu,
           arguments...);
}

// Sets act and its codes. F is a multiple of E4M3_UNIT.
template <class T>
static inline void activation_forward_codes(E4m3Rows codes, T* act, const T* pre, size_t N, size_t F,
                                            ActivationKind kind, const Gpu* gpu) {
    const int threads = activation_row_threads_<T>(F), rows = (int)N, cols = (int)F;
    assert(activation_aligned_(act, pre, codes.codes));
    if (threads == 0) {
        activation_forward(act, pre, N, F, kind, gpu);
        e4m3_rows(codes, (const T*)act, rows, cols, gpu);
        return;
    }
    switch (kind) {
#define ACTIVATION_LAUNCH_(KIND, word, name, ...)                                                            \
    case KIND:                                                                                               \
        activation_launch_rows_(activation_rows_forward_kernel<T, name##_activation_>, threads, N, gpu,      \
                                codes, act, pre, rows, cols);                                                \
        break;
        ACTIVATIONS_PLAIN(ACTIVATION_LAUNCH_)
        ACTIVATIONS_GATED(ACTIVATION_LAUNCH_)
#undef ACTIVATION_LAUNCH_
    }
}

// Sets dpre and its codes. F is a multiple of E4M3_UNIT.
template <class T>
static inline void activation_backward_codes(E4m3Rows codes, T* dpre, const T* dact, const T* pre, size_t N,
                                             size_t F, ActivationKind kind, const Gpu* gpu) {
    const int threads = activation_row_threads_<T>(F), rows = (int)N, cols = (int)F;
    assert(activation_aligned_(dpre, dact, pre));
    if (threads == 0) {
        activation_backward(dpre, dact, pre, N, F, kind, gpu);
        e4m3_rows(codes, (const T*)dpre, rows, cols * activation_gates(kind), gpu);
        return;
    }
    switch (kind) {
#define ACTIVATION_LAUNCH_(KIND, word, name, ...)                                                            \
    case KIND:                                                                                               \
        activation_launch_rows_(activation_rows_backward_kernel<T, name##_activation_>, threads, N, gpu,     \
                                codes, dpre, dact, pre, rows, cols);                                         \
        break;
        ACTIVATIONS_PLAIN(ACTIVATION_LAUNCH_)
        ACTIVATIONS_GATED(ACTIVATION_LAUNCH_)
#undef ACTIVATION_LAUNCH_
    }
}

#endif
