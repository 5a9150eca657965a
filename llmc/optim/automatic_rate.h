/*
automatic_rate.h -- the learning rate of --lr auto: a peak for AdamW, before warm-up and decay.

Two things limit the best rate, and the larger limit counts:

    long runs    6e-4 * 768 / C * (tokens / 524288)^(1/4)     at most 4e-3
                 the noise of the gradient. GPT-3's rates (Brown et al., 2020, table 2.1) fall about
                 as 1 / C, for batches of half a million tokens. Smaller batches are noisier; the
                 built-in run suggests the fourth root (dev/LOG.md).
    short runs   250 / updates / C                            at most 0.4 / C; C at least 64
                 the way that the weights have to go: an update of AdamW moves a weight by about the
                 rate, whatever the batch. Above 0.4 / C, some data were learned more slowly.

The numbers of short runs are fitted to those in dev/doc/training.md, of 0.13 to 3.7 million
parameters and 64 to 256 channels. With 300,000 tokens or more in an update the limit of long runs
is always larger, unless the model has less than 115 channels.
*/
#ifndef LLMC_AUTOMATIC_RATE_H
#define LLMC_AUTOMATIC_RATE_H

#include <math.h>
#include <stdint.h>

enum { AUTOMATIC_FULL_BATCH = 524288 }; // tokens of an update of GPT-3 125M and llm.c

// Returns the rate of a long run with C channels and updates of this many tokens.
static inline double automatic_rate_long(int C, int64_t tokens) {
    const double batch = fmin((double)tokens / AUTOMATIC_FULL_BATCH, 1);
    return fmin(6e-4 * 768 / C * sqrt(sqrt(batch)), 4e-3);
}

// Returns the rate of a run of so many updates; 0: a long run.
static inline double automatic_rate(int C, int64_t tokens, int64_t updates) {
    const double way = updates > 0 ? fmin(250 / (double)updates, 0.4) : 0;
    return fmax(automatic_rate_long(C, tokens), way / (C < 64 ? 64 : C));
}

// Returns the rate of an update of --find-lr, from 0 on: from a tenth of a long run's rate it rises
// by 5 % from one to the next.
static inline double automatic_rate_sweep(double long_run, int64_t update) {
    return long_run / 10 * pow(1.05, (double)update);
}

#endif
