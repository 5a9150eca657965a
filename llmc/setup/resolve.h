/*
resolve.h -- from the command line to a run: which model, and a value for every "auto" beside the data (run_data.h).

The model is a name, a file of llm.c's, a Hugging Face directory (a checkpoint is one), or the sizes on the command line;
a size on the command line replaces the one that a name stands for, but must agree with a file. A model and a tokenizer
with vocabularies of different sizes are refused, as they do not mean the same tokens. Everything is checked here and in conflicts.h, before any memory for the
model is taken.
*/
#ifndef LLMC_RESOLVE_H
#define LLMC_RESOLVE_H

#include <limits.h>
#include <stdint.h>

#include "llmc/model/presets.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sizes of a new model without a name, and of the run with it: they train on a laptop in minutes.
enum {
    SETUP_LAYERS = 2,
    SETUP_CHANNELS = 128,
    SETUP_HEADS = 4,
    SETUP_CONTEXT = 128,
    SETUP_BATCH_TOKENS = 1024, // of a micro-batch
    SETUP_FULL_BATCH =
        524288, // tokens of an update of GPT-3 125M and of llm.c's runs, for which rates are published
    SETUP_TEXTS_CPU = 8,  // at a time, of --prompts
    SETUP_TEXTS_GPU = 32, //
};

// ---- the model ----

// The sizes of this model; zeros without one. A model that is not GPT-2 ends the program, before
// anything is said about its tokens.
ModelConfig setup_read_model(const char* path);

// Returns the fields of its config.json that only others read, to be saved with it (hf_config_kept);
// NULL: none. The caller frees them.
char* setup_kept_config(const char* path);

// Decides the model. `path` is the model file, whose sizes are `found`, or NULL for random weights.
ModelConfig setup_model(Options* options, const RunData* data, const char* path, ModelConfig found);

// ---- the run ----

// Decides the sizes of batches; after setup_model. What an update is does not depend on the number of processes: they
// share it.
void setup_batch(Options* options);

// The learning rate and all intervals; after run_data_open. `has_weights`: the model is already trained. Values
// that depend on an unknown number of steps stay auto.
void setup_training(Options* options, int has_weights);

// Decides what is still "auto" about generating texts; after setup_model.
void setup_generation(Options* options);

// Decides --matmul auto, and refuses bf16 where matrices are in 8 bits.
void setup_matmul(Options* options);

// The optimizer of the run; a GPU's choice of master weights is not in it.
Optimizer setup_optimizer(const Options* options);

// How training is cut among the processes, in replicas of `shards`.
ZeroPlan setup_zero(ModelConfig cfg, const Options* options, int shards);

// Its settings for update number t (from 1) at `step`, for a gradient of this norm.
Update setup_update(const Options* options, int64_t step, int64_t t, double norm);

// Whether validation comes before the first step, too: but not if nobody asked for validations and this one
// would take a CPU long. `flops` are per token, forward and backward.
int setup_validates_first(const Options* options, double flops, int64_t sequences);

// Whether the command line asks for samples, also of a finished run.
int setup_asks_for_samples(const Options* options);

#ifdef __cplusplus
}
#endif

#ifdef RESOLVE_IMPLEMENTATION

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/formats/hf_model.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/bf16/machine_peak.h"
#include "llmc/optim/schedule.h"
#include "llmc/setup/conflicts.h"
#include "llmc/model/freeze.h"
#include "llmc/layers/linear.h"
#include "llmc/model/share_layers.h"

// ---- the model ----

// Puts the model's size where the option is "auto"; with a model file the two must agree.
static void setup_size_(int* option, int model, const char* name, const char* path) {
    if (*option == OPTION_AUTO) {
        *option = model;
    } else if (path && *option != model) {
        die_usage("--%s is %d, but the model in %s has %d", name, *option, path, model);
    }
}

// Whether a model's vocabulary fits a tokenizer: the same size, or rounded up to a multiple of 64 or 128.
static int setup_fits_(int model_V, int V) {
    return model_V == V || model_V == (V + 63) / 64 * 64 || model_V == model_padded_vocab(V);
}

static int setup_share_layers_(const Options* options) {
    char error[ERROR_BYTES];
    int share;
    if (!share_parse(&share, options->layers, options->share_layers, error)) {
        die_usage("%s", error);
    }
    return share;
}

ModelConfig setup_read_model(const char* path) {
    const ModelConfig none = {0, 0, 0, 0, 0, 0, SHARE_OFF};
    return !path ? none : file_is_directory(path) ? hf_config_read(path) : llmc_bin_read_config(path);
}

char* setup_kept_config(const char* path) {
    return path && file_is_directory(path) ? hf_config_kept(path) : NULL;
}

ModelConfig setup_model(Options* options, const RunData* data, const char* path, ModelConfig found) {
    const int insists = options->vocab_size != OPTION_AUTO; // or is a run that resumes
    const ModelPreset unnamed = {"", SETUP_LAYERS, SETUP_CHANNELS, SETUP_HEADS,
                                 options->seq_len > 0 ? options->seq_len : SETUP_CONTEXT};
    const ModelPreset* named = path ? NULL : options_model_size(options);
    named = named ? named : &unnamed;
    const int V = data->has_tokenizer ? data->tokenizer.vocab_size : GPT2_VOCAB;
    ModelConfig cfg = {named->max_T, V, 0, named->L, named->NH, named->C, SHARE_OFF};
    if (path) {
        cfg = found;
    }
    setup_size_(&options->layers, cfg.L, "layers", path);
    setup_size_(&options->channels, cfg.C, "channels", path);
    setup_size_(&options->heads, cfg.NH, "heads", path);
    setup_size_(&options->context, cfg.max_T, "context", path);
    setup_size_(&options->vocab_size, cfg.V, "vocab-size", path);
    const ModelConfig chosen = {options->context,
                                options->vocab_size,
                                path ? cfg.Vp : model_padded_vocab(options->vocab_size),
                                options->layers,
                                options->heads,
                                options->channels,
                                setup_share_layers_(options)};
    if (chosen.C % chosen.NH) {
        die_usage("--channels %d is not a multiple of --heads %d", chosen.C, chosen.NH);
    }
    const int least = data->has_tokenizer ? tokenizer_least_vocab(&data->tokenizer) : 0;
    if (chosen.V < least) {
        die_usage("the vocabulary is %d; wanted at least the %d tokens of the tokenizer (%s)", chosen.V,
                  least, data->tokenizer.kind);
    }
    if (data->has_tokenizer && path && !insists && chosen.V > V && !setup_fits_(chosen.V, V)) {
        die_usage("%s has a vocabulary of %d, the tokenizer has %d tokens (%s); wanted the model's own "
                  "--tokenizer, or --vocab-size %d to use this one anyway",
                  path, chosen.V, V, options->tokenizer[0] ? options->tokenizer : data->tokenizer.kind,
                  chosen.V);
    }
    return chosen;
}

// ---- batches ----

static void setup_seq_len_(Options* options) {
    if (options->seq_len == OPTION_AUTO) {
        options->seq_len = options->context;
    }
    if (options->seq_len > options->context) {
        die_usage("--seq-len is %d; wanted at most the model's context of %d tokens", options->seq_len,
                  options->context);
    }
}

// A micro-batch that fits into an update without a rest; with --update-in-backward it is all of it.
static int setup_auto_batch_(const Options* options) {
    const int64_t sequences = options->total_batch / options->seq_len;
    if (options->update_in_backward && 0 < sequences && sequences <= INT_MAX) {
        return (int)sequences;
    }
    int batch = SETUP_BATCH_TOKENS > options->seq_len ? SETUP_BATCH_TOKENS / options->seq_len : 1;
    while (options->total_batch != OPTION_AUTO && batch > 1 &&
           options->total_batch % ((int64_t)batch * options->seq_len)) {
        batch--;
    }
    return batch;
}

// Gives every process a micro-batch, if it can; as many sequences are validated as before.
static void setup_share_batch_(Options* options) {
    const int64_t sequences = options->total_batch / options->seq_len;
    const int64_t share = (sequences + options->processes - 1) / options->processes;
    const int whole = options->batch;
    int parts = 1;
    for (int batch = whole; batch >= share; batch--) {
        parts = whole % batch == 0 ? whole / batch : parts;
    }
    options_divide_batch(options, parts);
}

void setup_batch(Options* options) {
    const int is_auto = options->batch == OPTION_AUTO;
    setup_seq_len_(options);
    if (is_auto) {
        options->batch = setup_auto_batch_(options);
    }
    if (options->total_batch == OPTION_AUTO) {
        options->total_batch = (int64_t)options->batch * options->seq_len;
    }
    if (options->total_batch % options->seq_len) {
        die_usage("--total-batch is %lld tokens; wanted a multiple of --seq-len %d",
                  (long long)options->total_batch, options->seq_len);
    }
    if (is_auto) {
        setup_share_batch_(options);
    }
}

void setup_generation(Options* options) {
    const int many = options->program.trainer == OPTION_GPU ? SETUP_TEXTS_GPU : SETUP_TEXTS_CPU;
    setup_seq_len_(options);
    if (options->batch == OPTION_AUTO) {
        options->batch = options->prompts[0] ? many : 1;
    }
    options->recompute = RECOMPUTE_NEVER;
    options->logits_chunk = options->batch;
}

// ---- training ----

// An interval in steps that is due only at the end.
static int64_t setup_only_at_end_(int64_t steps) {
    return steps < 1 ? 1 : steps < 1000000000 ? steps : 1000000000;
}

// GPT-3's rates (Brown et al., 2020, table 2.1) fall about as 1 / C, for batches of half a million tokens;
// smaller ones are noisier and need lower rates, by their fourth root as far as the built-in run shows
// (dev/LOG.md).
static float setup_lr_(int C, int64_t total_batch) {
    const double batch = fmin((double)total_batch / SETUP_FULL_BATCH, 1);
    return (float)fmin(6e-4 * 768 / C * sqrt(sqrt(batch)), 4e-3);
}

// The mean of squares should remember as many tokens whatever the batch (Marek et al., "Small batch size
// training for language models", 2025): GPT-3's 0.95 for its batch of half a million tokens, more for less.
// The limit keeps the memory, a thousand updates, shorter than a run.
static float setup_beta2_(int64_t total_batch) {
    const float beta2 = (float)pow(0.95, (double)total_batch / SETUP_FULL_BATCH);
    return beta2 > 0.95f ? fminf(beta2, 0.999f) : 0.95f;
}

// The intervals: after the number of steps is known.
static void setup_times_(Options* options) {
    if (options->warmup == OPTION_AUTO) {
        options->warmup = (int)(options->steps / 20 < 2000 ? options->steps / 20 : 2000);
    }
    if (options->eval_every == OPTION_AUTO) {
        const int64_t every = options->steps / 10;
        options->eval_every = (int)(every < 1 ? 1 : every > 1000 ? 1000 : every);
    }
    if (options->sample_every == OPTION_AUTO) { // at the end
        options->sample_every = (int)setup_only_at_end_(options->steps);
    }
    if (options->tasks_every == OPTION_AUTO) {
        options->tasks_every = options_has_tasks(options) ? (int)setup_only_at_end_(options->steps) : 0;
    }
}

int setup_asks_for_samples(const Options* options) {
    static const char* const names[] = {"prompt",      "samples", "sample-tokens",
                                        "temperature", "top-k",   "top-p"};
    int asks = 0;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        asks = asks || options_given(options, names[i]);
    }
    return asks && options->samples > 0;
}

// A run that only evaluates or converts: no optimizer, nothing to save, and no validations or
// samples that nobody asked for.
static void setup_only_use_model_(Options* options) {
    if (strcmp(options->resume, "off") != 0 && strcmp(options->resume, "0") != 0) {
        die_usage(
            "--resume %s: with --steps 0, tasks and exports train nothing; wanted --model with the directory "
            "of the checkpoint",
            options->resume);
    }
    if (options->save_every > 0) {
        die_usage("--save-every %d: with --steps 0, tasks and exports leave nothing to save; wanted 0",
                  options->save_every);
    }
    options->save_every = 0;
    if (options->eval_every == OPTION_AUTO && !run_data_is_asked_for(options)) {
        options->eval_every = 0;
    }
    options->master_weights = options->offload_optimizer = options->zero = 0;
    options->offload_params = options->offload_residuals = options->update_in_backward = 0;
    if (!setup_asks_for_samples(options)) {
        options->sample_every = options->sample_every == OPTION_AUTO ? 0 : options->sample_every;
        options->recompute = options->recompute == OPTION_AUTO ? RECOMPUTE_BLOCK : options->recompute;
    }
}

// The rate, the decay and beta2 that go with the optimizer. SGD divides by nothing: a gradient that is clipped to a norm of
// 1 needs 400 times AdamW's rate, and a decay of the usual size times that rate would be far too much. Lion's beta2 is its
// authors'.
static void setup_update_auto_(Options* options, int has_weights) {
    const int is_sgd = options->optimizer == OPTIMIZER_SGD;
    if (options->lr == OPTION_AUTO) {
        options->lr = setup_lr_(options->channels, options->total_batch) * (has_weights ? 0.1f : 1.0f) *
                      (is_sgd ? 400.0f : 1.0f);
    }
    if (options->weight_decay == OPTION_AUTO) {
        options->weight_decay = is_sgd ? 0.0f : 0.1f;
    }
    if (options->beta2 == OPTION_AUTO) {
        options->beta2 = options->optimizer == OPTIMIZER_LION ? 0.99f : setup_beta2_(options->total_batch);
    }
}

void setup_training(Options* options, int has_weights) {
    setup_check_tasks(options);
    setup_check_offload(options);
    if (options_only_uses_model(options)) {
        setup_only_use_model_(options);
    }
    setup_check_in_backward(options);
    if (options->update_in_backward) {
        options->graph = 0; // the kernels of one would all have the numbers of one update
    }
    if (options->steps != OPTION_AUTO) {
        setup_times_(options);
    }
    if (options->save_every > 0 && !options->out[0]) {
        die_usage("--save-every %d needs a directory: --out", options->save_every);
    }
    if (options->max_hours > 0 && !options->out[0]) {
        die_usage("--max-hours %g saves before the time is up: give --out, too", (double)options->max_hours);
    }
    if (options->keep_best && !options->out[0]) {
        die_usage("--keep-best on keeps a checkpoint: add --out DIR");
    }
    if ((options->keep_best || options->patience > 0) && !options->eval_every) {
        die_usage("--%s needs validations; wanted --eval-every 1 or more, or auto",
                  options->patience > 0 ? "patience" : "keep-best on");
    }
    if (options->on_divergence == DIVERGENCE_ROLLBACK && (!options->out[0] || !options->save_every)) {
        die_usage("--on-divergence rollback needs checkpoints: --out and --save-every");
    }
    if (options->tensorboard && !options->out[0]) {
        die_usage("--tensorboard on writes into the directory of the run; add --out DIR");
    }
    if (options->recompute == OPTION_AUTO && options->program.trainer == OPTION_CPU) {
        options->recompute = RECOMPUTE_GELU; // the GPU trainer asks its GPU
    }
    setup_update_auto_(options, has_weights);
    if (options->sample_tokens == OPTION_AUTO) {
        options->sample_tokens = options->seq_len < 256 ? options->seq_len : 256;
    }
}

// True if the run computes nothing: matmuls in bf16 would only copy the weights.
static int setup_only_converts_(const Options* options) {
    return options_only_uses_model(options) && !options_has_tasks(options) &&
           !run_data_is_asked_for(options) && !setup_asks_for_samples(options) && options->sample_every <= 0;
}

void setup_matmul(Options* options) {
    if (options->matmul == MATMUL_AUTO) {
        const int pays = !options->quantize && !setup_only_converts_(options) && peak_bf16_pays();
        const MatmulPrecision best = pays ? MATMUL_BF16 : MATMUL_FP32;
        options->matmul = best;
    }
    if (options->matmul == MATMUL_BF16 && options->quantize) {
        die_usage(
            "--matmul bf16 cannot be combined with --quantize q8_0, which computes in 8 bits; wanted one "
            "of the two");
    }
}

int setup_validates_first(const Options* options, double flops, int64_t sequences) {
    const double max_flops = 3e12; // ten seconds of two cores
    const double forward_flops = flops / 3 * (double)sequences * options->seq_len;
    return options->steps == 0 || options_given(options, "eval-every") || forward_flops < max_flops;
}

// ---- the optimizer ----

// Of SGD and Adafactor: the share of the last update that is in the next one.
static float setup_momentum_(const Options* o) {
    return o->optimizer == OPTIMIZER_SGD         ? o->sgd_momentum
           : o->optimizer == OPTIMIZER_ADAFACTOR ? o->adafactor_beta1
                                                 : 0;
}

// Whether an option adds state to the optimizer.
static int setup_has_optional_(const Options* o) {
    return o->optimizer == OPTIMIZER_MUON ? o->muon_rows : setup_momentum_(o) > 0;
}

Optimizer setup_optimizer(const Options* options) {
    const Freeze freeze = freeze_of(options->layers, options->freeze);
    Optimizer optimizer =
        optimizer_of((OptimizerName)options->optimizer, setup_has_optional_(options), MASTER_NONE);
    optimizer.frozen = freeze.rows;
    optimizer.lr_scale[KIND_EMBEDDING] = options->embedding_lr_scale;
    optimizer.lr_scale[KIND_VECTOR] = options->vector_lr_scale;
    optimizer.sums_weights = options->adafactor_scale;
    optimizer.by_block = options->zero >= 2 || options->offload_optimizer || options->update_in_backward;
    return optimizer;
}

ZeroPlan setup_zero(ModelConfig cfg, const Options* options, int shards) {
    const Freeze freeze = freeze_of(cfg.L, options->freeze);
    ZeroPlan plan = zero_plan_two_levels(cfg, options->zero, options->process, options->processes, shards);
    if (options->zero < 3) {
        zero_plan_freeze(&plan, cfg, freeze.rows, freeze_first_copy(&freeze, cfg));
    }
    plan.shares_buffer |= options->update_in_backward;
    return plan;
}

Update setup_update(const Options* options, int64_t step, int64_t t, double norm) {
    const float lr = schedule_lr((Schedule)options->schedule, step, options->steps, options->warmup,
                                 options->lr, options->final_lr_frac);
    const Update update = {
        lr,
        options->beta1,
        options->beta2,
        options->eps,
        options->weight_decay,
        options->grad_clip > 0 && norm > options->grad_clip ? (float)(options->grad_clip / norm) : 1.0f,
        t,
        options->cautious_decay ? DECAY_CAUTIOUS : DECAY_ALL,
        setup_momentum_(options),
        options->adafactor_scale ? ADAFACTOR_RELATIVE : ADAFACTOR_FIXED,
        options->matrix_lr * (lr / options->lr),
        options->matrix_weight_decay,
        (MuonScale)options->muon_scale,
    };
    return update;
}

#endif // RESOLVE_IMPLEMENTATION

#endif
