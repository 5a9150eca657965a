/*
delta_rule.cuh -- delta_rule.h on the GPU, on X = float, bf16 or fp16: gates, D and states in fp32,
factors of matmuls rounded to X.

    qkv, ba, A_log, dt_bias, out         X, and the gradients of qkv, ba and out
    state                                fp32

Columns of values do not depend on each other, except in the gradients of queries and keys. So the
kernels that go from chunk to chunk have a block for each 64 columns of a value head, and what sums
over all columns is done for all chunks at the same time:

    kernel     block                    computes, in the terms of delta_rule.h
    chunk      chunk of a value head    q, k, gates, T = (I + A)^-1, P
    forward    64 columns of a head     U = T (...), out, S; or U and S before each chunk
    reverse    64 columns of a head     from the last chunk on: dR = T^T dU, dV, and dS after each
    gradient   chunk of a value head    dP, M, dQ, dK, dG, da, db
    unit       token of a key head      dQ and dK summed over value heads, then those of x

The backward pass runs all but the first use of `forward` for out. Every sum has one owner: no
atomics, a fixed order.
*/
#ifndef LLMC_DELTA_RULE_CUH
#define LLMC_DELTA_RULE_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/delta_rule.h"
#include "llmc/ops/delta_tiles.cuh"

enum { DELTA_GATES = 3 }; // numbers of a token that are kept: beta, carry, keep

template <class X> struct DeltaPassGpu {
    DeltaSizes sizes;
    const int* starts; // or NULL
    const X *qkv, *ba, *A_log, *dt_bias;
    X* out;
    float* state; // or NULL
};

template <class X> struct DeltaGradientsGpu {
    const X* dout;
    X *dqkv, *dba;
    Gradient dA_log, ddt_bias; // of the same type
    GradientMode mode;
};

// Memory that kernels pass on to each other, for as many sequences of a pass as fit.
template <class X> struct DeltaScratchGpu {
    X* unit;        // (N, 2, Hk, dk): q and k
    float* gates;   // (N, Hv, DELTA_GATES)
    X* squares;     // (B, Hv, chunks, 2, C, C): T and P
    X *u, *dr;      // (N, Hv, dv)
    X *states, *ds; // (B, Hv, chunks, dk, dv): S before, dS after each chunk
    X* dunit;       // (N, 2, Hv, dk): dQ and dK
    float* sums;    // (B, chunks, 2, Hv): the parts of dA_log and ddt_bias
    int chunks;     // of a value head, for which there is memory
    int trains;
};

static inline int delta_chunks(DeltaSizes s) { return ceil_div(s.T, (int)DELTA_C); }

// Takes memory for as many chunks as B sequences of T tokens have, and at least one such sequence;
// with `trains`, also for backward passes. Passes over more chunks, as of more and shorter
// sequences, go over some of their sequences at a time.
template <class X>
static inline void delta_rule_gpu_open(DeltaScratchGpu<X>* scratch, Memory* memory, DeltaSizes s,
                                       int trains) {
    const size_t N = (size_t)s.B * delta_chunks(s) * DELTA_C, chunks = N / DELTA_C * s.Hv,
                 back = trains ? 1 : 0, state = chunks * s.dk * s.dv;
    const auto take = [&](size_t count, size_t bytes) {
        return memory_take_unset(memory, "scratch: delta rule", MEMORY_DEVICE, count * bytes);
    };
    scratch->chunks = s.B * delta_chunks(s);
    scratch->trains = trains;
    scratch->unit = (X*)take(2 * N * s.Hk * s.dk, sizeof(X));
    scratch->gates = (float*)take(N * s.Hv * DELTA_GATES, sizeof(float));
    scratch->squares = (X*)take(2 * chunks * DELTA_C * DELTA_C, sizeof(X));
    scratch->u = (X*)take(back * N * s.Hv * s.dv, sizeof(X));
    scratch->dr = (X*)take(back * N * s.Hv * s.dv, sizeof(X));
    scratch->states = (X*)take(back * state, sizeof(X));
    scratch->ds = (X*)take(back * state, sizeof(X));
    scratch->dunit = (X*)take(back * 2 * N * s.Hv * s.dk, sizeof(X));
    scratch->sums = (float*)take(back * 2 * chunks, sizeof(float));
}

// ---- a chunk of a value head ----

// The chunk of a block.
struct DeltaPlace {
    int b, h, chunk, chunks, t0, count;
    size_t token; // the first, of all
};

__device__ inline DeltaPlace delta_place(DeltaSizes s, int b, int h, int chunk) {
    DeltaPlace at;
    at.b = b, at.h = h, at.chunk = chunk;
    at.chunks = (s.T + DELTA_C - 1) / DELTA_C;
    at.t0 = chunk * DELTA_C;
    at.count = min((int)DELTA_C, s.T - at.t0);
    at.token = (size_t)b * s.T + at.t0;
    return at;
}

// Returns the number of a chunk among those of all heads.
__device__ inline size_t delta_chunk_(DeltaSizes s, const DeltaPlace& at) {
    return ((size_t)at.b * s.Hv + at.h) * at.chunks + at.chunk;
}

__device__ inline int delta_key_head(DeltaSizes s, int h) { return h / (s.Hv / s.Hk); }

// Returns the first of q (0) or k (1), normalized, of a place; rows are 2 Hk dk apart.
template <class X>
__device__ inline const X* delta_unit_at_(const DeltaScratchGpu<X>& scratch, DeltaSizes s,
                                          const DeltaPlace& at, int is_key) {
    return scratch.unit + ((at.token * 2 + is_key) * s.Hk + delta_key_head(s, at.h)) * s.dk;
}

// Gates of a token: as in delta_rule.h; slope is the derivative of g by a.
struct DeltaTokenGates {
    float f, g, slope, beta;
};

template <class X>
__device__ inline DeltaTokenGates delta_token_gates(const DeltaPassGpu<X>& pass, const DeltaPlace& at,
                                                    int i) {
    const int Hv = pass.sizes.Hv, t = at.t0 + i;
    const size_t n = at.token + i;
    if (i >= at.count) {
        return {0.0f, 0.0f, 0.0f, 0.0f};
    }
    const float b = to_float(pass.ba[n * 2 * Hv + at.h]), A = -expf(to_float(pass.A_log[at.h])),
                a = to_float(pass.ba[n * 2 * Hv + Hv + at.h]) + to_float(pass.dt_bias[at.h]),
                g = A * (a > 20.0f ? a : log1pf(expf(a)));
    const bool is_start = (pass.starts ? pass.starts[n] : 0) == t;
    return {is_start ? 0.0f : expf(g), g, A / (1.0f + expf(-a)), 1.0f / (1.0f + expf(-b))};
}

// Sets D, rows 64 apart, from f in shared memory: thread j < 64 its column. The caller waits.
__device__ inline void delta_decays_(float* decay, const float* f) {
    const int j = (int)threadIdx.x;
    float d = 0.0f;
    for (int i = 0; i < DELTA_C && j < DELTA_C; i++) {
        d = i == j ? 1.0f : d * f[i];
        decay[i * DELTA_C + j] = d;
    }
}

// Normalizes 16 rows of dk columns for a warp: into a tile, and to `unit` unless it is NULL.
template <class X>
__device__ inline void delta_normalize_(X* tile, int stride, X* unit, size_t unit_row, const X* from,
                                        size_t row, int count, int dk, float scale) {
    constexpr int COLUMNS = DELTA_RULE_WIDEST / 32; // of a lane
    const int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 16, padded = delta_padded(dk);
    for (int r = first; r < first + 16; r++) {
        float x[COLUMNS], square = 0.0f;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int c = lane + 32 * i;
            x[i] = r < count && c < dk ? to_float(from[(size_t)r * row + c]) : 0.0f;
            square += x[i] * x[i];
        }
        const float factor = scale * rsqrtf(warp_sum(square) + DELTA_RULE_EPS);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int c = lane + 32 * i;
            const X y = from_float<X>(factor * x[i]);
            if (c < padded) {
                tile[r * stride + c] = y;
            }
            if (unit && r < count && c < dk) {
                unit[(size_t)r * unit_row + c] = y;
            }
        }
    }
}

// Sets T = (I + A)^-1 by columns: thread c < 64 its own. Rows are 64 apart.
__device__ inline void delta_invert_(float* inverse, const float* a) {
    const int c = (int)threadIdx.x;
    for (int i = 0; i < DELTA_C && c < DELTA_C; i++) {
        float sum = i == c ? 1.0f : 0.0f;
        for (int j = c; j < i; j++) {
            sum -= a[i * DELTA_C + j] * inverse[j * DELTA_C + c];
        }
        inverse[i * DELTA_C + c] = sum;
    }
}

// Copies a square of fp32 to X, rows 64 apart.
template <class X> __device__ inline void delta_save_square_(X* to, const float* square) {
    for (int i = (int)threadIdx.x; i < DELTA_C * DELTA_C; i += DELTA_THREADS) {
        to[i] = from_float<X>(square[i]);
    }
}

// Bytes of shared memory of the chunk kernel: q and k, D, A.
template <class X> static inline size_t delta_chunk_bytes_(DeltaSizes s) {
    return 2 * DELTA_C * delta_stride<X>(delta_padded(s.dk)) * sizeof(X) +
           2 * DELTA_C * DELTA_C * sizeof(float);
}

// A block prepares a chunk of a value head: q and k normalized, gates, T and P.
// grid   chunks, Hv, B      block   128      shared   66 KiB for dk = 128 in 16 bits
// moves  2*dk in and out per token and head, 2*64 out. Bound by latency of the inverse.
// order  fixed
template <class X>
__global__ void __launch_bounds__(DELTA_THREADS)
    delta_chunk_kernel(DeltaPassGpu<X> pass, DeltaScratchGpu<X> scratch) {
    SMEM_DYNAMIC(X, q);
    SMEM_ARRAY(float, f, [DELTA_C]);
    SMEM_ARRAY(float, beta, [DELTA_C]);
    const DeltaSizes s = pass.sizes;
    const DeltaPlace at = delta_place(s, (int)blockIdx.z, (int)blockIdx.y, (int)blockIdx.x);
    const int padded = delta_padded(s.dk), stride = delta_stride<X>(padded), tid = (int)threadIdx.x,
              key_head = delta_key_head(s, at.h), R = 2 * s.Hk * s.dk + s.Hv * s.dv;
    const DeltaLane lane = delta_lane();
    X* k = q + DELTA_C * stride;
    float *decay = (float*)(k + DELTA_C * stride), *a = decay + DELTA_C * DELTA_C;
    const bool is_first = at.h % (s.Hv / s.Hk) == 0; // of the value heads that share q and k
    const X* from = pass.qkv + at.token * R + (size_t)key_head * s.dk;
    X* unit = is_first ? (X*)delta_unit_at_(scratch, s, at, 0) : NULL;
    const size_t unit_row = 2 * (size_t)s.Hk * s.dk;
    delta_normalize_(q, stride, unit, unit_row, from, (size_t)R, at.count, s.dk, rsqrtf((float)s.dk));
    delta_normalize_(k, stride, unit ? unit + (size_t)s.Hk * s.dk : NULL, unit_row,
                     from + (size_t)s.Hk * s.dk, (size_t)R, at.count, s.dk, 1.0f);
    if (tid < DELTA_C) {
        const DeltaTokenGates gates = delta_token_gates(pass, at, tid);
        f[tid] = gates.f, beta[tid] = gates.beta;
    }
    __syncthreads();
    delta_decays_(decay, f);
    __syncthreads();
    if (tid < at.count) {
        float carry = 1.0f;
        for (int i = 0; i <= tid; i++) {
            carry *= f[i];
        }
        float* to = scratch.gates + ((at.token + tid) * s.Hv + at.h) * DELTA_GATES;
        to[0] = beta[tid], to[1] = carry, to[2] = decay[(at.count - 1) * DELTA_C + tid];
    }
    float kk[8][4], qk[8][4];
    delta_clear(kk), delta_clear(qk);
    const int row0 = tid / 32 * 16;
    delta_matmul<false, true>(kk, k + row0 * stride, stride, k, stride, padded);
    delta_matmul<false, true>(qk, q + row0 * stride, stride, k, stride, padded);
    X* squares = scratch.squares + delta_chunk_(s, at) * 2 * DELTA_C * DELTA_C;
#pragma unroll
    for (int e = 0; e < 32; e++) {
        const int i = lane.row + e % 4 / 2 * 8, j = e / 4 * 8 + lane.col + e % 2, place = i * DELTA_C + j;
        a[place] = j < i ? beta[i] * decay[place] * kk[e / 4][e % 4] : 0.0f;
        squares[DELTA_C * DELTA_C + place] = from_float<X>(decay[place] * qk[e / 4][e % 4]);
    }
    __syncthreads();
    delta_invert_(decay, a); // D is not needed any more
    __syncthreads();
    delta_save_square_(squares, decay);
}

// ---- from chunk to chunk ----

// A block's 64 columns of values, from `first` on, in `cols` columns; and its arrays in shared
// memory.
template <class X> struct DeltaColumns_ {
    int first, cols, padded, stride;
    X *q, *k, *s, *inverse, *p, *x, *y; // s: (KT 64, 64), the state; x, y: (64, 64)
    float *beta, *carry, *keep;
};

template <class X> static inline size_t delta_columns_bytes_(DeltaSizes s) {
    return (2 * DELTA_C * (size_t)delta_stride<X>(delta_padded(s.dk)) +
            (size_t)(delta_state_tiles(s.dk) + 4) * DELTA_TILE<X>)*sizeof(X) +
           DELTA_GATES * DELTA_C * sizeof(float);
}

template <class X> __device__ inline DeltaColumns_<X> delta_columns_(X* memory, DeltaSizes s) {
    DeltaColumns_<X> x;
    x.first = (int)blockIdx.x * DELTA_C;
    x.cols = min((int)DELTA_C, s.dv - x.first);
    x.padded = delta_padded(s.dk);
    x.stride = delta_stride<X>(x.padded);
    x.q = memory;
    x.k = x.q + DELTA_C * x.stride;
    x.s = x.k + DELTA_C * x.stride;
    x.inverse = x.s + delta_state_tiles(s.dk) * DELTA_TILE<X>;
    x.p = x.inverse + DELTA_TILE<X>;
    x.x = x.p + DELTA_TILE<X>;
    x.y = x.x + DELTA_TILE<X>;
    x.beta = (float*)(x.y + DELTA_TILE<X>);
    x.carry = x.beta + DELTA_C;
    x.keep = x.carry + DELTA_C;
    return x;
}

// Starts to load what the chunk kernel has prepared.
template <class X>
__device__ inline void delta_load_chunk_(const DeltaColumns_<X>& x, const DeltaScratchGpu<X>& scratch,
                                         DeltaSizes s, const DeltaPlace& at) {
    constexpr int STRIDE = delta_stride<X>(DELTA_C);
    const size_t unit_row = 2 * (size_t)s.Hk * s.dk;
    const X* squares = scratch.squares + delta_chunk_(s, at) * 2 * DELTA_C * DELTA_C;
    delta_load(x.q, x.stride, delta_unit_at_(scratch, s, at, 0), unit_row, at.count, s.dk, x.padded);
    delta_load(x.k, x.stride, delta_unit_at_(scratch, s, at, 1), unit_row, at.count, s.dk, x.padded);
    delta_load(x.inverse, STRIDE, squares, (size_t)DELTA_C, DELTA_C, DELTA_C, DELTA_C);
    delta_load(x.p, STRIDE, squares + DELTA_C * DELTA_C, (size_t)DELTA_C, DELTA_C, DELTA_C, DELTA_C);
    if (threadIdx.x < DELTA_C) {
        const int i = (int)threadIdx.x;
        const float* gates = scratch.gates + ((at.token + i) * s.Hv + at.h) * DELTA_GATES;
        const bool is_there = i < at.count;
        x.beta[i] = is_there ? gates[0] : 0.0f;
        x.carry[i] = is_there ? gates[1] : 0.0f;
        x.keep[i] = is_there ? gates[2] : 0.0f;
    }
}

// Copies a state (dk, 64) from shared memory to global.
template <class X>
__device__ inline void delta_save_state_(X* states, const DeltaColumns_<X>& x, DeltaSizes s,
                                         const DeltaPlace& at) {
    X* to = states + delta_chunk_(s, at) * s.dk * s.dv + x.first;
    delta_save(to, (size_t)s.dv, x.s, delta_stride<X>(DELTA_C), s.dk, x.cols);
}

// Replaces v in tile x by beta (v - carry K S), given K S. A thread reads and writes its own
// elements.
template <class X>
__device__ inline void delta_right_side_(float (&of_key)[8][4], const DeltaColumns_<X>& x) {
    const DeltaLane at = delta_lane();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = at.row + i % 4 / 2 * 8;
        float& y = of_key[i / 4][i % 4];
        y = x.beta[r] * (delta_at(x.x, at, i) - x.carry[r] * y);
    }
    delta_store(x.x, of_key);
}

// A block goes through the chunks of a sequence for 64 columns of a value head. The state is in
// registers, and rounded in shared memory. For the backward pass (KEEPS) it stores U, and the state
// before each chunk; else it stores out, and the last state.
// grid   ceil(dv/64), Hv, B      block   128      shared   89 KiB for dk = 128 in 16 bits
// moves  2*dk + 2*64 + 2*64 in and out per token. Bound by latency with few heads, else by mma.
//        With dk > 128, up to 52 bytes of registers spill.
// order  fixed
template <class X, int KT, bool KEEPS>
__global__ void __launch_bounds__(DELTA_THREADS)
    delta_forward_kernel(DeltaPassGpu<X> pass, DeltaScratchGpu<X> scratch) {
    constexpr int STRIDE = delta_stride<X>(DELTA_C);
    SMEM_DYNAMIC(X, memory);
    const DeltaSizes s = pass.sizes;
    const DeltaColumns_<X> x = delta_columns_(memory, s);
    const int R = 2 * s.Hk * s.dk + s.Hv * s.dv, h = (int)blockIdx.y, b = (int)blockIdx.z,
              row0 = (int)threadIdx.x / 32 * 16;
    const size_t row = (size_t)s.Hv * s.dv;
    DeltaState<KT> state = {};
    delta_store_state<KT>(x.s, state);
    for (int chunk = 0; chunk * DELTA_C < s.T; chunk++) {
        const DeltaPlace at = delta_place(s, b, h, chunk);
        const size_t out_at = (at.token * s.Hv + h) * s.dv + x.first;
        float of_key[8][4], of_query[8][4];
        delta_load_chunk_(x, scratch, s, at);
        delta_load(x.x, STRIDE, pass.qkv + at.token * R + 2 * s.Hk * s.dk + (size_t)h * s.dv + x.first,
                   (size_t)R, at.count, x.cols, DELTA_C);
        delta_wait();
        if (KEEPS) {
            delta_save_state_(scratch.states, x, s, at);
        }
        delta_clear(of_key), delta_clear(of_query);
        delta_matmul<false, false>(of_key, x.k + row0 * x.stride, x.stride, x.s, STRIDE, x.padded);
        if (!KEEPS) {
            delta_matmul<false, false>(of_query, x.q + row0 * x.stride, x.stride, x.s, STRIDE, x.padded);
            delta_scale_rows(of_query, x.carry, 1.0f);
        }
        delta_right_side_(of_key, x);
        __syncthreads();
        float u[8][4];
        delta_clear(u);
        delta_matmul<false, false>(u, x.inverse + row0 * STRIDE, STRIDE, x.x, STRIDE, row0 + 16);
        __syncthreads(); // x and s have been read
        if (KEEPS) {
            delta_store_rows(scratch.u + out_at, row, u, at.count, x.cols);
        } else {
            delta_store(x.y, u);
        }
        delta_scale_rows(u, x.keep, 1.0f);
        delta_store(x.x, u);
        __syncthreads();
        if (!KEEPS) {
            delta_matmul<false, false>(of_query, x.p + row0 * STRIDE, STRIDE, x.y, STRIDE, row0 + 16);
            delta_store_rows(pass.out + out_at, row, of_query, at.count, x.cols);
        }
        delta_decay_state(state, x.carry[at.count - 1]);
        delta_add_outer<KT>(state, x.k, x.stride, x.x, x.padded);
        delta_store_state<KT>(x.s, state);
        __syncthreads(); // the next chunk is loaded into the same memory
    }
    if (!KEEPS && pass.state) {
        delta_state_save<KT>(pass.state + ((size_t)b * s.Hv + h) * s.dk * s.dv + x.first, state, s, x.cols);
    }
}

// A block goes through the chunks from the last to the first, with dS in registers: it stores dR,
// dV, and dS after each chunk.
// grid   ceil(dv/64), Hv, B      block   128      shared   89 KiB for dk = 128 in 16 bits
// moves  2*dk + 3*64 + 3*64 in and out per token. Bound as the forward kernel. With dk > 128, up to
//        16 bytes of registers spill.
// order  fixed
template <class X, int KT>
__global__ void __launch_bounds__(DELTA_THREADS)
    delta_reverse_kernel(DeltaGradientsGpu<X> d, DeltaSizes s, DeltaScratchGpu<X> scratch) {
    constexpr int STRIDE = delta_stride<X>(DELTA_C);
    SMEM_DYNAMIC(X, memory);
    const DeltaColumns_<X> x = delta_columns_(memory, s);
    const int R = 2 * s.Hk * s.dk + s.Hv * s.dv, h = (int)blockIdx.y, b = (int)blockIdx.z,
              row0 = (int)threadIdx.x / 32 * 16;
    const size_t row = (size_t)s.Hv * s.dv;
    const DeltaLane lane = delta_lane();
    DeltaState<KT> ds = {};
    delta_store_state<KT>(x.s, ds);
    for (int chunk = (s.T - 1) / DELTA_C; chunk >= 0; chunk--) {
        const DeltaPlace at = delta_place(s, b, h, chunk);
        const size_t out_at = (at.token * s.Hv + h) * s.dv + x.first;
        float acc[8][4], dr[8][4];
        delta_load_chunk_(x, scratch, s, at);
        delta_load(x.x, STRIDE, d.dout + out_at, row, at.count, x.cols, DELTA_C);
        delta_wait();
        delta_save_state_(scratch.ds, x, s, at);
        delta_clear(acc), delta_clear(dr);
        delta_matmul<false, false>(acc, x.k + row0 * x.stride, x.stride, x.s, STRIDE, x.padded);
        delta_scale_rows(acc, x.keep, 1.0f);
        // of a transposed lower square, rows row0 ... have terms from row0 on
        delta_matmul<true, false>(acc, x.p + row0 * STRIDE + row0, STRIDE, x.x + row0 * STRIDE, STRIDE,
                                  DELTA_C - row0);
        delta_store(x.y, acc);
        __syncthreads();
        delta_matmul<true, false>(dr, x.inverse + row0 * STRIDE + row0, STRIDE, x.y + row0 * STRIDE, STRIDE,
                                  DELTA_C - row0);
        __syncthreads(); // y and s have been read
        delta_store_rows(scratch.dr + out_at, row, dr, at.count, x.cols);
        delta_scale_rows(dr, x.beta, 1.0f);
        delta_store_rows(d.dqkv + at.token * R + 2 * s.Hk * s.dk + (size_t)h * s.dv + x.first, (size_t)R, dr,
                         at.count, x.cols);
        delta_scale_rows(dr, x.carry, -1.0f);
        delta_store(x.y, dr);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            acc[i / 4][i % 4] = delta_at(x.x, lane, i);
        }
        delta_scale_rows(acc, x.carry, 1.0f);
        delta_store(x.x, acc);
        __syncthreads();
        delta_decay_state(ds, x.carry[at.count - 1]);
        delta_add_outer<KT>(ds, x.q, x.stride, x.x, x.padded);
        delta_add_outer<KT>(ds, x.k, x.stride, x.y, x.padded);
        delta_store_state<KT>(x.s, ds);
        __syncthreads();
    }
}

// ---- gradients of queries, keys and gates ----

// Tiles in shared memory. D lies where s and ds do later.
template <class X> struct DeltaTiles_ {
    X *dout, *dr, *u, *q, *k, *dp, *m, *s, *ds;
    float* decay;
};

template <class X> constexpr size_t DELTA_GRADIENT_BYTES = 9 * DELTA_TILE<X> * sizeof(X);

template <class X> __device__ inline DeltaTiles_<X> delta_tiles_(X* memory) {
    DeltaTiles_<X> x;
    X** const tiles[] = {&x.dout, &x.dr, &x.u, &x.q, &x.k, &x.dp, &x.m, &x.s, &x.ds};
    for (int i = 0; i < 9; i++) {
        *tiles[i] = memory + i * DELTA_TILE<X>;
    }
    x.decay = (float*)x.s;
    return x;
}
static_assert(2 * DELTA_TILE<bf16> * sizeof(bf16) >= DELTA_C * DELTA_C * sizeof(float), "D fits");

// Starts to load columns d ... d+63 of dout, dR and U.
template <class X>
__device__ inline void delta_load_values_(const DeltaTiles_<X>& x, const X* dout,
                                          const DeltaScratchGpu<X>& scratch, DeltaSizes s,
                                          const DeltaPlace& at, int d) {
    constexpr int STRIDE = delta_stride<X>(DELTA_C);
    const size_t from = (at.token * s.Hv + at.h) * s.dv + d, row = (size_t)s.Hv * s.dv;
    const int cols = min((int)DELTA_C, s.dv - d);
    delta_load(x.dout, STRIDE, dout + from, row, at.count, cols, DELTA_C);
    delta_load(x.dr, STRIDE, (const X*)scratch.dr + from, row, at.count, cols, DELTA_C);
    delta_load(x.u, STRIDE, (const X*)scratch.u + from, row, at.count, cols, DELTA_C);
}

// Starts to load columns d ... d+63 of q and k.
template <class X>
__device__ inline void delta_load_keys_(const DeltaTiles_<X>& x, const DeltaScratchGpu<X>& scratch,
                                        DeltaSizes s, const DeltaPlace& at, int d) {
    const size_t row = 2 * (size_t)s.Hk * s.dk;
    const int cols = min((int)DELTA_C, s.dk - d);
    delta_load(x.q, delta_stride<X>(DELTA_C), delta_unit_at_(scratch, s, at, 0) + d, row, at.count, cols,
               DELTA_C);
    delta_load(x.k, delta_stride<X>(DELTA_C), delta_unit_at_(scratch, s, at, 1) + d, row, at.count, cols,
               DELTA_C);
}

// Numbers of the 64 tokens of a chunk in shared memory. db is without its factor 1 - beta.
struct DeltaRows_ {
    float f[DELTA_C], beta[DELTA_C], carry[DELTA_C], keep[DELTA_C], dG[DELTA_C], db[DELTA_C],
        column[DELTA_WARPS][DELTA_C];
};

// Turns dout U^T and dR U^T into dP and M, given K K^T and Q K^T, and adds to dG its terms inside
// of the chunk: of the lane's rows; of columns, summed over the warp's rows, to rows.column.
__device__ inline void delta_decay_terms_(float (&dG)[2], float (&dp)[8][4], float (&m)[8][4],
                                          const float (&kk)[8][4], const float (&qk)[8][4], DeltaRows_& rows,
                                          const float* decay_of) {
    const int warp = (int)threadIdx.x / 32;
    const DeltaLane lane = delta_lane();
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float columns[2] = {};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = lane.row + e / 2 * 8, j = 8 * n + lane.col + e % 2;
            const float decay = decay_of[i * DELTA_C + j], beta = rows.beta[i];
            const float inside = decay * (dp[n][e] * qk[n][e] - beta * m[n][e] * kk[n][e]),
                        term = j < i ? inside : 0.0f;
            dG[e / 2] += term;
            columns[e % 2] += term;
            dp[n][e] *= decay;
            m[n][e] *= j < i ? -beta * decay : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) { // over the 16 rows of the warp
            float& sum = columns[e];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            }
            if (threadIdx.x % 32 < 4) {
                rows.column[warp][8 * n + lane.col + e] = sum;
            }
        }
    }
}

// Sets dP and M, dG to its terms inside of the chunk, and db.
template <class X>
__device__ inline void delta_scores_backward_(const DeltaTiles_<X>& x, DeltaRows_& rows, const X* dout,
                                              const DeltaScratchGpu<X>& scratch, DeltaSizes s,
                                              const DeltaPlace& at) {
    constexpr int STRIDE = delta_stride<X>(DELTA_C);
    const int row0 = (int)threadIdx.x / 32 * 16;
    const DeltaLane lane = delta_lane();
    float dp[8][4], m[8][4], kk[8][4], qk[8][4], db[2] = {}, dG[2] = {};
    delta_clear(dp), delta_clear(m), delta_clear(kk), delta_clear(qk);
    for (int d = 0; d < s.dv; d += DELTA_C) {
        delta_load_values_(x, dout, scratch, s, at, d);
        delta_wait();
        delta_matmul<false, true>(dp, x.dout + row0 * STRIDE, STRIDE, x.u, STRIDE, DELTA_C);
        delta_matmul<false, true>(m, x.dr + row0 * STRIDE, STRIDE, x.u, STRIDE, DELTA_C);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            db[i % 4 / 2] += delta_at(x.dr, lane, i) * delta_at(x.u, lane, i);
        }
        __syncthreads();
    }
    for (int d = 0; d < s.dk; d += DELTA_C) {
        delta_load_keys_(x, scratch, s, at, d);
        delta_wait();
        delta_matmul<false, true>(kk, x.k + row0 * STRIDE, STRIDE, x.k, STRIDE, DELTA_C);
        delta_matmul<false, true>(qk, x.q + row0 * STRIDE, STRIDE, x.k, STRIDE, DELTA_C);
        __syncthreads();
    }
    delta_decay_terms_(dG, dp, m, kk, qk, rows, x.decay);
    delta_store(x.dp, dp);
    delta_store(x.m, m);
    delta_add_rows(rows.db, db);
    delta_add_rows(rows.dG, dG);
    __syncthreads();
    if (threadIdx.x < DELTA_C) {
        for (int w = 0; w < DELTA_WARPS; w++) {
            rows.dG[threadIdx.x] -= rows.column[w][threadIdx.x];
        }
    }
    __syncthreads();
}

// Sets columns d ... d+63 of dQ and dK, and adds to dG. Returns the thread's part of <dS1, S1>.
template <class X>
__device__ inline float delta_keys_backward_(const DeltaTiles_<X>& x, DeltaRows_& rows, const X* dout,
                                             const DeltaScratchGpu<X>& scratch, DeltaSizes s,
                                             const DeltaPlace& at, int d) {
    constexpr int STRIDE = delta_stride<X>(DELTA_C);
    const int row0 = (int)threadIdx.x / 32 * 16, there = min((int)DELTA_C, s.dk - d);
    float dq[8][4], row[8][4], col[8][4], dots[2] = {}, next = 0.0f;
    delta_clear(dq), delta_clear(row), delta_clear(col);
    delta_load_keys_(x, scratch, s, at, d);
    for (int e = 0; e < s.dv; e += DELTA_C) {
        const size_t from = (delta_chunk_(s, at) * s.dk + d) * s.dv + e, after = (size_t)s.dk * s.dv;
        const int cols = min((int)DELTA_C, s.dv - e);
        delta_load_values_(x, dout, scratch, s, at, e);
        delta_load(x.s, STRIDE, (const X*)scratch.states + from, (size_t)s.dv, there, cols, DELTA_C);
        delta_load(x.ds, STRIDE, (const X*)scratch.ds + from, (size_t)s.dv, there, cols, DELTA_C);
        delta_wait();
        delta_matmul<false, true>(dq, x.dout + row0 * STRIDE, STRIDE, x.s, STRIDE, DELTA_C);
        delta_matmul<false, true>(row, x.dr + row0 * STRIDE, STRIDE, x.s, STRIDE, DELTA_C);
        delta_matmul<false, true>(col, x.u + row0 * STRIDE, STRIDE, x.ds, STRIDE, DELTA_C);
        for (int i = (int)threadIdx.x; i < there * cols && at.chunk + 1 < at.chunks; i += DELTA_THREADS) {
            next += to_float(x.ds[i / cols * STRIDE + i % cols]) *
                    to_float(scratch.states[from + after + (size_t)(i / cols) * s.dv + i % cols]);
        }
        __syncthreads();
    }
    delta_scale_rows(dq, rows.carry, 1.0f);
    delta_scale_rows(row, rows.carry, -1.0f);
    delta_scale_rows(row, rows.beta, 1.0f);
    delta_scale_rows(col, rows.keep, 1.0f);
    delta_row_dots(dots, x.q, dq, 1.0f);
    delta_row_dots(dots, x.k, row, 1.0f);
    delta_row_dots(dots, x.k, col, -1.0f);
    delta_add_rows(rows.dG, dots);
    delta_matmul<false, false>(dq, x.dp + row0 * STRIDE, STRIDE, x.k, STRIDE, row0 + 16);
    delta_matmul<false, false>(row, x.m + row0 * STRIDE, STRIDE, x.k, STRIDE, row0 + 16);
    delta_matmul<true, false>(row, x.dp + row0 * STRIDE + row0, STRIDE, x.q + row0 * STRIDE, STRIDE,
                              DELTA_C - row0);
    delta_matmul<true, false>(row, x.m + row0 * STRIDE + row0, STRIDE, x.k + row0 * STRIDE, STRIDE,
                              DELTA_C - row0);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        row[i / 4][i % 4] += col[i / 4][i % 4];
    }
    X* to = scratch.dunit + (at.token * 2 * s.Hv + at.h) * s.dk + d;
    delta_store_rows(to, 2 * (size_t)s.Hv * s.dk, dq, at.count, there);
    delta_store_rows(to + (size_t)s.Hv * s.dk, 2 * (size_t)s.Hv * s.dk, row, at.count, there);
    __syncthreads();
    return next;
}

// A block computes the gradients of a chunk of a value head but for dV.
// grid   chunks, Hv, B      block   128      shared   81 KiB in 16 bits
// moves  for each 64 columns of keys 3*dv per token, and 3*dv/64 of 64 rows; 2*dk out
//        Bound by mma.
// order  fixed
template <class X>
__global__ void __launch_bounds__(DELTA_THREADS)
    delta_gradient_kernel(DeltaGradientsGpu<X> d, DeltaPassGpu<X> pass, DeltaScratchGpu<X> scratch) {
    SMEM_DYNAMIC(X, memory);
    SMEM_ARRAY(DeltaRows_, rows, [1]);
    const DeltaSizes s = pass.sizes;
    const DeltaPlace at = delta_place(s, (int)blockIdx.z, (int)blockIdx.y, (int)blockIdx.x);
    const DeltaTiles_<X> x = delta_tiles_(memory);
    const int tid = (int)threadIdx.x;
    DeltaTokenGates gates = {};
    if (tid < DELTA_C) {
        const float* kept = scratch.gates + ((at.token + tid) * s.Hv + at.h) * DELTA_GATES;
        gates = delta_token_gates(pass, at, tid);
        rows->f[tid] = gates.f, rows->beta[tid] = gates.beta;
        rows->carry[tid] = tid < at.count ? kept[1] : 0.0f;
        rows->keep[tid] = tid < at.count ? kept[2] : 0.0f;
        rows->dG[tid] = rows->db[tid] = 0.0f;
    }
    __syncthreads();
    delta_decays_(x.decay, rows->f); // read after barriers
    delta_scores_backward_(x, rows[0], d.dout, scratch, s, at);
    float next = 0.0f;
    for (int k = 0; k < s.dk; k += DELTA_C) {
        next += delta_keys_backward_(x, rows[0], d.dout, scratch, s, at, k);
    }
    next = block_sum(next);
    float dg = 0.0f, da = 0.0f; // of token tid: the sum of dG to the end of its document
    for (int i = at.count - 1; i >= tid; i--) {
        dg = rows->f[i] > 0.0f ? dg + rows->dG[i] + (i == at.count - 1 ? next : 0.0f) : 0.0f;
    }
    if (tid < at.count) {
        X* to = d.dba + (at.token + tid) * 2 * s.Hv + at.h;
        da = gates.slope * dg;
        to[0] = from_float<X>((1.0f - gates.beta) * rows->db[tid]);
        to[s.Hv] = from_float<X>(da);
    }
    const float dA = block_sum(dg * gates.g), ddt = block_sum(da);
    if (tid == 0) {
        float* to = scratch.sums + ((size_t)at.b * at.chunks + at.chunk) * 2 * s.Hv + at.h;
        to[0] = dA, to[s.Hv] = ddt;
    }
}

// A warp sums dQ and dK of a token over the value heads of a key head, and turns them into
// gradients of x.
// grid   ceil(N*Hk / 4)      block   128 = 4 key heads      shared   none
// moves  2*(Hv + Hk)*dk in, 2*Hk*dk out per token. Bound by memory.
// order  fixed
template <class X>
__global__ void __launch_bounds__(DELTA_THREADS)
    delta_unit_kernel(DeltaGradientsGpu<X> d, DeltaPassGpu<X> pass, DeltaScratchGpu<X> scratch) {
    constexpr int COLUMNS = DELTA_RULE_WIDEST / 32;
    const DeltaSizes s = pass.sizes;
    const int lane = (int)threadIdx.x % 32, group = s.Hv / s.Hk, R = 2 * s.Hk * s.dk + s.Hv * s.dv;
    const size_t i = (size_t)blockIdx.x * DELTA_WARPS + threadIdx.x / 32, n = i / s.Hk;
    const int head = (int)(i % s.Hk);
    if (n >= (size_t)s.B * s.T) {
        return; // the whole warp
    }
    for (int is_key = 0; is_key < 2; is_key++) {
        const size_t at = n * R + (size_t)(is_key * s.Hk + head) * s.dk;
        float x[COLUMNS], dy[COLUMNS] = {}, square = 0.0f, dot = 0.0f;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const int c = lane + 32 * j;
            x[j] = c < s.dk ? to_float(pass.qkv[at + c]) : 0.0f;
            for (int g = 0; g < group && c < s.dk; g++) {
                dy[j] += to_float(scratch.dunit[((n * 2 + is_key) * s.Hv + head * group + g) * s.dk + c]);
            }
            square += x[j] * x[j];
            dot += x[j] * dy[j];
        }
        const float r = rsqrtf(warp_sum(square) + DELTA_RULE_EPS),
                    scale = is_key ? r : r * rsqrtf((float)s.dk), along = warp_sum(dot) * r * r;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const int c = lane + 32 * j;
            if (c < s.dk) {
                d.dqkv[at + c] = from_float<X>(scale * (dy[j] - x[j] * along));
            }
        }
    }
}

// ---- launchers ----

// Runs the statement with KT = 1, 2 or 4, the 64 rows of a state.
#define DELTA_DISPATCH_(dk, ...)                                                                             \
    do {                                                                                                     \
        if (delta_state_tiles(dk) == 1) {                                                                    \
            constexpr int KT = 1;                                                                            \
            __VA_ARGS__;                                                                                     \
        } else if (delta_state_tiles(dk) == 2) {                                                             \
            constexpr int KT = 2;                                                                            \
            __VA_ARGS__;                                                                                     \
        } else {                                                                                             \
            constexpr int KT = 4;                                                                            \
            __VA_ARGS__;                                                                                     \
        }                                                                                                    \
    } while (0)

// Returns the shared memory that a block must be able to request.
template <class X> static inline size_t delta_rule_shared_bytes(DeltaSizes s) {
    const size_t columns = delta_columns_bytes_<X>(s),
                 gradient = DELTA_GRADIENT_BYTES<X> + sizeof(DeltaRows_);
    return columns > gradient ? columns : gradient;
}

template <class X> static inline void delta_check_gpu_(DeltaSizes s, const Gpu* gpu) {
    assert(s.Hv % s.Hk == 0 && s.dk % 8 == 0 && s.dv % 8 == 0 && s.dk <= DELTA_RULE_WIDEST &&
           s.dv <= DELTA_RULE_WIDEST && delta_rule_shared_bytes<X>(s) <= gpu->shared_bytes);
}

static inline dim3 delta_chunk_grid_(DeltaSizes s) {
    return dim3((unsigned)delta_chunks(s), (unsigned)s.Hv, (unsigned)s.B);
}
static inline dim3 delta_column_grid_(DeltaSizes s) {
    return dim3((unsigned)ceil_div(s.dv, (int)DELTA_C), (unsigned)s.Hv, s.T > 0 ? (unsigned)s.B : 0);
}

// Launches the kernels that go from the inputs to U and S, or to out.
template <class X, bool KEEPS>
static inline void delta_launch_forward_(const DeltaPassGpu<X>* pass, const DeltaScratchGpu<X>* scratch,
                                         const Gpu* gpu) {
    const DeltaSizes s = pass->sizes;
    const dim3 chunks = delta_chunk_grid_(s), columns = delta_column_grid_(s);
    delta_check_gpu_<X>(s, gpu);
    assert(s.B * delta_chunks(s) <= scratch->chunks);
    launch(delta_chunk_kernel<X>, chunks, DELTA_THREADS, delta_chunk_bytes_<X>(s), gpu, *pass, *scratch);
    DELTA_DISPATCH_(s.dk, launch(delta_forward_kernel<X, KT, KEEPS>, columns, DELTA_THREADS,
                                 delta_columns_bytes_<X>(s), gpu, *pass, *scratch));
}

// Returns the number of sequences that scratch has memory for.
template <class X> static inline int delta_at_once_(DeltaSizes s, const DeltaScratchGpu<X>* scratch) {
    const int most = scratch->chunks / (s.T > 0 ? delta_chunks(s) : 1);
    return most > 0 ? most : 1;
}

// Returns the pass over up to `count` sequences from `first` on.
template <class X>
static inline DeltaPassGpu<X> delta_sequences_(DeltaPassGpu<X> pass, int first, int count) {
    const DeltaSizes s = pass.sizes;
    const size_t tokens = (size_t)first * s.T;
    pass.sizes.B = count < s.B - first ? count : s.B - first;
    pass.starts = pass.starts ? pass.starts + tokens : NULL;
    pass.qkv += tokens * delta_rule_columns(s);
    pass.ba += tokens * 2 * s.Hv;
    pass.out += tokens * delta_rule_out_columns(s);
    pass.state = pass.state ? pass.state + first * delta_rule_state_size(s) : NULL;
    return pass;
}

template <class X>
static inline void delta_rule_forward(const DeltaPassGpu<X>* pass, DeltaScratchGpu<X>* scratch,
                                      const Gpu* gpu) {
    const int at_once = delta_at_once_(pass->sizes, scratch);
    for (int first = 0; first < pass->sizes.B; first += at_once) {
        const DeltaPassGpu<X> part = delta_sequences_(*pass, first, at_once);
        delta_launch_forward_<X, false>(&part, scratch, gpu);
    }
}

// The backward pass over sequences that scratch has memory for.
template <class X>
static inline void delta_launch_backward_(const DeltaGradientsGpu<X>* d, const DeltaPassGpu<X>* pass,
                                          DeltaScratchGpu<X>* scratch, const Gpu* gpu) {
    const DeltaSizes s = pass->sizes;
    const dim3 chunks = delta_chunk_grid_(s), columns = delta_column_grid_(s);
    const Gradient to[] = {d->dA_log, d->ddt_bias};
    assert(scratch->trains);
    delta_launch_forward_<X, true>(pass, scratch, gpu);
    DELTA_DISPATCH_(s.dk, launch(delta_reverse_kernel<X, KT>, columns, DELTA_THREADS,
                                 delta_columns_bytes_<X>(s), gpu, *d, s, *scratch));
    launch(delta_gradient_kernel<X>, chunks, DELTA_THREADS, DELTA_GRADIENT_BYTES<X>, gpu, *d, *pass,
           *scratch);
    launch(delta_unit_kernel<X>, (unsigned)ceil_div((size_t)s.B * s.T * s.Hk, (size_t)DELTA_WARPS),
           DELTA_THREADS, 0, gpu, *d, *pass, *scratch);
    column_sums_finish<X>(to, 2, ColumnPartials<float>{scratch->sums, s.B * delta_chunks(s), 2 * s.Hv, s.Hv},
                          d->mode, gpu);
}

template <class X>
static inline void delta_rule_backward(const DeltaGradientsGpu<X>* d, const DeltaPassGpu<X>* pass,
                                       DeltaScratchGpu<X>* scratch, const Gpu* gpu) {
    const DeltaSizes s = pass->sizes;
    const int at_once = delta_at_once_(s, scratch);
    for (int first = 0; first == 0 || first < s.B; first += at_once) { // once without any
        const size_t tokens = (size_t)first * s.T;
        const DeltaPassGpu<X> part = delta_sequences_(*pass, first, at_once);
        DeltaGradientsGpu<X> dpart = *d;
        dpart.dout += tokens * delta_rule_out_columns(s);
        dpart.dqkv += tokens * delta_rule_columns(s);
        dpart.dba += tokens * 2 * s.Hv;
        dpart.mode = first == 0 ? d->mode : GRADIENT_ADD;
        delta_launch_backward_(&dpart, &part, scratch, gpu);
    }
}

#endif
