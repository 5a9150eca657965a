// test_delta_rule.c -- the gated delta rule against the recurrence of the reference: chunks that
// are whole or not, heads that share keys, odd widths, documents, decoding, any number of threads.
// The layer of Qwen 3.5 between its linear layers against transformers.
#include "llmc/base/threads.h"
#include "llmc/ops/delta_rule.h"
#include "llmc/ops/gated_norm.h"
#include "llmc/reference_recurrent.h"
#include "dev/test/lib/fixture.h"
#include "dev/test/lib/inputs.h"
#include "dev/test/lib/ops.h"

typedef struct {
    DeltaSizes sizes;
    int document; // length of the first; each next one is longer by one; 0: a row is one document
    float decay;  // of typical gates, in exponents: 0 keeps everything
} Case;

static size_t tokens(const Case* c) { return (size_t)c->sizes.B * c->sizes.T; }
static size_t qkv_size(const Case* c) { return tokens(c) * delta_rule_columns(c->sizes); }
static size_t ba_size(const Case* c) { return tokens(c) * 2 * c->sizes.Hv; }
static size_t out_size(const Case* c) { return tokens(c) * delta_rule_out_columns(c->sizes); }

static int* documents(const Case* c) {
    int* starts = ops_below(tokens(c), 1);
    for (int b = 0; b < c->sizes.B; b++) {
        for (int t = 0, start = 0, length = c->document + b; t < c->sizes.T; t++) {
            if (t == start + length) {
                start = t, length++;
            }
            starts[b * c->sizes.T + t] = start;
        }
    }
    return starts;
}

// Inputs of both passes, and results of the passes that are tested.
typedef struct {
    Case c;
    int* starts;
    float *qkv, *ba, *A_log, *dt_bias, *dout;
    float *out, *state, *dqkv, *dba, *dA_log, *ddt_bias;
} Arrays;

static Arrays arrays_open(const Case* c) {
    const size_t Hv = c->sizes.Hv;
    const Arrays a = {*c,
                      c->document ? documents(c) : NULL,
                      ops_normal(qkv_size(c), 1),
                      ops_normal(ba_size(c), 1),
                      ops_normal(Hv, 1),
                      ops_normal(Hv, 1),
                      ops_normal(out_size(c), 1),
                      ops_floats(out_size(c)),
                      ops_floats(c->sizes.B * delta_rule_state_size(c->sizes)),
                      ops_floats(qkv_size(c)),
                      ops_floats(ba_size(c)),
                      ops_floats(Hv),
                      ops_floats(Hv)};
    for (size_t h = 0; h < Hv; h++) {
        a.A_log[h] += logf(c->decay);
    }
    return a;
}

static DeltaPass pass_of(const Arrays* a) {
    return (DeltaPass){a->c.sizes, a->starts, a->qkv, a->ba, a->A_log, a->dt_bias, a->out, a->state};
}

// The backward pass goes over `sequences` at a time.
static void run(const Arrays* a, GradientMode mode, int sequences) {
    Memory memory = memory_on_host();
    DeltaScratch scratch;
    DeltaSizes sizes = a->c.sizes;
    const DeltaPass pass = pass_of(a);
    const DeltaGradients d = {a->dout, a->dqkv, a->dba, a->dA_log, a->ddt_bias, mode};
    sizes.B = sequences;
    delta_rule_open(&scratch, &memory, sizes);
    delta_rule_forward_cpu(&pass, &scratch);
    delta_rule_backward_cpu(&d, &pass, &scratch);
    memory_close(&memory);
}

// Results in double.
typedef struct {
    double *out, *states, *dqkv, *dba, *dA_log, *ddt_bias;
} Reference;

static Reference reference(const Arrays* a) {
    const DeltaSizes s = a->c.sizes;
    const RefDelta x = {s.B,
                        s.T,
                        s.Hk,
                        s.Hv,
                        s.dk,
                        s.dv,
                        ops_widen(a->qkv, qkv_size(&a->c)),
                        ops_widen(a->ba, ba_size(&a->c)),
                        ops_widen(a->A_log, s.Hv),
                        ops_widen(a->dt_bias, s.Hv),
                        a->starts};
    const Reference r = {ops_doubles(out_size(&a->c)),
                         ops_doubles(tokens(&a->c) * delta_rule_state_size(s)),
                         ops_doubles(qkv_size(&a->c)),
                         ops_doubles(ba_size(&a->c)),
                         ops_doubles(s.Hv),
                         ops_doubles(s.Hv)};
    ref_delta_forward(r.out, r.states, &x);
    ref_delta_backward(r.dqkv, r.dba, r.dA_log, r.ddt_bias, ops_doubles((size_t)s.dk * s.dv),
                       ops_widen(a->dout, out_size(&a->c)), r.states, &x);
    return r;
}

// Sums of up to some hundred terms follow each other in chunk after chunk; errors are in units of
// the largest result.
static const double limit = 1e-5 / FLT_EPSILON;

static void check(Case c) {
    char what[96];
    const Arrays a = arrays_open(&c);
    const DeltaSizes s = c.sizes;
    const size_t state = delta_rule_state_size(s);
    const Reference want = reference(&a);
    snprintf(what, sizeof(what), "%d x %d, heads %d/%d of %d, %d, documents of %d, decay %g", s.B, s.T, s.Hk,
             s.Hv, s.dk, s.dv, c.document, c.decay);
    run(&a, GRADIENT_SET, a.c.sizes.B);
    EXPECT_NEAR(ops_error(a.out, want.out, NULL, out_size(&c)), 0, limit, "out of %s", what);
    for (int b = 0; b < s.B; b++) {
        EXPECT_NEAR(ops_error(a.state + b * state, want.states + ((b + 1) * s.T - 1) * state, NULL, state), 0,
                    limit, "state %d of %s", b, what);
    }
    EXPECT_NEAR(ops_error(a.dqkv, want.dqkv, NULL, qkv_size(&c)), 0, limit, "dqkv of %s", what);
    EXPECT_NEAR(ops_error(a.dba, want.dba, NULL, ba_size(&c)), 0, limit, "dba of %s", what);
    EXPECT_NEAR(ops_error(a.dA_log, want.dA_log, NULL, s.Hv), 0, 4 * limit, "dA_log of %s", what);
    EXPECT_NEAR(ops_error(a.ddt_bias, want.ddt_bias, NULL, s.Hv), 0, 4 * limit, "ddt_bias of %s", what);
    for (size_t i = 0; i < ba_size(&c); i++) { // a document's first token does not decay
        const int t = (int)(i / 2 / s.Hv) % s.T, is_start = a.starts ? a.starts[i / 2 / s.Hv] == t : t == 0;
        EXPECT(i / s.Hv % 2 == 0 || !is_start || a.dba[i] == 0, "da of token %d of %s", t, what);
    }
    Arrays again = a;
    again.out = ops_floats(out_size(&c)), again.dqkv = ops_floats(qkv_size(&c));
    again.dba = ops_floats(ba_size(&c)), again.dA_log = ops_copy(a.dA_log, s.Hv);
    again.ddt_bias = NULL; // frozen
    threads_set(1);
    run(&again, GRADIENT_ADD, 1);
    threads_set(3);
    EXPECT(ops_same_bits(a.out, again.out, out_size(&c)), "out of %s by one thread", what);
    EXPECT(ops_same_bits(a.dqkv, again.dqkv, qkv_size(&c)), "dqkv of %s by one thread", what);
    EXPECT(ops_same_bits(a.dba, again.dba, ba_size(&c)), "dba of %s by one thread", what);
    for (int h = 0; h < s.Hv; h++) {
        EXPECT(again.dA_log[h] == 2 * a.dA_log[h] || s.B > 1, "dA_log %d of %s is not added", h, what);
        EXPECT_NEAR(again.dA_log[h], 2 * a.dA_log[h], 1e-4 * (1 + fabsf(a.dA_log[h])), "dA_log %d of %s", h,
                    what);
    }
    ops_close(what);
}

TEST(delta_rule) {
    threads_set(3);
    check((Case){{1, 1, 1, 1, 8, 8}, 0, 1});
    check((Case){{2, 3, 1, 2, 16, 8}, 0, 1});
    check((Case){{1, 64, 2, 2, 24, 40}, 0, 1});
    check((Case){{1, 65, 1, 3, 40, 24}, 0, 0.1f});
    check((Case){{2, 200, 2, 4, 32, 32}, 0, 0.05f});
    check((Case){{1, 130, 1, 1, 128, 128}, 0, 0.1f});
    check((Case){{1, 97, 1, 2, 64, 256}, 0, 0.01f});
    check((Case){{1, 70, 1, 1, 256, 16}, 0, 1});
}

// Documents that start inside of chunks and with them, of one token and longer than a chunk; decays
// that are far below the smallest number.
TEST(delta_rule_documents) {
    threads_set(3);
    check((Case){{2, 150, 1, 2, 16, 24}, 1, 0.1f});
    check((Case){{1, 200, 2, 2, 24, 8}, 64, 0.05f});
    check((Case){{2, 250, 1, 1, 32, 32}, 100, 0.02f});
    check((Case){{1, 180, 1, 4, 16, 16}, 0, 30});
    check((Case){{1, 180, 1, 4, 16, 16}, 7, 30});
}

// A row with two documents gives the bits of two rows if chunks do not move, and else the same
// numbers: nothing of the first document reaches the second.
TEST(delta_rule_separate) {
    enum { FIRST = 64, T = 100 };
    const Case c = {{1, T, 1, 2, 16, 16}, FIRST, 0.1f};
    const Arrays a = arrays_open(&c);
    const size_t row = delta_rule_columns(c.sizes), out_row = delta_rule_out_columns(c.sizes);
    run(&a, GRADIENT_SET, a.c.sizes.B);
    for (int part = 0; part < 2; part++) {
        const int begin = part ? FIRST : 0, count = part ? T - FIRST : FIRST;
        Arrays one = a;
        one.c.sizes.T = count, one.c.document = 0, one.starts = NULL;
        one.qkv += begin * row, one.ba += begin * 4, one.dout += begin * out_row;
        one.out = ops_floats(count * out_row), one.dqkv = ops_floats(count * row);
        one.dba = ops_floats((size_t)count * 4), one.state = ops_floats(delta_rule_state_size(c.sizes));
        run(&one, GRADIENT_SET, c.sizes.B);
        EXPECT(ops_same_bits(one.out, a.out + begin * out_row, count * out_row), "out of document %d", part);
        EXPECT(ops_same_bits(one.dqkv, a.dqkv + begin * row, count * row), "dqkv of document %d", part);
        EXPECT(ops_same_bits(one.dba, a.dba + begin * 4, (size_t)count * 4), "dba of document %d", part);
        EXPECT(!part || ops_same_bits(one.state, a.state, delta_rule_state_size(c.sizes)), "state");
    }
    ops_close("separate");
}

// The first tokens of both sequences in one pass, the others one by one.
TEST(delta_rule_steps) {
    enum { T = 90, FIRST = 70 };
    const Case c = {{2, T, 2, 4, 16, 72}, 0, 0.1f};
    const Arrays a = arrays_open(&c);
    const size_t row = delta_rule_columns(c.sizes), out_row = delta_rule_out_columns(c.sizes), gates = 8,
                 state = delta_rule_state_size(c.sizes);
    run(&a, GRADIENT_SET, a.c.sizes.B);
    Memory memory = memory_on_host();
    DeltaScratch scratch;
    DeltaSizes sizes = c.sizes;
    sizes.T = 0;
    delta_rule_open(&scratch, &memory, sizes);
    float *states = ops_floats(2 * state), *out = ops_floats(2 * out_row), *qkv = ops_floats(2 * row),
          *ba = ops_floats(2 * gates), *unused = ops_floats(FIRST * out_row);
    for (int b = 0; b < 2; b++) {
        sizes.B = 1, sizes.T = FIRST;
        const DeltaPass first = {sizes,     NULL,   a.qkv + b * T * row, a.ba + b * T * gates, a.A_log,
                                 a.dt_bias, unused, states + b * state};
        delta_rule_forward_cpu(&first, &scratch);
    }
    sizes.B = 2, sizes.T = 1;
    for (int t = FIRST; t < T; t++) {
        for (int b = 0; b < 2; b++) {
            memcpy(qkv + b * row, a.qkv + (b * T + t) * row, row * sizeof(float));
            memcpy(ba + b * gates, a.ba + (b * T + t) * gates, gates * sizeof(float));
        }
        const DeltaPass step = {sizes, NULL, qkv, ba, a.A_log, a.dt_bias, out, states};
        delta_rule_step_cpu(&step);
        for (int b = 0; b < 2; b++) {
            const double* want = ops_widen(a.out + (b * T + t) * out_row, out_row);
            EXPECT_NEAR(ops_error(out + b * out_row, want, NULL, out_row), 0, limit,
                        "token %d of sequence %d", t, b);
        }
    }
    EXPECT_NEAR(ops_error(states, ops_widen(a.state, 2 * state), NULL, 2 * state), 0, limit, "last states");
    memory_close(&memory);
    ops_close("steps");
}

// The convolution, the delta rule and the gated norm, one after the other, and back. PyTorch also
// computes in fp32: its recurrence and its chunks differ by 5e-5 of the largest gradient of a gate,
// and so may ours, which adds up in another order on each processor.
TEST(delta_rule_transformers) {
    enum { T = 70, Hv = 2, d = 8, R = 2 * d + Hv * d, O = Hv * d };
    float *x = fixture_input(T * R, 1), *taps = fixture_input(R * 4, 2), *b = fixture_input(T * Hv, 3),
          *a = fixture_input(T * Hv, 4), *A_log = fixture_input(Hv, 5), *dt_bias = fixture_input(Hv, 6),
          *z = fixture_input(T * O, 7), *weight = fixture_input(d, 8), *dout = fixture_input(T * O, 9);
    float *qkv = ops_floats(T * R), *ba = ops_floats(T * 2 * Hv), *o = ops_floats(T * O),
          *out = ops_floats(T * O), *rstd = ops_floats(T * Hv);
    float *dx = ops_floats(T * R), *dtaps = ops_floats(R * 4), *dba = ops_floats(T * 2 * Hv),
          *dA_log = ops_floats(Hv), *ddt_bias = ops_floats(Hv), *dz = ops_floats(T * O),
          *dweight = ops_floats(d), *dqkv = ops_floats(T * R), *db = ops_floats(T * Hv),
          *da = ops_floats(T * Hv);
    for (int i = 0; i < T * Hv; i++) {
        ba[i / Hv * 2 * Hv + i % Hv] = b[i], ba[i / Hv * 2 * Hv + Hv + i % Hv] = a[i];
    }
    Memory memory = memory_on_host();
    DeltaScratch scratch;
    const ShortConv conv = {SHORT_CONV_SILU, 1, T, R, 4, NULL, taps, NULL};
    const DeltaPass pass = {{1, T, 1, Hv, d, d}, NULL, qkv, ba, A_log, dt_bias, o, NULL};
    // dout in the place of out
    const DeltaGradients of_delta = {o, dqkv, dba, dA_log, ddt_bias, GRADIENT_SET};
    const GatedNorm norm = {1e-6f, z, weight, rstd, T * Hv, d};
    delta_rule_open(&scratch, &memory, pass.sizes);
    short_conv_forward_cpu(qkv, x, &conv);
    delta_rule_forward_cpu(&pass, &scratch);
    gated_norm_forward_cpu(out, o, &norm);
    gated_norm_backward_cpu(dout, dz, dweight, dout, o, &norm, GRADIENT_SET);
    memcpy(o, dout, T * O * sizeof(float));
    delta_rule_backward_cpu(&of_delta, &pass, &scratch);
    short_conv_backward_cpu(dx, dtaps, NULL, dqkv, x, &conv, GRADIENT_SET);
    for (int i = 0; i < T * Hv; i++) {
        db[i] = dba[i / Hv * 2 * Hv + i % Hv], da[i] = dba[i / Hv * 2 * Hv + Hv + i % Hv];
    }
    Fixture fixture = fixture_open("dev/ref/fixtures/delta/qwen3_5.bin");
    fixture_expect(&fixture, out, T * O, 1e-5, "out");
    fixture_expect(&fixture, dx, T * R, 1e-5, "dx");
    fixture_expect(&fixture, dtaps, R * 4, 1e-5, "dtaps");
    fixture_expect(&fixture, db, T * Hv, 1e-4, "db");
    fixture_expect(&fixture, da, T * Hv, 1e-4, "da");
    fixture_expect(&fixture, dA_log, Hv, 1e-4, "dA_log");
    fixture_expect(&fixture, ddt_bias, Hv, 1e-4, "ddt_bias");
    fixture_expect(&fixture, dz, T * O, 1e-5, "dz");
    fixture_expect(&fixture, dweight, d, 1e-5, "dweight");
    fixture_close(&fixture);
    memory_close(&memory);
    ops_close("transformers");
}
