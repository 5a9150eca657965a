// test_sinks.cu -- attention's sinks on the GPU, against the CPU's: every type, packs and single
// elements, gradients set and added to, of many tokens.
#include "llmc/ops/sinks.cuh"
#include "dev/test/lib/gpu_ops.h"

// Results have one rounding to X. A gradient sums terms of X's products in fp32.
template <class X> static void test_sizes(int B, int T, int NH, int HS, GradientMode mode, const Gpu* gpu) {
    const AttentionSizes sizes = attention_sizes(B, T, NH, NH, HS);
    const size_t rows = (size_t)B * T * NH, n = rows * HS;
    float *out = ops_normal(n, 1), *dout = ops_normal(n, 1), *lse = ops_normal(rows, 2),
          *sinks = ops_normal((size_t)NH, 3), *dsinks = ops_normal((size_t)NH, 1),
          *partial =
              (float*)gpu_alloc((size_t)ceil_div(B * T, (int)SINKS_TOKENS) * NH, sizeof(float), "test");
    X *d_out = upload<X>(out, n, 0, gpu), *d_dout = upload<X>(dout, n, 0, gpu),
      *d_sinks = upload<X>(sinks, (size_t)NH, 0, gpu);
    float *d_lse = upload<float>(lse, rows, 0, gpu), *d_dsinks = upload<float>(dsinks, (size_t)NH, 0, gpu);
    sinks_forward(d_out, d_lse, (const X*)d_sinks, sizes, gpu);
    sinks_backward({d_dsinks, DTYPE_FP32}, partial, (const X*)d_dout, (const X*)d_out, d_lse,
                   (const X*)d_sinks, sizes, mode, gpu);
    sinks_forward_cpu(out, lse, sinks, sizes);
    const float *got = take_back(d_out, n, gpu), *got_lse = take_back(d_lse, rows, gpu),
                *dgot = take_back(d_dsinks, (size_t)NH, gpu);
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], out[i], (roundoff<X>() + 8 * FLT_EPSILON) * fabsf(out[i]) + 0x1p-25, "%zu of out",
                    i);
    }
    for (size_t i = 0; i < rows; i++) {
        EXPECT_NEAR(got_lse[i], lse[i], 8 * FLT_EPSILON * fmax(1, fabs(lse[i])), "%zu of lse", i);
    }
    sinks_backward_cpu(dsinks, dout, got, got_lse, sinks, sizes, mode); // of the stored out
    for (int h = 0; h < NH; h++) {
        EXPECT_NEAR(dgot[h], dsinks[h], 16 * FLT_EPSILON * sqrt((double)n), "%d of dsinks", h);
    }
    gpu_free(partial), gpu_free(d_dout), gpu_free(d_sinks);
    ops_close("sinks");
}

template <class X> static void test_type(const Gpu* gpu) {
    test_sizes<X>(2, 9, 3, 5, GRADIENT_SET, gpu);
    test_sizes<X>(1, 150, 2, 64, GRADIENT_ADD, gpu);
}

TEST_TYPES(sinks)
