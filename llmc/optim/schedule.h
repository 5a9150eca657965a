/*
schedule.h -- the learning rate of each step.

    warm-up    lr (step + 1) / warmup       while step < warmup: the first step already moves
    then       lr (final_frac + (1 - final_frac) shape(t))    t from 0 to 1 over the decay

    cosine     shape = (1 + cos(pi t)) / 2      Loshchilov and Hutter, arXiv:1608.03983
    linear     shape = 1 - t
    constant   shape = 1
    wsd        shape = 1 - sqrt(t) or 1 - t     over the last decay_steps, 1 before

WSD (warm-up, stable, decay; also called trapezoidal) is from MiniCPM (Hu et al., arXiv:2404.06395).
"1-sqrt" is the best decay of those that Haegele et al. compare (arXiv:2405.18392). The rates before
the decay do not depend on the length of the run, so it can start from any checkpoint.

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

// --decay-shape
// clang-format off
#define DECAY_WORDS(X) \
    X(DECAY_SQRT, "sqrt") \
    X(DECAY_LINEAR, "linear")

// clang-format on
typedef enum { DECAY_WORDS(WORDS_VALUE) } DecayShape;

typedef struct {
    Schedule schedule;
    int64_t steps, warmup; // numbers of updates: of the run, and of its warm-up
    float lr, final_frac;
    // WSD's decay, which never starts before the warm-up ends
    int64_t decay_steps;
    DecayShape decay_shape;
} ScheduleSettings;

// Returns the learning rate of update number `step`, from 0. It is defined for all values: a
// warm-up longer than the run never ends, and after the end of the run the rate stays as it was.
float schedule_lr(const ScheduleSettings* s, int64_t step);

// Returns 1 if both schedules have the same rates in all updates before number `step`.
int schedule_same_before(const ScheduleSettings* a, const ScheduleSettings* b, int64_t step);

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

// Returns the shape at fraction t of the decay: 1 is lr, 0 is final_frac * lr.
static double schedule_shape_(const ScheduleSettings* s, double t) {
    switch (s->schedule) {
    case SCHEDULE_COSINE:
        return 0.5 * (1 + cos(3.14159265358979323846 * t));
    case SCHEDULE_LINEAR:
        return 1 - t;
    case SCHEDULE_WSD:
        return s->decay_shape == DECAY_LINEAR ? 1 - t : 1 - sqrt(t);
    case SCHEDULE_CONSTANT:
        break;
    }
    return 1;
}

float schedule_lr(const ScheduleSettings* s, int64_t step) {
    if (step < s->warmup) {
        return (float)(s->lr * ((double)(step + 1) / (double)s->warmup));
    }
    int64_t start = s->warmup > 0 ? s->warmup : 0; // first step of the decay
    if (s->schedule == SCHEDULE_WSD && start < s->steps - s->decay_steps) {
        start = s->steps - s->decay_steps;
    }
    if (step < start) {
        return s->lr;
    }
    const double t = step < s->steps ? (double)(step - start) / (double)(s->steps - start) : 1;
    return (float)(s->lr * (s->final_frac + (1 - s->final_frac) * schedule_shape_(s, t)));
}

int schedule_same_before(const ScheduleSettings* a, const ScheduleSettings* b, int64_t step) {
    for (int64_t i = 0; i < step; i++) {
        if (schedule_lr(a, i) != schedule_lr(b, i)) {
            return 0;
        }
    }
    return 1;
}

#endif // SCHEDULE_IMPLEMENTATION

#endif
