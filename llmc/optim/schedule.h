/*
schedule.h -- the learning rate of each step.

    warm-up    lr (step + 1) / warmup       while step < warmup: the first step already moves
    then       lr (final_frac + (1 - final_frac) shape(t))    t from 0 to 1 over the decay

    cosine     shape = (1 + cos(pi t)) / 2      Loshchilov and Hutter, arXiv:1608.03983
    linear     shape = 1 - t
    constant   shape = 1
    wsd        shape = 1 - sqrt(t)              over the last fifth of all steps, 1 before

WSD (warm-up, stable, decay; also called trapezoidal) is from MiniCPM (Hu et al., arXiv:2404.06395).
The form of its decay is the "1-sqrt" of Haegele et al. (arXiv:2405.18392), the best of those they
compare.

t reaches 1 at step == steps, one after the last update, so a final_frac of 0 wastes no update.
*/
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include <stdint.h>

#include "llmc/base/enum_words.h"

#ifdef __cplusplus
extern "C" {
#endif

// --schedule
// clang-format off
#define SCHEDULE_WORDS(X) \
    X(SCHEDULE_COSINE, "cosine") \
    X(SCHEDULE_LINEAR, "linear") \
    X(SCHEDULE_CONSTANT, "constant") \
    X(SCHEDULE_WSD, "wsd")

// clang-format on
typedef enum { SCHEDULE_WORDS(WORDS_VALUE) } Schedule;

// Returns the learning rate of update number `step`, from 0, in a run of `steps` updates. It is
// defined for all values: a warm-up longer than the run never ends, and after the end of the run
// the rate stays as it was.
float schedule_lr(Schedule schedule, int64_t step, int64_t steps, int64_t warmup, float lr, float final_frac);

// Returns 1 if an action is due before update number `step`: it happens every n steps and at the
// end (n = 0: never; n < 0: only at the end).
static inline int schedule_due(int every, int64_t step, int64_t steps) {
    return every && (step == steps || (every > 0 && step % every == 0));
}

#ifdef __cplusplus
}
#endif

#ifdef SCHEDULE_IMPLEMENTATION

#include <math.h>

// Returns the part of the way from lr down to final_frac * lr that is left, at the fraction t of
// the decay.
static double schedule_shape_(Schedule schedule, double t) {
    switch (schedule) {
    case SCHEDULE_COSINE:
        return 0.5 * (1 + cos(3.14159265358979323846 * t));
    case SCHEDULE_LINEAR:
        return 1 - t;
    case SCHEDULE_WSD:
        return 1 - sqrt(t);
    case SCHEDULE_CONSTANT:
        break;
    }
    return 1;
}

float schedule_lr(Schedule schedule, int64_t step, int64_t steps, int64_t warmup, float lr,
                  float final_frac) {
    if (step < warmup) {
        return (float)(lr * ((double)(step + 1) / (double)warmup));
    }
    int64_t start = warmup > 0 ? warmup : 0; // first step of the decay
    if (schedule == SCHEDULE_WSD && start < steps - steps / 5) {
        start = steps - steps / 5;
    }
    if (step < start) {
        return lr;
    }
    const double t = step < steps ? (double)(step - start) / (double)(steps - start) : 1;
    return (float)(lr * (final_frac + (1 - final_frac) * schedule_shape_(schedule, t)));
}

#endif // SCHEDULE_IMPLEMENTATION

#endif
