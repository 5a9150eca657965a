/*
lion.cuh -- lion.h on the GPU: four elements of it, for the kernel of all rules (optimizer.cuh).

    x     4   fp32   in registers, set
    g     4   T or fp32
    m     4   fp32   updated, at a multiple of 16 bytes

defines: lion_four_
*/
#ifndef LLMC_LION_CUH
#define LLMC_LION_CUH

#include "llmc/adamw.cuh"
#include "llmc/lion.h"

// The new parameter. Where the direction is NaN it is 0, as on the CPU.
__device__ inline float lion_element_(float param, float grad, float* m, UpdateRates_ rates,
                                      const UpdateScalars_& s) {
    const float g = grad * s.grad_scale;
    const float direction = fmaf(s.beta1, *m, (1.0f - s.beta1) * g);
    const float step = direction > 0 ? rates.step : direction < 0 ? -rates.step : 0.0f;
    *m = fmaf(s.beta2, *m, (1.0f - s.beta2) * g);
    return fmaf(rates.keep, param, -step);
}

// Updates four parameters x and their means.
template <class G>
__device__ inline void lion_four_(Four_<float>* x, const Four_<G>& g, float* m_at, UpdateRates_ rates,
                                  const UpdateScalars_& s) {
    Four_<float> m = four_load_(m_at);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        x->element[k] = lion_element_(x->element[k], to_float(g.element[k]), &m.element[k], rates, s);
    }
    four_store_(m_at, m);
}

#endif
