/*
adafactor.cuh -- adafactor.h on the GPU, for all tensors of a model, or some consecutive ones, in
five launches.

Tensors are places in arrays: a table says where each one starts in the parameters, the master
weights, the gradients and in each array of state. A tensor of one row is a vector.

If parts of a tensor belong to several ranks (owners.h), its owner replaces the gradient of all of
it by the clipped update, and adafactor_move changes the weights of a part. The bits are the same.
A relative rate also needs all weights, in fp32.

    params, master, grads         T, as in master_weights.cuh, T or fp32
    whole_weights        fp32     as grads, of such a tensor
    row_sums, col_sums   fp32     of matrices: rows, cols elements
    v                    fp32     of vectors
    m                    fp32     of both; NULL: no momentum

Launches: sums of the gradient's squares; column sums; the root mean square of the update; the
update. They need sums over the whole tensor in between, so the gradient is read three times. The
vectors take one more launch, a block each. A thread block has a tile: a band of up to
ADAFACTOR_BAND rows of a matrix.

needs:   tensors start at multiples of four elements in every array
*/
#ifndef LLMC_ADAFACTOR_CUH
#define LLMC_ADAFACTOR_CUH

#include <assert.h>

#include "llmc/optim/adafactor.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/master_weights.cuh"

enum { ADAFACTOR_WARPS_ = 8, ADAFACTOR_ROWS_OF_WARP_ = ADAFACTOR_BAND / ADAFACTOR_WARPS_ };

// A tensor of one layer: its places in arrays, in elements.
typedef struct {
    size_t params, master, m, grads;
    size_t row_sums, col_sums, v; // in the state
    uint64_t stream, first_word;  // RoundingWords
    int rows, cols;
    float rate, decay; // factors of the learning rate and of the decay; 0: no decay
    int is_apart;      // never in one update with the tensors before it
} AdafactorTensor;

// Counts of some consecutive tensors.
typedef struct {
    int matrices, vectors, tiles;
} AdafactorCount;

// A tensor with its tiles. Tiles of all tensors have consecutive numbers.
typedef struct {
    AdafactorTensor tensor;
    int first_tile, tiles;
    size_t col_parts; // in scratch memory: (tiles, cols) partial column sums
} AdafactorPlace_;

// Sums over the elements or rows of a tile.
typedef struct {
    float row_sums, squares,
        updates; // sums of the new row sums, of the weights' squares, of the update's squares
} AdafactorTile_;

// Tables and scratch memory for the tensors of a model, in device memory.
typedef struct {
    AdafactorPlace_* places; // matrices, then vectors
    int* places_of_tiles;
    AdafactorTile_* tiles;
    float* col_parts;
    AdafactorCount all;
    int most_cols;
    int width;      // elements at a time: 4 if all matrices have rows of a multiple of 4
    size_t updated; // most partial column sums in one update: tensors that are apart share memory
} AdafactorPlan;

// ---- open and close ----

static inline int adafactor_tiles_(const AdafactorTensor* t) {
    return t->rows == 1 ? 0 : ceil_div(t->rows, (int)ADAFACTOR_BAND);
}

static inline AdafactorCount adafactor_count(const AdafactorTensor* tensors, int count) {
    AdafactorCount c = {0, 0, 0};
    for (int i = 0; i < count; i++) {
        const int is_matrix = tensors[i].rows > 1;
        c.matrices += is_matrix;
        c.vectors += !is_matrix;
        c.tiles += adafactor_tiles_(&tensors[i]);
    }
    return c;
}

// Sets all of a plan but its memory.
static inline void adafactor_size_(AdafactorPlan* plan, const AdafactorTensor* tensors, int count) {
    size_t col_parts = 0;
    memset(plan, 0, sizeof(*plan));
    plan->all = adafactor_count(tensors, count);
    plan->width = 4;
    for (int i = 0; i < count; i++) {
        const AdafactorTensor* t = &tensors[i];
        col_parts = t->is_apart ? 0 : col_parts;
        if (t->rows > 1) {
            plan->most_cols = t->cols > plan->most_cols ? t->cols : plan->most_cols;
            plan->width = t->cols % 4 == 0 ? plan->width : 1;
            col_parts += (size_t)adafactor_tiles_(t) * t->cols;
        }
        plan->updated = col_parts > plan->updated ? col_parts : plan->updated;
    }
}

// Sets the table: matrices first; their tiles are numbered in this order.
static inline void adafactor_place_(AdafactorPlace_* places, int* places_of_tiles,
                                    const AdafactorTensor* tensors, int count, int matrices) {
    int tile = 0, matrix = 0, vector = matrices;
    size_t col_parts = 0;
    for (int i = 0; i < count; i++) {
        const int tiles = adafactor_tiles_(&tensors[i]), place = tensors[i].rows > 1 ? matrix++ : vector++;
        col_parts = tensors[i].is_apart ? 0 : col_parts;
        places[place] = (AdafactorPlace_){tensors[i], tile, tiles, col_parts};
        for (int k = 0; k < tiles; k++) {
            places_of_tiles[tile++] = place;
        }
        col_parts += (size_t)tiles * tensors[i].cols;
    }
}

static inline void adafactor_open(AdafactorPlan* plan, Memory* memory, const AdafactorTensor* tensors,
                                  int count) {
    const char* kind = "scratch: adafactor";
    adafactor_size_(plan, tensors, count);
    const size_t tiles = (size_t)plan->all.tiles, places_bytes = (size_t)count * sizeof(AdafactorPlace_),
                 tiles_bytes = tiles * sizeof(int);
    plan->places = (AdafactorPlace_*)memory_take(memory, kind, MEMORY_DEVICE, places_bytes);
    plan->places_of_tiles = (int*)memory_take(memory, kind, MEMORY_DEVICE, tiles_bytes);
    plan->tiles = (AdafactorTile_*)memory_take(memory, kind, MEMORY_DEVICE, tiles * sizeof(AdafactorTile_));
    plan->col_parts = (float*)memory_take(memory, kind, MEMORY_DEVICE, plan->updated * sizeof(float));
    if (memory_is_dry(memory)) {
        return;
    }
    AdafactorPlace_* places = (AdafactorPlace_*)check_alloc(places_bytes, 1, "adafactor: tensors");
    int* places_of_tiles = (int*)check_alloc(tiles_bytes, 1, "adafactor: tiles");
    adafactor_place_(places, places_of_tiles, tensors, count, plan->all.matrices);
    gpu_upload(plan->places, places, places_bytes);
    gpu_upload(plan->places_of_tiles, places_of_tiles, tiles_bytes);
    free(places_of_tiles);
    free(places);
}

// ---- shared by the kernels ----

// State by tensor. Tensors outside the update need none.
template <class G> struct AdafactorGrads_ { G* data; };

// Numbers of an update for all kernels. A tensor has its own rate and decay: adafactor_rates_.
typedef struct {
    Adafactor opt;
    float beta2;
    int first_tile;
} AdafactorLaunch_;

// Arrays of state.
typedef struct {
    float *row_sums, *col_sums, *v, *m;
} AdafactorState_;

// Weights, and the same in fp32 if they come from other ranks.
template <class T> struct AdafactorWeights_ {
    Weights<T> weights;
    const float* whole;
};

// Returns the weights of a tensor.
template <class T>
__device__ inline Weights<T> adafactor_own_(const AdafactorWeights_<T>& x, const AdafactorTensor& t) {
    return weights_from(x.weights, t.params, t.master);
}

// Returns W of all weights of a tensor.
template <int W, class T>
__device__ inline Elements<float, W> adafactor_weight_(const AdafactorWeights_<T>& x,
                                                       const AdafactorTensor& t, size_t i) {
    return x.whole ? elements_load<W>(x.whole + t.grads + i) : weights_load<W>(adafactor_own_(x, t), i);
}

// Returns the tile of a block of threads.
__device__ inline int adafactor_tile_(const AdafactorLaunch_& step) {
    return step.first_tile + (int)blockIdx.x;
}

// Rows of a tile for one warp: first, first + 8, ... below end.
typedef struct {
    int first, end;
} AdafactorRows_;

__device__ inline AdafactorRows_ adafactor_rows_(const AdafactorPlace_& place, int tile) {
    const int first = (tile - place.first_tile) * ADAFACTOR_BAND;
    const AdafactorRows_ rows = {first + (int)threadIdx.x / 32,
                                 min(first + (int)ADAFACTOR_BAND, place.tensor.rows)};
    return rows;
}

// Returns the new running mean of the squares of a row, a column or an element.
__device__ inline float adafactor_mean_(float before, float squares, float beta2) {
    return fmaf(beta2, before, (1.0f - beta2) * (squares + ADAFACTOR_EPS));
}

// Returns W elements of the gradient, scaled.
template <int W, class G>
__device__ inline Elements<float, W> adafactor_gradient_(const G* grads, size_t i, float grad_scale) {
    Elements<float, W> g = elements_convert<float>(elements_load<W>(grads + i));
#pragma unroll
    for (int k = 0; k < W; k++) {
        g[k] *= grad_scale;
    }
    return g;
}

// Returns the sum of one member over all tiles of a tensor, to every thread of the block.
__device__ inline float adafactor_sum_(const AdafactorTile_* tiles, float AdafactorTile_::*member,
                                       const AdafactorPlace_& place) {
    float sum = 0;
    for (int i = (int)threadIdx.x; i < place.tiles; i += (int)blockDim.x) {
        sum += tiles[place.first_tile + i].*member;
    }
    return block_sum(sum);
}

__device__ inline float adafactor_inverse_root_(float x) { return 1.0f / sqrtf(x); }

// Returns 1 / sqrt(row_sums_i / mean), for the rows of a warp. The update is the gradient times
// this and 1 / sqrt(col_sums_j). Multiplying the two sums first would leave fp32's range where
// gradients are zero.
__device__ inline void adafactor_row_factors_(float (&factors)[ADAFACTOR_ROWS_OF_WARP_],
                                              const float* row_sums, AdafactorRows_ rows, float mean) {
#pragma unroll
    for (int k = 0; k < ADAFACTOR_ROWS_OF_WARP_; k++) {
        const int row = rows.first + k * ADAFACTOR_WARPS_;
        factors[k] = row < rows.end ? adafactor_inverse_root_(row_sums[row] / mean) : 0.0f;
    }
}

template <int W> __device__ inline Elements<float, W> adafactor_col_factors_(const float* col_sums, int col) {
    Elements<float, W> factors;
#pragma unroll
    for (int k = 0; k < W; k++) {
        factors[k] = adafactor_inverse_root_(col_sums[col + k]);
    }
    return factors;
}

// ---- sums ----

// Adds up the sums of a block's warps for 32 W columns: the tile's partial sums.
template <int W>
__device__ inline void adafactor_store_columns_(float* col_parts, float (&of_warp)[ADAFACTOR_WARPS_][W][32],
                                                const float (&sums)[W], int first_col, int cols) {
#pragma unroll
    for (int k = 0; k < W; k++) {
        of_warp[threadIdx.x / 32][k][threadIdx.x % 32] = sums[k];
    }
    __syncthreads();
    for (int c = (int)threadIdx.x; c < 32 * W && first_col + c < cols; c += 32 * ADAFACTOR_WARPS_) {
        float sum = 0;
        for (int w = 0; w < ADAFACTOR_WARPS_; w++) {
            sum += of_warp[w][c % W][c / W];
        }
        col_parts[first_col + c] = sum;
    }
    __syncthreads();
}

// Sets the new row sums of a warp's rows; returns their sum, in lane 0.
__device__ inline float adafactor_store_rows_(float* row_sums, const float (&sums)[ADAFACTOR_ROWS_OF_WARP_],
                                              AdafactorRows_ rows, int cols, const AdafactorLaunch_& step) {
    float total = 0;
#pragma unroll
    for (int k = 0; k < ADAFACTOR_ROWS_OF_WARP_; k++) {
        const int row = rows.first + k * ADAFACTOR_WARPS_;
        const float sum = warp_sum(sums[k]);
        if (row < rows.end && threadIdx.x % 32 == 0) {
            row_sums[row] = adafactor_mean_(row_sums[row], sum / (float)cols, step.beta2);
            total += row_sums[row];
        }
    }
    return total;
}

// A block has a tile. Its warps have rows in turn, a lane W columns of every 32 W. All rows of a
// warp reach the same columns at a time, so each lane can also add up its columns.
// grid   tiles      block   256      shared   1 or 4 KiB
// moves  reads the gradient, and with a relative rate the weights; writes a 64th of the gradient's
//        elements in fp32. Bound by memory.
// order  fixed
template <class T, class G, int W>
__global__ void __launch_bounds__(32 * ADAFACTOR_WARPS_, 4)
    adafactor_sums_kernel_(AdafactorTile_* tiles, float* col_parts,
                           const __grid_constant__ AdafactorState_ state, const AdafactorGrads_<G> grads,
                           const __grid_constant__ AdafactorWeights_<T> x, const AdafactorPlace_* places,
                           const int* places_of_tiles, const __grid_constant__ AdafactorLaunch_ step) {
    SMEM_ARRAY(float, of_warp, [ADAFACTOR_WARPS_][W][32]);
    const int tile = adafactor_tile_(step);
    const AdafactorPlace_& place = places[places_of_tiles[tile]];
    const AdafactorTensor& t = place.tensor;
    const AdafactorRows_ rows = adafactor_rows_(place, tile);
    float of_rows[ADAFACTOR_ROWS_OF_WARP_] = {}, squares = 0;
    float* parts = col_parts + place.col_parts + (size_t)(tile - place.first_tile) * t.cols;
    for (int first_col = 0; first_col < t.cols; first_col += 32 * W) {
        const int col = first_col + (int)threadIdx.x % 32 * W;
        float of_cols[W] = {};
#pragma unroll
        for (int k = 0; k < ADAFACTOR_ROWS_OF_WARP_; k++) {
            const int row = rows.first + k * ADAFACTOR_WARPS_;
            if (row < rows.end && col < t.cols) {
                const size_t i = (size_t)row * t.cols + col;
                const Elements<float, W> g =
                    adafactor_gradient_<W>(grads.data + t.grads, i, step.opt.grad_scale);
#pragma unroll
                for (int e = 0; e < W; e++) {
                    of_rows[k] += g[e] * g[e];
                    of_cols[e] += g[e] * g[e];
                }
                if (step.opt.rate == ADAFACTOR_RELATIVE) {
                    const Elements<float, W> weight = adafactor_weight_<W>(x, t, i);
#pragma unroll
                    for (int e = 0; e < W; e++) {
                        squares += weight[e] * weight[e];
                    }
                }
            }
        }
        adafactor_store_columns_<W>(parts, of_warp, of_cols, first_col, t.cols);
    }
    const float sum = adafactor_store_rows_(state.row_sums + t.row_sums, of_rows, rows, t.cols, step);
    const float sum_of_rows = block_sum(sum), sum_of_squares = block_sum(squares);
    if (threadIdx.x == 0) {
        tiles[tile].row_sums = sum_of_rows;
        tiles[tile].squares = sum_of_squares;
    }
}

// A lane has a column, and the warps of a block share the tiles; then the first warp adds up their
// sums.
// grid   ceil(cols / 32), matrices      block   (32, 8)      shared   1 KiB
// moves  a 64th of the gradient's elements in fp32, mostly from L2. Bound by latency.
// order  fixed
static __global__ void __launch_bounds__(32 * ADAFACTOR_WARPS_)
    adafactor_columns_kernel_(const __grid_constant__ AdafactorState_ state, const float* col_parts,
                              const AdafactorPlace_* places, const __grid_constant__ AdafactorLaunch_ step) {
    SMEM_ARRAY(float, of_warp, [ADAFACTOR_WARPS_][32]);
    const AdafactorPlace_& place = places[blockIdx.y];
    const int cols = place.tensor.cols, col = (int)(blockIdx.x * 32 + threadIdx.x);
    float sum = 0;
    if (col < cols) {
#pragma unroll 4
        for (int i = (int)threadIdx.y; i < place.tiles; i += ADAFACTOR_WARPS_) {
            sum += col_parts[place.col_parts + (size_t)i * cols + col];
        }
    }
    of_warp[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && col < cols) {
        for (int w = 1; w < ADAFACTOR_WARPS_; w++) {
            sum += of_warp[w][threadIdx.x];
        }
        float* to = state.col_sums + place.tensor.col_sums + col;
        *to = adafactor_mean_(*to, sum / (float)place.tensor.rows, step.beta2);
    }
}

// ---- the update ----

// Calls body(i, u) for all elements of a block's tile that this thread has, W at a time: i is the
// place of the first one in the tensor, u the update before clipping.
template <int W, class G, class F>
__device__ inline void adafactor_each_(const AdafactorPlace_& place, const AdafactorGrads_<G>& grads,
                                       const AdafactorState_& state, float mean, const AdafactorLaunch_& step,
                                       F body) {
    const AdafactorTensor& t = place.tensor;
    const AdafactorRows_ rows = adafactor_rows_(place, adafactor_tile_(step));
    float row_factors[ADAFACTOR_ROWS_OF_WARP_];
    adafactor_row_factors_(row_factors, state.row_sums + t.row_sums, rows, mean);
    for (int col = (int)threadIdx.x % 32 * W; col < t.cols; col += 32 * W) {
        const Elements<float, W> col_factors = adafactor_col_factors_<W>(state.col_sums + t.col_sums, col);
#pragma unroll
        for (int k = 0; k < ADAFACTOR_ROWS_OF_WARP_; k++) {
            const int row = rows.first + k * ADAFACTOR_WARPS_;
            if (row < rows.end) {
                const size_t i = (size_t)row * t.cols + col;
                Elements<float, W> u = adafactor_gradient_<W>(grads.data + t.grads, i, step.opt.grad_scale);
#pragma unroll
                for (int e = 0; e < W; e++) {
                    u[e] *= row_factors[k] * col_factors[e];
                }
                body(i, u);
            }
        }
    }
}

// A block sums the squares of its tile's update.
// grid   tiles      block   256      shared   128 bytes
// moves  reads the gradient. Bound by memory.
// order  fixed
template <class G, int W>
__global__ void __launch_bounds__(32 * ADAFACTOR_WARPS_)
    adafactor_rms_kernel_(AdafactorTile_* tiles, const AdafactorGrads_<G> grads,
                          const __grid_constant__ AdafactorState_ state, const AdafactorPlace_* places,
                          const int* places_of_tiles, const __grid_constant__ AdafactorLaunch_ step) {
    const AdafactorPlace_& place = places[places_of_tiles[adafactor_tile_(step)]];
    const float mean = adafactor_sum_(tiles, &AdafactorTile_::row_sums, place) / (float)place.tensor.rows;
    float sum = 0;
    adafactor_each_<W>(place, grads, state, mean, step, [&](size_t, const Elements<float, W>& u) {
#pragma unroll
        for (int e = 0; e < W; e++) {
            sum += u[e] * u[e];
        }
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        tiles[adafactor_tile_(step)].updates = sum;
    }
}

// Numbers that all elements of a tensor share.
typedef struct {
    float clip; // factor of the update
    float rate, keep;
} AdafactorRates_;

// Returns the factor of a weight before its update.
__device__ inline float adafactor_keep_(const AdafactorTensor& t, const AdafactorLaunch_& step) {
    return 1.0f - step.opt.lr * t.rate * (step.opt.weight_decay * t.decay);
}

// Returns these numbers, from the means of the squares of the update and of the weights.
__device__ inline AdafactorRates_ adafactor_rates_(const AdafactorTensor& t, float updates, float squares,
                                                   const AdafactorLaunch_& step) {
    Adafactor own = step.opt;
    own.lr *= t.rate;
    const AdafactorRates_ rates = {1.0f / fmaxf(1.0f, sqrtf(updates) / own.clip),
                                   adafactor_rate(own, sqrtf(squares)), adafactor_keep_(t, step)};
    return rates;
}

// Updates W elements; weights and m start with the elements to update.
template <class T, int W>
__device__ inline void adafactor_apply_(const Weights<T>& weights, float* m, size_t i, Elements<float, W> u,
                                        const AdafactorRates_& rates, float beta1,
                                        const RoundingWords& words) {
    Elements<float, W> x = weights_load<W>(weights, i), mean;
    if (m) {
        mean = elements_load<W>(m + i);
    }
#pragma unroll
    for (int e = 0; e < W; e++) {
        u[e] *= rates.clip;
        if (m) {
            u[e] = mean[e] = fmaf(beta1, mean[e], (1.0f - beta1) * u[e]);
        }
        x[e] = fmaf(rates.keep, x[e], -(rates.rate * u[e]));
    }
    if (m) {
        elements_store(m + i, mean);
    }
    weights_store(weights, i, x, words);
}

// A block updates the elements of its tile; or, if TURNS, replaces their gradient, in fp32, by the
// clipped update, and sets the rate.
// grid   tiles      block   256      shared   128 bytes
// moves  the gradient in, m and the weights in and out, or the update out. Bound by memory.
// order  fixed
template <class T, class G, int W, int TURNS>
__global__ void __launch_bounds__(32 * ADAFACTOR_WARPS_)
    adafactor_kernel_(const __grid_constant__ AdafactorWeights_<T> x, const AdafactorGrads_<G> grads,
                      const __grid_constant__ AdafactorState_ state, const AdafactorTile_* tiles,
                      const AdafactorPlace_* places, const int* places_of_tiles, uint64_t seed, float* rate,
                      const __grid_constant__ AdafactorLaunch_ step) {
    const AdafactorPlace_& place = places[places_of_tiles[adafactor_tile_(step)]];
    const AdafactorTensor& t = place.tensor;
    const float n = (float)t.rows * (float)t.cols;
    const float mean = adafactor_sum_(tiles, &AdafactorTile_::row_sums, place) / (float)t.rows;
    const float updates = adafactor_sum_(tiles, &AdafactorTile_::updates, place) / n;
    const float squares = step.opt.rate == ADAFACTOR_RELATIVE
                              ? adafactor_sum_(tiles, &AdafactorTile_::squares, place) / n
                              : 0.0f;
    const AdafactorRates_ rates = adafactor_rates_(t, updates, squares, step);
    const Weights<T> weights = adafactor_own_(x, t);
    const RoundingWords words = rounding_words(seed, t.stream, step.opt.t, t.first_word);
    float* mean_of_updates = state.m ? state.m + t.m : NULL;
    adafactor_each_<W>(place, grads, state, mean, step, [&](size_t i, const Elements<float, W>& u) {
        if constexpr (TURNS) {
            Elements<float, W> clipped;
#pragma unroll
            for (int e = 0; e < W; e++) {
                clipped[e] = u[e] * rates.clip;
            }
            elements_store(grads.data + t.grads + i, clipped);
        } else {
            adafactor_apply_(weights, mean_of_updates, i, u, rates, step.opt.beta1, words);
        }
    });
    if (TURNS && blockIdx.x == 0 && threadIdx.x == 0) {
        *rate = rates.rate;
    }
}

// A block updates a vector, an element a thread at a time, twice.
// grid   vectors      block   256      shared   128 bytes
// moves  nothing to speak of: vectors are a thousandth of a model. Bound by latency.
// order  fixed
template <class T, class G, int TURNS>
__global__ void __launch_bounds__(256)
    adafactor_vectors_kernel_(const __grid_constant__ AdafactorWeights_<T> x, const AdafactorGrads_<G> grads,
                              const __grid_constant__ AdafactorState_ state, const AdafactorPlace_* places,
                              uint64_t seed, float* rate, const __grid_constant__ AdafactorLaunch_ step) {
    const AdafactorTensor& t = places[blockIdx.x].tensor;
    const RoundingWords words = rounding_words(seed, t.stream, step.opt.t, t.first_word);
    float *mean_of_squares = state.v + t.v, updates = 0, squares = 0;
    for (int i = (int)threadIdx.x; i < t.cols; i += 256) {
        const float g = to_float(grads.data[t.grads + i]) * step.opt.grad_scale;
        const float weight =
            step.opt.rate == ADAFACTOR_RELATIVE ? adafactor_weight_<1>(x, t, (size_t)i)[0] : 0.0f;
        mean_of_squares[i] = adafactor_mean_(mean_of_squares[i], g * g, step.beta2);
        const float u = g * adafactor_inverse_root_(mean_of_squares[i]);
        updates += u * u;
        squares += weight * weight;
    }
    updates = block_sum(updates) / (float)t.cols;
    squares = block_sum(squares) / (float)t.cols;
    const AdafactorRates_ rates = adafactor_rates_(t, updates, squares, step);
    for (int i = (int)threadIdx.x; i < t.cols; i += 256) {
        Elements<float, 1> u;
        u[0] = to_float(grads.data[t.grads + i]) * step.opt.grad_scale *
               adafactor_inverse_root_(mean_of_squares[i]);
        if constexpr (TURNS) {
            grads.data[t.grads + i] = u[0] * rates.clip;
        } else {
            adafactor_apply_(adafactor_own_(x, t), state.m ? state.m + t.m : NULL, (size_t)i, u, rates,
                             step.opt.beta1, words);
        }
    }
    if (TURNS && threadIdx.x == 0) {
        *rate = rates.rate;
    }
}

// A thread moves a weight by a clipped update.
// grid   ceil(n / 256)      block   256      shared   none
// moves  u in, m and the weights in and out. Bound by memory.
// order  every element on its own
template <class T>
__global__ void __launch_bounds__(256)
    adafactor_move_kernel_(const __grid_constant__ Weights<T> weights, float* m, const float* u,
                           const float* rate, size_t n, const __grid_constant__ AdafactorTensor t,
                           uint64_t seed, const __grid_constant__ AdafactorLaunch_ step) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) {
        const float fixed = step.opt.lr * t.rate;
        const AdafactorRates_ rates = {1.0f, step.opt.rate == ADAFACTOR_FIXED ? fixed : *rate,
                                       adafactor_keep_(t, step)};
        Elements<float, 1> clipped;
        clipped[0] = u[i];
        adafactor_apply_(weights, m, i, clipped, rates, step.opt.beta1,
                         rounding_words(seed, t.stream, step.opt.t, t.first_word));
    }
}

// Arguments of the update.
template <class T> struct AdafactorUpdate {
    Weights<T> weights;
    Gradient grads;
    float *row_sums, *col_sums, *v, *m;
    const AdafactorPlan* plan;
    Adafactor opt;
    uint64_t seed;
    AdafactorCount first, count; // tensors of the plan before those to update, and those to update
    // A tensor that comes from several ranks, with its weights: the gradient, in fp32, is replaced
    // by the clipped update, and the rate is set. NULL: weights are updated.
    float* rate;
    const float* whole_weights; // only read with a relative rate
};

template <class T, class G, int W>
static inline void adafactor_update_matrices_(const AdafactorUpdate<T>& u, const AdafactorLaunch_& step,
                                              const Gpu* gpu) {
    const AdafactorPlan* p = u.plan;
    const AdafactorGrads_<G> grads = {(G*)u.grads.data};
    const AdafactorWeights_<T> x = {u.weights, u.whole_weights};
    const AdafactorState_ state = {u.row_sums, u.col_sums, u.v, u.m};
    const AdafactorPlace_* matrices = p->places + u.first.matrices;
    const unsigned tiles = (unsigned)u.count.tiles, threads = 32 * ADAFACTOR_WARPS_;
    launch(adafactor_sums_kernel_<T, G, W>, tiles, threads, 0, gpu, p->tiles, p->col_parts, state, grads, x,
           p->places, p->places_of_tiles, step);
    launch(adafactor_columns_kernel_, dim3((unsigned)ceil_div(p->most_cols, 32), (unsigned)u.count.matrices),
           dim3(32, ADAFACTOR_WARPS_), 0, gpu, state, p->col_parts, matrices, step);
    launch(adafactor_rms_kernel_<G, W>, tiles, threads, 0, gpu, p->tiles, grads, state, p->places,
           p->places_of_tiles, step);
    if constexpr (DTYPE_OF(G) == DTYPE_FP32) {
        if (u.rate) {
            launch(adafactor_kernel_<T, G, W, 1>, tiles, threads, 0, gpu, x, grads, state, p->tiles,
                   p->places, p->places_of_tiles, u.seed, u.rate, step);
            return;
        }
    }
    launch(adafactor_kernel_<T, G, W, 0>, tiles, threads, 0, gpu, x, grads, state, p->tiles, p->places,
           p->places_of_tiles, u.seed, (float*)NULL, step);
}

template <class T, class G, int TURNS>
static inline void adafactor_update_vectors_(const AdafactorUpdate<T>& u, const AdafactorLaunch_& step,
                                             const Gpu* gpu) {
    launch(adafactor_vectors_kernel_<T, G, TURNS>, (unsigned)u.count.vectors, 256, 0, gpu,
           AdafactorWeights_<T>{u.weights, u.whole_weights}, AdafactorGrads_<G>{(G*)u.grads.data},
           AdafactorState_{u.row_sums, u.col_sums, u.v, u.m},
           u.plan->places + u.plan->all.matrices + u.first.vectors, u.seed, u.rate, step);
}

template <class T, class G>
static inline void adafactor_update_(const AdafactorUpdate<T>& u, const Gpu* gpu) {
    const AdafactorPlan* p = u.plan;
    const AdafactorLaunch_ step = {u.opt, adafactor_beta2(u.opt), u.first.tiles};
    if (u.count.matrices && p->width == 4) {
        adafactor_update_matrices_<T, G, 4>(u, step, gpu);
    } else if (u.count.matrices) {
        adafactor_update_matrices_<T, G, 1>(u, step, gpu);
    }
    if constexpr (DTYPE_OF(G) == DTYPE_FP32) {
        if (u.count.vectors && u.rate) {
            adafactor_update_vectors_<T, G, 1>(u, step, gpu);
            return;
        }
    }
    if (u.count.vectors) {
        adafactor_update_vectors_<T, G, 0>(u, step, gpu);
    }
}

template <class T> static inline void adafactor_update(const AdafactorUpdate<T>& u, const Gpu* gpu) {
    GRADIENT_DISPATCH(u.grads, T, adafactor_update_<T, G>(u, gpu));
}

// Moves n weights of a tensor by a part of its clipped update.
template <class T>
static inline void adafactor_move(const Weights<T>& weights, float* m, const float* u, const float* rate,
                                  size_t n, const AdafactorTensor& t, Adafactor opt, uint64_t seed,
                                  const Gpu* gpu) {
    const AdafactorLaunch_ step = {opt, 0, 0};
    launch(adafactor_move_kernel_<T>, (unsigned)ceil_div(n, (size_t)256), 256, 0, gpu, weights, m, u, rate, n,
           t, seed, step);
}

// Returns the bytes moved for n elements of matrices with a fixed rate: the gradient three times,
// the weights, and m.
static inline double adafactor_bytes(double n, DType params, DType grads, MasterWeights master, int has_m) {
    return n * (double)(3 * dtype_bytes(grads) + (has_m ? 2 * sizeof(float) : 0)) +
           weights_bytes(n, params, master);
}

#endif
