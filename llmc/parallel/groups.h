/*
groups.h -- the groups of a process in the grid, opened once, on the CPU.

A group of one opens nothing.
*/
#ifndef LLMC_GROUPS_H
#define LLMC_GROUPS_H

#include "llmc/comm/comm.h"
#include "llmc/comm/group.h"
#include "llmc/parallel/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Grid grid;
    Group tensor, context, data, pipe, experts, same_experts;
} GridGroups;

// Opens the groups of this process in the order of GridGroup. Collective. comm NULL:
// sets only their sizes, for a plan.
void grid_groups_open(GridGroups* groups, Grid grid, Comm* comm);

void grid_groups_close(GridGroups* groups);

// Adds the place in the grid to the names of all ranks in messages.
void grid_name_ranks(GridShape shape, Comm* comm);

#ifdef __cplusplus
}
#endif

#ifdef GROUPS_IMPLEMENTATION

#include "llmc/base/check.h"

static Group groups_open_(const Grid* grid, GridGroup kind, Comm* comm) {
    const GridMember member = grid_member(grid, kind);
    Group group = {member.rank, member.size, NULL, comm};
    if (member.size > 1 && comm) {
        group_open(&group, comm, member.first, member.rank);
    }
    return group;
}

void grid_groups_open(GridGroups* groups, Grid grid, Comm* comm) {
    groups->grid = grid;
    groups->tensor = groups_open_(&grid, GRID_TENSOR, comm);
    groups->context = groups_open_(&grid, GRID_CONTEXT, comm);
    groups->data = groups_open_(&grid, GRID_DATA, comm);
    groups->pipe = groups_open_(&grid, GRID_PIPE, comm);
    groups->experts = groups_open_(&grid, GRID_EXPERTS, comm);
    groups->same_experts = groups_open_(&grid, GRID_SAME_EXPERTS, comm);
}

void grid_groups_close(GridGroups* groups) {
    group_close(&groups->same_experts);
    group_close(&groups->experts);
    group_close(&groups->pipe);
    group_close(&groups->data);
    group_close(&groups->context);
    group_close(&groups->tensor);
}

void grid_name_ranks(GridShape shape, Comm* comm) {
    char(*places)[COMM_PLACE_BYTES] =
        (char(*)[COMM_PLACE_BYTES])check_alloc((size_t)comm->size, COMM_PLACE_BYTES, "places of ranks");
    for (int r = 0; r < comm->size; r++) {
        const Grid grid = grid_of(shape, r);
        grid_place(places[r], COMM_PLACE_BYTES, &grid);
    }
    comm_set_places(comm, places);
}

#endif // GROUPS_IMPLEMENTATION

#endif
