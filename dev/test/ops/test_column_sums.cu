// test_column_sums.cu -- sums over the rows of a matrix on the GPU, against sums in double: every
// type, unaligned sizes and addresses, many groups of rows, sums set and added, of both types,
// partial sums of several vectors.
#include "llmc/ops/column_sums.cuh"
#include "dev/test/lib/gpu_ops.h"

// Sums of `rows` (N, C) over N, and of their absolute values, on top of `onto`.
static void want_sums(double* sum, double* magnitude, const float* rows, const float* onto, int N, int C) {
    for (int c = 0; c < C; c++) {
        sum[c] = onto ? onto[c] : 0;
        magnitude[c] = fabs(sum[c]);
        for (int n = 0; n < N; n++) {
            sum[c] += rows[(size_t)n * C + c];
            magnitude[c] += fabs(rows[(size_t)n * C + c]);
        }
    }
}

// One rounding to G, and some epsilon of the terms: they are added one after the other in groups
// only.
template <class G>
static void compare(const float* got, const double* want, const double* magnitude, int N, int C) {
    for (int c = 0; c < C; c++) {
        EXPECT_NEAR(got[c], want[c],
                    roundoff<G>() * fabs(want[c]) * 1.01 + 16 * FLT_EPSILON * magnitude[c] + 0x1p-25,
                    "%d x %d, column %d, %s", N, C, c, dtype_name(DTYPE_OF(G)));
    }
}

template <class T, class G>
static void test_sums(int N, int C, size_t shift, GradientMode mode, const Gpu* gpu) {
    float *rows = ops_normal((size_t)N * C, 1), *onto = ops_normal(C, 1), *nothing = ops_floats(C);
    double *sum = ops_doubles(C), *magnitude = ops_doubles(C);
    const float* first = NULL;
    const T* d_rows = upload<T>(rows, (size_t)N * C, shift, gpu);
    float* partial = (float*)gpu_alloc((size_t)column_sums_groups(N, C) * C, sizeof(float), "test");
    for (int run = 0; run < 2; run++) {
        G* to = upload<G>(mode == GRADIENT_ADD ? onto : nothing, C, 0, gpu);
        const Gradient gradient = {to, DTYPE_OF(G)};
        column_sums(gradient, partial, d_rows, N, C, mode, gpu);
        const float* got = download(to, C, gpu);
        EXPECT(run == 0 || ops_same_bits(got, first, C), "again, %d x %d", N, C);
        first = got;
        gpu_free(to);
    }
    want_sums(sum, magnitude, rows, mode == GRADIENT_ADD ? onto : NULL, N, C);
    compare<G>(first, sum, magnitude, N, C);
    gpu_free(partial);
    gpu_free((void*)(d_rows - shift));
    ops_close("sums");
}

// Partial sums of type P of `count` vectors beside each other; each goes where it should.
template <class T, class P, class G>
static void test_finish(int groups, int count, int C, GradientMode mode, const Gpu* gpu) {
    const int stride = 3 * C;
    float* partial = ops_normal((size_t)groups * stride, 1);
    const P* d_partial = upload<P>(partial, (size_t)groups * stride, 0, gpu);
    double *sum = ops_doubles(stride), *magnitude = ops_doubles(stride);
    float *onto = ops_normal(stride, 1), *before = ops_copy(onto, stride);
    G* to = upload<G>(onto, stride, 0, gpu);
    const Gradient gradients[3] = {{to, DTYPE_OF(G)}, {to + C, DTYPE_OF(G)}, {to + 2 * C, DTYPE_OF(G)}};
    column_sums_finish<T>(gradients, count, ColumnPartials<float>{d_partial, groups, stride, C}, mode, gpu);
    const float* got = download(to, stride, gpu);
    want_sums(sum, magnitude, partial, mode == GRADIENT_ADD ? onto : NULL, groups, stride);
    compare<G>(got, sum, magnitude, groups, count * C);
    for (int c = count * C; c < stride; c++) {
        EXPECT(got[c] == to_float(from_float<G>(before[c])), "column %d behind %d vectors changed", c, count);
    }
    gpu_free(to);
    gpu_free((void*)d_partial);
    ops_close("finish");
}

static void test_groups(void) {
    for (int C = 1; C < 200000; C += 1 + C / 3) {
        for (int N = 1; N < 1 << 22; N += 1 + N / 3) {
            const int groups = column_sums_groups(N, C);
            EXPECT(groups >= 1 && groups <= 1024 && (groups == 1 || groups * C <= COLUMN_SUMS_FLOATS),
                   "%d groups of %d x %d", groups, N, C);
        }
    }
    EXPECT(column_sums_bytes(64, 8, 2) == 64 * 8 * 2 + 2 * 8 * 4, "bytes");
}

template <class T> static void test_type(const Gpu* gpu) {
    const int sizes[][2] = {{1, 1},    {31, 33},  {7, 8},     {130, 264},
                            {1000, 8}, {3, 1032}, {66000, 1}, {65, 768}};
    for (const int* size : sizes) {
        test_sums<T, float>(size[0], size[1], 0, GRADIENT_SET, gpu);
        test_sums<T, T>(size[0], size[1], 0, GRADIENT_ADD, gpu);
    }
    test_sums<T, T>(70, 16, 1, GRADIENT_SET, gpu); // no pack can be read here
    for (int count = 1; count <= 3; count++) {
        test_finish<T, float, T>(1, count, 31, GRADIENT_ADD, gpu);
        test_finish<T, float, float>(100, count, 33, GRADIENT_SET, gpu);
    }
    test_finish<T, T, T>(1, 1, 40, GRADIENT_ADD, gpu);
}

TEST(column_sums) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_groups();
    test_type<float>(&gpu);
    test_type<bf16>(&gpu);
    UNSANITIZED(test_type<fp16>(&gpu));
    gpu_close(&gpu);
}
