/*
log_line.h -- the log of a run, and the parts that its lines are made of: numbers and texts in
log.jsonl and for TensorBoard, and messages on the screen. log.h says what lines there are.
*/
#ifndef LLMC_LOG_LINE_H
#define LLMC_LOG_LINE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/mixture.h"
#include "llmc/log/log_files.h"
#include "llmc/log/tensorboard.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { LOG_BINS = 512, LOG_SILENCE_S = 30 };

// Losses of a mixture in a step, by source.
typedef struct {
    const DataSources* sources;     // NULL: no mixture
    const double *losses, *targets; // (sources) sums
} LogMixture;

typedef enum {
    LOG_KIND_VAL,
    LOG_KIND_SET,
    LOG_KIND_SOURCE,
    LOG_KIND_TASK,
    LOG_KIND_SAMPLE,
    LOG_KIND_SAVE,
    LOG_KIND_WARNING,
    LOG_KINDS
} LogKind; // kinds of lines between two steps

// Text on the terminal without a line break yet.
typedef enum { LOG_LINE_NONE, LOG_LINE_STEP, LOG_LINE_PROGRESS } LogLine;

// Losses of neighboring steps, kept for the curve.
typedef struct {
    double steps, losses; // sums
    int64_t count;
} LogBin;

typedef struct {
    int64_t start_step, steps; // as in the settings
    uint64_t run;
    // tokens of a step; of all steps so far; of all steps left (0: all steps have the same number)
    double step_tokens, tokens, left_tokens;
    int eval_every;
    LogFile json, text, screen;
    LogFile nothing; // discards what a quiet run does not print; no file: the run is not quiet
    int every;       // steps between printed steps; 0: by time
    TensorBoard board;
    char tag[128]; // of the current line: the part before a key

    int is_terminal;         // the screen is a terminal
    char line[256];          // the last step, printed or still to be printed
    LogLine open_line;       // text that may be overwritten
    int64_t kept_step;       // last step whose line stayed on the terminal
    double shown_s;          // time when a step was last shown
    int repeated[LOG_KINDS]; // lines about start_step that are already in the files

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
    double load, entropy;       // of the step's experts; no load: no experts
    LogMixture mixture;         // for the next line; no sources: none
    double divergence, score;   // for the next line; NAN: none
    double power_w, clock_mhz;  // for the next line; NAN: not measured

    LogBin train[LOG_BINS], val[LOG_BINS];
} RunLog;

// ---- a line of log.jsonl, whose numbers and texts may also go to TensorBoard ----

void log_line_begin(RunLog* log, const char* kind, int64_t step);

void log_line_number(RunLog* log, const char* key, double value);

// Writes a number that only some lines have.
void log_line_known(RunLog* log, const char* key, double value);

// Writes a string. A name becomes a part of the tags of the numbers that follow.
void log_line_string(RunLog* log, const char* key, const char* text, size_t bytes);

// Writes the name of a file, which may have any bytes.
void log_line_path(RunLog* log, const char* path);

void log_line_time(RunLog* log);

void log_line_end(RunLog* log);

// ---- the screen ----

// Returns where everything but results is printed.
FILE* log_details(const RunLog* log);

// Returns the columns of the terminal; 0 if unknown.
int log_screen_columns(const RunLog* log);

// Leaves the line of the last step on the terminal, so that the next output gets its own line.
void log_screen_end_line(RunLog* log);

// Starts a message on the screen, or among the details.
void log_screen_say(RunLog* log, FILE* file, int64_t step);

// Ends a line on the screen. If the screen has gone away, a run whose files have everything
// continues without it.
void log_screen_flush(RunLog* log);

// Sets text (64 bytes) to "step   12/1000", equally wide at every step. Returns it.
char* log_step_text(const RunLog* log, int64_t step, char* text);

// Sets text (64 bytes) to "45s", "12m10s", "3h05m" or "2d04h". Returns it.
char* log_duration(double seconds, char* text);

#ifdef __cplusplus
}
#endif

#ifdef LOG_LINE_IMPLEMENTATION

#include <errno.h>
#include <math.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/json.h"
#include "llmc/base/printable.h"
#include "llmc/log/text_wrap.h"

// ---- a line ----

// True for kinds of lines whose numbers and texts also go to TensorBoard.
static int log_is_for_board_(const char* kind) {
    static const char* const kinds[] = {"train", "val", "set", "source", "task", "sample"};
    int is_one = 0;
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        is_one |= strcmp(kind, kinds[i]) == 0;
    }
    return is_one;
}

void log_line_begin(RunLog* log, const char* kind, int64_t step) {
    fprintf(log->json.file, "{\"kind\":\"%s\",\"step\":%lld", kind, (long long)step);
    snprintf(log->tag, sizeof(log->tag), "%s", log_is_for_board_(kind) ? kind : "");
    tensorboard_begin(&log->board, step);
}

void log_line_number(RunLog* log, const char* key, double value) {
    fprintf(log->json.file, isfinite(value) ? ",\"%s\":%.9g" : ",\"%s\":null", key, value);
    if (log->tag[0]) {
        char tag[sizeof(log->tag) + 32];
        snprintf(tag, sizeof(tag), "%s/%.30s", log->tag, key);
        tensorboard_scalar(&log->board, tag, value);
    }
}

// Writes the name of a file, which may have any bytes.
void log_line_path(RunLog* log, const char* path) {
    fputs(",\"path\":", log->json.file);
    json_print_bytes(log->json.file, path, strlen(path));
}

// Writes a string. A name becomes a part of the tags of the numbers that follow.
void log_line_string(RunLog* log, const char* key, const char* text, size_t bytes) {
    fprintf(log->json.file, ",\"%s\":", key);
    json_print_string(log->json.file, text, bytes);
    if (log->tag[0] && strcmp(key, "name") == 0) {
        const size_t used = strlen(log->tag);
        snprintf(log->tag + used, sizeof(log->tag) - used, "/%.*s", (int)(bytes < 100 ? bytes : 100), text);
    } else if (log->tag[0] && strcmp(key, "text") == 0) {
        tensorboard_text(&log->board, log->tag, text, bytes);
    }
}

void log_line_time(RunLog* log) { fprintf(log->json.file, ",\"time\":%.3f", time_unix_s()); }

void log_line_end(RunLog* log) {
    fputs("}\n", log->json.file);
    log_file_flush(&log->json);
    tensorboard_end(&log->board);
    log->tag[0] = '\0';
}

void log_line_known(RunLog* log, const char* key, double value) {
    if (isfinite(value)) {
        log_line_number(log, key, value);
    }
}

// ---- the screen ----

FILE* log_details(const RunLog* log) { return log->nothing.file ? log->nothing.file : log->screen.file; }

int log_screen_columns(const RunLog* log) {
    return log->is_terminal ? (int)text_wrap_columns(log->screen.file) : 0;
}

void log_screen_end_line(RunLog* log) {
    if (log->open_line != LOG_LINE_NONE) {
        fputs("\r\033[K", log->screen.file);
    }
    if (log->open_line == LOG_LINE_STEP) {
        fprintf(log->screen.file, "%s\n", log->line);
    }
    log->open_line = LOG_LINE_NONE;
}

void log_screen_flush(RunLog* log) {
    if (log_file_try_flush(&log->screen)) {
        return;
    }
    CHECK(!log_file_is_none(&log->json), "%s: cannot write: %s", log->screen.path, strerror(errno));
    printable_line(stderr, "warning: %s: cannot write: %s; the run continues, see %s", log->screen.path,
                   strerror(errno), log->json.path);
    log_file_open_none(&log->screen);
    log->is_terminal = 0;
}

char* log_step_text(const RunLog* log, int64_t step, char* text) {
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

void log_screen_say(RunLog* log, FILE* file, int64_t step) {
    char text[64];
    log_screen_end_line(log);
    fprintf(file, "%s | ", log_step_text(log, step, text));
}

#endif // LOG_LINE_IMPLEMENTATION

#endif
