/*
clock.h -- the time, for differences: seconds since some moment, never set back.

needs:   nothing
defines: time_now_s
*/
#ifndef LLMC_CLOCK_H
#define LLMC_CLOCK_H

#include <time.h>

static inline double time_now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
