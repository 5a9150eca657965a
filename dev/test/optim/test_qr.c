// test_qr.c -- the orthonormal basis of qr.h: rows are orthonormal and span what the first rows of
// z do, also where rows of z depend on others; the same bits for any number of threads.
#include "llmc/base/threads.h"
#include "llmc/optim/qr.h"
#include "dev/test/lib/qr_test.h"

TEST(qr) {
    for (size_t i = 0; i < sizeof(QR_SIZES) / sizeof(QR_SIZES[0]); i++) {
        const size_t n = QR_SIZES[i];
        for (int rank = QR_FULL; rank <= QR_NONE; rank++) {
            float *q = ops_floats(n * n), *z = qr_test_matrix(n, (QrRank)rank), *used = ops_copy(z, n * n);
            qr_rows_cpu(q, used, ops_floats(n), n);
            qr_expect_basis(q, z, n, (QrRank)rank);
            ops_close("qr");
        }
    }
}

TEST(qr_threads) {
    enum { N = 130 };
    float *q[4], *z = qr_test_matrix(N, QR_HALF);
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        q[t] = ops_floats(N * N);
        qr_rows_cpu(q[t], ops_copy(z, N * N), ops_floats(N), N);
        EXPECT(ops_same_bits(q[t], q[1], N * N), "%d threads", t);
    }
    ops_close("threads");
}
