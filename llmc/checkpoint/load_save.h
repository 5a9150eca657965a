/*
load_save.h -- moves a model between memory and files.

The files are its initial weights (initial_weights.h), the optimizer's state in a checkpoint
(optimizer_parts.h), and exports (export.h). They are those of the whole model, whatever part of it
a rank has (model_files.h).
*/
#ifndef LLMC_LOAD_SAVE_H
#define LLMC_LOAD_SAVE_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/checkpoint/model_files.h"
#include "llmc/checkpoint/more_tokens.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/formats/hf_model.h"
#include "llmc/formats/safetensors.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sets the weights from the model in `path`, those of --weights; NULL: random ones, from the seed.
// `more`: rows of the vocabulary that the files do not have, or NULL.
// Sets *checksum, unless NULL, to a checksum of the whole weights in fp32, whatever part this rank
// has.
void load_model(const ModelFiles* m, const char* path, HfWeights which, uint64_t seed, const MoreTokens* more,
                uint64_t* checksum);

// Returns the bytes that loading needs for a while, unless the weights are in place: a group in
// fp32.
size_t load_bytes(const RankPart* part);

// Sets the weights and the optimizer's state from the checkpoint in the directory `path`. `saved`
// is its state.
void load_checkpoint(const ModelFiles* m, const char* path, const SavedState* saved);

// Writes the files of --export-llmc and --export-gguf, if any. Collective; rank 0 writes.
void export_model(const ModelFiles* m, const Options* options, const RunData* data);

#ifdef __cplusplus
}
#endif

#ifdef LOAD_SAVE_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/checkpoint/export.h"
#include "llmc/checkpoint/initial_weights.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/ops/checksum.h"

size_t load_bytes(const RankPart* part) {
    const ZeroPlan plan = model_files_plan(part);
    return zero_largest_group(&plan) * sizeof(float);
}

// Returns memory for any whole group; NULL: groups are in place.
static void* load_room_(const ModelFiles* m) {
    return model_files_in_place(m) ? NULL : check_alloc(load_bytes(&m->part), 1, "a group of parameters");
}

// Reads this rank's shard of a whole group.
static void load_shard_(const ModelFiles* m, FirstWeights* weights, const TensorRow* rows, int g,
                        float* group) {
    const ZeroPlan* zero = &m->part.zero;
    for (int part = 0; part < ZERO_PARTS; part++) {
        const ZeroPiece piece = zero_piece(zero, g, (ZeroPart)part);
        const size_t first = piece.full - zero_group_begin(zero, g);
        if (piece.count > 0) {
            weights_read_part(weights, rows, g, first, first + piece.count, group);
        }
    }
}

// Reads whole group g: only this rank's shard of it, unless this rank has all of it, takes parts
// of it, or must compute rows of further tokens.
static void load_group_(const ModelFiles* m, FirstWeights* weights, const MoreTokens* more,
                        const TensorRow* rows, int g, float* group) {
    const ZeroPlan plan = model_files_plan(&m->part);
    const int in_place = model_files_in_place(m);
    if (!in_place) { // including the gaps between tensors
        memset(group, 0, zero_group_elements(&plan, g) * sizeof(float));
    }
    if (in_place || more || !rank_part_is_whole(&m->part)) {
        weights_read(weights, rows, g, group);
    } else {
        load_shard_(m, weights, rows, g, group);
    }
    if (more) {
        more_tokens_set(more, rows, g, group);
    }
}

// Returns what a group adds to the checksum of the weights (checksum.h), whose words are the
// elements, numbered by tensor. It does not depend on where a tensor lies in memory.
static uint64_t load_checksum_(const TensorRow* rows, ModelConfig cfg, int g, const float* group) {
    uint64_t sum = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const uint32_t* words = (const uint32_t*)tensor_in_group(&rows[i], group);
        const size_t count = tensor_is_in_group(&rows[i], g)
                                 ? model_rows_in_files(&rows[i], cfg) * rows[i].cols
                                 : 0,
                     first = (size_t)(g * MODEL_PARAMETER_ROWS + i) << 40;
#pragma omp parallel for schedule(static) reduction(+ : sum)
        for (size_t e = 0; e < count; e++) {
            sum += checksum_word(words[e], first + e);
        }
    }
    return sum;
}

static void load_weights_(const ModelFiles* m, const char* path, HfWeights which, uint64_t seed,
                          const MoreTokens* more, uint64_t* checksum) {
    const ModelConfig cfg = m->part.whole;
    FirstWeights weights;
    PartGroups parts;
    void* room = load_room_(m);
    part_groups_open_to_set(&parts, m);
    weights_open(&weights, more ? more_tokens_config(more, cfg) : cfg, path, which, seed, m->optimizer.mup);
    for (int g = 0; g < model_groups(cfg); g++) {
        if (model_files_have(cfg, m->part.own.part, g)) {
            void* group = room ? room : m->access.get_group(m->model, g, NULL);
            load_group_(m, &weights, more, parts.whole_rows, g, (float*)group);
            if (checksum) {
                *checksum += load_checksum_(parts.whole_rows, cfg, g, (const float*)group);
            }
            part_groups_set(&parts, g, group);
        }
    }
    part_groups_set_last(&parts);
    weights_close(&weights);
    part_groups_close(&parts);
    free(room);
}

void load_model(const ModelFiles* m, const char* path, HfWeights which, uint64_t seed, const MoreTokens* more,
                uint64_t* checksum) {
    if (checksum) {
        *checksum = 0;
    }
    load_weights_(m, path, which, seed, more, checksum);
    m->access.loaded(m->model, NULL);
}

// Returns memory for the largest group of a slot, which may have more elements than its parameters.
static void* load_state_room_(const ModelFiles* m, const OptimizerState* state) {
    size_t most = 1;
    for (int i = 0; i < STATE_SLOTS; i++) {
        const StateSlot* slot = &state->slots[i];
        for (int g = 0; g < m->part.zero.groups && slot->name; g++) {
            const size_t bytes = state_group_elements(slot, g) * slot->element_bytes;
            most = bytes > most ? bytes : most;
        }
    }
    return check_alloc(most, 1, "a group of the optimizer's state");
}

static void load_state_(const ModelFiles* m, const char* path, const SavedState* saved) {
    CheckpointParts parts;
    checkpoint_parts_open(&parts, saved, path, m->optimizer, &m->part);
    void* room = m->in_place ? NULL : load_state_room_(m, &parts.own.state);
    for (int i = 0; i < STATE_SLOTS; i++) {
        const StateSlot* slot = &parts.own.state.slots[i];
        for (int g = 0; g < m->part.zero.groups && slot->name; g++) {
            const size_t at = state_group_begin(slot, g) * slot->element_bytes,
                         bytes = state_group_elements(slot, g) * slot->element_bytes;
            void* group = m->in_place ? m->access.get_state(m->model, i, at, NULL, bytes) : room;
            checkpoint_parts_read(&parts, i, g, group);
            m->access.set_state(m->model, i, at, group, bytes);
        }
    }
    checkpoint_parts_close(&parts);
    free(room);
}

void load_checkpoint(const ModelFiles* m, const char* path, const SavedState* saved) {
    load_weights_(m, path, HF_LAST, 0, NULL, NULL);
    load_state_(m, path, saved);
    m->access.loaded(m->model, path);
}

void export_model(const ModelFiles* m, const Options* options, const RunData* data) {
    const int is_writer = m->comm->rank == 0;
    const ZeroPlan plan = model_files_plan(&m->part);
    const Grid writer = grid_of(m->part.grid.shape, 0);
    TensorRow rows[MODEL_PARAMETER_ROWS];
    ModelExport files;
    PartGroups parts;
    if (!options_exports(options)) {
        return;
    }
    void* room = is_writer ? load_room_(m) : NULL;
    zero_parameter_rows(rows, &plan, m->part.whole, sizeof(float));
    if (is_writer) {
        export_open(&files, m->part.whole, options, data);
    }
    part_groups_open_to_get(&parts, m);
    for (int g = 0; g < plan.groups; g++) {
        void* group = part_groups_get(&parts, g, &writer, room);
        if (is_writer) {
            safetensors_widen(group, m->dtype, zero_group_elements(&plan, g));
            export_group(&files, rows, g, group);
        }
    }
    part_groups_close(&parts);
    if (is_writer) {
        export_close(&files);
    }
    free(room);
}

#endif // LOAD_SAVE_IMPLEMENTATION

#endif
