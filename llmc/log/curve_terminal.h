/*
curve_terminal.h -- draws the loss curve of a run with characters, after each step or, of
--find-lr, over the learning rate.

The training loss is a line, averaged over the steps of each column of dots; a character cell holds
2 x 4 braille dots (three heights in plain ASCII, if the locale is not UTF-8). Validation losses, or
the rate to take, are marked o. The floor is a dashed line with its value.
*/
#ifndef LLMC_CURVE_TERMINAL_H
#define LLMC_CURVE_TERMINAL_H

#include <math.h>
#include <stdio.h>

#include "llmc/log/axis.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    double step, loss; // step, or learning rate
} CurvePoint;

// The losses of a run, in the order of steps.
typedef struct {
    const CurvePoint *train, *val; // (n_train), (n_val)
    int n_train, n_val;
    double floor; // NaN: unknown
} Curve;

typedef struct {
    int columns, rows;   // size of the plotting area, in characters
    int is_utf8;         // 0: ASCII
    Axis step;           // from step 0 on; of learning rates logarithmic
    Axis loss;           // logarithmic
    double floor;        // NaN: none
    unsigned char* dots; // (rows, columns) bit 4*x + y is the dot in column x of 2 and row y of 4
    char* marks;         // (rows, columns) characters that cover the dots: o or a letter; 0: none
    double* labels;      // (rows) loss written beside the row; NaN: none
} CurvePlot;

// Draws on `columns` x `rows` characters, labels included. All losses are finite; without training
// losses it draws nothing.
void curve_draw(FILE* file, Curve curve, int columns, int rows);

// Draws the losses over their learning rates, in rising order and above 0, and marks the rate to
// take; `mark` is NULL if there is none. Losses are finite.
void curve_draw_rates(FILE* file, const CurvePoint* losses, int n, const CurvePoint* mark, int columns,
                      int rows);

#ifdef __cplusplus
}
#endif

#ifdef CURVE_TERMINAL_IMPLEMENTATION

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "llmc/base/check.h"

// Columns left of the axis, for the labels of the losses, and right of the plot, for the end of the
// last step's label.
enum { CURVE_LABEL_COLUMNS_ = 8, CURVE_MARGIN_COLUMNS_ = 6, CURVE_LABELS_ = 64 };

// True if the terminal expects UTF-8. The first of these variables that is set decides, as in
// POSIX.
static int curve_is_utf8_(void) {
    const char* names[3] = {"LC_ALL", "LC_CTYPE", "LANG"};
    for (int i = 0; i < 3; i++) {
        const char* locale = getenv(names[i]);
        if (locale && locale[0]) {
            const char* dot = strchr(locale, '.');
            return dot && (strncasecmp(dot, ".utf-8", 6) == 0 || strncasecmp(dot, ".utf8", 5) == 0);
        }
    }
    return 0;
}

static int curve_clamp_(double value, int limit) {
    return value < 0 ? 0 : value > limit - 1 ? limit - 1 : (int)(value + 0.5);
}

// Return the column of dots of a step, and the row of dots of a loss, from the top.
static int curve_x_(const CurvePlot* plot, double step) {
    const int width = 2 * plot->columns;
    return curve_clamp_(axis_across(&plot->step, step) * (width - 1), width);
}

static int curve_y_(const CurvePlot* plot, double loss) {
    const int height = 4 * plot->rows;
    return curve_clamp_(axis_depth(&plot->loss, loss) * (height - 1), height);
}

// Extends the ranges of the axes to include the points.
static void curve_include_(CurvePlot* plot, const CurvePoint* points, int n) {
    for (int i = 0; i < n; i++) {
        plot->loss.low = fmin(plot->loss.low, points[i].loss);
        plot->loss.high = fmax(plot->loss.high, points[i].loss);
        plot->step.high = fmax(plot->step.high, points[i].step);
    }
}

// Completes the range: a logarithmic axis needs 0 < low < high; a loss of 0 is drawn at a
// thousandth of the highest.
static void curve_choose_range_(CurvePlot* plot) {
    Axis* loss = &plot->loss;
    if (plot->floor > 0) {
        loss->low = fmin(loss->low, plot->floor);
        loss->high = fmax(loss->high, plot->floor);
    }
    loss->high = fmax(loss->high, 1e-6);
    loss->low = fmax(loss->low, loss->high / 1000);
    if (loss->high < loss->low * 1.001) {
        loss->high *= 1.01;
        loss->low /= 1.01;
    }
}

// Draws a straight line of dots.
static void curve_line_(CurvePlot* plot, int x0, int y0, int x1, int y1) {
    const int dx = x1 - x0, dy = y1 - y0;
    const int length = abs(dx) > abs(dy) ? abs(dx) : abs(dy);
    for (int i = 0; i <= length; i++) {
        const double t = length ? (double)i / length : 0;
        const int x = x0 + (int)lround(t * dx), y = y0 + (int)lround(t * dy);
        plot->dots[y / 4 * plot->columns + x / 2] |= (unsigned char)(1 << (4 * (x % 2) + y % 4));
    }
}

// Draws the line through the points (in the order of their steps), averaged over each column of
// dots.
static void curve_train_(CurvePlot* plot, const CurvePoint* points, int n) {
    int x_before = -1, y_before = 0;
    for (int i = 0; i < n;) {
        const int x = curve_x_(plot, points[i].step);
        double sum = 0;
        int count = 0;
        for (; i < n && curve_x_(plot, points[i].step) == x; i++, count++) {
            sum += points[i].loss;
        }
        const int y = curve_y_(plot, sum / count);
        curve_line_(plot, x_before < 0 ? x : x_before, x_before < 0 ? y : y_before, x, y);
        x_before = x;
        y_before = y;
    }
}

static void curve_val_(CurvePlot* plot, const CurvePoint* points, int n) {
    for (int i = 0; i < n; i++) {
        const int row = curve_y_(plot, points[i].loss) / 4, column = curve_x_(plot, points[i].step) / 2;
        plot->marks[row * plot->columns + column] = 'o';
    }
}

// Writes the floor's value on its line, at the left, where a falling loss leaves space.
static void curve_floor_(CurvePlot* plot) {
    char text[32];
    snprintf(text, sizeof(text), " floor %.4f ", plot->floor);
    char* row = plot->marks + curve_y_(plot, plot->floor) / 4 * plot->columns;
    for (int i = 0; text[i] && i + 2 < plot->columns; i++) {
        row[i + 2] = text[i];
    }
}

// Labels rows of the axis.
static void curve_labels_(CurvePlot* plot) {
    AxisLabels labels;
    for (int row = 0; row < plot->rows; row++) {
        plot->labels[row] = NAN;
    }
    axis_labels(&labels, &plot->loss, 1.7 / plot->rows); // no two in a row
    for (int i = 0; i < labels.count; i++) {
        plot->labels[curve_y_(plot, labels.value[i]) / 4] = labels.value[i];
    }
}

// Prints one character cell: a mark, or its dots and the floor's dashes.
static void curve_print_cell_(FILE* file, const CurvePlot* plot, int row, int column) {
    const int at = row * plot->columns + column, dots = plot->dots[at];
    const int floor_y = plot->floor > 0 ? curve_y_(plot, plot->floor) : -1;
    const int dash = floor_y >= 0 && floor_y / 4 == row && column % 2 ? 0x11 << floor_y % 4 : 0;
    if (plot->marks[at]) {
        fputc(plot->marks[at], file);
    } else if (!plot->is_utf8) {
        fputc(dots & 0x33 ? (dots & 0xCC ? ':' : '\'') : dots & 0xCC ? '.' : dash ? '-' : ' ', file);
    } else if (dots | dash) { // U+2800 plus the bits of the dots, in Unicode's order
        static const int bit[8] = {0, 1, 2, 6, 3, 4, 5, 7};
        int code = 0;
        for (int i = 0; i < 8; i++) {
            code |= ((dots | dash) >> i & 1) << bit[i];
        }
        fprintf(file, "\xE2%c%c", 0xA0 + (code >> 6), 0x80 + (code & 63));
    } else {
        fputc(' ', file);
    }
}

// Sets the labels of the lower axis, at most one per 12 columns: multiples of a round number, or
// powers of ten. Returns how many.
static int curve_step_labels_(double* labels, const CurvePlot* plot) {
    const double columns = plot->columns / 12.0;
    double unit = 1, factor = 10;
    int count = 0;
    for (int i = 0; plot->step.high / unit > columns; i++) {
        unit = i % 3 == 1 ? unit / 2 * 5 : unit * 2; // 1 2 5 10 20 50 ...
    }
    if (!plot->step.is_log) {
        for (double label = 0; label <= plot->step.high && count < CURVE_LABELS_; label += unit) {
            labels[count++] = label;
        }
        return count;
    }
    while (log10(plot->step.high / plot->step.low) / log10(factor) > columns) {
        factor *= 10;
    }
    for (double label = pow(10, ceil(log10(plot->step.low))); label <= plot->step.high * (1 + 1e-9);
         label *= factor) {
        if (count < CURVE_LABELS_) {
            labels[count++] = label;
        }
    }
    return count;
}

// Prints the axis below the plot, then its labels.
static void curve_print_steps_(FILE* file, const CurvePlot* plot) {
    double labels[CURVE_LABELS_];
    const int count = curve_step_labels_(labels, plot);
    int next = 0, used = 0;
    fprintf(file, "%*s%s", CURVE_LABEL_COLUMNS_, "", plot->is_utf8 ? "└" : "+");
    for (int column = 0; column < plot->columns; column++) {
        const int is_label = next < count && column == curve_x_(plot, labels[next]) / 2;
        next += is_label;
        fputs(!plot->is_utf8 ? (is_label ? "+" : "-") : is_label ? "┬" : "─", file);
    }
    fprintf(file, "\n%*s", CURVE_LABEL_COLUMNS_ + 1, "");
    for (int i = 0; i < count; i++) {
        const int column = curve_x_(plot, labels[i]) / 2;
        used += fprintf(file, plot->step.is_log ? "%*s%g" : "%*s%.0f", column - used, "", labels[i]);
    }
    fputc('\n', file);
}

static void curve_print_(FILE* file, const CurvePlot* plot) {
    fprintf(file, "%*s %s\n", CURVE_LABEL_COLUMNS_, "loss",
            plot->step.is_log ? "at each learning rate (line: training, o: the rate to take)"
                              : "after each step (line: training, o: validation)");
    for (int row = 0; row < plot->rows; row++) {
        if (isnan(plot->labels[row])) {
            fprintf(file, "%*s%s", CURVE_LABEL_COLUMNS_, "", plot->is_utf8 ? "│" : "|");
        } else {
            fprintf(file, "%*.4g %s", CURVE_LABEL_COLUMNS_ - 1, plot->labels[row], plot->is_utf8 ? "┤" : "+");
        }
        for (int column = 0; column < plot->columns; column++) {
            curve_print_cell_(file, plot, row, column);
        }
        fputc('\n', file);
    }
    curve_print_steps_(file, plot);
}

// Draws points on axes that start with `step`, a range that the points extend.
static void curve_draw_(FILE* file, CurvePlot plot, Curve curve) {
    plot.is_utf8 = curve_is_utf8_();
    plot.floor = curve.floor;
    plot.loss = (Axis){curve.train[0].loss, curve.train[0].loss, 1};
    curve_include_(&plot, curve.train, curve.n_train);
    curve_include_(&plot, curve.val, curve.n_val);
    curve_choose_range_(&plot);
    const size_t cells = (size_t)plot.rows * (size_t)plot.columns;
    plot.dots = (unsigned char*)check_alloc(cells, 1, "loss curve");
    plot.marks = (char*)check_alloc(cells, 1, "loss curve");
    plot.labels = (double*)check_alloc((size_t)plot.rows, sizeof(double), "loss curve");
    curve_train_(&plot, curve.train, curve.n_train);
    curve_labels_(&plot);
    if (plot.floor > 0) {
        curve_floor_(&plot);
    }
    curve_val_(&plot, curve.val, curve.n_val);
    curve_print_(file, &plot);
    free(plot.dots);
    free(plot.marks);
    free(plot.labels);
}

// Returns an empty plot of this size in characters, labels included.
static CurvePlot curve_of_size_(Axis step, int columns, int rows) {
    const int wide = columns - CURVE_LABEL_COLUMNS_ - CURVE_MARGIN_COLUMNS_ - 1, high = rows - 3;
    CurvePlot plot;
    memset(&plot, 0, sizeof(plot));
    plot.columns = wide < 12 ? 12 : wide;
    plot.rows = high < 4 ? 4 : high;
    plot.step = step;
    return plot;
}

void curve_draw(FILE* file, Curve curve, int columns, int rows) {
    const Axis steps = {0, 1, 0};
    if (curve.n_train > 0) {
        curve_draw_(file, curve_of_size_(steps, columns, rows), curve);
    }
}

void curve_draw_rates(FILE* file, const CurvePoint* losses, int n, const CurvePoint* mark, int columns,
                      int rows) {
    if (n > 1) {
        const Axis rates = {losses[0].step, losses[n - 1].step, 1};
        const Curve curve = {losses, mark, n, mark != NULL, NAN};
        curve_draw_(file, curve_of_size_(rates, columns, rows), curve);
    }
}

#endif // CURVE_TERMINAL_IMPLEMENTATION

#endif
