/*
softcap.cuh -- softcap.h on the GPU, by the hardware's exp2: t is wrong by up to 2^-21.
*/
#ifndef LLMC_SOFTCAP_CUH
#define LLMC_SOFTCAP_CUH

#include "llmc/gpu/ptx.cuh"
#include "llmc/ops/softcap.h"

#define SOFTCAP_LOG2E 1.44269504f

// Returns t. Infinities become 1 and -1, NaN stays.
__device__ inline float softcap_tanh(float x, float cap) {
    return __fdividef(2.0f, 1.0f + exp2_approx(x * (-2.0f * SOFTCAP_LOG2E / cap))) - 1.0f;
}

#endif
