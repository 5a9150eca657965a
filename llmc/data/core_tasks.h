/*
core_tasks.h -- makes tasks (eval_tasks.h) of CORE's files: prompts with examples before the
question.

CORE (Li et al., "DataComp-LM", 2024) is the mean over 22 tasks of the centered accuracy,
(accuracy - baseline) / (1 - baseline), where the baseline is the accuracy of guessing. A prompt is

    [context delimiter ending \n \n] for each example before the question, then
    context delimiter ending

Before it stands end-of-text. A prompt is encoded as one text, so its tokens show what is scored:

    choices         what comes after the tokens that all endings share; the least mean loss is
                    chosen
    schema          the tokens at the end that all contexts share; the least mean loss is chosen
    continuations   what comes after the tokens of the prompt without its ending: right if each is
                    the most likely one. Blanks around a context are left out; those before the
                    ending are scored with it

An ending of which nothing is scored has no mean: it is not chosen, unless it is the first one.

As in nanochat's evaluation, Python's random.Random(1337) shuffles the examples, and those before
question i are drawn from the others by random.Random(1234 + i).sample. Of a prompt of more than
--seq-len tokens, the last ones are read.
*/
#ifndef LLMC_CORE_TASKS_H
#define LLMC_CORE_TASKS_H

#include "llmc/data/core_bundle.h"
#include "llmc/data/eval_task_files.h"
#include "llmc/data/eval_tasks.h"

#ifdef __cplusplus
extern "C" {
#endif

// Opens a task of the bundle in `directory`, called core/LABEL, with its rows. A malformed file
// ends the program.
void core_task_open(Task* task, const CoreTask* core, const char* directory, TaskSettings settings);

#ifdef __cplusplus
}
#endif

#ifdef CORE_TASKS_IMPLEMENTATION

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/enum_words.h"
#include "llmc/base/file.h"
#include "llmc/base/python_random.h"
#include "llmc/base/utf8.h"
#include "llmc/data/task_records.h"

enum { CORE_SHUFFLE_SEED_ = 1337, CORE_SHOTS_SEED_ = 1234 };
#define CORE_TASK_BYTES_ ((size_t)1 << 31) // largest file

typedef struct {
    TaskText context, ending; // one of them; both of a continuation
    size_t texts;             // first of its list
    int count, gold;
    size_t line;
} CoreExample_;

typedef struct {
    Task* task;
    const CoreTask* core;
    TaskSettings settings;
    CoreExample_* examples; // in the order of the questions
    size_t count, room;
    TaskText* texts; // lists of all examples
    size_t num_texts, text_room;
    char* prompt; // (prompt_bytes)
    size_t prompt_bytes, prompt_room;
    int* ids; // prompts of an example: prompt k has ids[start[k]] to ids[start[k + 1]]
    size_t id_room, start[TASK_LIST + 1];
    int num_prompts;
    char place[TASK_PLACE_BYTES];
    char path[PATH_MAX];
    char* error;
} CoreReader_;

// ---- the file ----

static const char* core_form_name_(TaskForm form) {
    static const char* const names[TASK_FORMS + 1] = {"HellaSwag's", "multiple_choice", "schema",
                                                      "language_modeling", "no task's"};
    return names[form];
}

static void core_keep_(CoreReader_* r, const TaskRecord* record, size_t line) {
    const CoreExample_ example = {record->context, record->ending,    r->num_texts,
                                  record->count,   (int)record->gold, line};
    r->examples = (CoreExample_*)check_reserve(r->examples, &r->room, r->count + 1, sizeof(CoreExample_),
                                               "examples of CORE");
    r->examples[r->count++] = example;
    r->texts = (TaskText*)check_reserve(r->texts, &r->text_room, r->num_texts + (size_t)record->count,
                                        sizeof(TaskText), "texts of CORE");
    for (int i = 0; i < record->count; i++) {
        r->texts[r->num_texts++] = record->texts[i];
    }
}

// Reads all examples, whose texts point into `text`.
static int core_read_examples_(CoreReader_* r, char* text, size_t bytes) {
    TaskRecords records = task_records_open(r->path, text, bytes, r->place, r->error);
    TaskRecord record = {0};
    int more;
    while ((more = task_records_next(&records, &record)) > 0) {
        if (records.form != r->core->form) {
            return error_set(r->error, r->place, "fields of %s, wanted those of %s as core.yaml says",
                             core_form_name_(records.form), core_form_name_(r->core->form));
        }
        record.count = records.form == TASK_CONTINUATIONS ? 0 : record.count;
        core_keep_(r, &record, records.number);
    }
    return more == 0;
}

// Shuffles the examples, and keeps at most settings.max.
static void core_shuffle_(CoreReader_* r) {
    PythonRandom rng = python_random_open(CORE_SHUFFLE_SEED_);
    uint32_t* order = (uint32_t*)check_alloc(r->count, sizeof(uint32_t), "examples of CORE");
    CoreExample_* shuffled = (CoreExample_*)check_alloc(r->count, sizeof(CoreExample_), "examples of CORE");
    for (size_t i = 0; i < r->count; i++) {
        order[i] = (uint32_t)i;
    }
    python_random_shuffle(&rng, order, (uint32_t)r->count);
    for (size_t i = 0; i < r->count; i++) {
        shuffled[i] = r->examples[order[i]];
    }
    free(order);
    free(r->examples);
    r->examples = shuffled;
    r->count = r->settings.max > 0 && r->settings.max < r->count ? r->settings.max : r->count;
}

// ---- prompts ----

// True for the characters that Python's strip() takes away.
static int core_is_space_(uint32_t c) {
    return (9 <= c && c <= 13) || (28 <= c && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (0x2000 <= c && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

// Returns the length of the character at the start of a text that is not empty, and sets *c.
static int core_character_(const char* text, size_t left, uint32_t* c) {
    *c = (unsigned char)*text;
    return *c < 0x80 ? 1 : utf8_decode((const unsigned char*)text, left, c);
}

// Returns the length of a text without the blanks at its end.
static size_t core_trimmed_(const char* text, size_t bytes) {
    size_t end = 0;
    uint32_t c;
    for (size_t at = 0; at < bytes;) {
        at += (size_t)core_character_(text + at, bytes - at, &c);
        end = core_is_space_(c) ? end : at;
    }
    return end;
}

static TaskText core_trim_(TaskText text) {
    uint32_t c;
    while (text.bytes > 0) {
        const size_t length = (size_t)core_character_(text.text, text.bytes, &c);
        if (!core_is_space_(c)) {
            break;
        }
        text.text += length;
        text.bytes -= length;
    }
    text.bytes = core_trimmed_(text.text, text.bytes);
    return text;
}

static void core_append_(CoreReader_* r, const char* text, size_t bytes) {
    r->prompt = (char*)check_reserve(r->prompt, &r->prompt_room, r->prompt_bytes + bytes, 1, "a prompt");
    memcpy(r->prompt + r->prompt_bytes, text, bytes);
    r->prompt_bytes += bytes;
}

// Appends context, delimiter and ending k of an example.
static void core_append_example_(CoreReader_* r, const CoreExample_* example, int k) {
    const TaskForm form = r->core->form;
    const TaskText* text = form == TASK_CONTINUATIONS ? NULL : &r->texts[example->texts + (size_t)k];
    const TaskText context = form == TASK_SCHEMA    ? *text
                             : form == TASK_QUERIES ? example->context
                                                    : core_trim_(example->context),
                   ending = form == TASK_QUERIES ? *text : example->ending;
    core_append_(r, context.text, context.bytes);
    core_append_(r, r->core->delimiter, strlen(r->core->delimiter));
    core_append_(r, ending.text, ending.bytes);
}

// Starts a prompt with the examples before question i. Returns its length so far.
static size_t core_append_shots_(CoreReader_* r, size_t i) {
    PythonRandom rng = python_random_open((uint32_t)(CORE_SHOTS_SEED_ + i));
    uint32_t chosen[PYTHON_SAMPLE_MAX];
    const uint32_t shots = (uint32_t)r->core->shots;
    r->prompt_bytes = 0;
    python_random_sample(&rng, (uint32_t)r->count - 1, shots, chosen);
    for (uint32_t k = 0; k < shots; k++) {
        const CoreExample_* shot = &r->examples[chosen[k] + (chosen[k] >= i)];
        core_append_example_(r, shot, shot->gold);
        core_append_(r, "\n\n", 2);
    }
    return r->prompt_bytes;
}

// Encodes the prompt behind end-of-text, as the next one of the example.
static void core_encode_(CoreReader_* r) {
    const Tokenizer* tokenizer = r->settings.tokenizer;
    const size_t at = r->start[r->num_prompts];
    r->ids = (int*)check_reserve(r->ids, &r->id_room, at + 1 + tokenizer_most_ids(tokenizer, r->prompt_bytes),
                                 sizeof(int), "tokens of prompts");
    r->ids[at] = r->settings.eot;
    r->start[++r->num_prompts] =
        at + 1 + tokenizer_encode(tokenizer, r->prompt, r->prompt_bytes, r->ids + at + 1);
}

// Encodes the prompts of question i: one for each ending; of a continuation one without it and one
// with it.
static void core_encode_all_(CoreReader_* r, size_t i) {
    const CoreExample_* example = &r->examples[i];
    const size_t shots = core_append_shots_(r, i);
    r->num_prompts = 0;
    for (int k = 0; k < example->count; k++) {
        r->prompt_bytes = shots;
        core_append_example_(r, example, k);
        core_encode_(r);
    }
    if (r->core->form == TASK_CONTINUATIONS) {
        core_append_example_(r, example, 0);
        const size_t whole = r->prompt_bytes;
        r->prompt_bytes = core_trimmed_(r->prompt, whole - example->ending.bytes);
        core_encode_(r);
        r->prompt_bytes = whole;
        core_encode_(r);
    }
}

// ---- documents ----

static size_t core_length_(const CoreReader_* r, int k) { return r->start[k + 1] - r->start[k]; }

// Returns how many tokens all prompts share, at their start (step 1) or at their end (step -1).
static size_t core_shared_(const CoreReader_* r, int step) {
    size_t shared = core_length_(r, 0);
    for (int k = 1; k < r->num_prompts; k++) {
        const int *one = r->ids + (step > 0 ? r->start[0] : r->start[1] - 1),
                  *other = r->ids + (step > 0 ? r->start[k] : r->start[k + 1] - 1);
        const size_t length = core_length_(r, k), most = length < shared ? length : shared;
        for (shared = 0; shared < most && *one == *other; shared++, one += step, other += step) {
        }
    }
    return shared;
}

// Adds prompt k, of whose last tokens `scored` are scored.
static int core_add_(CoreReader_* r, int k, size_t scored) {
    const size_t length = core_length_(r, k), T = (size_t)r->task->T, kept = length < T ? length : T;
    if (scored >= kept) {
        return error_set(r->error, r->place, "an ending of %zu tokens, wanted fewer than --seq-len %zu",
                         scored, T);
    }
    memcpy(task_begin(r->task, kept), r->ids + r->start[k + 1] - kept, kept * sizeof(int));
    r->task->num_cut += kept < length;
    task_add(r->task, kept, (int)scored, r->settings.tokenizer);
    return 1;
}

static int core_add_continuation_(CoreReader_* r) {
    const size_t scored = core_length_(r, 1) - core_shared_(r, 1);
    if (scored == 0) {
        return error_set(r->error, r->place, "an empty continuation, wanted a text");
    }
    if (!core_add_(r, 1, scored)) {
        return 0;
    }
    task_example(r->task, 1, 0);
    return 1;
}

// Adds question i.
static int core_add_example_(CoreReader_* r, size_t i) {
    const CoreExample_* example = &r->examples[i];
    snprintf(r->place, sizeof(r->place), "%s:%zu", r->path, example->line);
    core_encode_all_(r, i);
    if (r->core->form == TASK_CONTINUATIONS) {
        return core_add_continuation_(r);
    }
    const size_t shared = core_shared_(r, r->core->form == TASK_SCHEMA ? -1 : 1);
    for (int k = 0; k < example->count; k++) {
        const size_t length = core_length_(r, k),
                     at_end = shared < length ? shared : 0; // two contexts are equal
        if (!core_add_(r, k, r->core->form == TASK_SCHEMA ? at_end : length - shared)) {
            return 0;
        }
    }
    task_example(r->task, example->count, example->gold);
    return 1;
}

// Reads the file, and adds all examples.
static int core_read_task_(CoreReader_* r, char* text, size_t bytes) {
    if (!task_files_can_encode(r->settings.tokenizer, r->path, r->error) ||
        !core_read_examples_(r, text, bytes)) {
        return 0;
    }
    if (r->count > 0) {
        core_shuffle_(r);
    }
    if (r->core->shots >= r->count) {
        return error_set(r->error, r->path, "%zu example%s, wanted more than the %zu before each question",
                         r->count, words_s((double)r->count), r->core->shots);
    }
    for (size_t i = 0; i < r->count; i++) {
        if (!core_add_example_(r, i)) {
            return 0;
        }
    }
    return 1;
}

void core_task_open(Task* task, const CoreTask* core, const char* directory, TaskSettings settings) {
    char *text, error[ERROR_BYTES], name[PATH_MAX];
    size_t bytes;
    CoreReader_* r = (CoreReader_*)check_alloc(1, sizeof(CoreReader_), "a task of CORE");
    r->task = task;
    r->core = core;
    r->settings = settings;
    r->error = error;
    core_bundle_path(r->path, directory, core);
    file_path(name, "core/%s", core->label);
    task_open(task, name, core->form == TASK_CONTINUATIONS ? TASK_CONTINUATION : TASK_CHOICE, settings.T);
    task->baseline = core->baseline;
    CHECK(byte_order_text(r->path, CORE_TASK_BYTES_, &text, &bytes, error), "%s", error);
    CHECK(core_read_task_(r, text, bytes), "%s", error);
    task_pack(task);
    free(text);
    free(r->examples);
    free(r->texts);
    free(r->prompt);
    free(r->ids);
    free(r);
}

#endif // CORE_TASKS_IMPLEMENTATION

#endif
