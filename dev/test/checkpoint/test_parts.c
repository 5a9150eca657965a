// Files of a model that ranks have in parts: the optimizer's state is the same in every grid that
// wrote it; whole groups come from parts and go to them.
#include <limits.h>
#include <pthread.h>

#include "dev/test/lib/map_test.h"
#include "dev/test/lib/test.h"
#include "llmc/base/xxh64.h"
#include "llmc/checkpoint/model_files.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/comm/comm.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/model/map.h"
#include "llmc/optim/matrices.h"
#include "llmc/parallel/grid.h"

enum { MOST_RANKS = 64 };

// ---- values that identify elements ----

// Returns the number of element e of a shard in the whole tensor.
static size_t number_of(const Shard* s, size_t e) {
    const MapPiece* p = &s->piece;
    return p->logical + (p->first + e) / p->run * p->stride + (p->first + e) % p->run;
}

static float value_of(int slot, int tensor, int copy, size_t number) {
    const uint64_t who[] = {(uint64_t)slot, (uint64_t)tensor, (uint64_t)copy, number};
    return (float)(xxh64(who, sizeof(who)) % 251);
}

// Returns the copy of a shard's tensor in the whole model.
static int copy_of(const Map* m, const Shard* s) {
    return s->layer < 0 ? 0 : tensor_copy(&m->whole[s->tensor], m->cfg.part.first_layer + s->layer);
}

// ---- the optimizer's state ----

// State of a rank, and what to do with it.
typedef struct {
    const Map* map;
    OptimizerState layout;
    char* slots[MAP_SLOTS];
    int is_check;
} State;

static State state_of(const Map* m, Optimizer optimizer, int is_check) {
    State state = {.map = m, .is_check = is_check};
    optimizer.frozen = m->of.freeze.rows;
    optimizer_state_open(&state.layout, optimizer, m);
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const size_t bytes = state.layout.slots[slot].bytes;
        state.slots[slot] = bytes ? (char*)memset(check_alloc(bytes, 1, "slot"), 0xFF, bytes) : NULL;
    }
    return state;
}

static void state_free(State* state) {
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        free(state->slots[slot]);
    }
}

// Sets, or checks, an element of a slot of a tensor.
static void visit(const State* state, int slot, size_t at, int tensor, int copy, size_t number) {
    const float value = value_of(slot, tensor, copy, number);
    const int is_code = state_slot_of(slot).element_bytes == 1;
    uint8_t* code = (uint8_t*)state->slots[slot] + at;
    float* x = (float*)(void*)state->slots[slot] + at;
    const float found = is_code ? *code : *x;
    if (state->is_check && found != value) {
        EXPECT(0, "%s of %s, copy %d, number %zu is %f, wanted %f", state_slot_of(slot).name,
               state->map->whole[tensor].name, copy, number, found, value);
    } else if (is_code) {
        *code = (uint8_t)value;
    } else {
        *x = value;
    }
}

static void visit_shard(const State* state, const Shard* s) {
    const MapOf* of = &state->map->of;
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const size_t step = of->shapes[slot] == SLOT_BLOCKS ? MAP_BLOCK : 1,
                     count = s->slot[slot] == MAP_NONE ? 0 : s->piece.count / step;
        for (size_t e = 0; e < count && !test_failures_; e++) {
            visit(state, slot, s->slot[slot] + e, s->tensor, copy_of(state->map, s),
                  number_of(s, e * step) / step);
        }
    }
}

// Visits a matrix. What it has for each of its elements is numbered by them, as in older files; so
// are rows.
static void visit_matrix(const State* state, OwnedMatrix x) {
    const Map* m = state->map;
    const TensorRow* row = &m->rows[x.of->row];
    const int l = m->cfg.part.first_layer + tensor_lowest_layer(row, x.copy),
              expert = row->split == SPLIT_EXPERTS ? m->cfg.part.expert_rank * x.of->count : 0;
    const size_t k = (size_t)(expert + x.number), first = x.of->first + k * x.of->rows;
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const SlotShape shape = m->of.shapes[slot];
        const size_t count = state_matrix_elements(&state->layout, slot, x.of),
                     begin = shape == SLOT_ROWS     ? first
                             : shape == SLOT_COLS   ? 0
                             : shape <= SLOT_MATRIX ? first * x.of->cols
                                                    : (first << 32);
        for (size_t e = 0; e < count && !test_failures_; e++) {
            visit(state, slot, state_matrix_begin(&state->layout, slot, x) + e, x.of->row,
                  row->in_block ? tensor_copy(&m->whole[x.of->row], l) : 0, begin + e);
        }
    }
}

static void visit_all(const State* state) {
    const Map* m = state->map;
    const OptimizerState* layout = &state->layout;
    for (int i = 0; i < m->num_shards; i++) {
        const Shard* s = &m->shards[i];
        if (map_has(m, s, MAP_OWNED) && m->buckets[s->bucket].kind == MAP_TRAINED) {
            visit_shard(state, s);
        }
    }
    for (const Matrices* of = layout->matrices; of < layout->matrices + layout->num_matrices; of++) {
        for (size_t i = 0; i < matrices_all(of); i++) {
            const OwnedMatrix x = {of, of->first_copy + (int)i / of->count, (int)i % of->count};
            if (matrix_is_owned(x)) {
                visit_matrix(state, x);
            }
        }
    }
}

#define AVERAGE "ema:0.5"

typedef struct {
    SavedFile files[MOST_RANKS];
    char names[MOST_RANKS][64];
    SavedOption average; // what is read if the run keeps an average
    SavedState state;
} Saved;

// Writes the state as the ranks of a grid do.
static void save(Saved* saved, Optimizer optimizer, const MapOf* of) {
    memset(saved, 0, sizeof(*saved));
    saved->state.files = saved->files;
    saved->average = (SavedOption){"average", AVERAGE};
    saved->state.options = &saved->average;
    saved->state.num_options = 1;
    saved->state.padded_vocab = of->whole.Vp;
    for (int rank = 0; rank < map_test_ranks(of); rank++) {
        const int i = checkpoint_part_number(of, rank);
        Memory memory = memory_on_host();
        Map m;
        map_open(&m, &memory, MEMORY_HOST, of, rank);
        State state = state_of(&m, optimizer, 0);
        visit_all(&state);
        if (i >= 0) {
            EXPECT(i == saved->state.num_files && checkpoint_part_rank(of, i) == rank, "part %d", i);
            checkpoint_part_name(saved->names[i], i, checkpoint_part_writers(of));
            saved->files[saved->state.num_files++].name = saved->names[i];
            checkpoint_part_write(&m, &state.layout, test_path(saved->names[i]),
                                  (const void* const*)state.slots);
        }
        state_free(&state);
        memory_close(&memory);
    }
}

// Reads the state of a rank.
static void read_state(const Saved* saved, State* state) {
    CheckpointParts parts;
    checkpoint_parts_open(&parts, &saved->state, test_tmpdir(), &state->layout, state->map);
    for (size_t i = 0; i < parts.own.count; i++) {
        const StateEntry* own = &parts.own.all[i];
        for (int slot = 0; slot < MAP_SLOTS; slot++) {
            if (checkpoint_parts_count(&parts, own, slot) > 0) {
                checkpoint_parts_read(&parts, own, slot,
                                      state->slots[slot] + own->at[slot] * state_slot_of(slot).element_bytes);
            }
        }
    }
    checkpoint_parts_close(&parts);
}

// Reads it in all ranks of a grid.
static void load(const Saved* saved, Optimizer optimizer, const MapOf* of) {
    for (int rank = 0; rank < map_test_ranks(of) && !test_failures_; rank++) {
        Memory memory = memory_on_host();
        Map m;
        map_open(&m, &memory, MEMORY_HOST, of, rank);
        State state = state_of(&m, optimizer, 1);
        read_state(saved, &state);
        visit_all(&state);
        state_free(&state);
        memory_close(&memory);
    }
}

// Returns an optimizer that both grids can have.
static Optimizer random_optimizer(Rand* random, const MapOf* a, const MapOf* b) {
    static const OptimizerName names[] = {OPTIMIZER_ADAMW,    OPTIMIZER_LION,      OPTIMIZER_MUON,
                                          OPTIMIZER_SGD,      OPTIMIZER_ADAFACTOR, OPTIMIZER_SOAP,
                                          OPTIMIZER_ADAMW8BIT};
    const ModelConfig cfg = a->whole;
    const int is_cut = a->tensor > 1 || b->tensor > 1 || a->experts > 1 || b->experts > 1,
              has_blocks =
                  cfg.C % MAP_BLOCK == 0 && model_hidden(cfg) % MAP_BLOCK == 0 && cfg.Fs == 0 && cfg.Fe == 0;
    const OptimizerName drawn = names[map_test_below(random, has_blocks && !is_cut ? 7 : 6)];
    // Adafactor updates all experts of a layer as one (grid_conflicts.h)
    const OptimizerName name =
        drawn == OPTIMIZER_ADAFACTOR && (a->experts > 1 || b->experts > 1) ? OPTIMIZER_ADAMW : drawn;
    Optimizer optimizer = optimizer_of(name, map_test_below(random, 2), MASTER_NONE);
    optimizer.frozen = a->freeze.rows;
    optimizer.soap_max_side = map_test_below(random, 2) ? INT_MAX : 60;
    if (map_test_below(random, 2)) {
        EXPECT(average_parse(&optimizer.average, AVERAGE), AVERAGE);
    }
    return optimizer;
}

// A random grid reads what another one of the same model has written.
SERIAL_TEST(parts_elastic) {
    static Saved saved;
    for (uint64_t seed = 1; seed <= 40 && !test_failures_; seed++) {
        Rand random = rand_open(seed, 1);
        MapOf from = map_test_settings(&random), to = map_test_grid(&random, from.whole);
        const Optimizer optimizer = random_optimizer(&random, &from, &to);
        to.freeze = from.freeze;
        optimizer_set_map(&from, optimizer);
        optimizer_set_map(&to, optimizer);
        save(&saved, optimizer, &from);
        load(&saved, optimizer, &to);
        if (test_failures_) {
            fprintf(stderr, "seed %d: %s, %s\n", (int)seed, model_architecture(from.whole.arch)->word,
                    optimizer_word(optimizer.name));
        }
    }
}

// ---- another optimizer ----

static const ModelConfig TINY = {.max_T = 8, .V = 100, .Vp = 128, .L = 4, .NH = 4, .C = 64};

// Returns the sum of a slot of TINY after what `before` has saved, with these options, was read.
static double read_by(Optimizer before, SavedOption* options, int count, Optimizer now, int slot) {
    static Saved saved;
    MapOf from = map_of_model(TINY), to = from;
    Memory memory = memory_on_host();
    Map m;
    double sum = 0;
    optimizer_set_map(&from, before);
    optimizer_set_map(&to, now);
    save(&saved, before, &from);
    saved.state.options = options;
    saved.state.num_options = count;
    map_open(&m, &memory, MEMORY_HOST, &to, 0);
    State state = state_of(&m, now, 0);
    memset(state.slots[slot], 0, state.layout.slots[slot].bytes);
    read_state(&saved, &state);
    for (size_t i = 0; i < state.layout.slots[slot].bytes / sizeof(float); i++) {
        sum += ((float*)(void*)state.slots[slot])[i];
    }
    state_free(&state);
    memory_close(&memory);
    return sum;
}

// Another optimizer, or another number of slots, starts with zeros.
TEST(parts_other_optimizer) {
    SavedOption adamw[] = {{"optimizer", "adamw"}}, sgd[] = {{"optimizer", "sgd"}, {"sgd-momentum", "0"}},
                muon[] = {{"optimizer", "muon"}, {"muon-rows", "off"}},
                soap[] = {{"optimizer", "soap"}, {"soap-max-side", "2147483647"}};
    const Optimizer by_adamw = optimizer_of(OPTIMIZER_ADAMW, 0, MASTER_NONE);
    EXPECT(read_by(by_adamw, adamw, 1, by_adamw, STATE_M) > 0, "adamw has not its own");
    EXPECT(read_by(by_adamw, adamw, 1, optimizer_of(OPTIMIZER_LION, 0, MASTER_NONE), STATE_M) == 0,
           "lion has adamw's m");
    EXPECT(read_by(optimizer_of(OPTIMIZER_SGD, 0, MASTER_NONE), sgd, 2,
                   optimizer_of(OPTIMIZER_SGD, 1, MASTER_NONE), STATE_M) == 0,
           "momentum from nowhere");
    EXPECT(read_by(optimizer_of(OPTIMIZER_MUON, 0, MASTER_NONE), muon, 2,
                   optimizer_of(OPTIMIZER_MUON, 1, MASTER_NONE), STATE_M) == 0,
           "rows from nowhere");
    Optimizer in_8 = optimizer_of(OPTIMIZER_MUON, 0, MASTER_NONE);
    in_8.muon_momentum = MUON_8BIT;
    SavedOption muon8[] = {{"optimizer", "muon"}, {"muon-momentum", "8bit"}};
    EXPECT(read_by(in_8, muon8, 2, in_8, STATE_M_SCALE) > 0, "scales of Muon's own momentum");
    EXPECT(read_by(in_8, muon8, 2, optimizer_of(OPTIMIZER_MUON, 0, MASTER_NONE), STATE_V) == 0,
           "state beside another momentum");
    Optimizer turned = optimizer_of(OPTIMIZER_SOAP, 0, MASTER_NONE), less = turned;
    less.soap_max_side = 64;
    EXPECT(read_by(turned, soap, 2, less, STATE_M) == 0, "other sides have their state");
}

// Another average starts with zeros, alone.
TEST(parts_other_average) {
    SavedOption options[] = {{"optimizer", "adamw"}, {"average", AVERAGE}};
    Optimizer before = optimizer_of(OPTIMIZER_ADAMW, 0, MASTER_NONE), other = before;
    EXPECT(average_parse(&before.average, AVERAGE) && average_parse(&other.average, "ema:0.75"), "averages");
    EXPECT(read_by(before, options, 2, before, STATE_AVERAGE) > 0, "the average");
    EXPECT(read_by(before, options, 2, other, STATE_AVERAGE) == 0, "another average");
    EXPECT(read_by(before, options, 2, other, STATE_M) > 0, "m beside another average");
}

// ---- damaged and older files ----

typedef struct {
    const char *key[3], *value[3]; // metadata of a file; NULL: none
    size_t count;                  // elements of m
    const char* error;             // NULL: none
} Damage;

static void body_read_damaged(const void* damage) {
    const Damage* d = (const Damage*)damage;
    const Optimizer lion = optimizer_of(OPTIMIZER_LION, 0, MASTER_NONE);
    static Saved saved;
    SafeTensorsWriter writer;
    MapOf of = map_of_model(TINY);
    Memory memory = memory_on_host();
    Map m;
    optimizer_set_map(&of, lion);
    save(&saved, lion, &of);
    if (d->count > 0) {
        float* zeros = (float*)check_alloc(d->count, sizeof(float), "zeros");
        safetensors_writer_open(&writer, test_path(saved.names[0]));
        for (int i = 0; i < 3 && d->key[i]; i++) {
            safetensors_writer_metadata(&writer, d->key[i], d->value[i]);
        }
        safetensors_writer_declare(&writer, "m", SAFETENSORS_F32, 1, &d->count);
        safetensors_writer_begin(&writer);
        safetensors_write_raw(&writer, zeros, d->count * sizeof(float));
        safetensors_writer_commit(&writer);
        free(zeros);
    }
    map_open(&m, &memory, MEMORY_HOST, &of, 0);
    State state = state_of(&m, lion, 0);
    read_state(&saved, &state);
    state_free(&state);
    memory_close(&memory);
}

static Damage shards(const char* list, const char* error) {
    return (Damage){{"matrices", "shards"}, {"", list}, 100, error};
}

// TINY has 206976 elements.
TEST(parts_damaged) {
    const Damage good[] = {{.count = 0},
                           {{"ranges", "total"}, {"0-100,100-206976", "206976"}, 206976, NULL},
                           {{"begin", "end", "total"}, {"0", "206976", "206976"}, 206976, NULL}};
    const Damage damaged[] = {
        shards("wte:0:0+100@0/6400/0", "the files have 100 elements of m for 6400 of wte"),
        shards("wte:0:0+50@0/6400/0,wte:0:0+50@0/6400/0", "the files have 100 elements of m"),
        shards("wxe:0:0+100@0/6400/0", "\"wxe:0:0+100@0/6400/0\", wanted elements of this model"),
        shards("qkvw:4:0+100@0/6400/0", "\"qkvw:4:0+100@0/6400/0\", wanted elements of this model"),
        shards("qkvw:-1:0+100@0/6400/0", "\"qkvw:-1:0+100@0/6400/0\", wanted elements of this model"),
        shards("wte:0:0+6401@0/6400/0", "\"wte:0:0+6401@0/6400/0\", wanted elements of this model"),
        shards("wte:0:6350+100@0/6400/0", "\"wte:0:6350+100@0/6400/0\", wanted elements of this model"),
        shards("wte:0:0+100@0/0/0", "\"wte:0:0+100@0/0/0\", wanted elements of this model"),
        shards("wte:0:0+100@0/64/32", "\"wte:0:0+100@0/64/32\", wanted elements of this model"),
        shards("wte:0:0+0@0/6400/0", "\"wte:0:0+0@0/6400/0\", wanted elements of this model"),
        shards("wte:0:0+100@6301/6400/0", "\"wte:0:0+100@6301/6400/0\", wanted elements of this model"),
        shards("wte:0:0-100@0/6400/0", "\"wte:0:0-100@0/6400/0\", wanted elements of this model"),
        shards("wte:0:0+x@0/6400/0", "\"wte:0:0+x@0/6400/0\", wanted elements of this model"),
        shards("wte:0:0+100@0/6400/0;", "\"wte:0:0+100@0/6400/0;\", wanted elements of this model"),
        shards("wte:0:0+-1@0/6400/0", "\"wte:0:0+-1@0/6400/0\", wanted elements of this model"),
        shards("wte:0+100@0/6400/0", "\"wte:0+100@0/6400/0\", wanted elements of this model"),
        {{"shards"}, {"wte:0:0+100@0/6400/0"}, 100, "matrices: missing"},
        {{"matrices", "shards"},
         {"wte:0:0", "wte:0:0+100@0/6400/0"},
         100,
         "matrices: \"wte:0:0\", wanted elements"},
        {{"ranges", "slices", "total"},
         {"0-206976", "2", "206976"},
         206976,
         "--tensor-slices 1 of commit 5e8cb2dd"},
        {{"ranges", "total"},
         {"0-100,101-206977", "206976"},
         206976,
         "\"101-206977\", wanted some of 206976 elements"},
        {{"ranges", "total"}, {"0-100,101-206976", "206976"}, 206975, "the files have 6399 elements"},
        {{"ranges", "total"}, {"0-100,99-206976", "206976"}, 206977, "the files have 6401 elements"},
        {{"ranges", "total"}, {"0-206976", "206977"}, 206976, "a part of 206977 elements, wanted 206976"},
        {{"ranges", "total"}, {"0-206976;", "206976"}, 206976, "\"0-206976;\", wanted some"},
        {{"ranges", "total"}, {"0-206976", "206976x"}, 206976, "total: \"206976x\", wanted a number"}};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        body_read_damaged(&good[i]);
    }
    for (size_t i = 0; i < sizeof(damaged) / sizeof(damaged[0]); i++) {
        EXPECT(test_dies(body_read_damaged, &damaged[i], 1, damaged[i].error), "%s", damaged[i].error);
    }
}

// A file that is written value by value: a slot's own, in the order of all elements.
typedef struct {
    float* all;
    size_t count;
} OldSlot;

static void old_add(OldSlot* to, float value) {
    to->all = (float*)check_grow(to->all, to->count, sizeof(float), "slot");
    to->all[to->count++] = value;
}

// Writes elements begin ... end - 1 of all, by Adafactor with momentum, as 5e8cb2dd did.
static void write_old(const char* name, ModelConfig cfg, size_t begin, size_t end) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    OldSlot m = {NULL, 0}, v = m, row_v = m, col_v = m;
    const OldSlot* slots[] = {&m, &v, &row_v, &col_v};
    const char* const names[] = {"m", "v", "row_v", "col_v"};
    char ranges[64], total[32];
    size_t number = 0;
    model_parameter_rows_of(rows, cfg, 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &rows[i];
        const int is_vector = row->kind == KIND_VECTOR, is_trained = row->kind != KIND_FIXED;
        const size_t count = model_rows_in_files(row, cfg) * row->cols;
        for (int k = 0; k < row->layers; k++) {
            for (size_t e = 0; e < count; e++, number++) {
                const int is_here = is_trained && begin <= number && number < end,
                          is_last = is_here && e + 1 == count;
                if (is_here) {
                    old_add(&m, value_of(STATE_M, i, k, e));
                }
                if (is_here && is_vector) {
                    old_add(&v, value_of(STATE_V, i, k, e));
                }
                for (size_t r = 0; r < row->rows && is_last && !is_vector; r++) {
                    old_add(&row_v, value_of(STATE_ROWS, i, k, r));
                }
                for (size_t c = 0; c < row->cols && is_last && !is_vector; c++) {
                    old_add(&col_v, value_of(STATE_COLS, i, k, c));
                }
            }
        }
    }
    SafeTensorsWriter writer;
    safetensors_writer_open(&writer, test_path(name));
    snprintf(ranges, sizeof(ranges), "%zu-%zu", begin, end < number ? end : number);
    snprintf(total, sizeof(total), "%zu", number);
    safetensors_writer_metadata(&writer, "ranges", ranges);
    safetensors_writer_metadata(&writer, "total", total);
    for (int i = 0; i < 4; i++) {
        safetensors_writer_declare(&writer, names[i], SAFETENSORS_F32, 1, &slots[i]->count);
    }
    safetensors_writer_begin(&writer);
    for (int i = 0; i < 4; i++) {
        safetensors_write_raw(&writer, slots[i]->all, slots[i]->count * sizeof(float));
        free(slots[i]->all);
    }
    safetensors_writer_commit(&writer);
}

// Files of earlier versions, in any grid.
SERIAL_TEST(parts_older) {
    SavedFile files[] = {{.name = "optimizer.1of2.safetensors"}, {.name = "optimizer.2of2.safetensors"}};
    Saved saved = {.state = {.files = files, .num_files = 2}};
    const Optimizer adafactor = optimizer_of(OPTIMIZER_ADAFACTOR, 1, MASTER_NONE);
    for (uint64_t seed = 1; seed <= 12 && !test_failures_; seed++) {
        Rand random = rand_open(seed, 2);
        MapOf of = map_test_settings(&random);
        ModelConfig cfg = of.whole;
        of.freeze = freeze_of(cfg, "");
        if (of.experts > 1) {
            continue;
        }
        cfg.Vp = model_padded_vocab(cfg.V);
        const size_t cut = 1 + rand_below(&random, (uint32_t)model_count_stored(cfg) - 1);
        saved.state.padded_vocab = cfg.Vp;
        write_old(files[0].name, cfg, 0, cut);
        write_old(files[1].name, cfg, cut, SIZE_MAX);
        optimizer_set_map(&of, adafactor);
        load(&saved, adafactor, &of);
    }
}

// ---- whole groups ----

// A message between two ranks: the receiver waits for it, and the sender until it is taken.
typedef struct {
    const void* data;
    size_t bytes;
} Mail;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Mail mail[MOST_RANKS][MOST_RANKS];
} world = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

struct Model {
    Memory memory;
    Map map;
    ModelFiles files;
    float *params, *set; // its own memory, group after group, and the groups that were set
    pthread_t thread;
    const WholeGroups* layout;
    const float* whole; // all groups of the whole model
    int writer;
};

// Returns where a bucket starts in memory that has all groups.
static size_t bucket_begin(const Map* m, int bucket) {
    size_t begin = 0;
    for (int b = 0; b < bucket; b++) {
        begin += m->buckets[b].elements;
    }
    return begin;
}

static MapBuckets buckets_of(const Map* m, int g) {
    return map_buckets(m, g == 0 ? -1 : model_group_layer(m->cfg, g));
}

static void* get_group(Model* model, int g, void* group) {
    const MapBuckets b = buckets_of(&model->map, g);
    const size_t begin = bucket_begin(&model->map, b.first), end = bucket_begin(&model->map, b.end);
    return group ? memcpy(group, model->params + begin, (end - begin) * sizeof(float))
                 : model->params + begin;
}

static void set_group(Model* model, int g, const float* group) {
    const MapBuckets b = buckets_of(&model->map, g);
    const size_t begin = bucket_begin(&model->map, b.first), end = bucket_begin(&model->map, b.end);
    memmove(model->set + begin, group, (end - begin) * sizeof(float));
}

static void move(Model* model, GridGroup group, GroupMove m) {
    const MapOf* of = &model->map.of;
    MapPlace peer = map_place(of, model->map.rank);
    if (group == GRID_EXPERTS) {
        peer.data += m.peer - peer.data % of->experts;
    } else {
        *(group == GRID_TENSOR ? &peer.tensor : &peer.stage) = m.peer;
    }
    const int here = model->map.rank, there = map_rank(of, peer);
    Mail* mail = m.sends ? &world.mail[here][there] : &world.mail[there][here];
    pthread_mutex_lock(&world.lock);
    if (m.sends) {
        mail->data = m.data;
        mail->bytes = m.bytes;
        pthread_cond_broadcast(&world.changed);
    }
    while ((mail->data == NULL) != m.sends) {
        pthread_cond_wait(&world.changed, &world.lock);
    }
    if (!m.sends) {
        EXPECT(mail->bytes == m.bytes, "%zu bytes sent, %zu wanted", mail->bytes, m.bytes);
        memcpy(m.data, mail->data, m.bytes);
        mail->data = NULL;
        pthread_cond_broadcast(&world.changed);
    }
    pthread_mutex_unlock(&world.lock);
}

// Elements of whole groups; those beyond the vocabulary are zero.
static float* whole_model(const WholeGroups* layout, ModelConfig cfg) {
    float* whole = (float*)check_alloc(whole_group_begin(layout, model_groups(cfg)), 1, "whole");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &layout->rows[i];
        for (int k = 0; k < row->layers; k++) {
            float* tensor = (float*)tensor_at_layer(row, whole, k);
            for (size_t at = 0; at < model_rows_in_files(row, cfg) * row->cols; at++) {
                tensor[at] = value_of(0, i, k, at) + 1;
            }
        }
    }
    return whole;
}

// Checks what was set of a shard. The first stage's copy of the classifier's matrix is not the one
// that is saved, so it is spoiled then.
static void check_shard(Model* model, const Shard* s) {
    const Map* m = &model->map;
    const int is_copy = m->rows[s->tensor].member == offsetof(ModelParameters, wte) && m->of.pipeline > 1 &&
                        !m->cfg.has_head && !model_has_last(m->cfg);
    float* at = model->set + bucket_begin(m, s->bucket) + s->offset;
    for (size_t e = 0; e < s->piece.count && m->buckets[s->bucket].kind != MAP_EMBEDDING; e++) {
        const float wanted = value_of(0, s->tensor, copy_of(m, s), number_of(s, e)) + 1;
        if (at[e] != wanted) {
            EXPECT(0, "%s, layer %d, element %zu is %f, wanted %f", m->rows[s->tensor].name, s->layer, e,
                   at[e], wanted);
            return;
        }
        at[e] = is_copy ? NAN : at[e];
    }
}

// Sets the part of a rank from whole groups.
static void set_part(Model* model) {
    const Map* m = &model->map;
    PartGroups parts;
    part_groups_open_to_set(&parts, &model->files);
    for (int g = 0; g < model_groups(m->of.whole); g++) {
        if (model_files_have(m->of.whole, m->cfg.part, g)) {
            part_groups_set(&parts, g, (char*)model->whole + whole_group_begin(model->layout, g));
        }
    }
    part_groups_set_last(&parts);
    part_groups_close(&parts);
    for (int i = 0; i < m->num_shards; i++) {
        check_shard(model, &m->shards[i]);
    }
    memmove(model->params, model->set, bucket_begin(m, m->num_buckets) * sizeof(float));
}

// Puts the whole groups together again in one rank, and compares them.
static void* get_whole(void* of_rank) {
    Model* model = (Model*)of_rank;
    const int is_writer = model->map.rank == model->writer;
    PartGroups parts;
    part_groups_open_to_get(&parts, &model->files);
    for (int g = 0; g < model_groups(model->map.of.whole); g++) {
        const size_t bytes = whole_group_bytes(model->layout, g);
        void *room = is_writer ? check_alloc(bytes, 1, "group") : NULL,
             *group = part_groups_get(&parts, g, model->writer, room);
        if (is_writer) {
            EXPECT(memcmp(group, (char*)model->whole + whole_group_begin(model->layout, g), bytes) == 0,
                   "group %d", g);
        }
        free(room);
    }
    part_groups_close(&parts);
    return NULL;
}

static void open_rank(Model* model, const MapOf* of, int rank, int in_place) {
    const ModelAccess access = {.get_group = get_group, .set_group = set_group, .move = move};
    model->memory = memory_on_host();
    map_open(&model->map, &model->memory, MEMORY_HOST, of, rank);
    model->files = (ModelFiles){
        .model = model, .access = access, .map = &model->map, .dtype = SAFETENSORS_F32, .in_place = in_place};
    const size_t elements = bucket_begin(&model->map, model->map.num_buckets);
    model->params = (float*)check_alloc(elements, sizeof(float), "params");
    model->set = in_place ? model->params : (float*)check_alloc(elements, sizeof(float), "params");
    set_part(model);
}

// Takes a whole model apart, and puts it together in some ranks.
static void take_and_put(const MapOf* of, int in_place) {
    static Model models[MOST_RANKS];
    const int size = map_test_ranks(of), writers[] = {0, size - 1, size / 2};
    const WholeGroups layout = whole_groups(of, sizeof(float));
    float* whole = whole_model(&layout, of->whole);
    for (int r = 0; r < size; r++) {
        models[r].layout = &layout;
        models[r].whole = whole;
        open_rank(&models[r], of, r, in_place);
    }
    for (int w = 0; w < 3 && !test_failures_; w++) {
        for (int r = 0; r < size; r++) {
            models[r].writer = writers[w];
            pthread_create(&models[r].thread, NULL, get_whole, &models[r]);
        }
        for (int r = 0; r < size; r++) {
            pthread_join(models[r].thread, NULL);
        }
    }
    for (int r = 0; r < size; r++) {
        free(models[r].params);
        free(in_place ? NULL : models[r].set);
        memory_close(&models[r].memory);
    }
    free(whole);
}

SERIAL_TEST(parts_whole_groups) {
    int tried = 0;
    for (uint64_t seed = 1; tried < 30 && !test_failures_; seed++) {
        Rand random = rand_open(seed, 3);
        const MapOf of = map_test_settings(&random);
        if (!map_is_plain(&of)) {
            tried++;
            take_and_put(&of, (int)(seed % 2));
            if (test_failures_) {
                fprintf(stderr, "seed %d: %s, t %d, W %d, P %d, e %d, stage %d\n", (int)seed,
                        model_architecture(of.whole.arch)->word, of.tensor, of.data, of.pipeline, of.experts,
                        of.stage);
            }
        }
    }
}

// ---- 8 bits ----

// A model in 8 bits, from fp32 values that are laid out by its rows.
typedef struct {
    ModelConfig cfg;
    TensorRow floats[MODEL_PARAMETER_ROWS], rows[MODEL_PARAMETER_ROWS];
    char *from, *memory;
} Quantized;

static Quantized quantized_of(ModelConfig cfg) {
    Quantized q = {.cfg = cfg};
    q.from = (char*)check_alloc(model_parameter_rows_of(q.floats, cfg, sizeof(float)), 1, "fp32");
    q.memory = (char*)check_alloc(quantized_parameter_rows(q.rows, cfg, sizeof(float)), 1, "8 bits");
    return q;
}

static void quantize(Quantized* q) {
    for (int g = 0; g < model_groups(q->cfg); g++) {
        const char* group = q->from + tensor_group_offset_bytes(q->floats, g);
        quantized_set_group_cpu(q->rows, q->memory, q->cfg, g, (const float*)(const void*)group);
    }
}

// A tensor rank's part has the blocks, and the numbers, of the whole model.
TEST(parts_quantized) {
    MapOf of = map_of_model((ModelConfig){.max_T = 8, .V = 100, .Vp = 128, .L = 2, .NH = 2, .C = 64});
    of.tensor = 2;
    const WholeGroups layout = whole_groups(&of, sizeof(float));
    Model model = {.layout = &layout, .whole = whole_model(&layout, of.whole)};
    open_rank(&model, &of, 1, 0);
    Quantized whole = quantized_of(of.whole), part = quantized_of(model.map.cfg);
    free(whole.from);
    whole.from = (char*)(void*)model.whole;
    memcpy(part.from, model.set, bucket_begin(&model.map, model.map.num_buckets) * sizeof(float));
    quantize(&whole);
    quantize(&part);
    for (int i = 0; i < model.map.num_shards; i++) {
        const Shard *s = &model.map.shards[i], *first = map_find(&model.map, s->tensor, s->layer);
        const TensorRow* to = &whole.rows[s->tensor];
        const int k = s->layer < 0 ? 0 : s->layer;
        const size_t step = quantized_is_matrix(&part.floats[s->tensor]) ? QUANTIZED_BLOCK : 1,
                     bytes = to->element_bytes;
        for (size_t e = 0; e < s->piece.count; e += step) {
            const char *here = (char*)tensor_at_layer(&part.rows[s->tensor], part.memory, k) +
                               (s->offset - first->offset + e) / step * bytes,
                       *there = (char*)tensor_at_layer(to, whole.memory, k) + number_of(s, e) / step * bytes;
            EXPECT(memcmp(here, there, bytes) == 0, "%s, layer %d, element %zu", to->name, s->layer, e);
        }
    }
    free(whole.from), free(whole.memory);
    free(part.from), free(part.memory);
    free(model.params), free(model.set);
    memory_close(&model.memory);
}
