/*
peak.h -- the machine's own fp32 peak: how many multiply-adds its cores do in registers.

The ceiling that MFU and `make bench-cpu` are shares of, measured where they are: all threads at once, some
milliseconds, the best of several runs. Two operations to a multiply-add.

defines: peak_flops_per_s
*/
#ifndef LLMC_PEAK_H
#define LLMC_PEAK_H

#include "llmc/base/clock.h"
#include "llmc/base/threads.h"
#include "llmc/base/vec.h"

#define PEAK_SUMS (VEC_REGISTERS / 4 * 3) // in flight: enough to hide the latency of a multiply-add

// `rounds` multiply-adds on each sum.
static inline float peak_work_(int rounds) {
    Vec sum[PEAK_SUMS];
    const Vec factor = vec_all(0.999f), term = vec_all(0.001f);
    for (int i = 0; i < PEAK_SUMS; i++) {
        sum[i] = vec_all((float)i);
    }
    for (int r = 0; r < rounds; r++) {
#pragma GCC unroll 24
        for (int i = 0; i < PEAK_SUMS; i++) {
            sum[i] = sum[i] * factor + term;
        }
    }
    Vec total = sum[0];
    for (int i = 1; i < PEAK_SUMS; i++) {
        total += sum[i];
    }
    return vec_hsum(total);
}

// Operations per second of all threads together. Takes about 0.1 s.
static inline double peak_flops_per_s(void) {
    enum { ROUNDS = 200000, REPEATS = 8 };
    double best = 0;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        float sink = 0; // keeps the work alive
        const double start_s = time_now_s();
#pragma omp parallel reduction(+ : sink)
        sink += peak_work_(ROUNDS);
        const double flops = 2.0 * ROUNDS * PEAK_SUMS * LANES * threads_max();
        const double rate = flops / (time_now_s() - start_s);
        best = sink > 0 && rate > best ? rate : best;
    }
    return best;
}

#endif
