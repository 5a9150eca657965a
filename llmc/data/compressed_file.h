/*
compressed_file.h -- the bytes of a file, unpacked while they are read: gzip (.gz), Zstandard
(.zst), or as it is.

    CompressedFile file;
    int ok = packed_open(&file, "a.jsonl.gz", error);
    while (ok && (ok = packed_read(&file, buffer, sizeof(buffer), &got)) && got > 0) { ... }
    packed_close(&file);

What packs a file is told by the end of its name; "-" is standard input, as it is. Several members
of gzip or frames of Zstandard behind each other are one file. A file that ends inside of one is
truncated: an error, as are damaged data, a wrong checksum, and anything else behind the last member
but zeros behind one of gzip, which tapes and disks are filled up with. Memory does not depend on
the file, but for Zstandard's window, which the file chooses (2 GiB at most).

Functions return 0 with the message in `error` (of ERROR_BYTES, the caller's, who keeps it as long
as the file).
*/
#ifndef LLMC_COMPRESSED_FILE_H
#define LLMC_COMPRESSED_FILE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { PACKED_NOT, PACKED_GZIP, PACKED_ZSTD } PackedKind;

typedef struct {
    const char* path; // borrowed
    char* error;      // borrowed
    PackedKind kind;
    int fd;
    uint64_t read_bytes;   // of the file, so far
    unsigned char* packed; // (PACKED_BUFFER_) packed bytes; those from `at` to `end` are still to be unpacked
    size_t at, end;
    int is_inside;     // of a member or frame
    int has_member;    // of gzip, read to its end
    int is_padded;     // zeros have been found behind it
    int has_more;      // the last output was full: there may be more without further input
    double window_mib; // of a frame of Zstandard; 0: not known
    void* library;     // its decompressor: an isal inflate_state, a z_stream or a ZSTD_DStream
} CompressedFile;

PackedKind packed_kind(const char* path);

// Bytes of the name without ".gz" or ".zst".
size_t packed_name_bytes(const char* path);

// ---- use ----

// The caller closes it after success.
int packed_open(CompressedFile* file, const char* path, char* error);

void packed_close(CompressedFile* file);

// Sets the next bytes of the unpacked file and *got to their number: `bytes`, unless the file ends
// before.
int packed_read(CompressedFile* file, void* buffer, size_t bytes, size_t* got);

// Steps over as many bytes of the unpacked file. It is an error if the file ends before.
int packed_skip(CompressedFile* file, uint64_t bytes);

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

enum { PACKED_BUFFER_ = 1 << 18 }; // bytes read from a packed file at a time
#ifndef PACKED_ZSTD_WINDOW
#define PACKED_ZSTD_WINDOW 31 // log2 of the largest window in bytes: what `zstd --long=31` writes
#endif

PackedKind packed_kind(const char* path) {
    return file_ends_in(path, ".gz") ? PACKED_GZIP : file_ends_in(path, ".zst") ? PACKED_ZSTD : PACKED_NOT;
}

size_t packed_name_bytes(const char* path) {
    static const size_t endings[3] = {0, sizeof(".gz") - 1, sizeof(".zst") - 1};
    return strlen(path) - endings[packed_kind(path)];
}

// ---- gzip ----

#if defined(HAVE_ISAL)
static void packed_begin_member_(CompressedFile* file) {
    struct inflate_state* stream = (struct inflate_state*)file->library;
    isal_inflate_reset(stream);
    stream->crc_flag = ISAL_GZIP; // header and checksum are its business
}

static int packed_open_gzip_(CompressedFile* file) {
    file->library = check_alloc(1, sizeof(struct inflate_state), "unpacking gzip");
    isal_inflate_init((struct inflate_state*)file->library);
    packed_begin_member_(file);
    return 1;
}

static const char* packed_isal_error_(int result) {
    return result == ISAL_INVALID_WRAPPER      ? "incorrect header"
           : result == ISAL_UNSUPPORTED_METHOD ? "unknown method"
           : result == ISAL_INCORRECT_CHECKSUM ? "incorrect checksum"
           : result == ISAL_NEED_DICT          ? "it needs a dictionary"
                                               : "invalid data";
}

// Unpacks what goes into out; sets *got to its bytes and moves file->at.
static int packed_step_gzip_(CompressedFile* file, void* out, size_t room, size_t* got) {
    struct inflate_state* stream = (struct inflate_state*)file->library;
    const uint32_t max = (uint32_t)(room < UINT32_MAX ? room : UINT32_MAX);
    stream->next_in = file->packed + file->at;
    stream->avail_in = (uint32_t)(file->end - file->at);
    stream->next_out = (uint8_t*)out;
    stream->avail_out = max;
    const int result = isal_inflate(stream);
    if (result != ISAL_DECOMP_OK && result != ISAL_END_INPUT) {
        return error_set(file->error, file->path, "damaged, or not gzip data, in its first %llu bytes: %s",
                         (unsigned long long)file->read_bytes, packed_isal_error_(result));
    }
    *got = max - stream->avail_out;
    file->is_inside = file->end - file->at > stream->avail_in || *got > 0 ? 1 : file->is_inside;
    file->at = file->end - stream->avail_in;
    if (stream->block_state == ISAL_BLOCK_FINISH) {
        file->is_inside = 0;
        file->has_member = 1;
        packed_begin_member_(file);
    }
    return 1;
}

static void packed_close_gzip_(CompressedFile* file) { free(file->library); }
#elif defined(HAVE_ZLIB)
static int packed_open_gzip_(CompressedFile* file) {
    const int gzip_only = 16; // no zlib or raw format, the largest window
    file->library = check_alloc(1, sizeof(z_stream), "unpacking gzip");
    CHECK(inflateInit2((z_stream*)file->library, MAX_WBITS + gzip_only) == Z_OK,
          "%s: no memory to unpack gzip", file->path);
    return 1;
}

// Unpacks what goes into out; sets *got to its bytes and moves file->at.
static int packed_step_gzip_(CompressedFile* file, void* out, size_t room, size_t* got) {
    z_stream* stream = (z_stream*)file->library;
    const uInt max = (uInt)(room < UINT_MAX ? room : UINT_MAX);
    stream->next_in = file->packed + file->at;
    stream->avail_in = (uInt)(file->end - file->at);
    stream->next_out = (Bytef*)out;
    stream->avail_out = max;
    const int result = inflate(stream, Z_NO_FLUSH);
    CHECK(result != Z_MEM_ERROR, "%s: no memory to unpack gzip", file->path);
    if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) { // Z_BUF_ERROR: nothing to do
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

static void packed_close_gzip_(CompressedFile* file) {
    inflateEnd((z_stream*)file->library);
    free(file->library);
}
#else
static int packed_open_gzip_(CompressedFile* file) {
    return error_set(file->error, file->path,
                     "built without zlib: install zlib1g-dev or libisal-dev and rebuild");
}
static int packed_step_gzip_(CompressedFile* file, void* out, size_t room, size_t* got) {
    (void)out, (void)room, (void)got;
    return packed_open_gzip_(file);
}
static void packed_close_gzip_(CompressedFile* file) { (void)file; }
#endif

// ---- Zstandard ----

#ifdef HAVE_ZSTD
static int packed_open_zstd_(CompressedFile* file) {
    ZSTD_DStream* stream = ZSTD_createDStream();
    file->library = stream;
    CHECK(stream && !ZSTD_isError(ZSTD_DCtx_setParameter(stream, ZSTD_d_windowLogMax, PACKED_ZSTD_WINDOW)),
          "%s: no memory to unpack Zstandard", file->path);
    return 1;
}

// The window of a frame whose first n bytes are here, in MiB (RFC 8878, 3.1.1.1); 0: not known.
static double packed_zstd_window_mib_(const unsigned char* frame, size_t n) {
    static const unsigned char magic[4] = {0x28, 0xB5, 0x2F, 0xFD};
    const int is_single = n > 4 && frame[4] & 0x20; // its window is all of it
    if (n < 6 || memcmp(frame, magic, sizeof(magic)) != 0 || is_single) {
        return 0;
    }
    const double base = ldexp(1, 10 + (frame[5] >> 3));
    return (base + base / 8 * (frame[5] & 7)) / (1 << 20);
}

// An error of the library: damaged data, or more memory than it may have or can get.
static int packed_zstd_error_(CompressedFile* file, size_t result) {
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
                         "needs %s to be unpacked, wanted at most %d MiB: pack it with --long=%d or less",
                         window, 1 << (PACKED_ZSTD_WINDOW - 20), PACKED_ZSTD_WINDOW);
    }
    return error_set(file->error, file->path, "damaged, or not Zstandard data, in its first %llu bytes: %s",
                     (unsigned long long)file->read_bytes, ZSTD_getErrorName(result));
}

static int packed_step_zstd_(CompressedFile* file, void* out, size_t room, size_t* got) {
    ZSTD_inBuffer input = {file->packed + file->at, file->end - file->at, 0};
    ZSTD_outBuffer output = {out, room, 0};
    if (!file->is_inside) {
        file->window_mib = packed_zstd_window_mib_(file->packed + file->at, input.size);
    }
    const size_t result = ZSTD_decompressStream((ZSTD_DStream*)file->library, &output, &input);
    if (ZSTD_isError(result)) {
        return packed_zstd_error_(file, result);
    }
    *got = output.pos;
    file->at += input.pos;
    if (input.pos > 0 || output.pos > 0) { // else it only says what it would like to read
        file->is_inside = result != 0;
    }
    return 1;
}

static void packed_close_zstd_(CompressedFile* file) { ZSTD_freeDStream((ZSTD_DStream*)file->library); }
#else
static int packed_open_zstd_(CompressedFile* file) {
    return error_set(file->error, file->path, "built without zstd: install libzstd-dev and rebuild");
}
static int packed_step_zstd_(CompressedFile* file, void* out, size_t room, size_t* got) {
    (void)out, (void)room, (void)got;
    return packed_open_zstd_(file);
}
static void packed_close_zstd_(CompressedFile* file) { (void)file; }
#endif

// ---- use ----

// Reads bytes of the file itself.
static int packed_fetch_(CompressedFile* file, void* buffer, size_t room, size_t* got) {
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

int packed_open(CompressedFile* file, const char* path, char* error) {
    const int is_stdin = strcmp(path, "-") == 0;
    struct stat info;
    memset(file, 0, sizeof(*file));
    file->path = is_stdin ? "standard input" : path;
    file->error = error;
    file->kind = packed_kind(path);
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
                   : file->kind == PACKED_GZIP               ? packed_open_gzip_(file)
                   : file->kind == PACKED_ZSTD               ? packed_open_zstd_(file)
                                                             : 1;
    if (!ok) {
        close(file->fd);
    } else if (file->kind != PACKED_NOT) {
        file->packed = (unsigned char*)check_alloc(PACKED_BUFFER_, 1, path);
    }
    return ok;
}

void packed_close(CompressedFile* file) {
    if (file->kind == PACKED_GZIP) {
        packed_close_gzip_(file);
    } else if (file->kind == PACKED_ZSTD) {
        packed_close_zstd_(file);
    }
    free(file->packed);
    if (file->fd != STDIN_FILENO) {
        close(file->fd);
    }
    memset(file, 0, sizeof(*file));
}

// Steps over zeros behind a member of gzip: nothing else may follow them.
static int packed_skip_zeros_(CompressedFile* file) {
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

// Unpacks some more. *got is 0 only at the end of the file.
static int packed_unpack_(CompressedFile* file, void* buffer, size_t room, size_t* got) {
    for (*got = 0; *got == 0;) {
        if (file->at == file->end && !file->has_more) {
            file->at = 0;
            if (!packed_fetch_(file, file->packed, PACKED_BUFFER_, &file->end)) {
                return 0;
            }
            if (file->end == 0) {
                return file->read_bytes > 0 && !file->is_inside
                           ? 1
                           : error_set(file->error, file->path, "truncated: its %s data has no end",
                                       file->kind == PACKED_GZIP ? "gzip" : "Zstandard");
            }
        }
        if (file->has_member && !file->is_inside) {
            if (!packed_skip_zeros_(file)) {
                return 0;
            }
            if (file->at == file->end) {
                file->has_more = 0;
                continue;
            }
        }
        if (!(file->kind == PACKED_GZIP ? packed_step_gzip_ : packed_step_zstd_)(file, buffer, room, got)) {
            return 0;
        }
        file->has_more = *got == room;
    }
    return 1;
}

int packed_read(CompressedFile* file, void* buffer, size_t bytes, size_t* got) {
    size_t done = 0, n = 1;
    int ok = 1;
    while (ok && n > 0 && done < bytes) {
        ok = (file->kind == PACKED_NOT ? packed_fetch_ : packed_unpack_)(file, (char*)buffer + done,
                                                                         bytes - done, &n);
        done += ok ? n : 0;
    }
    *got = done;
    return ok;
}

// Steps over so much of a file that is not packed, if it can be done without reading it.
static int packed_seek_(CompressedFile* file, uint64_t bytes) {
    struct stat info;
    const off_t at = lseek(file->fd, 0, SEEK_CUR);
    if (file->kind != PACKED_NOT || at < 0 || fstat(file->fd, &info) != 0 || !S_ISREG(info.st_mode) ||
        at > info.st_size || bytes > (uint64_t)(info.st_size - at)) {
        return 0;
    }
    file->read_bytes += bytes;
    return lseek(file->fd, (off_t)bytes, SEEK_CUR) >= 0;
}

int packed_skip(CompressedFile* file, uint64_t bytes) {
    char waste[1 << 14];
    if (packed_seek_(file, bytes)) {
        return 1;
    }
    while (bytes > 0) {
        size_t got;
        if (!packed_read(file, waste, bytes < sizeof(waste) ? (size_t)bytes : sizeof(waste), &got)) {
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
