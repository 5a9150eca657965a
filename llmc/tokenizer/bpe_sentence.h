/*
bpe_sentence.h -- byte-pair encoding of SentencePiece's kind, as Llama 2, Mistral 7B, Gemma and Phi
3 have it: tokens are made of characters, and a blank is one of them, spelled U+2581 in files.

    blanks        U+2581 in a text is a blank, too. One may be put before a text (BPE_BLANK_BEFORE).
    characters    one that is no token becomes the tokens of its bytes
    cuts          a text is merged as a whole, so it may be cut where no token goes across:
                  between two bytes that no merge makes neighbors

In memory tokens have blanks, so decoding is concatenating. Only the blank that was put before a
text is left out (bpe_first_token).
*/
#ifndef LLMC_BPE_SENTENCE_H
#define LLMC_BPE_SENTENCE_H

#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_spelling.h"

// A text that is encoded stands at the start of a document, right after a token that is no text, or
// continues another text.
typedef enum { BPE_DOCUMENT, BPE_AFTER_TOKEN, BPE_REST } BpePlace;

#define BPE_BLANK_SPELLED "\xE2\x96\x81" // U+2581
enum { BPE_BLANK_BYTES = 3 };

static inline int bpe_is_spelled_blank_(const unsigned char* text, size_t left) {
    return left >= BPE_BLANK_BYTES && memcmp(text, BPE_BLANK_SPELLED, BPE_BLANK_BYTES) == 0;
}

// Replaces each U+2581 by a blank, in place. Returns the new length.
static inline size_t bpe_unspell_blanks(unsigned char* text, size_t bytes) {
    size_t n = 0;
    for (size_t i = 0; i < bytes; n++) {
        const int is_blank = bpe_is_spelled_blank_(text + i, bytes - i);
        text[n] = is_blank ? ' ' : text[i];
        i += is_blank ? BPE_BLANK_BYTES : 1;
    }
    return n;
}

// Sets out->text to a text as its blanks are encoded. Returns 0, and sets nothing, if it is that
// already.
static inline int bpe_blanks_apply(int blanks, BpePlace place, const unsigned char* text, size_t bytes,
                                   NfcText* out) {
    const int is_first = place == BPE_DOCUMENT || (place == BPE_AFTER_TOKEN && !(blanks & BPE_BLANK_ONCE));
    const int has_blank = bytes > 0 && (text[0] == ' ' || bpe_is_spelled_blank_(text, bytes));
    const int leads =
        bytes > 0 && is_first && (blanks & BPE_BLANK_BEFORE) && !(blanks & BPE_BLANK_MISSING && has_blank);
    const int is_spelled = bytes > 0 && memmem(text, bytes, BPE_BLANK_SPELLED, BPE_BLANK_BYTES) != NULL;
    if (!leads && !is_spelled) {
        return 0;
    }
    out->text = (unsigned char*)check_reserve(out->text, &out->room, bytes + 1, 1, "a text with blanks");
    out->text[0] = ' ';
    memcpy(out->text + leads, text, bytes);
    out->bytes = (size_t)leads + (is_spelled ? bpe_unspell_blanks(out->text + leads, bytes) : bytes);
    return 1;
}

// True if encoding puts a blank before a text.
static inline int bpe_puts_blank(const Bpe* bpe) {
    return bpe->rules.pattern.style == BPE_SENTENCE && bpe->rules.pattern.digits & BPE_BLANK_BEFORE;
}

// Returns the bytes of the first token of a text, without the blank that encoding put before it.
static inline const char* bpe_first_token(const Bpe* bpe, int id, int* length) {
    const char* text = bpe_token(bpe, id, length);
    const int is_put = bpe_puts_blank(bpe) && *length > 0 && *text == ' ';
    *length -= is_put;
    return text + is_put;
}

// Sets the token of a byte, <0x0A>. Returns 0 if it has another form.
static inline int bpe_set_byte(Bpe* bpe, int id, BpeSpan text) {
    static const char digits[] = "0123456789ABCDEF";
    const char* high = text.length == 6 && text.text[3] ? strchr(digits, text.text[3]) : NULL;
    const char* low = text.length == 6 && text.text[4] ? strchr(digits, text.text[4]) : NULL;
    if (!high || !low || memcmp(text.text, "<0x", 3) != 0 || text.text[5] != '>') {
        return 0;
    }
    const BpeToken_ token = {text.text, 1, BPE_BYTE};
    text.text[0] = (unsigned char)(16 * (high - digits) + (low - digits));
    bpe->tokens[id] = token;
    bpe->byte_ids[text.text[0]] = id;
    return 1;
}

static inline int bpe_are_joined_(const BpeRules* rules, int before, int after) {
    const int pair = 256 * before + after;
    return rules->joins[pair / 64] >> pair % 64 & 1;
}

static inline void bpe_join_bytes_(BpeRules* rules, int before, int after) {
    const int pair = 256 * before + after;
    rules->joins[pair / 64] |= (uint64_t)1 << pair % 64;
}

// Finds where texts may be cut, once all merges are known.
static inline void bpe_find_cuts(Bpe* bpe) {
    BpeRules* rules = &bpe->rules;
    int blank = 0, line = 0; // merges that join them to a character before that is no blank
    rules->joins = (uint64_t*)check_alloc(256 * 256 / 64, sizeof(uint64_t), "vocabulary");
    for (int pair = 0; pair < 256 * 64; pair++) { // inside of a character
        bpe_join_bytes_(rules, pair / 64, 0x80 + pair % 64);
    }
    for (int rank = 0; rank < bpe->num_ranks; rank++) {
        const BpeToken_ token = bpe->tokens[bpe->pairs.made[rank]];
        for (uint32_t i = 1; i < token.length; i++) {
            bpe_join_bytes_(rules, token.text[i - 1], token.text[i]);
        }
    }
    for (int before = ' ' + 1; before < 256; before++) {
        blank |= bpe_are_joined_(rules, before, ' ');
        line |= bpe_are_joined_(rules, before, '\n');
    }
    if (!(rules->pattern.digits & BPE_NO_CUTS)) {
        rules->pattern.digits |= (blank ? 0 : BPE_BLANK_CUTS) | (line ? 0 : BPE_LINE_CUTS);
    }
}

// Prints a token as SentencePiece spells it.
static inline void bpe_print_sentence_token(BpeToken_ token, FILE* file) {
    if (token.kind == BPE_BYTE) {
        fprintf(file, "<0x%02X>", token.text[0]);
    }
    for (uint32_t i = 0; i < token.length && token.kind != BPE_BYTE; i++) {
        const int is_blank = token.kind == BPE_TOKEN && token.text[i] == ' ';
        fwrite(is_blank ? BPE_BLANK_SPELLED : (const char*)token.text + i, 1, is_blank ? BPE_BLANK_BYTES : 1,
               file);
    }
}

// Sets ways to the merges that make a token, from left to right, with room for its bytes. Returns
// their number.
static inline size_t bpe_ways(const Bpe* bpe, int id, int rank, BpeListed_* ways) {
    const BpeToken_ token = bpe->tokens[id];
    const char* text = (const char*)token.text;
    size_t count = 0;
    for (uint32_t i = 1; i < token.length; i++) {
        const BpeListed_ way = {bpe_find(bpe, text, i), bpe_find(bpe, text + i, token.length - i), id, rank};
        if (way.left >= 0 && way.right >= 0) {
            ways[count++] = way;
        }
    }
    return count;
}

#endif
