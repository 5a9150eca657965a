/*
ranks_agree.h -- refuses to start if ranks differ in their program, options, model or data.

Ranks that differ would each train another model. All functions are collective. If the ranks
disagree, they end all of them, and name what differs and the ranks that have each value.
*/
#ifndef LLMC_RANKS_AGREE_H
#define LLMC_RANKS_AGREE_H

#include "llmc/base/file_list.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_tokens.h"
#include "llmc/comm/comm.h"
#include "llmc/model/config.h"

#ifdef __cplusplus
extern "C" {
#endif

// Compares the program's file, and results of the mathematics library.
void ranks_agree_on_program(Comm* comm);

// Compares all options as given, except those that each rank may choose. Call it before others that
// are collective: the options decide which of them follow.
void ranks_agree_on_command(Comm* comm, const Options* options);

// Compares the decided options, the sizes of the model, and the training and validation data; after
// settle().
void ranks_agree_on_run(Comm* comm, const Options* options, ModelConfig cfg, const RunData* data);

// Compares all other files that the run reads: a local disk of one machine may hold an older copy.
void ranks_agree_on_files(Comm* comm, const FileList* files);

// Checks that all ranks see the file that rank 0 writes into a directory.
void ranks_agree_on_directory(Comm* comm, const char* option, const char* directory);

#ifdef __cplusplus
}
#endif

#ifdef RANKS_AGREE_IMPLEMENTATION

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"
#include "llmc/setup/options_values.h"

static void ranks_agree_on_checksum_(Comm* comm, const char* what, uint64_t checksum) {
    char words[32];
    snprintf(words, sizeof(words), "%016llx", (unsigned long long)checksum);
    comm_agree(comm, what, checksum, words);
}

static void ranks_agree_on_count_(Comm* comm, const char* what, size_t count) {
    char words[32];
    snprintf(words, sizeof(words), "%zu", count);
    comm_agree(comm, what, count, words);
}

// Returns a hash of some results: other versions of the mathematics library round differently.
static uint64_t agree_mathematics_(void) {
    double results[96];
    for (int i = 0; i < 32; i++) {
        volatile double x = 0.37 + 1.618 * i; // the compiler cannot know the result
        results[3 * i] = pow(0.95, x);
        results[3 * i + 1] = exp(-x);
        results[3 * i + 2] = cos(x);
    }
    return xxh64(results, sizeof(results));
}

void ranks_agree_on_program(Comm* comm) {
    uint64_t checksum = 0;
    char error[ERROR_BYTES];
    if (comm->size == 1) {
        return;
    }
    if (!file_checksum("/proc/self/exe", &checksum, error)) {
        checksum = 0; // a program that cannot be read is not compared
    }
    ranks_agree_on_checksum_(comm, "the program (checksum)", checksum);
    ranks_agree_on_checksum_(comm, "results of the mathematics library (checksum)", agree_mathematics_());
}

// Returns true if all ranks have the same hash.
static int agree_is_same_(Comm* comm, uint64_t hash) {
    uint64_t* all = (uint64_t*)check_alloc((size_t)comm->size, sizeof(hash), "hashes");
    int is_same = 1;
    comm_all_gather(comm, all, &hash, sizeof(hash));
    for (int r = 1; r < comm->size; r++) {
        is_same = is_same && all[r] == all[0];
    }
    free(all);
    return is_same;
}

static uint64_t agree_hash_of_(const char* value) { return xxh64(value, strlen(value)); }

// Compares all options by one message. Only if they differ, compares them row by row.
static void ranks_agree_on_options_(Comm* comm, const Options* options) {
    char text[OPTION_TEXT_BYTES], name[OPTION_NAME_BYTES + 2];
    uint64_t hashes[OPTION_ROWS_MAX] = {0};
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const int is_compared = option_applies(options, row) && !(row->flags & OPTION_EACH);
        hashes[i] = is_compared ? agree_hash_of_(option_text(options, row, text)) : 0;
    }
    if (agree_is_same_(comm, xxh64(hashes, sizeof(hashes)))) {
        return;
    }
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char* value = option_text(options, &OPTION_TABLE[i], text);
        snprintf(name, sizeof(name), "--%s", OPTION_TABLE[i].name);
        comm_agree(comm, name, hashes[i], *value ? value : "''");
    }
}

void ranks_agree_on_command(Comm* comm, const Options* options) {
    if (comm->size > 1) {
        ranks_agree_on_options_(comm, options);
    }
}

void ranks_agree_on_files(Comm* comm, const FileList* files) {
    uint64_t sums[OPTION_ROWS_MAX] = {0};
    char what[OPTION_NAME_BYTES + 64];
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const int is_data = strcmp(row->group, "data") == 0 && option_files(row) == FILES_DATA;
        sums[i] = is_data || row->flags & OPTION_EACH ? 0 : file_list_fingerprint(files, row->name);
    }
    if (agree_is_same_(comm, xxh64(sums, sizeof(sums)))) {
        return;
    }
    for (int i = 0; i < OPTION_ROWS; i++) {
        snprintf(what, sizeof(what), "the files of --%s (checksum)", OPTION_TABLE[i].name);
        ranks_agree_on_checksum_(comm, what, sums[i]);
    }
}

void ranks_agree_on_run(Comm* comm, const Options* options, ModelConfig cfg, const RunData* data) {
    if (comm->size == 1) {
        return;
    }
    ranks_agree_on_options_(comm, options);
    ranks_agree_on_checksum_(comm, "the sizes of the model (checksum)", xxh64(&cfg, sizeof(cfg)));
    ranks_agree_on_count_(comm, "the number of training tokens", data->train.tokens);
    ranks_agree_on_checksum_(comm, "the training data (checksum)", data->train.fingerprint);
    ranks_agree_on_checksum_(comm, "the order of the training data (checksum)",
                             mixture_checksum(&data->train));
    ranks_agree_on_count_(comm, "the number of validation tokens", data->val.tokens);
    ranks_agree_on_checksum_(comm, "the validation data (checksum)", data->val.fingerprint);
}

// Uses a new file name each time, because network file systems cache that a file is missing.
void ranks_agree_on_directory(Comm* comm, const char* option, const char* directory) {
    char path[PATH_MAX], what[96];
    int64_t number = (int64_t)(1e6 * time_unix_s());
    if (comm->size == 1) {
        return;
    }
    comm_broadcast(comm, &number, sizeof(number));
    file_path(path, "%s/.probe_%" PRId64, directory, number);
    if (comm->rank == 0) {
        file_write_text(path, "", 0);
    }
    comm_barrier(comm);
    const int is_there = access(path, F_OK) == 0, is_missing = comm_any(comm, !is_there);
    if (comm->rank == 0) {
        unlink(path);
    }
    snprintf(what, sizeof(what), "%s, a directory that all machines have to share: a file of rank 0", option);
    if (is_missing) {
        comm_agree(comm, what, (uint64_t)is_there, is_there ? "is there" : "is missing");
    }
}

#endif // RANKS_AGREE_IMPLEMENTATION

#endif
