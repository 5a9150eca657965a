/*
page.h -- --report RUN[,RUN,...]: a page of HTML about one or more runs: plots, facts, memory,
events, samples, options.

The page is one file without scripts and without links to other files: it can be mailed, printed and
kept. It is also well-formed XML. Every number comes from the logs (log_reader.h); nothing else is
read, so it makes no difference whether a run is finished, running or copied. A page of 5 runs of
100,000 updates is smaller than 500 KiB: curves are reduced (plot.h), and if a run has many samples,
validations and events, the page shows some and says so.
*/
#ifndef LLMC_PAGE_H
#define LLMC_PAGE_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Writes the report on "RUN,RUN,..." to `path`; "" writes report.html into the directory of the
// first run. Prints on `screen` where. Ends the program if something is wrong with a run.
void report_write(FILE* screen, const char* runs, const char* path);

#ifdef __cplusplus
}
#endif

#ifdef PAGE_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/number_text.h"
#include "llmc/base/outputs.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/enum_words.h"
#include "llmc/report/summary.h"
#include "llmc/log/log.h"
#include "llmc/report/plot.h"
#include "llmc/report/log_reader.h"
#include "llmc/report/page_plots.h"
#include "llmc/report/page_style.h"

enum {
    REPORT_VALIDATIONS_ = 40,         // rows per run
    REPORT_EVENTS_ = 20,              // per run
    REPORT_SAMPLE_BYTES_ = 2000,      // of one sample
    REPORT_SAMPLES_BYTES_ = 100 << 10 // of all samples
};

static void report_put_(FILE* file, const char* text) { plot_text(file, text, strlen(text)); }

// Prints a run's name, with its letter if the page has several.
static void report_name_(FILE* file, const ReportRuns* r, int which) {
    if (r->count > 1) {
        fprintf(file, "<b class=\"c%d\">%s</b>", which, report_letter(which));
    }
    report_put_(file, r->names[which]);
}

// ---- the head ----

// Prints "2026-11-22 16:40 UTC", when the last update was logged.
static void report_date_(FILE* file, const Record* run) {
    const double time_s = run->steps[run->num_steps - 1].values[RECORD_TIME];
    const time_t seconds = isfinite(time_s) && fabs(time_s) < 1e11 ? (time_t)time_s : 0;
    struct tm parts;
    char text[64];
    if (seconds && gmtime_r(&seconds, &parts) && strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &parts)) {
        fprintf(file, "last update %s", text);
    }
}

static void report_title_(FILE* file, const ReportRuns* r) {
    for (int i = 0; i < r->count; i++) {
        fputs(i ? ", " : "", file);
        report_put_(file, r->names[i]);
    }
}

static void report_head_(FILE* file, const ReportRuns* r) {
    fputs("<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n<meta "
          "charset=\"utf-8\"/>\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>",
          file);
    report_title_(file, r);
    fputs(" - training report</title>\n<style>\n/*<![CDATA[*/\n" REPORT_STYLE "/*]]>*/\n</style>\n</head>\n",
          file);
    fprintf(file, "<body class=\"%s\">\n<div class=\"page\">\n<header>\n<h1>", r->count > 1 ? "many" : "one");
    if (r->count > 1) {
        fprintf(file, "%d runs", r->count);
    } else {
        report_title_(file, r);
    }
    fputs("</h1>\n<p class=\"about\">Training report", file);
    if (r->count == 1) {
        fputs(" | ", file);
        report_put_(file, r->runs[0].program);
        fputs(" | ", file);
        report_date_(file, &r->runs[0]);
    }
    fputs("</p>\n</header>\n<main>\n", file);
}

// Prints the choice of the x axis, and each run's color.
static void report_bar_(FILE* file, const ReportRuns* r) {
    fputs("<div class=\"bar\">\n", file);
    if (r->count > 1) {
        fputs("<ul class=\"runs\">\n", file);
        for (int i = 0; i < r->count; i++) {
            fputs("<li>", file);
            report_name_(file, r, i);
            fputs("</li>\n", file);
        }
        fputs("</ul>\n", file);
    }
    fputs("<fieldset class=\"switch\"><legend>horizontal axis</legend>\n", file);
    for (int i = 0; i < PLOT_AXES; i++) {
        if (r->axes[i].last > 0) {
            fprintf(file, "<input type=\"radio\" name=\"axis\" id=\"a%d\"%s/><label for=\"a%d\">%s</label>\n",
                    i, i == 0 ? " checked=\"checked\"" : "", i, r->axes[i].name);
        }
    }
    fputs("</fieldset>\n</div>\n", file);
}

// ---- tables ----

static void report_open_table_(FILE* file, const ReportRuns* r, const char* style, const char* label) {
    fprintf(file,
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"%s\"><table class=\"%s\">\n",
            label, style);
    fputs("<thead><tr><th></th>", file);
    for (int i = 0; i < r->count; i++) {
        fputs("<th scope=\"col\" class=\"run\">", file);
        report_name_(file, r, i);
        fputs("</th>", file);
    }
    fputs("</tr></thead>\n<tbody>\n", file);
}

static void report_close_table_(FILE* file) { fputs("</tbody></table></div>\n", file); }

static void report_row_head_(FILE* file, const char* name) {
    fputs("<tr><th scope=\"row\">", file);
    report_put_(file, name);
    fputs("</th>", file);
}

static void report_cell_(FILE* file, const char* text) {
    fputs(text && *text ? "<td>" : "<td class=\"none\">", file);
    report_put_(file, text && *text ? text : "-");
    fputs("</td>", file);
}

// ---- results of the runs ----

static void report_facts_of_one_(FILE* file, const Record* run) {
    fputs("<dl class=\"facts\">\n", file);
    for (int i = 0; i < FACTS_COUNT; i++) {
        char text[FACT_BYTES] = "";
        FACTS[i].tell(text, run);
        if (text[0]) {
            fprintf(file, "<div><dt>%s</dt><dd>", FACTS[i].name);
            report_put_(file, text);
            fputs("</dd></div>\n", file);
        }
    }
    fputs("</dl>\n", file);
}

// Prints how many tokens and how much time each run took to the best validation of run `which`.
static void report_target_(FILE* file, const ReportRuns* r, RecordValue measure, int which) {
    const RecordEvent* best = record_best(&r->runs[which], measure);
    char name[FACT_BYTES], text[FACT_BYTES];
    if (!best) {
        return;
    }
    facts_target_name(name, measure, best->values[measure], report_letter(which));
    report_row_head_(file, name);
    for (int i = 0; i < r->count; i++) {
        facts_reach(text, &r->runs[i], measure, best->values[measure]);
        report_cell_(file, text);
    }
    fputs("</tr>\n", file);
}

static void report_facts_of_many_(FILE* file, const ReportRuns* r) {
    RecordValue measure;
    char note[FACT_BYTES];
    report_open_table_(file, r, "wrap", "What the runs achieved");
    for (int i = 0; i < FACTS_COUNT; i++) {
        if (!facts_are_told(&FACTS[i], r->runs, r->count)) {
            continue;
        }
        report_row_head_(file, FACTS[i].name);
        for (int k = 0; k < r->count; k++) {
            char text[FACT_BYTES] = "";
            FACTS[i].tell(text, &r->runs[k]);
            report_cell_(file, text);
        }
        fputs("</tr>\n", file);
    }
    const int are_comparable = facts_measure(&measure, note, r->runs, r->count);
    for (int i = 0; i < r->count && are_comparable; i++) {
        report_target_(file, r, measure, i);
    }
    report_close_table_(file);
    if (note[0]) {
        fprintf(file, "<p class=\"note\">%s</p>\n", note);
    }
}

// ---- memory ----

static const char* const report_places_[RECORD_PLACES] = {"", ", on the host", ", on disk"};

static double report_mib_(const Record* run, const RecordMemory* kind) {
    for (size_t i = 0; i < run->num_memory; i++) {
        if (strcmp(run->memory[i].name, kind->name) == 0 && run->memory[i].place == kind->place) {
            return run->memory[i].mib;
        }
    }
    return NAN;
}

// Returns the sum of all kinds at a place; NaN if none.
static double report_total_mib_(const Record* run, RecordPlace place) {
    double sum = NAN;
    for (size_t i = 0; i < run->num_memory; i++) {
        if (run->memory[i].place == place) {
            sum = run->memory[i].mib + (isfinite(sum) ? sum : 0);
        }
    }
    return sum;
}

static double report_most_mib_(const ReportRuns* r, RecordPlace place) { // of the totals
    double most = 0;
    for (int i = 0; i < r->count; i++) {
        most = fmax(most, report_total_mib_(&r->runs[i], place));
    }
    return most;
}

// Prints a number with a bar below it, as a part of the largest total.
static void report_mib_cell_(FILE* file, double mib, double most, int color) {
    if (!isfinite(mib)) {
        report_cell_(file, "");
        return;
    }
    fprintf(file, "<td class=\"mib c%d\">%.1f<i style=\"width:%.1f%%\"></i></td>", color, mib,
            100 * mib / most);
}

// True unless an earlier run, or an earlier kind of this run, has this name.
static int report_is_new_kind_(const ReportRuns* r, int run, size_t kind) {
    for (int i = 0; i < run; i++) {
        if (isfinite(report_mib_(&r->runs[i], &r->runs[run].memory[kind]))) {
            return 0;
        }
    }
    return 1;
}

static void report_total_(FILE* file, const ReportRuns* r, RecordPlace place, double most) {
    fprintf(file, "<tr class=\"total\"><th scope=\"row\">total%s</th>", report_places_[place]);
    for (int i = 0; i < r->count; i++) {
        report_mib_cell_(file, report_total_mib_(&r->runs[i], place), most, i);
    }
    fputs("</tr>\n", file);
}

// Prints the kinds of memory at a place, and their total; bars are parts of `most`.
static void report_place_(FILE* file, const ReportRuns* r, RecordPlace place, double most) {
    for (int i = 0; i < r->count; i++) {
        for (size_t k = 0; k < r->runs[i].num_memory; k++) {
            const RecordMemory* kind = &r->runs[i].memory[k];
            char name[256];
            if (kind->place != place || !report_is_new_kind_(r, i, k)) {
                continue;
            }
            snprintf(name, sizeof(name), "%.200s%s", kind->name, report_places_[place]);
            report_row_head_(file, name);
            for (int j = 0; j < r->count; j++) {
                report_mib_cell_(file, report_mib_(&r->runs[j], kind), most, j);
            }
            fputs("</tr>\n", file);
        }
    }
    report_total_(file, r, place, most);
}

static void report_memory_(FILE* file, const ReportRuns* r) {
    double most = 0;
    for (int place = 0; place < RECORD_PLACES; place++) {
        most = fmax(most, report_most_mib_(r, (RecordPlace)place));
    }
    if (most <= 0) {
        return;
    }
    fputs("<h2>Memory by kind, in MiB</h2>\n", file);
    report_open_table_(file, r, "number", "Memory by kind");
    for (int place = 0; place < RECORD_PLACES; place++) {
        if (report_most_mib_(r, (RecordPlace)place) > 0) {
            report_place_(file, r, (RecordPlace)place, most);
        }
    }
    report_close_table_(file);
}

// ---- events ----

static int report_is_event_(const RecordEvent* event) {
    return event->kind == RECORD_SKIP || event->kind == RECORD_ROLLBACK || event->kind == RECORD_STOP ||
           (event->kind == RECORD_START && event->step > 0);
}

static void report_event_(FILE* file, const RecordEvent* event) {
    char step[NUMBER_BYTES], from[NUMBER_BYTES];
    number_grouped(event->step, step);
    fputs("<li>", file);
    switch (event->kind) {
    case RECORD_SKIP:
        fprintf(file, "update %s skipped", step);
        break;
    case RECORD_ROLLBACK:
        fprintf(file, "rolled back from update %s to %s", number_grouped(event->values[RECORD_FROM], from),
                step);
        break;
    case RECORD_STOP:
        fprintf(file, "stopped after update %s", step);
        break;
    default:
        fprintf(file, "resumed after update %s", step);
        break;
    }
    fputs(event->text[0] ? ": " : "", file);
    plot_text(file, event->text, event->bytes);
    fputs("</li>\n", file);
}

static void report_events_of_(FILE* file, const Record* run, int count) {
    int shown = 0;
    fputs("<ul class=\"events\">\n", file);
    for (size_t i = 0; i < run->num_events; i++) {
        if (report_is_event_(&run->events[i]) && shown++ < REPORT_EVENTS_) {
            report_event_(file, &run->events[i]);
        }
    }
    if (count > REPORT_EVENTS_) {
        fprintf(file, "<li class=\"soft\">and %d more</li>\n", count - REPORT_EVENTS_);
    }
    fputs("</ul>\n", file);
}

static void report_section_(FILE* file, const ReportRuns* r, int which, const char* title, int* is_begun) {
    if (!*is_begun) {
        fprintf(file, "<h2>%s</h2>\n", title);
        *is_begun = 1;
    }
    if (r->count > 1) {
        fputs("<h3 class=\"run\">", file);
        report_name_(file, r, which);
        fputs("</h3>\n", file);
    }
}

static void report_events_(FILE* file, const ReportRuns* r) {
    int is_begun = 0;
    for (int i = 0; i < r->count; i++) {
        int count = 0;
        for (size_t k = 0; k < r->runs[i].num_events; k++) {
            count += report_is_event_(&r->runs[i].events[k]);
        }
        if (count) {
            report_section_(file, r, i, "Skipped, rolled back, resumed", &is_begun);
            report_events_of_(file, &r->runs[i], count);
        }
    }
}

// ---- validations and tasks ----

static int report_count_(const Record* run, RecordKind kind) {
    int count = 0;
    for (size_t i = 0; i < run->num_events; i++) {
        count += run->events[i].kind == kind;
    }
    return count;
}

// True if item i of n is among the at most `most` items shown, evenly spaced, including the last.
static int report_is_shown_(int i, int n, int most) {
    const int stride = (n + most - 1) / most;
    return (n - 1 - i) % (stride > 0 ? stride : 1) == 0;
}

// Sets text (128 bytes) to "12 samples", or "50 of 400 samples".
static void report_shown_text_(char* text, int n, int most, const char* what) {
    int shown = 0;
    for (int i = 0; i < n; i++) {
        shown += report_is_shown_(i, n, most);
    }
    const int used = shown < n ? snprintf(text, 128, "%d of ", shown) : 0;
    snprintf(text + used, 128 - (size_t)used, "%d %s%s", n, what, words_s(n));
}

static void report_number_cell_(FILE* file, double value, const char* format) {
    char text[NUMBER_BYTES] = "";
    if (isfinite(value)) {
        snprintf(text, sizeof(text), format, value);
    }
    report_cell_(file, text);
}

static void report_validation_(FILE* file, const Record* run, const RecordEvent* event) {
    char step[NUMBER_BYTES], tokens[NUMBER_BYTES], duration[64];
    number_grouped(event->step, step);
    const double count = record_place(run, RECORD_TOKENS, event->step);
    const double elapsed_s = record_place(run, RECORD_ELAPSED_S, event->step);
    report_row_head_(file, step);
    report_cell_(file, isfinite(count) ? number_grouped(count, tokens) : "");
    report_cell_(file, isfinite(elapsed_s) ? log_duration(elapsed_s, duration) : "");
    report_number_cell_(file, event->values[RECORD_VALUE_LOSS], "%.4f");
    report_number_cell_(file, event->values[RECORD_BPB], "%.4f");
    fputs("</tr>\n", file);
}

static void report_validations_of_(FILE* file, const Record* run, int n) {
    int i = 0;
    fputs(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Validations\"><table "
        "class=\"number\">\n"
        "<thead><tr><th scope=\"col\">Updates</th><th scope=\"col\">Tokens</th><th scope=\"col\">Time</th>"
        "<th scope=\"col\">Validation loss</th><th scope=\"col\">Bits per byte</th></tr></thead>\n<tbody>\n",
        file);
    for (size_t k = 0; k < run->num_events; k++) {
        if (run->events[k].kind == RECORD_VAL && report_is_shown_(i++, n, REPORT_VALIDATIONS_)) {
            report_validation_(file, run, &run->events[k]);
        }
    }
    report_close_table_(file);
}

// Opens a collapsible part.
static void report_open_details_(FILE* file, const ReportRuns* r, int which, const char* what) {
    fprintf(file, "<details><summary class=\"run\">");
    if (r->count > 1) {
        report_name_(file, r, which);
        fputs(": ", file);
    }
    fprintf(file, "%s</summary>\n", what);
}

static void report_validations_(FILE* file, const ReportRuns* r) {
    int is_begun = 0;
    for (int i = 0; i < r->count; i++) {
        const int n = report_count_(&r->runs[i], RECORD_VAL);
        char text[128];
        if (n == 0) {
            continue;
        }
        fputs(is_begun++ ? "" : "<h2>Validations</h2>\n", file);
        report_shown_text_(text, n, REPORT_VALIDATIONS_, "validation");
        report_open_details_(file, r, i, text);
        report_validations_of_(file, &r->runs[i], n);
        fputs("</details>\n", file);
    }
}

enum { REPORT_LAST_COLUMNS_ = 4 };

// A table of the last lines of one kind, by their names. It may have fewer columns.
typedef struct {
    RecordKind kind;
    const char *heading, *one; // "Tasks", "Task"
    struct {
        const char *heading, *format;
        RecordValue value;
        double factor;
    } columns[REPORT_LAST_COLUMNS_];
} ReportLast_;

// Prints a line of the table.
static void report_last_line_(FILE* file, const ReportRuns* r, int which, const ReportLast_* table,
                              const RecordEvent* event) {
    char step[NUMBER_BYTES];
    fputs("<tr><th scope=\"row\" class=\"run\">", file);
    if (r->count > 1) {
        report_name_(file, r, which);
        fputs(": ", file);
    }
    plot_text(file, event->text, event->bytes);
    fputs("</th>", file);
    report_cell_(file, number_grouped(event->step, step));
    for (int c = 0; c < REPORT_LAST_COLUMNS_ && table->columns[c].heading; c++) {
        report_number_cell_(file, table->columns[c].factor * event->values[table->columns[c].value],
                            table->columns[c].format);
    }
    fputs("</tr>\n", file);
}

// True unless a line of this kind and name comes again later in the run.
static int report_is_last_(const Record* run, size_t which) {
    const RecordEvent* it = &run->events[which];
    for (size_t i = which + 1; i < run->num_events; i++) {
        if (run->events[i].kind == it->kind && strcmp(run->events[i].text, it->text) == 0) {
            return 0;
        }
    }
    return 1;
}

static void report_open_last_(FILE* file, const ReportLast_* table) {
    fprintf(file,
            "<h2>%s</h2>\n<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"%s\">"
            "<table class=\"number\">\n<thead><tr><th scope=\"col\">%s</th><th scope=\"col\">Updates</th>",
            table->heading, table->heading, table->one);
    for (int c = 0; c < REPORT_LAST_COLUMNS_ && table->columns[c].heading; c++) {
        fprintf(file, "<th scope=\"col\">%s</th>", table->columns[c].heading);
    }
    fputs("</tr></thead>\n<tbody>\n", file);
}

// Prints the last line of each name.
static void report_last_(FILE* file, const ReportRuns* r, const ReportLast_* table) {
    int is_begun = 0;
    for (int i = 0; i < r->count; i++) {
        for (size_t k = 0; k < r->runs[i].num_events; k++) {
            if (r->runs[i].events[k].kind != table->kind || !report_is_last_(&r->runs[i], k)) {
                continue;
            }
            if (!is_begun++) {
                report_open_last_(file, table);
            }
            report_last_line_(file, r, i, table, &r->runs[i].events[k]);
        }
    }
    if (is_begun) {
        report_close_table_(file);
    }
}

// Prints the last result of each task and validation set, and the use of each source of data.
static void report_tables_(FILE* file, const ReportRuns* r) {
    static const ReportLast_ tasks = {RECORD_TASK,
                                      "Tasks",
                                      "Task",
                                      {{"Accuracy", "%.4f", RECORD_ACC, 1},
                                       {"by loss per token", "%.4f", RECORD_ACC_NORM, 1},
                                       {"by loss per byte", "%.4f", RECORD_ACC_BYTES, 1}}};
    static const ReportLast_ sets = {
        RECORD_SET,
        "Validation sets",
        "Set",
        {{"Validation loss", "%.4f", RECORD_VALUE_LOSS, 1}, {"Bits per byte", "%.4f", RECORD_BPB, 1}}};
    static const ReportLast_ sources = {RECORD_SOURCE,
                                        "Sources of the data",
                                        "Source",
                                        {{"Share", "%.2f %%", RECORD_SHARE, 100},
                                         {"Million tokens", "%.4g", RECORD_GIVEN, 1e-6},
                                         {"Epochs", "%.3g", RECORD_EPOCHS, 1}}};
    report_last_(file, r, &tasks);
    report_last_(file, r, &sets);
    report_last_(file, r, &sources);
}

// ---- samples ----

// Returns how many bytes of a text are shown: whole characters.
static size_t report_sample_bytes_(const RecordEvent* event) {
    size_t bytes = event->bytes < REPORT_SAMPLE_BYTES_ ? event->bytes : (size_t)REPORT_SAMPLE_BYTES_;
    while (bytes < event->bytes && bytes > 0 && ((unsigned char)event->text[bytes] & 0xC0) == 0x80) {
        bytes--;
    }
    return bytes;
}

static void report_sample_(FILE* file, const RecordEvent* event) {
    char step[NUMBER_BYTES];
    const size_t bytes = report_sample_bytes_(event);
    fprintf(file, "<article class=\"sample\"><h4>after %s updates</h4><p>",
            number_grouped(event->step, step));
    plot_text(file, event->text, bytes);
    fprintf(file, "%s</p></article>\n", bytes < event->bytes ? " [cut]" : "");
}

// Returns how many samples of a run fit.
static int report_samples_room_(const ReportRuns* r, const Record* run, int n) {
    size_t bytes = 0;
    const size_t room = (size_t)REPORT_SAMPLES_BYTES_ / (size_t)r->count;
    for (size_t i = 0; i < run->num_events; i++) {
        bytes += run->events[i].kind == RECORD_SAMPLE ? 120 + report_sample_bytes_(&run->events[i]) : 0;
    }
    const int fits = (int)((double)n * (double)room / (double)bytes);
    return bytes <= room ? n : fits > 0 ? fits : 1;
}

static void report_samples_of_(FILE* file, const ReportRuns* r, int which, int n) {
    const Record* run = &r->runs[which];
    const int most = report_samples_room_(r, run, n);
    char text[128];
    int i = 0;
    report_shown_text_(text, n, most, "sample");
    report_open_details_(file, r, which, text);
    for (size_t k = 0; k < run->num_events; k++) {
        if (run->events[k].kind == RECORD_SAMPLE && report_is_shown_(i++, n, most)) {
            report_sample_(file, &run->events[k]);
        }
    }
    fputs("</details>\n", file);
}

static void report_samples_(FILE* file, const ReportRuns* r) {
    int is_begun = 0;
    for (int i = 0; i < r->count; i++) {
        const int n = report_count_(&r->runs[i], RECORD_SAMPLE);
        if (n > 0) {
            fputs(is_begun++ ? "" : "<h2>Samples</h2>\n", file);
            if (r->count == 1) {
                // visible without a click
                report_sample_(file, record_last(&r->runs[i], RECORD_SAMPLE));
            }
            report_samples_of_(file, r, i, n);
        }
    }
}

// ---- options ----

typedef enum { REPORT_ALL_, REPORT_DIFFERING_ } ReportOptions_;

static void report_options_table_(FILE* file, const ReportRuns* r, const FactsOptions* options,
                                  ReportOptions_ which) {
    report_open_table_(file, r, "wrap", which == REPORT_ALL_ ? "All options" : "Options that differ");
    for (int i = 0; i < options->count; i++) {
        if (which == REPORT_DIFFERING_ && !options->differs[i]) {
            continue;
        }
        char name[128];
        snprintf(name, sizeof(name), "--%.100s", options->name[i]);
        report_row_head_(file, name);
        for (int k = 0; k < r->count; k++) {
            report_cell_(file, record_option(&r->runs[k], options->name[i]));
        }
        fputs("</tr>\n", file);
    }
    report_close_table_(file);
}

// Prints the command of each run's last start, if it is known.
static void report_commands_(FILE* file, const ReportRuns* r) {
    for (int i = 0, any = 0; i < r->count; i++) {
        if (r->runs[i].command[0]) {
            fputs(any++ ? "" : "<h2>Command</h2>\n", file);
            fprintf(file, "<p class=\"about\">%s%s<code>", r->count > 1 ? report_letter(i) : "",
                    r->count > 1 ? ": " : "");
            report_put_(file, r->runs[i].command);
            fputs("</code></p>\n", file);
        }
    }
}

static void report_options_(FILE* file, const ReportRuns* r) {
    FactsOptions options;
    facts_options(&options, r->runs, r->count);
    if (options.count == 0) {
        return;
    }
    fputs("<h2>Options</h2>\n", file);
    if (r->count > 1 && options.differing) {
        report_options_table_(file, r, &options, REPORT_DIFFERING_);
    } else if (r->count > 1) {
        fputs("<p>The runs have the same options.</p>\n", file);
    }
    fprintf(file, "<details><summary>all %d options</summary>\n", options.count);
    report_options_table_(file, r, &options, REPORT_ALL_);
    fputs("</details>\n", file);
}

// ---- the page ----

static void report_page_(FILE* file, const ReportRuns* r) {
    report_head_(file, r);
    if (r->count == 1) {
        report_facts_of_one_(file, &r->runs[0]);
    } else {
        report_facts_of_many_(file, r);
    }
    report_bar_(file, r);
    report_plots(file, r);
    report_tables_(file, r);
    report_memory_(file, r);
    report_events_(file, r);
    report_validations_(file, r);
    report_samples_(file, r);
    report_commands_(file, r);
    report_options_(file, r);
    fputs("</main>\n</div>\n</body>\n</html>\n", file);
}

// Sets the default path: beside the log of the first run.
static void report_default_path_(char path[PATH_MAX], const Record* run) {
    char directory[PATH_MAX];
    file_directory_of(directory, run->path);
    file_join(path, directory, "report.html");
}

// Sets `target` to the page's path. Ends the program if it must not be written.
static void report_place_page_(char target[PATH_MAX], const ReportRuns* r, const char* path) {
    Outputs outputs;
    file_path(target, "%s", path);
    if (!path[0]) {
        report_default_path_(target, &r->runs[0]);
    }
    outputs_open(&outputs);
    for (int i = 0; i < r->count; i++) {
        file_list_add_directory(&outputs.reads, "report", r->runs[i].name);
        file_list_add(&outputs.reads, "report", r->runs[i].path);
    }
    outputs_add(&outputs, "out-html", target);
    outputs_check(&outputs);
    outputs_close(&outputs);
}

void report_write(FILE* screen, const char* runs, const char* path) {
    char paths[RECORD_RUNS][PATH_MAX], target[PATH_MAX];
    TextBuffer page;
    ReportRuns* r = (ReportRuns*)check_alloc(1, sizeof(ReportRuns), "report");
    r->count = record_split(paths, runs, "report");
    for (int i = 0; i < r->count; i++) {
        record_read(&r->runs[i], paths[i]);
    }
    report_place_page_(target, r, path);
    report_runs_open(r);
    text_buffer_open(&page, "the report");
    report_page_(page.file, r);
    char* text = text_buffer_close(&page);
    file_write_text(target, text, page.bytes);
    fprintf(screen, "%s: %zu KiB\n", target, (page.bytes + 1023) / 1024);
    for (int i = 0; i < r->count; i++) {
        record_close(&r->runs[i]);
    }
    free(text);
    free(r);
}

#endif // PAGE_IMPLEMENTATION

#endif
