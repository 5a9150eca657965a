/*
tokenizer.h -- between text and token ids.

    kind     V                 ids                                             encodes
    bytes    257               0 .. 255 the bytes                              yes
    words    n + 1             0 .. n-1 the words of a list                    yes, longest match first
    gpt2     from the file     those of a llm.c tokenizer .bin or .tiktoken    not yet: decodes only

The end-of-text token separates documents: it is the last id of bytes and words, 50256 of GPT-2. Encoding
never makes it out of text, not even out of the characters "<|endoftext|>".

needs:   check.h
defines: Tokenizer, TOKENIZER_BYTES_EOT, tokenizer_open_bytes, tokenizer_open_words, tokenizer_open_file,
tokenizer_decode, tokenizer_encode, tokenizer_close
*/
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <sys/stat.h>
#include "check.h"

#define TOKENIZER_EOT_TEXT_ "<|endoftext|>"

enum { TOKENIZER_BYTES_EOT = 256 }; // the end-of-text id where tokens are bytes

typedef struct {
    const char* text; // any bytes, no terminating zero
    int length;       // at least 1
} TokenText;

typedef struct {
    const char* kind;  // "bytes", "words" or "gpt2"
    int vocab_size;    // V
    int eot;           // end-of-text id, below V
    TokenText* tokens; // (V), into `buffer`
    char* buffer;      // the bytes of all tokens
} Tokenizer;

// The beginning of a text, for a message: one line, terminated.
typedef struct {
    char text[36];
} TokenizerExcerpt;

static inline TokenizerExcerpt tokenizer_excerpt_(const char* text, size_t bytes) {
    const size_t limit = 32, n = bytes < limit ? bytes : limit;
    TokenizerExcerpt excerpt;
    for (size_t i = 0; i < n; i++) {
        excerpt.text[i] = (unsigned char)text[i] < ' ' ? '?' : text[i];
    }
    strcpy(excerpt.text + n, n < bytes ? "..." : "");
    return excerpt;
}

static inline void tokenizer_open_(Tokenizer* tokenizer, const char* kind, int V, int eot, char* buffer) {
    tokenizer->kind = kind;
    tokenizer->vocab_size = V;
    tokenizer->eot = eot;
    tokenizer->tokens = (TokenText*)check_alloc((size_t)V, sizeof(TokenText), "vocabulary");
    tokenizer->buffer = buffer;
}

static inline void tokenizer_close(Tokenizer* tokenizer) {
    free(tokenizer->tokens);
    free(tokenizer->buffer);
    memset(tokenizer, 0, sizeof(*tokenizer));
}

static inline void tokenizer_set_(Tokenizer* tokenizer, int id, const char* text, size_t length) {
    tokenizer->tokens[id].text = text;
    tokenizer->tokens[id].length = (int)length;
}

// The end-of-text token is not in every list of tokens; its name is a constant.
static inline void tokenizer_set_eot_(Tokenizer* tokenizer) {
    tokenizer_set_(tokenizer, tokenizer->eot, TOKENIZER_EOT_TEXT_, strlen(TOKENIZER_EOT_TEXT_));
}

static inline void tokenizer_open_bytes(Tokenizer* tokenizer) {
    const int n = TOKENIZER_BYTES_EOT;
    tokenizer_open_(tokenizer, "bytes", n + 1, n, (char*)check_alloc((size_t)n, 1, "vocabulary"));
    for (int id = 0; id < n; id++) {
        tokenizer->buffer[id] = (char)id;
        tokenizer_set_(tokenizer, id, tokenizer->buffer + id, 1);
    }
    tokenizer_set_eot_(tokenizer);
}

// The words are copied. None may be empty.
static inline void tokenizer_open_words(Tokenizer* tokenizer, const char* const* words, int n) {
    size_t bytes = 0;
    for (int id = 0; id < n; id++) {
        bytes += strlen(words[id]);
    }
    tokenizer_open_(tokenizer, "words", n + 1, n, (char*)check_alloc(bytes, 1, "vocabulary"));
    char* at = tokenizer->buffer;
    for (int id = 0; id < n; id++) {
        const size_t length = strlen(words[id]);
        assert(0 < length && length <= INT_MAX);
        memcpy(at, words[id], length);
        tokenizer_set_(tokenizer, id, at, length);
        at += length;
    }
    tokenizer_set_eot_(tokenizer);
}

// ---- files: the tokens stay where they stand in the file's bytes, which become the buffer

// The bytes of a file; the caller frees them.
static inline char* tokenizer_read_(const char* path, size_t* bytes) {
    struct stat info;
    CHECK(stat(path, &info) == 0, "%s: cannot open the tokenizer: %s", path, strerror(errno));
    CHECK(S_ISREG(info.st_mode), "%s: not a regular file, wanted a tokenizer .bin or .tiktoken", path);
    CHECK(info.st_size > 0, "%s: empty file, wanted a tokenizer .bin or .tiktoken", path);
    FILE* file = fopen(path, "rb");
    CHECK(file, "%s: cannot open the tokenizer: %s", path, strerror(errno));
    *bytes = (size_t)info.st_size;
    char* data = (char*)check_alloc(*bytes, 1, path);
    const size_t got = fread(data, 1, *bytes, file);
    CHECK(got == *bytes, "%s: read %zu bytes, wanted %zu", path, got, *bytes);
    fclose(file);
    return data;
}

// llm.c's tokenizer: a header of 256 uint32 (magic, version, n, end-of-text id), n x (uint8 length, bytes).
static inline void tokenizer_open_bin_(Tokenizer* tokenizer, const char* path, char* data, size_t bytes) {
    const uint32_t magic = 20240328, header_bytes = 1024;
    uint32_t header[4];
    CHECK(bytes >= header_bytes, "%s: %zu bytes, wanted a header of %u", path, bytes, header_bytes);
    memcpy(header, data, sizeof(header));
    const uint32_t version = header[1], n = header[2];
    CHECK(header[0] == magic, "%s: magic %u, wanted %u of a tokenizer .bin (or a name in .tiktoken)", path,
          header[0], magic);
    CHECK(version == 1 || version == 2, "%s: version %u, wanted 1 or 2", path, version);
    CHECK(n <= INT_MAX && n <= (bytes - header_bytes) / 2, "%s: %u tokens cannot be in %zu bytes", path, n,
          bytes);
    const uint32_t eot = version == 1 ? 50256 : header[3];
    CHECK(eot < n, "%s: end-of-text id %u, wanted one of the %u tokens", path, eot, n);
    tokenizer_open_(tokenizer, "gpt2", (int)n, (int)eot, data);
    size_t at = header_bytes;
    for (uint32_t id = 0; id < n; id++) {
        CHECK(at < bytes, "%s: ends before token %u, wanted %u tokens", path, id, n);
        const size_t length = (unsigned char)data[at++];
        CHECK(0 < length && length <= bytes - at, "%s: token %u of %zu bytes, wanted 1 to the %zu left", path,
              id, length, bytes - at);
        tokenizer_set_(tokenizer, (int)id, data + at, length);
        at += length;
    }
    CHECK(at == bytes, "%s: %zu bytes after the last of %u tokens, wanted none", path, bytes - at, n);
}

static inline int tokenizer_base64_digit_(char c) {
    return 'A' <= c && c <= 'Z'   ? c - 'A'
           : 'a' <= c && c <= 'z' ? c - 'a' + 26
           : '0' <= c && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

// Decodes base64 in place and returns the number of bytes, 0 if it is malformed.
static inline size_t tokenizer_base64_(char* text, size_t length) {
    if (length % 4 != 0) {
        return 0;
    }
    for (int padding = 0; padding < 2 && length > 0 && text[length - 1] == '='; padding++) {
        length--;
    }
    uint32_t bits = 0;
    size_t bytes = 0;
    for (size_t i = 0; i < length; i++) {
        const int digit = tokenizer_base64_digit_(text[i]);
        if (digit < 0) {
            return 0;
        }
        bits = bits << 6 | (uint32_t)digit;
        if (i % 4 != 0) { // digits 1, 2, 3 of four complete a byte and leave 4, 2, 0 bits over
            text[bytes++] = (char)(bits >> (6 - 2 * (i % 4)));
        }
    }
    return bytes;
}

// A decimal number below n that fills the text exactly, or -1.
static inline int tokenizer_rank_(const char* text, size_t length, int n) {
    long rank = 0;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9' || rank >= n) {
            return -1;
        }
        rank = 10 * rank + (text[i] - '0');
    }
    return length > 0 && rank < n ? (int)rank : -1;
}

// Lines "base64 rank" in any order; n of them hold the ranks 0 .. n-1, and end-of-text is the next id.
static inline void tokenizer_open_tiktoken_(Tokenizer* tokenizer, const char* path, char* data,
                                            size_t bytes) {
    size_t lines = data[bytes - 1] != '\n';
    for (size_t i = 0; i < bytes; i++) {
        lines += data[i] == '\n';
    }
    CHECK(lines < INT_MAX, "%s: %zu lines, wanted fewer than %d", path, lines, INT_MAX);
    const int n = (int)lines;
    tokenizer_open_(tokenizer, "gpt2", n + 1, n, data);
    char* line = data;
    for (int number = 1; number <= n; number++) {
        const size_t left = bytes - (size_t)(line - data);
        char *newline = (char*)memchr(line, '\n', left), *end = newline ? newline : line + left;
        char* blank = (char*)memchr(line, ' ', (size_t)(end - line));
        const size_t length = blank ? tokenizer_base64_(line, (size_t)(blank - line)) : 0;
        CHECK(length > 0, "%s:%d: wanted a token in base64, a blank, and its rank", path, number);
        const size_t digits = (size_t)(end - blank - 1);
        const int rank = tokenizer_rank_(blank + 1, digits, n);
        // n different ranks below n: then none is missing
        CHECK(rank >= 0, "%s:%d: rank \"%s\", wanted 0 to %d in a file of %d lines", path, number,
              tokenizer_excerpt_(blank + 1, digits).text, n - 1, n);
        CHECK(tokenizer->tokens[rank].length == 0, "%s:%d: rank %d is there twice", path, number, rank);
        tokenizer_set_(tokenizer, rank, line, length);
        line = end + 1;
    }
    tokenizer_set_eot_(tokenizer);
}

static inline void tokenizer_open_file(Tokenizer* tokenizer, const char* path) {
    size_t bytes;
    char* data = tokenizer_read_(path, &bytes);
    const char* ending = strrchr(path, '.');
    if (ending && strcmp(ending, ".tiktoken") == 0) {
        tokenizer_open_tiktoken_(tokenizer, path, data, bytes);
    } else {
        tokenizer_open_bin_(tokenizer, path, data, bytes);
    }
}

// ---- use

// The bytes of one token; they are not terminated, and stay valid until the tokenizer is closed.
static inline const char* tokenizer_decode(const Tokenizer* tokenizer, int id, int* length) {
    CHECK(0 <= id && id < tokenizer->vocab_size, "token id %d, wanted 0 to %d", id,
          tokenizer->vocab_size - 1);
    *length = tokenizer->tokens[id].length;
    return tokenizer->tokens[id].text;
}

// The longest word that `lead` followed by the text begins with and that is longer than `lead`; -1 for none.
// Tries every word: texts are prompts, vocabularies hundreds of words.
static inline int tokenizer_longest_(const Tokenizer* tokenizer, const char* lead, const char* text,
                                     size_t bytes) {
    const int lead_length = (int)strlen(lead);
    int best = -1, best_length = lead_length;
    for (int id = 0; id < tokenizer->eot; id++) {
        const TokenText word = tokenizer->tokens[id];
        const size_t rest = (size_t)(word.length - lead_length);
        if (word.length > best_length && rest <= bytes && memcmp(word.text, lead, (size_t)lead_length) == 0 &&
            memcmp(word.text + lead_length, text, rest) == 0) {
            best = id;
            best_length = word.length;
        }
    }
    return best;
}

// Ends the program: the vocabulary has no word for the text at `at`.
static inline void tokenizer_no_word_(const char* text, size_t bytes, size_t at) {
    const TokenizerExcerpt found = tokenizer_excerpt_(text + at, bytes - at);
    die_usage("prompt: no word of the vocabulary at \"%s\" (byte %zu of %zu)", found.text, at, bytes);
}

// Words carry the blank before them; the first of a text is also found without its blank.
static inline size_t tokenizer_encode_words_(const Tokenizer* tokenizer, const char* text, size_t bytes,
                                             int* ids) {
    size_t count = 0;
    for (size_t at = 0; at < bytes;) {
        int added = 0, id = tokenizer_longest_(tokenizer, "", text + at, bytes - at);
        if (id < 0 && at == 0) {
            id = tokenizer_longest_(tokenizer, " ", text, bytes);
            added = 1;
        }
        if (id < 0) {
            tokenizer_no_word_(text, bytes, at);
        }
        ids[count++] = id;
        at += (size_t)(tokenizer->tokens[id].length - added);
    }
    return count;
}

// Sets ids (room for `bytes` of them) and returns how many there are. A text that the words cannot say is a
// usage error: it comes from the command line.
static inline size_t tokenizer_encode(const Tokenizer* tokenizer, const char* text, size_t bytes, int* ids) {
    if (strcmp(tokenizer->kind, "words") == 0) {
        return tokenizer_encode_words_(tokenizer, text, bytes, ids);
    }
    CHECK(strcmp(tokenizer->kind, "bytes") == 0,
          "%s: text cannot be encoded with a decode-only tokenizer, wanted bytes or words", tokenizer->kind);
    for (size_t i = 0; i < bytes; i++) {
        ids[i] = (unsigned char)text[i];
    }
    return bytes;
}

#endif
