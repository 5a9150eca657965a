/*
dedup_keys.h -- keys of a document: documents that share one are duplicates.

    exact   one key: a hash of the text, byte by byte, but for line ends: CR LF counts as LF
    near    14 keys, by MinHash with locality-sensitive hashing

The Jaccard similarity s of two documents is the number of shingles (runs of 5 words, words.h) that
both have, divided by the number that at least one of them has. A random function on shingles has
its smallest value over a document at the same shingle for two documents with probability s (Broder,
"On the resemblance and containment of documents", 1997). 112 functions are divided into 14 bands of
8; the key of a band is its 8 smallest values. Two documents share a key with probability

    1 - (1 - s^8)^14        s  0.3     0.5    0.6    0.7    0.75   0.8    0.85   0.9
                               0.0009  0.053  0.211  0.565  0.772  0.924  0.988  0.9996

A document of fewer than 5 words has them all as its only shingle; one without words has a hash of
its text. Keys have 128 bits, so that different values have the same key by no accident; the
smallest values have 32.
*/
#ifndef LLMC_DEDUP_KEYS_H
#define LLMC_DEDUP_KEYS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/enum_words.h"
#include "llmc/corpus/words.h"

#ifdef __cplusplus
extern "C" {
#endif

// --dedup of ./tokenize
// clang-format off
#define DEDUP_WORDS(X) \
    X(DEDUP_NONE, "none") \
    X(DEDUP_EXACT, "exact") \
    X(DEDUP_NEAR, "near")
// clang-format on
typedef enum { DEDUP_WORDS(WORDS_VALUE) } Dedup;

enum { DEDUP_BANDS = 14, DEDUP_ROWS = 8, DEDUP_HASHES = DEDUP_BANDS * DEDUP_ROWS, DEDUP_SHINGLE = 5 };

typedef struct {
    uint64_t low, high;
} DedupKey;

// Returns the number of keys of a document.
static inline int dedup_num_keys(Dedup dedup) {
    return dedup == DEDUP_NEAR ? DEDUP_BANDS : dedup == DEDUP_EXACT ? 1 : 0;
}

// The random functions on shingles: x -> a mix of factors[i] * x + terms[i].
typedef struct {
    uint32_t factors[DEDUP_HASHES], terms[DEDUP_HASHES];
} DedupFunctions;

void dedup_functions(DedupFunctions* functions);

// Sets the smallest values of the functions over the shingles of the words.
void dedup_smallest(uint32_t smallest[DEDUP_HASHES], const DedupFunctions* functions, Words* words);

// Sets the keys (dedup_num_keys). `words` are those of the text; only used by DEDUP_NEAR.
void dedup_keys(DedupKey* keys, Dedup dedup, const DedupFunctions* functions, Words* words, const char* text,
                size_t bytes);

#ifdef __cplusplus
}
#endif

#ifdef DEDUP_KEYS_IMPLEMENTATION

#include <string.h>

#include "llmc/base/xxh64.h"

// ---- keys ----

// A key is XXH64 of the data, and XXH64 of a stripe and the data.
typedef struct {
    Xxh64 low, high;
} DedupHash_;

static void dedup_hash_open_(DedupHash_* hash) {
    static const uint64_t stripe[4] = {0x243F6A8885A308D3u, 0x13198A2E03707344u, 0xA4093822299F31D0u,
                                       0x082EFA98EC4E6C89u};
    xxh64_open(&hash->low);
    xxh64_open(&hash->high);
    xxh64_add(&hash->high, stripe, sizeof(stripe));
}

static void dedup_hash_add_(DedupHash_* hash, const void* data, size_t bytes) {
    xxh64_add(&hash->low, data, bytes);
    xxh64_add(&hash->high, data, bytes);
}

static DedupKey dedup_hash_key_(const DedupHash_* hash) {
    const DedupKey key = {xxh64_value(&hash->low), xxh64_value(&hash->high)};
    return key;
}

// Returns the key of a text, in which CR LF counts as LF.
static DedupKey dedup_text_key_(const char* text, size_t bytes) {
    DedupHash_ hash;
    dedup_hash_open_(&hash);
    for (const char *at = text, *end = text + bytes; at < end;) {
        const char* cr = (const char*)memmem(at, (size_t)(end - at), "\r\n", 2);
        dedup_hash_add_(&hash, at, (size_t)((cr ? cr : end) - at));
        at = cr ? cr + 1 : end;
    }
    return dedup_hash_key_(&hash);
}

// ---- MinHash ----

void dedup_functions(DedupFunctions* functions) {
    for (uint32_t i = 0; i < DEDUP_HASHES; i++) {
        const uint64_t random = xxh64(&i, sizeof(i));
        functions->factors[i] = (uint32_t)random | 1;
        functions->terms[i] = (uint32_t)(random >> 32);
    }
}

// Lowers the smallest values by those of a shingle. Only with `restrict` does the compiler make
// vectors of it, which is several times as fast.
static inline void dedup_lower_(uint32_t* restrict smallest, const uint32_t* restrict factors,
                                const uint32_t* restrict terms, uint32_t x) {
    for (int i = 0; i < DEDUP_HASHES; i++) {
        uint32_t y = factors[i] * x + terms[i];
        y = (y ^ y >> 15) * 0x9E3779B1u;
        y = (y ^ y >> 13) * 0x85EBCA77u;
        y ^= y >> 16;
        smallest[i] = y < smallest[i] ? y : smallest[i];
    }
}

void dedup_smallest(uint32_t smallest[DEDUP_HASHES], const DedupFunctions* functions, Words* words) {
    words_runs(words, words->count < DEDUP_SHINGLE ? words->count : DEDUP_SHINGLE);
    memset(smallest, 0xFF, DEDUP_HASHES * sizeof(uint32_t));
    for (size_t i = 0; i < words->num_runs; i++) {
        dedup_lower_(smallest, functions->factors, functions->terms, (uint32_t)(words->runs[i] >> 32));
    }
}

void dedup_keys(DedupKey* keys, Dedup dedup, const DedupFunctions* functions, Words* words, const char* text,
                size_t bytes) {
    uint32_t smallest[DEDUP_HASHES];
    if (dedup == DEDUP_EXACT || (dedup == DEDUP_NEAR && words->count == 0)) {
        const DedupKey key = dedup_text_key_(text, bytes);
        for (int i = 0; i < dedup_num_keys(dedup); i++) {
            keys[i] = key;
        }
    } else if (dedup == DEDUP_NEAR) {
        dedup_smallest(smallest, functions, words);
        for (int i = 0; i < DEDUP_BANDS; i++) {
            DedupHash_ hash;
            dedup_hash_open_(&hash);
            dedup_hash_add_(&hash, smallest + i * DEDUP_ROWS, DEDUP_ROWS * sizeof(uint32_t));
            keys[i] = dedup_hash_key_(&hash);
        }
    }
}

#endif // DEDUP_KEYS_IMPLEMENTATION

#endif
