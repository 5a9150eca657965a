/*
hf_values.h -- readers of values in config.json (hf_config.h): sizes, numbers, and what must have
the one value that we compute. Each returns 0 with text->error set if the value is another one.
*/
#ifndef LLMC_HF_VALUES_H
#define LLMC_HF_VALUES_H

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/json.h"

static inline int hf_read_size(JsonReader* text, int* size) {
    size_t value;
    if (!json_natural(text, &value)) {
        return 0;
    }
    *size = value < INT_MAX ? (int)value : INT_MAX;
    return 1;
}

// Reads a size, which may be 0 only for a window: then the model has none.
static inline int hf_read_counted(JsonReader* text, const char* key, int* size) {
    return hf_read_size(text, size) &&
           (*size > 0 || strcmp(key, "sliding_window") == 0 ||
            error_set(text->error, text->path, "%s is 0, wanted 1 or more, or null", key));
}

static inline int hf_read_positive(JsonReader* text, const char* key, float* value) {
    double number;
    if (!json_number(text, &number)) {
        return 0;
    }
    *value = (float)number;
    return (*value > 0 && isfinite(*value)) ||
           error_set(text->error, text->path, "%s is %g, wanted a positive number", key, number);
}

// Reads a switch that must have the value that we support.
static inline int hf_read_switch(JsonReader* text, const char* key, int wanted) {
    int found;
    if (!json_bool(text, &found)) {
        return 0;
    }
    return found == wanted || error_set(text->error, text->path, "%s is %s, wanted %s", key,
                                        found ? "true" : "false", wanted ? "true" : "false");
}

// Reads null, false or 1: each means that something is not used.
static inline int hf_read_unused(JsonReader* text, const char* key) {
    double number = 0;
    const char first = (char)json_peek(text);
    if (first == 'n' || first == 'f') {
        return json_skip(text);
    }
    const int is_number = (first >= '0' && first <= '9') || first == '-';
    if (is_number && !json_number(text, &number)) {
        return 0;
    }
    return number == 1 || error_set(text->error, text->path,
                                    "%s changes what the model computes, which is not supported", key);
}

// Reads null, 0 or an empty list.
static inline int hf_read_none(JsonReader* text, const char* key) {
    double number = 0;
    const char first = (char)json_peek(text);
    if (first == 'n') {
        return json_skip(text);
    }
    const int is_empty = first == '[' ? json_take(text, '[') && json_element(text, JSON_FIRST) == 0
                                      : json_number(text, &number) && number == 0;
    return is_empty || text->error[0] ||
           error_set(text->error, text->path, "%s changes what the model computes, which is not supported",
                     key);
}

// Reads a number that must have the value that we compute with.
static inline int hf_read_constant(JsonReader* text, const char* key, float wanted) {
    double number;
    return json_number(text, &number) &&
           ((float)number == wanted ||
            error_set(text->error, text->path, "%s is %g, wanted %g", key, number, (double)wanted));
}

// Reads how matrices are stored: null, or in MXFP4.
static inline int hf_read_mxfp4(JsonReader* text, const char* key) {
    const char *name, *method = "";
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &name)) {
        walk.ok = strcmp(name, "quant_method") == 0 ? json_name(text, &method) : json_skip(text);
    }
    return walk.ok && (strcmp(method, "mxfp4") == 0 ||
                       error_set(text->error, text->path, "quant_method of %s is %s, wanted mxfp4", key,
                                 method[0] ? method : "missing"));
}

#endif
