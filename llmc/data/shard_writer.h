/*
shard_writer.h -- writes tokens into llm.c's shards: PREFIX_val_000000.bin, PREFIX_train_000001.bin,
...

A shard is a header of 256 int32 (magic, version, number of tokens; the rest 0) and its tokens:
uint16 if all ids of the vocabulary fit, else uint32 (token_files.h reads both). The first
val_tokens tokens are the validation data, in shards of their own; the others are for training. Each
shard has shard_tokens tokens, except the last one of each kind; documents continue from one shard
to the next. All shards are numbered in one sequence. Each file is complete or absent (file.h). Ids
with TOKEN_NO_TARGET give the shard a mask (target_mask.h).
*/
#ifndef LLMC_SHARD_WRITER_H
#define LLMC_SHARD_WRITER_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/file.h"
#include "llmc/data/target_mask.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char* prefix;   // prefix of the names; borrowed
    uint64_t token_bytes; // 2 or 4
    uint64_t shard_tokens, val_tokens;
    uint64_t number; // current shard, or the next
    uint64_t tokens; // tokens in all earlier shards
    uint64_t count;  // tokens in this shard
    int is_open;
    FileWriter file;
    TargetMaskBits mask;
} ShardWriter;

void shard_writer_open(ShardWriter* writer, const char* prefix, int vocab_size, uint64_t shard_tokens,
                       uint64_t val_tokens);

// Sets path (PATH_MAX) to the name of a shard.
void shard_writer_path(const ShardWriter* writer, uint64_t number, char* path);

// Returns the size of a shard in bytes, given the total number of tokens.
uint64_t shard_writer_bytes(const ShardWriter* writer, uint64_t number, uint64_t tokens);

// Continues after `shards` full shards that already exist.
void shard_writer_resume(ShardWriter* writer, uint64_t shards);

// Adds up to n tokens and returns how many it added. It stops when a shard is complete on disk
// (writer->number has increased); add the others again.
size_t shard_writer_add(ShardWriter* writer, const int* ids, size_t n);

// Completes the last shard.
void shard_writer_close(ShardWriter* writer);

// Drops the last shard if it is incomplete. Closing it later does nothing.
void shard_writer_discard(ShardWriter* writer);

#ifdef __cplusplus
}
#endif

#ifdef SHARD_WRITER_IMPLEMENTATION

#include <assert.h>
#include <limits.h>
#include <string.h>

#include "llmc/data/token_files.h"
#include "llmc/tokenizer/chat_marks.h"

enum {
    SHARD_HEADER_WORDS_ = 256,
    SHARD_BUFFER_TOKENS_ = 1 << 14 // tokens converted at a time
};

void shard_writer_open(ShardWriter* writer, const char* prefix, int vocab_size, uint64_t shard_tokens,
                       uint64_t val_tokens) {
    assert(0 < shard_tokens && shard_tokens <= INT32_MAX);
    memset(writer, 0, sizeof(*writer));
    writer->prefix = prefix;
    writer->token_bytes = vocab_size <= 1 << 16 ? 2 : 4;
    writer->shard_tokens = shard_tokens;
    writer->val_tokens = val_tokens;
}

static uint64_t shard_writer_num_val_(const ShardWriter* writer) {
    return writer->val_tokens / writer->shard_tokens + (writer->val_tokens % writer->shard_tokens > 0);
}

void shard_writer_path(const ShardWriter* writer, uint64_t number, char* path) {
    const char* kind = number < shard_writer_num_val_(writer) ? "val" : "train";
    file_path(path, "%s_%s_%06llu.bin", writer->prefix, kind, (unsigned long long)number);
}

// Returns the number of tokens of a full shard.
static uint64_t shard_writer_limit_(const ShardWriter* writer, uint64_t number) {
    const uint64_t left = number < shard_writer_num_val_(writer)
                              ? writer->val_tokens - number * writer->shard_tokens
                              : UINT64_MAX;
    return left < writer->shard_tokens ? left : writer->shard_tokens;
}

uint64_t shard_writer_bytes(const ShardWriter* writer, uint64_t number, uint64_t tokens) {
    const uint64_t num_val = shard_writer_num_val_(writer), limit = shard_writer_limit_(writer, number);
    const uint64_t before = number < num_val ? number * writer->shard_tokens
                                             : writer->val_tokens + (number - num_val) * writer->shard_tokens;
    const uint64_t left = tokens > before ? tokens - before : 0;
    return 4 * SHARD_HEADER_WORDS_ + writer->token_bytes * (left < limit ? left : limit);
}

void shard_writer_resume(ShardWriter* writer, uint64_t shards) {
    for (writer->number = writer->tokens = 0; writer->number < shards; writer->number++) {
        writer->tokens += shard_writer_limit_(writer, writer->number);
    }
}

static void shard_writer_put_header_(ShardWriter* writer, uint64_t count) {
    int32_t header[SHARD_HEADER_WORDS_] = {0};
    header[0] = writer->token_bytes == 2 ? TOKENS_MAGIC_U16 : TOKENS_MAGIC_U32;
    header[1] = writer->token_bytes == 2 ? 1 : 7;
    header[2] = (int32_t)count;
    file_put(&writer->file, header, sizeof(header));
}

static void shard_writer_begin_(ShardWriter* writer) {
    char path[PATH_MAX];
    shard_writer_path(writer, writer->number, path);
    file_open(&writer->file, path);
    writer->is_open = 1;
    shard_writer_put_header_(writer, shard_writer_limit_(writer, writer->number));
}

static void shard_writer_end_(ShardWriter* writer) {
    char path[PATH_MAX];
    if (writer->count < shard_writer_limit_(writer, writer->number)) { // the header promised more
        if (fseek(writer->file.file, 0, SEEK_SET) != 0) {
            file_fail(&writer->file, "seek");
        }
        shard_writer_put_header_(writer, writer->count);
    }
    shard_writer_path(writer, writer->number, path);
    target_mask_write(&writer->mask, path, writer->count);
    file_commit(&writer->file);
    writer->is_open = 0;
    writer->number++;
    writer->tokens += writer->count;
    writer->count = 0;
}

// Removes TOKEN_NO_TARGET from n ids, the next ones of the shard, and notes where it was.
static void shard_writer_unmark_(ShardWriter* writer, int* plain, const int* ids, size_t n, uint64_t first) {
    for (size_t i = 0; i < n; i++) {
        plain[i] = ids[i] & ~TOKEN_NO_TARGET;
        if (ids[i] & TOKEN_NO_TARGET) {
            target_mask_hide(&writer->mask, first + i);
        }
    }
}

static void shard_writer_put_(ShardWriter* writer, const int* ids, size_t n) {
    int plain[SHARD_BUFFER_TOKENS_]; // no id is negative
    uint16_t narrow[SHARD_BUFFER_TOKENS_];
    for (size_t at = 0; at < n; at += SHARD_BUFFER_TOKENS_) {
        const size_t max = SHARD_BUFFER_TOKENS_, part = n - at < max ? n - at : max;
        shard_writer_unmark_(writer, plain, ids + at, part, writer->count + at);
        for (size_t i = 0; i < part; i++) {
            narrow[i] = (uint16_t)plain[i];
        }
        file_put(&writer->file, writer->token_bytes == 2 ? (const void*)narrow : plain,
                 part * writer->token_bytes);
    }
}

size_t shard_writer_add(ShardWriter* writer, const int* ids, size_t n) {
    if (n > 0 && !writer->is_open) {
        shard_writer_begin_(writer);
    }
    const uint64_t room = shard_writer_limit_(writer, writer->number) - writer->count;
    n = n < room ? n : (size_t)room;
    shard_writer_put_(writer, ids, n);
    writer->count += n;
    if (n > 0 && n == room) {
        shard_writer_end_(writer);
    }
    return n;
}

void shard_writer_close(ShardWriter* writer) {
    if (writer->is_open) {
        shard_writer_end_(writer);
    }
    target_mask_free(&writer->mask);
}

void shard_writer_discard(ShardWriter* writer) {
    if (writer->is_open) {
        file_discard(&writer->file);
        writer->is_open = 0;
    }
    target_mask_free(&writer->mask);
}

#endif // SHARD_WRITER_IMPLEMENTATION

#endif
