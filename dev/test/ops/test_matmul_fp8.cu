// test_matmul_fp8.cu -- rows and columns in E4M3 on the GPU with the bits of float8.h, by kernels
// of their own and by those that store the numbers, and the matmuls of them against exact sums.
#include "llmc/ops/activation.cuh"
#include "llmc/ops/matmul_fp8.cuh"
#include "llmc/ops/norm_backward.cuh"
#include "dev/test/lib/gpu_ops.h"

// Rows and columns of several sizes; a row of zeros, and one with NaN.
template <class T> static float* matrix(int rows, int cols) {
    float* x = ops_normal((size_t)rows * (size_t)cols, 1);
    for (int i = 0; i < rows * cols; i++) {
        x[i] = i / cols == 5 ? 0 : ldexpf(x[i], i / cols % 23 - 11 - i % cols % 7);
    }
    if (rows > 9) {
        x[9 * cols + 1] = -INFINITY;
    }
    round_to<T>(x, (size_t)rows * (size_t)cols);
    return x;
}

// Compares `codes` (rows, cols) and `scales` with those of x, whose element (i, j) is at i * row +
// j * col.
static void expect_codes(const uint8_t* on_gpu, const float* scales_on_gpu, const float* x, int rows,
                         int cols, int row, int col, const char* what) {
    const size_t n = (size_t)rows * (size_t)cols;
    uint8_t* codes = ops_bytes(n);
    float* scales = ops_floats((size_t)rows);
    CUDA_CHECK(cudaMemcpy(codes, on_gpu, n, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(scales, scales_on_gpu, (size_t)rows * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < rows; i++) {
        uint32_t largest = 0;
        for (int j = 0; j < cols; j++) {
            const uint32_t magnitude = e4m3_magnitude(x[i * row + j * col]);
            largest = magnitude > largest ? magnitude : largest;
        }
        const float scale = e4m3_power(e4m3_exponent(largest)), inverse = e4m3_power(-e4m3_exponent(largest));
        EXPECT(isnan(scale) ? isnan(scales[i]) : scale == scales[i], "%s, %d x %d: scale %d is %a, wanted %a",
               what, rows, cols, i, (double)scales[i], (double)scale);
        for (int j = 0; j < cols; j++) {
            const uint8_t want = e4m3_from_float(x[i * row + j * col] * inverse);
            EXPECT(codes[i * cols + j] == want, "%s, %d x %d: code %d, %d is %02x, wanted %02x", what, rows,
                   cols, i, j, codes[i * cols + j], want);
        }
    }
}

static E4m3Rows room_for(int rows, int cols, const Gpu* gpu) {
    return {unset<uint8_t>((size_t)rows * (size_t)cols, gpu), unset<float>((size_t)rows, gpu)};
}

static void free_room(E4m3Rows room) {
    gpu_free(room.codes);
    gpu_free(room.scales);
}

// Compares codes with the codes of x (rows, cols) on the GPU, as it is stored; frees them.
template <class T>
static void expect_codes_of(E4m3Rows got, const T* x, int rows, int cols, const char* what, const Gpu* gpu) {
    const float* stored = download(x, (size_t)rows * (size_t)cols, gpu);
    expect_codes(got.codes, got.scales, stored, rows, cols, cols, 1, what);
    free_room(got);
}

template <class T> static void test_codes(int rows, int cols, const Gpu* gpu) {
    float* x = matrix<T>(rows, cols);
    T* on_gpu = upload<T>(x, (size_t)rows * (size_t)cols, 0, gpu);
    uint8_t* codes = unset<uint8_t>((size_t)rows * (size_t)cols, gpu);
    float* scales = unset<float>((size_t)(rows + cols), gpu);
    uint32_t* largest = unset<uint32_t>((size_t)cols, gpu);
    e4m3_rows({codes, scales}, on_gpu, rows, cols, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    expect_codes(codes, scales, x, rows, cols, cols, 1, "rows");
    if (rows % E4M3_UNIT == 0) {
        matmul_fp8_turned({codes, scales}, largest, on_gpu, rows, cols, gpu);
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        expect_codes(codes, scales, x, cols, rows, 1, cols, "columns");
    }
    gpu_free(largest);
    gpu_free(scales);
    gpu_free(codes);
    gpu_free(on_gpu);
    ops_close("codes");
}

// The forward pass of a norm with codes and without: the same bits, and the codes of these.
template <class T> static void test_norm_forward(NormGpu<T> norm, const T* inp, const Gpu* gpu) {
    const int N = norm.N, C = norm.C;
    const size_t n = (size_t)N * (size_t)C;
    T* out = unset<T>(n, gpu);
    norm_forward(out, inp, &norm, gpu);
    const float* want = download(out, n, gpu);
    CUDA_CHECK(cudaMemsetAsync(out, 0xFF, n * sizeof(T), gpu->stream));
    norm.codes = room_for(N, C, gpu);
    norm_forward(out, inp, &norm, gpu);
    EXPECT(ops_same_bits(download(out, n, gpu), want, n), "norm %d x %d with codes: other bits", N, C);
    expect_codes_of(norm.codes, (const T*)out, N, C, "norm", gpu);
    gpu_free(out);
}

// Likewise its backward pass, which adds.
template <class T>
static void test_norm_backward(NormGpu<T> norm, const T* inp, const T* dout, const Gpu* gpu) {
    const int N = norm.N, C = norm.C;
    const size_t n = (size_t)N * (size_t)C;
    float* before = normal<T>(n, 1);
    Memory memory = memory_on_gpu();
    NormScratch scratch;
    norm_open(&scratch, &memory, N, C);
    float* sums = unset<float>((size_t)(3 * C), gpu);
    const float *want = NULL, *want_sums = NULL;
    for (int with = 0; with < 2; with++) {
        T* dinp = upload<T>(before, n, 0, gpu);
        const E4m3Rows codes = with ? room_for(N, C, gpu) : E4m3Rows{NULL, NULL};
        const NormGradients d = {{sums, DTYPE_FP32}, {norm.kind == NORM_LAYER ? sums + C : NULL, DTYPE_FP32},
                                 GRADIENT_SET,       {sums + 2 * C, DTYPE_FP32},
                                 GRADIENT_SET,       codes};
        norm_backward(dinp, GRADIENT_ADD, &d, dout, inp, &norm, &scratch, gpu);
        const float *got = download(dinp, n, gpu), *got_sums = download(sums, (size_t)(3 * C), gpu);
        if (with) {
            EXPECT(ops_same_bits(got, want, n), "dinp %d x %d with codes: other bits", N, C);
            EXPECT(ops_same_bits(got_sums, want_sums, (size_t)(3 * C)), "sums of %d x %d: other bits", N, C);
            expect_codes_of(codes, (const T*)dinp, N, C, "dinp of a norm", gpu);
        }
        want = got;
        want_sums = got_sums;
        gpu_free(dinp);
    }
    gpu_free(sums);
    memory_close(&memory);
}

template <class T> static void test_norm(NormKind kind, int N, int C, const Gpu* gpu) {
    const size_t n = (size_t)N * (size_t)C;
    T *inp = upload<T>(ops_normal(n, 1), n, 0, gpu), *dout = upload<T>(ops_normal(n, 0.01f), n, 0, gpu),
      *weight = upload<T>(ops_normal((size_t)C, 1), (size_t)C, 0, gpu),
      *bias = upload<T>(ops_normal((size_t)C, 1), (size_t)C, 0, gpu);
    float *mean = unset<float>((size_t)N, gpu), *rstd = unset<float>((size_t)N, gpu);
    const NormGpu<T> norm = {kind, 1e-5f, 1, weight, kind == NORM_LAYER ? bias : NULL, mean, rstd, N, C, {}};
    test_norm_forward(norm, (const T*)inp, gpu);
    test_norm_backward(norm, (const T*)inp, (const T*)dout, gpu);
    for (T* each : {inp, dout, weight, bias}) {
        gpu_free(each);
    }
    gpu_free(mean);
    gpu_free(rstd);
    ops_close("norms");
}

// An activation and its gradient, of which one row has NaN.
template <class T> static void test_activation(ActivationKind kind, int N, int F, const Gpu* gpu) {
    const int gates = activation_gates(kind);
    const size_t n = (size_t)N * (size_t)F, h = n * (size_t)gates;
    float *x = ops_normal(h, 2), *d = ops_normal(n, 1);
    x[h - 3] = NAN;
    T *pre = upload<T>(x, h, 0, gpu), *dact = upload<T>(d, n, 0, gpu), *act = unset<T>(n, gpu),
      *dpre = unset<T>(h, gpu);
    activation_forward(act, pre, n / (size_t)F, (size_t)F, kind, gpu);
    const float* want = download(act, n, gpu);
    E4m3Rows codes = room_for(N, F, gpu);
    activation_forward_codes(codes, act, pre, (size_t)N, (size_t)F, kind, gpu);
    EXPECT(ops_same_bits(download(act, n, gpu), want, n), "%s %d x %d with codes: other bits",
           activation_word(kind), N, F);
    expect_codes_of(codes, (const T*)act, N, F, activation_word(kind), gpu);
    activation_backward(dpre, dact, pre, (size_t)N, (size_t)F, kind, gpu);
    const float* want_dpre = download(dpre, h, gpu);
    codes = room_for(N, gates * F, gpu);
    T* out = gates == 1 ? dact : dpre; // in place
    activation_backward_codes(codes, out, dact, pre, (size_t)N, (size_t)F, kind, gpu);
    EXPECT(ops_same_bits(download(out, h, gpu), want_dpre, h), "gradient of %s %d x %d: other bits",
           activation_word(kind), N, F);
    expect_codes_of(codes, (const T*)out, N, gates * F, activation_word(kind), gpu);
    for (T* each : {pre, dact, act, dpre}) {
        gpu_free(each);
    }
    ops_close("activations");
}

// Rows of one warp, of several, and too long for the kernels that have them in registers.
template <class T> static void test_fused(const Gpu* gpu) {
    const NormKind norms[] = {NORM_LAYER, NORM_RMS};
    for (NormKind kind : norms) {
        for (int C : {16, 768, 1600, 2064}) {
            test_norm<T>(kind, 33, C, gpu);
        }
        test_norm<T>(kind, 1, 768 * NORM_ITEMS * Pack<T>::SIZE + 16, gpu);
        test_norm<T>(kind, 3, NORM_BACKWARD_THREADS * Pack<T>::SIZE + 16, gpu);
    }
    for (int i = 0; i < ACTIVATION_COUNT; i++) {
        for (int F : {16, 1040, 3072}) {
            test_activation<T>((ActivationKind)i, 9, F, gpu);
        }
        test_activation<T>((ActivationKind)i, 1, 1024 * ACTIVATION_ITEMS * Pack<T>::SIZE + 16, gpu);
    }
}

// The exact sum of the products of two rows' codes, and the sum of their magnitudes.
typedef struct {
    double sum, magnitude;
} Dot;

static float in_fp8(const float* row, int at, int stride, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t magnitude = e4m3_magnitude(row[i * stride]);
        largest = magnitude > largest ? magnitude : largest;
    }
    const int exponent = e4m3_exponent(largest);
    return e4m3_to_float(e4m3_from_float(row[at * stride] * e4m3_power(-exponent))) * e4m3_power(exponent);
}

static float* all_in_fp8(const float* x, int rows, int cols, int row, int col) {
    float* to = ops_floats((size_t)rows * (size_t)cols);
    for (int i = 0; i < rows * cols; i++) {
        to[i] = in_fp8(x + i / cols * row, i % cols, col, cols);
    }
    return to;
}

static Dot dot(const float* a, const float* b, int n) {
    Dot d = {0, 0};
    for (int i = 0; i < n; i++) {
        d.sum += (double)a[i] * b[i];
        d.magnitude += fabs((double)a[i] * b[i]);
    }
    return d;
}

// Sums of up to 160 terms in tensor cores with at least 14 bits, and a rounding to T.
template <class T>
static void expect_product(const T* on_gpu, const float* left, const float* right, const float* add,
                           const float* bias, int N, int depth, int cols, const char* what, const Gpu* gpu) {
    const float* got = download(on_gpu, (size_t)N * (size_t)cols, gpu);
    for (int i = 0; i < N * cols; i++) {
        const Dot d = dot(left + i / cols * depth, right + i % cols * depth, depth);
        const double want = d.sum + (add ? add[i] : 0) + (bias ? bias[i % cols] : 0);
        // cublasLt may round before a kernel adds the bias
        const double rounded = fabs(want) + (bias ? fabs(bias[i % cols]) : 0);
        EXPECT_NEAR(got[i], want, 2 * roundoff<T>() * rounded + 0x1p-13 * d.magnitude,
                    "%s of %d x %d x %d, element %d, %s", what, N, depth, cols, i, dtype_name(DTYPE_OF(T)));
    }
}

template <class T> static void test_layer(int N, int C, int OC, MatmulGpu* ctx, const Gpu* gpu) {
    const size_t nc = (size_t)N * (size_t)C, noc = (size_t)N * (size_t)OC, occ = (size_t)OC * (size_t)C;
    float *inp = normal<T>(nc, 1), *weight = normal<T>(occ, 0.1f), *bias = normal<T>((size_t)OC, 1),
          *dout = normal<T>(noc, 1e-3f), *add = normal<T>(noc, 1);
    T *inp_gpu = upload<T>(inp, nc, 0, gpu), *weight_gpu = upload<T>(weight, occ, 0, gpu),
      *bias_gpu = upload<T>(bias, (size_t)OC, 0, gpu), *dout_gpu = upload<T>(dout, noc, 0, gpu),
      *add_gpu = upload<T>(add, noc, 0, gpu), *out = unset<T>(noc, gpu), *dinp = unset<T>(nc, gpu);
    const float *inp8 = all_in_fp8(inp, N, C, C, 1), *weight8 = all_in_fp8(weight, OC, C, C, 1),
                *dout8 = all_in_fp8(dout, N, OC, OC, 1), *turned8 = all_in_fp8(weight, C, OC, 1, C);
    const T* none = NULL;
    const E4m3Rows in = room_for(N, C, gpu), rows = room_for(OC, C, gpu), turned = room_for(C, OC, gpu),
                   d = room_for(N, OC, gpu);
    uint32_t* largest = unset<uint32_t>((size_t)C, gpu);
    e4m3_rows(in, inp_gpu, N, C, gpu);
    e4m3_rows(rows, weight_gpu, OC, C, gpu);
    e4m3_rows(d, dout_gpu, N, OC, gpu);
    matmul_fp8_turned(turned, largest, weight_gpu, OC, C, gpu);
    matmul_fp8(out, none, in, rows, bias_gpu, {N, C, OC}, ctx);
    expect_product(out, inp8, weight8, NULL, bias, N, C, OC, "out", gpu);
    matmul_fp8(out, add_gpu, in, rows, none, {N, C, OC}, ctx);
    expect_product(out, inp8, weight8, add, NULL, N, C, OC, "out with a residual", gpu);
    matmul_fp8(dinp, none, d, turned, none, {N, OC, C}, ctx);
    expect_product(dinp, dout8, turned8, NULL, NULL, N, OC, C, "dinp", gpu);
    T* const all[] = {inp_gpu, weight_gpu, bias_gpu, dout_gpu, add_gpu, out, dinp};
    for (T* each : all) {
        gpu_free(each);
    }
    for (E4m3Rows each : {in, rows, turned, d}) {
        free_room(each);
    }
    gpu_free(largest);
    ops_close("layer");
}

template <class T> static void test_type(const Gpu* gpu) {
    const int rows[] = {1, 9, 16, 31, 64, 80, 144}, cols[] = {16, 48, 64, 80, 272};
    for (int r : rows) {
        for (int c : cols) {
            test_codes<T>(r, c, gpu);
        }
    }
    test_fused<T>(gpu);
    if (gpu->major != 9) {
        return;
    }
    MatmulGpu ctx;
    Memory memory = memory_on_gpu();
    MatmulSettings settings = {};
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    test_layer<T>(1, 16, 16, &ctx, gpu);
    test_layer<T>(31, 48, 80, &ctx, gpu);
    test_layer<T>(33, 160, 48, &ctx, gpu);
    matmul_gpu_close(&ctx);
    memory_close(&memory);
}

TEST_TYPES(matmul_fp8)
