/*
plan_cpu.h -- the plan of a run on the CPU: its settings, its memory, and the peak of this machine.
*/
#ifndef LLMC_PLAN_CPU_H
#define LLMC_PLAN_CPU_H

#include <math.h>
#include <stdio.h>

#include "llmc/base/threads.h"
#include "llmc/base/vec.h"
#include "llmc/bf16/machine_peak.h"
#include "llmc/bf16/tile_kernels.h"
#include "llmc/comm/comm.h"
#include "llmc/log/log.h"
#include "llmc/optim/loss_scale.h"
#include "llmc/cost/cost_measured.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/plan/plan.h"
#include "llmc/setup/settled.h"

static inline void plan_describe_cpu_(char* text, size_t room, int is_bf16) {
    char threads[64];
    threads_describe(threads, sizeof(threads));
    const int used = snprintf(text, room, "%s, %s", threads, VEC_ISA);
    if (is_bf16) {
        snprintf(text + used, room - (size_t)used, ", matmuls in bf16 by %s", bf16_kernel().name);
    }
}

// Measures the peak of the matmuls that the run uses. Without instructions for bf16, that of fp32
// is higher.
static inline double plan_measure_peak_(const Options* o) {
    const double peak = peak_flops_per_s();
    return o->matmul == MATMUL_BF16 ? fmax(peak, peak_bf16_flops_per_s(bf16_kernel())) : peak;
}

// Sets *plan, and returns the settings with --fit decided. Ends the program if the run does not fit
// into the limits of its job. Collective.
static inline Settled plan_on_cpu(TrainerPlan* plan, const Settled* settled, PlanModel model, Comm* comm) {
    plan->peak = plan_measure_peak_(&settled->options);
    plan->measure_peak = plan_measure_peak_;
    plan->in_place = !settled->options.quantize;
    plan->loss_scale = loss_scale_off();
    plan->rates = rates_cpu(settled);
    const Settled s = memory_choose_cpu(settled, comm, &plan->rates, model);
    plan->model = plan_model(model, &s);
    if (!s.options.plan) {
        memory_check_cpu(&plan->model.memory, comm);
    }
    plan_describe_cpu_(plan->device, sizeof(plan->device), s.options.matmul == MATMUL_BF16);
    return s;
}

// Sets *peak_mib to the most memory that the process ever held. No GPU holds any.
static inline void memory_used_on_cpu(double* peak_mib, double* beside_mib) {
    *peak_mib = log_peak_mib();
    *beside_mib = NAN;
}

#endif
