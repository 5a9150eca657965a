// test_attention.c -- causal attention: both passes at awkward sizes, documents, causality,
// decoding, huge scores, capped ones, sinks, dropout, sequences divided among ranks.
#include "llmc/ops/attention.h"
#include "llmc/ops/sinks.h"
#include "llmc/reference.h"
#include "dev/test/lib/attention_ranks.h"
#include "dev/test/lib/ops.h"

// Inputs, and the results of the code under test.
typedef struct {
    AttentionSizes sizes;
    const int* starts;
    float *qkv, *dout, *out, *lse, *dqkv;
} Run;

// Elements of out, lse and qkv.
static size_t outs(AttentionSizes s) { return (size_t)s.B * s.T * attention_queries_size(s); }
static size_t lses(AttentionSizes s) { return (size_t)s.B * s.NH * s.T; }
static size_t qkvs(AttentionSizes s) { return (size_t)s.B * s.T * attention_qkv_size(s); }

static Run run_documents(AttentionSizes sizes, const int* starts, float* qkv, float* dout,
                         AttentionScratch* scratch) {
    const Run r = {
        sizes, starts, qkv, dout, ops_floats(outs(sizes)), ops_floats(lses(sizes)), ops_floats(qkvs(sizes))};
    const AttentionPass pass = {sizes, starts, qkv, NULL, r.out, r.lse, NULL, NULL};
    attention_forward_cpu(&pass, scratch);
    attention_backward_cpu(&(AttentionGradients){dout, r.dqkv, NULL}, &pass, scratch);
    return r;
}

static Run run(int B, int T, int NH, int HS, float* qkv, float* dout, AttentionScratch* scratch) {
    return run_documents(attention_sizes(B, T, NH, NH, HS), NULL, qkv, dout, scratch);
}

static void expect_same(const Run* a, const Run* b, const char* what) {
    const AttentionSizes s = a->sizes;
    EXPECT(ops_same_bits(a->out, b->out, outs(s)), "out of %d x %d x %d/%d x %d, %s", s.B, s.T, s.NH, s.KV,
           s.HS, what);
    EXPECT(ops_same_bits(a->lse, b->lse, lses(s)), "lse of %d x %d x %d/%d x %d, %s", s.B, s.T, s.NH, s.KV,
           s.HS, what);
    EXPECT(ops_same_bits(a->dqkv, b->dqkv, qkvs(s)), "dqkv of %d x %d x %d/%d x %d, %s", s.B, s.T, s.NH, s.KV,
           s.HS, what);
}

// A score of normal q and k is a sum of HS terms of about 1 / sqrt(HS) each: its roundings, half an
// epsilon of up to sqrt(HS) together, become relative errors of the probabilities, and these of
// everything. So does e^x, exact to 2e-7. Differences are measured against the largest element.
// `spread` multiplies the scores and their errors. A capped score is wrong by some roundings of the
// cap.
static double limit(int HS, double spread, double cap) { return 8 + 2 * sqrt(HS) * spread + 4 * cap; }

static RefHeads ref_heads(AttentionSizes s) {
    return (RefHeads){s.B, s.T, s.NH, s.KV, s.HS, 0, 1.0 / s.root, s.cap};
}

static void check_sizes(AttentionSizes s, const int* starts, float spread) {
    const int QKV = attention_qkv_size(s), Q = attention_queries_size(s);
    float *qkv = ops_normal(qkvs(s), 1), *dout = ops_normal(outs(s), 1);
    for (size_t i = 0; i < qkvs(s); i++) {
        qkv[i] *= (int)(i % QKV) < Q ? spread : 1;
    }
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, s.T, s.HS);
    const Run r = run_documents(s, starts, qkv, dout, &scratch);
    memory_close(&memory);
    const double* wide = ops_widen(qkv, qkvs(s));
    double *out = ops_doubles(outs(s)), *lse = ops_doubles(lses(s)), *dqkv = ops_doubles(qkvs(s));
    ref_attention_forward(out, lse, wide, starts, ref_heads(s));
    ref_attention_backward(dqkv, NULL, ops_widen(dout, outs(s)), wide, out, lse, starts, ref_heads(s));
    EXPECT_NEAR(ops_error(r.out, out, NULL, outs(s)), 0, limit(s.HS, spread, s.cap),
                "out of %d x %d x %d/%d x %d", s.B, s.T, s.NH, s.KV, s.HS);
    double *lse_sizes = ops_doubles(lses(s)), largest = 0;
    for (size_t i = 0; i < lses(s); i++) {
        largest = fmax(largest, fabs(lse[i]));
    }
    for (size_t i = 0; i < lses(s); i++) {
        lse_sizes[i] = largest + s.cap;
    }
    EXPECT_NEAR(ops_error(r.lse, lse, lse_sizes, lses(s)), 0, limit(s.HS, s.cap > 0 ? spread : 1, 0),
                "lse of %d x %d x %d/%d x %d", s.B, s.T, s.NH, s.KV, s.HS);
    EXPECT_NEAR(ops_error(r.dqkv, dqkv, NULL, qkvs(s)), 0, limit(s.HS, spread, s.cap),
                "dqkv of %d x %d x %d/%d x %d", s.B, s.T, s.NH, s.KV, s.HS);
    ops_close("sizes");
}

// Both passes with sinks below the scores, among them and above them.
static void check_sinks(AttentionSizes s, const int* starts) {
    float *qkv = ops_normal(qkvs(s), 1), *dout = ops_normal(outs(s), 1), *sinks = ops_normal((size_t)s.NH, 4),
          *dsinks = ops_normal((size_t)s.NH, 1);
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, s.T, s.HS);
    const Run r = {s, starts, qkv, dout, ops_floats(outs(s)), ops_floats(lses(s)), ops_floats(qkvs(s))};
    const AttentionPass pass = {s, starts, qkv, NULL, r.out, r.lse, NULL, NULL};
    const double *wide = ops_widen(qkv, qkvs(s)), *wide_dout = ops_widen(dout, outs(s)),
                 *wide_sinks = ops_widen(sinks, (size_t)s.NH);
    double *out = ops_doubles(outs(s)), *lse = ops_doubles(lses(s)), *dqkv = ops_doubles(qkvs(s)),
           *wanted = ops_widen(dsinks, (size_t)s.NH);
    RefHeads heads = ref_heads(s);
    heads.sinks = wide_sinks;
    ref_attention_forward(out, lse, wide, starts, heads);
    ref_attention_backward(dqkv, wanted, wide_dout, wide, out, lse, starts, heads);

    attention_forward_cpu(&pass, &scratch);
    sinks_forward_cpu(r.out, r.lse, sinks, s);
    sinks_backward_cpu(dsinks, dout, r.out, r.lse, sinks, s, GRADIENT_ADD);
    attention_backward_cpu(&(AttentionGradients){dout, r.dqkv, NULL}, &pass, &scratch);
    EXPECT_NEAR(ops_error(r.out, out, NULL, outs(s)), 0, limit(s.HS, 1, 0), "out");
    EXPECT_NEAR(ops_error(r.dqkv, dqkv, NULL, qkvs(s)), 0, limit(s.HS, 1, 0), "dqkv");
    EXPECT_NEAR(ops_error(dsinks, wanted, NULL, (size_t)s.NH), 0, limit(s.HS, 1, 0), "dsinks");
    memory_close(&memory);
    ops_close("sinks");
}

TEST(sinks) {
    static const int starts[] = {0, 0, 0, 3, 3, 3, 3, 7, 7, 0, 1, 1, 1, 1, 5, 5, 5, 8};
    check_sinks(attention_sizes(2, 9, 4, 2, 12), starts);
    check_sinks(attention_sizes(1, 131, 3, 3, 64), NULL);
}

// Both passes with dropout of the weights, of the rows and heads of a larger batch and model.
static void check_dropout(AttentionSizes s, const int* starts) {
    const DropoutBatch batch = {dropout_key(1, 2), 3, 1};
    const int l = 2, first_head = 4;
    float *qkv = ops_normal(qkvs(s), 1), *dout = ops_normal(outs(s), 1);
    const Run r = {s, starts, qkv, dout, ops_floats(outs(s)), ops_floats(lses(s)), ops_floats(qkvs(s))};
    const AttentionPass pass = {s,
                                starts,
                                qkv,
                                NULL,
                                r.out,
                                r.lse,
                                NULL,
                                NULL,
                                dropout_open(&batch, 0.3f, dropout_of_head(l, first_head), s.chunks, s.T, 0)};
    double *drop = ops_doubles(lses(s) * s.T), *out = ops_doubles(outs(s)), *lse = ops_doubles(lses(s)),
           *dqkv = ops_doubles(qkvs(s));
    for (size_t i = 0; i < lses(s) * s.T; i++) { // (B, NH, T, T)
        const int u = (int)(i % s.T), t = (int)(i / s.T % s.T), b = (int)(i / s.T / s.T / s.NH),
                  h = (int)(i / s.T / s.T % s.NH);
        const uint64_t place = (uint64_t)dropout_of_head(l, first_head + h) << 32;
        const RandBlock random = rand_block(batch.key, place | (uint64_t)(3 + b), (uint64_t)t << 32 | u / 4);
        drop[i] = random.word[u % 4] < pass.dropout.threshold ? 0 : 1 / (1 - 0.3f);
    }
    RefHeads heads = ref_heads(s);
    heads.drop = drop;
    const double* wide = ops_widen(qkv, qkvs(s));
    ref_attention_forward(out, lse, wide, starts, heads);
    ref_attention_backward(dqkv, NULL, ops_widen(dout, outs(s)), wide, out, lse, starts, heads);

    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, s.T, s.HS);
    attention_forward_cpu(&pass, &scratch);
    attention_backward_cpu(&(AttentionGradients){dout, r.dqkv, NULL}, &pass, &scratch);
    EXPECT_NEAR(ops_error(r.out, out, NULL, outs(s)), 0, limit(s.HS, 1, s.cap), "out");
    EXPECT_NEAR(ops_error(r.dqkv, dqkv, NULL, qkvs(s)), 0, limit(s.HS, 1, s.cap), "dqkv");
    memory_close(&memory);
    ops_close("dropout");
}

TEST(dropout) {
    static const int starts[] = {0, 0, 0, 3, 3, 3, 3, 7, 7, 0, 1, 1, 1, 1, 5, 5, 5, 8};
    AttentionSizes capped = attention_sizes(1, 40, 2, 1, 12);
    capped.cap = 2;
    check_dropout(attention_sizes(2, 9, 4, 2, 12), starts);
    check_dropout(capped, NULL);
    check_dropout(attention_sizes(2, ATTENTION_SQUARE + 31, 3, 3, 16), NULL);
    check_dropout(attention_sizes(1, ATTENTION_KEYS + 50, 1, 1, 8), NULL);
}

static void check_documents(int B, int T, int NH, int HS, const int* starts, float spread) {
    check_sizes(attention_sizes(B, T, NH, NH, HS), starts, spread);
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
    const AttentionSizes sizes = attention_sizes(1, T, NH, NH, HS);
    const Run one = run_documents(sizes, documents(1, T, 0), qkv, dout, &scratch),
              plain = run(1, T, NH, HS, qkv, dout, &scratch);
    expect_same(&one, &plain, "starts all 0");
    float *changed = ops_normal(T * 3 * C, 30), *changed_dout = ops_normal(T * C, 30);
    memcpy(changed + 41 * 3 * C, qkv + 41 * 3 * C, (150 - 41) * 3 * C * sizeof(float));
    memcpy(changed_dout + 41 * C, dout + 41 * C, (150 - 41) * C * sizeof(float));
    const Run a = run_documents(sizes, starts, qkv, dout, &scratch),
              b = run_documents(sizes, starts, changed, changed_dout, &scratch);
    EXPECT(ops_same_bits(a.out + 41 * C, b.out + 41 * C, (150 - 41) * C), "out");
    EXPECT(ops_same_bits(a.dqkv + 41 * 3 * C, b.dqkv + 41 * 3 * C, (150 - 41) * 3 * C), "dqkv");
    memory_close(&memory);
    ops_close("documents apart");
}

// Scores of about 1e4, for which exp() would overflow: hardly more than one key in a row keeps a
// probability. Where two are close, the rounding of the scores decides between them, as `limit`
// allows for.
// The largest score of each head of `in`, of tokens that are no padding, by plain loops.
static double plain_largest(const Run* in, const int* lengths, int h) {
    const AttentionSizes s = in->sizes;
    const size_t row = (size_t)attention_qkv_size(s),
                 key = (size_t)(attention_queries_size(s) + h / attention_group(s) * s.HS);
    double largest = 0;
    for (int b = 0; b < s.B; b++) {
        for (int t = 0; t < lengths[b]; t++) {
            for (int u = in->starts ? in->starts[b * s.T + t] : 0; u <= t; u++) {
                const float *q = in->qkv + (size_t)(b * s.T + t) * row + h * s.HS,
                            *k = in->qkv + (size_t)(b * s.T + u) * row + key;
                double score = 0;
                for (int d = 0; d < s.HS; d++) {
                    score += (double)q[d] * k[d];
                }
                largest = fmax(largest, score / (double)s.root);
            }
        }
    }
    return largest;
}

// Padding, whose scores are the largest, does not count, nor do other documents; a number that is
// larger already stays.
TEST(largest_scores) {
    const int sizes[][5] = {{2, 33, 4, 2, 8}, {1, 1, 1, 1, 16}, {3, 131, 6, 2, 40}};
    for (int i = 0; i < 6; i++) {
        const int* n = sizes[i / 2];
        const AttentionSizes s = attention_sizes(n[0], n[1], n[2], n[3], n[4]);
        const int lengths[3] = {int_max(1, s.T - 5), s.T, int_max(1, s.T / 2)};
        Run r = {s,
                 i % 2 ? documents(s.B, s.T, 12) : NULL,
                 ops_normal(qkvs(s), 1),
                 NULL,
                 ops_floats(outs(s)),
                 ops_floats(lses(s)),
                 NULL};
        double largest[6] = {0, 0, 0, 0, 0, 1e6};
        AttentionScratch scratch;
        Memory memory = memory_on_host();
        for (size_t k = (size_t)lengths[0]; k < (size_t)s.T * (size_t)attention_qkv_size(s); k++) {
            r.qkv[k] *= k / (size_t)attention_qkv_size(s) >= (size_t)lengths[0] ? 9 : 1;
        }
        attention_open(&scratch, &memory, s.T, s.HS);
        const AttentionPass pass = {s, r.starts, r.qkv, NULL, r.out, r.lse, lengths, largest};
        attention_forward_cpu(&pass, &scratch);
        for (int h = 0; h < s.NH; h++) {
            const double want = h == 5 ? 1e6 : plain_largest(&r, lengths, h);
            EXPECT_NEAR(largest[h], want, 1e-6 * (want + 1), "head %d of %d, case %d", h, s.NH, i);
        }
        memory_close(&memory);
        ops_close("largest scores");
    }
}

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

// (B, T): each token sees `window` tokens, up to itself.
static int* windows(int B, int T, int window) {
    int* starts = ops_below((size_t)B * T, 1);
    for (int n = 0; n < B * T; n++) {
        starts[n] = n % T >= window ? n % T - window + 1 : 0;
    }
    return starts;
}

// Heads of queries that share keys: fewer and more columns of queries than GPT-2 has for as many
// channels, documents, windows.
TEST(groups) {
    const int HS[] = {8, 32, 48, 64, 80, 128}, T[] = {1, 31, 33, 100},
              heads[][2] = {{4, 1}, {6, 2}, {3, 3}, {3, 1}}, window[] = {1, 7, 100};
    for (int i = 0; i < 24; i++) {
        const int B = 1 + i % 2, t = T[i / 6], *group = heads[(i + i / 6) % 4];
        const AttentionSizes sizes = attention_sizes(B, t, group[0], group[1], HS[i % 6]);
        check_sizes(sizes, NULL, 1);
        check_sizes(sizes, windows(B, t, window[i % 3]), 1);
    }
    check_sizes(attention_sizes(2, 257, 6, 2, 12), documents(2, 257, 60), 1);
    check_sizes(attention_sizes(1, ATTENTION_KEYS + 1, 4, 2, 5), NULL, 1);
}

// Scores divided by something else: twice the root is half the query.
TEST(root) {
    const AttentionSizes one = attention_sizes(1, 40, 4, 2, 12);
    AttentionSizes twice = one;
    twice.root *= 2;
    float *qkv = ops_normal(qkvs(one), 1), *half = ops_copy(qkv, qkvs(one)), *dout = ops_normal(outs(one), 1);
    for (size_t i = 0; i < qkvs(one); i++) {
        half[i] *= (int)(i % attention_qkv_size(one)) < attention_queries_size(one) ? 0.5f : 1;
    }
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, one.T, one.HS);
    const Run a = run_documents(twice, NULL, qkv, dout, &scratch),
              b = run_documents(one, NULL, half, dout, &scratch);
    for (size_t i = 0; i < qkvs(one); i++) { // dq is the gradient of the half
        b.dqkv[i] *= (int)(i % attention_qkv_size(one)) < attention_queries_size(one) ? 0.5f : 1;
    }
    expect_same(&a, &b, "twice the root");
    memory_close(&memory);
    ops_close("root");
}

static AttentionSizes capped(AttentionSizes sizes, float cap) {
    sizes.cap = cap;
    return sizes;
}

// Scores that the cap hardly changes, and those far above it; another scale; documents, windows,
// grouped keys, heads of 256.
TEST(caps) {
    const float caps[] = {50, 3, 0.5f}, spreads[] = {1, 4, 30};
    const int HS[] = {12, 64, 80, 256}, T[] = {1, 31, 33, 100};
    for (int i = 0; i < 12; i++) {
        AttentionSizes s = capped(attention_sizes(1 + i % 2, T[i % 4], 4, 1 + i % 2, HS[i / 3]), caps[i % 3]);
        s.root = i % 4 == 3 ? 12 : s.root; // 144^(1/2)
        for (int k = 0; k < 3; k++) {
            check_sizes(s, NULL, spreads[k]);
            check_sizes(s, documents(s.B, s.T, 9), spreads[k]);
            check_sizes(s, windows(s.B, s.T, 7), spreads[k]);
        }
    }
    check_sizes(capped(attention_sizes(1, ATTENTION_KEYS + 33, 2, 1, 12), 5), NULL, 3);
    check_sizes(attention_sizes(1, 130, 4, 1, 256), windows(1, 130, 50), 1);
}

// The backward pass has the same bits whether it is divided or not: 1 thread does not divide it, 3
// divide 2 groups, and 8 do so even with 4 heads of GPT-2.
TEST(divided) {
    const AttentionSizes sizes[] = {attention_sizes(1, 300, 4, 2, 12), attention_sizes(2, 250, 6, 1, 33),
                                    capped(attention_sizes(1, 97, 4, 4, 16), 1),
                                    attention_sizes(1, 31, 4, 1, 8)};
    const int threads[] = {1, 3, 8};
    EXPECT(attention_backward_divides(2, 3) && attention_backward_divides(4, 8), "not divided");
    for (int i = 0; i < 8; i++) {
        const AttentionSizes s = sizes[i / 2];
        const int* starts = i % 2 ? documents(s.B, s.T, 120) : NULL;
        float *qkv = ops_normal(qkvs(s), 1), *dout = ops_normal(outs(s), 1);
        Run r[3];
        for (int t = 0; t < 3; t++) {
            AttentionScratch scratch;
            Memory memory = memory_on_host();
            threads_set(threads[t]);
            attention_open(&scratch, &memory, s.T, s.HS);
            r[t] = run_documents(s, starts, qkv, dout, &scratch);
            expect_same(&r[t], &r[0], t == 1 ? "3 threads" : "8 threads");
            memory_close(&memory);
        }
        ops_close("divided");
    }
    threads_set(3);
}

static AttentionResults run_either(AttentionSizes s, AttentionInputs in, const void* scratch) {
    AttentionScratch* a = (AttentionScratch*)scratch;
    const AttentionResults r = {ops_floats(outs(s)), ops_floats(lses(s)), ops_floats(qkvs(s)),
                                ops_floats((size_t)s.B * attention_keys(s) * 2 * attention_keys_size(s))};
    const AttentionPass pass = {s, in.starts, in.qkv, in.kv, r.out, r.lse, NULL, NULL};
    attention_forward_cpu(&pass, a);
    attention_backward_cpu(&(AttentionGradients){in.dout, r.dqkv, r.dkv}, &pass, a);
    return r;
}

static void check_among(int ranks, AttentionSizes sizes, const int* starts) {
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, sizes.T, sizes.HS);
    const AttentionInputs inputs = {ops_normal(qkvs(sizes), 1), NULL, ops_normal(outs(sizes), 1), starts};
    expect_attention_divided(sizes, inputs, ranks, 0, run_either, &scratch);
    memory_close(&memory);
}

// Chunks that end within tiles and blocks, and at their ends; divided among threads, too.
TEST(ranks) {
    const int among[] = {2, 4, 8}, chunk[] = {1, 7, MATMUL_TILE_ROWS, 25, ATTENTION_SQUARE, 101},
              threads[] = {1, 8};
    for (int i = 0; i < 36; i++) {
        const int ranks = among[i % 3], T = 2 * ranks * chunk[i / 6], B = 1 + i % 2;
        const AttentionSizes plain = attention_sizes(B, T, 2, 2, 12),
                             group = capped(attention_sizes(B, T, 6, 2, 8), i % 2 ? 2 : 0);
        threads_set(threads[i / 3 % 2]);
        check_among(ranks, plain, NULL);
        check_among(ranks, group, documents(B, T, T / 3 + 1));
        check_among(ranks, group, windows(B, T, T / 4 + 1));
    }
    check_among(1, attention_sizes(1, 77, 2, 1, 12), NULL);
    threads_set(3);
}

// Texts of different lengths: a query over stored keys and values is the last row of the whole
// text's attention. Only the text's own room is written.
static void test_cached(int NH, int KV, int HS, int window, float cap) {
    enum { TEXTS = 4, MAX_T = 50 };
    const int lengths[TEXTS] = {1, 16, 33, MAX_T};
    const AttentionSizes step = capped(attention_sizes(TEXTS, 1, NH, KV, HS), cap);
    const int Q = attention_queries_size(step), QKV = attention_qkv_size(step);
    const size_t room = (size_t)2 * attention_keys_size(step) * MAX_T;
    AttentionScratch scratch;
    Memory memory = memory_on_host();
    attention_open(&scratch, &memory, MAX_T, HS);
    const AttentionCache cache = {ops_floats(TEXTS * room), MAX_T};
    float *last = ops_floats((size_t)TEXTS * QKV), *out = ops_floats((size_t)TEXTS * Q),
          *lse = ops_floats((size_t)TEXTS * NH);
    int positions[TEXTS];
    Run want[TEXTS];
    for (int b = 0; b < TEXTS; b++) {
        const int T = lengths[b];
        const AttentionSizes sizes = capped(attention_sizes(1, T, NH, KV, HS), cap);
        float *qkv = ops_normal(qkvs(sizes), 1), *dout = ops_normal(outs(sizes), 1);
        positions[b] = T - 1;
        attention_cache_store_cpu(cache, qkv, b, 0, T - 1, sizes);
        attention_cache_store_cpu(cache, qkv + (size_t)(T - 1) * QKV, b, T - 1, 1, sizes);
        memcpy(last + b * QKV, qkv + (size_t)(T - 1) * QKV, (size_t)QKV * sizeof(float));
        want[b] = run_documents(sizes, window ? windows(1, T, window) : NULL, qkv, dout, &scratch);
    }
    const AttentionPass pass = {step, NULL, last, NULL, out, lse, NULL, NULL};
    attention_cached_cpu(&pass, positions, window, cache, &scratch);
    for (int b = 0; b < TEXTS; b++) {
        for (int h = 0; h < NH; h++) {
            EXPECT_NEAR(lse[b * NH + h], want[b].lse[(size_t)h * lengths[b] + positions[b]], 2e-6 * (1 + cap),
                        "lse of text %d, head %d", b, h);
        }
        for (int c = 0; c < Q; c++) {
            EXPECT_NEAR(out[b * Q + c], want[b].out[(size_t)positions[b] * Q + c], 2e-6,
                        "text %d, column %d, %d/%d heads of %d, window %d", b, c, NH, KV, HS, window);
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
    test_cached(2, 2, 12, 0, 0);
    test_cached(2, 2, 40, 0, 0);
    test_cached(2, 2, 5, 0, 0);
    test_cached(6, 2, 12, 7, 0);
    test_cached(3, 1, 40, 1, 0);
    test_cached(4, 2, 5, 50, 0);
    test_cached(4, 2, 256, 0, 1.5f);
    test_cached(4, 1, 12, 7, 3);
}
