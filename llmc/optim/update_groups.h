/*
update_groups.h -- the update on the CPU, group by group (model.h): each parameter by its rule
(optimizer.h), and with it the copies of matrices that matmuls in bf16 read.
*/
#ifndef LLMC_UPDATE_GROUPS_H
#define LLMC_UPDATE_GROUPS_H

#include "llmc/layers/linear.h"
#include "llmc/ops/gradient_norm.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/owners.h"
#include "llmc/optim/update_in_backward.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// Everything that an update changes or reads.
typedef struct {
    const OptimizerState* state;
    Zero* zero;     // parameters and gradients
    Linear* linear; // copies of the matrices
    void* scratch;  // optimizer_scratch_bytes
    // sums of squares of the gradient's blocks, as gradient_square_sum_cpu wants them
    double* partial;
    Owners owners; // of matrices whose parts belong to several ranks
    Group* tensor;
} UpdateGroups;

// Opens the updates with their state, all zero, and scratch memory; `tensor` divides matrices. The
// arguments must outlive them.
void update_groups_open(UpdateGroups* groups, Memory* memory, OptimizerState* state, Zero* zero,
                        Linear* linear, Group* tensor);

// Updates what this rank updates of all groups; all ranks then gather the parameters.
void update_groups_cpu(UpdateGroups* groups, Update update);

// Sets the parameters to their average, and keeps the weights where the gradients were; then sets
// the weights again, bit for bit, and clears the gradients. All ranks call both between updates.
void update_groups_show_average_cpu(UpdateGroups* groups);
void update_groups_hide_average_cpu(UpdateGroups* groups);

// Updates group g during the backward pass, with its complete gradient. Does nothing without a
// hook.
void update_group_in_backward_cpu(UpdateGroups* groups, int g, InBackward* hook);

#ifdef __cplusplus
}
#endif

#ifdef UPDATE_GROUPS_IMPLEMENTATION

#include <string.h>

void update_groups_open(UpdateGroups* u, Memory* memory, OptimizerState* state, Zero* zero, Linear* linear,
                        Group* tensor) {
    const size_t* elements = state->map->totals.elements;
    const size_t reduced = elements[MAP_REDUCED] > 0 ? elements[MAP_REDUCED] : elements[MAP_GRADIENTS],
                 blocks = reduced / GRADIENT_BLOCK + 1;
    optimizer_state_take(state, memory);
    u->state = state;
    u->zero = zero;
    u->linear = linear;
    u->partial =
        (double*)memory_take(memory, "scratch: gradient norm", MEMORY_DEVICE, blocks * sizeof(double));
    u->scratch = memory_take(memory, "scratch of the update", MEMORY_DEVICE, optimizer_scratch_bytes(state));
    owners_open(&u->owners, memory, MEMORY_DEVICE, state);
    u->tensor = tensor;
}

// True if the rule of a row needs parts of other ranks: these matrices are updated by their owners.
static int update_travels_(const UpdateGroups* u, int row) {
    const OptimizerState* s = u->state;
    int travels = 0;
    for (int k = 0; k < s->num_matrices; k++) {
        travels |= s->matrices[k].row == row && matrices_travel(&s->matrices[k]);
    }
    return travels;
}

// Updates a whole matrix and packs it for matmuls in bf16. If the rule allows it, each thread packs
// 32 rows right after their update, while they are in the cache; else the rule itself has parallel
// loops. The vocabulary's padding is packed, but not updated.
static void update_packed_(UpdateGroups* u, const MapRange* range, float* param, const float* grad,
                           Update update) {
    const int i = range->shard->tensor, by_rows = optimizer_is_elementwise(u->state, i);
    const TensorRow* row = &u->state->rows[i];
    const size_t cols = row->cols, rows = range->count / cols;
    const int copy = tensor_copy(row, range->shard->layer);
    if (!by_rows) {
        const MuonScratch scratch = {u->scratch, &u->linear->matmul};
        optimizer_update_cpu(u->state, range, param, grad, update, &scratch);
    }
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r += BF16_TILE) {
        const size_t at = r * cols;
        if (by_rows) {
            const MapRange part = map_part_of_range(*range, at, BF16_TILE * cols);
            optimizer_update_elements_cpu(u->state, &part, param + at, grad + at, update);
        }
        bf16_weights_pack_rows(&u->linear->packed, i, copy, (int)r, int_min(BF16_TILE, (int)(row->rows - r)));
    }
}

// Updates a range, unless it is frozen or its owners have updated it, and its average.
static void update_range_(UpdateGroups* u, const MapRange* range, Update update) {
    const MuonScratch scratch = {u->scratch, &u->linear->matmul};
    const int row = range->shard->tensor;
    float *param = zero_range_params_cpu(u->zero, range), *grad = zero_range_gradient_cpu(u->zero, range);
    if (range->shard->flags & SHARD_FROZEN || update_travels_(u, row)) {
        // nothing to do
    } else if (u->state->map->of.data == 1 && linear_packs(u->linear, row)) {
        update_packed_(u, range, param, grad, update);
    } else {
        optimizer_update_cpu(u->state, range, param, grad, update, &scratch);
    }
    optimizer_average_cpu(u->state, range, param, update);
}

// Updates what this rank updates of group g, and its average.
static void update_group_(UpdateGroups* u, int g, Update update) {
    const Map* m = u->state->map;
    const Bucket* b = map_trained(m, g);
    MapRange range = {NULL, 0, 0, 0};
    while (b && map_next_range(m, b, MAP_OWNED, &range)) {
        update_range_(u, &range, update);
    }
}

void update_groups_cpu(UpdateGroups* u, Update update) {
    const MuonScratch scratch = {u->scratch, &u->linear->matmul};
    const Map* m = u->state->map;
    const int groups = model_groups(m->cfg);
    owners_update_cpu(&u->owners, u->zero, u->tensor, 0, groups, update, &scratch);
    for (int g = 0; g < groups; g++) {
        update_group_(u, g, update);
    }
    zero_gather_parameters_cpu(u->zero);
    if (m->of.data > 1 || u->owners.most > 0) { // else each matrix has been packed
        linear_pack(u->linear);
    }
}

typedef enum { UPDATE_SHOW_, UPDATE_HIDE_ } UpdateMove_;

// Moves the weights that this rank updates to where their gradient was, and sets the average; or
// back, and clears the gradient: those that no backward pass sets are zero.
static void update_groups_move_(UpdateGroups* u, UpdateMove_ move) {
    const Map* m = u->state->map;
    for (int g = 0; g < model_groups(m->cfg); g++) {
        const Bucket* b = map_trained(m, g);
        MapRange range = {NULL, 0, 0, 0};
        while (b && map_next_range(m, b, MAP_OWNED, &range)) {
            float *param = zero_range_params_cpu(u->zero, &range),
                  *aside = zero_range_gradient_cpu(u->zero, &range);
            const size_t bytes = range.count * sizeof(float);
            if (move == UPDATE_SHOW_) {
                memcpy(aside, param, bytes);
                optimizer_show_average_cpu(u->state, &range, param);
            } else {
                memcpy(param, aside, bytes);
                memset(aside, 0, bytes);
            }
        }
    }
    zero_gather_parameters_cpu(u->zero);
    linear_pack(u->linear);
}

void update_groups_show_average_cpu(UpdateGroups* u) { update_groups_move_(u, UPDATE_SHOW_); }

void update_groups_hide_average_cpu(UpdateGroups* u) { update_groups_move_(u, UPDATE_HIDE_); }

void update_group_in_backward_cpu(UpdateGroups* u, int g, InBackward* hook) {
    WideSum square_sum = {0, 0};
    Update update;
    if (!hook || !map_trained(u->state->map, g)) {
        return;
    }
    zero_group_square_sum_cpu(u->zero, g, &square_sum, u->partial);
    if (in_backward_group(hook, g, square_sum, &update)) {
        update_group_(u, g, update);
    }
}

#endif // UPDATE_GROUPS_IMPLEMENTATION

#endif
