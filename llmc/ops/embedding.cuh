/*
embedding.cuh -- embedding.h on the GPU: the same functions on X = float, bf16 or fp16, computed in
fp32 (T is the length of the sequences).

The gradient of wte is a sum over all positions that hold the same token. To add in a fixed order
without floating-point atomics, a stable radix sort orders the positions by token (one pass for up
to 1024 tokens, else two). The sorted list is cut into chunks of EMBEDDING_CHUNK positions. The rows
of one token in one chunk are a piece; a warp sums them in order of the positions. The sum of a
token with a single piece is added to dwte at once. If a token continues in another chunk, its sums
wait in scratch memory, and a second kernel adds them in order. So a token that fills half of the
batch is summed by many blocks.
*/
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include <assert.h>
#include <limits.h>

#include "llmc/ops/embedding.h"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/gpu.cuh"

#define EMBEDDING_WARPS 8  // warps of a block, in the kernels with one warp per row
#define EMBEDDING_BITS 10  // bits of a token that one pass of the sort looks at, at most
#define EMBEDDING_PASSES 2 // passes of the sort, at most: tokens are below 2^20
// positions per block of the sort; also 2^EMBEDDING_BITS: one thread per digit
#define EMBEDDING_TILE 1024
// Sorted positions per block: few enough to be fast, enough to keep partial sums few.
#define EMBEDDING_CHUNK 128

typedef struct {
    int* order[2]; // (N) positions in sorted order; order[0] after the last pass
    // (digits, tiles) counts of each tile, then offsets of each tile's positions among all
    // positions of the digit
    int* counts;
    int* totals;    // (digits) counts of all positions
    float* partial; // (chunks, 2, C) sums of the first and the last piece of each chunk
    int N, C;
    int passes, bits; // passes of the sort, and bits of a token in each: 2^bits digits
} EmbeddingGpu;

static inline size_t embedding_counts_(int N) { return (size_t)EMBEDDING_TILE * ceil_div(N, EMBEDDING_TILE); }
static inline size_t embedding_partials_(int N, int C) {
    return 2 * (size_t)ceil_div(N, EMBEDDING_CHUNK) * C;
}

// Takes scratch for up to N positions, tokens below V, and C columns.
static inline void embedding_open(EmbeddingGpu* scratch, Memory* memory, int N, int V, int C) {
    const char* kind = "scratch: embedding";
    CHECK(V <= 1 << (EMBEDDING_BITS * EMBEDDING_PASSES), "vocabulary of %d tokens: at most %d on the GPU", V,
          1 << (EMBEDDING_BITS * EMBEDDING_PASSES));
    for (int i = 0; i < 2; i++) {
        scratch->order[i] = (int*)memory_take(memory, kind, MEMORY_DEVICE, (size_t)N * sizeof(int));
    }
    scratch->counts = (int*)memory_take(memory, kind, MEMORY_DEVICE, embedding_counts_(N) * sizeof(int));
    scratch->totals = (int*)memory_take(memory, kind, MEMORY_DEVICE, EMBEDDING_TILE * sizeof(int));
    scratch->partial =
        (float*)memory_take(memory, kind, MEMORY_DEVICE, embedding_partials_(N, C) * sizeof(float));
    scratch->N = N;
    scratch->C = C;
    int bits = 1;
    while (V > 1 << bits) {
        bits++;
    }
    scratch->passes = ceil_div(bits, EMBEDDING_BITS);
    scratch->bits = ceil_div(bits, scratch->passes);
}

// ---- elements: WIDTH at a time, a pack of X or 1 ----

template <int WIDTH, class X> __device__ inline void embedding_add_(float* to, const X* from) {
    float x[WIDTH];
    load_floats<WIDTH>(x, from);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        to[i] += x[i];
    }
}

static inline int embedding_aligned_(const void* a, const void* b, const void* c) {
    return ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0;
}

// Returns the grid for warps that each process 32 WIDTH columns of a row; blocks in y cover the
// columns.
static inline dim3 embedding_grid_(int rows, int rows_per_block, int C, int width) {
    return dim3(ceil_div(rows, rows_per_block), ceil_div(C, 32 * width));
}

// ---- forward ----

// One warp per position and 32 WIDTH columns. wte has the rows of batch.words; the embedding of any
// other token is zeros.
// grid   (ceil(B*T / 8), ceil(C / (32 WIDTH)))      block   (32, 8)      shared   none
// moves  2 B*T*C in, half of it mostly from L2; B*T*C out. Bound by memory.
// order  fixed
// needs  C a multiple of WIDTH; aligned addresses if WIDTH is a pack
template <class X, int WIDTH>
__global__ void embedding_forward_kernel(X* out, const int* tokens, const X* wte, const X* wpe,
                                         EmbeddingBatch batch) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y, C = batch.C;
    const int c = (blockIdx.y * 32 + threadIdx.x) * WIDTH;
    if (n < batch.N && c < C) {
        const int row = embedding_row(batch.words, tokens[n]);
        float x[WIDTH] = {};
        if (row >= 0) {
            load_floats<WIDTH>(x, wte + (size_t)row * C + c);
        }
        if (wpe) {
            embedding_add_<WIDTH>(x, wpe + (size_t)embedding_position(batch.positions, n, batch.T) * C + c);
        }
        store_floats<WIDTH>(out + (size_t)n * C + c, x);
    }
}

template <class X>
static inline void embedding_forward(X* out, const int* tokens, const X* wte, const X* wpe,
                                     EmbeddingBatch batch, const Gpu* gpu) {
    const int is_packed = batch.C % Pack<X>::SIZE == 0 && embedding_aligned_(out, wte, wpe),
              width = is_packed ? Pack<X>::SIZE : 1;
    launch(is_packed ? embedding_forward_kernel<X, Pack<X>::SIZE> : embedding_forward_kernel<X, 1>,
           embedding_grid_(batch.N, EMBEDDING_WARPS, batch.C, width), dim3(32, EMBEDDING_WARPS), 0, gpu, out,
           tokens, wte, wpe, batch);
}

// A warp handles 32 WIDTH columns of one row, and adds the embedding of the row's position.
// grid   (ceil(count / 8), ceil(C / (32 WIDTH)))      block   (32, 8)      shared   none
// moves  2 count*C in, half of it mostly from L2; count*C out. Bound by memory.
// order  fixed
// needs  C a multiple of WIDTH; aligned addresses if WIDTH is a pack
template <class X, int WIDTH>
__global__ void embedding_add_positions_kernel(X* out, const X* wpe, int first, int count, int T,
                                               EmbeddingPositions positions, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    const int c = (blockIdx.y * 32 + threadIdx.x) * WIDTH;
    if (n < count && c < C) {
        X* to = out + (size_t)n * C + c;
        float x[WIDTH];
        load_floats<WIDTH>(x, to);
        embedding_add_<WIDTH>(x, wpe + (size_t)embedding_position(positions, first + n, T) * C + c);
        store_floats<WIDTH>(to, x);
    }
}

// Adds the embeddings of positions to out (count, C), the rows of (B, T) from `first` on.
template <class X>
static inline void embedding_positions(X* out, const X* wpe, int first, int count, int T,
                                       EmbeddingPositions positions, int C, const Gpu* gpu) {
    const int is_packed = C % Pack<X>::SIZE == 0 && embedding_aligned_(out, wpe, NULL),
              width = is_packed ? Pack<X>::SIZE : 1;
    if (count > 0) {
        launch(is_packed ? embedding_add_positions_kernel<X, Pack<X>::SIZE>
                         : embedding_add_positions_kernel<X, 1>,
               embedding_grid_(count, EMBEDDING_WARPS, C, width), dim3(32, EMBEDDING_WARPS), 0, gpu, out, wpe,
               first, count, T, positions, C);
    }
}

// ---- backward: positions ----

// One warp per position and 32 WIDTH columns sums over the batch. Positions that the batch does not
// have, of other chunks or from the end of the sequence on, get zeros.
// grid   (ceil(rows / 8), ceil(C / (32 WIDTH)))      block   (32, 8)      shared   none
// moves  B*T*C in; T*C out. Bound by memory.
// order  fixed: by batch
// needs  C a multiple of WIDTH; aligned addresses if WIDTH is a pack
template <class X, class G, int WIDTH>
__global__ void embedding_positions_kernel(G* dwpe, const X* dout, EmbeddingSizes sizes, int rows,
                                           GradientMode mode) {
    const int position = blockIdx.x * blockDim.y + threadIdx.y, B = sizes.B, T = sizes.T, C = sizes.C;
    const int c = (blockIdx.y * 32 + threadIdx.x) * WIDTH;
    if (position >= rows || c >= C) {
        return;
    }
    float sum[WIDTH] = {};
    G* to = dwpe + (size_t)position * C + c;
    const int t = token_chunks_from(sizes.chunks, position, T);
    if (t < T && token_chunks_position(sizes.chunks, t, T) == position) {
#pragma unroll 4
        for (int b = 0; b < B; b++) {
            embedding_add_<WIDTH>(sum, dout + ((size_t)b * T + t) * C + c);
        }
    }
    if (mode == GRADIENT_ADD) {
        embedding_add_<WIDTH>(sum, to);
    }
    store_floats<WIDTH>(to, sum);
}

// ---- backward: sorting the positions by token ----

// Returns the digit of list entry i, `bits` bits of its token from bit `shift` on, and sets
// *position to the entry. The first pass reads no list: entry i is i.
__device__ inline int embedding_digit_(const int* tokens, const int* list, int i, int shift, int bits,
                                       int* position) {
    *position = list ? list[i] : i;
    return tokens[*position] >> shift & ((1 << bits) - 1);
}

// Sets counts[digit][tile] to the number of entries of the tile with this digit.
// grid   tiles      block   1024: one thread per entry, then per digit      shared   1024 ints
// moves  2N ints in, 2^bits out per tile
// order  free, but the counts do not depend on it
__global__ void embedding_count_kernel(int* counts, const int* tokens, const int* list, int N, int shift,
                                       int bits) {
    SMEM_ARRAY(int, count, [EMBEDDING_TILE]);
    const int i = blockIdx.x * EMBEDDING_TILE + threadIdx.x;
    count[threadIdx.x] = 0;
    __syncthreads();
    if (i < N) {
        int position;
        atomicAdd(&count[embedding_digit_(tokens, list, i, shift, bits, &position)], 1);
    }
    __syncthreads();
    if (threadIdx.x < 1u << bits) {
        counts[(size_t)threadIdx.x * gridDim.x + blockIdx.x] = count[threadIdx.x];
    }
}

// One warp per digit replaces its counts by their sums over the tiles before, and stores the sum
// over all tiles in totals.
// grid   ceil(2^bits / 8)      block   256 = 8 digits      shared   none
// moves  2^bits ints per tile in and out, in L2
// order  fixed
__global__ void embedding_scan_kernel(int* counts, int* totals, int tiles, int bits) {
    const int digit = blockIdx.x * EMBEDDING_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (digit >= 1 << bits) {
        return;
    }
    int* row = counts + (size_t)digit * tiles;
    int before = 0;
    for (int first = 0; first < tiles; first += 32) {
        const int count = first + lane < tiles ? row[first + lane] : 0;
        const int scan = warp_scan(count);
        if (first + lane < tiles) {
            row[first + lane] = before + scan - count;
        }
        before += __shfl_sync(0xffffffffu, scan, 31);
    }
    if (lane == 0) {
        totals[digit] = before;
    }
}

// Returns the active lanes with the same digit as this lane; all lanes call it.
__device__ inline unsigned embedding_peers_(int digit, int bits, int is_active) {
    unsigned peers = __ballot_sync(0xffffffffu, is_active);
    for (int bit = 0; bit < bits; bit++) {
        const unsigned ones = __ballot_sync(0xffffffffu, digit >> bit & 1);
        peers &= digit >> bit & 1 ? ones : ~ones;
    }
    return peers;
}

// Puts every entry after all entries with smaller digits and all earlier ones with its own digit.
// next[d] is the place of the next entry with digit d. The warps of a block update it in turn, so
// equal digits keep their order.
// grid   tiles      block   1024: one thread per entry, and per digit      shared   1056 ints
// moves  2N ints in, N out, scattered
// order  fixed
__global__ void __launch_bounds__(EMBEDDING_TILE)
    embedding_scatter_kernel(int* sorted, const int* counts, const int* totals, const int* tokens,
                             const int* list, int N, int shift, int bits) {
    SMEM_ARRAY(int, next, [EMBEDDING_TILE]);
    const int entries = min(EMBEDDING_TILE, N - (int)blockIdx.x * EMBEDDING_TILE);
    const int i = blockIdx.x * EMBEDDING_TILE + threadIdx.x, is_active = i < N;
    int position = 0;
    const int digit = is_active ? embedding_digit_(tokens, list, i, shift, bits, &position) : 0;
    const unsigned peers = embedding_peers_(digit, bits, is_active);
    const unsigned below = peers & ((1u << threadIdx.x % 32) - 1);
    const int is_digit = threadIdx.x < 1u << bits;
    // entries with smaller digits
    const int before = block_scan(is_digit ? totals[threadIdx.x] : 0);
    if (is_digit) {
        next[threadIdx.x] = before + counts[(size_t)threadIdx.x * gridDim.x + blockIdx.x];
    }
    __syncthreads();
    for (int warp = 0; 32 * warp < entries; warp++) {
        if ((int)threadIdx.x / 32 == warp) {
            const int first = next[digit];
            __syncwarp();
            if (is_active) {
                sorted[first + __popc(below)] = position;
                if (below == 0) {
                    next[digit] = first + __popc(peers);
                }
            }
        }
        __syncthreads();
    }
}

// Sorts the positions by token, for the gradients of wte, or of its slices, that follow.
static inline void embedding_sort(EmbeddingGpu* scratch, const int* tokens, int N, const Gpu* gpu) {
    const int tiles = ceil_div(N, EMBEDDING_TILE), bits = scratch->bits;
    const int* list = NULL;
    for (int pass = 0; pass < scratch->passes; pass++) {
        const int shift = pass * bits;
        int* sorted = scratch->order[(scratch->passes - 1 - pass) % 2];
        launch(embedding_count_kernel, tiles, EMBEDDING_TILE, 0, gpu, scratch->counts, tokens, list, N, shift,
               bits);
        launch(embedding_scan_kernel, ceil_div(1 << bits, EMBEDDING_WARPS), 32 * EMBEDDING_WARPS, 0, gpu,
               scratch->counts, scratch->totals, tiles, bits);
        launch(embedding_scatter_kernel, tiles, EMBEDDING_TILE, 0, gpu, sorted, scratch->counts,
               scratch->totals, tokens, list, N, shift, bits);
        list = sorted;
    }
}

// ---- backward: tokens ----

// The list of positions, sorted by token.
typedef struct {
    const int *tokens, *order;
    int N;
} EmbeddingSorted_;

// A chunk of the sorted list in shared memory, cut into pieces.
typedef struct {
    int position[EMBEDDING_CHUNK], token[EMBEDDING_CHUNK];
    // start of every piece; after the last one, the end of the chunk
    int begin[EMBEDDING_CHUNK + 1];
    // number of pieces; tokens before and after the chunk, -1 outside the list
    int pieces, before, after;
} EmbeddingChunk_;

__device__ inline int embedding_token_(const EmbeddingSorted_& list, int i) {
    return i >= 0 && i < list.N ? list.tokens[list.order[i]] : -1;
}

// Fills `chunk` with list entries [first, first + count). The whole block of 256 threads calls it.
__device__ inline void embedding_read_chunk_(EmbeddingChunk_* chunk, const EmbeddingSorted_& list, int first,
                                             int count) {
    const int i = threadIdx.x, lane = i % 32;
    if (i < count) {
        chunk->position[i] = list.order[first + i];
        chunk->token[i] = list.tokens[list.order[first + i]];
    }
    if (i == 0) {
        chunk->before = embedding_token_(list, first - 1);
        chunk->after = embedding_token_(list, first + count);
    }
    __syncthreads();
    if (i < 32) { // the first warp lists the starts
        int pieces = 0;
        for (int j = lane; j - lane < count; j += 32) {
            const int begins = j < count && (j == 0 || chunk->token[j] != chunk->token[j - 1]);
            const unsigned lanes = __ballot_sync(0xffffffffu, begins);
            if (begins) {
                chunk->begin[pieces + __popc(lanes & ((1u << lane) - 1))] = j;
            }
            pieces += __popc(lanes);
        }
        if (lane == 0) {
            chunk->begin[pieces] = count;
            chunk->pieces = pieces;
        }
    }
    __syncthreads();
}

// One block per chunk; its warps take turns with the pieces, 32 WIDTH columns at a time. dwte has
// the rows of `words`; pieces of other tokens are left out.
// grid   chunks      block   256      shared   a chunk
// moves  N*C in; the gradient of every token met, in and out; 2C fp32 out per chunk at most. Bound
//        by memory.
// order  fixed: by position
// needs  C a multiple of WIDTH; aligned addresses if WIDTH is a pack
template <class X, class G, int WIDTH>
__global__ void embedding_pieces_kernel(G* dwte, EmbeddingWords words, float* partial, const X* dout,
                                        EmbeddingSorted_ list, int C) {
    SMEM_ARRAY(EmbeddingChunk_, chunk, [1]);
    const int first = blockIdx.x * EMBEDDING_CHUNK, count = min(EMBEDDING_CHUNK, list.N - first);
    embedding_read_chunk_(chunk, list, first, count);
    const int lane = threadIdx.x % 32, slices = ceil_div(C, 32 * WIDTH);
    for (int job = threadIdx.x / 32; job < chunk->pieces * slices; job += EMBEDDING_WARPS) {
        const int piece = job / slices, c = (job % slices * 32 + lane) * WIDTH;
        const int begin = chunk->begin[piece], end = chunk->begin[piece + 1], token = chunk->token[begin];
        const int row = embedding_row(words, token);
        if (c >= C || row < 0) {
            continue;
        }
        float sum[WIDTH] = {};
#pragma unroll 4
        for (int i = begin; i < end; i++) {
            embedding_add_<WIDTH>(sum, dout + (size_t)chunk->position[i] * C + c);
        }
        if ((begin == 0 && chunk->before == token) || (end == count && chunk->after == token)) {
            store_floats<WIDTH>(partial + (2 * (size_t)blockIdx.x + (begin > 0)) * C + c, sum);
        } else {
            embedding_add_<WIDTH>(sum, dwte + (size_t)row * C + c);
            store_floats<WIDTH>(dwte + (size_t)row * C + c, sum);
        }
    }
}

// One block per chunk and 256 columns. If a token starts in the chunk and continues after it, the
// block adds its partial sums: the one at the end of this chunk, then those at the start of the
// following chunks, as long as they belong to this token.
// grid   (chunks, ceil(C / 256))      block   256      shared   none
// moves  at most 2C fp32 in per chunk; the gradients of few tokens in and out
// order  fixed: by position
template <class G>
__global__ void embedding_partials_kernel(G* dwte, EmbeddingWords words, const float* partial,
                                          EmbeddingSorted_ list, int C) {
    const int *tokens = list.tokens, *order = list.order;
    const int N = list.N;
    const int c = blockIdx.y * blockDim.x + threadIdx.x, chunks = ceil_div(N, EMBEDDING_CHUNK);
    const int first = blockIdx.x * EMBEDDING_CHUNK, behind = first + EMBEDDING_CHUNK;
    if (c >= C || behind >= N) {
        return;
    }
    const int token = tokens[order[behind - 1]], row = embedding_row(words, token);
    const int from_the_start = tokens[order[first]] == token;
    if (row < 0 || tokens[order[behind]] != token || embedding_token_(list, first - 1) == token) {
        return;
    }
    float sum = partial[(2 * (size_t)blockIdx.x + !from_the_start) * C + c];
    for (int j = blockIdx.x + 1; j < chunks && tokens[order[j * EMBEDDING_CHUNK]] == token; j++) {
        sum += partial[2 * (size_t)j * C + c];
    }
    G* to = dwte + (size_t)row * C + c;
    *to = from_float<G>(to_float(*to) + sum);
}

template <class X, int WIDTH>
static inline void embedding_backward_positions_(Gradient dwpe, const X* dout, EmbeddingSizes sizes,
                                                 GradientMode mode, const Gpu* gpu) {
    const int rows = mode == GRADIENT_SET ? sizes.maxT : token_chunks_length(sizes.chunks, sizes.T);
    GRADIENT_DISPATCH(dwpe, X,
                      launch(embedding_positions_kernel<X, G, WIDTH>,
                             embedding_grid_(rows, EMBEDDING_WARPS, sizes.C, WIDTH),
                             dim3(32, EMBEDDING_WARPS), 0, gpu, (G*)dwpe.data, dout, sizes, rows, mode));
}

template <class X, int WIDTH>
static inline void embedding_backward_tokens_(Gradient dwte, const X* dout, const int* tokens,
                                              EmbeddingSizes sizes, EmbeddingGpu* scratch, const Gpu* gpu) {
    const EmbeddingWords words = {sizes.first, sizes.Vp};
    const EmbeddingSorted_ list = {tokens, scratch->order[0], sizes.B * sizes.T};
    const int chunks = ceil_div(list.N, EMBEDDING_CHUNK), C = sizes.C;
    GRADIENT_DISPATCH(dwte, X, {
        launch(embedding_pieces_kernel<X, G, WIDTH>, chunks, 32 * EMBEDDING_WARPS, 0, gpu, (G*)dwte.data,
               words, scratch->partial, dout, list, C);
        launch(embedding_partials_kernel<G>, dim3(chunks, ceil_div(C, 256)), 256, 0, gpu, (G*)dwte.data,
               words, scratch->partial, list, C);
    });
}

// Needs embedding_sort of the same tokens, unless dwte has no data.
template <class X>
static inline void embedding_backward(Gradient dwte, Gradient dwpe, const X* dout, const int* tokens,
                                      EmbeddingSizes sizes, GradientMode token_mode, GradientMode mode,
                                      EmbeddingGpu* scratch, const Gpu* gpu) {
    assert(sizes.B * sizes.T <= scratch->N && sizes.C <= scratch->C && sizes.T <= sizes.maxT);
    if (sizes.B == 0) {
        return;
    }
    if (dwte.data && token_mode == GRADIENT_SET) {
        const size_t elements = (size_t)sizes.Vp * sizes.C;
        CUDA_CHECK(cudaMemsetAsync(dwte.data, 0, elements * dtype_bytes(dwte.dtype), gpu->stream));
    }
    const int packs = sizes.C % Pack<X>::SIZE == 0 && embedding_aligned_(dwte.data, dwpe.data, dout);
    if (dwpe.data) {
        (packs ? embedding_backward_positions_<X, Pack<X>::SIZE>
               : embedding_backward_positions_<X, 1>)(dwpe, dout, sizes, mode, gpu);
    }
    if (dwte.data) {
        (packs ? embedding_backward_tokens_<X, Pack<X>::SIZE>
               : embedding_backward_tokens_<X, 1>)(dwte, dout, tokens, sizes, scratch, gpu);
    }
}

#endif
