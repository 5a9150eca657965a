// test_heads.cu -- norms and positions of queries and keys on the GPU against the CPU: both passes
// and all types at awkward sizes, gradients of weights set and added, positions that are given.
#include "llmc/ops/heads.cuh"
#include "llmc/ops/rope.cuh"
#include "dev/test/lib/ops.h"

template <class X> static X* upload(const float* x, size_t n, const Gpu* gpu) {
    X* host = (X*)check_alloc(n, sizeof(X), "test");
    X* device = (X*)gpu_alloc(n, sizeof(X), "test");
    for (size_t i = 0; i < n; i++) {
        host[i] = from_float<X>(x[i]);
    }
    CUDA_CHECK(cudaMemcpyAsync(device, host, n * sizeof(X), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(host);
    return device;
}

template <class X> static float* download(X* device, size_t n, const Gpu* gpu) { // and frees it
    float* x = ops_floats(n);
    X* host = (X*)check_alloc(n, sizeof(X), "test");
    CUDA_CHECK(cudaMemcpyAsync(host, device, n * sizeof(X), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (size_t i = 0; i < n; i++) {
        x[i] = to_float(host[i]);
    }
    free(host);
    gpu_free(device);
    return x;
}

template <class X> static float* normal(size_t n, float scale) { // random numbers that X can hold
    float* x = ops_normal(n, scale);
    for (size_t i = 0; i < n; i++) {
        x[i] = to_float(from_float<X>(x[i]));
    }
    return x;
}

// Unit roundoff: the largest relative error of rounding to X.
template <class X> static double roundoff(void) {
    return sizeof(X) == 4 ? 0x1p-24 : DTYPE_OF(X) == DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
}

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

static size_t rows(const Case* c) { return (size_t)c->sizes.B * c->sizes.T; }
static RopeSettings settings_of(const Case* c, int T) {
    return {T, c->sizes.HS, c->dims, 1e4f, {ROPE_PLAIN, 0, 0, 0, 0}};
}

static Results on_cpu(const Case* c, int T) {
    const int HS = c->sizes.HS, count = c->sizes.NH + c->sizes.KV;
    const size_t n = rows(c) * attention_qkv_size(c->sizes);
    const Results r = {ops_copy(c->x, n), ops_copy(c->dout, n), ops_floats(HS), ops_floats(HS)};
    Memory memory = memory_on_host();
    Heads heads = {c->kind, EPS, c->sizes, {NULL, HS}, c->positions, c->weights, c->weights + HS, NULL, NULL};
    heads.raw = ops_floats(rows(c) * count * HS);
    heads.rstd = ops_floats(rows(c) * count);
    if (c->dims > 0) {
        rope_open(&heads.rope, &memory, settings_of(c, T));
    }
    const HeadsGradients d = {r.dqnormw, r.dknormw, GRADIENT_SET,
                              ops_floats((size_t)c->sizes.B * count * HS)};
    heads_forward_cpu(r.qkv, &heads);
    heads_backward_cpu(r.dqkv, &d, r.qkv, &heads);
    for (int i = 0; i < HS; i++) {
        r.dknormw[i] += ONTO;
    }
    memory_close(&memory);
    return r;
}

template <class X> static Results on_gpu(const Case* c, int T, const Gpu* gpu) {
    const int HS = c->sizes.HS, count = c->sizes.NH + c->sizes.KV;
    const size_t n = rows(c) * attention_qkv_size(c->sizes);
    X *qkv = upload<X>(c->x, n, gpu), *dqkv = upload<X>(c->dout, n, gpu),
      *weights = upload<X>(c->weights, 2 * HS, gpu);
    X* raw = (X*)gpu_alloc(rows(c) * count * HS, sizeof(X), "raw");
    float* rstd = (float*)gpu_alloc(rows(c) * count, sizeof(float), "rstd");
    float* sums = (float*)gpu_alloc(heads_sums(c->sizes), sizeof(float), "sums");
    float* onto = ops_floats(HS);
    for (int i = 0; i < HS; i++) {
        onto[i] = ONTO;
    }
    float *dq = upload<float>(onto, HS, gpu), *dk = upload<float>(onto, HS, gpu);
    int* positions = NULL;
    Memory memory = memory_on_gpu();
    HeadsGpu<X> heads = {c->kind, EPS, c->sizes, {NULL, HS}, NULL, weights, weights + HS, raw, rstd};
    if (c->positions) {
        positions = (int*)gpu_alloc(rows(c), sizeof(int), "positions");
        CUDA_CHECK(cudaMemcpy(positions, c->positions, rows(c) * sizeof(int), cudaMemcpyHostToDevice));
    }
    heads.positions = positions;
    if (c->dims > 0) {
        rope_gpu_open(&heads.rope, &memory, settings_of(c, T));
    }
    const HeadsGradientsGpu set = {{dq, DTYPE_FP32}, {NULL, DTYPE_FP32}, GRADIENT_SET, sums},
                            add = {{NULL, DTYPE_FP32}, {dk, DTYPE_FP32}, GRADIENT_ADD, sums};
    heads_forward(qkv, &heads, gpu);
    X* again = upload<X>(c->dout, n, gpu);
    heads_backward(again, &set, (const X*)qkv, &heads, gpu);
    heads_backward(dqkv, &add, (const X*)qkv, &heads, gpu);
    const Results r = {download(qkv, n, gpu), download(dqkv, n, gpu), download(dq, HS, gpu),
                       download(dk, HS, gpu)};
    EXPECT(ops_same_bits(download(again, n, gpu), r.dqkv, n), "two runs differ");
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
// the GPU reads the rounded output in the backward pass: another rounding. Sums for weights are
// fp32.
template <class X> static void check(Case c, int T, const Gpu* gpu) {
    const size_t n = rows(&c) * attention_qkv_size(c.sizes);
    const double u = roundoff<X>(), fp32 = 16 * FLT_EPSILON,
                 sums = (16 + 2 * sqrt((double)rows(&c) * c.sizes.NH)) * FLT_EPSILON;
    c.x = normal<X>(n, 2);
    c.dout = normal<X>(n, 1);
    c.weights = normal<X>(2 * c.sizes.HS, 1);
    const Results got = on_gpu<X>(&c, T, gpu), want = on_cpu(&c, T);
    expect_near(got.qkv, want.qkv, n, u + fp32, "out", &c, DTYPE_OF(X));
    expect_near(got.dqkv, want.dqkv, n, (c.kind == HEADS_UNIT_NORM ? 2 : 1) * u + fp32, "dqkv", &c,
                DTYPE_OF(X));
    if (c.kind == HEADS_NORM) {
        expect_near(got.dqnormw, want.dqnormw, c.sizes.HS, sums, "dqnormw", &c, DTYPE_OF(X));
        expect_near(got.dknormw, want.dknormw, c.sizes.HS, sums, "dknormw", &c, DTYPE_OF(X));
    }
    ops_close("heads");
}

template <class X> static void test_type(const Gpu* gpu) {
    const int HS[] = {8, 32, 48, 64, 80, 128, 2}, T[] = {1, 31, 33}, groups[][2] = {{4, 1}, {3, 3}, {6, 2}};
    for (int i = 0; i < 7; i++) {
        const AttentionSizes s =
            attention_sizes(1 + i % 3, T[i % 3], groups[i % 3][0], groups[i % 3][1], HS[i]);
        check<X>({HEADS_PLAIN, s, s.HS}, s.T, gpu);
        check<X>({HEADS_PLAIN, s, s.HS / 4 * 2}, s.T, gpu);
        check<X>({HEADS_NORM, s, s.HS}, s.T, gpu);
        check<X>({HEADS_NORM, s, 0}, s.T, gpu);
        check<X>({HEADS_UNIT_NORM, s, s.HS}, s.T, gpu);
    }
    int positions[3] = {7, 0, 99};
    check<X>({HEADS_NORM, attention_sizes(3, 1, 4, 2, 64), 64, positions}, 100, gpu);
}

TEST(heads) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_type<float>(&gpu);
    test_type<bf16>(&gpu);
    UNSANITIZED(test_type<fp16>(&gpu));
    gpu_close(&gpu);
}
