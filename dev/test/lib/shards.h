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

// Writes Megatron's index of sequences of the given lengths, and of `marks` marks of documents.
static inline const char* write_index(const char* name, int width, const int32_t* lengths, int sequences,
                                      const int64_t* documents, int marks) {
    char bytes[4096] = "MMIDIDX\0\0\1";
    const uint64_t n = (uint64_t)sequences, m = (uint64_t)marks;
    int64_t offset = 0;
    bytes[17] = width == 2 ? 8 : 4;
    memcpy(bytes + 18, &n, 8);
    memcpy(bytes + 26, &m, 8);
    for (int i = 0; i < sequences; i++) {
        memcpy(bytes + 34 + 4 * i, &lengths[i], 4);
        memcpy(bytes + 34 + 4 * sequences + 8 * i, &offset, 8);
        offset += (int64_t)lengths[i] * width;
    }
    memcpy(bytes + 34 + 12 * sequences, documents, 8 * (size_t)marks);
    return test_write(name, bytes, 34 + 12 * (size_t)sequences + 8 * (size_t)marks);
}

#endif
