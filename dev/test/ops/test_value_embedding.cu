// test_value_embedding.cu -- value embeddings on the GPU against the CPU, all types.
#include "llmc/ops/value_embedding.cuh"
#include "dev/test/lib/gpu_ops.h"

// Results are sums of products, rounded once.
template <class X>
static void expect_near(const float* got, const float* want, size_t n, double scale, const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], 2 * (roundoff<X>() + scale * FLT_EPSILON) * (1 + fabsf(want[i])),
                    "%s, %zu of %zu", what, i, n);
    }
}

// N tokens, C channels, KV heads of values of HS.
template <class X> static void check(int N, int C, int KV, int HS, GradientMode mode, const Gpu* gpu) {
    enum { WORDS = 7 };
    const int G = C < VALUE_GATE_COLUMNS ? C : VALUE_GATE_COLUMNS, K = KV * HS, QKV = 3 * K;
    const size_t n = (size_t)N;
    float *inp = normal<X>(n * C, 1), *gate = normal<X>(KV * G, 0.3f), *table = normal<X>(WORDS * K, 1),
          *qkv = normal<X>(n * QKV, 1), *dqkv = normal<X>(n * QKV, 1), *dinp = normal<X>(n * C, 1),
          *dgate = ops_normal(KV * G, 1), *dvalues = ops_floats(n * K), *dz = ops_floats(n * KV);
    int* tokens = ops_below(n, WORDS);
    X *ginp = upload_rounded<X>(inp, n * C, 0, gpu), *ggate = upload_rounded<X>(gate, KV * G, 0, gpu),
      *gtable = upload_rounded<X>(table, WORDS * K, 0, gpu), *gqkv = upload_rounded<X>(qkv, n * QKV, 0, gpu),
      *gdqkv = upload_rounded<X>(dqkv, n * QKV, 0, gpu), *gdinp = upload_rounded<X>(dinp, n * C, 0, gpu),
      *gdvalues = unset<X>(n * K, gpu);
    float *gdgate = upload_rounded<float>(dgate, KV * G, 0, gpu), *gdz = unset<float>(n * KV, gpu),
          *parts = unset<float>(VALUE_PARTS * KV * G, gpu);
    int* gtokens = upload_ints(tokens, n, gpu);
    const ValueSizes sizes = {N, C, QKV, KV, HS, G};
    const ValueEmbedding v = {sizes, WORDS, inp, gate, table, tokens};
    const ValueEmbeddingGpu<X> g = {sizes, WORDS, ginp, ggate, gtable, gtokens};
    value_embedding_forward_cpu(qkv, &v);
    value_embedding_backward_cpu(dvalues, dz, dqkv, &v);
    value_gate_backward_cpu(dinp, dgate, dz, &v, mode);
    value_embedding_forward(gqkv, g, gpu);
    value_embedding_backward(gdvalues, gdz, (const X*)gdqkv, g, gpu);
    value_gate_backward(gdinp, Gradient{gdgate, DTYPE_FP32}, parts, gdz, g, mode, gpu);
    expect_near<X>(download(gqkv, n * QKV, gpu), qkv, n * QKV, 32, "qkv");
    expect_near<X>(download(gdvalues, n * K, gpu), dvalues, n * K, 32, "dvalues");
    expect_near<float>(download(gdz, n * KV, gpu), dz, n * KV, 8.0 * HS, "dz");
    expect_near<X>(download(gdinp, n * C, gpu), dinp, n * C, 8.0 * HS * KV, "dinp");
    expect_near<float>(download(gdgate, KV * G, gpu), dgate, KV * G, 8.0 * HS * N, "dgate");
    gpu_free(ginp), gpu_free(ggate), gpu_free(gtable), gpu_free(gqkv), gpu_free(gdqkv), gpu_free(gdinp);
    gpu_free(gdvalues), gpu_free(gdgate), gpu_free(gdz), gpu_free(parts), gpu_free(gtokens);
    ops_close("value_embedding");
}

template <class X> static void test_type(const Gpu* gpu) {
    check<X>(1, 5, 1, 3, GRADIENT_SET, gpu), check<X>(29, 40, 2, 5, GRADIENT_ADD, gpu);
    check<X>(130, 33, 3, 40, GRADIENT_SET, gpu);
}

TEST_TYPES(value_embedding)
