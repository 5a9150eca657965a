/*
printable.h -- names and words from outside on a screen, without anything that could reprogram the
terminal.

Not printable are bytes that are not UTF-8, which some terminals interpret, and control characters:
ASCII's, and U+0080 to U+009F (U+009B acts as ESC [).
*/
#ifndef LLMC_PRINTABLE_H
#define LLMC_PRINTABLE_H

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Returns the length of the character at the start of text[0 .. left), or 0 if it is not printable.
// Blanks are printable; tabs and line ends are not.
size_t printable_length(const char* text, size_t left);

// Replaces each byte that is not printable by a question mark. Returns the text.
char* printable(char* text);

// Sets `copy` to the printable text, cut to its room of at least one byte. Returns it.
char* printable_copy(char* copy, size_t room, const char* text);

// Prints as vfprintf would, with unprintable bytes replaced.
void printable_vprint(FILE* file, const char* format, va_list args) __attribute__((format(printf, 2, 0)));

// Prints such a line, and ends it.
void printable_line(FILE* file, const char* format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif

#ifdef PRINTABLE_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/json.h"

size_t printable_length(const char* text, size_t left) {
    const unsigned char* bytes = (const unsigned char*)text;
    const size_t length = json_utf8_length(bytes, left);
    const int is_control = length == 1   ? bytes[0] < ' ' || bytes[0] == 127
                           : length == 2 ? bytes[0] == 0xC2 && bytes[1] < 0xA0
                                         : 0;
    return is_control ? 0 : length;
}

char* printable(char* text) {
    const size_t bytes = strlen(text);
    for (size_t i = 0; i < bytes;) {
        const size_t length = printable_length(text + i, bytes - i);
        if (!length) {
            text[i] = '?';
        }
        i += length ? length : 1;
    }
    return text;
}

char* printable_copy(char* copy, size_t room, const char* text) {
    snprintf(copy, room, "%s", text);
    return printable(copy);
}

void printable_vprint(FILE* file, const char* format, va_list args) {
    char cut[256]; // used if memory runs out
    char* text = NULL;
    va_list again;
    va_copy(again, args);
    if (vasprintf(&text, format, args) < 0) {
        text = NULL;
        vsnprintf(cut, sizeof(cut), format, again);
    }
    va_end(again);
    fputs(printable(text ? text : cut), file);
    free(text);
}

void printable_line(FILE* file, const char* format, ...) {
    va_list args;
    va_start(args, format);
    printable_vprint(file, format, args);
    va_end(args);
    fputc('\n', file);
}

#endif // PRINTABLE_IMPLEMENTATION

#endif
