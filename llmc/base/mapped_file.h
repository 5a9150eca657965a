/*
mapped_file.h -- files mapped into memory for reading. If a file is truncated while it is mapped,
its reader gets an error; the program does not crash.

Reading past the end of a mapped file raises SIGBUS. mapped_try calls a function that reads: a
SIGBUS in it, in this thread, ends the function at once. So does mapped_refuse, for data that cannot
be used. The function is left as by longjmp, so it must not hold a lock, and memory it allocated is
lost. An inner mapped_try replaces the outer one until it returns; in a parallel region of OpenMP,
call mapped_try inside the region.

If a file is cut inside its last page, the rest of the page reads as zeros, which nobody notices:
usually at most 4095 bytes.

A signal handler takes no arguments, so the guard is a variable of the thread.

Some file systems cannot map files: FUSE with direct_io, 9p without a cache. Their files are read
into memory instead.
*/
#ifndef LLMC_MAPPED_FILE_H
#define LLMC_MAPPED_FILE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Maps the first `bytes` > 0 of the open file fd for reading. Returns NULL with the error if it
// cannot. munmap frees them. MADV_DONTNEED is safe.
void* mapped_file(int fd, size_t bytes, const char* path, char* error);

// Maps a whole file; an empty one has no map. Returns 0 with the error if it cannot.
int mapped_path(const char* path, unsigned char** map, size_t* bytes, char* error);

typedef enum {
    MAPPED_READ,   // finished
    MAPPED_GONE,   // the file has become shorter
    MAPPED_REFUSED // ended by mapped_refuse
} MappedResult;

// Handles SIGBUS from now on; may be called again. Threads that read must not block it.
void mapped_open(void);

// Calls read(context). Unless it finishes, sets *where to the address that it read.
MappedResult mapped_try(void (*read)(void*), void* context, const void** where);

// Ends the function called by mapped_try: the data at `where` cannot be used. Returns if no
// mapped_try is active.
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
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
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

// Reads the file into shared memory: private pages would be zero after MADV_DONTNEED.
static void* mapped_copy_(int fd, size_t bytes, const char* path, char* error) {
    const char* reason = strerror(errno); // mmap's error
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
        errno == ENFILE) { // the machine's failure, not the file system's
        error_set(error, path, "cannot map %zu bytes (mmap): %s", bytes, strerror(errno));
        return NULL;
    }
    return mapped_copy_(fd, bytes, path, error);
}

int mapped_path(const char* path, unsigned char** map, size_t* bytes, char* error) {
    struct stat info;
    const int fd = file_open_regular(path, error);
    if (fd < 0) {
        return 0;
    }
    int ok = fstat(fd, &info) == 0 || error_set(error, path, "cannot read its size: %s", strerror(errno));
    if (ok && info.st_size > 0) {
        *map = (unsigned char*)mapped_file(fd, (size_t)info.st_size, path, error);
        ok = *map != NULL;
    }
    close(fd); // the mapping stays
    *bytes = ok ? (size_t)info.st_size : 0;
    return ok;
}

typedef struct {
    sigjmp_buf jump;
    MappedResult result;
    const void* where;
} MappedGuard_;

static __thread MappedGuard_* volatile mapped_guard_ = NULL; // innermost guard of this thread

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
    signal(signal_number, SIG_DFL); // not from a guarded read
    raise(signal_number);
}

void mapped_open(void) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = mapped_handle_;
    // the handler does not return, so nothing would unblock it
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

MappedResult mapped_try(void (*read)(void*), void* context, const void** where) {
    MappedGuard_ guard;
    MappedGuard_* const outer = mapped_guard_;
    guard.result = MAPPED_READ;
    guard.where = NULL;
    // does not save the signal mask, which would be a system call
    if (sigsetjmp(guard.jump, 0) == 0) {
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
