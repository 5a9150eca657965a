// test_stream_scale.cu -- scales of the residual stream on the GPU against the CPU, all types.
#include "llmc/ops/stream_scale.cuh"
#include "dev/test/lib/gpu_ops.h"

// Results are sums of a few products, rounded once.
template <class X> static void expect_near(const float* got, const float* want, size_t n, const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], 2 * (roundoff<X>() + 4 * FLT_EPSILON) * (1 + fabsf(want[i])),
                    "%s, %zu of %zu", what, i, n);
    }
}

template <class X> static void check(size_t n, GradientMode first, GradientMode mode, const Gpu* gpu) {
    float *x = normal<X>(n, 1), *x0 = normal<X>(n, 1), *scales = normal<X>(2, 1), *dx = normal<X>(n, 1),
          *dx0 = normal<X>(n, 1), *dscales = ops_normal(2, 1), *out = ops_floats(n);
    X *gx = upload_rounded<X>(x, n, 0, gpu), *gx0 = upload_rounded<X>(x0, n, 0, gpu),
      *gs = upload_rounded<X>(scales, 2, 0, gpu), *gdx = upload_rounded<X>(dx, n, 0, gpu),
      *gdx0 = upload_rounded<X>(dx0, n, 0, gpu), *gout = unset<X>(n, gpu);
    float* gds = upload_rounded<float>(dscales, 2, 0, gpu);
    double* parts = unset<double>(2 * STREAM_PARTS, gpu);
    const StreamScale s = {x, x0, scales, n};
    const StreamScaleGpu<X> g = {gx, gx0, gs, n};
    stream_scale_forward_cpu(out, &s);
    stream_scale_backward_cpu(dx, dx0, dscales, ops_doubles(2 * STREAM_PARTS), &s, first, mode);
    stream_scale_forward(gout, g, gpu);
    stream_scale_backward(gdx, gdx0, Gradient{gds, DTYPE_FP32}, parts, g, first, mode, gpu);
    expect_near<X>(download(gout, n, gpu), out, n, "out");
    expect_near<X>(download(gdx, n, gpu), dx, n, "dx");
    expect_near<X>(download(gdx0, n, gpu), dx0, n, "dx0");
    const float* got = download(gds, 2, gpu);
    for (int i = 0; i < 2; i++) {
        EXPECT_NEAR(got[i], dscales[i], 1e-6f * (float)n + 1e-6f, "scale %d of %zu", i, n);
    }
    gpu_free(gx), gpu_free(gx0), gpu_free(gs), gpu_free(gdx), gpu_free(gdx0), gpu_free(gout), gpu_free(gds);
    gpu_free(parts);
    ops_close("stream_scale");
}

template <class X> static void test_type(const Gpu* gpu) {
    check<X>(1, GRADIENT_SET, GRADIENT_ADD, gpu), check<X>(300, GRADIENT_ADD, GRADIENT_SET, gpu);
    check<X>(70001, GRADIENT_ADD, GRADIENT_ADD, gpu);
}

TEST_TYPES(stream_scale)
