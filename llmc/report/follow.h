/*
follow.h -- --follow DIR: shows a run of another process, from its log: on a terminal the loss
curve, the last step and the last sample, until q; elsewhere lines, until the run ends.
*/
#ifndef LLMC_FOLLOW_H
#define LLMC_FOLLOW_H

#ifdef __cplusplus
extern "C" {
#endif

// Follows the run in this directory, or with this log, on standard output.
void follow_run(const char* run);

#ifdef __cplusplus
}
#endif

#ifdef FOLLOW_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/base/screen.h"
#include "llmc/base/signals.h"
#include "llmc/base/stop_request.h"
#include "llmc/base/terminal.h"
#include "llmc/base/text_buffer.h"
#include "llmc/report/follow_view.h"
#include "llmc/report/log_reader.h"

#define FOLLOW_PAUSE_S_ 0.25
enum { FOLLOW_STATE_BYTES_ = 256, FOLLOW_COLUMNS_ = 100, FOLLOW_CTRL_D_ = 4, FOLLOW_CTRL_L_ = 12 };

typedef struct {
    RecordFollower follower;
    char lock[PATH_MAX]; // of the directory; "": a log of an earlier run, which nobody writes
    int is_written;      // true: a process writes in the directory, or this is unknown
    double looked_s;     // time when that was found out
} Follow_;

// ---- the run ----

static void follow_find_lock_(Follow_* f, const char* run) {
    char directory[PATH_MAX];
    file_path(directory, "%s", run);
    if (record_names_file(run)) {
        file_directory_of(directory, run);
    }
    if (!record_names_file(run) || strcmp(file_name_in(run), "log.jsonl") == 0) {
        file_join(f->lock, directory, STOP_REQUEST_LOCK);
    }
}

// Waits for the log of a run that has just started.
static void follow_open_(Follow_* f, const char* run) {
    const struct timespec pause = {0, 100000000};
    char holder[LOCK_NAME_BYTES], log[PATH_MAX];
    memset((void*)f, 0, sizeof(*f));
    follow_find_lock_(f, run);
    file_join(log, run, "log.jsonl");
    while (file_is_directory(run) && access(log, F_OK) != 0 && lock_look(f->lock, holder) == LOCK_HELD &&
           !signals_stop()) {
        nanosleep(&pause, NULL);
    }
    record_follow(&f->follower, run);
}

// Finds out if a process writes in the directory, at most once a second.
static void follow_look_(Follow_* f) {
    char holder[LOCK_NAME_BYTES];
    if (f->looked_s == 0 || time_now_s() - f->looked_s >= 1) {
        f->looked_s = time_now_s();
        f->is_written = f->lock[0] && lock_look(f->lock, holder) != LOCK_FREE;
    }
}

static int follow_continues_(const Follow_* f) {
    return f->is_written && f->follower.record.end == RECORD_UNFINISHED;
}

// Describes in `text` (FOLLOW_STATE_BYTES_) how a run that does not continue has ended.
static const char* follow_state_(const Follow_* f, char* text) {
    const Record* r = &f->follower.record;
    const int is_stopped = r->end == RECORD_STOPPED;
    snprintf(text, FOLLOW_STATE_BYTES_, "%s%.200s",
             r->end == RECORD_FINISHED ? "finished"
             : is_stopped              ? "stopped by "
                                       : "no process writes here; the run has ended, or was interrupted",
             is_stopped ? record_last(r, RECORD_STOP)->text : "");
    return printable(text);
}

// ---- on a terminal ----

// Returns a picture of the run, a text for free().
static char* follow_picture_(const Follow_* f, const Screen* screen) {
    TextBuffer picture;
    char state[FOLLOW_STATE_BYTES_];
    text_buffer_open(&picture, "the picture of the run");
    follow_print_picture(picture.file, &f->follower.record,
                         follow_continues_(f) ? NULL : follow_state_(f, state), screen->columns,
                         screen->rows);
    return text_buffer_close(&picture);
}

static int follow_is_leave_(int key) { return key == 'q' || key == 'Q' || key == FOLLOW_CTRL_D_; }

// Leaves the last step on the first screen.
static void follow_say_last_(const Record* r) {
    if (r->num_steps > 0) {
        printf("%s: ", r->name);
        follow_print_step(stdout, r, r->num_steps - 1, 0);
        putchar('\n');
    }
}

// Draws what has changed, and once a second in any case, because the title has the time.
static void follow_on_screen_(Follow_* f) {
    Screen screen;
    double drawn_s = 0;
    int key = 0;
    screen_open(&screen);
    while (!follow_is_leave_(key) && !signals_stop()) {
        const int is_new = record_follow_on(&f->follower), is_resized = screen_measure(&screen);
        follow_look_(f);
        if (key == FOLLOW_CTRL_L_) {
            screen_forget(&screen);
        }
        if (is_new || is_resized || key == FOLLOW_CTRL_L_ || time_now_s() - drawn_s >= 1) {
            char* picture = follow_picture_(f, &screen);
            screen_draw(&screen, picture);
            free(picture);
            drawn_s = time_now_s();
        }
        key = screen_key(&screen, FOLLOW_PAUSE_S_);
    }
    screen_close(&screen);
    follow_say_last_(&f->follower.record);
}

// ---- as lines ----

// Progress of the lines.
typedef struct {
    double step;   // last step printed
    size_t events; // events printed
} FollowLines_;

// Prints the newest step up to `step`, if it is new.
static void follow_step_line_(const Record* r, FollowLines_* lines, double step, int is_now) {
    size_t at = r->num_steps;
    while (at > 0 && r->steps[at - 1].step > step) {
        at--;
    }
    if (at > 0 && r->steps[at - 1].step > lines->step) {
        lines->step = r->steps[at - 1].step;
        follow_print_step(stdout, r, at - 1, is_now);
        putchar('\n');
    }
}

// Starts with the last validation, if there is one.
static FollowLines_ follow_start_lines_(const Record* r) {
    const RecordEvent* val = record_last(r, RECORD_VAL);
    return (FollowLines_){val ? val->step - 1 : 0, val ? (size_t)(val - r->events) : 0};
}

// Prints the events since the last call, each after its step, and the newest step. A rollback or a
// resume shortens the log; then it continues with the last event.
static void follow_print_lines_(const Follow_* f, FollowLines_* lines) {
    const Record* r = &f->follower.record;
    const double last = r->num_steps ? r->steps[r->num_steps - 1].step : 0;
    if (lines->events > r->num_events || lines->step > last) {
        lines->events = r->num_events ? r->num_events - 1 : 0;
        lines->step = r->num_events ? r->events[lines->events].step : 0;
    }
    for (; lines->events < r->num_events; lines->events++) {
        const RecordEvent* event = &r->events[lines->events];
        follow_step_line_(r, lines, event->step, 0);
        follow_print_event(stdout, r, event, FOLLOW_COLUMNS_);
    }
    follow_step_line_(r, lines, last, follow_continues_(f));
    fflush(stdout);
}

// The last lines of a run may come after its process has left the directory.
static void follow_as_lines_(Follow_* f) {
    const struct timespec pause = {0, 500000000};
    FollowLines_ lines = follow_start_lines_(&f->follower.record);
    char state[FOLLOW_STATE_BYTES_];
    do {
        follow_look_(f);
        record_follow_on(&f->follower);
        follow_print_lines_(f, &lines);
        CHECK(!ferror(stdout), "standard output: cannot write: %s", strerror(errno));
    } while (follow_continues_(f) && !signals_stop() && nanosleep(&pause, NULL) <= 0);
    if (!follow_continues_(f)) {
        printable_line(stdout, "%s: %s", f->follower.record.name, follow_state_(f, state));
    }
}

void follow_run(const char* run) {
    Follow_* f = (Follow_*)check_alloc(1, sizeof(*f), "the run to follow");
    follow_open_(f, run);
    terminal_rewrites(STDOUT_FILENO) ? follow_on_screen_(f) : follow_as_lines_(f);
    record_follow_end(&f->follower);
    free(f);
}

#endif // FOLLOW_IMPLEMENTATION

#endif
