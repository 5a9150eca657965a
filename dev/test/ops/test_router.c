// test_router.c -- the router and the rows of experts: both passes against plain loops in double at
// awkward sizes, with padding and documents; ties; an expert that gets all tokens; the same bits
// for any number of threads and for any size of a micro-batch.
#include "llmc/base/threads.h"
#include "llmc/ops/activation.h"
#include "llmc/ops/experts.h"
#include "llmc/ops/router.h"
#include "llmc/reference.h"
#include "dev/test/lib/counted_case.h"
#include "dev/test/lib/ops.h"

static const float FACTOR = 1.5f;

static const RouterLosses LOSSES = {0.3f, 0.1f, 0.25f};

static int* ints(size_t n) { return (int*)(void*)ops_bytes(n * sizeof(int)); }

static size_t tokens(const Router* r) { return (size_t)r->B * (size_t)r->T; }
static size_t places(const Router* r) { return tokens(r) * (size_t)r->used; }
static size_t rows_at_most(const Router* r) { return router_rows(tokens(r), r->E, r->used); }

static Router router_open(RouterKind kind, int B, int T, int E, int used, float* logits) {
    Router r = {.kind = kind, .B = B, .T = T, .E = E, .used = used, .factor = FACTOR};
    r.logits = logits;
    r.chosen = ints(places(&r)), r.rows = ints(places(&r));
    r.order = ints(rows_at_most(&r)), r.first = ints((size_t)E + 1);
    r.scale = ops_floats(rows_at_most(&r));
    return r;
}

// Experts in order, tokens in order, padding at the end of each expert; `rows` is the inverse.
static void check_rows(const Router* r) {
    EXPECT(r->first[0] == 0 && (size_t)r->first[r->E] <= rows_at_most(r), "ends of all rows");
    size_t found = 0;
    for (int e = 0; e < r->E; e++) {
        const int count = router_count(r, e), end = r->first[e] + count;
        EXPECT(r->first[e + 1] == r->first[e] + (count + 31) / 32 * 32, "padding of expert %d", e);
        for (int m = r->first[e]; m < end; m++) {
            EXPECT(r->chosen[r->order[m]] == e && r->rows[r->order[m]] == m, "row %d", m);
            EXPECT(m == r->first[e] || r->order[m] > r->order[m - 1], "order of row %d", m);
        }
        for (int m = end; m < r->first[e + 1]; m++) {
            EXPECT(r->order[m] == -1 && r->scale[m] == 0, "padding in row %d", m);
        }
        found += (size_t)count;
    }
    EXPECT(found == places(r), "%zu rows, wanted %zu", found, places(r));
}

// Sums of E numbers near the largest err by some epsilon, and exponentials by 2 for each unit of
// their argument.
static void check_against_reference(RouterKind kind, int B, int T, int E, int used, int is_padded) {
    const size_t n = (size_t)(B * T) * (size_t)E, N = (size_t)(B * T);
    float *bias = ops_normal((size_t)E, 0.5f), *logits = ops_normal(n, 1.5f), *dlogits = ops_floats(n);
    Router r = router_open(kind, B, T, E, used, logits);
    r.bias = kind == ROUTER_SIGMOID ? bias : NULL;
    r.groups = kind == ROUTER_SIGMOID && E % 8 == 0 ? E / 8 < 4 ? 4 : E / 8 < 32 ? E / 8 : 32 : 0;
    r.groups_used = r.groups / 2;
    if (is_padded) {
        r.counted = counted_ragged(B, T);
    }
    router_forward_cpu(&r);
    check_rows(&r);
    const RefRouter ref = {kind,
                           (size_t)B,
                           (size_t)T,
                           (size_t)E,
                           (size_t)used,
                           FACTOR,
                           LOSSES.balance,
                           LOSSES.z_loss,
                           ops_widen(bias, (size_t)E),
                           r.counted.starts,
                           r.counted.lengths,
                           (size_t)r.groups,
                           (size_t)r.groups_used};
    double *l = ops_widen(logits, n), *weights = ops_doubles(n), *dweights = ops_doubles(n),
           *dl = ops_doubles(n);
    float *dscale = ops_normal(rows_at_most(&r), 1), *got = ops_floats(n);
    memset(got, 0, n * sizeof(float));
    for (size_t i = 0; i < N * (size_t)used; i++) {
        const size_t at = i / (size_t)used * (size_t)E + (size_t)r.chosen[i];
        got[at] = r.scale[r.rows[i]];
        // what a padding token adds to the output has no gradient
        const int is_token = counted_is_token(&r.counted, (int)i / used / T, (int)i / used % T, T);
        dweights[at] = is_token ? dscale[r.rows[i]] : 0;
    }
    ref_router_forward(weights, l, &ref);
    ref_router_backward(dl, dweights, l, weights, LOSSES.dloss * (is_padded ? 0.5 : 1), &ref);
    router_backward_cpu(dlogits, dscale, &r, LOSSES);
    EXPECT_NEAR(ops_error(got, weights, NULL, n), 0, 32, "weights of kind %d, %d x %d, %d of %d", kind, B, T,
                used, E);
    EXPECT_NEAR(ops_error(dlogits, dl, NULL, n), 0, 128, "dlogits of kind %d, %d x %d, %d of %d%s", kind, B,
                T, used, E, is_padded ? ", padded" : "");
    ops_close("router");
}

TEST(router) {
    for (RouterKind kind = ROUTER_CHOSEN; kind <= ROUTER_SIGMOID; kind++) {
        check_against_reference(kind, 1, 1, 2, 1, 0);
        check_against_reference(kind, 2, 31, 5, 2, 0);
        check_against_reference(kind, 1, 33, 8, 3, 0);
        check_against_reference(kind, 3, 13, 64, 8, 0);
        check_against_reference(kind, 3, 13, 64, 8, 1);
        check_against_reference(kind, 2, 130, 5, 2, 1);
        check_against_reference(kind, 1, 7, 4, 4, 0);
        check_against_reference(kind, 2, 3, 1024, 16, 0);
    }
}

// A single expert has the weight 1, and a router that its weight does not change.
TEST(router_single) {
    enum { T = 33 };
    for (RouterKind kind = ROUTER_CHOSEN; kind <= ROUTER_SIGMOID; kind++) {
        float *logits = ops_normal(T, 3), *dlogits = ops_floats(T), *dscale = ops_normal(64, 1);
        Router r = router_open(kind, 1, T, 1, 1, logits);
        r.factor = 1;
        router_forward_cpu(&r);
        router_backward_cpu(dlogits, dscale, &r, (RouterLosses){LOSSES.balance, 0, LOSSES.dloss});
        for (int n = 0; n < T; n++) {
            EXPECT(r.order[n] == n && r.scale[n] == 1 && dlogits[n] == 0, "token %d of kind %d", n, kind);
        }
        ops_close("single");
    }
}

// Equal scores: the lower expert, also after the largest ones; NaN leaves the choice in bounds.
TEST(router_ties) {
    enum { E = 6, USED = 3 };
    const float given[3][E] = {{2, 2, 2, 2, 2, 2}, {1, 3, 1, 3, 0, 1}, {NAN, NAN, NAN, NAN, NAN, NAN}};
    const int want[2][USED] = {{0, 1, 2}, {1, 3, 0}};
    float* logits = ops_copy(given[0], 3 * E);
    const Router r = router_open(ROUTER_CHOSEN, 1, 3, E, USED, logits);
    router_forward_cpu(&r);
    check_rows(&r);
    for (int i = 0; i < 2 * USED; i++) {
        EXPECT(r.chosen[i] == want[i / USED][i % USED], "token %d, slot %d: expert %d", i / USED, i % USED,
               r.chosen[i]);
    }
    ops_close("ties");
}

// All tokens take expert 2, and nobody the others.
TEST(router_all_to_one) {
    enum { T = 70, E = 4 };
    float* logits = ops_normal(T * E, 1);
    for (int t = 0; t < T; t++) {
        logits[t * E + 2] = 10;
    }
    const Router r = router_open(ROUTER_SOFTMAX, 1, T, E, 1, logits);
    double statistics[E + 1] = {0};
    router_forward_cpu(&r);
    check_rows(&r);
    router_statistics_add_cpu(statistics, &r);
    EXPECT(r.first[2] == 0 && r.first[3] == 96 && r.first[4] == 96, "rows");
    EXPECT(statistics[0] == 0 && statistics[2] == T && statistics[3] == 0, "loads");
    ops_close("all to one");
}

// The busiest expert of two layers has 6 of 8 places, and two of four experts would have 2 each.
TEST(router_summary) {
    const double statistics[3][5] = {{2, 2, 2, 2, 4}, {1, 6, 0, 1, 2}, {0, 0, 0, 0, 0}};
    const RouterSummary sum = router_summary(statistics[0], 3, 4, 2);
    EXPECT(sum.load == 3 && sum.entropy == 0.75, "load %g, entropy %g", sum.load, sum.entropy);
    EXPECT(router_summary(statistics[2], 1, 4, 2).load == 0, "no tokens");
}

TEST(router_statistics) {
    enum { T = 100, E = 8, USED = 2 };
    float* logits = ops_normal(T * E, 1);
    const Router r = router_open(ROUTER_CHOSEN, 1, T, E, USED, logits);
    double got[E + 1] = {0}, again[E + 1] = {0}, entropy = 0, total = 0;
    router_forward_cpu(&r);
    const double* l = ops_widen(logits, T * E);
    for (int n = 0; n < T; n++) {
        double p[E];
        ref_softmax_(p, l + n * E, E);
        for (int e = 0; e < E; e++) {
            entropy -= p[e] * log(p[e]);
        }
    }
    threads_set(1);
    router_statistics_add_cpu(got, &r);
    threads_set(3);
    router_statistics_add_cpu(again, &r);
    for (int e = 0; e < E; e++) {
        total += got[e];
    }
    EXPECT(total == T * USED, "tokens");
    EXPECT(memcmp(got, again, sizeof(got)) == 0, "threads change the bits");
    EXPECT_NEAR(got[E], entropy, 1e-6 * entropy, "entropy");
    ops_close("statistics");
}

// Two sequences at a time, or one after the other.
TEST(router_micro_batches) {
    enum { T = 45, E = 8, USED = 2, HALF = T * E };
    float *logits = ops_normal(2 * HALF, 1), *dlogits = ops_floats(2 * HALF), *apart = ops_floats(2 * HALF);
    Router both = router_open(ROUTER_CHOSEN, 2, T, E, USED, logits);
    float* dscale = ops_floats(rows_at_most(&both));
    for (int threads = 1; threads <= 3; threads++) {
        threads_set(threads);
        router_forward_cpu(&both);
        for (size_t i = 0; i < places(&both); i++) {
            dscale[both.rows[i]] = (float)i / 64;
        }
        router_backward_cpu(dlogits, dscale, &both, LOSSES);
        for (int b = 0; b < 2; b++) {
            const Router one = router_open(ROUTER_CHOSEN, 1, T, E, USED, logits + b * HALF);
            router_forward_cpu(&one);
            for (size_t i = 0; i < places(&one); i++) {
                dscale[one.rows[i]] = (float)(i + (size_t)b * places(&one)) / 64;
            }
            router_backward_cpu(apart + b * HALF, dscale, &one, LOSSES);
        }
        EXPECT(ops_same_bits(dlogits, apart, 2 * HALF), "%d threads", threads);
    }
    ops_close("micro-batches");
}

// A document has the same gradient and statistics alone and behind another one, before padding.
TEST(router_neighbors) {
    enum { T = 150, BEFORE = 40, OWN = 70, E = 8, USED = 2 };
    float *logits = ops_normal(T * E, 1), *dlogits = ops_floats(T * E), *alone = ops_floats(OWN * E);
    double sums[2][E + 1] = {{0}}, apart[E + 1] = {0};
    int starts[T] = {0}, lengths[2] = {BEFORE + OWN, BEFORE};
    for (int t = BEFORE; t < T; t++) {
        starts[t] = t < BEFORE + OWN ? BEFORE : t;
    }
    Router row = router_open(ROUTER_SIGMOID, 1, T, E, USED, logits);
    const Router one = router_open(ROUTER_SIGMOID, 1, OWN, E, USED, logits + BEFORE * E);
    float *dscale = ops_floats(rows_at_most(&row)), *dscale_one = ops_floats(rows_at_most(&one));
    router_forward_cpu(&row);
    router_forward_cpu(&one);
    for (int i = 0; i < OWN * USED; i++) {
        dscale[row.rows[BEFORE * USED + i]] = dscale_one[one.rows[i]] = (float)i / 64;
    }
    for (int i = 0; i < 2; i++) {
        row.counted = (Counted){&lengths[i], starts, NULL, {0, 0}};
        router_statistics_add_cpu(sums[i], &row);
    }
    row.counted.lengths = lengths;
    router_backward_cpu(dlogits, dscale, &row, LOSSES);
    router_backward_cpu(alone, dscale_one, &one, LOSSES);
    router_statistics_add_cpu(apart, &one);
    EXPECT(ops_same_bits(dlogits + BEFORE * E, alone, OWN * E), "gradients");
    for (int i = 0; i < (T - BEFORE - OWN) * E; i++) {
        EXPECT(dlogits[(BEFORE + OWN) * E + i] == 0, "padding %d: %g", i, dlogits[(BEFORE + OWN) * E + i]);
    }
    for (int e = 0; e <= E; e++) {
        EXPECT_NEAR(sums[0][e] - sums[1][e], apart[e], e < E ? 0 : 1e-4, "statistics, %d", e);
    }
    ops_close("neighbors");
}

// Ranks that divide sequences have the gradients and statistics of their tokens.
TEST(router_chunks) {
    enum { B = 2, T = 20, OWN = T / 2, E = 5, USED = 2 };
    const RouterLosses losses = {0, 0.1f, 0.25f};
    float *logits = ops_normal(B * T * E, 1), *dlogits = ops_floats(B * T * E);
    double whole[E + 1] = {0}, sum[E + 1] = {0};
    Router all = router_open(ROUTER_SOFTMAX, B, T, E, USED, logits);
    float* dscale = (float*)memset(ops_floats(rows_at_most(&all)), 0, rows_at_most(&all) * sizeof(float));
    all.counted = counted_ragged(B, T);
    router_forward_cpu(&all);
    router_backward_cpu(dlogits, dscale, &all, losses);
    router_statistics_add_cpu(whole, &all);
    for (int rank = 0; rank < 2; rank++) {
        float *own = ops_floats(B * OWN * E), *d = ops_floats(B * OWN * E);
        Router part = router_open(ROUTER_SOFTMAX, B, OWN, E, USED, own);
        part.counted = all.counted;
        part.counted.chunks = (TokenChunks){1, rank};
        for (int pass = 0; pass < 2; pass++) { // copies the logits, then compares the gradients
            for (int n = 0; n < B * OWN; n++) {
                const int from = n / OWN * T + token_chunks_position(part.counted.chunks, n % OWN, OWN);
                if (pass == 0) {
                    memcpy(own + n * E, logits + from * E, E * sizeof(float));
                }
                EXPECT(pass == 0 || ops_same_bits(d + n * E, dlogits + from * E, E), "token %d of rank %d", n,
                       rank);
            }
            router_forward_cpu(&part);
            router_backward_cpu(d, dscale, &part, losses);
        }
        router_statistics_add_cpu(sum, &part);
    }
    for (int e = 0; e <= E; e++) {
        EXPECT_NEAR(sum[e], whole[e], e < E ? 0 : 1e-5, "statistics, %d", e);
    }
    ops_close("chunks");
}

// ---- rows ----

static void test_experts(int T, int E, int used, int C, int F) {
    const size_t N = (size_t)T, c = (size_t)C, f = (size_t)F;
    const Router r = router_open(ROUTER_CHOSEN, 1, T, E, used, ops_normal(N * (size_t)E, 1));
    router_forward_cpu(&r);
    const size_t M = (size_t)r.first[E];
    float *inp = ops_normal(N * c, 1), *rows = ops_floats(M * c), *sum = ops_copy(inp, N * c),
          *fch = ops_normal(M * 2 * f, 2), *act = ops_floats(M * f), *dact = ops_normal(M * f, 1),
          *dfch = ops_floats(M * 2 * f), *dscale = ops_floats(M);
    experts_gather_cpu(rows, inp, &r, C);
    experts_sum_cpu(sum, rows, &r, C, GRADIENT_ADD);
    experts_activate_cpu(act, fch, &r, F, ACTIVATION_SWIGLU);
    experts_activate_backward_cpu(dfch, dscale, dact, fch, &r, F, ACTIVATION_SWIGLU);
    double *want = ops_doubles(f), *dwant = ops_doubles(2 * f), *scaled = ops_doubles(f),
           *all = ops_widen(fch, M * 2 * f), *dall = ops_widen(dact, M * f);
    for (size_t m = 0; m < M; m++) {
        const int place = r.order[m];
        double dot = 0, size = 1e-30;
        if (place < 0) {
            EXPECT(rows[m * c] == 0 && rows[m * c + c - 1] == 0 && act[m * f] == 0, "padding in row %zu", m);
            continue;
        }
        EXPECT(ops_same_bits(rows + m * c, inp + (size_t)(place / used) * c, c), "row %zu", m);
        const double *pre = all + m * 2 * f, *d = dall + m * f;
        ref_activation_forward(want, pre, 1, f, ACTIVATION_SWIGLU);
        memset(dwant, 0, 2 * f * sizeof(double));
        for (size_t i = 0; i < f; i++) {
            dot += d[i] * want[i];
            size += fabs(d[i] * want[i]);
            want[i] *= r.scale[m];
            scaled[i] = r.scale[m] * d[i];
        }
        ref_activation_backward(dwant, scaled, pre, 1, f, ACTIVATION_SWIGLU);
        EXPECT_NEAR(ops_error(act + m * f, want, NULL, f), 0, 8, "act of row %zu", m);
        EXPECT_NEAR(ops_error(dfch + m * 2 * f, dwant, NULL, 2 * f), 0, 16, "dfch of row %zu", m);
        EXPECT_NEAR(dscale[m], dot, (8 + f) * FLT_EPSILON * size, "dscale of row %zu", m);
    }
    for (size_t i = 0; i < N * c; i++) { // each row is the token
        EXPECT_NEAR(sum[i], (1 + used) * (double)inp[i], (1 + used) * FLT_EPSILON * fabs(inp[i]), "sum %zu",
                    i);
    }
    experts_sum_cpu(sum, rows, &r, C, GRADIENT_SET);
    for (size_t i = 0; i < N * c && used == 1; i++) {
        EXPECT(sum[i] == inp[i], "the only row of token %zu", i / c);
    }
    ops_close("experts");
}

// Biases against plain loops, with experts without rows, set and added to; any number of threads
// gives the same bits.
static void test_biases(int T, int E, int used, int C, GradientMode mode) {
    const size_t N = (size_t)T, c = (size_t)C, all = (size_t)E * c;
    float* logits = ops_normal(N * (size_t)E, 1);
    for (int n = 0; n < T; n++) {
        logits[n * E] = -9;
    }
    const Router r = router_open(ROUTER_CHOSEN, 1, T, E, used, logits);
    router_forward_cpu(&r);
    const size_t M = (size_t)r.first[E];
    float *bias = ops_normal(all, 1), *rows = ops_normal(M * c, 1), *out = ops_copy(rows, M * c),
          *dbias = ops_normal(all, 1), *first = ops_copy(dbias, all), *again = ops_copy(dbias, all),
          *dscale = ops_normal(M, 1), *scales = ops_copy(dscale, M);
    double* want = ops_doubles(all);
    experts_bias_cpu(out, bias, &r, C);
    threads_set(1);
    experts_bias_backward_cpu(again, ops_copy(dscale, M), rows, bias, &r, C, mode);
    threads_set(3);
    experts_bias_backward_cpu(dbias, dscale, rows, bias, &r, C, mode);
    EXPECT(ops_same_bits(dbias, again, all), "threads change the bits");
    for (size_t i = 0; i < N * (size_t)used; i++) {
        const size_t m = (size_t)r.rows[i], e = (size_t)r.chosen[i];
        double dot = scales[m], size = fabs(dot);
        for (size_t j = 0; j < c; j++) {
            const float b = bias[e * c + j], x = rows[m * c + j];
            EXPECT_NEAR(out[m * c + j], x + (double)r.scale[m] * b, 2 * FLT_EPSILON * (fabsf(x) + fabsf(b)),
                        "row %zu", m);
            want[e * c + j] += (double)r.scale[m] * x;
            dot += (double)b * x, size += fabs((double)b * x);
        }
        EXPECT_NEAR(dscale[m], dot, (8 + c) * FLT_EPSILON * size, "dscale of row %zu", m);
    }
    for (size_t i = 0; i < all; i++) {
        EXPECT_NEAR(dbias[i], want[i] + (mode == GRADIENT_ADD ? first[i] : 0), (8 + N) * FLT_EPSILON * 8,
                    "dbias %zu", i);
    }
    ops_close("biases");
}

TEST(expert_biases) {
    vec_flush_denormals();
    test_biases(1, 2, 1, 1, GRADIENT_SET);
    test_biases(31, 5, 2, 33, GRADIENT_ADD);
    test_biases(70, 4, 3, 130, GRADIENT_SET);
}

TEST(experts) {
    vec_flush_denormals();
    test_experts(1, 1, 1, 1, 1);
    test_experts(31, 3, 2, 33, 70);
    test_experts(33, 5, 1, 7, 31);
    test_experts(70, 4, 4, 64, 32);
}
