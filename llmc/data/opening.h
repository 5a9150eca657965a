/*
opening.h -- how texts that a model knows may start: for the command at the end of a run, and for
the error about a prompt that a vocabulary of words cannot express.
*/
#ifndef LLMC_OPENING_H
#define LLMC_OPENING_H

#include "llmc/data/token_files.h"
#include "llmc/tokenizer/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { OPENING_BYTES = 48, OPENING_WORDS = 4 }; // room with the zero; most words

// Sets `text` to the first words of a stream of tokens, on one line; to "" if they cannot be
// printed or read.
void opening_of(char text[OPENING_BYTES], const TokenStream* stream, const Tokenizer* tokenizer);

// Appends to `error` (ERROR_BYTES) how the built-in stories start, if the tokenizer has the words.
void opening_add_known(char* error, const Tokenizer* tokenizer);

#ifdef __cplusplus
}
#endif

#ifdef OPENING_IMPLEMENTATION

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/mapped_file.h"
#include "llmc/base/printable.h"

enum { OPENING_TOKENS_ = 64, OPENING_DECODED_ = 256 };

typedef struct {
    const TokenStream* stream;
    int ids[OPENING_TOKENS_];
    size_t count;
} OpeningTokens_;

// For mapped_try: the file may have changed during the run.
static void opening_read_(void* context) {
    OpeningTokens_* tokens = (OpeningTokens_*)context;
    tokens_fill(tokens->stream, 0, tokens->count, tokens->ids);
}

// Decodes tokens up to the end of the first document; returns the number of bytes.
static size_t opening_decode_(char* bytes, const OpeningTokens_* tokens, const Tokenizer* tokenizer) {
    size_t n = 0;
    for (size_t i = 0; i < tokens->count; i++) {
        int length = 0;
        const char* word = tokenizer_decode(tokenizer, tokens->ids[i], &length);
        const int is_text = tokenizer_bytes(tokenizer, tokens->ids[i]) > 0;
        if ((!is_text && n > 0) || n + (size_t)length > OPENING_DECODED_) {
            break;
        }
        if (is_text) {
            memcpy(bytes + n, word, (size_t)length);
            n += (size_t)length;
        }
    }
    return n;
}

// Returns the length of the first words of a line: whole ones, unless the first one is too long.
static size_t opening_length_(const char* line, size_t n) {
    size_t length, used = 0, whole = 0; // bytes so far; those up to the end of a word
    int words = 0;
    for (; used < n && (length = printable_length(line + used, n - used)) > 0; used += length) {
        if (line[used] == ' ' && line[used - 1] != ' ') {
            whole = used;
            words++;
        }
        if (words == OPENING_WORDS || used + length >= OPENING_BYTES) {
            return whole ? whole : used;
        }
    }
    return used > 0 && line[used - 1] == ' ' ? whole : used;
}

void opening_of(char text[OPENING_BYTES], const TokenStream* stream, const Tokenizer* tokenizer) {
    char bytes[OPENING_DECODED_];
    const void* where;
    OpeningTokens_ tokens = {stream, {0}, stream->count < OPENING_TOKENS_ ? stream->count : OPENING_TOKENS_};
    text[0] = '\0';
    if (mapped_try(opening_read_, &tokens, &where) == MAPPED_READ) {
        const size_t n = opening_decode_(bytes, &tokens, tokenizer);
        size_t at = 0;
        while (at < n && (bytes[at] == ' ' || printable_length(bytes + at, n - at) == 0)) {
            at++;
        }
        snprintf(text, OPENING_BYTES, "%.*s", (int)opening_length_(bytes + at, n - at), bytes + at);
    }
}

void opening_add_known(char* error, const Tokenizer* tokenizer) {
    static const char* const openings[] = {"One sunny day", "Once there was a brave child",
                                           "It was a rainy morning."};
    const char* before = "; it has the words of, for example, ";
    char unused[ERROR_BYTES];
    for (size_t i = 0; i < sizeof(openings) / sizeof(openings[0]); i++) {
        const size_t bytes = strlen(openings[i]), used = strlen(error);
        int* ids = (int*)check_alloc(tokenizer_most_ids(tokenizer, bytes), sizeof(int), "an opening");
        size_t count;
        if (tokenizer_try_encode(tokenizer, openings[i], bytes, ids, &count, unused)) {
            snprintf(error + used, ERROR_BYTES - used, "%s\"%s\"", before, openings[i]);
            before = ", ";
        }
        free(ids);
    }
}

#endif // OPENING_IMPLEMENTATION

#endif
