/*
plot.h -- one plot of a report: an SVG element as wide as its container, readable at any width.

Curves are in a nested SVG that stretches; text, dots and grid lines are positioned in percent, so
they keep their size. A curve of any number of points becomes at most two points per column: the
lowest and the highest there.

The x axis is drawn once for each of PLOT_AXES, in groups of the classes x0, x1, ...; the page's
style shows one of them. All y values are finite or NaN; NaN leaves a gap. Values outside the range
are drawn at its edge.
*/
#ifndef LLMC_PLOT_H
#define LLMC_PLOT_H

#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { PLOT_AXES = 3, PLOT_CURVES = 64 };

typedef struct {
    double x[PLOT_AXES], y;
} PlotPoint;

typedef enum {
    PLOT_RAW,  // every value, faint
    PLOT_LINE, // trend
    PLOT_DOTS, // few values, each a dot with its number
    PLOT_MARKS // events: only x matters
} PlotStyle;

typedef struct {
    PlotStyle style;
    const char* kind;  // CSS class: how the page's style draws it
    int color;         // CSS class c0, c1, ...
    const char* label; // at its end; NULL: none
    PlotPoint* points; // in order of x; plot_print frees them
    size_t count;
} PlotCurve;

typedef enum { PLOT_LINEAR, PLOT_FROM_ZERO, PLOT_LOG } PlotScale;

typedef struct {
    double last;      // right edge; 0: nothing to draw
    const char* name; // e.g. "updates"
} PlotAxis;

typedef struct {
    const char *id, *title, *unit;
    const char* description; // for readers who cannot see it
    PlotScale scale;
    double begin;                    // part of each axis that is left out, from 0 to below 1
    double level;                    // horizontal line; NaN: none
    int columns, height, is_percent; // columns of curves; height in pixels; values are fractions
    PlotAxis axes[PLOT_AXES];
    PlotCurve curves[PLOT_CURVES];
    int count;
} Plot;

// Adds a curve, and takes over its points.
void plot_add(Plot* plot, PlotCurve curve);

// Prints the plot and frees the points. Prints nothing, and returns 0, if it has no finite value.
int plot_print(FILE* file, Plot* plot);

// Prints text as XML: escapes markup, and replaces what XML does not allow by U+FFFD.
void plot_text(FILE* file, const char* text, size_t bytes);

#ifdef __cplusplus
}
#endif

#ifdef PLOT_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/json.h"
#include "llmc/base/number_text.h"
#include "llmc/log/axis.h"

enum {
    PLOT_UNITS_ = 600,       // height of the nested picture
    PLOT_GAP_ = 36,          // least distance between two labels of the y axis, in pixels
    PLOT_X_TICKS_ = 6,       // about; few enough for a phone
    PLOT_DOTS_MAX_ = 40,     // most dots of a curve; more are only a line
    PLOT_LABEL_HEIGHT_ = 13, // of the letters at the ends of curves
    PLOT_QUANTILES_ = 4096   // values of a curve that determine its range
};

void plot_add(Plot* plot, PlotCurve curve) {
    assert(plot->count < PLOT_CURVES);
    plot->curves[plot->count++] = curve;
}

// True for characters that XML allows. U+FFFE and U+FFFF are EF BF BE and EF BF BF.
static int plot_is_xml_(const char* text, size_t length) {
    const unsigned char* c = (const unsigned char*)text;
    const int is_noncharacter = length == 3 && c[0] == 0xEF && c[1] == 0xBF && c[2] >= 0xBE;
    return length > 1 ? !is_noncharacter : length == 1 && (c[0] >= ' ' || c[0] == '\t' || c[0] == '\n');
}

void plot_text(FILE* file, const char* text, size_t bytes) {
    for (size_t i = 0, length; i < bytes; i += length ? length : 1) {
        length = json_utf8_length((const unsigned char*)text + i, bytes - i);
        const char* name = text[i] == '<'   ? "&lt;"
                           : text[i] == '>' ? "&gt;"
                           : text[i] == '&' ? "&amp;"
                                            : NULL;
        if (name || text[i] == '"') {
            fputs(name ? name : "&quot;", file);
        } else if (plot_is_xml_(text + i, length)) {
            fwrite(text + i, 1, length, file);
        } else {
            fputs("\xEF\xBF\xBD", file);
        }
    }
}

// ---- the range ----

static int plot_is_drawn_(const Plot* plot, const PlotPoint* point) {
    return isfinite(point->y) && (plot->scale != PLOT_LOG || point->y > 0) &&
           point->x[0] >= plot->begin * plot->axes[0].last;
}

static int plot_compare_(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Extends the range by all values of a curve, or by a raw curve without its outermost 0.2 %, which
// may be far off.
static void plot_include_(Axis* range, const Plot* plot, const PlotCurve* curve) {
    double values[PLOT_QUANTILES_];
    size_t n = 0;
    const size_t stride = curve->style == PLOT_RAW ? 1 + curve->count / PLOT_QUANTILES_ : 1;
    for (size_t i = 0; i < curve->count; i += stride) {
        const PlotPoint* point = &curve->points[i];
        if (!plot_is_drawn_(plot, point)) {
            continue;
        }
        if (curve->style == PLOT_RAW && n < PLOT_QUANTILES_) {
            values[n++] = point->y;
        } else {
            range->low = fmin(range->low, point->y);
            range->high = fmax(range->high, point->y);
        }
    }
    if (n) {
        qsort(values, n, sizeof(double), plot_compare_);
        range->low = fmin(range->low, values[n / 500]);
        range->high = fmax(range->high, values[n - 1 - n / 500]);
    }
}

static void plot_settle_(Axis* range, const Plot* plot) {
    const PlotScale scale = plot->scale;
    range->high = fmin(range->high, 1e300);
    if (scale == PLOT_FROM_ZERO && (plot->is_percent ? range->high < 0.01 : range->high == 0)) {
        range->high = plot->is_percent ? 0.01 : 1; // almost zero should look like almost zero
    }
    if (scale == PLOT_LOG) {
        range->low = fmax(range->low, range->high * 1e-9);
        const double margin = fmax(pow(range->high / range->low, 0.05), 1.005);
        range->low /= margin;
        range->high *= margin;
        return;
    }
    range->low = scale == PLOT_FROM_ZERO ? fmin(range->low, 0) : range->low;
    const double span = range->high - range->low;
    const double margin = span > 0 ? 0.06 * span : fmax(0.1 * fabs(range->high), 1e-12);
    range->high += margin;
    range->low -= scale == PLOT_FROM_ZERO && range->low >= 0 ? 0 : margin;
}

// Finds the range. Returns 0 without a finite value.
static int plot_range_(Axis* range, const Plot* plot) {
    *range = (Axis){INFINITY, -INFINITY, plot->scale == PLOT_LOG};
    for (int i = 0; i < plot->count; i++) {
        if (plot->curves[i].style != PLOT_MARKS) {
            plot_include_(range, plot, &plot->curves[i]);
        }
    }
    if (!(range->low <= range->high)) {
        return 0;
    }
    if (isfinite(plot->level)) {
        range->low = fmin(range->low, plot->level);
        range->high = fmax(range->high, plot->level);
    }
    plot_settle_(range, plot);
    return 1;
}

// Returns 0 at the left to 1 at the right.
static double plot_x_(const Plot* plot, int axis, double x) {
    const double last = plot->axes[axis].last, first = plot->begin * last;
    return (x - first) / (last - first);
}

// ---- the grid ----

static void plot_tick_(FILE* file, const Plot* plot, const Axis* range, double value) {
    char text[NUMBER_BYTES];
    const double y = 100 * axis_depth(range, value);
    number_short((plot->is_percent ? 100 * value : value) + 0.0, text); // + 0.0 avoids -0
    fprintf(
        file,
        "<line x2=\"100%%\" y1=\"%.2f%%\" y2=\"%.2f%%\"/><text x=\"-8\" y=\"%.2f%%\" dy=\"4\">%s%s</text>\n",
        y, y, y, text, plot->is_percent ? "%" : "");
}

static void plot_y_axis_(FILE* file, const Plot* plot, const Axis* range) {
    AxisLabels labels;
    axis_labels(&labels, range, (double)PLOT_GAP_ / plot->height);
    fputs("<g class=\"y\">", file);
    for (int i = 0; i < labels.count; i++) {
        plot_tick_(file, plot, range, labels.value[i]);
    }
    fputs("</g>\n", file);
}

static void plot_x_axis_(FILE* file, const Plot* plot, int axis) {
    char text[NUMBER_BYTES];
    const double last = plot->axes[axis].last, first = plot->begin * last;
    const double unit = axis_unit((last - first) / PLOT_X_TICKS_);
    fputs("<g class=\"ticks\">", file);
    for (double k = fmax(ceil(first / unit - 1e-9), 0.0) + 0.0; k * unit <= last * (1 + 1e-9); k++) {
        const double x = 100 * plot_x_(plot, axis, k * unit);
        fprintf(file, "<text x=\"%.2f%%\" y=\"100%%\" dy=\"18\">%s</text>\n", x,
                number_short(k * unit, text));
    }
    fprintf(file, "<text class=\"name\" x=\"100%%\" y=\"100%%\" dy=\"34\">%s</text></g>\n",
            plot->axes[axis].name);
}

// ---- curves ----

// Path in whole units, relative, which keeps it short.
typedef struct {
    FILE* file;
    int x, y;     // current point
    int is_begun; // since the last gap
    int ahead;    // columns of a level part that is not printed yet
} PlotPath_;

static void plot_pair_(FILE* file, int dx, int dy) {
    fprintf(file, "%s%d%s%d", dx < 0 ? "" : " ", dx, dy < 0 ? "" : " ", dy);
}

static void plot_flush_(PlotPath_* path) {
    if (path->ahead) {
        plot_pair_(path->file, path->ahead, 0);
        path->ahead = 0;
    }
}

static void plot_go_(PlotPath_* path, int x, int y) {
    if (!path->is_begun) {
        fprintf(path->file, "M%d %dl0 0", x, y); // a single point becomes a dot
    } else if (y == path->y) {
        path->ahead += x - path->x;
    } else {
        plot_flush_(path);
        plot_pair_(path->file, x - path->x, y - path->y);
    }
    path->x = x;
    path->y = y;
    path->is_begun = 1;
}

// Values in one column.
typedef struct {
    int column, is_low_first;
    double low, high, last;
    int count;
} PlotColumn_;

static void plot_column_ends_(PlotPath_* path, const Axis* range, const PlotCurve* curve,
                              const PlotColumn_* column) {
    if (!column->count) {
        return;
    }
    if (curve->style != PLOT_RAW) {
        plot_go_(path, column->column, (int)lround(PLOT_UNITS_ * axis_depth(range, column->last)));
        return;
    }
    const int low = (int)lround(PLOT_UNITS_ * axis_depth(range, column->low));
    const int high = (int)lround(PLOT_UNITS_ * axis_depth(range, column->high));
    plot_go_(path, column->column, column->is_low_first ? low : high);
    if (low != high) {
        plot_go_(path, column->column, column->is_low_first ? high : low);
    }
}

static void plot_column_add_(PlotColumn_* column, double y) {
    if (!column->count || y < column->low) {
        column->low = y;
        column->is_low_first = 0;
    }
    if (!column->count || y > column->high) {
        column->high = y;
        column->is_low_first = column->count > 0;
    }
    column->last = y;
    column->count++;
}

// Prints the path of a curve on one of the axes.
static void plot_path_(FILE* file, const Plot* plot, const Axis* range, const PlotCurve* curve, int axis) {
    PlotPath_ path = {file, 0, 0, 0, 0};
    PlotColumn_ column = {-1, 0, 0, 0, 0, 0};
    for (size_t i = 0; i < curve->count; i++) {
        const PlotPoint* point = &curve->points[i];
        const double x = plot_x_(plot, axis, point->x[axis]);
        if (!(x >= 0 && x <= 1)) {
            continue;
        }
        const int is_gap = !isfinite(point->y), at = (int)lround(x * plot->columns);
        if (is_gap || at != column.column) {
            plot_column_ends_(&path, range, curve, &column);
            column.count = 0;
            column.column = at;
        }
        if (is_gap) {
            plot_flush_(&path);
            path.is_begun = 0;
        } else {
            plot_column_add_(&column, point->y);
        }
    }
    plot_column_ends_(&path, range, curve, &column);
    plot_flush_(&path);
}

// Prints marks, lines from top to bottom, at most one per column.
static void plot_marks_(FILE* file, const Plot* plot, const PlotCurve* curve, int axis) {
    int before = -1;
    for (size_t i = 0; i < curve->count; i++) {
        const double x = plot_x_(plot, axis, curve->points[i].x[axis]);
        const int column = (int)lround(x * plot->columns);
        if (x >= 0 && x <= 1 && column != before) {
            fprintf(file, "M%d 0V%d", column, PLOT_UNITS_);
            before = column;
        }
    }
}

// True if a curve has the same places on this axis as on the first, as when every step has the same
// number of tokens.
static int plot_is_as_first_(const Plot* plot, const PlotCurve* curve, int axis) {
    for (size_t i = 0; i < curve->count; i++) {
        const PlotPoint* point = &curve->points[i];
        if (!(fabs(plot_x_(plot, axis, point->x[axis]) - plot_x_(plot, 0, point->x[0])) < 1e-6)) {
            return 0;
        }
    }
    return 1;
}

static void plot_curve_(FILE* file, const Plot* plot, const Axis* range, int which, int axis) {
    const PlotCurve* curve = &plot->curves[which];
    if (axis > 0 && plot_is_as_first_(plot, curve, axis)) {
        fprintf(file, "<use href=\"#%s-%d\"/>\n", plot->id, which);
        return;
    }
    fprintf(file, "<path class=\"%s c%d\"", curve->kind, curve->color);
    fprintf(file, axis == 0 ? " id=\"%s-%d\" d=\"" : " d=\"", plot->id, which);
    if (curve->style == PLOT_MARKS) {
        plot_marks_(file, plot, curve, axis);
    } else {
        plot_path_(file, plot, range, curve, axis);
    }
    fputs("\"/>\n", file);
}

// Prints dots outside of the part that stretches, so they keep their shape. Each has a tooltip with
// its numbers.
static void plot_dots_(FILE* file, const Plot* plot, const Axis* range, const PlotCurve* curve, int axis) {
    char place[NUMBER_BYTES];
    if (curve->style != PLOT_DOTS || curve->count > PLOT_DOTS_MAX_) {
        return;
    }
    fprintf(file, "<g class=\"dots c%d\">", curve->color);
    for (size_t i = 0; i < curve->count; i++) {
        const PlotPoint* point = &curve->points[i];
        const double x = plot_x_(plot, axis, point->x[axis]);
        if (x >= 0 && x <= 1 && isfinite(point->y)) {
            fprintf(file,
                    "<circle cx=\"%.2f%%\" cy=\"%.2f%%\" r=\"3.5\"><title>%.*f%s at %s %s</title></circle>\n",
                    100 * x, 100 * axis_depth(range, point->y), plot->is_percent ? 2 : 4,
                    plot->is_percent ? 100 * point->y : point->y, plot->is_percent ? "%" : "",
                    number_grouped(point->x[0], place), plot->axes[0].name);
        }
    }
    fputs("</g>\n", file);
}

// Letter at the end of a curve.
typedef struct {
    double x, y; // in percent, and in pixels
    const PlotCurve* curve;
} PlotLabel_;

// Sets the labels of an axis, in order of y. Returns how many.
static int plot_labels_(PlotLabel_* labels, const Plot* plot, const Axis* range, int axis) {
    int count = 0;
    for (int i = 0; i < plot->count; i++) {
        const PlotCurve* curve = &plot->curves[i];
        size_t last = curve->count;
        while (last && !isfinite(curve->points[last - 1].y)) {
            last--;
        }
        const double x = last ? 100 * plot_x_(plot, axis, curve->points[last - 1].x[axis]) : NAN;
        if (!curve->label || !(x > 1 && x <= 100)) {
            continue;
        }
        const PlotLabel_ label = {x, plot->height * axis_depth(range, curve->points[last - 1].y), curve};
        int at = count++;
        for (; at > 0 && labels[at - 1].y > label.y; at--) {
            labels[at] = labels[at - 1];
        }
        labels[at] = label;
    }
    return count;
}

// True if two labels would overlap.
static int plot_are_near_(const PlotLabel_* a, const PlotLabel_* b) {
    return fabs(a->x - b->x) < 4 && fabs(a->y - b->y) < PLOT_LABEL_HEIGHT_;
}

// Moves overlapping labels apart: up from the bottom, then down from the top.
static void plot_spread_(PlotLabel_* labels, int count, int height) {
    for (int i = count - 1; i >= 0; i--) {
        labels[i].y = fmin(labels[i].y, height);
        for (int k = i + 1; k < count; k++) {
            labels[i].y =
                plot_are_near_(&labels[i], &labels[k]) ? labels[k].y - PLOT_LABEL_HEIGHT_ : labels[i].y;
        }
    }
    for (int i = 0; i < count; i++) {
        labels[i].y = fmax(labels[i].y, 4);
        for (int k = 0; k < i; k++) {
            labels[i].y =
                plot_are_near_(&labels[i], &labels[k]) ? labels[k].y + PLOT_LABEL_HEIGHT_ : labels[i].y;
        }
    }
}

static void plot_print_labels_(FILE* file, const Plot* plot, const Axis* range, int axis) {
    PlotLabel_ labels[PLOT_CURVES];
    const int count = plot_labels_(labels, plot, range, axis);
    plot_spread_(labels, count, plot->height);
    for (int i = 0; i < count; i++) {
        fprintf(file, "<text class=\"end c%d\" x=\"%.2f%%\" y=\"%.1f\" dx=\"6\" dy=\"4\">%s</text>\n",
                labels[i].curve->color, labels[i].x, labels[i].y, labels[i].curve->label);
    }
}

// Prints everything that depends on the choice of x.
static void plot_axis_(FILE* file, const Plot* plot, const Axis* range, int axis) {
    fprintf(file, "<g class=\"x%d\">\n", axis);
    plot_x_axis_(file, plot, axis);
    fprintf(file,
            "<svg viewBox=\"0 0 %d %d\" preserveAspectRatio=\"none\" width=\"100%%\" height=\"100%%\">\n",
            plot->columns, PLOT_UNITS_);
    for (int i = 0; i < plot->count; i++) {
        plot_curve_(file, plot, range, i, axis);
    }
    fputs("</svg>\n", file);
    for (int i = 0; i < plot->count; i++) {
        plot_dots_(file, plot, range, &plot->curves[i], axis);
    }
    plot_print_labels_(file, plot, range, axis);
    fputs("</g>\n", file);
}

static void plot_open_(FILE* file, const Plot* plot) {
    fprintf(file, "<svg class=\"plot\" style=\"height:%dpx\" role=\"img\" aria-labelledby=\"%s-t %s-d\">\n",
            plot->height, plot->id, plot->id);
    fprintf(file, "<title id=\"%s-t\">", plot->id);
    plot_text(file, plot->title, strlen(plot->title));
    fprintf(file, "</title><desc id=\"%s-d\">", plot->id);
    plot_text(file, plot->description, strlen(plot->description));
    fputs("</desc>\n", file);
}

int plot_print(FILE* file, Plot* plot) {
    Axis range;
    const int is_drawn = plot->axes[0].last > 0 && plot_range_(&range, plot);
    if (is_drawn) {
        plot_open_(file, plot);
        plot_y_axis_(file, plot, &range);
        if (isfinite(plot->level)) {
            const double y = 100 * axis_depth(&range, plot->level);
            fprintf(file, "<line class=\"level\" x2=\"100%%\" y1=\"%.2f%%\" y2=\"%.2f%%\"/>\n", y, y);
        }
        for (int axis = 0; axis < PLOT_AXES; axis++) {
            if (plot->axes[axis].last > 0) {
                plot_axis_(file, plot, &range, axis);
            }
        }
        fputs("</svg>\n", file);
    }
    for (int i = 0; i < plot->count; i++) {
        free(plot->curves[i].points);
    }
    plot->count = 0;
    return is_drawn;
}

#endif // PLOT_IMPLEMENTATION

#endif
