// test_gate.cu -- gates of attention's output on the GPU against the CPU: all types, packs and
// single elements, in place.
#include "llmc/ops/gate.cuh"
#include "dev/test/lib/gpu_ops.h"

// A result is a product of a few factors, rounded once.
template <class X>
static void expect_near(const float* got, const float* want, size_t n, const char* what, size_t shift) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], (roundoff<X>() + 16 * FLT_EPSILON) * fabsf(want[i]) + 0x1p-24,
                    "%s, %zu of %zu at %zu", what, i, n, shift);
    }
}

// Arrays start `shift` elements past an aligned address.
template <class X> static void check(size_t n, size_t shift, const Gpu* gpu) {
    float *inp = normal<X>(n, 2), *gate = normal<X>(n, 4), *dout = normal<X>(n, 1), *out = ops_floats(n),
          *dinp = ops_floats(n), *dgate = ops_floats(n);
    gate_forward_cpu(out, inp, gate, n);
    gate_backward_cpu(dinp, dgate, dout, inp, gate, n);
    X *x = upload_rounded<X>(inp, n, shift, gpu), *g = upload_rounded<X>(gate, n, shift, gpu),
      *d = upload_rounded<X>(dout, n, shift, gpu), *dz = unset<X>(n + shift, gpu);
    gate_backward(d, dz + shift, (const X*)d, (const X*)x, (const X*)g, n, gpu);
    gate_forward(x, (const X*)x, (const X*)g, n, gpu);
    expect_near<X>(download(x, n, gpu), out, n, "out", shift);
    expect_near<X>(download(d, n, gpu), dinp, n, "dinp", shift);
    expect_near<X>(download(dz + shift, n, gpu), dgate, n, "dgate", shift);
    gpu_free(x - shift), gpu_free(g - shift), gpu_free(d - shift), gpu_free(dz);
    ops_close("gate");
}

template <class X> static void test_type(const Gpu* gpu) {
    check<X>(1, 0, gpu), check<X>(4096, 0, gpu), check<X>(1001, 0, gpu), check<X>(64, 1, gpu);
}

TEST_TYPES(gate)
