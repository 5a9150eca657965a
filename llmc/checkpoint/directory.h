/*
directory.h -- the checkpoints in the directory of a run: finds, replaces and removes them.

    OUT/step_00001000/         a complete checkpoint
    OUT/step_00001000.part/    a checkpoint that is being written or removed
    OUT/step_00001000.old/     a checkpoint that is being replaced, if the two cannot be exchanged
    OUT/run.lock               names the process that writes here (lock.h, stop_request.h)

A checkpoint is written as .part and then renamed; to be removed, it is renamed first. So a name
without an ending never holds an incomplete checkpoint, and the next run in the directory removes
the leftovers of a killed one. If one of these names is a symbolic link, the link is removed, never
its target. Only one run at a time may write.
*/
#ifndef LLMC_DIRECTORY_H
#define LLMC_DIRECTORY_H

#include <limits.h>
#include <stdint.h>

#include "llmc/base/lock.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CHECKPOINT_PART ".part" // ending of a checkpoint that is being written or removed

// ---- names ----

// Sets `path` to the directory of a step's checkpoint; `ending` is "" or CHECKPOINT_PART.
void checkpoint_path(char path[PATH_MAX], const char* out, int64_t step, const char* ending);

// True for the names of checkpoints, whole or not.
int checkpoint_owns(const char* name);

// Sets *steps to the steps of the entries of `out` with this ending, unordered. Returns their
// number. The caller frees *steps.
int checkpoint_steps(const char* out, const char* ending, int64_t** steps);

// ---- writing ----

// Takes the lock of a directory, for lock_release: only one run at a time may write. Removes the
// leftovers of a killed run.
Lock* checkpoint_lock(const char* out);

// Ends the program if this process cannot create a directory in `out`: now, before work is lost.
void checkpoint_require_writable(const char* out);

// Removes a directory of files, or a link to one, if it exists.
void checkpoint_clear(const char* directory);

// Renames the finished directory `part` to `path`, and removes what had that name.
void checkpoint_put(const char* part, const char* path, const char* out, int64_t step);

// Removes the oldest checkpoints of the run of `last`, until `keep` (1 or more) are left up to and
// including `last`. Multiples of `major` (0: none) and step `best` (-1: none) stay and do not
// count. With CHECKPOINT_KEEP_AUTO, only checkpoints made by the clock, for a stop or by
// --keep-best count, and two are left. Steps after `last` stay: the run made them before it was
// resumed from an earlier step. A checkpoint that cannot be removed does not end the run.
enum { CHECKPOINT_KEEP_AUTO = -1, CHECKPOINT_KEPT_BY_CLOCK = 2 };
typedef struct {
    int keep, major;
    int64_t best;
} CheckpointsKept;
void checkpoint_thin(const char* out, const SavedState* last, CheckpointsKept kept);

// Removes the checkpoints that the run wrote after `last`: after a rollback it must not be resumed
// from them. One whose state cannot be read stays, with a warning.
void checkpoint_remove_after(const char* out, const SavedState* last);

// Returns a serial number that no checkpoint of the directory exceeds; 0 if the directory has none.
// Each one that cannot be read raises it by one.
int64_t checkpoint_last_serial(const char* out);

// ---- finding ----

// Checks every bit of all files of a checkpoint, and reads its state. Returns 0 with the reason in
// `error`, and nothing to close, if it is damaged.
int checkpoint_try_check(SavedState* s, const char* directory, char* error);

// Returns true if checkpoint_newest may use a checkpoint; `context` is the caller's.
typedef int (*CheckpointFilter)(const SavedState* state, const void* context);

// Results of checkpoint_newest; above 0 if it found a checkpoint. OLDER: one that is damaged or
// cannot be read may be newer.
typedef enum {
    CHECKPOINTS_DAMAGED = -1,
    CHECKPOINTS_NONE,
    CHECKPOINTS_NEWEST,
    CHECKPOINTS_OLDER
} CheckpointsFound;

// Finds the last checkpoint written that is valid and that `filter` (NULL: any) accepts, and sets
// `path` and *s to it. Reports damaged ones on stderr.
CheckpointsFound checkpoint_newest(char path[PATH_MAX], SavedState* s, const char* out,
                                   CheckpointFilter filter, const void* context);

// Sends the checkpoint that rank 0 has found and checked, if any, to all ranks, which read its
// state. Collective.
void checkpoint_share(SavedState* s, char path[PATH_MAX], int* is_found, Comm* comm);

#ifdef __cplusplus
}
#endif

#ifdef DIRECTORY_IMPLEMENTATION

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/base/stop_request.h"

#define CHECKPOINT_OLD_ ".old"

// ---- names ----

void checkpoint_path(char path[PATH_MAX], const char* out, int64_t step, const char* ending) {
    file_path(path, "%s/step_%08lld%s", out, (long long)step, ending);
}

// Returns the step in a name that checkpoint_path makes with this ending; -1 for other names.
static int64_t checkpoint_step_(const char* name, const char* ending) {
    char wanted[64];
    if (strncmp(name, "step_", 5) != 0 || !isdigit((unsigned char)name[5])) {
        return -1;
    }
    const long long step = strtoll(name + 5, NULL, 10);
    snprintf(wanted, sizeof(wanted), "step_%08lld%s", step, ending);
    return strcmp(name, wanted) == 0 ? step : -1;
}

int checkpoint_owns(const char* name) {
    return checkpoint_step_(name, "") >= 0 || checkpoint_step_(name, CHECKPOINT_PART) >= 0 ||
           checkpoint_step_(name, CHECKPOINT_OLD_) >= 0;
}

int checkpoint_steps(const char* out, const char* ending, int64_t** steps) {
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

// Removes a symbolic link. Returns 0 if `path` is none.
static int checkpoint_unlink_(const char* path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode) && unlink(path) == 0;
}

void checkpoint_clear(const char* directory) {
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

// Removes a checkpoint. Returns true if its name is free now.
static int checkpoint_remove_(const char* out, int64_t step) {
    char path[PATH_MAX], part[PATH_MAX];
    checkpoint_path(path, out, step, "");
    checkpoint_path(part, out, step, CHECKPOINT_PART);
    checkpoint_clear(part);
    if (rename(path, part) != 0) {
        return 0;
    }
    checkpoint_clear(part);
    return 1;
}

// Removes the leftovers of a killed run: incomplete checkpoints, and one that was being replaced,
// which gets its name back if the new one is missing.
static void checkpoint_recover_(const char* out) {
    char path[PATH_MAX], other[PATH_MAX];
    int64_t* steps;
    for (int i = checkpoint_steps(out, CHECKPOINT_PART, &steps) - 1; i >= 0; i--) {
        checkpoint_path(path, out, steps[i], CHECKPOINT_PART);
        checkpoint_clear(path);
    }
    free(steps);
    for (int i = checkpoint_steps(out, CHECKPOINT_OLD_, &steps) - 1; i >= 0; i--) {
        checkpoint_path(path, out, steps[i], "");
        checkpoint_path(other, out, steps[i], CHECKPOINT_OLD_);
        struct stat info;
        if (stat(path, &info) != 0) {
            CHECK(rename(other, path) == 0, "%s: cannot rename to %s: %s", other, path, strerror(errno));
        } else {
            checkpoint_clear(other);
        }
    }
    free(steps);
}

// ---- the lock, and places ----

// Time to wait for a killed run, which keeps its lock until the system has reclaimed its memory.
#ifndef CHECKPOINT_LOCK_WAIT_S
#define CHECKPOINT_LOCK_WAIT_S 10
#endif
Lock* checkpoint_lock(const char* out) {
    char path[PATH_MAX];
    const LockPlace place = {path, out, "run", CHECKPOINT_LOCK_WAIT_S};
    file_join(path, out, STOP_REQUEST_LOCK);
    Lock* lock = lock_take(&place);
    // may be left over; in a container a new process can have the name of the one it was for
    CHECK(stop_request_remove(out), "%s/run.stop: cannot remove: %s; wanted it for --stop-run", out,
          strerror(errno));
    checkpoint_recover_(out);
    return lock;
}

// Uses a new name, so that ranks do not collide.
void checkpoint_require_writable(const char* out) {
    char probe[PATH_MAX];
    file_path(probe, "%s/.probe_%lld_%.0f", out, (long long)getpid(), 1e6 * time_unix_s());
    CHECK(mkdir(probe, 0777) == 0, "%s: cannot save there: %s", out, strerror(errno));
    rmdir(probe);
}

// Exchanges two directories. Returns 0 if the file system cannot do that.
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

void checkpoint_put(const char* part, const char* path, const char* out, int64_t step) {
    if (rename(part, path) == 0 || (checkpoint_unlink_(path) && rename(part, path) == 0)) {
        return;
    }
    CHECK(errno == EEXIST || errno == ENOTEMPTY, "%s: cannot rename to %s: %s", part, path, strerror(errno));
    if (!checkpoint_exchange_(part, path)) {
        char old[PATH_MAX];
        checkpoint_path(old, out, step, CHECKPOINT_OLD_);
        CHECK(rename(path, old) == 0, "%s: cannot rename to %s: %s", path, old, strerror(errno));
        CHECK(rename(part, path) == 0, "%s: cannot rename to %s: %s", part, path, strerror(errno));
        checkpoint_clear(old);
    }
    checkpoint_clear(part);
}

// ---- finding ----

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

// A checkpoint of a list in the order of writing, latest first. One without a readable state may be
// the latest, so it comes first.
typedef struct {
    int64_t step, serial;
    uint64_t run; // identity of the run
    int64_t by_clock;
} CheckpointEntry_;
#define CHECKPOINT_UNKNOWN_ INT64_MAX // serial number of a checkpoint that cannot be read

static int checkpoint_by_serial_(const void* a, const void* b) {
    const CheckpointEntry_ *x = (const CheckpointEntry_*)a, *y = (const CheckpointEntry_*)b;
    return x->serial != y->serial ? (x->serial < y->serial ? 1 : -1)
                                  : (x->step < y->step) - (x->step > y->step);
}

// Lists the checkpoints of a directory. The caller frees *entries.
static int checkpoint_list_(const char* out, CheckpointEntry_** entries) {
    char path[PATH_MAX], file[PATH_MAX], error[ERROR_BYTES];
    int64_t* steps;
    const int count = checkpoint_steps(out, "", &steps);
    *entries = (CheckpointEntry_*)check_alloc((size_t)count + 1, sizeof(CheckpointEntry_), out);
    for (int i = 0; i < count; i++) {
        SavedState state;
        checkpoint_path(path, out, steps[i], "");
        file_join(file, path, "state.json");
        const CheckpointEntry_ unknown = {steps[i], CHECKPOINT_UNKNOWN_, 0, 0};
        (*entries)[i] = unknown;
        if (state_try_read(&state, file, error)) {
            (*entries)[i].serial = state.serial;
            (*entries)[i].run = state.identity;
            (*entries)[i].by_clock = state.by_clock;
            state_close(&state);
        }
    }
    free(steps);
    qsort(*entries, (size_t)count, sizeof(CheckpointEntry_), checkpoint_by_serial_);
    return count;
}

// Returns true if the first of `count` entries is still first now that its serial number is known;
// else sorts them again.
static int checkpoint_is_first_(CheckpointEntry_* entries, int count, int64_t serial) {
    const int64_t step = entries[0].step;
    entries[0].serial = serial;
    qsort(entries, (size_t)count, sizeof(CheckpointEntry_), checkpoint_by_serial_);
    return entries[0].step == step;
}

CheckpointsFound checkpoint_newest(char path[PATH_MAX], SavedState* s, const char* out,
                                   CheckpointFilter filter, const void* context) {
    char error[ERROR_BYTES];
    CheckpointEntry_* entries;
    const int count = checkpoint_list_(out, &entries);
    CheckpointsFound found = CHECKPOINTS_NONE, if_found = CHECKPOINTS_NEWEST;
    for (int i = 0; i < count && found <= 0;) {
        checkpoint_path(path, out, entries[i].step, "");
        found = CHECKPOINTS_DAMAGED;
        if (!checkpoint_try_check(s, path, error)) {
            fprintf(stderr, "warning: %s; trying the checkpoint before it\n", error);
            if_found = CHECKPOINTS_OLDER;
            i++;
        } else if (!checkpoint_is_first_(entries + i, count - i, s->serial)) {
            // it could not be read when the list was made, and turns out not to be the newest
            state_close(s);
        } else if (filter && !filter(s, context)) {
            state_close(s);
            i++;
        } else {
            found = if_found;
        }
    }
    free(entries);
    return found;
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

// Returns true if --keep counts a checkpoint.
static int checkpoint_counts_(const CheckpointEntry_* entry, const SavedState* last, CheckpointsKept kept) {
    const int is_own = entry->serial != CHECKPOINT_UNKNOWN_ && entry->run == last->identity;
    return is_own && entry->step <= last->run.step && entry->step != kept.best &&
           (kept.major == 0 || entry->step % kept.major != 0) &&
           (kept.keep != CHECKPOINT_KEEP_AUTO || entry->by_clock);
}

static int checkpoint_by_step_(const void* a, const void* b) {
    const CheckpointEntry_ *x = (const CheckpointEntry_*)a, *y = (const CheckpointEntry_*)b;
    return (x->step < y->step) - (x->step > y->step);
}

void checkpoint_thin(const char* out, const SavedState* last, CheckpointsKept kept) {
    CheckpointEntry_* entries;
    const int count = checkpoint_list_(out, &entries),
              most = kept.keep == CHECKPOINT_KEEP_AUTO ? CHECKPOINT_KEPT_BY_CLOCK : kept.keep;
    int counted = 0;
    qsort(entries, (size_t)count, sizeof(CheckpointEntry_), checkpoint_by_step_);
    for (int i = 0; i < count; i++) {
        const int counts = checkpoint_counts_(&entries[i], last, kept);
        counted += counts;
        if (counts && counted > most) {
            checkpoint_remove_(out, entries[i].step);
        }
    }
    free(entries);
}

void checkpoint_remove_after(const char* out, const SavedState* last) {
    CheckpointEntry_* entries;
    const int count = checkpoint_list_(out, &entries);
    for (int i = 0; i < count; i++) {
        char path[PATH_MAX];
        checkpoint_path(path, out, entries[i].step, "");
        if (entries[i].serial == CHECKPOINT_UNKNOWN_) {
            printable_line(stderr, "warning: %s: its state.json cannot be read, so it is not removed", path);
        } else if (entries[i].serial > last->serial && entries[i].run == last->identity) {
            checkpoint_remove_(out, entries[i].step);
        }
    }
    free(entries);
}

int64_t checkpoint_last_serial(const char* out) {
    CheckpointEntry_* entries;
    const int count = checkpoint_list_(out, &entries);
    int64_t serial = 0, unknown = 0;
    for (int i = 0; i < count; i++) {
        const int is_known = entries[i].serial != CHECKPOINT_UNKNOWN_;
        serial = is_known && entries[i].serial > serial ? entries[i].serial : serial;
        unknown += !is_known;
    }
    free(entries);
    return serial + unknown;
}

#endif // DIRECTORY_IMPLEMENTATION

#endif
