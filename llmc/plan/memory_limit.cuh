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
#include "llmc/model/freeze.h"
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
#include "llmc/layers/text_rows.h"
#include "llmc/checkpoint/transfer.cuh"
#include "llmc/parallel/zero.cuh"
#include "llmc/base/limits.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/plan/fit.h"
#include "llmc/plan/gpu_setup.cuh"
#include "llmc/setup/options.h"
#include "llmc/plan/plan.h"
#include "llmc/setup/resolve.h"

// The type of the weights as they are saved: of master weights if there are any.
static inline SafeTensorsDtype planned_saved_dtype(const Options* o) {
    const int has_master = o->master_weights && !options_only_uses_model(o),
              is_fp32 = DTYPE_OF(floatX) == DTYPE_FP32 || has_master;
    return is_fp32 ? SAFETENSORS_F32 : DTYPE_OF(floatX) == DTYPE_FP16 ? SAFETENSORS_F16 : SAFETENSORS_BF16;
}

// The tokens of a classifier's chunk: also of a batch that is smaller than a micro-batch.
static inline int planned_chunk(const Options* o) {
    const int64_t N = (int64_t)o->batch * o->seq_len;
    return (int)(o->logits_chunk < N ? o->logits_chunk : N);
}

// Returns the bytes of activations, for training or generation. A run that trains uses the same
// memory for both, in turns, and for saves.
static inline size_t planned_activations(TensorRow* rows, ModelConfig cfg, const Options* o) {
    const Freeze freeze = freeze_of(cfg.L, o->freeze);
    TensorRow texts[MODEL_ACTIVATION_ROWS];
    const int residuals = cfg.L - (o->offload_residuals ? offload_residual_layers(cfg.L) : 0);
    const size_t text = decoder_activation_rows(texts, cfg, plan_decode_batch(o), o->seq_len);
    const size_t trained = model_activation_rows(rows, cfg, o->batch, o->seq_len, o->recompute, residuals,
                                                 freeze.first_block, (size_t)planned_chunk(o));
    const size_t least = TRANSFER_SCRATCH_LEAST, most = trained > least ? trained : least;
    return o->recompute == RECOMPUTE_NEVER || text > most ? text : most;
}

// What is kept beside the weights.
static inline MasterWeights planned_master(const Options* o) {
    return !o->master_weights || DTYPE_OF(floatX) == DTYPE_FP32 ? MASTER_NONE
           : DTYPE_OF(floatX) == DTYPE_FP16                     ? MASTER_FP32
           : o->master_weights == MASTER_WEIGHTS_24             ? MASTER_24
                                                                : MASTER_SPLIT;
}

// The optimizer's state of a process, with the master weights.
static inline void planned_state(OptimizerState* state, ModelConfig cfg, const ZeroPlan* zero,
                                 const Options* o) {
    Optimizer optimizer = setup_optimizer(o);
    optimizer.master = planned_master(o);
    optimizer_state_open(state, optimizer, zero, cfg);
}

static inline DType planned_gradient_dtype(const Options* o) {
    return o->gradients ? DTYPE_FP32 : DTYPE_OF(floatX);
}

// A run that only evaluates or converts keeps the whole model in every process, and neither
// gradients nor state.
static inline ZeroPlan planned_zero(ModelConfig cfg, const Options* o) {
    return options_only_uses_model(o) ? zero_plan(cfg, 0, 0, 1) : setup_zero(cfg, o, o->shards);
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
static inline void memory_add_optimizer_(Memory* memory, ModelConfig cfg, const ZeroPlan* zero,
                                         const Options* o) {
    const MemoryPlace place = o->offload_optimizer == OFFLOAD_DISK   ? MEMORY_DISK
                              : o->offload_optimizer == OFFLOAD_HOST ? MEMORY_HOST
                                                                     : MEMORY_DEVICE;
    OptimizerState state;
    planned_state(&state, cfg, zero, o);
    plan_add_state(memory, &state, place);
    if (place != MEMORY_DEVICE) {
        memory_add_chunks_(memory, &state, zero, place);
    }
}

// Of the residual stream after a block.
static inline size_t planned_residual_bytes(ModelConfig cfg, const Options* o) {
    return (size_t)o->batch * (size_t)o->seq_len * (size_t)cfg.C * sizeof(floatX);
}

// Micro-batches of an update.
static inline int64_t planned_micro_batches(const Options* o) {
    return (o->total_batch / o->seq_len + o->batch - 1) / o->batch;
}

// Room for losses: of the micro-steps of an update, and of as many batches of a validation as the GPU may be behind the
// host.
static inline int64_t planned_losses(const Options* o) {
    const int64_t update = planned_micro_batches(o), validation = 256;
    return update > validation ? update : validation;
}

// And of one process.
static inline double memory_micro_steps_(const Options* o) {
    return ceil((double)planned_micro_batches(o) / o->processes);
}

// What --offload-params keeps on the host. Both passes read parameters; the norm and the update read gradients, too.
static inline void memory_add_slices_(Memory* memory, const ZeroPlan* zero, const Options* o) {
    const double m = memory_micro_steps_(o);
    const size_t params = zero_parameter_slice_bytes(zero, DTYPE_OF(floatX)),
                 grads = zero_gradient_slice_bytes(zero);
    if (o->offload_params) {
        memory_set_moves(memory_count(memory, "shard of the parameters", MEMORY_HOST, params), 2 * m, 1);
        memory_set_moves(memory_count(memory, "shard of the gradients", MEMORY_HOST, grads), m + 1, m);
    }
}

// What --offload-residuals keeps on the host.
static inline void memory_add_residuals_(Memory* memory, ModelConfig cfg, const Options* o) {
    const size_t layers = o->offload_residuals ? (size_t)offload_residual_layers(cfg.L) : 0;
    const double m = memory_micro_steps_(o);
    memory_set_moves(
        memory_count(memory, "residual stream", MEMORY_HOST, layers * planned_residual_bytes(cfg, o)), m, m);
}

// What the operations of training need for themselves, and room for batches and results.
static inline size_t memory_scratch_(ModelConfig cfg, const ZeroPlan* zero, const Options* o) {
    const size_t N = (size_t)o->batch * o->seq_len;
    OptimizerState state;
    planned_state(&state, cfg, zero, o);
    return optimizer_planned_bytes<floatX>(&state, zero) +
           attention_planned_bytes(o->batch, o->seq_len, cfg.C, cfg.NH, DTYPE_OF(floatX)) +
           layernorm_planned_bytes((int)N, cfg.C) + embedding_planned_bytes((int)N, cfg.C) +
           (o->freeze && o->freeze[0] ? optimizer_freeze_bytes(zero->groups) : 0) +
           gradient_norm_planned_bytes(zero_count(zero, ZERO_SHARDS)) + batch_queue_planned_bytes(N) +
           step_result_bytes(planned_losses(o)) + N * sizeof(int);
}

// What passes between the GPU and the host on its way.
static inline size_t memory_staging_(ModelConfig cfg, const Options* o) {
    const size_t N = (size_t)o->batch * o->seq_len,
                 trained = batch_queue_pinned_bytes(N) + step_result_bytes(planned_losses(o));
    return decoder_host_bytes(cfg, plan_decode_batch(o), o->seq_len) +
           (o->recompute == RECOMPUTE_NEVER ? 0 : trained);
}

// Whether the update has matmuls beside those of the backward pass, on another stream: with a workspace of their own.
static inline int planned_matmuls_beside(const Options* o) {
    return o->update_in_backward && o->optimizer == OPTIMIZER_MUON;
}

static inline size_t memory_workspaces_(ModelConfig cfg, const Options* o) {
    const MatmulSettings settings = gpu_setup_matmul(cfg, o);
    MatmulSettings beside = settings;
    beside.bias_fusion = 0;
    return matmul_planned_bytes(settings) + (planned_matmuls_beside(o) ? matmul_planned_bytes(beside) : 0);
}

// NCCL's memory. For a plan, which opens nothing: a GiB for a communicator, and 12 MiB for each of
// 32 channels to each other process of a replica, as NCCL lists them in
// https://github.com/NVIDIA/nccl/issues/1685. There 8 H100s take 4.34 GB after their first
// all-to-all; 6 GB with three communicators are seen in issues/864.
static inline size_t planned_nccl_bytes(const Options* o) {
    const size_t communicators = o->shards < o->processes ? 3 : 1;
    return o->processes == 1 || options_only_uses_model(o) || !o->plan
               ? o->nccl_bytes
               : (communicators << 30) + (size_t)(o->shards - 1) * 32 * ((size_t)12 << 20);
}

// Matmuls, generation, and what all runs have on the host.
static inline void memory_add_common_(Memory* memory, ModelConfig cfg, const Options* o) {
    memory_count(memory, "NCCL", MEMORY_DEVICE, planned_nccl_bytes(o));
    memory_count(memory, "cuBLASLt workspace", MEMORY_DEVICE, memory_workspaces_(cfg, o));
    memory_count(memory, "expanded matrix", MEMORY_DEVICE, linear_planned_bytes(cfg, o->quantize));
    memory_count(memory, "texts", MEMORY_DEVICE, decoder_planned_bytes(plan_decode_batch(o), o->seq_len));
    memory_count(memory, "staging", MEMORY_HOST, memory_staging_(cfg, o));
}

// Sets the list of all that model_open allocates, to the byte, the copy of the first save, and what
// NCCL has; it ends with a name of NULL. Only cuDNN's workspace, where it is used, is an upper
// bound.
static inline void memory_plan(Memory* memory, ModelConfig cfg, const Options* o) {
    TensorRow parameters[MODEL_PARAMETER_ROWS], activations[MODEL_ACTIVATION_ROWS];
    const ZeroPlan zero = planned_zero(cfg, o);
    const int trains = !options_only_uses_model(o);
    const int on_gpu = !o->offload_params; // the slices of both
    if (o->quantize) {
        memory_count(memory, "parameters in 8 bits", MEMORY_DEVICE,
                     quantized_parameter_rows(parameters, cfg, sizeof(floatX)));
    } else {
        memory_count(memory, "parameters", MEMORY_DEVICE,
                     zero_parameter_bytes(&zero, DTYPE_OF(floatX)) +
                         (on_gpu ? zero_parameter_slice_bytes(&zero, DTYPE_OF(floatX)) : 0));
    }
    if (o->recompute == RECOMPUTE_NEVER) {
        const size_t bytes = decoder_activation_rows(activations, cfg, plan_decode_batch(o), o->seq_len);
        plan_add_text(memory, activations, bytes);
        memory_add_common_(memory, cfg, o);
        return;
    }
    if (trains) {
        memory_count(memory, "gradients", MEMORY_DEVICE,
                     zero_gradient_bytes(&zero, planned_gradient_dtype(o)) +
                         (on_gpu ? zero_gradient_slice_bytes(&zero) : 0));
        memory_add_slices_(memory, &zero, o);
        memory_add_optimizer_(memory, cfg, &zero, o);
        memory_add_residuals_(memory, cfg, o);
    }
    memory_count(memory, "activations", MEMORY_DEVICE, planned_activations(activations, cfg, o));
    memory_count(memory, "scratch", MEMORY_DEVICE, memory_scratch_(cfg, &zero, o));
    memory_add_common_(memory, cfg, o);
    const size_t copy_bytes =
        o->out[0] && trains
            ? checkpoints_bytes(cfg, setup_optimizer(o), &zero, planned_saved_dtype(o), o->model_file_gb)
            : 0;
    memory_count(memory, "pinned copy to save", MEMORY_HOST, copy_bytes);
}

// Of the GPU.
static inline size_t memory_bytes_(ModelConfig cfg, const Options* options) {
    Memory memory = memory_dry();
    memory_plan(&memory, cfg, options);
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
static inline size_t memory_usable_(const Options* o) {
    const size_t found = memory_free_(o->device) + o->nccl_bytes, room = found / 50 + ((size_t)64 << 20);
    return found > room ? found - room : 0;
}

// Connects the GPUs of several processes for the run that follows, and prints what NCCL takes of
// this one. Collective.
static inline void memory_connect(ModelConfig cfg, Options* o, Comm* comm) {
    const ZeroPlan zero = planned_zero(cfg, o);
    Gpu gpu;
    gpu_open(&gpu, o->device);
    const size_t before = memory_free_(o->device);
    zero_connect(&zero, planned_gradient_dtype(o), comm, &gpu);
    const size_t after = memory_free_(o->device);
    o->nccl_bytes = before > after ? before - after : 0;
    gpu_close(&gpu);
    const GroupGpu* all = &((const ZeroGroups*)comm->gpus)->all;
    gpu_library_takes(all->communicator, o->nccl_bytes);
    printf("%s: %.1f MiB of GPU memory\n", all->library, (double)o->nccl_bytes / (1 << 20));
}

// The least that --logits-chunk auto chooses: smaller chunks save little memory.
static inline int memory_least_chunk_(ModelConfig cfg, const Options* o) {
    return (int)model_classifier_chunk(cfg, (size_t)o->batch * (size_t)o->seq_len);
}

static inline int memory_least_recompute_(const Options* o) {
    return o->offload_residuals ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
}

// Ends the program if the run does not fit into the memory of the GPU. The error names the largest micro-batch
// that fits, with the lowest level of recomputation that it needs.
static inline void memory_require(ModelConfig cfg, const Options* options) {
    const size_t free_bytes = memory_usable_(options), wanted = memory_bytes_(cfg, options);
    if (wanted <= free_bytes) {
        return;
    }
    CHECK(options->recompute != RECOMPUTE_NEVER,
          "the model and its texts need %.1f MiB of GPU memory, %.1f are free; wanted a smaller --batch or "
          "--seq-len",
          (double)wanted / (1 << 20), (double)free_bytes / (1 << 20));
    Options smaller = *options;
    for (; smaller.batch > 0; smaller.batch /= 2) {
        const int least = memory_least_chunk_(cfg, &smaller);
        smaller.logits_chunk = options->logits_chunk;
        const int has_more = planned_chunk(&smaller) > least;
        smaller.logits_chunk = has_more ? least : options->logits_chunk;
        for (smaller.recompute = memory_least_recompute_(options); smaller.recompute <= RECOMPUTE_BLOCK;
             smaller.recompute++) {
            CHECK(memory_bytes_(cfg, &smaller) > free_bytes,
                  "the run needs %.1f MiB of GPU memory, %.1f are free; --batch %d --recompute %s%s fits",
                  (double)wanted / (1 << 20), (double)free_bytes / (1 << 20), smaller.batch,
                  model_recompute_word(smaller.recompute), has_more ? " --logits-chunk auto" : "");
        }
    }
    CHECK(0,
          "the run needs %.1f MiB of GPU memory, %.1f are free: too little even for --batch 1 --recompute 3",
          (double)wanted / (1 << 20), (double)free_bytes / (1 << 20));
}

// Returns the limit for options that are chosen by the plan; without such a GPU, SIZE_MAX. --fit may
// lower it.
static inline size_t memory_limit_(const Options* o) {
    const size_t wanted = o->fit > 0 ? (size_t)(o->fit * (float)(1 << 30)) : SIZE_MAX;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || o->device >= count) {
        cudaGetLastError(); // clears the error: a plan needs no GPU
        return wanted;
    }
    const size_t usable = memory_usable_(o);
    return wanted < usable ? wanted : usable;
}

// Decides --recompute auto and prints why: the lowest level that fits into the GPU's memory.
static inline void memory_choose_recompute_(ModelConfig cfg, Options* options, size_t limit) {
    options->recompute = memory_least_recompute_(options);
    if (options->recompute == RECOMPUTE_BLOCK) {
        printf("recompute: level %s, for --offload-residuals\n", model_recompute_word(options->recompute));
        return;
    }
    while (options->recompute < RECOMPUTE_BLOCK && memory_bytes_(cfg, options) > limit) {
        options->recompute++;
    }
    if (limit == SIZE_MAX) {
        printf("recompute: level 0, assuming that it fits: no GPU to check\n");
    } else {
        printf("recompute: level %s, the lowest that fits into %.1f MiB of free GPU memory\n",
               model_recompute_word(options->recompute), (double)limit / (1 << 20));
    }
}

// Decides --logits-chunk auto and prints it: all tokens of a micro-batch, half of them, a quarter ... With
// fewer chunks, fewer matmuls read and write the gradient of the embedding, and round it.
static inline void memory_choose_chunk_(ModelConfig cfg, Options* options, size_t limit) {
    const int least = memory_least_chunk_(cfg, options);
    options->logits_chunk = INT_MAX;
    const int N = planned_chunk(options);
    options->logits_chunk = N;
    for (int parts = 2; options->logits_chunk > least && memory_bytes_(cfg, options) > limit; parts *= 2) {
        options->logits_chunk = ceil_div(N, parts) > least ? ceil_div(N, parts) : least;
    }
    printf("logits: %d tokens at a time, %s\n", options->logits_chunk,
           options->logits_chunk == N ? "the whole micro-batch"
                                      : "the largest chunk that fits into GPU memory");
}

// The plan of --fit, which leaves --logits-chunk auto for later.
static inline void memory_plan_least_(Memory* memory, ModelConfig cfg, const Options* options) {
    Options least = *options;
    least.logits_chunk =
        options->logits_chunk == OPTION_AUTO ? memory_least_chunk_(cfg, options) : options->logits_chunk;
    memory_plan(memory, cfg, &least);
}

// --fit: decides --batch, --recompute and --offload-optimizer.
static inline void memory_fit_(ModelConfig cfg, Options* options, Comm* comm, const CostDevice* speed,
                               size_t limit) {
    const FitDevice device = {memory_plan_least_, limit,
                              comm_min(comm, limits_free_bytes(comm->local_size, "")), 1, *speed};
    if (limit == SIZE_MAX) {
        die_usage("--fit auto: no GPU to ask for its free memory; wanted --fit GIB");
    }
    fit_choose(stdout, cfg, options, &device);
}

// Decides what is open because it depends on the GPU's memory: recomputation first, since it costs more than
// chunks do.
static inline void memory_choose(ModelConfig cfg, Options* options, Comm* comm, const CostDevice* speed) {
    // all processes choose the same
    const size_t limit = comm_min(comm, memory_limit_(options));
    if (options->fit != 0) {
        memory_fit_(cfg, options, comm, speed, limit);
    }
    const int recompute_is_auto = options->recompute == OPTION_AUTO,
              chunk_is_auto = options->logits_chunk == OPTION_AUTO;
    if (!recompute_is_auto && !chunk_is_auto) {
        return;
    }
    options->logits_chunk = chunk_is_auto ? memory_least_chunk_(cfg, options) : options->logits_chunk;
    if (recompute_is_auto) {
        memory_choose_recompute_(cfg, options, limit);
    }
    if (chunk_is_auto) {
        memory_choose_chunk_(cfg, options, limit);
    }
}

#endif
