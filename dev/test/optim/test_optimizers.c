// test_optimizers.c -- the update rules against other libraries
// (dev/ref/make_optimizer_fixtures.py); the 8-bit code; the same bits for any number of threads.
#include "llmc/optim/adafactor.h"
#include "llmc/optim/adamw8bit.h"
#include "llmc/base/threads.h"
#include "llmc/optim/lion.h"
#include "llmc/optim/muon.h"
#include "llmc/optim/sgd.h"
#include "dev/test/lib/inputs.h"
#include "dev/test/lib/ops.h"

#define FIXTURE "dev/ref/fixtures/optimizers/updates.bin"
enum { UPDATES = 20 };

// A case of the fixture; its numbers lie there in this order.
typedef struct {
    char name[32];
    int32_t rows, cols, parts, block, count;
    float lr, beta1, beta2, eps, weight_decay, grad_scale;
} Case;

// Arrays of an update. The rule decides how the states are used.
typedef struct {
    float *param, *grad, *m, *v, *w; // (n)
    uint8_t *m_code, *v_code;        // (n)
    void* scratch;
    MatmulScratch matmul;
} Arrays;

// ---- the inputs, as in make_optimizer_fixtures.py ----

static void set_params(float* param, const Case* c) {
    for (size_t i = 0; i < (size_t)c->rows * c->cols; i++) {
        param[i] = uniform(i, 0) / 4;
    }
}

static void set_gradient(float* grad, const Case* c, int t) {
    for (int i = 0; i < c->rows * c->cols; i++) {
        const uint32_t row = (uint32_t)(i / c->cols), col = (uint32_t)(i % c->cols);
        grad[i] = ldexpf(uniform((size_t)i, t), -(int)(mix(row + 500) % 11 + mix(col + 900) % 11));
    }
}

// ---- the rules ----

static Decay decay_of(const Case* c) { return strstr(c->name, "options") ? DECAY_CAUTIOUS : DECAY_ALL; }

static AdamW adamw_of(const Case* c, int t) {
    return (AdamW){c->lr, c->beta1, c->beta2, c->eps, c->weight_decay, c->grad_scale, t, decay_of(c)};
}

static void update_adamw(const Case* c, Arrays* x, int t) {
    adamw_update_cpu(x->param, x->grad, x->m, x->v, (size_t)c->rows * c->cols, adamw_of(c, t));
}

static void update_adamw8bit(const Case* c, Arrays* x, int t) {
    const AdamW8bitState state = {x->m_code, x->v_code, x->m, x->v};
    adamw8bit_update_cpu(x->param, x->grad, state, (size_t)c->rows * c->cols, (size_t)c->block,
                         adamw_of(c, t));
}

static void update_lion(const Case* c, Arrays* x, int t) {
    (void)t;
    const Lion opt = {c->lr, c->beta1, c->beta2, c->weight_decay, c->grad_scale, decay_of(c)};
    lion_update_cpu(x->param, x->grad, x->m, (size_t)c->rows * c->cols, opt);
}

static void update_sgd(const Case* c, Arrays* x, int t) {
    (void)t;
    const Sgd opt = {c->lr, c->beta1, c->weight_decay, c->grad_scale, decay_of(c)};
    sgd_update_cpu(x->param, x->grad, c->beta1 > 0 ? x->m : NULL, (size_t)c->rows * c->cols, opt);
}

static void update_adafactor(const Case* c, Arrays* x, int t) {
    const Adafactor opt = {.lr = c->lr,
                           .beta1 = c->beta1,
                           .beta2_cap = c->beta2 > 0 ? c->beta2 : 1,
                           .clip = 1,
                           .weight_decay = c->weight_decay,
                           .grad_scale = c->grad_scale,
                           .rate = strstr(c->name, "relative") ? ADAFACTOR_RELATIVE : ADAFACTOR_FIXED,
                           .t = t};
    float* m = c->beta1 > 0 ? x->m : NULL;
    if (c->rows == 1) {
        adafactor_vector_cpu(x->param, x->grad, x->v, m, (size_t)c->cols, opt);
        return;
    }
    const size_t rows = (size_t)c->rows, cols = (size_t)c->cols;
    const AdafactorMatrix matrix = {x->param, x->grad, x->v, x->w, m, rows, cols};
    adafactor_update_cpu(matrix, opt, x->scratch);
}

static void update_muon(const Case* c, Arrays* x, int t) {
    (void)t;
    const int options = strstr(c->name, "options") != NULL;
    const Muon opt = {.lr = c->lr,
                      .momentum = c->beta1,
                      .weight_decay = c->weight_decay,
                      .grad_scale = c->grad_scale,
                      .rows_beta2 = c->beta2,
                      .scale = strstr(c->name, "rms") ? MUON_RMS : MUON_SPECTRAL,
                      .decay = decay_of(c),
                      .polynomial = strstr(c->name, "polar") ? MUON_POLAR_EXPRESS : MUON_JORDAN};
    const size_t parts = (size_t)c->parts, rows = (size_t)c->rows, cols = (size_t)c->cols;
    const MuonScratch scratch = {x->scratch, &x->matmul};
    for (size_t k = 0; k < parts; k++) {
        const size_t first = k * (rows / parts), at = first * cols;
        const Moment fp32 = {x->m + at, NULL, NULL}, in_8 = {NULL, x->m_code + at, x->w + at / 64};
        const MuonMatrix matrix = {
            x->param + at, x->grad + at, c->block ? in_8 : fp32, options ? x->v + first : NULL, rows / parts,
            cols,          NULL};
        muon_update_cpu(matrix, opt, &scratch);
    }
}

// A case belongs to the first rule that its name starts with. `tolerance` is relative to the
// largest change.
static const struct {
    const char* name;
    double tolerance;
    void (*update)(const Case*, Arrays*, int t);
} rules[] = {
    {"adamw8bit", 1e-6, update_adamw8bit}, {"adamw", 1e-6, update_adamw},
    {"lion", 1e-6, update_lion},           {"sgd", 1e-6, update_sgd},
    {"adafactor", 1e-6, update_adafactor}, {"muon", 1e-5, update_muon},
};

static int rule_of(const Case* c) {
    int k = 0;
    while (strncmp(c->name, rules[k].name, strlen(rules[k].name)) != 0) {
        k++;
    }
    return k;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static float* zeros(size_t n) { return (float*)memset(ops_floats(n), 0, n * sizeof(float)); }

// The arrays after some updates; ops_close frees them. Scratch memory is as small as it may be.
static Arrays run_case(const Case* c, int updates) {
    const size_t n = (size_t)c->rows * c->cols;
    Arrays x = {.param = ops_floats(n), .grad = ops_floats(n), .m = zeros(n), .v = zeros(n), .w = zeros(n)};
    x.m_code = ops_bytes(n);
    x.v_code = ops_bytes(n);
    x.scratch = ops_bytes(larger(adafactor_scratch_bytes((size_t)c->rows, (size_t)c->cols),
                                 muon_scratch_bytes((size_t)(c->rows / c->parts), (size_t)c->cols)));
    Memory memory = memory_on_host();
    matmul_open(&x.matmul, &memory);
    set_params(x.param, c);
    for (int t = 1; t <= updates; t++) {
        set_gradient(x.grad, c, t);
        rules[rule_of(c)].update(c, &x, t);
    }
    memory_close(&memory);
    return x;
}

// ---- against other libraries ----

typedef struct {
    Case c;
    const unsigned char *index, *param, *m_code, *v_code; // index and param are not aligned
} Wanted;

static Wanted wanted_read(const unsigned char** at) {
    Wanted w;
    memcpy(&w.c, *at, sizeof(w.c));
    const size_t count = (size_t)w.c.count;
    w.index = *at + sizeof(w.c);
    w.param = w.index + 2 * count;
    w.m_code = w.param + 4 * count;
    w.v_code = w.m_code + (w.c.block ? count : 0);
    *at = w.v_code + (w.c.block ? count : 0);
    return w;
}

// Besides the tolerance of its rule: a parameter is rounded once an update, by up to half an
// epsilon of itself, and random roundings add up like the root of their number. Twice that.
static void compare(const Wanted* w) {
    const Case* c = &w->c;
    const Arrays x = run_case(c, UPDATES);
    float* first = ops_floats((size_t)c->rows * c->cols);
    double change = 0, worst = 0, largest = 0;
    int codes = 0;
    set_params(first, c);
    for (int k = 0; k < c->count; k++) {
        uint16_t i;
        float want;
        memcpy(&i, w->index + 2 * (size_t)k, 2);
        memcpy(&want, w->param + 4 * (size_t)k, 4);
        change = fmax(change, fabs((double)want - first[i]));
        largest = fmax(largest, fmax(fabs(want), fabs(first[i])));
        worst = isnan(x.param[i]) ? INFINITY : fmax(worst, fabs((double)want - x.param[i]));
        codes += c->block && (x.m_code[i] != w->m_code[k] || x.v_code[i] != w->v_code[k]);
    }
    const double roundings = sqrt(UPDATES) * FLT_EPSILON * largest;
    EXPECT_NEAR(worst, 0, rules[rule_of(c)].tolerance * change + roundings, "%s (%d, %d), parts %d, block %d",
                c->name, c->rows, c->cols, c->parts, c->block);
    EXPECT(codes == 0, "%s (%d, %d), block %d: %d of %d codes differ", c->name, c->rows, c->cols, c->block,
           codes, c->count);
    ops_close(c->name);
}

static int same_arrays(const Arrays* a, const Arrays* b, size_t n) {
    return ops_same_bits(a->param, b->param, n) && ops_same_bits(a->m, b->m, n) &&
           ops_same_bits(a->v, b->v, n) && ops_same_bits(a->w, b->w, n) &&
           memcmp(a->m_code, b->m_code, n) == 0 && memcmp(a->v_code, b->v_code, n) == 0;
}

static void test_threads(const Case* c) {
    const int threads[] = {1, 2, 5}, before = threads_max();
    Arrays x[3];
    for (int k = 0; k < 3; k++) {
        threads_set(threads[k]);
        x[k] = run_case(c, 3);
        EXPECT(same_arrays(&x[0], &x[k], (size_t)c->rows * c->cols), "%s (%d, %d) with %d threads", c->name,
               c->rows, c->cols, threads[k]);
    }
    threads_set(before);
    ops_close("threads");
}

static void test_code_book(const float* want);

TEST(fixture) {
    const TestFile file = test_read(FIXTURE);
    const unsigned char* at = file.data + 2 * 256 * sizeof(float);
    int32_t cases;
    test_code_book((const float*)file.data);
    memcpy(&cases, at, 4);
    at += 4;
    for (int k = 0; k < cases; k++) {
        const Wanted w = wanted_read(&at);
        compare(&w);
        if (w.c.rows * w.c.cols > 8000) {
            test_threads(&w.c);
        }
    }
    EXPECT(at == file.data + file.bytes && cases > 100, "%d cases", cases);
    free(file.data);
}

// ---- the 8-bit code ----

static void test_code_book(const float* want) {
    for (int code = 0; code < 256; code++) {
        const float m = code8_value(code, CODE8_SIGNED), v = code8_value(code, CODE8_UNSIGNED);
        EXPECT(ops_same_bits(&m, want + code, 1), "signed %d: %.9g, not %.9g", code, m, want[code]);
        EXPECT(ops_same_bits(&v, want + 256 + code, 1), "unsigned %d: %.9g, not %.9g", code, v,
               want[256 + code]);
    }
}

// A number 2^-22 away from a midpoint gets the nearer code. A negative number never gets the code
// of 0.
static void test_midpoints(Code8 kind) {
    for (int code = 0; code < 255; code++) {
        const double low = code8_value(code, kind), high = code8_value(code + 1, kind),
                     middle = (low + high) / 2;
        const double distance = fabs(middle) * 0x1p-22;
        const int below = code8_encode((float)(middle - distance), kind);
        const int above = code8_encode((float)(middle + distance), kind);
        EXPECT(below == code, "kind %d, below the middle of %d and %d: %d", kind, code, code + 1, below);
        EXPECT(above == (high == 0 ? code : code + 1), "kind %d, above the middle of %d and %d: %d", kind,
               code, code + 1, above);
    }
    for (int code = 0; code < 256; code++) {
        EXPECT(code8_encode(code8_value(code, kind), kind) == code, "kind %d, the value of %d", kind, code);
    }
}

// The codes of many values are those of one: of numbers in all decades, and of blocks that end
// inside of a vector. Within 2^-22 of a midpoint either is right.
static void test_codes(Code8 kind) {
    const AdamW8bitDecades_ decades = adamw8bit_decades_(kind);
    const uint32_t one = 0x3f800000, step = 997;
    float x[64];
    uint8_t code[64];
    for (uint32_t first = 0; first <= 2 * one; first += 64 * step) {
        const size_t n = first / step % 65;
        for (uint32_t i = 0; i < 64; i++) {
            const uint32_t at = first + i * step, size = at % (one + 1);
            const uint32_t bits = size | (kind == CODE8_SIGNED && at > one ? 0x80000000 : 0);
            memcpy(x + i, &bits, sizeof(bits));
            code[i] = 77;
        }
        adamw8bit_encode_(code, x, n, 1, kind, &decades);
        for (size_t i = 0; i < 64; i++) {
            const int inner = code8_encode(x[i] * (1 - 0x1p-22f), kind),
                      outer = code8_encode(fmaxf(-1, fminf(x[i] * (1 + 0x1p-22f), 1)), kind);
            EXPECT(i < n ? code[i] == inner || code[i] == outer : code[i] == 77,
                   "kind %d, %.9g, %zu of %zu: %d, not %d", kind, x[i], i, n, code[i], inner);
        }
    }
}

TEST(code) {
    test_midpoints(CODE8_SIGNED);
    test_midpoints(CODE8_UNSIGNED);
    test_codes(CODE8_SIGNED);
    test_codes(CODE8_UNSIGNED);
    EXPECT(code8_encode(-1, CODE8_SIGNED) == 0, "-1 is not the least value's code");
    EXPECT(code8_encode(-1e-9f, CODE8_SIGNED) == 126 && code8_encode(1e-9f, CODE8_SIGNED) == 127, "tiny");
    EXPECT(code8_inverse(0) == 0 && code8_inverse(NAN) == 0 && code8_inverse(4) == 0.25f, "inverse");
}

// One block of three is all zero, in one a gradient is not a number, and one is as it should be.
TEST(block_states) {
    enum { N = 192 };
    float *param = ops_normal(N, 1), *grad = ops_normal(N, 1), *start = ops_copy(param, N);
    float *m_scale = zeros(3), *v_scale = zeros(3);
    uint8_t *m = ops_bytes(N), *v = ops_bytes(N); // zero
    memset(grad, 0, 64 * sizeof(float));
    grad[70] = NAN;
    const AdamW opt = {0.01f, 0.9f, 0.95f, 1e-8f, 0, 1, 1, DECAY_ALL};
    adamw8bit_update_cpu(param, grad, (AdamW8bitState){m, v, m_scale, v_scale}, N, 64, opt);
    EXPECT(m_scale[0] == 0 && v_scale[0] == 0 && ops_same_bits(param, start, 64), "a block of zeros");
    EXPECT(m[5] == 127 && v[5] == 0, "codes of zeros: %d %d", m[5], v[5]);
    EXPECT(isnan(m_scale[1]) && isnan(v_scale[1]), "a NaN is lost");
    EXPECT(m_scale[2] > 0 && v_scale[2] > 0 && isfinite(m_scale[2]), "a NaN reached another block");
    ops_close("states of blocks");
}

// ---- what fixtures do not have ----

// A weight with small gradients beside large ones, which then vanish, stops: the lowest code of its
// first moment does not move it for ever.
TEST(vanished_gradient) {
    enum { N = 64, VANISHED = 10 };
    float *param = zeros(N), *exact = zeros(N), *grad = zeros(N), *m = zeros(N), *v = zeros(N);
    float m_scale = 0, v_scale = 0;
    uint8_t *m_code = ops_bytes(N), *v_code = ops_bytes(N);
    AdamW opt = {0.01f, 0.9f, 0.95f, 1e-8f, 0, 1, 1, DECAY_ALL};
    for (; opt.t <= 500; opt.t++) {
        grad[0] = 1;
        grad[1] = opt.t <= VANISHED ? 1e-4f : 0;
        grad[2] = opt.t <= VANISHED ? -1e-4f : -1e-12f;
        adamw_update_cpu(exact, grad, m, v, N, opt);
        adamw8bit_update_cpu(param, grad, (AdamW8bitState){m_code, v_code, &m_scale, &v_scale}, N, N, opt);
    }
    for (int i = 1; i < 3; i++) {
        EXPECT_NEAR(param[i], exact[i], 0.2, "a vanished gradient, sign %d", 3 - 2 * i);
    }
    ops_close("vanished gradient");
}

// Without a gradient nothing moves, and no rule divides by zero.
TEST(zero_gradient) {
    Case c = {"", 9, 40, 1, 64, 0, 0.01f, 0.9f, 0.95f, 1e-8f, 0, 1};
    for (int k = 0; k < (int)(sizeof(rules) / sizeof(*rules)); k++) {
        snprintf(c.name, sizeof(c.name), "%s relative options", rules[k].name);
        Arrays x = run_case(&c, 0);
        const float* start = ops_copy(x.param, 9 * 40);
        memset(x.grad, 0, 9 * 40 * sizeof(float));
        Memory memory = memory_on_host();
        matmul_open(&x.matmul, &memory);
        rules[k].update(&c, &x, 1);
        memory_close(&memory);
        EXPECT(ops_same_bits(x.param, start, 9 * 40), "%s moves without a gradient", rules[k].name);
        ops_close("zero gradient");
    }
}

// Lion decays only where its step goes towards zero: of four signs two, and not without a step.
TEST(cautious_lion) {
    float param[] = {1, -1, 1, -1, 1}, grad[] = {2, -2, -2, 2, 0}, m[5] = {0};
    const float want[] = {1 - 0.25f - 0.125f, -1 + 0.25f + 0.125f, 1 + 0.25f, -1 - 0.25f, 1};
    const Lion opt = {0.25f, 0.9f, 0.99f, 0.5f, 1, DECAY_CAUTIOUS};
    lion_update_cpu(param, grad, m, 5, opt);
    for (int i = 0; i < 5; i++) {
        EXPECT(param[i] == want[i], "element %d: %g, wanted %g", i, (double)param[i], (double)want[i]);
    }
}

// SGD decays where its momentum, or without it the gradient, moves the weight towards zero.
TEST(cautious_sgd) {
    const float start[] = {1, -1, 1, -1, 1}, grad[] = {2, -2, -2, 2, 0}, before[] = {-4, 4, 4, -4, 0};
    const float with[] = {1 + 0.25f, -1 - 0.25f, 1 - 0.25f - 0.125f, -1 + 0.25f + 0.125f, 1},
                without[] = {1 - 0.5f - 0.125f, -1 + 0.5f + 0.125f, 1 + 0.5f, -1 - 0.5f, 1};
    for (int has_momentum = 0; has_momentum < 2; has_momentum++) {
        const float* want = has_momentum ? with : without;
        const Sgd opt = {0.25f, 0.75f, 0.5f, 1, DECAY_CAUTIOUS};
        float *param = ops_copy(start, 5), *m = ops_copy(before, 5);
        sgd_update_cpu(param, grad, has_momentum ? m : NULL, 5, opt);
        for (int i = 0; i < 5; i++) {
            EXPECT(param[i] == want[i], "element %d, momentum %d: %g, wanted %g", i, has_momentum,
                   (double)param[i], (double)want[i]);
        }
    }
    ops_close("cautious SGD");
}

// Solves n <= 4 equations; `a` has a column more, the right side. Sets x.
static void solve(double a[4][5], double x[4]) {
    for (int i = 0; i < 4; i++) {
        int largest = i;
        for (int r = i + 1; r < 4; r++) {
            largest = fabs(a[r][i]) > fabs(a[largest][i]) ? r : largest;
        }
        for (int c = 0; c < 5; c++) {
            const double moved = a[i][c];
            a[i][c] = a[largest][c], a[largest][c] = moved;
        }
        for (int r = 0; r < 4; r++) {
            const double factor = r == i ? 0 : a[r][i] / a[i][i];
            for (int c = 0; c < 5; c++) {
                a[r][c] -= factor * a[i][c];
            }
        }
    }
    for (int i = 0; i < 4; i++) {
        x[i] = a[i][4] / a[i][i];
    }
}

static double odd_quintic(const double p[3], double x) { return x * (p[0] + x * x * (p[1] + x * x * p[2])); }

// Sets the odd polynomial of degree 5 that is nearest to 1 on [low, high], by Remez' exchange: the
// error has the same size and turns at both ends and at the two extrema between.
static void nearest_to_one(double low, double high, double p[4]) {
    double at[4] = {low, (3 * low + high) / 4, (low + 3 * high) / 4, high};
    for (int round = 0; round < 50; round++) {
        double a[4][5];
        for (int i = 0; i < 4; i++) {
            const double x = at[i];
            const double line[5] = {x, pow(x, 3), pow(x, 5), i % 2 ? -1 : 1, 1};
            memcpy(a[i], line, sizeof(line));
        }
        solve(a, p);
        const double root = sqrt(9 * p[1] * p[1] - 20 * p[0] * p[2]);
        at[1] = sqrt((-3 * p[1] - root) / (10 * p[2])), at[2] = sqrt((-3 * p[1] + root) / (10 * p[2]));
    }
}

// The coefficients of Polar Express follow from the interval, one step after the other. Where the
// lower end is raised to 1/50 of the upper one, the values of both ends keep 1 in their middle.
TEST(polar_express) {
    const MuonIteration* have = muon_iteration(MUON_POLAR_EXPRESS);
    const double safety = 1.02;
    double low = 1e-3, high = 1;
    EXPECT(have->margin == (float)safety, "margin %g", (double)have->margin);
    for (int k = 0; k < MUON_ITERATIONS; k++) {
        const float* of_step = &have->steps[k].x;
        double p[4], factor = 1;
        nearest_to_one(fmax(low, high / 50), high, p);
        factor = low < high / 50 ? 2 / (odd_quintic(p, low) + odd_quintic(p, high)) : 1;
        for (int i = 0; i < 3; i++) {
            const double divided = p[i] * factor / pow(safety, 2 * i + 1);
            const double want = k + 1 < MUON_ITERATIONS ? divided : p[i] * factor;
            EXPECT_NEAR(of_step[i] / want, 1, 2 * FLT_EPSILON, "step %d, coefficient %d: %.9g", k, i, want);
            p[i] = divided;
        }
        low = odd_quintic(p, low), high = 2 - low;
    }
}

// Returns how far the singular values of an update are from 1 at most. Those of the gradient are
// 1, 0.8, 0.8^2, ...; X of a diagonal matrix is diagonal.
static double singular_error(MuonPolynomial polynomial) {
    enum { N = 28 };
    float *param = zeros(N * N), *grad = zeros(N * N), *b = zeros(N * N);
    const Muon opt = {.lr = 1, .grad_scale = 1, .polynomial = polynomial};
    const MuonMatrix x = {param, grad, {b, NULL, NULL}, NULL, N, N, NULL};
    double worst = 0;
    MatmulScratch matmul;
    Memory memory = memory_on_host();
    matmul_open(&matmul, &memory);
    for (int i = 0; i < N; i++) {
        grad[i * (N + 1)] = (float)pow(0.8, i);
    }
    const MuonScratch scratch = {ops_bytes(muon_scratch_bytes(N, N)), &matmul};
    muon_update_cpu(x, opt, &scratch);
    for (int i = 0; i < N * N; i++) {
        worst = fmax(worst, fabs(-(double)param[i] - (i % (N + 1) == 0)));
    }
    memory_close(&memory);
    ops_close("singular values");
    return worst;
}

// The least singular value is 0.0015 of the norm. The polynomials of Polar Express bring all from
// 0.001 to within 0.1411 of 1.
TEST(singular_values) {
    const double jordan = singular_error(MUON_JORDAN), polar = singular_error(MUON_POLAR_EXPRESS);
    EXPECT(jordan > 0.3 && polar < 0.1412, "off by %g with Jordan's, by %g with Polar Express", jordan,
           polar);
}

TEST(rates) {
    const Adafactor opt = {.lr = 0.5f, .rate = ADAFACTOR_RELATIVE, .t = 100};
    EXPECT_NEAR(adafactor_rate(opt, 3), 0.3, 1e-7, "1/sqrt(t) of the parameter");
    EXPECT_NEAR(adafactor_rate(opt, 1e-5), 1e-4, 1e-10, "a small parameter");
    EXPECT_NEAR(muon_momentum(1), 0.85, 1e-7, "first update");
    EXPECT_NEAR(muon_momentum(151), 0.90, 1e-7, "halfway");
    EXPECT_NEAR(muon_momentum(301), 0.95, 1e-7, "after 300 updates");
    EXPECT_NEAR(muon_momentum(100000), 0.95, 1e-7, "later");
}
