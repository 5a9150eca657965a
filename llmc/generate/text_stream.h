/*
text_stream.h -- turns tokens into text, piece by piece: whole UTF-8 characters, up to a stop
string.

A token may end inside a character or inside a stop string. Bytes that may still become one are held
back until more follow, or the text has ended. Bytes that belong to no character become U+FFFD.
*/
#ifndef LLMC_TEXT_STREAM_H
#define LLMC_TEXT_STREAM_H

#include <stddef.h>

#include "llmc/setup/options.h"
#include "llmc/log/text_wrap.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char* bytes; // text so far, without what follows a stop string
    size_t count, capacity;
    size_t shown;           // bytes already printed by text_stream_print
    const OptionList* stop; // strings that end the text; NULL: none
    int is_stopped;         // a stop string has ended it
} TextStream;

// Open and close a stream; `stop` must stay valid.
void text_stream_open(TextStream* stream, const OptionList* stop);
void text_stream_close(TextStream* stream);

// Starts another text.
void text_stream_begin(TextStream* stream);

// Appends the bytes of a token. If they complete a stop string, cuts the text before it and sets
// is_stopped.
void text_stream_add(TextStream* stream, const char* bytes, size_t count);

typedef enum { TEXT_GOES_ON, TEXT_ENDS } TextPlace;

// Prints everything new that can no longer change; at the end of the text, all of it.
void text_stream_print(TextStream* stream, TextWrap* wrap, TextPlace place);

#ifdef __cplusplus
}
#endif

#ifdef TEXT_STREAM_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/json.h"

void text_stream_open(TextStream* stream, const OptionList* stop) {
    memset(stream, 0, sizeof(*stream));
    stream->stop = stop;
}

void text_stream_close(TextStream* stream) { free(stream->bytes); }

void text_stream_begin(TextStream* stream) {
    stream->count = stream->shown = 0;
    stream->is_stopped = 0;
}

// Cuts the text before the first stop string that ends after byte `from`.
static void text_stream_cut_(TextStream* stream, size_t from) {
    const size_t count = stream->count;
    for (int i = 0; stream->stop && i < stream->stop->count; i++) {
        const char* stop = stream->stop->text[i];
        const size_t length = strlen(stop), overlap = from < length - 1 ? from : length - 1;
        const char* start = stream->bytes + from - overlap;
        const char* found = (const char*)memmem(start, count - from + overlap, stop, length);
        if (found) {
            const size_t at = (size_t)(found - stream->bytes);
            stream->count = at < stream->count ? at : stream->count;
            stream->is_stopped = 1;
        }
    }
}

void text_stream_add(TextStream* stream, const char* bytes, size_t count) {
    const size_t from = stream->count;
    if (count == 0) { // bytes may be NULL then
        return;
    }
    stream->bytes = (char*)check_reserve(stream->bytes, &stream->capacity, from + count, 1, "text");
    memcpy(stream->bytes + from, bytes, count);
    stream->count += count;
    text_stream_cut_(stream, from);
}

// Counts the bytes at the end that may be the start of a stop string.
static size_t text_stream_pending_(const TextStream* stream) {
    const size_t left = stream->count - stream->shown;
    size_t pending = 0;
    for (int i = 0; stream->stop && i < stream->stop->count; i++) {
        const char* stop = stream->stop->text[i];
        for (size_t n = strlen(stop) - 1; n > pending; n--) {
            if (n <= left && memcmp(stream->bytes + stream->count - n, stop, n) == 0) {
                pending = n;
            }
        }
    }
    return pending;
}

// True if `left` bytes may be the start of an incomplete character.
static int text_stream_is_part_(const unsigned char* text, size_t left) {
    static const unsigned char rest[2][3] = {{0x80, 0x80, 0x80}, {0xBF, 0xBF, 0xBF}}; // least, most
    for (int most = 0; most < 2; most++) {
        for (size_t more = 1; left < 4 && more <= 4 - left; more++) {
            unsigned char character[4];
            memcpy(character, text, left);
            memcpy(character + left, rest[most], more);
            if (json_utf8_length(character, left + more) == left + more) {
                return 1;
            }
        }
    }
    return 0;
}

void text_stream_print(TextStream* stream, TextWrap* wrap, TextPlace place) {
    const unsigned char* text = (const unsigned char*)stream->bytes;
    const size_t end = stream->count - (place == TEXT_ENDS ? 0 : text_stream_pending_(stream));
    while (stream->shown < end) {
        const size_t at = stream->shown, left = end - at, length = json_utf8_length(text + at, left);
        if (length == 0 && place == TEXT_GOES_ON && text_stream_is_part_(text + at, stream->count - at)) {
            return;
        }
        text_wrap_put(wrap, length ? (const char*)text + at : "\xEF\xBF\xBD", length ? length : 3);
        stream->shown += length ? length : 1;
    }
}

#endif // TEXT_STREAM_IMPLEMENTATION

#endif
