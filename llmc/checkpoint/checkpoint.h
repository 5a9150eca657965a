/*
checkpoint.h -- saves the complete state of a run in a directory, OUT/step_00001000/.

    config.json, generation_config.json, model.safetensors  a Hugging Face model (hf_model.h)
    adapter_config.json, adapter_model.safetensors          an adapter, in their place
    tokenizer.json, tokenizer_config.json, ...              its tokenizer, if the run has one
    model_average.safetensors                               average of its weights, if any
    optimizer.1of1.safetensors                              optimizer's state (optimizer_parts.h)
    matmul.json                                             GPU only (matmul_algorithms.h)
    state.json                                              all else, with checksums (run_state.h)

model.safetensors has the fp32 master weights, or 16-bit weights if the run has no master weights;
model_average.safetensors is fp32, and missing while the average (average.h) has no update. A model
larger than --model-file-gb is split into several files with an index (hf_model.h); each rank copies
and writes some of them.

The directory is complete or absent. A save copies the tensors, and checks that the disk has room.
Then a thread of each rank writes the copy while the run continues; when all have written, a thread
of rank 0 completes the directory (directory.h). A second save waits for the first. Once a newer
checkpoint is in place, --keep removes older ones, but never multiples of --keep-major or the best
one of --keep-best.

A failure is one error that names the file. Existing checkpoints are unharmed, and the unfinished
one is removed unless other ranks still write to it. Weights that are not finite are never saved:
they are such a failure.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/base/lock.h"
#include "llmc/formats/hf_adapter.h"
#include "llmc/formats/hf_config_write.h"
#include "llmc/formats/hf_model.h"
#include "llmc/formats/tensor_types.h"
#include "llmc/checkpoint/model_files.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/setup/options.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/tokenizer/model_card.h"
#include "llmc/tokenizer/tokenizer.h"
#include "llmc/comm/comm.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

// Functions that pin host memory, so that copies to it are fast, and unpin it; NULL: not needed.
typedef struct {
    void (*pin)(void* memory, size_t bytes);
    void (*unpin)(void* memory);
} CheckpointMemory;

// Everything that is the same in all checkpoints of a run.
typedef struct {
    const char* trainer; // trainer and precision in words: "CPU FP32"
    ModelFiles model;
    CheckpointMemory memory;
    ModelCard card;             // what the model's files say about it; borrows its strings
    const Tokenizer* tokenizer; // NULL: unknown
    // fields of config.json to keep (hf_config_kept); NULL: a new model
    const char* config;
    const char* base;         // path of the model that an adapter is for
    const DataSources* train; // training data
    ValidationSet val_sets[SOURCES_MAX];
    int num_val_sets;
    // Writes more small files into the directory, in the thread that saves; NULL: none.
    void (*extra)(const void* context, const char* directory);
    const void* extra_context;
} CheckpointRun;

// The files of the weights, and those that this rank writes.
typedef struct {
    HfModelFile* files;
    int count, most;    // number of files; most files of one rank
    int first, end;     // files of this rank: first ... end - 1
    HfModelFile groups; // groups of parameters in these files
} CheckpointModel;

// Weights that a checkpoint has: the last ones, or their average.
typedef struct {
    WholeGroups whole; // layout
    SafeTensorsDtype dtype;
    void* groups; // groups of this rank's files; NULL: not in this checkpoint
} CheckpointWeights;

typedef struct {
    char out[PATH_MAX];
    const Options* options;
    CheckpointRun run;
    CheckpointModel model;
    void* copy; // NULL before the first save, or if saves make no copy
    // groups of parameters, in the copy or in the model itself, and of their average
    CheckpointWeights weights[2]; // by HfWeights
    void* slots[MAP_SLOTS];       // of the optimizer's state, in the copy or in the model itself
    void* average;                // memory for groups of the average; NULL: the run has none
    size_t params_bytes, optimizer_bytes;
    // true: a save makes a copy; else the model must not change until the save has ended
    int copies;
    Lock* lock; // lock of checkpoint_lock; NULL: another rank has it

    SavedState state;        // state of the save in progress
    int is_running;          // true if a save is in progress, on all ranks alike
    int has_average;         // the checkpoint has an average of the weights
    int writes, completes;   // its threads' work: writing files, completing the directory
    int has_thread, is_done; // this rank has a thread; that thread has ended
    // checksums of this rank's files: of weights (most), of their average (most), then of its part
    uint64_t* written;
    pthread_t thread;
    int64_t saved_step;  // last step that was saved or resumed; -1: none
    int64_t saved_stage; // RunStage of that save
    int64_t whole_step;  // last step whose save has ended, or that was resumed
    double write_s;      // time of the thread; undefined while it runs
    double save_s;       // longest time of a save so far
} Checkpoints;

// ---- writing ----

// Returns an estimate of the bytes of a checkpoint, on the high side.
double checkpoints_disk_bytes(const Checkpoints* c);

// Returns the number of checkpoints that steps `after` + 1 to --steps leave, at most.
double checkpoints_kept(const Options* options, int64_t after);

// Removes the checkpoints that --keep no longer wants once `last`, the newest, exists.
void checkpoints_thin(const Options* options, const SavedState* last);

// ---- saving during a run ----

// Returns true if a save copies tensors even if they are in place. A run that continues after a
// save copies them and writes the copy in the background. A run that saves only at its end needs no
// memory for a copy; if a signal makes it save earlier, it waits.
static inline int checkpoints_copy(const Options* o) {
    return o->output.save_every > 0 && o->output.save_every < o->batch.steps;
}

// Returns the bytes of the copy that a save makes on this rank, for parameters of this type in
// files of at most max_gb.
size_t checkpoints_bytes(const MapOf* of, int rank, const OptimizerState* state, SafeTensorsDtype dtype,
                         double max_gb);

// Returns the bytes that each save needs for the average of the weights, including one gathered
// group; 0: the run has no average.
size_t checkpoints_average_bytes(const MapOf* of, int rank, SafeTensorsDtype dtype, double max_gb);

// The following functions are collective: all ranks call them in the same order.

// Prepares to save into --out, which exists. The options and all that `run` points to must outlive
// `c`. `after` updates are done. `lock` is the lock of checkpoint_lock, or NULL to take it now;
// only rank 0 holds it, and checkpoints_close releases it. Ends the program if the disk has no room
// for a checkpoint.
void checkpoints_open(Checkpoints* c, const Options* options, CheckpointRun run, Lock* lock, int64_t after);

// Waits until the save in progress is on the disk. Returns 0 if none is; else sets its path.
int checkpoint_wait(Checkpoints* c, char path[PATH_MAX]);

// Returns 1 and sets the path if the save in progress has ended. Does not wait.
int checkpoint_finished(Checkpoints* c, char path[PATH_MAX]);

// Copies the tensors of the model, and starts to write them. The previous save must have ended.
void checkpoint_start(Checkpoints* c, const RunState* run);

void checkpoints_close(Checkpoints* c);

#ifdef __cplusplus
}
#endif

#ifdef CHECKPOINT_IMPLEMENTATION

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/optim/schedule.h"

// ---- writing ----

// Divides the files among the ranks: each has consecutive ones.
static void checkpoint_model_open_(CheckpointModel* m, const MapOf* of, int rank, SafeTensorsDtype dtype,
                                   double max_gb) {
    const ModelConfig cfg = of->whole;
    const int size = of->tensor * of->data * of->pipeline;
    memset(m, 0, sizeof(*m));
    m->files = (HfModelFile*)check_alloc((size_t)model_groups(cfg), sizeof(HfModelFile), "files of a model");
    m->count = hf_model_files(m->files, cfg, dtype, model_has_adapter(cfg) ? INFINITY : 1e9 * max_gb);
    m->most = (m->count + size - 1) / size;
    m->first = m->count < rank * m->most ? m->count : rank * m->most;
    m->end = m->count < m->first + m->most ? m->count : m->first + m->most;
    if (m->first < m->end) {
        m->groups.first = m->files[m->first].first;
        m->groups.end = m->files[m->end - 1].end;
    }
}

static void checkpoint_model_close_(CheckpointModel* m) { free(m->files); }

// Returns the rank that writes the file of a whole group.
static int checkpoint_writer_of_(const Checkpoints* c, int g) {
    int file = 0;
    while (g >= c->model.files[file].end) {
        file++;
    }
    return file / c->model.most;
}

// Returns the bytes of this rank's groups.
static size_t checkpoint_params_bytes_(const CheckpointModel* m, const WholeGroups* whole) {
    return whole_group_begin(whole, m->groups.end) - whole_group_begin(whole, m->groups.first);
}

// Returns group g of weights in the copy.
static void* checkpoint_group_(const Checkpoints* c, HfWeights which, int g) {
    const CheckpointWeights* w = &c->weights[which];
    return (char*)w->groups +
           (whole_group_begin(&w->whole, g) - whole_group_begin(&w->whole, c->model.groups.first));
}

static int checkpoint_has_average_(Optimizer optimizer) { return optimizer.average.is_kept; }

// Return the number of checksums of a rank, and the index of the checksum of a file of weights.
static int checkpoint_checksums_(const Checkpoints* c) { return 2 * c->model.most + 1; }

static int checkpoint_checksum_at_(const Checkpoints* c, HfWeights which, int file) {
    return file / c->model.most * checkpoint_checksums_(c) + (int)which * c->model.most +
           file % c->model.most;
}

// Sets the name of file `file` of the weights: a model's, or an adapter's only one.
static void checkpoint_weights_name_(const Checkpoints* c, char name[64], HfWeights which, int file) {
    if (model_has_adapter(c->run.model.map->of.whole)) {
        snprintf(name, 64, HF_ADAPTER_FILE);
    } else {
        hf_model_file_name(name, which, file, c->model.count);
    }
}

// Adds a file to the list in state.json. `checksum` was computed while writing; 0: read the file
// again.
static void checkpoint_list_file_(SavedState* s, const char* directory, const char* name, uint64_t checksum) {
    char path[PATH_MAX];
    struct stat info;
    file_join(path, directory, name);
    CHECK(s->num_files < STATE_MAX_FILES, "%s: more than %d files", directory, STATE_MAX_FILES);
    CHECK(stat(path, &info) == 0, "%s: cannot read: %s", path, strerror(errno));
    if (!checksum) {
        char error[ERROR_BYTES];
        CHECK(file_checksum(path, &checksum, error), "%s", error);
    }
    const SavedFile file = {strdup(name), info.st_size, checksum};
    CHECK(file.name, "%s: no memory for a name", path);
    s->files[s->num_files++] = file;
}

// Returns true if a file has tensors. These files are listed after all ranks have written.
static int checkpoint_has_tensors_(const char* name) {
    return strstr(name, ".safetensors") && !file_ends_in(name, ".json");
}

// Lists the small files that the directory has so far.
static void checkpoint_list_small_files_(SavedState* s, const char* directory) {
    struct dirent* entry;
    DIR* dir = opendir(directory);
    CHECK(dir, "%s: cannot read: %s", directory, strerror(errno));
    while ((entry = readdir(dir))) {
        if (entry->d_name[0] != '.' && !checkpoint_has_tensors_(entry->d_name)) {
            checkpoint_list_file_(s, directory, entry->d_name, 0);
        }
    }
    closedir(dir);
}

double checkpoints_disk_bytes(const Checkpoints* c) {
    const ModelConfig cfg = c->run.model.map->of.whole;
    const int has_average = checkpoint_has_average_(c->run.model.state->optimizer);
    return hf_model_bytes(cfg, c->run.model.dtype) + has_average * hf_model_bytes(cfg, SAFETENSORS_F32) +
           optimizer_saved_bytes(c->run.model.state->optimizer, cfg) + (1 << 20);
}

// Returns the free bytes of OUT's file system; INFINITY if unknown: then the write fails if it is
// full.
static double checkpoint_free_bytes_(const Checkpoints* c) {
    struct statvfs info;
    return statvfs(c->out, &info) == 0 ? (double)info.f_bavail * (double)info.f_frsize : INFINITY;
}

// Ends the program if the disk has no room for a checkpoint. Names the last complete one, if any,
// and how to resume from it with fewer checkpoints.
static void checkpoint_require_room_(const Checkpoints* c, const char* name) {
    const double free_bytes = checkpoint_free_bytes_(c), mib = 1 << 20;
    char whole[PATH_MAX];
    if (free_bytes >= checkpoints_disk_bytes(c)) {
        return;
    }
    checkpoint_path(whole, c->out, c->whole_step, "");
    CHECK(c->whole_step >= 0, "%s: a checkpoint takes %.1f MiB, the disk has %.1f MiB free", name,
          checkpoints_disk_bytes(c) / mib, free_bytes / mib);
    CHECK(0,
          "%s: a checkpoint takes %.1f MiB, the disk has %.1f MiB free; %s is whole: "
          "--resume on --keep 2 continues from it and keeps fewer",
          name, checkpoints_disk_bytes(c) / mib, free_bytes / mib, whole);
}

double checkpoints_kept(const Options* o, int64_t after) {
    const int is_by_clock =
        (o->output.save_every == OPTION_AUTO && o->output.save_minutes > 0) || o->output.keep_best;
    const double left = (double)(o->batch.steps > after ? o->batch.steps - after : 0),
                 saves =
                     o->output.save_every > 0 ? ceil(left / o->output.save_every) : !!o->output.save_every,
                 others = is_by_clock * CHECKPOINT_KEPT_BY_CLOCK,
                 major = o->output.keep > 0 && o->output.keep_major ? floor(left / o->output.keep_major) : 0;
    return (o->output.keep > 0 ? fmin(saves + others, o->output.keep + major) : saves + others) +
           o->output.keep_best;
}

void checkpoints_thin(const Options* o, const SavedState* last) {
    const CheckpointsKept kept = {o->output.keep, o->output.keep_major,
                                  o->output.keep_best ? last->run.validations.best_step : -1};
    if (o->output.keep) {
        checkpoint_thin(o->output.dir, last, kept);
    }
}

// Prints a note if the disk has no room for all checkpoints that will be kept. It needs room for
// one more while a checkpoint is written.
static void checkpoint_warn_of_room_(const Checkpoints* c, int64_t after) {
    const double kept = checkpoints_kept(c->options, after), mib = 1 << 20,
                 free_bytes = checkpoint_free_bytes_(c);
    if (kept > 1 && kept * checkpoints_disk_bytes(c) > free_bytes) {
        printf("note: up to %.0f checkpoints of %.1f MiB, %.1f MiB, the disk has %.1f MiB free; --keep 1 "
               "keeps one\n",
               kept, checkpoints_disk_bytes(c) / mib, kept * checkpoints_disk_bytes(c) / mib,
               free_bytes / mib);
    }
}

// Returns the index of the first of `count` elements that is not finite; `count` if all are.
static size_t checkpoint_find_infinite_(const void* elements, SafeTensorsDtype dtype, size_t count) {
    const char* data = (const char*)elements;
    const size_t bytes = safetensors_dtype_bytes(dtype);
    const uint32_t exponent = dtype == SAFETENSORS_F32    ? 0x7F800000
                              : dtype == SAFETENSORS_BF16 ? 0x7F80
                                                          : 0x7C00;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = 0; // little-endian
        memcpy(&bits, data + i * bytes, bytes == 2 ? 2 : 4);
        if ((bits & exponent) == exponent) {
            return i;
        }
    }
    return count;
}

// Returns true if all weights of this rank's files are finite; else sets `error`. Other weights
// could not be resumed from, and --keep would remove a good checkpoint to make room for them.
static int checkpoint_is_finite_(const Checkpoints* c, const char* path, char* error) {
    for (int g = c->model.groups.first; g < c->model.groups.end; g++) {
        for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
            const TensorRow* row = &c->weights[HF_LAST].whole.rows[i];
            const size_t count = model_rows_in_files(row, c->run.model.map->of.whole) * row->cols;
            const void* tensor = tensor_in_group(row, checkpoint_group_(c, HF_LAST, g));
            const size_t bad = tensor_is_in_group(row, g)
                                   ? checkpoint_find_infinite_(tensor, c->run.model.dtype, count)
                                   : count;
            if (bad < count) {
                return error_set(
                    error, path,
                    "not saved: element %zu of %s, layer %d, is not finite: the run has diverged", bad,
                    row->name, model_group_layer(c->run.model.map->of.whole, g));
            }
        }
    }
    return 1;
}

// Writes the small files except state.json; only rank 0 does.
static void checkpoint_write_small_files_(Checkpoints* c, const char* directory) {
    const ModelConfig cfg = c->run.model.map->of.whole;
    if (model_has_adapter(cfg)) {
        hf_adapter_write_config(directory, cfg, c->run.base);
    } else {
        hf_config_write(directory, cfg, c->run.model.dtype, c->run.card, c->run.config);
    }
    for (int which = HF_LAST; which <= HF_AVERAGE; which++) {
        if (c->model.count > 1 && c->weights[which].groups) {
            hf_model_write_index(directory, (HfWeights)which, c->model.files, c->model.count, cfg,
                                 c->weights[which].dtype);
        }
    }
    if (c->run.tokenizer) {
        tokenizer_write_hf(c->run.tokenizer, &c->run.card, directory, cfg.max_T);
    }
    card_write_template(&c->run.card, directory);
    if (c->run.extra) {
        c->run.extra(c->run.extra_context, directory);
    }
    checkpoint_list_small_files_(&c->state, directory);
}

// Writes this rank's files of weights, if the checkpoint has them.
static void checkpoint_write_weights_(Checkpoints* c, const char* directory, HfWeights which) {
    const CheckpointModel* m = &c->model;
    const CheckpointWeights* w = &c->weights[which];
    const ModelConfig cfg = c->run.model.map->of.whole;
    char name[64];
    for (int f = m->first; f < m->end && w->groups; f++) {
        const void* groups = checkpoint_group_(c, which, m->files[f].first);
        checkpoint_weights_name_(c, name, which, f);
        c->written[(int)which * m->most + f - m->first] =
            model_has_adapter(cfg)
                ? hf_adapter_write(directory, cfg, w->whole.rows, groups, w->dtype)
                : hf_model_write(directory, name, m->files[f], cfg, w->whole.rows, groups, w->dtype);
    }
}

// Writes the files of this rank. Error messages call the checkpoint `checkpoint`.
static void checkpoint_write_files_(Checkpoints* c, const char* directory, const char* checkpoint) {
    const Map* map = c->run.model.map;
    const int number = checkpoint_part_number(&map->of, map->rank);
    char path[PATH_MAX], name[64], error[ERROR_BYTES];
    CHECK(checkpoint_is_finite_(c, checkpoint, error), "%s", error);
    if (c->run.model.comm->rank == 0) {
        checkpoint_write_small_files_(c, directory);
    }
    checkpoint_write_weights_(c, directory, HF_LAST);
    checkpoint_write_weights_(c, directory, HF_AVERAGE);
    if (number >= 0) {
        checkpoint_part_name(name, number, checkpoint_part_writers(&map->of));
        file_join(path, directory, name);
        c->written[2 * c->model.most] =
            checkpoint_part_write(map, c->run.model.state, path, (const void* const*)c->slots);
    }
}

// Lists the files of weights and optimizer state; `written` has the checksums of each rank.
static void checkpoint_list_written_(Checkpoints* c, const char* directory, const uint64_t* written) {
    const MapOf* of = &c->run.model.map->of;
    const int count = checkpoint_checksums_(c), writers = checkpoint_part_writers(of);
    char name[64];
    for (int which = HF_LAST; which <= HF_AVERAGE; which++) {
        for (int f = 0; f < c->model.count && (which == HF_LAST || c->has_average); f++) {
            checkpoint_weights_name_(c, name, (HfWeights)which, f);
            checkpoint_list_file_(&c->state, directory, name,
                                  written[checkpoint_checksum_at_(c, (HfWeights)which, f)]);
        }
    }
    for (int i = 0; i < writers; i++) {
        checkpoint_part_name(name, i, writers);
        checkpoint_list_file_(&c->state, directory, name,
                              written[checkpoint_part_rank(of, i) * count + count - 1]);
    }
}

// Completes the checkpoint in rank 0 after all have written: writes state.json and gives the
// directory its final name.
static void checkpoint_complete_(Checkpoints* c, const char* part, const char* path) {
    char file[PATH_MAX];
    SavedState* s = &c->state;
    file_join(file, part, "state.json");
    state_write(file, s, c->options);
    for (; s->num_files > 0; s->num_files--) {
        free((char*)s->files[s->num_files - 1].name);
    }
    checkpoint_put(part, path, c->out, s->run.step);
    file_sync_directory(path);
    checkpoints_thin(c->options, s);
}

// Removes an unfinished checkpoint after its save has failed.
static void checkpoint_abandon_(void* checkpoints) {
    const Checkpoints* c = (const Checkpoints*)checkpoints;
    char part[PATH_MAX];
    checkpoint_path(part, c->out, c->state.run.step, CHECKPOINT_PART);
    checkpoint_clear(part);
}

// Runs the thread of a save. A single process does all the work in it. With several ranks, a thread
// of each one writes; then another thread of rank 0 completes the checkpoint.
static void* checkpoint_work_(void* checkpoints) {
    Checkpoints* c = (Checkpoints*)checkpoints;
    const double start_s = time_now_s();
    char path[PATH_MAX], part[PATH_MAX];
    checkpoint_path(path, c->out, c->state.run.step, "");
    checkpoint_path(part, c->out, c->state.run.step, CHECKPOINT_PART);
    if (c->completes) { // else other ranks may still be writing there
        check_on_failure(checkpoint_abandon_, c);
    }
    if (c->writes) {
        checkpoint_write_files_(c, part, path);
    }
    if (c->writes && c->completes) {
        checkpoint_list_written_(c, part, c->written);
    }
    if (c->completes) {
        checkpoint_complete_(c, part, path);
    }
    c->write_s += time_now_s() - start_s;
    __atomic_store_n(&c->is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

// ---- saving during a run ----

// Returns the bytes of this rank's groups as `elements`, divided as in files of `dtype`.
static size_t checkpoint_groups_bytes_(const MapOf* of, int rank, SafeTensorsDtype dtype, double max_gb,
                                       SafeTensorsDtype elements) {
    CheckpointModel model;
    const WholeGroups whole = whole_groups(of, safetensors_dtype_bytes(elements));
    checkpoint_model_open_(&model, of, rank, dtype, max_gb);
    const size_t bytes = checkpoint_params_bytes_(&model, &whole);
    checkpoint_model_close_(&model);
    return bytes;
}

size_t checkpoints_bytes(const MapOf* of, int rank, const OptimizerState* state, SafeTensorsDtype dtype,
                         double max_gb) {
    return checkpoint_groups_bytes_(of, rank, dtype, max_gb, dtype) + checkpoint_part_bytes(of, rank, state);
}

size_t checkpoints_average_bytes(const MapOf* of, int rank, SafeTensorsDtype dtype, double max_gb) {
    const size_t gathered = part_groups_largest(of, rank) * sizeof(float); // model_get_average_
    unsigned slots = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        slots |= of->slots[i];
    }
    return slots >> STATE_AVERAGE & 1
               ? checkpoint_groups_bytes_(of, rank, dtype, max_gb, SAFETENSORS_F32) + gathered
               : 0;
}

// Ends the program now, before work is lost, if a file already has the name of a checkpoint that a
// later step (`after` + 1 to --steps) will save.
static void checkpoint_require_places_(const Checkpoints* c, int64_t after) {
    const Options* o = c->options;
    char path[PATH_MAX];
    int64_t* steps;
    for (int i = checkpoint_steps(c->out, "", &steps) - 1; i >= 0; i--) {
        struct stat info;
        const int due = steps[i] > after && schedule_due(o->output.save_every, steps[i], o->batch.steps);
        checkpoint_path(path, c->out, steps[i], "");
        CHECK(!due || stat(path, &info) != 0 || S_ISDIR(info.st_mode),
              "%s: a file, wanted nothing or a directory: a checkpoint will be saved there", path);
    }
    free(steps);
}

// Returns true if this rank writes files of a checkpoint.
static int checkpoint_has_files_(const Checkpoints* c) {
    return c->model.first < c->model.end ||
           checkpoint_part_number(&c->run.model.map->of, c->run.model.map->rank) >= 0;
}

// Sets `groups` and `slots` to the tensors of a model that has them in place.
static void checkpoint_point_to_model_(Checkpoints* c) {
    const ModelFiles* m = &c->run.model;
    c->weights[HF_LAST].groups = m->access.get_group(m->model, c->model.groups.first, NULL);
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const size_t bytes = m->state->slots[slot].bytes;
        c->slots[slot] = bytes > 0 ? m->access.get_state(m->model, slot, 0, NULL, bytes) : NULL;
    }
}

// Allocates and pins the copy, unless it exists or none is needed.
static void checkpoint_open_copy_(Checkpoints* c) {
    const size_t bytes = c->params_bytes + c->optimizer_bytes;
    if (!c->copies || c->copy || bytes == 0) {
        return;
    }
    c->copy = check_alloc(bytes, 1, "copy to save");
    c->weights[HF_LAST].groups = c->copy;
    char* at = (char*)c->copy + c->params_bytes;
    for (int slot = 0; slot < MAP_SLOTS && c->optimizer_bytes > 0; slot++) {
        c->slots[slot] = at;
        at += state_slot_room(&c->run.model.state->slots[slot]);
    }
    if (c->run.memory.pin) {
        c->run.memory.pin(c->copy, bytes);
    }
}

static void checkpoint_close_copy_(Checkpoints* c) {
    if (c->copy && c->run.memory.unpin) {
        c->run.memory.unpin(c->copy);
    }
    free(c->copy);
}

// Copies this rank's groups. All ranks must take part in the copy of every group.
static void checkpoint_copy_groups_(Checkpoints* c, const ModelFiles* m, HfWeights which) {
    PartGroups parts;
    part_groups_open_to_get(&parts, m);
    for (int g = 0; g < model_groups(m->map->of.whole); g++) {
        const int is_own = c->model.groups.first <= g && g < c->model.groups.end;
        part_groups_get(&parts, g, checkpoint_writer_of_(c, g),
                        is_own ? checkpoint_group_(c, which, g) : NULL);
    }
    part_groups_close(&parts);
}

// Copies the average of the weights, which has a value after n > 0 updates.
static void checkpoint_copy_average_(Checkpoints* c, int64_t n) {
    const ModelFiles files = model_files_of_average(&c->run.model);
    c->has_average = n > 0;
    c->weights[HF_AVERAGE].groups = c->has_average ? c->average : NULL;
    if (c->has_average) {
        checkpoint_copy_groups_(c, &files, HF_AVERAGE);
    }
}

// Copies this rank's groups and state.
static void checkpoint_copy_(Checkpoints* c) {
    const ModelFiles* m = &c->run.model;
    checkpoint_copy_groups_(c, m, HF_LAST);
    for (int slot = 0; slot < MAP_SLOTS && c->optimizer_bytes > 0; slot++) {
        const size_t bytes = m->state->slots[slot].bytes;
        if (bytes > 0) {
            m->access.get_state(m->model, slot, 0, c->slots[slot], bytes);
        }
    }
}

static void checkpoint_open_weights_(Checkpoints* c, HfWeights which, SafeTensorsDtype dtype) {
    c->weights[which].dtype = dtype;
    c->weights[which].whole = whole_groups(&c->run.model.map->of, safetensors_dtype_bytes(dtype));
}

void checkpoints_open(Checkpoints* c, const Options* options, CheckpointRun run, Lock* lock, int64_t after) {
    memset(c, 0, sizeof(*c));
    CHECK(snprintf(c->out, sizeof(c->out), "%s", options->output.dir) < (int)sizeof(c->out) - 64,
          "%s: the name is too long", options->output.dir);
    c->options = options;
    c->run = run;
    c->saved_step = c->whole_step = -1;
    const Map* map = run.model.map;
    checkpoint_open_weights_(c, HF_LAST, run.model.dtype);
    checkpoint_open_weights_(c, HF_AVERAGE, SAFETENSORS_F32);
    checkpoint_model_open_(&c->model, &map->of, map->rank, run.model.dtype, options->output.model_file_gb);
    c->written =
        (uint64_t*)check_alloc((size_t)checkpoint_checksums_(c), sizeof(uint64_t), "checksums of files");
    c->params_bytes = checkpoint_params_bytes_(&c->model, &c->weights[HF_LAST].whole);
    c->optimizer_bytes = checkpoint_part_bytes(&map->of, map->rank, run.model.state);
    if (checkpoint_has_average_(run.model.state->optimizer)) {
        c->average = check_alloc(checkpoint_params_bytes_(&c->model, &c->weights[HF_AVERAGE].whole) + 1, 1,
                                 "the average of the weights to save");
    }
    c->copies = !model_files_in_place(&run.model) || checkpoints_copy(options);
    c->state.trainer = run.trainer;
    c->state.train_tokens = (int64_t)run.train->tokens;
    c->state.train_data = run.train->fingerprint;
    memcpy(c->state.val_sets, run.val_sets, sizeof(run.val_sets));
    c->state.num_val_sets = run.num_val_sets;
    c->state.padded_vocab = map->of.whole.Vp;
    c->state.files = (SavedFile*)check_alloc(STATE_MAX_FILES, sizeof(SavedFile), "files of a checkpoint");
    c->lock = lock;
    if (checkpoint_has_files_(c)) {
        checkpoint_require_writable(c->out);
    }
    if (run.model.comm->rank == 0) {
        c->lock = lock ? lock : checkpoint_lock(c->out);
        checkpoint_require_room_(c, c->out);
        checkpoint_warn_of_room_(c, after);
        checkpoint_require_places_(c, after);
        c->state.serial = checkpoint_last_serial(c->out);
    }
    comm_broadcast(run.model.comm, &c->state.serial, sizeof(c->state.serial));
    if (!c->copies) {
        checkpoint_point_to_model_(c);
    } else if (!run.memory.pin) { // pinned memory is allocated by the first save
        checkpoint_open_copy_(c);
    }
}

// ---- a save, from its start to its end ----

// Starts the thread of this rank.
static void checkpoint_start_thread_(Checkpoints* c) {
    c->is_done = 0;
    const int failed = pthread_create(&c->thread, NULL, checkpoint_work_, c);
    CHECK(!failed, "%s: cannot start a thread to save: %s", c->out, strerror(failed));
    c->has_thread = 1;
}

static void checkpoint_join_(Checkpoints* c) {
    if (c->has_thread) {
        pthread_join(c->thread, NULL);
        c->has_thread = 0;
    }
}

// Creates the directory for the files of all ranks.
static void checkpoint_make_part_(Checkpoints* c) {
    char part[PATH_MAX];
    checkpoint_path(part, c->out, c->state.run.step, CHECKPOINT_PART);
    checkpoint_clear(part);
    checkpoint_require_room_(c, part);
    CHECK(mkdir(part, 0777) == 0, "%s: cannot make the directory: %s", part, strerror(errno));
}

void checkpoint_start(Checkpoints* c, const RunState* run) {
    assert(!c->is_running);
    checkpoint_open_copy_(c);
    if (c->copies) {
        checkpoint_copy_(c);
    }
    if (c->average) {
        checkpoint_copy_average_(c, run->updates - run->average_from);
    }
    c->state.run = *run;
    free(c->state.mixture.source);
    c->state.mixture = mixture_state(c->run.train, (uint64_t)run->sequence);
    c->state.serial++;
    c->saved_step = run->step;
    c->saved_stage = run->stage;
    c->is_running = c->writes = 1;
    c->completes = c->run.model.comm->size == 1;
    c->write_s = 0;
    if (c->run.model.comm->rank == 0) {
        checkpoint_make_part_(c);
    }
    comm_barrier(c->run.model.comm);
    if (checkpoint_has_files_(c)) {
        checkpoint_start_thread_(c);
    }
}

// Sends all checksums to rank 0, which starts to complete the checkpoint. All ranks have written.
static void checkpoint_finish_writing_(Checkpoints* c) {
    Comm* comm = c->run.model.comm;
    char part[PATH_MAX];
    const size_t count = (size_t)checkpoint_checksums_(c);
    uint64_t* all =
        (uint64_t*)check_alloc((size_t)comm->size * count, sizeof(uint64_t), "checksums of files");
    checkpoint_join_(c);
    comm_all_gather(comm, all, c->written, count * sizeof(uint64_t));
    c->writes = 0;
    c->completes = 1;
    if (comm->rank == 0) {
        checkpoint_path(part, c->out, c->state.run.step, CHECKPOINT_PART);
        checkpoint_list_written_(c, part, all);
        checkpoint_start_thread_(c);
    }
    free(all);
}

// Records a save that has ended on all ranks, and sets its path.
static int checkpoint_end_(Checkpoints* c, char path[PATH_MAX]) {
    checkpoint_join_(c);
    c->is_running = 0;
    c->whole_step = c->state.run.step;
    c->save_s = c->write_s > c->save_s ? c->write_s : c->save_s;
    checkpoint_path(path, c->out, c->state.run.step, "");
    return 1;
}

int checkpoint_wait(Checkpoints* c, char path[PATH_MAX]) {
    if (!c->is_running) {
        return 0;
    }
    if (!c->completes) {
        checkpoint_finish_writing_(c);
    }
    checkpoint_join_(c);
    comm_barrier(c->run.model.comm);
    return checkpoint_end_(c, path);
}

// Returns true if no rank has a thread that still works.
static int checkpoint_all_done_(Checkpoints* c) {
    const int is_busy = c->has_thread && !__atomic_load_n(&c->is_done, __ATOMIC_ACQUIRE);
    return !comm_any(c->run.model.comm, is_busy);
}

int checkpoint_finished(Checkpoints* c, char path[PATH_MAX]) {
    if (!c->is_running || !checkpoint_all_done_(c)) {
        return 0;
    }
    if (!c->completes) {
        checkpoint_finish_writing_(c);
        return 0;
    }
    return checkpoint_end_(c, path);
}

void checkpoints_close(Checkpoints* c) {
    char path[PATH_MAX];
    checkpoint_wait(c, path);
    free(c->written);
    free(c->average);
    checkpoint_close_copy_(c);
    checkpoint_model_close_(&c->model);
    free(c->state.files);
    free(c->state.mixture.source);
    lock_release(c->lock);
    memset(c, 0, sizeof(*c));
}

#endif // CHECKPOINT_IMPLEMENTATION

#endif
