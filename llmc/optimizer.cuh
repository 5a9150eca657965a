/*
optimizer.cuh -- the update of optimizer.h on the GPU: all parameters in one launch, with master weights or stochastic
rounding.

Parameters are a full array, laid out by gpt2_sharded_rows_of; in stage 3 they are what is kept of it: zero_kept_cut.
Gradients have what this process updates of each group (zero.h), group after group: `owned` elements, which is all of them
with one process. The slots lie as optimizer.h says. All is updated with its padding. Arrays start at multiples of 16 bytes.

    params    (full)    T      set; without master weights also read
    grads     (owned)   T or fp32
    slots               updated

How weights are read and rounded: update.cuh.

defines: OptimizerPlan, optimizer_open, optimizer_freeze, optimizer_close, OptimizerUpdate, optimizer_update, optimizer_update_part,
         optimizer_bytes
*/
#ifndef LLMC_OPTIMIZER_CUH
#define LLMC_OPTIMIZER_CUH

#include <assert.h>
#include <limits.h>

#include "llmc/adamw.cuh"
#include "llmc/freeze.h"
#include "llmc/gpt2.h"
#include "llmc/gpu.cuh"
#include "llmc/lion.cuh"
#include "llmc/optimizer.h"
#include "llmc/sgd.cuh"
#include "llmc/update.cuh"
#include "llmc/zero.h"

// ---- places ----

// A thread block updates a piece: four elements a thread. Groups and their shards are whole pieces.
enum { UPDATE_PIECE_ = GPT2_SHARD_UNIT, UPDATE_THREADS_ = UPDATE_PIECE_ / 4 };

// Numbers of pieces.
typedef struct {
    uint32_t once, block;  // that this process has of group 0, of each other group: part `rank` of `shards`
    uint32_t rank, shards; // equal parts
    uint32_t count;        // that it has in all
    uint32_t params_rank, params_shards; // the same in what is kept of a group of parameters
} UpdatePieces_;

// What belongs to a layout of parameters: where pieces lie, and which tensor an element is of.
typedef struct {
    const OptimizerState* state;
    UpdatePieces_ pieces;
    uint8_t*
        rows; // on the GPU: of the parameters, for each TENSOR_ALIGN elements of group 0, and then of any one block
    uint32_t* frozen; // (groups) on the GPU: bit i, row i is not updated there; NULL: all are
} OptimizerPlan;

enum { UPDATE_ROWS_ = UPDATE_PIECE_ / TENSOR_ALIGN }; // of a piece: one for each warp

// Padding is part of the tensor before it.
static inline void update_set_rows_(uint8_t* rows, const ZeroPlan* zero, const OptimizerState* state) {
    const size_t all = (zero->once + zero->block) / TENSOR_ALIGN;
    for (int i = 0; i < GPT2_PARAMETER_ROWS;
         i++) { // the last tensor of group 0 comes after those of the blocks
        const size_t begin = state->rows[i].offset_bytes / TENSOR_ALIGN;
        const size_t end = state->rows[i].place == PLACE_ONCE ? zero->once / TENSOR_ALIGN : all;
        assert(state->rows[i].offset_bytes % TENSOR_ALIGN == 0);
        memset(rows + begin, i, end - begin);
    }
}

// `state` is that of the same shards, and stays.
static inline void optimizer_open(OptimizerPlan* plan, const ZeroPlan* zero, const OptimizerState* state) {
    const ZeroCut own = zero_owned_cut(zero), in_kept = zero_owned_in_kept(zero);
    const size_t part = (size_t)own.parts * UPDATE_PIECE_, count = zero_owned_elements(zero) / UPDATE_PIECE_;
    const size_t bytes = (zero->once + zero->block) / TENSOR_ALIGN;
    CHECK(count <= INT_MAX, "%zu pieces of parameters are too many for a launch", count);
    plan->state = state;
    plan->frozen = NULL;
    plan->pieces.once = (uint32_t)(zero->once / part);
    plan->pieces.block = (uint32_t)(zero->block / part);
    plan->pieces.rank = (uint32_t)own.part;
    plan->pieces.shards = (uint32_t)own.parts;
    plan->pieces.count = (uint32_t)count;
    plan->pieces.params_rank = (uint32_t)in_kept.part;
    plan->pieces.params_shards = (uint32_t)in_kept.parts;
    plan->rows = (uint8_t*)gpu_alloc(bytes, 1, "tensors of an update");
    uint8_t* rows = (uint8_t*)check_alloc(bytes, 1, "tensors of an update");
    update_set_rows_(rows, zero, state);
    CUDA_CHECK(cudaMemcpy(plan->rows, rows, bytes, cudaMemcpyHostToDevice));
    free(rows);
}

// After optimizer_open: updates leave frozen parameters as they are, in a model of L blocks.
static inline void optimizer_freeze(OptimizerPlan* plan, const Freeze* freeze, int L) {
    const size_t bytes = ((size_t)L + 1) * sizeof(uint32_t);
    uint32_t* frozen = (uint32_t*)check_alloc(bytes, 1, "frozen parameters");
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        for (int l = 0; l < L; l++) {
            const int group = plan->state->rows[i].place == PLACE_BLOCK ? 1 + l : 0;
            frozen[group] |= (uint32_t)freeze_has(freeze, i, l) << i;
        }
    }
    plan->frozen = (uint32_t*)gpu_alloc(bytes, 1, "frozen parameters");
    CUDA_CHECK(cudaMemcpy(plan->frozen, frozen, bytes, cudaMemcpyHostToDevice));
    free(frozen);
}

static inline void optimizer_close(OptimizerPlan* plan) {
    gpu_free(plan->frozen);
    gpu_free(plan->rows);
}

// Where a piece of the owned arrays lies.
typedef struct {
    uint32_t full;   // the piece of the parameters
    uint32_t group;  //
    uint32_t offset; // pieces before it in its group
    uint32_t rows;   // pieces before it in OptimizerPlan.rows
} UpdatePlace_;

__device__ inline UpdatePlace_ update_place_(const UpdatePieces_& p, uint32_t piece) {
    const uint32_t group = piece < p.once ? 0 : 1 + (piece - p.once) / p.block;
    const uint32_t begin = group == 0 ? 0 : p.once + (group - 1) * p.block; // of the group, in owned arrays
    const uint32_t part = group == 0 ? p.once : p.block, offset = p.rank * part + (piece - begin);
    const UpdatePlace_ place = {begin * p.params_shards + p.params_rank * part + (piece - begin), group,
                                offset, (group == 0 ? 0 : p.once * p.shards) + offset};
    return place;
}

// ---- the kernel ----

// All arrays, or four elements of them.
template <class T, class G> struct UpdateArrays_ {
    Weights<T> weights;
    const G* grads;
    float *m, *v; // NULL: no rule has them
};

// The numbers of an update, those of tensors by row.
typedef struct {
    UpdateScalars_ scalars;
    UpdateRates_ rates[GPT2_PARAMETER_ROWS];
} UpdateNumbers_;

static inline UpdateNumbers_ update_numbers_(const OptimizerState* state, Update update) {
    const AdamW a = update.adamw;
    UpdateNumbers_ n;
    n.scalars.beta1 = a.beta1, n.scalars.beta2 = a.beta2, n.scalars.eps = a.eps;
    n.scalars.grad_scale = a.grad_scale, n.scalars.momentum = update.sgd_momentum;
    n.scalars.v_correction = (float)(1 / (1 - pow(a.beta2, (double)a.t)));
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const AdamW of_row = update_of_row(update, &state->rows[i]).adamw;
        const double corrected = state->rule[i] == RULE_ADAMW ? 1 - pow(a.beta1, (double)a.t) : 1;
        n.rates[i].keep = (float)(1 - (double)of_row.lr * of_row.weight_decay);
        n.rates[i].step = (float)(of_row.lr / corrected);
    }
    return n;
}

// Updates four elements. All is loaded before anything is computed.
template <class T, class G, UpdateRule RULE>
__device__ inline void update_four_(const UpdateArrays_<T, G>& a, UpdateRates_ rates,
                                    const UpdateScalars_& scalars, const RoundingWords& words) {
    const Elements<G, 4> g = elements_load<4>(a.grads);
    Elements<float, 4> x = weights_load<4>(a.weights, 0);
    if (RULE == RULE_ADAMW) {
        adamw_four_(&x, g, a.m, a.v, rates, scalars);
    } else if (RULE == RULE_LION) {
        lion_four_(&x, g, a.m, rates, scalars);
    } else {
        sgd_four_(&x, g, a.m, rates, scalars);
    }
    weights_store(a.weights, 0, x, words);
}

// A thread updates four elements, a block of threads a piece: 16-byte accesses to fp32 data, 8-byte to 16-bit
// data, coalesced. A warp's elements are of one tensor: they are TENSOR_ALIGN.
// grid   pieces, from piece `first` on      block   256      shared   none
// moves  optimizer_bytes. Bound by memory: Philox takes some 30 instructions an element, the rest some 50,
//        together less than half of what an H100 can issue in the time.
// order  every element on its own
template <class T, class G, UpdateRule RULE>
__global__ void __launch_bounds__(UPDATE_THREADS_)
    update_kernel_(const __grid_constant__ UpdateArrays_<T, G> a, const uint8_t* rows, const uint32_t* frozen,
                   const __grid_constant__ UpdatePieces_ pieces, uint32_t first,
                   const __grid_constant__ UpdateNumbers_ numbers, uint64_t seed, uint64_t stream) {
    const uint32_t piece = first + blockIdx.x;
    const UpdatePlace_ place = update_place_(pieces, piece);
    const size_t owned = (size_t)piece * UPDATE_PIECE_ + 4 * threadIdx.x,
                 full = (size_t)place.full * UPDATE_PIECE_ + 4 * threadIdx.x;
    const int row = rows[(size_t)place.rows * UPDATE_ROWS_ + threadIdx.x / 32];
    if (frozen && frozen[place.group] >> row & 1) {
        return; // the whole warp
    }
    const RoundingWords words = {seed, stream,
                                 ((uint64_t)place.group << 40) + (uint64_t)place.offset * UPDATE_PIECE_ +
                                     4 * threadIdx.x};
    const Weights<T> weights = {a.weights.params + full,
                                (char*)a.weights.master + owned * master_bytes(a.weights.kind),
                                a.weights.kind};
    const UpdateArrays_<T, G> four = {weights, a.grads + owned, a.m ? a.m + owned : NULL,
                                      a.v ? a.v + owned : NULL};
    update_four_<T, G, RULE>(four, numbers.rates[row], numbers.scalars, words);
}

// ---- the update ----

// All that an update takes; as above.
template <class T> struct OptimizerUpdate {
    T* params;
    Gradient grads;
    void* slots[STATE_SLOTS]; // NULL: nothing has it
    const OptimizerPlan* plan;
    Update update;
    uint64_t seed;
};

template <class T, class G, UpdateRule RULE>
static inline void update_launch_(const OptimizerUpdate<T>& u, uint32_t first, unsigned count,
                                  const Gpu* gpu) {
    const Weights<T> weights = {u.params, u.slots[STATE_MASTER], u.plan->state->optimizer.master};
    const UpdateArrays_<T, G> arrays = {weights, (const G*)u.grads.data, (float*)u.slots[STATE_M],
                                        (float*)u.slots[STATE_V]};
    const uint64_t stream = rand_stream("adamw") + (uint64_t)u.update.adamw.t;
    launch(update_kernel_<T, G, RULE>, count, UPDATE_THREADS_, 0, gpu, arrays, u.plan->rows, u.plan->frozen,
           u.plan->pieces, first, update_numbers_(u.plan->state, u.update), u.seed, stream);
}

template <class T, class G>
static inline void update_launch_rule_(const OptimizerUpdate<T>& u, uint32_t first, unsigned count,
                                       const Gpu* gpu) {
    switch (u.plan->state->rule[0]) { // all rows have the same
    case RULE_ADAMW:
        update_launch_<T, G, RULE_ADAMW>(u, first, count, gpu);
        break;
    case RULE_LION:
        update_launch_<T, G, RULE_LION>(u, first, count, gpu);
        break;
    case RULE_SGD:
        update_launch_<T, G, RULE_SGD>(u, first, count, gpu);
        break;
    case RULE_NONE:
        assert(!"GPUs have state of frozen parameters, too");
    }
}

// The update of `count` elements from `first` on, both multiples of GPT2_SHARD_UNIT, of those that this process owns. Of the
// slots only what belongs to these need be there; the pointers are those to the whole arrays.
template <class T>
static inline void optimizer_update_part(const OptimizerUpdate<T>& u, size_t first, size_t count,
                                         const Gpu* gpu) {
    assert(is_aligned_(u.params) && is_aligned_(u.grads.data) && first % UPDATE_PIECE_ == 0 &&
           count % UPDATE_PIECE_ == 0);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        assert(is_aligned_(u.slots[slot]));
    }
    GRADIENT_DISPATCH(u.grads, T,
                      (update_launch_rule_<T, G>(u, (uint32_t)(first / UPDATE_PIECE_),
                                                 (unsigned)(count / UPDATE_PIECE_), gpu)));
}

// Of all of them.
template <class T> static inline void optimizer_update(const OptimizerUpdate<T>& u, const Gpu* gpu) {
    optimizer_update_part(u, 0, (size_t)u.plan->pieces.count * UPDATE_PIECE_, gpu);
}

// What the update of all elements moves: it reads gradients, slots, and parameters that have no master; it writes slots and
// parameters.
static inline double optimizer_bytes(const OptimizerState* state, const ZeroPlan* zero, DType params,
                                     DType grads) {
    const double n = (double)zero_owned_elements(zero), p = (double)dtype_bytes(params);
    double bytes = n * ((double)dtype_bytes(grads) + (state->slots[STATE_MASTER].bytes ? p : 2 * p));
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        bytes += 2 * (double)state->slots[slot].bytes;
    }
    return bytes;
}

#endif
