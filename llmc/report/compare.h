/*
compare.h -- --compare RUN,RUN,...: runs side by side, on the terminal.

    each run's results (summary.h), a column per run, the best run first
    each run's best validation, and the tokens and time that the others took to reach it
    the options that differ

Reads the logs and nothing else.
*/
#ifndef LLMC_COMPARE_H
#define LLMC_COMPARE_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Prints the comparison of "RUN,RUN,...", two runs or more, patterns too (record_split). Ends the
// program if one cannot be read.
void compare_runs(FILE* file, const char* runs);

#ifdef __cplusplus
}
#endif

#ifdef COMPARE_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/printable.h"
#include "llmc/report/summary.h"
#include "llmc/report/log_reader.h"
#include "llmc/report/run_list.h"

enum { COMPARE_CELL_ = 72, COMPARE_ROWS_ = FACTS_OPTIONS + 64 };

typedef struct {
    char name[COMPARE_CELL_], cells[RECORD_RUNS][COMPARE_CELL_];
} CompareRow_;

typedef struct {
    Record runs[RECORD_RUNS];
    int count;
    RecordValue measure; // measure of the comparison
    int are_comparable;  // the runs have a measure in common
    char note[FACT_BYTES];
    CompareRow_ rows[COMPARE_ROWS_];
    int num_rows;
} Compare_;

// True if the byte continues a character.
static int compare_continues_(char byte) { return ((unsigned char)byte & 0xC0) == 0x80; }

// Sets a cell to words; cuts their end if they are too long.
static void compare_set_(char cell[COMPARE_CELL_], const char* text) {
    enum { LONGEST = 64 };
    size_t kept = strlen(text) > LONGEST ? LONGEST - 3 : strlen(text);
    while (text[kept] && compare_continues_(text[kept])) {
        kept--;
    }
    snprintf(cell, COMPARE_CELL_, "%.*s%s", (int)kept, text, text[kept] ? "..." : "");
    printable(cell);
}

// Sets a cell to the name of a run or the value of an option, possibly a path; cuts its start if it
// is too long.
static void compare_set_name_(char cell[COMPARE_CELL_], const char* text) {
    enum { LONGEST = 40 };
    const size_t length = strlen(text);
    size_t cut = length > LONGEST ? length - LONGEST + 3 : 0;
    while (compare_continues_(text[cut])) {
        cut++;
    }
    snprintf(cell, COMPARE_CELL_, "%s%s", cut ? "..." : "", text + cut);
    printable(cell);
}

static CompareRow_* compare_add_(Compare_* c, const char* name) {
    CompareRow_* row = &c->rows[c->num_rows++];
    compare_set_(row->name, name);
    return row;
}

static void compare_facts_(Compare_* c) {
    for (int i = 0; i < FACTS_COUNT; i++) {
        if (!facts_are_told(&FACTS[i], c->runs, c->count)) {
            continue;
        }
        CompareRow_* row = compare_add_(c, FACTS[i].name);
        for (int k = 0; k < c->count; k++) {
            char text[FACT_BYTES] = "";
            FACTS[i].tell(text, &c->runs[k]);
            compare_set_(row->cells[k], text[0] ? text : "-");
        }
    }
}

static void compare_targets_(Compare_* c) {
    for (int i = 0; i < c->count && c->are_comparable; i++) {
        const RecordEvent* best = record_best(&c->runs[i], c->measure);
        char text[FACT_BYTES];
        if (!best) {
            continue;
        }
        facts_target_name(text, c->measure, best->values[c->measure], c->rows[0].cells[i]);
        CompareRow_* row = compare_add_(c, text);
        for (int k = 0; k < c->count; k++) {
            facts_reach(text, &c->runs[k], c->measure, best->values[c->measure]);
            compare_set_(row->cells[k], text[0] ? text : "-");
        }
    }
}

static void compare_options_(Compare_* c) {
    FactsOptions options;
    facts_options(&options, c->runs, c->count);
    for (int i = 0; i < options.count; i++) {
        char name[COMPARE_CELL_];
        if (!options.differs[i]) {
            continue;
        }
        snprintf(name, sizeof(name), "--%.32s", options.name[i]);
        CompareRow_* row = compare_add_(c, name);
        for (int k = 0; k < c->count; k++) {
            const char* value = record_option(&c->runs[k], options.name[i]);
            compare_set_name_(row->cells[k], !value ? "-" : *value ? value : "''");
        }
    }
}

// Returns the width of a text on a terminal.
static int compare_columns_(const char* text) {
    int columns = 0;
    for (; *text; text++) {
        columns += !compare_continues_(*text);
    }
    return columns;
}

static void compare_print_cell_(FILE* file, const char* text, int width, int is_last) {
    fprintf(file, "%s%*s", text, is_last ? 0 : width - compare_columns_(text) + 2, "");
}

static void compare_print_(FILE* file, const Compare_* c) {
    int width[RECORD_RUNS + 1] = {0};
    for (int i = 0; i < c->num_rows; i++) {
        const CompareRow_* row = &c->rows[i];
        const int name = compare_columns_(row->name);
        width[0] = name > width[0] ? name : width[0];
        for (int k = 0; k < c->count; k++) {
            const int cell = compare_columns_(row->cells[k]);
            width[k + 1] = cell > width[k + 1] ? cell : width[k + 1];
        }
    }
    for (int i = 0; i < c->num_rows; i++) {
        compare_print_cell_(file, c->rows[i].name, width[0], 0);
        for (int k = 0; k < c->count; k++) {
            compare_print_cell_(file, c->rows[i].cells[k], width[k + 1], k + 1 == c->count);
        }
        fputc('\n', file);
    }
}

// ---- the runs ----

static double compare_best_(const Record* run, RecordValue measure) {
    const RecordEvent* best = record_best(run, measure);
    return best ? best->values[measure] : INFINITY;
}

// Sorts the best run first; equal ones keep their order.
static void compare_sort_(Compare_* c) {
    Record run;
    for (int i = 1; i < c->count; i++) {
        for (int k = i;
             k > 0 && compare_best_(&c->runs[k], c->measure) < compare_best_(&c->runs[k - 1], c->measure);
             k--) {
            run = c->runs[k];
            c->runs[k] = c->runs[k - 1];
            c->runs[k - 1] = run;
        }
    }
}

// Prints the names of the runs as column titles.
static void compare_titles_(Compare_* c) {
    const size_t common = record_common_directories(c->runs, c->count);
    CompareRow_* head = compare_add_(c, c->are_comparable ? "Run, the best first" : "Run");
    for (int i = 0; i < c->count; i++) {
        compare_set_name_(head->cells[i], c->runs[i].name + common);
    }
}

void compare_runs(FILE* file, const char* runs) {
    char paths[RECORD_RUNS][PATH_MAX];
    Compare_* c = (Compare_*)check_alloc(1, sizeof(Compare_), "comparison");
    c->count = record_split(paths, runs, "compare");
    if (c->count < 2) {
        die_usage("--compare %s is one run; wanted at least two, with a comma between them, or a pattern",
                  runs);
    }
    for (int i = 0; i < c->count; i++) {
        record_read(&c->runs[i], paths[i]);
    }
    c->are_comparable = facts_measure(&c->measure, c->note, c->runs, c->count);
    if (c->are_comparable) {
        compare_sort_(c);
    }
    compare_titles_(c);
    compare_facts_(c);
    compare_targets_(c);
    compare_options_(c);
    compare_print_(file, c);
    fprintf(file, c->note[0] ? "%s\n" : "%s", c->note);
    for (int i = 0; i < c->count; i++) {
        record_close(&c->runs[i]);
    }
    free(c);
}

#endif // COMPARE_IMPLEMENTATION

#endif
