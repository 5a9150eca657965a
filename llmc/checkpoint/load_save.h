/*
load_save.h -- a whole model out of files and into files: the weights it starts with (initial_weights.h), the optimizer's state of
a checkpoint (optimizer_parts.h), exports (resolve.h). The CPU's; its weights are fp32 in one memory, or also blocks of 8
bits.

    parameters   laid out by `rows`; all of them in each process
    state        what this process updates, as OptimizerState lays it out
*/
#ifndef LLMC_LOAD_SAVE_H
#define LLMC_LOAD_SAVE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/ops/q8.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/checkpoint/export.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/checkpoint/initial_weights.h"
#include "llmc/parallel/zero.h"

// ---- weights ----

static inline void model_files_set_blocks_(const void* context, void* to, const float* from,
                                           size_t elements) {
    (void)context;
    quantized_encode_matrix((QuantizedBlock*)to, from, elements);
}

static inline void model_files_set_floats_(const void* context, void* to, const float* from,
                                           size_t elements) {
    (void)context;
    memcpy(to, from, elements * sizeof(float));
}

// Sets group g of parameters whose matrices are in 8 bits; of all only this one is in memory in fp32.
static inline void model_files_read_quantized_(FirstWeights* weights, const TensorRow* rows, void* memory,
                                               int g) {
    const QuantizedParameters to = {NULL, rows, memory, model_files_set_blocks_, model_files_set_floats_};
    const ZeroPlan whole = zero_plan(weights->cfg, 0, 0, 1);
    TensorRow of_group[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(of_group, weights->cfg, sizeof(float));
    float* group =
        (float*)check_alloc(zero_group_elements(&whole, g), sizeof(float), "a group of parameters");
    weights_read(weights, of_group, g, group);
    quantized_set_group(to, g, of_group, group);
    free(group);
}

// Sets the parameters from a file or directory, or by the seed if `path` is NULL.
static inline void model_files_read_weights_cpu(ModelConfig cfg, const TensorRow* rows, void* memory,
                                                int is_quantized, const char* path, uint64_t seed) {
    FirstWeights weights;
    weights_open(&weights, cfg, path, seed);
    for (int g = 0; g < model_groups(cfg); g++) {
        if (is_quantized) {
            model_files_read_quantized_(&weights, rows, memory, g);
        } else {
            weights_read(&weights, rows, g, (char*)memory + tensor_group_offset_bytes(rows, g));
        }
    }
    weights_close(&weights);
}

// ---- the optimizer's state ----

// Sets the state of this process, at `memory`, from the checkpoint in the directory `path`.
static inline void model_files_read_state_cpu(const OptimizerState* state, void* memory, const ZeroPlan* zero,
                                              const char* path, const SavedState* saved) {
    CheckpointParts parts;
    checkpoint_parts_open(&parts, saved, path, state->optimizer, state->cfg, zero);
    for (int i = 0; i < STATE_SLOTS; i++) {
        const StateSlot* slot = &state->slots[i];
        char* array = (char*)memory + slot->offset_bytes;
        for (int g = 0; g < zero->groups; g++) {
            checkpoint_parts_read(&parts, i, g, array + state_group_begin(slot, g) * slot->element_bytes);
        }
    }
    checkpoint_parts_close(&parts);
}

// ---- exports ----

// Writes the parameters into the files that the options name, if any. By one process.
static inline void model_files_export_cpu(ModelConfig cfg, const TensorRow* rows, const void* memory,
                                          const Options* options, const RunData* data) {
    ModelExport files;
    if (!options_exports(options)) {
        return;
    }
    export_open(&files, cfg, options, data);
    for (int g = 0; g < model_groups(cfg); g++) {
        export_group(&files, rows, g, (const char*)memory + tensor_group_offset_bytes(rows, g));
    }
    export_close(&files);
}

#endif
