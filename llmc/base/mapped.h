/*
mapped.h -- reading files that are mapped into memory: one that somebody makes shorter meanwhile is an error
of whoever reads it, not the end of the program.

Reading behind the end of a mapped file raises SIGBUS. mapped_try calls a function that reads: a SIGBUS in it,
in this thread, ends the function at once, and so does mapped_refuse, for what was read and cannot be used.
The function is left where it stands, as by longjmp: it must not hold a lock, and memory that it took is lost.
A guard inside of another one has its place; one in a parallel region of OpenMP must be inside of it.

What is cut off inside of the file's last page reads as zeros, and nobody notices: at most 4095 bytes, as a
rule.

A handler cannot be given the guard as an argument, so it is a variable of the thread.

defines: MappedResult, mapped_open, mapped_try, mapped_refuse
*/
#ifndef LLMC_MAPPED_H
#define LLMC_MAPPED_H

#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>

typedef enum {
    MAPPED_READ,   // to its end
    MAPPED_GONE,   // the file is shorter than it was
    MAPPED_REFUSED // by mapped_refuse
} MappedResult;

typedef struct {
    sigjmp_buf jump;
    MappedResult result;
    const void* where;
} MappedGuard_;

static __thread MappedGuard_* volatile mapped_guard_ = NULL; // the innermost one of this thread

static inline void mapped_leave_(MappedGuard_* guard, MappedResult result, const void* where) {
    guard->result = result;
    guard->where = where;
    siglongjmp(guard->jump, 1);
}

static inline void mapped_handle_(int signal_number, siginfo_t* info, void* context) {
    (void)context;
    if (mapped_guard_) {
        mapped_leave_(mapped_guard_, MAPPED_GONE, info->si_addr);
    }
    signal(signal_number, SIG_DFL); // not ours
    raise(signal_number);
}

// SIGBUS is handled from now on; may be called again. Threads that read must not block it.
static inline void mapped_open(void) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = mapped_handle_;
    action.sa_flags = SA_SIGINFO | SA_NODEFER; // the handler does not return, so nobody would unblock it
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

// Calls read(context). Unless it came to its end, sets *where to the address that was read.
static inline MappedResult mapped_try(void (*read)(void*), void* context, const void** where) {
    MappedGuard_ guard;
    MappedGuard_* const outer = mapped_guard_;
    guard.result = MAPPED_READ;
    guard.where = NULL;
    if (sigsetjmp(guard.jump, 0) == 0) { // without the mask of signals, which would be a system call
        mapped_guard_ = &guard;
        read(context);
    }
    mapped_guard_ = outer;
    *where = guard.where;
    return guard.result;
}

// What was read at `where` cannot be used. Returns if nobody called mapped_try.
static inline void mapped_refuse(const void* where) {
    if (mapped_guard_) {
        mapped_leave_(mapped_guard_, MAPPED_REFUSED, where);
    }
}

#endif
