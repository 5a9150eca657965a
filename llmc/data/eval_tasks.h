/*
eval_tasks.h -- tasks that a model is evaluated on: documents whose last tokens are scored, packed
into rows, and the scores that follow from their losses.

    choice          an example is several documents, each a context and an ending: the model
                    chooses the ending with the least loss
    continuation    an example is one document: the model is right if each scored token is the most
                    likely one
    text            windows of a long text, each scored from where the previous one ended: a loss
                    per token

A row holds whole documents, one after another, in the order of the file: attention stays within a
document, and positions count from its start. So a document has the losses that it would have alone,
and rows depend neither on the batch nor on the number of ranks. A document of n tokens takes n - 1
places of a row: the last token is only a target.

    acc         chooses by the sum of the losses of an ending   acc_norm   by their mean per token
    acc_bytes   by their mean per byte, without a blank before the ending
    error       standard error of a share p of n examples: sqrt(p (1 - p) / n)

The caller fills rows, lets the model compute the losses of their targets, and hands these back:

    for each row: task_fill; the model; task_collect
    task_score
*/
#ifndef LLMC_EVAL_TASKS_H
#define LLMC_EVAL_TASKS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/tokenizer/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { TASK_CHOICE, TASK_CONTINUATION, TASK_TEXT } TaskKind;

// Tokens [first, first + length) of the task; the last `scored` of them are scored, given the
// others.
typedef struct {
    size_t first;
    int length, scored;
    int bytes; // bytes of the scored tokens; 0 without a tokenizer
} TaskDocument;

typedef struct {
    size_t first; // first document
    int count, gold;
} TaskExample;

typedef struct {
    char* name;
    TaskKind kind;
    int T;       // tokens per row
    int* tokens; // of all documents
    size_t num_tokens, token_room;
    TaskDocument* documents;
    size_t num_documents, document_room;
    TaskExample* examples; // NULL for a text
    size_t num_examples, example_room;
    size_t num_cut; // documents too long for a row, which lost the start of their context
    size_t* rows;   // (num_rows + 1) first document of each row
    size_t num_rows, row_room;
} Task;

// Sum of the losses of a document's scored tokens, in nats, and how many were not the most likely
// token.
typedef struct {
    double nats, missed;
} TaskResult;

// Share of the examples, and its standard error; NAN: unknown.
typedef struct {
    double value, error;
} TaskShare;

typedef struct {
    TaskKind kind;
    TaskShare acc, acc_norm,
        acc_bytes;    // not for a text; the last two only for a choice, acc_bytes with a tokenizer
    double loss, bpb; // not for a choice: nats per scored token, bits per byte with a tokenizer
    double tokens;    // scored tokens
} TaskScore;          // unknown values are NAN

// ---- making a task: documents are added, then examples made of them, then rows ----

// Opens a task without documents, for rows of T tokens. Copies the name, made printable.
void task_open(Task* task, const char* name, TaskKind kind, int T);

void task_close(Task* task);

// Returns room for `count` more tokens after the last one.
int* task_begin(Task* task, size_t count);

// Adds a document of the next `length` tokens, at least one more than `scored`, which is at most T.
// If it is too long for a row, its first tokens are dropped. Counts its bytes with `tokenizer`,
// unless NULL.
void task_add(Task* task, size_t length, int scored, const Tokenizer* tokenizer);

// Adds an example of the last `count` documents; `gold` is the number of the right one.
void task_example(Task* task, int count, int gold);

// Adds the documents of a text, which is the next `count` tokens: windows of up to T tokens and
// their targets. Each scores the `stride` targets that follow the previous window's; the first
// scores all of its targets. The first token of the text is no target.
void task_windows(Task* task, size_t count, int stride, const Tokenizer* tokenizer);

// Makes the rows; call it after the last document.
void task_pack(Task* task);

// ---- evaluating ----

// Sets inputs, targets and starts (T each) of a row. Targets that are not scored are -1; starts:
// position of the first token of each token's document. Each padding token is a document of its
// own.
void task_fill(const Task* task, size_t row, int* inputs, int* targets, int* starts);

// Sets the results of the documents of a row from the losses of its targets; is_top (T): 1 where
// the target was the most likely token, NULL: unknown. `results` has an entry for every document.
void task_collect(const Task* task, size_t row, const float* losses, const int* is_top, TaskResult* results);

TaskScore task_score(const Task* task, const TaskResult* results);

// Prints a line of JSON for each example, or for each window of a text: the model's choice, the
// right one, and the loss of each ending (sum in nats, tokens, bytes).
void task_print(FILE* file, const Task* task, const TaskResult* results, int64_t step);

#ifdef __cplusplus
}
#endif

#ifdef EVAL_TASKS_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/json.h"
#include "llmc/base/printable.h"

// ---- making a task ----

void task_open(Task* task, const char* name, TaskKind kind, int T) {
    memset(task, 0, sizeof(*task));
    task->name = strdup(name);
    CHECK(task->name, "%s: no memory", name);
    printable(task->name);
    task->kind = kind;
    task->T = T;
}

void task_close(Task* task) {
    free(task->rows);
    free(task->examples);
    free(task->documents);
    free(task->tokens);
    free(task->name);
    memset(task, 0, sizeof(*task));
}

int* task_begin(Task* task, size_t count) {
    task->tokens = (int*)check_reserve(task->tokens, &task->token_room, task->num_tokens + count, sizeof(int),
                                       "tokens of a task");
    return task->tokens + task->num_tokens;
}

// Counts the bytes of the scored tokens. The blank before an ending only separates it from its
// context, so it does not count.
static int task_bytes_(const Task* task, const TaskDocument* document, const Tokenizer* tokenizer) {
    const int* scored = task->tokens + document->first + document->length - document->scored;
    int bytes = 0, length;
    if (!tokenizer || document->scored == 0) {
        return 0;
    }
    for (int i = 0; i < document->scored; i++) {
        bytes += tokenizer_bytes(tokenizer, scored[i]);
    }
    const int has_blank = tokenizer_bytes(tokenizer, scored[0]) > 0 &&
                          tokenizer_decode(tokenizer, scored[0], &length)[0] == ' ';
    return bytes - (task->kind == TASK_CHOICE && bytes > 1 && has_blank);
}

static void task_add_at_(Task* task, TaskDocument document, const Tokenizer* tokenizer) {
    assert(0 <= document.scored && document.scored < document.length && document.length <= task->T + 1);
    document.bytes = task_bytes_(task, &document, tokenizer);
    task->documents =
        (TaskDocument*)check_reserve(task->documents, &task->document_room, task->num_documents + 1,
                                     sizeof(TaskDocument), "documents of a task");
    task->documents[task->num_documents++] = document;
}

void task_add(Task* task, size_t length, int scored, const Tokenizer* tokenizer) {
    const size_t most = (size_t)task->T + 1, kept = length < most ? length : most;
    const TaskDocument document = {task->num_tokens + length - kept, (int)kept, scored, 0};
    task->num_cut += kept < length;
    task_add_at_(task, document, tokenizer);
    task->num_tokens += length;
}

void task_example(Task* task, int count, int gold) {
    const TaskExample example = {task->num_documents - (size_t)count, count, gold};
    assert(0 <= gold && gold < count);
    task->examples = (TaskExample*)check_reserve(task->examples, &task->example_room, task->num_examples + 1,
                                                 sizeof(TaskExample), "examples of a task");
    task->examples[task->num_examples++] = example;
}

void task_windows(Task* task, size_t count, int stride, const Tokenizer* tokenizer) {
    const size_t T = (size_t)task->T;
    for (size_t done = 0; done + 1 < count;) { // targets up to token `done` are scored
        const size_t step = done ? (size_t)stride : T;
        const size_t last = step < count - 1 - done ? done + step : count - 1;
        const size_t first = last < T ? 0 : last - T;
        const TaskDocument window = {task->num_tokens + first, (int)(last - first + 1), (int)(last - done),
                                     0};
        task_add_at_(task, window, tokenizer);
        done = last;
    }
    task->num_tokens += count;
}

static void task_add_row_(Task* task, size_t first) {
    task->rows = (size_t*)check_reserve(task->rows, &task->row_room, task->num_rows + 2, sizeof(size_t),
                                        "rows of a task");
    task->rows[task->num_rows++] = first;
}

void task_pack(Task* task) {
    int used = task->T;
    for (size_t d = 0; d < task->num_documents; d++) {
        const int places = task->documents[d].length - 1;
        if (used + places > task->T) {
            task_add_row_(task, d);
            used = 0;
        }
        used += places;
    }
    if (task->num_rows > 0) {
        task->rows[task->num_rows] = task->num_documents;
    }
}

// ---- evaluating ----

void task_fill(const Task* task, size_t row, int* inputs, int* targets, int* starts) {
    int at = 0;
    for (size_t d = task->rows[row]; d < task->rows[row + 1]; d++) {
        const TaskDocument* document = &task->documents[d];
        const int* tokens = task->tokens + document->first;
        const int start = at, places = document->length - 1;
        for (int i = 0; i < places; i++, at++) {
            inputs[at] = tokens[i];
            targets[at] = i < places - document->scored ? -1 : tokens[i + 1];
            starts[at] = start;
        }
    }
    for (; at < task->T; at++) {
        inputs[at] = 0;
        targets[at] = -1;
        starts[at] = at;
    }
}

void task_collect(const Task* task, size_t row, const float* losses, const int* is_top, TaskResult* results) {
    int end = 0;
    for (size_t d = task->rows[row]; d < task->rows[row + 1]; d++) {
        const TaskDocument* document = &task->documents[d];
        TaskResult result = {0, 0};
        end += document->length - 1;
        for (int at = end - document->scored; at < end; at++) {
            result.nats += losses[at];
            result.missed += is_top && !is_top[at];
        }
        results[d] = result;
    }
}

// Divisor of an ending's loss.
typedef enum { TASK_SUM_, TASK_PER_TOKEN_, TASK_PER_BYTE_ } TaskNorm_;

static double task_divisor_(const TaskDocument* document, TaskNorm_ norm) {
    return norm == TASK_SUM_ ? 1 : norm == TASK_PER_TOKEN_ ? document->scored : document->bytes;
}

// Returns the ending with the least loss, the first of equals. Ignores losses that are NaN; -1 if
// all are.
static int task_choice_(const Task* task, const TaskExample* example, const TaskResult* results,
                        TaskNorm_ norm) {
    double least = INFINITY;
    int chosen = -1;
    for (int i = 0; i < example->count; i++) {
        const size_t d = example->first + (size_t)i;
        const double loss = results[d].nats / task_divisor_(&task->documents[d], norm);
        if (loss < least) {
            least = loss;
            chosen = i;
        }
    }
    return chosen;
}

static TaskShare task_share_(double right, double examples) {
    const double p = right / examples; // NAN without examples
    const TaskShare share = {p, sqrt(p * (1 - p) / examples)};
    return share;
}

static TaskShare task_choices_(const Task* task, const TaskResult* results, TaskNorm_ norm) {
    double right = 0;
    for (size_t i = 0; i < task->num_examples; i++) {
        right += task_choice_(task, &task->examples[i], results, norm) == task->examples[i].gold;
    }
    return task_share_(right, (double)task->num_examples);
}

// True if every token of a continuation is the most likely one.
static int task_is_continued_(const TaskResult* result) { return result->missed == 0; }

static TaskShare task_continuations_(const Task* task, const TaskResult* results) {
    double right = 0;
    for (size_t d = 0; d < task->num_documents; d++) {
        right += task_is_continued_(&results[d]);
    }
    return task_share_(right, (double)task->num_documents);
}

TaskScore task_score(const Task* task, const TaskResult* results) {
    const TaskShare unknown = {NAN, NAN};
    TaskScore score = {task->kind, unknown, unknown, unknown, NAN, NAN, 0};
    double nats = 0, bytes = 0;
    for (size_t d = 0; d < task->num_documents; d++) {
        nats += results[d].nats;
        bytes += task->documents[d].bytes;
        score.tokens += task->documents[d].scored;
    }
    if (task->kind == TASK_CHOICE) {
        score.acc = task_choices_(task, results, TASK_SUM_);
        score.acc_norm = task_choices_(task, results, TASK_PER_TOKEN_);
        score.acc_bytes = bytes > 0 ? task_choices_(task, results, TASK_PER_BYTE_) : unknown;
        return score;
    }
    if (task->kind == TASK_CONTINUATION) {
        score.acc = task_continuations_(task, results);
    }
    score.loss = nats / score.tokens;
    score.bpb = bytes > 0 ? nats / M_LN2 / bytes : NAN;
    return score;
}

// ---- example by example ----

static void task_print_choice_(FILE* file, const Task* task, const TaskExample* example,
                               const TaskResult* results) {
    // indexed by TaskNorm_, as in the scores
    static const char* const names[] = {"", "_norm", "_bytes"};
    const int kinds = task->documents[example->first].bytes > 0 ? 3 : 2;
    fprintf(file, ",\"label\":%d", example->gold);
    for (int norm = 0; norm < kinds; norm++) {
        const int chosen = task_choice_(task, example, results, (TaskNorm_)norm);
        fprintf(file, ",\"prediction%s\":%d,\"correct%s\":%s", names[norm], chosen, names[norm],
                chosen == example->gold ? "true" : "false");
    }
}

static void task_print_ending_(FILE* file, const TaskDocument* document, const TaskResult* result) {
    fprintf(file, isfinite(result->nats) ? "{\"loss\":%.9g" : "{\"loss\":null", result->nats);
    fprintf(file, ",\"tokens\":%d", document->scored);
    if (document->bytes > 0) {
        fprintf(file, ",\"bytes\":%d", document->bytes);
    }
    fputc('}', file);
}

void task_print(FILE* file, const Task* task, const TaskResult* results, int64_t step) {
    const size_t count = task->kind == TASK_TEXT ? task->num_documents : task->num_examples;
    for (size_t i = 0; i < count; i++) {
        const TaskExample window = {i, 1, 0},
                          *example = task->kind == TASK_TEXT ? &window : &task->examples[i];
        fprintf(file, "{\"step\":%lld,\"task\":", (long long)step);
        json_print_string(file, task->name, strlen(task->name));
        fprintf(file, ",\"index\":%zu", i);
        if (task->kind == TASK_CHOICE) {
            task_print_choice_(file, task, example, results);
        } else if (task->kind == TASK_CONTINUATION) {
            fprintf(file, ",\"correct\":%s", task_is_continued_(&results[example->first]) ? "true" : "false");
        }
        fputs(",\"endings\":[", file);
        for (size_t k = 0; k < (size_t)example->count; k++) {
            fputs(k ? "," : "", file);
            task_print_ending_(file, &task->documents[example->first + k], &results[example->first + k]);
        }
        fputs("]}\n", file);
    }
}

#endif // EVAL_TASKS_IMPLEMENTATION

#endif
