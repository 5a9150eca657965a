/*
plan_gpu.cuh -- the plan of a run on a GPU: its settings, its memory, and the peak of the card.
*/
#ifndef LLMC_PLAN_GPU_CUH
#define LLMC_PLAN_GPU_CUH

#include "llmc/plan/gpu_setup.cuh" // first, for the type of weights

#include <stdio.h>

#include "llmc/comm/comm.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/loss_scale.h"
#include "llmc/plan/gpu_report.cuh"
#include "llmc/plan/memory_limit.cuh"
#include "llmc/plan/plan.h"
#include "llmc/setup/settled.h"

// Sets what a plan says about a GPU.
static inline void plan_describe_gpu_(TrainerPlan* plan, const Options* o) {
    const Gpu gpu = gpu_of_plan(plan->device, sizeof(plan->device), o);
    snprintf(plan->device_kind, sizeof(plan->device_kind), " (sm_%d%d), %s", gpu.major, gpu.minor,
             dtype_name(DTYPE_OF(floatX)));
    plan->peak = gpu_peak_flops_per_s(&gpu, DTYPE_OF(floatX), o->memory.tf32);
    plan->rates = gpu_rates(&gpu, plan->peak, (MatmulPrecision)o->memory.matmul == MATMUL_FP8);
}

// Sets *plan, and returns the settings with everything decided that depends on the GPU. Ends the
// program if the run does not fit into its memory. Collective.
static inline Settled plan_on_gpu(TrainerPlan* plan, const Settled* settled, PlanModel model, Comm* comm) {
    const Settled on_gpu = gpu_setup(settled, comm);
    plan_describe_gpu_(plan, &on_gpu.options);
    plan->copy.pin = gpu_pin;
    plan->copy.unpin = gpu_unpin;
    plan->loss_scale = DTYPE_OF(floatX) == DTYPE_FP16 ? loss_scale_open() : loss_scale_off();
    const Settled divided = memory_choose_grid(&on_gpu, comm, &plan->rates, model),
                  in_grid = gpu_setup_grid(&divided), connected = memory_connected(&in_grid, comm),
                  chosen = memory_choose(&connected, comm, &plan->rates, model);
    if (!chosen.options.plan) {
        memory_require(&chosen, model);
    }
    plan->model = plan_model(model, &chosen);
    return chosen;
}

// Sets *peak_mib to the most memory that the run ever held on the GPU, and *beside_mib to the
// memory in use in addition to the plan.
static inline void memory_used_on_gpu(double* peak_mib, double* beside_mib) {
    *peak_mib = gpu_peak_mib();
    *beside_mib = gpu_beside_mib();
}

#endif
