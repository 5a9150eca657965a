/*
plan_cpu.h -- the plan of a run on the CPU: its settings, its memory, and the peak of this machine.
*/
#ifndef LLMC_PLAN_CPU_H
#define LLMC_PLAN_CPU_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "llmc/base/threads.h"
#include "llmc/base/vec.h"
#include "llmc/bf16/machine_peak.h"
#include "llmc/bf16/tile_kernels.h"
#include "llmc/comm/comm.h"
#include "llmc/log/log.h"
#include "llmc/optim/loss_scale.h"
#include "llmc/cost/cost_measured.h"
#include "llmc/cost/peak_kept.h"
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

// Sets `name` to the processor's name on Linux, else to "".
static inline void plan_processor_name_(char* name, size_t room) {
    char line[256];
    FILE* file = fopen("/proc/cpuinfo", "r");
    name[0] = '\0';
    while (file && !name[0] && fgets(line, sizeof(line), file)) {
        if (strncmp(line, "model name", 10) == 0) {
            snprintf(name, room, "%s", line);
        }
    }
    if (file) {
        fclose(file);
    }
}

// Measures the peak of the matmuls that the run uses. Without instructions for bf16, the peak in
// fp32 is higher.
static inline double plan_measure_peak_(const Options* o) {
    const double peak = peak_flops_per_s();
    return o->memory.matmul == MATMUL_BF16 ? fmax(peak, peak_bf16_flops_per_s(bf16_kernel())) : peak;
}

// Measures the peak, and returns the largest one of the last weeks. For a run of one process:
// several may share cores, and their peaks, each measured alone, do not add up.
static inline double plan_kept_peak_(const Options* o) {
    char device[160], processor[256], machine[512];
    plan_describe_cpu_(device, sizeof(device), o->memory.matmul == MATMUL_BF16);
    plan_processor_name_(processor, sizeof(processor));
    snprintf(machine, sizeof(machine), "%s; %s", device, processor);
    return peak_keep(plan_measure_peak_(o), machine, (int64_t)time(NULL));
}

// Sets *plan, and returns the settings with --fit decided. Ends the program if the run does not fit
// into the limits of its job. Collective.
static inline Settled plan_on_cpu(TrainerPlan* plan, const Settled* settled, PlanModel model, Comm* comm) {
    plan->measure_peak = comm->size > 1 ? plan_measure_peak_ : plan_kept_peak_;
    plan->peak = plan->measure_peak(&settled->options);
    plan->in_place = !settled_has_blocks(settled);
    plan->loss_scale = loss_scale_off();
    plan->rates = rates_cpu(settled);
    const Settled s = memory_choose_cpu(settled, comm, &plan->rates, model);
    plan->model = plan_model(model, &s);
    if (!s.options.plan) {
        memory_check_cpu(&plan->model.memory, comm);
    }
    plan_describe_cpu_(plan->device, sizeof(plan->device), s.options.memory.matmul == MATMUL_BF16);
    return s;
}

// Sets *peak_mib to the most memory that the process ever held. No GPU holds any.
static inline void memory_used_on_cpu(double* peak_mib, double* beside_mib) {
    *peak_mib = log_peak_mib();
    *beside_mib = NAN;
}

#endif
