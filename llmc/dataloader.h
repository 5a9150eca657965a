/*
dataloader.h -- from files to batches: a stream of tokens, and the order in which a run reads it.

A TokenStream lays tokens end to end without copying them: llm.c shards and text files, memory-mapped, or the
memory of the caller. A text file is one document of one token per byte, after an end-of-text token
(tokenizer.h, "bytes": V = 257).

A Dataloader cuts a stream of N tokens into S = floor((N - 1) / T) sequences. Sequence k is

    inputs  = tokens [k T, (k+1) T)        targets = tokens [k T + 1, (k+1) T + 1)

so only the last token of a sequence is shared with the next. The run reads its sequences p = 0, 1, 2, ... in
epochs of S: sequence p of the run is k = p mod S in order, or permute_e(p mod S) shuffled, with e = p / S and
a bijection per epoch. Any p is found at once, so a run resumes anywhere, and the order of the sequences does
not depend on B.

needs:   check.h, rand.h, tokenizer.h
defines: TokenStream, TokensKind, tokens_kind, tokens_open_files, tokens_open_memory, tokens_split_tail,
tokens_fill, tokens_close; Batch, Dataloader, Shuffle, dataloader_open, dataloader_next, dataloader_seek,
dataloader_close
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "check.h"
#include "rand.h"
#include "tokenizer.h"

// ---- a stream of tokens

typedef struct {
    const void* tokens;
    int width;    // bytes of one token: 1, 2 or 4, unsigned
    size_t count; // tokens
    size_t first; // position of the first token among all spans laid end to end
    void* map;    // the mapped file, NULL if the tokens are not in one
    size_t map_bytes;
} TokenSpan;

typedef struct {
    const char* name; // for errors: the pattern of the files; borrowed
    TokenSpan* spans;
    size_t num_spans;
    size_t begin, count; // the stream is the tokens [begin, begin + count) of the spans
    int is_view;         // the spans belong to another stream
} TokenStream;

typedef enum { TOKENS_SHARDS, TOKENS_TEXT } TokensKind;

static inline int tokens_is_shard_(const char* path) {
    const char* ending = strrchr(path, '.');
    return ending && strcmp(ending, ".bin") == 0;
}

static inline int tokens_compare_(const void* a, const void* b) {
    return strcmp(*(char* const*)a, *(char* const*)b);
}

// The files of a comma-separated list of names and glob patterns, in name order (of bytes, in any locale).
// What matches nothing is kept as a name: opening it will say that there is no such file.
static inline glob_t tokens_list_(const char* pattern) {
    glob_t files;
    memset(&files, 0, sizeof(files));
    char *items = (char*)check_alloc(strlen(pattern) + 1, 1, "file names"), *next = NULL;
    strcpy(items, pattern);
    for (char* item = strtok_r(items, ",", &next); item; item = strtok_r(NULL, ",", &next)) {
        const int append = files.gl_pathc > 0 ? GLOB_APPEND : 0;
        CHECK(glob(item, GLOB_NOCHECK | append, NULL, &files) == 0, "%s: cannot list the files", item);
    }
    free(items);
    CHECK(files.gl_pathc > 0, "data \"%s\": names no file", pattern);
    qsort(files.gl_pathv, files.gl_pathc, sizeof(char*), tokens_compare_);
    for (size_t i = 1; i < files.gl_pathc; i++) {
        const char *one = files.gl_pathv[0], *other = files.gl_pathv[i];
        CHECK(tokens_is_shard_(one) == tokens_is_shard_(other),
              "%s and %s: a shard (.bin) and a text, wanted one kind of data", one, other);
    }
    return files;
}

// Whether the files are shards (name in .bin) or text (any other name). Opens none of them.
static inline TokensKind tokens_kind(const char* pattern) {
    glob_t files = tokens_list_(pattern);
    const TokensKind kind = tokens_is_shard_(files.gl_pathv[0]) ? TOKENS_SHARDS : TOKENS_TEXT;
    globfree(&files);
    return kind;
}

// Maps a file, as a span of its bytes.
static inline TokenSpan tokens_map_(const char* path) {
    TokenSpan span;
    struct stat info;
    memset(&span, 0, sizeof(span));
    CHECK(stat(path, &info) == 0, "%s: cannot open the data: %s", path, strerror(errno));
    CHECK(!S_ISDIR(info.st_mode), "%s: a directory, wanted a file or a pattern of files", path);
    CHECK(S_ISREG(info.st_mode), "%s: not a regular file, which is needed to map it", path);
    CHECK(info.st_size > 0, "%s: empty file, wanted tokens", path);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0, "%s: cannot open the data: %s", path, strerror(errno));
    span.map_bytes = (size_t)info.st_size;
    span.map = mmap(NULL, span.map_bytes, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(span.map != MAP_FAILED, "%s: cannot map %zu bytes: %s", path, span.map_bytes, strerror(errno));
    close(fd); // the mapping stays
    span.tokens = span.map;
    span.width = 1;
    span.count = span.map_bytes;
    return span;
}

enum { TOKENS_MAGIC_U16_ = 20240520, TOKENS_MAGIC_U32_ = 20240801 };

// What a file that is no shard seems to be.
static inline const char* tokens_magic_hint_(uint32_t magic) {
    const uint32_t swapped = __builtin_bswap32(magic);
    if (swapped == TOKENS_MAGIC_U16_ || swapped == TOKENS_MAGIC_U32_) {
        return " (a shard with its bytes swapped)";
    }
    if ((magic & 0xFFFF) == 50256) { // the start of a document, in uint16 or uint32
        return " (bare tokens, an old format without a header)";
    }
    return magic == 20240326   ? " (a model)"
           : magic == 20240328 ? " (a tokenizer)"
           : magic == 20240522 ? " (a multiple-choice evaluation)"
                               : "";
}

// Makes the span of a file's bytes the span of its tokens: a header of 256 int32 (magic, version, number of
// tokens), then the tokens and nothing else.
static inline void tokens_read_header_(TokenSpan* span, const char* path) {
    const size_t header_bytes = 1024;
    int32_t header[3];
    CHECK(span->map_bytes >= header_bytes, "%s: %zu bytes, wanted a shard with a header of %zu", path,
          span->map_bytes, header_bytes);
    memcpy(header, span->map, sizeof(header));
    const int32_t magic = header[0], version = header[1], count = header[2];
    CHECK(magic == TOKENS_MAGIC_U16_ || magic == TOKENS_MAGIC_U32_,
          "%s: magic %d%s, wanted %d (uint16 tokens) or %d (uint32 tokens)", path, magic,
          tokens_magic_hint_((uint32_t)magic), TOKENS_MAGIC_U16_, TOKENS_MAGIC_U32_);
    const int wanted = magic == TOKENS_MAGIC_U16_ ? 1 : 7;
    CHECK(version == wanted, "%s: version %d, wanted %d", path, version, wanted);
    CHECK(count > 0, "%s: %d tokens, wanted at least 1", path, count);
    span->width = magic == TOKENS_MAGIC_U16_ ? 2 : 4;
    span->count = (size_t)count;
    span->tokens = (const char*)span->map + header_bytes;
    const size_t bytes = header_bytes + span->count * (size_t)span->width;
    CHECK(span->map_bytes == bytes, "%s: %s: %zu bytes, wanted %zu for %d tokens", path,
          span->map_bytes < bytes ? "truncated" : "too long", span->map_bytes, bytes, count);
}

static inline uint32_t tokens_max_u16_(const uint16_t* tokens, size_t n) {
    uint16_t max = 0;
    for (size_t i = 0; i < n; i++) {
        max = tokens[i] > max ? tokens[i] : max;
    }
    return max;
}

static inline uint32_t tokens_max_u32_(const uint32_t* tokens, size_t n) {
    uint32_t max = 0;
    for (size_t i = 0; i < n; i++) {
        max = tokens[i] > max ? tokens[i] : max;
    }
    return max;
}

// The largest of n tokens of 2 or 4 bytes.
static inline uint32_t tokens_max_(const TokenSpan* span, size_t start, size_t n) {
    return span->width == 2 ? tokens_max_u16_((const uint16_t*)span->tokens + start, n)
                            : tokens_max_u32_((const uint32_t*)span->tokens + start, n);
}

// Checks every token of a span once, before the run, in parallel: a bad one must not surface in its middle.
static inline void tokens_check_(const TokenSpan* span, int V, const char* name) {
    const size_t block = (size_t)1 << 20, num_blocks = (span->count + block - 1) / block;
    size_t bad = num_blocks; // the first block with a bad token
#ifdef _OPENMP
#pragma omp parallel for reduction(min : bad) if (num_blocks > 1)
#endif
    for (size_t i = 0; i < num_blocks; i++) {
        const size_t left = span->count - i * block;
        if (tokens_max_(span, i * block, left < block ? left : block) >= (uint32_t)V) {
            bad = i < bad ? i : bad;
        }
    }
    for (size_t i = bad * block; i < span->count; i++) {
        const uint32_t id = tokens_max_(span, i, 1);
        CHECK(id < (uint32_t)V, "%s: token %zu has id %u, wanted below the vocabulary size %d", name, i, id,
              V);
    }
}

static inline void tokens_append_(TokenStream* stream, TokenSpan span) {
    span.first = stream->count;
    stream->spans[stream->num_spans++] = span;
    stream->count += span.count;
}

static inline void tokens_append_shard_(TokenStream* stream, const char* path, int V) {
    TokenSpan span = tokens_map_(path);
    tokens_read_header_(&span, path);
    tokens_check_(&span, V, path);
    tokens_append_(stream, span);
}

static inline void tokens_append_text_(TokenStream* stream, const char* path, int V) {
    static const uint16_t eot = TOKENIZER_BYTES_EOT;
    CHECK(V > eot, "%s: text, as bytes, needs a vocabulary of %d, found %d", path, eot + 1, V);
    TokenSpan separator;
    memset(&separator, 0, sizeof(separator));
    separator.tokens = &eot;
    separator.width = sizeof(eot);
    separator.count = 1;
    tokens_append_(stream, separator);
    tokens_append_(stream, tokens_map_(path));
}

// Opens shards or text files (tokens_list_): `pattern` must live as long as the stream. All of the files are
// checked, to the last token.
static inline void tokens_open_files(TokenStream* stream, const char* pattern, int vocab_size) {
    glob_t files = tokens_list_(pattern);
    memset(stream, 0, sizeof(*stream));
    stream->name = pattern;
    // a shard is one span, a text two
    stream->spans = (TokenSpan*)check_alloc(2 * files.gl_pathc, sizeof(TokenSpan), "token spans");
    for (size_t i = 0; i < files.gl_pathc; i++) {
        const char* path = files.gl_pathv[i];
        if (tokens_is_shard_(path)) {
            tokens_append_shard_(stream, path, vocab_size);
        } else {
            tokens_append_text_(stream, path, vocab_size);
        }
    }
    globfree(&files);
}

// Opens tokens of the caller, who keeps them as long as the stream lives; `name` is for errors.
static inline void tokens_open_memory(TokenStream* stream, const uint16_t* tokens, size_t count,
                                      int vocab_size, const char* name) {
    TokenSpan span;
    memset(&span, 0, sizeof(span));
    span.tokens = tokens;
    span.width = sizeof(*tokens);
    span.count = count;
    tokens_check_(&span, vocab_size, name);
    memset(stream, 0, sizeof(*stream));
    stream->name = name;
    stream->spans = (TokenSpan*)check_alloc(1, sizeof(TokenSpan), "token spans");
    tokens_append_(stream, span);
}

static inline void tokens_close(TokenStream* stream) {
    if (!stream->is_view) {
        for (size_t i = 0; i < stream->num_spans; i++) {
            if (stream->spans[i].map) {
                munmap(stream->spans[i].map, stream->spans[i].map_bytes);
            }
        }
        free(stream->spans);
    }
    memset(stream, 0, sizeof(*stream));
}

// Takes the validation data from the end of a freshly opened stream: its last shard if it has several, else
// 5 % of its tokens, and never less than one sequence. `tail` becomes a view of the stream's spans, so the
// stream is closed last.
static inline void tokens_split_tail(TokenStream* stream, TokenStream* tail, int T) {
    const size_t least = (size_t)T + 1;
    const TokenSpan* last = &stream->spans[stream->num_spans - 1];
    const int several_shards = stream->num_spans > 1 && last->width > 1; // text has width 1
    size_t count = several_shards ? last->count : stream->count / 20;
    count = count < least ? least : count;
    CHECK(stream->count >= least && stream->count - least >= count,
          "%s: %zu tokens, wanted %zu: %zu to train on one sequence and %zu for validation data",
          stream->name, stream->count, least + count, least, count);
    *tail = *stream;
    tail->is_view = 1;
    tail->begin += stream->count - count;
    tail->count = count;
    stream->count -= count;
}

// The span that holds a position of all spans laid end to end: the last one that begins at or before it.
static inline const TokenSpan* tokens_find_(const TokenStream* stream, size_t position) {
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

// Sets out (n) to the tokens [start, start + n) of one span.
static inline void tokens_fill_span_(const TokenSpan* span, size_t start, size_t n, int* out) {
    for (size_t i = 0; i < n; i++) {
        out[i] = span->width == 1   ? ((const uint8_t*)span->tokens)[start + i]
                 : span->width == 2 ? ((const uint16_t*)span->tokens)[start + i]
                                    : (int)((const uint32_t*)span->tokens)[start + i];
    }
}

// Sets out (n) to the tokens [start, start + n) of the stream.
static inline void tokens_fill(const TokenStream* stream, size_t start, size_t n, int* out) {
    assert(start <= stream->count && n <= stream->count - start);
    size_t position = stream->begin + start;
    for (const TokenSpan* span = tokens_find_(stream, position); n > 0; span++) {
        const size_t left = span->first + span->count - position, take = n < left ? n : left;
        tokens_fill_span_(span, position - span->first, take, out);
        position += take;
        out += take;
        n -= take;
    }
}

// ---- batches

typedef enum { SHUFFLE_OFF, SHUFFLE_ON } Shuffle;

typedef struct {
    const int *inputs, *targets; // (B, T) each; the loader's, valid until its next batch
    const int* starts;           // (B, T) where in its row each token's document begins; NULL: not known
    int B, T;
    int counted; // targets that are tokens
} Batch;

typedef struct {
    TokenStream stream; // a view
    int B, T;
    Shuffle shuffle;
    uint64_t seed;
    uint64_t num_sequences; // S, per epoch: a loop over the validation data is ceil(S / B) batches
    uint64_t next;          // p, the sequence of the run that comes next
    int *inputs, *targets;  // (B, T)
} Dataloader;

// The stream must not be closed before the loader.
static inline void dataloader_open(Dataloader* loader, const TokenStream* stream, int B, int T,
                                   Shuffle shuffle, uint64_t seed) {
    assert(B > 0 && T > 0);
    CHECK(stream->count > (size_t)T, "%s: %zu tokens, wanted %zu for a sequence of %d and its next token",
          stream->name, stream->count, (size_t)T + 1, T);
    memset(loader, 0, sizeof(*loader));
    loader->stream = *stream;
    loader->stream.is_view = 1;
    loader->B = B;
    loader->T = T;
    loader->shuffle = shuffle;
    loader->seed = seed;
    loader->num_sequences = (stream->count - 1) / (size_t)T;
    const size_t batch_tokens = array_bytes((size_t)B, (size_t)T);
    loader->inputs = (int*)check_alloc(batch_tokens, sizeof(int), "inputs");
    loader->targets = (int*)check_alloc(batch_tokens, sizeof(int), "targets");
}

// The next batch begins with sequence p of the run, counted over epochs.
static inline void dataloader_seek(Dataloader* loader, uint64_t sequence) { loader->next = sequence; }

// Which sequence k of the stream is sequence p of the run.
static inline uint64_t dataloader_order_(const Dataloader* loader, uint64_t p) {
    const uint64_t S = loader->num_sequences, epoch = p / S;
    return loader->shuffle == SHUFFLE_OFF
               ? p % S
               : rand_permute(loader->seed, rand_stream("data order") + epoch, S, p % S);
}

// The next B sequences of the run; an epoch may end inside of them.
static inline Batch dataloader_next(Dataloader* loader) {
    const size_t T = (size_t)loader->T;
    for (size_t b = 0; b < (size_t)loader->B; b++) {
        const size_t start = (size_t)dataloader_order_(loader, loader->next++) * T;
        tokens_fill(&loader->stream, start, T, loader->inputs + b * T);
        tokens_fill(&loader->stream, start + 1, T, loader->targets + b * T);
    }
    const Batch batch = {loader->inputs, loader->targets, NULL, loader->B, loader->T, loader->B * loader->T};
    return batch;
}

static inline void dataloader_close(Dataloader* loader) {
    free(loader->inputs);
    free(loader->targets);
    memset(loader, 0, sizeof(*loader));
}

#endif
