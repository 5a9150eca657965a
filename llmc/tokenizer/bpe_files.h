/*
bpe_files.h -- files of vocabularies like GPT-2's (bpe.h): bpe_open reads them, bpe_write writes a
tokenizer.json.

    tokenizer.json         Hugging Face's: a BPE with its vocabulary, merges, and how text is split
    vocab.json             {"token": id, ...}
    merges.txt, vocab.bpe  "#version", then lines "A B": the merges. Ids are in GPT-2's order
    .tiktoken              lines "base64 id"; end-of-text is the id after the last
    tokenizer.model        SentencePiece's (bpe_model.h)
    .gguf                  a model of llama.cpp, with its tokenizer (bpe_gguf.h)

Reading takes any of them, recognized by its content, or a directory: its tokenizer.json or, without
one, its tokenizer.model, or else its merges.txt (a vocab.json beside it must agree). A file must be
consistent. The same vocabulary always gives the same bytes; GPT-2's gives the public merges.txt and
vocab.json.

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

// Writes what transformers reads next to a tokenizer.json: the tokenizer's class, the model's
// context max_T, and the roles of tokens. `bpe` has further names; NULL: none.
void bpe_write_hf_config(const char* directory, const char* tokenizer_class, const ModelCard* card,
                         const Bpe* bpe, int max_T);

// Writes the tokenizer of a model with a context of max_T for transformers into a directory: the
// files that were read, with the card's end of a text. merges.txt goes with vocab.json, which has
// the ids, whatever their order.
void bpe_write_hf(const Bpe* bpe, const ModelCard* card, const char* directory, int max_T);

// Returns a checksum of all tokens, the same for every file format.
uint64_t bpe_checksum(const Bpe* bpe);

// Prints a token, spelled in visible characters; for other formats.
void bpe_print_token(const Bpe* bpe, int id, FILE* file);

// True if text is split and merged as GPT-2 does, whatever the tokens: files but tokenizer.json can
// say no more.
int bpe_is_like_gpt2(const Bpe* bpe);

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
#include "llmc/base/gguf_file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/xxh64.h"
#include "llmc/tokenizer/bpe_gguf.h"
#include "llmc/tokenizer/bpe_json.h"
#include "llmc/tokenizer/bpe_model.h"
#include "llmc/tokenizer/bpe_sentence.h"

#define BPE_MAX_CONFIG_ ((size_t)16 << 20) // largest tokenizer_config.json

// ---- reading: what all formats need ----

static BpeFile bpe_read_(const char* path) {
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
    const BpeFile file = {path, data, bytes};
    return file;
}

// Counts the lines of a file; the last may lack its newline.
static size_t bpe_lines_(const BpeFile* file) {
    size_t lines = file->data[file->bytes - 1] != '\n';
    for (size_t i = 0; i < file->bytes; i++) {
        lines += file->data[i] == '\n';
    }
    return lines;
}

// ---- .tiktoken ----

static const char bpe_base64_digits_[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static int bpe_base64_digit_(unsigned char c) {
    const char* digit = c ? strchr(bpe_base64_digits_, c) : NULL;
    return digit ? (int)(digit - bpe_base64_digits_) : -1;
}

// Decodes base64 in place. Returns the number of bytes; 0 if it is malformed.
static size_t bpe_base64_(BpeSpan span) {
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
static int bpe_decimal_(BpeSpan span, size_t limit) {
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
static void bpe_open_tiktoken_(Bpe* bpe, const BpeFile* file) {
    const size_t n = bpe_lines_(file);
    bpe_open_ids_(bpe, file->path, file->data, n + 1, n);
    unsigned char* at = file->data;
    for (size_t number = 1; number <= n; number++) {
        const BpeSpan line = bpe_until(at, file->bytes - (size_t)(at - file->data), '\n');
        BpeSpan token = bpe_until(line.text, line.length, ' ');
        const BpeSpan digits = bpe_after_blank(line);
        const int has_blank = token.length < line.length;
        token.length = bpe_base64_(token);
        CHECK(token.length > 0 && has_blank, "%s:%zu: wanted a token in base64, a blank, and its id",
              file->path, number);
        const int id = bpe_decimal_(digits, n); // n different ids below n: none is missing
        CHECK(id >= 0, "%s:%zu: id \"%s\", wanted 0 to %zu in a file of %zu lines", file->path, number,
              bpe_excerpt(digits).text, n - 1, n);
        CHECK(bpe->tokens[id].length == 0, "%s:%zu: id %d appears twice", file->path, number, id);
        CHECK(bpe_set_token_(bpe, id, token.text, token.length), "%s:%zu: token %d is token %d again",
              file->path, number, id, bpe_find(bpe, (const char*)token.text, token.length));
        at += line.length + 1;
    }
    char error[ERROR_BYTES];
    CHECK(bpe_finish_(bpe, file->path, error), "%s", error);
}

// Calls `put` for each merge, in order, with the two tokens that it joins.
typedef void (*BpePutMerge_)(const BpeSpelling* spelling, BpeToken_ left, BpeToken_ right, int is_first,
                             FILE* file);
static void bpe_put_each_merge_(const Bpe* bpe, BpePutMerge_ put, FILE* file) {
    const BpeSpelling spelling = bpe_spelling();
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
static void bpe_open_merges_(Bpe* bpe, const BpeFile* file) {
    const BpeSpelling spelling = bpe_spelling();
    const BpeSpan version = bpe_until(file->data, file->bytes, '\n');
    const size_t n = bpe_lines_(file) - 1; // merges
    bpe_begin_merges_(bpe, file->path, (unsigned char*)check_alloc(256 + file->bytes, 1, "vocabulary"), n);
    int(*pairs)[2] = (int(*)[2])check_alloc(n, sizeof(*pairs), "merges");
    unsigned char* at = file->data + version.length + 1;
    for (size_t i = 0; i < n; i++) {
        const BpeSpan line = bpe_until(at, file->bytes - (size_t)(at - file->data), '\n');
        const BpeSpan sides[2] = {bpe_until(line.text, line.length, ' '), bpe_after_blank(line)};
        int* pair = pairs[i];
        for (int side = 0; side < 2; side++) {
            const size_t bytes = bpe_unspell(sides[side], &spelling);
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

static void bpe_put_merge_line_(const BpeSpelling* spelling, BpeToken_ left, BpeToken_ right, int is_first,
                                FILE* file) {
    (void)is_first;
    bpe_put_spelled(spelling, left, BPE_UTF8, file);
    fputc(' ', file);
    bpe_put_spelled(spelling, right, BPE_UTF8, file);
    fputc('\n', file);
}

static void bpe_put_merges_(const Bpe* bpe, FILE* file) {
    fputs("#version: 0.2\n", file);
    bpe_put_each_merge_(bpe, bpe_put_merge_line_, file);
}

// ---- files beside tokenizer.json ----

// Files that are written as they were read, tokenizer.json first.
static const char* const bpe_kept_files_[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt",     "added_tokens.json",     "tokenizer.model"};
enum { BPE_KEPT_FILES_ = sizeof(bpe_kept_files_) / sizeof(bpe_kept_files_[0]) };
_Static_assert((int)BPE_KEPT_FILES_ <= (int)BPE_MAX_KEPT, "room for all files that are kept");

// Keeps the files of the tokenizer in this directory, beside the one that was read.
static void bpe_keep_directory_(Bpe* bpe, const char* directory) {
    for (int i = 1; i < BPE_KEPT_FILES_; i++) {
        char path[PATH_MAX], error[ERROR_BYTES], *text;
        size_t bytes;
        const int is_read = bpe->num_kept > 0 && strcmp(bpe_kept_files_[i], bpe->kept[0].name) == 0;
        if (!is_read && bpe_path(path, directory, bpe_kept_files_[i])) {
            CHECK(byte_order_text(path, BPE_MAX_CONFIG_, &text, &bytes, error), "%s", error);
            bpe->kept[bpe->num_kept++] = bpe_keep(bpe_kept_files_[i], text, bytes);
            free(text);
        }
    }
}

// ---- writing JSON ----

static void bpe_put_token_json_(const Bpe* bpe, const BpeSpelling* spelling, int id, FILE* file) {
    const BpeToken_ token = bpe->tokens[id];
    if (token.kind != BPE_TOKEN) {
        json_print_string(file, (const char*)token.text, token.length);
        return;
    }
    fputc('"', file);
    bpe_put_spelled(spelling, token, BPE_JSON, file);
    fputc('"', file);
}

// Writes {"token": id, ...} with end-of-text, but without the special tokens after all others, as
// transformers does.
static void bpe_put_vocab_(const Bpe* bpe, FILE* file) {
    const BpeSpelling spelling = bpe_spelling();
    const int V = bpe_least_vocab(bpe);
    for (int id = 0; id < V; id++) {
        fputs(id ? ", " : "{", file);
        bpe_put_token_json_(bpe, &spelling, id, file);
        fprintf(file, ": %d", id);
    }
    fputc('}', file);
}

// Returns the added token with this id, even if merges also make it; NULL: it is none.
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
static void bpe_put_merge_json_(const BpeSpelling* spelling, BpeToken_ left, BpeToken_ right, int is_first,
                                FILE* file) {
    fputs(is_first ? "\"" : ", \"", file);
    bpe_put_spelled(spelling, left, BPE_JSON, file);
    fputc(' ', file);
    bpe_put_spelled(spelling, right, BPE_JSON, file);
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
    const int is_sequence = pattern.style == BPE_CL100K || pattern.style == BPE_O200K || pattern.digits_first;
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

// Writes the template around a text: end-of-text before it, if other programs put it there.
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
static void bpe_open_data_(Bpe* bpe, BpeFile* file) {
    size_t blanks = 0;
    while (blanks < file->bytes && strchr(" \t\r\n", file->data[blanks]) && file->data[blanks]) {
        blanks++;
    }
    if (file->bytes >= 8 && memcmp(file->data, "#version", 8) == 0) {
        bpe_open_merges_(bpe, file);
    } else if (blanks < file->bytes && file->data[blanks] == '{') {
        bpe_open_json(bpe, file);
    } else if (bpe_model_is(file)) {
        bpe_model_open(bpe, file);
    } else {
        const BpeSpan line = bpe_until(file->data, file->bytes, '\n');
        CHECK(bpe_decimal_(bpe_after_blank(line), INT_MAX) >= 0,
              "%s: wanted a tokenizer: tokenizer.json, vocab.json, #version and lines of two tokens "
              "(merges.txt, vocab.bpe), lines of base64 and id (.tiktoken), or SentencePiece's "
              "tokenizer.model%s",
              file->path, file_ends_in(file->path, ".bin") ? "; not llm.c's .bin" : "");
        bpe_open_tiktoken_(bpe, file);
    }
}

int bpe_path(char path[PATH_MAX], const char* directory, const char* name) {
    file_join(path, directory, name);
    return file_exists(path);
}

static void bpe_open_file_(Bpe* bpe, const char* path) {
    if (gguf_is_file(path)) {
        bpe_open_gguf(bpe, path);
        return;
    }
    BpeFile file = bpe_read_(path);
    bpe_open_data_(bpe, &file);
}

// Opens merges.txt, which implies the ids, and compares them with vocab.json, if that exists.
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
    if (bpe_path(model, directory, "tokenizer.model")) {
        BpeFile file = bpe_read_(model);
        CHECK(bpe_model_is(&file),
              "%s: not SentencePiece's; wanted that, or a tokenizer.json (tiktoken's says nothing about "
              "splitting)",
              model);
        bpe_model_open(bpe, &file);
        bpe_keep_directory_(bpe, directory);
        return;
    }
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
    const int is_model = bpe->num_kept > 0 && strcmp(bpe->kept[0].name, "tokenizer.model") == 0;
    for (int i = bpe_is_like_gpt2(bpe) ? 0 : is_model ? 3 : 2; i < 3; i++) {
        bpe_path(path, directory, files[i].name);
        bpe_write_as_(bpe, path, files[i].put);
    }
    bpe_write_hf_config(directory,
                        bpe_is_like_gpt2(bpe) ? "GPT2Tokenizer"
                        : is_model            ? "LlamaTokenizer"
                                              : "PreTrainedTokenizerFast",
                        card, bpe, max_T);
}

// Adds what GPT-2's vocabulary lacks, so that its checksum stays the same.
static void bpe_hash_difference_(const Bpe* bpe, Xxh64* hash) {
    xxh64_add(hash, &bpe->rules.pattern, sizeof(bpe->rules.pattern));
    xxh64_add(hash, &bpe->finds_pieces, sizeof(bpe->finds_pieces));
    if (bpe->rules.pattern.style == BPE_SENTENCE) {
        xxh64_add(hash, bpe->byte_ids, sizeof(bpe->byte_ids));
    }
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

void bpe_print_token(const Bpe* bpe, int id, FILE* file) {
    const BpeSpelling spelling = bpe_spelling();
    const BpeToken_ token = bpe->tokens[id];
    if (bpe->rules.pattern.style == BPE_SENTENCE) {
        bpe_print_sentence_token(token, file);
    } else if (token.kind != BPE_TOKEN) {
        fwrite(token.text, 1, token.length, file);
    } else {
        bpe_put_spelled(&spelling, token, BPE_UTF8, file);
    }
}

void bpe_print_merges(const Bpe* bpe, FILE* file) { bpe_put_each_merge_(bpe, bpe_put_merge_line_, file); }

#endif // BPE_FILES_IMPLEMENTATION

#endif
