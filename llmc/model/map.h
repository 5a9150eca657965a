/*
map.h -- the map of a rank: its buckets, shards and matrices (map_walk.h), and how to find them.

A matrix is what a rule of the optimizer updates as a whole, if it does not update each element by
itself: a tensor, or each of its matrices. It has one owner among the ranks that have parts of it,
the tensor ranks included, who keeps its state. The largest matrices are dealt first, each to the
owner with the least work so far. All these ranks have the same list, in the order of buckets.
*/
#ifndef LLMC_MAP_H
#define LLMC_MAP_H

#include <stddef.h>
#include <stdio.h>

#include "llmc/base/memory.h"
#include "llmc/model/map_walk.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int tensor, layer, bucket;
    int owner;                // data rank * tensor ranks + tensor rank
    size_t first, rows, cols; // of the whole tensor: number of its first element
    size_t at[MAP_SLOTS];     // in the owner: begin of its state in the array of each slot; or MAP_NONE
} MapMatrix;

typedef struct {
    MapOf of;
    int rank;
    ModelConfig cfg;                                                   // the rank's part
    TensorRow rows[MODEL_PARAMETER_ROWS], whole[MODEL_PARAMETER_ROWS]; // of the part, of the model
    MapTotals totals;
    int num_buckets, num_shards, num_matrices;
    Bucket* buckets; // NULL in a dry run; so are the next ones
    Shard* shards;
    MapMatrix* matrices;
    int* find;     // (rows, blocks of parameters) the first shard of a tensor, -1: none
    int* of_group; // (groups + 1) the first bucket of a group of parameters (model.h)
} Map;

// Makes the map of a rank; in a dry ledger only its sizes.
void map_open(Map* m, Memory* memory, const MapOf* of, int rank);

// ---- look-ups ----

// Returns where a shard begins in a space, or MAP_NONE.
static inline size_t map_at(const Map* m, const Shard* s, MapSpace space) {
    const MapSpan in = m->buckets[s->bucket].in[space];
    return in.from <= s->offset && s->offset < in.from + in.count ? in.begin + (s->offset - in.from)
                                                                  : MAP_NONE;
}

static inline int map_has(const Map* m, const Shard* s, MapSpace space) {
    return map_at(m, s, space) != MAP_NONE;
}

// Returns the place of a tensor of layer l in Map.find.
static inline int map_number_(const Map* m, int tensor, int l) {
    const int k = m->rows[tensor].in_block && l >= 0 ? model_copy(m->cfg, l) : 0;
    return tensor * model_copies(m->cfg) + k;
}

// Returns the first shard of a tensor of layer l, which matters for tensors of blocks only; NULL:
// the rank does not have it. The others come next.
const Shard* map_find(const Map* m, int tensor, int l);

// Buckets first ... end - 1.
typedef struct {
    int first, end;
} MapBuckets;

// Returns the buckets of layer l; of what is outside of the blocks with -1.
static inline MapBuckets map_buckets(const Map* m, int l) {
    const int g = l < 0 ? 0 : 1 + model_copy(m->cfg, l);
    const MapBuckets buckets = {m->of_group[g], m->of_group[g + 1]};
    return buckets;
}

// Returns the bucket of an embedding's gradient apart, or NULL.
static inline const Bucket* map_embedding(const Map* m) {
    const Bucket* last = &m->buckets[m->num_buckets - 1];
    return last->kind == MAP_EMBEDDING ? last : NULL;
}

// Returns the pointers of layer l, and of what is outside of the blocks, into the memory of a space
// with elements of `bytes`; NULL: not there.
ModelParameters map_bind(const Map* m, MapSpace space, void* memory, size_t bytes, int l);

// Returns the space of the gradient of elements that a rank updates.
static inline MapSpace map_update_space(const Map* m) {
    return m->of.stage == 0 ? MAP_GRADIENTS : MAP_REDUCED;
}

// True if each rank updates only a part of each bucket.
static inline int map_is_divided(const Map* m) { return m->of.stage > 0 && m->of.data > 1; }

// ---- pieces ----

// Common elements of two pieces of the same tensor of a layer: `count` from element in_a and in_b
// on, counted from the first ones.
typedef struct {
    size_t in_a, in_b, count;
} MapMeet;

// Sets the next common elements, which are neighbors in the tensor; start with zeros. Returns 0
// after the last.
int map_meet(const MapPiece* a, const MapPiece* b, MapMeet* meet);

// Prints the buckets and shards of a rank, a line for each.
void map_print(FILE* file, const Map* m);

#ifdef __cplusplus
}
#endif

#ifdef MAP_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

// ---- matrices ----

// Lists the matrices of a walk.
typedef struct {
    const Map* m;
    MapMatrix* matrices; // NULL: they are counted only
    int count, bucket;
    int tensor, layer; // the last one
} MapLister_;

// Adds the matrices of a tensor, or it as a whole.
static void map_list_tensor_(MapLister_* list, int i, int layer) {
    const Map* m = list->m;
    const TensorRow *row = &m->rows[i], *whole = &m->whole[i];
    const int is_expert = row->split == SPLIT_EXPERTS, is_tensor = m->of.units[i] == UNIT_TENSOR;
    // experts are matrices of their own in the part, too; all others are matrices of the whole
    const TensorRow* in = is_expert ? row : whole;
    const size_t begin = is_expert ? (size_t)m->cfg.part.expert_rank * tensor_layer_elements(row) : 0;
    for (int k = 0; k < (is_tensor ? 1 : tensor_matrices(in)); k++) {
        const TensorRun run = tensor_matrix(in, k);
        const MapMatrix matrix = {i,
                                  layer,
                                  list->bucket,
                                  0,
                                  begin + (is_tensor ? 0 : run.first * in->cols),
                                  is_tensor ? model_rows_in_files(in, m->of.whole) : run.rows,
                                  in->cols,
                                  {0}};
        if (list->matrices) {
            list->matrices[list->count] = matrix;
        }
        list->count++;
    }
}

// Lists the matrices of a tensor when its first shard comes.
static void map_take_matrices_(void* context, const Bucket* b, const Shard* s) {
    MapLister_* list = (MapLister_*)context;
    const int is_bucket = s == NULL, is_updated = !is_bucket && b->kind == MAP_TRAINED &&
                                                  list->m->of.units[s->tensor] != UNIT_ELEMENTS &&
                                                  !(s->flags & SHARD_FROZEN);
    list->bucket += is_bucket;
    if (is_updated && (s->tensor != list->tensor || s->layer != list->layer)) {
        list->tensor = s->tensor;
        list->layer = s->layer;
        map_list_tensor_(list, s->tensor, s->layer);
    }
}

// Returns what the update of a matrix costs, in some unit.
static double map_cost_(const Map* m, const MapMatrix* matrix) {
    const double rows = (double)matrix->rows, cols = (double)matrix->cols, side = rows < cols ? rows : cols;
    return rows * cols * (m->of.units[matrix->tensor] == UNIT_MATRICES ? side : 1);
}

// A matrix before it has an owner.
typedef struct {
    int number, is_divided; // true if only some data ranks have it
    double cost;
} MapDealt_;

// Orders matrices of all data ranks first, then by cost, then by number.
static int map_compare_(const void* a, const void* b) {
    const MapDealt_ *x = (const MapDealt_*)a, *y = (const MapDealt_*)b;
    return x->is_divided != y->is_divided ? x->is_divided - y->is_divided
           : x->cost != y->cost           ? (x->cost < y->cost ? 1 : -1)
                                          : x->number - y->number;
}

// Returns the owner with the least work among the data ranks first, first + step, ... and their
// tensor ranks.
static int map_least_(const Map* m, const double* loads, int first, int end, int step) {
    const int t = m->of.tensor;
    int least = first * t;
    for (int d = first; d < end; d += step) {
        for (int j = 0; j < t; j++) {
            least = loads[d * t + j] < loads[least] ? d * t + j : least;
        }
    }
    return least;
}

// Deals the matrices to owners.
static void map_deal_(const Map* m, MapMatrix* matrices, int count) {
    const int t = m->of.tensor, W = m->of.data, e = m->of.experts, own = m->rank / t % W;
    MapDealt_* order = (MapDealt_*)check_alloc((size_t)count, sizeof(MapDealt_), "matrices");
    double* loads = (double*)check_alloc((size_t)(W * t), sizeof(double), "loads of owners");
    for (int i = 0; i < count; i++) {
        const MapDealt_ dealt = {i, e > 1 && m->rows[matrices[i].tensor].split == SPLIT_EXPERTS,
                                 map_cost_(m, &matrices[i])};
        order[i] = dealt;
    }
    qsort(order, (size_t)count, sizeof(MapDealt_), map_compare_);
    for (int i = 0; i < count; i++) {
        // in stage 0 every data rank updates all that it has
        const int step = order[i].is_divided ? e : 1, first = m->of.stage == 0 ? own : own % step,
                  end = m->of.stage == 0 ? own + 1 : W, owner = map_least_(m, loads, first, end, step);
        matrices[order[i].number].owner = owner;
        loads[owner] += order[i].cost;
    }
    free(order);
    free(loads);
}

// Sets the places of the state of matrices that this rank owns, behind that of shards.
static void map_set_state_(Map* m, MapMatrix* matrices, int count) {
    const int self = m->rank % (m->of.tensor * m->of.data);
    for (int i = 0; i < count; i++) {
        for (int slot = 0; slot < MAP_SLOTS; slot++) {
            const int has = matrices[i].owner == self && m->of.matrix_slots[matrices[i].tensor] >> slot & 1;
            const size_t elements = map_slot_of_matrix(&m->of, slot, matrices[i].rows, matrices[i].cols),
                         room = (elements + TENSOR_ALIGN - 1) / TENSOR_ALIGN * TENSOR_ALIGN;
            matrices[i].at[slot] = has && elements > 0 ? m->totals.slots[slot] : MAP_NONE;
            m->totals.slots[slot] += has ? room : 0;
        }
    }
}

// Lists the matrices and deals them out; a dry ledger counts their state only.
static void map_open_matrices_(Map* m, Memory* memory) {
    MapLister_ list = {m, NULL, 0, -1, -1, -1};
    map_walk(&m->of, m->rank, map_take_matrices_, &list);
    const size_t bytes = (size_t)list.count * sizeof(MapMatrix);
    MapMatrix* all = (MapMatrix*)check_alloc(bytes, 1, "matrices");
    MapLister_ filled = {m, all, 0, -1, -1, -1};
    map_walk(&m->of, m->rank, map_take_matrices_, &filled);
    map_deal_(m, all, list.count);
    map_set_state_(m, all, list.count);
    m->matrices = (MapMatrix*)memory_take(memory, "scratch: map of the parameters", MEMORY_HOST, bytes);
    if (m->matrices) {
        m->num_matrices = list.count;
        memcpy(m->matrices, all, bytes);
    }
    free(all);
}

// ---- the map ----

// Stores a bucket or a shard.
static void map_take_stored_(void* context, const Bucket* b, const Shard* s) {
    Map* m = (Map*)context;
    if (!s) {
        const int k = b->layer < 0 ? 0 : 1 + model_copy(m->cfg, b->layer);
        m->buckets[m->num_buckets++] = *b;
        for (int next = k + 1; b->kind != MAP_EMBEDDING && next <= model_groups(m->cfg); next++) {
            m->of_group[next] = m->num_buckets;
        }
        return;
    }
    int* find = &m->find[map_number_(m, s->tensor, s->layer)];
    *find = *find < 0 ? m->num_shards : *find;
    m->buckets[m->num_buckets - 1].count++;
    m->shards[m->num_shards++] = *s;
}

void map_open(Map* m, Memory* memory, const MapOf* of, int rank) {
    memset((void*)m, 0, sizeof(*m));
    m->of = *of;
    m->rank = rank;
    m->cfg = map_part(of, rank);
    model_parameter_rows_of(m->rows, m->cfg, 1);
    model_parameter_rows_of(m->whole, of->whole, 1);
    m->totals = map_totals(of, rank);
    const char* kind = "scratch: map of the parameters";
    const size_t found = (size_t)(MODEL_PARAMETER_ROWS * model_copies(m->cfg)) * sizeof(int);
    m->buckets = (Bucket*)memory_take(memory, kind, MEMORY_HOST, (size_t)m->totals.buckets * sizeof(Bucket));
    m->shards = (Shard*)memory_take(memory, kind, MEMORY_HOST, (size_t)m->totals.shards * sizeof(Shard));
    m->find = (int*)memory_take(memory, kind, MEMORY_HOST, found);
    m->of_group =
        (int*)memory_take(memory, kind, MEMORY_HOST, (size_t)(model_groups(m->cfg) + 1) * sizeof(int));
    map_open_matrices_(m, memory);
    if (!memory_is_dry(memory)) {
        memset(m->find, -1, found);
        map_walk(of, rank, map_take_stored_, m);
    }
}

const Shard* map_find(const Map* m, int tensor, int l) {
    const int at = m->find[map_number_(m, tensor, l)];
    return at < 0 ? NULL : &m->shards[at];
}

ModelParameters map_bind(const Map* m, MapSpace space, void* memory, size_t bytes, int l) {
    ModelParameters pointers;
    memset(&pointers, 0, sizeof(pointers));
    for (int i = 0; i < MODEL_PARAMETER_ROWS && memory; i++) {
        const Shard* s = map_find(m, i, l);
        const int has_place =
            s && map_has(m, s, space) && !(space == MAP_GRADIENTS && s->flags & SHARD_FROZEN);
        if (has_place) {
            const char* tensor = (char*)memory + map_at(m, s, space) * bytes;
            memcpy((char*)&pointers + m->rows[i].member, &tensor, sizeof(tensor));
        }
    }
    return pointers;
}

// ---- pieces ----

// Neighbors in a tensor: elements [begin, end) of it.
typedef struct {
    size_t begin, end;
} MapRun_;

// Returns the neighbors from element i of a piece on.
static MapRun_ map_run_(const MapPiece* p, size_t i) {
    const size_t e = p->first + i, left = p->run - e % p->run,
                 count = left < p->count - i ? left : p->count - i,
                 begin = p->logical + e / p->run * p->stride + e % p->run;
    const MapRun_ run = {begin, begin + count};
    return run;
}

int map_meet(const MapPiece* a, const MapPiece* b, MapMeet* meet) {
    size_t i = meet->in_a + meet->count, k = meet->in_b + meet->count;
    while (i < a->count && k < b->count) {
        const MapRun_ x = map_run_(a, i), y = map_run_(b, k);
        if (x.end <= y.begin) {
            i += x.end - x.begin;
        } else if (y.end <= x.begin) {
            k += y.end - y.begin;
        } else {
            const size_t begin = x.begin > y.begin ? x.begin : y.begin, end = x.end < y.end ? x.end : y.end;
            const MapMeet common = {i + (begin - x.begin), k + (begin - y.begin), end - begin};
            *meet = common;
            return 1;
        }
    }
    return 0;
}

static const char* map_kind_word_(MapKind kind) {
    static const char* const words[] = {"trained", "frozen", "gradient of the embedding"};
    return words[kind];
}

void map_print(FILE* file, const Map* m) {
    static const char* const spaces[] = {"parameters", "kept", "gradients", "sums", "reduced", "owned"};
    for (int i = 0; i < m->num_shards; i++) {
        const Shard* s = &m->shards[i];
        const Bucket* b = &m->buckets[s->bucket];
        if (b->first == i) {
            fprintf(file, "bucket %d: layer %d, %s, %zu elements\n", s->bucket, b->layer,
                    map_kind_word_(b->kind), b->elements);
        }
        fprintf(file, "  %s %zu+%zu@%zu/%zu/%zu:", m->rows[s->tensor].name, s->piece.first, s->piece.count,
                s->piece.logical, s->piece.run, s->piece.stride);
        for (int space = 0; space < MAP_SPACES; space++) {
            if (map_has(m, s, (MapSpace)space)) {
                fprintf(file, " %s %zu", spaces[space], map_at(m, s, (MapSpace)space));
            }
        }
        fprintf(file, "\n");
    }
}

#endif // MAP_IMPLEMENTATION

#endif
