// test_dropout.cu -- dropout on the GPU against the CPU: all types, four elements at a time and
// single ones, in place, with a residual and without, of a part of the rows.
#include "llmc/ops/dropout.cuh"
#include "dev/test/lib/gpu_ops.h"

enum { ROWS = 13, T = 5, CUT = 2 };

// Arrays start `shift` elements past an aligned address.
template <class X> static void check(int C, size_t shift, const Gpu* gpu) {
    const DropoutBatch batch = {dropout_key(3, 4), 5, CUT};
    const TokenChunks chunks = {1, 1};
    const size_t n = (size_t)ROWS * C;
    DropoutBatch* there =
        (DropoutBatch*)upload_ints((const int*)(const void*)&batch, sizeof(batch) / sizeof(int), gpu);
    const Dropout own = dropout_open(&batch, 0.3f, dropout_of_branch(2, 1), chunks, 2 * T, 3),
                  of_gpu = dropout_open(there, 0.3f, dropout_of_branch(2, 1), chunks, 2 * T, 3);
    float *inp = normal<X>(n, 1), *residual = normal<X>(n, 1), *want = ops_floats(n);
    X *x = upload_rounded<X>(inp, n, shift, gpu), *r = upload_rounded<X>(residual, n, shift, gpu);
    for (int has_residual = 0; has_residual < 2; has_residual++) {
        X* out = has_residual ? r : x;
        dropout_sum(out, has_residual ? (const X*)r : NULL, (const X*)x, &of_gpu, 0.5f, ROWS, C, gpu);
        const float* got = download(out, n, gpu);
        for (int row = 0; row < ROWS; row++) {
            const size_t at = (size_t)row * C;
            dropout_row_cpu(want + at, has_residual ? residual + at : NULL, inp + at, &own, 0.5f, row, C);
        }
        for (size_t i = 0; i < n; i++) {
            const double size = fabs(want[i]) + (has_residual ? fabs(residual[i]) : 0);
            EXPECT_NEAR(got[i], want[i], (roundoff<X>() + 4 * FLT_EPSILON) * size + 0x1p-24,
                        "%d of %d columns, %zu", (int)(i % C), C, i);
            inp[i] = has_residual ? inp[i] : got[i]; // x has it now
        }
    }
    gpu_free(x - shift), gpu_free(r - shift), gpu_free(there);
    ops_close("dropout");
}

template <class X> static void test_type(const Gpu* gpu) {
    check<X>(1, 0, gpu), check<X>(31, 0, gpu), check<X>(64, 0, gpu), check<X>(64, 1, gpu);
}

TEST_TYPES(dropout)
