/*
text_buffer.h -- a text printed into memory, which is complete or an error.

open_memstream is not enough: when memory runs out, glibc drops the end of the text, and neither
ferror nor fclose reports it.

    TextBuffer buffer;
    text_buffer_open(&buffer, "the summary");
    fprintf(buffer.file, ...);
    char* text = text_buffer_close(&buffer); // buffer.bytes of it and a zero; the caller frees it
*/
#ifndef LLMC_TEXT_BUFFER_H
#define LLMC_TEXT_BUFFER_H

#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    FILE* file;
    char* text;         // everything flushed from the file's own buffer
    size_t bytes, room; // length; capacity, including the zero
    int is_short;       // memory ran out: the text is incomplete
    const char* what;   // for the message
    // buffer of the file; zeroed first: the memory sanitizer does not see libc write
    char block[1024];
} TextBuffer;

// Open and close a buffer, which must not move in between. If memory runs out, the program ends
// with an error about `what`.
void text_buffer_open(TextBuffer* buffer, const char* what);
char* text_buffer_close(TextBuffer* buffer);

// Return 0 instead, with nothing left to free.
int text_buffer_try_open(TextBuffer* buffer);
int text_buffer_try_close(TextBuffer* buffer);

#ifdef __cplusplus
}
#endif

#ifdef TEXT_BUFFER_IMPLEMENTATION

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "llmc/base/check.h"

// Makes room for `more` bytes and a zero.
static int text_buffer_reserve_(TextBuffer* buffer, size_t more) {
    const size_t wanted = buffer->bytes + more + 1, twice = 2 * buffer->room;
    if (wanted <= buffer->room) {
        return 1;
    }
    const size_t room = wanted > twice ? wanted : twice;
    char* text = (char*)realloc(buffer->text, room);
    if (text) {
        buffer->text = text;
        buffer->room = room;
    }
    return text != NULL;
}

static int text_buffer_add_(TextBuffer* buffer, const char* bytes, size_t count) {
    buffer->is_short = buffer->is_short || !text_buffer_reserve_(buffer, count);
    if (!buffer->is_short) {
        memcpy(buffer->text + buffer->bytes, bytes, count);
        buffer->bytes += count;
        buffer->text[buffer->bytes] = '\0';
    }
    return !buffer->is_short;
}

#ifdef __APPLE__ // and BSD's
static int text_buffer_write_(void* buffer, const char* bytes, int count) {
    return text_buffer_add_((TextBuffer*)buffer, bytes, (size_t)count) ? count : -1;
}

static FILE* text_buffer_file_(TextBuffer* buffer) {
    return funopen(buffer, NULL, text_buffer_write_, NULL, NULL);
}
#else
static ssize_t text_buffer_write_(void* buffer, const char* bytes, size_t count) {
    // 0 is an error here
    return text_buffer_add_((TextBuffer*)buffer, bytes, count) ? (ssize_t)count : 0;
}

static FILE* text_buffer_file_(TextBuffer* buffer) {
    const cookie_io_functions_t functions = {NULL, text_buffer_write_, NULL, NULL};
    return fopencookie(buffer, "w", functions);
}
#endif

int text_buffer_try_open(TextBuffer* buffer) {
    memset(buffer, 0, sizeof(*buffer));
    if (!text_buffer_reserve_(buffer, 0)) {
        return 0;
    }
    buffer->text[0] = '\0';
    buffer->file = text_buffer_file_(buffer);
    if (!buffer->file) {
        free(buffer->text);
        return 0;
    }
    // cannot fail with our own buffer
    setvbuf(buffer->file, buffer->block, _IOFBF, sizeof(buffer->block));
    return 1;
}

int text_buffer_try_close(TextBuffer* buffer) {
    const int is_closed = fclose(buffer->file) == 0;
    buffer->file = NULL;
    if (is_closed && !buffer->is_short) {
        return 1;
    }
    free(buffer->text);
    buffer->text = NULL;
    return 0;
}

void text_buffer_open(TextBuffer* buffer, const char* what) {
    CHECK(text_buffer_try_open(buffer), "%s: no memory for its text", what);
    buffer->what = what;
}

char* text_buffer_close(TextBuffer* buffer) {
    CHECK(text_buffer_try_close(buffer), "%s: no memory for its text", buffer->what);
    return buffer->text;
}

#endif // TEXT_BUFFER_IMPLEMENTATION

#endif
