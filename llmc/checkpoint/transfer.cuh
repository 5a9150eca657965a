/*
transfer.cuh -- copies a model's weights and optimizer state between the host and the GPU.

They move one group of parameters (model.h) at a time. On the host, a group is fp32, alone in
memory, laid out by the rows of Transfer. On the GPU, or where --offload-optimizer keeps state, each
rank has its part of the group (zero.h).

    upload      sets the part that this rank owns: the weights that the passes read, and the master
                weights (master_weights.cuh)
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
#include "llmc/ops/q8.cuh"
#include "llmc/layers/q8_weights.h"
#include "llmc/optim/master_weights.cuh"
#include "llmc/comm/comm_nccl.cuh"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/zero.cuh"
#include "llmc/parallel/zero.h"

enum {
    TRANSFER_MOVE_BYTES = 1 << 20, // that move to another rank at a time
    TRANSFER_SCRATCH_LEAST = 2 * sizeof(float) * WEIGHTS_PIECE
};

// Returns the least scratch memory that a rank needs.
static inline size_t transfer_scratch_least(Grid grid) {
    return grid_is_plain(grid.shape) ? (size_t)TRANSFER_SCRATCH_LEAST : (size_t)TRANSFER_MOVE_BYTES;
}

typedef struct {
    const TensorRow* parameter_rows; // layout of the parameters on the GPU
    int is_quantized;                // true: matrices are in 8 bits
    ZeroGpu* zero;                   // with the parameters
    const OptimizerState* state;
    Offload* offload; // has the state if it is not on the GPU
    void* scratch;    // GPU memory that is unused between updates
    size_t scratch_bytes;
    const Gpu* gpu;

    TensorRow rows[MODEL_PARAMETER_ROWS]; // layout of a group on the host
    MasterWeights master;                 // MASTER_NONE also if the run has no state
} Transfer;

// Opens the copies after everything that is copied. The arguments must outlive them.
static inline void transfer_open(Transfer* t, const TensorRow* rows, int is_quantized, ZeroGpu* zero,
                                 const OptimizerState* state, Offload* offload, void* scratch,
                                 size_t scratch_bytes) {
    t->parameter_rows = rows;
    t->is_quantized = is_quantized;
    t->zero = zero;
    t->state = state;
    t->offload = offload;
    t->scratch = scratch;
    t->scratch_bytes = scratch_bytes;
    t->gpu = &zero->main;
    zero_parameter_rows(t->rows, &zero->plan, state->cfg, sizeof(float));
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

// Sets this rank's elements of a part of group g, and their master weights.
static inline void transfer_upload_part_(const Transfer* t, int g, ZeroPart part, const float* group) {
    const ZeroPlan* zero = &t->zero->plan;
    const ZeroPiece piece = zero_piece(zero, g, part);
    const float* from = group + (piece.full - zero_group_begin(zero, g));
    floatX* to = (floatX*)zero_update_parameters(t->zero) + piece.kept;
    if (t->master == MASTER_SPLIT) {
        transfer_upload_split_<uint16_t>(t, to, piece.owned, from, piece.count);
    } else if (t->master == MASTER_24) {
        transfer_upload_split_<int8_t>(t, to, piece.owned, from, piece.count);
    } else {
        if (t->master == MASTER_FP32) {
            transfer_upload_state(t, STATE_MASTER, piece.owned * sizeof(float), from,
                                  piece.count * sizeof(float));
        }
        transfer_upload_narrow_(t, to, from, piece.count);
    }
}

// Sets this rank's elements of both parts of group g; reads only these of `group`.
static inline void transfer_upload_group(const Transfer* t, int g, const float* group) {
    if (t->is_quantized) {
        const QuantizedParameters all = {t, t->parameter_rows, t->zero->params, transfer_set_blocks_,
                                         transfer_set_floats_};
        quantized_set_group(all, g, t->rows, group);
        return;
    }
    for (int part = 0; part < ZERO_PARTS; part++) {
        transfer_upload_part_(t, g, (ZeroPart)part, group);
    }
}

// ---- weights to the host: collective; `group` is NULL in ranks that do not want it ----

// Copies a part of group g of fp32 master weights; `group` is the whole group.
static inline void transfer_download_part_(const Transfer* t, int g, ZeroPart part, float* group) {
    const ZeroPlan* zero = &t->zero->plan;
    const int slot = state_master_slot(t->master), is_divided = zero_is_divided(zero);
    const ZeroPiece piece = zero_piece(zero, g, part);
    const size_t bytes = sizeof(float), before = zero_part_begin(zero, g, part) - zero_group_begin(zero, g);
    if (!t->offload->slots) {
        const char* array = (const char*)state_slot_array(t->state, slot);
        zero_collect(t->zero, group, g, part, array + piece.owned * bytes, DTYPE_FP32);
        return;
    }
    void* room = is_divided ? check_alloc(piece.count, bytes, "copy of master weights") : NULL;
    void* mine = is_divided ? room : group ? group + before : NULL;
    if (mine) {
        offload_read(t->offload, mine, slot, piece.owned * bytes, piece.count * bytes);
    }
    if (is_divided) {
        zero_collect(t->zero, group, g, part, mine, DTYPE_FP32);
    }
    free(room);
}

static inline void transfer_download_master_(const Transfer* t, int g, float* group) {
    for (int part = 0; part < ZERO_PARTS; part++) {
        transfer_download_part_(t, g, (ZeroPart)part, group);
    }
}

// Copies group g of the weights that the passes read.
static inline void transfer_download_narrow_(const Transfer* t, int g, void* group) {
    const ZeroPlan* zero = &t->zero->plan;
    if (t->zero->params_slices) { // here groups have only one part
        zero_collect(t->zero, group, g, ZERO_TRAINED,
                     (floatX*)t->zero->params_slices + zero_piece(zero, g, ZERO_TRAINED).kept,
                     DTYPE_OF(floatX));
    } else if (group) {
        gpu_copy(group, (floatX*)t->zero->params + zero_group_begin(zero, g),
                 zero_group_elements(zero, g) * sizeof(floatX), t->gpu);
    }
}

// Sets t->scratch to some of this rank's weights as fp32, from element `first` of a piece, by
// joining their upper and lower parts. The lower parts are on the GPU or offloaded.
static inline void transfer_join_(const Transfer* t, ZeroPiece piece, ZeroElements some) {
    const int slot = state_master_slot(t->master);
    const size_t bytes = master_bytes(t->master), at = (piece.owned + some.first) * bytes;
    char* lower = (char*)t->scratch + some.count * sizeof(float);
    if (t->offload->slots) {
        void* room = check_alloc(some.count, bytes, "copy of master weights");
        offload_read(t->offload, room, slot, at, some.count * bytes);
        gpu_copy(lower, room, some.count * bytes, t->gpu);
        free(room);
    } else {
        lower = (char*)state_slot_array(t->state, slot) + at;
    }
    floatX* upper = (floatX*)zero_update_parameters(t->zero) + piece.kept + some.first;
    weights_widen((float*)t->scratch, Weights<floatX>{upper, lower, t->master}, some.count, t->gpu);
}

// Copies split master weights as fp32. They are joined on the GPU, as many at a time as fit there.
static inline void transfer_download_split_(const Transfer* t, int g, float* group) {
    const size_t room = t->scratch_bytes / (sizeof(float) + master_bytes(t->master)),
                 most = room / WEIGHTS_PIECE * WEIGHTS_PIECE;
    for (int part = 0; part < ZERO_PARTS && (group || zero_is_divided(&t->zero->plan)); part++) {
        const ZeroPiece piece = zero_piece(&t->zero->plan, g, (ZeroPart)part);
        for (size_t i = 0; i < piece.count; i += most) {
            const ZeroElements some = {i, piece.count - i < most ? piece.count - i : most};
            transfer_join_(t, piece, some);
            zero_collect_some(t->zero, group, g, (ZeroPart)part, some, t->scratch, DTYPE_FP32);
        }
    }
}

// Copies the weights of group g to save: fp32 master weights if any, else floatX.
static inline void transfer_download_group(const Transfer* t, int g, void* group) {
    // Redundant so far: before a save, replicas are compared, which waits for the parameters, too.
    zero_wait_for_parameters(t->zero);
    if (t->master == MASTER_FP32) {
        transfer_download_master_(t, g, (float*)group);
    } else if (t->master != MASTER_NONE) {
        transfer_download_split_(t, g, (float*)group);
    } else {
        transfer_download_narrow_(t, g, group);
    }
}

#endif
