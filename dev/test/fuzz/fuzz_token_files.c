// fuzz_token_files.c -- reads random bytes as token files: they are refused by an error that names
// them, or all their tokens can be read. Run by dev/test/fuzz/fuzz.sh.
#define TOKEN_FILES_IMPLEMENTATION

#include "llmc/data/token_files.h"

static char error[ERROR_BYTES];

// In exactly its bytes of memory, so that every step beyond them is seen.
static void* copy(const unsigned char* data, size_t bytes) {
    void* memory = malloc(bytes ? bytes : 1);
    if (!memory) {
        abort();
    }
    memcpy(memory, data, bytes);
    return memory;
}

// Checks the result of a reader: an error that names the file, or tokens that can be read.
static void look(const TokenSpan* span, int ok) {
    if (!ok && strncmp(error, "fuzz: ", 6) != 0) {
        abort();
    }
    if (ok && span->count > 0 &&
        tokens_max_(span, 0, span->count) > (span->width == 2 ? UINT16_MAX : UINT32_MAX)) {
        abort();
    }
}

static void fuzz_shard(const unsigned char* data, size_t bytes) {
    TokenSpan span;
    memset(&span, 0, sizeof(span));
    span.map = copy(data, bytes);
    span.map_bytes = bytes;
    look(&span, tokens_read_shard_(&span, "fuzz", error));
    free(span.map);
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    error[0] = '\0';
    fuzz_shard(data, bytes);
    return 0;
}
