/*
memory_limit.h -- the memory that a run on the CPU may take; memory_limit.cuh is for the GPU.

    memory_choose_cpu    chooses the settings of --fit
    memory_check_cpu     refuses a run that the limits of its job would end
*/
#ifndef LLMC_MEMORY_LIMIT_H
#define LLMC_MEMORY_LIMIT_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>

#include "llmc/base/check.h"
#include "llmc/comm/comm.h"
#include "llmc/base/limits.h"
#include "llmc/plan/fit.h"
#include "llmc/plan/fit_grid.h"
#include "llmc/setup/settled.h"
#include "llmc/layers/layer_cost.h"

// Returns the settings that --fit chooses; `model` plans each try. --plan of several processes
// prints their fastest grids.
static inline Settled memory_choose_cpu(const Settled* s, Comm* comm, const CostRates* rates,
                                        PlanModel model) {
    const float fit = s->options.memory.fit;
    const int divides = ranks_size(&s->ranks) > 1 && s->use == USE_TRAIN;
    if (fit == 0 && !(divides && s->options.plan)) {
        return *s;
    }
    const int here = s->options.plan ? s->ranks.node_ranks : comm->local_size;
    const size_t found = limits_free_bytes(here, ""),
                 limit = fit > 0 ? (size_t)(fit * (float)(1 << 30)) : found;
    if (limit == SIZE_MAX && fit != 0) {
        die_usage("--fit auto: this system does not say how much memory is free; wanted --fit GIB");
    }
    FitDevice device = {model, comm_min(comm, limit), SIZE_MAX, 0, *rates};
    comm_broadcast(comm, &device.rates, sizeof(device.rates)); // so all ranks make the same choice
    if (fit == 0) {
        fit_show_grids(stdout, s, &device);
        return *s;
    }
    return divides ? fit_choose_grid(stdout, s, &device) : fit_choose(stdout, s, &device);
}

// Ends the program if the limits of this job leave less memory than the run takes: the system would
// kill the run without an error. The machine's free memory is no limit, since it may swap.
static inline void memory_check_cpu(const Memory* memory, const Comm* comm) {
    const size_t group = limits_group_bytes(""), own = limits_own_bytes(),
                 share = group / (size_t)comm->local_size,
                 left = group < SIZE_MAX && share < own ? share : own;
    CHECK(memory_bytes(memory, MEMORY_DEVICE) <= left,
          "the run takes %.1f MiB, and the limits of this job (%s) leave %.1f MiB%s; --fit auto finds a way "
          "to train "
          "that fits",
          (double)memory_bytes(memory, MEMORY_DEVICE) / (1 << 20),
          left == own ? "ulimit -v or -d" : "its control group", (double)left / (1 << 20),
          comm->local_size > 1 ? " for each process" : "");
}

#endif
