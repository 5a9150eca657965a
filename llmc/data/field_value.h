/*
field_value.h -- the value of a document's field, a text or a number: of JSON lines, of a column of
Parquet, of a filter.
*/
#ifndef LLMC_FIELD_VALUE_H
#define LLMC_FIELD_VALUE_H

#include <stddef.h>

typedef enum { FIELD_MISSING, FIELD_TEXT, FIELD_NUMBER } FieldKind;

// A boolean is the text "true" or "false".
typedef struct {
    FieldKind kind;
    const char* text; // (bytes) not terminated
    size_t bytes;
    double number;
} FieldValue;

#endif
