// The map of elements: on random models and grids every element is where it must be, once, seen
// from all ranks.
#include "dev/test/lib/map_test.h"
#include "dev/test/lib/test.h"
#include "llmc/model/map.h"

// Sets slots as an optimizer might. The pieces of tensor ranks need not be multiples of MAP_BLOCK:
// such runs do not keep state in blocks.
static void random_slots(Rand* random, MapOf* of) {
    static const SlotShape shapes[] = {SLOT_ELEMENTS, SLOT_BLOCKS, SLOT_ELEMENTS};
    for (int slot = 0; slot < 3; slot++) {
        of->shapes[slot] = shapes[slot];
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        of->slots[i] = tensor_is_in(of->freeze.rows, i)
                           ? 0
                           : (unsigned)map_test_below(random, 8) & (of->tensor > 1 ? 5u : 7u);
    }
}

// ---- one rank ----

static int is_inside(MapSpan in, const Shard* s) {
    return in.count > 0 && in.from <= s->offset && s->offset + s->piece.count <= in.from + in.count;
}

static int is_outside(MapSpan in, const Shard* s) {
    return in.count == 0 || s->offset + s->piece.count <= in.from || in.from + in.count <= s->offset;
}

// Shards are in order and disjoint, begin a tensor at a multiple of the unit, and spaces have all
// of one or nothing.
static void check_order(const Map* m) {
    size_t end = 0;
    for (int i = 0; i < m->num_shards; i++) {
        const Shard* s = &m->shards[i];
        const Bucket* b = &m->buckets[s->bucket];
        end = i == b->first ? 0 : end;
        EXPECT(b->first <= i && i < b->first + b->count, "shard %d is in its bucket", i);
        EXPECT(s->piece.count > 0 && end <= s->offset, "shard %d is behind the one before", i);
        end = s->offset + s->piece.count;
        EXPECT(end <= b->elements, "shard %d ends in its bucket", i);
        for (int space = 0; space < MAP_SPACES; space++) {
            EXPECT(is_inside(b->in[space], s) || is_outside(b->in[space], s), "shard %d, space %d", i, space);
            EXPECT(map_has(m, s, (MapSpace)space) == is_inside(b->in[space], s), "shard %d, space %d", i,
                   space);
        }
        if (map_find(m, s->tensor, s->layer) == s && b->kind != MAP_EMBEDDING) {
            EXPECT(s->offset % TENSOR_SHARD_UNIT == 0, "%s begins at %zu", m->rows[s->tensor].name,
                   s->offset);
        }
    }
}

static size_t copies_in(const Bucket* b, MapSpace space) {
    return space == MAP_GRADIENTS ? (size_t)b->copies : 1;
}

// True if two buckets do not overlap in a space, or are of layers that take turns in it.
static int is_apart(const Map* m, MapSpace space, const Bucket* a, const Bucket* b) {
    const int is_gradient =
                  space == MAP_GRADIENTS || (space == MAP_REDUCED && m->totals.elements[space] == 0),
              ring = space == MAP_PARAMETERS || (space == MAP_KEPT && m->of.ring_parameters == 0)
                         ? m->of.ring_parameters
                     : is_gradient ? m->of.ring_gradients
                                   : 0;
    const MapSpan x = a->in[space], y = b->in[space];
    const size_t x_end = x.begin + copies_in(a, space) * x.count,
                 y_end = y.begin + copies_in(b, space) * y.count;
    const int takes_turns = ring > 0 && a->layer >= 0 && b->layer >= 0 && a->layer != b->layer &&
                            model_copy(m->cfg, a->layer) % ring == model_copy(m->cfg, b->layer) % ring;
    return x.count == 0 || y.count == 0 || x_end <= y.begin || y_end <= x.begin || takes_turns;
}

// Spans and buckets are multiples of the unit, lie inside of their space, and do not overlap but
// where layers take turns.
static void check_spaces(const Map* m) {
    for (int space = 0; space < MAP_SPACES; space++) {
        const size_t all = m->totals.elements[space];
        for (int i = 0; i < m->num_buckets; i++) {
            const Bucket* b = &m->buckets[i];
            const MapSpan in = b->in[space];
            const size_t copies = copies_in(b, (MapSpace)space);
            const int is_alias = space == MAP_REDUCED && all == 0;
            EXPECT((in.begin | in.from | in.count) % TENSOR_SHARD_UNIT == 0, "bucket %d, space %d", i, space);
            EXPECT(in.count == 0 || is_alias || in.begin + copies * in.count <= all, "bucket %d, space %d", i,
                   space);
            for (int k = 0; k < i; k++) {
                EXPECT(is_apart(m, (MapSpace)space, &m->buckets[k], b), "buckets %d and %d, space %d", k, i,
                       space);
            }
        }
    }
}

// Every element of a slot belongs to one shard at most, in an array of the size that was counted.
static void check_slots(const Map* m) {
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const size_t per = m->of.shapes[slot] == SLOT_BLOCKS ? MAP_BLOCK : 1;
        size_t end = 0;
        for (int i = 0; i < m->num_shards; i++) {
            const Shard* s = &m->shards[i];
            const int has = m->of.slots[s->tensor] >> slot & 1 && map_has(m, s, MAP_OWNED) &&
                            m->buckets[s->bucket].kind == MAP_TRAINED;
            EXPECT((s->slot[slot] != MAP_NONE) == has, "shard %d, slot %d", i, slot);
            if (has) {
                EXPECT(end <= s->slot[slot], "shard %d, slot %d", i, slot);
                end = s->slot[slot] + (s->piece.count + per - 1) / per;
            }
        }
        EXPECT(end <= m->totals.slots[slot], "slot %d of %zu", slot, m->totals.slots[slot]);
    }
}

// The pointers of a layer are the places of its tensors.
static void check_bind(const Map* m) {
    static char memory[1];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const size_t all = map_parameter_rows(m, rows, 1);
    EXPECT(m->of.ring_parameters > 0 || all == m->totals.elements[MAP_PARAMETERS], "%zu parameters", all);
    for (int l = 0; l < m->cfg.L; l++) {
        const ModelParameters p = map_bind(m, MAP_PARAMETERS, memory, 1, l);
        for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
            char* at;
            memcpy(&at, (const char*)&p + m->rows[i].member, sizeof(at));
            const Shard* s = map_find(m, i, l);
            const int has = !tensor_is_absent(&m->rows[i]) && tensor_has_layer(&m->rows[i], l);
            EXPECT((s != NULL) == has, "%s of layer %d", m->rows[i].name, l);
            EXPECT(s ? at == memory + map_at(m, s, MAP_PARAMETERS) : at == NULL, "%s of layer %d",
                   m->rows[i].name, l);
            EXPECT(!s || s->piece.first == 0, "%s of layer %d", m->rows[i].name, l);
            EXPECT(!s || m->of.ring_parameters > 0 ||
                       at == (char*)tensor_at_layer(&rows[i], memory, tensor_copy(&rows[i], l)),
                   "the row of %s in layer %d", m->rows[i].name, l);
        }
    }
}

// ---- ranges ----

// Where the elements of a tensor of a layer are in a space; MAP_NONE: nowhere.
typedef struct {
    size_t elements, *at;
} Places;

static Places places_of(const Map* m, Memory* memory, const Shard* first, MapSpace space) {
    const size_t elements = tensor_layer_elements(&m->rows[first->tensor]);
    const Places p = {elements,
                      (size_t*)memory_take(memory, "places", MEMORY_HOST, elements * sizeof(size_t))};
    memset(p.at, 0xFF, elements * sizeof(size_t));
    for (const Shard* s = first; s < m->shards + m->num_shards && s->tensor == first->tensor; s++) {
        for (size_t k = 0; k < s->piece.count && s->layer == first->layer && map_has(m, s, space); k++) {
            p.at[s->offset - first->offset + k] = map_at(m, s, space) + k;
        }
    }
    return p;
}

// Checks a range that was cut to elements begin ... end - 1 of a tensor: it has exactly the
// elements of them that the space has.
static void check_range(const Map* m, Places p, MapRange range, size_t begin, size_t end, MapSpace space) {
    size_t wrong = 0, count = 0;
    for (size_t e = 0; e < p.elements; e++) {
        const int has = p.at[e] != MAP_NONE && begin <= e && e < end,
                  is_in = range.before <= e && e < range.before + range.count;
        wrong += has != is_in || (has && p.at[e] != map_range_at(m, &range, space) + (e - range.before));
        count += (size_t)has;
    }
    EXPECT(wrong == 0 && count == range.count, "space %d: %zu elements, wanted %zu, %zu elsewhere", space,
           range.count, count, wrong);
}

static void check_ranges(const Map* m, Rand* random, MapSpace space) {
    for (const Bucket* b = m->buckets; b < m->buckets + m->num_buckets && b->kind != MAP_EMBEDDING; b++) {
        MapRange next = {NULL, 0, 0, 0};
        size_t count = 0, all = 0;
        for (const Shard* s = m->shards + b->first; s < m->shards + b->first + b->count; s++) {
            Memory memory = memory_on_host();
            all += map_has(m, s, space) ? s->piece.count : 0;
            if (map_find(m, s->tensor, s->layer) == s) {
                const Places p = places_of(m, &memory, s, space);
                const size_t begin = rand_below(random, (uint32_t)p.elements),
                             end = begin + rand_below(random, (uint32_t)p.elements);
                const MapRange range = map_range(m, s->tensor, s->layer, space);
                check_range(m, p, range, 0, p.elements, space);
                check_range(m, p, map_part_of_range(range, begin, end - begin), begin, end, space);
            }
            memory_close(&memory);
        }
        while (map_next_range(m, b, space, &next)) {
            const MapRange range = map_range(m, next.shard->tensor, next.shard->layer, space);
            EXPECT(next.before == range.before && next.count == range.count, "the next range");
            count += next.count;
        }
        EXPECT(count == all, "bucket %td: ranges of %zu elements, wanted %zu", b - m->buckets, count, all);
    }
}

SERIAL_TEST(map_ranges) {
    for (uint64_t seed = 1; seed <= 30 && !test_failures_; seed++) {
        Rand random = rand_open(seed, 2);
        const MapOf of = map_test_settings(&random);
        Memory memory = memory_on_host();
        Map m;
        map_open(&m, &memory, MEMORY_HOST, &of, map_test_below(&random, map_test_ranks(&of)));
        for (int space = 0; space < MAP_SPACES; space++) {
            check_ranges(&m, &random, (MapSpace)space);
        }
        memory_close(&memory);
    }
}

// ---- pieces ----

enum { MEET_ELEMENTS = 400 };

// Returns a random piece of a tensor, contiguous or cut by columns.
static MapPiece random_piece(Rand* random) {
    const size_t run = (size_t)(1 + map_test_below(random, 12)),
                 stride = run + (size_t)map_test_below(random, 20),
                 runs = (size_t)(1 + map_test_below(random, 8));
    MapPiece p = {0, 0, (size_t)map_test_below(random, 60), run, stride};
    if (map_test_below(random, 3) == 0) {
        p.run = run * runs;
        p.stride = 0;
    }
    p.first = (size_t)map_test_below(random, (int)(run * runs));
    p.count = run * runs - p.first;
    return p;
}

static size_t element_of(const MapPiece* p, size_t i) {
    const size_t e = p->first + i;
    return p->logical + e / p->run * p->stride + e % p->run;
}

SERIAL_TEST(map_meet) {
    Rand random = rand_open(7, 0);
    for (int round = 0; round < 2000; round++) {
        const MapPiece a = random_piece(&random), b = random_piece(&random);
        int where[MEET_ELEMENTS] = {0}, met = 0, common = 0; // number in b + 1
        MapMeet meet = {0, 0, 0};
        for (size_t i = 0; i < b.count; i++) {
            where[element_of(&b, i)] = (int)i + 1;
        }
        for (size_t i = 0; i < a.count; i++) {
            common += where[element_of(&a, i)] > 0;
        }
        while (map_meet(&a, &b, &meet) && met <= common) {
            for (size_t i = 0; i < meet.count; i++, met++) {
                EXPECT(where[element_of(&a, meet.in_a + i)] == (int)(meet.in_b + i) + 1, "round %d", round);
            }
        }
        EXPECT(met == common, "round %d: %d of %d elements", round, met, common);
    }
}

// ---- all ranks ----

// How often each element of the model is in some space of some ranks, over all of them.
typedef struct {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    size_t begin[MODEL_PARAMETER_ROWS]; // of layer 0
    int* counts[4];
    size_t elements;
} Counts;

enum { COUNT_OWNED, COUNT_NORM, COUNT_WRITES, COUNT_KEPT };

static Counts counts_of(const MapOf* of) {
    Counts c = {.elements = 0};
    model_parameter_rows_of(c.rows, of->whole, 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        c.begin[i] = c.elements;
        c.elements += (size_t)(c.rows[i].in_block ? of->whole.L : 1) * tensor_layer_elements(&c.rows[i]);
    }
    for (int k = 0; k < 4; k++) {
        c.counts[k] = (int*)check_alloc(c.elements, sizeof(int), "counts");
    }
    return c;
}

static void counts_add(Counts* c, const Map* m, const Shard* s) {
    const int is_counted[] = {map_has(m, s, MAP_OWNED), map_has(m, s, MAP_REDUCED) && s->flags & SHARD_COUNTS,
                              map_has(m, s, MAP_OWNED) && s->flags & SHARD_WRITES, map_has(m, s, MAP_KEPT)};
    const int layer = s->layer < 0 ? 0 : s->layer + m->cfg.part.first_layer;
    const size_t elements = tensor_layer_elements(&c->rows[s->tensor]),
                 begin = c->begin[s->tensor] + (size_t)layer * elements;
    for (size_t k = 0; k < s->piece.count; k++) {
        const size_t e = s->piece.first + k,
                     at = s->piece.logical + e / s->piece.run * s->piece.stride + e % s->piece.run;
        if (at >= elements) {
            EXPECT(0, "%s: element %zu of %zu", m->rows[s->tensor].name, at, elements);
            return;
        }
        for (int i = 0; i < 4; i++) {
            c->counts[i][begin + at] += is_counted[i];
        }
    }
}

// Checks the counts of a row in a layer that has parameters of its own.
static void check_row(const Counts* c, const MapOf* of, int i, int l) {
    const TensorRow* row = &c->rows[i];
    const int is_cut = of->tensor > 1 && row->split != SPLIT_NONE,
              has_experts = of->experts > 1 && row->experts > 1,
              is_twice = of->pipeline > 1 && !of->whole.has_head && row->init == INIT_VOCAB,
              uncut = (is_cut ? 1 : of->tensor) * (is_twice ? 2 : 1),
              all = of->data / (has_experts ? of->experts : 1), is_frozen = freeze_has(&of->freeze, i, l);
    const int replicas = of->data / of->replica,
              want[] = {uncut * (of->stage == 0 ? all : 1), 1, 1,
                        uncut * (of->ring_parameters > 0 ? replicas : all)};
    const size_t used = model_rows_in_files(row, of->whole) * row->cols,
                 elements = tensor_layer_elements(row);
    for (int k = 0; k < 4; k++) {
        const int* counts = c->counts[k] + c->begin[i] + (size_t)l * elements;
        size_t wrong = 0;
        for (size_t e = 0; e < elements; e++) {
            wrong += counts[e] != (e < used ? want[k] : 0);
        }
        EXPECT(wrong == 0 || (k == COUNT_NORM && is_frozen), "%s of layer %d: %zu elements not %d times, %d",
               row->name, l, wrong, want[k], k);
    }
}

static void check_counts(const Counts* c, const MapOf* of) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int k = 0; k < (c->rows[i].uses > 0 ? c->rows[i].layers : 0); k++) {
            check_row(c, of, i, c->rows[i].in_block ? tensor_lowest_layer(&c->rows[i], k) : 0);
        }
    }
}

// Ranks of a data group, and of the tensor group, have the same buckets.
static void check_same_buckets(const Map* a, const Map* b) {
    EXPECT(a->num_buckets == b->num_buckets, "%d and %d buckets", a->num_buckets, b->num_buckets);
    for (int i = 0; i < a->num_buckets && i < b->num_buckets; i++) {
        const Bucket *x = &a->buckets[i], *y = &b->buckets[i];
        EXPECT(x->layer == y->layer && x->kind == y->kind && x->elements == y->elements &&
                   x->in[MAP_SUMS].count == y->in[MAP_SUMS].count,
               "bucket %d", i);
    }
}

SERIAL_TEST(map_random) {
    for (uint64_t seed = 1; seed <= 150; seed++) {
        Rand random = rand_open(seed, 0);
        MapOf of = map_test_settings(&random);
        random_slots(&random, &of);
        Counts counts = counts_of(&of);
        Memory memory = memory_on_host();
        Map* maps =
            (Map*)memory_take(&memory, "maps", MEMORY_HOST, (size_t)map_test_ranks(&of) * sizeof(Map));
        for (int rank = 0; rank < map_test_ranks(&of); rank++) {
            Map* m = &maps[rank];
            map_open(m, &memory, MEMORY_HOST, &of, rank);
            EXPECT(m->num_buckets == m->totals.buckets && m->num_shards == m->totals.shards, "totals");
            check_order(m);
            check_spaces(m);
            check_slots(m);
            check_bind(m);
            check_same_buckets(&maps[rank / (of.data * of.tensor) * of.data * of.tensor], m);
            for (int i = 0; i < m->num_shards; i++) {
                counts_add(&counts, m, &m->shards[i]);
            }
        }
        check_counts(&counts, &of);
        if (test_failures_) {
            fprintf(stderr, "seed %d: %s, %d layers, t %d, W %d, P %d, e %d, replica %d, stage %d\n",
                    (int)seed, model_architecture(of.whole.arch)->word, of.whole.L, of.tensor, of.data,
                    of.pipeline, of.experts, of.replica, of.stage);
            break;
        }
        for (int k = 0; k < 4; k++) {
            free(counts.counts[k]);
        }
        memory_close(&memory);
    }
}
