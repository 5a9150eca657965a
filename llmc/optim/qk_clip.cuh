/*
qk_clip.cuh -- qk_clip.h on the GPU: the host computes a factor for each row, from the scores of the
update, and a kernel multiplies the rows of what this rank updates: master weights, and parameters
rounded from them as an update does. Then all ranks gather the parameters.
*/
#ifndef LLMC_QK_CLIP_CUH
#define LLMC_QK_CLIP_CUH

#include "llmc/optim/optimizer.cuh"
#include "llmc/optim/qk_clip.h"
#include "llmc/optim/update_elements.cuh"

// Where the factors of a tensor's rows begin among those of its layer; -1: it stays.
typedef struct {
    int at;
    uint32_t rows, cols; // of a layer
} QkClipTensor_;
typedef struct {
    QkClipTensor_ of[MODEL_PARAMETER_ROWS];
    int rows, first_layer; // factors of a layer; number of this process's first one
} QkClipTensors_;

typedef struct {
    float *factors, *on_host; // (layers, rows); NULL without a clip
    QkClipTensors_ tensors;
} QkClipGpu;

static inline QkClipTensors_ qk_clip_tensors_(const Map* map) {
    const QkClipFactors f = qk_clip_factors(map->cfg);
    QkClipTensors_ tensors;
    tensors.rows = f.rows;
    tensors.first_layer = map->cfg.part.first_layer;
    for (QkClipTensor_& tensor : tensors.of) {
        tensor = {-1, 0, 0};
    }
    for (int i = 0; i < QK_CLIP_TENSORS; i++) {
        const int number = qk_clip_row(i);
        const TensorRow* row = &map->rows[number];
        const int is_vector = row->rows == 1;
        tensors.of[number] = {f.at[i], (uint32_t)(is_vector ? row->cols : row->rows),
                              (uint32_t)(is_vector ? 1 : row->cols)};
    }
    return tensors;
}

// Opens the clip of a rank; nothing if the limit is 0.
static inline void qk_clip_open(QkClipGpu* clip, Memory* memory, const Map* map, float limit) {
    const size_t bytes = (size_t)map->cfg.L * (size_t)qk_clip_factors(map->cfg).rows * sizeof(float);
    if (limit > 0) {
        clip->factors = (float*)memory_take(memory, "scratch: factors of a clip", MEMORY_DEVICE, bytes);
        clip->on_host = (float*)memory_take(memory, "staging: factors of a clip", MEMORY_PINNED, bytes);
        clip->tensors = qk_clip_tensors_(map);
    }
}

// Returns the factor of element i of a tensor of a layer, whose factors are given. Padding follows
// the last row.
__device__ inline float qk_clip_factor_(const float* factors, const QkClipTensor_& tensor, uint64_t i) {
    const uint32_t row = (uint32_t)(i / tensor.cols);
    return row < tensor.rows ? factors[tensor.at + row] : 1.0f;
}

// A thread multiplies four owned elements by the factors of their rows, as update_kernel_ has them;
// tiles of other tensors, and elements with factors of 1, stay as they are.
// grid   tiles      block   256      shared   none
// moves  the weights of queries, keys and values in, those that change out. Bound by memory.
// order  every element on its own
template <class T>
__global__ void __launch_bounds__(UPDATE_THREADS)
    qk_clip_kernel_(const __grid_constant__ Weights<T> weights, UpdateTiles tiles,
                    const __grid_constant__ QkClipTensors_ tensors, const float* factors, uint64_t seed,
                    int64_t t) {
    const size_t owned = (size_t)blockIdx.x * UPDATE_TILE + 4 * threadIdx.x;
    const UpdateRow& row = tiles.rows[tiles.row_of[blockIdx.x]];
    if (row.rule == RULE_NONE || tensors.of[row.tensor].at < 0) {
        return; // the whole block
    }
    const QkClipTensor_ tensor = tensors.of[row.tensor];
    const uint64_t word = row.word + owned,
                   layer = (word >> STATE_WORD_LAYER & ((1 << (STATE_WORD_RANK - STATE_WORD_LAYER)) - 1)) -
                           (uint64_t)tensors.first_layer,
                   i = word & (((uint64_t)1 << STATE_WORD_LAYER) - 1);
    const Weights<T> four = weights_from(weights, row.params + owned, owned);
    Elements<float, 4> x = weights_load<4>(four, 0);
    int changes = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float factor = qk_clip_factor_(factors + layer * tensors.rows, tensor, i + k);
        x[k] *= factor;
        changes |= factor != 1.0f;
    }
    if (changes) {
        weights_store(four, 0, x, rounding_words(seed, row.stream, t, word));
    }
}

// Clips the heads of this process whose scores in the update were above the limit, as
// qk_clip_layer_cpu does in each layer. Between updates; collective.
template <class T>
static inline void qk_clip(QkClipGpu* clip, const OptimizerUpdate<T>& u, Update update, const double* scores,
                           const Gpu* gpu) {
    const OptimizerState* state = u.plan->state;
    const ModelConfig cfg = state->cfg;
    const size_t rows = (size_t)clip->tensors.rows;
    int clips = 0; // the same in all ranks that have the weights
    for (int l = 0; l < cfg.L; l++) {
        clips |= qk_clip_layer_factors(clip->on_host + (size_t)l * rows, cfg, l, scores, update.qk_clip);
    }
    if (!clips) {
        return;
    }
    zero_wait_for_parameters(u.zero);
    zero_join_updates(u.zero); // nothing reads or gathers parameters any more
    CUDA_CHECK(cudaMemcpyAsync(clip->factors, clip->on_host, (size_t)cfg.L * rows * sizeof(float),
                               cudaMemcpyHostToDevice, gpu->stream));
    // the update has used the words of t
    launch(qk_clip_kernel_<T>, (unsigned)(state->map->totals.updated / UPDATE_TILE), UPDATE_THREADS, 0, gpu,
           update_weights(u), u.plan->tiles, clip->tensors, (const float*)clip->factors, u.seed, -update.t);
    zero_gather_parameters(u.zero);
}

#endif
