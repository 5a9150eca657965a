/*
matmul_fp8.cuh -- matmul_fp8.h on the GPU: factors of T = float, bf16 or fp16 as rows of E4M3
(e4m3_rows.cuh), also transposed, and cublasLt's matmuls of them, which multiply each sum by the
scales of its row and its column.

Codes and scales have the bits of matmul_fp8.h. Sums do not: tensor cores add products of fp8 with
fewer bits than fp32 has, and cublasLt adds their sums in fp32 now and then.

It needs Hopper, cublasLt 12.9, and C and OC that are multiples of E4M3_UNIT.
*/
#ifndef LLMC_MATMUL_FP8_CUH
#define LLMC_MATMUL_FP8_CUH

#include <assert.h>

#include "llmc/base/float8.h"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/ops/e4m3_rows.cuh"
#include "llmc/ops/matmul.cuh"

enum {
    MATMUL_FP8_TILE_ = 64,
    MATMUL_FP8_PAD_ = 16,  // bytes after a row of a tile, for the banks of shared memory
    MATMUL_FP8_DEEP_ = 64, // rows of a matrix whose magnitudes a block compares
    MATMUL_FP8_ALIGN_ = 256
};

// ---- memory ----

static inline size_t matmul_fp8_aligned_(size_t bytes) {
    return (bytes + MATMUL_FP8_ALIGN_ - 1) / MATMUL_FP8_ALIGN_ * MATMUL_FP8_ALIGN_;
}

// Returns the bytes of codes and scales of rows.
static inline size_t matmul_fp8_bytes(size_t rows, size_t cols) {
    return matmul_fp8_aligned_(rows * cols) + matmul_fp8_aligned_(rows * sizeof(float));
}

// Returns codes and scales at `*at`, and moves it past them; none if it is NULL.
static inline E4m3Rows matmul_fp8_cut(char** at, size_t rows, size_t cols) {
    E4m3Rows cut = {(uint8_t*)*at, NULL};
    if (*at) {
        cut.scales = (float*)(void*)(*at + matmul_fp8_aligned_(rows * cols));
        *at += matmul_fp8_bytes(rows, cols);
    }
    return cut;
}

// ---- a matrix and its transpose ----

// Raises the largest magnitudes of columns, zero before. Warp w of a block compares rows w, w + 8,
// ... of a piece of a matrix, a lane a pack of columns.
// grid   ceil(cols / (32 * SIZE)), ceil(rows / 64)      block   256      shared   8 KiB
// moves  rows*cols in. Bound by memory.
// order  none that counts.
// needs  cols a multiple of 16, x aligned to 16 bytes
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
// needs  rows and cols multiples of 16, x and codes aligned to 16 bytes
template <class T>
__global__ void __launch_bounds__(256)
    matmul_fp8_turn_kernel(E4m3Rows to, const uint32_t* largest, const T* x, int rows, int cols) {
    constexpr int SIZE = Pack<T>::SIZE, TILE = MATMUL_FP8_TILE_, PACKS = TILE / SIZE;
    SMEM_ARRAY(uint8_t, tile, [TILE][TILE + MATMUL_FP8_PAD_]);
    SMEM_ARRAY(float, inverse, [TILE]);
    const int t = (int)threadIdx.x, c0 = (int)blockIdx.x * TILE, r0 = (int)blockIdx.y * TILE;
    if (t < TILE && c0 + t < cols) {
        const int exponent = e4m3_exponent(largest[c0 + t]);
        inverse[t] = e4m3_power(-exponent);
        if (blockIdx.y == 0) {
            to.scales[c0 + t] = e4m3_power(exponent);
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
            Elements<uint8_t, 16> codes;
#pragma unroll
            for (int k = 0; k < 16; k++) {
                codes[k] = tile[c][r + k];
            }
            elements_store_kept(to.codes + (size_t)(c0 + c) * rows + r0 + r, codes);
        }
    }
}

// Sets codes (cols, rows) and scales (cols) of x^T; `largest` (cols) is memory that it uses.
template <class T>
static inline void matmul_fp8_turned(E4m3Rows to, uint32_t* largest, const T* x, int rows, int cols,
                                     const Gpu* gpu) {
    const int wide = 32 * Pack<T>::SIZE;
    assert(cols % E4M3_UNIT == 0 && rows % E4M3_UNIT == 0);
    CUDA_CHECK(cudaMemsetAsync(largest, 0, (size_t)cols * sizeof(uint32_t), gpu->stream));
    launch(matmul_fp8_largest_kernel<T>,
           dim3((unsigned)ceil_div(cols, wide), (unsigned)ceil_div(rows, MATMUL_FP8_DEEP_)), 256, 0, gpu,
           largest, x, rows, cols);
    launch(matmul_fp8_turn_kernel<T>,
           dim3((unsigned)ceil_div(cols, MATMUL_FP8_TILE_), (unsigned)ceil_div(rows, MATMUL_FP8_TILE_)), 256,
           0, gpu, to, (const uint32_t*)largest, x, rows, cols);
}

// ---- matmuls ----

// Returns the key of an operation with a matmul in fp8. `epilogue` tells operations with matmuls of
// the same sizes apart.
template <class T> static inline MatmulKey matmul_fp8_key(MatmulSizes sizes, int epilogue, int adds) {
    return {sizes.N, sizes.OC, sizes.C, 0, 1, DTYPE_E4M3, DTYPE_OF(T), epilogue, adds, 0, 1};
}

// Sets out (N, OC) = add + inp weight^T + bias; add, which is not out, and bias may be NULL.
template <class T>
static inline void matmul_fp8(T* out, const T* add, E4m3Rows inp, E4m3Rows weight, const T* bias,
                              MatmulSizes sizes, MatmulGpu* ctx) {
    MatmulKey key = matmul_fp8_key<T>(sizes, CUBLASLT_EPILOGUE_BIAS, add != NULL);
    MatmulOperands x = {out, add, inp.codes, weight.codes, bias, NULL, NULL, inp.scales, weight.scales};
    assert(out != add);
    if (bias && matmul_try(key, x, ctx)) {
        return;
    }
    key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    x.bias = NULL;
    CHECK(matmul_try(key, x, ctx),
          "matmul %s: cublasLt %zu has no algorithm with a scale for each row; --matmul fp8 needs 12.9 or "
          "newer",
          matmul_name(&key).text, cublasLtGetVersion());
    if (bias) {
        matmul_add_bias_(out, bias, sizes.N, sizes.OC, ctx->gpu);
    }
}

// ---- fp8 or T ----

// Returns true if cublasLt gives scales to rows on this device, or on an H100 if there is none.
static inline int matmul_fp8_is_on(int device) { return matmul_major(device) == 9; }

// Returns true unless autotune has found T faster for each operation that could be meant: forward
// or backward.
template <class T> static inline int matmul_fp8_may_win(MatmulSizes sizes, int is_forward, MatmulGpu* ctx) {
    const int epilogues[] = {is_forward ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT,
                             is_forward ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_DGELU};
    int loses = 0, wins = 0;
    for (int i = 0; i < 4; i++) {
        const MatmulKey key = matmul_fp8_key<T>(sizes, epilogues[i / 2], i % 2);
        const MatmulDecision* decision = matmul_decision(&key, ctx);
        loses += decision && decision->way != 0;
        wins += decision && decision->way == 0;
    }
    return wins > 0 || loses == 0;
}

// Does an operation in fp8, or in T if autotune finds that faster. One that cannot be repeated
// takes the way of an earlier race.
template <class InFp8, class InT>
static inline void matmul_fp8_or(MatmulKey key, int may_repeat, MatmulGpu* ctx, const InFp8& in_fp8,
                                 const InT& in_t) {
    static const char* const words[] = {"in fp8", "without fp8"};
    MatmulRace race = matmul_race(key, {0, 2, 0, words, ""}, may_repeat || matmul_decision(&key, ctx), ctx);
    do {
        if (race.way == 0) {
            in_fp8();
        } else {
            in_t();
        }
    } while (matmul_race_continues(&race, ctx));
}

#endif
