/*
groups.cuh -- the groups of a process's GPU in the grid, opened once: groups.h on GPUs.

All are parts of one NCCL communicator. A group of one opens nothing, and a group of all processes
is that communicator itself, if they are on one stream (grid_is_of_all).
*/
#ifndef LLMC_GROUPS_CUH
#define LLMC_GROUPS_CUH

#include "llmc/comm/comm.h"
#include "llmc/comm/comm_nccl.cuh"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/zero.h"

typedef struct {
    Grid grid;
    GroupGpu all; // all processes
    GroupGpu tensor, context, data, pipe, experts, same_experts;
    // Two levels of the data group (zero.h): the ranks of this replica (with one level, the data
    // group itself); and the ranks with the same slice in each replica.
    GroupGpu replica, replicas;
} GridGroupsGpu;

static inline GroupGpu groups_gpu_open_(GridGroupsGpu* groups, GridGroup kind, const char* name) {
    const GridMember member = grid_member(&groups->grid, kind);
    GroupGpu group = group_gpu_alone(groups->all.comm);
    group.rank = member.rank;
    group.size = member.size;
    if (grid_is_of_all(&groups->grid, kind)) {
        group = groups->all;
    } else if (member.size > 1 && groups->all.comm) {
        group_gpu_split(&group, &groups->all, member.first, name);
    }
    return group;
}

// Opens the groups in the order of GridGroup, then the two levels of a plan.
// Collective. comm NULL: sets only their sizes, for a plan.
static inline void grid_groups_gpu_open(GridGroupsGpu* groups, Grid grid, const ZeroPlan* plan, Comm* comm) {
    groups->grid = grid;
    groups->all = GroupGpu{grid_rank(&grid), grid_size(grid.shape), NULL, comm, "", NULL};
    if (comm && groups->all.size > 1) {
        group_gpu_open(&groups->all, comm,
                       grid_has_several_streams(grid.shape) ? GROUP_SEVERAL_STREAMS : GROUP_ONE_STREAM);
    }
    groups->tensor = groups_gpu_open_(groups, GRID_TENSOR, "tensor");
    groups->context = groups_gpu_open_(groups, GRID_CONTEXT, "context");
    groups->replica = groups->data = groups_gpu_open_(groups, GRID_DATA, "data");
    groups->pipe = groups_gpu_open_(groups, GRID_PIPE, "pipe");
    groups->experts = groups_gpu_open_(groups, GRID_EXPERTS, "experts");
    groups->same_experts = groups_gpu_open_(groups, GRID_SAME_EXPERTS, "same experts");
    groups->replicas = group_gpu_alone(comm);
    if (zero_replicas(plan) > 1 && comm) {
        group_gpu_split(&groups->replica, &groups->data, plan->rank / plan->shards, "replica");
        group_gpu_split(&groups->replicas, &groups->data, plan->rank % plan->shards, "replicas");
    }
}

// Sends `bytes` to and from both neighbors in the pipeline.
static inline void groups_gpu_connect_pipe_(const GroupGpu* pipe, void* to, void* from, size_t bytes,
                                            cudaStream_t stream) {
    GroupMove moves[4];
    int count = 0;
    for (int peer = pipe->rank - 1; peer <= pipe->rank + 1; peer += 2) {
        if (peer >= 0 && peer < pipe->size) {
            const size_t half = bytes / 2, at = peer < pipe->rank ? 0 : half;
            const GroupMove sends = {peer, (char*)from + at, half, 1},
                            receives = {peer, (char*)to + at, half, 0};
            moves[count++] = sends;
            moves[count++] = receives;
        }
    }
    group_exchange(moves, count, pipe, stream);
}

// Sends `bytes` by each operation between the ranks of the tensor, context, experts' and pipeline
// groups, so that the library allocates its memory now.
static inline void grid_groups_gpu_connect(const GridGroupsGpu* groups, void* to, void* from, size_t bytes,
                                           cudaStream_t stream) {
    const GroupGpu* const alike[] = {&groups->tensor, &groups->context, &groups->experts};
    for (int i = 0; i < 3; i++) {
        const size_t count = bytes / (size_t)alike[i]->size / sizeof(float);
        if (alike[i]->size > 1) {
            group_all_gather(to, from, count, DTYPE_FP32, alike[i], stream);
            group_all_to_all(to, from, count, DTYPE_FP32, alike[i], stream);
        }
    }
    if (groups->pipe.size > 1) {
        groups_gpu_connect_pipe_(&groups->pipe, to, from, bytes, stream);
    }
}

// Takes over the groups that wait for the model (zero_connect), or opens some.
static inline void grid_groups_gpu_take(GridGroupsGpu* groups, Grid grid, const ZeroPlan* plan, Comm* comm) {
    if (comm && comm->gpus) {
        *groups = *(GridGroupsGpu*)comm->gpus;
        free(comm->gpus);
        comm->gpus = NULL;
    } else {
        grid_groups_gpu_open(groups, grid, plan, comm);
    }
}

static inline void groups_gpu_close_part_(GroupGpu* part, const GroupGpu* whole) {
    if (part->communicator != whole->communicator) {
        group_gpu_close_part(part);
    }
}

// Closes them, once their streams are done.
static inline void grid_groups_gpu_close(GridGroupsGpu* groups) {
    groups_gpu_close_part_(&groups->replicas, &groups->data);
    groups_gpu_close_part_(&groups->replica, &groups->data);
    groups_gpu_close_part_(&groups->same_experts, &groups->all);
    groups_gpu_close_part_(&groups->experts, &groups->all);
    groups_gpu_close_part_(&groups->pipe, &groups->all);
    groups_gpu_close_part_(&groups->data, &groups->all);
    groups_gpu_close_part_(&groups->context, &groups->all);
    groups_gpu_close_part_(&groups->tensor, &groups->all);
    group_gpu_close(&groups->all);
}

// Ends all ranks if NCCL has noticed an error.
static inline void grid_groups_gpu_check(const GridGroupsGpu* groups) {
    const GroupGpu* const all[] = {&groups->all,          &groups->tensor,  &groups->context,
                                   &groups->data,         &groups->pipe,    &groups->experts,
                                   &groups->same_experts, &groups->replica, &groups->replicas};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        group_gpu_check(all[i]);
    }
}

#endif
