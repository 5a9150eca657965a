/*
host_device.h -- HOST_DEVICE, the word for functions that run in kernels as well as on the host, and
one such function.
*/
#ifndef LLMC_HOST_DEVICE_H
#define LLMC_HOST_DEVICE_H

#include <math.h>

#ifdef __CUDACC__
#define HOST_DEVICE static inline __host__ __device__
#else
#define HOST_DEVICE static inline
#endif

// Returns a b + c, rounded once if the processor can. In a b + c d a compiler chooses which product
// is rounded, and may choose differently in vectors and in the remainder loop: an element's bits
// would depend on where the array is split.
HOST_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#endif
