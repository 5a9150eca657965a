// kept_mixture.h -- the mixture of a run that is closed, as a checkpoint has it.
#ifndef KEPT_MIXTURE_H
#define KEPT_MIXTURE_H

#include <stdlib.h>
#include <string.h>

#include "llmc/data/mixture.h"

static void kept_mixture_free(MixtureState* state) {
    for (int i = 0; i < state->count; i++) {
        free((void*)(uintptr_t)state->source[i].name);
    }
    free(state->source);
    *state = (MixtureState){.count = 0};
}

// Replaces a state, from which the sources may have continued, by theirs before sequence p, and
// closes the sources.
static void kept_mixture_close(MixtureState* state, DataSources* sources, uint64_t p) {
    MixtureState now = mixture_state(sources, p);
    for (int i = 0; i < now.count; i++) {
        now.source[i].name = strdup(now.source[i].name);
    }
    mixture_close(sources);
    kept_mixture_free(state);
    *state = now;
}

#endif
