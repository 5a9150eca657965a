/*
validations.h -- a run's memory of its validation losses: the lowest one, how many came after it,
and whether they show that the run has diverged.

    stop early    when --patience validations in a row were not below the lowest before them
    diverged      when a loss is above 1.5 ln V, and above that before the first update

A model that gives each of the V tokens the same probability has the loss ln V. A loss that is not a
number is above all.

A checkpoint stores this memory as it is, so a resumed run decides like one that never stopped.
*/
#ifndef LLMC_VALIDATIONS_H
#define LLMC_VALIDATIONS_H

#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    double first;      // loss before the first update; NAN: unknown
    double best;       // lowest loss so far; NAN: none yet
    int64_t best_step; // its step
    int64_t since;     // validations since the best one
} Validations;

// Returns the memory of a new run.
Validations validations_open(void);

// Adds the validation at a step.
void validations_add(Validations* v, int64_t step, double loss);

// True if `patience` validations have followed the best one; patience 0: never.
int validations_are_over(const Validations* v, int patience);

// "the validation loss has not fallen for 3 validations; best 3.2801 at step 400"
void validations_print_over(FILE* file, const Validations* v);

// True if this loss shows that the run has diverged; then sets the reason, in words. V is the size
// of the vocabulary.
int validations_diverged(const Validations* v, double loss, int V, char reason[256]);

#ifdef __cplusplus
}
#endif

#ifdef VALIDATIONS_IMPLEMENTATION

#include <math.h>

#include "llmc/base/enum_words.h"
Validations validations_open(void) {
    const Validations none = {NAN, NAN, 0, 0};
    return none;
}

void validations_add(Validations* v, int64_t step, double loss) {
    const int is_best = isfinite(loss) && !(loss >= v->best); // the first one is
    v->first = step == 0 ? loss : v->first;
    v->best = is_best ? loss : v->best;
    v->best_step = is_best ? step : v->best_step;
    v->since = is_best ? 0 : v->since + 1;
}

int validations_are_over(const Validations* v, int patience) { return patience > 0 && v->since >= patience; }

void validations_print_over(FILE* file, const Validations* v) {
    fprintf(file, "the validation loss has not fallen for %lld validation%s", (long long)v->since,
            words_s((double)v->since));
    if (isfinite(v->best)) {
        fprintf(file, "; best %.4f at step %lld", v->best, (long long)v->best_step);
    }
}

int validations_diverged(const Validations* v, double loss, int V, char reason[256]) {
    const double knows_nothing = log(V);
    if (loss <= 1.5 * knows_nothing || loss <= v->first) {
        return 0;
    }
    snprintf(reason, 256,
             "the validation loss is %.4f, above that of a model that knows nothing, ln(%d) = %.4f", loss, V,
             knows_nothing);
    return 1;
}

#endif // VALIDATIONS_IMPLEMENTATION

#endif
