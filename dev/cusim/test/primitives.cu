// primitives.cu -- built-in variables, primitives of blocks and warps, atomics, intrinsics and
// asynchronous copies behave as the CUDA documentation says.
#include "llmc/gpu/gpu.cuh"
#include "dev/test/lib/test.h"
#include <cooperative_groups.h>

// Runs the kernel with `out` (n ints, zeroed) and fetches them.
template <typename K>
static void run(const Gpu* gpu, K kernel, dim3 grid, dim3 block, size_t shared_bytes, int* got, int n) {
    int* out = (int*)gpu_alloc((size_t)n, sizeof(int), "out");
    launch(kernel, grid, block, shared_bytes, gpu, out);
    CUDA_CHECK(cudaMemcpyAsync(got, out, (size_t)n * sizeof(int), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(out);
}

// ---- indices ----

// Each of 2*3*2 blocks of 5*4*2 threads counts itself at its linear index.
__global__ void indices_kernel(int* out) {
    const int block = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    const int thread = (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    atomicAdd(&out[block * 40 + thread], 1 + thread % 32 - (int)cusim_lane());
}
static void test_indices(const Gpu* gpu) {
    int got[480];
    run(gpu, indices_kernel, dim3(2, 3, 2), dim3(5, 4, 2), 0, got, 480);
    for (int i = 0; i < 480; i++) {
        EXPECT(got[i] == 1, "thread %d ran %d times", i, got[i]);
    }
}

// ---- warps ----

// Columns of results, one for each primitive.
enum { SHFL, SHFL_8, UP, DOWN, XOR, XOR_OUT, BALLOT, ANY, ALL, MATCH, ADD, MAX, OR, ACTIVE, WARP_COLUMNS };

__global__ void warp_kernel(int* out) {
    const int lane = (int)threadIdx.x;
    const unsigned all = 0xffffffffu;
    int* mine = out + lane * WARP_COLUMNS;
    mine[SHFL] = __shfl_sync(all, 100 + lane, 35);
    mine[SHFL_8] = __shfl_sync(all, 100 + lane, 3, 8);
    mine[UP] = __shfl_up_sync(all, 100 + lane, 2, 16);
    mine[DOWN] = __shfl_down_sync(all, 100 + lane, 2);
    mine[XOR] = __shfl_xor_sync(all, 100 + lane, 5);
    mine[XOR_OUT] = __shfl_xor_sync(all, 100 + lane, 8, 8);
    mine[BALLOT] = (int)__ballot_sync(all, lane % 3 == 0);
    mine[ANY] = __any_sync(all, lane == 7) + 2 * __any_sync(all, 0);
    mine[ALL] = __all_sync(all, 1) + 2 * __all_sync(all, lane != 7);
    mine[MATCH] = (int)__match_any_sync(all, lane / 4);
    mine[ADD] = (int)__reduce_add_sync(all, (unsigned)lane);
    mine[MAX] = __reduce_max_sync(all, lane - 40);
    mine[OR] = (int)__reduce_or_sync(all, 1u << lane);
    if (lane < 20) {
        // a part of the warp, each reads lane 19
        mine[ACTIVE] = __shfl_down_sync(0xfffffu, lane, 19 - lane);
    }
}
static void test_warp(const Gpu* gpu) {
    int got[32 * WARP_COLUMNS];
    unsigned threes = 0;
    for (int lane = 0; lane < 32; lane += 3) {
        threes |= 1u << lane;
    }
    run(gpu, warp_kernel, 1, 32, 0, got, 32 * WARP_COLUMNS);
    for (int lane = 0; lane < 32; lane++) {
        const int want[WARP_COLUMNS] = {103,
                                        100 + lane / 8 * 8 + 3,
                                        100 + (lane % 16 < 2 ? lane : lane - 2),
                                        100 + (lane + 2 > 31 ? lane : lane + 2),
                                        100 + (lane ^ 5),
                                        100 + lane,
                                        (int)threes,
                                        1,
                                        1,
                                        (int)(0xfu << lane / 4 * 4),
                                        496,
                                        -9,
                                        -1,
                                        lane < 20 ? 19 : 0};
        for (int column = 0; column < WARP_COLUMNS; column++) {
            const int value = got[lane * WARP_COLUMNS + column];
            EXPECT(value == want[column], "lane %d column %d: %d, wanted %d", lane, column, value,
                   want[column]);
        }
    }
}

// Shuffles every type that can be shuffled; the last warp has 8 lanes.
__global__ void shuffle_types_kernel(int* out) {
    const unsigned mask = threadIdx.x < 32 ? 0xffffffffu : 0xffu;
    const int other = (int)(threadIdx.x ^ 1u);
    const float4 v = __shfl_xor_sync(mask, make_float4(0, 0, 0, (float)threadIdx.x), 1);
    const bf16 b = __shfl_xor_sync(mask, __float2bfloat16_rn((float)threadIdx.x), 1);
    const fp16 h = __shfl_xor_sync(mask, __float2half_rn((float)threadIdx.x), 1);
    const double d = __shfl_xor_sync(mask, (double)threadIdx.x, 1);
    out[threadIdx.x] = v.w == other && to_float(b) == other && to_float(h) == other && d == other;
}
static void test_shuffle_types(const Gpu* gpu) {
    int got[40];
    run(gpu, shuffle_types_kernel, 1, 40, 0, got, 40);
    for (int i = 0; i < 40; i++) {
        EXPECT(got[i] == 1, "thread %d", i);
    }
}

// ---- blocks and grids ----

__global__ void predicates_kernel(int* out) {
    const int i = (int)threadIdx.x;
    const int count = __syncthreads_count(i % 3 == 0), any = __syncthreads_or(i == 50),
              none = __syncthreads_or(0), all = __syncthreads_and(i < 96), most = __syncthreads_and(i < 95);
    out[i] = count * 16 + any * 8 + none * 4 + all * 2 + most;
}
static void test_predicates(const Gpu* gpu) {
    int got[96];
    run(gpu, predicates_kernel, 1, 96, 0, got, 96);
    for (int i = 0; i < 96; i++) {
        EXPECT(got[i] == 32 * 16 + 8 + 2, "thread %d: %d", i, got[i]);
    }
}

// Warp 0 fills a buffer that the others empty, with a named barrier for each direction.
__global__ void named_barriers_kernel(int* out) {
    SMEM_ARRAY(int, buffer, [1]);
    for (int k = 0; k < 5; k++) {
        if (threadIdx.x < 32) {
            if (k) {
                cusim_bar_sync(2, 96, __FILE__, __LINE__);
            }
            if (threadIdx.x == 0) {
                buffer[0] = k;
            }
            cusim_bar_arrive(1, 96, __FILE__, __LINE__);
        } else {
            cusim_bar_sync(1, 96, __FILE__, __LINE__);
            out[threadIdx.x] = out[threadIdx.x] * 10 + buffer[0];
            if (k < 4) {
                cusim_bar_arrive(2, 96, __FILE__, __LINE__);
            }
        }
    }
}
static void test_named_barriers(const Gpu* gpu) {
    int got[96];
    run(gpu, named_barriers_kernel, 1, 96, 0, got, 96);
    for (int i = 32; i < 96; i++) {
        EXPECT(got[i] == 1234, "thread %d: %d", i, got[i]);
    }
}

__global__ void grid_sync_kernel(int* out) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), n = (int)(gridDim.x * blockDim.x);
    out[i] = i;
    for (int k = 0; k < 3; k++) { // three reversals are one
        cooperative_groups::this_grid().sync();
        const int opposite = out[n - 1 - i];
        cooperative_groups::this_grid().sync();
        out[i] = opposite;
    }
}
static void test_grid_sync(const Gpu* gpu) {
    int* out = (int*)gpu_alloc(256, sizeof(int), "out");
    int got[256];
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.gridDim = 4;
    config.blockDim = 64;
    config.stream = gpu->stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, grid_sync_kernel, out));
    CUDA_CHECK(cudaMemcpyAsync(got, out, sizeof(got), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < 256; i++) {
        EXPECT(got[i] == 255 - i, "thread %d: %d", i, got[i]);
    }
    gpu_free(out);
}

// The last block to finish adds up what all have written: fence, counter, fence.
__global__ void last_block_kernel(int* out) {
    if (threadIdx.x == 0) {
        out[2 + blockIdx.x] = (int)blockIdx.x + 1;
        __threadfence();
        if (atomicInc((unsigned*)&out[0], gridDim.x - 1) == gridDim.x - 1) {
            __threadfence();
            for (unsigned b = 0; b < gridDim.x; b++) {
                out[1] += out[2 + b];
            }
        }
    }
}
static void test_last_block(const Gpu* gpu) {
    int got[12];
    run(gpu, last_block_kernel, 10, 32, 0, got, 12);
    EXPECT(got[0] == 0 && got[1] == 55, "counter %d, sum %d", got[0], got[1]);
}

// Uses all of 100 KiB.
__global__ void dynamic_kernel(int* out) {
    SMEM_DYNAMIC(int, s);
    for (int i = (int)threadIdx.x; i < 25600; i += 64) {
        s[i] = i;
    }
    __syncthreads();
    out[64 * blockIdx.x + threadIdx.x] = s[25599 - threadIdx.x] + (int)((uintptr_t)s % 1024);
}
static void test_dynamic(const Gpu* gpu) {
    int got[128];
    run(gpu, dynamic_kernel, 2, 64, 102400, got, 128);
    for (int i = 0; i < 128; i++) {
        EXPECT(got[i] == 25599 - i % 64, "thread %d: %d", i, got[i]);
    }
}

// ---- atomics and intrinsics ----

struct Sums {
    unsigned long long u64;
    double f64;
    float f32;
    int i32, low, high, last;
    unsigned bits, flipped, cleared, turns, swaps;
    fp16 f16;
    bf16 b16;
    __half2 f16x2;
    __nv_bfloat162 b16x2;
};
static_assert(sizeof(Sums) % sizeof(int) == 0, "Sums in ints");

__global__ void atomics_kernel(int* out) {
    Sums* s = (Sums*)out;
    const int i = (int)threadIdx.x;
    atomicAdd(&s->u64, 1ull << 32);
    atomicAdd(&s->f64, 0.5);
    atomicAdd(&s->f32, 0.25f);
    atomicAdd(&s->i32, -2);
    atomicMin(&s->low, -i);
    atomicMax(&s->high, i);
    atomicExch(&s->last, 7);
    atomicOr(&s->bits, 1u << i % 32);
    atomicXor(&s->flipped, 5);
    atomicAnd(&s->cleared, 0);
    atomicInc(&s->turns, 9);
    atomicAdd(&s->f16, __float2half_rn(0.5f));
    atomicAdd(&s->b16, __float2bfloat16_rn(0.5f));
    atomicAdd(&s->f16x2, __floats2half2_rn(1, 2));
    atomicAdd(&s->b16x2, __floats2bfloat162_rn(1, 2));
    unsigned old = atomicAdd(&s->swaps, 0);
    for (unsigned assumed = old + 1; assumed != old;) { // an increment made of compare-and-swap
        assumed = old;
        old = atomicCAS(&s->swaps, assumed, assumed + 3);
    }
}
static void test_atomics(const Gpu* gpu) {
    Sums s;
    run(gpu, atomics_kernel, 1, 32, 0, (int*)&s, (int)(sizeof(s) / sizeof(int)));
    EXPECT(s.u64 == 32ull << 32 && s.f64 == 16 && s.f32 == 8 && s.i32 == -64, "sums");
    EXPECT(s.low == -31 && s.high == 31 && s.last == 7, "%d %d %d", s.low, s.high, s.last);
    EXPECT(s.bits == 0xffffffffu && s.flipped == 0 && s.cleared == 0, "%x %x %x", s.bits, s.flipped,
           s.cleared);
    EXPECT(s.turns == 2 && s.swaps == 96, "%u %u", s.turns, s.swaps);
    EXPECT(to_float(s.f16) == 16 && to_float(s.b16) == 16, "%g %g", to_float(s.f16), to_float(s.b16));
    EXPECT(to_float(s.f16x2.y) == 64 && to_float(s.b16x2.x) == 32, "pairs");
}

__global__ void bits_kernel(int* out) {
    int* next = out;
    *next++ =
        __popc(0xf0f0u) == 8 && __popcll(~0ull) == 64 && __clz(1) == 31 && __clz(0) == 32 && __clzll(1) == 63;
    *next++ = __ffs(8) == 4 && __ffs(0) == 0 && __ffsll(1ll << 40) == 41;
    *next++ = __umulhi(0x80000000u, 6) == 3 && __umul64hi(1ull << 63, 6) == 3;
    *next++ = __funnelshift_l(0x80000001u, 0x1u, 4) == 0x18u &&
              __funnelshift_r(0x80000001u, 0x1u, 4) == 0x18000000u;
    *next++ = __byte_perm(0x03020100u, 0x07060504u, 0x7250) == 0x07020500u;
    *next++ = __float_as_uint(1.0f) == 0x3f800000u && __int_as_float(0x40000000) == 2.0f;
    *next++ = __float2int_rn(2.5f) == 2 && __float2int_rd(-1.5f) == -2 && __float2int_rz(-1.5f) == -1;
    *next++ = __saturatef(NAN) == 0 && __saturatef(2) == 1 && __fmaf_rn(2, 3, 4) == 10 && rsqrtf(4) == 0.5f;
    *next++ = min(3u, 4u) == 3 && max(-1, 2) == 2 && max(1.5f, 2.5f) == 2.5f;
    *next++ = to_float(__hadd(__float2half_rn(1), __float2half_rn(2))) == 3 &&
              to_float(__hmul(__float2bfloat16_rn(3), __float2bfloat16_rn(2))) == 6;
    *next++ = to_float(__hfma(__float2half_rn(2), __float2half_rn(3), __float2half_rn(1))) == 7 &&
              to_float(__hmax(__float2bfloat16_rn(-1), __float2bfloat16_rn(4))) == 4;
    const float2 pair =
        __half22float2(__hfma2(__floats2half2_rn(1, 2), __floats2half2_rn(3, 4), __floats2half2_rn(5, 6)));
    *next++ = pair.x == 8 && pair.y == 14;
    const int4 four = make_int4(1, 2, 3, 4);
    int4 copy;
    __stcs(&copy, four);
    *next++ = __ldcs(&copy).w == 4 && __ldg(&copy.z) == 3 && __ldcg(&copy.y) == 2;
}
static void test_bits(const Gpu* gpu) {
    int got[13];
    run(gpu, bits_kernel, 1, 1, 0, got, 13);
    for (int i = 0; i < 13; i++) {
        EXPECT(got[i] == 1, "line %d of bits_kernel", i + 1);
    }
}

// ---- asynchronous copies. `out` starts with the numbers 0, 1, 2 ----

__global__ void count_kernel(int* out) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = (int)(blockIdx.x * blockDim.x + threadIdx.x);
}

// A pipeline of two stages: tile k+1 is copied while tile k is read. The last copy fills 8 bytes
// with zeros.
__global__ void copy_async_kernel(int* out) {
    SMEM_ARRAY(int4, stage, [2][32]);
    int sum = 0;
    cusim_cp_async(&stage[0][threadIdx.x], out + 4 * threadIdx.x, 16, 16);
    cusim_cp_async_commit();
    for (int k = 0; k < 4; k++) {
        if (k < 3) {
            cusim_cp_async(&stage[(k + 1) % 2][threadIdx.x], out + 128 * (k + 1) + 4 * threadIdx.x, 16,
                           k == 2 ? 8 : 16);
            cusim_cp_async_commit();
        }
        cusim_cp_async_wait(k < 3 ? 1 : 0);
        __syncthreads();
        const int4 v = stage[k % 2][31 - threadIdx.x];
        sum += v.x + v.y + v.z + v.w;
        __syncthreads();
    }
    out[512 + threadIdx.x] = sum;
}

// One producer thread, 96 consumers, two stages, an mbarrier for each direction and stage.
__global__ void bulk_copy_kernel(int* out) {
    SMEM_ARRAY(int, stage, [2][128]);
    SMEM_ARRAY(uint64_t, full, [2]);
    SMEM_ARRAY(uint64_t, empty, [2]);
    if (threadIdx.x < 2) {
        cusim_mbar_init(&full[threadIdx.x], 1);
        cusim_mbar_init(&empty[threadIdx.x], 96);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int k = 0; k < 4; k++) {
            if (k >= 2) {
                cusim_mbar_wait(&empty[k % 2], (unsigned)(k / 2 - 1) & 1, __FILE__, __LINE__);
            }
            cusim_mbar_arrive(&full[k % 2], 512, __FILE__, __LINE__);
            cusim_bulk_g2s(stage[k % 2], out + 128 * k, 512, &full[k % 2]);
        }
    } else if (threadIdx.x >= 32) {
        int sum = 0;
        for (int k = 0; k < 4; k++) {
            cusim_mbar_wait(&full[k % 2], (unsigned)(k / 2) & 1, __FILE__, __LINE__);
            for (int i = (int)threadIdx.x - 32; i < 128; i += 96) {
                sum += stage[k % 2][i];
            }
            cusim_mbar_arrive(&empty[k % 2], 0, __FILE__, __LINE__);
        }
        out[512 + threadIdx.x] = sum;
    }
}

static long sum_of_last(const Gpu* gpu, void (*kernel)(int*), int threads) {
    static int got[512 + 128];
    int* out = (int*)gpu_alloc(512 + 128, sizeof(int), "out");
    launch(count_kernel, 4, 128, 0, gpu, out);
    launch(kernel, 1, threads, 0, gpu, out);
    CUDA_CHECK(cudaMemcpyAsync(got, out, sizeof(got), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(out);
    long sum = 0;
    for (int i = 512; i < 512 + 128; i++) {
        sum += got[i];
    }
    return sum;
}
static void test_copies(const Gpu* gpu) {
    long all = 511 * 512 / 2, zeroed = 0;
    for (int i = 384; i < 512; i++) {
        zeroed += i % 4 >= 2 ? i : 0;
    }
    const long async_sum = sum_of_last(gpu, copy_async_kernel, 32),
               bulk_sum = sum_of_last(gpu, bulk_copy_kernel, 128);
    EXPECT(async_sum == all - zeroed, "%ld, wanted %ld", async_sum, all - zeroed);
    EXPECT(bulk_sum == all, "%ld, wanted %ld", bulk_sum, all);
}

int main(void) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_indices(&gpu);
    test_warp(&gpu);
    test_shuffle_types(&gpu);
    test_predicates(&gpu);
    test_named_barriers(&gpu);
    test_grid_sync(&gpu);
    test_last_block(&gpu);
    test_dynamic(&gpu);
    test_atomics(&gpu);
    test_bits(&gpu);
    test_copies(&gpu);
    gpu_close(&gpu);
    return test_done("primitives");
}
