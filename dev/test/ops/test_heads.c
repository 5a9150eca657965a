// test_heads.c -- norms and positions of queries and keys: both passes against plain loops in
// double, at awkward sizes; positions that are given; the same bits for any number of threads.
#include "llmc/base/threads.h"
#include "llmc/ops/heads.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

enum { DIMS_ALL = 0 }; // all channels of a head turn

static const float EPS = 1e-6f;

// Inputs, and the results of the code under test.
typedef struct {
    Heads heads;
    float *qkv, *dqkv, *dqnormw, *dknormw;
} Run;

// Some cases have weights that count from 1.
static int offset_of(AttentionSizes s) { return s.T == 33; }

static size_t rows(AttentionSizes s) { return (size_t)s.B * s.T; }

// Returns the columns of the weights of queries, or of keys.
static size_t weight_columns(HeadsKind kind, AttentionSizes s, int heads) {
    return (size_t)(kind == HEADS_ROW_NORM ? heads : 1) * (size_t)s.HS;
}

// Runs both passes on copies of x and dout. Gradients of weights are set, or added to 1.
static Run run(HeadsKind kind, AttentionSizes sizes, Rope rope, const float* x, const float* dout,
               const float* weights, GradientMode mode) {
    const int HS = sizes.HS, count = sizes.NH + sizes.KV;
    const size_t n = rows(sizes) * attention_qkv_size(sizes), q = weight_columns(kind, sizes, sizes.NH),
                 k = weight_columns(kind, sizes, sizes.KV);
    Run r = {.heads = {.kind = kind, .eps = EPS, .offset = offset_of(sizes), .sizes = sizes, .rope = rope},
             .qkv = ops_copy(x, n),
             .dqkv = ops_copy(dout, n),
             .dqnormw = ops_floats(q),
             .dknormw = ops_floats(k)};
    if (kind == HEADS_NORM || kind == HEADS_ROW_NORM) {
        r.heads.qnormw = weights;
        r.heads.knormw = weights + q;
        r.heads.raw = ops_floats(rows(sizes) * attention_query_key_size(sizes));
    } else if (kind == HEADS_UNIT_NORM) {
        r.heads.rstd = ops_floats(rows(sizes) * count);
    }
    for (size_t c = 0; c < q && mode == GRADIENT_ADD; c++) {
        r.dqnormw[c] = 1;
        r.dknormw[c % k] = 1;
    }
    const HeadsGradients d = {r.dqnormw, r.dknormw, mode, ops_floats((size_t)sizes.B * count * HS)};
    heads_forward_cpu(r.qkv, &r.heads);
    heads_backward_cpu(r.dqkv, &d, r.qkv, &r.heads);
    return r;
}

// Checks both passes against the loops of reference.h: the norm, then the turn. Sums of HS, or of
// all tokens and heads, err by some epsilon of their terms.
static void check(HeadsKind kind, AttentionSizes s, int dims, int turns, GradientMode mode) {
    const int B = s.B, T = s.T, NH = s.NH, KV = s.KV, HS = s.HS, turned = dims == DIMS_ALL ? HS : dims;
    const size_t N = rows(s), n = N * attention_qkv_size(s);
    const RopeSettings settings = {T, HS, turned, 1e4f, {ROPE_PLAIN, 0, 0, 0, 0}};
    Rope rope = {NULL, HS};
    Memory memory = memory_on_host();
    if (turns) {
        rope_open(&rope, &memory, settings);
    }
    const size_t columns[2] = {weight_columns(kind, s, NH), weight_columns(kind, s, KV)},
                 both = columns[0] + columns[1];
    const int has_weights = kind == HEADS_NORM || kind == HEADS_ROW_NORM;
    float *x = ops_normal(n, 2), *dout = ops_normal(n, 1), *weights = ops_normal(both, 1);
    const Run r = run(kind, s, rope, x, dout, weights, mode);
    double *frequency = ops_doubles(HS), *normed = ops_doubles(n), *out = ops_doubles(n),
           *dn = ops_doubles(n), *dx = ops_doubles(n), *dweights = ops_doubles(both);
    double *rstd = kind == HEADS_PLAIN ? NULL : ops_doubles(N * (NH + KV)), *wide = ops_widen(x, n),
           *q = has_weights ? ops_widen(weights, both) : NULL, *k = q ? q + columns[0] : NULL;
    for (int i = 0; i < turned / 2; i++) {
        frequency[i] = rope_frequency(settings, i, 0);
    }
    const RefHeads heads = {B, T, NH, KV, HS, 0};
    const RefHeadNorm norm = {kind, q, k, rstd, EPS, offset_of(s)};
    ref_heads_norm_forward(normed, wide, norm, heads);
    ref_rope_forward(out, normed, (RefRope){turns ? frequency : NULL, 1}, heads);
    ref_rope_backward(dn, ops_widen(dout, n), (RefRope){turns ? frequency : NULL, 1}, heads);
    ref_heads_norm_backward(dx, q ? dweights : NULL, q ? dweights + columns[0] : NULL, dn, wide, norm, heads);
    EXPECT_NEAR(ops_error(r.qkv, out, NULL, n), 0, 8, "out of kind %d, %d x %d x %d/%d x %d", kind, B, T, NH,
                KV, HS);
    EXPECT_NEAR(ops_error(r.dqkv, dx, NULL, n), 0, 16, "dx of kind %d, %d x %d x %d/%d x %d", kind, B, T, NH,
                KV, HS);
    const double sums = 16 + 2 * sqrt((double)N * NH);
    for (int i = 0; i < 2 && q; i++) {
        double* want = dweights + (i ? columns[0] : 0);
        for (size_t c = 0; c < columns[i]; c++) {
            want[c] += mode == GRADIENT_ADD;
        }
        EXPECT_NEAR(ops_error(i ? r.dknormw : r.dqnormw, want, NULL, columns[i]), 0, sums,
                    "dweight %d, %d x %d x %d/%d x %d", i, B, T, NH, KV, HS);
    }
    memory_close(&memory);
    ops_close("heads");
}

TEST(heads) {
    const int HS[] = {8, 32, 48, 64, 80, 128, 2}, T[] = {1, 31, 33}, groups[][2] = {{4, 1}, {6, 2}, {3, 3}};
    for (int i = 0; i < 21; i++) {
        const AttentionSizes s =
            attention_sizes(1 + i % 2, T[i % 3], groups[i / 7][0], groups[i / 7][1], HS[i % 7]);
        const GradientMode mode = i % 2 ? GRADIENT_ADD : GRADIENT_SET;
        check(HEADS_PLAIN, s, DIMS_ALL, 1, mode);
        check(HEADS_PLAIN, s, s.HS / 4 * 2, 1, mode);
        check(HEADS_NORM, s, DIMS_ALL, 1, mode);
        check(HEADS_NORM, s, DIMS_ALL, 0, mode);
        check(HEADS_UNIT_NORM, s, DIMS_ALL, 1, mode);
        check(HEADS_ROW_NORM, s, DIMS_ALL, 1, mode);
        check(HEADS_ROW_NORM, s, DIMS_ALL, 0, mode);
    }
}

// GPT-2's queries and keys keep their bits, whatever else is given.
TEST(heads_plain) {
    const AttentionSizes s = attention_sizes(1, 3, 2, 2, 4);
    const size_t n = rows(s) * attention_qkv_size(s);
    float *x = ops_normal(n, 1), *dout = ops_normal(n, 1);
    const Run r = run(HEADS_PLAIN, s, (Rope){NULL, 4}, x, dout, NULL, GRADIENT_SET);
    EXPECT(heads_do_nothing(&r.heads) && ops_same_bits(r.qkv, x, n) && ops_same_bits(r.dqkv, dout, n),
           "changed");
    ops_close("plain");
}

// A step of decoding: each row has a position of its own, and the bits of that token in its text.
static void check_positions(HeadsKind kind) {
    enum { T = 9, HS = 16 };
    const AttentionSizes text = attention_sizes(1, T, 3, 1, HS), step = attention_sizes(3, 1, 3, 1, HS);
    const int positions[3] = {4, 0, 8}, QKV = attention_qkv_size(text);
    const size_t q = weight_columns(kind, text, text.NH);
    Rope rope;
    Memory memory = memory_on_host();
    rope_open(&rope, &memory, (RopeSettings){T, HS, HS, 1e4f, {ROPE_PLAIN, 0, 0, 0, 0}});
    float *x = ops_normal((size_t)T * QKV, 1), *weights = ops_normal(4 * HS, 1),
          *last = ops_floats((size_t)3 * QKV);
    const Run whole = run(kind, text, rope, x, x, weights, GRADIENT_SET);
    for (int i = 0; i < 3; i++) {
        memcpy(last + i * QKV, x + positions[i] * QKV, (size_t)QKV * sizeof(float));
    }
    const Heads heads = {kind, EPS, 0, step, rope, positions, weights, weights + q, NULL, NULL};
    heads_forward_cpu(last, &heads);
    for (int i = 0; i < 3; i++) {
        EXPECT(ops_same_bits(last + i * QKV, whole.qkv + positions[i] * QKV, QKV), "row %d", i);
    }
    memory_close(&memory);
    ops_close("positions");
}

TEST(heads_positions) {
    check_positions(HEADS_NORM);
    check_positions(HEADS_ROW_NORM);
}

// The rows of a rank's chunks are those of whole sequences.
TEST(heads_chunks) {
    enum { T = 14, RANKS = 3, W = RANKS * T, HS = 24 };
    const AttentionSizes whole = attention_sizes(2, W, 6, 2, HS);
    const size_t QKV = (size_t)attention_qkv_size(whole);
    Rope rope;
    Memory memory = memory_on_host();
    rope_open(&rope, &memory, (RopeSettings){W, HS, HS, 1e4f, {ROPE_PLAIN, 0, 0, 0, 0}});
    float *x = ops_normal(2 * W * QKV, 1), *dout = ops_normal(2 * W * QKV, 1),
          *weights = ops_normal(2 * HS, 1);
    const Run want = run(HEADS_NORM, whole, rope, x, dout, weights, GRADIENT_SET);
    for (int q = 0; q < RANKS; q++) {
        AttentionSizes rank = whole;
        rank.T = T;
        rank.chunks = (TokenChunks){RANKS - 1, q};
        float *own = ops_floats(2 * T * QKV), *down = ops_floats(2 * T * QKV);
        for (int pass = 0; pass < 2; pass++) {
            for (int n = 0; n < 2 * T; n++) {
                const size_t from = (size_t)(n / T * W + token_chunks_position(rank.chunks, n % T, T)) * QKV;
                memcpy((pass ? down : own) + n * QKV, (pass ? dout : x) + from, QKV * sizeof(float));
            }
        }
        const Run got = run(HEADS_NORM, rank, rope, own, down, weights, GRADIENT_SET);
        for (int n = 0; n < 2 * T; n++) {
            const size_t from = (size_t)(n / T * W + token_chunks_position(rank.chunks, n % T, T)) * QKV;
            EXPECT(ops_same_bits(got.qkv + n * QKV, want.qkv + from, QKV) &&
                       ops_same_bits(got.dqkv + n * QKV, want.dqkv + from, QKV),
                   "token %d of rank %d", n, q);
        }
    }
    memory_close(&memory);
    ops_close("chunks");
}

static void check_threads(HeadsKind kind) {
    enum { T = 200, HS = 24 };
    const AttentionSizes s = attention_sizes(2, T, 6, 2, HS);
    const size_t n = rows(s) * attention_qkv_size(s);
    Rope rope;
    Memory memory = memory_on_host();
    rope_open(&rope, &memory, (RopeSettings){T, HS, HS, 1e4f, {ROPE_PLAIN, 0, 0, 0, 0}});
    float *x = ops_normal(n, 1), *dout = ops_normal(n, 1), *weights = ops_normal(8 * HS, 1);
    Run r[3];
    for (int t = 0; t < 3; t++) {
        threads_set(t + 1);
        r[t] = run(kind, s, rope, x, dout, weights, GRADIENT_SET);
        EXPECT(ops_same_bits(r[t].qkv, r[0].qkv, n) && ops_same_bits(r[t].dqkv, r[0].dqkv, n) &&
                   ops_same_bits(r[t].dqnormw, r[0].dqnormw, HS) &&
                   ops_same_bits(r[t].dknormw, r[0].dknormw, HS),
               "%d threads, kind %d", t + 1, kind);
    }
    memory_close(&memory);
    ops_close("threads");
}

TEST(heads_threads) {
    check_threads(HEADS_NORM);
    check_threads(HEADS_ROW_NORM);
}
