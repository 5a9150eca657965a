// test_rand.c -- rand.h: Philox against published values, distributions, the same bits on every
// platform, and the shuffle as a bijection.
#include <stddef.h>

#include "llmc/base/rand.h"
#include "dev/test/lib/test.h"

// ---- bits ----

static void expect_block(uint64_t seed, uint64_t stream, uint64_t counter, RandBlock wanted) {
    const RandBlock got = rand_block(seed, stream, counter);
    EXPECT(memcmp(&got, &wanted, sizeof(got)) == 0, "got %08x %08x %08x %08x, wanted %08x %08x %08x %08x",
           got.word[0], got.word[1], got.word[2], got.word[3], wanted.word[0], wanted.word[1], wanted.word[2],
           wanted.word[3]);
}

// The known answers of the authors' own library, Random123: zeros, ones, and digits of pi.
TEST(philox) {
    expect_block(0, 0, 0, (RandBlock){{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
    expect_block(UINT64_MAX, UINT64_MAX, UINT64_MAX,
                 (RandBlock){{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
    expect_block(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88,
                 (RandBlock){{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

// FNV-1a's published values.
TEST(stream) {
    EXPECT(rand_stream("") == 0xcbf29ce484222325, "empty");
    EXPECT(rand_stream("a") == 0xaf63dc4c8601ec8c, "a");
    EXPECT(rand_stream("foobar") == 0x85944171f73967e8, "foobar");
    EXPECT(rand_stream("\xff") == 0xaf64724c8602eb6e, "bytes are unsigned");
}

TEST(sequence) {
    Rand rng = rand_open(42, 7);
    for (uint64_t i = 0; i < 100; i++) {
        const RandBlock block = rand_block(42, 7, i / 4);
        Rand fork = rng;
        const uint32_t word = rand_u32(&rng);
        EXPECT(word == block.word[i % 4], "word %d of the stream", (int)i);
        EXPECT(word == rand_u32(&fork), "a copy continues with the same word");
    }
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// Weights, shuffles and samples are made of these: a change would silently change every run.
// Any position is reached at once.
TEST(seek) {
    Rand straight = rand_open(5, 9);
    for (uint64_t at = 0; at < 20; at++) {
        Rand rng = rand_open(5, 9);
        rand_seek(&rng, at);
        Rand copy = straight;
        for (int i = 0; i < 6; i++) {
            EXPECT(rand_u32(&rng) == rand_u32(&copy), "position %d + %d", (int)at, i);
        }
        rand_u32(&straight);
    }
}

TEST(pinned) {
    static const uint32_t normal[8] = {0xbddf2e21, 0x3fdbddff, 0xbe4c27ae, 0xbfe6a216,
                                       0xbf4941b0, 0xbe8ddd52, 0x3fc096cd, 0xbf91c3b9};
    static const uint32_t below_10[8] = {0, 1, 2, 7, 1, 9, 1, 2};
    static const uint64_t permuted_10[10] = {6, 8, 5, 1, 3, 9, 4, 0, 7, 2};
    Rand rng = rand_open(42, 1);
    for (uint64_t i = 0; i < 8; i++) {
        const float value = rand_normal(42, rand_stream("wte"), i);
        EXPECT(bits_of(value) == normal[i], "normal %d is %08x", (int)i, bits_of(value));
        EXPECT(rand_below(&rng, 10) == below_10[i], "number %d below 10", (int)i);
    }
    for (uint64_t i = 0; i < 10; i++) {
        EXPECT(rand_permute(42, 7, 10, i) == permuted_10[i], "place of %d in 10", (int)i);
    }
    EXPECT(rand_permute(42, 7, (uint64_t)1 << 40, 1) == 95742223024, "in 2^40");
    EXPECT(rand_permute(42, 7, UINT64_MAX, 0) == 3655231804204078828, "in 2^64 - 1");
}

// ---- distributions ----

// Every residue of n, and every class mod 3 of a large range, comes up equally often, to 5 standard
// deviations. Without rejection, the class 0 of 3 2^30 would have half of all draws.
TEST(below) {
    enum { DRAWS = 90000 };
    static const uint32_t ranges[] = {1, 2, 3, 7, 1000, 3u << 30, UINT32_MAX};
    for (size_t k = 0; k < sizeof(ranges) / sizeof(ranges[0]); k++) {
        const uint32_t n = ranges[k], classes = n < 3 ? n : 3;
        int count[3] = {0}, outside = 0;
        Rand rng = rand_open(1, n);
        for (int i = 0; i < DRAWS; i++) {
            const uint32_t x = rand_below(&rng, n);
            outside += x >= n;
            count[x % classes]++;
        }
        EXPECT(outside == 0, "%d of the numbers below %u are not", outside, n);
        for (uint32_t c = 0; c < classes; c++) {
            const double p = (n / classes + (c < n % classes)) / (double)n;
            EXPECT_NEAR(count[c], DRAWS * p, 5 * sqrt(DRAWS * p * (1 - p)), "class %u of %u", c, n);
        }
    }
}

TEST(uniform) {
    enum { DRAWS = 100000 };
    double sum = 0, squares = 0, least = 1, most = 0;
    Rand rng = rand_open(3, 4);
    for (int i = 0; i < DRAWS; i++) {
        const double x = rand_uniform(&rng);
        sum += x;
        squares += x * x;
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    EXPECT(least >= 0 && least < 1e-3 && most < 1 && most > 1 - 1e-3, "from %g to %g", least, most);
    EXPECT_NEAR(sum / DRAWS, 0.5, 5 / sqrt(12.0 * DRAWS), "mean");
    EXPECT_NEAR(squares / DRAWS, 1.0 / 3, 5 * sqrt(4.0 / 45 / DRAWS), "mean square");
    rng = rand_open(0, 0);
    rng.at = 1; // the largest word gives the largest number, and it is below 1
    rng.block.word[1] = UINT32_MAX;
    EXPECT(rand_uniform(&rng) == 1 - 0x1p-32, "of the largest word");
}

TEST(log) {
    Rand rng = rand_open(5, 6);
    for (int i = 0; i < 20000; i++) {
        const double x = i % 2 ? rand_uniform(&rng) + 0x1p-62 : ldexp(1 + rand_uniform(&rng), i % 200 - 100);
        EXPECT_NEAR(rand_log_(x), log(x), 4e-15 * fabs(log(x)), "logarithm of %.17g", x);
    }
    EXPECT(rand_log_(1) == 0, "logarithm of 1");
}

// The polar method again, as a textbook has it, with the logarithm of libm.
static double textbook_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    for (uint64_t attempt = 0;; attempt++) {
        const RandBlock r = rand_block(seed, stream, index / 2 + (attempt << 48));
        for (int half = 0; half < 4; half += 2) {
            const double u = (r.word[half] + 0.5) / 0x1p31 - 1, v = (r.word[half + 1] + 0.5) / 0x1p31 - 1;
            const double square = u * u + v * v;
            if (square < 1) {
                return (index % 2 ? v : u) * sqrt(-2 * log(square) / square);
            }
        }
    }
}

TEST(normal) {
    enum { DRAWS = 200000 };
    double moment[5] = {0}, neighbors = 0, last = 0;
    int beyond_2 = 0, beyond_4 = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        const double x = rand_normal(9, 10, i);
        for (int k = 1; k <= 4; k++) {
            moment[k] += pow(x, k) / DRAWS;
        }
        neighbors += x * last / DRAWS;
        last = x;
        beyond_2 += fabs(x) > 2;
        beyond_4 += fabs(x) > 4;
        if (i < 2000) {
            EXPECT_NEAR(x, textbook_normal(9, 10, i), 1.2e-7 * fabs(x), "number %d", (int)i);
        }
    }
    const double sigma = 1 / sqrt(DRAWS);
    EXPECT_NEAR(moment[1], 0, 5 * sigma, "mean");
    EXPECT_NEAR(moment[2], 1, 5 * sigma * sqrt(2), "variance");
    EXPECT_NEAR(moment[3], 0, 5 * sigma * sqrt(15), "third moment");
    EXPECT_NEAR(moment[4], 3, 5 * sigma * sqrt(96), "fourth moment");
    EXPECT_NEAR(neighbors, 0, 5 * sigma, "correlation of neighbors");
    EXPECT_NEAR(beyond_2 / (double)DRAWS, 0.0455, 5 * sigma * 0.21, "beyond 2 sigma");
    EXPECT_NEAR(beyond_4, 6.3e-5 * DRAWS, 5 * sqrt(6.3e-5 * DRAWS), "beyond 4 sigma");
}

// ---- the shuffle ----

static void expect_bijection(uint64_t n) {
    static unsigned char seen[8192];
    double fixed = 0;
    memset(seen, 0, sizeof(seen));
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t to = rand_permute(11, 12, n, i);
        fixed += to == i;
        EXPECT(to < n && !seen[to]++, "%d of %d goes to %d, twice or outside", (int)i, (int)n, (int)to);
    }
    EXPECT(n < 20 || fixed < 8, "%g of %d stay in place, wanted about 1", fixed, (int)n);
}

TEST(small_shuffles) {
    for (uint64_t n = 1; n <= 66; n++) {
        expect_bijection(n);
    }
    expect_bijection(1000);
    expect_bijection(4096);
    expect_bijection(4097);
}

// The first of many: none comes twice, and they spread over the whole range.
static void test_large_shuffle(uint64_t n) {
    enum { DRAWS = 1000 };
    uint64_t to[DRAWS];
    double mean = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        to[i] = rand_permute(1, 2, n, i);
        mean += (double)to[i] / (double)n / DRAWS;
        EXPECT(to[i] < n, "%d goes outside of %g", (int)i, (double)n);
        for (uint64_t j = 0; j < i; j++) {
            EXPECT(to[i] != to[j], "%d and %d of %g go to the same place", (int)i, (int)j, (double)n);
        }
    }
    EXPECT_NEAR(mean, 0.5, 5 / sqrt(12.0 * DRAWS), "mean place in %g", (double)n);
    EXPECT(rand_permute(1, 2, n, n - 1) < n, "the last of %g", (double)n);
}

// Where the first of three goes must be uniform over the keys, and differ between seeds and between
// streams.
TEST(shuffle_keys) {
    enum { KEYS = 3000 };
    int count[3] = {0};
    for (uint64_t key = 0; key < KEYS; key++) {
        count[rand_permute(key, 5, 3, 0)]++;
    }
    for (int i = 0; i < 3; i++) {
        EXPECT_NEAR(count[i], KEYS / 3.0, 5 * sqrt(KEYS * 2.0 / 9), "place %d of 3", i);
    }
    int same_seed = 0, same_stream = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        same_stream += rand_permute(1, 5, 1000, i) == rand_permute(2, 5, 1000, i);
        same_seed += rand_permute(1, 5, 1000, i) == rand_permute(1, 6, 1000, i);
    }
    EXPECT(same_seed < 8 && same_stream < 8, "%d, %d equal places, wanted about 1", same_seed, same_stream);
}

TEST(large_shuffles) {
    test_large_shuffle(1000000007);
    test_large_shuffle(((uint64_t)1 << 40) + 12345);
    test_large_shuffle(UINT64_MAX);
}
