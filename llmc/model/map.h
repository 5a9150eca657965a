/*
map.h -- the map of a rank: its buckets and shards (map_walk.h), and how to find them.
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
    MapOf of;
    int rank;
    ModelConfig cfg;                                                   // the rank's part
    TensorRow rows[MODEL_PARAMETER_ROWS], whole[MODEL_PARAMETER_ROWS]; // of the part, of the model
    MapTotals totals;
    int num_buckets, num_shards;
    Bucket* buckets; // NULL in a dry run; so are the next ones
    Shard* shards;
    int* find;     // (rows, blocks of parameters) the first shard of a tensor, -1: none
    int* of_group; // (groups + 2) the first bucket of a group of parameters (model.h)
} Map;

// Makes the map of a rank, in memory of the host; in a dry ledger only its sizes.
void map_open(Map* m, Memory* memory, MemoryPlace place, const MapOf* of, int rank);

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

// Return the buckets of group g of the parameters (model.h), and of layer l; after all groups, the
// bucket of an embedding's gradient apart.
static inline MapBuckets map_group(const Map* m, int g) {
    const MapBuckets buckets = {m->of_group[g], m->of_group[g + 1]};
    return buckets;
}
static inline MapBuckets map_buckets(const Map* m, int l) {
    return map_group(m, l < 0 ? 0 : 1 + model_copy(m->cfg, l));
}

// Returns the elements of group g, up to the end of its last bucket.
static inline size_t map_group_elements(const Map* m, int g) {
    size_t elements = 0;
    for (int i = map_group(m, g).first; i < map_group(m, g).end; i++) {
        const size_t end = m->buckets[i].begin + m->buckets[i].elements;
        elements = end > elements ? end : elements;
    }
    return elements;
}

// Sets the next elements of a bucket of gradients that a backward pass does not set, from *from on:
// of frozen tensors, and behind others. Returns 0 after the last. If all layers have the same
// tensors and none is frozen, there are none that another layer sets.
int map_next_unset(const Map* m, const Bucket* b, size_t* from, MapSpan* unset);

// Returns the bucket of group g that is trained, or NULL.
static inline const Bucket* map_trained(const Map* m, int g) {
    for (int i = map_group(m, g).first; i < map_group(m, g).end; i++) {
        if (m->buckets[i].kind != MAP_FROZEN) {
            return &m->buckets[i];
        }
    }
    return NULL;
}

// Returns the bucket of an embedding's gradient apart, or NULL.
static inline const Bucket* map_embedding(const Map* m) { return map_trained(m, model_groups(m->cfg)); }

// Elements of a tensor that lie one after the other in a space.
typedef struct {
    const Shard* shard;   // the first shard in the space; they may begin behind its first element
    size_t before, count; // elements of the rank's tensor before them; their number
    int next;             // number of the shard after them
} MapRange;

// Sets the next range of a bucket that a space has; start with zeros. Returns 0 after the last.
int map_next_range(const Map* m, const Bucket* b, MapSpace space, MapRange* range);

// Returns all elements of a tensor of layer l that a space has; none if the count is 0.
MapRange map_range(const Map* m, int tensor, int l, MapSpace space);

// Returns the elements of a range that are also among elements begin ... begin + count - 1 of the
// rank's tensor.
MapRange map_part_of_range(MapRange range, size_t begin, size_t count);

// Returns how many elements at the start of its first shard a range leaves out.
static inline size_t map_range_skips(const Map* m, const MapRange* range) {
    const Shard* s = range->shard;
    return range->before - (s->offset - map_find(m, s->tensor, s->layer)->offset);
}

// Returns where a range begins in a space that has it.
static inline size_t map_range_at(const Map* m, const MapRange* range, MapSpace space) {
    return map_at(m, range->shard, space) + map_range_skips(m, range);
}

// Returns pointers to the tensors of layer l and to those outside of blocks, in the memory of a
// space with elements of `bytes`; NULL: not there.
ModelParameters map_bind(const Map* m, MapSpace space, void* memory, size_t bytes, int l);

// Sets the rows of the parameters as PARAMETERS has them if no layers take turns, and returns the
// bytes of all.
static inline size_t map_parameter_rows(const Map* m, TensorRow rows[MODEL_PARAMETER_ROWS],
                                        size_t element_bytes) {
    return model_sharded_rows_of(rows, m->cfg, element_bytes, m->of.trains ? m->of.data : 1,
                                 m->totals.frozen);
}

// Sets the next interval of a rank's reduced gradient that counts in its norm, in whole units, from
// shard i on. Returns the shard after it; 0: there is none.
int map_counted(const Map* m, int i, MapSpan* span);

// Returns the space of the gradient of elements that a rank updates.
static inline MapSpace map_update_space(const Map* m) {
    return m->of.stage == 0 ? MAP_GRADIENTS : MAP_REDUCED;
}

// True if each rank updates only a part of each bucket.
static inline int map_is_divided(const Map* m) { return m->of.stage > 0 && m->of.data > 1; }

// Return how many ranks divide the update of a bucket, and this one's number among them.
static inline int map_owners(const Map* m, const Bucket* b) { return map_is_divided(m) ? b->ranks : 1; }
static inline int map_owner(const Map* m, const Bucket* b) {
    return map_is_divided(m) ? map_place(&m->of, m->rank).data / (m->of.data / b->ranks) : 0;
}

// Returns the first element of a bucket that number d of them updates; each has as many.
static inline size_t map_owned_from(const Map* m, const Bucket* b, int d) {
    return map_is_divided(m) ? (size_t)map_shard_number(&m->of, b->ranks, d) * b->in[MAP_OWNED].count : 0;
}

// ---- pieces ----

// Common elements of two pieces of the same tensor of a layer: `count` of them, from element in_a
// of one piece and in_b of the other on.
typedef struct {
    size_t in_a, in_b, count;
} MapMeet;

// Sets the next common elements that are consecutive in the tensor; start with zeros. Returns 0
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

// ---- the map ----

// Stores a bucket or a shard.
static void map_take_stored_(void* context, const Bucket* b, const Shard* s) {
    Map* m = (Map*)context;
    if (!s) {
        const int groups = model_groups(m->cfg), g = b->kind == MAP_EMBEDDING ? groups
                                                     : b->layer < 0           ? 0
                                                                    : 1 + model_copy(m->cfg, b->layer);
        m->buckets[m->num_buckets++] = *b;
        for (int next = g + 1; next < groups + 2; next++) {
            m->of_group[next] = m->num_buckets;
        }
        return;
    }
    int* find = &m->find[map_number_(m, s->tensor, s->layer)];
    *find = *find < 0 ? m->num_shards : *find;
    m->buckets[m->num_buckets - 1].count++;
    m->shards[m->num_shards++] = *s;
}

void map_open(Map* m, Memory* memory, MemoryPlace place, const MapOf* of, int rank) {
    memset((void*)m, 0, sizeof(*m));
    m->of = *of;
    m->rank = rank;
    m->cfg = map_part(of, rank);
    model_parameter_rows_of(m->rows, m->cfg, 1);
    model_parameter_rows_of(m->whole, of->whole, 1);
    m->totals = map_totals(of, rank);
    const char* kind = "scratch: map of the parameters";
    const size_t found = (size_t)(MODEL_PARAMETER_ROWS * model_copies(m->cfg)) * sizeof(int);
    m->buckets = (Bucket*)memory_take(memory, kind, place, (size_t)m->totals.buckets * sizeof(Bucket));
    m->shards = (Shard*)memory_take(memory, kind, place, (size_t)m->totals.shards * sizeof(Shard));
    m->find = (int*)memory_take(memory, kind, place, found);
    m->of_group = (int*)memory_take(memory, kind, place, (size_t)(model_groups(m->cfg) + 2) * sizeof(int));
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

// Returns the shards i, i + 1, ... below `end` that belong to one tensor and that a space has.
static MapRange map_range_from_(const Map* m, int i, int end, MapSpace space) {
    const Shard* s = &m->shards[i];
    MapRange range = {s, s->offset - map_find(m, s->tensor, s->layer)->offset, 0, i};
    for (; range.next < end; range.next++) {
        const Shard* next = &m->shards[range.next];
        if (next->tensor != s->tensor || next->layer != s->layer || !map_has(m, next, space)) {
            break;
        }
        range.count += next->piece.count;
    }
    return range;
}

int map_next_range(const Map* m, const Bucket* b, MapSpace space, MapRange* range) {
    const int end = b->first + b->count;
    int i = range->shard ? range->next : b->first;
    while (i < end && !map_has(m, &m->shards[i], space)) {
        i++;
    }
    if (i < end) {
        *range = map_range_from_(m, i, end, space);
    }
    return i < end;
}

MapRange map_range(const Map* m, int tensor, int l, MapSpace space) {
    const MapRange none = {NULL, 0, 0, 0};
    const Shard* s = map_find(m, tensor, l);
    if (!s) {
        return none;
    }
    const Bucket* b = &m->buckets[s->bucket];
    const int end = b->first + b->count;
    int i = (int)(s - m->shards);
    while (i < end && m->shards[i].tensor == s->tensor && m->shards[i].layer == s->layer &&
           !map_has(m, &m->shards[i], space)) {
        i++;
    }
    const int has_any = i < end && m->shards[i].tensor == s->tensor && m->shards[i].layer == s->layer;
    return has_any ? map_range_from_(m, i, end, space) : none;
}

MapRange map_part_of_range(MapRange range, size_t begin, size_t count) {
    const size_t end = begin + count, last = range.before + range.count,
                 from = begin > range.before ? begin : range.before, to = end < last ? end : last;
    range.before = from;
    range.count = from < to ? to - from : 0;
    return range;
}

static int map_may_be_unset_(const Map* m, const Bucket* b) {
    int may = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        may |= m->rows[i].is_partial;
    }
    for (int i = 0; i < b->count; i++) {
        may |= (m->shards[b->first + i].flags & SHARD_FROZEN) != 0;
    }
    return may;
}

int map_next_unset(const Map* m, const Bucket* b, size_t* from, MapSpan* unset) {
    size_t begin = *from, end = b->elements;
    for (int i = 0; i < b->count; i++) {
        const Shard* s = &m->shards[b->first + i];
        const size_t next = s->offset + s->piece.count;
        if (s->flags & SHARD_FROZEN || next <= begin) {
            continue;
        }
        if (begin < s->offset) {
            end = s->offset;
            break;
        }
        begin = next;
    }
    *from = end;
    unset->from = begin;
    unset->count = end - begin;
    unset->begin = b->in[MAP_GRADIENTS].begin + begin;
    return begin < end && map_may_be_unset_(m, b);
}

int map_counted(const Map* m, int i, MapSpan* span) {
    size_t end = 0;
    span->begin = span->from = span->count = 0;
    for (; i < m->num_shards; i++) {
        const Shard* s = &m->shards[i];
        const size_t at = map_at(m, s, MAP_REDUCED);
        const int counts = (s->flags & SHARD_COUNTS) != 0;
        if (at == MAP_NONE || (end == 0 && !counts)) {
            continue;
        }
        if (!counts || at < end) {
            break;
        }
        // a tensor or its part in the interval starts at a unit; what lies between two is padding
        span->begin = end == 0 ? at : span->begin;
        end = at + s->piece.count;
        span->count = (end - span->begin + TENSOR_SHARD_UNIT - 1) / TENSOR_SHARD_UNIT * TENSOR_SHARD_UNIT;
    }
    return end > 0 ? i : 0;
}

// ---- pieces ----

// Consecutive elements of a tensor: [begin, end).
typedef struct {
    size_t begin, end;
} MapRun_;

// Returns the consecutive elements from element i of a piece on.
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
    fprintf(file,
            "map of rank %d: of each tensor the elements first+count of this rank's piece, in the tensor "
            "start/run/stride, and where they begin in each array\n",
            m->rank);
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
