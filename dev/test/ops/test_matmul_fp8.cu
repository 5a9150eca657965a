// test_matmul_fp8.cu -- rows and columns in E4M3 on the GPU with the bits of float8.h, and the
// matmuls of them against exact sums.
#include "llmc/ops/matmul_fp8.cuh"
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

template <class T> static void test_codes(int rows, int cols, const Gpu* gpu) {
    float* x = matrix<T>(rows, cols);
    T* on_gpu = upload<T>(x, (size_t)rows * (size_t)cols, 0, gpu);
    uint8_t* codes = unset<uint8_t>((size_t)rows * (size_t)cols, gpu);
    float* scales = unset<float>((size_t)(rows + cols), gpu);
    uint32_t* largest = unset<uint32_t>((size_t)cols, gpu);
    matmul_fp8_rows(codes, scales, on_gpu, rows, cols, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    expect_codes(codes, scales, x, rows, cols, cols, 1, "rows");
    if (rows % MATMUL_FP8_UNIT == 0) {
        matmul_fp8_turned(codes, scales, largest, on_gpu, rows, cols, gpu);
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        expect_codes(codes, scales, x, cols, rows, 1, cols, "columns");
    }
    gpu_free(largest);
    gpu_free(scales);
    gpu_free(codes);
    gpu_free(on_gpu);
    ops_close("codes");
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
    Memory memory = memory_on_gpu();
    MatmulFp8Factors factors;
    const size_t nc = (size_t)N * (size_t)C, noc = (size_t)N * (size_t)OC, occ = (size_t)OC * (size_t)C;
    matmul_fp8_gpu_open(&factors, &memory, (size_t)N, (size_t)int_max(C, OC), occ);
    float *inp = normal<T>(nc, 1), *weight = normal<T>(occ, 0.1f), *bias = normal<T>((size_t)OC, 1),
          *dout = normal<T>(noc, 1e-3f), *add = normal<T>(noc, 1);
    T *inp_gpu = upload<T>(inp, nc, 0, gpu), *weight_gpu = upload<T>(weight, occ, 0, gpu),
      *bias_gpu = upload<T>(bias, (size_t)OC, 0, gpu), *dout_gpu = upload<T>(dout, noc, 0, gpu),
      *add_gpu = upload<T>(add, noc, 0, gpu), *out = unset<T>(noc, gpu), *dinp = unset<T>(nc, gpu);
    const float *inp8 = all_in_fp8(inp, N, C, C, 1), *weight8 = all_in_fp8(weight, OC, C, C, 1),
                *dout8 = all_in_fp8(dout, N, OC, OC, 1), *turned8 = all_in_fp8(weight, C, OC, 1, C);
    matmul_fp8_forward(out, (const T*)NULL, inp_gpu, weight_gpu, bias_gpu, N, C, OC, &factors, ctx);
    expect_product(out, inp8, weight8, NULL, bias, N, C, OC, "out", gpu);
    matmul_fp8_forward(out, add_gpu, inp_gpu, weight_gpu, (const T*)NULL, N, C, OC, &factors, ctx);
    expect_product(out, inp8, weight8, add, NULL, N, C, OC, "out with a residual", gpu);
    matmul_fp8_backward_input(dinp, dout_gpu, weight_gpu, N, C, OC, &factors, ctx);
    expect_product(dinp, dout8, turned8, NULL, NULL, N, OC, C, "dinp", gpu);
    T* const all[] = {inp_gpu, weight_gpu, bias_gpu, dout_gpu, add_gpu, out, dinp};
    for (T* each : all) {
        gpu_free(each);
    }
    memory_close(&memory);
    ops_close("layer");
}

template <class T> static void test_type(const Gpu* gpu) {
    const int rows[] = {1, 9, 16, 31, 64, 80, 144}, cols[] = {16, 48, 64, 80, 272};
    for (int r : rows) {
        for (int c : cols) {
            test_codes<T>(r, c, gpu);
        }
    }
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
