// test_average.c -- averages of weights, against plain loops in double precision.
#include <float.h>

#include "llmc/base/rand.h"
#include "llmc/optim/average.h"
#include "dev/test/lib/test.h"

enum { ELEMENTS = 67, UPDATES = 40 };

// Weights after update n, from 1: they drift, so that old ones differ.
static float weight_at(int n, size_t i) {
    return rand_normal(1, 2, i) + 0.1f * (float)n * rand_normal(3, 4, i);
}

// Returns the average after update n by its definition.
static double wanted(double decay, int n, size_t i) {
    double sum = 0, weights = 0;
    for (int k = 1; k <= n; k++) {
        sum += pow(decay, n - k) * (double)weight_at(k, i);
        weights += pow(decay, n - k);
    }
    return sum / weights;
}

// An update rounds three times, each at most half an epsilon of the largest difference, and an
// error fades as its update does: their sum is at most 1 / (1 - decay) of them.
static void test_definition(const char* text) {
    Average a;
    float average[ELEMENTS], weights[ELEMENTS];
    double largest = 0;
    EXPECT(average_parse(&a, text), "%s", text);
    for (int n = 1; n <= UPDATES; n++) {
        for (size_t i = 0; i < ELEMENTS; i++) {
            weights[i] = weight_at(n, i);
            largest = fmax(largest, 2 * fabs((double)weights[i]));
        }
        average_add_cpu(average, weights, ELEMENTS, average_rate(a, n));
        for (size_t i = 0; i < ELEMENTS; i++) {
            EXPECT_NEAR(average[i], wanted(a.decay, n, i), 3 * FLT_EPSILON / 2 * largest / (1 - a.decay),
                        "%s after %d", text, n);
        }
    }
}

TEST(average) {
    test_definition("ema:0");
    test_definition("ema:0.5");
    test_definition("ema:0.99");
}

// An average of equal weights has their bits, so that what is not updated stays as it is.
TEST(average_of_equals) {
    static const char* const texts[] = {"ema:0.9", "ema:0.9999"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        Average a;
        float average = NAN, weight = 0.1f;
        EXPECT(average_parse(&a, texts[i]), "%s", texts[i]);
        for (int n = 1; n <= 20; n++) {
            average_add_cpu(&average, &weight, 1, average_rate(a, n));
            EXPECT(average == weight, "%s after %d: %.9g", texts[i], n, (double)average);
        }
    }
}

TEST(average_words) {
    static const char* const wrong[] = {"",        "ema",      "ema:",     "ema:1", "ema:-0.5", "ema:0.9x",
                                        "ema:nan", "ema:0,9",  "ema:1e-1", "last",  "last:4",   "last:4:2",
                                        "lawa:4",  "ema:0.9 ", "ema: 0.9", "em",    "off "};
    Average a;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        EXPECT(!average_parse(&a, wrong[i]), "%s is taken", wrong[i]);
    }
    EXPECT(average_parse(&a, "off") && !a.is_kept, "off");
    EXPECT(average_parse(&a, NULL) && !a.is_kept, "none");
    EXPECT(average_parse(&a, "ema:0.999") && a.is_kept && a.decay == 0.999, "ema");
}
