/*
parquet.h -- reads the texts of one column of a Parquet file, as pyarrow, polars, DuckDB and
parquet-rs write them.

    Parquet file;
    const char* text;
    size_t bytes;
    if (parquet_open(&file, "000_00000.parquet", "text")) {
        while (parquet_next(&file, &text, &bytes) > 0) { ... }
    }
    parquet_close(&file);

The file: "PAR1", pages, footer, u32 bytes of the footer, "PAR1". The footer and the page headers
are structs in Thrift's compact protocol. The rows are divided into row groups; in each, a column is
one run of pages, of which the first may be a dictionary. A page is a header, the definition levels
of a column that may be null (1: a value, 0: null), and the values:

    PLAIN                      for each text u32 bytes, then these bytes
    RLE_DICTIONARY             u8 width, then runs of indices into the dictionary, which is PLAIN
    DELTA_LENGTH_BYTE_ARRAY    the lengths of all, then the bytes of all
    DELTA_BYTE_ARRAY           the length of the prefix shared with the previous value, then the
                               rest as above

github.com/apache/parquet-format: README, Encodings, Compression, src/main/thrift/parquet.thrift.

Supported are top-level columns of strings that are required or optional; both versions of pages;
pages uncompressed, or compressed by GZIP, ZSTD or SNAPPY if the program was built with HAVE_ZLIB,
HAVE_ZSTD, HAVE_SNAPPY. One page and its dictionary are in memory at a time.

Nothing in the file is trusted: every number is checked before use, and a page must end with its
last row. Page checksums, if any, are verified with HAVE_ZLIB. Little-endian machines only.

Speed: one core of a Sapphire Rapids Xeon, 185 MB of English in texts of 3 kB: 1300 MB/s of text
uncompressed, 640 ZSTD, 300 SNAPPY, 140 GZIP, in 19 MiB of memory; pyarrow 26 on one thread 450,
630, 300 and 150.
*/
#ifndef LLMC_PARQUET_H
#define LLMC_PARQUET_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/check.h"
#include "llmc/data/thrift.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- runs of small numbers: definition levels, indices into the dictionary ----

// Reader of runs: each is a varint 2n and one number, n times, or a varint 2n + 1 and 8n packed
// numbers.
typedef struct {
    ThriftReader bytes;
    int width; // bits per number, up to 32
    int bit;   // bits used of the byte at bytes.at, in a packed run
    int is_packed;
    uint64_t left; // numbers left in this run
    uint32_t value;
} ParquetRuns_;

// ---- DELTA_BINARY_PACKED: lengths ----

// Reader of deltas. Varints: numbers per block, miniblocks per block, numbers in all, the first
// number. Then blocks: the smallest difference, the width of each miniblock as a byte, and the
// miniblocks: differences minus the smallest, packed. The last block has only the miniblocks it
// needs. Sums wrap at 64 bits, of which lengths are the lower half.
typedef struct {
    ThriftReader bytes;
    uint64_t left;       // numbers left, including `next`
    uint64_t next;       // number
    uint64_t smallest;   // difference
    uint64_t miniblocks; // per block
    uint64_t numbers;    // per miniblock
    // widths of the miniblocks of this block not started yet
    const unsigned char *widths, *widths_end;
    uint64_t in_miniblock; // numbers left in this one
    const unsigned char* miniblock_end;
    int width, bit;
} ParquetDeltas_;

// ---- an open file ----

// Column of a row group.
typedef struct {
    uint64_t rows;
    uint64_t begin, end; // its pages in the file
    int codec;
} ParquetChunk_;

typedef struct {
    unsigned char* data;
    size_t capacity;
} ParquetBuffer_;

typedef struct {
    const unsigned char* text;
    size_t bytes;
} ParquetText_;

typedef struct {
    char *path, *column;
    int fd;
    uint64_t bytes;  // size of the file
    int may_be_null; // values have definition levels
    uint64_t rows;
    ParquetChunk_* chunks; // the column's, by row group
    size_t num_chunks;

    // where we are
    size_t group, page;     // current row group, and its pages up to the current one
    uint64_t at;            // start of the next page, 0 before the row group starts
    uint64_t rows_in_group; // rows not in a page yet
    uint64_t rows_in_page;  // rows not read yet

    // the page
    int encoding;
    ParquetRuns_ levels, indices;
    ParquetDeltas_ prefixes, lengths;
    ThriftReader values;
    size_t text_bytes; // length of the last value, in `text`: DELTA_BYTE_ARRAY
    ParquetText_* dictionary;
    size_t num_dictionary;
    ParquetBuffer_ stored, plain, dictionary_plain, text;

    char error[ERROR_BYTES];
} Parquet;

// ---- opening ----

// Closes the file; p->error stays.
void parquet_close(Parquet* p);

// Opens a file and checks its footer. Returns 1; or 0 with the reason in p->error and nothing to
// close.
int parquet_open(Parquet* p, const char* path, const char* column);

// Returns the number of rows, including nulls.
static inline uint64_t parquet_rows(const Parquet* p) { return p->rows; }

// ---- values ----

// Reads the next row: 1 and its text, without a terminating zero, valid until the next call; NULL
// and no bytes if it is null. 0 after the last; -1 with the reason in p->error if the file is
// damaged: then only parquet_close may follow.
int parquet_next(Parquet* p, const char** text, size_t* bytes);

#ifdef __cplusplus
}
#endif

#ifdef PARQUET_IMPLEMENTATION

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "llmc/base/file.h"
#include "llmc/data/parquet_footer.h"

#ifdef HAVE_ZLIB
#include <zlib.h>
#endif
#ifdef HAVE_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif
#ifdef HAVE_SNAPPY
#include <snappy-c.h>
#endif

// ---- numbers ----

// Reads a little-endian number of up to 4 bytes.
static uint32_t parquet_fixed_(ThriftReader* in, size_t count) {
    const unsigned char* bytes = thrift_take(in, count);
    uint32_t value = 0;
    if (bytes) {
        memcpy(&value, bytes, count);
    }
    return value;
}

// Reads the next `width` bits, up to 64, lowest first; *bit bits of *in->at are used already.
static uint64_t parquet_bits_(ThriftReader* in, int* bit, int width) {
    uint64_t value = 0;
    for (int have = 0; have < width;) {
        if (in->at == in->end) {
            thrift_wrong(in, "the packed numbers end too early");
            return 0;
        }
        const int count = 8 - *bit < width - have ? 8 - *bit : width - have;
        value |= (uint64_t)(*in->at >> *bit & ((1 << count) - 1)) << have;
        have += count;
        *bit += count;
        in->at += *bit / 8;
        *bit %= 8;
    }
    return value;
}

// ---- runs of small numbers: definition levels, indices into the dictionary ----

static ParquetRuns_ parquet_runs_(ThriftReader bytes, int width) {
    ParquetRuns_ runs;
    memset(&runs, 0, sizeof(runs));
    runs.bytes = bytes;
    runs.width = width;
    if (width > 32) {
        thrift_wrong(&runs.bytes, "indices have more than 32 bits");
    }
    return runs;
}

static uint32_t parquet_runs_next_(ParquetRuns_* runs) {
    while (runs->left == 0 && !runs->bytes.wrong) {
        const uint64_t header = thrift_varint(&runs->bytes);
        runs->is_packed = header & 1;
        runs->left = (header >> 1) * (runs->is_packed ? 8 : 1);
        runs->bit = 0;
        if (header > UINT32_MAX) {
            thrift_wrong(&runs->bytes, "a run is too long");
        } else if (!runs->is_packed) {
            runs->value = parquet_fixed_(&runs->bytes, ((size_t)runs->width + 7) / 8);
        }
    }
    runs->left--;
    return runs->is_packed ? (uint32_t)parquet_bits_(&runs->bytes, &runs->bit, runs->width) : runs->value;
}

// ---- DELTA_BINARY_PACKED: lengths ----

// Starts to read deltas. Empty input gives no numbers: a page of nulls may lack the header.
static ParquetDeltas_ parquet_deltas_(ThriftReader bytes) {
    ParquetDeltas_ deltas;
    memset(&deltas, 0, sizeof(deltas));
    deltas.bytes = bytes;
    deltas.miniblock_end = bytes.at;
    if (bytes.at == bytes.end) {
        return deltas;
    }
    ThriftReader* in = &deltas.bytes;
    const uint64_t block = thrift_varint(in);
    deltas.miniblocks = thrift_varint(in);
    deltas.left = thrift_varint(in);
    deltas.next = (uint64_t)thrift_zigzag(in);
    deltas.miniblock_end = in->at;
    if (block == 0 || block > INT32_MAX || deltas.miniblocks == 0 || deltas.miniblocks > block ||
        block % deltas.miniblocks || block / deltas.miniblocks % 8 || deltas.left > INT32_MAX) {
        thrift_wrong(in, "lengths have an impossible header");
        deltas.left = 0;
        return deltas;
    }
    deltas.numbers = block / deltas.miniblocks;
    return deltas;
}

static void parquet_deltas_miniblock_(ParquetDeltas_* deltas) {
    ThriftReader* in = &deltas->bytes;
    if (deltas->widths == deltas->widths_end) {
        deltas->smallest = (uint64_t)thrift_zigzag(in);
        deltas->widths = thrift_take(in, deltas->miniblocks);
        if (!deltas->widths) {
            deltas->widths_end = NULL;
            return;
        }
        deltas->widths_end = deltas->widths + deltas->miniblocks;
    }
    deltas->width = *deltas->widths++;
    deltas->bit = 0;
    deltas->in_miniblock = deltas->numbers;
    const uint64_t bytes = deltas->numbers / 8 * (uint64_t)deltas->width;
    if (deltas->width > 64 || bytes > thrift_left(in)) {
        thrift_wrong(in, "lengths end too early");
        return;
    }
    deltas->miniblock_end = in->at + bytes;
}

static uint64_t parquet_deltas_next_(ParquetDeltas_* deltas) {
    const uint64_t number = deltas->next;
    if (deltas->left == 0 || deltas->bytes.wrong) {
        return (uint64_t)thrift_wrong(&deltas->bytes, "there are fewer lengths than values");
    }
    if (--deltas->left == 0) {
        return number;
    }
    if (deltas->in_miniblock == 0) {
        parquet_deltas_miniblock_(deltas);
    }
    if (!deltas->bytes.wrong) {
        deltas->in_miniblock--;
        deltas->next += deltas->smallest + parquet_bits_(&deltas->bytes, &deltas->bit, deltas->width);
    }
    return number;
}

// Returns what follows the numbers, by stepping through all of them.
static ThriftReader parquet_deltas_rest_(ParquetDeltas_ deltas) {
    while (deltas.left && !deltas.bytes.wrong) {
        parquet_deltas_next_(&deltas);
    }
    if (!deltas.bytes.wrong) {
        deltas.bytes.at = deltas.miniblock_end;
    }
    return deltas.bytes;
}

// ---- an open file ----

static char* parquet_copy_(const char* string) {
    char* copy = strdup(string);
    CHECK(copy, "no memory for a name");
    return copy;
}

// Makes room for `bytes`; the buffer's contents are lost.
static unsigned char* parquet_reserve_(const Parquet* p, ParquetBuffer_* buffer, size_t bytes) {
    if (!buffer->data || buffer->capacity < bytes) {
        free(buffer->data);
        buffer->data = (unsigned char*)malloc(bytes ? bytes : 1);
        buffer->capacity = bytes;
        CHECK(buffer->data, "%s: no memory for a page of %zu bytes", p->path, bytes);
    }
    return buffer->data;
}

// Reads a part of the file, which must lie inside it, into `buffer`.
static int parquet_read_(Parquet* p, ParquetBuffer_* buffer, uint64_t at, size_t bytes) {
    unsigned char* data = parquet_reserve_(p, buffer, bytes);
    assert(at <= p->bytes && bytes <= p->bytes - at);
    for (size_t have = 0; have < bytes;) {
        const ssize_t n = pread(p->fd, data + have, bytes - have, (off_t)(at + have));
        if (n > 0) {
            have += (size_t)n;
        } else if (n == 0 || errno != EINTR) {
            return error_set(p->error, p->path, "byte %llu: cannot read: %s", (unsigned long long)(at + have),
                             n == 0 ? "the file became shorter" : strerror(errno));
        }
    }
    return 1;
}

// ---- opening ----

static int parquet_open_file_(Parquet* p) {
    struct stat info;
    p->fd = open(p->path, O_RDONLY | O_CLOEXEC);
    if (p->fd < 0 || fstat(p->fd, &info) != 0) {
        return error_set(p->error, p->path, "cannot open: %s", strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        return error_set(p->error, p->path, "not a regular file");
    }
    p->bytes = (uint64_t)info.st_size;
    return file_is_fetched(p->fd, p->path, p->error);
}

static int parquet_parse_(Parquet* p) {
    uint32_t footer_bytes;
    if (p->bytes < 12) {
        return error_set(p->error, p->path, "%llu bytes, wanted a Parquet file",
                         (unsigned long long)p->bytes);
    }
    if (!parquet_read_(p, &p->stored, p->bytes - 8, 8)) {
        return 0;
    }
    memcpy(&footer_bytes, p->stored.data, 4);
    if (memcmp(p->stored.data + 4, "PARE", 4) == 0) {
        return error_set(p->error, p->path, "an encrypted Parquet file, wanted a plain one");
    }
    if (memcmp(p->stored.data + 4, "PAR1", 4) != 0) {
        return error_set(p->error, p->path, "does not end with PAR1: truncated, or not a Parquet file");
    }
    if (footer_bytes > p->bytes - 12) {
        return error_set(p->error, p->path, "a footer of %u bytes in a file of %llu: damaged", footer_bytes,
                         (unsigned long long)p->bytes);
    }
    const uint64_t footer_at = p->bytes - 8 - footer_bytes;
    return parquet_read_(p, &p->stored, footer_at, footer_bytes) &&
           parquet_footer(p, thrift_reader(p->stored.data, footer_bytes), footer_at);
}

void parquet_close(Parquet* p) {
    if (p->fd >= 0) {
        close(p->fd);
    }
    free(p->path);
    free(p->column);
    free(p->chunks);
    free(p->dictionary);
    free(p->stored.data);
    free(p->plain.data);
    free(p->dictionary_plain.data);
    free(p->text.data);
    memset(p, 0, offsetof(Parquet, error));
    p->fd = -1;
}

int parquet_open(Parquet* p, const char* path, const char* column) {
    memset(p, 0, sizeof(*p));
    p->encoding = PARQUET_NO_PAGE_;
    p->path = parquet_copy_(path);
    p->column = parquet_copy_(column);
    const int ok = parquet_open_file_(p) && parquet_parse_(p);
    if (!ok) {
        parquet_close(p);
    }
    return ok;
}

// ---- decompressing: returns NULL or an error; `out` must be filled exactly ----

#ifdef HAVE_ZLIB
// Decompresses one or more members, each with its checksum.
static inline const char* parquet_gunzip_(unsigned char* out, size_t out_bytes, const unsigned char* in,
                                          size_t in_bytes) {
    z_stream stream;
    memset(&stream, 0, sizeof(stream));
    CHECK(inflateInit2(&stream, 15 + 32) == Z_OK,
          "no memory to read GZIP"); // 32: gzip or zlib, which some writers use
    stream.next_in = (unsigned char*)in;
    stream.avail_in = (unsigned)in_bytes;
    stream.next_out = out;
    stream.avail_out = (unsigned)out_bytes;
    int status = inflate(&stream, Z_FINISH);
    while (status == Z_STREAM_END && stream.avail_in > 0) {
        status = inflateReset(&stream) == Z_OK ? inflate(&stream, Z_FINISH) : Z_STREAM_ERROR;
    }
    const int ok = status == Z_STREAM_END && stream.avail_out == 0;
    inflateEnd(&stream);
    return ok                      ? NULL
           : status == Z_MEM_ERROR ? "no memory to read its GZIP data"
                                   : "its GZIP data are damaged";
}
#endif

static const char* parquet_decompress_(int codec, unsigned char* out, size_t out_bytes,
                                       const unsigned char* in, size_t in_bytes) {
#ifdef HAVE_ZLIB
    if (codec == PARQUET_GZIP_) {
        return parquet_gunzip_(out, out_bytes, in, in_bytes);
    }
#endif
#ifdef HAVE_ZSTD
    if (codec == PARQUET_ZSTD_) {
        const size_t result = ZSTD_decompress(out, out_bytes, in, in_bytes);
        return result == out_bytes                                         ? NULL
               : ZSTD_getErrorCode(result) == ZSTD_error_memory_allocation ? "no memory to read its ZSTD data"
                                                                           : "its ZSTD data are damaged";
    }
#endif
#ifdef HAVE_SNAPPY
    if (codec == PARQUET_SNAPPY_) {
        size_t length = out_bytes;
        const int ok = snappy_uncompress((const char*)in, in_bytes, (char*)out, &length) == SNAPPY_OK;
        return ok && length == out_bytes ? NULL : "its SNAPPY data are damaged";
    }
#endif
    (void)out, (void)out_bytes, (void)in, (void)in_bytes;
    assert(codec == PARQUET_UNCOMPRESSED_); // parquet_chunk_ refuses the others
    return "its data are compressed";
}

// Returns the largest factor by which a codec can expand: a page that claims more gets no memory.
// SNAPPY copies 64 bytes by 3, DEFLATE 258 by 2 bits, ZSTD 128 KiB by 4 bytes.
static uint64_t parquet_most_(int codec) {
    return codec == PARQUET_SNAPPY_ ? 32 : codec == PARQUET_GZIP_ ? 1100 : codec == PARQUET_ZSTD_ ? 40000 : 1;
}

// ---- pages ----

// Page header; -1: absent.
typedef struct {
    int64_t type, bytes, stored_bytes, checksum;
    int has_checksum;
    int64_t values, encoding, level_encoding, level_bytes, repetition_bytes, is_compressed;
} ParquetPage_;

// Sets an error of the current page.
__attribute__((format(printf, 2, 3))) static inline int parquet_fail_(Parquet* p, const char* format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    error_set(p->error, p->path, "row group %zu, page %zu: %s", p->group, p->page - 1, message);
    return 0;
}

// Reads the part of the header that is specific to its page type.
static void parquet_page_part_(ThriftReader* in, ParquetPage_* page, int is_v2) {
    int64_t* const v1[8] = {[1] = &page->values, &page->encoding, &page->level_encoding};
    int64_t* const v2[8] = {[1] = &page->values,
                            [4] = &page->encoding,
                            &page->level_bytes,
                            &page->repetition_bytes,
                            &page->is_compressed};
    ThriftField field = {0, 0};
    while (thrift_field(in, &field)) {
        int64_t* const number = 0 < field.id && field.id < 8 ? (is_v2 ? v2 : v1)[field.id] : NULL;
        if (number) {
            *number = thrift_number(in, field);
        } else {
            thrift_skip(in, field);
        }
    }
}

static ParquetPage_ parquet_page_header_(ThriftReader* in) {
    ParquetPage_ page = {-1, -1, -1, 0, 0, -1, -1, -1, -1, -1, 1};
    int64_t* const numbers[5] = {[1] = &page.type, &page.bytes, &page.stored_bytes, &page.checksum};
    ThriftField field = {0, 0};
    while (thrift_field(in, &field)) {
        if ((field.id == 5 || field.id == 7 || field.id == 8) && field.type == THRIFT_STRUCT) {
            parquet_page_part_(in, &page, field.id == 8);
        } else if (0 < field.id && field.id < 5) {
            *numbers[field.id] = thrift_number(in, field);
            page.has_checksum |= field.id == 4;
        } else {
            thrift_skip(in, field);
        }
    }
    return page;
}

// Reads the header at p->at and steps over it. Its length is unknown: its statistics may be as long
// as texts.
static int parquet_read_header_(Parquet* p, uint64_t end, ParquetPage_* page) {
    for (size_t bytes = 256;; bytes *= 16) {
        const int all = bytes >= end - p->at;
        bytes = all ? (size_t)(end - p->at) : bytes;
        if (!parquet_read_(p, &p->stored, p->at, bytes)) {
            return 0;
        }
        ThriftReader in = thrift_reader(p->stored.data, bytes);
        *page = parquet_page_header_(&in);
        if (!in.wrong) {
            p->at += (uint64_t)(in.at - p->stored.data);
            return 1;
        }
        if (all) {
            return parquet_fail_(p, "damaged header: %s", in.wrong);
        }
    }
}

static int parquet_check_page_(Parquet* p, const ParquetPage_* page, const ParquetChunk_* chunk) {
    const uint64_t stored = (uint64_t)page->stored_bytes, left = chunk->end - p->at;
    if (page->stored_bytes < 0 || page->bytes < 0 || page->bytes > INT32_MAX || stored > left) {
        return parquet_fail_(p, "%lld bytes, %lld when decompressed, in %llu bytes of pages: damaged",
                             (long long)page->stored_bytes, (long long)page->bytes, (unsigned long long)left);
    }
    if ((uint64_t)page->bytes > (stored + 16) * parquet_most_(chunk->codec)) {
        return parquet_fail_(p, "%lld bytes cannot become %lld by %s: damaged", (long long)page->stored_bytes,
                             (long long)page->bytes, parquet_codec_name(chunk->codec));
    }
    return 1;
}

#ifdef HAVE_ZLIB
static inline int parquet_check_sum_(Parquet* p, const ParquetPage_* page) {
    const uint32_t sum = (uint32_t)crc32(0, p->stored.data, (unsigned)page->stored_bytes);
    if (page->has_checksum && sum != (uint32_t)page->checksum) {
        return parquet_fail_(p, "checksum %08x, wanted %08x: damaged", sum, (uint32_t)page->checksum);
    }
    return 1;
}
#else
static inline int parquet_check_sum_(Parquet* p, const ParquetPage_* page) { return (void)p, (void)page, 1; }
#endif

// Decompresses everything after the first `raw` bytes, which are never compressed.
static ThriftReader parquet_plain_(const Parquet* p, const ParquetPage_* page, size_t raw,
                                   ParquetBuffer_* buffer) {
    const unsigned char* stored = p->stored.data + raw;
    const size_t stored_bytes = (size_t)page->stored_bytes - raw, bytes = (size_t)page->bytes - raw;
    const int codec = page->is_compressed ? p->chunks[p->group].codec : PARQUET_UNCOMPRESSED_;
    ThriftReader plain = thrift_reader(parquet_reserve_(p, buffer, bytes), bytes);
    const char* wrong = NULL;
    if (codec != PARQUET_UNCOMPRESSED_) { // some writers compress nothing to nothing
        wrong = bytes ? parquet_decompress_(codec, buffer->data, bytes, stored, stored_bytes) : NULL;
    } else if (stored_bytes == bytes) {
        memcpy(buffer->data, stored, bytes);
    } else {
        wrong = "its two sizes differ, though it is not compressed";
    }
    if (wrong) {
        thrift_wrong(&plain, wrong);
    }
    return plain;
}

// Returns a text that is stored as PLAIN.
static ParquetText_ parquet_take_(ThriftReader* in) {
    const size_t bytes = parquet_fixed_(in, 4);
    const ParquetText_ value = {thrift_take(in, bytes), bytes};
    return value;
}

static int parquet_dictionary_(Parquet* p, const ParquetPage_* page) {
    if (p->dictionary) {
        return parquet_fail_(p, "a second dictionary in the row group");
    }
    if (page->encoding != PARQUET_PLAIN_ && page->encoding != PARQUET_PLAIN_DICTIONARY_) {
        return parquet_fail_(p, "a dictionary of encoding %lld, wanted PLAIN", (long long)page->encoding);
    }
    if (page->values < 0 || page->values > page->bytes / 4) { // each has 4 bytes or more
        return parquet_fail_(p, "a dictionary of %lld values in %lld bytes: damaged", (long long)page->values,
                             (long long)page->bytes);
    }
    ThriftReader in = parquet_plain_(p, page, 0, &p->dictionary_plain);
    p->num_dictionary = (size_t)page->values;
    p->dictionary = (ParquetText_*)check_alloc(p->num_dictionary, sizeof(ParquetText_), p->path);
    for (size_t i = 0; i < p->num_dictionary; i++) {
        p->dictionary[i] = parquet_take_(&in);
    }
    if (in.wrong || in.at != in.end) {
        return parquet_fail_(p, "damaged dictionary: %s", in.wrong ? in.wrong : "bytes after its last value");
    }
    return 1;
}

// Reads the definition levels of a page; `in` steps over them.
static int parquet_levels_(Parquet* p, const ParquetPage_* page, ThriftReader* in) {
    if (page->level_encoding != PARQUET_RLE_) {
        return parquet_fail_(p, "definition levels of encoding %lld, wanted RLE",
                             (long long)page->level_encoding);
    }
    const uint32_t bytes = parquet_fixed_(in, 4);
    const unsigned char* levels = thrift_take(in, bytes);
    if (!levels) {
        return parquet_fail_(p, "damaged definition levels: %s", in->wrong);
    }
    p->levels = parquet_runs_(thrift_reader(levels, bytes), 1);
    return 1;
}

// Prepares to read the values, if any.
static int parquet_values_(Parquet* p, ThriftReader in) {
    p->values = in;
    if (in.wrong) {
        return parquet_fail_(p, "damaged: %s", in.wrong);
    }
    switch (p->encoding) {
    case PARQUET_PLAIN_:
        return 1;
    case PARQUET_PLAIN_DICTIONARY_:
    case PARQUET_RLE_DICTIONARY_:
        if (!p->dictionary) {
            return parquet_fail_(p, "indices without a dictionary");
        }
        if (in.at != in.end) {
            const int width = (int)thrift_u8(&in);
            p->indices = parquet_runs_(in, width);
        } else {
            p->indices = parquet_runs_(in, 0);
        }
        return 1;
    case PARQUET_DELTA_LENGTH_:
    case PARQUET_DELTA_BYTES_:
        if (p->encoding == PARQUET_DELTA_BYTES_) {
            p->prefixes = parquet_deltas_(in);
            in = parquet_deltas_rest_(p->prefixes);
        }
        p->lengths = parquet_deltas_(in);
        p->values = parquet_deltas_rest_(p->lengths);
        parquet_reserve_(p, &p->text,
                         thrift_left(&p->values)); // no value is longer than all suffixes together
        p->text_bytes = 0;
        return p->values.wrong ? parquet_fail_(p, "damaged lengths: %s", p->values.wrong) : 1;
    default:
        return parquet_fail_(p,
                             "encoding %d, wanted PLAIN (0), PLAIN_DICTIONARY (2), RLE_DICTIONARY (8), "
                             "DELTA_LENGTH_BYTE_ARRAY (6) or DELTA_BYTE_ARRAY (7)",
                             p->encoding);
    }
}

static int parquet_page_v1_(Parquet* p, const ParquetPage_* page) {
    ThriftReader in = parquet_plain_(p, page, 0, &p->plain);
    return (!p->may_be_null || parquet_levels_(p, page, &in)) && parquet_values_(p, in);
}

// Reads a page of version 2, whose levels come first and are not compressed.
static int parquet_page_v2_(Parquet* p, const ParquetPage_* page) {
    const int64_t levels = page->level_bytes, skipped = page->repetition_bytes;
    if (levels < 0 || skipped < 0 || levels > page->stored_bytes || skipped > page->stored_bytes - levels ||
        levels + skipped > page->bytes) {
        return parquet_fail_(p, "%lld and %lld bytes of levels in a page of %lld: damaged",
                             (long long)skipped, (long long)levels, (long long)page->stored_bytes);
    }
    p->levels = parquet_runs_(thrift_reader(p->stored.data + skipped, (size_t)levels), p->may_be_null);
    return parquet_values_(p, parquet_plain_(p, page, (size_t)(levels + skipped), &p->plain));
}

static int parquet_page_data_(Parquet* p, const ParquetPage_* page) {
    if (page->values < 0 || (uint64_t)page->values > p->rows_in_group) {
        return parquet_fail_(p, "%lld values, where the row group has %llu left", (long long)page->values,
                             (unsigned long long)p->rows_in_group);
    }
    p->encoding = (int)page->encoding;
    p->rows_in_page = (uint64_t)page->values;
    p->rows_in_group -= p->rows_in_page;
    return page->type == PARQUET_PAGE_V1_ ? parquet_page_v1_(p, page) : parquet_page_v2_(p, page);
}

// Reads the page at p->at, of any type. Unknown types are skipped, as the format demands.
static int parquet_page_(Parquet* p) {
    const ParquetChunk_* chunk = &p->chunks[p->group];
    ParquetPage_ page;
    if (p->at == chunk->end) {
        return parquet_fail_(p, "missing: the row group ends %llu rows too early",
                             (unsigned long long)p->rows_in_group);
    }
    if (!parquet_read_header_(p, chunk->end, &page) || !parquet_check_page_(p, &page, chunk)) {
        return 0;
    }
    const uint64_t begin = p->at;
    p->at += (uint64_t)page.stored_bytes;
    if (page.type != PARQUET_PAGE_V1_ && page.type != PARQUET_PAGE_V2_ &&
        page.type != PARQUET_PAGE_DICTIONARY_) {
        return 1;
    }
    return parquet_read_(p, &p->stored, begin, (size_t)page.stored_bytes) && parquet_check_sum_(p, &page) &&
           (page.type == PARQUET_PAGE_DICTIONARY_ ? parquet_dictionary_ : parquet_page_data_)(p, &page);
}

// Checks that nothing is left of a page whose rows are read. The format has no padding, but
// fastparquet writes 8 zeros.
static int parquet_page_end_(Parquet* p) {
    static const unsigned char zeros[8] = {0};
    const int has_lengths = p->encoding == PARQUET_DELTA_LENGTH_ || p->encoding == PARQUET_DELTA_BYTES_;
    const size_t left = has_lengths || p->encoding == PARQUET_PLAIN_ ? thrift_left(&p->values) : 0;
    const int is_padding = left <= sizeof(zeros) && (left == 0 || memcmp(p->values.at, zeros, left) == 0);
    if (!is_padding || (has_lengths && p->lengths.left > 0)) {
        return parquet_fail_(p, "values are left after its last row: damaged");
    }
    p->encoding = PARQUET_NO_PAGE_;
    return 1;
}

// Moves to the next page with rows: 1; 0 at the end of the file; -1 after an error.
static int parquet_next_page_(Parquet* p) {
    while (p->rows_in_page == 0) {
        if (!parquet_page_end_(p)) {
            return -1;
        }
        if (p->at != 0 && p->rows_in_group == 0) {
            p->group++;
            p->at = 0;
        }
        if (p->group == p->num_chunks) {
            return 0;
        }
        if (p->at == 0) {
            p->at = p->chunks[p->group].begin;
            p->rows_in_group = p->chunks[p->group].rows;
            p->page = 0;
            free(p->dictionary);
            p->dictionary = NULL;
        }
        p->page++;
        if (!parquet_page_(p)) {
            return -1;
        }
    }
    return 1;
}

// ---- values ----

static const char* parquet_indexed_(Parquet* p, ParquetText_* value) {
    const uint32_t index = parquet_runs_next_(&p->indices);
    if (!p->indices.bytes.wrong && index >= p->num_dictionary) {
        return "an index is beyond the dictionary";
    }
    if (!p->indices.bytes.wrong) {
        *value = p->dictionary[index];
    }
    return p->indices.bytes.wrong;
}

// Replaces the value in p->text by the next one, which shares a prefix with it.
static const char* parquet_prefixed_(Parquet* p, ParquetText_* value) {
    const uint32_t prefix = (uint32_t)parquet_deltas_next_(&p->prefixes);
    if (p->prefixes.bytes.wrong || prefix > p->text_bytes) {
        return p->prefixes.bytes.wrong ? p->prefixes.bytes.wrong : "a prefix is longer than the value before";
    }
    assert(prefix + value->bytes <= p->text.capacity);
    memcpy(p->text.data + prefix, value->text, value->bytes);
    p->text_bytes = prefix + value->bytes;
    value->text = p->text.data;
    value->bytes = p->text_bytes;
    return NULL;
}

// Reads the next value that is not null. Returns NULL or an error.
static const char* parquet_value_(Parquet* p, ParquetText_* value) {
    if (p->encoding == PARQUET_PLAIN_DICTIONARY_ || p->encoding == PARQUET_RLE_DICTIONARY_) {
        return parquet_indexed_(p, value);
    }
    if (p->encoding == PARQUET_PLAIN_) {
        *value = parquet_take_(&p->values);
        return p->values.wrong;
    }
    value->bytes = (uint32_t)parquet_deltas_next_(&p->lengths);
    value->text = thrift_take(&p->values, value->bytes);
    if (p->lengths.bytes.wrong || p->values.wrong) {
        return p->lengths.bytes.wrong ? p->lengths.bytes.wrong : p->values.wrong;
    }
    return p->encoding == PARQUET_DELTA_BYTES_ ? parquet_prefixed_(p, value) : NULL;
}

// Reads the next row of the page. Returns NULL or an error.
static const char* parquet_row_(Parquet* p, ParquetText_* value) {
    const uint32_t level = p->may_be_null ? parquet_runs_next_(&p->levels) : 1;
    if (p->may_be_null && (p->levels.bytes.wrong || level > 1)) {
        return p->levels.bytes.wrong ? p->levels.bytes.wrong : "a definition level above the highest";
    }
    return level ? parquet_value_(p, value) : NULL;
}

int parquet_next(Parquet* p, const char** text, size_t* bytes) {
    ParquetText_ value = {NULL, 0};
    const int more = parquet_next_page_(p);
    if (more <= 0) {
        return more;
    }
    p->rows_in_page--;
    const char* wrong = parquet_row_(p, &value);
    if (wrong) {
        parquet_fail_(p, "damaged: %s", wrong);
        return -1;
    }
    *text = (const char*)value.text;
    *bytes = value.bytes;
    return 1;
}

#endif // PARQUET_IMPLEMENTATION

#endif
