/*
rank_part.h -- the part of a model that a rank has: matrices and layers (part.h), divided in its
data group (zero.h), and the rank's place among all (grid.h).
*/
#ifndef LLMC_RANK_PART_H
#define LLMC_RANK_PART_H

#include "llmc/model/model.h"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/zero.h"

typedef struct {
    ModelConfig whole; // the model
    ModelConfig own;   // the part, as a model of its own; `whole` if the data group has all of it
    ZeroPlan zero;     // shards of `own`
    Grid grid;
    unsigned frozen; // bit i: no rank updates row i of the parameters
} RankPart;

// True if each rank of the data group has the whole model, or its part of it (zero.h).
static inline int rank_part_is_whole(const RankPart* r) {
    return !model_is_cut(r->own) && r->own.part.of_layers == 0 && !model_divides_experts(r->own);
}

// Returns the part of a rank in a run that divides data alone.
static inline RankPart rank_part_of_data(ModelConfig cfg, ZeroPlan zero, unsigned frozen) {
    const GridShape shape = {1, 1, zero.size, 1, 1};
    const RankPart part = {cfg, cfg, zero, grid_of(shape, zero.rank), frozen};
    return part;
}

#endif
