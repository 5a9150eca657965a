/*
pass.cuh -- pass.h on the GPU: the starts of windows.
*/
#ifndef LLMC_PASS_CUH
#define LLMC_PASS_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/layers/pass.h"

// One thread per token.
// grid   ceil(N / 256)      block   256      shared   none
// moves  4N bytes out, and 4N in if there are starts. Bound by the launch.
// order  fixed: elementwise.
__global__ void pass_window_starts_kernel(int* starts, const int* of_documents, int N, int T, int window) {
    const int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n < N) {
        starts[n] = pass_window_start(n % T, of_documents ? of_documents[n] : 0, window);
    }
}

// Sets the first token that attention sees through a window of the last `window` tokens. A step of
// decoding needs none, nor does a model without windows (NULL).
static inline void pass_window_starts(int* starts, const Pass* pass, int window, const Gpu* gpu) {
    const int threads = 256, W = pass_length(pass), N = starts && !pass_is_step(pass) ? pass->B * W : 0;
    launch(pass_window_starts_kernel, ceil_div(N, threads), threads, 0, gpu, starts, pass->starts, N, W,
           window);
}

#endif
