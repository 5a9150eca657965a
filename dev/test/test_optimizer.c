// test_optimizer.c -- where the optimizer's state lies: what every process has of every slot, and what it saves and reads.
#include <stdlib.h>

#include "llmc/optimizer.h"
#include "llmc/run/checkpoint_parts.h"
#include "test.h"

static const GPT2Config ODD = {7, 131, 201, 3, 3, 33};

static Optimizer optimizer_of(OptimizerName name, int has_momentum) {
    const Optimizer optimizer = {name, has_momentum, MASTER_NONE, 0, 0};
    return optimizer;
}

static const char* const WORDS[] = {OPTIMIZER_WORDS(WORDS_NAME)};
enum { OPTIMIZERS = sizeof(WORDS) / sizeof(WORDS[0]) };

// The bytes of each slot that an optimizer has for a parameter, in units of a parameter's.
static void test_slots(void) {
    static const struct {
        OptimizerName name;
        int has_momentum;
        double bytes; // of a parameter
    } wanted[] = {
        {OPTIMIZER_ADAMW, 0, 8}, {OPTIMIZER_LION, 0, 4}, {OPTIMIZER_SGD, 1, 4}, {OPTIMIZER_SGD, 0, 0}};
    const ZeroPlan whole = zero_plan(ODD, 0, 0, 1);
    for (int i = 0; i < 4; i++) {
        const Optimizer optimizer = optimizer_of(wanted[i].name, wanted[i].has_momentum);
        OptimizerState state;
        optimizer_state_open(&state, optimizer, &whole, ODD);
        EXPECT((double)state.bytes == wanted[i].bytes * (double)zero_full_elements(&whole) &&
                   state.saved_bytes == state.bytes,
               "%s: %zu bytes", optimizer_word(wanted[i].name), state.bytes);
        EXPECT(optimizer_saved_bytes(optimizer, ODD) == wanted[i].bytes * gpt2_count_parameters(ODD),
               "%s: %.0f bytes in files", optimizer_word(wanted[i].name),
               optimizer_saved_bytes(optimizer, ODD));
    }
    OptimizerState with;
    Optimizer master = optimizer_of(OPTIMIZER_ADAMW, 0);
    master.master = MASTER_FP32;
    optimizer_state_open(&with, master, &whole, ODD);
    EXPECT(with.bytes == with.saved_bytes + zero_full_elements(&whole) * sizeof(float),
           "master weights are not saved");
}

// Marks what a range has of a slot; ends where it began elsewhere.
static void mark(char* taken, const OptimizerState* state, int slot, const ZeroRange* range) {
    const size_t begin = state_begin(state, slot, range),
                 count = state_slot_elements(state, slot, range->row, range->count);
    const StateSlot* s = &state->slots[slot];
    EXPECT((begin + count) * s->element_bytes <= s->bytes, "slot %d ends before %zu", slot, begin + count);
    EXPECT(begin >= state_group_begin(s, range->group) &&
               begin + count <= state_group_begin(s, range->group) + state_group_elements(s, range->group),
           "slot %d: a range leaves its group", slot);
    for (size_t i = 0; i < count; i++) {
        EXPECT(!taken[begin + i], "slot %d: element %zu belongs to two", slot, begin + i);
        taken[begin + i] = 1;
    }
}

// What a process has of each slot: its ranges in order of memory, none on another; and a range of owned elements is one of
// every slot.
static void test_places(OptimizerName name, int stage, int size, int rank) {
    const ZeroPlan zero = zero_plan(ODD, stage, rank, size);
    OptimizerState state;
    optimizer_state_open(&state, optimizer_of(name, 1), &zero, ODD);
    ZeroRange* ranges = (ZeroRange*)check_alloc((size_t)zero_max_ranges(ODD), sizeof(ZeroRange), "ranges");
    const int count = zero_ranges(&zero, state.rows, ODD, ranges);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const StateSlot* s = &state.slots[slot];
        char* taken = (char*)check_alloc(s->bytes / s->element_bytes + 1, 1, "elements");
        for (int i = 0; i < count; i++) {
            EXPECT(!state_array(&state, slot, &ranges[i], taken) ==
                       !state_slot_has(&state, slot, ranges[i].row),
                   "slot %d of %s", slot, state.rows[ranges[i].row].name);
            if (state_slot_has(&state, slot, ranges[i].row)) {
                mark(taken, &state, slot, &ranges[i]);
                EXPECT(state_position(&state, slot, &zero, ranges[i].owned) ==
                           state_begin(&state, slot, &ranges[i]),
                       "%s, slot %d: where %s begins", WORDS[name], slot, state.rows[ranges[i].row].name);
            }
        }
        size_t last = 0;
        for (size_t at = 0; at < zero_owned_elements(&zero); at += 128) {
            const size_t position = state_position(&state, slot, &zero, at);
            EXPECT(position >= last && position <= last + 128, "slot %d jumps at %zu", slot, at);
            last = position;
        }
        free(taken);
    }
    free(ranges);
}

// ---- what is saved ----

// A value that tells the element of the parameters, and the slot.
static float value_of(int slot, size_t logical) {
    return (float)(logical % 100003 + 1) + 0.125f * (float)slot;
}

// Fills or looks at what the ranges have of the fp32 slots.
static void visit(const OptimizerState* state, const ZeroRange* ranges, int count, void* memory,
                  int is_check) {
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        for (int i = 0; i < count; i++) {
            float* array = (float*)state_array(state, slot, &ranges[i], memory);
            for (size_t k = 0; array && k < ranges[i].count; k++) {
                const float value = value_of(slot, ranges[i].logical + k);
                if (is_check && array[k] != value) {
                    EXPECT(0, "element %zu of slot %d is %f, wanted %f", ranges[i].logical + k, slot,
                           array[k], value);
                    return;
                }
                array[k] = value;
            }
        }
    }
}

typedef struct {
    SavedFile files[8];
    char names[8][64];
    SavedOption options[2];
    SavedState state;
} Saved;

// Writes the state as `size` processes save it.
static void save(Saved* saved, Optimizer optimizer, int stage, int size) {
    memset(saved, 0, sizeof(*saved));
    saved->state.files = saved->files;
    saved->state.options = saved->options;
    saved->state.num_options = 2;
    saved->options[0] = (SavedOption){"optimizer", optimizer_word(optimizer.name)};
    saved->options[1] = (SavedOption){"sgd-momentum", optimizer.has_momentum ? "0.9" : "0"};
    for (int rank = 0; rank < size; rank++) {
        const ZeroPlan zero = zero_plan(ODD, stage, rank, size);
        CheckpointPart part;
        checkpoint_part_open(&part, optimizer, ODD, &zero);
        void* memory = check_alloc(part.state.bytes + 1, 1, "state");
        visit(&part.state, part.ranges, part.num_ranges, memory, 0);
        if (rank < checkpoint_part_writers(&zero)) {
            char* name = saved->names[saved->state.num_files];
            checkpoint_part_name(name, rank, checkpoint_part_writers(&zero));
            saved->files[saved->state.num_files++].name = name;
            checkpoint_part_write(&part, test_path(name), memory);
        }
        checkpoint_part_close(&part);
        free(memory);
    }
}

// Reads the state into each of `size` processes; returns the sum of all it has read.
static double load(Saved* saved, Optimizer optimizer, int stage, int size, int is_check) {
    double sum = 0;
    for (int rank = 0; rank < size; rank++) {
        const ZeroPlan zero = zero_plan(ODD, stage, rank, size);
        CheckpointParts parts;
        checkpoint_parts_open(&parts, &saved->state, test_tmpdir(), optimizer, ODD, &zero);
        const OptimizerState* state = &parts.own.state;
        char* memory = (char*)check_alloc(state->bytes + 1, 1, "state");
        memset(memory, 0xFF, state->bytes); // NaN
        for (int slot = 0; slot < STATE_SLOTS; slot++) {
            const StateSlot* s = &state->slots[slot];
            for (int g = 0; g < zero.groups; g++) {
                checkpoint_parts_read(&parts, slot, g,
                                      memory + s->offset_bytes + state_group_begin(s, g) * s->element_bytes);
            }
        }
        for (size_t i = 0; i < state->bytes / sizeof(float); i++) {
            sum += ((float*)memory)[i];
        }
        if (is_check) {
            visit(state, parts.own.ranges, parts.own.num_ranges, memory, 1);
        }
        checkpoint_parts_close(&parts);
        free(memory);
    }
    return sum;
}

// Saved by some processes, read by others.
static void test_elastic(Optimizer optimizer) {
    Saved saved;
    for (int writers = 1; writers <= 3; writers += 2) {
        for (int readers = 1; readers <= 2; readers++) {
            save(&saved, optimizer, 2, writers);
            load(&saved, optimizer, readers == 2, readers, 1);
        }
    }
}

// Another optimizer, or another number of slots, starts with zeros.
static void test_other(void) {
    Saved saved;
    save(&saved, optimizer_of(OPTIMIZER_ADAMW, 1), 0, 1);
    EXPECT(load(&saved, optimizer_of(OPTIMIZER_LION, 1), 0, 1, 0) == 0, "lion has adamw's m");
    EXPECT(load(&saved, optimizer_of(OPTIMIZER_ADAMW, 0), 0, 1, 0) > 0, "adamw has not its own");
    save(&saved, optimizer_of(OPTIMIZER_SGD, 0), 0, 1);
    EXPECT(load(&saved, optimizer_of(OPTIMIZER_SGD, 1), 0, 1, 0) == 0, "momentum from nowhere");
}

int main(void) {
    test_slots();
    for (int name = 0; name < OPTIMIZERS; name++) {
        for (int size = 1; size <= 5; size++) {
            test_places((OptimizerName)name, 0, size, size - 1);
            test_places((OptimizerName)name, 2, size, size / 2);
        }
    }
    test_elastic(optimizer_of(OPTIMIZER_ADAMW, 0));
    test_elastic(optimizer_of(OPTIMIZER_LION, 0));
    test_elastic(optimizer_of(OPTIMIZER_SGD, 0));
    test_other();
    return test_done("optimizer");
}
