/*
softcap.h -- a soft cap of logits (cross_entropy.h) and of attention's scores (attention.h).

    y = cap t      t = tanh(x / cap)      dy/dx = 1 - t^2

Bello et al., "Neural combinatorial optimization", 2016; Gemma 2 caps both.
*/
#ifndef LLMC_SOFTCAP_H
#define LLMC_SOFTCAP_H

#include <math.h>

#include "llmc/base/host_device.h"
#include "llmc/base/vec.h"

// Returns y; without a cap, which is 0, x itself.
HOST_DEVICE float softcap_of(float x, float cap) { return cap > 0 ? cap * tanhf(x / cap) : x; }

// Returns dy/dx, given t.
HOST_DEVICE float softcap_slope(float t) { return 1.0f - t * t; }

// Return t and y of LANES numbers, with a cap above 0, wrong by a few roundings of it; and dy/dx.
ALWAYS_INLINE Vec softcap_tanh_vec(Vec x, float cap) {
    const Vec e = vec_exp2(vec_min(vec_all(126.0f), x * (-2.0f * LOG2_E / cap))); // finite
    return (1.0f - e) / (1.0f + e);
}
ALWAYS_INLINE Vec softcap_vec(Vec x, float cap) { return cap * softcap_tanh_vec(x, cap); }
ALWAYS_INLINE Vec softcap_slope_vec(Vec t) { return 1.0f - t * t; }

#endif
