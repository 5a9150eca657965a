/*
attention_ranks.h -- a test of attention whose sequences are divided among ranks (token_chunks.h):
out, lse and dq have the bits of the call on whole sequences, and dk and dv of all ranks add up to
its gradients.
*/
#ifndef DEV_ATTENTION_RANKS_H
#define DEV_ATTENTION_RANKS_H

#include "llmc/ops/attention.h"
#include "dev/test/lib/ops.h"

// Inputs of the tokens of a rank; kv (B, W, 2K) of all, or NULL for whole sequences.
typedef struct {
    const float *qkv, *kv, *dout;
    const int* starts;
} AttentionInputs;

typedef struct {
    float *out, *lse, *dqkv, *dkv;
} AttentionResults;

// The code under test: both passes. `context` is its own.
typedef AttentionResults (*AttentionRun)(AttentionSizes sizes, AttentionInputs inputs, const void* context);

// Returns rows of a rank, `row` words each, of (B, W) rows.
static inline void* attention_rows_of(AttentionSizes rank, const void* all, size_t row) {
    const int W = attention_keys(rank), T = rank.T;
    float* rows = ops_floats((size_t)rank.B * T * row);
    for (int n = 0; n < rank.B * T; n++) {
        const size_t from = (size_t)(n / T) * W + token_chunks_position(rank.chunks, n % T, T);
        memcpy(rows + n * row, (const float*)all + from * row, row * sizeof(float));
    }
    return rows;
}

// Returns the keys and values of (N, QKV) rows, as (N, 2K).
static inline float* attention_gathered(AttentionSizes sizes, const float* qkv, size_t N) {
    const size_t Q = (size_t)attention_queries_size(sizes), QKV = (size_t)attention_qkv_size(sizes);
    float* kv = ops_floats(N * (QKV - Q));
    for (size_t n = 0; n < N; n++) {
        memcpy(kv + n * (QKV - Q), qkv + n * QKV + Q, (QKV - Q) * sizeof(float));
    }
    return kv;
}

// Compares the queries of a rank.
static inline void expect_rank_queries(AttentionSizes rank, AttentionResults got, AttentionResults whole,
                                       const char* what) {
    const int T = rank.T, W = attention_keys(rank), NH = rank.NH;
    const size_t Q = (size_t)attention_queries_size(rank), QKV = (size_t)attention_qkv_size(rank);
    const float* out = (const float*)attention_rows_of(rank, whole.out, Q);
    const float* dqkv = (const float*)attention_rows_of(rank, whole.dqkv, QKV);
    int other_dq = 0, other_lse = 0;
    for (int n = 0; n < rank.B * T; n++) {
        other_dq += !ops_same_bits(got.dqkv + n * QKV, dqkv + n * QKV, Q);
    }
    for (int i = 0; i < rank.B * NH * T; i++) {
        const int position = token_chunks_position(rank.chunks, i % T, T);
        other_lse += !ops_same_bits(got.lse + i, whole.lse + (size_t)(i / T) * W + position, 1);
    }
    EXPECT(ops_same_bits(got.out, out, (size_t)rank.B * T * Q), "%s: out of rank %d", what, rank.chunks.rank);
    EXPECT(other_lse == 0, "%s: %d lse of rank %d", what, other_lse, rank.chunks.rank);
    EXPECT(other_dq == 0, "%s: dq of %d tokens of rank %d", what, other_dq, rank.chunks.rank);
}

// Divides whole sequences among `ranks`. Errors of dk and dv are measured against the largest. They
// are sums in fp32 in another order, over the queries of a group, and each part is rounded once
// more, by up to `rounding`.
static inline void expect_attention_divided(AttentionSizes sizes, AttentionInputs inputs, int ranks,
                                            double rounding, AttentionRun run, const void* context) {
    const size_t N = (size_t)sizes.B * sizes.T, Q = (size_t)attention_queries_size(sizes),
                 QKV = (size_t)attention_qkv_size(sizes), keys = N * (QKV - Q);
    const double tolerance = sqrt((double)sizes.T * attention_group(sizes)) * FLT_EPSILON + ranks * rounding;
    const AttentionResults whole = run(sizes, inputs, context);
    const float *kv = attention_gathered(sizes, inputs.qkv, N),
                *wanted = attention_gathered(sizes, whole.dqkv, N);
    double *sums = ops_doubles(keys), largest = 0, worst = 0;
    char what[96];
    snprintf(what, sizeof(what), "%d x %d x %d/%d x %d among %d", sizes.B, sizes.T, sizes.NH, sizes.KV,
             sizes.HS, ranks);
    for (int q = 0; q < ranks; q++) {
        AttentionSizes rank = sizes;
        rank.T = sizes.T / ranks;
        rank.chunks = (TokenChunks){ranks - 1, q};
        const AttentionInputs part = {(const float*)attention_rows_of(rank, inputs.qkv, QKV), kv,
                                      (const float*)attention_rows_of(rank, inputs.dout, Q), inputs.starts};
        const AttentionResults got = run(rank, part, context);
        expect_rank_queries(rank, got, whole, what);
        for (size_t i = 0; i < keys; i++) {
            sums[i] += got.dkv[i];
        }
    }
    for (size_t i = 0; i < keys; i++) {
        largest = fmax(largest, fabs(wanted[i]));
    }
    for (size_t i = 0; i < keys; i++) {
        const double error = fabs(sums[i] - wanted[i]) / largest;
        worst = error <= worst ? worst : error; // NaN stays
    }
    EXPECT(worst <= tolerance, "%s: dk and dv differ by %g of the largest, wanted %g", what, worst,
           tolerance);
    ops_close(what);
}

#endif
