/*
map_walk.h -- where each element of each tensor is: in which rank, and where in each of its arrays.

A bucket is what ranks gather, reduce and update together: the tensors outside of the blocks, or one
block of parameters; frozen tensors have buckets of their own. Its tensors begin at multiples of
TENSOR_SHARD_UNIT elements, and it ends at one of W TENSOR_SHARD_UNIT, so that it can be cut into
equal parts for the W data ranks. Blocks need not have the same tensors, but each begins at the same
element in all that have it (tensors.h): PARAMETERS are as large as if all blocks had the most, and
a bucket ends behind its last tensor. An array ("space") has one interval of each bucket:

    space        has of a bucket                                 buckets
    PARAMETERS   all                                             all; some take turns in a ring
    KEPT         a slice if parameters take turns, else all      all
    GRADIENTS    all; once for each neighbor with tokens         trained; some take turns in a ring
    SUMS         a slice: the sum of a replica's gradients       trained
    REDUCED      a shard: the sum of all gradients               trained
    OWNED        a shard; in stage 0 all                         trained ones, then frozen ones

W data ranks are replicas of `replica` ranks. A slice is 1/replica of a bucket, and a shard is one
of the W/replica parts of a slice. With one replica they are the same, and with one rank all of it:
then REDUCED is GRADIENTS in stages 0 and 1.

A tensor rank has its pieces of a tensor: one, or one for each of queries, keys and values, and one
for each gate (part.h). A shard is a run of elements of a piece that no end of an interval cuts; so
a space has all of it or nothing. Shards lie in the order of buckets and offsets. Padding belongs to
no shard and is zero.

If the first and the last stage of a pipeline share the token embedding, which is then also the
classifier's matrix, its gradient is summed apart: in a bucket of its own, the last one, without
parameters and state.

A map follows from the settings and the rank alone, so each rank knows every other's: map_walk goes
through the buckets and shards of any rank, in order. Layers are those of the rank's part of the
model, from 0 on; those that share parameters have one bucket, named after the lowest.
*/
#ifndef LLMC_MAP_WALK_H
#define LLMC_MAP_WALK_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/model/part.h"
#include "llmc/model/tensors.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    MAP_PARAMETERS,
    MAP_KEPT,
    MAP_GRADIENTS,
    MAP_SUMS,
    MAP_REDUCED,
    MAP_OWNED,
    MAP_SPACES
} MapSpace;

#define MAP_NONE SIZE_MAX // nowhere

// ---- settings ----

// Number of elements in a slot of optimizer state, for a tensor of rows x cols.
typedef enum {
    SLOT_ELEMENTS, // one for each element
    SLOT_BLOCKS,   // one for MAP_BLOCK elements; cols are a multiple of it
    // of whole matrices: one for each element, row, column
    SLOT_MATRIX,
    SLOT_ROWS,
    SLOT_COLS,
    // squares of the rows, or of the columns, unless that side is too long
    SLOT_ROWS_SQUARE,
    SLOT_COLS_SQUARE
} SlotShape;

// Slots at most: all but master weights, which lie as OWNED.
enum { MAP_SLOTS = 15, MAP_BLOCK = 64 };

// Settings that a map follows from; no pointers.
typedef struct {
    ModelConfig whole; // the model
    Freeze freeze;     // of the whole model
    // Ranks of the grid: of a tensor group; of a data group, W; stages; neighbors in a data group
    // that divide the experts of a layer. Rank (stage W + data rank) tensor + tensor rank.
    int tensor, data, pipeline, experts;
    int replica;                  // data ranks of a replica; W with one level
    int trains;                   // 0: each data rank has all parameters, and there is nothing else
    int stage;                    // of ZeRO
    int layers[MODEL_MAX_LAYERS]; // of each stage of the pipeline, if there are several
    // Layers that take turns in the memory of parameters, and of gradients; 0: each has its own.
    int ring_parameters, ring_gradients;
    // State: the shapes of slots; bit s: elements of a trained row have slot s.
    SlotShape shapes[MAP_SLOTS];
    unsigned slots[MODEL_PARAMETER_ROWS];
} MapOf;

// Returns the settings of one rank with all of a model in ZeRO stage 0, without state.
MapOf map_of_model(ModelConfig cfg);

// Place of a rank in the grid.
typedef struct {
    int stage, data, tensor; // of the pipeline; ranks in its data group and its tensor group
} MapPlace;

static inline MapPlace map_place(const MapOf* of, int rank) {
    const MapPlace place = {rank / of->tensor / of->data, rank / of->tensor % of->data, rank % of->tensor};
    return place;
}

static inline int map_rank(const MapOf* of, MapPlace place) {
    return (place.stage * of->data + place.data) * of->tensor + place.tensor;
}

// True if each rank of a data group has all of the model, or its shards of it.
static inline int map_is_plain(const MapOf* of) {
    return of->tensor == 1 && of->pipeline == 1 && of->experts == 1;
}

// Returns which of the equal parts of a bucket number d of the `ranks` that divide it updates: the
// parts of a slice are neighbors.
static inline int map_shard_number(const MapOf* of, int ranks, int d) {
    const int share = of->data / ranks, rank = d * share, replicas = of->data / of->replica;
    return (rank % of->replica * replicas + rank / of->replica) / share;
}

// Returns the part of the model that a rank has, as a model of its own.
ModelConfig map_part(const MapOf* of, int rank);

// ---- the map ----

// Elements from ... of a bucket lie at `begin` of a space; none if count is 0.
typedef struct {
    size_t begin, from, count;
} MapSpan;

typedef enum { MAP_TRAINED, MAP_FROZEN, MAP_EMBEDDING } MapKind;

typedef struct {
    int layer; // the lowest that uses it; -1: outside of the blocks
    MapKind kind;
    int ranks;              // data ranks that divide it: W; of divided experts, those with the same
    int copies;             // gradients, one after the other: one for the tokens of each neighbor
    int first, count;       // its shards
    size_t begin, elements; // in the group of parameters; with padding
    MapSpan in[MAP_SPACES];
} Bucket;

enum {
    SHARD_SUMS = 1,   // each tensor rank has a part of the gradient, which must be summed
    SHARD_COUNTS = 2, // in the norm of the gradient: once over all ranks
    SHARD_WRITES = 4, // in checkpoints: once over all ranks, of what a rank owns
    SHARD_FROZEN = 8  // not updated, though its bucket may be
};

// Elements first ... first + count - 1 of a piece of a tensor. Element e of the piece is element
// logical + e / run * stride + e % run of the whole tensor.
typedef struct {
    size_t first, count, logical, run, stride;
} MapPiece;

typedef struct {
    int tensor, layer, bucket; // row of the table of parameters
    unsigned flags;
    size_t offset; // in the bucket
    MapPiece piece;
    size_t slot[MAP_SLOTS]; // start of its state in the array of each slot, or MAP_NONE
} Shard;

typedef struct {
    size_t elements[MAP_SPACES], slots[MAP_SLOTS]; // sizes of the arrays
    int buckets, shards;
    size_t largest_gradient; // of a bucket: elements, all copies
    size_t updated;          // elements of OWNED in trained buckets, the first ones
    int first_block;         // the lowest block of parameters that has a trained bucket
    TensorSet frozen;        // rows that lie in frozen buckets alone
} MapTotals;

// Called for a bucket, with NULL and before its shards are counted, and then for each of its
// shards.
typedef void (*MapTake)(void* context, const Bucket* bucket, const Shard* shard);

// Goes through the buckets and shards of a rank, in order.
void map_walk(const MapOf* of, int rank, MapTake take, void* context);

// Returns the sizes of a rank's arrays without making a map.
MapTotals map_totals(const MapOf* of, int rank);

#ifdef __cplusplus
}
#endif

#ifdef MAP_WALK_IMPLEMENTATION

#include <assert.h>
#include <string.h>

MapOf map_of_model(ModelConfig cfg) {
    MapOf of;
    memset((void*)&of, 0, sizeof(of));
    of.whole = cfg;
    of.freeze = freeze_of(cfg, "");
    of.trains = 1;
    of.tensor = of.data = of.pipeline = of.experts = of.replica = 1;
    return of;
}

static int map_data_rank_(const MapOf* of, int rank) { return rank / of->tensor % of->data; }

ModelConfig map_part(const MapOf* of, int rank) {
    const int stage = rank / of->tensor / of->data;
    ModelPart part;
    memset(&part, 0, sizeof(part));
    if (of->tensor > 1) {
        part.tensor_ranks = of->tensor;
        part.tensor_rank = rank % of->tensor;
    }
    if (of->experts > 1) {
        part.expert_ranks = of->experts;
        part.expert_rank = map_data_rank_(of, rank) % of->experts;
    }
    if (of->pipeline > 1) {
        for (int p = 0; p < stage; p++) {
            part.first_layer += of->layers[p];
        }
        part.layers = of->layers[stage];
        part.of_layers = of->whole.L;
    }
    return model_part_of(of->whole, part);
}

// ---- buckets ----

// A walk: the rank, and how far it has come in each array.
typedef struct {
    const MapOf* of;
    ModelConfig cfg;
    Freeze freeze; // of the rank's part
    TensorRow rows[MODEL_PARAMETER_ROWS], whole[MODEL_PARAMETER_ROWS];
    int tensor_rank, data_rank;
    TensorSet frozen;      // rows that lie in frozen buckets
    int first_block;       // the lowest block of parameters that is trained
    size_t at[MAP_SPACES]; // start of the next bucket; in PARAMETERS of the group
    size_t parameters;     // elements of PARAMETERS, if none take turns
    size_t at_frozen;      // of the next frozen one in OWNED
    // for layers that take turns: the start of their places, and the size of one place
    size_t ring_begin[MAP_SPACES], ring[MAP_SPACES];
    size_t slots[MAP_SLOTS];
    int num_buckets, num_shards;
    MapTake take;
    void* context;
} MapWalk_;

// A bucket without its places: some rows of group g of the parameters (model.h).
typedef struct {
    int g;
    MapKind kind;
    TensorSet rows;
    size_t begin, elements; // in the group; with the padding at the end
} MapContent_;

static size_t map_round_up_(size_t elements, size_t unit) { return (elements + unit - 1) / unit * unit; }

static MapContent_ map_content_(const MapWalk_* w, int g, MapKind kind, TensorSet rows) {
    const size_t unit = (size_t)(w->of->trains ? w->of->data : 1) * TENSOR_SHARD_UNIT;
    MapContent_ b = {g, kind, 0, 0, 0};
    size_t end = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &w->rows[i];
        if (tensor_is_in(rows, i) && tensor_is_in_group(row, g) && !tensor_is_absent(row)) {
            const size_t at = tensor_offset_in_group(row);
            b.begin = b.rows && b.begin < at ? b.begin : at / unit * unit;
            b.rows |= tensor_bit(i);
            end = at + tensor_room_in_group(row) > end ? at + tensor_room_in_group(row) : end;
        }
    }
    b.elements = map_round_up_(end - b.begin, unit);
    return b;
}

static int map_is_wte_(const TensorRow* row) { return row->member == offsetof(ModelParameters, wte); }

// True if the first and the last stage have the same matrix of the vocabulary.
static int map_has_two_wte_(const MapOf* of) { return of->pipeline > 1 && !of->whole.has_head; }

static TensorSet map_wte_bit_(const MapWalk_* w) {
    TensorSet bit = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        bit |= map_is_wte_(&w->rows[i]) ? tensor_bit(i) : 0;
    }
    return bit;
}

// Returns the bucket of an embedding's gradient apart; it may be empty.
static MapContent_ map_embedding_(const MapWalk_* w) {
    const int is_apart = map_has_two_wte_(w->of) && !freeze_has_classifier(&w->of->freeze, w->of->whole);
    return map_content_(w, 0, MAP_EMBEDDING, is_apart ? map_wte_bit_(w) : 0);
}

// Returns the trained or the frozen bucket of a group; it may be empty.
static MapContent_ map_bucket_of_(const MapWalk_* w, int g, MapKind kind) {
    const int is_below = g > 0 && g - 1 < w->first_block;
    return map_content_(w, g, is_below ? MAP_FROZEN : kind, kind == MAP_FROZEN ? w->frozen : ~w->frozen);
}

// Returns how many of some data ranks have the same parameters of group g, and divide them.
static int map_ranks_(const MapWalk_* w, int g, int ranks) { return g > 0 ? ranks / w->of->experts : ranks; }

// Returns part number `part` of a bucket that is cut into equal parts.
static MapSpan map_cut_(const MapContent_* b, int parts, int part) {
    const size_t count = b->elements / (size_t)parts;
    const MapSpan span = {0, (size_t)part * count, count};
    return span;
}

static MapSpan map_slice_(const MapWalk_* w, const MapContent_* b) {
    const int replica = w->of->replica, parts = map_ranks_(w, b->g, replica);
    return map_cut_(b, parts, w->data_rank % replica / (replica / parts));
}

static MapSpan map_shard_(const MapWalk_* w, const MapContent_* b) {
    const int parts = map_ranks_(w, b->g, w->of->data);
    return map_cut_(b, parts, map_shard_number(w->of, parts, w->data_rank / (w->of->data / parts)));
}

// Returns the interval of a bucket that a space has, without its start.
static MapSpan map_interval_(const MapWalk_* w, const MapContent_* b, MapSpace space) {
    const int has_gradient = b->kind != MAP_FROZEN, has_parameters = b->kind != MAP_EMBEDDING,
              is_gradient = MAP_GRADIENTS <= space && space <= MAP_REDUCED;
    const MapSpan none = {0, 0, 0}, all = {0, 0, b->elements};
    if (!(is_gradient ? has_gradient && w->of->trains : has_parameters)) {
        return none;
    }
    switch (space) {
    case MAP_KEPT:
        return w->of->ring_parameters > 0 ? map_slice_(w, b) : all;
    case MAP_SUMS:
        return map_slice_(w, b);
    case MAP_REDUCED:
        return map_shard_(w, b);
    case MAP_OWNED:
        return w->of->stage == 0 ? all : map_shard_(w, b);
    case MAP_PARAMETERS:
    case MAP_GRADIENTS:
    case MAP_SPACES:
        break;
    }
    return all;
}

static int map_copies_(const MapWalk_* w, const MapContent_* b) { return b->g > 0 ? w->of->experts : 1; }

// Sets where a bucket starts in a space.
static void map_place_(MapWalk_* w, const MapContent_* b, MapSpace space, MapSpan* span) {
    size_t* at = space == MAP_OWNED && b->kind == MAP_FROZEN ? &w->at_frozen : &w->at[space];
    span->begin = *at + (space == MAP_PARAMETERS ? b->begin : 0);
    *at +=
        space == MAP_PARAMETERS ? 0 : span->count * (space == MAP_GRADIENTS ? (size_t)map_copies_(w, b) : 1);
}

static Bucket map_bucket_(MapWalk_* w, const MapContent_* b) {
    Bucket bucket;
    memset(&bucket, 0, sizeof(bucket));
    bucket.layer = b->g > 0 ? model_group_layer(w->cfg, b->g) : -1;
    bucket.kind = b->kind;
    bucket.ranks = map_ranks_(w, b->g, w->of->data);
    bucket.copies = map_copies_(w, b);
    bucket.first = w->num_shards;
    bucket.begin = b->begin;
    bucket.elements = b->elements;
    for (int space = 0; space < MAP_SPACES; space++) {
        bucket.in[space] = map_interval_(w, b, (MapSpace)space);
        map_place_(w, b, (MapSpace)space, &bucket.in[space]);
    }
    if (w->of->data == 1 && w->of->stage < 2) {
        bucket.in[MAP_REDUCED] = bucket.in[MAP_GRADIENTS];
    }
    if (w->of->ring_parameters == 0) {
        bucket.in[MAP_KEPT] = bucket.in[MAP_PARAMETERS];
    }
    return bucket;
}

// ---- shards ----

// Sets the pieces of a tensor that consists of several matrices; a rank has equal rows of each.
static int map_pieces_of_matrices_(const MapWalk_* w, int i, MapPiece pieces[3]) {
    const TensorRow* row = &w->rows[i];
    const int is_heads = row->split == SPLIT_HEADS, count = is_heads ? 3 : model_gates(w->cfg);
    const size_t cols = row->rows == 1 ? 1 : row->cols, all = tensor_layer_elements(row);
    size_t logical = 0;
    for (int m = 0; m < count; m++) {
        const size_t heads = (size_t)(m > 0 ? model_keys(w->cfg) : model_heads(w->cfg)),
                     own = is_heads ? heads * cols : all / (size_t)count;
        const MapPiece piece = {0, own, logical + (size_t)w->tensor_rank * own, own, 0};
        pieces[m] = piece;
        logical += own * (size_t)w->of->tensor;
    }
    assert(logical == tensor_layer_elements(&w->whole[i]));
    return count;
}

// Sets the pieces of row i that a rank has, which are neighbors in the row, without the padding of
// the vocabulary; returns their number.
static int map_pieces_(const MapWalk_* w, int i, MapPiece pieces[3]) {
    const TensorRow* row = &w->rows[i];
    const size_t all = tensor_layer_elements(row), used = model_rows_of_part(row, w->cfg) * row->cols,
                 rank = (size_t)(row->split == SPLIT_EXPERTS ? w->cfg.part.expert_rank : w->tensor_rank);
    const int is_cut = row->split == SPLIT_EXPERTS || (w->of->tensor > 1 && row->split != SPLIT_NONE);
    const MapPiece whole = {0, used, 0, used, 0}, rows = {0, used, rank * all, used, 0},
                   cols = {0, used, rank * row->cols, row->cols, w->whole[i].cols};
    if (is_cut && (row->split == SPLIT_HEADS || row->split == SPLIT_ROWS)) {
        return map_pieces_of_matrices_(w, i, pieces);
    }
    pieces[0] = !is_cut ? whole : row->split == SPLIT_COLS ? cols : rows;
    return used > 0;
}

static unsigned map_flags_(const MapWalk_* w, int i, int layer, const Bucket* b) {
    const MapOf* of = w->of;
    const TensorRow* row = &w->rows[i];
    const int is_trained = b->kind == MAP_TRAINED, is_cut = row->split != SPLIT_NONE,
              is_once = is_cut || w->tensor_rank == 0,
              is_copy = b->kind == MAP_EMBEDDING ||
                        (map_is_wte_(row) && map_has_two_wte_(of) && !model_has_last(w->cfg)),
              is_first = of->stage > 0 || w->data_rank < of->data / b->ranks,
              is_frozen = b->kind == MAP_FROZEN || freeze_has(&w->freeze, i, layer < 0 ? 0 : layer),
              has_parts = !is_cut && of->tensor > 1 && row->kind != KIND_EMBEDDING;
    return (unsigned)((is_trained && has_parts ? SHARD_SUMS : 0) |
                      (is_trained && is_once ? SHARD_COUNTS : 0) |
                      (is_once && is_first && !is_copy ? SHARD_WRITES : 0) | (is_frozen ? SHARD_FROZEN : 0));
}

// Returns the elements of a slot that belong to `count` elements of a tensor.
static size_t map_slot_elements_(const MapWalk_* w, int slot, size_t count) {
    return w->of->shapes[slot] == SLOT_BLOCKS ? count / MAP_BLOCK : count;
}

// The tensor whose shards a walk takes: row i in a layer, in elements [begin, end) of its bucket,
// with all padding up to the next one.
typedef struct {
    int i, layer;
    size_t begin, end;
    unsigned flags;
} MapTensor_;

static size_t map_size_(size_t a, size_t b, int takes_larger) { return (a > b) == takes_larger ? a : b; }

// Returns the part of a tensor, with its padding, that this rank owns.
static MapSpan map_owned_(const Bucket* b, MapTensor_ t) {
    const MapSpan in = b->in[MAP_OWNED];
    const size_t from = map_size_(t.begin, in.from, 1), end = map_size_(t.end, in.from + in.count, 0);
    const MapSpan span = {0, from, from < end ? end - from : 0};
    return span;
}

// Sets where a shard starts in each slot.
static void map_set_slots_(const MapWalk_* w, const Bucket* b, MapTensor_ t, Shard* s) {
    const MapSpan own = map_owned_(b, t);
    const int is_owned = own.from <= s->offset && s->offset < own.from + own.count;
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const int has = b->kind == MAP_TRAINED && is_owned && w->of->slots[t.i] >> slot & 1;
        const size_t before = map_slot_elements_(w, slot, s->offset - own.from);
        s->slot[slot] = has ? w->slots[slot] + before : MAP_NONE;
    }
}

// Advances in the slots, past a tensor.
static void map_leave_slots_(MapWalk_* w, const Bucket* b, MapTensor_ t) {
    const size_t own = map_owned_(b, t).count;
    for (int slot = 0; slot < MAP_SLOTS && b->kind == MAP_TRAINED && own > 0; slot++) {
        w->slots[slot] += w->of->slots[t.i] >> slot & 1 ? map_slot_elements_(w, slot, own) : 0;
    }
}

// Returns the first end of an interval of a bucket after `at`, or `end` if that comes before.
static size_t map_next_cut_(const Bucket* b, size_t at, size_t end) {
    for (int space = 0; space < MAP_SPACES; space++) {
        const MapSpan in = b->in[space];
        end = at < in.from && in.from < end ? in.from : end;
        end = at < in.from + in.count && in.from + in.count < end ? in.from + in.count : end;
    }
    return end;
}

static void map_take_tensor_(MapWalk_* w, const Bucket* b, MapTensor_ t) {
    MapPiece pieces[3];
    const int count = map_pieces_(w, t.i, pieces);
    size_t begin = t.begin;
    for (int p = 0; p < count; p++) {
        const size_t end = begin + pieces[p].count;
        for (size_t at = begin; at < end;) {
            Shard s = {t.i, t.layer, w->num_buckets, t.flags, at, pieces[p], {0}};
            s.piece.first = at - begin;
            s.piece.count = map_next_cut_(b, at, end) - at;
            map_set_slots_(w, b, t, &s);
            w->take(w->context, b, &s);
            w->num_shards++;
            at += s.piece.count;
        }
        begin = end;
    }
    map_leave_slots_(w, b, t);
}

// Returns where the first tensor of a bucket from row i on begins there; its end if there is none.
static size_t map_tensor_begin_(const MapWalk_* w, const MapContent_* b, int i) {
    while (i < MODEL_PARAMETER_ROWS && !tensor_is_in(b->rows, i)) {
        i++;
    }
    return i < MODEL_PARAMETER_ROWS ? tensor_offset_in_group(&w->rows[i]) - b->begin : b->elements;
}

static void map_take_bucket_(MapWalk_* w, MapContent_ b) {
    const Bucket bucket = map_bucket_(w, &b);
    if (b.elements == 0) {
        return;
    }
    w->take(w->context, &bucket, NULL);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &w->rows[i];
        const int copies = tensor_is_in(b.rows, i) ? tensor_copies_in_group(row) : 0;
        size_t at = map_tensor_begin_(w, &b, i);
        for (int c = 0; c < copies; c++) {
            const int layer = b.g > 0 ? bucket.layer : row->in_block ? tensor_lowest_layer(row, c) : -1;
            const size_t next = c + 1 < copies ? at + tensor_room_in_group(row) / (size_t)copies
                                               : map_tensor_begin_(w, &b, i + 1);
            const MapTensor_ tensor = {i, layer, at, next, map_flags_(w, i, layer, &bucket)};
            map_take_tensor_(w, &bucket, tensor);
            at = next;
        }
    }
    w->num_buckets++;
}

// ---- the walk ----

// Adds up in advance what frozen buckets and rings need: the trained part of OWNED, and the largest
// layer of spaces that layers share.
static void map_measure_(MapWalk_* w) {
    for (int g = 0; g < model_groups(w->cfg); g++) {
        size_t layer[MAP_SPACES] = {0};
        for (int kind = MAP_TRAINED; kind <= MAP_FROZEN; kind++) {
            const MapContent_ b = map_bucket_of_(w, g, (MapKind)kind);
            layer[MAP_PARAMETERS] = map_size_(layer[MAP_PARAMETERS], b.begin + b.elements, 1);
            layer[MAP_GRADIENTS] += b.kind == MAP_TRAINED ? b.elements * (size_t)map_copies_(w, &b) : 0;
            w->at_frozen += b.kind == MAP_TRAINED ? map_interval_(w, &b, MAP_OWNED).count : 0;
        }
        for (int space = 0; space < MAP_SPACES && g > 0; space++) {
            w->ring[space] = map_size_(w->ring[space], layer[space], 1);
        }
    }
}

// Moves the spaces that layers share to the place of block k of the parameters; if k is the number
// of blocks, past all places.
static void map_enter_block_(MapWalk_* w, int k) {
    const int of[MAP_SPACES] = {
        [MAP_PARAMETERS] = w->of->ring_parameters, [MAP_GRADIENTS] = w->of->ring_gradients};
    for (int space = 0; space < MAP_SPACES; space++) {
        const int place = k < model_copies(w->cfg) ? k % (of[space] > 0 ? of[space] : 1) : of[space];
        if (of[space] > 0) {
            w->ring_begin[space] = k == 0 ? w->at[space] : w->ring_begin[space];
            w->at[space] = w->ring_begin[space] + (size_t)place * w->ring[space];
        }
    }
}

static MapWalk_ map_start_(const MapOf* of, int rank, MapTake take, void* context) {
    MapWalk_ w;
    memset((void*)&w, 0, sizeof(w));
    w.of = of;
    w.cfg = map_part(of, rank);
    w.freeze = freeze_of_part(&of->freeze, w.cfg);
    model_parameter_rows_of(w.whole, of->whole, 1);
    w.tensor_rank = rank % of->tensor;
    w.data_rank = map_data_rank_(of, rank);
    if (of->trains && of->stage < 3) {
        w.frozen = w.freeze.rows;
        w.first_block = freeze_first_copy(&w.freeze, w.cfg);
    }
    w.parameters = model_sharded_rows_of(w.rows, w.cfg, 1, of->trains ? of->data : 1, w.frozen);
    w.take = take;
    w.context = context;
    map_measure_(&w);
    return w;
}

// Walks through all buckets; afterwards `at` has the sizes of the arrays.
static void map_go_(MapWalk_* w) {
    for (int g = 0; g < model_groups(w->cfg); g++) {
        if (g < 2 || w->of->ring_parameters == 0) {
            w->at[MAP_PARAMETERS] = tensor_group_offset_bytes(w->rows, g);
        }
        if (g > 0) {
            map_enter_block_(w, g - 1);
        }
        map_take_bucket_(w, map_bucket_of_(w, g, MAP_TRAINED));
        map_take_bucket_(w, map_bucket_of_(w, g, MAP_FROZEN));
    }
    map_enter_block_(w, model_copies(w->cfg));
    if (w->of->ring_parameters == 0) {
        w->at[MAP_PARAMETERS] = w->at[MAP_KEPT] = w->parameters;
    }
    map_take_bucket_(w, map_embedding_(w));
    if (w->of->data == 1 && w->of->stage < 2) {
        w->at[MAP_REDUCED] = 0; // it is GRADIENTS
    }
}

void map_walk(const MapOf* of, int rank, MapTake take, void* context) {
    MapWalk_ w = map_start_(of, rank, take, context);
    map_go_(&w);
}

// Adds up the largest gradient in a size_t.
static void map_take_largest_(void* context, const Bucket* b, const Shard* s) {
    size_t* largest = (size_t*)context;
    const size_t elements = b->kind == MAP_FROZEN ? 0 : b->elements * (size_t)b->copies;
    *largest = !s && elements > *largest ? elements : *largest;
}

MapTotals map_totals(const MapOf* of, int rank) {
    MapTotals totals;
    memset(&totals, 0, sizeof(totals));
    MapWalk_ w = map_start_(of, rank, map_take_largest_, &totals.largest_gradient);
    map_go_(&w);
    memcpy(totals.elements, w.at, sizeof(w.at));
    totals.updated = w.at[MAP_OWNED];
    totals.elements[MAP_OWNED] = w.at_frozen;
    memcpy(totals.slots, w.slots, sizeof(w.slots));
    totals.first_block = w.first_block;
    totals.frozen = w.frozen;
    totals.buckets = w.num_buckets;
    totals.shards = w.num_shards;
    return totals;
}

#endif // MAP_WALK_IMPLEMENTATION

#endif
