/*
run.h -- one run of the program, the same for every trainer: from the command line to the exit status.

A trainer is a model and a table of functions that work on it (trainer.h). All the rest is done here, once:

    start      options, data, sizes of the model; --verify-data, --print-config, --plan     plan
    open       the model, loaders, generator, checkpoints; weights, or a checkpoint         open, first_weights,
                                                                                            read_checkpoint
    loop       validation, tasks and samples that are due                                   evaluate, token_losses,
                                                                                            read_text, next_tokens
               save or stop                                                                 copy_out
               a step: gradient, verdict, update, log; roll back if the run has diverged    gradients, update
    close      export, summary                                                              export_model, close

The model is opaque here, and nothing depends on the type of its weights.
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include "llmc/run/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

// The program, but for what it does once in a process. Returns its exit status.
int run_program(int argc, char** argv, const Trainer* trainer);

// The program. Returns its exit status.
int run_main(int argc, char** argv, const Trainer* trainer);

#ifdef __cplusplus
}
#endif

#ifdef RUN_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/base/rand.h"
#include "llmc/base/signals.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/threads.h"
#include "llmc/base/wide_sum.h"
#include "llmc/base/enum_words.h"
#include "llmc/base/xxh64.h"
#include "llmc/data/dataloader.h"
#include "llmc/formats/hf_model.h"
#include "llmc/setup/ranks_agree.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/report/compare.h"
#include "llmc/run/evaluation.h"
#include "llmc/checkpoint/export.h"
#include "llmc/run/generate.h"
#include "llmc/generate/generator.h"
#include "llmc/optim/outliers.h"
#include "llmc/optim/update_in_backward.h"
#include "llmc/setup/launcher.h"
#include "llmc/log/log.h"
#include "llmc/optim/loss_scale.h"
#include "llmc/plan/mfu.h"
#include "llmc/setup/options.h"
#include "llmc/comm/stragglers.h"
#include "llmc/plan/plan.h"
#include "llmc/report/page.h"
#include "llmc/checkpoint/model_path.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/setup/run_data.h"
#include "llmc/run/run_outputs.h"
#include "llmc/run/session.h"
#include "llmc/setup/resolve.h"
#include "llmc/setup/conflicts.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/tokenizer/tokenizer.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/comm/comm.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"

// ---- the run ----

typedef struct {
    const Trainer* trainer;
    Options options;
    RunData data;
    Resume resume;
    char* kept_config;      // of its config.json, for the checkpoints; NULL: nothing
    const char* model_path; // of the first weights, or the checkpoint to continue from; NULL: random
    char newest[PATH_MAX];  // checkpoint of the run that --model names
    ModelConfig cfg;
    double start_s; // when the program started, as time_now_s counts
    FILE* results;  // where they are printed: standard output, which of a --quiet run is /dev/null

    TrainerPlan plan;
    Model* model;
    Dataloader loaders[2];
    Dataloader *train, *val; // NULL without data
    int64_t eval_sequences;  // of a validation
    Comm comm;
    double *part, *parts; // what this process, and what all, tell of an update or validation (RUN_LOSSES_)
    Mfu mfu;
    Stragglers pace;    // which process is slow,
    double* paces;      // and how long each took
    double data_wait_s; // of the one that waited longest, in each step
    uint64_t agreement; // hash of the last verdict
    Generator generator;
    Evaluation evaluation;
    Session session;
    RunLog log;
    RunState state;
    InBackward in_backward; // the last update
    int validates_first;    // before the first update, too
    double floor;           // of the validation loss: the entropy of the text; NAN: unknown
    double step_s;          // time of the last step
    double sensed_s;        // when the device was asked last
} Run_;

static int run_is_first_(const Run_* run) { return run->comm.rank == 0; }

// What a process of a run may ask for; a sum of these.
enum {
    RUN_SAVE_ = SESSION_SAVE,
    RUN_STOP_ = SESSION_STOP,
    RUN_SAVE_BY_CLOCK_ = SESSION_SAVE_BY_CLOCK,
    RUN_SAVE_BEST_ = SESSION_SAVE_BEST,
    RUN_BAD_DATA_ = 4 // end: a file of the data has changed
};

// The one place where the processes of a run agree. Whether to save, stop, or end is decided by what this returns and
// by nothing else: all processes call it at the same points, and if one of them asks for something, all do it. Verdicts
// on an update need no agreement: all processes judge the same numbers.
static int run_agree_(Run_* run, int asks) { return comm_any(&run->comm, asks); }

// The signal that stops the run, of the first process that has one; 0: none.
static int run_stop_signal_(Run_* run) {
    const int mine = signals_stop(), size = run->comm.size;
    int* all = (int*)check_alloc((size_t)size, sizeof(int), "signals");
    int signal = 0;
    comm_all_gather(&run->comm, all, &mine, sizeof(mine));
    for (int r = size - 1; r >= 0; r--) {
        signal = all[r] ? all[r] : signal;
    }
    free(all);
    return signal;
}

// The sum over all processes, and the largest.
static double run_sum_(Run_* run, double mine, double* largest) {
    double* all = (double*)check_alloc((size_t)run->comm.size, sizeof(double), "numbers of all processes");
    double sum = 0;
    *largest = mine;
    comm_all_gather(&run->comm, all, &mine, sizeof(mine));
    for (int r = 0; r < run->comm.size; r++) {
        sum += all[r];
        *largest = fmax(*largest, all[r]);
    }
    free(all);
    return sum;
}

// ---- the numbers of an update ----

// What a process tells of its part in an update, or in a validation.
enum {
    RUN_HIGH_,      // square sum of its part of the gradient: WideSum
    RUN_LOW_,       //
    RUN_COUNTED_,   // targets that count
    RUN_FLOPS_,     //
    RUN_WAIT_,      // seconds waited for data
    RUN_PACE_,      // seconds for a token, 0: unknown
    RUN_BYTES_,     // of text that the targets stand for; of a validation
    RUN_AGREEMENT_, // upper half of the hash of the verdict before
    RUN_LOSSES_     // sums of losses, one for each micro-step
};

// The same of all processes together.
typedef struct {
    double losses, square_sum; // sums
    double counted, flops, bytes;
    double wait_s; // of the one that waited longest
} RunUpdate_;

// The number of micro-steps for an update, or a validation, of `sequences`.
static int64_t run_micro_steps_(const Run_* run, int64_t sequences) {
    const int64_t B = run->options.batch, micro_batches = (sequences + B - 1) / B;
    return (micro_batches + run->comm.size - 1) / run->comm.size;
}

// Adds up what all tell: losses in the order of the micro-batches, so that the sum has the same bits for any
// number of processes. run->part is set.
static RunUpdate_ run_add_up_(Run_* run, int64_t micro_steps) {
    const size_t count = RUN_LOSSES_ + (size_t)micro_steps;
    RunUpdate_ sum = {0, 0, 0, 0, 0, 0};
    WideSum square_sum = {0, 0};
    comm_all_gather(&run->comm, run->parts, run->part, count * sizeof(double));
    for (int r = 0; r < run->comm.size; r++) {
        const double* part = run->parts + (size_t)r * count;
        const WideSum own = {part[RUN_HIGH_], part[RUN_LOW_]};
        wide_sum_merge(&square_sum, own);
        sum.counted += part[RUN_COUNTED_];
        sum.flops += part[RUN_FLOPS_];
        sum.bytes += part[RUN_BYTES_];
        sum.wait_s = fmax(sum.wait_s, part[RUN_WAIT_]);
        CHECK(part[RUN_AGREEMENT_] == run->parts[RUN_AGREEMENT_],
              "step %lld: rank %d judged the step before otherwise than rank 0", (long long)run->state.step,
              r);
    }
    for (size_t i = RUN_LOSSES_; i < count; i++) {
        for (int r = 0; r < run->comm.size; r++) {
            sum.losses += run->parts[(size_t)r * count + i];
        }
    }
    sum.square_sum = wide_sum_value(square_sum);
    return sum;
}

// Names a process that is slow: all of them find it, after run_add_up_.
static void run_watch_pace_(Run_* run, int64_t micro_steps) {
    Comm* c = &run->comm;
    char note[256];
    double ratio;
    for (int r = 0; r < c->size; r++) {
        run->paces[r] = run->parts[(size_t)r * (RUN_LOSSES_ + (size_t)micro_steps) + RUN_PACE_];
    }
    const int slow = stragglers_add(&run->pace, run->paces, &ratio);
    if (slow >= 0) {
        char* hosts = (char*)check_alloc((size_t)c->size, sizeof(c->host), "host names");
        comm_all_gather(c, hosts, c->host, sizeof(c->host));
        snprintf(note, sizeof(note),
                 "note: rank %d (%s) computes %.0f %% slower than the median, and all wait for it", slow,
                 hosts + (size_t)slow * sizeof(c->host), 100 * (ratio - 1));
        log_note(&run->log, note);
        free(hosts);
    }
}

// Of --update-in-backward: the next update itself, unless the data of its batch have changed.
static BatchGradient run_update_in_backward_(Run_* run) {
    const Options* o = &run->options;
    const RunState* state = &run->state;
    const Batch batch = dataloader_next(run->train);
    BatchGradient nothing = {{0, 0}, 0, 0, 0};
    in_backward_open(&run->in_backward, &state->shares, &state->guard,
                     setup_update(o, state->step, state->updates + 1, 0), o->grad_clip,
                     (double)o->total_batch);
    if (dataloader_error(run->train)) {
        return nothing;
    }
    in_backward_batch(&run->in_backward, batch.counted);
    const BatchGradient own = run->trainer->update_in_backward(run->model, batch, &run->in_backward);
    run->part[RUN_LOSSES_] = run->in_backward.losses;
    in_backward_end(&run->in_backward, &run->state.shares);
    return own;
}

// The gradient of this process for the next update.
static BatchGradient run_own_gradient_(Run_* run) {
    return run->options.update_in_backward
               ? run_update_in_backward_(run)
               : run->trainer->gradients(run->model, run->train, run->options.total_batch,
                                         run->state.loss_scale.scale, run->part + RUN_LOSSES_);
}

// The gradient of the next update, from all processes.
static RunUpdate_ run_gradients_(Run_* run) {
    const Options* o = &run->options;
    const int64_t micro_steps = run_micro_steps_(run, o->total_batch / o->seq_len);
    const double waited_s = run->train->wait_s;
    const BatchGradient own = run_own_gradient_(run);
    run->part[RUN_HIGH_] = own.square_sum.high;
    run->part[RUN_LOW_] = own.square_sum.low;
    run->part[RUN_COUNTED_] = own.counted;
    run->part[RUN_FLOPS_] = own.flops;
    run->part[RUN_BYTES_] = 0;
    run->part[RUN_WAIT_] = run->train->wait_s - waited_s;
    run->part[RUN_PACE_] = own.pace_s;
    run->part[RUN_AGREEMENT_] = (double)(run->agreement >> 32);
    const RunUpdate_ update = run_add_up_(run, micro_steps);
    run_watch_pace_(run, micro_steps);
    return update;
}

// Whether a signal has asked the run to stop, between two batches of a validation or two tokens of a sample.
static int run_stops_(void* run) {
    comm_alive(&((Run_*)run)->comm);
    return run_agree_((Run_*)run, signals_stop() ? RUN_STOP_ : 0) != 0;
}

// Before all else that the model does, each validation and each save: ends the run if a process has
// other parameters than the others. Of another file on its disk, an error in a GPU's memory, or a
// process that does not compute as the others do.
static void run_agree_on_parameters_(Run_* run) {
    char what[80], words[32];
    if (run->comm.size > 1) {
        const uint64_t checksum = run->trainer->checksum(run->model);
        snprintf(what, sizeof(what), "the parameters after step %lld (checksum)", (long long)run->state.step);
        snprintf(words, sizeof(words), "%016llx", (unsigned long long)checksum);
        comm_agree(&run->comm, what, checksum, words);
    }
}

// ---- saving and rolling back ----

// Copies all that makes up the run, and starts to save the copy; or saves the model itself and waits.
static void run_save_(Run_* run, int reasons) {
    comm_progress(&run->comm, COMM_SAVE, run->state.step, "a save");
    session_wait(&run->session, &run->log);
    session_saves(&run->session, reasons);
    run_agree_on_parameters_(run);
    const int is_copy = run->trainer->copy_out(run->model, &run->session.checkpoints);
    run->state.sequence = run->train ? (int64_t)run->train->next : 0;
    run->state.samples_at = (int64_t)run->generator.rng.at;
    log_sync(&run->log);
    checkpoint_start(&run->session.checkpoints, &run->state);
    if (!is_copy) {
        session_wait(&run->session, &run->log);
    }
}

// Puts the run where it was when the checkpoint was saved.
static void run_restore_(Run_* run, const char* path, const SavedState* saved) {
    run->trainer->read_checkpoint(run->model, path, saved);
    run_state_restore(&run->state, &saved->run);
    if (run->train) {
        dataloader_seek(run->train, (uint64_t)saved->run.sequence);
    }
    rand_seek(&run->generator.rng, (uint64_t)saved->run.samples_at);
}

// Back to the last healthy checkpoint; the data continue after the bad batches.
static void run_roll_back_(Run_* run, const char* reason) {
    SavedState saved;
    char path[PATH_MAX];
    const uint64_t next = run->train->next;
    const int64_t from = run->state.step;
    session_roll_back(&run->session, reason, path, &saved);
    run_restore_(run, path, &saved);
    state_close(&saved);
    dataloader_seek(run->train, next);
    log_rollback(&run->log, from, run->state.step, reason);
}

// Ends the program if a file of the data has changed during the run, after saving the run as it was before the
// sequence number `next`.
static void run_check_data_(Run_* run, const Dataloader* loader, uint64_t next) {
    if (!run_agree_(run, dataloader_error(loader) ? RUN_BAD_DATA_ : 0)) {
        return;
    }
    const char* error = dataloader_error(loader);
    dataloader_seek(run->train, next);
    if (session_is_unsaved(&run->session, &run->state)) {
        run_save_(run, RUN_SAVE_);
    }
    session_wait(&run->session, &run->log);
    CHECK(!error, "%s", error);
    comm_barrier(&run->comm); // until the process whose data are bad ends all
}

// ---- a step ----

// The verdict on the gradient of an update.
typedef struct {
    double loss, norm; // mean over the targets that count, nats; of its gradient, without any scale
    Update update;     // if it is made
    int is_made;       // the update
    char reason[96];   // why it is not made
} RunVerdict_;

// Adjusts the loss scale. Returns whether the gradient overflowed, and a smaller scale may help: that is no
// outlier, and no divergence.
static int run_overflowed_(LossScale* scale, double loss, double norm, char reason[96]) {
    const float before = scale->scale;
    loss_scale_update(scale, isfinite(norm));
    if (isfinite(norm) || !isfinite(loss) || scale->scale == before) {
        return 0;
    }
    snprintf(reason, 96, "gradient overflow: loss scale %g, was %g", scale->scale, before);
    return 1;
}

// Of an update that was made in the backward pass: whether it was, at least in part.
static void run_judge_in_backward_(ModelConfig cfg, const InBackward* made, RunVerdict_* verdict) {
    verdict->is_made = made->updated > 0;
    if (verdict->is_made && made->stopped_at > 0) {
        snprintf(verdict->reason, sizeof(verdict->reason),
                 "in block %d and all below it, whose gradient is not finite",
                 model_group_layer(cfg, made->stopped_at));
    } else if (verdict->is_made && made->stopped_at == 0) {
        snprintf(verdict->reason, sizeof(verdict->reason),
                 "outside of the blocks, where the gradient is not finite");
    }
}

// Schedule, clipping, overflow and outliers.
static RunVerdict_ run_judge_(Run_* run, const RunUpdate_* update) {
    const Options* o = &run->options;
    RunState* state = &run->state;
    // The loss counts 1 / total_batch for each token; it should count 1 / counted.
    const double factor = targets_factor((double)o->total_batch, update->counted);
    const double scale = factor / state->loss_scale.scale;
    RunVerdict_ verdict;
    memset(&verdict, 0, sizeof(verdict));
    verdict.loss = update->losses / (double)o->total_batch * factor;
    verdict.norm = sqrt(update->square_sum) * scale;
    verdict.update = setup_update(o, state->step, state->updates + 1, verdict.norm);
    verdict.update.adamw.grad_scale *= (float)scale;
    int skip = run_overflowed_(&state->loss_scale, verdict.loss, verdict.norm, verdict.reason);
    if (!skip) {
        const UpdateVerdict guard = outliers_check(&state->guard, verdict.loss, verdict.norm);
        skip = guard != UPDATE_DO;
        snprintf(verdict.reason, sizeof(verdict.reason), "%s", outliers_reason(guard));
    }
    verdict.is_made = !skip;
    if (o->update_in_backward) {
        run_judge_in_backward_(run->cfg, &run->in_backward, &verdict);
    }
    const float decided[3] = {verdict.update.adamw.lr, verdict.update.adamw.grad_scale,
                              (float)verdict.is_made};
    run->agreement = xxh64(decided, sizeof(decided));
    return verdict;
}

// Once a second: asking may take as long as a step of a small model.
static void run_sense_(Run_* run) {
    double power_w, clock_mhz;
    const double now_s = time_now_s();
    if (run->trainer->sensors && now_s - run->sensed_s >= 1) {
        run->sensed_s = now_s;
        run->trainer->sensors(run->model, &power_w, &clock_mhz);
        log_sensors(&run->log, power_w, clock_mhz);
    }
}

// After step number state.step.
static void run_log_step_(Run_* run, const RunVerdict_* verdict, double flops) {
    const UpdateGuard* guard = &run->state.guard;
    char note[MFU_NOTE_BYTES];
    const double mfu = mfu_of(&run->mfu, flops, run->step_s, time_now_s(), note);
    if (note[0]) {
        log_note(&run->log, note);
    }
    log_peak(&run->log, run->mfu.peak);
    log_data_wait(&run->log, run->data_wait_s);
    run_sense_(run);
    log_train(&run->log, run->state.step, verdict->loss, outliers_shown_z(guard, guard->loss_z),
              verdict->norm, outliers_shown_z(guard, guard->norm_z), verdict->update.adamw.lr,
              run->step_s * 1e3, mfu);
    if (verdict->reason[0]) {
        log_skip(&run->log, run->state.step, verdict->reason);
    }
}

// One update, or none if the loss or the norm forbids it.
static void run_step_(Run_* run) {
    const Trainer* trainer = run->trainer;
    const Options* o = &run->options;
    RunState* state = &run->state;
    const double start_s = time_now_s();
    char reason[256];
    if (o->overfit) {
        dataloader_seek(run->train, 0);
    }
    const uint64_t first = run->train->next;
    comm_progress(&run->comm, COMM_DATA, state->step, "the gradient of an update");
    const RunUpdate_ update = run_gradients_(run);
    run->data_wait_s += update.wait_s;
    run_check_data_(run, run->train, first);
    const RunVerdict_ verdict = run_judge_(run, &update);
    comm_progress(&run->comm, COMM_UPDATE, state->step, "the update, a validation or samples");
    if (verdict.is_made && !o->update_in_backward) {
        trainer->update(run->model, verdict.update);
    }
    state->updates += verdict.is_made;
    state->step++;
    state->stage = STAGE_UPDATED;
    state->tokens += o->total_batch;
    run->step_s = time_now_s() - start_s;
    run_log_step_(run, &verdict, update.flops);
    if (session_diverged(&run->session, &run->log, state, reason)) {
        run_roll_back_(run, reason);
    }
    if (trainer->report) {
        trainer->report(run->model, o, state->step);
    }
}

// ---- between two steps ----

// Sets the mean over the first sequences of the validation data, in order. Returns 0 if a signal
// stopped it.
static int run_evaluate_(Run_* run, LogVal* val) {
    const int64_t micro_steps = run_micro_steps_(run, run->val->settings.sequences);
    memset(run->part, 0, RUN_LOSSES_ * sizeof(double));
    run_agree_on_parameters_(run);
    dataloader_seek(run->val, 0);
    for (int64_t i = 0; i < micro_steps; i++) {
        if (run_stops_(run)) {
            return 0;
        }
        comm_progress(&run->comm, COMM_EVALUATE, run->state.step, "a validation");
        log_progress(&run->log, run->state.step, "validating", i, micro_steps);
        const Batch batch = dataloader_next(run->val);
        run->trainer->evaluate(run->model, batch, i, run->part + RUN_LOSSES_);
        run->part[RUN_COUNTED_] += batch.counted;
        run->part[RUN_BYTES_] +=
            run_data_target_bytes(&run->data, batch.targets, (size_t)batch.B * (size_t)batch.T);
    }
    if (run->trainer->validated) {
        run->trainer->validated(run->model, micro_steps, run->part + RUN_LOSSES_);
    }
    run_check_data_(run, run->val, run->train->next);
    const RunUpdate_ all = run_add_up_(run, micro_steps);
    val->loss = all.counted > 0 ? all.losses / all.counted : 0;
    val->bpb = all.bytes > 0 ? all.losses / M_LN2 / all.bytes : NAN;
    val->sequences = run->eval_sequences;
    val->all_sequences = (int64_t)run->val->num_sequences;
    return 1;
}

// Returns 0 if a signal stopped it.
static int run_tasks_(Run_* run) {
    const EvaluationRun how = {
        run->trainer->token_losses, run->model, &run->comm, &run->log, run_stops_, run};
    return evaluation_log(&run->evaluation, &how, run->state.step);
}

// All that is due between two updates, besides saving. Returns early when a signal asks the run to stop.
static void run_evaluate_and_sample_(Run_* run) {
    RunState* state = &run->state;
    LogVal val;
    if (run->val && session_validation_is_due(&run->session, state, run->validates_first)) {
        if (!run_evaluate_(run, &val)) {
            return;
        }
        state->val_loss = val.loss;
        validations_add(&state->validations, state->step, val.loss);
        log_val(&run->log, state->step, &val);
        session_judge_validation(&run->session, &run->log, state, run->cfg.V);
    }
    if (session_tasks_are_due(&run->session, state) && !run_tasks_(run)) {
        return;
    }
    state->stage = state->stage == STAGE_UPDATED ? (int64_t)STAGE_VALIDATED : state->stage;
    if (session_samples_are_due(&run->session, state) &&
        !generator_log(&run->generator, &run->log, state->step, run_stops_, run)) {
        return;
    }
    state->stage = STAGE_SAMPLED;
}

// The run, to its end or until it has to stop; returns whether it is at its end.
static int run_loop_(Run_* run) {
    for (;;) {
        run_evaluate_and_sample_(run);
        const int due = run_agree_(run, session_next(&run->session, &run->state, run->step_s));
        session_report(&run->session, &run->log);
        if (due & (RUN_SAVE_ | RUN_SAVE_BY_CLOCK_ | RUN_SAVE_BEST_)) {
            run_save_(run, due);
        }
        if (due & RUN_STOP_ || run->state.step >= session_last_step(&run->session, &run->state)) {
            comm_progress(&run->comm, COMM_SAVE, run->state.step, "the last save");
            session_wait(&run->session, &run->log);
            return !(due & RUN_STOP_);
        }
        run_step_(run);
    }
}

// ---- opening and closing ----

// The loaders, and room for the numbers of an update or a validation.
static void run_open_data_(Run_* run) {
    const Options* o = &run->options;
    run->train = &run->loaders[0];
    run->val = &run->loaders[1];
    run_data_open_loaders(run->train, run->val, &run->data, o);
    run->eval_sequences = run->val->settings.sequences;
    const int64_t update = run_micro_steps_(run, o->total_batch / o->seq_len),
                  validation = run_micro_steps_(run, run->eval_sequences);
    const size_t count = RUN_LOSSES_ + (size_t)(update > validation ? update : validation);
    run->part = (double*)check_alloc(count, sizeof(double), "losses");
    run->parts = (double*)check_alloc(array_bytes((size_t)run->comm.size, count), sizeof(double), "losses");
    run->paces = (double*)check_alloc((size_t)run->comm.size, sizeof(double), "paces of processes");
    stragglers_open(&run->pace, run->comm.size);
}

// The model, its data and the generator of samples.
static void run_open_model_(Run_* run) {
    const Options* o = &run->options;
    run->model = (Model*)check_alloc(1, run->trainer->model_bytes, "model");
    run->trainer->open(run->model, run->cfg, o, &run->comm);
    if (run_data_has_tokens(&run->data)) {
        run_open_data_(run);
    }
    evaluation_start(&run->evaluation, stdout, run->comm.size);
    run->floor = run_data_floor(&run->data, run->eval_sequences);
    const Trainer* trainer = run->trainer;
    const GeneratorModel model = {
        run->model, trainer->read_text, trainer->next_tokens, run->cfg.V, run->cfg.Vp, o->seq_len, 1};
    generator_open(&run->generator, model, &run->data, o);
}

// What it takes to save the run, to stop it and to continue it.
static void run_open_session_(Run_* run) {
    const Trainer* trainer = run->trainer;
    CheckpointRun saved;
    memset(&saved, 0, sizeof(saved));
    saved.trainer = trainer->name;
    saved.cfg = run->cfg;
    saved.optimizer = setup_optimizer(&run->options);
    saved.zero = setup_zero(run->cfg, &run->options, run->options.shards);
    saved.comm = &run->comm;
    saved.dtype = trainer->saved_dtype(&run->options);
    saved.eot = run->generator.eot;
    saved.tokenizer = run_data_saved_tokenizer(&run->data);
    saved.config = run->kept_config;
    saved.train_tokens = run->data.train.tokens;
    saved.train_data = run->data.train.fingerprint;
    saved.extra = trainer->save_extra;
    saved.extra_context = run->model;
    session_open(&run->session, &run->options, &run->resume, saved, run->start_s);
}

// Where the first weights are from. Of a model that was trained with dropout, that this run has
// none.
static void run_print_weights_(const Run_* run) {
    const char* path = run->model_path;
    if (run->resume.is_active) {
        return; // said by resume_check
    }
    if (!path) {
        printf("weights: random, from --seed %llu\n", (unsigned long long)run->options.seed);
        return;
    }
    printable_line(stdout, "weights: read from %s", path);
    const double dropout = file_is_directory(path) ? hf_config_dropout(path) : 0;
    if (dropout > 0 && run->options.steps != 0) {
        printable_line(stdout, "note: %s/config.json sets dropout to %g; this program trains without dropout",
                       path, dropout);
    }
}

// The facts of the run: weights, data, device, and the loss that can be reached.
static void run_print_facts_(const Run_* run) {
    run_print_weights_(run);
    run_data_print(stdout, &run->data);
    run->trainer->print_device(run->model, run->plan.peak);
    if (isfinite(run->floor)) {
        printf(
            "floor: the entropy of the validation stories is %.4f nats per token; no model can do better\n",
            run->floor);
    }
    export_print(stdout, &run->options, &run->data);
    fflush(stdout); // the first step may take long
}

// The state of a new run and its first weights, or all of it from a checkpoint.
static void run_open_state_(Run_* run) {
    const Trainer* trainer = run->trainer;
    const Options* o = &run->options;
    run->state = run_state_open(outliers_open(o->skip_loss_z, o->skip_grad_z), trainer->loss_scale());
    if (o->update_in_backward) {
        const ZeroPlan whole = zero_plan(run->cfg, 0, 0, 1);
        run->state.shares = clip_shares_open(&whole);
    }
    run->validates_first =
        !trainer->validates_first ||
        trainer->validates_first(o, model_flops_per_token(run->cfg, o->seq_len), run->eval_sequences);
    if (run->resume.is_active) {
        run_restore_(run, run->resume.path, &run->resume.saved);
        if (run->train) {
            dataloader_seek(run->train, (uint64_t)run->resume.sequence);
        }
    } else {
        trainer->first_weights(run->model, run->model_path, o->seed);
    }
    run_agree_on_parameters_(run);
}

static void run_open_log_(Run_* run) {
    char program[128];
    options_version(program, sizeof(program), &run->options, run->trainer->program_name);
    const LogIdentity who = {program,    run->trainer->name, run->plan.device,
                             run->floor, plan_print_json,    run->plan.memory};
    session_begin(&run->session, &run->resume, &run->state, &run->log, run->results, who);
}

static void run_close_(Run_* run) {
    session_close(&run->session);
    generator_close(&run->generator);
    evaluation_close(&run->evaluation);
    if (run->train) {
        dataloader_close(run->val);
        dataloader_close(run->train);
    }
    run->trainer->close(run->model);
    free(run->part);
    free(run->parts);
    free(run->paces);
    stragglers_close(&run->pace);
    free(run->model);
    log_close(&run->log);
}

// The command that uses what was trained, if it was saved with its tokenizer.
static void run_print_use_(const Run_* run, const char* program) {
    char path[PATH_MAX];
    const Tokenizer* tokenizer = run_data_saved_tokenizer(&run->data);
    if (run->session.can_save && run_is_first_(run) && tokenizer && !tokenizer->decode_only) {
        checkpoint_path(path, run->options.out, run->state.step, "");
        if (access(path, F_OK) == 0) {
            printf("generate text: %s --model %s --prompt \"%s\"\n", program, run->options.out,
                   run->data.kind == DATA_STORIES ? "One day" : "Once upon a time");
        }
    }
}

// What was planned, by kind, and what was taken beside it.
static void run_print_memory_(Run_* run) {
    TextBuffer note;
    text_buffer_open(&note, "the summary");
    plan_print_kinds(note.file, run->plan.memory);
    if (run->trainer->beside_mib) {
        fprintf(note.file, "; beside it on the GPU, by CUDA and its libraries: %.1f MiB",
                run->trainer->beside_mib(run->model));
    }
    fprintf(note.file, "; this process: %.1f MiB, with its program, libraries, data and vocabulary",
            log_peak_mib());
    char* text = text_buffer_close(&note);
    log_note(&run->log, text);
    free(text);
}

// The checkpoint that --keep-best has kept.
static void run_print_best_(const Run_* run) {
    char path[PATH_MAX];
    const Validations* v = &run->state.validations;
    checkpoint_path(path, run->options.out, v->best_step, "");
    if (run->session.can_save && run->options.keep_best && isfinite(v->best) && access(path, F_OK) == 0) {
        printable_line(stdout, "best validation loss %.4f: %s", v->best, path);
    }
}

// After the last step.
static void run_summarize_(Run_* run) {
    double peak_mib;
    comm_progress(&run->comm, COMM_SAVE, run->state.step, "the export");
    run->trainer->export_model(run->model, &run->options, &run->data);
    run_sum_(run, run->trainer->peak_mib(), &peak_mib);
    const LogSummary end = {run->state.step,
                            run->state.val_loss,
                            run->state.validations.best,
                            run->state.validations.best_step,
                            run->floor,
                            run->options.seq_len,
                            (double)plan_bytes(run->plan.memory) / (1 << 20),
                            peak_mib};
    log_summary(&run->log, end);
    run_print_memory_(run);
}

static void run_print_traffic_(const Run_* run) {
    plan_print_traffic(stdout, run->cfg, &run->options, run->plan.speed.gradient_bytes,
                       run->plan.speed.element_bytes);
}

// The run itself. Returns its exit status.
static int run_train_(Run_* run, const char* program) {
    double largest;
    const double peak = run_sum_(run, run->plan.peak, &largest);
    mfu_open(&run->mfu, peak, run->plan.peak, run_is_first_(run) ? run->trainer->measure_peak : NULL,
             &run->options, time_now_s());
    plan_print_memory(stdout, run->cfg, &run->options, run->plan.memory);
    run_print_traffic_(run);
    fflush(stdout); // whatever the system does to a run that takes too much
    run_open_model_(run);
    run_open_session_(run);
    run_print_facts_(run);
    run_open_state_(run);
    run_open_log_(run);
    const int is_done = run_loop_(run), is_saved = run->session.can_save, signal = run_stop_signal_(run);
    if (is_done) {
        session_ended_early(&run->session, &run->log, &run->state);
        run_summarize_(run);
        run_print_best_(run);
        run_print_use_(run, program);
    } else {
        session_stopped(&run->session, &run->log, &run->state, signal, program);
    }
    run_close_(run);
    if (is_done || is_saved) {
        return is_done ? EXIT_SUCCESS : EXIT_INTERRUPTED;
    }
    if (run->comm.size == 1) {
        signals_end_now();
    }
    return 128 + signal; // a process that dies by a signal ends the others in the middle of their work
}

// ---- from the command line to the run ----

// Rank 0 sets the run up before the others: it encodes text and trains vocabularies, which they then find.
static void run_turn_begins_(Run_* run) {
    if (!run_is_first_(run)) {
        comm_barrier(&run->comm);
    }
}

static void run_turn_ends_(Run_* run) {
    if (run_is_first_(run)) {
        comm_barrier(&run->comm);
    }
    comm_progress(&run->comm, COMM_SETUP, -1, "setting up the run");
}

// Who and where the processes are.
static void run_print_processes_(const Run_* run, const char* launcher) {
    const Comm* c = &run->comm;
    const Options* o = &run->options;
    if (c->size > 1) {
        printf("processes: %d on %d machine%s (%s, %s), rank 0 on %s; zero %d, shards of %d", c->size,
               c->nodes, words_s(c->nodes), launcher, c->library, c->host, o->zero, o->shards);
        c->size > o->shards ? printf(", %d replicas\n", c->size / o->shards) : printf("\n");
    }
}

// Joins the other processes of the run, if there are any.
static void run_join_(Run_* run) {
    Options* o = &run->options;
    const int is_only_plan = o->plan && o->num_processes > 1 && o->rank == OPTION_AUTO;
    const Launcher alone = {{0, 1, 0, 1}, LAUNCHER_AUTO, "", {"", 0, "", ""}},
                   launch = is_only_plan ? alone : launcher_find(o);
    o->processes = launch.place.size;
    o->process = launch.place.rank;
    if (is_only_plan) {
        o->processes = o->num_processes;
    }
    o->zero = launcher_zero(o, o->processes);
    comm_open(&run->comm, launch.place, &launch.meeting, o->timeout);
    ranks_agree_on_program(&run->comm);
    ranks_agree_on_command(&run->comm, o);
    o->shards = launcher_shards(o, &run->comm);
    run_print_processes_(run, launch.launcher);
    threads_open(o->threads, run->comm.local_size, launch.launcher);
}

// --plan: what the run would take, without taking it.
static void run_print_plan_(Run_* run) {
    const int is_open = run_data_has_tokens(&run->data) && !run->data.is_unknown;
    run->plan.eval_sequences =
        is_open ? run_data_eval_sequences(&run->options, mixture_epoch(&run->data.val)) : 0;
    plan_print(stdout, run->cfg, &run->options, &run->plan);
    run_print_traffic_(run);
}

// After the command line was read: --verify-data, --print-config, --plan, or the run. Returns the exit status.
static int run_dispatch_(Run_* run, const char* program) {
    Options* options = &run->options;
    if (options->verify_data) {
        run_turn_ends_(run);
        return run_is_first_(run) ? run_data_verify(options) : EXIT_SUCCESS;
    }
    setup_check_quantize(options, run->cfg);
    setup_check_freeze(options, run->cfg);
    setup_check_share(options, run->cfg);
    setup_products(options);
    setup_batch(options);
    run_data_open(&run->data, options);
    setup_training(options, run->model_path != NULL);
    setup_check_optimizer(options, run->cfg);
    if (!options_only_look(options)) {
        evaluation_open(&run->evaluation, &run->data, options, run->cfg.V);
    }
    run_turn_ends_(run);
    if (options->print_config) {
        options_print_config(stdout, options);
        return EXIT_SUCCESS;
    }
    options_print_banner(stdout, options, program);
    fflush(stdout); // the next steps may take long
    if (options->plan) {
        run->trainer->plan(&run->plan, run->cfg, options, &run->comm);
        run_print_plan_(run);
        return EXIT_SUCCESS;
    }
    resume_check(&run->resume, options, stdout, run->trainer->name, run->data.train.tokens,
                 run->data.train.fingerprint);
    ranks_agree_on_run(&run->comm, options, run->resume.is_active ? run->resume.path : NULL, run->model_path,
                       run->cfg, &run->data);
    evaluation_agree(&run->evaluation, &run->comm);
    signals_end("setting up the run");
    run->trainer->plan(&run->plan, run->cfg, options, &run->comm);
    return run_train_(run, program);
}

// --report and --compare: about runs that exist, so any other option would do nothing. Returns whether one was given.
static int run_reports_(const Options* o) {
    const int report = o->report[0] != '\0', compare = o->compare[0] != '\0';
    if (o->out_html[0] && !report) {
        die_usage("--out-html %s needs the runs to report on: --report", o->out_html);
    }
    for (int i = 0; i < OPTION_ROWS && (report || compare); i++) {
        if (o->given[i] && strcmp(OPTION_TABLE[i].group, "reports") != 0) {
            die_usage("--%s cannot be combined with --%s: it does not train", report ? "report" : "compare",
                      OPTION_TABLE[i].name);
        }
    }
    if (compare) {
        compare_runs(stdout, o->compare);
    }
    if (report) {
        report_write(stdout, o->report, o->out_html);
    }
    return report || compare;
}

// --quiet: standard output keeps the results; everything else that is printed there goes nowhere.
static void run_be_quiet_(Run_* run) {
    const Options* o = &run->options;
    if (o->quiet && !options_only_look(o) && !o->generates) {
        const int fd = dup(STDOUT_FILENO);
        run->results = fd < 0 ? NULL : fdopen(fd, "w");
        CHECK(run->results && freopen("/dev/null", "w", stdout),
              "standard output: cannot be set aside for --quiet: %s", strerror(errno));
    }
}

// After the command line was read. Returns the exit status.
static int run_start_(Run_* run, const char* program) {
    Options* options = &run->options;
    if (run_reports_(options)) {
        file_flush_standard();
        return EXIT_SUCCESS;
    }
    run_be_quiet_(run);
    run_join_(run);
    if (options->generates) {
        return generate_texts(run->trainer, options, &run->comm);
    }
    comm_progress(&run->comm, COMM_FIRST, -1, "checkpoints and data");
    resume_open(&run->resume, options, &run->comm);
    if (run_is_first_(run)) {
        run_outputs_check(options);
    }
    run_turn_begins_(run);
    run->model_path = run->resume.is_active ? run->resume.path : model_path_find(options, run->newest);
    const ModelConfig found = setup_read_model(run->model_path);
    run->kept_config = setup_kept_config(run->model_path);
    run_data_open_tokenizer(&run->data, options, run->resume.is_active ? NULL : run->model_path);
    run->cfg = resume_config(&run->resume, setup_model(options, &run->data, run->model_path, found));
    const int status = run_dispatch_(run, program);
    if (options_only_look(options)) {
        file_flush_standard();
    }
    run_data_close(&run->data);
    resume_close(&run->resume);
    comm_close(&run->comm);
    free(run->kept_config);
    return status;
}

int run_program(int argc, char** argv, const Trainer* trainer) {
    Run_* run = (Run_*)check_alloc(1, sizeof(*run), "the run"); // a third of the smallest stack
    run->trainer = trainer;
    run->start_s = time_now_s();
    run->results = stdout;
    comm_expect(&run->comm, launcher_expect());
    options_parse(&run->options, argc, argv, trainer->program);
    const int status = run_start_(run, argv[0]);
    options_close(&run->options);
    CHECK(run->results == stdout || fclose(run->results) == 0, "standard output: cannot write: %s",
          strerror(errno));
    free(run);
    return status;
}

int run_main(int argc, char** argv, const Trainer* trainer) {
    check_stack(); // before paths and messages, which take more than some limits
    file_open_standard();
    signals_open();
    return run_program(argc, argv, trainer);
}

#endif // RUN_IMPLEMENTATION

#endif
