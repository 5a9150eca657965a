/*
matmul_fp8.cuh -- matmul_fp8.h on the GPU: rows of T = float, bf16 or fp16 into E4M3, and cublasLt's
matmuls of them, which multiply each sum by the scales of its row and its column.

    codes    (rows, cols)     E4M3
    scales   (rows)           fp32, powers of two (float8.h)

Codes and scales have the bits of matmul_fp8.h. Sums do not: tensor cores add products of fp8 with
fewer bits than fp32 has, and cublasLt adds their sums in fp32 now and then. Weights are quantized
again for each matmul. That moves 3 or 5 bytes for each of their elements, while the matmul does 2 N
FLOP with it, and it needs no copies that updates, ZeRO and offloading must keep up to date.

It needs Hopper, cublasLt 12.9, and C and OC that are multiples of MATMUL_FP8_UNIT.
*/
#ifndef LLMC_MATMUL_FP8_CUH
#define LLMC_MATMUL_FP8_CUH

#include <assert.h>
#include <string.h>

#include "llmc/base/float8.h"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/ops/matmul.cuh"

enum {
    MATMUL_FP8_UNIT = 16, // of the sizes of matrices: cublasLt reads rows in 16 bytes
    MATMUL_FP8_TILE_ = 64,
    MATMUL_FP8_PAD_ = 16,  // bytes behind a row of a tile, for the banks of shared memory
    MATMUL_FP8_DEEP_ = 64, // rows of a matrix whose magnitudes a block compares
    MATMUL_FP8_ALIGN_ = 256
};

// Factors of a matmul in memory of the GPU.
typedef struct {
    uint8_t *left, *right; // codes
    float *left_scales, *right_scales;
    uint32_t* largest; // magnitudes of the columns of a matrix
} MatmulFp8Factors;

static inline size_t matmul_fp8_aligned_(size_t bytes) {
    return (bytes + MATMUL_FP8_ALIGN_ - 1) / MATMUL_FP8_ALIGN_ * MATMUL_FP8_ALIGN_;
}

// Opens factors for left ones of up to N rows and `widest` columns, and matrices of up to `largest`
// elements and `widest` rows or columns.
static inline void matmul_fp8_gpu_open(MatmulFp8Factors* factors, Memory* memory, size_t N, size_t widest,
                                       size_t largest) {
    const size_t left = matmul_fp8_aligned_(N * widest), right = matmul_fp8_aligned_(largest),
                 left_scales = matmul_fp8_aligned_(N * sizeof(float)),
                 vector = matmul_fp8_aligned_(widest * sizeof(float));
    char* at =
        (char*)memory_take(memory, "factors in fp8", MEMORY_DEVICE, left + right + left_scales + 2 * vector);
    memset((void*)factors, 0, sizeof(*factors));
    if (at) {
        factors->left = (uint8_t*)at;
        factors->right = (uint8_t*)(at += left);
        factors->left_scales = (float*)(void*)(at += right);
        factors->right_scales = (float*)(void*)(at += left_scales);
        factors->largest = (uint32_t*)(void*)(at + vector);
    }
}

// ---- kernels ----

// Returns the largest magnitude of a pack.
template <class T> __device__ inline uint32_t matmul_fp8_largest_(const Pack<T>& x) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < Pack<T>::SIZE; i++) {
        largest = max(largest, e4m3_magnitude(to_float(x[i])));
    }
    return largest;
}

// Stores codes for the matmul that follows: in the caches.
template <int W> __device__ inline void matmul_fp8_store_(uint8_t* to, const Elements<uint8_t, W>& codes) {
    typedef typename Elements<uint8_t, W>::Word Word;
    *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(&codes);
}

// A warp quantizes a row, which it reads twice, the second time from a cache.
// grid   ceil(rows / 8)      block   256      shared   none
// moves  rows*cols in, rows*cols bytes and rows fp32 out. Bound by memory.
// order  none that counts: the largest of a row is the same in any.
// needs  cols a multiple of 16, x and codes aligned to 16 bytes
template <class T>
__global__ void __launch_bounds__(256)
    matmul_fp8_rows_kernel(uint8_t* codes, float* scales, const T* x, int rows, int cols) {
    constexpr int SIZE = Pack<T>::SIZE;
    const int lane = (int)threadIdx.x % 32, row = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) {
        return;
    }
    const T* from = x + (size_t)row * cols;
    uint32_t largest = 0;
    for (int c = lane * SIZE; c < cols; c += 32 * SIZE) {
        largest = max(largest, matmul_fp8_largest_(load_pack(from + c)));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    const int exponent = e4m3_exponent(largest);
    const float inverse = e4m3_power(-exponent);
    for (int c = lane * SIZE; c < cols; c += 32 * SIZE) {
        const Pack<T> pack = load_pack(from + c);
        Elements<uint8_t, SIZE> to;
#pragma unroll
        for (int i = 0; i < SIZE; i += 2) {
            const unsigned two =
                e4m3_from_floats(to_float(pack[i]) * inverse, to_float(pack[i + 1]) * inverse);
            to[i] = (uint8_t)two;
            to[i + 1] = (uint8_t)(two >> 8);
        }
        matmul_fp8_store_(codes + (size_t)row * cols + c, to);
    }
    if (lane == 0) {
        scales[row] = e4m3_power(exponent);
    }
}

// Raises the largest magnitudes of columns, zero before. Warp w of a block compares rows w, w + 8,
// ... of a piece of a matrix, a lane a pack of columns.
// grid   ceil(cols / (32 * SIZE)), ceil(rows / 64)      block   256      shared   8 KiB
// moves  rows*cols in. Bound by memory.
// order  none that counts.
// needs  as above
template <class T>
__global__ void __launch_bounds__(256)
    matmul_fp8_largest_kernel(uint32_t* largest, const T* x, int rows, int cols) {
    constexpr int SIZE = Pack<T>::SIZE;
    SMEM_ARRAY(uint32_t, of_warp, [8][32 * SIZE]);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, first = (int)blockIdx.x * 32 * SIZE,
              c = first + lane * SIZE, begin = (int)blockIdx.y * MATMUL_FP8_DEEP_,
              end = min(begin + MATMUL_FP8_DEEP_, rows);
    uint32_t own[SIZE] = {};
    for (int r = begin + warp; r < end && c < cols; r += 8) {
        const Pack<T> pack = load_pack(x + (size_t)r * cols + c);
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            own[i] = max(own[i], e4m3_magnitude(to_float(pack[i])));
        }
    }
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        of_warp[warp][lane * SIZE + i] = own[i];
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < 32 * SIZE && first + i < cols; i += 256) {
        uint32_t most = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) {
            most = max(most, of_warp[w][i]);
        }
        atomicMax(largest + first + i, most);
    }
}

// Quantizes and transposes a tile of 64 x 64: codes (cols, rows), scales (cols).
// grid   ceil(cols / 64), ceil(rows / 64)      block   256      shared   5 KiB
// moves  rows*cols in, rows*cols bytes and cols fp32 out. Bound by memory.
// order  fixed.
// needs  rows, too, a multiple of 16
template <class T>
__global__ void __launch_bounds__(256)
    matmul_fp8_turn_kernel(uint8_t* codes, float* scales, const uint32_t* largest, const T* x, int rows,
                           int cols) {
    constexpr int SIZE = Pack<T>::SIZE, TILE = MATMUL_FP8_TILE_, PACKS = TILE / SIZE;
    SMEM_ARRAY(uint8_t, tile, [TILE][TILE + MATMUL_FP8_PAD_]);
    SMEM_ARRAY(float, inverse, [TILE]);
    const int t = (int)threadIdx.x, c0 = (int)blockIdx.x * TILE, r0 = (int)blockIdx.y * TILE;
    if (t < TILE && c0 + t < cols) {
        const int exponent = e4m3_exponent(largest[c0 + t]);
        inverse[t] = e4m3_power(-exponent);
        if (blockIdx.y == 0) {
            scales[c0 + t] = e4m3_power(exponent);
        }
    }
    __syncthreads();
    for (int i = t; i < TILE * PACKS; i += 256) {
        const int r = i / PACKS, c = i % PACKS * SIZE;
        if (r0 + r < rows && c0 + c < cols) {
            const Pack<T> pack = load_pack(x + (size_t)(r0 + r) * cols + c0 + c);
#pragma unroll
            for (int k = 0; k < SIZE; k += 2) {
                const unsigned two = e4m3_from_floats(to_float(pack[k]) * inverse[c + k],
                                                      to_float(pack[k + 1]) * inverse[c + k + 1]);
                tile[c + k][r] = (uint8_t)two;
                tile[c + k + 1][r] = (uint8_t)(two >> 8);
            }
        }
    }
    __syncthreads();
    for (int i = t; i < TILE * TILE / 16; i += 256) {
        const int c = i / (TILE / 16), r = i % (TILE / 16) * 16;
        if (c0 + c < cols && r0 + r < rows) {
            Elements<uint8_t, 16> to;
#pragma unroll
            for (int k = 0; k < 16; k++) {
                to[k] = tile[c][r + k];
            }
            matmul_fp8_store_(codes + (size_t)(c0 + c) * rows + r0 + r, to);
        }
    }
}

// Sets codes (rows, cols) and scales (rows) of x.
template <class T>
static inline void matmul_fp8_rows(uint8_t* codes, float* scales, const T* x, int rows, int cols,
                                   const Gpu* gpu) {
    assert(cols % MATMUL_FP8_UNIT == 0);
    launch(matmul_fp8_rows_kernel<T>, (unsigned)ceil_div(rows, 8), 256, 0, gpu, codes, scales, x, rows, cols);
}

// Sets codes (cols, rows) and scales (cols) of x^T; `largest` (cols) is memory that it uses.
template <class T>
static inline void matmul_fp8_turned(uint8_t* codes, float* scales, uint32_t* largest, const T* x, int rows,
                                     int cols, const Gpu* gpu) {
    const int wide = 32 * Pack<T>::SIZE;
    assert(cols % MATMUL_FP8_UNIT == 0 && rows % MATMUL_FP8_UNIT == 0);
    CUDA_CHECK(cudaMemsetAsync(largest, 0, (size_t)cols * sizeof(uint32_t), gpu->stream));
    launch(matmul_fp8_largest_kernel<T>,
           dim3((unsigned)ceil_div(cols, wide), (unsigned)ceil_div(rows, MATMUL_FP8_DEEP_)), 256, 0, gpu,
           largest, x, rows, cols);
    launch(matmul_fp8_turn_kernel<T>,
           dim3((unsigned)ceil_div(cols, MATMUL_FP8_TILE_), (unsigned)ceil_div(rows, MATMUL_FP8_TILE_)), 256,
           0, gpu, codes, scales, (const uint32_t*)largest, x, rows, cols);
}

// ---- matmuls ----

// Sets out (N, cols) = add + left right^T + bias from the factors; add and bias may be NULL.
template <class T>
static inline void matmul_fp8_product_(T* out, const T* add, const T* bias, int N, int depth, int cols,
                                       const MatmulFp8Factors* f, MatmulGpu* ctx) {
    MatmulKey key = {N,           cols, depth, 0, 1, DTYPE_E4M3, DTYPE_OF(T), CUBLASLT_EPILOGUE_BIAS,
                     add != NULL, 0,    1};
    MatmulOperands_ x = {out, add, f->left, f->right, bias, NULL, NULL, f->left_scales, f->right_scales};
    if (bias && matmul_try_(key, x, ctx)) {
        return;
    }
    key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    x.bias = NULL;
    CHECK(matmul_try_(key, x, ctx),
          "matmul %s: cublasLt %zu has no algorithm with a scale for each row; --matmul fp8 needs 12.9 or "
          "newer",
          matmul_name_(&key).text, cublasLtGetVersion());
    if (bias) {
        matmul_add_bias_(out, bias, N, cols, ctx->gpu);
    }
}

// Sets out (N, OC) = add + inp weight^T + bias; add and bias may be NULL.
template <class T>
static inline void matmul_fp8_forward(T* out, const T* add, const T* inp, const T* weight, const T* bias,
                                      int N, int C, int OC, const MatmulFp8Factors* f, MatmulGpu* ctx) {
    assert(out != add);
    matmul_fp8_rows(f->left, f->left_scales, inp, N, C, ctx->gpu);
    matmul_fp8_rows(f->right, f->right_scales, weight, OC, C, ctx->gpu);
    matmul_fp8_product_(out, add, bias, N, C, OC, f, ctx);
}

// Sets dinp (N, C).
template <class T>
static inline void matmul_fp8_backward_input(T* dinp, const T* dout, const T* weight, int N, int C, int OC,
                                             const MatmulFp8Factors* f, MatmulGpu* ctx) {
    matmul_fp8_rows(f->left, f->left_scales, dout, N, OC, ctx->gpu);
    matmul_fp8_turned(f->right, f->right_scales, f->largest, weight, OC, C, ctx->gpu);
    matmul_fp8_product_(dinp, (const T*)NULL, (const T*)NULL, N, OC, C, f, ctx);
}

// ---- fp8 or T ----

// Returns true if cublasLt gives scales to rows on this device, or on an H100 if there is none.
static inline int matmul_fp8_is_on(int device) { return matmul_major_(device) == 9; }

// Does an operation with a matmul in fp8, or in T if autotune finds that faster. `epilogue` tells
// operations with matmuls of the same sizes apart. One that cannot be repeated takes the way of an
// earlier race.
template <class T, class InFp8, class InT>
static inline void matmul_fp8_or(int N, int cols, int depth, int epilogue, int adds, int may_repeat,
                                 MatmulGpu* ctx, const InFp8& in_fp8, const InT& in_t) {
    const MatmulKey key = {N, cols, depth, 0, 1, DTYPE_E4M3, DTYPE_OF(T), epilogue, adds, 0, 1};
    static const char* const words[] = {"in fp8", "without fp8"};
    MatmulRace race = matmul_race(key, {0, 2, 0, words, ""}, may_repeat || matmul_decision_(&key, ctx), ctx);
    do {
        if (race.way == 0) {
            in_fp8();
        } else {
            in_t();
        }
    } while (matmul_race_continues(&race, ctx));
}

#endif
