// test_short_conv.c -- the short convolution: both kinds against the reference at awkward sizes,
// documents, gradients set and added, decoding, any number of threads; LFM 2's by transformers.
#include "llmc/base/threads.h"
#include "llmc/ops/short_conv.h"
#include "llmc/reference_recurrent.h"
#include "dev/test/lib/fixture.h"

typedef struct {
    ShortConvKind kind;
    int B, T, C, W, has_bias, has_documents;
} Case;

static size_t inp_size(const Case* c) { return (size_t)c->B * c->T * c->C * short_conv_columns(c->kind); }
static size_t out_size(const Case* c) { return (size_t)c->B * c->T * c->C; }

// Documents of 1, 2, 3, ... tokens; sequence b starts with one of b + 1.
static int* documents(int B, int T) {
    int* starts = ops_below((size_t)B * T, 1);
    for (int b = 0; b < B; b++) {
        for (int t = 0, start = 0, length = b + 1; t < T; t++) {
            if (t == start + length) {
                start = t, length++;
            }
            starts[b * T + t] = start;
        }
    }
    return starts;
}

// Results in double.
typedef struct {
    double *out, *dinp, *dweight, *dbias;
} Results;

static Results reference(const RefConv* x, const Case* c, const double* dout) {
    const Results r = {ops_doubles(out_size(c)), ops_doubles(inp_size(c)), ops_doubles((size_t)c->C * c->W),
                       ops_doubles((size_t)c->C)};
    ref_conv_forward(r.out, x);
    ref_conv_backward(r.dinp, r.dweight, r.dbias, dout, x);
    return r;
}

// Each result is a sum of few products, or of one for each token: some roundings of the largest.
static double limit(const Case* c) { return 16 + 2 * sqrt((double)c->B * c->T); }

static void check(Case c) {
    const size_t taps = (size_t)c.C * c.W, n = out_size(&c);
    float *inp = ops_normal(inp_size(&c), 1), *weight = ops_normal(taps, 1), *bias = ops_normal(c.C, 1),
          *dout = ops_normal(n, 1);
    float *out = ops_floats(n), *dinp = ops_floats(inp_size(&c)), *dweight = ops_floats(taps),
          *dbias = ops_floats(c.C);
    const int* starts = c.has_documents ? documents(c.B, c.T) : NULL;
    const ShortConv conv = {c.kind, c.B, c.T, c.C, c.W, starts, weight, c.has_bias ? bias : NULL};
    const RefConv x = {c.kind,
                       c.B,
                       c.T,
                       c.C,
                       c.W,
                       starts,
                       ops_widen(inp, inp_size(&c)),
                       ops_widen(weight, taps),
                       c.has_bias ? ops_widen(bias, c.C) : NULL};
    const Results want = reference(&x, &c, ops_widen(dout, n));
    short_conv_forward_cpu(out, inp, &conv);
    short_conv_backward_cpu(dinp, dweight, c.has_bias ? dbias : NULL, dout, inp, &conv, GRADIENT_SET);
    char what[96];
    snprintf(what, sizeof(what), "kind %d, %d x %d x %d, %d taps%s", c.kind, c.B, c.T, c.C, c.W,
             starts ? ", documents" : "");
    EXPECT_NEAR(ops_error(out, want.out, NULL, n), 0, limit(&c), "out of %s", what);
    EXPECT_NEAR(ops_error(dinp, want.dinp, NULL, inp_size(&c)), 0, limit(&c), "dinp of %s", what);
    EXPECT_NEAR(ops_error(dweight, want.dweight, NULL, taps), 0, limit(&c), "dweight of %s", what);
    if (c.has_bias) {
        EXPECT_NEAR(ops_error(dbias, want.dbias, NULL, c.C), 0, limit(&c), "dbias of %s", what);
    }
    float *before = ops_copy(dweight, taps), *dinp_again = ops_floats(inp_size(&c));
    threads_set(1); // the same bits
    short_conv_backward_cpu(dinp_again, dweight, c.has_bias ? dbias : NULL, dout, inp, &conv, GRADIENT_ADD);
    threads_set(3);
    EXPECT(ops_same_bits(dinp, dinp_again, inp_size(&c)), "dinp of %s, one thread", what);
    short_conv_backward_cpu(dinp_again, NULL, NULL, dout, inp, &conv, GRADIENT_SET); // frozen
    EXPECT(ops_same_bits(dinp, dinp_again, inp_size(&c)), "dinp of %s, without gradients of taps", what);
    for (size_t i = 0; i < taps; i++) {
        EXPECT(dweight[i] == 2 * before[i], "dweight %zu of %s is not added", i, what);
    }
    ops_close(what);
}

TEST(short_conv) {
    const int sizes[][3] = {{1, 1, 5}, {2, 3, 8}, {1, 31, 33}, {3, 130, 40}, {1, 260, 600}, {1, 3, 2100}};
    threads_set(3);
    for (int i = 0; i < 6; i++) {
        for (int W = 2; W <= SHORT_CONV_MOST; W += 1 + W / 4) {
            for (int k = 0; k < 4; k++) {
                check((Case){k % 2 ? SHORT_CONV_GATED : SHORT_CONV_SILU, sizes[i][0], sizes[i][1],
                             sizes[i][2], W, W % 2, k / 2});
            }
        }
    }
}

// Sequences are read up to some token, then token by token: results have the bits of a whole pass.
static void check_steps(ShortConvKind kind, int W, int first) {
    enum { B = 2, T = 12, C = 300 };
    const size_t columns = (size_t)short_conv_columns(kind) * C, state_size = (size_t)(W - 1) * C;
    float *inp = ops_normal(B * T * columns, 1), *weight = ops_normal((size_t)C * W, 1),
          *bias = ops_normal(C, 1);
    float *whole = ops_floats(B * T * C), *out = ops_floats(B * C), *state = ops_floats(B * state_size),
          *row = ops_floats(B * columns);
    ShortConv conv = {kind, B, T, C, W, NULL, weight, bias};
    short_conv_forward_cpu(whole, inp, &conv);
    conv.B = 1, conv.T = first;
    for (int b = 0; b < B; b++) {
        short_conv_store_cpu(state + b * state_size, inp + b * T * columns, &conv);
    }
    conv.B = B, conv.T = 1;
    for (int t = first; t < T; t++) {
        for (int b = 0; b < B; b++) {
            memcpy(row + b * columns, inp + (b * T + t) * columns, columns * sizeof(float));
        }
        short_conv_step_cpu(out, state, row, &conv);
        for (int b = 0; b < B; b++) {
            EXPECT(ops_same_bits(out + b * C, whole + (b * T + t) * C, C),
                   "kind %d, %d taps, %d tokens first: token %d of sequence %d", kind, W, first, t, b);
        }
    }
    ops_close("steps");
}

TEST(short_conv_steps) {
    for (int W = 2; W <= SHORT_CONV_MOST; W++) {
        for (int first = 1; first < 10; first += 2) {
            check_steps(SHORT_CONV_SILU, W, first);
            check_steps(SHORT_CONV_GATED, W, first);
        }
    }
}

// LFM 2's convolution behind its first linear layer (dev/ref/make_delta_fixtures.py). PyTorch also
// computes in fp32.
TEST(short_conv_transformers) {
    enum { T = 9, C = 4, W = 3 };
    float *in = fixture_input(3 * C * C, 1), *in_bias = fixture_input(3 * C, 2),
          *weight = fixture_input(C * W, 3), *bias = fixture_input(C, 4), *h = fixture_input(T * C, 5),
          *dout = fixture_input(T * C, 6);
    float *bcx = ops_floats(T * 3 * C), *out = ops_floats(T * C), *dbcx = ops_floats(T * 3 * C),
          *dweight = ops_floats(C * W), *dbias = ops_floats(C);
    const RefLinear sizes = {T, C, 3 * C};
    const ShortConv conv = {SHORT_CONV_GATED, 1, T, C, W, NULL, weight, bias};
    double *inp = ops_doubles(T * 3 * C), *dh = ops_doubles(T * C), *din = ops_doubles(3 * C * C),
           *din_bias = ops_doubles(3 * C);
    double *wide_h = ops_widen(h, T * C), *wide_in = ops_widen(in, 3 * C * C);
    ref_linear_forward(inp, wide_h, wide_in, ops_widen(in_bias, 3 * C), sizes);
    ops_narrow(bcx, inp, T * 3 * C);
    short_conv_forward_cpu(out, bcx, &conv);
    short_conv_backward_cpu(dbcx, dweight, dbias, dout, bcx, &conv, GRADIENT_SET);
    ref_linear_backward(dh, din, din_bias, ops_widen(dbcx, T * 3 * C), wide_h, wide_in, sizes);
    float* narrow[3] = {ops_floats(3 * C * C), ops_floats(3 * C), ops_floats(T * C)};
    ops_narrow(narrow[0], din, 3 * C * C);
    ops_narrow(narrow[1], din_bias, 3 * C);
    ops_narrow(narrow[2], dh, T * C);
    Fixture fixture = fixture_open("dev/ref/fixtures/delta/lfm2.bin");
    fixture_expect(&fixture, out, T * C, 2e-6, "out");
    fixture_expect(&fixture, narrow[0], 3 * C * C, 2e-6, "din");
    fixture_expect(&fixture, narrow[1], 3 * C, 2e-6, "din_bias");
    fixture_expect(&fixture, dweight, C * W, 2e-6, "dweight");
    fixture_expect(&fixture, dbias, C, 2e-6, "dbias");
    fixture_expect(&fixture, narrow[2], T * C, 2e-6, "dh");
    fixture_close(&fixture);
    ops_close("transformers");
}
