// test_vec.c -- vec.h: every function against plain scalar code, and e^x over its whole range.
#include "llmc/base/vec.h"
#include "dev/test/lib/ops.h"

static float exp_lane(float x, int lane) {
    const volatile float hidden =
        x; // computed at run time, as it is in use: the compiler may round differently
    Vec v = vec_all(0.5f);
    v[lane] = hidden;
    return vec_exp(v)[lane];
}

TEST(memory) {
    float* from = ops_normal(3 * LANES, 1);
    for (int i = 0; i <= 2 * LANES; i++) { // any alignment, up to the last element
        float* to = ops_floats(3 * LANES);
        vec_store(to + i, vec_load(from + i));
        EXPECT(ops_same_bits(to + i, from + i, LANES), "load and store at %d", i);
        for (int j = 0; j < 3 * LANES; j++) {
            EXPECT((j >= i && j < i + LANES) || isnan(to[j]), "a store at %d wrote element %d", i, j);
        }
    }
    ops_close("load and store");
}

TEST(lanes) {
    const Vec yes = vec_load(ops_normal(LANES, 1)), no = vec_load(ops_normal(LANES, 1));
    for (int n = -2; n <= LANES + 2; n++) {
        const Vec got = vec_select(vec_first(n), yes, no);
        for (int i = 0; i < LANES; i++) {
            EXPECT(got[i] == (i < n ? yes[i] : no[i]), "lane %d of the first %d", i, n);
        }
    }
    const Vec max = vec_max(yes, no), min = vec_min(yes, no), all = vec_all(-0.0f), nan = vec_all(NAN);
    const Vec max_nan = vec_max(yes, nan), max_yes = vec_max(nan, yes), min_nan = vec_min(yes, nan),
              min_yes = vec_min(nan, yes);
    Vec streamed, sum = yes;
    vec_add_product(&sum, yes, no);
    vec_stream((float*)(void*)&streamed, yes);
    for (int i = 0; i < LANES; i++) {
        EXPECT(max[i] == fmaxf(yes[i], no[i]) && min[i] == fminf(yes[i], no[i]),
               "maximum, minimum in lane %d", i);
        EXPECT(isnan(max_nan[i]) && isnan(min_nan[i]) && max_yes[i] == yes[i] && min_yes[i] == yes[i],
               "with NaN the second operand, lane %d", i);
        EXPECT(streamed[i] == yes[i], "streamed lane %d", i);
        const double product =
            (double)yes[i] * no[i]; // the product may be rounded, and the sum is: by 2^-24 each
        EXPECT_NEAR(sum[i], yes[i] + product, 0x1p-24 * (fabs(product) + fabs(yes[i] + product)) * 1.01,
                    "sum with a product, lane %d", i);
        EXPECT(all[i] == 0 && signbit(all[i]) && isnan(nan[i]), "-0 and NaN in all lanes");
    }
    ops_close("lanes");
}

// Sums of numbers so different in size that any other order gives other bits.
TEST(reductions) {
    for (int round = 0; round < 100; round++) {
        float* x = ops_normal(LANES, 1);
        for (int i = 0; i < LANES; i++) {
            x[i] *= i * round % 3 ? 1e7f : 1;
        }
        float sum = 0, max = x[0];
        for (int i = 0; i < LANES; i++) {
            sum += x[i];
            max = fmaxf(max, x[i]);
        }
        EXPECT(vec_hsum(vec_load(x)) == sum, "round %d: the sum is not in the order of the lanes", round);
        EXPECT(vec_hmax(vec_load(x)) == max, "round %d: maximum", round);
        ops_close("reductions");
    }
    for (int i = 0; i < LANES; i++) {
        Vec v = vec_all(-INFINITY);
        v[i] = -3;
        EXPECT(vec_hmax(v) == -3, "a maximum of -3 in lane %d", i);
    }
}

TEST(transpose) {
    Vec square[LANES];
    for (int i = 0; i < LANES; i++) {
        for (int j = 0; j < LANES; j++) {
            square[i][j] = (float)(i * LANES + j);
        }
    }
    vec_transpose(square);
    for (int i = 0; i < LANES; i++) {
        for (int j = 0; j < LANES; j++) {
            EXPECT(square[i][j] == (float)(j * LANES + i), "element (%d, %d) of the transpose", i, j);
        }
    }
}

// The header promises 2e-7, from one end to the other.
TEST(exp_accuracy) {
    const int points = 200000;
    double worst = 0, worst_at = 0;
    for (int i = 0; i <= points; i++) {
        const float x = (float)(-87.3 + (88.3 + 87.3) * i / points);
        const double error = fabs(exp_lane(x, i % LANES) / exp(x) - 1);
        if (!(error <= worst)) {
            worst = error;
            worst_at = x;
        }
    }
    EXPECT_NEAR(worst, 0, 2e-7, "relative error of exp(%.9g)", worst_at);
    for (int n = -125; n <= 127; n++) { // where the power of two changes, on both sides
        const double middle = (n - 0.5) * log(2);
        for (int i = -20; i <= 20; i++) {
            const float x = (float)(middle * (1 + i * 1e-7));
            EXPECT_NEAR(exp_lane(x, 0) / exp(x), 1, 2e-7, "exp(%.9g)", x);
        }
    }
    EXPECT(exp_lane(0, 0) == 1 && exp_lane(-0.0f, 0) == 1 && exp_lane(1e-30f, 0) == 1, "exp(0) is 1");
}

TEST(exp_ends) {
    const float lowest = exp_lane(-87.3f, 0), highest = exp_lane(88.3f, 0);
    EXPECT(lowest >= FLT_MIN && lowest < 1.25e-38f, "exp(-87.3) is %g", lowest);
    EXPECT(highest > 2.1e38f && highest <= FLT_MAX, "exp(88.3) is %g", highest);
    const float beyond[] = {87.31f, 88.31f, 89, 104, 1e4f, 1e30f, FLT_MAX, INFINITY};
    for (int i = 0; i < 8; i++) {
        EXPECT(exp_lane(-beyond[i], 0) == lowest, "exp(-%g) is %g", beyond[i], exp_lane(-beyond[i], 0));
        EXPECT(i == 0 || exp_lane(beyond[i], 0) == highest, "exp(%g) is %g", beyond[i],
               exp_lane(beyond[i], 0));
    }
}

// NaN stays NaN whatever its sign and payload, and only in its own lane. Memory filled with 0xFF is
// a NaN too.
TEST(exp_nan) {
    const uint32_t nans[] = {0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7FFFFFFF,
                             0xFFFFFFFF, 0x7FC001FF, 0xFFC000FF};
    for (int i = 0; i < 7; i++) {
        float nan;
        memcpy(&nan, &nans[i], sizeof(nan));
        Vec v = vec_all(1);
        v[LANES - 1] = nan;
        const Vec e = vec_exp(v);
        EXPECT(isnan(e[LANES - 1]), "exp of NaN 0x%08X is %g", (unsigned)nans[i], e[LANES - 1]);
        EXPECT(e[0] == exp_lane(1, 0), "NaN in another lane changed exp(1) to %g", e[0]);
    }
}

static float exp2_lane(float x) {
    const volatile float hidden = x;
    return vec_exp2(vec_all(hidden))[LANES - 1];
}

// The header promises 3e-7 from -126 to 127, and bounds beyond.
TEST(exp2) {
    const int points = 200000;
    double worst = 0, worst_at = 0;
    for (int i = 0; i <= points; i++) {
        const float x = (float)(-126 + 253.0 * i / points);
        const double error = fabs(exp2_lane(x) / exp2(x) - 1);
        if (!(error <= worst)) {
            worst = error;
            worst_at = x;
        }
    }
    EXPECT_NEAR(worst, 0, 3e-7, "relative error of 2^%.9g", worst_at);
    const float beyond[] = {128, 129, 1e4f, 1e10f, 1e30f, FLT_MAX, INFINITY};
    for (int i = 0; i < 7; i++) {
        const float small = exp2_lane(-beyond[i]), large = exp2_lane(beyond[i]);
        EXPECT(small >= 0 && small < 1.2e-38f, "2^%g is %g", -beyond[i], small);
        EXPECT(large > 1.7e38f, "2^%g is %g", beyond[i], large);
    }
    EXPECT(isnan(exp2_lane(NAN)), "2^NaN");
    EXPECT_NEAR(exp2_lane(0), 1, 3e-7, "2^0");
}

// Within the rounding of n sums, for lengths that fill vectors and that do not.
TEST(dot) {
    for (int n = 0; n <= 3 * LANES + 1; n++) {
        const float *a = ops_normal((size_t)n + 1, 1), *b = ops_normal((size_t)n + 1, 1);
        double want = 0, size = 0;
        for (int i = 0; i < n; i++) {
            want += (double)a[i] * b[i];
            size += fabs((double)a[i] * b[i]);
        }
        EXPECT_NEAR(vec_dot(a, b, n), want, (n + 1) * size * FLT_EPSILON, "a dot product of %d", n);
        ops_close("dot");
    }
}

TEST(reciprocal) {
    for (int i = 0; i < 10000; i++) {
        const float x = (float)exp(-87 + 174.0 * i / 9999);
        EXPECT_NEAR((double)vec_reciprocal(vec_all(x))[i % LANES] * x, 1, 2e-7, "1 / %g", x);
    }
}

TEST(lookup) {
    const float eight[] = {1.5f, -2, 3, 4, 5, -6, 7, 8e30f};
    const VecTable table = vec_table(eight);
    for (int first = -20; first < 20; first++) {
        VecMask index;
        for (int i = 0; i < LANES; i++) {
            index[i] = 5 * first + 3 * i + (first > 10 ? 1 << 30 : 0);
        }
        const Vec found = vec_lookup(&table, index);
        for (int i = 0; i < LANES; i++) {
            EXPECT(found[i] == eight[index[i] & 7], "number %d: %g", index[i], found[i]);
        }
    }
}

TEST(conversions) {
    const float xs[] = {0, -0.75f, 0.99999994f, 1, 2.5f, -2.5f, 16777215, -1e9f};
    const int wanted[] = {0, 0, 0, 1, 2, -2, 16777215, -1000000000};
    for (int k = 0; k < 8; k++) {
        Vec x = vec_all(7);
        x[LANES - 1] = xs[k];
        const VecMask ints = vec_to_ints(x);
        const Vec back = vec_from_ints(ints);
        EXPECT(ints[LANES - 1] == wanted[k] && ints[0] == 7, "%g becomes %d", xs[k], ints[LANES - 1]);
        EXPECT(back[LANES - 1] == (float)wanted[k] && back[0] == 7, "%d becomes %g", wanted[k],
               back[LANES - 1]);
    }
}
