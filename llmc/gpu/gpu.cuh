/*
gpu.cuh -- the base of every GPU module: the device, element types, 16-byte loads, sums over warps
and blocks, shared memory, and launch().

The same sources are compiled by nvcc, and by g++ or clang++ against dev/cusim, a CPU device for
tests. So kernels are launched only through launch(), shared memory is declared only with SMEM_ARRAY
and SMEM_DYNAMIC, inline PTX stands only in ptx.cuh, kernels have no __CUDA_ARCH__ branches, and
every pointer into device memory is an argument of its kernel.
*/
#ifndef LLMC_GPU_CUH
#define LLMC_GPU_CUH

#include <assert.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "llmc/base/check.h"
#include "llmc/base/memory.h"

// Target architecture, set by the Makefile. Host and kernels share sizes of tiles and blocks that
// depend on it.
#ifndef GPU_SM
#define GPU_SM 90
#endif

#define GPU_BLOCKS 256 // most blocks of memory at a time: a model takes about 40

// ---- errors, types ----

// Returns a note for a sticky error, which only asynchronous work, usually a kernel, causes; "" for
// any other.
static inline const char* gpu_error_note_(cudaError_t error) {
    cudaGetLastError(); // clears an error that is not sticky
    return cudaDeviceSynchronize() == error
               ? ", maybe of earlier work: CUDA_LAUNCH_BLOCKING=1 and --graph off name it"
               : "";
}

#define CUDA_CHECK(call)                                                                                     \
    do {                                                                                                     \
        const cudaError_t error_ = (call);                                                                   \
        CHECK_CALL(error_ == cudaSuccess, "CUDA: %s: %s%s", #call, cudaGetErrorString(error_),               \
                   gpu_error_note_(error_));                                                                 \
    } while (0)

typedef __nv_bfloat16 bf16;
typedef __half fp16;

typedef enum { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16, DTYPE_E4M3 } DType;

static inline size_t dtype_bytes(DType dtype) {
    return dtype == DTYPE_FP32 ? 4 : dtype == DTYPE_E4M3 ? 1 : 2;
}
static inline const char* dtype_name(DType dtype) {
    static const char* const names[] = {"fp32", "bf16", "fp16", "e4m3"};
    return names[dtype];
}

template <class T> struct DTypeOf;
template <> struct DTypeOf<float> { static constexpr DType value = DTYPE_FP32; };
template <> struct DTypeOf<bf16> { static constexpr DType value = DTYPE_BF16; };
template <> struct DTypeOf<fp16> { static constexpr DType value = DTYPE_FP16; };
#define DTYPE_OF(T) (DTypeOf<T>::value)

// Gradient of a parameter: fp32, or the type of the weights.
typedef struct {
    void* data;
    DType dtype;
} Gradient;

// Runs the statement with G as the element type of `gradient`; T is the type of the weights.
#define GRADIENT_DISPATCH(gradient, T, ...)                                                                  \
    do {                                                                                                     \
        assert((gradient).dtype == DTYPE_FP32 || (gradient).dtype == DTYPE_OF(T));                           \
        if ((gradient).dtype == DTYPE_FP32) {                                                                \
            typedef float G;                                                                                 \
            __VA_ARGS__;                                                                                     \
        } else {                                                                                             \
            typedef T G;                                                                                     \
            __VA_ARGS__;                                                                                     \
        }                                                                                                    \
    } while (0)

// ---- the device ----

// One GPU and the stream on which work is queued. A copy with another stream queues work there, but
// no kernels whose blocks take tiles.
typedef struct {
    int device, multiprocessors, major, minor;
    char name[256];
    size_t total_bytes, shared_bytes; // memory; shared memory that one block can request
    cudaStream_t stream;
    unsigned* taken; // counter of the tiles that blocks of a kernel take: 0 between kernels
} Gpu;

// Prepares the process, before its first call of CUDA: each stream gets its own hardware queue. If
// two streams shared one, one would wait for an exchange on the other, and so for other ranks.
static inline void gpu_open_process(void) { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); }

// Makes this GPU the thread's current one.
static inline void gpu_use(int device) {
    const cudaError_t error = cudaSetDevice(device);
    CHECK(error == cudaSuccess,
          "no GPU %d here: %s; nvidia-smi lists the GPUs that programs can use; train_gpt2 needs none",
          device, cudaGetErrorString(error));
}

static inline void gpu_open(Gpu* gpu, int device) {
    cudaDeviceProp properties;
    gpu_use(device);
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    memset(gpu, 0, sizeof(*gpu));
    gpu->device = device;
    gpu->multiprocessors = properties.multiProcessorCount;
    gpu->major = properties.major;
    gpu->minor = properties.minor;
    snprintf(gpu->name, sizeof(gpu->name), "%s", properties.name);
    gpu->total_bytes = properties.totalGlobalMem;
    gpu->shared_bytes = properties.sharedMemPerBlockOptin;
    CHECK(gpu->major >= 8, "%s has compute capability %d.%d; wanted 8.0 or later", gpu->name, gpu->major,
          gpu->minor);
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc((void**)&gpu->taken, sizeof(unsigned)));
    CUDA_CHECK(cudaMemsetAsync(gpu->taken, 0, sizeof(unsigned), gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream)); // nothing is queued on a new GPU
}

static inline void gpu_close(Gpu* gpu) {
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaFree(gpu->taken));
    CUDA_CHECK(cudaStreamDestroy(gpu->stream));
}

// Blocks allocated by gpu_alloc. They belong to the process, like the memory itself, and cudaFree
// does not tell how much it frees: the only variable that no caller holds.
typedef struct {
    struct {
        void* memory;
        size_t bytes;
    } blocks[GPU_BLOCKS];
    size_t now_bytes, peak_bytes;
} GpuMemory_;

static inline GpuMemory_* gpu_memory_(void) {
    static GpuMemory_ memory;
    return &memory;
}

// Replaces a block, or an empty entry (NULL), by another. Returns 0 if it is not found.
static inline int gpu_count_(const void* before, void* after, size_t bytes) {
    GpuMemory_* memory = gpu_memory_();
    int i = 0;
    while (i < GPU_BLOCKS && memory->blocks[i].memory != before) {
        i++;
    }
    if (i == GPU_BLOCKS) {
        return 0;
    }
    memory->now_bytes += bytes - memory->blocks[i].bytes;
    memory->peak_bytes = memory->now_bytes > memory->peak_bytes ? memory->now_bytes : memory->peak_bytes;
    memory->blocks[i].memory = after;
    memory->blocks[i].bytes = bytes;
    return 1;
}

// Count memory that a library takes for `owner`, until gpu_library_gives.
static inline void gpu_library_takes(void* owner, size_t bytes) { gpu_count_(NULL, owner, bytes); }
static inline void gpu_library_gives(const void* owner) { gpu_count_(owner, NULL, 0); }

// Return the memory allocated now by gpu_alloc and libraries, in bytes; and the peak, in MiB.
static inline size_t gpu_now_bytes(void) { return gpu_memory_()->now_bytes; }
static inline double gpu_peak_mib(void) { return (double)gpu_memory_()->peak_bytes / (1 << 20); }

// Allocates device memory, all zero when the call returns; `what` names it in the error message.
// For one thread at a time.
static inline void* gpu_alloc(size_t count, size_t element_bytes, const char* what) {
    const size_t bytes = array_bytes(count, element_bytes);
    size_t free_bytes = 0, total_bytes = 0;
    void* memory = NULL;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    CHECK(bytes <= free_bytes && cudaMalloc(&memory, bytes ? bytes : 1) == cudaSuccess,
          "%s: cannot allocate %.1f MiB of GPU memory; %.1f of %.1f MiB are free", what,
          (double)bytes / (1 << 20), (double)free_bytes / (1 << 20), (double)total_bytes / (1 << 20));
    const int has_place = gpu_count_(NULL, memory, bytes);
    CHECK(has_place, "%s: more than %d blocks of GPU memory", what, GPU_BLOCKS);
    CUDA_CHECK(cudaMemset(memory, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize());
    return memory;
}

// Allocates pinned memory of the host, all zero.
static inline void* gpu_alloc_pinned(size_t count, size_t element_bytes, const char* what) {
    const size_t bytes = array_bytes(count, element_bytes);
    void* memory = NULL;
    CHECK(
        cudaMallocHost(&memory, bytes) == cudaSuccess,
        "no %.1f MiB of pinned memory on the host for %s; wanted more memory, or a higher limit (ulimit -l)",
        (double)bytes / (1 << 20), what);
    if (check_allocated) {
        check_allocated(what, bytes);
    }
    memset(memory, 0, bytes);
    return memory;
}

static inline void gpu_free_pinned(void* memory) { CUDA_CHECK(cudaFreeHost(memory)); }

// Pins memory of the host, so that copies to it run at the speed of the bus; leaves it pageable if
// the machine or its limits do not allow pinning.
static inline void gpu_pin(void* memory, size_t bytes) {
    if (cudaHostRegister(memory, bytes, cudaHostRegisterDefault) != cudaSuccess) {
        cudaGetLastError(); // clears the error
        printf(
            "note: cannot pin %.1f MiB of host memory for checkpoints: copying them from the GPU is slower\n",
            (double)bytes / (1 << 20));
    }
}

static inline void gpu_unpin(void* memory) {
    if (cudaHostUnregister(memory) != cudaSuccess) {
        cudaGetLastError(); // it was not pinned
    }
}

static inline void gpu_free(void* memory) {
    if (memory) {
        gpu_count_(memory, NULL, 0); // cudaFree judges pointers that are not counted
        CUDA_CHECK(cudaFree(memory));
    }
}

// Copies bytes from the host, and waits until the GPU has them: cudaMemcpy may return before, and
// our streams do not wait for the default one.
static inline void gpu_upload(void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaStreamSynchronize(0));
}

// A ledger of memory of the GPU, pinned memory and memory of the host.
static inline Memory memory_on_gpu(void) {
    static const MemoryAllocator gpu[] = {{gpu_alloc, gpu_alloc, gpu_free},
                                          {check_alloc, check_alloc_unset, free},
                                          {gpu_alloc_pinned, gpu_alloc_pinned, gpu_free_pinned}};
    return memory_of(gpu);
}

// Copies between the GPU and the host, and waits.
static inline void gpu_copy(void* to, const void* from, size_t bytes, const Gpu* gpu) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
}

// Waits for all work so far.
static inline void gpu_wait(const Gpu* gpu) { CUDA_CHECK(cudaStreamSynchronize(gpu->stream)); }

// ---- launching ----

#ifdef __CUDACC__
#define SMEM_ARRAY(T, name, ...) __shared__ T name __VA_ARGS__
#define SMEM_DYNAMIC(T, name)                                                                                \
    extern __shared__ __align__(128) unsigned char smem_dynamic_[];                                          \
    T* name = reinterpret_cast<T*>(smem_dynamic_)
#endif

// Dynamic shared memory that a block gets without asking: 48 KiB minus 2 for its static arrays,
// which also count.
enum { GPU_SHARED_UNASKED_ = 46 << 10 };

// Launches kernel<<<grid, block, shared_bytes, stream>>>(args...), and checks for errors. Without
// threads, as in a pass over no tokens, it does nothing. If a block needs more than the default
// shared memory, requests permission, and the largest share of the L1 cache, so that several blocks
// fit.
template <typename... P, typename... A>
static inline void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, const Gpu* gpu,
                          A&&... args) {
    cudaLaunchConfig_t config = {};
    if (!(grid.x && grid.y && grid.z && block.x && block.y)) {
        return;
    }
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = gpu->stream;
    if (shared_bytes > GPU_SHARED_UNASKED_) {
        CUDA_CHECK(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    }
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// ---- elements ----

__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__host__ __device__ inline float to_float(fp16 x) { return __half2float(x); }

// Rounds to nearest, ties to even.
template <class T> __host__ __device__ inline T from_float(float x);
template <> __host__ __device__ inline float from_float<float>(float x) { return x; }
template <> __host__ __device__ inline bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __host__ __device__ inline fp16 from_float<fp16>(float x) { return __float2half_rn(x); }

// Sixteen bytes of elements in registers.
template <class T> struct alignas(16) Pack {
    static constexpr int SIZE = 16 / sizeof(T);
    T element[SIZE];
    __device__ T& operator[](int i) { return element[i]; }
    __device__ const T& operator[](int i) const { return element[i]; }
};

// Load and store a pack; addresses must be multiples of 16 bytes. load_pack_once is for data that
// will not be used again soon: it leaves the caches to others.
template <class T> __device__ inline Pack<T> load_pack(const T* from) {
    Pack<T> pack;
    *reinterpret_cast<int4*>(&pack) = *reinterpret_cast<const int4*>(from);
    return pack;
}
template <class T> __device__ inline Pack<T> load_pack_once(const T* from) {
    Pack<T> pack;
    *reinterpret_cast<int4*>(&pack) = __ldcs(reinterpret_cast<const int4*>(from));
    return pack;
}
template <class T> __device__ inline void store_pack(T* to, const Pack<T>& pack) {
    *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(&pack);
}

// Convert elements 2i and 2i + 1 of 16 bits, the bits of a word, to fp32 and back.
template <class T> __device__ inline void unpack_word_(float* to, int word) {
    T pair[2];
    memcpy((void*)pair, &word, sizeof(word));
    to[0] = to_float(pair[0]);
    to[1] = to_float(pair[1]);
}
template <> __device__ inline void unpack_word_<bf16>(float* to, int word) {
    const unsigned low = (unsigned)word << 16,
                   high = (unsigned)word & 0xffff0000u; // bf16 is the upper half of a float
    memcpy(to, &low, sizeof(low));
    memcpy(to + 1, &high, sizeof(high));
}
template <> __device__ inline void unpack_word_<float>(float* to, int word) {
    memcpy(to, &word, sizeof(word));
}

// Convert the elements of a pack, or of 16 bytes that hold one, to fp32. Word by word: element by
// element, nvcc takes twice the instructions.
template <class T> __device__ inline void unpack(float* to, int4 words) {
    unpack_word_<T>(to, words.x);
    unpack_word_<T>(to + 4 / sizeof(T), words.y);
    unpack_word_<T>(to + 8 / sizeof(T), words.z);
    unpack_word_<T>(to + 12 / sizeof(T), words.w);
}
template <class T> __device__ inline void unpack(float* to, const Pack<T>& pack) {
    unpack<T>(to, *reinterpret_cast<const int4*>(&pack));
}

// ---- sums and maxima, always in the same order; every thread gets the result ----

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
}

__device__ inline float larger_(float x, float y) { return fmaxf(x, y); }
__device__ inline uint32_t larger_(uint32_t x, uint32_t y) { return max(x, y); }

template <class T> __device__ inline T warp_max(T x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x = larger_(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
}

// Returns the sum over a block of one dimension, a multiple of 32 threads; all of them call it. The
// last barrier lets the array be reused at once.
__device__ inline float block_sum(float x) {
    SMEM_ARRAY(float, of_warp, [32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) {
        of_warp[warp] = x;
    }
    __syncthreads();
    x = warp_sum(lane < warps ? of_warp[lane] : 0.0f);
    __syncthreads();
    return x;
}

// Returns the largest in such a block; nothing is below `least`.
template <class T> __device__ inline T block_max(T x, T least) {
    SMEM_ARRAY(T, of_warp, [32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) {
        of_warp[warp] = x;
    }
    __syncthreads();
    x = warp_max(lane < warps ? of_warp[lane] : least);
    __syncthreads();
    return x;
}
__device__ inline float block_max(float x) { return block_max(x, -INFINITY); }

// Returns the sum of x over this lane and the lanes below.
__device__ inline int warp_scan(int x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, x, distance);
        x += (int)threadIdx.x % 32 >= distance ? below : 0;
    }
    return x;
}

// Returns the sum of x over the threads below, in a block as for block_sum.
__device__ inline int block_scan(int x) {
    SMEM_ARRAY(int, of_warp, [32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int scan = warp_scan(x);
    if (lane == 31) {
        of_warp[warp] = scan;
    }
    __syncthreads();
    const int of_warps = warp_scan(lane < warps ? of_warp[lane] : 0);
    const int below = __shfl_sync(0xffffffffu, of_warps, warp > 0 ? warp - 1 : 0);
    __syncthreads();
    return scan - x + (warp > 0 ? below : 0);
}

#endif
