/*
run.h -- what the training loop calls: the numbers of an update from all ranks, the verdict on it, logging, validation,
tasks and samples, saving and rolling back. start.h opens the run before the loop, and closes it.

The model is opaque here, and nothing depends on the type of its weights (trainer.h).
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/dataloader.h"
#include "llmc/run/evaluation.h"
#include "llmc/generate/generator.h"
#include "llmc/optim/update_in_backward.h"
#include "llmc/log/log.h"
#include "llmc/plan/mfu.h"
#include "llmc/setup/options.h"
#include "llmc/comm/stragglers.h"
#include "llmc/plan/plan.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/setup/run_data.h"
#include "llmc/run/session.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/comm/comm.h"
#include "llmc/model/model.h"
#include "llmc/run/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

// One run of the program.
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
    RankReport *report, *reports; // of this rank, and of all ranks one after the other
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
} Run;

static inline int run_is_first(const Run* run) { return run->comm.rank == 0; }

// The number of micro-steps for an update, or a validation, of `sequences`.
int64_t run_micro_steps(const Run* run, int64_t sequences);

// Ends the run if a process has other parameters than the others.
void run_agree_on_parameters(Run* run);

// Puts the run where it was when the checkpoint was saved.
void run_restore(Run* run, const char* path, const SavedState* saved);

// The run, to its end or until it has to stop; returns whether it is at its end.
int run_loop(Run* run);

#ifdef __cplusplus
}
#endif

#ifdef RUN_IMPLEMENTATION

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/rand.h"
#include "llmc/base/signals.h"
#include "llmc/base/wide_sum.h"
#include "llmc/base/xxh64.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/optim/outliers.h"
#include "llmc/optim/loss_scale.h"
#include "llmc/setup/resolve.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/optim/optimizer.h"

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
static int run_agree_(Run* run, int asks) { return comm_any(&run->comm, asks); }

// ---- the numbers of an update ----

// The same of all processes together.
typedef struct {
    double losses, square_sum; // sums
    double counted, flops, bytes;
    double wait_s; // of the one that waited longest
} RunUpdate_;

// The number of micro-steps for an update, or a validation, of `sequences`.
int64_t run_micro_steps(const Run* run, int64_t sequences) {
    const int64_t B = run->options.batch, micro_batches = (sequences + B - 1) / B;
    return (micro_batches + run->comm.size - 1) / run->comm.size;
}

static size_t run_report_bytes_(int64_t micro_steps) {
    return sizeof(RankReport) + (size_t)micro_steps * sizeof(double);
}

// The report of rank r, of those that were gathered.
static RankReport* run_report_of_(const Run* run, int r, int64_t micro_steps) {
    return (RankReport*)((char*)run->reports + (size_t)r * run_report_bytes_(micro_steps));
}

// Gathers the reports of all ranks and adds them up: losses in the order of the micro-batches, so that the sum has the same
// bits for any number of ranks.
static RunUpdate_ run_add_up_(Run* run, int64_t micro_steps) {
    RunUpdate_ sum = {0, 0, 0, 0, 0, 0};
    WideSum square_sum = {0, 0};
    comm_all_gather(&run->comm, run->reports, run->report, run_report_bytes_(micro_steps));
    for (int r = 0; r < run->comm.size; r++) {
        const RankReport* report = run_report_of_(run, r, micro_steps);
        wide_sum_merge(&square_sum, report->square_sum);
        sum.counted += report->counted;
        sum.flops += report->flops;
        sum.bytes += report->target_bytes;
        sum.wait_s = fmax(sum.wait_s, report->wait_s);
        CHECK(report->agreement == run->reports->agreement,
              "step %lld: rank %d judged the step before otherwise than rank 0", (long long)run->state.step,
              r);
    }
    for (int64_t i = 0; i < micro_steps; i++) {
        for (int r = 0; r < run->comm.size; r++) {
            sum.losses += rank_report_losses(run_report_of_(run, r, micro_steps))[i];
        }
    }
    sum.square_sum = wide_sum_value(square_sum);
    return sum;
}

// Names a process that is slow: all of them find it, after run_add_up_.
static void run_watch_pace_(Run* run, int64_t micro_steps) {
    Comm* c = &run->comm;
    char note[256];
    double ratio;
    for (int r = 0; r < c->size; r++) {
        run->paces[r] = run_report_of_(run, r, micro_steps)->pace_s;
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

// --update-in-backward: makes the whole update, unless the data of its batch have changed.
static void run_update_in_backward_(Run* run) {
    const Options* o = &run->options;
    const RunState* state = &run->state;
    const Batch batch = dataloader_next(run->train);
    in_backward_open(&run->in_backward, &state->shares, &state->guard,
                     setup_update(o, state->step, state->updates + 1, 0), o->grad_clip,
                     (double)o->total_batch);
    if (dataloader_error(run->train)) {
        return;
    }
    in_backward_batch(&run->in_backward, batch.counted);
    run->trainer->update_in_backward(run->model, batch, &run->in_backward, run->report);
    rank_report_losses(run->report)[0] = run->in_backward.losses;
    in_backward_end(&run->in_backward, &run->state.shares);
}

// The gradient of the next update, from all ranks.
static RunUpdate_ run_gradients_(Run* run) {
    const Options* o = &run->options;
    const int64_t micro_steps = run_micro_steps(run, o->total_batch / o->seq_len);
    const double waited_s = run->train->wait_s;
    memset(run->report, 0, run_report_bytes_(micro_steps));
    run->report->agreement = run->agreement;
    if (o->update_in_backward) {
        run_update_in_backward_(run);
    } else {
        run->trainer->gradients(run->model, run->train, o->total_batch, run->state.loss_scale.scale,
                                run->report);
    }
    run->report->wait_s = run->train->wait_s - waited_s;
    const RunUpdate_ update = run_add_up_(run, micro_steps);
    run_watch_pace_(run, micro_steps);
    return update;
}

// Whether a signal has asked the run to stop, between two batches of a validation or two tokens of a sample.
static int run_stops_(void* run) {
    comm_alive(&((Run*)run)->comm);
    return run_agree_((Run*)run, signals_stop() ? RUN_STOP_ : 0) != 0;
}

// Before all else that the model does, each validation and each save: ends the run if a process has
// other parameters than the others. Of another file on its disk, an error in a GPU's memory, or a
// process that does not compute as the others do.
void run_agree_on_parameters(Run* run) {
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
static void run_save_(Run* run, int reasons) {
    comm_progress(&run->comm, COMM_SAVE, run->state.step, "a save");
    session_wait(&run->session, &run->log);
    session_saves(&run->session, reasons);
    run_agree_on_parameters(run);
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
void run_restore(Run* run, const char* path, const SavedState* saved) {
    run->trainer->read_checkpoint(run->model, path, saved);
    run_state_restore(&run->state, &saved->run);
    if (run->train) {
        dataloader_seek(run->train, (uint64_t)saved->run.sequence);
    }
    rand_seek(&run->generator.rng, (uint64_t)saved->run.samples_at);
}

// Back to the last healthy checkpoint; the data continue after the bad batches.
static void run_roll_back_(Run* run, const char* reason) {
    SavedState saved;
    char path[PATH_MAX];
    const uint64_t next = run->train->next;
    const int64_t from = run->state.step;
    session_roll_back(&run->session, reason, path, &saved);
    run_restore(run, path, &saved);
    state_close(&saved);
    dataloader_seek(run->train, next);
    log_rollback(&run->log, from, run->state.step, reason);
}

// Ends the program if a file of the data has changed during the run, after saving the run as it was before the
// sequence number `next`.
static void run_check_data_(Run* run, const Dataloader* loader, uint64_t next) {
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
static RunVerdict_ run_judge_(Run* run, const RunUpdate_* update) {
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
static void run_sense_(Run* run) {
    double power_w, clock_mhz;
    const double now_s = time_now_s();
    if (run->trainer->sensors && now_s - run->sensed_s >= 1) {
        run->sensed_s = now_s;
        run->trainer->sensors(run->model, &power_w, &clock_mhz);
        log_sensors(&run->log, power_w, clock_mhz);
    }
}

// After step number state.step.
static void run_log_step_(Run* run, const RunVerdict_* verdict, double flops) {
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
static void run_step_(Run* run) {
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
static int run_evaluate_(Run* run, LogVal* val) {
    const int64_t micro_steps = run_micro_steps(run, run->val->settings.sequences);
    memset(run->report, 0, run_report_bytes_(micro_steps));
    run_agree_on_parameters(run);
    dataloader_seek(run->val, 0);
    for (int64_t i = 0; i < micro_steps; i++) {
        if (run_stops_(run)) {
            return 0;
        }
        comm_progress(&run->comm, COMM_EVALUATE, run->state.step, "a validation");
        log_progress(&run->log, run->state.step, "validating", i, micro_steps);
        const Batch batch = dataloader_next(run->val);
        run->trainer->evaluate(run->model, batch, i, rank_report_losses(run->report));
        run->report->counted += batch.counted;
        run->report->target_bytes +=
            run_data_target_bytes(&run->data, batch.targets, (size_t)batch.B * (size_t)batch.T);
    }
    if (run->trainer->validated) {
        run->trainer->validated(run->model, micro_steps, rank_report_losses(run->report));
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
static int run_tasks_(Run* run) {
    const EvaluationRun how = {
        run->trainer->token_losses, run->model, &run->comm, &run->log, run_stops_, run};
    return evaluation_log(&run->evaluation, &how, run->state.step);
}

// All that is due between two updates, besides saving. Returns early when a signal asks the run to stop.
static void run_evaluate_and_sample_(Run* run) {
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
int run_loop(Run* run) {
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

#endif // RUN_IMPLEMENTATION

#endif
