/*
detach.h -- --detach: a run that continues without the terminal that started it.

The program forks before it has threads, a GPU or files, none of which outlive a fork. The child is
the run. It prints to the terminal until all checks have passed and its log is open; then it leaves
the terminal, and prints to OUT/output.txt. The parent only waits for that: it says how to look and
to stop, and ends with success, or ends as the child if the run does not come so far.
*/
#ifndef LLMC_DETACH_H
#define LLMC_DETACH_H

#include <stdio.h>

#include "llmc/log/log.h"
#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// Forks if --detach is given, and returns in the child; refuses it where it cannot work. Returns
// the descriptor for detach_leave; -1: not detached.
int detach_fork(const Options* options, const char* program);

// Leaves the terminal: standard output, `results` (maybe the same) and standard error continue in
// the directory of the run, and the parent ends. Does nothing with -1.
void detach_leave(int parent, RunLog* log, FILE* results, const Options* options, const char* program);

#ifdef __cplusplus
}
#endif

#ifdef DETACH_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/base/signals.h"
#include "llmc/log/log_files.h"
#include "llmc/setup/launcher.h"

extern char** environ;

static void detach_check_(const Options* o) {
    if (!o->out[0]) {
        die_usage("--detach needs a directory for the output of the run; add --out DIR");
    }
    if (options_only_look(o)) {
        die_usage("--detach is for a run; --plan, --print-config and --verify-data only look");
    }
    const Launcher launch = launcher_find_in(o, (const char* const*)environ);
    if (launch.launcher[0]) {
        die_usage(
            "--detach is for one process; this one belongs to %s, which waits for its end: detach that, as "
            "in nohup %s ... &, or in tmux",
            launch.launcher, strcmp(launch.launcher, "--rank") == 0 ? "train_gpt2" : launch.launcher);
    }
}

// ---- the parent ----

// Waits until the run has left the terminal. Returns 0 if it has ended before. Passes on signals
// that do not reach both processes, as those of the keyboard do.
static int detach_wait_(int child, pid_t run) {
    struct pollfd left = {child, POLLIN, 0};
    char byte;
    int passed = 0;
    while (poll(&left, 1, -1) < 0) {
        const int signal = signals_stop();
        if (signal && signal != SIGINT && !passed) {
            kill(run, signal);
            passed = 1;
        }
    }
    return read(child, &byte, 1) == 1;
}

// Ends the parent as the run has ended.
static void detach_end_as_(pid_t run) {
    int status = 0;
    while (waitpid(run, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFSIGNALED(status)) {
        signals_end_now(); // by the same signal, if this process got it too
    }
    exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

static void detach_print_command_(const char* what, const char* program, const Options* o,
                                  const char* option) {
    printf("%s: ", what);
    options_print_program(stdout, program);
    putchar(' ');
    options_print_setting(stdout, o, option);
    putchar('\n');
}

static void detach_say_(pid_t run, const char* program, const Options* options) {
    Options o = *options;
    o.follow = o.stop_run = o.out;
    printable_line(stdout, "the run continues in the background (pid %lld) and prints to %s/" LOG_OUTPUT,
                   (long long)run, o.out);
    detach_print_command_("look", program, &o, "follow");
    detach_print_command_("stop", program, &o, "stop-run");
}

int detach_fork(const Options* options, const char* program) {
    int ends[2];
    if (!options->detach) {
        return -1;
    }
    detach_check_(options);
    file_flush_standard();
    CHECK(pipe(ends) == 0, "--detach: no pipe: %s", strerror(errno));
    const pid_t run = fork();
    CHECK(run >= 0, "--detach: no process: %s", strerror(errno));
    close(ends[run != 0]);
    if (run == 0) {
        fcntl(ends[1], F_SETFD, FD_CLOEXEC);
        return ends[1];
    }
    if (!detach_wait_(ends[0], run)) {
        detach_end_as_(run);
    }
    detach_say_(run, program, options);
    file_flush_standard();
    exit(EXIT_SUCCESS);
}

// ---- the run ----

// Continues a file descriptor in another one.
static void detach_move_(int from, int to) {
    CHECK(dup2(to, from) >= 0, "--detach: cannot leave the terminal: %s", strerror(errno));
}

// Starts the output of the run: its first lines were for the terminal.
static void detach_print_banner_(const Options* options, const char* program) {
    Options o = *options;
    o.detach = 0;
    options_print_banner(stdout, &o, program);
    fflush(stdout);
}

void detach_leave(int parent, RunLog* log, FILE* results, const Options* options, const char* program) {
    char path[PATH_MAX];
    if (parent < 0) {
        return;
    }
    log_leave_terminal(log);
    fflush(stdout);
    file_join(path, options->out, LOG_OUTPUT);
    const int output = log_file_append(path), nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(nothing >= 0, "/dev/null: cannot read: %s", strerror(errno));
    setsid();
    detach_move_(STDIN_FILENO, nothing);
    detach_move_(STDERR_FILENO, output);
    detach_move_(fileno(results), output);
    if (results == stdout) {
        detach_print_banner_(options, program);
    }
    close(output);
    close(nothing);
    CHECK(write(parent, "", 1) == 1, "--detach: the process that started the run is gone: %s",
          strerror(errno));
    close(parent);
}

#endif // DETACH_IMPLEMENTATION

#endif
