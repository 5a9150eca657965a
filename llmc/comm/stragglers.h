/*
stragglers.h -- finds the rank that is slower than the others, which wait for it in every step.

It compares the time per token of forward passes, in which no rank waits for others. A rank is slow
if it takes 20 % longer than the median of its stage for 50 steps in a row. Each is reported once.
All ranks see the same numbers, so they all find the same.
*/
#ifndef LLMC_STRAGGLERS_H
#define LLMC_STRAGGLERS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int size;       // number of ranks
    int stage;      // ranks that are compared: neighbors
    int* steps;     // (size) steps that each has been slow; -1: reported
    double* sorted; // (size)
} Stragglers;

// Opens it for `size` ranks. Each is compared with its pipeline stage: groups of `stage` neighbors.
void stragglers_open(Stragglers* p, int size, int stage);

void stragglers_close(Stragglers* p);

// Adds the time per token of each rank in a step, seconds (size); 0: unknown. Returns the rank to
// report now, or -1; sets *ratio to its time as a multiple of the median.
int stragglers_add(Stragglers* p, const double* seconds, double* ratio);

#ifdef __cplusplus
}
#endif

#ifdef STRAGGLERS_IMPLEMENTATION

#include <stdlib.h>

#include "llmc/base/check.h"

enum { PACE_STEPS_ = 50 };
#define PACE_SLOW_ 1.2

void stragglers_open(Stragglers* p, int size, int stage) {
    p->size = size;
    p->stage = stage;
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

// Returns the lower median of the known times of a stage; 0 if none is known.
static double stragglers_median_(Stragglers* p, const double* seconds) {
    int known = 0;
    for (int r = 0; r < p->stage; r++) {
        if (seconds[r] > 0) {
            p->sorted[known++] = seconds[r];
        }
    }
    qsort(p->sorted, (size_t)known, sizeof(double), stragglers_compare_);
    return known ? p->sorted[(known - 1) / 2] : 0;
}

int stragglers_add(Stragglers* p, const double* seconds, double* ratio) {
    double median = 0;
    int named = -1;
    for (int r = 0; r < p->size; r++) {
        median = r % p->stage == 0 ? stragglers_median_(p, seconds + r) : median;
        if (p->steps[r] >= 0) {
            p->steps[r] = median > 0 && seconds[r] > PACE_SLOW_ * median ? p->steps[r] + 1 : 0;
        }
        if (p->steps[r] >= PACE_STEPS_ && named < 0) { // another one is reported in the next step
            p->steps[r] = -1;
            named = r;
            *ratio = seconds[r] / median;
        }
    }
    return named;
}

#endif // STRAGGLERS_IMPLEMENTATION

#endif
