/*
fit_grid.h -- --fit and --plan of several processes: the fastest ways to divide a run among them
that fit into the memory.

Tries each grid that the model and the run can have (grid.h): t up to the processes of a machine,
c a power of 2, P a divisor of the layers with at least 4 micro-batches a stage. With each it tries
what fit.h does, ZeRO 2 and 3 (1 in a pipeline), and replicas of one, two, four ... machines.
Options of the command line stay. Of the fastest way of each grid that fits, the fastest wins; a
simpler grid that takes at most 3 % longer wins over it.

Planning memory takes much longer than planning time. So ways are ordered by time, and
memory is planned only until the best grids are known, and not for ways that take more than one that
did not fit.
*/
#ifndef LLMC_FIT_GRID_H
#define LLMC_FIT_GRID_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/memory.h"
#include "llmc/base/sizes.h"
#include "llmc/parallel/grid.h"
#include "llmc/plan/fit.h"
#include "llmc/plan/plan.h"
#include "llmc/setup/grid_conflicts.h"
#include "llmc/setup/settled.h"

enum { FIT_SHOWN = 5, FIT_PLACES_ = 1000 };
#define FIT_NEAR_ 1.03 // a simpler grid wins if it takes at most this many times as long

// A way to divide and to run an update.
typedef struct {
    GridShape shape;
    int zero, shards;
    int parts, recompute, offload; // as for settled_with
    double update_s;
    size_t bytes; // of a process; 0: not planned yet
} FitWay;

typedef struct {
    FitWay* all;
    int count;
} FitWays;

static inline void fit_ways_add_(FitWays* ways, FitWay way) {
    ways->all = (FitWay*)check_grow(ways->all, (size_t)ways->count, sizeof(FitWay), "ways to fit");
    ways->all[ways->count++] = way;
}

// ---- a way ----

// Returns the settings of this process's counterpart in a stage.
static inline Settled fit_way_settled_(const Settled* s, const FitWay* way, int stage) {
    Grid grid = grid_of(way->shape, ranks_rank(&s->ranks));
    grid.stage = stage < 0 ? grid.stage : stage;
    const Settled other = settled_in_grid(s, grid, way->zero, way->shards);
    return settled_with(&other, way->parts, way->recompute, way->offload);
}

// Sets the settings of the next stage that differs from those before it, from *stage on; returns 0
// after the last. In the middle of a pipeline only the number of layers differs.
static inline int fit_next_stage_(Settled* there, int* stage, const Settled* s, const FitWay* way) {
    const int P = way->shape.pipeline;
    int is_new = 0;
    while (!is_new && *stage < P) {
        const int before = *stage > 1 ? there->part.L : 0;
        *there = fit_way_settled_(s, way, *stage);
        is_new = *stage == P - 1 || there->part.L != before;
        ++*stage;
    }
    return is_new;
}

// Sets the planned time of an update, which the slowest stage decides.
static inline void fit_way_time_(FitWay* way, const Settled* s, const FitDevice* device) {
    Settled there;
    way->update_s = 0;
    for (int stage = 0; fit_next_stage_(&there, &stage, s, way);) {
        const Options* o = &there.options;
        const int moves =
            o->memory.offload_optimizer || o->memory.offload_residuals || o->memory.offload_params;
        const CostUpdate update = cost_update(&there, &device->rates);
        way->update_s = fmax(way->update_s, moves ? fit_update_s(&there, device) : cost_total_s(&update));
    }
}

// Sets the memory of the stage that takes most, and returns 1 if the way fits.
static inline int fit_way_fits_(FitWay* way, const Settled* s, const FitDevice* device) {
    Settled there;
    size_t host = 0;
    for (int stage = 0; fit_next_stage_(&there, &stage, s, way);) {
        there.options.plan = 1; // NCCL is not open yet: its memory is estimated
        const ModelPlan plan = plan_model(device->model, &there);
        const size_t bytes = memory_bytes(&plan.memory, MEMORY_DEVICE),
                     on_host = memory_bytes(&plan.memory, MEMORY_HOST);
        way->bytes = bytes > way->bytes ? bytes : way->bytes;
        host = on_host > host ? on_host : host;
    }
    return way->bytes <= device->limit && host <= device->host_limit;
}

static inline int fit_same_grid_(GridShape a, GridShape b) {
    return a.tensor == b.tensor && a.context == b.context && a.pipeline == b.pipeline;
}

// Returns 1 if `a` takes at least the memory of `b`: the same division, no smaller micro-batches,
// no more recomputation or offloading.
static inline int fit_takes_no_less_(const FitWay* a, const FitWay* b) {
    return fit_same_grid_(a->shape, b->shape) && a->zero == b->zero && a->shards == b->shards &&
           a->parts <= b->parts && a->recompute <= b->recompute && a->offload <= b->offload;
}

// ---- all ways ----

// Returns 1 if a way has work for all: a micro-batch for each data rank, and 4 for each stage.
static inline int fit_has_work_(const Settled* s, const FitWay* way) {
    const Options* o = &s->options;
    const int64_t sequences = o->batch.total / o->batch.seq_len,
                  each = o->batch.size / way->parts * way->shape.data, steps = (sequences + each - 1) / each;
    return way->shape.pipeline > 1 ? steps >= 4 * way->shape.pipeline && way->shape.data <= sequences
                                   : each <= sequences || grid_is_plain(way->shape);
}

// Adds the levels of recomputation and the places of the state for a division and a micro-batch.
static inline void fit_add_levels_of_(FitWays* ways, const Settled* s, FitWay way, const FitDevice* device) {
    for (way.recompute = RECOMPUTE_NONE; way.recompute <= RECOMPUTE_BLOCK; way.recompute++) {
        for (int host = 0;
             fit_tries_level(&s->options, way.recompute) && host <= fit_tries_offload(s, device); host++) {
            way.offload = host ? (int)OFFLOAD_HOST : s->options.memory.offload_optimizer;
            fit_way_time_(&way, s, device);
            fit_ways_add_(ways, way);
        }
    }
}

static inline void fit_add_batches_(FitWays* ways, const Settled* s, FitWay way, const FitDevice* device) {
    for (way.parts = 1; way.parts <= s->options.batch.size; way.parts++) {
        if (s->options.batch.size % way.parts == 0 && fit_has_work_(s, &way)) {
            fit_add_levels_of_(ways, s, way, device);
        }
    }
}

// Returns 1 if a stage of ZeRO is tried with a grid. 2 and 3 give the same bits.
static inline int fit_tries_zero_(const Settled* s, GridShape shape, int zero) {
    const Options* o = &s->options;
    const int most = shape.pipeline > 1 || o->program.trainer == OPTION_CPU ? 2 : 3;
    return options_given(o, "zero")          ? zero == o->ranks.zero && zero <= most
           : shape.data * shape.context == 1 ? zero == 0
           : shape.pipeline > 1              ? zero == 1
                                             : 2 <= zero && zero <= most;
}

// Returns the next number of processes that share a replica after `shards` (0: the first one):
// those of a machine, twice as many, ..., all; 0 after the last.
static inline int fit_next_shards_(const Settled* s, GridShape shape, int shards) {
    const Options* o = &s->options;
    const int all = shape.data * shape.context, near = int_max(s->ranks.node_ranks / shape.tensor, 1);
    const int has_one_level = o->program.trainer == OPTION_CPU || grid_experts(shape) > 1;
    if (has_one_level || options_given(o, "shard-ranks")) {
        const int only = has_one_level ? all : o->ranks.shards;
        return shards == 0 && all % only == 0 ? only : 0;
    }
    const int next = shards == 0 ? int_min(near, all) : int_min(2 * shards, all);
    return shards == all ? 0 : all % next == 0 ? next : all;
}

static inline void fit_add_grid_(FitWays* ways, const Settled* s, GridShape shape, const FitDevice* device) {
    for (int zero = 0; zero <= 3; zero++) {
        for (int shards = 0;
             fit_tries_zero_(s, shape, zero) && (shards = fit_next_shards_(s, shape, shards)) > 0;) {
            const FitWay way = {shape, zero, shards, 1, 0, 0, 0, 0};
            fit_add_batches_(ways, s, way, device);
        }
    }
}

// Returns 1 if an option of the grid is free, or has this value.
static inline int fit_is_free_(const Options* o, const char* option, int given, int value) {
    return !options_given(o, option) || given == value;
}

// Returns 1 if a grid is tried.
static inline int fit_tries_grid_(const Settled* s, GridShape shape) {
    const Options* o = &s->options;
    return s->cfg.L % shape.pipeline == 0 &&
           fit_is_free_(o, "tensor-parallel", o->ranks.tensor, shape.tensor) &&
           fit_is_free_(o, "context-parallel", o->ranks.context, shape.context) &&
           fit_is_free_(o, "pipeline-parallel", o->ranks.pipeline, shape.pipeline) &&
           setup_allows_grid(s, shape);
}

static inline void fit_add_grids_(FitWays* ways, const Settled* s, const FitDevice* device) {
    const Options* o = &s->options;
    const GridRun run = setup_grid_run(s);
    GridShape shape = {0, 0, 0, 0, o->ranks.experts};
    while (grid_next(&shape, &run)) {
        if (fit_tries_grid_(s, shape)) {
            fit_add_grid_(ways, s, shape, device);
        }
    }
}

// ---- the choice ----

static inline int fit_way_compare_(const void* a_, const void* b_) {
    const FitWay *a = (const FitWay*)a_, *b = (const FitWay*)b_;
    return a->update_s != b->update_s ? (a->update_s > b->update_s ? 1 : -1) : a->recompute - b->recompute;
}

// Returns how far a grid is from none: tensor groups count least, pipelines most.
static inline int fit_kinds_(GridShape shape) {
    return (shape.tensor > 1) + 2 * (shape.context > 1) + 4 * (shape.pipeline > 1);
}

// The fastest way that fits of each of the fastest grids, the fastest first.
typedef struct {
    FitWay ways[FIT_PLACES_];
    int count;
    int tried; // ways in all
} FitGrids;

static inline int fit_grids_has_(const FitGrids* grids, GridShape shape) {
    int i = 0;
    while (i < grids->count && !fit_same_grid_(grids->ways[i].shape, shape)) {
        i++;
    }
    return i < grids->count;
}

// Returns 1 if more grids are wanted: those to show, and those that a simpler one may win over.
static inline int fit_grids_wants_(const FitGrids* grids, double update_s) {
    return grids->count < FIT_PLACES_ &&
           (grids->count < FIT_SHOWN || update_s <= FIT_NEAR_ * grids->ways[0].update_s);
}

// Returns 1 if a way before this one did not fit and takes no more memory.
static inline int fit_is_hopeless_(const FitWay* failed, int count, const FitWay* way) {
    int i = 0;
    while (i < count && !fit_takes_no_less_(way, &failed[i])) {
        i++;
    }
    return i < count;
}

// Sets the fastest grids for a run of several processes.
static inline void fit_grids(FitGrids* grids, const Settled* s, const FitDevice* device) {
    FitWays ways = {NULL, 0}, failed = {NULL, 0};
    memset(grids, 0, sizeof(*grids));
    fit_add_grids_(&ways, s, device);
    qsort(ways.all, (size_t)ways.count, sizeof(FitWay), fit_way_compare_);
    for (int i = 0; i < ways.count && fit_grids_wants_(grids, ways.all[i].update_s); i++) {
        FitWay way = ways.all[i];
        if (fit_grids_has_(grids, way.shape) || fit_is_hopeless_(failed.all, failed.count, &way)) {
            continue;
        }
        if (fit_way_fits_(&way, s, device)) {
            grids->ways[grids->count++] = way;
        } else {
            fit_ways_add_(&failed, way);
        }
    }
    grids->tried = ways.count;
    free(ways.all);
    free(failed.all);
}

// Returns the number of the way to take: the fastest, or the simplest grid that is almost as fast.
static inline int fit_grids_choice(const FitGrids* grids) {
    int best = 0;
    for (int i = 1; i < grids->count; i++) {
        const FitWay *way = &grids->ways[i], *fastest = &grids->ways[0];
        if (way->update_s <= FIT_NEAR_ * fastest->update_s &&
            fit_kinds_(way->shape) < fit_kinds_(grids->ways[best].shape)) {
            best = i;
        }
    }
    return best;
}

// ---- what is printed ----

static inline void fit_print_kind_(FILE* file, const char* option, int value) {
    if (value > 1) {
        fprintf(file, " --%s %d", option, value);
    }
}

static inline void fit_print_way_(FILE* file, const Settled* s, const FitWay* way, const char* mark) {
    const Options* o = &s->options;
    fprintf(file, "fit:");
    fit_print_kind_(file, "tensor-parallel", way->shape.tensor);
    fit_print_kind_(file, "context-parallel", way->shape.context);
    fit_print_kind_(file, "pipeline-parallel", way->shape.pipeline);
    fprintf(file, " --zero %d", way->zero);
    if (o->program.trainer == OPTION_GPU) {
        fprintf(file, " --shard-ranks %d", way->shards);
    }
    fprintf(file, " --batch %d --recompute %s%s: %.1f MiB, %.4g s%s\n", o->batch.size / way->parts,
            model_recompute_word(way->recompute),
            way->offload == OFFLOAD_HOST ? " --offload-optimizer host" : "", (double)way->bytes / (1 << 20),
            way->update_s, mark);
}

// Prints the fastest grids, and the one to take.
static inline void fit_print_grids(FILE* file, const Settled* s, const FitGrids* grids) {
    const int choice = fit_grids_choice(grids);
    if (grids->count == 0) {
        fprintf(file, "fit: none of %d ways fits\n", grids->tried);
        return;
    }
    for (int i = 0; i < grids->count; i++) {
        if (i < FIT_SHOWN || i == choice) {
            fit_print_way_(file, s, &grids->ways[i], i == choice ? ": --fit auto" : "");
        }
    }
    if (grids->ways[choice].shape.tensor > 1) {
        fprintf(file, "fit: %d tensor ranks: other last bits than with another number of them\n",
                grids->ways[choice].shape.tensor);
    }
}

// Prints the fastest grids.
static inline void fit_show_grids(FILE* file, const Settled* s, const FitDevice* device) {
    FitGrids* grids = (FitGrids*)check_alloc(1, sizeof(FitGrids), "grids that fit");
    fit_grids(grids, s, device);
    fit_print_grids(file, s, grids);
    free(grids);
}

// Returns the settings of the chosen grid. Prints the fastest. Ends the program if nothing fits.
static inline Settled fit_choose_grid(FILE* file, const Settled* s, const FitDevice* device) {
    FitGrids* grids = (FitGrids*)check_alloc(1, sizeof(FitGrids), "grids that fit");
    fprintf(file, "fit: into %.1f MiB; the time of an update is computed from rates %s\n",
            (double)device->limit / (1 << 20), device->rates.basis);
    fit_grids(grids, s, device);
    CHECK(grids->count > 0,
          "--fit: none of %d ways fits into %.1f MiB; wanted more processes or memory, a shorter --seq-len "
          "or a smaller model",
          grids->tried, (double)device->limit / (1 << 20));
    fit_print_grids(file, s, grids);
    const Settled chosen = fit_way_settled_(s, &grids->ways[fit_grids_choice(grids)], -1);
    free(grids);
    return chosen;
}

#endif
