/*
json.h -- JSON (RFC 8259): writes strings, and reads any text strictly.

Writing: JSON text must be UTF-8, but our strings may not be: a file name can have any bytes, and a
model may stop in the middle of a character. A byte that belongs to no valid character is printed as
U+FFFD, the replacement character, so the result always parses. Where the bytes matter, as in file
names, byte 0xNN is printed as \udcNN, and json_bytes restores it. Python reads it as os.fsencode
expects ("surrogateescape", PEP 383).

Reading: a JsonReader steps through a text value by value. The caller asks for the value it expects
next, so nothing is allocated. If the text has something else, the function returns 0 and `error`
has the place and what was wanted. Strings are decoded in place, in the caller's copy of the text:

    JsonReader r = json_reader("config.json", text, bytes, error);
    JsonWalk walk = json_walk(&r, '{');
    const char* key;
    while (json_step(&walk, &key)) {
        walk.ok = json_skip(&r); // or json_natural(&r, ...) and so on, by key
    }
    ok = walk.ok && json_end(&r);
*/
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    JSON_MAX_NAME = 511,      // longest name that json_name accepts
    JSON_MAX_DEPTH = 1 << 16, // deepest nesting of objects and arrays, a bit of memory each
};

// ---- writing ----

// Returns the length of the UTF-8 character at the start of text[0 .. left), 0 if it is invalid.
// RFC 3629: overlong forms, surrogates and values above U+10FFFF are invalid.
size_t json_utf8_length(const unsigned char* text, size_t left);

// Prints text[0 .. length) as a JSON string with quotes. It may contain zero bytes.
void json_print_string(FILE* file, const char* text, size_t length);

// Prints text of any bytes without loss: a byte that is not UTF-8 becomes half a surrogate pair.
void json_print_bytes(FILE* file, const char* text, size_t length);

// ---- reading ----

typedef struct {
    const char* path;    // for errors
    char* error;         // of ERROR_BYTES
    unsigned char* text; // decoded in place: no character is longer than its escape
    size_t bytes, at;
    size_t first; // offset of the text in its file
} JsonReader;

JsonReader json_reader(const char* path, char* text, size_t bytes, char* error);

// Sets a syntax error with its place; returns 0.
int json_unexpected(JsonReader* text, const char* wanted);

// Returns the next character that is not a blank, or -1 at the end.
int json_peek(JsonReader* text);

// Steps over the character c.
int json_take(JsonReader* text, char c);

// Sets *string to a terminated string in `text`; fails if it contains a zero.
int json_string(JsonReader* text, const char** string);

// Reads a string printed by json_print_bytes, with its original bytes.
int json_bytes(JsonReader* text, const char** string);

// Reads any string, which may contain zeros: for other programs' text.
int json_text(JsonReader* text, const char** string, size_t* length);

// Reads a string that can be printed in an error.
int json_name(JsonReader* text, const char** name);

typedef enum { JSON_FIRST, JSON_NEXT } JsonPlace;

// Inside an object: as json_element, and reads the next key and its colon.
int json_member(JsonReader* text, JsonPlace which, const char** key);

// Reads a member whose key may be any string.
int json_text_member(JsonReader* text, JsonPlace which, const char** key, size_t* length);

// Inside an array: returns 1 before the next element, 0 after the closing bracket, -1 after an
// error.
int json_element(JsonReader* text, JsonPlace which);

// A walk through an object or an array.
typedef struct {
    JsonReader* text;
    char open;       // '{' or '['
    JsonPlace place; // of the next step
    int ok;          // the caller clears it where a value cannot be read; that ends the walk
} JsonWalk;

// Starts a walk through what must start with `open`.
JsonWalk json_walk(JsonReader* text, char open);

// Moves to the next value. Returns 0 at the end, or after an error: then walk->ok is 0. `key` is
// set in objects; NULL in arrays.
int json_step(JsonWalk* walk, const char** key);

// Moves to the next member of an object, whose key may be any string.
int json_text_step(JsonWalk* walk, const char** key, size_t* length);

// True if only blanks follow.
int json_end(JsonReader* text);

// Reads a whole number that is not negative.
int json_natural(JsonReader* text, size_t* value);

// Reads an array of at most `max` such numbers.
int json_naturals(JsonReader* text, size_t* values, int max, int* count);

// Reads a number, in double precision.
int json_number(JsonReader* text, double* value);

// Reads true or false.
int json_bool(JsonReader* text, int* value);

// Steps over any value.
int json_skip(JsonReader* text);

#ifdef __cplusplus
}
#endif

#ifdef JSON_IMPLEMENTATION

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/utf8.h"

size_t json_utf8_length(const unsigned char* text, size_t left) {
    uint32_t character = 0;
    const size_t length = left == 0 ? 0 : text[0] < 0x80 ? 1 : (size_t)utf8_decode(text, left, &character);
    return character == UTF8_INVALID ? 0 : length;
}

// Prints a string; `bad` is the format of a byte that belongs to no character.
static void json_print_(FILE* file, const char* text, size_t length, const char* bad) {
    static const char special[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";
    fputc('"', file);
    for (size_t i = 0, used; i < length; i += used ? used : 1) {
        const unsigned char c = (unsigned char)text[i];
        const char* escape = c ? strchr(special, c) : NULL;
        used = json_utf8_length((const unsigned char*)text + i, length - i);
        if (escape) {
            fprintf(file, "\\%c", letter[escape - special]);
        } else if (c < 0x20) {
            fprintf(file, "\\u%04x", c);
        } else if (used == 0) {
            fprintf(file, bad, c);
        } else {
            fwrite(text + i, 1, used, file);
        }
    }
    fputc('"', file);
}

void json_print_string(FILE* file, const char* text, size_t length) {
    json_print_(file, text, length, "\\ufffd");
}

void json_print_bytes(FILE* file, const char* text, size_t length) {
    json_print_(file, text, length, "\\udc%02x");
}

// ---- reading ----

JsonReader json_reader(const char* path, char* text, size_t bytes, char* error) {
    const JsonReader reader = {path, error, (unsigned char*)text, bytes, 0, 0};
    return reader;
}

int json_unexpected(JsonReader* text, const char* wanted) {
    const size_t place = text->first + text->at;
    const unsigned c = text->at < text->bytes ? text->text[text->at] : 0;
    if (text->at >= text->bytes) {
        return error_set(text->error, text->path, "byte %zu: found the end of the text, wanted %s", place,
                         wanted);
    }
    return error_set(text->error, text->path,
                     c >= ' ' && c < 0x7F ? "byte %zu: found '%c', wanted %s"
                                          : "byte %zu: found the byte 0x%02x, wanted %s",
                     place, c, wanted);
}

int json_peek(JsonReader* text) {
    while (text->at < text->bytes && text->text[text->at] && strchr(" \t\r\n", text->text[text->at])) {
        text->at++;
    }
    return text->at < text->bytes ? text->text[text->at] : -1;
}

int json_take(JsonReader* text, char c) {
    const char wanted[4] = {'\'', c, '\'', '\0'};
    if (json_peek(text) != c) {
        return json_unexpected(text, wanted);
    }
    text->at++;
    return 1;
}

// Returns the value of the four hexadecimal digits at a position, or -1.
static int json_hex_(const JsonReader* text, size_t at) {
    int value = 0;
    for (size_t i = 0; i < 4; i++) {
        static const char digits[] = "0123456789abcdefABCDEF";
        const char* digit =
            at + i < text->bytes && text->text[at + i] ? strchr(digits, text->text[at + i]) : NULL;
        if (!digit) {
            return -1;
        }
        const int index = (int)(digit - digits);
        value = value << 4 | (index < 16 ? index : index - 6);
    }
    return value;
}

// Characters a string may have, besides those of C strings.
typedef enum { JSON_C_STRING_, JSON_C_BYTES_, JSON_ANY_TEXT_ } JsonText_;

// Decodes \uXXXX, or two of them for a character above U+FFFF. Half a pair becomes U+FFFD in any
// text.
static int json_unicode_(JsonReader* text, JsonText_ kind, unsigned char** out) {
    const int first = json_hex_(text, text->at + 2);
    const int pair = first >= 0xD800 && first <= 0xDBFF && text->at + 7 < text->bytes &&
                     text->text[text->at + 6] == '\\' && text->text[text->at + 7] == 'u';
    const int second = pair ? json_hex_(text, text->at + 8) : -1;
    const int is_pair = second >= 0xDC00 && second <= 0xDFFF, is_half = first >= 0xD800 && first <= 0xDFFF;
    const int is_hole = first == 0 || (is_half && !is_pair);
    // as json_print_bytes writes it
    if (kind == JSON_C_BYTES_ && first >= 0xDC80 && first <= 0xDCFF) {
        *(*out)++ = (unsigned char)(first & 0xFF);
        text->at += 6;
        return 1;
    }
    if (first < 0 || (kind != JSON_ANY_TEXT_ && is_hole)) {
        return json_unexpected(text, "\\u and four digits of a character that is not zero, or a pair");
    }
    *out += utf8_encode(is_pair ? 0x10000u + ((uint32_t)(first - 0xD800) << 10 | (uint32_t)(second - 0xDC00))
                        : is_half ? 0xFFFDu
                                  : (uint32_t)first,
                        *out);
    text->at += is_pair ? 12 : 6;
    return 1;
}

// Decodes one character of a string.
static int json_character_(JsonReader* text, JsonText_ kind, unsigned char** out) {
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    const unsigned char* from = text->text + text->at;
    const size_t left = text->bytes - text->at;
    if (*from < 0x20) {
        return json_unexpected(text, "no control character in a string");
    }
    if (*from == '\\' && left > 1 && from[1] == 'u') {
        return json_unicode_(text, kind, out);
    }
    if (*from == '\\') {
        const char* letter = left > 1 && from[1] ? strchr(letters, from[1]) : NULL;
        text->at += letter ? 2 : 1;
        if (!letter) {
            return json_unexpected(text, "one of \"\\/bfnrtu after a backslash");
        }
        *(*out)++ = (unsigned char)meanings[letter - letters];
        return 1;
    }
    const size_t length = json_utf8_length(from, left);
    if (length == 0) {
        return json_unexpected(text, "UTF-8");
    }
    memmove(*out, from, length);
    *out += length;
    text->at += length;
    return 1;
}

// Counts the bytes at `at` that stand for themselves: ASCII, but no control character, quote or
// backslash. Takes eight at a time, because corpora are read through it: a byte equal to `c` is 0
// after the XOR, and among bytes with a clear top bit, only 0 gets it set by subtracting 1.
static size_t json_plain_(const unsigned char* at, size_t left) {
    const uint64_t each = 0x0101010101010101, high = 0x80 * each;
    size_t n = 0;
    for (; left - n >= 8; n += 8) {
        uint64_t word;
        memcpy(&word, at + n, sizeof(word));
        const uint64_t quote = word ^ '"' * each, backslash = word ^ '\\' * each;
        const uint64_t special = (word | (word - ' ' * each) | (quote - each) | (backslash - each)) & high;
        if (special) {
            // a borrow only reaches higher bytes, so the lowest match is right
            return n + (size_t)__builtin_ctzll(special) / 8;
        }
    }
    while (n < left && at[n] >= ' ' && at[n] < 0x80 && at[n] != '"' && at[n] != '\\') {
        n++;
    }
    return n;
}

static int json_text_(JsonReader* text, JsonText_ kind, const char** string, size_t* length) {
    if (!json_take(text, '"')) {
        return 0;
    }
    unsigned char* out = text->text + text->at;
    *string = (const char*)out;
    while (text->at < text->bytes && text->text[text->at] != '"') {
        const size_t plain = json_plain_(text->text + text->at, text->bytes - text->at);
        memmove(out, text->text + text->at, plain);
        out += plain;
        text->at += plain;
        if (plain == 0 && !json_character_(text, kind, &out)) {
            return 0;
        }
    }
    if (text->at >= text->bytes) {
        return json_unexpected(text, "the end of a string");
    }
    *length = (size_t)(out - (const unsigned char*)*string);
    *out = '\0'; // at the closing quote at the latest
    text->at++;
    return 1;
}

int json_string(JsonReader* text, const char** string) {
    size_t length;
    return json_text_(text, JSON_C_STRING_, string, &length);
}

int json_bytes(JsonReader* text, const char** string) {
    size_t length;
    return json_text_(text, JSON_C_BYTES_, string, &length);
}

int json_text(JsonReader* text, const char** string, size_t* length) {
    return json_text_(text, JSON_ANY_TEXT_, string, length);
}

int json_name(JsonReader* text, const char** name) {
    json_peek(text);
    const size_t begin = text->at;
    if (!json_string(text, name)) {
        return 0;
    }
    const size_t length = strlen(*name);
    for (size_t i = 0; i < length; i++) {
        if ((unsigned char)(*name)[i] < ' ' || (*name)[i] == 0x7F) {
            text->at = begin;
            return json_unexpected(text, "a name without control characters");
        }
    }
    if (length < 1 || length > JSON_MAX_NAME) {
        return error_set(text->error, text->path, "byte %zu: a name of %zu bytes, wanted 1 to %d",
                         text->first + begin, length, JSON_MAX_NAME);
    }
    return 1;
}

// Steps inside an object or array, after its bracket. Returns 1 before the next member or element,
// 0 after the closing bracket, -1 after an error.
static int json_next_(JsonReader* text, JsonPlace which, char closing) {
    const char wanted[] = {'\'', ',', '\'', ' ', 'o', 'r', ' ', '\'', closing, '\'', '\0'};
    const int c = json_peek(text);
    if (c == closing) {
        text->at++;
        return 0;
    }
    if (which == JSON_NEXT) {
        if (c != ',') {
            json_unexpected(text, wanted);
            return -1;
        }
        text->at++;
    }
    return 1;
}

int json_member(JsonReader* text, JsonPlace which, const char** key) {
    const int more = json_next_(text, which, '}');
    return more <= 0 ? more : json_name(text, key) && json_take(text, ':') ? 1 : -1;
}

int json_text_member(JsonReader* text, JsonPlace which, const char** key, size_t* length) {
    const int more = json_next_(text, which, '}');
    return more <= 0 ? more : json_text(text, key, length) && json_take(text, ':') ? 1 : -1;
}

int json_element(JsonReader* text, JsonPlace which) { return json_next_(text, which, ']'); }

JsonWalk json_walk(JsonReader* text, char open) {
    return (JsonWalk){text, open, JSON_FIRST, json_take(text, open)};
}

// Ends a walk at the end or after an error.
static int json_stepped_(JsonWalk* walk, int more) {
    walk->place = JSON_NEXT;
    walk->ok = more >= 0;
    return more > 0;
}

int json_step(JsonWalk* walk, const char** key) {
    return walk->ok && json_stepped_(walk, walk->open == '{' ? json_member(walk->text, walk->place, key)
                                                             : json_element(walk->text, walk->place));
}

int json_text_step(JsonWalk* walk, const char** key, size_t* length) {
    return walk->ok && json_stepped_(walk, json_text_member(walk->text, walk->place, key, length));
}

int json_end(JsonReader* text) {
    return json_peek(text) == -1 || json_unexpected(text, "nothing but blanks");
}

static int json_is_digit_(const JsonReader* text) {
    return text->at < text->bytes && text->text[text->at] >= '0' && text->text[text->at] <= '9';
}

int json_natural(JsonReader* text, size_t* value) {
    const int zero = json_peek(text) == '0';
    const size_t begin = text->at;
    *value = 0;
    if (!json_is_digit_(text)) {
        return json_unexpected(text, "a whole number");
    }
    for (; json_is_digit_(text); text->at++) {
        if (zero && text->at > begin) {
            return json_unexpected(text, "no digits after a leading 0");
        }
        if (__builtin_mul_overflow(*value, (size_t)10, value) ||
            __builtin_add_overflow(*value, (size_t)(text->text[text->at] - '0'), value)) {
            return error_set(text->error, text->path, "byte %zu: found a number above %zu",
                             text->first + begin, SIZE_MAX);
        }
    }
    return 1;
}

int json_naturals(JsonReader* text, size_t* values, int max, int* count) {
    *count = 0;
    if (!json_take(text, '[')) {
        return 0;
    }
    if (json_peek(text) == ']') {
        text->at++;
        return 1;
    }
    while (*count < max) {
        if (!json_natural(text, &values[*count])) {
            return 0;
        }
        ++*count;
        const int c = json_peek(text);
        if (c != ',' && c != ']') {
            return json_unexpected(text, "',' or ']'");
        }
        text->at++;
        if (c == ']') {
            return 1;
        }
    }
    return error_set(text->error, text->path, "byte %zu: found more than %d numbers", text->first + text->at,
                     max);
}

static int json_digits_(JsonReader* text) {
    if (!json_is_digit_(text)) {
        return json_unexpected(text, "a digit");
    }
    while (json_is_digit_(text)) {
        text->at++;
    }
    return 1;
}

// Steps over a character of `set`, if one is next.
static int json_one_of_(JsonReader* text, const char* set) {
    const int c = text->at < text->bytes ? text->text[text->at] : 0;
    const int is_one = c && strchr(set, c);
    text->at += is_one ? 1 : 0;
    return is_one;
}

static int json_skip_number_(JsonReader* text) {
    json_one_of_(text, "-");
    if (!(json_one_of_(text, "0") || json_digits_(text))) {
        return 0;
    }
    if (json_one_of_(text, ".") && !json_digits_(text)) {
        return 0;
    }
    if (json_one_of_(text, "eE")) {
        json_one_of_(text, "+-");
        return json_digits_(text);
    }
    return 1;
}

static int json_skip_word_(JsonReader* text) {
    static const char* const words[3] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        const size_t length = strlen(words[i]);
        if (text->bytes - text->at >= length && memcmp(text->text + text->at, words[i], length) == 0) {
            text->at += length;
            return 1;
        }
    }
    return json_unexpected(text, "a value");
}

int json_number(JsonReader* text, double* value) {
    *value = 0;
    char digits[64];
    json_peek(text);
    const size_t begin = text->at;
    if (!json_skip_number_(text)) {
        return 0;
    }
    const size_t length = text->at - begin;
    if (length >= sizeof(digits)) {
        text->at = begin;
        return json_unexpected(text, "a number of fewer digits");
    }
    memcpy(digits, text->text + begin, length);
    digits[length] = '\0';
    *value = strtod(digits, NULL);
    return 1;
}

int json_bool(JsonReader* text, int* value) {
    *value = json_peek(text) == 't';
    if (*value || json_peek(text) == 'f') {
        return json_skip_word_(text);
    }
    return json_unexpected(text, "true or false");
}

// Steps over a value that is neither object nor array.
static int json_skip_scalar_(JsonReader* text) {
    const char* ignored;
    size_t length;
    const int c = json_peek(text);
    return c == '"'                           ? json_text(text, &ignored, &length)
           : c == '-' || json_is_digit_(text) ? json_skip_number_(text)
                                              : json_skip_word_(text);
}

// Stack of open objects and arrays: one bit each, 1 for an object.
typedef struct {
    uint64_t is_object[JSON_MAX_DEPTH / 64];
    size_t depth;
} JsonNesting_;

// Steps over a value, or over the bracket that opens one. Sets *place for its contents.
static int json_skip_begin_(JsonReader* text, JsonNesting_* nesting, JsonPlace* place) {
    const int c = json_peek(text);
    *place = JSON_NEXT;
    if (c != '{' && c != '[') {
        return json_skip_scalar_(text);
    }
    if (nesting->depth == JSON_MAX_DEPTH) {
        return json_unexpected(text, "values nested less deeply");
    }
    uint64_t* word = &nesting->is_object[nesting->depth / 64];
    const size_t bit = nesting->depth++ % 64;
    *word = (bit ? *word & ~((uint64_t)1 << bit) : 0) | (uint64_t)(c == '{') << bit;
    *place = JSON_FIRST;
    text->at++;
    return 1;
}

int json_skip(JsonReader* text) {
    JsonNesting_ nesting;
    JsonPlace place;
    nesting.depth = 0;
    int ok = json_skip_begin_(text, &nesting, &place);
    while (ok && nesting.depth > 0) {
        const char* key;
        size_t length;
        const size_t last = nesting.depth - 1;
        const int is_object = nesting.is_object[last / 64] >> last % 64 & 1;
        const int more = is_object ? json_text_member(text, place, &key, &length) : json_element(text, place);
        if (more == 0) {
            nesting.depth--;
            place = JSON_NEXT;
        }
        ok = more == 0 || (more > 0 && json_skip_begin_(text, &nesting, &place));
    }
    return ok;
}

#endif // JSON_IMPLEMENTATION

#endif
