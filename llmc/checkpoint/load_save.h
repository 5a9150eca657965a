/*
load_save.h -- a model out of files and into files: the weights it starts with (initial_weights.h),
the optimizer's state of a checkpoint (optimizer_parts.h), exports (export.h).

The model gives and takes its tensors a group of parameters (model.h) at a time, by the functions of
its trainer. On the host a group is alone in memory, laid out like the groups of full arrays
(zero_parameter_rows). A model that has its groups like that in memory is read and written in place;
else there is memory for one group.
*/
#ifndef LLMC_LOAD_SAVE_H
#define LLMC_LOAD_SAVE_H

#include <stddef.h>
#include <stdint.h>

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

// Functions of a trainer that give and take the tensors of its model. Between updates; collective.
typedef struct {
    // Copies the weights of group g as they are saved: master weights if there are any. `group` is NULL in ranks that do
    // not want them; and where tensors are in place (ModelFiles): then it returns their place.
    void* (*get_group)(Model* model, int g, void* group);
    // Sets what this rank has of group g; of `group`, fp32, no more is read.
    void (*set_group)(Model* model, int g, const float* group);
    // The same of `bytes` of this rank's array of a slot of the optimizer's state, from byte `at` on.
    void* (*get_state)(Model* model, int slot, size_t at, void* state, size_t bytes);
    void (*set_state)(Model* model, int slot, size_t at, const void* state, size_t bytes);
    // Called after all groups are set, from the checkpoint in this directory; NULL: from elsewhere.
    void (*loaded)(Model* model, const char* checkpoint);
} ModelAccess;

// A model as files see it.
typedef struct {
    Model* model;
    ModelAccess access;
    ModelConfig cfg;
    Optimizer optimizer;
    ZeroPlan zero;          // what each rank has of it
    SafeTensorsDtype dtype; // of the weights as they are saved
    int in_place;           // weights and state lie on the host as they are saved
} ModelFiles;

// Sets the weights from the model in `path`, or by the seed if it is NULL.
void load_model(const ModelFiles* m, const char* path, uint64_t seed);

// Sets weights and optimizer state from the checkpoint in the directory `path`, whose state is `saved`.
void load_checkpoint(const ModelFiles* m, const char* path, const SavedState* saved);

// Turns `count` elements of a type into fp32, in place.
void elements_widen(void* elements, SafeTensorsDtype dtype, size_t count);

// Writes the files that --export-llmc and --export-gguf name, if any; rank 0 does.
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

// Reads what this rank has of group g.
static void load_group_(const ModelFiles* m, FirstWeights* weights, const TensorRow* rows, int g,
                        float* group) {
    memset(group, 0, zero_group_elements(&m->zero, g) * sizeof(float)); // also between the tensors
    for (int part = 0; part < ZERO_PARTS; part++) {
        const ZeroPiece piece = zero_piece(&m->zero, g, (ZeroPart)part);
        const size_t first = piece.full - zero_group_begin(&m->zero, g);
        if (piece.count > 0) {
            weights_read_part(weights, rows, g, first, first + piece.count, group);
        }
    }
}

static void load_weights_(const ModelFiles* m, const char* path, uint64_t seed) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    FirstWeights weights;
    float* room = m->in_place ? NULL : load_room_(m);
    zero_parameter_rows(rows, &m->zero, m->cfg, sizeof(float));
    weights_open(&weights, m->cfg, path, seed);
    for (int g = 0; g < m->zero.groups; g++) {
        float* group = m->in_place ? (float*)m->access.get_group(m->model, g, NULL) : room;
        if (m->in_place) { // each rank has all of it
            weights_read(&weights, rows, g, group);
        } else {
            load_group_(m, &weights, rows, g, group);
        }
        m->access.set_group(m->model, g, group);
    }
    weights_close(&weights);
    free(room);
}

void load_model(const ModelFiles* m, const char* path, uint64_t seed) {
    load_weights_(m, path, seed);
    m->access.loaded(m->model, NULL);
}

static void load_state_(const ModelFiles* m, const char* path, const SavedState* saved) {
    CheckpointParts parts;
    void* room = m->in_place ? NULL : load_room_(m);
    checkpoint_parts_open(&parts, saved, path, m->optimizer, m->cfg, &m->zero);
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
    load_weights_(m, path, 0);
    load_state_(m, path, saved);
    m->access.loaded(m->model, path);
}

void elements_widen(void* elements, SafeTensorsDtype dtype, size_t count) {
    float* wide = (float*)elements;
    for (size_t i = count;
         dtype != SAFETENSORS_F32 && i-- > 0;) { // from the end: the wide ones take more room
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
