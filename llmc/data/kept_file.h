/*
kept_file.h -- the predictions of a teacher in a file: for each token of the training data the k
most likely next tokens, made once (--write-logits) for runs that learn without the teacher
(--teacher-logits).

    header    KeptHeader, 128 bytes, with a checksum of its own
    row 0     (T, k) ids, then (T, k) log-probabilities in fp16
    row 1     ...

The rows are those of the data (packing.h), in the order of the data; each takes the same number of
bytes, so that any row is found at once. Shorter rows end with zeros. Ids have 2 bytes for
vocabularies of up to 65536 tokens, else 4. The log-probabilities are natural, at the temperature of
the header. fp16 makes a log-probability l wrong by at most 2^-11 |l|, and so a probability p by at
most 2^-11 p |log p| <= 1.8e-4. All numbers are little-endian.

The file gets its name when it is complete.
*/
#ifndef LLMC_KEPT_FILE_H
#define LLMC_KEPT_FILE_H

#include <limits.h>
#include <stdint.h>

#include "llmc/base/file.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KEPT_VERSION = 1 };

// Everything that a file depends on.
typedef struct {
    char magic[8]; // "kept k\n"
    uint32_t version, k, V, T, pack, mask;
    float temperature;
    uint32_t id_bytes;
    uint64_t rows;
    uint64_t data, tokenizer, teacher; // checksums; tokenizer 0: none
    uint64_t unused[6];
    uint64_t checksum; // of all before it
} KeptHeader;

// Completes a header with the members that follow from the others.
KeptHeader kept_header(KeptHeader header);

// A file that is being read.
typedef struct {
    KeptHeader header;
    int fd;
    char path[PATH_MAX];
} KeptFile;

// Starts a file, whose rows follow in order; file_commit completes it.
void kept_file_create(FileWriter* file, const char* path, const KeptHeader* header);

// Appends a row of up to T tokens.
void kept_file_put(FileWriter* file, const KeptHeader* header, const int* ids, const float* log_probs,
                   int tokens);

// Opens a file. Ends the program if it is damaged.
void kept_file_open(KeptFile* file, const char* path);

// Ends the program if the file was made from other data, or for another temperature. The teacher
// and k may be any.
void kept_file_check(const KeptFile* file, const KeptHeader* wanted);

// Sets the first `tokens` tokens of a row: ids and log_probs (tokens, k). Returns 0 with the reason
// in `error` if it cannot be read.
int kept_file_read(const KeptFile* file, uint64_t row, int tokens, int* ids, float* log_probs, char* error);

void kept_file_close(KeptFile* file);

#ifdef __cplusplus
}
#endif

#ifdef KEPT_FILE_IMPLEMENTATION

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/float16.h"
#include "llmc/base/xxh64.h"

static const char KEPT_MAGIC_[8] = "kept k\n";

static_assert(sizeof(KeptHeader) == 128, "the header of a file has 128 bytes");

KeptHeader kept_header(KeptHeader header) {
    memcpy(header.magic, KEPT_MAGIC_, sizeof(header.magic));
    header.version = KEPT_VERSION;
    header.id_bytes = header.V <= 65536 ? 2 : 4;
    header.checksum = xxh64(&header, offsetof(KeptHeader, checksum));
    return header;
}

static size_t kept_row_bytes_(const KeptHeader* header) {
    return (size_t)header->T * header->k * (header->id_bytes + sizeof(uint16_t));
}

// ---- writing ----

void kept_file_create(FileWriter* file, const char* path, const KeptHeader* header) {
    file_open(file, path);
    file_put(file, header, sizeof(*header));
}

void kept_file_put(FileWriter* file, const KeptHeader* header, const int* ids, const float* log_probs,
                   int tokens) {
    const size_t all = (size_t)header->T * header->k, count = (size_t)tokens * header->k;
    char* row = (char*)check_alloc(kept_row_bytes_(header), 1, "a row of kept tokens");
    uint16_t* halves = (uint16_t*)(void*)(row + all * header->id_bytes);
    for (size_t i = 0; i < count; i++) {
        const uint16_t narrow = (uint16_t)ids[i];
        memcpy(row + i * header->id_bytes,
               header->id_bytes == 2 ? (const void*)&narrow : (const void*)&ids[i], header->id_bytes);
        halves[i] = fp16_from_float(log_probs[i] > -65504.0f ? log_probs[i] : -65504.0f);
    }
    file_put(file, row, kept_row_bytes_(header));
    free(row);
}

// ---- reading ----

static int kept_try_header_(const KeptFile* file, size_t bytes, char* error) {
    const KeptHeader* h = &file->header;
    if (bytes < sizeof(*h) || memcmp(h->magic, KEPT_MAGIC_, sizeof(h->magic)) != 0) {
        return error_set(error, file->path, "not a file of --write-logits");
    }
    if (h->version != KEPT_VERSION || h->checksum != xxh64(h, offsetof(KeptHeader, checksum))) {
        return error_set(error, file->path, "version %u, or a damaged header; wanted version %d", h->version,
                         KEPT_VERSION);
    }
    const size_t wanted = sizeof(*h) + (size_t)h->rows * kept_row_bytes_(h);
    return bytes == wanted || error_set(error, file->path, "%zu bytes, wanted %zu", bytes, wanted);
}

void kept_file_open(KeptFile* file, const char* path) {
    char error[ERROR_BYTES];
    struct stat info;
    file_path(file->path, "%s", path);
    file->fd = file_open_regular(path, error);
    CHECK(file->fd >= 0, "%s", error);
    memset((void*)&file->header, 0, sizeof(file->header));
    CHECK(fstat(file->fd, &info) == 0 && pread(file->fd, &file->header, sizeof(file->header), 0) >= 0,
          "%s: cannot read: %s", path, strerror(errno));
    CHECK(kept_try_header_(file, (size_t)info.st_size, error), "%s", error);
}

// Ends the program if a number of the header differs.
static void kept_file_same_(const KeptFile* file, const char* what, uint64_t found, uint64_t wanted) {
    if (found != wanted) {
        die_usage("--teacher-logits %s: %s %" PRIu64 ", and %" PRIu64
                  " in this run; wanted a file that --write-logits made from the same data and options",
                  file->path, what, found, wanted);
    }
}

void kept_file_check(const KeptFile* file, const KeptHeader* wanted) {
    const KeptHeader* h = &file->header;
    kept_file_same_(file, "a vocabulary of", h->V, wanted->V);
    kept_file_same_(file, "--seq-len is", h->T, wanted->T);
    kept_file_same_(file, "the packing is number", h->pack, wanted->pack);
    kept_file_same_(file, "--doc-mask is", h->mask, wanted->mask);
    kept_file_same_(file, "its tokenizer has the checksum", h->tokenizer, wanted->tokenizer);
    kept_file_same_(file, "its data have the checksum", h->data, wanted->data);
    kept_file_same_(file, "the number of sequences is", h->rows, wanted->rows);
    if (h->temperature != wanted->temperature) {
        die_usage("--teacher-logits %s was made for --distill-temperature %g; this run has %g", file->path,
                  (double)h->temperature, (double)wanted->temperature);
    }
}

static int kept_pread_(const KeptFile* file, void* to, size_t bytes, size_t at, char* error) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = pread(file->fd, (char*)to + done, bytes - done, (off_t)(at + done));
        if (n <= 0) {
            return error_set(error, file->path, "cannot read: %s", n < 0 ? strerror(errno) : "it ends early");
        }
        done += (size_t)n;
    }
    return 1;
}

int kept_file_read(const KeptFile* file, uint64_t row, int tokens, int* ids, float* log_probs, char* error) {
    const KeptHeader* h = &file->header;
    const size_t at = sizeof(*h) + (size_t)row * kept_row_bytes_(h), count = (size_t)tokens * h->k,
                 halves_at = at + (size_t)h->T * h->k * h->id_bytes;
    // narrow numbers at the end of the memory of wide ones, which are set from the start
    char* narrow = (char*)ids + count * (sizeof(int) - h->id_bytes);
    uint16_t* halves = (uint16_t*)(void*)log_probs + count;
    if (!kept_pread_(file, narrow, count * h->id_bytes, at, error) ||
        !kept_pread_(file, halves, count * sizeof(uint16_t), halves_at, error)) {
        return 0;
    }
    for (size_t i = 0; i < count; i++) {
        uint32_t id = 0;
        uint16_t half;
        memcpy(&id, narrow + i * h->id_bytes, h->id_bytes);
        memcpy(&half, halves + i, sizeof(half));
        if (id >= h->V) {
            return error_set(error, file->path, "row %" PRIu64 ": token %u, wanted one below %u", row, id,
                             h->V);
        }
        ids[i] = (int)id;
        log_probs[i] = fp16_to_float(half);
    }
    return 1;
}

void kept_file_close(KeptFile* file) {
    if (file->fd > 0) {
        close(file->fd);
    }
}

#endif // KEPT_FILE_IMPLEMENTATION

#endif
