/*
eval_task_files.h -- reads tasks (eval_tasks.h) from JSON lines: one example per line, of HellaSwag
or DCLM (task_records.h).

Context and ending are encoded separately. One blank stands between them and belongs to the ending;
HellaSwag's are taken as they are, with a blank between them. No blank follows a line break. An
empty context becomes the end-of-text token.

A malformed file ends the program, with the line.
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
    const Tokenizer* tokenizer; // may be NULL; then a task from a file ends the program
    int eot;                    // the model's
    int T;                      // tokens per row
    size_t max;                 // examples per file; 0: all
} TaskSettings;

// Opens the task of a file, with its rows. It is named after the file, without directory and
// ending.
void task_files_open(Task* task, const char* path, TaskSettings settings);

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

#define TASK_MAX_BYTES_ ((size_t)1 << 31) // largest file
enum { TASK_TEXT_BYTES_ = 1024 };         // of the start of a file, without a zero byte

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

// Encodes a text at a place in the document; after another text, it continues that.
static size_t task_encode_(TaskReader_* r, const char* text, size_t bytes, size_t at, int is_rest) {
    int* ids = task_begin(r->task, at + tokenizer_most_ids(r->settings.tokenizer, bytes)) + at;
    return (is_rest ? tokenizer_encode_rest : tokenizer_encode)(r->settings.tokenizer, text, bytes, ids);
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
    size_t before = task_encode_(r, context.text, context.bytes, 0, 0);
    const int is_rest = before > 0;
    if (!is_rest) {
        *task_begin(r->task, 1) = r->settings.eot;
        before = 1;
    }
    return task_add_ending_(r, before,
                            task_encode_(r, r->text, ending.bytes + (size_t)has_blank, before, is_rest));
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

// Reads all examples. Returns 0 with the reason in `error`.
static int task_read_(TaskReader_* r, const char* path) {
    char* text;
    size_t bytes;
    if (!byte_order_text(path, TASK_MAX_BYTES_, &text, &bytes, r->error)) {
        return 0;
    }
    const Tokenizer* tokenizer = r->settings.tokenizer;
    const int is_text = !memchr(text, '\0', bytes < TASK_TEXT_BYTES_ ? bytes : TASK_TEXT_BYTES_);
    const int encodes = tokenizer && strcmp(tokenizer->kind, "words") != 0;
    if (!is_text) {
        error_set(r->error, path, "not JSON lines; for llm.c's HellaSwag take hellaswag_val.jsonl");
    } else if (!encodes) {
        error_set(r->error, path, "text, wanted a --tokenizer that encodes any text%s",
                  tokenizer ? ": the model's own knows only the words of its list" : "");
    }
    const int ok = is_text && encodes && task_read_lines_(r, path, text, bytes);
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
