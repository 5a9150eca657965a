/*
log_files.h -- the files of a run's log: their names, the renaming of an earlier run's, and lines
that reach their file, or the disk, or end the program with the name of the file.
*/
#ifndef LLMC_LOG_FILES_H
#define LLMC_LOG_FILES_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    FILE* file;
    char path[PATH_MAX];
} LogFile;

// Names in the directory of the run. The last one is a directory.
#define LOG_JSON "log.jsonl"
#define LOG_TEXT "main.log"
#define LOG_CURVE "curve.svg"
#define LOG_BOARD "tensorboard"

// Sets path to a log in this directory: the current one (0), or one that was renamed.
void log_file_path(char path[PATH_MAX], const char* out_dir, const char* name, int number);

// True if a log has this name, or had it before it was renamed.
int log_files_own(const char* name);

// Renames the logs of an earlier run in this directory, all with the same number.
void log_files_put_aside(const char* out_dir);

// Returns the identity of the run whose logs are in this directory, from the first line of
// log.jsonl; 0: no log, or one without it. Ends the program if a log cannot be read.
uint64_t log_files_run(const char* out_dir);

// Makes the logs of this run the current ones: renames the logs of another run, and restores
// this run's if they were renamed.
void log_files_take(const char* out_dir, uint64_t run);

// Ends the program if an existing log cannot be continued. A link can: a file replaces it.
void log_files_require_writable(const char* out_dir);

// Opens log->path, cut to its first `keep` bytes. If it is a link, the run gets a file of its own
// with these bytes: nothing is cut or written at the other end.
void log_file_open(LogFile* log, off_t keep);

// Opens a log that discards all lines.
void log_file_open_none(LogFile* log);
int log_file_is_none(const LogFile* log);

// Flushes a line to the file. Returns 0 if it cannot be written.
int log_file_try_flush(LogFile* log);

// Flushes a line to the file, or ends the program.
void log_file_flush(LogFile* log);

// Flushes all lines to the disk.
void log_file_sync(LogFile* log);

#ifdef __cplusplus
}
#endif

#ifdef LOG_FILES_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"

#define LOG_NO_FILE_ "/dev/null"

int log_file_try_flush(LogFile* log) { return fflush(log->file) == 0 && !ferror(log->file); }

void log_file_flush(LogFile* log) {
    CHECK(log_file_try_flush(log), "%s: cannot write: %s", log->path, strerror(errno));
}

int log_file_is_none(const LogFile* log) { return strcmp(log->path, LOG_NO_FILE_) == 0; }

static int log_file_is_link_(const char* path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
}

// Replaces a link by a file with the first `keep` bytes of its target.
static void log_file_own_(const char* path, off_t keep) {
    char error[ERROR_BYTES], *text;
    size_t bytes;
    CHECK(file_try_read(path, SIZE_MAX / 2, &text, &bytes, error), "%s", error);
    file_write_text(path, text, (size_t)keep < bytes ? (size_t)keep : bytes);
    free(text);
    printable_line(stderr,
                   "note: %s was a symbolic link and is a file now; the file that it led to has not changed",
                   path);
}

// Opens a file to append to; makes it if it does not exist. Ends the program if it is a link or no
// regular file, which would not be the run's own. Returns its descriptor.
static int log_file_append_(const char* path) {
    struct stat info;
    // a FIFO would wait for a reader, and a link's target is not ours
    const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    CHECK(fd >= 0 || errno != ELOOP, "%s: a symbolic link, wanted a file or none", path);
    CHECK(fd >= 0 || errno != ENXIO, "%s: not a regular file", path);
    CHECK(fd >= 0 && fstat(fd, &info) == 0, "%s: cannot open: %s", path, strerror(errno));
    CHECK(S_ISREG(info.st_mode), "%s: not a regular file", path);
    return fd;
}

void log_file_open(LogFile* log, off_t keep) {
    if (keep > 0 && log_file_is_link_(log->path)) {
        log_file_own_(log->path, keep);
    }
    const int fd = log_file_append_(log->path);
    CHECK(ftruncate(fd, keep) == 0, "%s: cannot cut: %s", log->path, strerror(errno));
    log->file = fdopen(fd, "a");
    CHECK(log->file, "%s: cannot open: %s", log->path, strerror(errno));
}

void log_file_open_none(LogFile* log) {
    strcpy(log->path, LOG_NO_FILE_);
    log->file = fopen(LOG_NO_FILE_, "w");
    CHECK(log->file, "%s: cannot open: %s", log->path, strerror(errno));
}

void log_file_sync(LogFile* log) {
    log_file_flush(log);
    const int failed = fsync(fileno(log->file)) != 0 && errno != EINVAL; // EINVAL: nothing to flush
    CHECK(!failed, "%s: cannot flush to disk: %s", log->path, strerror(errno));
}

void log_file_path(char path[PATH_MAX], const char* out_dir, const char* name, int number) {
    char ending[16] = "";
    if (number > 0) {
        snprintf(ending, sizeof(ending), ".%d", number);
    }
    file_path(path, "%s/%s%s", out_dir, name, ending);
}

// True if something exists that must not be lost. Links count, and are themselves renamed: their
// targets are not ours to change.
static int log_file_is_there_(const char* out_dir, const char* name, int number) {
    char path[PATH_MAX];
    struct stat info;
    log_file_path(path, out_dir, name, number);
    if (lstat(path, &info) != 0) {
        CHECK(errno == ENOENT || errno == ENOTDIR, "%s: cannot read its attributes: %s", path,
              strerror(errno));
        return 0;
    }
    return number > 0 || S_ISLNK(info.st_mode) ||
           (strcmp(name, LOG_BOARD) == 0 ? S_ISDIR(info.st_mode) : S_ISREG(info.st_mode) && info.st_size > 0);
}

enum { LOG_FILES_ = 4 };
static const char* const LOG_NAMES_[LOG_FILES_] = {LOG_JSON, LOG_TEXT, LOG_CURVE, LOG_BOARD};

int log_files_own(const char* name) {
    int owns = 0;
    for (int i = 0; i < LOG_FILES_; i++) {
        const size_t length = strlen(LOG_NAMES_[i]);
        const char* rest = name + (strncmp(name, LOG_NAMES_[i], length) == 0 ? length : 0);
        owns |= rest > name && (!*rest || (*rest == '.' && !rest[1 + strspn(rest + 1, "0123456789")]));
    }
    return owns;
}

static int log_files_are_taken_(const char* out_dir, int number) {
    int is_taken = 0;
    for (int i = 0; i < LOG_FILES_; i++) {
        is_taken |= log_file_is_there_(out_dir, LOG_NAMES_[i], number);
    }
    return is_taken;
}

static void log_files_rename_(const char* out_dir, int from_number, int to_number) {
    for (int i = 0; i < LOG_FILES_; i++) {
        char from[PATH_MAX], to[PATH_MAX];
        log_file_path(from, out_dir, LOG_NAMES_[i], from_number);
        log_file_path(to, out_dir, LOG_NAMES_[i], to_number);
        CHECK(!log_file_is_there_(out_dir, LOG_NAMES_[i], from_number) || rename(from, to) == 0,
              "%s: cannot rename to %s: %s", from, to, strerror(errno));
    }
}

void log_files_put_aside(const char* out_dir) {
    int number = 1;
    while (log_files_are_taken_(out_dir, number)) {
        number++;
    }
    log_files_rename_(out_dir, 0, number);
}

// Returns the identity in a renamed log, or in the current one (0); 0 if unknown.
static uint64_t log_files_run_of_(const char* out_dir, int number) {
    char path[PATH_MAX], line[128] = "";
    uint64_t run = 0;
    log_file_path(path, out_dir, LOG_JSON, number);
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        return 0;
    }
    CHECK(fd >= 0 && read(fd, line, sizeof(line) - 1) >= 0, "%s: cannot read: %s", path, strerror(errno));
    close(fd);
    return sscanf(line, "{\"kind\":\"config\",\"run\":\"%16" SCNx64 "\"", &run) == 1 ? run : 0;
}

uint64_t log_files_run(const char* out_dir) { return log_files_run_of_(out_dir, 0); }

void log_files_require_writable(const char* out_dir) {
    static const char* const names[] = {LOG_JSON, LOG_TEXT};
    for (int i = 0; i < 2; i++) {
        char path[PATH_MAX];
        log_file_path(path, out_dir, names[i], 0);
        const int fd = open(path, O_WRONLY | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        CHECK(fd >= 0 || errno == ENOENT || errno == ELOOP, "%s: cannot write: %s", path, strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
    }
}

void log_files_take(const char* out_dir, uint64_t run) {
    if (log_files_run(out_dir) == run) {
        return;
    }
    log_files_put_aside(out_dir);
    for (int number = 1; run && log_files_are_taken_(out_dir, number); number++) {
        if (log_files_run_of_(out_dir, number) == run) {
            log_files_rename_(out_dir, number, 0);
            return;
        }
    }
}

#endif // LOG_FILES_IMPLEMENTATION

#endif
