/*
fit.h -- --fit: the fastest way to train that fits into the memory.

Tries micro-batches (--batch and what divides it), levels of --recompute, and on a GPU the optimizer's state on the
host, from the fastest by planned time (cost.h) to the slowest, and takes the first that fits. An update has the same sequences
and a validation too: only the order of sums changes. What was given on the command line stays, and --batch is the
largest that is tried.

needs:   the sizes of batches are decided
*/
#ifndef LLMC_FIT_H
#define LLMC_FIT_H

#include <stdint.h>
#include <stdio.h>

#include "llmc/base/check.h"
#include "llmc/base/memory.h"
#include "llmc/model/model.h"
#include "llmc/setup/options.h"
#include "llmc/plan/plan.h"

// Counts what a run with these options takes in a dry ledger.
typedef void (*FitPlan)(Memory* memory, ModelConfig cfg, const Options* options);

typedef struct {
    FitPlan plan;
    size_t limit, host_limit; // bytes; of what is kept on the host beside
    int can_offload;
    CostDevice speed;
} FitDevice;

typedef struct {
    Options options;
    double update_s;
} FitTry_;

// Of one process.
static inline double fit_update_s(ModelConfig cfg, const Options* o, const FitDevice* device) {
    Memory memory = memory_dry();
    device->plan(&memory, cfg, o);
    const CostUpdate update = plan_update(cfg, o, &device->speed, &memory);
    return cost_total_s(&update);
}

// ---- memory ----

// ---- the choice ----

static inline int fit_compare_(const void* a_, const void* b_) {
    const FitTry_ *a = (const FitTry_*)a_, *b = (const FitTry_*)b_;
    return a->update_s != b->update_s ? (a->update_s > b->update_s ? 1 : -1)
                                      : a->options.recompute - b->options.recompute;
}

// The levels of recomputation for one micro-batch and one place of the optimizer's state. Returns their number.
static inline int fit_add_levels_(FitTry_* tries, ModelConfig cfg, Options o, const FitDevice* device) {
    const int is_given = options_given(&o, "recompute") || o.offload_residuals;
    int count = 0;
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
        const int given = o.offload_residuals ? RECOMPUTE_BLOCK : o.recompute;
        if (!is_given || level == given) {
            tries[count].options = o;
            tries[count].options.recompute = level;
            tries[count].update_s = fit_update_s(cfg, &tries[count].options, device);
            count++;
        }
    }
    return count;
}

// Every micro-batch, at most `most` tries. Returns their number.
static inline int fit_add_all_(FitTry_* tries, ModelConfig cfg, const Options* o, const FitDevice* device) {
    const int can_offload = device->can_offload && !options_only_uses_model(o) && !o->offload_optimizer &&
                            !options_given(o, "offload-optimizer") && !o->update_in_backward;
    const int most_parts = o->update_in_backward ? 1 : o->batch; // then an update is one micro-batch
    int count = 0;
    for (int parts = 1; parts <= most_parts; parts++) {
        Options smaller = *o;
        options_divide_batch(&smaller, parts);
        for (int host = 0; o->batch % parts == 0 && host <= can_offload; host++) {
            smaller.offload_optimizer = host ? (int)OFFLOAD_HOST : o->offload_optimizer;
            count += fit_add_levels_(tries + count, cfg, smaller, device);
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

// Prints a try; returns whether it fits.
static inline int fit_takes_(FILE* file, const FitTry_* t, ModelConfig cfg, const FitDevice* device) {
    const Options* o = &t->options;
    Memory memory = memory_dry();
    device->plan(&memory, cfg, o);
    const size_t bytes = memory_bytes(&memory, MEMORY_DEVICE);
    const int fits = bytes <= device->limit && memory_bytes(&memory, MEMORY_HOST) <= device->host_limit;
    fprintf(file, "fit: --batch %d --recompute %s%s: %.1f MiB, %.3g s: %s\n", o->batch,
            model_recompute_word(o->recompute), o->offload_optimizer ? " --offload-optimizer host" : "",
            (double)bytes / (1 << 20), t->update_s, fits ? "fits" : "too much");
    return fits;
}

// Sets --batch, --eval-batches, --recompute and --offload-optimizer, and prints why; ends the program if nothing fits.
static inline void fit_choose(FILE* file, ModelConfig cfg, Options* options, const FitDevice* device) {
    const size_t room = (size_t)(2 * (RECOMPUTE_BLOCK + 1) * fit_divisors_(options->batch));
    FitTry_* tries = (FitTry_*)check_alloc(room, sizeof(FitTry_), "ways to fit");
    const int count = fit_add_all_(tries, cfg, options, device);
    qsort(tries, (size_t)count, sizeof(FitTry_), fit_compare_);
    fprintf(file, "fit: into %.1f MiB; the time of an update is computed from rates %s\n",
            (double)device->limit / (1 << 20), device->speed.rates.basis);
    int i = 0;
    while (i < count && !fit_takes_(file, &tries[i], cfg, device)) {
        i++;
    }
    CHECK(i < count,
          "--fit: none of %d ways fits into %.1f MiB; wanted more memory, a shorter --seq-len or a smaller "
          "model",
          count, (double)device->limit / (1 << 20));
    *options = tries[i].options;
    free(tries);
}

#endif
