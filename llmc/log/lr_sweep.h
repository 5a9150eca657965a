/*
lr_sweep.h -- --find-lr: the training loss while the learning rate rises from step to step, and the
rate that a run should take.

The loss is smoothed over 17 steps. The rate to take is a third below the rate with the lowest loss;
in runs of more than 1000 steps it falls as 1 / steps, down to the rate of a long run. Both suit the
runs in dev/doc/training.md.
*/
#ifndef LLMC_LR_SWEEP_H
#define LLMC_LR_SWEEP_H

#include <stdint.h>
#include <stdio.h>

#include "llmc/log/curve_terminal.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { LR_SWEEP_UPDATES = 150 };

typedef struct {
    CurvePoint point[LR_SWEEP_UPDATES]; // rate and loss of each step
    int count;
    int64_t updates; // length of the run that the rate is for
    double long_run; // rate of --lr auto for a long one
} LrSweep;

// Adds a step with its rate, above the one before, and its loss, which may be NaN.
void lr_sweep_add(LrSweep* s, double rate, double loss);

// Returns true if the rates are too high: the loss is 1 above its lowest, or not finite.
int lr_sweep_is_over(const LrSweep* s);

// Returns the rate with the lowest loss; NAN if the loss did not fall.
double lr_sweep_lowest(const LrSweep* s);

// Returns the rate to take, for a run of `updates` steps; NAN if the loss did not fall.
double lr_sweep_rate(const LrSweep* s);

// Draws the smoothed losses over their rates, in characters and as SVG.
void lr_sweep_draw(FILE* file, const LrSweep* s);
void lr_sweep_svg(FILE* file, const LrSweep* s);

#ifdef __cplusplus
}
#endif

#ifdef LR_SWEEP_IMPLEMENTATION

#include <math.h>
#include <stddef.h>

#include "llmc/log/curve_svg.h"

enum {
    LR_SWEEP_SIDE_ = 8, // points on each side of a smoothed one
    LR_SWEEP_COLUMNS_ = 79,
    LR_SWEEP_ROWS_ = 16
};

void lr_sweep_add(LrSweep* s, double rate, double loss) {
    if (s->count < LR_SWEEP_UPDATES) {
        s->point[s->count].step = rate;
        s->point[s->count++].loss = loss;
    }
}

// Sets (count) points to means of their neighbors, without losses that are not finite. Returns how
// many there are.
static int lr_sweep_smooth_(CurvePoint* smooth, const LrSweep* s) {
    int count = s->count;
    while (count > 0 && !isfinite(s->point[count - 1].loss)) {
        count--;
    }
    for (int i = 0; i < count; i++) {
        double sum = 0;
        int n = 0;
        for (int j = i - LR_SWEEP_SIDE_; j <= i + LR_SWEEP_SIDE_; j++) {
            if (0 <= j && j < count && isfinite(s->point[j].loss)) {
                sum += s->point[j].loss;
                n++;
            }
        }
        smooth[i].step = s->point[i].step;
        smooth[i].loss = sum / n;
    }
    return count;
}

// Returns the index of the lowest loss from `first` to before `end`.
static int lr_sweep_lowest_(const CurvePoint* smooth, int first, int end) {
    int lowest = first;
    for (int i = first; i < end; i++) {
        lowest = smooth[i].loss < smooth[lowest].loss ? i : lowest;
    }
    return lowest;
}

int lr_sweep_is_over(const LrSweep* s) {
    CurvePoint smooth[LR_SWEEP_UPDATES];
    const int n = lr_sweep_smooth_(smooth, s);
    return n < s->count || (n > 0 && smooth[n - 1].loss > smooth[lr_sweep_lowest_(smooth, 0, n)].loss + 1);
}

double lr_sweep_lowest(const LrSweep* s) {
    CurvePoint smooth[LR_SWEEP_UPDATES];
    const int n = lr_sweep_smooth_(smooth, s), first = LR_SWEEP_SIDE_, end = n - LR_SWEEP_SIDE_;
    const int lowest = end > first ? lr_sweep_lowest_(smooth, first, end) : first;
    return lowest > first ? smooth[lowest].step : NAN;
}

double lr_sweep_rate(const LrSweep* s) {
    const double rate = 2.0 / 3 * lr_sweep_lowest(s);
    return isnan(rate) ? NAN : fmin(fmax(rate * 1000 / (double)s->updates, s->long_run), rate);
}

// Sets the smoothed losses, and the one nearest below the rate to take. Returns how many there are.
static int lr_sweep_points_(CurvePoint* smooth, CurvePoint* mark, const LrSweep* s) {
    const int n = lr_sweep_smooth_(smooth, s);
    const double rate = lr_sweep_rate(s);
    *mark = smooth[0];
    for (int i = 0; i < n && smooth[i].step <= rate; i++) {
        *mark = smooth[i];
    }
    return n;
}

void lr_sweep_draw(FILE* file, const LrSweep* s) {
    CurvePoint smooth[LR_SWEEP_UPDATES], mark;
    const int n = lr_sweep_points_(smooth, &mark, s);
    curve_draw_rates(file, smooth, n, isfinite(lr_sweep_rate(s)) ? &mark : NULL, LR_SWEEP_COLUMNS_,
                     LR_SWEEP_ROWS_);
}

void lr_sweep_svg(FILE* file, const LrSweep* s) {
    CurvePoint smooth[LR_SWEEP_UPDATES], mark;
    const int n = lr_sweep_points_(smooth, &mark, s);
    curve_svg_rates(file, smooth, n, isfinite(lr_sweep_rate(s)) ? &mark : NULL);
}

#endif // LR_SWEEP_IMPLEMENTATION

#endif
