/*
export.h -- writes the final model for llm.c and llama.cpp (--export-llmc, --export-gguf).
*/
#ifndef LLMC_EXPORT_H
#define LLMC_EXPORT_H

#include <limits.h>
#include <stdio.h>

#include "llmc/formats/gguf.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_tokens.h"
#include "llmc/model/config.h"

#ifdef __cplusplus
extern "C" {
#endif

// Prints which files will be written, if any.
void export_print(FILE* screen, const Options* options);

// A model that is being written to these files, one group of parameters (model.h) at a time.
typedef struct {
    const Options* options;
    const RunData* data;
    LlmcBinWriter llmc;
    GgufWriter gguf;
} ModelExport;

void export_open(ModelExport* files, ModelConfig cfg, const Options* options, const RunData* data);

// Writes group g: fp32, in memory that has only this group, laid out by `rows`.
void export_group(ModelExport* files, const TensorRow* rows, int g, const void* group);

// Completes the files after all groups, and prints the name of each.
void export_close(ModelExport* files);

#ifdef __cplusplus
}
#endif

#ifdef EXPORT_IMPLEMENTATION

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/printable.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_gguf.h"
#include "llmc/tokenizer/tokenizer.h"

void export_print(FILE* screen, const Options* options) {
    const char *llmc = options->output.export_llmc, *gguf = options->output.export_gguf;
    if (llmc[0]) {
        printable_line(screen, "export: %s", llmc);
    }
    if (gguf[0]) {
        printable_line(screen, "export: %s", gguf);
    }
}

// Returns the tokenizer for a GGUF file; NULL: none.
static const Bpe* export_bpe_(const RunData* data) {
    const Bpe* bpe = data->has_tokenizer ? tokenizer_bpe(&data->tokenizer) : NULL;
    return bpe && bpe_gguf_pre(bpe) ? bpe : NULL;
}

void export_open(ModelExport* files, ModelConfig cfg, const Options* options, const RunData* data) {
    files->options = options;
    files->data = data;
    if (options->output.export_llmc[0]) {
        llmc_bin_create(&files->llmc, options->output.export_llmc, cfg,
                        (ModelDtype)options->output.export_dtype);
    }
    if (options->output.export_gguf[0]) {
        const GgufModel model = {options->output.dir[0] ? options->output.dir : options->output.export_gguf,
                                 cfg,
                                 (GgufDtype)options->output.export_gguf_dtype,
                                 export_bpe_(data),
                                 run_data_card(data, cfg.V),
                                 options->samples.start_token ? GGUF_START_TOKEN : GGUF_NO_START_TOKEN};
        gguf_create(&files->gguf, options->output.export_gguf, &model);
    }
}

void export_group(ModelExport* files, const TensorRow* rows, int g, const void* group) {
    if (files->options->output.export_llmc[0]) {
        llmc_bin_put(&files->llmc, rows, g, group);
    }
    if (files->options->output.export_gguf[0]) {
        gguf_put(&files->gguf, rows, g, group);
    }
}

static void export_print_written_(const char* path) {
    struct stat info;
    CHECK(stat(path, &info) == 0, "%s: cannot be read after it was written: %s", path, strerror(errno));
    printable_line(stdout, "wrote %s (%.1f MiB)", path, (double)info.st_size / (1 << 20));
}

static void export_close_gguf_(ModelExport* files) {
    const RunData* data = files->data;
    gguf_commit(&files->gguf);
    export_print_written_(files->options->output.export_gguf);
    if (!export_bpe_(data)) {
        printable_line(stderr,
                       "warning: %s has no tokenizer (%s): llama.cpp cannot read or print text with it",
                       files->options->output.export_gguf,
                       !data->has_tokenizer && !run_data_has_tokens(data)
                           ? "none is beside the model; --tokenizer names one"
                       : !data->has_tokenizer            ? "the data are only token ids"
                       : tokenizer_bpe(&data->tokenizer) ? "llama.cpp splits no text as it does"
                                                         : "it knows no words");
    }
}

void export_close(ModelExport* files) {
    if (files->options->output.export_llmc[0]) {
        llmc_bin_commit(&files->llmc);
        export_print_written_(files->options->output.export_llmc);
    }
    if (files->options->output.export_gguf[0]) {
        export_close_gguf_(files);
    }
}

#endif // EXPORT_IMPLEMENTATION

#endif
