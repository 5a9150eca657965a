/*
lock.h -- one writer at a time, by a lock file that says "host, pid 123" while someone holds it.

The lock is flock's, which ends with the process. On a file system without flock, the lock belongs
to whoever creates the file. If the process it names ran on this host and has ended, the lock is
free; a process on another host cannot be checked, so the error tells the user what to remove.
*/
#ifndef LLMC_LOCK_H
#define LLMC_LOCK_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    // lock file; removed when the lock is released or the program ends
    const char* path;
    const char* place;  // locked directory or file, for messages
    const char* writer; // kind of writer, for messages: "run"
    double
        // time for a killed process, which keeps its lock until the system has reclaimed its memory
        wait_s;
} LockPlace;

typedef struct Lock Lock;

enum { LOCK_NAME_BYTES = 128 };

// Sets the name of this process, "host, pid 123".
void lock_name(char name[LOCK_NAME_BYTES]);

// State of a lock for a process that does not want it.
typedef enum {
    LOCK_FREE,
    LOCK_HELD,
    LOCK_UNKNOWN // a process on another host had it; this host cannot tell if it still has
} LockState;

// Returns the state of a lock, and sets `holder` to the name in its file; "": none.
LockState lock_look(const char* path, char holder[LOCK_NAME_BYTES]);

// Takes the lock; ends the program if someone else keeps it.
Lock* lock_take(const LockPlace* place);

// Releases the lock; NULL is ignored.
void lock_release(Lock* lock);

#ifdef __cplusplus
}
#endif

#ifdef LOCK_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"

#define LOCK_TURN_S_ 0.05
#define LOCK_PID_ ", pid "
enum { LOCK_EMPTY_TURNS_ = 20 }; // tries after which a file without a name is free

struct Lock {
    int fd;
    FileWriter file; // registered with file.h, which removes it when the program ends
};

// "host, pid 123"; "" if nobody
typedef struct {
    char text[LOCK_NAME_BYTES];
} LockName_;

void lock_name(char name[LOCK_NAME_BYTES]) {
    char host[64] = "";
    gethostname(host, sizeof(host) - 1);
    snprintf(name, LOCK_NAME_BYTES, "%s" LOCK_PID_ "%lld", host, (long long)getpid());
}

static LockName_ lock_myself_(void) {
    LockName_ me;
    lock_name(me.text);
    return me;
}

// Returns the name in an open lock file.
static LockName_ lock_holder_(int fd) {
    LockName_ holder;
    char text[LOCK_NAME_BYTES];
    const ssize_t length = pread(fd, text, sizeof(text) - 1, 0);
    text[length > 0 ? length : 0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    printable_copy(holder.text, sizeof(holder.text), text);
    return holder;
}

// Returns the process that it names, if that is one of this host; else 0.
static pid_t lock_local_pid_(const LockName_* holder) {
    const LockName_ me = lock_myself_();
    const char* pid = strstr(holder->text, LOCK_PID_);
    const size_t same = pid ? (size_t)(pid - holder->text) + strlen(LOCK_PID_) : 0;
    return pid && strncmp(holder->text, me.text, same) == 0 ? (pid_t)atoll(holder->text + same) : 0;
}

// True if it names a process of this host that has ended, or this one.
static int lock_is_over_(const LockName_* holder) {
    const pid_t other = lock_local_pid_(holder);
    return other == getpid() || (other > 0 && kill(other, 0) != 0 && errno == ESRCH);
}

// Opens the lock file. Sets *is_new if it did not exist.
static int lock_open_(const LockPlace* place, int* is_new) {
    const int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    struct stat info;
    int fd = open(place->path, flags | O_CREAT | O_EXCL, 0666);
    *is_new = fd >= 0;
    // it may be removed in between
    for (int tries = 0; fd < 0 && errno == EEXIST && tries < 2; tries++) {
        fd = open(place->path, tries ? flags | O_CREAT : flags, 0666);
    }
    CHECK(fd >= 0 || errno != ELOOP, "%s: a symbolic link, wanted a lock file or none", place->path);
    CHECK(fd >= 0 && fstat(fd, &info) == 0, "%s: cannot write: %s", place->path, strerror(errno));
    CHECK(S_ISREG(info.st_mode), "%s: not a regular file, wanted a lock file", place->path);
    const LockName_ holder = lock_holder_(fd);
    CHECK(!info.st_size || strstr(holder.text, LOCK_PID_),
          "%s: no lock file, but it has the name of one; move it away", place->path);
    return fd;
}

// True if the open file still has this name: its last holder may have removed it.
static int lock_is_there_(int fd, const char* path) {
    struct stat mine, there;
    return fstat(fd, &mine) == 0 && stat(path, &there) == 0 && mine.st_dev == there.st_dev &&
           mine.st_ino == there.st_ino;
}

static Lock* lock_have_(int fd, const LockPlace* place) {
    const LockName_ me = lock_myself_();
    Lock* lock = (Lock*)check_alloc(1, sizeof(Lock), place->path);
    lock->fd = fd;
    file_remove_at_exit(&lock->file, place->path);
    const int is_written = ftruncate(fd, 0) == 0 && dprintf(fd, "%s\n", me.text) > 0;
    CHECK(is_written, "%s: cannot write: %s", place->path, strerror(errno));
    return lock;
}

// Tries once. Returns NULL if someone else holds the lock, and sets *holder; clears *is_asked if
// the system has no locks.
static Lock* lock_try_(const LockPlace* place, int turn, LockName_* holder, int* is_asked) {
    int is_new;
    const int fd = lock_open_(place, &is_new);
    const FileLock got = file_try_lock(fd, 0);
    *is_asked = got != FILE_LOCK_UNKNOWN;
    *holder = lock_holder_(fd);
    if ((got == FILE_LOCK_TAKEN && lock_is_there_(fd, place->path)) || (!*is_asked && is_new)) {
        return lock_have_(fd, place);
    }
    const int is_nobodys = holder->text[0] ? lock_is_over_(holder) : turn >= LOCK_EMPTY_TURNS_;
    if (!*is_asked && is_nobodys && lock_is_there_(fd, place->path)) {
        unlink(place->path);
    }
    close(fd);
    return NULL;
}

// Without locks, or if another host does not share them, only a process of this host is known.
LockState lock_look(const char* path, char holder[LOCK_NAME_BYTES]) {
    const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, writes = open(path, O_RDWR | flags);
    const int fd = writes >= 0 ? writes : open(path, O_RDONLY | flags);
    const FileLock got = fd >= 0 ? file_try_lock(fd, 0) : FILE_LOCK_UNKNOWN;
    const LockName_ name = fd >= 0 ? lock_holder_(fd) : (LockName_){""};
    const int is_local = lock_local_pid_(&name) > 0;
    memcpy(holder, name.text, sizeof(name.text));
    if (fd >= 0) {
        close(fd);
    }
    if (got == FILE_LOCK_HELD) {
        return LOCK_HELD;
    }
    if (!name.text[0] || (is_local && (got == FILE_LOCK_TAKEN || lock_is_over_(&name)))) {
        return LOCK_FREE;
    }
    return is_local ? LOCK_HELD : LOCK_UNKNOWN;
}

Lock* lock_take(const LockPlace* place) {
    const struct timespec pause = {0, (long)(1e9 * LOCK_TURN_S_)};
    LockName_ holder;
    Lock* lock;
    int is_asked;
    for (int turn = 0; !(lock = lock_try_(place, turn, &holder, &is_asked)); turn++) {
        char name[LOCK_NAME_BYTES + 4] = "";
        if (holder.text[0]) {
            snprintf(name, sizeof(name), " (%s)", holder.text);
        }
        CHECK(turn * LOCK_TURN_S_ < place->wait_s, "%s: another %s is writing here%s%s%s", place->place,
              place->writer, name, is_asked ? "" : "; if it is over, remove ", is_asked ? "" : place->path);
        if (turn == 1) {
            printf("%s: another %s is writing here%s: waiting %g s for its end\n", place->place,
                   place->writer, name, place->wait_s);
            fflush(stdout);
        }
        nanosleep(&pause, NULL);
    }
    if (!is_asked) {
        printable_line(stderr, "note: %s: the file system has no locks, so whoever creates %s has it",
                       place->place, place->path);
    }
    return lock;
}

void lock_release(Lock* lock) {
    if (lock) {
        file_discard(&lock->file); // before the lock is free
        close(lock->fd);
        free(lock);
    }
}

#endif // LOCK_IMPLEMENTATION

#endif
