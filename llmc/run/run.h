/*
run.h -- a run, and the functions that the training loop of each trainer calls.

They say when a validation, tasks, samples, a save or the end are due, judge a gradient, write the
log, save, and roll back. start.h opens the run before the loop and closes it afterwards.

The model is opaque here, and nothing depends on the type of its weights (trainer.h). All functions
are collective.
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/dataloader.h"
#include "llmc/run/evaluation.h"
#include "llmc/generate/generator.h"
#include "llmc/optim/update_in_backward.h"
#include "llmc/log/log.h"
#include "llmc/log/log_step.h"
#include "llmc/log/lr_sweep.h"
#include "llmc/cost/mfu.h"
#include "llmc/setup/settled.h"
#include "llmc/comm/stragglers.h"
#include "llmc/plan/plan.h"
#include "llmc/checkpoint/model_files.h"
#include "llmc/checkpoint/more_tokens.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/setup/run_tokens.h"
#include "llmc/run/session.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/comm/comm.h"
#include "llmc/model/model.h"
#include "llmc/parallel/micro_steps.h"
#include "llmc/parallel/pipeline.h"
#include "llmc/run/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

// The verdict on the gradient of an update.
typedef struct {
    // mean loss of the targets that count, in nats; unscaled norm of its gradient
    double loss, norm;
    double divergence; // mean divergence from the teacher; NAN: none
    double flops;      // floating-point operations of all ranks
    Update update;     // settings of the update, if it is made
    int is_made;       // true: the update is made
    char reason[96];   // reason if it is not made, or not completely
    char* where;       // data of a skipped update; NULL: not skipped
} RunVerdict;

// A pass over a micro-batch that a rank makes for the gradient of an update.
typedef struct {
    PipelineAction now; // forward or backward
    MicroStep step;
    Batch batch;  // may be empty
    int is_other; // true if the turn before had another batch
    float dloss;  // gradient of each token's loss
    // the turns so far; forward passes whose backward pass is still to come; the steps to come
    int64_t count, ahead;
    MicroSteps forward, backward;
} RunTurn;

typedef struct Generate Generate; // generate.h

// A run of the program.
typedef struct {
    const Trainer* trainer;
    const char* program;    // name it was called by
    char* const* command;   // as it was typed, NULL after the last word
    const char* launcher;   // program that started the ranks, "mpirun"
    const Options* given;   // options as parsed
    const Settled* settled; // all decisions made (run_decide); NULL before
    RunData data;
    Resume resume;
    char* kept_config; // fields of the model's config.json that checkpoints keep; NULL: none
    // path of the initial weights, or the checkpoint to resume; NULL: random weights
    const char* model_path;
    char newest[PATH_MAX];         // newest checkpoint, if --model names a run
    const char* teacher_path;      // path of the teacher; NULL: none
    char newest_teacher[PATH_MAX]; // its newest checkpoint, if --teacher names a run
    // directory of the adapter of --model, or the checkpoint that has it; NULL: none, or a new one
    const char* adapter_path;
    char newest_adapter[PATH_MAX]; // newest checkpoint, if --adapter names a run
    double start_s;                // start of the program, on the clock of time_now_s
    FILE* results;                 // output for results: standard output, even with --quiet
    int has_joined;                // true once this rank has joined the others
    int trains;                    // true: the loop follows, to train, evaluate or convert
    Generate* generate;            // state of generation, if the program generates text; else NULL
    int status;                    // exit status of the program
    // true: ends by the signal that stopped the run, once all is closed
    int dies;

    TrainerPlan plan;
    Model* model;
    ModelFiles files;  // the model, as needed to read and write its files
    MoreTokens more;   // rows that --model lacks, if data.is_extended
    Dataloader* train; // NULL without data
    Dataloader* val;   // (num_val_sets) after train in memory
    int val_set;       // current validation set, or the last one
    int shows_average; // the model has the average of the weights now
    Comm comm;
    RankReport *report, *reports; // report of this rank; reports of all ranks, one after the other
    Mfu mfu;
    Stragglers pace; // search for a slow rank
    double* paces;   // time per token of each rank
    // time waited for data so far: in each step, of the rank that waited longest
    double data_wait_s;
    uint64_t agreement; // hash of the last verdict
    Generator generator;
    Evaluation evaluation;
    Session session;
    RunLog log;
    RunState state;
    int validates_first; // true: also validates before the first update
    double floor;        // lowest possible validation loss, the entropy of the text; NAN: unknown
    LrSweep sweep;       // of --find-lr

    // the current step, or the last one
    RunTurn turn;
    InBackward in_backward; // --update-in-backward
    RunVerdict verdict;
    double begin_s, step_s, waited_s; // its start and its time; time the loader waited before it
    uint64_t first_sequence;          // first sequence of its batch
    int due;                          // actions that are due: a sum as session_next returns
    int is_stopping;                  // a signal has stopped a validation, a task or a sample
    // reason for rolling back
    char divergence[SESSION_REASON_BYTES];

    // what `given` and `settled` point to; written once, by run_open and run_decide
    Options given_;
    Settled settled_;
} Run;

// Makes the decisions that depend on the device, the last ones, and plans the run.
void run_decide(Run* run, const Settled* s);

// Sets the model, which is open.
void run_set_model(Run* run, Model* model);

static inline int run_is_first(const Run* run) { return run->comm.rank == 0; }

// Returns the number of micro-steps of a step, or a validation, of `sequences` sequences.
int64_t run_micro_steps(const Run* run, int64_t sequences);

// Returns the tokens of the current update, and the length of its sequences.
int64_t run_batch(const Run* run);
int run_length(const Run* run);

// Returns the window of the step, in layers that have one: of its passes, and of validations.
int run_window(const Run* run);

// Opens the generator of samples or texts. `options`, which sampling follows, must outlive it.
void run_open_generator(Run* run, Model* model, const Options* options);

// Sets the weights: from the files that the run starts with, or from the checkpoint that it
// continues; before it, those of an adapter's base.
void run_load(Run* run, const char* checkpoint, const SavedState* saved);

// Restores the run from a checkpoint. Its data continue at a sequence.
void run_restore(Run* run, const char* path, const SavedState* saved, uint64_t sequence);

// ---- one iteration of the loop, in this order ----

// Returns true if a validation is due and has this part, from 0 on, and starts on it. Its parts:
// each set with the weights, then each set with their average, which replaces the weights
// meanwhile.
int run_validates(Run* run, int part);

// Sets the batch that this rank evaluates in turn i of a validation; it may be empty. Stage p is p
// turns behind the first one. Returns 0 after the last turn, or if a signal stops the run.
int run_validation_batch(Run* run, int64_t i, Batch* batch);

// Logs the validation loss of the part, from the losses in the reports of all ranks. The first part
// decides about the run: its best checkpoint, its end by --patience, and whether it diverges.
void run_log_validation(Run* run);

// Returns true if the tasks are due. They follow the validation, if one is due.
int run_evaluates_tasks(const Run* run);
void run_log_tasks(Run* run);

// Returns true if samples are due.
int run_samples(const Run* run);
void run_log_samples(Run* run);

// Records that this stage of the step is complete, unless a signal has stopped it. A resumed run
// does not repeat it.
void run_reaches(Run* run, RunStage stage);

// Agrees with the other ranks whether to save and whether to stop now.
void run_agree(Run* run);

// Returns true if a save is due. run_save copies the state of the run, which a thread then writes.
int run_saves(const Run* run);
void run_save(Run* run);

// Returns true at the last step, or if a signal or --max-hours stops the run.
int run_ends(const Run* run);

// Starts a step.
void run_begin_step(Run* run);

// Returns the hook that makes the update during the backward pass (--update-in-backward); NULL:
// none.
InBackward* run_hook(Run* run);

// Returns this rank's next turn in the gradient of the update, with its work in the report; NULL
// after the last one. Turns are forward and backward passes, of a stage in the order of pipeline.h.
// The loss of each token counts loss_scale / tokens of the update. The hook may be NULL.
const RunTurn* run_turn(Run* run, InBackward* hook);

// Adds up the reports of all ranks, and judges the gradient: learning rate, clipping, overflow,
// outliers. Sets *update. Returns true if the update should be made.
int run_accepts(Run* run, Update* update);

// Returns the sums of the statistics of all routers, layer after layer, of the update that
// run_accepts judged; NULL if it was not made, or the biases of routers stay.
const double* run_moves_biases(const Run* run);

// Returns the largest scores of all heads, layer after layer, of the update that run_accepts
// judged; NULL if it was not made, or none is above the limit of --qk-clip.
const double* run_clips_heads(const Run* run);

// Counts the step, and logs it.
void run_end_step(Run* run);

// Returns true if the run has diverged and should roll back.
int run_diverges(Run* run);

// Restores the last healthy checkpoint. The data continue after the bad batches.
void run_roll_back(Run* run);

#ifdef __cplusplus
}
#endif

#ifdef RUN_IMPLEMENTATION

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/rand.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/wide_sum.h"
#include "llmc/base/xxh64.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/load_save.h"
#include "llmc/optim/outliers.h"
#include "llmc/optim/loss_scale.h"
#include "llmc/setup/resolve.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/ops/dropout.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/grid.h"
#include "llmc/run/parameters_agree.h"

enum { RUN_BAD_DATA_ = 4 }; // a data file has changed; a flag beyond those of session_next

// Returns the flags that any rank sets, as a sum; the only place where ranks agree. Only its result
// decides whether to save, stop or end: all ranks call it at the same points, and what one of them
// asks for, all do. The verdict on an update needs no agreement, because all ranks judge the same
// numbers.
static int run_agree_(Run* run, int asks) { return comm_any(&run->comm, asks); }

void run_decide(Run* run, const Settled* s) {
    run->settled_ = run->trainer->plan(&run->plan, s, run->trainer->model, &run->comm);
    run->settled = &run->settled_;
}

void run_set_model(Run* run, Model* model) {
    const Settled* s = run->settled;
    const ModelAccess access = run->trainer->access;
    const ModelFiles files = {
        model,      access, access.map(model), access.state(model), s->saved_dtype, run->plan.in_place,
        &run->comm, 0};
    run->model = model;
    run->files = files;
}

// ---- the numbers of an update ----

// The numbers of an update or a validation, over all ranks.
typedef struct {
    double losses, square_sum, divergence; // sums
    double counted, flops, bytes;
    double wait_s; // time of the rank that waited longest for data
} RunUpdate_;

static MicroSteps run_all_micro_steps_(const Run* run, int64_t sequences) {
    return micro_steps(sequences, run->settled->options.batch.size, run->settled->ranks.grid.shape.data);
}

// Returns the number of micro-steps of an update, or a validation, of `sequences`.
int64_t run_micro_steps(const Run* run, int64_t sequences) {
    const MicroSteps steps = run_all_micro_steps_(run, sequences);
    return micro_steps_count(&steps);
}

int64_t run_batch(const Run* run) {
    const Stages batches = settled_batches(&run->settled->options);
    return stages_at(&batches, run->state.step);
}

int run_length(const Run* run) {
    const Stages lengths = settled_lengths(&run->settled->options);
    return (int)stages_at(&lengths, run->state.step);
}

int run_window(const Run* run) {
    const Stages windows = settled_windows(&run->settled->options);
    return (int)stages_at(&windows, run->state.step);
}

// Returns the model as the step has it.
static ModelConfig run_model_(const Run* run) {
    ModelConfig cfg = run->settled->cfg;
    cfg.window = run_window(run);
    return cfg;
}

// Returns the report of rank r, after they were gathered.
static RankReport* run_report_of_(const Run* run, int r, int64_t micro_steps) {
    return (RankReport*)((char*)run->reports + (size_t)r * rank_report_bytes(run->settled, micro_steps));
}

// Sums up the statistics of all ranks' routers, and the losses and targets of sources, in the
// report of rank 0; the largest scores of all ranks go there, too.
static void run_add_up_parts_(const Run* run, int64_t micro_steps) {
    double* sums = (double*)(run->reports + 1);
    const size_t scores = run->reports->scores,
                 count = scores + run->reports->statistics + 2 * run->reports->sources;
    for (int r = 1; r < run->comm.size; r++) {
        const double* more = (const double*)(run_report_of_(run, r, micro_steps) + 1);
        for (size_t i = 0; i < count; i++) {
            sums[i] = i < scores ? fmax(sums[i], more[i]) : sums[i] + more[i];
        }
    }
}

// Clears the numbers that another process of the grid also reports, so that they count once.
static void run_be_silent_(Run* run, int64_t micro_steps) {
    const WideSum none = {0, 0};
    RankReport* report = run->report;
    if (!grid_tells(&run->settled->ranks.grid)) {
        report->divergence = none;
        report->counted = report->flops = report->target_bytes = 0;
        memset(rank_report_sources(report), 0, 2 * report->sources * sizeof(double));
        memset(rank_report_losses(report), 0, (size_t)micro_steps * sizeof(double));
    }
    if (run->settled->ranks.grid.tensor_rank > 0) { // each stage has routers of its own
        memset((double*)(report + 1) + report->scores, 0, report->statistics * sizeof(double));
    }
}

// Gathers the reports of all ranks and adds them up. Losses are added in the order of the
// micro-batches, so that the sum has the same bits for any number of ranks.
static RunUpdate_ run_add_up_(Run* run, int64_t micro_steps) {
    RunUpdate_ sum = {0, 0, 0, 0, 0, 0, 0};
    WideSum square_sum = {0, 0}, divergence = {0, 0};
    run_be_silent_(run, micro_steps);
    comm_all_gather(&run->comm, run->reports, run->report, rank_report_bytes(run->settled, micro_steps));
    for (int r = 0; r < run->comm.size; r++) {
        const RankReport* report = run_report_of_(run, r, micro_steps);
        wide_sum_merge(&square_sum, report->square_sum);
        wide_sum_merge(&divergence, report->divergence);
        sum.counted += report->counted;
        sum.flops += report->flops;
        sum.bytes += report->target_bytes;
        sum.wait_s = fmax(sum.wait_s, report->wait_s);
        CHECK(report->agreement == run->reports->agreement,
              "step %lld: rank %d reached a different verdict on the previous step than rank 0",
              (long long)run->state.step, r);
    }
    for (int64_t i = 0; i < micro_steps; i++) {
        for (int r = 0; r < run->comm.size; r++) {
            sum.losses += rank_report_losses(run_report_of_(run, r, micro_steps))[i];
        }
    }
    sum.square_sum = wide_sum_value(square_sum);
    sum.divergence = wide_sum_value(divergence);
    run_add_up_parts_(run, micro_steps);
    return sum;
}

// Logs the name of a slow rank, if any, after run_add_up_. All ranks find the same one.
static void run_watch_pace_(Run* run, int64_t micro_steps) {
    Comm* c = &run->comm;
    char note[256];
    double ratio;
    for (int r = 0; r < c->size; r++) {
        run->paces[r] = run_report_of_(run, r, micro_steps)->pace_s;
    }
    const int slow = stragglers_add(&run->pace, run->paces, &ratio);
    if (slow >= 0) {
        char* hosts = (char*)check_alloc((size_t)c->size, sizeof(c->host), "host names");
        comm_all_gather(c, hosts, c->host, sizeof(c->host));
        snprintf(note, sizeof(note),
                 "note: rank %d (%s) computes %.0f %% slower than the median, and all wait for it", slow,
                 hosts + (size_t)slow * sizeof(c->host), 100 * (ratio - 1));
        log_note(&run->log, note);
        free(hosts);
    }
}

void run_open_generator(Run* run, Model* model, const Options* options) {
    const Settled* s = run->settled;
    const GeneratorModel functions = {
        model,     run->trainer->prefill,  run->trainer->decode, s->cfg.V,
        s->cfg.Vp, options->batch.seq_len, s->decode_batch,      attention_config_rereads_at(s->cfg)};
    generator_open(&run->generator, functions, &run->data, options);
}

// ---- saving and rolling back ----

// Copies the state of the run and starts to save the copy, or saves the model itself and waits.
static void run_save_(Run* run, int reasons) {
    comm_progress(&run->comm, COMM_SAVE, run->state.step, "a save");
    session_wait(&run->session, &run->log);
    session_saves(&run->session, reasons);
    run_agree_on_parameters(run);
    run->state.sequence = run->train ? (int64_t)run->train->next : 0;
    run->state.samples_at = (int64_t)run->generator.rng.at;
    log_sync(&run->log);
    checkpoint_start(&run->session.checkpoints, &run->state);
    if (!run->session.checkpoints.copies) {
        session_wait(&run->session, &run->log);
    }
}

int run_saves(const Run* run) {
    return (run->due & (SESSION_SAVE | SESSION_SAVE_BY_CLOCK | SESSION_SAVE_BEST)) != 0;
}

void run_save(Run* run) { run_save_(run, run->due); }

// Sets the weights of the frozen base of an adapter, which all ranks have, and their checksum.
static void run_load_base_(Run* run) {
    const Settled s = setup_base(run->settled);
    const ModelAccess access = run->trainer->access;
    Model* base = run->trainer->base(run->model);
    const ModelFiles files = {.model = base,
                              .access = access,
                              .map = access.map(base),
                              .state = access.state(base),
                              .dtype = s.saved_dtype,
                              .in_place = run->plan.in_place && !settled_has_blocks(&s),
                              .comm = &run->comm};
    load_model(&files, (LoadFrom){.path = run->model_path, .which = (HfWeights)s.options.model.weights},
               &run->state.base);
    if (run->comm.size > 1) {
        char words[32];
        const uint64_t sum = run->trainer->checksum(base, all_parameters());
        snprintf(words, sizeof(words), "%016llx", (unsigned long long)sum);
        comm_agree_in(&run->comm, 0, "the parameters of the base (checksum)", sum, words);
    }
}

void run_load(Run* run, const char* checkpoint, const SavedState* saved) {
    const Options* o = &run->settled->options;
    const int has_adapter = model_has_adapter(run->settled->cfg);
    if (has_adapter) {
        run_load_base_(run);
    }
    if (checkpoint) {
        run_restore(run, checkpoint, saved, (uint64_t)run->resume.sequence);
        return;
    }
    load_model(&run->files,
               (LoadFrom){.path = has_adapter ? run->adapter_path : run->model_path,
                          .which = (HfWeights)o->model.weights,
                          .seed = o->data.seed,
                          .more = run->data.is_extended ? &run->more : NULL,
                          .merged = has_adapter ? NULL : run->adapter_path},
               NULL);
}

void run_restore(Run* run, const char* path, const SavedState* saved, uint64_t sequence) {
    load_checkpoint(&run->files, path, saved);
    run_state_restore(&run->state, &saved->run);
    if (!checkpoint_average_fits(saved, run->files.state->optimizer, &run->files.map->of)) {
        run->state.average_from = run->state.updates; // it starts now
    }
    if (run->train) {
        dataloader_seek(run->train, sequence);
    }
    rand_seek(&run->generator.rng, (uint64_t)saved->run.samples_at);
}

int run_diverges(Run* run) {
    return session_diverged(&run->session, &run->log, &run->state, run->verdict.where, run->divergence);
}

void run_roll_back(Run* run) {
    SavedState saved;
    char path[PATH_MAX];
    const uint64_t next = run->train->next;
    const int64_t from = run->state.step;
    session_roll_back(&run->session, run->divergence, path, &saved);
    run_restore(run, path, &saved, next);
    const CheckpointRun* now = &run->session.checkpoints.run;
    if (!state_validates_same(&saved, now->val_sets, now->num_val_sets)) {
        run->state.validations = validations_open();
    }
    state_close(&saved);
    log_rollback(&run->log, from, run->state.step, run->divergence);
}

// Returns true if a data file has changed during the run, so that some rank has a wrong batch.
static int run_data_is_bad_(Run* run, const Dataloader* loader) {
    return run_agree_(run, dataloader_error(loader) ? RUN_BAD_DATA_ : 0);
}

// Ends the program if a data file has changed during the run, after saving the run as it was before
// sequence `next`.
static void run_check_data_(Run* run, const Dataloader* loader, uint64_t next) {
    if (!run_data_is_bad_(run, loader)) {
        return;
    }
    const char* error = dataloader_error(loader);
    dataloader_seek(run->train, next);
    if (session_is_unsaved(&run->session, &run->state)) {
        run_save_(run, SESSION_SAVE);
    }
    session_wait(&run->session, &run->log);
    CHECK(!error, "%s", error);
    comm_barrier(&run->comm); // waits until the rank with the bad data ends all
}

// ---- a step ----

// Adjusts the loss scale. Returns true if the gradient overflowed and a smaller scale may help:
// then the step is neither an outlier nor a sign of divergence.
static int run_overflowed_(LossScale* scale, double loss, double norm, char reason[96]) {
    const float before = scale->scale;
    loss_scale_update(scale, isfinite(norm));
    if (isfinite(norm) || !isfinite(loss) || scale->scale == before) {
        return 0;
    }
    snprintf(reason, 96, "gradient overflow: loss scale %g, was %g", scale->scale, before);
    return 1;
}

// Judges an update made during the backward pass: complete, partial or none.
static void run_judge_in_backward_(ModelConfig cfg, const InBackward* made, RunVerdict* verdict) {
    verdict->is_made = made->updated > 0;
    if (verdict->is_made && made->stopped_at > 0) {
        snprintf(verdict->reason, sizeof(verdict->reason),
                 "in block %d and all below it, whose gradient is not finite",
                 model_group_layer(cfg, made->stopped_at));
    } else if (verdict->is_made && made->stopped_at == 0) {
        snprintf(verdict->reason, sizeof(verdict->reason),
                 "outside of the blocks, where the gradient is not finite");
    }
}

// A micro-batch of an update.
typedef struct {
    DataloaderSpan span;
    double loss; // mean; NAN: not finite
    int rank;    // the one that has it, or the first whose part of it is not finite
} RunMicroBatch_;

// Returns micro-batch k of the update, whose reports were gathered.
static RunMicroBatch_ run_micro_batch_(const Run* run, int64_t micro_steps, int64_t k) {
    const GridShape shape = run->settled->ranks.grid.shape;
    RunMicroBatch_ batch = {dataloader_micro_batch(run->train, run->first_sequence, k), 0, -1};
    for (int r = 0; r < run->comm.size; r++) {
        const Grid grid = grid_of(shape, r);
        if (grid.data_rank == k % shape.data && grid_tells(&grid)) {
            const double sum = rank_report_losses(run_report_of_(run, r, micro_steps))[k / shape.data];
            batch.rank = batch.rank < 0 || (isfinite(batch.loss) && !isfinite(sum)) ? r : batch.rank;
            batch.loss += isfinite(sum) ? sum : NAN;
        }
    }
    batch.loss /= (double)dataloader_targets(run->train, batch.span);
    return batch;
}

// Finds the data of a step whose loss or gradient is bad: the first micro-batch whose loss is not
// finite, or else the one with the highest loss. Returns a description that the caller frees.
static char* run_find_fault_(const Run* run) {
    const int64_t micro_steps = run_micro_steps(run, run_batch(run) / run->settled->options.batch.seq_len),
                  count = (run->train->settings.sequences + run->train->B - 1) / run->train->B;
    RunMicroBatch_ worst = run_micro_batch_(run, micro_steps, 0);
    TextBuffer text;
    for (int64_t k = 1; k < count && isfinite(worst.loss); k++) {
        const RunMicroBatch_ other = run_micro_batch_(run, micro_steps, k);
        worst = other.loss <= worst.loss ? worst : other;
    }
    text_buffer_open(&text, "the data of an update");
    if (isfinite(worst.loss)) {
        fprintf(text.file, "the highest loss is %.4f, in ", worst.loss);
    } else {
        fputs("the loss is not finite in ", text.file);
    }
    if (run->comm.size > 1) {
        fprintf(text.file, "rank %d's ", worst.rank);
    }
    dataloader_print_place(text.file, run->train, worst.span);
    return text_buffer_close(&text);
}

// Returns the number of updates in the average of the weights.
static int64_t run_averaged_(const Run* run) { return run->state.updates - run->state.average_from; }

static RunVerdict run_judge_(Run* run, const RunUpdate_* update) {
    const Options* o = &run->settled->options;
    RunState* state = &run->state;
    // The loss has a factor of 1 / batch for each token; it should be 1 / counted.
    const double batch = (double)run_batch(run), factor = targets_factor(batch, update->counted);
    const double scale = factor / state->loss_scale.scale;
    RunVerdict verdict;
    free(run->verdict.where);
    memset(&verdict, 0, sizeof(verdict));
    verdict.loss = update->losses / batch * factor;
    verdict.norm = sqrt(update->square_sum) * scale;
    verdict.divergence = settled_has_teacher(run->settled) ? update->divergence / update->counted : NAN;
    verdict.flops = update->flops;
    verdict.update = setup_update(o, state->step, state->updates + 1, verdict.norm);
    verdict.update.grad_scale *= (float)scale;
    verdict.update.average_n = run_averaged_(run) + 1;
    int skip = run_overflowed_(&state->loss_scale, verdict.loss, verdict.norm, verdict.reason);
    if (!skip) {
        const UpdateVerdict guard = outliers_check(&state->guard, verdict.loss, verdict.norm);
        skip = guard != UPDATE_DO;
        snprintf(verdict.reason, sizeof(verdict.reason), "%s", outliers_reason(guard));
        verdict.where = skip ? run_find_fault_(run) : NULL;
    }
    verdict.is_made = !skip;
    if (o->memory.update_in_backward) {
        run_judge_in_backward_(run->settled->part, &run->in_backward, &verdict);
    }
    const float decided[3] = {verdict.update.lr, verdict.update.grad_scale, (float)verdict.is_made};
    run->agreement = xxh64(decided, sizeof(decided));
    return verdict;
}

// Notes that sequences, or windows, become longer with this step.
static void run_note_stage_(Run* run, Stages stages, const char* grow) {
    const int64_t step = run->state.step, length = stages_at(&stages, step);
    char note[80];
    if (step > 0 && length != stages_at(&stages, step - 1)) {
        snprintf(note, sizeof(note), "note: from step %lld on, %s have %lld tokens", (long long)step + 1,
                 grow, (long long)length);
        log_note(&run->log, note);
    }
}

void run_begin_step(Run* run) {
    const Options* o = &run->settled->options;
    const int64_t sequences = run_batch(run) / o->batch.seq_len,
                  micro_steps = run_micro_steps(run, sequences);
    run->begin_s = time_now_s();
    if (o->output.overfit) {
        dataloader_seek(run->train, 0);
    }
    run_note_stage_(run, settled_lengths(o), "sequences");
    run_note_stage_(run, settled_windows(o), "windows");
    dataloader_resize(run->train, sequences, run_length(run));
    run->first_sequence = run->train->next;
    run->waited_s = run->train->wait_s;
    rank_report_open(run->report, run->settled, micro_steps);
    run->report->agreement = run->agreement;
    run->turn = (RunTurn){.dloss = (float)(run->state.loss_scale.scale / (double)run_batch(run)),
                          .forward = run_all_micro_steps_(run, sequences),
                          .backward = run_all_micro_steps_(run, sequences)};
    comm_progress(&run->comm, COMM_DATA, run->state.step, "the gradient of an update");
}

const RunTurn* run_turn(Run* run, InBackward* hook) {
    RunTurn* turn = &run->turn;
    const Settled* s = run->settled;
    const Grid* grid = &s->ranks.grid;
    const int64_t before = turn->count > 0 ? turn->now.micro_step : -1,
                  micro_steps = run_micro_steps(run, run_batch(run) / s->options.batch.seq_len);
    comm_alive(&run->comm);
    if (!pipeline_action(grid->shape.pipeline, grid->stage, micro_steps, turn->count++, &turn->now)) {
        return NULL;
    }
    turn->is_other = turn->now.micro_step != before;
    if (turn->now.pass == PIPELINE_FORWARD) {
        turn->batch = dataloader_next(run->train);
        turn->ahead++;
        micro_steps_next(&turn->forward, &turn->step);
        in_backward_batch(hook, turn->batch.counted, dataloader_error(run->train) != NULL);
    } else {
        turn->batch = dataloader_earlier(run->train, turn->ahead - 1);
        turn->ahead--;
        micro_steps_next(&turn->backward, &turn->step);
        rank_report_add(run->report, s, run_model_(run), turn->batch);
    }
    const int drops = s->cfg.dropout > 0 || s->cfg.attention_dropout > 0;
    turn->batch.random = drops ? dropout_key(s->options.data.seed, run->state.step) : 0;
    return turn;
}

InBackward* run_hook(Run* run) {
    const Options* o = &run->settled->options;
    const RunState* state = &run->state;
    if (!o->memory.update_in_backward) {
        return NULL;
    }
    in_backward_open(&run->in_backward, &state->shares, &state->guard,
                     setup_update(o, state->step, state->updates + 1, 0), o->optimizer.grad_clip,
                     (double)run_batch(run));
    return &run->in_backward;
}

int run_accepts(Run* run, Update* update) {
    const Options* o = &run->settled->options;
    const int64_t micro_steps = run_micro_steps(run, run_batch(run) / o->batch.seq_len);
    if (o->memory.update_in_backward) {
        in_backward_end(&run->in_backward, &run->state.shares);
    }
    run->report->wait_s = run->train->wait_s - run->waited_s;
    const RunUpdate_ sum = run_add_up_(run, micro_steps);
    run_watch_pace_(run, micro_steps);
    run->data_wait_s += sum.wait_s;
    run_check_data_(run, run->train, run->first_sequence);
    run->verdict = run_judge_(run, &sum);
    comm_progress(&run->comm, COMM_UPDATE, run->state.step, "the update, a validation or samples");
    *update = run->verdict.update;
    return run->verdict.is_made && !o->memory.update_in_backward;
}

const double* run_moves_biases(const Run* run) {
    const int moves = run->verdict.is_made && run->settled->options.optimizer.router_bias_rate > 0;
    return moves ? rank_report_statistics(run->reports) : NULL;
}

// Returns the largest of all scores of the step; 0 without --qk-clip.
static double run_largest_score_(const Run* run) {
    const double* scores = rank_report_scores(run->reports);
    double largest = 0;
    for (size_t i = 0; i < run->reports->scores; i++) {
        largest = fmax(largest, scores[i]);
    }
    return largest;
}

const double* run_clips_heads(const Run* run) {
    const double limit = (double)run->settled->options.optimizer.qk_clip;
    return run->verdict.is_made && run_largest_score_(run) > limit ? rank_report_scores(run->reports) : NULL;
}

// Logs how the tokens of the step went to experts, its largest score, and the losses of its
// sources.
static void run_log_parts_(Run* run) {
    const ModelConfig cfg = run->settled->cfg;
    RankReport* sums = run->reports;
    const double *tokens = rank_report_statistics(sums), *losses = rank_report_sources(sums);
    if (tokens) {
        const RouterSummary routing = router_summary(tokens, cfg.L, cfg.E, cfg.E_used);
        log_routing(&run->log, routing.load, routing.entropy);
    }
    if (sums->scores > 0) {
        log_score(&run->log, run_largest_score_(run));
    }
    if (sums->sources > 0) {
        const LogMixture mixture = {&run->data.train, losses, losses + sums->sources};
        log_mixture(&run->log, mixture);
    }
}

// Logs the step that has just ended.
static void run_log_step_(Run* run) {
    const RunVerdict* verdict = &run->verdict;
    const UpdateGuard* guard = &run->state.guard;
    char note[MFU_NOTE_BYTES];
    const double mfu = mfu_of(&run->mfu, verdict->flops, run->step_s, time_now_s(), note);
    if (note[0]) {
        log_note(&run->log, note);
    }
    log_peak(&run->log, run->mfu.peak);
    log_data_wait(&run->log, run->data_wait_s);
    log_divergence(&run->log, verdict->divergence);
    run_log_parts_(run);
    if (run->settled->options.optimizer.find_lr) {
        lr_sweep_add(&run->sweep, verdict->update.lr, verdict->loss);
    }
    const LogUpdate update = {verdict->loss,
                              outliers_shown_z(guard, guard->loss_z),
                              verdict->norm,
                              outliers_shown_z(guard, guard->norm_z),
                              verdict->update.lr,
                              run->step_s * 1e3,
                              mfu};
    log_train(&run->log, run->state.step, update);
    if (run->reports->statistics > 0) {
        const ModelConfig cfg = run->settled->cfg;
        log_experts(&run->log, run->state.step, rank_report_statistics(run->reports), cfg.L, cfg.E,
                    router_statistics(cfg.E));
    }
    if (verdict->reason[0]) {
        log_skip(&run->log, run->state.step, verdict->reason, verdict->where ? verdict->where : "");
    }
}

void run_end_step(Run* run) {
    RunState* state = &run->state;
    const Options* o = &run->settled->options;
    const Stages batches = settled_batches(o);
    const int64_t batch = stages_at(&batches, state->step);
    state->updates += run->verdict.is_made;
    state->step++;
    state->stage = STAGE_UPDATED;
    state->tokens += batch;
    log_tokens(&run->log, (double)batch, (double)state->tokens,
               stages_sum(&batches, o->batch.steps) - stages_sum(&batches, state->step));
    run->step_s = time_now_s() - run->begin_s;
    run_log_step_(run);
}

// ---- between two steps ----

// Returns true if the run should stop. Called between two batches of a validation, or two
// tokens of a sample.
static int run_stops_(void* run_) {
    Run* run = (Run*)run_;
    comm_alive(&run->comm);
    run->is_stopping = run_agree_(run, session_stops(&run->session) ? SESSION_STOP : 0) != 0;
    return run->is_stopping;
}

// Returns true if a validation is due.
static int run_validation_is_due_(const Run* run) {
    return run->val && session_validation_is_due(&run->session, &run->state, run->validates_first);
}

static void run_show_average_(Run* run) {
    if (run->settled->optimizer.average.is_kept && run_averaged_(run) > 0 && !run->is_stopping &&
        run_validation_is_due_(run)) {
        run->trainer->show_average(run->model);
        run->shows_average = 1;
    }
}

// The data are checked only now, because the check may save the weights.
static void run_hide_average_(Run* run) {
    if (run->shows_average) {
        run->trainer->hide_average(run->model);
        run->shows_average = 0;
        for (int set = 0; set < run->data.num_val_sets; set++) {
            run_check_data_(run, &run->val[set], run->train->next);
        }
    }
}

int run_validates(Run* run, int part) {
    const int sets = run->data.num_val_sets;
    if (part == sets) {
        run_show_average_(run);
    }
    if (part == (run->shows_average ? 2 * sets : sets) || (part > 0 && run->is_stopping) ||
        !run_validation_is_due_(run)) {
        run_hide_average_(run);
        return 0;
    }
    run->val_set = part % sets;
    return 1;
}

static Dataloader* run_val_(const Run* run) { return &run->val[run->val_set]; }

static int64_t run_validation_steps_(const Run* run) {
    return run_micro_steps(run, run_val_(run)->settings.sequences);
}

int run_validation_batch(Run* run, int64_t i, Batch* batch) {
    const Batch none = {.B = 0};
    const Grid* grid = &run->settled->ranks.grid;
    const int64_t micro_steps = run_validation_steps_(run), turns = micro_steps + grid->shape.pipeline - 1,
                  own = i - grid->stage;
    if (i == 0) {
        rank_report_open(run->report, run->settled, micro_steps);
        run_agree_on_parameters(run);
        dataloader_seek(run_val_(run), 0);
    }
    if (i == turns || run_stops_(run)) {
        return 0;
    }
    comm_progress(&run->comm, COMM_EVALUATE, run->state.step, "a validation");
    log_progress(&run->log, run->state.step, "validating", i, turns);
    *batch = 0 <= own && own < micro_steps ? dataloader_next(run_val_(run)) : none;
    if (batch->B == 0) {
        return 1;
    }
    run->report->counted += batch->counted;
    run->report->target_bytes +=
        run_data_target_bytes(&run->data, batch->targets, (size_t)batch->B * (size_t)batch->T);
    return 1;
}

// Returns the name of the set; NULL: it has none.
static const char* run_val_name_(const Run* run) {
    return run->data.val_sets ? run_val_(run)->sources->source[0].name : NULL;
}

// Returns the result of the validation of the set.
static LogVal run_val_result_(Run* run) {
    const Dataloader* loader = run_val_(run);
    const RunUpdate_ all = run_add_up_(run, run_validation_steps_(run));
    return (LogVal){run_val_name_(run),
                    run->val_set == 0,
                    all.counted > 0 ? all.losses / all.counted : 0,
                    all.bytes > 0 ? all.losses / M_LN2 / all.bytes : NAN,
                    loader->settings.sequences,
                    (int64_t)loader->num_sequences};
}

// Logs the validation loss of the average on the set. It decides nothing.
static void run_log_average_(Run* run) {
    char name[256];
    const char* set = run_val_name_(run);
    if (run_data_is_bad_(run, run_val_(run))) { // run_hide_average_ reports it
        return;
    }
    LogVal val = run_val_result_(run);
    snprintf(name, sizeof(name), "%s%saverage", set ? set : "", set ? " " : "");
    val.name = name;
    val.is_first = 0;
    log_val(&run->log, run->state.step, &val);
}

void run_log_validation(Run* run) {
    RunState* state = &run->state;
    if (run->is_stopping) {
        return;
    }
    if (run->shows_average) {
        run_log_average_(run);
        return;
    }
    run_check_data_(run, run_val_(run), run->train->next);
    const LogVal val = run_val_result_(run);
    if (run->val_set == 0 && run->data.train.count > 1 && run->train->next > 0) {
        log_sources(&run->log, state->step, &run->data.train, run->train->next);
    }
    log_val(&run->log, state->step, &val);
    if (run->val_set > 0) {
        return;
    }
    state->val_loss = val.loss;
    validations_add(&state->validations, state->step, state->val_loss);
    session_judge_validation(&run->session, &run->log, state, run->settled->cfg.V);
}

int run_evaluates_tasks(const Run* run) {
    return !run->is_stopping && session_tasks_are_due(&run->session, &run->state);
}

void run_log_tasks(Run* run) {
    const EvaluationRun how = {run->trainer->token_losses,
                               run->model,
                               &run->comm,
                               run->settled->ranks.grid,
                               &run->log,
                               run_stops_,
                               run};
    evaluation_log(&run->evaluation, &how, run->state.step);
}

int run_samples(const Run* run) {
    return !run->is_stopping && session_samples_are_due(&run->session, &run->state);
}

void run_log_samples(Run* run) {
    generator_log(&run->generator, &run->log, run->state.step, run_stops_, run);
}

void run_reaches(Run* run, RunStage stage) {
    if (!run->is_stopping && run->state.stage < (int64_t)stage) {
        run->state.stage = stage;
    }
}

void run_agree(Run* run) {
    run->due = run_agree_(run, session_next(&run->session, &run->state, run->step_s));
    session_report(&run->session, &run->log);
}

int run_ends(const Run* run) {
    return run->due & SESSION_STOP || run->state.step >= session_last_step(&run->session, &run->state) ||
           lr_sweep_is_over(&run->sweep);
}

#endif // RUN_IMPLEMENTATION

#endif
