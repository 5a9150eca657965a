/*
sinks.cuh -- sinks.h on the GPU, on X = float, bf16 or fp16, computed in fp32.
*/
#ifndef LLMC_SINKS_CUH
#define LLMC_SINKS_CUH

#include "llmc/gpu/elements.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/sinks.h"

enum { SINKS_WARPS = 4, SINKS_TOKENS = 64 }; // of a block of the backward pass

// Multiplies out, one pack or element a thread.
// grid   ceil(N NH HS / WIDTH / 256)      block   256
// moves  N*NH*HS in and out. Bound by memory.
// needs  WIDTH 1, or a pack that divides HS.
template <class X, int WIDTH>
__global__ void sinks_out_kernel(X* out, const float* lse, const X* sinks, AttentionSizes sizes,
                                 size_t packs) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) {
        return;
    }
    const size_t head = i * WIDTH / sizes.HS; // of a token
    const int h = (int)(head % sizes.NH);
    const float share = sinks_share(lse[sinks_at(sizes, head / sizes.NH, h)], to_float(sinks[h]));
    float x[WIDTH];
    load_floats<WIDTH>(x, out + i * WIDTH);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        x[k] *= share;
    }
    store_floats<WIDTH>(out + i * WIDTH, x);
}

// grid   ceil(N NH / 256)      block   256      moves  N*NH fp32 in and out. Bound by memory.
template <class X> __global__ void sinks_lse_kernel(float* lse, const X* sinks, AttentionSizes sizes) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)sizes.B * sizes.NH * sizes.T) {
        lse[i] = sinks_lse(lse[i], to_float(sinks[i / sizes.T % sizes.NH]));
    }
}

template <class X>
static inline void sinks_forward(X* out, float* lse, const X* sinks, AttentionSizes sizes, const Gpu* gpu) {
    const size_t heads = (size_t)sizes.B * sizes.T * sizes.NH, all = heads * sizes.HS;
    constexpr int SIZE = Pack<X>::SIZE;
    if (sizes.HS % SIZE == 0) {
        launch(sinks_out_kernel<X, SIZE>, (unsigned)ceil_div(all / SIZE, (size_t)256), 256, 0, gpu, out, lse,
               sinks, sizes, all / SIZE);
    } else {
        launch(sinks_out_kernel<X, 1>, (unsigned)ceil_div(all, (size_t)256), 256, 0, gpu, out, lse, sinks,
               sizes, all);
    }
    launch(sinks_lse_kernel<X>, (unsigned)ceil_div(heads, (size_t)256), 256, 0, gpu, lse, sinks, sizes);
}

// Sums one head over SINKS_TOKENS tokens: a warp over every SINKS_WARPS-th, then the warps in
// order.
// grid   ceil(N / SINKS_TOKENS), NH      block   SINKS_WARPS warps      moves  out and dout once.
// order  fixed.
template <class X>
__global__ void sinks_backward_kernel(float* partial, const X* dout, const X* out, const float* lse,
                                      const X* sinks, AttentionSizes sizes) {
    SMEM_ARRAY(float, of_warp, [SINKS_WARPS]);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, h = (int)blockIdx.y;
    const int N = sizes.B * sizes.T, first = (int)blockIdx.x * SINKS_TOKENS,
              end = min(first + SINKS_TOKENS, N);
    const float sink = to_float(sinks[h]);
    float sum = 0;
    for (int n = first + warp; n < end; n += SINKS_WARPS) {
        const size_t row = ((size_t)n * sizes.NH + h) * sizes.HS;
        float dot = 0;
        for (int d = lane; d < sizes.HS; d += 32) {
            dot += to_float(dout[row + d]) * to_float(out[row + d]);
        }
        sum -= expf(sink - lse[sinks_at(sizes, (size_t)n, h)]) * warp_sum(dot);
    }
    if (lane == 0) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < SINKS_WARPS; w++) {
            sum += of_warp[w];
        }
        partial[(size_t)blockIdx.x * sizes.NH + h] = sum;
    }
}

// Sets or adds to dsinks (NH); `partial` has room for ceil(N / SINKS_TOKENS) * NH floats.
template <class X>
static inline void sinks_backward(Gradient dsinks, float* partial, const X* dout, const X* out,
                                  const float* lse, const X* sinks, AttentionSizes sizes, GradientMode mode,
                                  const Gpu* gpu) {
    const int groups = ceil_div(sizes.B * sizes.T, (int)SINKS_TOKENS);
    launch(sinks_backward_kernel<X>, dim3((unsigned)groups, (unsigned)sizes.NH), 32 * SINKS_WARPS, 0, gpu,
           partial, dout, out, lse, sinks, sizes);
    column_sums_finish<X>(&dsinks, 1, ColumnPartials<float>{partial, groups, sizes.NH, sizes.NH}, mode, gpu);
}

#endif
