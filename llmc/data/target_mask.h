/*
target_mask.h -- which tokens of a shard are followed by one that is to be learned.

Prompts and chats are read, but only their answers are learned (chat_marks.h). Beside a shard with
such documents is SHARD.mask: a header of four uint64, little-endian,

    "LLMCMASK", the number of tokens, the number of bits that are 1, the xxh64 of the bits

and a bit for each token, from the lowest of each byte on: 1 if the token after it is no target. A
shard without a mask has only targets. A mask is written before its shard: every complete shard has
its mask.
*/
#ifndef LLMC_TARGET_MASK_H
#define LLMC_TARGET_MASK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TARGET_MASK_ENDING ".mask"

// Answers that documents have.
typedef enum {
    ANSWERS_NONE,    // documents are learned as a whole
    ANSWERS_MASK,    // shards with masks
    ANSWERS_PROMPTS, // prompts and completions
    ANSWERS_CHATS
} Answers;

// ---- files ----

// Sets path (PATH_MAX) to the name of the mask of a shard.
void target_mask_path(char* path, const char* shard);

// True if the shard has a mask.
int target_mask_exists(const char* shard);

// Removes the mask of a shard, if it has one.
void target_mask_remove(const char* shard);

// Mixes a checksum of the mask of a shard, if it has one, into the checksum of the shard.
// `checksum` computes a file's (file.h). Returns 0 with the error if the mask cannot be read.
int target_mask_mix(uint64_t* sum, const char* shard, int (*checksum)(const char*, uint64_t*, char*),
                    char* error);

// ---- writing ----

// Bits of a shard that is being written.
typedef struct {
    uint8_t* bits; // NULL: all are 0
    size_t room;
    uint64_t hidden; // bits that are 1
} TargetMaskBits;

// Sets the bit of a token.
void target_mask_hide(TargetMaskBits* mask, uint64_t token);

// Writes the mask of a shard of `count` tokens, or removes an old one if no bit is set. Clears the
// bits.
void target_mask_write(TargetMaskBits* mask, const char* shard, uint64_t count);

void target_mask_free(TargetMaskBits* mask);

// ---- reading ----

typedef struct {
    const uint8_t* bits; // NULL: all are 0
    void* map;           // the file
    size_t map_bytes;
} TargetMask;

// Opens and checks the mask of a shard of `count` tokens. Without one, all bits are 0. Returns 0
// with the error.
int target_mask_open(TargetMask* mask, const char* shard, uint64_t count, char* error);

void target_mask_close(TargetMask* mask);

static inline int target_mask_hides(const TargetMask* mask, size_t token) {
    return mask->bits && (mask->bits[token / 8] >> token % 8 & 1);
}

// Counts the bits that are 1 in the mask of n tokens.
size_t target_mask_count(const TargetMask* mask, size_t start, size_t n);

#ifdef __cplusplus
}
#endif

#ifdef TARGET_MASK_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/mapped_file.h"
#include "llmc/base/xxh64.h"

typedef struct {
    char magic[8];
    uint64_t tokens, hidden, sum;
} TargetMaskHeader_;

static const char target_mask_magic_[8] = {'L', 'L', 'M', 'C', 'M', 'A', 'S', 'K'};

static size_t target_mask_bytes_(uint64_t tokens) { return (size_t)(tokens + 7) / 8; }

// ---- files ----

void target_mask_path(char* path, const char* shard) { file_path(path, "%s" TARGET_MASK_ENDING, shard); }

int target_mask_exists(const char* shard) {
    char path[PATH_MAX];
    target_mask_path(path, shard);
    return file_exists(path);
}

void target_mask_remove(const char* shard) {
    char path[PATH_MAX];
    target_mask_path(path, shard);
    CHECK(unlink(path) == 0 || errno == ENOENT, "%s: cannot remove: %s", path, strerror(errno));
}

int target_mask_mix(uint64_t* sum, const char* shard, int (*checksum)(const char*, uint64_t*, char*),
                    char* error) {
    char path[PATH_MAX];
    uint64_t sums[2] = {*sum, 0};
    target_mask_path(path, shard);
    if (!file_exists(path)) {
        return 1;
    }
    if (!checksum(path, &sums[1], error)) {
        return 0;
    }
    *sum = xxh64(sums, sizeof(sums));
    return 1;
}

// ---- writing ----

void target_mask_hide(TargetMaskBits* mask, uint64_t token) {
    const size_t byte = (size_t)(token / 8), before = mask->room;
    mask->bits = (uint8_t*)check_reserve(mask->bits, &mask->room, byte + 1, 1, "mask of a shard");
    memset(mask->bits + before, 0, mask->room - before);
    mask->bits[byte] |= (uint8_t)(1 << token % 8);
    mask->hidden++;
}

void target_mask_write(TargetMaskBits* mask, const char* shard, uint64_t count) {
    const size_t bytes = target_mask_bytes_(count);
    TargetMaskHeader_ header = {.tokens = count, .hidden = mask->hidden};
    char path[PATH_MAX];
    FileWriter file;
    if (mask->hidden == 0) {
        target_mask_remove(shard);
        return;
    }
    const size_t before = mask->room;
    mask->bits = (uint8_t*)check_reserve(mask->bits, &mask->room, bytes, 1, "mask of a shard");
    memset(mask->bits + before, 0, mask->room - before);
    memcpy(header.magic, target_mask_magic_, sizeof(header.magic));
    header.sum = xxh64(mask->bits, bytes);
    target_mask_path(path, shard);
    file_open(&file, path);
    file_put(&file, &header, sizeof(header));
    file_put(&file, mask->bits, bytes);
    file_commit(&file);
    memset(mask->bits, 0, mask->room);
    mask->hidden = 0;
}

void target_mask_free(TargetMaskBits* mask) {
    free(mask->bits);
    memset(mask, 0, sizeof(*mask));
}

// ---- reading ----

// Maps a mask, which exists.
static int target_mask_map_(TargetMask* mask, const char* path, char* error) {
    struct stat info;
    const int fd = file_open_regular(path, error);
    if (fd < 0) {
        return 0;
    }
    const int has_header = fstat(fd, &info) == 0 && (size_t)info.st_size > sizeof(TargetMaskHeader_);
    mask->map = has_header ? mapped_file(fd, (size_t)info.st_size, path, error) : NULL;
    mask->map_bytes = has_header ? (size_t)info.st_size : 0;
    close(fd); // the mapping stays
    return mask->map || (has_header ? 0 : error_set(error, path, "no mask of a shard, wanted its header"));
}

int target_mask_open(TargetMask* mask, const char* shard, uint64_t count, char* error) {
    char path[PATH_MAX];
    TargetMaskHeader_ header;
    memset(mask, 0, sizeof(*mask));
    target_mask_path(path, shard);
    if (!file_exists(path)) {
        return 1;
    }
    if (!target_mask_map_(mask, path, error)) {
        return 0;
    }
    memcpy(&header, mask->map, sizeof(header));
    const size_t bytes = mask->map_bytes - sizeof(header);
    const uint8_t* bits = (const uint8_t*)mask->map + sizeof(header);
    if (memcmp(header.magic, target_mask_magic_, sizeof(header.magic)) != 0) {
        return error_set(error, path, "no mask of a shard, wanted \"LLMCMASK\" at its start");
    }
    if (header.tokens != count || bytes != target_mask_bytes_(count)) {
        return error_set(error, path,
                         "a mask of %" PRIu64 " tokens in %zu bytes, wanted one of %" PRIu64
                         " tokens, as %s has",
                         header.tokens, bytes, count, shard);
    }
    if (xxh64(bits, bytes) != header.sum) {
        return error_set(error, path, "its bits have another checksum than its header says");
    }
    mask->bits = bits;
    const size_t hidden = target_mask_count(mask, 0, count);
    if (hidden != header.hidden) {
        return error_set(error, path, "its bits hide %zu tokens, its header says %" PRIu64, hidden,
                         header.hidden);
    }
    return 1;
}

void target_mask_close(TargetMask* mask) {
    if (mask->map) {
        munmap(mask->map, mask->map_bytes);
    }
    memset(mask, 0, sizeof(*mask));
}

size_t target_mask_count(const TargetMask* mask, size_t start, size_t n) {
    size_t count = 0, at = start, end = start + n;
    if (!mask->bits) {
        return 0;
    }
    for (; at < end && at % 8; at++) {
        count += (size_t)target_mask_hides(mask, at);
    }
    for (; end - at >= 64; at += 64) {
        uint64_t word;
        memcpy(&word, mask->bits + at / 8, sizeof(word));
        count += (size_t)__builtin_popcountll(word);
    }
    for (; at < end; at++) {
        count += (size_t)target_mask_hides(mask, at);
    }
    return count;
}

#endif // TARGET_MASK_IMPLEMENTATION

#endif
