// test_matmul.c -- the linear layer: all three matmuls and the bias at every edge of tiles and
// blocks.
#include "llmc/ops/attention.h"
#include "llmc/ops/matmul.h"
#include "llmc/reference.h"
#include "dev/test/lib/linear_reference.h"
#include "dev/test/lib/ops.h"

static MatmulScratch scratch;

// A sum of K random terms makes K roundings of at most half an epsilon of a partial sum, which is
// about 1 / sqrt(K) of the sum of the terms' absolute values; the roundings too add up like
// sqrt(K). So the error is about epsilon/2 times that sum of absolute values for any K, and the
// worst of all elements below 2 epsilon. The sums of absolute values are the same reference applied
// to the absolute values of its inputs.
static const double limit = 4;

static void test_size(int N, int C, int OC) {
    const size_t nc = (size_t)N * C, occ = (size_t)OC * C, noc = (size_t)N * OC;
    float *inp = ops_normal(nc, 1), *weight = ops_normal(occ, 1), *bias = ops_normal(OC, 1);
    float* dout = ops_normal(noc, 1);
    const double *wide_inp = ops_widen(inp, nc), *wide_weight = ops_widen(weight, occ),
                 *wide_bias = ops_widen(bias, OC), *wide_dout = ops_widen(dout, noc),
                 *size_weight = ops_absolute(wide_weight, occ), *size_bias = ops_absolute(wide_bias, OC);
    const Results l = reference(N, C, OC, wide_inp, wide_weight, wide_bias, wide_dout);
    const Results m = reference(N, C, OC, ops_absolute(wide_inp, nc), size_weight, size_bias,
                                ops_absolute(wide_dout, noc)); // magnitudes

    float *out = ops_floats(noc), *dinp = ops_floats(nc), *dweight = ops_floats(occ), *dbias = ops_floats(OC);
    matmul_forward_cpu(out, inp, weight, bias, (MatmulSizes){N, C, OC}, &scratch);
    EXPECT_NEAR(ops_error(out, l.out, m.out, noc), 0, limit, "out of %d x %d x %d", N, C, OC);
    matmul_backward_input_cpu(dinp, dout, weight, (MatmulSizes){N, C, OC}, &scratch);
    EXPECT_NEAR(ops_error(dinp, l.dinp, m.dinp, nc), 0, limit, "dinp of %d x %d x %d", N, C, OC);
    matmul_backward_weight_cpu(dweight, dout, inp, (MatmulSizes){N, C, OC}, GRADIENT_SET, &scratch);
    EXPECT_NEAR(ops_error(dweight, l.dweight, m.dweight, occ), 0, limit, "dweight of %d x %d x %d", N, C, OC);
    matmul_backward_bias_cpu(dbias, dout, N, OC, GRADIENT_SET);
    EXPECT_NEAR(ops_error(dbias, l.dbias, m.dbias, OC), 0, limit, "dbias of %d x %d x %d", N, C, OC);

    // onto known values
    matmul_backward_weight_cpu(weight, dout, inp, (MatmulSizes){N, C, OC}, GRADIENT_ADD, &scratch);
    EXPECT_NEAR(
        ops_error(weight, ops_sum(l.dweight, wide_weight, occ), ops_sum(m.dweight, size_weight, occ), occ), 0,
        limit, "dweight added, %d x %d x %d", N, C, OC);
    matmul_backward_bias_cpu(bias, dout, N, OC, GRADIENT_ADD);
    EXPECT_NEAR(ops_error(bias, ops_sum(l.dbias, wide_bias, OC), ops_sum(m.dbias, size_bias, OC), OC), 0,
                limit, "dbias added, %d x %d x %d", N, C, OC);
    ops_close("sizes");
}

static void test_sizes(void) {
    const int around[] = {-1, 0, 1};
    for (int i = 1; i <= 2 * MATMUL_TILE_COLS + 1; i++) {
        test_size(i, 1 + i * 7 % 33, 31);
        test_size(33, i, 1 + i * 5 % 33);
        test_size(1 + i * 3 % 33, 33, i);
    }
    for (int i = 0; i < 3; i++) {
        test_size(2, MATMUL_BLOCK_K + around[i], 3); // K of the forward pass
        test_size(3, 2, MATMUL_BLOCK_K + around[i]); // of dinp
        test_size(MATMUL_BLOCK_K + around[i], 3, 2); // of dweight
    }
    test_size(1, 1, 1);
    test_size(MATMUL_TILE_ROWS + 1, 2 * MATMUL_BLOCK_K + 1, MATMUL_TILE_COLS + 1);
    test_size(13, 390, 400);
}

// More rows and columns than any block has. With one thread the parts are largest and the scratch
// is smallest.
static void test_large_sizes(int threads) {
    threads_set(threads);
    Memory memory = memory_on_host();
    matmul_open(&scratch, &memory);
    test_size(2000, 3, 100);
    test_size(5, 4, 3001);
    test_size(3, 3001, 5);
    test_size(40, 33, 1200);
    test_size(2 * MATMUL_BLOCK_ROWS, MATMUL_BLOCK_K, 3);
    memory_close(&memory);
}

static void test_without_bias(void) {
    enum { N = 33, C = 31, OC = 35 };
    float *inp = ops_normal(N * C, 1), *weight = ops_normal(OC * C, 1), *bias = ops_normal(OC, 0);
    float *with = ops_floats(N * OC), *without = ops_floats(N * OC);
    matmul_forward_cpu(with, inp, weight, bias, (MatmulSizes){N, C, OC}, &scratch);
    matmul_forward_cpu(without, inp, weight, NULL, (MatmulSizes){N, C, OC}, &scratch);
    for (int i = 0; i < N * OC; i++) {
        EXPECT(with[i] == without[i], "element %d: %g with a bias of 0, %g with none", i, with[i],
               without[i]);
    }
    ops_close("no bias");
}

// The contents of the scratch memory from an earlier matmul must not matter.
static void test_scratch(void) {
    enum { N = 13, C = 33, OC = 35, WIDE = 33, LARGE = 1200 };
    float *inp = ops_normal(N * C, 1), *weight = ops_normal(OC * C, 1), *dout = ops_normal(N * OC, 1);
    float *nan = ops_floats(LARGE * MATMUL_BLOCK_K), *out[2], *dweight[2];
    threads_set(1); // one thread's scratch, which the NaN fill
    for (int i = 0; i < 2; i++) {
        out[i] = ops_floats(N * OC), dweight[i] = ops_floats(OC * C);
        matmul_forward_cpu(out[i], inp, weight, NULL, (MatmulSizes){N, C, OC}, &scratch);
        matmul_forward_cpu(ops_floats(LARGE * WIDE), nan, nan, NULL,
                           (MatmulSizes){LARGE, MATMUL_BLOCK_K, WIDE}, &scratch);
        matmul_backward_weight_cpu(dweight[i], dout, inp, (MatmulSizes){N, C, OC}, GRADIENT_SET, &scratch);
        matmul_backward_weight_cpu(ops_floats(LARGE * WIDE), nan, nan,
                                   (MatmulSizes){MATMUL_BLOCK_K, WIDE, LARGE}, GRADIENT_SET, &scratch);
    }
    EXPECT(ops_same_bits(out[0], out[1], N * OC), "NaN of an earlier product reached out");
    EXPECT(ops_same_bits(dweight[0], dweight[1], OC * C), "NaN of an earlier product reached dweight");
    ops_close("scratch");
}

static void test_threads(void) {
    enum { N = 200, C = 1200, OC = 400 }; // long enough for the threads to meet
    float *inp = ops_normal(N * C, 1), *weight = ops_normal(OC * C, 1), *bias = ops_normal(OC, 1);
    float* dout = ops_normal(N * OC, 1);
    float *out[4], *dinp[4], *dweight[4], *dbias[4];
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        out[t] = ops_floats(N * OC), dinp[t] = ops_floats(N * C);
        dweight[t] = ops_floats(OC * C), dbias[t] = ops_floats(OC);
        matmul_forward_cpu(out[t], inp, weight, bias, (MatmulSizes){N, C, OC}, &scratch);
        matmul_backward_input_cpu(dinp[t], dout, weight, (MatmulSizes){N, C, OC}, &scratch);
        matmul_backward_weight_cpu(dweight[t], dout, inp, (MatmulSizes){N, C, OC}, GRADIENT_SET, &scratch);
        matmul_backward_weight_cpu(dweight[t], dout, inp, (MatmulSizes){N, C, OC}, GRADIENT_ADD, &scratch);
        matmul_backward_bias_cpu(dbias[t], dout, N, OC, GRADIENT_SET);
        EXPECT(ops_same_bits(out[t], out[1], N * OC), "out with %d threads", t);
        EXPECT(ops_same_bits(dinp[t], dinp[1], N * C), "dinp with %d threads", t);
        EXPECT(ops_same_bits(dweight[t], dweight[1], OC * C), "dweight with %d threads", t);
        EXPECT(ops_same_bits(dbias[t], dbias[1], OC), "dbias with %d threads", t);
    }
    ops_close("threads");
}

TEST(large_sizes) {
    test_large_sizes(1);
    test_large_sizes(3);
}

TEST(matmul) {
    threads_set(3); // the most that test_threads uses
    Memory memory = memory_on_host();
    matmul_open(&scratch, &memory);
    test_sizes();
    test_without_bias();
    test_scratch();
    test_threads();
    memory_close(&memory);
}
