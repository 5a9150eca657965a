/*
clock.h -- time: seconds since some moment, never set back, for differences; and the time of day.
*/
#ifndef LLMC_CLOCK_H
#define LLMC_CLOCK_H

#include <time.h>

static inline double time_now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Returns the seconds since 1970.
static inline double time_unix_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
