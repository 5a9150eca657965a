/*
rope.cuh -- rope.h on the GPU: its table of angles.
*/
#ifndef LLMC_ROPE_CUH
#define LLMC_ROPE_CUH

#include <stdlib.h>

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/rope.h"

static inline void rope_gpu_open(Rope* rope, Memory* memory, RopeSettings settings) {
    const size_t bytes = rope_table_bytes(settings);
    float* table = (float*)memory_take(memory, "rotary positions", MEMORY_DEVICE, bytes);
    rope->table = table;
    rope->HS = settings.HS;
    if (table) {
        float* host = (float*)check_alloc(bytes, 1, "rotary positions");
        rope_set_table(host, settings);
        gpu_upload(table, host, bytes);
        free(host);
    }
}

#endif
