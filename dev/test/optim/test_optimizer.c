// test_optimizer.c -- the layout of the optimizer's state: what each rank has of every slot.
#include <stdlib.h>

#include "llmc/optim/optimizer.h"
#include "llmc/base/rand.h"
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
    const ZeroPlan whole = zero_plan(WIDE, 0, 0, 1);
    const double n = model_count_parameters(WIDE), C = WIDE.C, vectors = WIDE.L * 13 * C + 2 * C;
    const double rows_and_cols =
        WIDE.Vp + WIDE.max_T + 2 * C + WIDE.L * ((3 + 1 + 4 + 1) * C + (1 + 1 + 1 + 4) * C);
    for (int i = 0; i < 2 * OPTIMIZERS; i++) {
        const Optimizer optimizer = optimizer_of((OptimizerName)(i / 2), i % 2, MASTER_NONE);
        const double wanted = bytes_wanted(optimizer, n, vectors, rows_and_cols);
        OptimizerState state;
        optimizer_state_open(&state, optimizer, &whole, WIDE);
        EXPECT(optimizer_saved_bytes(optimizer, WIDE) == wanted, "%s: %.0f bytes in files, wanted %.0f",
               optimizer_word(optimizer.name), optimizer_saved_bytes(optimizer, WIDE), wanted);
        EXPECT(state.saved_bytes == state.bytes && (double)state.bytes >= wanted &&
                   (double)state.bytes < wanted + 8 * 1024 * (2 + 16 * WIDE.L + 2),
               "%s: %zu bytes in memory", optimizer_word(optimizer.name), state.bytes);
    }
    for (int master = MASTER_FP32; master <= MASTER_24; master++) {
        OptimizerState with;
        optimizer_state_open(&with, optimizer_of(OPTIMIZER_ADAMW, 0, (MasterWeights)master), &whole, ODD);
        const size_t bytes = master == MASTER_FP32 ? 4 : master == MASTER_SPLIT ? 2 : 1;
        EXPECT(with.bytes > with.saved_bytes, "master weights are saved with the state");
        EXPECT(with.slots[state_master_slot((MasterWeights)master)].bytes ==
                   with.slots[STATE_M].bytes / sizeof(float) * bytes,
               "%zu bytes of a master weight", bytes);
    }
}

// Frozen parameters have no state, but master weights.
static void test_frozen(void) {
    const ZeroPlan whole = zero_plan(WIDE, 0, 0, 1);
    const size_t padded = (WIDE.Vp * 64 + 1023) / 1024 * 1024 + (WIDE.max_T * 64 + 1023) / 1024 * 1024;
    Optimizer optimizer = optimizer_of(OPTIMIZER_ADAMW, 0, MASTER_SPLIT);
    OptimizerState all, some;
    optimizer_state_open(&all, optimizer, &whole, WIDE);
    optimizer.frozen = 3; // wte and wpe
    optimizer_state_open(&some, optimizer, &whole, WIDE);
    EXPECT(all.slots[STATE_M].bytes - some.slots[STATE_M].bytes == padded * sizeof(float),
           "%zu bytes less of m, wanted those of %zu elements",
           all.slots[STATE_M].bytes - some.slots[STATE_M].bytes, padded);
    EXPECT(all.slots[STATE_LOWER].bytes == some.slots[STATE_LOWER].bytes, "frozen weights lose bits");
}

// One process of several, with frozen rows, which are in the frozen parts, and frozen blocks.
static ZeroPlan frozen_plan(ModelConfig cfg, int stage, int rank, int size, unsigned frozen, int first) {
    ZeroPlan zero = zero_plan(cfg, stage, rank, size);
    zero_plan_freeze(&zero, cfg, frozen, first);
    return zero;
}

// Marks `count` elements of a slot, of group g.
static void mark(char* taken, const OptimizerState* state, int slot, int g, size_t begin, size_t count) {
    const StateSlot* s = &state->slots[slot];
    const size_t first = state_group_begin(state, slot, g);
    EXPECT((begin + count) * s->element_bytes <= s->bytes, "slot %d ends before %zu", slot, begin + count);
    EXPECT(slot >= STATE_MASTER ||
               (begin >= first && begin + count <= first + state_group_elements(state, slot, g)),
           "slot %d: elements of group %d lie elsewhere", slot, g);
    for (size_t i = 0; i < count; i++) {
        EXPECT(!taken[begin + i], "slot %d: element %zu belongs to two", slot, begin + i);
        taken[begin + i] = 1;
    }
}

// Returns true if this rank has elements of a slot for a range. Frozen blocks have no moments.
static int has_slot(const OptimizerState* state, int slot, const ZeroPlan* zero, const ZeroRange* range) {
    return state_slot_has(state, slot, range->row) && !state_slot_is_whole(state, slot, range->row) &&
           (slot >= STATE_MASTER || zero_has_gradient(zero, range->group));
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

typedef struct {
    int slot;
    char* taken;
} Marks;

static void mark_matrix(const OptimizerState* state, OwnedMatrix x, void* context) {
    const Marks* marks = (const Marks*)context;
    const size_t count = state_matrix_elements(state, marks->slot, x.of);
    if (count > 0) {
        mark(marks->taken, state, marks->slot, state_matrix_group(state, x),
             state_matrix_begin(state, marks->slot, x), count);
    }
}

// A rank has, in each slot, its ranges in the order of memory and its matrices, without overlaps; a
// range of owned elements is a range of every slot. The first blocks may be frozen.
static void test_places(Optimizer optimizer, ModelConfig cfg, int stage, int size, int rank, int first) {
    const ZeroPlan zero = frozen_plan(cfg, stage, rank, size, optimizer.frozen, first);
    OptimizerState state;
    optimizer_state_open(&state, optimizer, &zero, cfg);
    ZeroRange* ranges = (ZeroRange*)check_alloc((size_t)zero_max_ranges(cfg), sizeof(ZeroRange), "ranges");
    const int count = zero_ranges(&zero, state.rows, cfg, ranges);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const StateSlot* s = &state.slots[slot];
        char* taken = (char*)check_alloc(s->bytes / s->element_bytes + 1, 1, "elements");
        Marks marks = {slot, taken};
        state.memory = taken;
        visit_matrices(&state, mark_matrix, &marks);
        for (int i = 0; i < count; i++) {
            if (has_slot(&state, slot, &zero, &ranges[i])) {
                const size_t begin = state_begin(&state, slot, &ranges[i]);
                mark(taken, &state, slot, ranges[i].group, begin,
                     state_slot_elements(&state, slot, ranges[i].row, ranges[i].count));
                EXPECT(state_position(&state, slot, &zero, ranges[i].owned) == begin,
                       "%s, slot %d: where %s begins", WORDS[optimizer.name], slot,
                       state.rows[ranges[i].row].name);
            }
        }
        size_t last = 0;
        const int is_cut = optimizer.name != OPTIMIZER_ADAFACTOR &&
                           optimizer.name != OPTIMIZER_SOAP && // anywhere
                           (s->shape == SLOT_ELEMENTS || s->shape == SLOT_BLOCKS);
        for (size_t at = 0; is_cut && at < zero_count(&zero, ZERO_OWNED); at += 128) {
            const size_t position = state_position(&state, slot, &zero, at);
            EXPECT(position >= last && position <= last + 128, "slot %d jumps at %zu", slot, at);
            last = position;
        }
        free(taken);
    }
    free(ranges);
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
        const ZeroPlan zero = zero_plan(cfg, stage, rank, size);
        OptimizerState state;
        Dealt dealt = {owners, 0, 0};
        optimizer_state_open(&state, optimizer_of(name, 0, MASTER_NONE), &zero, cfg);
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

static unsigned frozen_rows(void) { return freeze_of(WIDE, "qkvw,fcw").rows; }

// Matrices of a parameter, by their first rows and their rows.
typedef struct {
    const ModelConfig* cfg;
    const char* name;
    int first[6], rows[6], count;
} MuonRuns;

static void test_muon_runs(const MuonRuns* of) {
    const ZeroPlan zero = zero_plan(*of->cfg, 0, 0, 1);
    OptimizerState state;
    optimizer_state_open(&state, optimizer_of(OPTIMIZER_MUON, 1, MASTER_NONE), &zero, *of->cfg);
    state.memory = check_alloc(state.bytes, 1, "state");
    ZeroRange* ranges =
        (ZeroRange*)check_alloc((size_t)zero_max_ranges(*of->cfg), sizeof(ZeroRange), "ranges");
    const int count = zero_ranges(&zero, state.rows, *of->cfg, ranges);
    MatmulScratch matmul;
    Memory memory = memory_on_host();
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
    int r = 0;
    while (r < count && &state.rows[ranges[r].row] != row) {
        r++;
    }
    optimizer_update_cpu(&state, &ranges[r], got, g, u, &scratch);
    for (int k = 0; k < of->count; k++) {
        const size_t first = (size_t)of->first[k], rows = (size_t)of->rows[k], at = first * C;
        const MuonMatrix x = {want + at, g + at, m + at, squares + first, rows, C, NULL};
        muon_update_cpu(x, update_muon(u), &scratch);
    }
    EXPECT(memcmp(got, want, n * 4) == 0, "%s", of->name);
    free(got), free(want), free(g), free(m), free(squares);
    memory_close(&memory);
    free(scratch.memory), free(ranges), free(state.memory);
}

// Muon updates the matrices of queries, keys, values, gate and up, and of each expert, one by one,
// whatever their sizes are: each as if it were alone.
TEST(muon_runs) {
    static const MuonRuns cases[] = {
        {&LLAMA, "qkvw", {0, 128, 160}, {128, 32, 32}, 3},
        {&LLAMA, "fcw", {0, 192}, {192, 192}, 2},
        {&EXPERTS, "fcw", {0, 128, 256, 384, 512, 640}, {128, 128, 128, 128, 128, 128}, 6},
        {&EXPERTS, "fcprojw", {0, 64, 128}, {64, 64, 64}, 3},
        {&EXPERTS, "sfcw", {0, 64}, {64, 64}, 2}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        test_muon_runs(&cases[i]);
    }
}

// A matrix of the classifier's own and a router have AdamW under Muon and SOAP; a router's bias has
// no rule and no state.
TEST(rules_of_kinds) {
    const ZeroPlan zero = zero_plan(EXPERTS, 0, 0, 1);
    for (int i = 0; i < OPTIMIZERS; i++) {
        Optimizer optimizer = optimizer_of((OptimizerName)i, 1, MASTER_NONE);
        const int mixes = i == OPTIMIZER_MUON || i == OPTIMIZER_SOAP;
        OptimizerState state;
        EXPECT(!mixes || (optimizer_rule(optimizer, KIND_HEAD) == RULE_ADAMW &&
                          optimizer_rule(optimizer, KIND_ROUTER) == RULE_ADAMW),
               "%s: head, router", WORDS[i]);
        EXPECT(optimizer_rule(optimizer, KIND_FIXED) == RULE_NONE, "%s: what is fixed", WORDS[i]);
        optimizer.frozen = freeze_of(EXPERTS, "").rows;
        optimizer_state_open(&state, optimizer, &zero, EXPERTS);
        for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
            const int is_fixed = strcmp(state.rows[r].name, "routerb") == 0;
            EXPECT(is_fixed == (int)(optimizer.frozen >> r & 1), "%s is frozen", state.rows[r].name);
            EXPECT(!is_fixed || state.slots_of[r] == 0, "%s: %s has state", WORDS[i], state.rows[r].name);
        }
    }
}

TEST(optimizer) {
    test_slots();
    test_frozen();
    for (int i = 0; i < OPTIMIZERS; i++) {
        const OptimizerName name = (OptimizerName)i;
        for (int size = 1; size <= 5; size++) {
            Optimizer optimizer = optimizer_of(name, 1, MASTER_SPLIT);
            test_places(optimizer, WIDE, 0, size, size - 1, 0);
            test_places(optimizer, LLAMA, 1 + size % 2, size, size / 2, 0);
            optimizer.frozen = freeze_of(EXPERTS, "").rows;
            test_places(optimizer, EXPERTS, 1 + size % 3, size, size / 2, 0);
            optimizer.frozen = freeze_of(WIDE, "wte,ln1w,qkvb").rows;
            test_places(optimizer, name == OPTIMIZER_ADAMW8BIT ? WIDE : ODD, 2, size, size / 2, size % 3);
        }
    }
    Optimizer sides = optimizer_of(OPTIMIZER_SOAP, 0, MASTER_NONE);
    sides.soap_max_side = 64; // not those of the MLP's hidden layer
    test_places(sides, WIDE, 2, 3, 1, 0);
    Optimizer average = optimizer_of(OPTIMIZER_SOAP, 0, MASTER_NONE);
    average.average.is_kept = 1;
    test_places(average, WIDE, 2, 3, 1, 0);
    average.name = OPTIMIZER_ADAFACTOR;
    average.frozen = frozen_rows();
    test_places(average, WIDE, 2, 3, 1, 1);
}
