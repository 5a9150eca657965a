/*
test_gpt2.c -- the whole model on the CPU: against PyTorch's numbers (dev/ref/fixtures, computed in float64),
against finite differences, and against itself: recomputation, accumulation and threads.

    make test, or build/plain/test_gpt2 from the top of the repository
*/
#define TRAIN_GPT2_NO_MAIN
#define GPT2_CHUNK_LOGITS 3000 // the classifier takes a batch in several chunks, forward and backward
#include "train_gpt2.c"

#include "dev/test/resume_test.h"
#include "dev/test/test.h"

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

static void read_exactly(FILE* file, void* to, size_t bytes, const char* path) {
    CHECK(fread(to, 1, bytes, file) == bytes, "%s: too short", path);
}

static State fixture_open(const char* path, const GPT2* model) {
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
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        read_exactly(file, row_tensor(row, s.grads), tensor_elements(row) * sizeof(float), path);
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

static void open_fixture(GPT2* model, const char* path, int recompute) {
    gpt2_open(model, model_file_read_config(path), 3, 31, recompute);
    model_file_read(path, model->parameter_rows, model->params_memory);
}

static Batch batch_of(const State* s) { return (Batch){s->x, s->y, NULL, s->B, s->T, s->B * s->T}; }

// Forward and backward on the whole batch; the gradients are set, the loss returned.
static double pass(GPT2* model, const State* s) {
    gpt2_forward(model, s->x, s->B, s->T, 0);
    gpt2_backward(model, batch_of(s), s->B * s->T, GRADIENT_SET);
    return mean_loss(model, s->B * s->T);
}

// |a - b| / |b| in the 2-norm; NaN if either has one.
static double relative_error(const float* a, const float* b, size_t n) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(difference / (norm > 0 ? norm : 1));
}

// fp32 rounds each operation by 6e-8; a gradient passes through some hundred sums of up to a hundred terms.
static void test_against_pytorch(void) {
    GPT2 model;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", 0);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const int N = s.B * s.T, V = model.cfg.V;
    EXPECT(gpt2_classifier_chunk(model.cfg, (size_t)N) < (size_t)N / 2, "too few chunks for a test");
    gpt2_forward(&model, s.x, s.B, s.T, 0);
    for (int n = 0; n < N; n++) {
        gpt2_logits(&model, n, 1);
        EXPECT_NEAR(relative_error(model.acts.logits, s.logits + (size_t)n * V, V), 0, 2e-6,
                    "logits of token %d", n);
    }
    EXPECT_NEAR(gpt2_loss(&model, batch_of(&s)), s.loss, 1e-6 * s.loss, "loss without gradients");
    EXPECT_NEAR(pass(&model, &s), s.loss, 1e-6 * s.loss, "loss");
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.parameter_rows[i];
        const double error = relative_error(row_tensor(row, model.grads_memory), row_tensor(row, s.grads),
                                            tensor_elements(row));
        EXPECT_NEAR(error, 0, 5e-6, "gradient of %s", row->name);
    }
    fixture_close(&s);
    gpt2_close(&model);
}

// A bias of the keys shifts all scores of a query alike: its gradient is rounding noise, which AdamW turns
// into whole steps.
static int is_key_bias(const TensorRow* row, size_t i, int C) {
    return strcmp(row->name, "qkvb") == 0 && i % (3 * (size_t)C) / (size_t)C == 1;
}

static void test_adamw_steps(void) {
    GPT2 model, after;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", 0);
    open_fixture(&after, FIXTURES "gpt2_tiny_adamw.bin", 0);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    FILE* file = fopen(FIXTURES "gpt2_tiny_adamw.txt", "r");
    CHECK(file, FIXTURES "gpt2_tiny_adamw.txt: cannot read");
    char line[256];
    int step, steps = 0;
    double loss, norm;
    const Options options = {.lr = 1e-3f,
                             .beta1 = 0.9f,
                             .beta2 = 0.95f,
                             .eps = 1e-8f,
                             .weight_decay = 0.1f,
                             .grad_clip = 1.0f,
                             .schedule = SCHEDULE_CONSTANT,
                             .steps = ADAMW_STEPS};
    while (fgets(line, sizeof(line), file)) {
        if (sscanf(line, "%d %lf %lf", &step, &loss, &norm) != 3) {
            continue; // the comment
        }
        EXPECT_NEAR(pass(&model, &s), loss, 2e-6 * loss, "loss at step %d", step);
        const double our_norm = gpt2_gradient_norm(&model);
        EXPECT_NEAR(our_norm, norm, 1e-5 * norm, "norm at step %d", step);
        gpt2_update(&model, setup_adamw(&options, step - 1, step, our_norm));
        steps++;
    }
    EXPECT(steps == ADAMW_STEPS, "%d steps", steps);
    fclose(file);
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) { // parameters moved by up to 1e-2
        const TensorRow* row = &model.parameter_rows[i];
        const float *ours = row_tensor(row, model.params_memory),
                    *theirs = row_tensor(row, after.params_memory);
        for (size_t j = 0; j < tensor_elements(row); j++) {
            if (!is_key_bias(row, j, model.cfg.C) && !(fabsf(ours[j] - theirs[j]) <= 3e-5f)) {
                EXPECT_NEAR(ours[j], theirs[j], 3e-5, "%s[%zu] after %d steps", row->name, j, steps);
                break;
            }
        }
    }
    fixture_close(&s);
    gpt2_close(&after);
    gpt2_close(&model);
}

// Along random directions of each tensor, the loss must change as the gradient says. fp32 losses carry 3e-7
// of noise: with a step that changes the loss by about 1e-2, a difference is good to some 1e-4, and the third
// derivative adds a little.
static void test_finite_differences(void) {
    GPT2 model;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", 0);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    pass(&model, &s);
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.parameter_rows[i];
        const size_t n = tensor_elements(row);
        float *tensor = row_tensor(row, model.params_memory), *grad = row_tensor(row, model.grads_memory);
        float* saved = check_alloc(n, sizeof(float), "saved");
        memcpy(saved, tensor, n * sizeof(float));
        double square = 0;
        for (size_t j = 0; j < n; j++) {
            square += (double)grad[j] * grad[j];
        }
        const double h = 5e-3 / sqrt(square); // along the gradient: the slope is its norm
        double loss[2];
        for (int side = 0; side < 2; side++) {
            for (size_t j = 0; j < n; j++) {
                tensor[j] = saved[j] + (float)((side ? -h : h) * grad[j] / sqrt(square));
            }
            gpt2_forward(&model, s.x, s.B, s.T, 0);
            loss[side] = gpt2_loss(&model, batch_of(&s));
        }
        memcpy(tensor, saved, n * sizeof(float));
        EXPECT_NEAR((loss[0] - loss[1]) / (2 * h) / sqrt(square), 1, 2e-3, "slope along the gradient of %s",
                    row->name);
        free(saved);
    }
    fixture_close(&s);
    gpt2_close(&model);
}

// All levels of recomputation, and any number of threads, give the same bits.
static void test_same_bits(void) {
    GPT2 model;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", 0);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const double loss = pass(&model, &s);
    for (int level = 1; level <= 3; level++) {
        GPT2 other;
        open_fixture(&other, FIXTURES "gpt2_tiny.bin", level);
        EXPECT(other.activation_bytes < model.activation_bytes, "level %d", level);
        EXPECT(pass(&other, &s) == loss, "recompute level %d", level);
        EXPECT(memcmp(other.grads_memory, model.grads_memory, model.parameter_bytes) == 0,
               "recompute level %d", level);
        gpt2_close(&other);
    }
    for (int threads = 1; threads <= 3; threads++) {
        GPT2 other;
        threads_set(threads);
        open_fixture(&other, FIXTURES "gpt2_tiny.bin", 0);
        EXPECT(pass(&other, &s) == loss, "%d threads", threads);
        EXPECT(memcmp(other.grads_memory, model.grads_memory, model.parameter_bytes) == 0, "%d threads",
               threads);
        gpt2_close(&other);
    }
    fixture_close(&s);
    gpt2_close(&model);
}

// Micro-batches of one sequence, added up, give the gradient of the batch; nothing of an earlier update is
// left in it.
static void test_accumulation(void) {
    GPT2 model, whole;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", 0);
    open_fixture(&whole, FIXTURES "gpt2_tiny.bin", 0);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    const double loss = pass(&whole, &s);
    for (int repeat = 0; repeat < 2; repeat++) {
        double sum = 0;
        for (int b = 0; b < s.B; b++) {
            const Batch one = {s.x + b * s.T, s.y + b * s.T, NULL, 1, s.T, s.T};
            gpt2_forward(&model, one.inputs, 1, s.T, 0);
            gpt2_backward(&model, one, s.B * s.T, b == 0 ? GRADIENT_SET : GRADIENT_ADD);
            sum += mean_loss(&model, s.T) / s.B;
        }
        EXPECT_NEAR(sum, loss, 1e-6 * loss, "accumulated loss");
        for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
            const TensorRow* row = &model.parameter_rows[i];
            EXPECT_NEAR(relative_error(row_tensor(row, model.grads_memory),
                                       row_tensor(row, whole.grads_memory), tensor_elements(row)),
                        0, 2e-6, "accumulated gradient of %s", row->name);
        }
    }
    fixture_close(&s);
    gpt2_close(&whole);
    gpt2_close(&model);
}

// One token at a time, over the keys and values already there, gives the logits of the whole sequence.
static void test_generation_cache(void) {
    enum { PROMPT = 5 };
    GPT2 model, whole;
    open_fixture(&model, FIXTURES "gpt2_tiny.bin", 0);
    open_fixture(&whole, FIXTURES "gpt2_tiny.bin", 0);
    State s = fixture_open(FIXTURES "gpt2_tiny_state.bin", &model);
    gpt2_forward(&whole, s.x, 1, s.T, 0);
    gpt2_forward(&model, s.x, 1, PROMPT, 0);
    for (int known = PROMPT; known < s.T; known++) {
        gpt2_forward(&model, s.x, 1, known + 1, known);
        gpt2_logits(&model, known, 1);
        gpt2_logits(&whole, known, 1);
        EXPECT_NEAR(relative_error(model.acts.logits, whole.acts.logits, model.cfg.V), 0, 2e-6, "token %d",
                    known);
    }
    fixture_close(&s);
    gpt2_close(&whole);
    gpt2_close(&model);
}

int main(void) {
    test_same_bits(); // first: it sets the number of threads, and scratch memory is per thread
    test_against_pytorch();
    test_adamw_steps();
    test_finite_differences();
    test_accumulation();
    test_generation_cache();
    test_resume(trainer, "");
    return test_done("test_gpt2");
}
