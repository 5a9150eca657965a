/*
micro_steps.h -- the micro-steps of an update: how many it has, in which order they come, and which
ranks have a micro-batch in each.

Micro-batch k of an update belongs to rank k mod W in micro-step k div W, W ranks in all. If the
last micro-step has fewer micro-batches than ranks, the first ranks have them.
*/
#ifndef LLMC_MICRO_STEPS_H
#define LLMC_MICRO_STEPS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int64_t number; // from 0
    int active,
        // ranks with a micro-batch: in this micro-step; in the first one, which has the most
        of_update;
    int is_last;
} MicroStep;

// The micro-steps of an update that are still to be made.
typedef struct {
    int64_t batches; // micro-batches of the whole update
    int ranks;
    int64_t next; // number of the next micro-step
} MicroSteps;

// Returns all micro-steps of an update of `sequences` in micro-batches of up to B.
MicroSteps micro_steps(int64_t sequences, int B, int ranks);

// Returns how many an update has.
int64_t micro_steps_count(const MicroSteps* steps);

// Sets the next one. Returns 0 after the last.
int micro_steps_next(MicroSteps* steps, MicroStep* step);

#ifdef __cplusplus
}
#endif

#ifdef MICRO_STEPS_IMPLEMENTATION

MicroSteps micro_steps(int64_t sequences, int B, int ranks) {
    const MicroSteps steps = {(sequences + B - 1) / B, ranks, 0};
    return steps;
}

int64_t micro_steps_count(const MicroSteps* steps) {
    return (steps->batches + steps->ranks - 1) / steps->ranks;
}

// Returns how many ranks have one of `batches` micro-batches.
static int micro_steps_active_(const MicroSteps* steps, int64_t batches) {
    return batches < steps->ranks ? (int)batches : steps->ranks;
}

int micro_steps_next(MicroSteps* steps, MicroStep* step) {
    const int64_t left = steps->batches - steps->next * steps->ranks;
    if (left <= 0) {
        return 0;
    }
    const MicroStep next = {steps->next, micro_steps_active_(steps, left),
                            micro_steps_active_(steps, steps->batches), left <= steps->ranks};
    *step = next;
    steps->next++;
    return 1;
}

#endif // MICRO_STEPS_IMPLEMENTATION

#endif
