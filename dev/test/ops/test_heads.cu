// test_heads.cu -- norms and positions of queries and keys on the GPU against the CPU: both passes
// and all types at awkward sizes, gradients of weights set and added, positions that are given.
#include "llmc/ops/heads.cuh"
#include "llmc/ops/rope.cuh"
#include "dev/test/lib/gpu_ops.h"

// Inputs of both passes, rounded to X, and their sizes.
struct Case {
    HeadsKind kind;
    AttentionSizes sizes;
    int dims; // channels that turn; 0: none
    int* positions;
    float *x, *dout, *weights;
};

// Results; gradients of weights are set for the queries, and added to 2 for the keys.
struct Results {
    float *qkv, *dqkv, *dqnormw, *dknormw;
};

static const float EPS = 1e-6f, ONTO = 2;

// Columns of the weights of queries, and of keys.
static int query_weights(const Case* c) {
    return c->kind == HEADS_ROW_NORM ? attention_queries_size(c->sizes) : c->sizes.HS;
}
static int key_weights(const Case* c) {
    return c->kind == HEADS_ROW_NORM ? attention_keys_size(c->sizes) : c->sizes.HS;
}

// Some cases have weights that count from 1.
static float offset_of(const Case* c) { return c->sizes.T == 33; }

static size_t rows(const Case* c) { return (size_t)c->sizes.B * c->sizes.T; }
// Longrope beyond its original context, with an attention factor where no norm commutes with it.
static RopeSettings settings_of(const Case* c, int T) {
    static RopeFactors factors;
    for (int i = 0; i < ROPE_MAX_FACTORS; i++) {
        factors.near[i] = 1, factors.far[i] = 1 + 0.1f * (float)i;
    }
    const float attention = c->kind == HEADS_UNIT_NORM ? 1.0f : 2.0f; // exact in any type
    return {T, c->sizes.HS, c->dims, 1e4f, {ROPE_LONG, 4, 0, 0, T / 2, attention, 0}, &factors};
}

// Opens the table for all T tokens.
static Rope open_far(Memory* memory, RopeSettings settings, void (*open)(Rope*, Memory*, RopeSettings)) {
    RopeTables tables;
    rope_tables_open(&tables, memory, settings, open);
    return rope_of_pass(&tables, settings.T);
}

static Results on_cpu(const Case* c, int T) {
    const int HS = c->sizes.HS, count = c->sizes.NH + c->sizes.KV, Q = query_weights(c), K = key_weights(c);
    const size_t n = rows(c) * attention_qkv_size(c->sizes);
    const Results r = {ops_copy(c->x, n), ops_copy(c->dout, n), ops_floats(Q), ops_floats(K)};
    Memory memory = memory_on_host();
    Heads heads = {c->kind,      EPS,        offset_of(c),   c->sizes, {NULL, HS},
                   c->positions, c->weights, c->weights + Q, NULL,     NULL};
    heads.raw = ops_floats(rows(c) * count * HS);
    heads.rstd = ops_floats(rows(c) * count);
    if (c->dims > 0) {
        heads.rope = open_far(&memory, settings_of(c, T), rope_open);
    }
    const HeadsGradients d = {r.dqnormw, r.dknormw, GRADIENT_SET,
                              ops_floats((size_t)c->sizes.B * count * HS)};
    heads_forward_cpu(r.qkv, &heads);
    heads_backward_cpu(r.dqkv, &d, r.qkv, &heads);
    for (int i = 0; i < K; i++) {
        r.dknormw[i] += ONTO;
    }
    memory_close(&memory);
    return r;
}

template <class X> static Results on_gpu(const Case* c, int T, const Gpu* gpu) {
    const int HS = c->sizes.HS, count = c->sizes.NH + c->sizes.KV, Q = query_weights(c), K = key_weights(c);
    const size_t n = rows(c) * attention_qkv_size(c->sizes);
    X *qkv = upload_rounded<X>(c->x, n, 0, gpu), *dqkv = upload_rounded<X>(c->dout, n, 0, gpu),
      *weights = upload_rounded<X>(c->weights, Q + K, 0, gpu);
    X* raw = (X*)gpu_alloc(rows(c) * count * HS, sizeof(X), "raw");
    float* rstd = (float*)gpu_alloc(rows(c) * count, sizeof(float), "rstd");
    float* sums = (float*)gpu_alloc(heads_sums(c->sizes), sizeof(float), "sums");
    float* onto = ops_floats(Q);
    for (int i = 0; i < Q; i++) {
        onto[i] = ONTO;
    }
    float *dq = upload_rounded<float>(onto, Q, 0, gpu), *dk = upload_rounded<float>(onto, K, 0, gpu);
    int* positions = NULL;
    Memory memory = memory_on_gpu();
    HeadsGpu<X> heads = {c->kind, EPS,     offset_of(c), c->sizes, {NULL, HS},
                         NULL,    weights, weights + Q,  raw,      rstd};
    if (c->positions) {
        positions = upload_ints(c->positions, rows(c), gpu);
    }
    heads.positions = positions;
    if (c->dims > 0) {
        heads.rope = open_far(&memory, settings_of(c, T), rope_gpu_open);
    }
    const HeadsGradientsGpu set = {{dq, DTYPE_FP32}, {NULL, DTYPE_FP32}, GRADIENT_SET, sums},
                            add = {{NULL, DTYPE_FP32}, {dk, DTYPE_FP32}, GRADIENT_ADD, sums};
    heads_forward(qkv, &heads, gpu);
    X* again = upload_rounded<X>(c->dout, n, 0, gpu);
    heads_backward(again, &set, (const X*)qkv, &heads, gpu);
    heads_backward(dqkv, &add, (const X*)qkv, &heads, gpu);
    const Results r = {take_back(qkv, n, gpu), take_back(dqkv, n, gpu), take_back(dq, Q, gpu),
                       take_back(dk, K, gpu)};
    EXPECT(ops_same_bits(take_back(again, n, gpu), r.dqkv, n), "two runs differ");
    gpu_free(weights);
    gpu_free(raw);
    gpu_free(rstd);
    gpu_free(sums);
    gpu_free(positions);
    memory_close(&memory);
    return r;
}

// Every element within `tolerance`, in units of the largest wanted one; NaN fails.
static void expect_near(const float* got, const float* want, size_t n, double tolerance, const char* what,
                        const Case* c, DType dtype) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        EXPECT(fabs((double)got[i] - want[i]) <= tolerance * largest,
               "%s of kind %d, %d x %d x %d/%d x %d, %s: element %zu is %g, wanted %g +- %g", what, c->kind,
               c->sizes.B, c->sizes.T, c->sizes.NH, c->sizes.KV, c->sizes.HS, dtype_name(dtype), i, got[i],
               want[i], tolerance * largest);
    }
}

// out and dqkv are rounded to X once. In fp32 sums of HS differ by their order. Without weights,
// the GPU reads the rounded output in the backward pass: another rounding. So do a norm of all
// heads and the turn, with a kernel each. Sums for weights are fp32.
template <class X> static void check(Case c, int T, const Gpu* gpu) {
    const size_t n = rows(&c) * attention_qkv_size(c.sizes);
    const double u = roundoff<X>(), fp32 = 16 * FLT_EPSILON,
                 sums = (16 + 2 * sqrt((double)rows(&c) * c.sizes.NH)) * FLT_EPSILON;
    c.x = normal<X>(n, 2);
    c.dout = normal<X>(n, 1);
    c.weights = normal<X>((size_t)query_weights(&c) + key_weights(&c), 1);
    const Results got = on_gpu<X>(&c, T, gpu), want = on_cpu(&c, T);
    expect_near(got.qkv, want.qkv, n, (c.kind == HEADS_ROW_NORM && c.dims > 0 ? 2 : 1) * u + fp32, "out", &c,
                DTYPE_OF(X));
    const int twice = c.kind == HEADS_UNIT_NORM || (c.kind == HEADS_ROW_NORM && c.dims > 0);
    expect_near(got.dqkv, want.dqkv, n, (twice ? 2 : 1) * u + fp32, "dqkv", &c, DTYPE_OF(X));
    if (c.kind == HEADS_NORM || c.kind == HEADS_ROW_NORM) {
        expect_near(got.dqnormw, want.dqnormw, query_weights(&c), (twice ? u : 0) + sums, "dqnormw", &c,
                    DTYPE_OF(X));
        expect_near(got.dknormw, want.dknormw, key_weights(&c), (twice ? u : 0) + sums, "dknormw", &c,
                    DTYPE_OF(X));
    }
    ops_close("heads");
}

template <class X> static void test_type(const Gpu* gpu) {
    // 126, 20 and 250 columns are read in pairs, in all types or in 16 bits
    const int HS[] = {8, 32, 48, 64, 80, 128, 2, 126, 20, 256, 250}, T[] = {1, 31, 33},
              groups[][2] = {{4, 1}, {3, 3}, {6, 2}};
    for (int i = 0; i < 11; i++) {
        const AttentionSizes s =
            attention_sizes(1 + i % 3, T[i % 3], groups[i % 3][0], groups[i % 3][1], HS[i]);
        check<X>({HEADS_PLAIN, s, s.HS}, s.T, gpu);
        check<X>({HEADS_PLAIN, s, s.HS / 4 * 2}, s.T, gpu);
        check<X>({HEADS_NORM, s, s.HS}, s.T, gpu);
        check<X>({HEADS_NORM, s, 0}, s.T, gpu);
        check<X>({HEADS_UNIT_NORM, s, s.HS}, s.T, gpu);
        check<X>({HEADS_ROW_NORM, s, s.HS}, s.T, gpu);
        check<X>({HEADS_ROW_NORM, s, 0}, s.T, gpu);
    }
    int positions[3] = {7, 0, 99};
    check<X>({HEADS_NORM, attention_sizes(3, 1, 4, 2, 64), 64, positions}, 100, gpu);
    // more tokens, heads and columns than a block takes at a time
    check<X>({HEADS_NORM, attention_sizes(1, 70, 6, 5, 64), 64}, 70, gpu);
    check<X>({HEADS_ROW_NORM, attention_sizes(1, 70, 6, 5, 128), 128}, 70, gpu);
}

TEST_TYPES(heads)
