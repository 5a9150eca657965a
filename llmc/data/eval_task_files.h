/*
eval_task_files.h -- reads tasks (eval_tasks.h) from files. The contents of a file decide its
format:

    llm.c's .bin      int32 magic, version, examples, ... (256 words); then for each example, all
                      uint16: 65535, its bytes, its number, the right ending, 4, the tokens of the
                      context, and of each of 4 endings, each after its number of tokens
    JSON lines        one example per line, of HellaSwag or DCLM (task_records.h)

Context and ending are encoded separately. One blank stands between them and belongs to the ending;
HellaSwag's are taken as they are, with a blank between them. No blank follows a line break. An
empty context becomes the end-of-text token.

A malformed file ends the program, with the line, or the number of the example.
*/
#ifndef LLMC_EVAL_TASK_FILES_H
#define LLMC_EVAL_TASK_FILES_H

#include <stddef.h>

#include "llmc/data/eval_tasks.h"
#include "llmc/tokenizer/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const Tokenizer* tokenizer; // NULL: only token ids can be read
    int V, eot;                 // the model's
    int T;                      // tokens per row
    size_t max;                 // examples per file; 0: all
} TaskSettings;

// Opens the task of a file, with its rows. It is named after the file, without directory and
// ending.
void task_files_open(Task* task, const char* path, TaskSettings settings);

// Returns 0 with the reason in `error` if a tokenizer, which may be NULL, does not encode any text.
int task_files_can_encode(const Tokenizer* tokenizer, const char* path, char* error);

#ifdef __cplusplus
}
#endif

#ifdef EVAL_TASK_FILES_IMPLEMENTATION

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/data/task_records.h"

enum {
    TASK_MAGIC_ = 20240522,
    TASK_VERSION_ = 1,
    TASK_HEADER_BYTES_ = 1024,
    TASK_ENDINGS_ = 4,    // endings per example of a .bin
    TASK_EXAMPLE_ = 65535 // starts an example of a .bin
};
#define TASK_MAX_BYTES_ ((size_t)1 << 31) // largest file

typedef struct {
    Task* task;
    TaskSettings settings;
    char place[TASK_PLACE_BYTES]; // "file:line", for errors
    char* error;
    char* text; // text of an ending with its blank
    size_t text_room;
} TaskReader_;

// Sets name to a file's name without directory and ending.
static void task_name_(char name[PATH_MAX], const char* path) {
    const char* slash = strrchr(path, '/');
    file_path(name, "%s", slash ? slash + 1 : path);
    char* dot = strrchr(name, '.');
    if (dot && dot > name) {
        *dot = '\0';
    }
}

// Adds the document read last, whose final `scored` tokens are scored.
static int task_add_ending_(TaskReader_* r, size_t context, size_t scored) {
    if (scored > (size_t)r->task->T) {
        return error_set(r->error, r->place, "an ending of %zu tokens, wanted at most --seq-len %d", scored,
                         r->task->T);
    }
    task_add(r->task, context + scored, (int)scored, r->settings.tokenizer);
    return 1;
}

// ---- JSON lines ----

int task_files_can_encode(const Tokenizer* tokenizer, const char* path, char* error) {
    return (tokenizer && strcmp(tokenizer->kind, "words") != 0) ||
           error_set(error, path, "text, wanted a --tokenizer that encodes any text%s",
                     tokenizer ? ": the model's own knows only the words of its list" : "");
}

static size_t task_encode_(TaskReader_* r, const char* text, size_t bytes, size_t at) {
    int* ids = task_begin(r->task, at + tokenizer_most_ids(r->settings.tokenizer, bytes)) + at;
    return tokenizer_encode(r->settings.tokenizer, text, bytes, ids);
}

// Adds the tokens of a context and an ending.
static int task_add_pair_(TaskReader_* r, TaskText context, TaskText ending, TaskForm form) {
    if (form != TASK_HELLASWAG) {
        for (; context.bytes > 0 && context.text[context.bytes - 1] == ' '; context.bytes--) {
        }
        for (; ending.bytes > 0 && ending.text[0] == ' '; ending.text++, ending.bytes--) {
        }
    }
    if (ending.bytes == 0) {
        return error_set(r->error, r->place, "an empty ending, wanted a text");
    }
    const int is_line = context.bytes > 0 && context.text[context.bytes - 1] == '\n';
    const int has_blank = form == TASK_HELLASWAG || (context.bytes > 0 && !is_line);
    r->text = (char*)check_reserve(r->text, &r->text_room, ending.bytes + 1, 1, "an ending");
    memcpy(r->text + has_blank, ending.text, ending.bytes);
    if (has_blank) {
        r->text[0] = ' ';
    }
    size_t before = task_encode_(r, context.text, context.bytes, 0);
    if (before == 0) {
        *task_begin(r->task, 1) = r->settings.eot;
        before = 1;
    }
    return task_add_ending_(r, before, task_encode_(r, r->text, ending.bytes + (size_t)has_blank, before));
}

// Adds each context of a record with each of its endings.
static int task_add_pairs_(TaskReader_* r, const TaskRecord* record, TaskForm form) {
    if (form == TASK_CONTINUATIONS) {
        return task_add_pair_(r, record->context, record->ending, form);
    }
    for (int i = 0; i < record->count; i++) {
        const TaskText text = record->texts[i];
        const int is_schema = form == TASK_SCHEMA;
        if (!task_add_pair_(r, is_schema ? text : record->context, is_schema ? record->ending : text, form)) {
            return 0;
        }
    }
    return 1;
}

// Adds the example of a line.
static int task_add_record_(TaskReader_* r, const TaskRecord* record, TaskForm form) {
    const int is_continuation = form == TASK_CONTINUATIONS;
    r->task->kind = is_continuation ? TASK_CONTINUATION : TASK_CHOICE;
    if (!task_add_pairs_(r, record, form)) {
        return 0;
    }
    task_example(r->task, is_continuation ? 1 : record->count, is_continuation ? 0 : (int)record->gold);
    return 1;
}

static int task_is_full_(const TaskReader_* r) {
    return r->settings.max > 0 && r->task->num_examples == r->settings.max;
}

static int task_read_lines_(TaskReader_* r, const char* path, char* text, size_t bytes) {
    TaskRecords records = task_records_open(path, text, bytes, r->place, r->error);
    TaskRecord record;
    int more = 0;
    while (!task_is_full_(r) && (more = task_records_next(&records, &record)) > 0) {
        if (!task_add_record_(r, &record, records.form)) {
            return 0;
        }
    }
    return more >= 0;
}

static int task_read_text_(TaskReader_* r, const char* path, char* text, size_t bytes) {
    if (bytes > 0 && memchr(text, '\0', bytes < TASK_HEADER_BYTES_ ? bytes : TASK_HEADER_BYTES_)) {
        return error_set(r->error, path, "neither JSON lines nor a .bin of llm.c's with the magic number %d",
                         TASK_MAGIC_);
    }
    return task_files_can_encode(r->settings.tokenizer, path, r->error) &&
           task_read_lines_(r, path, text, bytes);
}

// ---- llm.c's .bin ----

// Words of a .bin after its header.
typedef struct {
    const uint16_t* words;
    size_t count, at;
} TaskWords_;

// Reads the next word, which must be within bounds.
static int task_word_(TaskReader_* r, TaskWords_* w, const char* what, int least, int most, int* value) {
    if (w->at >= w->count) {
        return error_set(r->error, r->place, "the file ends, wanted %s", what);
    }
    *value = w->words[w->at++];
    return (least <= *value && *value <= most) ||
           error_set(r->error, r->place, "%s is %d, wanted %d to %d", what, *value, least, most);
}

// Sets ids to the next `count` words.
static int task_ids_(TaskReader_* r, TaskWords_* w, int count, int* ids) {
    for (int i = 0; i < count; i++) {
        if (!task_word_(r, w, "a token", 0, r->settings.V - 1, &ids[i])) {
            return 0;
        }
    }
    return 1;
}

// Reads the next ending, of the context that starts at `context` among the words.
static int task_read_ending_(TaskReader_* r, TaskWords_* w, size_t context, int context_length) {
    TaskWords_ again = {w->words, w->count, context};
    int length;
    if (!task_word_(r, w, "the length of an ending", 1, TASK_EXAMPLE_, &length)) {
        return 0;
    }
    int* ids = task_begin(r->task, (size_t)context_length + (size_t)length);
    return task_ids_(r, &again, context_length, ids) && task_ids_(r, w, length, ids + context_length) &&
           task_add_ending_(r, (size_t)context_length, (size_t)length);
}

static int task_read_bin_example_(TaskReader_* r, TaskWords_* w, int number) {
    const size_t begin = w->at;
    const int low = number & 65535; // the number has 16 bits
    int value, bytes, gold, context_length;
    if (!task_word_(r, w, "the start of an example", TASK_EXAMPLE_, TASK_EXAMPLE_, &value) ||
        !task_word_(r, w, "its bytes", 1, TASK_EXAMPLE_, &bytes) ||
        !task_word_(r, w, "its number", low, low, &value) ||
        !task_word_(r, w, "the right ending", 0, TASK_ENDINGS_ - 1, &gold) ||
        !task_word_(r, w, "the number of endings", TASK_ENDINGS_, TASK_ENDINGS_, &value) ||
        !task_word_(r, w, "the length of the context", 1, TASK_EXAMPLE_, &context_length)) {
        return 0;
    }
    const size_t context = w->at;
    w->at += (size_t)context_length;
    for (int i = 0; i < TASK_ENDINGS_; i++) {
        if (!task_read_ending_(r, w, context, context_length)) {
            return 0;
        }
    }
    if (2 * (w->at - begin) != (size_t)bytes) {
        return error_set(r->error, r->place, "%zu bytes, wanted the %d that it says", 2 * (w->at - begin),
                         bytes);
    }
    task_example(r->task, TASK_ENDINGS_, gold);
    return 1;
}

static int task_read_bin_(TaskReader_* r, const char* path, const char* text, size_t bytes) {
    const int32_t* header = (const int32_t*)text;
    const TaskWords_ words = {(const uint16_t*)(text + TASK_HEADER_BYTES_), (bytes - TASK_HEADER_BYTES_) / 2,
                              0};
    TaskWords_ w = words;
    if (header[1] != TASK_VERSION_) {
        return error_set(r->error, path, "version %d, wanted %d", header[1], TASK_VERSION_);
    }
    for (int i = 0; i < header[2] && !task_is_full_(r); i++) {
        snprintf(r->place, sizeof(r->place), "%s: example %d", path, i);
        if (!task_read_bin_example_(r, &w, i)) {
            return 0;
        }
    }
    return w.at == w.count || task_is_full_(r) ||
           error_set(r->error, path, "%zu bytes after the last of %d examples", 2 * (w.count - w.at),
                     header[2]);
}

// ---- the whole ----

static int task_is_bin_(const char* text, size_t bytes) {
    int32_t magic;
    if (bytes < TASK_HEADER_BYTES_) {
        return 0;
    }
    memcpy(&magic, text, sizeof(magic));
    return magic == TASK_MAGIC_;
}

// Reads all examples. Returns 0 with the reason in `error`.
static int task_read_(TaskReader_* r, const char* path) {
    char* text;
    size_t bytes;
    if (!byte_order_text(path, TASK_MAX_BYTES_, &text, &bytes, r->error)) {
        return 0;
    }
    const int ok = task_is_bin_(text, bytes) ? task_read_bin_(r, path, text, bytes)
                                             : task_read_text_(r, path, text, bytes);
    free(text);
    return ok && (r->task->num_examples > 0 || error_set(r->error, path, "no examples"));
}

void task_files_open(Task* task, const char* path, TaskSettings settings) {
    char name[PATH_MAX], error[ERROR_BYTES];
    TaskReader_ reader;
    memset(&reader, 0, sizeof(reader));
    reader.task = task;
    reader.settings = settings;
    reader.error = error;
    task_name_(name, path);
    task_open(task, name, TASK_CHOICE, settings.T);
    CHECK(task_read_(&reader, path), "%s", error);
    free(reader.text);
    task_pack(task);
}

#endif // EVAL_TASK_FILES_IMPLEMENTATION

#endif
