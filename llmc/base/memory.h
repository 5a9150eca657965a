/*
memory.h -- a ledger of memory: how much was taken, for what and where.

    memory_on_host    a ledger of a run on the CPU
    memory_dry        a ledger that allocates nothing
    memory_take       counts memory and allocates it, all zero; NULL from a dry ledger
    memory_close      frees everything that was taken

An x_open takes its memory from the ledger that it gets, so an x_close has none to free. With a dry
ledger it makes the same calls and returns after them: this is how a run is planned, and each size
is computed in one place.

A kind is a name, and may say more after a colon, for errors only: "scratch: attention" counts as
"scratch".
*/
#ifndef LLMC_MEMORY_H
#define LLMC_MEMORY_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// The device computes: in a run on the CPU it is the host itself. Pinned memory counts as the
// host's.
typedef enum { MEMORY_DEVICE, MEMORY_HOST, MEMORY_PINNED, MEMORY_DISK } MemoryPlace;

enum { MEMORY_KINDS = 48, MEMORY_BLOCKS = 256, MEMORY_NAME = 40 };

// Memory of one kind at one place.
typedef struct {
    char kind[MEMORY_NAME];
    size_t bytes;
    MemoryPlace place;
    double in, out; // how often a step moves it to the device, and back
} MemoryEntry;

// Functions for one place. `what` names the memory in errors. An unset block need not be zero.
typedef struct {
    void* (*allocate)(size_t count, size_t element_bytes, const char* what);
    void* (*allocate_unset)(size_t count, size_t element_bytes, const char* what);
    void (*free)(void* block);
} MemoryAllocator;

typedef struct {
    const MemoryAllocator* allocators; // of device, host and pinned memory; NULL in a dry ledger
    int num_entries, num_blocks;
    MemoryEntry entries[MEMORY_KINDS]; // in the order in which kinds were first counted
    struct {
        void* block;
        MemoryPlace place;
    } blocks[MEMORY_BLOCKS];
} Memory;

Memory memory_of(const MemoryAllocator* allocators);
Memory memory_on_host(void);
Memory memory_dry(void);
static inline int memory_is_dry(const Memory* m) { return m->allocators == NULL; }

void* memory_take(Memory* m, const char* kind, MemoryPlace place, size_t bytes);
// Takes memory that its user sets.
void* memory_take_unset(Memory* m, const char* kind, MemoryPlace place, size_t bytes);

// Counts memory without allocating it: a part of a block, or memory that a library allocates.
// Returns its entry.
MemoryEntry* memory_count(Memory* m, const char* kind, MemoryPlace place, size_t bytes);
// Allocates a block whose parts are counted by memory_count.
void* memory_allocate(Memory* m, const char* what, MemoryPlace place, size_t bytes);
void* memory_allocate_unset(Memory* m, const char* what, MemoryPlace place, size_t bytes);

size_t memory_bytes(const Memory* m, MemoryPlace place);

// Counts all that another ledger has counted at a place, as one kind.
static inline void memory_count_all(Memory* m, const char* kind, MemoryPlace place, const Memory* other) {
    const size_t bytes = memory_bytes(other, place);
    if (bytes > 0) {
        memory_count(m, kind, place, bytes);
    }
}

// Sets how often a step moves the memory of an entry to the device, and back.
static inline void memory_set_moves(MemoryEntry* entry, double in, double out) {
    entry->in = in;
    entry->out = out;
}

// Ends the program if more was taken than planned, of any kind.
void memory_check(const Memory* taken, const Memory* planned);

void memory_close(Memory* m);

#ifdef __cplusplus
}
#endif

#ifdef MEMORY_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

Memory memory_of(const MemoryAllocator* allocators) {
    Memory m;
    memset(&m, 0, sizeof(m));
    m.allocators = allocators;
    return m;
}

Memory memory_on_host(void) {
    static const MemoryAllocator host[] = {{check_alloc, check_alloc_unset, free},
                                           {check_alloc, check_alloc_unset, free},
                                           {check_alloc, check_alloc_unset, free}};
    return memory_of(host);
}

Memory memory_dry(void) { return memory_of(NULL); }

// Finds a kind by the first `length` characters of its name, or NULL.
static const MemoryEntry* memory_find_(const Memory* m, const char* kind, size_t length, MemoryPlace place) {
    for (int i = 0; i < m->num_entries; i++) {
        const MemoryEntry* entry = &m->entries[i];
        if (entry->place == place && strncmp(entry->kind, kind, length) == 0 && !entry->kind[length]) {
            return entry;
        }
    }
    return NULL;
}

MemoryEntry* memory_count(Memory* m, const char* kind, MemoryPlace place, size_t bytes) {
    const size_t length = strcspn(kind, ":");
    const MemoryPlace counted = place == MEMORY_PINNED ? MEMORY_HOST : place;
    MemoryEntry* entry = (MemoryEntry*)memory_find_(m, kind, length, counted);
    if (!entry) {
        assert(m->num_entries < MEMORY_KINDS && length < MEMORY_NAME);
        entry = &m->entries[m->num_entries++];
        memcpy(entry->kind, kind, length);
        entry->place = counted;
    }
    entry->bytes += bytes;
    return entry;
}

static void* memory_keep_(Memory* m, void* block, MemoryPlace place) {
    assert(m->num_blocks < MEMORY_BLOCKS);
    m->blocks[m->num_blocks].block = block;
    m->blocks[m->num_blocks++].place = place;
    return block;
}

void* memory_allocate(Memory* m, const char* what, MemoryPlace place, size_t bytes) {
    return memory_is_dry(m) ? NULL : memory_keep_(m, m->allocators[place].allocate(bytes, 1, what), place);
}

void* memory_allocate_unset(Memory* m, const char* what, MemoryPlace place, size_t bytes) {
    return memory_is_dry(m) ? NULL
                            : memory_keep_(m, m->allocators[place].allocate_unset(bytes, 1, what), place);
}

void* memory_take(Memory* m, const char* kind, MemoryPlace place, size_t bytes) {
    memory_count(m, kind, place, bytes);
    return memory_allocate(m, kind, place, bytes);
}

void* memory_take_unset(Memory* m, const char* kind, MemoryPlace place, size_t bytes) {
    memory_count(m, kind, place, bytes);
    return memory_allocate_unset(m, kind, place, bytes);
}

size_t memory_bytes(const Memory* m, MemoryPlace place) {
    size_t total = 0;
    for (int i = 0; i < m->num_entries; i++) {
        total += m->entries[i].place == place ? m->entries[i].bytes : 0;
    }
    return total;
}

void memory_check(const Memory* taken, const Memory* planned) {
    for (int i = 0; i < taken->num_entries; i++) {
        const MemoryEntry* entry = &taken->entries[i];
        const MemoryEntry* plan = memory_find_(planned, entry->kind, strlen(entry->kind), entry->place);
        CHECK_CALL(plan ? entry->bytes <= plan->bytes : entry->bytes == 0,
                   "%s: %zu bytes were taken, %zu planned", entry->kind, entry->bytes,
                   plan ? plan->bytes : 0);
    }
}

void memory_close(Memory* m) {
    while (m->num_blocks > 0) {
        m->num_blocks--;
        m->allocators[m->blocks[m->num_blocks].place].free(m->blocks[m->num_blocks].block);
    }
}

#endif // MEMORY_IMPLEMENTATION

#endif
