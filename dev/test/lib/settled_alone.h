// settled_alone.h -- the settings of a run of one rank, from options that are all decided; ranks
// that divide data alone.
#ifndef DEV_TEST_SETTLED_ALONE_H
#define DEV_TEST_SETTLED_ALONE_H

#include "llmc/setup/settled.h"

static inline Ranks ranks_of_data(int rank, int size, int zero, int shards) {
    const Ranks ranks = {grid_of_data(rank, size), zero, shards, size};
    return ranks;
}

static inline Settled settled_alone(const Options* options, ModelConfig cfg, ModelUse use,
                                    SafeTensorsDtype dtype) {
    return settled_of(options, cfg, use, ranks_of_data(0, 1, options->ranks.zero, 1), dtype);
}

#endif
