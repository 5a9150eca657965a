// test_rope.c -- rotary positions: frequencies and their scalings, the table, turns forward and
// back.
#include "llmc/ops/rope.h"
#include "dev/test/lib/ops.h"

static const RopeScaling plain = {ROPE_PLAIN, 0, 0, 0, 0};

// Frequencies in fp32 are exact to a few roundings of the power and its exponent.
static double frequency_error(double frequency) { return 8 * FLT_EPSILON * frequency; }

TEST(rope_frequency) {
    const float bases[] = {1e4f, 5e5f, 1e6f};
    const int dims[] = {2, 8, 64, 80, 128};
    for (int i = 0; i < 15; i++) {
        const float base = bases[i / 5];
        const int n = dims[i % 5];
        for (int j = 0; j < n / 2; j++) {
            const double want = pow(base, -2.0 * j / n);
            EXPECT_NEAR(rope_frequency(plain, base, n, j), want, frequency_error(want),
                        "base %g, pair %d of %d channels", base, j, n);
        }
    }
    EXPECT(rope_frequency(plain, 1e4f, 8, 1) == 0.1f && rope_frequency(plain, 1e4f, 8, 3) == 0.001f,
           "powers of ten are rounded once");
}

// Linear: all divided. Llama 3: short waves stay, long ones are divided, in between it is gradual.
TEST(rope_scaling) {
    const RopeScaling linear = {ROPE_LINEAR, 4, 0, 0, 0}, llama3 = {ROPE_LLAMA3, 32, 1, 4, 8192};
    int kept = 0, divided = 0, between = 0;
    double before = INFINITY;
    for (int i = 0; i < 32; i++) {
        const double f = rope_frequency(plain, 5e5f, 64, i), turns = f * 8192 / (2 * M_PI);
        const double got = rope_frequency(llama3, 5e5f, 64, i), s = fmin(fmax((turns - 1) / 3, 0), 1);
        EXPECT_NEAR(rope_frequency(linear, 5e5f, 64, i), f / 4, frequency_error(f / 4), "linear, pair %d", i);
        EXPECT_NEAR(got, s * f + (1 - s) * f / 32, frequency_error(f), "llama3, pair %d", i);
        EXPECT(got < before, "pair %d turns faster than the one before", i);
        kept += got == f, divided += got == f / 32, between += got < f && got > f / 32;
        before = got;
    }
    EXPECT(kept > 0 && divided > 0 && between > 0, "%d kept, %d divided, %d between", kept, divided, between);
}

// Angles of position 3 with base 1e4, to the rounding of the frequencies and of fp32.
TEST(rope_turn) {
    const double want[8] = {-1.27223251272, -1.838864985141, 1.683928640731, 4.707906576486,
                            4.81777716753,  6.147277703506,  6.975968536024, 8.020963968527};
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    Rope rope;
    Memory memory = memory_on_host();
    rope_open(&rope, &memory, (RopeSettings){4, 8, 8, 1e4f, plain});
    rope_turn(x, rope_at(rope, 3), 8);
    for (int i = 0; i < 8; i++) {
        EXPECT_NEAR(x[i], want[i], 12 * FLT_EPSILON * fabs(want[i]), "element %d", i);
    }
    rope_turn_back(x, rope_at(rope, 3), 8);
    for (int i = 0; i < 8; i++) {
        EXPECT_NEAR(x[i], i + 1, 8 * FLT_EPSILON * (i + 1), "element %d, turned back", i);
    }
    memory_close(&memory);
}

// At position 0, and in channels past `dims`, nothing changes one bit; far positions are exact.
TEST(rope_table) {
    enum { T = 5000, HS = 12, DIMS = 6 };
    Rope rope;
    Memory memory = memory_on_host();
    rope_open(&rope, &memory, (RopeSettings){T, HS, DIMS, 1e4f, plain});
    for (int t = 0; t < T; t += 1 + t / 2) {
        float *x = ops_normal(HS, 1), *y = ops_copy(x, HS);
        rope_turn(y, rope_at(rope, t), HS);
        EXPECT(ops_same_bits(x + DIMS, y + DIMS, HS - DIMS), "channels past dims turn at %d", t);
        EXPECT(ops_same_bits(x, y, DIMS) == (t == 0), "position %d", t);
        for (int i = 0; i < DIMS / 2; i++) {
            const double angle = t * (double)rope_frequency(plain, 1e4f, DIMS, i);
            EXPECT(rope_at(rope, t)[2 * i] == (float)cos(angle), "cos of pair %d at %d", i, t);
            EXPECT(rope_at(rope, t)[2 * i + 1] == (float)sin(angle), "sin of pair %d at %d", i, t);
        }
        ops_close("table");
    }
    memory_close(&memory);
}
