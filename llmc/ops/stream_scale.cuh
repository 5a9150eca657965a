/*
stream_scale.cuh -- stream_scale.h on the GPU: the same functions on X = float, bf16 or fp16,
computed in fp32. The scales are read on the GPU.
*/
#ifndef LLMC_STREAM_SCALE_CUH
#define LLMC_STREAM_SCALE_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/stream_scale.h"

template <class X> struct StreamScaleGpu {
    const X *x, *x0, *scales;
    size_t n;
};

// A thread computes an element.
// grid   ceil(n / 256)      block   256      shared   none
// moves  2n in, n out. Bound by memory.
// order  fixed: no sums.
template <class X> __global__ void stream_scale_kernel(X* out, StreamScaleGpu<X> s) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < s.n) {
        const float a = to_float(s.scales[0]), b = to_float(s.scales[1]);
        out[i] = from_float<X>(a * to_float(s.x[i]) + b * to_float(s.x0[i]));
    }
}

template <class X> static inline void stream_scale_forward(X* out, StreamScaleGpu<X> s, const Gpu* gpu) {
    launch(stream_scale_kernel<X>, (unsigned)ceil_div(s.n, (size_t)256), 256, 0, gpu, out, s);
}

// Block p does part p of the elements, and sets its sums.
// grid   STREAM_PARTS      block   256      shared   of block_sum
// moves  3n in, 2n out; n more in if dx0 is added to. Bound by memory.
// order  fixed: by thread, then by warp.
template <class X>
__global__ void stream_scale_backward_kernel(X* dx, X* dx0, double* parts, StreamScaleGpu<X> s,
                                             GradientMode first) {
    const size_t each = (s.n + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each,
                 end = begin + each < s.n ? begin + each : s.n;
    const float a = to_float(s.scales[0]), b = to_float(s.scales[1]);
    float of_x = 0, of_x0 = 0;
    for (size_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const float d = to_float(dx[i]), before = first == GRADIENT_ADD ? to_float(dx0[i]) : 0;
        of_x += d * to_float(s.x[i]);
        of_x0 += d * to_float(s.x0[i]);
        dx0[i] = from_float<X>(before + b * d);
        dx[i] = from_float<X>(a * d);
    }
    of_x = block_sum(of_x);
    of_x0 = block_sum(of_x0);
    if (threadIdx.x == 0) {
        parts[2 * blockIdx.x] = of_x;
        parts[2 * blockIdx.x + 1] = of_x0;
    }
}

// Thread i adds up the sums of scale i.
// grid   1      block   2      shared   none
// moves  2 STREAM_PARTS doubles in
// order  fixed
template <class G>
__global__ void stream_scale_sums_kernel(G* dscales, const double* parts, GradientMode mode) {
    double sum = mode == GRADIENT_ADD ? (double)to_float(dscales[threadIdx.x]) : 0;
    for (int p = 0; p < STREAM_PARTS; p++) {
        sum += parts[2 * p + threadIdx.x];
    }
    dscales[threadIdx.x] = from_float<G>((float)sum);
}

template <class X>
static inline void stream_scale_backward(X* dx, X* dx0, Gradient dscales, double* parts, StreamScaleGpu<X> s,
                                         GradientMode first, GradientMode mode, const Gpu* gpu) {
    launch(stream_scale_backward_kernel<X>, STREAM_PARTS, 256, 0, gpu, dx, dx0, parts, s, first);
    if (dscales.data) {
        GRADIENT_DISPATCH(dscales, X,
                          launch(stream_scale_sums_kernel<G>, 1, 2, 0, gpu, (G*)dscales.data, parts, mode));
    }
}

#endif
