/*
text_wrap.h -- text of a model on the screen: lines of words, and nothing that could reprogram a terminal.

defines: text_wrap_print
*/
#ifndef LLMC_TEXT_WRAP_H
#define LLMC_TEXT_WRAP_H

#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Prints text of `bytes`, indented, its lines broken between words so that none is wider than `columns`. Each byte that is
// no UTF-8, and each control character, becomes a question mark.
void text_wrap_print(FILE* screen, const char* text, size_t bytes, size_t columns);

#ifdef __cplusplus
}
#endif

#ifdef TEXT_WRAP_IMPLEMENTATION

#include <string.h>

#include "llmc/base/printable.h"

// Columns of the word that starts at a blank, or at the start of the text: blanks, then other characters.
static size_t text_wrap_columns_(const char* text, size_t bytes) {
    size_t i = 0, columns = 0;
    for (; i < bytes && text[i] == ' '; i++, columns++) {
    }
    for (; i < bytes && text[i] != ' ' && text[i] != '\n'; i++) {
        columns += (text[i] & 0xC0) != 0x80; // not the second or a later byte of a character
    }
    return columns;
}

void text_wrap_print(FILE* screen, const char* text, size_t bytes, size_t columns) {
    static const char indent[] = "    ";
    size_t column = strlen(indent);
    fputs(indent, screen);
    for (size_t i = 0; i < bytes;) {
        const size_t length = text[i] == '\t' ? 1 : printable_length(text + i, bytes - i);
        const int is_break = text[i] == ' ' && column + text_wrap_columns_(text + i, bytes - i) > columns;
        if (is_break || text[i] == '\n') {
            fprintf(screen, "\n%s", indent);
            column = strlen(indent);
        } else {
            fprintf(screen, "%.*s", length ? (int)length : 1, length ? text + i : "?");
            column++;
        }
        i += length ? length : 1;
    }
    fputc('\n', screen);
}

#endif // TEXT_WRAP_IMPLEMENTATION

#endif
