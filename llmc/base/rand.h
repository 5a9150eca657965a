/*
rand.h -- random numbers as a function of (seed, stream, position), the same on every platform.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a
128-bit counter and a 64-bit key into 128 random bits. Nothing has to be generated in order:
threads, ranks and a resumed run reach any position at once and find the same bits there. `stream`
keeps independent uses of one seed apart.

Floating-point results use only +, -, *, /, sqrt and fma, each correctly rounded by IEEE 754, so
their bits are the same with any compiler and libm; expressions that a compiler could contract into
an fma are written as fma.
*/
#ifndef LLMC_RAND_H
#define LLMC_RAND_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/host_device.h"

typedef struct {
    uint32_t word[4];
} RandBlock;

// Position `at` (in 32-bit words) of stream `stream` of seed `seed`. Copy it to fork it.
typedef struct {
    uint64_t seed, stream, at;
    RandBlock block; // four words around `at`
} Rand;

// Returns the 128 random bits at position `counter` of a stream.
HOST_DEVICE RandBlock rand_block(uint64_t seed, uint64_t stream, uint64_t counter) {
    RandBlock x = {
        {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)}};
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t even = (uint64_t)0xD2511F53u * x.word[0], odd = (uint64_t)0xCD9E8D57u * x.word[2];
        const RandBlock next = {{(uint32_t)(odd >> 32) ^ x.word[1] ^ key0, (uint32_t)odd,
                                 (uint32_t)(even >> 32) ^ x.word[3] ^ key1, (uint32_t)even}};
        x = next;
        key0 += 0x9E3779B9u; // Weyl sequences of the golden ratio and of sqrt(3) - 1
        key1 += 0xBB67AE85u;
    }
    return x;
}

// Returns a stream number for a name: 64-bit FNV-1a.
static inline uint64_t rand_stream(const char* name) {
    uint64_t hash = 14695981039346656037u;
    for (; *name; name++) {
        hash = (hash ^ (unsigned char)*name) * 1099511628211u;
    }
    return hash;
}

static inline Rand rand_open(uint64_t seed, uint64_t stream) {
    Rand rng;
    memset(&rng, 0, sizeof(rng));
    rng.seed = seed;
    rng.stream = stream;
    return rng;
}

// Moves to position `at`.
static inline void rand_seek(Rand* rng, uint64_t at) {
    rng->at = at;
    rng->block = rand_block(rng->seed, rng->stream, at / 4);
}

static inline uint32_t rand_u32(Rand* rng) {
    if (rng->at % 4 == 0) {
        rng->block = rand_block(rng->seed, rng->stream, rng->at / 4);
    }
    return rng->block.word[rng->at++ % 4];
}

// Draws uniformly from {0, ..., n-1}, exactly (by rejection), 0 < n <= 2^32 - 1.
static inline uint32_t rand_below(Rand* rng, uint32_t n) {
    // 2^32 mod n: the low values that would be drawn too often
    const uint32_t reject = (0u - n) % n;
    for (;;) {
        const uint64_t product = (uint64_t)rand_u32(rng) * n;
        if ((uint32_t)product >= reject) {
            return (uint32_t)(product >> 32);
        }
    }
}

// Draws uniformly from [0, 1), in multiples of 2^-32.
static inline double rand_uniform(Rand* rng) { return rand_u32(rng) * 0x1p-32; }

// Returns the natural logarithm of a normal positive double, to about 1e-15 relative, with the same
// bits everywhere. x = m 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m +
// 1), by its series in s^2.
static inline double rand_log_(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    int e = (int)(bits >> 52) - 1023;
    bits = (bits & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u;
    double m;
    memcpy(&m, &bits, sizeof(m));
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    const double s = (m - 1) / (m + 1), z = s * s;
    double series = 1.0 / 21;
    for (int k = 19; k >= 1; k -= 2) {
        series = fma(series, z, 1.0 / k);
    }
    return fma(e, 0.6931471805599453, 2 * (s * series));
}

// Returns the logarithm of number `index` of a stream, uniform in (0, most).
static inline float rand_log_uniform(uint64_t seed, uint64_t stream, uint64_t index, double most) {
    const RandBlock r = rand_block(seed, stream, index / 4);
    return (float)rand_log_(most * (r.word[index % 4] + 0.5) * 0x1p-32);
}

// Returns standard normal number `index` of a stream: Marsaglia's polar method, which turns a pair
// of indices into a pair of numbers.
static inline float rand_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    for (uint64_t attempt = 0;; attempt++) {
        const RandBlock r = rand_block(seed, stream, (index / 2) + (attempt << 48));
        for (int half = 0; half < 4; half += 2) {
            // odd multiples of 2^-32 in (-1, 1): never zero
            const double u = ((double)r.word[half] - 2147483647.5) * 0x1p-31;
            const double v = ((double)r.word[half + 1] - 2147483647.5) * 0x1p-31;
            const double square = fma(u, u, v * v);
            if (square < 1) {
                const double scale = sqrt(-2 * rand_log_(square) / square);
                return (float)((index % 2 ? v : u) * scale);
            }
        }
    }
}

// Returns the place of element i in the shuffled order of (seed, stream): a keyed bijection of {0,
// ..., n-1}. O(1) for any i, so a reader seeks without a table. A four-round Feistel network on the
// next even number of bits, walked along its cycle until it falls below n (Black and Rogaway,
// "Ciphers with arbitrary finite domains", 2002).
static inline uint64_t rand_permute(uint64_t seed, uint64_t stream, uint64_t n, uint64_t i) {
    int half_bits = 1;
    while (half_bits < 32 && (n - 1) >> (2 * half_bits)) {
        half_bits++;
    }
    const uint64_t mask = ((uint64_t)1 << half_bits) - 1;
    do {
        uint64_t left = i >> half_bits, right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            const RandBlock f = rand_block(seed, stream, right | round << 32);
            const uint64_t next = left ^ (f.word[0] & mask);
            left = right;
            right = next;
        }
        i = left << half_bits | right;
    } while (i >= n);
    return i;
}

#endif
