/*
bpe_texts.h -- from a text to the texts that are split into pieces: words are cut out of it
(bpe_words.h), and the text between them is normalized (nfc.h), or its blanks are (bpe_sentence.h).
Only for rules that ask for either.
*/
#ifndef LLMC_BPE_TEXTS_H
#define LLMC_BPE_TEXTS_H

#include "llmc/tokenizer/bpe_sentence.h"
#include "llmc/tokenizer/bpe_split.h"
#include "llmc/tokenizer/bpe_words.h"

// Functions for the parts of a text, called in their order.
typedef struct {
    const BpeRules* rules;
    const BpeWords* words;
    NfcText* normal; // room
    void (*on_text)(void* context, const unsigned char* text, size_t bytes);
    void (*on_word)(void* context, int id); // NULL: nothing
    void* context;
} BpeTexts;

static inline void bpe_texts_between_(const BpeTexts* texts, BpeWordKind kind, BpePlace place,
                                      const unsigned char* text, size_t bytes);

// Visits a text between the words that are matched before normalization.
static inline void bpe_texts_raw_(const BpeTexts* texts, BpePlace place, const unsigned char* text,
                                  size_t bytes) {
    const BpePattern pattern = texts->rules->pattern;
    if ((pattern.normalizes && nfc_apply(&texts->rules->nfc, text, bytes, texts->normal)) ||
        (pattern.style == BPE_SENTENCE &&
         bpe_blanks_apply(pattern.digits, place, text, bytes, texts->normal))) {
        text = texts->normal->text;
        bytes = texts->normal->bytes;
    }
    bpe_texts_between_(texts, BPE_NORMAL_WORDS, place, text, bytes);
}

// Returns the bytes of a word at the start of text[0 .. left), with the blanks that it trims.
static inline size_t bpe_word_bytes_(const BpeRules* rules, const BpeWord* word, const unsigned char* text,
                                     size_t left) {
    size_t n = word->length;
    for (int class_ = BPE_BLANK, length = 0; word->trims && n < left && class_ == BPE_BLANK;) {
        length = bpe_class_at(rules, text + n, left - n, &class_);
        n += class_ == BPE_BLANK ? (size_t)length : 0;
    }
    return n;
}

// Visits the words of this kind, and the texts between them.
static inline void bpe_texts_between_(const BpeTexts* texts, BpeWordKind kind, BpePlace place,
                                      const unsigned char* text, size_t bytes) {
    const BpeWord* word;
    size_t begin = 0, end = 0;
    do {
        word = bpe_words_next(texts->words, kind, text, bytes, &end);
        if (kind == BPE_RAW_WORDS) {
            bpe_texts_raw_(texts, begin > 0 ? BPE_AFTER_TOKEN : place, text + begin, end - begin);
        } else {
            texts->on_text(texts->context, text + begin, end - begin);
        }
        if (word) {
            begin = end += bpe_word_bytes_(texts->rules, word, text + end, bytes - end);
        }
        if (word && texts->on_word) {
            texts->on_word(texts->context, word->id);
        }
    } while (word);
}

static inline void bpe_texts_visit(const BpeTexts* texts, BpePlace place, const unsigned char* text,
                                   size_t bytes) {
    for (size_t begin = 0, end; begin < bytes; begin = end) {
        end = bpe_part_end(texts->rules, text, bytes, begin);
        bpe_texts_between_(texts, BPE_RAW_WORDS, begin > 0 ? BPE_REST : place, text + begin, end - begin);
    }
}

// True if a text is split as it is.
static inline int bpe_texts_are_whole(const BpeRules* rules) {
    return !rules->pattern.normalizes && !rules->pattern.cuts_words && rules->pattern.style != BPE_SENTENCE;
}

#endif
