/*
owners.cuh -- owners.h on GPUs, for Muon, SOAP and Adafactor. All is queued on the main stream;
matrices travel in fp32.

Included by optimizer.cuh, which has the arguments of an update.
*/
#ifndef LLMC_OWNERS_CUH
#define LLMC_OWNERS_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/master_weights.cuh"
#include "llmc/optim/muon.cuh"
#include "llmc/optim/owners.h"

enum { OWNERS_THREADS_ = 256 };

// A thread copies an element of a gradient, and, unless `to_weights` is NULL, its weight.
// grid   ceil(n / 256)      block   256      shared   none
// moves  the gradient in, 4 bytes an element out; the same of the weights. Bound by memory.
// order  every element on its own
template <class T, class G>
__global__ void __launch_bounds__(OWNERS_THREADS_)
    owners_operand_kernel_(float* to, float* to_weights, const G* grads,
                           const __grid_constant__ Weights<T> weights, size_t n) {
    const size_t i = (size_t)blockIdx.x * OWNERS_THREADS_ + threadIdx.x;
    if (i < n) {
        to[i] = to_float(grads[i]);
        if (to_weights) {
            to_weights[i] = weights_load<1>(weights, i)[0];
        }
    }
}

// Sets the operand of n elements, and, unless `to_weights` is NULL, their weights.
template <class T, class G>
static inline void owners_operand(float* to, float* to_weights, const G* grads, const Weights<T>& weights,
                                  size_t n, const Gpu* gpu) {
    launch(owners_operand_kernel_<T, G>, (unsigned)ceil_div(n, (size_t)OWNERS_THREADS_), OWNERS_THREADS_, 0,
           gpu, to, to_weights, grads, weights, n);
}

// Returns n elements as a tensor of Muon.
static inline MuonTensor owners_tensor(size_t rows, size_t cols) {
    MuonTensor t = {};
    t.layers = t.parts = t.by_layer = 1;
    t.rows = (int)rows, t.cols = (int)cols;
    return t;
}

// Copies a matrix between its pieces and its rows.
static inline void owners_copy_runs_gpu(const Owners* o, const OwnersItem* item, float* parts, float* matrix,
                                        OwnersWay way, const Gpu* gpu) {
    OwnersRun runs[OWNERS_RUNS];
    for (int j = 0; j < o->tensor_ranks; j++) {
        const int count = owners_runs(o, item, j, runs);
        for (int k = 0; k < count; k++) {
            const OwnersRun* r = &runs[k];
            float *a = parts + r->in_parts, *b = matrix + r->in_matrix;
            const size_t width = r->width * sizeof(float), pitch = r->pitch * sizeof(float);
            const int there = way == OWNERS_THERE;
            CUDA_CHECK(cudaMemcpy2DAsync(there ? b : a, there ? pitch : width, there ? a : b,
                                         there ? width : pitch, width, r->height, cudaMemcpyDeviceToDevice,
                                         gpu->stream));
        }
    }
}

#endif
