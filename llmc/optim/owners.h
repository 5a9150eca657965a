/*
owners.h -- updates of matrices whose parts belong to several ranks, by their owners (matrices.h).

    operand   each rank makes that of its parts: Muon's direction, else the gradient
    there     the parts travel to the owner, in two hops: from the ranks that divide a bucket to the
              owner's among them, then within the tensor group
    turn      the owner makes the direction of the update, and updates the state
    back      the same ways
    move      each rank moves its parts of the weights

All ranks make the same rounds: of each owner at most one matrix, the next of the deal. A matrix is
made of its pieces: the part of a tensor rank, row by row of the whole matrix. So the operations and
their order depend on the shape alone, and the bits do not depend on the number of ranks.

Of a tensor that tensor ranks do not cut, all have the operand: those of the owner's number send it,
and all get the direction. With a rate that depends on the weights (Adafactor) these travel too, and
the rate comes back.
*/
#ifndef LLMC_OWNERS_H
#define LLMC_OWNERS_H

#include "llmc/base/memory.h"
#include "llmc/comm/group.h"
#include "llmc/model/map.h"
#include "llmc/optim/matrices.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// A matrix of a round.
typedef struct {
    OwnedMatrix x;
    int group;
    const Bucket* bucket;
    int owner_data, owner_tensor; // rank among those that divide the bucket; in the tensor group
    int is_cut;                   // tensor ranks have different parts
    MatrixPart part;              // of this tensor rank, in its part of the tensor
    MapRange share;               // the elements that this rank updates
    // begins in the memory of shares, and, if the owner has this data rank, of pieces
    size_t share_at, piece_at;
} OwnersItem;

// Memory, and settings. Each array has a second half for weights, if these travel.
typedef struct {
    const OptimizerState* state;
    int tensor_rank, tensor_ranks;
    int has_weights;                              // weights travel, and rates
    int most;                                     // owners
    size_t shares_room, pieces_room, matrix_room; // elements
    size_t shares_used, pieces_used;              // in this round
    float* shares;                                // this rank's parts of the matrices of a round
    float* pieces; // parts of this tensor rank, of the matrices whose owners have this data rank
    float* parts;  // of this rank's matrix, from all tensor ranks; NULL without them
    float* matrix; // its rows
    OwnersItem* items;
    GroupMove* moves;
} Owners;

// Takes the memory, if any matrices travel; its lists, which the host reads, at `lists`. The state
// must outlive it.
void owners_open(Owners* o, Memory* memory, MemoryPlace lists, const OptimizerState* state);

// Returns the mean of the bytes that a rank sends in an update.
double owners_bytes(const OptimizerState* state);

// ---- rounds ----

// Matrices next ... end - 1 of a deal, which `owners` ranks have; those whose group is not among
// groups `first_group` ... `end_group - 1` are left out.
typedef struct {
    TensorPlace place;
    size_t next, end;
    int owners, first_group, end_group;
} OwnersDeal;

OwnersDeal owners_deal(const Owners* o, TensorPlace place, int first_group, int end_group);

// Sets the items of the next round, and returns their number; -1: none is left.
int owners_round(Owners* o, OwnersDeal* deal);

typedef enum { OWNERS_THERE, OWNERS_BACK } OwnersWay;

// Set the messages of a round among the ranks that divide the bucket, of which this one is `rank`,
// and in the tensor group. Return their number.
int owners_moves_of_data(const Owners* o, int count, OwnersWay way, int rank);
int owners_moves_of_tensor(const Owners* o, int count, OwnersWay way);

// True if this rank owns the matrix of an item.
static inline int owners_owns(const OwnersItem* item) { return matrix_is_owned(item->x); }

// A rectangle of a piece: `height` runs of `width` elements, one after the other in the memory of
// parts, and `pitch` apart in the matrix.
typedef struct {
    size_t in_parts, in_matrix, width, height, pitch;
} OwnersRun;

enum { OWNERS_RUNS = 3 }; // at most

// Sets the runs of the piece of tensor rank j, and returns their number.
int owners_runs(const Owners* o, const OwnersItem* item, int j, OwnersRun runs[OWNERS_RUNS]);

// Returns where the matrix of an item is complete before it is turned: among the pieces, or with
// several tensor ranks in the memory of a matrix.
static inline float* owners_matrix(const Owners* o, const OwnersItem* item) {
    return item->is_cut ? o->matrix : o->pieces + item->piece_at;
}

// ---- the CPU ----

// Copies a matrix between its pieces and its rows.
void owners_copy_runs(const Owners* o, const OwnersItem* item, float* parts, float* matrix, OwnersWay way);

// Updates the matrices that travel of groups first ... end - 1. Collective.
void owners_update_cpu(Owners* o, Zero* zero, Group* tensor, int first, int end, Update update,
                       const MuonScratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef OWNERS_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/sizes.h"
#include "llmc/model/part.h"

// ---- rounds ----

static const TensorRow* owners_row_(const Owners* o, OwnedMatrix x) { return &o->state->rows[x.of->row]; }

OwnersDeal owners_deal(const Owners* o, TensorPlace place, int first_group, int end_group) {
    OwnersDeal deal = {place, 0, 0, 1, first_group, end_group};
    for (int k = 0; k < o->state->num_matrices; k++) {
        const Matrices* m = &o->state->matrices[k];
        if (o->state->rows[m->row].place == place && matrices_travel(m)) {
            deal.owners = m->owners;
            deal.end += matrices_all(m);
        }
    }
    return deal;
}

// Returns matrix number n.
static OwnedMatrix owners_number_(const Owners* o, TensorPlace place, size_t n) {
    OwnedMatrix x = {NULL, 0, 0};
    for (int k = 0; k < o->state->num_matrices && !x.of; k++) {
        const Matrices* m = &o->state->matrices[k];
        if (o->state->rows[m->row].place == place && m->before <= n && n < m->before + matrices_all(m)) {
            x.of = m;
            x.copy = m->first_copy + (int)((n - m->before) / (size_t)m->count);
            x.number = (int)((n - m->before) % (size_t)m->count);
        }
    }
    return x;
}

// Returns the part of data rank d, in the part of the tensor rank.
static MatrixPart owners_share_(const Owners* o, const OwnersItem* item, int d) {
    const Map* m = o->state->map;
    const Shard* first = map_find(m, item->x.of->row, state_matrix_layer(o->state, item->x));
    const size_t begin = map_owned_from(m, item->bucket, d), end = begin + item->bucket->in[MAP_OWNED].count,
                 at = (first ? first->offset : 0) + item->part.begin, // a rank may have no words
        all = at + item->part.count;
    const size_t from = begin > at ? begin : at, to = end < all ? end : all;
    const MatrixPart share = {from < to ? from - at : 0, from < to ? to - from : 0};
    return share;
}

static OwnersItem owners_item_(const Owners* o, OwnedMatrix x) {
    const Map* m = o->state->map;
    const TensorRow* row = owners_row_(o, x);
    const int owner = matrix_owner(x);
    OwnersItem item;
    memset(&item, 0, sizeof(item));
    item.x = x;
    item.group = state_matrix_group(o->state, x);
    item.bucket = map_trained(m, item.group);
    item.owner_data = owner / o->tensor_ranks;
    item.owner_tensor = owner % o->tensor_ranks;
    item.is_cut = o->tensor_ranks > 1 && row->split != SPLIT_NONE;
    item.part = matrix_part(x, row, o->state->cfg);
    item.share = map_part_of_range(map_range(m, x.of->row, state_matrix_layer(o->state, x), MAP_OWNED),
                                   item.part.begin, item.part.count);
    return item;
}

// True if a matrix is updated now.
static int owners_takes_(const Owners* o, const OwnersDeal* deal, const OwnersItem* item) {
    const Map* m = o->state->map;
    const int layer = m->cfg.part.first_layer + int_max(state_matrix_layer(o->state, item->x), 0);
    return deal->first_group <= item->group && item->group < deal->end_group &&
           !freeze_has(&m->of.freeze, item->x.of->row, layer);
}

// Returns the room for some elements and the rate: a multiple of four elements.
static size_t owners_room_(size_t elements) { return elements / 4 * 4 + 4; }

int owners_round(Owners* o, OwnersDeal* deal) {
    const size_t end = (deal->next / (size_t)deal->owners + 1) * (size_t)deal->owners;
    size_t shares = 0, pieces = 0;
    int count = 0;
    if (deal->next >= deal->end) {
        return -1;
    }
    for (; deal->next < end && deal->next < deal->end; deal->next++) {
        OwnersItem item = owners_item_(o, owners_number_(o, deal->place, deal->next));
        if (owners_takes_(o, deal, &item)) {
            item.share_at = shares;
            item.piece_at = pieces;
            shares += owners_room_(item.share.count);
            pieces +=
                item.owner_data == map_owner(o->state->map, item.bucket) ? owners_room_(item.part.count) : 0;
            o->items[count++] = item;
        }
    }
    o->shares_used = shares;
    o->pieces_used = pieces;
    return count;
}

// Measures the rounds of a deal.
static void owners_measure_deal_(Owners* o, TensorPlace place) {
    OwnersDeal deal = owners_deal(o, place, 0, model_groups(o->state->cfg));
    int count;
    while ((count = owners_round(o, &deal)) >= 0) {
        o->shares_room = o->shares_used > o->shares_room ? o->shares_used : o->shares_room;
        o->pieces_room = o->pieces_used > o->pieces_room ? o->pieces_used : o->pieces_room;
        for (int i = 0; i < count; i++) {
            const size_t elements = owners_room_(matrix_elements(o->items[i].x));
            o->matrix_room =
                owners_owns(&o->items[i]) && elements > o->matrix_room ? elements : o->matrix_room;
        }
    }
}

static void owners_measure_(Owners* o) {
    owners_measure_deal_(o, PLACE_ONCE);
    owners_measure_deal_(o, PLACE_BLOCK);
}

// The map of a dry run has no shards: makes one, for a while.
static void owners_measure_dry_(Owners* o) {
    const OptimizerState* const given = o->state;
    Memory memory = memory_on_host();
    OptimizerState state = *given;
    Map map;
    map_open(&map, &memory, MEMORY_HOST, &given->map->of, given->map->rank);
    state.map = &map;
    o->state = &state;
    o->items = (OwnersItem*)memory_take(&memory, "rounds", MEMORY_HOST, (size_t)o->most * sizeof(OwnersItem));
    owners_measure_(o);
    memory_close(&memory);
    o->state = given;
    o->items = NULL;
}

static float* owners_take_(const Owners* o, Memory* memory, size_t elements) {
    return (float*)memory_take(memory, "scratch: matrices of an update", MEMORY_DEVICE,
                               elements * (size_t)(1 + o->has_weights) * sizeof(float));
}

void owners_open(Owners* o, Memory* memory, MemoryPlace lists, const OptimizerState* state) {
    memset(o, 0, sizeof(*o));
    o->state = state;
    o->tensor_ranks = state->map->of.tensor;
    o->tensor_rank = map_place(&state->map->of, state->map->rank).tensor;
    o->has_weights = state->optimizer.sums_weights;
    for (int k = 0; k < state->num_matrices; k++) {
        o->most =
            matrices_travel(&state->matrices[k]) ? int_max(o->most, state->matrices[k].owners) : o->most;
    }
    if (o->most == 0) {
        return;
    }
    o->items = (OwnersItem*)memory_take(memory, "scratch: rounds of an update", lists,
                                        (size_t)o->most * sizeof(OwnersItem));
    if (memory_is_dry(memory)) {
        owners_measure_dry_(o);
    } else {
        owners_measure_(o);
    }
    // To the owners of all matrices, and from the ranks that have parts of a data rank's: two each,
    // with the weights or the rate.
    o->moves = (GroupMove*)memory_take(memory, "scratch: rounds of an update", lists,
                                       4 * (size_t)o->most * sizeof(GroupMove));
    o->shares = owners_take_(o, memory, o->shares_room);
    o->pieces = owners_take_(o, memory, o->pieces_room);
    if (o->tensor_ranks > 1) {
        o->parts = owners_take_(o, memory, o->matrix_room);
        o->matrix = owners_take_(o, memory, o->matrix_room);
    }
}

double owners_bytes(const OptimizerState* state) {
    double elements = 0;
    for (int k = 0; k < state->num_matrices; k++) {
        const Matrices* m = &state->matrices[k];
        const double all = (double)matrices_all(m) * (double)m->rows * (double)m->cols;
        elements += matrices_travel(m) ? all / m->owners : 0;
    }
    return (2 + state->optimizer.sums_weights) * elements * sizeof(float);
}

// ---- messages ----

// Messages of a round.
typedef struct {
    const Owners* o;
    OwnersWay way;
    int count;
} OwnersMoves_;

static void owners_add_(OwnersMoves_* m, int peer, float* data, size_t count, int sends) {
    const GroupMove move = {peer, data, count * sizeof(float), sends};
    if (count > 0) {
        m->o->moves[m->count++] = move;
    }
}

// Adds the message of some elements of an array. On the way there as many weights lie `room`
// further; on the way back the rate lies at `rate`.
static void owners_add_part_(OwnersMoves_* m, int peer, float* data, size_t count, size_t room, float* rate,
                             int sends) {
    owners_add_(m, peer, data, count, sends);
    if (m->o->has_weights && count > 0) {
        const int is_there = m->way == OWNERS_THERE;
        owners_add_(m, peer, is_there ? data + room : rate, is_there ? count : 1, sends);
    }
}

int owners_moves_of_data(const Owners* o, int count, OwnersWay way, int rank) {
    OwnersMoves_ moves = {o, way, 0};
    for (int i = 0; i < count; i++) {
        const OwnersItem* item = &o->items[i];
        const int data = map_owners(o->state->map, item->bucket),
                  own = map_owner(o->state->map, item->bucket);
        if (way == OWNERS_THERE && !item->is_cut && item->owner_tensor != o->tensor_rank) {
            continue;
        }
        float *share = o->shares + item->share_at, *piece = o->pieces + item->piece_at;
        owners_add_part_(&moves, data == 1 ? rank : item->owner_data, share, item->share.count,
                         o->shares_room, share + item->share.count, way == OWNERS_THERE);
        for (int d = 0; d < data && item->owner_data == own; d++) {
            const MatrixPart of = owners_share_(o, item, d);
            owners_add_part_(&moves, data == 1 ? rank : d, piece + of.begin, of.count, o->pieces_room,
                             piece + item->part.count, way == OWNERS_BACK);
        }
    }
    return moves.count;
}

// Returns the elements of the part of tensor rank j.
static size_t owners_part_(const Owners* o, const OwnersItem* item, int j) {
    ModelConfig cfg = o->state->cfg;
    cfg.part.tensor_rank = j;
    return matrix_part(item->x, owners_row_(o, item->x), cfg).count;
}

int owners_moves_of_tensor(const Owners* o, int count, OwnersWay way) {
    OwnersMoves_ moves = {o, way, 0};
    for (int i = 0; i < count; i++) {
        const OwnersItem* item = &o->items[i];
        const int is_owner = item->owner_tensor == o->tensor_rank;
        float *piece = o->pieces + item->piece_at, *part = o->parts;
        if (o->tensor_ranks == 1 || item->owner_data != map_owner(o->state->map, item->bucket) ||
            (!item->is_cut && way == OWNERS_THERE)) {
            continue;
        }
        if (item->is_cut || !is_owner) {
            owners_add_part_(&moves, item->owner_tensor, piece, item->part.count, o->pieces_room,
                             piece + item->part.count, way == OWNERS_THERE);
        }
        for (int j = 0; j < o->tensor_ranks && is_owner; j++) {
            if (item->is_cut) {
                const size_t elements = owners_part_(o, item, j);
                owners_add_part_(&moves, j, part, elements, o->matrix_room,
                                 o->parts + matrix_elements(item->x), way == OWNERS_BACK);
                part += elements;
            } else if (j != o->tensor_rank) {
                owners_add_part_(&moves, j, piece, item->part.count, o->pieces_room, piece + item->part.count,
                                 1);
            }
        }
    }
    return moves.count;
}

// ---- a matrix and its pieces ----

int owners_runs(const Owners* o, const OwnersItem* item, int j, OwnersRun runs[OWNERS_RUNS]) {
    const TensorRow *row = owners_row_(o, item->x), *whole = &o->state->whole[item->x.of->row];
    const size_t first = item->x.of->first + (size_t)item->x.number * item->x.of->rows;
    ModelPart part = o->state->cfg.part;
    size_t before = 0;
    int count = 0;
    for (int k = 0; k < j; k++) {
        before += owners_part_(o, item, k);
    }
    if (row->split == SPLIT_COLS) {
        const OwnersRun all = {before, (size_t)j * row->cols, row->cols, item->x.of->rows, whole->cols};
        runs[count++] = all;
        return count;
    }
    part.tensor_rank = j;
    for (size_t at = 0, end = owners_part_(o, item, j); at < end; count++) {
        const PartRun run = part_run(row, model_of_part(o->state->cfg), part, item->part.begin + at);
        const size_t width = run.count < end - at ? run.count : end - at;
        const OwnersRun of = {before + at, run.whole - first * whole->cols, width, 1, width};
        assert(count < OWNERS_RUNS);
        runs[count] = of;
        at += width;
    }
    return count;
}

// ---- the CPU ----

// Arguments of an update on the CPU.
typedef struct {
    Owners* o;
    Zero* zero;
    Group* tensor;
    Update update;
    const MuonScratch* scratch;
} OwnersCpu_;

static void owners_operand_(const OwnersCpu_* u, const OwnersItem* item) {
    const MapRange* range = &item->share;
    float* share = u->o->shares + item->share_at;
    if (range->count > 0) {
        optimizer_operand_cpu(u->o->state, range, share, zero_range_gradient_cpu(u->zero, range), u->update);
        if (u->o->has_weights) {
            memcpy(share + u->o->shares_room, zero_range_params_cpu(u->zero, range),
                   range->count * sizeof(float));
        }
    }
}

static void owners_move_(const OwnersCpu_* u, const OwnersItem* item) {
    const MapRange* range = &item->share;
    const float* share = u->o->shares + item->share_at;
    if (range->count > 0) {
        optimizer_move_cpu(u->o->state, item->x, range, zero_range_params_cpu(u->zero, range), share,
                           share[range->count], u->update);
    }
}

void owners_copy_runs(const Owners* o, const OwnersItem* item, float* parts, float* matrix, OwnersWay way) {
    OwnersRun runs[OWNERS_RUNS];
    for (int j = 0; j < o->tensor_ranks; j++) {
        const int count = owners_runs(o, item, j, runs);
        for (int k = 0; k < count; k++) {
            for (size_t h = 0; h < runs[k].height; h++) {
                float *a = parts + runs[k].in_parts + h * runs[k].width,
                      *b = matrix + runs[k].in_matrix + h * runs[k].pitch;
                memcpy(way == OWNERS_THERE ? b : a, way == OWNERS_THERE ? a : b,
                       runs[k].width * sizeof(float));
            }
        }
    }
}

// Turns the matrix that this rank owns.
static void owners_turn_(const OwnersCpu_* u, const OwnersItem* item) {
    const Owners* o = u->o;
    const size_t elements = matrix_elements(item->x);
    float *matrix = owners_matrix(o, item), *rate = (item->is_cut ? o->parts : matrix) + elements;
    const size_t weights = item->is_cut ? o->matrix_room : o->pieces_room;
    for (int half = 0; half <= o->has_weights && item->is_cut; half++) {
        owners_copy_runs(o, item, o->parts + (size_t)half * weights, matrix + (size_t)half * weights,
                         OWNERS_THERE);
    }
    const float found = optimizer_turn_cpu(o->state, item->x, matrix,
                                           o->has_weights ? matrix + weights : NULL, u->update, u->scratch);
    if (item->is_cut) {
        owners_copy_runs(o, item, o->parts, matrix, OWNERS_BACK);
    }
    *rate = found;
}

// Makes a round.
static void owners_round_cpu_(const OwnersCpu_* u, int count) {
    Owners* o = u->o;
    Group* data = zero_ranks_cpu(u->zero, o->items[0].bucket);
    for (int i = 0; i < count; i++) {
        owners_operand_(u, &o->items[i]);
    }
    group_exchange_cpu(data, o->moves, owners_moves_of_data(o, count, OWNERS_THERE, data->rank));
    group_exchange_cpu(u->tensor, o->moves, owners_moves_of_tensor(o, count, OWNERS_THERE));
    for (int i = 0; i < count; i++) {
        if (owners_owns(&o->items[i])) {
            owners_turn_(u, &o->items[i]);
        }
    }
    group_exchange_cpu(u->tensor, o->moves, owners_moves_of_tensor(o, count, OWNERS_BACK));
    group_exchange_cpu(data, o->moves, owners_moves_of_data(o, count, OWNERS_BACK, data->rank));
    for (int i = 0; i < count; i++) {
        owners_move_(u, &o->items[i]);
    }
}

void owners_update_cpu(Owners* o, Zero* zero, Group* tensor, int first, int end, Update update,
                       const MuonScratch* scratch) {
    const OwnersCpu_ u = {o, zero, tensor, update, scratch};
    static const TensorPlace places[] = {PLACE_ONCE, PLACE_BLOCK};
    for (int i = 0; i < 2 && o->most > 0; i++) {
        OwnersDeal deal = owners_deal(o, places[i], first, end);
        int count;
        while ((count = owners_round(o, &deal)) >= 0) {
            if (count > 0) {
                owners_round_cpu_(&u, count);
            }
        }
    }
}

#endif // OWNERS_IMPLEMENTATION

#endif
