/*
utf8.h -- the characters of a text that may be any bytes. A byte that belongs to no valid character
counts as one of its own.
*/
#ifndef LLMC_UTF8_H
#define LLMC_UTF8_H

#include <stddef.h>
#include <stdint.h>

#define UTF8_INVALID UINT32_MAX

// Returns the length of the character that starts with `lead` >= 0x80, judging by the lead alone; 0
// if none does.
static inline int utf8_length(unsigned lead) {
    return lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
}

// Returns the length of the non-ASCII character at the start of text[0 .. left), and sets its
// value. Invalid bytes (too long, a surrogate, or above U+10FFFF) count as one byte, UTF8_INVALID.
static inline int utf8_decode(const unsigned char* text, size_t left, uint32_t* value) {
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000}; // by length in bytes
    const int length = utf8_length(text[0]);
    *value = UTF8_INVALID;
    if (length == 0 || (size_t)length > left) {
        return 1;
    }
    uint32_t c = text[0] & (0xFFu >> (length + 1));
    for (int i = 1; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 1;
        }
        c = c << 6 | (text[i] & 0x3Fu);
    }
    if (c < smallest[length] || c > 0x10FFFF || c >> 11 == 0xD800 >> 11) {
        return 1;
    }
    *value = c;
    return length;
}

// Writes a character. Returns its length.
static inline size_t utf8_encode(uint32_t c, unsigned char out[4]) {
    const size_t length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char leads[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = length; i-- > 1; c >>= 6) {
        out[i] = (unsigned char)(0x80 | (c & 0x3F));
    }
    out[0] = (unsigned char)(leads[length] | c);
    return length;
}

// Returns the start of the character that ends before text[at], at > 0: if it is not valid, its
// last byte.
static inline size_t utf8_before(const unsigned char* text, size_t at) {
    uint32_t value;
    for (size_t n = 1; n <= 4 && n <= at; n++) {
        if (text[at - n] >= 0xC0) {
            return (size_t)utf8_decode(text + at - n, n, &value) == n ? at - n : at - 1;
        }
    }
    return at - 1;
}

#endif
