/*
shared_keys.cuh -- shared_keys.h on GPUs. All is queued on the main stream.
*/
#ifndef LLMC_SHARED_KEYS_CUH
#define LLMC_SHARED_KEYS_CUH

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/parallel/shared_keys.h"
#include "llmc/parallel/zero.cuh"

enum { SHARED_KEYS_THREADS_ = 256 };

// Copies of shared heads in one array, `stride` elements apart.
template <class G> struct SharedCopies {
    G* data;
    size_t stride;
    int count;
};

// Sets the first of the own copies (count of `n`) to the sum of these and of the others, in fp32,
// and clears the rest of the own.
// grid   ceil(n / 256)      block   256      shared   none
// moves  all copies in, the own ones out. Few elements, once an update.
// order  copy after copy
template <class G>
__global__ void __launch_bounds__(SHARED_KEYS_THREADS_)
    shared_keys_add_kernel(SharedCopies<G> own, SharedCopies<const G> others, size_t n) {
    const size_t e = (size_t)blockIdx.x * SHARED_KEYS_THREADS_ + threadIdx.x;
    if (e >= n) {
        return;
    }
    float sum = to_float(own.data[e]);
    for (int i = 1; i < own.count; i++) {
        G* copy = own.data + i * own.stride + e;
        sum += to_float(*copy);
        *copy = from_float<G>(0.0f);
    }
    for (int i = 0; i < others.count; i++) {
        sum += to_float(others.data[i * others.stride + e]);
    }
    own.data[e] = from_float<G>(sum);
}

// Makes a step for the copies of a row whose first one is slice i of this process.
template <class G>
static inline void shared_keys_own_(const SharedKeys* k, SharedKeysStep step, const SharedKeysLayer* layer,
                                    int row, int i, const Gpu* gpu) {
    const int own = k->cfg.part.first_slice, slices = model_slices(k->cfg),
              count = int_min(k->share, slices - i);
    char *first = NULL, *next = NULL;
    const size_t n = shared_keys_piece(k, layer, row, i, &first);
    if (n == 0) {
        return;
    }
    if (count > 1) {
        shared_keys_piece(k, layer, row, i + 1, &next);
    }
    const size_t stride = count > 1 ? (size_t)(next - first) / sizeof(G) : 0;
    if (step == SHARED_KEYS_ADD) {
        const int others = k->share - count;
        const G* arrived = others > 0 ? (const G*)shared_keys_arrived(k, layer, row, own + slices) : NULL;
        const SharedCopies<G> of_own = {(G*)first, stride, count};
        const SharedCopies<const G> of_others = {arrived, k->room, others};
        launch(shared_keys_add_kernel<G>, (unsigned)ceil_div(n, (size_t)SHARED_KEYS_THREADS_),
               SHARED_KEYS_THREADS_, 0, gpu, of_own, of_others, n);
    }
    for (int j = 1; j < count && step == SHARED_KEYS_COPY; j++) {
        CUDA_CHECK(
            cudaMemcpyAsync((G*)first + j * stride, first, n * sizeof(G), cudaMemcpyDefault, gpu->stream));
    }
}

// Makes a step for a row of a layer, after the exchange.
template <class G>
static inline void shared_keys_row_(const SharedKeys* k, SharedKeysStep step, const SharedKeysLayer* layer,
                                    int row, const Gpu* gpu) {
    const int own = k->cfg.part.first_slice;
    for (int i = 0; i < model_slices(k->cfg); i++) {
        char* piece = NULL;
        if ((own + i) % k->share == 0) {
            shared_keys_own_<G>(k, step, layer, row, i, gpu);
        } else if ((own + i) % k->share > i && step == SHARED_KEYS_ADD) {
            // another process has the first
            const size_t n = shared_keys_piece(k, layer, row, i, &piece);
            CUDA_CHECK(cudaMemsetAsync(piece, 0, n * sizeof(G), gpu->stream));
        }
    }
}

template <class G>
static inline void shared_keys_array_(const SharedKeys* k, SharedKeysStep step, G* array, ZeroCut cut,
                                      const GroupGpu* tensor, const Gpu* gpu) {
    GroupMove moves[SHARED_KEYS_MOVES];
    for (int copy = 0; copy < model_copies(k->cfg); copy++) {
        const SharedKeysLayer layer = {(char*)array, sizeof(G), cut, copy};
        const int count = shared_keys_moves(k, step, &layer, moves);
        if (count > 0) {
            group_exchange(moves, count, tensor, gpu->stream);
        }
        for (int row = 0; row < MODEL_PARAMETER_ROWS; row++) {
            if (shared_keys_has_row(k, row)) {
                shared_keys_row_<G>(k, step, &layer, row, gpu);
            }
        }
    }
}

// Makes a step on the reduced gradient of an update, for which the main stream has waited.
// Collective.
template <class T>
static inline void shared_keys_step(const SharedKeys* k, SharedKeysStep step, const ZeroGpu* z,
                                    const GroupGpu* tensor, const Gpu* gpu) {
    const ZeroCut all = {1, 0};
    const Gradient shard = zero_gradient(z);
    if (k->share == 1) {
        return;
    }
    GRADIENT_DISPATCH(shard, T,
                      shared_keys_array_<G>(k, step, (G*)shard.data, zero_shard_of(&z->plan, 1, z->plan.rank),
                                            tensor, gpu));
    if (z->plan.stage == 0 && z->shard) { // which the update reads
        GRADIENT_DISPATCH(z->grads, T, shared_keys_array_<G>(k, step, (G*)z->grads.data, all, tensor, gpu));
    }
}

#endif
