/*
memory_limit.h -- the memory of a run on the CPU, before anything is allocated: how much each kind takes. A GPU's is
memory_limit.cuh.

    memory_plan_cpu      all allocations, for --plan and the log
    memory_choose_cpu    decides --fit
    memory_check_cpu     refuses a run that a limit would end

Each planned_... is one fact that the model is opened with.
*/
#ifndef LLMC_MEMORY_LIMIT_H
#define LLMC_MEMORY_LIMIT_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>

#include "llmc/ops/gradient_norm.h"
#include "llmc/base/check.h"
#include "llmc/bf16/attention_bf16.h"
#include "llmc/bf16/cross_entropy_bf16.h"
#include "llmc/comm/comm.h"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/layers/linear.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/bf16/mlp_bf16.h"
#include "llmc/optim/optimizer.h"
#include "llmc/layers/bf16_weights.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/layers/text_rows.h"
#include "llmc/parallel/zero.h"
#include "llmc/base/limits.h"
#include "llmc/formats/safetensors.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/plan/fit.h"
#include "llmc/setup/options.h"
#include "llmc/plan/plan.h"
#include "llmc/setup/resolve.h"
#include "llmc/plan/cost.h"

// A run that continues after a save writes a copy in the background. One that saves only at its end needs no
// memory for a copy; when a signal makes it save, it waits.
static inline int planned_background_cpu(const Options* o) {
    return o->save_every > 0 && o->save_every < o->steps;
}

// Tokens that the classifier takes at a time, if they wait in memory of their own. In bf16 exponentials take half the memory of
// logits.
static inline int planned_classifier_cpu(ModelConfig cfg, const Options* o) {
    const size_t N = (size_t)o->batch * (size_t)o->seq_len, chunk = model_classifier_chunk(cfg, N);
    const size_t tokens = o->matmul == MATMUL_BF16 ? 2 * chunk : chunk;
    return (int)(tokens < N ? tokens : N);
}

// And rows of logits in memory.
static inline size_t planned_logits_cpu(ModelConfig cfg, const Options* o) {
    const int tokens = planned_classifier_cpu(cfg, o);
    return o->matmul == MATMUL_BF16 ? cross_entropy_bf16_rows(tokens, cfg.Vp) : (size_t)tokens;
}

// Which activations the backward pass computes again. With an MLP in bf16 GELU always is among them (mlp_bf16.h).
static inline RecomputeLevel planned_recompute_cpu(ModelConfig cfg, const Options* o) {
    const size_t N = (size_t)o->batch * (size_t)o->seq_len;
    const int drops_gelu = o->matmul == MATMUL_BF16 && mlp_bf16_fits(N, (size_t)model_hidden(cfg));
    return o->recompute == RECOMPUTE_NONE && drops_gelu ? RECOMPUTE_GELU : (RecomputeLevel)o->recompute;
}

// Of training, or of generation. In a run that trains, both use the same memory, in turns.
static inline size_t planned_activations_cpu(TensorRow* rows, ModelConfig cfg, const Options* o) {
    const Freeze freeze = freeze_of(cfg.L, o->freeze);
    TensorRow texts[MODEL_ACTIVATION_ROWS];
    const size_t chunk = planned_logits_cpu(cfg, o),
                 text = decoder_activation_rows(texts, cfg, plan_decode_batch(o), o->seq_len);
    const size_t trained = model_activation_rows(
        rows, cfg, o->batch, o->seq_len, planned_recompute_cpu(cfg, o), cfg.L, freeze.first_block, chunk);
    return o->recompute == RECOMPUTE_NEVER || text > trained ? text : trained;
}

// A run that only evaluates or converts keeps the whole model in every process.
static inline ZeroPlan planned_zero_cpu(ModelConfig cfg, const Options* o) {
    return options_only_uses_model(o) ? zero_plan(cfg, 0, 0, 1) : setup_zero(cfg, o, o->processes);
}

static inline size_t planned_parameters_cpu(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                            const ZeroPlan* zero, const Options* o) {
    return o->quantize ? quantized_parameter_rows(rows, cfg, sizeof(float))
                       : zero_parameter_rows(rows, zero, cfg, sizeof(float));
}

// The most rows that a product has.
static inline size_t planned_tokens_cpu(const Options* o) {
    const size_t texts = (size_t)o->batch, tokens = (size_t)o->seq_len;
    return o->recompute != RECOMPUTE_NEVER ? texts * tokens : texts > tokens ? texts : tokens;
}

static inline size_t planned_gradients_cpu(const ZeroPlan* zero, const Options* o) {
    return options_only_uses_model(o) ? 0 : zero_grads_elements(zero, 1) * sizeof(float);
}

static inline size_t planned_copy_cpu(ModelConfig cfg, const ZeroPlan* zero, const Options* o) {
    return planned_background_cpu(o)
               ? checkpoints_bytes(cfg, setup_optimizer(o), zero, SAFETENSORS_F32, o->model_file_gb)
               : 0;
}

// Which copies of matrices there are for matmuls in bf16: none, one, or also one for the backward pass.
static inline int planned_packed_cpu(const Options* o) {
    const int only_forward = o->recompute == RECOMPUTE_NEVER || options_only_uses_model(o);
    return o->matmul != MATMUL_BF16 ? 0 : only_forward ? 1 : PACKED_KINDS;
}

// What rules of update need for themselves.
static inline size_t planned_update_cpu(const OptimizerState* state, const Options* o) {
    return options_only_uses_model(o) ? 0 : optimizer_scratch_bytes(state);
}

// Partial sums of the gradient's norm.
static inline size_t planned_norm_cpu(const ZeroPlan* zero) {
    return (zero_sharded_elements(zero) / GRADIENT_BLOCK + 1) * sizeof(double);
}

// What operations need for themselves.
static inline size_t memory_scratch_cpu_(ModelConfig cfg, const Options* o) {
    const int is_bf16 = o->matmul == MATMUL_BF16, trains = o->recompute != RECOMPUTE_NEVER;
    const int lent = planned_classifier_cpu(cfg, o), N = o->batch * o->seq_len;
    return linear_scratch_bytes(o->quantize, planned_tokens_cpu(o), (size_t)model_hidden(cfg)) +
           (is_bf16 ? matmul_bf16_scratch_bytes() : 0) +
           (is_bf16 && trains ? cross_entropy_bf16_scratch_bytes(lent, N, cfg.C, cfg.Vp) : 0) +
           attention_either_bytes(is_bf16, o->seq_len, model_head_size(cfg));
}

// Sets the list of all that model_open allocates, to the byte; it ends with a name of NULL.
static inline void memory_plan_cpu(PlanMemory plan[PLAN_KINDS], ModelConfig cfg, const Options* o) {
    TensorRow parameters[MODEL_PARAMETER_ROWS], activations[MODEL_ACTIVATION_ROWS];
    const ZeroPlan zero = planned_zero_cpu(cfg, o);
    const int only_evaluates = options_only_uses_model(o) && o->recompute != RECOMPUTE_NEVER;
    plan->name = NULL;
    plan_add(plan, o->quantize ? "parameters in 8 bits" : "parameters",
             planned_parameters_cpu(parameters, cfg, &zero, o));
    plan_add(plan, "scratch",
             memory_scratch_cpu_(cfg, o) + (o->recompute == RECOMPUTE_NEVER ? 0 : planned_norm_cpu(&zero)) +
                 (only_evaluates ? zero_bytes_cpu(&zero, cfg) : 0));
    plan_add(plan, "packed in bf16", bf16_weights_bytes(cfg, planned_packed_cpu(o)));
    if (o->recompute == RECOMPUTE_NEVER) {
        const size_t bytes = decoder_activation_rows(activations, cfg, plan_decode_batch(o), o->seq_len);
        plan_add_text(plan, activations, bytes);
        return;
    }
    if (!only_evaluates) {
        plan_add(plan, "gradients", planned_gradients_cpu(&zero, o) + zero_bytes_cpu(&zero, cfg));
        OptimizerState state;
        optimizer_state_open(&state, setup_optimizer(o), &zero, cfg);
        plan_add_state(plan, &state, PLAN_DEVICE);
        plan_add(plan, "scratch of the update", planned_update_cpu(&state, o));
    }
    plan_add(plan, "activations", planned_activations_cpu(activations, cfg, o));
    plan_add(plan, "copy to save", planned_copy_cpu(cfg, &zero, o));
}

// Decides --batch and --recompute if there is --fit.
static inline void memory_choose_cpu(ModelConfig cfg, Options* o, Comm* comm, const CostDevice* speed) {
    if (o->fit == 0) {
        return;
    }
    const size_t found = limits_free_bytes(comm->local_size, ""),
                 limit = o->fit > 0 ? (size_t)(o->fit * (float)(1 << 30)) : found;
    if (limit == SIZE_MAX) {
        die_usage("--fit auto: this system does not say how much memory is free; wanted --fit GIB");
    }
    FitDevice device = {memory_plan_cpu, comm_min(comm, limit), SIZE_MAX, 0, *speed};
    comm_broadcast(comm, &device.speed.rates, sizeof(device.speed.rates)); // they choose the same
    fit_choose(stdout, cfg, o, &device);
}

// Ends the program if a limit of this job leaves less than the list takes: the system would kill
// the run without a word. What the machine has free is no limit: there may be swap.
static inline void memory_check_cpu(const PlanMemory plan[PLAN_KINDS], const Comm* comm) {
    const size_t group = limits_group_bytes(""), own = limits_own_bytes(),
                 share = group / (size_t)comm->local_size,
                 left = group < SIZE_MAX && share < own ? share : own;
    CHECK(plan_bytes(plan) <= left,
          "the run takes %.1f MiB, and the limits of this job (%s) leave %.1f MiB%s; --fit auto finds a way "
          "to train "
          "that fits",
          (double)plan_bytes(plan) / (1 << 20), left == own ? "ulimit -v or -d" : "its control group",
          (double)left / (1 << 20), comm->local_size > 1 ? " for each process" : "");
}

#endif
