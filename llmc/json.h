/*
json.h -- strings as JSON (RFC 8259).

JSON text is UTF-8, and what we print need not be: file names are any bytes, and a model may stop in the
middle of a character. A byte that belongs to no valid character is printed as U+FFFD, the replacement
character, so the result always parses.

needs:   nothing
defines: json_print_string
*/
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// Bytes of the UTF-8 character at the start of text[0 .. left), 0 if there is none. RFC 3629: only the
// shortest form of a character counts, surrogates and what lies above U+10FFFF do not.
static inline size_t json_utf8_length_(const unsigned char* text, size_t left) {
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000}; // character of so many bytes
    const unsigned lead = text[0];
    const size_t length = lead < 0x80 ? 1 : lead < 0xC0 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (length == 0 || lead > 0xF4 || length > left) {
        return 0;
    }
    uint32_t character = length == 1 ? lead : lead & (0xFFu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 0;
        }
        character = character << 6 | (text[i] & 0x3Fu);
    }
    const int surrogate = character >= 0xD800 && character <= 0xDFFF;
    return character >= smallest[length] && character <= 0x10FFFF && !surrogate ? length : 0;
}

// Prints text[0 .. length) as a JSON string with its quotes. Zero bytes are characters like any other.
static inline void json_print_string(FILE* file, const char* text, size_t length) {
    static const char special[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";
    fputc('"', file);
    for (size_t i = 0, used; i < length; i += used ? used : 1) {
        const unsigned char c = (unsigned char)text[i];
        const char* escape = c ? strchr(special, c) : NULL;
        used = json_utf8_length_((const unsigned char*)text + i, length - i);
        if (escape) {
            fprintf(file, "\\%c", letter[escape - special]);
        } else if (c < 0x20) {
            fprintf(file, "\\u%04x", c);
        } else if (used == 0) {
            fputs("\\ufffd", file);
        } else {
            fwrite(text + i, 1, used, file);
        }
    }
    fputc('"', file);
}

#endif
