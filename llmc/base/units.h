/*
units.h -- numbers with the unit that people would choose: 8.03B, 989 TFLOP/s, 3.2 days.
*/
#ifndef LLMC_UNITS_H
#define LLMC_UNITS_H

#include <stdio.h>

typedef struct {
    char text[32];
} UnitsText;

// Returns a number of parameters: "0.02M", "124.44M", "8.03B".
static inline UnitsText units_parameters(double count) {
    UnitsText t;
    snprintf(t.text, sizeof(t.text), "%.2f%s", count / (count < 1e9 ? 1e6 : 1e9), count < 1e9 ? "M" : "B");
    return t;
}

// Returns a speed of `per_s` operations ("FLOP") or bytes ("B") a second: "270 GFLOP/s".
static inline UnitsText units_rate(double per_s, const char* what) {
    const double scaled = per_s < 1e12 ? per_s * 1e-9 : per_s * 1e-12;
    UnitsText t;
    snprintf(t.text, sizeof(t.text), "%.*f %c%s/s", scaled < 100, scaled, per_s < 1e12 ? 'G' : 'T', what);
    return t;
}

// Returns a duration with two or three digits: "42 s", "3.2 minutes", "15.1 hours".
static inline UnitsText units_time(double s) {
    UnitsText t;
    if (s < 120) {
        snprintf(t.text, sizeof(t.text), "%.*f s", s < 10, s);
    } else {
        const double unit = s < 2 * 3600 ? 60 : s < 48 * 3600 ? 3600 : 24 * 3600;
        snprintf(t.text, sizeof(t.text), "%.1f %s", s / unit,
                 s < 2 * 3600    ? "minutes"
                 : s < 48 * 3600 ? "hours"
                                 : "days");
    }
    return t;
}

#endif
