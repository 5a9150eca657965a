/*
attention_wgmma.cuh -- the forward pass of attention.cuh by wgmma and TMA: for bf16 and fp16 on GPUs
of compute capability 9.0. It sums in another order than attention_mma.cuh.

A block takes tiles of queries, one after the other. Its last warpgroup fills them, and the tiles of
keys and values that they see, through TMA, and runs ahead; the others own 64 queries each. While a
warpgroup computes the softmax of a tile of keys, its tensor cores add up the values of the tile
before (OVERLAP), or another block of the multiprocessor has them.

Heads are W = 64, 128 or 256 elements wide in shared memory: narrower ones end in zeros, which TMA
writes past their ends. Rows past the last token are also zeros.

The bits depend on the keys of a tile, not on its queries, nor on which block computes it.
*/
#ifndef LLMC_ATTENTION_WGMMA_CUH
#define LLMC_ATTENTION_WGMMA_CUH

#include "llmc/gpu/ptx.cuh"
#include "llmc/gpu/wgmma.cuh"
#include "llmc/ops/attention_tiles.cuh"

// Tiles of a kernel. A block owns ROWS rows of one or two tensors, and streams tiles of COLS rows
// of two others. Registers are chosen with ptxas -v (CUDA 13): no spills.
//     OWNED    tensors, of W columns         GROUPS   warpgroups of 64 rows
//     STAGES   tiles of each stream          BLOCKS   on a multiprocessor
//     FEWER    registers of threads that fill, MORE of those that compute
//     OVERLAP  matmuls of two tiles of the stream run at a time
//     EXTRA    extra bytes in each stage     OWNS     stages of tiles that it owns, 1 or 2
template <int W_, int OWNED_, int COLS_, int GROUPS_, int STAGES_, int BLOCKS_, int FEWER_, int MORE_,
          int OVERLAP_, int EXTRA_, int OWNS_ = 2>
struct AttentionTiles {
    static constexpr int W = W_, OWNED = OWNED_, COLS = COLS_, GROUPS = GROUPS_, STAGES = STAGES_,
                         BLOCKS = BLOCKS_, FEWER = FEWER_, MORE = MORE_, OVERLAP = OVERLAP_, EXTRA = EXTRA_,
                         OWNS = OWNS_;
    static constexpr int ROWS = 64 * GROUPS, THREADS = 128 * (GROUPS + 1), OWN_BYTES = ROWS * W * 2,
                         COLS_BYTES = COLS * W * 2, BARRIERS = 4 + 4 * STAGES;
    static constexpr int STREAM_AT = OWNS * OWNED * OWN_BYTES, EXTRA_AT = STREAM_AT + 2 * STAGES * COLS_BYTES,
                         BARRIERS_AT = EXTRA_AT + STAGES * EXTRA,
                         BYTES = 1024 + BARRIERS_AT + 8 * BARRIERS + 8;
    static_assert(BYTES <= 227 << 10 && BLOCKS * (BYTES + 1024) <= 228 << 10, "blocks fit");
    static constexpr int LAUNCHED =
        (64 << 10) / (THREADS * BLOCKS) / 8 * 8; // registers of each thread at first
    static_assert(FEWER + GROUPS * MORE <= (GROUPS + 1) * LAUNCHED, "registers fit");
};
template <int W, int KEYS, int GROUPS, int STAGES, int BLOCKS, int FEWER, int MORE, int OVERLAP>
using AttentionForwardTiles_ = AttentionTiles<W, 1, KEYS, GROUPS, STAGES, BLOCKS, FEWER, MORE, OVERLAP, 0>;
typedef AttentionForwardTiles_<64, 64, 2, 3, 2, 32, 104, 0> AttentionForward64;
typedef AttentionForwardTiles_<64, 128, 2, 2, 1, 40, 232, 1> AttentionForward64Long;
typedef AttentionForwardTiles_<64, 128, 3, 2, 1, 32, 160, 1> AttentionForward64Longer;
typedef AttentionForwardTiles_<64, 64, 3, 3, 1, 24, 152, 1> AttentionForward64Three;
typedef AttentionForwardTiles_<128, 128, 2, 2, 1, 40, 232, 1> AttentionForward128;
typedef AttentionForwardTiles_<128, 128, 2, 2, 1, 40, 232, 0> AttentionForward128Apart;
typedef AttentionTiles<256, 1, 64, 2, 2, 1, 40, 232, 1, 0, 1> AttentionForward256;

enum { ATTENTION_LONG = 2048 }; // keys from which larger tiles are used

// Returns the widest heads of a pass. Both gradients of keys of 256 columns would take all
// registers of a warpgroup, so attention_mma.cuh has the backward pass of wide heads.
static inline int attention_wgmma_widest(int is_backward) { return is_backward ? 128 : 256; }

// Returns the number of tilings of a pass. With a cap there is one for each width.
static inline int attention_wgmma_tilings(AttentionSizes sizes, int is_backward) {
    const int of_64 = is_backward ? 2 : 3, of_128 = is_backward ? 1 : 2;
    if (sizes.HS > attention_wgmma_widest(is_backward)) {
        return 0;
    }
    return sizes.cap > 0 || sizes.HS > 128 ? 1 : sizes.HS > 64 ? of_128 : of_64;
}

// Returns the tiling for these sizes, which is used unless another one won a race.
static inline int attention_wgmma_tiling(AttentionSizes sizes, int is_backward) {
    return !is_backward && sizes.cap == 0 && sizes.HS <= 64 && attention_keys(sizes) >= ATTENTION_LONG;
}

#if PTX_HAS_WGMMA

// Returns the map of `heads` heads of B sequences of T rows, `row` elements each; TMA copies 64
// columns of one head from `box` rows.
template <class X>
static inline CUtensorMap attention_map(const X* data, int heads, int HS, int T, size_t row, int B, int box) {
    const size_t sizes[] = {(size_t)HS, (size_t)heads, (size_t)T, (size_t)B},
                 distances[] = {(size_t)HS, row, (size_t)T * row};
    return tensor_map_of(data, 4, sizes, distances, 2, box);
}

// Returns the map of keys and values for general kernels.
template <class X>
static inline CUtensorMap attention_general_map(const AttentionPassGpu<X>* pass, const AttentionSize& size,
                                                int box) {
    const AttentionSizes sizes = pass->sizes;
    return attention_map(attention_general_keys(pass), 2 * sizes.KV, sizes.HS, attention_keys(sizes),
                         (size_t)size.key_row, sizes.B, box);
}

// ---- shared memory of a block ----

// Barriers of a stage: `full` counts bytes, `empty` the warps that have read it.
struct AttentionStage {
    uint64_t *full, *empty;
};

// Shared memory of a block, from a multiple of 1024 bytes on: OWNS stages of the tiles that it
// owns, STAGES of the two streams, `extra` bytes of each, barriers, and the numbers of own tiles.
// `passed` counts the stages of streams that the thread has passed.
struct AttentionPipe {
    unsigned char* base;
    int passed;
};

// Return the barriers of own tiles number n, and of number n of a stream, 0 or 1. Of each
// kind come all `full` before all `empty`.
template <class Tiles> __device__ inline uint64_t* attention_barriers_(const AttentionPipe& pipe) {
    return reinterpret_cast<uint64_t*>(pipe.base + Tiles::BARRIERS_AT);
}
template <class Tiles>
__device__ inline AttentionStage attention_own_stage(const AttentionPipe& pipe, int n) {
    uint64_t* first = attention_barriers_<Tiles>(pipe) + n % Tiles::OWNS;
    return {first, first + 2};
}
template <class Tiles>
__device__ inline AttentionStage attention_stage_of(const AttentionPipe& pipe, int n, int stream) {
    uint64_t* first = attention_barriers_<Tiles>(pipe) + 4 + stream * 2 * Tiles::STAGES + n % Tiles::STAGES;
    return {first, first + Tiles::STAGES};
}

// Return the parity of `full` that ends when they have come.
template <class Tiles> __device__ inline int attention_own_parity_(int n) { return n / Tiles::OWNS % 2; }
template <class Tiles> __device__ inline int attention_parity(int n) { return n / Tiles::STAGES % 2; }

// Return the places of tiles, of extra bytes, and of the number of own tiles.
template <class Tiles>
__device__ inline unsigned char* attention_own(const AttentionPipe& pipe, int n, int tensor) {
    return pipe.base + (n % Tiles::OWNS * Tiles::OWNED + tensor) * Tiles::OWN_BYTES;
}
template <class Tiles>
__device__ inline unsigned char* attention_streamed(const AttentionPipe& pipe, int n, int stream) {
    return pipe.base + Tiles::STREAM_AT + (n % Tiles::STAGES * 2 + stream) * Tiles::COLS_BYTES;
}
template <class Tiles> __device__ inline unsigned char* attention_extra(const AttentionPipe& pipe, int n) {
    return pipe.base + Tiles::EXTRA_AT + n % Tiles::STAGES * Tiles::EXTRA;
}
template <class Tiles> __device__ inline int* attention_tile(const AttentionPipe& pipe, int n) {
    return reinterpret_cast<int*>(attention_barriers_<Tiles>(pipe) + Tiles::BARRIERS) + n % Tiles::OWNS;
}

// Sets up the pipe; the whole block calls it.
template <class Tiles> __device__ inline AttentionPipe attention_pipe(unsigned char* memory) {
    const AttentionPipe pipe = {memory + (1024 - ptx_shared_address(memory) % 1024) % 1024, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tiles::BARRIERS; i++) {
            const int is_full = i < 4 ? i < 2 : (i - 4) / Tiles::STAGES % 2 == 0;
            mbarrier_init(attention_barriers_<Tiles>(pipe) + i, is_full ? 1 : 4 * Tiles::GROUPS);
        }
        mbarrier_publish();
    }
    __syncthreads();
    return pipe;
}

// Returns x of lane 0, which all lanes have: so ptxas knows, and lets matmuls overlap in branches
// and loops that depend on it.
__device__ inline int attention_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Waits for own tiles number n; returns their number, or -1.
template <class Tiles> __device__ inline int attention_next(const AttentionPipe& pipe, int n) {
    mbarrier_wait(attention_own_stage<Tiles>(pipe, n).full, attention_own_parity_<Tiles>(n));
    return attention_uniform(*attention_tile<Tiles>(pipe, n));
}

// One tile of queries: rows t0 ... of head h of sequence b, at positions `shift` later; they see
// keys from `from` on, `steps` tiles of them. The last queries of a head go first, because they see
// the most keys.
struct AttentionWork {
    int b, h, t0, shift, from, steps;
};

template <class Tiles, AttentionMask MASK>
__device__ inline AttentionWork attention_work(int tile, const int* starts, const AttentionSize& size) {
    const int head = tile / size.tiles;
    AttentionWork work;
    work.b = head / size.NH;
    work.h = head % size.NH;
    work.t0 = (size.tiles - 1 - tile % size.tiles) * Tiles::ROWS;
    work.shift = attention_shift<MASK>(work.t0, size);
    const int first =
        MASK == ATTENTION_CAUSAL
            ? 0
            : attention_start_of<MASK>(starts, work.b * attention_last<MASK>(size) + work.t0 + work.shift);
    work.from = attention_uniform(first) / Tiles::COLS * Tiles::COLS;
    work.steps = ceil_div(min(work.t0 + Tiles::ROWS, size.T) + work.shift - work.from, Tiles::COLS);
    return work;
}

// ---- filling ----

// Starts to copy rows of a head, W columns, to panels of `rows` rows.
template <int W>
__device__ inline void attention_fill_(unsigned char* to, const CUtensorMap* map, int rows, int head, int row,
                                       int b, uint64_t* full) {
#pragma unroll
    for (int x = 0; x < W; x += WGMMA_PANEL) {
        tma_load_4d(to + x * rows * 2, map, x, head, row, b, full);
    }
}

// Takes the next tile, and waits until there is room for it. Returns its number; or -1, which it
// tells the others. The warp that fills calls it.
template <class Tiles>
__device__ inline int attention_take(const AttentionPipe& pipe, int n, unsigned* taken, unsigned tiles) {
    int tile = -1;
    if (threadIdx.x % 32 == 0) {
        const AttentionStage own = attention_own_stage<Tiles>(pipe, n);
        tile = tile_take(taken, tiles);
        mbarrier_wait(own.empty, 1 - attention_own_parity_<Tiles>(n));
        *attention_tile<Tiles>(pipe, n) = tile;
        if (tile < 0) {
            mbarrier_arrive(own.full);
        }
    }
    return attention_uniform(tile);
}

// Fills own tiles number n with rows of a head of one tensor, or of two.
template <class Tiles>
__device__ inline void attention_fill_own(const AttentionPipe& pipe, int n, const CUtensorMap* first,
                                          int first_head, const CUtensorMap* second, int second_head, int row,
                                          int b) {
    if (threadIdx.x % 32 == 0) {
        uint64_t* full = attention_own_stage<Tiles>(pipe, n).full;
        mbarrier_arrive_expect(full, Tiles::OWNED * Tiles::OWN_BYTES);
        attention_fill_<Tiles::W>(attention_own<Tiles>(pipe, n, 0), first, Tiles::ROWS, first_head, row, b,
                                  full);
        if (Tiles::OWNED > 1) {
            attention_fill_<Tiles::W>(attention_own<Tiles>(pipe, n, 1), second, Tiles::ROWS, second_head, row,
                                      b, full);
        }
    }
}

// Fills the next stage of a stream, and its extra bytes, if there are any, with `rows` from `at`
// on.
template <class Tiles, int EXTRA>
__device__ inline void attention_fill_stream(const AttentionPipe& pipe, int stream, const CUtensorMap* map,
                                             int head, int row, int b, const float2* rows, int at) {
    if (threadIdx.x % 32 == 0) {
        const AttentionStage stage = attention_stage_of<Tiles>(pipe, pipe.passed, stream);
        mbarrier_wait(stage.empty, 1 - attention_parity<Tiles>(pipe.passed));
        mbarrier_arrive_expect(stage.full, Tiles::COLS_BYTES + EXTRA);
        attention_fill_<Tiles::W>(attention_streamed<Tiles>(pipe, pipe.passed, stream), map, Tiles::COLS,
                                  head, row, b, stage.full);
        if (EXTRA) {
            bulk_load(attention_extra<Tiles>(pipe, pipe.passed), rows + at, EXTRA, stage.full);
        }
    }
}

// Fills all tiles for a block that owns queries and streams keys and values; one warp calls it.
// With two own tensors, out_map maps dout.
template <class Tiles, AttentionMask MASK>
__device__ inline void attention_fill_all(AttentionPipe& pipe, const CUtensorMap* q_map,
                                          const CUtensorMap* out_map, const CUtensorMap* kv_map,
                                          const int* starts, unsigned* taken, unsigned tiles,
                                          const AttentionSize& size) {
    const int keys_head = attention_is_general(MASK) ? 0 : size.NH, group = size.NH / size.KV;
    int tile;
    for (int n = 0; (tile = attention_take<Tiles>(pipe, n, taken, tiles)) >= 0; n++) {
        const AttentionWork work = attention_work<Tiles, MASK>(tile, starts, size);
        const int head = keys_head + work.h / group;
        attention_fill_own<Tiles>(pipe, n, q_map, work.h, out_map, work.h, work.t0, work.b);
#pragma unroll 1 // few registers
        for (int i = 0; i < work.steps; i++) {
            const int row = work.from + i * Tiles::COLS;
            attention_fill_stream<Tiles, 0>(pipe, 0, kv_map, head, row, work.b, NULL, 0);
            attention_fill_stream<Tiles, 0>(pipe, 1, kv_map, head + size.KV, row, work.b, NULL, 0);
            pipe.passed++;
        }
    }
    __syncwarp();
}

// ---- computing ----

// Tells the block that this warp has read a stage.
__device__ inline void attention_release(const AttentionStage& stage) {
    __syncwarp(); // one lane arrives for all, after their reads
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(stage.empty);
    }
}

// Starts s = left right^T of 64 rows of the left tile, whose panels are left_rows apart, and all
// rows of the right one.
template <class X, int W, int N>
__device__ inline void attention_dot_start(float (&s)[N][4], unsigned left, int left_rows, unsigned right) {
    const uint64_t a = wgmma_descriptor(left, 0), b = wgmma_descriptor(right, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < W / 16; k++) {
        const int panel = k / 4, step = k % 4 * (int)wgmma_step(0);
        wgmma<X, 0, 0>(s, a + panel * (left_rows * 128 >> 4) + step, b + panel * (8 * N * 128 >> 4) + step,
                       k > 0);
    }
}

// Starts acc += p right, with p (64, 16 K) in registers and K16 groups of 16 rows on the right.
template <class X, int K16, int D>
__device__ inline void attention_mix_start(float (&acc)[D][4], const unsigned (&p)[K16][4], unsigned right) {
    const uint64_t b = wgmma_descriptor(right, 16 * K16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K16; k++) {
        wgmma_of_registers<X, 1>(acc, p[k], b + k * wgmma_step(1), 1);
    }
}

// Rounds results of one matmul to the left operand of the next one.
template <class X, int N>
__device__ inline void attention_round(unsigned (&p)[N / 2][4], const float (&s)[N][4]) {
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        const float* two = &s[i / 4 * 2 + i % 4 / 2][i % 2 * 2];
        p[i / 4][i % 4] = attention_pair<X>(two[0], two[1]);
    }
}

// Sets scores with keys of earlier documents to -infinity: the thread's two rows see keys from
// first[0] and first[1] on.
template <int N>
__device__ inline void attention_mask_before_(float (&s)[1][N][4], const int (&first)[2], int u0) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        if (u0 + 8 * (i / 4) + 2 * ((int)threadIdx.x % 4) + i % 2 < first[i % 4 / 2]) {
            s[0][i / 4][i % 4] = -INFINITY;
        }
    }
}

// A warp's 16 queries, from row0 on.
struct AttentionRows {
    int row0, shift;
    int first[2], latest; // first key that the thread's two rows see, and that the last row sees
};

template <AttentionMask MASK>
__device__ inline AttentionRows attention_rows_of(int row0, const AttentionWork& work, const int* starts,
                                                  const AttentionSize& size) {
    AttentionRows rows = {row0, work.shift, {0, 0}, 0};
    if (MASK != ATTENTION_CAUSAL) {
        const int last = attention_last<MASK>(size);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = min(row0 + work.shift + 8 * half + (int)threadIdx.x % 32 / 4, last - 1);
            rows.first[half] = attention_start_of<MASK>(starts, work.b * last + t);
        }
        rows.latest = __shfl_sync(0xffffffffu, rows.first[1], 31);
    }
    return rows;
}

template <AttentionMask MASK, int N>
__device__ inline void attention_mask(float (&s)[1][N][4], const AttentionRows& rows, int u0) {
    if (u0 + 8 * N - 1 > rows.row0 + rows.shift) {
        attention_mask_later(s, rows.row0 + rows.shift, u0);
    }
    if (MASK != ATTENTION_CAUSAL && rows.latest > u0) {
        attention_mask_before_(s, rows.first, u0);
    }
}

// Returns the first and last + 1 of the tiles of keys that some query of the warpgroup sees.
template <class Tiles, AttentionMask MASK>
__device__ inline int2 attention_seen_tiles(const AttentionWork& work, const int* starts, int group,
                                            const AttentionSize& size) {
    const int t = work.t0 + 64 * group, last = attention_last<MASK>(size);
    if (t >= size.T) {
        return make_int2(0, 0);
    }
    const int first =
        MASK == ATTENTION_CAUSAL ? 0 : attention_start_of<MASK>(starts, work.b * last + t + work.shift);
    const int end = min(t + 64, size.T) + work.shift - work.from;
    return make_int2(attention_uniform((first - work.from) / Tiles::COLS), ceil_div(end, Tiles::COLS));
}

// Passes stages that no query of the warpgroup sees.
template <class Tiles> __device__ inline void attention_pass(AttentionPipe& pipe, int count) {
    for (; count > 0; count--) {
#pragma unroll
        for (int stream = 0; stream < 2; stream++) {
            const AttentionStage stage = attention_stage_of<Tiles>(pipe, pipe.passed, stream);
            mbarrier_wait(stage.full, attention_parity<Tiles>(pipe.passed));
            __syncwarp(); // a lane that came later would wait for the next round
            attention_release(stage);
        }
        pipe.passed++;
    }
}

// Waits for the values of a stage, and starts to add them up.
template <class X, class Tiles>
__device__ inline void attention_values_start_(float (&acc)[1][Tiles::W / 8][4],
                                               const unsigned (&p)[Tiles::COLS / 16][4],
                                               const AttentionPipe& pipe, int at) {
    mbarrier_wait(attention_stage_of<Tiles>(pipe, at, 1).full, attention_parity<Tiles>(at));
    attention_mix_start<X>(acc[0], p, ptx_shared_address(attention_streamed<Tiles>(pipe, at, 1)));
    wgmma_commit();
}

// Adds them up, and waits.
template <class X, class Tiles>
__device__ inline void attention_values_add_(float (&acc)[1][Tiles::W / 8][4],
                                             const unsigned (&p)[Tiles::COLS / 16][4],
                                             const AttentionPipe& pipe, int at) {
    attention_values_start_<X, Tiles>(acc, p, pipe, at);
    wgmma_wait<0>();
    wgmma_settle(acc[0]);
    attention_release(attention_stage_of<Tiles>(pipe, at, 1));
}

// Attends from the warpgroup's queries, at shared address `queries`, to `count` tiles of keys, from
// u0 on, at least one.
template <class X, class Tiles, AttentionMask MASK>
__device__ inline void attention_attend_(float (&acc)[1][Tiles::W / 8][4], AttentionSoftmax<1>& softmax,
                                         AttentionPipe& pipe, unsigned queries, const AttentionRows& rows,
                                         int u0, int count, const AttentionSize& size) {
    const float scale = attention_exponent<MASK>(size);
    unsigned p[Tiles::COLS / 16][4];
    for (int i = 0; i < count; i++) {
        const int at = pipe.passed++, is_behind = Tiles::OVERLAP && i > 0;
        const AttentionStage stage = attention_stage_of<Tiles>(pipe, at, 0);
        float s[1][Tiles::COLS / 8][4], largest[1][2], factor[1][2];
        mbarrier_wait(stage.full, attention_parity<Tiles>(at));
        attention_dot_start<X, Tiles::W>(s[0], queries, Tiles::ROWS,
                                         ptx_shared_address(attention_streamed<Tiles>(pipe, at, 0)));
        wgmma_commit();
        if (is_behind) {
            attention_values_start_<X, Tiles>(acc, p, pipe, at - 1);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        wgmma_settle(s[0]);
        attention_release(stage);
        attention_cap<MASK>(s, size);
        attention_mask<MASK>(s, rows, u0 + i * Tiles::COLS);
        const bool grew = attention_largest(largest, s, softmax, scale);
        if (grew) {
            attention_raise(factor, softmax, largest);
        }
        attention_probabilities(s, softmax, scale);
        if (Tiles::OVERLAP) { // also in the first tile: ptxas looks at each branch alone
            wgmma_wait<0>();
            wgmma_settle(acc[0]);
        }
        if (is_behind) {
            attention_release(attention_stage_of<Tiles>(pipe, at - 1, 1));
        }
        if (grew) {
            attention_rescale(acc, factor);
        }
        attention_round<X>(p, s[0]);
        if (!Tiles::OVERLAP) {
            attention_values_add_<X, Tiles>(acc, p, pipe, at);
        }
    }
    if (Tiles::OVERLAP) {
        attention_values_add_<X, Tiles>(acc, p, pipe, pipe.passed - 1);
    }
}

// Returns the place of 16 bytes, number `chunk` of a row of W elements, in panels of `rows` rows.
__device__ inline unsigned char* attention_chunk(unsigned char* tile, int rows, int row, int chunk) {
    return tile + chunk / 8 * rows * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

// Writes a warp's first `count` rows through its rows `row` ... of a tile in shared memory, which
// the warpgroup's matmuls have read, and no thread needs any more.
template <class X, int W>
__device__ inline void attention_write(X* to, size_t stride, int count, int HS, unsigned char* tile, int rows,
                                       int row, const float (&acc)[1][W / 8][4]) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < W / 4; i++) {
        const int r = row + i % 2 * 8 + lane / 4;
        store_for_async(reinterpret_cast<unsigned*>(attention_chunk(tile, rows, r, i / 2) + lane % 4 * 4),
                        attention_pair<X>(acc[0][i / 2][i % 2 * 2], acc[0][i / 2][i % 2 * 2 + 1]));
    }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * (W / 8); i += 32) {
        const int r = i / (W / 8), chunk = i % (W / 8);
        if (r < count && 8 * chunk < HS) {
            store_pack(to + r * stride + 8 * chunk,
                       load_pack(reinterpret_cast<const X*>(attention_chunk(tile, rows, row + r, chunk))));
        }
    }
}

template <class X, class Tiles, AttentionMask MASK>
__device__ inline void attention_forward_work_(X* out, float* lse, AttentionPipe& pipe, int n,
                                               const AttentionWork& work, const int* starts,
                                               const AttentionSize& size) {
    const int warp = attention_uniform((int)threadIdx.x / 32), group = warp / 4, mine = 16 * warp,
              row0 = work.t0 + mine;
    unsigned char* tile = attention_own<Tiles>(pipe, n, 0);
    const int2 seen = attention_seen_tiles<Tiles, MASK>(work, starts, group, size);
    attention_pass<Tiles>(pipe, seen.x);
    if (seen.x < seen.y) {
        const AttentionRows rows = attention_rows_of<MASK>(row0, work, starts, size);
        float acc[1][Tiles::W / 8][4] = {};
        AttentionSoftmax<1> softmax;
        attention_softmax_open(softmax);
        attention_attend_<X, Tiles, MASK>(acc, softmax, pipe, ptx_shared_address(tile + group * 64 * 128),
                                          rows, work.from + seen.x * Tiles::COLS, seen.y - seen.x, size);
        const size_t row = (size_t)work.b * size.T;
        attention_finish(acc, lse + ((size_t)work.b * size.NH + work.h) * size.T, softmax, row0, size.T);
        barrier_of<128>(1 + group);
        attention_write<X, Tiles::W>(out + (row + row0) * size.Q + work.h * size.HS, (size_t)size.Q,
                                     size.T - row0, size.HS, tile, Tiles::ROWS, mine, acc);
    }
    attention_pass<Tiles>(pipe, work.steps - seen.y);
}

// ---- the kernel ----

// Runs a block: a warp of the last warpgroup calls fill(pipe), and the others call work(pipe, n,
// tile) for own tiles number n, and are done with them.
template <class Tiles, class Fill, class Work>
__device__ inline void attention_block(unsigned char* memory, Fill fill, Work work) {
    AttentionPipe pipe = attention_pipe<Tiles>(memory);
    if (threadIdx.x >= 128 * Tiles::GROUPS) {
        registers_fewer<Tiles::FEWER>();
        if (threadIdx.x < 128 * Tiles::GROUPS + 32) {
            fill(pipe);
        }
    } else {
        registers_more<Tiles::MORE>();
        int tile;
        for (int n = 0; (tile = attention_next<Tiles>(pipe, n)) >= 0; n++) {
            work(pipe, n, tile);
            fence_async();
            __syncwarp();
            attention_release(attention_own_stage<Tiles>(pipe, n));
        }
    }
}

// A block computes tiles of ROWS queries of one head, as many as it finds.
// grid   as many blocks as fit on the GPU      block   128 (GROUPS + 1)
// shared OWNS q, STAGES (k, v)
// moves  B*T*QKV in, B*T*Q out, B*NH*T fp32 out. Tiles of a head are read again from L2.
//        Bound equally by tensor cores and exponentials.
// order  fixed
// needs  HS <= W, a multiple of 8; aligned addresses
template <class X, class Tiles, AttentionMask MASK>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_forward_wgmma_kernel(const __grid_constant__ CUtensorMap q_map,
                                   const __grid_constant__ CUtensorMap kv_map, X* out, float* lse,
                                   const int* starts, unsigned* taken, unsigned tiles, AttentionSize size) {
    SMEM_DYNAMIC(unsigned char, memory);
    attention_block<Tiles>(
        memory,
        [&](AttentionPipe& pipe) {
            attention_fill_all<Tiles, MASK>(pipe, &q_map, &q_map, &kv_map, starts, taken, tiles, size);
        },
        [&](AttentionPipe& pipe, int n, int tile) {
            const AttentionWork work = attention_work<Tiles, MASK>(tile, starts, size);
            attention_forward_work_<X, Tiles, MASK>(out, lse, pipe, n, work, starts, size);
        });
}

// ---- launchers ----

template <class Tiles, AttentionMask MASK, class X>
static inline void attention_forward_wgmma(const AttentionPassGpu<X>* pass, const AttentionFlash* scratch,
                                           AttentionSize size, const Gpu* gpu) {
    const AttentionSizes sizes = pass->sizes;
    const unsigned tiles = attention_grid(&size, size.T, (size_t)sizes.B * sizes.NH, Tiles::ROWS),
                   most = (unsigned)(gpu->multiprocessors * Tiles::BLOCKS);
    const int QKV = attention_qkv_size(sizes), HS = sizes.HS, heads = sizes.NH + 2 * sizes.KV, B = sizes.B;
    const CUtensorMap q_map = attention_map(pass->qkv, heads, HS, sizes.T, QKV, B, Tiles::ROWS),
                      kv_map = attention_is_general(MASK)
                                   ? attention_general_map(pass, size, Tiles::COLS)
                                   : attention_map(pass->qkv, heads, HS, sizes.T, QKV, B, Tiles::COLS);
    launch(attention_forward_wgmma_kernel<X, Tiles, MASK>, tiles < most ? tiles : most, Tiles::THREADS,
           Tiles::BYTES, gpu, q_map, kv_map, pass->out, pass->lse, pass->starts, scratch->taken, tiles, size);
}

template <class Tiles, class X>
static inline void attention_forward_tiled_(const AttentionPassGpu<X>* pass, const AttentionFlash* scratch,
                                            AttentionSize size, const Gpu* gpu) {
    if constexpr (ATTENTION_ROW_ALIGN % Tiles::ROWS == 0) {
        if (pass->kv) {
            attention_forward_wgmma<Tiles, ATTENTION_GENERAL>(pass, scratch, size, gpu);
            return;
        }
    }
    const auto forward = pass->starts ? attention_forward_wgmma<Tiles, ATTENTION_DOCUMENTS, X>
                                      : attention_forward_wgmma<Tiles, ATTENTION_CAUSAL, X>;
    forward(pass, scratch, size, gpu);
}

// Computes the forward pass with a certain tiling, or the one for these sizes. Chunks of
// gathered keys start at multiples of 128 queries, which three warpgroups do not divide; their
// tiles of keys are the same as for the whole sequence with this tiling, and so are the bits.
template <class X>
static inline void attention_wgmma_forward(const AttentionPassGpu<X>* pass, const AttentionFlash* scratch,
                                           AttentionSize size, const Gpu* gpu) {
    const int number = scratch->way > 0 ? scratch->way - 1 : attention_wgmma_tiling(pass->sizes, 0);
    const int gathered = pass->kv != NULL;
    const bool capped = pass->sizes.cap > 0;
    const auto of_256 = capped ? attention_forward_wgmma<AttentionForward256, ATTENTION_CAPPED, X>
                               : attention_forward_wgmma<AttentionForward256, ATTENTION_GENERAL, X>;
    const auto of_128 = capped   ? attention_forward_wgmma<AttentionForward128, ATTENTION_CAPPED, X>
                        : number ? attention_forward_tiled_<AttentionForward128Apart, X>
                                 : attention_forward_tiled_<AttentionForward128, X>;
    const auto of_64 = capped        ? attention_forward_wgmma<AttentionForward64, ATTENTION_CAPPED, X>
                       : number == 1 ? (gathered ? attention_forward_tiled_<AttentionForward64Long, X>
                                                 : attention_forward_tiled_<AttentionForward64Longer, X>)
                       : number == 0 || gathered ? attention_forward_tiled_<AttentionForward64, X>
                                                 : attention_forward_tiled_<AttentionForward64Three, X>;
    const auto forward = size.HS > 128 ? of_256 : size.HS > 64 ? of_128 : of_64;
    forward(pass, scratch, size, gpu);
}

#endif

// Returns whether the kernels by wgmma compute a pass.
template <class X>
static inline int attention_by_wgmma(AttentionInstructions by, const AttentionSize& size, int is_backward) {
    return PTX_HAS_WGMMA && by == ATTENTION_BY_WGMMA && sizeof(X) == 2 && size.packs &&
           size.HS <= attention_wgmma_widest(is_backward);
}

#endif
