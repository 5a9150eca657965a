/*
lion.cuh -- lion.h on the GPU: four elements of it, for the kernel of all rules
(update_elements.cuh).

    x     4   fp32   in registers, set
    g     4   T or fp32
    m     4   fp32   updated, at a multiple of 16 bytes
*/
#ifndef LLMC_LION_CUH
#define LLMC_LION_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/lion.h"
#include "llmc/optim/master_weights.cuh"

// Returns the new parameter. A direction of NaN counts as 0, as on the CPU.
__device__ inline float lion_element_(float param, float grad, float* m, UpdateRates rates,
                                      const UpdateScalars& s) {
    const float g = grad * s.grad_scale;
    const float direction = fmaf(s.beta1, *m, (1.0f - s.beta1) * g);
    const float step = direction > 0 ? rates.step : direction < 0 ? -rates.step : 0.0f;
    *m = fmaf(s.beta2, *m, (1.0f - s.beta2) * g);
    return fmaf(decay_keep(rates.keep, s.decay, step, param), param, -step);
}

// Updates four parameters x and their means.
template <class G>
__device__ inline void lion_four(Elements<float, 4>* x, const Elements<G, 4>& g, float* m_at,
                                 UpdateRates rates, const UpdateScalars& s) {
    Elements<float, 4> m = elements_load<4>(m_at);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        (*x)[k] = lion_element_((*x)[k], to_float(g[k]), &m[k], rates, s);
    }
    elements_store(m_at, m);
}

#endif
