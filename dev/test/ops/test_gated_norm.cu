// test_gated_norm.cu -- the gated norm on the GPU against the CPU: both passes and all types, in
// place, gradients set and added.
#include "llmc/ops/gated_norm.cuh"
#include "dev/test/lib/gpu_ops.h"

// Within `tolerance` of the largest.
static void expect_near(const float* got, const float* want, size_t n, double tolerance, const char* what,
                        int N, int C) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], tolerance * largest, "%s of %d x %d, element %zu", what, N, C, i);
    }
}

// Results are rounded once; sums over rows differ by their order.
template <class X> static void check(int N, int C, const Gpu* gpu) {
    const size_t n = (size_t)N * C;
    const double u = roundoff<X>() + 16 * FLT_EPSILON, sums = (16 + 2 * sqrt(N)) * FLT_EPSILON;
    float *inp = normal<X>(n, 2), *gate = normal<X>(n, 2), *weight = normal<X>(C, 1), *dout = normal<X>(n, 1);
    float *out = ops_floats(n), *rstd = ops_floats(N), *dinp = ops_floats(n), *dgate = ops_floats(n),
          *dweight = ops_floats(C);
    const GatedNorm cpu = {1e-6f, gate, weight, rstd, N, C};
    gated_norm_forward_cpu(out, inp, &cpu);
    gated_norm_backward_cpu(dinp, dgate, dweight, dout, inp, &cpu, GRADIENT_SET);
    X *x = upload_rounded<X>(inp, n, 0, gpu), *z = upload_rounded<X>(gate, n, 0, gpu),
      *w = upload_rounded<X>(weight, C, 0, gpu), *d = upload_rounded<X>(dout, n, 0, gpu),
      *y = unset<X>(n, gpu), *dz = unset<X>(n, gpu), *dx = unset<X>(n, gpu);
    float *r = unset<float>(N, gpu), *dw = unset<float>(C, gpu),
          *partial = unset<float>(gated_norm_partial(N, C), gpu);
    const GatedNormGpu<X> norm = {1e-6f, z, w, r, N, C};
    GatedNormGradientsGpu gradients = {{dw, DTYPE_FP32}, GRADIENT_SET, partial};
    gated_norm_forward(y, (const X*)x, &norm, gpu);
    gated_norm_backward(dx, dz, &gradients, (const X*)d, (const X*)x, &norm, gpu);
    float* once = download(dw, C, gpu);
    gradients.mode = GRADIENT_ADD;
    gated_norm_backward(d, dz, &gradients, (const X*)d, (const X*)x, &norm, gpu); // in place
    expect_near(take_back(y, n, gpu), out, n, u, "out", N, C);
    expect_near(take_back(d, n, gpu), dinp, n, u, "dinp", N, C);
    expect_near(take_back(dx, n, gpu), dinp, n, u, "dinp", N, C);
    expect_near(take_back(dz, n, gpu), dgate, n, u, "dgate", N, C);
    expect_near(once, dweight, C, sums, "dweight", N, C);
    float* twice = take_back(dw, C, gpu);
    for (int c = 0; c < C; c++) {
        EXPECT(twice[c] == 2 * once[c], "dweight %d of %d x %d is not added", c, N, C);
    }
    void* const arrays[] = {x, z, w, r, partial};
    for (int i = 0; i < 5; i++) {
        gpu_free(arrays[i]);
    }
    ops_close("gated norm");
}

template <class X> static void test_type(const Gpu* gpu) {
    check<X>(1, 8, gpu), check<X>(33, 24, gpu), check<X>(200, 128, gpu), check<X>(70, 256, gpu);
}

TEST_TYPES(gated_norm)
