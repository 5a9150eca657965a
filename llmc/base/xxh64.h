/*
xxh64.h -- XXH64, a 64-bit checksum: has a file changed since it was written?

Four sums run side by side over stripes of 32 bytes and are mixed at the end. It detects accidents
(a torn write, a bad disk, a truncated copy), not attacks. Why this one: it runs at 5 to 7 GB/s on
one core without special instructions, so it takes little time compared to the disk, where a
table-driven CRC or SHA-256 would dominate; with 64 bits, two files do not agree by accident; and
anyone can check a file with the common tool xxh64sum, which prints the same 16 digits as %016llx.

Algorithm: Y. Collet, "xxHash fast digest algorithm", doc/xxhash_spec.md in the xxHash distribution;
seed 0. Little-endian machines only.
*/
#ifndef LLMC_XXH64_H
#define LLMC_XXH64_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XXH64_STRIPE_ 32 // bytes

#define XXH64_PRIME1_ UINT64_C(0x9E3779B185EBCA87)
#define XXH64_PRIME2_ UINT64_C(0xC2B2AE3D27D4EB4F)
#define XXH64_PRIME3_ UINT64_C(0x165667B19E3779F9)
#define XXH64_PRIME4_ UINT64_C(0x85EBCA77C2B2AE63)
#define XXH64_PRIME5_ UINT64_C(0x27D4EB2F165667C5)

typedef struct {
    uint64_t sums[4];
    uint64_t bytes;                    // added so far
    unsigned char tail[XXH64_STRIPE_]; // last bytes % 32 of them, not yet in the sums
} Xxh64;

static inline uint64_t xxh64_rotate_(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t xxh64_round_(uint64_t sum, uint64_t lane) {
    return xxh64_rotate_(sum + lane * XXH64_PRIME2_, 31) * XXH64_PRIME1_;
}

static inline void xxh64_open(Xxh64* hash) {
    memset(hash, 0, sizeof(*hash));
    hash->sums[0] = XXH64_PRIME1_ + XXH64_PRIME2_;
    hash->sums[1] = XXH64_PRIME2_;
    hash->sums[3] = 0 - XXH64_PRIME1_;
}

// Adds whole stripes; returns a pointer to the rest.
static inline size_t xxh64_stripes_(Xxh64* hash, const unsigned char* data, size_t bytes) {
    uint64_t a = hash->sums[0], b = hash->sums[1], c = hash->sums[2], d = hash->sums[3], lanes[4];
    for (; bytes >= XXH64_STRIPE_; data += XXH64_STRIPE_, bytes -= XXH64_STRIPE_) {
        memcpy(lanes, data, sizeof(lanes));
        a = xxh64_round_(a, lanes[0]);
        b = xxh64_round_(b, lanes[1]);
        c = xxh64_round_(c, lanes[2]);
        d = xxh64_round_(d, lanes[3]);
    }
    hash->sums[0] = a;
    hash->sums[1] = b;
    hash->sums[2] = c;
    hash->sums[3] = d;
    return bytes;
}

// Adds bytes. The checksum does not depend on how they are split into calls.
static inline void xxh64_add(Xxh64* hash, const void* data, size_t bytes) {
    const unsigned char* from = (const unsigned char*)data;
    const size_t waiting = (size_t)(hash->bytes % XXH64_STRIPE_);
    if (bytes == 0) {
        return;
    }
    hash->bytes += bytes;
    if (waiting) {
        const size_t room = XXH64_STRIPE_ - waiting, n = bytes < room ? bytes : room;
        memcpy(hash->tail + waiting, from, n);
        if (n < room) {
            return;
        }
        xxh64_stripes_(hash, hash->tail, XXH64_STRIPE_);
        from += n;
        bytes -= n;
    }
    const size_t left = xxh64_stripes_(hash, from, bytes);
    memcpy(hash->tail, from + (bytes - left), left);
}

// Mixes the bytes that fill no stripe into x.
static inline uint64_t xxh64_tail_(uint64_t x, const unsigned char* tail, size_t bytes) {
    size_t at = 0;
    for (; bytes - at >= 8; at += 8) {
        uint64_t lane;
        memcpy(&lane, tail + at, 8);
        x = xxh64_rotate_(x ^ xxh64_round_(0, lane), 27) * XXH64_PRIME1_ + XXH64_PRIME4_;
    }
    if (bytes - at >= 4) {
        uint32_t half;
        memcpy(&half, tail + at, 4);
        x = xxh64_rotate_(x ^ half * XXH64_PRIME1_, 23) * XXH64_PRIME2_ + XXH64_PRIME3_;
        at += 4;
    }
    for (; at < bytes; at++) {
        x = xxh64_rotate_(x ^ tail[at] * XXH64_PRIME5_, 11) * XXH64_PRIME1_;
    }
    return x;
}

// Returns the checksum of all bytes added so far; more may follow.
static inline uint64_t xxh64_value(const Xxh64* hash) {
    static const int turns[4] = {1, 7, 12, 18};
    uint64_t x = 0;
    if (hash->bytes >= XXH64_STRIPE_) {
        for (int i = 0; i < 4; i++) {
            x += xxh64_rotate_(hash->sums[i], turns[i]);
        }
        for (int i = 0; i < 4; i++) {
            x = (x ^ xxh64_round_(0, hash->sums[i])) * XXH64_PRIME1_ + XXH64_PRIME4_;
        }
    } else {
        x = XXH64_PRIME5_;
    }
    x = xxh64_tail_(x + hash->bytes, hash->tail, (size_t)(hash->bytes % XXH64_STRIPE_));
    x = (x ^ x >> 33) * XXH64_PRIME2_;
    x = (x ^ x >> 29) * XXH64_PRIME3_;
    return x ^ x >> 32;
}

static inline uint64_t xxh64(const void* data, size_t bytes) {
    Xxh64 hash;
    xxh64_open(&hash);
    xxh64_add(&hash, data, bytes);
    return xxh64_value(&hash);
}

#endif
