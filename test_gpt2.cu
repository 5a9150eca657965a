/*
test_gpt2.cu -- the whole model on the GPU: loss, logits, every gradient and ten optimizer steps
against the CPU trainer, and against itself: recomputation, accumulation, graphs, two runs. Compiled
for each PRECISION, by nvcc and for the CPU device.

    make test-gpu, or dev/test/run.sh for the CPU device
    test_gpt2 composition    each operation of each architecture once: what a sanitizer should see

composition_* run under sanitizers, too, and in each precision. The others compare runs with each
other: settings, frozen parameters, resumed runs (dev/test.mk: those that FP32 has of its own).
*/
#define ATTENTION_WIDEST 32 // no heads here are wider; test_attention.cu has the other kernels
#define TRAIN_GPT2_NO_MAIN
#include "train_gpt2.cu"

#include <malloc.h>

#include "dev/test/lib/cpu_trainer.h"
#include "dev/test/lib/in_backward_test.h"
#include "dev/test/lib/plan_test.h"
#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/resume_test.h"
#include "dev/test/lib/task_oracle.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/test_element.h"
#include "llmc/model/part.h"
#include "llmc/model/share_layers.h"

#ifdef CUSIM
enum { simulated = 1 };
#else
enum { simulated = 0 };
#endif

// MICRO_STEPS: of an update, at most
enum { B = 2, T = 13, N = B * T, BATCHES = 2, MICRO_STEPS = 5 };

// GENERATED: tokens, more than a window has. UPDATES: of settings whose bits are compared; graphs
// are captured in the first one, and replayed in the others.
enum { GENERATED = 7, UPDATES = 2 };

// Odd sizes: V is no multiple of 128, T is below the context, heads have 24 channels, rows are no
// whole warps.
static const ModelConfig ODD = {17, 51, 128, 3, 2, 48, SHARE_OFF};

static ModelConfig arch_config(Arch arch, int L, int NH, int KV, int HS, int F) {
    ModelConfig cfg = {17, 51, 128, L, NH, 48, SHARE_OFF};
    cfg.arch = arch;
    cfg.KV = KV;
    cfg.HS = HS;
    cfg.F = F;
    return cfg;
}

enum { ARCHS = 25, HYBRID = 19 };

// Sets models that have every kind of operation: 4 queries share a key, or 2, or none; all heads
// together wider or narrower than the channels; windows of some tokens, in some layers, or one.
static void set_archs(ModelConfig archs[ARCHS]) {
    const RopeScaling llama3 = {ROPE_LLAMA3, 8, 1, 4, 8};
    archs[0] = arch_config(ARCH_LLAMA, 2, 4, 1, 16, 72);
    archs[0].has_head = 1;
    archs[1] = arch_config(ARCH_LLAMA, 2, 4, 4, 8, 40);
    archs[1].scaling = llama3;
    archs[2] = arch_config(ARCH_MISTRAL, 2, 4, 2, 0, 72);
    archs[2].window = 5;
    archs[2].windows[0] = 3;
    archs[2].window_rope_base = 100;
    archs[2].window_scaling.kind = ROPE_LINEAR, archs[2].window_scaling.factor = 2;
    archs[3] = arch_config(ARCH_QWEN2, 2, 6, 2, 0, 72);
    archs[3].rope_base = 1e6f;
    archs[4] = arch_config(ARCH_QWEN3, 3, 4, 2, 24, 72);
    archs[4].window = 4;
    archs[4].windows[0] = 5;
    archs[4].norm_eps = 1e-6f;
    archs[4].scaling = {ROPE_YARN, 4, 1, 2, 16, 1.25f, 0};
    archs[4].unrotated[0] = 4;
    archs[5] = arch_config(ARCH_ARCEE, 2, 4, 2, 0, 72);
    archs[5].window = 1;
    archs[5].windows[0] = 2;
    archs[6] = arch_config(ARCH_NANOCHAT, 2, 4, 2, 0, 72);
    archs[6].has_head = 1;
    archs[6].softcap = 15;
    archs[7] = arch_config(ARCH_NANOCHAT, 2, 4, 0, 0, 44);
    archs[8] = arch_config(ARCH_MIXTRAL, 2, 4, 2, 0, 72);
    archs[8].E = 4, archs[8].E_used = 2;
    archs[8].window = 5;
    archs[8].windows[0] = 3;
    archs[9] = arch_config(ARCH_QWEN3MOE, 2, 4, 2, 16, 24);
    archs[9].E = 5, archs[9].E_used = 3;
    archs[10] = arch_config(ARCH_OLMOE, 2, 4, 2, 0, 40);
    archs[10].has_head = 1;
    archs[10].E = 7, archs[10].E_used = 2; // no token is so near a tie that fp16 takes another one
    archs[11] = arch_config(ARCH_GLM4MOE, 2, 4, 2, 16, 24);
    archs[11].E = 4, archs[11].E_used = 2;
    archs[11].Fs = 40;
    archs[11].rope_dims = 8;
    archs[11].router_factor = 1.5f;
    archs[12] = arch_config(ARCH_OLMO2, 3, 4, 2, 16, 72);
    archs[12].has_head = 1;
    archs[13] = arch_config(ARCH_GEMMA2, 2, 4, 2, 16, 72);
    archs[13].window = 5;
    archs[13].windows[0] = 1;
    archs[13].softcap = 20, archs[13].attention_softcap = 9, archs[13].attention_scale = 0.25f;
    archs[14] = arch_config(ARCH_GRANITE, 2, 4, 1, 0, 72);
    archs[14].embedding_factor = 3, archs[14].residual_factor = 0.22f, archs[14].logits_divisor = 1.5f;
    archs[14].attention_scale = 0.2f;
    archs[15] = arch_config(ARCH_QWEN2, 2, 4, 2, 24, 72);
    archs[15].window = 5, archs[15].windows[0] = 1;
    archs[15].attention_scale = 0.3f, archs[15].attention_softcap = 1;
    archs[16] = arch_config(ARCH_EXAONE4, 2, 4, 2, 16, 72); // norms after branches, of heads
    archs[16].window = 5, archs[16].windows[0] = 1;
    archs[16].unrotated[0] = 2;
    archs[17] = arch_config(ARCH_GEMMA3, 2, 4, 2, 16, 72); // norms of heads: 1 + w
    archs[17].window = 5, archs[17].windows[0] = 1;
    archs[17].attention_scale = 0.25f, archs[17].window_rope_base = 100;
    archs[18] = arch_config(ARCH_GPTOSS, 2, 4, 2, 16, 24); // sinks, and experts with biases
    archs[18].has_head = 1;
    archs[18].E = 3, archs[18].E_used = 3; // all: no ties
    archs[18].window = 5, archs[18].windows[0] = 1;
    archs[HYBRID] = arch_config(ARCH_QWEN35, 3, 4, 2, 16, 72); // gates of attention, the delta rule
    archs[HYBRID].mixed[0] = 3;
    archs[HYBRID].mixer = {4, 2, 4, 16, 8};
    archs[HYBRID].rope_dims = 8;
    archs[20] = arch_config(ARCH_LFM2, 3, 4, 2, 16, 72); // short convolutions
    archs[20].mixed[0] = 5;
    archs[20].mixer.taps = 3;
    archs[21] = arch_config(ARCH_DEEPSEEK3, 3, 4, 0, 24, 72); // latents, values narrower than heads
    archs[21].has_head = 1;
    archs[21].E = 3, archs[21].E_used = 3, archs[21].Fe = 24, archs[21].Fs = 40, archs[21].dense_layers = 1;
    archs[21].rope_dims = 8, archs[21].router_factor = 1.5f, archs[21].attention_scale = 0.25f;
    archs[21].latent = {56, 40, 16, 0};
    archs[22] = arch_config(ARCH_DEEPSEEK3, 2, 4, 0, 12, 40); // queries without one
    archs[22].E = 3, archs[22].E_used = 3;
    archs[22].rope_dims = 4;
    archs[22].latent = {0, 24, 12, 0};
    archs[23] = arch_config(ARCH_LLAMA, 3, 4, 2, 16, 72); // additions of ours
    archs[23].has_scales = archs[23].has_values = 1;
    archs[24] = arch_config(ARCH_NANOCHAT, 2, 4, 4, 0, 44);
    archs[24].has_scales = archs[24].has_values = archs[24].has_head = 1;
}

// Returns the tolerance for |got - want| / |want| of a tensor: each element goes through some tens
// of roundings, whose errors add up like a random walk.
static double tolerance(void) {
    switch (DTYPE_OF(floatX)) {
    case DTYPE_FP32:
        return 1e-5;
    case DTYPE_FP16:
        return 8 * 0x1p-11;
    default:
        return 8 * 0x1p-8;
    }
}

typedef struct {
    const char *recompute, *gelu_fusion, *graph, *gradients, *master_weights, *zero;
    const char* freeze; // NULL: nothing
    const char* share;  // NULL: off
    int offload_residuals;
    const ModelConfig* cfg; // NULL: ODD
    int fp8;                // 2: with --autotune on
} Settings;
static const Settings USUAL = {"0", "2", "off", "model", "on", "0", NULL, NULL, 0};

// Returns the sizes; with shared parameters, those of four layers.
static ModelConfig config_of(Settings s) {
    ModelConfig cfg = s.cfg ? *s.cfg : ODD;
    char error[ERROR_BYTES];
    if (s.share) {
        cfg.L = 4;
        CHECK(share_parse(&cfg.share, cfg.L, s.share, error), "%s", error);
    }
    return cfg;
}

static Options options_of(Settings s, int batch) {
    char number[16], total[16];
    snprintf(number, sizeof(number), "%d", batch);
    snprintf(total, sizeof(total), "%d", MICRO_STEPS * batch * T);
    // clang-format off
    const char* line[] = {"test",
        "--batch",        number,              "--seq-len",      "13",
        "--total-batch",  total,               "--zero",         s.zero,
        "--logits-chunk", "6",                 "--tf32",         "off", // the last chunk is smaller
        "--autotune",     "off",               "--recompute",    s.recompute,
        "--gelu-fusion",  s.gelu_fusion,       "--device",       "0",
        "--graph",        s.graph,             "--gradients",    s.gradients,
        "--master-weights", s.master_weights};
    // clang-format on
    Options options;
    options_parse(&options, sizeof(line) / sizeof(line[0]), (char**)line, options_program(OPTION_GPU));
    options.optimizer.freeze = s.freeze ? s.freeze : "";
    options.memory.offload_residuals = s.offload_residuals;
    options.memory.matmul = s.fp8 ? MATMUL_FP8 : MATMUL_FP32;
    options.memory.autotune = s.fp8 == 2;
    return options;
}

// Fills in the rows of the parameters on the host, in fp32, laid out as in the trainers; returns
// their bytes.
static size_t rows_on_host(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg) {
    return model_parameter_rows_of(rows, cfg, sizeof(float));
}

// Returns the random stream of a vector. With these numbers no token is near a tie of two experts.
static uint64_t noise_stream(const TensorRow* rows, int i) {
    static const char* const names[] = {"wte",     "wpe",      "ln1w",     "ln1b",     "qkvw",    "qkvb",
                                        "qnormw",  "knormw",   "attprojw", "attprojb", "ln2w",    "ln2b",
                                        "routerw", "routerb",  "fcw",      "fcb",      "fcprojw", "fcprojb",
                                        "sfcw",    "sfcprojw", "lnfw",     "lnfb"};
    for (uint64_t k = 0; k < sizeof(names) / sizeof(names[0]); k++) {
        if (strcmp(rows[i].name, names[k]) == 0) {
            return k;
        }
    }
    return (uint64_t)(MODEL_PARAMETER_ROWS + i);
}

// Returns first weights that floatX holds exactly. The vectors, too, are random.
static float* first_weights(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    float* values = (float*)check_alloc(rows_on_host(rows, cfg), 1, "weights");
    for (int g = 0; g < model_groups(cfg); g++) {
        model_random_group(rows, cfg, 7, g, (char*)values + tensor_group_offset_bytes(rows, g));
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const int vector = rows[i].rows == 1;
        for (size_t j = 0; j < tensor_elements(&rows[i]); j++) {
            float* weight = (float*)test_element(&rows[i], values, j);
            const float x = vector ? *weight + 0.1f * rand_normal(3, noise_stream(rows, i), j) : *weight;
            *weight = to_float(from_float<floatX>(x));
        }
    }
    return values;
}

// Sets BATCHES of tokens and their targets.
static void batch_tokens(int tokens[BATCHES * N], int targets[BATCHES * N]) {
    Rand rng = rand_open(5, 1);
    for (int i = 0; i < BATCHES * N; i++) {
        tokens[i] = (int)rand_below(&rng, (uint32_t)ODD.V);
        targets[i] = (int)rand_below(&rng, (uint32_t)ODD.V);
    }
}

// Returns the place of a shard in all parameters on the host.
static float* shard_on_host(const Model* model, const Shard* s, float* all) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    rows_on_host(rows, model->cfg);
    const TensorRow* row = &rows[s->tensor];
    const int copy = s->layer < 0 ? 0 : tensor_copy(row, s->layer);
    return (float*)tensor_at_layer(row, all, copy) + s->piece.logical + s->piece.first;
}

static size_t group_elements(const Model* model, int g) {
    size_t elements = 0;
    for (int i = map_group(&model->map, g).first; i < map_group(&model->map, g).end; i++) {
        elements += model->map.buckets[i].elements;
    }
    return elements;
}

// Copies the tensors of group g from all parameters on the host to a group of Transfer, or back.
typedef enum { TO_GROUP, FROM_GROUP } GroupCopy;
static void copy_group(const Model* model, int g, float* group, float* all, GroupCopy copy) {
    const Map* m = &model->map;
    for (int i = map_group(m, g).first; i < map_group(m, g).end; group += m->buckets[i].elements, i++) {
        for (int k = m->buckets[i].first; k < m->buckets[i].first + m->buckets[i].count; k++) {
            const Shard* s = &m->shards[k];
            float *inside = group + s->offset, *outside = shard_on_host(model, s, all);
            memcpy(copy == TO_GROUP ? inside : outside, copy == TO_GROUP ? outside : inside,
                   s->piece.count * sizeof(float));
        }
    }
}

static void upload_weights(Model* model, const float* weights) {
    for (int g = 0; g < model_groups(model->cfg); g++) {
        const size_t elements = group_elements(model, g);
        float* group = (float*)check_alloc(elements, sizeof(float), "weights");
        copy_group(model, g, group, (float*)weights, TO_GROUP);
        transfer_upload_group(&model->transfer, g, group);
        // NaN: the upload is complete when the call returns
        memset(group, 0xFF, elements * sizeof(float));
        free(group);
    }
    zero_gather_all_parameters(&model->zero);
}

static Model* test_open(Settings settings, int batch, const float* weights) {
    Model* model = (Model*)check_alloc(1, sizeof(Model), "model");
    const Options options = options_of(settings, batch);
    const Settled s = settled_alone(&options, config_of(settings), USE_TRAIN, gpu_setup_dtype());
    static Comm alone;
    alone.size = 1;
    model_open(model, &s, memory_on_gpu(), &alone);
    linear_trains(&model->linear);
    upload_weights(model, weights);
    return model;
}

static void test_close(Model* model) {
    model_close(model);
    free(model);
}

// Returns the loss scale, which only fp16 has.
static float loss_scale(void) {
    return DTYPE_OF(floatX) == DTYPE_FP16 ? loss_scale_open().scale : loss_scale_off().scale;
}

// Ends an update of `micro_steps` micro-steps: returns the sum of its losses.
static double losses_of_update(Model* model, int micro_steps) {
    double sum = 0;
    model_square_sum(model);
    const StepResult* result = step_results_read(&model->results, micro_steps);
    for (int micro = 0; micro < micro_steps; micro++) {
        sum += result->losses[micro];
    }
    return sum;
}

// Returns the norm of the whole gradient of the update, without the loss scale.
static double gradient_norm(const Model* model) {
    return sqrt(wide_sum_value(model->results.on_host->square_sum)) / loss_scale();
}

// Computes the gradients of both batches, model->B sequences at a time, into grads_memory, times
// the loss scale; returns the mean loss. `starts` may be NULL.
static double document_gradients(Model* model, const int* tokens, const int* targets, const int* starts) {
    const int count = model->B * T, micro_steps = BATCHES * N / count;
    const float dloss = loss_scale() / (BATCHES * N);
    step_results_clear(&model->results);
    for (int micro = 0; micro < micro_steps; micro++) {
        const int at = micro * count;
        const Batch batch = {tokens + at, targets + at, starts ? starts + at : NULL, model->B, T, count};
        const MicroStep step = {micro, 1, 1, micro == micro_steps - 1};
        micro_step_backward(model, model_push(model, batch), dloss, step, NULL, 1);
    }
    return losses_of_update(model, micro_steps) / (BATCHES * N);
}

static double test_gradients(Model* model, const int* tokens, const int* targets) {
    return document_gradients(model, tokens, targets, NULL);
}

static double cpu_documents(CpuTrainer* reference, const int* tokens, const int* targets, const int* starts) {
    double loss = 0;
    for (int i = 0; i < BATCHES; i++) {
        loss +=
            cpu_trainer_gradients(reference, tokens + i * N, targets + i * N, starts ? starts + i * N : NULL,
                                  B, T, BATCHES * N, i == 0 ? GRADIENT_SET : GRADIENT_ADD) /
            (BATCHES * N);
    }
    return loss;
}

static double cpu_both(CpuTrainer* reference, const int* tokens, const int* targets) {
    return cpu_documents(reference, tokens, targets, NULL);
}

// Returns the gradients as fp32 on the host, without the loss scale. The caller frees them.
static float* gradients_on_host(const Model* model) {
    const size_t count = model->gradient_bytes / dtype_bytes(model->grad_dtype);
    float* values = (float*)check_alloc(count, sizeof(float), "gradients");
    void* raw = check_alloc(model->gradient_bytes, 1, "gradients");
    CUDA_CHECK(cudaMemcpy(raw, model->grads_memory, model->gradient_bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) {
        values[i] =
            (model->grad_dtype == DTYPE_FP32 ? ((float*)raw)[i] : to_float(((floatX*)raw)[i])) / loss_scale();
    }
    free(raw);
    return values;
}

// Copies group g as fp32.
static void group_on_host(Model* model, int g, float* group) {
    const DType dtype = model->transfer.master != MASTER_NONE ? DTYPE_FP32 : DTYPE_OF(floatX);
    model_get_group(model, g, group);
    safetensors_widen(group,
                      dtype == DTYPE_FP32   ? SAFETENSORS_F32
                      : dtype == DTYPE_BF16 ? SAFETENSORS_BF16
                                            : SAFETENSORS_F16,
                      group_elements(model, g));
}

// Returns all parameters, laid out by rows_on_host. The caller frees them.
static float* parameters_on_host(Model* model) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    float* all = (float*)check_alloc(rows_on_host(rows, model->cfg), 1, "parameters");
    for (int g = 0; g < model_groups(model->cfg); g++) {
        float* group = (float*)check_alloc(group_elements(model, g), sizeof(float), "parameters");
        group_on_host(model, g, group);
        copy_group(model, g, group, all, FROM_GROUP);
        free(group);
    }
    return all;
}

// Returns 1 for a bias of keys without rotary positions. It adds the same to all scores of a query:
// its gradient is nothing but rounding, which AdamW scales to steps of full size in arbitrary
// directions.
static int is_key_bias(const Model* model, int row, size_t element) {
    const size_t C = (size_t)model->cfg.C;
    return model->cfg.arch == ARCH_GPT2 && strcmp(model->map.rows[row].name, "qkvb") == 0 &&
           element % (3 * C) / C == 1;
}

// Compares each trained tensor by name, except key biases, in arrays that are laid out as
// gradients, as parameters are if none is frozen; expects padding of zeros between tensors.
static void expect_tensors(const char* what, const Model* model, const float* got, const float* want,
                           double tolerance) {
    const Map* m = &model->map;
    const size_t count = m->totals.updated;
    double error[MODEL_PARAMETER_ROWS] = {}, size[MODEL_PARAMETER_ROWS] = {};
    int is_there[MODEL_PARAMETER_ROWS] = {};
    char* is_tensor = (char*)check_alloc(count, 1, "elements");
    size_t padding = 0;
    for (int i = 0; i < m->num_shards; i++) {
        const Shard* s = &m->shards[i];
        for (size_t k = 0; map_has(m, s, MAP_GRADIENTS) && k < s->piece.count; k++) {
            const size_t at = map_at(m, s, MAP_OWNED) + k; // one rank: gradients that take no turns
            const int is_key = is_key_bias(model, s->tensor, s->piece.logical + s->piece.first + k);
            error[s->tensor] += is_key ? 0 : pow((double)got[at] - want[at], 2);
            size[s->tensor] += pow(want[at], 2);
            is_tensor[at] = is_there[s->tensor] = 1;
        }
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        // gradients of decays are differences of sums over the state; those of scales are sums over
        // the stream that nearly cancel, since the norm behind forgets lengths
        const int cancels = strstr(m->rows[i].name, "mixdecay") || strstr(m->rows[i].name, "mixstep") ||
                            strstr(m->rows[i].name, "scales");
        EXPECT_NEAR(is_there[i] ? sqrt(error[i] / size[i]) : 0, 0, cancels ? 3 * tolerance : tolerance,
                    "%s of %s", what, m->rows[i].name);
    }
    for (size_t i = 0; i < count; i++) {
        EXPECT(is_tensor[i] || got[i] == 0, "%s: padding at %zu is %g", what, i, got[i]);
        padding += !is_tensor[i];
    }
    EXPECT(padding > 0, "%s: no padding to check", what);
    free(is_tensor);
}

// Expects that each token of the batches has been counted for the experts that it takes, and
// entropies between none and those of even distributions.
static void expect_statistics(const Model* model) {
    const int E = model->cfg.E;
    for (int l = 0; l < model->cfg.L && E > 0; l++) {
        const double* of = router_statistics_of(model->results.statistics_on_host, l, E);
        double taken = 0;
        if (!model_layer_has(model->cfg, LAYERS_EXPERTS, l)) {
            continue;
        }
        for (int e = 0; e < E; e++) {
            taken += of[e];
        }
        EXPECT(taken == BATCHES * N * model->cfg.E_used, "layer %d: %g rows of experts", l, taken);
        EXPECT(of[E] > 0 && of[E] <= BATCHES * N * log(E) * (1 + 1e-5), "layer %d: entropy %g", l, of[E]);
    }
}

// Compares the logits of a sequence.
static void expect_logits(Model* model, CpuTrainer* reference, const int* tokens) {
    const float* want = cpu_trainer_logits(reference, tokens);
    double error = 0, size = 0;
    // one more token each time, with the keys and values of the earlier ones kept
    for (int t = 0; t < GENERATED; t++) {
        const float* got =
            t == 0 ? model_prefill(model, 0, tokens, 1) : model_decode(model, tokens + t, &t, 1);
        for (int v = 0; v < ODD.V; v++) {
            const double w = want[(size_t)t * ODD.Vp + v];
            error += (got[v] - w) * (got[v] - w);
            size += w * w;
        }
    }
    EXPECT_NEAR(sqrt(error / size), 0, tolerance(), "logits, token by token");
}

// Compares loss, logits and gradients with the CPU's.
static void test_against_cpu(Settings settings, const float* weights) {
    int tokens[BATCHES * N], targets[BATCHES * N];
    batch_tokens(tokens, targets);
    Model* model = test_open(settings, B, weights);
    CpuTrainer* reference = cpu_trainer_open(model->cfg, B, T, weights);
    const double loss = test_gradients(model, tokens, targets);
    EXPECT_NEAR(loss, cpu_both(reference, tokens, targets), tolerance(), "loss");
    expect_statistics(model);
    float* grads = gradients_on_host(model);
    expect_tensors("gradient", model, grads, cpu_trainer_grads(reference), tolerance());
    EXPECT_NEAR(gradient_norm(model) / cpu_trainer_norm(reference), 1, tolerance(), "norm");
    free(grads);

    expect_logits(model, reference, tokens);
    cpu_trainer_close(reference);
    test_close(model);
}

// Compares updates with the CPU's: losses and norms at every step, all parameters at the end.
static void test_adamw_steps(Settings settings, int steps, const float* weights, double tolerance) {
    int tokens[BATCHES * N], targets[BATCHES * N];
    batch_tokens(tokens, targets);
    Model* model = test_open(settings, B, weights);
    CpuTrainer* reference = cpu_trainer_open(model->cfg, B, T, weights);
    for (int t = 1; t <= steps; t++) {
        const double loss = test_gradients(model, tokens, targets);
        const double want = cpu_both(reference, tokens, targets), norm = cpu_trainer_norm(reference);
        Update update = {1e-3f,     0.9f, 0.95f,           1e-8f, 0.1f, (float)(1 / norm), t,
                         DECAY_ALL, 0,    ADAFACTOR_FIXED, 0,     0,    MUON_SPECTRAL};
        EXPECT_NEAR(loss / want, 1, tolerance, "loss of step %d", t);
        EXPECT_NEAR(gradient_norm(model) / norm, 1, 4 * tolerance, "norm of step %d", t);
        cpu_trainer_update(reference, update);
        update.grad_scale /= loss_scale();
        model_update(model, update);
    }
    float* params = parameters_on_host(model);
    expect_tensors("parameter", model, params, cpu_trainer_params(reference), 4 * tolerance);
    free(params);
    cpu_trainer_close(reference);
    test_close(model);
}

typedef struct {
    char* data;
    size_t bytes;
} Bits;

// Copies the gradients to the host, tensor by tensor; not of tensors that are never trained, which
// only ZeRO-3 has in its arrays. Returns their bytes.
static size_t copy_trained_gradients(char* out, const Model* model) {
    const Map* m = &model->map;
    const Gradient gradient = zero_gradient(&model->zero);
    size_t bytes = 0;
    for (int i = 0; i < m->num_shards; i++) {
        const Shard* s = &m->shards[i];
        if (map_has(m, s, MAP_REDUCED) && m->rows[s->tensor].kind != KIND_FIXED) {
            const size_t each = dtype_bytes(gradient.dtype), count = s->piece.count * each;
            CUDA_CHECK(cudaMemcpy(out + bytes, (char*)gradient.data + map_at(m, s, MAP_REDUCED) * each, count,
                                  cudaMemcpyDeviceToHost));
            bytes += count;
        }
    }
    return bytes;
}

// Returns the bits of the gradients, their norm and the losses after some updates, so that all
// values have been through memory once.
static Bits bits_after_updates(Settings settings, const float* weights) {
    int tokens[BATCHES * N], targets[BATCHES * N];
    batch_tokens(tokens, targets);
    Model* model = test_open(settings, B, weights);
    for (int t = 1; t <= UPDATES; t++) {
        test_gradients(model, tokens, targets);
        const Update update = {1e-3f,     0.9f, 0.95f,           1e-8f, 0.1f, 1 / loss_scale(), t,
                               DECAY_ALL, 0,    ADAFACTOR_FIXED, 0,     0,    MUON_SPECTRAL};
        model_update(model, update);
    }
    test_gradients(model, tokens, targets);
    const size_t room = model->map.totals.elements[MAP_SUMS] * sizeof(float),

                 result = step_result_bytes(BATCHES), statistics = model->results.statistics_bytes;
    char* data = (char*)check_alloc(room + result + statistics, 1, "gradients");
    const size_t bytes = copy_trained_gradients(data, model);
    const Bits bits = {data, bytes + result + statistics};
    memcpy(bits.data + bytes, model->results.on_host, result);
    if (statistics > 0) {
        memcpy(bits.data + bytes + result, model->results.statistics_on_host, statistics);
    }
    test_close(model);
    return bits;
}

static void expect_same_bits(const char* what, Bits want, Settings settings, const float* weights) {
    static int number = 0; // each test is a process
    if (!test_has_case(number++)) {
        return;
    }
    const Bits got = bits_after_updates(settings, weights);
    EXPECT(got.bytes == want.bytes && memcmp(got.data, want.data, want.bytes) == 0, "%s", what);
    free(got.data);
}

// Compares loss and gradients in fp8 with the CPU's. A number that the two put on different sides
// of the middle of two codes differs by a sixteenth: few do in fp32, some in a hundred with 16
// bits. Gradients without fp8 are 2 to 11 % away: in fp32 that shows.
static void test_fp8_against_cpu(Settings settings, const float* weights) {
    int tokens[BATCHES * N], targets[BATCHES * N];
    // of both passes, and of codes; and of a delta rule's factors, which are not in fp8
    const double near = 1e-2 + (model_mixer(config_of(settings)) == MIXER_DELTA ? 5 : 3) * tolerance();
    batch_tokens(tokens, targets);
    settings.fp8 = 1;
    Model* model = test_open(settings, B, weights);
    CpuTrainer* reference = cpu_trainer_open_fp8(model->cfg, B, T, weights);
    EXPECT_NEAR(test_gradients(model, tokens, targets), cpu_both(reference, tokens, targets), near,
                "fp8: loss");
    float* grads = gradients_on_host(model);
    expect_tensors("gradient in fp8", model, grads, cpu_trainer_grads(reference), near);
    free(grads);
    cpu_trainer_close(reference);
    test_close(model);
}

// Compares the bits of runs in fp8 with each other, and with autotune those of the faster ways.
static void test_fp8_bits(const float* weights) {
    Settings other = USUAL;
    const Bits without = bits_after_updates(other, weights);
    other.fp8 = 1;
    const Bits want = bits_after_updates(other, weights);
    EXPECT(memcmp(without.data, want.data, want.bytes) != 0, "fp8 has the bits of a run without");
    other.graph = "on";
    expect_same_bits("fp8 with graphs", want, other, weights);
    other.graph = "off";
    other.recompute = "3";
    other.gelu_fusion = "0";
    expect_same_bits("fp8, --recompute 3", want, other, weights);
    if (simulated) {
        other = USUAL;
        other.fp8 = 2;
        setenv("CUSIM_LT_FAST_FP8", "1", 1);
        expect_same_bits("fp8 wins all races", want, other, weights);
        setenv("CUSIM_LT_FAST_FP8", "0", 1);
        expect_same_bits("fp8 loses all races", without, other, weights);
        unsetenv("CUSIM_LT_FAST_FP8");
    }
    other = USUAL;
    other.fp8 = 1;
    other.zero = "2";
    const Bits divided = bits_after_updates(other, weights);
    other.zero = "3";
    expect_same_bits("fp8, --zero 3", divided, other, weights);
    free(divided.data);
    free(without.data);
    free(want.data);
}

static void test_same_bits(const float* weights) {
    Settings other = USUAL;
    Bits want = bits_after_updates(USUAL, weights);
    expect_same_bits("two runs", want, USUAL, weights);
    other.graph = "on";
    expect_same_bits("graph", want, other, weights);
    other.graph = "off";
    other.recompute = "3";
    expect_same_bits("--recompute 3", want, other, weights);
    other.offload_residuals = 1;
    expect_same_bits("--recompute 3 --offload-residuals on", want, other, weights);
    other.offload_residuals = 0;
    other.recompute = "mlp";
    expect_same_bits("--recompute mlp", want, other, weights);
    free(want.data);

    other.recompute = "1";
    want = bits_after_updates(other, weights);
    other.recompute = "2";
    expect_same_bits("--recompute 1 and 2", want, other, weights);
    free(want.data);

    other.recompute = "0";
    other.gelu_fusion = "0";
    want = bits_after_updates(other, weights);
    for (int level = RECOMPUTE_ACTIVATION; level <= RECOMPUTE_BLOCK; level++) {
        other.recompute = model_recompute_word(level);
        other.graph = level == RECOMPUTE_NORMS ? "on" : "off";
        expect_same_bits("--gelu-fusion 0 --recompute 1, 2, mlp, 3", want, other, weights);
    }
    free(want.data);

    other = USUAL;
    other.zero = "2";
    want = bits_after_updates(other, weights);
    other.graph = "on";
    expect_same_bits("--zero 2 with graphs", want, other, weights);
    other.zero = "3";
    expect_same_bits("--zero 3 with graphs", want, other, weights);
    other.graph = "off";
    other.recompute = "3";
    expect_same_bits("--zero 3 --recompute 3", want, other, weights);
    free(want.data);
}

// Tests that a model with experts has the same bits with graphs, at every level of recomputation,
// and with its state divided.
static void test_same_bits_of_experts(const ModelConfig* cfg) {
    float* weights = first_weights(*cfg);
    Settings other = USUAL;
    other.cfg = cfg;
    Bits want = bits_after_updates(other, weights);
    other.graph = "on";
    expect_same_bits("experts: graph", want, other, weights);
    other.graph = "off";
    for (int level = RECOMPUTE_ACTIVATION; level <= RECOMPUTE_BLOCK; level++) {
        other.recompute = model_recompute_word(level);
        expect_same_bits("experts: --recompute 1, 2, mlp, 3", want, other, weights);
    }
    other.offload_residuals = 1;
    expect_same_bits("experts: --recompute 3 --offload-residuals on", want, other, weights);
    free(want.data);
    other = USUAL;
    other.cfg = cfg;
    other.zero = "2";
    want = bits_after_updates(other, weights);
    other.zero = "3";
    other.graph = "on";
    expect_same_bits("experts: --zero 3 with graphs", want, other, weights);
    free(want.data);
    free(weights);
}

// Returns the gradient of this model's update, on the host, as fp32; zero where it has none.
static float* gradient_on_host(Model* model) {
    const Map* m = &model->map;
    const MapSpace space = map_update_space(m);
    const Gradient gradient = zero_update_gradient(&model->zero);
    TensorRow rows[MODEL_PARAMETER_ROWS];
    float* values = (float*)check_alloc(rows_on_host(rows, model->cfg), 1, "gradient");
    zero_wait_for_gradient(&model->zero);
    for (int i = 0; i < m->num_shards; i++) {
        const Shard* s = &m->shards[i];
        const size_t bytes = dtype_bytes(gradient.dtype);
        if (map_has(m, s, space)) {
            char* raw = (char*)check_alloc(s->piece.count, bytes, "gradient");
            gpu_copy(raw, (char*)gradient.data + map_at(m, s, space) * bytes, s->piece.count * bytes,
                     &model->gpu);
            float* to = shard_on_host(model, s, values);
            for (size_t e = 0; e < s->piece.count; e++) {
                to[e] = gradient.dtype == DTYPE_FP32 ? ((float*)raw)[e] : to_float(((floatX*)raw)[e]);
            }
            free(raw);
        }
    }
    return values;
}

// Expects gradients of trained parameters to have the bits of the whole model's, and an update to
// change these parameters only. On a real GPU gradients may only be near: without the gradient of
// a bias cublasLt may choose another algorithm.
static void test_freeze(Settings settings, const char* list, const float* weights) {
    int tokens[BATCHES * N], targets[BATCHES * N];
    batch_tokens(tokens, targets);
    Model* whole = test_open(settings, B, weights);
    settings.freeze = list;
    Model* model = test_open(settings, B, weights);
    test_gradients(whole, tokens, targets);
    test_gradients(model, tokens, targets);
    float *want = gradient_on_host(whole), *got = gradient_on_host(model),
          *before = parameters_on_host(model);
    const Update update = {1e-1f,     0.9f, 0.95f,           1e-8f, 0.1f, 1 / loss_scale(), 1,
                           DECAY_ALL, 0,    ADAFACTOR_FIXED, 0,     0,    MUON_SPECTRAL};
    model_update(model, update);
    float* after = parameters_on_host(model);
    TensorRow rows[MODEL_PARAMETER_ROWS];
    rows_on_host(rows, model->cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = 0; l < rows[i].layers; l++) {
            const int is_frozen = freeze_has(&model->freeze, i, l);
            const size_t at = (rows[i].offset_bytes + (size_t)l * rows[i].layer_bytes) / sizeof(float),
                         count = tensor_layer_elements(&rows[i]);
            size_t different = 0, changed = 0;
            double error = 0, size = 0;
            for (size_t k = at; k < at + count; k++) {
                const float w = is_frozen ? 0 : want[k];
                different += got[k] != w;
                error += is_key_bias(model, i, k - at) ? 0 : pow(got[k] - w, 2);
                size += pow(w, 2);
                changed += after[k] != before[k];
            }
            const int is_near = !simulated && !is_frozen && sqrt(error) <= tolerance() * sqrt(size);
            EXPECT(different == 0 || is_near, "--freeze %s: %zu gradients of %s, layer %d", list, different,
                   rows[i].name, l);
            EXPECT((changed > 0) == !is_frozen, "--freeze %s: %zu of %s, layer %d, have changed", list,
                   changed, rows[i].name, l);
        }
    }
    free(after);
    free(before);
    free(got);
    free(want);
    test_close(model);
    test_close(whole);
}

static int plans_with(const Model* model, int epilogue) {
    int count = 0;
    for (int i = 0; i < model->matmul.plans_count; i++) {
        count += model->matmul.plans[i].key.epilogue == epilogue && !model->matmul.plans[i].refused;
    }
    return count;
}

// Expects GELU's derivative inside the matmul at all levels, with the gradient of the bias if that
// has the type of the weights; GELU itself where it is not recomputed; neither in fp32.
static void test_fusion(const float* weights) {
    const int fuses = DTYPE_OF(floatX) != DTYPE_FP32;
    int tokens[BATCHES * N], targets[BATCHES * N];
    batch_tokens(tokens, targets);
    for (int level = RECOMPUTE_ACTIVATION; level <= RECOMPUTE_BLOCK;
         level += RECOMPUTE_BLOCK - RECOMPUTE_ACTIVATION) {
        Settings settings = USUAL;
        settings.recompute = model_recompute_word(level);
        settings.gradients = level == RECOMPUTE_BLOCK ? "fp32" : "model";
        Model* model = test_open(settings, B, weights);
        test_gradients(model, tokens, targets);
        const int forward = plans_with(model, CUBLASLT_EPILOGUE_GELU_AUX_BIAS) > 0,
                  backward = plans_with(model, CUBLASLT_EPILOGUE_DGELU) > 0,
                  bias = plans_with(model, CUBLASLT_EPILOGUE_DGELU_BGRAD) > 0;
        const int again = level == RECOMPUTE_BLOCK;
        EXPECT(forward == (fuses && again) && backward == (fuses && again) && bias == (fuses && !again),
               "--recompute %s: GELU in the matmul: %d, its derivative: %d, with the bias: %d",
               settings.recompute, forward, backward, bias);
        test_close(model);
    }
}

// Expects whole runs with default options, which measure, to have the same bits at levels 0, mlp
// and 3, and at levels 1 and 2; in fp32 at all levels.
static void test_levels(void) {
    char line[512], out[256];
    uint64_t sum[RECOMPUTE_NEVER];
    setenv("XDG_CACHE_HOME", test_path("cache"), 1);
    for (int level = 0; level < RECOMPUTE_NEVER; level++) {
        snprintf(out, sizeof(out), "%s%d", test_path("level"), level);
        snprintf(line, sizeof(line),
                 "--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --total-batch 64 --steps 2 "
                 "--eval-every 0 --samples 0 --recompute %s --out %s",
                 model_recompute_word(level), out);
        EXPECT(resume_run_(line) == 0, "%s", line);
        snprintf(line, sizeof(line), "%s/step_00000002", out);
        SavedState state = resume_state_(line);
        sum[level] = resume_checksum_(&state, "model.safetensors");
        state_close(&state);
    }
    EXPECT(sum[RECOMPUTE_NONE] == sum[RECOMPUTE_BLOCK] && sum[RECOMPUTE_NONE] == sum[RECOMPUTE_MLP] &&
               sum[RECOMPUTE_ACTIVATION] == sum[RECOMPUTE_NORMS],
           "levels 0, mlp and 3, or 1 and 2, differ");
    EXPECT(DTYPE_OF(floatX) != DTYPE_FP32 || sum[RECOMPUTE_NONE] == sum[RECOMPUTE_ACTIVATION],
           "levels 0 and 1 differ in fp32");
    unsetenv("XDG_CACHE_HOME");
}

// Returns the checksum of a model of a few updates in micro-batches of 32 tokens.
static uint64_t trained_checksum(const char* options, const char* name) {
    char line[512], path[256];
    snprintf(line, sizeof(line),
             "--layers 1 --channels 16 --heads 2 --context 16 --total-batch 96 --shuffle off --steps 5 "
             "--eval-every 0 --samples 0 --autotune off %s --out %s",
             options, test_path(name));
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(path, sizeof(path), "%s/step_00000005", test_path(name));
    SavedState state = resume_state_(path);
    const uint64_t sum = resume_checksum_(&state, "model.safetensors");
    state_close(&state);
    return sum;
}

// Expects a stage of short sequences to have the bits of a run without others, and graphs those of
// a run without them where a stage changes.
static void test_lengths(void) {
    const uint64_t cut = trained_checksum("--batch 2 --seq-len-schedule 0:4,9:16", "cut"),
                   short_ones = trained_checksum("--batch 8 --seq-len 4", "short"),
                   graphs = trained_checksum(
                       "--batch 2 --seq-len-schedule 0:4,2:8,4:16 --doc-mask on --graph on", "graphs"),
                   none = trained_checksum(
                       "--batch 2 --seq-len-schedule 0:4,2:8,4:16 --doc-mask on --graph off", "launches");
    EXPECT(cut == short_ones, "sequences of 4 tokens, cut from 16");
    EXPECT(graphs == none, "stages with graphs");
    static const char* const windows[] = {
        "--arch qwen3 --batch 2 --seq-len 16 --window-schedule 0:3,2:5,4:9 --graph on",
        "--arch qwen3 --batch 2 --seq-len 16 --window-schedule 0:3,2:5,4:9 --graph off"};
    EXPECT(trained_checksum(windows[0], "w_graphs") == trained_checksum(windows[1], "w_launches"),
           "windows with graphs");
}

// Expects the same sums from the same batch in other micro-batches, up to their order.
static void test_micro_batches(const float* weights) {
    int tokens[BATCHES * N], targets[BATCHES * N];
    batch_tokens(tokens, targets);
    Settings settings = USUAL;
    settings.gradients = "fp32";
    Model *one = test_open(settings, 1, weights), *two = test_open(settings, B, weights);
    const double loss = test_gradients(one, tokens, targets);
    EXPECT_NEAR(loss, test_gradients(two, tokens, targets), tolerance(), "loss");
    float *grads = gradients_on_host(one), *want = gradients_on_host(two);
    expect_tensors("gradient, micro-batches of 1", one, grads, want, tolerance());
    free(want);
    free(grads);
    test_close(two);
    test_close(one);
}

// Tests layers that share parameters against the CPU's.
static void test_share(const char* share) {
    Settings settings = USUAL;
    settings.share = share;
    float* weights = first_weights(config_of(settings));
    const int is_loop = share_is_loop(config_of(settings)); // setup_check_share
    test_against_cpu(settings, weights);
    settings.gradients = "fp32";
    settings.zero = is_loop ? "1" : "3";
    test_adamw_steps(settings, 2, weights, tolerance());
    free(weights);
}

// Tests layers that share parameters: the bits of all stages, with and without graphs.
static void test_share_bits(const char* share) {
    Settings settings = USUAL;
    settings.share = share;
    float* weights = first_weights(config_of(settings));
    settings.gradients = "fp32";
    settings.zero = "3";
    const Bits want = bits_after_updates(settings, weights);
    settings.graph = "on";
    settings.recompute = "3";
    expect_same_bits("--share-layers, graphs", want, settings, weights);
    settings.zero = "2";
    expect_same_bits("--share-layers, --zero 2", want, settings, weights);
    free(want.data);
    free(weights);
}

// Sets documents of a few tokens each, and some targets that do not count.
static void document_batch(int tokens[BATCHES * N], int targets[BATCHES * N], int starts[BATCHES * N]) {
    Rand rng = rand_open(5, 2);
    batch_tokens(tokens, targets);
    for (int i = 0; i < BATCHES * N; i++) {
        starts[i] = i % T == 0 ? 0 : rand_below(&rng, 5) == 0 ? i % T : starts[i - 1];
        targets[i] = rand_below(&rng, 4) == 0 ? NO_TARGET : targets[i];
    }
}

static void expect_like_reference(const char* what, const Model* model, CpuTrainer* reference) {
    float* grads = gradients_on_host(model);
    expect_tensors(what, model, grads, cpu_trainer_grads(reference), tolerance());
    EXPECT_NEAR(gradient_norm(model) / cpu_trainer_norm(reference), 1, tolerance(), "%s: norm", what);
    free(grads);
}

// Compares loss and gradients with documents and padding; in the third pass, the second one with
// graphs, without documents.
static void test_documents(Settings settings, int passes, const float* weights) {
    int tokens[BATCHES * N], targets[BATCHES * N], starts[BATCHES * N];
    document_batch(tokens, targets, starts);
    Model* model = test_open(settings, B, weights);
    CpuTrainer* reference = cpu_trainer_open(model->cfg, B, T, weights);
    for (int pass = 0; pass < passes; pass++) {
        const int* documents = pass == 2 ? NULL : starts;
        EXPECT_NEAR(document_gradients(model, tokens, targets, documents),
                    cpu_documents(reference, tokens, targets, documents), tolerance(), "loss, pass %d", pass);
        expect_like_reference("gradient with documents", model, reference);
    }
    cpu_trainer_close(reference);
    test_close(model);
}

// Tests micro-steps of shorter or fewer sequences between full ones, which are graphs; the first
// one is smaller, too.
static void test_smaller_batch(Settings settings, const float* weights) {
    const int lengths[MICRO_STEPS] = {12, T, T, 1, T}, rows[MICRO_STEPS] = {B, B, B, B, B - 1};
    const int loss_tokens = MICRO_STEPS * N;
    int tokens[BATCHES * N], targets[BATCHES * N], starts[BATCHES * N];
    document_batch(tokens, targets, starts);
    Model* model = test_open(settings, B, weights);
    CpuTrainer* reference = cpu_trainer_open(model->cfg, B, T, weights);
    step_results_clear(&model->results);
    for (int micro = 0; micro < MICRO_STEPS; micro++) {
        const int length = lengths[micro];
        const MicroStep step = {micro, 1, 1, micro == MICRO_STEPS - 1};
        const Batch batch = {tokens, targets, NULL, rows[micro], length, rows[micro] * length};
        micro_step_backward(model, model_push(model, batch), loss_scale() / loss_tokens, step, NULL,
                            batch.B == model->B && batch.T == T);
    }
    losses_of_update(model, MICRO_STEPS);
    for (int micro = 0; micro < MICRO_STEPS; micro++) {
        const double want =
            cpu_trainer_gradients(reference, tokens, targets, NULL, rows[micro], lengths[micro], loss_tokens,
                                  micro == 0 ? GRADIENT_SET : GRADIENT_ADD);
        EXPECT_NEAR(model->results.on_host->losses[micro], want, N * tolerance(), "losses of micro-step %d",
                    micro);
    }
    expect_like_reference("gradient of smaller batches", model, reference);
    cpu_trainer_close(reference);
    test_close(model);
}

// Tests the forward pass alone, with some targets that do not count, and a last batch that is
// empty, with room for `room` losses at a time. It runs twice: a validation leaves nothing behind,
// even one that was stopped.
static void test_evaluate(const float* weights, int room) {
    int tokens[BATCHES * N], targets[BATCHES * N], starts[BATCHES * N];
    document_batch(tokens, targets, starts);
    Model* model = test_open(USUAL, B, weights);
    CpuTrainer* reference = cpu_trainer_open(model->cfg, B, T, weights);
    double losses[B + 1] = {0};
    model->results.max_losses = room;
    for (int time = 0; time < 2; time++) {
        step_results_clear(&model->results);
        for (int i = 0; i <= B; i++) {
            const Batch batch = {tokens, targets, starts, B - i, T, (B - i) * T};
            evaluate_batch(model, batch, losses + i);
            if (time == 0 && i == 1) {
                break; // stopped
            }
        }
    }
    step_results_collect(&model->results, losses + B);
    for (int i = 0; i < B; i++) {
        const double want =
            cpu_trainer_gradients(reference, tokens, targets, starts, B - i, T, N, GRADIENT_SET);
        EXPECT_NEAR(losses[i], want, N * tolerance(), "validation of %d sequences, %d at a time", B - i,
                    room);
    }
    EXPECT(losses[B] == 0, "an empty batch has a loss of %g", losses[B]);
    cpu_trainer_close(reference);
    test_close(model);
}

// ---- generation ----

enum { SEQUENCES = 3, DECODE_STEPS = 4, DECODE_VP = 128 };
static const int prompt_lengths[SEQUENCES] = {1, 9, 4}; // of the prompts
typedef struct {
    float of[DECODE_STEPS][SEQUENCES * DECODE_VP];
} DecodeLogits;

static Model* decode_open(ModelConfig cfg, int graph, Quantize quantize) {
    Model* model = (Model*)check_alloc(1, sizeof(Model), "model");
    Options options = options_of(USUAL, SEQUENCES);
    static Comm alone;
    alone.size = 1;
    options.memory.graph = graph;
    options.texts.quantize = quantize;
    const Settled s = settled_alone(&options, cfg, USE_GENERATE, gpu_setup_dtype());
    model_open(model, &s, memory_on_gpu(), &alone);
    EXPECT(!model->grads_memory && !model->state.memory, "generation has gradients");
    return model;
}

// Sets the logits of some steps after the prompts, all sequences at their own positions.
static void decode_logits(Model* model, const int* tokens, DecodeLogits* logits) {
    for (int b = 0; b < SEQUENCES; b++) {
        model_prefill(model, b, tokens + b * T, prompt_lengths[b]);
    }
    for (int step = 0; step < DECODE_STEPS; step++) {
        int ids[SEQUENCES], positions[SEQUENCES];
        for (int b = 0; b < SEQUENCES; b++) {
            positions[b] = prompt_lengths[b] + step;
            ids[b] = tokens[b * T + positions[b]];
        }
        memcpy(logits->of[step], model_decode(model, ids, positions, SEQUENCES), sizeof(logits->of[0]));
    }
}

static void expect_reference_logits(const char* what, ModelConfig cfg, const float* weights,
                                    const int* tokens, const DecodeLogits* logits) {
    CpuTrainer* reference = cpu_trainer_open(cfg, SEQUENCES, T, weights);
    const float* want = cpu_trainer_logits(reference, tokens);
    double error = 0, size = 0;
    for (int i = 0; i < DECODE_STEPS * SEQUENCES * cfg.V; i++) {
        const int v = i % cfg.V, b = i / cfg.V % SEQUENCES, step = i / cfg.V / SEQUENCES;
        const double w = want[((size_t)b * T + prompt_lengths[b] + step) * cfg.Vp + v];
        const double d = logits->of[step][b * cfg.Vp + v] - w;
        error += d * d;
        size += w * w;
    }
    EXPECT_NEAR(sqrt(error / size), 0, tolerance(), "%s", what);
    cpu_trainer_close(reference);
}

// Tests a model that has only weights: the reference's logits, and the same bits with a graph.
static void test_decode(ModelConfig cfg, const float* weights) {
    static DecodeLogits logits[2];
    int tokens[BATCHES * N], targets[BATCHES * N];
    batch_tokens(tokens, targets);
    for (int graph = 0; graph < 2; graph++) {
        Model* model = decode_open(cfg, graph, QUANTIZE_OFF);
        upload_weights(model, weights);
        decode_logits(model, tokens, &logits[graph]);
        EXPECT(!model->decoder.queue.step == !graph, "a graph");
        test_close(model);
    }
    EXPECT(memcmp(&logits[0], &logits[1], sizeof(logits[0])) == 0, "a graph has other bits");
    expect_reference_logits("logits of sequences", cfg, weights, tokens, &logits[0]);
}

// Returns random weights, every 32 of them the values of a block.
static float* quantized_weights(const TensorRow* rows, size_t bytes, ModelConfig cfg) {
    float* values = (float*)check_alloc(bytes, 1, "weights");
    for (int g = 0; g < model_groups(cfg); g++) {
        model_random_group(rows, cfg, 7, g, (char*)values + tensor_group_offset_bytes(rows, g));
    }
    for (size_t i = 0; i < bytes / sizeof(float); i += QUANTIZED_BLOCK) {
        QuantizedBlock block;
        quantized_encode(&block, values + i, QUANTIZED_BLOCK);
        quantized_decode(values + i, &block, QUANTIZED_BLOCK);
    }
    return values;
}

static void upload_quantized(Model* model, const TensorRow* rows, const float* weights) {
    for (int g = 0; g < model_groups(model->cfg); g++) {
        const char* group = (const char*)weights + tensor_group_offset_bytes(rows, g);
        transfer_upload_group(&model->transfer, g, (const float*)(const void*)group);
    }
}

// Tests generation with 8-bit matrices: the logits of the blocks' values. Some prompts have more
// rows than q8_matmul accepts, some fewer.
static void test_quantized_decode(ModelConfig cfg) {
    static DecodeLogits logits;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    int tokens[BATCHES * N], targets[BATCHES * N];
    float* weights = quantized_weights(rows, model_parameter_rows_of(rows, cfg, sizeof(float)), cfg);
    Model* model = decode_open(cfg, 1, QUANTIZE_Q8_0);
    batch_tokens(tokens, targets);
    upload_quantized(model, rows, weights);
    decode_logits(model, tokens, &logits);
    expect_reference_logits("logits of sequences in 8 bits", cfg, weights, tokens, &logits);
    test_close(model);
    free(weights);
}

// Tests the losses of a model that only evaluates, with 8-bit matrices: those of the blocks'
// values.
static void test_quantized_evaluate(void) {
    const ModelConfig cfg = {17, 51, DECODE_VP, 2, 2, 64, SHARE_OFF};
    static Comm alone;
    Options options = options_of(USUAL, B);
    TensorRow rows[MODEL_PARAMETER_ROWS];
    int tokens[BATCHES * N], targets[BATCHES * N], starts[BATCHES * N];
    float* weights = quantized_weights(rows, model_parameter_rows_of(rows, cfg, sizeof(float)), cfg);
    Model* model = (Model*)check_alloc(1, sizeof(Model), "model");
    alone.size = 1;
    options.texts.quantize = QUANTIZE_Q8_0;
    const Settled s = settled_alone(&options, cfg, USE_EVALUATE, gpu_setup_dtype());
    model_open(model, &s, memory_on_gpu(), &alone);
    upload_quantized(model, rows, weights);
    CpuTrainer* reference = cpu_trainer_open(cfg, B, T, weights);
    document_batch(tokens, targets, starts);
    const Batch batch = {tokens, targets, starts, B, T, N};
    const double want = cpu_trainer_gradients(reference, tokens, targets, starts, B, T, N, GRADIENT_SET);
    double loss;
    evaluate_batch(model, batch, &loss);
    step_results_collect(&model->results, &loss + 1);
    EXPECT_NEAR(loss, want, N * tolerance(), "losses in 8 bits");
    cpu_trainer_close(reference);
    test_close(model);
    free(weights);
}

// Expects no reduction in the graphs of micro-steps, as no block has gradients, whether the
// backward pass reaches the blocks or not.
static void test_frozen_blocks(void) {
    static const char* const lists[] = {"embeddings,blocks", "blocks"};
    for (int i = 0; i < 2; i++) {
        char line[256];
        snprintf(line, sizeof(line),
                 "--layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 --total-batch 64 --steps 3 "
                 "--eval-every 0 --samples 0 --autotune off --zero 2 --freeze %s",
                 lists[i]);
        EXPECT(resume_run_(line) == 0, "%s", line);
    }
}

// Expects a model to allocate what was planned, on the GPU and on the host.
static void test_plan(void) {
    for (int k = 0; k < PLAN_TEST_RUNS; k++) {
        ModelPlan planned;
        Comm comm = {};
        Model model;
        const Settled s = plan_test_run(k, options_program(OPTION_GPU), gpu_setup_dtype());
        plan_of_model(&planned, &s);
        comm.size = 1;
        plan_test_count();
        model_open(&model, &s, memory_on_gpu(), &comm);
        const size_t device = gpu_now_bytes(), host = plan_test_counted();
        model_close(&model);
        plan_test_compare(k, &planned.memory, &model.memory, MEMORY_DEVICE, device);
        plan_test_compare(k, &planned.memory, &model.memory, MEMORY_HOST, host);
    }
    EXPECT(gpu_now_bytes() == 0, "%zu bytes on the GPU were not freed", gpu_now_bytes());
}

// Optimizers to test with updates during the backward pass. The last three of all share AdamW's
// kernel.
static const char* const in_backward_optimizers[] = {"adamw",     "adafactor", "muon", "soap",
#ifdef PRECISION_BF16
                                                     "adamw8bit", "lion",      "sgd",
#endif
                                                     NULL};

// Tests an architecture against the CPU's, with whole blocks recomputed, which runs the kernels of
// all levels, and in a run that only generates.
static void test_architecture(const ModelConfig* cfg) {
    Settings settings = USUAL;
    settings.cfg = cfg;
    settings.recompute = "3";
    float* weights = first_weights(*cfg);
    test_against_cpu(settings, weights);
    test_decode(*cfg, weights);
    if (model_mixer(*cfg) != MIXER_NONE) {
        test_documents(settings, 1, weights);
    }
    free(weights);
}

// Tests that whole blocks recomputed have the bits of blocks that are kept.
static void test_architecture_bits(const ModelConfig* cfg) {
    Settings settings = USUAL;
    settings.cfg = cfg;
    float* weights = first_weights(*cfg);
    const Bits want = bits_after_updates(settings, weights);
    settings.recompute = "3";
    expect_same_bits("--recompute 3 of an architecture", want, settings, weights);
    free(want.data);
    free(weights);
}

static const char* const shares[] = {"all", "pairs", "loop:2"};
enum { SHARES = sizeof(shares) / sizeof(shares[0]) };

// Comes first in each test.
static void prepare(void) {
    // free overwrites: what an asynchronous copy has yet to read is gone, so a forgotten wait
    // shows.
    mallopt(M_PERTURB, 0xAA);
    unsetenv("HOME"); // no cache: a resumed run has only the checkpoint in common with the first
    unsetenv("XDG_CACHE_HOME");
}

// ---- composition: every operation of a model once, at the smallest sizes, against the CPU's ----

TEST(composition_gpt2) {
    prepare();
    float* weights = first_weights(ODD);
    Settings settings = USUAL;
    test_against_cpu(settings, weights);
    settings.gelu_fusion = "0";
    settings.recompute = "1";
    settings.gradients = "fp32";
    test_against_cpu(settings, weights);
    settings.recompute = "3";
    settings.gelu_fusion = "2";
    test_against_cpu(settings, weights);
    test_fusion(weights);
    free(weights);
}

TEST(composition_fp8) {
    prepare();
    float* weights = first_weights(ODD);
    Settings settings = USUAL;
    test_fp8_against_cpu(settings, weights);
    settings.gradients = "fp32";
    settings.recompute = "3";
    test_fp8_against_cpu(settings, weights);
    ModelConfig llama = arch_config(ARCH_LLAMA, 2, 4, 2, 16, 80);
    float* weights_of_llama = first_weights(llama);
    settings = USUAL;
    settings.cfg = &llama;
    test_fp8_against_cpu(settings, weights_of_llama);
    free(weights_of_llama);
    ModelConfig archs[ARCHS], hybrid;
    set_archs(archs);
    hybrid = archs[HYBRID];
    hybrid.F = 80;
    float* weights_of_hybrid = first_weights(hybrid);
    settings.cfg = &hybrid;
    test_fp8_against_cpu(settings, weights_of_hybrid);
    free(weights_of_hybrid);
    free(weights);
}

TEST(composition_batches) {
    prepare();
    float* weights = first_weights(ODD);
    Settings settings = USUAL;
    settings.recompute = "3";
    settings.gelu_fusion = "1";  // the gradient of the bias by itself
    settings.gradients = "fp32"; // sums of several micro-steps are compared
    test_documents(settings, 1, weights);
    settings = USUAL;
    settings.graph = "on";
    settings.gradients = "fp32";
    test_documents(settings, 3, weights);
    test_smaller_batch(settings, weights);
    test_micro_batches(weights);
    test_evaluate(weights, 1);
    test_evaluate(weights, B);
    test_evaluate(weights, 2 * B + 1);
    free(weights);
}

TEST(composition_generation) {
    prepare();
    float* weights = first_weights(ODD);
    test_decode(ODD, weights);
    free(weights);
    ModelConfig quantized = {17, 51, DECODE_VP, 2, 2, 64, SHARE_OFF};
    test_quantized_decode(quantized);
    quantized.arch = ARCH_GLM4MOE, quantized.F = 96, quantized.Fs = 32;
    quantized.E = 5, quantized.E_used = 2;
    test_quantized_decode(quantized);
    quantized.arch = ARCH_DEEPSEEK3, quantized.HS = 32, quantized.rope_dims = 8;
    quantized.latent = {32, 64, 16, 0};
    test_quantized_decode(quantized);
    quantized.HS = quantized.rope_dims = 0;
    quantized.arch = ARCH_QWEN35, quantized.E = quantized.E_used = quantized.Fs = 0;
    quantized.mixed[0] = 1;
    quantized.mixer = {4, 2, 4, 16, 8};
    test_quantized_decode(quantized);
    test_quantized_evaluate();
}

TEST(composition_updates) {
    prepare();
    float* weights = first_weights(ODD);
    Settings settings = USUAL;
    test_adamw_steps(USUAL, 10, weights, tolerance());
    // stochastic rounding of every update: a random walk in the weights
    if (sizeof(floatX) < sizeof(float)) {
        settings.master_weights = "off";
        settings.zero = "3";
        test_adamw_steps(settings, 3, weights, 2 * tolerance());
    }
    if (DTYPE_OF(floatX) == DTYPE_BF16) {
        settings = USUAL;
        settings.master_weights = "24";
        test_adamw_steps(settings, 3, weights, tolerance());
    }
    settings = USUAL;
    settings.zero = "2";
    test_adamw_steps(settings, 3, weights, tolerance());
    free(weights);
}

TEST(composition_architectures) {
    prepare();
    ModelConfig archs[ARCHS];
    set_archs(archs);
    for (int i = 0; i < ARCHS; i++) {
        test_architecture(&archs[i]);
    }
}

TEST(composition_shares) {
    prepare();
    for (int i = 0; i < SHARES; i++) {
        test_share(shares[i]);
    }
}

TEST(composition_tasks) {
    prepare();
    test_task_losses(memory_on_gpu(),
                     "--device 0 --logits-chunk 50 --tf32 off --autotune off --master-weights off",
                     tolerance());
}

// Runs with graphs, checkpoints, validations, samples and frozen parameters, one of them resumed.
TEST(composition_runs) {
    prepare();
    char line[1024], whole[256], again[256];
    const char* out = test_path("run");
    snprintf(line, sizeof(line),
             "--layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 --total-batch 64 --steps 3 --lr 0.01 "
             "--eval-every 2 --eval-batches 1 --samples 1 --sample-every 2 --sample-tokens 2 --save-every 2 "
             "--zero 2 --freeze wpe,attention[0] --autotune off --graph on --out %s/a",
             out);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(line, sizeof(line), "--resume %s/a/step_00000002 --zero 2 --graph on --out %s/b", out, out);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(whole, sizeof(whole), "%s/a/step_00000003", out);
    snprintf(again, sizeof(again), "%s/b/step_00000003", out);
    resume_expect_same_(whole, again, line);
    if (DTYPE_OF(floatX) != DTYPE_FP16) { // its loss scale needs the whole gradient first
        in_backward_resume_("--autotune off --recompute 3 --offload-residuals on");
    }
}

// ---- settings, frozen parameters, resumed runs: plain only ----

TEST(settings) {
    prepare();
    float* weights = first_weights(ODD);
    test_same_bits(weights);
    free(weights);
}

TEST(settings_fp8) {
    prepare();
    float* weights = first_weights(ODD);
    test_fp8_bits(weights);
    free(weights);
}

TEST(settings_of_architectures) {
    prepare();
    ModelConfig archs[ARCHS];
    set_archs(archs);
    for (int i = 0; i < ARCHS; i++) {
        if (!test_has_case(i)) {
            continue;
        }
        if (archs[i].arch == ARCH_MIXTRAL || archs[i].arch == ARCH_GLM4MOE) { // both routers
            test_same_bits_of_experts(&archs[i]);
        } else {
            test_architecture_bits(&archs[i]);
        }
    }
}

TEST(settings_of_shares) {
    prepare();
    for (int i = 0; i < SHARES - 1; i++) { // a loop has no stages above 1
        test_share_bits(shares[i]);
    }
}

TEST(settings_plan) {
    prepare();
    test_plan();
}

TEST(settings_levels) {
    prepare();
    test_levels();
}

TEST(settings_lengths) {
    prepare();
    test_lengths();
}

TEST(settings_in_backward) {
    prepare();
    if (DTYPE_OF(floatX) != DTYPE_FP16) { // its loss scale needs the whole gradient first
        test_in_backward(in_backward_optimizers, "--autotune off --recompute 3");
        in_backward_same_bits_(3, "--autotune off --freeze blocks[0],mlp --optimizer muon");
        in_backward_same_bits_(3, "--autotune off --freeze embeddings,blocks[0-1] --optimizer adafactor");
        in_backward_same_bits_(3, "--autotune off --freeze embeddings,lnf?,norms[0]");
        in_backward_same_bits_(3, "--autotune off --share-layers all");
        in_backward_same_bits_(6, "--autotune off --share-layers pairs");
    }
}

TEST(freeze) {
    prepare();
    float* weights = first_weights(ODD);
    Settings settings = USUAL;
    test_freeze(USUAL, "embeddings,blocks[0]", weights);
    test_freeze(USUAL, "wte,*b[1-2],fcprojw", weights);
    settings.graph = "on";
    settings.recompute = "3";
    test_freeze(settings, "attention[0],mlp[1],wpe,blocks[2]", weights);
    settings.zero = "2";
    test_freeze(settings, "blocks[0],mlp,ln1w,embeddings", weights);
    test_freeze(settings, "embeddings,lnf?,attention[1]", weights);
    test_frozen_blocks();
    free(weights);
}

TEST(resume_usual) {
    prepare();
    test_resume("");
}

TEST(resume_optimizers) {
    prepare();
    test_resume("--autotune off --optimizer adafactor --freeze embeddings,blocks[0]");
    test_resume("--autotune off --optimizer muon --muon-rows on --cautious-decay on");
    test_resume("--autotune off --optimizer soap --soap-every 2");
    if (sizeof(floatX) < sizeof(float)) {
        test_resume("--autotune off --master-weights off");
    }
    if (DTYPE_OF(floatX) == DTYPE_BF16) {
        test_resume("--autotune off --master-weights 24");
    }
}
