/*
bpe_files.h -- files of vocabularies like GPT-2's (bpe.h): bpe_open reads them, bpe_write writes a
tokenizer.json.

    tokenizer.json         Hugging Face's: a BPE with its vocabulary, merges, and how text is split
    vocab.json             {"token": id, ...}
    merges.txt, vocab.bpe  "#version", then lines "A B": the merges. Ids are in GPT-2's order
    .tiktoken              lines "base64 id"; end-of-text is the id after the last

Reading takes any of them, recognized by its content, or a directory: its tokenizer.json or, without
one, its merges.txt (a vocab.json beside it must agree). A file must be consistent. A tokenizer.json
that splits text differently, normalizes it first, or has tokens that its merges do not make is an
error that names the difference. Its added special tokens become names (bpe.h).

The same vocabulary always gives the same bytes; for GPT-2's, those of the public merges.txt and
vocab.json. JSON and merges.txt spell the 256 bytes as visible characters: Latin-1's and, for the rest, U+0100 to U+0143;
no token contains a blank or a line break.

bpe_write_hf writes a model's tokenizer for Hugging Face's transformers into a directory;
bpe_write_hf_config writes the part of it that any tokenizer.json needs beside it.
*/
#ifndef LLMC_BPE_FILES_H
#define LLMC_BPE_FILES_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/base/file_list.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/chat_format.h"
#include "llmc/tokenizer/model_card.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- writing JSON ----

// Describes end-of-text in Hugging Face's files, where a name is not enough.
#define BPE_HF_NOT_TRIMMED_ ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false"
#define BPE_HF_EOT                                                                                           \
    "\"content\": \"" BPE_EOT_TEXT "\"" BPE_HF_NOT_TRIMMED_ ", \"normalized\": false, \"special\": true"

// ---- any file ----

// Sets path to directory/name. Returns 0 if no such file exists.
int bpe_path(char path[PATH_MAX], const char* directory, const char* name);

// Adds the files of the tokenizer in this file or directory.
void bpe_list_files(FileList* files, const char* option, const char* path);

// Opens a file or directory.
void bpe_open(Bpe* bpe, const char* path);

// Writes a tokenizer.json.
void bpe_write(const Bpe* bpe, const char* path);

// Writes what transformers reads beside a tokenizer.json: the tokenizer's class, the model's
// context max_T, and the roles of tokens. `bpe` has further names; NULL: none.
void bpe_write_hf_config(const char* directory, const char* tokenizer_class, const ModelCard* card,
                         const Bpe* bpe, int max_T);

// Writes the tokenizer of a model with a context of max_T for transformers into a directory: the
// files that were read, with the card's end of a text. merges.txt goes with vocab.json, which has
// the ids, whatever their order.
void bpe_write_hf(const Bpe* bpe, const ModelCard* card, const char* directory, int max_T);

// Returns a checksum of all tokens, the same for every file format.
uint64_t bpe_checksum(const Bpe* bpe);

// Prints the tokens below V in the order of their ids, one per line, spelled in visible characters;
// for other formats.
void bpe_print_tokens(const Bpe* bpe, int V, FILE* file);

// True if text is split and merged as GPT-2 does, whatever the tokens: files but tokenizer.json can
// say no more.
int bpe_is_like_gpt2(const Bpe* bpe);

// Returns the name that GGUF has for how text is split and merged ("tokenizer.ggml.pre"); NULL:
// none.
const char* bpe_gguf_pre(const Bpe* bpe);

// Prints the merges in the order of their ranks, "A B", one per line.
void bpe_print_merges(const Bpe* bpe, FILE* file);

#ifdef __cplusplus
}
#endif

#ifdef BPE_FILES_IMPLEMENTATION

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/printable.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/xxh64.h"

#define BPE_MAX_CONFIG_ ((size_t)16 << 20) // largest tokenizer_config.json

// ---- reading: what all formats need ----

// File being read; every error names it.
typedef struct {
    const char* path;
    unsigned char* data; // becomes the vocabulary's buffer: the tokens stay where they are
    size_t bytes;
} BpeFile_;

static BpeFile_ bpe_read_(const char* path) {
    char error[ERROR_BYTES], *text;
    size_t bytes;
    struct stat info;
    const char* name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    const char* hint = strncmp(name, "gpt2", 4) == 0
                           ? "; `scripts/get_data.sh gpt2-vocab` gets data/gpt2-vocab/gpt2.tiktoken"
                           : "";
    CHECK(stat(path, &info) == 0, "%s: cannot open the tokenizer: %s%s", path, strerror(errno), hint);
    CHECK(S_ISREG(info.st_mode), "%s: not a regular file, wanted a tokenizer", path);
    CHECK(info.st_size > 0, "%s: empty file, wanted a tokenizer", path);
    CHECK(info.st_size <= INT_MAX, "%s: %lld bytes, wanted a tokenizer, at most %d", path,
          (long long)info.st_size, INT_MAX);
    CHECK(byte_order_text(path, INT_MAX, &text, &bytes, error), "%s", error);
    CHECK(bytes > 0, "%s: only a byte-order mark, wanted a tokenizer", path);
    // exact size, so that tools detect every access beyond it
    unsigned char* data = (unsigned char*)realloc(text, bytes);
    CHECK(data, "%s: no memory", path);
    const BpeFile_ file = {path, data, bytes};
    return file;
}

// Part of a text up to the next `end` character, or to its end.
typedef struct {
    unsigned char* text;
    size_t length;
} BpeSpan_;

static BpeSpan_ bpe_until_(unsigned char* text, size_t left, char end) {
    const unsigned char* found = left ? (const unsigned char*)memchr(text, end, left) : NULL;
    const BpeSpan_ span = {text, found ? (size_t)(found - text) : left};
    return span;
}

// Returns the text after the first blank of a line; empty without a blank.
static BpeSpan_ bpe_after_blank_(BpeSpan_ line) {
    const size_t first = bpe_until_(line.text, line.length, ' ').length;
    const size_t skipped = first < line.length ? first + 1 : line.length;
    const BpeSpan_ span = {line.text + skipped, line.length - skipped};
    return span;
}

// Counts the lines of a file; the last may lack its newline.
static size_t bpe_lines_(const BpeFile_* file) {
    size_t lines = file->data[file->bytes - 1] != '\n';
    for (size_t i = 0; i < file->bytes; i++) {
        lines += file->data[i] == '\n';
    }
    return lines;
}

// Start of a text, for a message: one line, terminated.
typedef struct {
    char text[24];
} BpeExcerpt_;

static BpeExcerpt_ bpe_excerpt_(BpeSpan_ span) {
    BpeExcerpt_ excerpt;
    const size_t n = span.length < sizeof(excerpt.text) ? span.length : sizeof(excerpt.text) - 1;
    for (size_t i = 0; i < n; i++) {
        excerpt.text[i] = ' ' <= span.text[i] && span.text[i] <= '~' ? (char)span.text[i] : '?';
    }
    excerpt.text[n] = '\0';
    return excerpt;
}

// ---- .tiktoken ----

static const char bpe_base64_digits_[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static int bpe_base64_digit_(unsigned char c) {
    const char* digit = c ? strchr(bpe_base64_digits_, c) : NULL;
    return digit ? (int)(digit - bpe_base64_digits_) : -1;
}

// Decodes base64 in place. Returns the number of bytes; 0 if it is malformed.
static size_t bpe_base64_(BpeSpan_ span) {
    size_t length = span.length, bytes = 0;
    if (length % 4 != 0) {
        return 0;
    }
    for (int padding = 0; padding < 2 && length > 0 && span.text[length - 1] == '='; padding++) {
        length--;
    }
    uint32_t bits = 0;
    for (size_t i = 0; i < length; i++) {
        const int digit = bpe_base64_digit_(span.text[i]);
        if (digit < 0) {
            return 0;
        }
        bits = bits << 6 | (uint32_t)digit;
        if (i % 4 != 0) { // digits 1, 2, 3 of four complete a byte and leave 4, 2, 0 bits
            span.text[bytes++] = (unsigned char)(bits >> (6 - 2 * (i % 4)));
        }
    }
    const uint32_t over = length % 4 == 2 ? bits & 15 : length % 4 == 3 ? bits & 3 : 0;
    return over == 0 ? bytes : 0;
}

// Returns the decimal number that fills the text exactly, or -1 unless it is below `limit`.
static int bpe_decimal_(BpeSpan_ span, size_t limit) {
    size_t number = 0;
    for (size_t i = 0; i < span.length; i++) {
        if (span.text[i] < '0' || span.text[i] > '9' || number >= limit) {
            return -1;
        }
        number = 10 * number + (size_t)(span.text[i] - '0');
    }
    return span.length > 0 && number < limit ? (int)number : -1;
}

// Reads lines "base64 id" in any order: n lines have the ids 0 .. n-1.
static void bpe_open_tiktoken_(Bpe* bpe, const BpeFile_* file) {
    const size_t n = bpe_lines_(file);
    bpe_open_ids_(bpe, file->path, file->data, n + 1, n);
    unsigned char* at = file->data;
    for (size_t number = 1; number <= n; number++) {
        const BpeSpan_ line = bpe_until_(at, file->bytes - (size_t)(at - file->data), '\n');
        BpeSpan_ token = bpe_until_(line.text, line.length, ' ');
        const BpeSpan_ digits = bpe_after_blank_(line);
        const int has_blank = token.length < line.length;
        token.length = bpe_base64_(token);
        CHECK(token.length > 0 && has_blank, "%s:%zu: wanted a token in base64, a blank, and its id",
              file->path, number);
        const int id = bpe_decimal_(digits, n); // n different ids below n: none is missing
        CHECK(id >= 0, "%s:%zu: id \"%s\", wanted 0 to %zu in a file of %zu lines", file->path, number,
              bpe_excerpt_(digits).text, n - 1, n);
        CHECK(bpe->tokens[id].length == 0, "%s:%zu: id %d appears twice", file->path, number, id);
        CHECK(bpe_set_token_(bpe, id, token.text, token.length), "%s:%zu: token %d is token %d again",
              file->path, number, id, bpe_find(bpe, (const char*)token.text, token.length));
        at += line.length + 1;
    }
    char error[ERROR_BYTES];
    CHECK(bpe_finish_(bpe, file->path, error), "%s", error);
}

// ---- tokens spelled in characters that can be seen ----

typedef struct {
    uint16_t of_byte[256];  // character of each byte
    int16_t byte_of[0x200]; // byte of each character, or -1
} BpeSpelling_;

static BpeSpelling_ bpe_spelling_(void) {
    BpeSpelling_ spelling;
    unsigned char order[256];
    uint16_t characters[256];
    bpe_spelled_bytes_(order, characters);
    memset(spelling.byte_of, -1, sizeof(spelling.byte_of));
    for (int id = 0; id < 256; id++) {
        spelling.of_byte[order[id]] = characters[id];
        spelling.byte_of[characters[id]] = order[id];
    }
    return spelling;
}

// Decodes in place. Returns the number of bytes; 0 if it is malformed.
static size_t bpe_unspell_(BpeSpan_ span, const BpeSpelling_* spelling) {
    size_t bytes = 0;
    for (size_t i = 0; i < span.length; i++) {
        unsigned c = span.text[i];
        if (0xC2 <= c && c <= 0xC7 && i + 1 < span.length && (span.text[i + 1] & 0xC0) == 0x80) {
            c = (c & 0x1F) << 6 | (span.text[++i] & 0x3Fu);
        } else if (c >= 0x80) {
            return 0;
        }
        if (spelling->byte_of[c] < 0) {
            return 0;
        }
        span.text[bytes++] = (unsigned char)spelling->byte_of[c];
    }
    return bytes;
}

// JSON in ASCII: \u and four digits for other characters
typedef enum { BPE_UTF8_, BPE_JSON_ } BpeText_;

static void bpe_put_spelled_(const BpeSpelling_* spelling, BpeToken_ token, BpeText_ text, FILE* file) {
    for (uint32_t i = 0; i < token.length; i++) {
        const unsigned c = spelling->of_byte[token.text[i]];
        if (c >= 0x80 && text == BPE_JSON_) {
            fprintf(file, "\\u%04x", c);
        } else if (c >= 0x80) {
            fprintf(file, "%c%c", 0xC0 | c >> 6, 0x80 | (c & 63));
        } else {
            fprintf(file, text == BPE_JSON_ && (c == '"' || c == '\\') ? "\\%c" : "%c", c);
        }
    }
}

// Calls `put` for each merge, in order, with the two tokens that it joins.
typedef void (*BpePutMerge_)(const BpeSpelling_* spelling, BpeToken_ left, BpeToken_ right, int is_first,
                             FILE* file);
static void bpe_put_each_merge_(const Bpe* bpe, BpePutMerge_ put, FILE* file) {
    const BpeSpelling_ spelling = bpe_spelling_();
    // by rank
    uint64_t* merges = (uint64_t*)check_alloc((size_t)bpe->num_ranks, sizeof(uint64_t), "merges");
    for (size_t i = 0; i < (size_t)1 << bpe->pairs.bits; i++) {
        const uint64_t entry = bpe->pairs.entries[i];
        if (entry != 0) {
            merges[bpe_merge_of_(entry).id] = entry;
        }
    }
    int is_first = 1;
    for (int rank = 0; rank < bpe->num_ranks; rank++) {
        if (merges[rank] != 0) {
            const BpeMerge_ merge = bpe_merge_of_(merges[rank]);
            put(&spelling, bpe->tokens[merge.left], bpe->tokens[merge.right], is_first, file);
            is_first = 0;
        }
    }
    free(merges);
}

// ---- merges.txt ----

// Reads a line "#version", then "A B" on each line: the ids from 256 on, in order.
static void bpe_open_merges_(Bpe* bpe, const BpeFile_* file) {
    const BpeSpelling_ spelling = bpe_spelling_();
    const BpeSpan_ version = bpe_until_(file->data, file->bytes, '\n');
    const size_t n = bpe_lines_(file) - 1; // merges
    bpe_begin_merges_(bpe, file->path, (unsigned char*)check_alloc(256 + file->bytes, 1, "vocabulary"), n);
    int(*pairs)[2] = (int(*)[2])check_alloc(n, sizeof(*pairs), "merges");
    unsigned char* at = file->data + version.length + 1;
    for (size_t i = 0; i < n; i++) {
        const BpeSpan_ line = bpe_until_(at, file->bytes - (size_t)(at - file->data), '\n');
        const BpeSpan_ sides[2] = {bpe_until_(line.text, line.length, ' '), bpe_after_blank_(line)};
        int* pair = pairs[i];
        for (int side = 0; side < 2; side++) {
            const size_t bytes = bpe_unspell_(sides[side], &spelling);
            CHECK(bytes > 0, "%s:%zu: wanted two tokens in the spelling of vocab.bpe, with a blank between",
                  file->path, i + 2);
            pair[side] = bpe_find(bpe, (const char*)sides[side].text, bytes);
            CHECK(pair[side] >= 0, "%s:%zu: its %s side is not a byte and no line before makes it",
                  file->path, i + 2, side ? "right" : "left");
        }
        const int id = 256 + (int)i, made = bpe_add_merge_(bpe, id, pair[0], pair[1]);
        CHECK(made == id, "%s:%zu: makes token %d again", file->path, i + 2, made);
        at += line.length + 1;
    }
    char error[ERROR_BYTES];
    CHECK(bpe_finish_(bpe, file->path, error), "%s", error);
    const int wrong = bpe_wrong_merge_(bpe, pairs);
    CHECK(wrong < 0, "%s:%d: the lines before never leave these two tokens side by side", file->path,
          wrong + 2);
    free(pairs);
    free(file->data);
}

static void bpe_put_merge_line_(const BpeSpelling_* spelling, BpeToken_ left, BpeToken_ right, int is_first,
                                FILE* file) {
    (void)is_first;
    bpe_put_spelled_(spelling, left, BPE_UTF8_, file);
    fputc(' ', file);
    bpe_put_spelled_(spelling, right, BPE_UTF8_, file);
    fputc('\n', file);
}

static void bpe_put_merges_(const Bpe* bpe, FILE* file) {
    fputs("#version: 0.2\n", file);
    bpe_put_each_merge_(bpe, bpe_put_merge_line_, file);
}

// ---- reading vocab.json and tokenizer.json ----

typedef struct {
    BpeSpan_ text; // as spelled in the file
    size_t id;
} BpeNamed_;

// Added token.
typedef struct {
    BpeSpan_ text;
    size_t id;
    int is_special, is_raw; // raw: matches the text before it is normalized
    // not supported, but for special tokens, which are never looked for
    int single_word, lstrip, rstrip;
} BpeAdded_;

// Contents of such a file, in the memory of its bytes; not a vocabulary yet.
typedef struct {
    JsonReader json;
    BpeSpelling_ spelling;
    BpeNamed_* tokens; // vocabulary
    BpeAdded_* added;  // special tokens, words, end-of-text; the vocabulary may also have them
    BpeSpan_ (*merges)[2];
    size_t num_tokens, num_added, num_merges;
    int has_model, is_bytes; // parts that were found, and are as required
    BpePattern pattern;
    int has_pattern;
    int finds_pieces;  // ignore_merges
    const char* start; // the only token that its post_processor puts before a text; NULL: none
    int num_starts;    // tokens that it puts before a text
    int is_after_text; // while a template is read
} BpeJson_;

static int bpe_json_refuse_(BpeJson_* v, const char* found, const char* what, const char* wanted) {
    const BpeSpan_ span = {(unsigned char*)what, strlen(what)};
    return error_set(v->json.error, v->json.path, "%s %s, wanted %s", found, bpe_excerpt_(span).text, wanted);
}

// Reads an array, each element with `read`.
static int bpe_json_each_(BpeJson_* v, int (*read)(BpeJson_* v)) {
    JsonWalk walk = json_walk(&v->json, '[');
    while (json_step(&walk, NULL)) {
        walk.ok = read(v);
    }
    return walk.ok;
}

// Reads one "token": id, after its key.
static int bpe_json_token_(BpeJson_* v, const char* text, size_t length) {
    BpeNamed_ token = {{(unsigned char*)text, length}, 0};
    if (!json_natural(&v->json, &token.id)) {
        return 0;
    }
    v->tokens = (BpeNamed_*)check_grow(v->tokens, v->num_tokens, sizeof(*v->tokens), "vocabulary");
    v->tokens[v->num_tokens++] = token;
    return 1;
}

static int bpe_json_vocab_(BpeJson_* v) {
    const char* text;
    size_t length;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_text_step(&walk, &text, &length)) {
        walk.ok = bpe_json_token_(v, text, length);
    }
    return walk.ok;
}

// Reads one side of a merge.
static int bpe_json_side_(BpeJson_* v, BpeSpan_* side) {
    const char* text;
    size_t length;
    if (!json_text(&v->json, &text, &length)) {
        return 0;
    }
    side->text = (unsigned char*)text;
    side->length = length;
    return 1;
}

// Reads "A B", or ["A", "B"] of newer files.
static int bpe_json_sides_(BpeJson_* v, BpeSpan_ sides[2]) {
    if (json_peek(&v->json) == '[') {
        return json_take(&v->json, '[') && bpe_json_side_(v, &sides[0]) && json_take(&v->json, ',') &&
               bpe_json_side_(v, &sides[1]) && json_take(&v->json, ']');
    }
    BpeSpan_ both;
    if (!bpe_json_side_(v, &both)) {
        return 0;
    }
    sides[0] = bpe_until_(both.text, both.length, ' ');
    sides[1] = bpe_after_blank_(both);
    return 1;
}

// Reads one element of merges.
static int bpe_json_merge_(BpeJson_* v) {
    BpeSpan_ sides[2];
    if (!bpe_json_sides_(v, sides)) {
        return 0;
    }
    for (int side = 0; side < 2; side++) {
        sides[side].length = bpe_unspell_(sides[side], &v->spelling);
        if (sides[side].length == 0) {
            return error_set(v->json.error, v->json.path,
                             "merges[%zu] is not two tokens in the spelling of GPT-2", v->num_merges);
        }
    }
    v->merges = (BpeSpan_(*)[2])check_grow(v->merges, v->num_merges, sizeof(*v->merges), "vocabulary");
    memcpy(v->merges[v->num_merges++], sides, sizeof(sides));
    return 1;
}

// Reads a value that must be null or an empty string.
static int bpe_json_nothing_(BpeJson_* v, const char* key) {
    const char* text = key;
    const int c = json_peek(&v->json);
    if (c == 'n') {
        return json_skip(&v->json);
    }
    if (c == '"' && !json_string(&v->json, &text)) {
        return 0;
    }
    return text[0] == '\0' || error_set(v->json.error, v->json.path, "the model has a %s, wanted null", key);
}

static int bpe_json_model_member_(BpeJson_* v, const char* key) {
    const char* type;
    if (strcmp(key, "type") == 0) {
        return json_name(&v->json, &type) &&
               (strcmp(type, "BPE") == 0 || bpe_json_refuse_(v, "a model of type", type, "BPE"));
    }
    if (strcmp(key, "dropout") == 0 || strcmp(key, "continuing_subword_prefix") == 0 ||
        strcmp(key, "end_of_word_suffix") == 0) {
        return bpe_json_nothing_(v, key);
    }
    if (strcmp(key, "byte_fallback") == 0) {
        int is_on = 0;
        return json_bool(&v->json, &is_on) &&
               (!is_on ||
                bpe_json_refuse_(v, "a model with", "byte_fallback", "byte-level BPE, not SentencePiece's"));
    }
    return strcmp(key, "vocab") == 0           ? bpe_json_vocab_(v)
           : strcmp(key, "merges") == 0        ? bpe_json_each_(v, bpe_json_merge_)
           : strcmp(key, "ignore_merges") == 0 ? json_bool(&v->json, &v->finds_pieces)
                                               : json_skip(&v->json);
}

// Reads the model. Files of 2019 have no type.
static int bpe_json_model_(BpeJson_* v) {
    const char* key;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        walk.ok = bpe_json_model_member_(v, key);
    }
    v->has_model = 1;
    return walk.ok;
}

static int bpe_json_add_(BpeJson_* v, BpeAdded_ token) {
    if (token.text.length == 0) {
        return error_set(v->json.error, v->json.path, "the added token %zu is empty", token.id);
    }
    v->added = (BpeAdded_*)check_grow(v->added, v->num_added, sizeof(*v->added), "vocabulary");
    v->added[v->num_added++] = token;
    return 1;
}

// Reads one object of added_tokens.
static int bpe_json_added_token_(BpeJson_* v) {
    const char *key, *content = "";
    BpeAdded_ token = {{NULL, 0}, SIZE_MAX, 0, 0, 0, 0, 0};
    int is_normalized = 0;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        walk.ok = strcmp(key, "id") == 0            ? json_natural(&v->json, &token.id)
                  : strcmp(key, "content") == 0     ? json_name(&v->json, &content)
                  : strcmp(key, "special") == 0     ? json_bool(&v->json, &token.is_special)
                  : strcmp(key, "normalized") == 0  ? json_bool(&v->json, &is_normalized)
                  : strcmp(key, "single_word") == 0 ? json_bool(&v->json, &token.single_word)
                  : strcmp(key, "lstrip") == 0      ? json_bool(&v->json, &token.lstrip)
                  : strcmp(key, "rstrip") == 0      ? json_bool(&v->json, &token.rstrip)
                                                    : json_skip(&v->json);
    }
    token.text.text = (unsigned char*)content;
    token.text.length = strlen(content);
    token.is_raw = !is_normalized;
    return walk.ok && bpe_json_add_(v, token);
}

// Normalizer or pre_tokenizer: an object, or null.
typedef struct {
    const char *type, *pattern, *behavior;
    int add_prefix_space, use_regex, individual_digits, invert;
    int is_literal; // the pattern is a text, not an expression
} BpeJsonStep_;

// Reads {"Regex": "..."}, or {"String": "..."}.
static int bpe_json_regex_(BpeJson_* v, BpeJsonStep_* step) {
    const char* kind;
    if (!json_take(&v->json, '{') || json_member(&v->json, JSON_FIRST, &kind) <= 0) {
        return 0;
    }
    step->is_literal = strcmp(kind, "String") == 0;
    return (step->is_literal || strcmp(kind, "Regex") == 0 ||
            bpe_json_refuse_(v, "a pattern of kind", kind, "Regex or String")) &&
           json_name(&v->json, &step->pattern) && json_take(&v->json, '}');
}

// Reads a step. `each` reads those of a sequence.
static int bpe_json_step_(BpeJson_* v, BpeJsonStep_* step, int (*each)(BpeJson_* v)) {
    static const BpeJsonStep_ defaults = {"without a type", "", "", 1, 1, 0, 0, 0};
    const char* key;
    *step = defaults;
    if (json_peek(&v->json) == 'n') {
        step->type = "null";
        return json_skip(&v->json);
    }
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        const int is_list = strcmp(key, "normalizers") == 0 || strcmp(key, "pretokenizers") == 0;
        walk.ok = is_list                                 ? bpe_json_each_(v, each)
                  : strcmp(key, "type") == 0              ? json_name(&v->json, &step->type)
                  : strcmp(key, "pattern") == 0           ? bpe_json_regex_(v, step)
                  : strcmp(key, "behavior") == 0          ? json_name(&v->json, &step->behavior)
                  : strcmp(key, "add_prefix_space") == 0  ? json_bool(&v->json, &step->add_prefix_space)
                  : strcmp(key, "use_regex") == 0         ? json_bool(&v->json, &step->use_regex)
                  : strcmp(key, "individual_digits") == 0 ? json_bool(&v->json, &step->individual_digits)
                  : strcmp(key, "invert") == 0            ? json_bool(&v->json, &step->invert)
                                                          : json_skip(&v->json);
    }
    return walk.ok;
}

static int bpe_json_normalizer_(BpeJson_* v) {
    BpeJsonStep_ step;
    if (!bpe_json_step_(v, &step, bpe_json_normalizer_)) {
        return 0;
    }
    v->pattern.normalizes |= strcmp(step.type, "NFC") == 0;
    const int is_sentencepiece = strcmp(step.type, "Prepend") == 0 || strcmp(step.type, "Replace") == 0;
    return strcmp(step.type, "null") == 0 || strcmp(step.type, "NFC") == 0 ||
           strcmp(step.type, "Sequence") == 0 ||
           bpe_json_refuse_(v, "normalization by", step.type,
                            is_sentencepiece ? "none or NFC: SentencePiece is not supported" : "none or NFC");
}

static int bpe_json_digits_(BpeJson_* v, const BpeJsonStep_* step) {
    v->pattern.digits_first = 1;
    v->pattern.digits = step->individual_digits;
    return !v->has_pattern || bpe_json_refuse_(v, "the pre_tokenizer", "Digits", "it before the others");
}

// Reads a Split by a regular expression, whose matches are the pieces.
static int bpe_json_split_(BpeJson_* v, const BpeJsonStep_* step) {
    BpePattern pattern;
    const int is_isolated = strcmp(step->behavior, "Isolated") == 0 && !step->invert;
    const int is_removed = strcmp(step->behavior, "Removed") == 0 && step->invert;
    if (!is_isolated && !is_removed) {
        return error_set(
            v->json.error, v->json.path,
            "the pre_tokenizer Split with the behavior %.24s and invert %s, wanted Isolated and false, or "
            "Removed and true",
            step->behavior, step->invert ? "true" : "false");
    }
    if (step->is_literal) {
        return error_set(v->json.error, v->json.path,
                         "the pre_tokenizer splits text at the literal string %.40s, wanted {\"Regex\": ...}",
                         step->pattern);
    }
    if (!bpe_pattern_read(step->pattern, &pattern)) {
        return error_set(v->json.error, v->json.path,
                         "the pre_tokenizer splits text by %s; wanted the pattern of GPT-2, Llama 3, Qwen, "
                         "GLM or nanochat",
                         step->pattern);
    }
    if (v->has_pattern || (v->pattern.digits_first && pattern.style != BPE_GPT2)) {
        return bpe_json_refuse_(v, "the pre_tokenizer", "Split", "one pattern only");
    }
    v->has_pattern = 1;
    v->pattern.style = pattern.style;
    v->pattern.digits = v->pattern.digits_first ? v->pattern.digits : pattern.digits;
    return 1;
}

static int bpe_json_bytes_(BpeJson_* v, const BpeJsonStep_* step) {
    if (step->add_prefix_space) {
        return bpe_json_refuse_(v, "the pre_tokenizer", step->type, "it with add_prefix_space false");
    }
    if (step->use_regex == v->has_pattern) {
        return bpe_json_refuse_(v, "the pre_tokenizer", step->type,
                                v->has_pattern ? "it with use_regex false after a Split"
                                               : "it with use_regex true");
    }
    v->is_bytes = v->has_pattern = 1;
    return 1;
}

static int bpe_json_pre_tokenizer_(BpeJson_* v) {
    BpeJsonStep_ step;
    if (!bpe_json_step_(v, &step, bpe_json_pre_tokenizer_)) {
        return 0;
    }
    if (v->is_bytes && strcmp(step.type, "Sequence") != 0) {
        return bpe_json_refuse_(v, "the pre_tokenizer", step.type, "nothing after ByteLevel");
    }
    return strcmp(step.type, "Sequence") == 0 ? 1
           : strcmp(step.type, "Digits") == 0 ? bpe_json_digits_(v, &step)
           : strcmp(step.type, "Split") == 0  ? bpe_json_split_(v, &step)
           : strcmp(step.type, "ByteLevel") == 0
               ? bpe_json_bytes_(v, &step)
               : bpe_json_refuse_(v, "the pre_tokenizer", step.type,
                                  strcmp(step.type, "Metaspace") == 0 ? "ByteLevel: SentencePiece is not "
                                                                        "supported"
                                                                      : "ByteLevel, Split or Digits");
}

// Reads {"id": "<s>", ...} of a template.
static int bpe_json_special_(BpeJson_* v) {
    const char *key, *name;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        if (strcmp(key, "id") != 0) {
            walk.ok = json_skip(&v->json);
        } else if ((walk.ok = json_name(&v->json, &name)) != 0) {
            v->start = v->is_after_text || v->num_starts++ > 0 ? v->start : name;
        }
    }
    return walk.ok;
}

// Reads one element of a template: {"SpecialToken": {...}} or {"Sequence": {...}}.
static int bpe_json_template_(BpeJson_* v) {
    const char* key;
    if (!json_take(&v->json, '{') || json_member(&v->json, JSON_FIRST, &key) <= 0 ||
        !(strcmp(key, "SpecialToken") == 0 ? bpe_json_special_(v)
          : strcmp(key, "Sequence") == 0
              ? json_skip(&v->json)
              : bpe_json_refuse_(v, "the post_processor has a", key, "SpecialToken or Sequence")) ||
        !json_take(&v->json, '}')) {
        return 0;
    }
    v->is_after_text |= strcmp(key, "Sequence") == 0;
    return 1;
}

// Reads a post_processor, or one of a sequence, for the token it puts beside a text. "cls" is
// RoBERTa's.
static int bpe_json_processor_(BpeJson_* v) {
    const char* key;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        if (strcmp(key, "cls") == 0) {
            v->start = "its own token";
            v->num_starts++;
        }
        walk.ok = strcmp(key, "single") == 0       ? bpe_json_each_(v, bpe_json_template_)
                  : strcmp(key, "processors") == 0 ? bpe_json_each_(v, bpe_json_processor_)
                                                   : json_skip(&v->json);
    }
    return walk.ok;
}

static int bpe_json_post_processor_(BpeJson_* v) {
    return json_peek(&v->json) == 'n' ? json_skip(&v->json) : bpe_json_processor_(v);
}

// Reads the whole file: in a tokenizer.json no value is a number, in a vocab.json all are.
static int bpe_json_file_(BpeJson_* v) {
    const char* key;
    size_t length;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_text_step(&walk, &key, &length)) {
        const int c = json_peek(&v->json);
        walk.ok = '0' <= c && c <= '9'                 ? bpe_json_token_(v, key, length)
                  : strcmp(key, "model") == 0          ? bpe_json_model_(v)
                  : strcmp(key, "added_tokens") == 0   ? bpe_json_each_(v, bpe_json_added_token_)
                  : strcmp(key, "normalizer") == 0     ? bpe_json_normalizer_(v)
                  : strcmp(key, "pre_tokenizer") == 0  ? bpe_json_pre_tokenizer_(v)
                  : strcmp(key, "post_processor") == 0 ? bpe_json_post_processor_(v)
                                                       : json_skip(&v->json);
    }
    return walk.ok && json_end(&v->json);
}

static int bpe_span_is_(BpeSpan_ span, const char* text) {
    return span.length == strlen(text) && memcmp(span.text, text, span.length) == 0;
}

// Returns the added token with this text; NULL: none.
static const BpeAdded_* bpe_json_find_added_(const BpeJson_* v, const char* text) {
    for (size_t i = 0; i < v->num_added; i++) {
        if (bpe_span_is_(v->added[i].text, text)) {
            return &v->added[i];
        }
    }
    return NULL;
}

// Makes end-of-text in the vocabulary an added token, as tokenizer.json has it.
static void bpe_add_json_eot_(BpeJson_* v) {
    for (size_t i = 0; i < v->num_tokens; i++) {
        const BpeNamed_ token = v->tokens[i];
        if (!bpe_span_is_(token.text, BPE_EOT_TEXT)) {
            continue;
        }
        const BpeAdded_ eot = {token.text, token.id, 1, 0, 0, 0, 0},
                        *listed = bpe_json_find_added_(v, BPE_EOT_TEXT);
        CHECK(!listed || listed->id == token.id, "%s: %s is token %zu, and token %zu", v->json.path,
              BPE_EOT_TEXT, listed->id, token.id);
        if (!listed) {
            bpe_json_add_(v, eot);
        }
    }
}

// Counts the ids: tokens, and added ones that the vocabulary lacks.
static size_t bpe_json_size_(const BpeJson_* v, const char* path) {
    const size_t most = v->num_tokens + v->num_added;
    char* is_taken = (char*)check_alloc(most + 1, 1, "vocabulary");
    size_t V = v->num_tokens;
    for (size_t i = 0; i < v->num_tokens; i++) {
        is_taken[v->tokens[i].id < most ? v->tokens[i].id : most] = 1;
    }
    is_taken[most] = 0;
    for (size_t i = 0; i < v->num_added; i++) {
        char* taken = &is_taken[v->added[i].id < most ? v->added[i].id : most];
        V += !*taken;
        *taken = 1;
    }
    free(is_taken);
    for (size_t i = 0; i < v->num_added; i++) {
        CHECK(v->added[i].id < V, "%s: the added token %s has the id %zu, wanted at most %zu", path,
              bpe_excerpt_(v->added[i].text).text, v->added[i].id, V - 1);
    }
    return V;
}

// Returns the added token with this id; NULL: none.
static const BpeAdded_* bpe_json_added_(const BpeJson_* v, size_t id) {
    for (size_t i = 0; i < v->num_added; i++) {
        if (v->added[i].id == id) {
            return &v->added[i];
        }
    }
    return NULL;
}

// Returns the token that stands before each document: the one that the post_processor puts there,
// or else the first of the usual ones, or the one that the files beside it name.
static const BpeAdded_* bpe_json_start_(const BpeJson_* v, const CardFiles* files, const char* path) {
    static const char* const usual[] = {BPE_EOT_TEXT, "<|begin_of_text|>", "<|bos|>", "<s>"};
    const BpeAdded_* start = v->start && v->num_starts == 1 ? bpe_json_find_added_(v, v->start) : NULL;
    for (size_t i = 0; !start && i < sizeof(usual) / sizeof(usual[0]); i++) {
        start = bpe_json_find_added_(v, usual[i]);
    }
    start = start || !files->bos ? start : bpe_json_find_added_(v, files->bos);
    start = start ? start : bpe_json_added_(v, files->start);
    CHECK(start,
          "%s: no token " BPE_EOT_TEXT ", nor another that usually stands before a document; wanted one, or "
          "a bos_token in tokenizer_config.json beside it",
          path);
    return start;
}

// Checks that the parts of the file exist and their sizes fit.
static void bpe_check_json_(const BpeJson_* v, const char* path) {
    CHECK(v->has_model || v->num_tokens > 0,
          "%s: neither a model nor tokens, wanted a tokenizer.json or vocab.json", path);
    CHECK(!v->has_model || v->is_bytes, "%s: no pre_tokenizer, wanted ByteLevel", path);
    CHECK(v->num_merges <= BPE_MAX_VOCAB, "%s: %zu merges, wanted at most %d", path, v->num_merges,
          BPE_MAX_VOCAB);
}

// Checks that a word can be cut out of text: only where text may be divided does it go unseen.
static void bpe_check_word_(const Bpe* bpe, BpeAdded_ token, const char* path) {
    NfcText normal;
    size_t blanks = 0;
    memset(&normal, 0, sizeof(normal));
    for (size_t i = 0; i < token.text.length; i++) {
        blanks += token.text.text[i] == ' ' || ('\t' <= token.text.text[i] && token.text.text[i] <= '\r');
    }
    CHECK(!token.single_word && !token.lstrip && !token.rstrip,
          "%s: the added token %s has single_word, lstrip or rstrip, wanted it only where it is special",
          path, bpe_excerpt_(token.text).text);
    CHECK(blanks == 0 || blanks == token.text.length,
          "%s: the added token \"%s\" has a blank among other characters, wanted it only where it is special",
          path, bpe_excerpt_(token.text).text);
    CHECK(token.is_raw || !bpe->rules.pattern.normalizes ||
              !nfc_apply(&bpe->rules.nfc, token.text.text, token.text.length, &normal),
          "%s: the added token %s is not normalized", path, bpe_excerpt_(token.text).text);
    nfc_text_close(&normal);
}

static void bpe_name_json_tokens_(Bpe* bpe, const BpeJson_* v, const char* path) {
    for (size_t i = 0; i < v->num_added; i++) {
        const BpeAdded_ token = v->added[i];
        CHECK(token.id < (size_t)bpe->vocab_size && bpe->tokens[token.id].length == 0,
              "%s: id %zu appears twice", path, token.id);
        bpe_name_token_(bpe, (int)token.id, token.text.text, token.text.length);
        if (!token.is_special) {
            const BpeWord word = {token.text.text, (uint32_t)token.text.length, (int)token.id,
                                  token.is_raw ? BPE_RAW_WORDS : BPE_NORMAL_WORDS};
            bpe_check_word_(bpe, token, path);
            bpe->tokens[token.id].kind = BPE_WORD;
            bpe_words_add(&bpe->words, word);
        }
    }
    bpe_words_finish(&bpe->words);
}

// True if merges may make a token of the vocabulary: it is no added one, or a word with the same
// bytes in both spellings.
static int bpe_is_spelled_(Bpe* bpe, BpeNamed_ token, const BpeSpelling_* spelling) {
    BpeToken_* named = &bpe->tokens[token.id];
    if (named->kind == BPE_TOKEN || named->length != token.text.length ||
        memcmp(named->text, token.text.text, named->length) != 0) {
        return 1;
    }
    int is_spelled = named->kind == BPE_WORD;
    for (uint32_t i = 0; i < named->length; i++) {
        is_spelled &= named->text[i] < 0x80 && spelling->byte_of[named->text[i]] == named->text[i];
    }
    named->length = is_spelled ? 0 : named->length;
    return is_spelled;
}

static void bpe_set_json_tokens_(Bpe* bpe, const BpeJson_* v, const char* path) {
    for (size_t i = 0; i < v->num_tokens; i++) {
        BpeSpan_ text = v->tokens[i].text;
        const size_t id = v->tokens[i].id;
        CHECK(id < (size_t)bpe->vocab_size, "%s: token id %zu, wanted 0 to %d in a vocabulary of %d", path,
              id, bpe->vocab_size - 1, bpe->vocab_size);
        if (!bpe_is_spelled_(bpe, v->tokens[i], &v->spelling)) {
            continue;
        }
        CHECK(bpe->tokens[id].length == 0, "%s: id %zu appears twice", path, id);
        text.length = bpe_unspell_(text, &v->spelling);
        CHECK(text.length > 0, "%s: token %zu is not in the spelling of GPT-2", path, id);
        CHECK(bpe_set_token_(bpe, (int)id, text.text, text.length), "%s: token %zu is token %d again", path,
              id, bpe_find(bpe, (const char*)text.text, text.length));
    }
}

// Returns the merges as tokens, which the caller frees.
static BpeListed_* bpe_list_json_merges_(const Bpe* bpe, const BpeJson_* v, const char* path) {
    BpeListed_* list = (BpeListed_*)check_alloc(v->num_merges, sizeof(BpeListed_), "merges");
    char* both = NULL;
    size_t room = 0;
    for (size_t i = 0; i < v->num_merges; i++) {
        const BpeSpan_ left = v->merges[i][0], right = v->merges[i][1];
        both = (char*)check_reserve(both, &room, left.length + right.length, 1, "merges");
        memcpy(both, left.text, left.length);
        memcpy(both + left.length, right.text, right.length);
        list[i].left = bpe_find(bpe, both, left.length);
        list[i].right = bpe_find(bpe, both + left.length, right.length);
        list[i].made = bpe_find(bpe, both, left.length + right.length);
        CHECK(list[i].left >= 0, "%s: the left side of merges[%zu] is no token", path, i);
        CHECK(list[i].right >= 0, "%s: the right side of merges[%zu] is no token", path, i);
        CHECK(list[i].made >= 0, "%s: merges[%zu] makes no token of %d and %d", path, i, list[i].left,
              list[i].right);
    }
    free(both);
    return list;
}

// Checks that merges make all tokens, but for a file that looks for whole pieces first. Returns the
// number of tokens that they should make.
static size_t bpe_check_made_(const Bpe* bpe, const BpeJson_* v, const BpeListed_* list, const char* path) {
    char* is_made = (char*)check_alloc((size_t)bpe->vocab_size, 1, "vocabulary");
    size_t wanted = 0, made = 0;
    for (size_t i = 0; i < v->num_merges; i++) {
        is_made[list[i].made] = 1;
    }
    for (int id = 0; id < bpe->vocab_size; id++) {
        const int is_long = bpe->tokens[id].kind == BPE_TOKEN && bpe->tokens[id].length > 1;
        wanted += (size_t)is_long;
        made += (size_t)(is_long && is_made[id]);
    }
    free(is_made);
    CHECK(made == wanted || v->finds_pieces,
          "%s: %zu merges make %zu of the %zu tokens that are longer than a byte, wanted all without "
          "ignore_merges",
          path, v->num_merges, made, wanted);
    return wanted;
}

// True if the merges are those that the vocabulary implies, in the order of the ids they make: the
// ranks are the ids then.
static int bpe_merges_are_implied_(const Bpe* bpe, const BpeListed_* list, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (bpe_pair_(&bpe->pairs, list[i].left, list[i].right) != list[i].made ||
            (i > 0 && list[i].made <= list[i - 1].made)) {
            return 0;
        }
    }
    return 1;
}

// Completes the vocabulary with the merges of the file.
static void bpe_finish_json_(Bpe* bpe, const BpeJson_* v, const char* path) {
    char error[ERROR_BYTES];
    if (!v->has_model) {
        CHECK(bpe_finish_(bpe, path, error), "%s", error);
        return;
    }
    BpeListed_* list = bpe_list_json_merges_(bpe, v, path);
    const size_t wanted = bpe_check_made_(bpe, v, list, path);
    bpe->finds_pieces = v->finds_pieces;
    if (wanted != v->num_merges || !bpe_finish_(bpe, path, error) ||
        !bpe_merges_are_implied_(bpe, list, v->num_merges)) {
        CHECK(bpe_finish_ranks_(bpe, path, list, (int)v->num_merges, error), "%s", error);
    }
    free(list);
}

// ---- files beside tokenizer.json ----

// Files that are written as they were read, tokenizer.json first.
static const char* const bpe_kept_files_[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt",     "added_tokens.json"};
enum { BPE_KEPT_FILES_ = sizeof(bpe_kept_files_) / sizeof(bpe_kept_files_[0]) };
_Static_assert((int)BPE_KEPT_FILES_ <= (int)BPE_MAX_KEPT, "room for all files that are kept");

// Copies a file's bytes.
static BpeKept bpe_keep_(const char* name, const void* bytes, size_t count) {
    const BpeKept kept = {name, (unsigned char*)check_alloc(count ? count : 1, 1, name), count};
    memcpy(kept.bytes, bytes, count);
    return kept;
}

// Keeps the files of the tokenizer in this directory.
static void bpe_keep_directory_(Bpe* bpe, const char* directory) {
    for (int i = 1; i < BPE_KEPT_FILES_; i++) {
        char path[PATH_MAX], error[ERROR_BYTES], *text;
        size_t bytes;
        if (bpe_path(path, directory, bpe_kept_files_[i])) {
            CHECK(byte_order_text(path, BPE_MAX_CONFIG_, &text, &bytes, error), "%s", error);
            bpe->kept[bpe->num_kept++] = bpe_keep_(bpe_kept_files_[i], text, bytes);
            free(text);
        }
    }
}

// Returns the id of an added token; -1: none is called so.
static int bpe_find_name_(const Bpe* bpe, const char* name) { return name ? bpe_find_added(bpe, name) : -1; }

// Returns an id of the files; -1: none, or beyond the vocabulary.
static int bpe_id_of_file_(const Bpe* bpe, size_t id) { return id < (size_t)bpe->vocab_size ? (int)id : -1; }

// Returns the name of a token, terminated, which the caller frees; NULL: there is no token.
static char* bpe_name_of_(const Bpe* bpe, int id) {
    int length = 0;
    const char* name = id >= 0 ? bpe_token(bpe, id, &length) : NULL;
    return name ? strndup(name, (size_t)length) : NULL;
}

// Finds the format of the card's template, and the token that ends an answer.
static void bpe_recognize_chat_(Bpe* bpe) {
    ModelCard* card = &bpe->card;
    if (!card->chat_template) {
        return;
    }
    char *bos = bpe_name_of_(bpe, card->bos), *eos = bpe_name_of_(bpe, card->eos);
    card->chat_known = chat_recognize(&card->chat, card->chat_template, bos, eos);
    if (card->chat_known != CHAT_UNKNOWN) {
        const char* end = chat_format_end(&card->chat);
        card->turn_end = end[0] == CHAT_EOS[0] ? card->eos : bpe_find_added(bpe, end);
    }
    free(bos);
    free(eos);
}

// Sets the card from the files beside tokenizer.json, whose texts it takes over. The start token is
// among the ends unless it only starts texts: the tokenizer puts it before each, and others end
// them.
static void bpe_set_card_(Bpe* bpe, CardFiles* files) {
    ModelCard* card = &bpe->card;
    const int eos = bpe_find_name_(bpe, files->eos), pad = bpe_id_of_file_(bpe, files->pad);
    card->num_ends = 0;
    for (int i = 0; i < files->num_ends; i++) {
        if (bpe_id_of_file_(bpe, files->ends[i]) >= 0) {
            model_card_add_end(card, (int)files->ends[i]);
        }
    }
    if (eos >= 0) {
        model_card_add_end(card, eos);
    }
    if (card->num_ends == 0 || !bpe->has_template) {
        model_card_add_end(card, bpe->eot);
    }
    card->pad = pad >= 0 ? pad : bpe_find_name_(bpe, files->pad_name);
    card->bos = files->has_names ? bpe_find_name_(bpe, files->bos) : bpe->eot;
    card->eos = files->has_names ? eos : card->ends[0];
    card->chat_template = files->chat_template;
    card->generation = files->generation;
    files->chat_template = files->generation = NULL;
    bpe_recognize_chat_(bpe);
}

static void bpe_open_json_(Bpe* bpe, const BpeFile_* file) {
    char error[ERROR_BYTES], directory[PATH_MAX];
    BpeJson_ v;
    CardFiles files;
    memset(&v, 0, sizeof(v));
    file_directory_of(directory, file->path);
    card_files_read(&files, directory);
    BpeKept copy = bpe_keep_("tokenizer.json", file->data, file->bytes);
    v.json = json_reader(file->path, (char*)file->data, file->bytes, error);
    v.spelling = bpe_spelling_();
    CHECK(bpe_json_file_(&v), "%s", error);
    bpe_check_json_(&v, file->path);
    bpe_add_json_eot_(&v);
    const size_t V = bpe_json_size_(&v, file->path);
    const BpeAdded_* start = bpe_json_start_(&v, &files, file->path);
    bpe_open_ids_(bpe, file->path, file->data, V, start->id);
    for (size_t i = 0; i < v.num_added; i++) {
        v.pattern.cuts_words |= !v.added[i].is_special;
    }
    bpe_rules_close(&bpe->rules);
    bpe_rules_open(&bpe->rules, v.pattern);
    bpe->tokens[start->id].length = 0; // named with the others
    bpe_name_json_tokens_(bpe, &v, file->path);
    bpe_set_json_tokens_(bpe, &v, file->path);
    bpe_finish_json_(bpe, &v, file->path);
    bpe->has_template = v.start && bpe_span_is_(start->text, v.start);
    if (v.start && !bpe->has_template) {
        printable_line(stderr,
                       "note: %s: its post_processor puts %s beside each text; here only %s stands before it",
                       file->path, v.start, bpe_excerpt_(start->text).text);
    }
    if (v.has_model) {
        bpe->kept[bpe->num_kept++] = copy;
        bpe_set_card_(bpe, &files);
    } else {
        free(copy.bytes);
    }
    card_files_close(&files);
    free(v.tokens);
    free(v.added);
    free(v.merges);
}

// ---- writing JSON ----

static void bpe_put_token_json_(const Bpe* bpe, const BpeSpelling_* spelling, int id, FILE* file) {
    const BpeToken_ token = bpe->tokens[id];
    if (token.kind != BPE_TOKEN) {
        json_print_string(file, (const char*)token.text, token.length);
        return;
    }
    fputc('"', file);
    bpe_put_spelled_(spelling, token, BPE_JSON_, file);
    fputc('"', file);
}

// Writes {"token": id, ...} with end-of-text, but without the special tokens after all others, as
// transformers does.
static void bpe_put_vocab_(const Bpe* bpe, FILE* file) {
    const BpeSpelling_ spelling = bpe_spelling_();
    const int V = bpe_least_vocab(bpe);
    for (int id = 0; id < V; id++) {
        fputs(id ? ", " : "{", file);
        bpe_put_token_json_(bpe, &spelling, id, file);
        fprintf(file, ": %d", id);
    }
    fputc('}', file);
}

// Returns the word that a token is, even if merges make it, too; NULL: none.
static const BpeWord* bpe_word_of_(const Bpe* bpe, int id) {
    for (size_t i = 0; i < bpe->words.count; i++) {
        if (bpe->words.words[i].id == id) {
            return &bpe->words.words[i];
        }
    }
    return NULL;
}

// Writes all names and words as added tokens; `before` and `between` stand around each id.
static void bpe_put_added_(const Bpe* bpe, const char* before, const char* between, FILE* file) {
    const char* comma = "";
    for (int id = 0; id < bpe->vocab_size; id++) {
        const BpeWord* word = bpe_word_of_(bpe, id);
        if (bpe_is_name(bpe, id) || word) {
            fprintf(file, "%s%s%d%s", comma, before, id, between);
            json_print_string(file, (const char*)bpe->tokens[id].text, bpe->tokens[id].length);
            fprintf(file, BPE_HF_NOT_TRIMMED_ ", \"normalized\": %s, \"special\": %s}",
                    word && word->kind == BPE_NORMAL_WORDS ? "true" : "false", word ? "false" : "true");
            comma = ", ";
        }
    }
}

// Writes "A B", which all versions of tokenizers read.
static void bpe_put_merge_json_(const BpeSpelling_* spelling, BpeToken_ left, BpeToken_ right, int is_first,
                                FILE* file) {
    fputs(is_first ? "\"" : ", \"", file);
    bpe_put_spelled_(spelling, left, BPE_JSON_, file);
    fputc(' ', file);
    bpe_put_spelled_(spelling, right, BPE_JSON_, file);
    fputc('"', file);
}

// Writes a step of a tokenizer that concerns bytes; trim_offsets concerns positions in the text.
static void bpe_put_bytes_(int use_regex, FILE* file) {
    fprintf(
        file,
        "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": %s}",
        use_regex ? "true" : "false");
}

// Writes how text is split.
static void bpe_put_pattern_(BpePattern pattern, FILE* file) {
    const int is_sequence = pattern.style == BPE_CL100K || pattern.digits_first;
    fputs(is_sequence ? "{\"type\": \"Sequence\", \"pretokenizers\": [" : "", file);
    if (pattern.digits_first) {
        fprintf(file, "{\"type\": \"Digits\", \"individual_digits\": %s}, ",
                pattern.digits ? "true" : "false");
    } else if (is_sequence) {
        char expression[BPE_EXPRESSION_BYTES];
        bpe_pattern_print(pattern, expression);
        fputs("{\"type\": \"Split\", \"pattern\": {\"Regex\": ", file);
        json_print_string(file, expression, strlen(expression));
        fputs("}, \"behavior\": \"Isolated\", \"invert\": false}, ", file);
    }
    bpe_put_bytes_(pattern.style == BPE_GPT2, file);
    fputs(is_sequence ? "]}" : "", file);
}

// Writes what is put around a text: end-of-text before it, if other programs do so.
static void bpe_put_template_(const Bpe* bpe, FILE* file) {
    int length;
    const char* eot = bpe_token(bpe, bpe->eot, &length);
    fputs("{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": ", file);
    json_print_string(file, eot, (size_t)length);
    fputs(", \"type_id\": 0}}, {\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}], \"pair\": [{\"Sequence\": "
          "{\"id\": "
          "\"A\", \"type_id\": 0}}, {\"Sequence\": {\"id\": \"B\", \"type_id\": 1}}], \"special_tokens\": {",
          file);
    json_print_string(file, eot, (size_t)length);
    fputs(": {\"id\": ", file);
    json_print_string(file, eot, (size_t)length);
    fprintf(file, ", \"ids\": [%d], \"tokens\": [", bpe->eot);
    json_print_string(file, eot, (size_t)length);
    fputs("]}}}", file);
}

static void bpe_put_tokenizer_json_(const Bpe* bpe, FILE* file) {
    if (bpe->num_kept > 0) {
        fwrite(bpe->kept[0].bytes, 1, bpe->kept[0].count, file);
        return;
    }
    fputs("{\n\"version\": \"1.0\",\n\"truncation\": null,\n\"padding\": null,\n\"added_tokens\": [", file);
    bpe_put_added_(bpe, "{\"id\": ", ", \"content\": ", file);
    fprintf(file, "],\n\"normalizer\": %s,\n\"pre_tokenizer\": ",
            bpe->rules.pattern.normalizes ? "{\"type\": \"NFC\"}" : "null");
    bpe_put_pattern_(bpe->rules.pattern, file);
    fputs(",\n\"post_processor\": ", file);
    if (bpe->has_template) {
        bpe_put_template_(bpe, file);
    } else {
        bpe_put_bytes_(1, file);
    }
    fputs(",\n\"decoder\": ", file);
    bpe_put_bytes_(1, file);
    fprintf(file,
            ",\n\"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
            "\"continuing_subword_prefix\": null, \"end_of_word_suffix\": null, \"fuse_unk\": false, "
            "\"byte_fallback\": false, \"ignore_merges\": %s,\n\"vocab\": ",
            bpe->finds_pieces ? "true" : "false");
    bpe_put_vocab_(bpe, file);
    fputs(",\n\"merges\": [", file);
    bpe_put_each_merge_(bpe, bpe_put_merge_json_, file);
    fputs("]}\n}\n", file);
}

// Returns the name of a token in JSON, which the caller frees. `bpe` is NULL: it is end-of-text.
static char* bpe_name_json_(const Bpe* bpe, int id) {
    TextBuffer text;
    int length = (int)strlen(BPE_EOT_TEXT);
    const char* name = bpe ? bpe_token(bpe, id, &length) : BPE_EOT_TEXT;
    text_buffer_open(&text, "the name of a token");
    json_print_string(text.file, name, (size_t)length);
    return text_buffer_close(&text);
}

// Writes the roles of the special tokens; `bpe` may be NULL.
static void bpe_put_special_tokens_(const ModelCard* card, const Bpe* bpe, FILE* file) {
    const struct {
        const char* use;
        int id;
    } roles[] = {{"bos", card->start}, {"eos", card->eos}, {"unk", card->start}, {"pad", card->pad}};
    for (int i = 0; i < 4; i++) {
        if (roles[i].id >= 0) {
            char* name = bpe_name_json_(bpe, roles[i].id);
            fprintf(file, "%s  \"%s_token\": %s", i ? ",\n" : "", roles[i].use, name);
            free(name);
        }
    }
}

// ---- any file ----

// Makes a vocabulary of a file's bytes, which it takes over.
static void bpe_open_data_(Bpe* bpe, BpeFile_* file) {
    size_t blanks = 0;
    while (blanks < file->bytes && strchr(" \t\r\n", file->data[blanks]) && file->data[blanks]) {
        blanks++;
    }
    if (file->bytes >= 8 && memcmp(file->data, "#version", 8) == 0) {
        bpe_open_merges_(bpe, file);
    } else if (blanks < file->bytes && file->data[blanks] == '{') {
        bpe_open_json_(bpe, file);
    } else {
        const BpeSpan_ line = bpe_until_(file->data, file->bytes, '\n');
        CHECK(bpe_decimal_(bpe_after_blank_(line), INT_MAX) >= 0,
              "%s: wanted a tokenizer: tokenizer.json, vocab.json, #version and lines of two tokens "
              "(merges.txt, vocab.bpe), or lines of base64 and id (.tiktoken)%s",
              file->path, file_ends_in(file->path, ".bin") ? "; not llm.c's .bin" : "");
        bpe_open_tiktoken_(bpe, file);
    }
}

int bpe_path(char path[PATH_MAX], const char* directory, const char* name) {
    file_join(path, directory, name);
    return file_exists(path);
}

static void bpe_open_file_(Bpe* bpe, const char* path) {
    BpeFile_ file = bpe_read_(path);
    bpe_open_data_(bpe, &file);
}

// Opens merges.txt, which implies the ids, and checks vocab.json, if any, which states them.
static void bpe_open_pair_(Bpe* bpe, const char* merges, const char* vocab) {
    Bpe other;
    bpe_open_file_(bpe, merges);
    bpe_open_file_(&other, vocab);
    CHECK(bpe->vocab_size == other.vocab_size && bpe->eot == other.eot,
          "%s: end-of-text is %d of %d tokens, wanted %d of %d as in %s", vocab, other.eot, other.vocab_size,
          bpe->eot, bpe->vocab_size, merges);
    for (int id = 0; id < bpe->vocab_size; id++) {
        const BpeToken_ a = bpe->tokens[id], b = other.tokens[id];
        CHECK(a.length == b.length && memcmp(a.text, b.text, a.length) == 0,
              "%s: token %d differs from that in %s", vocab, id, merges);
    }
    bpe_close(&other);
}

void bpe_list_files(FileList* files, const char* option, const char* path) {
    char directory[PATH_MAX];
    const int is_directory = file_is_directory(path);
    file_path(directory, "%s", path);
    if (!is_directory) {
        file_list_add(files, option, path);
        file_directory_of(directory, path);
    }
    for (int i = 0; i < BPE_KEPT_FILES_ && is_directory; i++) {
        file_list_add_in(files, option, directory, bpe_kept_files_[i]);
    }
    file_list_add_in(files, option, directory, "tokenizer_config.json"); // card_files_read
    for (int i = 0; i < CARD_FILES; i++) {
        file_list_add_in(files, option, directory, card_file_name(i));
    }
}

static void bpe_open_directory_(Bpe* bpe, const char* directory) {
    char tokenizer[PATH_MAX], merges[PATH_MAX], vocab[PATH_MAX], model[PATH_MAX];
    if (bpe_path(tokenizer, directory, "tokenizer.json")) {
        bpe_open_file_(bpe, tokenizer);
        bpe_keep_directory_(bpe, directory);
        return;
    }
    CHECK(
        !bpe_path(model, directory, "tokenizer.model"),
        "%s: a tokenizer of SentencePiece, or of tiktoken in another form, which is not supported; wanted a "
        "tokenizer.json of byte-level BPE",
        model);
    CHECK(bpe_path(merges, directory, "merges.txt"), "%s: no tokenizer.json or merges.txt in this directory",
          directory);
    if (bpe_path(vocab, directory, "vocab.json")) {
        bpe_open_pair_(bpe, merges, vocab);
    } else {
        bpe_open_file_(bpe, merges);
    }
}

void bpe_open(Bpe* bpe, const char* path) {
    (file_is_directory(path) ? bpe_open_directory_ : bpe_open_file_)(bpe, path);
}

int bpe_is_like_gpt2(const Bpe* bpe) {
    const BpePattern p = bpe->rules.pattern;
    return p.style == BPE_GPT2 && !p.digits && !p.digits_first && !p.normalizes && !p.cuts_words &&
           !bpe->pairs.made && !bpe->finds_pieces;
}

static void bpe_write_as_(const Bpe* bpe, const char* path, void (*put)(const Bpe* bpe, FILE* file)) {
    FileWriter writer;
    file_open(&writer, path);
    put(bpe, writer.file);
    file_commit(&writer);
}

void bpe_write(const Bpe* bpe, const char* path) { bpe_write_as_(bpe, path, bpe_put_tokenizer_json_); }

void bpe_write_hf_config(const char* directory, const char* tokenizer_class, const ModelCard* card,
                         const Bpe* bpe, int max_T) {
    char path[PATH_MAX];
    FileWriter writer;
    bpe_path(path, directory, "special_tokens_map.json");
    file_open(&writer, path);
    fputs("{\n", writer.file);
    bpe_put_special_tokens_(card, bpe, writer.file);
    fputs("\n}\n", writer.file);
    file_commit(&writer);

    bpe_path(path, directory, "tokenizer_config.json");
    file_open(&writer, path);
    fprintf(writer.file,
            "{\n  \"tokenizer_class\": \"%s\",\n  \"model_max_length\": %d,\n"
            "  \"add_prefix_space\": false,\n  \"add_bos_token\": true,\n"
            "  \"clean_up_tokenization_spaces\": false,\n  \"errors\": \"replace\",\n  "
            "\"added_tokens_decoder\": {",
            tokenizer_class, max_T);
    if (bpe) {
        bpe_put_added_(bpe, "\"", "\": {\"content\": ", writer.file);
    } else {
        fprintf(writer.file, "\"%d\": {" BPE_HF_EOT "}", card->start);
    }
    fputs("},\n", writer.file);
    bpe_put_special_tokens_(card, bpe, writer.file);
    fputs("\n}\n", writer.file);
    file_commit(&writer);
}

// Returns a text with another value of a member, and frees the old one.
static char* bpe_change_text_(char* text, const char* key, const char* value) {
    char* changed = card_set_member(text, key, value);
    free(text);
    return changed;
}

// Returns the text of a file that was kept, where the end of a text is the card's; the caller frees
// it.
static char* bpe_kept_text_(const Bpe* bpe, const BpeKept* kept, const ModelCard* card) {
    char* text = (char*)check_alloc(kept->count + 1, 1, kept->name);
    memcpy(text, kept->bytes, kept->count);
    const int has_roles = strcmp(kept->name, "tokenizer_config.json") == 0 ||
                          strcmp(kept->name, "special_tokens_map.json") == 0;
    if (has_roles && card->eos != bpe->card.eos && strlen(text) == kept->count) {
        char* name = bpe_name_json_(bpe, card->eos);
        text = bpe_change_text_(text, "eos_token", name);
        free(name);
    }
    if (has_roles && card->is_chosen && strstr(text, "\"chat_template\"")) {
        text = bpe_change_text_(text, "chat_template", "null"); // chat_template.jinja has it
    }
    return text;
}

// Writes the files that were kept. Returns 0 if none was.
static int bpe_write_kept_(const Bpe* bpe, const ModelCard* card, const char* directory) {
    for (int i = 0; i < bpe->num_kept; i++) {
        char path[PATH_MAX];
        FileWriter writer;
        const BpeKept* kept = &bpe->kept[i];
        char* text = bpe_kept_text_(bpe, kept, card);
        // a changed text has another length; it ends with its zero, as a kept one does not
        const int is_changed = strncmp(text, (const char*)kept->bytes, kept->count) != 0;
        bpe_path(path, directory, kept->name);
        file_open(&writer, path);
        fwrite(text, 1, is_changed ? strlen(text) : kept->count, writer.file);
        file_commit(&writer);
        free(text);
    }
    return bpe->num_kept > 1; // with a configuration beside tokenizer.json
}

void bpe_write_hf(const Bpe* bpe, const ModelCard* card, const char* directory, int max_T) {
    static const struct {
        const char* name;
        void (*put)(const Bpe* bpe, FILE* file);
    } files[] = {{"vocab.json", bpe_put_vocab_},
                 {"merges.txt", bpe_put_merges_},
                 {"tokenizer.json", bpe_put_tokenizer_json_}};
    char path[PATH_MAX];
    if (bpe_write_kept_(bpe, card, directory)) {
        return;
    }
    for (int i = bpe_is_like_gpt2(bpe) ? 0 : 2; i < 3; i++) {
        bpe_path(path, directory, files[i].name);
        bpe_write_as_(bpe, path, files[i].put);
    }
    bpe_write_hf_config(directory, bpe_is_like_gpt2(bpe) ? "GPT2Tokenizer" : "PreTrainedTokenizerFast", card,
                        bpe, max_T);
}

// Adds what GPT-2's vocabularies have not, so that their checksums are those of before.
static void bpe_hash_difference_(const Bpe* bpe, Xxh64* hash) {
    xxh64_add(hash, &bpe->rules.pattern, sizeof(bpe->rules.pattern));
    xxh64_add(hash, &bpe->finds_pieces, sizeof(bpe->finds_pieces));
    for (size_t i = 0; i < bpe->words.count; i++) {
        xxh64_add(hash, &bpe->words.words[i].id, sizeof(int));
        xxh64_add(hash, &bpe->words.words[i].kind, sizeof(BpeWordKind));
    }
    for (int rank = 0; bpe->pairs.made && rank < bpe->num_ranks; rank++) {
        xxh64_add(hash, &bpe->pairs.made[rank], sizeof(int));
    }
}

uint64_t bpe_checksum(const Bpe* bpe) {
    Xxh64 hash;
    xxh64_open(&hash);
    xxh64_add(&hash, &bpe->eot, sizeof(bpe->eot));
    for (int id = 0; id < bpe->vocab_size; id++) {
        int length;
        const char* token = bpe_token(bpe, id, &length);
        xxh64_add(&hash, &length, sizeof(length));
        xxh64_add(&hash, token, (size_t)length);
        // the same bytes form another token if text encodes to it
        if (bpe_is_name(bpe, id) && id != bpe->eot) {
            xxh64_add(&hash, &id, sizeof(id));
        }
    }
    if (!bpe_is_like_gpt2(bpe)) {
        bpe_hash_difference_(bpe, &hash);
    }
    return xxh64_value(&hash);
}

const char* bpe_gguf_pre(const Bpe* bpe) {
    const BpePattern p = bpe->rules.pattern;
    return p.style == BPE_CL100K && p.digits == 1   ? "qwen2"
           : p.style == BPE_CL100K && p.digits == 3 ? (bpe->finds_pieces ? "llama-bpe" : "dbrx")
           : p.style == BPE_CL100K                  ? NULL
           : p.digits_first                         ? (p.digits ? "smollm" : NULL)
           : p.normalizes                           ? "olmo"
                                                    : "gpt-2";
}

void bpe_print_tokens(const Bpe* bpe, int V, FILE* file) {
    const BpeSpelling_ spelling = bpe_spelling_();
    for (int id = 0; id < bpe->vocab_size && id < V; id++) {
        const BpeToken_ token = bpe->tokens[id];
        if (token.kind != BPE_TOKEN) {
            fwrite(token.text, 1, token.length, file);
        } else {
            bpe_put_spelled_(&spelling, token, BPE_UTF8_, file);
        }
        fputc('\n', file);
    }
}

void bpe_print_merges(const Bpe* bpe, FILE* file) { bpe_put_each_merge_(bpe, bpe_put_merge_line_, file); }

#endif // BPE_FILES_IMPLEMENTATION

#endif
