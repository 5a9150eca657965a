// test_matvec.c -- the linear layer for few rows, in fp32 and bf16: against double precision at
// awkward sizes; the same bits for any number of rows and threads.
#include "llmc/base/float16.h"
#include "llmc/base/threads.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/bf16/matvec.h"
#include "dev/test/lib/ops.h"

typedef void (*Matvec)(float* out, const float* inp, const float* weight, const float* bias,
                       MatmulSizes sizes);

static void bf16(float* out, const float* inp, const float* weight, const float* bias, MatmulSizes sizes) {
    const int C = sizes.C, OC = sizes.OC;
    uint32_t* packed = (uint32_t*)(void*)ops_floats(matmul_bf16_pairs(OC, C));
    matmul_bf16_pack(bf16_kernel().pack, packed, matmul_bf16_forward_weight(weight, C), C, OC);
    matvec_bf16_forward_cpu(out, inp, packed, bias, sizes);
}

static double factor(Matvec matvec, float x) {
    return matvec == bf16 ? bf16_to_float(bf16_from_float(x)) : x;
}

static void test_size(Matvec matvec, int N, int C, int OC, int has_bias) {
    const float *inp = ops_normal((size_t)N * C, 1), *weight = ops_normal((size_t)OC * C, 1),
                *bias = ops_normal((size_t)OC, 1);
    float *out = ops_floats((size_t)N * OC), *alone = ops_floats((size_t)OC),
          *serial = ops_floats((size_t)N * OC);
    const int threads = threads_max();
    matvec(out, inp, weight, has_bias ? bias : NULL, (MatmulSizes){N, C, OC});
    for (int n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            double want = has_bias ? bias[o] : 0, size = fabs(want);
            for (int c = 0; c < C; c++) {
                const double product = factor(matvec, inp[n * C + c]) * factor(matvec, weight[o * C + c]);
                want += product;
                size += fabs(product);
            }
            EXPECT_NEAR(out[n * OC + o], want, 4e-7 * size, "%d x %d x %d, row %d, column %d", N, C, OC, n,
                        o);
        }
        matvec(alone, inp + n * C, weight, has_bias ? bias : NULL, (MatmulSizes){1, C, OC});
        EXPECT(ops_same_bits(alone, out + n * OC, (size_t)OC), "%d x %d x %d: row %d alone", N, C, OC, n);
    }
    threads_set(1);
    matvec(serial, inp, weight, has_bias ? bias : NULL, (MatmulSizes){N, C, OC});
    threads_set(threads);
    EXPECT(ops_same_bits(serial, out, (size_t)N * OC), "%d x %d x %d: one thread", N, C, OC);
    ops_close("matvec");
}

TEST(matvec) {
    const Matvec both[] = {matvec_forward_cpu, bf16};
    for (int i = 0; i < 2; i++) {
        test_size(both[i], 1, 1, 1, 1);
        test_size(both[i], 1, 31, 3, 0);
        test_size(both[i], 3, 33, 5, 1);
        test_size(both[i], 2, 768, 31, 1);
        test_size(both[i], 9, 100, 66, 0);
        test_size(both[i], 3, 130, 165, 1); // a panel of each run, and one and a part behind them
        test_size(both[i], 17, 37, 290, 0);
    }
}
