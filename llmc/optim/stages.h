/*
stages.h -- a number that grows in stages during a run: the batch of each step, or the length of its
sequences.

    0:131072,2000:262144    131072 in each step; from step 2000 on, 262144

The gradient is less noisy late in training, where a larger batch pays (McCandlish et al.,
arXiv:1812.06162). Short sequences are cheaper, and early in training they teach about as much (Li
et al., arXiv:2108.06084).
*/
#ifndef LLMC_STAGES_H
#define LLMC_STAGES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { STAGES_MOST = 8 };

typedef struct {
    int64_t step, value; // number of the first update, and the value of each
} Stage;

typedef struct {
    int count; // at least 1
    Stage stage[STAGES_MOST];
} Stages;

// Returns stages of a value that does not change.
Stages stages_constant(int64_t value);

// Sets the stages from text. Returns 0 unless the first one starts at step 0, and each later one at
// a later step, with a larger value.
int stages_parse(Stages* s, const char* text);

// Return the value of update number `step`, of the first update, and of the last one.
int64_t stages_at(const Stages* s, int64_t step);
static inline int64_t stages_first(const Stages* s) { return s->stage[0].value; }
static inline int64_t stages_last(const Stages* s) { return s->stage[s->count - 1].value; }

// Returns the sum of the values of all updates before number `step`.
double stages_sum(const Stages* s, int64_t step);

// Returns the largest number of whole updates whose values add up to at most `sum`.
double stages_steps(const Stages* s, double sum);

#ifdef __cplusplus
}
#endif

#ifdef STAGES_IMPLEMENTATION

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

Stages stages_constant(int64_t value) {
    const Stages s = {1, {{0, value}}};
    return s;
}

// Sets a number below 2^40 and moves *text to after it and the character `end`. Returns 0 if either
// is missing.
static int stages_number_(int64_t* number, const char** text, char end) {
    char* after;
    errno = 0;
    *number = strtoll(*text, &after, 10);
    if (!isdigit((unsigned char)**text) || errno || *number >> 40 || *after != end) {
        return 0;
    }
    *text = after + (end != '\0');
    return 1;
}

static int stages_is_next_(const Stages* s, Stage stage) {
    const Stage before = s->count ? s->stage[s->count - 1] : (Stage){-1, 0};
    return stage.value > before.value && (s->count ? stage.step > before.step : stage.step == 0);
}

int stages_parse(Stages* s, const char* text) {
    s->count = 0;
    for (int is_last = 0; !is_last;) {
        Stage stage;
        if (s->count == STAGES_MOST || !stages_number_(&stage.step, &text, ':')) {
            return 0;
        }
        const char* tokens = text;
        is_last = stages_number_(&stage.value, &text, '\0');
        if ((!is_last && !stages_number_(&stage.value, &tokens, ',')) || !stages_is_next_(s, stage)) {
            return 0;
        }
        text = is_last ? text : tokens;
        s->stage[s->count++] = stage;
    }
    return 1;
}

int64_t stages_at(const Stages* s, int64_t step) {
    int i = s->count - 1;
    while (i > 0 && s->stage[i].step > step) {
        i--;
    }
    return s->stage[i].value;
}

// Returns the number of the first update after a stage.
static double stages_end_(const Stages* s, int i) {
    return i + 1 < s->count ? (double)s->stage[i + 1].step : INFINITY;
}

double stages_sum(const Stages* s, int64_t step) {
    double tokens = 0;
    for (int i = 0; i < s->count && s->stage[i].step < step; i++) {
        const double end = fmin((double)step, stages_end_(s, i));
        tokens += (end - (double)s->stage[i].step) * (double)s->stage[i].value;
    }
    return tokens;
}

double stages_steps(const Stages* s, double tokens) {
    double steps = 0;
    for (int i = 0; i < s->count; i++) {
        const double all = stages_end_(s, i) - (double)s->stage[i].step,
                     most = floor(tokens / (double)s->stage[i].value);
        steps += fmin(all, most);
        if (most < all) {
            break;
        }
        tokens -= all * (double)s->stage[i].value;
    }
    return steps;
}

#endif // STAGES_IMPLEMENTATION

#endif
