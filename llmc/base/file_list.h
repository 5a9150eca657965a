/*
file_list.h -- the list of all files that a program reads: those that its options name, and those
that belong to them.

Each format adds the files that belong to one of its own: a shard's index and mask, for example. A
name is listed whether its file exists or not, because the program would read it if it did.
option_files.h makes the list. Outputs are checked against it (outputs.h), and the ranks of a run
compare it (ranks_agree.h).
*/
#ifndef LLMC_FILE_LIST_H
#define LLMC_FILE_LIST_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char* option; // option that names it, without dashes; "": an argument, or no option
    char* path;
    int is_directory; // 1: stands for everything in it, to any depth, even if it is not read
} ListedFile;

typedef struct {
    ListedFile* files; // (count)
    int count;
} FileList;

// Returns an empty list.
static inline FileList file_list_open(void) {
    const FileList none = {0, 0};
    return none;
}

// Adds a file, or a directory with everything in it. `option` must outlive the list.
void file_list_add(FileList* list, const char* option, const char* path);
void file_list_add_directory(FileList* list, const char* option, const char* path);

// Adds the file directory/name.
void file_list_add_in(FileList* list, const char* option, const char* directory, const char* name);

// Returns a checksum of the names, without directories, and of the contents (file_fingerprint) of
// the files that an option names. A file that does not exist also counts. Ends the program if one
// cannot be read.
uint64_t file_list_fingerprint(const FileList* list, const char* option);

void file_list_close(FileList* list);

#ifdef __cplusplus
}
#endif

#ifdef FILE_LIST_IMPLEMENTATION

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"

// Adds a file, unless this option already has it.
static void file_list_append_(FileList* list, const char* option, const char* path, int is_directory) {
    for (int i = 0; i < list->count; i++) {
        if (strcmp(list->files[i].option, option) == 0 && strcmp(list->files[i].path, path) == 0) {
            return;
        }
    }
    const ListedFile file = {option, strdup(path), is_directory};
    CHECK(file.path, "%s: no memory for its name", path);
    list->files = (ListedFile*)check_grow(list->files, (size_t)list->count, sizeof(file), "names of files");
    list->files[list->count++] = file;
}

void file_list_add(FileList* list, const char* option, const char* path) {
    file_list_append_(list, option, path, 0);
}

void file_list_add_directory(FileList* list, const char* option, const char* path) {
    file_list_append_(list, option, path, 1);
}

void file_list_add_in(FileList* list, const char* option, const char* directory, const char* name) {
    char path[PATH_MAX];
    file_join(path, directory, name);
    file_list_add(list, option, path);
}

uint64_t file_list_fingerprint(const FileList* list, const char* option) {
    char error[ERROR_BYTES];
    Xxh64 hash;
    xxh64_open(&hash);
    for (int i = 0; i < list->count; i++) {
        const ListedFile* file = &list->files[i];
        const char* name = file_name_in(file->path);
        uint64_t sum = 0;
        if (file->is_directory || strcmp(file->option, option) != 0) {
            continue;
        }
        CHECK(!file_exists(file->path) || file_fingerprint(file->path, &sum, error), "%s", error);
        xxh64_add(&hash, name, strlen(name) + 1);
        xxh64_add(&hash, &sum, sizeof(sum));
    }
    return xxh64_value(&hash);
}

void file_list_close(FileList* list) {
    for (int i = 0; i < list->count; i++) {
        free(list->files[i].path);
    }
    free(list->files);
    *list = file_list_open();
}

#endif // FILE_LIST_IMPLEMENTATION

#endif
