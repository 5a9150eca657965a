/*
filters.h -- conditions on the fields of a document: FIELD ORDER VALUE.

    score >= 3    lang = en    meta.source != "Common Crawl"    is_adult = false

FIELD names a field of JSON lines or a column of Parquet; dots lead into nested objects. ORDER is
one of < <= > >= = !=. A VALUE that is written as a number is compared with numbers, in double
precision; any other, and any in quotes, with texts, byte by byte. The texts of booleans are true
and false.

A field that is absent or null, or of the other kind, is missing: no condition on it holds.
*/
#ifndef LLMC_FILTERS_H
#define LLMC_FILTERS_H

#include "llmc/data/field_value.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FILTERS_MAX = 16, FILTER_BYTES = 500 }; // bytes of a condition

typedef struct {
    const char* condition; // as the user wrote it; borrowed
    char* field;
    int order; // index of FILTER_ORDERS_
    FieldValue value;
} Filter;

typedef struct {
    Filter list[FILTERS_MAX];
    int count;
} Filters;

typedef enum { FILTER_HOLDS, FILTER_FAILS, FILTER_MISSING } FilterResult;

// Adds a condition. Returns 0 with the error if it is malformed.
int filters_add(Filters* filters, const char* condition, char* error);

// Returns the result of a condition for its field's value.
FilterResult filter_result(const Filter* filter, const FieldValue* value);

void filters_close(Filters* filters);

#ifdef __cplusplus
}
#endif

#ifdef FILTERS_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

// Orders, and for each whether a field below, equal to or above the value holds.
static const struct {
    char text[3];
    int holds[3];
} FILTER_ORDERS_[] = {
    {"<=", {1, 1, 0}}, {">=", {0, 1, 1}}, {"!=", {1, 0, 1}},
    {"<", {1, 0, 0}},  {">", {0, 0, 1}},  {"=", {0, 1, 0}},
};
enum { FILTER_NUM_ORDERS_ = sizeof(FILTER_ORDERS_) / sizeof(FILTER_ORDERS_[0]) };

static int filter_order_(const char* text) {
    int i = 0;
    while (i < FILTER_NUM_ORDERS_ &&
           strncmp(text, FILTER_ORDERS_[i].text, strlen(FILTER_ORDERS_[i].text)) != 0) {
        i++;
    }
    return i;
}

// Sets the value from text[0 .. bytes). Returns 0 if it is none.
static int filter_value_(FieldValue* value, const char* text, size_t bytes) {
    char* end;
    const int is_quoted = bytes >= 2 && text[0] == '"' && text[bytes - 1] == '"';
    value->text = text + is_quoted;
    value->bytes = bytes - 2 * (size_t)is_quoted;
    value->number = strtod(text, &end);
    const int is_number = end == text + bytes && bytes > 0 && strspn(text, "+-.0123456789eE") >= bytes;
    value->kind = is_number ? FIELD_NUMBER : FIELD_TEXT;
    return is_number ? isfinite(value->number) : is_quoted || (bytes > 0 && !memchr(text, '"', bytes));
}

int filters_add(Filters* filters, const char* condition, char* error) {
    static const char blanks[] = " \t";
    const char *begin = condition + strspn(condition, blanks), *end = condition + strlen(condition);
    const char* at = begin + strcspn(begin, "<>=!");
    const int order = filter_order_(at);
    size_t length = (size_t)(at - begin);
    for (; length > 0 && strchr(blanks, begin[length - 1]); length--) {
    }
    assert(filters->count < FILTERS_MAX);
    Filter* filter = &filters->list[filters->count];
    if (end - condition > FILTER_BYTES) {
        return error_set(error, "--filter", "a condition of %td bytes, wanted at most %d", end - condition,
                         FILTER_BYTES);
    }
    if (order < FILTER_NUM_ORDERS_ && length > 0) {
        at += strlen(FILTER_ORDERS_[order].text);
        at += strspn(at, blanks);
        for (; end > at && strchr(blanks, end[-1]); end--) {
        }
        if (!strchr("<>=!", *at) && filter_value_(&filter->value, at, (size_t)(end - at))) {
            filter->condition = condition;
            filter->order = order;
            filter->field = strndup(begin, length);
            CHECK(filter->field, "no memory for a filter");
            filters->count++;
            return 1;
        }
    }
    return error_set(error, "--filter", "found '%s', wanted FIELD < <= > >= = or != VALUE: 'score >= 3'",
                     condition);
}

// Returns a number below, equal to or above 0, as a is to b.
static int filter_compare_(const FieldValue* a, const FieldValue* b) {
    if (a->kind == FIELD_NUMBER) {
        return (a->number > b->number) - (a->number < b->number);
    }
    const size_t n = a->bytes < b->bytes ? a->bytes : b->bytes;
    const int order = n ? memcmp(a->text, b->text, n) : 0;
    return order ? order : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

FilterResult filter_result(const Filter* filter, const FieldValue* value) {
    if (value->kind != filter->value.kind || (value->kind == FIELD_NUMBER && isnan(value->number))) {
        return FILTER_MISSING;
    }
    const int order = filter_compare_(value, &filter->value), side = (order > 0) - (order < 0);
    return FILTER_ORDERS_[filter->order].holds[1 + side] ? FILTER_HOLDS : FILTER_FAILS;
}

void filters_close(Filters* filters) {
    for (int i = 0; i < filters->count; i++) {
        free(filters->list[i].field);
    }
    filters->count = 0;
}

#endif // FILTERS_IMPLEMENTATION

#endif
