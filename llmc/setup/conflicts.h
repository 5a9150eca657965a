/*
conflicts.h -- refuses combinations of options that a run cannot have.

Each function ends the program and says which options were given and which would work. settle()
calls all of them before it allocates memory for the model; gpu_setup.cuh adds checks for GPUs.
*/
#ifndef LLMC_CONFLICTS_H
#define LLMC_CONFLICTS_H

#include <stdio.h>

#include "llmc/setup/run_tokens.h"
#include "llmc/setup/settled.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- what options need: the conditions of OPTION_NEEDS ----

int setup_resumes(const Options* o);

// Return true if the run validates; if it prints samples or generates text.
int setup_validates(const Settled* s);
int setup_samples(const Settled* s);

// Return true if the data have named fields, which shards do not keep; if they are .bin files.
int setup_reads_fields(const Options* o);
int setup_reads_bin(const Options* o);

// Returns true if an update pulls weights toward zero. SGD's default does not.
int setup_decays(const Options* o);

// Returns true if an update divides by the square root of a running mean.
int setup_has_squares(const Options* o);

// Refuses options that were given without the options they need (OPTION_NEEDS), or prints a note
// that they have no effect. `given`: the options before settle() decided any. Accepts defaults, and
// the values of a recipe or of a resumed run.
void setup_check_needs(FILE* notes, const Settled* s, const Options* given);

// Prints a note about what would start only after the last step.
void setup_note_late(FILE* notes, const Settled* s, const RunData* data);

// Refuses options of offloading that contradict each other or other options.
void setup_check_offload(const Settled* s);

// Refuses --update-in-backward with options that need all gradients at once.
void setup_check_in_backward(const Settled* s);

// Refuses --quantize if the run trains more than an adapter, or exports, and for a model whose rows
// are not whole blocks.
void setup_check_quantize(const Settled* s);

// Refuses an adapter without a trained model, `path`, unless the run is only planned, and a new one
// beside that of --adapter (`has_files`).
void setup_check_base(const Settled* s, const char* path, int has_files);

// Refuses an adapter of a model or in a grid that cannot have one.
void setup_check_adapter(const Settled* s);

// Refuses options that cannot go with an adapter in training. The data are open.
void setup_check_adapter_run(const Settled* s, const RunData* data);

void setup_check_experts(const Settled* s);
void setup_check_mixer(const Settled* s);
void setup_check_router(const Settled* s);

// Refuses a teacher that does not fit the model or the run.
void setup_check_teacher(const Settled* s);

// Refuses --fim-rate with options that cut rearranged documents or need the same rows in each
// epoch.
void setup_check_fim(const Settled* s);

// Refuses a model that its class in transformers, or the format of an export, cannot hold.
void setup_check_formats(const Settled* s);

// Refuses --freeze where the run cannot leave out the frozen parameters.
void setup_check_freeze(const Settled* s);

// Refuses --share-layers with options that need the gradient of one block before the backward pass
// has finished with all of them.
void setup_check_share(const Settled* s);

// Refuses an optimizer that does not fit the model or its recipe.
void setup_check_optimizer(const Settled* s);

// Rejects --qk-clip where scores do not follow the weights, or the weights stay.
void setup_check_qk_clip(const Settled* s);

// Refuses a malformed --average, and runs that cannot keep or evaluate one.
void setup_check_average(const Settled* s);

// Refuses --weights average if the model's directory lacks it. `path` is the model of --model
// (NULL: none), or the checkpoint from which a run continues.
void setup_check_weights(const Settled* s, const char* path, int continues);

// Refuses --mup without a small model, for an architecture without the scale factors that it needs,
// and with an optimizer whose updates are not proportional to its rates.
void setup_check_mup(const Settled* s);

#ifdef __cplusplus
}
#endif

#ifdef CONFLICTS_IMPLEMENTATION

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/base/shell_word.h"
#include "llmc/bf16/tile_kernels.h"
#include "llmc/data/encoded_text.h"
#include "llmc/data/fill_in_middle.h"
#include "llmc/formats/gguf_arch.h"
#include "llmc/formats/hf_config_write.h"
#include "llmc/formats/hf_model.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/layers/weight.h"
#include "llmc/model/share_layers.h"
#include "llmc/ops/experts.h"
#include "llmc/optim/qk_clip.h"
#include "llmc/setup/options_values.h"
#include "llmc/setup/recipes.h"

// ---- what options need ----

int setup_resumes(const Options* o) {
    return strcmp(o->output.resume, "off") != 0 && strcmp(o->output.resume, "0") != 0;
}

int setup_validates(const Settled* s) {
    const Options* o = &s->options;
    return o->eval.every == OPTION_AUTO ? s->use == USE_TRAIN || run_data_is_asked_for(o) : o->eval.every > 0;
}

int setup_samples(const Settled* s) {
    const Options* o = &s->options;
    return s->use == USE_GENERATE || (o->samples.count > 0 && o->samples.every != 0);
}

int setup_reads_fields(const Options* o) {
    return encoded_text_has_fields(o->data.train) || encoded_text_has_fields(o->data.val) ||
           encoded_text_has_fields(o->tasks.perplexity);
}

int setup_reads_bin(const Options* o) {
    return strstr(o->data.train, ".bin") || strstr(o->data.val, ".bin") ||
           strstr(o->tasks.perplexity, ".bin");
}

// Returns the option that keeps state in 8 bits, and one that does not.
static const char* const* setup_8_bits_(const Options* o) {
    static const char* const words[2][2] = {{"--optimizer adamw8bit", "--optimizer adamw"},
                                            {"--muon-momentum 8bit", "--muon-momentum fp32"}};
    return words[o->optimizer.name == OPTIMIZER_MUON];
}

int setup_decays(const Options* o) {
    const int is_auto = o->optimizer.weight_decay == OPTION_AUTO && o->optimizer.name != OPTIMIZER_SGD;
    return is_auto || o->optimizer.weight_decay > 0 ||
           (o->optimizer.name == OPTIMIZER_MUON && o->optimizer.matrix_weight_decay > 0);
}

int setup_has_squares(const Options* o) {
    return o->optimizer.name == OPTIMIZER_ADAMW || o->optimizer.name == OPTIMIZER_ADAMW8BIT ||
           o->optimizer.name == OPTIMIZER_MUON || o->optimizer.name == OPTIMIZER_SOAP;
}

typedef enum { NOTED, REFUSED } SetupLacking_;

// Returns the text of the option's need if the run does not meet it; else NULL.
static const char* setup_lacks_(const Settled* s, const OptionRow* row, SetupLacking_* lacking) {
    const Options* o = &s->options;
    switch ((OptionNeed)(row->flags >> OPTION_NEED_BIT & ((1 << OPTION_NEED_BITS) - 1))) {
    case NEED_NOTHING:
    case NEEDS_COUNT:
        return NULL;
#define SETUP_NEED_(name, what, condition, words)                                                            \
    case NEED_##name:                                                                                        \
        *lacking = what;                                                                                     \
        return (condition) ? NULL : (words);
        OPTION_NEEDS(SETUP_NEED_)
#undef SETUP_NEED_
    }
    return NULL;
}

void setup_check_needs(FILE* notes, const Settled* s, const Options* given) {
    if (ranks_rank(&s->ranks) == 0) {
        options_note_repeated(notes, given);
    }
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char text[OPTION_TEXT_BYTES];
        SetupLacking_ lacking = NOTED;
        const char* value = option_text(given, row, text);
        const char* words =
            given->given[i] && strcmp(value, row->fallback) != 0 ? setup_lacks_(s, row, &lacking) : NULL;
        const char* shown = row->type == OPTION_FLAG ? "" : value;
        if (words && lacking == REFUSED) {
            die_usage("--%s %s needs %s", row->name, value, words);
        }
        if (words && ranks_rank(&s->ranks) == 0) {
            printable_line(notes, "note: --%s%s%s has no effect without %s", row->name, *shown ? " " : "",
                           shown, words);
        }
    }
}

// Prints a note about stages of a schedule that the run never reaches.
static void setup_note_stages_(FILE* notes, const Options* o, const char* name, const char* text) {
    Stages stages;
    if (!text[0] || !stages_parse(&stages, text)) {
        return;
    }
    for (int i = 0; i < stages.count; i++) {
        if (stages.stage[i].step >= o->batch.steps) {
            printable_line(notes, "note: --%s %s: the run ends at step %lld, before the stage of step %lld",
                           name, text, (long long)o->batch.steps, (long long)stages.stage[i].step);
            return;
        }
    }
}

// Prints a note about the first line of --data-schedule that the run never reaches. Lines that
// count tokens are not checked.
static void setup_note_lines_(FILE* notes, const Options* o, const DataSchedule* schedule) {
    for (int i = 0; i < schedule->count; i++) {
        const ScheduleLine* line = &schedule->line[i];
        if (schedule->path && line->unit == SCHEDULE_STEPS && line->from >= o->batch.steps) {
            printable_line(
                notes, "note: --data-schedule %s: the run ends at step %lld, before the line of step %lld",
                o->data.schedule, (long long)o->batch.steps, (long long)line->from);
            return;
        }
    }
}

void setup_note_late(FILE* notes, const Settled* s, const RunData* data) {
    const Options* o = &s->options;
    if (ranks_rank(&s->ranks) != 0 || s->use != USE_TRAIN || o->batch.steps <= 0) {
        return;
    }
    if (options_given(o, "warmup") && o->optimizer.warmup > o->batch.steps) {
        fprintf(notes, "note: --warmup %d, --steps %lld: the run ends before the rate is at its peak\n",
                o->optimizer.warmup, (long long)o->batch.steps);
    }
    if (options_given(o, "decay-steps") && o->optimizer.decay_steps > o->batch.steps - o->optimizer.warmup) {
        fprintf(notes, "note: --decay-steps %lld, --steps %lld: the rate falls as soon as the warm-up ends\n",
                (long long)o->optimizer.decay_steps, (long long)o->batch.steps);
    }
    setup_note_stages_(notes, o, "batch-schedule", o->batch.schedule);
    setup_note_stages_(notes, o, "seq-len-schedule", o->batch.seq_len_schedule);
    setup_note_stages_(notes, o, "window-schedule", o->model.window_schedule);
    setup_note_lines_(notes, o, &data->train.schedule);
}

// ---- combinations ----

void setup_check_offload(const Settled* s) {
    const Options* o = &s->options;
    if (o->memory.offload_optimizer == OFFLOAD_DISK && !o->memory.offload_path[0]) {
        die_usage("--offload-optimizer disk needs a directory: --offload-path");
    }
    if (o->memory.offload_params && o->ranks.zero != 3) {
        die_usage("--offload-params on, --zero %d; wanted --zero 3, which divides the parameters",
                  o->ranks.zero);
    }
    if (o->memory.offload_residuals && o->memory.recompute != RECOMPUTE_BLOCK &&
        o->memory.recompute != OPTION_AUTO) {
        die_usage("--offload-residuals on, --recompute %s; wanted --recompute %s, which stores nothing else "
                  "of a block",
                  model_recompute_word(o->memory.recompute), model_recompute_word(RECOMPUTE_BLOCK));
    }
}

void setup_check_in_backward(const Settled* s) {
    const Options* o = &s->options;
    const int64_t sequences = o->batch.total / o->batch.seq_len;
    if (!o->memory.update_in_backward) {
        return;
    }
    if (ranks_size(&s->ranks) > 1) {
        die_usage(
            "--update-in-backward on, %d processes; wanted one, or off with --zero 2, which divides the "
            "gradients among them",
            ranks_size(&s->ranks));
    }
    if (o->ranks.zero >= 2) {
        die_usage("--update-in-backward on, --zero %d, which keeps all gradients; wanted --zero 0",
                  o->ranks.zero);
    }
    if (sequences > o->batch.size) {
        die_usage("--update-in-backward on: an update is one micro-batch; wanted --total-batch %lld, or a "
                  "--batch of %lld",
                  (long long)o->batch.size * o->batch.seq_len, (long long)sequences);
    }
    if (o->optimizer.skip_grad_z > 0) {
        die_usage("--update-in-backward on, --skip-grad-z %g: the norm is known after the update; wanted 0, "
                  "--skip-loss-z works",
                  (double)o->optimizer.skip_grad_z);
    }
    if (o->memory.offload_optimizer) {
        die_usage(
            "--update-in-backward on cannot be combined with --offload-optimizer; wanted only one of them");
    }
    if (o->memory.graph == 1) {
        die_usage("--update-in-backward on, --graph on; wanted --graph off");
    }
}

void setup_check_quantize(const Settled* s) {
    if (!s->options.texts.quantize) {
        return;
    }
    if (s->use == USE_TRAIN && !model_has_adapter(s->cfg)) {
        die_usage(
            "--quantize q8_0 is for generating text, for tasks with --steps 0, and for the frozen base of "
            "an adapter: --lora-rank; other training needs --quantize off");
    }
    if (options_exports(&s->options)) {
        die_usage("--quantize q8_0 keeps no weights to export; wanted off (--export-gguf-dtype q8_0 exports "
                  "8 bits)");
    }
    const int unfit = quantized_unfit_columns(s->cfg);
    if (unfit) {
        die_usage("--quantize q8_0: a matrix has %d columns, wanted a multiple of %d; --quantize off works",
                  unfit, QUANTIZED_BLOCK);
    }
}

void setup_check_base(const Settled* s, const char* path, int has_files) {
    const Options* o = &s->options;
    if (!path && !options_only_look(o)) {
        die_usage("--%s needs the trained model that it changes: --model with its files",
                  has_files ? "adapter" : "lora-rank");
    }
    if (has_files && o->model.lora_rank > 0) {
        die_usage("--lora-rank %d, --adapter %s, which has a rank of its own; wanted one of them",
                  o->model.lora_rank, o->model.adapter);
    }
}

// Refuses a grid in which ranks have parts of matrices or layers.
static void setup_check_adapter_grid_(const Settled* s) {
    const GridShape shape = s->ranks.grid.shape;
    if (shape.tensor > 1 || shape.pipeline > 1 || shape.context > 1) {
        die_usage("--%s %d, and an adapter; wanted 1: only whole sequences are divided among processes",
                  shape.tensor > 1     ? "tensor-parallel"
                  : shape.pipeline > 1 ? "pipeline-parallel"
                                       : "context-parallel",
                  shape.tensor > 1     ? shape.tensor
                  : shape.pipeline > 1 ? shape.pipeline
                                       : shape.context);
    }
    if (s->ranks.zero == 3) {
        die_usage("--zero 3, and an adapter, whose base every process has; wanted --zero 2 or less");
    }
}

void setup_check_adapter(const Settled* s) {
    const Options* o = &s->options;
    if (o->optimizer.freeze[0]) {
        die_usage("--freeze %s, and an adapter, beside which everything is frozen; wanted one of them",
                  o->optimizer.freeze);
    }
    if (s->cfg.E > 0) {
        die_usage("an adapter of a model with experts (%s) is only used merged; wanted a model without, or "
                  "--quantize off and no training",
                  model_architecture(s->cfg.arch)->word);
    }
    if (s->cfg.share != SHARE_OFF) {
        die_usage("--share-layers %s, and an adapter, whose layers share nothing; wanted off",
                  o->model.share_layers);
    }
    setup_check_adapter_grid_(s);
}

void setup_check_adapter_run(const Settled* s, const RunData* data) {
    const Options* o = &s->options;
    if (!model_has_adapter(s->cfg) || s->use != USE_TRAIN) {
        return;
    }
    if (o->optimizer.mup[0] || strcmp(o->optimizer.average, "off") != 0) {
        die_usage("--%s, and an adapter, which cannot go with it; wanted one of them",
                  o->optimizer.mup[0] ? "mup" : "average");
    }
    if (o->memory.matmul == MATMUL_FP8) {
        die_usage("--matmul fp8, and an adapter; wanted fp32, bf16 or auto");
    }
    if (data->is_extended) {
        die_usage(
            "--tokenizer %s has more tokens than the model, whose vocabulary is frozen under an adapter; "
            "wanted the model's own",
            o->data.tokenizer);
    }
    if (options_exports(o)) {
        die_usage("--export-%s, and a run that trains an adapter; wanted the export after it: --model %s "
                  "--adapter OUT --steps 0",
                  o->output.export_llmc[0] ? "llmc" : "gguf", o->model.path);
    }
    for (int m = 0; m < ADAPT_MATRICES && settled_state_in_8_bits(o); m++) {
        if (s->cfg.adapter.rank[m] % OPTIMIZER_BLOCK) {
            die_usage("%s: the adapter has rank %d, wanted a multiple of %d; %s works", setup_8_bits_(o)[0],
                      s->cfg.adapter.rank[m], OPTIMIZER_BLOCK, setup_8_bits_(o)[1]);
        }
    }
}

// Refuses to train a router with one expert per token if that expert's weight is always the same:
// the router would get no gradient from the text.
void setup_check_router(const Settled* s) {
    const Architecture* kinds = model_architecture(s->cfg.arch);
    const int divides = kinds->router == ROUTER_CHOSEN || kinds->router == ROUTER_SIGMOID;
    if (s->use == USE_TRAIN && s->cfg.E > 1 && s->cfg.E_used == 1 && divides) {
        die_usage(
            "--experts-used 1: %s divides the weights of a token's experts by their sum, so the router "
            "learns nothing from the text; wanted 2 or more, or a new model with --arch olmoe, in which "
            "one expert learns",
            kinds->word);
    }
}

// Refuses experts that the matmuls of the GPU cannot copy in packs.
void setup_check_experts(const Settled* s) {
    const int C = s->cfg.C, is_narrow = C % EXPERT_PACK != 0,
              unfit = is_narrow ? C : model_expert_hidden(s->cfg);
    if (s->cfg.E > 0 && s->options.program.trainer == OPTION_GPU && unfit % EXPERT_PACK) {
        die_usage("--%s %d: a matrix of an expert has as many columns; on a GPU wanted a multiple of %d",
                  is_narrow       ? "channels"
                  : s->cfg.Fe > 0 ? "expert-hidden"
                                  : "hidden",
                  unfit, EXPERT_PACK);
    }
}

// Refuses a convolution of channels that the GPU cannot load in packs.
void setup_check_mixer(const Settled* s) {
    const int channels = model_mixer_channels(s->cfg);
    if (s->options.program.trainer == OPTION_GPU && channels % SHORT_CONV_PACK) {
        die_usage("--channels %d: the convolution of %s has %d channels; on a GPU wanted a multiple of %d",
                  s->cfg.C, model_architecture(s->cfg.arch)->word, channels, SHORT_CONV_PACK);
    }
    if (s->cfg.attention_dropout > 0 && model_layers_of(s->cfg, LAYERS_ATTENTION) == 0) {
        die_usage("--attention-dropout %g, and no layer with attention; wanted 0",
                  (double)s->cfg.attention_dropout);
    }
}

void setup_check_teacher(const Settled* s) {
    const Options* o = &s->options;
    const ModelConfig teacher = s->teacher;
    if (!settled_has_teacher(s)) {
        return;
    }
    if (s->use != USE_TRAIN) {
        die_usage("--teacher %s is for training; this run only evaluates or converts", o->teacher.path);
    }
    if (teacher.V < s->cfg.V) {
        die_usage("--teacher %s has a vocabulary of %d; wanted at least the model's %d", o->teacher.path,
                  teacher.V, s->cfg.V);
    }
    if (o->batch.seq_len > teacher.max_T) {
        die_usage("--seq-len is %d; wanted at most the context of --teacher %s, %d tokens", o->batch.seq_len,
                  o->teacher.path, teacher.max_T);
    }
    if (o->teacher.quantize && quantized_unfit_columns(teacher)) {
        die_usage("--teacher-quantize q8_0: a matrix of the teacher has %d columns, wanted a multiple of %d; "
                  "--teacher-quantize off works",
                  quantized_unfit_columns(teacher), QUANTIZED_BLOCK);
    }
}

void setup_check_fim(const Settled* s) {
    const Options* o = &s->options;
    const double rate = (double)o->data.fim_rate;
    if (rate == 0) {
        return;
    }
    if (o->batch.seq_len < FIM_LEAST) {
        die_usage("--fim-rate %g, --seq-len %d; wanted at least %d: %d marks and 2 tokens", rate,
                  o->batch.seq_len, FIM_LEAST, FIM_MARKS);
    }
    if (o->batch.seq_len_schedule[0]) {
        die_usage("--fim-rate %g, --seq-len-schedule %s; wanted sequences of one length, since shorter ones "
                  "cut the middle off its prefix and suffix",
                  rate, o->batch.seq_len_schedule);
    }
}

// Refuses exports of a model with what no other program computes.
static void setup_check_additions_(const Settled* s) {
    const Options* o = &s->options;
    const char* file = o->output.export_gguf[0] ? "gguf" : o->output.export_llmc[0] ? "llmc" : NULL;
    if (model_has_additions(s->cfg) && file) {
        die_usage(
            "--export-%s: the model has --%s, which no other program computes; --out DIR works, and only "
            "this program reads it",
            file, model_addition_word(s->cfg));
    }
}

void setup_check_formats(const Settled* s) {
    char error[ERROR_BYTES];
    setup_check_additions_(s);
    if (!hf_config_check(s->cfg, error) || (s->options.output.export_gguf[0] && !gguf_check(s->cfg, error)) ||
        (s->options.output.export_llmc[0] && !llmc_bin_check(s->cfg, error))) {
        die_usage("%s", error);
    }
}

void setup_check_freeze(const Settled* s) {
    const Options* o = &s->options;
    const int first_block = s->freeze.first_block;
    if (first_block > 0 && o->ranks.zero == 3) {
        die_usage("--freeze %s, --zero 3; wanted --zero 2, since the backward pass ends at block %d",
                  o->optimizer.freeze, first_block);
    }
    if (first_block > 0 && o->memory.offload_residuals) {
        die_usage("--freeze %s, --offload-residuals on; wanted off, since the backward pass ends at block %d",
                  o->optimizer.freeze, first_block);
    }
    const int in_lists = o->optimizer.name == OPTIMIZER_ADAFACTOR || o->optimizer.name == OPTIMIZER_MUON ||
                         o->optimizer.name == OPTIMIZER_SOAP;
    const int first = o->ranks.zero == 3 ? 0 : freeze_first_copy(&s->freeze, s->cfg);
    if (o->program.trainer == OPTION_GPU && in_lists && !freeze_is_whole(&s->freeze, s->cfg, first)) {
        die_usage("--freeze %s, --optimizer %s; on a GPU it needs parameters frozen in all blocks%s; "
                  "--optimizer adamw freezes any",
                  o->optimizer.freeze, optimizer_word((OptimizerName)o->optimizer.name),
                  o->ranks.zero == 3 ? "" : ", or all of the blocks from 0 on");
    }
}

// With loop:K, every gradient is complete only at the end of the backward pass.
void setup_check_share(const Settled* s) {
    const Options* o = &s->options;
    if (!share_is_loop(s->cfg) || s->use != USE_TRAIN) {
        return;
    }
    if (o->ranks.zero >= 2) {
        die_usage(
            "--share-layers %s, --zero %d; wanted --zero 1, or --share-layers all or pairs: here no block's "
            "gradients are complete until all are",
            o->model.share_layers, o->ranks.zero);
    }
    if (o->memory.update_in_backward) {
        die_usage(
            "--share-layers %s, --update-in-backward on; wanted off, or --share-layers all or pairs: here "
            "no block's gradients are complete until all are",
            o->model.share_layers);
    }
}

// Refuses options that contradict the recipe of the model.
static void setup_check_recipe_(const Options* o) {
    const char *wanted = recipe_value(o->model.path, "optimizer"),
               *word = optimizer_word((OptimizerName)o->optimizer.name);
    if (!wanted || !options_model_size(o)) {
        return;
    }
    if (strcmp(word, wanted) != 0) {
        die_usage("--model %s has rates for --optimizer %s; this run has --optimizer %s; --model "
                  "nanochat:d12 works with any",
                  o->model.path, wanted, word);
    }
    if (!o->model.own_head && !options_given(o, "embedding-lr-scale")) {
        die_usage(
            "--own-head off, --model %s, whose --embedding-lr-scale is for an embedding that is not the "
            "output layer; wanted another, such as 1",
            o->model.path);
    }
}

// Refuses an optimizer that cannot divide the rows of the model's matrices.
static void setup_check_widths_(const Settled* s) {
    const ModelConfig cfg = s->cfg;
    const struct {
        const char* name;
        int columns;
    } widths[] = {{"channels", cfg.C},
                  {"columns of its heads", model_attention_values(cfg)},
                  {"channels in the latent of its queries", cfg.latent.query_rank},
                  {"channels in the latent of its keys", cfg.latent.rank},
                  {"hidden units", model_hidden(cfg)},
                  {"hidden units of an expert", model_expert_hidden(cfg)}};
    for (int i = 0; i < 6 && settled_state_in_8_bits(&s->options); i++) {
        if (widths[i].columns % OPTIMIZER_BLOCK) {
            const char* const* of = setup_8_bits_(&s->options);
            die_usage("%s: the model has %d %s, wanted a multiple of %d; %s works", of[0], widths[i].columns,
                      widths[i].name, OPTIMIZER_BLOCK, of[1]);
        }
    }
}

void setup_check_optimizer(const Settled* s) {
    const Options* o = &s->options;
    const char* word = optimizer_word((OptimizerName)o->optimizer.name);
    setup_check_recipe_(o);
    if (o->optimizer.find_lr && (s->use != USE_TRAIN || o->batch.steps == 0)) {
        die_usage("--find-lr, --steps 0; wanted the length of a run that trains");
    }
    if (o->optimizer.cautious_decay && o->optimizer.name == OPTIMIZER_ADAFACTOR) {
        die_usage("--cautious-decay on does not work with --optimizer %s; wanted adamw, adamw8bit, muon, "
                  "soap, lion or sgd, or off",
                  word);
    }
    setup_check_widths_(s);
}

// True if a weight of queries or keys is frozen in any layer.
static int setup_freezes_heads_(const Settled* s) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(rows, s->cfg, 1);
    for (int l = 0; l < s->cfg.L; l++) {
        for (int i = 0; i < QK_CLIP_TENSORS && model_layer_has(s->cfg, LAYERS_ATTENTION, l); i++) {
            const int row = qk_clip_row(i);
            if (!tensor_is_absent(&rows[row]) && freeze_has(&s->freeze, row, l)) {
                return 1;
            }
        }
    }
    return 0;
}

// Returns why a run cannot have a QK clip; NULL if it can.
static const char* setup_no_qk_clip_(const Settled* s) {
    const Options* o = &s->options;
    Average average;
    return heads_parts(model_architecture(s->cfg.arch)->heads).has_norm
               ? "queries and keys have norms, so their weights do not set the scores"
           : s->cfg.attention_softcap > 0                   ? "its scores have a cap"
           : model_layers_of(s->cfg, LAYERS_ATTENTION) == 0 ? "no layer has attention"
           : model_has_adapter(s->cfg)                      ? "the base of its adapter is frozen"
           : setup_freezes_heads_(s)                        ? "--freeze has queries or keys"
           : o->memory.offload_optimizer                    ? "--offload-optimizer has the weights"
           : average_parse(&average, o->optimizer.average) && average.is_kept
               ? "--average would have the weights before they are clipped"
               : NULL;
}

void setup_check_qk_clip(const Settled* s) {
    const double limit = (double)s->options.optimizer.qk_clip;
    const char* reason = limit > 0 && s->use == USE_TRAIN ? setup_no_qk_clip_(s) : NULL;
    if (reason) {
        die_usage("--qk-clip %g, but %s (--arch %s); wanted 0", limit, reason,
                  model_architecture(s->cfg.arch)->word);
    }
}

void setup_check_average(const Settled* s) {
    const Options* o = &s->options;
    Average average;
    if (!average_parse(&average, o->optimizer.average)) {
        die_usage("--average %s: wanted off, or ema:D with D below 1%s", o->optimizer.average,
                  strncmp(o->optimizer.average, "last:", 5) == 0
                      ? "; last:N is gone: ema:D with D = 1 - 2 / (N + 1) is as recent"
                      : "");
    }
    if (!average.is_kept) {
        return;
    }
    if (s->use != USE_TRAIN) {
        die_usage(
            "--average %s is for training; this run only evaluates or converts; --weights average reads a "
            "checkpoint's",
            o->optimizer.average);
    }
    if (o->memory.update_in_backward) {
        die_usage("--average %s, --update-in-backward on; wanted off: validations of the average keep the "
                  "weights where all gradients are",
                  o->optimizer.average);
    }
}

void setup_check_weights(const Settled* s, const char* path, int continues) {
    const Options* o = &s->options;
    if (o->model.weights != HF_AVERAGE || (continues && !options_given(o, "weights"))) {
        return;
    }
    if (continues) {
        die_usage(
            "--weights average, --resume %s, which continues from the last weights; wanted --model %s for "
            "a new run that starts from their average",
            o->output.resume, shell_word(path).text);
    }
    if (!path) {
        die_usage("--weights average needs a trained model: --model DIR");
    }
    CHECK(
        file_is_directory(path) && hf_model_has(path, HF_AVERAGE),
        "%s: no %s.safetensors, so --weights average finds none; --weights last works; a run with --average "
        "writes it",
        path, hf_model_stem(HF_AVERAGE));
}

// Refuses a small model whose heads would have another size: attention scores would need another
// divisor.
static void setup_check_mup_model_(const Settled* s) {
    const char* text = s->options.optimizer.mup;
    const int size = model_head_size(s->cfg);
    Mup mup;
    if (!mup_parse(&mup, text)) {
        die_usage("--mup %s: wanted the channels and the layers of a small model, as in 256:4", text);
    }
    if (mup.C % size) {
        die_usage(
            "--mup %s: %d channels are no whole heads of %d, the size in this model; wanted a multiple, "
            "since both models have heads of one size (--heads, --head-size)",
            text, mup.C, size);
    }
    const NormParts norm = norm_parts(model_norm(s->cfg));
    if (!s->cfg.has_head && (!norm.has_weight || norm.offset)) {
        die_usage("--mup %s, --own-head off: the last norm of %s has no weights to scale logits by; wanted "
                  "--own-head on",
                  text, model_architecture(s->cfg.arch)->word);
    }
    if (model_has_latent(s->cfg)) {
        die_usage("--mup %s: the latents of %s do not grow with the channels; wanted an --arch without", text,
                  model_architecture(s->cfg.arch)->word);
    }
    if (model_has_norms_after(s->cfg)) {
        die_usage("--mup %s: the norms after the branches of %s undo the factors of weights before them; "
                  "wanted an --arch without",
                  text, model_architecture(s->cfg.arch)->word);
    }
}

void setup_check_mup(const Settled* s) {
    const Options* o = &s->options;
    if (!o->optimizer.mup[0]) {
        return;
    }
    setup_check_mup_model_(s);
    if (o->optimizer.name == OPTIMIZER_SGD) {
        die_usage("--mup %s does not work with --optimizer sgd, whose updates grow with the gradient",
                  o->optimizer.mup);
    }
    if (o->optimizer.adafactor_scale) {
        die_usage("--mup %s, --adafactor-scale on; wanted off: only one of them can set the rates",
                  o->optimizer.mup);
    }
    if (o->optimizer.name == OPTIMIZER_MUON && o->optimizer.muon_scale != MUON_SPECTRAL) {
        die_usage("--mup %s, --muon-scale rms; wanted spectral, which fits every width", o->optimizer.mup);
    }
}

#endif // CONFLICTS_IMPLEMENTATION

#endif
