// test_latent.c -- heads out of latents: both passes against plain loops, and decoding in the form
// that expands no latent against attention of what it would expand, in fp32 and in 8 bits.
#include <math.h>

#include "llmc/ops/latent.h"
#include "llmc/reference_latent.h"
#include "dev/test/lib/ops.h"

static RefLatent reference(LatentSizes s) {
    return (RefLatent){(size_t)s.N,     (size_t)s.NH,         (size_t)s.HS,  (size_t)s.D,
                       (size_t)s.value, (size_t)s.query_rank, (size_t)s.rank};
}

static void expect_same(const float* got, const double* want, size_t n, const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT(got[i] == (float)want[i], "%s %zu is %g, wanted %g", what, i, (double)got[i], want[i]);
    }
}

// Moves alone are exact; the turning key's gradient is a sum of NH numbers.
static void check(LatentSizes s) {
    const RefLatent r = reference(s);
    const size_t N = (size_t)s.N, Q = (size_t)s.NH * (size_t)s.HS, R = (size_t)latent_first(s),
                 UP = (size_t)latent_up(s), V = (size_t)s.NH * (size_t)s.value;
    float *first = ops_normal(N * R, 1), *q = s.query_rank ? ops_normal(N * Q, 1) : NULL,
          *up = ops_normal(N * UP, 1), *qkv = ops_floats(N * 3 * Q), *atty = ops_normal(N * Q, 1);
    double *first_d = ops_widen(first, N * R), *q_d = q ? ops_widen(q, N * Q) : NULL,
           *up_d = ops_widen(up, N * UP), *want = ops_doubles(N * 3 * Q), *values_d = ops_doubles(N * V);
    latent_heads_cpu(qkv, first, q, up, s);
    ref_latent_heads_forward(want, first_d, q_d, up_d, r);
    expect_same(qkv, want, N * 3 * Q, "qkv");
    float* values = ops_floats(N * V);
    latent_values_cpu(values, atty, s);
    ref_latent_values_forward(values_d, ops_widen(atty, N * Q), r);
    expect_same(values, values_d, N * V, "values");

    float *dqkv = ops_normal(N * 3 * Q, 1), *dfirst = ops_floats(N * R), *dq = q ? ops_floats(N * Q) : NULL,
          *dup = ops_floats(N * UP), *dc = ops_normal(N * (size_t)s.rank, 1),
          *dlatent = ops_normal(N * (size_t)s.query_rank, 1), *datty = ops_floats(N * Q);
    double *dfirst_d = ops_doubles(N * R), *dq_d = q ? ops_doubles(N * Q) : NULL,
           *dup_d = ops_doubles(N * UP), *datty_d = ops_doubles(N * Q);
    latent_heads_backward_cpu(dfirst, dq, dup, dqkv, s);
    latent_join_cpu(dfirst, dlatent, dc, s);
    ref_latent_heads_backward(dfirst_d, dq_d, dup_d, ops_widen(dqkv, N * 3 * Q), r);
    ref_latent_columns_backward(dfirst_d, ops_widen(dc, N * (size_t)s.rank), r, (size_t)latent_queries(s),
                                (size_t)s.rank);
    ref_latent_columns_backward(dfirst_d, ops_widen(dlatent, N * (size_t)s.query_rank), r, 0,
                                (size_t)s.query_rank);
    for (size_t i = 0; i < N * R; i++) {
        EXPECT_NEAR(dfirst[i], dfirst_d[i], 4.0 * s.NH * FLT_EPSILON, "dfirst %zu", i);
    }
    expect_same(dup, dup_d, N * UP, "dup");
    if (dq) {
        expect_same(dq, dq_d, N * Q, "dq");
    }
    latent_values_backward_cpu(datty, values, s);
    ref_latent_values_backward(datty_d, values_d, r);
    expect_same(datty, datty_d, N * Q, "datty");
    float *back_q = ops_floats(N * (size_t)s.query_rank), *back_c = ops_floats(N * (size_t)s.rank);
    latent_split_cpu(back_q, back_c, dfirst, s);
    EXPECT(ops_same_bits(back_q, dlatent, N * (size_t)s.query_rank) &&
               ops_same_bits(back_c, dc, N * (size_t)s.rank),
           "split and join");
    ops_close("latent");
}

TEST(latent) {
    check((LatentSizes){5, 3, 10, 4, 6, 7, 9});
    check((LatentSizes){5, 3, 10, 4, 10, 0, 9});
    check((LatentSizes){2, 1, 3, 2, 1, 1, 1});
    check((LatentSizes){33, 4, 48, 16, 32, 0, 32});
}

// Returns what the query `qkv` (NH heads) sees of `count` tokens kept as `cache` has them.
static void attend(double* values, const float* query, const float* kept, const float* matrix, int count,
                   double scale, LatentSizes s) {
    const int P = s.HS - s.D, row = latent_kept(s);
    for (int h = 0; h < s.NH; h++) {
        const float* of_head = matrix + (size_t)h * (size_t)latent_head_up(s) * (size_t)s.rank;
        double p[32], sum = 0;
        for (int u = 0; u < count; u++) {
            const float *c = kept + u * row, *q = query + h * s.HS;
            double score = 0;
            for (int d = 0; d < s.D; d++) {
                score += (double)q[d] * c[s.rank + d];
            }
            for (int i = 0; i < P * s.rank; i++) { // the key, expanded
                score += (double)q[s.D + i / s.rank] * of_head[i] * c[i % s.rank];
            }
            sum += p[u] = exp(scale * score);
        }
        for (int v = 0; v < s.value; v++) {
            double* value = &values[h * s.value + v];
            *value = 0;
            for (int i = 0; i < count * s.rank; i++) {
                *value += p[i / s.rank] / sum * of_head[(P + v) * s.rank + i % s.rank] *
                          kept[i / s.rank * row + i % s.rank];
            }
        }
    }
}

static void check_cached(LatentSizes s, int is_quantized) {
    enum { T = 19 };
    Memory memory = memory_on_host();
    LatentScratch scratch;
    const size_t Q = (size_t)s.NH * (size_t)s.HS, V = (size_t)s.NH * (size_t)s.value, N = (size_t)s.N,
                 rank = (size_t)s.rank, elements = (size_t)latent_up(s) * rank;
    const float scale = 0.3f;
    LatentCache cache = {ops_floats(N * T * (size_t)latent_kept(s)), T};
    float *matrix = ops_normal(elements, 0.3f), *qkv = ops_normal(N * 3 * Q, 1), *values = ops_floats(N * V);
    QuantizedBlock* blocks =
        is_quantized ? (QuantizedBlock*)(void*)ops_bytes(elements / QUANTIZED_BLOCK * sizeof(QuantizedBlock))
                     : NULL;
    if (blocks) { // then the matrix is what they hold
        quantized_encode(blocks, matrix, elements);
        quantized_decode(matrix, blocks, elements);
    }
    int* positions = ops_below(N, T);
    latent_open(&scratch, &memory, s, T);
    for (int n = 0; n < s.N; n++) {
        const int count = positions[n] + 1;
        float *c = ops_normal((size_t)count * rank, 1), *others = ops_normal((size_t)count * 3 * Q, 1);
        latent_store_cpu(cache, c, others, n, 0, count - 1, s);
        latent_store_cpu(cache, c + (count - 1) * s.rank, others, n, count - 1, 1, s);
    }
    latent_cached_cpu(values, qkv, positions, (LatentWeight){matrix, blocks}, scale, cache, &scratch, s);
    for (size_t n = 0; n < N; n++) {
        double* want = ops_doubles(V);
        attend(want, qkv + n * 3 * Q, cache.data + n * T * (size_t)latent_kept(s), matrix, positions[n] + 1,
               (double)scale, s);
        for (size_t i = 0; i < V; i++) {
            EXPECT_NEAR(values[n * V + i], want[i], 100 * FLT_EPSILON, "token %zu, value %zu", n, i);
        }
    }
    memory_close(&memory);
    ops_close("latents kept");
}

TEST(latent_cached) {
    check_cached((LatentSizes){5, 3, 10, 4, 6, 7, 9}, 0);
    check_cached((LatentSizes){3, 2, 24, 8, 16, 0, 32}, 0);
    check_cached((LatentSizes){3, 2, 24, 8, 16, 0, 32}, 1);
    check_cached((LatentSizes){1, 1, 3, 2, 1, 0, 1}, 0);
}
