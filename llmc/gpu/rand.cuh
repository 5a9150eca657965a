/*
rand.cuh -- the random bits of rand.h in kernels.
*/
#ifndef LLMC_RAND_CUH
#define LLMC_RAND_CUH

#include <cuda_runtime.h>

#include "llmc/base/rand.h"

// rand_block of rand.h, on the device.
__device__ inline RandBlock rand_block_gpu(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32);
    uint32_t x2 = (uint32_t)stream, x3 = (uint32_t)(stream >> 32);
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t even = (uint64_t)0xD2511F53u * x0, odd = (uint64_t)0xCD9E8D57u * x2;
        x0 = (uint32_t)(odd >> 32) ^ x1 ^ key0;
        x1 = (uint32_t)odd;
        x2 = (uint32_t)(even >> 32) ^ x3 ^ key1;
        x3 = (uint32_t)even;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    const RandBlock block = {{x0, x1, x2, x3}};
    return block;
}

#endif
