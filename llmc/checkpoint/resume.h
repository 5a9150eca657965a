/*
resume.h -- finds the checkpoint that --resume names, and checks what the command line changes.

    off, 0       a new run
    on           the newest valid checkpoint of the newest run in --out; an error if none exists
    auto, 1      like on, but starts a new run if none exists
    1000         step 1000 in --out
    a directory  that checkpoint, anywhere

Options that are not given keep their saved values. Options that are given and differ are listed. If
one of them defines the run (OPTION_CHANGES_RUN in the table of options), or if the data, the
teacher or the trainer have changed, --override is needed. It is not needed for a greater --steps,
nor for another schedule with the rates that the run has had so far: a decay may start from any
checkpoint. The run continues at its position in the data; other data are read from their start.
*/
#ifndef LLMC_RESUME_H
#define LLMC_RESUME_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/base/lock.h"
#include "llmc/setup/options.h"
#include "llmc/setup/settled.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/comm/comm.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int is_active;
    char path[PATH_MAX]; // directory of the checkpoint
    SavedState saved;
    // lock of --out, for checkpoints_open; NULL: without --out, or if nothing will be written
    Lock* lock;
    int is_here;      // true: the checkpoint is in --out, so the logs in --out are this run's
    int64_t sequence; // next sequence of the training data; set by resume_check
} Resume;

// Creates and locks --out in rank 0, so that nothing changes there, then finds the checkpoint and
// checks all of it. Returns the options; those that are not given have the values of the checkpoint
// and point into its state, which must outlive them. Collective; call it before any other setup.
Options resume_open(Resume* r, const Options* options, Comm* comm);

// Returns true if the run continues one in --out, with the same logs and directory of checkpoints.
static inline int resume_is_here(const Resume* r) { return r->is_active && r->is_here; }

// Returns the model's configuration with the saved padding of the vocabulary, which only the state
// has.
ModelConfig resume_config(const Resume* r, ModelConfig cfg);

// Prints on `file` how the run differs from the saved one, and what follows. Ends the program if it
// would be another run. train_data is a fingerprint of the data; 0: unknown.
void resume_check(Resume* r, const Settled* s, FILE* file, const char* trainer, size_t train_tokens,
                  uint64_t train_data);

// Compares the checksum of the teacher with the saved one, once its weights are set; 0: none.
void resume_check_teacher(const Resume* r, const Options* options, FILE* file, uint64_t teacher);

void resume_close(Resume* r);

#ifdef __cplusplus
}
#endif

#ifdef RESUME_IMPLEMENTATION

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/data/packing.h"
#include "llmc/setup/ranks_agree.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/log/log_files.h"
#include "llmc/setup/options_values.h"
#include "llmc/setup/resolve.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/schedule.h"
#include "llmc/parallel/rank_part.h"

static const char* resume_out_(const Options* options) {
    if (!options->out[0]) {
        die_usage("--resume %s needs the directory of the run: --out", options->resume);
    }
    return options->out;
}

// Returns true if the checkpoint belongs to the run whose log is in --out, or if that is unknown.
// If not, the newest run stopped before its first save: it has nothing to resume, and another run
// is only resumed if --resume names its checkpoint.
static int resume_is_of_newest_run_(const Resume* r, const char* out, CheckpointsFound found, int must) {
    const uint64_t run = log_files_run(out);
    const long long step = (long long)r->saved.run.step;
    if (!run || run == r->saved.identity) {
        return 1;
    }
    CHECK(found == CHECKPOINTS_NEWEST,
          "%s: the newest run here has no checkpoint that is whole; %s belongs to an earlier run: --resume "
          "%lld "
          "continues that one",
          out, r->path, step);
    CHECK(!must,
          "%s: the newest run here has no checkpoint; %s belongs to an earlier run: --resume %lld continues "
          "that one, --resume auto starts a new run",
          out, r->path, step);
    return 0;
}

// Finds the newest checkpoint. `must`: ends the program if none exists.
static void resume_newest_(Resume* r, const Options* options, int must) {
    const char* out = resume_out_(options);
    const CheckpointsFound found = checkpoint_newest(r->path, &r->saved, out, NULL, NULL);
    CHECK(found >= 0, "%s: every checkpoint is damaged; --resume off starts a new run", out);
    CHECK(found > 0 || !must, "%s: no checkpoint to resume; --resume auto starts a new run", out);
    r->is_active = found > 0 && resume_is_of_newest_run_(r, out, found, must);
    if (found > 0 && !r->is_active) {
        state_close(&r->saved);
    }
}

// Finds the checkpoint that --resume names: a step, a directory, or a name in --out.
static void resume_named_(Resume* r, const Options* options) {
    char error[ERROR_BYTES];
    struct stat info;
    const char* which = options->resume;
    if (strspn(which, "0123456789") == strlen(which) && strlen(which) < 18) {
        checkpoint_path(r->path, resume_out_(options), strtoll(which, NULL, 10), "");
    } else {
        file_path(r->path, "%s", which);
        if (stat(which, &info) != 0 && options->out[0]) {
            file_join(r->path, options->out, which);
        }
    }
    CHECK(checkpoint_try_check(&r->saved, r->path, error), "%s", error);
    r->is_active = 1;
}

// Returns true if the directory `out` holds `path`.
static int resume_holds_(const char* out, const char* path) {
    char parent[PATH_MAX];
    struct stat a, b;
    file_directory_of(parent, path);
    return stat(out, &a) == 0 && stat(parent, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

// Returns true if a resumed run inherits the value of this option.
static int resume_keeps_(const Options* options, const OptionRow* row) {
    return option_applies(options, row) && !(row->flags & OPTION_NOT_SAVED);
}

typedef enum { RESUME_NOT_GIVEN, RESUME_ALL } ResumeWhich;

// Returns true if an option only sets the schedule of the learning rate. Neither the peak, which
// other rates are relative to, nor the warm-up, which is over, is one.
static int resume_is_of_schedule_(const OptionRow* row) {
    static const char* const names[] = {"steps", "schedule", "final-lr-frac", "decay-steps", "decay-shape"};
    int is_one = 0;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        is_one |= strcmp(row->name, names[i]) == 0;
    }
    return is_one;
}

// Returns the saved value of an option; NULL: none. The schedule of a checkpoint that is older than
// one of its options is the default's.
static const char* resume_saved_(const Resume* r, const OptionRow* row) {
    const char* value = state_option(&r->saved, row->name);
    return !value && resume_is_of_schedule_(row) ? row->fallback : value;
}

// Returns the options with saved values: for those that are not given, or for all. --epochs
// replaces the saved number of steps.
static Options resume_options_(const Resume* r, const Options* given, ResumeWhich which) {
    Options options = *given;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const char* value = resume_saved_(r, row);
        const int is_replaced = given->epochs > 0 && strcmp(row->name, "steps") == 0;
        if (value && resume_keeps_(given, row) &&
            (which == RESUME_ALL || !(given->given[i] || is_replaced))) {
            CHECK(option_set(&options, row, value) || given->given[i], "%s/state.json: --%s is %s", r->path,
                  row->name, value);
        }
    }
    return options;
}

// Locks --out and finds the checkpoint, in rank 0.
static void resume_find_(Resume* r, const Options* options) {
    const char* how = options->resume;
    struct stat info;
    const int is_auto = strcmp(how, "auto") == 0 || strcmp(how, "1") == 0;
    const int is_off = strcmp(how, "off") == 0 || strcmp(how, "0") == 0;
    const int may_be_new = is_auto || is_off || strcmp(how, "on") != 0;
    if (options->out[0] && !options_only_look(options) && (may_be_new || stat(options->out, &info) == 0)) {
        file_make_directory(options->out);
        checkpoint_require_writable(options->out);
        r->lock = checkpoint_lock(options->out);
    }
    if (is_off) {
        return;
    }
    if (is_auto || strcmp(how, "on") == 0) {
        resume_newest_(r, options, !is_auto);
    } else {
        resume_named_(r, options);
    }
}

Options resume_open(Resume* r, const Options* options, Comm* comm) {
    memset(r, 0, sizeof(*r));
    if (comm->rank == 0) {
        resume_find_(r, options);
    }
    if (options->out[0] && !options_only_look(options)) {
        ranks_agree_on_directory(comm, "--out", options->out);
    }
    checkpoint_share(&r->saved, r->path, &r->is_active, comm);
    if (!r->is_active) {
        return *options;
    }
    r->is_here = options->out[0] && resume_holds_(options->out, r->path);
    if (r->is_here && r->lock && log_files_run(options->out) == r->saved.identity) {
        log_files_require_writable(options->out);
    }
    return resume_options_(r, options, RESUME_NOT_GIVEN);
}

ModelConfig resume_config(const Resume* r, ModelConfig cfg) {
    if (r->is_active) {
        char error[ERROR_BYTES];
        cfg.Vp = r->saved.padded_vocab < INT_MAX ? (int)r->saved.padded_vocab : INT_MAX;
        CHECK(model_check_config(cfg, r->path, error), "%s", error);
    }
    return cfg;
}

// The differences that make another run, as text.
typedef struct {
    FILE* file; // output for messages
    char changes[2048];
    size_t used;
} ResumeChanges_;

// Prints a difference, and records it if it makes another run.
static void resume_difference_(ResumeChanges_* c, const char* name, const char* is, const char* was,
                               int is_other_run) {
    printable_line(c->file, "resume: %s is %s, was %s", name, is, was);
    if (is_other_run && c->used < sizeof(c->changes)) {
        c->used += (size_t)snprintf(c->changes + c->used, sizeof(c->changes) - c->used, "%s%s is %s, was %s",
                                    c->used ? "; " : "", name, is, was);
    }
}

// Refuses another --share-layers: the optimizer has state only for the parameters of the saved run.
static void resume_check_share_(const Resume* r, const Options* options) {
    const char *saved = state_option(&r->saved, "share-layers"), *was = saved ? saved : "off";
    if (strcmp(options->share_layers, was) != 0) {
        die_usage(
            "--resume %s: --share-layers is %s, was %s; wanted the same, or a new run that starts from its "
            "weights: --model %s",
            options->resume, options->share_layers, was, r->path);
    }
}

// Prints that another number of slices changes the order of sums. Older checkpoints have one slice.
static void resume_print_slices_(const Resume* r, const Options* options, FILE* file) {
    const char* saved = state_option(&r->saved, "tensor-slices");
    const int now = options->tensor_slices, before = saved ? atoi(saved) : 1;
    if (now != before) {
        fprintf(file, "note: %d slice%s, the run began with %d: the last bits change from here on\n", now,
                words_s(now), before);
    }
}

// Returns true if the schedule has the rates that the run has had so far.
static int resume_keeps_rates_(const Resume* r, const Options* options) {
    const Options saved = resume_options_(r, options, RESUME_ALL);
    const ScheduleSettings before = setup_schedule(&saved), now = setup_schedule(options);
    return schedule_same_before(&now, &before, r->saved.run.step);
}

// Returns true if another value of an option makes another run. A longer run is the same run.
static int resume_is_other_(const OptionRow* row, const char* now, const char* before, int keeps_rates) {
    const int is_longer =
        strcmp(row->name, "steps") == 0 && strtoll(now, NULL, 10) > strtoll(before, NULL, 10);
    const int is_of_future = keeps_rates && resume_is_of_schedule_(row);
    return (row->flags & OPTION_CHANGES_RUN) && !is_longer && !is_of_future;
}

static void resume_check_options_(const Resume* r, const Options* options, ResumeChanges_* c) {
    char is[OPTION_TEXT_BYTES], name[OPTION_NAME_BYTES + 2];
    const int keeps_rates = resume_keeps_rates_(r, options);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const char* before = resume_saved_(r, row);
        const char* now = option_text(options, row, is);
        if (before && resume_keeps_(options, row) && strcmp(before, now) != 0) {
            snprintf(name, sizeof(name), "--%s", row->name);
            resume_difference_(c, name, *now ? now : "''", *before ? before : "''",
                               resume_is_other_(row, now, before, keeps_rates));
        }
    }
}

// Returns true if an option has its saved value, or none was saved.
static int resume_has_same_(const Resume* r, const Options* options, const char* name) {
    char is[OPTION_TEXT_BYTES], dashed[OPTION_NAME_BYTES + 2];
    const char* before = state_option(&r->saved, name);
    snprintf(dashed, sizeof(dashed), "--%s", name);
    return !before || strcmp(before, option_text(options, option_find(dashed, strlen(dashed)), is)) == 0;
}

// Returns true if the training data differ from those of the saved run, as far as both are known.
static int resume_check_data_(const Resume* r, const Options* options, ResumeChanges_* c, size_t train_tokens,
                              uint64_t train_data) {
    char is[OPTION_TEXT_BYTES], was[OPTION_TEXT_BYTES];
    const uint64_t saved = r->saved.train_data;
    const int are_stories = !options->train_data[0] && resume_has_same_(r, options, "train-data");
    if (are_stories && (int64_t)train_tokens > r->saved.train_tokens) {
        return 0; // a longer run generates more of the same stories
    }
    if ((int64_t)train_tokens != r->saved.train_tokens) {
        snprintf(is, sizeof(is), "%zu", train_tokens);
        snprintf(was, sizeof(was), "%lld", (long long)r->saved.train_tokens);
        resume_difference_(c, "the number of training tokens", is, was, 1);
        return 1;
    }
    if (!train_data || !saved) {
        return !resume_has_same_(r, options, "train-data");
    }
    if (train_data != saved) {
        snprintf(is, sizeof(is), "%016" PRIx64, train_data);
        snprintf(was, sizeof(was), "%016" PRIx64, saved);
        resume_difference_(c, "the checksum of the training data", is, was, 1);
    }
    return train_data != saved;
}

// Returns the next sequence. A position counts sequences of the same data, packing and length.
static int64_t resume_sequence_(const Resume* r, const Options* options, FILE* file, int are_other_data) {
    const char* seq_len = state_option(&r->saved, "seq-len");
    const int64_t at = r->saved.run.sequence, was = seq_len ? strtoll(seq_len, NULL, 10) : 0;
    const int are_same = !are_other_data && resume_has_same_(r, options, "pack");
    if (at == 0 || (are_same && (was <= 0 || was == options->seq_len))) {
        return at;
    }
    if (are_same && (Packing)options->pack == PACK_STREAM) {
        const int64_t next = (int64_t)((double)at * (double)was / options->seq_len);
        fprintf(file, "resume: the data continue at sequence %lld of %d tokens, after %lld of %lld\n",
                (long long)next, options->seq_len, (long long)at, (long long)was);
        return next;
    }
    fprintf(file,
            "resume: the training data are other sequences than before: they are read from their start\n");
    return 0;
}

// Prints a jump of the learning rate, after --steps or another option has changed the schedule.
static void resume_print_rate_(const Resume* r, const Options* options, FILE* file) {
    const Options before = resume_options_(r, options, RESUME_ALL);
    const int64_t step = r->saved.run.step;
    const float rate = setup_lr(options, step);
    if (step > 0 && step < options->steps && rate != setup_lr(&before, step)) {
        fprintf(file, "resume: lr %.3g at step %lld -> %.3g at step %lld: the schedule has changed\n",
                (double)setup_lr(&before, step - 1), (long long)step, (double)rate, (long long)step + 1);
    }
}

// Prints how many steps are left. Refuses fewer steps than the run has already done.
static void resume_print_steps_(const Resume* r, const Options* options, FILE* file) {
    const long long done = r->saved.run.step, steps = options->steps;
    if (steps < done) {
        die_usage(
            "--steps %lld: %s has done %lld already; wanted more, or an earlier checkpoint: --resume STEP",
            steps, r->path, done);
    }
    printable_line(file, "resume: from %s, %lld of %lld steps done", r->path, done, steps);
    if (r->saved.run.stage != STAGE_SAMPLED) {
        return;
    }
    if (done < steps && validations_are_over(&r->saved.run.validations, options->patience)) {
        fprintf(file, "resume: stopped early at step %lld: ", done);
        validations_print_over(file, &r->saved.run.validations);
        fprintf(file, "; for more: --patience %lld, or 0\n", 2 * (long long)r->saved.run.validations.since);
    } else if (done == steps && done > 0) {
        fprintf(file, "resume: nothing is left to do; for more: --steps %lld\n", 2 * steps);
    }
}

void resume_check(Resume* r, const Settled* s, FILE* file, const char* trainer, size_t train_tokens,
                  uint64_t train_data) {
    const Options* options = &s->options;
    ResumeChanges_ c;
    if (!r->is_active) {
        return;
    }
    resume_check_share_(r, options);
    memset(&c, 0, sizeof(c));
    c.file = file;
    resume_print_steps_(r, options, file);
    resume_check_options_(r, options, &c);
    resume_print_slices_(r, options, file);
    if (strcmp(trainer, r->saved.trainer) != 0) {
        resume_difference_(&c, "the trainer", trainer, r->saved.trainer, 1);
    }
    const int are_other_data = resume_check_data_(r, options, &c, train_tokens, train_data);
    if (c.used && !options->override) {
        die_usage("--resume %s: %s; --override resumes anyway", options->resume, c.changes);
    }
    r->sequence = resume_sequence_(r, options, file, are_other_data);
    resume_print_rate_(r, options, file);
    const RankPart part = settled_part(s);
    if (!checkpoint_state_fits(&r->saved, s->optimizer, &part)) {
        fprintf(file, "resume: the state of --optimizer %s starts as zeros\n",
                optimizer_word((OptimizerName)options->optimizer));
    }
}

void resume_check_teacher(const Resume* r, const Options* options, FILE* file, uint64_t teacher) {
    char is[OPTION_TEXT_BYTES], was[OPTION_TEXT_BYTES];
    const uint64_t saved = r->saved.run.teacher;
    ResumeChanges_ c;
    if (!r->is_active || !saved || !teacher || saved == teacher) {
        return;
    }
    memset(&c, 0, sizeof(c));
    c.file = file;
    snprintf(is, sizeof(is), "%016" PRIx64, teacher);
    snprintf(was, sizeof(was), "%016" PRIx64, saved);
    resume_difference_(&c, "the checksum of the teacher", is, was, 1);
    if (!options->override) {
        die_usage("--resume %s: %s; --override resumes anyway", options->resume, c.changes);
    }
}

void resume_close(Resume* r) {
    if (r->is_active) {
        state_close(&r->saved);
    }
}

#endif // RESUME_IMPLEMENTATION

#endif
