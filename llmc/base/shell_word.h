/*
shell_word.h -- words of a command, as a shell reads them back.

A word of harmless characters stays as it is, others are in single quotes. A word with bytes that
must not go to a terminal (printable.h) is escaped as bash, zsh and ksh read it: $'a\033b'.
*/
#ifndef LLMC_SHELL_WORD_H
#define LLMC_SHELL_WORD_H

#include <limits.h>
#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Prints a word.
void shell_print(FILE* file, const char* word);

// Prints a command of several words, NULL after the last one.
void shell_print_command(FILE* file, char* const* words);

// A word in a message.
typedef struct {
    char text[PATH_MAX];
} ShellWord;

// Returns the word; one that is too long for a path is cut.
ShellWord shell_word(const char* word);

#ifdef __cplusplus
}
#endif

#ifdef SHELL_WORD_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/printable.h"
#include "llmc/base/text_buffer.h"

// Returns true if all of the text may go to a terminal. Tabs and newlines do no harm, and every
// shell reads them in quotes.
static int shell_is_printable_(const char* text) {
    size_t left = strlen(text), length = 1;
    for (; left > 0 && length > 0; text += length, left -= length) {
        length = *text == '\t' || *text == '\n' ? 1 : printable_length(text, left);
    }
    return length > 0;
}

// Prints a word with bytes that must not go to a terminal.
static void shell_print_escaped_(FILE* file, const char* text) {
    fputs("$'", file);
    for (size_t left = strlen(text), length; left > 0; text += length, left -= length) {
        length = printable_length(text, left);
        if (length == 0) {
            fprintf(file, "\\%03o", (unsigned char)*text);
            length = 1;
        } else {
            fprintf(file, "%s%.*s", *text == '\'' || *text == '\\' ? "\\" : "", (int)length, text);
        }
    }
    fputc('\'', file);
}

void shell_print(FILE* file, const char* word) {
    const char* plain = "=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./,:+@";
    plain += *word != '-'; // A=b at the start of a command is a setting of the shell's
    if (*word && strspn(word, plain) == strlen(word)) {
        fputs(word, file);
    } else if (!shell_is_printable_(word)) {
        shell_print_escaped_(file, word);
    } else {
        fputc('\'', file);
        for (; *word; word++) {
            if (*word == '\'') {
                fputs("'\\''", file); // close the quotes, an escaped quote, open them again
            } else {
                fputc(*word, file);
            }
        }
        fputc('\'', file);
    }
}

void shell_print_command(FILE* file, char* const* words) {
    for (int i = 0; words[i]; i++) {
        fputs(i > 0 ? " " : "", file);
        shell_print(file, words[i]);
    }
}

ShellWord shell_word(const char* word) {
    ShellWord copy;
    TextBuffer buffer;
    text_buffer_open(&buffer, "a command");
    shell_print(buffer.file, word);
    char* text = text_buffer_close(&buffer);
    snprintf(copy.text, sizeof(copy.text), "%s", text);
    free(text);
    return copy;
}

#endif // SHELL_WORD_IMPLEMENTATION

#endif
