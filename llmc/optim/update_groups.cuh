/*
update_groups.cuh -- update_groups.h on the GPU: all groups together, by optimizer.cuh, with the
state on the GPU or offloaded.
*/
#ifndef LLMC_UPDATE_GROUPS_CUH
#define LLMC_UPDATE_GROUPS_CUH

#include "llmc/optim/offload.cuh"
#include "llmc/optim/optimizer.cuh"
#include "llmc/parallel/zero.cuh"

// Updates what this rank updates of all groups; all ranks then gather the parameters. `u` lacks the
// gradient and the settings.
template <class T>
static inline void update_groups(OptimizerUpdate<T> u, Update settings, Offload* offload, const Gpu* gpu) {
    u.grads = zero_update_gradient(u.zero);
    u.update = settings;
    if (offload->slots) {
        offload_update(offload, u, gpu);
    } else {
        optimizer_update(u, gpu);
    }
    zero_gather_parameters(u.zero);
}

#endif
