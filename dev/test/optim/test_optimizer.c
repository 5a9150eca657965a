// test_optimizer.c -- the layout of the optimizer's state: what each rank has of every slot.
#include <stdlib.h>

#include "llmc/optim/optimizer.h"
#include "llmc/base/rand.h"
#include "dev/test/lib/map_test.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/test_element.h"

static const ModelConfig ODD = {7, 131, 201, 3, 3, 33, SHARE_OFF},
                         WIDE = {7, 131, 201, 3, 2, 64, SHARE_OFF}; // blocks of 64

// Fewer keys than queries, a gate, a classifier of its own, no biases: 4 Q, 2 K of 16.
// clang-format off
static const ModelConfig LLAMA = {
    .max_T = 7, .V = 131, .Vp = 256, .L = 3, .NH = 8, .C = 64,
    .arch = ARCH_LLAMA, .KV = 2, .HS = 16, .F = 192, .has_head = 1};

// Three experts, of which a token takes two, and one that all tokens take.
static const ModelConfig EXPERTS = {
    .max_T = 7, .V = 131, .Vp = 256, .L = 3, .NH = 4, .C = 64,
    .arch = ARCH_GLM4MOE, .F = 128, .E = 3, .E_used = 2, .Fs = 64};
// clang-format on

static const char* const WORDS[] = {OPTIMIZER_WORDS(WORDS_NAME)};
enum { OPTIMIZERS = sizeof(WORDS) / sizeof(WORDS[0]) };

// State of a model in files, by its formula: of n parameters, `vectors` of which are biases and
// norms.
static double bytes_wanted(Optimizer o, double n, double vectors, double rows_and_cols) {
    const double matrices = n - vectors;
    switch (o.name) {
    case OPTIMIZER_ADAMW:
        return 8 * n;
    case OPTIMIZER_ADAMW8BIT:
        return 2 * matrices * (1 + 4.0 / 64) + 8 * vectors;
    case OPTIMIZER_ADAFACTOR:
        return 4 * rows_and_cols + 4 * vectors + (o.has_optional ? 4 * n : 0);
    case OPTIMIZER_MUON:
        return 4 * n + 4 * (vectors + (double)(WIDE.V + WIDE.max_T) * WIDE.C) +
               (o.has_optional ? 4 * 9.0 * WIDE.L * WIDE.C : 0);
    case OPTIMIZER_SOAP: { // q, k and v, and the projection of attention; the MLP's two
        const double C = WIDE.C, squares = 4 * 2 * C * C + 2 * 17 * C * C;
        return 8 * n + 2 * 4 * squares * WIDE.L;
    }
    default:
        return o.name == OPTIMIZER_LION || o.has_optional ? 4 * n : 0;
    }
}

static void test_slots(void) {
    const MapOf whole = map_of_model(WIDE), odd = map_of_model(ODD);
    const double n = model_count_parameters(WIDE), C = WIDE.C, vectors = WIDE.L * 13 * C + 2 * C;
    const double rows_and_cols =
        WIDE.Vp + WIDE.max_T + 2 * C + WIDE.L * ((3 + 1 + 4 + 1) * C + (1 + 1 + 1 + 4) * C);
    Memory memory = memory_on_host();
    OptimizerState state;
    Map m;
    for (int i = 0; i < 2 * OPTIMIZERS; i++) {
        const Optimizer optimizer = optimizer_of((OptimizerName)(i / 2), i % 2, MASTER_NONE);
        const double wanted = bytes_wanted(optimizer, n, vectors, rows_and_cols);
        map_test_state(&state, &m, &memory, whole, 0, optimizer);
        EXPECT(optimizer_saved_bytes(optimizer, WIDE) == wanted, "%s: %.0f bytes in files, wanted %.0f",
               optimizer_word(optimizer.name), optimizer_saved_bytes(optimizer, WIDE), wanted);
        EXPECT(state.saved_bytes == state.bytes && (double)state.bytes >= wanted &&
                   (double)state.bytes < wanted + 8 * 1024 * (2 + 16 * WIDE.L + 2),
               "%s: %zu bytes in memory", optimizer_word(optimizer.name), state.bytes);
    }
    for (int master = MASTER_FP32; master <= MASTER_24; master++) {
        map_test_state(&state, &m, &memory, odd, 0, optimizer_of(OPTIMIZER_ADAMW, 0, (MasterWeights)master));
        const size_t bytes = master == MASTER_FP32 ? 4 : master == MASTER_SPLIT ? 2 : 1;
        EXPECT(state.bytes > state.saved_bytes, "master weights are saved with the state");
        EXPECT(state.slots[state_master_slot((MasterWeights)master)].bytes ==
                   state.slots[STATE_M].bytes / sizeof(float) * bytes,
               "%zu bytes of a master weight", bytes);
    }
    memory_close(&memory);
}

// Frozen parameters have no state, but master weights.
static void test_frozen(void) {
    const size_t padded = (WIDE.Vp * 64 + 1023) / 1024 * 1024 + (WIDE.max_T * 64 + 1023) / 1024 * 1024;
    const Optimizer optimizer = optimizer_of(OPTIMIZER_ADAMW, 0, MASTER_SPLIT);
    MapOf of = map_of_model(WIDE);
    Memory memory = memory_on_host();
    OptimizerState all, some;
    Map m;
    map_test_state(&all, &m, &memory, of, 0, optimizer);
    of.freeze = freeze_of(WIDE, "wte,wpe");
    map_test_state(&some, &m, &memory, of, 0, optimizer);
    EXPECT(all.slots[STATE_M].bytes - some.slots[STATE_M].bytes == padded * sizeof(float),
           "%zu bytes less of m, wanted those of %zu elements",
           all.slots[STATE_M].bytes - some.slots[STATE_M].bytes, padded);
    EXPECT(all.slots[STATE_LOWER].bytes == some.slots[STATE_LOWER].bytes, "frozen weights lose bits");
    EXPECT(some.slots[STATE_LOWER].frozen == padded, "%zu frozen master weights",
           some.slots[STATE_LOWER].frozen);
    memory_close(&memory);
}

// Marks `count` elements of a slot.
static void mark(const OptimizerState* state, int slot, void* elements, size_t count) {
    const StateSlot* s = &state->slots[slot];
    char *begin = (char*)state->memory + s->offset_bytes, *at = (char*)elements,
         *end = at + count * s->element_bytes;
    EXPECT(begin <= at && end <= begin + s->bytes, "slot %d ends before byte %td", slot, end - begin);
    for (; at < end && at < begin + s->bytes; at++) {
        EXPECT(!*at, "slot %d: byte %td belongs to two", slot, at - begin);
        *at = 1;
    }
}

// Calls for the matrices that a rank owns.
typedef void (*MatrixVisit)(const OptimizerState* state, OwnedMatrix x, void* context);

static void visit_matrices(const OptimizerState* state, MatrixVisit visit, void* context) {
    for (int k = 0; k < state->num_matrices; k++) {
        const Matrices* m = &state->matrices[k];
        for (size_t i = 0; i < matrices_all(m); i++) {
            const OwnedMatrix x = {m, m->first_copy + (int)i / m->count, (int)i % m->count};
            if (matrix_is_owned(x)) {
                visit(state, x, context);
            }
        }
    }
}

static void mark_matrix(const OptimizerState* state, OwnedMatrix x, void* context) {
    (void)context;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t count = state_matrix_elements(state, slot, x.of);
        if (count > 0) {
            mark(state, slot, state_matrix(state, slot, x), count);
        }
    }
}

// Marks what a range has of each slot, and adds up the elements. Frozen ones have no moments.
static void mark_range(const OptimizerState* state, const MapRange* range, size_t sums[STATE_SLOTS]) {
    const int row = range->shard->tensor,
              is_trained = state->map->buckets[range->shard->bucket].kind == MAP_TRAINED;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t per = state->slots[slot].shape == SLOT_BLOCKS ? MAP_BLOCK : 1;
        char* elements = (char*)state_range(state, slot, range);
        const int has = state_slot_has(state, slot, row) && !state_slot_is_whole(state, slot, row) &&
                        (slot >= STATE_MASTER || is_trained);
        EXPECT((elements != NULL) == has, "slot %d of %s", slot, state->rows[row].name);
        if (has) {
            const MapRange half = map_part_of_range(*range, range->before + 64, range->count);
            mark(state, slot, elements, range->count / per);
            sums[slot] += range->count;
            EXPECT(half.count == 0 || (char*)state_range(state, slot, &half) ==
                                          elements + 64 / per * state->slots[slot].element_bytes,
                   "a part of %s in slot %d", state->rows[row].name, slot);
        }
    }
}

// A rank has, in each slot, its ranges and its matrices, without overlaps, and little padding.
static void test_places(Optimizer optimizer, ModelConfig cfg, const char* freeze, int stage, int size,
                        int rank) {
    MapOf of = map_of_model(cfg);
    Memory memory = memory_on_host();
    OptimizerState state;
    Map m;
    size_t sums[STATE_SLOTS] = {0};
    of.freeze = freeze_of(cfg, freeze);
    of.stage = stage;
    of.data = of.replica = size;
    map_test_state(&state, &m, &memory, of, rank, optimizer);
    state.memory = memory_take(&memory, "state", MEMORY_HOST, state.bytes);
    visit_matrices(&state, mark_matrix, NULL);
    for (const Bucket* b = m.buckets; b < m.buckets + m.num_buckets; b++) {
        MapRange range = {NULL, 0, 0, 0};
        while (map_next_range(&m, b, MAP_OWNED, &range)) {
            mark_range(&state, &range, sums);
        }
    }
    const size_t padding = (size_t)(size * m.num_buckets + m.num_shards) * 1024;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const StateSlot* s = &state.slots[slot];
        const size_t per = s->shape == SLOT_BLOCKS ? MAP_BLOCK : 1, all = s->bytes / s->element_bytes * per;
        EXPECT(sums[slot] == 0 || (sums[slot] <= all && all <= sums[slot] + padding),
               "%s, slot %d: %zu of %zu elements", WORDS[optimizer.name], slot, sums[slot], all);
    }
    memory_close(&memory);
}

// Counts a matrix, and its elements.
typedef struct {
    int *owners, count;
    double elements;
} Dealt;

static void count_matrix(const OptimizerState* state, OwnedMatrix x, void* context) {
    Dealt* dealt = (Dealt*)context;
    (void)state;
    dealt->owners[(x.of - state->matrices) * 4096 + x.copy * 64 + x.number]++;
    dealt->count++;
    dealt->elements += (double)matrix_elements(x);
}

// Each matrix has one owner, and no rank has more than the mean and one matrix.
static void test_owners(OptimizerName name, ModelConfig cfg, int size, int stage) {
    int* owners = (int*)check_alloc(MATRICES_MOST * 4096, sizeof(int), "owners");
    double all = 0, most = 0, largest = 0;
    int count = 0, wanted = 0;
    for (int rank = 0; rank < size; rank++) {
        MapOf of = map_of_model(cfg);
        Memory memory = memory_on_host();
        OptimizerState state;
        Map m;
        Dealt dealt = {owners, 0, 0};
        of.stage = stage;
        of.data = of.replica = size;
        map_test_state(&state, &m, &memory, of, rank, optimizer_of(name, 0, MASTER_NONE));
        visit_matrices(&state, count_matrix, &dealt);
        count += dealt.count;
        all += dealt.elements;
        most = dealt.elements > most ? dealt.elements : most;
        wanted = 0;
        for (int k = 0; k < state.num_matrices; k++) {
            const double elements = (double)(state.matrices[k].rows * state.matrices[k].cols);
            wanted += (int)matrices_all(&state.matrices[k]);
            largest = elements > largest ? elements : largest;
        }
        memory_close(&memory);
    }
    const int each = stage == 0 ? size : 1;
    EXPECT(count == each * wanted, "%s, %d ranks: %d owners of %d matrices", optimizer_word(name), size,
           count, wanted);
    for (int i = 0; i < MATRICES_MOST * 4096; i++) {
        EXPECT(owners[i] == 0 || owners[i] == each, "a matrix has %d owners", owners[i]);
    }
    EXPECT(most <= all / size + 2 * largest, "%s, %d ranks: one has %.0f of %.0f elements",
           optimizer_word(name), size, most, all);
    free(owners);
}

TEST(owners) {
    for (int size = 1; size <= 9; size++) {
        test_owners(OPTIMIZER_MUON, WIDE, size, 2);
        test_owners(OPTIMIZER_ADAFACTOR, LLAMA, size, 1);
        test_owners(OPTIMIZER_SOAP, EXPERTS, size, 2);
        test_owners(OPTIMIZER_MUON, LLAMA, size, 0);
    }
}

// Matrices of a parameter, by their first rows and their rows.
typedef struct {
    const ModelConfig* cfg;
    const char* name;
    int first[6], rows[6], count;
} MuonRuns;

static void test_muon_runs(const MuonRuns* of) {
    OptimizerState state;
    MatmulScratch matmul;
    Memory memory = memory_on_host();
    Map map;
    map_test_state(&state, &map, &memory, map_of_model(*of->cfg), 0,
                   optimizer_of(OPTIMIZER_MUON, 1, MASTER_NONE));
    state.memory = memory_take(&memory, "state", MEMORY_HOST, state.bytes);
    matmul_open(&matmul, &memory);
    const MuonScratch scratch = {check_alloc(optimizer_scratch_bytes(&state), 1, "scratch"), &matmul};
    const Update u = {.grad_scale = 1, .t = 1, .muon_lr = 0.1f, .muon_weight_decay = 0.1f};
    const TensorRow* row = row_called(state.rows, MODEL_PARAMETER_ROWS, of->name);
    const size_t n = tensor_layer_elements(row), C = row->cols;
    float *got = check_alloc(n, 4, "got"), *want = check_alloc(n, 4, "want"), *g = check_alloc(n, 4, "g"),
          *m = check_alloc(n, 4, "m"), *squares = check_alloc(row->rows, 4, "squares");
    for (size_t k = 0; k < n; k++) {
        got[k] = want[k] = rand_normal(1, 2, k), g[k] = rand_normal(3, 4, k);
    }
    const MapRange range = map_range(&map, (int)(row - state.rows), 0, MAP_OWNED);
    EXPECT(range.count == n, "%zu elements of %s", range.count, of->name);
    optimizer_update_cpu(&state, &range, got, g, u, &scratch);
    for (int k = 0; k < of->count; k++) {
        const size_t first = (size_t)of->first[k], rows = (size_t)of->rows[k], at = first * C;
        const MuonMatrix x = {want + at, g + at, {m + at, NULL, NULL}, squares + first, rows, C, NULL};
        muon_update_cpu(x, update_muon(u), &scratch);
    }
    EXPECT(memcmp(got, want, n * 4) == 0, "%s", of->name);
    free(got), free(want), free(g), free(m), free(squares);
    memory_close(&memory);
    free(scratch.memory);
}

// Muon updates the matrices of queries, keys, values, gate and up, and of each expert, one by one,
// whatever their sizes are: each as if it were alone.
TEST(muon_runs) {
    static const MuonRuns cases[] = {
        {&LLAMA, "qkvw", {0, 128, 160}, {128, 32, 32}, 3},
        {&LLAMA, "fcw", {0, 192}, {192, 192}, 2},
        {&EXPERTS, "efcw", {0, 128, 256, 384, 512, 640}, {128, 128, 128, 128, 128, 128}, 6},
        {&EXPERTS, "efcprojw", {0, 64, 128}, {64, 64, 64}, 3},
        {&EXPERTS, "sfcw", {0, 64}, {64, 64}, 2}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        test_muon_runs(&cases[i]);
    }
}

// A matrix of the classifier's own and a router have AdamW under Muon and SOAP; a router's bias has
// no rule and no state.
TEST(rules_of_kinds) {
    for (int i = 0; i < OPTIMIZERS; i++) {
        Optimizer optimizer = optimizer_of((OptimizerName)i, 1, MASTER_NONE);
        const int mixes = i == OPTIMIZER_MUON || i == OPTIMIZER_SOAP;
        OptimizerState state;
        EXPECT(!mixes || (optimizer_rule(optimizer, KIND_HEAD) == RULE_ADAMW &&
                          optimizer_rule(optimizer, KIND_ROUTER) == RULE_ADAMW),
               "%s: head, router", WORDS[i]);
        EXPECT(optimizer_rule(optimizer, KIND_FIXED) == RULE_NONE, "%s: what is fixed", WORDS[i]);
        optimizer.frozen = freeze_of(EXPERTS, "").rows;
        optimizer_layout(&state, optimizer, EXPERTS);
        for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
            const int is_fixed = strcmp(state.rows[r].name, "routerb") == 0;
            EXPECT(is_fixed == (int)(optimizer.frozen >> r & 1), "%s is frozen", state.rows[r].name);
            EXPECT(!is_fixed || state.slots_of[r] == 0, "%s: %s has state", WORDS[i], state.rows[r].name);
        }
    }
}

TEST(optimizer) {
    static const char* const frozen[] = {"wte,ln1w,qkvb", "wte,ln1w,qkvb,blocks[0]",
                                         "wte,ln1w,qkvb,blocks[0-1]"};
    test_slots();
    test_frozen();
    for (int i = 0; i < OPTIMIZERS; i++) {
        const OptimizerName name = (OptimizerName)i;
        for (int size = 1; size <= 5; size++) {
            const Optimizer optimizer = optimizer_of(name, 1, MASTER_SPLIT);
            test_places(optimizer, WIDE, "", 0, size, size - 1);
            test_places(optimizer, LLAMA, "", 1 + size % 2, size, size / 2);
            test_places(optimizer, EXPERTS, "", 1 + size % 3, size, size / 2);
            test_places(optimizer, name == OPTIMIZER_ADAMW8BIT ? WIDE : ODD, frozen[size % 3], 2, size,
                        size / 2);
        }
    }
    Optimizer sides = optimizer_of(OPTIMIZER_SOAP, 0, MASTER_NONE);
    sides.soap_max_side = 64; // not those of the MLP's hidden layer
    test_places(sides, WIDE, "", 2, 3, 1);
    Optimizer average = optimizer_of(OPTIMIZER_SOAP, 0, MASTER_NONE);
    average.average.is_kept = 1;
    test_places(average, WIDE, "", 2, 3, 1);
    average.name = OPTIMIZER_ADAFACTOR;
    test_places(average, WIDE, "qkvw,fcw,blocks[0]", 2, 3, 1);
}
