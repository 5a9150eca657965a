/*
column_sums.cuh -- sums of a matrix over its rows: the gradients of biases, and of a norm's weights.

    to_c (+)= sum_n rows_nc

    rows      (N, C)          of type T
    partial   (groups, C)     fp32: sums over groups of rows, in scratch memory
    to        (C)             set or added to according to `mode`, rounded once

column_sums reads the rows. Kernels that produce the rows can leave partial sums of their own, and
column_sums_finish adds them up. All orders are fixed: they follow from the sizes alone.
*/
#ifndef LLMC_COLUMN_SUMS_CUH
#define LLMC_COLUMN_SUMS_CUH

#include <assert.h>

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/gradient.h"

// Partial sums: enough blocks for any GPU, little memory compared with the rows.
#define COLUMN_SUMS_FLOATS (256 << 10)
#define COLUMN_SUMS_WARPS 8       // warps of the first kernel: rows that a block reads at a time
#define COLUMN_SUMS_SLICES 32     // warps of the second kernel, which share the groups
#define COLUMN_SUMS_GROUP_ROWS 64 // rows of a group, at least

// Returns the number of groups of rows. It depends on the sizes alone, so the bits do not depend on
// the GPU.
static inline int column_sums_groups(int N, int C) {
    const int by_rows = ceil_div(N, COLUMN_SUMS_GROUP_ROWS), by_memory = COLUMN_SUMS_FLOATS / C;
    const int groups = by_rows < by_memory ? by_rows : by_memory;
    return groups < 1 ? 1 : groups < 1024 ? groups : 1024;
}

static inline double column_sums_bytes(double N, double C, double element_bytes) {
    return N * C * element_bytes + 2 * column_sums_groups((int)N, (int)C) * C * sizeof(float);
}

// A block sums one group of rows over 32 * WIDTH columns. Warp w sums rows w, w + 8, ... of the
// group, lane i WIDTH columns; then the warps' sums are added in order.
// grid   ceil(C / (32 * WIDTH)), groups      block   256      shared   1 or 4 or 8 KiB
// moves  N*C in, groups*C fp32 out. Bound by memory: rows are read once.
// order  fixed.
// needs  WIDTH 1 or a pack: C a multiple of it, rows aligned to 16 bytes.
template <class T, int WIDTH>
__global__ void __launch_bounds__(32 * COLUMN_SUMS_WARPS)
    column_sums_groups_kernel(float* partial, const T* rows, int N, int C, int group_rows) {
    SMEM_ARRAY(float, of_warp, [COLUMN_SUMS_WARPS][WIDTH][32]);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int first_column = (int)blockIdx.x * 32 * WIDTH, column = first_column + lane * WIDTH;
    const int first = (int)blockIdx.y * group_rows, end = min(first + group_rows, N);
    float sum[WIDTH] = {}, x[WIDTH];
    if (column < C) {
#pragma unroll 4
        for (int row = first + warp; row < end; row += COLUMN_SUMS_WARPS) {
            const T* from = rows + (size_t)row * C + column;
            if constexpr (WIDTH == 1) {
                x[0] = to_float(from[0]);
            } else {
                unpack<T>(x, load_pack(from));
            }
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                sum[i] += x[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        of_warp[warp][i][lane] = sum[i];
    }
    __syncthreads();
    for (int c = (int)threadIdx.x; c < 32 * WIDTH && first_column + c < C; c += 32 * COLUMN_SUMS_WARPS) {
        float total = 0;
        for (int w = 0; w < COLUMN_SUMS_WARPS; w++) {
            total += of_warp[w][c % WIDTH][c / WIDTH];
        }
        partial[(size_t)blockIdx.y * C + first_column + c] = total;
    }
}

// Sums over groups of rows, of up to three vectors of C columns side by side in each row.
template <class P> struct ColumnPartials {
    const P* sums; // (groups, stride)
    int groups, stride, C;
};

// Adds the sums over the groups, of up to three vectors side by side: blocks with blockIdx.y = i
// compute vector i, from column i C on. Lane x of every warp sums column x; warp y sums groups y, y
// + 32, ..., then the first warp adds up the results of all warps, in order.
// grid   ceil(C / 32), vectors      block   (32, min(groups, 32))      shared   32 x 32 floats
// moves  C in and out per vector, C in per group of each, mostly from L2. Bound by latency.
// order  fixed.
template <class G, class P>
__global__ void column_sums_finish_kernel(G* first, G* second, G* third, ColumnPartials<P> partial,
                                          GradientMode mode) {
    SMEM_ARRAY(float, of_slice, [COLUMN_SUMS_SLICES][32]);
    const int c = (int)(blockIdx.x * 32 + threadIdx.x), C = partial.C;
    G* to = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
    if (!to) {
        return; // for the whole block: the caller does not want this vector
    }
    float sum = 0;
    if (c < C) {
#pragma unroll 8
        for (int j = (int)threadIdx.y; j < partial.groups; j += COLUMN_SUMS_SLICES) {
            sum += to_float(partial.sums[(size_t)j * partial.stride + blockIdx.y * C + c]);
        }
    }
    of_slice[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < C) {
#pragma unroll 8
        for (int y = 1; y < (int)blockDim.y; y++) {
            sum += of_slice[y][threadIdx.x];
        }
        to[c] = from_float<G>(mode == GRADIENT_ADD ? to_float(to[c]) + sum : sum);
    }
}

// Sets or adds to `count` vectors, one to three, of C columns each and of the same type; NULL is
// skipped. T is the type of the weights.
template <class T, class P>
static inline void column_sums_finish(const Gradient* to, int count, ColumnPartials<P> partial,
                                      GradientMode mode, const Gpu* gpu) {
    const int most = partial.groups < COLUMN_SUMS_SLICES ? partial.groups : COLUMN_SUMS_SLICES,
              slices = most > 0 ? most : 1; // without groups, the sums are 0
    const Gradient second = to[count > 1 ? 1 : 0], third = to[count > 2 ? 2 : 0];
    assert(second.dtype == to->dtype && third.dtype == to->dtype && count * partial.C <= partial.stride);
    GRADIENT_DISPATCH(*to, T,
                      launch(column_sums_finish_kernel<G, P>,
                             dim3((unsigned)ceil_div(partial.C, 32), (unsigned)count),
                             dim3(32, (unsigned)slices), 0, gpu, (G*)to->data, (G*)second.data,
                             (G*)third.data, partial, mode));
}

// Sets or adds to `to` (C) the sums over the rows (N, C); partial has room for
// column_sums_groups(N, C) * C floats.
template <class T>
static inline void column_sums(Gradient to, float* partial, const T* rows, int N, int C, GradientMode mode,
                               const Gpu* gpu) {
    const int SIZE = Pack<T>::SIZE, groups = column_sums_groups(N, C), group_rows = ceil_div(N, groups);
    if (C % SIZE == 0 && (uintptr_t)rows % sizeof(Pack<T>) == 0) {
        launch(column_sums_groups_kernel<T, Pack<T>::SIZE>,
               dim3((unsigned)ceil_div(C, 32 * SIZE), (unsigned)groups), 32 * COLUMN_SUMS_WARPS, 0, gpu,
               partial, rows, N, C, group_rows);
    } else {
        launch(column_sums_groups_kernel<T, 1>, dim3((unsigned)ceil_div(C, 32), (unsigned)groups),
               32 * COLUMN_SUMS_WARPS, 0, gpu, partial, rows, N, C, group_rows);
    }
    column_sums_finish<T>(&to, 1, ColumnPartials<float>{partial, groups, C, C}, mode, gpu);
}

#endif
