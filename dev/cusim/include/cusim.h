/*
cusim.h -- makes CUDA C++ compile with plain g++ or clang++ for the CPU device (see
dev/cusim/README.md).

Types and prototypes come from the toolkit's own headers. This file and those it includes add what
the toolkit declares only under nvcc: built-in variables, shared memory, primitives of blocks and
warps, intrinsics, launches.
*/
#ifndef CUSIM_H
#define CUSIM_H

// The toolkit's launch template erases the types of the arguments (void**). It is renamed away
// here, and cusim_launch.h defines one that keeps them.
#define cudaLaunchKernelEx cusim_hidden_cudaLaunchKernelEx
#include_next <cuda_runtime.h>
#undef cudaLaunchKernelEx

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cusim_runtime.h"

#define CUSIM 1

#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#undef __constant__
#define __constant__
// One array for all blocks, unlike on the device: kernels use SMEM_ARRAY instead.
#undef __shared__
#define __shared__ static

enum { warpSize = 32 };

// Set by the scheduler at every switch to another device thread.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// Makes every array a separate allocation for each block, full of garbage: sanitizers see its ends,
// uninitialized elements, and who shares it. The address of the lambda's static is the identity of
// the declaration.
#define SMEM_ARRAY(T, name, ...)                                                                             \
    auto& name = *(T(*) __VA_ARGS__)cusim_smem_static(                                                       \
        [] {                                                                                                 \
            static char identity;                                                                            \
            return (void*)&identity;                                                                         \
        }(),                                                                                                 \
        sizeof(T __VA_ARGS__))
#define SMEM_DYNAMIC(T, name) T* name = (T*)cusim_smem_dynamic()

#include "cusim_launch.h"
#include "cusim_math.h"
#include "cusim_memory.h"
#include "cusim_warp.h"

#endif
