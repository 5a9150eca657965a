/*
gpu_setup.cuh -- the settings that depend on the GPU, but not on its memory (memory_limit.cuh):
which GPU a rank uses, how matmuls run, and whether micro-steps are graphs.
*/
#ifndef LLMC_GPU_SETUP_CUH
#define LLMC_GPU_SETUP_CUH

#include <stdio.h>

#include "llmc/gpu/floatx.cuh"

#include "llmc/base/check.h"
#include "llmc/base/limits.h"
#include "llmc/layers/mixer_config.h"
#include "llmc/layers/weight.h"
#include "llmc/comm/comm.h"
#include "llmc/comm/comm_nccl.cuh"
#include "llmc/model/model.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/ptx.cuh"
#include "llmc/ops/attention.h"
#include "llmc/ops/delta_rule.cuh"
#include "llmc/ops/matmul_plans.cuh"
#include "llmc/ops/matmul_fp8.cuh"
#include "llmc/setup/settled.h"

// Returns the type of the parameters in memory.
static inline SafeTensorsDtype gpu_setup_dtype(void) {
    return DTYPE_OF(floatX) == DTYPE_FP32   ? SAFETENSORS_F32
           : DTYPE_OF(floatX) == DTYPE_FP16 ? SAFETENSORS_F16
                                            : SAFETENSORS_BF16;
}

// Returns the type of the gradients.
static inline DType gpu_setup_gradients(const Settled* s) {
    return s->options.memory.gradients ? DTYPE_FP32 : DTYPE_OF(floatX);
}

// Ends the program if the options need another PRECISION.
static inline void gpu_setup_check_(const Options* o) {
    if (*o->plan_gpu && !o->plan) {
        die_usage("--plan-gpu %s is for a plan; wanted --plan, or --device for a GPU of this machine",
                  o->plan_gpu);
    }
    if (o->memory.update_in_backward && DTYPE_OF(floatX) == DTYPE_FP16) {
        die_usage(
            "--update-in-backward on with PRECISION=FP16, whose loss scale needs the whole gradient first; "
            "wanted PRECISION=BF16 or FP32, or off");
    }
    if (o->memory.master_weights == MASTER_WEIGHTS_24 && DTYPE_OF(floatX) != DTYPE_BF16) {
        die_usage("--master-weights 24 with PRECISION=" PRECISION_NAME "; wanted PRECISION=BF16, or on");
    }
}

// True if the replicas of a model have communicators of their own.
static inline int gpu_setup_has_replicas_(const Settled* s) {
    return s->ranks.shards < ranks_data(&s->ranks).size;
}

// Returns 1 if micro-steps are CUDA graphs. With replicas, or groups for layers besides the data
// group, a graph contains operations of two communicators while others run outside of it; NCCL's
// manual warns that this can hang (NCCL_GRAPH_MIXING_SUPPORT), and no GPU has tried it. In a stage
// the backward pass of a micro-step does not follow its forward pass at once. If ranks divide
// experts, the host waits for counts in each layer.
static inline int gpu_setup_graph(const Settled* s) {
    const GridShape shape = s->ranks.grid.shape;
    const int has_more = gpu_setup_has_replicas_(s) || grid_has_several_streams(shape);
    return shape.pipeline == 1 && grid_experts(shape) == 1 &&
           (s->options.memory.graph == OPTION_AUTO ? !has_more : s->options.memory.graph);
}

// Returns the number of processes that share this one's cores: on its machine, and with the same
// first core. Collective.
static inline int gpu_setup_sharers_(Comm* comm) {
    const int mine[2] = {comm->node, limits_first_core()};
    int(*all)[2] = (int(*)[2])check_alloc((size_t)comm->size, sizeof(mine), "cores of processes"), count = 0;
    comm_all_gather(comm, all, mine, sizeof(mine));
    for (int rank = 0; rank < comm->size; rank++) {
        count += memcmp(all[rank], mine, sizeof(mine)) == 0;
    }
    free(all);
    return count;
}

// Lets processes sleep while they wait for their GPUs if they have too few cores: each has a thread
// that waits, one of NCCL, and one that loads data. A thread that spins reacts faster. Collective.
static inline void gpu_setup_waits_(Comm* comm, const Options* o) {
    const int sharers = gpu_setup_sharers_(comm), cores = limits_cores("");
    if (cores < 3 * sharers) {
        gpu_use(o->memory.device);
        CUDA_CHECK(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
        // of generation not where the text goes
        fprintf(o->generates ? stderr : stdout, "waiting for GPUs: asleep, %d cores for %d processes\n",
                cores, sharers);
    }
}

// Refuses matmuls in fp8 on a GPU without them, and of rows that cublasLt cannot read.
static inline void gpu_setup_check_fp8_(const Settled* s, int device) {
    const int F = model_hidden(s->part), Fs = s->part.Fs, gates = model_gates(s->part),
              sizes[] = {s->part.C, model_attention_rows(s->part), F, F * gates, Fs, Fs * gates};
    for (int i = 0; i < 6; i++) {
        if (sizes[i] % E4M3_UNIT) {
            die_usage("--matmul fp8: a matrix has %d rows or columns; on a GPU wanted a multiple of %d",
                      sizes[i], E4M3_UNIT);
        }
    }
    if (!matmul_fp8_is_on(device)) {
        die_usage("--matmul fp8: this GPU has none; cuBLASLt gives scales to rows on compute capability 9.0, "
                  "which H100 and H200 have");
    }
}

// Refuses a delta rule whose keys and states do not fit into the shared memory of a block. A plan
// needs no GPU.
static inline void gpu_setup_check_delta_(const Settled* s, int device) {
    int shared = 0;
    const DeltaSizes sizes = mixer_config_sizes(s->cfg, 1, 1);
    if (!mixer_parts(model_mixer(s->cfg)).has_heads ||
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
        cudaGetLastError(); // clears the error
    } else if (delta_rule_shared_bytes<floatX>(sizes) > (size_t)shared) {
        die_usage("the delta rule of %s has keys of %d channels, which take %zu bytes of shared memory with "
                  "PRECISION=" PRECISION_NAME ", and this GPU has %d; wanted 16 bits, or shorter keys",
                  model_architecture(s->cfg.arch)->word, sizes.dk, delta_rule_shared_bytes<floatX>(sizes),
                  shared);
    }
}

// Returns the settings with --device auto decided. Turns --autotune off if several ranks only
// evaluate or convert: they do not communicate, so each would choose its own matmul algorithms.
static inline Settled gpu_setup(const Settled* s, Comm* comm) {
    Settled chosen = *s;
    Options* o = &chosen.options;
    gpu_setup_check_(o);
    if (o->memory.attention == ATTENTION_BY_WGMMA &&
        (!PTX_HAS_WGMMA || DTYPE_OF(floatX) == DTYPE_FP32 || model_head_size(s->cfg) % 8)) {
        die_usage("--attention wgmma with heads of size %d, PRECISION=" PRECISION_NAME
                  " and kernels for sm_%d; wanted multiples of 8, PRECISION=BF16 or FP16, and ARCH=sm_90a",
                  model_head_size(s->cfg), GPU_SM);
    }
    if (comm->size > 1 && o->memory.device != OPTION_AUTO) {
        die_usage("--device %d is for one process; %d take one GPU each", o->memory.device, comm->size);
    }
    if (comm->size > 1 && o->memory.autotune && s->use == USE_EVALUATE) {
        printf("autotune: off, with several processes that do not train\n");
        o->memory.autotune = 0;
    }
    if (o->memory.device == OPTION_AUTO) {
        o->memory.device = comm->size > 1 ? gpu_device_of_rank(comm, OPTION_AUTO) : 0;
    }
    if (comm->size > 1) {
        gpu_setup_waits_(comm, o);
    }
    if ((MatmulPrecision)o->memory.matmul == MATMUL_FP8) {
        gpu_setup_check_fp8_(s, o->memory.device);
    }
    gpu_setup_check_delta_(s, o->memory.device);
    return chosen;
}

// Ends all ranks if a graph would have exchanges whose order only events keep (comm_nccl.cuh).
static inline void gpu_setup_check_order(const Settled* s, const GroupGpu* all) {
    CHECK(!all->last || !gpu_setup_graph(s),
          "--graph on, and %s keeps no order of exchanges; wanted NCCL 2.26 or newer with "
          "NCCL_LAUNCH_ORDER_IMPLICIT=1, or --graph auto",
          all->library);
}

// Returns why --graph auto is off in this grid.
static inline const char* gpu_setup_graphless_(const Settled* s) {
    return s->ranks.grid.shape.pipeline > 1        ? "in a pipeline"
           : grid_experts(s->ranks.grid.shape) > 1 ? "with divided experts"
           : gpu_setup_has_replicas_(s)            ? "with replicas of the model; --graph on tries it"
                                                   : "with two kinds of groups; --graph on tries it";
}

// Returns the settings for this grid. Says that graphs are off in it. Turns --autotune off in a
// pipeline: rank 0, which chooses for all, does not have the matmuls of other stages.
static inline Settled gpu_setup_grid(const Settled* s) {
    Settled chosen = *s;
    if (!gpu_setup_graph(s) && s->options.memory.graph == OPTION_AUTO) {
        printf("graph: off, %s\n", gpu_setup_graphless_(s));
    }
    if (s->ranks.grid.shape.pipeline > 1 && s->options.memory.autotune) {
        printf("autotune: off, in a pipeline\n");
        chosen.options.memory.autotune = 0;
    }
    return chosen;
}

// Returns which matmuls fuse GELU. A forward matmul applies GELU before it rounds its result, but a
// recomputed GELU gets rounded values. So levels that recompute GELU without its matmul keep it out
// of forward matmuls. The derivative always uses rounded values.
static inline GeluFusion gpu_setup_gelu_(const Options* o) {
    static const int fused[] = {GELU_SEPARATE, GELU_FUSED_FORWARD, GELU_FUSED};
    const int gelu_again =
        o->memory.recompute == RECOMPUTE_ACTIVATION || o->memory.recompute == RECOMPUTE_NORMS;
    const int fusion = o->memory.gelu_fusion == OPTION_AUTO
                           ? GELU_RACE | (matmul_gelu_pays(o->memory.device) ? GELU_FUSED : GELU_SEPARATE)
                           : fused[o->memory.gelu_fusion];
    return (GeluFusion)(gelu_again ? fusion & ~(GELU_FUSED_FORWARD | GELU_RACE_FORWARD) : fusion);
}

static inline MatmulSettings gpu_setup_matmul(const Settled* s) {
    const Options* o = &s->options;
    const MatmulSettings settings = {
        o->memory.tf32, gpu_setup_gelu_(o), 1, o->memory.autotune,
        matmul_workspace_bytes(o->memory.device, (size_t)o->batch.size * (size_t)settled_rank_length(s),
                               (size_t)s->cfg.C)};
    return settings;
}

#endif
