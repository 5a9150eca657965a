/*
page_plots.h -- the plots of a report: which numbers of the runs appear in which plot.

Raw values come with their trend: the mean over a window of REPORT_WINDOW_PERCENT of the run around
each point. A short run has no trend.
*/
#ifndef LLMC_PAGE_PLOTS_H
#define LLMC_PAGE_PLOTS_H

#include <stdio.h>

#include "llmc/report/plot.h"
#include "llmc/report/log_reader.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the letter of run `which` in plots and tables.
static inline const char* report_letter(int which) {
    static const char* const letters[RECORD_RUNS] = {"A", "B", "C", "D", "E", "F", "G", "H"};
    return letters[which];
}

enum { REPORT_WINDOW_PERCENT = 1 };

typedef struct {
    Record runs[RECORD_RUNS];
    const char* names[RECORD_RUNS]; // without the directories that all have in common
    int count;
    double time_unit_s; // unit of the time axis
    PlotAxis axes[PLOT_AXES];
} ReportRuns;

// Sets names and axes after all runs have been read.
void report_runs_open(ReportRuns* runs);

// Prints all plots that have numbers.
void report_plots(FILE* file, const ReportRuns* runs);

#ifdef __cplusplus
}
#endif

#ifdef PAGE_PLOTS_IMPLEMENTATION

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/text_buffer.h"

enum {
    REPORT_COLUMNS_ = 1000,     // columns of the widest curves; each has at most two points
    REPORT_COLUMNS_ALL_ = 1700, // of all runs together, so that the page stays small
    REPORT_LONG_ = 300,         // updates from which a run has a trend
    REPORT_TASKS_ = 32,
    REPORT_HEATS_ = 17, // levels of a heat map, from no load to REPORT_HOT_
    REPORT_HOT_ = 2,
    REPORT_TEXT_ = 4096
};

static const RecordStep* report_end_(const Record* run) { return &run->steps[run->num_steps - 1]; }

static void report_names_(ReportRuns* runs) {
    const size_t common = record_common_directories(runs->runs, runs->count);
    for (int i = 0; i < runs->count; i++) {
        runs->names[i] = runs->runs[i].name + common;
    }
}

void report_runs_open(ReportRuns* runs) {
    static const struct {
        double s;
        const char* name;
    } units[] = {{1, "seconds"}, {60, "minutes"}, {3600, "hours"}, {86400, "days"}};
    double longest[PLOT_AXES] = {0, 0, 0};
    report_names_(runs);
    for (int i = 0; i < runs->count; i++) {
        const RecordStep* end = report_end_(&runs->runs[i]);
        longest[0] = fmax(longest[0], end->step);
        longest[1] = fmax(longest[1], end->values[RECORD_TOKENS]); // fmax ignores NaN
        longest[2] = fmax(longest[2], end->values[RECORD_ELAPSED_S]);
    }
    int unit = 0;
    while (unit < 3 && longest[2] >= 3 * units[unit + 1].s) {
        unit++;
    }
    runs->time_unit_s = units[unit].s;
    const PlotAxis axes[PLOT_AXES] = {
        {longest[0], "updates"}, {longest[1], "tokens"}, {longest[2] / units[unit].s, units[unit].name}};
    memcpy(runs->axes, axes, sizeof(axes));
}

// ---- from numbers to curves ----

static PlotPoint report_point_(const ReportRuns* runs, const RecordStep* step, double y) {
    const PlotPoint point = {
        {step->step, step->values[RECORD_TOKENS], step->values[RECORD_ELAPSED_S] / runs->time_unit_s}, y};
    return point;
}

// Returns the point of something that happened after `step` updates.
static PlotPoint report_at_place_(const ReportRuns* runs, const Record* run, double step, double y) {
    const PlotPoint point = {{step, record_place(run, RECORD_TOKENS, step),
                              record_place(run, RECORD_ELAPSED_S, step) / runs->time_unit_s},
                             y};
    return point;
}

typedef enum {
    REPORT_RAW_,
    REPORT_RAW_AND_TREND_,
    REPORT_TREND_
} ReportTrend_; // of a run that is long enough

// Row of the table of plots: a series of the updates.
typedef struct {
    const char *id, *title, *unit;
    RecordSeries series;
    int over; // series that it is a part of; -1: none
    PlotScale scale;
    int is_percent;
    ReportTrend_ trend;
    int is_sparse; // measured now and then: no gaps
} ReportRow_;

// clang-format off
static const ReportRow_ REPORT_LOSS_ =
    {"loss",  "Loss",              "nats per token, logarithmic",  RECORD_LOSS,      -1,        PLOT_LOG,       0, REPORT_RAW_AND_TREND_, 0};
static const ReportRow_ REPORT_END_ =
    {"end",   "Loss, second half", "of each run, logarithmic",     RECORD_LOSS,      -1,        PLOT_LOG,       0, REPORT_TREND_,         0};
static const ReportRow_ REPORT_ROWS_[] = {
    {"kl",    "KL from the teacher", "nats per token, logarithmic", RECORD_KL,       -1,        PLOT_LOG,       0, REPORT_RAW_AND_TREND_, 0},
    {"norm",  "Gradient norm",     "before clipping, logarithmic", RECORD_NORM,      -1,        PLOT_LOG,       0, REPORT_RAW_AND_TREND_, 0},
    {"lr",    "Learning rate",     "",                             RECORD_LR,        -1,        PLOT_FROM_ZERO, 0, REPORT_RAW_,           0},
    {"speed", "Speed",             "tokens per second",            RECORD_TOK_PER_S, -1,        PLOT_FROM_ZERO, 0, REPORT_RAW_AND_TREND_, 0},
    {"mfu",   "MFU",               "share of the device's peak",   RECORD_MFU,       -1,        PLOT_FROM_ZERO, 1, REPORT_RAW_AND_TREND_, 0},
    {"data",  "Waiting for data",  "share of each update's time",  RECORD_DATA_MS,   RECORD_MS, PLOT_FROM_ZERO, 1, REPORT_RAW_AND_TREND_, 0},
    {"load",  "Busiest expert",    "share of tokens; 1 is even",   RECORD_LOAD,      -1,        PLOT_FROM_ZERO, 0, REPORT_RAW_AND_TREND_, 0},
    {"entropy", "Entropy of routers", "nats per token",            RECORD_ENTROPY,   -1,        PLOT_FROM_ZERO, 0, REPORT_RAW_AND_TREND_, 0},
    {"power", "GPU power",         "watts",                        RECORD_POWER_W,   -1,        PLOT_FROM_ZERO, 0, REPORT_RAW_AND_TREND_, 1},
    {"clock", "GPU clock",         "MHz, of the multiprocessors",  RECORD_CLOCK_MHZ, -1,        PLOT_FROM_ZERO, 0, REPORT_RAW_AND_TREND_, 1},
};
// clang-format on
enum { REPORT_NUM_ROWS_ = sizeof(REPORT_ROWS_) / sizeof(REPORT_ROWS_[0]) };

static double report_value_(const ReportRow_* row, const RecordStep* step) {
    const double value = step->values[row->series];
    return row->over >= 0 ? value / step->values[row->over] : value;
}

static PlotPoint* report_alloc_(size_t count) {
    return (PlotPoint*)check_alloc_unset(count ? count : 1, sizeof(PlotPoint), "curve");
}

// Returns the raw curve: each update of a run.
static PlotCurve report_raw_(const ReportRuns* runs, int which, const ReportRow_* row) {
    const Record* run = &runs->runs[which];
    PlotCurve curve = {PLOT_RAW, "raw", which, NULL, report_alloc_(run->num_steps), 0};
    for (size_t i = 0; i < run->num_steps; i++) {
        const double value = report_value_(row, &run->steps[i]);
        if (isfinite(value) || !row->is_sparse) {
            curve.points[curve.count++] = report_point_(runs, &run->steps[i], value);
        }
    }
    return curve;
}

// Returns the label of a run's curve; NULL if only one run is shown.
static const char* report_label_(const ReportRuns* runs, int which) {
    return runs->count > 1 ? report_letter(which) : NULL;
}

// Returns the trend: the mean over a window around each value.
static PlotCurve report_trend_(const PlotCurve* raw) {
    const size_t half = raw->count * REPORT_WINDOW_PERCENT / 200;
    PlotCurve trend = {PLOT_LINE, "line", raw->color, NULL, report_alloc_(raw->count), raw->count};
    double sum = 0;
    size_t begin = 0, end = 0, finite = 0; // of the window
    for (size_t i = 0; i < raw->count; i++) {
        for (; end < raw->count && end <= i + half; end++) {
            sum += isfinite(raw->points[end].y) ? raw->points[end].y : 0;
            finite += isfinite(raw->points[end].y);
        }
        for (; begin + half < i; begin++) {
            sum -= isfinite(raw->points[begin].y) ? raw->points[begin].y : 0;
            finite -= isfinite(raw->points[begin].y);
        }
        trend.points[i] = raw->points[i];
        trend.points[i].y = finite ? sum / (double)finite : NAN;
    }
    return trend;
}

// Adds the values, their trend, or both; for a short run only the values.
static void report_add_run_(Plot* plot, const ReportRuns* runs, int which, const ReportRow_* row) {
    PlotCurve raw = report_raw_(runs, which, row);
    if (row->trend == REPORT_RAW_ || raw.count < REPORT_LONG_) {
        raw.kind = "line";
        raw.label = report_label_(runs, which);
        plot_add(plot, raw);
        return;
    }
    PlotCurve trend = report_trend_(&raw);
    trend.label = report_label_(runs, which);
    if (row->trend == REPORT_TREND_) {
        free(raw.points);
    } else {
        plot_add(plot, raw);
    }
    plot_add(plot, trend);
}

// Returns the events of a kind as a curve; tasks only of one name.
static PlotCurve report_event_curve_(const ReportRuns* runs, int which, RecordKind kind, RecordValue value,
                                     const char* name) {
    const Record* run = &runs->runs[which];
    PlotCurve curve = {PLOT_DOTS, "val", which, NULL, report_alloc_(run->num_events), 0};
    for (size_t i = 0; i < run->num_events; i++) {
        const RecordEvent* event = &run->events[i];
        if (event->kind == kind && (!name || strcmp(event->text, name) == 0) &&
            (kind != RECORD_VAL || isfinite(event->values[value]))) {
            curve.points[curve.count++] = report_at_place_(runs, run, event->step, event->values[value]);
        }
    }
    return curve;
}

static void report_add_marks_(Plot* plot, const ReportRuns* runs, int which, RecordKind kind,
                              const char* style) {
    PlotCurve marks = report_event_curve_(runs, which, kind, RECORD_FROM, NULL);
    marks.style = PLOT_MARKS;
    marks.kind = style;
    plot_add(plot, marks);
}

// ---- plots ----

// Returns a plot without curves. `description` has REPORT_TEXT_ bytes and must stay valid.
static Plot report_plot_(const ReportRuns* runs, const ReportRow_* row, int is_wide, char* description) {
    Plot plot;
    const int columns = REPORT_COLUMNS_ALL_ / runs->count;
    memset(&plot, 0, sizeof(plot));
    plot.id = row->id;
    plot.title = row->title;
    plot.unit = row->unit;
    plot.description = description;
    plot.scale = row->scale;
    plot.level = NAN;
    plot.columns = (columns < REPORT_COLUMNS_ ? columns : REPORT_COLUMNS_) / (is_wide ? 1 : 2);
    plot.height = is_wide ? 320 : 190;
    plot.is_percent = row->is_percent;
    memcpy(plot.axes, runs->axes, sizeof(plot.axes));
    description[0] = '\0';
    return plot;
}

// Describes a curve in words: first, last, lowest and highest value.
static void report_describe_(char* description, const ReportRuns* runs, const PlotCurve* curve,
                             const char* what) {
    const size_t used = strlen(description);
    double first = NAN, last = NAN, low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < curve->count; i++) {
        const double y = curve->points[i].y;
        if (isfinite(y)) {
            first = isfinite(first) ? first : y;
            last = y;
            low = fmin(low, y);
            high = fmax(high, y);
        }
    }
    if (isfinite(first)) {
        snprintf(description + used, REPORT_TEXT_ - used,
                 "%s%.200s, %s: first %.5g, last %.5g, lowest %.5g, highest %.5g.", used ? " " : "",
                 runs->names[curve->color], what, first, last, low, high);
    }
}

static void report_open_figure_(FILE* file, const Plot* plot, const char* class_name) {
    fprintf(file, "<figure class=\"card %s\" id=\"plot-%s\">\n<figcaption><h3>", class_name, plot->id);
    plot_text(file, plot->title, strlen(plot->title));
    fprintf(file, "</h3><p>%s</p></figcaption>\n", plot->unit);
}

// Prints the figure if its plot has any number.
static void report_figure_(FILE* file, Plot* plot, const char* class_name, const char* legend) {
    TextBuffer svg;
    text_buffer_open(&svg, plot->title);
    const int is_drawn = plot_print(svg.file, plot);
    char* text = text_buffer_close(&svg);
    if (is_drawn) {
        report_open_figure_(file, plot, class_name);
        fwrite(text, 1, svg.bytes, file);
        fprintf(file, "%s</figure>\n", legend);
    }
    free(text);
}

static int report_has_(const ReportRuns* runs, RecordKind kind) {
    int has = 0;
    for (int i = 0; i < runs->count; i++) {
        has |= record_first(&runs->runs[i], kind) != NULL;
    }
    return has;
}

// Returns the highest of the floors: runs on the same text have the same one.
static double report_floor_(const ReportRuns* runs) {
    double floor = NAN;
    for (int i = 0; i < runs->count; i++) {
        floor = fmax(floor, runs->runs[i].floor);
    }
    return floor;
}

static int report_has_trend_(const ReportRuns* runs) {
    int has = 0;
    for (int i = 0; i < runs->count; i++) {
        has |= runs->runs[i].num_steps >= REPORT_LONG_;
    }
    return has;
}

// Prints an entry of a legend: a line as in the plot, and its meaning.
static void report_key_(FILE* file, const char* kind, int color, const char* text) {
    fprintf(file,
            "<li class=\"c%d\"><svg class=\"key\" viewBox=\"0 0 26 12\" aria-hidden=\"true\"><path "
            "class=\"%s\" d=\"M1 6h24\"/>%s"
            "</svg>%s</li>\n",
            color, kind,
            strcmp(kind, "val") == 0 ? "<g class=\"dots\"><circle cx=\"13\" cy=\"6\" r=\"3.5\"/></g>" : "",
            text);
}

// Prints the legend of the loss.
static void report_loss_legend_(FILE* file, const ReportRuns* runs, const ReportRow_* row, int val_color,
                                double floor) {
    char text[128];
    const int has_trend = report_has_trend_(runs);
    fputs("<ul class=\"legend\">\n", file);
    if (row->trend != REPORT_TREND_) {
        report_key_(file, has_trend ? "raw" : "line", 0, "training, each update");
    }
    if (has_trend) {
        snprintf(text, sizeof(text), "training, mean over %d %% of the run", REPORT_WINDOW_PERCENT);
        report_key_(file, "line", 0, text);
    }
    if (report_has_(runs, RECORD_VAL)) {
        report_key_(file, "val", val_color, "validation");
    }
    if (isfinite(floor)) {
        snprintf(text, sizeof(text), "floor %.4f: no model can do better", floor);
        report_key_(file, "level", 0, text);
    }
    if (report_has_(runs, RECORD_SKIP)) {
        report_key_(file, "skip", 0, "update skipped");
    }
    if (report_has_(runs, RECORD_ROLLBACK)) {
        report_key_(file, "rollback", 0, "rolled back to here");
    }
    fputs("</ul>\n", file);
}

// Drops the points before a part of the run.
static void report_cut_(PlotCurve* curve, const Record* run, double begin) {
    size_t kept = 0;
    for (size_t i = 0; i < curve->count; i++) {
        if (curve->points[i].x[0] >= begin * report_end_(run)->step) {
            curve->points[kept++] = curve->points[i];
        }
    }
    curve->count = kept;
}

// Drops everything before a part of each run, and shortens the axes accordingly.
static void report_begin_(Plot* plot, const ReportRuns* runs, double begin) {
    double first = 1;
    for (int i = 0; i < plot->count; i++) {
        PlotCurve* curve = &plot->curves[i];
        report_cut_(curve, &runs->runs[runs->count > 1 ? curve->color : 0], begin);
        for (int axis = 0; axis < PLOT_AXES && curve->count; axis++) {
            if (plot->axes[axis].last > 0) { // fmin ignores NaN
                first = fmin(first, curve->points[0].x[axis] / plot->axes[axis].last);
            }
        }
    }
    plot->begin = first < 1 ? first : 0;
}

// Prints training and validation loss with the marks, from a part of each run on.
static void report_loss_(FILE* file, const ReportRuns* runs, const ReportRow_* row, double begin) {
    char description[REPORT_TEXT_];
    TextBuffer legend;
    Plot plot = report_plot_(runs, row, 1, description);
    // a single run uses the next color, several use their own
    const int val_color = runs->count == 1;
    plot.level = begin > 0 ? NAN : report_floor_(runs); // it would squeeze the second half
    for (int i = 0; i < runs->count; i++) {
        report_add_marks_(&plot, runs, i, RECORD_SKIP, "skip");
        report_add_marks_(&plot, runs, i, RECORD_ROLLBACK, "rollback");
        report_add_run_(&plot, runs, i, row);
        report_describe_(description, runs, &plot.curves[plot.count - 1], "training loss");
    }
    for (int i = 0; i < runs->count; i++) {
        PlotCurve val = report_event_curve_(runs, i, RECORD_VAL, RECORD_VALUE_LOSS, NULL);
        report_describe_(description, runs, &val, "validation loss");
        val.color += val_color;
        plot_add(&plot, val);
    }
    if (begin > 0) {
        report_begin_(&plot, runs, begin);
    }
    text_buffer_open(&legend, "a legend");
    report_loss_legend_(legend.file, runs, row, val_color, plot.level);
    char* text = text_buffer_close(&legend);
    report_figure_(file, &plot, "wide", text);
    free(text);
}

static void report_row_(FILE* file, const ReportRuns* runs, const ReportRow_* row) {
    char description[REPORT_TEXT_];
    Plot plot = report_plot_(runs, row, 0, description);
    for (int i = 0; i < runs->count; i++) {
        report_add_run_(&plot, runs, i, row);
        report_describe_(description, runs, &plot.curves[plot.count - 1], row->title);
    }
    report_figure_(file, &plot, "", "");
}

// Prints a plot of events, each a dot.
static void report_event_plot_(FILE* file, const ReportRuns* runs, const ReportRow_* row, RecordKind kind,
                               RecordValue value, const char* name) {
    char description[REPORT_TEXT_];
    Plot plot = report_plot_(runs, row, 0, description);
    for (int i = 0; i < runs->count; i++) {
        PlotCurve curve = report_event_curve_(runs, i, kind, value, name);
        curve.label = report_label_(runs, i);
        report_describe_(description, runs, &curve, row->title);
        plot_add(&plot, curve);
    }
    report_figure_(file, &plot, "", "");
}

// Returns the next name of events of this kind after the first `known` ones; NULL if none.
static const char* report_next_name_(const ReportRuns* runs, RecordKind kind, const char* const* names,
                                     int known) {
    for (int i = 0; i < runs->count; i++) {
        for (size_t k = 0; k < runs->runs[i].num_events; k++) {
            const RecordEvent* event = &runs->runs[i].events[k];
            int is_known = event->kind != kind;
            for (int n = 0; n < known && !is_known; n++) {
                is_known = strcmp(names[n], event->text) == 0;
            }
            if (!is_known) {
                return event->text;
            }
        }
    }
    return NULL;
}

// Prints the accuracy of tasks, by mean loss per token if known, else by the sum.
static void report_tasks_(FILE* file, const ReportRuns* runs) {
    const char* names[REPORT_TASKS_];
    int count = 0;
    while (count < REPORT_TASKS_ && (names[count] = report_next_name_(runs, RECORD_TASK, names, count))) {
        char id[16];
        snprintf(id, sizeof(id), "task%d", count);
        RecordValue value = RECORD_ACC;
        for (int i = 0; i < runs->count; i++) {
            for (size_t k = 0; k < runs->runs[i].num_events; k++) {
                const RecordEvent* event = &runs->runs[i].events[k];
                const int is_it = event->kind == RECORD_TASK && strcmp(event->text, names[count]) == 0;
                value = is_it && isfinite(event->values[RECORD_ACC_NORM]) ? RECORD_ACC_NORM : value;
            }
        }
        const ReportRow_ row = {id,
                                names[count],
                                value == RECORD_ACC ? "accuracy" : "accuracy, by loss per token",
                                RECORD_LOSS,
                                -1,
                                PLOT_LINEAR,
                                1,
                                0,
                                0};
        report_event_plot_(file, runs, &row, RECORD_TASK, value, names[count]);
        count++;
    }
}

// Prints the loss of each validation set that has a name.
static void report_sets_(FILE* file, const ReportRuns* runs) {
    const char* names[REPORT_TASKS_];
    int count = 0;
    while (count < REPORT_TASKS_ && (names[count] = report_next_name_(runs, RECORD_SET, names, count))) {
        char id[16];
        snprintf(id, sizeof(id), "set%d", count);
        const ReportRow_ row = {
            id, names[count], "validation loss, logarithmic", RECORD_LOSS, -1, PLOT_LOG, 0, REPORT_RAW_, 0};
        report_event_plot_(file, runs, &row, RECORD_SET, RECORD_VALUE_LOSS, names[count]);
        count++;
    }
}

// Returns the losses of a source in the updates that have some.
static PlotCurve report_source_(const ReportRuns* runs, int which, int source) {
    const Record* run = &runs->runs[which];
    PlotCurve curve = {PLOT_LINE, "line", source % RECORD_RUNS, NULL, report_alloc_(run->num_steps), 0};
    for (size_t i = 0; i < run->num_steps; i++) {
        const double loss = record_source_loss(&run->steps[i], source);
        if (isfinite(loss)) {
            curve.points[curve.count++] = report_point_(runs, &run->steps[i], loss);
        }
    }
    if (curve.count >= REPORT_LONG_) {
        const PlotCurve raw = curve;
        curve = report_trend_(&raw);
        free(raw.points);
    }
    return curve;
}

static void report_source_legend_(FILE* file, const Record* run, int count) {
    fputs("<ul class=\"runs\">\n", file);
    for (int i = 0; i < count; i++) {
        TextBuffer name;
        text_buffer_open(&name, "a legend");
        plot_text(name.file, run->sources[i], strlen(run->sources[i]));
        char* text = text_buffer_close(&name);
        report_key_(file, "line", i % RECORD_RUNS, text);
        free(text);
    }
    fputs("</ul>\n", file);
}

// Prints the losses of the sources of a run's mixture.
static void report_mixture_(FILE* file, const ReportRuns* runs, int which) {
    const Record* run = &runs->runs[which];
    const int count = run->num_sources < PLOT_CURVES ? run->num_sources : PLOT_CURVES;
    char description[REPORT_TEXT_], id[32], title[64];
    TextBuffer legend;
    snprintf(id, sizeof(id), "sources%d", which);
    snprintf(title, sizeof(title), runs->count > 1 ? "Loss by source, run %s" : "Loss by source",
             report_letter(which));
    const ReportRow_ row = {
        id, title, "training, nats per token, logarithmic", RECORD_LOSS, -1, PLOT_LOG, 0, REPORT_RAW_, 0};
    Plot plot = report_plot_(runs, &row, 1, description);
    for (int i = 0; i < count; i++) {
        plot_add(&plot, report_source_(runs, which, i));
    }
    snprintf(description, sizeof(description), "%.200s: training loss of %d sources.", runs->names[which],
             count);
    text_buffer_open(&legend, "a legend");
    report_source_legend_(legend.file, run, count);
    char* text = text_buffer_close(&legend);
    report_figure_(file, &plot, "wide", text);
    free(text);
}

// Prints the cells of a heat map whose load is in level i of REPORT_HEATS_, one shape for all of
// them.
static void report_heat_(FILE* file, const RecordLoads* loads, int i) {
    fprintf(file, "<path opacity=\"%.3g\" d=\"", (double)i / (REPORT_HEATS_ - 1));
    for (int n = 0; n < loads->layers * loads->experts; n++) {
        const double level = fmin(loads->load[n] / REPORT_HOT_, 1) * (REPORT_HEATS_ - 1);
        if ((int)(level + 0.5) == i) {
            fprintf(file, "M%d %dh1v1h-1z", n % loads->experts, n / loads->experts);
        }
    }
    fputs("\"/>\n", file);
}

// Prints the last loads of a run's experts: a row for each layer, a column for each expert.
static void report_loads_(FILE* file, const ReportRuns* runs, int which) {
    const RecordLoads* loads = &runs->runs[which].loads;
    int most = 0, least = 0;
    if (!loads->load || loads->layers * loads->experts == 0) {
        return;
    }
    for (int n = 1; n < loads->layers * loads->experts; n++) {
        most = loads->load[n] > loads->load[most] ? n : most;
        least = loads->load[n] < loads->load[least] ? n : least;
    }
    fprintf(file,
            "<figure class=\"card\" id=\"loads%d\">\n<figcaption><h3>Load of experts%s%s</h3><p>update %.0f; "
            "a row "
            "for each layer, a column for each expert</p></figcaption>\n"
            "<svg class=\"heat\" viewBox=\"0 0 %d %d\" preserveAspectRatio=\"none\" role=\"img\" "
            "aria-label=\"loads of experts\">\n",
            which, runs->count > 1 ? ", run " : "", runs->count > 1 ? report_letter(which) : "", loads->step,
            loads->experts, loads->layers);
    for (int i = 1; i < REPORT_HEATS_; i++) {
        report_heat_(file, loads, i);
    }
    fprintf(
        file,
        "</svg>\n<p class=\"note\">Most: %.3g, expert %d of layer %d; least: %.3g, expert %d of layer %d. "
        "1 is even; white is 0, the darkest is %g or more.</p>\n</figure>\n",
        loads->load[most], most % loads->experts, most / loads->experts, loads->load[least],
        least % loads->experts, least / loads->experts, (double)REPORT_HOT_);
}

void report_plots(FILE* file, const ReportRuns* runs) {
    static const ReportRow_ bpb = {
        "bpb", "Bits per byte", "validation, logarithmic", RECORD_LOSS, -1, PLOT_LOG, 0, REPORT_RAW_, 0};
    fputs("<div class=\"plots\">\n", file);
    report_loss_(file, runs, &REPORT_LOSS_, 0);
    if (report_has_trend_(runs)) {
        report_loss_(file, runs, &REPORT_END_, 0.5);
    }
    report_event_plot_(file, runs, &bpb, RECORD_VAL, RECORD_BPB, NULL);
    report_sets_(file, runs);
    for (int i = 0; i < runs->count; i++) {
        report_mixture_(file, runs, i);
    }
    for (int i = 0; i < REPORT_NUM_ROWS_; i++) {
        report_row_(file, runs, &REPORT_ROWS_[i]);
    }
    for (int i = 0; i < runs->count; i++) {
        report_loads_(file, runs, i);
    }
    report_tasks_(file, runs);
    fputs("</div>\n", file);
}

#endif // PAGE_PLOTS_IMPLEMENTATION

#endif
