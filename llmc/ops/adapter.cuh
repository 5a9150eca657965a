/*
adapter.cuh -- adapter.h on the GPU: out, inp and both factors are floatX, sums fp32, gradients of
the factors floatX or fp32.

b is spread over rows (OC, P R), with the factor, as floatX; its gradient is gathered from such rows
in fp32. The products are matmuls of matmul.cuh.
*/
#ifndef LLMC_ADAPTER_CUH
#define LLMC_ADAPTER_CUH

#include "llmc/ops/adapter.h"
#include "llmc/ops/matmul.cuh"

template <class T> struct AdapterScratchGpu {
    MatmulGpu* matmul;
    T *h, *dh;   // (N, P R)
    T* spread;   // (widest, P R)
    float* wide; // so are these
};

template <class T>
static inline void adapter_gpu_open(AdapterScratchGpu<T>* x, Memory* memory, MatmulGpu* matmul, size_t N,
                                    size_t most, size_t widest) {
    const size_t rows = (N * most + 127) / 128 * 128, wide = (widest * most + 127) / 128 * 128;
    T* at = (T*)memory_take(memory, "scratch: adapter", MEMORY_DEVICE,
                            (2 * rows + wide) * sizeof(T) + wide * sizeof(float));
    x->matmul = matmul;
    x->h = at;
    x->dh = at ? at + rows : NULL;
    x->spread = at ? at + 2 * rows : NULL;
    x->wide = at ? (float*)(void*)(at + 2 * rows + wide) : NULL;
}

// Returns the part of column `column` of the spread rows; -1 if row `o` is not in it, else where
// the element is in b.
__device__ inline long long adapter_place_(AdapterShape s, int o, int column) {
    const int p = column / s.rank, r = column % s.rank;
    int first = 0;
    for (int i = 0; i < p; i++) {
        first += s.parts.rows[i];
    }
    const int row = o - s.parts.first[p];
    return row < 0 || row >= s.parts.rows[p] ? -1 : (long long)(first + row) * s.rank + r;
}

// A thread sets an element of the spread rows (OC, P R).
// grid   ceil(OC P R / 256)      block   256      shared   none
// moves  b in, OC P R out      order  fixed
template <class T>
__global__ void adapter_spread_kernel(T* spread, const T* b, AdapterShape s, int columns,
                                      long long elements) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < elements) {
        const long long at = adapter_place_(s, (int)(i / columns), (int)(i % columns));
        spread[i] = from_float<T>(at < 0 ? 0.0f : s.factor * to_float(b[at]));
    }
}

// A thread sets or adds to an element of db, which one element of the spread rows has.
// grid   ceil(OC P R / 256)      block   256      shared   none
// moves  OC P R in, db in and out      order  fixed
template <class D>
__global__ void adapter_collect_kernel(D* db, const float* wide, AdapterShape s, int columns,
                                       long long elements, GradientMode mode) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long at = i < elements ? adapter_place_(s, (int)(i / columns), (int)(i % columns)) : -1;
    if (at >= 0) {
        const float value = s.factor * wide[i];
        db[at] = from_float<D>(mode == GRADIENT_ADD ? to_float(db[at]) + value : value);
    }
}

template <class T>
static inline void adapter_spread(const AdapterScratchGpu<T>* x, const T* b, AdapterShape s, int OC) {
    const int columns = adapter_a_rows(s);
    const long long elements = (long long)OC * columns;
    launch(adapter_spread_kernel<T>, dim3((unsigned)ceil_div(elements, 256)), 256, 0, x->matmul->gpu,
           x->spread, b, s, columns, elements);
}

template <class T>
static inline void adapter_forward(T* out, const T* inp, const T* a, const T* b, AdapterShape s,
                                   MatmulSizes sizes, const AdapterScratchGpu<T>* x) {
    const int columns = adapter_a_rows(s);
    matmul_forward(x->h, inp, a, (const T*)NULL, {sizes.N, sizes.C, columns}, x->matmul);
    adapter_spread(x, b, s, sizes.OC);
    matmul_forward_add(out, x->h, x->spread, {sizes.N, columns, sizes.OC}, x->matmul);
}

template <class T>
static inline void adapter_backward_weights(Gradient da, Gradient db, const T* dout, const T* inp, const T* a,
                                            const T* b, AdapterShape s, MatmulSizes sizes, GradientMode mode,
                                            const AdapterScratchGpu<T>* x) {
    const int columns = adapter_a_rows(s);
    const long long elements = (long long)sizes.OC * columns;
    const dim3 grid((unsigned)ceil_div(elements, 256));
    const Gpu* gpu = x->matmul->gpu;
    matmul_forward(x->h, inp, a, (const T*)NULL, {sizes.N, sizes.C, columns}, x->matmul);
    matmul_backward_weight({x->wide, DTYPE_FP32}, dout, (const T*)x->h, {sizes.N, columns, sizes.OC},
                           GRADIENT_SET, x->matmul);
    if (db.dtype == DTYPE_FP32) {
        launch(adapter_collect_kernel<float>, grid, 256, 0, gpu, (float*)db.data, (const float*)x->wide, s,
               columns, elements, mode);
    } else {
        launch(adapter_collect_kernel<T>, grid, 256, 0, gpu, (T*)db.data, (const float*)x->wide, s, columns,
               elements, mode);
    }
    adapter_spread(x, b, s, sizes.OC);
    matmul_backward_input(x->dh, dout, (const T*)x->spread, {sizes.N, columns, sizes.OC}, x->matmul);
    matmul_backward_weight(da, (const T*)x->dh, inp, {sizes.N, sizes.C, columns}, mode, x->matmul);
}

// Adds to dinp, which may be in the place of inp.
template <class T>
static inline void adapter_backward_input(T* dinp, const T* dout, const T* a, const T* b, AdapterShape s,
                                          MatmulSizes sizes, const AdapterScratchGpu<T>* x) {
    const int columns = adapter_a_rows(s);
    adapter_spread(x, b, s, sizes.OC);
    matmul_backward_input(x->dh, dout, (const T*)x->spread, {sizes.N, columns, sizes.OC}, x->matmul);
    matmul_backward_input_add(dinp, (const T*)x->dh, a, {sizes.N, sizes.C, columns}, x->matmul);
}

#endif
