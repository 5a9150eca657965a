// test_adafactor.cu -- Adafactor on the GPU against adafactor.h: matrices of odd and even sizes and
// vectors in one model, all kinds of master weights, with and without momentum and relative steps.
#include "llmc/optim/adafactor.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/rule_test.h"

static const Adafactor defaults = {0.01f, 0.9f, 1.0f, 1.0f, 0.1f, 0.37f, ADAFACTOR_FIXED, 3};

enum { MOST_TENSORS = 8 };

// A model: its tensors one after the other, each from a multiple of 128 elements on.
typedef struct {
    AdafactorTensor tensors[MOST_TENSORS];
    int count;
    size_t n, row_sums, col_sums, v; // elements of the arrays
} TestModel;

static TestModel test_model_of(const int sizes[][2], int count) {
    TestModel model = {};
    model.count = count;
    for (int i = 0; i < count; i++) {
        AdafactorTensor* t = &model.tensors[i];
        t->rows = sizes[i][0];
        t->cols = sizes[i][1];
        t->params = t->master = t->grads = t->m = model.n;
        t->stream = rand_stream("tensor") + (uint64_t)i;
        t->first_word = ((uint64_t)i << 40) + 4 * (uint64_t)i;
        t->rate = i % 2 ? 0.5f : 1.0f;
        t->decay = t->rows > 1;
        t->row_sums = model.row_sums;
        t->col_sums = model.col_sums;
        t->v = model.v;
        model.n += rule_padded((size_t)t->rows * t->cols);
        model.v += t->rows == 1 ? rule_padded(t->cols) : 0;
        model.row_sums += t->rows > 1 ? rule_padded(t->rows) : 0;
        model.col_sums += t->rows > 1 ? rule_padded(t->cols) : 0;
    }
    return model;
}

static const int SMALL[][2] = {{1, 31}, {33, 31}, {65, 1}, {2, 129}, {1, 1}, {130, 64}, {64, 33}};
static const int WIDE[][2] = {{64, 128}, {96, 384}, {1, 768}, {130, 4}, {1, 33}};
static const int VECTORS[][2] = {{1, 37}, {1, 1025}};

// All state in host memory.
typedef struct {
    float *param, *row_sums, *col_sums, *v, *m;
} State;

static State state_random(const TestModel* model) {
    const State s = {rule_spread(model->n, 1), rule_spread(model->row_sums, 1),
                     rule_spread(model->col_sums, 1), rule_spread(model->v, 1), rule_spread(model->n, 0.1f)};
    float* const positive[] = {s.row_sums, s.col_sums, s.v};
    const size_t counts[] = {model->row_sums, model->col_sums, model->v};
    for (int k = 0; k < 3; k++) {
        for (size_t i = 0; i < counts[k]; i++) {
            positive[k][i] = fabsf(positive[k][i]);
        }
    }
    return s;
}

static State state_copy(const TestModel* model, State s) {
    const State copy = {ops_copy(s.param, model->n), ops_copy(s.row_sums, model->row_sums),
                        ops_copy(s.col_sums, model->col_sums), ops_copy(s.v, model->v),
                        ops_copy(s.m, model->n)};
    return copy;
}

// Returns the state after the CPU's update.
static State expected(const TestModel* model, State s, const float* grad, Adafactor opt, int has_m) {
    State want = state_copy(model, s);
    double* scratch = ops_doubles(1 << 16);
    for (int i = 0; i < model->count; i++) {
        const AdafactorTensor* t = &model->tensors[i];
        Adafactor own = opt;
        own.lr = opt.lr * t->rate;
        own.weight_decay = t->decay ? opt.weight_decay : 0;
        float *m = has_m ? want.m + t->m : NULL, *param = want.param + t->params;
        if (t->rows == 1) {
            adafactor_vector_cpu(param, grad + t->grads, want.v + t->v, m, t->cols, own);
        } else {
            const AdafactorMatrix x = {
                param,           grad + t->grads, want.row_sums + t->row_sums, want.col_sums + t->col_sums, m,
                (size_t)t->rows, (size_t)t->cols};
            adafactor_update_cpu(x, own, scratch);
        }
    }
    return want;
}

// In as many updates as there are parts that are apart.
template <class T>
static void update_parts(const TestModel* model, AdafactorUpdate<T> update, const Gpu* gpu) {
    for (int begin = 0, end = 1; begin < model->count; begin = end++) {
        while (end < model->count && !model->tensors[end].is_apart) {
            end++;
        }
        update.first = adafactor_count(model->tensors, begin);
        update.count = adafactor_count(model->tensors + begin, end - begin);
        adafactor_update(update, gpu);
    }
}

template <class T, class G>
static State updated(const TestModel* model, State s, const float* grad, Adafactor opt, int has_m,
                     MasterWeights kind, const Gpu* gpu) {
    AdafactorPlan plan;
    Memory memory = memory_on_gpu();
    adafactor_open(&plan, &memory, model->tensors, model->count);
    RuleWeights<T> weights = rule_weights_open<T>(s.param, model->n, kind, gpu);
    G* device_grad = upload<G>(ops_copy(grad, model->n), model->n, 0, gpu);
    float *row_sums = upload<float>(s.row_sums, model->row_sums, 0, gpu),
          *col_sums = upload<float>(s.col_sums, model->col_sums, 0, gpu),
          *v = upload<float>(s.v, model->v, 0, gpu), *m = has_m ? upload<float>(s.m, model->n, 0, gpu) : NULL;
    const AdafactorUpdate<T> update = {weights.weights,
                                       {device_grad, DTYPE_OF(G)},
                                       row_sums,
                                       col_sums,
                                       v,
                                       m,
                                       &plan,
                                       opt,
                                       7,
                                       {0, 0, 0},
                                       {0, 0, 0},
                                       NULL};
    update_parts(model, update, gpu);
    State got = {rule_weights_close(&weights, gpu), download(row_sums, model->row_sums, gpu),
                 download(col_sums, model->col_sums, gpu), download(v, model->v, gpu),
                 has_m ? download(m, model->n, gpu) : ops_copy(s.m, model->n)};
    void* const arrays[] = {device_grad, row_sums, col_sums, v, m};
    for (int i = 0; i < 5; i++) {
        gpu_free(arrays[i]);
    }
    memory_close(&memory);
    return got;
}

// Sums of some thousand positive terms in another order, roots and divisions: some units in the
// last place of the sums, and of the step, which is at most some lr. Where one square is most of a
// row's sum, all additions after it round by half a unit: of a row of 128, 16 and 3 in 8 lanes on
// the CPU, 4 and 5 here, and up to two units of the squares themselves.
static void expect_state(const char* what, const TestModel* model, State got, State want,
                         const float* param_got) {
    rule_expect_near(what, "row sums", got.row_sums, want.row_sums, model->row_sums, 16, 0);
    rule_expect_near(what, "column sums", got.col_sums, want.col_sums, model->col_sums, 8, 0);
    rule_expect_near(what, "v", got.v, want.v, model->v, 4, 0);
    rule_expect_near(what, "m", got.m, want.m, model->n, 32, 1);
    rule_expect_near(what, "weights", param_got, want.param, model->n, 4, 16 * defaults.lr);
}

template <class T, class G>
static void test_model(const TestModel* model, int has_m, AdafactorRate rate, MasterWeights kind,
                       const Gpu* gpu) {
    char what[100];
    State s = state_random(model);
    Adafactor opt = defaults;
    opt.rate = rate;
    rule_prepare<T>(s.param, model->n, kind);
    float* grad = rule_round<G>(rule_spread(model->n, 1), model->n);
    snprintf(what, sizeof(what), "%s, gradient %s, master %d, m %d, rate %d, width %d",
             dtype_name(DTYPE_OF(T)), dtype_name(DTYPE_OF(G)), kind, has_m, rate, model->tensors[0].cols);
    const State got = updated<T, G>(model, s, grad, opt, has_m, kind, gpu);
    const State exact =
        rule_is_exact(kind) ? got : updated<float, float>(model, s, grad, opt, has_m, MASTER_NONE, gpu);
    expect_state(what, model, got, expected(model, s, grad, opt, has_m), exact.param);
    for (int i = 0; i < model->count && !rule_is_exact(kind); i++) {
        const AdafactorTensor* t = &model->tensors[i];
        rule_expect_rounded<T>(what, got.param + t->params, exact.param + t->params,
                               (size_t)t->rows * t->cols, kind,
                               rounding_words(7, t->stream, opt.t, t->first_word));
    }
    const State again = updated<T, G>(model, s, grad, opt, has_m, kind, gpu);
    EXPECT(ops_same_bits(got.param, again.param, model->n) && ops_same_bits(got.m, again.m, model->n),
           "%s: two runs", what);
    ops_close(what);
}

template <class T, class G> static void test_types(const Gpu* gpu) {
    const TestModel small = test_model_of(SMALL, 7), wide = test_model_of(WIDE, 5),
                    vectors = test_model_of(VECTORS, 2);
    for (int kind = MASTER_NONE; kind <= rule_last_kind<T>(); kind++) {
        test_model<T, G>(&small, kind == MASTER_FP32, ADAFACTOR_FIXED, (MasterWeights)kind, gpu);
        test_model<T, G>(&wide, kind != MASTER_FP32, ADAFACTOR_FIXED, (MasterWeights)kind, gpu);
        test_model<T, G>(&wide, 0, ADAFACTOR_RELATIVE, (MasterWeights)kind, gpu);
    }
    test_model<T, G>(&small, 1, ADAFACTOR_RELATIVE, MASTER_NONE, gpu);
    test_model<T, G>(&vectors, 1, ADAFACTOR_RELATIVE, MASTER_NONE, gpu);
}

// The first update forgets what was before; gradients that are all zero change nothing but by
// decay.
static void test_edges(const Gpu* gpu) {
    const TestModel model = test_model_of(WIDE, 5);
    const State s = state_random(&model);
    Adafactor first = defaults;
    first.t = 1;
    State other = state_copy(&model, s);
    for (size_t i = 0; i < model.row_sums; i++) {
        other.row_sums[i] *= 2;
    }
    const float* grad = rule_spread(model.n, 1);
    const State a = updated<float, float>(&model, s, grad, first, 0, MASTER_NONE, gpu),
                b = updated<float, float>(&model, other, grad, first, 0, MASTER_NONE, gpu);
    EXPECT(ops_same_bits(a.param, b.param, model.n), "the first update knows earlier sums");
    float* none = ops_floats(model.n);
    memset(none, 0, model.n * sizeof(float));
    const State still = updated<float, float>(&model, s, none, first, 0, MASTER_NONE, gpu);
    const float keep = 1 - first.lr * first.weight_decay;
    for (size_t i = 0; i < 64 * 128; i++) {
        EXPECT_NEAR(still.param[i], keep * s.param[i], 1e-7 * (1 + fabsf(s.param[i])),
                    "no gradient, weight %zu", i);
    }
    ops_close("edges");
}

// The memory of an update.
static size_t planned_bytes(const TestModel* model) {
    AdafactorPlan plan;
    Memory memory = memory_dry();
    adafactor_open(&plan, &memory, model->tensors, model->count);
    return memory_bytes(&memory, MEMORY_DEVICE);
}

// Tensors that are updated apart share the memory of partial sums, and have the bits of one update.
static void test_apart(const Gpu* gpu) {
    TestModel model = test_model_of(SMALL, 7);
    const State s = state_random(&model);
    const float* grad = rule_spread(model.n, 1);
    const State together = updated<float, float>(&model, s, grad, defaults, 1, MASTER_NONE, gpu);
    const size_t bytes = planned_bytes(&model);
    model.tensors[2].is_apart = model.tensors[5].is_apart = 1; // after a matrix, and before one
    const State apart = updated<float, float>(&model, s, grad, defaults, 1, MASTER_NONE, gpu);
    EXPECT(ops_same_bits(together.param, apart.param, model.n) &&
               ops_same_bits(together.m, apart.m, model.n) &&
               ops_same_bits(together.col_sums, apart.col_sums, model.col_sums),
           "updated apart: other bits");
    const size_t columns[] = {31, 2 * 1 + 129, 3 * 64 + 33}; // of the tiles of each part
    const size_t saved = (columns[0] + columns[1]) * sizeof(float);
    EXPECT(bytes - planned_bytes(&model) == saved, "%zu bytes saved, not %zu", bytes - planned_bytes(&model),
           saved);
    ops_close("apart");
}

TEST(adafactor) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_types<float, float>(&gpu);
    test_types<bf16, float>(&gpu);
    test_types<bf16, bf16>(&gpu);
    UNSANITIZED((test_types<fp16, fp16>(&gpu)));
    test_edges(&gpu);
    test_apart(&gpu);
    EXPECT(adafactor_bytes(10, DTYPE_BF16, DTYPE_BF16, MASTER_NONE, 0) == 100,
           "6 of the gradient, 4 of weights");
    EXPECT(adafactor_bytes(10, DTYPE_BF16, DTYPE_FP32, MASTER_SPLIT, 1) == 280, "12, 8 and 8");
    gpu_close(&gpu);
}
