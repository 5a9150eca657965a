/*
stragglers.h -- finds the process that is slower than the others: all of them wait for it in every
step.

What is compared is each process's time for a token in forward passes, in which nobody waits for
others. Slow is who takes 20 % longer than the median for 50 steps in a row. Each is named once. All
processes see the same numbers, so all find the same.
*/
#ifndef LLMC_STRAGGLERS_H
#define LLMC_STRAGGLERS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int size;       // processes
    int* steps;     // (size) that each has been slow for; -1: it is named
    double* sorted; // (size)
} Stragglers;

void stragglers_open(Stragglers* p, int size);

void stragglers_close(Stragglers* p);

// Once a step: seconds (size), each process's time for a token; 0: unknown. Returns the process
// that is to be named now, or -1; sets *ratio to its time as a multiple of the median.
int stragglers_add(Stragglers* p, const double* seconds, double* ratio);

#ifdef __cplusplus
}
#endif

#ifdef STRAGGLERS_IMPLEMENTATION

#include <stdlib.h>

#include "llmc/base/check.h"

enum { PACE_STEPS_ = 50 };
#define PACE_SLOW_ 1.2

void stragglers_open(Stragglers* p, int size) {
    p->size = size;
    p->steps = (int*)check_alloc((size_t)size, sizeof(int), "paces of processes");
    p->sorted = (double*)check_alloc((size_t)size, sizeof(double), "paces of processes");
}

void stragglers_close(Stragglers* p) {
    free(p->steps);
    free(p->sorted);
}

static int stragglers_compare_(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Of those that are known, the lower one of two; 0: of none.
static double stragglers_median_(Stragglers* p, const double* seconds) {
    int known = 0;
    for (int r = 0; r < p->size; r++) {
        if (seconds[r] > 0) {
            p->sorted[known++] = seconds[r];
        }
    }
    qsort(p->sorted, (size_t)known, sizeof(double), stragglers_compare_);
    return known ? p->sorted[(known - 1) / 2] : 0;
}

int stragglers_add(Stragglers* p, const double* seconds, double* ratio) {
    const double median = stragglers_median_(p, seconds);
    int named = -1;
    for (int r = 0; r < p->size; r++) {
        if (p->steps[r] >= 0) {
            p->steps[r] = median > 0 && seconds[r] > PACE_SLOW_ * median ? p->steps[r] + 1 : 0;
        }
        if (p->steps[r] >= PACE_STEPS_ && named < 0) { // another one has its turn in the next step
            p->steps[r] = -1;
            named = r;
            *ratio = seconds[r] / median;
        }
    }
    return named;
}

#endif // STRAGGLERS_IMPLEMENTATION

#endif
