/*
options_values.h -- the value of an option: read from text, written as text, and its legal range.

In these functions `options` is the struct that a row's offset refers to.
*/
#ifndef LLMC_OPTIONS_VALUES_H
#define LLMC_OPTIONS_VALUES_H

#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the value as text that reads back as the same value: the string itself, or `buffer`.
const char* option_text(const void* options, const OptionRow* row, char buffer[OPTION_TEXT_BYTES]);

// Sets an option from text. Returns 0 if the text is not a legal value.
int option_set(void* options, const OptionRow* row, const char* text);

// Returns the legal values: "1 to 1048576 sequences", "cosine|linear|constant|wsd", "FILE".
const char* option_wanted(const OptionRow* row, char buffer[OPTION_TEXT_BYTES]);

// Returns the legal values for --help, without limits that nobody reaches: "any", ">= 0 steps".
const char* option_wanted_briefly(const OptionRow* row, char buffer[OPTION_TEXT_BYTES]);

// Returns true if the option's value is a whole number.
int option_is_whole(const OptionRow* row);

// Returns true if the text is a whole number.
int option_is_digits(const char* text);

#ifdef __cplusplus
}
#endif

#ifdef OPTIONS_VALUES_IMPLEMENTATION

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/number_text.h"

// Returns the start of word `index` of "zero|one|two" and sets *length to its length; NULL if the
// list is shorter.
static const char* option_word_(const char* words, int index, size_t* length) {
    for (; index > 0 && words; index--) {
        words = strchr(words, '|');
        words = words ? words + 1 : NULL;
    }
    *length = words ? strcspn(words, "|") : 0;
    return words;
}

// Returns the value of an INT, CHOICE, SWITCH, COUNT or FLOAT row. A double holds all of them
// exactly.
static double option_number_(const void* options, const OptionRow* row) {
    const void* field = (const char*)options + row->offset;
    return row->type == OPTION_COUNT   ? (double)*(const int64_t*)field
           : row->type == OPTION_FLOAT ? (double)*(const float*)field
                                       : *(const int*)field;
}

const char* option_text(const void* options, const OptionRow* row, char buffer[OPTION_TEXT_BYTES]) {
    const void* field = (const char*)options + row->offset;
    if ((row->flags & AUTO_) && option_number_(options, row) == OPTION_AUTO) {
        return "auto";
    }
    switch (row->type) {
    case OPTION_STRING:
        return *(const char* const*)field;
    case OPTION_LIST:
        return ((const OptionList*)field)->count ? ((const OptionList*)field)->text[0] : "";
    case OPTION_SEED:
        snprintf(buffer, OPTION_TEXT_BYTES, "%" PRIu64, *(const uint64_t*)field);
        return buffer;
    case OPTION_INT:
    case OPTION_COUNT:
        snprintf(buffer, OPTION_TEXT_BYTES, "%.0f", option_number_(options, row));
        return buffer;
    case OPTION_FLOAT:
        return number_exact((float)option_number_(options, row), buffer);
    default: { // a word of the row's list
        size_t length;
        const char* word = option_word_(row->unit, *(const int*)field, &length);
        assert(word && length < OPTION_TEXT_BYTES);
        snprintf(buffer, OPTION_TEXT_BYTES, "%.*s", (int)length, word);
        return buffer;
    }
    }
}

const char* option_wanted(const OptionRow* row, char buffer[OPTION_TEXT_BYTES]) {
    switch (row->type) {
    case OPTION_STRING:
    case OPTION_LIST:
        return *row->unit ? row->unit : "text";
    case OPTION_SEED:
        return "0 to 18446744073709551615";
    case OPTION_SWITCH:
    case OPTION_CHOICE:
        return row->unit;
    case OPTION_FLAG:
        return "";
    default:
        if (row->flags & (ABOVE_ | BELOW_)) {
            snprintf(buffer, OPTION_TEXT_BYTES, "a number %s %.5g and %s %.5g%s%.4s",
                     row->flags & ABOVE_ ? "above" : "of at least", row->min,
                     row->flags & BELOW_ ? "below" : "at most", row->max, *row->unit ? " " : "", row->unit);
            return buffer;
        }
        snprintf(buffer, OPTION_TEXT_BYTES, "%.15g to %.15g%s%s", row->min, row->max, *row->unit ? " " : "",
                 row->unit);
        return buffer;
    }
}

const char* option_wanted_briefly(const OptionRow* row, char buffer[OPTION_TEXT_BYTES]) {
    const int is_number = row->type == OPTION_INT || row->type == OPTION_COUNT || row->type == OPTION_FLOAT;
    if (row->type == OPTION_SEED) {
        return "any";
    }
    if (!is_number) {
        return option_wanted(row, buffer);
    }
    if (row->max != OPTION_UNLIMITED && row->max < 1e12) {
        snprintf(buffer, OPTION_TEXT_BYTES, "%s%.15g to %s%.15g%s%s", row->flags & ABOVE_ ? "above " : "",
                 row->min, row->flags & BELOW_ ? "below " : "", row->max, *row->unit ? " " : "", row->unit);
        return buffer;
    }
    snprintf(buffer, OPTION_TEXT_BYTES, "%s %.15g%s%s", row->flags & ABOVE_ ? ">" : ">=", row->min,
             *row->unit ? " " : "", row->unit);
    return buffer;
}

int option_is_whole(const OptionRow* row) { return row->type == OPTION_INT || row->type == OPTION_COUNT; }

int option_is_digits(const char* text) {
    const char* digits = text + (*text == '-');
    return *digits && strspn(digits, "0123456789") == strlen(digits);
}

// Reads the number of an INT, COUNT or FLOAT row. Returns 0 if it is illegal or no number in
// decimal digits: blanks, hexadecimal, nan and inf are refused. The bounds are compared with the
// rounded float that will be stored.
static int option_read_number_(const OptionRow* row, const char* text, double* value) {
    const char* legal = row->type == OPTION_FLOAT ? "0123456789+-.eE" : "0123456789-";
    char* end;
    errno = 0;
    *value = row->type == OPTION_FLOAT ? strtof(text, &end) : (double)strtoll(text, &end, 10);
    return *text && !*end && errno == 0 && strspn(text, legal) == strlen(text) &&
           (row->flags & ABOVE_ ? *value > row->min : *value >= row->min) &&
           (row->flags & BELOW_ ? *value < row->max : *value <= row->max);
}

static int option_is_auto_(const OptionRow* row, const char* text) {
    return ((row->flags & AUTO_) && strcmp(text, "auto") == 0) ||
           ((row->flags & MINUS_1_) && strcmp(text, "-1") == 0);
}

static int option_set_number_(void* options, const OptionRow* row, const char* text) {
    void* field = (char*)options + row->offset;
    double value = OPTION_AUTO;
    if (!option_is_auto_(row, text) && !option_read_number_(row, text, &value)) {
        return 0;
    }
    switch (row->type) {
    case OPTION_INT:
        *(int*)field = (int)value;
        break;
    case OPTION_COUNT:
        *(int64_t*)field = (int64_t)value;
        break;
    default:
        *(float*)field = (float)value;
        break;
    }
    return 1;
}

static int option_set_seed_(uint64_t* field, const char* text) {
    errno = 0;
    *field = strtoull(text, NULL, 10);
    return *text && strspn(text, "0123456789") == strlen(text) && errno == 0;
}

static int option_set_word_(int* field, const char* words, const char* text) {
    const char* word;
    size_t length;
    for (int i = 0; (word = option_word_(words, i, &length)) != NULL; i++) {
        if (strlen(text) == length && memcmp(text, word, length) == 0) {
            *field = i;
            return 1;
        }
    }
    return 0;
}

// Returns true for a switch, and for a choice that is a switch with more words.
static int option_is_switch_(const OptionRow* row) {
    return row->type == OPTION_SWITCH || strncmp(row->unit, "off|on|", 7) == 0;
}

// Appends to a list. The default, "", adds nothing.
static void option_add_(OptionList* list, const OptionRow* row, const char* text) {
    if (list->count == OPTION_LIST_MAX) {
        die_usage("--%s is given more than %d times", row->name, OPTION_LIST_MAX);
    }
    list->text[list->count] = text;
    list->count += text[0] != '\0';
}

int option_set(void* options, const OptionRow* row, const char* text) {
    void* field = (char*)options + row->offset;
    switch (row->type) {
    case OPTION_STRING:
        *(const char**)field = text;
        return 1;
    case OPTION_LIST:
        option_add_((OptionList*)field, row, text);
        return 1;
    case OPTION_SEED:
        return option_set_seed_((uint64_t*)field, text);
    case OPTION_SWITCH:
    case OPTION_CHOICE:
    case OPTION_FLAG:
        if (option_is_auto_(row, text)) {
            *(int*)field = OPTION_AUTO;
            return 1;
        }
        return option_set_word_((int*)field, row->unit, text) ||
               (option_is_switch_(row) && option_set_word_((int*)field, "0|1", text));
    default:
        return option_set_number_(options, row, text);
    }
}

#endif // OPTIONS_VALUES_IMPLEMENTATION

#endif
