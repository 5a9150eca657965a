/*
texts.h -- texts for tests: in memory of exactly their size, hard to cut; and a vocabulary whose
tokens show every cut.
*/
#ifndef DEV_TEST_TEXTS_H
#define DEV_TEST_TEXTS_H

#include "llmc/tokenizer/bpe_encode.h"
#include "dev/test/lib/test.h"

// A number below n; the sequence is `state`'s.
static inline uint32_t random_below(uint64_t* state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % n);
}

// The address sanitizer sees reads past its end.
typedef struct {
    char* bytes;
    size_t length;
} Text;

static inline Text text_of(const void* bytes, size_t length) {
    const Text text = {(char*)malloc(length ? length : 1), length};
    memcpy(text.bytes, bytes, length);
    return text;
}

static inline Text text_repeat(const char* unit, size_t unit_bytes, size_t repeats) {
    const Text text = {(char*)malloc(unit_bytes * repeats + 1), unit_bytes * repeats};
    for (size_t i = 0; i < repeats; i++) {
        memcpy(text.bytes + i * unit_bytes, unit, unit_bytes);
    }
    return text;
}

// Letters, digits, blanks of one to three bytes, quotes, and bytes that are no UTF-8.
static const char* const text_units[] = {"a",
                                         "s",
                                         "t",
                                         "ll",
                                         "'",
                                         "'s",
                                         "1",
                                         "23",
                                         "!",
                                         "-",
                                         " ",
                                         " ",
                                         "  ",
                                         "\n",
                                         "\r\n",
                                         "\t",
                                         "\xC3\xA9",
                                         "\xC5\xBF",
                                         "\xC2\xA0",
                                         "\xC2\x85",
                                         "\xE3\x80\x80",
                                         "\xE2\x80\xA8",
                                         "\xE6\xBC\xA2",
                                         "\xF0\x9F\x98\x80",
                                         "A",
                                         "/",
                                         "\xCC\x81",
                                         "\x80",
                                         "\xA0",
                                         "\xC2",
                                         "\xE3\x80",
                                         "\xFF",
                                         "\xED\xA0\x80",
                                         "\xF4\x90\x80\x80"};
enum { TEXT_UNITS = sizeof(text_units) / sizeof(text_units[0]), TEXT_VALID_UNITS = 27 };

// Sets text (room) to units until it is full; `valid` without those that are no UTF-8. Returns its
// bytes.
static inline size_t random_text(uint64_t* state, char* text, size_t room, int valid) {
    size_t bytes = 0;
    for (;;) {
        const char* unit = text_units[random_below(state, valid ? TEXT_VALID_UNITS : TEXT_UNITS)];
        const size_t n = strlen(unit);
        if (bytes + n > room) {
            return bytes;
        }
        memcpy(text + bytes, unit, n);
        bytes += n;
    }
}

// A vocabulary where any two bytes of the units, next to each other in a piece, make a token: every
// cut that is not at the border of a piece shows in the ids.
static inline Bpe open_pairs(void) {
    char seen[256] = "", all[256];
    int n = 0, num_pairs = 0;
    for (int i = 0; i < TEXT_UNITS; i++) {
        for (const char* byte = text_units[i]; *byte; byte++) {
            if (!seen[(unsigned char)*byte]++) {
                all[n++] = *byte;
            }
        }
    }
    Bpe bytes, bpe;
    bpe_open_merges(&bytes, NULL, 0, "bytes");
    int(*pairs)[2] = (int(*)[2])malloc((size_t)(n * n) * sizeof(*pairs));
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++, num_pairs++) {
            pairs[num_pairs][0] = bpe_find(&bytes, &all[i], 1);
            pairs[num_pairs][1] = bpe_find(&bytes, &all[j], 1);
        }
    }
    bpe_open_merges(&bpe, (const int(*)[2])pairs, num_pairs, "pairs");
    free(pairs);
    bpe_close(&bytes);
    return bpe;
}

#endif
