/*
evaluation.h -- evaluates the model on tasks: --tasks, --hellaswag and --perplexity.

The tasks are read before any work. All ranks of the run evaluate them together: of n data ranks
(grid.h), rank k mod n evaluates micro-batch k of a task's rows, in step k div n. Rows hold whole
documents, so the loss of each document is computed in one data rank. Then all ranks get all losses
and the same scores.
*/
#ifndef LLMC_EVALUATION_H
#define LLMC_EVALUATION_H

#include <stdint.h>
#include <stdio.h>

#include "llmc/data/dataloader.h"
#include "llmc/data/eval_tasks.h"
#include "llmc/log/log.h"
#include "llmc/model/model.h"
#include "llmc/parallel/grid.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"
#include "llmc/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Runs the forward pass on a batch that may be empty, with positions that count from the start of
// each document. Sets `losses` of whole sequences (B, W), in nats, and `is_top` (B, W) unless NULL:
// true where the target was the most likely token. Waits for the device. Collective.
typedef void (*TokenLosses)(Model* model, Batch batch, float* losses, int* is_top);

// Returns true if the run should stop. Called before each micro-batch. Collective.
typedef int (*EvaluationStop)(void* run);

typedef struct {
    Task* tasks;
    int count;
    int B, T;
    const char* out_scores;                  // "": no file
    int *inputs, *targets, *starts, *is_top; // (B, T)
    float* losses;                           // (B, T)
    TaskResult* results;                     // results of the documents of the largest task
    TaskResult* gathered;                    // results of some documents, from all ranks
} Evaluation;

// The model and the run that an evaluation uses.
typedef struct {
    TokenLosses losses;
    Model* model;
    Comm* comm;
    Grid grid;
    RunLog* log;
    EvaluationStop stop;
    void* run; // argument of stop
} EvaluationRun;

// Reads the tasks that the options name, after run_data_open. `data` has the tokenizer, V is the
// model's vocabulary. A malformed file ends the program.
void evaluation_open(Evaluation* e, const RunData* data, const Options* options, int V);

// Allocates the memory for evaluation, and prints which tasks will be evaluated.
void evaluation_start(Evaluation* e, FILE* screen, int processes);

// Evaluates all tasks, and writes each one's score to the log and its examples to --out-scores.
// Returns 0 if the run should stop.
int evaluation_log(Evaluation* e, const EvaluationRun* run, int64_t step);

void evaluation_close(Evaluation* e);

#ifdef __cplusplus
}
#endif

#ifdef EVALUATION_IMPLEMENTATION

#include <math.h>
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

// Adds the files of a list, in its order. They may have different formats.
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

// Adds the windows of a text. Its first token is end-of-text, unless --start-token is off.
static void evaluation_add_text_(Evaluation* e, const RunData* data, const Options* options,
                                 const Tokenizer* tokenizer, int eot) {
    const int stride = options->tasks.stride == OPTION_AUTO ? options->batch.seq_len : options->tasks.stride;
    DataSources sources;
    Task* task = evaluation_add_(e);
    if (stride > options->batch.seq_len) {
        die_usage("--stride is %d; wanted at most --seq-len %d", stride, options->batch.seq_len);
    }
    run_data_open_text(&sources, data, options, options->tasks.perplexity);
    task_open(task, options->tasks.perplexity, TASK_TEXT, options->batch.seq_len);
    for (int s = 0; s < sources.count; s++) {
        const TokenStream* stream = &sources.source[s].stream;
        const size_t start = !options->samples.start_token && tokens_at(stream, 0) == eot ? 1 : 0;
        const size_t count = stream->count - start;
        tokens_fill(stream, start, count, task_begin(task, count));
        task_windows(task, count, stride, tokenizer);
    }
    CHECK(task->num_documents > 0, "%s: %zu tokens, wanted at least 2", options->tasks.perplexity,
          sources.tokens);
    mixture_close(&sources);
    task_pack(task);
}

void evaluation_open(Evaluation* e, const RunData* data, const Options* options, int V) {
    const Tokenizer* tokenizer = data->has_tokenizer ? &data->tokenizer : NULL;
    const TaskSettings settings = {tokenizer, run_data_eot(data, V), options->batch.seq_len,
                                   (size_t)options->tasks.max};
    memset(e, 0, sizeof(*e));
    e->B = options->batch.size;
    e->T = options->batch.seq_len;
    e->out_scores = options->tasks.out_scores;
    if (options->tasks.hellaswag) {
        CHECK(access(TASKS_HELLASWAG, R_OK) == 0,
              "--hellaswag on: cannot read %s in this directory: scripts/get_data.sh hellaswag fetches it; "
              "elsewhere use --tasks FILE",
              TASKS_HELLASWAG);
        evaluation_add_files_(e, TASKS_HELLASWAG, settings);
    }
    if (options->tasks.files[0]) {
        evaluation_add_files_(e, options->tasks.files, settings);
    }
    if (options->tasks.perplexity[0]) {
        evaluation_add_text_(e, data, options, tokenizer, settings.eot);
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
        fprintf(screen, "; %zu too long for a row: the start of their context is left out", task->num_cut);
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

// Evaluates the rows [first, end) of a task: this rank's micro-batch, which may be empty.
static void evaluation_rows_(Evaluation* e, const EvaluationRun* run, const Task* task, size_t first,
                             size_t end) {
    Batch batch = {
        .inputs = e->inputs, .targets = e->targets, .starts = e->starts, .B = (int)(end - first), .T = e->T};
    int* is_top = task->kind == TASK_CONTINUATION ? e->is_top : NULL;
    const size_t T = (size_t)e->T;
    for (size_t row = first; row < end; row++) {
        const size_t at = (row - first) * T;
        task_fill(task, row, e->inputs + at, e->targets + at, e->starts + at);
    }
    batch_divide(&batch, grid_chunks(&run->grid));
    run->losses(run->model, batch, e->losses, is_top);
    for (size_t row = first; row < end; row++) {
        const size_t at = (row - first) * T;
        task_collect(task, row, e->losses + at, is_top ? is_top + at : NULL, e->results);
    }
}

// True if this process reports results: one of all processes with the same rows.
static int evaluation_tells_(const Grid* grid) { return grid_tells(grid) && grid->context_rank == 0; }

// Shares the results among all ranks. Only one of the reporting ranks has a document's results; the
// others have zeros.
static void evaluation_share_(Evaluation* e, const Task* task, const Grid* grid, Comm* comm) {
    if (!evaluation_tells_(grid)) {
        memset((void*)e->results, 0, task->num_documents * sizeof(TaskResult));
    }
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

// Sets the results of a task. Returns 0 if the run should stop.
static int evaluation_run_(Evaluation* e, const EvaluationRun* run, const Task* task, int64_t step) {
    const size_t B = (size_t)e->B, n = (size_t)run->grid.shape.data, batches = (task->num_rows + B - 1) / B,
                 steps = (batches + n - 1) / n;
    memset((void*)e->results, 0, task->num_documents * sizeof(TaskResult));
    for (size_t i = 0; i < steps; i++) {
        const size_t k = i * n + (size_t)run->grid.data_rank;
        if (run->stop(run->run)) {
            return 0;
        }
        comm_progress(run->comm, COMM_EVALUATE, step, "a task");
        log_progress(run->log, step, task->name, (int64_t)i, (int64_t)steps);
        evaluation_rows_(e, run, task, evaluation_least_(k * B, task->num_rows),
                         evaluation_least_((k + 1) * B, task->num_rows));
    }
    evaluation_share_(e, task, &run->grid, run->comm);
    return 1;
}

// Writes a task to --out-scores; only rank 0 does.
static void evaluation_write_(const Evaluation* e, FileWriter* scores, const Task* task, int64_t step) {
    TextBuffer lines;
    text_buffer_open(&lines, e->out_scores);
    task_print(lines.file, task, e->results, step);
    char* text = text_buffer_close(&lines);
    file_put(scores, text, lines.bytes);
    free(text);
}

// Evaluates all tasks, and writes each one to the log and, unless NULL, to `scores`. Returns 0 if
// the run should stop.
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
