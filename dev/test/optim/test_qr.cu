// test_qr.cu -- qr.h on the GPU: each of several matrices has an orthonormal basis.
#include "llmc/optim/qr.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/qr_test.h"

static void test_matrices(size_t n, const Gpu* gpu) {
    enum { MATRICES = QR_NONE + 1 };
    float *all = ops_floats(MATRICES * n * n), *z[MATRICES];
    for (int i = 0; i < MATRICES; i++) {
        z[i] = qr_test_matrix(n, (QrRank)i);
        memcpy(all + i * n * n, z[i], n * n * sizeof(float));
    }
    float *on_gpu = upload<float>(all, MATRICES * n * n, 0, gpu),
          *q = (float*)gpu_alloc(MATRICES * n * n, sizeof(float), "q"),
          *factors = (float*)gpu_alloc(MATRICES * n, sizeof(float), "factors");
    qr_rows(q, on_gpu, factors, (int)n, MATRICES, gpu);
    const float* got = download(q, MATRICES * n * n, gpu);
    for (int i = 0; i < MATRICES; i++) {
        qr_expect_basis(got + i * n * n, z[i], n, (QrRank)i);
    }
    gpu_free(factors);
    gpu_free(q);
    gpu_free(on_gpu);
    ops_close("qr");
}

TEST(qr) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    for (size_t i = 0; i < sizeof(QR_SIZES) / sizeof(QR_SIZES[0]); i++) {
        test_matrices(QR_SIZES[i], &gpu);
    }
    gpu_close(&gpu);
}
