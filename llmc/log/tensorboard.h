/*
tensorboard.h -- writes event files for TensorBoard:
OUT/tensorboard/events.out.tfevents.TIME.HOST.PROCESS, one for each start of the program.

A file is a sequence of records, each an Event in protobuf's wire format (little-endian; masked
crc32c):

    record         u64 length | u32 crc of the length | data | u32 crc of the data
    Event          1 wall_time (double) | 2 step (int64) | 3 file_version, or 5 summary,
                   or 7 session_log
    Summary        1 value, repeated: 1 tag | 2 simple_value (float), or 8 tensor and 9 metadata
                   for a text
    SessionLog     1 status; 1 is START

When a run continues after step N, the file starts with a START at step N + 1: TensorBoard then
drops the scalars of other files from that step on, because they are logged again. (It keeps the
texts.)
*/
#ifndef LLMC_TENSORBOARD_H
#define LLMC_TENSORBOARD_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    FILE* file; // NULL: closed, and all functions do nothing
    char path[PATH_MAX];
    unsigned char* data; // event being written
    size_t bytes, room;
    size_t summary; // start of its summary; 0: none
} TensorBoard;

// Starts a file in the directory `path`, which is created. `done` is the number of steps before
// this start; 0: a new run.
void tensorboard_open(TensorBoard* board, const char* path, int64_t done);

void tensorboard_close(TensorBoard* board);

// Starts again after `done` steps: what follows replaces what was logged after them.
void tensorboard_restart(TensorBoard* board, int64_t done);

// Write an event: begin, values, end. Without a value nothing is written; values outside an event
// are ignored.
void tensorboard_begin(TensorBoard* board, int64_t step);
void tensorboard_scalar(TensorBoard* board, const char* tag, double value);
void tensorboard_text(TensorBoard* board, const char* tag, const char* text, size_t bytes);
void tensorboard_end(TensorBoard* board);

// Flushes everything to the disk.
void tensorboard_sync(TensorBoard* board);

#ifdef __cplusplus
}
#endif

#ifdef TENSORBOARD_IMPLEMENTATION

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"

// ---- protobuf ----

typedef enum { PROTO_VARINT_ = 0, PROTO_64_ = 1, PROTO_BYTES_ = 2, PROTO_32_ = 5 } ProtoType_;

static void proto_put_(TensorBoard* board, const void* data, size_t bytes) {
    board->data =
        (unsigned char*)check_reserve(board->data, &board->room, board->bytes + bytes, 1, "TensorBoard");
    memcpy(board->data + board->bytes, data, bytes);
    board->bytes += bytes;
}

// Writes seven bits per byte, the lowest first.
static void proto_varint_(TensorBoard* board, uint64_t value) {
    do {
        const unsigned char byte = (unsigned char)((value & 0x7F) | (value > 0x7F ? 0x80 : 0));
        proto_put_(board, &byte, 1);
        value >>= 7;
    } while (value);
}

static void proto_key_(TensorBoard* board, unsigned field, ProtoType_ type) {
    proto_varint_(board, field << 3 | (unsigned)type);
}

static void proto_int_(TensorBoard* board, unsigned field, uint64_t value) {
    proto_key_(board, field, PROTO_VARINT_);
    proto_varint_(board, value);
}

static void proto_bytes_(TensorBoard* board, unsigned field, const void* data, size_t bytes) {
    proto_key_(board, field, PROTO_BYTES_);
    proto_varint_(board, bytes);
    proto_put_(board, data, bytes);
}

// Starts a message in the event. Its length comes before it, so it is written after the event and
// moved. Returns its position.
static size_t proto_open_(const TensorBoard* board) { return board->bytes; }

static void proto_close_(TensorBoard* board, unsigned field, size_t begin) {
    const size_t length = board->bytes - begin;
    proto_key_(board, field, PROTO_BYTES_); // these bytes belong before it
    proto_varint_(board, length);
    unsigned char head[16];
    const size_t head_bytes = board->bytes - begin - length;
    memcpy(head, board->data + begin + length, head_bytes);
    memmove(board->data + begin + head_bytes, board->data + begin, length);
    memcpy(board->data + begin, head, head_bytes);
}

// ---- records ----

// Returns the CRC-32C (Castagnoli), bit by bit: an event has a few hundred bytes.
static uint32_t tensorboard_crc_(const unsigned char* data, size_t bytes) {
    uint32_t crc = 0xFFFFFFFF;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78 : 0);
        }
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xA282EAD8; // TFRecord's mask
}

static void tensorboard_write_(TensorBoard* board) {
    const uint64_t length = board->bytes;
    unsigned char head[12];
    memcpy(head, &length, 8);
    const uint32_t head_crc = tensorboard_crc_(head, 8), crc = tensorboard_crc_(board->data, board->bytes);
    memcpy(head + 8, &head_crc, 4);
    fwrite(head, 1, sizeof(head), board->file);
    fwrite(board->data, 1, board->bytes, board->file);
    fwrite(&crc, 1, 4, board->file);
    CHECK(fflush(board->file) == 0 && !ferror(board->file), "%s: cannot write: %s", board->path,
          strerror(errno));
}

static void tensorboard_start_event_(TensorBoard* board, int64_t step) {
    const double time_s = time_unix_s();
    board->bytes = board->summary = 0;
    proto_key_(board, 1, PROTO_64_);
    proto_put_(board, &time_s, sizeof(time_s));
    proto_int_(board, 2, (uint64_t)step);
}

// ---- opening and closing ----

void tensorboard_open(TensorBoard* board, const char* path, int64_t done) {
    char host[256] = "";
    memset(board, 0, sizeof(*board));
    gethostname(host, sizeof(host) - 1);
    file_make_directory(path);
    file_path(board->path, "%s/events.out.tfevents.%010.0f.%s.%ld", path, time_unix_s(), host,
              (long)getpid());
    board->file = fopen(board->path, "wb");
    CHECK(board->file, "%s: cannot write: %s", board->path, strerror(errno));
    tensorboard_start_event_(board, 0);
    proto_bytes_(board, 3, "brain.Event:2", 13);
    tensorboard_write_(board);
    if (done > 0) {
        tensorboard_restart(board, done);
    }
}

void tensorboard_close(TensorBoard* board) {
    CHECK(!board->file || fclose(board->file) == 0, "%s: cannot write: %s", board->path, strerror(errno));
    free(board->data);
    memset(board, 0, sizeof(*board));
}

void tensorboard_sync(TensorBoard* board) {
    const int failed = board->file && fsync(fileno(board->file)) != 0 && errno != EINVAL;
    CHECK(!failed, "%s: cannot flush to disk: %s", board->path, strerror(errno));
}

// ---- events ----

void tensorboard_restart(TensorBoard* board, int64_t done) {
    if (!board->file) {
        return;
    }
    tensorboard_start_event_(board, done + 1);
    const size_t begin = proto_open_(board);
    proto_int_(board, 1, 1);
    proto_close_(board, 7, begin);
    tensorboard_write_(board);
}

void tensorboard_begin(TensorBoard* board, int64_t step) {
    if (board->file) {
        tensorboard_start_event_(board, step);
        board->summary = proto_open_(board);
    }
}

void tensorboard_scalar(TensorBoard* board, const char* tag, double value) {
    const float single = (float)value;
    if (!board->summary) {
        return;
    }
    const size_t begin = proto_open_(board);
    proto_bytes_(board, 1, tag, strlen(tag));
    proto_key_(board, 2, PROTO_32_);
    proto_put_(board, &single, sizeof(single));
    proto_close_(board, 1, begin);
}

// Writes a text. TensorBoard wants UTF-8, so a byte that belongs to no character becomes U+FFFD, as
// in the log.
static void proto_text_(TensorBoard* board, int field, const char* text, size_t bytes) {
    const size_t begin = proto_open_(board);
    for (size_t i = 0, used; i < bytes; i += used ? used : 1) {
        used = json_utf8_length((const unsigned char*)text + i, bytes - i);
        proto_put_(board, used ? text + i : "\xEF\xBF\xBD", used ? used : 3);
    }
    proto_close_(board, field, begin);
}

// Writes a tensor of one string, for the plugin "text".
void tensorboard_text(TensorBoard* board, const char* tag, const char* text, size_t bytes) {
    enum { DT_STRING = 7 };
    static const unsigned char plugin[] = {10, 6, 10, 4, 't', 'e', 'x', 't'}; // {1: {1: "text"}}
    if (!board->summary) {
        return;
    }
    const size_t begin = proto_open_(board);
    proto_bytes_(board, 1, tag, strlen(tag));
    const size_t tensor = proto_open_(board);
    proto_int_(board, 1, DT_STRING);
    proto_bytes_(board, 2, "", 0); // its shape: a scalar
    proto_text_(board, 8, text, bytes);
    proto_close_(board, 8, tensor);
    proto_bytes_(board, 9, plugin, sizeof(plugin));
    proto_close_(board, 1, begin);
}

void tensorboard_end(TensorBoard* board) {
    if (board->summary && board->bytes > board->summary) {
        proto_close_(board, 5, board->summary);
        tensorboard_write_(board);
    }
    board->summary = 0;
}

#endif // TENSORBOARD_IMPLEMENTATION

#endif
