/*
compressed_file.h -- reads a file, and decompresses it on the way: gzip (.gz), Zstandard (.zst), or
as it is.

    CompressedFile file;
    int ok = compressed_open(&file, "a.jsonl.gz", error);
    while (ok && (ok = compressed_read(&file, buffer, sizeof(buffer), &got)) && got > 0) { ... }
    compressed_close(&file);

The ending of the name decides the format; "-" is standard input, as it is. Several gzip members or
Zstandard frames in a row are one file. It is an error if the file ends inside one, if data are
damaged, if a checksum is wrong, or if anything follows the last member, except zeros after gzip,
with which tapes and disks are padded. Memory does not depend on the file, except for Zstandard's
window, which the file chooses (2 GiB at most).

Functions return 0 with the message in `error` (of ERROR_BYTES), which the caller keeps as long as
the file.
*/
#ifndef LLMC_COMPRESSED_FILE_H
#define LLMC_COMPRESSED_FILE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { COMPRESSED_NOT, COMPRESSED_GZIP, COMPRESSED_ZSTD } PackedKind;

typedef struct {
    const char* path; // borrowed
    char* error;      // borrowed
    PackedKind kind;
    int fd;
    uint64_t read_bytes; // bytes of the file read so far
    // (COMPRESSED_BUFFER_); bytes from `at` to `end` have yet to be decompressed
    unsigned char* packed;
    size_t at, end;
    int is_inside;     // inside a member or frame
    int has_member;    // a gzip member has been read to its end
    int is_padded;     // zeros follow it
    int has_more;      // the last output was full: more may come without further input
    double window_mib; // window of a Zstandard frame; 0: unknown
    void* library;     // decompressor: an isal inflate_state, a z_stream or a ZSTD_DStream
} CompressedFile;

PackedKind compressed_kind(const char* path);

// Returns the length of the name without ".gz" or ".zst".
size_t compressed_name_bytes(const char* path);

// ---- use ----

// Opens a file; after success the caller closes it.
int compressed_open(CompressedFile* file, const char* path, char* error);

void compressed_close(CompressedFile* file);

// Reads the next `bytes` of the decompressed file, fewer only at its end; sets *got.
int compressed_read(CompressedFile* file, void* buffer, size_t bytes, size_t* got);

// Skips `bytes` of the decompressed file. It is an error if the file ends before.
int compressed_skip(CompressedFile* file, uint64_t bytes);

#ifdef __cplusplus
}
#endif

#ifdef COMPRESSED_FILE_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

#if defined(HAVE_ISAL)
#include <isa-l/igzip_lib.h>
#elif defined(HAVE_ZLIB)
#include <zlib.h>
#endif
#ifdef HAVE_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif

enum { COMPRESSED_BUFFER_ = 1 << 18 }; // compressed bytes read at a time
#ifndef COMPRESSED_ZSTD_WINDOW
#define COMPRESSED_ZSTD_WINDOW 31 // log2 of the largest window in bytes, as with `zstd --long=31`
#endif

PackedKind compressed_kind(const char* path) {
    return file_ends_in(path, ".gz")    ? COMPRESSED_GZIP
           : file_ends_in(path, ".zst") ? COMPRESSED_ZSTD
                                        : COMPRESSED_NOT;
}

size_t compressed_name_bytes(const char* path) {
    static const size_t endings[3] = {0, sizeof(".gz") - 1, sizeof(".zst") - 1};
    return strlen(path) - endings[compressed_kind(path)];
}

// ---- gzip ----

#if defined(HAVE_ISAL)
static void compressed_begin_member_(CompressedFile* file) {
    struct inflate_state* stream = (struct inflate_state*)file->library;
    isal_inflate_reset(stream);
    stream->crc_flag = ISAL_GZIP; // isal checks header and checksum
}

static int compressed_open_gzip_(CompressedFile* file) {
    file->library = check_alloc(1, sizeof(struct inflate_state), "unpacking gzip");
    isal_inflate_init((struct inflate_state*)file->library);
    compressed_begin_member_(file);
    return 1;
}

static const char* compressed_isal_error_(int result) {
    return result == ISAL_INVALID_WRAPPER      ? "incorrect header"
           : result == ISAL_UNSUPPORTED_METHOD ? "unknown method"
           : result == ISAL_INCORRECT_CHECKSUM ? "incorrect checksum"
           : result == ISAL_NEED_DICT          ? "it needs a dictionary"
                                               : "invalid data";
}

// Decompresses as much as fits into out; sets *got to its bytes and advances file->at.
static int compressed_step_gzip_(CompressedFile* file, void* out, size_t room, size_t* got) {
    struct inflate_state* stream = (struct inflate_state*)file->library;
    const uint32_t max = (uint32_t)(room < UINT32_MAX ? room : UINT32_MAX);
    stream->next_in = file->packed + file->at;
    stream->avail_in = (uint32_t)(file->end - file->at);
    stream->next_out = (uint8_t*)out;
    stream->avail_out = max;
    const int result = isal_inflate(stream);
    if (result != ISAL_DECOMP_OK && result != ISAL_END_INPUT) {
        return error_set(file->error, file->path, "damaged, or not gzip data, in its first %llu bytes: %s",
                         (unsigned long long)file->read_bytes, compressed_isal_error_(result));
    }
    *got = max - stream->avail_out;
    file->is_inside = file->end - file->at > stream->avail_in || *got > 0 ? 1 : file->is_inside;
    file->at = file->end - stream->avail_in;
    if (stream->block_state == ISAL_BLOCK_FINISH) {
        file->is_inside = 0;
        file->has_member = 1;
        compressed_begin_member_(file);
    }
    return 1;
}

static void compressed_close_gzip_(CompressedFile* file) { free(file->library); }
#elif defined(HAVE_ZLIB)
static int compressed_open_gzip_(CompressedFile* file) {
    const int gzip_only = 16; // neither zlib's nor the raw format, with the largest window
    file->library = check_alloc(1, sizeof(z_stream), "unpacking gzip");
    CHECK(inflateInit2((z_stream*)file->library, MAX_WBITS + gzip_only) == Z_OK,
          "%s: no memory to unpack gzip", file->path);
    return 1;
}

// Decompresses as much as fits into out; sets *got to its bytes and advances file->at.
static int compressed_step_gzip_(CompressedFile* file, void* out, size_t room, size_t* got) {
    z_stream* stream = (z_stream*)file->library;
    const uInt max = (uInt)(room < UINT_MAX ? room : UINT_MAX);
    stream->next_in = file->packed + file->at;
    stream->avail_in = (uInt)(file->end - file->at);
    stream->next_out = (Bytef*)out;
    stream->avail_out = max;
    const int result = inflate(stream, Z_NO_FLUSH);
    CHECK(result != Z_MEM_ERROR, "%s: no memory to unpack gzip", file->path);
    // Z_BUF_ERROR: nothing to do
    if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) {
        return error_set(file->error, file->path, "damaged, or not gzip data, in its first %llu bytes: %s",
                         (unsigned long long)file->read_bytes,
                         stream->msg ? stream->msg : "it needs a dictionary");
    }
    *got = max - stream->avail_out;
    file->is_inside = file->end - file->at > stream->avail_in || *got > 0 ? 1 : file->is_inside;
    file->at = file->end - stream->avail_in;
    if (result == Z_STREAM_END) {
        file->is_inside = 0;
        file->has_member = 1;
        inflateReset(stream);
    }
    return 1;
}

static void compressed_close_gzip_(CompressedFile* file) {
    inflateEnd((z_stream*)file->library);
    free(file->library);
}
#else
static int compressed_open_gzip_(CompressedFile* file) {
    return error_set(file->error, file->path,
                     "built without zlib: install zlib1g-dev or libisal-dev and rebuild");
}
static int compressed_step_gzip_(CompressedFile* file, void* out, size_t room, size_t* got) {
    (void)out, (void)room, (void)got;
    return compressed_open_gzip_(file);
}
static void compressed_close_gzip_(CompressedFile* file) { (void)file; }
#endif

// ---- Zstandard ----

#ifdef HAVE_ZSTD
static int compressed_open_zstd_(CompressedFile* file) {
    ZSTD_DStream* stream = ZSTD_createDStream();
    file->library = stream;
    CHECK(stream &&
              !ZSTD_isError(ZSTD_DCtx_setParameter(stream, ZSTD_d_windowLogMax, COMPRESSED_ZSTD_WINDOW)),
          "%s: no memory to unpack Zstandard", file->path);
    return 1;
}

// Returns the window, in MiB, of a frame from its first n bytes (RFC 8878, 3.1.1.1); 0 if unknown.
static double compressed_zstd_window_mib_(const unsigned char* frame, size_t n) {
    static const unsigned char magic[4] = {0x28, 0xB5, 0x2F, 0xFD};
    const int is_single = n > 4 && frame[4] & 0x20; // its window is the whole frame
    if (n < 6 || memcmp(frame, magic, sizeof(magic)) != 0 || is_single) {
        return 0;
    }
    const double base = ldexp(1, 10 + (frame[5] >> 3));
    return (base + base / 8 * (frame[5] & 7)) / (1 << 20);
}

// Sets the library's error: damaged data, or more memory than allowed or available.
static int compressed_zstd_error_(CompressedFile* file, size_t result) {
    const ZSTD_ErrorCode code = ZSTD_getErrorCode(result);
    char window[64] = "a large window";
    if (file->window_mib > 0) {
        snprintf(window, sizeof(window), "a window of %.0f MiB", file->window_mib);
    }
    if (code == ZSTD_error_memory_allocation) {
        return error_set(file->error, file->path, "needs %s to be unpacked, and there is no memory for it",
                         window);
    }
    if (code == ZSTD_error_frameParameter_windowTooLarge) {
        return error_set(file->error, file->path,
                         "needs %s to be unpacked, wanted at most %d MiB: compress it with --long=%d or less",
                         window, 1 << (COMPRESSED_ZSTD_WINDOW - 20), COMPRESSED_ZSTD_WINDOW);
    }
    return error_set(file->error, file->path, "damaged, or not Zstandard data, in its first %llu bytes: %s",
                     (unsigned long long)file->read_bytes, ZSTD_getErrorName(result));
}

static int compressed_step_zstd_(CompressedFile* file, void* out, size_t room, size_t* got) {
    ZSTD_inBuffer input = {file->packed + file->at, file->end - file->at, 0};
    ZSTD_outBuffer output = {out, room, 0};
    if (!file->is_inside) {
        file->window_mib = compressed_zstd_window_mib_(file->packed + file->at, input.size);
    }
    const size_t result = ZSTD_decompressStream((ZSTD_DStream*)file->library, &output, &input);
    if (ZSTD_isError(result)) {
        return compressed_zstd_error_(file, result);
    }
    *got = output.pos;
    file->at += input.pos;
    if (input.pos > 0 || output.pos > 0) { // otherwise the result is only a hint how much to read
        file->is_inside = result != 0;
    }
    return 1;
}

static void compressed_close_zstd_(CompressedFile* file) { ZSTD_freeDStream((ZSTD_DStream*)file->library); }
#else
static int compressed_open_zstd_(CompressedFile* file) {
    return error_set(file->error, file->path, "built without zstd: install libzstd-dev and rebuild");
}
static int compressed_step_zstd_(CompressedFile* file, void* out, size_t room, size_t* got) {
    (void)out, (void)room, (void)got;
    return compressed_open_zstd_(file);
}
static void compressed_close_zstd_(CompressedFile* file) { (void)file; }
#endif

// ---- use ----

// Reads compressed bytes.
static int compressed_fetch_(CompressedFile* file, void* buffer, size_t room, size_t* got) {
    ssize_t n;
    do {
        n = read(file->fd, buffer, room);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        return error_set(file->error, file->path, "cannot read: %s", strerror(errno));
    }
    *got = (size_t)n;
    file->read_bytes += (uint64_t)n;
    return 1;
}

int compressed_open(CompressedFile* file, const char* path, char* error) {
    const int is_stdin = strcmp(path, "-") == 0;
    struct stat info;
    memset(file, 0, sizeof(*file));
    file->path = is_stdin ? "standard input" : path;
    file->error = error;
    file->kind = compressed_kind(path);
    file->fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0 || fstat(file->fd, &info) != 0) {
        error_set(error, path, "cannot open: %s", strerror(errno));
        if (file->fd > STDIN_FILENO) {
            close(file->fd);
        }
        return 0;
    }
    const int ok = S_ISDIR(info.st_mode) ? error_set(error, path, "a directory, wanted a file")
                   : !file_is_fetched(file->fd, path, error) ? 0
                   : file->kind == COMPRESSED_GZIP           ? compressed_open_gzip_(file)
                   : file->kind == COMPRESSED_ZSTD           ? compressed_open_zstd_(file)
                                                             : 1;
    if (!ok) {
        close(file->fd);
    } else if (file->kind != COMPRESSED_NOT) {
        file->packed = (unsigned char*)check_alloc(COMPRESSED_BUFFER_, 1, path);
    }
    return ok;
}

void compressed_close(CompressedFile* file) {
    if (file->kind == COMPRESSED_GZIP) {
        compressed_close_gzip_(file);
    } else if (file->kind == COMPRESSED_ZSTD) {
        compressed_close_zstd_(file);
    }
    free(file->packed);
    if (file->fd != STDIN_FILENO) {
        close(file->fd);
    }
    memset(file, 0, sizeof(*file));
}

// Skips zeros after a gzip member: nothing else may follow them.
static int compressed_skip_zeros_(CompressedFile* file) {
    while (file->at < file->end && file->packed[file->at] == 0) {
        file->at++;
        file->is_padded = 1;
    }
    return !file->is_padded || file->at == file->end ||
           error_set(file->error, file->path,
                     "damaged: zeros followed by something else, in its first "
                     "%llu bytes",
                     (unsigned long long)file->read_bytes);
}

// Decompresses some more. *got is 0 only at the end of the file.
static int compressed_unpack_(CompressedFile* file, void* buffer, size_t room, size_t* got) {
    for (*got = 0; *got == 0;) {
        if (file->at == file->end && !file->has_more) {
            file->at = 0;
            if (!compressed_fetch_(file, file->packed, COMPRESSED_BUFFER_, &file->end)) {
                return 0;
            }
            if (file->end == 0) {
                return file->read_bytes > 0 && !file->is_inside
                           ? 1
                           : error_set(file->error, file->path, "truncated: its %s data has no end",
                                       file->kind == COMPRESSED_GZIP ? "gzip" : "Zstandard");
            }
        }
        if (file->has_member && !file->is_inside) {
            if (!compressed_skip_zeros_(file)) {
                return 0;
            }
            if (file->at == file->end) {
                file->has_more = 0;
                continue;
            }
        }
        if (!(file->kind == COMPRESSED_GZIP ? compressed_step_gzip_ : compressed_step_zstd_)(file, buffer,
                                                                                             room, got)) {
            return 0;
        }
        file->has_more = *got == room;
    }
    return 1;
}

int compressed_read(CompressedFile* file, void* buffer, size_t bytes, size_t* got) {
    size_t done = 0, n = 1;
    int ok = 1;
    while (ok && n > 0 && done < bytes) {
        ok = (file->kind == COMPRESSED_NOT ? compressed_fetch_ : compressed_unpack_)(
            file, (char*)buffer + done, bytes - done, &n);
        done += ok ? n : 0;
    }
    *got = done;
    return ok;
}

// Skips bytes of an uncompressed file by seeking, as far as possible.
static int compressed_seek_(CompressedFile* file, uint64_t bytes) {
    struct stat info;
    const off_t at = lseek(file->fd, 0, SEEK_CUR);
    if (file->kind != COMPRESSED_NOT || at < 0 || fstat(file->fd, &info) != 0 || !S_ISREG(info.st_mode) ||
        at > info.st_size || bytes > (uint64_t)(info.st_size - at)) {
        return 0;
    }
    file->read_bytes += bytes;
    return lseek(file->fd, (off_t)bytes, SEEK_CUR) >= 0;
}

int compressed_skip(CompressedFile* file, uint64_t bytes) {
    char waste[1 << 14];
    if (compressed_seek_(file, bytes)) {
        return 1;
    }
    while (bytes > 0) {
        size_t got;
        if (!compressed_read(file, waste, bytes < sizeof(waste) ? (size_t)bytes : sizeof(waste), &got)) {
            return 0;
        }
        if (got == 0) {
            return error_set(file->error, file->path, "ends %llu bytes before the wanted position",
                             (unsigned long long)bytes);
        }
        bytes -= got;
    }
    return 1;
}

#endif // COMPRESSED_FILE_IMPLEMENTATION

#endif
