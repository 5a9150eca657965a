/*
checkpoint.h -- the complete state of a run in a directory, OUT/step_00001000/, which is complete or absent.

    config.json, generation_config.json, model.safetensors    a Hugging Face model (hf_model.h)
    tokenizer.json, tokenizer_config.json, ...                its tokenizer, if the run has one
    optimizer.1of1.safetensors                                the optimizer's state: AdamW's m and v
    products.json                                             GPU trainer only: matmul_plans.h
    state.json                                                the rest, and checksums of all files (state.h)

model.safetensors has fp32 master weights, or 16-bit weights where there are none. Each row of the optimizer's
state (gpt2.h) is a tensor in one space: the elements of the parameters in the order of their table, without
padding, `total` of them. Each process writes what it updates into a file of its own, optimizer.<i>of<n>; the metadata
`ranges`, "0-98304,196608-200000" for example, says which elements it has. The reader takes any files that fill the
space, so a run can be continued by any number of processes.

A save copies the tensors into memory allocated before the first step; a thread of each process writes them while the
run continues, and when all have written, one of rank 0 completes the directory. A second save waits for the first. The directory is filled under a temporary name, flushed to the
disk, checked for room before, and renamed; where there is one of this step already, the two change places.
--keep removes older ones once a newer one is in its place, sparing multiples of --keep-major: renamed first,
so that no name of a checkpoint ever holds half of one. Any failure is one error that names the file, and
leaves the existing checkpoints alone. Weights that are not finite are such a failure: they are never saved.

If one of these names is a symbolic link, the link is removed, never its target.

The next run in the same directory removes what a killed run left behind; two runs at a time are refused.

defines: Checkpoints, CheckpointRun, checkpoint_lock, checkpoints_bytes, checkpoints_disk_bytes,
         checkpoints_open, checkpoint_copy_at, checkpoints_close, checkpoint_start, checkpoint_finished,
         checkpoint_wait, checkpoint_try_check, checkpoint_newest, checkpoint_share, checkpoint_remove_after, checkpoint_path,
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
#include "llmc/comm.h"
#include "llmc/gpt2.h"
#include "llmc/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// What is the same in all checkpoints of a run.
typedef struct {
    const char* trainer; // in words: which program, with which precision
    GPT2Config cfg;
    ZeroPlan zero; // what each process saves
    Comm* comm;
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
    TensorRow rows[GPT2_PARAMETER_ROWS];  // of the parameters in the copy: full arrays
    StateRow state_rows[GPT2_STATE_ROWS]; // and of the optimizer's state that this process updates:
    ZeroRange* ranges;                    // these elements of it
    int num_ranges;
    void *params, *optimizer; // the copy, on the host, laid out by the rows; params of rank 0 alone
    size_t params_bytes, optimizer_bytes;
    int lock; // checkpoint_lock

    SavedState state;        // of the save under way
    int is_running;          // a save is under way: the same on all ranks,
    int writes, completes;   // and so is what threads do: write files; complete the directory
    int has_thread, is_done; // this process has a thread; it has ended
    SavedFile written;       // the file of this process
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

// Collective: tells all ranks which checkpoint rank 0 has found and checked, if it has. The others read its state.
void checkpoint_share(SavedState* s, char path[PATH_MAX], int* is_found, Comm* comm);

// Removes the checkpoints that were written after the one with this serial number: after a rollback the run
// must not be resumed from them.
void checkpoint_remove_after(const char* out, int64_t serial);

// Reads the tensors of a checkpoint that was checked: the parameters, as fp32, into memory laid out by `rows`, full
// arrays, and what this process updates of the optimizer's state into memory laid out by zero_state_rows.
void checkpoint_read(const SavedState* s, const char* directory, GPT2Config cfg, const TensorRow* rows,
                     void* params, const ZeroPlan* zero, void* optimizer);

// ---- saving during a run ----

// Bytes of the copy that a save makes in this process; parameters of the given type.
size_t checkpoints_bytes(GPT2Config cfg, const ZeroPlan* zero, SafeTensorsDtype dtype);

// Only one run at a time may write into a directory. Returns a descriptor, which has the lock until it is
// closed. Removes what a killed run left.
int checkpoint_lock(const char* out);

// What follows is collective: all processes of the run call it in the same order.

// Prepares to save into --out, which exists. The options and what `run` points to must stay. `lock` is that of
// checkpoint_lock, or -1 to take it now; rank 0 has it, no other rank; checkpoints_close releases it. `after` updates are done. There
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

// The elements of layer l of a row in files.
static size_t checkpoint_layer_elements_(const TensorRow* row, GPT2Config cfg) {
    return gpt2_rows_in_files(row, cfg) * row->cols;
}

// Processes that write a file of the optimizer's state.
static int checkpoint_writers_(const ZeroPlan* zero) { return zero->stage == 0 ? 1 : zero->size; }

// The ranges in words, neighbors as one; the caller frees them.
static char* checkpoint_ranges_text_(const Checkpoints* c) {
    const size_t room = 48 * ((size_t)c->num_ranges + 1);
    char* text = (char*)check_alloc(room, 1, "ranges of a checkpoint");
    size_t used = 0;
    for (int i = 0; i < c->num_ranges;) {
        const size_t begin = c->ranges[i].logical;
        size_t end = begin;
        for (; i < c->num_ranges && c->ranges[i].logical == end; i++) {
            end += c->ranges[i].count;
        }
        used += (size_t)snprintf(text + used, room - used, "%s%zu-%zu", used ? "," : "", begin, end);
    }
    return text;
}

static size_t checkpoint_own_elements_(const Checkpoints* c) {
    size_t total = 0;
    for (int i = 0; i < c->num_ranges; i++) {
        total += c->ranges[i].count;
    }
    return total;
}

// Writes what this process has of the optimizer's state. Returns the checksum.
static uint64_t checkpoint_write_optimizer_(const Checkpoints* c, const char* path) {
    const size_t elements = checkpoint_own_elements_(c);
    char number[32], *ranges = checkpoint_ranges_text_(c);
    SafeTensorsWriter writer;
    snprintf(number, sizeof(number), "%zu", zero_logical_elements(c->rows, c->run.cfg));
    safetensors_writer_open(&writer, path);
    safetensors_writer_metadata(&writer, "ranges", ranges);
    safetensors_writer_metadata(&writer, "total", number);
    for (int s = 0; s < GPT2_STATE_ROWS; s++) {
        safetensors_writer_declare(&writer, c->state_rows[s].name, SAFETENSORS_F32, 1, &elements);
    }
    safetensors_writer_begin(&writer);
    for (int s = 0; s < GPT2_STATE_ROWS; s++) {
        const float* state = (const float*)((const char*)c->optimizer + c->state_rows[s].offset_bytes);
        for (int i = 0; i < c->num_ranges; i++) {
            safetensors_write_raw(&writer, state + c->ranges[i].owned, c->ranges[i].count * sizeof(float));
        }
    }
    free(ranges);
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

// Lists the small files that are in a directory so far, but not those that other processes are writing.
static void checkpoint_list_small_files_(SavedState* s, const char* directory) {
    struct dirent* entry;
    DIR* dir = opendir(directory);
    CHECK(dir, "%s: cannot read: %s", directory, strerror(errno));
    while ((entry = readdir(dir))) {
        if (entry->d_name[0] != '.' && strncmp(entry->d_name, "optimizer.", 10) != 0) {
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

// The first of `count` elements that is not finite; `count` if all are finite.
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

// Whether all weights are finite; if not, the reason in `error`. Others could not be read again, and would push a
// checkpoint that can be read out of --keep.
static int checkpoint_is_finite_(const Checkpoints* c, const char* path, char* error) {
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &c->rows[i];
        const size_t count = checkpoint_layer_elements_(row, c->run.cfg);
        for (int l = 0; l < row->layers; l++) {
            const size_t bad =
                checkpoint_find_infinite_(tensor_at_layer(row, c->params, l), c->run.dtype, count);
            if (bad < count) {
                return error_set(
                    error, path,
                    "not saved: element %zu of %s, layer %d, is not finite: the run has diverged", bad,
                    row->name, l);
            }
        }
    }
    return 1;
}

// The files of rank 0 alone: all but the optimizer's state and state.json.
static void checkpoint_write_model_(Checkpoints* c, const char* directory) {
    SavedState* s = &c->state;
    hf_config_write(directory, c->run.cfg, c->run.dtype, c->run.eot);
    if (c->run.tokenizer) {
        tokenizer_write_hf(c->run.tokenizer, directory, c->run.cfg.max_T);
    }
    if (c->run.extra) {
        c->run.extra(c->run.extra_context, directory);
    }
    checkpoint_list_small_files_(s, directory);
    const uint64_t model = hf_model_write(directory, c->run.cfg, c->rows, c->params, c->run.dtype);
    checkpoint_list_file_(s, directory, "model.safetensors", model);
}

static void checkpoint_optimizer_name_(char name[64], int rank, int writers) {
    snprintf(name, 64, "optimizer.%dof%d.safetensors", rank + 1, writers);
}

// Writes the files of this process. `checkpoint` is the name for errors.
static void checkpoint_write_files_(Checkpoints* c, const char* directory, const char* checkpoint) {
    char path[PATH_MAX], name[64], error[ERROR_BYTES];
    struct stat info;
    if (c->run.zero.rank == 0) {
        if (!checkpoint_is_finite_(c, checkpoint, error)) {
            checkpoint_clear_(directory);
            CHECK(0, "%s", error);
        }
        checkpoint_write_model_(c, directory);
    }
    checkpoint_optimizer_name_(name, c->run.zero.rank, checkpoint_writers_(&c->run.zero));
    file_join(path, directory, name);
    c->written.xxh64 = checkpoint_write_optimizer_(c, path);
    CHECK(stat(path, &info) == 0, "%s: cannot read: %s", path, strerror(errno));
    c->written.bytes = info.st_size;
}

// Lists the parts of the optimizer's state, `written` by each process.
static void checkpoint_list_parts_(Checkpoints* c, const char* directory, const SavedFile* written) {
    const int writers = checkpoint_writers_(&c->run.zero);
    char name[64];
    for (int i = 0; i < writers; i++) {
        checkpoint_optimizer_name_(name, i, writers);
        checkpoint_list_file_(&c->state, directory, name, written[i].xxh64);
    }
}

// After all have written: state.json, and the directory gets its name. In rank 0.
static void checkpoint_complete_(Checkpoints* c, const char* part, const char* path) {
    char file[PATH_MAX];
    SavedState* s = &c->state;
    file_join(file, part, "state.json");
    state_write(file, s, c->options);
    for (; s->num_files > 0; s->num_files--) {
        free((char*)s->files[s->num_files - 1].name);
    }
    checkpoint_put_(part, path, c->out, s->run.step);
    file_sync_directory(path);
    if (c->keep) {
        checkpoint_thin_(c->out, s->run.step, c->keep, c->keep_major);
    }
}

// The thread of a save. With one process it does all; with several, first each one's writes, then rank 0's completes.
static void* checkpoint_work_(void* checkpoints) {
    Checkpoints* c = (Checkpoints*)checkpoints;
    const double start_s = time_now_s();
    char path[PATH_MAX], part[PATH_MAX];
    checkpoint_path(path, c->out, c->state.run.step, "");
    checkpoint_path(part, c->out, c->state.run.step, CHECKPOINT_PART_);
    if (c->writes) {
        checkpoint_write_files_(c, part, path);
    }
    if (c->writes && c->completes) {
        checkpoint_list_parts_(c, part, &c->written);
    }
    if (c->completes) {
        checkpoint_complete_(c, part, path);
    }
    c->write_s += time_now_s() - start_s;
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

void checkpoint_share(SavedState* s, char path[PATH_MAX], int* is_found, Comm* comm) {
    char file[PATH_MAX], error[ERROR_BYTES];
    comm_broadcast(comm, is_found, sizeof(*is_found));
    if (!*is_found) {
        return;
    }
    comm_broadcast(comm, path, PATH_MAX);
    if (comm->rank > 0) {
        file_join(file, path, "state.json");
        CHECK(state_try_read(s, file, error), "%s", error);
    }
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

// Elements begin ... end-1 of the optimizer's space, in a file from its element `at` on.
typedef struct {
    const SafeTensors* file;
    size_t begin, end, at;
} CheckpointSlice_;

// The files of the optimizer's state, and what they have, in the order of the space.
typedef struct {
    SafeTensors* files;
    CheckpointSlice_* slices;
    size_t num_files, num_slices, total;
} CheckpointParts_;

// Reads a number at *text and moves behind it.
static size_t checkpoint_number_(const SafeTensors* file, const char* key, const char** text) {
    const size_t digits = *text ? strspn(*text, "0123456789") : 0;
    CHECK(digits > 0 && digits < 19, "%s: %s: \"%.40s\", wanted a number", file->path, key,
          *text ? *text : "missing");
    const size_t number = (size_t)strtoull(*text, NULL, 10);
    *text += digits;
    return number;
}

static size_t checkpoint_metadata_(const SafeTensors* file, const char* key) {
    const char* text = safetensors_metadata(file, key);
    const size_t number = checkpoint_number_(file, key, &text);
    CHECK(!*text, "%s: %s: \"%.40s\" after the number", file->path, key, text);
    return number;
}

static void checkpoint_add_slice_(CheckpointParts_* parts, CheckpointSlice_ slice) {
    CHECK(slice.begin <= slice.end && slice.end <= parts->total, "%s: elements %zu to %zu of %zu",
          slice.file->path, slice.begin, slice.end, parts->total);
    parts->slices = (CheckpointSlice_*)check_grow(parts->slices, parts->num_slices, sizeof(CheckpointSlice_),
                                                  slice.file->path);
    parts->slices[parts->num_slices++] = slice;
}

// Adds what a file says it has: `ranges`, or one range from `begin` to `end`, as older programs wrote it.
static void checkpoint_add_file_(CheckpointParts_* parts, const SafeTensors* file) {
    CheckpointSlice_ slice = {file, 0, 0, 0};
    const size_t total = checkpoint_metadata_(file, "total");
    CHECK(total == parts->total, "%s: a part of %zu elements, wanted %zu for this model", file->path, total,
          parts->total);
    const char* text = safetensors_metadata(file, "ranges");
    if (!text) {
        slice.begin = checkpoint_metadata_(file, "begin");
        slice.end = checkpoint_metadata_(file, "end");
        checkpoint_add_slice_(parts, slice);
        return;
    }
    while (*text) {
        slice.begin = checkpoint_number_(file, "ranges", &text);
        CHECK(*text == '-', "%s: ranges: \"%.40s\", wanted -", file->path, text);
        text++;
        slice.end = checkpoint_number_(file, "ranges", &text);
        CHECK(!*text || (*text == ',' && text[1]), "%s: ranges: \"%.40s\", wanted a comma", file->path, text);
        text += *text == ',';
        checkpoint_add_slice_(parts, slice);
        slice.at += slice.end - slice.begin;
    }
}

static int checkpoint_by_begin_(const void* a, const void* b) {
    const CheckpointSlice_ *x = (const CheckpointSlice_*)a, *y = (const CheckpointSlice_*)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : (x->end > y->end) - (x->end < y->end);
}

// Whether a file holds optimizer state: optimizer.<i>of<n>.safetensors.
static int checkpoint_is_part_(const char* name) {
    int i, n, end = 0;
    return sscanf(name, "optimizer.%dof%d.safetensors%n", &i, &n, &end) == 2 && end && !name[end];
}

// Opens the files; ends the program unless they fill the space.
static void checkpoint_open_parts_(CheckpointParts_* parts, const SavedState* s, const char* directory,
                                   size_t total) {
    char path[PATH_MAX];
    size_t at = 0;
    memset(parts, 0, sizeof(*parts));
    parts->total = total;
    parts->files = (SafeTensors*)check_alloc((size_t)s->num_files + 1, sizeof(SafeTensors), directory);
    for (int i = 0; i < s->num_files; i++) {
        if (checkpoint_is_part_(s->files[i].name)) {
            SafeTensors* file = &parts->files[parts->num_files++];
            file_join(path, directory, s->files[i].name);
            safetensors_open(file, path);
            checkpoint_add_file_(parts, file);
        }
    }
    qsort(parts->slices, parts->num_slices, sizeof(CheckpointSlice_), checkpoint_by_begin_);
    for (size_t i = 0; i < parts->num_slices; i++) {
        CHECK(parts->slices[i].begin == at,
              "%s: elements from %zu on, wanted those from %zu: the parts do not fit",
              parts->slices[i].file->path, parts->slices[i].begin, at);
        at = parts->slices[i].end;
    }
    CHECK(at == total, "%s: optimizer state of %zu elements, wanted %zu", directory, at, total);
}

static void checkpoint_close_parts_(CheckpointParts_* parts) {
    for (size_t i = 0; i < parts->num_files; i++) {
        safetensors_close(&parts->files[i]);
    }
    free(parts->slices);
    free(parts->files);
}

// The elements that a file has.
static size_t checkpoint_part_elements_(const CheckpointParts_* parts, const SafeTensors* file) {
    size_t count = 0;
    for (size_t i = 0; i < parts->num_slices; i++) {
        count += parts->slices[i].file == file ? parts->slices[i].end - parts->slices[i].begin : 0;
    }
    return count;
}

// Ends the program if a file has not what it says.
static void checkpoint_check_part_(const CheckpointParts_* parts, const SafeTensors* file,
                                   const StateRow* state) {
    const size_t count = checkpoint_part_elements_(parts, file);
    const SafeTensorsView* view = safetensors_require(file, state->name, 1, &count);
    CHECK(view->dtype == SAFETENSORS_F32, "%s: tensor %s is %s, wanted F32", file->path, state->name,
          safetensors_dtype_name(view->dtype));
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

// Sets the elements of a range from the slices that have them.
static void checkpoint_read_range_(const CheckpointParts_* parts, const StateRow* state,
                                   const ZeroRange* range, float* out) {
    const size_t begin = range->logical, end = begin + range->count;
    size_t i = 0;
    for (size_t step = parts->num_slices; step > 0;
         step /= 2) { // the first slice that ends after the range begins
        while (i + step <= parts->num_slices && parts->slices[i + step - 1].end <= begin) {
            i += step;
        }
    }
    for (; i < parts->num_slices && parts->slices[i].begin < end; i++) {
        const CheckpointSlice_* slice = &parts->slices[i];
        const size_t from = begin > slice->begin ? begin : slice->begin,
                     to = end < slice->end ? end : slice->end, at = slice->at + (from - slice->begin);
        if (from < to) {
            safetensors_read_f32_part(safetensors_find(slice->file, state->name), at, to - from,
                                      out + (from - begin));
            checkpoint_check_state_(slice->file->path, state, out + (from - begin), at, to - from);
        }
    }
}

// Reads what this process updates of the optimizer's state.
static void checkpoint_read_optimizer_(const SavedState* s, const char* directory, GPT2Config cfg,
                                       const ZeroPlan* zero, void* optimizer) {
    CheckpointParts_ parts;
    StateRow states[GPT2_STATE_ROWS];
    TensorRow rows[GPT2_PARAMETER_ROWS];
    zero_state_rows(states, zero, cfg);
    gpt2_sharded_rows_of(rows, cfg, sizeof(float), zero->size);
    ZeroRange* ranges = (ZeroRange*)check_alloc((size_t)zero_max_ranges(cfg), sizeof(ZeroRange), directory);
    const int num_ranges = zero_ranges(zero, rows, cfg, ranges);
    checkpoint_open_parts_(&parts, s, directory, zero_logical_elements(rows, cfg));
    for (int k = 0; k < GPT2_STATE_ROWS; k++) {
        float* state = (float*)((char*)optimizer + states[k].offset_bytes);
        for (size_t i = 0; i < parts.num_files; i++) {
            checkpoint_check_part_(&parts, &parts.files[i], &states[k]);
        }
        for (int i = 0; i < num_ranges; i++) {
            checkpoint_read_range_(&parts, &states[k], &ranges[i], state + ranges[i].owned);
        }
    }
    checkpoint_close_parts_(&parts);
    free(ranges);
}

void checkpoint_read(const SavedState* s, const char* directory, GPT2Config cfg, const TensorRow* rows,
                     void* params, const ZeroPlan* zero, void* optimizer) {
    hf_model_read(directory, cfg, rows, params);
    checkpoint_read_optimizer_(s, directory, cfg, zero, optimizer);
}

// ---- saving during a run ----

// Of the two parts of the copy.
static size_t checkpoint_params_bytes_(const ZeroPlan* zero, SafeTensorsDtype dtype) {
    return zero->rank == 0 ? zero_full_elements(zero) * safetensors_dtype_bytes(dtype) : 0;
}
static size_t checkpoint_optimizer_bytes_(StateRow states[GPT2_STATE_ROWS], GPT2Config cfg,
                                          const ZeroPlan* zero) {
    return zero->rank < checkpoint_writers_(zero) ? zero_state_rows(states, zero, cfg) : 0;
}

size_t checkpoints_bytes(GPT2Config cfg, const ZeroPlan* zero, SafeTensorsDtype dtype) {
    StateRow states[GPT2_STATE_ROWS];
    return checkpoint_params_bytes_(zero, dtype) + checkpoint_optimizer_bytes_(states, cfg, zero);
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

// The largest serial number of a checkpoint in the directory, 0 without one.
static int64_t checkpoint_last_serial_(const char* out) {
    CheckpointEntry_* entries;
    const int count = checkpoint_list_(out, &entries);
    int64_t serial = 0;
    for (int i = 0; i < count; i++) {
        if (entries[i].serial != INT64_MAX && entries[i].serial > serial) {
            serial = entries[i].serial;
        }
    }
    free(entries);
    return serial;
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
    gpt2_sharded_rows_of(c->rows, run.cfg, safetensors_dtype_bytes(run.dtype), run.zero.size);
    c->ranges = (ZeroRange*)check_alloc((size_t)zero_max_ranges(run.cfg), sizeof(ZeroRange), c->out);
    c->num_ranges = zero_ranges(&run.zero, c->rows, run.cfg, c->ranges);
    c->params_bytes = checkpoint_params_bytes_(&run.zero, run.dtype);
    c->optimizer_bytes = checkpoint_optimizer_bytes_(c->state_rows, run.cfg, &run.zero);
    c->state.trainer = run.trainer;
    c->state.train_tokens = (int64_t)run.train_tokens;
    c->state.train_data = run.train_data;
    c->state.padded_vocab = run.cfg.Vp;
    c->state.files = (SavedFile*)check_alloc(STATE_MAX_FILES, sizeof(SavedFile), "files of a checkpoint");
    c->lock = lock;
    if (run.zero.rank == 0) {
        c->lock = lock >= 0 ? lock : checkpoint_lock(c->out);
        checkpoint_require_room_(c, c->out);
        checkpoint_require_places_(c, after);
        c->state.serial = checkpoint_last_serial_(c->out);
    }
    comm_broadcast(run.comm, &c->state.serial, sizeof(c->state.serial));
}

// ---- a save, from its start to its end ----

// Starts the thread of this process.
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

// Makes the directory for the files of all.
static void checkpoint_make_part_(Checkpoints* c) {
    char part[PATH_MAX];
    checkpoint_path(part, c->out, c->state.run.step, CHECKPOINT_PART_);
    checkpoint_clear_(part);
    CHECK(mkdir(part, 0777) == 0, "%s: cannot make the directory: %s", part, strerror(errno));
    checkpoint_require_room_(c, part);
}

void checkpoint_start(Checkpoints* c, const RunState* run) {
    assert(!c->is_running);
    c->state.run = *run;
    c->state.serial++;
    c->saved_step = run->step;
    c->is_running = c->writes = 1;
    c->completes = c->run.zero.size == 1;
    c->write_s = 0;
    if (c->run.zero.rank == 0) {
        checkpoint_make_part_(c);
    }
    comm_barrier(c->run.comm);
    if (c->run.zero.rank < checkpoint_writers_(&c->run.zero)) {
        checkpoint_start_thread_(c);
    }
}

// All have written. Rank 0 hears what, and completes the checkpoint.
static void checkpoint_finish_writing_(Checkpoints* c) {
    const ZeroPlan* zero = &c->run.zero;
    char part[PATH_MAX];
    SavedFile* all = (SavedFile*)check_alloc((size_t)zero->size, sizeof(SavedFile), "files of a checkpoint");
    checkpoint_join_(c);
    comm_all_gather(c->run.comm, all, &c->written, sizeof(SavedFile));
    c->writes = 0;
    c->completes = 1;
    if (zero->rank == 0) {
        checkpoint_path(part, c->out, c->state.run.step, CHECKPOINT_PART_);
        checkpoint_list_parts_(c, part, all);
        checkpoint_start_thread_(c);
    }
    free(all);
}

// The save has ended on all ranks.
static int checkpoint_end_(Checkpoints* c, char path[PATH_MAX]) {
    checkpoint_join_(c);
    c->is_running = 0;
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
    comm_barrier(c->run.comm);
    return checkpoint_end_(c, path);
}

// Whether no process has a thread that still works.
static int checkpoint_all_done_(Checkpoints* c) {
    const int is_busy = c->has_thread && !__atomic_load_n(&c->is_done, __ATOMIC_ACQUIRE);
    return !comm_any(c->run.comm, is_busy);
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
    free(c->ranges);
    free(c->state.files);
    if (c->lock >= 0) {
        close(c->lock);
    }
    memset(c, 0, sizeof(*c));
}

#endif // CHECKPOINT_IMPLEMENTATION

#endif
