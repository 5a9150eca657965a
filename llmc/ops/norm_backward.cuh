/*
norm_backward.cuh -- the backward pass of norms (norm.h) on the GPU, on T = float, bf16 or fp16.

The split of rows into groups depends only on N. dweight and dbias are summed row by row within a
group, then over the groups in a fixed order. norm_backward also sets or adds to

    dinp_sum (C)    the sum over the rows of dinp, as dinp is stored

This is the bias gradient of the linear layer whose output was added to inp last. It is skipped if
it has no data. norm_dinp_sum sets it to the same bits where dinp came from elsewhere.
*/
#ifndef LLMC_NORM_BACKWARD_CUH
#define LLMC_NORM_BACKWARD_CUH

#include <assert.h>

#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/norm.cuh"

#define NORM_GROUP_ROWS 8 // least rows of a group: partial sums below a tenth of the traffic
#define NORM_BACKWARD_THREADS 512
#define NORM_WARPS 16 // warps per multiprocessor in the backward pass: 128 registers per thread

// Most groups of rows in the backward pass. An H100's 132 multiprocessors hold 5, 4, 3 or 2 blocks
// each for rows of 768, 1024, 1280 or 1600 elements of 16 bits: 1980 groups are 3, 3.75, 5 or 7.5
// waves of blocks.
#define NORM_GROUPS 1980

// Scratch for the partial sums of dweight, dbias and dinp_sum.
typedef struct {
    float* partial; // (groups, 3, C)
    size_t floats;
} NormScratch;

static inline int norm_group_rows_(int N) {
    const int batch = 2 * ceil_div(N, 2 * NORM_GROUPS); // whole batches of 2 rows
    return batch > NORM_GROUP_ROWS ? batch : NORM_GROUP_ROWS;
}

static inline int norm_groups(int N) { return ceil_div(N, norm_group_rows_(N)); }

static inline size_t norm_floats_(int N, int C) {
    const int most = NORM_GROUPS * NORM_GROUP_ROWS; // with more rows than this, groups grow instead
    return 3 * (size_t)C * (N < most ? norm_groups(N) : NORM_GROUPS);
}

// Takes scratch for up to N rows of up to C columns.
static inline void norm_open(NormScratch* scratch, Memory* memory, int N, int C) {
    scratch->floats = norm_floats_(N, C);
    scratch->partial = (float*)memory_take(memory, "scratch: partial sums of norms", MEMORY_DEVICE,
                                           scratch->floats * sizeof(float));
}

// State of a thread for one group of WIDTH columns, over all rows of a block.
template <int WIDTH> struct NormColumns_ { float weight[WIDTH], dweight[WIDTH], dbias[WIDTH]; };

// A thread's part of the next few rows, in packs or elements just as they are in memory. They are
// loaded while the rows before are processed.
template <int ROWS, int ITEMS> struct NormRows_ {
    int4 dout[ROWS][ITEMS], inp[ROWS][ITEMS], dinp[ROWS][ITEMS];
    float mean[ROWS], rstd[ROWS];
};

// Loads rows n ... n + ROWS - 1. Rows from `end` on and columns from C on become zeros, and so does
// a dinp that will be set.
template <int WIDTH, NormKind KIND, class T, int ROWS, int ITEMS>
__device__ inline void norm_load_rows_(NormRows_<ROWS, ITEMS>* rows, const T* dinp, const T* dout,
                                       const T* inp, const float* mean, const float* rstd, int n, int end,
                                       int C, GradientMode dinp_mode) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        rows->mean[r] = KIND == NORM_LAYER && n + r < end ? mean[n + r] : 0.0f;
        rows->rstd[r] = n + r < end ? rstd[n + r] : 0.0f;
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int c = (int)(threadIdx.x + k * blockDim.x) * WIDTH;
            const bool is_there = n + r < end && c < C;
            const size_t at = (size_t)(n + r) * C + c;
            rows->dout[r][k] = norm_load_words_<WIDTH>(dout + at, is_there);
            rows->inp[r][k] = norm_load_words_<WIDTH>(inp + at, is_there);
            rows->dinp[r][k] = norm_load_words_<WIDTH>(dinp + at, is_there && dinp_mode == GRADIENT_ADD);
        }
    }
}

// Sums VALUES values of every thread, a power of 2 up to 32, over its warp. Each step leaves a lane
// half as many values, each summed over twice as many lanes. Lane i returns the sum of value i /
// (32 / VALUES).
template <int VALUES> __device__ inline float norm_warp_sums_(float* x) {
    const int lane = threadIdx.x % 32;
    int distance = 16;
#pragma unroll
    for (int half = VALUES / 2; half > 0; half /= 2, distance /= 2) {
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int v = 0; v < half; v++) {
            const float give = upper ? x[v] : x[v + half];
            x[v] = (upper ? x[v + half] : x[v]) + __shfl_xor_sync(0xffffffffu, give, distance);
        }
    }
#pragma unroll
    for (int rest = 16 / VALUES; rest > 0; rest /= 2) {
        x[0] += __shfl_xor_sync(0xffffffffu, x[0], rest);
    }
    return x[0];
}

// Sums VALUES values of every thread over the block; every thread gets the results. of_warp (warps,
// VALUES) must not be the array of the previous call: then one barrier is enough. WARPS is the
// number of warps, or 0 if it is not known at compile time.
template <int VALUES, int WARPS> __device__ inline void norm_block_sums_(float* x, float (*of_warp)[VALUES]) {
    const int lane = threadIdx.x % 32, warps = WARPS ? WARPS : blockDim.x / 32;
    const float sum = norm_warp_sums_<VALUES>(x);
    if (lane % (32 / VALUES) == 0) {
        of_warp[threadIdx.x / 32][lane / (32 / VALUES)] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VALUES; v++) {
        x[v] = of_warp[0][v];
    }
    for (int w = 1; w < warps; w++) {
#pragma unroll
        for (int v = 0; v < VALUES; v++) {
            x[v] += of_warp[w][v];
        }
    }
}

// Returns the number of sums over a row that its gradient needs: of g norm, and, except for RMS, g.
__host__ __device__ constexpr int norm_sums_(NormKind kind) { return kind == NORM_LAYER ? 2 : 1; }

// Adds WIDTH elements of a row to its sums, and to the columns' sums. x becomes norm, d becomes
// g.
template <int WIDTH, NormKind KIND>
__device__ inline void norm_backward_take_(float* d, float* x, float* sums, NormColumns_<WIDTH>* columns,
                                           float mean, float rstd) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        x[i] = (x[i] - mean) * rstd;
        columns->dweight[i] += d[i] * x[i];
        if constexpr (KIND == NORM_LAYER) {
            columns->dbias[i] += d[i];
        }
        d[i] *= columns->weight[i];
        if constexpr (KIND == NORM_LAYER) {
            sums[1] += d[i];
        }
        sums[0] += d[i] * x[i];
    }
}

// A thread's sums of WIDTH columns of dinp over the rows of a block. They are in shared memory
// because registers are full; no other thread uses them. They are stored in fours, and the fours of
// neighboring threads lie side by side.
template <int WIDTH, int THREADS> struct NormSums_ { float4 of[WIDTH == 1 ? 1 : WIDTH / 4][THREADS]; };

template <int WIDTH, int THREADS> __device__ inline void norm_clear_sums_(NormSums_<WIDTH, THREADS>* sums) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 4) {
        sums->of[i / 4][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

template <int WIDTH, int THREADS>
__device__ inline void norm_add_to_sums_(NormSums_<WIDTH, THREADS>* sums, const float* x) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 4) {
        float4 sum = sums->of[i / 4][threadIdx.x];
        sum.x += x[i];
        if constexpr (WIDTH > 1) {
            sum.y += x[i + 1];
            sum.z += x[i + 2];
            sum.w += x[i + 3];
        }
        sums->of[i / 4][threadIdx.x] = sum;
    }
}

template <int WIDTH> __device__ inline void norm_scale_columns_(NormColumns_<WIDTH>* columns, float factor) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        columns->dweight[i] *= factor;
    }
}

// Sets this thread's columns of the three partial sums of the block's group of rows.
template <int WIDTH, int THREADS>
__device__ inline void norm_store_columns_(float* partial, NormColumns_<WIDTH>* columns,
                                           NormSums_<WIDTH, THREADS>* sums, int c, int C) {
    constexpr int STEP = WIDTH == 1 ? 1 : 4; // floats that are stored at once
    float* to = partial + 3 * (size_t)blockIdx.x * C + c;
#pragma unroll
    for (int i = 0; i < WIDTH; i += STEP) {
        norm_store_<STEP>(to + i, columns->dweight + i);
        norm_store_<STEP>(to + C + i, columns->dbias + i);
        norm_store_<STEP>(to + 2 * C + i, &sums->of[i / 4][threadIdx.x].x);
    }
}

// Rows in progress: g = dout weight, norm and rstd as in norm.h, and dinp, first old, then new.
template <int SIZE, int ROWS, int ITEMS> struct NormWork_ {
    float g[ROWS][ITEMS][SIZE], norm[ROWS][ITEMS][SIZE], rstd[ROWS];
    int4 dinp[ROWS][ITEMS];
};

// Unpacks the rows, and adds them to the sums: of g and g norm for each row, and of the columns.
template <class T, NormKind KIND, int WIDTH, int ROWS, int ITEMS>
__device__ inline void norm_take_rows_(NormWork_<Pack<T>::SIZE, ROWS, ITEMS>* work, float* sums,
                                       NormColumns_<WIDTH>* columns, const NormRows_<ROWS, ITEMS>* rows) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        work->rstd[r] = rows->rstd[r];
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            unpack<T>(work->g[r][k], rows->dout[r][k]);
            unpack<T>(work->norm[r][k], rows->inp[r][k]);
            work->dinp[r][k] = rows->dinp[r][k];
            norm_backward_take_<WIDTH, KIND>(work->g[r][k], work->norm[r][k], &sums[norm_sums_(KIND) * r],
                                             &columns[k], rows->mean[r], work->rstd[r]);
        }
    }
}

// Sets or adds to dinp of rows n ... n + ROWS - 1, and adds the stored values to the sums of its
// columns.
template <class T, NormKind KIND, int WIDTH, int ROWS, int ITEMS, int THREADS>
__device__ inline void norm_finish_rows_(T* dinp, NormSums_<WIDTH, THREADS>* dinp_sums,
                                         NormWork_<Pack<T>::SIZE, ROWS, ITEMS>* work, const float* sums,
                                         float part, int n, int end, int C) {
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const int c = (int)(threadIdx.x + k * blockDim.x) * WIDTH;
        float dinp_sum[WIDTH] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float slope = sums[norm_sums_(KIND) * r] * part,
                        shift = KIND == NORM_LAYER ? sums[norm_sums_(KIND) * r + 1] * part : 0.0f;
            if (n + r < end && c < C) {
                float d[Pack<T>::SIZE];
                unpack<T>(d, work->dinp[r][k]);
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    d[i] += work->rstd[r] * (work->g[r][k][i] - shift - work->norm[r][k][i] * slope);
                }
                work->dinp[r][k] = norm_store_<WIDTH>(dinp + (size_t)(n + r) * C + c, d);
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    dinp_sum[i] += d[i];
                }
            }
        }
        norm_add_to_sums_(&dinp_sums[k], dinp_sum);
    }
}

// Sets the codes of rows n ... n + ROWS - 1 of dinp, as the threads hold them: packs that are not
// there are zeros. Between two calls is a barrier.
template <class T, int ROWS>
__device__ inline void norm_store_dinp_codes_(const E4m3Rows& codes,
                                              const NormWork_<Pack<T>::SIZE, ROWS, 1>* work,
                                              uint32_t (*of_warp)[ROWS], int n, int end, int C) {
    const int c = (int)threadIdx.x * Pack<T>::SIZE;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const uint32_t largest = warp_max(e4m3_largest(norm_pack_<T>(work->dinp[r][0])));
        if (threadIdx.x % 32 == 0) {
            of_warp[threadIdx.x / 32][r] = largest;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        uint32_t largest = 0;
        for (int w = 0; w < (int)blockDim.x / 32; w++) {
            largest = max(largest, of_warp[w][r]);
        }
        if (n + r < end) {
            const float inverse = e4m3_scale(codes, (size_t)(n + r), largest, threadIdx.x == 0);
            if (c < C) {
                e4m3_store_pack(codes.codes + (size_t)(n + r) * C + c, norm_pack_<T>(work->dinp[r][0]),
                                inverse);
            }
        }
    }
}

// Returns the number of blocks that must fit into the registers of a multiprocessor. From sm_100 on
// ptxas needs more for rows of four warps: 40 bytes would spill with one block more.
constexpr int norm_backward_blocks_(int warps) {
    return warps == 0 ? 1 : NORM_WARPS / warps - (GPU_SM >= 100 && warps == 4);
}

// Returns the rows that a block of norm_backward_kernel processes at a time.
__host__ __device__ constexpr int norm_rows_at_once_(int width, int items) {
    return (width == 1 ? 4 : 2) / items;
}

// A block processes a group of rows, a few at a time. Thread i owns the columns i, i + blockDim.x,
// ... in groups of WIDTH and sums them over the rows in registers. The next rows are loaded before
// the block waits for the sums of the current ones. Rows and columns out of range are zeros, which
// add nothing. WARPS is the number of warps, or 0 if it is not known at compile time. With
// ITEMS = 2 (in 16 bits, rows of more than 4096 elements) up to 32 bytes spill.
//
// grid   groups of rows      block   up to 512      shared   double-buffered sums of the warps, C
//        floats
// moves  3 N*C in, N*C out, 3C fp32 out per group; dinp is not read where it is set. CODES: N*C
//        bytes and N fp32 out besides. Bound by memory.
// order  fixed: rows of a group in order
// needs  C <= ITEMS WIDTH threads; C a multiple of WIDTH, and aligned addresses where that is a
//        pack, as with CODES; these with ITEMS = 1
template <class T, NormKind KIND, int WIDTH, int ITEMS, int WARPS, bool CODES>
__global__ void __launch_bounds__(WARPS ? 32 * WARPS : NORM_BACKWARD_THREADS, norm_backward_blocks_(WARPS))
    norm_backward_kernel(T* dinp, E4m3Rows codes, float* partial, const T* dout, const T* inp,
                         const T* weight, NormPlus_<T> plus, const float* mean, const float* rstd, int N,
                         int C, int group_rows, GradientMode dinp_mode) {
    // rows being processed, and as many being loaded
    constexpr int ROWS = norm_rows_at_once_(WIDTH, ITEMS), SUMS = norm_sums_(KIND) * ROWS;
    constexpr int THREADS = WARPS ? 32 * WARPS : NORM_BACKWARD_THREADS;
    typedef NormSums_<WIDTH, THREADS> Sums;
    SMEM_ARRAY(float, of_warp, [2][NORM_BACKWARD_THREADS / 32][SUMS]);
    SMEM_ARRAY(Sums, dinp_sums, [ITEMS]);
    const int first = blockIdx.x * group_rows, end = min(first + group_rows, N);
    const float part = 1.0f / C;
    NormColumns_<WIDTH> columns[ITEMS] = {};
    NormRows_<ROWS, ITEMS> rows;
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const int c = (int)(threadIdx.x + k * blockDim.x) * WIDTH;
        if (c < C) {
            if constexpr (KIND == NORM_LAYER) {
                load_floats<WIDTH>(columns[k].weight, weight + c);
            } else {
                norm_load_weight_<WIDTH, KIND>(columns[k].weight, weight, plus, c);
            }
        }
        norm_clear_sums_(&dinp_sums[k]);
    }
    norm_load_rows_<WIDTH, KIND>(&rows, dinp, dout, inp, mean, rstd, first, end, C, dinp_mode);
#pragma unroll 1
    for (int n = first, buffer = 0; n < end; n += ROWS, buffer ^= 1) {
        NormWork_<Pack<T>::SIZE, ROWS, ITEMS> work;
        float sums[SUMS] = {};
        norm_take_rows_<T, KIND>(&work, sums, columns, &rows);
        norm_load_rows_<WIDTH, KIND>(&rows, dinp, dout, inp, mean, rstd, n + ROWS, end, C, dinp_mode);
        norm_block_sums_<SUMS, WARPS>(sums, of_warp[buffer]);
        norm_finish_rows_<T, KIND>(dinp, dinp_sums, &work, sums, part, n, end, C);
        if constexpr (CODES) {
            SMEM_ARRAY(uint32_t, largest, [NORM_BACKWARD_THREADS / 32][ROWS]);
            norm_store_dinp_codes_<T, ROWS>(codes, &work, largest, n, end, C);
        }
    }
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const int c = (int)(threadIdx.x + k * blockDim.x) * WIDTH;
        if (c < C) {
            if constexpr (KIND == NORM_RMS_PLUS) {
                norm_scale_columns_(&columns[k], plus.factor);
            }
            norm_store_columns_(partial, &columns[k], &dinp_sums[k], c, C);
        }
    }
}

// One block per group, for rows that are too long for registers: column sums accumulate in
// `partial`, and rows are read twice.
// grid   groups of rows      block   1024      shared   two arrays of block_sum
// moves  3 N*C in, N*C out; partial and the second reading of a row mostly come from cache
// order  fixed: rows of a group in order
template <class T, NormKind KIND>
__global__ void norm_backward_long_kernel(T* dinp, float* partial, const T* dout, const T* inp, NormGpu<T> of,
                                          NormPlus_<T> plus, int group_rows, GradientMode dinp_mode) {
    const int N = of.N, C = of.C, first = blockIdx.x * group_rows, end = min(first + group_rows, N);
    float *dweight = partial + 3 * (size_t)blockIdx.x * C, *dbias = dweight + C, *dinp_sum = dbias + C;
    for (int n = first; n < end; n++) {
        const size_t row = (size_t)n * C;
        const float m = KIND == NORM_LAYER ? of.mean[n] : 0.0f, s = of.rstd[n];
        float sum = 0, dot = 0;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            float w;
            norm_load_weight_<1, KIND>(&w, of.weight, plus, c);
            const float g = to_float(dout[row + c]) * w;
            sum += g;
            dot += g * (to_float(inp[row + c]) - m) * s;
        }
        const float shift = norm_mean_<KIND>(sum, C), slope = block_sum(dot) / C;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            float w;
            norm_load_weight_<1, KIND>(&w, of.weight, plus, c);
            const float d = to_float(dout[row + c]), norm = (to_float(inp[row + c]) - m) * s;
            const float change = s * (d * w - shift - norm * slope);
            const float before = dinp_mode == GRADIENT_ADD ? to_float(dinp[row + c]) : 0.0f;
            dinp[row + c] = from_float<T>(before + change);
            dinp_sum[c] = (n > first ? dinp_sum[c] : 0.0f) + to_float(dinp[row + c]);
            dweight[c] =
                (n > first ? dweight[c] : 0.0f) + (KIND == NORM_RMS_PLUS ? plus.factor * d : d) * norm;
            dbias[c] = (n > first ? dbias[c] : 0.0f) + d;
        }
    }
}

// Returns the kernel for rows of `items` packs, or elements. The widths of GPT-2's models in 16
// bits have their own.
template <class T, NormKind KIND, int WIDTH, bool CODES>
static inline decltype(&norm_backward_kernel<T, KIND, WIDTH, 1, 0, CODES>) norm_backward_of_(int items) {
    if constexpr (WIDTH == 8 && KIND != NORM_RMS_PLUS) {
        switch (ceil_div(items, 32)) {
        case 3:
            return norm_backward_kernel<T, KIND, WIDTH, 1, 3, CODES>;
        case 4:
            return norm_backward_kernel<T, KIND, WIDTH, 1, 4, CODES>;
        case 5:
            return norm_backward_kernel<T, KIND, WIDTH, 1, 5, CODES>;
        case 7:
            return norm_backward_kernel<T, KIND, WIDTH, 1, 7, CODES>;
        }
    }
    return norm_backward_kernel<T, KIND, WIDTH, 1, 0, CODES>;
}

// Gradient of the input, and the arrays that it is computed from.
template <class T> struct NormBackward_ {
    T* dinp;
    E4m3Rows codes; // of dinp
    float* partial;
    const T *dout, *inp;
    GradientMode dinp_mode;
};

// Launches the kernel for a row's threads. The kernels for short rows of packs also make the codes;
// for other rows a separate kernel makes them.
template <class T, NormKind KIND, int WIDTH>
static inline void norm_launch_backward_(NormBackward_<T> x, const NormGpu<T>* norm, const Gpu* gpu) {
    constexpr bool MAY_FUSE = WIDTH > 1 && KIND != NORM_RMS_PLUS;
    const int N = norm->N, C = norm->C;
    const int rows = norm_group_rows_(N), groups = norm_groups(N), items = ceil_div(C, WIDTH);
    const int most = NORM_BACKWARD_THREADS, fits = items <= most, fuses = x.codes.codes && MAY_FUSE && fits;
    const NormPlus_<T> plus = norm_plus_(norm, (const T*)NULL);
    if (items <= 2 * most) {
        const auto kernel = fuses  ? norm_backward_of_<T, KIND, WIDTH, MAY_FUSE>(items)
                            : fits ? norm_backward_of_<T, KIND, WIDTH, false>(items)
                                   : norm_backward_kernel<T, KIND, WIDTH, 2, 0, false>;
        launch(kernel, groups, 32 * ceil_div(items, fits ? 32 : 64), 0, gpu, x.dinp, x.codes, x.partial,
               x.dout, x.inp, norm->weight, plus, norm->mean, norm->rstd, N, C, rows, x.dinp_mode);
    } else {
        launch(norm_backward_long_kernel<T, KIND>, groups, 1024, 0, gpu, x.dinp, x.partial, x.dout, x.inp,
               *norm, plus, rows, x.dinp_mode);
    }
    if (x.codes.codes && !fuses) {
        e4m3_rows(x.codes, (const T*)x.dinp, N, C, gpu);
    }
}

// Sums over rows that the backward pass sets or adds to, all of one type. One without data is left
// out.
typedef struct {
    Gradient dweight, dbias;
    GradientMode mode;
    Gradient dinp_sum;
    GradientMode sum_mode;
    E4m3Rows codes; // (N, C) of dinp, unless NULL; C is a multiple of E4M3_UNIT then
} NormGradients;

template <class T, NormKind KIND>
static inline void norm_backward_rows_(NormBackward_<T> x, const NormGpu<T>* norm, const Gpu* gpu) {
    if (norm->C % Pack<T>::SIZE == 0 && norm_aligned_(x.dinp, x.dout, x.inp) &&
        norm_aligned_(norm->weight, x.partial, NULL)) {
        norm_launch_backward_<T, KIND, Pack<T>::SIZE>(x, norm, gpu);
    } else {
        norm_launch_backward_<T, KIND, 1>(x, norm, gpu);
    }
}

template <class T>
static inline void norm_backward_by_kind_(NormBackward_<T> x, const NormGpu<T>* norm, const Gpu* gpu) {
    switch (norm_kernel_(norm, (const T*)NULL)) {
    case NORM_LAYER:
        return norm_backward_rows_<T, NORM_LAYER>(x, norm, gpu);
    case NORM_RMS_PLUS:
        return norm_backward_rows_<T, NORM_RMS_PLUS>(x, norm, gpu);
    case NORM_RMS:
    case NORM_RMS_ALONE:
        return norm_backward_rows_<T, NORM_RMS>(x, norm, gpu);
    }
}

// Sets or adds to dinp according to `dinp_mode`, and to the sums. N >= 1.
template <class T>
static inline void norm_backward(T* dinp, GradientMode dinp_mode, const NormGradients* d, const T* dout,
                                 const T* inp, const NormGpu<T>* norm, NormScratch* scratch, const Gpu* gpu) {
    const int together = d->mode == d->sum_mode ? 3 : 2;
    const int C = norm->C, groups = norm_groups(norm->N);
    const Gradient vectors[3] = {d->dweight, d->dbias, d->dinp_sum};
    assert(3 * (size_t)groups * C <= scratch->floats);
    norm_backward_by_kind_({dinp, d->codes, scratch->partial, dout, inp, dinp_mode}, norm, gpu);
    column_sums_finish<T>(vectors, together, ColumnPartials<float>{scratch->partial, groups, 3 * C, C},
                          d->mode, gpu);
    if (together < 3) {
        column_sums_finish<T>(vectors + 2, 1,
                              ColumnPartials<float>{scratch->partial + 2 * C, groups, 3 * C, C}, d->sum_mode,
                              gpu);
    }
}

// ---- a sum alone ----

// A block sums a group of rows of dinp (N, C), as norm_backward_kernel does: `at_once` of them, and
// then these sums. Thread i has the columns i, i + blockDim.x, ...
// grid   groups of rows      block   256      shared   none
// moves  N*C in, C fp32 out per group. Bound by memory.
// order  fixed: as in norm_backward_kernel
template <class T>
__global__ void norm_dinp_sum_kernel(float* partial, const T* dinp, int N, int C, int group_rows,
                                     int at_once) {
    const int first = (int)blockIdx.x * group_rows, end = min(first + group_rows, N);
    for (int c = (int)threadIdx.x; c < C; c += (int)blockDim.x) {
        float sum = 0;
        for (int n = first; n < end; n += at_once) {
            float few = 0;
            for (int row = n; row < min(n + at_once, end); row++) {
                few += to_float(dinp[(size_t)row * C + c]);
            }
            sum += few;
        }
        partial[(size_t)blockIdx.x * C + c] = sum;
    }
}

// Sets or adds to `sum` (C), like norm_backward to dinp_sum, for the dinp (N, C) that it has
// stored.
template <class T>
static inline void norm_dinp_sum(Gradient sum, GradientMode mode, const T* dinp, int N, int C,
                                 NormScratch* scratch, const Gpu* gpu) {
    const int width = C % Pack<T>::SIZE == 0 ? Pack<T>::SIZE : 1, most = NORM_BACKWARD_THREADS,
              items = ceil_div(ceil_div(C, width), most), groups = norm_groups(N);
    if (sum.data) {
        launch(norm_dinp_sum_kernel<T>, groups, 256, 0, gpu, scratch->partial, dinp, N, C,
               norm_group_rows_(N), items <= 2 ? norm_rows_at_once_(width, items) : 1);
        column_sums_finish<T>(&sum, 1, ColumnPartials<float>{scratch->partial, groups, C, C}, mode, gpu);
    }
}

// ---- the norm of the embedding, in place ----

// A warp turns a row of dx, the gradient of the normalized x, into the gradient of x. It reads the
// row twice, the second time from cache.
// grid   ceil(N / 8)      block   (32, 8)      shared   none
// moves  2 N*C in, N*C out, N fp32 in. Bound by memory.
// order  fixed
// needs  C a multiple of WIDTH; aligned addresses if WIDTH is a pack
template <class T, int WIDTH>
__global__ void norm_unit_backward_kernel(T* dx, const T* x, const float* rstd, int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) {
        return;
    }
    const size_t row = (size_t)n * C;
    float d[WIDTH], y[WIDTH], dot = 0;
    for (int c = threadIdx.x * WIDTH; c < C; c += 32 * WIDTH) {
        load_floats<WIDTH>(d, dx + row + c);
        load_floats<WIDTH>(y, x + row + c);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            dot += d[i] * y[i];
        }
    }
    const float slope = warp_sum(dot) / C, r = rstd[n];
    for (int c = threadIdx.x * WIDTH; c < C; c += 32 * WIDTH) {
        load_floats<WIDTH>(d, dx + row + c);
        load_floats<WIDTH>(y, x + row + c);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            d[i] = r * (d[i] - y[i] * slope);
        }
        norm_store_<WIDTH>(dx + row + c, d);
    }
}

// Turns dx (N, C), the gradient of the normalized x, into the gradient of x before, in place.
template <class T>
static inline void norm_unit_backward(T* dx, const T* x, const float* rstd, int N, int C, const Gpu* gpu) {
    const int packs = C % Pack<T>::SIZE == 0 && norm_aligned_(dx, x, NULL);
    launch(packs ? norm_unit_backward_kernel<T, Pack<T>::SIZE> : norm_unit_backward_kernel<T, 1>,
           ceil_div(N, NORM_ROWS), dim3(32, NORM_ROWS), 0, gpu, dx, x, rstd, N, C);
}

#endif
