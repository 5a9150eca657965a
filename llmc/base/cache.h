/*
cache.h -- files with measurements that programs keep between runs for this user.

    ${XDG_CACHE_HOME:-$HOME/.cache}/pretrain.c/<kind>-<hash of the machine>.json
*/
#ifndef LLMC_CACHE_H
#define LLMC_CACHE_H

#include <limits.h>

#ifdef __cplusplus
extern "C" {
#endif

// Sets path to the file of a kind for a machine. Returns 0 if the environment has no place for a
// cache.
int cache_path(char path[PATH_MAX], const char* kind, const char* machine);

// Makes the directory of a file of the cache, and opens it. Returns -1 with errno if it cannot.
int cache_open_directory(char directory[PATH_MAX], const char* path);

#ifdef __cplusplus
}
#endif

#ifdef CACHE_IMPLEMENTATION

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"

int cache_path(char path[PATH_MAX], const char* kind, const char* machine) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const int has_cache = cache && cache[0] == '/'; // the standard says to ignore other paths
    if (!has_cache && !(home && home[0] == '/')) {
        return 0;
    }
    const int length =
        snprintf(path, PATH_MAX, "%s%s/pretrain.c/%s-%016" PRIx64 ".json", has_cache ? cache : home,
                 has_cache ? "" : "/.cache", kind, xxh64(machine, strlen(machine)));
    return length < PATH_MAX;
}

int cache_open_directory(char directory[PATH_MAX], const char* path) {
    char parent[PATH_MAX];
    file_directory_of(directory, path);
    file_directory_of(parent, directory);
    (void)mkdir(parent, 0777); // an error, unless they exist already, shows below
    (void)mkdir(directory, 0777);
    return open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

#endif // CACHE_IMPLEMENTATION

#endif
