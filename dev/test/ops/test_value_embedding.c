// test_value_embedding.c -- value embeddings: both passes against reference.h, set and added to.
#include "llmc/ops/embedding.h"
#include "llmc/ops/value_embedding.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

enum { WORDS = 7 };

static void expect_all(const float* got, const double* want, size_t n, double tolerance, const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], tolerance, "%s %zu of %zu", what, i, n);
    }
}

// N tokens, C channels, heads of queries of HS and KV of values.
static void check(int N, int C, int KV, int HS, GradientMode mode) {
    const int G = C < VALUE_GATE_COLUMNS ? C : VALUE_GATE_COLUMNS, K = KV * HS, QKV = 3 * K;
    const size_t n = (size_t)N, rows = n * (size_t)QKV, gates = (size_t)(KV * G), words = (size_t)(WORDS * K);
    float *inp = ops_normal(n * (size_t)C, 1), *gate = ops_normal(gates, 0.3f), *table = ops_normal(words, 1),
          *qkv = ops_normal(rows, 1), *dqkv = ops_normal(rows, 1), *dinp = ops_normal(n * (size_t)C, 1),
          *dgate = mode == GRADIENT_ADD ? ops_normal(gates, 1) : ops_floats(gates),
          *dtable = mode == GRADIENT_ADD ? ops_normal(words, 1) : ops_floats(words),
          *dvalues = ops_floats(n * (size_t)K), *dz = ops_floats(n * (size_t)KV);
    int* tokens = ops_below(n, WORDS);
    const RefValues of = {n, (size_t)C, (size_t)QKV, (size_t)KV, (size_t)HS, (size_t)G};
    double *want = ops_widen(qkv, rows), *wide_inp = ops_widen(inp, n * (size_t)C),
           *wide_gate = ops_widen(gate, gates), *wide_table = ops_widen(table, words),
           *want_dinp = ops_widen(dinp, n * (size_t)C), *want_dgate = ops_doubles(gates),
           *want_dtable = ops_doubles(words);
    for (size_t i = 0; i < words && mode == GRADIENT_ADD; i++) {
        want_dtable[i] = (double)dtable[i];
    }
    for (size_t i = 0; i < gates && mode == GRADIENT_ADD; i++) {
        want_dgate[i] = (double)dgate[i];
    }
    const ValueEmbedding v = {{N, C, QKV, KV, HS, G}, WORDS, inp, gate, table, tokens};
    const EmbeddingSizes sizes = {1, N, K, WORDS, N, {0, 0}, 0};
    value_embedding_forward_cpu(qkv, &v);
    value_embedding_backward_cpu(dvalues, dz, dqkv, &v);
    embedding_backward_cpu(dtable, NULL, dvalues, tokens, sizes, mode, mode);
    value_gate_backward_cpu(dinp, dgate, dz, &v, mode);
    ref_values_forward(want, wide_inp, wide_gate, wide_table, tokens, of);
    ref_values_backward(want_dinp, want_dgate, want_dtable, ops_widen(dqkv, rows), wide_inp, wide_gate,
                        wide_table, tokens, of);
    expect_all(qkv, want, rows, 4e-6, "qkv");
    expect_all(dinp, want_dinp, n * (size_t)C, 4e-6 * HS, "dinp");
    expect_all(dgate, want_dgate, gates, 2e-6 * HS * N, "dgate");
    expect_all(dtable, want_dtable, words, 4e-6 * N, "dtable");
    ops_close("value_embedding");
}

TEST(value_embedding) {
    check(1, 5, 1, 3, GRADIENT_SET), check(29, 40, 2, 5, GRADIENT_ADD);
    check(65, 33, 3, 32, GRADIENT_SET), check(0, 8, 2, 4, GRADIENT_ADD);
}
