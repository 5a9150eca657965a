/*
signals.h -- signals that ask a run to save, or to save and stop, noticed between two steps.

    SIGTERM, SIGINT    save and stop; a second SIGINT stops at once
    SIGUSR1            save and go on

A handler may only set a flag, and the flag cannot be an argument: these two are the only variables of the
program that are neither constant nor passed in. A file that meets a size limit (SIGXFSZ) is an error of the
write, not the end of the program.

needs:   nothing
defines: signals_open, signals_stop, signals_take_save, signals_name
*/
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H

#include <signal.h>
#include <string.h>

static volatile sig_atomic_t signals_stop_ = 0; // the signal that asked to stop
static volatile sig_atomic_t signals_save_ = 0;

static inline void signals_handle_(int signal) {
    if (signal == SIGUSR1) {
        signals_save_ = 1;
    } else {
        signals_stop_ = signal;
    }
}

static inline void signals_install_(int signal, void (*handler)(int), int flags) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = handler;
    action.sa_flags = flags;
    sigemptyset(&action.sa_mask);
    sigaction(signal, &action, NULL);
}

// From now on the signals above are noticed. Reads and writes that they interrupt go on.
static inline void signals_open(void) {
    signals_install_(SIGTERM, signals_handle_, SA_RESTART);
    signals_install_(SIGUSR1, signals_handle_, SA_RESTART);
    signals_install_(SIGINT, signals_handle_,
                     (int)(SA_RESTART | SA_RESETHAND)); // the second one is the system's
    signals_install_(SIGXFSZ, SIG_IGN, 0);
}

// The signal that asked to stop, or 0.
static inline int signals_stop(void) { return signals_stop_; }

// Whether a save was asked for since the last call.
static inline int signals_take_save(void) {
    const int asked = signals_save_;
    signals_save_ = 0;
    return asked;
}

static inline const char* signals_name(int signal) { return signal == SIGINT ? "SIGINT" : "SIGTERM"; }

#endif
