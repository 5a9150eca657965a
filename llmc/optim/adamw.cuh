/*
adamw.cuh -- adamw.h on the GPU: four elements of it, for the kernel of all rules
(update_elements.cuh).

    x       4   fp32   in registers, set
    g       4   T or fp32
    m, v    4   fp32   updated, at multiples of 16 bytes
*/
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "llmc/optim/adamw.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/master_weights.cuh"

// Returns the new parameter. This and the other rules write fused multiply-adds out: a compiler may
// choose others for another GPU, and the bits would differ.
__device__ inline float adamw_element_gpu(float param, float grad, float* m, float* v, UpdateRates rates,
                                          const UpdateScalars& s) {
    const float g = grad * s.grad_scale;
    *m = fmaf(s.beta1, *m, (1.0f - s.beta1) * g);
    *v = fmaf(s.beta2, *v, (1.0f - s.beta2) * g * g);
    const float keep = decay_keep(rates.keep, s.decay, *m, param);
    return fmaf(keep, param, -(rates.step * *m / (sqrtf(*v * s.v_correction) + rates.eps)));
}

// Updates four parameters x and their moments.
template <class G>
__device__ inline void adamw_four(Elements<float, 4>* x, const Elements<G, 4>& g, float* m_at, float* v_at,
                                  UpdateRates rates, const UpdateScalars& s) {
    Elements<float, 4> m = elements_load<4>(m_at), v = elements_load<4>(v_at);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        (*x)[k] = adamw_element_gpu((*x)[k], to_float(g[k]), &m[k], &v[k], rates, s);
    }
    elements_store(m_at, m);
    elements_store(v_at, v);
}

#endif
