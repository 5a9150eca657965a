/*
log_reader.h -- reads a run's log.jsonl (log.h has the format) for reports and comparisons.

A run is named by its directory, or by its log. It may be finished, running, stopped or a copy: only
the log is read. An incomplete last line is skipped, and so are unknown kinds of lines and unknown
keys. A damaged line, after a power failure for example, is skipped with a warning.

Each step appears once. The log itself drops what a resumed or rolled-back run does again; if it did
not, the later lines count.
*/
#ifndef LLMC_LOG_READER_H
#define LLMC_LOG_READER_H

#include <limits.h>
#include <stddef.h>
#include <stdio.h>

#include "llmc/base/check.h"
#include "llmc/base/enum_words.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { RECORD_RUNS = 8 }; // most runs read together

// Numbers of an update, by their keys.
// clang-format off
#define RECORD_SERIES(X) \
    X(RECORD_LOSS,       "loss")      \
    X(RECORD_KL,         "kl")        /* from the teacher */ \
    X(RECORD_NORM,       "norm")      \
    X(RECORD_LR,         "lr")        \
    X(RECORD_MS,         "ms")        \
    X(RECORD_DATA_MS,    "data_ms")   \
    X(RECORD_TOK_PER_S,  "tok_per_s") \
    X(RECORD_MFU,        "mfu")       /* of the largest peak since the start */ \
    X(RECORD_PEAK,       "peak")      \
    X(RECORD_LOAD,       "expert_load") \
    X(RECORD_ENTROPY,    "router_entropy") \
    X(RECORD_POWER_W,    "power_w")   \
    X(RECORD_CLOCK_MHZ,  "clock_mhz") \
    X(RECORD_TOKENS,     "tokens")    \
    X(RECORD_ELAPSED_S,  "elapsed_s") \
    X(RECORD_TIME,       "time")
typedef enum { RECORD_SERIES(WORDS_VALUE) RECORD_NUM_SERIES_ } RecordSeries;

// Numbers of the other lines.
#define RECORD_VALUES(X) \
    X(RECORD_VALUE_LOSS, "loss")      \
    X(RECORD_BPB,        "bpb")       \
    X(RECORD_ACC,        "acc")       \
    X(RECORD_ACC_NORM,   "acc_norm")  \
    X(RECORD_ACC_BYTES,  "acc_bytes") \
    X(RECORD_SHARE,      "share")     /* of a source of data, like the next two */ \
    X(RECORD_GIVEN,      "tokens")    \
    X(RECORD_EPOCHS,     "epochs")    \
    X(RECORD_FROM,       "from")      \
    X(RECORD_SEQUENCES,  "sequences") \
    X(RECORD_ALL_SEQUENCES, "all_sequences")
typedef enum { RECORD_VALUES(WORDS_VALUE) RECORD_NUM_VALUES_ } RecordValue;

// Lines about a step, in the order of the words below.
#define RECORD_KINDS(X) \
    X(RECORD_VAL,      "val")      \
    X(RECORD_SET,      "set")      /* a validation set with a name */ \
    X(RECORD_SOURCE,   "source")   \
    X(RECORD_TASK,     "task")     \
    X(RECORD_SAMPLE,   "sample")   \
    X(RECORD_SAVE,     "save")     \
    X(RECORD_WARNING,  "warning")  \
    X(RECORD_SKIP,     "skip")     \
    X(RECORD_ROLLBACK, "rollback") \
    X(RECORD_STOP,     "stop")     \
    X(RECORD_START,    "config") /* a start of the program; its step is the previous one */
// clang-format on
typedef enum { RECORD_KINDS(WORDS_VALUE) RECORD_NUM_KINDS_ } RecordKind;

// Numbers of an update; missing ones are NaN.
typedef struct {
    double step, values[RECORD_NUM_SERIES_];
    double* sources; // (num_sources) losses of the sources that the run had until then, or NULL
    int num_sources;
} RecordStep;

// Loads of the experts of all layers in an update.
typedef struct {
    double step;
    double* load; // (layers, experts); NULL: unknown
    int layers, experts;
} RecordLoads;

typedef struct {
    RecordKind kind;
    double step, values[RECORD_NUM_VALUES_];
    char* text; // sample, warning, reason, or the name of the task, source or set; "" if none
    size_t bytes;
} RecordEvent;

typedef struct {
    char *name, *value; // value as on a command line
    int is_text;
} RecordOption;

// Where memory is: on the model's device, on the host beside it, or in files.
typedef enum { RECORD_ON_DEVICE, RECORD_ON_HOST, RECORD_ON_DISK, RECORD_PLACES } RecordPlace;

typedef struct {
    char* name;
    double mib;
    RecordPlace place;
} RecordMemory;

typedef enum { RECORD_UNFINISHED, RECORD_STOPPED, RECORD_FINISHED } RecordEnd;

typedef struct {
    char name[PATH_MAX], path[PATH_MAX]; // as given, and of its log
    RecordStep* steps;                   // in order
    RecordEvent* events;                 // in order
    RecordOption* options;               // of the last start, like the following
    RecordMemory* memory;
    size_t num_steps, num_events, num_options, num_memory;
    char *program, *trainer, *host, *device, *command; // "": unknown
    char** sources; // (num_sources) names of the sources whose losses are known
    int num_sources;
    RecordLoads loads;                   // the last ones
    double floor, peak_mib, planned_mib; // NaN: unknown
    double tok_per_s;   // of the last start that made updates, without its first; NaN: unknown
    size_t num_damaged; // skipped lines
    RecordEnd end;
} Record;

// Splits "RUN,RUN" into paths; \, is a comma in a name. A part that names nothing may be a pattern,
// 'out/lr*', which stands for the runs that match it. Returns the number of runs. Refuses, as the
// value of `option`, a list that is empty, has an empty part, names a run twice, or is too long.
int record_split(char paths[RECORD_RUNS][PATH_MAX], const char* list, const char* option);

// Reads a run, and warns about skipped lines. Ends the program without a log, or without an update
// in it.
void record_read(Record* record, const char* run);

void record_close(Record* record);

enum { RECORD_TAIL_ = 512 };

// A run that is read while it writes its log. It may have no update yet.
typedef struct {
    Record record;
    FILE* file;
    long lines;                   // read so far
    size_t bytes;                 // of these lines
    char fault[ERROR_BYTES + 64]; // what is wrong with the first skipped line
    char tail[RECORD_TAIL_];      // last bytes of these lines
    size_t tail_bytes;
} RecordFollower;

// Reads a run up to now. Ends the program without a log.
void record_follow(RecordFollower* f, const char* run);

// Reads the lines that are new. If the log was cut or replaced, reads all of it again. Returns true
// if anything has changed; a log that cannot be read now has not.
int record_follow_on(RecordFollower* f);

void record_follow_end(RecordFollower* f);

// Returns the length of the directories that the names of several runs have in common.
size_t record_common_directories(const Record* runs, int count);

// True if a run's name is that of a log, not of a directory.
int record_names_file(const char* run);

// Return the first, last and lowest validation; NULL if none.
const RecordEvent* record_first(const Record* record, RecordKind kind);
const RecordEvent* record_last(const Record* record, RecordKind kind);
// `measure` is RECORD_VALUE_LOSS or RECORD_BPB
const RecordEvent* record_best(const Record* record, RecordValue measure);

// Returns a number of the run, RECORD_TOKENS for example, after `step` updates; 0 before the first.
// NaN: unknown.
double record_place(const Record* record, RecordSeries series, double step);

// Returns the loss of a source in an update; NaN: unknown.
double record_source_loss(const RecordStep* step, int source);

// Returns the value of an option, NULL if unknown.
const char* record_option(const Record* record, const char* name);

// Returns the training speed: the summary's, else the median of the last 1,000 updates.
double record_tok_per_s(const Record* record);

#ifdef __cplusplus
}
#endif

#ifdef LOG_READER_IMPLEMENTATION

#include <errno.h>
#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "llmc/base/file.h"
#include "llmc/base/json.h"

static const char* const record_series_[] = {RECORD_SERIES(WORDS_NAME)};
static const char* const record_values_[] = {RECORD_VALUES(WORDS_NAME)};
static const char* const record_kinds_[] = {RECORD_KINDS(WORDS_NAME)};

// Returns the index of a word in a list, `count` if it is not in it.
static int record_find_(const char* const* words, int count, const char* word) {
    int i = 0;
    while (i < count && strcmp(words[i], word) != 0) {
        i++;
    }
    return i;
}

static char* record_copy_(const char* text, size_t bytes) {
    char* copy = (char*)check_alloc_unset(bytes + 1, 1, "log");
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    return copy;
}

static void record_set_(char** text, const char* value, size_t bytes) {
    free(*text);
    *text = record_copy_(value, bytes);
}

// ---- one line ----

// Reads a number, or null.
static int record_number_(JsonReader* json, double* value) {
    *value = NAN;
    return json_peek(json) == 'n' ? json_skip(json) : json_number(json, value);
}

// Reads the value of `key` if it is one of `words`, else skips it.
static int record_take_(JsonReader* json, const char* key, const char* const* words, int count,
                        double* values) {
    const int which = record_find_(words, count, key);
    return which < count ? record_number_(json, &values[which]) : json_skip(json);
}

static void record_clear_(double* values, int count) {
    for (int i = 0; i < count; i++) {
        values[i] = NAN;
    }
}

// True if the line ends with its object; false also after an error of JSON.
static int record_line_ends_(JsonReader* json, int more) { return more == 0 && json_end(json); }

// Drops everything about steps after `step`: they were done again.
static void record_drop_after_(Record* r, double step) {
    while (r->num_steps && r->steps[r->num_steps - 1].step > step) {
        free(r->steps[--r->num_steps].sources);
    }
    size_t kept = 0;
    for (size_t i = 0; i < r->num_events; i++) {
        if (r->events[i].step > step) {
            free(r->events[i].text);
        } else {
            r->events[kept++] = r->events[i];
        }
    }
    r->num_events = kept;
}

static double record_now_(const Record* r) { return r->num_steps ? r->steps[r->num_steps - 1].step : 0; }

// Returns the number of a source, which is added if it is new.
static int record_source_(Record* r, const char* name) {
    const int source = record_find_((const char* const*)r->sources, r->num_sources, name);
    if (source == r->num_sources) {
        r->sources = (char**)check_grow(r->sources, (size_t)r->num_sources, sizeof(char*), r->path);
        r->sources[r->num_sources++] = record_copy_(name, strlen(name));
    }
    return source;
}

// Reads the losses of the sources of an update.
static int record_sources_(Record* r, JsonReader* json, RecordStep* step) {
    const char* key;
    int more, n = 0;
    if (!json_take(json, '{')) {
        return 0;
    }
    for (; (more = json_member(json, n ? JSON_NEXT : JSON_FIRST, &key)) > 0; n++) {
        const int source = record_source_(r, key);
        while (step->num_sources <= source) {
            step->sources =
                (double*)check_grow(step->sources, (size_t)step->num_sources, sizeof(double), r->path);
            step->sources[step->num_sources++] = NAN;
        }
        if (!record_number_(json, &step->sources[source])) {
            return 0;
        }
    }
    return more == 0;
}

// Reads the line of an update. Its sources are the caller's, also after an error.
static int record_step_(Record* r, JsonReader* json, RecordStep* step) {
    const char* key;
    int more, ok = 1;
    memset(step, 0, sizeof(*step));
    step->step = NAN;
    record_clear_(step->values, RECORD_NUM_SERIES_);
    while (ok && (more = json_member(json, JSON_NEXT, &key)) > 0) {
        ok = strcmp(key, "step") == 0 ? record_number_(json, &step->step)
             : strcmp(key, "source_loss") == 0
                 ? record_sources_(r, json, step)
                 : record_take_(json, key, record_series_, RECORD_NUM_SERIES_, step->values);
    }
    return ok && record_line_ends_(json, more) && (step->step >= 1 || json_unexpected(json, "a step from 1"));
}

static int record_train_(Record* r, JsonReader* json) {
    RecordStep step;
    if (!record_step_(r, json, &step)) {
        free(step.sources);
        return 0;
    }
    if (step.step <= record_now_(r)) {
        record_drop_after_(r, step.step - 1);
    }
    r->steps = (RecordStep*)check_grow(r->steps, r->num_steps, sizeof(step), r->path);
    r->steps[r->num_steps++] = step;
    r->end = RECORD_UNFINISHED;
    return 1;
}

// Reads the loads of layers: rows of the same length.
static int record_load_rows_(Record* r, JsonReader* json, RecordLoads* loads) {
    int more = -1, ok = json_take(json, '['), size = 0;
    while (ok && (more = json_element(json, loads->layers ? JSON_NEXT : JSON_FIRST)) > 0) {
        int n = 0, inner = 0;
        ok = json_take(json, '[');
        while (ok && (inner = json_element(json, n ? JSON_NEXT : JSON_FIRST)) > 0) {
            loads->load = (double*)check_grow(loads->load, (size_t)size, sizeof(double), r->path);
            ok = record_number_(json, &loads->load[size++]);
            n++;
        }
        ok = ok && inner == 0 && (n == loads->experts || loads->layers == 0);
        loads->experts = n;
        loads->layers++;
    }
    return ok && more == 0;
}

static int record_experts_(Record* r, JsonReader* json) {
    RecordLoads loads = {NAN, NULL, 0, 0};
    const char* key;
    int more, ok = 1;
    while (ok && (more = json_member(json, JSON_NEXT, &key)) > 0) {
        ok = strcmp(key, "step") == 0   ? record_number_(json, &loads.step)
             : strcmp(key, "load") == 0 ? record_load_rows_(r, json, &loads)
                                        : json_skip(json);
    }
    if (!ok || !record_line_ends_(json, more)) {
        free(loads.load);
        return 0;
    }
    free(r->loads.load);
    r->loads = loads;
    return 1;
}

static void record_add_event_(Record* r, RecordEvent event) {
    r->events = (RecordEvent*)check_grow(r->events, r->num_events, sizeof(event), r->path);
    r->events[r->num_events++] = event;
}

static int record_event_(Record* r, RecordKind kind, JsonReader* json) {
    static const char* const texts[] = {"text", "reason", "name"};
    RecordEvent event = {kind, NAN, {0}, NULL, 0};
    const char *key, *text = "";
    int more, ok = 1;
    record_clear_(event.values, RECORD_NUM_VALUES_);
    while (ok && (more = json_member(json, JSON_NEXT, &key)) > 0) {
        ok = strcmp(key, "step") == 0 ? record_number_(json, &event.step)
             : record_find_(texts, 3, key) < 3
                 ? json_text(json, &text, &event.bytes)
                 : record_take_(json, key, record_values_, RECORD_NUM_VALUES_, event.values);
    }
    if (!ok || !record_line_ends_(json, more)) {
        return 0;
    }
    if (!(event.step >= 0)) {
        return json_unexpected(json, "a step from 0");
    }
    if (kind == RECORD_ROLLBACK) {
        record_drop_after_(r, event.step);
    }
    event.text = record_copy_(text, event.bytes);
    record_add_event_(r, event);
    r->end = kind == RECORD_STOP ? RECORD_STOPPED : r->end;
    return 1;
}

static void record_forget_start_(Record* r) {
    for (size_t i = 0; i < r->num_options; i++) {
        free(r->options[i].name);
        free(r->options[i].value);
    }
    for (size_t i = 0; i < r->num_memory; i++) {
        free(r->memory[i].name);
    }
    free(r->options);
    free(r->memory);
    free(r->program);
    free(r->trainer);
    free(r->host);
    free(r->device);
    free(r->command);
}

// Reads the value of an option: text, a number as written, on, off or auto.
static int record_option_value_(JsonReader* json, RecordOption* option) {
    const int c = json_peek(json);
    const size_t begin = json->at;
    const char* text = NULL;
    size_t bytes = 0;
    option->is_text = c == '"';
    if (!(c == '"' ? json_text(json, &text, &bytes) : json_skip(json))) {
        return 0;
    }
    const char* word = c == 't' ? "on" : c == 'f' ? "off" : c == 'n' ? "auto" : NULL;
    if (c != '"') {
        text = word ? word : (const char*)json->text + begin;
        bytes = word ? strlen(word) : json->at - begin;
    }
    option->value = record_copy_(text, bytes);
    return 1;
}

static int record_options_(Record* r, JsonReader* json) {
    const char* key;
    int more;
    if (!json_take(json, '{')) {
        return 0;
    }
    while ((more = json_member(json, r->num_options ? JSON_NEXT : JSON_FIRST, &key)) > 0) {
        RecordOption option = {record_copy_(key, strlen(key)), NULL, 0};
        if (!record_option_value_(json, &option)) {
            free(option.name);
            return 0;
        }
        r->options = (RecordOption*)check_grow(r->options, r->num_options, sizeof(option), r->path);
        r->options[r->num_options++] = option;
    }
    return more == 0;
}

static int record_memory_(Record* r, JsonReader* json, RecordPlace place) {
    const char* key;
    int more, n = 0;
    if (!json_take(json, '{')) {
        return 0;
    }
    for (; (more = json_member(json, n ? JSON_NEXT : JSON_FIRST, &key)) > 0; n++) {
        RecordMemory kind = {NULL, 0, place};
        char* name = record_copy_(key, strlen(key));
        if (!record_number_(json, &kind.mib)) {
            free(name);
            return 0;
        }
        kind.name = name;
        r->memory = (RecordMemory*)check_grow(r->memory, r->num_memory, sizeof(kind), r->path);
        r->memory[r->num_memory++] = kind;
    }
    return more == 0;
}

// Reads a member of the line of a start.
static int record_start_member_(Record* start, JsonReader* json, const char* key) {
    static const char* const texts[] = {"program", "trainer", "host", "device", "command"};
    static const char* const places[RECORD_PLACES] = {"mem_mb", "host_mem_mb", "disk_mb"};
    char** const members[] = {&start->program, &start->trainer, &start->host, &start->device,
                              &start->command};
    const int count = sizeof(texts) / sizeof(texts[0]), which = record_find_(texts, count, key),
              place = record_find_(places, RECORD_PLACES, key);
    const char* text;
    size_t bytes;
    if (which < count) {
        if (!json_text(json, &text, &bytes)) {
            return 0;
        }
        record_set_(members[which], text, bytes);
        return 1;
    }
    return place < RECORD_PLACES         ? record_memory_(start, json, (RecordPlace)place)
           : strcmp(key, "options") == 0 ? record_options_(start, json)
           : strcmp(key, "floor") == 0   ? record_number_(json, &start->floor)
                                         : json_skip(json);
}

// Takes over the members that the line of a start sets.
static void record_take_start_(Record* r, const Record* start) {
    record_forget_start_(r);
    r->options = start->options;
    r->num_options = start->num_options;
    r->memory = start->memory;
    r->num_memory = start->num_memory;
    r->program = start->program;
    r->trainer = start->trainer;
    r->host = start->host;
    r->device = start->device;
    r->command = start->command;
    r->floor = start->floor;
}

static void record_empty_start_(Record* r) {
    memset(r, 0, sizeof(*r));
    r->floor = NAN;
    char** const members[] = {&r->program, &r->trainer, &r->host, &r->device, &r->command};
    for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++) {
        *members[i] = record_copy_("", 0);
    }
}

// Reads a start of the program, which states everything again.
static int record_config_(Record* r, JsonReader* json) {
    Record start;
    const char* key;
    int more, ok = 1;
    record_empty_start_(&start);
    while (ok && (more = json_member(json, JSON_NEXT, &key)) > 0) {
        ok = record_start_member_(&start, json, key);
    }
    if (!ok || !record_line_ends_(json, more)) {
        record_forget_start_(&start);
        return 0;
    }
    const RecordEvent event = {RECORD_START, record_now_(r), {0}, record_copy_("", 0), 0};
    record_add_event_(r, event);
    record_take_start_(r, &start);
    return 1;
}

static int record_summary_(Record* r, JsonReader* json) {
    static const char* const names[] = {"floor", "tok_per_s", "peak_mb", "planned_mb"};
    double values[4];
    const char* key;
    int more;
    record_clear_(values, 4);
    while ((more = json_member(json, JSON_NEXT, &key)) > 0) {
        if (!record_take_(json, key, names, 4, values)) {
            return 0;
        }
    }
    if (!record_line_ends_(json, more)) {
        return 0;
    }
    r->floor = isfinite(values[0]) ? values[0] : r->floor;
    r->peak_mib = fmax(r->peak_mib, values[2]); // of all starts; fmax ignores a NaN
    r->planned_mib = values[3];
    if (values[1] > 0) { // 0: resumed when it was finished already (older logs)
        r->tok_per_s = values[1];
    }
    r->end = RECORD_FINISHED;
    return 1;
}

// Takes in one line. Returns 0 with json->error, and changes nothing, if it is malformed.
static int record_line_(Record* r, JsonReader* json) {
    const char *key, *kind;
    if (!json_take(json, '{')) {
        return 0;
    }
    const int more = json_member(json, JSON_FIRST, &key);
    if (more == 0 || (more > 0 && strcmp(key, "kind") != 0)) {
        return json_unexpected(json, "a line that starts with its kind");
    }
    if (more < 0) {
        return 0;
    }
    if (!json_string(json, &kind)) {
        return 0;
    }
    const int which = record_find_(record_kinds_, RECORD_NUM_KINDS_, kind);
    return strcmp(kind, "train") == 0     ? record_train_(r, json)
           : strcmp(kind, "experts") == 0 ? record_experts_(r, json)
           : strcmp(kind, "summary") == 0 ? record_summary_(r, json)
           : which == RECORD_START        ? record_config_(r, json)
           : which < RECORD_NUM_KINDS_    ? record_event_(r, (RecordKind)which, json)
                                          : 1;
}

// ---- the whole log ----

int record_names_file(const char* run) {
    struct stat info;
    return stat(run, &info) == 0 && !S_ISDIR(info.st_mode);
}

static void record_find_log_(Record* r, const char* run) {
    file_path(r->name, "%s", run);
    for (size_t end = strlen(r->name); end > 1 && r->name[end - 1] == '/'; end--) {
        r->name[end - 1] = '\0';
    }
    if (record_names_file(run)) {
        file_path(r->path, "%s", run);
    } else {
        file_join(r->path, r->name, "log.jsonl");
        CHECK(access(run, F_OK) == 0, "%s: %s; wanted the directory of a run, or its log.jsonl", run,
              strerror(errno));
    }
}

// Keeps the end of a line, by which record_is_as_read_ recognizes it.
static void record_keep_tail_(RecordFollower* f, const char* line, size_t length) {
    f->tail_bytes = length < RECORD_TAIL_ ? length : RECORD_TAIL_;
    memcpy(f->tail, line + length - f->tail_bytes, f->tail_bytes);
}

// Reads all complete lines that follow those read so far.
static void record_read_lines_(RecordFollower* f) {
    Record* r = &f->record;
    char error[ERROR_BYTES], *line = NULL;
    size_t room = 0, length;
    fseeko(f->file, (off_t)f->bytes, SEEK_SET);
    while ((length = file_read_line(f->file, r->path, &line, &room)) > 0 && line[length - 1] == '\n') {
        JsonReader json = json_reader(r->path, line, length, error);
        json.first = f->bytes;
        record_keep_tail_(f, line, length); // before the reader decodes its strings in place
        f->lines++;
        if (!record_line_(r, &json) && r->num_damaged++ == 0) {
            snprintf(f->fault, sizeof(f->fault), "%s (line %ld of the log)", error, f->lines);
        }
        f->bytes += length;
    }
    free(line);
}

// Scales utilization to the largest peak of each start: a peak measured on a busy machine rises
// during a run.
static void record_level_mfu_(Record* r) {
    double peak = NAN;
    size_t event = r->num_events;
    for (size_t i = r->num_steps; i > 0; i--) {
        double* values = r->steps[i - 1].values;
        for (; event > 0 && r->events[event - 1].step >= r->steps[i - 1].step; event--) {
            // the step belongs to an earlier start
            peak = r->events[event - 1].kind == RECORD_START ? NAN : peak;
        }
        peak = fmax(peak, values[RECORD_PEAK]);
        values[RECORD_MFU] *= isfinite(values[RECORD_PEAK]) ? values[RECORD_PEAK] / peak : 1;
    }
}

// Opens the log of a run, of which nothing is read yet. Returns 0 with the reason in `error` if it
// cannot be read.
static int record_open_(RecordFollower* f, const char* run, char* error) {
    Record* r = &f->record;
    memset(f, 0, sizeof(*f));
    record_empty_start_(r);
    record_find_log_(r, run);
    r->peak_mib = r->planned_mib = r->tok_per_s = NAN;
    const int fd = file_open_regular(r->path, error);
    f->file = fd >= 0 ? fdopen(fd, "r") : NULL;
    return f->file != NULL;
}

void record_follow(RecordFollower* f, const char* run) {
    char error[ERROR_BYTES];
    CHECK(record_open_(f, run, error), "%s", error);
    record_read_lines_(f);
}

// True if the log is still the open file, and the lines that were read are still in it.
static int record_is_as_read_(const RecordFollower* f) {
    char tail[RECORD_TAIL_];
    struct stat now, open;
    const int fd = fileno(f->file);
    const size_t n = f->tail_bytes;
    return stat(f->record.path, &now) == 0 && fstat(fd, &open) == 0 && now.st_ino == open.st_ino &&
           now.st_dev == open.st_dev && pread(fd, tail, n, (off_t)(f->bytes - n)) == (ssize_t)n &&
           memcmp(tail, f->tail, n) == 0;
}

int record_follow_on(RecordFollower* f) {
    const long lines = f->lines;
    if (!record_is_as_read_(f)) {
        char error[ERROR_BYTES];
        RecordFollower again;
        if (access(f->record.path, R_OK) != 0 || !record_open_(&again, f->record.name, error)) {
            return 0;
        }
        record_follow_end(f);
        *f = again;
        record_read_lines_(f);
        return 1;
    }
    record_read_lines_(f);
    return f->lines > lines;
}

void record_follow_end(RecordFollower* f) {
    fclose(f->file);
    record_close(&f->record);
}

void record_read(Record* record, const char* run) {
    RecordFollower* f = (RecordFollower*)check_alloc(1, sizeof(*f), "log");
    record_follow(f, run);
    fclose(f->file);
    *record = f->record;
    CHECK(record->num_steps > 0 || record->num_damaged == 0, "%s", f->fault);
    CHECK(record->num_steps > 0, "%s: no update is logged yet", record->path);
    record_level_mfu_(record);
    if (record->num_damaged > 0) {
        fprintf(stderr, "warning: %s; skipped %zu damaged line%s\n", f->fault, record->num_damaged,
                words_s(record->num_damaged));
    }
    free(f);
}

void record_close(Record* record) {
    for (size_t i = 0; i < record->num_events; i++) {
        free(record->events[i].text);
    }
    for (size_t i = 0; i < record->num_steps; i++) {
        free(record->steps[i].sources);
    }
    for (int i = 0; i < record->num_sources; i++) {
        free(record->sources[i]);
    }
    free(record->sources);
    free(record->loads.load);
    free(record->steps);
    free(record->events);
    record_forget_start_(record);
    memset(record, 0, sizeof(*record));
}

// ---- lists of runs ----

// Copies up to the next comma without a backslash. Returns its position, or the end.
static const char* record_part_(char path[PATH_MAX], const char* list, const char* option) {
    size_t used = 0;
    for (; *list && *list != ','; list++) {
        list += list[0] == '\\' && list[1] == ',';
        if (used + 1 >= PATH_MAX) {
            die_usage("--%s: the name of a run is too long", option);
        }
        path[used++] = *list;
    }
    path[used] = '\0';
    return list;
}

// Runs of a list so far.
typedef struct {
    char (*paths)[PATH_MAX];
    int count;
    const char *list, *option;
} RecordList_;

static void record_list_add_(RecordList_* l, const char* path) {
    if (!path[0]) {
        die_usage("--%s is '%s'; wanted runs, with a comma between two", l->option, l->list);
    }
    if (l->count == RECORD_RUNS) {
        die_usage("--%s has more than %d runs; wanted 1 to %d", l->option, RECORD_RUNS, RECORD_RUNS);
    }
    for (int i = 0; i < l->count; i++) {
        if (strcmp(l->paths[i], path) == 0) {
            die_usage("--%s names %s twice", l->option, path);
        }
    }
    snprintf(l->paths[l->count++], PATH_MAX, "%s", path);
}

// True if this is a log, or a directory with one: a pattern also matches other files.
static int record_is_run_(const char* path) {
    char log[PATH_MAX];
    if (record_names_file(path)) {
        return file_ends_in(path, ".jsonl");
    }
    file_join(log, path, "log.jsonl");
    return access(log, F_OK) == 0;
}

static void record_list_add_part_(RecordList_* l, const char* part) {
    glob_t found;
    int runs = 0;
    if (access(part, F_OK) == 0 || !strpbrk(part, "*?[") || glob(part, 0, NULL, &found) != 0) {
        record_list_add_(l, part);
        return;
    }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        if (record_is_run_(found.gl_pathv[i])) {
            record_list_add_(l, found.gl_pathv[i]);
            runs++;
        }
    }
    globfree(&found);
    CHECK(runs > 0, "--%s %s: it matches no run; wanted directories with a log.jsonl", l->option, part);
}

int record_split(char paths[RECORD_RUNS][PATH_MAX], const char* list, const char* option) {
    RecordList_ l = {paths, 0, list, option};
    char part[PATH_MAX];
    for (const char* at = list;; at++) {
        at = record_part_(part, at, option);
        record_list_add_part_(&l, part);
        if (!*at) {
            return l.count;
        }
    }
}

// ---- questions ----

size_t record_common_directories(const Record* runs, int count) {
    size_t common = 0;
    for (size_t at = 0; count > 1 && runs[0].name[at]; at++) {
        int is_same = 1;
        for (int i = 1; i < count; i++) {
            is_same &= strncmp(runs[i].name, runs[0].name, at + 1) == 0;
        }
        common = is_same && runs[0].name[at] == '/' ? at + 1 : common;
    }
    return common;
}

const RecordEvent* record_first(const Record* record, RecordKind kind) {
    for (size_t i = 0; i < record->num_events; i++) {
        if (record->events[i].kind == kind) {
            return &record->events[i];
        }
    }
    return NULL;
}

const RecordEvent* record_last(const Record* record, RecordKind kind) {
    for (size_t i = record->num_events; i > 0; i--) {
        if (record->events[i - 1].kind == kind) {
            return &record->events[i - 1];
        }
    }
    return NULL;
}

const RecordEvent* record_best(const Record* record, RecordValue measure) {
    const RecordEvent* best = NULL;
    for (size_t i = 0; i < record->num_events; i++) {
        const RecordEvent* event = &record->events[i];
        if (event->kind == RECORD_VAL && isfinite(event->values[measure]) &&
            (!best || event->values[measure] < best->values[measure])) {
            best = event;
        }
    }
    return best;
}

double record_place(const Record* record, RecordSeries series, double step) {
    size_t low = 0, high = record->num_steps; // index of the first update after `step`
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (record->steps[middle].step <= step) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low ? record->steps[low - 1].values[series] : 0;
}

double record_source_loss(const RecordStep* step, int source) {
    return source < step->num_sources ? step->sources[source] : NAN;
}

const char* record_option(const Record* record, const char* name) {
    for (size_t i = 0; i < record->num_options; i++) {
        if (strcmp(record->options[i].name, name) == 0) {
            return record->options[i].value;
        }
    }
    return NULL;
}

static int record_compare_(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

double record_tok_per_s(const Record* record) {
    enum { RECENT = 1000 };
    double speeds[RECENT];
    int count = 0;
    if (isfinite(record->tok_per_s)) {
        return record->tok_per_s;
    }
    for (size_t i = record->num_steps; i > 0 && count < RECENT; i--) {
        const double speed = record->steps[i - 1].values[RECORD_TOK_PER_S];
        if (isfinite(speed)) {
            speeds[count++] = speed;
        }
    }
    qsort(speeds, (size_t)count, sizeof(double), record_compare_);
    return count ? speeds[count / 2] : NAN;
}

#endif // LOG_READER_IMPLEMENTATION

#endif
