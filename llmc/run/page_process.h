/*
page_process.h -- rewrites the page of a run while it continues: --report-every.

A process of its own writes the page, as --report OUT does: the run neither waits for it nor needs
its memory, and none of its errors ends the run. The page is replaced by a rename, so a reader never
sees half of it.
*/
#ifndef LLMC_PAGE_PROCESS_H
#define LLMC_PAGE_PROCESS_H

#include <limits.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *program, *out; // the name that this program was called by; directory of the run
    double every_s;            // seconds between the starts of two processes; 0: no pages
    double started_s;          // start of the last one
    pid_t process;             // the one that writes now; 0: none
} PageProcess;

// Opens the pages of a run in the directory `out`, every `minutes`. Both names must stay valid.
PageProcess page_process_open(const char* program, const char* out, double minutes);

// Starts to write the page if it is due and the last one is written. Returns 0 with the reason in
// `error` (PAGE_ERROR_BYTES) if the last one could not be.
enum { PAGE_ERROR_BYTES = PATH_MAX + 256 };
int page_process_update(PageProcess* p, char* error);

// Writes the page of the run at its end, and waits for it. Returns as page_process_update does.
int page_process_close(PageProcess* p, char* error);

#ifdef __cplusplus
}
#endif

#ifdef PAGE_PROCESS_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "llmc/base/clock.h"

extern char** environ;

enum { REPORT_ARGUMENT_BYTES_ = 2 * PATH_MAX };

PageProcess page_process_open(const char* program, const char* out, double minutes) {
    return (PageProcess){program, out, 60 * minutes, 0, 0};
}

// Sets the reason. Returns 0.
static int page_process_fail_(const PageProcess* p, const char* reason, char* error) {
    snprintf(error, PAGE_ERROR_BYTES, "%s/report.html: not written: %s", p->out, reason);
    return 0;
}

// Sets text to "--report=OUT", with a backslash before each comma.
static void page_process_argument_(char text[REPORT_ARGUMENT_BYTES_], const char* out) {
    size_t used = (size_t)snprintf(text, REPORT_ARGUMENT_BYTES_, "--report=");
    for (; *out && used + 3 < REPORT_ARGUMENT_BYTES_; out++) {
        if (*out == ',') {
            text[used++] = '\\';
        }
        text[used++] = *out;
    }
    text[used] = '\0';
}

// Starts the process. Its output is a line about the page; errors stay visible.
static int page_process_start_(PageProcess* p, char* error) {
    char report[REPORT_ARGUMENT_BYTES_];
    char* const arguments[] = {(char*)p->program, report, NULL};
    // the file of this program may have been replaced since its start
    const char* self = access("/proc/self/exe", X_OK) == 0 ? "/proc/self/exe" : p->program;
    posix_spawn_file_actions_t files;
    page_process_argument_(report, p->out);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    const int failure = posix_spawnp(&p->process, self, &files, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&files);
    p->started_s = time_now_s();
    if (failure) {
        p->process = 0;
        return page_process_fail_(p, strerror(failure), error);
    }
    return 1;
}

// Takes in the end of the process, if it has ended or `how` is 0, which waits.
static int page_process_reap_(PageProcess* p, int how, char* error) {
    int status = 0;
    pid_t ended = 0;
    while (p->process && (ended = waitpid(p->process, &status, how)) < 0 && errno == EINTR) {
    }
    p->process = ended ? 0 : p->process;
    return !ended || status == 0 || page_process_fail_(p, "see the error above", error);
}

int page_process_update(PageProcess* p, char* error) {
    const int is_due = p->every_s > 0 && (!p->started_s || time_now_s() - p->started_s >= p->every_s);
    if (!page_process_reap_(p, WNOHANG, error)) {
        return 0;
    }
    return !is_due || p->process || page_process_start_(p, error);
}

int page_process_close(PageProcess* p, char* error) {
    if (p->every_s == 0) {
        return 1;
    }
    page_process_reap_(p, 0, error); // a failure then shows again
    return page_process_start_(p, error) && page_process_reap_(p, 0, error);
}

#endif // PAGE_PROCESS_IMPLEMENTATION

#endif
