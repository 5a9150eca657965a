/*
sgd.cuh -- sgd.h on the GPU: four elements of it, for the kernel of all rules
(update_elements.cuh).

    x     4   fp32   in registers, set
    g     4   T or fp32
    m     4   fp32   updated, at a multiple of 16 bytes; NULL: no momentum
*/
#ifndef LLMC_SGD_CUH
#define LLMC_SGD_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/sgd.h"
#include "llmc/optim/master_weights.cuh"

// Updates four parameters x, and their momentum unless it is NULL.
template <class G>
__device__ inline void sgd_four(Elements<float, 4>* x, const Elements<G, 4>& g, float* m_at,
                                UpdateRates rates, const UpdateScalars& s) {
    Elements<float, 4> m;
    if (m_at) {
        m = elements_load<4>(m_at);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float scaled = to_float(g[k]) * s.grad_scale;
        m[k] = m_at ? fmaf(s.momentum, m[k], scaled) : scaled;
        const float keep = decay_keep(rates.keep, s.decay, m[k], (*x)[k]);
        (*x)[k] = fmaf(keep, (*x)[k], -(rates.step * m[k]));
    }
    if (m_at) {
        elements_store(m_at, m);
    }
}

#endif
