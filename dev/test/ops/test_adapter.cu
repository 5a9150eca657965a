// test_adapter.cu -- low-rank products on the GPU against the CPU: all types, parts of a matrix,
// gradients of both types that are set and added to.
#include "llmc/ops/adapter.cuh"
#include "dev/test/lib/gpu_ops.h"

typedef struct {
    int N, C, OC;
    AdapterShape s;
} Case;

// A result is a sum of `terms` products of numbers about 1, whose rounded factors add up to
// sqrt(terms) roundings; and it is rounded itself.
template <class T>
static void expect_near(const float* got, const float* want, size_t n, double terms, const char* what) {
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], 8 * roundoff<T>() * (sqrt(terms) + fabs(want[i])), "%s %zu, %s", what, i,
                    dtype_name(DTYPE_OF(T)));
    }
}

// Checks both passes; gradients of the factors have the type D.
template <class T, class D> static void check(Case x, GradientMode mode, MatmulGpu* matmul, const Gpu* gpu) {
    const AdapterShape s = x.s;
    const int N = x.N, C = x.C, OC = x.OC, P = adapter_a_rows(s);
    const size_t as = (size_t)P * C, bs = (size_t)adapter_b_rows(s) * s.rank, ins = (size_t)N * C,
                 outs = (size_t)N * OC;
    Memory host = memory_on_host(), device = memory_on_gpu();
    MatmulScratch packed;
    AdapterScratch cpu;
    AdapterScratchGpu<T> scratch;
    matmul_open(&packed, &host);
    adapter_open(&cpu, &host, &packed, (size_t)N, (size_t)P, (size_t)(C > OC ? C : OC));
    adapter_gpu_open(&scratch, &device, matmul, (size_t)N, (size_t)P, (size_t)(C > OC ? C : OC));
    float *a = normal<T>(as, 0.5f), *b = normal<T>(bs, 0.5f), *inp = normal<T>(ins, 1),
          *dout = normal<T>(outs, 1), *out = normal<T>(outs, 1), *dinp = normal<T>(ins, 1),
          *da = normal<D>(as, 1), *db = normal<D>(bs, 1);
    T *d_a = upload_rounded<T>(a, as, 0, gpu), *d_b = upload_rounded<T>(b, bs, 0, gpu),
      *d_inp = upload_rounded<T>(inp, ins, 0, gpu), *d_dout = upload_rounded<T>(dout, outs, 0, gpu),
      *d_out = upload_rounded<T>(out, outs, 0, gpu), *d_dinp = upload_rounded<T>(dinp, ins, 0, gpu);
    D *d_da = upload_rounded<D>(da, as, 0, gpu), *d_db = upload_rounded<D>(db, bs, 0, gpu);
    adapter_forward_cpu(out, inp, a, b, s, {N, C, OC}, &cpu);
    adapter_backward_weights_cpu(da, db, dout, inp, a, b, s, {N, C, OC}, mode, &cpu);
    adapter_backward_input_cpu(dinp, a, s, {N, C, OC}, &cpu);
    adapter_forward<T>(d_out, d_inp, d_a, d_b, s, {N, C, OC}, &scratch);
    adapter_backward_weights<T>({d_da, DTYPE_OF(D)}, {d_db, DTYPE_OF(D)}, d_dout, d_inp, d_a, d_b, s,
                                {N, C, OC}, mode, &scratch);
    adapter_backward_input<T>(d_dinp, d_dout, d_a, d_b, s, {N, C, OC}, &scratch);
    expect_near<T>(download(d_out, outs, gpu), out, outs, (double)C * s.rank, "out");
    expect_near<T>(download(d_da, as, gpu), da, as, (double)N * OC, "da");
    expect_near<T>(download(d_db, bs, gpu), db, bs, (double)N * C, "db");
    expect_near<T>(download(d_dinp, ins, gpu), dinp, ins, (double)OC * s.rank, "dinp");
    gpu_free(d_a), gpu_free(d_b), gpu_free(d_inp), gpu_free(d_dout), gpu_free(d_out), gpu_free(d_dinp);
    gpu_free(d_da), gpu_free(d_db);
    memory_close(&device);
    memory_close(&host);
    ops_close("adapter");
}

template <class T> static void test_type(const Gpu* gpu) {
    const Case cases[] = {{1, 16, 24, {1, 2, {1, {0}, {24}}}},
                          {33, 40, 48, {4, 1.5f, {2, {0, 30}, {20, 10}}}},
                          {20, 24, 48, {3, 0.5f, {3, {0, 24, 36}, {24, 12, 12}}}}};
    MatmulSettings settings = {};
    Memory memory = memory_on_gpu();
    MatmulGpu matmul;
    matmul_gpu_open(&matmul, &memory, gpu, settings);
    for (const Case& x : cases) {
        check<T, float>(x, GRADIENT_SET, &matmul, gpu);
        check<T, T>(x, GRADIENT_ADD, &matmul, gpu);
    }
    matmul_gpu_close(&matmul);
    memory_close(&memory);
}

TEST_TYPES(adapter)
