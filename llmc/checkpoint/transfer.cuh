/*
transfer.cuh -- copies a model's weights and optimizer state between the host and the GPU.

They move one group of parameters (model.h) at a time. On the host, a group is alone in memory: its
buckets (map.h), one after the other. On the GPU, or where --offload-optimizer keeps state, each
rank has its shard of a bucket.

    upload      sets, from fp32, the part that this rank owns: the weights that the passes read,
                and the master weights (master_weights.cuh)
    download    copies the weights to save, the master weights if any; whole groups, from all ranks
                that have a part of them

    move        sends memory of the host to a rank of a group, or receives it: by way of the GPUs,
                which all ranks of a run can reach

After the upload of all groups, zero_gather_all_parameters sets the parts of other ranks. All wait
for the GPU. Call them between updates.
*/
#ifndef LLMC_TRANSFER_CUH
#define LLMC_TRANSFER_CUH

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/gpu/floatx.cuh"

#include "llmc/model/model.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/offload.cuh"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/router_bias.cuh"
#include "llmc/ops/q8.cuh"
#include "llmc/layers/q8_weights.h"
#include "llmc/optim/master_weights.cuh"
#include "llmc/comm/comm_nccl.cuh"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/zero.cuh"

enum {
    TRANSFER_MOVE_BYTES = 1 << 20, // that move to another rank at a time
    TRANSFER_SCRATCH_LEAST = 2 * sizeof(float) * WEIGHTS_PIECE
};

// Returns the least scratch memory that a rank needs.
static inline size_t transfer_scratch_least(Grid grid) {
    return grid_is_plain(grid.shape) ? (size_t)TRANSFER_SCRATCH_LEAST : (size_t)TRANSFER_MOVE_BYTES;
}

typedef struct {
    const TensorRow* parameter_rows; // layout of the parameters on the GPU if they are in 8 bits
    int is_quantized;                // true: matrices are in 8 bits
    ZeroGpu* zero;                   // with the parameters
    const OptimizerState* state;
    Offload* offload; // has the state if it is not on the GPU
    RouterBiasesGpu* biases;
    void* scratch; // GPU memory that is unused between updates
    size_t scratch_bytes;
    const Gpu* gpu;

    MasterWeights master; // MASTER_NONE also if the run has no state
} Transfer;

// Opens the copies after everything that is copied. The arguments must outlive them.
static inline void transfer_open(Transfer* t, const TensorRow* rows, int is_quantized, ZeroGpu* zero,
                                 const OptimizerState* state, Offload* offload, RouterBiasesGpu* biases,
                                 void* scratch, size_t scratch_bytes) {
    t->parameter_rows = rows;
    t->is_quantized = is_quantized;
    t->zero = zero;
    t->state = state;
    t->offload = offload;
    t->biases = biases;
    t->scratch = scratch;
    t->scratch_bytes = scratch_bytes;
    t->gpu = &zero->main;
    t->master = state->memory || offload->slots ? state->optimizer.master : MASTER_NONE;
}

// ---- between ranks ----

static inline void transfer_move(const Transfer* t, const GroupGpu* group, GroupMove move) {
    const size_t most = TRANSFER_MOVE_BYTES;
    assert(t->scratch_bytes >= most);
    for (size_t at = 0; at < move.bytes; at += most) {
        const size_t left = move.bytes - at, bytes = left < most ? left : most;
        const GroupMove piece = {move.peer, t->scratch, bytes, move.sends};
        char* data = (char*)move.data + at;
        if (move.sends) {
            gpu_copy(t->scratch, data, bytes, t->gpu);
        }
        group_exchange(&piece, 1, group, t->gpu->stream);
        if (!move.sends) {
            gpu_copy(data, t->scratch, bytes, t->gpu);
        }
    }
    CUDA_CHECK(cudaStreamSynchronize(t->gpu->stream));
}

// ---- the optimizer's state ----

// Copies `bytes` to a slot's array, from its byte `at`.
static inline void transfer_upload_state(const Transfer* t, int slot, size_t at, const void* state,
                                         size_t bytes) {
    if (t->offload->slots) {
        offload_write(t->offload, state, slot, at, bytes);
    } else if (bytes > 0) {
        gpu_copy((char*)state_slot_array(t->state, slot) + at, state, bytes, t->gpu);
    }
}

// Copies `bytes` of a slot's array, from its byte `at`, to the host.
static inline void transfer_download_state(const Transfer* t, int slot, size_t at, void* state,
                                           size_t bytes) {
    if (t->offload->slots) {
        offload_read(t->offload, state, slot, at, bytes);
    } else {
        gpu_copy(state, (char*)state_slot_array(t->state, slot) + at, bytes, t->gpu);
    }
}

// ---- weights to the GPU ----

// Sets weights from fp32 values on the host.
static inline void transfer_upload_narrow_(const Transfer* t, floatX* to, const float* from, size_t count) {
    floatX* narrow = (floatX*)check_alloc(count, sizeof(floatX), "copy of a group of parameters");
    for (size_t i = 0; i < count; i++) {
        narrow[i] = from_float<floatX>(from[i]);
    }
    gpu_copy(to, narrow, count * sizeof(floatX), t->gpu);
    free(narrow);
}

// Sets an 8-bit matrix.
static inline void transfer_set_blocks_(const void* transfer, void* to, const float* from, size_t elements) {
    const Gpu* gpu = ((const Transfer*)transfer)->gpu;
    const size_t blocks = elements / QUANTIZED_BLOCK, bytes = quantized_gpu_bytes(elements);
    QuantizedBlock* matrix = (QuantizedBlock*)check_alloc(blocks, sizeof(QuantizedBlock), "matrix in 8 bits");
    void* staging = check_alloc(bytes, 1, "matrix in 8 bits");
    quantized_encode_matrix(matrix, from, elements);
    quantized_upload(to, staging, matrix, elements, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(staging);
    free(matrix);
}

static inline void transfer_set_floats_(const void* transfer, void* to, const float* from, size_t elements) {
    transfer_upload_narrow_((const Transfer*)transfer, (floatX*)to, from, elements);
}

// Sets weights and their split master weights, which start at element `at` of this rank's; their
// lower parts have the type L.
template <class L>
static inline void transfer_upload_split_(const Transfer* t, floatX* to, size_t at, const float* from,
                                          size_t count) {
    uint16_t* upper = (uint16_t*)check_alloc(count, sizeof(uint16_t), "copy of a group of parameters");
    L* lower = (L*)check_alloc(count, sizeof(L), "copy of a group of parameters");
    for (size_t i = 0; i < count; i++) {
        const SplitFloat<L> split = split_float<L>(from[i]);
        memcpy(upper + i, &split.upper, sizeof(uint16_t));
        lower[i] = split.lower;
    }
    gpu_copy(to, upper, count * sizeof(uint16_t), t->gpu);
    transfer_upload_state(t, state_master_slot(t->master), at * sizeof(L), lower, count * sizeof(L));
    free(lower);
    free(upper);
}

// Sets this rank's elements of a bucket, all of which are at `bucket`, and their master weights.
static inline void transfer_upload_bucket_(const Transfer* t, const Bucket* b, const float* bucket) {
    const MapSpan own = b->in[MAP_OWNED];
    const float* from = bucket + own.from;
    floatX* to = (floatX*)zero_update_parameters(t->zero) + zero_owned_in_kept(b);
    if (t->master == MASTER_SPLIT) {
        transfer_upload_split_<uint16_t>(t, to, own.begin, from, own.count);
    } else if (t->master == MASTER_24) {
        transfer_upload_split_<int8_t>(t, to, own.begin, from, own.count);
    } else {
        if (t->master == MASTER_FP32) {
            transfer_upload_state(t, STATE_MASTER, own.begin * sizeof(float), from,
                                  own.count * sizeof(float));
        }
        transfer_upload_narrow_(t, to, from, own.count);
    }
}

// Sets group g of a model in 8 bits.
static inline void transfer_upload_quantized_(const Transfer* t, int g, const float* group) {
    const QuantizedParameters all = {t, t->parameter_rows, t->zero->params, transfer_set_blocks_,
                                     transfer_set_floats_};
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(rows, t->zero->map->cfg, sizeof(float));
    quantized_set_group(all, g, rows, group);
}

// Calls f(address in `group`, whose elements have `bytes`; the same elements on the host) for each
// run of biases of routers in group g.
template <class F>
static inline void transfer_for_biases_(const Transfer* t, int g, size_t bytes, void* group, const F& f) {
    const Map* m = t->zero->map;
    for (const Shard* s = m->shards; s < m->shards + m->num_shards; s++) {
        const MapBuckets in = map_group(m, g);
        if (m->rows[s->tensor].member == offsetof(ModelParameters, routerb) && in.first <= s->bucket &&
            s->bucket < in.end) {
            const size_t at = m->buckets[s->bucket].begin + s->offset;
            f((char*)group + at * bytes, router_biases_host(t->biases, m->cfg, s->layer) + s->piece.first,
              s->piece.count);
        }
    }
}

// Sets this rank's elements of group g; reads only these of `group`, and the biases of routers.
static inline void transfer_upload_group(const Transfer* t, int g, const float* group) {
    const Map* m = t->zero->map;
    transfer_for_biases_(t, g, sizeof(float), (void*)group, [&](const void* from, float* to, size_t count) {
        router_biases_set(t->biases, to, (const float*)from, count);
    });
    router_biases_send(t->biases, t->gpu);
    if (t->is_quantized) {
        transfer_upload_quantized_(t, g, group);
        return;
    }
    for (int i = map_group(m, g).first; i < map_group(m, g).end; i++) {
        transfer_upload_bucket_(t, &m->buckets[i], group + m->buckets[i].begin);
    }
}

// ---- weights to the host: collective; `bucket` is NULL in ranks that do not want it ----

// Copies the fp32 master weights of a bucket.
static inline void transfer_download_master_(const Transfer* t, const Bucket* b, void* bucket) {
    const int slot = state_master_slot(t->master), is_divided = map_is_divided(t->zero->map);
    const MapSpan own = b->in[MAP_OWNED];
    const size_t bytes = sizeof(float);
    if (!t->offload->slots) {
        const char* array = (const char*)state_slot_array(t->state, slot);
        zero_collect(t->zero, b, bucket, array + own.begin * bytes, DTYPE_FP32);
        return;
    }
    float *room = is_divided ? (float*)check_alloc(own.count, bytes, "copy of master weights") : NULL,
          *mine = is_divided ? room : (float*)bucket;
    if (mine) {
        offload_read(t->offload, mine, slot, own.begin * bytes, own.count * bytes);
    }
    if (is_divided) {
        zero_collect(t->zero, b, bucket, mine, DTYPE_FP32);
    }
    free(room);
}

// Copies the weights of a bucket that the passes read.
static inline void transfer_download_narrow_(const Transfer* t, const Bucket* b, void* bucket) {
    if (t->zero->params_slices) {
        zero_collect(t->zero, b, bucket, (floatX*)t->zero->params_slices + zero_owned_in_kept(b),
                     DTYPE_OF(floatX));
    } else if (bucket) {
        gpu_copy(bucket, (floatX*)t->zero->params + b->in[MAP_PARAMETERS].begin, b->elements * sizeof(floatX),
                 t->gpu);
    }
}

// Sets t->scratch to elements first ... first + count - 1 of this rank's weights of a bucket, as
// fp32, by joining their upper and lower parts. The lower parts are on the GPU or offloaded.
static inline void transfer_join_(const Transfer* t, const Bucket* b, size_t first, size_t count) {
    const int slot = state_master_slot(t->master);
    const size_t bytes = master_bytes(t->master), at = (b->in[MAP_OWNED].begin + first) * bytes;
    char* lower = (char*)t->scratch + count * sizeof(float);
    if (t->offload->slots) {
        void* room = check_alloc(count, bytes, "copy of master weights");
        offload_read(t->offload, room, slot, at, count * bytes);
        gpu_copy(lower, room, count * bytes, t->gpu);
        free(room);
    } else {
        lower = (char*)state_slot_array(t->state, slot) + at;
    }
    floatX* upper = (floatX*)zero_update_parameters(t->zero) + zero_owned_in_kept(b) + first;
    weights_widen((float*)t->scratch, Weights<floatX>{upper, lower, t->master}, count, t->gpu);
}

// Copies split master weights as fp32. They are joined on the GPU, as many at a time as fit there.
static inline void transfer_download_split_(const Transfer* t, const Bucket* b, void* bucket) {
    const size_t room = t->scratch_bytes / (sizeof(float) + master_bytes(t->master)),
                 most = room / WEIGHTS_PIECE * WEIGHTS_PIECE,
                 all = bucket || map_is_divided(t->zero->map) ? b->in[MAP_OWNED].count : 0;
    for (size_t i = 0; i < all; i += most) {
        const size_t count = all - i < most ? all - i : most;
        transfer_join_(t, b, i, count);
        zero_collect_some(t->zero, b, bucket, t->scratch, DTYPE_FP32, i, count);
    }
}

// Copies the weights of group g to save: fp32 master weights if any, else floatX.
static inline void transfer_download_group(const Transfer* t, int g, void* group) {
    const Map* m = t->zero->map;
    const size_t bytes = t->master == MASTER_NONE ? sizeof(floatX) : sizeof(float);
    const auto download = t->master == MASTER_NONE   ? transfer_download_narrow_
                          : t->master == MASTER_FP32 ? transfer_download_master_
                                                     : transfer_download_split_;
    // Redundant so far: before a save, replicas are compared, which waits for the parameters, too.
    zero_wait_for_parameters(t->zero);
    for (int i = map_group(m, g).first; i < map_group(m, g).end; i++) {
        download(t, &m->buckets[i], group ? (char*)group + m->buckets[i].begin * bytes : NULL);
    }
    if (group) {
        transfer_for_biases_(t, g, bytes, group, [&](void* to, const float* from, size_t count) {
            for (size_t i = 0; i < count; i++) {
                if (t->master == MASTER_NONE) {
                    ((floatX*)to)[i] = from_float<floatX>(from[i]);
                } else {
                    ((float*)to)[i] = from[i];
                }
            }
        });
    }
}

#endif
