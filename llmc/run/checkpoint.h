/*
checkpoint.h -- the complete state of a run in a directory, OUT/step_00001000/, which is complete or absent.

    config.json, generation_config.json, model.safetensors    a Hugging Face model (hf_model.h)
    tokenizer.json, tokenizer_config.json, ...                its tokenizer, if the run has one
    optimizer.1of1.safetensors                                the optimizer's state: AdamW's m and v
    products.json                                             GPU trainer only: matmul_plans.h
    state.json                                                the rest, and checksums of all files (state.h)

model.safetensors has fp32 master weights, or 16-bit weights where there are none. Each row of the optimizer's
state (gpt2.h) is a tensor that is a range of one space: the elements of the parameters in the order of their
table, without padding. A writer may cut it into n files (metadata begin, end and total); the reader takes any
that fill the space. A state that has not the shape of the parameters is only read whole.

A save copies the tensors into memory allocated before the first step; a thread writes them while the run
continues. A second save waits for the first. The directory is filled under a temporary name, flushed to the
disk, checked for room before, and renamed; where there is one of this step already, the two change places.
--keep removes older ones once a newer one is in its place, sparing multiples of --keep-major: renamed first,
so that no name of a checkpoint ever holds half of one. Any failure is one error that names the file, and
leaves the existing checkpoints alone. Weights that are not finite are such a failure: they are never saved.

If one of these names is a symbolic link, the link is removed, never its target.

The next run in the same directory removes what a killed run left behind; two runs at a time are refused.

defines: Checkpoints, CheckpointRun, checkpoint_lock, checkpoints_bytes, checkpoints_disk_bytes,
         checkpoints_open, checkpoint_copy_at, checkpoints_close, checkpoint_start, checkpoint_finished,
         checkpoint_wait, checkpoint_try_check, checkpoint_newest, checkpoint_remove_after, checkpoint_path,
         checkpoint_read, CheckpointFilter
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/formats/safetensors.h"
#include "llmc/run/options.h"
#include "llmc/run/state.h"
#include "llmc/tokenizer/tokenizer.h"
#include "llmc/gpt2.h"

#ifdef __cplusplus
extern "C" {
#endif

// What is the same in all checkpoints of a run.
typedef struct {
    const char* trainer; // in words: which program, with which precision
    GPT2Config cfg;
    SafeTensorsDtype dtype;     // of the parameters in the copy
    int eot;                    // the token that ends documents
    const Tokenizer* tokenizer; // NULL: none that is known
    size_t train_tokens;
    uint64_t train_data; // fingerprint of their contents, 0: unknown
    // Writes further small files into the directory, in the thread that saves; NULL: there are none.
    void (*extra)(const void* context, const char* directory);
    const void* extra_context;
} CheckpointRun;

typedef struct {
    char out[PATH_MAX];
    int keep, keep_major; // keep 0 keeps all
    const Options* options;
    CheckpointRun run;
    TensorRow rows[GPT2_PARAMETER_ROWS];  // of the parameters in the copy
    StateRow state_rows[GPT2_STATE_ROWS]; // and of the optimizer's state
    void *params, *optimizer;             // the copy, on the host, laid out by the rows
    size_t params_bytes, optimizer_bytes;
    int lock; // checkpoint_lock

    SavedState state; // of the save under way
    int is_running, is_done;
    pthread_t thread;
    int64_t saved_step; // the last one that was saved or resumed, -1: none
    double write_s;     // what the thread took; not to be read while it runs
    double save_s;      // the longest of those that ended
} Checkpoints;

// ---- names ----

// The directory of the checkpoint of a step.
void checkpoint_path(char path[PATH_MAX], const char* out, int64_t step, const char* ending);

// ---- writing ----

// Bytes of a checkpoint, at most about.
double checkpoints_disk_bytes(const Checkpoints* c);

// ---- reading ----

// Checks a checkpoint, to the last bit of all its files, and reads its state. Returns 0, with nothing to
// close and the reason in `error`, if it is damaged.
int checkpoint_try_check(SavedState* s, const char* directory, char* error);

// Whether a checkpoint is usable, for checkpoint_newest; `context` is the caller's.
typedef int (*CheckpointFilter)(const SavedState* state, const void* context);

// Finds the checkpoint that was written last, of those that are valid and that `filter` (NULL: all) accepts.
// Damaged ones are reported on stderr. Returns 1, with *path and *s set; 0 if there are no checkpoints; -1 if
// none of them is usable.
int checkpoint_newest(char path[PATH_MAX], SavedState* s, const char* out, CheckpointFilter filter,
                      const void* context);

// Removes the checkpoints that were written after the one with this serial number: after a rollback the run
// must not be resumed from them.
void checkpoint_remove_after(const char* out, int64_t serial);

// Reads the tensors of a checkpoint that was checked: the parameters, as fp32, into memory laid out by `rows`, and
// the optimizer's state into memory laid out by gpt2_state_rows.
void checkpoint_read(const SavedState* s, const char* directory, GPT2Config cfg, const TensorRow* rows,
                     void* params, void* optimizer);

// ---- saving during a run ----

// Bytes of the copy that a save makes; parameters of the given type.
size_t checkpoints_bytes(GPT2Config cfg, SafeTensorsDtype dtype);

// Only one run at a time may write into a directory. Returns a descriptor, which has the lock until it is
// closed. Removes what a killed run left.
int checkpoint_lock(const char* out);

// Prepares to save into --out, which exists. The options and what `run` points to must stay. `lock` is that of
// checkpoint_lock, or -1 to take it now; checkpoints_close releases it. `after` updates are done. There
// must be room on the disk for at least one checkpoint. Before each save the caller points params and optimizer
// to what is to be saved, and leaves that as it is until the save has ended.
void checkpoints_open(Checkpoints* c, const Options* options, CheckpointRun run, int lock, int64_t after);

// Points params and optimizer into `memory`, of checkpoints_bytes.
void checkpoint_copy_at(Checkpoints* c, void* memory);

// Waits until the save under way is on the disk. Returns whether there was one; if so, sets its path.
int checkpoint_wait(Checkpoints* c, char path[PATH_MAX]);

// The same, but without waiting: only if it has ended.
int checkpoint_finished(Checkpoints* c, char path[PATH_MAX]);

// Starts to write what was copied to params and optimizer after the save before was waited for.
void checkpoint_start(Checkpoints* c, const RunState* run);

void checkpoints_close(Checkpoints* c);

#ifdef __cplusplus
}
#endif

#ifdef CHECKPOINT_IMPLEMENTATION

#include <assert.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"
#include "llmc/formats/hf_model.h"
#include "llmc/run/schedule.h"

#define CHECKPOINT_PART_ ".part" // while it is written, and while it is removed
#define CHECKPOINT_OLD_ ".old"   // while another takes its place, where the two cannot change places at once

// ---- names ----

void checkpoint_path(char path[PATH_MAX], const char* out, int64_t step, const char* ending) {
    file_path(path, "%s/step_%08lld%s", out, (long long)step, ending);
}

// The step of a directory entry that is called as checkpoint_path would call it with this ending, or -1.
static int64_t checkpoint_step_(const char* name, const char* ending) {
    char wanted[64];
    if (strncmp(name, "step_", 5) != 0 || !isdigit((unsigned char)name[5])) {
        return -1;
    }
    const long long step = strtoll(name + 5, NULL, 10);
    snprintf(wanted, sizeof(wanted), "step_%08lld%s", step, ending);
    return strcmp(name, wanted) == 0 ? step : -1;
}

// The steps of the entries of `out` with this ending, in no order; the caller frees *steps.
static int checkpoint_steps_(const char* out, const char* ending, int64_t** steps) {
    int count = 0;
    struct dirent* entry;
    DIR* dir = opendir(out);
    *steps = NULL;
    while (dir && (entry = readdir(dir))) {
        const int64_t step = checkpoint_step_(entry->d_name, ending);
        if (step >= 0) {
            *steps = (int64_t*)check_grow(*steps, (size_t)count, sizeof(int64_t), out);
            (*steps)[count++] = step;
        }
    }
    if (dir) {
        closedir(dir);
    }
    return count;
}

// ---- removing ----

// Removes a link, if one is there. Returns whether there was one.
static int checkpoint_unlink_(const char* path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode) && unlink(path) == 0;
}

// Removes a directory of files, or a link to one, if it is there.
static void checkpoint_clear_(const char* directory) {
    struct dirent* entry;
    const int fd = open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR* dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir) {
        checkpoint_unlink_(directory);
        return;
    }
    while ((entry = readdir(dir))) {
        unlinkat(fd, entry->d_name, 0); // fails on . and .., as it should
    }
    closedir(dir);
    rmdir(directory);
}

// Removes a checkpoint. Returns whether it is gone from under its name.
static int checkpoint_remove_(const char* out, int64_t step) {
    char path[PATH_MAX], part[PATH_MAX];
    checkpoint_path(path, out, step, "");
    checkpoint_path(part, out, step, CHECKPOINT_PART_);
    checkpoint_clear_(part);
    if (rename(path, part) != 0) {
        return 0;
    }
    checkpoint_clear_(part);
    return 1;
}

// Removes the oldest checkpoints but `keep` (1 or more), not counting multiples of `major` (0: none), which
// stay, nor steps after `newest`: those are of an earlier run in the same place, and not ours to remove. What
// cannot be removed is no reason to end the run.
static void checkpoint_thin_(const char* out, int64_t newest, int keep, int major) {
    int64_t* steps;
    const int all = checkpoint_steps_(out, "", &steps);
    int count = 0;
    for (int i = 0; i < all; i++) {
        if (steps[i] <= newest && (major == 0 || steps[i] % major != 0)) {
            steps[count++] = steps[i];
        }
    }
    for (; count > keep; count--) {
        int oldest = 0;
        for (int i = 1; i < count; i++) {
            oldest = steps[i] < steps[oldest] ? i : oldest;
        }
        checkpoint_remove_(out, steps[oldest]);
        steps[oldest] = steps[count - 1];
    }
    free(steps);
}

// Clears what a killed run left: halves, and a checkpoint that was about to make room for another.
static void checkpoint_recover_(const char* out) {
    char path[PATH_MAX], other[PATH_MAX];
    int64_t* steps;
    for (int i = checkpoint_steps_(out, CHECKPOINT_PART_, &steps) - 1; i >= 0; i--) {
        checkpoint_path(path, out, steps[i], CHECKPOINT_PART_);
        checkpoint_clear_(path);
    }
    free(steps);
    for (int i = checkpoint_steps_(out, CHECKPOINT_OLD_, &steps) - 1; i >= 0; i--) {
        checkpoint_path(path, out, steps[i], "");
        checkpoint_path(other, out, steps[i], CHECKPOINT_OLD_);
        struct stat info;
        if (stat(path, &info) != 0) {
            CHECK(rename(other, path) == 0, "%s: cannot rename to %s: %s", other, path, strerror(errno));
        } else {
            checkpoint_clear_(other);
        }
    }
    free(steps);
}

// ---- writing ----

// Elements of the optimizer's space.
static int64_t checkpoint_elements_(GPT2Config cfg) { return (int64_t)gpt2_count_parameters(cfg); }

// The elements of a row in files.
static size_t checkpoint_row_elements_(const TensorRow* row, GPT2Config cfg) {
    return (size_t)row->layers * gpt2_rows_in_files(row, cfg) * row->cols;
}

// The elements of a row of the optimizer's state.
static size_t checkpoint_state_elements_(const StateRow* state, GPT2Config cfg) {
    size_t total = 0;
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        assert(state->tensors[i].element_bytes == sizeof(float)); // F32 in files
        total += checkpoint_row_elements_(&state->tensors[i], cfg);
    }
    return total;
}

static void checkpoint_write_state_(SafeTensorsWriter* writer, const Checkpoints* c, const StateRow* state) {
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &state->tensors[i];
        safetensors_write_raw(writer, (const char*)c->optimizer + row->offset_bytes,
                              checkpoint_row_elements_(row, c->run.cfg) * row->element_bytes);
    }
}

static uint64_t checkpoint_write_optimizer_(const Checkpoints* c, const char* path) {
    const size_t total = (size_t)checkpoint_elements_(c->run.cfg);
    char number[32];
    SafeTensorsWriter writer;
    snprintf(number, sizeof(number), "%zu", total);
    safetensors_writer_open(&writer, path);
    safetensors_writer_metadata(&writer, "begin", "0");
    safetensors_writer_metadata(&writer, "end", number);
    safetensors_writer_metadata(&writer, "total", number);
    for (int i = 0; i < GPT2_STATE_ROWS; i++) {
        const size_t elements = checkpoint_state_elements_(&c->state_rows[i], c->run.cfg);
        safetensors_writer_declare(&writer, c->state_rows[i].name, SAFETENSORS_F32, 1, &elements);
    }
    safetensors_writer_begin(&writer);
    for (int i = 0; i < GPT2_STATE_ROWS; i++) {
        checkpoint_write_state_(&writer, c, &c->state_rows[i]);
    }
    return safetensors_writer_commit(&writer);
}

// Adds a file to the list in state.json; `checksum` was computed while writing, or is 0: read the file
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

// Lists the small files that are in a directory so far.
static void checkpoint_list_files_(SavedState* s, const char* directory) {
    struct dirent* entry;
    DIR* dir = opendir(directory);
    CHECK(dir, "%s: cannot read: %s", directory, strerror(errno));
    while ((entry = readdir(dir))) {
        if (entry->d_name[0] != '.') {
            checkpoint_list_file_(s, directory, entry->d_name, 0);
        }
    }
    closedir(dir);
}

double checkpoints_disk_bytes(const Checkpoints* c) {
    return hf_model_bytes(c->run.cfg, c->run.dtype) + gpt2_count_state_bytes(c->run.cfg) + (1 << 20);
}

// Ends the program if the file system of OUT has no room for a checkpoint.
static void checkpoint_require_room_(const Checkpoints* c, const char* name) {
    struct statvfs info;
    if (statvfs(c->out, &info) == 0) { // where it cannot be asked, the write itself will tell
        const double free_bytes = (double)info.f_bavail * (double)info.f_frsize;
        CHECK(free_bytes >= checkpoints_disk_bytes(c),
              "%s: a checkpoint takes %.1f MiB, the disk has %.1f MiB free", name,
              checkpoints_disk_bytes(c) / (1 << 20), free_bytes / (1 << 20));
    }
}

// Lets two directories change places. Returns 0 if the file system cannot do that.
static int checkpoint_exchange_(const char* one, const char* other) {
#if defined(SYS_renameat2)
    const unsigned exchange = 2; // RENAME_EXCHANGE
    return syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, other, exchange) == 0;
#else
    (void)one;
    (void)other;
    return 0;
#endif
}

// Puts the finished directory in its place; what was there goes.
static void checkpoint_put_(const char* part, const char* path, const char* out, int64_t step) {
    if (rename(part, path) == 0 || (checkpoint_unlink_(path) && rename(part, path) == 0)) {
        return;
    }
    CHECK(errno == EEXIST || errno == ENOTEMPTY, "%s: cannot rename to %s: %s", part, path, strerror(errno));
    if (!checkpoint_exchange_(part, path)) {
        char old[PATH_MAX];
        checkpoint_path(old, out, step, CHECKPOINT_OLD_);
        CHECK(rename(path, old) == 0, "%s: cannot rename to %s: %s", path, old, strerror(errno));
        CHECK(rename(part, path) == 0, "%s: cannot rename to %s: %s", part, path, strerror(errno));
        checkpoint_clear_(old);
    }
    checkpoint_clear_(part);
}

// The first element of a row that is not finite; `count` if all are finite.
static size_t checkpoint_find_infinite_(const TensorRow* row, const void* memory, SafeTensorsDtype dtype,
                                        size_t count) {
    const char* data = (const char*)memory + row->offset_bytes;
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

// Ends the program if a weight is not finite, before a file is written: it could not be read again, and
// would push a checkpoint that can be read out of --keep.
static void checkpoint_require_finite_(const Checkpoints* c, const char* path) {
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const size_t count = checkpoint_row_elements_(&c->rows[i], c->run.cfg);
        const size_t bad = checkpoint_find_infinite_(&c->rows[i], c->params, c->run.dtype, count);
        CHECK(bad == count, "%s: not saved: element %zu of %s is not finite: the run has diverged", path, bad,
              c->rows[i].name);
    }
}

static void checkpoint_write_files_(Checkpoints* c, const char* directory) {
    char path[PATH_MAX];
    SavedState* s = &c->state;
    hf_config_write(directory, c->run.cfg, c->run.dtype, c->run.eot);
    if (c->run.tokenizer) {
        tokenizer_write_hf(c->run.tokenizer, directory, c->run.cfg.max_T);
    }
    if (c->run.extra) {
        c->run.extra(c->run.extra_context, directory);
    }
    checkpoint_list_files_(s, directory);
    const uint64_t model = hf_model_write(directory, c->run.cfg, c->rows, c->params, c->run.dtype);
    checkpoint_list_file_(s, directory, "model.safetensors", model);
    file_join(path, directory, "optimizer.1of1.safetensors");
    const uint64_t optimizer = checkpoint_write_optimizer_(c, path);
    checkpoint_list_file_(s, directory, "optimizer.1of1.safetensors", optimizer);
    file_join(path, directory, "state.json");
    state_write(path, s, c->options);
    for (; s->num_files > 0; s->num_files--) {
        free((char*)s->files[s->num_files - 1].name);
    }
}

// The thread: writes the copy.
static void* checkpoint_write_(void* checkpoints) {
    Checkpoints* c = (Checkpoints*)checkpoints;
    const int64_t step = c->state.run.step;
    const double start_s = time_now_s();
    char path[PATH_MAX], part[PATH_MAX];
    checkpoint_path(path, c->out, step, "");
    checkpoint_path(part, c->out, step, CHECKPOINT_PART_);
    checkpoint_require_finite_(c, path);
    checkpoint_clear_(part);
    CHECK(mkdir(part, 0777) == 0, "%s: cannot make the directory: %s", part, strerror(errno));
    checkpoint_require_room_(c, part);
    checkpoint_write_files_(c, part);
    checkpoint_put_(part, path, c->out, step);
    file_sync_directory(path);
    if (c->keep) {
        checkpoint_thin_(c->out, step, c->keep, c->keep_major);
    }
    c->write_s = time_now_s() - start_s;
    __atomic_store_n(&c->is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

// ---- reading ----

int checkpoint_try_check(SavedState* s, const char* directory, char* error) {
    char path[PATH_MAX];
    file_join(path, directory, "state.json");
    if (!state_try_read(s, path, error)) {
        return 0;
    }
    int ok = 1;
    for (int i = 0; ok && i < s->num_files; i++) {
        const SavedFile* file = &s->files[i];
        uint64_t checksum = 0;
        struct stat info;
        file_join(path, directory, file->name);
        if (stat(path, &info) != 0) {
            ok = error_set(error, path, "cannot read: %s", strerror(errno));
        } else if (info.st_size != file->bytes) {
            ok = error_set(error, path, "damaged: %lld bytes, wanted %lld", (long long)info.st_size,
                           (long long)file->bytes);
        } else {
            ok = file_checksum(path, &checksum, error) &&
                 (checksum == file->xxh64 ||
                  error_set(error, path, "damaged: its checksum is %016" PRIx64 ", wanted %016" PRIx64,
                            checksum, file->xxh64));
        }
    }
    if (!ok) {
        state_close(s);
    }
    return ok;
}

// A checkpoint of a list, in the order of writing: the last one first; those without a readable state before
// all others, so that they are spoken of.
typedef struct {
    int64_t step, serial;
} CheckpointEntry_;

static int checkpoint_by_serial_(const void* a, const void* b) {
    const CheckpointEntry_ *x = (const CheckpointEntry_*)a, *y = (const CheckpointEntry_*)b;
    return x->serial != y->serial ? (x->serial < y->serial ? 1 : -1)
                                  : (x->step < y->step) - (x->step > y->step);
}

// Lists the checkpoints of a directory; the caller frees *entries.
static int checkpoint_list_(const char* out, CheckpointEntry_** entries) {
    char path[PATH_MAX], file[PATH_MAX], error[ERROR_BYTES];
    int64_t* steps;
    const int count = checkpoint_steps_(out, "", &steps);
    *entries = (CheckpointEntry_*)check_alloc((size_t)count + 1, sizeof(CheckpointEntry_), out);
    for (int i = 0; i < count; i++) {
        SavedState state;
        checkpoint_path(path, out, steps[i], "");
        file_join(file, path, "state.json");
        const CheckpointEntry_ damaged = {steps[i], INT64_MAX};
        (*entries)[i] = damaged;
        if (state_try_read(&state, file, error)) {
            (*entries)[i].serial = state.serial;
            state_close(&state);
        }
    }
    free(steps);
    qsort(*entries, (size_t)count, sizeof(CheckpointEntry_), checkpoint_by_serial_);
    return count;
}

int checkpoint_newest(char path[PATH_MAX], SavedState* s, const char* out, CheckpointFilter filter,
                      const void* context) {
    char error[ERROR_BYTES];
    CheckpointEntry_* entries;
    const int count = checkpoint_list_(out, &entries);
    int found = 0;
    for (int i = 0; i < count && !found; i++) {
        checkpoint_path(path, out, entries[i].step, "");
        if (!checkpoint_try_check(s, path, error)) {
            fprintf(stderr, "warning: %s; trying the checkpoint before it\n", error);
        } else if (filter && !filter(s, context)) {
            state_close(s);
        } else {
            found = 1;
        }
    }
    free(entries);
    return found ? 1 : count ? -1 : 0;
}

void checkpoint_remove_after(const char* out, int64_t serial) {
    CheckpointEntry_* entries;
    const int count = checkpoint_list_(out, &entries);
    for (int i = 0; i < count; i++) {
        if (entries[i].serial > serial) {
            checkpoint_remove_(out, entries[i].step);
        }
    }
    free(entries);
}

// A range of the optimizer's space, in a file.
typedef struct {
    SafeTensors file;
    size_t begin, end;
} CheckpointSlice_;

static size_t checkpoint_metadata_(const SafeTensors* file, const char* key) {
    const char* text = safetensors_metadata(file, key);
    CHECK(text && *text && strspn(text, "0123456789") == strlen(text) && strlen(text) < 19,
          "%s: %s is %s, wanted a number", file->path, key, text ? text : "missing");
    return (size_t)strtoull(text, NULL, 10);
}

static void checkpoint_open_slice_(CheckpointSlice_* slice, const char* path, size_t total) {
    safetensors_open(&slice->file, path);
    slice->begin = checkpoint_metadata_(&slice->file, "begin");
    slice->end = checkpoint_metadata_(&slice->file, "end");
    const size_t found = checkpoint_metadata_(&slice->file, "total");
    CHECK(found == total, "%s: a part of %zu elements, wanted %zu for this model", path, found, total);
    CHECK(slice->begin <= slice->end && slice->end <= total, "%s: elements %zu to %zu of %zu", path,
          slice->begin, slice->end, total);
}

static int checkpoint_by_begin_(const void* a, const void* b) {
    const CheckpointSlice_ *x = (const CheckpointSlice_*)a, *y = (const CheckpointSlice_*)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : (x->end > y->end) - (x->end < y->end);
}

// Ends the program if no optimizer can have made these values: NaN, or below the least of the state.
static void checkpoint_check_state_(const char* path, const StateRow* state, const float* values,
                                    size_t first, size_t count) {
    char wanted[64] = "a number";
    if (isfinite(state->least)) {
        snprintf(wanted, sizeof(wanted), "%g or more", (double)state->least);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(values[i] >= state->least, "%s: element %zu of %s is %f, wanted %s", path, first + i,
              state->name, (double)values[i], wanted);
    }
}

// The range of a row of the state in a slice of the space, which has `total` elements. A state with another shape
// than the parameters is never cut.
static void checkpoint_state_range_(size_t* begin, size_t* end, const CheckpointSlice_* slice,
                                    const StateRow* state, size_t elements, size_t total) {
    const int is_whole = slice->begin == 0 && slice->end == total;
    CHECK(elements == total || is_whole, "%s: a part of the optimizer's state; %s can only be read whole",
          slice->file.path, state->name);
    *begin = slice->begin;
    *end = is_whole ? elements : slice->end;
}

// Copies what a slice has of one row of the state to its place in memory.
static void checkpoint_read_slice_(const CheckpointSlice_* slice, const StateRow* state, GPT2Config cfg,
                                   size_t total, void* optimizer) {
    size_t begin, end, first = 0; // first: of the tensor, in the row
    checkpoint_state_range_(&begin, &end, slice, state, checkpoint_state_elements_(state, cfg), total);
    const size_t count = end - begin;
    const SafeTensorsView* view = safetensors_require(&slice->file, state->name, 1, &count);
    CHECK(view->dtype == SAFETENSORS_F32, "%s: tensor %s is %s, wanted F32", slice->file.path, state->name,
          safetensors_dtype_name(view->dtype));
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const size_t last = first + checkpoint_row_elements_(&state->tensors[i], cfg);
        const size_t from = begin > first ? begin : first, to = end < last ? end : last;
        if (from < to) {
            float* out = (float*)((char*)optimizer + state->tensors[i].offset_bytes) + (from - first);
            safetensors_read_f32_part(view, from - begin, to - from, out);
            checkpoint_check_state_(slice->file.path, state, out, from, to - from);
        }
        first = last;
    }
}

// Whether a file holds optimizer state: optimizer.<i>of<n>.safetensors.
static int checkpoint_is_slice_(const char* name) {
    int i, n, end = 0;
    return sscanf(name, "optimizer.%dof%d.safetensors%n", &i, &n, &end) == 2 && end && !name[end];
}

// Reads the optimizer's state from any number of files that fill its space.
static void checkpoint_read_optimizer_(const SavedState* s, const char* directory, GPT2Config cfg,
                                       void* optimizer) {
    char path[PATH_MAX];
    StateRow states[GPT2_STATE_ROWS];
    gpt2_state_rows(states, cfg);
    const size_t total = (size_t)checkpoint_elements_(cfg);
    CheckpointSlice_* slices =
        (CheckpointSlice_*)check_alloc((size_t)s->num_files + 1, sizeof(CheckpointSlice_), directory);
    size_t count = 0, at = 0;
    for (int i = 0; i < s->num_files; i++) {
        if (checkpoint_is_slice_(s->files[i].name)) {
            file_join(path, directory, s->files[i].name);
            checkpoint_open_slice_(&slices[count++], path, total);
        }
    }
    qsort(slices, count, sizeof(*slices), checkpoint_by_begin_);
    for (size_t i = 0; i < count; i++) {
        CHECK(slices[i].begin == at, "%s: elements from %zu on, wanted those from %zu: the parts do not fit",
              slices[i].file.path, slices[i].begin, at);
        for (int k = 0; k < GPT2_STATE_ROWS; k++) {
            checkpoint_read_slice_(&slices[i], &states[k], cfg, total, optimizer);
        }
        at = slices[i].end;
        safetensors_close(&slices[i].file);
    }
    free(slices);
    CHECK(at == total, "%s: optimizer state of %zu elements, wanted %zu", directory, at, total);
}

void checkpoint_read(const SavedState* s, const char* directory, GPT2Config cfg, const TensorRow* rows,
                     void* params, void* optimizer) {
    hf_model_read(directory, cfg, rows, params);
    checkpoint_read_optimizer_(s, directory, cfg, optimizer);
}

// ---- saving during a run ----

size_t checkpoints_bytes(GPT2Config cfg, SafeTensorsDtype dtype) {
    TensorRow rows[GPT2_PARAMETER_ROWS];
    StateRow states[GPT2_STATE_ROWS];
    return gpt2_parameter_rows_of(rows, cfg, safetensors_dtype_bytes(dtype)) + gpt2_state_rows(states, cfg);
}

// How long a killed run is waited for, which keeps its lock until the system has its memory back.
#ifndef CHECKPOINT_LOCK_WAIT_S
#define CHECKPOINT_LOCK_WAIT_S 10
#endif

int checkpoint_lock(const char* out) {
    const int fd = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(fd >= 0, "%s: cannot open: %s", out, strerror(errno));
    CHECK(file_try_lock(fd, CHECKPOINT_LOCK_WAIT_S), "%s: another run is writing here", out);
    checkpoint_recover_(out);
    return fd;
}

// Ends the program where a file stands under the name of a checkpoint that steps `after` + 1 to --steps will
// save: before the work that would be lost.
static void checkpoint_require_places_(const Checkpoints* c, int64_t after) {
    const Options* o = c->options;
    char path[PATH_MAX];
    int64_t* steps;
    for (int i = checkpoint_steps_(c->out, "", &steps) - 1; i >= 0; i--) {
        struct stat info;
        const int due = steps[i] > after && schedule_due(o->save_every, steps[i], o->steps);
        checkpoint_path(path, c->out, steps[i], "");
        CHECK(!due || stat(path, &info) != 0 || S_ISDIR(info.st_mode),
              "%s: a file, wanted nothing or a directory: a checkpoint will be saved there", path);
    }
    free(steps);
}

void checkpoint_copy_at(Checkpoints* c, void* memory) {
    c->params = memory;
    c->optimizer = (char*)memory + c->params_bytes;
}

void checkpoints_open(Checkpoints* c, const Options* options, CheckpointRun run, int lock, int64_t after) {
    memset(c, 0, sizeof(*c));
    CHECK(snprintf(c->out, sizeof(c->out), "%s", options->out) < (int)sizeof(c->out) - 64,
          "%s: the name is too long", options->out);
    c->keep = options->keep;
    c->keep_major = options->keep_major;
    c->options = options;
    c->run = run;
    c->saved_step = -1;
    c->params_bytes = gpt2_parameter_rows_of(c->rows, run.cfg, safetensors_dtype_bytes(run.dtype));
    c->optimizer_bytes = gpt2_state_rows(c->state_rows, run.cfg);
    c->state.trainer = run.trainer;
    c->state.train_tokens = (int64_t)run.train_tokens;
    c->state.train_data = run.train_data;
    c->state.padded_vocab = run.cfg.Vp;
    c->state.files = (SavedFile*)check_alloc(STATE_MAX_FILES, sizeof(SavedFile), "files of a checkpoint");
    c->lock = lock >= 0 ? lock : checkpoint_lock(c->out);
    checkpoint_require_room_(c, c->out);
    checkpoint_require_places_(c, after);
    CheckpointEntry_* entries;
    const int count = checkpoint_list_(c->out, &entries);
    for (int i = 0; i < count; i++) {
        if (entries[i].serial != INT64_MAX && entries[i].serial > c->state.serial) {
            c->state.serial = entries[i].serial;
        }
    }
    free(entries);
}

int checkpoint_wait(Checkpoints* c, char path[PATH_MAX]) {
    if (!c->is_running) {
        return 0;
    }
    pthread_join(c->thread, NULL);
    c->is_running = 0;
    c->save_s = c->write_s > c->save_s ? c->write_s : c->save_s;
    checkpoint_path(path, c->out, c->state.run.step, "");
    return 1;
}

int checkpoint_finished(Checkpoints* c, char path[PATH_MAX]) {
    return c->is_running && __atomic_load_n(&c->is_done, __ATOMIC_ACQUIRE) && checkpoint_wait(c, path);
}

void checkpoint_start(Checkpoints* c, const RunState* run) {
    assert(!c->is_running);
    c->state.run = *run;
    c->state.serial++;
    c->saved_step = run->step;
    c->is_done = 0;
    const int failed = pthread_create(&c->thread, NULL, checkpoint_write_, c);
    CHECK(!failed, "%s: cannot start a thread to save: %s", c->out, strerror(failed));
    c->is_running = 1;
}

void checkpoints_close(Checkpoints* c) {
    char path[PATH_MAX];
    checkpoint_wait(c, path);
    free(c->state.files);
    close(c->lock);
    memset(c, 0, sizeof(*c));
}

#endif // CHECKPOINT_IMPLEMENTATION

#endif
