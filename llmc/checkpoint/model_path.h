/*
model_path.h -- finds what --model, --teacher and --adapter name: a file, a directory, or the newest
checkpoint of a run.
*/
#ifndef LLMC_MODEL_PATH_H
#define LLMC_MODEL_PATH_H

#include <limits.h>

#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the file or directory that --model names; NULL if it names a size, or nothing. If it is
// the directory of a run, sets `path` to the run's newest checkpoint and returns that.
const char* model_path_find(const Options* options, char path[PATH_MAX]);

// Does the same for --teacher, which cannot name a size.
const char* model_path_of_teacher(const Options* options, char path[PATH_MAX]);

// Returns the directory that --adapter names, or the newest checkpoint of that run; NULL: none.
const char* model_path_of_adapter(const Options* options, char path[PATH_MAX]);

#ifdef __cplusplus
}
#endif

#ifdef MODEL_PATH_IMPLEMENTATION

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/data/token_files.h"
#include "llmc/formats/hf_adapter.h"
#include "llmc/model/presets.h"

// Returns true if `directory` is a run's and not a model's, and sets `path` to its newest
// checkpoint.
static int model_path_is_run_(char path[PATH_MAX], const char* option, const char* directory) {
    char config[PATH_MAX];
    SavedState saved;
    if (!file_is_directory(directory)) {
        return 0;
    }
    file_join(config, directory, "config.json");
    if (access(config, F_OK) == 0 || hf_adapter_is_in(directory)) {
        return 0;
    }
    const CheckpointsFound found = checkpoint_newest(path, &saved, directory, NULL, NULL);
    CHECK(found >= 0, "--%s %s: every checkpoint is damaged", option, directory);
    if (found) {
        state_close(&saved);
    }
    CHECK(found != CHECKPOINTS_OLDER,
          "--%s %s: a checkpoint that may be the newest cannot be read; --%s %s takes the one before it",
          option, directory, option, path);
    return found == CHECKPOINTS_NEWEST;
}

const char* model_path_find(const Options* options, char path[PATH_MAX]) {
    struct stat info;
    if (!options->model.path[0] || options_model_size(options)) {
        return NULL;
    }
    const int found = stat(options->model.path, &info) == 0;
    if (!found && !strchr(options->model.path, '/') && !tokens_is_shard(options->model.path)) {
        char names[1024];
        model_preset_names(names, sizeof(names));
        die_usage("--model %s is neither a file nor a known size: %s", options->model.path, names);
    }
    CHECK(found, "%s: cannot read the model: %s", options->model.path, strerror(errno));
    const char* model = model_path_is_run_(path, "model", options->model.path) ? path : options->model.path;
    if (file_is_directory(model) && hf_adapter_is_in(model)) {
        die_usage("--model %s is an adapter; wanted its base, with --adapter %s", options->model.path,
                  options->model.path);
    }
    return model;
}

const char* model_path_of_teacher(const Options* options, char path[PATH_MAX]) {
    const char* teacher = options->teacher.path;
    struct stat info;
    if (!teacher[0]) {
        return NULL;
    }
    CHECK(stat(teacher, &info) == 0, "%s: cannot read the teacher: %s", teacher, strerror(errno));
    return model_path_is_run_(path, "teacher", teacher) ? path : teacher;
}

const char* model_path_of_adapter(const Options* options, char path[PATH_MAX]) {
    const char* adapter = options->model.adapter;
    if (!adapter[0]) {
        return NULL;
    }
    CHECK(file_is_directory(adapter), "%s: no directory, wanted that of an adapter", adapter);
    adapter = model_path_is_run_(path, "adapter", adapter) ? path : adapter;
    CHECK(hf_adapter_is_in(adapter), "%s: no " HF_ADAPTER_CONFIG ", wanted an adapter as PEFT stores it",
          adapter);
    return adapter;
}

#endif // MODEL_PATH_IMPLEMENTATION

#endif
