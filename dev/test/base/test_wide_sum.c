// test_wide_sum.c -- wide_sum.h: sums that do not depend on the order of their terms.
#include "llmc/base/rand.h"
#include "llmc/base/wide_sum.h"
#include "dev/test/lib/test.h"

enum { N = 100000 };
static double terms[N];

static double sum_in_parts(int parts) {
    WideSum total = {0, 0};
    for (int part = 0; part < parts; part++) {
        WideSum sum = {0, 0};
        for (int i = N - 1 - part; i >= 0; i -= parts) {
            wide_sum_add(&sum, terms[i]);
        }
        wide_sum_add(&total, sum.high);
        wide_sum_add(&total, sum.low);
    }
    return wide_sum_value(total);
}

// Squares over 60 powers of ten, in several orders and partitions; a plain sum differs.
TEST(order) {
    Rand rng = rand_open(1, 2);
    double plain[2] = {0, 0};
    for (int i = 0; i < N; i++) {
        terms[i] = pow(10, 60 * rand_uniform(&rng) - 30) * rand_uniform(&rng);
    }
    for (int i = 0; i < N; i++) {
        plain[0] += terms[i];
        plain[1] += terms[N - 1 - i];
    }
    EXPECT(plain[0] != plain[1], "the test tests nothing");
    const double want = sum_in_parts(1);
    for (int parts = 2; parts < 9; parts++) {
        EXPECT(sum_in_parts(parts) == want, "%d parts", parts);
    }
    EXPECT_NEAR(want, plain[0], 1e-10 * want, "the sum");
}

TEST(special) {
    WideSum sum = {0, 0}, nan = {0, 0}, tiny = {0, 0};
    wide_sum_add(&sum, 1);
    wide_sum_add(&sum, INFINITY);
    wide_sum_add(&sum, 1);
    EXPECT(wide_sum_value(sum) == INFINITY, "%g", wide_sum_value(sum));
    wide_sum_add(&nan, 1);
    wide_sum_add(&nan, NAN);
    EXPECT(isnan(wide_sum_value(nan)), "%g", wide_sum_value(nan));
    wide_sum_add(&tiny, 1);
    wide_sum_add(&tiny, 0x1p-80);
    wide_sum_add(&tiny, -1);
    EXPECT(wide_sum_value(tiny) == 0x1p-80, "%g", wide_sum_value(tiny));
}
