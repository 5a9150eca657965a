/*
conflicts.h -- which combinations of options a run cannot have: each function ends the program with what was given and what
would go. All are called before any memory for the model is taken; gpu_setup.cuh adds what GPUs cannot do.
*/
#ifndef LLMC_CONFLICTS_H
#define LLMC_CONFLICTS_H

#include "llmc/setup/options.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

// Options of tasks without tasks. The values that --print-config prints then are none.
void setup_check_tasks(const Options* options);

// Options of offloading that contradict each other, or others.
void setup_check_offload(const Options* options);

// Updates that cannot be made during the backward pass; after setup_batch.
void setup_check_in_backward(const Options* options);

// --quantize where the run cannot use it, and for a model whose rows are no whole blocks.
void setup_check_quantize(const Options* options, ModelConfig cfg);

// The same for --freeze, whose list needs the model; after the processes have met.
void setup_check_freeze(const Options* options, ModelConfig cfg);

// And for --share-layers with what takes the gradients of a block away before those of the next one are there.
void setup_check_share(const Options* options, ModelConfig cfg);

// --optimizer where the model or the run has no place for it.
void setup_check_optimizer(const Options* options, ModelConfig cfg);

#ifdef __cplusplus
}
#endif

#ifdef CONFLICTS_IMPLEMENTATION

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/check.h"
#include "llmc/model/freeze.h"
#include "llmc/optim/optimizer.h"
#include "llmc/ops/q8.h"
#include "llmc/model/share_layers.h"

void setup_check_tasks(const Options* options) {
    if (!options_has_tasks(options) && options->tasks_every > 0) {
        die_usage("--tasks-every needs --tasks, --hellaswag or --perplexity");
    }
    if (!options_has_tasks(options) && options->tasks_max > 0) {
        die_usage("--tasks-max needs --tasks, --hellaswag or --perplexity");
    }
    if (!options_has_tasks(options) && options->out_scores[0]) {
        die_usage("--out-scores %s needs --tasks, --hellaswag or --perplexity", options->out_scores);
    }
    if (options->stride != OPTION_AUTO && !options->perplexity[0]) {
        die_usage("--stride needs --perplexity");
    }
}

void setup_check_offload(const Options* o) {
    if (o->offload_optimizer == OFFLOAD_DISK && !o->offload_path[0]) {
        die_usage("--offload-optimizer disk needs a directory: --offload-path");
    }
    if (o->offload_optimizer != OFFLOAD_DISK && o->offload_path[0]) {
        die_usage("--offload-path %s without --offload-optimizer disk; wanted both", o->offload_path);
    }
    if (o->offload_params && o->zero != 3) {
        die_usage("--offload-params on, --zero %d; wanted --zero 3, which divides the parameters", o->zero);
    }
    if (o->offload_residuals && o->recompute != RECOMPUTE_BLOCK && o->recompute != OPTION_AUTO) {
        die_usage("--offload-residuals on, --recompute %s; wanted --recompute %s, which keeps nothing else "
                  "of a block",
                  model_recompute_word(o->recompute), model_recompute_word(RECOMPUTE_BLOCK));
    }
}

void setup_check_in_backward(const Options* o) {
    const int64_t sequences = o->total_batch / o->seq_len;
    if (!o->update_in_backward) {
        return;
    }
    if (o->processes > 1) {
        die_usage(
            "--update-in-backward on, %d processes; wanted one, or off with --zero 2, which divides the "
            "gradients among them",
            o->processes);
    }
    if (o->zero >= 2) {
        die_usage("--update-in-backward on, --zero %d, which keeps all gradients; wanted --zero 0", o->zero);
    }
    if (sequences > o->batch) {
        die_usage("--update-in-backward on: an update is one micro-batch; wanted --total-batch %lld, or a "
                  "--batch of %lld",
                  (long long)o->batch * o->seq_len, (long long)sequences);
    }
    if (o->skip_grad_z > 0) {
        die_usage("--update-in-backward on, --skip-grad-z %g: the norm is known after the update; wanted 0, "
                  "--skip-loss-z works",
                  (double)o->skip_grad_z);
    }
    if (o->offload_optimizer) {
        die_usage(
            "--update-in-backward on cannot be combined with --offload-optimizer; wanted only one of them");
    }
    if (o->graph == 1) {
        die_usage("--update-in-backward on, --graph on; wanted --graph off");
    }
}

void setup_check_quantize(const Options* options, ModelConfig cfg) {
    if (!options->quantize) {
        return;
    }
    if (!options->generates && !options_only_uses_model(options)) {
        die_usage("--quantize q8_0 is for generating text, and for tasks with --steps 0; training needs "
                  "--quantize off");
    }
    if (options_exports(options)) {
        die_usage("--quantize q8_0 keeps no weights to export; wanted off (--export-gguf-dtype q8_0 exports "
                  "8 bits)");
    }
    if (!quantized_fits((size_t)cfg.C)) {
        die_usage("--quantize q8_0: the model has %d channels, wanted a multiple of %d; --quantize off works",
                  cfg.C, QUANTIZED_BLOCK);
    }
}

void setup_check_freeze(const Options* o, ModelConfig cfg) {
    char error[ERROR_BYTES];
    Freeze freeze;
    if (!freeze_parse(&freeze, cfg.L, o->freeze, error) || !freeze_check_shared(&freeze, cfg, error)) {
        die_usage("%s", error);
    }
    if (freeze.first_block > 0 && o->zero == 3) {
        die_usage("--freeze %s, --zero 3; wanted --zero 2, since the backward pass ends at block %d",
                  o->freeze, freeze.first_block);
    }
    if (freeze.first_block > 0 && o->offload_residuals) {
        die_usage("--freeze %s, --offload-residuals on; wanted off, since the backward pass ends at block %d",
                  o->freeze, freeze.first_block);
    }
    const int in_lists = o->optimizer == OPTIMIZER_ADAFACTOR || o->optimizer == OPTIMIZER_MUON;
    const int first = o->zero == 3 ? 0 : freeze_first_copy(&freeze, cfg);
    if (o->program.trainer == OPTION_GPU && in_lists && !freeze_is_whole(&freeze, cfg, first)) {
        die_usage("--freeze %s, --optimizer %s; on a GPU it needs parameters frozen in all blocks%s; "
                  "--optimizer adamw freezes any",
                  o->freeze, optimizer_word((OptimizerName)o->optimizer),
                  o->zero == 3 ? "" : ", or all of the blocks from 0 on");
    }
}

// In a loop of several blocks the gradients of all are there at the end, and not one after the other.
void setup_check_share(const Options* o, ModelConfig cfg) {
    if (!share_is_loop(cfg) || options_only_uses_model(o)) {
        return;
    }
    if (o->zero >= 2) {
        die_usage(
            "--share-layers %s, --zero %d; wanted --zero 1, or --share-layers all or pairs: here no block's "
            "gradients are complete before those of all are",
            o->share_layers, o->zero);
    }
    if (o->update_in_backward) {
        die_usage(
            "--share-layers %s, --update-in-backward on; wanted off, or --share-layers all or pairs: here no "
            "block's gradients are complete before those of all are",
            o->share_layers);
    }
}

// Refuses options of another optimizer than the run's.
static void setup_check_rule_options_(const Options* o) {
    static const struct {
        const char* option;
        OptimizerName of;
    } rows[] = {{"sgd-momentum", OPTIMIZER_SGD},
                {"adafactor-beta1", OPTIMIZER_ADAFACTOR},
                {"adafactor-scale", OPTIMIZER_ADAFACTOR},
                {"matrix-lr", OPTIMIZER_MUON},
                {"matrix-weight-decay", OPTIMIZER_MUON},
                {"muon-scale", OPTIMIZER_MUON},
                {"muon-rows", OPTIMIZER_MUON}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (options_changed(o, rows[i].option) && o->optimizer != (int)rows[i].of) {
            die_usage("--%s is an option of --optimizer %s; this run has --optimizer %s", rows[i].option,
                      optimizer_word(rows[i].of), optimizer_word((OptimizerName)o->optimizer));
        }
    }
}

void setup_check_optimizer(const Options* o, ModelConfig cfg) {
    const char* word = optimizer_word((OptimizerName)o->optimizer);
    setup_check_rule_options_(o);
    if (o->cautious_decay && (o->optimizer == OPTIMIZER_ADAFACTOR || o->optimizer == OPTIMIZER_SGD)) {
        die_usage("--cautious-decay on does not work with --optimizer %s; wanted adamw, adamw8bit, muon or "
                  "lion, or off",
                  word);
    }
    if (o->optimizer == OPTIMIZER_ADAMW8BIT && cfg.C % OPTIMIZER_BLOCK) {
        die_usage(
            "--optimizer %s: the model has %d channels, wanted a multiple of %d; --optimizer adamw works",
            word, cfg.C, OPTIMIZER_BLOCK);
    }
}

#endif // CONFLICTS_IMPLEMENTATION

#endif
