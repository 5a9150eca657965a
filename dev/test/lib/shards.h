/*
shards.h -- writes token files for tests of their readers.
*/
#ifndef DEV_TEST_SHARDS_H
#define DEV_TEST_SHARDS_H

#include "llmc/base/check.h"
#include "dev/test/lib/test.h"

enum { MAGIC_U16 = 20240520, MAGIC_U32 = 20240801 };

// Token `i` of the test data: no short run of them occurs twice.
static int token_at(size_t i) { return (int)(i * 7919 % 50021); }

// Writes tokens of `width` bytes after `head`.
static inline const char* write_tokens(const char* name, const void* head, size_t head_bytes, int width,
                                       const int* tokens, size_t n) {
    char* bytes = (char*)check_alloc(head_bytes + n * (size_t)width, 1, name);
    memcpy(bytes, head, head_bytes);
    for (size_t i = 0; i < n; i++) {
        memcpy(bytes + head_bytes + i * (size_t)width, &tokens[i], (size_t)width); // little endian
    }
    const char* path = test_write(name, bytes, head_bytes + n * (size_t)width);
    free(bytes);
    return path;
}

// Writes a shard of the tokens [first, first + n) of the test data.
static inline const char* write_shard(const char* name, int32_t magic, size_t first, size_t n) {
    int32_t header[256] = {magic, magic == MAGIC_U16 ? 1 : 7, (int32_t)n};
    int* tokens = (int*)check_alloc(n, sizeof(int), name);
    for (size_t i = 0; i < n; i++) {
        tokens[i] = token_at(first + i);
    }
    const char* path = write_tokens(name, header, sizeof(header), magic == MAGIC_U16 ? 2 : 4, tokens, n);
    free(tokens);
    return path;
}

#endif
