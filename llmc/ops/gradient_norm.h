/*
gradient_norm.h -- the sum of squares of a gradient: the contract, and the CPU version.

    sum = sum_i grad_i^2

    grad   (n)   fp32

Squares are added in fp32 within blocks of GRADIENT_BLOCK elements, and the sums of the blocks in
WideSum. So the result has the same bits for any number of threads, and for a gradient that is cut
at multiples of a block.
*/
#ifndef LLMC_GRADIENT_NORM_H
#define LLMC_GRADIENT_NORM_H

#include <stddef.h>

#include "llmc/base/wide_sum.h"

#ifdef __cplusplus
extern "C" {
#endif

// Elements of a block; divides the parts of a gradient that ranks own (TENSOR_SHARD_UNIT).
#define GRADIENT_BLOCK 1024

// Adds to *sum the squares of n gradients, in blocks counted from the first element. `partial` has
// room for n / GRADIENT_BLOCK + 1 doubles.
void gradient_square_sum_cpu(WideSum* sum, const float* grad, size_t n, double* partial);

#ifdef __cplusplus
}
#endif

#ifdef GRADIENT_NORM_IMPLEMENTATION

#include "llmc/base/vec.h"

static double gradient_block_square_sum_(const float* grad, size_t n) {
    Vec sum[4]; // four, so that no addition waits for the one before
    for (int j = 0; j < 4; j++) {
        sum[j] = vec_all(0.0f);
    }
    size_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        for (int j = 0; j < 4; j++) {
            const Vec g = vec_load(grad + i + (size_t)j * LANES);
            sum[j] += g * g;
        }
    }
    double total = vec_hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < n; i++) {
        total += (double)grad[i] * grad[i];
    }
    return total;
}

void gradient_square_sum_cpu(WideSum* sum, const float* grad, size_t n, double* partial) {
    const size_t blocks = (n + GRADIENT_BLOCK - 1) / GRADIENT_BLOCK;
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < blocks; b++) {
        const size_t start = b * GRADIENT_BLOCK, left = n - start;
        partial[b] = gradient_block_square_sum_(grad + start, left < GRADIENT_BLOCK ? left : GRADIENT_BLOCK);
    }
    for (size_t b = 0; b < blocks; b++) {
        wide_sum_add(sum, partial[b]);
    }
}

#endif // GRADIENT_NORM_IMPLEMENTATION

#endif
