/*
parameters_agree.h -- compares what ranks have of the same parameters: whole copies, tensors that
tensor ranks do not cut, and the token embedding at both ends of a pipeline.
*/
#ifndef LLMC_PARAMETERS_AGREE_H
#define LLMC_PARAMETERS_AGREE_H

#include "llmc/run/run.h"

#ifdef __cplusplus
extern "C" {
#endif

// Ends the run if the parameters of ranks differ.
void run_agree_on_parameters(Run* run);

#ifdef __cplusplus
}
#endif

#ifdef PARAMETERS_AGREE_IMPLEMENTATION

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/comm/comm.h"
#include "llmc/model/tensors.h"
#include "llmc/ops/checksum.h"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/zero.h"
#include "llmc/run/trainer.h"

// Ends the run if the ranks of a color have other parameters, "wte" for example.
static void run_compare_(Run* run, int color, const char* parameters, uint64_t checksum) {
    char what[96], words[32];
    snprintf(what, sizeof(what), "%s after step %lld (checksum)", parameters, (long long)run->state.step);
    snprintf(words, sizeof(words), "%016llx", (unsigned long long)checksum);
    comm_agree_in(&run->comm, color, what, checksum, words);
}

static void run_add_checksum_(Run* run, uint64_t* sum, size_t begin, size_t count) {
    const ParameterBytes of = {begin, count};
    if (count > 0) {
        *sum = checksum_word(*sum, count) + run->trainer->checksum(run->model, of);
    }
}

// Compares the tensors that are not cut, which all ranks of a group have. In stage 3 ranks have
// only shards of blocks.
static void run_compare_whole_(Run* run, const TensorRow* rows, GridGroup group, const char* parameters) {
    uint64_t sum = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &rows[i];
        const int is_here = row->place == PLACE_ONCE || run->settled->zero.stage < 3;
        for (int k = 0; k < row->layers && row->split == SPLIT_NONE && is_here; k++) {
            run_add_checksum_(run, &sum, row->offset_bytes + (size_t)k * row->layer_bytes,
                              array_bytes(tensor_layer_elements(row), row->element_bytes));
        }
    }
    run_compare_(run, grid_member(&run->settled->ranks.grid, group).first, parameters, sum);
}

// Returns a color that no other rank has.
static int run_own_color_(const Run* run) { return -1 - run->comm.rank; }

// Compares the copies of wte of the first and the last stage, if they have some.
static void run_compare_wte_(Run* run, const TensorRow* rows) {
    const TensorRow* wte = rows;
    uint64_t sum = 0;
    while (wte->member != offsetof(ModelParameters, wte)) {
        wte++;
    }
    run_add_checksum_(run, &sum, wte->offset_bytes, tensor_bytes_in_group(wte));
    run_compare_(run,
                 tensor_is_absent(wte) ? run_own_color_(run)
                                       : grid_member(&run->settled->ranks.grid, GRID_PIPE).first,
                 "wte of the first and the last stage", sum);
}

// Compares what several ranks have: before the model is used, and at each validation and save. It
// differs if a rank has read another file, has a memory error, or computes differently.
void run_agree_on_parameters(Run* run) {
    const Grid* grid = &run->settled->ranks.grid;
    const ModelConfig cfg = run->settled->part;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    if (run->comm.size == 1) {
        return;
    }
    zero_parameter_rows(rows, &run->settled->zero, cfg, safetensors_dtype_bytes(run->trainer->dtype));
    const int divides_experts = grid_experts(grid->shape) > 1;
    run_compare_(run, grid_member(grid, divides_experts ? GRID_SAME_EXPERTS : GRID_DATA).first,
                 "the parameters", run->trainer->checksum(run->model, all_parameters()));
    if (divides_experts) {
        run_compare_whole_(run, rows, GRID_DATA, "the parameters that are no experts");
    }
    if (grid->shape.tensor > 1) {
        run_compare_whole_(run, rows, GRID_TENSOR, "the parameters that tensor ranks do not cut");
    }
    if (grid->shape.pipeline > 1) {
        run_compare_wte_(run, rows);
    }
}

#endif // PARAMETERS_AGREE_IMPLEMENTATION

#endif
