/*
start.h -- a run, from the command line to the training loop, and from the loop to the exit status.

    run_program   all of this, and generation
    run_open      options, data, sizes of the model; --print-config, --plan, --report
    run_begin     loaders, generator, checkpoints; initial weights, or a checkpoint
    (the loop)    run.h
    run_end       export, summary
    run_close     exit status
*/
#ifndef LLMC_START_H
#define LLMC_START_H

#include "llmc/model/map.h"
#include "llmc/model/model.h"
#include "llmc/run/run.h"
#include "llmc/run/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

// Prepares the process: its stack, standard files and signals. Call it once, before all else.
void run_open_process(void);

// Does everything that needs no model: reads the command line, joins the other ranks, opens the
// data, plans. Afterwards `trains` or `generate` says whether a model is needed; if neither is set,
// the program is done.
Run* run_open(int argc, char** argv, const Trainer* trainer);

// Opens everything else that training needs, sets the weights of the model, which is open, and
// opens the log.
void run_begin(Run* run, Model* model);

// Waits for the last save, exports, and prints a summary. Call it after the loop.
void run_end(Run* run);

// Returns the exit status of the program.
int run_close(Run* run);

// Runs the program once: trains a model in the loop, `train`, or generates text with it. Returns
// the exit status.
int run_program(int argc, char** argv, const Trainer* trainer, void (*train)(Model* model, Run* run));

#ifdef __cplusplus
}
#endif

#ifdef START_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/enum_words.h"
#include "llmc/base/file.h"
#include "llmc/base/lock.h"
#include "llmc/base/printable.h"
#include "llmc/base/shell_word.h"
#include "llmc/base/signals.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/threads.h"
#include "llmc/base/units.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/export.h"
#include "llmc/checkpoint/load_save.h"
#include "llmc/checkpoint/model_path.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/comm/comm.h"
#include "llmc/comm/stragglers.h"
#include "llmc/data/dataloader.h"
#include "llmc/data/opening.h"
#include "llmc/formats/hf_config.h"
#include "llmc/formats/hf_model.h"
#include "llmc/generate/generator.h"
#include "llmc/log/log.h"
#include "llmc/optim/outliers.h"
#include "llmc/optim/update_in_backward.h"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/groups.h"
#include "llmc/cost/mfu.h"
#include "llmc/plan/plan.h"
#include "llmc/report/compare.h"
#include "llmc/report/follow.h"
#include "llmc/report/page.h"
#include "llmc/run/evaluation.h"
#include "llmc/run/generate.h"
#include "llmc/run/parameters_agree.h"
#include "llmc/run/run_files.h"
#include "llmc/run/session.h"
#include "llmc/run/stop_run.h"
#include "llmc/setup/launcher.h"
#include "llmc/setup/ranks_agree.h"
#include "llmc/setup/resolve.h"
#include "llmc/setup/run_data.h"
#include "llmc/tokenizer/tokenizer.h"

#define START_SWEEP_FILE_ "find_lr.svg" // picture of --find-lr, in --out

// ---- opening and closing ----

// Opens the loaders, and allocates memory for the reports of an update or a validation.
static void start_open_data_(Run* run) {
    const int sets = run->data.num_val_sets;
    int64_t validation = 0;
    run->train = (Dataloader*)check_alloc(1 + (size_t)sets, sizeof(Dataloader), "loaders");
    run->val = run->train + 1;
    run_data_open_loaders(run->train, run->val, &run->data, run->settled);
    for (int i = 0; i < sets; i++) {
        const int64_t steps = run_micro_steps(run, run->val[i].settings.sequences);
        validation = steps > validation ? steps : validation;
    }
    const int64_t update = run_micro_steps(run, run->settled->sequences);
    const size_t bytes = rank_report_bytes(run->settled, update > validation ? update : validation);
    run->report = (RankReport*)check_alloc(bytes, 1, "losses");
    run->reports = (RankReport*)check_alloc((size_t)run->comm.size, bytes, "losses");
    run->paces = (double*)check_alloc((size_t)run->comm.size, sizeof(double), "paces of processes");
    stragglers_open(&run->pace, run->comm.size, run->comm.size / run->settled->ranks.grid.shape.pipeline);
}

// Opens the data, the tasks and the generator of samples.
static void start_open_inputs_(Run* run) {
    if (run_data_has_tokens(&run->data)) {
        start_open_data_(run);
    }
    evaluation_start(&run->evaluation, stdout, run->comm.size);
    run->floor = run_data_floor(&run->data, run->val ? run->val->settings.sequences : 0);
    run_open_generator(run, run->model, &run->settled->options);
}

// Opens the session, which saves, stops and resumes the run.
static void start_open_session_(Run* run) {
    const Trainer* trainer = run->trainer;
    CheckpointRun saved;
    memset(&saved, 0, sizeof(saved));
    saved.trainer = trainer->name;
    saved.model = run->files;
    saved.memory = run->plan.copy;
    saved.card = run_data_card(&run->data, run->settled->cfg.V);
    saved.tokenizer = run_data_saved_tokenizer(&run->data);
    saved.config = run->kept_config;
    saved.base = run->model_path;
    saved.train = &run->data.train;
    saved.num_val_sets = run_data_list_sets(saved.val_sets, &run->data, &run->settled->options);
    saved.extra = trainer->save_extra;
    saved.extra_context = run->model;
    session_open(&run->session, run->settled, &run->resume, saved, run->start_s);
}

// Prints the source of the initial weights, and a note if the model was trained with dropout.
static void start_print_weights_(const Run* run) {
    const char* path = run->model_path;
    if (run->resume.is_active) {
        return; // resume_check has printed it
    }
    if (!path) {
        printf("weights: random, from --seed %llu\n", (unsigned long long)run->settled->options.data.seed);
        return;
    }
    printable_line(stdout, "weights: %sread from %s",
                   run->settled->options.model.weights == HF_AVERAGE ? "the average, " : "", path);
    if (run->adapter_path) {
        printable_line(stdout, "adapter: read from %s%s", run->adapter_path,
                       model_has_adapter(run->settled->cfg) ? "" : ", merged into the weights");
    }
    if (run->data.is_extended) {
        printf(
            "tokenizer: the first %d of %d tokens are the model's own; the rows of the others start as the "
            "means of the tokens that spell them\n",
            run->more.own->vocab_size, run->more.extended->vocab_size);
    }
    const double dropout = file_is_directory(path) ? hf_config_dropout(path) : 0;
    const Options* o = &run->settled->options;
    if (dropout > 0 && o->batch.steps != 0 && o->optimizer.dropout == 0 &&
        o->optimizer.attention_dropout == 0) {
        printable_line(stdout,
                       "note: %s/config.json sets dropout to %g, which training takes from --dropout only",
                       path, dropout);
    }
}

// Prints how often the run validates, and on how much, if it decided that itself.
static void start_print_validations_(const Run* run) {
    const Settled* s = run->settled;
    const Options* o = &s->options;
    const long long sequences = run_data_all_eval_sequences(&run->data, o),
                    batches = (sequences + o->batch.size - 1) / o->batch.size;
    if (run->given->eval.every == OPTION_AUTO && !run->resume.is_active && o->batch.steps > 0 &&
        o->eval.every > 0 && sequences > 0) {
        printf("validation: every %d update%s, %lld micro-batch%s (%lld sequences), %.2g %% of the work\n",
               o->eval.every, words_s(o->eval.every), batches, batches == 1 ? "" : "es", sequences,
               100 * setup_validation_share(s, &run->data));
    }
}

static void start_print_device_(const Run* run) {
    printf("%s%s, peak %s\n", run->plan.device, run->plan.device_kind,
           units_rate(run->plan.peak, "FLOP").text);
}

// Says so if a step takes minutes: until its line appears the run seems to hang.
static void start_print_long_update_(const Run* run) {
    const Options* o = &run->settled->options;
    const double flops = model_flops_per_token(run->settled->cfg, o->batch.seq_len) * (double)o->batch.total,
                 least_s = flops / (run->plan.peak * run->comm.size);
    if (o->batch.steps != 0 && least_s > 60) {
        printf("time: an update takes at least %s, its %.3g TFLOP at the peak; --plan estimates the run\n",
               units_time(least_s).text, flops * 1e-12);
    }
}

// Prints the facts of the run: weights, data, device, and the lowest possible loss.
static void start_print_facts_(const Run* run) {
    start_print_weights_(run);
    if (run->teacher_path) {
        printable_line(stdout, "teacher: %s", run->teacher_path);
    }
    run_data_print(stdout, &run->data);
    start_print_device_(run);
    start_print_long_update_(run);
    start_print_validations_(run);
    if (isfinite(run->floor)) {
        printf(
            "floor: the entropy of the validation stories is %.4f nats per token; no model can do better\n",
            run->floor);
    }
    export_print(stdout, &run->settled->options);
    fflush(stdout); // the first step may take long
}

// Sets the state and the weights of a new run, or restores both from a checkpoint.
static void start_open_state_(Run* run) {
    const Options* o = &run->settled->options;
    run->state = run_state_open(outliers_open(o->optimizer.skip_loss_z, o->optimizer.skip_grad_z),
                                run->plan.loss_scale);
    if (o->memory.update_in_backward) {
        run->state.shares = clip_shares_open(run->settled->cfg);
    }
    run->validates_first =
        o->program.trainer == OPTION_GPU || // a GPU is fast
        setup_validates_first(o, model_flops_per_token(run->settled->cfg, o->batch.seq_len),
                              run_data_all_eval_sequences(&run->data, o));
    if (run->resume.is_active) {
        run_load(run, run->resume.path, &run->resume.saved);
    } else {
        run_load(run, NULL, NULL);
    }
    run_agree_on_parameters(run);
}

// Sets the weights of the teacher, if this rank has it; returns their checksum.
static uint64_t start_load_teacher_(Run* run, Model* teacher) {
    uint64_t checksum = 0;
    const Settled s = setup_teacher(run->settled);
    const ModelAccess access = run->trainer->access;
    if (teacher) {
        const ModelFiles files = {teacher,
                                  access,
                                  access.map(teacher),
                                  access.state(teacher),
                                  s.saved_dtype,
                                  run->plan.in_place && !s.options.texts.quantize,
                                  &run->comm,
                                  0};
        load_model(&files, (LoadFrom){.path = run->teacher_path, .which = HF_LAST}, &checksum);
    }
    return checksum;
}

// Keeps the checksum of the weights that the ranks of the last stage have read, and compares what
// ranks with the same part have in memory.
static void start_agree_on_teacher_(Run* run, uint64_t read, uint64_t in_memory) {
    char words[32];
    Comm* comm = &run->comm;
    uint64_t* all = (uint64_t*)check_alloc((size_t)comm->size, sizeof(uint64_t), "checksums of ranks");
    comm_all_gather(comm, all, &read, sizeof(read));
    run->state.teacher = all[comm->size - 1];
    free(all);
    snprintf(words, sizeof(words), "%016llx", (unsigned long long)in_memory);
    comm_agree_in(comm, ranks_data(&run->settled->ranks).first, "the parameters of the teacher (checksum)",
                  in_memory, words);
}

// Sets the weights of the teacher, if any. A run that continues must have the same ones, and so for
// the base of an adapter, whose weights are set.
static void start_open_teacher_(Run* run) {
    Model* teacher = run->trainer->teacher(run->model);
    if (run->teacher_path) {
        const uint64_t checksum = start_load_teacher_(run, teacher);
        start_agree_on_teacher_(run, checksum,
                                teacher ? run->trainer->checksum(teacher, all_parameters()) : 0);
    }
    resume_check_weights(&run->resume, &run->settled->options, stdout, &run->state);
}

static void start_open_log_(Run* run) {
    char program[128];
    options_version(program, sizeof(program), &run->settled->options, run->trainer->program_name);
    TextBuffer command;
    text_buffer_open(&command, "the command");
    shell_print_command(command.file, run->command);
    char* typed = text_buffer_close(&command);
    const LogIdentity who = {program,    run->trainer->name, run->plan.device,       typed,
                             run->floor, plan_print_json,    &run->plan.model.memory};
    session_begin(&run->session, &run->resume, &run->state, &run->log, run->results, who);
    free(typed);
}

// Prints the start of a command that uses the model, after a phrase that says what it does.
static void start_print_command_(const Run* run, const char* what) {
    printf("%s: ", what);
    shell_print(stdout, run->program);
    fputs(" --model ", stdout);
    if (model_has_adapter(run->settled->cfg)) {
        shell_print(stdout, run->settled->options.model.path);
        fputs(" --adapter ", stdout);
    }
    shell_print(stdout, run->settled->options.output.dir);
}

// Prints --prompt with the first words of the training data, so that the model knows them.
static void start_print_opening_(const RunData* data) {
    char text[OPENING_BYTES] = "";
    if (data->train.count > 0) {
        opening_of(text, &data->train.source[0].stream, &data->tokenizer);
    }
    fputs(text[0] == '-' ? " --prompt=" : " --prompt ", stdout); // else it would be an option
    shell_print(stdout, text[0] ? text : "Once upon a time");
    putchar('\n');
}

// Prints a command that generates text with the model, if the model was saved with its tokenizer.
static void start_print_use_(const Run* run) {
    char path[PATH_MAX];
    const Tokenizer* tokenizer = run_data_saved_tokenizer(&run->data);
    if (run->session.can_save && run_is_first(run) && tokenizer) {
        checkpoint_path(path, run->settled->options.output.dir, run->state.step, "");
        if (access(path, F_OK) == 0 && run_data_learns_chats(&run->data)) {
            start_print_command_(run, "talk to it");
            puts(" --interactive");
        } else if (access(path, F_OK) == 0) {
            start_print_command_(run, "generate text");
            start_print_opening_(&run->data);
        }
    }
}

// Prints the planned memory by kind, and the memory used in addition.
static void start_print_memory_(Run* run, double beside_mib) {
    TextBuffer note;
    text_buffer_open(&note, "the summary");
    plan_print_kinds(note.file, &run->plan.model.memory);
    if (isfinite(beside_mib)) {
        fprintf(note.file, "; beside it on the GPU, by CUDA and its libraries: %.1f MiB", beside_mib);
    }
    fprintf(note.file, "; this process: %.1f MiB, with its program, libraries, data and vocabulary",
            log_peak_mib());
    char* text = text_buffer_close(&note);
    log_note(&run->log, text);
    free(text);
}

// Prints the checkpoint that --keep-best has kept.
static void start_print_best_(const Run* run) {
    char path[PATH_MAX];
    const Validations* v = &run->state.validations;
    checkpoint_path(path, run->settled->options.output.dir, v->best_step, "");
    if (run->session.can_save && run->settled->options.output.keep_best && isfinite(v->best) &&
        access(path, F_OK) == 0) {
        printable_line(stdout, "best validation loss %.4f: %s", v->best, path);
    }
}

// Exports the model and prints the summary, after the last step.
static void start_summarize_(Run* run) {
    double peak_mib, beside_mib;
    comm_progress(&run->comm, COMM_SAVE, run->state.step, "the export");
    export_model(&run->files, &run->settled->options, &run->data);
    run->trainer->memory(&peak_mib, &beside_mib);
    const LogSummary end = {run->state.step,
                            run->state.val_loss,
                            run->state.validations.best,
                            run->state.validations.best_step,
                            run->floor,
                            run->settled->options.batch.seq_len,
                            (double)memory_bytes(&run->plan.model.memory, MEMORY_DEVICE) / (1 << 20),
                            comm_max(&run->comm, peak_mib)};
    log_summary(&run->log, end);
    start_print_memory_(run, beside_mib);
}

// Writes the picture of --find-lr into --out.
static void start_write_sweep_(const LrSweep* sweep, const char* out) {
    char path[PATH_MAX];
    TextBuffer picture;
    text_buffer_open(&picture, START_SWEEP_FILE_);
    lr_sweep_svg(picture.file, sweep);
    char* text = text_buffer_close(&picture);
    file_join(path, out, START_SWEEP_FILE_);
    file_write_text(path, text, picture.bytes);
    printable_line(stdout, "find-lr: wrote %s", path);
    free(text);
}

// Prints the losses of --find-lr, and the rate to take; for Muon both rates, which rose together.
static void start_print_sweep_(const Run* run) {
    const LrSweep* sweep = &run->sweep;
    const Options* o = &run->settled->options;
    const double rate = lr_sweep_rate(sweep);
    lr_sweep_draw(stdout, sweep);
    if (!isfinite(rate)) {
        fputs("find-lr: the loss did not fall at any rate\n", run->results);
        return;
    }
    fprintf(run->results, "find-lr: --lr %.2g", rate);
    if (o->optimizer.name == OPTIMIZER_MUON) {
        fprintf(run->results, " --matrix-lr %.2g", o->optimizer.matrix_lr * rate / o->optimizer.lr);
    }
    fprintf(run->results, " for %lld update%s; the loss was lowest at %.2g\n", (long long)sweep->updates,
            words_s((double)sweep->updates), lr_sweep_lowest(sweep));
}

// Ends a run of --find-lr, which has trained for nothing else.
static void start_end_sweep_(const Run* run) {
    if (run_is_first(run)) {
        start_print_sweep_(run);
        if (run->given->output.dir[0]) {
            start_write_sweep_(&run->sweep, run->given->output.dir);
        }
    }
}

void run_begin(Run* run, Model* model) {
    run_set_model(run, model);
    start_open_inputs_(run);
    start_open_session_(run);
    start_print_facts_(run);
    start_open_state_(run);
    start_open_teacher_(run);
    start_open_log_(run);
    if (run->settled->options.optimizer.find_lr) {
        printf("find-lr: at most %d updates with rates from %.2g on\n", LR_SWEEP_UPDATES,
               (double)setup_lr(&run->settled->options, 0));
        fflush(stdout);
    }
}

static void start_close_training_(Run* run) {
    session_close(&run->session);
    generator_close(&run->generator);
    evaluation_close(&run->evaluation);
    if (run->train) {
        for (int i = 0; i < run->data.num_val_sets; i++) {
            dataloader_close(&run->val[i]);
        }
        dataloader_close(run->train);
        free(run->train);
    }
    free(run->report);
    free(run->reports);
    free(run->paces);
    stragglers_close(&run->pace);
    log_close(&run->log);
}

void run_end(Run* run) {
    const int is_done = !(run->due & SESSION_STOP), is_saved = run->session.can_save;
    comm_progress(&run->comm, COMM_SAVE, run->state.step, "the last save");
    session_wait(&run->session, &run->log);
    const int why = comm_first(&run->comm, session_stops(&run->session));
    if (is_done && run->settled->options.optimizer.find_lr) {
        start_end_sweep_(run);
    } else if (is_done) {
        session_ended_early(&run->session, &run->log, &run->state);
        start_summarize_(run);
        start_print_best_(run);
        start_print_use_(run);
    } else {
        session_stopped(&run->session, &run->log, &run->state, why, run->program);
    }
    start_close_training_(run);
    lock_release(run->settled->options.optimizer.find_lr ? run->resume.lock : NULL);
    // A process that dies by a signal ends the others in the middle of their work.
    run->dies = !is_done && !is_saved && run->comm.size == 1;
    run->status = is_done                  ? EXIT_SUCCESS
                  : why == SESSION_REQUEST ? EXIT_STOPPED
                  : is_saved               ? EXIT_INTERRUPTED
                                           : 128 + why;
}

// ---- from the command line to a model ----

// Lets rank 0 set up the run first: it encodes text and trains vocabularies, which the others then
// find.
static void start_turn_begins_(Run* run) {
    if (!run_is_first(run)) {
        comm_barrier(&run->comm);
    }
}

static void start_turn_ends_(Run* run) {
    if (run_is_first(run)) {
        comm_barrier(&run->comm);
    }
    comm_progress(&run->comm, COMM_SETUP, -1, "setting up the run");
}

// Prints the grid of the ranks, unless they divide only the data.
static void start_print_grid_(FILE* file, GridShape shape) {
    if (!grid_is_plain(shape)) {
        fprintf(file, "; tensor %d, context %d, data %d, pipeline %d", shape.tensor, shape.context,
                shape.data, shape.pipeline);
    }
    if (grid_experts(shape) > 1) {
        fprintf(file, ", experts %d", shape.experts);
    }
}

// Prints the number of ranks, and where they run: on stderr if generated text goes to stdout.
static void start_print_ranks_(const Run* run, Ranks ranks) {
    const Comm* c = &run->comm;
    FILE* file = run->given->generates && run_is_first(run) ? stderr : stdout;
    const int data = ranks_data(&ranks).size;
    if (c->size > 1) {
        fprintf(file, "processes: %d on %d machine%s (%s, %s), rank 0 on %s", c->size, c->nodes,
                words_s(c->nodes), run->launcher, c->library, c->host);
        start_print_grid_(file, ranks.grid.shape);
        fprintf(file, "; zero %d, shards of %d", ranks.zero, ranks.shards);
        data > ranks.shards ? fprintf(file, ", %d replicas\n", data / ranks.shards) : fprintf(file, "\n");
    }
}

// Joins the other ranks of the run, if any. Returns how the run is divided among them.
static Ranks start_join_(Run* run) {
    const Options* o = run->given;
    const int is_only_plan = o->plan && o->ranks.processes > 1 && o->ranks.rank == OPTION_AUTO;
    const Launcher alone = {{0, 1, 0, 1}, LAUNCHER_AUTO, "", {"", 0, "", ""}},
                   launch = is_only_plan ? alone : launcher_find(o);
    const int size = is_only_plan ? o->ranks.processes : launch.place.size;
    comm_open(&run->comm, launch.place, &launch.meeting, o->ranks.timeout);
    ranks_agree_on_program(&run->comm);
    ranks_agree_on_command(&run->comm, o);
    start_turn_begins_(run); // rank 0 refuses a wrong grid for all
    Ranks ranks = {launcher_grid(o, launch.place.rank, size), 0, size, size};
    ranks.zero = launcher_zero(o, &ranks.grid);
    start_turn_ends_(run);
    grid_name_ranks(ranks.grid.shape, &run->comm);
    ranks.shards = launcher_shards(o, &ranks.grid, &run->comm);
    ranks.node_ranks = launcher_node_ranks(o, size, &run->comm);
    threads_open(o->memory.threads, run->comm.local_size, launch.launcher);
    run->launcher = launch.launcher;
    run->has_joined = 1;
    return ranks;
}

// Prints the memory and time that the run would need, for --plan.
static void start_print_plan_(Run* run) {
    const int is_open = run_data_has_tokens(&run->data) && !run->data.is_unknown;
    run->plan.eval_sequences = is_open ? run_data_all_eval_sequences(&run->data, &run->settled->options) : 0;
    plan_print(stdout, run->settled, &run->plan);
    plan_print_traffic(stdout, run->settled);
    if (is_open) {
        run_data_print_mixture(stdout, &run->data, &run->settled->options);
    }
}

// Prints where each element is, rank by rank.
static void start_print_maps_(const Settled* s) {
    const int layers_in_ring = s->options.program.trainer == OPTION_GPU ? 2 : 1;
    const MapOf of = settled_map(s, layers_in_ring);
    for (int rank = 0; rank < of.tensor * of.data * of.pipeline; rank++) {
        Memory memory = memory_on_host();
        Map map;
        map_open(&map, &memory, MEMORY_HOST, &of, rank);
        map_print(stdout, &map);
        memory_close(&memory);
    }
}

// Prints how long stages wait for each other, if that is long.
static void start_note_pipeline_(const Settled* s) {
    const int stages = s->ranks.grid.shape.pipeline;
    const int64_t data = s->ranks.grid.shape.data, batches = (s->micro_batches + data - 1) / data;
    if (stages > 1 && batches < 4 * (int64_t)stages) {
        printf("note: %lld micro-batch%s in %d stages: %.0f %% of the time is idle\n", (long long)batches,
               batches == 1 ? "" : "es", stages, 100 * (stages - 1) / (double)(batches + stages - 1));
    }
}

// Prints the memory that the run will need, before it is allocated.
static void start_print_memory_plan_(Run* run) {
    mfu_open(&run->mfu, comm_sum(&run->comm, run->plan.peak), run->plan.peak,
             run_is_first(run) ? run->plan.measure_peak : NULL, &run->settled->options, time_now_s());
    plan_print_memory(stdout, run->settled, &run->plan.model.memory);
    plan_print_traffic(stdout, run->settled);
    start_note_pipeline_(run->settled);
    fflush(stdout); // the system may kill a run that uses too much
}

// Does the work of --print-config or --plan, or all that remains before a model.
static void start_dispatch_(Run* run, const Settled* s) {
    const Options* options = &s->options;
    if (!options_only_look(options)) {
        evaluation_open(&run->evaluation, &run->data, options, s->cfg.V);
    }
    start_turn_ends_(run);
    if (options->print_config) {
        options_print_config(stdout, options);
        return;
    }
    options_print_banner(stdout, options, run->program);
    if (!run->resume.is_active) {
        options_print_recipe(stdout, options);
    }
    fflush(stdout); // the next steps may take long
    if (options->plan) {
        run_decide(run, s);
        start_print_plan_(run);
        if (options->plan == PLAN_MAP && run_is_first(run)) {
            start_print_maps_(s);
        }
        return;
    }
    resume_check(&run->resume, s, stdout, run->trainer->name, &run->data);
    run_agree_on_files(run, options);
    ranks_agree_on_run(&run->comm, options, s->cfg, &run->data);
    signals_end("setting up the run");
    if (options->optimizer.find_lr) {
        const Settled sweep = setup_sweep(s);
        run->sweep.updates = options->batch.steps;
        run->sweep.long_run = setup_long_lr(options);
        run_decide(run, &sweep);
    } else {
        run_decide(run, s);
    }
    start_print_memory_plan_(run);
    run->trains = 1;
}

// Returns the given option that is about existing runs; NULL: none. A file of all options has them
// without a value.
static const char* start_asked_(const Options* o) {
    return o->reports.report[0]     ? "report"
           : o->reports.compare[0]  ? "compare"
           : o->reports.follow[0]   ? "follow"
           : o->reports.stop_run[0] ? "stop-run"
                                    : NULL;
}

// Refuses other options beside one that is about existing runs: only --report and --compare go
// together.
static void start_check_reports_(const Options* o, const char* asked) {
    if (o->reports.out_html[0] && !o->reports.report[0]) {
        die_usage("--out-html %s needs the runs to report on: --report", o->reports.out_html);
    }
    for (int i = 0; i < OPTION_ROWS && asked; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        if (o->given[i] && strcmp(row->group, "reports") != 0) {
            die_usage("--%s cannot be combined with --%s: it does not train", asked, row->name);
        }
        if (o->given[i] && (o->reports.follow[0] || o->reports.stop_run[0]) &&
            strcmp(row->name, asked) != 0) {
            die_usage("--%s cannot be combined with --%s; wanted one of them", asked, row->name);
        }
    }
}

// Does the work of the options about existing runs. Returns true if one of them was given.
static int start_reports_(Run* run) {
    const Options* o = run->given;
    const char* asked = start_asked_(o);
    start_check_reports_(o, asked);
    if (o->reports.compare[0]) {
        compare_runs(stdout, o->reports.compare);
    }
    if (o->reports.report[0]) {
        report_write(stdout, o->reports.report, o->reports.out_html);
    }
    if (o->reports.follow[0]) {
        follow_run(o->reports.follow);
    }
    if (o->reports.stop_run[0]) {
        run->status = stop_run(stdout, o->reports.stop_run);
    }
    return asked != NULL;
}

// Silences standard output, for --quiet, except for the results.
static void start_be_quiet_(Run* run) {
    const Options* o = run->given;
    if (o->output.quiet && !options_only_look(o) && !o->generates) {
        const int fd = dup(STDOUT_FILENO);
        run->results = fd < 0 ? NULL : fdopen(fd, "w");
        CHECK(run->results && freopen("/dev/null", "w", stdout),
              "standard output: cannot be set aside for --quiet: %s", strerror(errno));
    }
}

// Finds the model and the data, and returns the settings of the run. Rank 0 starts: it encodes text
// and trains vocabularies, which the others then find.
static Settled start_settle_(Run* run, Ranks ranks) {
    const Options options = resume_open(&run->resume, run->given, &run->comm);
    const int continues = run->resume.is_active;
    start_print_ranks_(run, ranks);
    const int has_adapter = continues && hf_adapter_is_in(run->resume.path);
    run->model_path = continues && !has_adapter ? run->resume.path : model_path_find(&options, run->newest);
    run->adapter_path = has_adapter ? run->resume.path
                        : continues ? NULL
                                    : model_path_of_adapter(&options, run->newest_adapter);
    run->teacher_path = model_path_of_teacher(&options, run->newest_teacher);
    if (run_is_first(run)) {
        run_check_outputs(run, &options);
    }
    start_turn_begins_(run);
    const ModelConfig found = resume_config(&run->resume, setup_read_model(run->model_path));
    const SettleInput input = {ranks,
                               run->trainer->dtype,
                               run->model_path,
                               found,
                               continues,
                               run->teacher_path,
                               setup_read_model(run->teacher_path),
                               run->adapter_path};
    run->kept_config = setup_kept_config(run->model_path);
    run->more = (MoreTokens){found.V, &run->data.own_tokenizer, &run->data.tokenizer};
    return settle(&run->data, &options, &input);
}

// Does everything between the command line and a model.
static void start_run_(Run* run) {
    const Options* options = run->given;
    if (start_reports_(run)) {
        file_flush_standard();
        return;
    }
    start_be_quiet_(run);
    const Ranks ranks = start_join_(run);
    if (options->generates) {
        start_print_ranks_(run, ranks);
        generate_open(run, ranks);
        return;
    }
    comm_progress(&run->comm, COMM_FIRST, -1, "checkpoints and data");
    const Settled s = start_settle_(run, ranks);
    start_dispatch_(run, &s);
    if (options_only_look(options)) {
        file_flush_standard();
    }
}

void run_open_process(void) {
    check_stack(); // before paths and messages, which need more than some stack limits
    file_open_standard();
    signals_open();
}

Run* run_open(int argc, char** argv, const Trainer* trainer) {
    Run* run = (Run*)check_alloc(1, sizeof(*run), "the run"); // a third of the smallest stack
    run->trainer = trainer;
    run->program = argv[0];
    run->command = argv;
    run->start_s = time_now_s();
    run->results = stdout;
    comm_expect(&run->comm, launcher_expect());
    options_parse(&run->given_, argc, argv, trainer->program);
    run->given = &run->given_;
    start_run_(run);
    return run;
}

int run_close(Run* run) {
    const int status = run->status, dies = run->dies;
    if (run->has_joined) {
        generate_close(run->generate);
        run_data_close(&run->data);
        resume_close(&run->resume);
        comm_close(&run->comm);
    }
    free(run->kept_config);
    free(run->verdict.where);
    options_close(&run->given_);
    CHECK(run->results == stdout || fclose(run->results) == 0, "standard output: cannot write: %s",
          strerror(errno));
    free(run);
    if (dies) {
        signals_end_now();
    }
    return status;
}

int run_program(int argc, char** argv, const Trainer* trainer, void (*train)(Model* model, Run* run)) {
    Run* run = run_open(argc, argv, trainer);
    if (run->trains || run->generate) {
        Model* model = (Model*)check_alloc(1, trainer->model_bytes, "model");
        const Memory* taken = trainer->open(model, run->settled, trainer->ledger(), &run->comm);
        memory_check(taken, &run->plan.model.memory);
        if (run->generate) {
            generate_texts(run, model);
        } else {
            run_begin(run, model);
            train(model, run);
            run_end(run);
        }
        trainer->close(model);
        free(model);
    }
    return run_close(run);
}

#endif // START_IMPLEMENTATION

#endif
