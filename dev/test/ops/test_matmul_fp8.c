// test_matmul_fp8.c -- the matmuls with factors in fp8 against PyTorch's in float64, and rows that
// do not depend on those beside them.
#include "llmc/base/float8.h"
#include "llmc/base/vec.h"
#include "llmc/ops/matmul_fp8.h"
#include "dev/test/lib/inputs.h"
#include "dev/test/lib/ops.h"

enum { N = 13, C = 31, OC = 37 }; // of the fixture

static MatmulScratch scratch;
static MatmulFp8Scratch fp8;

static void open_scratch(Memory* memory, size_t left, size_t right) {
    *memory = memory_on_host();
    matmul_open(&scratch, memory);
    matmul_fp8_open(&fp8, memory, left, right);
}

// Returns what dev/ref/make_fp8_fixtures.py makes: element (i, j) of a stream times 2^(a i + b).
static float* input(int rows, int cols, int stream, int a, int b) {
    float* x = ops_floats((size_t)rows * (size_t)cols);
    for (int i = 0; i < rows * cols; i++) {
        x[i] = ldexpf(uniform((size_t)i, stream), a * (i / cols) + b);
    }
    return x;
}

// Fp32 rounds sums of up to 37 terms, each of the size of the largest of its row.
static void expect_rows(const float* got, FILE* file, int rows, int cols, const char* what) {
    double want[OC];
    for (int r = 0; r < rows; r++) {
        double largest = 0;
        CHECK(fread(want, sizeof(double), (size_t)cols, file) == (size_t)cols, "linear.bin: too short");
        for (int c = 0; c < cols; c++) {
            largest = fmax(largest, fabs(want[c]));
        }
        for (int c = 0; c < cols; c++) {
            EXPECT_NEAR(got[r * cols + c], want[c], 1e-6 * largest, "%s[%d][%d]", what, r, c);
        }
    }
}

TEST(matmul_fp8_against_pytorch) {
    Memory memory;
    vec_flush_denormals(); // as the trainer does
    open_scratch(&memory, N * OC, OC * C);
    float *inp = input(N, C, 1, 3, -20), *weight = input(OC, C, 2, 0, 0), *bias = input(1, OC, 3, 0, 0),
          *dout = input(N, OC, 4, -3, 20), *out = ops_floats(N * OC), *dinp = ops_floats(N * C);
    for (int i = 0; i < OC * C; i++) {
        weight[i] = ldexpf(weight[i], -(i / C % 5));
    }
    FILE* file = fopen("dev/ref/fixtures/fp8/linear.bin", "rb");
    CHECK(file, "linear.bin: cannot read");
    matmul_fp8_forward_cpu(out, inp, weight, bias, (MatmulSizes){N, C, OC}, &fp8, &scratch);
    expect_rows(out, file, N, OC, "out");
    matmul_fp8_backward_input_cpu(dinp, dout, weight, (MatmulSizes){N, C, OC}, &fp8, &scratch);
    expect_rows(dinp, file, N, C, "dinp");
    EXPECT(fgetc(file) == EOF, "linear.bin: too long");
    fclose(file);
    memory_close(&memory);
    ops_close("fixture");
}

// Columns of a matrix are rounded as the rows of its transpose, at sizes around those that a thread
// rounds together.
TEST(matmul_fp8_columns) {
    const int sizes[] = {1, 31, 63, 64, 65, 200};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const int rows = 33, cols = sizes[i];
        float *x = ops_normal((size_t)(rows * cols), 3), *turned = ops_floats((size_t)(rows * cols)),
              *by_column = ops_floats((size_t)(rows * cols)), *by_row = ops_floats((size_t)(rows * cols));
        for (int j = 0; j < rows * cols; j++) {
            turned[j % cols * rows + j / cols] = x[j] = ldexpf(x[j], j % cols % 40 - j / cols % 3);
        }
        matmul_fp8_round_columns_cpu(by_column, x, rows, cols);
        matmul_fp8_round_rows_cpu(by_row, turned, cols, rows);
        for (int j = 0; j < rows * cols; j++) {
            EXPECT(by_column[j] == by_row[j % cols * rows + j / cols], "%d columns: row %d, column %d", cols,
                   j / cols, j % cols);
            EXPECT_NEAR(by_column[j], x[j], fabs(x[j]) / 16 + 1e-3 * fabs(x[j % cols]), "%d columns: %d",
                        cols, j);
        }
        ops_close("columns");
    }
}

// A row gives the same bits alone and among others, and an infinity in it makes it NaN, no other.
TEST(matmul_fp8_rows_are_alone) {
    enum { ROWS = 70 };
    Memory memory;
    open_scratch(&memory, ROWS * OC, OC * C);
    float *inp = input(ROWS, C, 5, 0, 0), *weight = input(OC, C, 6, 0, 0), *all = ops_floats(ROWS * OC),
          *one = ops_floats(OC);
    inp[3 * C + 7] = INFINITY;
    inp[5 * C] = -NAN;
    matmul_fp8_forward_cpu(all, inp, weight, NULL, (MatmulSizes){ROWS, C, OC}, &fp8, &scratch);
    for (int r = 0; r < ROWS; r++) {
        matmul_fp8_forward_cpu(one, inp + r * C, weight, NULL, (MatmulSizes){1, C, OC}, &fp8, &scratch);
        for (int o = 0; o < OC; o++) {
            const int is_nan = r == 3 || r == 5;
            EXPECT(is_nan ? isnan(all[r * OC + o]) && isnan(one[o]) : all[r * OC + o] == one[o],
                   "row %d, column %d: %a among others, %a alone", r, o, (double)all[r * OC + o],
                   (double)one[o]);
        }
    }
    memory_close(&memory);
    ops_close("rows");
}
