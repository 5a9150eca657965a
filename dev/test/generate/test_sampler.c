// test_sampler.c -- sampler.h: frequencies against the softmax (chi-square), sets of top-k and
// top-p, ties and extremes.
#include "llmc/base/rand.h"
#include "llmc/generate/sampler.h"
#include "dev/test/lib/test.h"

enum { V = 40, DRAWS = 100000, GPT2_V = 50257 };

static Sampler sampler;
static float logits[GPT2_V];

static void fill(int n, uint64_t seed) {
    for (int i = 0; i < n; i++) {
        logits[i] = 2 * rand_normal(seed, 0, (uint64_t)i);
    }
}

// The largest logits first, lower ids first among equals: a selection sort, the plain definition.
static void sort_ids(int* ids, int n) {
    for (int i = 0; i < n; i++) {
        ids[i] = i;
    }
    for (int i = 0; i < n; i++) {
        int best = i;
        for (int j = i + 1; j < n; j++) {
            const float a = logits[ids[j]], b = logits[ids[best]];
            best = a > b || (a == b && ids[j] < ids[best]) ? j : best;
        }
        const int id = ids[best];
        ids[best] = ids[i];
        ids[i] = id;
    }
}

// The probabilities that temperature, top-k and top-p leave, by definition. Returns how many are
// kept.
static int reference(double* p, double temperature, int top_k, double top_p) {
    int ids[V], kept = 0;
    double total = 0, mass = 0, sum = 0;
    sort_ids(ids, V);
    memset(p, 0, V * sizeof(*p));
    for (int i = 0; i < top_k; i++) {
        total += exp(logits[ids[i]] / temperature);
    }
    while (kept < top_k && mass < top_p * total) {
        mass += exp(logits[ids[kept++]] / temperature);
    }
    for (int i = 0; i < kept; i++) {
        p[ids[i]] = exp(logits[ids[i]] / temperature);
        sum += p[ids[i]];
    }
    for (int i = 0; i < V; i++) {
        p[i] /= sum;
    }
    return kept;
}

// Draws many times and compares: chi-square with kept - 1 degrees of freedom has mean kept - 1 and
// variance 2 (kept - 1); five standard deviations above are a failure. The draws are fixed, so it
// never fails by chance.
static void test_frequencies(float temperature, int top_k, float top_p) {
    double p[V], chi = 0;
    int count[V] = {0};
    fill(V, 3);
    const int kept = reference(p, temperature, top_k ? top_k : V, top_p);
    Rand rng = rand_open(7, 7);
    for (int i = 0; i < DRAWS; i++) {
        const float coin = (float)rand_uniform(&rng);
        count[sampler_next(logits, V, temperature, top_k, top_p, coin, &sampler)]++;
    }
    for (int i = 0; i < V; i++) {
        EXPECT(p[i] > 0 || count[i] == 0, "token %d was cut off but drawn %d times", i, count[i]);
        if (p[i] > 0) {
            chi += (count[i] - DRAWS * p[i]) * (count[i] - DRAWS * p[i]) / (DRAWS * p[i]);
        }
    }
    EXPECT(chi <= kept - 1 + 5 * sqrt(2.0 * kept) && (kept == 1 || chi > 0),
           "temperature %g, top-k %d, top-p %g: chi-square %g, %d kept", temperature, top_k, top_p, chi,
           kept);
}

// The coin walks over exactly the kept tokens, each as wide as its probability, in any order.
static void test_sets(float temperature, int top_k, float top_p) {
    double p[V];
    int seen[V] = {0};
    fill(V, 4);
    reference(p, temperature, top_k ? top_k : V, top_p);
    for (int i = 0; i < 20000; i++) {
        seen[sampler_next(logits, V, temperature, top_k, top_p, ((float)i + 0.5f) / 20000, &sampler)]++;
    }
    for (int i = 0; i < V; i++) {
        EXPECT_NEAR(seen[i] / 20000.0, p[i], 1.01 / 20000, "token %d at top-k %d, top-p %g", i, top_k, top_p);
    }
}

static int next(int n, float temperature, int top_k, float top_p, float coin) {
    return sampler_next(logits, n, temperature, top_k, top_p, coin, &sampler);
}

static void test_ties(void) {
    for (int i = 0; i < V; i++) {
        logits[i] = 1.5f;
    }
    EXPECT(next(V, 0, 0, 1, 0.99f) == 0, "argmax of equals is the lowest id");
    for (int i = 0; i < 1000; i++) {
        const float coin = (float)i / 1000;
        EXPECT(next(V, 1, 3, 1, coin) < 3, "top-3 of equals are the ids 0 1 2");
        EXPECT(next(V, 1, 0, 0.24f, coin) < 10, "a nucleus of 0.24 of 40 equals is the ids 0 to 9");
    }
    logits[30] = 1.6f; // in a huge temperature the weights are equal, the order is still by logit
    EXPECT(next(V, 1e30f, 1, 1, 0.5f) == 30, "top-1 is the largest logit at any temperature");
}

static void test_extremes(void) {
    for (int i = 0; i < V; i++) {
        logits[i] = i == 5 ? 1000.0f : i == 6 ? 999.0f : 0.0f; // exp(1000) would be inf
    }
    int count[V] = {0};
    for (int i = 0; i < 1000; i++) {
        count[next(V, 1, 0, 1, (float)i / 1000)]++;
    }
    EXPECT(abs(count[5] - 731) <= 1 && abs(count[6] - 269) <= 1, "large logits: %d %d", count[5], count[6]);
    EXPECT(next(V, 1e-30f, 0, 1, 0.999f) == 5, "a tiny temperature is argmax");
    for (int i = 0; i < V; i++) {
        logits[i] = i < 4 ? 0.0f : -INFINITY;
    }
    const float coins[] = {0, 0.25f, 0.9999999f, 1};
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k <= V; k += 5) {
            EXPECT(next(V, 1, k, 1, coins[i]) < 4, "coin %g draws a token of probability 0", coins[i]);
            EXPECT(next(V, 1, k, 0.999999f, coins[i]) < 4, "coin %g draws a token of probability 0",
                   coins[i]);
        }
    }
    EXPECT(next(1, 1, 0, 1, 0.5f) == 0, "a vocabulary of one");
    EXPECT(next(2, 1, 0, 1, 0.4999f) == 0 && next(2, 1, 0, 1, 0.5f) == 1, "each takes half of the coins");
}

// At the size of GPT-2, with the smallest and the largest coin, and a tail so light that rounding
// loses it.
static void test_large(void) {
    fill(GPT2_V, 5);
    int best = 0;
    for (int i = 0; i < GPT2_V; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    EXPECT(next(GPT2_V, 0, 0, 1, 0) == best && next(GPT2_V, 1, 1, 1, 0.7f) == best, "argmax and top-1");
    EXPECT(next(GPT2_V, 1, 0, 1e-6f, 0.7f) == best, "the smallest nucleus");
    for (int i = 0; i < 20; i++) {
        const int token = next(GPT2_V, 0.8f, 50, 0.95f, (float)i / 20);
        EXPECT(token >= 0 && token < GPT2_V && logits[token] > 5, "token %d is not among the top 50", token);
    }
    for (int i = 1; i < GPT2_V; i++) {
        logits[i] = i < GPT2_V / 2 ? -80.0f : -200.0f; // weights 1e-35 and 0
    }
    logits[0] = 0;
    EXPECT(next(GPT2_V, 1, 0, 1, 1) < GPT2_V / 2, "coin 1 draws a token of probability 0");
}

static void draw_with(const void* value) {
    fill(V, 6);
    logits[17] = *(const float*)value;
    next(V, 1, 0, 1, 0.5f);
}

static void draw_from_nothing(const void* value) {
    for (int i = 0; i < V; i++) {
        logits[i] = *(const float*)value;
    }
    next(V, 1, 0, 1, 0.5f);
}

static void draw_at_temperature(const void* value) { next(V, *(const float*)value, 0, 1, 0.5f); }

static void test_errors(void) {
    const float bad[] = {NAN, INFINITY, -INFINITY, -1};
    EXPECT(test_dies(draw_with, &bad[0], EXIT_FAILURE, "sampler|token 17|nan"), "NaN");
    EXPECT(test_dies(draw_with, &bad[1], EXIT_FAILURE, "sampler|token 17|inf"), "inf");
    EXPECT(test_dies(draw_from_nothing, &bad[2], EXIT_FAILURE, "sampler|40 logits are -inf"), "all -inf");
    EXPECT(test_dies(draw_at_temperature, &bad[3], EXIT_FAILURE, "temperature is -1"), "temperature");
    EXPECT(test_dies(draw_at_temperature, &bad[0], EXIT_FAILURE, "temperature is"), "temperature NaN");
}

TEST(sampler) {
    sampler_open(&sampler, GPT2_V);
    test_frequencies(1, 0, 1);
    test_frequencies(0.5f, 0, 1);
    test_frequencies(2, 10, 1);
    test_frequencies(1, 0, 0.9f);
    test_frequencies(1, 20, 0.7f);
    test_frequencies(1, 1, 1);
    test_sets(1, 0, 1);
    test_sets(1, 7, 1);
    test_sets(1, 0, 0.8f);
    test_sets(1.5f, 12, 0.8f); // differs from a nucleus of all tokens: the mass counts the 12 alone
    test_ties();
    test_extremes();
    test_large();
    test_errors();
    sampler_close(&sampler);
}
