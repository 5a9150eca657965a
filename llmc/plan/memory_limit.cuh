/*
memory_limit.cuh -- the GPU memory that a run may take: the settings that depend on it, and the
check that the run fits.

    memory_connected  opens NCCL before the rest is planned: its memory is measured, not computed
    memory_choose     decides --fit, --recompute auto and --logits-chunk auto, and prints why
    memory_require    ends the program if the run does not fit, and says what would

`model` plans a run with given settings.
*/
#ifndef LLMC_MEMORY_LIMIT_CUH
#define LLMC_MEMORY_LIMIT_CUH

#include <limits.h>

#include "llmc/plan/gpu_setup.cuh" // first, for the type of weights

#include "llmc/model/model.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/parallel/zero.cuh"
#include "llmc/base/limits.h"
#include "llmc/plan/fit.h"
#include "llmc/plan/fit_grid.h"
#include "llmc/plan/gpu_report.cuh"
#include "llmc/setup/settled.h"

// Returns the smallest chunk that --logits-chunk auto chooses: smaller ones save little memory.
static inline int memory_least_chunk_(const Settled* s) {
    return (int)model_classifier_chunk(s->cfg,
                                       (size_t)s->options.batch.size * (size_t)settled_rank_length(s));
}

// Returns the tokens of the classifier's chunk: at most a micro-batch, and the smallest chunk while
// --logits-chunk is auto.
static inline int memory_chunk(const Settled* s) {
    const Options* o = &s->options;
    const int64_t N = (int64_t)o->batch.size * settled_rank_length(s),
                  chunk =
                      o->memory.logits_chunk == OPTION_AUTO ? memory_least_chunk_(s) : o->memory.logits_chunk;
    return (int)(chunk < N ? chunk : N);
}

// Communicators of a GPU, and other GPUs that it has buffers for, all groups together.
typedef struct {
    int communicators, peers;
} MemoryLinks;

// Counts the links of a run (grid_groups_gpu_open). A group of all may be the first communicator
// itself. A stage exchanges with its neighbors only; the data group with the ranks of its replica.
static inline MemoryLinks memory_links(const Ranks* ranks) {
    const int all = grid_size(ranks->grid.shape), shards = ranks->shards;
    MemoryLinks links = {all > 1, 0};
    int of_all = 0; // peers in groups of all
    for (int g = 0; g < GRID_GROUPS; g++) {
        const int is_of_all = grid_is_of_all(&ranks->grid, (GridGroup)g);
        const int size = grid_member(&ranks->grid, (GridGroup)g).size, near = g == GRID_DATA ? shards
                                                                              : g == GRID_PIPE && size > 3
                                                                                  ? 3
                                                                                  : size;
        links.communicators += size > 1 && !is_of_all;
        links.peers += is_of_all ? 0 : near - 1;
        of_all = is_of_all && near - 1 > of_all ? near - 1 : of_all;
    }
    links.peers += of_all;
    links.communicators += shards < ranks_data(ranks).size ? 2 : 0;
    return links;
}

// Returns the bytes of GPU memory that NCCL takes. --plan does not open NCCL and estimates them: 1
// GiB per communicator, and 12 MiB for each of 32 channels to every other rank that a group
// exchanges with, as NCCL lists them in https://github.com/NVIDIA/nccl/issues/1685. That issue
// reports 4.34 GB for 8 H100s after their first all-to-all; issues/864 reports 6 GB with three
// communicators.
static inline size_t memory_nccl_bytes(const Settled* s) {
    const MemoryLinks links = memory_links(&s->ranks);
    return links.communicators == 0 || s->use != USE_TRAIN || !s->options.plan
               ? s->nccl_bytes
               : ((size_t)links.communicators << 30) + (size_t)links.peers * 32 * ((size_t)12 << 20);
}

// Returns the bytes of GPU memory that a run takes.
static inline size_t memory_bytes_(const Settled* s, PlanModel model) {
    const ModelPlan plan = plan_model(model, s);
    return memory_bytes(&plan.memory, MEMORY_DEVICE);
}

static inline size_t memory_free_(int device) {
    size_t free_bytes = 0, total_bytes = 0;
    gpu_use(device);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

// Returns the GPU memory that a plan, including NCCL, may use. Reserves 2 % for kernels and
// everything else that CUDA loads during the run, and 64 MiB because the driver allocates units of
// 2 MiB. NCCL may take more when it is first captured, where it registers what it sends.
static inline size_t memory_usable_(const Settled* s) {
    const size_t captured = ranks_size(&s->ranks) > 1 && gpu_setup_graph(s) ? (size_t)256 << 20 : 0;
    const size_t planned = s->options.plan ? gpu_planned_memory(&s->options) : 0,
                 found = planned ? planned : memory_free_(s->options.memory.device) + s->nccl_bytes,
                 room = found / 50 + ((size_t)64 << 20) + captured;
    return found > room ? found - room : 0;
}

// Connects the GPUs of several ranks for the coming run. Prints and returns the bytes of this GPU's
// memory that NCCL takes. Collective.
static inline size_t memory_connect_(const Settled* s, Comm* comm) {
    Gpu gpu;
    const MapOf of = settled_map(s, ZERO_LAYERS_IN_MEMORY);
    gpu_open(&gpu, s->options.memory.device);
    const size_t before = memory_free_(s->options.memory.device);
    zero_connect(&s->zero, &of, s->ranks.grid, gpu_setup_gradients(s), comm, &gpu);
    const size_t after = memory_free_(s->options.memory.device), bytes = before > after ? before - after : 0;
    gpu_close(&gpu);
    const GroupGpu* all = &((const GridGroupsGpu*)comm->gpus)->all;
    gpu_library_takes(all->communicator, bytes);
    // a generated text goes to stdout, which is /dev/null in ranks above 0
    fprintf(s->use == USE_GENERATE && comm->rank == 0 ? stderr : stdout, "%s: %.1f MiB of GPU memory%s\n",
            all->library, (double)bytes / (1 << 20),
            all->last ? "; it keeps no order of exchanges, so they run one at a time (wanted 2.26 with "
                        "NCCL_LAUNCH_ORDER_IMPLICIT=1)"
                      : "");
    return bytes;
}

// Returns the settings with the memory that NCCL takes; a plan opens none. Collective.
static inline Settled memory_connected(const Settled* s, Comm* comm) {
    Settled connected = *s;
    if (comm->size > 1 && !s->options.plan) {
        connected.nccl_bytes = memory_connect_(s, comm);
    }
    return connected;
}

static inline int memory_least_recompute_(const Settled* s) {
    return s->options.memory.offload_residuals ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
}

// Ends the program if the run does not fit into GPU memory. The error names the largest micro-batch
// that fits, found by halving --batch, and the lowest level of recomputation with which it fits.
static inline void memory_require(const Settled* s, PlanModel model) {
    const size_t free_bytes = memory_usable_(s), wanted = memory_bytes_(s, model);
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
    for (; o->batch.size > 0; o->batch.size /= 2) {
        const int least = memory_least_chunk_(&smaller);
        o->memory.logits_chunk = s->options.memory.logits_chunk;
        const int has_more = memory_chunk(&smaller) > least;
        o->memory.logits_chunk = has_more ? least : s->options.memory.logits_chunk;
        settled_conclude(&smaller);
        for (o->memory.recompute = memory_least_recompute_(s); o->memory.recompute <= RECOMPUTE_BLOCK;
             o->memory.recompute++) {
            CHECK(memory_bytes_(&smaller, model) > free_bytes,
                  "the run needs %.1f MiB of GPU memory, %.1f are free; --batch %d --recompute %s%s fits",
                  wanted_mib, free_mib, o->batch.size, model_recompute_word(o->memory.recompute),
                  has_more ? " --logits-chunk auto" : "");
        }
    }
    CHECK(0,
          "the run needs %.1f MiB of GPU memory, %.1f are free: too little even for --batch 1 --recompute 3",
          wanted_mib, free_mib);
}

// Returns the most GPU memory that chosen settings may take: the usable memory, or less with --fit
// GIB.
static inline size_t memory_limit_(const Settled* s) {
    const float fit = s->options.memory.fit;
    const size_t wanted = fit > 0 ? (size_t)(fit * (float)(1 << 30)) : SIZE_MAX, usable = memory_usable_(s);
    return wanted < usable ? wanted : usable;
}

// Returns the level of --recompute auto, the lowest that fits into GPU memory, and prints why.
static inline int memory_choose_recompute_(const Settled* s, PlanModel model, size_t limit) {
    Settled tried = *s;
    int* level = &tried.options.memory.recompute;
    *level = memory_least_recompute_(s);
    if (*level == RECOMPUTE_BLOCK) {
        printf("recompute: level %s, for --offload-residuals\n", model_recompute_word(*level));
        return *level;
    }
    while (*level < RECOMPUTE_BLOCK && memory_bytes_(&tried, model) > limit) {
        ++*level;
    }
    printf("recompute: level %s, the lowest that fits into %.1f MiB of free GPU memory\n",
           model_recompute_word(*level), (double)limit / (1 << 20));
    return *level;
}

// Returns the chunk of --logits-chunk auto and prints it: the first that fits of a micro-batch, a
// half, a quarter, ... With fewer chunks, fewer matmuls read, write and round the gradient of the
// embedding.
static inline int memory_choose_chunk_(const Settled* s, PlanModel model, size_t limit) {
    const int least = memory_least_chunk_(s);
    Settled tried = *s;
    int* chunk = &tried.options.memory.logits_chunk;
    *chunk = INT_MAX;
    const int N = memory_chunk(&tried);
    *chunk = N;
    for (int parts = 2; *chunk > least && memory_bytes_(&tried, model) > limit; parts *= 2) {
        *chunk = ceil_div(N, parts) > least ? ceil_div(N, parts) : least;
    }
    printf("logits: %d tokens at a time, %s\n", *chunk,
           *chunk == N ? "the whole micro-batch" : "the largest chunk that fits into GPU memory");
    return *chunk;
}

// Returns the settings with the smallest chunk if --logits-chunk is auto.
static inline Settled memory_with_least_chunk_(const Settled* s) {
    Settled least = *s;
    if (s->options.memory.logits_chunk == OPTION_AUTO) {
        least.options.memory.logits_chunk = memory_least_chunk_(s);
    }
    return least;
}

// Returns the device that --fit chooses settings for; the same on all ranks.
static inline FitDevice memory_device_(const Settled* s, Comm* comm, const CostRates* rates,
                                       PlanModel model) {
    const FitDevice device = {model, comm_min(comm, memory_limit_(s)),
                              comm_min(comm, limits_free_bytes(comm->local_size, "")), 1, *rates};
    return device;
}

// Returns the settings with the grid of several processes that --fit chooses; --plan prints the
// fastest grids. Comes before NCCL, whose groups depend on the grid.
static inline Settled memory_choose_grid(const Settled* s, Comm* comm, const CostRates* rates,
                                         PlanModel model) {
    if (ranks_size(&s->ranks) == 1 || s->use != USE_TRAIN ||
        (s->options.memory.fit == 0 && !s->options.plan)) {
        return *s;
    }
    const FitDevice device = memory_device_(s, comm, rates, model);
    if (s->options.memory.fit != 0) {
        return fit_choose_grid(stdout, s, &device);
    }
    fit_show_grids(stdout, s, &device);
    return *s;
}

// Returns the settings with all choices made that depend on GPU memory. Recomputation comes before
// chunks, since it costs more.
static inline Settled memory_choose(const Settled* s, Comm* comm, const CostRates* rates, PlanModel model) {
    const FitDevice device = memory_device_(s, comm, rates, model);
    const size_t limit = device.limit;
    const int fits = s->options.memory.fit != 0 && ranks_size(&s->ranks) == 1;
    const Settled fitted = fits ? fit_choose(stdout, s, &device) : *s;
    Settled chosen = memory_with_least_chunk_(&fitted);
    if (chosen.options.memory.recompute == OPTION_AUTO) {
        chosen.options.memory.recompute = memory_choose_recompute_(&chosen, model, limit);
    }
    if (fitted.options.memory.logits_chunk == OPTION_AUTO) {
        chosen.options.memory.logits_chunk = memory_choose_chunk_(&chosen, model, limit);
    }
    return chosen;
}

#endif
