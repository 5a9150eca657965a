/*
float8.h -- E4M3, a floating-point format of 8 bits, and rows of it with a scale, on the host and in
kernels.

    code  S EEEE MMM     value  (-1)^S 2^(E - 7) (1 + M / 8), with E = 0: (-1)^S 2^-6 M / 8

448 is the largest value (0x7E), 2^-9 the smallest above zero. There are no infinities; 0x7F and
0xFF are NaN. Narrowing rounds to nearest, ties to even; what is larger than 448 becomes 448, NaN
becomes 0x7F. Hopper's cvt.rn.satfinite.e4m3x2.f32 does the same.

Rows. The numbers of a row share a scale, a power of two, so that only the narrowing rounds:

    k      = the smallest exponent >= -116 with max |x| <= 448 * 2^k
    code   = E4M3(x * 2^-k)      scale = 2^k      x is about scale * value of its code

A row with an infinity or NaN has the scale NaN, so all results from it are NaN. With -116 numbers
that are subnormal in fp32 become zero, so it makes no difference whether a processor flushes them.

A value has 4 significant bits, and with its scale it fits bf16. A product of two has 8, so it is
exact in fp32 and also in bf16.

Micikevicius et al., "FP8 formats for deep learning", 2022.
*/
#ifndef LLMC_FLOAT8_H
#define LLMC_FLOAT8_H

#include <stdint.h>

#include "llmc/base/float16.h"
#include "llmc/base/host_device.h"

// Rows, in memory of the GPU: codes (rows, cols), scales (rows). NULL: none.
typedef struct {
    uint8_t* codes;
    float* scales;
} E4m3Rows;

#define E4M3_MAX 448.0f
#define E4M3_LEAST_EXPONENT (-116) // of a scale

HOST_DEVICE float e4m3_to_float(uint8_t code) {
    const uint32_t sign = (uint32_t)(code & 0x80) << 24, rest = code & 0x7F;
    const uint32_t small = float_bits((float)rest * 0x1p-9f); // below 2^-6: a multiple of 2^-9
    const uint32_t large = (rest << 20) + ((127 - 7) << 23);
    return float_of_bits(sign | (rest == 0x7F ? 0x7FC00000 : rest < 8 ? small : large));
}

HOST_DEVICE uint8_t e4m3_from_float(float value) {
    const uint32_t bits = float_bits(value), sign = bits >> 24 & 0x80, rest = bits & 0x7FFFFFFF;
    // 2^14 has units of 2^-9 in its last place, so adding it rounds to those.
    const uint32_t small = float_bits(float_of_bits(rest) + 0x1p14f) - float_bits(0x1p14f);
    const uint32_t large = (rest - ((127 - 7) << 23) + 0x7FFFF + (rest >> 20 & 1)) >> 20;
    const uint32_t at_2_to_minus_6 = 0x3C800000, at_448 = 0x43E00000;
    const uint32_t magnitude = rest > at_448 ? 0x7E : rest < at_2_to_minus_6 ? small : large;
    return (uint8_t)(rest > 0x7F800000 ? 0x7F : sign | magnitude);
}

// Returns the bits of |value|. They are ordered as magnitudes are, infinity and NaN above all.
HOST_DEVICE uint32_t e4m3_magnitude(float value) { return float_bits(value) & 0x7FFFFFFF; }

// Returns the exponent of the scale of a row, given its largest magnitude; 128: the scale is NaN.
HOST_DEVICE int e4m3_exponent(uint32_t magnitude) {
    // 448 is 1.75 * 2^8
    const int exponent = (int)(magnitude >> 23) - 127 - 8 + ((magnitude & 0x7FFFFF) > 0x600000);
    return magnitude >= 0x7F800000 ? 128 : exponent < E4M3_LEAST_EXPONENT ? E4M3_LEAST_EXPONENT : exponent;
}

// Returns 2^exponent, for an exponent from -126 to 127, or NaN for 128 and -128.
HOST_DEVICE float e4m3_power(int exponent) {
    return float_of_bits(exponent == 128 || exponent == -128 ? 0x7FC00000 : (uint32_t)(exponent + 127) << 23);
}

#endif
