/*
text_wrap.h -- prints text on the screen in lines of words that fit, without anything that could
reprogram a terminal.
*/
#ifndef LLMC_TEXT_WRAP_H
#define LLMC_TEXT_WRAP_H

#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Text being printed. Its last word waits until it is complete.
typedef struct {
    FILE* file;
    const char* indent; // before each line but the first
    size_t columns;     // width of the screen; 0: prints the text as it is
    size_t column;      // column where the waiting word starts
    char waiting[512];  // blanks and a word
    size_t bytes, width, blanks;
} TextWrap;

// Returns the width of the file's terminal; 0 if it is no terminal, or does not say.
size_t text_wrap_columns(FILE* file);

// Starts a text at the left edge of the screen. The indent must stay valid.
void text_wrap_begin(TextWrap* wrap, FILE* file, size_t columns, const char* indent);

// Prints whole characters, and breaks lines between words. Bytes that are not UTF-8, and control
// characters, become question marks.
void text_wrap_put(TextWrap* wrap, const char* text, size_t bytes);

// Prints the last word.
void text_wrap_end(TextWrap* wrap);

// Prints a whole text with all its lines indented, and ends the last one.
void text_wrap_print(FILE* file, const char* text, size_t bytes, size_t columns);

// Prints lines of a message; what does not fit the terminal's width is continued on indented lines.
void text_wrap_lines(FILE* file, const char* text);

#ifdef __cplusplus
}
#endif

#ifdef TEXT_WRAP_IMPLEMENTATION

#include <string.h>
#include <sys/ioctl.h>

#include "llmc/base/printable.h"

#define TEXT_WRAP_INDENT_ "    "

size_t text_wrap_columns(FILE* file) {
    struct winsize size;
    return ioctl(fileno(file), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

void text_wrap_begin(TextWrap* wrap, FILE* file, size_t columns, const char* indent) {
    memset(wrap, 0, sizeof(*wrap));
    wrap->file = file;
    wrap->columns = columns;
    wrap->indent = indent;
}

static void text_wrap_break_(TextWrap* wrap) {
    fprintf(wrap->file, "\n%s", wrap->indent);
    wrap->column = strlen(wrap->indent);
}

// Prints the waiting word, on a new line instead of its first blank if it does not fit.
static void text_wrap_flush_(TextWrap* wrap) {
    const int is_break = wrap->blanks > 0 && wrap->column + wrap->width > wrap->columns;
    if (is_break) {
        text_wrap_break_(wrap);
    }
    fwrite(wrap->waiting + is_break, 1, wrap->bytes - (size_t)is_break, wrap->file);
    wrap->column += wrap->width - (size_t)is_break;
    wrap->bytes = wrap->width = wrap->blanks = 0;
}

static void text_wrap_add_(TextWrap* wrap, const char* character, size_t length) {
    memcpy(wrap->waiting + wrap->bytes, character, length);
    wrap->bytes += length;
    wrap->width++;
    wrap->blanks += *character == ' ';
}

void text_wrap_put(TextWrap* wrap, const char* text, size_t bytes) {
    if (wrap->columns == 0) {
        fwrite(text, 1, bytes, wrap->file);
        return;
    }
    for (size_t i = 0; i < bytes;) {
        const size_t length = text[i] == '\t' ? 1 : printable_length(text + i, bytes - i);
        const int is_next = text[i] == ' ' && wrap->width > wrap->blanks; // another word starts
        if (text[i] == '\n' || is_next || wrap->width >= wrap->columns ||
            wrap->bytes + 4 > sizeof(wrap->waiting)) {
            text_wrap_flush_(wrap);
        }
        if (text[i] == '\n') {
            text_wrap_break_(wrap);
        } else {
            text_wrap_add_(wrap, length ? text + i : "?", length ? length : 1);
        }
        i += length ? length : 1;
    }
}

void text_wrap_end(TextWrap* wrap) { text_wrap_flush_(wrap); }

void text_wrap_print(FILE* file, const char* text, size_t bytes, size_t columns) {
    TextWrap wrap;
    text_wrap_begin(&wrap, file, columns, TEXT_WRAP_INDENT_);
    fputs(TEXT_WRAP_INDENT_, file);
    wrap.column = strlen(TEXT_WRAP_INDENT_);
    text_wrap_put(&wrap, text, bytes);
    text_wrap_end(&wrap);
    fputc('\n', file);
}

void text_wrap_lines(FILE* file, const char* text) {
    const size_t columns = text_wrap_columns(file);
    while (*text) {
        const size_t length = strcspn(text, "\n"), end = text[length] == '\n';
        TextWrap wrap;
        text_wrap_begin(&wrap, file, columns, TEXT_WRAP_INDENT_);
        text_wrap_put(&wrap, text, length);
        text_wrap_end(&wrap);
        fwrite(text + length, 1, end, file);
        text += length + end;
    }
}

#endif // TEXT_WRAP_IMPLEMENTATION

#endif
