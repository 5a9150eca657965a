/*
attention.cuh -- causal multi-head self-attention on the GPU: flash attention, forward and backward.

X is the type of the elements: float, bf16 or fp16 (T is the length of the sequences).

attention_backward also sets or adds to, according to `mode`,

    dbias (QKV)    the sum over the tokens of dqkv, as dqkv is stored

This is the bias gradient of the linear layer that computes qkv. It is skipped if it has no data.
With gathered keys, chunks are multiples of ATTENTION_ROW_ALIGN tokens, and dbias has no data: dqkv
lacks the other ranks' part.

The kernels are those of attention_mma.cuh. With AttentionInstructions BY_WGMMA,
attention_wgmma.cuh replaces them for heads whose rows are multiples of 16 bytes, in 16 bits, on
GPUs that have wgmma. Another order of sums: other bits. With USE_CUDNN, attention_cudnn.cuh
replaces them where it can, but not for gathered keys.

Generation has its own kernel for one query per sequence, with one block per head. It reads
positions on the GPU, so a step can be one CUDA graph.
*/
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "llmc/ops/attention.h"
#include "llmc/ops/attention_mma.cuh"
#include "llmc/ops/attention_tiles.cuh"
#include "llmc/ops/attention_wgmma.cuh"
#include "llmc/ops/attention_wgmma_backward.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/gpu/gpu.cuh"

// ---- scratch ----

static inline size_t attention_sums_(AttentionSizes sizes) {
    return (size_t)sizes.B * (attention_padded(sizes.T) / ATTENTION_ROWS_LEAST) * attention_qkv_size(sizes);
}

static inline size_t attention_rows_(AttentionSizes sizes) {
    return (size_t)sizes.B * sizes.NH * attention_padded(sizes.T);
}

// Takes scratch for backward passes of up to B * NH heads with up to T tokens, and B * QKV columns;
// also for as many tokens in sequences whose length divides T, from `shortest` on. X only matters
// for cuDNN's plans.
template <class X>
static inline void attention_gpu_open(AttentionFlash* scratch, Memory* memory, AttentionSizes sizes,
                                      int shortest) {
    scratch->capacity = scratch->sums_capacity = 0;
    for (int T = shortest; T <= sizes.T; T++) {
        AttentionSizes cut = sizes;
        cut.B = sizes.B * (sizes.T / T);
        cut.T = T;
        if (sizes.T % T == 0) {
            const size_t rows = attention_rows_(cut), sums = attention_sums_(cut);
            scratch->capacity = rows > scratch->capacity ? rows : scratch->capacity;
            scratch->sums_capacity = sums > scratch->sums_capacity ? sums : scratch->sums_capacity;
        }
    }
    scratch->rows =
        (float2*)memory_take(memory, "scratch: attention", MEMORY_DEVICE, scratch->capacity * sizeof(float2));
    scratch->sums = (float*)memory_take(memory, "scratch: attention's bias gradients", MEMORY_DEVICE,
                                        scratch->sums_capacity * sizeof(float));
    scratch->taken =
        (unsigned*)memory_take(memory, "scratch: attention's tiles", MEMORY_DEVICE, sizeof(unsigned));
    scratch->by = ATTENTION_DEFAULT;
    scratch->way = 0;
}

static inline void attention_gpu_by(AttentionFlash* scratch, AttentionInstructions by) { scratch->by = by; }

// Chooses the kernels of the next passes: 0 those of `by` with the tiles for the sizes, the default
// being mma; or wgmma with its tiling number way - 1 (attention_wgmma.cuh).
static inline void attention_gpu_way(AttentionFlash* scratch, int way) { scratch->way = way; }

// Returns the instructions that the caller wants.
static inline AttentionInstructions attention_by(const AttentionFlash* scratch) { return scratch->by; }

// Returns the instructions of the next passes.
static inline AttentionInstructions attention_instructions_(const AttentionFlash* scratch) {
    return scratch->by == ATTENTION_RACED && scratch->way ? ATTENTION_BY_WGMMA : scratch->by;
}

// Returns the ways of a pass, of attention of whole sequences or of gathered keys: 1 if all would
// be the same.
template <class X>
static inline int attention_ways(const AttentionFlash* scratch, AttentionSizes sizes, int is_backward) {
    const int races = scratch->by == ATTENTION_RACED || scratch->by == ATTENTION_BY_WGMMA,
              is_possible = PTX_HAS_WGMMA && races && sizeof(X) == 2 && sizes.HS % 8 == 0 && sizes.HS <= 128;
    return is_possible ? 1 + attention_wgmma_tilings(sizes, is_backward) : 1;
}

// Closes nothing: only cuDNN has plans to close.
static inline void attention_gpu_close(AttentionFlash*) {}

// Returns scratch of the backward pass that is free between two passes: sums of 64 rows each over
// all columns of qkv, (B ceil(T / 64), QKV) floats.
static inline float* attention_sums(const AttentionFlash* scratch) { return scratch->sums; }

// Returns a note on attention for the start of a run.
static inline const char* attention_note(const AttentionFlash* scratch) {
    return scratch->by == ATTENTION_BY_WGMMA ? "by wgmma" : "";
}

// ---- launchers ----

// Runs the statement if heads of size HS are wider than `below`, and at most WIDTH: with W the
// width, or the widest that is compiled.
#define ATTENTION_CASE_(HS, below, WIDTH, ...)                                                               \
    if ((HS) > below && (HS) <= WIDTH) {                                                                     \
        constexpr int W = WIDTH < ATTENTION_WIDEST ? WIDTH : ATTENTION_WIDEST;                               \
        __VA_ARGS__;                                                                                         \
    }

// Runs the statement with W the width in shared memory of heads of size HS.
#define ATTENTION_DISPATCH_(HS, ...)                                                                         \
    do {                                                                                                     \
        CHECK((HS) <= ATTENTION_WIDEST, "attention: heads of size %d, wanted at most %d", (HS),              \
              ATTENTION_WIDEST);                                                                             \
        ATTENTION_CASE_(HS, 0, 16, __VA_ARGS__)                                                              \
        ATTENTION_CASE_(HS, 16, 32, __VA_ARGS__)                                                             \
        ATTENTION_CASE_(HS, 32, 64, __VA_ARGS__)                                                             \
        ATTENTION_CASE_(HS, 64, 80, __VA_ARGS__)                                                             \
        ATTENTION_CASE_(HS, 80, 96, __VA_ARGS__)                                                             \
        ATTENTION_CASE_(HS, 96, 128, __VA_ARGS__)                                                            \
    } while (0)

// Returns the width of the kernel with documents. Only these widths exist: each takes seconds to
// compile, and at W = 96 one would spill.
constexpr int attention_documents_width_(int W) { return W <= 32 ? 32 : W <= 64 ? 64 : 128; }

template <class X, int W, AttentionMask MASK>
static inline void attention_forward_(const AttentionPassGpu<X>* pass, AttentionSize size, const Gpu* gpu) {
    typedef AttentionTiling_<X, W> Tiling;
    const unsigned grid = attention_grid(&size, size.T, (size_t)pass->sizes.B * size.NH,
                                         16 * ATTENTION_WARPS * Tiling::FORWARD_M);
    launch(attention_forward_kernel_<X, W, MASK>, grid, ATTENTION_THREADS, Tiling::FORWARD_BYTES, gpu,
           pass->out, pass->lse, pass->qkv, pass->kv, pass->starts, size);
}

// Returns the sizes for kernels, after checks that both passes need.
template <class X> static inline AttentionSize attention_checked_(const AttentionPassGpu<X>* pass) {
    if (pass->kv) {
        attention_check_chunks(pass->sizes);
    } else {
        assert(pass->sizes.chunks.last == 0);
    }
    return attention_size(pass->sizes);
}

// Gathered keys take the widths of the kernels for whole sequences, so that the bits are the same.
template <class X>
static inline void attention_forward(const AttentionPassGpu<X>* pass, const AttentionFlash* scratch,
                                     const Gpu* gpu) {
    AttentionSize size = attention_checked_(pass);
    size.packs = attention_packs<X>(size.HS, pass->out, pass->qkv, pass->kv, NULL);
    if constexpr (PTX_HAS_WGMMA && sizeof(X) == 2) {
        if (attention_by_wgmma<X>(attention_instructions_(scratch), size)) {
            attention_wgmma_forward(pass, scratch, size, gpu);
            return;
        }
    }
    ATTENTION_DISPATCH_(size.HS, constexpr int WD = attention_documents_width_(W);
                        const auto forward = pass->kv && pass->starts
                                                 ? attention_forward_<X, WD, ATTENTION_GATHERED>
                                             : pass->kv     ? attention_forward_<X, W, ATTENTION_GATHERED>
                                             : pass->starts ? attention_forward_<X, WD, ATTENTION_DOCUMENTS>
                                                            : attention_forward_<X, W, ATTENTION_CAUSAL>;
                        forward(pass, size, gpu));
}

// Launches both kernels; returns the number of tiles of a sequence.
template <class X, int W, AttentionMask MASK>
static inline int attention_backward_(const AttentionGradientsGpu<X>* d, const AttentionPassGpu<X>* pass,
                                      AttentionFlash* scratch, AttentionSize size, const Gpu* gpu) {
    typedef AttentionTiling_<X, W> Tiling;
    constexpr int ROWS = 16 * ATTENTION_WARPS * Tiling::BACKWARD_M;
    static_assert(ROWS >= ATTENTION_ROWS_LEAST && ATTENTION_ROW_ALIGN % ROWS == 0, "room for rows and sums");
    const int Tp = attention_padded(size.T);
    const size_t B = (size_t)pass->sizes.B;
    const unsigned queries = attention_grid(&size, size.T, B * size.NH, ROWS);
    launch(attention_backward_queries_kernel_<X, W, MASK>, queries, ATTENTION_THREADS, Tiling::BACKWARD_BYTES,
           gpu, d->dqkv, scratch->rows, scratch->sums, d->dout, pass->qkv, pass->kv, (const X*)pass->out,
           (const float*)pass->lse, pass->starts, size, Tp);
    const unsigned keys = attention_grid(&size, attention_keys(pass->sizes), B * size.KV, ROWS);
    launch(attention_backward_keys_kernel_<X, W, MASK>, keys, ATTENTION_THREADS, Tiling::BACKWARD_BYTES, gpu,
           d->dqkv, d->dkv, scratch->sums, d->dout, pass->qkv, pass->kv, (const float2*)scratch->rows,
           pass->starts, size, Tp);
    return size.tiles;
}

// Launches the kernels for these sizes.
template <class X>
static inline int attention_backward_any_(const AttentionGradientsGpu<X>* d, const AttentionPassGpu<X>* pass,
                                          AttentionFlash* scratch, AttentionSize size, const Gpu* gpu) {
    if constexpr (PTX_HAS_WGMMA && sizeof(X) == 2) {
        if (attention_by_wgmma<X>(attention_instructions_(scratch), size)) {
            return attention_wgmma_backward(d, pass, scratch, size, gpu);
        }
    }
    int tiles = 0;
    ATTENTION_DISPATCH_(size.HS, constexpr int WD = attention_documents_width_(W);
                        const auto backward = pass->kv && pass->starts
                                                  ? attention_backward_<X, WD, ATTENTION_GATHERED>
                                              : pass->kv     ? attention_backward_<X, W, ATTENTION_GATHERED>
                                              : pass->starts ? attention_backward_<X, WD, ATTENTION_DOCUMENTS>
                                                             : attention_backward_<X, W, ATTENTION_CAUSAL>;
                        tiles = backward(d, pass, scratch, size, gpu));
    return tiles;
}

template <class X>
static inline void attention_backward(const AttentionGradientsGpu<X>* d, const AttentionPassGpu<X>* pass,
                                      AttentionFlash* scratch, const Gpu* gpu) {
    const int QKV = attention_qkv_size(pass->sizes);
    AttentionSize size = attention_checked_(pass);
    assert(attention_rows_(pass->sizes) <= scratch->capacity && (!pass->kv || !d->dbias.data));
    assert(pass->kv || attention_sums_(pass->sizes) <= scratch->sums_capacity);
    size.packs = attention_packs<X>(size.HS, d->dqkv, d->dout, pass->qkv, pass->out) &&
                 attention_packs<X>(size.HS, d->dkv, pass->kv, NULL, NULL);
    const int tiles = attention_backward_any_(d, pass, scratch, size, gpu);
    if (d->dbias.data) {
        column_sums_finish<X>(&d->dbias, 1,
                              ColumnPartials<float>{scratch->sums, pass->sizes.B * tiles, QKV, QKV}, d->mode,
                              gpu);
    }
}

// The only place that chooses cuDNN.
#ifdef USE_CUDNN
#include "llmc/ops/attention_cudnn.cuh"
typedef AttentionCudnn AttentionGpu;
#else
typedef AttentionFlash AttentionGpu;
#endif

// ---- generation ----

enum { ATTENTION_CACHED_THREADS = 128, ATTENTION_CACHED_WIDEST = 128 };

// Keys and values, like AttentionCache (attention.h), of type X.
template <class X> struct AttentionCacheGpu {
    X* data; // (B, 2, KV, maxT, HS)
    int maxT;
};

// A thread stores one element. Row r is token positions[r] of sequence r or, without positions,
// token r of sequence `sequence`.
// grid   ceil(rows * 2K / 256)      block   256      shared   none
// moves  rows*2K in and out. Bound by launching.
// order  fixed: no sums.
template <class X>
__global__ void attention_cache_store_kernel(AttentionCacheGpu<X> cache, const X* qkv, const int* positions,
                                             int sequence, int rows, AttentionSizes sizes) {
    const int K = attention_keys_size(sizes), HS = sizes.HS;
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int r = (int)(i / (2 * K)), c = (int)(i % (2 * K)), j = c % K / HS;
    if (r < rows) {
        X* to = cache.data + attention_cache_at_(cache.maxT, positions ? r : sequence, j, sizes) +
                (c < K ? 0 : attention_cache_values_(cache.maxT, sizes)) +
                (size_t)(positions ? positions[r] : r) * HS;
        to[c % HS] = qkv[(size_t)r * attention_qkv_size(sizes) + attention_queries_size(sizes) + c];
    }
}

// Stores rows of qkv, B T of them.
template <class X>
static inline void attention_cache_store(AttentionCacheGpu<X> cache, const X* qkv, const int* positions,
                                         int sequence, AttentionSizes sizes, const Gpu* gpu) {
    const int rows = sizes.B * sizes.T;
    const size_t elements = (size_t)rows * 2 * attention_keys_size(sizes);
    launch(attention_cache_store_kernel<X>, (unsigned)ceil_div(elements, (size_t)256), 256, 0, gpu, cache,
           qkv, positions, sequence, rows, sizes);
}

// Returns q . k over HS elements, with q in fp32.
template <class X> __device__ inline float attention_cached_dot_(const float* q, const X* k, int HS) {
    constexpr int SIZE = Pack<X>::SIZE;
    float sum = 0.0f, x[SIZE];
    if (HS % SIZE == 0) { // then each key starts at a multiple of 16 bytes, as the cache does
        for (int d = 0; d < HS; d += SIZE) {
            unpack(x, load_pack(k + d));
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                sum += q[d + i] * x[i];
            }
        }
        return sum;
    }
    for (int d = 0; d < HS; d++) {
        sum += q[d] * to_float(k[d]);
    }
    return sum;
}

// A block computes one head of row r, the query of token positions[r] of sequence r. For a tile of
// keys, one per thread, it computes the scores; then thread d adds up column d of the values.
// grid   rows * NH      block   128      shared   1 KiB
// moves  the keys and values of each sequence up to its position, for each head. Bound by
//        memory, if enough sequences fill the GPU.
// order  fixed, and the same for any number of sequences
// needs  HS <= 128
template <class X>
__global__ void attention_cached_kernel(X* out, const X* qkv, const int* positions, int window,
                                        AttentionCacheGpu<X> cache, AttentionSizes sizes) {
    SMEM_ARRAY(float, q, [ATTENTION_CACHED_WIDEST]);
    SMEM_ARRAY(float, p, [ATTENTION_CACHED_THREADS]);
    const int r = blockIdx.x / sizes.NH, h = blockIdx.x % sizes.NH, HS = sizes.HS, tid = threadIdx.x;
    const int first = attention_cached_first(positions[r], window), keys = positions[r] + 1 - first;
    const X *k = cache.data + attention_cache_at_(cache.maxT, r, h / attention_group(sizes), sizes) +
                 (size_t)first * HS,
            *v = k + attention_cache_values_(cache.maxT, sizes);
    float max = -INFINITY, sum = 0.0f, acc = 0.0f;
    if (tid < HS) {
        q[tid] = to_float(qkv[(size_t)r * attention_qkv_size(sizes) + h * HS + tid]) *
                 (ATTENTION_LOG2_E / sizes.root);
    }
    __syncthreads();
    for (int u0 = 0; u0 < keys; u0 += ATTENTION_CACHED_THREADS) {
        const int count = min(keys - u0, (int)ATTENTION_CACHED_THREADS);
        const float s = tid < count ? attention_cached_dot_(q, k + (size_t)(u0 + tid) * HS, HS) : -INFINITY;
        const float before = max;
        max = fmaxf(max, block_max(s));
        // `rescale` is 0 in the first tile, whose sums are 0.
        const float weight = exp2f(s - max), rescale = exp2f(before - max);
        p[tid] = weight;
        sum = sum * rescale + block_sum(weight); // also makes p visible
        acc *= rescale;
        for (int i = 0; i < count && tid < HS; i++) {
            acc += p[i] * to_float(v[(size_t)(u0 + i) * HS + tid]);
        }
    } // no thread writes p again before block_max has seen all threads
    if (tid < HS) {
        out[(size_t)blockIdx.x * HS + tid] = from_float<X>(acc / sum);
    }
}

template <class X>
static inline void attention_cached(X* out, const X* qkv, const int* positions, int window,
                                    AttentionCacheGpu<X> cache, AttentionSizes sizes, const Gpu* gpu) {
    CHECK(sizes.HS <= ATTENTION_CACHED_WIDEST, "attention: heads of size %d, wanted at most %d", sizes.HS,
          (int)ATTENTION_CACHED_WIDEST);
    launch(attention_cached_kernel<X>, (unsigned)(sizes.B * sizes.NH), ATTENTION_CACHED_THREADS, 0, gpu, out,
           qkv, positions, window, cache, sizes);
}

#endif
