/*
session.h -- one start of the program; a long run may need several.

It decides what is due between two updates, when to save, when to stop, and where to roll back to.

    due         validation every --eval-every steps, tasks every --tasks-every, samples every
                --sample-every; all of them also at the last step, which is --steps, or earlier if
                --patience ends the run. A resumed run does not repeat the work done at its step
    save        every --save-every steps, or every --save-minutes, and at the last step; with
                --keep-best after the best validation so far; on SIGUSR1; before it stops. A save of
                --save-minutes, --keep-best or a stop counts as by the clock: --keep auto keeps two
    stop        if a signal or --stop-run asks for it: between two steps, batches of a validation,
                or tokens of a sample; or before --max-hours are over, with time left to save
    roll back   if the run has diverged, with --on-divergence rollback: to the newest healthy
                checkpoint of this run. Later checkpoints are removed, and later data are skipped

Without --out nothing is saved: a signal ends the program, after a line that says at which step.
*/
#ifndef LLMC_SESSION_H
#define LLMC_SESSION_H

#include <limits.h>
#include <math.h>
#include <stdint.h>

#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/log/log.h"
#include "llmc/setup/options.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/checkpoint/run_state.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SESSION_SAVE = 1,
    SESSION_STOP = 2,
    SESSION_SAVE_BY_CLOCK = 8,
    SESSION_SAVE_BEST = 16,
    SESSION_TRIES_ = 3,
    SESSION_REASON_BYTES = 2048 // of the reason why a run rolls back
};

typedef struct {
    const Settled* settled;
    int can_save;
    Checkpoints checkpoints;
    double end_s; // end of --max-hours; INFINITY: no limit
    double longest_step_s;
    double saved_s;        // start of the last save, or of the session
    int64_t rollback_step; // last step rolled back to
    int tries;             // number of times it was rolled back to
    double looked_s;       // time when a request to stop was last looked for
    int is_asked;          // true: --stop-run has asked this process to stop
    int has_warned;        // true once warned that the validation loss has diverged
} Session;

// Opens a session. `start_s` is the start of the program (CLOCK_MONOTONIC); the other arguments are
// as for checkpoints_open. Changes nothing in --out but removes checkpoints that --keep no longer
// wants.
void session_open(Session* s, const Settled* settled, const Resume* resume, CheckpointRun run,
                  double start_s);

// Opens the log and logs how the run starts. Call it last, when nothing can be refused any more,
// because it moves the logs of an earlier run aside. A finished run makes samples again if the
// command line asks for them.
void session_begin(const Session* s, const Resume* resume, RunState* run, RunLog* log, FILE* screen,
                   LogIdentity who);

void session_close(Session* s);

// Returns true if a validation is due. `validates_first`: also before the first update.
int session_validation_is_due(const Session* s, const RunState* run, int validates_first);

// Returns true if the tasks are due. They follow the validation, if one is due.
int session_tasks_are_due(const Session* s, const RunState* run);

int session_samples_are_due(const Session* s, const RunState* run);

// Returns why the run should stop: a signal, SESSION_REQUEST if --stop-run has asked for it, or 0.
enum { SESSION_REQUEST = 1000 };
int session_stops(Session* s);

// Returns the last step of the run: --steps, or the current one if --patience ends the run.
int64_t session_last_step(const Session* s, const RunState* run);

// Returns the actions due after a step, or before the first one: a sum of SESSION_SAVE,
// SESSION_SAVE_BY_CLOCK, SESSION_SAVE_BEST and SESSION_STOP. `step_s` is the time of the step.
int session_next(Session* s, const RunState* run, double step_s);

// Prepares a save for these reasons, a sum as session_next returns, on which all ranks agree. The
// previous save must have ended.
void session_saves(Session* s, int reasons);

// Logs a save that has ended since the last call.
void session_report(Session* s, RunLog* log);

// Waits for the save in progress, and logs it.
void session_wait(Session* s, RunLog* log);

// Returns true if the run can be saved and its current state is not saved.
int session_is_unsaved(const Session* s, const RunState* run);

// Logs why the run stops, and how to continue it. `why` is what session_stops returned in a rank;
// 0: its time is up.
void session_stopped(const Session* s, RunLog* log, const RunState* run, int why, const char* program);

// Logs why the run ends before --steps, if it does. Call it at the last step.
void session_ended_early(const Session* s, RunLog* log, const RunState* run);

// Judges the last validation. If it shows that the run has diverged, warns once per session, or
// with --on-divergence stop ends the program after the save in progress. V is the size of the
// vocabulary.
void session_judge_validation(Session* s, RunLog* log, const RunState* run, int V);

// Returns true and sets `reason` if the run should roll back, after an update that was made or
// skipped. `where` tells the data of a skipped update; NULL: it was made. If the run has diverged
// and must not roll back, ends the program after the save in progress.
int session_diverged(Session* s, RunLog* log, const RunState* run, const char* where,
                     char reason[SESSION_REASON_BYTES]);

// Finds the checkpoint to roll back to. Ends the program if none exists, or if rolling back to it
// has not helped before. Collective.
void session_roll_back(Session* s, const char* reason, char path[PATH_MAX], SavedState* saved);

#ifdef __cplusplus
}
#endif

#ifdef SESSION_IMPLEMENTATION

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/shell_word.h"
#include "llmc/base/signals.h"
#include "llmc/base/stop_request.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/xxh64.h"
#include "llmc/optim/outliers.h"
#include "llmc/optim/schedule.h"
#include "llmc/setup/resolve.h"

// Returns a new identity, unique for each run. Only rank 0 uses it.
static uint64_t session_new_identity_(void) {
    struct {
        double unix_s, now_s;
        int64_t process;
        char host[256];
    } here;
    memset((void*)&here, 0, sizeof(here));
    here.unix_s = time_unix_s();
    here.now_s = time_now_s();
    here.process = getpid();
    gethostname(here.host, sizeof(here.host) - 1);
    const uint64_t identity = xxh64(&here, sizeof(here));
    return identity ? identity : 1;
}

// Removes checkpoints at once if --keep is smaller than before: the disk may be full.
static void session_thin_(const Settled* settled, const Resume* resume) {
    if (resume_is_here(resume) && ranks_rank(&settled->ranks) == 0) {
        checkpoints_thin(&settled->options, &resume->saved);
    }
}

void session_open(Session* s, const Settled* settled, const Resume* resume, CheckpointRun run,
                  double start_s) {
    const Options* options = &settled->options;
    memset(s, 0, sizeof(*s));
    s->settled = settled;
    s->saved_s = time_now_s();
    s->end_s = options->output.max_hours > 0 ? start_s + 3600.0 * options->output.max_hours : INFINITY;
    s->can_save = options->output.dir[0] && settled->use == USE_TRAIN;
    if (!s->can_save) {
        return;
    }
    Checkpoints* c = &s->checkpoints;
    session_thin_(settled, resume);
    checkpoints_open(c, options, run, resume->lock, resume->saved.run.step);
    c->state.first_serial = c->state.serial + 1;
    c->state.identity = session_new_identity_();
    if (resume_is_here(resume)) {
        c->state.identity = resume->saved.identity;
        c->state.first_serial = resume->saved.first_serial;
        c->saved_step = c->whole_step = resume->saved.run.step;
        c->saved_stage = resume->saved.run.stage;
        comm_saved(run.model.comm, c->saved_step, options->output.dir);
    }
}

static void session_print_options_(FILE* file, const void* options) {
    options_print_json(file, (const Options*)options);
}

void session_begin(const Session* s, const Resume* resume, RunState* run, RunLog* log, FILE* screen,
                   LogIdentity who) {
    const Options* o = &s->settled->options;
    const int is_here = resume_is_here(resume), is_writer = ranks_rank(&s->settled->ranks) == 0;
    const LogSettings settings = {is_writer ? o->output.dir : "",
                                  is_here ? LOG_CONTINUE : LOG_NEW,
                                  run->step,
                                  o->batch.steps,
                                  o->batch.total,
                                  o->eval.every,
                                  is_writer ? screen : NULL,
                                  o->output.tensorboard,
                                  s->checkpoints.state.identity,
                                  o->output.log_every == OPTION_AUTO ? 0 : o->output.log_every,
                                  o->output.quiet};
    if (run->step >= session_last_step(s, run) && run->stage == STAGE_SAMPLED && setup_asks_for_samples(o)) {
        run->stage = STAGE_VALIDATED;
    }
    log_open(log, &settings);
    if (is_here) {
        log_resumed(log, resume->path);
    } else if (s->can_save && s->checkpoints.state.serial > 0) {
        log_note(log, "note: --out has checkpoints of an earlier run; starting a new run");
    }
    log_config(log, session_print_options_, o, who);
}

void session_close(Session* s) {
    if (s->can_save) {
        if (s->is_asked) {
            stop_request_remove(s->settled->options.output.dir);
        }
        checkpoints_close(&s->checkpoints);
    }
}

int64_t session_last_step(const Session* s, const RunState* run) {
    const Options* o = &s->settled->options;
    return validations_are_over(&run->validations, o->eval.patience) ? run->step : o->batch.steps;
}

// Returns true if work with an interval in steps is due.
static int session_is_due_(const Session* s, const RunState* run, int every) {
    return schedule_due(every, run->step, session_last_step(s, run));
}

// Returns true before the first update of a run that trains. A run of no steps only evaluates.
static int session_is_first_(const Session* s, const RunState* run) {
    return run->step == 0 && s->settled->options.batch.steps > 0;
}

int session_validation_is_due(const Session* s, const RunState* run, int validates_first) {
    return run->stage == STAGE_UPDATED && (validates_first || !session_is_first_(s, run)) &&
           session_is_due_(s, run, s->settled->options.eval.every);
}

int session_tasks_are_due(const Session* s, const RunState* run) {
    return run->stage == STAGE_UPDATED && !session_is_first_(s, run) &&
           session_is_due_(s, run, s->settled->options.tasks.every);
}

int session_samples_are_due(const Session* s, const RunState* run) {
    return run->stage == STAGE_VALIDATED && !session_is_first_(s, run) &&
           session_is_due_(s, run, s->settled->options.samples.every);
}

// Returns the time that a save needs, or an estimate.
static double session_save_s_(const Session* s) {
    const double slow_disk = 100e6; // bytes per second
    const Checkpoints* c = &s->checkpoints;
    return !s->can_save ? 0 : c->save_s > 0 ? c->save_s : checkpoints_disk_bytes(c) / slow_disk;
}

// Returns true if --max-hours leave no time for another step and a save. Each start makes at least
// one step, so even a run with steps longer than --max-hours ends if it is resumed often enough.
static int session_is_late_(const Session* s) {
    return s->longest_step_s > 0 && time_now_s() + 2 * (s->longest_step_s + session_save_s_(s)) > s->end_s;
}

static int session_clock_is_due_(const Session* s) {
    const Options* o = &s->settled->options;
    return o->output.save_every == OPTION_AUTO && o->output.save_minutes > 0 &&
           time_now_s() - s->saved_s >= 60.0 * o->output.save_minutes;
}

// Returns true if the last validation is from this step, and the best so far. One before the first
// update does not count.
static int session_is_best_(const Session* s, const RunState* run) {
    return s->settled->options.output.keep_best && run->step > 0 && run->validations.best_step == run->step;
}

// Looks for a request ten times a second at most: a shared file system may be slow.
static int session_is_asked_(Session* s) {
    const double pause_s = 0.1, now_s = time_now_s();
    const int is_writer = s->can_save && s->checkpoints.lock != NULL;
    if (is_writer && !s->is_asked && now_s - s->looked_s >= pause_s) {
        s->looked_s = now_s;
        s->is_asked = stop_request_is_there(s->settled->options.output.dir);
    }
    return s->is_asked;
}

int session_stops(Session* s) {
    const int signal = signals_stop();
    return signal ? signal : session_is_asked_(s) ? SESSION_REQUEST : 0;
}

int session_next(Session* s, const RunState* run, double step_s) {
    const Options* o = &s->settled->options;
    const int is_end = run->step >= session_last_step(s, run) && run->stage == STAGE_SAMPLED,
              asked = signals_take_save();
    s->longest_step_s = step_s > s->longest_step_s ? step_s : s->longest_step_s;
    const int stop = !is_end && (session_stops(s) || (isfinite(s->end_s) && session_is_late_(s)));
    const int due = (run->step > 0 || o->batch.steps == 0) && session_is_due_(s, run, o->output.save_every);
    const int is_new = session_is_unsaved(s, run);
    // a stop in the last validation or sample has saved this step without their results
    const int is_incomplete = s->can_save && !is_new && is_end && s->checkpoints.saved_stage < run->stage;
    const int by_clock = stop || (run->step > 0 && session_clock_is_due_(s));
    return ((is_new && (due || asked)) || is_incomplete ? SESSION_SAVE : 0) |
           (is_new && by_clock ? SESSION_SAVE_BY_CLOCK : 0) |
           (is_new && session_is_best_(s, run) ? SESSION_SAVE_BEST : 0) | (stop ? SESSION_STOP : 0);
}

void session_saves(Session* s, int reasons) {
    s->saved_s = time_now_s();
    s->checkpoints.state.by_clock = !(reasons & SESSION_SAVE);
}

static void session_saved_(Session* s, RunLog* log, const char* path) {
    const int64_t step = s->checkpoints.state.run.step;
    log_save(log, step, path);
    comm_saved(s->checkpoints.run.model.comm, step, s->settled->options.output.dir);
}

void session_report(Session* s, RunLog* log) {
    char path[PATH_MAX];
    if (s->can_save && checkpoint_finished(&s->checkpoints, path)) {
        session_saved_(s, log, path);
    }
}

void session_wait(Session* s, RunLog* log) {
    char path[PATH_MAX];
    if (s->can_save && checkpoint_wait(&s->checkpoints, path)) {
        session_saved_(s, log, path);
    }
}

int session_is_unsaved(const Session* s, const RunState* run) {
    return s->can_save && run->step != s->checkpoints.saved_step;
}

// Prints how to continue the run, after the line that says where it stopped. The launcher's part of
// the command is unknown.
static void session_print_advice_(FILE* file, const Session* s, const char* program) {
    if (!s->can_save) {
        fputs(s->settled->use == USE_EVALUATE ? "" : "; nothing was saved: saving needs --out", file);
    } else if (ranks_size(&s->settled->ranks) > 1) {
        fputs("; the same command with --resume on continues", file);
    } else {
        fputs("; continue: ", file);
        shell_print(file, program);
        fputc(' ', file);
        options_print_setting(file, &s->settled->options, "out");
        fputs(" --resume on", file);
    }
}

void session_stopped(const Session* s, RunLog* log, const RunState* run, int why, const char* program) {
    TextBuffer advice;
    text_buffer_open(&advice, "how the run continues");
    session_print_advice_(advice.file, s, program);
    char* text = text_buffer_close(&advice);
    log_stop(log, run->step,
             why == SESSION_REQUEST ? "--stop-run"
             : why                  ? signals_name(why)
                                    : "--max-hours",
             text);
    free(text);
}

void session_ended_early(const Session* s, RunLog* log, const RunState* run) {
    TextBuffer reason;
    char option[32];
    if (run->step >= s->settled->options.batch.steps) {
        return;
    }
    text_buffer_open(&reason, "why the run ends early");
    fputs(": ", reason.file);
    validations_print_over(reason.file, &run->validations);
    char* text = text_buffer_close(&reason);
    snprintf(option, sizeof(option), "--patience %d", s->settled->options.eval.patience);
    log_stop(log, run->step, option, text);
    free(text);
}

void session_judge_validation(Session* s, RunLog* log, const RunState* run, int V) {
    const char* advice = "try a lower --lr, or --on-divergence rollback --max-loss-rise 1";
    char reason[256], text[512];
    if (!validations_diverged(&run->validations, run->val_loss, V, reason)) {
        return;
    }
    if (s->settled->options.optimizer.on_divergence == DIVERGENCE_STOP) {
        session_wait(s, log);
        CHECK(0, "step %lld: the run has diverged: %s; %s", (long long)run->step, reason, advice);
    }
    if (!s->has_warned) {
        snprintf(text, sizeof(text), "the run has diverged: %s; %s", reason, advice);
        log_warning(log, run->step, text);
    }
    s->has_warned = 1;
}

int session_diverged(Session* s, RunLog* log, const RunState* run, const char* where,
                     char reason[SESSION_REASON_BYTES]) {
    const Options* o = &s->settled->options;
    const int max = o->optimizer.on_divergence == DIVERGENCE_STOP ? 1 : o->optimizer.max_skips;
    if (!outliers_divergence(&run->guard, max, o->optimizer.max_loss_rise, reason)) {
        return 0;
    }
    if (where) {
        const size_t used = strlen(reason);
        snprintf(reason + used, SESSION_REASON_BYTES - used, "; %s", where);
    }
    session_wait(s, log);
    CHECK(o->optimizer.on_divergence == DIVERGENCE_ROLLBACK, "step %lld: the run has diverged: %s%s",
          (long long)run->step, reason, run->guard.consecutive ? "; the weights are unchanged" : "");
    return 1;
}

// Returns true if the run was healthy when it was saved.
static int session_is_healthy_(const SavedState* saved, const void* session) {
    const Session* s = (const Session*)session;
    const SavedState* own = &s->checkpoints.state;
    const UpdateGuard* guard = &saved->run.guard;
    return saved->identity == own->identity && saved->serial >= own->first_serial &&
           guard->consecutive == 0 &&
           (s->settled->options.optimizer.max_loss_rise == 0 ||
            outliers_rise(guard) <= 0.5 * s->settled->options.optimizer.max_loss_rise);
}

void session_roll_back(Session* s, const char* reason, char path[PATH_MAX], SavedState* saved) {
    Comm* comm = s->checkpoints.run.model.comm;
    int found = 1;
    if (comm->rank == 0) {
        CHECK(checkpoint_newest(path, saved, s->checkpoints.out, session_is_healthy_, s) > 0,
              "%s: the run has diverged: %s; there is no checkpoint to roll back to", s->checkpoints.out,
              reason);
    }
    checkpoint_share(saved, path, &found, comm);
    s->tries = saved->run.step == s->rollback_step ? s->tries + 1 : 1;
    s->rollback_step = saved->run.step;
    CHECK(s->tries <= SESSION_TRIES_,
          "%s: the run has diverged: %s; it was already rolled back here %d times", path, reason,
          SESSION_TRIES_);
    if (comm->rank == 0) {
        checkpoint_remove_after(s->checkpoints.out, saved);
    }
    // Other data follow, so this step will have another state, which may replace the saved one.
    s->checkpoints.saved_step = -1;
}

#endif // SESSION_IMPLEMENTATION

#endif
