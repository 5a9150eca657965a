/*
attention.cuh -- causal multi-head self-attention on the GPU: flash attention, forward and backward.

X is the type of the elements: float, bf16 or fp16 (T is the length of the sequences).

attention_backward also sets or adds to, according to `mode`,

    dbias (QKV)    the sum over the tokens of dqkv, as dqkv is stored

This is the bias gradient of the linear layer that computes qkv. It is skipped if it has no data.
With gathered keys, chunks are multiples of ATTENTION_ROW_ALIGN tokens, and dbias has no data: dqkv
lacks the other ranks' part.

attention_mma.cuh has the kernels. With AttentionInstructions BY_WGMMA, attention_wgmma.cuh replaces
them for heads whose rows are multiples of 16 bytes, in 16 bits, on GPUs that have wgmma; for heads
wider than 128 only in the forward pass. It sums in another order, so the bits differ. With
USE_CUDNN, attention_cudnn.cuh replaces them where it can, but neither for gathered keys nor for
capped scores.

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
// also for the same tokens in shorter sequences, whose length divides T, from `shortest` on. X only
// matters for cuDNN's plans.
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
    scratch->HS = sizes.HS;
    scratch->is_capped = sizes.cap > 0;
}

static inline void attention_gpu_by(AttentionFlash* scratch, AttentionInstructions by) { scratch->by = by; }

// Chooses the kernels of the next passes. 0: the kernels of `by` (mma by default) with the tiles
// for these sizes; else wgmma with its tiling number way - 1 (attention_wgmma.cuh).
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
              is_possible = PTX_HAS_WGMMA && races && sizeof(X) == 2 && sizes.HS % 8 == 0;
    return is_possible ? 1 + attention_wgmma_tilings(sizes, is_backward) : 1;
}

// Closes nothing: only cuDNN has plans to close.
static inline void attention_gpu_close(AttentionFlash*) {}

// Returns scratch of the backward pass that is free between two passes: sums of 64 rows each over
// all columns of qkv, (B ceil(T / 64), QKV) floats.
static inline float* attention_sums(const AttentionFlash* scratch) { return scratch->sums; }

// Returns a note on attention for the start of a run.
static inline const char* attention_note(const AttentionFlash* scratch) {
    const int by_wgmma = scratch->by == ATTENTION_BY_WGMMA, is_wide = scratch->HS > attention_wgmma_widest(1);
    if (is_wide) {
        return by_wgmma ? "wide heads, forward by wgmma, backward by mma" : "wide heads by mma";
    }
    return by_wgmma ? "by wgmma" : scratch->is_capped ? "capped scores by mma" : "";
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
        ATTENTION_CASE_(HS, 128, 256, __VA_ARGS__)                                                           \
    } while (0)

// Return the width of the kernel with documents, and of the one that caps scores. Only these widths
// exist: each takes seconds to compile, and at W = 96 one would spill.
constexpr int attention_documents_width_(int W) { return W <= 32 ? 32 : W <= 64 ? 64 : W <= 128 ? 128 : 256; }
constexpr int attention_capped_width_(int W) {
    return W > 64 ? attention_documents_width_(W) : ATTENTION_WIDEST < 64 ? ATTENTION_WIDEST : 64;
}

// The kernel for a pass: its width of heads, and its mask.
template <int W_, AttentionMask MASK_> struct AttentionKernel_ {
    static constexpr int W = W_;
    static constexpr AttentionMask MASK = MASK_;
};

// The only place that chooses kernels by mma. Calls use(kernel) with an AttentionKernel_ for heads
// that take a width of W.
template <int W, class X, class Use>
static inline void attention_choose_(const AttentionPassGpu<X>* pass, Use use) {
    constexpr int WD = attention_documents_width_(W);
    if (pass->sizes.cap > 0) {
        use(AttentionKernel_<attention_capped_width_(W), ATTENTION_CAPPED>());
    } else if constexpr (W > 128) {
        use(AttentionKernel_<W, ATTENTION_GENERAL>());
    } else if (pass->kv && pass->starts) {
        use(AttentionKernel_<WD, ATTENTION_GENERAL>());
    } else if (pass->kv) {
        use(AttentionKernel_<W, ATTENTION_GENERAL>());
    } else if (pass->starts) {
        use(AttentionKernel_<WD, ATTENTION_DOCUMENTS>());
    } else {
        use(AttentionKernel_<W, ATTENTION_CAUSAL>());
    }
}

template <class X, int W, AttentionMask MASK>
static inline void attention_forward_(const AttentionPassGpu<X>* pass, AttentionSize size, const Gpu* gpu) {
    typedef AttentionTiling_<X, W> Tiling;
    const unsigned grid = attention_grid(&size, size.T, (size_t)pass->sizes.B * size.NH,
                                         16 * ATTENTION_WARPS * Tiling::FORWARD_M);
    launch(attention_forward_kernel_<X, W, MASK>, grid, ATTENTION_THREADS, Tiling::FORWARD_BYTES, gpu,
           pass->out, pass->lse, pass->qkv, attention_general_keys(pass), pass->starts, size);
}

// Returns the sizes for kernels, after checks that both passes need.
template <class X> static inline AttentionSize attention_checked_(const AttentionPassGpu<X>* pass) {
    if (pass->kv) {
        attention_check_chunks(pass->sizes);
    } else {
        assert(pass->sizes.chunks.last == 0);
    }
    AttentionSize size = attention_size(pass->sizes);
    size.key_row = pass->kv ? 2 * size.K : size.Q + 2 * size.K;
    return size;
}

// Gathered keys take the widths of the kernels for whole sequences, so that the bits are the same.
template <class X>
static inline void attention_forward(const AttentionPassGpu<X>* pass, const AttentionFlash* scratch,
                                     const Gpu* gpu) {
    AttentionSize size = attention_checked_(pass);
    size.packs = attention_packs<X>(size.HS, pass->out, pass->qkv, pass->kv, NULL);
    if constexpr (PTX_HAS_WGMMA && sizeof(X) == 2) {
        if (attention_by_wgmma<X>(attention_instructions_(scratch), size, 0)) {
            attention_wgmma_forward(pass, scratch, size, gpu);
            return;
        }
    }
    ATTENTION_DISPATCH_(size.HS, attention_choose_<W>(pass, [&](auto kernel) {
                            typedef decltype(kernel) Kernel;
                            attention_forward_<X, Kernel::W, Kernel::MASK>(pass, size, gpu);
                        }));
}

// Raises `largest` (NH) on the GPU, which is not negative, to the largest score of each head, if
// that is larger, in a pass of attention_forward without a cap. lengths: (B) tokens of each whole
// sequence, the rest is padding; NULL: all. It costs half the matmuls of the forward pass, whose
// kernels know only about the largest score of a row.
template <class X>
static inline void attention_largest_scores(double* largest, const AttentionPassGpu<X>* pass,
                                            const int* lengths, const Gpu* gpu) {
    AttentionSize size = attention_checked_(pass);
    assert(pass->sizes.cap == 0);
    size.packs = attention_packs<X>(size.HS, pass->qkv, pass->kv, NULL, NULL);
    ATTENTION_DISPATCH_(size.HS, {
        constexpr int WD = attention_documents_width_(W);
        typedef AttentionTiling_<X, WD> Tiling;
        const unsigned grid = attention_grid(&size, size.T, (size_t)pass->sizes.B * size.NH,
                                             16 * ATTENTION_WARPS * Tiling::FORWARD_M);
        launch(attention_scores_kernel_<X, WD>, grid, ATTENTION_THREADS, Tiling::FORWARD_BYTES, gpu, largest,
               pass->qkv, attention_general_keys(pass), pass->starts, lengths, size);
    });
}

// Launches both kernels; returns the number of tiles of a sequence.
template <class X, int W, AttentionMask MASK>
static inline int attention_backward_(const AttentionGradientsGpu<X>* d, const AttentionPassGpu<X>* pass,
                                      AttentionFlash* scratch, AttentionSize size, const Gpu* gpu) {
    typedef AttentionTiling_<X, W> Tiling;
    constexpr int ROWS = 16 * ATTENTION_WARPS * Tiling::BACKWARD_M;
    static_assert(ROWS >= ATTENTION_ROWS_LEAST && ATTENTION_ROW_ALIGN % ROWS == 0, "room for rows and sums");
    CHECK(
        Tiling::FITS || !TILE_MEMORY_IS_SMALL,
        "attention in fp32, heads of %d: this GPU has too little shared memory; wanted 16 bits, or heads of "
        "at most 128",
        size.HS);
    const int Tp = attention_padded(size.T);
    const size_t B = (size_t)pass->sizes.B;
    const X* keys_from = attention_general_keys(pass);
    X* keys_to = pass->kv ? d->dkv : d->dqkv + size.Q;
    float* sums = pass->kv ? NULL : scratch->sums;
    const unsigned queries = attention_grid(&size, size.T, B * size.NH, ROWS);
    launch(attention_backward_queries_kernel_<X, W, MASK>, queries, ATTENTION_THREADS, Tiling::BACKWARD_BYTES,
           gpu, d->dqkv, scratch->rows, sums, d->dout, pass->qkv, keys_from, (const X*)pass->out,
           (const float*)pass->lse, pass->starts, size, Tp);
    const unsigned keys = attention_grid(&size, attention_keys(pass->sizes), B * size.KV, ROWS);
    launch(attention_backward_keys_kernel_<X, W, MASK>, keys * Tiling::KEYS_PARTS, ATTENTION_THREADS,
           Tiling::BACKWARD_BYTES, gpu, d->dqkv, keys_to, sums, d->dout, pass->qkv, keys_from,
           (const float2*)scratch->rows, pass->starts, size, Tp);
    return size.tiles;
}

// Launches the kernels for these sizes.
template <class X>
static inline int attention_backward_any_(const AttentionGradientsGpu<X>* d, const AttentionPassGpu<X>* pass,
                                          AttentionFlash* scratch, AttentionSize size, const Gpu* gpu) {
    if constexpr (PTX_HAS_WGMMA && sizeof(X) == 2) {
        if (attention_by_wgmma<X>(attention_instructions_(scratch), size, 1)) {
            return attention_wgmma_backward(d, pass, scratch, size, gpu);
        }
    }
    int tiles = 0;
    ATTENTION_DISPATCH_(size.HS, attention_choose_<W>(pass, [&](auto kernel) {
                            typedef decltype(kernel) Kernel;
                            tiles =
                                attention_backward_<X, Kernel::W, Kernel::MASK>(d, pass, scratch, size, gpu);
                        }));
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

enum { ATTENTION_CACHED_THREADS = 128, ATTENTION_CACHED_WIDEST = 256 };

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
    if (HS % SIZE == 0) { // then each key starts at a multiple of 16 bytes, like the cache
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
// keys, one per thread, it computes the scores; then thread d adds up column d of the values, or
// columns d and d + 128.
// grid   rows * NH      block   128      shared   1.5 KiB
// moves  the keys and values of each sequence up to its position, for each head. Bound by
//        memory, if enough sequences fill the GPU.
// order  fixed, and the same for any number of sequences
// needs  HS <= 128 COLUMNS
template <class X, int COLUMNS>
__global__ void attention_cached_kernel(AttentionPassGpu<X> pass, const int* positions, int window,
                                        AttentionCacheGpu<X> cache) {
    SMEM_ARRAY(float, q, [ATTENTION_CACHED_WIDEST]);
    SMEM_ARRAY(float, p, [ATTENTION_CACHED_THREADS]);
    const AttentionSizes sizes = pass.sizes;
    const int r = blockIdx.x / sizes.NH, h = blockIdx.x % sizes.NH, HS = sizes.HS, tid = threadIdx.x;
    const int first = attention_cached_first(positions[r], window), keys = positions[r] + 1 - first;
    const X *k = cache.data + attention_cache_at_(cache.maxT, r, h / attention_group(sizes), sizes) +
                 (size_t)first * HS,
            *v = k + attention_cache_values_(cache.maxT, sizes);
    const AttentionScale scale = attention_scale(sizes.root, sizes.cap);
    const bool is_capped = sizes.cap > 0;
    float max = -INFINITY, sum = 0.0f, acc[COLUMNS] = {};
    for (int d = tid; d < HS; d += ATTENTION_CACHED_THREADS) {
        q[d] = to_float(pass.qkv[(size_t)r * attention_qkv_size(sizes) + h * HS + d]) *
               (is_capped ? 1.0f : ATTENTION_LOG2_E * scale.factor);
    }
    __syncthreads();
    for (int u0 = 0; u0 < keys; u0 += ATTENTION_CACHED_THREADS) {
        const int count = min(keys - u0, (int)ATTENTION_CACHED_THREADS);
        float s = tid < count ? attention_cached_dot_(q, k + (size_t)(u0 + tid) * HS, HS) : -INFINITY;
        if (is_capped && tid < count) {
            s = ATTENTION_LOG2_E * scale.factor * softcap_tanh(s, scale.width);
        }
        const float before = max;
        max = fmaxf(max, block_max(s));
        // `rescale` is 0 in the first tile, whose sums are 0.
        const float weight = exp2f(s - max), rescale = exp2f(before - max);
        p[tid] = weight;
        sum = sum * rescale + block_sum(weight); // also makes p visible
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const int d = tid + j * ATTENTION_CACHED_THREADS;
            acc[j] *= rescale;
            for (int i = 0; i < count && d < HS; i++) {
                acc[j] += p[i] * to_float(v[(size_t)(u0 + i) * HS + d]);
            }
        }
    } // no thread writes p again before block_max has seen all threads
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const int d = tid + j * ATTENTION_CACHED_THREADS;
        if (d < HS) {
            pass.out[(size_t)blockIdx.x * HS + d] = from_float<X>(acc[j] / sum);
        }
    }
    if (tid == 0) {
        pass.lse[blockIdx.x] = (max + log2f(sum)) / ATTENTION_LOG2_E;
    }
}

template <class X>
static inline void attention_cached(const AttentionPassGpu<X>* pass, const int* positions, int window,
                                    AttentionCacheGpu<X> cache, const Gpu* gpu) {
    const AttentionSizes sizes = pass->sizes;
    CHECK(sizes.HS <= ATTENTION_CACHED_WIDEST, "attention: heads of size %d, wanted at most %d", sizes.HS,
          (int)ATTENTION_CACHED_WIDEST);
    launch(sizes.HS > ATTENTION_CACHED_THREADS ? attention_cached_kernel<X, 2>
                                               : attention_cached_kernel<X, 1>,
           (unsigned)(sizes.B * sizes.NH), ATTENTION_CACHED_THREADS, 0, gpu, *pass, positions, window, cache);
}

#endif
