/*
update_groups.h -- the update on the CPU, group by group (model.h): each parameter by its rule
(optimizer.h), and with it the copies of matrices that matmuls in bf16 read.
*/
#ifndef LLMC_UPDATE_GROUPS_H
#define LLMC_UPDATE_GROUPS_H

#include "llmc/layers/linear.h"
#include "llmc/model/freeze.h"
#include "llmc/ops/gradient_norm.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/sliced_update.h"
#include "llmc/optim/update_in_backward.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// Everything that an update changes or reads.
typedef struct {
    const OptimizerState* state;
    const Freeze* freeze;
    Zero* zero;     // parameters and gradients
    Linear* linear; // copies of the matrices
    void* scratch;  // optimizer_scratch_bytes
    // sums of squares of the gradient's blocks, as gradient_square_sum_cpu wants them
    double* partial;
    SlicedUpdate sliced; // of matrices that tensor ranks cut
} UpdateGroups;

// Opens the updates with their state, all zero, and scratch memory; `zero` has its plan, and
// `tensor` cuts matrices. The arguments must outlive them.
void update_groups_open(UpdateGroups* groups, Memory* memory, OptimizerState* state, const Freeze* freeze,
                        Zero* zero, Linear* linear, Group* tensor);

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

void update_groups_open(UpdateGroups* u, Memory* memory, OptimizerState* state, const Freeze* freeze,
                        Zero* zero, Linear* linear, Group* tensor) {
    const size_t blocks = zero_count(&zero->plan, ZERO_SHARDS) / GRADIENT_BLOCK + 1;
    optimizer_state_take(state, memory);
    u->state = state;
    u->freeze = freeze;
    u->zero = zero;
    u->linear = linear;
    u->partial =
        (double*)memory_take(memory, "scratch: gradient norm", MEMORY_DEVICE, blocks * sizeof(double));
    u->scratch = memory_take(memory, "scratch of the update", MEMORY_DEVICE, optimizer_scratch_bytes(state));
    sliced_update_open(&u->sliced, memory, state, &zero->plan);
    u->sliced.zero = zero;
    u->sliced.group = tensor;
    u->sliced.scratch.memory = u->scratch;
    u->sliced.scratch.matmul = &linear->matmul;
}

// True if a range belongs to group g and is not frozen.
static int update_has_(const UpdateGroups* u, const ZeroRange* range, int g) {
    return range->group == g && !freeze_has(u->freeze, range->row, model_group_layer(u->state->cfg, g));
}

// Sets the operand of group g, and gathers it from all ranks. Returns NULL if the update of this
// rank needs no other's.
static const float* update_gather_operands_(const UpdateGroups* u, int g, Update update) {
    Zero* zero = u->zero;
    const int gathers = optimizer_gathers(u->state, &zero->plan, g);
    if (!gathers && !optimizer_needs_slices(u->state, &zero->plan, g)) {
        return NULL;
    }
    float* group = zero_operands_cpu(zero, g);
    for (int i = 0; i < zero->num_ranges; i++) {
        const ZeroRange* range = &zero->ranges[i];
        if (update_has_(u, range, g)) {
            optimizer_operand_cpu(u->state, range, group + (range->full - zero_group_begin(&zero->plan, g)),
                                  zero_range_gradient_cpu(zero, range), update);
        }
    }
    if (gathers) {
        zero_gather_operands_cpu(zero, g);
    }
    return group;
}

// Updates a range, if the parts of its tensor are not updated together.
static void update_range_(const UpdateGroups* u, const ZeroRange* range, const float* grad,
                          const float* operand, Update update, const MuonScratch* scratch) {
    if (!sliced_update_has(u->state, range->row)) {
        optimizer_update_cpu(u->state, range, u->zero->params + range->full, grad, operand, update, scratch);
    }
}

// Updates a whole matrix and packs it for matmuls in bf16. If the rule allows it, each thread packs
// 32 rows right after their update, while they are in the cache; else the rule itself has parallel
// loops. The vocabulary's padding is packed, but not updated.
static void update_packed_(UpdateGroups* u, const ZeroRange* range, const float* grad, Update update,
                           const MuonScratch* scratch) {
    const TensorRow* row = &u->state->rows[range->row];
    const size_t cols = row->cols, rows = range->count / cols;
    const int by_rows = optimizer_is_elementwise(u->state, range->row);
    float* param = u->zero->params + range->full;
    if (!by_rows) {
        update_range_(u, range, grad, NULL, update, scratch);
    }
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r += BF16_TILE) {
        const size_t count = r + BF16_TILE < rows ? BF16_TILE : rows - r, at = r * cols;
        if (by_rows) {
            optimizer_update_elements_cpu(u->state, range, at, count * cols, param + at, grad + at, update);
        }
        bf16_weights_pack_rows(&u->linear->packed, range->row, range->copy, (int)r,
                               int_min(BF16_TILE, (int)(row->rows - r)));
    }
}

// Updates what this rank updates of group g, and its average.
static void update_group_(UpdateGroups* u, int g, const float* operands, Update update) {
    const MuonScratch scratch = {u->scratch, &u->linear->matmul};
    const size_t begin = zero_group_begin(&u->zero->plan, g);
    for (int i = 0; i < u->zero->num_ranges; i++) {
        const ZeroRange* range = &u->zero->ranges[i];
        if (!update_has_(u, range, g)) {
            continue;
        }
        const float* grad = zero_range_gradient_cpu(u->zero, range);
        if (u->zero->plan.size == 1 && linear_packs(u->linear, range->row)) {
            update_packed_(u, range, grad, update, &scratch);
        } else {
            update_range_(u, range, grad, operands ? operands + (range->full - range->before - begin) : NULL,
                          update, &scratch);
        }
    }
    optimizer_average_cpu(u->state, u->zero->params + zero_piece(&u->zero->plan, g, ZERO_TRAINED).full, g,
                          update);
}

void update_groups_cpu(UpdateGroups* u, Update update) {
    for (int g = 0; g < u->zero->plan.groups; g++) {
        const float* operands = update_gather_operands_(u, g, update);
        if (operands) {
            sliced_update_cpu(&u->sliced, g, update);
        }
        update_group_(u, g, operands, update);
    }
    zero_gather_parameters_cpu(u->zero);
    if (u->zero->plan.size > 1) { // one rank alone has packed each matrix
        linear_pack(u->linear);
    }
}

void update_groups_show_average_cpu(UpdateGroups* u) {
    const Zero* zero = u->zero;
    for (int g = 0; g < zero->plan.groups; g++) {
        const ZeroPiece piece = zero_piece(&zero->plan, g, ZERO_TRAINED);
        if (piece.count > 0) {
            memcpy(zero_update_gradient_cpu(zero, g), zero->params + piece.full, piece.count * sizeof(float));
            optimizer_show_average_cpu(u->state, zero->params + piece.full, g);
        }
    }
    zero_gather_parameters_cpu(u->zero);
    linear_pack(u->linear);
}

// Gradients that no backward pass sets are zero.
void update_groups_hide_average_cpu(UpdateGroups* u) {
    const Zero* zero = u->zero;
    for (int g = 0; g < zero->plan.groups; g++) {
        const ZeroPiece piece = zero_piece(&zero->plan, g, ZERO_TRAINED);
        if (piece.count > 0) {
            float* kept = zero_update_gradient_cpu(zero, g);
            memcpy(zero->params + piece.full, kept, piece.count * sizeof(float));
            memset(kept, 0, piece.count * sizeof(float));
        }
    }
    zero_gather_parameters_cpu(u->zero);
    linear_pack(u->linear);
}

void update_group_in_backward_cpu(UpdateGroups* u, int g, InBackward* hook) {
    WideSum square_sum = {0, 0};
    Update update;
    if (!hook || !zero_has_gradient(&u->zero->plan, g)) {
        return;
    }
    zero_group_square_sum_cpu(u->zero, g, &square_sum, u->partial);
    if (in_backward_group(hook, g, square_sum, &update)) {
        update_group_(u, g, NULL, update);
    }
}

#endif // UPDATE_GROUPS_IMPLEMENTATION

#endif
