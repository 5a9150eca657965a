// test_muon.cu -- Muon on the GPU against muon.h: wide, tall and odd matrices of several layers,
// separate q, k and v, all kinds of master weights, cautious decay and balanced rows, momentum in
// 8 bits; scratch memory.
#include "llmc/optim/muon.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/rule_test.h"

static const Muon defaults = {0.02f, 0.9f, 0.05f, 0.37f, 0.95f, MUON_SPECTRAL, DECAY_ALL};
static const int64_t UPDATE = 3;

// A tensor whose layers lie apart in all arrays, with something else between them.
typedef struct {
    MuonTensor t;
    size_t n, b, row_squares; // elements of the arrays
} Case;

static Case case_of(int layers, int parts, int rows, int cols) {
    const size_t n = rule_padded((size_t)parts * rows * cols), r = (size_t)parts * rows;
    const MuonPlace in_weights = {128, n + 256};
    const MuonTensor t = {in_weights,
                          in_weights,
                          in_weights,
                          {4, n + 4},
                          {1, r + 3},
                          layers,
                          parts,
                          rows,
                          cols,
                          2,
                          {2048, (size_t)1 << 40},
                          7,
                          1,
                          0};
    const Case c = {t, 128 + (n + 256) * layers, 4 + (n + 4) * layers, 1 + (r + 3) * layers};
    return c;
}

// All state in host memory.
typedef struct {
    float *param, *b, *row_squares;
} State;

static State state_random(const Case* c) {
    const State s = {ops_normal(c->n, 0.02f), ops_normal(c->b, 0.1f), ops_normal(c->row_squares, 1)};
    for (size_t i = 0; i < c->row_squares; i++) {
        s.row_squares[i] = fabsf(s.row_squares[i]);
    }
    return s;
}

static State state_copy(const Case* c, State s) {
    const State copy = {ops_copy(s.param, c->n), ops_copy(s.b, c->b),
                        ops_copy(s.row_squares, c->row_squares)};
    return copy;
}

typedef enum { AS_IT_IS, BALANCED } Rows; // X

static State expected(const Case* c, State s, const float* grad, Muon opt, Rows rows) {
    State want = state_copy(c, s);
    const MuonTensor* t = &c->t;
    MatmulScratch matmul;
    Memory memory = memory_on_host();
    matmul_open(&matmul, &memory);
    const MuonScratch scratch = {check_alloc(muon_scratch_bytes(t->rows, t->cols), 1, "scratch"), &matmul};
    opt.weight_decay *= (float)t->decay;
    for (int k = 0; k < t->layers * t->parts; k++) {
        const size_t l = (size_t)(k / t->parts), row = (size_t)(k % t->parts * t->rows),
                     at = muon_at_(t->params, l) + row * t->cols;
        float* row_squares = want.row_squares + muon_at_(t->row_squares, l) + row;
        const MuonMatrix x = {want.param + at,
                              grad + at,
                              {want.b + muon_at_(t->b, l) + row * t->cols, NULL, NULL},
                              rows == BALANCED ? row_squares : NULL,
                              (size_t)t->rows,
                              (size_t)t->cols,
                              NULL};
        muon_update_cpu(x, opt, &scratch);
    }
    free(scratch.memory);
    memory_close(&memory);
    return want;
}

template <class T, class G>
static State updated(const Case* c, State s, const float* grad, Muon opt, Rows rows, MasterWeights kind,
                     MatmulGpu* matmul) {
    const Gpu* gpu = matmul->gpu;
    MuonGpu muon;
    Memory memory = memory_on_gpu();
    muon_open<T>(&muon, &memory, &c->t, 1);
    RuleWeights<T> weights = rule_weights_open<T>(s.param, c->n, kind, gpu);
    G* device_grad = upload<G>(ops_copy(grad, c->n), c->n, 0, gpu);
    float *b = upload<float>(s.b, c->b, 0, gpu),
          *row_squares = upload<float>(s.row_squares, c->row_squares, 0, gpu);
    const MuonUpdate<T> update = {weights.weights,
                                  {device_grad, DTYPE_OF(G)},
                                  {b, NULL, NULL},
                                  rows == BALANCED ? row_squares : NULL,
                                  &muon,
                                  opt,
                                  UPDATE,
                                  7,
                                  matmul,
                                  NULL,
                                  NULL};
    muon_update(&c->t, update, 0, c->t.layers, gpu);
    State got = {rule_weights_close(&weights, gpu), download(b, c->b, gpu),
                 download(row_squares, c->row_squares, gpu)};
    gpu_free(device_grad);
    gpu_free(b);
    gpu_free(row_squares);
    memory_close(&memory);
    return got;
}

// The largest difference of a layer's change of weights, and the cosine and the ratio of sizes of
// the two changes.
typedef struct {
    double difference, cosine, ratio;
} Distance;

static Distance distance(const float* got, const float* want, const float* before, size_t n) {
    double gg = 0, ww = 0, gw = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        const double g = (double)got[i] - before[i], w = (double)want[i] - before[i];
        gg += g * g, ww += w * w, gw += g * w;
        most = fmax(most, fabs(g - w));
        most = isnan(g) ? INFINITY : most;
    }
    const Distance d = {most, gw / sqrt(gg * ww), sqrt(gg / ww)};
    return d;
}

static double muon_growth(MuonPolynomial polynomial) {
    double growth = 1;
    for (int k = 0; k < MUON_ITERATIONS; k++) {
        growth *= (double)muon_iteration(polynomial)->steps[k].x;
    }
    return growth;
}

// In fp32 each step multiplies earlier roundings by at most its coefficient of X, Jordan's five
// together by 485: times a few roundings of X, whose elements are at most about 1.2, within Polar
// Express 2. In bf16 the directions of small singular values get lost in rounding: the change must
// be nearly parallel, and as large but for some roundings of 4.775, which weigh most where there is
// one singular value.
template <class T>
static void expect_change(const char* what, const Case* c, const float* got, const float* want,
                          const float* before, float rate, MuonPolynomial polynomial) {
    const double growth = muon_growth(polynomial);
    for (int l = 0; l < c->t.layers; l++) {
        const size_t at = muon_at_(c->t.params, (size_t)l), n = (size_t)c->t.parts * c->t.rows * c->t.cols;
        const Distance d = distance(got + at, want + at, before + at, n);
        if (DTYPE_OF(T) == DTYPE_FP32) {
            EXPECT(d.difference <= growth * 4 * FLT_EPSILON * rate, "%s, layer %d: off by %g of the rate",
                   what, l, d.difference / rate);
        } else {
            EXPECT(d.cosine > 0.999 && fabs(d.ratio - 1) < 0.03, "%s, layer %d: cosine %.6f, ratio %.6f",
                   what, l, d.cosine, d.ratio);
        }
    }
}

// Expects the elements between the layers to be unchanged.
static void expect_between(const char* what, const Case* c, const float* got, const float* before) {
    const size_t n = (size_t)c->t.parts * c->t.rows * c->t.cols;
    for (size_t i = 0; i < c->n; i++) {
        const int between = i < c->t.params.first || (i - c->t.params.first) % c->t.params.step >= n;
        EXPECT(!between || float_bits(got[i]) == float_bits(before[i]), "%s: weights at %zu changed", what,
               i);
    }
}

template <class T, class G>
static void test_case(Case c, Muon opt, Rows rows, MasterWeights kind, MatmulGpu* matmul) {
    char what[120];
    State s = state_random(&c);
    rule_prepare<T>(s.param, c.n, kind);
    float* grad = rule_round<G>(ops_normal(c.n, 1), c.n);
    snprintf(what, sizeof(what), "%s, gradient %s, master %d, %d x %d x (%d, %d), rows %d",
             dtype_name(DTYPE_OF(T)), dtype_name(DTYPE_OF(G)), kind, c.t.layers, c.t.parts, c.t.rows,
             c.t.cols, rows);
    const State want = expected(&c, s, grad, opt, rows);
    const State got = updated<T, G>(&c, s, grad, opt, rows, kind, matmul);
    const float rate = opt.lr * muon_factor(opt, (size_t)c.t.rows, (size_t)c.t.cols);
    rule_expect_near(what, "momentum", got.b, want.b, c.b, 2, 1);
    if (DTYPE_OF(T) == DTYPE_FP32) {
        rule_expect_near(what, "row squares", got.row_squares, want.row_squares, c.row_squares, 1000, 0);
    }
    const State exact =
        rule_is_exact(kind) ? got : updated<T, float>(&c, s, grad, opt, rows, MASTER_FP32, matmul);
    expect_change<T>(what, &c, exact.param, want.param, s.param, rate, opt.polynomial);
    expect_between(what, &c, got.param, s.param);
    for (int l = 0; l < c.t.layers && !rule_is_exact(kind); l++) {
        const size_t at = muon_at_(c.t.params, (size_t)l);
        rule_expect_rounded<T>(what, got.param + at, exact.param + at,
                               (size_t)c.t.parts * c.t.rows * c.t.cols, kind,
                               rounding_words(7, c.t.stream, UPDATE, muon_at_(c.t.words, (size_t)l)));
    }
    const State again = updated<T, G>(&c, s, grad, opt, rows, kind, matmul);
    EXPECT(ops_same_bits(got.param, again.param, c.n) && ops_same_bits(got.b, again.b, c.b), "%s: two runs",
           what);
    ops_close(what);
}

// Moves a tensor off the places that are multiples of 4.
static Case after_two_elements(Case c) {
    c.t.params.first += 2;
    c.t.master.first += 2;
    c.t.grads.first += 2;
    c.t.b.first += 2;
    c.t.words.first += 2;
    return c;
}

template <class T, class G> static void test_types(const Gpu* gpu) {
    MatmulGpu matmul;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 0, 0};
    Muon cautious = defaults, rms = defaults, polar = defaults;
    polar.polynomial = MUON_POLAR_EXPRESS;
    cautious.decay = DECAY_CAUTIOUS;
    cautious.weight_decay = 2;
    rms.scale = MUON_RMS;
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&matmul, &memory, gpu, settings);
    test_case<T, G>(case_of(3, 3, 32, 96), defaults, AS_IT_IS, MASTER_NONE, &matmul);
    test_case<T, G>(case_of(2, 1, 96, 24), cautious, AS_IT_IS, MASTER_FP32, &matmul);
    test_case<T, G>(case_of(2, 2, 31, 33), rms, BALANCED, MASTER_FP32, &matmul);
    test_case<T, G>(case_of(2, 1, 40, 72), polar, AS_IT_IS, MASTER_NONE, &matmul);
    test_case<T, G>(case_of(1, 2, 64, 31), polar, BALANCED, MASTER_FP32, &matmul);
    Case still = case_of(1, 1, 24, 40);
    still.t.decay = 0;
    test_case<T, G>(still, cautious, AS_IT_IS, MASTER_FP32, &matmul);
    test_case<T, G>(case_of(1, 1, 33, 1), defaults, AS_IT_IS, MASTER_NONE, &matmul);
    test_case<T, G>(case_of(1, 1, 1, 1), defaults, BALANCED, MASTER_NONE, &matmul);
    test_case<T, G>(after_two_elements(case_of(2, 2, 5, 33)), defaults, AS_IT_IS, MASTER_NONE, &matmul);
    test_case<T, G>(after_two_elements(case_of(2, 1, 6, 32)), defaults, AS_IT_IS, MASTER_NONE, &matmul);
    if (DTYPE_OF(T) == DTYPE_BF16) {
        test_case<T, G>(case_of(2, 1, 64, 32), cautious, BALANCED, MASTER_SPLIT, &matmul);
        test_case<T, G>(case_of(2, 1, 64, 31), defaults, AS_IT_IS, MASTER_24, &matmul);
    }
    matmul_gpu_close(&matmul);
    memory_close(&memory);
}

// ---- momentum in 8 bits ----

// All state, in host memory or on the GPU.
typedef struct {
    float *param, *grad, *scale;
    uint8_t* m8;
} State8;

enum { ROWS8 = 40, COLS8 = 192, LAYERS8 = 2, N8 = ROWS8 * COLS8, ALL8 = LAYERS8 * N8 };

static MuonTensor tensor_of_8bit(void) {
    const MuonPlace place = {0, N8};
    return MuonTensor{place, place, place, place, {0, 0}, LAYERS8, 1, ROWS8, COLS8, 1, place, 7, 1, 0};
}

static State8 state8_random(void) {
    const State8 s = {ops_normal(ALL8, 0.02f), ops_normal(ALL8, 1), ops_normal(ALL8 / ADAMW8BIT_BLOCK, 0.3f),
                      ops_bytes(ALL8)};
    for (int i = 0; i < ALL8; i++) {
        s.scale[i / ADAMW8BIT_BLOCK] = fabsf(s.scale[i / ADAMW8BIT_BLOCK]);
        s.m8[i] = (uint8_t)(i * 37 % 256);
    }
    return s;
}

// Updates the weights, or with `u` only sets the operand of layer 0.
template <class T>
static State8 updated_8bit(State8 s, float* u, Muon opt, const Code8Table* codes, MatmulGpu* matmul) {
    const Gpu* gpu = matmul->gpu;
    const MuonTensor t = tensor_of_8bit();
    const size_t blocks = ALL8 / ADAMW8BIT_BLOCK;
    MuonGpu muon;
    Memory memory = memory_on_gpu();
    muon_open<T>(&muon, &memory, &t, 1);
    T* param = upload_rounded<T>(s.param, ALL8, 0, gpu);
    float *grad = upload_rounded<float>(s.grad, ALL8, 0, gpu),
          *scale = upload_rounded<float>(s.scale, blocks, 0, gpu),
          *operand = upload_rounded<float>(s.grad, N8, 0, gpu);
    uint8_t* m8 = (uint8_t*)gpu_alloc(ALL8, 1, "codes");
    gpu_upload(m8, s.m8, ALL8);
    const MuonUpdate<T> update = {{param, NULL, MASTER_NONE},
                                  {grad, DTYPE_FP32},
                                  {NULL, m8, scale},
                                  NULL,
                                  &muon,
                                  opt,
                                  UPDATE,
                                  7,
                                  matmul,
                                  u ? operand : NULL,
                                  codes->values};
    if (u) {
        muon_operand(&t, update, 0, gpu);
        memcpy(u, download(operand, N8, gpu), N8 * sizeof(float));
    } else {
        muon_update(&t, update, 0, LAYERS8, gpu);
    }
    State8 got = {download(param, ALL8, gpu), NULL, download(scale, blocks, gpu), ops_bytes(ALL8)};
    CUDA_CHECK(cudaMemcpy(got.m8, m8, ALL8, cudaMemcpyDeviceToHost));
    gpu_free(param), gpu_free(grad), gpu_free(scale), gpu_free(operand), gpu_free(m8);
    memory_close(&memory);
    return got;
}

// The codes are the CPU's, but for a neighbor where a number lies between two. Owners make the same
// bits of the momentum, and its operand from the values that are kept.
template <class T> static void test_8bit(const Code8Table* codes, MatmulGpu* matmul) {
    State8 s = state8_random(), want = s;
    float *u = ops_floats(N8), *cpu_u = ops_floats(N8);
    int differ = 0;
    MatmulScratch on_cpu;
    Memory memory = memory_on_host();
    matmul_open(&on_cpu, &memory);
    rule_prepare<T>(s.param, ALL8, MASTER_FP32);
    const State8 got = updated_8bit<T>(s, NULL, defaults, codes, matmul),
                 operand = updated_8bit<T>(s, u, defaults, codes, matmul);
    want.param = ops_copy(s.param, ALL8), want.m8 = ops_bytes(ALL8);
    want.scale = ops_copy(s.scale, ALL8 / ADAMW8BIT_BLOCK);
    memcpy(want.m8, s.m8, ALL8);
    const MuonScratch scratch = {ops_bytes(muon_scratch_bytes(ROWS8, COLS8)), &on_cpu};
    for (int l = 0; l < LAYERS8; l++) {
        const Moment all = {NULL, want.m8, want.scale}, b = moment_from(all, (size_t)l * N8);
        float *param = want.param + l * N8, *direction = l == 0 ? cpu_u : ops_floats(N8);
        muon_operand_cpu(direction, s.grad + l * N8, b, N8, defaults);
        const MuonMatrix x = {param, NULL, {NULL, NULL, NULL}, NULL, ROWS8, COLS8, direction};
        muon_update_cpu(x, defaults, &scratch);
        const Distance d = distance(got.param + l * N8, param, s.param + l * N8, N8);
        // in bf16 the weights are rounded at random, too: by a thirtieth of the change
        EXPECT(d.cosine > (DTYPE_OF(T) == DTYPE_FP32 ? 0.99999 : 0.998) && fabs(d.ratio - 1) < 0.03,
               "layer %d: cosine %.6f, ratio %.6f", l, d.cosine, d.ratio);
    }
    rule_expect_near("8 bits", "scales", got.scale, want.scale, ALL8 / ADAMW8BIT_BLOCK, 2, 0);
    for (int i = 0; i < ALL8; i++) {
        EXPECT(abs(got.m8[i] - want.m8[i]) <= 1, "code %d: %d, wanted %d", i, got.m8[i], want.m8[i]);
        differ += got.m8[i] != want.m8[i];
        EXPECT(i >= N8 || (got.m8[i] == operand.m8[i]), "code %d of an owner's operand", i);
        EXPECT(i >= N8 || got.m8[i] != want.m8[i] || fabsf(u[i] - cpu_u[i]) <= 4 * FLT_EPSILON,
               "operand %d: %.9g, wanted %.9g", i, u[i], cpu_u[i]);
    }
    EXPECT(differ <= ALL8 / 1000, "%d of %d codes differ", differ, ALL8);
    memory_close(&memory);
    ops_close("8 bits");
}

template <class T> static void test_8bit_types(const Gpu* gpu) {
    MatmulGpu matmul;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 0, 0};
    Code8Table codes;
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&matmul, &memory, gpu, settings);
    code8_table_open(&codes, &memory);
    test_8bit<T>(&codes, &matmul);
    matmul_gpu_close(&matmul);
    memory_close(&memory);
}

// Layers are divided into groups as equal as they can be, and what is planned is what is allocated.
static void test_groups(const Gpu* gpu) {
    const struct {
        int layers, parts, rows, cols, group;
    } cases[] = {{12, 1, 3072, 768, 4},  {12, 3, 768, 768, 4},  {12, 1, 768, 768, 12},
                 {48, 1, 1600, 6400, 1}, {5, 1, 1024, 4096, 2}, {1, 1, 4, 4, 1}};
    for (int i = 0; i < 6; i++) {
        const MuonTensor t = case_of(cases[i].layers, cases[i].parts, cases[i].rows, cases[i].cols).t;
        EXPECT(muon_group_layers_(&t) == cases[i].group, "case %d: groups of %d, wanted %d", i,
               muon_group_layers_(&t), cases[i].group);
    }
    const MuonTensor tensors[2] = {case_of(3, 3, 32, 96).t, case_of(2, 1, 96, 24).t};
    const size_t want = 2 * (9 * 32 * 96 + 9 * 32 * 32) * 2 + (9 * 64 + 9 * 32) * 4;
    MuonGpu muon;
    const size_t before = gpu_memory_()->now_bytes;
    Memory planned = memory_dry(), memory = memory_on_gpu();
    muon_open<bf16>(&muon, &planned, tensors, 2);
    muon_open<bf16>(&muon, &memory, tensors, 2);
    const size_t bytes = memory_bytes(&planned, MEMORY_DEVICE);
    EXPECT(bytes == want && gpu_memory_()->now_bytes - before == want,
           "planned %zu bytes, allocated %zu, wanted %zu", bytes, gpu_memory_()->now_bytes - before, want);
    memory_close(&memory);
    EXPECT(gpu_memory_()->now_bytes == before, "not all is freed");
    (void)gpu;
}

TEST(muon) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_types<float, float>(&gpu);
    test_types<bf16, float>(&gpu);
    test_types<bf16, bf16>(&gpu);
    UNSANITIZED((test_types<fp16, fp16>(&gpu)));
    test_8bit_types<float>(&gpu);
    test_8bit_types<bf16>(&gpu);
    test_groups(&gpu);
    EXPECT(muon_bytes<bf16>(10, DTYPE_BF16, MASTER_NONE) == 240,
           "4 of the gradient, 12, 4 of X, 4 of weights");
    gpu_close(&gpu);
}
