/*
zero.h -- ZeRO: what W data ranks divide among themselves, what they send to each other, and the
CPU's version of the communication. Where each element is, a map says (map_walk.h).

    stage   parameters   gradients              optimizer state   a gradient is reduced
      0     all          all                    all               in the last micro-step, for all
      1     all          all                    1/W               in the last micro-step
      2     all          two groups, and 1/W    1/W               in every micro-step
      3     two groups,  two groups, and 1/W    1/W               in every micro-step; on GPUs
            and 1/W

A group is the parameters outside of the blocks, or a block of parameters (model.h); ranks gather
and reduce its buckets. Frozen parameters have no gradient; no update changes them, so they are
gathered once.

Two levels: W ranks are replicas of `shards` ranks each, for example those of a machine. Slices move
in every micro-step, and stay within a replica; for parameters and gradients "1/W" then means
1/shards. Once an update, the ranks with the same slice add up the sums of their replicas, shard by
shard.

Divided experts: a rank's experts see the tokens of all its neighbors, and leave a gradient for each
neighbor's. So the additions are those of the ranks that have the tokens, whichever rank has the
experts.

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

// How a rank takes part.
typedef struct {
    int stage;
    int rank, size; // this rank; number of ranks, W: of a data group (grid.h)
    int shards;     // ranks of a replica: W with one level; ranks 0 ... shards - 1 are the first
    int context;    // ranks that share a micro-batch: neighbors, each with its part of the tokens
} ZeroPlan;

static inline int zero_replicas(const ZeroPlan* plan) { return plan->size / plan->shards; }

// Returns the elements of a token embedding whose gradient is summed apart.
static inline size_t zero_embedding_elements(const Map* m) {
    return tensor_layer_elements(&m->rows[m->shards[map_embedding(m)->first].tensor]);
}

// Returns the elements from the gradients of a layer on the tokens of a neighbor to those on the
// next one's.
static inline size_t zero_neighbor_elements(const Map* m, int l) {
    const Bucket* b = map_trained(m, model_group(m->cfg, l));
    return b ? b->elements : 0;
}

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

// Elements of the buckets of a rank, with padding.
typedef struct {
    double once, blocks;                 // outside of the blocks; of all blocks
    double trained_once, trained_blocks; // those with gradients
    double embedding;                    // the gradient of an embedding apart
    int num_blocks;
} ZeroSizes;

ZeroSizes zero_sizes(const MapOf* of, int rank);

// Bytes that a rank sends in an update, and receives: to ranks of its replica, and to those of
// others.
typedef struct {
    double within, between;
} ZeroTraffic;

// Returns the traffic of an update of so many micro-steps. Elements of gradients and parameters
// have these sizes; each rank sends `operand_bytes` of matrices (owners.h).
ZeroTraffic zero_traffic(const MapOf* of, int rank, int64_t micro_steps, size_t gradient_bytes,
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
    Group* group;          // the data group
    Group* same;           // ranks with the same experts
    float *params, *grads; // the model's
    float* shard;          // the reduced gradient; `grads` if the map has no place for it
    float* pieces;         // one piece of a group's gradient from each rank; NULL with one rank
} Zero;

// Opens the parts of a rank of the data group; params and grads are the model's, filled with zeros.
void zero_open_cpu(Zero* z, Memory* memory, const Map* map, ZeroPlan plan, float* params, float* grads,
                   Group* data, Group* same);

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

// Clears the gradients of layer l that its backward pass does not set. Where layers leave their
// gradients in one place, it still has those of the layer before.
void zero_clear_unset_cpu(Zero* z, int l);

// Adds the squares of this rank's shards of the reduced gradient that count. `partial` is scratch
// memory of gradient_square_sum_cpu.
void zero_square_sum_cpu(const Zero* z, WideSum* sum, double* partial);

// Adds the squares of the gradient of group g, which the backward pass has just completed. For one
// rank.
static inline void zero_group_square_sum_cpu(const Zero* z, int g, WideSum* sum, double* partial) {
    const Bucket* b = map_trained(z->map, g);
    gradient_square_sum_cpu(sum, zero_grads_of_(z, b), b->elements, partial);
}

// Return the parameters of a range that this rank updates, and their reduced gradient: if blocks
// share a buffer, only while the range's block has it.
static inline float* zero_range_params_cpu(const Zero* z, const MapRange* range) {
    return z->params + map_range_at(z->map, range, MAP_KEPT);
}
static inline float* zero_range_gradient_cpu(const Zero* z, const MapRange* range) {
    const MapSpace space = map_update_space(z->map);
    return (space == MAP_GRADIENTS ? z->grads : z->shard) + map_range_at(z->map, range, space);
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

// Adds a bucket to the sizes.
static void zero_take_size_(void* context, const Bucket* b, const Shard* s) {
    ZeroSizes* sizes = (ZeroSizes*)context;
    const double elements = s ? 0 : (double)b->elements, trained = b->kind == MAP_TRAINED ? elements : 0;
    if (b->kind == MAP_EMBEDDING) {
        sizes->embedding += elements;
    } else if (b->layer < 0) {
        sizes->once += elements;
        sizes->trained_once += trained;
    } else {
        sizes->blocks += elements;
        sizes->trained_blocks += trained;
    }
}

ZeroSizes zero_sizes(const MapOf* of, int rank) {
    ZeroSizes sizes;
    memset(&sizes, 0, sizeof(sizes));
    map_walk(of, rank, zero_take_size_, &sizes);
    sizes.num_blocks = model_groups(map_part(of, rank)) - 1;
    return sizes;
}

// Returns the elements of blocks that stage 3 gathers in an update: all blocks in the first forward
// pass, and in every other pass all but those of the two layers with which the pass before it
// ended.
static double zero_collected_elements_(const ZeroSizes* sizes, int64_t micro_steps) {
    const int blocks = sizes->num_blocks, later = blocks > 2 ? blocks - 2 : 0;
    return sizes->blocks / blocks * (blocks + (2.0 * (double)micro_steps - 1) * later);
}

ZeroTraffic zero_traffic(const MapOf* of, int rank, int64_t micro_steps, size_t gradient_bytes,
                         size_t parameter_bytes, double operand_bytes) {
    const ZeroSizes sizes = zero_sizes(of, rank);
    // ranks that divide a block; the part of it that goes to them
    const double ranks = of->data / of->experts, others = 1 - 1.0 / of->replica,
                 replicas = 1 - (double)of->replica / of->data,
                 of_block = of->experts > 1 ? (1 - 1 / ranks) / others : 1,
                 outside = sizes.trained_once + sizes.embedding,
                 trained = outside + of_block * sizes.trained_blocks,
                 reduced = outside + of->experts * of_block * sizes.trained_blocks;
    const double reductions = of->stage < 2 ? 1 : (double)micro_steps;
    const size_t shared_bytes =
        // sent to all ranks after the reduction
        of->stage == 0 ? gradient_bytes : parameter_bytes;
    const double shared =
        of->stage < 3 ? trained : sizes.once + zero_collected_elements_(&sizes, micro_steps);
    const ZeroTraffic traffic = {
        others *
            (reductions * reduced * (double)gradient_bytes + shared * (double)shared_bytes + operand_bytes),
        replicas / of->replica * (trained * (double)(sizeof(float) + shared_bytes) + operand_bytes)};
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

void zero_open_cpu(Zero* z, Memory* memory, const Map* map, ZeroPlan plan, float* params, float* grads,
                   Group* data, Group* same) {
    const size_t reduced = map->totals.elements[MAP_REDUCED] * sizeof(float),
                 pieces = plan.size > 1 ? map->totals.largest_gradient * sizeof(float) : 0;
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
    if (!b || !zero_reduces(&z->plan, step) || (is_embedding && !model_has_first(z->map->cfg))) {
        return;
    }
    zero_reduce_cpu_(z, b, step);
    if (z->plan.stage == 0 || (is_embedding && step.is_last)) {
        group_all_gather_cpu(zero_grads_of_(z, b), zero_reduced_of_(z, b), b->in[MAP_REDUCED].count,
                             zero_ranks_cpu(z, b));
    }
}

void zero_clear_unset_cpu(Zero* z, int l) {
    const Map* m = z->map;
    const Bucket* b = map_trained(m, 1 + model_copy(m->cfg, l));
    MapSpan unset;
    for (size_t at = 0; b && m->of.ring_gradients > 0 && map_next_unset(m, b, &at, &unset);) {
        for (int copy = 0; copy < b->copies; copy++) {
            memset(z->grads + unset.begin + (size_t)copy * b->elements, 0, unset.count * sizeof(float));
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

void zero_gather_parameters_cpu(Zero* z) {
    for (int g = 0; g < model_groups(z->map->cfg); g++) {
        const Bucket* b = map_trained(z->map, g);
        if (b && map_is_divided(z->map)) {
            zero_gather_group_cpu(z, z->params + b->in[MAP_PARAMETERS].begin, g);
        }
    }
}

#endif // ZERO_IMPLEMENTATION

#endif
