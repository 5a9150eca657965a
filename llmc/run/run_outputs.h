/*
run_outputs.h -- checks before any work that a run may write its output files (outputs.h).

The table of options says which files are read (OPTION_READS, OPTION_READS_LIST) and which are
written (OPTION_WRITES).
*/
#ifndef LLMC_RUN_OUTPUTS_H
#define LLMC_RUN_OUTPUTS_H

#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// Ends the program if an output file must not or cannot be written. Call it after resume_open: a
// resumed run reads the files that its first start named.
void run_outputs_check(const Options* options);

#ifdef __cplusplus
}
#endif

#ifdef RUN_OUTPUTS_IMPLEMENTATION

#include <glob.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/outputs.h"
#include "llmc/data/mixture.h"
#include "llmc/data/token_files.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/checkpoint/export.h"
#include "llmc/log/log_files.h"
#include "llmc/setup/options_values.h"
#include "llmc/tokenizer/bpe_files.h"

// Adds a data file, and the index that belongs to a Megatron file.
static void run_outputs_read_data_(Outputs* o, const char* path) {
    outputs_read(o, path);
    if (tokens_is_shard(path)) {
        char index[PATH_MAX];
        file_path(index, "%.*s.idx", (int)(strlen(path) - strlen(".bin")), path);
        outputs_read(o, index);
    }
}

static void run_outputs_read_item_(Outputs* o, const char* item) {
    glob_t files = tokens_list(item);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        run_outputs_read_data_(o, files.gl_pathv[i]);
    }
    globfree(&files);
}

// Adds the files of a list of names and patterns, with or without weights.
static void run_outputs_read_list_(Outputs* o, const char* list) {
    SourceList sources;
    mixture_read_list(&sources, list);
    for (int i = 0; i < sources.count; i++) {
        char *items = strdup(sources.patterns[i]), *next = items, *item;
        CHECK(items, "%s: no memory", list);
        while ((item = tokens_next_item(&next)) != NULL) {
            run_outputs_read_item_(o, item);
        }
        free(items);
    }
    free(sources.text);
}

// Adds the files that the run keeps in --out.
static void run_outputs_add_out_(Outputs* o, const char* out) {
    static const char* const files[] = {LOG_JSON, LOG_TEXT, LOG_CURVE, "tokenizer.json"};
    static const char* const directories[] = {LOG_BOARD, "tokens"};
    char path[PATH_MAX];
    int64_t* steps;
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        file_join(path, out, files[i]);
        outputs_keep(o, path);
    }
    for (size_t i = 0; i < sizeof(directories) / sizeof(directories[0]); i++) {
        file_join(path, out, directories[i]);
        outputs_read(o, path);
    }
    for (int i = checkpoint_steps(out, "", &steps) - 1; i >= 0; i--) {
        checkpoint_path(path, out, steps[i], "");
        outputs_read(o, path);
    }
    free(steps);
}

// Adds the files that an option reads or writes, as its row in the table says.
static void run_outputs_add_(Outputs* o, const Options* options, const OptionRow* row) {
    char buffer[OPTION_TEXT_BYTES];
    const char* path = option_text(options, row, buffer);
    if (row->flags & OPTION_WRITES) {
        outputs_add(o, row->name, path);
    } else if (path[0] && row->flags & OPTION_READS_LIST) {
        run_outputs_read_list_(o, path);
    } else if (path[0] && row->flags & OPTION_READS) {
        outputs_read(o, path);
    }
}

static int run_outputs_are_wanted_(const Options* options) {
    int are_wanted = 0;
    for (int i = 0; i < OPTION_ROWS; i++) {
        are_wanted |= options->given[i] && OPTION_TABLE[i].flags & OPTION_WRITES;
    }
    return are_wanted;
}

void run_outputs_check(const Options* options) {
    Outputs o;
    char path[PATH_MAX];
    if (!run_outputs_are_wanted_(options)) {
        return;
    }
    outputs_open(&o);
    if (options->out[0]) {
        run_outputs_add_out_(&o, options->out);
    }
    if (options->hellaswag) {
        outputs_read(&o, TASKS_HELLASWAG);
    }
    bpe_spare(&o, options->tokenizer);
    for (int i = 0; i < OPTION_ROWS; i++) {
        run_outputs_add_(&o, options, &OPTION_TABLE[i]);
    }
    if (export_tokenizer_path(path, options)) {
        outputs_add(&o, "export-llmc", path);
    }
    outputs_check(&o);
    outputs_close(&o);
}

#endif // RUN_OUTPUTS_IMPLEMENTATION

#endif
