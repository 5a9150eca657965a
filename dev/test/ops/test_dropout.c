// test_dropout.c -- dropout: the masks from single words of Philox, their mean, rows of a part of a
// batch, of cut sequences and of ranks that divide sequences, and residual sums with dropout.
#include "llmc/ops/dropout.h"
#include "llmc/ops/norm.h"
#include "dev/test/lib/ops.h"

enum { PLACE = 7, B = 3, T = 12, C = 70 };
static const TokenChunks whole = {0, 0};

// The factor of a channel at a position of a row, by the formula of dropout.h.
static float wanted(const Dropout* d, int64_t row, int position, int c) {
    const RandBlock random = rand_block(d->batch->key, (uint64_t)d->place << 32 | (uint64_t)row,
                                        (uint64_t)position << 32 | (uint64_t)(c / 4));
    return random.word[c % 4] >= d->threshold ? d->scale : 0;
}

static float* factors_of(const Dropout* d, int R) {
    float* ones = ops_floats((size_t)R * C);
    for (int i = 0; i < R * C; i++) {
        ones[i] = 1;
    }
    dropout_cpu(ones, ones, d, 1, R, C);
    return ones;
}

TEST(masks) {
    const DropoutBatch batch = {dropout_key(5, 3), (int64_t)1 << 31, 1};
    const Dropout d = dropout_open(&batch, 0.25f, PLACE, whole, T, 0);
    const float* m = factors_of(&d, B * T);
    for (int i = 0; i < B * T * C; i++) {
        EXPECT(m[i] == wanted(&d, batch.first + i / C / T, i / C % T, i % C), "element %d: %g", i, m[i]);
    }
    ops_close("masks");
}

// Elements are 0 with the probability of the option, and 1 on average: within four standard
// deviations.
TEST(mean) {
    const float p[] = {0.001f, 0.1f, 0.5f, 0.99f};
    for (int k = 0; k < 4; k++) {
        enum { R = 4000 };
        const DropoutBatch batch = {dropout_key(1, k), 0, 1};
        const Dropout d = dropout_open(&batch, p[k], PLACE, whole, R, 0);
        const float* m = factors_of(&d, R);
        double zeros = 0, sum = 0;
        for (size_t i = 0; i < (size_t)R * C; i++) {
            zeros += m[i] == 0;
            sum += m[i];
        }
        const double n = (double)R * C, deviation = sqrt(n * p[k] * (1 - p[k]));
        EXPECT_NEAR(zeros, n * p[k], 4 * deviation, "zeros of %g", p[k]);
        EXPECT_NEAR(sum, n, 4 * deviation / (1 - p[k]), "sum of %g", p[k]);
        ops_close("mean");
    }
}

// Updates, seeds and places have masks of their own.
TEST(independent) {
    const DropoutBatch batches[] = {
        {dropout_key(1, 0), 0, 1}, {dropout_key(1, 1), 0, 1}, {dropout_key(2, 0), 0, 1}};
    const Dropout first = dropout_open(&batches[0], 0.5f, dropout_of_branch(0, 0), whole, T, 0),
                  others[] = {dropout_open(&batches[1], 0.5f, dropout_of_branch(0, 0), whole, T, 0),
                              dropout_open(&batches[2], 0.5f, dropout_of_branch(0, 0), whole, T, 0),
                              dropout_open(&batches[0], 0.5f, dropout_of_branch(0, 1), whole, T, 0),
                              dropout_open(&batches[0], 0.5f, dropout_of_branch(1, 0), whole, T, 0),
                              dropout_open(&batches[0], 0.5f, dropout_of_embedding(), whole, T, 0),
                              dropout_open(&batches[0], 0.5f, dropout_of_head(0, 0), whole, T, 0)};
    const float* m = factors_of(&first, B * T);
    for (int k = 0; k < 6; k++) {
        const float* other = factors_of(&others[k], B * T);
        int same = 0;
        for (int i = 0; i < B * T * C; i++) {
            same += m[i] == other[i];
        }
        EXPECT_NEAR(same, B * T * C / 2.0, 4 * sqrt(B * T * C / 4.0), "other %d", k);
    }
    ops_close("independent");
}

// Part of a tensor: rows from the middle, the rows of a later micro-batch, rows that are cut into
// shorter sequences, and the tokens of ranks that divide sequences have the masks of the whole.
TEST(parts) {
    const uint64_t key = dropout_key(9, 9);
    const DropoutBatch all = {key, 0, 1}, last = {key, 2, 1}, cut = {key, 0, 3};
    const Dropout of_all = dropout_open(&all, 0.5f, PLACE, whole, T, 0),
                  middle = dropout_open(&all, 0.5f, PLACE, whole, T, 5),
                  of_last = dropout_open(&last, 0.5f, PLACE, whole, T, 0),
                  of_cut = dropout_open(&cut, 0.5f, PLACE, whole, T / 3, 0);
    const float* m = factors_of(&of_all, B * T);
    EXPECT(ops_same_bits(factors_of(&middle, B * T - 5), m + 5 * C, (B * T - 5) * C), "middle");
    EXPECT(ops_same_bits(factors_of(&of_last, T), m + 2 * T * C, T * C), "last");
    EXPECT(ops_same_bits(factors_of(&of_cut, B * T), m, B * T * C), "cut");
    for (int rank = 0; rank < 3; rank++) {
        const TokenChunks chunks = {2, rank};
        const Dropout of_rank = dropout_open(&all, 0.5f, PLACE, chunks, T / 3, 0);
        const float* own = factors_of(&of_rank, B * T / 3);
        for (int n = 0; n < B * T / 3; n++) {
            const int from = n / (T / 3) * T + token_chunks_position(chunks, n % (T / 3), T / 3);
            EXPECT(ops_same_bits(own + n * C, m + from * C, C), "rank %d, token %d", rank, n);
        }
    }
    ops_close("parts");
}

// A residual sum is left + m factor right, or left + m norm of right, alone and before a norm.
TEST(sums) {
    enum { N = B * T };
    const DropoutBatch batch = {dropout_key(4, 4), 0, 1};
    const Dropout d = dropout_open(&batch, 0.4f, PLACE, whole, T, 0);
    const float *left = ops_normal(N * C, 1), *right = ops_normal(N * C, 1), *weight = ops_normal(C, 1),
                *m = factors_of(&d, N);
    float *normed = ops_floats(N * C), *sum = ops_floats(N * C), *fused = ops_floats(N * C),
          *out = ops_floats(N * C), *alone = ops_floats(N * C);
    const Norm norm = {NORM_RMS, 1e-5f, 1, weight, NULL, NULL, ops_floats(N), N, C},
               next = {NORM_RMS, 1e-5f, 1, weight, NULL, NULL, ops_floats(N), N, C};
    norm_forward_cpu(normed, right, &norm);
    for (int has_norm = 0; has_norm < 2; has_norm++) {
        const ResidualSum of = {left, right, 0.5f, has_norm ? &norm : NULL, d};
        residual_sum_cpu(sum, &of, N, C);
        residual_norm_forward_cpu(fused, out, &of, &next);
        norm_forward_cpu(alone, sum, &next);
        for (int i = 0; i < N * C; i++) {
            const double added = (has_norm ? normed[i] : 0.5 * right[i]) * (double)m[i];
            EXPECT_NEAR(sum[i], left[i] + added, 2 * FLT_EPSILON * (fabs(left[i]) + fabs(added)),
                        "element %d", i);
        }
        EXPECT(ops_same_bits(fused, sum, N * C), "fused sum");
        EXPECT(ops_same_bits(out, alone, N * C), "its norm");
    }
    ops_close("sums");
}

TEST(none) {
    const DropoutBatch batch = {dropout_key(1, 1), 0, 1};
    const Dropout of_zero = dropout_open(&batch, 0, PLACE, whole, T, 0),
                  of_evaluation = dropout_open(NULL, 0.5f, PLACE, whole, T, 0);
    EXPECT(!dropout_is_on(&of_zero) && !dropout_is_on(&of_evaluation), "none");
}
