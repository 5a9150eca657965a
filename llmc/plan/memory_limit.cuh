/*
memory_limit.cuh -- the memory of a run on the GPU, before anything is allocated: how much each kind takes and where,
what the options leave open because it depends on memory, and whether the run fits.

    memory_plan       the large allocations, for --plan, the log and memory_require
    memory_connect    opens NCCL, whose memory nobody can compute, before the rest is planned
    memory_choose     decides --recompute auto and --logits-chunk auto, and prints why
    memory_require    ends the program with what would fit

Each planned_... is one fact that the model is opened with.
*/
#ifndef LLMC_MEMORY_LIMIT_CUH
#define LLMC_MEMORY_LIMIT_CUH

#include <limits.h>
#include <math.h>

#include "llmc/ops/gradient_norm.cuh"
#include "llmc/gpu/floatx.cuh"

#include "llmc/ops/attention.cuh"
#include "llmc/gpu/batch_queue.cuh"
#include "llmc/ops/embedding.cuh"
#include "llmc/model/model.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/norm.cuh"
#include "llmc/layers/linear.cuh"
#include "llmc/ops/matmul.cuh"
#include "llmc/optim/offload.cuh"
#include "llmc/optim/optimizer.cuh"
#include "llmc/optim/optimizer.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/gpu/results.cuh"
#include "llmc/layers/decode.cuh"
#include "llmc/checkpoint/transfer.cuh"
#include "llmc/parallel/zero.cuh"
#include "llmc/base/limits.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/plan/fit.h"
#include "llmc/plan/gpu_setup.cuh"
#include "llmc/setup/settled.h"
#include "llmc/plan/plan.h"

// The tokens of a classifier's chunk: also of a batch that is smaller than a micro-batch.
static inline int planned_chunk(const Settled* s) {
    const Options* o = &s->options;
    const int64_t N = (int64_t)o->batch * o->seq_len;
    return (int)(o->logits_chunk < N ? o->logits_chunk : N);
}

// Returns the bytes of activations, for training or generation. A run that trains uses the same
// memory for both, in turns, and for saves.
static inline size_t planned_activations(TensorRow* rows, const Settled* s) {
    const Options* o = &s->options;
    const ModelConfig cfg = s->cfg;
    TensorRow texts[MODEL_ACTIVATION_ROWS];
    const int residuals = cfg.L - (o->offload_residuals ? offload_residual_layers(cfg.L) : 0);
    const size_t text = decoder_activation_rows(texts, cfg, s->decode_batch, o->seq_len);
    const size_t trained = model_activation_rows(rows, cfg, o->batch, o->seq_len, o->recompute, residuals,
                                                 s->freeze.first_block, (size_t)planned_chunk(s));
    const size_t least = TRANSFER_SCRATCH_LEAST, most = trained > least ? trained : least;
    return s->use == USE_GENERATE || text > most ? text : most;
}

static inline DType planned_gradient_dtype(const Settled* s) {
    return s->options.gradients ? DTYPE_FP32 : DTYPE_OF(floatX);
}

// What is between the chunks of the optimizer's state, and what they pass through.
static inline void memory_add_chunks_(Memory* memory, const OptimizerState* state, const ZeroPlan* zero,
                                      MemoryPlace place) {
    OffloadLayout layout;
    offload_layout_open(&layout, state, zero);
    size_t gaps = layout.bytes;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        gaps -= state->slots[slot].bytes;
    }
    memory_count(memory, "gaps between chunks", place, gaps);
    if (place == MEMORY_DISK) {
        memory_count(memory, "pinned chunks of state", MEMORY_HOST, offload_places_bytes(&layout));
    }
    memory_count(memory, "chunks of state", MEMORY_DEVICE, offload_planned_bytes(&layout));
    offload_layout_close(&layout);
}

// The optimizer's state and master weights, where they are kept.
static inline void memory_add_optimizer_(Memory* memory, const Settled* s) {
    const int offload = s->options.offload_optimizer;
    const MemoryPlace place = offload == OFFLOAD_DISK   ? MEMORY_DISK
                              : offload == OFFLOAD_HOST ? MEMORY_HOST
                                                        : MEMORY_DEVICE;
    OptimizerState state;
    optimizer_state_open(&state, s->optimizer, &s->zero, s->cfg);
    plan_add_state(memory, &state, place);
    if (place != MEMORY_DEVICE) {
        memory_add_chunks_(memory, &state, &s->zero, place);
    }
}

// Of the residual stream after a block.
static inline size_t planned_residual_bytes(const Settled* s) {
    return (size_t)s->options.batch * (size_t)s->options.seq_len * (size_t)s->cfg.C * sizeof(floatX);
}

// Room for losses: of the micro-steps of an update, and of as many batches of a validation as the GPU may be behind the
// host.
static inline int64_t planned_losses(const Settled* s) {
    const int64_t update = s->micro_batches, validation = 256;
    return update > validation ? update : validation;
}

// Returns the micro-steps of an update on one rank.
static inline double memory_micro_steps_(const Settled* s) {
    return ceil((double)s->micro_batches / s->ranks.size);
}

// What --offload-params keeps on the host. Both passes read parameters; the norm and the update read gradients, too.
static inline void memory_add_slices_(Memory* memory, const Settled* s) {
    const double m = memory_micro_steps_(s);
    const size_t params = zero_parameter_slice_bytes(&s->zero, DTYPE_OF(floatX)),
                 grads = zero_gradient_slice_bytes(&s->zero);
    if (s->options.offload_params) {
        memory_set_moves(memory_count(memory, "shard of the parameters", MEMORY_HOST, params), 2 * m, 1);
        memory_set_moves(memory_count(memory, "shard of the gradients", MEMORY_HOST, grads), m + 1, m);
    }
}

// What --offload-residuals keeps on the host.
static inline void memory_add_residuals_(Memory* memory, const Settled* s) {
    const size_t layers = s->options.offload_residuals ? (size_t)offload_residual_layers(s->cfg.L) : 0;
    const double m = memory_micro_steps_(s);
    memory_set_moves(memory_count(memory, "residual stream", MEMORY_HOST, layers * planned_residual_bytes(s)),
                     m, m);
}

// What the operations of training need for themselves, and room for batches and results.
static inline size_t memory_scratch_(const Settled* s) {
    const Options* o = &s->options;
    const ModelConfig cfg = s->cfg;
    const ZeroPlan* zero = &s->zero;
    const size_t N = (size_t)o->batch * o->seq_len;
    OptimizerState state;
    optimizer_state_open(&state, s->optimizer, zero, cfg);
    return optimizer_planned_bytes<floatX>(&state, zero) +
           attention_planned_bytes(o->batch, o->seq_len, cfg.C, cfg.NH, DTYPE_OF(floatX)) +
           norm_planned_bytes((int)N, cfg.C) + embedding_planned_bytes((int)N, cfg.C) +
           (o->freeze && o->freeze[0] ? optimizer_freeze_bytes(zero->groups) : 0) +
           gradient_norm_planned_bytes(zero_count(zero, ZERO_SHARDS)) + batch_queue_planned_bytes(N) +
           step_result_bytes(planned_losses(s)) + N * sizeof(int);
}

// What passes between the GPU and the host on its way.
static inline size_t memory_staging_(const Settled* s) {
    const size_t N = (size_t)s->options.batch * s->options.seq_len,
                 trained = batch_queue_pinned_bytes(N) + step_result_bytes(planned_losses(s));
    return decoder_host_bytes(s->cfg, s->decode_batch, s->options.seq_len) +
           (s->use == USE_GENERATE ? 0 : trained);
}

// Whether the update has matmuls beside those of the backward pass, on another stream: with a workspace of their own.
static inline int planned_matmuls_beside(const Options* o) {
    return o->update_in_backward && o->optimizer == OPTIMIZER_MUON;
}

static inline size_t memory_workspaces_(const Settled* s) {
    const MatmulSettings settings = gpu_setup_matmul(s);
    MatmulSettings beside = settings;
    beside.bias_fusion = 0;
    return matmul_planned_bytes(settings) +
           (planned_matmuls_beside(&s->options) ? matmul_planned_bytes(beside) : 0);
}

// NCCL's memory. For a plan, which opens nothing: a GiB for a communicator, and 12 MiB for each of
// 32 channels to each other process of a replica, as NCCL lists them in
// https://github.com/NVIDIA/nccl/issues/1685. There 8 H100s take 4.34 GB after their first
// all-to-all; 6 GB with three communicators are seen in issues/864.
static inline size_t planned_nccl_bytes(const Settled* s) {
    const Ranks ranks = s->ranks;
    const size_t communicators = ranks.shards < ranks.size ? 3 : 1;
    return ranks.size == 1 || s->use != USE_TRAIN || !s->options.plan
               ? s->nccl_bytes
               : (communicators << 30) + (size_t)(ranks.shards - 1) * 32 * ((size_t)12 << 20);
}

// Matmuls, generation, and what all runs have on the host.
static inline void memory_add_common_(Memory* memory, const Settled* s) {
    memory_count(memory, "NCCL", MEMORY_DEVICE, planned_nccl_bytes(s));
    memory_count(memory, "cuBLASLt workspace", MEMORY_DEVICE, memory_workspaces_(s));
    memory_count(memory, "expanded matrix", MEMORY_DEVICE, linear_planned_bytes(s->cfg, s->options.quantize));
    memory_count(memory, "texts", MEMORY_DEVICE, decoder_planned_bytes(s->decode_batch, s->options.seq_len));
    memory_count(memory, "staging", MEMORY_HOST, memory_staging_(s));
}

// Sets the list of all that model_open allocates, to the byte, the copy of the first save, and what
// NCCL has; it ends with a name of NULL. Only cuDNN's workspace, where it is used, is an upper
// bound.
static inline void memory_plan(Memory* memory, const Settled* s) {
    TensorRow parameters[MODEL_PARAMETER_ROWS], activations[MODEL_ACTIVATION_ROWS];
    const Options* o = &s->options;
    const ZeroPlan* zero = &s->zero;
    const DType dtype = DTYPE_OF(floatX);
    const int on_gpu = !o->offload_params; // the slices of both
    if (o->quantize) {
        memory_count(memory, "parameters in 8 bits", MEMORY_DEVICE,
                     quantized_parameter_rows(parameters, s->cfg, sizeof(floatX)));
    } else {
        memory_count(memory, "parameters", MEMORY_DEVICE,
                     zero_parameter_bytes(zero, dtype) +
                         (on_gpu ? zero_parameter_slice_bytes(zero, dtype) : 0));
    }
    if (s->use == USE_GENERATE) {
        const size_t bytes = decoder_activation_rows(activations, s->cfg, s->decode_batch, o->seq_len);
        plan_add_text(memory, activations, bytes);
        memory_add_common_(memory, s);
        return;
    }
    if (s->use == USE_TRAIN) {
        memory_count(memory, "gradients", MEMORY_DEVICE,
                     zero_gradient_bytes(zero, planned_gradient_dtype(s)) +
                         (on_gpu ? zero_gradient_slice_bytes(zero) : 0));
        memory_add_slices_(memory, s);
        memory_add_optimizer_(memory, s);
        memory_add_residuals_(memory, s);
    }
    memory_count(memory, "activations", MEMORY_DEVICE, planned_activations(activations, s));
    memory_count(memory, "scratch", MEMORY_DEVICE, memory_scratch_(s));
    memory_add_common_(memory, s);
    const size_t copy_bytes =
        o->out[0] && s->use == USE_TRAIN
            ? checkpoints_bytes(s->cfg, s->optimizer, zero, s->saved_dtype, o->model_file_gb)
            : 0;
    memory_count(memory, "pinned copy to save", MEMORY_HOST, copy_bytes);
}

// Returns the bytes of GPU memory that the plan takes.
static inline size_t memory_bytes_(const Settled* s) {
    Memory memory = memory_dry();
    memory_plan(&memory, s);
    return memory_bytes(&memory, MEMORY_DEVICE);
}

static inline size_t memory_free_(int device) {
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

// Returns the GPU memory that a plan, NCCL included, may use. It leaves 2 % to kernels and all else
// that CUDA loads during the run, and 64 MiB, since the driver hands out units of 2 MiB.
static inline size_t memory_usable_(const Settled* s) {
    const size_t found = memory_free_(s->options.device) + s->nccl_bytes,
                 room = found / 50 + ((size_t)64 << 20);
    return found > room ? found - room : 0;
}

// Connects the GPUs of several ranks for the run that follows. Returns the GPU memory that NCCL takes of this one, and
// prints it. Collective.
static inline size_t memory_connect(const Settled* s, Comm* comm) {
    Gpu gpu;
    gpu_open(&gpu, s->options.device);
    const size_t before = memory_free_(s->options.device);
    zero_connect(&s->zero, planned_gradient_dtype(s), comm, &gpu);
    const size_t after = memory_free_(s->options.device), bytes = before > after ? before - after : 0;
    gpu_close(&gpu);
    const GroupGpu* all = &((const ZeroGroups*)comm->gpus)->all;
    gpu_library_takes(all->communicator, bytes);
    printf("%s: %.1f MiB of GPU memory\n", all->library, (double)bytes / (1 << 20));
    return bytes;
}

// Returns the least that --logits-chunk auto chooses: smaller chunks save little memory.
static inline int memory_least_chunk_(const Settled* s) {
    return (int)model_classifier_chunk(s->cfg, (size_t)s->options.batch * (size_t)s->options.seq_len);
}

static inline int memory_least_recompute_(const Settled* s) {
    return s->options.offload_residuals ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
}

// Ends the program if the run does not fit into the memory of the GPU. The error names the largest micro-batch
// that fits, with the lowest level of recomputation that it needs.
static inline void memory_require(const Settled* s) {
    const size_t free_bytes = memory_usable_(s), wanted = memory_bytes_(s);
    const double free_mib = (double)free_bytes / (1 << 20), wanted_mib = (double)wanted / (1 << 20);
    if (wanted <= free_bytes) {
        return;
    }
    CHECK(s->use != USE_GENERATE,
          "the model and its texts need %.1f MiB of GPU memory, %.1f are free; wanted a smaller --batch or "
          "--seq-len",
          wanted_mib, free_mib);
    Settled smaller = *s;
    Options* o = &smaller.options;
    for (; o->batch > 0; o->batch /= 2) {
        const int least = memory_least_chunk_(&smaller);
        o->logits_chunk = s->options.logits_chunk;
        const int has_more = planned_chunk(&smaller) > least;
        o->logits_chunk = has_more ? least : s->options.logits_chunk;
        settled_conclude(&smaller);
        for (o->recompute = memory_least_recompute_(s); o->recompute <= RECOMPUTE_BLOCK; o->recompute++) {
            CHECK(memory_bytes_(&smaller) > free_bytes,
                  "the run needs %.1f MiB of GPU memory, %.1f are free; --batch %d --recompute %s%s fits",
                  wanted_mib, free_mib, o->batch, model_recompute_word(o->recompute),
                  has_more ? " --logits-chunk auto" : "");
        }
    }
    CHECK(0,
          "the run needs %.1f MiB of GPU memory, %.1f are free: too little even for --batch 1 --recompute 3",
          wanted_mib, free_mib);
}

// Returns the limit for settings that are chosen by the plan; without such a GPU, SIZE_MAX. --fit may
// lower it.
static inline size_t memory_limit_(const Settled* s) {
    const float fit = s->options.fit;
    const size_t wanted = fit > 0 ? (size_t)(fit * (float)(1 << 30)) : SIZE_MAX;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || s->options.device >= count) {
        cudaGetLastError(); // clears the error: a plan needs no GPU
        return wanted;
    }
    const size_t usable = memory_usable_(s);
    return wanted < usable ? wanted : usable;
}

// Returns --recompute auto and prints why: the lowest level that fits into the GPU's memory.
static inline int memory_choose_recompute_(const Settled* s, size_t limit) {
    Settled tried = *s;
    int* level = &tried.options.recompute;
    *level = memory_least_recompute_(s);
    if (*level == RECOMPUTE_BLOCK) {
        printf("recompute: level %s, for --offload-residuals\n", model_recompute_word(*level));
        return *level;
    }
    while (*level < RECOMPUTE_BLOCK && memory_bytes_(&tried) > limit) {
        ++*level;
    }
    if (limit == SIZE_MAX) {
        printf("recompute: level 0, assuming that it fits: no GPU to check\n");
    } else {
        printf("recompute: level %s, the lowest that fits into %.1f MiB of free GPU memory\n",
               model_recompute_word(*level), (double)limit / (1 << 20));
    }
    return *level;
}

// Returns --logits-chunk auto and prints it: all tokens of a micro-batch, half of them, a quarter ... With
// fewer chunks, fewer matmuls read and write the gradient of the embedding, and round it.
static inline int memory_choose_chunk_(const Settled* s, size_t limit) {
    const int least = memory_least_chunk_(s);
    Settled tried = *s;
    int* chunk = &tried.options.logits_chunk;
    *chunk = INT_MAX;
    const int N = planned_chunk(&tried);
    *chunk = N;
    for (int parts = 2; *chunk > least && memory_bytes_(&tried) > limit; parts *= 2) {
        *chunk = ceil_div(N, parts) > least ? ceil_div(N, parts) : least;
    }
    printf("logits: %d tokens at a time, %s\n", *chunk,
           *chunk == N ? "the whole micro-batch" : "the largest chunk that fits into GPU memory");
    return *chunk;
}

// Returns the settings with the smallest chunk of logits where --logits-chunk is still auto.
static inline Settled memory_with_least_chunk_(const Settled* s) {
    Settled least = *s;
    if (s->options.logits_chunk == OPTION_AUTO) {
        least.options.logits_chunk = memory_least_chunk_(s);
    }
    return least;
}

// Plans for --fit, which leaves --logits-chunk auto for later.
static inline void memory_plan_least_(Memory* memory, const Settled* s) {
    const Settled least = memory_with_least_chunk_(s);
    memory_plan(memory, &least);
}

// Returns the settings with the --batch, --recompute and --offload-optimizer of --fit.
static inline Settled memory_fit_(const Settled* s, Comm* comm, const CostRates* rates, size_t limit) {
    const FitDevice device = {memory_plan_least_, limit,
                              comm_min(comm, limits_free_bytes(comm->local_size, "")), 1, *rates};
    if (limit == SIZE_MAX) {
        die_usage("--fit auto: no GPU to ask for its free memory; wanted --fit GIB");
    }
    return fit_choose(stdout, s, &device);
}

// Returns the settings with all that depends on the GPU's memory decided: recomputation before chunks, since it costs
// more than they do.
static inline Settled memory_choose(const Settled* s, Comm* comm, const CostRates* rates) {
    const size_t limit = comm_min(comm, memory_limit_(s)); // all ranks choose the same
    const Settled fitted = s->options.fit != 0 ? memory_fit_(s, comm, rates, limit) : *s;
    Settled chosen = memory_with_least_chunk_(&fitted);
    if (chosen.options.recompute == OPTION_AUTO) {
        chosen.options.recompute = memory_choose_recompute_(&chosen, limit);
    }
    if (fitted.options.logits_chunk == OPTION_AUTO) {
        chosen.options.logits_chunk = memory_choose_chunk_(&chosen, limit);
    }
    return chosen;
}

#endif
