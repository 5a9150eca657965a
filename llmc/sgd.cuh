/*
sgd.cuh -- sgd.h on the GPU: four elements of it, for the kernel of all rules (optimizer.cuh).

    x     4   fp32   in registers, set
    g     4   T or fp32
    m     4   fp32   updated, at a multiple of 16 bytes; NULL: no momentum

defines: sgd_four_
*/
#ifndef LLMC_SGD_CUH
#define LLMC_SGD_CUH

#include "llmc/adamw.cuh"
#include "llmc/sgd.h"

// Updates four parameters x, and their sums if there are any.
template <class G>
__device__ inline void sgd_four_(Four_<float>* x, const Four_<G>& g, float* m_at, UpdateRates_ rates,
                                 const UpdateScalars_& s) {
    Four_<float> m;
    if (m_at) {
        m = four_load_(m_at);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float scaled = to_float(g.element[k]) * s.grad_scale;
        m.element[k] = m_at ? fmaf(s.momentum, m.element[k], scaled) : scaled;
        x->element[k] = fmaf(rates.keep, x->element[k], -(rates.step * m.element[k]));
    }
    if (m_at) {
        four_store_(m_at, m);
    }
}

#endif
