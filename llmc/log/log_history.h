/*
log_history.h -- what an earlier start of a run has logged: the losses for its curve, and the lines
that a resumed run keeps or does not repeat.
*/
#ifndef LLMC_LOG_HISTORY_H
#define LLMC_LOG_HISTORY_H

#include <stdint.h>

#include "llmc/log/curve_terminal.h"
#include "llmc/log/log_line.h"

#ifdef __cplusplus
extern "C" {
#endif

void log_remember(const RunLog* log, LogBin* bins, int64_t step, double loss);

// Sets points (LOG_BINS) to the averages of the bins that are not empty. Returns how many.
int log_recall(const LogBin* bins, CurvePoint* points);

// Returns true if the files of a resumed run already have this line: the last step before the
// interruption is visited again. Each of their lines is skipped once.
int log_is_repeated(RunLog* log, LogKind kind, int64_t step);

// Opens the files again, cut to the lines before start_step. Reads both before it cuts either.
void log_cut(RunLog* log);

#ifdef __cplusplus
}
#endif

#ifdef LOG_HISTORY_IMPLEMENTATION

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "llmc/base/check.h"
#include "llmc/base/enum_words.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/printable.h"

// ---- history ----

void log_remember(const RunLog* log, LogBin* bins, int64_t step, double loss) {
    if (isfinite(loss) && step >= 0 && step <= log->steps) {
        LogBin* bin = &bins[log->steps ? step * (LOG_BINS - 1) / log->steps : 0];
        bin->steps += (double)step;
        bin->losses += loss;
        bin->count++;
    }
}

int log_recall(const LogBin* bins, CurvePoint* points) {
    int n = 0;
    for (int i = 0; i < LOG_BINS; i++) {
        if (bins[i].count) {
            points[n].step = bins[i].steps / (double)bins[i].count;
            points[n++].loss = bins[i].losses / (double)bins[i].count;
        }
    }
    return n;
}

// ---- resuming ----

// Returns the kind of a line between two steps, or LOG_KINDS.
static LogKind log_kind_(const char* kind) {
    static const char* const kinds[LOG_KINDS] = {"val", "set", "source", "task", "sample", "save", "warning"};
    int i = 0;
    while (i < LOG_KINDS && strcmp(kind, kinds[i]) != 0) {
        i++;
    }
    return (LogKind)i;
}

int log_is_repeated(RunLog* log, LogKind kind, int64_t step) {
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
    const LogKind known = log_kind_(kind);
    if (known < LOG_KINDS && step == log->start_step) {
        log->repeated[known]++;
    }
    if (strcmp(kind, "train") == 0 || known == LOG_KIND_VAL) {
        log_remember(log, known == LOG_KIND_VAL ? log->val : log->train, step,
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

void log_cut(RunLog* log) {
    const off_t json = log_reread_(log, log->json.path), text = log_reread_(log, log->text.path);
    log_file_open(&log->json, json);
    log_file_open(&log->text, text);
}

#endif // LOG_HISTORY_IMPLEMENTATION

#endif
