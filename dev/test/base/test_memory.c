// test_memory.c -- memory.h: the ledger adds up by kind, dry runs allocate nothing, and everything
// is freed.
#include "llmc/base/memory.h"

#include "dev/test/lib/test.h"

static int blocks; // that are allocated

static void* allocate(size_t count, size_t element_bytes, const char* what) {
    (void)what;
    blocks++;
    return calloc(count + 1, element_bytes);
}

static void release(void* block) {
    blocks--;
    free(block);
}

static const MemoryAllocator allocators[] = {
    {allocate, allocate, release}, {allocate, allocate, release}, {allocate, allocate, release}};

// Takes some memory of each place, in `m`.
static void take(Memory* m) {
    memory_take(m, "weights", MEMORY_DEVICE, 100);
    memory_take(m, "scratch: first", MEMORY_DEVICE, 10);
    memory_take_unset(m, "scratch: second", MEMORY_DEVICE, 20);
    memory_take(m, "staging", MEMORY_PINNED, 3);
    memory_take(m, "staging", MEMORY_HOST, 4);
    memory_count(m, "scratch", MEMORY_DISK, 1000);
    memory_count(m, "m", MEMORY_DEVICE, 50);
    memory_count(m, "v", MEMORY_DEVICE, 50);
    memory_allocate(m, "state", MEMORY_DEVICE, 100);
}

TEST(kinds) {
    Memory m = memory_dry();
    take(&m);
    EXPECT(memory_bytes(&m, MEMORY_DEVICE) == 230, "%zu bytes", memory_bytes(&m, MEMORY_DEVICE));
    EXPECT(memory_bytes(&m, MEMORY_HOST) == 7, "pinned memory is the host's");
    EXPECT(memory_bytes(&m, MEMORY_DISK) == 1000, "on the disk");
    EXPECT(m.num_entries == 6, "%d entries", m.num_entries);
    EXPECT(strcmp(m.entries[1].kind, "scratch") == 0 && m.entries[1].bytes == 30, "%s %zu", m.entries[1].kind,
           m.entries[1].bytes);
}

TEST(blocks) {
    Memory dry = memory_dry(), m = memory_of(allocators);
    EXPECT(memory_take(&dry, "weights", MEMORY_DEVICE, 100) == NULL && blocks == 0, "a dry ledger allocates");
    take(&m);
    EXPECT(blocks == 6, "%d blocks", blocks);
    memory_close(&m);
    EXPECT(blocks == 0, "%d blocks were not given back", blocks);
}

TEST(host) {
    Memory m = memory_on_host();
    const char* block = (const char*)memory_take(&m, "zeros", MEMORY_DEVICE, 1000);
    for (int i = 0; i < 1000; i++) {
        EXPECT(block[i] == 0, "byte %d", i);
    }
    memory_close(&m);
}

static void more_body(const void* planned) {
    Memory m = memory_dry();
    take(&m);
    memory_count(&m, "scratch", MEMORY_DEVICE, 1);
    memory_check(&m, (const Memory*)planned);
}

static void other_body(const void* planned) {
    Memory m = memory_dry();
    memory_count(&m, "secrets", MEMORY_DEVICE, 1);
    memory_check(&m, (const Memory*)planned);
}

TEST(check) {
    Memory planned = memory_dry(), less = memory_dry();
    take(&planned);
    memory_check(&planned, &planned);
    memory_count(&less, "scratch", MEMORY_DEVICE, 29);
    memory_check(&less, &planned);
    EXPECT(test_dies(more_body, &planned, 1, "error: scratch: 31 bytes were taken, 30 planned"), "more");
    EXPECT(test_dies(other_body, &planned, 1, "error: secrets: 1 bytes were taken, 0 planned"), "unknown");
}
