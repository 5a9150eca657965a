/*
outputs.h -- checks the output files that a command line names, before any work: the program opens
none for writing until all can be written and none would destroy something.

An output is a new file, or replaces a regular one. It is refused if it is a link, a directory, a
device or a FIFO; if its directory is not writable; if another output has the same name; and if the
run reads it: a file, or any file in a directory (a model's or a run's) or one level below it. In
such a directory, earlier outputs may be replaced: files that end in .gguf, .html or .jsonl, except
for the logs of runs.

file.h writes the outputs, each as .part beside its final name.
*/
#ifndef LLMC_OUTPUTS_H
#define LLMC_OUTPUTS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char* option; // option that asks for it, "out-texts"; NULL if none
    char* path;
} OutputFile_;

typedef struct {
    char** reads;       // (num_reads) files and directories of files
    OutputFile_* files; // (num_files)
    int num_reads, num_files;
} Outputs;

void outputs_open(Outputs* o);

// Registers a file that the run reads, or a directory of such files. Ignored if it does not exist.
void outputs_read(Outputs* o, const char* path);

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

#include <dirent.h>
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

enum { OUTPUTS_DEPTH_ = 1 }; // levels below a directory that are searched: a run's checkpoints

void outputs_open(Outputs* o) { memset(o, 0, sizeof(*o)); }

static char* outputs_copy_(const char* path) {
    char* copy = strdup(path);
    CHECK(copy, "%s: no memory for its name", path);
    return copy;
}

void outputs_read(Outputs* o, const char* path) {
    o->reads = (char**)check_grow(o->reads, (size_t)o->num_reads, sizeof(char*), "names of files");
    o->reads[o->num_reads++] = outputs_copy_(path);
}

static void outputs_append_(Outputs* o, const char* option, const char* path) {
    const OutputFile_ file = {option, outputs_copy_(path)};
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
    for (int i = 0; i < o->num_reads; i++) {
        free(o->reads[i]);
    }
    for (int i = 0; i < o->num_files; i++) {
        free(o->files[i].path);
    }
    free(o->reads);
    free(o->files);
}

// ---- checks ----

static int outputs_is_same_(const struct stat* a, const struct stat* b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

// True if `path` is this file, or a directory that has it at most `depth` levels below.
static int outputs_holds_(const char* path, const struct stat* file, int depth) {
    char inside[PATH_MAX];
    struct stat there;
    struct dirent* entry;
    if (stat(path, &there) != 0) {
        return 0;
    }
    if (!S_ISDIR(there.st_mode) || depth < 0) {
        return outputs_is_same_(&there, file);
    }
    int found = 0;
    DIR* entries = opendir(path);
    while (entries && !found && (entry = readdir(entries))) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            file_join(inside, path, entry->d_name);
            found = outputs_holds_(inside, file, depth - 1);
        }
    }
    if (entries) {
        closedir(entries);
    }
    return found;
}

// True if this file, in the directory of a model or a run, is an earlier output.
static int outputs_is_output_(const char* path) {
    return file_ends_in(path, ".gguf") || file_ends_in(path, ".html") ||
           (file_ends_in(path, ".jsonl") && strncmp(file_name_in(path), "log.", 4) != 0);
}

// Ends the program if the run reads this file, which exists.
static void outputs_check_reads_(const Outputs* o, const OutputFile_* file, const struct stat* info) {
    for (int i = 0; i < o->num_reads; i++) {
        const int is_directory = file_is_directory(o->reads[i]);
        if ((is_directory && outputs_is_output_(file->path)) ||
            !outputs_holds_(o->reads[i], info, OUTPUTS_DEPTH_)) {
            continue;
        }
        if (is_directory) {
            die_usage("--%s %s: a file of %s, which the run reads; wanted another name", file->option,
                      file->path, o->reads[i]);
        }
        die_usage("--%s %s: the run reads this file; wanted another name", file->option, file->path);
    }
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
