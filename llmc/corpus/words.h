/*
words.h -- the words of a text as hashes, in a form that ignores case and punctuation, and runs of n
words.

Blanks separate words. A word is its letters and digits: all other characters are left out, and the
letters of ASCII are made lower case. In scripts without blanks between words (Chinese, Japanese,
Thai, Lao, Burmese, Khmer) every letter is a word. The hashes have 64 bits: a billion different runs
have two with the same hash with a probability of 3 %.
*/
#ifndef LLMC_WORDS_H
#define LLMC_WORDS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/tokenizer/bpe_rules.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint64_t hash;
    size_t begin, end; // in the text
} Word;

// Starts as zeros and is reused.
typedef struct {
    Word* list; // (count)
    size_t count;
    uint64_t* runs; // (num_runs) set by words_runs
    size_t num_runs;
    size_t room, runs_room;
} Words;

// Sets the words of a text.
void words_split(Words* words, const BpeRules* rules, const char* text, size_t bytes);

// Sets the runs: the hash of each n words that follow each other. None if the text has fewer.
void words_runs(Words* words, size_t n);

void words_close(Words* words);

#ifdef __cplusplus
}
#endif

#ifdef WORDS_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/utf8.h"

// FNV-1a, whose bits are mixed at the end of a word, and the base of the polynomials of runs.
#define WORDS_START_ UINT64_C(0xCBF29CE484222325)
#define WORDS_PRIME_ UINT64_C(0x100000001B3)
#define WORDS_MIX_ UINT64_C(0x9E3779B97F4A7C15)
#define WORDS_BASE_ UINT64_C(0xD1342543DE82EF95)

// True for letters of scripts without blanks between words.
static int words_is_alone_(uint32_t c) {
    return c >= 0xE00 &&
           (c < 0xF00 || (0x1000 <= c && c < 0x10A0) || (0x1780 <= c && c < 0x1800) ||
            (0x2E80 <= c && c < 0xA4D0) || (0xF900 <= c && c < 0xFB00) || (0x20000 <= c && c < 0x40000));
}

// Starts a word if none is open.
static Word* words_open_(Words* words, size_t at) {
    words->list = (Word*)check_reserve(words->list, &words->room, words->count + 1, sizeof(Word), "words");
    Word* word = &words->list[words->count];
    word->hash = WORDS_START_;
    word->begin = at;
    return word;
}

static void words_end_(Words* words, Word** word) {
    if (*word) {
        (*word)->hash = ((*word)->hash ^ (*word)->hash >> 32) * WORDS_MIX_;
        (*word)->hash ^= (*word)->hash >> 29;
        words->count++;
        *word = NULL;
    }
}

void words_split(Words* words, const BpeRules* rules, const char* text, size_t bytes) {
    const unsigned char* in = (const unsigned char*)text;
    Word* word = NULL;
    words->count = 0;
    for (size_t at = 0, n; at < bytes; at += n) {
        uint32_t c = in[at];
        n = c < 0x80 ? 1 : (size_t)utf8_decode(in + at, bytes - at, &c);
        const int class_ = c < rules->end ? rules->of[c / 4] >> 2 * (c % 4) & 3 : BPE_OTHER;
        const int is_alone = c >= 0x80 && words_is_alone_(c) && class_ == BPE_LETTER;
        if (class_ == BPE_BLANK || is_alone) {
            words_end_(words, &word);
        }
        if (class_ == BPE_LETTER || class_ == BPE_NUMBER) {
            word = word ? word : words_open_(words, at);
            for (size_t i = 0; i < n; i++) {
                const unsigned char byte = in[at + i];
                word->hash = (word->hash ^ ('A' <= byte && byte <= 'Z' ? byte | 0x20u : byte)) * WORDS_PRIME_;
            }
            word->end = at + n;
        }
        if (is_alone) {
            words_end_(words, &word);
        }
    }
    words_end_(words, &word);
}

// A run's hash is a polynomial of its words' hashes, modulo 2^64.
void words_runs(Words* words, size_t n) {
    uint64_t sum = 0, highest = 1;
    words->num_runs = words->count < n ? 0 : words->count - n + 1;
    words->runs = (uint64_t*)check_reserve(words->runs, &words->runs_room, words->num_runs, sizeof(uint64_t),
                                           "runs of words");
    for (size_t i = 0; i < n; i++) {
        highest *= WORDS_BASE_;
    }
    for (size_t i = 0; i < words->count; i++) {
        sum = sum * WORDS_BASE_ + words->list[i].hash - (i < n ? 0 : highest * words->list[i - n].hash);
        if (i + 1 >= n) {
            words->runs[i + 1 - n] = sum;
        }
    }
}

void words_close(Words* words) {
    free(words->list);
    free(words->runs);
    memset(words, 0, sizeof(*words));
}

#endif // WORDS_IMPLEMENTATION

#endif
