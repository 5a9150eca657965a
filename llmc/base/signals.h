/*
signals.h -- signals that ask a run to save, or to save and stop. The program notices them from its
start, and acts on them where it is safe: between two steps, batches, or blocks of text.

    SIGTERM, SIGINT, SIGHUP, SIGXCPU    save and stop; a second SIGINT stops at once
    SIGUSR1                             save and continue
    SIGUSR2                             save and stop: mpirun forwards it to all ranks, but kills
                                        them two seconds after SIGTERM
    SIGPIPE, SIGXFSZ                    ignored: the write that causes them fails with an error

SIGINT and SIGHUP stay ignored if the parent had ignored them (nohup, & in a script).

A handler may only set a flag, and takes no such argument; nor do functions called by exit(). So the
program has these variables that are neither constant nor passed in, and no others: the three below,
a guard in mapped_file.h, a name in encoded_text.h, the list of unfinished files in file.h, and
check_end and a thread's clean-up function in check.h.
*/
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H

#ifdef __cplusplus
extern "C" {
#endif

// Ignores SIGPIPE and SIGXFSZ, so that a write to a closed pipe or beyond a limit fails with an
// error. Enough for a program that only writes files.
void signals_open_writes(void);

// Notices the signals above from now on. Interrupted reads and writes are continued.
void signals_open(void);

// Lets the signals above end the program again. One that was already noticed ends it at once.
void signals_release(void);

// Returns the signal that asked to stop, or 0.
int signals_stop(void);

// True if a save was asked for since the last call.
int signals_take_save(void);

const char* signals_name(int signal);

// If a signal asked to stop, exits, and ends the program by that signal.
void signals_end_now(void);

// Before the first step, when nothing needs saving: if a signal asked to stop, prints that (`doing`
// completes "stopped by SIGTERM while ..."), exits, and ends as the unhandled signal would.
void signals_end(const char* doing);

#ifdef __cplusplus
}
#endif

#ifdef SIGNALS_IMPLEMENTATION

#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static volatile sig_atomic_t signals_stop_ = 0; // signal that asked to stop
static volatile sig_atomic_t signals_save_ = 0;
static volatile sig_atomic_t signals_last_ = 0; // signal that the program ends by

static void signals_handle_(int signal) {
    if (signal == SIGUSR1) {
        signals_save_ = 1;
    } else {
        signals_stop_ = signal;
    }
}

static void signals_install_(int signal, void (*handler)(int), int flags) {
    struct sigaction action, before;
    sigaction(signal, NULL, &before);
    if ((signal == SIGINT || signal == SIGHUP) && before.sa_handler == SIG_IGN) {
        return;
    }
    memset(&action, 0, sizeof(action));
    action.sa_handler = handler;
    action.sa_flags = flags;
    sigemptyset(&action.sa_mask);
    sigaction(signal, &action, NULL);
}

void signals_open_writes(void) {
    signals_install_(SIGXFSZ, SIG_IGN, 0);
    signals_install_(SIGPIPE, SIG_IGN, 0);
}

// Called last by exit().
static void signals_die_(void) {
    if (signals_last_) {
        fflush(NULL);
        signals_install_(signals_last_, SIG_DFL, 0);
        raise(signals_last_);
    }
}

void signals_open(void) {
    const int stop_signals[] = {SIGTERM, SIGHUP, SIGXCPU, SIGUSR2};
    atexit(signals_die_);
    signals_open_writes();
    for (size_t i = 0; i < sizeof(stop_signals) / sizeof(stop_signals[0]); i++) {
        signals_install_(stop_signals[i], signals_handle_, SA_RESTART);
    }
    signals_install_(SIGUSR1, signals_handle_, SA_RESTART);
    signals_install_(SIGINT, signals_handle_,
                     (int)(SA_RESTART | SA_RESETHAND)); // the default action handles a second one
}

void signals_release(void) {
    const int noticed[] = {SIGTERM, SIGHUP, SIGXCPU, SIGUSR1, SIGUSR2, SIGINT};
    for (size_t i = 0; i < sizeof(noticed) / sizeof(noticed[0]); i++) {
        signals_install_(noticed[i], SIG_DFL, 0);
    }
    signals_end_now();
}

int signals_stop(void) { return signals_stop_; }

int signals_take_save(void) {
    const int asked = signals_save_;
    signals_save_ = 0;
    return asked;
}

const char* signals_name(int signal) {
    return signal == SIGINT    ? "SIGINT"
           : signal == SIGHUP  ? "SIGHUP"
           : signal == SIGXCPU ? "SIGXCPU"
           : signal == SIGUSR2 ? "SIGUSR2"
                               : "SIGTERM";
}

void signals_end_now(void) {
    if (signals_stop()) {
        signals_last_ = signals_stop();
        exit(EXIT_FAILURE);
    }
}

void signals_end(const char* doing) {
    if (signals_stop()) {
        fflush(stdout);
        fprintf(stderr, "stopped by %s while %s\n", signals_name(signals_stop()), doing);
        signals_end_now();
    }
}

#endif // SIGNALS_IMPLEMENTATION

#endif
