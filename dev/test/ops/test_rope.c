// test_rope.c -- rotary positions: frequencies and their scalings, the table, turns forward and
// back.
#include "llmc/ops/rope.h"
#include "dev/test/lib/ops.h"

static const RopeScaling plain = {ROPE_PLAIN};

// Returns the frequency of pair i of `dims` channels.
static double frequency_of(RopeScaling scaling, float base, int dims, int i) {
    return rope_frequency((RopeSettings){1, dims, dims, base, scaling, NULL}, i, 0);
}

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
            EXPECT_NEAR(frequency_of(plain, base, n, j), want, frequency_error(want),
                        "base %g, pair %d of %d channels", base, j, n);
        }
    }
    EXPECT(frequency_of(plain, 1e4f, 8, 1) == (double)0.1f &&
               frequency_of(plain, 1e4f, 8, 3) == (double)0.001f,
           "powers of ten are rounded once");
}

// Linear: all divided. Llama 3: short waves stay, long ones are divided, in between it is gradual.
TEST(rope_scaling) {
    const RopeScaling linear = {ROPE_LINEAR, 4}, llama3 = {ROPE_LLAMA3, 32, 1, 4, 8192};
    int kept = 0, divided = 0, between = 0;
    double before = INFINITY;
    for (int i = 0; i < 32; i++) {
        const double f = frequency_of(plain, 5e5f, 64, i), turns = f * 8192 / (2 * M_PI);
        const double got = frequency_of(llama3, 5e5f, 64, i), s = fmin(fmax((turns - 1) / 3, 0), 1);
        EXPECT_NEAR(frequency_of(linear, 5e5f, 64, i), f / 4, frequency_error(f / 4), "linear, pair %d", i);
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
            const double angle = t * frequency_of(plain, 1e4f, DIMS, i);
            EXPECT(rope_at(rope, t)[2 * i] == (float)cos(angle), "cos of pair %d at %d", i, t);
            EXPECT(rope_at(rope, t)[2 * i + 1] == (float)sin(angle), "sin of pair %d at %d", i, t);
        }
        ops_close("table");
    }
    memory_close(&memory);
}

// The ends of published models (their raw numbers: 8.09 and 17.40; 10.47 and 22.51; 18.08 and
// 34.98), and what lies between them: the mean of both frequencies, weighted by the way.
TEST(rope_yarn) {
    static const struct {
        RopeScaling scaling;
        int dims;
        float base;
        double low, high;
    } cases[] = {{{ROPE_YARN, 32, 1, 32, 4096, 1.3465735902799727f, 1}, 64, 150000, 8.092779, 17.398025},
                 {{ROPE_YARN, 40, 1, 32, 4096, 1}, 64, 1e4f, 10, 23},
                 {{ROPE_YARN, 8, 1, 32, 8192, 1.2079441541679836f}, 128, 5e5f, 18, 35},
                 {{ROPE_YARN, 4, 1, 1, 64, 1}, 8, 1e4f, 1, 2},      // 1.009 for both
                 {{ROPE_YARN, 4, 1, 32, 4, 1}, 8, 1e4f, 0, 0.001}}; // both below the first pair
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        const RopeSettings s = {1, cases[c].dims, cases[c].dims, cases[c].base, cases[c].scaling, NULL};
        double low, high;
        rope_yarn_ends(s, &low, &high);
        EXPECT_NEAR(low, cases[c].low, 1e-6, "case %zu: low", c);
        EXPECT_NEAR(high, cases[c].high, 1e-6, "case %zu: high", c);
        for (int i = 0; i < s.dims / 2; i++) {
            const double f = frequency_of(plain, s.base, s.dims, i),
                         way = fmin(fmax((i - cases[c].low) / (cases[c].high - cases[c].low), 0), 1),
                         want = (1 - way) * f + way * f / s.scaling.factor;
            EXPECT_NEAR(rope_frequency(s, i, 0), want, 8 * FLT_EPSILON * f, "case %zu, pair %d", c, i);
        }
    }
}

// Tables of longrope: within the original context near, beyond it far from the start; a table for
// decoding has both. The attention factor is in rotated pairs of either.
TEST(rope_longrope) {
    enum { O = 4, HS = 8, DIMS = 6 };
    const RopeFactors factors = {{1, 1.5f, 2}, {3, 5, 40}};
    RopeSettings s = {O, HS, DIMS, 1e4f, {ROPE_LONG, 4, 0, 0, O, 1.25f}, &factors};
    for (int T = O; T <= 2 * O; T += O) {
        Memory memory = memory_on_host(), dry = memory_dry();
        RopeTables tables, planned;
        s.T = T;
        rope_tables_open(&tables, &memory, s, rope_open);
        rope_tables_open(&planned, &dry, s, rope_open);
        EXPECT(memory_bytes(&memory, MEMORY_DEVICE) == memory_bytes(&dry, MEMORY_DEVICE) &&
                   memory_bytes(&dry, MEMORY_DEVICE) == (size_t)(T > O ? 2 * T : T) * HS * sizeof(float),
               "%zu bytes of %d tokens", memory_bytes(&dry, MEMORY_DEVICE), T);
        for (int tokens = 0; tokens <= T; tokens += O) {
            const Rope rope = rope_of_pass(&tables, tokens);
            for (int t = 0; t < T; t++) {
                const float* list = (tokens == 0 ? t >= O : tokens > O) ? factors.far : factors.near;
                for (int i = 0; i < DIMS / 2 && (tokens == 0 || t < tokens); i++) {
                    const double x = t * pow(1e4, -2.0 * i / DIMS) / (double)list[i];
                    EXPECT_NEAR(rope_at(rope, t)[2 * i], 1.25 * cos(x), 2e-6, "cos of %d at %d", i, t);
                    EXPECT_NEAR(rope_at(rope, t)[2 * i + 1], 1.25 * sin(x), 2e-6, "sin of %d at %d", i, t);
                }
                EXPECT(rope_at(rope, t)[DIMS] == 1 && rope_at(rope, t)[DIMS + 1] == 0, "rest at %d", t);
            }
        }
        memory_close(&memory);
    }
}
