/*
outputs.h -- checks the output files that a command line names, before any work: the program opens
none for writing until all can be written and none would destroy something.

An output is a new file, or replaces a regular one. It is refused if it is a link, a directory, a
device or a FIFO; if its directory is not writable; if another output has the same name; if the run
reads it, or would read a file of this name; and if it is below a directory that the run reads (a
model's or a run's). There, earlier outputs that the run does not read may be replaced: files that
end in .gguf, .html or .jsonl, except for the logs of runs.

file.h writes the outputs, each as .part beside its final name.
*/
#ifndef LLMC_OUTPUTS_H
#define LLMC_OUTPUTS_H

#include "llmc/base/file_list.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char* option; // option that asks for it, "out-texts"; NULL if none
    char* path;
} OutputFile_;

typedef struct {
    FileList reads;     // files that the run reads; the caller adds them
    OutputFile_* files; // (num_files)
    int num_files;
} Outputs;

void outputs_open(Outputs* o);

// Registers a file that the run always writes, so no option may name it.
void outputs_keep(Outputs* o, const char* path);

// Registers a file that an option (without dashes) names; "" is none. `option` must stay valid.
void outputs_add(Outputs* o, const char* option, const char* path);

// Ends the program if one of the files must not or cannot be written.
void outputs_check(const Outputs* o);

void outputs_close(Outputs* o);

#ifdef __cplusplus
}
#endif

#ifdef OUTPUTS_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

void outputs_open(Outputs* o) { memset(o, 0, sizeof(*o)); }

static void outputs_append_(Outputs* o, const char* option, const char* path) {
    const OutputFile_ file = {option, strdup(path)};
    CHECK(file.path, "%s: no memory for its name", path);
    o->files = (OutputFile_*)check_grow(o->files, (size_t)o->num_files, sizeof(file), "names of files");
    o->files[o->num_files++] = file;
}

void outputs_keep(Outputs* o, const char* path) { outputs_append_(o, NULL, path); }

void outputs_add(Outputs* o, const char* option, const char* path) {
    if (path[0]) {
        outputs_append_(o, option, path);
    }
}

void outputs_close(Outputs* o) {
    for (int i = 0; i < o->num_files; i++) {
        free(o->files[i].path);
    }
    file_list_close(&o->reads);
    free(o->files);
}

// ---- checks ----

static int outputs_is_same_(const struct stat* a, const struct stat* b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

// True if this file, in the directory of a model or a run, is an earlier output.
static int outputs_is_output_(const char* path) {
    return file_ends_in(path, ".gguf") || file_ends_in(path, ".html") ||
           (file_ends_in(path, ".jsonl") && strncmp(file_name_in(path), "log.", 4) != 0);
}

// True if both paths name the same place; the files need not exist.
static int outputs_is_same_place_(const char* a, const char* b) {
    char directory[PATH_MAX];
    struct stat x, y;
    file_directory_of(directory, a);
    const int is_a = stat(directory, &x) == 0;
    file_directory_of(directory, b);
    return is_a && stat(directory, &y) == 0 && outputs_is_same_(&x, &y) &&
           strcmp(file_name_in(a), file_name_in(b)) == 0;
}

// True if a directory holds this file, to any depth.
static int outputs_is_below_(const char* path, const char* directory) {
    char parent[PATH_MAX], inside[PATH_MAX], outside[PATH_MAX];
    file_directory_of(parent, path);
    const int are_there = realpath(parent, inside) && realpath(directory, outside);
    const size_t length = are_there ? strlen(outside) : 0;
    return are_there && strncmp(inside, outside, length) == 0 &&
           (!inside[length] || inside[length] == '/' || length == 1);
}

// True if a path is this file, which exists if `info` is not NULL.
static int outputs_is_file_(const char* path, const char* file, const struct stat* info) {
    struct stat there;
    return outputs_is_same_place_(path, file) ||
           (info && stat(path, &there) == 0 && outputs_is_same_(&there, info));
}

// Ends the program if the run reads this file, or would read one of its name. `info` is NULL if it
// does not exist.
static void outputs_check_reads_(const Outputs* o, const OutputFile_* file, const struct stat* info) {
    for (int i = 0; i < o->reads.count; i++) {
        const ListedFile* read = &o->reads.files[i];
        if (read->is_directory && info && !outputs_is_output_(file->path) &&
            outputs_is_below_(file->path, read->path)) {
            die_usage("--%s %s: a file of %s, which the run reads; wanted another name", file->option,
                      file->path, read->path);
        }
    }
    for (int i = 0; i < o->reads.count; i++) {
        const ListedFile* read = &o->reads.files[i];
        if (!read->is_directory && outputs_is_file_(read->path, file->path, info)) {
            die_usage("--%s %s: the run %s; wanted another name", file->option, file->path,
                      info ? "reads this file" : "looks for a file of this name");
        }
    }
}

// Ends the program if output i has the place of an earlier one.
static void outputs_check_place_(const Outputs* o, int i) {
    const OutputFile_* file = &o->files[i];
    for (int k = 0; k < i; k++) {
        const OutputFile_* other = &o->files[k];
        if (outputs_is_same_place_(other->path, file->path)) {
            die_usage(other->option ? "--%s %s: the same file as --%s %s; wanted another name"
                                    : "--%s %s: the run writes this file itself; wanted another name",
                      file->option, file->path, other->option, other->path);
        }
    }
}

// Ends the program if the file cannot be written.
static void outputs_check_file_(const Outputs* o, const OutputFile_* file) {
    char directory[PATH_MAX];
    struct stat info;
    file_directory_of(directory, file->path);
    CHECK(access(directory, W_OK | X_OK) == 0, "--%s %s: cannot write into %s: %s", file->option, file->path,
          directory, strerror(errno));
    if (lstat(file->path, &info) != 0) {
        CHECK(errno == ENOENT, "--%s %s: cannot read its attributes: %s", file->option, file->path,
              strerror(errno));
        outputs_check_reads_(o, file, NULL);
        return;
    }
    CHECK(S_ISREG(info.st_mode), "--%s %s: %s, wanted a file or a new name", file->option, file->path,
          S_ISDIR(info.st_mode)   ? "a directory"
          : S_ISLNK(info.st_mode) ? "a symbolic link"
                                  : "not a regular file");
    outputs_check_reads_(o, file, &info);
}

void outputs_check(const Outputs* o) {
    for (int i = 0; i < o->num_files; i++) {
        if (o->files[i].option) {
            outputs_check_place_(o, i);
            outputs_check_file_(o, &o->files[i]);
        }
    }
}

#endif // OUTPUTS_IMPLEMENTATION

#endif
