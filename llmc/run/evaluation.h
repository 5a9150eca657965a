/*
evaluation.h -- the tasks of a run: --tasks, --hellaswag and --perplexity, opened before any work, evaluated on the
processes of the run together.

Micro-batch k of a task's rows is that of process k mod n in step k div n. Rows hold whole documents, so each document
has its loss in one process; all processes get all losses and the same scores.
*/
#ifndef LLMC_EVALUATION_H
#define LLMC_EVALUATION_H

#include <stdint.h>
#include <stdio.h>

#include "llmc/data/dataloader.h"
#include "llmc/data/eval_tasks.h"
#include "llmc/log/log.h"
#include "llmc/model/model.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"
#include "llmc/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Forward on a batch that may be empty, with positions that count from the start of each document: sets the loss of
// each target, nats, and unless NULL whether the target was the most likely token (B, T). Waits for the device.
// Collective.
typedef void (*TokenLosses)(Model* model, Batch batch, float* losses, int* is_top);

// Whether the run is to stop; asked before each micro-batch. Collective.
typedef int (*EvaluationStop)(void* run);

typedef struct {
    Task* tasks;
    int count;
    int B, T;
    const char* out_scores;                  // "": nowhere
    int *inputs, *targets, *starts, *is_top; // (B, T)
    float* losses;                           // (B, T)
    TaskResult* results;                     // of the documents of the largest task
    TaskResult* gathered;                    // of some documents, of all processes
} Evaluation;

// What it takes to evaluate.
typedef struct {
    TokenLosses losses;
    Model* model;
    Comm* comm;
    RunLog* log;
    EvaluationStop stop;
    void* run; // for stop
} EvaluationRun;

// Reads the tasks that the options name; a file that is bad ends the program. `data` has the tokenizer, V is the
// model's vocabulary. After run_data_open.
void evaluation_open(Evaluation* e, const RunData* data, const Options* options, int V);

// Ends all processes if they have not read the same tasks. Collective.
void evaluation_agree(const Evaluation* e, Comm* comm);

// Takes the memory to evaluate in, and says what will be evaluated.
void evaluation_start(Evaluation* e, FILE* screen, int processes);

// Evaluates all tasks, each to the log, and example by example to --out-scores. Returns 0 if the
// run is to stop.
int evaluation_log(Evaluation* e, const EvaluationRun* run, int64_t step);

void evaluation_close(Evaluation* e);

#ifdef __cplusplus
}
#endif

#ifdef EVALUATION_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/enum_words.h"
#include "llmc/data/mixture.h"
#include "llmc/data/eval_task_files.h"
#include "llmc/data/token_files.h"

enum { EVALUATION_GATHERED_ = 4096 }; // documents whose results are exchanged at a time

// ---- opening ----

static Task* evaluation_add_(Evaluation* e) {
    e->tasks = (Task*)check_grow(e->tasks, (size_t)e->count, sizeof(Task), "tasks");
    return &e->tasks[e->count++];
}

// In the order of the list: its items may be of different formats.
static void evaluation_add_files_(Evaluation* e, const char* list, TaskSettings settings) {
    char *items = strdup(list), *next = items, *item;
    CHECK(items, "%s: no memory", list);
    while ((item = tokens_next_item(&next)) != NULL) {
        glob_t files = tokens_list(item);
        for (size_t i = 0; i < files.gl_pathc; i++) {
            task_files_open(evaluation_add_(e), files.gl_pathv[i], settings);
        }
        globfree(&files);
    }
    free(items);
}

// The windows of a text, with the end-of-text token at its start unless --start-token is off.
static void evaluation_add_text_(Evaluation* e, const RunData* data, const Options* options,
                                 const Tokenizer* tokenizer, int eot) {
    const int stride = options->stride == OPTION_AUTO ? options->seq_len : options->stride;
    DataSources sources;
    Task* task = evaluation_add_(e);
    if (stride > options->seq_len) {
        die_usage("--stride is %d; wanted at most --seq-len %d", stride, options->seq_len);
    }
    run_data_open_text(&sources, data, options, options->perplexity);
    task_open(task, options->perplexity, TASK_TEXT, options->seq_len);
    for (int s = 0; s < sources.count; s++) {
        const TokenStream* stream = &sources.source[s].stream;
        const size_t start = !options->start_token && tokens_at(stream, 0) == eot ? 1 : 0;
        const size_t count = stream->count - start;
        tokens_fill(stream, start, count, task_begin(task, count));
        task_windows(task, count, stride, tokenizer);
    }
    CHECK(task->num_documents > 0, "%s: %zu tokens, wanted at least 2", options->perplexity, sources.tokens);
    mixture_close(&sources);
    task_pack(task);
}

void evaluation_open(Evaluation* e, const RunData* data, const Options* options, int V) {
    const Tokenizer* tokenizer = data->has_tokenizer ? &data->tokenizer : NULL;
    const TaskSettings settings = {tokenizer, V, run_data_eot(data, V), options->seq_len,
                                   (size_t)options->tasks_max};
    memset(e, 0, sizeof(*e));
    e->B = options->batch;
    e->T = options->seq_len;
    e->out_scores = options->out_scores;
    if (options->hellaswag) {
        CHECK(access(TASKS_HELLASWAG, R_OK) == 0,
              "--hellaswag on: cannot read %s in this directory: scripts/get_data.sh hellaswag fetches it; "
              "elsewhere use --tasks FILE",
              TASKS_HELLASWAG);
        evaluation_add_files_(e, TASKS_HELLASWAG, settings);
    }
    if (options->tasks[0]) {
        evaluation_add_files_(e, options->tasks, settings);
    }
    if (options->perplexity[0]) {
        evaluation_add_text_(e, data, options, tokenizer, settings.eot);
    }
}

void evaluation_agree(const Evaluation* e, Comm* comm) {
    char words[32];
    for (int i = 0; i < e->count; i++) {
        const uint64_t fingerprint = task_fingerprint(&e->tasks[i]);
        snprintf(words, sizeof(words), "%016llx", (unsigned long long)fingerprint);
        comm_agree(comm, e->tasks[i].name, fingerprint, words);
    }
}

static void evaluation_print_(FILE* screen, const Task* task) {
    fprintf(screen, "task %s: ", task->name);
    if (task->kind == TASK_TEXT) {
        fprintf(screen, "%zu tokens in %zu window%s", task->num_tokens, task->num_documents,
                words_s((double)task->num_documents));
    } else {
        fprintf(screen, "%zu example%s, %zu ending%s in %zu row%s", task->num_examples,
                words_s((double)task->num_examples), task->num_documents,
                words_s((double)task->num_documents), task->num_rows, words_s((double)task->num_rows));
    }
    fprintf(screen, " of %d tokens", task->T);
    if (task->num_cut > 0) {
        fprintf(screen, "; %zu too long for a row: without the start of their context", task->num_cut);
    }
    fputc('\n', screen);
}

void evaluation_start(Evaluation* e, FILE* screen, int processes) {
    const size_t N = array_bytes((size_t)e->B, (size_t)e->T);
    size_t most = 0;
    for (int i = 0; i < e->count; i++) {
        evaluation_print_(screen, &e->tasks[i]);
        most = e->tasks[i].num_documents > most ? e->tasks[i].num_documents : most;
    }
    if (e->count > 0) {
        e->inputs = (int*)check_alloc(array_bytes(N, 4), sizeof(int), "batch of a task");
        e->targets = e->inputs + N;
        e->starts = e->targets + N;
        e->is_top = e->starts + N;
        e->losses = (float*)check_alloc(N, sizeof(float), "losses of a task");
        e->results = (TaskResult*)check_alloc(most, sizeof(TaskResult), "results of a task");
        e->gathered = (TaskResult*)check_alloc(array_bytes((size_t)processes, EVALUATION_GATHERED_),
                                               sizeof(TaskResult), "results of a task");
    }
}

void evaluation_close(Evaluation* e) {
    free(e->gathered);
    free(e->results);
    free(e->losses);
    free(e->inputs);
    for (int i = 0; i < e->count; i++) {
        task_close(&e->tasks[i]);
    }
    free(e->tasks);
    memset(e, 0, sizeof(*e));
}

// ---- evaluating ----

static size_t evaluation_least_(size_t a, size_t b) { return a < b ? a : b; }

// The rows [first, end) of a task: this process's micro-batch, maybe none.
static void evaluation_rows_(Evaluation* e, const EvaluationRun* run, const Task* task, size_t first,
                             size_t end) {
    const Batch batch = {e->inputs, e->targets, e->starts, (int)(end - first), e->T, 0};
    int* is_top = task->kind == TASK_CONTINUATION ? e->is_top : NULL;
    const size_t T = (size_t)e->T;
    for (size_t row = first; row < end; row++) {
        const size_t at = (row - first) * T;
        task_fill(task, row, e->inputs + at, e->targets + at, e->starts + at);
    }
    run->losses(run->model, batch, e->losses, is_top);
    for (size_t row = first; row < end; row++) {
        const size_t at = (row - first) * T;
        task_collect(task, row, e->losses + at, is_top ? is_top + at : NULL, e->results);
    }
}

// Gives all processes the results of all: those of a document are zeros in all but one.
static void evaluation_share_(Evaluation* e, const Task* task, Comm* comm) {
    for (size_t first = 0; first < task->num_documents && comm->size > 1; first += EVALUATION_GATHERED_) {
        const size_t count = evaluation_least_(EVALUATION_GATHERED_, task->num_documents - first);
        TaskResult* results = e->results + first;
        comm_all_gather(comm, e->gathered, results, count * sizeof(TaskResult));
        memset((void*)results, 0, count * sizeof(TaskResult));
        for (size_t i = 0; i < count * (size_t)comm->size; i++) {
            results[i % count].nats += e->gathered[i].nats;
            results[i % count].missed += e->gathered[i].missed;
        }
    }
}

// Sets the results of a task. Returns 0 if the run is to stop.
static int evaluation_run_(Evaluation* e, const EvaluationRun* run, const Task* task, int64_t step) {
    const size_t B = (size_t)e->B, n = (size_t)run->comm->size, batches = (task->num_rows + B - 1) / B,
                 steps = (batches + n - 1) / n;
    memset((void*)e->results, 0, task->num_documents * sizeof(TaskResult));
    for (size_t i = 0; i < steps; i++) {
        const size_t k = i * n + (size_t)run->comm->rank;
        if (run->stop(run->run)) {
            return 0;
        }
        comm_progress(run->comm, COMM_EVALUATE, step, "a task");
        log_progress(run->log, step, task->name, (int64_t)i, (int64_t)steps);
        evaluation_rows_(e, run, task, evaluation_least_(k * B, task->num_rows),
                         evaluation_least_((k + 1) * B, task->num_rows));
    }
    evaluation_share_(e, task, run->comm);
    return 1;
}

// --out-scores; only the first process writes them.
static void evaluation_write_(const Evaluation* e, FileWriter* scores, const Task* task, int64_t step) {
    TextBuffer lines;
    text_buffer_open(&lines, e->out_scores);
    task_print(lines.file, task, e->results, step);
    char* text = text_buffer_close(&lines);
    file_put(scores, text, lines.bytes);
    free(text);
}

// Evaluates all tasks, each to the log and to `scores`, unless NULL. Returns 0 if the run is to
// stop.
static int evaluation_run_all_(Evaluation* e, const EvaluationRun* run, int64_t step, FileWriter* scores) {
    for (int i = 0; i < e->count; i++) {
        const Task* task = &e->tasks[i];
        if (!evaluation_run_(e, run, task, step)) {
            return 0;
        }
        const TaskScore score = task_score(task, e->results);
        log_task(run->log, step, task->name, &score);
        if (scores) {
            evaluation_write_(e, scores, task, step);
        }
    }
    return 1;
}

int evaluation_log(Evaluation* e, const EvaluationRun* run, int64_t step) {
    FileWriter scores;
    if (!e->out_scores[0] || run->comm->rank > 0) {
        return evaluation_run_all_(e, run, step, NULL);
    }
    file_open(&scores, e->out_scores);
    const int is_done = evaluation_run_all_(e, run, step, &scores);
    is_done ? file_commit(&scores) : file_discard(&scores);
    return is_done;
}

#endif // EVALUATION_IMPLEMENTATION

#endif
