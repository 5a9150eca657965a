/*
gated_norm.cuh -- gated_norm.h on the GPU: the same functions on X = float, bf16 or fp16, computed
in fp32.
*/
#ifndef LLMC_GATED_NORM_CUH
#define LLMC_GATED_NORM_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/gated_norm.h"

enum {
    GATED_NORM_WARPS = 8,
    GATED_NORM_THREADS = 32 * GATED_NORM_WARPS,
    GATED_NORM_COLUMNS = GATED_NORM_WIDEST / 32 // of a lane
};

template <class X> struct GatedNormGpu {
    float eps;
    const X *gate, *weight;
    float* rstd;
    int N, C;
};

// The gradient of weight, and room for its partial sums: gated_norm_partial floats.
typedef struct {
    Gradient dweight;
    GradientMode mode;
    float* partial;
} GatedNormGradientsGpu;

static inline size_t gated_norm_partial(int N, int C) { return (size_t)column_sums_groups(N, C) * (size_t)C; }

// Loads columns lane, lane + 32, ... of a row; those past the last are 0.
template <class X> __device__ inline void gated_norm_load_(float* to, const X* row, int C) {
#pragma unroll
    for (int i = 0; i < GATED_NORM_COLUMNS; i++) {
        const int c = (int)threadIdx.x % 32 + 32 * i;
        to[i] = c < C ? to_float(row[c]) : 0.0f;
    }
}

// A warp normalizes a row.
// grid   ceil(N / 8)      block   256 = 8 rows      shared   none
// moves  2*N*C in, N*C out. Bound by memory.
// order  fixed
// needs  C <= 256
template <class X>
__global__ void __launch_bounds__(GATED_NORM_THREADS)
    gated_norm_forward_kernel(X* out, const X* inp, GatedNormGpu<X> norm) {
    const int lane = (int)threadIdx.x % 32, C = norm.C;
    const size_t n = (size_t)blockIdx.x * GATED_NORM_WARPS + threadIdx.x / 32;
    float x[GATED_NORM_COLUMNS], gate[GATED_NORM_COLUMNS], weight[GATED_NORM_COLUMNS], square = 0.0f;
    if (n >= (size_t)norm.N) {
        return; // the whole warp
    }
    gated_norm_load_(x, inp + n * C, C);
    gated_norm_load_(gate, norm.gate + n * C, C);
    gated_norm_load_(weight, norm.weight, C);
#pragma unroll
    for (int i = 0; i < GATED_NORM_COLUMNS; i++) {
        square += x[i] * x[i];
    }
    const float rstd = rsqrtf(warp_sum(square) / (float)C + norm.eps);
#pragma unroll
    for (int i = 0; i < GATED_NORM_COLUMNS; i++) {
        const int c = lane + 32 * i;
        if (c < C) {
            out[n * C + c] = from_float<X>(weight[i] * (x[i] * rstd) * (gate[i] / (1.0f + expf(-gate[i]))));
        }
    }
    if (lane == 0) {
        norm.rstd[n] = rstd;
    }
}

// A block computes the gradients of a group of rows, a warp every eighth row, and sums dweight.
// grid   groups      block   256      shared   8 KiB
// moves  3*N*C in, 2*N*C out, groups*C fp32 out. Bound by memory.
// order  fixed
// needs  C <= 256
template <class X>
__global__ void __launch_bounds__(GATED_NORM_THREADS)
    gated_norm_backward_kernel(X* dinp, X* dgate, float* partial, const X* dout, const X* inp,
                               GatedNormGpu<X> norm, int rows) {
    SMEM_ARRAY(float, of_warp, [GATED_NORM_WARPS][GATED_NORM_WIDEST]);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, C = norm.C,
              first = (int)blockIdx.x * rows, end = min(first + rows, norm.N);
    float weight[GATED_NORM_COLUMNS], sum[GATED_NORM_COLUMNS] = {};
    gated_norm_load_(weight, norm.weight, C);
    for (int n = first + warp; n < end; n += GATED_NORM_WARPS) {
        const size_t row = (size_t)n * C;
        const float rstd = norm.rstd[n];
        float x[GATED_NORM_COLUMNS], gate[GATED_NORM_COLUMNS], d[GATED_NORM_COLUMNS], dot = 0.0f;
        gated_norm_load_(x, inp + row, C);
        gated_norm_load_(gate, norm.gate + row, C);
        gated_norm_load_(d, dout + row, C);
#pragma unroll
        for (int i = 0; i < GATED_NORM_COLUMNS; i++) {
            const int c = lane + 32 * i;
            const float s = 1.0f / (1.0f + expf(-gate[i])), y = x[i] * rstd;
            sum[i] += d[i] * y * gate[i] * s;
            if (c < C) {
                dgate[row + c] = from_float<X>(d[i] * weight[i] * y * s * (1.0f + gate[i] * (1.0f - s)));
            }
            d[i] *= weight[i] * gate[i] * s;
            dot += d[i] * y;
        }
        const float slope = warp_sum(dot) / (float)C;
#pragma unroll
        for (int i = 0; i < GATED_NORM_COLUMNS; i++) {
            const int c = lane + 32 * i;
            if (c < C) {
                dinp[row + c] = from_float<X>(rstd * (d[i] - x[i] * rstd * slope));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < GATED_NORM_COLUMNS; i++) {
        of_warp[warp][lane + 32 * i] = sum[i];
    }
    __syncthreads();
    for (int c = (int)threadIdx.x; c < C; c += GATED_NORM_THREADS) {
        float total = 0.0f;
        for (int w = 0; w < GATED_NORM_WARPS; w++) {
            total += of_warp[w][c];
        }
        partial[(size_t)blockIdx.x * C + c] = total;
    }
}

template <class X>
static inline void gated_norm_forward(X* out, const X* inp, const GatedNormGpu<X>* norm, const Gpu* gpu) {
    assert(norm->C <= GATED_NORM_WIDEST);
    launch(gated_norm_forward_kernel<X>, (unsigned)ceil_div(norm->N, (int)GATED_NORM_WARPS),
           GATED_NORM_THREADS, 0, gpu, out, inp, *norm);
}

template <class X>
static inline void gated_norm_backward(X* dinp, X* dgate, const GatedNormGradientsGpu* d, const X* dout,
                                       const X* inp, const GatedNormGpu<X>* norm, const Gpu* gpu) {
    const int most = column_sums_groups(norm->N, norm->C), rows = ceil_div(norm->N, most),
              groups = rows > 0 ? ceil_div(norm->N, rows) : 0;
    launch(gated_norm_backward_kernel<X>, (unsigned)groups, GATED_NORM_THREADS, 0, gpu, dinp, dgate,
           d->partial, dout, inp, *norm, rows);
    if (d->dweight.data) {
        column_sums_finish<X>(&d->dweight, 1, ColumnPartials<float>{d->partial, groups, norm->C, norm->C},
                              d->mode, gpu);
    }
}

#endif
