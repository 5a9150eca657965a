/*
dropout.cuh -- dropout.h on the GPU, on T = float, bf16 or fp16, computed in fp32: a residual sum
with dropout, which is also its gradient without a residual.
*/
#ifndef LLMC_DROPOUT_CUH
#define LLMC_DROPOUT_CUH

#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/dropout.h"

enum { DROPOUT_WIDTH = 4 }; // random words of a block

// A thread computes WIDTH adjacent elements of a row: four, which share random bits, or one.
// grid   ceil(R C / (256 WIDTH))      block   256      shared   none
// moves  2 R*C in, R*C out; R*C in without a residual. Bound by memory.
// order  fixed: no sums
// needs  C a multiple of WIDTH; addresses aligned to WIDTH elements
template <class T, int WIDTH>
__global__ void dropout_kernel(T* out, const T* residual, const T* inp, const DropoutBatch* batch, Dropout d,
                               float factor, size_t n, int C) {
    const size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
    if (at >= n) {
        return;
    }
    const int r = (int)(at / C), c = (int)(at % C);
    d.batch = batch;
    const DropoutRow row = dropout_row(&d, r);
    const RandBlock random = rand_block(batch->key, row.stream, row.counter + (uint64_t)(c / 4));
    const Elements<T, WIDTH> x = elements_load_kept<WIDTH>(inp + at);
    Elements<T, WIDTH> sum = residual ? elements_load_kept<WIDTH>(residual + at) : Elements<T, WIDTH>();
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const int k = WIDTH == 1 ? c % 4 : i;
        const uint32_t word =
            k < 2 ? (k == 0 ? random.word[0] : random.word[1]) : (k == 2 ? random.word[2] : random.word[3]);
        const float old = residual ? to_float(sum[i]) : 0.0f;
        sum[i] = from_float<T>(old + factor * dropout_factor(&d, word) * to_float(x[i]));
    }
    elements_store_kept(out + at, sum);
}

static inline int dropout_is_aligned_(const void* x, size_t bytes) { return (uintptr_t)x % bytes == 0; }

// Sets out (R, C) = residual + factor m inp; NULL for `residual` is zeros. out may be either.
template <class T>
static inline void dropout_sum(T* out, const T* residual, const T* inp, const Dropout* d, float factor, int R,
                               int C, const Gpu* gpu) {
    const size_t n = (size_t)R * (size_t)C, bytes = DROPOUT_WIDTH * sizeof(T);
    const int packs = C % DROPOUT_WIDTH == 0 && dropout_is_aligned_(out, bytes) &&
                      dropout_is_aligned_(residual, bytes) && dropout_is_aligned_(inp, bytes);
    const size_t per_block = 256 * (size_t)(packs ? DROPOUT_WIDTH : 1);
    launch(packs ? dropout_kernel<T, DROPOUT_WIDTH> : dropout_kernel<T, 1>, (unsigned)ceil_div(n, per_block),
           256, 0, gpu, out, residual, inp, d->batch, *d, factor, n, C);
}

#endif
