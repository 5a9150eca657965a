// state_test.h -- optimizer state out of a checkpoint, into memory.
#ifndef STATE_TEST_H
#define STATE_TEST_H

#include "llmc/base/check.h"
#include "llmc/checkpoint/optimizer_parts.h"

// Reads all slots into new memory, which was NaN before; sets and returns the memory of the state.
static char* state_read(CheckpointParts* parts, int groups) {
    OptimizerState* state = &parts->own.state;
    char* memory = (char*)check_alloc(state->bytes + 1, 1, "state");
    state->memory = memset(memory, 0xFF, state->bytes); // NaN
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const StateSlot* s = &state->slots[slot];
        for (int g = 0; g < groups; g++) {
            checkpoint_parts_read(parts, slot, g,
                                  memory + s->offset_bytes +
                                      state_group_begin(state, slot, g) * s->element_bytes);
        }
    }
    return memory;
}

#endif
