/*
bpe_words.h -- words that are cut out of a text before anything else: the added tokens of a Hugging
Face tokenizer that are not special. The text between two of them is encoded as a text of its own.

The leftmost word is cut out, of several the longest. First those that match the text as it is,
then, in the normalized text between these, the others.
*/
#ifndef LLMC_BPE_WORDS_H
#define LLMC_BPE_WORDS_H

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

typedef enum { BPE_RAW_WORDS = 1, BPE_NORMAL_WORDS = 2 } BpeWordKind;

typedef struct {
    const unsigned char* text; // borrowed
    uint32_t length;
    int id;
    BpeWordKind kind; // the text that it matches
    int trims;        // 1: the blanks after it belong to it
} BpeWord;

typedef struct {
    BpeWord* words; // (count) by their first byte, longer ones first
    size_t count;
    int begin[257];                 // words with each first byte
    unsigned char kinds[256];       // kinds of words with this first byte
    unsigned char seconds[256][32]; // bits: second bytes of words with this first byte
    int all_kinds;
} BpeWords;

static inline int bpe_words_compare_(const void* a, const void* b) {
    const BpeWord *one = (const BpeWord*)a, *other = (const BpeWord*)b;
    const int bytes = one->text[0] - other->text[0];
    return bytes ? bytes : one->length > other->length ? -1 : one->length < other->length;
}

static inline void bpe_words_add(BpeWords* words, BpeWord word) {
    words->words = (BpeWord*)check_grow(words->words, words->count, sizeof(BpeWord), "added tokens");
    words->words[words->count++] = word;
}

// Completes the list once all words are added.
static inline void bpe_words_finish(BpeWords* words) {
    if (words->count > 0) {
        qsort(words->words, words->count, sizeof(BpeWord), bpe_words_compare_);
    }
    for (size_t i = 0; i < words->count; i++) {
        words->begin[words->words[i].text[0] + 1]++;
        const BpeWord word = words->words[i];
        unsigned char* seconds = words->seconds[word.text[0]];
        words->kinds[word.text[0]] |= (unsigned char)word.kind;
        words->all_kinds |= (int)word.kind;
        if (word.length == 1) {
            memset(seconds, 0xFF, sizeof(words->seconds[0]));
        } else {
            seconds[word.text[1] / 8] |= (unsigned char)(1 << word.text[1] % 8);
        }
    }
    for (int byte = 0; byte < 256; byte++) {
        words->begin[byte + 1] += words->begin[byte];
    }
}

static inline void bpe_words_close(BpeWords* words) {
    free(words->words);
    memset(words, 0, sizeof(*words));
}

// Returns the longest word of this kind at the start of text[0 .. left), left > 0; NULL: none.
static inline const BpeWord* bpe_word_at(const BpeWords* words, BpeWordKind kind, const unsigned char* text,
                                         size_t left) {
    for (int i = words->begin[text[0]]; i < words->begin[text[0] + 1]; i++) {
        const BpeWord* word = &words->words[i];
        if (word->kind == kind && word->length <= left && memcmp(word->text, text, word->length) == 0) {
            return word;
        }
    }
    return NULL;
}

// Returns the next word of this kind in text[*at .. bytes) and moves *at to it; NULL: none, *at is
// at the end.
static inline const BpeWord* bpe_words_next(const BpeWords* words, BpeWordKind kind,
                                            const unsigned char* text, size_t bytes, size_t* at) {
    if (!(words->all_kinds & kind)) {
        *at = bytes;
        return NULL;
    }
    for (; *at < bytes; ++*at) {
        const unsigned char first = text[*at], second = *at + 1 < bytes ? text[*at + 1] : 0;
        if (__builtin_expect(words->kinds[first] & kind, 0) &&
            (*at + 1 == bytes || words->seconds[first][second / 8] >> second % 8 & 1)) {
            const BpeWord* word = bpe_word_at(words, kind, text + *at, bytes - *at);
            if (word) {
                return word;
            }
        }
    }
    return NULL;
}

#endif
