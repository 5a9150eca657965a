// test_mfu.c -- mfu.h: a peak that was measured on a busy machine is corrected, at the right
// moments and no more often.
#define MFU_IMPLEMENTATION

#include "llmc/cost/mfu.h"
#include "dev/test/lib/test.h"

static double machine_does; // what a measurement finds
static int measured;

static double measure(const Options* options) {
    (void)options;
    measured++;
    return machine_does;
}

static void expect(Mfu* mfu, double rate, double now_s, double wanted, int wanted_measured,
                   const char* wanted_note) {
    char note[MFU_NOTE_BYTES];
    const double got = mfu_of(mfu, 2 * rate, 2, now_s, note);
    EXPECT_NEAR(got, wanted, 1e-12, "at %g s", now_s);
    EXPECT(measured == wanted_measured, "measured %d times at %g s, wanted %d", measured, now_s,
           wanted_measured);
    EXPECT(wanted_note[0] ? strstr(note, wanted_note) != NULL : !note[0], "\"%s\" at %g s", note, now_s);
}

// Measured at a bad moment: an update beats it, and the next measurement is right.
TEST(beaten) {
    Mfu mfu;
    measured = 0;
    mfu_open(&mfu, 3e9, 3e9, measure, NULL, 100);
    machine_does = 120e9;
    expect(&mfu, 2e9, 101, 2.0 / 3, 0, "");
    expect(&mfu, 60e9, 102, 0.5, 1, "the peak is 120 GFLOP/s, measured again; 3.0 GFLOP/s was too low");
    expect(&mfu, 90e9, 103, 0.75, 1, "");
    // the machine is busy again: an update that beats the peak is the peak
    machine_does = 10e9;
    expect(&mfu, 126e9, 104, 1, 2, "");
    expect(&mfu, 63e9, 104.5, 0.5, 2, "");
    expect(&mfu, 252e9, 104.6, 1, 2, "peak is 252"); // too soon to measure
}

// Nobody beats it, but it is measured again after 5, 10, 20 ... seconds.
TEST(repeated) {
    Mfu mfu;
    int at[] = {105, 110, 120, 140, 180};
    measured = 0;
    machine_does = 40e9;
    mfu_open(&mfu, 50e9, 50e9, measure, NULL, 100);
    for (int s = 100, next = 0; s < 200; s++) {
        next += next < 5 && s >= at[next];
        expect(&mfu, 10e9, s, 0.2, next, "");
    }
    machine_does = 100e9;
    expect(&mfu, 10e9, 260, 0.1, 6, "peak is 100 GFLOP/s");
}

// With four processes, the peak of all rises by the increase that one of them measures. A GPU's
// never changes.
TEST(processes) {
    Mfu mfu;
    measured = 0;
    machine_does = 20e9;
    mfu_open(&mfu, 40e9, 10e9, measure, NULL, 0);
    expect(&mfu, 60e9, 1, 0.75, 1, "peak is 80.0 GFLOP/s");
    measured = 0;
    mfu_open(&mfu, 40e9, 10e9, NULL, NULL, 0);
    expect(&mfu, 10e9, 1000, 0.25, 0, "");
    expect(&mfu, 80e9, 1001, 2, 0, "");
}
