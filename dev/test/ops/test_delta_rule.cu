// test_delta_rule.cu -- the gated delta rule on the GPU against the CPU: both passes and all types,
// chunks that are whole or not, heads that share keys, odd widths, documents, decoding.
#include "llmc/ops/delta_step.cuh"
#include "dev/test/lib/gpu_ops.h"

struct Case {
    DeltaSizes sizes;
    int document; // tokens of each; 0: a row is one document
    float decay;  // of typical gates, in exponents
};

static size_t tokens(const Case* c) { return (size_t)c->sizes.B * c->sizes.T; }
static size_t qkv_size(const Case* c) { return tokens(c) * delta_rule_columns(c->sizes); }
static size_t ba_size(const Case* c) { return tokens(c) * 2 * c->sizes.Hv; }
static size_t out_size(const Case* c) { return tokens(c) * delta_rule_out_columns(c->sizes); }
static size_t state_size(const Case* c) { return c->sizes.B * delta_rule_state_size(c->sizes); }

// Inputs, rounded to X.
struct Inputs {
    float *qkv, *ba, *A_log, *dt_bias, *dout;
    int* starts;
};

template <class X> static Inputs inputs_of(const Case* c) {
    const Inputs x = {normal<X>(qkv_size(c), 1),  normal<X>(ba_size(c), 1),
                      ops_normal(c->sizes.Hv, 1), normal<X>(c->sizes.Hv, 1),
                      normal<X>(out_size(c), 1),  c->document ? ops_below(tokens(c), 1) : NULL};
    for (int h = 0; h < c->sizes.Hv; h++) {
        x.A_log[h] += logf(c->decay);
    }
    round_to<X>(x.A_log, c->sizes.Hv);
    for (size_t n = 0; n < tokens(c) && x.starts; n++) {
        x.starts[n] = (int)n % c->sizes.T / c->document * c->document;
    }
    return x;
}

struct Results {
    float *out, *state, *dqkv, *dba, *dA_log, *ddt_bias;
};

static Results on_cpu(const Case* c, const Inputs* x) {
    const Results r = {ops_floats(out_size(c)), ops_floats(state_size(c)), ops_floats(qkv_size(c)),
                       ops_floats(ba_size(c)),  ops_floats(c->sizes.Hv),   ops_floats(c->sizes.Hv)};
    const DeltaPass pass = {c->sizes, x->starts, x->qkv, x->ba, x->A_log, x->dt_bias, r.out, r.state};
    const DeltaGradients d = {x->dout, r.dqkv, r.dba, r.dA_log, r.ddt_bias, GRADIENT_SET};
    Memory memory = memory_on_host();
    DeltaScratch scratch;
    delta_rule_open(&scratch, &memory, c->sizes);
    delta_rule_forward_cpu(&pass, &scratch);
    delta_rule_backward_cpu(&d, &pass, &scratch);
    memory_close(&memory);
    return r;
}

// The gradients of the gates are added to their own: twice as large.
template <class X> static Results on_gpu(const Case* c, const Inputs* x, const Gpu* gpu) {
    const int Hv = c->sizes.Hv;
    X *qkv = upload_rounded<X>(x->qkv, qkv_size(c), 0, gpu),
      *ba = upload_rounded<X>(x->ba, ba_size(c), 0, gpu),
      *dout = upload_rounded<X>(x->dout, out_size(c), 0, gpu), *out = unset<X>(out_size(c), gpu),
      *dqkv = unset<X>(qkv_size(c), gpu), *dba = unset<X>(ba_size(c), gpu);
    X *A_log = upload_rounded<X>(x->A_log, Hv, 0, gpu), *dt_bias = upload_rounded<X>(x->dt_bias, Hv, 0, gpu);
    float *state = unset<float>(state_size(c), gpu), *dA_log = unset<float>(Hv, gpu),
          *ddt_bias = unset<float>(Hv, gpu);
    int* starts = x->starts ? upload_ints(x->starts, tokens(c), gpu) : NULL;
    Memory memory = memory_on_gpu();
    DeltaScratchGpu<X> scratch, small;
    DeltaSizes one = c->sizes;
    one.B = 1; // sequence of several
    delta_rule_gpu_open(&scratch, &memory, c->sizes, 1);
    delta_rule_gpu_open(&small, &memory, one, 1);
    const DeltaPassGpu<X> pass = {c->sizes, starts, qkv, ba, A_log, dt_bias, out, state};
    DeltaGradientsGpu<X> d = {dout, dqkv, dba, {dA_log, DTYPE_FP32}, {ddt_bias, DTYPE_FP32}, GRADIENT_SET};
    delta_rule_forward(&pass, &scratch, gpu);
    delta_rule_backward(&d, &pass, &scratch, gpu);
    float* first = download(dqkv, qkv_size(c), gpu);
    d.mode = GRADIENT_ADD;
    delta_rule_backward(&d, &pass, &small, gpu);
    delta_rule_forward(&pass, &small, gpu);
    const Results r = {take_back(out, out_size(c), gpu),  take_back(state, state_size(c), gpu),
                       take_back(dqkv, qkv_size(c), gpu), take_back(dba, ba_size(c), gpu),
                       take_back(dA_log, Hv, gpu),        take_back(ddt_bias, Hv, gpu)};
    EXPECT(ops_same_bits(first, r.dqkv, qkv_size(c)), "two runs differ, the second by sequence");
    memory_close(&memory);
    void* const arrays[] = {qkv, ba, dout, A_log, dt_bias, starts};
    for (int i = 0; i < 6; i++) {
        gpu_free(arrays[i]);
    }
    return r;
}

// Every element within `tolerance` of the largest; NaN fails.
static void expect_near(const float* got, const float* want, size_t n, double factor, double tolerance,
                        const char* what, const Case* c, DType dtype) {
    double largest = 0, worst = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, factor * fabs((double)want[i]));
        const double error = fabs(got[i] - factor * want[i]);
        worst = error <= worst || isnan(worst) ? worst : error;
    }
    const DeltaSizes s = c->sizes;
    EXPECT(worst <= tolerance * largest,
           "%s of %d x %d, heads %d/%d of %d, %d, documents of %d, %s: wrong by %g of %g", what, s.B, s.T,
           s.Hk, s.Hv, s.dk, s.dv, c->document, dtype_name(dtype), worst, largest);
}

// Queries, keys, T, P, U and the state are rounded to X where they are factors; errors of sums grow
// along the document. The largest of the sums over all tokens may be small.
template <class X> static void check(Case c, const Gpu* gpu) {
    const Inputs x = inputs_of<X>(&c);
    const Results got = on_gpu<X>(&c, &x, gpu), want = on_cpu(&c, &x);
    const double u = DTYPE_OF(X) == DTYPE_FP32 ? 0 : roundoff<X>(), fp32 = 4e-5;
    const DType dtype = DTYPE_OF(X);
    expect_near(got.out, want.out, out_size(&c), 1, 3 * u + fp32, "out", &c, dtype);
    expect_near(got.state, want.state, state_size(&c), 1, 3 * u + fp32, "state", &c, dtype);
    expect_near(got.dqkv, want.dqkv, qkv_size(&c), 1, 6 * u + fp32, "dqkv", &c, dtype);
    expect_near(got.dba, want.dba, ba_size(&c), 1, 6 * u + fp32, "dba", &c, dtype);
    expect_near(got.dA_log, want.dA_log, c.sizes.Hv, 2, 8 * u + fp32, "dA_log", &c, dtype);
    expect_near(got.ddt_bias, want.ddt_bias, c.sizes.Hv, 2, 8 * u + fp32, "ddt_bias", &c, dtype);
    ops_close("delta rule");
}

// The last tokens of both sequences, one by one, against a whole pass of the CPU.
template <class X> static void check_steps(const Gpu* gpu) {
    enum { T = 75, FIRST = 70 };
    const Case c = {{2, T, 2, 4, 24, 40}, 0, 0.1f};
    const size_t row = delta_rule_columns(c.sizes), out_row = delta_rule_out_columns(c.sizes), gates = 8,
                 state = delta_rule_state_size(c.sizes);
    const Inputs x = inputs_of<X>(&c);
    const Results want = on_cpu(&c, &x);
    X *qkv = upload_rounded<X>(x.qkv, qkv_size(&c), 0, gpu),
      *ba = upload_rounded<X>(x.ba, ba_size(&c), 0, gpu), *out = unset<X>(FIRST * out_row, gpu),
      *rows = unset<X>(2 * row, gpu), *two = unset<X>(2 * gates, gpu);
    X *A_log = upload_rounded<X>(x.A_log, 4, 0, gpu), *dt_bias = upload_rounded<X>(x.dt_bias, 4, 0, gpu);
    float* states = unset<float>(2 * state, gpu);
    DeltaSizes sizes = c.sizes;
    Memory memory = memory_on_gpu();
    DeltaScratchGpu<X> scratch;
    sizes.B = 1, sizes.T = FIRST;
    delta_rule_gpu_open(&scratch, &memory, sizes, 0);
    for (int b = 0; b < 2; b++) {
        const DeltaPassGpu<X> pass = {sizes,   NULL, qkv + b * T * row, ba + b * T * gates, A_log,
                                      dt_bias, out,  states + b * state};
        delta_rule_forward(&pass, &scratch, gpu);
    }
    sizes.B = 2, sizes.T = 1;
    for (int t = FIRST; t < T; t++) {
        for (int b = 0; b < 2; b++) {
            gpu_copy(rows + b * row, qkv + (b * T + t) * row, row * sizeof(X), gpu);
            gpu_copy(two + b * gates, ba + (b * T + t) * gates, gates * sizeof(X), gpu);
        }
        const DeltaPassGpu<X> pass = {sizes, NULL, rows, two, A_log, dt_bias, out, states};
        delta_rule_step(&pass, gpu);
        const float* got = download(out, 2 * out_row, gpu);
        for (size_t i = 0; i < 2 * out_row; i++) {
            const float y = want.out[(i / out_row * T + t) * out_row + i % out_row];
            EXPECT_NEAR(got[i], y, 4 * roundoff<X>() + 4e-5, "token %d, element %zu", t, i);
        }
    }
    memory_close(&memory);
    void* const arrays[] = {qkv, ba, out, rows, two, A_log, dt_bias, states};
    for (int i = 0; i < 8; i++) {
        gpu_free(arrays[i]);
    }
    ops_close("steps");
}

template <class X> static void test_type(const Gpu* gpu) {
    check<X>({{1, 1, 1, 1, 8, 8}, 0, 1}, gpu);
    check<X>({{2, 65, 1, 2, 24, 40}, 0, 0.1f}, gpu);
    check<X>({{1, 130, 2, 2, 72, 80}, 50, 0.05f}, gpu);
    check<X>({{1, 70, 1, 1, 128, 128}, 0, 0.1f}, gpu);
    check<X>({{2, 90, 1, 3, 16, 16}, 7, 0.1f}, gpu);
    if (DTYPE_OF(X) != DTYPE_FP32) {
        UNSANITIZED(check<X>({{1, 67, 1, 1, 200, 256}, 0, 0.1f}, gpu));
    }
    check_steps<X>(gpu);
}

TEST_TYPES(delta_rule)
