/*
export.h -- the final model in other programs' formats: the files that --export-llmc and --export-gguf name, with the
tokenizer.

defines: export_check, export_is_wanted, ModelExport, export_open, export_group, export_close
*/
#ifndef LLMC_EXPORT_H
#define LLMC_EXPORT_H

#include "llmc/formats/gguf.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/run/options.h"
#include "llmc/run/run_data.h"
#include "llmc/gpt2.h"

#ifdef __cplusplus
extern "C" {
#endif

// Reports bad names of exports before training.
void export_check(const Options* options);

int export_is_wanted(const Options* options); // whether there is such a file

// A model on its way into these files, a group of parameters (gpt2.h) at a time.
typedef struct {
    const Options* options;
    const RunData* data;
    LlmcBinWriter llmc;
    GgufWriter gguf;
} ModelExport;

void export_open(ModelExport* files, GPT2Config cfg, const Options* options, const RunData* data);

// Writes group g, fp32 in memory that has only this group, laid out by `rows`.
void export_group(ModelExport* files, const TensorRow* rows, int g, const void* group);

// After all groups.
void export_close(ModelExport* files);

#ifdef __cplusplus
}
#endif

#ifdef EXPORT_IMPLEMENTATION

#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/data/sources.h"
#include "llmc/data/tokens.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/tokenizer.h"

// Whether two paths lead to the same file.
static int export_is_same_file_(const char* a, const char* b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// Ends the program if an export would overwrite a file that the run reads: `list` are names and patterns.
static void export_spare_(const char* option, const char* path, const char* list) {
    SourceList sources;
    if (!list[0]) {
        return;
    }
    sources_read_list(&sources, list);
    for (int i = 0; i < sources.count; i++) {
        glob_t files = tokens_list(sources.names[i]);
        for (size_t k = 0; k < files.gl_pathc; k++) {
            if (export_is_same_file_(path, files.gl_pathv[k])) {
                die_usage("%s %s: the run reads this file", option, path);
            }
        }
        globfree(&files);
    }
    free(sources.text);
}

// Ends the program if the file could not be written at the end.
static void export_check_file_(const Options* options, const char* option, const char* path) {
    char directory[PATH_MAX];
    struct stat info;
    if (!path[0]) {
        return;
    }
    file_directory_of(directory, path);
    CHECK(access(directory, W_OK | X_OK) == 0, "%s %s: cannot write into %s: %s", option, path, directory,
          strerror(errno));
    CHECK(stat(path, &info) != 0 || S_ISREG(info.st_mode), "%s %s: %s", option, path,
          S_ISDIR(info.st_mode) ? "a directory, wanted the name of a file" : "not a regular file");
    export_spare_(option, path, options->train_data);
    export_spare_(option, path, options->val_data);
    if (export_is_same_file_(path, options->model) || export_is_same_file_(path, options->tokenizer)) {
        die_usage("%s %s: the run reads this file", option, path);
    }
}

void export_check(const Options* options) {
    const char *llmc = options->export_llmc, *gguf = options->export_gguf;
    if (llmc[0] && (strcmp(llmc, gguf) == 0 || export_is_same_file_(llmc, gguf))) {
        die_usage("--export-llmc %s and --export-gguf %s: the same file", llmc, gguf);
    }
    export_check_file_(options, "--export-llmc", llmc);
    export_check_file_(options, "--export-gguf", gguf);
}

// Beside FILE.bin, a model of llm.c's, writes its tokenizer as FILE_tokenizer.bin, if that format can express
// it.
static void export_tokenizer_(const char* file, const Tokenizer* tokenizer) {
    enum { MAX_BYTES = 255 }; // of a token, in that format
    char path[PATH_MAX];
    const int is_bin = file_ends_in(file, ".bin"), length = (int)strlen(file) - (is_bin ? 4 : 0);
    if (tokenizer_bpe(tokenizer) && tokenizer_longest(tokenizer) <= MAX_BYTES) {
        file_path(path, "%.*s_tokenizer.bin", length, file);
        bpe_write(tokenizer_bpe(tokenizer), path);
        printf("%s: the tokenizer; llm.c's programs expect it as gpt2_tokenizer.bin\n", path);
    }
}

int export_is_wanted(const Options* options) { return options->export_llmc[0] || options->export_gguf[0]; }

// The tokenizer that a GGUF file can have; NULL: none.
static const Bpe* export_bpe_(const RunData* data) {
    return data->has_tokenizer ? tokenizer_bpe(&data->tokenizer) : NULL;
}

void export_open(ModelExport* files, GPT2Config cfg, const Options* options, const RunData* data) {
    files->options = options;
    files->data = data;
    if (options->export_llmc[0]) {
        llmc_bin_create(&files->llmc, options->export_llmc, cfg, (ModelDtype)options->export_dtype);
    }
    if (options->export_gguf[0]) {
        gguf_create(&files->gguf, options->export_gguf, options->out[0] ? options->out : options->export_gguf,
                    cfg, (GgufDtype)options->export_gguf_dtype, export_bpe_(data));
    }
}

void export_group(ModelExport* files, const TensorRow* rows, int g, const void* group) {
    if (files->options->export_llmc[0]) {
        llmc_bin_put(&files->llmc, rows, g, group);
    }
    if (files->options->export_gguf[0]) {
        gguf_put(&files->gguf, rows, g, group);
    }
}

static void export_close_gguf_(ModelExport* files) {
    const RunData* data = files->data;
    gguf_commit(&files->gguf);
    if (!export_bpe_(data)) {
        fprintf(stderr, "warning: %s has no tokenizer (%s): llama.cpp cannot read or print text with it\n",
                files->options->export_gguf,
                !data->has_tokenizer          ? "the data are only token ids"
                : data->tokenizer.decode_only ? "no merges make these tokens"
                                              : "it knows no words");
    }
}

void export_close(ModelExport* files) {
    if (files->options->export_llmc[0]) {
        llmc_bin_commit(&files->llmc);
        if (files->data->has_tokenizer) {
            export_tokenizer_(files->options->export_llmc, &files->data->tokenizer);
        }
    }
    if (files->options->export_gguf[0]) {
        export_close_gguf_(files);
    }
}

#endif // EXPORT_IMPLEMENTATION

#endif
