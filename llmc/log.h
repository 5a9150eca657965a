/*
log.h -- all that a run says: to the screen, to log.jsonl and to main.log in the directory of the run.

log.jsonl, one object per line (a number that is not finite is null; losses have 9 significant digits):

    {"kind":"config","options":{...}}
    {"kind":"train","step":1,"loss":...,"norm":...,"lr":...,"ms":...,"data_ms":...,"tok_per_s":...,"mfu":...}
    {"kind":"val","step":0,"loss":...}
    {"kind":"sample","step":...,"text":"..."}
    {"kind":"save","step":...,"path":"..."}
    {"kind":"skip","step":...,"reason":"..."}
    {"kind":"rollback","step":...,"from":...,"reason":"..."}
    {"kind":"stop","step":...,"reason":"..."}
    {"kind":"summary","steps":...,"val_loss":...,"floor":...,"tok_per_s":...,"peak_mb":...}

main.log has the lines of llm.c, so that its plotting scripts work: s:<step> trl:<train loss> lr:<> norm:<>
and s:<step> tel:<val loss>.

Steps count from 1; step 0 is before the first update. Every line reaches its file before the next step, or
the program ends with the name of the file. A run that resumes after N updates keeps what the files say up to
step N, cuts off the rest, and does not repeat what they already say about step N: the log of an interrupted
run is that of one that was not, but for one more config line. It is the same when a run goes back to a
checkpoint: what came after it is cut off, and a line tells from which step it came.

On a terminal, steps faster than 100 ms share one line that is rewritten; elsewhere, a step that comes less
than half a second after the last one printed is not printed. The first and the last step always are.

needs:   check.h, clock.h, curve.h, file.h, json.h
defines: RunLog, LogPrint, log_open, log_close, log_config, log_data_wait, log_train, log_val, log_sample,
log_save, log_note, log_resumed, log_skip, log_rollback, log_stop, log_summary, log_tok_per_s, log_peak_mb
*/
#ifndef LLMC_LOG_H
#define LLMC_LOG_H

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "clock.h"
#include "curve.h"
#include "file.h"
#include "json.h"

enum { LOG_BINS_ = 512, LOG_CURVE_COLUMNS_ = 79, LOG_CURVE_ROWS_ = 20 };

typedef struct {
    FILE* file;
    char path[1024];
} LogFile;

// The losses of neighbouring steps, kept for the curve.
typedef struct {
    double steps, losses; // sums
    int64_t count;
} LogBin;

typedef struct {
    int64_t start_step, steps; // updates done before this process began, updates of the whole run
    double step_tokens;        // tokens per update
    LogFile json, text, screen;

    int is_terminal;   // the screen is one
    char line[256];    // the last step, as printed or to be printed
    int line_is_open;  // it stands on the terminal and may be rewritten
    double shown_s;    // when a step was last shown
    unsigned repeated; // kinds of lines about start_step that were in the files before (log_kind_bit_)

    int64_t timed;              // steps timed so far
    double total_ms, smooth_ms; // of them, without evaluation and the like: sum, and exponential average
    double first_ms, first_s;   // the first of them, and when it ended
    double data_wait_s, data_s; // waited for data so far, and up to the step before

    LogBin train[LOG_BINS_], val[LOG_BINS_];
} RunLog;

// ---- files ----

// Ends a line: it is in the file now, or the program ends.
static inline void log_flush_(LogFile* log) {
    const int ok = fflush(log->file) == 0 && !ferror(log->file);
    CHECK(ok, "%s: cannot write: %s", log->path, strerror(errno));
}

static inline void log_open_file_(LogFile* log, const char* mode) {
    log->file = fopen(log->path, mode);
    CHECK(log->file, "%s: cannot open: %s", log->path, strerror(errno));
}

// ---- history ----

static inline void log_remember_(const RunLog* log, LogBin* bins, int64_t step, double loss) {
    if (isfinite(loss) && step >= 0 && step <= log->steps) {
        LogBin* bin = &bins[log->steps ? step * (LOG_BINS_ - 1) / log->steps : 0];
        bin->steps += (double)step;
        bin->losses += loss;
        bin->count++;
    }
}

// The averages of the bins that are not empty, into points (LOG_BINS_). Returns how many.
static inline int log_recall_(const LogBin* bins, CurvePoint* points) {
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

// One bit for each kind of line that comes between two updates.
static inline unsigned log_kind_bit_(const char* kind) {
    static const char* const kinds[3] = {"val", "sample", "save"};
    for (unsigned i = 0; i < 3; i++) {
        if (strcmp(kind, kinds[i]) == 0) {
            return 1u << i;
        }
    }
    return 0;
}

// Whether the files of a resumed run already hold this: the last step before the interruption is visited
// again.
static inline int log_is_repeated_(const RunLog* log, const char* kind, int64_t step) {
    return step == log->start_step && (log->repeated & log_kind_bit_(kind));
}

// Takes in one line of an older log: -1 if it is about no step, else its step.
static inline int64_t log_reread_line_(RunLog* log, const char* line) {
    char kind[16] = "";
    long long step = -1;
    double loss = NAN;
    if (sscanf(line, "s:%lld", &step) == 1) { // main.log
        return step;
    }
    if (sscanf(line, "{\"kind\":\"%15[a-z]\",\"step\":%lld,\"loss\":%lf", kind, &step, &loss) < 2 ||
        step > log->start_step) {
        return step;
    }
    log->repeated |= step == log->start_step ? log_kind_bit_(kind) : 0;
    log_remember_(log, strcmp(kind, "val") == 0 ? log->val : log->train, step, loss);
    return step;
}

// The bytes of an older log up to its last line about a step that was done before the resumed run begins.
static inline off_t log_reread_(RunLog* log, const char* path) {
    FILE* file = fopen(path, "r");
    char* line = NULL;
    size_t room = 0;
    off_t read = 0, keep = 0;
    for (ssize_t length; file && (length = getline(&line, &room, file)) > 0 && line[length - 1] == '\n';) {
        const int64_t step = log_reread_line_(log, line);
        if (step > log->start_step) {
            break;
        }
        read += length;
        keep = step >= 0 ? read : keep;
    }
    free(line);
    if (file) {
        fclose(file);
    }
    return keep;
}

// Opens out_dir/name: empty for a new run, cut to what was done before for one that resumes.
static inline void log_open_in_(RunLog* log, LogFile* file, const char* out_dir, const char* name) {
    snprintf(file->path, sizeof(file->path), "%s/%s", out_dir, name);
    const off_t keep = log->start_step > 0 ? log_reread_(log, file->path) : 0;
    CHECK(keep == 0 || truncate(file->path, keep) == 0, "%s: cannot cut: %s", file->path, strerror(errno));
    log_open_file_(file, keep ? "a" : "w");
}

// ---- opening and closing ----

// out_dir is made, with its parents; "" writes no files. start_step updates were done before (0: a new run)
// of `steps` in all, step_tokens tokens each. screen is usually stdout; NULL says nothing, for all ranks but
// one.
static inline void log_open(RunLog* log, const char* out_dir, int64_t start_step, int64_t steps,
                            int64_t step_tokens, FILE* screen) {
    memset(log, 0, sizeof(*log));
    log->start_step = start_step;
    log->steps = steps;
    log->step_tokens = (double)step_tokens;
    if (out_dir[0]) {
        file_make_directory(out_dir);
        log_open_in_(log, &log->json, out_dir, "log.jsonl");
        log_open_in_(log, &log->text, out_dir, "main.log");
    } else {
        strcpy(log->json.path, "/dev/null");
        strcpy(log->text.path, "/dev/null");
        log_open_file_(&log->json, "w");
        log_open_file_(&log->text, "w");
    }
    strcpy(log->screen.path, screen ? "standard output" : "/dev/null");
    log->screen.file = screen;
    if (!screen) {
        log_open_file_(&log->screen, "w");
    }
    log->is_terminal = screen && isatty(fileno(screen));
}

// Leaves the line of the last step on the terminal, so that what comes next has a line of its own.
static inline void log_end_line_(RunLog* log) {
    if (log->line_is_open) {
        fprintf(log->screen.file, "\r\033[K%s\n", log->line);
        log->line_is_open = 0;
    }
}

static inline void log_close(RunLog* log) {
    log_end_line_(log);
    log_flush_(&log->screen);
    CHECK(fclose(log->json.file) == 0, "%s: cannot write: %s", log->json.path, strerror(errno));
    CHECK(fclose(log->text.file) == 0, "%s: cannot write: %s", log->text.path, strerror(errno));
    if (strcmp(log->screen.path, "/dev/null") == 0) {
        fclose(log->screen.file);
    }
    memset(log, 0, sizeof(*log));
}

// ---- pieces of lines ----

static inline void log_begin_(RunLog* log, const char* kind, int64_t step) {
    fprintf(log->json.file, "{\"kind\":\"%s\",\"step\":%lld", kind, (long long)step);
}

static inline void log_number_(RunLog* log, const char* key, double value) {
    fprintf(log->json.file, isfinite(value) ? ",\"%s\":%.9g" : ",\"%s\":null", key, value);
}

static inline void log_string_(RunLog* log, const char* key, const char* text, size_t bytes) {
    fprintf(log->json.file, ",\"%s\":", key);
    json_print_string(log->json.file, text, bytes);
}

static inline void log_end_(RunLog* log) {
    fputs("}\n", log->json.file);
    log_flush_(&log->json);
}

// "step   12/1000", as wide at every step. text has room for 64 bytes; returns it.
static inline char* log_step_text_(const RunLog* log, int64_t step, char* text) {
    const int width = snprintf(NULL, 0, "%lld", (long long)log->steps);
    snprintf(text, 64, "step %*lld/%lld", width, (long long)step, (long long)log->steps);
    return text;
}

// "45s", "12m10s", "3h05m" or "2d04h". text has room for 64 bytes; returns it.
static inline char* log_duration_(double seconds, char* text) {
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

// Begins a message on the screen.
static inline void log_say_step_(RunLog* log, int64_t step) {
    char text[64];
    log_end_line_(log);
    fprintf(log->screen.file, "%s | ", log_step_text_(log, step, text));
}

// ---- a step ----

// The mean of the first 20 steps, then an exponential average over about 20.
static inline void log_time_(RunLog* log, double ms) {
    log->timed++;
    log->total_ms += ms;
    log->smooth_ms += (ms - log->smooth_ms) * fmax(1.0 / (double)log->timed, 0.05);
    if (log->timed == 1) {
        log->first_ms = ms;
        log->first_s = time_now_s();
    }
}

// Seconds to go: the remaining steps at the present speed, each with its share of what came between the steps
// so far (evaluation, samples, checkpoints).
static inline double log_eta_s_(const RunLog* log, int64_t step) {
    double between_ms = 0;
    if (log->timed > 1) {
        const double wall_ms = 1e3 * (time_now_s() - log->first_s), steps_ms = log->total_ms - log->first_ms;
        between_ms = fmax(0, wall_ms - steps_ms) / (double)(log->timed - 1);
    }
    return 1e-3 * (double)(log->steps - step) * (log->smooth_ms + between_ms);
}

static inline void log_format_step_(RunLog* log, int64_t step, double loss, double loss_z, double norm,
                                    double norm_z, double lr, double ms, double mfu) {
    char count[64], eta[64], utilization[32] = "";
    if (isfinite(mfu)) {
        snprintf(utilization, sizeof(utilization), " | %.1f%% MFU", 100 * mfu);
    }
    snprintf(
        log->line, sizeof(log->line),
        "%s | loss %.4f (%+.2fz) | norm %.4f (%+.2fz) | lr %.2e | %.1f ms%s | %.0f tok/s | eta %s | %3.0f%%",
        log_step_text_(log, step, count), loss, loss_z, norm, norm_z, lr, ms, utilization,
        1e3 * log->step_tokens / log->smooth_ms, log_duration_(log_eta_s_(log, step), eta),
        floor(100.0 * (double)step / (double)log->steps));
}

// Shows the line of a step, or not: see the head of this file.
static inline void log_show_step_(RunLog* log, int64_t step) {
    const int is_end = step == log->start_step + 1 || step == log->steps;
    const int is_rewritten = log->is_terminal && log->smooth_ms < 100 && !is_end;
    const double now_s = time_now_s(), pause_s = is_rewritten ? 0.1 : log->is_terminal ? 0 : 0.5;
    if (!is_end && now_s - log->shown_s < pause_s) {
        return;
    }
    if (is_rewritten) { // a line longer than the terminal is wide is clipped there, or it could not be
                        // rewritten
        fprintf(log->screen.file, "\r\033[?7l%s\033[K\033[?7h", log->line);
    } else {
        fprintf(log->screen.file, "%s%s\n", log->line_is_open ? "\r\033[K" : "", log->line);
    }
    log->line_is_open = is_rewritten;
    log->shown_s = now_s;
    log_flush_(&log->screen);
}

// Before log_train: the time that the run has waited for its data since it began.
static inline void log_data_wait(RunLog* log, double seconds) { log->data_wait_s = seconds; }

// After update number `step`: the mean loss of its batch, the norm of its gradient before clipping, both with
// their z-scores, the learning rate, the time it took without evaluation and the like, and the model flops
// utilization as a fraction (NAN: unknown).
static inline void log_train(RunLog* log, int64_t step, double loss, double loss_z, double norm,
                             double norm_z, double lr, double ms, double mfu) {
    log_begin_(log, "train", step);
    log_number_(log, "loss", loss);
    log_number_(log, "norm", norm);
    log_number_(log, "lr", lr);
    log_number_(log, "ms", ms);
    log_number_(log, "data_ms", 1e3 * (log->data_wait_s - log->data_s));
    log_number_(log, "tok_per_s", 1e3 * log->step_tokens / ms);
    log_number_(log, "mfu", mfu);
    log_end_(log);
    log->data_s = log->data_wait_s;
    fprintf(log->text.file, "s:%lld trl:%.4f lr:%.6f norm:%.2f\n", (long long)step, loss, lr, norm);
    log_flush_(&log->text);
    log_remember_(log, log->train, step, loss);
    log_time_(log, ms);
    log_format_step_(log, step, loss, loss_z, norm, norm_z, lr, ms, mfu);
    log_show_step_(log, step);
}

// ---- the other lines ----

// Prints one JSON object, without a newline.
typedef void (*LogPrint)(FILE* file, const void* what);

// The options of the run: print(file, what) prints them. The first thing to log.
static inline void log_config(RunLog* log, LogPrint print, const void* what) {
    fputs("{\"kind\":\"config\",\"options\":", log->json.file);
    print(log->json.file, what);
    log_end_(log);
}

static inline void log_val(RunLog* log, int64_t step, double loss) {
    log_say_step_(log, step);
    fprintf(log->screen.file, "val loss %.4f\n", loss);
    log_flush_(&log->screen);
    if (!log_is_repeated_(log, "val", step)) {
        log_begin_(log, "val", step);
        log_number_(log, "loss", loss);
        log_end_(log);
        fprintf(log->text.file, "s:%lld tel:%.4f\n", (long long)step, loss);
        log_flush_(&log->text);
        log_remember_(log, log->val, step, loss);
    }
}

// What the model wrote, `bytes` long. Control characters do not reach the screen: they could reprogram it.
static inline void log_sample(RunLog* log, int64_t step, const char* text, size_t bytes) {
    FILE* screen = log->screen.file;
    log_say_step_(log, step);
    fputs("sample:\n    ", screen);
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)text[i];
        fputc((c < ' ' && c != '\t' && c != '\n') || c == 127 ? '?' : c, screen);
        fputs(c == '\n' ? "    " : "", screen);
    }
    fputc('\n', screen);
    log_flush_(&log->screen);
    if (!log_is_repeated_(log, "sample", step)) {
        log_begin_(log, "sample", step);
        log_string_(log, "text", text, bytes);
        log_end_(log);
    }
}

static inline void log_save(RunLog* log, int64_t step, const char* path) {
    log_say_step_(log, step);
    fprintf(log->screen.file, "saved %s\n", path);
    log_flush_(&log->screen);
    if (!log_is_repeated_(log, "save", step)) {
        log_begin_(log, "save", step);
        log_string_(log, "path", path, strlen(path));
        log_end_(log);
    }
}

// Says something on the screen alone.
static inline void log_note(RunLog* log, const char* text) {
    log_end_line_(log);
    fprintf(log->screen.file, "%s\n", text);
    log_flush_(&log->screen);
}

// The run goes on from this checkpoint of its own. The line about it may have come after the next update, and
// so have been cut off.
static inline void log_resumed(RunLog* log, const char* path) {
    if (!log_is_repeated_(log, "save", log->start_step)) {
        log_begin_(log, "save", log->start_step);
        log_string_(log, "path", path, strlen(path));
        log_end_(log);
    }
}

// The update number `step` was not made.
static inline void log_skip(RunLog* log, int64_t step, const char* reason) {
    log_say_step_(log, step);
    fprintf(log->screen.file, "update skipped: %s\n", reason);
    log_flush_(&log->screen);
    log_begin_(log, "skip", step);
    log_string_(log, "reason", reason, strlen(reason));
    log_end_(log);
}

// Cuts a file to what was done before start_step.
static inline void log_cut_(RunLog* log, LogFile* file) {
    if (strcmp(file->path, "/dev/null") != 0) {
        CHECK(fclose(file->file) == 0, "%s: cannot write: %s", file->path, strerror(errno));
        CHECK(truncate(file->path, log_reread_(log, file->path)) == 0, "%s: cannot cut: %s", file->path,
              strerror(errno));
        log_open_file_(file, "a");
    }
}

// After update number `from` the run went back to the checkpoint of step `to`.
static inline void log_rollback(RunLog* log, int64_t from, int64_t to, const char* reason) {
    log_say_step_(log, from);
    fprintf(log->screen.file, "back to step %lld: %s\n", (long long)to, reason);
    log_flush_(&log->screen);
    log->start_step = to;
    log->repeated = 0;
    memset(log->train, 0, sizeof(log->train));
    memset(log->val, 0, sizeof(log->val));
    log_cut_(log, &log->json);
    log_cut_(log, &log->text);
    log_begin_(log, "rollback", to);
    fprintf(log->json.file, ",\"from\":%lld", (long long)from);
    log_string_(log, "reason", reason, strlen(reason));
    log_end_(log);
}

// The run stops after update number `step`, before its end; `advice` follows on the screen.
static inline void log_stop(RunLog* log, int64_t step, const char* reason, const char* advice) {
    log_end_line_(log);
    fprintf(log->screen.file, "stopped by %s after step %lld%s\n", reason, (long long)step, advice);
    log_flush_(&log->screen);
    log_begin_(log, "stop", step);
    log_string_(log, "reason", reason, strlen(reason));
    log_end_(log);
}

// ---- the end ----

// Training speed of this process: without evaluation, samples and checkpoints.
static inline double log_tok_per_s(const RunLog* log) {
    return log->total_ms > 0 ? 1e3 * log->step_tokens * (double)log->timed / log->total_ms : 0;
}

// The most memory this process ever held, in MiB.
static inline double log_peak_mb(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__ // bytes there, KiB elsewhere
    return (double)usage.ru_maxrss / (1 << 20);
#else
    return (double)usage.ru_maxrss / (1 << 10);
#endif
}

static inline void log_draw_curve_(RunLog* log, double floor) {
    CurvePoint train[LOG_BINS_], val[LOG_BINS_];
    const int n_train = log_recall_(log->train, train), n_val = log_recall_(log->val, val);
    if (n_train > 1) {
        fputc('\n', log->screen.file);
        curve_draw(log->screen.file, train, n_train, val, n_val, floor, LOG_CURVE_COLUMNS_, LOG_CURVE_ROWS_);
        fputc('\n', log->screen.file);
    }
}

// The last thing to log: the loss curve, and what the run achieved. `steps` updates are done; val_loss is the
// last one (NAN: never evaluated), floor the entropy of the text (NAN: unknown), peak_mb the peak memory in
// MiB (log_peak_mb(), or that of the GPU).
static inline void log_summary(RunLog* log, int64_t steps, double val_loss, double floor, double peak_mb) {
    FILE* screen = log->screen.file;
    log_end_line_(log);
    log_draw_curve_(log, floor);
    fprintf(screen, "%lld steps", (long long)steps);
    if (isfinite(val_loss)) {
        fprintf(screen, " | val loss %.4f", val_loss);
    }
    if (isfinite(floor)) {
        fprintf(screen, " | floor %.4f", floor);
    }
    const double data_share = log->total_ms > 0 ? 1e3 * log->data_wait_s / log->total_ms : 0;
    if (data_share > 0.01) {
        fprintf(screen, " | %.1f%% waiting for data", 100 * data_share);
    }
    fprintf(screen, " | %.0f tok/s | peak memory %.0f MiB\n", log_tok_per_s(log), peak_mb);
    log_flush_(&log->screen);

    fprintf(log->json.file, "{\"kind\":\"summary\",\"steps\":%lld", (long long)steps);
    log_number_(log, "val_loss", val_loss);
    if (isfinite(floor)) {
        log_number_(log, "floor", floor);
    }
    log_number_(log, "tok_per_s", log_tok_per_s(log));
    log_number_(log, "data_s", log->data_wait_s);
    log_number_(log, "peak_mb", peak_mb);
    log_end_(log);
}

#endif
