/*
run_files.h -- the files that a run reads and writes: those that its options name (option_files.h),
and those that it finds, the newest checkpoint of a run for example.

Its outputs are checked against them before any work (outputs.h), and its ranks compare them.
*/
#ifndef LLMC_RUN_FILES_H
#define LLMC_RUN_FILES_H

#include "llmc/base/file_list.h"
#include "llmc/run/run.h"
#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// Adds all files that a run with these options reads, after its models are found.
void run_list_files(FileList* files, const Run* run, const Options* options);

// Ends the program if an output file must not or cannot be written.
void run_check_outputs(const Run* run, const Options* options);

// Ends all ranks if their files differ. Collective.
void run_agree_on_files(Run* run, const Options* options);

#ifdef __cplusplus
}
#endif

#ifdef RUN_FILES_IMPLEMENTATION

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/file.h"
#include "llmc/base/outputs.h"
#include "llmc/base/stop_request.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/formats/hf_adapter.h"
#include "llmc/formats/hf_model.h"
#include "llmc/log/log_files.h"
#include "llmc/setup/option_files.h"
#include "llmc/setup/options_values.h"
#include "llmc/setup/ranks_agree.h"

// ---- what is read ----

// Returns the names in the value of an option; a switch has fixed names.
static const char* run_named_(const Options* options, const OptionRow* row, char* buffer) {
    const char* value = option_text(options, row, buffer);
    const int is_off = row->type == OPTION_SWITCH && strcmp(value, "off") == 0;
    return is_off ? "" : row->type == OPTION_SWITCH ? TASKS_HELLASWAG : value;
}

// Adds the files of the checkpoint that the run continues.
static void run_list_checkpoint_(FileList* files, const Resume* resume) {
    file_list_add_directory(files, "resume", resume->path);
    file_list_add_in(files, "resume", resume->path, "state.json");
    for (int i = 0; i < resume->saved.num_files; i++) {
        file_list_add_in(files, "resume", resume->path, resume->saved.files[i].name);
    }
}

// Adds the files of the checkpoint that was found for an option, if its value is a run's directory.
static void run_list_newest_(FileList* files, const char* option, const char* value, const char* found) {
    if (found && strcmp(found, value) != 0) {
        hf_model_list_files(files, option, found);
    }
}

void run_list_files(FileList* files, const Run* run, const Options* options) {
    char buffer[OPTION_TEXT_BYTES];
    const int continues = run->resume.is_active,
              // else --model is not read
        has_model = (!continues || run->adapter_path) && !options_model_size(options);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const int is_model = row->offset == offsetof(Options, model.path);
        if (option_applies(options, row) && (has_model || !is_model)) {
            option_list_files(files, row, run_named_(options, row, buffer));
        }
    }
    if (continues) {
        run_list_checkpoint_(files, &run->resume);
    }
    if (has_model) {
        run_list_newest_(files, "model", options->model.path, run->model_path);
    }
    if (run->adapter_path && strcmp(run->adapter_path, options->model.adapter) != 0) {
        hf_adapter_list_files(files, "adapter", run->adapter_path);
    }
    run_list_newest_(files, "teacher", options->teacher.path, run->teacher_path);
}

// ---- what is written ----

// True if a run gives this name to a file or directory in its --out, or looks for one.
static int run_owns_(const char* name) {
    return log_files_own(name) || checkpoint_owns(name) || stop_request_owns(name) ||
           strcmp(name, "tokenizer.json") == 0;
}

// Adds the files that the run has in --out.
static void run_list_out_(FileList* files, const char* out) {
    static const char* const directories[] = {LOG_BOARD, "tokens"};
    char path[PATH_MAX];
    int64_t* steps;
    for (size_t i = 0; i < sizeof(directories) / sizeof(directories[0]); i++) {
        file_join(path, out, directories[i]);
        file_list_add_directory(files, "out", path);
    }
    for (int i = checkpoint_steps(out, "", &steps) - 1; i >= 0; i--) {
        checkpoint_path(path, out, steps[i], "");
        file_list_add_directory(files, "out", path);
    }
    free(steps);
}

static int run_writes_(const Options* options, const OptionRow* row) {
    return option_applies(options, row) && (row->flags & OPTION_WRITES) && option_files(row) == FILES_ONE;
}

static int run_has_outputs_(const Options* options) {
    int has_some = 0;
    for (int i = 0; i < OPTION_ROWS; i++) {
        has_some |= options->given[i] && run_writes_(options, &OPTION_TABLE[i]);
    }
    return has_some;
}

// Adds a file that an option writes. Its name must not be one that the run gives to a file itself.
static void run_add_output_(Outputs* o, const Options* options, const char* option, const char* path) {
    char own[PATH_MAX];
    if (options->output.dir[0] && path[0] && run_owns_(file_name_in(path))) {
        file_join(own, options->output.dir, file_name_in(path));
        outputs_keep(o, own);
    }
    outputs_add(o, option, path);
}

void run_check_outputs(const Run* run, const Options* options) {
    Outputs o;
    char buffer[OPTION_TEXT_BYTES];
    if (!run_has_outputs_(options)) {
        return;
    }
    outputs_open(&o);
    run_list_files(&o.reads, run, options);
    if (options->output.dir[0]) {
        run_list_out_(&o.reads, options->output.dir);
    }
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        if (run_writes_(options, row)) {
            run_add_output_(&o, options, row->name, option_text(options, row, buffer));
        }
    }
    outputs_check(&o);
    outputs_close(&o);
}

// ---- what ranks compare ----

void run_agree_on_files(Run* run, const Options* options) {
    FileList files = file_list_open();
    if (run->comm.size > 1) {
        run_list_files(&files, run, options);
        ranks_agree_on_files(&run->comm, &files);
    }
    file_list_close(&files);
}

#endif // RUN_FILES_IMPLEMENTATION

#endif
