/*
task_records.h -- the lines of a task's file: JSON objects of one of these forms.

    HellaSwag's     {"ctx": ..., "endings": [...], "label": 3}
    choices         {"query": ..., "choices": [...], "gold": 3}
    schema          {"context_options": [...], "continuation": ..., "gold": 1}    contexts differ
    continuations   {"context": ..., "continuation": ...}

The first line decides the form of all. Other fields are ignored.
*/
#ifndef LLMC_TASK_RECORDS_H
#define LLMC_TASK_RECORDS_H

#include <limits.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TASK_LIST = 128,                 // longest list of texts
    TASK_PLACE_BYTES = PATH_MAX + 32 // room for "file:line"
};

typedef struct {
    const char* text;
    size_t bytes;
} TaskText;

typedef enum { TASK_HELLASWAG, TASK_QUERIES, TASK_SCHEMA, TASK_CONTINUATIONS, TASK_FORMS } TaskForm;

// Known fields of a line; the texts point into the line.
typedef struct {
    unsigned found; // one bit for each
    TaskText context, ending, texts[TASK_LIST];
    int count;
    size_t gold;
} TaskRecord;

typedef struct {
    const char* path;
    char* text;               // of the file
    size_t bytes, at, number; // place of the next line; number of the last one
    TaskForm form;            // of all records; TASK_FORMS before the first
    char* place;              // (TASK_PLACE_BYTES) set to "file:line" of the last record
    char* error;
} TaskRecords;

// Returns true if a text has the first line of a task.
int task_records_is_task(const char* text, size_t bytes);

// Starts to read a text, which it decodes in place.
TaskRecords task_records_open(const char* path, char* text, size_t bytes, char* place, char* error);

// Reads the next record, whose list has two texts or more and the right one. Returns 1, or 0 at the
// end, or -1 with the reason in `error`.
int task_records_next(TaskRecords* r, TaskRecord* record);

#ifdef __cplusplus
}
#endif

#ifdef TASK_RECORDS_IMPLEMENTATION

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/json.h"

// Kinds of fields.
typedef enum { TASK_CONTEXT_, TASK_ENDING_, TASK_TEXTS_, TASK_GOLD_ } TaskFieldKind_;

typedef struct {
    const char* name;
    TaskFieldKind_ kind;
} TaskField_;

enum {
    TASK_CTX_,
    TASK_ENDINGS_FIELD_,
    TASK_LABEL_,
    TASK_QUERY_,
    TASK_CHOICES_,
    TASK_GOLD_FIELD_,
    TASK_OPTIONS_,
    TASK_CONTINUATION_FIELD_,
    TASK_CONTEXT_FIELD_,
    TASK_FIELDS_
};

static const TaskField_ TASK_FIELDS_TABLE_[TASK_FIELDS_] = {
    [TASK_CTX_] = {"ctx", TASK_CONTEXT_},
    [TASK_ENDINGS_FIELD_] = {"endings", TASK_TEXTS_},
    [TASK_LABEL_] = {"label", TASK_GOLD_},
    [TASK_QUERY_] = {"query", TASK_CONTEXT_},
    [TASK_CHOICES_] = {"choices", TASK_TEXTS_},
    [TASK_GOLD_FIELD_] = {"gold", TASK_GOLD_},
    [TASK_OPTIONS_] = {"context_options", TASK_TEXTS_},
    [TASK_CONTINUATION_FIELD_] = {"continuation", TASK_ENDING_},
    [TASK_CONTEXT_FIELD_] = {"context", TASK_CONTEXT_},
};

// Fields of each form.
static const unsigned TASK_WANTED_[TASK_FORMS] = {
    [TASK_HELLASWAG] = 1u << TASK_CTX_ | 1u << TASK_ENDINGS_FIELD_ | 1u << TASK_LABEL_,
    [TASK_QUERIES] = 1u << TASK_QUERY_ | 1u << TASK_CHOICES_ | 1u << TASK_GOLD_FIELD_,
    [TASK_SCHEMA] = 1u << TASK_OPTIONS_ | 1u << TASK_CONTINUATION_FIELD_ | 1u << TASK_GOLD_FIELD_,
    [TASK_CONTINUATIONS] = 1u << TASK_CONTEXT_FIELD_ | 1u << TASK_CONTINUATION_FIELD_,
};

static int task_read_texts_(JsonReader* json, TaskRecord* record) {
    JsonWalk walk = json_walk(json, '[');
    for (record->count = 0; json_step(&walk, NULL);) {
        if (record->count == TASK_LIST) {
            return error_set(json->error, json->path, "more than %d texts in a list", TASK_LIST);
        }
        TaskText* text = &record->texts[record->count++];
        walk.ok = json_text(json, &text->text, &text->bytes);
    }
    return walk.ok;
}

// Reads a number, or a number in quotes.
static int task_read_gold_(JsonReader* json, size_t* gold) {
    const char* text;
    char* end;
    if (json_peek(json) != '"') {
        return json_natural(json, gold);
    }
    if (!json_string(json, &text)) {
        return 0;
    }
    *gold = strtoul(text, &end, 10);
    return (*text >= '0' && *text <= '9' && !*end) ||
           error_set(json->error, json->path, "found \"%.20s\", wanted the number of the right ending", text);
}

static int task_read_field_(JsonReader* json, TaskRecord* record, TaskFieldKind_ kind) {
    switch (kind) {
    case TASK_CONTEXT_:
        return json_text(json, &record->context.text, &record->context.bytes);
    case TASK_ENDING_:
        return json_text(json, &record->ending.text, &record->ending.bytes);
    case TASK_TEXTS_:
        return task_read_texts_(json, record);
    default:
        return task_read_gold_(json, &record->gold);
    }
}

// Returns the known field of this name; TASK_FIELDS_ if none.
static int task_field_(const char* name, size_t length) {
    int i = 0;
    while (i < TASK_FIELDS_ && (strlen(TASK_FIELDS_TABLE_[i].name) != length ||
                                memcmp(TASK_FIELDS_TABLE_[i].name, name, length) != 0)) {
        i++;
    }
    return i;
}

// Reads one line, and decodes its strings in place.
static int task_read_record_(TaskRecords* r, char* line, size_t bytes, TaskRecord* record) {
    JsonReader json = json_reader(r->place, line, bytes, r->error);
    const char* key;
    size_t length;
    JsonWalk walk = json_walk(&json, '{');
    for (record->found = 0; json_text_step(&walk, &key, &length);) {
        const int field = task_field_(key, length);
        walk.ok = field == TASK_FIELDS_ ? json_skip(&json)
                                        : task_read_field_(&json, record, TASK_FIELDS_TABLE_[field].kind);
        record->found |= field < TASK_FIELDS_ ? 1u << field : 0;
    }
    return walk.ok && json_end(&json);
}

// Sets names to a list of these fields.
static void task_name_fields_(char names[256], unsigned fields) {
    size_t used = 0;
    names[0] = '\0';
    for (int i = 0; i < TASK_FIELDS_; i++) {
        if (fields >> i & 1) {
            used += (size_t)snprintf(names + used, 256 - used, "%s%s", used ? ", " : "",
                                     TASK_FIELDS_TABLE_[i].name);
        }
    }
}

// Finds the form of a file from its first line.
static int task_find_form_(TaskRecords* r, const TaskRecord* record) {
    char found[256];
    for (int f = 0; f < TASK_FORMS; f++) {
        if ((record->found & TASK_WANTED_[f]) == TASK_WANTED_[f]) {
            r->form = (TaskForm)f;
            return 1;
        }
    }
    task_name_fields_(found, record->found);
    return error_set(r->error, r->place,
                     "found the fields {%s}, wanted ctx, endings, label; or query, choices, gold; or "
                     "context_options, continuation, gold; or context, continuation",
                     found);
}

// Refuses a record that has not the form of the first one.
static int task_check_form_(TaskRecords* r, const TaskRecord* record) {
    char found[256], wanted[256];
    if (r->form == TASK_FORMS) {
        return task_find_form_(r, record);
    }
    if ((record->found & TASK_WANTED_[r->form]) == TASK_WANTED_[r->form]) {
        return 1;
    }
    task_name_fields_(found, record->found);
    task_name_fields_(wanted, TASK_WANTED_[r->form]);
    return error_set(r->error, r->place, "found the fields {%s}, wanted %s, as on the lines before", found,
                     wanted);
}

static int task_check_list_(TaskRecords* r, const TaskRecord* record) {
    if (record->count < 2) {
        return error_set(r->error, r->place, "%d to choose from, wanted at least 2", record->count);
    }
    return record->gold < (size_t)record->count ||
           error_set(r->error, r->place, "the right one is number %zu, wanted 0 to %d", record->gold,
                     record->count - 1);
}

int task_records_is_task(const char* text, size_t bytes) {
    char place[TASK_PLACE_BYTES], error[ERROR_BYTES];
    TaskRecord record;
    const char* end = (const char*)memchr(text, '\n', bytes);
    const size_t length = end ? (size_t)(end - text) : bytes;
    char* line = (char*)check_alloc(length + 1, 1, "a line");
    memcpy(line, text, length);
    TaskRecords records = {"", line, length, 0, 0, TASK_FORMS, place, error};
    place[0] = '\0';
    const int is_task =
        task_read_record_(&records, line, length, &record) && task_find_form_(&records, &record);
    free(line);
    return is_task;
}

TaskRecords task_records_open(const char* path, char* text, size_t bytes, char* place, char* error) {
    const TaskRecords records = {path, text, bytes, 0, 0, TASK_FORMS, place, error};
    return records;
}

int task_records_next(TaskRecords* r, TaskRecord* record) {
    while (r->at < r->bytes) {
        char* line = r->text + r->at;
        char* end = (char*)memchr(line, '\n', r->bytes - r->at);
        const size_t length = end ? (size_t)(end - line) : r->bytes - r->at;
        r->at += length + 1;
        snprintf(r->place, TASK_PLACE_BYTES, "%s:%zu", r->path, ++r->number);
        if (strspn(line, " \t\r") < length) {
            const int ok = task_read_record_(r, line, length, record) && task_check_form_(r, record) &&
                           (r->form == TASK_CONTINUATIONS || task_check_list_(r, record));
            return ok ? 1 : -1;
        }
    }
    return 0;
}

#endif // TASK_RECORDS_IMPLEMENTATION

#endif
