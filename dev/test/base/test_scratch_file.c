// test_scratch_file.c -- scratch_file.h: data read back as written, nothing is left in the
// directory, and each failure is one error.
#include <errno.h>
#include <signal.h>
#include <sys/stat.h>

#include "llmc/base/check.h"
#include "llmc/base/scratch_file.h"

#include "dev/test/lib/test.h"

enum { BLOCK = 3 * SCRATCH_UNIT, BLOCKS = 150 }; // more blocks than the queue takes

static size_t file_bytes = (size_t)24 << 20; // of several parts

static unsigned char* aligned(size_t bytes) {
    void* memory = NULL;
    if (posix_memalign(&memory, SCRATCH_UNIT, bytes) != 0) {
        exit(EXIT_FAILURE);
    }
    return (unsigned char*)memory;
}

static unsigned char value_of(int round, size_t i) {
    return (unsigned char)((uint64_t)(round + 1) * i * 0x9E3779B97F4A7C15u >> 56);
}

static int count_files(const char* directory) {
    int count = 0;
    DIR* entries = opendir(directory);
    for (struct dirent* entry; entries && (entry = readdir(entries));) {
        count += entry->d_name[0] != '.';
    }
    if (entries) {
        closedir(entries);
    }
    return entries ? count : -1;
}

// All of it at once, over the end of a part; zeros before.
static void test_whole(Scratch* s) {
    unsigned char *memory = aligned(file_bytes), *copy = aligned(file_bytes);
    ScratchWork work = {0};
    size_t wrong = 0;
    scratch_read(s, copy, 0, file_bytes, &work);
    scratch_wait(s, &work);
    for (size_t i = 0; i < file_bytes; i++) {
        wrong += copy[i] != 0;
        memory[i] = value_of(0, i);
    }
    EXPECT(wrong == 0, "a new file has %zu bytes that are not zero", wrong);
    scratch_write(s, memory, 0, file_bytes, &work);
    scratch_wait(s, &work);
    scratch_read(s, copy, 0, file_bytes, &work);
    scratch_wait(s, &work);
    EXPECT(memcmp(memory, copy, file_bytes) == 0, "the whole file");
    free(copy);
    free(memory);
}

// Blocks in many works at a time, last to first; a work that nobody has started is done.
static void test_blocks(Scratch* s) {
    unsigned char *memory = aligned((size_t)BLOCK * BLOCKS), *copy = aligned((size_t)BLOCK * BLOCKS);
    static ScratchWork work[BLOCKS], none;
    for (size_t i = 0; i < (size_t)BLOCK * BLOCKS; i++) {
        memory[i] = value_of(1, i);
    }
    for (size_t b = BLOCKS; b-- > 0;) {
        scratch_write(s, memory + b * BLOCK, b * BLOCK, BLOCK, &work[b]);
    }
    for (size_t b = 0; b < BLOCKS; b++) { // where it has been written, at once
        scratch_wait(s, &work[b]);
        scratch_read(s, copy + b * BLOCK, b * BLOCK, BLOCK, &work[b]);
    }
    for (size_t b = 0; b < BLOCKS; b++) {
        scratch_wait(s, &work[b]);
    }
    scratch_wait(s, &none);
    EXPECT(memcmp(memory, copy, (size_t)BLOCK * BLOCKS) == 0, "blocks");
    free(copy);
    free(memory);
}

static void no_room(const void* directory) {
    const struct rlimit limit = {1 << 20, 1 << 20};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    scratch_open((const char*)directory, (size_t)2 << 20, "the state", aligned(SCRATCH_UNIT));
}

static void opens(const void* directory) {
    scratch_open((const char*)directory, SCRATCH_UNIT, "the state", aligned(SCRATCH_UNIT));
}

// Reads behind the end of the file, or into no memory.
static void reads(const void* at) {
    Scratch* s = scratch_open(test_path("bad"), SCRATCH_UNIT, "the state", aligned(SCRATCH_UNIT));
    ScratchWork work = {0};
    scratch_read(s, at ? aligned(SCRATCH_UNIT) : NULL, at ? SCRATCH_UNIT : 0, SCRATCH_UNIT, &work);
    scratch_wait(s, &work);
}

// Memory that direct I/O does not take: the file passes through the page cache, and has its zeros.
static void test_refused_memory(void) {
    unsigned char *memory = aligned(2 * SCRATCH_UNIT), *copy = aligned(SCRATCH_UNIT);
    Scratch* s = scratch_open(test_path("refused"), SCRATCH_UNIT, "the state", memory + 1);
    ScratchWork work = {0};
    size_t wrong = 0;
    memset(copy, 1, SCRATCH_UNIT);
    scratch_read(s, copy, 0, SCRATCH_UNIT, &work);
    scratch_wait(s, &work);
    for (size_t i = 0; i < SCRATCH_UNIT; i++) {
        wrong += copy[i] != 0;
    }
    EXPECT(wrong == 0, "%zu bytes are not zero", wrong);
    scratch_close(s);
    Scratch* no_memory = scratch_open(test_path("refused"), SCRATCH_UNIT, "the state", NULL);
    EXPECT(!scratch_is_direct(no_memory), "direct I/O with memory that every system refuses");
    scratch_close(no_memory);
    free(copy);
    free(memory);
}

static void test_failures(void) {
    const char* file = test_write("file", "", 0);
    EXPECT(test_dies(no_room, test_path("full"), EXIT_FAILURE,
                     "/full: no room for 2.0 MiB of the state, | are free: File too large"));
    EXPECT(access(test_path("full"), F_OK) != 0, "no room: something is left, the directory or a file");
    EXPECT(test_dies(opens, file, EXIT_FAILURE, "/file: cannot make a file for the state: Not a directory"));
    EXPECT(
        test_dies(reads, "behind the end", EXIT_FAILURE, "/bad: cannot read the state: the file has ended"));
    EXPECT(test_dies(reads, NULL, EXIT_FAILURE, "/bad: cannot read the state: Bad address"));
}

TEST(scratch_file) {
    const char* directory = test_path("made/of/two");
    unsigned char* unit = aligned(SCRATCH_UNIT);
    Scratch* s = scratch_open(directory, file_bytes, "the state", unit);
    free(unit);
    EXPECT(count_files(directory) == 0, "%d files in %s", count_files(directory), directory);
    test_whole(s);
    test_blocks(s);
    scratch_close(s);
    EXPECT(count_files(directory) == 0, "%d files in %s", count_files(directory), directory);
    test_refused_memory();
    test_failures();
}
