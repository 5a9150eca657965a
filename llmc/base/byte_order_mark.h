/*
byte_order_mark.h -- the byte order mark that Windows puts at the start of a text. UTF-8's is
skipped; UTF-16's and UTF-32's show that the text is not UTF-8.

    EF BB BF    UTF-8        FF FE 00 00, 00 00 FE FF    UTF-32
    FF FE, FE FF             UTF-16

byte_order_text reads all texts that options name, except the data, which are too long
(token_files.h, documents.h).
*/
#ifndef LLMC_BYTE_ORDER_MARK_H
#define LLMC_BYTE_ORDER_MARK_H

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"

enum { BYTE_ORDER_MARK_BYTES = 4 }; // longest mark

// Sets *skip to the length of UTF-8's mark at the start of the file `path`, or to 0. Returns 0 with
// the error if another mark is found.
static inline int byte_order_mark(const char* path, const char* text, size_t bytes, size_t* skip,
                                  char* error) {
    static const struct {
        size_t bytes;
        char mark[BYTE_ORDER_MARK_BYTES + 1];
        const char* encoding;
    } marks[] = {{3, "\xEF\xBB\xBF", NULL},
                 {4, "\xFF\xFE\0", "UTF-32"},
                 {4, "\0\0\xFE\xFF", "UTF-32"},
                 {2, "\xFF\xFE", "UTF-16"},
                 {2, "\xFE\xFF", "UTF-16"}};
    size_t i = 0, n = sizeof(marks) / sizeof(marks[0]);
    while (i < n && (bytes < marks[i].bytes || memcmp(text, marks[i].mark, marks[i].bytes) != 0)) {
        i++;
    }
    *skip = i == 0 ? marks[0].bytes : 0;
    return i == 0 || i == n ||
           error_set(error, path, "%s, by its byte-order mark; wanted UTF-8: iconv -f %s -t UTF-8",
                     marks[i].encoding, marks[i].encoding);
}

// Reads a file of at most `max` bytes, as file_try_read does, without UTF-8's mark.
static inline int byte_order_text(const char* path, size_t max, char** text, size_t* bytes, char* error) {
    size_t skip = 0;
    if (!file_try_read(path, max, text, bytes, error)) {
        return 0;
    }
    if (!byte_order_mark(path, *text, *bytes, &skip, error)) {
        free(*text);
        return 0;
    }
    *bytes -= skip;
    memmove(*text, *text + skip, *bytes + 1);
    return 1;
}

static inline void byte_order_mark_note(const char* path) {
    printable_line(stderr, "note: %s starts with a byte-order mark, which is skipped", path);
}

#endif
