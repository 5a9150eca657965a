/*
map_ops.h -- maps for tests of operations: they live until ops_close.
*/
#ifndef DEV_MAP_OPS_H
#define DEV_MAP_OPS_H

#include "dev/test/lib/ops.h"
#include "llmc/model/map.h"
#include "llmc/optim/optimizer.h"

static inline void* map_ops_take_(size_t count, size_t bytes, const char* what) {
    (void)what;
    return ops_array_(count * bytes);
}
static inline void map_ops_leave_(void* block) { (void)block; }

// Returns the settings of `size` data ranks, with the state of an optimizer, which leave some
// parameters as they are (NULL: none). From stage 2 on two layers take turns, as on a GPU.
static inline MapOf map_ops_of(ModelConfig cfg, Optimizer optimizer, int stage, int size,
                               const Freeze* freeze) {
    MapOf of = map_of_model(cfg);
    of.stage = stage;
    of.data = of.replica = size;
    of.ring_gradients = stage >= 2 ? 2 : 0;
    of.ring_parameters = stage >= 3 ? 2 : 0;
    of.freeze = freeze ? *freeze : of.freeze;
    optimizer_set_map(&of, optimizer);
    return of;
}

// Returns the map of a rank.
static inline const Map* map_ops(const MapOf* of, int rank) {
    static const MemoryAllocator arrays[] = {{map_ops_take_, map_ops_take_, map_ops_leave_},
                                             {map_ops_take_, map_ops_take_, map_ops_leave_},
                                             {map_ops_take_, map_ops_take_, map_ops_leave_}};
    Memory memory = memory_of(arrays);
    Map* m = (Map*)ops_array_(sizeof(Map));
    map_open(m, &memory, MEMORY_HOST, of, rank);
    return m;
}

#endif
