/*
bpe_sentence.h -- byte-pair encoding of SentencePiece's kind, as Llama 2, Mistral 7B, Gemma and Phi 3
have it: tokens are made of characters, and a blank is one of them, spelled U+2581 in files.

    blanks        U+2581 in a text is a blank, too. One may be put before a text (BPE_BLANK_BEFORE).
    characters    one that is no token becomes the tokens of its bytes, or else the unknown token
    cuts          a text is merged as a whole, so it may be cut where no token goes across:
                  between two bytes that no merge makes neighbors

In memory tokens have blanks, so decoding is concatenating. Only the blank that was put before a
text is left out (bpe_first_token).
*/
#ifndef LLMC_BPE_SENTENCE_H
#define LLMC_BPE_SENTENCE_H

#include "llmc/tokenizer/bpe.h"

// A text that is encoded stands at the start of a document, right after a token that is no text, or
// continues another text.
typedef enum { BPE_DOCUMENT, BPE_AFTER_TOKEN, BPE_REST } BpePlace;

#define BPE_BLANK_SPELLED "\xE2\x96\x81" // U+2581
enum { BPE_BLANK_BYTES_ = 3 };

static inline int bpe_is_spelled_blank_(const unsigned char* text, size_t left) {
    return left >= BPE_BLANK_BYTES_ && memcmp(text, BPE_BLANK_SPELLED, BPE_BLANK_BYTES_) == 0;
}

// Replaces each U+2581 by a blank, in place. Returns the new length.
static inline size_t bpe_unspell_blanks(unsigned char* text, size_t bytes) {
    size_t n = 0;
    for (size_t i = 0; i < bytes; n++) {
        const int is_blank = bpe_is_spelled_blank_(text + i, bytes - i);
        text[n] = is_blank ? ' ' : text[i];
        i += is_blank ? BPE_BLANK_BYTES_ : 1;
    }
    return n;
}

// Copies a text with single blanks, where BPE_BLANK_SINGLE asks for it. U+2581 is not one of those.
static inline size_t bpe_copy_single_(const unsigned char* text, size_t bytes, int is_after,
                                      unsigned char* out) {
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        out[n] = text[i];
        n += !(is_after && text[i] == ' ');
        is_after = text[i] == ' ';
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
        bytes > 0 && is_first && blanks & BPE_BLANK_BEFORE && !(blanks & BPE_BLANK_MISSING && has_blank);
    const int is_single = blanks & BPE_BLANK_SINGLE;
    const int is_spelled = bytes > 0 && memmem(text, bytes, BPE_BLANK_SPELLED, BPE_BLANK_BYTES_) != NULL;
    if (!leads && !is_single && !is_spelled) {
        return 0;
    }
    out->text = (unsigned char*)check_reserve(out->text, &out->room, bytes + 1, 1, "a text with blanks");
    out->text[0] = ' ';
    unsigned char* copy = out->text + (leads != 0);
    if (is_single) {
        bytes = bpe_copy_single_(text, bytes, place != BPE_REST, copy);
    } else {
        memcpy(copy, text, bytes);
    }
    out->bytes = (size_t)(leads != 0) + (is_spelled ? bpe_unspell_blanks(copy, bytes) : bytes);
    while (is_single && out->bytes > 0 && out->text[out->bytes - 1] == ' ') {
        out->bytes--;
    }
    return 1;
}

// Returns the bytes of the first token of a text, without the blank that encoding put before it.
static inline const char* bpe_first_token(const Bpe* bpe, int id, int* length) {
    const char* text = bpe_token(bpe, id, length);
    for (int i = 0; i<bpe->dropped_blanks&& * length> 0 && *text == ' '; i++, text++) {
        --*length;
    }
    return text;
}

// Returns the byte that a token <0x0A> stands for; -1: it has another form.
static inline int bpe_byte_of(const unsigned char* text, size_t length) {
    static const char digits[] = "0123456789ABCDEF";
    const char* high = length == 6 && text[3] ? strchr(digits, text[3]) : NULL;
    const char* low = length == 6 && text[4] ? strchr(digits, text[4]) : NULL;
    return high && low && memcmp(text, "<0x", 3) == 0 && text[5] == '>'
               ? (int)(16 * (high - digits) + (low - digits))
               : -1;
}

// Sets the token of a byte.
static inline void bpe_set_byte_(Bpe* bpe, int id, int byte, unsigned char* text) {
    const BpeToken_ token = {text, 1, BPE_BYTE};
    text[0] = (unsigned char)byte;
    bpe->tokens[id] = token;
    bpe->fallback[byte] = id;
}

// Completes the bytes once all tokens are set: each has a token, or is the unknown one.
static inline int bpe_finish_fallback_(Bpe* bpe, const char* name, char* error) {
    for (int byte = 0; byte < 256; byte++) {
        if (bpe->fallback[byte] < 0 && bpe->unknown < 0) {
            return error_set(error, name,
                             "no token <0x%02X>, wanted all 256 with byte_fallback, or an unknown token",
                             (unsigned)byte);
        }
        bpe->fallback[byte] = bpe->unknown >= 0 ? bpe->unknown : bpe->fallback[byte];
    }
    return 1;
}

static inline void bpe_join_bytes_(BpeRules* rules, int before, int after, int joins) {
    uint64_t* word = &rules->joins[(256 * before + after) / 64];
    const uint64_t bit = (uint64_t)1 << after % 64;
    *word = joins ? *word | bit : *word & ~bit;
}

// True if a merge makes this byte the neighbor of a character before it that is no blank.
static inline int bpe_is_joined_(const BpeRules* rules, int after) {
    for (int before = ' ' + 1; before < 256; before++) {
        if (rules->joins[(256 * before + after) / 64] >> after % 64 & 1) {
            return 1;
        }
    }
    return 0;
}

// Finds where texts may be cut, once all merges are known. splits: 1 if every blank starts a piece.
static inline void bpe_find_cuts_(Bpe* bpe, int splits) {
    BpeRules* rules = &bpe->rules;
    rules->joins = (uint64_t*)check_alloc(256 * 256 / 64, sizeof(uint64_t), "vocabulary");
    for (int pair = 0; pair < 256 * 256; pair++) {
        const int is_inside = 0x80 <= pair % 256 && pair % 256 < 0xC0; // of a character
        bpe_join_bytes_(rules, pair / 256, pair % 256, is_inside || bpe->finds_pieces);
    }
    for (int rank = 0; rank < bpe->num_ranks; rank++) {
        const BpeToken_ token = bpe->tokens[bpe->pairs.made[rank]];
        for (uint32_t i = 1; i < token.length; i++) {
            bpe_join_bytes_(rules, token.text[i - 1], token.text[i], 1);
        }
    }
    for (int before = 0; splits && before < 256; before++) {
        bpe_join_bytes_(rules, before, ' ', 0);
    }
    if (!(rules->pattern.digits & BPE_NO_CUTS)) { // an unknown character may be one with the next
        const int blank = !bpe_is_joined_(rules, ' ') && bpe->byte_ids[' '] != bpe->unknown,
                  line = !bpe_is_joined_(rules, '\n') && bpe->byte_ids['\n'] != bpe->unknown;
        rules->pattern.digits |= (blank ? BPE_BLANK_CUTS : 0) | (line ? BPE_LINE_CUTS : 0);
    }
}

// Prints a token as SentencePiece spells it.
static inline void bpe_print_sentence_token_(BpeToken_ token, FILE* file) {
    if (token.kind == BPE_BYTE) {
        fprintf(file, "<0x%02X>", token.text[0]);
    }
    for (uint32_t i = 0; i < token.length && token.kind != BPE_BYTE; i++) {
        const int is_blank = token.kind == BPE_TOKEN && token.text[i] == ' ';
        fwrite(is_blank ? BPE_BLANK_SPELLED : (const char*)token.text + i, 1, is_blank ? BPE_BLANK_BYTES_ : 1,
               file);
    }
}

// Calls `on` for each way to make a token of two others, from left to right.
typedef struct {
    const Bpe* bpe;
    void (*on)(void* context, BpeListed_ merge);
    void* context;
} BpeWays_;

static inline void bpe_each_way_(const BpeWays_* ways, int id) {
    const BpeToken_ token = ways->bpe->tokens[id];
    const char* text = (const char*)token.text;
    for (uint32_t i = 1; i < token.length; i++) {
        if ((token.text[i] & 0xC0) == 0x80) {
            continue;
        }
        const BpeListed_ merge = {bpe_find(ways->bpe, text, i),
                                  bpe_find(ways->bpe, text + i, token.length - i), id, 0};
        if (merge.left >= 0 && merge.right >= 0) {
            ways->on(ways->context, merge);
        }
    }
}

#endif
