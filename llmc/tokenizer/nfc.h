/*
nfc.h -- Unicode's normalization form C: characters are decomposed, the marks after each are sorted
by their combining class, and what can be composed is (https://unicode.org/reports/tr15).

    nfc_open     tables for fast look-up (nfc_tables.h); read-only afterwards: threads may share
    nfc_apply    normalizes a text

A text is left alone but for its parts with a character that may change: one that is decomposed, has
a combining class, or may be composed with the one before it. Such a part reaches from the character
before to the next one that cannot change. So nearly all text is only looked at.
*/
#ifndef LLMC_NFC_H
#define LLMC_NFC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    // most bytes that a byte becomes: U+1D160 has 4 bytes, and is decomposed into 12
    NFC_MOST_GROWTH = 3,
    NFC_BITS_ = 12, // of the table of composites
};

typedef struct {
    unsigned char* changes; // bits of the characters below `end`: 1 if one may change
    uint32_t end;
    uint64_t* composites; // (2^NFC_BITS_) first, second, composite, 21 bits each; open addressing
} Nfc;

// Text that grows, and characters on their way to it.
typedef struct {
    unsigned char* text;
    size_t bytes, room;
    uint32_t* characters; // with the combining class in the highest byte
    size_t count, characters_room;
} NfcText;

void nfc_open(Nfc* nfc);

void nfc_close(Nfc* nfc);

// True if a character may change, or may be composed with the one before it.
int nfc_may_change(const Nfc* nfc, uint32_t c);

// Normalizes a text into out->text. Returns 0, and sets nothing, if it is normal already.
int nfc_apply(const Nfc* nfc, const unsigned char* text, size_t bytes, NfcText* out);

void nfc_text_close(NfcText* out);

#ifdef __cplusplus
}
#endif

#ifdef NFC_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/utf8.h"
#include "llmc/tokenizer/nfc_tables.h"

// ---- tables ----

// Hangul syllables: an initial, a vowel, and a final or none.
enum {
    NFC_S_ = 0xAC00,
    NFC_L_ = 0x1100,
    NFC_V_ = 0x1161,
    NFC_T_ = 0x11A7, // one before the first
    NFC_LS_ = 19,
    NFC_VS_ = 21,
    NFC_TS_ = 28,
    NFC_SS_ = NFC_LS_ * NFC_VS_ * NFC_TS_,
    NFC_VALUE_ = 0x1FFFFF, // of a character with its class
};

static size_t nfc_slot_(uint32_t first, uint32_t second) {
    const uint64_t pair = (uint64_t)first << 21 | second;
    return (size_t)(pair * 0x9E3779B97F4A7C15 >> (64 - NFC_BITS_));
}

static void nfc_set_change_(Nfc* nfc, uint32_t c) { nfc->changes[c / 8] |= (unsigned char)(1 << c % 8); }

static void nfc_add_composite_(Nfc* nfc, const uint32_t row[3]) {
    size_t i = nfc_slot_(row[1], row[2]);
    while (nfc->composites[i] != 0) {
        i = (i + 1) % ((size_t)1 << NFC_BITS_);
    }
    nfc->composites[i] = (uint64_t)row[1] << 42 | (uint64_t)row[2] << 21 | row[0];
    nfc_set_change_(nfc, row[2]);
}

void nfc_open(Nfc* nfc) {
    const uint32_t last_class = nfc_classes[NFC_CLASSES - 1][1],
                   last_single = nfc_singles[NFC_SINGLES - 1][0];
    nfc->end = (last_class > last_single ? last_class : last_single) + 1; // above what pairs end in
    nfc->changes = (unsigned char*)check_alloc(nfc->end / 8 + 1, 1, "normalization");
    nfc->composites = (uint64_t*)check_alloc((size_t)1 << NFC_BITS_, sizeof(uint64_t), "normalization");
    for (int i = 0; i < NFC_PAIRS; i++) {
        nfc_add_composite_(nfc, nfc_pairs[i]);
    }
    for (int i = 0; i < NFC_SINGLES; i++) {
        nfc_set_change_(nfc, nfc_singles[i][0]);
    }
    for (int i = 0; i < NFC_CLASSES; i++) {
        for (uint32_t c = nfc_classes[i][0]; c <= nfc_classes[i][1]; c++) {
            nfc_set_change_(nfc, c);
        }
    }
    for (uint32_t c = NFC_V_; c < NFC_V_ + NFC_VS_; c++) {
        nfc_set_change_(nfc, c);
    }
    for (uint32_t c = NFC_T_ + 1; c < NFC_T_ + NFC_TS_; c++) {
        nfc_set_change_(nfc, c);
    }
}

void nfc_close(Nfc* nfc) {
    free(nfc->changes);
    free(nfc->composites);
    memset(nfc, 0, sizeof(*nfc));
}

void nfc_text_close(NfcText* out) {
    free(out->text);
    free(out->characters);
    memset(out, 0, sizeof(*out));
}

int nfc_may_change(const Nfc* nfc, uint32_t c) { return c < nfc->end && nfc->changes[c / 8] >> c % 8 & 1; }

// Returns the row with this first number, or the last before it; -1: none.
static int nfc_row_(const uint32_t (*rows)[3], int count, uint32_t c) {
    int low = 0, high = count; // rows below `low` start at or before c
    while (low < high) {
        const int middle = (low + high) / 2;
        *(rows[middle][0] <= c ? &low : &high) = rows[middle][0] <= c ? middle + 1 : middle;
    }
    return low - 1;
}

static uint32_t nfc_class_(uint32_t c) {
    const int row = nfc_row_(nfc_classes, NFC_CLASSES, c);
    return row >= 0 && c <= nfc_classes[row][1] ? nfc_classes[row][2] : 0;
}

// Returns what a character is decomposed into, or NULL.
static const uint32_t* nfc_parts_(uint32_t c) {
    const int pair = nfc_row_(nfc_pairs, NFC_PAIRS, c), single = nfc_row_(nfc_singles, NFC_SINGLES, c);
    return pair >= 0 && nfc_pairs[pair][0] == c         ? &nfc_pairs[pair][1]
           : single >= 0 && nfc_singles[single][0] == c ? &nfc_singles[single][1]
                                                        : NULL;
}

// Returns the composite of two characters, or 0.
static uint32_t nfc_composite_(const Nfc* nfc, uint32_t first, uint32_t second) {
    const uint32_t l = first - NFC_L_, v = second - NFC_V_, s = first - NFC_S_, t = second - NFC_T_;
    if (l < NFC_LS_ && v < NFC_VS_) {
        return NFC_S_ + (l * NFC_VS_ + v) * NFC_TS_;
    }
    if (s < NFC_SS_ && s % NFC_TS_ == 0 && 0 < t && t < NFC_TS_) {
        return first + t;
    }
    const uint64_t pair = (uint64_t)first << 21 | second;
    for (size_t i = nfc_slot_(first, second); nfc->composites[i] != 0;
         i = (i + 1) % ((size_t)1 << NFC_BITS_)) {
        if (nfc->composites[i] >> 21 == pair) {
            return (uint32_t)(nfc->composites[i] & NFC_VALUE_);
        }
    }
    return 0;
}

// ---- one part of a text ----

// Appends a character, decomposed.
static void nfc_decompose_(NfcText* out, uint32_t c) {
    const uint32_t* parts = nfc_parts_(c);
    if (parts) {
        nfc_decompose_(out, parts[0]);
        if (parts[1]) {
            nfc_decompose_(out, parts[1]);
        }
        return;
    }
    out->characters = (uint32_t*)check_reserve(out->characters, &out->characters_room, out->count + 3,
                                               sizeof(uint32_t), "normalization");
    const uint32_t s = c - NFC_S_;
    if (s < NFC_SS_) {
        out->characters[out->count++] = NFC_L_ + s / NFC_TS_ / NFC_VS_;
        out->characters[out->count++] = NFC_V_ + s / NFC_TS_ % NFC_VS_;
        if (s % NFC_TS_) {
            out->characters[out->count++] = NFC_T_ + s % NFC_TS_;
        }
        return;
    }
    out->characters[out->count++] = nfc_class_(c) << 24 | c;
}

// Sorts n marks by class, stably; `room` also has space for n characters.
static void nfc_sort_(uint32_t* marks, uint32_t* room, size_t n) {
    size_t ends[256] = {0};
    for (size_t i = 0; i < n; i++) {
        ends[marks[i] >> 24]++;
    }
    for (int order = 1; order < 256; order++) {
        ends[order] += ends[order - 1];
    }
    memcpy(room, marks, n * sizeof(*marks));
    for (size_t i = n; i-- > 0;) {
        marks[--ends[room[i] >> 24]] = room[i];
    }
}

// Sorts each run of marks.
static void nfc_order_(NfcText* out) {
    out->characters = (uint32_t*)check_reserve(out->characters, &out->characters_room, 2 * out->count,
                                               sizeof(uint32_t), "normalization");
    for (size_t begin = 0, end; begin < out->count; begin = end + 1) {
        int is_sorted = 1;
        for (end = begin; end < out->count && out->characters[end] >> 24; end++) {
            is_sorted &= end == begin || out->characters[end - 1] >> 24 <= out->characters[end] >> 24;
        }
        if (!is_sorted) {
            nfc_sort_(out->characters + begin, out->characters + out->count, end - begin);
        }
    }
}

// Composes characters with the last of class 0 before them, unless one of the same class or of
// class 0 stands between.
static void nfc_compose_(const Nfc* nfc, NfcText* out) {
    size_t count = 0, starter = SIZE_MAX;
    for (size_t i = 0; i < out->count; i++) {
        const uint32_t c = out->characters[i], order = c >> 24;
        const int is_free = starter != SIZE_MAX &&
                            (count == starter + 1 || (order > 0 && out->characters[count - 1] >> 24 < order));
        const uint32_t composite =
            is_free ? nfc_composite_(nfc, out->characters[starter], c & NFC_VALUE_) : 0;
        if (composite) {
            out->characters[starter] = composite;
            continue;
        }
        starter = order == 0 ? count : starter;
        out->characters[count++] = c;
    }
    out->count = count;
}

static void nfc_append_(NfcText* out, const unsigned char* text, size_t bytes) {
    if (bytes == 0) {
        return;
    }
    out->text = (unsigned char*)check_reserve(out->text, &out->room, out->bytes + bytes, 1, "normalization");
    memcpy(out->text + out->bytes, text, bytes);
    out->bytes += bytes;
}

// Appends a part of valid characters, normalized.
static void nfc_append_normal_(const Nfc* nfc, NfcText* out, const unsigned char* text, size_t bytes) {
    out->count = 0;
    for (size_t at = 0; at < bytes;) {
        uint32_t c = text[at];
        at += c < 0x80 ? 1 : (size_t)utf8_decode(text + at, bytes - at, &c);
        nfc_decompose_(out, c);
    }
    nfc_order_(out);
    nfc_compose_(nfc, out);
    for (size_t i = 0; i < out->count; i++) {
        unsigned char character[4];
        nfc_append_(out, character, utf8_encode(out->characters[i] & NFC_VALUE_, character));
    }
}

// ---- a text ----

enum {
    NFC_LEAD_ = 0xCC,    // of U+0300, the first character that may change
    NFC_LOOKED_AT_ = 32, // bytes looked at together
};

// Returns the highest of the next bytes.
static unsigned char nfc_highest_(const unsigned char text[NFC_LOOKED_AT_]) {
    unsigned char highest = 0;
    for (int i = 0; i < NFC_LOOKED_AT_; i++) {
        highest = text[i] > highest ? text[i] : highest;
    }
    return highest;
}

// Returns the next character from text[at] on that may change, or the end of the text.
static size_t nfc_next_(const Nfc* nfc, const unsigned char* text, size_t bytes, size_t at) {
    while (at < bytes) {
        const size_t end = bytes - at < NFC_LOOKED_AT_ ? bytes : at + NFC_LOOKED_AT_;
        if (end - at == NFC_LOOKED_AT_ && nfc_highest_(text + at) < NFC_LEAD_) {
            at = end;
        }
        while (at < end) {
            uint32_t c = 0;
            const size_t n = text[at] < NFC_LEAD_ ? 1 : (size_t)utf8_decode(text + at, bytes - at, &c);
            if (nfc_may_change(nfc, c)) {
                return at;
            }
            at += n;
        }
    }
    return bytes;
}

// Returns the next character from text[at] on that cannot change, or the end of the text.
static size_t nfc_end_(const Nfc* nfc, const unsigned char* text, size_t bytes, size_t at) {
    for (;;) {
        uint32_t c = 0;
        const size_t n = at == bytes || text[at] < 0x80 ? 0 : (size_t)utf8_decode(text + at, bytes - at, &c);
        if (!nfc_may_change(nfc, c)) {
            return at;
        }
        at += n;
    }
}

// Returns the start of the part with text[at], no earlier than `begin`: the character before, if it
// is valid.
static size_t nfc_begin_(const unsigned char* text, size_t begin, size_t at) {
    if (at == begin) {
        return at;
    }
    const size_t before = begin + utf8_before(text + begin, at - begin);
    return text[before] < 0x80 || at - before > 1 ? before : at;
}

int nfc_apply(const Nfc* nfc, const unsigned char* text, size_t bytes, NfcText* out) {
    size_t at = 0, next = nfc_next_(nfc, text, bytes, 0);
    if (next == bytes) {
        return 0;
    }
    out->bytes = 0;
    while (next < bytes) {
        const size_t begin = nfc_begin_(text, at, next), end = nfc_end_(nfc, text, bytes, next);
        nfc_append_(out, text + at, begin - at);
        nfc_append_normal_(nfc, out, text + begin, end - begin);
        at = end;
        next = nfc_next_(nfc, text, bytes, end);
    }
    nfc_append_(out, text + at, bytes - at);
    return 1;
}

#endif // NFC_IMPLEMENTATION

#endif
