// test_matmul_bf16.c -- matmuls of bf16 factors: packed tiles, bit for bit; every kernel against
// sums of the rounded factors in double precision; the same bits for any number of threads.
#define TILE_KERNELS_IMPLEMENTATION // for bf16_product_vec_
#include "llmc/base/float16.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/reference.h"
#include "dev/test/lib/bf16_kernels.h"
#include "dev/test/lib/linear_reference.h"
#include "dev/test/lib/ops.h"

static Bf16Kernel kernels[BF16_KERNELS];
static int kernels_count;

// ---- packing ----

// Ties of both kinds, what carries into the exponent, what becomes infinite, and what must stay as
// it is.
static void test_rounding(Bf16Pack pack) {
    const uint32_t bits[] = {0x3f800000, 0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0xbf808000,
                             0x3fffffff, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                             0x7f800001, 0xffffffff, 0x00000000, 0x80000000, 0x7f7f7fff, 0x00800000};
    enum { COUNT = sizeof(bits) / sizeof(bits[0]) };
    uint32_t* packed = (uint32_t*)(void*)ops_floats(BF16_STEP_PAIRS);
    float* x = ops_floats(COUNT);
    memcpy(x, bits, sizeof(bits));
    bf16_pack_left(pack, packed, 0, (Matrix){x, COUNT, 1}, 1, COUNT);
    for (int k = 0; k < COUNT; k++) {
        const uint16_t got = (uint16_t)(packed[k / 2] >> 16 * (k % 2)), want = bf16_from_float(x[k]);
        EXPECT(got == want || (isnan(x[k]) && isnan(bf16_to_float(got))), "%08x became %04x, wanted %04x",
               (unsigned)bits[k], got, want);
    }
    ops_close("rounding");
}

// Value k of line i of packed lines, left or right.
static uint16_t packed_at(const uint32_t* packed, int is_left, int i, int k) {
    const uint32_t* step = packed + k / BF16_STEP * BF16_STEP_PAIRS;
    const int pair = k % BF16_STEP / 2;
    return (uint16_t)(step[is_left ? i * 16 + pair : pair * 32 + i] >> 16 * (k % 2));
}

// Lines and values in either order of memory, not at the start of the matrix, which ends at a guard
// page.
static void check_pack(Bf16Pack pack, int lines, int k, int is_left, int k_contiguous) {
    enum { I0 = 2, K0 = 3 };
    const int all_lines = lines + I0, all_k = k + K0;
    const float* x = ops_normal((size_t)all_lines * all_k, 1);
    const int tiles = int_ceil_div(lines, BF16_TILE);
    const size_t tile = (size_t)bf16_steps(k) * BF16_STEP_PAIRS;
    uint32_t* packed = (uint32_t*)(void*)ops_floats(tiles * tile);
    const size_t line = k_contiguous ? (size_t)all_k : 1, next = k_contiguous ? 1 : (size_t)all_lines;
    if (is_left) {
        bf16_pack_left(pack, packed, tile, matrix_at((Matrix){x, line, next}, I0, K0), lines, k);
    } else {
        bf16_pack_right(pack, packed, tile, matrix_at((Matrix){x, next, line}, K0, I0), k, lines);
    }
    for (int i = 0; i < tiles * BF16_TILE; i++) {
        for (int p = 0; p < bf16_steps(k) * BF16_STEP; p++) {
            const uint16_t want =
                i < lines && p < k ? bf16_from_float(x[(i + I0) * line + (p + K0) * next]) : 0;
            EXPECT(packed_at(packed + i / BF16_TILE * tile, is_left, i % BF16_TILE, p) == want,
                   "line %d of %d, value %d of %d, left %d, k contiguous %d", i, lines, p, k, is_left,
                   k_contiguous);
        }
    }
    ops_close("pack");
}

static void test_pack(Bf16Pack pack) {
    const int lines[] = {1, 7, 16, 31, 32, 70}, k[] = {1, 2, 15, 16, 31, 32, 33, 70};
    for (int i = 0; i < 6 * 8 * 4; i++) {
        check_pack(pack, lines[i % 6], k[i / 6 % 8], i / 48 % 2, i / 96);
    }
}

static void test_pack_tile(Bf16PackTile pack) {
    const float* tile = ops_normal(BF16_TILE * BF16_TILE, 1);
    uint32_t *rows = (uint32_t*)(void*)ops_floats(BF16_STEP_PAIRS),
             *cols = (uint32_t*)(void*)ops_floats(BF16_STEP_PAIRS),
             *over_rows = (uint32_t*)(void*)ops_floats(BF16_STEP_PAIRS),
             *over_cols = (uint32_t*)(void*)ops_floats(BF16_STEP_PAIRS);
    const Bf16TilePacked some = {rows, NULL, over_rows, NULL}, others = {NULL, cols, NULL, over_cols};
    pack(&some, tile);
    pack(&others, tile);
    for (int i = 0; i < BF16_TILE * BF16_TILE; i++) {
        const int row = i / BF16_TILE, col = i % BF16_TILE;
        const uint16_t want = bf16_from_float(tile[i]);
        EXPECT(packed_at(rows, 1, row, col) == want, "a tile by rows: %d, %d", row, col);
        EXPECT(packed_at(cols, 1, col, row) == want, "a tile by columns: %d, %d", row, col);
        EXPECT(packed_at(over_rows, 0, col, row) == want, "a tile over its rows: %d, %d", row, col);
        EXPECT(packed_at(over_cols, 0, row, col) == want, "a tile over its columns: %d, %d", row, col);
    }
    const uint32_t* const apart[4] = {rows, cols, over_rows, over_cols};
    uint32_t* at_once[4];
    for (int i = 0; i < 4; i++) {
        at_once[i] = (uint32_t*)(void*)ops_floats(BF16_STEP_PAIRS);
    }
    const Bf16TilePacked all = {at_once[0], at_once[1], at_once[2], at_once[3]};
    pack(&all, tile);
    for (int i = 0; i < 4; i++) {
        EXPECT(memcmp(at_once[i], apart[i], BF16_STEP_PAIRS * sizeof(uint32_t)) == 0, "a tile four ways: %d",
               i);
    }
    ops_close("pack a tile");
}

static void test_packing(Bf16Pack pack) {
    test_rounding(pack);
    test_pack(pack);
}

// ---- products ----

static double* rounded(const float* x, size_t n) {
    double* wide = ops_doubles(n);
    for (size_t i = 0; i < n; i++) {
        wide[i] = bf16_to_float(bf16_from_float(x[i]));
    }
    return wide;
}

static uint32_t* packed_weight(Matrix right, int K, int N) {
    uint32_t* packed = (uint32_t*)(void*)ops_floats(matmul_bf16_pairs(N, K));
    matmul_bf16_pack(bf16_kernel().pack, packed, right, K, N);
    return packed;
}

// The products of bf16 factors are exact in fp32, so sums err as those of test_matmul.c do: the
// same limit, in units of epsilon times the sum of absolute values.
static const double limit = 4;

// Factors, what comes of them, and the sums of absolute values.
typedef struct {
    int N, C, OC;
    const float *inp, *weight, *bias, *dout;
    Results want, size;
} Case;

static void check_forward(const Bf16Kernel* kernel, MatmulBf16Scratch* scratch, const Case* p) {
    const int N = p->N, C = p->C, OC = p->OC;
    float* out = ops_floats((size_t)N * OC);
    matmul_bf16_forward_cpu(out, p->inp, packed_weight(matmul_bf16_forward_weight(p->weight, C), C, OC),
                            p->bias, (MatmulSizes){N, C, OC}, scratch);
    EXPECT_NEAR(ops_error(out, p->want.out, p->size.out, (size_t)N * OC), 0, limit, "%s: out of %d x %d x %d",
                kernel->name, N, C, OC);
}

// The bias is no factor of a product: its gradient sums what is not rounded. `old`: what it was
// added to, or NULL.
static void check_dbias(const Bf16Kernel* kernel, const Case* p, const float* dbias, const float* old) {
    double *want = ops_doubles(p->OC), *size = ops_doubles(p->OC);
    for (int o = 0; o < p->OC; o++) {
        want[o] = old ? old[o] : 0;
        size[o] = fabs(want[o]);
        for (int n = 0; n < p->N; n++) {
            const double d = p->dout[(size_t)n * p->OC + o];
            want[o] += d;
            size[o] += fabs(d);
        }
    }
    EXPECT_NEAR(ops_error(dbias, want, size, p->OC), 0, limit, "%s: dbias%s of %d x %d x %d", kernel->name,
                old ? " added" : "", p->N, p->C, p->OC);
}

static void check_backward(const Bf16Kernel* kernel, MatmulBf16Scratch* scratch, const Case* p) {
    const int N = p->N, C = p->C, OC = p->OC;
    const size_t nc = (size_t)N * C, occ = (size_t)OC * C;
    float *dinp = ops_floats(nc), *dweight = ops_floats(occ), *dbias = ops_floats(OC);
    matmul_bf16_backward_input_cpu(dinp, p->dout,
                                   packed_weight(matmul_bf16_backward_weight(p->weight, C), OC, C),
                                   (MatmulSizes){N, C, OC}, scratch);
    EXPECT_NEAR(ops_error(dinp, p->want.dinp, p->size.dinp, nc), 0, limit, "%s: dinp of %d x %d x %d",
                kernel->name, N, C, OC);
    matmul_bf16_backward_weight_cpu(dweight, dbias, p->dout, p->inp, (MatmulSizes){N, C, OC}, GRADIENT_SET,
                                    scratch);
    check_dbias(kernel, p, dbias, NULL);
    EXPECT_NEAR(ops_error(dweight, p->want.dweight, p->size.dweight, occ), 0, limit,
                "%s: dweight of %d x %d x %d", kernel->name, N, C, OC);
    const double *old = ops_widen(p->weight, occ), *old_size = ops_absolute(old, occ);
    memcpy(dweight, p->weight, occ * sizeof(float));
    memcpy(dbias, p->bias, OC * sizeof(float));
    matmul_bf16_backward_weight_cpu(dweight, dbias, p->dout, p->inp, (MatmulSizes){N, C, OC}, GRADIENT_ADD,
                                    scratch); // onto known values
    check_dbias(kernel, p, dbias, p->bias);
    EXPECT_NEAR(
        ops_error(dweight, ops_sum(p->want.dweight, old, occ), ops_sum(p->size.dweight, old_size, occ), occ),
        0, limit, "%s: dweight added, %d x %d x %d", kernel->name, N, C, OC);
}

// With each of the first `count` kernels.
static void check_size(int count, int N, int C, int OC) {
    const size_t nc = (size_t)N * C, occ = (size_t)OC * C, noc = (size_t)N * OC;
    Case p = {N,   C,  OC, ops_normal(nc, 1), ops_normal(occ, 1), ops_normal(OC, 1), ops_normal(noc, 1),
              {0}, {0}};
    const double *inp = rounded(p.inp, nc), *weight = rounded(p.weight, occ), *bias = ops_widen(p.bias, OC),
                 *dout = rounded(p.dout, noc);
    p.want = reference(N, C, OC, inp, weight, bias, dout);
    p.size = reference(N, C, OC, ops_absolute(inp, nc), ops_absolute(weight, occ), ops_absolute(bias, OC),
                       ops_absolute(dout, noc));
    for (int k = 0; k < count; k++) {
        MatmulBf16Scratch scratch;
        Memory memory = memory_on_host();
        matmul_bf16_open(&scratch, &memory, kernels[k]);
        check_forward(&kernels[k], &scratch, &p);
        check_backward(&kernels[k], &scratch, &p);
        memory_close(&memory);
    }
    ops_close("sizes");
}

// Every edge of a tile and of a step; more than one block, slab and part.
static void test_sizes(int count) {
    const int around[] = {1, 2, 31, 32, 33, 65};
    for (int i = 0; i < 6; i++) {
        check_size(count, around[i], around[(i + 2) % 6], around[(i + 3) % 6]);
        check_size(count, around[i], around[(i + 5) % 6], around[(i + 1) % 6]);
    }
    check_size(count, 3, 2 * MATMUL_BF16_BLOCK_K + 1, 5);
    check_size(count, 33, MATMUL_BF16_BLOCK_K + 1, 300);
    check_size(count, 257, 70, MATMUL_BF16_PART_PANELS * BF16_TILE + 1);
}

// More than one slab of k, of rows and of columns; results that are streamed.
static void test_slabs(int count) {
    const int rows = MATMUL_BF16_PART_TILES * BF16_TILE + 1, k = MATMUL_BF16_PART / MATMUL_BF16_PART_TILES;
    check_size(count, rows, k + 1, 5);
    check_size(count, k + 33, 33, rows + 32); // of tokens, for dweight
    check_size(count, 2, 3, MATMUL_BF16_PART + 33);
    check_size(count, 3 * rows, 700, 33);
    check_size(count, 4200, MATMUL_BF16_SLAB_RIGHT / 4224 + 33, 5);
    check_size(count, 600, 512, 480);
    check_size(count, 640, 96, 416); // the last tile of a part is a whole one
}

// With denormal factors, products and sums, vectors of fp32 do what vdpbf16ps does.
static void test_like_avx512(const Bf16Kernel* avx512) {
    enum { K = 3 * BF16_STEP };
    float *a = ops_normal(BF16_TILE * K, 1e-19f), *b = ops_normal(K * BF16_TILE, 1e-19f);
    uint32_t *left = (uint32_t*)(void*)ops_floats(3 * BF16_STEP_PAIRS),
             *right = (uint32_t*)(void*)ops_floats(3 * BF16_STEP_PAIRS);
    float *got = ops_floats(1024), *want = ops_floats(1024), *first = ops_normal(1024, 1e-38f);
    for (int i = 0; i < BF16_TILE * K; i++) {
        a[i] *= i % 3 ? 1 : 1e-20f;
        b[i] *= i % 5 ? 1 : 1e20f;
    }
    bf16_pack_left(bf16_vec_pack, left, 0, (Matrix){a, K, 1}, BF16_TILE, K);
    bf16_pack_right(bf16_vec_pack, right, 0, (Matrix){b, BF16_TILE, 1}, K, BF16_TILE);
    bf16_product_vec_(got, 32, first, 32, left, right, 3, &bf16_nothing_ahead);
    avx512->product(want, 32, first, 32, left, right, 3, &bf16_nothing_ahead);
    for (int i = 0; i < 1024; i++) {
        EXPECT(float_bits(got[i]) == float_bits(want[i]), "element %d: %a, wanted %a", i, (double)got[i],
               (double)want[i]);
    }
    ops_close("like AVX-512");
}

// Values that are not finite stay visible in their row of the result, and only there.
static void test_not_finite(const Bf16Kernel* kernel) {
    enum { N = 33, C = 31, OC = 35 };
    const float bad[] = {NAN, INFINITY, -INFINITY};
    MatmulBf16Scratch scratch;
    Memory memory = memory_on_host();
    matmul_bf16_open(&scratch, &memory, *kernel);
    for (int i = 0; i < 3; i++) {
        float *inp = ops_normal(N * C, 1), *out = ops_floats(N * OC);
        const float* weight = ops_normal(OC * C, 1);
        inp[7 * C + 30] = bad[i];
        matmul_bf16_forward_cpu(out, inp, packed_weight(matmul_bf16_forward_weight(weight, C), C, OC), NULL,
                                (MatmulSizes){N, C, OC}, &scratch);
        for (int j = 0; j < N * OC; j++) {
            EXPECT(!isfinite(out[j]) == (j / OC == 7), "%s, %g in row 7: element %d is %g", kernel->name,
                   (double)bad[i], j, (double)out[j]);
        }
        ops_close("not finite");
    }
    memory_close(&memory);
}

// Long enough for the threads to meet, and with several slabs of each kind.
static void test_threads(const Bf16Kernel* kernel, int N, int C, int OC) {
    const size_t noc = (size_t)N * OC, nc = (size_t)N * C, occ = (size_t)OC * C;
    float *inp = ops_normal(nc, 1), *weight = ops_normal(occ, 1), *bias = ops_normal(OC, 1),
          *dout = ops_normal(noc, 1);
    float *out[3], *dinp[3], *dweight[3], *dbias[3];
    const int threads[] = {1, 2, 5}, before = threads_max();
    for (int t = 0; t < 3; t++) {
        MatmulBf16Scratch scratch;
        threads_set(threads[t]);
        Memory memory = memory_on_host();
        matmul_bf16_open(&scratch, &memory, *kernel);
        out[t] = ops_floats(noc), dinp[t] = ops_floats(nc), dweight[t] = ops_floats(occ);
        dbias[t] = ops_floats(OC);
        matmul_bf16_forward_cpu(out[t], inp, packed_weight(matmul_bf16_forward_weight(weight, C), C, OC),
                                bias, (MatmulSizes){N, C, OC}, &scratch);
        matmul_bf16_backward_input_cpu(dinp[t], dout,
                                       packed_weight(matmul_bf16_backward_weight(weight, C), OC, C),
                                       (MatmulSizes){N, C, OC}, &scratch);
        matmul_bf16_backward_weight_cpu(dweight[t], dbias[t], dout, inp, (MatmulSizes){N, C, OC},
                                        GRADIENT_SET, &scratch);
        matmul_bf16_backward_weight_cpu(dweight[t], dbias[t], dout, inp, (MatmulSizes){N, C, OC},
                                        GRADIENT_ADD, &scratch);
        EXPECT(ops_same_bits(out[t], out[0], noc), "%s: out with %d threads", kernel->name, threads[t]);
        EXPECT(ops_same_bits(dinp[t], dinp[0], nc), "%s: dinp with %d threads", kernel->name, threads[t]);
        EXPECT(ops_same_bits(dbias[t], dbias[0], OC), "%s: dbias with %d threads", kernel->name, threads[t]);
        EXPECT(ops_same_bits(dweight[t], dweight[0], occ), "%s: dweight with %d threads", kernel->name,
               threads[t]);
        memory_close(&memory);
    }
    threads_set(before);
    ops_close("threads");
}

TEST(matmul_bf16) {
    vec_flush_denormals(); // as the trainer does
    kernels_count = tested_kernels(kernels);
    test_packing(bf16_vec_pack);
    test_pack_tile(bf16_vec_pack_tile);
    if (kernels[0].pack != bf16_vec_pack) { // AVX-512's
        test_packing(kernels[0].pack);
        test_packing(kernels[0].pack_away);
        test_pack_tile(kernels[0].pack_tile);
    }
    test_sizes(kernels_count);
    for (int k = 0; k < kernels_count; k++) {
        if (strcmp(kernels[k].name, "AVX-512 BF16") == 0) {
            test_like_avx512(&kernels[k]);
        }
        test_not_finite(&kernels[k]);
        test_threads(&kernels[k], 50, 100, 70);
    }
#ifdef SANITIZED
    const int large = 1; // the others touch the same memory
#else
    const int large = kernels_count;
#endif
    LARGE(test_slabs(large));
    for (int k = 0; k < large; k++) {
        // two slabs of k; one thread takes columns in two parts
        LARGE(test_threads(&kernels[k], 513, 1100, 1100));
    }
}
