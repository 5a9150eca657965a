/*
data_schedule.h -- weights of sources that change during a run, and their file.

    # from          weights
    0               web 8    books 2
    10000  ramp     web 8    books 2        # changes linearly until the next line
    12000           web 4    books 3   maths 3
    5B tokens       books 1  maths 1

Each line says from where on its weights apply: after this number of updates, or of tokens; k, M, B
and T stand for thousands. Weights are decimals of at most six digits before and six after the
point, in any scale. A source that a line does not name has weight 0 there. After a line with `ramp`
the shares move linearly to the next line's.

A ramp is cut into pieces (SchedulePiece) of constant weights, at most 64, of 32 sequences or more.
Their shares are those in the middle of the piece, in 1/1024 or, if it is shorter than 1024
sequences, in whole sequences. A remainder is carried into the next piece, so it does not add up.
*/
#ifndef LLMC_DATA_SCHEDULE_H
#define LLMC_DATA_SCHEDULE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/source_order.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SCHEDULE_LINES = 64, // most lines
    SCHEDULE_CYCLE_MAX = 1 << 16,
    SCHEDULE_PIECES = 64, // most pieces of a ramp
    SCHEDULE_PIECE = 32,  // sequences of a piece, at least
    SCHEDULE_QUANTA = 1024
};
#define SCHEDULE_SEQUENCES_MAX ((int64_t)1 << 53) // last sequence at which a line may start

typedef enum { SCHEDULE_STEPS, SCHEDULE_TOKENS } ScheduleUnit;

typedef struct {
    int64_t from; // in `unit`
    ScheduleUnit unit;
    int is_ramp;
    int number;                    // its place in the file
    int64_t first;                 // its first sequence; set by the caller
    uint64_t weights[SOURCES_MAX]; // in lowest terms
} ScheduleLine;

typedef struct {
    char* path; // NULL: weights that do not change, of the list of sources
    int sources, count;
    ScheduleLine* line; // (count)
} DataSchedule;

// Sequences from `first` to before `end`, of constant weights in lowest terms.
typedef struct {
    int64_t first, end;
    uint64_t weights[SOURCES_MAX];
} SchedulePiece;

// Returns the schedule of weights that do not change, in lowest terms.
DataSchedule data_schedule_constant(const uint64_t* weights, int sources);

// Reads a file. Ends the program if it is not a schedule of these sources.
void data_schedule_read(DataSchedule* d, const char* path, const char* const* names, int sources);

// Ends the program unless the lines, whose first sequences are set, are in order.
void data_schedule_check_order(const DataSchedule* d);

// Returns the pieces in order, and sets their number. The caller frees them.
SchedulePiece* data_schedule_cut(const DataSchedule* d, size_t* count);

// Prints a line for each line of the file.
void data_schedule_print(FILE* file, const DataSchedule* d, const char* const* names);

void data_schedule_close(DataSchedule* d);

#ifdef __cplusplus
}
#endif

#ifdef DATA_SCHEDULE_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/number_text.h"

#define SCHEDULE_FILE_BYTES_ ((size_t)1 << 20)
enum { SCHEDULE_WHOLE_DIGITS_ = 12, SCHEDULE_WEIGHT_DIGITS_ = 6 };

// Opens a schedule of no lines, with room for `lines`.
static void schedule_open_(DataSchedule* d, int sources, int lines) {
    memset(d, 0, sizeof(*d));
    d->sources = sources;
    d->line = (ScheduleLine*)check_alloc((size_t)lines, sizeof(ScheduleLine), "schedule of the data");
}

DataSchedule data_schedule_constant(const uint64_t* weights, int sources) {
    DataSchedule d;
    schedule_open_(&d, sources, 1);
    d.count = 1;
    memcpy(d.line[0].weights, weights, (size_t)sources * sizeof(*weights));
    return d;
}

// ---- the file ----

// Cuts the next word off a text, which is modified. Returns NULL at the end.
static char* schedule_word_(char** text) {
    char* word = *text + strspn(*text, " \t\r");
    char* end = word + strcspn(word, " \t\r");
    *text = *end ? end + 1 : end;
    *end = '\0';
    return *word ? word : NULL;
}

// Cuts the word off if it is next.
static int schedule_take_(char** text, const char* wanted) {
    const char* word = *text + strspn(*text, " \t\r");
    const size_t length = strcspn(word, " \t\r");
    const int is_it = length == strlen(wanted) && memcmp(word, wanted, length) == 0;
    if (is_it) {
        schedule_word_(text);
    }
    return is_it;
}

// Reads "10000", "10k" or "2.5B". Returns 0 if it is anything else, not whole or too large.
static int schedule_amount_(int64_t* amount, const char* word) {
    static const char letters[] = "kMBT";
    char digits[64] = "";
    const size_t length = strlen(word);
    const char* letter = length ? strchr(letters, word[length - 1]) : NULL;
    uint64_t scale = 1, millionths;
    snprintf(digits, sizeof(digits), "%.*s", (int)(length - (letter != NULL)), word);
    for (const char* l = letters; letter && l <= letter; l++) {
        scale *= 1000;
    }
    if (!number_read_millionths(&millionths, digits, SCHEDULE_WHOLE_DIGITS_) || length >= sizeof(digits)) {
        return 0;
    }
    const double value = 1e-6 * (double)millionths * (double)scale;
    const uint64_t unit = 1000000, common = scale < unit ? scale : unit;
    *amount = (int64_t)(millionths / (unit / common) * (scale / common));
    return value <= (double)SCHEDULE_SEQUENCES_MAX && millionths % (unit / common) == 0;
}

static int schedule_source_(const DataSchedule* d, const char* const* names, const char* word, int number) {
    for (int s = 0; s < d->sources; s++) {
        if (strcmp(names[s], word) == 0) {
            return s;
        }
    }
    die_usage("%s:%d: source %s is not one of --train-data; wanted %s, ...", d->path, number, word, names[0]);
}

// Reads the weights of a line.
static void schedule_read_weights_(ScheduleLine* line, const DataSchedule* d, const char* const* names,
                                   char* text) {
    int is_named[SOURCES_MAX] = {0}, any = 0;
    for (char* name; (name = schedule_word_(&text)) != NULL;) {
        const int s = schedule_source_(d, names, name, line->number);
        const char* weight = schedule_word_(&text);
        if (!weight || !number_read_millionths(&line->weights[s], weight, SCHEDULE_WEIGHT_DIGITS_)) {
            die_usage("%s:%d: weight of %s is \"%s\"; wanted a decimal with at most six digits before and "
                      "six after the point",
                      d->path, line->number, name, weight ? weight : "");
        }
        if (is_named[s]++) {
            die_usage("%s:%d: source %s is named twice", d->path, line->number, name);
        }
        any |= line->weights[s] > 0;
    }
    if (!any) {
        die_usage("%s:%d: no source has a weight above 0; wanted NAME WEIGHT ...", d->path, line->number);
    }
    const uint64_t cycle = source_order_reduce(line->weights, d->sources);
    if (cycle > SCHEDULE_CYCLE_MAX) {
        die_usage("%s:%d: the weights repeat after %llu sequences only; wanted at most %d: fewer digits",
                  d->path, line->number, (unsigned long long)cycle, SCHEDULE_CYCLE_MAX);
    }
}

// Reads the line `text`, unless it is empty.
static void schedule_read_line_(DataSchedule* d, const char* const* names, char* text, int number) {
    ScheduleLine line;
    text[strcspn(text, "#")] = '\0';
    const char* word = schedule_word_(&text);
    if (!word) {
        return;
    }
    memset(&line, 0, sizeof(line));
    line.number = number;
    if (!schedule_amount_(&line.from, word)) {
        die_usage("%s:%d: starts with %s; wanted a number of updates or of tokens: 0, 10000, 5B tokens",
                  d->path, number, word);
    }
    if (d->count == SCHEDULE_LINES) {
        die_usage("%s:%d: more than %d lines with weights", d->path, number, SCHEDULE_LINES);
    }
    if (d->count == 0 && line.from != 0) {
        die_usage("%s:%d: the first weights are from %s on; wanted from 0 on", d->path, number, word);
    }
    line.unit = schedule_take_(&text, "tokens") ? SCHEDULE_TOKENS : SCHEDULE_STEPS;
    line.is_ramp = schedule_take_(&text, "ramp");
    schedule_read_weights_(&line, d, names, text);
    d->line[d->count++] = line;
}

// Refuses a source that no line names.
static void schedule_check_sources_(const DataSchedule* d, const char* const* names) {
    for (int s = 0; s < d->sources; s++) {
        uint64_t most = 0;
        for (int i = 0; i < d->count; i++) {
            most |= d->line[i].weights[s];
        }
        if (!most) {
            die_usage("%s: no line gives source %s of --train-data a weight", d->path, names[s]);
        }
    }
}

void data_schedule_read(DataSchedule* d, const char* path, const char* const* names, int sources) {
    char error[ERROR_BYTES], *text;
    size_t bytes;
    schedule_open_(d, sources, SCHEDULE_LINES);
    d->path = strdup(path);
    CHECK(d->path, "%s: no memory", path);
    CHECK(byte_order_text(path, SCHEDULE_FILE_BYTES_, &text, &bytes, error), "%s", error);
    CHECK(strlen(text) == bytes, "%s: has a zero byte; wanted text", path);
    char* next = text;
    for (int number = 1; *next; number++) {
        char *line = next, *end = line + strcspn(line, "\n");
        next = *end ? end + 1 : end;
        *end = '\0';
        schedule_read_line_(d, names, line, number);
    }
    free(text);
    if (d->count == 0) {
        die_usage("%s: no line with weights; wanted: 0 NAME WEIGHT ...", path);
    }
    if (d->line[d->count - 1].is_ramp) {
        die_usage("%s:%d: a ramp on the last line; wanted a line that it leads to", path,
                  d->line[d->count - 1].number);
    }
    schedule_check_sources_(d, names);
}

void data_schedule_check_order(const DataSchedule* d) {
    for (int i = 0; i < d->count; i++) {
        const ScheduleLine* line = &d->line[i];
        if (i > 0 && line->first <= line[-1].first) {
            die_usage("%s:%d: starts at sequence %lld of the run, line %d at %lld; wanted lines in order",
                      d->path, line->number, (long long)line->first, line[-1].number,
                      (long long)line[-1].first);
        }
        if (line->first > SCHEDULE_SEQUENCES_MAX) {
            die_usage("%s:%d: starts after more than %lld sequences", d->path, line->number,
                      (long long)SCHEDULE_SEQUENCES_MAX);
        }
    }
}

// ---- pieces ----

// Deals `quanta` turns by what each source is owed, and takes them off it: the next one always goes
// to the source that is owed most. owed: in 1/unit turns; adds up to `quanta`.
static void schedule_deal_(uint64_t* turns, int64_t* owed, int sources, int64_t quanta, int64_t unit) {
    memset(turns, 0, (size_t)sources * sizeof(*turns));
    for (int64_t turn = 0; turn < quanta; turn++) {
        int most = 0;
        for (int s = 1; s < sources; s++) {
            most = owed[s] > owed[most] ? s : most;
        }
        turns[most]++;
        owed[most] -= unit;
    }
}

static uint64_t schedule_sum_(const ScheduleLine* line, int sources) {
    uint64_t sum = 0;
    for (int s = 0; s < sources; s++) {
        sum += line->weights[s];
    }
    return sum;
}

// Sets the pieces of the ramp from line a to line b. Returns their number. Whole numbers give all
// machines the same pieces; all are below 2^50.
static size_t schedule_cut_ramp_(SchedulePiece* pieces, const ScheduleLine* a, const ScheduleLine* b,
                                 int sources) {
    const int64_t length = b->first - a->first, most = length / SCHEDULE_PIECE,
                  count = most < 1                 ? 1
                          : most < SCHEDULE_PIECES ? most
                                                   : SCHEDULE_PIECES,
                  sum_a = (int64_t)schedule_sum_(a, sources), sum_b = (int64_t)schedule_sum_(b, sources),
                  unit = sum_a * sum_b * 2 * count;
    int64_t owed[SOURCES_MAX] = {0}; // turns that each source has not been given, in 1/unit
    for (int64_t k = 0; k < count; k++) {
        SchedulePiece* piece = &pieces[k];
        piece->first = a->first + length / count * k + length % count * k / count;
        piece->end = a->first + length / count * (k + 1) + length % count * (k + 1) / count;
        const int64_t sequences = piece->end - piece->first,
                      quanta = sequences < SCHEDULE_QUANTA ? sequences : SCHEDULE_QUANTA;
        for (int s = 0; s < sources; s++) { // its share in the middle of the piece
            owed[s] += quanta * ((int64_t)a->weights[s] * sum_b * (2 * count - 2 * k - 1) +
                                 (int64_t)b->weights[s] * sum_a * (2 * k + 1));
        }
        schedule_deal_(piece->weights, owed, sources, quanta, unit);
        source_order_reduce(piece->weights, sources);
    }
    return (size_t)count;
}

SchedulePiece* data_schedule_cut(const DataSchedule* d, size_t* count) {
    SchedulePiece* pieces = (SchedulePiece*)check_alloc((size_t)d->count * SCHEDULE_PIECES,
                                                        sizeof(SchedulePiece), "schedule of the data");
    *count = 0;
    for (int i = 0; i < d->count; i++) {
        const ScheduleLine* line = &d->line[i];
        SchedulePiece* piece = &pieces[*count];
        if (line->is_ramp) {
            *count += schedule_cut_ramp_(piece, line, line + 1, d->sources);
            continue;
        }
        piece->first = line->first;
        piece->end = i + 1 < d->count ? line[1].first : INT64_MAX;
        memcpy(piece->weights, line->weights, sizeof(piece->weights));
        ++*count;
    }
    return pieces;
}

// ---- the rest ----

void data_schedule_print(FILE* file, const DataSchedule* d, const char* const* names) {
    static const char* const units[] = {"step", "token"};
    char from[NUMBER_BYTES];
    for (int i = 0; i < d->count; i++) {
        const ScheduleLine* line = &d->line[i];
        const double sum = (double)schedule_sum_(line, d->sources);
        fprintf(file, "mixture from %s %s on:", units[line->unit], number_grouped((double)line->from, from));
        for (int s = 0, n = 0; s < d->sources; s++) {
            if (line->weights[s]) {
                fprintf(file, "%s %s %.4g %%", n++ ? "," : "", names[s],
                        100 * (double)line->weights[s] / sum);
            }
        }
        fputs(line->is_ramp ? ", then linearly to:\n" : "\n", file);
    }
}

void data_schedule_close(DataSchedule* d) {
    free(d->line);
    free(d->path);
    memset(d, 0, sizeof(*d));
}

#endif // DATA_SCHEDULE_IMPLEMENTATION

#endif
