/*
token_files.h -- a stream of tokens from files: the formats, and the checks of the files.

A TokenStream joins tokens end to end without copying them; the files are memory-mapped. The name
and the first bytes of a file decide its format:

    NAME.bin                          llm.c's shard: a header of 256 int32 (magic, version, number
                                      of tokens), then uint16 or uint32 tokens
    NAME.bin, --data-format nanogpt   bare uint16 tokens
    any other name                    text: one document of one token per byte, after an end-of-text
                                      token (tokenizer.h, "bytes": V = 257)

Beside a .bin may be a mask, NAME.bin.mask (target_mask.h).

Opening a stream checks every token once, in parallel: a bad one must not surface in the middle of a
run.

If a file is changed afterwards, reading notices where it has become shorter and where a token is
not below V any more: tokens_fill then leaves the mapped_try that it is called in (mapped_file.h),
and tokens_describe has the reason. Without a mapped_try, the program ends.

Names of files are separated by commas; each is a pattern of glob(3), or a directory, which stands
for all of its text files. A backslash before one of , : * ? [ = \ makes it a part of the name.
*/
#ifndef LLMC_TOKEN_FILES_H
#define LLMC_TOKEN_FILES_H

#include <glob.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/base/file_list.h"
#include "llmc/base/mapped_file.h"
#include "llmc/base/enum_words.h"
#include "llmc/data/target_mask.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const void* tokens;
    int width;    // bytes per token: 1, 2 or 4, unsigned
    size_t count; // tokens
    size_t first; // position of the first token among all spans end to end
    // path of the mapped file, owned; NULL, like the next ones, if the tokens are not in a file
    char* path;
    void* map; // the file
    size_t map_bytes;
    TargetMask mask;
} TokenSpan;

typedef struct {
    const char* name; // for errors: the pattern of the files; borrowed
    TokenSpan* spans;
    size_t num_spans;
    size_t begin, count; // the stream is the tokens [begin, begin + count) of the spans
    int V;               // all tokens are below
    uint32_t largest;    // largest token
    // checksum of the contents of the files, whatever their names; 0 for memory
    uint64_t fingerprint;
    int is_view;  // the spans belong to another stream
    int has_mark; // one of the texts has a byte-order mark, which is no token
} TokenStream;

enum { TOKENS_TEXT_LOOKED_AT = 1 << 16 }; // first bytes of a text, which may not contain a zero

typedef enum { TOKENS_SHARDS, TOKENS_TEXT } TokensKind;

// --data-format
#define TOKENS_FORMAT_WORDS(X) X(TOKENS_AUTO, "auto") X(TOKENS_NANOGPT, "nanogpt")
typedef enum { TOKENS_FORMAT_WORDS(WORDS_VALUE) } TokensFormat;

// ---- names of files ----

int tokens_is_shard(const char* path);

// Cuts the next item, up to a comma, off a list, which is modified. *next moves behind it. Returns
// NULL at the end.
char* tokens_next_item(char** next);

// Returns a name as it is written in a list. The caller frees it.
char* tokens_escape(const char* name);

// Returns the files of a list, sorted by name (by bytes, in any locale); the caller calls globfree.
// A pattern without matches stays as a name: opening it will report that the file does not exist.
glob_t tokens_list(const char* pattern);

// Returns what the files are, tokens (.bin) or text (any other name). Opens none of them.
TokensKind tokens_kind(const char* pattern);

// Adds the files of a list, which may be shards and texts, and the masks of shards.
void tokens_list_files(FileList* files, const char* option, const char* list);

// ---- opening a file: these functions return 0 and set `error` if something is wrong with it ----

enum { TOKENS_MAGIC_U16 = 20240520, TOKENS_MAGIC_U32 = 20240801, TOKENS_HEADER_BYTES_ = 1024 };

// ---- checking tokens ----

// Prints the progress of the check from time to time, if it takes long.
typedef struct {
    double shown_s; // time of the last line; 0: none yet
    double gigabytes;
} TokensProgress;

void tokens_progress(TokensProgress* progress, size_t bytes, const char* name);

// ---- opening a stream ----

// Opens the files of a list (tokens_list): `pattern` must live as long as the stream. Checks all of
// the files, to the last token.
void tokens_open_files(TokenStream* stream, const char* pattern, TokensFormat format, int vocab_size);

// Opens tokens that the caller keeps as long as the stream lives; `name` is for errors.
void tokens_open_memory(TokenStream* stream, const uint16_t* tokens, size_t count, int vocab_size,
                        const char* name);

void tokens_close(TokenStream* stream);

// Takes the validation data from the end of a freshly opened stream: its last shard if it has
// several, else 5 % of its tokens, but at least one sequence; with a mask, from the start of a
// document on, which may be shorter. `tail` becomes a view of the stream's spans, so the stream is
// closed last.
void tokens_split_tail(TokenStream* stream, TokenStream* tail, int T, int eot);

// ---- reading ----

// Sets out (n) to the tokens [start, start + n) of the stream.
void tokens_fill(const TokenStream* stream, size_t start, size_t n, int* out);

int tokens_at(const TokenStream* stream, size_t position);

// Prints where the tokens [start, start + n) of the stream are: "books.bin tokens 1024-2047".
void tokens_print_place(FILE* file, const TokenStream* stream, size_t start, size_t n);

// True if a file of the stream has a mask.
int tokens_have_mask(const TokenStream* stream);

// Returns the number of tokens among [start, start + n) that a mask hides the target of.
size_t tokens_count_hidden(const TokenStream* stream, size_t start, size_t n);

// Sets the targets (n) of the tokens [start, start + n) to -1 where a mask hides them.
void tokens_hide(const TokenStream* stream, size_t start, size_t n, int* targets);

// Sets the error that ended a mapped_try whose function reads the stream. Returns 0, with an error
// that says only that, if no file of this stream was involved.
int tokens_describe(const TokenStream* stream, MappedResult result, const void* where, char* error);

#ifdef __cplusplus
}
#endif

#ifdef TOKEN_FILES_IMPLEMENTATION

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/base/shell_word.h"
#include "llmc/base/signals.h"
#include "llmc/base/xxh64.h"
#include "llmc/tokenizer/tokenizer.h"

// ---- names of files ----

int tokens_is_shard(const char* path) {
    const char* ending = strrchr(path, '.');
    return ending && strcmp(ending, ".bin") == 0;
}

static int tokens_compare_(const void* a, const void* b) {
    return strcmp(*(char* const*)a, *(char* const*)b);
}

char* tokens_next_item(char** next) {
    char *item = *next + strspn(*next, ","), *end = item;
    while (*end && *end != ',') {
        end += *end == '\\' && end[1] ? 2 : 1;
    }
    *next = *end ? end + 1 : end;
    *end = '\0';
    return *item ? item : NULL;
}

char* tokens_escape(const char* name) {
    char *text = (char*)check_alloc(2 * strlen(name) + 1, 1, "file names"), *out = text;
    for (; *name; name++) {
        if (strchr(",:*?[=\\", *name)) {
            *out++ = '\\';
        }
        *out++ = *name;
    }
    return text;
}

// Removes the backslashes, in place.
static void tokens_unescape_(char* text) {
    char* out = text;
    for (; *text; text++) {
        text += *text == '\\' && text[1];
        *out++ = *text;
    }
    *out = '\0';
}

// Handles a directory in a pattern that cannot be read: only one that does not exist has no files.
static int tokens_glob_error_(const char* directory, int reason) {
    (void)directory;
    return reason != ENOENT && reason != ENOTDIR;
}

// Adds the files of a pattern. Returns 0 if it has none.
static int tokens_glob_(glob_t* files, const char* pattern, int flags) {
    const int append = files->gl_pathc > 0 ? GLOB_APPEND : 0;
    errno = 0;
    const int result = glob(pattern, flags | append, tokens_glob_error_, files);
    CHECK(result == 0 || result == GLOB_NOMATCH, "%s: cannot list the files: %s", pattern,
          errno ? strerror(errno) : "no memory");
    return result == 0;
}

// Adds the text files of a directory: those whose names say that they are text.
static void tokens_list_directory_(glob_t* files, const char* directory) {
    static const char* const endings[] = {".txt", ".md", ".html", ".tex", ".jsonl", ".ndjson", ".parquet"};
    static const char* const packed[] = {"", ".gz", ".zst"};
    char *escaped = tokens_escape(directory), pattern[PATH_MAX];
    const size_t before = files->gl_pathc;
    for (size_t i = 0; i < sizeof(endings) / sizeof(endings[0]); i++) {
        for (size_t k = 0; k < sizeof(packed) / sizeof(packed[0]); k++) {
            file_path(pattern, "%s/*%s%s", escaped, endings[i], packed[k]);
            tokens_glob_(files, pattern, 0);
        }
    }
    file_path(pattern, "%s/*", escaped);
    const ShellWord all = shell_word(pattern);
    file_path(pattern, "%s/*.bin", escaped);
    CHECK(files->gl_pathc > before,
          "%s: contains no text files (.txt, .md, .html, .tex, .jsonl, .parquet); try a pattern: "
          "%s for all as text, %s for shards",
          directory, all.text, shell_word(pattern).text);
    free(escaped);
}

// Adds the files of an item of a list.
static void tokens_list_item_(glob_t* files, char* item) {
    char* name = strdup(item);
    CHECK(name, "%s: no memory", item);
    tokens_unescape_(name);
    if (file_is_directory(name)) {
        tokens_list_directory_(files, name);
    } else {
        tokens_glob_(files, item, GLOB_NOCHECK);
    }
    free(name);
}

glob_t tokens_list(const char* pattern) {
    glob_t files;
    memset(&files, 0, sizeof(files));
    char *items = (char*)check_alloc(strlen(pattern) + 1, 1, "file names"), *next = items, *item;
    strcpy(items, pattern);
    while ((item = tokens_next_item(&next)) != NULL) {
        tokens_list_item_(&files, item);
    }
    free(items);
    CHECK(files.gl_pathc > 0, "data \"%s\": no file name", pattern);
    qsort(files.gl_pathv, files.gl_pathc, sizeof(char*), tokens_compare_);
    for (size_t i = 1; i < files.gl_pathc; i++) {
        const char *one = files.gl_pathv[0], *other = files.gl_pathv[i];
        CHECK(tokens_is_shard(one) == tokens_is_shard(other),
              "%s and %s: a shard (.bin) and a text, wanted one kind of data", one, other);
    }
    return files;
}

TokensKind tokens_kind(const char* pattern) {
    glob_t files = tokens_list(pattern);
    const TokensKind kind = tokens_is_shard(files.gl_pathv[0]) ? TOKENS_SHARDS : TOKENS_TEXT;
    globfree(&files);
    return kind;
}

static void tokens_list_item_files_(FileList* files, const char* option, const char* item) {
    char mask[PATH_MAX];
    glob_t found = tokens_list(item);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        const char* path = found.gl_pathv[i];
        file_list_add(files, option, path);
        if (tokens_is_shard(path)) {
            target_mask_path(mask, path);
            file_list_add(files, option, mask);
        }
    }
    globfree(&found);
}

void tokens_list_files(FileList* files, const char* option, const char* list) {
    char *items = strdup(list), *next = items, *item;
    CHECK(items, "%s: no memory", list);
    while ((item = tokens_next_item(&next)) != NULL) {
        tokens_list_item_files_(files, option, item);
    }
    free(items);
}

// ---- opening a file. These functions return 0 and set `error` when something is wrong with it
// ----

// Maps a file that is not empty.
static int tokens_map_(void** map, size_t* bytes, const char* path, char* error) {
    struct stat info;
    if (stat(path, &info) != 0) {
        return error_set(error, path, "cannot open the data: %s", strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        return error_set(error, path, "%s",
                         S_ISDIR(info.st_mode) ? "a directory, wanted a file or a pattern of files"
                                               : "not a regular file, which is needed to map it");
    }
    if (info.st_size == 0) {
        return error_set(error, path, "empty file, wanted tokens");
    }
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return error_set(error, path, "cannot open the data: %s", strerror(errno));
    }
    *map = file_is_fetched(fd, path, error) ? mapped_file(fd, (size_t)info.st_size, path, error) : NULL;
    *bytes = (size_t)info.st_size;
    close(fd); // the mapping stays
    return *map != NULL;
}

static void tokens_unmap_(TokenSpan* span) {
    if (span->map) {
        munmap(span->map, span->map_bytes);
    }
    target_mask_close(&span->mask);
    free(span->path);
}

// Returns a guess at what a file is that is not a shard.
static const char* tokens_magic_hint_(uint32_t magic) {
    const uint32_t swapped = __builtin_bswap32(magic);
    if (swapped == TOKENS_MAGIC_U16 || swapped == TOKENS_MAGIC_U32) {
        return " (a shard with its bytes swapped)";
    }
    if ((magic & 0xFFFF) == 50256) { // start of a document, in uint16 or uint32
        return " (bare tokens without a header; --data-format nanogpt reads them if they are uint16)";
    }
    return magic == 20240326   ? " (a model)"
           : magic == 20240328 ? " (a tokenizer)"
           : magic == 20240522 ? " (a multiple-choice evaluation)"
                               : " (bare uint16 tokens need --data-format nanogpt)";
}

static int tokens_read_shard_(TokenSpan* span, const char* path, char* error) {
    int32_t header[3];
    if (span->map_bytes < TOKENS_HEADER_BYTES_) {
        return error_set(error, path, "%zu bytes, wanted a shard with a header of %d", span->map_bytes,
                         TOKENS_HEADER_BYTES_);
    }
    memcpy(header, span->map, sizeof(header));
    const int32_t magic = header[0], version = header[1], count = header[2];
    if (magic != TOKENS_MAGIC_U16 && magic != TOKENS_MAGIC_U32) {
        return error_set(error, path, "magic %d%s, wanted %d (uint16 tokens) or %d (uint32 tokens)", magic,
                         tokens_magic_hint_((uint32_t)magic), TOKENS_MAGIC_U16, TOKENS_MAGIC_U32);
    }
    const int wanted = magic == TOKENS_MAGIC_U16 ? 1 : 7;
    if (version != wanted) {
        return error_set(error, path, "version %d, wanted %d", version, wanted);
    }
    if (count <= 0) {
        return error_set(error, path, "%d tokens, wanted at least 1", count);
    }
    span->width = magic == TOKENS_MAGIC_U16 ? 2 : 4;
    span->count = (size_t)count;
    span->tokens = (const char*)span->map + TOKENS_HEADER_BYTES_;
    const size_t bytes = TOKENS_HEADER_BYTES_ + span->count * (size_t)span->width;
    if (span->map_bytes != bytes) {
        return error_set(error, path, "%s: %zu bytes, wanted %zu for %d tokens",
                         span->map_bytes < bytes ? "truncated" : "too long", span->map_bytes, bytes, count);
    }
    return 1;
}

// Reads bare tokens of `width` bytes.
static int tokens_read_bare_(TokenSpan* span, int width, const char* path, char* error) {
    span->width = width;
    span->count = span->map_bytes / (size_t)width;
    span->tokens = span->map;
    if (span->map_bytes % (size_t)width) {
        return error_set(error, path, "%zu bytes, wanted whole tokens of %d bytes", span->map_bytes, width);
    }
    return 1;
}

// ---- checking tokens ----

static uint32_t tokens_max_u16_(const uint16_t* tokens, size_t n) {
    uint16_t max = 0;
    for (size_t i = 0; i < n; i++) {
        max = tokens[i] > max ? tokens[i] : max;
    }
    return max;
}

static uint32_t tokens_max_u32_(const uint32_t* tokens, size_t n) {
    uint32_t max = 0;
    for (size_t i = 0; i < n; i++) {
        max = tokens[i] > max ? tokens[i] : max;
    }
    return max;
}

// Returns the largest of n tokens of 2 or 4 bytes.
static uint32_t tokens_max_(const TokenSpan* span, size_t start, size_t n) {
    return span->width == 2 ? tokens_max_u16_((const uint16_t*)span->tokens + start, n)
                            : tokens_max_u32_((const uint32_t*)span->tokens + start, n);
}

// Block of tokens, for mapped_try.
typedef struct {
    const TokenSpan* span;
    size_t start, n;
    uint32_t max;
} TokensBlock_;

static void tokens_max_block_(void* block_) {
    TokensBlock_* block = (TokensBlock_*)block_;
    block->max = tokens_max_(block->span, block->start, block->n);
}

// Returns the first token of [start, end) that is not below V or no longer readable; `end` if all
// are good. Raises *largest.
static size_t tokens_find_bad_(const TokenSpan* span, size_t start, size_t end, int V, uint32_t* largest) {
    const size_t block = (size_t)1 << 20, num_blocks = (end - start + block - 1) / block;
    size_t bad = num_blocks; // first block with a bad token
    uint32_t most = *largest;
#ifdef _OPENMP
#pragma omp parallel for reduction(min : bad) reduction(max : most) if (num_blocks > 1)
#endif
    for (size_t i = 0; i < num_blocks; i++) {
        const size_t at = start + i * block, n = end - at < block ? end - at : block;
        TokensBlock_ tokens = {span, at, n, 0};
        const void* where;
        const MappedResult result = mapped_try(tokens_max_block_, &tokens, &where);
        if (result != MAPPED_READ || tokens.max >= (uint32_t)V) {
            bad = i < bad ? i : bad;
        }
        most = tokens.max > most ? tokens.max : most;
    }
    *largest = most;
    size_t at = bad < num_blocks ? start + bad * block : end;
    while (at < end && tokens_max_(span, at, 1) < (uint32_t)V) {
        at++;
    }
    return at;
}

void tokens_progress(TokensProgress* progress, size_t bytes, const char* name) {
    const double now_s = time_now_s();
    signals_end("checking the data");
    progress->gigabytes += (double)bytes * 1e-9;
    if (progress->shown_s == 0) {
        progress->shown_s = now_s;
    } else if (now_s - progress->shown_s > 2) {
        progress->shown_s = now_s;
        printable_line(stdout, "checking the data: %.1f GB, now %s", progress->gigabytes, name);
        fflush(stdout);
    }
}

// Skips UTF-8's byte-order mark, and refuses other encodings.
static int tokens_skip_mark_(TokenSpan* span, const char* path, char* error) {
    size_t mark;
    if (!byte_order_mark(path, (const char*)span->tokens, span->count, &mark, error)) {
        return 0;
    }
    span->tokens = (const char*)span->tokens + mark;
    span->count -= mark;
    return span->count > 0 || error_set(error, path, "a byte-order mark and nothing else, wanted text");
}

// Refuses a zero byte near the start: a program, an archive, numbers.
static int tokens_check_text_(const TokenSpan* span, const char* name, char* error) {
    const size_t max = TOKENS_TEXT_LOOKED_AT, first = max < span->count ? max : span->count;
    const char* zero = (const char*)memchr(span->tokens, 0, first);
    return !zero ||
           error_set(error, name, "not text: byte %zu is zero", (size_t)(zero - (const char*)span->tokens));
}

static int tokens_check_(const TokenSpan* span, int V, uint32_t* largest, const char* name,
                         TokensProgress* progress, char* error) {
    const size_t piece = (size_t)1 << 28; // tokens between two progress lines
    if (span->width == 1) {
        return tokens_check_text_(span, name, error);
    }
    for (size_t start = 0; start < span->count; start += piece) {
        const size_t end = span->count - start < piece ? span->count : start + piece;
        tokens_progress(progress, 0, name);
        const size_t bad = tokens_find_bad_(span, start, end, V, largest);
        tokens_progress(progress, (end - start) * (size_t)span->width, name);
        if (bad < end) {
            return error_set(error, name, "token %zu has id %u, wanted below the vocabulary size %d", bad,
                             tokens_max_(span, bad, 1), V);
        }
    }
    return 1;
}

// ---- opening a stream ----

static void tokens_append_(TokenStream* stream, TokenSpan span) {
    span.first = stream->count;
    stream->spans[stream->num_spans++] = span;
    stream->count += span.count;
}

// Maps a file of tokens and locates them in it.
static int tokens_open_span_(TokenSpan* span, const char* path, TokensFormat format, char* error) {
    memset(span, 0, sizeof(*span));
    span->path = strdup(path);
    CHECK(span->path, "%s: no memory", path);
    if (!tokens_map_(&span->map, &span->map_bytes, path, error)) {
        return 0;
    }
    if (!tokens_is_shard(path)) {
        return tokens_read_bare_(span, 1, path, error) && tokens_skip_mark_(span, path, error);
    }
    const int ok = format == TOKENS_NANOGPT ? tokens_read_bare_(span, 2, path, error)
                                            : tokens_read_shard_(span, path, error);
    return ok && target_mask_open(&span->mask, path, span->count, error);
}

// Returns the end-of-text token before a text.
static TokenSpan tokens_separator_(void) {
    static const uint16_t eot = TOKENIZER_BYTES_EOT;
    TokenSpan separator;
    memset(&separator, 0, sizeof(separator));
    separator.tokens = &eot;
    separator.width = sizeof(eot);
    separator.count = 1;
    return separator;
}

// Describes what happened to a file while its span was read.
static int tokens_describe_span_(const TokenSpan* span, MappedResult result, const void* where, char* error) {
    const char *at = (const char*)where, *tokens = (const char*)span->tokens;
    const int is_token = tokens && at >= tokens && at < (const char*)span->map + span->map_bytes;
    char place[64] = "";
    if (is_token) {
        snprintf(place, sizeof(place), ": at %s %zu of %zu", span->width == 1 ? "byte" : "token",
                 (size_t)(at - tokens) / (size_t)span->width, span->count);
    }
    return error_set(error, span->path, "%s while it was read%s; was it written to?",
                     result == MAPPED_GONE ? "became shorter" : "a token became larger than the vocabulary",
                     place);
}

// File being opened, for mapped_try.
typedef struct {
    TokenSpan* span;
    const char* path;
    TokensFormat format;
    int V;
    uint32_t* largest;
    TokensProgress* progress;
    char* error;
    int ok;
} TokensOpening_;

static void tokens_read_file_(void* opening_) {
    TokensOpening_* o = (TokensOpening_*)opening_;
    o->ok = tokens_open_span_(o->span, o->path, o->format, o->error) &&
            tokens_check_(o->span, o->V, o->largest, o->path, o->progress, o->error);
}

// Opens a file, and checks all of it.
static int tokens_open_file_(TokenSpan* span, const char* path, TokensFormat format, int V, uint32_t* largest,
                             TokensProgress* progress, char* error) {
    TokensOpening_ opening = {span, path, format, V, largest, progress, error, 0};
    const void* where;
    struct stat info;
    mapped_open();
    const MappedResult result = mapped_try(tokens_read_file_, &opening, &where);
    if (result != MAPPED_READ) {
        return tokens_describe_span_(span, result, where, error);
    }
    if (opening.ok && stat(path, &info) != 0) {
        return error_set(error, path, "cannot read its attributes: %s", strerror(errno));
    }
    if (opening.ok && (size_t)info.st_size < span->map_bytes) { // probably cut to zeros
        return tokens_describe_span_(span, MAPPED_GONE, NULL, error);
    }
    return opening.ok;
}

// Reports the byte-order mark of the first file of a stream that has one.
static void tokens_say_mark_(TokenStream* stream, const TokenSpan* span) {
    if (span->width == 1 && span->tokens != span->map && !stream->has_mark) {
        stream->has_mark = 1;
        byte_order_mark_note(span->path);
    }
}

// Adds a file to a stream, which has room for two more spans.
static int tokens_append_file_(TokenStream* stream, const char* path, TokensFormat format, int V,
                               TokensProgress* progress, char* error) {
    TokenSpan span;
    if (!tokens_is_shard(path)) {
        if (V <= TOKENIZER_BYTES_EOT) {
            return error_set(error, path, "text, as bytes, needs a vocabulary of %d, found %d",
                             TOKENIZER_BYTES_EOT + 1, V);
        }
        tokens_append_(stream, tokens_separator_());
    }
    const int ok = tokens_open_file_(&span, path, format, V, &stream->largest, progress, error);
    if (ok) {
        tokens_append_(stream, span);
        tokens_say_mark_(stream, &span);
    } else {
        tokens_unmap_(&span);
    }
    return ok;
}

// Mixes the contents of a file into a fingerprint.
static uint64_t tokens_fingerprint_(uint64_t before, const TokenSpan* span) {
    char error[ERROR_BYTES];
    uint64_t sums[3] = {before, 0, 0}; // a zero more, as in checkpoints of earlier versions
    CHECK(file_fingerprint(span->path, &sums[1], error), "%s", error);
    uint64_t sum = xxh64(sums, sizeof(sums));
    CHECK(target_mask_mix(&sum, span->path, file_fingerprint, error), "%s", error);
    return sum;
}

void tokens_open_files(TokenStream* stream, const char* pattern, TokensFormat format, int vocab_size) {
    char error[ERROR_BYTES];
    TokensProgress progress = {0, 0};
    glob_t files = tokens_list(pattern);
    memset(stream, 0, sizeof(*stream));
    stream->name = pattern;
    stream->V = vocab_size;
    // a shard is one span, a text two
    stream->spans = (TokenSpan*)check_alloc(2 * files.gl_pathc, sizeof(TokenSpan), "token spans");
    for (size_t i = 0; i < files.gl_pathc; i++) {
        const char* path = files.gl_pathv[i];
        CHECK(tokens_append_file_(stream, path, format, vocab_size, &progress, error), "%s", error);
        stream->fingerprint = tokens_fingerprint_(stream->fingerprint, &stream->spans[stream->num_spans - 1]);
        tokens_progress(&progress, 0, path);
    }
    globfree(&files);
}

void tokens_open_memory(TokenStream* stream, const uint16_t* tokens, size_t count, int vocab_size,
                        const char* name) {
    char error[ERROR_BYTES];
    TokensProgress progress = {0, 0};
    TokenSpan span;
    memset(&span, 0, sizeof(span));
    span.tokens = tokens;
    span.width = sizeof(*tokens);
    span.count = count;
    memset(stream, 0, sizeof(*stream));
    CHECK(tokens_check_(&span, vocab_size, &stream->largest, name, &progress, error), "%s", error);
    stream->name = name;
    stream->V = vocab_size;
    stream->spans = (TokenSpan*)check_alloc(1, sizeof(TokenSpan), "token spans");
    tokens_append_(stream, span);
}

void tokens_close(TokenStream* stream) {
    if (!stream->is_view) {
        for (size_t i = 0; i < stream->num_spans; i++) {
            tokens_unmap_(&stream->spans[i]);
        }
        free(stream->spans);
    }
    memset(stream, 0, sizeof(*stream));
}

void tokens_split_tail(TokenStream* stream, TokenStream* tail, int T, int eot) {
    const int has_mask = tokens_have_mask(stream);
    const size_t least = has_mask ? 1 : (size_t)T + 1;
    const TokenSpan* last = &stream->spans[stream->num_spans - 1];
    const int several_shards = stream->num_spans > 1 && last->width > 1; // text has width 1
    size_t count = several_shards ? last->count : stream->count / 20;
    count = count < least ? least : count;
    while (has_mask && count < stream->count && tokens_at(stream, stream->count - count) != eot) {
        count++;
    }
    CHECK(!has_mask || stream->count > count,
          "%s: one document, wanted another for validation, or --val-data", stream->name);
    CHECK(stream->count >= least && stream->count - least >= count,
          "%s: %zu tokens, wanted %zu: %zu to train on one sequence and %zu for validation data",
          stream->name, stream->count, least + count, least, count);
    *tail = *stream;
    tail->is_view = 1;
    tail->begin += stream->count - count;
    tail->count = count;
    stream->count -= count;
}

// ---- reading ----

// Returns the span that contains a position of all spans end to end: the last one that starts at or
// before it.
static const TokenSpan* tokens_find_(const TokenStream* stream, size_t position) {
    size_t low = 0, high = stream->num_spans;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (stream->spans[middle].first <= position) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return &stream->spans[low];
}

// Leaves the mapped_try: one of the n tokens read is not below V.
static void tokens_refuse_(const TokenSpan* span, size_t start, const int* ids, size_t n, int V) {
    size_t bad = 0;
    while (bad + 1 < n && (uint32_t)ids[bad] < (uint32_t)V) {
        bad++;
    }
    const void* where = (const char*)span->tokens + (start + bad) * (size_t)span->width;
    char error[ERROR_BYTES];
    mapped_refuse(where);
    tokens_describe_span_(span, MAPPED_REFUSED, where, error);
    CHECK(0, "%s", error);
}

// Sets out (n) to the tokens [start, start + n) of one span.
static void tokens_fill_span_(const TokenSpan* span, size_t start, size_t n, int V, int* out) {
    for (size_t i = 0; i < n; i++) {
        out[i] = span->width == 1   ? ((const uint8_t*)span->tokens)[start + i]
                 : span->width == 2 ? ((const uint16_t*)span->tokens)[start + i]
                                    : (int)((const uint32_t*)span->tokens)[start + i];
    }
    if (tokens_max_u32_((const uint32_t*)out, n) >= (uint32_t)V) {
        tokens_refuse_(span, start, out, n, V);
    }
}

void tokens_fill(const TokenStream* stream, size_t start, size_t n, int* out) {
    assert(start <= stream->count && n <= stream->count - start);
    size_t position = stream->begin + start;
    for (const TokenSpan* span = tokens_find_(stream, position); n > 0; span++) {
        const size_t left = span->first + span->count - position, take = n < left ? n : left;
        tokens_fill_span_(span, position - span->first, take, stream->V, out);
        position += take;
        out += take;
        n -= take;
    }
}

// Sets *at to a position of the stream in its span, and *count to the tokens of the span from there
// on, at most n.
static const TokenSpan* tokens_locate_(const TokenStream* stream, size_t start, size_t n, size_t* at,
                                       size_t* count) {
    const size_t position = stream->begin + start;
    const TokenSpan* span = tokens_find_(stream, position);
    *at = position - span->first;
    *count = span->count - *at < n ? span->count - *at : n;
    return span;
}

int tokens_have_mask(const TokenStream* stream) {
    int have = 0;
    for (size_t i = 0; i < stream->num_spans; i++) {
        have |= stream->spans[i].mask.bits != NULL;
    }
    return have;
}

size_t tokens_count_hidden(const TokenStream* stream, size_t start, size_t n) {
    size_t hidden = 0, at, count;
    for (; n > 0; start += count, n -= count) {
        const TokenSpan* span = tokens_locate_(stream, start, n, &at, &count);
        hidden += target_mask_count(&span->mask, at, count);
    }
    return hidden;
}

void tokens_hide(const TokenStream* stream, size_t start, size_t n, int* targets) {
    size_t at, count;
    for (; n > 0; start += count, targets += count, n -= count) {
        const TokenSpan* span = tokens_locate_(stream, start, n, &at, &count);
        for (size_t i = 0; i < count; i++) {
            targets[i] = target_mask_hides(&span->mask, at + i) ? -1 : targets[i];
        }
    }
}

int tokens_at(const TokenStream* stream, size_t position) {
    int token;
    tokens_fill(stream, position, 1, &token);
    return token;
}

void tokens_print_place(FILE* file, const TokenStream* stream, size_t start, size_t n) {
    const size_t position = stream->begin + start;
    const TokenSpan* span = tokens_find_(stream, position);
    const size_t at = position - span->first;
    char* name = strdup(span->path ? span->path : stream->name);
    CHECK(name, "%s: no memory", stream->name);
    fprintf(file, "%s %s %zu-%zu", printable(name), span->width == 1 ? "bytes" : "tokens", at, at + n - 1);
    free(name);
}

int tokens_describe(const TokenStream* stream, MappedResult result, const void* where, char* error) {
    for (size_t i = 0; i < stream->num_spans; i++) {
        const TokenSpan* span = &stream->spans[i];
        const char *at = (const char*)where, *map = (const char*)span->map,
                   *mask = (const char*)span->mask.map;
        if ((map && at >= map && at < map + span->map_bytes) ||
            (mask && at >= mask && at < mask + span->mask.map_bytes)) {
            tokens_describe_span_(span, result, where, error);
            return 1;
        }
    }
    return error_set(error, stream->name, "is no longer readable; was it written to?");
}

#endif // TOKEN_FILES_IMPLEMENTATION

#endif
