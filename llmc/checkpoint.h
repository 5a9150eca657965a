/*
checkpoint.h -- the model saved during a run: OUT/step_00001000/model.bin, whole or not there.

A checkpoint is a directory. It is filled under a temporary name, flushed to the disk and renamed; --keep
removes older ones once a newer one is in its place, sparing multiples of --keep-major. Any failure is one
error that names the file, and leaves the checkpoints that were there.

needs:   check.h file.h model_file.h
defines: checkpoint_save
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <ctype.h>
#include <dirent.h>
#include <sys/stat.h>

#include "model_file.h"

static inline void checkpoint_path_(char path[PATH_MAX], const char* out, int64_t step, const char* ending) {
    const int length = snprintf(path, PATH_MAX, "%s/step_%08lld%s", out, (long long)step, ending);
    CHECK(length < PATH_MAX, "%s: the name is too long", out);
}

// Removes the directory of a checkpoint, if it is there.
static inline void checkpoint_remove_(const char* directory) {
    char file[PATH_MAX];
    struct dirent* entry;
    DIR* dir = opendir(directory);
    while (dir && (entry = readdir(dir))) {
        if (snprintf(file, sizeof(file), "%s/%s", directory, entry->d_name) < (int)sizeof(file)) {
            unlink(file); // fails on . and .., as it should
        }
    }
    if (dir) {
        closedir(dir);
        rmdir(directory);
    }
}

// The step of a directory entry that is called as checkpoint_path_ would call it, or -1.
static inline int64_t checkpoint_step_(const char* name) {
    char wanted[32];
    if (strncmp(name, "step_", 5) != 0 || !isdigit((unsigned char)name[5])) {
        return -1;
    }
    const long long step = strtoll(name + 5, NULL, 10);
    snprintf(wanted, sizeof(wanted), "step_%08lld", step);
    return strcmp(name, wanted) == 0 ? step : -1;
}

// Counts the checkpoints up to step `newest` that are not at multiples of `major` (0: all); sets `oldest` to
// the first of them. Later ones are of an earlier run in the same place, and not ours to remove.
static inline int checkpoint_count_(const char* out, int64_t newest, int major, int64_t* oldest) {
    int count = 0;
    struct dirent* entry;
    DIR* dir = opendir(out);
    while (dir && (entry = readdir(dir))) {
        const int64_t step = checkpoint_step_(entry->d_name);
        if (step >= 0 && step <= newest && (major == 0 || step % major != 0)) {
            *oldest = count == 0 || step < *oldest ? step : *oldest;
            count++;
        }
    }
    if (dir) {
        closedir(dir);
    }
    return count;
}

// Removes the oldest checkpoints but `keep` (1 or more), not counting multiples of `major`, which stay.
static inline void checkpoint_thin_(const char* out, int64_t newest, int keep, int major) {
    int64_t oldest = -1;
    while (checkpoint_count_(out, newest, major, &oldest) > keep) {
        char path[PATH_MAX];
        struct stat info;
        checkpoint_path_(path, out, oldest, "");
        checkpoint_remove_(path);
        if (stat(path, &info) == 0) {
            return; // it cannot be removed: not a reason to end the run
        }
    }
}

// Saves the parameters after `step` updates; sets `path` to the directory's name. keep 0 keeps all.
static inline void checkpoint_save(char path[PATH_MAX], const char* out, int64_t step, int keep, int major,
                                   GPT2Config cfg, const TensorRow* rows, const void* parameters) {
    char temporary[PATH_MAX], file[PATH_MAX];
    checkpoint_path_(path, out, step, "");
    checkpoint_path_(temporary, out, step, ".part");
    checkpoint_remove_(temporary); // of a run that was killed while saving
    CHECK(mkdir(temporary, 0777) == 0, "%s: cannot make the directory: %s", temporary, strerror(errno));
    CHECK(snprintf(file, sizeof(file), "%s/model.bin", temporary) < (int)sizeof(file),
          "%s: the name is too long", out);
    model_file_write(file, cfg, rows, parameters, MODEL_FP32);
    checkpoint_remove_(path); // of an earlier run in the same place
    CHECK(rename(temporary, path) == 0, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
    file_sync_directory(path);
    if (keep) {
        checkpoint_thin_(out, step, keep, major);
    }
}

#endif
