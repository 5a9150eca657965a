/*
attention_wgmma_backward.cuh -- the backward pass of attention.cuh by wgmma and TMA, in two kernels,
like the one by mma_16816:

    query grad  owns q, dout     streams keys, values    s = q k^T, dp = dout v^T, dq += ds k
    key grads   owns keys, values    streams q, dout     s^T = k q^T, dp^T = v dout^T,
                                                         dv += p^T dout, dk += ds^T q

Results of the first two matmuls have the layout of the left operand of the next ones: no
transposes. Blocks take tiles as in attention_wgmma.cuh.
*/
#ifndef LLMC_ATTENTION_WGMMA_BACKWARD_CUH
#define LLMC_ATTENTION_WGMMA_BACKWARD_CUH

#include "llmc/ops/attention_wgmma.cuh"

template <int W, int COLS, int GROUPS, int STAGES, int FEWER, int MORE>
using AttentionQueriesTiles_ = AttentionTiles<W, 2, COLS, GROUPS, STAGES, 1, FEWER, MORE, 0, 0>;
typedef AttentionQueriesTiles_<64, 128, 2, 2, 40, 232> AttentionQueries64;
typedef AttentionQueriesTiles_<128, 64, 2, 2, 40, 232> AttentionQueries128;

// OVERLAP: s and dp of the next tile run beside dv and dk of this one, and keys and values stay in
// registers. EXTRA: lse and delta of the queries.
template <int W, int COLS, int GROUPS, int STAGES, int FEWER, int MORE, int OVERLAP>
using AttentionKeysTiles_ = AttentionTiles<W, 2, COLS, GROUPS, STAGES, 1, FEWER, MORE, OVERLAP, 8 * COLS>;
typedef AttentionKeysTiles_<64, 64, 2, 3, 40, 232, 1> AttentionKeys64;
typedef AttentionKeysTiles_<64, 64, 2, 3, 40, 232, 0> AttentionKeys64Apart;
typedef AttentionKeysTiles_<128, 64, 2, 2, 40, 232, 0> AttentionKeys128;
typedef AttentionKeysTiles_<128, 64, 2, 2, 24, 240, 0> AttentionKeys128Masked; // with more masks

#if PTX_HAS_WGMMA

// ---- parts ----

// Returns true if a kernel sets column sums: not for gathered keys, the only ones here that are
// general without a cap.
template <AttentionMask MASK> __device__ inline bool attention_has_sums_(const float* sums) {
    return MASK != ATTENTION_GENERAL && (!attention_is_general(MASK) || sums);
}

// Loads a warp's 16 rows of a tile, from `row` on, as left operands.
template <int W>
__device__ inline void attention_keep_(unsigned (&kept)[W / 16][4], unsigned char* tile, int rows, int row) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < W / 16; k++) {
        ldmatrix_x4(kept[k], attention_chunk(tile, rows, row + lane % 16, 2 * k + lane / 16));
    }
}

// Starts s = left right^T, with the left operand in registers.
template <class X, int W, int N>
__device__ inline void attention_dot_kept_start_(float (&s)[N][4], const unsigned (&left)[W / 16][4],
                                                 unsigned right) {
    const uint64_t b = wgmma_descriptor(right, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < W / 16; k++) {
        wgmma_of_registers<X, 0>(s, left[k], b + k / 4 * (8 * N * 128 >> 4) + k % 4 * (int)wgmma_step(0),
                                 k > 0);
    }
}

// Sums the columns of a tile of ROWS rows that all warps have written; the computing threads call
// it. Sets `to` (HS). The sums are a matmul with a matrix of ones.
template <class X, class Tiles>
__device__ inline void attention_sum_columns_(float* to, unsigned char* tile, int HS) {
    const int lane = (int)threadIdx.x % 32;
    const unsigned one = attention_pair<X>(1.0f, 1.0f), ones[4] = {one, one, one, one};
    for (int d = (int)threadIdx.x / 32 * 16; d < Tiles::W; d += 16 * 4 * Tiles::GROUPS) {
        float sums[2][4] = {};
        unsigned b[4];
#pragma unroll
        for (int row = 0; row < Tiles::ROWS; row += 16) {
            ldmatrix_x4_trans(b, attention_chunk(tile, Tiles::ROWS, row + lane % 16, d / 8 + lane / 16));
            mma_16816<X>(sums[0], ones, b[0], b[1]);
            mma_16816<X>(sums[1], ones, b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int c = d + i / 2 * 8 + 2 * lane + i % 2;
            if (lane < 4 && c < HS) {
                to[c] = sums[i / 2][i % 2];
            }
        }
    }
}

// ---- query grad ----

// Sets rows to (lse * ATTENTION_LOG2_E, delta) of rows 8i + lane / 4 of the warp, and to zeros from
// `count` on. `dout` is a tile in shared memory, `row` the warp's first row there; the four lanes
// of a row share its 16 bytes in turn.
template <class X, int W>
__device__ inline void attention_delta_of_(float2 (&rows)[1][2], const X* out, size_t stride,
                                           unsigned char* dout, int tile_rows, int row, const float* lse,
                                           int count, int HS) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = 8 * half + lane / 4;
        float delta = 0.0f;
#pragma unroll
        for (int chunk = lane % 4; chunk < W / 8; chunk += 4) {
            if (r < count && 8 * chunk < HS) {
                const Pack<X> x = load_pack(reinterpret_cast<const X*>(
                                  attention_chunk(dout, tile_rows, row + r, chunk))),
                              y = load_pack_once(out + r * stride + 8 * chunk);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    delta += to_float(x[e]) * to_float(y[e]);
                }
            }
        }
        rows[0][half] = make_float2(r < count ? lse[r] * ATTENTION_LOG2_E : 0.0f, attention_row_sum(delta));
    }
}

// Adds to dq of the warpgroup's queries the part of the next tile of keys, from u0 on.
template <class X, class Tiles, AttentionMask MASK>
__device__ inline void attention_query_grad_step_(float (&dq)[1][Tiles::W / 8][4], AttentionPipe& pipe,
                                                  const unsigned (&q)[Tiles::W / 16][4],
                                                  const unsigned (&dout)[Tiles::W / 16][4],
                                                  const float2 (&mine)[1][2], const AttentionRows& rows,
                                                  int u0, const AttentionSize& size) {
    const float scale = attention_exponent<MASK>(size);
    const int at = pipe.passed++;
    const AttentionStage keys = attention_stage_of<Tiles>(pipe, at, 0),
                         values = attention_stage_of<Tiles>(pipe, at, 1);
    const unsigned k = ptx_shared_address(attention_streamed<Tiles>(pipe, at, 0)),
                   v = ptx_shared_address(attention_streamed<Tiles>(pipe, at, 1));
    float s[1][Tiles::COLS / 8][4], ds[1][Tiles::COLS / 8][4];
    unsigned p[Tiles::COLS / 16][4];
    mbarrier_wait(keys.full, attention_parity<Tiles>(at));
    attention_dot_kept_start_<X, Tiles::W>(s[0], q, k);
    wgmma_commit();
    mbarrier_wait(values.full, attention_parity<Tiles>(at));
    attention_dot_kept_start_<X, Tiles::W>(ds[0], dout, v);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_settle(s[0]);
    attention_cap<MASK>(s, size);
    attention_mask<MASK>(s, rows, u0);
#pragma unroll
    for (int i = 0; i < Tiles::COLS / 2; i++) {
        const float slope = attention_slope<MASK>(s[0][i / 4][i % 4]);
        s[0][i / 4][i % 4] = exp2_approx(s[0][i / 4][i % 4] * scale - mine[0][i % 4 / 2].x) * slope;
    }
    wgmma_wait<0>();
    wgmma_settle(ds[0]);
    attention_release(values);
#pragma unroll
    for (int i = 0; i < Tiles::COLS / 2; i++) {
        ds[0][i / 4][i % 4] = s[0][i / 4][i % 4] * (ds[0][i / 4][i % 4] - mine[0][i % 4 / 2].y);
    }
    attention_round<X>(p, ds[0]);
    attention_mix_start<X>(dq[0], p, k);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(dq[0]);
    attention_release(keys);
}

// Arguments of the backward pass; `sums` and Tp as in attention.cuh.
template <class X> struct AttentionGrads_ {
    X *dqkv, *dkv;
    float2* rows;
    float* sums;
    const X* out;
    const float* lse;
    const int* starts;
    int Tp;
};

template <class X, class Tiles, AttentionMask MASK>
__device__ inline void attention_query_grad_work_(const AttentionGrads_<X>& to, AttentionPipe& pipe, int n,
                                                  const AttentionWork& work, const AttentionSize& size) {
    constexpr int W = Tiles::W, ROWS = Tiles::ROWS;
    const int warp = attention_uniform((int)threadIdx.x / 32), group = warp / 4, warp_row = 16 * warp,
              row0 = work.t0 + warp_row, count = size.T - row0;
    unsigned char *q_tile = attention_own<Tiles>(pipe, n, 0), *d_tile = attention_own<Tiles>(pipe, n, 1);
    const size_t row = (size_t)work.b * size.T + row0, head = (size_t)work.b * size.NH + work.h;
    const int2 seen = attention_seen_tiles<Tiles, MASK>(work, to.starts, group, size);
    const AttentionRows rows = attention_rows_of<MASK>(row0, work, to.starts, size);
    float2 mine[1][2];
    attention_delta_of_<X, W>(mine, to.out + row * size.Q + work.h * size.HS, (size_t)size.Q, d_tile, ROWS,
                              warp_row, to.lse + head * size.T + row0, count, size.HS);
    attention_store_rows(to.rows + head * to.Tp + row0, mine);
    unsigned q[W / 16][4], dout[W / 16][4];
    attention_keep_<W>(q, q_tile, ROWS, warp_row);
    attention_keep_<W>(dout, d_tile, ROWS, warp_row);
    float dq[1][W / 8][4] = {};
    attention_pass<Tiles>(pipe, seen.x);
    for (int i = seen.x; i < seen.y; i++) {
        attention_query_grad_step_<X, Tiles, MASK>(dq, pipe, q, dout, mine, rows, work.from + i * Tiles::COLS,
                                                   size);
    }
    attention_pass<Tiles>(pipe, work.steps - seen.y);
    const float scale = size.scale.scale, scales[1][2] = {{scale, scale}};
    attention_rescale(dq, scales);
    const size_t stride = attention_stride(size);
    attention_write<X, W>(to.dqkv + row * stride + work.h * size.HS, stride, count, size.HS, q_tile, ROWS,
                          warp_row, dq);
    if (attention_has_sums_<MASK>(to.sums)) {
        barrier_of<128 * Tiles::GROUPS>(1);
        attention_sum_columns_<X, Tiles>(to.sums + ((size_t)work.b * size.tiles + work.t0 / ROWS) * stride +
                                             work.h * size.HS,
                                         q_tile, size.HS);
    }
}

// A block computes dq of tiles of ROWS queries of one head, as many as it finds; also `rows` for
// the key grads kernel, and its part of `sums`.
// grid   as many blocks as fit on the GPU      block   384      shared   2 (q, dout), STAGES (k, v)
// moves  B*T*(QKV + 2 Q) in, B*T*Q out, B*NH*T fp32 in, 2 * B*NH*T fp32 out, Q fp32 out per tile of
//        rows. Tiles of a head are read again from L2. Bound by tensor cores.
// order  fixed: keys in order
// needs  HS <= W, a multiple of 8; aligned addresses
// Spills 4 bytes at W = 64 with a cap, in the warp that fills.
template <class X, class Tiles, AttentionMask MASK>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_query_grad_wgmma_kernel(const __grid_constant__ CUtensorMap q_map,
                                      const __grid_constant__ CUtensorMap d_map,
                                      const __grid_constant__ CUtensorMap kv_map, X* dqkv, float2* rows,
                                      float* sums, const X* out, const float* lse, const int* starts,
                                      unsigned* taken, unsigned tiles, AttentionSize size, int Tp) {
    SMEM_DYNAMIC(unsigned char, memory);
    attention_block<Tiles>(
        memory,
        [&](AttentionPipe& pipe) {
            attention_fill_all<Tiles, MASK>(pipe, &q_map, &d_map, &kv_map, starts, taken, tiles, size);
        },
        [&](AttentionPipe& pipe, int n, int tile) {
            const AttentionGrads_<X> to = {dqkv, NULL, rows, sums, out, lse, starts, Tp};
            const AttentionWork work = attention_work<Tiles, MASK>(tile, starts, size);
            attention_query_grad_work_<X, Tiles, MASK>(to, pipe, n, work, size);
        });
}

// ---- key grads ----

// One tile of keys: u0 ... of key head j of sequence b. Queries from row `first` on see them,
// `steps` tiles of each head of the group.
struct AttentionKeysWork_ {
    int b, j, u0, first, steps;
};

template <class Tiles, AttentionMask MASK>
__device__ inline AttentionKeysWork_ attention_keys_work_(int tile, const int* starts,
                                                          const AttentionSize& size) {
    const int head = tile / size.tiles;
    AttentionKeysWork_ work;
    work.b = head / size.KV;
    work.j = head % size.KV;
    work.u0 = tile % size.tiles * Tiles::ROWS;
    work.first = attention_is_general(MASK) ? token_chunks_from(size.chunks, work.u0, size.T) : work.u0;
    work.steps = ceil_div(size.T - work.first, Tiles::COLS);
    // tiles whose first query sees no key follow the others
    if (MASK != ATTENTION_CAUSAL) {
        int low = 0;
        while (low < work.steps) {
            const int middle = (low + work.steps) / 2, row = work.first + middle * Tiles::COLS,
                      t = row + attention_shift<MASK>(row, size);
            if (attention_start_of<MASK>(starts, work.b * attention_last<MASK>(size) + t) <
                work.u0 + Tiles::ROWS) {
                low = middle + 1;
            } else {
                work.steps = middle;
            }
        }
    }
    work.steps = attention_uniform(work.steps);
    return work;
}

// Fills all that a block needs which owns keys; one warp calls it.
template <class Tiles, AttentionMask MASK>
__device__ inline void attention_fill_all_keys_(AttentionPipe& pipe, const CUtensorMap* q_map,
                                                const CUtensorMap* d_map, const CUtensorMap* kv_map,
                                                const float2* rows, const int* starts, unsigned* taken,
                                                unsigned tiles, const AttentionSize& size, int Tp) {
    const int keys_head = attention_is_general(MASK) ? 0 : size.NH, group = size.NH / size.KV;
    int tile;
    for (int n = 0; (tile = attention_take<Tiles>(pipe, n, taken, tiles)) >= 0; n++) {
        const AttentionKeysWork_ work = attention_keys_work_<Tiles, MASK>(tile, starts, size);
        const int head = keys_head + work.j;
        attention_fill_own<Tiles>(pipe, n, kv_map, head, kv_map, head + size.KV, work.u0, work.b);
        for (int h = work.j * group; h < (work.j + 1) * group; h++) {
#pragma unroll 1 // few registers
            for (int i = 0; i < work.steps; i++) {
                const int t0 = work.first + i * Tiles::COLS;
                attention_fill_stream<Tiles, Tiles::EXTRA>(pipe, 0, q_map, h, t0, work.b, rows,
                                                           (work.b * size.NH + h) * Tp + t0);
                attention_fill_stream<Tiles, 0>(pipe, 1, d_map, h, t0, work.b, rows, 0);
                pipe.passed++;
            }
        }
    }
    __syncwarp();
}

// Keys and values of a warpgroup as left operands: in registers, or at shared addresses.
template <class Tiles> struct AttentionKept_ {
    static constexpr int SIZE = Tiles::OVERLAP ? Tiles::W / 16 : 1;
    unsigned k[SIZE][4], v[SIZE][4];
    unsigned k_address, v_address;
};

// Waits for a tile of queries, and starts s = k q^T and dp = v dout^T.
template <class X, class Tiles>
__device__ inline void
attention_key_scores_start_(float (&s)[1][Tiles::COLS / 8][4], float (&dp)[1][Tiles::COLS / 8][4],
                            const AttentionKept_<Tiles>& kept, const AttentionPipe& pipe, int at) {
    const unsigned q = ptx_shared_address(attention_streamed<Tiles>(pipe, at, 0)),
                   d = ptx_shared_address(attention_streamed<Tiles>(pipe, at, 1));
    mbarrier_wait(attention_stage_of<Tiles>(pipe, at, 0).full, attention_parity<Tiles>(at));
    if constexpr (Tiles::OVERLAP) {
        attention_dot_kept_start_<X, Tiles::W>(s[0], kept.k, q);
    } else {
        attention_dot_start<X, Tiles::W>(s[0], kept.k_address, Tiles::ROWS, q);
    }
    wgmma_commit();
    mbarrier_wait(attention_stage_of<Tiles>(pipe, at, 1).full, attention_parity<Tiles>(at));
    if constexpr (Tiles::OVERLAP) {
        attention_dot_kept_start_<X, Tiles::W>(dp[0], kept.v, d);
    } else {
        attention_dot_start<X, Tiles::W>(dp[0], kept.v_address, Tiles::ROWS, d);
    }
    wgmma_commit();
}

// Starts dv += p dout and dk += ds q.
template <class X, class Tiles>
__device__ inline void
attention_key_grads_start_(float (&dk)[1][Tiles::W / 8][4], float (&dv)[1][Tiles::W / 8][4],
                           const unsigned (&p)[Tiles::COLS / 16][4],
                           const unsigned (&ds)[Tiles::COLS / 16][4], const AttentionPipe& pipe, int at) {
    attention_mix_start<X>(dv[0], p, ptx_shared_address(attention_streamed<Tiles>(pipe, at, 1)));
    attention_mix_start<X>(dk[0], ds, ptx_shared_address(attention_streamed<Tiles>(pipe, at, 0)));
    wgmma_commit();
}

// Masks scores of the warp's keys, from row0 on, and the queries of a tile, rows t0 ... of the
// rank.
template <class Tiles, AttentionMask MASK>
__device__ inline void attention_mask_queries_(float (&s)[1][Tiles::COLS / 8][4], int row0, int t0,
                                               const AttentionStarts<MASK>& first_key,
                                               const AttentionSize& size) {
    const int t = t0 + attention_shift<MASK>(t0, size), last = attention_last<MASK>(size);
    if (t < row0 + 15) {
        attention_mask_earlier_queries(s, row0, t);
    }
    if (MASK != ATTENTION_CAUSAL && first_key[min(t + Tiles::COLS, last) - 1] > row0) {
        attention_mask_later_queries(s, first_key, row0, t, last);
    }
}

// lse, or delta, of the queries 8n + 2t and the next one.
__device__ inline float4 attention_two_rows_(const float2* rows, int n) {
    return *reinterpret_cast<const float4*>(rows + 8 * n + 2 * ((int)threadIdx.x % 4));
}

// Sets p, rounded to a left operand. Turns s into p, with a cap times its slope.
template <class X, AttentionMask MASK, int N>
__device__ inline void attention_exp_of_keys_(unsigned (&p)[N / 2][4], float (&s)[1][N][4],
                                              const float2* rows, float scale) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float4 two = attention_two_rows_(rows, n);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float &a = s[0][n][2 * half], &b = s[0][n][2 * half + 1];
            const float slope_a = attention_slope<MASK>(a), slope_b = attention_slope<MASK>(b);
            a = exp2_approx(a * scale - two.x), b = exp2_approx(b * scale - two.z);
            if constexpr (MASK == ATTENTION_CAPPED) {
                p[n / 2][n % 2 * 2 + half] = attention_pair<X>(a, b);
                a *= slope_a, b *= slope_b;
            }
        }
    }
    if constexpr (MASK != ATTENTION_CAPPED) {
        attention_round<X>(p, s[0]);
    }
}

// Turns dp into ds, given the above.
template <int N>
__device__ inline void attention_ds_of_keys_(float (&dp)[1][N][4], const float (&p)[1][N][4],
                                             const float2* rows) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float4 two = attention_two_rows_(rows, n);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            dp[0][n][e] = p[0][n][e] * (dp[0][n][e] - (e % 2 ? two.w : two.y));
        }
    }
}

// Adds to dk and dv of the warpgroup's keys the parts of all queries.
template <class X, class Tiles, AttentionMask MASK>
__device__ inline void attention_key_grads_all_(float (&dk)[1][Tiles::W / 8][4],
                                                float (&dv)[1][Tiles::W / 8][4], AttentionPipe& pipe,
                                                const AttentionKept_<Tiles>& kept,
                                                const AttentionKeysWork_& work, int row0, const int* starts,
                                                const AttentionSize& size) {
    const int all = work.steps * (size.NH / size.KV);
    const AttentionStarts<MASK> first_key = {starts, work.b * attention_last<MASK>(size)};
    const float scale = attention_exponent<MASK>(size);
    float s[1][Tiles::COLS / 8][4], dp[1][Tiles::COLS / 8][4];
    unsigned p[Tiles::COLS / 16][4], ds[Tiles::COLS / 16][4];
    if (Tiles::OVERLAP && all > 0) {
        attention_key_scores_start_<X>(s, dp, kept, pipe, pipe.passed);
        wgmma_wait<0>();
        wgmma_settle(s[0]);
        wgmma_settle(dp[0]);
    }
    for (int i = 0, step = 0; i < all; i++) {
        const int at = pipe.passed++;
        const float2* rows = reinterpret_cast<const float2*>(attention_extra<Tiles>(pipe, at));
        if (!Tiles::OVERLAP) {
            attention_key_scores_start_<X>(s, dp, kept, pipe, at);
            wgmma_wait<1>();
            wgmma_settle(s[0]);
        }
        attention_cap<MASK>(s, size);
        attention_mask_queries_<Tiles, MASK>(s, row0, work.first + step * Tiles::COLS, first_key, size);
        step = step + 1 < work.steps ? step + 1 : 0;
        attention_exp_of_keys_<X, MASK>(p, s, rows, scale);
        if (!Tiles::OVERLAP) {
            wgmma_wait<0>();
            wgmma_settle(dp[0]);
        }
        attention_ds_of_keys_(dp, s, rows);
        attention_round<X>(ds, dp[0]);
        attention_key_grads_start_<X, Tiles>(dk, dv, p, ds, pipe, at);
        if (Tiles::OVERLAP && i + 1 < all) {
            attention_key_scores_start_<X>(s, dp, kept, pipe, at + 1);
        }
        wgmma_wait<0>();
        wgmma_settle(dk[0]);
        wgmma_settle(dv[0]);
        if (Tiles::OVERLAP) {
            wgmma_settle(s[0]);
            wgmma_settle(dp[0]);
        }
        attention_release(attention_stage_of<Tiles>(pipe, at, 0));
        attention_release(attention_stage_of<Tiles>(pipe, at, 1));
    }
}

template <class X, class Tiles, AttentionMask MASK>
__device__ inline void attention_key_grads_work_(const AttentionGrads_<X>& to, AttentionPipe& pipe, int n,
                                                 const AttentionKeysWork_& work, const AttentionSize& size) {
    constexpr int W = Tiles::W, ROWS = Tiles::ROWS;
    const int warp = attention_uniform((int)threadIdx.x / 32), group = warp / 4, warp_row = 16 * warp,
              row0 = work.u0 + warp_row, last = attention_last<MASK>(size), column = work.j * size.HS;
    unsigned char *k_tile = attention_own<Tiles>(pipe, n, 0), *v_tile = attention_own<Tiles>(pipe, n, 1);
    AttentionKept_<Tiles> kept;
    if constexpr (Tiles::OVERLAP) {
        attention_keep_<W>(kept.k, k_tile, ROWS, warp_row);
        attention_keep_<W>(kept.v, v_tile, ROWS, warp_row);
    }
    kept.k_address = ptx_shared_address(k_tile + group * 64 * 128);
    kept.v_address = ptx_shared_address(v_tile + group * 64 * 128);
    float dk[1][W / 8][4] = {}, dv[1][W / 8][4] = {};
    attention_key_grads_all_<X, Tiles, MASK>(dk, dv, pipe, kept, work, row0, to.starts, size);
    const float scale = size.scale.scale, scales[1][2] = {{scale, scale}};
    attention_rescale(dk, scales);
    const size_t stride = attention_key_stride<MASK>(size);
    X* dk_to = (attention_is_general(MASK) ? to.dkv : to.dqkv + size.Q) +
               ((size_t)work.b * last + row0) * stride + column;
    barrier_of<128>(2 + group);
    attention_write<X, W>(dk_to, stride, last - row0, size.HS, k_tile, ROWS, warp_row, dk);
    attention_write<X, W>(dk_to + size.K, stride, last - row0, size.HS, v_tile, ROWS, warp_row, dv);
    if (attention_has_sums_<MASK>(to.sums)) {
        barrier_of<128 * Tiles::GROUPS>(1);
        float* sums = to.sums + ((size_t)work.b * size.tiles + work.u0 / ROWS) * stride + size.Q + column;
        attention_sum_columns_<X, Tiles>(sums, k_tile, size.HS);
        attention_sum_columns_<X, Tiles>(sums + size.K, v_tile, size.HS);
    }
}

// A block computes dk and dv of tiles of ROWS keys of one key head, as many as it finds. The first
// keys go first, because the most queries see them. Also sets its part of `sums`.
// grid   as many blocks as fit on the GPU      block   384      shared   2 (k, v), STAGES (q, dout)
// moves  B*T*(QKV + Q) in, B*T*2K out, 2 * B*NH*T fp32 in, 2 K fp32 out per tile of rows.
//        Tiles of a head are read again from L2. Bound by tensor cores.
// order  fixed: the heads that read the keys in order, and the queries of each
// needs  HS <= W, a multiple of 8; aligned addresses
// Spills up to 8 bytes at W = 128, with documents or in general, in the warp that fills: with more
// registers for it, the others would have too few to compute, and ptxas would serialize their
// matmuls.
template <class X, class Tiles, AttentionMask MASK>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_key_grads_wgmma_kernel(const __grid_constant__ CUtensorMap q_map,
                                     const __grid_constant__ CUtensorMap d_map,
                                     const __grid_constant__ CUtensorMap kv_map, X* dqkv, X* dkv, float* sums,
                                     const float2* rows, const int* starts, unsigned* taken, unsigned tiles,
                                     AttentionSize size, int Tp) {
    SMEM_DYNAMIC(unsigned char, memory);
    attention_block<Tiles>(
        memory,
        [&](AttentionPipe& pipe) {
            attention_fill_all_keys_<Tiles, MASK>(pipe, &q_map, &d_map, &kv_map, rows, starts, taken, tiles,
                                                  size, Tp);
        },
        [&](AttentionPipe& pipe, int n, int tile) {
            const AttentionGrads_<X> to = {dqkv, dkv, NULL, sums, NULL, NULL, starts, Tp};
            const AttentionKeysWork_ work = attention_keys_work_<Tiles, MASK>(tile, starts, size);
            attention_key_grads_work_<X, Tiles, MASK>(to, pipe, n, work, size);
        });
}

// ---- launchers ----

// Launches both kernels; returns the number of tiles of a sequence.
template <class Queries, class Keys, AttentionMask MASK, class X>
static inline int attention_backward_wgmma_(const AttentionGradientsGpu<X>* d,
                                            const AttentionPassGpu<X>* pass, const AttentionFlash* scratch,
                                            AttentionSize size, const Gpu* gpu) {
    static_assert(Queries::ROWS == Keys::ROWS && ATTENTION_ROW_ALIGN % Queries::ROWS == 0,
                  "room for rows and sums");
    const AttentionSizes sizes = pass->sizes;
    const int Tp = attention_padded(size.T), QKV = attention_qkv_size(sizes), HS = sizes.HS, T = sizes.T,
              heads = sizes.NH + 2 * sizes.KV, B = sizes.B, last = attention_keys(sizes);
    const auto qkv_map = [=](int box) { return attention_map(pass->qkv, heads, HS, T, (size_t)QKV, B, box); };
    const auto out_map = [=](int box) {
        return attention_map(d->dout, sizes.NH, HS, T, (size_t)size.Q, B, box);
    };
    const auto kv_map = [=](int box) {
        return attention_is_general(MASK) ? attention_general_map(pass, size, box) : qkv_map(box);
    };
    X* keys_to = pass->kv ? d->dkv : d->dqkv + size.Q;
    float* sums = pass->kv ? NULL : scratch->sums;
    const unsigned most = (unsigned)gpu->multiprocessors,
                   queries = attention_grid(&size, T, (size_t)B * sizes.NH, Queries::ROWS);
    launch(attention_query_grad_wgmma_kernel<X, Queries, MASK>, queries < most ? queries : most,
           Queries::THREADS, Queries::BYTES, gpu, qkv_map(Queries::ROWS), out_map(Queries::ROWS),
           kv_map(Queries::COLS), d->dqkv, scratch->rows, sums, (const X*)pass->out, (const float*)pass->lse,
           pass->starts, scratch->taken, queries, size, Tp);
    const unsigned keys = attention_grid(&size, last, (size_t)B * sizes.KV, Keys::ROWS);
    launch(attention_key_grads_wgmma_kernel<X, Keys, MASK>, keys < most ? keys : most, Keys::THREADS,
           Keys::BYTES, gpu, qkv_map(Keys::COLS), out_map(Keys::COLS), kv_map(Keys::ROWS), d->dqkv, keys_to,
           sums, (const float2*)scratch->rows, pass->starts, scratch->taken, keys, size, Tp);
    return size.tiles;
}

// Computes the backward pass with a certain tiling, or the one for these sizes.
template <class X>
static inline int attention_wgmma_backward(const AttentionGradientsGpu<X>* d, const AttentionPassGpu<X>* pass,
                                           const AttentionFlash* scratch, AttentionSize size,
                                           const Gpu* gpu) {
#define ATTENTION_PASS_(Keys, MASK)                                                                          \
    (size.HS > 64        ? attention_backward_wgmma_<AttentionQueries128, Keys, MASK, X>                     \
     : scratch->way == 2 ? attention_backward_wgmma_<AttentionQueries64, AttentionKeys64Apart, MASK, X>      \
                         : attention_backward_wgmma_<AttentionQueries64, AttentionKeys64, MASK, X>)
    const auto backward =
        pass->sizes.cap > 0
            ? (size.HS > 64
                   ? attention_backward_wgmma_<AttentionQueries128, AttentionKeys128Masked, ATTENTION_CAPPED,
                                               X>
                   : attention_backward_wgmma_<AttentionQueries64, AttentionKeys64Apart, ATTENTION_CAPPED, X>)
        : pass->kv     ? ATTENTION_PASS_(AttentionKeys128Masked, ATTENTION_GENERAL)
        : pass->starts ? ATTENTION_PASS_(AttentionKeys128Masked, ATTENTION_DOCUMENTS)
                       : ATTENTION_PASS_(AttentionKeys128, ATTENTION_CAUSAL);
#undef ATTENTION_PASS_
    return backward(d, pass, scratch, size, gpu);
}

#endif

#endif
