/*
jinja_values.h -- what a template computes with (jinja.h): values and their memory, and how they are
compared, printed, joined and stripped.
*/
#ifndef LLMC_JINJA_VALUES_H
#define LLMC_JINJA_VALUES_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/utf8.h"
#include "llmc/tokenizer/date.h"

enum {
    JINJA_MAX_STEPS_ = 1 << 18, // values and tags of a rendering: templates of today take hundreds
    JINJA_MAX_DEPTH_ = 100,     // nested expressions and blocks
    JINJA_MAX_TEXT_ = 1 << 24,  // bytes of all values
    JINJA_MAX_BYTES_ = 1 << 20, // of a template
    JINJA_ARGS_ = 8,
    JINJA_NAME_ = 48,
};

typedef enum {
    JINJA_UNDEFINED_,
    JINJA_NONE_,
    JINJA_BOOL_,
    JINJA_NUMBER_,
    JINJA_MACRO_, // `number` is where its parameters are
    JINJA_TEXT_,
    JINJA_LIST_,
    JINJA_MAP_
} JinjaKind_;

typedef struct JinjaItems_ JinjaItems_;

typedef struct {
    JinjaKind_ kind;
    long number; // of BOOL and NUMBER
    const char* text;
    size_t length;
    JinjaItems_* items; // of LIST and MAP
} JinjaValue_;

struct JinjaItems_ {
    JinjaValue_* values;
    const char** keys; // NULL in lists
    size_t count, room;
};

typedef struct {
    char text[JINJA_NAME_];
} JinjaName_;

typedef struct {
    JinjaValue_ values[JINJA_ARGS_];
    JinjaName_ names[JINJA_ARGS_]; // "": by place
    int count;
} JinjaArgs_;

typedef struct {
    const char* text; // the template
    size_t bytes, at;
    int skip;        // above 0: tags that are read have no effect
    int starts_line; // the text at `at` starts a line
    int depth, failed;
    size_t steps, used;
    char* error;
    const char* date;  // of strftime_now; NULL: none
    int has_date;      // it was called
    JinjaItems_ scope; // variables; the last of a name counts
    FILE* out;         // of the text, or of a macro's
    void** memory;     // (num_memory) blocks to free
    size_t num_memory;
} Jinja_;

// ---- memory and errors ----

static inline void jinja_fail_(Jinja_* j, const char* what) {
    if (!j->failed) {
        j->failed = 1;
        error_set(j->error, "chat_template", "byte %zu: %s", j->at, what);
    }
}

static inline void* jinja_alloc_(Jinja_* j, size_t bytes) {
    j->used += bytes;
    if (j->used > JINJA_MAX_TEXT_) {
        jinja_fail_(j, "too much text");
        bytes = 1;
    }
    j->memory = (void**)check_grow(j->memory, j->num_memory, sizeof(void*), "a template");
    return j->memory[j->num_memory++] = check_alloc(bytes + 64, 1, "a template");
}

// Counts a step; returns 0 if the rendering has failed or takes too long.
static inline int jinja_step_(Jinja_* j) {
    if (j->steps++ > JINJA_MAX_STEPS_) {
        jinja_fail_(j, "takes too long");
    }
    return !j->failed;
}

// ---- values ----

__attribute__((unused)) static const JinjaValue_ jinja_undefined_ = {JINJA_UNDEFINED_, 0, NULL, 0, NULL};

static inline JinjaValue_ jinja_number_(JinjaKind_ kind, long number) {
    return (JinjaValue_){kind, number, NULL, 0, NULL};
}

static inline JinjaValue_ jinja_bool_(int is_true) { return jinja_number_(JINJA_BOOL_, is_true != 0); }

static inline JinjaValue_ jinja_text_(const char* text, size_t length) {
    return (JinjaValue_){JINJA_TEXT_, 0, text, length, NULL};
}

static inline JinjaValue_ jinja_items_(Jinja_* j, JinjaKind_ kind) {
    JinjaItems_* items = (JinjaItems_*)jinja_alloc_(j, sizeof(JinjaItems_));
    return (JinjaValue_){kind, 0, NULL, 0, items};
}

// Appends a value; `key` is NULL in lists, else it must live as long as the template.
static inline void jinja_add_(Jinja_* j, JinjaItems_* items, const char* key, JinjaValue_ value) {
    if (items->count == items->room) {
        const size_t room = 2 * items->room + 8;
        JinjaValue_* values = (JinjaValue_*)jinja_alloc_(j, room * sizeof(JinjaValue_));
        const char** keys = (const char**)jinja_alloc_(j, room * sizeof(char*));
        if (j->failed) {
            return;
        }
        if (items->count > 0) {
            memcpy(values, items->values, items->count * sizeof(JinjaValue_));
            memcpy(keys, items->keys, items->count * sizeof(char*));
        }
        items->values = values;
        items->keys = keys;
        items->room = room;
    }
    items->keys[items->count] = key;
    items->values[items->count++] = value;
}

// Returns the last value of a key; NULL: none.
static inline JinjaValue_* jinja_find_(const JinjaItems_* items, const char* key, size_t length) {
    for (size_t i = items->count; i > 0; i--) {
        const char* found = items->keys[i - 1];
        if (found && strlen(found) == length && memcmp(found, key, length) == 0) {
            return &items->values[i - 1];
        }
    }
    return NULL;
}

static inline const char* jinja_copy_(Jinja_* j, const char* text, size_t length) {
    char* copy = (char*)jinja_alloc_(j, length + 1);
    if (!j->failed) {
        memcpy(copy, text, length);
    }
    return copy;
}

static inline void jinja_set_(Jinja_* j, JinjaItems_* items, const char* name, JinjaValue_ value) {
    jinja_add_(j, items, jinja_copy_(j, name, strlen(name)), value);
}

static inline int jinja_is_true_(JinjaValue_ v) {
    return v.kind == JINJA_TEXT_                              ? v.length > 0
           : v.kind == JINJA_LIST_ || v.kind == JINJA_MAP_    ? v.items->count > 0
           : v.kind == JINJA_BOOL_ || v.kind == JINJA_NUMBER_ ? v.number != 0
                                                              : 0;
}

static inline int jinja_is_equal_(JinjaValue_ a, JinjaValue_ b) {
    const int are_numbers = (a.kind == JINJA_BOOL_ || a.kind == JINJA_NUMBER_) &&
                            (b.kind == JINJA_BOOL_ || b.kind == JINJA_NUMBER_);
    return are_numbers
               ? a.number == b.number
               : a.kind == b.kind &&
                     (a.kind == JINJA_TEXT_ ? a.length == b.length && memcmp(a.text, b.text, a.length) == 0
                                            : a.items == b.items);
}

// Returns the text of a value as it is printed.
static inline JinjaValue_ jinja_printed_(Jinja_* j, JinjaValue_ v) {
    char number[32];
    switch (v.kind) {
    case JINJA_TEXT_:
        return v;
    case JINJA_UNDEFINED_:
        return jinja_text_("", 0);
    case JINJA_NONE_:
        return jinja_text_("None", 4);
    case JINJA_BOOL_:
        return v.number ? jinja_text_("True", 4) : jinja_text_("False", 5);
    case JINJA_NUMBER_:
        snprintf(number, sizeof(number), "%ld", v.number);
        return jinja_text_(jinja_copy_(j, number, strlen(number)), strlen(number));
    case JINJA_MACRO_:
    case JINJA_LIST_:
    case JINJA_MAP_:
        break;
    }
    jinja_fail_(j, "prints a list or a macro");
    return jinja_text_("", 0);
}

static inline JinjaValue_ jinja_join_(Jinja_* j, JinjaValue_ a, JinjaValue_ b) {
    a = jinja_printed_(j, a);
    b = jinja_printed_(j, b);
    char* text = (char*)jinja_alloc_(j, a.length + b.length);
    if (j->failed) {
        return jinja_undefined_;
    }
    memcpy(text, a.text, a.length);
    memcpy(text + a.length, b.text, b.length);
    return jinja_text_(text, a.length + b.length);
}

// Returns the bytes of the blank that a text starts with; 0: none.
static inline size_t jinja_blank_(const char* text, size_t left) {
    uint32_t c = left ? (unsigned char)text[0] : 0;
    const int length = !left ? 0 : c < 0x80 ? 1 : utf8_decode((const unsigned char*)text, left, &c);
    const int is_blank = left && ((9 <= c && c <= 13) || (0x1C <= c && c <= 0x20) || c == 0x85 || c == 0xA0 ||
                                  c == 0x1680 || (0x2000 <= c && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
                                  c == 0x202F || c == 0x205F || c == 0x3000);
    return is_blank ? (size_t)length : 0;
}

static inline void jinja_strip_left_(const char** text, size_t* length) {
    for (size_t blank; (blank = jinja_blank_(*text, *length)) > 0;) {
        *text += blank;
        *length -= blank;
    }
}

static inline void jinja_strip_right_(const char* text, size_t* length) {
    for (int is_blank = 1; is_blank && *length > 0;) {
        size_t at = *length - 1;
        while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80) {
            at--;
        }
        is_blank = jinja_blank_(text + at, *length - at) == *length - at;
        *length = is_blank ? at : *length;
    }
}

// Removes characters of a set, or blanks, from the ends: 1 the left, 2 the right, 3 both.
static inline JinjaValue_ jinja_stripped_(JinjaValue_ v, const JinjaArgs_* args, int sides) {
    const char* set = args->count > 0 && args->values[0].kind == JINJA_TEXT_ ? args->values[0].text : NULL;
    const size_t n = set ? args->values[0].length : 0;
    if (!set && (sides & 1)) {
        jinja_strip_left_(&v.text, &v.length);
    }
    if (!set && (sides & 2)) {
        jinja_strip_right_(v.text, &v.length);
    }
    while (set && (sides & 1) && v.length > 0 && memchr(set, v.text[0], n)) {
        v.text++;
        v.length--;
    }
    while (set && (sides & 2) && v.length > 0 && memchr(set, v.text[v.length - 1], n)) {
        v.length--;
    }
    return v;
}

// ---- dates ----

// Returns the date in a format of Python's strftime.
static inline JinjaValue_ jinja_date_(Jinja_* j, const JinjaArgs_* args) {
    enum { ROOM = 256 };
    char format[64], *text = (char*)jinja_alloc_(j, ROOM);
    const JinjaValue_ of = args->count > 0 ? args->values[0] : jinja_undefined_;
    snprintf(format, sizeof(format), "%.*s", (int)of.length, of.kind == JINJA_TEXT_ ? of.text : "");
    if (of.length >= sizeof(format) || !date_has_format(format)) {
        jinja_fail_(j, "prints the time of day");
        return jinja_undefined_;
    }
    j->has_date = 1;
    return jinja_text_(text, date_print(text, ROOM, format, j->date));
}

#endif
