/*
fit.h -- --fit: the fastest way to train that fits into the memory.

Tries micro-batches (the divisors of --batch), levels of --recompute, and on a GPU the optimizer's
state on the host. It orders them by planned time (cost.h) and takes the fastest that fits. Updates
and validations keep their sequences: only the order of sums changes. Options of the command line
stay, and --batch is the largest micro-batch.
*/
#ifndef LLMC_FIT_H
#define LLMC_FIT_H

#include <stdint.h>
#include <stdio.h>

#include "llmc/base/check.h"
#include "llmc/base/memory.h"
#include "llmc/model/model.h"
#include "llmc/setup/settled.h"
#include "llmc/plan/plan.h"

typedef struct {
    PlanModel model;
    size_t limit, host_limit; // bytes of the device, and of host memory
    int can_offload;
    CostRates rates;
} FitDevice;

typedef struct {
    Settled settled;
    double update_s;
} FitTry_;

// Returns the planned time of a step.
static inline double fit_update_s(const Settled* s, const FitDevice* device) {
    const ModelPlan plan = plan_model(device->model, s);
    const CostUpdate update = plan_update(s, &device->rates, &plan.memory);
    return cost_total_s(&update);
}

// ---- the choice ----

static inline int fit_compare_(const void* a_, const void* b_) {
    const FitTry_ *a = (const FitTry_*)a_, *b = (const FitTry_*)b_;
    return a->update_s != b->update_s
               ? (a->update_s > b->update_s ? 1 : -1)
               : a->settled.options.memory.recompute - b->settled.options.memory.recompute;
}

// Returns 1 if a level of recomputation is tried: all of them, unless one is given.
static inline int fit_tries_level(const Options* o, int level) {
    const int is_given =
        (options_given(o, "recompute") && o->memory.recompute != OPTION_AUTO) || o->memory.offload_residuals;
    return !is_given || level == (o->memory.offload_residuals ? (int)RECOMPUTE_BLOCK : o->memory.recompute);
}

// Returns 1 if the optimizer's state on the host is also tried.
static inline int fit_tries_offload(const Settled* s, const FitDevice* device) {
    const Options* o = &s->options;
    return device->can_offload && s->use == USE_TRAIN && !o->memory.offload_optimizer &&
           !options_given(o, "offload-optimizer") && !o->memory.update_in_backward;
}

// Adds the levels of recomputation for one micro-batch and one place of the optimizer's state.
// Returns their number.
static inline int fit_add_levels_(FitTry_* tries, const Settled* s, int parts, int offload,
                                  const FitDevice* device) {
    int count = 0;
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
        if (fit_tries_level(&s->options, level)) {
            tries[count].settled = settled_with(s, parts, level, offload);
            tries[count].update_s = fit_update_s(&tries[count].settled, device);
            count++;
        }
    }
    return count;
}

// Adds every micro-batch. Returns the number of tries.
static inline int fit_add_all_(FitTry_* tries, const Settled* s, const FitDevice* device) {
    const Options* o = &s->options;
    // a step with --update-in-backward has one micro-batch
    const int most_parts = o->memory.update_in_backward ? 1 : o->batch.size;
    int count = 0;
    for (int parts = 1; parts <= most_parts; parts++) {
        for (int host = 0; o->batch.size % parts == 0 && host <= fit_tries_offload(s, device); host++) {
            const int offload = host ? (int)OFFLOAD_HOST : o->memory.offload_optimizer;
            count += fit_add_levels_(tries + count, s, parts, offload, device);
        }
    }
    return count;
}

static inline int fit_divisors_(int n) {
    int count = 0;
    for (int i = 1; i <= n; i++) {
        count += n % i == 0;
    }
    return count;
}

// Prints a try. Returns 1 if it fits.
static inline int fit_takes_(FILE* file, const FitTry_* t, const FitDevice* device) {
    const Options* o = &t->settled.options;
    const ModelPlan plan = plan_model(device->model, &t->settled);
    const size_t bytes = memory_bytes(&plan.memory, MEMORY_DEVICE);
    const int fits = bytes <= device->limit && memory_bytes(&plan.memory, MEMORY_HOST) <= device->host_limit;
    fprintf(file, "fit: --batch %d --recompute %s%s: %.1f MiB, %.3g s: %s\n", o->batch.size,
            model_recompute_word(o->memory.recompute),
            o->memory.offload_optimizer ? " --offload-optimizer host" : "", (double)bytes / (1 << 20),
            t->update_s, fits ? "fits" : "too much");
    return fits;
}

// Returns the settings with the fastest --batch, --recompute and --offload-optimizer that fit, and
// with --eval-batches for that --batch. Prints each try. Ends the program if nothing fits.
static inline Settled fit_choose(FILE* file, const Settled* s, const FitDevice* device) {
    const size_t room = (size_t)(2 * (RECOMPUTE_BLOCK + 1) * fit_divisors_(s->options.batch.size));
    FitTry_* tries = (FitTry_*)check_alloc(room, sizeof(FitTry_), "ways to fit");
    const int count = fit_add_all_(tries, s, device);
    qsort(tries, (size_t)count, sizeof(FitTry_), fit_compare_);
    fprintf(file, "fit: into %.1f MiB; the time of an update is computed from rates %s\n",
            (double)device->limit / (1 << 20), device->rates.basis);
    int i = 0;
    while (i < count && !fit_takes_(file, &tries[i], device)) {
        i++;
    }
    CHECK(i < count,
          "--fit: none of %d ways fits into %.1f MiB; wanted more memory, a shorter --seq-len or a smaller "
          "model",
          count, (double)device->limit / (1 << 20));
    const Settled chosen = tries[i].settled;
    free(tries);
    return chosen;
}

#endif
