/*
curve_svg.h -- draws the loss curve of a run as SVG, readable on light and dark backgrounds: over
the steps or, for --find-lr, over the learning rate.

The training loss is a line through all its points. Each validation loss is a dot, and so is the
rate to take; the floor is a dashed line. Points that are not finite are left out.
*/
#ifndef LLMC_CURVE_SVG_H
#define LLMC_CURVE_SVG_H

#include <stdio.h>

#include "llmc/log/axis.h"
#include "llmc/log/curve_terminal.h"

#ifdef __cplusplus
extern "C" {
#endif

// Writes the picture; nothing without a finite training loss. Other losses need not be finite.
void curve_svg(FILE* file, Curve curve);

// Writes a picture of losses over their learning rates, in rising order and above 0. `mark` is the
// rate to take; NULL: none.
void curve_svg_rates(FILE* file, const CurvePoint* losses, int n, const CurvePoint* mark);

#ifdef __cplusplus
}
#endif

#ifdef CURVE_SVG_IMPLEMENTATION

#include <math.h>

// Sizes of the picture and of the plot in it, in pixels.
enum {
    SVG_WIDTH_ = 760,
    SVG_HEIGHT_ = 400,
    SVG_LEFT_ = 56,
    SVG_RIGHT_ = 740,
    SVG_TOP_ = 44,
    SVG_BOTTOM_ = 356,
    SVG_LABEL_GAP_ = 30 // least distance between two labels of the loss axis
};

// Medium tones, with contrast on white and on black.
#define SVG_GRAY_ "#808890"
#define SVG_TRAIN_ "#2f81f7"
#define SVG_VAL_ "#dd6b20"
#define SVG_FLOOR_ "#2f9e44"

typedef struct {
    Axis step; // from step 0 on; of learning rates logarithmic
    Axis loss; // logarithmic
} SvgRange_;

static int svg_is_drawn_(CurvePoint point) { return isfinite(point.step) && isfinite(point.loss); }

// Extends the range to include the points. Returns how many are finite.
static int svg_include_(SvgRange_* range, const CurvePoint* points, int n) {
    int drawn = 0;
    for (int i = 0; i < n; i++) {
        if (svg_is_drawn_(points[i])) {
            range->loss.low = fmin(range->loss.low, points[i].loss);
            range->loss.high = fmax(range->loss.high, points[i].loss);
            range->step.high = fmax(range->step.high, points[i].step);
            drawn++;
        }
    }
    return drawn;
}

// Completes the range: a logarithmic axis needs 0 < low < high. Losses below a thousandth of the
// highest are drawn at the bottom. A margin of 4 % keeps the curve off the frame.
static void svg_settle_(SvgRange_* range, double floor) {
    if (isfinite(floor) && floor > 0) {
        range->loss.low = fmin(range->loss.low, floor);
        range->loss.high = fmax(range->loss.high, floor);
    }
    range->loss.high = fmin(fmax(range->loss.high, 1e-6), 1e300);
    range->loss.low = fmin(fmax(range->loss.low, range->loss.high / 1000), range->loss.high);
    const double margin = fmax(pow(range->loss.high / range->loss.low, 0.04), 1.01);
    range->loss.low /= margin;
    range->loss.high *= margin;
}

static double svg_x_(const SvgRange_* range, double step) {
    return SVG_LEFT_ + (SVG_RIGHT_ - SVG_LEFT_) * axis_across(&range->step, step);
}

static double svg_y_(const SvgRange_* range, double loss) {
    return SVG_TOP_ + (SVG_BOTTOM_ - SVG_TOP_) * axis_depth(&range->loss, loss);
}

// Draws a grid line with its label left of the plot.
static void svg_loss_label_(FILE* file, const SvgRange_* range, double loss) {
    const double y = svg_y_(range, loss);
    fprintf(file, "<path d=\"M%d %.1fH%d\" stroke=\"" SVG_GRAY_ "\" stroke-opacity=\".3\"/>\n", SVG_LEFT_, y,
            SVG_RIGHT_);
    fprintf(file, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n", SVG_LEFT_ - 8, y + 4, loss);
}

static void svg_loss_axis_(FILE* file, const SvgRange_* range) {
    AxisLabels labels;
    axis_labels(&labels, &range->loss, (double)SVG_LABEL_GAP_ / (SVG_BOTTOM_ - SVG_TOP_));
    for (int i = 0; i < labels.count; i++) {
        svg_loss_label_(file, range, labels.value[i]);
    }
}

static void svg_step_label_(FILE* file, const SvgRange_* range, double step) {
    const double x = svg_x_(range, step);
    fprintf(file, "<path d=\"M%.1f %dv5\" stroke=\"" SVG_GRAY_ "\"/>\n", x, SVG_BOTTOM_);
    fprintf(file,
            range->step.is_log ? "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%g</text>\n"
                               : "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.0f</text>\n",
            x, SVG_BOTTOM_ + 20, step);
}

// Draws at most nine labels, at multiples of 1, 2 or 5 times a power of ten; of learning rates at
// powers of ten.
static void svg_step_axis_(FILE* file, const SvgRange_* range) {
    const double last = range->step.high;
    double unit = 1, first = 0;
    for (int i = 0; last / unit > 8; i++) {
        unit = i % 3 == 1 ? unit / 2 * 5 : unit * 2; // 1 2 5 10 20 50 ...
    }
    if (range->step.is_log) {
        first = pow(10, ceil(log10(range->step.low) - 1e-9));
    }
    for (double step = first; step <= last * (1 + 1e-9);
         step = range->step.is_log ? 10 * step : step + unit) {
        svg_step_label_(file, range, step);
    }
    fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", (SVG_LEFT_ + SVG_RIGHT_) / 2,
            SVG_HEIGHT_ - 6, range->step.is_log ? "learning rate" : "step");
}

// Draws the training loss. A line needs two ends: a single point is drawn to itself, as a dot.
static void svg_train_(FILE* file, const SvgRange_* range, const CurvePoint* points, int n, int drawn) {
    fputs("<polyline fill=\"none\" stroke=\"" SVG_TRAIN_ "\" stroke-width=\"2\" stroke-linejoin=\"round\" "
          "stroke-linecap=\"round\" points=\"",
          file);
    for (int i = 0; i < n; i++) {
        for (int ends = drawn == 1 ? 2 : 1; svg_is_drawn_(points[i]) && ends > 0; ends--) {
            fprintf(file, "%.1f,%.1f ", svg_x_(range, points[i].step), svg_y_(range, points[i].loss));
        }
    }
    fputs("\"/>\n", file);
}

static void svg_val_(FILE* file, const SvgRange_* range, const CurvePoint* points, int n) {
    fputs("<g fill=\"" SVG_VAL_ "\">\n", file);
    for (int i = 0; i < n; i++) {
        if (svg_is_drawn_(points[i])) {
            fprintf(file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>\n", svg_x_(range, points[i].step),
                    svg_y_(range, points[i].loss));
        }
    }
    fputs("</g>\n", file);
}

#define SVG_FLOOR_LINE_ "stroke=\"" SVG_FLOOR_ "\" stroke-width=\"2\" stroke-dasharray=\"7 5\""

// Draws the legend above the plot, where no curve is in the way. `dots` describes the dots; NULL:
// no dots.
static void svg_legend_(FILE* file, const char* dots, double floor) {
    const int y = SVG_TOP_ - 22;
    int x = SVG_LEFT_;
    fprintf(file, "<path d=\"M%d %dh24\" stroke=\"" SVG_TRAIN_ "\" stroke-width=\"2\"/>\n", x, y);
    fprintf(file, "<text x=\"%d\" y=\"%d\">training loss</text>\n", x + 32, y + 4);
    x += 150;
    if (dots) {
        fprintf(file, "<circle cx=\"%d\" cy=\"%d\" r=\"3\" fill=\"" SVG_VAL_ "\"/>\n", x + 12, y);
        fprintf(file, "<text x=\"%d\" y=\"%d\">%s</text>\n", x + 24, y + 4, dots);
        x += 150;
    }
    if (isfinite(floor)) {
        fprintf(file, "<path d=\"M%d %dh24\" " SVG_FLOOR_LINE_ "/>\n", x, y);
        fprintf(file, "<text x=\"%d\" y=\"%d\">floor %.4f: no model can do better</text>\n", x + 32, y + 4,
                floor);
    }
}

static void svg_open_(FILE* file, const char* title) {
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "role=\"img\" font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"" SVG_GRAY_ "\">\n",
            SVG_WIDTH_, SVG_HEIGHT_, SVG_WIDTH_, SVG_HEIGHT_);
    fprintf(file, "<title>%s</title>\n", title);
}

// Draws points on an axis of steps or rates, which the points extend.
static void svg_draw_(FILE* file, SvgRange_ range, Curve curve) {
    const int drawn = svg_include_(&range, curve.train, curve.n_train), is_log = range.step.is_log;
    if (!drawn) {
        return;
    }
    const int has_dots = svg_include_(&range, curve.val, curve.n_val) > 0;
    svg_settle_(&range, curve.floor);
    svg_open_(file, is_log ? "Loss at each learning rate" : "Loss after each step");
    svg_legend_(file, !has_dots ? NULL : is_log ? "the rate to take" : "validation loss", curve.floor);
    svg_loss_axis_(file, &range);
    fprintf(file, "<path d=\"M%d %dV%dH%d\" fill=\"none\" stroke=\"" SVG_GRAY_ "\"/>\n", SVG_LEFT_, SVG_TOP_,
            SVG_BOTTOM_, SVG_RIGHT_);
    svg_step_axis_(file, &range);
    if (isfinite(curve.floor)) {
        const double y = svg_y_(&range, curve.floor);
        fprintf(file, "<path d=\"M%d %.1fH%d\" " SVG_FLOOR_LINE_ "/>\n", SVG_LEFT_, y, SVG_RIGHT_);
    }
    svg_train_(file, &range, curve.train, curve.n_train, drawn);
    svg_val_(file, &range, curve.val, curve.n_val);
    fputs("</svg>\n", file);
}

void curve_svg(FILE* file, Curve curve) {
    const SvgRange_ range = {{0, 1, 0}, {INFINITY, 0, 1}};
    svg_draw_(file, range, curve);
}

void curve_svg_rates(FILE* file, const CurvePoint* losses, int n, const CurvePoint* mark) {
    if (n > 1) {
        const SvgRange_ range = {{losses[0].step, losses[n - 1].step, 1}, {INFINITY, 0, 1}};
        const Curve curve = {losses, mark, n, mark != NULL, NAN};
        svg_draw_(file, range, curve);
    }
}

#endif // CURVE_SVG_IMPLEMENTATION

#endif
