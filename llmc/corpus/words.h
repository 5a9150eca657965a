/*
words.h -- the words of a text as hashes, in a form that ignores case and punctuation, and runs of n
words.

Blanks separate words. A word is its letters and digits, in Unicode's normalization form C and with
its case folded: all other characters are left out. In scripts without blanks between words
(Chinese, Japanese, Thai, Lao, Burmese, Khmer) every letter is a word. The hashes have 64 bits: a
billion different runs have two with the same hash with a probability of 3 %.
*/
#ifndef LLMC_WORDS_H
#define LLMC_WORDS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/tokenizer/bpe_rules.h"
#include "llmc/tokenizer/nfc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint64_t hash;
    // in the text; where it was not normal, of all that stands between two blanks
    size_t begin, end;
} Word;

// Starts as zeros and is reused.
typedef struct {
    Word* list; // (count)
    size_t count;
    uint64_t* runs; // (num_runs) set by words_runs
    size_t num_runs;
    size_t room, runs_room;
    NfcText normal, folded, last; // of a part of the text that is not normal
} Words;

// Sets the words of a text. The rules normalize.
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
#include "llmc/tokenizer/case_folding.h"

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

// Returns the class of a character.
static int words_class_(const BpeRules* rules, uint32_t c) {
    return c < rules->end ? rules->of[c / 4] >> 2 * (c % 4) & 3 : BPE_OTHER;
}

static void words_end_(Words* words, Word** word) {
    if (*word) {
        (*word)->hash = ((*word)->hash ^ (*word)->hash >> 32) * WORDS_MIX_;
        (*word)->hash ^= (*word)->hash >> 29;
        words->count++;
        *word = NULL;
    }
}

// Adds a character's bytes to a word.
static void words_hash_(Word* word, const unsigned char* bytes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        word->hash = (word->hash ^ bytes[i]) * WORDS_PRIME_;
    }
}

// Adds a letter or a digit beyond ASCII to a word. Returns 0 if its text must be normalized first:
// the character, or a part of what it is folded to, is one that may change.
static int words_hash_folded_(Word* word, const BpeRules* rules, uint32_t c) {
    uint32_t folded[CASE_MOST];
    const int count = case_fold(c, folded);
    for (int i = 0; i < count; i++) {
        unsigned char bytes[4];
        if (nfc_may_change(&rules->nfc, folded[i])) {
            return 0;
        }
        words_hash_(word, bytes, utf8_encode(folded[i], bytes));
    }
    return 1;
}

// Returns the end of a text without blanks that starts at `at`.
static size_t words_blank_(const BpeRules* rules, const unsigned char* text, size_t bytes, size_t at) {
    for (size_t n; at < bytes; at += n) {
        uint32_t c = text[at];
        n = c < 0x80 ? 1 : (size_t)utf8_decode(text + at, bytes - at, &c);
        if (words_class_(rules, c) == BPE_BLANK) {
            break;
        }
    }
    return at;
}

static void words_append_(NfcText* out, const unsigned char* bytes, size_t n) {
    out->text = (unsigned char*)check_reserve(out->text, &out->room, out->bytes + n, 1, "words");
    memcpy(out->text + out->bytes, bytes, n);
    out->bytes += n;
}

// Sets words->folded to a text with its case folded.
static void words_fold_(Words* words, const unsigned char* text, size_t bytes) {
    words->folded.bytes = 0;
    for (size_t at = 0, n; at < bytes; at += n) {
        uint32_t c = text[at], folded[CASE_MOST];
        n = c < 0x80 ? 1 : (size_t)utf8_decode(text + at, bytes - at, &c);
        const int count = c == UTF8_INVALID ? 0 : case_fold(c, folded);
        for (int i = 0; i < count; i++) {
            unsigned char character[4];
            words_append_(&words->folded, character, utf8_encode(folded[i], character));
        }
    }
}

typedef enum { WORDS_AS_READ_, WORDS_NORMAL_ } WordsText_;

static void words_add_(Words* words, const BpeRules* rules, const unsigned char* in, size_t bytes,
                       WordsText_ how);

// Adds the words of a text without blanks at in[begin ... end), normalized, folded, and normalized
// again, as folding may leave parts that can be composed.
static void words_add_normal_(Words* words, const BpeRules* rules, const unsigned char* in, size_t begin,
                              size_t end) {
    const size_t first = words->count;
    const int was_normal = !nfc_apply(&rules->nfc, in + begin, end - begin, &words->normal);
    words_fold_(words, was_normal ? in + begin : words->normal.text,
                was_normal ? end - begin : words->normal.bytes);
    const NfcText* last = nfc_apply(&rules->nfc, words->folded.text, words->folded.bytes, &words->last)
                              ? &words->last
                              : &words->folded;
    words_add_(words, rules, last->text, last->bytes, WORDS_NORMAL_);
    for (size_t i = first; i < words->count; i++) {
        words->list[i].begin = begin;
        words->list[i].end = end;
    }
}

// A text whose words are added, and the word that is open.
typedef struct {
    Words* words;
    const BpeRules* rules;
    const unsigned char* in;
    size_t bytes;
    WordsText_ how;
    Word* word;          // NULL: none
    size_t begin, first; // of what follows the last blank: its place, and its first word
} WordsReader_;

static void words_read_blank_(WordsReader_* r, size_t end) {
    words_end_(r->words, &r->word);
    r->begin = end;
    r->first = r->words->count;
}

// Reads what stands between two blanks, of which some was read already, as a part must be
// normalized. Returns its end.
static size_t words_read_again_(WordsReader_* r, size_t at) {
    const size_t end = words_blank_(r->rules, r->in, r->bytes, at);
    r->word = NULL;
    r->words->count = r->first;
    words_add_normal_(r->words, r->rules, r->in, r->begin, end);
    return end;
}

// Reads a character beyond ASCII, at in[at]. Returns its end.
static size_t words_read_beyond_(WordsReader_* r, size_t at) {
    uint32_t c;
    const size_t n = (size_t)utf8_decode(r->in + at, r->bytes - at, &c);
    const int class_ = words_class_(r->rules, c), is_alone = words_is_alone_(c) && class_ == BPE_LETTER;
    if (r->how == WORDS_AS_READ_ && nfc_may_change(&r->rules->nfc, c)) {
        return words_read_again_(r, at);
    }
    if (class_ == BPE_BLANK) {
        words_read_blank_(r, at + n);
    } else if (class_ == BPE_LETTER || class_ == BPE_NUMBER) {
        if (is_alone) {
            words_end_(r->words, &r->word);
        }
        r->word = r->word ? r->word : words_open_(r->words, at);
        if (r->how == WORDS_NORMAL_) {
            words_hash_(r->word, r->in + at, n);
        } else if (!words_hash_folded_(r->word, r->rules, c)) {
            return words_read_again_(r, at);
        }
        r->word->end = at + n;
        if (is_alone) {
            words_end_(r->words, &r->word);
        }
    }
    return at + n;
}

// Adds the words of a text.
static void words_add_(Words* words, const BpeRules* rules, const unsigned char* in, size_t bytes,
                       WordsText_ how) {
    WordsReader_ r = {words, rules, in, bytes, how, NULL, 0, words->count};
    for (size_t at = 0; at < bytes;) {
        const unsigned char c = in[at];
        if (c >= 0x80) {
            at = words_read_beyond_(&r, at);
            continue;
        }
        const int class_ = rules->of[c / 4] >> 2 * (c % 4) & 3;
        at++;
        if (class_ == BPE_LETTER || class_ == BPE_NUMBER) {
            r.word = r.word ? r.word : words_open_(words, at - 1);
            r.word->hash = (r.word->hash ^ ('A' <= c && c <= 'Z' ? c | 0x20u : c)) * WORDS_PRIME_;
            r.word->end = at;
        } else if (class_ == BPE_BLANK) {
            words_read_blank_(&r, at);
        }
    }
    words_end_(words, &r.word);
}

void words_split(Words* words, const BpeRules* rules, const char* text, size_t bytes) {
    words->count = 0;
    words_add_(words, rules, (const unsigned char*)text, bytes, WORDS_AS_READ_);
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
    nfc_text_close(&words->normal);
    nfc_text_close(&words->folded);
    nfc_text_close(&words->last);
    memset(words, 0, sizeof(*words));
}

#endif // WORDS_IMPLEMENTATION

#endif
