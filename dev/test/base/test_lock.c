// test_lock.c -- lock.h: only one holder at a time, on file systems with and without locks; the
// message names it.
#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#include "llmc/base/check.h"
#include "llmc/base/lock.h"

#include "dev/test/lib/test.h"

// Instead of libc's: with no_locks, those of a file system that has none.
static int no_locks = 0;
int flock(int fd, int operation) {
    if (no_locks) {
        errno = ENOLCK;
        return -1;
    }
    return (int)syscall(SYS_flock, fd, operation);
}

static void pause_ms(long ms) {
    const struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

static LockPlace place_of(const char* path, double wait_s) {
    const LockPlace place = {path, "there", "run", wait_s};
    return place;
}

// In a process of its own, which says on standard output that it waits.
static void take_at(const LockPlace* place) {
    if (!freopen("/dev/null", "w", stdout)) {
        _exit(EXIT_FAILURE);
    }
    lock_take(place);
}

static void take(const void* path) {
    const LockPlace place = place_of((const char*)path, 0.3);
    take_at(&place);
    exit(EXIT_SUCCESS); // which removes the file
}

static void take_patiently(const void* path) {
    const LockPlace place = place_of((const char*)path, 5);
    take_at(&place);
    exit(EXIT_SUCCESS);
}

// A child that has the lock until it is killed.
static pid_t start_holder(const char* path) {
    const pid_t child = fork();
    if (child == 0) {
        const LockPlace place = place_of(path, 0.3);
        lock_take(&place);
        for (;;) {
            pause();
        }
    }
    for (int i = 0; i < 500; i++) {
        struct stat info;
        if (stat(path, &info) == 0 && info.st_size > 0) {
            break;
        }
        pause_ms(10);
    }
    return child;
}

static void test_one_at_a_time(const char* path) {
    const LockPlace place = place_of(path, 0.3);
    char words[128];
    Lock* lock = lock_take(&place);
    EXPECT(access(path, F_OK) == 0, "a lock file");
    lock_release(lock);
    EXPECT(access(path, F_OK) != 0, "is removed");
    EXPECT(test_dies(take, path, EXIT_SUCCESS, ""), "by another process");
    EXPECT(access(path, F_OK) != 0, "whose end removes it");
    const pid_t holder = start_holder(path);
    snprintf(words, sizeof(words), "there: another run is writing here (|, pid %d)%s", (int)holder,
             no_locks ? "|; if it is over, remove |" : "");
    EXPECT(test_dies(take, path, EXIT_FAILURE, words), "held");
    EXPECT(access(path, F_OK) == 0, "the refused one leaves the file");
    EXPECT(test_dies(take, path, EXIT_FAILURE, words), "still held");
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    EXPECT(access(path, F_OK) == 0, "a killed process leaves its file");
    EXPECT(test_dies(take, path, EXIT_SUCCESS, ""), "which is nobody's");
}

// Who waits for a process that ends has the lock after it.
static void test_wait(const char* path) {
    const LockPlace place = place_of(path, 20);
    const pid_t holder = start_holder(path);
    const pid_t waiting = fork();
    if (waiting == 0) {
        take_at(&place);
        exit(EXIT_SUCCESS);
    }
    pause_ms(300);
    EXPECT(waitpid(waiting, NULL, WNOHANG) == 0, "it waits");
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    int status = -1;
    waitpid(waiting, &status, 0);
    EXPECT(status == 0, "status %d", status);
}

static void test_files_of_others(void) {
    const char* path = test_write("mine.lock", "a text\n", 7);
    EXPECT(test_dies(take, path, EXIT_FAILURE, "mine.lock: no lock file"), "a text");
    const TestFile whole = test_read(path);
    EXPECT(whole.bytes == 7, "it is there");
    free(whole.data);
    mkfifo(test_path("fifo.lock"), 0600);
    EXPECT(test_dies(take, test_path("fifo.lock"), EXIT_FAILURE, "fifo.lock: not a regular file"), "a FIFO");
    symlink("mine.lock", test_path("link.lock"));
    EXPECT(test_dies(take, test_path("link.lock"), EXIT_FAILURE, "link.lock: a symbolic link"), "a link");
    EXPECT(test_dies(take, test_path("nowhere/x.lock"), EXIT_FAILURE, "x.lock: cannot write: No such file"),
           "");
}

// Who only looks sees the holder, and changes nothing.
static void test_look(const char* path) {
    char holder[LOCK_NAME_BYTES], wanted[32];
    EXPECT(lock_look(path, holder) == LOCK_FREE && !holder[0], "no file: %s", holder);
    const pid_t child = start_holder(path);
    snprintf(wanted, sizeof(wanted), ", pid %d", (int)child);
    EXPECT(lock_look(path, holder) == LOCK_HELD && strstr(holder, wanted), "held: %s", holder);
    EXPECT(lock_look(path, holder) == LOCK_HELD && access(path, F_OK) == 0, "still");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    EXPECT(lock_look(path, holder) == LOCK_FREE && strstr(holder, wanted), "was killed: %s", holder);
    EXPECT(lock_look(test_write("look_far", "elsewhere, pid 1\n", 17), holder) == LOCK_UNKNOWN,
           "of another host");
    EXPECT(strcmp(holder, "elsewhere, pid 1") == 0, "%s", holder);
}

TEST(lock) {
    test_one_at_a_time(test_path("locks"));
    test_wait(test_path("locks"));
    test_look(test_path("look"));
    test_files_of_others();
    no_locks = 1;
    test_look(test_path("look_without"));
    test_one_at_a_time(test_path("no_locks"));
    test_wait(test_path("no_locks"));
    // of another host nobody knows whether it is over; a file without a name is nobody's after a
    // second
    EXPECT(test_dies(take, test_write("far", "elsewhere, pid 1\n", 17), EXIT_FAILURE,
                     "(elsewhere, pid 1); if it is over, remove "),
           "of another host");
    EXPECT(test_dies(take_patiently, test_write("empty", "", 0), EXIT_SUCCESS, ""), "of nobody");
}
