// test_soap.c -- SOAP against float64 (dev/ref/soap_numbers.py); without turned sides; parts,
// ranges and threads; decay.
#include "llmc/base/threads.h"
#include "llmc/optim/soap.h"
#include "dev/test/lib/inputs.h"
#include "dev/test/lib/ops.h"

enum { UPDATES = 12, EVERY = 5, KEPT = 6 };

static const AdamW adam = {0.05f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.37f, 1, DECAY_ALL};

typedef struct {
    int rows, cols, left, right; // the sides that are turned
    double kept[KEPT];           // parameters at even distances
} Wanted;

static const Wanted WANTED[] = {
    {9, 9, 1, 1, {-0.610769981, -0.148810051, 0.116881116, 0.285898342, -0.493599663, -1.091893620}},
    {7, 20, 1, 0, {-1.076388489, 0.375771734, -0.112819939, 0.514385351, -0.017419532, 0.140108268}},
    {20, 7, 0, 1, {-1.315013193, -0.224937790, -0.094821200, 0.291193976, -0.035732719, 0.093781005}},
    {33, 33, 1, 1, {-1.055832693, 0.092143093, -0.213948403, 0.010542696, -0.239677747, -3.709622419}},
    {5, 8, 0, 0, {-0.772767310, 0.344107017, 0.019201545, 0.079264816, -0.122839741, -0.098904446}},
};

// ---- the inputs, as in soap_numbers.py ----

static void set_params(float* param, size_t n) {
    for (size_t i = 0; i < n; i++) {
        param[i] = uniform(i, 0) / 4;
    }
}

static void set_gradient(float* grad, size_t rows, size_t cols, int t) {
    for (size_t i = 0; i < rows * cols; i++) {
        grad[i] = uniform(i, t) / 8 + (i / cols == i % cols ? 1 + (float)(i / cols) / 16 : 0);
    }
}

// ---- runs of updates ----

static float* zeros(size_t n) { return (float*)memset(ops_floats(n), 0, n * sizeof(float)); }

// Returns a matrix with a state of zeros. Sides that are not turned have none.
static SoapMatrix matrix_of(size_t rows, size_t cols, int left, int right) {
    const size_t n = rows * cols, l = rows * rows, r = cols * cols;
    SoapMatrix x = {ops_floats(n), ops_floats(n), zeros(n), zeros(n), {NULL, NULL}, {NULL, NULL}, rows, cols};
    x.left = left ? (SoapSide){zeros(l), zeros(l)} : x.left;
    x.right = right ? (SoapSide){zeros(r), zeros(r)} : x.right;
    set_params(x.param, n);
    return x;
}

// Makes an update. Scratch memory is as small as it may be.
static void update(SoapMatrix x, AdamW opt) {
    MatmulScratch matmul;
    Memory memory = memory_on_host();
    void* scratch = check_alloc(soap_scratch_bytes(x.rows, x.cols), 1, "scratch");
    matmul_open(&matmul, &memory);
    soap_update_cpu(x, (Soap){opt, EVERY}, scratch, &matmul);
    memory_close(&memory);
    free(scratch);
}

// Returns the matrix of a case after some updates.
static SoapMatrix run_case(const Wanted* c, int updates) {
    const SoapMatrix x = matrix_of((size_t)c->rows, (size_t)c->cols, c->left, c->right);
    AdamW opt = adam;
    for (opt.t = 1; opt.t <= updates; opt.t++) {
        set_gradient((float*)x.grad, x.rows, x.cols, (int)opt.t);
        update(x, opt);
    }
    return x;
}

// Roundings of a power step turn vectors by some units of FLT_EPSILON over the gap between their
// eigenvalues, here about 1e-2 of them. A turned basis turns a step as much, and UPDATES add up.
TEST(soap_against_float64) {
    for (size_t i = 0; i < sizeof(WANTED) / sizeof(WANTED[0]); i++) {
        const Wanted* c = &WANTED[i];
        const SoapMatrix x = run_case(c, UPDATES);
        for (int k = 0; k < KEPT; k++) {
            const size_t at = (size_t)lrint((double)(c->rows * c->cols - 1) * k / (KEPT - 1));
            EXPECT_NEAR(x.param[at], c->kept[k], 2e-5, "%d x %d, element %zu", c->rows, c->cols, at);
        }
        ops_close("against float64");
    }
}

// The first update starts the bases and moves nothing.
TEST(soap_first_update) {
    const SoapMatrix x = run_case(&WANTED[0], 1);
    float* start = ops_floats(81);
    set_params(start, 81);
    EXPECT(ops_same_bits(x.param, start, 81) && ops_same_bits(x.m, zeros(81), 81), "the first update moves");
    EXPECT(x.left.mean[0] > 0 && fabsf(x.left.basis[0]) <= 1 && x.right.basis[0] != 0, "no bases");
    ops_close("first update");
}

// Without turned sides it is AdamW, one update later.
TEST(soap_without_sides) {
    enum { ROWS = 5, COLS = 8, N = ROWS * COLS };
    const SoapMatrix x = run_case(&WANTED[4], UPDATES);
    float *param = ops_floats(N), *grad = ops_floats(N), *m = zeros(N), *v = zeros(N);
    AdamW opt = adam;
    set_params(param, N);
    for (opt.t = 1; opt.t < UPDATES; opt.t++) {
        set_gradient(grad, ROWS, COLS, (int)opt.t + 1);
        adamw_update_cpu(param, grad, m, v, N, opt);
    }
    for (int i = 0; i < N; i++) {
        EXPECT_NEAR(x.param[i], param[i], 1e-6, "element %d", i);
    }
    ops_close("without sides");
}

// The two steps, with the weights in two parts, are an update.
TEST(soap_steps) {
    enum { ROWS = 9, COLS = 6, N = ROWS * COLS, FIRST = 20 };
    const SoapMatrix all = matrix_of(ROWS, COLS, 1, 1), some = matrix_of(ROWS, COLS, 1, 1);
    MatmulScratch matmul;
    Memory memory = memory_on_host();
    void* scratch = check_alloc(soap_scratch_bytes(ROWS, COLS), 1, "scratch");
    matmul_open(&matmul, &memory);
    Soap opt = {adam, EVERY};
    for (opt.adam.t = 1; opt.adam.t <= UPDATES; opt.adam.t++) {
        float* step = (float*)some.grad;
        set_gradient((float*)all.grad, ROWS, COLS, (int)opt.adam.t);
        set_gradient(step, ROWS, COLS, (int)opt.adam.t);
        update(all, opt.adam);
        soap_turn_cpu(some, step, opt, scratch, &matmul);
        soap_move_cpu(some.param, step, FIRST, opt);
        soap_move_cpu(some.param + FIRST, step + FIRST, N - FIRST, opt);
    }
    EXPECT(ops_same_bits(some.v, all.v, N) && ops_same_bits(some.left.basis, all.left.basis, ROWS * ROWS),
           "state");
    EXPECT(ops_same_bits(some.param, all.param, N), "weights");
    memory_close(&memory);
    free(scratch);
    ops_close("steps");
}

TEST(soap_threads) {
    const Wanted c = {40, 100, 1, 1, {0}};
    SoapMatrix x[4];
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        x[t] = run_case(&c, UPDATES);
        EXPECT(ops_same_bits(x[t].param, x[1].param, 4000) &&
                   ops_same_bits(x[t].right.basis, x[1].right.basis, 10000),
               "%d threads", t);
    }
    ops_close("threads");
}

// Without a gradient nothing moves; cautious decay acts where the step moves a weight towards zero.
TEST(soap_decay) {
    enum { N = 36 };
    SoapMatrix still = matrix_of(6, 6, 1, 1), cautious = matrix_of(6, 6, 1, 1), plain = matrix_of(6, 6, 1, 1);
    float* start = ops_copy(still.param, N);
    AdamW opt = adam, none = adam, only = adam;
    none.weight_decay = 0, only.decay = DECAY_CAUTIOUS;
    memset((float*)still.grad, 0, N * sizeof(float));
    for (opt.t = none.t = only.t = 1; opt.t <= 2; opt.t++, none.t++, only.t++) {
        set_gradient((float*)plain.grad, 6, 6, 1);
        memcpy((float*)cautious.grad, plain.grad, N * sizeof(float));
        update(still, none), update(plain, none), update(cautious, only);
    }
    EXPECT(ops_same_bits(still.param, start, N), "it moves without a gradient");
    for (int i = 0; i < N; i++) {
        const double moved = (double)plain.param[i] - start[i],
                     decay = moved * start[i] < 0 ? adam.lr * adam.weight_decay * start[i] : 0;
        EXPECT_NEAR(cautious.param[i], plain.param[i] - decay, 1e-6, "element %d decays", i);
    }
    ops_close("decay");
}
