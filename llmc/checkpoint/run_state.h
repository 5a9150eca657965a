/*
run_state.h -- the progress of a run, without its tensors, and its file in a checkpoint: state.json.

    {"format":"pretrain.c run","version":1,"run":"16 hexadecimal digits","serial":7,
     "first_serial":1,"step":1000,"updates":1000,"tokens":...,"sequence":...,"samples_at":...,
     "train_tokens":...,"padded_vocab":...,"stage":2,"by_clock":0,"average_from":0,
     "train_data":"16 hexadecimal digits","teacher":"16 hexadecimal digits","val_loss":...,
     "val_data":[{"name":"web","xxh64":"16 hexadecimal digits"}, ...],
     "trainer":"CPU FP32",
     "loss_scale":{"scale":1,"good_steps":0},
     "guard":{"consecutive":0,"best":...,"losses":{"count":...,"values":[...]},"norms":{...}},
     "validations":{"first":...,"best":...,"best_step":...,"since":...},
     "clip":{"updates":...,"shares":[...]},
     "mixture":{"first":...,"from_step":...,"from_tokens":...,"from_sequence":...,
       "sources":[{"name":"web","xxh64":"16 hexadecimal digits","tokens":...,"number":...,
         "given":...,"share":...}, ...]},
     "options":{"train-data":"...", ...},
     "files":{"model.safetensors":{"bytes":...,"xxh64":"16 hexadecimal digits"}, ...},
     "xxh64":"16 hexadecimal digits"}

The last member is the checksum of all bytes before its value, so any change of the file is noticed.
With the checksums of the other files it covers the whole checkpoint. All numbers read back as the
same bits. The options have the values of options_print_json; file names may have any bytes.

    run            identity of the run, as in its log (log.h), so that a resume never mixes
                   two runs of a directory; missing in older files
    serial         number of the checkpoint, in the order of writing in this directory
    first_serial   serial of the first checkpoint of this run
    sequence       next sequence of the training data (dataloader.h)
    samples_at     position in the random numbers of the samples
    train_tokens   number of tokens in the training data
    train_data     checksum of the training data (mixture.h), because other data have other
                   sequences; 0 if unknown; missing in older files
    val_data       the sets of validations (ValidationSet); the name of a single one is ""; missing
                   in older files and in runs without data
    teacher_weights  checksum of the teacher's weights (load_save.h); missing in runs without one,
                   and in older files, whose "teacher" depended on the layout in memory
    base_weights   the same of the model that an adapter changes
    clip           shares of the limit of the gradient's norm, for --update-in-backward
                   (update_in_backward.h); missing in other runs
    mixture        the sources of the training data, also earlier ones, and the sequences that each
                   has given (MixtureState); missing in older files and in runs without data
    average_from   updates before the first one in the average of the weights (average.h); missing
                   in older files: 0
    by_clock       1: saved only for --save-minutes, --keep-best or a stop; missing in older files
    validations    state of --patience and --keep-best (validations.h); missing in older files
    stage          work between two updates that was done at this step (RunStage); missing in older
                   files: all of it
*/
#ifndef LLMC_RUN_STATE_H
#define LLMC_RUN_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/xxh64.h"
#include "llmc/data/mixture.h"
#include "llmc/optim/outliers.h"
#include "llmc/optim/update_in_backward.h"
#include "llmc/optim/loss_scale.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"
#include "llmc/optim/validations.h"

#ifdef __cplusplus
extern "C" {
#endif

#define STATE_MAX_FILES 4096 // most files of a checkpoint

// How much of the work between two updates is done: a run may be stopped in the middle of it.
typedef enum { STAGE_UPDATED, STAGE_VALIDATED, STAGE_SAMPLED } RunStage;

typedef struct {
    int64_t step;    // steps done, whether their update was made or skipped
    int64_t stage;   // RunStage
    int64_t updates; // updates made
    // updates before the first one in the average of the weights
    int64_t average_from;
    int64_t tokens;     // tokens seen
    int64_t sequence;   // next sequence of the training data
    int64_t samples_at; // position in the random numbers of the samples
    double val_loss;    // last validation loss; NAN: none yet
    Validations validations;
    UpdateGuard guard;
    LossScale loss_scale;
    ClipShares shares; // without updates: none yet, or not in use
    // checksums of the weights of the teacher, and of the base of an adapter; 0: none
    uint64_t teacher, base;
} RunState;

typedef struct {
    const char* name;
    int64_t bytes;
    uint64_t xxh64;
} SavedFile;

typedef struct {
    const char *name, *value; // the value as on the command line
} SavedOption;

typedef struct {
    RunState run;
    uint64_t identity; // identity of the run; 0: unknown
    int64_t serial, first_serial, train_tokens, padded_vocab;
    int64_t by_clock; // 1: saved only for --save-minutes, --keep-best or a stop
    uint64_t train_data;
    ValidationSet val_sets[SOURCES_MAX];
    int num_val_sets;     // 0: unknown, or none
    MixtureState mixture; // its sources are owned; none: unknown
    const char* trainer;
    SavedFile* files; // (STATE_MAX_FILES)
    int num_files;
    SavedOption* options; // (STATE_MAX_OPTIONS_)
    int num_options;
    char* text; // text of the file, which the strings point into
} SavedState;

// Returns the state of a new run.
RunState run_state_open(UpdateGuard guard, LossScale loss_scale);

// Restores a saved state, except for the settings that the options decide, and the checksums of
// other models.
void run_state_restore(RunState* state, const RunState* saved);

// ---- writing ----

// Writes the file, completely or not at all. Ignores the options and text of `s`.
void state_write(const char* path, SavedState* s, const Options* options);

// ---- reading ----

void state_close(SavedState* s);

// Sets *s from the text of a state.json, which it owns from now on. Does not check the checksum.
// Returns 0 with the reason in `error`, and nothing to close, if the text is malformed.
int state_try_parse(SavedState* s, const char* path, char* text, size_t bytes, char* error);

// Reads and checks a file. Returns 0 with the reason in `error`, and nothing to close, if it is
// damaged.
int state_try_read(SavedState* s, const char* path, char* error);

// Returns the saved checksum of the validation set of this name; 0: unknown, or no such set.
uint64_t state_val_set(const SavedState* s, const char* name);

// Returns true if the set that decides about the run is the same as in a saved state, or unknown
// there. If not, its best validation so far is one of other data.
int state_validates_same(const SavedState* s, const ValidationSet* sets, int num_sets);

// Returns the saved value of an option; NULL if it was not saved.
const char* state_option(const SavedState* s, const char* name);

#ifdef __cplusplus
}
#endif

#ifdef RUN_STATE_IMPLEMENTATION

#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"

#define STATE_FORMAT_ "pretrain.c run"
#define STATE_VERSION_ 1

#define STATE_MAX_OPTIONS_ 256              // most options of the program that wrote the file
#define STATE_MAX_BYTES_ ((size_t)16 << 20) // largest state.json

RunState run_state_open(UpdateGuard guard, LossScale loss_scale) {
    RunState state;
    memset(&state, 0, sizeof(state));
    state.val_loss = NAN;
    state.validations = validations_open();
    state.guard = guard;
    state.loss_scale = loss_scale;
    return state;
}

void run_state_restore(RunState* state, const RunState* saved) {
    const double loss_z_limit = state->guard.loss_z_limit, norm_z_limit = state->guard.norm_z_limit;
    const LossScale scale = state->loss_scale;
    const ClipShares shares = state->shares;
    const uint64_t teacher = state->teacher, base = state->base;
    *state = *saved;
    state->teacher = teacher;
    state->base = base;
    state->shares = saved->shares.groups == shares.groups ? saved->shares : shares;
    state->loss_scale = scale;
    state->loss_scale.scale = saved->loss_scale.scale;
    state->loss_scale.good_steps = saved->loss_scale.good_steps;
    state->guard.loss_z_limit = loss_z_limit;
    state->guard.norm_z_limit = norm_z_limit;
}

// A whole number of a state, and its key.
typedef struct {
    const char* key;
    int64_t* value;
} StateNumber_;
enum { STATE_NUMBERS_ = 12 };

static void state_numbers_(SavedState* s, StateNumber_ numbers[STATE_NUMBERS_]) {
    const StateNumber_ all[STATE_NUMBERS_] = {{"serial", &s->serial},
                                              {"first_serial", &s->first_serial},
                                              {"step", &s->run.step},
                                              {"updates", &s->run.updates},
                                              {"tokens", &s->run.tokens},
                                              {"sequence", &s->run.sequence},
                                              {"samples_at", &s->run.samples_at},
                                              {"train_tokens", &s->train_tokens},
                                              {"padded_vocab", &s->padded_vocab},
                                              {"stage", &s->run.stage},
                                              {"by_clock", &s->by_clock},
                                              {"average_from", &s->run.average_from}};
    memcpy(numbers, all, sizeof(all));
}

// ---- writing ----

static void state_print_number_(FILE* file, const char* key, double value) {
    fprintf(file, isfinite(value) ? "\"%s\":%.17g" : "\"%s\":null", key, value);
}

static void state_print_window_(FILE* file, const char* key, const Outlier* window) {
    const int64_t held = window->count < OUTLIER_WINDOW ? window->count : OUTLIER_WINDOW;
    fprintf(file, ",\n  \"%s\":{\"count\":%lld,\"values\":[", key, (long long)window->count);
    for (int64_t i = 0; i < held; i++) {
        fprintf(file, "%s%.17g", i ? "," : "", window->values[i]);
    }
    fputs("]}", file);
}

static void state_print_validations_(FILE* file, const Validations* v) {
    fputs(",\n\"validations\":{", file);
    state_print_number_(file, "first", v->first);
    fputc(',', file);
    state_print_number_(file, "best", v->best);
    fprintf(file, ",\"best_step\":%lld,\"since\":%lld}", (long long)v->best_step, (long long)v->since);
}

static void state_print_shares_(FILE* file, const ClipShares* shares) {
    fprintf(file, ",\n\"clip\":{\"updates\":%lld,\"shares\":[", (long long)shares->updates);
    for (int g = 0; g < shares->groups; g++) {
        fprintf(file, "%s%.17g", g ? "," : "", shares->share[g]);
    }
    fputs("]}", file);
}

static void state_print_files_(FILE* file, const SavedState* s) {
    fputs(",\n\"files\":{", file);
    for (int i = 0; i < s->num_files; i++) {
        fputs(i ? ",\n  " : "\n  ", file);
        json_print_string(file, s->files[i].name, strlen(s->files[i].name));
        fprintf(file, ":{\"bytes\":%lld,\"xxh64\":\"%016" PRIx64 "\"}", (long long)s->files[i].bytes,
                s->files[i].xxh64);
    }
    fputc('}', file);
}

static void state_print_mixture_(FILE* file, const MixtureState* mixture) {
    fprintf(file,
            ",\n\"mixture\":{\"first\":%lld,\"from_step\":%lld,\"from_tokens\":%lld,\"from_sequence\":%lld,"
            "\"sources\":[",
            (long long)mixture->first, (long long)mixture->from.step, (long long)mixture->from.tokens,
            (long long)mixture->from.sequence);
    for (int i = 0; i < mixture->count; i++) {
        const SourceState* source = &mixture->source[i];
        fputs(i ? ",\n  {\"name\":" : "\n  {\"name\":", file);
        json_print_bytes(file, source->name, strlen(source->name));
        fprintf(file,
                ",\"xxh64\":\"%016" PRIx64
                "\",\"tokens\":%lld,\"number\":%lld,\"given\":%lld,\"share\":%lld}",
                source->fingerprint, (long long)source->tokens, (long long)source->number,
                (long long)source->given, (long long)source->share);
    }
    fputs("]}", file);
}

static void state_print_sets_(FILE* file, const SavedState* s) {
    fputs(",\n\"val_data\":[", file);
    for (int i = 0; i < s->num_val_sets; i++) {
        fputs(i ? ",\n  {\"name\":" : "\n  {\"name\":", file);
        json_print_bytes(file, s->val_sets[i].name, strlen(s->val_sets[i].name));
        fprintf(file, ",\"xxh64\":\"%016" PRIx64 "\"}", s->val_sets[i].checksum);
    }
    fputs("]", file);
}

// Prints everything except the checksum.
static void state_print_(FILE* file, SavedState* s, const Options* options) {
    StateNumber_ numbers[STATE_NUMBERS_];
    state_numbers_(s, numbers);
    fprintf(file, "{\"format\":\"%s\",\n\"version\":%d", STATE_FORMAT_, STATE_VERSION_);
    if (s->identity) {
        fprintf(file, ",\n\"run\":\"%016" PRIx64 "\"", s->identity);
    }
    for (int i = 0; i < STATE_NUMBERS_; i++) {
        fprintf(file, ",\n\"%s\":%lld", numbers[i].key, (long long)*numbers[i].value);
    }
    fprintf(file, ",\n\"train_data\":\"%016" PRIx64 "\",\n", s->train_data);
    if (s->run.teacher) {
        fprintf(file, "\"teacher_weights\":\"%016" PRIx64 "\",\n", s->run.teacher);
    }
    if (s->run.base) {
        fprintf(file, "\"base_weights\":\"%016" PRIx64 "\",\n", s->run.base);
    }
    state_print_number_(file, "val_loss", s->run.val_loss);
    if (s->num_val_sets > 0) {
        state_print_sets_(file, s);
    }
    fputs(",\n\"trainer\":", file);
    json_print_string(file, s->trainer, strlen(s->trainer));
    fprintf(file, ",\n\"loss_scale\":{\"scale\":%.9g,\"good_steps\":%d}", (double)s->run.loss_scale.scale,
            s->run.loss_scale.good_steps);
    fprintf(file, ",\n\"guard\":{\"consecutive\":%d,", s->run.guard.consecutive);
    state_print_number_(file, "best", s->run.guard.best_mean);
    state_print_window_(file, "losses", &s->run.guard.losses);
    state_print_window_(file, "norms", &s->run.guard.norms);
    fputc('}', file);
    state_print_validations_(file, &s->run.validations);
    if (s->run.shares.updates > 0) {
        state_print_shares_(file, &s->run.shares);
    }
    if (s->mixture.count > 0) {
        state_print_mixture_(file, &s->mixture);
    }
    fputs(",\n\"options\":", file);
    options_print_json(file, options);
    state_print_files_(file, s);
    fputs(",\n\"xxh64\":\"", file);
}

void state_write(const char* path, SavedState* s, const Options* options) {
    TextBuffer buffer;
    text_buffer_open(&buffer, path);
    state_print_(buffer.file, s, options);
    fflush(buffer.file);
    fprintf(buffer.file, "%016" PRIx64 "\"}\n", xxh64(buffer.text, buffer.bytes));
    char* text = text_buffer_close(&buffer);
    file_write_text(path, text, buffer.bytes);
    free(text);
}

// ---- reading ----

static int state_natural_(JsonReader* text, int64_t* value) {
    size_t number;
    if (!json_natural(text, &number)) {
        return 0;
    }
    *value = (int64_t)number;
    // leaves room to count on
    return number <= INT64_MAX / 2 || json_unexpected(text, "a number below 2^62");
}

// Reads a number, or null as NAN.
static int state_number_(JsonReader* text, double* value) {
    if (json_peek(text) == 'n') {
        *value = NAN;
        return json_skip(text);
    }
    return json_number(text, value);
}

static int state_hex_(JsonReader* text, uint64_t* value) {
    const char* digits;
    if (!json_name(text, &digits)) {
        return 0;
    }
    *value = strtoull(digits, NULL, 16);
    return (strlen(digits) == 16 && strspn(digits, "0123456789abcdef") == 16) ||
           json_unexpected(text, "16 hexadecimal digits before");
}

// Reads an object, each member by read(text, key, to), which returns 0 on error. `keys` (NULL: any)
// lists the legal keys: each must appear exactly once, or at most once if it starts with "?".
typedef int (*StateMember_)(JsonReader* text, const char* key, void* to);

static int state_object_(JsonReader* text, const char* const* keys, StateMember_ read, void* to) {
    const char* key;
    int more, seen[32] = {0};
    if (!json_take(text, '{')) {
        return 0;
    }
    for (int n = 0; (more = json_member(text, n ? JSON_NEXT : JSON_FIRST, &key)) > 0; n++) {
        int i = 0;
        while (keys && keys[i] && strcmp(key, keys[i] + (keys[i][0] == '?')) != 0) {
            i++;
        }
        if (keys && (!keys[i] || seen[i]++)) {
            return error_set(text->error, text->path, "key %s %s", key,
                             keys[i] ? "appears twice" : "is unknown");
        }
        if (!read(text, key, to)) {
            return 0;
        }
    }
    for (int i = 0; more == 0 && keys && keys[i]; i++) {
        if (!seen[i] && keys[i][0] != '?') {
            return error_set(text->error, text->path, "no key %s", keys[i]);
        }
    }
    return more == 0;
}

// Reads a list of at most `max` numbers.
static int state_values_(JsonReader* text, double* values, int max, int* held) {
    int more;
    *held = 0;
    if (!json_take(text, '[')) {
        return 0;
    }
    for (; (more = json_element(text, *held ? JSON_NEXT : JSON_FIRST)) > 0; ++*held) {
        if (*held == max) {
            return json_unexpected(text, "the end of the list");
        }
        if (!json_number(text, &values[*held])) {
            return 0;
        }
    }
    return more == 0;
}

typedef struct {
    Outlier* window;
    int held;
} StateWindow_;

static int state_window_member_(JsonReader* text, const char* key, void* to) {
    StateWindow_* w = (StateWindow_*)to;
    return strcmp(key, "count") == 0 ? state_natural_(text, &w->window->count)
                                     : state_values_(text, w->window->values, OUTLIER_WINDOW, &w->held);
}

static int state_window_(JsonReader* text, Outlier* window) {
    static const char* const keys[] = {"count", "values", NULL};
    StateWindow_ w = {window, 0};
    if (!state_object_(text, keys, state_window_member_, &w)) {
        return 0;
    }
    const int64_t wanted = window->count < OUTLIER_WINDOW ? window->count : OUTLIER_WINDOW;
    return w.held == wanted ||
           error_set(text->error, text->path, "a window of %d values, wanted %lld of %lld", w.held,
                     (long long)wanted, (long long)window->count);
}

static int state_guard_member_(JsonReader* text, const char* key, void* to) {
    UpdateGuard* guard = (UpdateGuard*)to;
    int64_t number = 0;
    if (strcmp(key, "consecutive") == 0) {
        const int ok = state_natural_(text, &number);
        guard->consecutive = number < INT_MAX ? (int)number : INT_MAX;
        return ok;
    }
    return strcmp(key, "best") == 0 ? state_number_(text, &guard->best_mean)
                                    : state_window_(text, key[0] == 'l' ? &guard->losses : &guard->norms);
}

static int state_validations_member_(JsonReader* text, const char* key, void* to) {
    Validations* v = (Validations*)to;
    return strcmp(key, "first") == 0       ? state_number_(text, &v->first)
           : strcmp(key, "best") == 0      ? state_number_(text, &v->best)
           : strcmp(key, "best_step") == 0 ? state_natural_(text, &v->best_step)
                                           : state_natural_(text, &v->since);
}

static int state_shares_member_(JsonReader* text, const char* key, void* to) {
    ClipShares* shares = (ClipShares*)to;
    return strcmp(key, "updates") == 0 ? state_natural_(text, &shares->updates)
                                       : state_values_(text, shares->share, CLIP_MAX_GROUPS, &shares->groups);
}

static int state_source_member_(JsonReader* text, const char* key, void* to) {
    SourceState* source = (SourceState*)to;
    return strcmp(key, "name") == 0     ? json_bytes(text, &source->name)
           : strcmp(key, "xxh64") == 0  ? state_hex_(text, &source->fingerprint)
           : strcmp(key, "tokens") == 0 ? state_natural_(text, &source->tokens)
           : strcmp(key, "number") == 0 ? state_natural_(text, &source->number)
           : strcmp(key, "given") == 0  ? state_natural_(text, &source->given)
                                        : state_natural_(text, &source->share);
}

// Reads the sources of a mixture, whose numbers are below SOURCES_EVER.
static int state_sources_(JsonReader* text, MixtureState* mixture) {
    static const char* const keys[] = {"name", "xxh64", "tokens", "number", "given", "share", NULL};
    int more;
    if (!json_take(text, '[')) {
        return 0;
    }
    mixture->source = (SourceState*)check_alloc(SOURCES_EVER, sizeof(SourceState), text->path);
    while ((more = json_element(text, mixture->count ? JSON_NEXT : JSON_FIRST)) > 0) {
        SourceState* source = &mixture->source[mixture->count];
        if (mixture->count == SOURCES_EVER) {
            return json_unexpected(text, "the end of the list");
        }
        if (!state_object_(text, keys, state_source_member_, source)) {
            return 0;
        }
        if (source->number >= SOURCES_EVER || source->share > (int64_t)SOURCES_CYCLE_MAX) {
            return error_set(text->error, text->path, "source %.100s has number %lld and share %lld",
                             source->name, (long long)source->number, (long long)source->share);
        }
        mixture->count++;
    }
    return more == 0;
}

static int state_set_member_(JsonReader* text, const char* key, void* to) {
    ValidationSet* set = (ValidationSet*)to;
    return strcmp(key, "name") == 0 ? json_bytes(text, &set->name) : state_hex_(text, &set->checksum);
}

static int state_sets_(JsonReader* text, SavedState* s) {
    static const char* const keys[] = {"name", "xxh64", NULL};
    int more;
    if (!json_take(text, '[')) {
        return 0;
    }
    while ((more = json_element(text, s->num_val_sets ? JSON_NEXT : JSON_FIRST)) > 0) {
        if (s->num_val_sets == SOURCES_MAX) {
            return json_unexpected(text, "the end of the list");
        }
        if (!state_object_(text, keys, state_set_member_, &s->val_sets[s->num_val_sets])) {
            return 0;
        }
        s->num_val_sets++;
    }
    return more == 0;
}

static int state_mixture_member_(JsonReader* text, const char* key, void* to) {
    MixtureState* mixture = (MixtureState*)to;
    return strcmp(key, "first") == 0         ? state_natural_(text, &mixture->first)
           : strcmp(key, "from_step") == 0   ? state_natural_(text, &mixture->from.step)
           : strcmp(key, "from_tokens") == 0 ? state_natural_(text, &mixture->from.tokens)
           : strcmp(key, "sources") == 0     ? state_sources_(text, mixture)
                                             : state_natural_(text, &mixture->from.sequence);
}

static int state_scale_member_(JsonReader* text, const char* key, void* to) {
    LossScale* scale = (LossScale*)to;
    double number = 0;
    if (!json_number(text, &number)) {
        return 0;
    }
    if (!(number >= 0 && number <= FLT_MAX)) {
        return error_set(text->error, text->path, "%s is %g", key, number);
    }
    if (strcmp(key, "scale") == 0) {
        scale->scale = (float)number;
    } else {
        scale->good_steps = number < INT_MAX ? (int)number : INT_MAX;
    }
    return 1;
}

// Sets *value to the value of an option as text, in place: the characters of a string, on or off
// for a switch.
static int state_option_value_(JsonReader* text, const char** value) {
    int truth;
    const int c = json_peek(text);
    if (c == '"') {
        return json_bytes(text, value);
    }
    if (c == 't' || c == 'f') {
        *value = c == 't' ? "on" : "off";
        return json_bool(text, &truth);
    }
    if (c == 'n') {
        *value = "auto";
        return json_skip(text);
    }
    // A number is moved one byte to the front, over a colon or a blank, to make room for a zero
    // byte.
    const size_t begin = text->at;
    if (c == '{' || c == '[' || begin == 0 || !json_skip(text)) {
        return begin && c != '{' && c != '[' ? 0 : json_unexpected(text, "the value of an option");
    }
    memmove(text->text + begin - 1, text->text + begin, text->at - begin);
    text->text[text->at - 1] = '\0';
    *value = (const char*)text->text + begin - 1;
    return 1;
}

static int state_options_member_(JsonReader* text, const char* key, void* to) {
    SavedState* s = (SavedState*)to;
    if (s->num_options == STATE_MAX_OPTIONS_) {
        return error_set(text->error, text->path, "more than %d options", STATE_MAX_OPTIONS_);
    }
    SavedOption* option = &s->options[s->num_options];
    option->name = key;
    s->num_options++;
    return state_option_value_(text, &option->value);
}

static int state_file_member_(JsonReader* text, const char* key, void* to) {
    SavedFile* file = (SavedFile*)to;
    return strcmp(key, "bytes") == 0 ? state_natural_(text, &file->bytes) : state_hex_(text, &file->xxh64);
}

static int state_files_member_(JsonReader* text, const char* key, void* to) {
    static const char* const keys[] = {"bytes", "xxh64", NULL};
    SavedState* s = (SavedState*)to;
    if (s->num_files == STATE_MAX_FILES) {
        return error_set(text->error, text->path, "more than %d files", STATE_MAX_FILES);
    }
    if (strchr(key, '/') || strcmp(key, ".") == 0 || strcmp(key, "..") == 0 || strlen(key) > NAME_MAX) {
        return error_set(text->error, text->path, "a file called %.100s, wanted one beside it", key);
    }
    SavedFile* file = &s->files[s->num_files++];
    file->name = key;
    return state_object_(text, keys, state_file_member_, file);
}

static int state_format_(JsonReader* text) {
    const char* format;
    return json_name(text, &format) &&
           (strcmp(format, STATE_FORMAT_) == 0 ||
            error_set(text->error, text->path, "format %s, wanted %s", format, STATE_FORMAT_));
}

static int state_version_(JsonReader* text) {
    int64_t version;
    return state_natural_(text, &version) &&
           (version == STATE_VERSION_ || error_set(text->error, text->path, "version %lld, wanted %d",
                                                   (long long)version, STATE_VERSION_));
}

static int state_member_(JsonReader* text, const char* key, void* to) {
    static const char* const guard[] = {"consecutive", "best", "losses", "norms", NULL};
    static const char* const scale[] = {"scale", "good_steps", NULL};
    static const char* const mixture[] = {"first",         "from_step", "from_tokens",
                                          "from_sequence", "sources",   NULL};
    static const char* const clip[] = {"updates", "shares", NULL};
    static const char* const validations[] = {"first", "best", "best_step", "since", NULL};
    SavedState* s = (SavedState*)to;
    StateNumber_ numbers[STATE_NUMBERS_];
    uint64_t ignored; // the file's own checksum, and that of a teacher in older files
    state_numbers_(s, numbers);
    for (int i = 0; i < STATE_NUMBERS_; i++) {
        if (strcmp(key, numbers[i].key) == 0) {
            return state_natural_(text, numbers[i].value);
        }
    }
    return strcmp(key, "format") == 0     ? state_format_(text)
           : strcmp(key, "version") == 0  ? state_version_(text)
           : strcmp(key, "val_loss") == 0 ? state_number_(text, &s->run.val_loss)
           : strcmp(key, "trainer") == 0  ? json_name(text, &s->trainer)
           : strcmp(key, "loss_scale") == 0
               ? state_object_(text, scale, state_scale_member_, &s->run.loss_scale)
           : strcmp(key, "guard") == 0 ? state_object_(text, guard, state_guard_member_, &s->run.guard)
           : strcmp(key, "clip") == 0  ? state_object_(text, clip, state_shares_member_, &s->run.shares)
           : strcmp(key, "validations") == 0
               ? state_object_(text, validations, state_validations_member_, &s->run.validations)
           : strcmp(key, "mixture") == 0    ? state_object_(text, mixture, state_mixture_member_, &s->mixture)
           : strcmp(key, "val_data") == 0   ? state_sets_(text, s)
           : strcmp(key, "options") == 0    ? state_object_(text, NULL, state_options_member_, s)
           : strcmp(key, "files") == 0      ? state_object_(text, NULL, state_files_member_, s)
           : strcmp(key, "run") == 0        ? state_hex_(text, &s->identity)
           : strcmp(key, "train_data") == 0 ? state_hex_(text, &s->train_data)
           : strcmp(key, "teacher_weights") == 0 ? state_hex_(text, &s->run.teacher)
           : strcmp(key, "base_weights") == 0    ? state_hex_(text, &s->run.base)
                                                 : state_hex_(text, &ignored);
}

// Returns true if the stretch of the next sequence starts before it.
static int state_check_mixture_(JsonReader* text, const SavedState* s) {
    return s->mixture.first <= s->run.sequence || s->mixture.count == 0 ||
           error_set(text->error, text->path, "a mixture from sequence %lld on, at sequence %lld",
                     (long long)s->mixture.first, (long long)s->run.sequence);
}

void state_close(SavedState* s) {
    free(s->mixture.source);
    free(s->files);
    free(s->options);
    free(s->text);
    memset(s, 0, sizeof(*s));
}

int state_try_parse(SavedState* s, const char* path, char* text, size_t bytes, char* error) {
    static const char* const keys[] = {"format",
                                       "version",
                                       "serial",
                                       "first_serial",
                                       "step",
                                       "updates",
                                       "tokens",
                                       "sequence",
                                       "samples_at",
                                       "train_tokens",
                                       "padded_vocab",
                                       "val_loss",
                                       "trainer",
                                       "loss_scale",
                                       "guard",
                                       "options",
                                       "files",
                                       "?stage",
                                       "?train_data",
                                       "?clip",
                                       "xxh64",
                                       "?run",
                                       "?by_clock",
                                       "?validations",
                                       "?teacher",
                                       "?mixture",
                                       "?average_from",
                                       "?val_data",
                                       "?teacher_weights",
                                       "?base_weights",
                                       NULL};
    JsonReader reader = json_reader(path, text, bytes, error);
    memset(s, 0, sizeof(*s));
    s->text = text;
    s->run.loss_scale = loss_scale_open();
    s->run.stage = STAGE_SAMPLED;
    s->run.validations = validations_open();
    s->files = (SavedFile*)check_alloc(STATE_MAX_FILES, sizeof(SavedFile), path);
    s->options = (SavedOption*)check_alloc(STATE_MAX_OPTIONS_, sizeof(SavedOption), path);
    const int ok = state_object_(&reader, keys, state_member_, s) && json_end(&reader) &&
                   state_check_mixture_(&reader, s);
    if (!ok) {
        state_close(s);
    }
    return ok;
}

// Returns true if the checksum at the end of the file is right.
static int state_check_sum_(const char* path, const char* text, size_t bytes, char* error) {
    const size_t tail = 16 + strlen("\"}\n");
    char wanted[32];
    if (bytes < tail) {
        return error_set(error, path, "%zu bytes, wanted the state of a run", bytes);
    }
    snprintf(wanted, sizeof(wanted), "%016" PRIx64 "\"}\n", xxh64(text, bytes - tail));
    return memcmp(text + bytes - tail, wanted, tail) == 0 ||
           error_set(error, path, "damaged: its checksum is %.16s, wanted %.16s", text + bytes - tail,
                     wanted);
}

int state_try_read(SavedState* s, const char* path, char* error) {
    char* text;
    size_t bytes;
    if (!file_try_read(path, STATE_MAX_BYTES_, &text, &bytes, error)) {
        return 0;
    }
    if (!state_check_sum_(path, text, bytes, error)) {
        free(text);
        return 0;
    }
    return state_try_parse(s, path, text, bytes, error);
}

uint64_t state_val_set(const SavedState* s, const char* name) {
    uint64_t checksum = 0;
    for (int i = 0; i < s->num_val_sets; i++) {
        checksum = strcmp(s->val_sets[i].name, name) == 0 ? s->val_sets[i].checksum : checksum;
    }
    return checksum;
}

int state_validates_same(const SavedState* s, const ValidationSet* sets, int num_sets) {
    return s->num_val_sets == 0 || num_sets == 0 || s->val_sets[0].checksum == sets[0].checksum;
}

const char* state_option(const SavedState* s, const char* name) {
    for (int i = 0; i < s->num_options; i++) {
        if (strcmp(s->options[i].name, name) == 0) {
            return s->options[i].value;
        }
    }
    return NULL;
}

#endif // RUN_STATE_IMPLEMENTATION

#endif
