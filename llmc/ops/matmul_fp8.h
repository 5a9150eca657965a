/*
matmul_fp8.h -- two of the three matmuls of a linear layer (matmul.h) with factors in E4M3: the
contract, and the CPU version.

    out[n][o]  = sum_c inp8[n][c] weight8[o][c] + bias[o]
    dinp[n][c] = sum_o dout8[n][o] turned8[c][o]            turned: weight^T

    out, dout   (N, OC)      inp, dinp   (N, C)      weight   (OC, C)      bias   (OC), may be NULL

Each row of a factor has a scale of its own, a power of two (float8.h). So what a token gets does
not depend on the others in the batch, nor on how ranks divide it. A row of weight^T, a column of
weight, has another scale than the rows that it crosses: a matrix is rounded twice. The gradient of
the weight sums over tokens, whose scales differ: it stays the matmul of matmul.h.

Products of two values of E4M3 with their scales are exact in fp32. On the CPU factors are rounded
to such values, and multiplied in fp32; only the sum rounds, as it does for other factors.
*/
#ifndef LLMC_MATMUL_FP8_H
#define LLMC_MATMUL_FP8_H

#include <stddef.h>

#include "llmc/base/memory.h"
#include "llmc/ops/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

// Memory for the rounded factors of a matmul.
typedef struct {
    float *left, *right;
} MatmulFp8Scratch;

// Opens scratch for left factors of up to `left` elements, and matrices of up to `right`.
static inline void matmul_fp8_open(MatmulFp8Scratch* scratch, Memory* memory, size_t left, size_t right) {
    scratch->left = (float*)memory_take(memory, "scratch: factors of matmul in fp8", MEMORY_DEVICE,
                                        (left + right) * sizeof(float));
    scratch->right = scratch->left ? scratch->left + left : NULL;
}

// Set out (rows, cols) to the values that x has in E4M3 with a scale for each row, or each column.
void matmul_fp8_round_rows_cpu(float* out, const float* x, int rows, int cols);
void matmul_fp8_round_columns_cpu(float* out, const float* x, int rows, int cols);

// Sets out (N, OC).
void matmul_fp8_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                            MatmulSizes sizes, MatmulFp8Scratch* fp8, MatmulScratch* scratch);

// Sets dinp (N, C).
void matmul_fp8_backward_input_cpu(float* dinp, const float* dout, const float* weight, MatmulSizes sizes,
                                   MatmulFp8Scratch* fp8, MatmulScratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef MATMUL_FP8_IMPLEMENTATION

#include "llmc/base/float8.h"
#include "llmc/base/sizes.h"

enum { MATMUL_FP8_COLUMNS_ = 64 }; // columns that a thread rounds together

static float matmul_fp8_round_(float x, float inverse, float scale) {
    return e4m3_to_float(e4m3_from_float(x * inverse)) * scale;
}

void matmul_fp8_round_rows_cpu(float* out, const float* x, int rows, int cols) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        const float* from = x + (size_t)r * (size_t)cols;
        float* to = out + (size_t)r * (size_t)cols;
        uint32_t largest = 0;
        for (int c = 0; c < cols; c++) {
            const uint32_t magnitude = e4m3_magnitude(from[c]);
            largest = magnitude > largest ? magnitude : largest;
        }
        const int exponent = e4m3_exponent(largest);
        const float inverse = e4m3_power(-exponent), scale = e4m3_power(exponent);
        for (int c = 0; c < cols; c++) {
            to[c] = matmul_fp8_round_(from[c], inverse, scale);
        }
    }
}

// Rounds `cols` columns, up to MATMUL_FP8_COLUMNS_, of rows that are `stride` apart.
static void matmul_fp8_round_some_(float* out, const float* x, int rows, int cols, size_t stride) {
    uint32_t largest[MATMUL_FP8_COLUMNS_] = {0};
    float inverse[MATMUL_FP8_COLUMNS_], scale[MATMUL_FP8_COLUMNS_];
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) {
            const uint32_t magnitude = e4m3_magnitude(x[(size_t)r * stride + (size_t)c]);
            largest[c] = magnitude > largest[c] ? magnitude : largest[c];
        }
    }
    for (int c = 0; c < cols; c++) {
        const int exponent = e4m3_exponent(largest[c]);
        inverse[c] = e4m3_power(-exponent);
        scale[c] = e4m3_power(exponent);
    }
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) {
            const size_t at = (size_t)r * stride + (size_t)c;
            out[at] = matmul_fp8_round_(x[at], inverse[c], scale[c]);
        }
    }
}

void matmul_fp8_round_columns_cpu(float* out, const float* x, int rows, int cols) {
#pragma omp parallel for schedule(static)
    for (int c = 0; c < cols; c += MATMUL_FP8_COLUMNS_) {
        matmul_fp8_round_some_(out + c, x + c, rows, int_min(MATMUL_FP8_COLUMNS_, cols - c), (size_t)cols);
    }
}

void matmul_fp8_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                            MatmulSizes sizes, MatmulFp8Scratch* fp8, MatmulScratch* scratch) {
    matmul_fp8_round_rows_cpu(fp8->left, inp, sizes.N, sizes.C);
    matmul_fp8_round_rows_cpu(fp8->right, weight, sizes.OC, sizes.C);
    matmul_forward_cpu(out, fp8->left, fp8->right, bias, sizes, scratch);
}

void matmul_fp8_backward_input_cpu(float* dinp, const float* dout, const float* weight, MatmulSizes sizes,
                                   MatmulFp8Scratch* fp8, MatmulScratch* scratch) {
    matmul_fp8_round_rows_cpu(fp8->left, dout, sizes.N, sizes.OC);
    matmul_fp8_round_columns_cpu(fp8->right, weight, sizes.OC, sizes.C);
    matmul_backward_input_cpu(dinp, fp8->left, fp8->right, sizes, scratch);
}

#endif // MATMUL_FP8_IMPLEMENTATION

#endif
