// test_adamw8bit.cu -- AdamW with 8-bit moments on the GPU against adamw8bit.h: the codes, the
// scales, the weights.
#include "llmc/optim/adamw8bit.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/rule_test.h"

static const AdamW defaults = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.37f, 7, DECAY_ALL};
enum { BLOCK = ADAMW8BIT_BLOCK };

// All state in host memory; what is behind n elements is zero, up to a multiple of 128.
typedef struct {
    float* param;
    uint8_t *m, *v;
    float *m_scale, *v_scale;
} State;

static size_t blocks_of(size_t n) { return rule_padded(n) / BLOCK; }

static uint8_t* codes(size_t n) { return (uint8_t*)ops_array_(rule_padded(n)); }

static State state_random(size_t n) {
    State s = {rule_spread(rule_padded(n), 1), codes(n), codes(n), rule_spread(blocks_of(n), 1),
               rule_spread(blocks_of(n), 1)};
    Rand rng = rand_open(4, n);
    for (size_t i = 0; i < rule_padded(n); i++) {
        s.param[i] = i < n ? s.param[i] : 0;
        s.m[i] = (uint8_t)(i < n ? rand_below(&rng, 256) : 127);
        s.v[i] = (uint8_t)(i < n ? rand_below(&rng, 256) : 0);
    }
    for (size_t b = 0; b < blocks_of(n); b++) {
        s.m_scale[b] = b * BLOCK < n ? fabsf(s.m_scale[b]) : 0;
        s.v_scale[b] = b * BLOCK < n ? fabsf(s.v_scale[b]) : 0;
    }
    return s;
}

static uint8_t* codes_copy(const uint8_t* x, size_t n) {
    return (uint8_t*)memcpy(codes(n), x, rule_padded(n));
}

static State state_copy(State s, size_t n) {
    const State copy = {ops_copy(s.param, rule_padded(n)), codes_copy(s.m, n), codes_copy(s.v, n),
                        ops_copy(s.m_scale, blocks_of(n)), ops_copy(s.v_scale, blocks_of(n))};
    return copy;
}

static uint8_t* upload_codes(const uint8_t* x, size_t n, const Gpu* gpu) {
    uint8_t* memory = (uint8_t*)gpu_alloc(rule_padded(n), 1, "codes");
    CUDA_CHECK(cudaMemcpyAsync(memory, x, rule_padded(n), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    return memory;
}

static uint8_t* download_codes(uint8_t* memory, size_t n, const Gpu* gpu) {
    uint8_t* x = codes(n);
    CUDA_CHECK(cudaMemcpyAsync(x, memory, rule_padded(n), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(memory);
    return x;
}

static float* download_scales(float* memory, size_t n, const Gpu* gpu) {
    float* x = download(memory, blocks_of(n), gpu);
    gpu_free(memory);
    return x;
}

static RoundingWords words_of(AdamW opt) { return rounding_words(7, rand_stream("tensor"), opt.t, 128); }

template <class T, class G>
static State updated(State s, const float* grad, size_t n, AdamW opt, MasterWeights kind, const Gpu* gpu) {
    Code8Table table;
    Memory memory = memory_on_gpu();
    code8_table_open(&table, &memory);
    RuleWeights<T> weights = rule_weights_open<T>(s.param, rule_padded(n), kind, gpu);
    G* device_grad = upload<G>(ops_copy(grad, rule_padded(n)), rule_padded(n), 0, gpu);
    const AdamW8bitState state = {upload_codes(s.m, n, gpu), upload_codes(s.v, n, gpu),
                                  upload<float>(s.m_scale, blocks_of(n), 0, gpu),
                                  upload<float>(s.v_scale, blocks_of(n), 0, gpu)};
    const AdamW8bitUpdate<T> update = {weights.weights, {device_grad, DTYPE_OF(G)}, state, &table, opt,
                                       words_of(opt)};
    adamw8bit_update(update, n, gpu);
    const State got = {rule_weights_close(&weights, gpu), download_codes(state.m, n, gpu),
                       download_codes(state.v, n, gpu), download_scales(state.m_scale, n, gpu),
                       download_scales(state.v_scale, n, gpu)};
    gpu_free(device_grad);
    memory_close(&memory);
    return got;
}

static State expected(State s, const float* grad, size_t n, AdamW opt) {
    State want = state_copy(s, n);
    const AdamW8bitState state = {want.m, want.v, want.m_scale, want.v_scale};
    adamw8bit_update_cpu(want.param, grad, state, n, BLOCK, opt);
    return want;
}

// Where codes differ they are neighbors, and what was encoded is within 2^-22 of the middle between
// their values. The new moment is computed again from the state before, in double.
static void expect_codes(const char* what, const uint8_t* got, const uint8_t* want, const double* moments,
                         const float* scales, size_t n, Code8 kind) {
    size_t others = 0;
    for (size_t i = 0; i < n; i++) {
        const double x = moments[i] * code8_inverse(scales[i / BLOCK]);
        const double middle = ((double)code8_value(got[i], kind) + code8_value(want[i], kind)) / 2;
        const int neighbors = abs(got[i] - want[i]) == 1;
        others += got[i] != want[i];
        EXPECT(got[i] == want[i] || (neighbors && fabs(x - middle) <= 0x1p-21 * fabs(middle)),
               "%s, kind %d: code %zu of %g is %d, wanted %d", what, kind, i, x, got[i], want[i]);
    }
    EXPECT(others <= n / 1000 + 1, "%s: %zu of %zu codes differ", what, others, n);
}

static void expect_state(const char* what, State got, State want, State before, const float* grad, size_t n,
                         AdamW opt, const float* param_got) {
    double *m = ops_doubles(n), *v = ops_doubles(n);
    for (size_t i = 0; i < n; i++) {
        const double g = (double)grad[i] * opt.grad_scale;
        const double v0 = (double)code8_value(before.v[i], CODE8_UNSIGNED) * before.v_scale[i / BLOCK],
                     m0 = (double)code8_value(before.m[i], CODE8_SIGNED) * before.m_scale[i / BLOCK];
        m[i] = opt.beta1 * (v0 == 0 ? 0 : m0) + (1.0 - opt.beta1) * g;
        v[i] = opt.beta2 * v0 + (1.0 - opt.beta2) * g * g;
    }
    rule_expect_near(what, "scales of m", got.m_scale, want.m_scale, (n + BLOCK - 1) / BLOCK, 2, 0);
    rule_expect_near(what, "scales of v", got.v_scale, want.v_scale, (n + BLOCK - 1) / BLOCK, 2, 0);
    expect_codes(what, got.m, want.m, m, want.m_scale, n, CODE8_SIGNED);
    expect_codes(what, got.v, want.v, v, want.v_scale, n, CODE8_UNSIGNED);
    rule_expect_near(what, "weights", param_got, want.param, n, 4, 10 * opt.lr);
}

static void expect_padding(const char* what, State s, size_t n) {
    for (size_t i = n; i < rule_padded(n); i++) {
        EXPECT(float_bits(s.param[i]) == 0 && s.m[i] == 127 && s.v[i] == 0,
               "%s: %g, codes %d %d behind the end", what, s.param[i], s.m[i], s.v[i]);
    }
}

template <class T, class G> static void test_size(size_t n, MasterWeights kind, const Gpu* gpu) {
    char what[100];
    State s = state_random(n);
    float* grad = rule_round<G>(rule_spread(rule_padded(n), 1), rule_padded(n));
    memset(grad + n, 0, (rule_padded(n) - n) * sizeof(float));
    rule_prepare<T>(s.param, rule_padded(n), kind);
    snprintf(what, sizeof(what), "%s, gradient %s, master %d, n %zu", dtype_name(DTYPE_OF(T)),
             dtype_name(DTYPE_OF(G)), kind, n);
    const State got = updated<T, G>(s, grad, n, defaults, kind, gpu);
    const State exact =
        rule_is_exact(kind) ? got : updated<float, float>(s, grad, n, defaults, MASTER_NONE, gpu);
    expect_state(what, got, expected(s, grad, n, defaults), s, grad, n, defaults, exact.param);
    expect_padding(what, got, n);
    if (!rule_is_exact(kind)) {
        rule_expect_rounded<T>(what, got.param, exact.param, n, kind, words_of(defaults));
    }
    const State again = updated<T, G>(s, grad, n, defaults, kind, gpu);
    EXPECT(ops_same_bits(got.param, again.param, n) && memcmp(got.m, again.m, n) == 0 &&
               memcmp(got.v, again.v, n) == 0,
           "%s: two runs", what);
    ops_close(what);
}

template <class T, class G> static void test_types(const Gpu* gpu) {
    const size_t sizes[] = {1, 31, 33, 63, 64, 65, 127, 129, 64 * 33 - 1, 64 * 33 + 1, 768 * 4};
    for (int i = 0; i < 11; i++) {
        for (int kind = MASTER_NONE; kind <= rule_last_kind<T>(); kind++) {
            test_size<T, G>(sizes[i], (MasterWeights)kind, gpu);
        }
    }
}

// Zeros are a state to start from; gradients whose squares are below the normal numbers, and
// gradients of zero.
static void test_start(const Gpu* gpu) {
    const size_t n = 256;
    State s = state_random(n);
    float* grad = rule_spread(n, 1);
    memset(s.m, 0, n);
    memset(s.v, 0, n);
    memset(s.m_scale, 0, blocks_of(n) * sizeof(float));
    memset(s.v_scale, 0, blocks_of(n) * sizeof(float));
    AdamW opt = defaults;
    opt.t = 1;
    opt.grad_scale = 1;
    for (size_t i = 0; i < 128; i++) {
        grad[i] = i < 64 ? 0 : 1e-20f * (float)(1 + i % 7);
    }
    const State got = updated<float, float>(s, grad, n, opt, MASTER_NONE, gpu),
                want = expected(s, grad, n, opt);
    expect_state("start", got, want, s, grad + 0, n, opt, got.param);
    EXPECT(got.m_scale[0] == 0 && got.v_scale[0] == 0 && got.m[5] == 127 && got.v[5] == 0,
           "no gradient: %g %g %d %d", got.m_scale[0], got.v_scale[0], got.m[5], got.v[5]);
    ops_close("start");
}

// A gradient that is not a number stays in its block of 64, and shows in its scales.
static void test_nonfinite(const Gpu* gpu) {
    const size_t n = 256;
    const State s = state_random(n);
    float* grad = ops_normal(n, 1);
    grad[70] = NAN;
    const State got = updated<float, float>(s, grad, n, defaults, MASTER_NONE, gpu);
    for (size_t i = 0; i < n; i++) {
        EXPECT(isnan(got.param[i]) == (i == 70), "weight %zu: %g", i, got.param[i]);
    }
    EXPECT(!isfinite(got.m_scale[1]) && !isfinite(got.v_scale[1]) && isfinite(got.m_scale[0]) &&
               isfinite(got.m_scale[2]),
           "scales %g %g %g", got.m_scale[0], got.m_scale[1], got.m_scale[2]);
    ops_close("not finite");
}

TEST(adamw8bit) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_types<float, float>(&gpu);
    test_types<bf16, float>(&gpu);
    test_types<bf16, bf16>(&gpu);
    UNSANITIZED((test_types<fp16, fp16>(&gpu)));
    test_start(&gpu);
    test_nonfinite(&gpu);
    EXPECT(adamw8bit_bytes(64, DTYPE_BF16, DTYPE_BF16, MASTER_NONE) == 64 * 10.25, "with stochastic weights");
    EXPECT(adamw8bit_bytes(64, DTYPE_BF16, DTYPE_BF16, MASTER_SPLIT) == 64 * 14.25,
           "with split master weights");
    gpu_close(&gpu);
}
