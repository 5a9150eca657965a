/*
bpe_parts.h -- parts of a vocabulary that files of several formats have: words that are cut out of
texts, the files that are kept, and the model card.
*/
#ifndef LLMC_BPE_PARTS_H
#define LLMC_BPE_PARTS_H

#include "llmc/tokenizer/bpe_sentence.h"
#include "llmc/tokenizer/date.h"
#include "llmc/tokenizer/model_card.h"

#ifdef __cplusplus
extern "C" {
#endif

// Checks that a word can be cut out of text that is encoded part by part, and adds it.
void bpe_add_word(Bpe* bpe, BpeWord word, const char* path);

// Returns the name of a token, terminated, which the caller frees; NULL: there is no token.
char* bpe_name_of(const Bpe* bpe, int id);

// Copies a file's bytes.
BpeKept bpe_keep(const char* name, const void* bytes, size_t count);

// Sets the card from the files beside a tokenizer, whose texts it takes over.
void bpe_set_card(Bpe* bpe, CardFiles* files);

// Finds the format of the card's template on a date, YYYY-MM-DD, and the token that ends an answer.
// A format that was chosen stays.
void bpe_date_chats(Bpe* bpe, const char* date);

#ifdef __cplusplus
}
#endif

#ifdef BPE_PARTS_IMPLEMENTATION

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/tokenizer/bpe_spelling.h"
#include "llmc/tokenizer/chat_format.h"

// ---- words ----

static int bpe_is_ascii_blank_(unsigned char c) { return c == ' ' || ('\t' <= c && c <= '\r'); }

// Parts of a text must not divide a word: SentencePiece's kind may divide before a blank, others at
// the blanks of a word of several.
void bpe_add_word(Bpe* bpe, BpeWord word, const char* path) {
    BpePattern* pattern = &bpe->rules.pattern;
    const BpeSpan text = {(unsigned char*)word.text, word.length};
    NfcText normal;
    size_t blanks = 0, first = 0; // first: blanks before all else
    memset(&normal, 0, sizeof(normal));
    for (size_t i = 0; i < text.length; i++) {
        blanks += (size_t)bpe_is_ascii_blank_(text.text[i]);
        first += first == i && bpe_is_ascii_blank_(text.text[i]);
    }
    CHECK(blanks == 0 || blanks == (pattern->style == BPE_SENTENCE ? first : text.length),
          "%s: the added token \"%s\" has a blank among other characters, wanted it only where it is special",
          path, bpe_excerpt(text).text);
    CHECK(word.kind == BPE_RAW_WORDS || !pattern->normalizes ||
              !nfc_apply(&bpe->rules.nfc, text.text, text.length, &normal),
          "%s: the added token %s is not normalized", path, bpe_excerpt(text).text);
    nfc_text_close(&normal);
    const unsigned char last = text.text[text.length - 1];
    const int puts_blank =
        bpe_puts_blank(bpe) && word.kind == BPE_RAW_WORDS && !(pattern->digits & BPE_BLANK_ONCE);
    if (word.trims || puts_blank) {
        pattern->digits |= BPE_WORD_CHANGES | (last >= 0x80 || isalnum(last) ? BPE_NO_CUTS : 0);
    }
    bpe_words_add(&bpe->words, word);
}

// ---- files beside a tokenizer ----

BpeKept bpe_keep(const char* name, const void* bytes, size_t count) {
    const BpeKept kept = {name, (unsigned char*)check_alloc(count ? count : 1, 1, name), count};
    memcpy(kept.bytes, bytes, count);
    return kept;
}

// Returns the id of an added token; -1: there is none of this name.
static int bpe_find_name_(const Bpe* bpe, const char* name) { return name ? bpe_find_added(bpe, name) : -1; }

// Returns an id of the files; -1: none, or beyond the vocabulary.
static int bpe_id_of_file_(const Bpe* bpe, size_t id) { return id < (size_t)bpe->vocab_size ? (int)id : -1; }

char* bpe_name_of(const Bpe* bpe, int id) {
    int length = 0;
    const char* name = id >= 0 ? bpe_token(bpe, id, &length) : NULL;
    return name ? strndup(name, (size_t)length) : NULL;
}

void bpe_date_chats(Bpe* bpe, const char* date) {
    ModelCard* card = &bpe->card;
    if (!card->chat_template || card->is_chosen) {
        snprintf(card->chat.date, sizeof(card->chat.date), "%s", date);
        return;
    }
    chat_format_close(&card->chat);
    char *bos = bpe_name_of(bpe, card->bos), *eos = bpe_name_of(bpe, card->eos);
    card->chat_known = chat_recognize(&card->chat, card->chat_template, bos, eos, date);
    // a format that is chosen later has it, too
    snprintf(card->chat.date, sizeof(card->chat.date), "%s", date);
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
void bpe_set_card(Bpe* bpe, CardFiles* files) {
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
    char today[DATE_BYTES];
    date_today(today);
    bpe_date_chats(bpe, today);
}

#endif // BPE_PARTS_IMPLEMENTATION

#endif
