/*
norm.cuh -- norms (norm.h) on the GPU, on T = float, bf16 or fp16, computed in fp32.

The kernels are templates on the kind: NORM_LAYER; NORM_RMS, which is also RMS_ALONE if it has no
weights; or NORM_RMS_PLUS, which is any kind of RMS with an offset, a factor or a residual.

norm_backward.cuh has the backward pass. Results do not depend on the GPU.

With --matmul fp8 the kernels also set the codes of rows that they store (e4m3_rows.cuh), while they
have them in registers: of out, and of dinp.

The matmul before a norm adds the residual (matmul_forward_residual), but not if the output of a
branch has a norm or a factor: then norm_forward_residual or residual_sum does.
*/
#ifndef LLMC_NORM_CUH
#define LLMC_NORM_CUH

#include <assert.h>

#include "llmc/base/sizes.h"
#include "llmc/ops/e4m3_rows.cuh"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/norm.h"

#define NORM_ITEMS 4 // groups of columns that a thread of the forward pass holds
#define NORM_ROWS 8  // rows per block, if one warp is enough for a row

// A norm of N rows, with what its forward pass keeps (norm.h).
template <class T> struct NormGpu {
    NormKind kind;
    float eps, factor;
    const T *weight, *bias; // (C)
    float *mean, *rstd;     // (N)
    int N, C;
    E4m3Rows codes; // (N, C) of out, unless NULL; C is a multiple of E4M3_UNIT then
};

// ---- elements: WIDTH at a time, a pack or 1 ----

// Loads a pack, or an element, just as it is in memory; zeros if it is out of range.
template <int WIDTH, class T> __device__ inline int4 norm_load_words_(const T* from, bool is_there) {
    if constexpr (WIDTH == 1) {
        Pack<T> pack = {};
        pack[0] = is_there ? from[0] : from_float<T>(0.0f);
        return *reinterpret_cast<const int4*>(&pack);
    } else {
        return is_there ? *reinterpret_cast<const int4*>(from) : make_int4(0, 0, 0, 0);
    }
}

// Numbers that NORM_RMS_PLUS has besides its weights: it multiplies a row by (weight + offset)
// factor, or without weights by 1; a residual (N, C) that the forward pass adds, or NULL.
template <class T> struct NormPlus_ {
    float offset, factor;
    const T* residual;
};

// Loads what multiplies columns c ... of a row of RMS.
template <int WIDTH, NormKind KIND, class T>
__device__ inline void norm_load_weight_(float* to, const T* weight, const NormPlus_<T>& plus, int c) {
    if (weight) {
        load_floats<WIDTH>(to, weight + c);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            to[i] = 1.0f;
        }
    }
    if constexpr (KIND == NORM_RMS_PLUS) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            to[i] = (to[i] + plus.offset) * plus.factor;
        }
    }
}

// Also sets `from` to the stored values, rounded to T. Returns a pack as it is in memory.
template <int WIDTH, class T> __device__ inline int4 norm_store_(T* to, float* from) {
    Pack<T> pack = {};
    if constexpr (WIDTH == 1) {
        to[0] = from_float<T>(from[0]);
        from[0] = to_float(to[0]);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            pack[i] = from_float<T>(from[i]);
        }
        store_pack(to, pack);
        unpack<T>(from, pack); // faster than one element after the other
    }
    return *reinterpret_cast<const int4*>(&pack);
}

static inline int norm_aligned_(const void* a, const void* b, const void* c) {
    return ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0;
}

// ---- forward ----

// Returns the sum over the threads of a row: a warp, or the whole block.
__device__ inline float norm_row_sum_(float x) { return blockDim.x == 32 ? warp_sum(x) : block_sum(x); }

// Returns the mean of a row, from a thread's sum; RMS has none.
template <NormKind KIND> __device__ inline float norm_mean_(float sum, int C) {
    if constexpr (KIND == NORM_LAYER) {
        return norm_row_sum_(sum) / C;
    } else {
        return 0.0f;
    }
}

// Loads what multiplies columns c ... of a row, and what is added to them: biases, a residual, or
// zeros.
template <int WIDTH, NormKind KIND, class T>
__device__ inline void norm_load_parameters_(float* w, float* b, const T* weight, const T* bias,
                                             const NormPlus_<T>& plus, size_t row, int c) {
    if constexpr (KIND == NORM_LAYER) {
        load_floats<WIDTH>(w, weight + c);
        load_floats<WIDTH>(b, bias + c);
    } else {
        norm_load_weight_<WIDTH, KIND>(w, weight, plus, c);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            b[i] = 0.0f;
        }
    }
    if constexpr (KIND == NORM_RMS_PLUS) {
        if (plus.residual) {
            load_floats<WIDTH>(b, plus.residual + row + c);
        }
    }
}

// Returns the kind of the kernels for a norm, which may add a residual.
template <class T> static inline NormKind norm_kernel_(const NormGpu<T>* norm, const T* residual) {
    const int is_plain = (norm->factor == 1 || !norm->weight) && !norm_parts(norm->kind).offset && !residual;
    assert(norm->kind != NORM_LAYER || is_plain);
    return norm->kind == NORM_LAYER ? NORM_LAYER : is_plain ? NORM_RMS : NORM_RMS_PLUS;
}

template <class T> static inline NormPlus_<T> norm_plus_(const NormGpu<T>* norm, const T* residual) {
    return {(float)norm_parts(norm->kind).offset, norm->weight ? norm->factor : 1.0f, residual};
}

// Calls `use(k, column, values)` for each of the thread's groups k of columns of a row.
template <class T, int WIDTH, class F>
__device__ inline void norm_each_(const int4 (&row)[NORM_ITEMS], int C, F use) {
#pragma unroll
    for (int k = 0; k < NORM_ITEMS; k++) {
        const int c = (int)(threadIdx.x + k * blockDim.x) * WIDTH;
        if (c < C) {
            float x[Pack<T>::SIZE];
            unpack<T>(x, row[k]);
            use(k, c, x);
        }
    }
}

// Returns the warps per multiprocessor in the forward pass: with 64 registers; with codes 80.
constexpr int norm_forward_warps_(bool codes) { return codes ? 24 : 32; }

template <class T> __device__ inline Pack<T> norm_pack_(int4 words) {
    return *reinterpret_cast<const Pack<T>*>(&words);
}

// Sets the codes of row n of packs, as its threads hold it; zeros from C on.
template <class T>
__device__ inline void norm_store_codes_(const E4m3Rows& codes, const int4 (&row)[NORM_ITEMS], int n, int C) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < NORM_ITEMS; k++) {
        largest = max(largest, e4m3_largest(norm_pack_<T>(row[k])));
    }
    const float inverse = e4m3_scale(codes, (size_t)n, e4m3_row_largest(largest), threadIdx.x == 0);
#pragma unroll
    for (int k = 0; k < NORM_ITEMS; k++) {
        const int c = (int)(threadIdx.x + k * blockDim.x) * Pack<T>::SIZE;
        if (c < C) {
            e4m3_store_pack(codes.codes + (size_t)n * C + c, norm_pack_<T>(row[k]), inverse);
        }
    }
}

// Loads the thread's columns of a row; zeros if it is out of range.
template <int WIDTH, class T>
__device__ inline void norm_load_row_(int4 (&row)[NORM_ITEMS], const T* from, bool is_there, int C) {
#pragma unroll
    for (int k = 0; k < NORM_ITEMS; k++) {
        const int c = (int)(threadIdx.x + k * blockDim.x) * WIDTH;
        row[k] = norm_load_words_<WIDTH>(from + c, is_there && c < C);
    }
}

// A warp, or a block of up to 1024 threads, 768 with CODES, normalizes one row while it loads the
// next. Thread i holds groups i, i + blockDim.x, ... of WIDTH columns, as they are in memory.
// grid   up to the blocks that fit at once      block   (32, 8 rows), or (threads, 1)
// shared 2 of block_sum
// moves  N*C in, N*C out, 2N fp32 out; weight and bias stay in L1. CODES: also N*C bytes and N fp32
//        out. A residual: N*C in besides. Bound by memory.
// order  fixed, the same for any grid
// needs  C <= 4 WIDTH threads; C a multiple of WIDTH; aligned addresses if WIDTH is a pack,
//        as with CODES
template <class T, int WIDTH, NormKind KIND, bool CODES>
__global__ void __launch_bounds__(32 * norm_forward_warps_(CODES))
    norm_forward_kernel(T* out, E4m3Rows codes, float* mean, float* rstd, const T* inp, const T* weight,
                        const T* bias, NormPlus_<T> plus, int N, int C, float eps) {
    const int first = (int)(blockIdx.x * blockDim.y + threadIdx.y), step = (int)(gridDim.x * blockDim.y);
    int4 row[NORM_ITEMS], next[NORM_ITEMS];
    norm_load_row_<WIDTH>(next, inp + (size_t)first * C, first < N, C);
    for (int n = first; n < N; n += step) { // by whole warps, and by the block if a row is one's
#pragma unroll
        for (int k = 0; k < NORM_ITEMS; k++) {
            row[k] = next[k];
        }
        norm_load_row_<WIDTH>(next, inp + (size_t)(n + step) * C, n + step < N, C);
        float sum = 0, squares = 0;
        norm_each_<T, WIDTH>(row, C, [&](int, int, const float* x) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                sum += x[i];
            }
        });
        const float m = norm_mean_<KIND>(sum, C);
        norm_each_<T, WIDTH>(row, C, [&](int, int, const float* x) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                squares += (x[i] - m) * (x[i] - m);
            }
        });
        const float r = 1.0f / sqrtf(norm_row_sum_(squares) / C + eps);
        norm_each_<T, WIDTH>(row, C, [&](int k, int c, float* x) {
            float w[WIDTH], b[WIDTH];
            norm_load_parameters_<WIDTH, KIND>(w, b, weight, bias, plus, (size_t)n * C, c);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                x[i] = (x[i] - m) * r * w[i] + b[i];
            }
            row[k] = norm_store_<WIDTH>(out + (size_t)n * C + c, x);
        });
        if constexpr (CODES) {
            norm_store_codes_<T>(codes, row, n, C);
        }
        if (threadIdx.x == 0) {
            if constexpr (KIND == NORM_LAYER) {
                mean[n] = m;
            }
            rstd[n] = r;
        }
    }
}

// One block per row, for rows that are too long for registers: each is read three times, twice from
// cache.
// grid   N      block   1024      shared   two arrays of block_sum
// moves  as norm_forward_kernel, if the rows being processed fit into the caches
// order  fixed
template <class T, NormKind KIND>
__global__ void norm_forward_long_kernel(T* out, const T* inp, NormGpu<T> norm, NormPlus_<T> plus) {
    const int C = norm.C;
    const size_t row = (size_t)blockIdx.x * C;
    float sum = 0, square = 0;
    for (int c = threadIdx.x; KIND == NORM_LAYER && c < C; c += blockDim.x) {
        sum += to_float(inp[row + c]);
    }
    const float m = norm_mean_<KIND>(sum, C);
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        const float d = to_float(inp[row + c]) - m;
        square += d * d;
    }
    const float r = 1.0f / sqrtf(block_sum(square) / C + norm.eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float w, b;
        norm_load_parameters_<1, KIND>(&w, &b, norm.weight, norm.bias, plus, row, c);
        out[row + c] = from_float<T>((to_float(inp[row + c]) - m) * r * w + b);
    }
    if (threadIdx.x == 0) {
        if constexpr (KIND == NORM_LAYER) {
            norm.mean[blockIdx.x] = m;
        }
        norm.rstd[blockIdx.x] = r;
    }
}

// Launches one warp per row if its registers can hold one, otherwise one block per row. Without
// room for codes in the registers, a separate kernel makes them.
template <class T, int WIDTH, NormKind KIND>
static inline void norm_launch_forward_(T* out, const T* inp, const NormGpu<T>* norm, NormPlus_<T> plus,
                                        const Gpu* gpu) {
    constexpr bool MAY_FUSE = WIDTH > 1 && KIND != NORM_RMS_PLUS;
    const int N = norm->N, C = norm->C;
    const int threads = 32 * ceil_div(C, 32 * WIDTH * NORM_ITEMS);
    const bool fuses = MAY_FUSE && norm->codes.codes && threads <= 32 * norm_forward_warps_(true);
    if (threads > 1024) {
        launch(norm_forward_long_kernel<T, KIND>, N, 1024, 0, gpu, out, inp, *norm, plus);
    } else {
        const auto kernel = fuses ? norm_forward_kernel<T, WIDTH, KIND, MAY_FUSE>
                                  : norm_forward_kernel<T, WIDTH, KIND, false>;
        const int rows = threads == 32 ? NORM_ROWS : 1, warps = threads / 32 * rows,
                  most = gpu->multiprocessors * int_max(norm_forward_warps_(fuses) / warps, 1);
        launch(kernel, int_min(ceil_div(N, rows), most), dim3(threads, rows), 0, gpu, out, norm->codes,
               norm->mean, norm->rstd, inp, norm->weight, norm->bias, plus, N, C, norm->eps);
    }
    if (norm->codes.codes && !fuses) {
        e4m3_rows(norm->codes, (const T*)out, N, C, gpu);
    }
}

template <class T, NormKind KIND>
static inline void norm_forward_of_(T* out, const T* residual, const T* inp, const NormGpu<T>* norm,
                                    const Gpu* gpu) {
    const NormPlus_<T> plus = norm_plus_(norm, residual);
    if (norm->C % Pack<T>::SIZE == 0 && norm_aligned_(out, inp, residual) &&
        norm_aligned_(norm->weight, norm->bias, NULL)) {
        norm_launch_forward_<T, Pack<T>::SIZE, KIND>(out, inp, norm, plus, gpu);
    } else {
        assert(!norm->codes.codes);
        norm_launch_forward_<T, 1, KIND>(out, inp, norm, plus, gpu);
    }
}

// Sets out = residual + norm of inp, for a kind of RMS; a residual of NULL is none.
template <class T>
static inline void norm_forward_residual(T* out, const T* residual, const T* inp, const NormGpu<T>* norm,
                                         const Gpu* gpu) {
    switch (norm_kernel_(norm, residual)) {
    case NORM_LAYER:
        return norm_forward_of_<T, NORM_LAYER>(out, residual, inp, norm, gpu);
    case NORM_RMS_PLUS:
        return norm_forward_of_<T, NORM_RMS_PLUS>(out, residual, inp, norm, gpu);
    case NORM_RMS:
    case NORM_RMS_ALONE:
        return norm_forward_of_<T, NORM_RMS>(out, residual, inp, norm, gpu);
    }
}

// out may be inp: a thread reads its elements before it writes them.
template <class T>
static inline void norm_forward(T* out, const T* inp, const NormGpu<T>* norm, const Gpu* gpu) {
    norm_forward_residual(out, (const T*)NULL, inp, norm, gpu);
}

// A thread computes a pack, or an element.
// grid   ceil(n / (256 WIDTH))      block   256      shared   none
// moves  2 n in, n out; n in without a residual. Bound by memory.
// order  fixed: no sums
// needs  n a multiple of WIDTH; aligned addresses if WIDTH is a pack
template <class T, int WIDTH>
__global__ void residual_sum_kernel(T* out, const T* residual, const T* inp, float factor, size_t n) {
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
    float x[WIDTH], sum[WIDTH] = {};
    if (at >= n) {
        return;
    }
    load_floats<WIDTH>(x, inp + at);
    if (residual) {
        load_floats<WIDTH>(sum, residual + at);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        sum[i] += factor * x[i];
    }
    norm_store_<WIDTH>(out + at, sum);
}

// Sets out = residual + factor inp, n elements; NULL for `residual` is zeros. out may be either.
template <class T>
static inline void residual_sum(T* out, const T* residual, const T* inp, float factor, size_t n,
                                const Gpu* gpu) {
    const int packs = n % Pack<T>::SIZE == 0 && norm_aligned_(out, residual, inp);
    const size_t per_block = 256 * (size_t)(packs ? Pack<T>::SIZE : 1);
    launch(packs ? residual_sum_kernel<T, Pack<T>::SIZE> : residual_sum_kernel<T, 1>,
           (unsigned)ceil_div(n, per_block), 256, 0, gpu, out, residual, inp, factor, n);
}

// ---- the norm of the embedding, in place ----

// Normalizes x (N, C) in place, and sets rstd (N).
template <class T>
static inline void norm_unit_forward(T* x, float* rstd, int N, int C, float eps, const Gpu* gpu) {
    const NormGpu<T> norm = {NORM_RMS_ALONE, eps, 1, NULL, NULL, NULL, rstd, N, C, {}};
    norm_forward(x, x, &norm, gpu);
}

#endif
