/*
load_save.h -- moves a model between memory and files.

The files are its initial weights (initial_weights.h), the optimizer's state in a checkpoint
(optimizer_parts.h), and exports (export.h).

The trainer has functions that get and set the tensors of its model, one group of parameters
(model.h) at a time. On the host, a group is alone in memory, laid out like the groups of full
arrays (zero_parameter_rows). If the model's own memory has this layout, it is read and written in
place; else memory for one group is allocated.
*/
#ifndef LLMC_LOAD_SAVE_H
#define LLMC_LOAD_SAVE_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/checkpoint/more_tokens.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/formats/safetensors.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"

#ifdef __cplusplus
extern "C" {
#endif

// Functions of a trainer that get and set the tensors of its model, between updates. Collective.
typedef struct {
    // Copies the weights of group g as they are saved: master weights, if any. `group` is NULL in
    // ranks that do not want them, and for tensors in place (ModelFiles): then it returns their
    // address.
    void* (*get_group)(Model* model, int g, void* group);
    // Sets this rank's part of group g; reads only that part of `group`, which is fp32.
    void (*set_group)(Model* model, int g, const float* group);
    // Get and set `bytes` of this rank's array of a slot of the optimizer's state, from byte `at`.
    void* (*get_state)(Model* model, int slot, size_t at, void* state, size_t bytes);
    void (*set_state)(Model* model, int slot, size_t at, const void* state, size_t bytes);
    // Is called after all groups are set. `checkpoint` is the directory they came from; NULL: none.
    void (*loaded)(Model* model, const char* checkpoint);
} ModelAccess;

// A model, as needed to read and write its files.
typedef struct {
    Model* model;
    ModelAccess access;
    ModelConfig cfg;
    Optimizer optimizer;
    ZeroPlan zero;          // each rank's part of it
    SafeTensorsDtype dtype; // type of the weights as they are saved
    int in_place;           // true: weights and state are on the host in the layout of files
} ModelFiles;

// Sets the weights from the model in `path`; NULL: random ones, from the seed. `more`: rows of the
// vocabulary that the files do not have, or NULL.
void load_model(const ModelFiles* m, const char* path, uint64_t seed, const MoreTokens* more);

// Sets the weights and the optimizer's state from the checkpoint in the directory `path`. `saved`
// is its state.
void load_checkpoint(const ModelFiles* m, const char* path, const SavedState* saved);

// Converts `count` elements of a type to fp32, in place.
void elements_widen(void* elements, SafeTensorsDtype dtype, size_t count);

// Writes the files of --export-llmc and --export-gguf, if any. Collective; rank 0 writes.
void export_model(const ModelFiles* m, int rank, const Options* options, const RunData* data);

#ifdef __cplusplus
}
#endif

#ifdef LOAD_SAVE_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/float16.h"
#include "llmc/checkpoint/export.h"
#include "llmc/checkpoint/initial_weights.h"
#include "llmc/checkpoint/optimizer_parts.h"

static float* load_room_(const ModelFiles* m) {
    return (float*)check_alloc(zero_largest_group(&m->zero), sizeof(float), "a group of parameters");
}

// Reads group g: all of it if this rank has the whole group, or must compute rows of further
// tokens; else this rank's part.
static void load_group_(const ModelFiles* m, FirstWeights* weights, const MoreTokens* more,
                        const TensorRow* rows, int g, float* group) {
    if (!m->in_place) { // including the gaps between tensors
        memset(group, 0, zero_group_elements(&m->zero, g) * sizeof(float));
    }
    if (m->in_place || more) {
        weights_read(weights, rows, g, group);
    }
    if (more) {
        more_tokens_set(more, rows, g, group);
    }
    for (int part = 0; part < ZERO_PARTS && !m->in_place && !more; part++) {
        const ZeroPiece piece = zero_piece(&m->zero, g, (ZeroPart)part);
        const size_t first = piece.full - zero_group_begin(&m->zero, g);
        if (piece.count > 0) {
            weights_read_part(weights, rows, g, first, first + piece.count, group);
        }
    }
}

static void load_weights_(const ModelFiles* m, const char* path, uint64_t seed, const MoreTokens* more) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    FirstWeights weights;
    float* room = m->in_place ? NULL : load_room_(m);
    zero_parameter_rows(rows, &m->zero, m->cfg, sizeof(float));
    weights_open(&weights, more ? more_tokens_config(more, m->cfg) : m->cfg, path, seed, m->optimizer.mup);
    for (int g = 0; g < m->zero.groups; g++) {
        float* group = m->in_place ? (float*)m->access.get_group(m->model, g, NULL) : room;
        load_group_(m, &weights, more, rows, g, group);
        m->access.set_group(m->model, g, group);
    }
    weights_close(&weights);
    free(room);
}

void load_model(const ModelFiles* m, const char* path, uint64_t seed, const MoreTokens* more) {
    load_weights_(m, path, seed, more);
    m->access.loaded(m->model, NULL);
}

// Returns memory for the largest group of a slot, which may have more elements than its parameters.
static void* load_state_room_(const ModelFiles* m, const OptimizerState* state) {
    size_t most = 1;
    for (int i = 0; i < STATE_SLOTS; i++) {
        const StateSlot* slot = &state->slots[i];
        for (int g = 0; g < m->zero.groups && slot->name; g++) {
            const size_t bytes = state_group_elements(slot, g) * slot->element_bytes;
            most = bytes > most ? bytes : most;
        }
    }
    return check_alloc(most, 1, "a group of the optimizer's state");
}

static void load_state_(const ModelFiles* m, const char* path, const SavedState* saved) {
    CheckpointParts parts;
    checkpoint_parts_open(&parts, saved, path, m->optimizer, m->cfg, &m->zero);
    void* room = m->in_place ? NULL : load_state_room_(m, &parts.own.state);
    for (int i = 0; i < STATE_SLOTS; i++) {
        const StateSlot* slot = &parts.own.state.slots[i];
        for (int g = 0; g < m->zero.groups && slot->name; g++) {
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
    load_weights_(m, path, 0, NULL);
    load_state_(m, path, saved);
    m->access.loaded(m->model, path);
}

void elements_widen(void* elements, SafeTensorsDtype dtype, size_t count) {
    float* wide = (float*)elements;
    // From the end, because the results are wider.
    for (size_t i = count; dtype != SAFETENSORS_F32 && i-- > 0;) {
        uint16_t bits;
        memcpy(&bits, (char*)elements + i * sizeof(bits), sizeof(bits));
        wide[i] = dtype == SAFETENSORS_BF16 ? bf16_to_float(bits) : fp16_to_float(bits);
    }
}

void export_model(const ModelFiles* m, int rank, const Options* options, const RunData* data) {
    const int is_writer = rank == 0;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    ModelExport files;
    if (!options_exports(options)) {
        return;
    }
    float* room = is_writer && !m->in_place ? load_room_(m) : NULL;
    zero_parameter_rows(rows, &m->zero, m->cfg, sizeof(float));
    if (is_writer) {
        export_open(&files, m->cfg, options, data);
    }
    for (int g = 0; g < m->zero.groups; g++) {
        void* group = m->access.get_group(m->model, g, room);
        if (is_writer) {
            elements_widen(group, m->dtype, zero_group_elements(&m->zero, g));
            export_group(&files, rows, g, group);
        }
    }
    if (is_writer) {
        export_close(&files);
    }
    free(room);
}

#endif // LOAD_SAVE_IMPLEMENTATION

#endif
