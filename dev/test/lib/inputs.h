/*
inputs.h -- numbers that C and Python make alike (dev/ref/inputs.py), as inputs of updates.
*/
#ifndef DEV_INPUTS_H
#define DEV_INPUTS_H

#include <stddef.h>
#include <stdint.h>

// Returns a bijection of 32-bit numbers that looks random.
static inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) * 0x735A2D97u;
    return x ^ x >> 15;
}

// Returns element i of a stream of multiples of 2^-15 in [-1, 1).
static inline float uniform(size_t i, int stream) {
    return (float)(mix((uint32_t)i + 1000003u * (uint32_t)stream) >> 16) * 0x1p-15f - 1;
}

#endif
