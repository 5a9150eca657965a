/*
host_device.h -- functions that kernels call as well as the host: the word for them, and one of
them.

needs:   nothing
*/
#ifndef LLMC_HOST_DEVICE_H
#define LLMC_HOST_DEVICE_H

#include <math.h>

#ifdef __CUDACC__
#define HOST_DEVICE static inline __host__ __device__
#else
#define HOST_DEVICE static inline
#endif

// a b + c, rounded once where the processor can. In a b + c d a compiler chooses which product it
// rounds, and may choose differently where it has vectors and at their end: the bits of an element
// would follow from where an array is cut.
HOST_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#endif
