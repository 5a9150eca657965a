/*
load_save.cuh -- load_save.h for a model on a GPU, divided among processes as zero.h says; and the copy on the host that
checkpoints are written from. All of it is collective. What moves is on the host a group of parameters at a time.
*/
#ifndef LLMC_LOAD_SAVE_CUH
#define LLMC_LOAD_SAVE_CUH

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/checkpoint/transfer.cuh" // first, for the type of weights

#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/optimizer.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/checkpoint/export.h"
#include "llmc/checkpoint/load_save.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_data.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/checkpoint/initial_weights.h"
#include "llmc/parallel/zero.cuh"
#include "llmc/parallel/zero.h"

// Sets the parameters from a file or directory, or by the seed if `path` is NULL. A process reads little more than it
// owns.
static inline void model_files_read_weights(const Transfer* t, const char* path, uint64_t seed) {
    const ZeroPlan* zero = &t->zero->plan;
    FirstWeights weights;
    float* group = (float*)check_alloc(zero_largest_group(zero), sizeof(float), "a group of parameters");
    weights_open(&weights, t->cfg, path, seed);
    for (int g = 0; g < zero->groups; g++) {
        memset(group, 0, zero_group_elements(zero, g) * sizeof(float)); // also between the tensors
        for (int part = 0; part < ZERO_PARTS; part++) {
            const ZeroPiece piece = zero_piece(zero, g, (ZeroPart)part);
            const size_t first = piece.full - zero_group_begin(zero, g);
            if (piece.count > 0) {
                weights_read_part(&weights, t->rows, g, first, first + piece.count, group);
            }
        }
        transfer_upload_group(t, g, group);
    }
    weights_close(&weights);
    free(group);
    zero_gather_all_parameters(t->zero);
}

// Sets the optimizer's state of this process from the checkpoint in the directory `path`.
static inline void model_files_read_state(const Transfer* t, const char* path, const SavedState* saved) {
    const ZeroPlan* zero = &t->zero->plan;
    CheckpointParts parts;
    void* group = check_alloc(zero_largest_group(zero), sizeof(float), "a group of the optimizer's state");
    checkpoint_parts_open(&parts, saved, path, t->state->optimizer, t->cfg, zero);
    for (int i = 0; i < STATE_SLOTS; i++) {
        const StateSlot* slot = &t->state->slots[i];
        for (int g = 0; g < zero->groups && slot->name; g++) {
            checkpoint_parts_read(&parts, i, g, group);
            transfer_upload_state(t, i, state_group_begin(slot, g) * slot->element_bytes, group,
                                  state_group_elements(slot, g) * slot->element_bytes);
        }
    }
    checkpoint_parts_close(&parts);
    free(group);
}

// ---- the copy to save ----

typedef struct {
    void* memory; // NULL before the first save
    int is_pinned;
} SaveCopy;

// Pinned, so that the copy has the speed of the bus, or pageable if the machine or its limits do not allow to pin it.
static inline void save_copy_open_(SaveCopy* save, size_t bytes) {
    save->is_pinned = cudaMallocHost(&save->memory, bytes) == cudaSuccess;
    if (!save->is_pinned) {
        cudaGetLastError(); // clears the error
        printf(
            "note: cannot pin %.1f MiB of host memory for checkpoints: copying them from the GPU is slower\n",
            (double)bytes / (1 << 20));
        save->memory = check_alloc(bytes, 1, "copy to save");
    }
}

// Copies what this process saves to the host: its part of the optimizer's state, and its files' groups of the weights. The
// first time takes the memory for it.
static inline void save_copy_take(SaveCopy* save, Checkpoints* to, const Transfer* t) {
    const size_t bytes = to->params_bytes + to->optimizer_bytes;
    if (!save->memory && bytes > 0) {
        save_copy_open_(save, bytes);
    }
    checkpoint_copy_at(to, save->memory);
    transfer_download_groups(t, to->params, to->model.groups.first, to->model.groups.end);
    if (to->optimizer_bytes > 0) {
        transfer_download_state(t, (char*)to->optimizer);
    }
}

static inline void save_copy_close(SaveCopy* save) {
    if (save->is_pinned) {
        CUDA_CHECK(cudaFreeHost(save->memory));
    } else {
        free(save->memory);
    }
}

// ---- exports ----

// Writes the parameters into the files that the options name, if any; rank 0 does.
static inline void model_files_export(const Transfer* t, int rank, const Options* options,
                                      const RunData* data) {
    const ZeroPlan* zero = &t->zero->plan;
    const int is_first = rank == 0;
    ModelExport files;
    if (!options_exports(options)) {
        return;
    }
    float* group = is_first
                       ? (float*)check_alloc(zero_largest_group(zero), sizeof(float), "a group of parameters")
                       : NULL;
    if (is_first) {
        export_open(&files, t->cfg, options, data);
    }
    for (int g = 0; g < zero->groups; g++) {
        transfer_download_fp32(t, g, group);
        if (is_first) {
            export_group(&files, t->rows, g, group);
        }
    }
    if (is_first) {
        export_close(&files);
    }
    free(group);
}

#endif
