/*
expert_bias.cuh -- the bias of each expert, of rows that are sorted by expert, on the GPU. With e
the expert of row m, and scale[m] the weight of a row, or 1 without `scale`:

    expert_bias_forward     out[m] += scale[m] bias_e
    expert_bias_backward    dbias_e (+)= sum over the rows m of e of scale[m] dout[m]
    expert_bias_scale       dscale[m] += bias_e . dout[m]

    out      (M, OC)     bias, dbias     (E, OC)     scale, dscale     (M) fp32
    dout     (M, OC)     rows are expert_padded(OC) elements apart

X is float, bf16 or fp16; out and dbias may have another type. ExpertRows as in expert_matmul.cuh:
one expert may have all rows. Computed in fp32.
*/
#ifndef LLMC_EXPERT_BIAS_CUH
#define LLMC_EXPERT_BIAS_CUH

#include "llmc/gpu/elements.cuh"
#include "llmc/ops/expert_rows.cuh"

enum {
    EXPERT_BIAS_COLUMNS = 512, // of a block of the forward pass
    EXPERT_BIAS_THREADS = 256,
    EXPERT_BIAS_WARPS = 16 // of a block that sums
};

// A block adds to up to 128 rows.
// grid   tiles, ceil(OC / 512)      block   256      shared   none
// moves  M*OC in and out. Bound by memory.
// needs  WIDTH 1, or a pack of X that divides OC
template <int WIDTH, class OUT, class X>
__global__ void __launch_bounds__(EXPERT_BIAS_THREADS)
    expert_bias_kernel(OUT* out, const X* bias, const float* scale, ExpertRows rows, int OC) {
    const ExpertTile tile = expert_find(rows, (int)blockIdx.x);
    const int first = (int)blockIdx.y * EXPERT_BIAS_COLUMNS,
              packs = min(EXPERT_BIAS_COLUMNS, OC - first) / WIDTH,
              count = min(tile.rows, (int)EXPERT_SIDE) * packs;
    for (int i = (int)threadIdx.x; i < count; i += EXPERT_BIAS_THREADS) {
        const int row = tile.row + i / packs, col = first + i % packs * WIDTH;
        OUT* to = out + (size_t)row * OC + col;
        const float times = scale ? scale[row] : 1.0f;
        float x[WIDTH], b[WIDTH];
        load_floats<WIDTH>(x, to);
        load_floats<WIDTH>(b, bias + (size_t)tile.e * OC + col);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            x[k] += times * b[k];
        }
        store_floats<WIDTH>(to, x);
    }
}

// A block sums 32 * WIDTH columns of an expert: a warp every 16th row, then the warps in order.
// grid   ceil(OC / (32 * WIDTH)), E      block   512      shared   2 or 8 or 16 KiB
// moves  M*OC in. Bound by memory, but by latency if one expert has all rows.
// order  fixed
// needs  WIDTH as above, for the distance `stride` of rows
template <int WIDTH, class G, class X>
__global__ void __launch_bounds__(32 * EXPERT_BIAS_WARPS)
    expert_bias_sum_kernel(G* dbias, const X* dout, const float* scale, ExpertRows rows, int OC, int stride,
                           GradientMode mode) {
    SMEM_ARRAY(float, of_warp, [EXPERT_BIAS_WARPS][WIDTH][32]);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, e = (int)blockIdx.y,
              first = (int)blockIdx.x * 32 * WIDTH, col = first + lane * WIDTH;
    const int begin = rows.first ? rows.first[e] : 0, end = rows.first ? rows.first[e + 1] : rows.rows;
    float sum[WIDTH] = {}, x[WIDTH];
    if (col < OC) {
#pragma unroll 4
        for (int row = begin + warp; row < end; row += EXPERT_BIAS_WARPS) {
            const float times = scale ? scale[row] : 1.0f;
            load_floats<WIDTH>(x, dout + (size_t)row * stride + col);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                sum[k] += times * x[k];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        of_warp[warp][k][lane] = sum[k];
    }
    __syncthreads();
    for (int c = (int)threadIdx.x; c < 32 * WIDTH && first + c < OC; c += 32 * EXPERT_BIAS_WARPS) {
        G* to = dbias + (size_t)e * OC + first + c;
        float total = mode == GRADIENT_ADD ? to_float(*to) : 0.0f;
        for (int w = 0; w < EXPERT_BIAS_WARPS; w++) {
            total += of_warp[w][c % WIDTH][c / WIDTH];
        }
        *to = from_float<G>(total);
    }
}

// A warp adds the product of a row and its expert's bias.
// grid   tiles      block   256: a warp every 8th row      shared   none
// moves  M*OC in. Bound by memory.
// order  fixed
// needs  WIDTH as above
template <int WIDTH, class X>
__global__ void __launch_bounds__(EXPERT_BIAS_THREADS)
    expert_bias_scale_kernel(float* dscale, const X* dout, const X* bias, ExpertRows rows, int OC) {
    const ExpertTile tile = expert_find(rows, (int)blockIdx.x);
    const int lane = (int)threadIdx.x % 32, end = min(tile.rows, (int)EXPERT_SIDE);
    const X* of = bias + (size_t)tile.e * OC;
    for (int r = (int)threadIdx.x / 32; r < end; r += EXPERT_BIAS_THREADS / 32) {
        const size_t row = (size_t)tile.row + r;
        float sum = 0.0f, x[WIDTH], b[WIDTH];
        for (int c = lane * WIDTH; c < OC; c += 32 * WIDTH) {
            load_floats<WIDTH>(x, dout + row * OC + c);
            load_floats<WIDTH>(b, of + c);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                sum += x[k] * b[k];
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            dscale[row] += sum;
        }
    }
}

// ---- launchers ----

// There are rows, as in a matmul.
template <class OUT, class X>
static inline void expert_bias_forward(OUT* out, const X* bias, const float* scale, const ExpertRows* rows,
                                       int OC, const Gpu* gpu) {
    constexpr int SIZE = Pack<X>::SIZE;
    const dim3 grid((unsigned)expert_tiles(rows), (unsigned)ceil_div(OC, (int)EXPERT_BIAS_COLUMNS));
    const auto kernel = OC % SIZE == 0 ? expert_bias_kernel<SIZE, OUT, X> : expert_bias_kernel<1, OUT, X>;
    launch(kernel, grid, EXPERT_BIAS_THREADS, 0, gpu, out, bias, scale, *rows, OC);
}

// Sets or adds to dbias, also of experts without rows.
template <class X>
static inline void expert_bias_backward(Gradient dbias, const X* dout, const float* scale,
                                        const ExpertRows* rows, int OC, GradientMode mode, const Gpu* gpu) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int width = OC % SIZE == 0 ? SIZE : 1;
    const dim3 grid((unsigned)ceil_div(OC, 32 * width), (unsigned)rows->E);
    GRADIENT_DISPATCH(
        dbias, X,
        launch(width == 1 ? expert_bias_sum_kernel<1, G, X> : expert_bias_sum_kernel<SIZE, G, X>, grid,
               32 * EXPERT_BIAS_WARPS, 0, gpu, (G*)dbias.data, dout, scale, *rows, OC, expert_padded(OC),
               mode));
}

// OC is a multiple of EXPERT_PACK.
template <class X>
static inline void expert_bias_scale(float* dscale, const X* dout, const X* bias, const ExpertRows* rows,
                                     int OC, const Gpu* gpu) {
    launch(expert_bias_scale_kernel<Pack<X>::SIZE, X>, (unsigned)expert_tiles(rows), EXPERT_BIAS_THREADS, 0,
           gpu, dscale, dout, bias, *rows, OC);
}

#endif
