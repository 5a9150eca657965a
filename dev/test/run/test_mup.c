// test_mup.c -- --mup: its factors against multipliers in the forward pass, and the coordinate
// check: an update moves activations and logits as much in any width and depth.
#define TRAIN_GPT2_NO_MAIN
#include "train_gpt2.c"

#include "dev/test/lib/load_test.h"
#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/test.h"
#include "llmc/base/rand.h"
#include "llmc/reference.h"
#include "llmc/setup/resolve.h"

// Few tokens: the embeddings of more than a narrow model has channels would overlap, and less so in
// a wider one.
enum { B = 2, T = 8, N = B * T, V = 16, HEAD = 16 };

static Comm alone = {.size = 1};

static ModelConfig config_of(Arch arch, int C, int L) {
    const ModelPreset sizes = {.arch = arch,
                               .L = L,
                               .C = C,
                               .NH = C / HEAD,
                               .max_T = T,
                               .has_head = model_architecture(arch)->has_head};
    return model_preset_config(&sizes, V);
}

static const Options usual = {.batch.size = B,
                              .batch.seq_len = T,
                              .batch.total = N,
                              .batch.steps = 100,
                              .optimizer.schedule = SCHEDULE_CONSTANT,
                              .optimizer.lr = 1.0f / 64,
                              .optimizer.beta1 = 0.9f,
                              .optimizer.beta2 = 0.95f,
                              .optimizer.eps = 1e-8f,
                              .optimizer.weight_decay = 0.1f,
                              .optimizer.embedding_lr_scale = 1,
                              .optimizer.vector_lr_scale = 1};

// Opens a model with random weights; mup: its small model, or "".
static void open_random(Model* model, ModelConfig cfg, Options options, const char* mup) {
    options.optimizer.mup = mup;
    const Settled s = settled_alone(&options, cfg, USE_TRAIN, SAFETENSORS_F32);
    model_open(model, &s, memory_on_host(), &alone);
    load_weights(model, NULL);
}

typedef struct {
    int inputs[N], targets[N];
} Tokens;

static Tokens random_tokens(uint64_t seed) {
    Tokens tokens;
    Rand rng = rand_open(seed, 1);
    for (int n = 0; n < N; n++) {
        tokens.inputs[n] = (int)(rand_u32(&rng) % V);
        tokens.targets[n] = (int)(rand_u32(&rng) % V);
    }
    return tokens;
}

static Batch batch_of(const Tokens* tokens) {
    return (Batch){tokens->inputs, tokens->targets, NULL, B, T, N};
}

static void set_gradients(Model* model, const Tokens* tokens) {
    const MicroStep only = {0, 1, 1, 1};
    model_forward(model, batch_of(tokens));
    model_backward(model, batch_of(tokens), 1.0f / N, GRADIENT_SET, only, NULL);
}

// ---- factors ----

static int is_one_of(const char* name, const char* names) { return strstr(names, name) != NULL; }

// The model of the papers: multipliers of 1 / d behind the layers that add to the residual stream,
// and of 1 / m in front of logits, here in front of the weights and biases of these layers.
typedef struct {
    Real *param, *grad, *m, *v; // as the parameters are laid out, without multipliers
    double width, depth;
} Explicit;

static double multiplier(const Explicit* x, const TensorRow* row, int has_head) {
    return is_one_of(row->name, "attprojw attprojb fcprojw fcprojb") ? 1 / x->depth
           : is_one_of(row->name, has_head ? "head" : "lnfw lnfb")   ? 1 / x->width
                                                                     : 1;
}

// Updates the parameters by AdamW with the rates, decay and eps that the papers give models with
// multipliers, and sets those of `model` to the product.
static void explicit_update(Explicit* x, Model* model, AdamW opt) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        const double s = multiplier(x, row, model->cfg.has_head),
                     w = is_one_of(row->name, "qkvw attprojw fcw fcprojw") ? x->width : 1;
        AdamW own = opt;
        own.lr /= (float)w;
        own.weight_decay *= row->decay ? (float)w : 0;
        own.eps /= (float)(x->width * (row->in_block ? x->depth : 1));
        for (int l = 0; l < row->layers; l++) {
            const size_t at = (row->offset_bytes + (size_t)l * row->layer_bytes) / sizeof(float),
                         n = tensor_layer_elements(row);
            float *param = (float*)model->params_memory + at, *grad = (float*)model->grads_memory + at;
            for (size_t k = 0; k < n; k++) {
                x->grad[at + k] = s * grad[k];
            }
            ref_adamw(x->param + at, x->grad + at, x->m + at, x->v + at, n, own);
            for (size_t k = 0; k < n; k++) {
                param[k] = (float)(s * x->param[at + k]);
            }
        }
    }
}

// Returns the model's first weights, without multipliers.
static Explicit explicit_open(const Model* model, double width, double depth) {
    const size_t n = model->parameter_bytes / sizeof(float);
    Real* memory = (Real*)check_alloc(4 * n, sizeof(Real), "parameters");
    const Explicit x = {memory, memory + n, memory + 2 * n, memory + 3 * n, width, depth};
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        const double s = multiplier(&x, row, model->cfg.has_head);
        for (int l = 0; l < row->layers; l++) {
            const size_t at = (row->offset_bytes + (size_t)l * row->layer_bytes) / sizeof(float);
            for (size_t k = 0; k < tensor_layer_elements(row); k++) {
                x.param[at + k] = ((const float*)model->params_memory)[at + k] / s;
            }
        }
    }
    return x;
}

// Compares two models, relative to how far the weights have moved. Roundings grow to 2e-4 in twenty
// updates; without the factor of eps each tensor with one differs by 6 % or more.
static void expect_same_moves(const Model* got, const Model* want, const float* start) {
    const float *a = (const float*)got->params_memory, *b = (const float*)want->params_memory;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &got->parameter_rows[i];
        double error = 0, moved = 0;
        for (int l = 0; l < row->layers; l++) {
            const size_t at = (row->offset_bytes + (size_t)l * row->layer_bytes) / sizeof(float);
            for (size_t k = at; k < at + tensor_layer_elements(row); k++) {
                error += pow((double)a[k] - b[k], 2);
                moved += pow((double)b[k] - start[k], 2);
            }
        }
        EXPECT(tensor_is_absent(row) || (moved > 0 && sqrt(error / moved) < 1e-3), "%s: %g of its change %g",
               row->name, sqrt(error / moved), sqrt(moved));
    }
}

// Twenty updates; eps is large, so that its factor matters, too.
static void test_factors(Arch arch) {
    const double width = 4, depth = 4;
    const ModelConfig cfg = config_of(arch, 64, 4);
    Options options = usual;
    options.optimizer.eps = 1e-3f;
    Model model, other;
    open_random(&model, cfg, options, "16:1");
    open_random(&other, cfg, options, "16:1");
    float* start = (float*)check_alloc(model.parameter_bytes, 1, "parameters");
    memcpy(start, model.params_memory, model.parameter_bytes);
    Explicit x = explicit_open(&other, width, depth);
    const Tokens tokens = random_tokens(1);
    for (int64_t t = 1; t <= 20; t++) {
        const Update update = setup_update(&options, t - 1, t, 0);
        set_gradients(&model, &tokens);
        model_update(&model, update);
        set_gradients(&other, &tokens);
        explicit_update(&x, &other, update_adamw(update));
    }
    expect_same_moves(&model, &other, start);
    free(x.param);
    free(start);
    model_close(&other);
    model_close(&model);
}

// The deviation of a tensor in layer 0.
static double deviation(const Model* model, const char* name) {
    double squares = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        const size_t n = model_rows_in_files(row, model->cfg) * row->cols;
        for (size_t k = 0; k < n && strcmp(row->name, name) == 0; k++) {
            const float x = ((const float*)model->params_memory)[row->offset_bytes / sizeof(float) + k];
            squares += (double)x * x / (double)n;
        }
    }
    return sqrt(squares);
}

// First values, relative to those of the small model: 4 times as wide, 8 times as deep.
static void test_first_values(Arch arch) {
    static const struct {
        const char* name;
        double factor;
    } rows[] = {{"wte", 1},           {"qkvw", 0.5}, {"fcw", 0.5}, {"attprojw", 0.5 / 8},
                {"fcprojw", 0.5 / 8}, {"ln1w", 1}};
    Model large, small;
    open_random(&large, config_of(arch, 128, 8), usual, "32:1");
    open_random(&small, config_of(arch, 32, 1), usual, "");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        EXPECT_NEAR(deviation(&large, rows[i].name) / deviation(&small, rows[i].name), rows[i].factor,
                    0.1 * rows[i].factor, "%s", rows[i].name);
    }
    const char* last = large.cfg.has_head ? "head" : "lnfw";
    EXPECT_NEAR(deviation(&large, last) / deviation(&small, last), 0.25, 0.03, "%s", last);
    model_close(&small);
    model_close(&large);
}

// The logits of a router are as large in any width.
static void test_router(void) {
    const TensorRow row = {.kind = KIND_ROUTER, .init = INIT_NORMAL, .in_block = 1};
    const MupFactors f = mup_factors((Mup){256, 3}, (ModelConfig){.C = 1024, .L = 6}, &row);
    EXPECT(f.rate == 0.25f && f.decay == 4 && f.eps == 0.5f, "%g %g %g", f.rate, f.decay, f.eps);
    EXPECT_NEAR(f.init, 0.25 * sqrt(3), 1e-6, "from 256 channels, 1024 have GPT-2's deviation");
}

TEST(mup_factors) {
    test_router();
    test_factors(ARCH_GPT2);
    test_factors(ARCH_QWEN3);
    test_first_values(ARCH_GPT2);
    test_first_values(ARCH_QWEN3);
}

// ---- the coordinate check ----

enum { UPDATES = 6, BATCHES = 8, SIZES = 4 };

// Sizes of activations or of their changes: of the residual stream after the last block, and of
// logits.
typedef struct {
    double residual, logits;
} Coordinates;

// Sets residual (N, C) and logits (N, V).
static void read_activations(Model* model, const Tokens* tokens, float* residual, float* logits) {
    const Pass pass = batch_pass(model, batch_of(tokens));
    const LmHead head = lm_head(model, &pass);
    forward_pass(model, &pass);
    memcpy(residual, stream_into(model, model->cfg.L, &pass),
           (size_t)N * (size_t)model->cfg.C * sizeof(float));
    for (int n = 0; n < N; n++) {
        lm_head_logits_cpu(&head, n, 1);
        memcpy(logits + (size_t)n * V, head.logits, V * sizeof(float));
    }
}

static double root_mean_square(const float* a, const float* b, size_t n) {
    double squares = 0;
    for (size_t i = 0; i < n; i++) {
        squares += pow((double)a[i] - b[i], 2);
    }
    return sqrt(squares / (double)n);
}

// Returns the change after a few updates.
static Coordinates changes_of(int C, int L, const char* mup, uint64_t seed) {
    Model model;
    open_random(&model, config_of(ARCH_GPT2, C, L), usual, mup);
    const Tokens tokens = random_tokens(seed);
    const size_t wide = (size_t)N * (size_t)C, narrow = (size_t)N * V;
    float* memory = (float*)check_alloc(2 * (wide + narrow), sizeof(float), "activations");
    float *residual = memory, *logits = memory + 2 * wide;
    read_activations(&model, &tokens, residual, logits);
    for (int64_t t = 1; t <= UPDATES; t++) {
        set_gradients(&model, &tokens);
        model_update(&model, setup_update(&usual, t - 1, t, 0));
    }
    read_activations(&model, &tokens, residual + wide, logits + narrow);
    const Coordinates change = {root_mean_square(residual, residual + wide, wide),
                                root_mean_square(logits, logits + narrow, narrow)};
    free(memory);
    model_close(&model);
    return change;
}

// Returns the slope of log y over log x.
static double slope(const int* x, const double* y, int count) {
    double mean_x = 0, mean_y = 0, both = 0, square = 0;
    for (int i = 0; i < count; i++) {
        mean_x += log(x[i]) / count, mean_y += log(y[i]) / count;
    }
    for (int i = 0; i < count; i++) {
        both += (log(x[i]) - mean_x) * (log(y[i]) - mean_y);
        square += pow(log(x[i]) - mean_x, 2);
    }
    return both / square;
}

typedef enum { GROWS_WIDER, GROWS_DEEPER } Grows;

// Returns how changes grow with the size.
static Coordinates slopes(Grows grows, const int* sizes, int count, const char* mup) {
    double residual[SIZES], logits[SIZES];
    for (int i = 0; i < count; i++) {
        residual[i] = logits[i] = 0;
        for (uint64_t seed = 1; seed <= BATCHES; seed++) {
            const Coordinates c = grows == GROWS_WIDER ? changes_of(sizes[i], 2, mup, seed)
                                                       : changes_of(64, sizes[i], mup, seed);
            residual[i] += c.residual / BATCHES;
            logits[i] += c.logits / BATCHES;
        }
    }
    return (Coordinates){slope(sizes, residual, count), slope(sizes, logits, count)};
}

// Expects changes of one size with --mup, and others without it.
static void check_coordinates(Grows grows, const int* sizes, int count) {
    const char* what = grows == GROWS_WIDER ? "width" : "depth";
    const Coordinates with = slopes(grows, sizes, count, "64:2"), without = slopes(grows, sizes, count, "");
    EXPECT(fabs(with.residual) <= 0.1 && fabs(with.logits) <= 0.1, "%s: slopes %.3f and %.3f", what,
           with.residual, with.logits);
    // behind the last norm, depth shows less
    EXPECT(without.residual > 0.1 && (grows == GROWS_DEEPER || without.logits > 0.1),
           "%s without --mup: slopes %.3f and %.3f", what, without.residual, without.logits);
}

TEST(mup_coordinates) {
    static const int widths[] = {64, 128, 256}, depths[] = {2, 4, 8};
    check_coordinates(GROWS_WIDER, widths, 3);
    check_coordinates(GROWS_DEEPER, depths, 3);
}

COMMAND(check_mup_coordinates) { // all sizes, for soak.sh
    static const int widths[] = {64, 128, 256, 512}, depths[] = {2, 4, 8, 16};
    (void)argc, (void)argv;
    check_coordinates(GROWS_WIDER, widths, 4);
    check_coordinates(GROWS_DEEPER, depths, 4);
    return test_failures_ > 0;
}
