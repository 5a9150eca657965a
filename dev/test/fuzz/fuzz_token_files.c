// fuzz_token_files.c -- reads random bytes as token files: they are refused by an error that names
// them, or all their tokens can be read. The first bit of the input selects a shard or Megatron's
// index of a file whose size is the next byte. Run by dev/test/fuzz/fuzz.sh.
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

static void fuzz_megatron(const unsigned char* data, size_t bytes) {
    static const unsigned char zeros[255] = {0};
    TokenSpan span;
    memset(&span, 0, sizeof(span));
    span.map_bytes = bytes ? data[0] : 0;
    span.map = copy(zeros, span.map_bytes);
    span.index_bytes = bytes ? bytes - 1 : 0;
    span.index = copy(data + (bytes > 0), span.index_bytes);
    look(&span, megatron_check_head_(&span, "fuzz", error) &&
                    tokens_read_bare_(&span, megatron_index(span.index).width, "fuzz", error) &&
                    megatron_check_body_(&span, "fuzz", error));
    free(span.map);
    free(span.index);
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    error[0] = '\0';
    if (bytes) {
        (data[0] & 1 ? fuzz_megatron : fuzz_shard)(data + 1, bytes - 1);
    }
    return 0;
}
