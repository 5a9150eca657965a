// settled_alone.h -- the settings of a run of one rank, from options that are all decided.
#ifndef DEV_TEST_SETTLED_ALONE_H
#define DEV_TEST_SETTLED_ALONE_H

#include "llmc/setup/settled.h"

static inline Settled settled_alone(const Options* options, ModelConfig cfg, ModelUse use,
                                    SafeTensorsDtype dtype) {
    const Ranks alone = {0, 1, options->zero, 1};
    return settled_of(options, cfg, use, alone, dtype);
}

#endif
