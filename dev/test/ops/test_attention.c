// test_attention.c -- causal attention: both passes at awkward sizes, documents, causality,
// decoding, huge scores.
#include "llmc/ops/attention.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

// Inputs, and the results of the code under test.
typedef struct {
    int B, T, NH, HS;
    const int* starts;
    float *qkv, *dout, *out, *lse, *dqkv;
} Run;

static Run run_open(int B, int T, int NH, int HS, const int* starts, float* qkv, float* dout) {
    const size_t n = (size_t)B * T * NH * HS;
    const Run r = {
        B, T, NH, HS, starts, qkv, dout, ops_floats(n), ops_floats((size_t)B * NH * T), ops_floats(3 * n)};
    return r;
}

static Run run_documents(int B, int T, int NH, int HS, const int* starts, float* qkv, float* dout,
                         AttentionScratch* scratch) {
    const Run r = run_open(B, T, NH, HS, starts, qkv, dout);
    const AttentionSizes sizes = {.B = B, .T = T, .C = NH * HS, .NH = NH};
    attention_forward_cpu(r.out, r.lse, qkv, starts, sizes, scratch);
    attention_backward_cpu(r.dqkv, dout, qkv, r.out, r.lse, starts, sizes, scratch);
    return r;
}

static Run run(int B, int T, int NH, int HS, float* qkv, float* dout, AttentionScratch* scratch) {
    return run_documents(B, T, NH, HS, NULL, qkv, dout, scratch);
}

static void expect_same(const Run* a, const Run* b, const char* what) {
    const size_t n = (size_t)a->B * a->T * a->NH * a->HS;
    EXPECT(ops_same_bits(a->out, b->out, n), "out of %d x %d x %d x %d, %s", a->B, a->T, a->NH, a->HS, what);
    EXPECT(ops_same_bits(a->lse, b->lse, (size_t)a->B * a->NH * a->T), "lse of %d x %d x %d x %d, %s", a->B,
           a->T, a->NH, a->HS, what);
    EXPECT(ops_same_bits(a->dqkv, b->dqkv, 3 * n), "dqkv of %d x %d x %d x %d, %s", a->B, a->T, a->NH, a->HS,
           what);
}

// A score of normal q and k is a sum of HS terms of about 1 / sqrt(HS) each: its roundings, half an
// epsilon of up to sqrt(HS) together, become relative errors of the probabilities, and these of
// everything. So does e^x, exact to 2e-7. Differences are measured against the largest element.
// `spread` multiplies the scores and their errors.
static double limit(int HS, double spread) { return 8 + 2 * sqrt(HS) * spread; }

static void check_documents(int B, int T, int NH, int HS, const int* starts, float spread) {
    const size_t n = (size_t)B * T * NH * HS;
    const int C = NH * HS;
    float *qkv = ops_normal(3 * n, 1), *dout = ops_normal(n, 1);
    for (size_t i = 0; i < 3 * n; i++) {
        qkv[i] *= i / C % 3 == 0 ? spread : 1; // q
    }
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, T, HS);
    const Run r = run_documents(B, T, NH, HS, starts, qkv, dout, &scratch);
    memory_close(&memory);
    const double* wide = ops_widen(qkv, 3 * n);
    double *out = ops_doubles(n), *lse = ops_doubles((size_t)B * NH * T), *dqkv = ops_doubles(3 * n);
    ref_attention_forward(out, lse, wide, starts, 0, B, T, NH, NH, C / NH);
    ref_attention_backward(dqkv, ops_widen(dout, n), wide, out, lse, starts, 0, B, T, NH, NH, C / NH);
    EXPECT_NEAR(ops_error(r.out, out, NULL, n), 0, limit(HS, spread), "out of %d x %d x %d x %d", B, T, NH,
                HS);
    EXPECT_NEAR(ops_error(r.lse, lse, NULL, (size_t)B * NH * T), 0, limit(HS, 1), "lse of %d x %d x %d x %d",
                B, T, NH, HS);
    EXPECT_NEAR(ops_error(r.dqkv, dqkv, NULL, 3 * n), 0, limit(HS, spread), "dqkv of %d x %d x %d x %d", B, T,
                NH, HS);
    ops_close("sizes");
}

static void check(int B, int T, int NH, int HS, float spread) { check_documents(B, T, NH, HS, NULL, spread); }

TEST(sizes) {
    const int T[] = {1, 31, 33}, HS[] = {1, 12, 64, 80};
    for (int i = 0; i < 12; i++) {
        check(1 + i % 2, T[i % 3], 1 + i % 3, HS[i % 4], 1);
    }
    // every end of a tile and of a block of queries
    for (int t = 1; t <= ATTENTION_SQUARE + MATMUL_TILE_ROWS + 1; t++) {
        check(1, t, 1, 3, 1);
    }
    for (int d = 1; d <= 2 * MATMUL_TILE_COLS + 1; d++) {
        check(1, 7, 1 + d % 2, d, 1);
    }
    check(1, ATTENTION_KEYS - 1, 1, 5, 1);
    check(1, ATTENTION_KEYS, 1, 1, 1);
    check(1, ATTENTION_KEYS + 1, 1, 64, 1);
    check(1, 700, 2, 12, 1);
    check(1, 3, 1, 300, 1); // a large head
}

// (B, T) of documents of 1 ... longest tokens; `longest` 0: one document a row.
static int* documents(int B, int T, int longest) {
    int *starts = ops_below((size_t)B * T, longest > 0 ? longest : 1), start = 0;
    for (int n = 0; n < B * T; n++) {
        const int t = n % T;
        if (t == 0 || (longest > 0 && starts[n] == 0)) { // on average after `longest` tokens
            start = t;
        }
        starts[n] = start;
    }
    return starts;
}

// (1, T): a new document at each of the places, which end with 0.
static int* documents_at(int T, const int* places) {
    int* starts = ops_below(T, 1);
    for (; *places; places++) {
        for (int t = *places; t < T; t++) {
            starts[t] = *places;
        }
    }
    return starts;
}

// Documents of all lengths; at the ends of tiles, blocks and steps of keys that are skipped, and
// beside them.
TEST(documents) {
    const int T[] = {1, 31, 33, 100, 257}, longest[] = {1, 2, 9, 60};
    for (int i = 0; i < 20; i++) {
        check_documents(1 + i % 2, T[i % 5], 1 + i % 3, 3 + 9 * (i % 2),
                        documents(1 + i % 2, T[i % 5], longest[i % 4]), 1);
    }
    const int ends[] = {MATMUL_TILE_ROWS, LANES,          MATMUL_TILE_COLS,
                        ATTENTION_SQUARE, ATTENTION_SKIP, 2 * ATTENTION_SKIP};
    for (int i = 0; i < 18; i++) {
        const int end = ends[i / 3] + i % 3 - 1, places[] = {end, 0};
        check_documents(1, ends[i / 3] + ATTENTION_SQUARE + 5, 1, 5,
                        documents_at(ends[i / 3] + ATTENTION_SQUARE + 5, places), 1);
    }
    const int far[] = {ATTENTION_KEYS - 1, ATTENTION_KEYS + ATTENTION_SKIP, 0},
              after[] = {ATTENTION_SKIP + 1, 0};
    check_documents(1, ATTENTION_KEYS + 2 * ATTENTION_SKIP, 1, 12,
                    documents_at(ATTENTION_KEYS + 2 * ATTENTION_SKIP, far), 1);
    check_documents(1, ATTENTION_KEYS + 30, 1, 12, documents_at(ATTENTION_KEYS + 30, after), 1);
    check_documents(1, 80, 1, 12, documents(1, 80, 9), 1e4f);
}

// A row of one document is what it is without starts, and what happens in a document changes no bit
// of another.
TEST(documents_apart) {
    enum { T = 300, NH = 2, HS = 12, C = NH * HS };
    const int places[] = {40, 41, 150, 0};
    const int* starts = documents_at(T, places);
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, T, HS);
    float *qkv = ops_normal(T * 3 * C, 1), *dout = ops_normal(T * C, 1);
    const Run one = run_documents(1, T, NH, HS, documents(1, T, 0), qkv, dout, &scratch),
              plain = run(1, T, NH, HS, qkv, dout, &scratch);
    expect_same(&one, &plain, "starts all 0");
    float *changed = ops_normal(T * 3 * C, 30), *changed_dout = ops_normal(T * C, 30);
    memcpy(changed + 41 * 3 * C, qkv + 41 * 3 * C, (150 - 41) * 3 * C * sizeof(float));
    memcpy(changed_dout + 41 * C, dout + 41 * C, (150 - 41) * C * sizeof(float));
    const Run a = run_documents(1, T, NH, HS, starts, qkv, dout, &scratch),
              b = run_documents(1, T, NH, HS, starts, changed, changed_dout, &scratch);
    EXPECT(ops_same_bits(a.out + 41 * C, b.out + 41 * C, (150 - 41) * C), "out");
    EXPECT(ops_same_bits(a.dqkv + 41 * 3 * C, b.dqkv + 41 * 3 * C, (150 - 41) * 3 * C), "dqkv");
    memory_close(&memory);
    ops_close("documents apart");
}

// Scores of about 1e4, for which exp() would overflow: hardly more than one key in a row keeps a
// probability. Where two are close, the rounding of the scores decides between them, as `limit`
// allows for.
TEST(huge_scores) {
    check(2, 33, 2, 12, 1e4f);
    check(1, 100, 1, 1, 1e4f);
}

// A token sees itself and the earlier ones: others do not change one bit of its results, and a
// gradient that enters at a token reaches nothing later.
TEST(causality) {
    enum { T = 70, NH = 2, HS = 12, C = NH * HS };
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, T, HS);
    for (int t = 0; t < T; t += 3) {
        float *qkv = ops_normal(T * 3 * C, 1), *changed = ops_normal(T * 3 * C, 30),
              *dout = ops_normal(T * C, 0);
        memcpy(changed, qkv, (t + 1) * 3 * C * sizeof(float));
        dout[t * C] = 1;
        const Run a = run(1, T, NH, HS, qkv, dout, &scratch), b = run(1, T, NH, HS, changed, dout, &scratch);
        EXPECT(ops_same_bits(a.out, b.out, (t + 1) * C), "tokens after %d changed an output up to it", t);
        for (int h = 0; h < NH; h++) {
            EXPECT(ops_same_bits(a.lse + h * T, b.lse + h * T, t + 1), "tokens after %d changed lse up to it",
                   t);
        }
        for (int i = (t + 1) * 3 * C; i < T * 3 * C; i++) {
            EXPECT(a.dqkv[i] == 0, "a gradient at token %d reaches token %d", t, i / (3 * C));
        }
        ops_close("causality");
    }
    memory_close(&memory);
}

// Texts of different lengths: a query over stored keys and values is the last row of the whole
// text's attention. Only the text's own room is written.
static void test_cached(int HS) {
    enum { TEXTS = 4, MAX_T = 50, NH = 2 };
    const int lengths[TEXTS] = {1, 16, 33, MAX_T}, C = NH * HS;
    const size_t room = (size_t)2 * C * MAX_T;
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, MAX_T, HS);
    const AttentionCache cache = {ops_floats(TEXTS * room), MAX_T, C, NH};
    float *last = ops_floats((size_t)TEXTS * 3 * C), *out = ops_floats((size_t)TEXTS * C);
    int positions[TEXTS];
    Run want[TEXTS];
    for (int b = 0; b < TEXTS; b++) {
        const int T = lengths[b];
        float *qkv = ops_normal((size_t)T * 3 * C, 1), *dout = ops_normal((size_t)T * C, 1);
        positions[b] = T - 1;
        attention_cache_store_cpu(cache, qkv, b, 0, T - 1);
        attention_cache_store_cpu(cache, qkv + (size_t)(T - 1) * 3 * C, b, T - 1, 1);
        memcpy(last + b * 3 * C, qkv + (size_t)(T - 1) * 3 * C, (size_t)3 * C * sizeof(float));
        want[b] = run(1, T, NH, HS, qkv, dout, &scratch);
    }
    attention_cached_cpu(out, last, positions, TEXTS, cache, &scratch);
    for (int b = 0; b < TEXTS; b++) {
        for (int c = 0; c < C; c++) {
            EXPECT_NEAR(out[b * C + c], want[b].out[(size_t)positions[b] * C + c], 2e-6,
                        "text %d, column %d, heads of %d", b, c, HS);
        }
        for (size_t i = 0; i < room; i++) {
            EXPECT(isnan(cache.data[b * room + i]) == ((int)(i / HS % MAX_T) >= lengths[b]),
                   "text %d, element %zu", b, i);
        }
    }
    ops_close("cached");
    memory_close(&memory);
}

// Scratch for longer sequences does as well, whatever they left in it.
TEST(scratch) {
    enum { T = 33, LONG = 2 * ATTENTION_KEYS, NH = 2, HS = 12, C = NH * HS };
    AttentionScratch small, large;
    threads_set(1); // one thread's scratch, used by all heads
    Memory memory = memory_on_host();
    attention_open(&small, &memory, T, HS);
    attention_open(&large, &memory, LONG, HS);
    float *qkv = ops_normal(T * 3 * C, 1), *dout = ops_normal(T * C, 1);
    const Run fits = run(1, T, NH, HS, qkv, dout, &small), fresh = run(1, T, NH, HS, qkv, dout, &large);
    // NaN everywhere
    run(3, LONG, NH, HS, ops_floats(3 * LONG * 3 * C), ops_floats(3 * LONG * C), &large);
    const Run used = run(1, T, NH, HS, qkv, dout, &large);
    expect_same(&fits, &fresh, "in larger scratch");
    expect_same(&fits, &used, "in scratch full of NaN");
    ops_close("scratch");
    memory_close(&memory);
    threads_set(3);
}

TEST(threads) {
    enum { B = 4, T = 250, NH = 8, HS = 32, C = NH * HS }; // long enough for the threads to meet
    AttentionScratch scratch;
    threads_set(3); // the most below
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, T, HS);
    float *qkv = ops_normal(B * T * 3 * C, 1), *dout = ops_normal(B * T * C, 1);
    Run r[4];
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        r[t] = run(B, T, NH, HS, qkv, dout, &scratch);
        expect_same(&r[t], &r[1], t == 2 ? "2 threads" : "3 threads");
    }
    ops_close("threads");
    memory_close(&memory);
}

TEST(cached) {
    threads_set(3);
    test_cached(12);
    test_cached(40);
    test_cached(5);
}
