/*
resolve.h -- settle(): turns options into the settings of a run, with a value for every "auto".

The model is a name, an llm.c file, a Hugging Face directory (a checkpoint is one), or the sizes on
the command line. A size on the command line replaces a named model's, but must agree with a file.
A model and a tokenizer with vocabularies of different sizes are refused, because their tokens
differ, unless the tokenizer extends the model's own.
Everything is checked here and in conflicts.h, before memory for the model is allocated.
*/
#ifndef LLMC_RESOLVE_H
#define LLMC_RESOLVE_H

#include <limits.h>
#include <stdint.h>

#include "llmc/model/model.h"
#include "llmc/optim/automatic_rate.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/schedule.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"
#include "llmc/setup/settled.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sizes of batches.
enum {
    SETUP_BATCH_TOKENS = 1024, // tokens of a micro-batch
    SETUP_SEQ_LEN = 2048,      // tokens of a sequence at most, with rotary positions
    SETUP_TEXTS_CPU = 8,       // sequences of --prompts generated at a time, on a CPU
    SETUP_TEXTS_GPU = 32,      // and on a GPU
};

// Most work of automatic validations, as a share of the work of training.
#define SETUP_VALIDATION_SHARE 0.1

// ---- the model ----

// Returns the sizes of the model in `path`; zeros if `path` is NULL. Ends the program if the model
// is not a GPT-2, before any message about its tokens.
ModelConfig setup_read_model(const char* path);

// Returns the fields of the model's config.json that only other programs read; a checkpoint keeps
// them (hf_config_kept). NULL: none. The caller frees them.
char* setup_kept_config(const char* path);

// ---- the run ----

// Inputs of settle() besides the options.
typedef struct {
    Ranks ranks;
    SafeTensorsDtype dtype; // type of the parameters in memory
    // the initial weights, or the checkpoint to resume; NULL: random weights
    const char* model_path;
    ModelConfig found;        // sizes of that model
    int continues;            // true: model_path is a checkpoint, whose options name the tokenizer
    const char* teacher_path; // the teacher, or NULL
    ModelConfig teacher;      // its sizes
    // directory of an adapter of the model, perhaps a checkpoint; NULL: none, or a new one
    const char* adapter_path;
} SettleInput;

// Returns the settings, with every option decided that does not depend on the memory of the device.
// Opens the tokenizer and the data, because other options depend on their sizes. With --plan and
// --print-config the data may stay unknown; then values that depend on the number of steps stay
// "auto".
Settled settle(RunData* data, const Options* options, const SettleInput* input);

// Returns the settings of the teacher: a model that only evaluates the same micro-batches, with the
// same parts and chunks, in the last stage. Its matmul algorithms are not timed, so that a resumed
// run has the same ones. Its blocks keep no activations.
Settled setup_teacher(const Settled* s);

// Returns the settings of an adapter's frozen base: a model without its adapter that only has
// parameters, all of them in each rank.
Settled setup_base(const Settled* s);

// Returns the settings of a run for --find-lr: it only trains, and writes nothing.
Settled setup_sweep(const Settled* s);

// Return the schedule of the learning rate; and the rate of a step, which also depends on its
// batch.
ScheduleSettings setup_schedule(const Options* options);
float setup_lr(const Options* options, int64_t step);

// Returns the rate that --lr auto chooses for these options, whose sizes, batch and steps are
// decided.
float setup_auto_lr(const Options* options);

// Returns the rate that --lr auto chooses for a long run.
double setup_long_lr(const Options* options);

// Returns the settings of update number t (from 1) at `step`, for a gradient with this norm.
Update setup_update(const Options* options, int64_t step, int64_t t, double norm);

// Returns the work of all validations as a share of the work of training, in a run that has both.
double setup_validation_share(const Settled* s, const RunData* data);

// Returns true if a validation precedes the first step. It does not if nobody asked for it and it
// would take long on a CPU. `flops` are per token, forward and backward.
int setup_validates_first(const Options* options, double flops, int64_t sequences);

// Returns true if the command line asks for samples; then a finished run also makes them.
int setup_asks_for_samples(const Options* options);

#ifdef __cplusplus
}
#endif

#ifdef RESOLVE_IMPLEMENTATION

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/bf16/machine_peak.h"
#include "llmc/data/packing.h"
#include "llmc/data/target_mask.h"
#include "llmc/base/gguf_file.h"
#include "llmc/formats/gguf_config.h"
#include "llmc/formats/hf_adapter.h"
#include "llmc/formats/hf_config.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/layers/bf16_weights.h"
#include "llmc/layers/weight.h"
#include "llmc/log/lr_sweep.h"
#include "llmc/setup/conflicts.h"
#include "llmc/setup/grid_conflicts.h"
#include "llmc/setup/settle_model.h"

// ---- the model ----

ModelConfig setup_read_model(const char* path) {
    const ModelConfig none = {0};
    return !path                     ? none
           : file_is_directory(path) ? hf_config_read(path)
           : gguf_is_file(path)      ? gguf_config_read(path)
                                     : llmc_bin_read_config(path);
}

char* setup_kept_config(const char* path) {
    return path && file_is_directory(path) ? hf_config_kept(path) : NULL;
}

// ---- batches ----

// Returns a micro-batch that divides a step. With --update-in-backward it is the whole step.
static int settle_auto_batch_(const Options* o) {
    const int64_t sequences = o->batch.total / o->batch.seq_len;
    if (o->memory.update_in_backward && 0 < sequences && sequences <= INT_MAX) {
        return (int)sequences;
    }
    int batch = SETUP_BATCH_TOKENS > o->batch.seq_len ? SETUP_BATCH_TOKENS / o->batch.seq_len : 1;
    while (o->batch.total != OPTION_AUTO && batch > 1 &&
           o->batch.total % ((int64_t)batch * o->batch.seq_len)) {
        batch--;
    }
    return batch;
}

// Divides the micro-batch so that as many ranks as possible have one. A validation keeps its number
// of sequences.
static void settle_share_batch_(Options* o, int ranks) {
    const int64_t sequences = o->batch.total / o->batch.seq_len, share = (sequences + ranks - 1) / ranks;
    const int whole = o->batch.size;
    int parts = 1;
    for (int batch = whole; batch >= share; batch--) {
        parts = whole % batch == 0 ? whole / batch : parts;
    }
    options_divide_batch(o, parts);
}

// Sets --seq-len to the last stage of --seq-len-schedule.
static void settle_lengths_(Options* o) {
    Stages s;
    if (!stages_parse(&s, o->batch.seq_len_schedule) || stages_last(&s) > INT_MAX) {
        die_usage(
            "--seq-len-schedule %s: wanted at most %d stages STEP:TOKENS, as in 0:256,1000:512,3000:1024: "
            "the first at step 0, later ones with more tokens",
            o->batch.seq_len_schedule, STAGES_MOST);
    }
    for (int i = 0; i < s.count; i++) {
        if (stages_last(&s) % s.stage[i].value) {
            die_usage("--seq-len-schedule %s: sequences of %lld tokens; wanted a divisor of the last stage, "
                      "%lld, whose sequences are cut",
                      o->batch.seq_len_schedule, (long long)s.stage[i].value, (long long)stages_last(&s));
        }
    }
    if (o->batch.seq_len != OPTION_AUTO && o->batch.seq_len != stages_last(&s)) {
        die_usage("--seq-len-schedule %s, --seq-len %d; wanted only one of them, or the last stage",
                  o->batch.seq_len_schedule, o->batch.seq_len);
    }
    o->batch.seq_len = (int)stages_last(&s);
}

// Sets --window to the last stage of --window-schedule.
static void settle_windows_stages_(Options* o) {
    Stages s;
    const char* text = o->model.window_schedule;
    if (!stages_parse(&s, text) || stages_first(&s) < 1 || stages_last(&s) > INT_MAX) {
        die_usage(
            "--window-schedule %s: wanted at most %d stages STEP:TOKENS, as in 0:128,1000:256,3000:512: "
            "the first at step 0, later ones with more tokens",
            text, STAGES_MOST);
    }
    if (o->model.window != OPTION_AUTO && o->model.window != stages_last(&s)) {
        die_usage("--window-schedule %s, --window %d; wanted only one of them, or the last stage", text,
                  o->model.window);
    }
    o->model.window = (int)stages_last(&s);
}

// Sets --total-batch to the last stage of --batch-schedule.
static void settle_batch_stages_(Options* o) {
    Stages b;
    if (!stages_parse(&b, o->batch.schedule)) {
        die_usage(
            "--batch-schedule %s: wanted at most %d stages STEP:TOKENS, as in 0:131072,2000:262144: the "
            "first at step 0, later ones with more tokens",
            o->batch.schedule, STAGES_MOST);
    }
    for (int i = 0; i < b.count; i++) {
        if (b.stage[i].value % o->batch.seq_len) {
            die_usage("--batch-schedule %s: %lld tokens; wanted a multiple of --seq-len %d",
                      o->batch.schedule, (long long)b.stage[i].value, o->batch.seq_len);
        }
    }
    if (options_given(o, "total-batch") && o->batch.total != OPTION_AUTO &&
        o->batch.total != stages_last(&b)) {
        die_usage("--batch-schedule %s, --total-batch %lld; wanted only one of them, or the last stage",
                  o->batch.schedule, (long long)o->batch.total);
    }
    o->batch.total = stages_last(&b);
}

// Decides the batch sizes. The batch of a step does not depend on the number of ranks, which share
// it.
static void settle_batch_(Options* o, int ranks) {
    const int is_auto = o->batch.size == OPTION_AUTO;
    if (o->batch.schedule[0]) {
        settle_batch_stages_(o);
    }
    if (is_auto) {
        o->batch.size = settle_auto_batch_(o);
    }
    if (o->batch.total == OPTION_AUTO) {
        o->batch.total = (int64_t)o->batch.size * o->batch.seq_len;
    }
    if (o->batch.total % o->batch.seq_len) {
        die_usage("--total-batch is %lld tokens; wanted a multiple of --seq-len %d",
                  (long long)o->batch.total, o->batch.seq_len);
    }
    if (is_auto) {
        settle_share_batch_(o, ranks);
    }
}

// Decides how many sequences are generated at a time.
static void settle_decode_batch_(Options* o) {
    const int many = o->program.trainer == OPTION_GPU ? SETUP_TEXTS_GPU : SETUP_TEXTS_CPU;
    if (o->batch.size == OPTION_AUTO) {
        o->batch.size = o->texts.prompts[0] ? many : 1;
    }
    o->memory.recompute = RECOMPUTE_NONE;
    o->memory.logits_chunk = o->batch.size;
}

static void settle_sizes_(Settled* s) {
    Options* o = &s->options;
    if (o->batch.seq_len == OPTION_AUTO) {
        // rotary positions have no weights that only long sequences train
        const int turns = model_architecture(s->cfg.arch)->positions == POSITIONS_ROPE;
        o->batch.seq_len = turns && o->model.context > SETUP_SEQ_LEN ? SETUP_SEQ_LEN : o->model.context;
    }
    if (o->batch.seq_len > o->model.context) {
        die_usage("--seq-len is %d; wanted at most the model's context of %d tokens", o->batch.seq_len,
                  o->model.context);
    }
    if (s->use == USE_GENERATE) {
        settle_decode_batch_(o);
    } else {
        settle_batch_(o, s->ranks.grid.shape.data);
    }
}

// Decides how documents become rows. Documents with answers stay whole, and do not see each other.
// If positions are learned, each starts a row, because a chat will start at position 0 later.
static void settle_packing_(Settled* s, RunData* data) {
    Options* o = &s->options;
    const int are_answers = s->use != USE_GENERATE && run_data_find_answers(data, o) != ANSWERS_NONE;
    if (data->chat_date[0]) {
        o->texts.chat_date = data->chat_date;
    }
    const int turns = model_architecture(s->cfg.arch)->positions == POSITIONS_ROPE;
    if (o->data.pack == OPTION_AUTO) {
        o->data.pack = !are_answers ? PACK_STREAM : turns ? PACK_BESTFIT : PACK_PAD;
    }
    if (o->data.doc_mask == OPTION_AUTO) {
        o->data.doc_mask = are_answers ? DOCUMENT_MASK_ON : DOCUMENT_MASK_OFF;
    }
}

// ---- training ----

// Returns an interval in steps that is due only at the end.
static int64_t settle_only_at_end_(int64_t steps) {
    return steps < 1 ? 1 : steps < 1000000000 ? steps : 1000000000;
}

// Returns the rate of --lr auto for a run of this many updates; 0: a long one. With --mup it is the
// small model's. A model that is already trained gets a tenth of a long run's rate, since its
// weights are close; its adapter gets all of it. SGD does not divide by the gradient's size: with a
// gradient clipped to norm 1 it needs 400 times AdamW's rate.
static double settle_lr_(const Options* o, int64_t updates) {
    const int has_weights = o->model.path[0] && !options_model_size(o),
              has_adapter = o->model.lora_rank > 0 || o->model.adapter[0];
    Mup mup;
    const int C = mup_parse(&mup, o->optimizer.mup) ? mup.C : o->model.channels;
    const double rate = has_adapter   ? automatic_rate_long(C, o->batch.total)
                        : has_weights ? 0.1 * automatic_rate_long(C, o->batch.total)
                                      : automatic_rate(C, o->batch.total, updates);
    return rate * (o->optimizer.name == OPTIMIZER_SGD ? 400 : 1);
}

float setup_auto_lr(const Options* options) { return (float)settle_lr_(options, options->batch.steps); }

double setup_long_lr(const Options* options) { return settle_lr_(options, 0); }

// Returns the beta2 whose mean of squares spans the same number of tokens for every batch size
// (Marek et al., "Small batch size training for language models", 2025): GPT-3's 0.95 for its batch
// of half a million tokens, more for smaller batches. The limit of 0.999 spans a thousand updates,
// fewer than a run has.
static float settle_beta2_(int64_t total_batch) {
    const float beta2 = (float)pow(0.95, (double)total_batch / AUTOMATIC_FULL_BATCH);
    return beta2 > 0.95f ? fminf(beta2, 0.999f) : 0.95f;
}

// Returns the work of validating this many sequences of all sets, as a share of the work of
// training. Validating the average too doubles it.
static double settle_validation_share_(const Settled* s, double sequences) {
    const Options* o = &s->options;
    const Stages batches = settled_batches(o);
    const double forward = model_flops_per_token(s->cfg, o->batch.seq_len) / 3,
                 update = freeze_flops_per_token(&s->freeze, s->cfg, o->batch.seq_len);
    const int passes = strcmp(o->optimizer.average, "off") == 0 ? 1 : 2;
    return passes * sequences * o->batch.seq_len * forward / (stages_sum(&batches, o->batch.steps) * update);
}

double setup_validation_share(const Settled* s, const RunData* data) {
    const Options* o = &s->options;
    return (1 + floor((double)o->batch.steps / o->eval.every)) *
           settle_validation_share_(s, (double)run_data_all_eval_sequences(data, o));
}

// Shortens validations if two of them would be too much work for the run. They then have as many
// sequences as a whole number of steps, so that they do not depend on --batch.
static void settle_eval_batches_(Settled* s, const RunData* data) {
    Options* o = &s->options;
    const double usual = (double)run_data_eval_sequences(o, UINT64_MAX), sets = data->num_val_sets,
                 update = (double)(o->batch.total / o->batch.seq_len);
    const double updates =
        fmax(1, floor(SETUP_VALIDATION_SHARE / 2 / settle_validation_share_(s, sets * update)));
    if (2 * settle_validation_share_(s, (double)run_data_all_eval_sequences(data, o)) >
            SETUP_VALIDATION_SHARE &&
        updates * update < usual) {
        o->eval.batches = (int)ceil(updates * update / o->batch.size);
    }
}

// Decides how often a run validates: ten times, and at least every 1000 steps; but at most so often
// that it costs a tenth of the work of training, including the validation before the first step.
static void settle_validations_(Settled* s, const RunData* data) {
    Options* o = &s->options;
    const int64_t tenth = o->batch.steps / 10, usual = tenth < 1 ? 1 : tenth > 1000 ? 1000 : tenth;
    if (o->eval.every != OPTION_AUTO) {
        return;
    }
    if (o->batch.steps > 0 && o->eval.batches == OPTION_AUTO && data->num_val_sets > 0) {
        settle_eval_batches_(s, data);
    }
    const double share =
        o->batch.steps > 0 ? settle_validation_share_(s, (double)run_data_all_eval_sequences(data, o)) : 0;
    const double most = share > 0 ? fmax(floor(SETUP_VALIDATION_SHARE / share) - 1, 1) : INFINITY;
    o->eval.every = (int)fmin(fmax((double)usual, ceil((double)o->batch.steps / most)), OPTION_UNLIMITED);
}

// Decides the other intervals, which depend on the number of steps.
static void settle_intervals_(Options* options) {
    if (options->optimizer.warmup == OPTION_AUTO) {
        options->optimizer.warmup =
            (int)(options->batch.steps / 20 < 2000 ? options->batch.steps / 20 : 2000);
    }
    if (options->samples.every == OPTION_AUTO) { // at the end
        options->samples.every = (int)settle_only_at_end_(options->batch.steps);
    }
    if (options->tasks.every == OPTION_AUTO) {
        options->tasks.every =
            options_has_tasks(options) ? (int)settle_only_at_end_(options->batch.steps) : 0;
    }
}

int setup_asks_for_samples(const Options* options) {
    static const char* const names[] = {"prompt",      "samples", "sample-tokens",
                                        "temperature", "top-k",   "top-p"};
    int asks = 0;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        asks = asks || options_given(options, names[i]);
    }
    return asks && options->samples.count > 0;
}

// Decides the options of a run that only evaluates or converts: no optimizer, no checkpoints, and
// only the validations and samples that were asked for.
static void settle_evaluation_(Options* options) {
    if (strcmp(options->output.resume, "off") != 0 && strcmp(options->output.resume, "0") != 0) {
        die_usage(
            "--resume %s: with --steps 0, tasks and exports train nothing; wanted --model with the directory "
            "of the checkpoint",
            options->output.resume);
    }
    if (options->output.save_every > 0) {
        die_usage("--save-every %d: with --steps 0, tasks and exports leave nothing to save; wanted 0",
                  options->output.save_every);
    }
    options->output.save_every = 0;
    if (options->eval.every == OPTION_AUTO && !run_data_is_asked_for(options)) {
        options->eval.every = 0;
    }
    options->memory.master_weights = options->memory.offload_optimizer = options->ranks.zero = 0;
    options->memory.offload_params = options->memory.offload_residuals = options->memory.update_in_backward =
        0;
    if (!setup_asks_for_samples(options)) {
        options->samples.every = options->samples.every == OPTION_AUTO ? 0 : options->samples.every;
        options->memory.recompute =
            options->memory.recompute == OPTION_AUTO ? RECOMPUTE_BLOCK : options->memory.recompute;
    }
}

// Decides the learning rate, which stays "auto" as long as the number of steps does; and the weight
// decay and beta2, which depend on the optimizer. SGD's rate is so high that the usual decay
// would be far too much. Lion's beta2 is its authors'.
static void settle_update_(Options* options) {
    if (options->optimizer.lr == OPTION_AUTO && options->batch.steps != OPTION_AUTO) {
        options->optimizer.lr = setup_auto_lr(options);
    }
    if (options->optimizer.weight_decay == OPTION_AUTO) {
        options->optimizer.weight_decay = options->optimizer.name == OPTIMIZER_SGD ? 0.0f : 0.1f;
    }
    if (options->optimizer.beta2 == OPTION_AUTO) {
        options->optimizer.beta2 =
            options->optimizer.name == OPTIMIZER_LION ? 0.99f : settle_beta2_(options->batch.total);
    }
}

// Resets the decay of other schedules than wsd: one from a recipe or a checkpoint belonged to its
// own schedule.
static void settle_decay_(Options* o) {
    if (o->optimizer.schedule != SCHEDULE_WSD) {
        o->optimizer.decay_steps = OPTION_AUTO;
        o->optimizer.decay_shape = DECAY_SQRT;
    }
}

// Refuses --keep-best without validations, and a rollback without checkpoints.
static void settle_check_outputs_(const Options* o) {
    if (o->output.keep_best && !o->eval.every) {
        die_usage("--keep-best on needs validations: --eval-every");
    }
    if (o->optimizer.on_divergence == DIVERGENCE_ROLLBACK && (!o->output.dir[0] || !o->output.save_every)) {
        die_usage("--on-divergence rollback needs checkpoints: --out and --save-every");
    }
}

// Decides the options of training.
static void settle_training_(Settled* s, const RunData* data) {
    Options* o = &s->options;
    setup_check_offload(s);
    if (s->use == USE_EVALUATE) {
        settle_evaluation_(o);
    }
    setup_check_in_backward(s);
    if (o->memory.update_in_backward) {
        o->memory.graph = 0; // a graph would repeat the numbers of one step
    }
    if (o->batch.steps != OPTION_AUTO) {
        settle_validations_(s, data);
        settle_intervals_(o);
    }
    settle_check_outputs_(o);
    // the GPU trainer and --fit decide by the memory
    if (o->memory.recompute == OPTION_AUTO && o->program.trainer == OPTION_CPU && o->memory.fit == 0) {
        o->memory.recompute = RECOMPUTE_ACTIVATION;
    }
    settle_update_(o);
    settle_decay_(o);
    if (o->samples.tokens == OPTION_AUTO) {
        o->samples.tokens = o->batch.seq_len < 256 ? o->batch.seq_len : 256;
    }
}

// Returns where notes go: not into the settings of --print-config.
static FILE* settle_notes_(const Options* options) { return options->print_config ? stderr : stdout; }

// Returns true if the run only converts a model: then bf16 matmuls would only cost memory for a
// copy of the weights.
static int settle_only_converts_(const Settled* s) {
    const Options* o = &s->options;
    return s->use == USE_EVALUATE && !options_has_tasks(o) && !run_data_is_asked_for(o) &&
           !setup_asks_for_samples(o) && o->samples.every <= 0;
}

// Refuses fp8 where nothing is trained, and for experts.
static void settle_matmul_fp8_(const Settled* s) {
    if (s->use != USE_TRAIN) {
        die_usage("--matmul fp8 is for training: evaluation and generated text do without; wanted fp32, bf16 "
                  "or auto");
    }
    if (s->cfg.E > 0) {
        die_usage("--matmul fp8: the matrices of experts are not multiplied in fp8; wanted a model without "
                  "experts, or --matmul fp32 or bf16");
    }
}

// On a GPU, refuses types other than fp8: everything has the type that the trainer was built for.
// The default may be given, as --print-config prints it. A resumed run of the CPU trainer may have
// another type.
static void settle_matmul_type_(Settled* s) {
    Options* o = &s->options;
    const int by_default = MATMUL_FP32;
    if (options_given(o, "matmul") && o->memory.matmul != by_default) {
        die_usage("--matmul: on a GPU wanted fp8, or none: then matmuls have the type that the trainer was "
                  "built for (make PRECISION=BF16, FP16 or FP32)");
    }
    if (options_given(o, "matmul") && s->dtype != SAFETENSORS_F32) {
        fprintf(settle_notes_(o),
                "note: --matmul fp32: on a GPU matmuls have the type that the trainer was built "
                "for, %s\n",
                safetensors_dtype_name(s->dtype));
    }
    o->memory.matmul = by_default;
}

// Decides --matmul auto. Refuses bf16 for 8-bit matrices, and for experts in parts of tiles.
static void settle_matmul_(Settled* s) {
    Options* o = &s->options;
    const int unfit = bf16_weights_unfit(s->cfg);
    if (o->program.trainer == OPTION_GPU && o->memory.matmul != MATMUL_FP8) {
        settle_matmul_type_(s);
    }
    if (o->memory.matmul == MATMUL_AUTO) {
        const int pays = !o->texts.quantize && !unfit && !settle_only_converts_(s) && peak_bf16_pays();
        const MatmulPrecision best = pays ? MATMUL_BF16 : MATMUL_FP32;
        o->memory.matmul = best;
    }
    if (o->memory.matmul == MATMUL_FP8) {
        settle_matmul_fp8_(s);
    }
    if (o->memory.matmul == MATMUL_BF16 && o->texts.quantize) {
        die_usage(
            "--matmul bf16 cannot be combined with --quantize q8_0, which computes in 8 bits; wanted one "
            "of the two");
    }
    if (o->memory.matmul == MATMUL_BF16 && unfit) {
        die_usage("--matmul bf16: a matrix of an expert has %d rows or columns, wanted a multiple of %d; "
                  "--matmul fp32 works",
                  unfit, BF16_TILE);
    }
}

static void settle_freeze_(Settled* s) {
    char error[ERROR_BYTES];
    if (!freeze_parse(&s->freeze, s->cfg, s->options.optimizer.freeze, error) ||
        !freeze_check_shared(&s->freeze, s->cfg, error)) {
        die_usage("%s", error);
    }
    setup_check_freeze(s);
}

// Decides the teacher, which must have the tokens of the run.
static void settle_teacher_(Settled* s, const RunData* data, const SettleInput* input) {
    if (input->teacher_path) {
        s->teacher = input->teacher;
        run_data_check_tokens(data, &s->options, input->teacher_path);
    }
    setup_check_teacher(s);
}

// Decides the adapter, if there is one. Training has it apart from its base, as has a base in 8
// bits; any other use merges it into the model, which then has none: --steps 0 saves that model.
static void settle_adapter_(Settled* s, const SettleInput* input) {
    const Options* o = &s->options;
    const float alpha =
        o->model.lora_alpha == OPTION_AUTO ? 2.0f * (float)o->model.lora_rank : o->model.lora_alpha;
    char error[ERROR_BYTES];
    ModelAdapter adapter;
    if (!input->adapter_path && o->model.lora_rank == 0) {
        return;
    }
    setup_check_base(s, input->model_path, input->adapter_path && !input->continues);
    if (input->adapter_path) {
        adapter = hf_adapter_read_config(input->adapter_path, s->cfg);
    } else if (!hf_adapter_choose(&adapter, s->cfg, o->model.lora_rank, alpha, o->model.lora_targets,
                                  error)) {
        die_usage("%s", error);
    }
    const int only_merges = o->batch.steps == 0 && input->adapter_path && !input->continues;
    if ((s->use == USE_TRAIN && !only_merges) || o->texts.quantize) {
        s->cfg.adapter = adapter;
        setup_check_adapter(s);
    }
}

static ModelUse settle_use_(const Options* o) {
    const int converts =
        options_exports(o) && o->model.path[0] && !options_model_size(o) && !o->output.dir[0];
    const int only_evaluates = o->batch.steps == 0 && (options_has_tasks(o) || converts);
    return o->generates ? USE_GENERATE : only_evaluates ? USE_EVALUATE : USE_TRAIN;
}

// Decides what follows from a model's tokens before the data are open. The run uses the tokenizer
// in the adapter's directory, which may have another chat format, else that in the model's, unless
// a checkpoint's options name one.
static void settle_tokenizer_(Settled* s, RunData* data, const SettleInput* input) {
    const char** tokenizer = &s->options.data.tokenizer;
    const char* model_path = input->continues ? NULL : input->model_path;
    const int is_adapters =
        model_path && !**tokenizer && input->adapter_path && tokenizer_is_in(input->adapter_path);
    if (is_adapters) {
        *tokenizer = input->adapter_path;
    } else if (!**tokenizer && model_path && tokenizer_is_in(model_path)) {
        *tokenizer = model_path;
    }
    run_data_open_tokenizer(data, s, model_path);
    if (model_path && (s->use != USE_GENERATE || is_adapters)) {
        run_data_open_own_tokenizer(data, &s->options, model_path, input->found.V);
    }
}

// Opens the data, which decide the number of steps: --epochs becomes --steps.
static void settle_data_(Settled* s, RunData* data) {
    s->options.batch.steps = run_data_open(data, &s->options);
    if (run_data_has_tokens(data) && !data->is_unknown) {
        s->options.batch.epochs = 0;
    }
}

// Decides what depends on the model, whose sizes are known.
static void settle_run_(Settled* s, RunData* data, const Options* options, const SettleInput* input) {
    setup_check_formats(s);
    setup_check_quantize(s);
    setup_check_experts(s);
    setup_check_mixer(s);
    setup_check_router(s);
    settle_freeze_(s);
    setup_check_share(s);
    settle_matmul_(s);
    settle_sizes_(s);
    settle_packing_(s, data);
    settle_teacher_(s, data, input);
    setup_check_fim(s);
    setup_check_grid(s);
    setup_check_needs(settle_notes_(options), s, options);
    if (s->use != USE_GENERATE) {
        settle_data_(s, data);
        settle_training_(s, data);
        setup_note_late(settle_notes_(options), s, data);
        setup_check_optimizer(s);
        setup_check_qk_clip(s);
        setup_check_mup(s);
        setup_check_average(s);
        setup_check_adapter_run(s, data);
    }
    settled_conclude(s);
}

Settled settle(RunData* data, const Options* options, const SettleInput* input) {
    Settled s;
    memset((void*)&s, 0, sizeof(s));
    s.options = *options;
    s.options.ranks.zero = input->ranks.zero;
    s.use = settle_use_(options);
    s.ranks = input->ranks;
    s.dtype = input->dtype;
    if (options->batch.seq_len_schedule[0]) {
        settle_lengths_(&s.options);
    }
    if (options->model.window_schedule[0]) {
        settle_windows_stages_(&s.options);
    }
    settle_tokenizer_(&s, data, input);
    setup_check_weights(&s, input->model_path, input->continues);
    s.cfg = settle_model(&s.options, data, input->model_path, input->found);
    settle_adapter_(&s, input);
    settle_run_(&s, data, options, input);
    return s;
}

Settled setup_teacher(const Settled* s) {
    Settled t = *s;
    Options* o = &t.options;
    t.use = USE_EVALUATE;
    t.ranks.grid.shape.pipeline = 1; // one stage has all layers
    t.ranks.grid.stage = 0;
    t.ranks.grid.shape.experts = o->ranks.experts = 1; // each rank has all experts
    t.cfg = s->teacher;
    t.teacher.L = 0;
    t.nccl_bytes = 0;
    o->texts.quantize = o->teacher.quantize;
    if (o->texts.quantize || o->memory.matmul == MATMUL_FP8) {
        const MatmulPrecision precise = MATMUL_FP32;
        o->memory.matmul = precise;
    }
    o->memory.recompute = RECOMPUTE_BLOCK;
    o->optimizer.z_loss = 0;
    o->optimizer.freeze = "";
    o->memory.autotune = o->memory.gpu_report = o->ranks.zero = o->memory.gradients =
        o->memory.master_weights = 0;
    o->memory.offload_optimizer = o->memory.offload_residuals = o->memory.offload_params =
        o->memory.update_in_backward = 0;
    t.freeze = freeze_of(t.cfg, o->optimizer.freeze);
    t.freeze.first_block = t.cfg.L;
    settled_conclude(&t);
    return t;
}

Settled setup_base(const Settled* s) {
    Settled base = *s;
    Options* o = &base.options;
    base.use = s->use == USE_TRAIN ? USE_EVALUATE : s->use;
    base.cfg = model_of_base(s->cfg);
    base.teacher.L = 0;
    o->ranks.zero = o->memory.gradients = o->memory.master_weights = 0;
    o->memory.offload_optimizer = o->memory.offload_residuals = o->memory.offload_params =
        o->memory.update_in_backward = 0;
    base.freeze = freeze_of(base.cfg, "");
    settled_conclude(&base);
    return base;
}

Settled setup_sweep(const Settled* s) {
    Settled t = *s;
    Options* o = &t.options;
    o->batch.steps = o->optimizer.max_skips = LR_SWEEP_UPDATES;
    o->batch.schedule = o->batch.seq_len_schedule = o->model.window_schedule = "";
    o->optimizer.average = "off";
    o->eval.every = o->samples.every = o->tasks.every = o->output.save_every = 0;
    o->eval.patience = o->output.tensorboard = o->output.keep_best = 0;
    o->optimizer.on_divergence = DIVERGENCE_SKIP;
    o->optimizer.max_loss_rise = 0;
    o->output.max_hours = 0;
    o->output.dir = "";
    o->output.quiet = 1;
    settled_conclude(&t);
    return t;
}

int setup_validates_first(const Options* options, double flops, int64_t sequences) {
    const double max_flops = 3e12; // about ten seconds on two cores
    const double forward_flops = flops / 3 * (double)sequences * options->batch.seq_len;
    return options->batch.steps == 0 || options_given(options, "eval-every") || forward_flops < max_flops;
}

// ---- the optimizer ----

// An automatic decay follows --steps, even if a resumed run is longer.
ScheduleSettings setup_schedule(const Options* options) {
    const int is_auto = options->optimizer.decay_steps == OPTION_AUTO;
    const ScheduleSettings schedule = {
        (Schedule)options->optimizer.schedule,
        options->batch.steps,
        options->optimizer.warmup,
        options->optimizer.lr,
        options->optimizer.final_lr_frac,
        is_auto ? options->batch.steps / 5 : options->optimizer.decay_steps,
        (DecayShape)options->optimizer.decay_shape,
    };
    return schedule;
}

float setup_lr(const Options* options, int64_t step) {
    if (options->optimizer.find_lr) {
        return (float)automatic_rate_sweep(setup_long_lr(options), step);
    }
    const ScheduleSettings schedule = setup_schedule(options);
    const Stages batches = settled_batches(options);
    const int64_t batch = stages_at(&batches, step), last = stages_last(&batches);
    const float lr = schedule_lr(&schedule, step);
    return batch == last ? lr : (float)(lr * sqrt((double)batch / (double)last));
}

Update setup_update(const Options* options, int64_t step, int64_t t, double norm) {
    const float lr = setup_lr(options, step);
    const Update update = {
        lr,
        options->optimizer.beta1,
        options->optimizer.beta2,
        options->optimizer.eps,
        options->optimizer.weight_decay,
        options->optimizer.grad_clip > 0 && norm > options->optimizer.grad_clip
            ? (float)(options->optimizer.grad_clip / norm)
            : 1.0f,
        t,
        options->optimizer.cautious_decay ? DECAY_CAUTIOUS : DECAY_ALL,
        settled_momentum(options),
        options->optimizer.adafactor_scale ? ADAFACTOR_RELATIVE : ADAFACTOR_FIXED,
        options->optimizer.matrix_lr * (lr / options->optimizer.lr),
        options->optimizer.matrix_weight_decay,
        (MuonScale)options->optimizer.muon_scale,
        options->optimizer.soap_every,
        0, // run.h counts it
        options->optimizer.router_bias_rate,
        (MuonPolynomial)options->optimizer.muon_polynomial,
        options->optimizer.qk_clip,
    };
    return update;
}

#endif // RESOLVE_IMPLEMENTATION

#endif
