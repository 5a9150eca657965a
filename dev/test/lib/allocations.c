// allocations.c -- counts what a trainer allocates after its model is open, beside what its plan
// has (memory.h), and ends it with the call chain where that exceeds a MiB at a time.
//
// Linked into a trainer of its own (dev/test.mk) with these names wrapped: malloc, calloc, realloc,
// posix_memalign, free; memory_check, which a trainer calls when its model is open; and the
// functions of the ledger that allocate. What is planned and not yet taken then may be allocated,
// too. What libc allocates for itself is not seen. ALLOCATIONS=N in the environment sets another
// limit, in KiB; ALLOCATIONS_REPORT=1 prints the peak.
#include <execinfo.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/memory.h"

enum { SLOTS = 1 << 16 }; // blocks allocated since, by their addresses

static struct {
    pthread_mutex_t mutex;
    void* block[SLOTS];
    size_t bytes[SLOTS];
    size_t live, peak, limit;
    int is_on, reports;
} seen = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static __thread int planned; // a function of the ledger allocates

void* __real_malloc(size_t bytes);
void* __real_calloc(size_t count, size_t bytes);
void* __real_realloc(void* block, size_t bytes);
int __real_posix_memalign(void** block, size_t alignment, size_t bytes);
void __real_free(void* block);
void __real_memory_check(const Memory* taken, const Memory* plan);
void* __real_memory_take(Memory* m, const char* kind, MemoryPlace place, size_t bytes);
void* __real_memory_take_unset(Memory* m, const char* kind, MemoryPlace place, size_t bytes);
void* __real_memory_allocate(Memory* m, const char* what, MemoryPlace place, size_t bytes);
void* __real_memory_allocate_unset(Memory* m, const char* what, MemoryPlace place, size_t bytes);

static size_t slot_of(const void* block) {
    return (size_t)((uint64_t)(uintptr_t)block * 0x9E3779B97F4A7C15u >> 48) % SLOTS;
}

__attribute__((noreturn)) static void fail(size_t bytes) {
    void* chain[32];
    char line[160];
    const int n = snprintf(line, sizeof(line),
                           "error: %zu bytes are allocated since the model is open, %zu of them here; wanted "
                           "at most %zu: a MiB, and what is planned\n",
                           seen.live, bytes, seen.limit);
    if (write(STDERR_FILENO, line, (size_t)n) == n) {
        backtrace_symbols_fd(chain, backtrace(chain, 32), STDERR_FILENO);
    }
    _exit(1);
}

static void add(void* block, size_t bytes) {
    if (!block || !seen.is_on || planned) {
        return;
    }
    pthread_mutex_lock(&seen.mutex);
    size_t i = slot_of(block), tried = 0;
    while (seen.block[i] && tried++ < SLOTS) {
        i = (i + 1) % SLOTS;
    }
    seen.block[i] = block;
    seen.bytes[i] = bytes;
    seen.live += bytes;
    seen.peak = seen.live > seen.peak ? seen.live : seen.peak;
    if (seen.live > seen.limit || tried >= SLOTS) {
        fail(bytes);
    }
    pthread_mutex_unlock(&seen.mutex);
}

// Moves later blocks of the chain up, so that each is found from its own slot.
static void close_gap(size_t gap) {
    for (size_t i = (gap + 1) % SLOTS; seen.block[i]; i = (i + 1) % SLOTS) {
        const size_t own = slot_of(seen.block[i]);
        if ((i - own) % SLOTS >= (i - gap) % SLOTS) {
            seen.block[gap] = seen.block[i];
            seen.bytes[gap] = seen.bytes[i];
            gap = i;
        }
    }
    seen.block[gap] = NULL;
}

static void drop(const void* block) {
    if (!block || !seen.is_on) {
        return;
    }
    pthread_mutex_lock(&seen.mutex);
    size_t i = slot_of(block);
    while (seen.block[i] && seen.block[i] != block) {
        i = (i + 1) % SLOTS;
    }
    if (seen.block[i]) {
        seen.live -= seen.bytes[i];
        close_gap(i);
    }
    pthread_mutex_unlock(&seen.mutex);
}

void* __wrap_malloc(size_t bytes) {
    void* block = __real_malloc(bytes);
    add(block, bytes);
    return block;
}

void* __wrap_calloc(size_t count, size_t bytes) {
    void* block = __real_calloc(count, bytes);
    add(block, count * bytes);
    return block;
}

void* __wrap_realloc(void* block, size_t bytes) {
    drop(block);
    void* moved = __real_realloc(block, bytes);
    add(moved, bytes);
    return moved;
}

int __wrap_posix_memalign(void** block, size_t alignment, size_t bytes) {
    const int status = __real_posix_memalign(block, alignment, bytes);
    add(status == 0 ? *block : NULL, bytes);
    return status;
}

void __wrap_free(void* block) {
    drop(block);
    __real_free(block);
}

static void report(void) {
    if (seen.reports) {
        fprintf(stderr, "allocations: at most %zu bytes since the model is open, wanted %zu\n", seen.peak,
                seen.limit);
    }
}

void __wrap_memory_check(const Memory* taken, const Memory* plan) {
    const char *limit = getenv("ALLOCATIONS"), *reports = getenv("ALLOCATIONS_REPORT");
    __real_memory_check(taken, plan);
    const size_t rest = memory_bytes(plan, MEMORY_DEVICE) + memory_bytes(plan, MEMORY_HOST) -
                        memory_bytes(taken, MEMORY_DEVICE) - memory_bytes(taken, MEMORY_HOST);
    seen.limit = ((limit ? (size_t)atol(limit) : 1024) << 10) + rest;
    seen.reports = reports != NULL;
    atexit(report);
    seen.is_on = 1;
}

#define PLANNED(name)                                                                                        \
    void* __wrap_##name(Memory* m, const char* kind, MemoryPlace place, size_t bytes) {                      \
        planned = 1;                                                                                         \
        void* block = __real_##name(m, kind, place, bytes);                                                  \
        planned = 0;                                                                                         \
        return block;                                                                                        \
    }
PLANNED(memory_take)
PLANNED(memory_take_unset)
PLANNED(memory_allocate)
PLANNED(memory_allocate_unset)
