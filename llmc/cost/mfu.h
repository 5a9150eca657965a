/*
mfu.h -- model FLOPs utilization (MFU): the FLOP/s of a step as a share of the peak.

A GPU's peak is published or computed. A CPU's peak is measured, and is too low if other programs
use the cores at that time. So it is measured again 5, 10, 20, 40 ... seconds after the start, and
when a step beats it; the largest measurement counts, also of earlier runs (peak_kept.h). A step
that still beats it becomes the peak.
*/
#ifndef LLMC_MFU_H
#define LLMC_MFU_H

#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MFU_NOTE_BYTES = 160 };

// Measures the peak of this rank in FLOP/s, within some tenths of a second.
typedef double (*MfuMeasure)(const Options* options);

typedef struct {
    double peak;        // peak of all ranks, FLOP/s
    double told;        // peak that was printed last
    MfuMeasure measure; // NULL: the peak is known
    const Options* options;
    double share; // share of this rank in the peak; all ranks' peaks rise by the same factor
    double due_s, wait_s,
        own_s; // next measurement; pause after it; earliest measurement for a step
} Mfu;

// Starts with the peak of all ranks, `peak`, and of this rank, `own`.
void mfu_open(Mfu* mfu, double peak, double own, MfuMeasure measure, const Options* options, double now_s);

// Returns the utilization of a step that took `seconds` up to now. Sets `note` to a line about a
// corrected peak, or to "".
double mfu_of(Mfu* mfu, double flops, double seconds, double now_s, char note[MFU_NOTE_BYTES]);

#ifdef __cplusplus
}
#endif

#ifdef MFU_IMPLEMENTATION

#include <math.h>
#include <stdio.h>

#include "llmc/base/units.h"

#define MFU_FIRST_S_ 5 // time of the second measurement
#define MFU_PAUSE_S_ 1 // least time before a measurement for a step
#define MFU_NEWS_ 1.1  // factor above which a corrected peak is printed

void mfu_open(Mfu* mfu, double peak, double own, MfuMeasure measure, const Options* options, double now_s) {
    const Mfu open = {peak, peak, measure, options, own / peak, now_s + MFU_FIRST_S_, MFU_FIRST_S_, now_s};
    *mfu = open;
}

static void mfu_measure_(Mfu* mfu, double now_s) {
    mfu->peak = fmax(mfu->peak, mfu->measure(mfu->options) / mfu->share);
    mfu->own_s = now_s + MFU_PAUSE_S_;
}

double mfu_of(Mfu* mfu, double flops, double seconds, double now_s, char note[MFU_NOTE_BYTES]) {
    const double rate = flops / seconds;
    note[0] = '\0';
    if (mfu->measure && (now_s >= mfu->due_s || (rate > mfu->peak && now_s >= mfu->own_s))) {
        mfu_measure_(mfu, now_s);
    }
    if (now_s >= mfu->due_s) {
        mfu->due_s = now_s + mfu->wait_s;
        mfu->wait_s *= 2;
    }
    if (mfu->measure && rate > mfu->peak) {
        mfu->peak = rate;
    }
    if (mfu->peak > MFU_NEWS_ * mfu->told) {
        snprintf(note, MFU_NOTE_BYTES,
                 "note: the peak is %s, measured again; %s was too low, and so the MFU until here too high",
                 units_rate(mfu->peak, "FLOP").text, units_rate(mfu->told, "FLOP").text);
        mfu->told = mfu->peak;
    }
    return rate / mfu->peak;
}

#endif // MFU_IMPLEMENTATION

#endif
