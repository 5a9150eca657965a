/*
machine_peak.h -- the fp32 peak of this machine: multiply-adds of its cores in registers, measured.

It is the ceiling for MFU and `make bench-cpu`, measured on the spot: all threads at once, some
milliseconds, the best of several runs. A multiply-add counts as two operations.

peak_bf16_flops_per_s is the rate of a kernel of tile_kernels.h with factors in the L1 cache.
*/
#ifndef LLMC_MACHINE_PEAK_H
#define LLMC_MACHINE_PEAK_H

#include "llmc/base/vec.h"
#include "llmc/bf16/tile_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// sums in flight: enough to hide the latency of a multiply-add
#define PEAK_SUMS (VEC_REGISTERS / 4 * 3)

#define PEAK_MOST_S 0.05 // time after which no other repeat starts,

enum {
    PEAK_LEAST = 4,       // except for these first ones: the best of one says nothing
    PEAK_BF16_STEPS = 16, // 32 KiB, both factors in one
};

// Returns the operations per second of all threads together. Needs about 20 ms: before each repeat
// threads_spread waits 2 ms until every thread has a core of its own. When it did so only once, all
// repeats could fall into a moment in which two threads shared a core, and a run showed twice its
// MFU. Stops after PEAK_MOST_S and PEAK_LEAST repeats, for busy machines and unoptimized builds.
double peak_flops_per_s(void);

// Returns the operations per second of all threads together with a bf16 kernel.
double peak_bf16_flops_per_s(Bf16Kernel kernel);

// Returns 1 if matmuls in bf16 are faster on this machine than in fp32. Having the instructions
// does not imply that: an Intel core did vdpbf16ps at half the rate of multiply-adds in fp32. The
// gain must be a quarter, as rounding and packing also cost time. Processors are far from this
// limit (0.5 and 10 were measured), so all ranks of a run decide the same.
int peak_bf16_pays(void);

#ifdef __cplusplus
}
#endif

#ifdef MACHINE_PEAK_IMPLEMENTATION

#include "llmc/base/clock.h"
#include "llmc/base/threads.h"

// Returns 1 if the peak should be measured again, after `repeats` times. Waits until every thread
// has a core of its own, but not forever.
static int peak_repeats_(int repeats, int most, double begin_s) {
    const int has_time = time_now_s() - begin_s < PEAK_MOST_S;
    if (has_time && repeats < most) {
        threads_spread();
    }
    return repeats < (has_time ? most : PEAK_LEAST);
}

// Does `rounds` multiply-adds on each sum.
static float peak_work_(int rounds) {
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

double peak_flops_per_s(void) {
    enum { ROUNDS = 200000, REPEATS = 8 };
    const double begin_s = time_now_s();
    double best = 0;
    for (int repeat = 0; peak_repeats_(repeat, REPEATS, begin_s); repeat++) {
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

// Multiplies some tiles in one thread: 8 MFLOP.
static float peak_bf16_work_(const Bf16Kernel* kernel, const uint32_t* factors) {
    __attribute__((aligned(64))) float tile[BF16_TILE * BF16_TILE] = {0};
    for (int i = 0; i < 8; i++) {
        kernel->product(tile, BF16_TILE, tile, BF16_TILE, factors, factors, PEAK_BF16_STEPS,
                        &bf16_nothing_ahead);
    }
    return tile[0];
}

double peak_bf16_flops_per_s(Bf16Kernel kernel) {
    enum { ROUNDS = 10, REPEATS = 8 };
    __attribute__((aligned(64))) uint32_t factors[PEAK_BF16_STEPS * BF16_STEP_PAIRS];
    const double begin_s = time_now_s();
    double best = 0;
    for (int i = 0; i < PEAK_BF16_STEPS * BF16_STEP_PAIRS; i++) {
        factors[i] = 0x3f803f80; // 1, 1
    }
    for (int repeat = 0; peak_repeats_(repeat, REPEATS, begin_s); repeat++) {
        float sink = 0;
        const double start_s = time_now_s();
#pragma omp parallel reduction(+ : sink)
        {
            kernel.begin();
            for (int r = 0; r < ROUNDS; r++) {
                sink += peak_bf16_work_(&kernel, factors);
            }
            kernel.end();
        }
        const double flops =
            2.0 * ROUNDS * 8 * BF16_TILE * BF16_TILE * BF16_STEP * PEAK_BF16_STEPS * threads_max();
        const double rate = flops / (time_now_s() - start_s);
        best = sink > 0 && rate > best ? rate : best;
    }
    return best;
}

int peak_bf16_pays(void) {
    const Bf16Kernel kernel = bf16_kernel();
    return kernel.is_hardware && peak_bf16_flops_per_s(kernel) > 1.25 * peak_flops_per_s();
}

#endif // MACHINE_PEAK_IMPLEMENTATION

#endif
