// test_master_weights.cu -- weights as updates read and write them: split master weights, one
// element or four at a time. test_adamw.cu has stochastic rounding.
#include "llmc/optim/master_weights.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/rule_test.h"

static float from_bits(uint32_t bits) { return float_of_bits(bits); }

// Both halves give the number back, and the upper one is the nearest bf16, away from zero at ties.
static void test_split_of(uint32_t bits) {
    const float x = from_bits(bits);
    const SplitFloat<uint16_t> split = split_float<uint16_t>(x);
    const float upper = to_float(split.upper);
    EXPECT(float_bits(split_join(split.upper, split.lower)) == bits, "%08x came back as %08x", bits,
           float_bits(split_join(split.upper, split.lower)));
    const int is_tie = (bits & 0xFFFF) == 0x8000;
    const uint32_t nearest =
        is_tie ? (bits + 0x8000u) & 0xFFFF0000u : float_bits(to_float(from_float<bf16>(x)));
    EXPECT(float_bits(upper) == nearest, "%08x: the upper half is %08x, wanted %08x", bits, float_bits(upper),
           nearest);
}

// Around all bf16 and the middles between them, both signs, to the largest finite number.
static void test_split(void) {
    const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    for (uint32_t upper = 0; upper < 0x7F80; upper++) {
        for (int i = 0; i < 6; i++) {
            test_split_of(upper << 16 | lower[i]);
            test_split_of(0x80000000u | upper << 16 | lower[i]);
        }
    }
    const float odd[] = {INFINITY, -INFINITY};
    for (int i = 0; i < 2; i++) {
        test_split_of(float_bits(odd[i]));
    }
    const SplitFloat<uint16_t> nan = split_float<uint16_t>(from_bits(0x7FFFFFFFu)); // CUDA's own
    EXPECT(isnan(to_float(nan.upper)) && isnan(split_join(nan.upper, nan.lower)), "NaN became %g",
           to_float(nan.upper));
}

// 24 bits of x are the nearest there are, and the parameter is the nearest bf16; they come back as
// they are.
static void test_24_of(uint32_t bits) {
    const float x = from_bits(bits);
    const SplitFloat<int8_t> split = split_float<int8_t>(x);
    const float kept = split_join(split.upper, split.lower);
    const SplitFloat<int8_t> again = split_float<int8_t>(kept);
    const double off = (double)float_bits(kept) - (double)bits; // 2^-16 of the distance of two bf16
    EXPECT(fabs(off) <= 32768.0 / 127 / 2 + 0.5, "%08x became %08x", bits, float_bits(kept));
    EXPECT(float_bits(to_float(split.upper)) == float_bits(to_float(split_float<uint16_t>(kept).upper)),
           "%08x: the parameter of %08x is %g", bits, float_bits(kept), to_float(split.upper));
    EXPECT(float_bits(to_float(again.upper)) == float_bits(to_float(split.upper)) &&
               again.lower == split.lower,
           "%08x: %g and %d became %g and %d", bits, to_float(split.upper), split.lower,
           to_float(again.upper), again.lower);
}

// Around all bf16 and the middles between them, both signs; and the formula.
static void test_24(void) {
    const uint32_t lower[] = {0, 129, 130, 0x1234, 0x7EFF, 0x7FFF, 0x8000, 0x8001, 0x8123, 0xFF7E, 0xFFFF};
    for (uint32_t upper = 0; upper < 0x7F7F; upper++) {
        for (int i = 0; i < 11; i++) {
            test_24_of(upper << 16 | lower[i]);
            test_24_of(0x80000000u | upper << 16 | lower[i]);
        }
    }
    for (int r = -127; r <= 126; r++) {
        const double half =
            r < 0 ? 0x1p-9 : 0x1p-8; // of the distance to the next number below 1, or above it
        const double want = 1 + r / 127.0 * half;
        const SplitFloat<int8_t> split = split_float<int8_t>((float)want);
        EXPECT_NEAR(split_join(from_float<bf16>(1), (int8_t)r), want, half * 0x1p-15, "%d beside 1", r);
        EXPECT(to_float(split.upper) == 1 && split.lower == r, "%g is %g and %d", want, to_float(split.upper),
               split.lower);
    }
    const SplitFloat<int8_t> nan = split_float<int8_t>(NAN), infinite = split_float<int8_t>(-INFINITY);
    EXPECT(isnan(split_join(nan.upper, nan.lower)), "NaN became a number");
    EXPECT(split_join(infinite.upper, infinite.lower) == -INFINITY, "-infinity");
}

// x + `add`, by one thread for each W elements.
// grid   ceil(n / (32 W))      block   32
template <class T, int W>
__global__ void add_kernel(T* params, void* master, MasterWeights kind, float add,
                           const __grid_constant__ RoundingWords words, size_t n) {
    const size_t i = ((size_t)blockIdx.x * 32 + threadIdx.x) * W;
    const Weights<T> w = {params, master, kind};
    if (i < n) {
        Elements<float, W> x = weights_load<W>(w, i);
        for (int k = 0; k < W; k++) {
            x[k] += add;
        }
        weights_store(w, i, x, words);
    }
}

// The weights after that.
template <class T, int W> static float* add(const float* x, MasterWeights kind, size_t n, const Gpu* gpu) {
    RuleWeights<T> w = rule_weights_open<T>(x, n, kind, gpu);
    launch(add_kernel<T, W>, (unsigned)ceil_div(n, (size_t)(32 * W)), 32, 0, gpu, w.weights.params,
           w.weights.master, kind, 0.01f, rounding_words(3, rand_stream("tensor"), 5, 1024), n);
    return rule_weights_close(&w, gpu);
}

// Sums are exact in fp32 master weights, split or not. Other kinds round them.
template <class T> static void test_weights(const Gpu* gpu) {
    const size_t n = 1000;
    for (int k = MASTER_NONE; k <= rule_last_kind<T>(); k++) {
        const MasterWeights kind = (MasterWeights)k;
        char what[64];
        float *x = ops_normal(n, 1), *sum = ops_floats(n);
        snprintf(what, sizeof(what), "%s, master %d", dtype_name(DTYPE_OF(T)), kind);
        rule_prepare<T>(x, n, kind);
        for (size_t i = 0; i < n; i++) {
            sum[i] = x[i] + 0.01f;
        }
        const float *four = add<T, 4>(x, kind, n, gpu), *one = add<T, 1>(x, kind, n, gpu);
        EXPECT(ops_same_bits(four, one, n), "%s: one by one has other bits", what);
        rule_expect_rounded<T>(what, four, sum, n, kind, rounding_words(3, rand_stream("tensor"), 5, 1024));
    }
    ops_close("weights");
}

TEST(master_weights) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_split();
    test_24();
    test_weights<float>(&gpu);
    test_weights<bf16>(&gpu);
    UNSANITIZED(test_weights<fp16>(&gpu));
    EXPECT(master_bytes(MASTER_NONE) == 0 && master_bytes(MASTER_24) == 1 &&
               master_bytes(MASTER_SPLIT) == 2 && master_bytes(MASTER_FP32) == 4,
           "bytes");
    gpu_close(&gpu);
}
