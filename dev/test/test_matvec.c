// test_matvec.c -- the linear layer for few rows: against double precision at awkward sizes, and the same bits for any
// number of rows and threads.
#include "llmc/base/threads.h"
#include "llmc/matvec.h"
#include "ops.h"

static void test_size(int N, int C, int OC, int has_bias) {
    const float *inp = ops_normal((size_t)N * C, 1), *weight = ops_normal((size_t)OC * C, 1),
                *bias = ops_normal((size_t)OC, 1);
    float *out = ops_floats((size_t)N * OC), *alone = ops_floats((size_t)OC),
          *serial = ops_floats((size_t)N * OC);
    const int threads = threads_max();
    matvec_forward_cpu(out, inp, weight, has_bias ? bias : NULL, N, C, OC);
    for (int n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            double want = has_bias ? bias[o] : 0, size = fabs(want);
            for (int c = 0; c < C; c++) {
                want += (double)inp[n * C + c] * weight[o * C + c];
                size += fabs((double)inp[n * C + c] * weight[o * C + c]);
            }
            EXPECT_NEAR(out[n * OC + o], want, 4e-7 * size, "%d x %d x %d, row %d, column %d", N, C, OC, n,
                        o);
        }
        matvec_forward_cpu(alone, inp + n * C, weight, has_bias ? bias : NULL, 1, C, OC);
        EXPECT(ops_same_bits(alone, out + n * OC, (size_t)OC), "%d x %d x %d: row %d alone", N, C, OC, n);
    }
    threads_set(1);
    matvec_forward_cpu(serial, inp, weight, has_bias ? bias : NULL, N, C, OC);
    threads_set(threads);
    EXPECT(ops_same_bits(serial, out, (size_t)N * OC), "%d x %d x %d: one thread", N, C, OC);
    ops_close("matvec");
}

int main(void) {
    test_size(1, 1, 1, 1);
    test_size(1, 31, 3, 0);
    test_size(3, 33, 5, 1);
    test_size(2, 768, 31, 1);
    test_size(9, 100, 66, 0);
    return test_done("matvec");
}
