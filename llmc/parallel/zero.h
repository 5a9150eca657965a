/*
zero.h -- divides parameters, gradients and optimizer state among W ranks (ZeRO): which rank has
which part, and the CPU's version of the communication.

    stage   parameters   gradients              optimizer state   a gradient is reduced
      0     all          all                    all               in the last micro-step, for all
      1     all          all                    1/W               in the last micro-step
      2     all          two groups, and 1/W    1/W               in every micro-step
      3     two groups,  two groups, and 1/W    1/W               in every micro-step; on GPUs
            and 1/W

Parameters lie in groups (model.h): the parameters outside of the blocks first, then block 0, 1, ...
Here and below, blocks are blocks of parameters (tensors.h): several layers can share one. Each
group is cut into W equal shards, one for each rank. Shard arrays (gradient, optimizer state) hold
the shards of one rank, group after group. With one rank a shard is the whole group, and shard
arrays look like full ones.

Frozen parameters (freeze.h) have no gradient. Arrays of gradients hold the trained parts of groups
(model.h), and nothing of the lowest blocks if these are frozen. The rest of a group, its frozen
part, has shards of its own; no update changes it, so it is gathered once. A rank owns its shards of
the trained parts, in the order of its gradient, followed by its shards of the frozen parts, which
have no state but the bits that master weights add. In stage 3 a group is one part, frozen or not.

The gradient of the token embedding that the classifier has as its matrix, too, can be summed apart
from the classifier's (zero_plan_apart): as if it were one more group, after all others, without
parameters and state. Each rank then has all of the sum, and one addition an update joins the two.

Two levels: W ranks are `replicas` of `shards` ranks each, for example those of a machine. A group
is cut into `shards` slices, and a slice into one shard for each replica. Slices move in every
micro-step, and stay within a replica; for parameters and gradients "1/W" then means 1/shards. Once
an update, the ranks with the same slice add up the sums of their replicas, shard by shard. With one
level a slice is a shard.

Divided experts: neighbors share the experts of a block, `experts` ranks, and a block is divided
among the size / experts ranks that have the same ones. Group 0 is divided among all. A rank's
experts see the tokens of all its neighbors, and leave a gradient for each neighbor's. So the
additions are those of the ranks that have the tokens, whichever rank has the experts.

micro_steps.h deals micro-batches out to ranks. A reduction sends piece r of each rank's gradient to
rank r, which adds the pieces to its shard in fp32,

    shard[i] = ((shard[i] + piece_0[i]) + piece_1[i]) + ...    from 0 in the first micro-step

so in stage 2 the order of additions is that of the micro-batches, and the bits do not depend on W.
In stages 0 and 1 each rank adds up its own micro-batches first, and the last bits depend on W. With
two levels each replica adds up its own first, and the last bits depend on the number of replicas.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020.
*/
#ifndef LLMC_ZERO_H
#define LLMC_ZERO_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/memory.h"
#include "llmc/base/wide_sum.h"
#include "llmc/ops/gradient_norm.h"
#include "llmc/comm/group.h"
#include "llmc/model/map.h"
#include "llmc/model/model.h"
#include "llmc/parallel/micro_steps.h"
#include "llmc/base/sizes.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sizes are in elements.
typedef struct {
    int stage;
    int rank, size;  // this rank; number of ranks, W: of a data group (grid.h)
    int shards;      // ranks of a replica: W with one level
    int groups;      // model_groups
    int first_block; // lowest block with gradients (freeze.h); 0 in stage 3
    unsigned frozen; // bit i: row i of the parameters is in the frozen parts; 0 in stage 3
    // Sizes with padding, multiples of W * TENSOR_SHARD_UNIT: of group 0, of each other group, and
    // of their trained parts, which come first.
    size_t once, block;
    size_t trained_once, trained_block;
    // Elements of wte, if its gradient as an embedding is summed apart, in group number `groups`;
    // 0: it is not. And true if this rank's backward pass computes it.
    size_t embedding;
    int sums_embedding;
    // True if the blocks of all layers leave their gradients in the same buffers: from stage 2 on.
    // The caller also sets it for --update-in-backward.
    int shares_buffer;
    int context; // ranks that share a micro-batch: neighbors, each with its part of the tokens
    int experts; // ranks that share the experts of a block; 1: every rank has all. With one level
} ZeroPlan;

// Sets the rows of the parameters in a full array, for elements of a given size; returns its bytes.
static inline size_t zero_parameter_rows(TensorRow rows[MODEL_PARAMETER_ROWS], const ZeroPlan* plan,
                                         ModelConfig cfg, size_t element_bytes) {
    return model_sharded_rows_of(rows, cfg, element_bytes, plan->size, plan->frozen);
}

// True if row i of the parameters is trained; blocks below first_block have no gradient of it even
// so.
static inline int zero_has_row(const ZeroPlan* plan, int i) { return !(plan->frozen >> i & 1); }

// Sets the rows of the gradients. Rows without zero_has_row are meaningless.
void zero_gradient_rows(TensorRow rows[MODEL_PARAMETER_ROWS], const ZeroPlan* plan, ModelConfig cfg,
                        size_t element_bytes);

// Leaves these rows (bits) and all blocks below `first_block` out of the gradients.
void zero_plan_freeze(ZeroPlan* plan, ModelConfig cfg, unsigned frozen, int first_block);

// Sums the gradient of wte as an embedding apart, if `cfg` has some of it and the classifier's,
// too. Call it after zero_plan_freeze; in stages 0 to 2.
void zero_plan_apart(ZeroPlan* plan, ModelConfig cfg);

// Plans for `size` ranks in replicas of `shards`, which divides `size`; ranks 0 ... shards - 1 are
// the first replica. Nothing is frozen.
ZeroPlan zero_plan_two_levels(ModelConfig cfg, int stage, int rank, int size, int shards);

static inline ZeroPlan zero_plan(ModelConfig cfg, int stage, int rank, int size) {
    return zero_plan_two_levels(cfg, stage, rank, size, size);
}

static inline int zero_replicas(const ZeroPlan* plan) { return plan->size / plan->shards; }

// Number `part` of equal parts of every group.
typedef struct {
    int parts, part;
} ZeroCut;

// True if group g is a block.
static inline int zero_is_block(const ZeroPlan* plan, int g) { return 0 < g && g < plan->groups; }

// Returns the ranks that divide group g, out of `ranks`: all, or only the shards of a replica.
static inline int zero_parts_of(const ZeroPlan* plan, int g, int ranks) {
    return zero_is_block(plan, g) && ranks > 1 ? ranks / plan->experts : ranks;
}

// Return the part of the reduced gradient of group g that a rank has; and rank r of the data group,
// counted only among those that have the same parameters of the group as this one.
ZeroCut zero_shard_of(const ZeroPlan* plan, int g, int rank);

static inline int zero_rank_of(const ZeroPlan* plan, int g, int r) {
    const int share = plan->size / zero_parts_of(plan, g, plan->size);
    return r * share + plan->rank % share;
}

// Return the part of group g that this rank updates, and the part of the parameters that it keeps.
ZeroCut zero_owned_cut(const ZeroPlan* plan, int g);

ZeroCut zero_kept_cut(const ZeroPlan* plan);

// Returns the part of group g that this rank updates, as a part of what it keeps.
ZeroCut zero_owned_in_kept(const ZeroPlan* plan, int g);

// Begin and size of group g in full arrays.
static inline size_t zero_group_begin(const ZeroPlan* plan, int g) {
    return g == 0 ? 0 : plan->once + (size_t)(g - 1) * plan->block;
}

static inline size_t zero_group_elements(const ZeroPlan* plan, int g) {
    return g == 0 ? plan->once : plan->block;
}

static inline size_t zero_largest_group(const ZeroPlan* plan) {
    return plan->once > plan->block ? plan->once : plan->block;
}

static inline size_t zero_embedding_elements_(const ZeroPlan* plan) {
    const size_t unit = (size_t)plan->size * TENSOR_SHARD_UNIT;
    return (plan->embedding + unit - 1) / unit * unit;
}

// Returns the elements of group g that have gradients: its first ones.
static inline size_t zero_trained_elements(const ZeroPlan* plan, int g) {
    return g == 0                  ? plan->trained_once
           : g == plan->groups     ? zero_embedding_elements_(plan)
           : g > plan->first_block ? plan->trained_block
                                   : 0;
}

static inline int zero_has_gradient(const ZeroPlan* plan, int g) {
    return zero_trained_elements(plan, g) > 0;
}

// Returns the most gradients that a group has, on the tokens of all neighbors.
size_t zero_largest_gradient(const ZeroPlan* plan);

// Begin of group g in full arrays of gradients; with g = groups + 1 their end.
size_t zero_gradient_begin(const ZeroPlan* plan, int g);

// Returns a rank's part of the first elements of an array, `once` of group 0 and `blocks` of
// blocks, which `ranks` ranks divide.
static inline size_t zero_part_of(const ZeroPlan* plan, size_t once, size_t blocks, int ranks) {
    return once / (size_t)ranks + blocks / (size_t)zero_parts_of(plan, 1, ranks);
}

// Begin of the part of group g in arrays of gradients that `ranks` ranks divide.
static inline size_t zero_gradient_part_begin_(const ZeroPlan* plan, int g, int ranks) {
    const size_t begin = zero_gradient_begin(plan, g), end = zero_gradient_begin(plan, plan->groups),
                 blocks = (begin < end ? begin : end) - (g > 0 ? plan->trained_once : 0);
    return zero_part_of(plan, begin - blocks, blocks, ranks);
}

// Begin of the shard of group g in shard arrays of gradients, and its size.
static inline size_t zero_shard_begin(const ZeroPlan* plan, int g) {
    return zero_gradient_part_begin_(plan, g, plan->size);
}

static inline size_t zero_shard_elements(const ZeroPlan* plan, int g) {
    return zero_trained_elements(plan, g) / (size_t)zero_parts_of(plan, g, plan->size);
}

// Begin of the slice of group g in arrays of slices, and its size: slices of gradients, and in
// stage 3 of parameters.
static inline size_t zero_slice_begin(const ZeroPlan* plan, int g) {
    return zero_gradient_part_begin_(plan, g, plan->shards);
}

static inline size_t zero_slice_elements(const ZeroPlan* plan, int g) {
    return zero_trained_elements(plan, g) / (size_t)zero_parts_of(plan, g, plan->shards);
}

// Returns the elements of parameters in memory that a forward pass reads; in stage 3 only `blocks`
// blocks at a time.
static inline size_t zero_params_elements(const ZeroPlan* plan, int blocks) {
    return plan->stage < 3 ? zero_group_begin(plan, plan->groups) : plan->once + (size_t)blocks * plan->block;
}

// Arrays, with padding.
typedef enum {
    ZERO_FULL,       // all parameters
    ZERO_REPLICATED, // parameters that every rank has; they come first in memory
    ZERO_GRADIENT,   // all gradients, also that of an embedding apart
    ZERO_SLICES,     // slices of the gradients that a rank of a replica has
    ZERO_SHARDS,     // shards of the gradients that a rank has
    ZERO_OWNED,      // parameters whose state a rank has
    ZERO_UPDATED     // those that it updates, which come first
} ZeroArray;

// Returns the elements of an array.
size_t zero_count(const ZeroPlan* plan, ZeroArray array);

// ---- what a rank owns ----

// Parts of a group: the parameters with gradients, and the others.
typedef enum { ZERO_TRAINED, ZERO_FROZEN, ZERO_PARTS } ZeroPart;

// Begin of a part of group g in full arrays, and its size.
static inline size_t zero_part_begin(const ZeroPlan* plan, int g, ZeroPart part) {
    return zero_group_begin(plan, g) + (part == ZERO_FROZEN ? zero_trained_elements(plan, g) : 0);
}

size_t zero_part_elements(const ZeroPlan* plan, int g, ZeroPart part);

// Begins of a piece: in full arrays, in owned arrays (the optimizer's state), in the parameters
// that are kept. A trained piece begins in the gradient of the update where it does in owned
// arrays.
typedef struct {
    size_t full, owned, kept, count;
} ZeroPiece;

// Returns the piece of a part of group g that this rank owns.
ZeroPiece zero_piece(const ZeroPlan* plan, int g, ZeroPart part);

// True if each rank updates only a part of each group.
static inline int zero_is_divided(const ZeroPlan* plan) { return plan->stage > 0 && plan->size > 1; }

// The part of a parameter in one layer, or in a copy that several layers share, that this rank
// owns. Elements of all copies are numbered in the order of the table, without padding; so do files
// of a model that is not cut.
typedef struct {
    size_t full;     // begin in full arrays
    size_t owned;    // begin in owned arrays
    size_t in_piece; // begin in this rank's piece of the group
    size_t logical;  // number of the first element
    size_t before;   // elements of the copy before it
    size_t count;
    int row, copy, group; // row of the table of parameters; copy of the tensor
} ZeroRange;

// Returns a bound for the number of ranges: one for each copy of each parameter.
static inline int zero_max_ranges(ModelConfig cfg) { return MODEL_PARAMETER_ROWS * cfg.L; }

// Sets the ranges that this rank owns, in the order of files, and returns their number, at most
// zero_max_ranges. `rows` lay out full arrays of any type.
int zero_ranges(const ZeroPlan* plan, const TensorRow* rows, ModelConfig cfg, ZeroRange* ranges);

// Elements of an array of gradients: `count` from `begin` on, and as many in each of `copies`
// groups, which start `stride` elements apart.
typedef struct {
    size_t begin, count, stride;
    int copies;
} ZeroSpan;

enum { ZERO_SPANS = MODEL_PARAMETER_ROWS + 2 }; // at most

// Sets the spans of the tensors that no tensor rank cuts and whose gradient in a rank is only that
// of its tokens or heads, and returns their number. `rows` lay out gradients, of which an array has
// a part. wpe is not among them: every tensor rank computes all of its gradient.
int zero_part_spans(const ZeroPlan* plan, const TensorRow* rows, ModelConfig cfg, ZeroCut cut,
                    ZeroSpan spans[ZERO_SPANS]);

// Sets the spans of this rank's shards that count in the norm of the gradient, and returns their
// number, at least one: all; but tensors that no tensor rank cuts count only in the first of these
// ranks.
int zero_counted_spans(const ZeroPlan* plan, const TensorRow* rows, ModelConfig cfg,
                       ZeroSpan spans[ZERO_SPANS]);

// The part of the gradient of wte in this rank's shard of group 0, where wte comes first: its begin
// in the shard, and in wte.
typedef struct {
    size_t in_shard, in_wte, count;
} ZeroWte;

// Returns it for a gradient of the embedding that is summed apart.
ZeroWte zero_wte_in_shard(const ZeroPlan* plan);

// ---- micro-steps ----

// Returns the micro-steps of an update of `sequences` in micro-batches of up to B.
static inline MicroSteps zero_micro_steps(const ZeroPlan* plan, int64_t sequences, int B) {
    return micro_steps(sequences, B, plan->size / plan->context);
}

// True if the gradients of a micro-step are reduced. In stages 0 and 1 only those of the last one
// are: they are the sum of all.
static inline int zero_reduces(const ZeroPlan* plan, MicroStep step) {
    return plan->stage >= 2 || (plan->size > 1 && step.is_last);
}

// Returns how many ranks of this replica have a gradient to add.
static inline int zero_adds_(const ZeroPlan* plan, MicroStep step) {
    const int before = plan->rank / plan->shards * plan->shards; // ranks of earlier replicas
    const int active = (plan->stage >= 2 ? step.active : step.of_update) * plan->context;
    return int_min(int_max(active - before, 0), plan->shards);
}

static inline int zero_is_first_(const ZeroPlan* plan, MicroStep step) {
    return plan->stage < 2 || step.number == 0;
}

// ---- traffic ----

// Bytes that a rank sends in an update, and receives: to ranks of its replica, and to those of
// others.
typedef struct {
    double within, between;
} ZeroTraffic;

// Returns the traffic of an update of `sequences` in micro-batches of B. Elements of gradients and
// parameters have these sizes; each rank sends `operand_bytes` of matrices (owners.h).
ZeroTraffic zero_traffic(const ZeroPlan* plan, int64_t sequences, int B, size_t gradient_bytes,
                         size_t parameter_bytes, double operand_bytes);

// ---- the sum ----

// Pieces of a gradient: (copies, ranks, count), with `stride` elements between copies. Number a in
// the order of the ranks that have the tokens is copy a % copies from rank a / copies.
typedef struct {
    size_t count, stride;
    int copies;
} ZeroPieces;

// Adds the first `active` of the pieces, in order, to shard (count), which counts as zero if
// `is_first`.
void zero_add_pieces_cpu(float* shard, const float* pieces, ZeroPieces of, int active, int is_first);

// ---- the CPU ----

// The parts of one rank on a CPU, beside the model. All arrays are fp32; one level only. It has
// nothing to close.
typedef struct {
    ZeroPlan plan;
    const Map* map;
    Group* group;      // the data group
    Group* same;       // ranks with the same experts
    ZeroRange* ranges; // ranges that this rank owns
    int num_ranges;
    float *params, *grads; // the model's
    float* shard;          // the reduced gradient; `grads` if the map has no place for it
    float* pieces;         // one piece of a group's gradient from each rank; NULL with one rank
} Zero;

// Returns the elements of the gradients that a backward pass writes to; `blocks` blocks at a time
// if they share buffers. Divided experts: a block has a gradient for the tokens of each neighbor,
// each trained_block after the one before.
size_t zero_grads_elements(const ZeroPlan* plan, int blocks);

// Opens the parts of a rank of the data group. `rows` lay out full arrays; params and grads are the
// model's, filled with zeros.
void zero_open_cpu(Zero* z, Memory* memory, const Map* map, ZeroPlan plan, ModelConfig cfg,
                   const TensorRow* rows, float* params, float* grads, Group* data, Group* same);

// Returns the gradients of a bucket, as the backward pass left them; with divided experts, first
// those on the tokens of the first neighbor.
static inline float* zero_grads_of_(const Zero* z, const Bucket* b) {
    return z->grads + b->in[MAP_GRADIENTS].begin;
}

static inline float* zero_reduced_of_(const Zero* z, const Bucket* b) {
    return z->shard + b->in[MAP_REDUCED].begin;
}

// Returns the gradient of wte as an embedding, if it is summed apart, laid out like wte; else NULL.
// After the last micro-step, in all ranks, the sum.
static inline float* zero_embedding_gradient_cpu(const Zero* z) {
    const Bucket* b = map_embedding(z->map);
    return b ? zero_grads_of_(z, b) : NULL;
}

// Adds it to the reduced gradient of the classifier, once an update.
void zero_add_embedding_cpu(Zero* z);

// Reduces the gradients of group g, if it has any and this micro-step reduces. Call it when the
// backward pass has completed them: for the last block first, and for group 0 at the end.
void zero_group_done_cpu(Zero* z, int g, MicroStep step);

// Clears the gradients of the frozen parameters of the blocks of layer l. Where layers leave their
// gradients in one place, it still has those of the layer before, and this layer's backward pass
// does not set them.
void zero_clear_frozen_cpu(Zero* z, int l);

// Adds the squares of this rank's shards of the reduced gradient that count. `partial` is scratch
// memory of gradient_square_sum_cpu.
void zero_square_sum_cpu(const Zero* z, WideSum* sum, double* partial);

// Adds the squares of the gradient of group g, which the backward pass has just completed. For one
// rank.
static inline void zero_group_square_sum_cpu(const Zero* z, int g, WideSum* sum, double* partial) {
    const Bucket* b = map_trained(z->map, g);
    gradient_square_sum_cpu(sum, zero_grads_of_(z, b), b->elements, partial);
}

// Returns the reduced gradient of the elements of group g that this rank updates; if blocks share a
// buffer, only while its block has it.
float* zero_update_gradient_cpu(const Zero* z, int g);

// Returns that of a range.
static inline const float* zero_range_gradient_cpu(const Zero* z, const ZeroRange* range) {
    const Bucket* b = map_trained(z->map, range->group);
    return zero_update_gradient_cpu(z, range->group) + (range->owned - b->in[MAP_OWNED].begin);
}

// Returns the ranks that divide a bucket.
static inline Group* zero_ranks_cpu(const Zero* z, const Bucket* b) {
    return b->ranks < z->group->size ? z->same : z->group;
}

// Sends each rank's shard of the trained bucket of group g to all that divide it, to the same place
// in `group`.
static inline void zero_gather_group_cpu(Zero* z, float* group, int g) {
    const Bucket* b = map_trained(z->map, g);
    group_all_gather_cpu(group, group + b->in[MAP_REDUCED].from, b->in[MAP_REDUCED].count,
                         zero_ranks_cpu(z, b));
}

// Sends each rank's updated shards of the parameters to all ranks, after the update.
void zero_gather_parameters_cpu(Zero* z);

#ifdef __cplusplus
}
#endif

#ifdef ZERO_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>

void zero_gradient_rows(TensorRow rows[MODEL_PARAMETER_ROWS], const ZeroPlan* plan, ModelConfig cfg,
                        size_t element_bytes) {
    zero_parameter_rows(rows, plan, cfg, element_bytes);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (rows[i].place == PLACE_BLOCK) {
            rows[i].offset_bytes -= (plan->once - plan->trained_once) * element_bytes;
            rows[i].group_bytes = plan->trained_once * element_bytes;
            rows[i].layer_bytes = rows[i].layers > 1 ? plan->trained_block * element_bytes : 0;
        }
    }
}

void zero_plan_freeze(ZeroPlan* plan, ModelConfig cfg, unsigned frozen, int first_block) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    plan->frozen = frozen;
    plan->first_block = first_block;
    const size_t all = zero_parameter_rows(rows, plan, cfg, 1);
    plan->once = plan->trained_once = tensor_group_offset_bytes(rows, 1);
    plan->block = plan->trained_block = (all - plan->once) / (size_t)model_copies(cfg);
    // the trained part ends at the first frozen row; an absent one may have any place
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        size_t* trained = rows[i].place == PLACE_ONCE ? &plan->trained_once : &plan->trained_block;
        const size_t before = tensor_offset_in_group(&rows[i]);
        const int ends = !zero_has_row(plan, i) && !tensor_is_absent(&rows[i]);
        *trained = ends && before < *trained ? before : *trained;
    }
}

void zero_plan_apart(ZeroPlan* plan, ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    zero_parameter_rows(rows, plan, cfg, 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (rows[i].member == offsetof(ModelParameters, wte) && !cfg.has_head) {
            plan->embedding = tensor_room_in_group(&rows[i]);
            plan->sums_embedding = plan->embedding > 0 && model_has_first(cfg);
        }
    }
}

ZeroPlan zero_plan_two_levels(ModelConfig cfg, int stage, int rank, int size, int shards) {
    ZeroPlan plan = {stage, rank, size, shards, model_groups(cfg), 0, 0, 0, 0, 0, 0, 0, 0, stage >= 2, 1, 1};
    assert(0 <= rank && rank < size && size % shards == 0);
    zero_plan_freeze(&plan, cfg, 0, 0);
    return plan;
}

ZeroCut zero_shard_of(const ZeroPlan* plan, int g, int rank) {
    const int slice = rank % plan->shards, replica = rank / plan->shards,
              share = plan->size / zero_parts_of(plan, g, plan->size);
    const ZeroCut cut = {plan->size / share, (slice * zero_replicas(plan) + replica) / share};
    return cut;
}

ZeroCut zero_owned_cut(const ZeroPlan* plan, int g) {
    const ZeroCut whole = {1, 0};
    return plan->stage == 0 ? whole : zero_shard_of(plan, g, plan->rank);
}

ZeroCut zero_kept_cut(const ZeroPlan* plan) {
    const ZeroCut whole = {1, 0}, slice = {plan->shards, plan->rank % plan->shards};
    return plan->stage < 3 ? whole : slice;
}

ZeroCut zero_owned_in_kept(const ZeroPlan* plan, int g) {
    const ZeroCut own = zero_owned_cut(plan, g), kept = zero_kept_cut(plan);
    const ZeroCut in_kept = {own.parts / kept.parts, own.part - kept.part * (own.parts / kept.parts)};
    return in_kept;
}

size_t zero_largest_gradient(const ZeroPlan* plan) {
    size_t most = 0;
    for (int g = 0; g <= plan->groups; g++) {
        const size_t copies = zero_is_block(plan, g) ? (size_t)plan->experts : 1,
                     elements = copies * zero_trained_elements(plan, g);
        most = elements > most ? elements : most;
    }
    return most;
}

size_t zero_gradient_begin(const ZeroPlan* plan, int g) {
    if (g > plan->groups) {
        return zero_gradient_begin(plan, plan->groups) + zero_embedding_elements_(plan);
    }
    const int blocks = g - 1 - plan->first_block; // blocks with gradients before it
    return g == 0 ? 0 : plan->trained_once + (size_t)(blocks > 0 ? blocks : 0) * plan->trained_block;
}

// Returns the ranks that divide what an update changes.
static int zero_owners_(const ZeroPlan* plan) { return plan->stage == 0 ? 1 : plan->size; }

size_t zero_count(const ZeroPlan* plan, ZeroArray array) {
    const size_t full = zero_group_begin(plan, plan->groups),
                 updated = zero_gradient_begin(plan, plan->groups),
                 gradient = zero_gradient_begin(plan, plan->groups + 1);
    const int owners = zero_owners_(plan);
    switch (array) {
    case ZERO_REPLICATED:
        return plan->stage < 3 ? full : plan->once;
    case ZERO_GRADIENT:
        return gradient;
    case ZERO_SLICES:
        return zero_slice_begin(plan, plan->groups + 1);
    case ZERO_SHARDS:
        return zero_shard_begin(plan, plan->groups + 1);
    case ZERO_OWNED:
        return zero_part_of(plan, plan->once, full - plan->once, owners);
    case ZERO_UPDATED:
        return zero_part_of(plan, plan->trained_once, updated - plan->trained_once, owners);
    case ZERO_FULL:
        break;
    }
    return full;
}

size_t zero_part_elements(const ZeroPlan* plan, int g, ZeroPart part) {
    const size_t trained = zero_trained_elements(plan, g);
    return part == ZERO_TRAINED ? trained : zero_group_elements(plan, g) - trained;
}

ZeroPiece zero_piece(const ZeroPlan* plan, int g, ZeroPart part) {
    const ZeroCut own = zero_owned_cut(plan, g), in_kept = zero_owned_in_kept(plan, g);
    const int owners = zero_owners_(plan);
    const size_t begin = zero_part_begin(plan, g, part),
                 count = zero_part_elements(plan, g, part) / (size_t)own.parts,
                 frozen = zero_group_begin(plan, g) - zero_gradient_begin(plan, g),
                 frozen_once = g > 0 ? plan->once - plan->trained_once : 0,
                 owned = part == ZERO_TRAINED
                             ? zero_gradient_part_begin_(plan, g, owners)
                             : zero_gradient_part_begin_(plan, plan->groups, owners) +
                                   zero_part_of(plan, frozen_once, frozen - frozen_once, owners);
    const ZeroPiece piece = {begin + (size_t)own.part * count, owned,
                             begin / (size_t)zero_kept_cut(plan).parts + (size_t)in_kept.part * count, count};
    return piece;
}

// Returns the part of `tensor`, a copy of a parameter in full arrays, that this rank owns; its
// count may be 0.
static ZeroRange zero_cut_(const ZeroPlan* plan, ZeroRange tensor) {
    const int is_frozen = tensor.full >= zero_part_begin(plan, tensor.group, ZERO_FROZEN);
    const ZeroPiece piece = zero_piece(plan, tensor.group, is_frozen ? ZERO_FROZEN : ZERO_TRAINED);
    const size_t end = piece.full + piece.count;
    const size_t from = tensor.full > piece.full ? tensor.full : piece.full;
    const size_t to = tensor.full + tensor.count < end ? tensor.full + tensor.count : end;
    const ZeroRange range = {from,
                             piece.owned + (from - piece.full),
                             from - piece.full,
                             tensor.logical + (from - tensor.full),
                             from - tensor.full,
                             from < to ? to - from : 0,
                             tensor.row,
                             tensor.copy,
                             tensor.group};
    return range;
}

int zero_ranges(const ZeroPlan* plan, const TensorRow* rows, ModelConfig cfg, ZeroRange* ranges) {
    int count = 0;
    size_t logical = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int k = 0; k < rows[i].layers; k++) {
            const size_t elements = model_rows_of_part(&rows[i], cfg) * rows[i].cols,
                         full =
                             (rows[i].offset_bytes + (size_t)k * rows[i].layer_bytes) / rows[i].element_bytes;
            const ZeroRange tensor = {
                full, full, 0, logical, 0, elements, i, k, rows[i].place == PLACE_BLOCK ? 1 + k : 0};
            ranges[count] = zero_cut_(plan, tensor);
            count += ranges[count].count > 0;
            logical += elements;
        }
    }
    return count;
}

// Returns the elements begin ... end-1 of the trained part of group 0, or of all blocks, in an
// array that has a part of each group.
static ZeroSpan zero_span_(const ZeroPlan* plan, TensorPlace place, size_t begin, size_t end, ZeroCut cut) {
    const int is_block = place == PLACE_BLOCK;
    const size_t once = plan->trained_once / (size_t)cut.parts,
                 count = is_block ? plan->trained_block / (size_t)cut.parts : once,
                 first = (size_t)cut.part * count, from = begin > first ? begin : first,
                 to = end < first + count ? end : first + count;
    const ZeroSpan span = {(is_block ? once : 0) + (from < to ? from - first : 0), from < to ? to - from : 0,
                           count, is_block ? plan->groups - 1 - plan->first_block : 1};
    return span;
}

static ZeroSpan zero_tensor_span_(const ZeroPlan* plan, const TensorRow* row, ZeroCut cut) {
    const size_t begin = tensor_offset_in_group(row) / row->element_bytes;
    return zero_span_(plan, row->place, begin, begin + tensor_room_in_group(row), cut);
}

int zero_part_spans(const ZeroPlan* plan, const TensorRow* rows, ModelConfig cfg, ZeroCut cut,
                    ZeroSpan spans[ZERO_SPANS]) {
    int count = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS && model_is_cut(cfg); i++) {
        const TensorRow* row = &rows[i];
        if (row->split == SPLIT_NONE && row->kind != KIND_EMBEDDING && row->layers > 0 &&
            zero_has_row(plan, i)) {
            spans[count] = zero_tensor_span_(plan, row, cut);
            count += spans[count].count > 0;
        }
    }
    return count;
}

int zero_counted_spans(const ZeroPlan* plan, const TensorRow* rows, ModelConfig cfg,
                       ZeroSpan spans[ZERO_SPANS]) {
    const ZeroCut own = zero_shard_of(plan, 0, plan->rank);
    const int is_first = cfg.part.tensor_rank == 0;
    const ZeroSpan all = {0, is_first ? zero_shard_begin(plan, plan->groups) : 0, 0, 1};
    int count = 1;
    spans[0] = all;
    for (int i = 0; i < MODEL_PARAMETER_ROWS && !is_first; i++) {
        if (rows[i].split != SPLIT_NONE && rows[i].layers > 0 && zero_has_row(plan, i)) {
            spans[count] = zero_tensor_span_(plan, &rows[i], own);
            count += spans[count].count > 0;
        }
    }
    return count;
}

ZeroWte zero_wte_in_shard(const ZeroPlan* plan) {
    const ZeroSpan own = zero_span_(plan, PLACE_ONCE, 0, plan->embedding, zero_shard_of(plan, 0, plan->rank));
    const size_t shard = (size_t)zero_shard_of(plan, 0, plan->rank).part * zero_shard_elements(plan, 0);
    const ZeroWte wte = {own.begin, shard + own.begin, own.count};
    return wte;
}

// Returns the elements of blocks that stage 3 gathers in an update: all blocks in the first forward
// pass, and in every other pass all but those of the two layers with which the pass before it
// ended.
static double zero_collected_elements_(const ZeroPlan* plan, int64_t micro_steps) {
    const int blocks = plan->groups - 1, later = blocks > 2 ? blocks - 2 : 0;
    return (double)plan->block * (blocks + (2.0 * (double)micro_steps - 1) * later);
}

// Returns the elements with gradients, of blocks so many copies; as many as if all ranks divided
// the blocks, too.
static double zero_sent_elements_(const ZeroPlan* plan, int copies) {
    const size_t once = plan->trained_once, blocks = zero_gradient_begin(plan, plan->groups) - once;
    const double all = (double)zero_count(plan, ZERO_GRADIENT), ranks = zero_parts_of(plan, 1, plan->size),
                 share = plan->experts > 1 ? copies * (1 - 1 / ranks) / (1 - 1.0 / plan->size) : 1;
    return all + (share - 1) * (double)blocks;
}

ZeroTraffic zero_traffic(const ZeroPlan* plan, int64_t sequences, int B, size_t gradient_bytes,
                         size_t parameter_bytes, double operand_bytes) {
    const MicroSteps steps = zero_micro_steps(plan, sequences, B);
    const int64_t count = micro_steps_count(&steps);
    const double trained = zero_sent_elements_(plan, 1), reduced = zero_sent_elements_(plan, plan->experts);
    const double reductions = plan->stage < 2 ? 1 : (double)count;
    const size_t shared_bytes =
        // sent to all ranks after the reduction
        plan->stage == 0 ? gradient_bytes : parameter_bytes;
    const double shared =
        plan->stage < 3 ? trained : (double)plan->once + zero_collected_elements_(plan, count);
    const double others = 1 - 1.0 / plan->shards, replicas = 1 - 1.0 / zero_replicas(plan);
    const ZeroTraffic traffic = {
        others *
            (reductions * reduced * (double)gradient_bytes + shared * (double)shared_bytes + operand_bytes),
        replicas / plan->shards * (trained * (double)(sizeof(float) + shared_bytes) + operand_bytes)};
    return traffic;
}

void zero_add_pieces_cpu(float* shard, const float* pieces, ZeroPieces of, int active, int is_first) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < of.count; i++) {
        float sum = is_first ? 0.0f : shard[i];
        for (int a = 0; a < active; a++) {
            sum += pieces[(size_t)(a % of.copies) * of.stride + (size_t)(a / of.copies) * of.count + i];
        }
        shard[i] = sum;
    }
}

size_t zero_grads_elements(const ZeroPlan* plan, int blocks) {
    const size_t once = zero_trained_elements(plan, 0), all = zero_gradient_begin(plan, plan->groups) - once,
                 block = zero_trained_elements(plan, plan->groups - 1),
                 own = plan->shares_buffer ? (size_t)blocks * block : all;
    return once + (size_t)plan->experts * own + zero_embedding_elements_(plan);
}

void zero_open_cpu(Zero* z, Memory* memory, const Map* map, ZeroPlan plan, ModelConfig cfg,
                   const TensorRow* rows, float* params, float* grads, Group* data, Group* same) {
    const size_t reduced = map->totals.elements[MAP_REDUCED] * sizeof(float),
                 pieces = plan.size > 1 ? map->totals.largest_gradient * sizeof(float) : 0,
                 ranges = (size_t)zero_max_ranges(cfg) * sizeof(ZeroRange);
    memset(z, 0, sizeof(*z));
    z->plan = plan;
    z->map = map;
    z->group = data;
    z->same = same;
    z->params = params;
    z->grads = z->shard = grads;
    if (reduced > 0) {
        z->shard = (float*)memory_take(memory, "gradients: shard", MEMORY_DEVICE, reduced);
    }
    if (pieces > 0) {
        z->pieces = (float*)memory_take(memory, "gradients: pieces", MEMORY_DEVICE, pieces);
    }
    z->ranges = (ZeroRange*)memory_take(memory, "scratch: ranges of parameters", MEMORY_DEVICE, ranges);
    if (!memory_is_dry(memory)) {
        z->num_ranges = zero_ranges(&plan, rows, cfg, z->ranges);
    }
}

// Adds the gradients of a bucket from all ranks that divide it to its shard, in the order of the
// ranks with the tokens.
static void zero_reduce_cpu_(Zero* z, const Bucket* b, MicroStep step) {
    Group* ranks = zero_ranks_cpu(z, b);
    const ZeroPieces of = {b->in[MAP_REDUCED].count, b->elements, b->copies};
    float *grads = zero_grads_of_(z, b), *pieces = ranks->size > 1 ? z->pieces : grads;
    for (size_t k = 0; k < (size_t)b->copies && pieces != grads; k++) {
        group_all_to_all_cpu(pieces + k * b->elements, grads + k * b->elements, of.count, ranks);
    }
    zero_add_pieces_cpu(zero_reduced_of_(z, b), pieces, of, zero_adds_(&z->plan, step),
                        zero_is_first_(&z->plan, step));
}

void zero_group_done_cpu(Zero* z, int g, MicroStep step) {
    const Bucket* b = map_trained(z->map, g);
    const int is_embedding = b && b->kind == MAP_EMBEDDING;
    if (!b || !zero_reduces(&z->plan, step) || (is_embedding && !z->plan.sums_embedding)) {
        return;
    }
    zero_reduce_cpu_(z, b, step);
    if (z->plan.stage == 0 || (is_embedding && step.is_last)) {
        group_all_gather_cpu(zero_grads_of_(z, b), zero_reduced_of_(z, b), b->in[MAP_REDUCED].count,
                             zero_ranks_cpu(z, b));
    }
}

void zero_clear_frozen_cpu(Zero* z, int l) {
    const Map* m = z->map;
    const Bucket* b = map_trained(m, 1 + model_copy(m->cfg, l));
    for (int i = 0; b && z->plan.shares_buffer && i < b->count; i++) {
        const Shard* s = &m->shards[b->first + i];
        if (s->flags & SHARD_FROZEN) {
            memset(z->grads + map_at(m, s, MAP_GRADIENTS), 0, s->piece.count * sizeof(float));
        }
    }
}

void zero_square_sum_cpu(const Zero* z, WideSum* sum, double* partial) {
    MapSpan span;
    for (int i = 0; (i = map_counted(z->map, i, &span)) > 0;) {
        gradient_square_sum_cpu(sum, z->shard + span.begin, span.count, partial);
    }
}

static void zero_add_cpu_(float* sum, const float* more, size_t count) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < count; i++) {
        sum[i] += more[i];
    }
}

void zero_add_embedding_cpu(Zero* z) {
    const Map* m = z->map;
    const Bucket *apart = map_embedding(m), *joined = map_trained(m, 0);
    const float* embedding = zero_grads_of_(z, apart);
    for (int i = joined->first; i < joined->first + joined->count; i++) {
        const Shard* s = &m->shards[i];
        const size_t at = s->piece.first, count = s->piece.count;
        if (s->tensor == m->shards[apart->first].tensor && map_has(m, s, MAP_REDUCED)) {
            zero_add_cpu_(z->shard + map_at(m, s, MAP_REDUCED), embedding + at, count);
        }
        if (s->tensor == m->shards[apart->first].tensor && z->plan.stage == 0 && z->shard != z->grads) {
            zero_add_cpu_(z->grads + map_at(m, s, MAP_GRADIENTS), embedding + at, count);
        }
    }
}

float* zero_update_gradient_cpu(const Zero* z, int g) {
    const Bucket* b = map_trained(z->map, g);
    return map_update_space(z->map) == MAP_GRADIENTS ? zero_grads_of_(z, b) : zero_reduced_of_(z, b);
}

void zero_gather_parameters_cpu(Zero* z) {
    for (int g = 0; g < z->plan.groups && zero_is_divided(&z->plan); g++) {
        const Bucket* b = map_trained(z->map, g);
        if (b) {
            zero_gather_group_cpu(z, z->params + b->in[MAP_PARAMETERS].begin, g);
        }
    }
}

#endif // ZERO_IMPLEMENTATION

#endif
