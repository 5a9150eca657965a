/*
parameters_agree.h -- compares the parameters that several ranks have: whole copies, tensors that
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
#include "llmc/formats/tensor_types.h"
#include "llmc/model/map.h"
#include "llmc/model/tensors.h"
#include "llmc/parallel/grid.h"
#include "llmc/run/trainer.h"

// Ends the run if the ranks of a color differ in `parameters`, "wte" for example.
static void run_compare_(Run* run, int color, const char* parameters, uint64_t checksum) {
    char what[96], words[32];
    snprintf(what, sizeof(what), "%s after step %lld (checksum)", parameters, (long long)run->state.step);
    snprintf(words, sizeof(words), "%016llx", (unsigned long long)checksum);
    comm_agree_in(&run->comm, color, what, checksum, words);
}

static int run_is_wte_(const TensorRow* row) { return row->member == offsetof(ModelParameters, wte); }

static int run_is_uncut_(const TensorRow* row) { return row->split == SPLIT_NONE; }

// Compares the tensors that all ranks of a group have, as far as this rank keeps them. Words of 8
// bytes are numbered by tensor, layer and element, so their sum does not depend on what else a rank
// has.
static void run_compare_tensors_(Run* run, GridGroup group, const char* parameters,
                                 int (*has)(const TensorRow* row)) {
    const Map* m = run->files.map;
    const size_t bytes = safetensors_dtype_bytes(run->trainer->dtype);
    int color = -1 - run->comm.rank; // which no other rank has
    uint64_t sum = 0;
    for (const Shard* s = m->shards; s < m->shards + m->num_shards; s++) {
        const int is_kept = map_has(m, s, MAP_PARAMETERS) && (s->layer < 0 || m->of.stage < 3);
        if (is_kept && has(&m->rows[s->tensor])) {
            const size_t tensor = (size_t)((s->layer + 1) * MODEL_PARAMETER_ROWS + s->tensor) << 40,
                         number = tensor + (s->piece.logical + s->piece.first) * bytes / 8,
                         count = (s->piece.count * bytes + 7) / 8 * 8;
            const ParameterBytes of = {map_at(m, s, MAP_PARAMETERS) * bytes, count, number};
            sum += run->trainer->checksum(run->model, of);
            color = grid_member(&run->settled->ranks.grid, group).first;
        }
    }
    run_compare_(run, color, parameters, sum);
}

// Compares the parameters that several ranks have, before the model is used, and at each validation
// and save. They differ if a rank has read another file, has a memory error, or computes
// differently.
void run_agree_on_parameters(Run* run) {
    const Grid* grid = &run->settled->ranks.grid;
    if (run->comm.size == 1) {
        return;
    }
    const int divides_experts = grid_experts(grid->shape) > 1;
    run_compare_(run, grid_member(grid, divides_experts ? GRID_SAME_EXPERTS : GRID_DATA).first,
                 "the parameters", run->trainer->checksum(run->model, all_parameters()));
    if (divides_experts) {
        run_compare_tensors_(run, GRID_DATA, "the parameters that are no experts", run_is_uncut_);
    }
    if (grid->shape.tensor > 1) {
        run_compare_tensors_(run, GRID_TENSOR, "the parameters that tensor ranks do not cut", run_is_uncut_);
    }
    if (grid->shape.pipeline > 1) {
        run_compare_tensors_(run, GRID_PIPE, "wte of the first and the last stage", run_is_wte_);
    }
}

#endif // PARAMETERS_AGREE_IMPLEMENTATION

#endif
