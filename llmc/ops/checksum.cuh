/*
checksum.cuh -- checksum.h on the GPU: the same sum.

needs:   words aligned to 8 bytes
*/
#ifndef LLMC_CHECKSUM_CUH
#define LLMC_CHECKSUM_CUH

#include "llmc/ops/checksum.h"
#include "llmc/gpu/gpu.cuh"

// threads of a block; blocks per multiprocessor
enum { CHECKSUM_THREADS_ = 256, CHECKSUM_BLOCKS_ = 4 };

// Adds to *sum. A thread steps through the words with the stride of the grid; each warp adds once.
// grid   4 per multiprocessor      block   256      shared   none
// moves  reads 8 bytes per word. Bound by memory.
// order  none; the sum of integers is the same in any
__global__ void __launch_bounds__(CHECKSUM_THREADS_)
    checksum_kernel_(unsigned long long* sum, const uint64_t* words, size_t count, size_t first) {
    const size_t stride = (size_t)gridDim.x * CHECKSUM_THREADS_;
    unsigned long long own = 0;
    for (size_t i = (size_t)blockIdx.x * CHECKSUM_THREADS_ + threadIdx.x; i < count; i += stride) {
        own += checksum_word(words[i], first + i);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        own += __shfl_down_sync(0xffffffffu, own, distance);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(sum, own);
    }
}

// Sets *sum, in device memory.
static inline void checksum_words(unsigned long long* sum, const void* words, size_t count, size_t first,
                                  const Gpu* gpu) {
    const size_t most = (size_t)CHECKSUM_BLOCKS_ * gpu->multiprocessors,
                 all = (count + CHECKSUM_THREADS_ - 1) / CHECKSUM_THREADS_;
    CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(*sum), gpu->stream));
    if (count > 0) {
        launch(checksum_kernel_, dim3((unsigned)(all < most ? all : most)), CHECKSUM_THREADS_, 0, gpu, sum,
               (const uint64_t*)words, count, first);
    }
}

#endif
