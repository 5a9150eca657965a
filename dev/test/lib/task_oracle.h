/*
task_oracle.h -- compares the losses of all task endings with those of transformers, for both
trainers.

The tasks are in dev/ref/fixtures/tasks. Here their endings are
packed into rows; transformers computed each alone, in float64.
*/
#ifndef DEV_TEST_TASK_ORACLE_H
#define DEV_TEST_TASK_ORACLE_H

#include "llmc/base/check.h"
#include "llmc/data/eval_task_files.h"
#include "llmc/data/eval_tasks.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/setup/options.h"
#include "llmc/tokenizer/tokenizer.h"
#include "dev/test/lib/load_test.h"
#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/test.h"

#define ORACLE_TASKS_ "dev/ref/fixtures/tasks/"

enum { ORACLE_T_ = 64, ORACLE_B_ = 3, ORACLE_STRIDE_ = 24, ORACLE_LINE_ = 256 };
// Kernels touch the same memory for all files: a sanitizer sees one of them.
#ifdef SANITIZED
enum { ORACLE_FILES_ = 1 };
#else
enum { ORACLE_FILES_ = 5 };
#endif

typedef struct {
    Model* model;
    double tolerance; // of a loss, relative
} Oracle_;

// The text as windows: end-of-text, and its bytes.
static inline void oracle_open_text_(Task* task, const Tokenizer* tokenizer) {
    TestFile text = test_read(ORACLE_TASKS_ "text.txt");
    task_open(task, "text", TASK_TEXT, ORACLE_T_);
    int* tokens = task_begin(task, text.bytes + 1);
    tokens[0] = tokenizer->eot;
    for (size_t i = 0; i < text.bytes; i++) {
        tokens[i + 1] = text.data[i];
    }
    task_windows(task, text.bytes + 1, ORACLE_STRIDE_, tokenizer);
    task_pack(task);
    free(text.data);
}

static inline void oracle_open_(Task* task, const char* name, const Tokenizer* tokenizer) {
    char path[ORACLE_LINE_];
    const TaskSettings settings = {tokenizer, tokenizer->eot, ORACLE_T_, 0};
    if (strcmp(name, "text.txt") == 0) {
        oracle_open_text_(task, tokenizer);
        return;
    }
    snprintf(path, sizeof(path), ORACLE_TASKS_ "%s", name);
    task_files_open(task, path, settings);
}

// The results of all documents, in micro-batches of up to B rows.
static inline TaskResult* oracle_results_(const Oracle_* o, const Task* task) {
    enum { N = ORACLE_B_ * ORACLE_T_ };
    static int inputs[N], targets[N], starts[N], is_top[N];
    static float losses[N];
    TaskResult* results = (TaskResult*)check_alloc(task->num_documents, sizeof(TaskResult), "results");
    for (size_t first = 0; first < task->num_rows; first += ORACLE_B_) {
        const size_t left = task->num_rows - first, rows = left < ORACLE_B_ ? left : (size_t)ORACLE_B_;
        const Batch batch = {inputs, targets, starts, (int)rows, ORACLE_T_, 0};
        for (size_t b = 0; b < rows; b++) {
            const size_t at = b * ORACLE_T_;
            task_fill(task, first + b, inputs + at, targets + at, starts + at);
        }
        model_token_losses(o->model, batch, losses, is_top);
        for (size_t b = 0; b < rows; b++) {
            task_collect(task, first + b, losses + b * ORACLE_T_, is_top + b * ORACLE_T_, results);
        }
    }
    return results;
}

// Compares an open task with the lines of losses.txt about its file: its documents, in order.
// Closes it.
static inline void oracle_compare_(const Oracle_* o, Task* task, const char* name) {
    char line[ORACLE_LINE_], of[ORACLE_LINE_];
    int example, ending, tokens;
    double nats, missed;
    size_t d = 0;
    FILE* file = fopen(ORACLE_TASKS_ "losses.txt", "r");
    CHECK(file, "losses.txt: cannot open");
    TaskResult* results = oracle_results_(o, task);
    while (fgets(line, sizeof(line), file)) {
        const int read =
            sscanf(line, "%255s %d %d %lf %d %lf", of, &example, &ending, &nats, &tokens, &missed);
        if (read == 6 && strcmp(of, name) == 0 && d < task->num_documents) {
            EXPECT_NEAR(results[d].nats, nats, o->tolerance * nats, "%s, example %d, ending %d", task->name,
                        example, ending);
            EXPECT(task->documents[d].scored == tokens, "%s, example %d: %d tokens, wanted %d", task->name,
                   example, task->documents[d].scored, tokens);
            EXPECT(o->tolerance > 1e-4 || results[d].missed == missed, "%s, example %d: %g missed, wanted %g",
                   task->name, example, results[d].missed, missed);
            d++;
        }
    }
    EXPECT(d >= 14 && d == task->num_documents, "%s: %zu of %zu documents", task->name, d,
           task->num_documents);
    fclose(file);
    free(results);
    task_close(task);
}

// `line` are further options of this trainer, at most 16 words.
static inline void test_task_losses(Memory memory, const char* line, double tolerance) {
    char words[ORACLE_LINE_],
        *argv[32] = {(char*)"trainer", (char*)"--steps", (char*)"0", (char*)"--tasks",
                     (char*)"none",    (char*)"--batch", (char*)"3", (char*)"--seq-len",
                     (char*)"64",      (char*)"--zero",  (char*)"0", (char*)"--recompute",
                     (char*)"3"},
        *save = NULL;
    int argc = 13;
    static const char* const files[] = {"hellaswag.jsonl", "choices.jsonl", "schema.jsonl",
                                        "continuations.jsonl", "text.txt"};
    static Comm alone;
    Options options;
    Tokenizer tokenizer;
    alone.size = 1;
    snprintf(words, sizeof(words), "%s", line);
    for (char* word = strtok_r(words, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        argv[argc++] = word;
    }
    options_parse(&options, argc, argv, trainer.program);
    Oracle_ o = {(Model*)check_alloc(1, sizeof(Model), "model"), tolerance};
    tokenizer_open_bytes(&tokenizer);
    const ModelConfig cfg = llmc_bin_read_config(ORACLE_TASKS_ "model.bin");
    const Settled s = settled_alone(&options, cfg, USE_EVALUATE, trainer.dtype);
    model_open(o.model, &s, memory, &alone);
    load_weights(o.model, ORACLE_TASKS_ "model.bin");
    for (size_t i = 0; i < ORACLE_FILES_; i++) {
        Task task;
        oracle_open_(&task, files[i], &tokenizer);
        oracle_compare_(&o, &task, files[i]);
    }
    model_close(o.model);
    tokenizer_close(&tokenizer);
    free(o.model);
}

#endif
