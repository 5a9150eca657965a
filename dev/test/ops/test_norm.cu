// test_norm.cu -- norms on the GPU against the reference: every kind and type, every path of the
// launchers, gradients set and added, of both types, with and without the sum of dinp, the same
// bits in every run.
#include "llmc/ops/norm_backward.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "llmc/reference.h"

// One rounding to T, and `limit` units of FLT_EPSILON of the terms an element is made of, where the
// sums have another order than on the CPU.
static const double limit = 8;
template <class T>
static void compare(const float* got, const double* want, const double* magnitude, size_t n, const char* what,
                    int N, int C) {
    for (size_t i = 0; i < n; i++) {
        const double tolerance = roundoff<T>() * fabs(want[i]) + limit * FLT_EPSILON * magnitude[i] + 0x1p-25;
        EXPECT_NEAR(got[i], want[i], tolerance, "%s of %d x %d, element %zu, %s", what, N, C, i,
                    dtype_name(DTYPE_OF(T)));
    }
}

// Weights that the kind lacks are ones, its biases and means zeros.
typedef struct {
    NormKind kind;
    int N, C;
    float *inp, *weight, *bias, *dout, *held; // on the host, rounded to T
    float *mean, *rstd;                       // on the host, as the GPU found them
} NormCase;

// Returns a factor of the output, and the most that multiplies column c of a normalized row.
static float factor_of(NormKind kind) { return kind == NORM_RMS_PLUS ? 0.375f : 1; }
static double weight_size(const NormCase* l, int c) {
    return factor_of(l->kind) * (norm_parts(l->kind).offset + fabs(l->weight[c]));
}

static NormCase norm_case_open(NormKind kind, int N, int C) {
    const size_t nc = (size_t)N * C;
    const NormCase l = {kind,
                        N,
                        C,
                        ops_normal(nc, 1),
                        ops_normal(C, 1),
                        ops_normal(C, norm_parts(kind).has_mean),
                        ops_normal(nc, 1),
                        ops_normal(nc, 1),
                        NULL,
                        NULL};
    for (int c = 0; c < C && !norm_parts(kind).has_weight; c++) {
        l.weight[c] = 1;
    }
    return l;
}

// The arrays of one case on the GPU.
template <class T> struct Device {
    T *inp, *weight, *bias, *dout, *out;
    float *mean, *rstd;
};

template <class T> static Device<T> device_open(const NormCase* l, size_t shift, const Gpu* gpu) {
    const size_t nc = (size_t)l->N * l->C;
    const Device<T> d = {upload<T>(l->inp, nc, shift, gpu),
                         upload<T>(l->weight, l->C, shift, gpu),
                         upload<T>(l->bias, l->C, shift, gpu),
                         upload<T>(l->dout, nc, shift, gpu),
                         upload<T>(ops_floats(nc), nc, shift, gpu),
                         upload<float>(ops_floats(l->N), l->N, 0, gpu),
                         upload<float>(ops_floats(l->N), l->N, 0, gpu)};
    return d;
}

template <class T> static void device_close(const Device<T>* d, size_t shift) {
    T* const arrays[] = {d->inp, d->weight, d->bias, d->dout, d->out};
    for (T* array : arrays) {
        gpu_free(array - shift);
    }
    gpu_free(d->mean);
    gpu_free(d->rstd);
}

template <class T> static NormGpu<T> norm_of(const NormCase* l, const Device<T>* d) {
    const int is_layer = norm_parts(l->kind).has_mean;
    return NormGpu<T>{l->kind,
                      NORM_EPS,
                      factor_of(l->kind),
                      !norm_parts(l->kind).has_weight ? NULL : d->weight,
                      is_layer ? d->bias : NULL,
                      is_layer ? d->mean : NULL,
                      d->rstd,
                      l->N,
                      l->C};
}

// How far roundings of one epsilon can move each result: see test_norm.c.
static void forward_magnitude(const NormCase* l, double* mean_size, double* rstd_size, double* out_size) {
    for (int n = 0; n < l->N; n++) {
        const float *x = l->inp + (size_t)n * l->C, mean = l->mean[n], rstd = l->rstd[n];
        double size = 0, moved = 0;
        for (int c = 0; c < l->C; c++) {
            size += fabs(x[c]) / l->C;
            moved += fabs(x[c] - mean) * (fabs(x[c]) + fabs(mean)) / l->C;
        }
        mean_size[n] = size;
        rstd_size[n] = rstd * (1 + (double)rstd * rstd * moved);
        for (int c = 0; c < l->C; c++) {
            const double centered = (fabs(x[c]) + fabs(mean)) * rstd + fabs(x[c] - mean) * rstd_size[n];
            out_size[(size_t)n * l->C + c] = weight_size(l, c) * centered + fabs(l->bias[c]);
        }
    }
}

static void backward_magnitude(const NormCase* l, double* dinp_size, double* dweight_size,
                               double* dbias_size) {
    for (int n = 0; n < l->N; n++) {
        const float *x = l->inp + (size_t)n * l->C, *d = l->dout + (size_t)n * l->C;
        double sum = 0, dot = 0;
        for (int pass = 0; pass < 2; pass++) {
            for (int c = 0; c < l->C; c++) {
                const double norm = (fabs(x[c]) + fabs(l->mean[n])) * l->rstd[n],
                             g = fabs(d[c]) * weight_size(l, c);
                if (pass == 0) {
                    sum += g / l->C;
                    dot += g * norm / l->C;
                    dweight_size[c] += fabs(d[c]) * norm;
                    dbias_size[c] += fabs(d[c]);
                } else {
                    dinp_size[(size_t)n * l->C + c] =
                        l->rstd[n] * (g + sum + norm * dot) + fabs(l->held[(size_t)n * l->C + c]);
                }
            }
        }
    }
}

// Into memory full of NaN: all must be set.
template <class T> static void forward(const NormCase* l, const Device<T>* d, const Gpu* gpu) {
    const int N = l->N, C = l->C;
    CUDA_CHECK(cudaMemsetAsync(d->out, 0xFF, (size_t)N * C * sizeof(T), gpu->stream));
    CUDA_CHECK(cudaMemsetAsync(d->mean, 0xFF, N * sizeof(float), gpu->stream));
    CUDA_CHECK(cudaMemsetAsync(d->rstd, 0xFF, N * sizeof(float), gpu->stream));
    const NormGpu<T> norm = norm_of(l, d);
    norm_forward(d->out, d->inp, &norm, gpu);
}

template <class T> static void test_forward(NormCase* l, const Device<T>* d, const Gpu* gpu) {
    const int N = l->N, C = l->C;
    const size_t nc = (size_t)N * C;
    double *out = ops_doubles(nc), *mean = ops_doubles(N), *rstd = ops_doubles(N);
    ref_norm_forward(out, ops_widen(l->inp, nc),
                     {l->kind, ops_widen(l->weight, C), ops_widen(l->bias, C),
                      norm_parts(l->kind).has_mean ? mean : NULL, rstd, NORM_EPS, factor_of(l->kind),
                      (size_t)N, (size_t)C});
    forward(l, d, gpu);
    l->mean = norm_parts(l->kind).has_mean ? download(d->mean, N, gpu) : ops_normal(N, 0);
    l->rstd = download(d->rstd, N, gpu);
    const float* first = download(d->out, nc, gpu);
    double *mean_size = ops_doubles(N), *rstd_size = ops_doubles(N), *out_size = ops_doubles(nc);
    forward_magnitude(l, mean_size, rstd_size, out_size);
    compare<float>(l->mean, mean, mean_size, N, "mean", N, C);
    compare<float>(l->rstd, rstd, rstd_size, N, "rstd", N, C);
    compare<T>(first, out, out_size, nc, "out", N, C);

    forward(l, d, gpu);
    EXPECT(ops_same_bits(download(d->out, nc, gpu), first, nc), "out again, %d x %d", N, C);
    EXPECT(!norm_parts(l->kind).has_mean || ops_same_bits(download(d->mean, N, gpu), l->mean, N),
           "mean again, %d x %d", N, C);
    EXPECT(ops_same_bits(download(d->rstd, N, gpu), l->rstd, N), "rstd again, %d x %d", N, C);
}

// The sum of the rows of dinp as it was stored, in double, over what it is added to.
template <class G>
static void expect_row_sums(const float* got, const float* dinp, const float* onto, int N, int C,
                            GradientMode mode) {
    for (int c = 0; c < C; c++) {
        double sum = mode == GRADIENT_ADD ? onto[c] : 0, magnitude = fabs(sum);
        for (int n = 0; n < N; n++) {
            sum += dinp[(size_t)n * C + c];
            magnitude += fabs(dinp[(size_t)n * C + c]);
        }
        EXPECT_NEAR(got[c], sum, roundoff<G>() * fabs(sum) + limit * FLT_EPSILON * magnitude + 0x1p-25,
                    "sum of dinp%s of %d x %d, column %d", mode == GRADIENT_ADD ? " added" : "", N, C, c);
    }
}

// G is the type of the gradients of the parameters.
template <class T, class G>
static void test_backward(const NormCase* l, const Device<T>* d, GradientMode dinp_mode, GradientMode mode,
                          GradientMode sum_mode, NormScratch* scratch, const Gpu* gpu) {
    const int N = l->N, C = l->C;
    const size_t nc = (size_t)N * C;
    float *dweight = ops_normal(C, 1), *dbias = ops_normal(C, 1), *onto = ops_normal(C, 1);
    float *nothing = ops_floats(C), *before = ops_copy(l->held, nc);
    for (size_t i = 0; i < nc && dinp_mode == GRADIENT_SET; i++) {
        before[i] = NAN; // must not be read
    }
    float* results[2][4];
    for (int run = 0; run < 2; run++) {
        T* dinp = upload<T>(before, nc, (uintptr_t)d->inp % 16 != 0, gpu);
        G* dw = upload<G>(mode == GRADIENT_ADD ? dweight : nothing, C, 0, gpu);
        G* db = upload<G>(mode == GRADIENT_ADD ? dbias : nothing, C, 0, gpu);
        G* ds = upload<G>(sum_mode == GRADIENT_ADD ? onto : nothing, C, 0, gpu);
        const Gradient to_weight = {!norm_parts(l->kind).has_weight ? NULL : dw, DTYPE_OF(G)},
                       to_bias = {norm_parts(l->kind).has_mean ? db : NULL, DTYPE_OF(G)},
                       // the second run is the same without it
            to_sum = {run == 0 ? ds : NULL, DTYPE_OF(G)};
        const NormGpu<T> norm = norm_of(l, d);
        const NormGradients sums = {to_weight, to_bias, mode, to_sum, sum_mode};
        norm_backward(dinp, dinp_mode, &sums, d->dout, d->inp, &norm, scratch, gpu);
        results[run][0] = download(dinp, nc, gpu);
        results[run][1] = download(dw, C, gpu);
        results[run][2] = download(db, C, gpu);
        results[run][3] = download(ds, C, gpu);
        gpu_free(dinp - ((uintptr_t)d->inp % 16 != 0));
        gpu_free(dw);
        gpu_free(db);
        gpu_free(ds);
    }
    expect_row_sums<G>(results[0][3], results[0][0], onto, N, C, sum_mode);
    EXPECT(ops_same_bits(results[0][0], results[1][0], nc), "dinp again, %d x %d", N, C);
    EXPECT(ops_same_bits(results[0][1], results[1][1], C), "dweight again, %d x %d", N, C);
    EXPECT(ops_same_bits(results[0][2], results[1][2], C), "dbias again, %d x %d", N, C);

    double *dinp_size = ops_doubles(nc), *dweight_size = ops_doubles(C), *dbias_size = ops_doubles(C);
    for (int c = 0; c < C && mode == GRADIENT_ADD; c++) {
        dweight_size[c] = fabs(dweight[c]);
        dbias_size[c] = fabs(dbias[c]);
    }
    backward_magnitude(l, dinp_size, dweight_size, dbias_size);
    double* dinp_want = dinp_mode == GRADIENT_ADD ? ops_widen(before, nc) : ops_doubles(nc);
    double* dweight_want = mode == GRADIENT_ADD ? ops_widen(dweight, C) : ops_doubles(C);
    double* dbias_want = mode == GRADIENT_ADD ? ops_widen(dbias, C) : ops_doubles(C);
    ref_norm_backward(dinp_want, dweight_want, dbias_want, ops_widen(l->dout, nc), ops_widen(l->inp, nc),
                      {l->kind, ops_widen(l->weight, C), NULL,
                       norm_parts(l->kind).has_mean ? ops_widen(l->mean, N) : NULL, ops_widen(l->rstd, N),
                       NORM_EPS, factor_of(l->kind), (size_t)N, (size_t)C});
    compare<T>(results[0][0], dinp_want, dinp_size, nc, dinp_mode == GRADIENT_ADD ? "dinp added" : "dinp", N,
               C);
    if (norm_parts(l->kind).has_weight) {
        compare<G>(results[0][1], dweight_want, dweight_size, C,
                   mode == GRADIENT_ADD ? "dweight added" : "dweight", N, C);
    }
    if (norm_parts(l->kind).has_mean) {
        compare<G>(results[0][2], dbias_want, dbias_size, C, mode == GRADIENT_ADD ? "dbias added" : "dbias",
                   N, C);
    }
}

// `offset` is the mean of the input: a variance computed as mean square minus squared mean would
// drown in it.
template <class T>
static void test_size(NormKind kind, int N, int C, float offset, size_t shift, const Gpu* gpu) {
    const size_t nc = (size_t)N * C;
    NormCase l = norm_case_open(kind, N, C);
    for (size_t i = 0; i < nc; i++) {
        l.inp[i] += offset;
    }
    NormScratch scratch;
    Memory memory = memory_on_gpu();
    norm_open(&scratch, &memory, N, C);
    const Device<T> d = device_open<T>(&l, shift, gpu);
    test_forward<T>(&l, &d, gpu);
    // as the others have it, or not
    const GradientMode sum_mode = N % 2 ? GRADIENT_SET : GRADIENT_ADD;
    test_backward<T, float>(&l, &d, GRADIENT_ADD, GRADIENT_SET, sum_mode, &scratch, gpu);
    test_backward<T, T>(&l, &d, GRADIENT_SET, GRADIENT_ADD, sum_mode, &scratch, gpu);
    device_close(&d, shift);
    memory_close(&memory);
    ops_close("sizes");
}

// A residual sum with a norm, or a factor, is that of its parts, rounded to T once.
template <class T> static void test_sums(NormKind kind, int N, int C, size_t shift, const Gpu* gpu) {
    const size_t nc = (size_t)N * C;
    NormCase l = norm_case_open(kind, N, C);
    const Device<T> d = device_open<T>(&l, shift, gpu);
    const NormGpu<T> norm = norm_of(&l, &d);
    const RefNorm ref = {kind,     ops_widen(l.weight, C), NULL,      NULL,     ops_doubles(N),
                         NORM_EPS, factor_of(kind),        (size_t)N, (size_t)C};
    double *want = ops_doubles(nc), *size = ops_doubles(nc), *inp = ops_widen(l.inp, nc);
    ref_norm_forward(want, inp, ref);
    for (size_t i = 0; i < nc; i++) {
        size[i] = 4 * fabs(want[i]) + fabs(l.dout[i]);
        want[i] += l.dout[i];
    }
    norm_forward_residual(d.out, (const T*)d.dout, (const T*)d.inp, &norm, gpu);
    compare<T>(download(d.out, nc, gpu), want, size, nc, "sum with a norm", N, C);
    for (int has_residual = 0; has_residual < 2; has_residual++) {
        residual_sum(d.out, has_residual ? (const T*)d.dout : NULL, (const T*)d.inp, 0.22f, nc, gpu);
        for (size_t i = 0; i < nc; i++) {
            want[i] = (double)0.22f * inp[i] + (has_residual ? l.dout[i] : 0);
            size[i] = fabs(inp[i]) + fabs(l.dout[i]);
        }
        compare<T>(download(d.out, nc, gpu), want, size, nc, "sum with a factor", N, C);
    }
    device_close(&d, shift);
    ops_close("sums");
}

// NaN in one row stays in that row, and reaches every column sum.
template <class T> static void test_nan(NormKind kind, const Gpu* gpu) {
    enum { N = 9, C = 64 };
    NormCase l = norm_case_open(kind, N, C);
    l.inp[2 * C + 5] = NAN;
    NormScratch scratch;
    Memory memory = memory_on_gpu();
    norm_open(&scratch, &memory, N, C);
    const Device<T> d = device_open<T>(&l, 0, gpu);
    T* dinp = upload<T>(l.held, N * C, 0, gpu);
    const Gradient dweight = {gpu_alloc(C, 4, "dweight"), DTYPE_FP32},
                   dbias = {norm_parts(kind).has_mean ? gpu_alloc(C, 4, "dbias") : NULL, DTYPE_FP32},
                   dinp_sum = {gpu_alloc(C, 4, "dinp_sum"), DTYPE_FP32};
    const NormGpu<T> norm = norm_of(&l, &d);
    const NormGradients sums = {dweight, dbias, GRADIENT_SET, dinp_sum, GRADIENT_SET};
    norm_forward(d.out, d.inp, &norm, gpu);
    norm_backward(dinp, GRADIENT_ADD, &sums, d.dout, d.inp, &norm, &scratch, gpu);
    const float *out = download(d.out, N * C, gpu), *dx = download(dinp, N * C, gpu);
    const float *dw = download((float*)dweight.data, C, gpu), *ds = download((float*)dinp_sum.data, C, gpu);
    for (int i = 0; i < N * C; i++) {
        EXPECT(isnan(out[i]) == (i / C == 2) && isnan(dx[i]) == (i / C == 2), "element %d: %g %g", i, out[i],
               dx[i]);
        EXPECT(isnan(dw[i % C]) && isnan(ds[i % C]), "column %d: dweight %g, sum of dinp %g", i % C,
               dw[i % C], ds[i % C]);
    }
    gpu_free(dinp_sum.data);
    gpu_free(dbias.data);
    gpu_free(dweight.data);
    gpu_free(dinp);
    device_close(&d, 0);
    memory_close(&memory);
    ops_close("nan");
}

// The sum of dinp by itself has the bits of the one that the backward pass makes, set or added to.
template <class T> static void test_dinp_sum(int N, int C, GradientMode mode, const Gpu* gpu) {
    NormCase l = norm_case_open(NORM_RMS, N, C);
    NormScratch scratch;
    Memory memory = memory_on_gpu();
    norm_open(&scratch, &memory, N, C);
    const Device<T> d = device_open<T>(&l, 0, gpu);
    T* dinp = upload<T>(l.held, (size_t)N * C, 0, gpu);
    float *before = ops_normal(C, 1),
          *sums[2] = {upload<float>(before, C, 0, gpu), upload<float>(before, C, 0, gpu)};
    const NormGpu<T> norm = norm_of(&l, &d);
    const Gradient none = {NULL, DTYPE_FP32}, first = {sums[0], DTYPE_FP32}, second = {sums[1], DTYPE_FP32};
    const NormGradients d_norm = {none, none, mode, first, mode};
    norm_forward(d.out, d.inp, &norm, gpu);
    norm_backward(dinp, GRADIENT_ADD, &d_norm, d.dout, d.inp, &norm, &scratch, gpu);
    norm_dinp_sum(second, mode, (const T*)dinp, N, C, &scratch, gpu);
    EXPECT(ops_same_bits(download(sums[0], C, gpu), download(sums[1], C, gpu), (size_t)C), "%d x %d, %s", N,
           C, dtype_name(DTYPE_OF(T)));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(sums[1]);
    gpu_free(sums[0]);
    gpu_free(dinp);
    device_close(&d, 0);
    memory_close(&memory);
    ops_close("sum of dinp");
}

// In place the norm has the bits of norm_forward; its backward pass is judged by the result that it
// was given.
template <class T> static void test_unit(int N, int C, size_t shift, const Gpu* gpu) {
    const size_t nc = (size_t)N * C;
    NormCase l = norm_case_open(NORM_RMS_ALONE, N, C);
    const Device<T> d = device_open<T>(&l, shift, gpu);
    forward(&l, &d, gpu);
    const float *out = download(d.out, nc, gpu), *rstd = download(d.rstd, N, gpu);
    norm_unit_forward(d.inp, d.rstd, N, C, NORM_EPS, gpu);
    EXPECT(ops_same_bits(download(d.inp, nc, gpu), out, nc), "in place, %d x %d", N, C);
    double *want = ops_doubles(nc), *size = ops_doubles(nc);
    for (size_t n = 0; n < (size_t)N; n++) {
        double mean = 0, mean_size = 0;
        for (size_t i = n * C; i < (n + 1) * C; i++) {
            mean += (double)l.dout[i] * out[i] / C;
            mean_size += fabs((double)l.dout[i] * out[i]) / C;
        }
        for (size_t i = n * C; i < (n + 1) * C; i++) {
            want[i] = rstd[n] * (l.dout[i] - out[i] * mean);
            size[i] = rstd[n] * (fabs(l.dout[i]) + fabs(out[i]) * mean_size);
        }
    }
    norm_unit_backward(d.dout, d.inp, d.rstd, N, C, gpu);
    compare<T>(download(d.dout, nc, gpu), want, size, nc, "dx in place", N, C);
    device_close(&d, shift);
    ops_close("unit");
}

template <class T> static void test_kind(NormKind kind, const Gpu* gpu) {
    const int sizes[][2] = {
        {1, 1},     {31, 31},   {33, 33}, {33, 768},
        {70, 1600}, {1, 8},     {3, 521}, {2, 1033}, // scalars: 2 columns per thread, then memory
        {2, 4100},  {2, 4104},                       // blocks and long rows, by the type
        {2, 1024},  {3, 1280},                       // as many warps as GPT-2s have
        {2, 8320},  {15999, 8},                      // groups of more than 8 rows
#ifndef SANITIZED
        {16000, 8}, // the last of them full
#endif
    };
    for (const int* size : sizes) {
        test_size<T>(kind, size[0], size[1], 0, 0, gpu);
    }
    test_size<T>(kind, 3, 768, 100, 0, gpu);
    test_size<T>(kind, 9, 64, 0, 1, gpu); // no pack can be read here
    test_nan<T>(kind, gpu);
}

template <class T> static void test_type(const Gpu* gpu) {
    for (int k = 0; k < NORM_KINDS_COUNT; k++) {
        const NormKind kind = (NormKind)k;
        test_kind<T>(kind, gpu);
    }
    for (int C : {1, 33, 768, 1600, 4104, 40000}) {
        test_sums<T>(NORM_RMS, 5, C, 0, gpu);
        test_sums<T>(NORM_RMS_PLUS, 9, C, C == 33, gpu);
    }
    for (int C : {1, 31, 33, 768, 1600, 4104}) {
        test_unit<T>(9, C, 0, gpu);
    }
    test_unit<T>(3, 64, 1, gpu); // no pack can be read here
    const int sizes[][2] = {{9, 64}, {37, 33}, {19, 601}, {19, 3000}, {5, 6000}, {3, 9000}};
    for (const int* size : sizes) {
        test_dinp_sum<T>(size[0], size[1], GRADIENT_SET, gpu);
        test_dinp_sum<T>(size[0], size[1], GRADIENT_ADD, gpu);
    }
}

TEST_TYPES(norm)
