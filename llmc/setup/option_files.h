/*
option_files.h -- the files that an option reads: its row in the table says what its value names
(OptionFiles), and the format of that says which files belong to it.
*/
#ifndef LLMC_OPTION_FILES_H
#define LLMC_OPTION_FILES_H

#include "llmc/base/file_list.h"
#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// Adds the files that an option with this value reads, if it reads any; but callers add the files
// of runs (FILES_RUNS).
void option_list_files(FileList* files, const OptionRow* row, const char* value);

#ifdef __cplusplus
}
#endif

#ifdef OPTION_FILES_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/file.h"
#include "llmc/data/mixture.h"
#include "llmc/data/token_files.h"
#include "llmc/formats/hf_adapter.h"
#include "llmc/formats/hf_model.h"
#include "llmc/tokenizer/bpe_files.h"

void option_list_files(FileList* files, const OptionRow* row, const char* value) {
    if (!(row->flags & OPTION_READS) || !value[0]) {
        return;
    }
    if (file_is_directory(value) && option_files(row) == FILES_MODEL) {
        file_list_add_directory(files, row->name, value);
    }
    switch (option_files(row)) {
    case FILES_ONE:
        file_list_add(files, row->name, value);
        break;
    case FILES_PATTERNS:
        tokens_list_files(files, row->name, value);
        break;
    case FILES_DATA:
        mixture_list_files(files, row->name, value);
        break;
    case FILES_TOKENIZER:
        bpe_list_files(files, row->name, value);
        break;
    case FILES_MODEL:
        hf_model_list_files(files, row->name, value);
        break;
    case FILES_ADAPTER:
        hf_adapter_list_files(files, row->name, value);
        break;
    case FILES_NONE:
    case FILES_RUNS:
    case FILES_PREFIX:
    case FILES_SCRATCH:
        break;
    }
}

#endif // OPTION_FILES_IMPLEMENTATION

#endif
