/*
stop_run.h -- --stop-run DIR: asks the run in a directory to save and end, and waits for it.
*/
#ifndef LLMC_STOP_RUN_H
#define LLMC_STOP_RUN_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Asks the run that writes in `directory`, waits for its end, and prints what it has saved. Ends
// the program if no run writes there. Returns the exit status of the program.
int stop_run(FILE* screen, const char* directory);

#ifdef __cplusplus
}
#endif

#ifdef STOP_RUN_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/base/signals.h"
#include "llmc/base/stop_request.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/log/log_line.h"
#include "llmc/report/log_reader.h"

enum { STOP_RUN_SILENCE_S_ = 30 };

// Sets `holder` to the process that writes in the directory. Ends the program if none does.
static void stop_run_find_(char holder[LOCK_NAME_BYTES], char lock[PATH_MAX], const char* directory) {
    CHECK(file_is_directory(directory), "--stop-run %s: no such directory; wanted the --out of a run",
          directory);
    file_join(lock, directory, STOP_REQUEST_LOCK);
    const LockState state = lock_look(lock, holder);
    CHECK(state != LOCK_FREE, "--stop-run %s: no run is writing here", directory);
    CHECK(state == LOCK_HELD,
          "--stop-run %s: its run was %s, and this machine cannot see if it still runs; wanted --stop-run "
          "on that machine",
          directory, holder);
}

// Waits until the process no longer has the lock. Returns 0 if a signal ends the wait.
static int stop_run_wait_(FILE* screen, const char* directory, const char* lock, const char* holder) {
    const struct timespec pause = {0, 100000000};
    const double begin_s = time_now_s();
    char now[LOCK_NAME_BYTES], text[64];
    double shown_s = begin_s;
    while (lock_look(lock, now) != LOCK_FREE && strcmp(now, holder) == 0) {
        if (signals_stop()) {
            return 0;
        }
        if (time_now_s() - shown_s >= STOP_RUN_SILENCE_S_) {
            shown_s = time_now_s();
            printable_line(screen, "%s: waiting for %s", directory, log_duration(shown_s - begin_s, text));
            fflush(screen);
        }
        nanosleep(&pause, NULL);
    }
    return 1;
}

// Prints how the run has ended, by its log. Returns the exit status.
static int stop_run_tell_(FILE* screen, const char* directory) {
    RecordFollower f;
    char path[PATH_MAX];
    file_join(path, directory, LOG_JSON);
    if (!file_exists(path)) {
        printable_line(screen, "%s: the run has ended before its first step; it has no log", directory);
        return EXIT_FAILURE;
    }
    record_follow(&f, directory);
    const Record* r = &f.record;
    const RecordEvent *save = record_last(r, RECORD_SAVE), *stop = record_last(r, RECORD_STOP);
    const int has_ended = r->end != RECORD_UNFINISHED;
    const double step = stop ? stop->step : r->num_steps ? r->steps[r->num_steps - 1].step : 0;
    checkpoint_path(path, directory, save ? (int64_t)save->step : 0, "");
    printable_line(screen, "%s: %s step %.0f; %s%s", directory,
                   r->end == RECORD_FINISHED ? "the run was finished before, at"
                   : has_ended               ? "the run has stopped after"
                                             : "the run was ended otherwise; its log ends at",
                   step, save ? "the newest checkpoint is " : "it has no checkpoint", save ? path : "");
    record_follow_end(&f);
    return has_ended ? EXIT_SUCCESS : EXIT_FAILURE;
}

int stop_run(FILE* screen, const char* directory) {
    char holder[LOCK_NAME_BYTES], lock[PATH_MAX];
    stop_run_find_(holder, lock, directory);
    stop_request_write(directory, holder);
    printable_line(screen, "%s: asked the run (%s) to save and end; waiting", directory, holder);
    fflush(screen);
    const int has_ended = stop_run_wait_(screen, directory, lock, holder);
    stop_request_remove(directory);
    if (!has_ended) {
        signals_end("waiting for the end of the run, which may continue");
    }
    return stop_run_tell_(screen, directory);
}

#endif // STOP_RUN_IMPLEMENTATION

#endif
