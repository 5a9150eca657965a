/*
cusim_runtime.h -- interface of the CPU device's runtime (dev/cusim/src) for cusim.h and
llmc/gpu/ptx.cuh.
*/
#ifndef CUSIM_RUNTIME_H
#define CUSIM_RUNTIME_H

#include <cstddef>
#include <cstdint>
#include <functional>

#include <cuda_runtime_api.h>

// Place of the call: as last parameters, and as arguments that pass it on.
#define CUSIM_LOC const char *cusim_f = __builtin_FILE(), int cusim_l = __builtin_LINE()
#define CUSIM_L cusim_f, cusim_l

// Operations of a whole warp; all lanes of a mask must agree.
enum {
    CUSIM_SHFL = 1,
    CUSIM_UP,
    CUSIM_DOWN,
    CUSIM_XOR,
    CUSIM_VOTE,
    CUSIM_SYNCWARP,
    CUSIM_MATCH,
    CUSIM_REDUCE,
    CUSIM_MMA,
    CUSIM_LDM,
    CUSIM_WGMMA
};

// Ways to combine the predicates of __syncthreads_count, _or and _and.
enum { CUSIM_BARRIER_PLAIN, CUSIM_BARRIER_COUNT, CUSIM_BARRIER_OR, CUSIM_BARRIER_AND };

enum { CUSIM_FENCE_BLOCK, CUSIM_FENCE_DEVICE };

extern "C" {
// Prints "CUSIM ERROR: ...", the kernel and the thread, and aborts.
void cusim_die(const char* format, ...) __attribute__((noreturn, format(printf, 1, 2)));

// Barriers. `kind` is a CUSIM_BARRIER_*, `result` may be NULL. The named ones (bar.sync,
// bar.arrive) have ids 1 to 15.
void cusim_syncthreads(int kind, int predicate, int* result, const char* file, int line);
void cusim_bar_sync(int id, int threads, const char* file, int line);
void cusim_bar_arrive(int id, int threads, const char* file, int line);
void cusim_grid_sync(const char* file, int line);
void cusim_fence(int scope); // CUSIM_FENCE_*

// Every lane of `mask` contributes `bytes` <= 16 bytes. Returns all 32 values, 16 bytes apart,
// valid until the second exchange of this lane after it.
const unsigned char* cusim_warp_exchange(int op, unsigned mask, const void* value, unsigned bytes,
                                         const char* file, int line);
// For all 32 lanes of a warp: the last one to arrive calls `together` with every lane's `mine`; the
// others wait until it returns.
void cusim_warp_together(int op, void* mine, void (*together)(void* const lanes[32]), const char* file, int line);
unsigned cusim_lane(void);
unsigned cusim_activemask(void);
void cusim_yield(void); // lets others run: the body of a loop that waits for memory to change

// Shared memory of the running block.
void* cusim_smem_dynamic(void);
unsigned cusim_smem_dynamic_size(void);
void* cusim_smem_static(void* identity, size_t bytes);

// cp.async: copies source_bytes, and zeroes the rest of `bytes`.
void cusim_cp_async(void* to, const void* from, int bytes, int source_bytes);
void cusim_cp_async_commit(void);
void cusim_cp_async_wait(int groups_left);

// Address in the window of shared memory of a place in dynamic memory.
unsigned cusim_shared_address(const void* pointer, const char* file, int line);

// wgmma: the sums d of this thread, N / 2 of them, NaN until the wait. The left operand is in four
// registers, or has a descriptor.
typedef struct {
    float* d;
    const unsigned* a_registers; // or NULL
    uint64_t a, b;
    int N, is_fp16, adds, is_a_across, is_b_across;
} CusimWgmma;
void cusim_wgmma(const CusimWgmma* op, const char* file, int line);
void cusim_wgmma_fence(const char* file, int line);
void cusim_wgmma_commit(const char* file, int line);
void cusim_wgmma_wait(int groups_left, const char* file, int line);
void cusim_setmaxnreg(int count, const char* file, int line);

// Proxies: bytes that a thread has stored, and that TMA or wgmma access only after its
// fence.proxy.async and a barrier.
void cusim_store_for_async(const void* to, unsigned bytes, const char* file, int line);
void cusim_fence_async(void);

// mbarrier, and what completes on one: cp.async.bulk from global to shared memory, and the copy of
// a box of a tensor (TMA), whose corner is `at`, fastest coordinate first.
void cusim_mbar_init(uint64_t* barrier, unsigned count);
void cusim_mbar_publish(void);
void cusim_mbar_arrive(uint64_t* barrier, unsigned expected_bytes, const char* file, int line);
void cusim_mbar_wait(uint64_t* barrier, unsigned parity, const char* file, int line);
void cusim_bulk_g2s(void* to, const void* from, unsigned bytes, uint64_t* barrier);
void cusim_tma_load(void* to, const void* map, int rank, const int* at, uint64_t* barrier, const char* file,
                    int line);

// Launches a kernel. `kernel` is only a name for messages. `body` runs once for each device thread;
// it is moved from.
cudaError_t cusim_launch(const cudaLaunchConfig_t* config, const void* kernel, std::function<void()>* body);
void cusim_check_kernel_pointer(const void* pointer, int argument, const void* kernel);
void cusim_check_tensor_map(const void* map, int argument, const void* kernel);
}

// Puts work on a stream; `on_device`: it may touch device memory. For the cublasLt and NCCL twins.
void cusim_enqueue(cudaStream_t stream, bool on_device, std::function<void()> work);

#endif
