/*
file.h -- files that are whole or not there: written beside their place, flushed to the disk, then renamed
into it.

A full disk, a missing directory or any other failure removes the unfinished file and ends the program with
one error that names the file; what stood under the name before is untouched.

Small files are read as a whole.

needs:   check.h
defines: file_join, FileWriter, file_open, file_put, file_commit, file_directory_of, file_sync_directory,
file_make_directory, file_write_text, file_try_read
*/
#ifndef LLMC_FILE_H
#define LLMC_FILE_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

// Sets path to that of a name in a directory.
static inline void file_join(char path[PATH_MAX], const char* directory, const char* name) {
    CHECK(snprintf(path, PATH_MAX, "%s/%s", directory, name) < PATH_MAX, "%s: the name is too long",
          directory);
}

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

// The directory that holds `path`.
static inline void file_directory_of(char directory[PATH_MAX], const char* path) {
    const char* slash = strrchr(path, '/');
    const int length = !slash ? 0 : slash == path ? 1 : (int)(slash - path);
    snprintf(directory, PATH_MAX, "%.*s", slash ? length : 1, slash ? path : ".");
}

// The names in the directory that holds `path` reach the disk: a rename is not lasting before that.
static inline void file_sync_directory(const char* path) {
    char directory[PATH_MAX];
    file_directory_of(directory, path);
    const int fd = open(directory, O_RDONLY);
    CHECK(fd >= 0, "%s: cannot open: %s", directory, strerror(errno));
    const int failed = fsync(fd) != 0 && errno != EINVAL; // EINVAL: a file system that has nothing to flush
    CHECK(!failed, "%s: cannot flush to disk: %s", directory, strerror(errno));
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

// A whole file of text.
static inline void file_write_text(const char* path, const char* text, size_t bytes) {
    FileWriter writer;
    file_open(&writer, path);
    file_put(&writer, text, bytes);
    file_commit(&writer);
}

// Sets *text to what the file holds and a zero, *bytes to its length; the caller frees it. Returns 0 with the
// reason in `error` if it cannot be read, or is longer than `most`.
static inline int file_try_read(const char* path, size_t most, char** text, size_t* bytes, char* error) {
    FILE* file = fopen(path, "rb");
    size_t room = 4096, used = 0;
    *text = NULL;
    *bytes = 0;
    if (!file) {
        return error_set(error, path, "cannot read: %s", strerror(errno));
    }
    char* buffer = (char*)check_alloc(room, 1, path);
    for (size_t got = 1; got > 0 && used <= most;) {
        got = fread(buffer + used, 1, room - used - 1, file);
        used += got;
        if (used + 1 == room) {
            buffer = (char*)realloc(buffer, room *= 2);
            CHECK(buffer, "%s: no memory for %zu bytes", path, room);
        }
    }
    const int reason = ferror(file) ? errno : used > most ? EFBIG : 0;
    fclose(file);
    if (reason) {
        free(buffer);
        return error_set(error, path, "cannot read: %s", strerror(reason));
    }
    buffer[used] = '\0';
    *text = buffer;
    *bytes = used;
    return 1;
}

#endif
