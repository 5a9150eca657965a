/*
expert_wgmma.cuh -- the matmuls of expert_matmul.cuh by wgmma and TMA: for bf16 and fp16 on GPUs of
compute capability 9.0. They add up in another order than mma_16816.

A block per multiprocessor takes tiles of 128 x 256 elements, one after the other. A warp fills
STAGES pairs of tiles of both operands, 64 steps of the sums at a time, through TMA, and runs ahead
of the first two warpgroups, of 64 rows each, which multiply and write results. In long sums the
first warpgroup is AHEAD of the second one: while one writes, the other has the tensor cores.
*/
#ifndef LLMC_EXPERT_WGMMA_CUH
#define LLMC_EXPERT_WGMMA_CUH

#include "llmc/gpu/ptx.cuh"
#include "llmc/gpu/wgmma.cuh"
#include "llmc/ops/expert_rows.cuh"

enum {
    EXPERT_WIDE_ = 256, // columns of a tile
    EXPERT_STAGES_ = 4,
    EXPERT_AHEAD_ = 3,         // stages
    EXPERT_MULTIPLIERS_ = 256, // threads
    EXPERT_WGMMA_THREADS_ = EXPERT_MULTIPLIERS_ + 128,
    EXPERT_LEFT_ = EXPERT_SIDE * WGMMA_DEPTH, // elements of a stage
    EXPERT_RIGHT_ = EXPERT_WIDE_ * WGMMA_DEPTH,
    EXPERT_STAGE_BYTES_ = (EXPERT_LEFT_ + EXPERT_RIGHT_) * 2,
    EXPERT_CHUNK_ = 64, // columns that a warp writes together
    EXPERT_RESULTS_ = 16 * EXPERT_CHUNK_,
    EXPERT_WGMMA_BYTES_ = 1024 + EXPERT_STAGES_ * EXPERT_STAGE_BYTES_ +
                          EXPERT_MULTIPLIERS_ / 32 * EXPERT_RESULTS_ * 4 + (2 * EXPERT_STAGES_ + 6) * 8
};
static_assert(EXPERT_WGMMA_BYTES_ <= 227 << 10, "a block fits");

// Returns the place of an element among the results of 16 rows of a warp: groups of eight columns
// change places by row, so that eight rows lie in different banks.
HOST_DEVICE int expert_place(int row, int col) {
    return row * EXPERT_CHUNK_ + ((col / 8 ^ row % 8) * 8 | col % 8);
}

#if PTX_HAS_WGMMA

typedef float ExpertWgmmaSums_[EXPERT_WIDE_ / 8][4]; // of 64 rows in a warpgroup

// Shared memory of a block: stages, results, barriers, and the numbers of two jobs; and the stages
// and the staggered jobs that the thread has passed.
template <class X> struct ExpertPipe_ {
    X* stages;
    float* results;
    uint64_t *full, *empty, *job_full, *job_empty, *ahead;
    int* job;
    int passed, staggered;
};

// One tile of results: elements of the left operand from `row` on, of the right one, matrix e, from
// `col` on, and K steps of the sums from k on; results from row `out` on, of which `rows` exist.
typedef struct {
    int row, col, e, k, K, out, rows;
} ExpertJob_;

// Tiles of expert_matmul_forward and backward_input: `width` columns of all rows.
struct ExpertRowsJobs_ {
    ExpertRows rows;
    int K, width;

    // Sets job i; returns 0 if it has no rows: the host only knows how many tiles exist at most.
    __device__ int at(ExpertJob_* job, int i) const {
        const int columns = ceil_div(width, (int)EXPERT_WIDE_);
        const ExpertTile tile = expert_find(rows, i / columns);
        *job = {tile.row, i % columns * EXPERT_WIDE_, tile.e, 0, K, tile.row, tile.rows};
        return tile.rows > 0;
    }
};

// Tiles of expert_matmul_backward_weight: `width` columns of OC rows of each matrix.
struct ExpertWeightJobs_ {
    ExpertRows rows;
    int OC, width;

    __device__ int at(ExpertJob_* job, int i) const {
        const int columns = ceil_div(width, (int)EXPERT_WIDE_),
                  tiles = ceil_div(OC, (int)EXPERT_SIDE) * columns, e = i / tiles,
                  row = i % tiles / columns * EXPERT_SIDE;
        const int begin = rows.first[e], K = rows.first[e + 1] - begin;
        *job = {row, i % columns * EXPERT_WIDE_, 0, begin, K, e * OC + row, OC - row};
        return 1;
    }
};

// Sets up the pipe; the whole block calls it.
template <class X> __device__ inline ExpertPipe_<X> expert_pipe_(unsigned char* memory) {
    ExpertPipe_<X> pipe;
    unsigned char* stages = memory + (1024 - ptx_shared_address(memory) % 1024) % 1024;
    pipe.stages = reinterpret_cast<X*>(stages);
    pipe.results = reinterpret_cast<float*>(stages + EXPERT_STAGES_ * EXPERT_STAGE_BYTES_);
    pipe.full =
        reinterpret_cast<uint64_t*>(pipe.results + EXPERT_MULTIPLIERS_ / 32 * (size_t)EXPERT_RESULTS_);
    pipe.empty = pipe.full + EXPERT_STAGES_;
    pipe.job_full = pipe.empty + EXPERT_STAGES_;
    pipe.job_empty = pipe.job_full + 2;
    pipe.ahead = pipe.job_empty + 2;
    pipe.job = reinterpret_cast<int*>(pipe.ahead + 1);
    pipe.passed = pipe.staggered = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < EXPERT_STAGES_; i++) {
            mbarrier_init(pipe.full + i, 1);
            mbarrier_init(pipe.empty + i, EXPERT_MULTIPLIERS_ / 32);
        }
        for (int i = 0; i < 2; i++) {
            mbarrier_init(pipe.job_full + i, 1);
            mbarrier_init(pipe.job_empty + i, EXPERT_MULTIPLIERS_ / 32);
        }
        mbarrier_init(pipe.ahead, 4);
        mbarrier_publish();
    }
    __syncthreads();
    return pipe;
}

// ---- jobs ----

// Takes job number n of the block, and tells the others; returns -1 if none is left. The warp that
// fills calls it.
template <class X>
__device__ inline int expert_take_(const ExpertPipe_<X>& pipe, int n, unsigned* taken, unsigned tiles) {
    int i = -1;
    if (threadIdx.x % 32 == 0) {
        i = tile_take(taken, tiles);
        mbarrier_wait(pipe.job_empty + n % 2, (n / 2 + 1) % 2);
        pipe.job[n % 2] = i;
        mbarrier_arrive(pipe.job_full + n % 2);
    }
    return __shfl_sync(0xffffffffu, i, 0);
}

// Returns job number n of the block to the warps that multiply, or -1.
template <class X> __device__ inline int expert_next_(const ExpertPipe_<X>& pipe, int n) {
    mbarrier_wait(pipe.job_full + n % 2, n / 2 % 2);
    const int i = pipe.job[n % 2];
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(pipe.job_empty + n % 2);
    }
    return i;
}

// ---- filling ----

// Starts to copy `side` elements of an operand, steps k ... k + 63.
template <ExpertLayout LAYOUT, class X>
__device__ inline void expert_fill_(X* to, const CUtensorMap* map, int begin, int side, int k, int e,
                                    uint64_t* full) {
    if constexpr (LAYOUT == EXPERT_ALONG) {
        tma_load_3d(to, map, k, begin, e, full);
    } else {
        for (int i = 0; i < side; i += WGMMA_PANEL) {
            tma_load_3d(to + i * WGMMA_DEPTH, map, begin + i, k, e, full);
        }
    }
}

template <ExpertLayout LEFT, ExpertLayout RIGHT, class X>
__device__ inline void expert_fill_all_(ExpertPipe_<X>* pipe, const CUtensorMap* left,
                                        const CUtensorMap* right, const ExpertJob_& job) {
    for (int k = 0; k < job.K; k += WGMMA_DEPTH) {
        const int stage = pipe->passed % EXPERT_STAGES_, round = pipe->passed / EXPERT_STAGES_;
        if (threadIdx.x % 32 == 0) {
            X* to = pipe->stages + stage * (EXPERT_LEFT_ + EXPERT_RIGHT_);
            uint64_t* full = pipe->full + stage;
            mbarrier_wait(pipe->empty + stage, (round + 1) % 2);
            mbarrier_arrive_expect(full, EXPERT_STAGE_BYTES_);
            expert_fill_<LEFT>(to, left, job.row, EXPERT_SIDE, job.k + k, 0, full);
            expert_fill_<RIGHT>(to + EXPERT_LEFT_, right, job.col, EXPERT_WIDE_, job.k + k, job.e, full);
        }
        pipe->passed++;
    }
    __syncwarp(); // redundant: keeps the lanes that do not fill beside the one that does
}

// ---- multiplying ----

// Sets steps from `steps` on of operands that sums cross to 0: they are rows of the next expert.
// All multiplying threads call it.
template <class X> __device__ inline void expert_clear_(X* stage, int steps) {
    constexpr int PANELS = (EXPERT_SIDE + EXPERT_WIDE_) / WGMMA_PANEL, SIZE = Pack<X>::SIZE,
                  PACKS = WGMMA_PANEL / SIZE;
    const int rows = WGMMA_DEPTH - steps;
    for (int i = (int)threadIdx.x; i < PANELS * rows * PACKS; i += EXPERT_MULTIPLIERS_) {
        const int row = i / PACKS, panel = row / rows;
        X* to = stage + (panel * WGMMA_DEPTH + steps + row % rows) * WGMMA_PANEL + i % PACKS * SIZE;
        store_for_async(reinterpret_cast<int4*>(to), make_int4(0, 0, 0, 0));
    }
    fence_async();
    barrier_of<EXPERT_MULTIPLIERS_>(1);
}

// Lets the first warpgroup go ahead of the second one, which calls it, in jobs of more than STAGES
// stages: then the first one cannot be a whole job ahead.
template <class X> __device__ inline void expert_fall_behind_(ExpertPipe_<X>* pipe) {
    mbarrier_wait(pipe->ahead, pipe->staggered % 2);
    pipe->staggered++;
}

// Sets the sums of the thread's warpgroup, of at least one stage.
template <ExpertLayout LEFT, ExpertLayout RIGHT, class X>
__device__ inline void expert_multiply_all_(ExpertWgmmaSums_& sums, ExpertPipe_<X>* pipe,
                                            const ExpertJob_& job) {
    constexpr int IS_LEFT_ACROSS = LEFT == EXPERT_ACROSS, IS_RIGHT_ACROSS = RIGHT == EXPERT_ACROSS;
    const int group = (int)threadIdx.x / 128, is_signal = threadIdx.x % 32 == 0,
              is_staggered = job.K > EXPERT_STAGES_ * WGMMA_DEPTH;
    if (is_staggered && group == 1) {
        expert_fall_behind_(pipe);
    }
    for (int k = 0; k < job.K; k += WGMMA_DEPTH) {
        const int stage = pipe->passed % EXPERT_STAGES_, round = pipe->passed / EXPERT_STAGES_;
        X* tiles = pipe->stages + stage * (EXPERT_LEFT_ + EXPERT_RIGHT_);
        const uint64_t left = wgmma_descriptor(ptx_shared_address(tiles + group * 64 * WGMMA_DEPTH),
                                               IS_LEFT_ACROSS * WGMMA_DEPTH),
                       right = wgmma_descriptor(ptx_shared_address(tiles + EXPERT_LEFT_),
                                                IS_RIGHT_ACROSS * WGMMA_DEPTH);
        mbarrier_wait(pipe->full + stage, round % 2);
        if constexpr (IS_LEFT_ACROSS) {
            if (job.K - k < WGMMA_DEPTH) {
                expert_clear_(tiles, job.K - k);
            }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < WGMMA_DEPTH / 16; i++) {
            wgmma<X, IS_LEFT_ACROSS, IS_RIGHT_ACROSS>(sums, left + i * wgmma_step(IS_LEFT_ACROSS),
                                                      right + i * wgmma_step(IS_RIGHT_ACROSS), k + i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0 && is_signal) { // nobody reads the stage before this one any more
            mbarrier_arrive(pipe->empty + (pipe->passed - 1) % EXPERT_STAGES_);
        }
        if (is_staggered && group == 0 && is_signal && k == (EXPERT_AHEAD_ - 1) * WGMMA_DEPTH) {
            mbarrier_arrive(pipe->ahead);
        }
        pipe->passed++;
    }
    wgmma_wait<0>();
    wgmma_settle(sums);
    if (is_signal) {
        mbarrier_arrive(pipe->empty + (pipe->passed - 1) % EXPERT_STAGES_);
    }
}

// Writes the sums of a warp, 64 columns at a time, through its part of `results`.
template <class OUT>
__device__ inline void expert_write_all_(const ExpertResult<OUT>& out, const ExpertWgmmaSums_& sums,
                                         float* results) {
    constexpr int SIZE = Pack<OUT>::SIZE, PACKS = EXPERT_CHUNK_ / SIZE;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, packs = out.stride % SIZE == 0;
    float* tile = results + warp * EXPERT_RESULTS_;
#pragma unroll
    for (int chunk = 0; chunk < EXPERT_WIDE_ / EXPERT_CHUNK_; chunk++) {
#pragma unroll
        for (int i = 0; i < EXPERT_CHUNK_ / 4; i++) {
            const int n = i / 2, half = i % 2, row = 8 * half + lane / 4, col = 8 * n + lane % 4 * 2;
            const float* from = sums[chunk * EXPERT_CHUNK_ / 8 + n] + 2 * half;
            *reinterpret_cast<float2*>(tile + expert_place(row, col)) = make_float2(from[0], from[1]);
        }
        __syncwarp();
        for (int i = lane; i < 16 * PACKS; i += 32) {
            const int r = i / PACKS, c = i % PACKS * SIZE, row = warp * 16 + r,
                      col = chunk * EXPERT_CHUNK_ + c;
            float values[SIZE];
#pragma unroll
            for (int j = 0; j < SIZE; j += 4) {
                unpack(values + j, load_pack(tile + expert_place(r, c) + j));
            }
            if (row < out.rows && col < out.cols) {
                expert_store(out.data + row * out.stride + col, values, out.cols - col, packs, out.mode);
            }
        }
        __syncwarp();
    }
}

// Sets the results of a job without steps to zeros.
template <class OUT> __device__ inline void expert_write_zeros_(const ExpertResult<OUT>& out) {
    constexpr int SIZE = Pack<OUT>::SIZE, PACKS = EXPERT_WIDE_ / SIZE;
    const float zeros[SIZE] = {};
    for (int i = (int)threadIdx.x; i < EXPERT_SIDE * PACKS; i += EXPERT_MULTIPLIERS_) {
        const int row = i / PACKS, col = i % PACKS * SIZE;
        if (row < out.rows && col < out.cols) {
            expert_store(out.data + row * out.stride + col, zeros, out.cols - col, out.stride % SIZE == 0,
                         GRADIENT_SET);
        }
    }
}

// ---- the kernel ----

// A block computes jobs as it finds them: tiles of `out`, whose rows have jobs.width elements.
// grid   at most one block per multiprocessor      block   384      shared   226 KiB
// moves  the left operand width / 256 times, the right one once for 128 rows, mostly from L2; the
//        results once, twice if added to. Bound by tensor cores if experts have hundreds of rows:
//        2*M*C*OC FLOP at 990 TFLOP/s by the datasheet, of which cublasLt reaches 700.
// order  fixed
// needs  C and the distance of rows of inp and dout multiples of a pack, aligned addresses
template <ExpertLayout LEFT, ExpertLayout RIGHT, class X, class Jobs, class OUT>
__global__ void __launch_bounds__(EXPERT_WGMMA_THREADS_, 1)
    expert_wgmma_kernel(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
                        OUT* out, Jobs jobs, unsigned* taken, unsigned tiles, GradientMode mode) {
    SMEM_DYNAMIC(unsigned char, memory);
    ExpertPipe_<X> pipe = expert_pipe_<X>(memory);
    ExpertJob_ job;
    int i;
    if (threadIdx.x >= EXPERT_MULTIPLIERS_) {
        registers_fewer<40>();
        if (threadIdx.x < EXPERT_MULTIPLIERS_ + 32) {
            for (int n = 0; (i = expert_take_(pipe, n, taken, tiles)) >= 0; n++) {
                if (jobs.at(&job, i)) {
                    expert_fill_all_<LEFT, RIGHT>(&pipe, &left, &right, job);
                }
            }
        }
    } else {
        registers_more<232>();
        for (int n = 0; (i = expert_next_(pipe, n)) >= 0; n++) {
            if (!jobs.at(&job, i)) {
                continue;
            }
            const ExpertResult<OUT> result = {out + (size_t)job.out * jobs.width + job.col,
                                              (size_t)jobs.width, job.rows, jobs.width - job.col, mode};
            if (job.K > 0) {
                ExpertWgmmaSums_ sums;
                expert_multiply_all_<LEFT, RIGHT>(sums, &pipe, job);
                expert_write_all_(result, sums, pipe.results);
            } else if (mode == GRADIENT_SET) {
                expert_write_zeros_(result);
            }
        }
    }
}

// ---- launchers ----

// Returns the rows of a box of TMA: the rows of a side, or of the steps of a tile.
static inline int expert_box_(ExpertLayout layout, int side) {
    return layout == EXPERT_ALONG ? side : (int)WGMMA_DEPTH;
}

static inline unsigned expert_blocks_(int tiles, const Gpu* gpu) {
    return (unsigned)(tiles < gpu->multiprocessors ? tiles : gpu->multiprocessors);
}

// Computes `width` columns, each a sum of K products.
template <ExpertLayout WEIGHT, class OUT, class X>
static inline void expert_wgmma_rows(OUT* out, const X* inp, const X* weight, const ExpertRows* rows,
                                     ExpertMatrix matrix, GradientMode mode, const Gpu* gpu) {
    const int C = matrix.C, OC = matrix.OC, is_along = WEIGHT == EXPERT_ALONG, K = is_along ? C : OC,
              width = is_along ? OC : C;
    const CUtensorMap left = tensor_map(inp, K, rows->all, 1, expert_padded(K), EXPERT_SIDE),
                      right = tensor_map(weight, C, OC, rows->E, C, expert_box_(WEIGHT, EXPERT_WIDE_));
    const ExpertRowsJobs_ jobs = {*rows, K, width};
    const int tiles = expert_tiles(rows) * ceil_div(width, (int)EXPERT_WIDE_);
    launch(expert_wgmma_kernel<EXPERT_ALONG, WEIGHT, X, ExpertRowsJobs_, OUT>, expert_blocks_(tiles, gpu),
           EXPERT_WGMMA_THREADS_, EXPERT_WGMMA_BYTES_, gpu, left, right, out, jobs, gpu->taken,
           (unsigned)tiles, mode);
}

template <class OUT, class X>
static inline void expert_wgmma_weight(OUT* dweight, const X* dout, const X* inp, const ExpertRows* rows,
                                       ExpertMatrix matrix, GradientMode mode, const Gpu* gpu) {
    const int C = matrix.C, OC = matrix.OC;
    const CUtensorMap left = tensor_map(dout, OC, rows->all, 1, expert_padded(OC), WGMMA_DEPTH),
                      right = tensor_map(inp, C, rows->all, 1, C, WGMMA_DEPTH);
    const ExpertWeightJobs_ jobs = {*rows, OC, C};
    const int tiles = rows->E * ceil_div(OC, (int)EXPERT_SIDE) * ceil_div(C, (int)EXPERT_WIDE_);
    launch(expert_wgmma_kernel<EXPERT_ACROSS, EXPERT_ACROSS, X, ExpertWeightJobs_, OUT>,
           expert_blocks_(tiles, gpu), EXPERT_WGMMA_THREADS_, EXPERT_WGMMA_BYTES_, gpu, left, right, dweight,
           jobs, gpu->taken, (unsigned)tiles, mode);
}

#endif

#endif
