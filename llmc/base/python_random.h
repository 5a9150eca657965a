/*
python_random.h -- Python's random.Random(seed), for published evaluations that choose their
examples with it.

The generator is the Mersenne Twister MT19937 (Matsumoto and Nishimura, "Mersenne Twister: a
623-dimensionally equidistributed uniform pseudo-random number generator", 1998), seeded by an array
of one word. A number below n is the top bits of a word, as many as n has, drawn again until it is
below n. All else in the program uses rand.h.
*/
#ifndef LLMC_PYTHON_RANDOM_H
#define LLMC_PYTHON_RANDOM_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PYTHON_RANDOM_WORDS_ = 624,
    PYTHON_RANDOM_SHIFT_ = 397,
    PYTHON_SAMPLE_MAX = 100,           // largest sample
    PYTHON_SAMPLE_POOL_ = 21 + 4 * 256 // largest population that is copied, for that sample
};

typedef struct {
    uint32_t word[PYTHON_RANDOM_WORDS_];
    int at; // next word to be used
} PythonRandom;

static inline PythonRandom python_random_open(uint32_t seed) {
    const int n = PYTHON_RANDOM_WORDS_;
    PythonRandom rng;
    uint32_t* w = rng.word;
    int i = 1;
    w[0] = 19650218u;
    for (int k = 1; k < n; k++) {
        w[k] = 1812433253u * (w[k - 1] ^ w[k - 1] >> 30) + (uint32_t)k;
    }
    for (int k = 0; k < n; k++) { // mixes in the seed
        w[i] = (w[i] ^ (w[i - 1] ^ w[i - 1] >> 30) * 1664525u) + seed;
        i = i + 1 < n ? i + 1 : 1;
        w[0] = w[n - 1];
    }
    for (int k = 1; k < n; k++) {
        w[i] = (w[i] ^ (w[i - 1] ^ w[i - 1] >> 30) * 1566083941u) - (uint32_t)i;
        i = i + 1 < n ? i + 1 : 1;
        w[0] = w[n - 1];
    }
    w[0] = 0x80000000u;
    rng.at = n;
    return rng;
}

// Makes the next words of the state.
static inline void python_random_twist_(PythonRandom* rng) {
    const int n = PYTHON_RANDOM_WORDS_;
    for (int i = 0; i < n; i++) {
        const uint32_t pair = (rng->word[i] & 0x80000000u) | (rng->word[(i + 1) % n] & 0x7FFFFFFFu);
        rng->word[i] = rng->word[(i + PYTHON_RANDOM_SHIFT_) % n] ^ pair >> 1 ^ (pair & 1 ? 0x9908B0DFu : 0);
    }
    rng->at = 0;
}

static inline uint32_t python_random_u32(PythonRandom* rng) {
    if (rng->at == PYTHON_RANDOM_WORDS_) {
        python_random_twist_(rng);
    }
    uint32_t x = rng->word[rng->at++];
    x ^= x >> 11;
    x ^= x << 7 & 0x9D2C5680u;
    x ^= x << 15 & 0xEFC60000u;
    return x ^ x >> 18;
}

// Draws from {0, ..., n-1}, 0 < n.
static inline uint32_t python_random_below(PythonRandom* rng, uint32_t n) {
    int bits = 0;
    while (bits < 32 && n >> bits) {
        bits++;
    }
    uint32_t drawn;
    do {
        drawn = python_random_u32(rng) >> (32 - bits);
    } while (drawn >= n);
    return drawn;
}

// Shuffles n items, as random.shuffle does.
static inline void python_random_shuffle(PythonRandom* rng, uint32_t* items, uint32_t n) {
    for (uint32_t i = n; i-- > 1;) {
        const uint32_t k = python_random_below(rng, i + 1), item = items[i];
        items[i] = items[k];
        items[k] = item;
    }
}

// Returns true if random.sample copies a population of n to draw k of it, and else draws again what
// it has drawn before.
static inline int python_sample_copies_(uint32_t n, uint32_t k) {
    uint32_t most = 21, power = 1;
    while (power < 3 * k) {
        power *= 4;
    }
    most += k > 5 ? power : 0;
    return n <= most;
}

// Sets chosen (k) to a sample of {0, ..., n-1}, as random.sample draws it; k <= n.
static inline void python_random_sample(PythonRandom* rng, uint32_t n, uint32_t k, uint32_t* chosen) {
    uint32_t pool[PYTHON_SAMPLE_POOL_];
    assert(k <= n && k <= PYTHON_SAMPLE_MAX);
    const int copies = python_sample_copies_(n, k);
    for (uint32_t i = 0; copies && i < n; i++) {
        pool[i] = i;
    }
    for (uint32_t i = 0; i < k; i++) {
        if (copies) {
            const uint32_t j = python_random_below(rng, n - i);
            chosen[i] = pool[j];
            pool[j] = pool[n - i - 1];
            continue;
        }
        uint32_t before;
        do {
            chosen[i] = python_random_below(rng, n);
            for (before = 0; before < i && chosen[before] != chosen[i]; before++) {
            }
        } while (before < i);
    }
}

#endif
