// test_python_random.c -- python_random.h: the numbers and samples of Python's random.Random.
#include "llmc/base/python_random.h"
#include "dev/test/lib/test.h"

TEST(python_random_words) {
    static const uint32_t first[] = {4150886329u, 3342196574u, 1892932127u}; // getrandbits(32)
    PythonRandom rng = python_random_open(1234);
    for (int i = 0; i < 3; i++) {
        EXPECT(python_random_u32(&rng) == first[i], "word %d", i);
    }
    rng = python_random_open(9);
    for (int i = 0; i < 1500; i++) { // over two twists
        python_random_u32(&rng);
    }
    EXPECT(python_random_u32(&rng) == 1106500198u, "word 1500");
}

TEST(python_random_below) {
    static const uint32_t bounds[] = {1, 2, 3, 1000, 2147483649u, 4294967295u},
                          wanted[] = {0, 0, 1, 937, 2036044446u, 2687448230u}; // random.Random(3)
    PythonRandom rng = python_random_open(3);
    for (int i = 0; i < 6; i++) {
        EXPECT(python_random_below(&rng, bounds[i]) == wanted[i], "below %u", bounds[i]);
    }
}

TEST(python_random_shuffle) {
    static const uint32_t wanted[10] = {0, 3, 7, 2, 1, 6, 4, 5, 8, 9}; // random.Random(1337)
    PythonRandom rng = python_random_open(1337);
    uint32_t items[10];
    for (uint32_t i = 0; i < 10; i++) {
        items[i] = i;
    }
    python_random_shuffle(&rng, items, 10);
    EXPECT(memcmp(items, wanted, sizeof(wanted)) == 0, "the order");
}

// Samples of populations that Python copies, and of some that it does not.
TEST(python_random_sample) {
    static const struct {
        uint32_t seed, n, k, wanted[10];
    } samples[] = {{1241, 20, 10, {19, 15, 6, 9, 8, 14, 3, 11, 7, 18}},
                   {1234, 100, 10, {99, 56, 14, 0, 11, 74, 4, 85, 88, 10}},
                   {1235, 40, 3, {27, 34, 37}},
                   {5, 20, 3, {19, 8, 11}}};
    for (size_t i = 0; i < sizeof(samples) / sizeof(samples[0]); i++) {
        uint32_t chosen[PYTHON_SAMPLE_MAX];
        PythonRandom rng = python_random_open(samples[i].seed);
        python_random_sample(&rng, samples[i].n, samples[i].k, chosen);
        EXPECT(memcmp(chosen, samples[i].wanted, samples[i].k * sizeof(chosen[0])) == 0, "%u of %u",
               samples[i].k, samples[i].n);
    }
}
