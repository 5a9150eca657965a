/*
test_gpt2.c -- the whole model on the CPU: against PyTorch's numbers (dev/ref/fixtures, computed in
float64), against llmc/reference.h, against finite differences, and against itself: recomputation,
accumulation and threads; documents in a row, padding and shorter batches.

    make test, or build/plain/test_run from the top of the repository
    test_run composition     each operation of each architecture once: what a sanitizer should see
*/
#define TRAIN_GPT2_NO_MAIN
// the classifier takes a batch in several chunks, forward and backward
#define MODEL_CHUNK_LOGITS 3000
#include "llmc/formats/llmc_bin.h"
#include "llmc/optim/schedule.h"
#include "llmc/setup/resolve.h"
#include "train_gpt2.c"

#include "dev/test/lib/in_backward_test.h"
#include "dev/test/lib/load_test.h"
#include "dev/test/lib/plan_test.h"
#include "dev/test/lib/resume_test.h"
#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/task_oracle.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/test_element.h"
#include "llmc/reference_model.h"
#include "llmc/model/share_layers.h"

#define FIXTURES "dev/ref/fixtures/"

enum { STATE_MAGIC = 20240327, ADAMW_STEPS = 10 };

// PyTorch's numbers for one batch.
typedef struct {
    int B, T;
    int *x, *y;    // (B, T)
    float* logits; // (B, T, V)
    float loss;
    void* grads; // as the parameters are laid out
} State;

static float* element(const TensorRow* row, const void* memory, size_t j) {
    return (float*)test_element(row, memory, j);
}

static void read_exactly(FILE* file, void* to, size_t bytes, const char* path) {
    CHECK(fread(to, 1, bytes, file) == bytes, "%s: too short", path);
}

static State fixture_open(const char* path, const Model* model) {
    State s;
    int32_t header[256];
    FILE* file = fopen(path, "rb");
    CHECK(file, "%s: cannot read", path);
    read_exactly(file, header, sizeof(header), path);
    CHECK(header[0] == STATE_MAGIC, "%s: magic number %d, wanted %d", path, header[0], STATE_MAGIC);
    s.B = header[2];
    s.T = header[3];
    const size_t N = (size_t)s.B * (size_t)s.T, V = (size_t)model->cfg.V;
    s.x = check_alloc(N, sizeof(int), "x");
    s.y = check_alloc(N, sizeof(int), "y");
    s.logits = check_alloc(N * V, sizeof(float), "logits");
    s.grads = check_alloc(model->parameter_bytes, 1, "gradients");
    read_exactly(file, s.x, N * sizeof(int), path);
    read_exactly(file, s.y, N * sizeof(int), path);
    read_exactly(file, s.logits, N * V * sizeof(float), path);
    read_exactly(file, &s.loss, sizeof(float), path);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        for (int l = 0; l < row->layers; l++) {
            read_exactly(file, tensor_at_layer(row, s.grads, l), tensor_layer_elements(row) * sizeof(float),
                         path);
        }
    }
    CHECK(fgetc(file) == EOF, "%s: too long", path);
    fclose(file);
    return s;
}

static void fixture_close(State* s) {
    free(s->x);
    free(s->y);
    free(s->logits);
    free(s->grads);
}

static Comm alone = {.size = 1};

// Opens a model of one rank; its passes are those of micro-steps.
static void open_alone(Model* model, ModelConfig cfg, const Options* options, ModelUse use) {
    const Settled s = settled_alone(options, cfg, use, SAFETENSORS_F32);
    model_open(model, &s, memory_on_host(), &alone);
    linear_trains(&model->linear);
}

// RECOMPUTE_NEVER opens a model that generates.
static void open_model_matmul(Model* model, ModelConfig cfg, int B, int T, int recompute,
                              MatmulPrecision matmul) {
    const Options options = {.batch.size = B,
                             .batch.seq_len = T,
                             .batch.steps = 1,
                             .memory.recompute = recompute,
                             .memory.matmul = matmul,
                             .optimizer.embedding_lr_scale = 1,
                             .optimizer.vector_lr_scale = 1};
    open_alone(model, cfg, &options, recompute == RECOMPUTE_NEVER ? USE_GENERATE : USE_TRAIN);
}

static void open_model(Model* model, ModelConfig cfg, int B, int T, int recompute) {
    open_model_matmul(model, cfg, B, T, recompute, MATMUL_FP32);
}

static void open_fixture(Model* model, const char* path, int recompute) {
    open_model(model, llmc_bin_read_config(path), 3, 31, recompute);
    load_weights(model, path);
}

// With matmuls in bf16.
static void open_bf16(Model* model, const char* path, int recompute) {
    open_model_matmul(model, llmc_bin_read_config(path), 3, 31, recompute, MATMUL_BF16);
    load_weights(model, path);
}

static Batch batch_of(const State* s) { return (Batch){s->x, s->y, NULL, s->B, s->T, s->B * s->T}; }

static const MicroStep only = {0, 1, 1, 1}; // micro-step, of one process

// Forward and backward on the whole batch; the gradients are set, the mean loss returned.
static double pass(Model* model, const State* s) {
    model_forward(model, batch_of(s));
    model_backward(model, batch_of(s), 1.0f / (float)(s->B * s->T), GRADIENT_SET, only, NULL);
    return batch_loss(model, batch_of(s)) / (s->B * s->T);
}

// After model_forward on the same batch: the sum of its losses, without gradients.
static double losses_of(Model* model, Batch batch) {
    model_losses(model, batch, NULL);
    return batch_loss(model, batch);
}

// The mean, of the whole batch.
static double loss_of(Model* model, const State* s) { return losses_of(model, batch_of(s)) / (s->B * s->T); }

// Returns the norm of the whole gradient.
static double gradient_norm(Model* model) {
    WideSum sum = {0, 0};
    zero_square_sum_cpu(&model->zero, &sum, model->update.partial);
    return sqrt(wide_sum_value(sum));
}

// The first `count` tokens of the first sequence.
static Batch beginning(const State* s, int count) { return (Batch){s->x, s->y, NULL, 1, count, count}; }

// |a - b| / |b| in the 2-norm; NaN if either has one.
static double relative_error(const float* a, const float* b, size_t n) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(difference / (norm > 0 ? norm : 1));
}

// The largest of a tensor's layers.
static double tensor_error(const TensorRow* row, const void* a, const void* b) {
    double largest = 0;
    for (int l = 0; l < row->layers; l++) {
        const double error = relative_error((float*)tensor_at_layer(row, a, l),
                                            (float*)tensor_at_layer(row, b, l), tensor_layer_elements(row));
        largest = error <= largest ? largest : error; // NaN, too
    }
    return largest;
}

// Returns where a backward pass leaves the gradient of copy k of parameter i; NULL: nowhere.
static float* gradient_of_copy(const Model* model, int i, int k, const void* grads) {
    const Map* m = &model->map;
    const TensorRow* row = &m->rows[i];
    const Shard* s = map_find(m, i, row->in_block ? tensor_lowest_layer(row, k) : -1);
    const size_t at = s ? map_at(m, s, MAP_GRADIENTS) : MAP_NONE;
    return at == MAP_NONE ? NULL : (float*)grads + at;
}

static double root_mean_square(const float* x, size_t n) {
    double squares = 0;
    for (size_t i = 0; i < n; i++) {
        squares += (double)x[i] * (double)x[i];
    }
    return sqrt(squares / (double)n);
}

// Decays and steps of the delta rule are one number a head: the sum of a gradient over all tokens,
// whose terms may cancel. Returns the part of copy k's norm in what such a sum has without signs,
// and its roundings with it: each element of mixba's gradient is the same sum with factors of about
// 1. Of other rows: 1.
static double gradient_left(const Model* model, int i, int k, const void* grads) {
    enum {
        WHOLE = offsetof(ModelParameters, mixbaw) / sizeof(floatX*),
        DECAY = offsetof(ModelParameters, mixdecay) / sizeof(floatX*),
        STEP = offsetof(ModelParameters, mixstep) / sizeof(floatX*)
    };
    if (i != DECAY && i != STEP) {
        return 1;
    }
    const double own = root_mean_square(gradient_of_copy(model, i, k, grads),
                                        tensor_layer_elements(&model->map.rows[i])),
                 all = root_mean_square(gradient_of_copy(model, WHOLE, k, grads),
                                        tensor_layer_elements(&model->map.rows[WHOLE]));
    return own < all ? own / all : 1;
}

// The error of row i of gradients, which a model has if the row is trained: the largest of its
// copies.
static double gradient_error(const Model* model, int i, const void* a, const void* b) {
    const TensorRow* row = &model->map.rows[i];
    double largest = 0;
    for (int k = 0; k < row->layers && !tensor_is_in(model->freeze.rows, i); k++) {
        const float* want = gradient_of_copy(model, i, k, b);
        const double error = gradient_left(model, i, k, b) * relative_error(gradient_of_copy(model, i, k, a),
                                                                            want, tensor_layer_elements(row));
        largest = error <= largest ? largest : error; // NaN, too
    }
    return largest;
}

// fp32 rounds each operation by 6e-8; a gradient passes through some hundred sums of up to a
// hundred terms.
TEST(composition_against_pytorch) {
    Model model;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const int N = s.B * s.T, V = model.cfg.V;
    EXPECT(model_classifier_chunk(model.cfg, (size_t)N) < (size_t)N / 2, "too few chunks for a test");
    model_forward(&model, batch_of(&s));
    const Pass read = batch_pass(&model, batch_of(&s));
    const LmHead head = lm_head(&model, &read);
    for (int n = 0; n < N; n++) {
        lm_head_logits_cpu(&head, n, 1);
        EXPECT_NEAR(relative_error(model.acts.logits, s.logits + (size_t)n * V, V), 0, 2e-6,
                    "logits of token %d", n);
    }
    EXPECT_NEAR(loss_of(&model, &s), s.loss, 1e-6 * s.loss, "loss without gradients");
    EXPECT_NEAR(pass(&model, &s), s.loss, 1e-6 * s.loss, "loss");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.parameter_rows[i];
        EXPECT_NEAR(tensor_error(row, model.grads_memory, s.grads), 0, 5e-6, "gradient of %s", row->name);
    }
    fixture_close(&s);
    model_close(&model);
}

// reference.h with the same sizes and parameters.
static void reference_of(RefModel* reference, const Model* model, int B, int T) {
    ref_model_open(reference, model->cfg, (size_t)B, (size_t)T);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        for (size_t j = 0; j < tensor_elements(row); j++) {
            *(Real*)test_element(&reference->rows[i], reference->params, j) =
                *element(row, model->params_memory, j);
        }
    }
}

// `grads` as the model's gradients are laid out; `what` they are.
static void expect_reference_gradients(const RefModel* reference, const Model* model, void* grads,
                                       double tolerance, const char* what) {
    float* want = check_alloc(model->parameter_bytes, 1, "gradient");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->map.rows[i];
        const size_t elements = tensor_layer_elements(row);
        for (size_t j = 0; j < tensor_elements(row) && !tensor_is_in(model->freeze.rows, i); j++) {
            gradient_of_copy(model, i, (int)(j / elements), want)[j % elements] =
                (float)*(Real*)test_element(&reference->rows[i], reference->grads, j);
        }
        EXPECT_NEAR(gradient_error(model, i, grads, want), 0, tolerance,
                    "gradient of %s, %s and the reference", row->name, what);
    }
    free(want);
}

// PyTorch computed in double and stored fp32: half an epsilon.
TEST(pytorch_against_reference) {
    Model model;
    RefModel reference;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    reference_of(&reference, &model, s.B, s.T);
    const double loss = ref_model_forward(&reference, s.x, s.y, NULL);
    ref_model_backward(&reference, s.x, s.y, NULL);
    EXPECT_NEAR(s.loss, loss, 6e-8 * loss, "PyTorch's loss");
    expect_reference_gradients(&reference, &model, s.grads, 6e-8, "PyTorch");
    ref_model_close(&reference);
    fixture_close(&s);
    model_close(&model);
}

// ---- all architectures ----

// Every kind of operation, with sizes that divide by nothing: 4 queries share a key, or 2, or none;
// heads together wider or narrower than the channels; windows of one token, of some, of all.
static const struct {
    const char* name;
    ModelConfig cfg;
} ARCHS[] = {
    {"gpt2", {17, 131, 201, 3, 3, 33, SHARE_OFF}},
    {"llama", {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_LLAMA, .KV = 1, .HS = 10, .F = 41, .has_head = 1}},
    {"llama, tied",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_LLAMA, .F = 20, .scaling = {ROPE_LLAMA3, 8, 1, 4, 8}}},
    {"mistral",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_MISTRAL, .KV = 2, .F = 41, .window = 5, .windows = {3}}},
    {"qwen2", {17, 131, 201, 2, 6, 24, SHARE_OFF, ARCH_QWEN2, .KV = 2, .F = 41, .rope_base = 1e6f}},
    {"qwen3",
     {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_QWEN3, .KV = 2, .HS = 8, .F = 41, .window = 4, .windows = {5},
      .norm_eps = 1e-6f}},
    {"arcee", {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_ARCEE, .KV = 4, .F = 41, .window = 1, .windows = {2}}},
    {"nanochat",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_NANOCHAT, .KV = 2, .F = 41, .has_head = 1, .softcap = 15}},
    {"nanochat, tied", {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_NANOCHAT, .F = 41}},
    {"llama, scales",
     {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_LLAMA, .KV = 2, .HS = 10, .F = 41, .has_scales = 1}},
    {"nanochat, value embeddings",
     {17, 131, 201, 3, 4, 36, SHARE_OFF, ARCH_NANOCHAT, .KV = 2, .HS = 10, .F = 41, .has_head = 1,
      .has_scales = 1, .has_values = 1}},
    {"mixtral",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_MIXTRAL, .KV = 2, .F = 41, .E = 4, .E_used = 2, .window = 5,
      .windows = {3}}},
    {"mixtral, one expert",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_MIXTRAL, .KV = 2, .F = 20, .E = 1, .E_used = 1}},
    {"qwen3moe",
     {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_QWEN3MOE, .KV = 2, .HS = 8, .F = 20, .E = 5, .E_used = 1}},
    {"olmoe",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_OLMOE, .KV = 2, .HS = 8, .F = 20, .has_head = 1, .E = 16,
      .E_used = 3}},
    {"glm4moe",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_GLM4MOE, .KV = 2, .HS = 8, .F = 20, .E = 4, .E_used = 2,
      .Fs = 30, .router_factor = 1.5f, .rope_dims = 4}},
    {"glm4moe, dense layers",
     {17, 131, 201, 4, 4, 24, SHARE_OFF, ARCH_GLM4MOE, .KV = 2, .HS = 8, .F = 41, .E = 4, .E_used = 2,
      .dense_layers = 2, .Fe = 20, .Fs = 30, .router_factor = 1.5f, .rope_dims = 4}},
    {"llama, a layer without positions",
     {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_LLAMA, .KV = 2, .F = 41, .unrotated = {2}}},
    {"qwen3, positions by window",
     {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_QWEN3, .KV = 2, .F = 41, .window = 5, .windows = {5},
      .scaling = {ROPE_YARN, 4, 1, 2, 16, 1.25f}, .window_rope_base = 100}},
    {"llama, longrope",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_LLAMA, .KV = 2, .F = 41,
      .scaling = {ROPE_LONG, 4, 0, 0, 8, 1.5f},
      .rope_factors = {{1, 2, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
                       {4, 5, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}}}},
    {"olmo2", {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_OLMO2, .KV = 2, .HS = 8, .F = 41, .has_head = 1}},
    {"gemma2",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_GEMMA2, .KV = 2, .HS = 10, .F = 41, .window = 5, .windows = {1},
      .softcap = 20, .attention_scale = 0.25f, .attention_softcap = 9}},
    // layers with a mixer
    {"qwen35",
     {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_QWEN35, .KV = 2, .HS = 8, .F = 41, .rope_dims = 4,
      .mixer = {4, 1, 2, 32, 16}, .mixed = {2}}},
    {"lfm2", {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_LFM2, .KV = 2, .F = 41, .mixer = {3}, .mixed = {3}}},
    {"granite",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_GRANITE, .KV = 1, .F = 41, .attention_scale = 0.2f,
      .embedding_factor = 3, .residual_factor = 0.22f, .logits_divisor = 1.5f}},
    {"smollm3",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_SMOLLM3, .KV = 2, .F = 41, .window = 5, .windows = {2},
      .unrotated = {2}}},
    {"olmo3",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_OLMO3, .KV = 2, .HS = 8, .F = 41, .has_head = 1, .window = 5,
      .windows = {1}, .scaling = {ROPE_YARN, 4, 1, 2, 16, 1.25f}, .window_rope_base = 100}},
    {"exaone4",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_EXAONE4, .KV = 2, .HS = 8, .F = 41, .window = 5, .windows = {1},
      .unrotated = {2}}},
    {"granite4",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_GRANITE4, .KV = 2, .F = 41, .attention_scale = 0.2f,
      .embedding_factor = 3, .residual_factor = 0.22f, .logits_divisor = 1.5f, .unrotated = {3}}},
    {"gemma3",
     {17, 131, 201, 3, 4, 24, SHARE_OFF, ARCH_GEMMA3, .KV = 2, .HS = 10, .F = 41, .window = 5, .windows = {5},
      .attention_scale = 0.25f, .scaling = {ROPE_LINEAR, 8}, .window_rope_base = 100}},
    {"phi3",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_PHI3, .KV = 2, .HS = 8, .F = 41, .has_head = 1, .window = 7,
      .windows = {3}, .rope_dims = 6}},
    {"glm4",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_GLM4, .KV = 2, .HS = 8, .F = 41, .has_head = 1,
      .rope_dims = 4}},
    {"gptoss",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_GPTOSS, .KV = 2, .HS = 8, .F = 20, .has_head = 1, .E = 5,
      .E_used = 2, .window = 5, .windows = {1}, .scaling = {ROPE_YARN, 4, 1, 2, 16, 1.25f, 1}}},
    // latents of queries and of keys, with values narrower than heads; and as narrow as can be
    {"deepseek3",
     {17,
      131,
      201,
      3,
      4,
      24,
      SHARE_OFF,
      ARCH_DEEPSEEK3,
      .HS = 10,
      .F = 41,
      .has_head = 1,
      .E = 4,
      .E_used = 2,
      .dense_layers = 1,
      .Fe = 20,
      .Fs = 30,
      .router_factor = 1.5f,
      .attention_scale = 0.3f,
      .rope_dims = 4,
      .latent = {14, 6, 5}}},
    {"deepseek3, plain queries",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_DEEPSEEK3, .HS = 6, .F = 20, .E = 4, .E_used = 2,
      .rope_dims = 2, .latent = {0, 9, 6}}},
    {"gemma2, layers shared",
     {17, 131, 201, 4, 4, 24, SHARE_PAIRS, ARCH_GEMMA2, .KV = 2, .F = 41, .residual_factor = 0.5f}},
    {"qwen2, capped scores",
     {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_QWEN2, .KV = 2, .HS = 8, .F = 41, .window = 5, .windows = {1},
      .attention_scale = 0.3f, .attention_softcap = 1}},
    {"llama, layers shared",
     {17, 131, 201, 4, 4, 24, SHARE_LOOP + 2, ARCH_LLAMA, .KV = 2, .F = 41, .has_head = 1}},
};
enum { ARCH_CASES = sizeof(ARCHS) / sizeof(ARCHS[0]), ARCH_T = 13, ARCH_N = 2 * ARCH_T };

// Returns a model of this kind in whole tiles of 32, for matmuls in bf16. A token takes all
// experts: with other roundings it could take others.
static ModelConfig arch_in_tiles(ModelConfig cfg) {
    cfg.E_used = cfg.E;
    cfg.max_T = 32, cfg.C = 64, cfg.NH = 4, cfg.HS = cfg.arch == ARCH_GPT2 ? 0 : 32;
    cfg.KV = cfg.KV > 0 ? 2 : 0, cfg.F = cfg.arch == ARCH_GPT2 ? 0 : 96, cfg.Fe = cfg.Fe > 0 ? 64 : 0;
    if (model_has_latent(cfg)) {
        cfg.latent.query_rank = cfg.latent.query_rank > 0 ? 64 : 0, cfg.latent.rank = 32,
        cfg.latent.value = 24;
    }
    return cfg;
}

// Sets all parameters: scales of the stream are about 1, since norms of a small stream are steep.
static void set_weights(Model* model, uint64_t stream) {
    for (size_t i = 0; i < model->parameter_bytes / sizeof(float); i++) {
        ((float*)model->params_memory)[i] = 0.3f * rand_normal(1, stream, i);
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        for (int k = 0; k < row->layers && row->init == INIT_SCALES; k++) {
            *(float*)tensor_at_layer(row, model->params_memory, k) += 1;
        }
    }
    linear_pack(&model->linear);
}

static void open_arch(Model* model, ModelConfig cfg, int T, int recompute, MatmulPrecision matmul) {
    const Options options = {.batch.size = 2,
                             .batch.seq_len = T,
                             .batch.steps = 1,
                             .memory.recompute = recompute,
                             .memory.matmul = matmul,
                             .optimizer.z_loss = 1e-2f};
    open_alone(model, cfg, &options, USE_TRAIN);
    set_weights(model, 1);
    model->router_losses = (RouterLosses){0.25f, 0.125f, 0};
}

typedef struct {
    int tokens[2 * 32], targets[2 * 32], starts[2 * 32], lengths[2];
    Batch batch;
} ArchBatch;

// Two sequences with documents, with targets that do not count, and with padding.
static void arch_batch(ArchBatch* b, int V, int T) {
    Rand rng = rand_open(1, 2);
    int counted = 0;
    b->lengths[0] = T;
    b->lengths[1] = T - 3;
    for (int n = 0; n < 2 * T; n++) {
        const int is_padding = n >= 2 * T - 3;
        b->tokens[n] = (int)rand_below(&rng, (uint32_t)V);
        b->targets[n] = n % 7 == 3 || is_padding ? NO_TARGET : (int)rand_below(&rng, (uint32_t)V);
        b->starts[n] = n < T ? n / 5 * 5 : is_padding ? n - T : 0;
        counted += b->targets[n] != NO_TARGET;
    }
    b->batch = (Batch){b->tokens, b->targets, b->starts, 2, T, counted};
    b->batch.lengths = b->lengths;
    b->batch.update = (RowCounts){2 * T - 3, counted};
}

static double arch_pass(Model* model, const ArchBatch* b) {
    model_forward(model, b->batch);
    model_backward(model, b->batch, 1.0f / (float)b->batch.counted, GRADIENT_SET, only, NULL);
    return batch_loss(model, b->batch) / b->batch.counted;
}

// Every architecture has a case, so every place of norms, and every kind of an operation.
TEST(composition_has_all_archs) {
    for (int arch = 0; arch < ARCH_COUNT; arch++) {
        int cases = 0;
        for (int i = 0; i < ARCH_CASES; i++) {
            cases += (int)ARCHS[i].cfg.arch == arch;
        }
        EXPECT(cases > 0, "no case of %s", model_architecture((Arch)arch)->word);
    }
}

// Positions that are not in use, documents, targets that do not count.
TEST(composition_against_reference) {
    for (int i = 0; i < ARCH_CASES; i++) {
        Model model;
        RefModel reference;
        ArchBatch b;
        if (ARCHS[i].cfg.share != SHARE_OFF) {
            continue; // the reference has every layer
        }
        open_arch(&model, ARCHS[i].cfg, ARCH_T, RECOMPUTE_NONE, MATMUL_FP32);
        arch_batch(&b, model.cfg.V, ARCH_T);
        reference_of(&reference, &model, 2, ARCH_T);
        reference.z_loss = 1e-2f;
        reference.router_balance = 0.25, reference.router_z = 0.125;
        reference.lengths = b.lengths;
        arch_pass(&model, &b); // the second pass sets the gradients anew
        const double got = arch_pass(&model, &b),
                     loss = ref_model_forward(&reference, b.tokens, b.targets, b.starts);
        ref_model_backward(&reference, b.tokens, b.targets, b.starts);
        EXPECT_NEAR(got, loss, 1e-6 * loss, "%s: loss and the reference's", ARCHS[i].name);
        // The delta rule carries roundings from token to token.
        expect_reference_gradients(&reference, &model, model.grads_memory,
                                   model_mixer(model.cfg) == MIXER_DELTA ? 1e-5 : 5e-6, ARCHS[i].name);
        ref_model_close(&reference);
        model_close(&model);
    }
}

// With matmuls in bf16, packed in tiles or not, gradients are as far from those of fp32 as rounded
// factors allow: they pass through some ten matmuls, each with factors rounded by 2^-9. The delta
// rule has four more, divides short queries and keys by their lengths, and carries errors from
// token to token: of models of eight seeds the worst was 0.22. The gradient of a scale is a sum
// over the whole stream that nearly cancels, since the norm behind it forgets lengths.
static double bf16_tolerance(ModelConfig cfg, const TensorRow* row) {
    return model_mixer(cfg) == MIXER_DELTA || row->init == INIT_SCALES ? 0.25 : 0.05;
}

TEST(composition_archs_bf16) {
    for (int i = 0; i < 2 * ARCH_CASES; i++) {
        const char* name = ARCHS[i / 2].name;
        const int T = i % 2 ? 32 : ARCH_T;
        const ModelConfig cfg = i % 2 ? arch_in_tiles(ARCHS[i / 2].cfg) : ARCHS[i / 2].cfg;
        if (cfg.E > 0 && !mlp_bf16_fits(ROUTER_TILE, (size_t)cfg.F)) {
            continue; // refused
        }
        Model model, exact;
        ArchBatch b;
        arch_batch(&b, cfg.V, T);
        open_arch(&model, cfg, T, RECOMPUTE_NONE, MATMUL_BF16);
        open_arch(&exact, cfg, T, RECOMPUTE_NONE, MATMUL_FP32);
        const double loss = arch_pass(&exact, &b);
        EXPECT_NEAR(arch_pass(&model, &b), loss, 5e-3 * loss, "%s: loss", name);
        for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
            const TensorRow* row = &model.parameter_rows[r];
            EXPECT_NEAR(gradient_error(&model, r, model.grads_memory, exact.grads_memory), 0,
                        bf16_tolerance(cfg, row), "%s, T %d: gradient of %s", name, T, row->name);
        }
        model_close(&exact);
        model_close(&model);
    }
}

// All levels of recomputation, and any number of threads, give the same bits.
TEST(settings_archs_same_bits) {
    for (int i = 0; i < 3 * ARCH_CASES; i++) {
        static const MatmulPrecision precisions[] = {MATMUL_FP32, MATMUL_BF16, MATMUL_FP8};
        const MatmulPrecision matmul = precisions[i % 3];
        const int in_tiles = matmul == MATMUL_BF16, threads = threads_max(), T = in_tiles ? 32 : ARCH_T;
        const ModelConfig cfg = in_tiles ? arch_in_tiles(ARCHS[i / 3].cfg) : ARCHS[i / 3].cfg;
        Model model;
        ArchBatch b;
        arch_batch(&b, cfg.V, T);
        open_arch(&model, cfg, T, RECOMPUTE_NONE, matmul);
        const double loss = arch_pass(&model, &b);
        for (int level = RECOMPUTE_ACTIVATION; level <= RECOMPUTE_BLOCK; level++) {
            Model other;
            threads_set(1 + level % 3);
            open_arch(&other, cfg, T, level, matmul);
            EXPECT(arch_pass(&other, &b) == loss &&
                       memcmp(other.grads_memory, model.grads_memory, model.gradient_bytes) == 0,
                   "%s, matmuls %d: recompute level %d, %d threads", ARCHS[i / 3].name, (int)matmul, level,
                   threads_max());
            model_close(&other);
        }
        threads_set(threads);
        model_close(&model);
    }
}

// Tokens read one by one, with cached keys and values, have the logits of one pass over all. With
// longrope, the sequence is read again where it leaves the original context.
TEST(composition_archs_decode) {
    for (int i = 0; i < ARCH_CASES; i++) {
        Model model;
        ArchBatch b;
        const int V = ARCHS[i].cfg.V;
        const Options options = {.batch.size = 2, .batch.seq_len = ARCH_T, .memory.matmul = MATMUL_FP32};
        float* whole = check_alloc((size_t)V, sizeof(float), "logits");
        arch_batch(&b, V, ARCH_T);
        open_alone(&model, ARCHS[i].cfg, &options, USE_GENERATE);
        for (size_t k = 0; k < model.parameter_bytes / sizeof(float); k++) {
            ((float*)model.params_memory)[k] = 0.3f * rand_normal(1, 1, k);
        }
        memcpy(whole, model_prefill(&model, 0, b.tokens, ARCH_T), (size_t)V * sizeof(float));
        model_prefill(&model, 0, b.tokens, 3);
        for (int t = 3; t < ARCH_T; t++) {
            const int rereads = t == attention_config_rereads_at(model.cfg);
            const float* logits = rereads ? model_prefill(&model, 0, b.tokens, t + 1)
                                          : model_decode(&model, b.tokens + t, &t, 1);
            EXPECT(t < ARCH_T - 1 || relative_error(logits, whole, (size_t)V) < 2e-6, "%s: logits",
                   ARCHS[i].name);
        }
        free(whole);
        model_close(&model);
    }
}

// A bias of the keys shifts all scores of a query alike: its gradient is rounding noise, which
// AdamW turns into whole steps.
static int is_key_bias(const TensorRow* row, size_t i, int C) {
    return strcmp(row->name, "qkvb") == 0 && i % (3 * (size_t)C) / (size_t)C == 1;
}

// The steps of AdamW on a batch, whose losses and norms are in a file; returns their number.
static int adamw_steps(Model* model, const State* s, const char* path, double loss_error, double norm_error) {
    FILE* file = fopen(path, "r");
    CHECK(file, "%s: cannot read", path);
    char line[256];
    int step, steps = 0;
    double loss, norm;
    const Options options = {.optimizer.lr = 1e-3f,
                             .optimizer.beta1 = 0.9f,
                             .optimizer.beta2 = 0.95f,
                             .optimizer.eps = 1e-8f,
                             .optimizer.weight_decay = 0.1f,
                             .optimizer.grad_clip = 1.0f,
                             .optimizer.schedule = SCHEDULE_CONSTANT,
                             .batch.steps = ADAMW_STEPS};
    while (fgets(line, sizeof(line), file)) {
        if (sscanf(line, "%d %lf %lf", &step, &loss, &norm) != 3) {
            continue; // the comment
        }
        EXPECT_NEAR(pass(model, s), loss, loss_error * loss, "loss at step %d", step);
        const double our_norm = gradient_norm(model);
        EXPECT_NEAR(our_norm, norm, norm_error * norm, "norm at step %d", step);
        model_update(model, setup_update(&options, step - 1, step, our_norm));
        steps++;
    }
    fclose(file);
    return steps;
}

TEST(composition_adamw_steps) {
    Model model, after;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    open_fixture(&after, FIXTURES "gpt2_tiny_adamw.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const int steps = adamw_steps(&model, &s, FIXTURES "gpt2_tiny_adamw.txt", 2e-6, 1e-5);
    EXPECT(steps == ADAMW_STEPS, "%d steps", steps);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) { // parameters moved by up to 1e-2
        const TensorRow* row = &model.parameter_rows[i];
        for (size_t j = 0; j < tensor_elements(row); j++) {
            const float ours = *element(row, model.params_memory, j),
                        theirs = *element(row, after.params_memory, j);
            if (!is_key_bias(row, j, model.cfg.C) && !(fabsf(ours - theirs) <= 3e-5f)) {
                EXPECT_NEAR(ours, theirs, 3e-5, "%s[%zu] after %d steps", row->name, j, steps);
                break;
            }
        }
    }
    fixture_close(&s);
    model_close(&after);
    model_close(&model);
}

// Checks gradients of the first step against every seventh element of PyTorch's.
static void expect_fp8_gradients(const Model* model, double tolerance) {
    const char* path = FIXTURES "fp8/gpt2_tiny_grads.bin";
    FILE* file = fopen(path, "rb");
    CHECK(file, "%s: cannot read", path);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->map.rows[i];
        const size_t of_copy = tensor_layer_elements(row), elements = tensor_elements(row),
                     count = (elements + 6) / 7;
        float *ours = check_alloc(count + 1, sizeof(float), "ours"),
              *theirs = check_alloc(count + 1, sizeof(float), "theirs");
        read_exactly(file, theirs, count * sizeof(float), path);
        for (size_t j = 0; j < elements; j += 7) {
            ours[j / 7] = gradient_of_copy(model, i, (int)(j / of_copy), model->grads_memory)[j % of_copy];
        }
        EXPECT_NEAR(relative_error(ours, theirs, count), 0, tolerance, "fp8: gradient of %s", row->name);
        free(ours);
        free(theirs);
    }
    CHECK(fgetc(file) == EOF, "%s: too long", path);
    fclose(file);
}

// Matmuls in fp8 as PyTorch has them in float64. A number that fp32 puts on the other side of the
// middle of two codes differs by a sixteenth, in one of some hundred terms; gradients without fp8
// are 2 to 11 % away. Such numbers become more with each step: in fp32, PyTorch's own losses come
// within 7e-4 and norms within 8e-3.
TEST(composition_fp8) {
    Model model;
    open_model_matmul(&model, llmc_bin_read_config(FIXTURES "gpt2_tiny.bin"), 3, 31, RECOMPUTE_NONE,
                      MATMUL_FP8);
    load_weights(&model, FIXTURES "gpt2_tiny.bin");
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    pass(&model, &s);
    expect_fp8_gradients(&model, 2e-3);
    const int steps = adamw_steps(&model, &s, FIXTURES "fp8/gpt2_tiny.txt", 2e-3, 2e-2);
    EXPECT(steps == ADAMW_STEPS + 2, "%d steps in fp8", steps);
    fixture_close(&s);
    model_close(&model);
}

// Passes that do not train are in fp32.
TEST(composition_fp8_evaluates_in_fp32) {
    Model model, exact;
    open_model_matmul(&model, llmc_bin_read_config(FIXTURES "gpt2_tiny.bin"), 3, 31, RECOMPUTE_NONE,
                      MATMUL_FP8);
    load_weights(&model, FIXTURES "gpt2_tiny.bin");
    open_fixture(&exact, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    model_forward(&exact, batch_of(&s));
    model_forward(&model, batch_of(&s));
    EXPECT(loss_of(&model, &s) != loss_of(&exact, &s), "a loss in fp8 is that in fp32");
    linear_trained(&model.linear);
    model_forward(&model, batch_of(&s));
    EXPECT(loss_of(&model, &s) == loss_of(&exact, &s), "a loss of a validation");
    fixture_close(&s);
    model_close(&exact);
    model_close(&model);
}

// Along random directions of each tensor, the loss must change as the gradient says. fp32 losses
// carry 3e-7 of noise: with a step that changes the loss by about 1e-2, a difference is good to
// some 1e-4, and the third derivative adds a little.
TEST(settings_finite_differences) {
    Model model;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    pass(&model, &s);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.parameter_rows[i];
        const size_t n = tensor_elements(row);
        if (n == 0) { // GPT-2 has no such tensor
            continue;
        }
        float* saved = check_alloc(model.parameter_bytes, 1, "saved");
        memcpy(saved, model.params_memory, model.parameter_bytes);
        double square = 0;
        for (size_t j = 0; j < n; j++) {
            square += pow(*element(row, model.grads_memory, j), 2);
        }
        const double h = 5e-3 / sqrt(square); // along the gradient: the slope is its norm
        double loss[2];
        for (int side = 0; side < 2; side++) {
            for (size_t j = 0; j < n; j++) {
                const float grad = *element(row, model.grads_memory, j);
                *element(row, model.params_memory, j) =
                    *element(row, saved, j) + (float)((side ? -h : h) * grad / sqrt(square));
            }
            model_forward(&model, batch_of(&s));
            loss[side] = loss_of(&model, &s);
        }
        memcpy(model.params_memory, saved, model.parameter_bytes);
        EXPECT_NEAR((loss[0] - loss[1]) / (2 * h) / sqrt(square), 1, 2e-3, "slope along the gradient of %s",
                    row->name);
        free(saved);
    }
    fixture_close(&s);
    model_close(&model);
}

// All levels of recomputation, and any number of threads, give the same bits.
static void test_same_bits(void (*open)(Model*, const char*, int)) {
    Model model;
    open(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const double loss = pass(&model, &s);
    for (int level = RECOMPUTE_ACTIVATION; level <= RECOMPUTE_BLOCK; level++) {
        Model other;
        open(&other, FIXTURES "gpt2_tiny.bin", level);
        EXPECT(other.activation_bytes < model.activation_bytes, "level %d", level);
        EXPECT(pass(&other, &s) == loss, "recompute level %d", level);
        EXPECT(memcmp(other.grads_memory, model.grads_memory, model.parameter_bytes) == 0,
               "recompute level %d", level);
        model_close(&other);
    }
    for (int threads = 1; threads <= 3; threads++) {
        Model other;
        threads_set(threads);
        open(&other, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
        EXPECT(pass(&other, &s) == loss, "%d threads", threads);
        EXPECT(memcmp(other.grads_memory, model.grads_memory, model.parameter_bytes) == 0, "%d threads",
               threads);
        model_close(&other);
    }
    fixture_close(&s);
    model_close(&model);
}

// Micro-batches of one sequence, added up, give the gradient of the batch; nothing of an earlier
// update is left in it.
TEST(settings_accumulation) {
    Model model, whole;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    open_fixture(&whole, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const double loss = pass(&whole, &s);
    for (int repeat = 0; repeat < 2; repeat++) {
        double sum = 0;
        for (int b = 0; b < s.B; b++) {
            const Batch one = {s.x + b * s.T, s.y + b * s.T, NULL, 1, s.T, s.T};
            model_forward(&model, one);
            model_backward(&model, one, 1.0f / (float)(s.B * s.T), b == 0 ? GRADIENT_SET : GRADIENT_ADD, only,
                           NULL);
            sum += batch_loss(&model, one) / (s.B * s.T);
        }
        EXPECT_NEAR(sum, loss, 1e-6 * loss, "accumulated loss");
        for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
            const TensorRow* row = &model.parameter_rows[i];
            EXPECT_NEAR(tensor_error(row, model.grads_memory, whole.grads_memory), 0, 2e-6,
                        "accumulated gradient of %s", row->name);
        }
    }
    fixture_close(&s);
    model_close(&whole);
    model_close(&model);
}

static int largest(const float* x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) {
        best = x[i] > x[best] ? i : best;
    }
    return best;
}

// Texts of different lengths, one token at a time over the keys and values already there: the
// logits of the whole sequence. Both in a model that trains and in one that has only weights, with
// the same bits for one text or several.
static void test_decode(void (*open)(Model*, const char*, int), double tolerance) {
    enum { TEXTS = 3, STEPS = 9 };
    const int lengths[TEXTS] = {1, 5, 12};
    Model whole, texts;
    open(&whole, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NORMS);
    open(&texts, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NEVER);
    EXPECT(!texts.grads_memory && !texts.state.memory, "generation has gradients");
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &whole);
    const int V = whole.cfg.V, Vp = whole.cfg.Vp;
    for (int b = 0; b < TEXTS; b++) {
        model_prefill(&texts, b, s.x + b * s.T, lengths[b]);
    }
    for (int step = 0; step < STEPS; step++) {
        int ids[TEXTS], positions[TEXTS];
        for (int b = 0; b < TEXTS; b++) {
            positions[b] = lengths[b] + step;
            ids[b] = s.x[b * s.T + positions[b]];
        }
        const float* logits = model_decode(&texts, ids, positions, TEXTS);
        for (int b = 0; b < TEXTS; b++) {
            const float* want = s.logits + ((size_t)b * s.T + positions[b]) * V;
            EXPECT_NEAR(relative_error(logits + (size_t)b * Vp, want, V), 0, tolerance, "text %d, step %d", b,
                        step);
            EXPECT(largest(logits + (size_t)b * Vp, V) == largest(want, V),
                   "text %d, step %d: not PyTorch's token", b, step);
        }
        const float* same = step == 0 ? model_prefill(&whole, 0, s.x, lengths[0]) : NULL;
        EXPECT(!same || relative_error(same, s.logits, V) < tolerance, "the prompt");
        const float* alone = model_decode(&whole, ids, positions, 1);
        EXPECT(memcmp(alone, logits, (size_t)V * sizeof(float)) == 0, "step %d: other bits alone", step);
    }
    fixture_close(&s);
    model_close(&whole);
    model_close(&texts);
}

static double cosine(const float* a, const float* b, size_t n) {
    double product = 0, a_square = 0, b_square = 0;
    for (size_t i = 0; i < n; i++) {
        product += (double)a[i] * b[i];
        a_square += (double)a[i] * a[i];
        b_square += (double)b[i] * b[i];
    }
    return product / sqrt(a_square * b_square);
}

// bf16 rounds a factor by 2^-8 of it at most, by 0.4 2^-8 in the mean square: a product of two by
// 0.6 2^-8 = 0.0022, and so a sum of such products with both signs. A logit comes through some ten
// matmuls one after another, each with an error of its own: 0.0022 sqrt(10) = 0.7 %; a gradient
// through twice as many: 1 %. Twice that is allowed.
TEST(composition_bf16_against_pytorch) {
    Model model, exact;
    open_bf16(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    open_fixture(&exact, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const int N = s.B * s.T, V = model.cfg.V;
    model_forward(&model, batch_of(&s));
    const Pass read = batch_pass(&model, batch_of(&s));
    const LmHead head = lm_head(&model, &read);
    for (int n = 0; n < N; n++) {
        lm_head_logits_cpu(&head, n, 1);
        EXPECT_NEAR(relative_error(model.acts.logits, s.logits + (size_t)n * V, V), 0, 0.014,
                    "bf16: logits of token %d", n);
    }
    EXPECT_NEAR(pass(&model, &s), s.loss, 1e-3 * s.loss, "bf16: loss");
    pass(&exact, &s);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.parameter_rows[i];
        EXPECT_NEAR(tensor_error(row, model.grads_memory, s.grads), 0, 0.02, "bf16: gradient of %s",
                    row->name);
        for (int l = 0; l < row->layers; l++) {
            const double same =
                cosine((float*)tensor_at_layer(row, model.grads_memory, l),
                       (float*)tensor_at_layer(row, exact.grads_memory, l), tensor_layer_elements(row));
            EXPECT(same > 0.999, "bf16: gradient of %s, layer %d: cosine %.6f with fp32's", row->name, l,
                   same);
        }
    }
    fixture_close(&s);
    model_close(&exact);
    model_close(&model);
}

// A model whose hidden layer consists of whole tiles, which only exists packed (mlp_bf16.h).
static void open_tiles(Model* model, int recompute, MatmulPrecision matmul) {
    const ModelConfig cfg = {32, 50, 64, 2, 2, 64, 0};
    open_model_matmul(model, cfg, 3, 32, recompute, matmul);
    for (size_t i = 0; i < model->parameter_bytes / sizeof(float); i++) {
        ((float*)model->params_memory)[i] = 0.15f * rand_normal(1, 2, i);
    }
    linear_pack(&model->linear);
}

// All gradients are as far from those of fp32 as rounded factors allow.
static void expect_gradients(const Model* model, const Model* exact, const char* what) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        EXPECT_NEAR(tensor_error(row, model->grads_memory, exact->grads_memory), 0, 0.02,
                    "%s: gradient of %s", what, row->name);
    }
}

// The gradients of all its parameters, set and added to, near those of fp32; at all levels of
// recomputation and with any number of threads the same bits.
static void test_tiles_against(Model* model, Model* exact, const State* s) {
    const double loss = pass(model, s);
    EXPECT_NEAR(loss, pass(exact, s), 1e-3 * loss, "whole tiles: loss");
    expect_gradients(model, exact, "whole tiles");
    for (int level = RECOMPUTE_ACTIVATION; level <= RECOMPUTE_BLOCK; level++) {
        Model other;
        const int threads = threads_max();
        threads_set(1 + level % 3);
        open_tiles(&other, level, MATMUL_BF16);
        EXPECT(pass(&other, s) == loss &&
                   memcmp(other.grads_memory, model->grads_memory, model->gradient_bytes) == 0,
               "whole tiles: recompute level %d, %d threads", level, threads_max());
        threads_set(threads);
        model_close(&other);
    }
    model_forward(model, batch_of(s));
    model_backward(model, batch_of(s), 1.0f / (float)(s->B * s->T), GRADIENT_ADD, only, NULL);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        for (size_t j = 0; j < tensor_elements(row); j++) {
            *element(row, exact->grads_memory, j) *= 2;
        }
    }
    expect_gradients(model, exact, "whole tiles, added");
}

// A shorter batch has no whole tiles, but no memory either for the GELU of all layers.
static void test_tiles_cut(Model* model, Model* exact, State s) {
    EXPECT(model->activation_bytes +
                   array_bytes((size_t)(s.B * s.T * model_hidden(model->cfg)), sizeof(float)) <=
               exact->activation_bytes,
           "whole tiles: %zu bytes of activations, %zu in fp32", model->activation_bytes,
           exact->activation_bytes);
    s.T--;
    const double loss = pass(model, &s);
    EXPECT_NEAR(loss, pass(exact, &s), 1e-3 * loss, "cut tiles: loss");
    expect_gradients(model, exact, "cut tiles");
}

// The MLP of a prefill of whole tiles is packed, and that of a shorter one is not: their hidden
// states have the same bits.
static void test_tiles_prefill(Model* model, const int* ids) {
    enum { T = 32, C = 64 };
    float cut[(T - 1) * C];
    model_prefill(model, 0, ids, T - 1);
    memcpy(cut, model->decoder.acts.lnf, sizeof(cut));
    model_prefill(model, 0, ids, T);
    EXPECT(memcmp(cut, model->decoder.acts.lnf, sizeof(cut)) == 0, "whole tiles: hidden states of a prefill");
}

TEST(composition_tiles) {
    enum { B = 3, T = 32 };
    Model model, exact;
    int x[B * T], y[B * T];
    Rand rng = rand_open(1, 3);
    for (int i = 0; i < B * T; i++) {
        x[i] = (int)rand_below(&rng, 50);
        y[i] = (int)rand_below(&rng, 50);
    }
    const State s = {B, T, x, y, NULL, 0, NULL};
    open_tiles(&model, RECOMPUTE_NONE, MATMUL_BF16);
    open_tiles(&exact, RECOMPUTE_NONE, MATMUL_FP32);
    test_tiles_against(&model, &exact, &s);
    test_tiles_cut(&model, &exact, s);
    test_tiles_prefill(&model, x);
    model_close(&exact);
    model_close(&model);
}

// An update packs the weights again: what follows is what a new model makes of the same parameters,
// bit for bit.
TEST(settings_bf16_packs_again) {
    Model model, fresh;
    open_bf16(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    open_bf16(&fresh, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const Options options = {.optimizer.lr = 1e-2f,
                             .optimizer.beta1 = 0.9f,
                             .optimizer.beta2 = 0.95f,
                             .optimizer.eps = 1e-8f,
                             .batch.steps = 1};
    const double before = pass(&model, &s);
    model_update(&model, setup_update(&options, 0, 1, gradient_norm(&model)));
    memcpy(fresh.params_memory, model.params_memory, model.parameter_bytes);
    linear_pack(&fresh.linear);
    const double after = pass(&model, &s);
    EXPECT(after < 0.99 * before, "loss %g, then %g", before, after);
    EXPECT(pass(&fresh, &s) == after, "loss with new copies");
    EXPECT(memcmp(fresh.grads_memory, model.grads_memory, model.parameter_bytes) == 0,
           "gradients with new copies");
    fixture_close(&s);
    model_close(&fresh);
    model_close(&model);
}

// The sum of losses of a batch, and all gradients for 1 / loss_tokens of it.
static double batch_gradients(Model* model, Batch batch, double loss_tokens, GradientMode mode) {
    model_forward(model, batch);
    model_backward(model, batch, (float)(1 / loss_tokens), mode, only, NULL);
    return batch_loss(model, batch);
}

// Two documents in a row with padding behind them are what they are alone, in a model that does not
// look at positions. Their lengths are shorter than what the models were opened for.
static void test_documents(int recompute) {
    enum { FIRST = 12, SECOND = 15, BOTH = FIRST + SECOND, PADDING = 3 };
    Model row, single;
    open_fixture(&row, FIXTURES "gpt2_tiny.bin", recompute);
    open_fixture(&single, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &row);
    const int C = row.cfg.C;
    for (int t = 1; t < row.cfg.max_T; t++) {
        memcpy(row.params.wpe + (size_t)t * C, row.params.wpe, (size_t)C * sizeof(float));
    }
    memcpy(single.params_memory, row.params_memory, row.parameter_bytes);
    int starts[BOTH + PADDING], targets[BOTH + PADDING];
    for (int t = 0; t < BOTH + PADDING; t++) {
        starts[t] = t < FIRST ? 0 : t < BOTH ? FIRST : t;
        targets[t] = t < BOTH ? s.y[t] : NO_TARGET;
    }
    const Batch packed = {s.x, targets, starts, 1, BOTH + PADDING, BOTH},
                first = {s.x, s.y, NULL, 1, FIRST, FIRST},
                second = {s.x + FIRST, s.y + FIRST, NULL, 1, SECOND, SECOND};
    const double sum = batch_gradients(&row, packed, BOTH, GRADIENT_SET);
    EXPECT_NEAR(sum, losses_of(&row, packed), 0, "loss without gradients");
    double want = batch_gradients(&single, first, BOTH, GRADIENT_SET);
    EXPECT_NEAR(relative_error(row.acts.losses, single.acts.losses, FIRST), 0, 2e-6, "first document");
    want += batch_gradients(&single, second, BOTH, GRADIENT_ADD);
    EXPECT_NEAR(relative_error(row.acts.losses + FIRST, single.acts.losses, SECOND), 0, 2e-6,
                "second document");
    EXPECT_NEAR(sum, want, 2e-6 * want, "sum of the losses");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* r = &row.parameter_rows[i];
        if (strcmp(r->name, "wpe") != 0) { // the same gradient, but at other positions
            EXPECT_NEAR(tensor_error(r, row.grads_memory, single.grads_memory), 0, 5e-6,
                        "gradient of %s, recompute %d", r->name, recompute);
        }
    }
    fixture_close(&s);
    model_close(&single);
    model_close(&row);
}

// A batch that is shorter than those the model was opened for, and whose own chunks would be
// longer.
TEST(composition_shorter_batch) {
    Model model, exact;
    const ModelConfig cfg = llmc_bin_read_config(FIXTURES "gpt2_tiny.bin");
    const int max = MODEL_CHUNK_LOGITS / cfg.Vp + 1;
    open_model(&model, cfg, 1, max + 1, RECOMPUTE_NONE);
    open_model(&exact, cfg, 1, max, RECOMPUTE_NONE);
    load_weights(&model, FIXTURES "gpt2_tiny.bin");
    memcpy(exact.params_memory, model.params_memory, model.parameter_bytes);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    EXPECT(model.chunk < exact.chunk, "%d tokens", model.chunk);
    const Batch batch = {s.x, s.y, NULL, 1, max, max};
    const double want = batch_gradients(&exact, batch, max, GRADIENT_SET);
    EXPECT_NEAR(batch_gradients(&model, batch, max, GRADIENT_SET), want, 2e-6 * want, "loss");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.parameter_rows[i];
        EXPECT_NEAR(tensor_error(row, model.grads_memory, exact.grads_memory), 0, 2e-6, "gradient of %s",
                    row->name);
    }
    fixture_close(&s);
    model_close(&exact);
    model_close(&model);
}

// Sets the next range of all buckets; start with zeros.
static int next_range(const Model* model, MapRange* range) {
    const Map* m = &model->map;
    int b = range->shard ? range->shard->bucket : 0;
    while (b < m->num_buckets && !map_next_range(m, &m->buckets[b], MAP_OWNED, range)) {
        b++;
    }
    return b < m->num_buckets;
}

// The range of the same tensor.
static MapRange same_range(const Model* model, const MapRange* range) {
    return map_range(&model->map, range->shard->tensor, range->shard->layer, MAP_OWNED);
}

static int is_frozen_range(const Model* model, const MapRange* range) {
    return freeze_has(&model->freeze, range->shard->tensor, int_max(range->shard->layer, 0));
}

// The reduced gradient of a range has the bits of the whole model's, or is zero; what is frozen in
// all blocks, and frozen blocks that come first, have none. Adds up its squares.
static void expect_range(Model* model, const Model* whole, const MapRange* range, const char* list,
                         double* square_sum) {
    const int is_frozen = is_frozen_range(model, range);
    const char* name = model->map.rows[range->shard->tensor].name;
    if (!map_has(&model->map, range->shard, map_update_space(&model->map))) {
        EXPECT(is_frozen, "%s: no gradient of %s", list, name);
        return;
    }
    const MapRange same = same_range(whole, range);
    const float* got = zero_range_gradient_cpu(&model->zero, range);
    const float* want = zero_range_gradient_cpu(&whole->zero, &same);
    size_t different = 0;
    for (size_t i = 0; i < range->count; i++) {
        different += got[i] != (is_frozen ? 0 : want[i]);
        *square_sum += (double)got[i] * got[i];
    }
    EXPECT(different == 0, "%s: %zu elements of %s, layer %d", list, different, name, range->shard->layer);
}

// An update leaves frozen parameters as they are, and changes every other tensor.
static void expect_update(Model* model, const Model* whole, const char* list) {
    const Update update = {0.1f,      0.9f, 0.95f,           1e-8f, 0.1f, 1.0f,         1,
                           DECAY_ALL, 0.9f, ADAFACTOR_FIXED, 0,     0,    MUON_SPECTRAL};
    MapRange range = {NULL, 0, 0, 0};
    model_update(model, update);
    while (next_range(model, &range)) {
        const MapRange same = same_range(whole, &range);
        const int is_same =
            memcmp(zero_range_params_cpu(&model->zero, &range), zero_range_params_cpu(&whole->zero, &same),
                   range.count * sizeof(float)) == 0;
        EXPECT(is_same == is_frozen_range(model, &range), "%s, %s: %s, layer %d", list,
               optimizer_word(model->state.optimizer.name), model->map.rows[range.shard->tensor].name,
               range.shard->layer);
    }
}

static void open_frozen(Model* model, const char* list, Options options) {
    const ModelConfig cfg = llmc_bin_read_config(FIXTURES "gpt2_tiny.bin");
    options.batch.size = 3;
    options.batch.seq_len = 31;
    options.batch.steps = 1;
    options.optimizer.freeze = list;
    options.optimizer.embedding_lr_scale = options.optimizer.vector_lr_scale = 1;
    options.optimizer.sgd_momentum = 0.9f;
    open_alone(model, cfg, &options, USE_TRAIN);
    load_weights(model, FIXTURES "gpt2_tiny.bin");
}

// Adds up the gradients of two micro-batches.
static void accumulate(Model* model, const State* s) {
    for (int micro = 0; micro < 2; micro++) {
        const MicroStep step = {micro, 1, 1, micro == 1};
        const int adds = micro > 0 && model->map.of.stage < 2;
        model_forward(model, batch_of(s));
        model_backward(model, batch_of(s), 0.01f, adds ? GRADIENT_ADD : GRADIENT_SET, step, NULL);
    }
}

// Gradients of what is trained are those of the whole model; the norm sees no others.
static void test_freeze(const char* list, Options options) {
    Model model, whole;
    open_frozen(&model, list, options);
    open_frozen(&whole, "", options);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &whole);
    double square_sum = 0;
    accumulate(&model, &s);
    accumulate(&whole, &s);
    for (MapRange range = {NULL, 0, 0, 0}; next_range(&model, &range);) {
        expect_range(&model, &whole, &range, list, &square_sum);
    }
    EXPECT_NEAR(gradient_norm(&model), sqrt(square_sum), 1e-6 * sqrt(square_sum), "%s: norm", list);
    expect_update(&model, &whole, list);
    fixture_close(&s);
    model_close(&model);
    model_close(&whole);
}

// The backward pass does not come to a block below which all is frozen: a NaN there is not read.
TEST(composition_backward_ends) {
    Model model;
    open_frozen(&model, "embeddings,blocks[0]", (Options){.memory.recompute = RECOMPUTE_NONE});
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    model_forward(&model, batch_of(&s));
    model_parameters_at_layer(model.params, model.parameter_rows, 0).fcprojw[0] = NAN;
    model_backward(&model, batch_of(&s), 1, GRADIENT_SET, only, NULL);
    EXPECT(isfinite(model.acts.dresidual[0]), "the pass came to block 0");
    fixture_close(&s);
    model_close(&model);
}

// ---- experts ----

// Returns row i of a model, or if it has none, the row of the same matrix of its single expert.
static const TensorRow* row_or_expert(const TensorRow* rows, int i) {
    char name[32];
    snprintf(name, sizeof(name), "e%s", rows[i].name);
    const int is_mlp = strcmp(name, "efcw") == 0 || strcmp(name, "efcprojw") == 0;
    return is_mlp && tensor_is_absent(&rows[i]) ? row_called(rows, MODEL_PARAMETER_ROWS, name) : &rows[i];
}

// Copies the tensors that both models have, from one to the other.
static void copy_parameters(Model* to, const Model* from) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow *row = row_or_expert(to->parameter_rows, i), *other = &from->parameter_rows[i];
        for (int l = 0; l < row->layers && other->layers == row->layers; l++) {
            memcpy(tensor_at_layer(row, to->params_memory, l), tensor_at_layer(other, from->params_memory, l),
                   tensor_layer_elements(row) * sizeof(float));
        }
    }
    linear_pack(&to->linear);
}

// A single expert is a dense MLP, bit for bit.
static void test_single_expert(MatmulPrecision matmul) {
    const ModelConfig dense = {32, 131, 201, 2, 2, 64, SHARE_OFF, ARCH_LLAMA, .F = 96};
    ModelConfig cfg = dense;
    Model model, expert;
    ArchBatch b;
    cfg.arch = ARCH_MIXTRAL, cfg.E = cfg.E_used = 1;
    arch_batch(&b, cfg.V, 32);
    open_arch(&model, dense, 32, RECOMPUTE_NONE, matmul);
    open_arch(&expert, cfg, 32, RECOMPUTE_NONE, matmul);
    copy_parameters(&expert, &model);
    expert.router_losses = (RouterLosses){0.25f, 0, 0}; // 0 for one expert
    EXPECT(arch_pass(&model, &b) == arch_pass(&expert, &b), "loss, matmuls %d", (int)matmul);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.map.rows[i];
        const int other = (int)(row_or_expert(expert.map.rows, i) - expert.map.rows);
        for (int l = 0; l < row->layers; l++) {
            EXPECT(memcmp(gradient_of_copy(&model, i, l, model.grads_memory),
                          gradient_of_copy(&expert, other, l, expert.grads_memory),
                          tensor_layer_elements(row) * sizeof(float)) == 0,
                   "gradient of %s, layer %d, matmuls %d", row->name, l, (int)matmul);
        }
    }
    model_close(&expert);
    model_close(&model);
}

TEST(composition_single_expert) {
    test_single_expert(MATMUL_FP32);
    test_single_expert(MATMUL_BF16);
}

// Sets the MLP of a dense model to experts that all have the weight 1 / E.
static void join_experts(Model* dense, const Model* experts, int l) {
    const int E = experts->cfg.E, F = experts->cfg.F, C = experts->cfg.C;
    const ModelParameters to = model_parameters_at_layer(dense->params, dense->parameter_rows, l),
                          from = model_parameters_at_layer(experts->params, experts->parameter_rows, l);
    for (int e = 0; e < E; e++) {
        for (int g = 0; g < 2; g++) {
            memcpy(to.fcw + (g * E + e) * F * C, from.efcw + (e * 2 + g) * F * C,
                   (size_t)(F * C) * sizeof(float));
        }
        for (int i = 0; i < C * F; i++) {
            to.fcprojw[i / F * E * F + e * F + i % F] = from.efcprojw[e * C * F + i] / (float)E;
        }
    }
}

// Experts that all tokens take alike are one wide MLP.
TEST(composition_equal_experts) {
    enum { E = 4, F = 20 };
    const ModelConfig cfg = {17, 131, 201, 2, 4, 24, SHARE_OFF, ARCH_MIXTRAL, .F = F, .E = E, .E_used = E};
    ModelConfig wide = cfg;
    Model experts, dense;
    ArchBatch b;
    wide.arch = ARCH_LLAMA, wide.E = wide.E_used = 0, wide.F = E * F;
    arch_batch(&b, cfg.V, ARCH_T);
    open_arch(&experts, cfg, ARCH_T, RECOMPUTE_NONE, MATMUL_FP32);
    open_arch(&dense, wide, ARCH_T, RECOMPUTE_NONE, MATMUL_FP32);
    copy_parameters(&dense, &experts);
    for (int l = 0; l < cfg.L; l++) {
        const ModelParameters p = model_parameters_at_layer(experts.params, experts.parameter_rows, l);
        memset(p.routerw, 0, (size_t)(E * cfg.C) * sizeof(float));
        join_experts(&dense, &experts, l);
    }
    experts.router_losses = (RouterLosses){0.25f, 0, 0}; // even
    const double loss = arch_pass(&dense, &b);
    EXPECT_NEAR(arch_pass(&experts, &b), loss, 1e-6 * loss, "loss");
    for (int l = 0; l < cfg.L; l++) {
        const size_t at = offsetof(ModelParameters, qkvw) / sizeof(floatX*);
        const TensorRow *row = &dense.parameter_rows[at], *other = &experts.parameter_rows[at];
        EXPECT_NEAR(relative_error(tensor_at_layer(other, experts.grads_memory, l),
                                   tensor_at_layer(row, dense.grads_memory, l), tensor_layer_elements(row)),
                    0, 5e-6, "gradient of %s", row->name);
    }
    model_close(&dense);
    model_close(&experts);
}

// Two sequences at a time or one after the other: the same update but for roundings of sums, and
// the same statistics. The balance is of each sequence.
TEST(settings_experts_micro_batches) {
    for (int i = 0; i < ARCH_CASES; i++) {
        Model model, apart;
        ArchBatch b;
        if (ARCHS[i].cfg.E == 0) {
            continue;
        }
        const int L = ARCHS[i].cfg.L, numbers = L * router_statistics(ARCHS[i].cfg.E);
        double *statistics = check_alloc((size_t)numbers, sizeof(double), "statistics"),
               *sums = check_alloc((size_t)numbers, sizeof(double), "statistics");
        arch_batch(&b, ARCHS[i].cfg.V, ARCH_T);
        open_arch(&model, ARCHS[i].cfg, ARCH_T, RECOMPUTE_NONE, MATMUL_FP32);
        open_arch(&apart, ARCHS[i].cfg, ARCH_T, RECOMPUTE_NONE, MATMUL_FP32);
        model.router_statistics = statistics, apart.router_statistics = sums;
        arch_pass(&model, &b);
        for (int k = 0; k < 2; k++) {
            Batch one = {b.tokens + k * ARCH_T, b.targets + k * ARCH_T, b.starts + k * ARCH_T, 1, ARCH_T, 0};
            one.lengths = b.lengths + k;
            one.update = b.batch.update;
            model_forward(&apart, one);
            model_backward(&apart, one, 1.0f / (float)b.batch.counted, k ? GRADIENT_ADD : GRADIENT_SET, only,
                           NULL);
        }
        for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
            EXPECT_NEAR(gradient_error(&model, r, apart.grads_memory, model.grads_memory), 0, 1e-5,
                        "%s: gradient of %s", ARCHS[i].name, model.parameter_rows[r].name);
        }
        for (int k = 0; k < numbers; k++) {
            EXPECT_NEAR(sums[k], statistics[k], 1e-6 * statistics[k], "%s: statistic %d", ARCHS[i].name, k);
        }
        const RouterSummary sum = router_summary(statistics, L, ARCHS[i].cfg.E, ARCHS[i].cfg.E_used);
        EXPECT(sum.load >= 1 && sum.entropy >= 0 && sum.entropy <= log(ARCHS[i].cfg.E) + 1e-9,
               "%s: load %g, entropy %g", ARCHS[i].name, sum.load, sum.entropy);
        free(sums);
        free(statistics);
        model_close(&apart);
        model_close(&model);
    }
}

// Opens a model that generates, with the weights of `exact`.
static void open_texts(Model* model, const Model* exact, MatmulPrecision matmul, Quantize quantize) {
    const Options options = {
        .batch.size = 2, .batch.seq_len = 32, .memory.matmul = matmul, .texts.quantize = quantize};
    open_alone(model, exact->cfg, &options, USE_GENERATE);
    for (int g = 0; g < model_groups(model->cfg) && quantize; g++) {
        const char* group =
            (const char*)exact->params_memory + tensor_group_offset_bytes(exact->parameter_rows, g);
        model_set_group(model, g, (const float*)(const void*)group);
    }
    if (!quantize) {
        copy_parameters(model, exact);
    }
}

// Prefill and steps read the matrices of the same experts, in fp32, bf16 and 8 bits. A token takes
// all experts, as roundings could change the choice.
static void test_decoded_experts(ModelConfig cfg, MatmulPrecision matmul, Quantize quantize,
                                 double tolerance) {
    enum { COUNT = 20 };
    const Options options = {.batch.size = 2, .batch.seq_len = 32, .memory.matmul = MATMUL_FP32};
    Model exact, model;
    ArchBatch b;
    arch_batch(&b, cfg.V, 32);
    open_alone(&exact, cfg, &options, USE_GENERATE);
    for (size_t k = 0; k < exact.parameter_bytes / sizeof(float); k++) {
        ((float*)exact.params_memory)[k] = 0.1f * rand_normal(1, 1, k);
    }
    open_texts(&model, &exact, matmul, quantize);
    const size_t V = (size_t)cfg.V;
    float* want = check_alloc(V, sizeof(float), "logits");
    memcpy(want, model_prefill(&exact, 0, b.tokens, COUNT), V * sizeof(float));
    EXPECT_NEAR(relative_error(model_prefill(&model, 0, b.tokens, COUNT), want, V), 0, tolerance,
                "prefill, matmuls %d, quantize %d", (int)matmul, (int)quantize);
    model_prefill(&model, 1, b.tokens, 3);
    for (int t = 3; t < COUNT; t++) { // a second text repeats one token
        const int ids[2] = {b.tokens[0], b.tokens[t]}, positions[2] = {t, t};
        const float* logits = model_decode(&model, ids, positions, 2);
        if (t == COUNT - 1) {
            EXPECT_NEAR(relative_error(logits + cfg.Vp, want, V), 0, tolerance,
                        "steps, matmuls %d, quantize %d", (int)matmul, (int)quantize);
        }
    }
    free(want);
    model_close(&model);
    model_close(&exact);
}

TEST(composition_decoded_experts) {
    for (int i = 0; i < ARCH_CASES; i++) {
        ModelConfig cfg = arch_in_tiles(ARCHS[i].cfg);
        cfg.Fs = cfg.Fs > 0 ? 64 : 0;
        if (cfg.E > 0) {
            test_decoded_experts(cfg, MATMUL_FP32, QUANTIZE_OFF, 2e-6);
            test_decoded_experts(cfg, MATMUL_BF16, QUANTIZE_OFF, 0.02);
            test_decoded_experts(cfg, MATMUL_FP32, QUANTIZE_Q8_0, 0.03);
        }
    }
}

// A frozen router, or frozen experts, leave all other gradients as they are.
static void test_frozen_experts(const char* list, MatmulPrecision matmul) {
    const ModelConfig cfg = {32,        131,          201,     2,      2,           64,
                             SHARE_OFF, ARCH_GLM4MOE, .F = 32, .E = 4, .E_used = 2, .Fs = 64};
    Options options = {.batch.size = 2,
                       .batch.seq_len = 32,
                       .batch.steps = 1,
                       .memory.matmul = matmul,
                       .optimizer.freeze = list};
    Model model, whole;
    ArchBatch b;
    double square_sum = 0;
    arch_batch(&b, cfg.V, 32);
    open_alone(&model, cfg, &options, USE_TRAIN);
    open_arch(&whole, cfg, 32, RECOMPUTE_NONE, matmul);
    copy_parameters(&model, &whole);
    model.router_losses = whole.router_losses;
    model.z_loss = whole.z_loss;
    arch_pass(&model, &b);
    arch_pass(&whole, &b);
    for (MapRange range = {NULL, 0, 0, 0}; next_range(&model, &range);) {
        expect_range(&model, &whole, &range, list, &square_sum);
    }
    model_close(&whole);
    model_close(&model);
}

TEST(freeze_experts) {
    for (MatmulPrecision matmul = MATMUL_FP32; matmul <= MATMUL_BF16; matmul++) {
        test_frozen_experts("router", matmul);
        test_frozen_experts("experts", matmul);
        test_frozen_experts("mlp", matmul);
    }
}

// ---- layers that share parameters

static const ModelConfig FOUR = {17, 131, 201, 4, 3, 33, SHARE_OFF};
enum { FOUR_B = 2, FOUR_T = 13, FOUR_N = FOUR_B * FOUR_T };

static void open_four(Model* model, const char* share, Options options) {
    ModelConfig cfg = FOUR;
    char error[ERROR_BYTES];
    CHECK(share_parse(&cfg.share, cfg.L, share, error), "%s", error);
    options.batch.size = FOUR_B;
    options.batch.seq_len = FOUR_T;
    options.batch.steps = 1;
    options.optimizer.embedding_lr_scale = options.optimizer.vector_lr_scale = 1;
    open_alone(model, cfg, &options, USE_TRAIN);
    float* params = model->params_memory;
    for (size_t i = 0; i < model->parameter_bytes / sizeof(float); i++) {
        params[i] = 0.3f * rand_normal(1, 1, i);
    }
    linear_pack(&model->linear);
}

// Opens the model with parameters of its own for each layer.
static void open_unshared(Model* whole, const Model* model, Options options) {
    open_four(whole, "off", options);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow *to = &whole->parameter_rows[i], *from = &model->parameter_rows[i];
        for (int l = 0; l < to->layers; l++) {
            memcpy(tensor_at_layer(to, whole->params_memory, l),
                   tensor_at_layer(from, model->params_memory, tensor_copy(from, l)),
                   tensor_layer_elements(to) * sizeof(float));
        }
    }
    linear_pack(&whole->linear);
}

// Two micro-batches, the second one shorter; returns the sum of the losses.
static double gradients_of_four(Model* model) {
    int tokens[FOUR_N + 1];
    double sum = 0;
    for (int n = 0; n <= FOUR_N; n++) {
        tokens[n] = n * n % FOUR.V;
    }
    for (int micro = 0; micro < 2; micro++) {
        const MicroStep step = {micro, 1, 1, micro == 1};
        const Batch batch = {tokens, tokens + 1, NULL, FOUR_B - micro, FOUR_T, FOUR_N};
        const int adds = micro > 0 && model->map.of.stage < 2;
        model_forward(model, batch);
        model_backward(model, batch, 0.1f, adds ? GRADIENT_ADD : GRADIENT_SET, step, NULL);
        sum += batch_loss(model, batch);
    }
    return sum;
}

// The gradient of a range is the sum of those of all layers that have it; only the order of
// additions may differ.
static void expect_sum(const Model* model, const Model* whole, const MapRange* range, const char* share) {
    const int tensor = range->shard->tensor;
    const TensorRow* row = &model->parameter_rows[tensor];
    const float* got = zero_range_gradient_cpu(&model->zero, range);
    double largest = 0, error = 0;
    for (size_t i = 0; i < range->count; i++) {
        double want = 0;
        for (int l = 0; l < row->uses; l++) {
            const float* layer = gradient_of_copy(whole, tensor, l, whole->grads_memory);
            want += tensor_copy(row, l) == tensor_copy(row, range->shard->layer) ? layer[i] : 0;
        }
        largest = fmax(largest, fabs(want));
        error = fabs(got[i] - want) <= error ? error : fabs(got[i] - want); // NaN, too
    }
    EXPECT(error <= 1e-6 * largest && largest > 0, "%s: gradient of %s, layer %d: %g of %g", share, row->name,
           range->shard->layer, error, largest);
}

// A model with shared layers has the bits of losses and logits of a model with equal layers, and
// the sums of its gradients; for any number of threads.
static void test_share(const char* share, Options options) {
    Model model, whole, again;
    open_four(&model, share, options);
    options.ranks.zero = 0;
    open_unshared(&whole, &model, options);
    const double loss = gradients_of_four(&model);
    EXPECT(loss == gradients_of_four(&whole), "%s: loss", share);
    for (MapRange range = {NULL, 0, 0, 0}; next_range(&model, &range);) {
        expect_sum(&model, &whole, &range, share);
    }
    const int ids[] = {5, 99, 130};
    const size_t bytes = (size_t)FOUR.V * sizeof(float);
    const float* logits = model_prefill(&model, 0, ids, 3);
    EXPECT(memcmp(logits, model_prefill(&whole, 0, ids, 3), bytes) == 0, "%s: logits of a text", share);
    options.ranks.zero = model.map.of.stage;
    threads_set(1);
    open_four(&again, share, options);
    EXPECT(gradients_of_four(&again) == loss, "%s: loss of one thread", share);
    for (MapRange range = {NULL, 0, 0, 0}; next_range(&model, &range);) {
        EXPECT(memcmp(zero_range_gradient_cpu(&again.zero, &range),
                      zero_range_gradient_cpu(&model.zero, &range), range.count * sizeof(float)) == 0,
               "%s: one thread", share);
    }
    threads_set(3);
    model_close(&again);
    model_close(&whole);
    model_close(&model);
}

TEST(composition_shares) {
    static const char* const shares[] = {"all", "pairs", "loop:2"};
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        const int is_loop = strncmp(shares[i], "loop", 4) == 0; // setup_check_share
        test_share(shares[i], (Options){.memory.recompute = RECOMPUTE_NONE});
        test_share(shares[i], (Options){.memory.recompute = RECOMPUTE_BLOCK, .ranks.zero = is_loop ? 1 : 2});
        test_share(shares[i], (Options){.memory.recompute = RECOMPUTE_MLP, .memory.matmul = MATMUL_BF16});
        test_share(shares[i], (Options){.memory.recompute = RECOMPUTE_NORMS, .memory.matmul = MATMUL_FP8});
    }
}

// Matrices that are packed while they are updated: parameters, state and copies have the bits of an
// update without copies and of packing after it.
static void test_packed_update(OptimizerName name) {
    Model packed, plain;
    Options options = {
        .optimizer.name = name, .memory.recompute = RECOMPUTE_NONE, .optimizer.soap_max_side = 1024};
    Update update = {0.1f,      0.9f, 0.95f,           1e-8f, 0.1f, 1.0f,          1,
                     DECAY_ALL, 0.9f, ADAFACTOR_FIXED, 0.1f,  0.1f, MUON_SPECTRAL, 1};
    options.memory.matmul = MATMUL_BF16;
    open_four(&packed, "off", options);
    options.memory.matmul = MATMUL_FP32;
    open_four(&plain, "off", options);
    for (update.t = 1; update.t <= 2; update.t++) {
        gradients_of_four(&plain);
        memcpy(packed.grads_memory, plain.grads_memory, plain.gradient_bytes);
        model_update(&packed, update);
        model_update(&plain, update);
    }
    EXPECT(memcmp(packed.params_memory, plain.params_memory, plain.parameter_bytes) == 0, "%s: parameters",
           optimizer_word(name));
    EXPECT(memcmp(packed.state.memory, plain.state.memory, plain.state.bytes) == 0, "%s: state",
           optimizer_word(name));
    Memory dry = memory_dry();
    Bf16Weights weights;
    bf16_weights_open(&weights, &dry, packed.parameter_rows, NULL, PACKED_KINDS, NULL);
    const size_t bytes = memory_bytes(&dry, MEMORY_DEVICE);
    void* copies = check_alloc(bytes, 1, "copies");
    memcpy(copies, packed.linear.packed.memory, bytes);
    linear_pack(&packed.linear);
    EXPECT(memcmp(copies, packed.linear.packed.memory, bytes) == 0, "%s: copies", optimizer_word(name));
    free(copies);
    model_close(&packed);
    model_close(&plain);
}

// If some targets of a batch do not count, the update follows the mean over the others.
TEST(settings_counted_mean) {
    Model model, half;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", RECOMPUTE_NONE);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    half = model; // the same model
    const int N = s.B * s.T, kept = 2 * s.T;
    int* targets = (int*)check_alloc((size_t)N, sizeof(int), "targets");
    for (int n = 0; n < N; n++) {
        targets[n] = n < kept ? s.y[n] : NO_TARGET;
    }
    const Batch some = {s.x, targets, NULL, s.B, s.T, kept}, two_rows = {s.x, s.y, NULL, 2, s.T, kept};
    const double factor = targets_factor(N, targets_count(targets, N));
    const double sum = batch_gradients(&model, some, N, GRADIENT_SET);
    const double norm = gradient_norm(&model) * factor;
    const double want = batch_gradients(&half, two_rows, kept, GRADIENT_SET);
    EXPECT_NEAR(sum / N * factor, want / kept, 1e-6 * want / kept, "mean loss");
    EXPECT_NEAR(norm, gradient_norm(&half), 2e-6 * norm, "norm");
    free(targets);
    fixture_close(&s);
    model_close(&model);
}

// ---- a teacher ----

// Opens a model with a teacher of another kind, both with random weights.
static void open_taught(Model* model, ModelConfig cfg, ModelConfig teacher, Options options) {
    options.batch.size = 2, options.batch.steps = 1, options.teacher.temperature = 1.5f;
    options.batch.seq_len = options.batch.seq_len ? options.batch.seq_len : ARCH_T;
    Settled s = settled_alone(&options, cfg, USE_TRAIN, SAFETENSORS_F32);
    s.teacher = teacher;
    model_open(model, &s, memory_on_host(), &alone);
    set_weights(model, 1);
    if (!options.teacher.quantize) {
        set_weights(model->teacher, 3);
    }
}

// Returns what training minimizes, after a forward and a backward pass.
static double taught_pass(Model* model, const ArchBatch* b) {
    const Distill how = model->teaching.how;
    WideSum divergence = {0, 0};
    model_forward(model, b->batch);
    teacher_forward(model, b->batch);
    model_backward(model, b->batch, 1.0f / (float)b->batch.counted, GRADIENT_SET, only, NULL);
    teaching_add_cpu(&divergence, &model->teaching, b->batch.B * b->batch.T);
    const double losses = batch_loss(model, b->batch), kl = wide_sum_value(divergence);
    return ((1 - how.weight) * losses + how.weight * how.temperature * how.temperature * kl) /
           b->batch.counted;
}

// Along the whole gradient, what training minimizes changes as the gradient says. The roundings of
// the fp32 losses, 1e-6 at most of losses of about 6, over a step of 1e-2 are the tolerance; norms
// after branches bend the loss more, so their step is half as long.
static void test_taught_slope(ModelConfig cfg, ModelConfig teacher, const char* name) {
    Model model;
    ArchBatch b;
    open_taught(&model, cfg, teacher, (Options){.teacher.weight = 0.7f});
    arch_batch(&b, cfg.V, ARCH_T);
    taught_pass(&model, &b);
    const size_t n = model.parameter_bytes / sizeof(float);
    const double norm = gradient_norm(&model), h = (model_has_norms_after(cfg) ? 2.5e-3 : 5e-3) / norm;
    float *params = model.params_memory, *saved = check_alloc(n, sizeof(float), "saved"),
          *direction = check_alloc(n, sizeof(float), "direction");
    double loss[2];
    memcpy(saved, params, n * sizeof(float));
    memcpy(direction, model.grads_memory, n * sizeof(float));
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < n; i++) {
            params[i] = saved[i] + (float)((side ? -h : h) * direction[i] / norm);
        }
        loss[side] = taught_pass(&model, &b);
    }
    EXPECT_NEAR((loss[0] - loss[1]) / (2 * h) / norm, 1, 2e-3, "slope along the gradient, %s", name);
    free(direction);
    free(saved);
    model_close(&model);
}

// A teacher with the weights of its student has nothing to teach; one in 8 bits, little.
static void test_own_teacher(int quantize, MatmulPrecision matmul, double most) {
    Model model;
    ArchBatch b;
    const ModelConfig cfg = arch_in_tiles(ARCHS[4].cfg);
    open_taught(
        &model, cfg, cfg,
        (Options){
            .batch.seq_len = 32, .teacher.weight = 1, .teacher.quantize = quantize, .memory.matmul = matmul});
    Model* teacher = model.teacher;
    for (int g = 0; g < model_groups(cfg) && quantize; g++) {
        model_set_group(teacher, g, model_get_group(&model, g, NULL));
    }
    if (!quantize) {
        set_weights(teacher, 1);
    }
    arch_batch(&b, cfg.V, 32);
    const double kl = taught_pass(&model, &b);
    EXPECT(fabs(kl) <= most, "kl of the model itself: %g, wanted %g", kl, most);
    model.teaching.how.weight = 0;
    const double loss = taught_pass(&model, &b), norm = gradient_norm(&model);
    arch_pass(&model, &b);
    EXPECT_NEAR(gradient_norm(&model), norm, 1e-5 * norm, "norm with a teacher that does not count");
    EXPECT_NEAR(batch_loss(&model, b.batch) / b.batch.counted, loss, 1e-6 * loss, "loss with it");
    model.teaching.how.weight = 1;
    taught_pass(&model, &b);
    EXPECT(gradient_norm(&model) <= norm * 20 * sqrt(fabs(most)), "norm of nothing to learn: %g of %g",
           gradient_norm(&model), norm);
    model_close(&model);
}

TEST(composition_teacher) {
    for (int i = 0; i < ARCH_CASES; i++) {
        ModelConfig teacher = ARCHS[(i + 3) % ARCH_CASES].cfg;
        // words that the student does not have, and smaller chunks
        teacher.V += i % 2, teacher.Vp += 60;
        if (ARCHS[i].cfg.E == 0) { // gradients of routers have more terms than the losses
            test_taught_slope(ARCHS[i].cfg, teacher, ARCHS[i].name);
        }
    }
    test_own_teacher(0, MATMUL_FP32, 1e-6);
    test_own_teacher(0, MATMUL_BF16, 1e-6);
    test_own_teacher(1, MATMUL_FP32, 1e-2);
}

// A model takes what a dry run of opening it counts, and allocates nothing besides.
TEST(settings_plan) {
    for (int k = 0; k < PLAN_TEST_RUNS; k++) {
        Comm comm = {.size = 1};
        Settled s = plan_test_run(k, options_program(OPTION_CPU), SAFETENSORS_F32);
        Model planned, model;
        s.options.memory.matmul = k % 3 == 0 && !s.options.texts.quantize ? MATMUL_BF16 : MATMUL_FP32;
        model_open(&planned, &s, memory_dry(), NULL);
        plan_test_count();
        model_open(&model, &s, memory_on_host(), &comm);
        plan_test_compare(k, &planned.memory, &model.memory, MEMORY_DEVICE, plan_test_counted());
        model_close(&model);
    }
}

// The gradient of block 0 overflows, and the loss does not notice: its GELU passes zeros on,
// through weights that are huge.
TEST(composition_update_in_part) {
    static ClipShares shares;
    static InBackward now;
    Model model;
    const ModelConfig cfg = llmc_bin_read_config(FIXTURES "gpt2_tiny.bin");
    const Options options = {.batch.size = 3,
                             .batch.seq_len = 31,
                             .batch.steps = 1,
                             .memory.update_in_backward = 1,
                             .optimizer.embedding_lr_scale = 1,
                             .optimizer.vector_lr_scale = 1};
    open_alone(&model, cfg, &options, USE_TRAIN);
    load_weights(&model, FIXTURES "gpt2_tiny.bin");
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const UpdateGuard guard = outliers_open(0, 0);
    const size_t F = (size_t)model_hidden(cfg), C = (size_t)cfg.C;
    memset(model.params.fcw, 0, F * C * sizeof(float));
    memset(model.params.fcb, 0, F * sizeof(float));
    for (size_t i = 0; i < F * C; i++) {
        model.params.fcprojw[i] = 1e30f;
    }
    float* before = check_alloc(model.parameter_bytes, 1, "parameters");
    memcpy(before, model.params_memory, model.parameter_bytes);
    shares = clip_shares_open(cfg);
    in_backward_open(&now, &shares, &guard,
                     (Update){1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1, .decay = DECAY_ALL}, 1, s.B * s.T);
    in_backward_batch(&now, s.B * s.T, 0);
    struct {
        RankReport gradient;
        double loss;
    } report = {{{0, 0}, {0, 0}, 0, 0, 0, 0, 0, 0}, 0};
    micro_step_forward(&model, batch_of(&s), &report.gradient);
    micro_step_backward(&model, batch_of(&s), 1.0f / (float)(s.B * s.T), only, &now, &report.gradient);
    const size_t upper = map_trained(&model.map, 2)->in[MAP_PARAMETERS].begin * sizeof(float);
    EXPECT(isfinite(now.losses) && !isfinite(wide_sum_value(now.square_sum)), "loss %g", now.losses);
    EXPECT(now.stopped_at == 1 && now.updated == cfg.L - 1, "stopped at %d", now.stopped_at);
    EXPECT(memcmp(model.params_memory, before, upper) == 0, "block 0 and the embeddings were updated");
    EXPECT(memcmp((char*)model.params_memory + upper, (char*)before + upper, 1024) != 0, "block 1 was not");
    free(before);
    fixture_close(&s);
    model_close(&model);
}

static const char* const optimizers[] = {"adamw", "adamw8bit", "adafactor", "muon",
                                         "soap",  "lion",      "sgd",       NULL};

TEST(settings_same_bits_fp32) { test_same_bits(open_fixture); }
TEST(settings_same_bits_bf16) { test_same_bits(open_bf16); }

TEST(composition_decode) {
    test_decode(open_fixture, 1e-5);
    test_decode(open_bf16, 0.014); // as composition_bf16_against_pytorch allows
}

TEST(composition_documents) {
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        test_documents(recompute);
    }
}

TEST(freeze) {
    static const char* const lists[] = {"embeddings",
                                        "wpe,*b",
                                        "blocks",
                                        "embeddings,blocks[0]",
                                        "attention[0],mlp[1],wte",
                                        "embeddings,lnf?",
                                        "embeddings,blocks",
                                        "norms,wte",
                                        "blocks[0],mlp[1]"};
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        test_freeze(lists[i],
                    (Options){.optimizer.name = OPTIMIZER_ADAMW, .memory.recompute = RECOMPUTE_NONE});
        test_freeze(lists[i], (Options){.optimizer.name = OPTIMIZER_LION, .memory.recompute = RECOMPUTE_MLP});
        test_freeze(
            lists[i],
            (Options){.optimizer.name = OPTIMIZER_SGD, .ranks.zero = 2, .memory.recompute = RECOMPUTE_BLOCK});
    }
}

TEST(composition_packed_update) {
    for (int name = OPTIMIZER_ADAMW; name <= OPTIMIZER_SGD; name++) {
        test_packed_update((OptimizerName)name);
    }
}

TEST(composition_task_losses) {
    vec_flush_denormals(); // as the trainer does
    test_task_losses(memory_on_host(), "", 1e-5);
}

TEST(resume) {
    static const char* const lines[] = {"",
                                        "--matmul bf16",
                                        "--optimizer lion",
                                        "--optimizer adafactor --freeze embeddings,blocks[0]",
                                        "--optimizer adafactor",
                                        "--optimizer muon --muon-rows on --cautious-decay on",
                                        "--optimizer soap --soap-every 2",
                                        "--optimizer sgd --lr 0.1",
                                        "--optimizer sgd --lr 0.1 --sgd-momentum 0",
                                        "--share-layers all",
                                        "--share-layers all --optimizer muon",
                                        "--share-layers all --optimizer adafactor"};
    vec_flush_denormals();
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        test_resume(lines[i]);
    }
}

// A run that keeps its rate decays from a checkpoint, with the bits of one that was planned so. Its
// data are text, because a shorter run has fewer stories.
static void test_decay_(const char* schedule) {
    char line[2048], text[128], one[256], other[256];
    const char* dir = test_tmpdir();
    snprintf(text, sizeof(text), "%s/decay.txt", dir);
    FILE* file = fopen(text, "w");
    for (int i = 0; i < 1000; i++) {
        fprintf(file, "%d squared is %d. ", i, i * i);
    }
    fclose(file);
    const char* const options =
        "--layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 --warmup 2 "
        "--eval-every 2 --eval-batches 1 --sample-every 3 --sample-tokens 4 --samples 1";
    snprintf(
        line, sizeof(line),
        "%s --train-data %s --steps %d --schedule wsd --decay-steps %d --decay-shape linear --out %s/planned",
        options, text, 2 * RESUME_HALF, RESUME_HALF, dir);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(line, sizeof(line), "%s --train-data %s --steps %d %s --save-every %d --out %s/stable", options,
             text, 4 * RESUME_HALF, schedule, RESUME_HALF, dir);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(line, sizeof(line),
             "--resume %s/stable/step_%08d --steps %d --schedule wsd --decay-steps %d --decay-shape linear "
             "--out %s/decayed",
             dir, RESUME_HALF, 2 * RESUME_HALF, RESUME_HALF, dir);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(one, sizeof(one), "%s/planned/step_%08d", dir, 2 * RESUME_HALF);
    snprintf(other, sizeof(other), "%s/decayed/step_%08d", dir, 2 * RESUME_HALF);
    resume_expect_same_(one, other, schedule);
}

// Trains for six steps in stages, and resumes before, at and after each border. Expects that the
// run reads `tokens`, in `sequences` rows of --seq-len.
static void test_stages(const char* stages, int tokens, int sequences) {
    char line[2048], whole[256], again[256];
    const char* dir = test_tmpdir();
    vec_flush_denormals();
    snprintf(line, sizeof(line),
             "--layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 %s --steps 6 --eval-every 2 "
             "--eval-batches 1 --sample-every 3 --sample-tokens 4 --samples 1 --save-every 1 --out %s/whole",
             stages, dir);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(whole, sizeof(whole), "%s/whole/step_%08d", dir, 6);
    SavedState state = resume_state_(whole);
    EXPECT(state.run.tokens == tokens && state.run.sequence == sequences, "%lld tokens, %lld sequences",
           (long long)state.run.tokens, (long long)state.run.sequence);
    state_close(&state);
    for (int step = 1; step < 6; step++) {
        snprintf(line, sizeof(line), "--resume %s/whole/step_%08d --out %s/%d", dir, step, dir, step);
        EXPECT(resume_run_(line) == 0, "%s", line);
        snprintf(again, sizeof(again), "%s/%d/step_%08d", dir, step, 6);
        resume_expect_same_(whole, again, line);
    }
}

TEST(settings_batch_schedule) {
    test_stages("--batch-schedule 0:16,2:80,4:96", 2 * 16 + 2 * 80 + 2 * 96, 2 * 1 + 2 * 5 + 2 * 6);
}

// A stage of short sequences has the bits of a run that has no others.
static void test_short_sequences(const char* options) {
    static const char* const ways[] = {"--seq-len-schedule 0:4,9:16 --batch 2", "--seq-len 4 --batch 8"};
    char line[2048], path[2][256];
    for (int i = 0; i < 2; i++) {
        snprintf(line, sizeof(line),
                 "--layers 2 --channels 16 --heads 2 --context 16 --total-batch 96 --shuffle off --steps 3 "
                 "--eval-every 0 --samples 0 %s %s --out %s/%d",
                 ways[i], options, test_tmpdir(), i);
        EXPECT(resume_run_(line) == 0, "%s", line);
        snprintf(path[i], sizeof(path[i]), "%s/%d/step_%08d", test_tmpdir(), i, 3);
    }
    SavedState one = resume_state_(path[0]), other = resume_state_(path[1]);
    EXPECT(resume_checksum_(&one, "model.safetensors") == resume_checksum_(&other, "model.safetensors"), "%s",
           options);
    state_close(&other);
    state_close(&one);
}

TEST(settings_seq_len_schedule) {
    test_stages("--seq-len-schedule 0:2,2:8,4:16 --total-batch 96 --doc-mask on", 6 * 96, 6 * 6);
    test_short_sequences("--seed 1");
    test_short_sequences("--arch llama --doc-mask on");
    test_short_sequences("--arch qwen3 --window 3 --matmul bf16");
}

// A stage of windows has the bits of a run whose windows do not grow.
TEST(settings_window_schedule) {
    static const char* const ways[] = {"--window-schedule 0:3,9:8", "--window 3"};
    char line[2048], path[2][256];
    test_stages(
        "--arch qwen3 --window-schedule 0:1,2:3,4:8 --window-pattern SL --total-batch 96 --doc-mask on",
        6 * 96, 6 * 6);
    for (int i = 0; i < 2; i++) {
        snprintf(line, sizeof(line),
                 "--arch mistral --layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 3 "
                 "--eval-every 0 --samples 0 %s --out %s/%d",
                 ways[i], test_tmpdir(), i);
        EXPECT(resume_run_(line) == 0, "%s", line);
        snprintf(path[i], sizeof(path[i]), "%s/%d/step_%08d", test_tmpdir(), i, 3);
    }
    SavedState one = resume_state_(path[0]), other = resume_state_(path[1]);
    EXPECT(resume_checksum_(&one, "model.safetensors") == resume_checksum_(&other, "model.safetensors"),
           "windows of 3 tokens");
    state_close(&other);
    state_close(&one);
}

TEST(settings_decay) {
    vec_flush_denormals();
    test_decay_("--schedule wsd");
    test_decay_("--schedule constant");
}

TEST(settings_in_backward) {
    vec_flush_denormals();
    test_in_backward(optimizers, "");
    in_backward_same_bits_(3, "--freeze wte,blocks[0-0],norms");
    in_backward_same_bits_(3, "--freeze embeddings,blocks[0]");
    in_backward_same_bits_(3, "--freeze blocks[0],attention --optimizer muon");
    in_backward_same_bits_(3, "--freeze embeddings,lnf?,mlp[1] --optimizer adafactor");
    in_backward_same_bits_(3, "--matmul bf16");
    in_backward_same_bits_(3, "--share-layers all");
    in_backward_same_bits_(6, "--share-layers pairs");
}
