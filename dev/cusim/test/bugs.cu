/*
bugs.cu -- planted bugs, to check that the CPU device and the sanitizers notice them.

    bugs list       each bug, and the mode of run.sh that must notice it
    bugs NAME       the program with this bug: exit status 0 if nothing was noticed
    bugs fixed      all the programs without their bugs: exit status 0

Every program is a template on FIXED, so that the difference between the bug and the correct program
is one expression.
*/
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/wgmma.cuh"
#include <cooperative_groups.h>
#include <cublasLt.h>

// ---- helpers ----

static float* device_floats(const Gpu* gpu, int n, float value) {
    float* host = (float*)malloc((size_t)n * sizeof(float));
    float* data = (float*)gpu_alloc((size_t)n, sizeof(float), "floats");
    for (int i = 0; i < n; i++) {
        host[i] = value;
    }
    CUDA_CHECK(cudaMemcpyAsync(data, host, (size_t)n * sizeof(float), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(host);
    return data;
}

// Returns the sum of n floats, weighted 1, 2, 3... so that their order matters; frees them.
static double weighted_sum(const Gpu* gpu, float* data, int n) {
    float* host = (float*)malloc((size_t)n * sizeof(float));
    CUDA_CHECK(cudaMemcpyAsync(host, data, (size_t)n * sizeof(float), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)host[i] * (i + 1);
    }
    free(host);
    gpu_free(data);
    return sum;
}

static bool is(double got, double want) {
    if (!(fabs(got - want) < 1e-3)) {
        printf("WRONG: %g, wanted %g\n", got, want);
    }
    return fabs(got - want) < 1e-3;
}

static double weights(int n) { return (double)n * (n + 1) / 2; }

// ---- accesses to memory ----

template <bool FIXED> __global__ void write_past_global_kernel(float* x, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n + !FIXED) {
        x[i] = 2;
    }
}
template <bool FIXED> static bool write_past_global(const Gpu* gpu) {
    float* x = device_floats(gpu, 100, 1);
    launch(write_past_global_kernel<FIXED>, 1, 128, 0, gpu, x, 100);
    return is(weighted_sum(gpu, x, 100), 2 * weights(100));
}

template <bool FIXED> __global__ void write_past_shared_kernel(float* x) {
    SMEM_ARRAY(float, s, [64]);
    s[threadIdx.x + !FIXED] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x ? threadIdx.x : 1];
}
template <bool FIXED> static bool write_past_shared(const Gpu* gpu) {
    float* x = device_floats(gpu, 64, 0);
    launch(write_past_shared_kernel<FIXED>, 1, 64, 0, gpu, x);
    return is(weighted_sum(gpu, x, 64), weights(64));
}

__global__ void fill_dynamic_kernel(float* x) {
    SMEM_DYNAMIC(float, s);
    s[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];
}
template <bool FIXED> static bool dynamic_shared_too_small(const Gpu* gpu) {
    float* x = device_floats(gpu, 64, 0);
    launch(fill_dynamic_kernel, 1, 64, (FIXED ? 64 : 63) * sizeof(float), gpu, x);
    return is(weighted_sum(gpu, x, 64), weights(64));
}

template <bool FIXED> __global__ void too_much_static_shared_kernel(float* x) {
    SMEM_ARRAY(float, s, [FIXED ? 12288 : 12289]);
    s[threadIdx.x] = 1;
    x[threadIdx.x] = s[threadIdx.x];
}
template <bool FIXED> static bool too_much_static_shared(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 0);
    launch(too_much_static_shared_kernel<FIXED>, 1, 32, 0, gpu, x);
    return is(weighted_sum(gpu, x, 32), weights(32));
}

// Each kind alone fits into the 48 KiB that a block gets without permission; launch() asks for
// dynamic memory alone.
template <bool FIXED> __global__ void static_beside_dynamic_kernel(float* x) {
    SMEM_ARRAY(float, s, [FIXED ? 256 : 1024]);
    SMEM_DYNAMIC(float, d);
    s[threadIdx.x] = d[threadIdx.x] = 1;
    x[threadIdx.x] = s[threadIdx.x] * d[threadIdx.x];
}
template <bool FIXED> static bool static_beside_dynamic(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 0);
    launch(static_beside_dynamic_kernel<FIXED>, 1, 32, 45 << 10, gpu, x);
    return is(weighted_sum(gpu, x, 32), weights(32));
}

template <bool FIXED> __global__ void misaligned_vector_kernel(float* x) {
    const float4 v = *(const float4*)(x + !FIXED + 4 * threadIdx.x);
    x[4 * threadIdx.x] = v.x;
}
template <bool FIXED> static bool misaligned_vector(const Gpu* gpu) {
    float* x = device_floats(gpu, 64, 1);
    launch(misaligned_vector_kernel<FIXED>, 1, 8, 0, gpu, x);
    return is(weighted_sum(gpu, x, 64), weights(64));
}

// Branches on uninitialized values. (A sum of them would show in its value: garbage is NaN.)
__global__ void is_positive_kernel(float* out, const float* x) { out[threadIdx.x] = x[threadIdx.x] > 0; }
template <bool FIXED> static bool uninitialized_global(const Gpu* gpu) {
    float *out = device_floats(gpu, 32, 0), *x = NULL;
    CUDA_CHECK(cudaMalloc((void**)&x, 32 * sizeof(float))); // gpu_alloc would zero it
    if (FIXED) {
        CUDA_CHECK(cudaMemsetAsync(x, 0, 32 * sizeof(float), gpu->stream));
    }
    launch(is_positive_kernel, 1, 32, 0, gpu, out, x);
    const double sum = weighted_sum(gpu, out, 32);
    gpu_free(x);
    return is(sum, 0);
}

template <bool FIXED> __global__ void uninitialized_shared_kernel(float* out) {
    SMEM_ARRAY(float, s, [32]);
    if (threadIdx.x < 31 + FIXED) {
        s[threadIdx.x] = 1;
    }
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x] > 5;
}
template <bool FIXED> static bool uninitialized_shared(const Gpu* gpu) {
    float* out = device_floats(gpu, 32, 0);
    launch(uninitialized_shared_kernel<FIXED>, 1, 32, 0, gpu, out);
    return is(weighted_sum(gpu, out, 32), 0);
}

// A lane reads a value that another one never wrote.
template <bool FIXED> __global__ void uninitialized_shuffle_kernel(float* out, const float* x) {
    const float mine = x[FIXED ? 0 : threadIdx.x];
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, mine, 1) > 5;
}
template <bool FIXED> static bool uninitialized_shuffle(const Gpu* gpu) {
    float *out = device_floats(gpu, 32, 0), *x = NULL;
    CUDA_CHECK(cudaMalloc((void**)&x, 32 * sizeof(float)));
    CUDA_CHECK(cudaMemsetAsync(x, 0, 31 * sizeof(float), gpu->stream));
    launch(uninitialized_shuffle_kernel<FIXED>, 1, 32, 0, gpu, out, x);
    const double sum = weighted_sum(gpu, out, 32);
    gpu_free(x);
    return is(sum, 0);
}

template <bool FIXED> __global__ void index_overflow_kernel(float* x, int stride) {
    const int i = FIXED ? 1 : stride * (int)(threadIdx.x + 1);
    x[threadIdx.x] = i != 0;
}
template <bool FIXED> static bool index_overflow(const Gpu* gpu) {
    float* x = device_floats(gpu, 31, 0);
    launch(index_overflow_kernel<FIXED>, 1, 31, 0, gpu, x, 1 << 27);
    return is(weighted_sum(gpu, x, 31), weights(31));
}

__global__ void fill_kernel(float* x, float value) { x[threadIdx.x] = value; }
__global__ void add_kernel(float* out, const float* x) { out[threadIdx.x] += x[threadIdx.x]; }

template <bool FIXED> static bool host_pointer_to_kernel(const Gpu* gpu) {
    float host[32] = {0}, *x = device_floats(gpu, 32, 0);
    launch(fill_kernel, 1, 32, 0, gpu, FIXED ? x : host, 1.0f);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    const double sum = weighted_sum(gpu, x, 32);
    return is(sum + host[0], weights(32));
}

template <bool FIXED> static bool host_reads_device_memory(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 1);
    volatile float mine = FIXED ? 1 : x[3];
    return is(weighted_sum(gpu, x, 32) + mine, weights(32) + 1);
}

template <bool FIXED> static bool use_after_free(const Gpu* gpu) {
    float *x = device_floats(gpu, 32, 1), *out = device_floats(gpu, 32, 0);
    if (!FIXED) {
        gpu_free(x);
    }
    launch(add_kernel, 1, 32, 0, gpu, out, x);
    const double sum = weighted_sum(gpu, out, 32);
    if (FIXED) {
        gpu_free(x);
    }
    return is(sum, weights(32));
}

// ---- barriers and races ----

template <bool FIXED> __global__ void missing_syncthreads_kernel(float* x) {
    SMEM_ARRAY(float, s, [256]);
    s[threadIdx.x] = x[threadIdx.x];
    if (FIXED) {
        __syncthreads();
    }
    x[threadIdx.x] = s[255 - threadIdx.x];
}
template <bool FIXED> static bool missing_syncthreads(const Gpu* gpu) {
    float* x = device_floats(gpu, 256, 1);
    launch(missing_syncthreads_kernel<FIXED>, 1, 256, 0, gpu, x);
    return is(weighted_sum(gpu, x, 256), weights(256));
}

// Correct if threads run one after the other from the first.
template <bool FIXED> __global__ void missing_syncthreads_upward_kernel(float* x) {
    SMEM_ARRAY(float, s, [256]);
    s[threadIdx.x] = 1;
    if (FIXED) {
        __syncthreads();
    }
    x[threadIdx.x] = threadIdx.x ? s[threadIdx.x - 1] : 1;
}
template <bool FIXED> static bool missing_syncthreads_upward(const Gpu* gpu) {
    float* x = device_floats(gpu, 256, 0);
    launch(missing_syncthreads_upward_kernel<FIXED>, 1, 256, 0, gpu, x);
    return is(weighted_sum(gpu, x, 256), weights(256));
}

// Writes the array again while slow warps still read it.
template <bool FIXED> __global__ void missing_syncthreads_before_reuse_kernel(float* x) {
    SMEM_ARRAY(float, s, [8]);
    float sum = 0;
    for (int k = 0; k < 4; k++) {
        const float of_warp = warp_sum((float)k);
        if (threadIdx.x % 32 == 0) {
            s[threadIdx.x / 32] = of_warp;
        }
        __syncthreads();
        for (int w = 0; w < 8; w++) {
            sum += s[w];
        }
        if (FIXED) {
            __syncthreads();
        }
    }
    x[threadIdx.x] = sum;
}
template <bool FIXED> static bool missing_syncthreads_before_reuse(const Gpu* gpu) {
    float* x = device_floats(gpu, 256, 0);
    launch(missing_syncthreads_before_reuse_kernel<FIXED>, 1, 256, 0, gpu, x);
    return is(weighted_sum(gpu, x, 256), 8 * 32 * 6 * weights(256));
}

template <bool FIXED> __global__ void missing_syncwarp_kernel(float* x) {
    SMEM_ARRAY(float, s, [32]);
    s[threadIdx.x] = x[threadIdx.x];
    if (FIXED) {
        __syncwarp();
    }
    x[threadIdx.x] = s[threadIdx.x ^ 1];
}
template <bool FIXED> static bool missing_syncwarp(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 1);
    launch(missing_syncwarp_kernel<FIXED>, 1, 32, 0, gpu, x);
    return is(weighted_sum(gpu, x, 32), weights(32));
}

// A shuffle is no barrier for memory.
template <bool FIXED> __global__ void shuffle_as_barrier_kernel(float* x) {
    SMEM_ARRAY(float, s, [32]);
    s[threadIdx.x] = 1;
    const float sum = warp_sum(1.0f);
    if (FIXED) {
        __syncwarp();
    }
    x[threadIdx.x] = s[threadIdx.x ^ 1] * sum;
}
template <bool FIXED> static bool shuffle_as_barrier(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 0);
    launch(shuffle_as_barrier_kernel<FIXED>, 1, 32, 0, gpu, x);
    return is(weighted_sum(gpu, x, 32), 32 * weights(32));
}

template <bool FIXED> __global__ void divergent_syncthreads_kernel(float* x) {
    if (FIXED || threadIdx.x < 40) {
        __syncthreads();
    }
    x[threadIdx.x] = 1;
}
template <bool FIXED> static bool divergent_syncthreads(const Gpu* gpu) {
    float* x = device_floats(gpu, 64, 0);
    launch(divergent_syncthreads_kernel<FIXED>, 1, 64, 0, gpu, x);
    return is(weighted_sum(gpu, x, 64), weights(64));
}

template <bool FIXED> __global__ void barrier_in_two_branches_kernel(float* x) {
    if (FIXED) {
        __syncthreads();
    } else if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    x[threadIdx.x] = 1;
}
template <bool FIXED> static bool barrier_in_two_branches(const Gpu* gpu) {
    float* x = device_floats(gpu, 64, 0);
    launch(barrier_in_two_branches_kernel<FIXED>, 1, 64, 0, gpu, x);
    return is(weighted_sum(gpu, x, 64), weights(64));
}

template <bool FIXED> __global__ void return_before_sum_kernel(float* x, int n) {
    const int i = (int)threadIdx.x;
    if (!FIXED && i >= n) {
        return;
    }
    x[i] = block_sum(i < n ? x[i] : 0.0f);
}
template <bool FIXED> static bool return_before_sum(const Gpu* gpu) {
    float* x = device_floats(gpu, 64, 1);
    launch(return_before_sum_kernel<FIXED>, 1, 64, 0, gpu, x, 40);
    return is(weighted_sum(gpu, x, 64), 40 * weights(64));
}

template <bool FIXED> __global__ void wrong_mask_kernel(float* x) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) {
        v += __shfl_xor_sync(FIXED ? 0xffffu : 0xffffffffu, v, 1);
    }
    x[threadIdx.x] = threadIdx.x < 16 ? v / 2 : v;
}
template <bool FIXED> static bool wrong_mask(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 1);
    launch(wrong_mask_kernel<FIXED>, 1, 32, 0, gpu, x);
    return is(weighted_sum(gpu, x, 32), weights(32));
}

template <bool FIXED> __global__ void shuffle_outside_mask_kernel(float* x) {
    if (threadIdx.x < 16) {
        x[threadIdx.x] = __shfl_sync(0xffffu, x[threadIdx.x], FIXED ? 15 : 16);
    }
}
template <bool FIXED> static bool shuffle_outside_mask(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 1);
    launch(shuffle_outside_mask_kernel<FIXED>, 1, 32, 0, gpu, x);
    return is(weighted_sum(gpu, x, 32), weights(32));
}

// Correct if blocks run one after the other.
template <bool FIXED> __global__ void race_between_blocks_kernel(float* x) {
    if (threadIdx.x == 3 && FIXED) {
        atomicAdd(x, 1.0f);
    } else if (threadIdx.x == 3) {
        x[0] = x[0] + 1;
    }
}
template <bool FIXED> static bool race_between_blocks(const Gpu* gpu) {
    float* x = device_floats(gpu, 1, 0);
    launch(race_between_blocks_kernel<FIXED>, 8, 32, 0, gpu, x);
    return is(weighted_sum(gpu, x, 1), 8);
}

// The last block to finish adds up what all have written.
template <bool FIXED> __global__ void missing_fence_kernel(float* x, int* finished) {
    x[1 + blockIdx.x] = 1;
    if (FIXED) {
        __threadfence();
    }
    if (atomicAdd(finished, 1) == (int)gridDim.x - 1) {
        __threadfence();
        for (unsigned b = 0; b < gridDim.x; b++) {
            x[0] += x[1 + b];
        }
    }
}
template <bool FIXED> static bool missing_fence(const Gpu* gpu) {
    float* x = device_floats(gpu, 9, 0);
    int* finished = (int*)gpu_alloc(1, sizeof(int), "finished");
    launch(missing_fence_kernel<FIXED>, 8, 1, 0, gpu, x, finished);
    const double sum = weighted_sum(gpu, x, 9);
    gpu_free(finished);
    return is(sum, 8 + weights(9) - 1);
}

template <bool FIXED> __global__ void missing_grid_sync_kernel(float* x, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    x[i] = (float)i;
    if (FIXED) {
        cooperative_groups::this_grid().sync();
    }
    const float opposite = x[n - 1 - i];
    cooperative_groups::this_grid().sync();
    x[i] = opposite + (float)i;
}
static void launch_cooperatively(void (*kernel)(float*, int), const Gpu* gpu, float* x, int n,
                                 int cooperative) {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = cooperative;
    config.gridDim = n / 64;
    config.blockDim = 64;
    config.stream = gpu->stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, x, n));
}
template <bool FIXED> static bool missing_grid_sync(const Gpu* gpu) {
    float* x = device_floats(gpu, 256, 0);
    launch_cooperatively(missing_grid_sync_kernel<FIXED>, gpu, x, 256, 1);
    return is(weighted_sum(gpu, x, 256), 255 * weights(256));
}
template <bool FIXED> static bool grid_sync_without_cooperative_launch(const Gpu* gpu) {
    float* x = device_floats(gpu, 256, 0);
    launch_cooperatively(missing_grid_sync_kernel<true>, gpu, x, 256, FIXED);
    return is(weighted_sum(gpu, x, 256), 255 * weights(256));
}

// ---- asynchronous copies ----

// Each thread copies 16 bytes and reads those of another one.
template <bool WAIT, bool SYNC> __global__ void copy_async_kernel(float* x) {
    SMEM_ARRAY(float4, s, [64]);
    cusim_cp_async(&s[threadIdx.x], x + 4 * threadIdx.x, 16, 16);
    cusim_cp_async_commit();
    cusim_cp_async_wait(WAIT ? 0 : 1);
    if (SYNC) {
        __syncthreads();
    }
    const float4 v = s[63 - threadIdx.x];
    if (!WAIT) {
        cusim_cp_async_wait(0);
    }
    x[256 + threadIdx.x] = v.x + v.y + v.z + v.w;
}
template <bool WAIT, bool SYNC> static bool copy_async(const Gpu* gpu) {
    float* x = device_floats(gpu, 256 + 64, 1);
    launch(copy_async_kernel<WAIT, SYNC>, 1, 64, 0, gpu, x);
    return is(weighted_sum(gpu, x, 256 + 64), weights(320) + 3 * (weights(320) - weights(256)));
}
template <bool FIXED> static bool missing_copy_wait(const Gpu* gpu) { return copy_async<FIXED, true>(gpu); }
template <bool FIXED> static bool missing_barrier_after_copy(const Gpu* gpu) {
    return copy_async<true, FIXED>(gpu);
}

template <bool FIXED> __global__ void bulk_copy_of_fewer_bytes_kernel(float* x) {
    SMEM_ARRAY(float4, s, [32]);
    SMEM_ARRAY(uint64_t, full, [1]);
    if (threadIdx.x == 0) {
        cusim_mbar_init(full, 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        cusim_mbar_arrive(full, 512, __FILE__, __LINE__);
        cusim_bulk_g2s(s, x, FIXED ? 512 : 496, full);
    }
    cusim_mbar_wait(full, 0, __FILE__, __LINE__);
    x[128 + threadIdx.x] = s[31 - threadIdx.x].x;
}
template <bool FIXED> static bool bulk_copy_of_fewer_bytes(const Gpu* gpu) {
    float* x = device_floats(gpu, 128 + 32, 1);
    launch(bulk_copy_of_fewer_bytes_kernel<FIXED>, 1, 32, 0, gpu, x);
    return is(weighted_sum(gpu, x, 128 + 32), weights(160));
}

// Reads as a consumer that does not wait for the producer's copy.
template <bool FIXED> __global__ void missing_mbarrier_wait_kernel(float* x) {
    SMEM_ARRAY(float4, s, [32]);
    SMEM_ARRAY(uint64_t, full, [1]);
    if (threadIdx.x == 0) {
        cusim_mbar_init(full, 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        cusim_mbar_arrive(full, 512, __FILE__, __LINE__);
        cusim_bulk_g2s(s, x, 512, full);
    }
    if (FIXED || threadIdx.x < 16) {
        cusim_mbar_wait(full, 0, __FILE__, __LINE__);
    }
    x[128 + threadIdx.x] = s[31 - threadIdx.x].x;
}
template <bool FIXED> static bool missing_mbarrier_wait(const Gpu* gpu) {
    float* x = device_floats(gpu, 128 + 32, 1);
    launch(missing_mbarrier_wait_kernel<FIXED>, 1, 32, 0, gpu, x);
    return is(weighted_sum(gpu, x, 128 + 32), weights(160));
}

// ---- TMA and wgmma ----

typedef enum {
    WGMMA_FIXED,
    WGMMA_READ_EARLY,    // sums
    WGMMA_WRITTEN_EARLY, // sums
    WGMMA_LEFT_CHANGES,  // registers
    WGMMA_UNFENCED,      // registers
    WGMMA_WARPS_DIFFER,
    WGMMA_MISALIGNED,
    WGMMA_PAST_END,
    WGMMA_WARP_MISSING,
    PROXY_UNFENCED,
    PROXY_NO_BARRIER, // after the fence
    TMA_WRONG_PARITY,
    TMA_UNPUBLISHED,
    TMA_MISALIGNED,
    TMA_FEWER_BYTES,
    TMA_UNFENCED, // over stores
    REGISTERS_OF_HALF
} WgmmaBug;

// Each sum of a warpgroup is 64 products of ones, from TMA and from stores, and 16 of registers.
template <WgmmaBug BUG> __global__ void wgmma_kernel(const __grid_constant__ CUtensorMap map, float* out) {
    SMEM_DYNAMIC(unsigned char, memory);
    SMEM_ARRAY(uint64_t, full, [1]);
    unsigned char* base = memory + (1024 - ptx_shared_address(memory) % 1024) % 1024;
    unsigned char *a = base + (BUG == TMA_MISALIGNED ? 512 : 0), *b = base + 8192 + 1024;
    const int tid = (int)threadIdx.x, warp = tid / 32;
    if (BUG != REGISTERS_OF_HALF || tid < 64) {
        registers_more<240>();
    }
    if (tid == 0) {
        mbarrier_init(full, 1);
        if (BUG != TMA_UNPUBLISHED) {
            mbarrier_publish();
        }
    }
    const bf16 one = __float2bfloat16(1.0f);
    const unsigned ones = 0x3f803f80;
    const int4 pack = make_int4((int)ones, (int)ones, (int)ones, (int)ones);
    for (int i = tid; i < 512; i += 128) {
        store_for_async((int4*)b + i, pack);
    }
    if (BUG == TMA_UNFENCED && tid == 40) {
        store_for_async((bf16*)a, one);
    } else if (BUG != PROXY_UNFENCED && BUG != PROXY_NO_BARRIER) {
        fence_async();
    }
    __syncthreads();
    if (BUG == PROXY_NO_BARRIER) {
        fence_async();
    }
    if (tid == 0) {
        mbarrier_arrive_expect(full, BUG == TMA_FEWER_BYTES ? 8176 : 8192);
        tma_load_3d(a, &map, 0, 0, 0, full);
    }
    mbarrier_wait(full, BUG == TMA_WRONG_PARITY);
    float d[8][4], sum = 0;
    unsigned left[4] = {ones, ones, ones, ones};
    const uint64_t left_tile = wgmma_descriptor(ptx_shared_address(a), 0),
                   right = wgmma_descriptor(ptx_shared_address(b), 0) +
                           (BUG == WGMMA_MISALIGNED ? 128 >> 4 : 0) +
                           (BUG == WGMMA_PAST_END ? (uint64_t)(8192 >> 4) << 32 : 0) +
                           (BUG == WGMMA_WARPS_DIFFER && warp == 2 ? 2 : 0);
    if (BUG != WGMMA_UNFENCED) {
        wgmma_fence();
    }
    for (int i = 0; i < 4; i++) {
        wgmma<bf16, 0, 0>(d, left_tile + i * wgmma_step(0), right, i > 0);
    }
    if (BUG != WGMMA_WARP_MISSING || warp != 1) {
        wgmma_of_registers<bf16, 0>(d, left, right, 1);
    }
    wgmma_commit();
    left[1] = BUG == WGMMA_LEFT_CHANGES ? 0 : left[1];
    d[1][2] = BUG == WGMMA_WRITTEN_EARLY ? 0 : d[1][2];
    if (BUG != WGMMA_READ_EARLY) {
        wgmma_wait<0>();
        wgmma_settle(d);
    }
    for (int i = 0; i < 32; i++) {
        sum += d[i / 4][i % 4];
    }
    wgmma_wait<0>();
    out[tid] = sum;
}
template <WgmmaBug BUG> static bool wgmma_of_ones(const Gpu* gpu) {
    float *ones = device_floats(gpu, 64 * 32, 0), *out = device_floats(gpu, 128, 0);
    bf16 host[64 * 64];
    for (bf16& x : host) {
        x = __float2bfloat16(1.0f);
    }
    gpu_copy(ones, host, sizeof(host), gpu);
    launch(wgmma_kernel<BUG>, 1, 128, 1024 + 3 * 8192, gpu, tensor_map((const bf16*)ones, 64, 64, 1, 64, 64),
           out);
    const double sum = weighted_sum(gpu, out, 128);
    gpu_free(ones);
    return is(sum, 32 * 80 * weights(128));
}

// A tensor that the driver refuses: rows of 24 bytes.
template <bool FIXED> static bool tensor_of_odd_rows(const Gpu* gpu) {
    float* x = device_floats(gpu, 64, 1);
    tensor_map((const bf16*)x, FIXED ? 16 : 12, 4, 1, FIXED ? 16 : 12, 4);
    return is(weighted_sum(gpu, x, 64), weights(64));
}

// ---- streams, graphs, launches ----

static void two_streams(const Gpu* gpu, Gpu* a, Gpu* b) {
    *a = *b = *gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&a->stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking));
}

template <bool FIXED> static bool missing_event_wait(const Gpu* gpu) {
    float *x = device_floats(gpu, 32, 0), *out = device_floats(gpu, 32, 0);
    Gpu a, b;
    cudaEvent_t filled;
    two_streams(gpu, &a, &b);
    CUDA_CHECK(cudaEventCreate(&filled));
    launch(fill_kernel, 1, 32, 0, &a, x, 5.0f);
    CUDA_CHECK(cudaEventRecord(filled, a.stream));
    if (FIXED) {
        CUDA_CHECK(cudaStreamWaitEvent(b.stream, filled, 0));
    }
    launch(add_kernel, 1, 32, 0, &b, out, x);
    CUDA_CHECK(cudaStreamSynchronize(b.stream));
    CUDA_CHECK(cudaStreamSynchronize(a.stream));
    CUDA_CHECK(cudaEventDestroy(filled));
    gpu_free(x);
    return is(weighted_sum(gpu, out, 32), 5 * weights(32));
}

template <bool FIXED> static bool missing_stream_synchronize(const Gpu* gpu) {
    float *x = device_floats(gpu, 32, 0), *pinned = NULL;
    CUDA_CHECK(cudaMallocHost((void**)&pinned, 32 * sizeof(float)));
    pinned[0] = 0;
    launch(fill_kernel, 1, 32, 0, gpu, x, 5.0f);
    CUDA_CHECK(cudaMemcpyAsync(pinned, x, 32 * sizeof(float), cudaMemcpyDeviceToHost, gpu->stream));
    if (FIXED) {
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    }
    const float got = pinned[0];
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(x);
    CUDA_CHECK(cudaFreeHost(pinned));
    return is(got, 5);
}

// No manual promises that these wait for queued work.
template <bool FIXED> static bool freed_while_queued(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 0);
    launch(fill_kernel, 1, 32, 0, gpu, x, 5.0f);
    if (FIXED) {
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    }
    gpu_free(x);
    return true;
}

template <bool FIXED> static bool stream_destroyed_while_queued(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 0);
    Gpu other = *gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&other.stream, cudaStreamNonBlocking));
    launch(fill_kernel, 1, 32, 0, &other, x, 5.0f);
    if (FIXED) {
        CUDA_CHECK(cudaStreamSynchronize(other.stream));
    }
    CUDA_CHECK(cudaStreamDestroy(other.stream));
    return is(weighted_sum(gpu, x, 32), 5 * weights(32));
}

// An asynchronous copy may read pageable memory late, too.
template <bool FIXED> static bool pageable_reused_too_early(const Gpu* gpu) {
    float *x = device_floats(gpu, 32, 0), host[32];
    for (int i = 0; i < 32; i++) {
        host[i] = 5;
    }
    CUDA_CHECK(cudaMemcpyAsync(x, host, sizeof(host), cudaMemcpyHostToDevice, gpu->stream));
    if (FIXED) {
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    }
    memset(host, 0, sizeof(host));
    return is(weighted_sum(gpu, x, 32), 5 * weights(32));
}

// In a graph, a second branch writes what the first one reads afterwards. It is joined, but the
// wait before is missing.
template <bool FIXED> static bool missing_wait_in_graph(const Gpu* gpu) {
    float *x = device_floats(gpu, 32, 0), *out = device_floats(gpu, 32, 0);
    Gpu a, b;
    cudaEvent_t fork, filled;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    two_streams(gpu, &a, &b);
    CUDA_CHECK(cudaEventCreate(&fork));
    CUDA_CHECK(cudaEventCreate(&filled));
    CUDA_CHECK(cudaStreamBeginCapture(a.stream, cudaStreamCaptureModeThreadLocal));
    CUDA_CHECK(cudaEventRecord(fork, a.stream));
    CUDA_CHECK(cudaStreamWaitEvent(b.stream, fork, 0));
    launch(fill_kernel, 1, 32, 0, &b, x, 5.0f);
    CUDA_CHECK(cudaEventRecord(filled, b.stream));
    if (FIXED) {
        CUDA_CHECK(cudaStreamWaitEvent(a.stream, filled, 0));
    }
    launch(add_kernel, 1, 32, 0, &a, out, x);
    CUDA_CHECK(cudaStreamWaitEvent(a.stream, filled, 0));
    CUDA_CHECK(cudaStreamEndCapture(a.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphLaunch(executable, a.stream));
    CUDA_CHECK(cudaStreamSynchronize(a.stream));
    CUDA_CHECK(cudaGraphExecDestroy(executable));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaEventDestroy(fork));
    CUDA_CHECK(cudaEventDestroy(filled));
    gpu_free(x);
    return is(weighted_sum(gpu, out, 32), 5 * weights(32));
}

template <bool FIXED> static bool allocation_while_capturing(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 1);
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    if (!FIXED) {
        gpu_alloc(1, 1, "scratch");
    }
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return is(weighted_sum(gpu, x, 32), weights(32));
}

template <bool FIXED> static bool block_too_large(const Gpu* gpu) {
    float* x = device_floats(gpu, 2048, 0);
    launch(fill_kernel, 1, FIXED ? 1024 : 2048, 0, gpu, x, 1.0f);
    return is(weighted_sum(gpu, x, 2048), weights(1024));
}

template <bool FIXED> static bool copy_past_end(const Gpu* gpu) {
    float* x = device_floats(gpu, 64, 1);
    const float host[80] = {0};
    CUDA_CHECK(cudaMemcpyAsync(x, host, FIXED ? 64 * sizeof(float) : sizeof(host), cudaMemcpyHostToDevice,
                               gpu->stream));
    return is(weighted_sum(gpu, x, 64), 0);
}

// A matmul overwrites one of its factors.
template <bool FIXED> static bool product_in_its_factor(const Gpu* gpu) {
    float* x = device_floats(gpu, 32, 2);
    const float one = 1, zero = 0;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t layout;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 1, 1, 1);
    cublasLtMatmul(handle, product, &one, x, layout, x, layout, &zero, x + FIXED, layout, x + FIXED, layout,
                   NULL, NULL, 0, gpu->stream);
    cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(product);
    cublasLtDestroy(handle);
    return is(weighted_sum(gpu, x, 32), 2 * weights(32) + 2 * 2);
}

// ---- the table ----

// clang-format off
#define BUG(name, noticed_by) {#name, noticed_by, name<false>, name<true>}
#define BUG_OF_WGMMA(name, noticed_by) {#name, noticed_by, wgmma_of_ones<name>, wgmma_of_ones<WGMMA_FIXED>}
static const struct {
    const char *name, *noticed_by;
    bool (*buggy)(const Gpu*);
    bool (*fixed)(const Gpu*);
} bugs[] = {
    BUG(write_past_global, "asan"),
    BUG(write_past_shared, "asan"),
    BUG(dynamic_shared_too_small, "asan"),
    BUG(too_much_static_shared, "up"),
    BUG(static_beside_dynamic, "up"),
    BUG(misaligned_vector, "asan"),
    BUG(uninitialized_global, "msan"),
    BUG(uninitialized_shared, "msan"),
    BUG(uninitialized_shuffle, "msan"),
    BUG(index_overflow, "asan"),
    BUG(host_pointer_to_kernel, "up"),
    BUG(host_reads_device_memory, "protect"),
    BUG(use_after_free, "up"),
    BUG(missing_syncthreads, "tsan"),
    BUG(missing_syncthreads_upward, "tsan"),
    BUG(missing_syncthreads_before_reuse, "tsan"),
    BUG(missing_syncwarp, "tsan"),
    BUG(shuffle_as_barrier, "tsan"),
    BUG(divergent_syncthreads, "up"),
    BUG(barrier_in_two_branches, "up"),
    BUG(return_before_sum, "up"),
    BUG(wrong_mask, "up"),
    BUG(shuffle_outside_mask, "up"),
    BUG(race_between_blocks, "tsan"),
    BUG(missing_fence, "tsan"),
    BUG(missing_grid_sync, "tsan"),
    BUG(grid_sync_without_cooperative_launch, "up"),
    BUG(missing_copy_wait, "up"),
    BUG(missing_barrier_after_copy, "tsan"),
    BUG(bulk_copy_of_fewer_bytes, "up"),
    BUG(missing_mbarrier_wait, "up"),
    BUG_OF_WGMMA(WGMMA_READ_EARLY, "up"),
    BUG_OF_WGMMA(WGMMA_WRITTEN_EARLY, "up"),
    BUG_OF_WGMMA(WGMMA_LEFT_CHANGES, "up"),
    BUG_OF_WGMMA(WGMMA_UNFENCED, "up"),
    BUG_OF_WGMMA(WGMMA_WARPS_DIFFER, "up"),
    BUG_OF_WGMMA(WGMMA_MISALIGNED, "up"),
    BUG_OF_WGMMA(WGMMA_PAST_END, "up"),
    BUG_OF_WGMMA(WGMMA_WARP_MISSING, "up"),
    BUG_OF_WGMMA(PROXY_UNFENCED, "up"),
    BUG_OF_WGMMA(PROXY_NO_BARRIER, "up"),
    BUG_OF_WGMMA(TMA_WRONG_PARITY, "up"),
    BUG_OF_WGMMA(TMA_UNPUBLISHED, "up"),
    BUG_OF_WGMMA(TMA_MISALIGNED, "up"),
    BUG_OF_WGMMA(TMA_FEWER_BYTES, "up"),
    BUG_OF_WGMMA(TMA_UNFENCED, "up"),
    BUG_OF_WGMMA(REGISTERS_OF_HALF, "up"),
    BUG(tensor_of_odd_rows, "up"),
    BUG(missing_event_wait, "lazy"),
    BUG(missing_stream_synchronize, "lazy"),
    BUG(freed_while_queued, "lazy"),
    BUG(stream_destroyed_while_queued, "lazy"),
    BUG(pageable_reused_too_early, "lazy"),
    BUG(missing_wait_in_graph, "lazy"),
    BUG(allocation_while_capturing, "up"),
    BUG(block_too_large, "up"),
    BUG(copy_past_end, "up"),
    BUG(product_in_its_factor, "up"),
};
// clang-format on
enum { BUGS = sizeof(bugs) / sizeof(bugs[0]) };

int main(int argc, char** argv) {
    const char* what = argc == 2 ? argv[1] : "list";
    bool ok = true, known = false;
    Gpu gpu;
    gpu_open(&gpu, 0);
    for (int i = 0; i < BUGS; i++) {
        if (strcmp(what, "list") == 0) {
            printf("%s %s\n", bugs[i].name, bugs[i].noticed_by);
            known = true;
        } else if (strcmp(what, "fixed") == 0) {
            if (!bugs[i].fixed(&gpu)) {
                printf("... in the fixed %s\n", bugs[i].name);
                ok = false;
            }
            known = true;
        } else if (strcmp(what, bugs[i].name) == 0) {
            ok = bugs[i].buggy(&gpu);
            known = true;
        }
    }
    return !known ? 3 : ok ? 0 : 2;
}
