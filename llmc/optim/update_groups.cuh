/*
update_groups.cuh -- update_groups.h on the GPU: all groups together, by optimizer.cuh, with the
state on the GPU or offloaded.
*/
#ifndef LLMC_UPDATE_GROUPS_CUH
#define LLMC_UPDATE_GROUPS_CUH

#include "llmc/optim/offload.cuh"
#include "llmc/optim/optimizer.cuh"
#include "llmc/gpu/gpu.cuh"
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

typedef enum { UPDATE_PUT_ASIDE_, UPDATE_TAKE_BACK_ } UpdateMove_;

// Copies the parameters that this rank updates to where their gradient was, as T, or back.
template <class T>
static inline void update_groups_move_(const OptimizerUpdate<T>& u, UpdateMove_ move, const Gpu* gpu) {
    const Map* map = u.plan->state->map;
    T* aside = (T*)zero_update_gradient(u.zero).data;
    zero_join_updates(u.zero); // nothing reads or gathers parameters any more
    for (int g = 0; g < model_groups(map->cfg); g++) {
        const Bucket* b = map_trained(map, g);
        if (b) {
            const MapSpan own = b->in[MAP_OWNED];
            T *there = aside + own.begin, *here = u.params + zero_owned_in_kept(b);
            CUDA_CHECK(cudaMemcpyAsync(move == UPDATE_PUT_ASIDE_ ? there : here,
                                       move == UPDATE_PUT_ASIDE_ ? here : there, own.count * sizeof(T),
                                       cudaMemcpyDefault, gpu->stream));
        }
    }
}

// Sets the parameters to their average, and keeps them where the gradients were. Between updates;
// collective.
template <class T>
static inline void update_groups_show_average(OptimizerUpdate<T> u, Offload* offload, const Gpu* gpu) {
    const Update none = {};
    u.shows_average = 1;
    update_groups_move_(u, UPDATE_PUT_ASIDE_, gpu);
    update_groups(u, none, offload, gpu);
}

// Sets the parameters again, bit for bit. Gradients that no backward pass sets are zero; a
// reduction sets all of its shard.
template <class T>
static inline void update_groups_hide_average(const OptimizerUpdate<T>& u, const Gpu* gpu) {
    void* aside = zero_update_gradient(u.zero).data;
    update_groups_move_(u, UPDATE_TAKE_BACK_, gpu);
    if (aside == u.zero->grads.data) {
        CUDA_CHECK(cudaMemsetAsync(aside, 0, u.plan->state->map->totals.updated * sizeof(T), gpu->stream));
    }
    zero_gather_parameters(u.zero);
}

#endif
