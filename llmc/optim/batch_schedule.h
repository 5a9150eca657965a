/*
batch_schedule.h -- the batch of each update, which may grow in stages.

    0:131072,2000:262144    131072 tokens an update; from update number 2000 on, 262144

The gradient is less noisy late in training, where a larger batch pays (McCandlish et al.,
arXiv:1812.06162). The learning rate of a smaller batch B is the schedule's times sqrt(B / B_last).
*/
#ifndef LLMC_BATCH_SCHEDULE_H
#define LLMC_BATCH_SCHEDULE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { BATCH_STAGES = 8 };

typedef struct {
    int64_t step, tokens; // number of the first update, and the tokens of each
} BatchStage;

typedef struct {
    int count; // at least 1
    BatchStage stage[BATCH_STAGES];
} BatchSchedule;

// Returns the schedule of a batch that does not change.
BatchSchedule batch_schedule_constant(int64_t tokens);

// Sets the schedule from text. Returns 0 unless the first stage starts at step 0, and each later
// one at a later step, with more tokens.
int batch_schedule_parse(BatchSchedule* b, const char* text);

// Returns the tokens of update number `step`, of the last update, and of all updates before number
// `step`.
int64_t batch_at_step(const BatchSchedule* b, int64_t step);
static inline int64_t batch_last(const BatchSchedule* b) { return b->stage[b->count - 1].tokens; }
double batch_tokens_before(const BatchSchedule* b, int64_t step);

// Returns the most whole updates that have at most this many tokens in total.
double batch_steps_of(const BatchSchedule* b, double tokens);

#ifdef __cplusplus
}
#endif

#ifdef BATCH_SCHEDULE_IMPLEMENTATION

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

BatchSchedule batch_schedule_constant(int64_t tokens) {
    const BatchSchedule b = {1, {{0, tokens}}};
    return b;
}

// Sets a number below 2^40 and moves *text to after it and the character `end`. Returns 0 if either
// is missing.
static int batch_number_(int64_t* number, const char** text, char end) {
    char* after;
    errno = 0;
    *number = strtoll(*text, &after, 10);
    if (!isdigit((unsigned char)**text) || errno || *number >> 40 || *after != end) {
        return 0;
    }
    *text = after + (end != '\0');
    return 1;
}

static int batch_stage_is_next_(const BatchSchedule* b, BatchStage stage) {
    const BatchStage before = b->count ? b->stage[b->count - 1] : (BatchStage){-1, 0};
    return stage.tokens > before.tokens && (b->count ? stage.step > before.step : stage.step == 0);
}

int batch_schedule_parse(BatchSchedule* b, const char* text) {
    b->count = 0;
    for (int is_last = 0; !is_last;) {
        BatchStage stage;
        if (b->count == BATCH_STAGES || !batch_number_(&stage.step, &text, ':')) {
            return 0;
        }
        const char* tokens = text;
        is_last = batch_number_(&stage.tokens, &text, '\0');
        if ((!is_last && !batch_number_(&stage.tokens, &tokens, ',')) || !batch_stage_is_next_(b, stage)) {
            return 0;
        }
        text = is_last ? text : tokens;
        b->stage[b->count++] = stage;
    }
    return 1;
}

int64_t batch_at_step(const BatchSchedule* b, int64_t step) {
    int i = b->count - 1;
    while (i > 0 && b->stage[i].step > step) {
        i--;
    }
    return b->stage[i].tokens;
}

// Returns the number of the first update after a stage.
static double batch_stage_end_(const BatchSchedule* b, int i) {
    return i + 1 < b->count ? (double)b->stage[i + 1].step : INFINITY;
}

double batch_tokens_before(const BatchSchedule* b, int64_t step) {
    double tokens = 0;
    for (int i = 0; i < b->count && b->stage[i].step < step; i++) {
        const double end = fmin((double)step, batch_stage_end_(b, i));
        tokens += (end - (double)b->stage[i].step) * (double)b->stage[i].tokens;
    }
    return tokens;
}

double batch_steps_of(const BatchSchedule* b, double tokens) {
    double steps = 0;
    for (int i = 0; i < b->count; i++) {
        const double all = batch_stage_end_(b, i) - (double)b->stage[i].step,
                     most = floor(tokens / (double)b->stage[i].tokens);
        steps += fmin(all, most);
        if (most < all) {
            break;
        }
        tokens -= all * (double)b->stage[i].tokens;
    }
    return steps;
}

#endif // BATCH_SCHEDULE_IMPLEMENTATION

#endif
