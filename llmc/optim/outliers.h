/*
outliers.h -- finds steps whose loss or gradient norm is unlike the last 128, and decides if an
update may be made.

    z = (value - mean) / sd      of the window: the last 128 finite values before this one

z is 0 until the window is full, and 0 while sd is 0 (128 equal values give no scale to measure by).
z of a value that is not finite is NaN, and such a value never enters the window: one NaN would make
it useless for 128 steps.

Outliers do enter the window, unclipped. So a spike makes the guard less strict for 128 steps, but a
lasting change of level is accepted soon: if k of the n = 128 values are at the new level, the next
one there has z = sqrt((n - k) / k), so at most n / (1 + limit^2) + 1 updates in a row are skipped
(13 at a limit of 3).

A guard watches loss and norm. If one of them is not finite, the update is always skipped, whatever
the limits.

A run has diverged when too many updates in a row were not finite, or when the mean loss of the
window is too far above its minimum.

All state is plain numbers without pointers: a checkpoint may store it as it is.
*/
#ifndef LLMC_OUTLIERS_H
#define LLMC_OUTLIERS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OUTLIER_WINDOW 128

// The last values. All zeros are an empty window.
typedef struct {
    double values[OUTLIER_WINDOW]; // value i is at i % OUTLIER_WINDOW
    int64_t count;                 // values added so far
} Outlier;

// Returns z. It makes two passes over the window, relative to one of its values, so equal values
// give an sd of exactly 0.
double outlier_z(const Outlier* window, double value);

void outlier_add(Outlier* window, double value);

typedef enum { UPDATE_DO, UPDATE_SKIP_OUTLIER, UPDATE_SKIP_NONFINITE } UpdateVerdict;

typedef struct {
    double loss_z_limit, norm_z_limit; // updates above this are skipped; 0: off
    Outlier losses, norms;
    double loss_z, norm_z; // scores of the last step, for the log
    int consecutive;       // last updates in a row that were not finite
    double best_mean;      // lowest mean loss of a full window; NAN: no window was full yet
} UpdateGuard;

UpdateGuard outliers_open(double loss_z_limit, double norm_z_limit);

// Returns how far the mean loss of the last 128 steps is above its lowest value, in nats; 0 if
// unknown.
double outliers_rise(const UpdateGuard* guard);

// Returns 1 if the loss allows the update: it is finite, and no outlier. Changes nothing.
int outliers_allows_loss(const UpdateGuard* guard, double loss);

// Decides whether to make the update with this loss and this gradient norm (before clipping). Call
// it once a step. Only high values are outliers.
UpdateVerdict outliers_check(UpdateGuard* guard, double loss, double norm);

// Returns a score for the log: NAN until the window is full.
double outliers_shown_z(const UpdateGuard* guard, double z);

// Returns the reason of a skipped update, for the log.
const char* outliers_reason(UpdateVerdict verdict);

// Returns 1 and sets the reason in words if the run has diverged: max_skips updates in a row were
// not finite, or the loss rose by more than max_rise nats (0: no limit).
int outliers_divergence(const UpdateGuard* guard, int max_skips, double max_rise, char reason[256]);

#ifdef __cplusplus
}
#endif

#ifdef OUTLIERS_IMPLEMENTATION

#include <math.h>
#include <stdio.h>
#include <string.h>

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "-ffast-math removes isfinite(): NaN would pass the guard; add -fno-finite-math-only"
#endif

double outlier_z(const Outlier* window, double value) {
    if (!isfinite(value)) {
        return NAN;
    }
    if (window->count < OUTLIER_WINDOW) {
        return 0;
    }
    const double origin = window->values[0];
    double mean = 0, variance = 0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        mean += (window->values[i] - origin) / OUTLIER_WINDOW;
    }
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        const double deviation = window->values[i] - origin - mean;
        variance += deviation * deviation / OUTLIER_WINDOW;
    }
    return variance > 0 ? (value - origin - mean) / sqrt(variance) : 0;
}

void outlier_add(Outlier* window, double value) {
    if (isfinite(value)) {
        window->values[window->count++ % OUTLIER_WINDOW] = value;
    }
}

UpdateGuard outliers_open(double loss_z_limit, double norm_z_limit) {
    UpdateGuard guard;
    memset(&guard, 0, sizeof(guard));
    guard.loss_z_limit = loss_z_limit;
    guard.norm_z_limit = norm_z_limit;
    guard.best_mean = NAN;
    return guard;
}

// Returns the mean of the window, NAN until it is full.
static double outlier_mean_(const Outlier* window) {
    double mean = 0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        mean += window->values[i] / OUTLIER_WINDOW;
    }
    return window->count < OUTLIER_WINDOW ? NAN : mean;
}

double outliers_rise(const UpdateGuard* guard) {
    const double mean = outlier_mean_(&guard->losses);
    return mean > guard->best_mean ? mean - guard->best_mean : 0;
}

static int outliers_is_high_(double z, double limit) { return limit > 0 && z > limit; }

int outliers_allows_loss(const UpdateGuard* guard, double loss) {
    return isfinite(loss) && !outliers_is_high_(outlier_z(&guard->losses, loss), guard->loss_z_limit);
}

UpdateVerdict outliers_check(UpdateGuard* guard, double loss, double norm) {
    guard->loss_z = outlier_z(&guard->losses, loss);
    guard->norm_z = outlier_z(&guard->norms, norm);
    if (!isfinite(loss) || !isfinite(norm)) {
        guard->consecutive++;
        return UPDATE_SKIP_NONFINITE;
    }
    guard->consecutive = 0;
    outlier_add(&guard->losses, loss);
    outlier_add(&guard->norms, norm);
    // the other one if one is NAN
    guard->best_mean = fmin(guard->best_mean, outlier_mean_(&guard->losses));
    return outliers_is_high_(guard->loss_z, guard->loss_z_limit) ||
                   outliers_is_high_(guard->norm_z, guard->norm_z_limit)
               ? UPDATE_SKIP_OUTLIER
               : UPDATE_DO;
}

double outliers_shown_z(const UpdateGuard* guard, double z) {
    return guard->losses.count > OUTLIER_WINDOW ? z : NAN;
}

const char* outliers_reason(UpdateVerdict verdict) {
    switch (verdict) {
    case UPDATE_SKIP_OUTLIER:
        return "loss or gradient norm is an outlier";
    case UPDATE_SKIP_NONFINITE:
        return "loss or gradient norm is not finite";
    case UPDATE_DO:
        break;
    }
    return "";
}

int outliers_divergence(const UpdateGuard* guard, int max_skips, double max_rise, char reason[256]) {
    if (guard->consecutive >= max_skips) {
        snprintf(reason, 256,
                 "the loss or the norm of the gradient was not finite %d times in a row (--max-skips)",
                 guard->consecutive);
        return 1;
    }
    if (max_rise > 0 && outliers_rise(guard) > max_rise) {
        snprintf(reason, 256,
                 "the mean loss of the last %d steps is %.3f above its minimum (--max-loss-rise)",
                 OUTLIER_WINDOW, outliers_rise(guard));
        return 1;
    }
    return 0;
}

#endif // OUTLIERS_IMPLEMENTATION

#endif
