/*
mapped_file.h -- reading files that are mapped into memory: one that somebody makes shorter
meanwhile is an error of whoever reads it, not the end of the program.

Reading behind the end of a mapped file raises SIGBUS. mapped_try calls a function that reads: a
SIGBUS in it, in this thread, ends the function at once, and so does mapped_refuse, for what was
read and cannot be used. The function is left where it stands, as by longjmp: it must not hold a
lock, and memory that it took is lost. A guard inside of another one has its place; one in a
parallel region of OpenMP must be inside of it.

What is cut off inside of the file's last page reads as zeros, and nobody notices: at most 4095
bytes, as a rule.

A handler cannot be given the guard as an argument, so it is a variable of the thread.

Some file systems map no files: FUSE with direct_io, 9p without a cache. Their files are read into
memory instead.
*/
#ifndef LLMC_MAPPED_FILE_H
#define LLMC_MAPPED_FILE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// The first `bytes` > 0 of a file, which is open as fd, to be read. NULL, with the error, if they
// cannot be. munmap frees them. MADV_DONTNEED is safe.
void* mapped_file(int fd, size_t bytes, const char* path, char* error);

typedef enum {
    MAPPED_READ,   // to its end
    MAPPED_GONE,   // the file is shorter than it was
    MAPPED_REFUSED // by mapped_refuse
} MappedResult;

// SIGBUS is handled from now on; may be called again. Threads that read must not block it.
void mapped_open(void);

// Calls read(context). Unless it came to its end, sets *where to the address that was read.
MappedResult mapped_try(void (*read)(void*), void* context, const void** where);

// What was read at `where` cannot be used. Returns if nobody called mapped_try.
void mapped_refuse(const void* where);

#ifdef __cplusplus
}
#endif

#ifdef MAPPED_FILE_IMPLEMENTATION

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/printable.h"

// Fills memory from a file. Returns 0 with the error if the file has fewer bytes.
static int mapped_fill_(char* memory, int fd, size_t bytes, const char* path, char* error) {
    for (size_t at = 0; at < bytes;) {
        const ssize_t got = pread(fd, memory + at, bytes - at, (off_t)at);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return error_set(error, path, "cannot read byte %zu of %zu: %s", at, bytes,
                             got < 0 ? strerror(errno) : "the file ends");
        }
        at += (size_t)got;
    }
    return 1;
}

// Shared, as memory of a file is: pages of private memory would be zero after MADV_DONTNEED.
static void* mapped_copy_(int fd, size_t bytes, const char* path, char* error) {
    const char* reason = strerror(errno); // of mmap
    void* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        error_set(error, path,
                  "its file system cannot map files (mmap: %s), and there is no memory for %zu bytes of it",
                  reason, bytes);
        return NULL;
    }
    printable_line(stderr,
                   "note: %s: its file system cannot map files (mmap: %s): read into memory, %.0f MiB", path,
                   reason, (double)bytes / (1 << 20));
    if (!mapped_fill_((char*)memory, fd, bytes, path, error)) {
        munmap(memory, bytes);
        return NULL;
    }
    return memory;
}

void* mapped_file(int fd, size_t bytes, const char* path, char* error) {
    void* memory = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (memory != MAP_FAILED) {
        return memory;
    }
    if (errno == ENOMEM || errno == EAGAIN ||
        errno == ENFILE) { // the machine's answer, not the file system's
        error_set(error, path, "cannot map %zu bytes (mmap): %s", bytes, strerror(errno));
        return NULL;
    }
    return mapped_copy_(fd, bytes, path, error);
}

typedef struct {
    sigjmp_buf jump;
    MappedResult result;
    const void* where;
} MappedGuard_;

static __thread MappedGuard_* volatile mapped_guard_ = NULL; // the innermost one of this thread

static void mapped_leave_(MappedGuard_* guard, MappedResult result, const void* where) {
    guard->result = result;
    guard->where = where;
    siglongjmp(guard->jump, 1);
}

static void mapped_handle_(int signal_number, siginfo_t* info, void* context) {
    (void)context;
    if (mapped_guard_) {
        mapped_leave_(mapped_guard_, MAPPED_GONE, info->si_addr);
    }
    signal(signal_number, SIG_DFL); // not ours
    raise(signal_number);
}

void mapped_open(void) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = mapped_handle_;
    action.sa_flags = SA_SIGINFO | SA_NODEFER; // the handler does not return, so nobody would unblock it
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

MappedResult mapped_try(void (*read)(void*), void* context, const void** where) {
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

void mapped_refuse(const void* where) {
    if (mapped_guard_) {
        mapped_leave_(mapped_guard_, MAPPED_REFUSED, where);
    }
}

#endif // MAPPED_FILE_IMPLEMENTATION

#endif
