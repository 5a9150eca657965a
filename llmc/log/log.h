/*
log.h -- everything a run prints: to the screen, to log.jsonl and main.log in the directory of the
run, and at its end the loss curve to curve.svg there.

log.jsonl, one object per line (numbers that are not finite are null; losses have 9 significant
digits; a byte of a path or option that is not UTF-8 is \udcNN, json.h):

    {"kind":"config","run":"16 hexadecimal digits","options":{...},"command":...,"program":...,
     "trainer":...,"host":...,"device":...,"floor":...,"mem_mb":{"parameters":...},
     "host_mem_mb":{...},"disk_mb":{...},"time":...}  (the command as it was typed, for a shell)
    {"kind":"train","step":1,"loss":...,"kl":...,"score":...,"norm":...,"lr":...,"ms":...,
     "data_ms":...,"tok_per_s":...,"mfu":...,"peak":...,"expert_load":...,"router_entropy":...,
     "source_loss":{"web":...},"power_w":...,"clock_mhz":...,"tokens":...,"elapsed_s":...,
     "time":...}  (the mean loss of each source of a mixture that has targets in the step)
    {"kind":"experts","step":1,"load":[[...],...]}  (of each layer the load of each expert in the
     step, 1 if all are even; after each hundredth of the run)
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
     "peak_mb":...}  (memory in MiB; no speed without steps)

kl is the divergence from the teacher, in runs with one; score the largest attention score of the
step before its update, in runs with --qk-clip; mfu is a share of peak, in FLOP/s; tokens
counts all steps so far; elapsed_s is the time of the run, including validations, summed over all
starts of the program; time is Unix time in seconds. Models with experts have expert_load and
router_entropy (log_routing). power_w and clock_mhz are a GPU's, once a second; floor is present if
it is known, host_mem_mb if a run on another device has large allocations here. Readers ignore kinds
and keys that they do not know.

With --tensorboard on, all numbers of the lines of training, validations, sources and tasks also go
to tensorboard.h's file, each under the tag KIND/KEY (task/NAME/KEY, set/NAME/KEY, source/NAME/KEY,
train/source_loss/NAME, gpu/power_w, gpu/clock_mhz), the load of each layer's busiest expert
(experts/layer_0), and samples as text.

main.log has the lines of llm.c, so that its plotting scripts work: s:<step> trl:<train loss> lr:<>
norm:<> and s:<step> tel:<val loss>, and s:<step> eval:<acc_norm> of a task that has one.

Steps count from 1; step 0 is before any training. Every line reaches its file before the next step,
or the program ends with the name of the file. A new run renames the logs of an earlier one in the
same directory to log.jsonl.1, main.log.1, curve.svg.1 and tensorboard.1, or the next free number. A
run that resumes after step N keeps the lines up to step N, cuts off the rest (and the line that
says why it stopped), and does not repeat lines about step N. So the logs of an interrupted and an
uninterrupted run are equal, except for one more config line. A rollback does the same: it cuts off
the lines after the checkpoint and adds one that says from which step it came.

On a terminal the line of a step is overwritten by the next one. It is cut to the terminal's width,
the less important numbers first. Steps of 100 ms or more leave a line at each hundredth of the run,
steps of 10 s or more all leave one. Elsewhere, a step is printed at each hundredth of the run, if
half a second has passed since the last one printed, and after half a minute without one; steps of
10 s or more are all printed. With --log-every N exactly the multiples of N are printed, everywhere
and in main.log, and always the first and the last step. If the screen goes away (| head), a run
with files continues without it. A quiet run prints only results: tasks, skipped steps, warnings,
why it stopped, and the summary.
*/
#ifndef LLMC_LOG_H
#define LLMC_LOG_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/eval_tasks.h"
#include "llmc/data/mixture.h"
#include "llmc/log/log_line.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { LOG_NEW, LOG_CONTINUE } LogStart; // LOG_CONTINUE: the files belong to this run

typedef struct {
    const char* out_dir; // created, with its parents; "" writes no files
    LogStart start;
    // steps done before this start of the program; steps of the whole run
    int64_t start_step, steps;
    int64_t step_tokens; // tokens per step, until log_tokens changes it
    int eval_every;      // steps between validations, 0: none
    FILE* screen;        // usually stdout; NULL prints nothing, on all ranks but one
    int tensorboard;     // also writes for TensorBoard, if the run has files
    uint64_t run;        // identity of the run, as in its checkpoints; 0: unknown
    // steps between printed steps on the screen and in main.log; 0: by time, and all in main.log
    int every;
    int is_quiet; // prints only results
} LogSettings;

// ---- opening and closing ----

void log_open(RunLog* log, const LogSettings* o);

void log_close(RunLog* log);

// Flushes everything logged so far to the disk, before a checkpoint vouches for it.
void log_sync(RunLog* log);

// ---- lines between steps ----

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

// Logs that something is wrong with the run after this step.
void log_warning(RunLog* log, int64_t step, const char* text);

// Logs that the run continues from this checkpoint of its own. Repeats the checkpoint's line if it
// was cut off, because it came after the next step.
void log_resumed(RunLog* log, const char* path);

// Logs that the update of this step was skipped, and where its data are ("": unknown).
void log_skip(RunLog* log, int64_t step, const char* reason, const char* where);

// Logs that the run was rolled back after step `from` to the checkpoint of step `to`.
void log_rollback(RunLog* log, int64_t from, int64_t to, const char* reason);

// Logs that the run stops after this step, before its end; prints `advice` on the screen.
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
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/enum_words.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/terminal.h"
#include "llmc/base/text_buffer.h"
#include "llmc/log/curve_svg.h"
#include "llmc/log/curve_terminal.h"
#include "llmc/log/log_history.h"
#include "llmc/log/text_wrap.h"

enum { LOG_CURVE_COLUMNS_ = 79, LOG_CURVE_ROWS_ = 20, LOG_TEXT_COLUMNS_ = 100 };

// ---- opening and closing ----

// Opens the files: empty for a new run, cut to the earlier lines for one that continues.
static void log_open_files_(RunLog* log, const LogSettings* o) {
    log_file_path(log->json.path, o->out_dir, LOG_JSON, 0);
    log_file_path(log->text.path, o->out_dir, LOG_TEXT, 0);
    if (o->start == LOG_CONTINUE) {
        log_cut(log);
    } else {
        log_file_open(&log->json, 0);
        log_file_open(&log->text, 0);
    }
}

void log_open(RunLog* log, const LogSettings* o) {
    memset(log, 0, sizeof(*log));
    log->start_step = log->kept_step = o->start_step;
    log->steps = o->steps;
    log->run = o->run;
    log->step_tokens = (double)o->step_tokens;
    log->eval_every = o->eval_every;
    log->open_s = time_now_s();
    log->peak = log->divergence = log->score = log->power_w = log->clock_mhz = NAN;
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

static void log_close_file_(LogFile* file) {
    CHECK(fclose(file->file) == 0, "%s: cannot write: %s", file->path, strerror(errno));
}

void log_close(RunLog* log) {
    log_screen_end_line(log);
    log_screen_flush(log);
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

void log_sync(RunLog* log) {
    log_file_sync(&log->json);
    log_file_sync(&log->text);
    tensorboard_sync(&log->board);
}

// ---- lines between steps ----

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
    log_line_string(log, "program", identity.program, strlen(identity.program));
    log_line_string(log, "trainer", identity.trainer, strlen(identity.trainer));
    log_line_string(log, "host", host, strlen(host));
    log_line_string(log, "device", identity.device, strlen(identity.device));
    if (isfinite(identity.floor)) {
        log_line_number(log, "floor", identity.floor);
    }
    if (identity.print_memory) {
        identity.print_memory(log->json.file, identity.memory);
    }
    log_line_time(log);
    log_line_end(log);
}

void log_progress(RunLog* log, int64_t step, const char* what, int64_t i, int64_t n) {
    char count[64];
    const double now_s = time_now_s(), pause_s = log->is_terminal ? 0.2 : LOG_SILENCE_S;
    if (i == 0) {
        log->val_start_s = log->progress_s = now_s;
    }
    if (now_s - log->progress_s < pause_s) {
        return;
    }
    log->progress_s = now_s;
    log_screen_end_line(log);
    fprintf(log_details(log), "%s | %s %lld/%lld%s", log_step_text(log, step, count), what, (long long)i,
            (long long)n, log->is_terminal ? "" : "\n");
    log->open_line = log->is_terminal ? LOG_LINE_PROGRESS : LOG_LINE_NONE;
    log_screen_flush(log);
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
    FILE* screen = log_details(log);
    log_screen_say(log, screen, step);
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
    log_screen_flush(log);
}

// Writes a line of a validation; `kind` is "val", or "set" with the name of the set.
static void log_write_val_(RunLog* log, const char* kind, int64_t step, const LogVal* val) {
    log_line_begin(log, kind, step);
    if (strcmp(kind, "set") == 0) {
        log_line_string(log, "name", val->name, strlen(val->name));
    }
    log_line_number(log, "loss", val->loss);
    log_line_known(log, "bpb", val->bpb);
    fprintf(log->json.file, ",\"sequences\":%lld,\"all_sequences\":%lld", (long long)val->sequences,
            (long long)val->all_sequences);
    log_line_end(log);
}

void log_val(RunLog* log, int64_t step, const LogVal* val) {
    log_time_val_(log, val->is_first);
    log_say_val_(log, step, val);
    if (val->name && !log_is_repeated(log, LOG_KIND_SET, step)) {
        log_write_val_(log, "set", step, val);
    }
    if (val->is_first && !log_is_repeated(log, LOG_KIND_VAL, step)) {
        log_write_val_(log, "val", step, val);
        fprintf(log->text.file, "s:%lld tel:%.4f\n", (long long)step, val->loss);
        log_file_flush(&log->text);
        log_remember(log, log->val, step, val->loss);
    }
}

static void log_say_sources_(RunLog* log, int64_t step, const DataSources* sources, const SourceUse* use) {
    FILE* screen = log_details(log);
    log_screen_say(log, screen, step);
    for (int s = 0; s < sources->count; s++) {
        fprintf(screen, "%s%s %.4g %%, %.3g epochs", s ? " | " : "", sources->source[s].name,
                100 * use[s].share, use[s].epochs);
    }
    fputc('\n', screen);
    log_screen_flush(log);
}

void log_sources(RunLog* log, int64_t step, const DataSources* sources, uint64_t sequence) {
    SourceUse use[SOURCES_MAX];
    mixture_use(use, sources, sequence);
    log_say_sources_(log, step, sources, use);
    for (int s = 0; s < sources->count; s++) {
        const char* name = sources->source[s].name;
        if (!log_is_repeated(log, LOG_KIND_SOURCE, step)) {
            log_line_begin(log, "source", step);
            log_line_string(log, "name", name, strlen(name));
            log_line_number(log, "share", use[s].share);
            log_line_number(log, "tokens", use[s].tokens);
            log_line_number(log, "epochs", use[s].epochs);
            log_line_end(log);
        }
    }
}

static void log_share_(RunLog* log, const char* key, const char* error_key, TaskShare share) {
    log_line_known(log, key, share.value);
    log_line_known(log, error_key, share.error);
}

static void log_write_task_(RunLog* log, int64_t step, const char* name, const TaskScore* score) {
    log_line_begin(log, "task", step);
    log_line_string(log, "name", name, strlen(name));
    log_share_(log, "acc", "acc_err", score->acc);
    log_share_(log, "acc_norm", "acc_norm_err", score->acc_norm);
    log_share_(log, "acc_bytes", "acc_bytes_err", score->acc_bytes);
    if (score->kind != TASK_CHOICE) {
        log_line_number(log, "loss", score->loss);
        log_line_number(log, "ppl", exp(score->loss));
        log_line_known(log, "bpb", score->bpb);
    }
    log_line_number(log, "tokens", score->tokens);
    log_line_end(log);
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
    const int has_loss = score->kind != TASK_CHOICE, is_repeated = log_is_repeated(log, LOG_KIND_TASK, step);
    log_screen_say(log, log->screen.file, step);
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
    log_screen_flush(log);
    if (!is_repeated) {
        log_write_task_(log, step, name, score);
    }
}

void log_sample(RunLog* log, int64_t step, const char* text, size_t bytes) {
    const int columns = log_screen_columns(log);
    log_screen_say(log, log_details(log), step);
    fputs("sample:\n", log_details(log));
    text_wrap_print(log_details(log), text, bytes,
                    (size_t)(0 < columns && columns < LOG_TEXT_COLUMNS_ ? columns : (int)LOG_TEXT_COLUMNS_));
    log_screen_flush(log);
    if (!log_is_repeated(log, LOG_KIND_SAMPLE, step)) {
        log_line_begin(log, "sample", step);
        log_line_string(log, "text", text, bytes);
        log_line_end(log);
    }
}

void log_save(RunLog* log, int64_t step, const char* path) {
    log_screen_say(log, log_details(log), step);
    fprintf(log_details(log), "saved %s\n", path);
    log_screen_flush(log);
    if (!log_is_repeated(log, LOG_KIND_SAVE, step)) {
        log_line_begin(log, "save", step);
        log_line_path(log, path);
        log_line_end(log);
    }
}

void log_note(RunLog* log, const char* text) {
    log_screen_end_line(log);
    text_wrap_lines(log_details(log), text);
    fputc('\n', log_details(log));
    log_screen_flush(log);
}

void log_warning(RunLog* log, int64_t step, const char* text) {
    log_screen_end_line(log);
    fprintf(log->screen.file, "warning: step %lld: ", (long long)step);
    text_wrap_lines(log->screen.file, text);
    fputc('\n', log->screen.file);
    log_screen_flush(log);
    if (!log_is_repeated(log, LOG_KIND_WARNING, step)) {
        log_line_begin(log, "warning", step);
        log_line_string(log, "text", text, strlen(text));
        log_line_end(log);
    }
}

void log_resumed(RunLog* log, const char* path) {
    if (!log_is_repeated(log, LOG_KIND_SAVE, log->start_step)) {
        log_line_begin(log, "save", log->start_step);
        log_line_path(log, path);
        log_line_end(log);
    }
}

void log_skip(RunLog* log, int64_t step, const char* reason, const char* where) {
    log_screen_say(log, log->screen.file, step);
    fprintf(log->screen.file, "update skipped: %s", reason);
    if (where[0]) {
        fputs("; ", log->screen.file);
        text_wrap_lines(log->screen.file, where);
    }
    fputc('\n', log->screen.file);
    log_screen_flush(log);
    log_line_begin(log, "skip", step);
    log_line_string(log, "reason", reason, strlen(reason));
    if (where[0]) {
        fputs(",\"where\":", log->json.file);
        json_print_bytes(log->json.file, where, strlen(where));
    }
    log_line_end(log);
}

void log_rollback(RunLog* log, int64_t from, int64_t to, const char* reason) {
    log_screen_say(log, log->screen.file, from);
    fprintf(log->screen.file, "rolled back to step %lld: %s\n", (long long)to, reason);
    log_screen_flush(log);
    log->start_step = to;
    memset(log->repeated, 0, sizeof(log->repeated));
    memset(log->train, 0, sizeof(log->train));
    memset(log->val, 0, sizeof(log->val));
    const double elapsed_s = log->elapsed_s; // later than the time in that step's line
    if (!log_file_is_none(&log->json)) {
        log_close_file_(&log->json);
        log_close_file_(&log->text);
        log_cut(log);
    }
    log->elapsed_s = elapsed_s;
    tensorboard_restart(&log->board, to);
    log_line_begin(log, "rollback", to);
    fprintf(log->json.file, ",\"from\":%lld", (long long)from);
    log_line_string(log, "reason", reason, strlen(reason));
    log_line_end(log);
}

void log_stop(RunLog* log, int64_t step, const char* reason, const char* advice) {
    log_screen_end_line(log);
    fprintf(log->screen.file, "stopped by %s after step %lld%s\n", reason, (long long)step, advice);
    log_screen_flush(log);
    log_line_begin(log, "stop", step);
    log_line_string(log, "reason", reason, strlen(reason));
    log_line_end(log);
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
static void log_write_curve_(const RunLog* log, Curve curve) {
    char path[PATH_MAX], directory[PATH_MAX], error[ERROR_BYTES];
    TextBuffer picture;
    text_buffer_open(&picture, LOG_CURVE);
    curve_svg(picture.file, curve);
    char* text = text_buffer_close(&picture);
    file_directory_of(directory, log->json.path);
    log_file_path(path, directory, LOG_CURVE, 0);
    if (!file_try_write_text(path, text, picture.bytes, error)) {
        fprintf(stderr, "warning: %s\n", error);
    }
    free(text);
}

static void log_draw_curve_(RunLog* log, double floor) {
    CurvePoint train[LOG_BINS], val[LOG_BINS];
    const Curve curve = {train, val, log_recall(log->train, train), log_recall(log->val, val), floor};
    if (curve.n_train > 1) {
        fputc('\n', log_details(log));
        curve_draw(log_details(log), curve, LOG_CURVE_COLUMNS_, LOG_CURVE_ROWS_);
        fputc('\n', log_details(log));
        if (!log_file_is_none(&log->json)) {
            log_write_curve_(log, curve);
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
    log_screen_flush(log);
}

void log_summary(RunLog* log, LogSummary end) {
    const double elapsed_s = log->elapsed_s + time_now_s() - log->open_s;
    log_screen_end_line(log);
    log_draw_curve_(log, end.floor);
    log_say_summary_(log, &end, elapsed_s);

    fprintf(log->json.file, "{\"kind\":\"summary\",\"steps\":%lld", (long long)end.steps);
    log_line_number(log, "val_loss", end.val_loss);
    if (isfinite(end.best_val_loss)) {
        log_line_number(log, "best_val_loss", end.best_val_loss);
        fprintf(log->json.file, ",\"best_step\":%lld", (long long)end.best_step);
    }
    if (isfinite(end.floor)) {
        log_line_number(log, "floor", end.floor);
    }
    log_line_number(log, "elapsed_s", elapsed_s);
    if (log->timed > 0) {
        log_line_number(log, "tok_per_s", log_tok_per_s(log));
        log_line_number(log, "samples_per_s", log_tok_per_s(log) / end.seq_len);
    }
    log_line_number(log, "data_s", log->data_wait_s);
    log_line_number(log, "planned_mb", end.planned_mib);
    log_line_number(log, "peak_mb", end.peak_mib);
    log_line_end(log);
}

#endif // LOG_IMPLEMENTATION

#endif
