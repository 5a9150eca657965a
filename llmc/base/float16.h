/*
float16.h -- the two 16-bit floating-point formats on the host: bf16 (8 bits of exponent, 7 of
mantissa) and IEEE half precision, fp16 (5 and 10).

Widening is exact. Narrowing rounds to nearest, ties to even; values that are too large become
infinity, NaN stays NaN.
*/
#ifndef LLMC_FLOAT16_H
#define LLMC_FLOAT16_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/host_device.h"

HOST_DEVICE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

HOST_DEVICE uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float bf16_to_float(uint16_t bits) { return float_of_bits((uint32_t)bits << 16); }

static inline uint16_t bf16_from_float(float value) {
    const uint32_t bits = float_bits(value), cut = bits >> 16;
    // without its low bits it would be infinity
    const uint32_t nan = cut | ((cut & 0x7F) == 0 ? 0x40 : 0);
    const uint32_t rounded = (bits + 0x7FFF + (cut & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

static inline float fp16_to_float(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7FFF;
    const uint32_t small = float_bits((float)rest * 0x1p-24f); // below 2^-14: a multiple of 2^-24
    const uint32_t large = (rest << 13) + ((rest < 0x7C00 ? 127 - 15 : 255 - 31) << 23);
    return float_of_bits(sign | (rest < 0x400 ? small : large));
}

static inline uint16_t fp16_from_float(float value) {
    const uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    const uint32_t payload = rest >> 13 & 0x3FF, nan = 0x7C00 | (payload ? payload : 0x200);
    // 0.5 has units of 2^-24 in its last place, so adding it rounds to those.
    const uint32_t small = float_bits(float_of_bits(rest) + 0.5f) - float_bits(0.5f);
    const uint32_t large = (rest - ((127 - 15) << 23) + 0xFFF + (rest >> 13 & 1)) >> 13;
    const uint32_t magnitude = rest > 0x7F800000 ? nan
                               : rest >= 0x47800000
                                   ? 0x7C00 // 65536; from 65520 on, rounding carries to infinity
                               : rest < 0x38800000 ? small // below 2^-14
                                                   : large;
    return (uint16_t)(sign | magnitude);
}

// Smallest numbers that become infinite.
#define FP16_OVERFLOW 65520.0f
#define BF16_OVERFLOW float_of_bits(0x7F7F8000)

// Returns the index of the first finite value at or beyond the limit; `count` if none.
static inline size_t float16_find_beyond(const float* values, size_t count, float limit) {
    for (size_t i = 0; i < count; i++) {
        if (!(fabsf(values[i]) < limit) && isfinite(values[i])) {
            return i;
        }
    }
    return count;
}

#endif
