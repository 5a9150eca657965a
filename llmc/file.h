/*
file.h -- files that are whole or not there: written beside their place, flushed to the disk, then renamed
into it.

A full disk, a missing directory or any other failure removes the unfinished file and ends the program with
one error that names the file; what stood under the name before is untouched.

needs:   check.h
defines: FileWriter, file_open, file_put, file_commit, file_sync_directory, file_make_directory
*/
#ifndef LLMC_FILE_H
#define LLMC_FILE_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

typedef struct {
    FILE* file;
    char path[PATH_MAX], temporary[PATH_MAX]; // the file's name, and where it is written until it is whole
} FileWriter;

// Removes what was written and reports errno.
static inline void file_fail_(FileWriter* writer, const char* doing) {
    const int reason = errno;
    if (writer->file) {
        fclose(writer->file);
    }
    unlink(writer->temporary);
    CHECK(0, "%s: cannot %s: %s", writer->path, doing, strerror(reason));
}

// Starts the file `path`.
static inline void file_open(FileWriter* writer, const char* path) {
    const int length = snprintf(writer->path, sizeof(writer->path), "%s", path);
    const int total = snprintf(writer->temporary, sizeof(writer->temporary), "%s.part", path);
    CHECK(length < (int)sizeof(writer->path) && total < (int)sizeof(writer->temporary),
          "%s: the name is too long", path);
    writer->file = fopen(writer->temporary, "wb");
    if (!writer->file) {
        file_fail_(writer, "write");
    }
}

static inline void file_put(FileWriter* writer, const void* data, size_t bytes) {
    if (bytes && fwrite(data, 1, bytes, writer->file) != bytes) {
        file_fail_(writer, "write");
    }
}

// The names in the directory that holds `path` reach the disk: a rename is not lasting before that.
static inline void file_sync_directory(const char* path) {
    char directory[PATH_MAX];
    snprintf(directory, sizeof(directory), "%s", path);
    char* slash = strrchr(directory, '/');
    if (slash) {
        slash[slash == directory ? 1 : 0] = '\0';
    }
    const int fd = open(slash ? directory : ".", O_RDONLY);
    CHECK(fd >= 0, "%s: cannot open: %s", slash ? directory : ".", strerror(errno));
    const int failed = fsync(fd) != 0 && errno != EINVAL; // EINVAL: a file system that has nothing to flush
    CHECK(!failed, "%s: cannot flush to disk: %s", slash ? directory : ".", strerror(errno));
    close(fd);
}

// The file is whole: on the disk, and under its name.
static inline void file_commit(FileWriter* writer) {
    // an error of the stream: of a printf before, which nobody looked at
    if (fflush(writer->file) != 0 || ferror(writer->file) || fsync(fileno(writer->file)) != 0) {
        file_fail_(writer, "write");
    }
    const int failed = fclose(writer->file) != 0;
    writer->file = NULL;
    if (failed || rename(writer->temporary, writer->path) != 0) {
        file_fail_(writer, "write");
    }
    file_sync_directory(writer->path);
}

// Makes a directory and its parents. What is no directory shows when the files in it are opened.
static inline void file_make_directory(const char* path) {
    char prefix[1024];
    const size_t length = strlen(path);
    CHECK(length < sizeof(prefix) - 32, "%s: the path is longer than %zu bytes", path, sizeof(prefix) - 32);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] == '/' || path[i] == '\0') {
            memcpy(prefix, path, i);
            prefix[i] = '\0';
            CHECK(mkdir(prefix, 0777) == 0 || errno == EEXIST, "%s: cannot make the directory: %s", prefix,
                  strerror(errno));
        }
    }
}

#endif
