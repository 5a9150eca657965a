// test_adapter.c -- low-rank products on the CPU against plain loops in double: parts of a matrix,
// all of it, one row of input, gradients that are set and added to, inputs in the place of
// gradients, and the merged matrix.
#include <math.h>

#include "llmc/ops/adapter.h"
#include "dev/test/lib/ops.h"

// The matrix (OC, C) that the adapter stands for: double loops over its formula.
static double* product(const float* a, const float* b, AdapterShape s, int C, int OC) {
    double* w = ops_doubles((size_t)OC * (size_t)C);
    for (int i = 0; i < OC * C; i++) {
        w[i] = 0;
    }
    for (int p = 0, at = 0; p < s.parts.count; at += s.parts.rows[p++]) {
        for (int o = 0; o < s.parts.rows[p]; o++) {
            for (int c = 0; c < C; c++) {
                for (int r = 0; r < s.rank; r++) {
                    w[(s.parts.first[p] + o) * C + c] +=
                        (double)s.factor * b[(at + o) * s.rank + r] * a[(p * s.rank + r) * C + c];
                }
            }
        }
    }
    return w;
}

// The roundings in a sum of numbers about 1 grow as the root of their number.
static void expect_near(const float* got, const double* want, size_t n, double terms, const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], 64 * FLT_EPSILON * sqrt(terms), "%s %zu", what, i);
    }
}

typedef struct {
    int N, C, OC;
    AdapterShape s;
    float *a, *b, *inp, *dout;
    const double* w;
} Case;

static void check_forward(const Case* x, const AdapterScratch* scratch) {
    const size_t n = (size_t)x->N * (size_t)x->OC;
    float* out = ops_normal(n, 1);
    double* want = ops_widen(out, n);
    for (int i = 0; i < x->N; i++) {
        for (int o = 0; o < x->OC; o++) {
            for (int c = 0; c < x->C; c++) {
                want[i * x->OC + o] += x->inp[i * x->C + c] * x->w[o * x->C + c];
            }
        }
    }
    adapter_forward_cpu(out, x->inp, x->a, x->b, x->s, (MatmulSizes){x->N, x->C, x->OC}, scratch);
    expect_near(out, want, n, x->C * x->s.rank, "out");
}

// Computes the gradients of both factors from the gradient of the whole matrix (OC, C).
static void gradients(double* da, double* db, const Case* x) {
    const AdapterShape s = x->s;
    for (int p = 0, at = 0; p < s.parts.count; at += s.parts.rows[p++]) {
        for (int o = 0; o < s.parts.rows[p]; o++) {
            for (int c = 0; c < x->C; c++) {
                double dw = 0;
                for (int i = 0; i < x->N; i++) {
                    dw += (double)x->dout[i * x->OC + s.parts.first[p] + o] * x->inp[i * x->C + c];
                }
                for (int r = 0; r < s.rank; r++) {
                    da[(p * s.rank + r) * x->C + c] += dw * s.factor * x->b[(at + o) * s.rank + r];
                    db[(at + o) * s.rank + r] += dw * s.factor * x->a[(p * s.rank + r) * x->C + c];
                }
            }
        }
    }
}

static void check_backward(const Case* x, GradientMode mode, const AdapterScratch* scratch) {
    const size_t as = (size_t)(adapter_a_rows(x->s) * x->C), bs = (size_t)(adapter_b_rows(x->s) * x->s.rank),
                 n = (size_t)x->N * (size_t)x->C;
    float *da = mode == GRADIENT_ADD ? ops_normal(as, 1) : ops_floats(as),
          *db = mode == GRADIENT_ADD ? ops_normal(bs, 1) : ops_floats(bs), *dinp = ops_copy(x->inp, n);
    double *want_a = ops_doubles(as), *want_b = ops_doubles(bs), *want = ops_doubles(n);
    for (size_t i = 0; i < as; i++) {
        want_a[i] = mode == GRADIENT_ADD ? da[i] : 0;
    }
    for (size_t i = 0; i < bs; i++) {
        want_b[i] = mode == GRADIENT_ADD ? db[i] : 0;
    }
    gradients(want_a, want_b, x);
    const MatmulSizes sizes = {x->N, x->C, x->OC};
    adapter_backward_weights_cpu(da, db, x->dout, dinp, x->a, x->b, x->s, sizes, mode, scratch);
    for (size_t i = 0; i < n; i++) { // the base's gradient comes in the place of inp
        dinp[i] = (float)i / (float)n;
        want[i] = dinp[i];
    }
    for (int i = 0; i < x->N; i++) {
        for (int o = 0; o < x->OC; o++) {
            for (int c = 0; c < x->C; c++) {
                want[i * x->C + c] += x->dout[i * x->OC + o] * x->w[o * x->C + c];
            }
        }
    }
    adapter_backward_input_cpu(dinp, x->a, x->s, sizes, scratch);
    expect_near(da, want_a, as, x->N * x->OC, "da");
    expect_near(db, want_b, bs, x->N * x->C, "db");
    expect_near(dinp, want, n, x->OC * x->s.rank, "dinp");
}

static void check_merge(const Case* x) {
    const size_t n = (size_t)x->OC * (size_t)x->C;
    float* weight = ops_normal(n, 1);
    double* want = ops_widen(weight, n);
    for (size_t i = 0; i < n; i++) {
        want[i] += x->w[i];
    }
    adapter_merge_cpu(weight, x->a, x->b, x->s, x->C);
    expect_near(weight, want, n, x->s.rank, "merged");
}

static void check(int N, int C, int OC, AdapterShape s) {
    Memory memory = memory_on_host();
    MatmulScratch matmul;
    AdapterScratch scratch;
    Case x = {N, C, OC, s, NULL, NULL, NULL, NULL, NULL};
    matmul_open(&matmul, &memory);
    adapter_open(&scratch, &memory, &matmul, (size_t)N, (size_t)adapter_a_rows(s), (size_t)(C > OC ? C : OC));
    x.a = ops_normal((size_t)(adapter_a_rows(s) * C), 1);
    x.b = ops_normal((size_t)(adapter_b_rows(s) * s.rank), 1);
    x.inp = ops_normal((size_t)(N * C), 1);
    x.dout = ops_normal((size_t)(N * OC), 1);
    x.w = product(x.a, x.b, s, C, OC);
    check_forward(&x, &scratch);
    check_backward(&x, GRADIENT_SET, &scratch);
    check_backward(&x, GRADIENT_ADD, &scratch);
    check_merge(&x);
    ops_close("adapter");
    memory_close(&memory);
}

TEST(adapter) {
    check(1, 8, 12, (AdapterShape){1, 2, {1, {0}, {12}}});
    check(33, 31, 29, (AdapterShape){3, 0.5f, {1, {0}, {29}}});
    check(17, 300, 40, (AdapterShape){4, 1.5f, {2, {0, 30}, {20, 10}}}); // no keys
    check(40, 24, 48, (AdapterShape){5, 2, {3, {0, 24, 36}, {24, 12, 12}}});
    check(20, 16, 64, (AdapterShape){2, 1, {1, {32}, {32}}}); // only the second of two gates
}
