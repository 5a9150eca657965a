/*
mfu.h -- model flops utilization: the operations of an update as a share of the device's peak.

A GPU's peak is published. A CPU's is measured, maybe while other programs use its cores, and then
it is too low. So it is measured again after 5 seconds, after 10, 20, 40 and so on, and when an
update beats it. The largest one counts. After a new one, an update that still beats it is the peak
itself.
*/
#ifndef LLMC_MFU_H
#define LLMC_MFU_H

#include "llmc/setup/options.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MFU_NOTE_BYTES = 160 };

// Measures the peak of this process in FLOP/s, in at most some tenths of a second.
typedef double (*MfuMeasure)(const Options* options);

typedef struct {
    double peak;        // of all processes, FLOP/s
    double told;        // the one that was printed last
    MfuMeasure measure; // NULL: the peak is known
    const Options* options;
    double share; // of this process in the peak; the others' peaks rise with it
    double due_s, wait_s,
        own_s; // when to measure again, the time up to the next but one, and when an update may ask for it
} Mfu;

// `peak` of all processes, `own` of this one.
void mfu_open(Mfu* mfu, double peak, double own, MfuMeasure measure, const Options* options, double now_s);

// The utilization of an update that took `seconds` up to now. Sets `note` to what to say of a new
// peak, or to "".
double mfu_of(Mfu* mfu, double flops, double seconds, double now_s, char note[MFU_NOTE_BYTES]);

#ifdef __cplusplus
}
#endif

#ifdef MFU_IMPLEMENTATION

#include <math.h>
#include <stdio.h>

#define MFU_FIRST_S_ 5 // when the first measurement is repeated
#define MFU_PAUSE_S_ 1 // between two that updates ask for
#define MFU_NEWS_ 1.1  // print a corrected peak that is at least this many times larger

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
                 "note: the peak is %.0f GFLOP/s, measured again; %.0f was too low, and MFU before too high",
                 mfu->peak * 1e-9, mfu->told * 1e-9);
        mfu->told = mfu->peak;
    }
    return rate / mfu->peak;
}

#endif // MFU_IMPLEMENTATION

#endif
