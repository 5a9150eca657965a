/*
scratch_file.h -- a nameless file for data that does not fit into memory, read and written by
background threads.

The file has its full size from the start, so a full disk shows before any work. It is unlinked
before it holds data, so a killed process leaves nothing behind. If the file system supports direct
I/O (O_DIRECT), the data bypasses the page cache, which would take up the memory that the file is
meant to save.

Offsets, sizes and addresses are multiples of SCRATCH_UNIT bytes. A failure in a thread ends the
program with one error that names the directory.
*/
#ifndef LLMC_SCRATCH_FILE_H
#define LLMC_SCRATCH_FILE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SCRATCH_UNIT = 4096 };

typedef struct Scratch Scratch;

// A batch of reads and writes in progress. Starts as zeros. Only the threads and scratch_wait look
// into it.
typedef struct {
    int parts; // not done yet
} ScratchWork;

// Creates a file of zeros, `bytes` long, in a directory, which is made if it is missing. `what`
// names the file in errors. Tries direct I/O with the first SCRATCH_UNIT bytes at `memory`, which
// become zeros: a driver may refuse some kinds of memory, such as a device's.
Scratch* scratch_open(const char* directory, size_t bytes, const char* what, void* memory);

// Closes the file. Call scratch_wait for all work before.
void scratch_close(Scratch* s);

// True if the file system takes direct I/O.
int scratch_is_direct(const Scratch* s);

// Start to read or write `bytes` at offset `at`. Until scratch_wait(s, work), the memory and that
// part of the file belong to the threads.
void scratch_read(Scratch* s, void* memory, size_t at, size_t bytes, ScratchWork* work);
void scratch_write(Scratch* s, const void* memory, size_t at, size_t bytes, ScratchWork* work);

// Waits until the work is done.
void scratch_wait(Scratch* s, const ScratchWork* work);

#ifdef __cplusplus
}
#endif

#ifdef SCRATCH_FILE_IMPLEMENTATION

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

// Four threads with parts of this size keep a drive busy; further parts wait in the queue.
enum { SCRATCH_THREADS_ = 4, SCRATCH_PART_ = 4 << 20, SCRATCH_QUEUE_ = 64 };

// One part of a read or write.
typedef struct {
    char* memory;
    size_t at, bytes;
    int is_write;
    ScratchWork* work;
} ScratchPart_;

struct Scratch {
    char directory[PATH_MAX];
    const char* what;
    int fd, is_direct;
    pthread_t threads[SCRATCH_THREADS_];
    pthread_mutex_t mutex;     // guards everything below, and ScratchWork
    pthread_cond_t has_parts;  // the queue has parts, or is_closing
    pthread_cond_t some_taken; // the queue has room
    pthread_cond_t some_done;  // a ScratchWork may be done
    ScratchPart_ queue[SCRATCH_QUEUE_];
    size_t first, count; // ring buffer
    int is_closing;
};

// ---- the threads ----

// Reads or writes a whole part.
static void scratch_move_(const Scratch* s, ScratchPart_ part) {
    const char* doing = part.is_write ? "write" : "read";
    while (part.bytes > 0) {
        const ssize_t moved = part.is_write ? pwrite(s->fd, part.memory, part.bytes, (off_t)part.at)
                                            : pread(s->fd, part.memory, part.bytes, (off_t)part.at);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        CHECK(moved > 0, "%s: cannot %s %s: %s", s->directory, doing, s->what,
              moved < 0 ? strerror(errno) : "the file has ended");
        part.memory += moved;
        part.at += (size_t)moved;
        part.bytes -= (size_t)moved;
    }
}

// Takes the next part off the queue, waiting for it. Returns 0 if none will follow. The caller
// holds the mutex.
static int scratch_take_(Scratch* s, ScratchPart_* part) {
    while (s->count == 0 && !s->is_closing) {
        pthread_cond_wait(&s->has_parts, &s->mutex);
    }
    if (s->count == 0) {
        return 0;
    }
    *part = s->queue[s->first];
    s->first = (s->first + 1) % SCRATCH_QUEUE_;
    s->count--;
    pthread_cond_signal(&s->some_taken);
    return 1;
}

static void* scratch_run_(void* scratch) {
    Scratch* s = (Scratch*)scratch;
    ScratchPart_ part;
    pthread_mutex_lock(&s->mutex);
    while (scratch_take_(s, &part)) {
        pthread_mutex_unlock(&s->mutex);
        scratch_move_(s, part);
        pthread_mutex_lock(&s->mutex);
        part.work->parts--;
        pthread_cond_signal(&s->some_done);
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

// ---- the caller ----

static void scratch_put_(Scratch* s, ScratchPart_ part) {
    pthread_mutex_lock(&s->mutex);
    while (s->count == SCRATCH_QUEUE_) {
        pthread_cond_wait(&s->some_taken, &s->mutex);
    }
    s->queue[(s->first + s->count) % SCRATCH_QUEUE_] = part;
    s->count++;
    part.work->parts++;
    pthread_cond_signal(&s->has_parts);
    pthread_mutex_unlock(&s->mutex);
}

// Queues a read or write part by part.
static void scratch_start_(Scratch* s, ScratchPart_ all) {
    assert((uintptr_t)all.memory % SCRATCH_UNIT == 0 && all.at % SCRATCH_UNIT == 0 &&
           all.bytes % SCRATCH_UNIT == 0);
    for (size_t i = 0; i < all.bytes; i += SCRATCH_PART_) {
        const size_t bytes = all.bytes - i < SCRATCH_PART_ ? all.bytes - i : SCRATCH_PART_;
        const ScratchPart_ part = {all.memory + i, all.at + i, bytes, all.is_write, all.work};
        scratch_put_(s, part);
    }
}

void scratch_read(Scratch* s, void* memory, size_t at, size_t bytes, ScratchWork* work) {
    const ScratchPart_ all = {(char*)memory, at, bytes, 0, work};
    scratch_start_(s, all);
}

void scratch_write(Scratch* s, const void* memory, size_t at, size_t bytes, ScratchWork* work) {
    const ScratchPart_ all = {(char*)memory, at, bytes, 1, work};
    scratch_start_(s, all);
}

void scratch_wait(Scratch* s, const ScratchWork* work) {
    pthread_mutex_lock(&s->mutex);
    while (work->parts > 0) {
        pthread_cond_wait(&s->some_done, &s->mutex);
    }
    pthread_mutex_unlock(&s->mutex);
}

int scratch_is_direct(const Scratch* s) { return s->is_direct; }

// ---- the file ----

// Reserves the file's space, or ends the program.
static void scratch_reserve_(const Scratch* s, size_t bytes) {
#ifdef __linux__
    const int error = posix_fallocate(s->fd, 0, (off_t)bytes);
#else
    const int error = ftruncate(s->fd, (off_t)bytes) == 0 ? 0 : errno;
#endif
    struct statvfs disk;
    const double free_bytes =
        statvfs(s->directory, &disk) == 0 ? (double)disk.f_bavail * (double)disk.f_frsize : 0;
    CHECK(error == 0, "%s: no room for %.1f MiB of %s, %.1f are free: %s", s->directory,
          (double)bytes / (1 << 20), s->what, free_bytes / (1 << 20), strerror(error));
}

// Turns direct I/O on if it works with this memory in both directions: some file systems accept the
// flag, then refuse to read. The file keeps its zeros.
static void scratch_try_direct_(Scratch* s, void* memory) {
#ifdef O_DIRECT
    const int flags = fcntl(s->fd, F_GETFL);
    if (fcntl(s->fd, F_SETFL, flags | O_DIRECT) == 0) {
        s->is_direct = pread(s->fd, memory, SCRATCH_UNIT, 0) == SCRATCH_UNIT &&
                       pwrite(s->fd, memory, SCRATCH_UNIT, 0) == SCRATCH_UNIT;
        if (!s->is_direct) {
            CHECK(fcntl(s->fd, F_SETFL, flags) == 0, "%s: fcntl: %s", s->directory, strerror(errno));
        }
    }
#else
    (void)memory;
#endif
}

Scratch* scratch_open(const char* directory, size_t bytes, const char* what, void* memory) {
    Scratch* s = (Scratch*)check_alloc(1, sizeof(*s), what);
    char path[PATH_MAX];
    s->what = what;
    file_make_directory(directory);
    file_path(s->directory, "%s", directory);
    file_path(path, "%s/scratch_XXXXXX", directory);
    s->fd = mkstemp(path);
    CHECK(s->fd >= 0, "%s: cannot make a file for %s: %s", directory, what, strerror(errno));
    CHECK(unlink(path) == 0, "%s: cannot unlink: %s", path, strerror(errno));
    CHECK(fcntl(s->fd, F_SETFD, FD_CLOEXEC) == 0, "%s: fcntl: %s", directory, strerror(errno));
    scratch_reserve_(s, bytes);
    scratch_try_direct_(s, memory);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->has_parts, NULL);
    pthread_cond_init(&s->some_taken, NULL);
    pthread_cond_init(&s->some_done, NULL);
    for (int t = 0; t < SCRATCH_THREADS_; t++) {
        const int error = pthread_create(&s->threads[t], NULL, scratch_run_, s);
        CHECK(error == 0, "%s: no thread for %s: %s", directory, what, strerror(error));
    }
    return s;
}

void scratch_close(Scratch* s) {
    pthread_mutex_lock(&s->mutex);
    s->is_closing = 1;
    pthread_cond_broadcast(&s->has_parts);
    pthread_mutex_unlock(&s->mutex);
    for (int t = 0; t < SCRATCH_THREADS_; t++) {
        pthread_join(s->threads[t], NULL);
    }
    pthread_cond_destroy(&s->some_done);
    pthread_cond_destroy(&s->some_taken);
    pthread_cond_destroy(&s->has_parts);
    pthread_mutex_destroy(&s->mutex);
    close(s->fd);
    free(s);
}

#endif // SCRATCH_FILE_IMPLEMENTATION

#endif
