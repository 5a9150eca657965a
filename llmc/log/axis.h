/*
axis.h -- an axis of a plot: where a value is, and which round numbers label it.

Losses have a logarithmic axis: the last tenth above the floor stays visible despite a steep start,
which would squeeze it on a linear one.
*/
#ifndef LLMC_AXIS_H
#define LLMC_AXIS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    double low, high; // values at the bottom and at the top, low < high
    int is_log;       // true: logarithmic, with low above 0
} Axis;

enum { AXIS_LABELS = 24 };
typedef struct {
    double value[AXIS_LABELS], depth[AXIS_LABELS];
    int count;
} AxisLabels;

// Returns 0 at the top to 1 at the bottom; values beyond an end are there.
double axis_depth(const Axis* axis, double value);

// Returns 0 at the left to 1 at the right; values beyond an end are there.
double axis_across(const Axis* axis, double value);

// Returns the smallest of 1, 2 and 5 times a power of ten that is not below `least`.
double axis_unit(double least);

// Sets labels at least `gap` apart, a part of the axis: multiples of one unit; on a logarithmic
// axis with high above 3 low, numbers of one digit.
void axis_labels(AxisLabels* labels, const Axis* axis, double gap);

#ifdef __cplusplus
}
#endif

#ifdef AXIS_IMPLEMENTATION

#include <math.h>

double axis_depth(const Axis* axis, double value) {
    const double depth = axis->is_log ? log(axis->high / fmax(value, axis->low)) / log(axis->high / axis->low)
                                      : (axis->high - value) / (axis->high - axis->low);
    return fmin(fmax(depth, 0), 1);
}

double axis_across(const Axis* axis, double value) {
    const double across = axis->is_log ? log(value / axis->low) / log(axis->high / axis->low)
                                       : (value - axis->low) / (axis->high - axis->low);
    return fmin(fmax(across, 0), 1);
}

double axis_unit(double least) {
    const double power = pow(10, floor(log10(least))), part = least / power;
    return power * (part <= 1 ? 1 : part <= 2 ? 2 : part <= 5 ? 5 : 10);
}

// Adds the multiples of `unit` up to `most` that are far enough from the labels so far.
static void axis_multiples_(AxisLabels* labels, const Axis* axis, double gap, double unit, double most) {
    const double high = fmin(axis->high, most) * (1 + 1e-9);
    for (double k = ceil(axis->low / unit - 1e-9); k * unit <= high && labels->count < AXIS_LABELS; k++) {
        const double depth = axis_depth(axis, k * unit);
        int is_free = 1;
        for (int i = 0; i < labels->count; i++) {
            is_free &= fabs(depth - labels->depth[i]) >= gap * (1 - 1e-9);
        }
        if (is_free) {
            labels->value[labels->count] = k * unit;
            labels->depth[labels->count++] = depth;
        }
    }
}

void axis_labels(AxisLabels* labels, const Axis* axis, double gap) {
    const double low = axis->low, high = axis->high;
    labels->count = 0;
    // a narrow range is nearly linear; labels are nearest to each other at the top
    if (!axis->is_log || high <= 3 * low) {
        const double least = axis->is_log ? high * (1 - pow(low / high, gap)) : gap * (high - low);
        axis_multiples_(labels, axis, gap, axis_unit(least), high);
        return;
    }
    for (double power = pow(10, floor(log10(high))); power > low / 10; power /= 10) {
        axis_multiples_(labels, axis, gap, 5 * power, 10 * power); // the rounder, the earlier
        axis_multiples_(labels, axis, gap, 2 * power, 10 * power);
        axis_multiples_(labels, axis, gap, power, 10 * power);
    }
}

#endif // AXIS_IMPLEMENTATION

#endif
