// fault.c -- a library to put before libc (LD_PRELOAD): call number FAULT_AT, of those that could
// fail on a real disk and are about paths with FAULT_PATH in them, fails with "No space left on
// device".
// Counted are fopen for writing, fwrite, fflush, fsync, mkdir, rename and renameat2; fwrite writes
// half before it fails. With FAULT_AT=0 nothing fails, and the number of calls is the only output,
// on file descriptor 3.
// Calls number FAULT_NAN_FROM to FAULT_NAN_TO of logf, in losses and in attention, give NaN; each
// takes FAULT_LOG_US. pow is wrong by 1 % for the exponent FAULT_POW_AT, the update of that number,
// and cos from call number FAULT_COS_FROM on: learning rates.
// Byte number FAULT_BYTE, else the last, of a file whose path has FAULT_MAP in it is another one in
// memory. The disk is full for one with FAULT_FULL in its path, from fdopen on.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fault_calls = 0;

static int fault_names(const char* variable, const char* path) {
    const char* part = getenv(variable);
    return path && part && strstr(path, part);
}

static int fault_names_fd(const char* variable, int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof(path) - 1);
    path[length > 0 ? length : 0] = '\0';
    return fault_names(variable, path);
}

static int fault_is_ours(const char* path) { return fault_names("FAULT_PATH", path); }
static int fault_is_ours_fd(int fd) { return fault_names_fd("FAULT_PATH", fd); }

// Counts a call; whether it is the one to fail.
static int fault_now(void) {
    const char* at = getenv("FAULT_AT");
    const int n = __atomic_add_fetch(&fault_calls, 1, __ATOMIC_RELAXED);
    if (at && n == atoi(at)) {
        errno = ENOSPC;
        return 1;
    }
    return 0;
}

__attribute__((destructor)) static void fault_report(void) {
    const char* at = getenv("FAULT_AT");
    if (at && strcmp(at, "0") == 0) {
        dprintf(3, "%d\n", fault_calls);
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

FILE* fopen(const char* path, const char* mode) {
    return mode[0] != 'r' && fault_is_ours(path) && fault_now() ? NULL : REAL(fopen)(path, mode);
}

FILE* fdopen(int fd, const char* mode) {
    if (fault_names_fd("FAULT_FULL", fd)) {
        const int full = open("/dev/full", O_WRONLY);
        if (full < 0 || dup2(full, fd) < 0) {
            abort();
        }
        close(full);
    }
    return REAL(fdopen)(fd, mode);
}

size_t fwrite(const void* data, size_t size, size_t count, FILE* file) {
    if (fault_is_ours_fd(fileno(file)) && fault_now()) {
        REAL(fwrite)(data, size, count / 2, file);
        file->_flags |= 0x20; // glibc's _IO_ERR_SEEN: ferror is true, as after any failed write
        errno = ENOSPC;
        return count / 2;
    }
    return REAL(fwrite)(data, size, count, file);
}

int fflush(FILE* file) {
    return file && fault_is_ours_fd(fileno(file)) && fault_now() ? EOF : REAL(fflush)(file);
}

int fsync(int fd) { return fault_is_ours_fd(fd) && fault_now() ? -1 : REAL(fsync)(fd); }

int mkdir(const char* path, mode_t mode) {
    return fault_is_ours(path) && fault_now() ? -1 : REAL(mkdir)(path, mode);
}

int rename(const char* from, const char* to) {
    return fault_is_ours(from) && fault_now() ? -1 : REAL(rename)(from, to);
}

long syscall(long number, ...) {
    long a[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(args, long);
    }
    va_end(args);
    if (number == SYS_renameat2 && fault_now()) {
        return -1;
    }
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

float logf(float x) {
    static long calls = 0;
    const char *from = getenv("FAULT_NAN_FROM"), *to = getenv("FAULT_NAN_TO");
    const long n = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    if (getenv("FAULT_LOG_US")) {
        usleep((useconds_t)atoi(getenv("FAULT_LOG_US")));
    }
    return from && to && atol(from) <= n && n <= atol(to) ? NAN : REAL(logf)(x);
}

double pow(double x, double y) {
    const char* at = getenv("FAULT_POW_AT");
    return REAL(pow)(x, y) * (at && atof(at) == y ? 0.99 : 1);
}

double cos(double x) {
    static long calls = 0;
    const char* from = getenv("FAULT_COS_FROM");
    const long n = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    return REAL(cos)(x) * (from && atol(from) <= n ? 0.99 : 1);
}

// A copy of an open file in memory, in which one byte is another one.
static int fault_copy(int fd, size_t bytes) {
    const int copy = memfd_create("fault", MFD_CLOEXEC);
    char* text = (char*)malloc(bytes);
    if (copy < 0 || !text || pread(fd, text, bytes, 0) != (ssize_t)bytes) {
        abort();
    }
    const char* byte = getenv("FAULT_BYTE");
    text[byte ? (size_t)atol(byte) : bytes - 1] ^= 1;
    if (write(copy, text, bytes) != (ssize_t)bytes) {
        abort();
    }
    free(text);
    return copy;
}

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    const int is_other = fd >= 0 && fault_names_fd("FAULT_MAP", fd),
              copy = is_other ? fault_copy(fd, bytes) : fd;
    void* memory = REAL(mmap)(at, bytes, protection, flags, copy, offset);
    if (is_other) {
        close(copy);
    }
    return memory;
}
