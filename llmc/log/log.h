/*
log.h -- everything a run prints: to the screen, to log.jsonl and main.log in the directory of the
run, and at its end the loss curve to curve.svg there.

log.jsonl, one object per line (numbers that are not finite are null; losses have 9 significant
digits; a byte of a path or option that is not UTF-8 is \udcNN, json.h):

    {"kind":"config","run":"16 hexadecimal digits","options":{...},"command":...,"program":...,
     "trainer":...,"host":...,"device":...,"floor":...,"mem_mb":{"parameters":...},
     "host_mem_mb":{...},"disk_mb":{...},"time":...}  (the command as it was typed, for a shell)
    {"kind":"train","step":1,"loss":...,"kl":...,"norm":...,"lr":...,"ms":...,"data_ms":...,
     "tok_per_s":...,"mfu":...,"peak":...,"expert_load":...,"router_entropy":...,
     "source_loss":{"web":...},"power_w":...,"clock_mhz":...,"tokens":...,"elapsed_s":...,
     "time":...}  (the mean loss of each source of a mixture that has targets in the update)
    {"kind":"experts","step":1,"load":[[...],...]}  (of each layer the load of each expert in the
     update, 1 if all are even; after each hundredth of the run)
    {"kind":"val","step":0,"loss":...,"bpb":...,"sequences":...,"all_sequences":...}  (bits per
     byte, if the bytes of the tokens are known; sequences of the validation, and of all its data)
    {"kind":"set","step":0,"name":"web","loss":...,"bpb":...,"sequences":...,"all_sequences":...}
     (of each validation set with a name; the line "val" is about the first one)
    {"kind":"source","step":...,"name":...,"share":...,"tokens":...,"epochs":...}  (after a
     validation, of each source of a mixture: its part of the sequences so far)
    {"kind":"task","step":...,"name":...,"acc":...,"acc_err":...,"acc_norm":...,"acc_norm_err":...,
     "acc_bytes":...,"acc_bytes_err":...,"loss":...,"ppl":...,"bpb":...,"tokens":...}
     (eval_tasks.h; only what the task has)
    {"kind":"sample","step":...,"text":"..."}
    {"kind":"save","step":...,"path":"..."}
    {"kind":"skip","step":...,"reason":"...","where":"..."}  (and which data it had)
    {"kind":"warning","step":...,"text":"..."}
    {"kind":"rollback","step":...,"from":...,"reason":"..."}
    {"kind":"stop","step":...,"reason":"..."}
    {"kind":"summary","steps":...,"val_loss":...,"best_val_loss":...,"best_step":...,"floor":...,
     "elapsed_s":...,"tok_per_s":...,"samples_per_s":...,"data_s":...,"planned_mb":...,
     "peak_mb":...}  (memory in MiB; no speed without updates)

kl is the divergence from the teacher, in runs with one; mfu is a share of peak, in FLOP/s; tokens
counts all updates so far; elapsed_s is the time of the run, including validations, summed over all
starts of the program; time is Unix time in seconds. expert_load and router_entropy are those of a
model with experts (log_routing). power_w and clock_mhz are a GPU's, once a second; floor is present
if it is known, host_mem_mb if a
run on another device has large allocations here. Readers ignore kinds and keys that they do not
know.

With --tensorboard on, all numbers of the lines of training, validations, sources and tasks also go
to tensorboard.h's file, each under the tag KIND/KEY (task/NAME/KEY, set/NAME/KEY, source/NAME/KEY,
train/source_loss/NAME, gpu/power_w, gpu/clock_mhz), the load of each layer's busiest expert
(experts/layer_0), and samples as texts.

main.log has the lines of llm.c, so that its plotting scripts work: s:<step> trl:<train loss> lr:<>
norm:<> and s:<step> tel:<val loss>, and s:<step> eval:<acc_norm> of a task that has one.

Steps count from 1; step 0 is before the first update. Every line reaches its file before the next
step, or the program ends with the name of the file. A new run renames the logs of an earlier one in
the same directory to log.jsonl.1, main.log.1, curve.svg.1 and tensorboard.1, or the next free
number. A run that resumes after N updates keeps the lines up to step N, cuts off the rest
(and the line that says why it stopped), and does not repeat lines about step N: the log of an
interrupted run equals that of an uninterrupted one, except for one more config line. A rollback
does the same: it cuts off the lines after the checkpoint and adds one that says from which step it
came.

On a terminal the line of a step is overwritten by the next one. It is cut to the terminal's width,
the less important numbers first. Steps of 100 ms or more leave a line at each hundredth of the run,
those of 10 s or more leave every line. Elsewhere, a step is printed at each hundredth of the run,
if half a second has passed since the last one printed, and after half a minute without one; steps
of 10 s or more are all printed. With --log-every N exactly the multiples of N are printed,
everywhere and in main.log. The first and the last step always are. If the screen goes away (|
head), a run with files continues without it. A quiet run prints only results: of tasks, skipped
updates, warnings, why it stopped, and the summary.
*/
#ifndef LLMC_LOG_H
#define LLMC_LOG_H

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/eval_tasks.h"
#include "llmc/data/mixture.h"
#include "llmc/log/log_files.h"
#include "llmc/log/tensorboard.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LOG_BINS_ = 512,
    LOG_CURVE_COLUMNS_ = 79,
    LOG_CURVE_ROWS_ = 20,
    LOG_TEXT_COLUMNS_ = 100,
    LOG_SILENCE_S_ = 30
};

typedef enum { LOG_NEW, LOG_CONTINUE } LogStart; // LOG_CONTINUE: the files belong to this run

typedef struct {
    const char* out_dir; // created, with its parents; "" writes no files
    LogStart start;
    // updates done before this start of the program; updates of the whole run
    int64_t start_step, steps;
    int64_t step_tokens; // tokens per update, until log_tokens sets others
    int eval_every;      // steps between validations, 0: none
    FILE* screen;        // usually stdout; NULL prints nothing, on all ranks but one
    int tensorboard;     // also writes for TensorBoard, if the run has files
    uint64_t run;        // identity of the run, as in its checkpoints; 0: unknown
    // steps between printed steps on the screen and in main.log; 0: by time, and all in main.log
    int every;
    int is_quiet; // prints only results
} LogSettings;

// Losses of a mixture in an update, by source.
typedef struct {
    const DataSources* sources;     // NULL: no mixture
    const double *losses, *targets; // (sources) sums
} LogMixture;

typedef enum {
    LOG_VAL_,
    LOG_SET_,
    LOG_SOURCE_,
    LOG_TASK_,
    LOG_SAMPLE_,
    LOG_SAVE_,
    LOG_WARNING_,
    LOG_KINDS_
} LogKind_; // kinds of lines between two updates

// Text on the terminal without a line break yet.
typedef enum { LOG_LINE_NONE_, LOG_LINE_STEP_, LOG_LINE_PROGRESS_ } LogLine_;

// Losses of neighboring steps, kept for the curve.
typedef struct {
    double steps, losses; // sums
    int64_t count;
} LogBin;

typedef struct {
    int64_t start_step, steps; // as in the settings
    uint64_t run;
    // tokens of an update; of all updates so far and of those left (0: all updates are alike)
    double step_tokens, tokens, left_tokens;
    int eval_every;
    LogFile json, text, screen;
    LogFile nothing; // discards what a quiet run does not print; no file: the run is not quiet
    int every;       // steps between printed steps; 0: by time
    TensorBoard board;
    char tag[128]; // of the current line: the part before a key

    int is_terminal;          // the screen is a terminal
    char line[256];           // the last step, printed or still to be printed
    LogLine_ open_line;       // text that may be overwritten
    int64_t kept_step;        // last step whose line stayed on the terminal
    double shown_s;           // time when a step was last shown
    int repeated[LOG_KINDS_]; // lines about start_step that the files had before

    double open_s, elapsed_s; // time when the log was opened, and the run's time until then
    // start of the validation of the current set (0: none); duration of the last one, of all sets
    double val_start_s, val_s;
    double val_s_sum;  // and of all since the first step
    double progress_s; // time when progress was last shown

    int64_t timed; // steps timed so far
    // their time without evaluation and the like: sum, and exponential average
    double total_ms, smooth_ms, timed_tokens;
    double first_ms, first_s;   // time of the first of them, and when it ended
    double data_wait_s, data_s; // time spent waiting for data so far, and up to the previous step
    double peak;                // for the next lines; NAN: unknown
    double load, entropy;       // of the update's experts; no load: it has none
    LogMixture mixture;         // for the next line; no sources: none
    double divergence;          // for the next line; NAN: none
    double power_w, clock_mhz;  // for the next line; NAN: not measured

    LogBin train[LOG_BINS_], val[LOG_BINS_];
} RunLog;

// ---- files ----

// Flushes everything logged so far to the disk, before a checkpoint vouches for it.
void log_sync(RunLog* log);

// ---- opening and closing ----

void log_open(RunLog* log, const LogSettings* o);

void log_close(RunLog* log);

// ---- parts of lines ----

// Sets text (64 bytes) to "45s", "12m10s", "3h05m" or "2d04h". Returns it.
char* log_duration(double seconds, char* text);

// ---- a step ----

// Sets the time that the run has waited for its data since it started. Call it before log_train.
static inline void log_data_wait(RunLog* log, double seconds) { log->data_wait_s = seconds; }

// Sets the tokens of an update, of all updates up to it, and of all that are left. Call it before
// log_train.
void log_tokens(RunLog* log, double step_tokens, double tokens, double left_tokens);

// Sets the load of the busiest expert, 1 if all are even, and the mean entropy of the routers in
// nats (router.h); a load of 0: no experts. Call it before log_train.
static inline void log_routing(RunLog* log, double load, double entropy) {
    log->load = load;
    log->entropy = entropy;
}

// Sets the losses of the sources of a mixture. Call it before log_train.
static inline void log_mixture(RunLog* log, LogMixture mixture) { log->mixture = mixture; }

// Sets the peak for the utilization, in FLOP/s. Call it before log_train.
static inline void log_peak(RunLog* log, double peak) { log->peak = peak; }

// Sets the mean divergence from the teacher, in nats; NAN: none. Call it before log_train.
static inline void log_divergence(RunLog* log, double divergence) { log->divergence = divergence; }

// Sets what the device reports; NAN: unknown. Call it before log_train.
static inline void log_sensors(RunLog* log, double power_w, double clock_mhz) {
    log->power_w = power_w;
    log->clock_mhz = clock_mhz;
}

// Logs update `step`: the mean loss of its batch, the norm of its gradient before clipping, both
// with their z-scores, the learning rate, its time without evaluation and the like, and the model
// flops utilization as a fraction. NAN: unknown score or utilization.
void log_train(RunLog* log, int64_t step, double loss, double loss_z, double norm, double norm_z, double lr,
               double ms, double mfu);

// Logs the loads of the experts in update `step`, if it ends a hundredth of the run. `tokens` of
// the model's L layers (L, stride) start with the tokens that each of E experts was given.
void log_experts(RunLog* log, int64_t step, const double* tokens, int L, int E, int stride);

// ---- the other lines ----

// Prints one JSON object, without a newline.
typedef void (*LogPrint)(FILE* file, const void* what);

// Identity of the run: which program runs where, in words, and what is known before the first step.
typedef struct {
    const char *program, *trainer, *device; // the program with its version
    const char* command;                    // as it was typed, for a shell
    double floor;                           // as for log_summary
    // prints members of an object, each after a comma; NULL: none
    LogPrint print_memory;
    const void* memory; // argument of print_memory
} LogIdentity;

// Logs the options of the run, printed by print(file, what). The first call.
void log_config(RunLog* log, LogPrint print, const void* what, LogIdentity identity);

// Shows that part i of n (from 0) of something slow, a validation for example, is about to start.
// On a terminal at once, elsewhere every half minute.
void log_progress(RunLog* log, int64_t step, const char* what, int64_t i, int64_t n);

// Result of a validation.
typedef struct {
    const char* name;                 // of the set; NULL: it has none
    int is_first;                     // the first set, whose loss is the run's
    double loss, bpb;                 // nats per token; bits per byte, NAN: unknown
    int64_t sequences, all_sequences; // sequences covered, and all sequences of the validation data
} LogVal;

void log_val(RunLog* log, int64_t step, const LogVal* val);

// Logs what each source of a mixture has given before this sequence of the run.
void log_sources(RunLog* log, int64_t step, const DataSources* sources, uint64_t sequence);

// Logs the model's result at a task.
void log_task(RunLog* log, int64_t step, const char* name, const TaskScore* score);

// Logs a sample of `bytes` bytes.
void log_sample(RunLog* log, int64_t step, const char* text, size_t bytes);

void log_save(RunLog* log, int64_t step, const char* path);

// Prints a note on the screen only.
void log_note(RunLog* log, const char* text);

// Logs that something is wrong with the run after update `step`.
void log_warning(RunLog* log, int64_t step, const char* text);

// Logs that the run continues from this checkpoint of its own. Repeats the checkpoint's line if it
// was cut off, because it came after the next update.
void log_resumed(RunLog* log, const char* path);

// Logs that update `step` was skipped, and where its data are ("": unknown).
void log_skip(RunLog* log, int64_t step, const char* reason, const char* where);

// Logs that the run was rolled back after update `from` to the checkpoint of step `to`.
void log_rollback(RunLog* log, int64_t from, int64_t to, const char* reason);

// Logs that the run stops after update `step`, before its end; prints `advice` on the screen.
void log_stop(RunLog* log, int64_t step, const char* reason, const char* advice);

// ---- the end ----

// Returns the training speed of this process, without evaluation, samples and checkpoints.
double log_tok_per_s(const RunLog* log);

// Returns the peak memory of this process, in MiB.
double log_peak_mib(void);

// Result of a run.
typedef struct {
    int64_t steps;
    double val_loss, best_val_loss; // last and lowest; NAN: never evaluated
    int64_t best_step;              // step of the lowest
    double floor;                   // entropy of the text; NAN: unknown
    int seq_len;                    // tokens per training sequence
    double planned_mib, peak_mib;   // memory: log_peak_mib() or the GPU's
} LogSummary;

// Draws the loss curve and prints the summary.
void log_summary(RunLog* log, LogSummary end);

#ifdef __cplusplus
}
#endif

#ifdef LOG_IMPLEMENTATION

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/printable.h"
#include "llmc/base/terminal.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/enum_words.h"
#include "llmc/log/curve_terminal.h"
#include "llmc/log/curve_svg.h"
#include "llmc/log/text_wrap.h"

// ---- files ----

// Ends a line on the screen. If the screen has gone away, a run whose files have everything
// continues without it.
static void log_flush_screen_(RunLog* log) {
    if (log_file_try_flush(&log->screen)) {
        return;
    }
    CHECK(!log_file_is_none(&log->json), "%s: cannot write: %s", log->screen.path, strerror(errno));
    printable_line(stderr, "warning: %s: cannot write: %s; the run continues, see %s", log->screen.path,
                   strerror(errno), log->json.path);
    log_file_open_none(&log->screen);
    log->is_terminal = 0;
}

// Returns where everything but results is printed.
static FILE* log_details_(const RunLog* log) {
    return log->nothing.file ? log->nothing.file : log->screen.file;
}

void log_sync(RunLog* log) {
    log_file_sync(&log->json);
    log_file_sync(&log->text);
    tensorboard_sync(&log->board);
}

static void log_close_file_(LogFile* file) {
    CHECK(fclose(file->file) == 0, "%s: cannot write: %s", file->path, strerror(errno));
}

// ---- history ----

static void log_remember_(const RunLog* log, LogBin* bins, int64_t step, double loss) {
    if (isfinite(loss) && step >= 0 && step <= log->steps) {
        LogBin* bin = &bins[log->steps ? step * (LOG_BINS_ - 1) / log->steps : 0];
        bin->steps += (double)step;
        bin->losses += loss;
        bin->count++;
    }
}

// Sets points (LOG_BINS_) to the averages of the bins that are not empty. Returns how many.
static int log_recall_(const LogBin* bins, CurvePoint* points) {
    int n = 0;
    for (int i = 0; i < LOG_BINS_; i++) {
        if (bins[i].count) {
            points[n].step = bins[i].steps / (double)bins[i].count;
            points[n++].loss = bins[i].losses / (double)bins[i].count;
        }
    }
    return n;
}

// ---- resuming ----

// Returns the kind of a line between two updates, or LOG_KINDS_.
static LogKind_ log_kind_(const char* kind) {
    static const char* const kinds[LOG_KINDS_] = {"val",    "set",  "source", "task",
                                                  "sample", "save", "warning"};
    int i = 0;
    while (i < LOG_KINDS_ && strcmp(kind, kinds[i]) != 0) {
        i++;
    }
    return (LogKind_)i;
}

// True if the files of a resumed run already have this line: the last step before the interruption
// is visited again. Each of their lines is skipped once.
static int log_is_repeated_(RunLog* log, LogKind_ kind, int64_t step) {
    return step == log->start_step && log->repeated[kind] > 0 && log->repeated[kind]--;
}

// Returns the number after `key` in a line of JSON, NAN if absent.
static double log_number_in_(const char* line, const char* key) {
    double value = NAN;
    const char* at = strstr(line, key);
    return at && sscanf(at + strlen(key), "%lf", &value) == 1 ? value : NAN;
}

// Takes in a line of an older log. Returns its step, or -1 if it has none, or says why the run
// stopped.
static int64_t log_reread_line_(RunLog* log, const char* line) {
    char kind[16] = "";
    long long step = -1;
    if (sscanf(line, "s:%lld", &step) == 1) { // main.log
        return step;
    }
    if (sscanf(line, "{\"kind\":\"%15[a-z]\",\"step\":%lld", kind, &step) < 2 || step > log->start_step) {
        return step;
    }
    const LogKind_ known = log_kind_(kind);
    if (known < LOG_KINDS_ && step == log->start_step) {
        log->repeated[known]++;
    }
    if (strcmp(kind, "train") == 0 || known == LOG_VAL_) {
        log_remember_(log, known == LOG_VAL_ ? log->val : log->train, step,
                      log_number_in_(line, "\"loss\":"));
    }
    const double elapsed_s = log_number_in_(line, "\"elapsed_s\":");
    log->elapsed_s = strcmp(kind, "train") == 0 && isfinite(elapsed_s) ? elapsed_s : log->elapsed_s;
    return strcmp(kind, "stop") == 0 ? -1 : step;
}

// True if a line was not written here: neither JSON nor a line of main.log. A power failure leaves
// zeros, or half a line.
static int log_is_damaged_(char* line, size_t length) {
    char error[ERROR_BYTES];
    JsonReader json = json_reader("", line, length, error);
    return strncmp(line, "s:", 2) == 0 ? memchr(line, '\0', length) != NULL
                                       : !(json_skip(&json) && json_end(&json));
}

// Opens an older log for reading; NULL if it does not exist. Ends the program if it cannot be read:
// it may not be empty.
static FILE* log_reopen_(const char* path) {
    char error[ERROR_BYTES];
    struct stat info;
    if (stat(path, &info) != 0 && errno == ENOENT) {
        return NULL;
    }
    const int fd = file_open_regular(path, error);
    CHECK(fd >= 0, "%s", error);
    FILE* file = fdopen(fd, "r");
    CHECK(file, "%s: cannot read: %s", path, strerror(errno));
    return file;
}

// Returns the bytes of an older log up to its last line about a step before the resumed run starts.
// Ends the program if it cannot be read that far: a log is never cut blindly.
static off_t log_reread_(RunLog* log, const char* path) {
    FILE* file = log_reopen_(path);
    char* line = NULL;
    size_t room = 0, length, damaged = 0, number = 0, first = 0;
    off_t read = 0, keep = 0;
    while (file && (length = file_read_line(file, path, &line, &room)) > 0 && line[length - 1] == '\n') {
        const int64_t step = log_reread_line_(log, line);
        if (step > log->start_step) {
            break;
        }
        number++;
        if (log_is_damaged_(line, length) && damaged++ == 0) {
            first = number;
        }
        read += (off_t)length;
        keep = step >= 0 ? read : keep;
    }
    free(line);
    if (damaged > 0) {
        printable_line(
            stderr, "warning: %s: %zu damaged line%s, the first is line %zu; the run continues without them",
            path, damaged, words_s((double)damaged), first);
    }
    if (file) {
        fclose(file);
    }
    return keep;
}

// Opens the files again, cut to the lines before start_step. Reads both before it cuts either.
static void log_cut_(RunLog* log) {
    const off_t json = log_reread_(log, log->json.path), text = log_reread_(log, log->text.path);
    log_file_open(&log->json, json);
    log_file_open(&log->text, text);
}

// Opens the files: empty for a new run, cut to the earlier lines for one that continues.
static void log_open_files_(RunLog* log, const LogSettings* o) {
    log_file_path(log->json.path, o->out_dir, LOG_JSON, 0);
    log_file_path(log->text.path, o->out_dir, LOG_TEXT, 0);
    if (o->start == LOG_CONTINUE) {
        log_cut_(log);
    } else {
        log_file_open(&log->json, 0);
        log_file_open(&log->text, 0);
    }
}

// ---- opening and closing ----

void log_open(RunLog* log, const LogSettings* o) {
    memset(log, 0, sizeof(*log));
    log->start_step = log->kept_step = o->start_step;
    log->steps = o->steps;
    log->run = o->run;
    log->step_tokens = (double)o->step_tokens;
    log->eval_every = o->eval_every;
    log->open_s = time_now_s();
    log->peak = log->divergence = log->power_w = log->clock_mhz = NAN;
    if (o->out_dir[0]) {
        file_make_directory(o->out_dir);
        if (o->start == LOG_NEW) {
            log_files_put_aside(o->out_dir);
        } else {
            log_files_take(o->out_dir, o->run);
        }
        log_open_files_(log, o);
        if (o->tensorboard) {
            char path[PATH_MAX];
            log_file_path(path, o->out_dir, LOG_BOARD, 0);
            tensorboard_open(&log->board, path, o->start_step);
        }
    } else {
        log_file_open_none(&log->json);
        log_file_open_none(&log->text);
    }
    strcpy(log->screen.path, "standard output");
    log->screen.file = o->screen;
    if (!o->screen) {
        log_file_open_none(&log->screen);
    }
    if (o->is_quiet) {
        log_file_open_none(&log->nothing);
    }
    log->every = o->every;
    log->is_terminal = o->screen && !o->is_quiet && terminal_rewrites(fileno(o->screen));
}

// Returns the columns of the terminal; 0 if unknown.
static int log_columns_(const RunLog* log) {
    return log->is_terminal ? (int)text_wrap_columns(log->screen.file) : 0;
}

// Leaves the line of the last step on the terminal, so that the next output gets its own line.
static void log_end_line_(RunLog* log) {
    if (log->open_line != LOG_LINE_NONE_) {
        fputs("\r\033[K", log->screen.file);
    }
    if (log->open_line == LOG_LINE_STEP_) {
        fprintf(log->screen.file, "%s\n", log->line);
    }
    log->open_line = LOG_LINE_NONE_;
}

void log_close(RunLog* log) {
    log_end_line_(log);
    log_flush_screen_(log);
    log_close_file_(&log->json);
    log_close_file_(&log->text);
    tensorboard_close(&log->board);
    if (log_file_is_none(&log->screen)) {
        fclose(log->screen.file);
    }
    if (log->nothing.file) {
        fclose(log->nothing.file);
    }
    memset(log, 0, sizeof(*log));
}

// ---- parts of lines ----

// True for kinds of lines whose numbers and texts also go to TensorBoard.
static int log_is_for_board_(const char* kind) {
    static const char* const kinds[] = {"train", "val", "set", "source", "task", "sample"};
    int is_one = 0;
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        is_one |= strcmp(kind, kinds[i]) == 0;
    }
    return is_one;
}

static void log_begin_(RunLog* log, const char* kind, int64_t step) {
    fprintf(log->json.file, "{\"kind\":\"%s\",\"step\":%lld", kind, (long long)step);
    snprintf(log->tag, sizeof(log->tag), "%s", log_is_for_board_(kind) ? kind : "");
    tensorboard_begin(&log->board, step);
}

static void log_number_(RunLog* log, const char* key, double value) {
    fprintf(log->json.file, isfinite(value) ? ",\"%s\":%.9g" : ",\"%s\":null", key, value);
    if (log->tag[0]) {
        char tag[sizeof(log->tag) + 32];
        snprintf(tag, sizeof(tag), "%s/%.30s", log->tag, key);
        tensorboard_scalar(&log->board, tag, value);
    }
}

// Writes a number of the GPU, if it was measured.
static void log_gpu_number_(RunLog* log, const char* key, double* value) {
    char tag[64];
    if (isfinite(*value)) {
        fprintf(log->json.file, ",\"%s\":%.9g", key, *value);
        snprintf(tag, sizeof(tag), "gpu/%.40s", key);
        tensorboard_scalar(&log->board, tag, *value);
    }
    *value = NAN;
}

// Writes the name of a file, which may have any bytes.
static void log_path_(RunLog* log, const char* path) {
    fputs(",\"path\":", log->json.file);
    json_print_bytes(log->json.file, path, strlen(path));
}

// Writes a string. A name becomes a part of the tags of the numbers that follow.
static void log_string_(RunLog* log, const char* key, const char* text, size_t bytes) {
    fprintf(log->json.file, ",\"%s\":", key);
    json_print_string(log->json.file, text, bytes);
    if (log->tag[0] && strcmp(key, "name") == 0) {
        const size_t used = strlen(log->tag);
        snprintf(log->tag + used, sizeof(log->tag) - used, "/%.*s", (int)(bytes < 100 ? bytes : 100), text);
    } else if (log->tag[0] && strcmp(key, "text") == 0) {
        tensorboard_text(&log->board, log->tag, text, bytes);
    }
}

static void log_time_stamp_(RunLog* log) { fprintf(log->json.file, ",\"time\":%.3f", time_unix_s()); }

static void log_end_(RunLog* log) {
    fputs("}\n", log->json.file);
    log_file_flush(&log->json);
    tensorboard_end(&log->board);
    log->tag[0] = '\0';
}

// Sets text (64 bytes) to "step   12/1000", equally wide at every step. Returns it.
static char* log_step_text_(const RunLog* log, int64_t step, char* text) {
    const int width = snprintf(NULL, 0, "%lld", (long long)log->steps);
    snprintf(text, 64, "step %*lld/%lld", width, (long long)step, (long long)log->steps);
    return text;
}

char* log_duration(double seconds, char* text) {
    const long long s = seconds < 1e12 ? (long long)(seconds + 0.5) : (long long)1e12;
    if (s < 60) {
        snprintf(text, 64, "%llds", s);
    } else if (s < 3600) {
        snprintf(text, 64, "%lldm%02llds", s / 60, s % 60);
    } else if (s < 86400) {
        snprintf(text, 64, "%lldh%02lldm", s / 3600, s / 60 % 60);
    } else {
        snprintf(text, 64, "%lldd%02lldh", s / 86400, s / 3600 % 24);
    }
    return text;
}

// Starts a message on the screen, or among the details.
static void log_say_step_(RunLog* log, FILE* file, int64_t step) {
    char text[64];
    log_end_line_(log);
    fprintf(file, "%s | ", log_step_text_(log, step, text));
}

// ---- a step ----

// Averages the time of a step: the mean of the first 20, then an exponential average over about 20.
static void log_time_(RunLog* log, double ms) {
    log->timed++;
    log->total_ms += ms;
    log->timed_tokens += log->step_tokens;
    log->smooth_ms += (ms - log->smooth_ms) * fmax(1.0 / (double)log->timed, 0.05);
    if (log->timed == 1) {
        log->first_ms = ms;
        log->first_s = time_now_s();
    }
}

// Counts the validations after update `step`.
static int64_t log_validations_left_(const RunLog* log, int64_t step) {
    const int64_t every = log->eval_every;
    return every ? log->steps / every - step / every + (log->steps % every != 0 && step < log->steps) : 0;
}

// Returns the seconds left: the remaining steps at the present speed, each with its share of the
// time between steps so far (samples, checkpoints), and the remaining validations, each as long as
// the last one. Larger steps than the present one take longer in proportion.
static double log_eta_s_(const RunLog* log, int64_t step) {
    const double left = (double)(log->steps - step),
                 like_this = log->tokens > 0 ? log->left_tokens / log->step_tokens : left;
    double between_ms = 0;
    if (log->timed > 1) {
        const double wall_ms = 1e3 * (time_now_s() - log->first_s - log->val_s_sum);
        between_ms = fmax(0, wall_ms - (log->total_ms - log->first_ms)) / (double)(log->timed - 1);
    }
    return 1e-3 * (like_this * log->smooth_ms + left * between_ms) +
           (double)log_validations_left_(log, step) * log->val_s;
}

// Part of the line of a step. On a narrow terminal the highest ranks are dropped first.
typedef struct {
    int rank;
    char text[64];
} LogField_;
enum { LOG_FIELDS_ = 12, LOG_RANKS_ = 7 };

__attribute__((format(printf, 3, 4))) static inline void log_field_(LogField_* field, int rank,
                                                                    const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(field->text, sizeof(field->text), format, args);
    va_end(args);
    field->rank = rank;
}

// Sets log->line to as many of the fields as fit.
static void log_join_(RunLog* log, const LogField_* fields) {
    const int columns = log_columns_(log);
    for (int most = LOG_RANKS_; most >= 0; most--) {
        size_t used = 0;
        log->line[0] = '\0';
        for (int i = 0; i < LOG_FIELDS_; i++) {
            if (fields[i].rank <= most && used < sizeof(log->line)) {
                used += (size_t)snprintf(log->line + used, sizeof(log->line) - used, "%s", fields[i].text);
            }
        }
        if (columns == 0 || used < (size_t)columns) {
            return;
        }
    }
}

// Formats the line of a step, without unknown scores and utilization.
static void log_format_step_(RunLog* log, int64_t step, double loss, double loss_z, double norm,
                             double norm_z, double lr, double ms, double mfu) {
    char count[64], eta[64];
    LogField_ f[LOG_FIELDS_];
    memset(f, 0, sizeof(f));
    log_field_(&f[0], 0, "%s", log_step_text_(log, step, count));
    log_field_(&f[1], 0, " | loss %.4f", loss);
    if (isfinite(loss_z)) {
        log_field_(&f[2], 6, " (%+.2fz)", loss_z);
    }
    if (isfinite(log->divergence)) {
        log_field_(&f[3], 1, " | kl %.4f", log->divergence);
    }
    log_field_(&f[4], 3, " | norm %.4f", norm);
    if (isfinite(norm_z)) {
        log_field_(&f[5], 6, " (%+.2fz)", norm_z);
    }
    if (log->load > 0) {
        log_field_(&f[6], 5, " | load %.2f, entropy %.2f", log->load, log->entropy);
    }
    log_field_(&f[7], 4, " | lr %.2e", lr);
    log_field_(&f[8], 1, " | %.1f ms", ms);
    if (isfinite(mfu)) {
        log_field_(&f[9], 5, " | %.1f%% MFU", 100 * mfu);
    }
    log_field_(&f[10], 2, " | %.0f tok/s", 1e3 * log->step_tokens / log->smooth_ms);
    log_field_(&f[11], 0, " | eta %s", log_duration(log_eta_s_(log, step), eta));
    log_join_(log, f);
}

// True if --log-every selects a step, or if it is the first or the last.
static int log_is_due_(const RunLog* log, int64_t step) {
    return step == log->start_step + 1 || step == log->steps || (log->every && step % log->every == 0);
}

// True if a step gets a line of its own on the screen, `pause_s` after the last one: see the head
// of this file.
static int log_keeps_line_(RunLog* log, int64_t step, double pause_s) {
    const int is_hundredth = 100 * (step - log->kept_step) >= log->steps;
    const int is_slow = log->is_terminal ? log->smooth_ms >= 100 : pause_s >= 0.5;
    const int is_silent = !log->is_terminal && pause_s >= LOG_SILENCE_S_;
    const int is_kept = log_is_due_(log, step) ||
                        (!log->every && (log->smooth_ms >= 10e3 || is_silent || (is_slow && is_hundredth)));
    log->kept_step = is_kept ? step : log->kept_step;
    return is_kept;
}

// Shows the line of a step, if it is due.
static void log_show_step_(RunLog* log, int64_t step) {
    const double now_s = time_now_s(), pause_s = now_s - log->shown_s;
    const int is_kept = log_keeps_line_(log, step, pause_s);
    if (!is_kept && (log->every || !log->is_terminal || pause_s < 0.1)) {
        return;
    }
    fputs(log->open_line != LOG_LINE_NONE_ ? "\r\033[K" : "", log_details_(log));
    // no automatic margins, in case the width is unknown: a wrapped line cannot be overwritten
    fprintf(log_details_(log), is_kept ? "%s\n" : "\033[?7l%s\033[?7h", log->line);
    log->open_line = is_kept ? LOG_LINE_NONE_ : LOG_LINE_STEP_;
    log->shown_s = now_s;
    log_flush_screen_(log);
}

// A larger update takes longer in proportion.
void log_tokens(RunLog* log, double step_tokens, double tokens, double left_tokens) {
    log->smooth_ms *= step_tokens / log->step_tokens;
    log->step_tokens = step_tokens;
    log->tokens = tokens;
    log->left_tokens = left_tokens;
}

// Writes a number that only some lines have.
static void log_known_(RunLog* log, const char* key, double value) {
    if (isfinite(value)) {
        log_number_(log, key, value);
    }
}

// Writes the loss of each source that has targets in the update.
static void log_write_mixture_(RunLog* log) {
    const LogMixture* mixture = &log->mixture;
    for (int s = 0, any = 0; mixture->sources && s <= mixture->sources->count; s++) {
        if (s == mixture->sources->count) {
            fputs(any ? "}" : "", log->json.file);
        } else if (mixture->targets[s] > 0) {
            const char* name = mixture->sources->source[s].name;
            const double loss = mixture->losses[s] / mixture->targets[s];
            char tag[128];
            fputs(any++ ? "," : ",\"source_loss\":{", log->json.file);
            json_print_string(log->json.file, name, strlen(name));
            fprintf(log->json.file, isfinite(loss) ? ":%.9g" : ":null", loss);
            snprintf(tag, sizeof(tag), "train/source_loss/%.90s", name);
            tensorboard_scalar(&log->board, tag, loss);
        }
    }
    memset(&log->mixture, 0, sizeof(log->mixture));
}

void log_train(RunLog* log, int64_t step, double loss, double loss_z, double norm, double norm_z, double lr,
               double ms, double mfu) {
    log_begin_(log, "train", step);
    log_number_(log, "loss", loss);
    log_known_(log, "kl", log->divergence);
    log_number_(log, "norm", norm);
    log_number_(log, "lr", lr);
    log_number_(log, "ms", ms);
    log_number_(log, "data_ms", 1e3 * (log->data_wait_s - log->data_s));
    log_number_(log, "tok_per_s", 1e3 * log->step_tokens / ms);
    log_number_(log, "mfu", mfu);
    if (isfinite(log->peak)) {
        fprintf(log->json.file, ",\"peak\":%.4g", log->peak);
    }
    if (log->load > 0) {
        log_number_(log, "expert_load", log->load);
        log_number_(log, "router_entropy", log->entropy);
    }
    log_write_mixture_(log);
    log_gpu_number_(log, "power_w", &log->power_w);
    log_gpu_number_(log, "clock_mhz", &log->clock_mhz);
    fprintf(log->json.file, ",\"tokens\":%.0f",
            log->tokens > 0 ? log->tokens : (double)step * log->step_tokens);
    fprintf(log->json.file, ",\"elapsed_s\":%.3f", log->elapsed_s + time_now_s() - log->open_s);
    log_time_stamp_(log);
    log_end_(log);
    log->data_s = log->data_wait_s;
    if (!log->every || log_is_due_(log, step)) {
        fprintf(log->text.file, "s:%lld trl:%.4f lr:%.6f norm:%.2f\n", (long long)step, loss, lr, norm);
        log_file_flush(&log->text);
    }
    log_remember_(log, log->train, step, loss);
    log_time_(log, ms);
    log_format_step_(log, step, loss, loss_z, norm, norm_z, lr, ms, mfu);
    log_show_step_(log, step);
}

// Writes the loads of a layer's experts; an update without tokens has none.
static void log_write_loads_(RunLog* log, int l, const double* tokens, int E) {
    double all = 0, most = 0;
    char tag[32];
    for (int e = 0; e < E; e++) {
        all += tokens[e];
        most = fmax(most, tokens[e]);
    }
    for (int e = 0; e < E; e++) {
        fprintf(log->json.file, "%s%.4g", e ? "," : l ? ",[" : "[", all > 0 ? tokens[e] * E / all : 0);
    }
    fputc(']', log->json.file);
    snprintf(tag, sizeof(tag), "experts/layer_%d", l);
    tensorboard_scalar(&log->board, tag, all > 0 ? most * E / all : 0);
}

void log_experts(RunLog* log, int64_t step, const double* tokens, int L, int E, int stride) {
    const int64_t steps = log->steps > 0 ? log->steps : 1;
    if (step * 100 / steps == (step - 1) * 100 / steps) {
        return;
    }
    log_begin_(log, "experts", step);
    fputs(",\"load\":[", log->json.file);
    for (int l = 0; l < L; l++) {
        log_write_loads_(log, l, tokens + (size_t)l * (size_t)stride, E);
    }
    fputc(']', log->json.file);
    log_end_(log);
}

// ---- the other lines ----

void log_config(RunLog* log, LogPrint print, const void* what, LogIdentity identity) {
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    fputs("{\"kind\":\"config\",", log->json.file);
    if (log->run) {
        fprintf(log->json.file, "\"run\":\"%016" PRIx64 "\",", log->run);
    }
    fputs("\"options\":", log->json.file);
    print(log->json.file, what);
    if (identity.command) {
        fputs(",\"command\":", log->json.file);
        json_print_bytes(log->json.file, identity.command, strlen(identity.command));
    }
    log_string_(log, "program", identity.program, strlen(identity.program));
    log_string_(log, "trainer", identity.trainer, strlen(identity.trainer));
    log_string_(log, "host", host, strlen(host));
    log_string_(log, "device", identity.device, strlen(identity.device));
    if (isfinite(identity.floor)) {
        log_number_(log, "floor", identity.floor);
    }
    if (identity.print_memory) {
        identity.print_memory(log->json.file, identity.memory);
    }
    log_time_stamp_(log);
    log_end_(log);
}

void log_progress(RunLog* log, int64_t step, const char* what, int64_t i, int64_t n) {
    char count[64];
    const double now_s = time_now_s(), pause_s = log->is_terminal ? 0.2 : LOG_SILENCE_S_;
    if (i == 0) {
        log->val_start_s = log->progress_s = now_s;
    }
    if (now_s - log->progress_s < pause_s) {
        return;
    }
    log->progress_s = now_s;
    log_end_line_(log);
    fprintf(log_details_(log), "%s | %s %lld/%lld%s", log_step_text_(log, step, count), what, (long long)i,
            (long long)n, log->is_terminal ? "" : "\n");
    log->open_line = log->is_terminal ? LOG_LINE_PROGRESS_ : LOG_LINE_NONE_;
    log_flush_screen_(log);
}

// Measures the validation of a set, which started at its first log_progress.
static void log_time_val_(RunLog* log, int is_first) {
    if (log->val_start_s > 0) {
        const double set_s = time_now_s() - log->val_start_s;
        log->val_s = is_first ? set_s : log->val_s + set_s;
        log->val_s_sum += log->timed > 0 ? set_s : 0;
        log->val_start_s = 0;
    }
}

static void log_say_val_(RunLog* log, int64_t step, const LogVal* val) {
    FILE* screen = log_details_(log);
    log_say_step_(log, screen, step);
    fprintf(screen, val->name ? "val %s loss %.4f" : "val%s loss %.4f", val->name ? val->name : "",
            val->loss);
    if (isfinite(val->bpb)) {
        fprintf(screen, " | %.4f bpb", val->bpb);
    }
    if (val->sequences < val->all_sequences) {
        fprintf(screen, " (%lld of %lld sequences)\n", (long long)val->sequences,
                (long long)val->all_sequences);
    } else {
        fprintf(screen, " (all %lld sequences)\n", (long long)val->sequences);
    }
    log_flush_screen_(log);
}

// Writes a line of a validation; `kind` is "val", or "set" with the name of the set.
static void log_write_val_(RunLog* log, const char* kind, int64_t step, const LogVal* val) {
    log_begin_(log, kind, step);
    if (strcmp(kind, "set") == 0) {
        log_string_(log, "name", val->name, strlen(val->name));
    }
    log_number_(log, "loss", val->loss);
    log_known_(log, "bpb", val->bpb);
    fprintf(log->json.file, ",\"sequences\":%lld,\"all_sequences\":%lld", (long long)val->sequences,
            (long long)val->all_sequences);
    log_end_(log);
}

void log_val(RunLog* log, int64_t step, const LogVal* val) {
    log_time_val_(log, val->is_first);
    log_say_val_(log, step, val);
    if (val->name && !log_is_repeated_(log, LOG_SET_, step)) {
        log_write_val_(log, "set", step, val);
    }
    if (val->is_first && !log_is_repeated_(log, LOG_VAL_, step)) {
        log_write_val_(log, "val", step, val);
        fprintf(log->text.file, "s:%lld tel:%.4f\n", (long long)step, val->loss);
        log_file_flush(&log->text);
        log_remember_(log, log->val, step, val->loss);
    }
}

static void log_say_sources_(RunLog* log, int64_t step, const DataSources* sources, const SourceUse* use) {
    FILE* screen = log_details_(log);
    log_say_step_(log, screen, step);
    for (int s = 0; s < sources->count; s++) {
        fprintf(screen, "%s%s %.4g %%, %.3g epochs", s ? " | " : "", sources->source[s].name,
                100 * use[s].share, use[s].epochs);
    }
    fputc('\n', screen);
    log_flush_screen_(log);
}

void log_sources(RunLog* log, int64_t step, const DataSources* sources, uint64_t sequence) {
    SourceUse use[SOURCES_MAX];
    mixture_use(use, sources, sequence);
    log_say_sources_(log, step, sources, use);
    for (int s = 0; s < sources->count; s++) {
        const char* name = sources->source[s].name;
        if (!log_is_repeated_(log, LOG_SOURCE_, step)) {
            log_begin_(log, "source", step);
            log_string_(log, "name", name, strlen(name));
            log_number_(log, "share", use[s].share);
            log_number_(log, "tokens", use[s].tokens);
            log_number_(log, "epochs", use[s].epochs);
            log_end_(log);
        }
    }
}

static void log_share_(RunLog* log, const char* key, const char* error_key, TaskShare share) {
    log_known_(log, key, share.value);
    log_known_(log, error_key, share.error);
}

static void log_write_task_(RunLog* log, int64_t step, const char* name, const TaskScore* score) {
    log_begin_(log, "task", step);
    log_string_(log, "name", name, strlen(name));
    log_share_(log, "acc", "acc_err", score->acc);
    log_share_(log, "acc_norm", "acc_norm_err", score->acc_norm);
    log_share_(log, "acc_bytes", "acc_bytes_err", score->acc_bytes);
    if (score->kind != TASK_CHOICE) {
        log_number_(log, "loss", score->loss);
        log_number_(log, "ppl", exp(score->loss));
        log_known_(log, "bpb", score->bpb);
    }
    log_number_(log, "tokens", score->tokens);
    log_end_(log);
    if (isfinite(score->acc_norm.value)) {
        fprintf(log->text.file, "s:%lld eval:%.4f\n", (long long)step, score->acc_norm.value);
        log_file_flush(&log->text);
    }
}

// Prints " | acc 0.2859 +- 0.0045".
static void log_print_share_(FILE* screen, const char* name, TaskShare share) {
    if (isfinite(share.value)) {
        fprintf(screen, " | %s %.4f +- %.4f", name, share.value, share.error);
    }
}

void log_task(RunLog* log, int64_t step, const char* name, const TaskScore* score) {
    FILE* screen = log->screen.file;
    const int has_loss = score->kind != TASK_CHOICE, is_repeated = log_is_repeated_(log, LOG_TASK_, step);
    log_say_step_(log, log->screen.file, step);
    fputs(name, screen);
    log_print_share_(screen, "acc", score->acc);
    log_print_share_(screen, "acc_norm", score->acc_norm);
    log_print_share_(screen, "acc_bytes", score->acc_bytes);
    if (has_loss) {
        fprintf(screen, " | loss %.4f | perplexity %.4f", score->loss, exp(score->loss));
    }
    if (isfinite(score->bpb)) {
        fprintf(screen, " | %.4f bpb", score->bpb);
    }
    fprintf(screen, " | %.0f tokens\n", score->tokens);
    log_flush_screen_(log);
    if (!is_repeated) {
        log_write_task_(log, step, name, score);
    }
}

void log_sample(RunLog* log, int64_t step, const char* text, size_t bytes) {
    const int columns = log_columns_(log);
    log_say_step_(log, log_details_(log), step);
    fputs("sample:\n", log_details_(log));
    text_wrap_print(log_details_(log), text, bytes,
                    (size_t)(0 < columns && columns < LOG_TEXT_COLUMNS_ ? columns : (int)LOG_TEXT_COLUMNS_));
    log_flush_screen_(log);
    if (!log_is_repeated_(log, LOG_SAMPLE_, step)) {
        log_begin_(log, "sample", step);
        log_string_(log, "text", text, bytes);
        log_end_(log);
    }
}

void log_save(RunLog* log, int64_t step, const char* path) {
    log_say_step_(log, log_details_(log), step);
    fprintf(log_details_(log), "saved %s\n", path);
    log_flush_screen_(log);
    if (!log_is_repeated_(log, LOG_SAVE_, step)) {
        log_begin_(log, "save", step);
        log_path_(log, path);
        log_end_(log);
    }
}

void log_note(RunLog* log, const char* text) {
    log_end_line_(log);
    text_wrap_lines(log_details_(log), text);
    fputc('\n', log_details_(log));
    log_flush_screen_(log);
}

void log_warning(RunLog* log, int64_t step, const char* text) {
    log_end_line_(log);
    fprintf(log->screen.file, "warning: step %lld: ", (long long)step);
    text_wrap_lines(log->screen.file, text);
    fputc('\n', log->screen.file);
    log_flush_screen_(log);
    if (!log_is_repeated_(log, LOG_WARNING_, step)) {
        log_begin_(log, "warning", step);
        log_string_(log, "text", text, strlen(text));
        log_end_(log);
    }
}

void log_resumed(RunLog* log, const char* path) {
    if (!log_is_repeated_(log, LOG_SAVE_, log->start_step)) {
        log_begin_(log, "save", log->start_step);
        log_path_(log, path);
        log_end_(log);
    }
}

void log_skip(RunLog* log, int64_t step, const char* reason, const char* where) {
    log_say_step_(log, log->screen.file, step);
    fprintf(log->screen.file, "update skipped: %s", reason);
    if (where[0]) {
        fputs("; ", log->screen.file);
        text_wrap_lines(log->screen.file, where);
    }
    fputc('\n', log->screen.file);
    log_flush_screen_(log);
    log_begin_(log, "skip", step);
    log_string_(log, "reason", reason, strlen(reason));
    if (where[0]) {
        fputs(",\"where\":", log->json.file);
        json_print_bytes(log->json.file, where, strlen(where));
    }
    log_end_(log);
}

void log_rollback(RunLog* log, int64_t from, int64_t to, const char* reason) {
    log_say_step_(log, log->screen.file, from);
    fprintf(log->screen.file, "rolled back to step %lld: %s\n", (long long)to, reason);
    log_flush_screen_(log);
    log->start_step = to;
    memset(log->repeated, 0, sizeof(log->repeated));
    memset(log->train, 0, sizeof(log->train));
    memset(log->val, 0, sizeof(log->val));
    const double elapsed_s = log->elapsed_s; // later than the time in that step's line
    if (!log_file_is_none(&log->json)) {
        log_close_file_(&log->json);
        log_close_file_(&log->text);
        log_cut_(log);
    }
    log->elapsed_s = elapsed_s;
    tensorboard_restart(&log->board, to);
    log_begin_(log, "rollback", to);
    fprintf(log->json.file, ",\"from\":%lld", (long long)from);
    log_string_(log, "reason", reason, strlen(reason));
    log_end_(log);
}

void log_stop(RunLog* log, int64_t step, const char* reason, const char* advice) {
    log_end_line_(log);
    fprintf(log->screen.file, "stopped by %s after step %lld%s\n", reason, (long long)step, advice);
    log_flush_screen_(log);
    log_begin_(log, "stop", step);
    log_string_(log, "reason", reason, strlen(reason));
    log_end_(log);
}

// ---- the end ----

double log_tok_per_s(const RunLog* log) {
    return log->total_ms > 0 ? 1e3 * log->timed_tokens / log->total_ms : 0;
}

double log_peak_mib(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__ // bytes there, KiB elsewhere
    return (double)usage.ru_maxrss / (1 << 20);
#else
    return (double)usage.ru_maxrss / (1 << 10);
#endif
}

// Writes the curve beside log.jsonl. A failure is only noted: a run can do without the picture.
static void log_write_curve_(const RunLog* log, const CurvePoint* train, int n_train, const CurvePoint* val,
                             int n_val, double floor) {
    char path[PATH_MAX], directory[PATH_MAX], error[ERROR_BYTES];
    TextBuffer curve;
    text_buffer_open(&curve, LOG_CURVE);
    curve_svg(curve.file, train, n_train, val, n_val, floor);
    char* text = text_buffer_close(&curve);
    file_directory_of(directory, log->json.path);
    log_file_path(path, directory, LOG_CURVE, 0);
    if (!file_try_write_text(path, text, curve.bytes, error)) {
        fprintf(stderr, "warning: %s\n", error);
    }
    free(text);
}

static void log_draw_curve_(RunLog* log, double floor) {
    CurvePoint train[LOG_BINS_], val[LOG_BINS_];
    const int n_train = log_recall_(log->train, train), n_val = log_recall_(log->val, val);
    if (n_train > 1) {
        fputc('\n', log_details_(log));
        curve_draw(log_details_(log), train, n_train, val, n_val, floor, LOG_CURVE_COLUMNS_, LOG_CURVE_ROWS_);
        fputc('\n', log_details_(log));
        if (!log_file_is_none(&log->json)) {
            log_write_curve_(log, train, n_train, val, n_val, floor);
        }
    }
}

// Prints a part of the summary line.
__attribute__((format(printf, 3, 4))) static void log_part_(FILE* screen, int* parts, const char* format,
                                                            ...) {
    va_list args;
    fputs((*parts)++ ? " | " : "", screen);
    va_start(args, format);
    vfprintf(screen, format, args);
    va_end(args);
}

// Prints the result and speed of the run; without steps it has no speed.
static void log_say_summary_(RunLog* log, const LogSummary* end, double elapsed_s) {
    FILE* screen = log->screen.file;
    const double data_share = log->total_ms > 0 ? 1e3 * log->data_wait_s / log->total_ms : 0;
    char text[64];
    int parts = 0;
    if (end->steps > 0) {
        log_part_(screen, &parts, "%lld step%s", (long long)end->steps, words_s((double)end->steps));
        log_part_(screen, &parts, "%s", log_duration(elapsed_s, text));
    }
    if (isfinite(end->val_loss)) {
        log_part_(screen, &parts, "val loss %.4f", end->val_loss);
    }
    if (end->best_val_loss < end->val_loss) {
        log_part_(screen, &parts, "best %.4f at step %lld", end->best_val_loss, (long long)end->best_step);
    }
    if (isfinite(end->floor)) {
        log_part_(screen, &parts, "floor %.4f", end->floor);
    }
    if (data_share > 0.01) {
        log_part_(screen, &parts, "%.1f%% waiting for data", 100 * data_share);
    }
    if (log->timed > 0) {
        const double per_s = log_tok_per_s(log) / end->seq_len;
        log_part_(screen, &parts, "%.0f tok/s", log_tok_per_s(log));
        log_part_(screen, &parts, per_s < 10 ? "%.2f sequences/s" : "%.0f sequences/s", per_s);
    }
    log_part_(screen, &parts, "peak memory %.0f MiB, %.0f of them planned\n", end->peak_mib,
              end->planned_mib);
    log_flush_screen_(log);
}

void log_summary(RunLog* log, LogSummary end) {
    const double elapsed_s = log->elapsed_s + time_now_s() - log->open_s;
    log_end_line_(log);
    log_draw_curve_(log, end.floor);
    log_say_summary_(log, &end, elapsed_s);

    fprintf(log->json.file, "{\"kind\":\"summary\",\"steps\":%lld", (long long)end.steps);
    log_number_(log, "val_loss", end.val_loss);
    if (isfinite(end.best_val_loss)) {
        log_number_(log, "best_val_loss", end.best_val_loss);
        fprintf(log->json.file, ",\"best_step\":%lld", (long long)end.best_step);
    }
    if (isfinite(end.floor)) {
        log_number_(log, "floor", end.floor);
    }
    log_number_(log, "elapsed_s", elapsed_s);
    if (log->timed > 0) {
        log_number_(log, "tok_per_s", log_tok_per_s(log));
        log_number_(log, "samples_per_s", log_tok_per_s(log) / end.seq_len);
    }
    log_number_(log, "data_s", log->data_wait_s);
    log_number_(log, "planned_mb", end.planned_mib);
    log_number_(log, "peak_mb", end.peak_mib);
    log_end_(log);
}

#endif // LOG_IMPLEMENTATION

#endif
