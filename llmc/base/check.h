/*
check.h -- how the program fails: one family of checks, one form of message.

    error: the thing: what was found, what was wanted

CHECK is for input and for the machine (files, memory, numbers from outside); assert is for our own
bugs. A message is one line on stderr. It names the thing, what was found and what was wanted, with
a hint only if that is an action. CHECK_CALL is for calls of libraries, which may fail because of
our bugs: it adds the place in the source.

Exit statuses, for scripts: 0 success, EXIT_FAILURE (1), EXIT_USAGE (2) bad command line,
EXIT_INTERRUPTED (75) stopped by a signal or --max-hours after saving, EXIT_STOPPED (76) stopped by
--stop-run after saving: scripts that continue a run leave this one.

In a run of several ranks, the failure of one ends all of them: check_end (llmc/comm/comm.h).
*/
#ifndef LLMC_CHECK_H
#define LLMC_CHECK_H

#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "llmc/base/printable.h"

#define EXIT_USAGE 2
#define EXIT_INTERRUPTED 75
#define EXIT_STOPPED 76

// Declares a function that takes a printf format as argument number n and never returns.
#define CHECK_DIES_(n) __attribute__((format(printf, n, n + 1), noreturn, cold, unused))

// True in the thread that main runs in.
__attribute__((unused)) static int check_is_main_thread(void) {
#ifdef __linux__
    return (pid_t)syscall(SYS_gettid) == getpid();
#else
    return 1;
#endif
}

#ifdef __cplusplus
extern "C" {
#endif

// Prints the message and ends all ranks of the run. Does not return.
typedef void (*CheckEndFunction)(void* context, int status, const char* message);
typedef struct {
    CheckEndFunction function; // NULL if the program runs alone
    void* context;
} CheckEnd;
extern CheckEnd check_end;

// Calls function(context) before a failure in the calling thread ends the program. NULL removes it.
void check_on_failure(void (*function)(void* context), void* context);

// Calls the function that check_on_failure was given.
void check_clean_up(void);

// Called with every block that check_alloc returns. NULL except in tests that compare planned with
// allocated memory.
typedef void (*CheckAllocated)(const char* what, size_t bytes);
extern CheckAllocated check_allocated;

#ifdef __cplusplus
}
#endif

// Formats the message of check_die_ for check_end, and cuts it if it is too long. A function of its
// own, because its buffer would enlarge the stack of every caller.
__attribute__((format(printf, 3, 0), noinline, cold, unused)) static void
check_end_all_(int status, const char* place, const char* format, va_list args) {
    enum { ROOM = 16 << 10, PLACE = 512 };
    char message[ROOM + PLACE] = "error: ";
    const int begin = (int)strlen(message);
    vsnprintf(message + begin, (size_t)(ROOM - begin), format, args);
    printable(message + begin);
    const size_t end = strlen(message);
    snprintf(message + end, PLACE, "%s%.400s\n", place ? "\n    at " : "", place ? place : "");
    check_end.function(check_end.context, status, message);
}

// Prints "error: " and the message, then `place` if it is not NULL, and ends the program. Only
// main's thread runs the handlers of exit(): in another thread, the rest of the program is in no
// state to be cleaned up.
__attribute__((format(printf, 3, 0), noreturn, cold, unused)) static void
check_die_(int status, const char* place, const char* format, va_list args) {
    fflush(stdout);
    check_clean_up();
    if (check_end.function) {
        check_end_all_(status, place, format, args);
    }
    fputs("error: ", stderr);
    printable_vprint(stderr, format, args);
    fprintf(stderr, "%s%s\n", place ? "\n    at " : "", place ? place : "");
    if (!check_is_main_thread()) {
        fflush(NULL);
        _exit(status);
    }
    exit(status);
}

// Fails with status 1. The place is CHECK_CALL's; NULL for CHECK.
CHECK_DIES_(2) static void check_failed_(const char* place, const char* format, ...) {
    va_list args;
    va_start(args, format);
    check_die_(EXIT_FAILURE, place, format, args);
}

// Ends the program with status 2: the command line is wrong, so a place in the source would not
// help.
CHECK_DIES_(1) static void die_usage(const char* format, ...) {
    va_list args;
    va_start(args, format);
    check_die_(EXIT_USAGE, NULL, format, args);
}

// CHECK(condition, format, ...): prints the message and exits with status 1 unless the condition
// holds.
#define CHECK(ok, ...) CHECK_AT_(NULL, ok, __VA_ARGS__)
#define CHECK_CALL(ok, ...) CHECK_AT_(__FILE__ ":" CHECK_TEXT_(__LINE__), ok, __VA_ARGS__)
#define CHECK_TEXT_(line) CHECK_TEXT_OF_(line)
#define CHECK_TEXT_OF_(line) #line
#define CHECK_AT_(place, ok, ...)                                                                            \
    do {                                                                                                     \
        if (!(ok)) {                                                                                         \
            check_failed_(place, __VA_ARGS__);                                                               \
        }                                                                                                    \
    } while (0)

// Sets `error` (of ERROR_BYTES) to "path: message", made printable, and returns 0. For readers
// whose caller decides whether to fail or to continue.
#define ERROR_BYTES (PATH_MAX + 2048)
__attribute__((format(printf, 3, 4), unused)) static int error_set(char* error, const char* path,
                                                                   const char* format, ...) {
    va_list args;
    const int n = snprintf(error, ERROR_BYTES, "%.*s: ", PATH_MAX, path);
    va_start(args, format);
    vsnprintf(error + n, ERROR_BYTES - (size_t)n, format, args);
    va_end(args);
    printable(error);
    return 0;
}

// Refuses a stack limit too small for paths and messages, which would be a crash without a message.
// Call it first in main; threads get as much as main.
static inline void check_stack(void) {
    const rlim_t wanted = 512 << 10;
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= wanted,
          "the stack is limited to %llu KiB; wanted at least %llu: ulimit -s %llu",
          (unsigned long long)limit.rlim_cur >> 10, (unsigned long long)wanted >> 10,
          (unsigned long long)wanted >> 10);
}

// Returns the bytes of an array of `count` elements; fails if they exceed size_t.
static inline size_t array_bytes(size_t count, size_t element_bytes) {
    CHECK(element_bytes == 0 || count <= SIZE_MAX / element_bytes,
          "an array of %zu x %zu bytes cannot be addressed", count, element_bytes);
    return count * element_bytes;
}

// Allocates `count` elements without setting them, aligned to 64 bytes (a cache line, the widest
// vector); `what` names them in the error. Large arrays ask for huge pages: weights are read across
// rows, where 4 KiB pages cost a TLB miss each. The caller frees them with free().
#define CHECK_HUGE_PAGE ((size_t)2 << 20) // bytes
static inline void* check_alloc_unset(size_t count, size_t element_bytes, const char* what) {
    const size_t bytes = array_bytes(count, element_bytes);
    const int large = bytes >= CHECK_HUGE_PAGE;
    void* memory = NULL;
    CHECK(posix_memalign(&memory, large ? CHECK_HUGE_PAGE : 64, bytes ? bytes : 64) == 0,
          "%s: no memory for %.1f MiB", what, (double)bytes / (1 << 20));
    if (check_allocated) {
        check_allocated(what, bytes);
    }
#ifdef MADV_HUGEPAGE
    if (large) {
        madvise(memory, bytes, MADV_HUGEPAGE);
    }
#endif
    return memory;
}

// Allocates `count` elements and sets them to zero.
static inline void* check_alloc(size_t count, size_t element_bytes, const char* what) {
    void* memory = check_alloc_unset(count, element_bytes, what);
    memset(memory, 0, count * element_bytes);
    return memory;
}

// Makes room for one more item after the `count` of an array from malloc, or NULL. Doubles the
// array at each power of two.
static inline void* check_grow(void* items, size_t count, size_t item_bytes, const char* what) {
    if (count & (count - 1)) {
        return items;
    }
    void* grown = realloc(items, array_bytes(count ? 2 * count : 1, item_bytes));
    CHECK(grown, "%s: no memory for more than %zu", what, count);
    return grown;
}

// Makes room for `wanted` items in an array with room for *room; updates both.
static inline void* check_reserve(void* items, size_t* room, size_t wanted, size_t item_bytes,
                                  const char* what) {
    if (wanted <= *room) {
        return items;
    }
    *room = wanted + wanted / 2 < 64 ? 64 : wanted + wanted / 2;
    void* grown = realloc(items, array_bytes(*room, item_bytes));
    CHECK(grown, "%s: no memory for %zu", what, wanted);
    return grown;
}

#ifdef CHECK_IMPLEMENTATION

CheckEnd check_end = {NULL, NULL};
CheckAllocated check_allocated = NULL;

static __thread struct {
    void (*function)(void* context);
    void* context;
} check_on_failure_;

void check_on_failure(void (*function)(void* context), void* context) {
    check_on_failure_.function = function;
    check_on_failure_.context = context;
}

void check_clean_up(void) {
    void (*const function)(void*) = check_on_failure_.function;
    check_on_failure_.function = NULL; // in case the function itself fails
    if (function) {
        function(check_on_failure_.context);
    }
}

#endif // CHECK_IMPLEMENTATION

#endif
