/*
stop_request.h -- asks the process that writes in a directory to save and end: --stop-run.

    DIR/run.lock   names the process, "host, pid 123" (lock.h)
    DIR/run.stop   has the same name: this process should end

A file, unlike a signal, reaches a process on any machine that shares the directory. A request for
another process is a leftover, and ignored.
*/
#ifndef LLMC_STOP_REQUEST_H
#define LLMC_STOP_REQUEST_H

#include "llmc/base/lock.h"

#ifdef __cplusplus
extern "C" {
#endif

#define STOP_REQUEST_LOCK "run.lock"

// True for the names of these two files.
int stop_request_owns(const char* name);

// Asks the process `holder`, which has the lock of the directory.
void stop_request_write(const char* directory, const char holder[LOCK_NAME_BYTES]);

// Returns true if someone has asked this process to end.
int stop_request_is_there(const char* directory);

// Removes a request, or whatever has its name but a directory with files. Returns true if none is
// left.
int stop_request_remove(const char* directory);

#ifdef __cplusplus
}
#endif

#ifdef STOP_REQUEST_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

#define STOP_REQUEST_FILE_ "run.stop"

int stop_request_owns(const char* name) {
    return strcmp(name, STOP_REQUEST_LOCK) == 0 || strcmp(name, STOP_REQUEST_FILE_) == 0;
}

static void stop_request_path_(char path[PATH_MAX], const char* directory) {
    file_join(path, directory, STOP_REQUEST_FILE_);
}

void stop_request_write(const char* directory, const char holder[LOCK_NAME_BYTES]) {
    char path[PATH_MAX];
    stop_request_path_(path, directory);
    file_write_text(path, holder, strlen(holder));
}

int stop_request_is_there(const char* directory) {
    char path[PATH_MAX], name[LOCK_NAME_BYTES], error[ERROR_BYTES], *text;
    size_t bytes;
    stop_request_path_(path, directory);
    if (access(path, F_OK) != 0 || !file_try_read(path, LOCK_NAME_BYTES, &text, &bytes, error)) {
        return 0;
    }
    lock_name(name);
    const int is_mine = strcmp(text, name) == 0;
    free(text);
    return is_mine;
}

int stop_request_remove(const char* directory) {
    char path[PATH_MAX];
    stop_request_path_(path, directory);
    return remove(path) == 0 || errno == ENOENT;
}

#endif // STOP_REQUEST_IMPLEMENTATION

#endif
