// test_matmul.cu -- the linear layer on the GPU against the CPU: every function, type, mode and
// setting; refusals of cublasLt; autotune; plans. CUSIM_LT_* has no effect on a real GPU, so its
// effects are expected only if `simulated`.
#include "llmc/ops/matmul.cuh"
#include "dev/test/lib/gpu_ops.h"

#define REFERENCE_REAL float // sums in fp32, like those of the GPU
#include "llmc/reference.h"

#ifdef CUSIM
static const int simulated = 1;
#else
static const int simulated = 0;
#endif

// ---- device arrays ----

static void* device_arrays[64]; // all since the last case_close
static int device_arrays_count = 0;

// Uploads an array that stays until case_close.
template <class T> static T* device_upload(float* x, size_t n, size_t shift, const Gpu* gpu) {
    T* memory = upload<T>(x, n, shift, gpu);
    CHECK(device_arrays_count < 64, "more than 64 device arrays at a time");
    device_arrays[device_arrays_count++] = memory - shift;
    return memory;
}

template <class T> static T* device_upload_nan(size_t n, size_t shift, const Gpu* gpu) {
    return device_upload<T>(ops_floats(n), n, shift, gpu);
}

static void case_close(const char* what) {
    while (device_arrays_count > 0) {
        gpu_free(device_arrays[--device_arrays_count]);
    }
    ops_close(what);
}

// ---- tolerance ----

// One rounding to T of the result, and one of a value of size `rounded` before it, where there is
// such a step (NULL: none). Both sums, the reference's and the GPU's, are fp32 sums: see
// test_matmul.c, 4 epsilon of the sum of the terms' absolute values each, which is `magnitude`.
// Below the normal numbers of fp16 the rounding is absolute.
template <class T>
static void compare(const float* got, const float* want, const float* magnitude, const float* rounded,
                    size_t n, const char* what) {
    for (size_t i = 0; i < n; i++) {
        const double before = rounded ? 1.13 * fabs(rounded[i]) : 0; // the largest slope of GELU
        const double tolerance =
            roundoff<T>() * (fabs(want[i]) + before) * 1.01 + 8 * FLT_EPSILON * magnitude[i] + 0x1p-24;
        EXPECT_NEAR(got[i], want[i], tolerance, "%s, element %zu of %zu, %s", what, i, n,
                    dtype_name(DTYPE_OF(T)));
    }
}

// ---- a layer ----

template <class T> struct Linear {
    int N, C, OC;
    size_t nc, noc, occ;
    // (N, C) (OC, C) (OC) (N, OC) (N, OC) (N, C)
    float *inp, *weight, *bias, *residual, *dout, *pre;
    T *d_inp, *d_weight, *d_bias, *d_residual, *d_dout, *d_pre; // the same on the GPU
    float *a_inp, *a_weight, *a_bias, *a_dout;                  // absolute values
};

template <class T> static Linear<T> linear_open(int N, int C, int OC, size_t shift, const Gpu* gpu) {
    Linear<T> l;
    l.N = N, l.C = C, l.OC = OC;
    l.nc = (size_t)N * C, l.noc = (size_t)N * OC, l.occ = (size_t)OC * C;
    l.inp = ops_normal(l.nc, 1), l.weight = ops_normal(l.occ, 1), l.bias = ops_normal(OC, 1);
    l.residual = ops_normal(l.noc, 1), l.dout = ops_normal(l.noc, 1), l.pre = ops_normal(l.nc, 2);
    l.d_inp = device_upload<T>(l.inp, l.nc, shift, gpu),
    l.d_weight = device_upload<T>(l.weight, l.occ, shift, gpu);
    l.d_bias = device_upload<T>(l.bias, OC, shift, gpu),
    l.d_residual = device_upload<T>(l.residual, l.noc, shift, gpu);
    l.d_dout = device_upload<T>(l.dout, l.noc, shift, gpu),
    l.d_pre = device_upload<T>(l.pre, l.nc, shift, gpu);
    l.a_inp = absolute(l.inp, l.nc), l.a_weight = absolute(l.weight, l.occ), l.a_bias = absolute(l.bias, OC);
    l.a_dout = absolute(l.dout, l.noc);
    return l;
}

// Says if cublasLt adds the bias, or a kernel after it: then the sum is rounded before, too.
typedef enum { BIAS_BY_CUBLAS, BIAS_IN_STEPS } BiasSteps;

// |x| + |y|
static float* absolute_sum(const float* x, const float* y, size_t n) {
    float* sum = ops_floats(n);
    for (size_t i = 0; i < n; i++) {
        sum[i] = fabsf(x[i]) + fabsf(y[i]);
    }
    return sum;
}

template <class T>
static void test_forward(const Linear<T>* l, size_t shift, const T* d_bias, BiasSteps steps, MatmulGpu* ctx) {
    const Gpu* gpu = ctx->gpu;
    const float *bias = d_bias ? l->bias : NULL, *a_bias = d_bias ? l->a_bias : NULL;
    float *want = ops_floats(l->noc), *magnitude = ops_floats(l->noc), *gelu = ops_floats(l->noc);
    float* sum = ops_floats(l->noc); // without bias
    ref_linear_forward(want, l->inp, l->weight, bias, {(size_t)l->N, (size_t)l->C, (size_t)l->OC});
    ref_linear_forward(sum, l->inp, l->weight, NULL, {(size_t)l->N, (size_t)l->C, (size_t)l->OC});
    ref_linear_forward(magnitude, l->a_inp, l->a_weight, a_bias, {(size_t)l->N, (size_t)l->C, (size_t)l->OC});
    ref_activation_forward(gelu, want, 1, l->noc, ACTIVATION_GELU);
    const float* rounded = steps == BIAS_IN_STEPS ? sum : NULL;
    T *out = device_upload_nan<T>(l->noc, shift, gpu), *pre = device_upload_nan<T>(l->noc, shift, gpu);

    matmul_forward(out, l->d_inp, l->d_weight, d_bias, {l->N, l->C, l->OC}, ctx);
    compare<T>(download(out, l->noc, gpu), want, magnitude, rounded, l->noc, "out");

    matmul_forward_gelu(out, pre, l->d_inp, l->d_weight, d_bias, {l->N, l->C, l->OC}, ctx);
    compare<T>(download(pre, l->noc, gpu), want, magnitude, rounded, l->noc, "pre");
    compare<T>(download(out, l->noc, gpu), gelu, magnitude, rounded ? absolute_sum(sum, want, l->noc) : want,
               l->noc, "out of gelu");

    matmul_forward_residual(out, l->d_residual, l->d_inp, l->d_weight, d_bias, {l->N, l->C, l->OC}, ctx);
    for (size_t i = 0; i < l->noc; i++) {
        want[i] += l->residual[i];
        sum[i] += l->residual[i];
        magnitude[i] += fabsf(l->residual[i]);
    }
    compare<T>(download(out, l->noc, gpu), want, magnitude, rounded, l->noc, "out with residual");
    EXPECT(ops_same_bits(download(l->d_residual, l->noc, gpu), l->residual, l->noc), "residual changed");
}

// The gradient of the bias before GELU, set over NaN or added: of type G, or left out. `dinp` are
// the terms of its sum, before they were rounded.
template <class T, class G>
static void test_gelu_bias(const Linear<T>* l, size_t shift, GradientMode mode, const float* want_dinp,
                           const float* size_dinp, const float* rounded, MatmulGpu* ctx) {
    const Gpu* gpu = ctx->gpu;
    const int adds = mode == GRADIENT_ADD;
    float *onto = adds ? ops_normal(l->C, 3) : ops_floats(l->C), *sum = ops_floats(l->C);
    T* dinp = device_upload_nan<T>(l->nc, shift, gpu);
    const Gradient dbias = {device_upload<G>(onto, l->C, shift, gpu), DTYPE_OF(G)};
    matmul_backward_input_gelu<T>({dinp, dbias, l->d_dout, l->d_weight, l->d_pre, {l->N, l->C, l->OC}, mode},
                                  ctx);
    compare<T>(download(dinp, l->nc, gpu), want_dinp, size_dinp, rounded, l->nc, "dinp of gelu, with dbias");
    const float* got = download((const G*)dbias.data, l->C, gpu);
    matmul_backward_bias_cpu(sum, want_dinp, l->N, l->C, GRADIENT_SET);
    for (int c = 0; c < l->C; c++) {
        double terms = 0, error = 0; // of the terms: rounded twice at most, and their sums
        for (int n = 0; n < l->N; n++) {
            const size_t i = (size_t)n * l->C + c;
            terms += fabs(want_dinp[i]);
            error += roundoff<T>() * (fabs(want_dinp[i]) + 1.13 * fabs(rounded[i])) * 1.01 +
                     8 * FLT_EPSILON * size_dinp[i] + 0x1p-24;
        }
        const double want = sum[c] + (adds ? onto[c] : 0);
        const double steps = roundoff<G>() * (fabs(want) + (adds ? fabs(sum[c]) : 0)) * 1.01 + 0x1p-24;
        EXPECT_NEAR(got[c], want, steps + error + 8 * FLT_EPSILON * terms,
                    "dbias before gelu%s, column %d, %s", adds ? ", added" : "", c, dtype_name(DTYPE_OF(G)));
    }
}

template <class T> static void test_backward_input(const Linear<T>* l, size_t shift, MatmulGpu* ctx) {
    const Gradient none = {NULL, DTYPE_OF(T)};
    const Gpu* gpu = ctx->gpu;
    float *want = ops_normal(l->nc, 0), *magnitude = ops_normal(l->nc, 0), *gelu = ops_normal(l->nc, 0);
    float* dweight = ops_normal(l->occ, 0); // not looked at
    ref_linear_backward(want, dweight, NULL, l->dout, l->inp, l->weight,
                        {(size_t)l->N, (size_t)l->C, (size_t)l->OC});
    ref_linear_backward(magnitude, dweight, NULL, l->a_dout, l->a_inp, l->a_weight,
                        {(size_t)l->N, (size_t)l->C, (size_t)l->OC});
    ref_activation_backward(gelu, want, l->pre, 1, l->nc, ACTIVATION_GELU);
    T* dinp = device_upload_nan<T>(l->nc, shift, gpu);
    matmul_backward_input(dinp, l->d_dout, l->d_weight, {l->N, l->C, l->OC}, ctx);
    compare<T>(download(dinp, l->nc, gpu), want, magnitude, NULL, l->nc, "dinp");
    matmul_backward_input_gelu<T>(
        {dinp, none, l->d_dout, l->d_weight, l->d_pre, {l->N, l->C, l->OC}, GRADIENT_SET}, ctx);
    compare<T>(download(dinp, l->nc, gpu), gelu, magnitude, want, l->nc, "dinp of gelu");
    test_gelu_bias<T, T>(l, shift, GRADIENT_SET, gelu, magnitude, want, ctx);
    test_gelu_bias<T, T>(l, shift, GRADIENT_ADD, gelu, magnitude, want, ctx);
    test_gelu_bias<T, float>(l, shift, GRADIENT_ADD, gelu, magnitude, want, ctx);
}

// G is the type of the gradients. Set over NaN, then added to what `onto` holds.
template <class T, class G>
static void test_backward_parameters(const Linear<T>* l, size_t shift, GradientMode mode, MatmulGpu* ctx) {
    const Gpu* gpu = ctx->gpu;
    const int adds = mode == GRADIENT_ADD;
    float* weight_onto = adds ? ops_normal(l->occ, 3) : ops_floats(l->occ);
    float* bias_onto = adds ? ops_normal(l->OC, 3) : ops_floats(l->OC);
    const Gradient dweight = {device_upload<G>(weight_onto, l->occ, shift, gpu), DTYPE_OF(G)};
    const Gradient dbias = {device_upload<G>(bias_onto, l->OC, shift, gpu), DTYPE_OF(G)};
    if (!adds) {
        memset(weight_onto, 0, l->occ * sizeof(float));
        memset(bias_onto, 0, l->OC * sizeof(float));
    }
    float *weight_magnitude = absolute(weight_onto, l->occ), *bias_magnitude = absolute(bias_onto, l->OC);
    float* dinp = ops_normal(l->nc, 0); // not looked at
    float* product = ops_floats(l->occ);
    memcpy(product, weight_onto, l->occ * sizeof(float));
    ref_linear_backward(dinp, weight_onto, bias_onto, l->dout, l->inp, l->weight,
                        {(size_t)l->N, (size_t)l->C, (size_t)l->OC});
    // On a real GPU an algorithm that splits the sum rounds it to the type of the gradient, then
    // adds it.
    for (size_t i = 0; i < l->occ; i++) {
        product[i] = weight_onto[i] - product[i];
    }
    ref_linear_backward(dinp, weight_magnitude, bias_magnitude, l->a_dout, l->a_inp, l->a_weight,
                        {(size_t)l->N, (size_t)l->C, (size_t)l->OC});

    matmul_backward_weight(dweight, l->d_dout, l->d_inp, {l->N, l->C, l->OC}, mode, ctx);
    compare<G>(download((const G*)dweight.data, l->occ, gpu), weight_onto, weight_magnitude,
               adds && !simulated ? product : NULL, l->occ, adds ? "dweight added" : "dweight set");
    matmul_backward_bias(dbias, l->d_dout, l->N, l->OC, mode, ctx);
    compare<G>(download((const G*)dbias.data, l->OC, gpu), bias_onto, bias_magnitude, NULL, l->OC,
               adds ? "dbias added" : "dbias set");
}

// A real cublasLt need not take addresses that are only as aligned as a 16-bit element, nor add
// every bias.
template <class T>
static void test_size(int N, int C, int OC, size_t shift, BiasSteps steps, MatmulGpu* ctx) {
    char what[64];
    const int failures = test_failures_;
    shift = simulated ? shift : 8 * shift;
    steps = simulated ? steps : BIAS_IN_STEPS;
    snprintf(what, sizeof(what), "%d x %d x %d, shifted by %zu", N, C, OC, shift);
    const Linear<T> l = linear_open<T>(N, C, OC, shift, ctx->gpu);
    test_forward(&l, shift, (const T*)l.d_bias, steps, ctx);
    test_forward(&l, shift, (const T*)NULL, BIAS_BY_CUBLAS, ctx);
    test_backward_input(&l, shift, ctx);
    test_backward_parameters<T, float>(&l, shift, GRADIENT_SET, ctx);
    test_backward_parameters<T, float>(&l, shift, GRADIENT_ADD, ctx);
    test_backward_parameters<T, T>(&l, shift, GRADIENT_SET, ctx);
    test_backward_parameters<T, T>(&l, shift, GRADIENT_ADD, ctx);
    case_close(what);
    if (test_failures_ > failures) {
        printf("... in %s\n", what);
    }
}

// ---- sizes and settings ----

enum { DONE, REFUSED };

static int plans_of(const MatmulGpu* ctx, int refused, int epilogue) {
    int count = 0;
    for (int i = 0; i < ctx->plans_count; i++) {
        count += ctx->plans[i].refused == refused && ctx->plans[i].key.epilogue == epilogue;
    }
    return count;
}

// Twice: with plans made and with plans found.
template <class T> static void test_sizes(MatmulSettings settings, const Gpu* gpu) {
    MatmulGpu ctx;
    int plans = 0;
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    for (int again = 0; again < 2; again++) {
        test_size<T>(1, 1, 1, 0, BIAS_BY_CUBLAS, &ctx);
        test_size<T>(31, 33, 1, 0, BIAS_BY_CUBLAS, &ctx);
        test_size<T>(33, 8, 40, 0, BIAS_BY_CUBLAS, &ctx);
        test_size<T>(3, 16, 24, 1, BIAS_BY_CUBLAS, &ctx); // addresses as aligned as T
        EXPECT(!again || ctx.plans_count == plans, "%d plans, %d after the same matmuls again", plans,
               ctx.plans_count);
        plans = ctx.plans_count;
    }
    test_size<T>(130, 31, 264, 0, BIAS_BY_CUBLAS, &ctx);
    test_size<T>(2, 768, 33, 0, BIAS_BY_CUBLAS, &ctx);
    const int forward = plans_of(&ctx, DONE, CUBLASLT_EPILOGUE_GELU_AUX_BIAS) > 0,
              backward = plans_of(&ctx, DONE, CUBLASLT_EPILOGUE_DGELU) > 0,
              bias = plans_of(&ctx, DONE, CUBLASLT_EPILOGUE_DGELU_BGRAD) > 0;
    EXPECT(!simulated || forward == ((settings.gelu_fusion & GELU_FUSED_FORWARD) != 0), "fused forward: %d",
           forward);
    EXPECT(!simulated || backward == ((settings.gelu_fusion & GELU_FUSED_BACKWARD) != 0),
           "fused backward: %d", backward);
    EXPECT(!simulated || bias == (backward && settings.bias_fusion), "fused gradient of the bias: %d", bias);
    EXPECT(!simulated || plans_of(&ctx, REFUSED, CUBLASLT_EPILOGUE_BIAS) == 0, "bias refused");
    matmul_gpu_close(&ctx);
    memory_close(&memory);
}

// Matmuls that are refused run in steps with the same values. `refused` and `done` are epilogues in
// the list and not in it.
static void test_refusals(const char* list, int refused, int done, const Gpu* gpu) {
    MatmulGpu ctx;
    const MatmulSettings settings = {0, GELU_FUSED, 1, 0, 0};
    setenv("CUSIM_LT_REFUSE", list, 1);
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    test_size<float>(5, 16, 24, 0, BIAS_IN_STEPS, &ctx);
    test_size<bf16>(5, 16, 24, 0, BIAS_IN_STEPS, &ctx);
    test_size<bf16>(3, 16, 24, 1, BIAS_IN_STEPS, &ctx);
    UNSANITIZED(test_size<fp16>(5, 16, 24, 0, BIAS_IN_STEPS, &ctx));
    EXPECT(!simulated || (plans_of(&ctx, REFUSED, refused) > 0 && plans_of(&ctx, DONE, refused) == 0),
           "without %s: epilogue %d was done", list, refused);
    EXPECT(!simulated || (plans_of(&ctx, REFUSED, done) == 0 && plans_of(&ctx, DONE, done) > 0),
           "without %s: epilogue %d was not done", list, done);
    matmul_gpu_close(&ctx);
    memory_close(&memory);
    unsetenv("CUSIM_LT_REFUSE");
}

static void test_tf32(const Gpu* gpu) {
    enum { N = 16, C = 64, OC = 24 };
    MatmulGpu ctx;
    float* got[2];
    const Linear<float> l = linear_open<float>(N, C, OC, 0, gpu);
    float* magnitude = ops_floats(N * OC);
    ref_linear_forward(magnitude, l.a_inp, l.a_weight, NULL, {(size_t)N, (size_t)C, (size_t)OC});
    for (int tf32 = 0; tf32 < 2; tf32++) {
        const MatmulSettings settings = {tf32, GELU_SEPARATE, 0, 0, 0};
        Memory memory = memory_on_gpu();
        matmul_gpu_open(&ctx, &memory, gpu, settings);
        float* out = device_upload_nan<float>(N * OC, 0, gpu);
        matmul_forward(out, l.d_inp, l.d_weight, (const float*)NULL, {N, C, OC}, &ctx);
        got[tf32] = download(out, N * OC, gpu);
        matmul_gpu_close(&ctx);
        memory_close(&memory);
    }
    EXPECT(!ops_same_bits(got[0], got[1], N * OC), "tf32 changes nothing");
    // two factors, each rounded by up to 2^-11 (2^-10 where it is cut off)
    for (int i = 0; i < N * OC; i++) {
        EXPECT_NEAR(got[1][i], got[0][i], 0x1p-9 * magnitude[i], "element %d", i);
    }
    case_close("tf32");
}

// ---- autotune, plans, capture ----

// Everything once; the bits of all outputs in one array.
template <class T> static float* all_outputs(const Linear<T>* l, MatmulGpu* ctx) {
    const Gpu* gpu = ctx->gpu;
    float* all = ops_floats(3 * l->noc + 2 * l->nc + l->occ + l->OC + l->C);
    float *at = all, *onto = ops_floats(l->occ);
    for (size_t i = 0; i < l->occ; i++) {
        onto[i] = 1;
    }
    T *out = device_upload_nan<T>(l->noc, 0, gpu), *pre = device_upload_nan<T>(l->noc, 0, gpu),
      *dinp = device_upload_nan<T>(l->nc, 0, gpu);
    const Gradient dweight = {device_upload<T>(onto, l->occ, 0, gpu), DTYPE_OF(T)};
    const Gradient dbias = {device_upload_nan<float>(l->OC, 0, gpu), DTYPE_FP32};
    const Gradient dbefore = {device_upload_nan<T>(l->C, 0, gpu), DTYPE_OF(T)};
#define APPEND(x, n) at = (float*)memcpy(at, download(x, n, gpu), (n) * sizeof(float)) + (n)
    matmul_forward_residual(out, l->d_residual, l->d_inp, l->d_weight, l->d_bias, {l->N, l->C, l->OC}, ctx);
    APPEND(out, l->noc);
    matmul_forward_gelu(out, pre, l->d_inp, l->d_weight, l->d_bias, {l->N, l->C, l->OC}, ctx);
    APPEND(out, l->noc);
    APPEND(pre, l->noc);
    matmul_backward_input(dinp, l->d_dout, l->d_weight, {l->N, l->C, l->OC}, ctx);
    APPEND(dinp, l->nc);
    matmul_backward_input_gelu<T>(
        {dinp, dbefore, l->d_dout, l->d_weight, l->d_pre, {l->N, l->C, l->OC}, GRADIENT_SET}, ctx);
    APPEND(dinp, l->nc);
    APPEND((const T*)dbefore.data, (size_t)l->C);
    matmul_backward_weight(dweight, l->d_dout, l->d_inp, {l->N, l->C, l->OC}, GRADIENT_ADD, ctx);
    APPEND((const T*)dweight.data, l->occ);
    matmul_backward_bias(dbias, l->d_dout, l->N, l->OC, GRADIENT_SET, ctx);
    APPEND((const float*)dbias.data, (size_t)l->OC);
#undef APPEND
    return all;
}

// The fastest algorithm is taken, one that does not run is not, and the outputs keep their bits.
template <class T> static void test_autotune(const Gpu* gpu) {
    enum { N = 40, C = 24, OC = 32 };
    MatmulGpu ctx;
    char line[256];
    int lines = 0;
    const MatmulSettings settings = {0, GELU_FUSED, 1, 1, 0};
    setenv("CUSIM_LT_FAST", "2", 1);
    setenv("CUSIM_LT_BROKEN", "0", 1);
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    const Linear<T> l = linear_open<T>(N, C, OC, 0, gpu);
    const size_t n = 3 * l.noc + 2 * l.nc + l.occ + l.OC + l.C;
    const float* first = all_outputs(&l, &ctx);
    for (int i = 0; i < ctx.plans_count && simulated; i++) {
        EXPECT(ctx.plans[i].chosen == 2 && ctx.plans[i].candidates == 6 && ctx.plans[i].ms > 0,
               "plan %d: algorithm %d of %d, %g ms", i, ctx.plans[i].chosen, ctx.plans[i].candidates,
               ctx.plans[i].ms);
    }
    EXPECT(ctx.is_warm, "races on a cold GPU");
    EXPECT(ops_same_bits(all_outputs(&l, &ctx), first, n), "other bits in the second run, %s",
           dtype_name(DTYPE_OF(T)));

    FILE* report = tmpfile();
    matmul_gpu_report(report, &ctx);
    rewind(report);
    while (fgets(line, sizeof(line), report)) {
        lines++;
        EXPECT(strstr(line, "matmul (") && (strstr(line, "ms") || !simulated), "report: %s", line);
    }
    EXPECT(lines == ctx.plans_count && lines >= 4, "%d lines for %d plans", lines, ctx.plans_count);
    fclose(report);
    matmul_gpu_close(&ctx);
    memory_close(&memory);
    case_close("autotune");
    unsetenv("CUSIM_LT_FAST");
    unsetenv("CUSIM_LT_BROKEN");
}

// A slower algorithm that does run must not win by its number: with the fast one first, it stays
// first.
static void test_autotune_keeps_first(const Gpu* gpu) {
    MatmulGpu ctx;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 1, 0};
    setenv("CUSIM_LT_FAST", "0", 1);
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    test_size<float>(4, 8, 8, 0, BIAS_BY_CUBLAS, &ctx);
    for (int i = 0; i < ctx.plans_count && simulated; i++) {
        EXPECT(ctx.plans[i].chosen == 0, "plan %d: algorithm %d", i, ctx.plans[i].chosen);
    }
    matmul_gpu_close(&ctx);
    memory_close(&memory);
    unsetenv("CUSIM_LT_FAST");
}

// Matmuls with and without adding, tuned while algorithm `fast` (a digit) is the fastest; sets
// *chosen to the algorithm that all tuned plans have, or -1. With a directory, plans are taken from
// it before and put there after.
static void tuned_matmuls(const char* fast, const char* directory, int open_cache, int* chosen,
                          const Gpu* gpu) {
    MatmulGpu ctx;
    char error[ERROR_BYTES] = "";
    const MatmulSettings settings = {0, GELU_FUSED, 0, 1, 0};
    setenv("CUSIM_LT_FAST", fast, 1);
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    if (open_cache) {
        matmul_gpu_open_cache(&ctx);
    }
    if (directory) {
        EXPECT(matmul_gpu_load_plans(&ctx, directory, error), "%s", error);
    }
    const Linear<bf16> l = linear_open<bf16>(24, 16, 32, 0, gpu);
    all_outputs(&l, &ctx);
    matmul_gpu_keep_cache(&ctx);
    if (directory) {
        matmul_gpu_save_plans(&ctx, directory);
    }
    *chosen = ctx.plans[0].chosen;
    for (int i = 0; i < ctx.plans_count; i++) {
        *chosen = ctx.plans[i].tuned && ctx.plans[i].chosen == *chosen ? *chosen : -1;
    }
    matmul_gpu_close(&ctx);
    memory_close(&memory);
    case_close("tuned");
    unsetenv("CUSIM_LT_FAST");
}

// Measurements of an earlier run are used again: from its directory, else from the cache; else they
// are made.
static void test_kept_plans(const Gpu* gpu) {
    char run[PATH_MAX], other[PATH_MAX];
    int chosen;
    if (!simulated) {
        return; // which algorithm is the fastest is known here only
    }
    snprintf(run, sizeof(run), "%s", test_path("run"));
    snprintf(other, sizeof(other), "%s", test_path("other"));
    setenv("XDG_CACHE_HOME", test_path("cache"), 1);
    file_make_directory(run);
    file_make_directory(other);
    tuned_matmuls("2", run, 0, &chosen, gpu);
    EXPECT(chosen == 2, "measured: algorithm %d", chosen);
    tuned_matmuls("5", NULL, 0, &chosen, gpu);
    EXPECT(chosen == 5, "measured, with clusters: algorithm %d", chosen);
    tuned_matmuls("3", NULL, 1, &chosen, gpu);
    EXPECT(chosen == 3, "measured, another cache: algorithm %d", chosen);
    tuned_matmuls("1", run, 1, &chosen, gpu);
    EXPECT(chosen == 2, "the run's before the cache's: algorithm %d", chosen);
    tuned_matmuls("1", other, 1, &chosen, gpu);
    EXPECT(chosen == 3, "the cache's: algorithm %d", chosen);
    tuned_matmuls("0", other, 0, &chosen, gpu);
    EXPECT(chosen == 3, "the run keeps what it took from the cache: algorithm %d", chosen);
    unsetenv("XDG_CACHE_HOME");
}

// An algorithm that cublasLt no longer accepts is measured anew, as is a product of other settings.
static void test_stale_plans(const Gpu* gpu) {
    MatmulGpu ctx;
    char path[PATH_MAX], error[ERROR_BYTES] = "";
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 1, 0}, tf32 = {1, GELU_SEPARATE, 0, 1, 0};
    MatmulChoice choice;
    memset(&choice, 0, sizeof(choice));
    memset(choice.algorithm, 0x77, sizeof(choice.algorithm));
    const MatmulKey key = {5, 8, 8, 0, 1, DTYPE_FP32, DTYPE_FP32, CUBLASLT_EPILOGUE_BIAS, 0, 16, 1};
    choice.key = key;
    choice.chosen = 77;
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    matmul_choices_add(&ctx.chosen, &choice);
    test_size<float>(5, 8, 8, 0, BIAS_BY_CUBLAS, &ctx);
    int met = 0;
    for (int i = 0; i < ctx.plans_count; i++) {
        met += memcmp(&ctx.plans[i].key, &key, sizeof(key)) == 0 && ctx.plans[i].tuned;
        EXPECT(ctx.plans[i].chosen != 77, "an unknown algorithm is used");
    }
    EXPECT(met == 1, "%d plans of the product", met);
    snprintf(path, sizeof(path), "%s", test_tmpdir());
    matmul_gpu_save_plans(&ctx, path);
    matmul_gpu_close(&ctx);
    memory_close(&memory);

    matmul_gpu_open(&ctx, &memory, gpu, tf32);
    EXPECT(!matmul_gpu_load_plans(&ctx, path, error) && strstr(error, "tf32 off; this is") &&
               strstr(error, gpu->name) && ctx.chosen.count == 0,
           "plans of another machine: %s", error);
    matmul_gpu_close(&ctx);
    memory_close(&memory);
}

// A product is another one with autotune: what comes first does not decide for both.
static void test_tuned_apart(const Gpu* gpu) {
    MatmulGpu ctx;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 0, 0};
    float* rows = (float*)gpu_alloc(3 * 64, sizeof(float), "test");
    setenv("CUSIM_LT_FAST", "2", 1);
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    for (int i = 0; i < 3; i++) {
        ctx.settings.autotune = i == 1;
        matmul_forward(rows, rows + 64, rows + 128, (const float*)NULL, {2, 3, 5}, &ctx);
    }
    EXPECT(ctx.plans_count == 2 && !ctx.plans[0].tuned && ctx.plans[1].tuned && ctx.chosen.count == 1,
           "%d plans, %d choices", ctx.plans_count, ctx.chosen.count);
    EXPECT(!simulated || (ctx.plans[0].chosen == 0 && ctx.plans[1].chosen == 2), "algorithms %d and %d",
           ctx.plans[0].chosen, ctx.plans[1].chosen);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    matmul_gpu_close(&ctx);
    memory_close(&memory);
    gpu_free(rows);
    unsetenv("CUSIM_LT_FAST");
}

// All outputs of a GELU that races, or does not, while the epilogues of `slow` are; with a
// directory the plans are taken from it before and put there after. Sets *ways to a digit for each
// way that was chosen.
static float* gelu_outputs(const Linear<bf16>* l, GeluFusion fusion, const char* slow, const char* directory,
                           int* ways, const Gpu* gpu) {
    MatmulGpu ctx;
    char error[ERROR_BYTES] = "";
    const MatmulSettings settings = {0, fusion, 1, 1, 0};
    setenv("CUSIM_LT_FAST", "1", 1);
    setenv("CUSIM_LT_SLOW", slow, 1);
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    if (directory) {
        EXPECT(matmul_gpu_load_plans(&ctx, directory, error), "%s", error);
    }
    float* first = all_outputs(l, &ctx);
    EXPECT(ops_same_bits(first, all_outputs(l, &ctx), 3 * l->noc + 2 * l->nc + l->occ + l->OC + l->C),
           "slow %s: other bits in the second run", slow);
    *ways = 0;
    for (int i = 0; i < ctx.decisions_count; i++) {
        *ways = 10 * *ways + ctx.decisions[i].way;
    }
    if (directory) {
        matmul_gpu_save_plans(&ctx, directory);
    }
    matmul_gpu_close(&ctx);
    memory_close(&memory);
    unsetenv("CUSIM_LT_SLOW");
    unsetenv("CUSIM_LT_FAST");
    return first;
}

// The fastest way of an operation with GELU is taken, has the bits of that way where it does not
// race, and is kept.
static void test_gelu_race(const Gpu* gpu) {
    const struct {
        const char* slow;
        int ways;        // of forward and backward
        GeluFusion same; // does so without a race
    } cases[] = {{"", 10, GELU_FUSED},
                 {"gelu_aux_bias", 20, GELU_FUSED_BACKWARD},
                 {"dgelu_bgrad,dgelu", 12, GELU_FUSED_FORWARD},
                 {"gelu_aux_bias,dgelu_bgrad,dgelu", 22, GELU_SEPARATE}};
    const GeluFusion fused = (GeluFusion)(GELU_RACE | GELU_FUSED);
    int ways;
    for (int i = 0; i < 4 && simulated; i++) { // which way is the fastest is known here only
        char directory[PATH_MAX];
        snprintf(directory, sizeof(directory), "%s_%d", test_path("ways"), i);
        file_make_directory(directory);
        const Linear<bf16> l = linear_open<bf16>(24, 16, 32, 0, gpu);
        const size_t n = 3 * l.noc + 2 * l.nc + l.occ + l.OC + l.C;
        const float* got = gelu_outputs(&l, i % 2 ? GELU_RACE : fused, cases[i].slow, directory, &ways, gpu);
        EXPECT(ways == cases[i].ways, "slow %s: ways %d, wanted %d", cases[i].slow, ways, cases[i].ways);
        const float* want = gelu_outputs(&l, cases[i].same, "", NULL, &ways, gpu);
        EXPECT(ways == 0 && ops_same_bits(got, want, n), "slow %s: other bits than without a race",
               cases[i].slow);
        const float* again = gelu_outputs(&l, fused, i == 0 ? "gelu_aux_bias" : "", directory, &ways, gpu);
        EXPECT(ways == cases[i].ways && ops_same_bits(got, again, n), "slow %s: kept as ways %d",
               cases[i].slow, ways);
        case_close("race");
    }
    const Linear<bf16> l = linear_open<bf16>(24, 16, 32, 0, gpu);
    gelu_outputs(&l, fused, "dgelu_bgrad", NULL, &ways, gpu);
    EXPECT(!simulated || ways == 11, "GELU backward without the gradient of the bias: ways %d", ways);
    case_close("race");
}

// A captured step, launched twice, adds its gradient twice; a product that was done before makes no
// new plan.
static void test_capture(const Gpu* gpu) {
    enum { N = 12, C = 16, OC = 24 };
    MatmulGpu ctx;
    cudaGraph_t graph;
    cudaGraphExec_t step;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 1, 0};
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    const Linear<float> l = linear_open<float>(N, C, OC, 0, gpu);
    float* zero = ops_floats(OC * C);
    memset(zero, 0, OC * C * sizeof(float));
    const Gradient dweight = {device_upload<float>(zero, OC * C, 0, gpu), DTYPE_FP32};
    matmul_backward_weight(dweight, l.d_dout, l.d_inp, {N, C, OC}, GRADIENT_ADD, &ctx);
    const float* once = download((const float*)dweight.data, OC * C, gpu);
    const int plans = ctx.plans_count;

    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    matmul_backward_weight(dweight, l.d_dout, l.d_inp, {N, C, OC}, GRADIENT_ADD, &ctx);
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    EXPECT(plans > 0 && ctx.plans_count == plans, "%d plans, then %d", plans, ctx.plans_count);
    CUDA_CHECK(cudaGraphInstantiate(&step, graph, 0));
    CUDA_CHECK(cudaGraphLaunch(step, gpu->stream));
    CUDA_CHECK(cudaGraphLaunch(step, gpu->stream));
    const float* thrice = download((const float*)dweight.data, OC * C, gpu);
    for (int i = 0; i < OC * C; i++) {
        EXPECT_NEAR(thrice[i], 3 * once[i], 1e-5 * fabs(once[i]) + 1e-30, "element %d", i);
    }
    CUDA_CHECK(cudaGraphExecDestroy(step));
    CUDA_CHECK(cudaGraphDestroy(graph));
    matmul_gpu_close(&ctx);
    memory_close(&memory);
    case_close("capture");
}

// ---- what ends the program ----

// Matmuls of more shapes than there is room for plans, the first one again at the end.
static void test_many_plans(const Gpu* gpu) {
    MatmulGpu ctx;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 0, 0};
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    float *x = ops_normal(1, 1), *w = ops_normal(MATMUL_PLANS + 9, 1), *out = ops_floats(MATMUL_PLANS + 9);
    float *x_gpu = device_upload<float>(x, 1, 0, gpu),
          *w_gpu = device_upload<float>(w, MATMUL_PLANS + 9, 0, gpu),
          *out_gpu = device_upload<float>(out, MATMUL_PLANS + 9, 0, gpu);
    for (int OC = 1; OC <= MATMUL_PLANS + 9; OC++) {
        matmul_forward(out_gpu, x_gpu, w_gpu, (const float*)NULL, {1, 1, OC}, &ctx);
        // is never the oldest
        matmul_forward(out_gpu, x_gpu, w_gpu, (const float*)NULL, {1, 1, 1}, &ctx);
    }
    EXPECT(ctx.plans_count == MATMUL_PLANS && ctx.plans[0].key.cols == 1, "%d plans", ctx.plans_count);
    matmul_forward(out_gpu, x_gpu, w_gpu, (const float*)NULL, {1, 1, 2}, &ctx);
    const float* got = download(out_gpu, MATMUL_PLANS + 9, gpu);
    for (int i = 0; i < MATMUL_PLANS + 9; i++) {
        EXPECT_NEAR(got[i], x[0] * w[i], 1e-6, "column %d", i);
    }
    matmul_gpu_close(&ctx);
    memory_close(&memory);
    case_close("many plans");
}

static void too_many_plans(const void* arg) {
    MatmulGpu* ctx = (MatmulGpu*)arg;
    ctx->settings.autotune = 1;
    float* memory = (float*)gpu_alloc(3 * 512, sizeof(float), "test");
    for (int OC = 1; OC <= MATMUL_PLANS + 1; OC++) {
        matmul_forward(memory, memory + 512, memory + 1024, (const float*)NULL, {1, 1, OC}, ctx);
    }
}

static void no_algorithm_runs(const void* arg) {
    MatmulGpu* ctx = (MatmulGpu*)arg;
    float* rows = (float*)gpu_alloc(3 * 64, sizeof(float), "test");
    setenv("CUSIM_LT_BROKEN", "0", 1);
    matmul_forward(rows, rows + 64, rows + 128, (const float*)NULL, {2, 3, 5}, ctx);
}

static void no_algorithm_found(const void* arg) {
    setenv("CUSIM_LT_REFUSE", "default", 1);
    no_algorithm_runs(arg);
}

// By tokens and channels: for tiny models the least, for large micro-batches the most.
static void test_workspace(const Gpu* gpu) {
    static const int wanted[][3] = {
        {64, 64, 8}, {512, 768, 32}, {512, 1024, 32}, {513, 1024, 64}, {65536, 768, 128}};
    const size_t least = 8, most = matmul_most_workspace_(gpu->major) >> 20;
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        const size_t mib =
            matmul_workspace_bytes(gpu->device, (size_t)wanted[i][0], (size_t)wanted[i][1]) >> 20;
        EXPECT(mib == (most == least ? least : (size_t)wanted[i][2]), "%d tokens, %d channels: %zu MiB",
               wanted[i][0], wanted[i][1], mib);
    }
    EXPECT(matmul_workspace_bytes(1000, 1 << 16, 1024) == (size_t)128 << 20, "without a GPU: an H100's");
}

static void test_errors(const Gpu* gpu) {
    MatmulGpu ctx;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 0, 0};
    if (!simulated) {
        return; // a forked child cannot use the parent's GPU
    }
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    EXPECT(
        test_dies(too_many_plans, &ctx, EXIT_FAILURE, "(1, 257) = (1, 1) (257, 1)^T|already 256 tuned plans"),
        "plans");
    EXPECT(test_dies(no_algorithm_runs, &ctx, EXIT_FAILURE, "(2, 5) = (2, 3) (5, 3)^T|NOT_SUPPORTED"),
           "broken");
    EXPECT(test_dies(no_algorithm_found, &ctx, EXIT_FAILURE, "(2, 5) = (2, 3) (5, 3)^T|NOT_SUPPORTED"),
           "refused");
    matmul_gpu_close(&ctx);
    memory_close(&memory);
}

// ---- batches ----

// Element (i, j) of a factor of (rows, cols) that lies transposed or not.
static float factor(const float* x, int transposed, int rows, int cols, int i, int j) {
    return transposed ? x[(size_t)j * rows + i] : x[(size_t)i * cols + j];
}

// One matrix of a batch, and the sum of the terms' absolute values.
static void reference_batch(float* out, float* magnitude, const float* add, const float* left,
                            const float* right, const MatmulBatch* b) {
    for (int i = 0; i < b->rows; i++) {
        for (int j = 0; j < b->cols; j++) {
            double sum = 0, terms = 0;
            for (int k = 0; k < b->depth; k++) {
                const double term = (double)b->scale *
                                    factor(left, b->left_transposed, b->rows, b->depth, i, k) *
                                    factor(right, b->right_transposed, b->depth, b->cols, k, j);
                sum += term;
                terms += fabs(term);
            }
            const double added = add ? (double)b->add_scale * add[(size_t)i * b->cols + j] : 0;
            out[(size_t)i * b->cols + j] = (float)(sum + added);
            magnitude[(size_t)i * b->cols + j] = (float)(terms + fabs(added));
        }
    }
}

// A whole batch; `adds`: something is added.
template <class T> static void test_batch(MatmulBatch b, int adds, MatmulGpu* ctx) {
    const size_t outs = (size_t)b.rows * b.cols, lefts = (size_t)b.rows * b.depth,
                 rights = (size_t)b.depth * b.cols, n = outs * b.batch;
    float *left = ops_normal(lefts * b.batch, 1), *right = ops_normal(rights * b.batch, 1),
          *add = ops_normal(n, 1);
    const T *d_left = device_upload<T>(left, lefts * b.batch, 0, ctx->gpu),
            *d_right = device_upload<T>(right, rights * b.batch, 0, ctx->gpu),
            *d_add = device_upload<T>(add, n, 0, ctx->gpu);
    T* d_out = device_upload_nan<T>(n, 0, ctx->gpu);
    float *want = ops_floats(n), *magnitude = ops_floats(n);
    for (int i = 0; i < b.batch; i++) {
        reference_batch(want + i * outs, magnitude + i * outs, adds ? add + i * outs : NULL, left + i * lefts,
                        right + i * rights, &b);
    }
    matmul_batch(d_out, adds ? d_add : (const T*)NULL, d_left, d_right, b, ctx);
    compare<T>(download(d_out, n, ctx->gpu), want, magnitude, NULL, n, "batch");
    case_close("batch");
}

// Odd sizes: matrices after the first are not aligned.
template <class T> static void test_batches(const Gpu* gpu) {
    MatmulGpu ctx;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 1, 0};
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    for (int transposed = 0; transposed < 4; transposed++) {
        const MatmulBatch odd = {5, 7, 3, transposed / 2, transposed % 2, 3, -1.5f, 0.25f},
                          even = {32, 16, 8, transposed / 2, transposed % 2, 2, 2.0f, -4.0f},
                          single = {9, 16, 8, transposed / 2, transposed % 2, 1, 2.0f, 3.0f};
        test_batch<T>(odd, 1, &ctx);
        test_batch<T>(even, transposed == 1, &ctx);
        test_batch<T>(single, 1, &ctx);
    }
    EXPECT(strstr(matmul_name(&ctx.plans[0].key).text, ", 3 times"), "%s",
           matmul_name(&ctx.plans[0].key).text);
    EXPECT(ctx.plans[0].key.alignment == (int)sizeof(T), "alignment %d", ctx.plans[0].key.alignment);
    matmul_gpu_close(&ctx);
    memory_close(&memory);
}

TEST(matmul) {
    Gpu gpu;
    const MatmulSettings separate = {0, GELU_SEPARATE, 0, 0, 0}, forward = {0, GELU_FUSED_FORWARD, 1, 0, 0},
                         fused = {0, GELU_FUSED, 1, 1, 0};
    size_t free_before = 0, free_after = 0, total_bytes = 0;
    gpu_open(&gpu, 0);
    CUDA_CHECK(cudaMemGetInfo(&free_before, &total_bytes));
    test_sizes<float>(separate, &gpu);
    test_sizes<bf16>(forward, &gpu);
    UNSANITIZED(test_sizes<fp16>(fused, &gpu));
    test_sizes<bf16>(fused, &gpu);
    test_refusals("gelu_aux_bias,dgelu", CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, &gpu);
    test_refusals("bias,gelu_aux", CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, &gpu);
    test_refusals("bias,gelu_aux,gelu_aux_bias,dgelu", CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_DEFAULT,
                  &gpu);
    test_refusals("bias,dgelu_bgrad", CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_DGELU, &gpu);
    test_tf32(&gpu);
    test_autotune<float>(&gpu);
    test_autotune<bf16>(&gpu);
    test_autotune_keeps_first(&gpu);
    test_kept_plans(&gpu);
    test_stale_plans(&gpu);
    test_tuned_apart(&gpu);
    test_gelu_race(&gpu);
    test_capture(&gpu);
    test_batches<float>(&gpu);
    test_batches<bf16>(&gpu);
    test_many_plans(&gpu);
    test_errors(&gpu);
    test_workspace(&gpu);
    CUDA_CHECK(cudaMemGetInfo(&free_after, &total_bytes));
    EXPECT(!simulated || free_before == free_after, "%zu bytes of GPU memory lost", free_before - free_after);
    gpu_close(&gpu);
}
