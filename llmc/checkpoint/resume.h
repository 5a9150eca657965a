/*
resume.h -- finds the checkpoint that --resume names, and checks what the command line changes.

    off, 0       a new run
    on           the newest valid checkpoint of the newest run in --out; an error if none exists
    auto, 1      like on, but starts a new run if none exists
    1000         step 1000 in --out
    a directory  that checkpoint, anywhere

Options that are not given keep their saved values. Options that are given and differ are listed.
--override is needed if one of them defines the run (OPTION_CHANGES_RUN in the table of options), if
the saved run used an option that has been removed, or if the data, the teacher or the trainer have
changed. It is not needed for a greater --steps, nor for another schedule that has the same rates up
to here: a decay may start from any checkpoint. The peak of these rates stays, even if --lr auto
chose it for fewer steps. The run continues at its position in the data; other data are read from
their start. Named sources (mixture.h) may be added, removed or get other weights: each continues at
its place. If the first validation set has changed, the search for the best validation starts again.
*/
#ifndef LLMC_RESUME_H
#define LLMC_RESUME_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/base/lock.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"
#include "llmc/setup/settled.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/comm/comm.h"
#include "llmc/model/config.h"

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
// would be another run. Sets the order of the training data.
void resume_check(Resume* r, const Settled* s, FILE* file, const char* trainer, RunData* data);

// Compares the checksums of the teacher and of an adapter's base with the saved ones, once their
// weights are set.
void resume_check_weights(const Resume* r, const Options* options, FILE* file, const RunState* state);

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
#include "llmc/base/shell_word.h"
#include "llmc/data/mixture.h"
#include "llmc/data/packing.h"
#include "llmc/setup/ranks_agree.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/log/log_files.h"
#include "llmc/setup/options_values.h"
#include "llmc/setup/resolve.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/schedule.h"

static const char* resume_out_(const Options* options) {
    if (!options->output.dir[0]) {
        die_usage("--resume %s needs the directory of the run: --out", options->output.resume);
    }
    return options->output.dir;
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
    const char* which = options->output.resume;
    if (strspn(which, "0123456789") == strlen(which) && strlen(which) < 18) {
        checkpoint_path(r->path, resume_out_(options), strtoll(which, NULL, 10), "");
    } else {
        file_path(r->path, "%s", which);
        if (stat(which, &info) != 0 && options->output.dir[0]) {
            file_join(r->path, options->output.dir, which);
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

// Returns true if an option only shapes the schedule of the learning rate. The peak does not count,
// because other rates are relative to it; nor does the warm-up, which is over.
static int resume_is_of_schedule_(const OptionRow* row) {
    static const char* const names[] = {"steps", "schedule", "final-lr-frac", "decay-steps", "decay-shape"};
    int is_one = 0;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        is_one |= strcmp(row->name, names[i]) == 0;
    }
    return is_one;
}

// Returns the saved value of an option; NULL: none. A schedule option that the checkpoint is too
// old to have counts as its default.
static const char* resume_saved_(const Resume* r, const OptionRow* row) {
    const char* value = state_option(&r->saved, row->name);
    return !value && resume_is_of_schedule_(row) ? row->fallback : value;
}

// Returns true if given options replace the saved value of another one: --epochs the number of
// steps, weights in the list of the training data their schedule.
static int resume_is_replaced_(const Options* given, const OptionRow* row) {
    return (strcmp(row->name, "steps") == 0 && given->batch.epochs > 0) ||
           (strcmp(row->name, "data-schedule") == 0 && options_given(given, "train-data") &&
            mixture_has_weights(given->data.train));
}

// Returns the options with saved values: for those that are not given, or for all.
static Options resume_options_(const Resume* r, const Options* given, ResumeWhich which) {
    Options options = *given;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const char* value = resume_saved_(r, row);
        if (value && resume_keeps_(given, row) &&
            (which == RESUME_ALL || !(given->given[i] || resume_is_replaced_(given, row)))) {
            CHECK(option_set(&options, row, value) || given->given[i], "%s/state.json: --%s is %s", r->path,
                  row->name, value);
        }
    }
    return options;
}

// Locks --out and finds the checkpoint, in rank 0.
static void resume_find_(Resume* r, const Options* options) {
    const char* how = options->output.resume;
    struct stat info;
    const int is_auto = strcmp(how, "auto") == 0 || strcmp(how, "1") == 0;
    const int is_off = strcmp(how, "off") == 0 || strcmp(how, "0") == 0;
    const int may_be_new = is_auto || is_off || strcmp(how, "on") != 0;
    if (options->output.dir[0] && !options_only_look(options) &&
        (may_be_new || stat(options->output.dir, &info) == 0)) {
        file_make_directory(options->output.dir);
        checkpoint_require_writable(options->output.dir);
        r->lock = checkpoint_lock(options->output.dir);
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
    if (options->output.dir[0] && !options_only_look(options)) {
        ranks_agree_on_directory(comm, "--out", options->output.dir);
    }
    checkpoint_share(&r->saved, r->path, &r->is_active, comm);
    if (!r->is_active) {
        return *options;
    }
    r->is_here = options->output.dir[0] && resume_holds_(options->output.dir, r->path);
    if (r->is_here && r->lock && log_files_run(options->output.dir) == r->saved.identity) {
        log_files_require_writable(options->output.dir);
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
    int mixes;  // the run may change its sources
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
    if (strcmp(options->model.share_layers, was) != 0) {
        die_usage(
            "--resume %s: --share-layers is %s, was %s; wanted the same, or a new run that starts from its "
            "weights: --model %s",
            options->output.resume, options->model.share_layers, was, shell_word(r->path).text);
    }
}

// Prints that another number of tensor ranks changes the order of sums. Older checkpoints count as
// one rank.
static void resume_print_tensor_(const Resume* r, const Options* options, FILE* file) {
    const char* saved = state_option(&r->saved, "tensor-parallel");
    const int now = options->ranks.tensor, before = saved ? atoi(saved) : 1;
    if (now != before) {
        fprintf(file, "note: --tensor-parallel %d, was %d: the last bits change from here on\n", now, before);
    }
}

// Returns true if the schedule gives the rates that the run has used so far.
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

// Names the options that the saved run used and that this version no longer has.
static void resume_check_removed_(const Resume* r, ResumeChanges_* c) {
    char name[256];
    for (int i = 0; i < r->saved.num_options; i++) {
        const SavedOption* saved = &r->saved.options[i];
        const RemovedOption* row = option_removed(saved->name, strlen(saved->name));
        if (row && !(row->flags & OPTION_NOT_SAVED) && !option_removed_is_unused(row, saved->value)) {
            snprintf(name, sizeof(name), "--%s (%s)", row->name, row->advice);
            resume_difference_(c, name, "removed", saved->value, 1);
        }
    }
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
            const int is_mixture = c->mixes && strcmp(row->name, "train-data") == 0;
            resume_difference_(c, name, *now ? now : "''", *before ? before : "''",
                               !is_mixture && resume_is_other_(row, now, before, keeps_rates));
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

// Returns true if the training data differ from the saved run's, as far as both are known.
static int resume_check_data_(const Resume* r, const Options* options, ResumeChanges_* c, size_t train_tokens,
                              uint64_t train_data) {
    char is[OPTION_TEXT_BYTES], was[OPTION_TEXT_BYTES];
    const uint64_t saved = r->saved.train_data;
    const int are_stories = !options->data.train[0] && resume_has_same_(r, options, "train-data");
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

// Prints which validation sets have changed. If the first one has, there is no best validation yet.
static void resume_check_sets_(Resume* r, const Options* options, FILE* file, const RunData* data) {
    char name[256], is[32], was[32];
    ValidationSet sets[SOURCES_MAX];
    ResumeChanges_ c = {.file = file};
    const int count = run_data_list_sets(sets, data, options);
    for (int i = 0; i < count; i++) {
        const uint64_t before = state_val_set(&r->saved, sets[i].name);
        if (before && before != sets[i].checksum) {
            snprintf(name, sizeof(name), "the checksum of the validation data%s%.200s",
                     sets[i].name[0] ? " " : "", sets[i].name);
            snprintf(is, sizeof(is), "%016" PRIx64, sets[i].checksum);
            snprintf(was, sizeof(was), "%016" PRIx64, before);
            resume_difference_(&c, name, is, was, 0);
        }
    }
    if (!state_validates_same(&r->saved, sets, count)) {
        r->saved.run.validations = validations_open();
        fprintf(file, "resume: these are other validations than before: the best one, and --patience, start "
                      "again\n");
    }
}

// Prints how the shares of the sources change, of a checkpoint with these sources.
static void resume_print_mixture_(FILE* file, const DataSources* now, const MixtureState* before,
                                  const SourceMatch* match) {
    const Stretch* stretch = &now->order.stretch[0];
    int64_t sum = 0;
    for (int i = 0; i < before->count; i++) {
        sum += before->source[i].share;
    }
    for (int s = 0; s < now->count; s++) {
        const int i = match->before[s];
        const double share = 100 * (double)stretch->share[s] / (double)stretch->cycle;
        const double epochs = (double)stretch->base[s] / (double)now->source[s].rows.count;
        if (i < 0) {
            printable_line(file, "resume: source %s is new, with %.4g %%", now->source[s].name, share);
        } else {
            printable_line(
                file, "resume: source %s has %.4g %%, had %.4g %%, after %.3g epochs%s", now->source[s].name,
                share, 100 * (double)before->source[i].share / (double)sum, epochs,
                match->fate[s] == SOURCE_CHANGED ? "; its contents have changed: it starts over" : "");
        }
    }
    for (int i = 0; i < now->num_past; i++) {
        if (now->past[i].given > 0) {
            printable_line(file, "resume: source %s is not read any more, after %lld sequences",
                           now->past[i].name, (long long)now->past[i].given);
        }
    }
}

// Refuses sources that have kept their names, but not their contents.
static void resume_check_sources_(const Resume* r, const Options* options, const RunData* data) {
    const MixtureState* before = &r->saved.mixture;
    const SourceMatch match = mixture_match(&data->train, before);
    for (int s = 0; s < data->train.count && !options->output.override; s++) {
        if (match.fate[s] == SOURCE_CHANGED) {
            const DataSource* source = &data->train.source[s];
            const SourceState* was = &before->source[match.before[s]];
            die_usage("--resume %s: source %s has other contents: %zu tokens (%016" PRIx64
                      "), was %lld (%016" PRIx64
                      "); wanted the same, or another name for other files; --override starts it over",
                      options->output.resume, source->name, source->stream.count, source->stream.fingerprint,
                      (long long)was->tokens, was->fingerprint);
        }
    }
}

// Returns true if a step still has the same sequences, so that the steps of a schedule mean the
// same.
static int resume_keeps_batches_(const Resume* r, const Options* options) {
    return resume_has_same_(r, options, "total-batch") && resume_has_same_(r, options, "batch-schedule") &&
           resume_has_same_(r, options, "seq-len");
}

// Returns the length of sequence in which the checkpoint counts.
static int resume_length_(const Resume* r, const Options* options) {
    const char* saved = state_option(&r->saved, "seq-len");
    return saved ? atoi(saved) : options->batch.seq_len;
}

// Returns true if the checkpoint has rearranged the same documents (--fim-rate). Older checkpoints
// have none.
static int resume_has_same_fim_(const Resume* r, const Options* options) {
    const char* saved = state_option(&r->saved, "fim-rate");
    return (saved ? strtof(saved, NULL) : 0) == options->data.fim_rate &&
           (options->data.fim_rate == 0 || resume_has_same_(r, options, "seed"));
}

// Returns true if the data have the same rows as in the checkpoint, or if its count converts to
// them.
static int resume_has_rows_(const Resume* r, const Options* options, const RunData* data) {
    const int are_even = (Packing)options->data.pack == PACK_STREAM && options->data.fim_rate == 0 &&
                         !mixture_has_mask(&data->train);
    return resume_has_same_(r, options, "pack") && resume_has_same_fim_(r, options) &&
           (resume_length_(r, options) == options->batch.seq_len || are_even);
}

// Returns true if a source of the checkpoint continues. Sources with names may all be new.
static int resume_has_source_(const Resume* r, const RunData* data, int are_other_data) {
    const SourceMatch match = mixture_match(&data->train, &r->saved.mixture);
    int has_one = data->train.is_named;
    for (int s = 0; s < data->train.count; s++) {
        has_one |= match.fate[s] == SOURCE_CONTINUES;
    }
    return r->saved.mixture.count > 0 ? has_one : !are_other_data;
}

// Converts the checkpoint's counts to sequences of this run's length.
static void resume_convert_(Resume* r, const Options* options, FILE* file) {
    const double was = resume_length_(r, options), now = options->batch.seq_len;
    MixtureState* mixture = &r->saved.mixture;
    const int64_t at = r->sequence;
    if (was == now || at == 0) {
        return;
    }
    r->sequence = (int64_t)((double)at * was / now);
    mixture->first = r->sequence;
    for (int i = 0; i < mixture->count; i++) {
        mixture->source[i].given = (int64_t)((double)mixture->source[i].given * was / now);
    }
    fprintf(file, "resume: the data continue at sequence %lld of %d tokens, after %lld of %.0f\n",
            (long long)r->sequence, options->batch.seq_len, (long long)at, was);
}

// Continues the order of the sources after the checkpoint.
static void resume_mixture_(Resume* r, const Options* options, FILE* file, RunData* data) {
    const MixtureState* before = &r->saved.mixture;
    const DataPlace here = {r->saved.run.step, r->saved.run.tokens, r->sequence};
    const SourceMatch match = mixture_match(&data->train, before);
    run_data_place(data, options, resume_keeps_batches_(r, options) ? before->from : here);
    const int keeps = mixture_continue(&data->train, before, (uint64_t)r->sequence);
    if (!keeps && (data->train.count > 1 || before->count > 1)) {
        resume_print_mixture_(file, &data->train, before, &match);
        data->epochs = 0; // each source has its own
    }
}

// Reads the data from their start.
static void resume_restart_(Resume* r, const Options* options, FILE* file, RunData* data) {
    const DataPlace here = {r->saved.run.step, r->saved.run.tokens, 0};
    r->sequence = 0;
    run_data_place(data, options, here);
    mixture_restart(&data->train);
    fprintf(file,
            "resume: the training data are other sequences than before: they are read from their start\n");
}

// Sets the next sequence, and the order of the data from there on. A position counts sequences of
// the same data, packing and length.
static void resume_order_(Resume* r, const Options* options, FILE* file, int are_other_data, RunData* data) {
    r->sequence = r->saved.run.sequence;
    if (data->train.count == 0) {
        return;
    }
    if (r->sequence > 0 &&
        !(resume_has_rows_(r, options, data) && resume_has_source_(r, data, are_other_data))) {
        resume_restart_(r, options, file, data);
        return;
    }
    resume_convert_(r, options, file);
    if (r->saved.mixture.count > 0) {
        resume_mixture_(r, options, file, data);
    } else if (options->data.schedule[0]) {
        die_usage("--data-schedule %s: %s was saved by an older version, which did not count the sequences "
                  "of each source",
                  options->data.schedule, r->path);
    }
}

// Prints a jump of the learning rate, after --steps or another option has changed the schedule.
static void resume_print_rate_(const Resume* r, const Options* options, FILE* file) {
    const Options before = resume_options_(r, options, RESUME_ALL);
    const int64_t step = r->saved.run.step;
    const float rate = setup_lr(options, step);
    if (step > 0 && step < options->batch.steps && rate != setup_lr(&before, step)) {
        fprintf(file, "resume: lr %.3g at step %lld -> %.3g at step %lld: the schedule has changed\n",
                (double)setup_lr(&before, step - 1), (long long)step, (double)rate, (long long)step + 1);
    }
}

// Prints that the rate is still the one that --lr auto chose for the steps of the checkpoint.
static void resume_print_auto_rate_(const Resume* r, const Options* options, FILE* file) {
    const Options before = resume_options_(r, options, RESUME_ALL);
    const float chosen = setup_auto_lr(&before), now = setup_auto_lr(options);
    if (options->optimizer.lr == chosen && now != chosen && !options_given(options, "lr")) {
        fprintf(
            file,
            "resume: --lr stays %.3g, which auto chose for %lld steps; for %lld it chooses %.3g: --lr auto "
            "--override\n",
            (double)chosen, (long long)before.batch.steps, (long long)options->batch.steps, (double)now);
    }
}

// Prints how many steps are left. Refuses fewer steps than the run has already done.
static void resume_print_steps_(const Resume* r, const Options* options, FILE* file) {
    const long long done = r->saved.run.step, steps = options->batch.steps;
    if (steps < done) {
        die_usage(
            "--steps %lld: %s has done %lld already; wanted more, or an earlier checkpoint: --resume STEP",
            steps, r->path, done);
    }
    printable_line(file, "resume: from %s, %lld of %lld steps done", r->path, done, steps);
    if (r->saved.run.stage != STAGE_SAMPLED) {
        return;
    }
    if (done < steps && validations_are_over(&r->saved.run.validations, options->eval.patience)) {
        fprintf(file, "resume: stopped early at step %lld: ", done);
        validations_print_over(file, &r->saved.run.validations);
        fprintf(file, "; for more: --patience %lld, or 0\n", 2 * (long long)r->saved.run.validations.since);
    } else if (done == steps && done > 0) {
        fprintf(file, "resume: nothing is left to do; for more: --steps %lld\n", 2 * steps);
    }
}

void resume_check(Resume* r, const Settled* s, FILE* file, const char* trainer, RunData* data) {
    const Options* options = &s->options;
    ResumeChanges_ c;
    if (!r->is_active) {
        return;
    }
    resume_check_share_(r, options);
    memset(&c, 0, sizeof(c));
    c.file = file;
    c.mixes = data->train.is_named && r->saved.mixture.count > 0;
    resume_check_sets_(r, options, file, data);
    resume_print_steps_(r, options, file);
    resume_check_removed_(r, &c);
    resume_check_options_(r, options, &c);
    resume_print_tensor_(r, options, file);
    if (strcmp(trainer, r->saved.trainer) != 0) {
        resume_difference_(&c, "the trainer", trainer, r->saved.trainer, 1);
    }
    const int are_other_data =
        !c.mixes && resume_check_data_(r, options, &c, data->train.tokens, data->train.fingerprint);
    if (c.used && !options->output.override) {
        die_usage("--resume %s: %s; --override resumes anyway%s", options->output.resume, c.changes,
                  are_other_data || !resume_has_same_(r, options, "train-data")
                      ? "; sources with names, NAME=FILES, may change"
                      : "");
    }
    if (c.mixes) {
        resume_check_sources_(r, options, data);
    }
    resume_order_(r, options, file, are_other_data, data);
    resume_print_rate_(r, options, file);
    resume_print_auto_rate_(r, options, file);
    const MapOf of = settled_map(s, 1);
    if (!checkpoint_state_fits(&r->saved, s->optimizer, &of)) {
        fprintf(file, "resume: the state of --optimizer %s starts as zeros\n",
                optimizer_word((OptimizerName)options->optimizer.name));
    }
}

static void resume_check_weights_of_(const Resume* r, const Options* options, FILE* file, const char* what,
                                     uint64_t now, uint64_t saved) {
    char is[OPTION_TEXT_BYTES], was[OPTION_TEXT_BYTES];
    ResumeChanges_ c;
    if (!r->is_active || !saved || !now || saved == now) {
        return;
    }
    memset(&c, 0, sizeof(c));
    c.file = file;
    snprintf(is, sizeof(is), "%016" PRIx64, now);
    snprintf(was, sizeof(was), "%016" PRIx64, saved);
    resume_difference_(&c, what, is, was, 1);
    if (!options->output.override) {
        die_usage("--resume %s: %s; --override resumes anyway", options->output.resume, c.changes);
    }
}

void resume_check_weights(const Resume* r, const Options* options, FILE* file, const RunState* state) {
    const RunState* saved = &r->saved.run;
    resume_check_weights_of_(r, options, file, "the checksum of the teacher", state->teacher, saved->teacher);
    resume_check_weights_of_(r, options, file, "the checksum of the adapter's base", state->base,
                             saved->base);
}

void resume_close(Resume* r) {
    if (r->is_active) {
        state_close(&r->saved);
    }
}

#endif // RESUME_IMPLEMENTATION

#endif
