// test_average.c -- averages of weights, against plain loops in double precision.
#include <float.h>
#include <stdlib.h>

#include "llmc/base/check.h"
#include "llmc/base/rand.h"
#include "llmc/optim/average.h"
#include "dev/test/lib/test.h"

enum { ELEMENTS = 67, UPDATES = 40 };

// Weights after update n, from 1: they drift, so that old ones differ.
static float weight_at(int n, size_t i) {
    return rand_normal(1, 2, i) + 0.1f * (float)n * rand_normal(3, 4, i);
}

// Returns the average after update n by its definition; NAN: none.
static double wanted(Average a, int n, size_t i) {
    double sum = 0, weights = 0;
    for (int k = n, taken = 0; k >= 1 && (a.kind == AVERAGE_EMA || taken < a.snapshots); k--) {
        if (k % a.every == 0) {
            const double weight = a.kind == AVERAGE_EMA ? pow(a.decay, n - k) : 1;
            sum += weight * (double)weight_at(k, i);
            weights += weight;
            taken++;
        }
    }
    return weights > 0 ? sum / weights : NAN;
}

// An ema rounds three times an update, each at most half an epsilon of the largest weight, and an
// error fades as its update does: their sum is at most 1 / (1 - decay) of them. A mean rounds once.
static double tolerance(Average a, double largest) {
    return FLT_EPSILON / 2 * largest * (a.kind == AVERAGE_EMA ? 3 / (1 - a.decay) : 1);
}

static void test_definition(const char* text) {
    Average a;
    EXPECT(average_parse(&a, text), "%s", text);
    float *average = (float*)check_alloc(ELEMENTS * (size_t)a.snapshots, sizeof(float), "average"),
          weights[ELEMENTS], mean[ELEMENTS];
    double largest = 0;
    for (int n = 1; n <= UPDATES; n++) {
        const AverageStep step = average_step(a, n);
        for (size_t i = 0; i < ELEMENTS; i++) {
            weights[i] = weight_at(n, i);
            largest = fmax(largest, 2 * fabs((double)weights[i])); // of a difference
        }
        if (average_takes(a, n)) {
            average_add_cpu(average, weights, ELEMENTS, step);
        }
        EXPECT((step.filled == 0) == isnan(wanted(a, n, 0)), "%s: %d filled after %d", text, step.filled, n);
        if (step.filled > 0) {
            average_mean_cpu(mean, average, ELEMENTS, step);
            for (size_t i = 0; i < ELEMENTS; i++) {
                EXPECT_NEAR(mean[i], wanted(a, n, i), tolerance(a, largest), "%s after %d", text, n);
            }
        }
    }
    free(average);
}

TEST(average) {
    static const char* const texts[] = {"ema:0",  "ema:0.5",   "ema:0.99",   "last:1",
                                        "last:7", "last:12:4", "last:100:10"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        test_definition(texts[i]);
    }
}

// An average of equal weights has their bits, so that what is not updated stays as it is; so does a
// single snapshot.
TEST(average_of_equals) {
    static const char* const texts[] = {"ema:0.9", "ema:0.9999", "last:7"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        Average a;
        float average[7] = {0}, weight = 0.1f, mean;
        EXPECT(average_parse(&a, texts[i]), "%s", texts[i]);
        for (int n = 1; n <= 20; n++) {
            average_add_cpu(average, &weight, 1, average_step(a, n));
            average_mean_cpu(&mean, average, 1, average_step(a, n));
            EXPECT(mean == weight, "%s after %d: %.9g", texts[i], n, (double)mean);
        }
    }
}

TEST(average_words) {
    static const char* const wrong[] = {
        "",         "ema",    "ema:",     "ema:1",    "ema:-0.5", "ema:0.9x",        "ema:nan",    "last",
        "last:",    "last:0", "last:3:2", "last:2:4", "last:4:",  "last:4:0",        "last:4:2:1", "last:-4",
        "last:257", "lawa:4", "ema:0,9",  "last:4 ",  "ema:1e-1", "last:10000000000"};
    Average a;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        EXPECT(!average_parse(&a, wrong[i]), "%s is taken", wrong[i]);
    }
    EXPECT(average_parse(&a, "off") && a.kind == AVERAGE_NONE && !average_takes(a, 5), "off");
    EXPECT(average_parse(&a, NULL) && average_step(a, 5).filled == 0, "none");
    EXPECT(average_parse(&a, "ema:0.999") && a.kind == AVERAGE_EMA && a.decay == 0.999 && a.snapshots == 1,
           "ema");
    EXPECT(average_parse(&a, "last:2560:10") && a.snapshots == 256 && a.every == 10, "last");
    EXPECT(average_takes(a, 20) && !average_takes(a, 21) && !average_takes(a, 0), "every tenth");
}
