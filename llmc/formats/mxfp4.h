/*
mxfp4.h -- MXFP4: blocks of 32 numbers of 4 bits with a common scale (Open Compute Project,
"Microscaling formats", 2023).

    number    S EE M          value  0 .5 1 1.5 2 3 4 6, negative if S is set
    block     16 bytes        number 2 i in the lower half of byte i, 2 i + 1 in the upper one;
                              in GGUF numbers i and i + 16, after the scale (tensor_types.h)
    scale     one byte s      2^(s - 127); 255 is NaN

A number has 3 significant bits, so with its scale it is exact in bf16.
*/
#ifndef LLMC_MXFP4_H
#define LLMC_MXFP4_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum { MXFP4_BLOCK = 32, MXFP4_BLOCK_BYTES = MXFP4_BLOCK / 2 };

// Return the value of 4 bits, and of a scale.
static inline float mxfp4_value(int bits) {
    static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return values[bits & 15];
}
static inline float mxfp4_scale(uint8_t s) { return s == 255 ? NAN : ldexpf(1.0f, s - 127); }

// Sets out (count * 32) to the numbers of `count` blocks.
static inline void mxfp4_decode(float* out, const uint8_t* blocks, const uint8_t* scales, size_t count) {
    for (size_t b = 0; b < count; b++) {
        const float scale = mxfp4_scale(scales[b]);
        for (int i = 0; i < MXFP4_BLOCK; i++) {
            const uint8_t pair = blocks[b * MXFP4_BLOCK_BYTES + (size_t)i / 2];
            out[b * MXFP4_BLOCK + (size_t)i] = scale * mxfp4_value(i % 2 ? pair >> 4 : pair);
        }
    }
}

#endif
