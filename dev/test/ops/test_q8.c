// test_q8.c -- 8-bit weights: the contents of a block; every kernel that runs on this machine
// against exact sums, with the same bits as plain C.
#include "llmc/ops/q8.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/base/threads.h"
#include "dev/test/lib/ops.h"

enum { BLOCK = QUANTIZED_BLOCK };

static QuantizedBlock* encoded(const float* x, size_t rows, size_t cols) {
    QuantizedBlock* blocks =
        (QuantizedBlock*)(void*)ops_floats(rows * cols / BLOCK * sizeof(QuantizedBlock) / 2);
    for (size_t r = 0; r < rows; r++) {
        quantized_encode(blocks + r * cols / BLOCK, x + r * cols, cols);
    }
    return blocks;
}

// For inputs of up to N rows.
static QuantizedScratch scratch_of(size_t N, size_t C) {
    QuantizedScratch scratch;
    memset(&scratch, 0, sizeof(scratch));
    scratch.product = quantized_kernel().product;
    scratch.rows = ops_floats(quantized_rows_bytes(N, C) / sizeof(float));
    return scratch;
}

static void test_block(void) {
    float x[BLOCK] = {0}, back[BLOCK];
    QuantizedBlock block;
    quantized_encode(&block, x, BLOCK);
    for (int i = 0; i < BLOCK; i++) {
        EXPECT(block.q[i] == 0, "zeros: element %d is %d", i, block.q[i]);
    }
    x[7] = -127, x[8] = 2.5f, x[9] = -2.5f, x[10] = 2.4999998f, x[11] = 0.49999997f, x[12] = 126.6f;
    quantized_encode(&block, x, BLOCK);
    const int wanted[] = {0, -127, 3, -3, 2, 0, 127, 0};
    for (int i = 6; i < 14; i++) {
        EXPECT(block.q[i] == wanted[i - 6], "scale 1: %g became %d", (double)x[i], block.q[i]);
    }
    x[7] = -8e6f; // the scale still fits fp16
    quantized_encode(&block, x, BLOCK);
    quantized_decode(back, &block, BLOCK);
    EXPECT_NEAR(back[7], -8e6, 4e3, "large");
    EXPECT(back[8] == 0, "beside it: %g", (double)back[8]);
}

// A number comes back within half a step of its block, and what rounding the scale to fp16 adds.
static void test_error_of_a_block(void) {
    enum { COLS = 50 * BLOCK };
    float *x = ops_normal(COLS, 0.02f), *back = ops_floats(COLS);
    quantized_decode(back, encoded(x, 1, COLS), COLS);
    for (int b = 0; b < COLS; b += BLOCK) {
        float largest = 0;
        for (int i = b; i < b + BLOCK; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
        }
        for (int i = b; i < b + BLOCK; i++) {
            EXPECT_NEAR(back[i], x[i], largest / 127 * 0.5 + largest / 2048, "element %d", i);
        }
    }
    ops_close("error of a block");
}

// Sets the expected result of the layer: the exact sums of the rounded factors.
static void want(double* out, double* magnitude, const float* inp, const QuantizedBlock* weight,
                 const float* bias, int N, int C, int OC) {
    const QuantizedRows rows =
        quantized_rows_bind(scratch_of((size_t)N, (size_t)C).rows, (size_t)N, (size_t)C);
    quantized_rows(rows, inp, (size_t)N, (size_t)C);
    for (int n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            double sum = bias ? bias[o] : 0, size = fabs(sum);
            for (int c = 0; c < C; c++) {
                const QuantizedBlock* block = &weight[(o * C + c) / BLOCK];
                const double product = (double)rows.q[n * C + c] * rows.scales[(n * C + c) / BLOCK] *
                                       block->q[c % BLOCK] * fp16_to_float(block->scale);
                sum += product;
                size += fabs(product);
            }
            out[n * OC + o] = sum;
            magnitude[n * OC + o] = size;
        }
    }
}

// The layer by one kernel, in one thread.
static float* by_kernel(QuantizedProduct product, QuantizedRows rows, const QuantizedBlock* weight,
                        const float* bias, int N, int C, int OC) {
    float* out = ops_floats((size_t)N * (size_t)OC);
    const QuantizedLayer_ layer = {out, rows, weight, bias, N, C / BLOCK, OC};
    quantized_chunk_(&layer, 0, quantized_run_(N, OC), product);
    return out;
}

static void check(QuantizedKernel kernel, int N, int C, int OC) {
    const size_t n = (size_t)N * (size_t)OC;
    const float *inp = ops_normal((size_t)N * (size_t)C, 3),
                *bias = OC % 2 ? ops_normal((size_t)OC, 1) : NULL;
    const QuantizedBlock* weight = encoded(ops_normal((size_t)OC * (size_t)C, 0.05f), (size_t)OC, (size_t)C);
    double *wanted = ops_doubles(n), *magnitude = ops_doubles(n);
    want(wanted, magnitude, inp, weight, bias, N, C, OC);
    const QuantizedRows rows =
        quantized_rows_bind(scratch_of((size_t)N, (size_t)C).rows, (size_t)N, (size_t)C);
    quantized_rows(rows, inp, (size_t)N, (size_t)C);
    const float* out = by_kernel(kernel.product, rows, weight, bias, N, C, OC);
    // C / 32 blocks are added up, half an epsilon each; three more roundings scale a block and add
    // the bias.
    EXPECT_NEAR(ops_error(out, wanted, magnitude, n), 0, 3 + C / BLOCK / 2.0, "%s: %d rows, C = %d, OC = %d",
                kernel.name, N, C, OC);
    const float* plain = by_kernel(quantized_product_plain_, rows, weight, bias, N, C, OC);
    EXPECT(ops_same_bits(out, plain, n), "%s and plain C: %d rows, C = %d, OC = %d", kernel.name, N, C, OC);
    ops_close(kernel.name);
}

static void test_kernels(void) {
    QuantizedKernel kernels[QUANTIZED_KERNELS];
    const int sizes[][3] = {{1, 32, 1},  {1, 64, 3},   {4, 32, 2},   {5, 96, 33}, {4, 224, 3},
                            {7, 768, 5}, {3, 1600, 2}, {8, 160, 64}, {1, 256, 4}, {5, 288, 4}};
    for (int k = 0; k < quantized_kernels(kernels); k++) {
        for (size_t i = 0; kernels[k].runs && i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            check(kernels[k], sizes[i][0], sizes[i][1], sizes[i][2]);
        }
        if (!kernels[k].runs) {
            printf("skipped: quantized: this processor has no %s\n", kernels[k].name);
        }
    }
}

// ---- tiles ----

// A layer by tiles has the bits of a layer by rows.
static void check_tiles(QuantizedTileKernel tile, int N, int C, int OC) {
    const size_t n = (size_t)N * (size_t)OC;
    const float *inp = ops_normal((size_t)N * (size_t)C, 3),
                *bias = OC % 2 ? ops_normal((size_t)OC, 1) : NULL;
    const QuantizedBlock* weight = encoded(ops_normal((size_t)OC * (size_t)C, 0.05f), (size_t)OC, (size_t)C);
    const QuantizedScratch rows = scratch_of((size_t)N, (size_t)C);
    QuantizedScratch tiles;
    float *by_rows = ops_floats(n), *by_tiles = ops_floats(n);
    Memory memory = memory_on_host();
    quantized_open_(&tiles, &memory, tile, (size_t)N, (size_t)C);
    tiles.product = NULL; // fails where it is used
    q8_matmul_cpu(by_rows, inp, weight, bias, (MatmulSizes){N, C, OC}, &rows);
    q8_matmul_cpu(by_tiles, inp, weight, bias, (MatmulSizes){N, C, OC}, &tiles);
    EXPECT(ops_same_bits(by_rows, by_tiles, n), "tiles: %d rows, C = %d, OC = %d", N, C, OC);
    memory_close(&memory);
    ops_close("tiles");
}

// Every edge of a tile; all numbers of blocks up to two for a sum, and one more.
static void test_tiles(QuantizedTileKernel tile) {
    const int rows[] = {4, 15, 16, 17, 33}, cols[] = {1, 15, 16, 17, 48};
    for (int i = 0; i < 5; i++) {
        check_tiles(tile, rows[i], 32 * (i + 1), cols[(i + 2) % 5]);
        check_tiles(tile, rows[i], 32 * (i + 7), cols[i]);
        check_tiles(tile, rows[i], 32 * (i + 13), cols[(i + 4) % 5]);
    }
    check_tiles(tile, 20, 768, 100);
#ifdef EMULATED_X86
    EXPECT(emulated_straddles_ == 0, "%d rows of tiles straddle cache lines", emulated_straddles_);
#endif
}

// The largest factors there are: no sum on the way may overflow.
static void test_largest(void) {
    enum { C = 64 };
    QuantizedKernel kernels[QUANTIZED_KERNELS];
    float *w = ops_floats(C), *x = ops_floats(C), sum;
    for (int i = 0; i < C; i++) {
        w[i] = i % 3 ? 127 : -127;
        x[i] = i % 5 ? -127 : 127;
    }
    const QuantizedBlock* weight = encoded(w, 1, C);
    const QuantizedRows rows = quantized_rows_bind(scratch_of(1, C).rows, 1, C);
    quantized_rows(rows, x, 1, C);
    double exact = 0;
    for (int i = 0; i < C; i++) {
        exact += (double)w[i] * (double)x[i];
    }
    for (int k = 0; k < quantized_kernels(kernels); k++) {
        if (kernels[k].runs) {
            kernels[k].product(&sum, weight, rows.q, rows.scales, 1, C / BLOCK);
            EXPECT(sum == exact, "%s: %g, wanted %g", kernels[k].name, (double)sum, exact);
        }
    }
    ops_close("largest");
}

// A row's result does not depend on the other rows, nor on the threads.
static void test_same_bits(void) {
    enum { N = 7, C = 96, OC = 77 };
    const float *inp = ops_normal(N * C, 1), *bias = ops_normal(OC, 1);
    const QuantizedBlock* weight = encoded(ops_normal(OC * C, 1), OC, C);
    float *together = ops_floats(N * OC), *alone = ops_floats(OC);
    const QuantizedScratch scratch = scratch_of(N, C);
    threads_set(3);
    q8_matmul_cpu(together, inp, weight, bias, (MatmulSizes){N, C, OC}, &scratch);
    threads_set(1);
    for (int n = 0; n < N; n++) {
        q8_matmul_cpu(alone, inp + n * C, weight, bias, (MatmulSizes){1, C, OC}, &scratch);
        EXPECT(ops_same_bits(alone, together + n * OC, OC), "row %d", n);
    }
    ops_close("same bits");
}

// Values that are not finite stay visible in their row, and only there.
static void test_not_finite(void) {
    enum { N = 3, C = 64, OC = 3 };
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        float *inp = ops_normal(N * C, 1), *out = ops_floats(N * OC);
        const QuantizedBlock* weight = encoded(ops_normal(OC * C, 1), OC, C);
        inp[C + 40] = bad[i];
        const QuantizedScratch scratch = scratch_of(N, C);
        q8_matmul_cpu(out, inp, weight, NULL, (MatmulSizes){N, C, OC}, &scratch);
        for (int j = 0; j < N * OC; j++) {
            EXPECT(isnan(out[j]) == (j / OC == 1), "%g in row 1: element %d is %g", (double)bad[i], j,
                   (double)out[j]);
        }
        ops_close("not finite");
    }
}

// 34 bytes for 32 numbers of a matrix, 4 for each other, and less than a block of alignment for
// each tensor. A GPU wants matrices at multiples of 16 bytes.
static void test_model_memory(void) {
    const ModelConfig cfg = {1024, 50257, 50304, 12, 12, 768, SHARE_OFF};
    TensorRow rows[MODEL_PARAMETER_ROWS], plain[MODEL_PARAMETER_ROWS];
    const size_t bytes = quantized_parameter_rows(rows, cfg, sizeof(float));
    size_t exact = 0, end = 0, matrices = 0;
    model_parameter_rows_of(plain, cfg, sizeof(float));
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const size_t elements = tensor_elements(&plain[i]),
                     own = tensor_elements(&rows[i]) * rows[i].element_bytes;
        const int is_matrix = quantized_is_matrix(&rows[i]);
        EXPECT(own == (is_matrix ? elements / BLOCK * 34 : elements * 4), "%s has %zu bytes", rows[i].name,
               own);
        EXPECT(rows[i].offset_bytes >= end && rows[i].offset_bytes % 16 == 0 && rows[i].layer_bytes % 16 == 0,
               "%s at %zu, after %zu", rows[i].name, rows[i].offset_bytes, end);
        end = rows[i].offset_bytes + own;
        exact += own;
        matrices += is_matrix ? elements : 0;
    }
    EXPECT(matrices == (size_t)cfg.Vp * 768 + 12 * (size_t)cfg.L * 768 * 768, "%zu in matrices", matrices);
    EXPECT(bytes >= end && bytes < exact + (MODEL_PARAMETER_ROWS + 1) * TENSOR_ALIGN * sizeof(QuantizedBlock),
           "%zu bytes for %zu", bytes, exact);
}

TEST(q8) {
    test_block();
    test_error_of_a_block();
    test_kernels();
    if (quantized_tile_kernel().product) {
        test_tiles(quantized_tile_kernel());
    } else {
        printf("skipped: quantized: this machine has no AMX\n");
    }
    test_largest();
    test_same_bits();
    test_not_finite();
    test_model_memory();
}
