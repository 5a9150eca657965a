/*
run_list.h -- a list of runs, as --report and --compare take it.
*/
#ifndef LLMC_RUN_LIST_H
#define LLMC_RUN_LIST_H

#include <limits.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { RECORD_RUNS = 8 }; // most runs read together

// Splits "RUN,RUN" into paths; \, is a comma in a name. A part that names nothing may be a pattern,
// 'out/lr*', which stands for the runs that match it. Returns the number of runs. Refuses, as the
// value of `option`, a list that is empty, has an empty part, names a run twice, or is too long.
int record_split(char paths[RECORD_RUNS][PATH_MAX], const char* list, const char* option);

#ifdef __cplusplus
}
#endif

#ifdef RUN_LIST_IMPLEMENTATION

#include <glob.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/report/log_reader.h"

// Copies up to the next comma without a backslash. Returns its position, or the end.
static const char* record_part_(char path[PATH_MAX], const char* list, const char* option) {
    size_t used = 0;
    for (; *list && *list != ','; list++) {
        list += list[0] == '\\' && list[1] == ',';
        if (used + 1 >= PATH_MAX) {
            die_usage("--%s: the name of a run is too long", option);
        }
        path[used++] = *list;
    }
    path[used] = '\0';
    return list;
}

// Runs of a list so far.
typedef struct {
    char (*paths)[PATH_MAX];
    int count;
    const char *list, *option;
} RecordList_;

static void record_list_add_(RecordList_* l, const char* path) {
    if (!path[0]) {
        die_usage("--%s is '%s'; wanted runs, with a comma between two", l->option, l->list);
    }
    if (l->count == RECORD_RUNS) {
        die_usage("--%s has more than %d runs; wanted 1 to %d", l->option, RECORD_RUNS, RECORD_RUNS);
    }
    for (int i = 0; i < l->count; i++) {
        if (strcmp(l->paths[i], path) == 0) {
            die_usage("--%s names %s twice", l->option, path);
        }
    }
    snprintf(l->paths[l->count++], PATH_MAX, "%s", path);
}

// True if this is a log, or a directory with one: a pattern also matches other files.
static int record_is_run_(const char* path) {
    char log[PATH_MAX];
    if (record_names_file(path)) {
        return file_ends_in(path, ".jsonl");
    }
    file_join(log, path, "log.jsonl");
    return access(log, F_OK) == 0;
}

static void record_list_add_part_(RecordList_* l, const char* part) {
    glob_t found;
    int runs = 0;
    if (access(part, F_OK) == 0 || !strpbrk(part, "*?[") || glob(part, 0, NULL, &found) != 0) {
        record_list_add_(l, part);
        return;
    }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        if (record_is_run_(found.gl_pathv[i])) {
            record_list_add_(l, found.gl_pathv[i]);
            runs++;
        }
    }
    globfree(&found);
    CHECK(runs > 0, "--%s %s: it matches no run; wanted directories with a log.jsonl", l->option, part);
}

int record_split(char paths[RECORD_RUNS][PATH_MAX], const char* list, const char* option) {
    RecordList_ l = {paths, 0, list, option};
    char part[PATH_MAX];
    for (const char* at = list;; at++) {
        at = record_part_(part, at, option);
        record_list_add_part_(&l, part);
        if (!*at) {
            return l.count;
        }
    }
}

#endif // RUN_LIST_IMPLEMENTATION

#endif
