/*
checksum.h -- a checksum of an array that does not depend on the order of reading: do all ranks have
the same parameters?

    sum over all i of mix(words[i] + (first + i + 1) K)     modulo 2^64, K odd

mix is a bijection in which each bit of a word changes about half of the bits of the result, so a
word that differs, or has moved, changes the sum. It detects accidents, not attacks. It is the mixer
of LXM: Steele and Vigna, OOPSLA 2021.

    words   (count)   8 bytes each, of any content
    first             number of the first one: an array has the sum of its parts
*/
#ifndef LLMC_CHECKSUM_H
#define LLMC_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the term of word i in the sum.
HOST_DEVICE uint64_t checksum_word(uint64_t word, size_t i) {
    uint64_t x = word + ((uint64_t)i + 1) * UINT64_C(0xD1B54A32D192ED03);
    x = (x ^ x >> 32) * UINT64_C(0xDABA0B6EB09322E3);
    x = (x ^ x >> 32) * UINT64_C(0xDABA0B6EB09322E3);
    return x ^ x >> 32;
}

uint64_t checksum_words_cpu(const uint64_t* words, size_t count, size_t first);

#ifdef __cplusplus
}
#endif

#ifdef CHECKSUM_IMPLEMENTATION

uint64_t checksum_words_cpu(const uint64_t* words, size_t count, size_t first) {
    uint64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (size_t i = 0; i < count; i++) {
        sum += checksum_word(words[i], first + i);
    }
    return sum;
}

#endif // CHECKSUM_IMPLEMENTATION

#endif
