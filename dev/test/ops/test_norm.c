// test_norm.c -- every kind of norm, and the residual sum: both passes, gradients set and added;
// the norm of the embedding in place.
#include <stddef.h>

#include "llmc/base/vec.h"
#include "llmc/base/threads.h"
#include "llmc/ops/norm.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

// Weights that the kind lacks are ones, its biases and means zeros.
typedef struct {
    NormKind kind;
    int N, C;
    double *inp, *weight, *bias, *dout; // inputs
    double *out, *mean, *rstd, *dinp, *dweight, *dbias;
} NormCase;

static const char* const kinds[] = {"layer", "rms", "rms plus", "rms alone"};
static int has_mean(NormKind kind) { return norm_parts(kind).has_mean; }
static int has_bias(NormKind kind) { return norm_parts(kind).has_bias; }
static int has_weight(NormKind kind) { return norm_parts(kind).has_weight; }

// Returns a factor of the output, and the most that multiplies column c of a normalized row.
static float factor_of(NormKind kind) { return kind == NORM_RMS_PLUS ? 0.375f : 1; }
static double weight_size(NormKind kind, double weight) {
    return factor_of(kind) * (norm_parts(kind).offset + fabs(weight));
}

// Returns random weights and biases; ones and zeros where the kind has none.
static float* random_weight(NormKind kind, int C) {
    float* weight = ops_normal(C, 1);
    for (int c = 0; c < C && !has_weight(kind); c++) {
        weight[c] = 1;
    }
    return weight;
}
static float* random_bias(NormKind kind, int C) { return ops_normal(C, has_bias(kind)); }

static Norm norm_of(NormKind kind, const float* weight, const float* bias, float* mean, float* rstd, int N,
                    int C) {
    return (Norm){kind,
                  NORM_EPS,
                  factor_of(kind),
                  has_weight(kind) ? weight : NULL,
                  has_bias(kind) ? bias : NULL,
                  has_mean(kind) ? mean : NULL,
                  rstd,
                  N,
                  C};
}

static NormCase norm_case_open(NormKind kind, int N, int C, const float* inp, const float* weight,
                               const float* bias, const float* dout) {
    const size_t nc = (size_t)N * C;
    const NormCase l = {kind,
                        N,
                        C,
                        ops_widen(inp, nc),
                        ops_widen(weight, C),
                        ops_widen(bias, C),
                        ops_widen(dout, nc),
                        ops_doubles(nc),
                        ops_doubles(N),
                        ops_doubles(N),
                        ops_doubles(nc),
                        ops_doubles(C),
                        ops_doubles(C)};
    return l;
}

// How far roundings of one epsilon can move each result. x - mean is known to epsilon (|x| +
// |mean|), and through its square this moves rstd; the rest are the absolute values of the terms.
typedef struct {
    double *mean, *rstd, *out, *dinp, *dweight, *dbias;
} Magnitude;

static void forward_magnitude(const NormCase* l, const Magnitude* m) {
    for (int n = 0; n < l->N; n++) {
        const double *x = l->inp + n * l->C, mean = l->mean[n], rstd = l->rstd[n];
        double size = 0, moved = 0;
        for (int c = 0; c < l->C; c++) {
            size += has_mean(l->kind) ? fabs(x[c]) / l->C : 0;
            moved += fabs(x[c] - mean) * (fabs(x[c]) + fabs(mean)) / l->C;
        }
        m->mean[n] = size;
        m->rstd[n] = rstd * (1 + rstd * rstd * moved);
        for (int c = 0; c < l->C; c++) {
            const double centered = (fabs(x[c]) + size) * rstd +
                                    // `size` bounds the error of the mean
                                    fabs(x[c] - mean) * m->rstd[n];
            m->out[n * l->C + c] = weight_size(l->kind, l->weight[c]) * centered + fabs(l->bias[c]);
        }
    }
}

static void backward_magnitude(const NormCase* l, const Magnitude* m) {
    for (int n = 0; n < l->N; n++) {
        const double *x = l->inp + n * l->C, *d = l->dout + n * l->C, rstd = l->rstd[n];
        double sum = 0, dot = 0;
        for (int c = 0; c < l->C; c++) {
            const double norm = (fabs(x[c]) + fabs(l->mean[n])) * rstd,
                         g = fabs(d[c]) * weight_size(l->kind, l->weight[c]);
            sum += g / l->C;
            dot += g * norm / l->C;
            m->dweight[c] += fabs(d[c]) * norm;
            m->dbias[c] += fabs(d[c]);
        }
        for (int c = 0; c < l->C; c++) {
            const double norm = (fabs(x[c]) + fabs(l->mean[n])) * rstd,
                         g = fabs(d[c]) * weight_size(l->kind, l->weight[c]);
            m->dinp[n * l->C + c] = rstd * (g + sum + norm * dot);
        }
    }
}

static Magnitude magnitude_open(const NormCase* l) {
    const Magnitude m = {ops_doubles(l->N),
                         ops_doubles(l->N),
                         ops_doubles((size_t)l->N * l->C),
                         ops_doubles((size_t)l->N * l->C),
                         ops_doubles(l->C),
                         ops_doubles(l->C)};
    return m;
}

// Roundings of half an epsilon each; the factor is for the few that meet in one result, and for the
// worst of many results.
static const double limit = 4;

static void check_forward(const NormCase* l, const Magnitude* m, const float* out, const float* mean,
                          const float* rstd, const char* what) {
    const int N = l->N, C = l->C;
    if (has_mean(l->kind)) {
        EXPECT_NEAR(ops_error(mean, l->mean, m->mean, N), 0, limit, "mean of %d x %d, %s", N, C, what);
    }
    EXPECT_NEAR(ops_error(rstd, l->rstd, m->rstd, N), 0, limit, "rstd of %d x %d, %s", N, C, what);
    EXPECT_NEAR(ops_error(out, l->out, m->out, (size_t)N * C), 0, limit, "out of %d x %d, %s", N, C, what);
}

// `offset` is the mean of the input: a variance computed as mean square minus squared mean would
// drown in it.
static void test_size(NormKind kind, int N, int C, float offset) {
    const size_t nc = (size_t)N * C;
    float *left = ops_normal(nc, 1), *right = ops_normal(nc, 1), *inp = ops_floats(nc),
          *inp_again = ops_floats(nc);
    float *weight = random_weight(kind, C), *bias = random_bias(kind, C), *dout = ops_normal(nc, 1);
    float *out = ops_floats(nc), *mean = ops_normal(N, 0), *rstd = ops_floats(N);
    for (size_t i = 0; i < nc; i++) {
        left[i] += offset;
    }
    residual_forward_cpu(inp, left, right, nc);
    for (size_t i = 0; i < nc; i++) {
        EXPECT(inp[i] == left[i] + right[i], "residual sum, element %zu of %zu", i, nc);
    }
    const NormCase l = norm_case_open(kind, N, C, inp, weight, bias, dout);
    const Magnitude m = magnitude_open(&l);
    const RefNorm ref = {
        kind, l.weight, l.bias, has_mean(kind) ? l.mean : NULL, l.rstd, NORM_EPS, factor_of(kind), N, C};
    ref_norm_forward(l.out, l.inp, ref);
    forward_magnitude(&l, &m);
    const Norm norm = norm_of(kind, weight, bias, mean, rstd, N, C);
    norm_forward_cpu(out, inp, &norm);
    check_forward(&l, &m, out, mean, rstd, "alone");

    float *out_again = ops_floats(nc), *mean_again = ops_floats(N), *rstd_again = ops_floats(N);
    const Norm again = norm_of(kind, weight, bias, mean_again, rstd_again, N, C);
    const ResidualSum sum = {left, right, 1, NULL};
    residual_norm_forward_cpu(inp_again, out_again, &sum, &again);
    EXPECT(ops_same_bits(inp, inp_again, nc), "residual sum in one pass, %d x %d", N, C);
    check_forward(&l, &m, out_again, mean_again, rstd_again, "after the residual sum");

    // the backward pass is judged by the mean and rstd that it was given
    for (int n = 0; n < N; n++) {
        l.mean[n] = mean[n];
        l.rstd[n] = rstd[n];
    }
    ref_norm_backward(l.dinp, l.dweight, l.dbias, l.dout, l.inp, ref);
    backward_magnitude(&l, &m);
    float *dinp = ops_normal(nc, 1), *dweight = ops_floats(C), *dbias = ops_floats(C);
    const double* held = ops_widen(dinp, nc); // the gradient of the residual stream, to be added to
    norm_backward_cpu(dinp, dweight, dbias, dout, inp, &norm, GRADIENT_ADD, GRADIENT_SET);
    const double *want = ops_sum(held, l.dinp, nc), *size = ops_sum(ops_absolute(held, nc), m.dinp, nc);
    EXPECT_NEAR(ops_error(dinp, want, size, nc), 0, limit, "dinp added, %d x %d", N, C);
    EXPECT_NEAR(ops_error(dweight, l.dweight, m.dweight, C), 0, limit, "dweight of %d x %d", N, C);
    EXPECT_NEAR(ops_error(dbias, l.dbias, m.dbias, C), 0, limit, "dbias of %d x %d", N, C);

    float* dinp_set = ops_floats(nc);
    for (size_t i = 0; i < nc; i++) {
        dinp_set[i] = NAN; // must not be read
    }
    norm_backward_cpu(dinp_set, dweight, dbias, dout, inp, &norm, GRADIENT_SET, GRADIENT_SET);
    EXPECT_NEAR(ops_error(dinp_set, l.dinp, m.dinp, nc), 0, limit, "dinp set, %d x %d", N, C);

    const Norm same = norm_of(kind, ops_copy(weight, C), bias, mean, rstd, N, C);
    norm_backward_cpu(dinp, weight, bias, dout, inp, &same, GRADIENT_ADD, GRADIENT_ADD);
    EXPECT_NEAR(ops_error(dinp, ops_sum(want, l.dinp, nc), ops_sum(size, m.dinp, nc), nc), 0, limit,
                "dinp added twice, %d x %d", N, C);
    EXPECT_NEAR(ops_error(weight, ops_sum(l.weight, l.dweight, C),
                          ops_sum(ops_absolute(l.weight, C), m.dweight, C), C),
                0, limit, "dweight added, %d x %d", N, C);
    EXPECT_NEAR(ops_error(bias, ops_sum(l.bias, l.dbias, C), ops_sum(ops_absolute(l.bias, C), m.dbias, C), C),
                0, limit, "dbias added, %d x %d", N, C);
    ops_close("sizes");
}

TEST(sizes) {
    for (int k = 0; k < NORM_KINDS_COUNT; k++) {
        const NormKind kind = (NormKind)k;
        // 4 LANES columns are one thread's share of dweight
        for (int C = 1; C <= 4 * LANES + 1; C++) {
            test_size(kind, 1 + C % 5, C, 0);
        }
        const int N[] = {1, 31, 33}, C[] = {31, 33, 768, 1600};
        for (int i = 0; i < 3; i++) {
            for (int j = 0; j < 4; j++) {
                test_size(kind, N[i], C[j], 0);
            }
        }
        test_size(kind, 3, 768, 1000);
    }
}

// In place, RMS_ALONE has the bits of norm_forward. The backward pass computes from the result; it
// is judged by the result that it was given.
static void test_unit(int N, int C) {
    const size_t nc = (size_t)N * C;
    float *x = ops_normal(nc, 3), *out = ops_floats(nc), *rstd = ops_floats(N), *rstd_again = ops_floats(N);
    float* dx = ops_normal(nc, 1);
    const Norm norm = norm_of(NORM_RMS_ALONE, NULL, NULL, NULL, rstd, N, C);
    norm_forward_cpu(out, x, &norm);
    norm_unit_forward_cpu(x, rstd_again, N, C, NORM_EPS);
    EXPECT(ops_same_bits(x, out, nc) && ops_same_bits(rstd, rstd_again, N), "in place, %d x %d", N, C);
    double *want = ops_doubles(nc), *magnitude = ops_doubles(nc);
    for (int n = 0; n < N; n++) {
        double mean = 0, size = 0;
        for (int c = 0; c < C; c++) {
            mean += (double)dx[n * C + c] * out[n * C + c] / C;
            size += fabs((double)dx[n * C + c] * out[n * C + c]) / C;
        }
        for (int c = 0; c < C; c++) {
            const int i = n * C + c;
            want[i] = rstd[n] * (dx[i] - out[i] * mean);
            magnitude[i] = rstd[n] * (fabs(dx[i]) + fabs(out[i]) * size);
        }
    }
    norm_unit_backward_cpu(dx, x, rstd, N, C);
    EXPECT_NEAR(ops_error(dx, want, magnitude, nc), 0, limit, "dx in place, %d x %d", N, C);
    ops_close("unit");
}

TEST(unit) {
    const int C[] = {1, 31, 33, 768};
    for (int i = 0; i < 4; i++) {
        test_unit(1, C[i]);
        test_unit(33, C[i]);
    }
}

// A row of equal numbers has variance 0: rstd = 1 / sqrt(1e-5), out = bias.
TEST(constant_row) {
    enum { C = 33 };
    float *inp = ops_normal(C, 0), *weight = ops_normal(C, 1), *bias = ops_normal(C, 1);
    float *out = ops_floats(C), *mean = ops_floats(1), *rstd = ops_floats(1);
    for (int c = 0; c < C; c++) {
        inp[c] = -3;
    }
    const Norm norm = {NORM_LAYER, NORM_EPS, 1, weight, bias, mean, rstd, 1, C};
    norm_forward_cpu(out, inp, &norm);
    EXPECT(mean[0] == -3, "mean %g", mean[0]);
    EXPECT_NEAR(rstd[0], 1 / sqrt(1e-5), 1e-6 * 317, "rstd");
    EXPECT(ops_same_bits(out, bias, C), "out is not the bias");
    ops_close("constant row");
}

// Sums with a factor, and with a norm of the right side, alone and before another norm, have the
// bits of their parts.
static void test_sums(NormKind kind, int N, int C) {
    const size_t nc = (size_t)N * C;
    float *left = ops_normal(nc, 1), *right = ops_normal(nc, 1), *weight = random_weight(kind, C),
          *bias = random_bias(kind, C), *mean = ops_floats(N), *rstd = ops_floats(N),
          *normed = ops_floats(nc), *want = ops_floats(nc), *sum = ops_floats(nc), *again = ops_floats(nc),
          *out = ops_floats(nc), *want_out = ops_floats(nc);
    const Norm norm = norm_of(kind, weight, bias, mean, rstd, N, C);
    const ResidualSum after = {left, right, 1, &norm}, scaled = {left, right, 0.22f, NULL};
    norm_forward_cpu(normed, right, &norm);
    residual_forward_cpu(want, left, normed, nc);
    residual_sum_cpu(sum, &after, N, C);
    EXPECT(ops_same_bits(sum, want, nc), "sum with a norm, %s", kinds[kind]);
    residual_norm_forward_cpu(again, out, &after, &norm);
    norm_forward_cpu(want_out, want, &norm);
    EXPECT(ops_same_bits(again, want, nc) && ops_same_bits(out, want_out, nc), "norm of it, %s", kinds[kind]);
    residual_sum_cpu(sum, &scaled, N, C);
    residual_norm_forward_cpu(again, out, &scaled, &norm);
    EXPECT(ops_same_bits(sum, again, nc), "sum with a factor, %s", kinds[kind]);
    residual_scale_cpu(right, right, 0.22f, nc);
    for (size_t i = 0; i < nc; i++) {
        EXPECT_NEAR(sum[i], (double)left[i] + right[i], 4e-7 * (fabsf(left[i]) + fabsf(right[i])), "%zu", i);
    }
    ops_close("sums");
}

TEST(sums) {
    for (int k = 0; k < NORM_KINDS_COUNT; k++) {
        test_sums((NormKind)k, 3, 33);
        test_sums((NormKind)k, 33, 768);
    }
}

static void test_threads(NormKind kind) {
    enum { N = 33, C = 769 };
    float *left = ops_normal(N * C, 1), *right = ops_normal(N * C, 1), *dout = ops_normal(N * C, 1);
    float *weight = random_weight(kind, C), *bias = random_bias(kind, C), *held = ops_normal(N * C, 1);
    float *inp[4], *sum[4], *out[4], *dinp[4], *dweight[4], *dbias[4], *mean = ops_floats(N),
                                                                       *rstd = ops_floats(N);
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        inp[t] = ops_floats(N * C), sum[t] = ops_floats(N * C), out[t] = ops_floats(N * C);
        dinp[t] = ops_copy(held, N * C), dweight[t] = ops_floats(C), dbias[t] = ops_floats(C);
        residual_forward_cpu(sum[t], left, right, N * C);
        const Norm norm = norm_of(kind, weight, bias, mean, rstd, N, C);
        const ResidualSum of = {left, right, 1, NULL};
        residual_norm_forward_cpu(inp[t], out[t], &of, &norm);
        norm_backward_cpu(dinp[t], dweight[t], dbias[t], dout, inp[t], &norm, GRADIENT_ADD, GRADIENT_SET);
        EXPECT(ops_same_bits(sum[t], inp[1], N * C), "residual sum with %d threads, %s", t, kinds[kind]);
        EXPECT(ops_same_bits(inp[t], inp[1], N * C), "inp with %d threads, %s", t, kinds[kind]);
        EXPECT(ops_same_bits(out[t], out[1], N * C), "out with %d threads, %s", t, kinds[kind]);
        EXPECT(ops_same_bits(dinp[t], dinp[1], N * C), "dinp with %d threads, %s", t, kinds[kind]);
        EXPECT(ops_same_bits(dweight[t], dweight[1], C), "dweight with %d threads, %s", t, kinds[kind]);
        EXPECT(ops_same_bits(dbias[t], dbias[1], C), "dbias with %d threads, %s", t, kinds[kind]);
    }
    ops_close("threads");
}

TEST(threads) {
    for (int k = 0; k < NORM_KINDS_COUNT; k++) {
        const NormKind kind = (NormKind)k;
        test_threads(kind);
    }
}
