/*
bpe_spelling.h -- parts of vocabulary files, and how they spell tokens: JSON and merges.txt have a
visible character for each of the 256 bytes, Latin-1's and, for the rest, U+0100 to U+0143; so no
token contains a blank or a line break.
*/
#ifndef LLMC_BPE_SPELLING_H
#define LLMC_BPE_SPELLING_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "llmc/tokenizer/bpe.h"

// ---- parts of a file ----

// File being read; every error names it.
typedef struct {
    const char* path;
    unsigned char* data; // becomes the vocabulary's buffer: the tokens stay where they are
    size_t bytes;
} BpeFile;

// Part of a text up to the next `end` character, or to its end.
typedef struct {
    unsigned char* text;
    size_t length;
} BpeSpan;

static inline BpeSpan bpe_until(unsigned char* text, size_t left, char end) {
    const unsigned char* found = left ? (const unsigned char*)memchr(text, end, left) : NULL;
    const BpeSpan span = {text, found ? (size_t)(found - text) : left};
    return span;
}

// Returns the text after the first blank of a line; empty without a blank.
static inline BpeSpan bpe_after_blank(BpeSpan line) {
    const size_t first = bpe_until(line.text, line.length, ' ').length;
    const size_t skipped = first < line.length ? first + 1 : line.length;
    const BpeSpan span = {line.text + skipped, line.length - skipped};
    return span;
}

// Start of a text, for a message: one line, terminated.
typedef struct {
    char text[24];
} BpeExcerpt;

static inline BpeExcerpt bpe_excerpt(BpeSpan span) {
    BpeExcerpt excerpt;
    const size_t n = span.length < sizeof(excerpt.text) ? span.length : sizeof(excerpt.text) - 1;
    for (size_t i = 0; i < n; i++) {
        excerpt.text[i] = ' ' <= span.text[i] && span.text[i] <= '~' ? (char)span.text[i] : '?';
    }
    excerpt.text[n] = '\0';
    return excerpt;
}

// True if a span is this text.
static inline int bpe_span_is(BpeSpan span, const char* text) {
    return span.length == strlen(text) && memcmp(span.text, text, span.length) == 0;
}

// ---- tokens spelled in characters that can be seen ----

// ---- tokens spelled in characters that can be seen ----

typedef struct {
    uint16_t of_byte[256];  // character of each byte
    int16_t byte_of[0x200]; // byte of each character, or -1
} BpeSpelling;

static inline BpeSpelling bpe_spelling(void) {
    BpeSpelling spelling;
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
static inline size_t bpe_unspell(BpeSpan span, const BpeSpelling* spelling) {
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
typedef enum { BPE_UTF8, BPE_JSON } BpeText;

static inline void bpe_put_spelled(const BpeSpelling* spelling, BpeToken_ token, BpeText text, FILE* file) {
    for (uint32_t i = 0; i < token.length; i++) {
        const unsigned c = spelling->of_byte[token.text[i]];
        if (c >= 0x80 && text == BPE_JSON) {
            fprintf(file, "\\u%04x", c);
        } else if (c >= 0x80) {
            fprintf(file, "%c%c", 0xC0 | c >> 6, 0x80 | (c & 63));
        } else {
            fprintf(file, text == BPE_JSON && (c == '"' || c == '\\') ? "\\%c" : "%c", c);
        }
    }
}

#endif
