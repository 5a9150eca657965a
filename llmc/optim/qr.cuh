/*
qr.cuh -- qr.h on the GPU, for several matrices together.

    z, q     (matrices, n, n)   fp32
    factors  (matrices, n)      fp32

Two kernels for each panel of rows: one block per matrix makes its reflections, then a warp reflects
each row below it. A last kernel makes q, a warp each row. A lane of a warp always has the same
columns, so a row needs no barriers. The sums have another order than on the CPU.

needs:   what qr.h needs
*/
#ifndef LLMC_QR_CUH
#define LLMC_QR_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/qr.h"

enum { QR_THREADS_ = 256, QR_WARPS_ = QR_THREADS_ / 32 };

// Reflects row x by reflection i, as a warp; both start at column 0.
__device__ inline void qr_reflect_warp_(float* x, const float* v, float factor, int i, int n) {
    const int first = i / 32 * 32 + (int)threadIdx.x % 32;
    float along = 0;
    for (int k = first; k < n; k += 32) {
        along = fmaf(k >= i ? x[k] : 0.0f, v[k], along);
    }
    along = factor * warp_sum(along);
    for (int k = first; k < n; k += 32) {
        x[k] = k >= i ? fmaf(-along, v[k], x[k]) : x[k];
    }
}

// Replaces the end of a row, from column i on, by the v of its reflection; the whole block calls
// it. Returns the factor.
__device__ inline float qr_reflection_block_(float* x, int i, int n) {
    float squares = 0;
    for (int k = i + (int)threadIdx.x; k < n; k += QR_THREADS_) {
        squares = fmaf(x[k], x[k], squares);
    }
    const float norm = sqrtf(block_sum(squares)), first = norm > 0 ? fabsf(x[i] / norm) : 0.0f;
    __syncthreads(); // all have read x[i]
    for (int k = i + (int)threadIdx.x; k < n && norm > 0; k += QR_THREADS_) {
        const float unit = x[k] / norm;
        x[k] = k == i ? copysignf(1.0f + first, unit) : unit;
    }
    __syncthreads();
    return norm > 0 ? 1.0f / (1.0f + first) : 0.0f;
}

// A block makes the reflections of a panel of its matrix, rows first ... end-1, and reflects the
// rows of the panel.
// grid   matrices      block   256      shared   128 bytes
// moves  the panel, a few times for each of its rows, mostly from the L1 cache. Bound by latency.
// order  fixed
static __global__ void __launch_bounds__(QR_THREADS_)
    qr_panel_kernel_(float* z, float* factors, int first, int end, int n) {
    float* rows = z + (size_t)blockIdx.x * n * n;
    for (int i = first; i < end; i++) {
        float* v = rows + (size_t)i * n;
        const float factor = qr_reflection_block_(v, i, n);
        if (threadIdx.x == 0) {
            factors[(size_t)blockIdx.x * n + i] = factor;
        }
        for (int j = i + 1 + (int)threadIdx.x / 32; j < end; j += QR_WARPS_) {
            qr_reflect_warp_(rows + (size_t)j * n, v, factor, i, n);
        }
        __syncthreads();
    }
}

// A warp reflects a row below the panel by all its reflections.
// grid   ceil((n - end) / 8), matrices      block   256      shared   none
// moves  the rows in and out, and the panel in, for each reflection, from the caches
// order  fixed
static __global__ void __launch_bounds__(QR_THREADS_)
    qr_rows_kernel_(float* z, const float* factors, int first, int end, int n) {
    float* rows = z + (size_t)blockIdx.y * n * n;
    const int j = end + (int)blockIdx.x * QR_WARPS_ + (int)threadIdx.x / 32;
    for (int i = first; i < end && j < n; i++) {
        qr_reflect_warp_(rows + (size_t)j * n, rows + (size_t)i * n, factors[(size_t)blockIdx.y * n + i], i,
                         n);
    }
}

// A warp makes row j of q: axis j, reflected by j ... 0.
// grid   ceil(n / 8), matrices      block   256      shared   none
// moves  half of z for each row, from the L2 cache
// order  fixed
static __global__ void __launch_bounds__(QR_THREADS_)
    qr_basis_kernel_(float* q, const float* z, const float* factors, int n) {
    const size_t matrix = (size_t)blockIdx.y * n * n;
    const int j = (int)blockIdx.x * QR_WARPS_ + (int)threadIdx.x / 32;
    if (j >= n) {
        return; // the whole warp
    }
    float* row = q + matrix + (size_t)j * n;
    for (int k = (int)threadIdx.x % 32; k < n; k += 32) {
        row[k] = k == j;
    }
    for (int i = j; i >= 0; i--) {
        qr_reflect_warp_(row, z + matrix + (size_t)i * n, factors[(size_t)blockIdx.y * n + i], i, n);
    }
}

static inline void qr_rows(float* q, float* z, float* factors, int n, int matrices, const Gpu* gpu) {
    const unsigned many = (unsigned)matrices;
    for (int first = 0; first < n; first += QR_PANEL) {
        const int end = first + QR_PANEL < n ? first + QR_PANEL : n;
        launch(qr_panel_kernel_, many, QR_THREADS_, 0, gpu, z, factors, first, end, n);
        if (end < n) {
            launch(qr_rows_kernel_, dim3((unsigned)ceil_div(n - end, (int)QR_WARPS_), many), QR_THREADS_, 0,
                   gpu, z, factors, first, end, n);
        }
    }
    launch(qr_basis_kernel_, dim3((unsigned)ceil_div(n, (int)QR_WARPS_), many), QR_THREADS_, 0, gpu, q, z,
           factors, n);
}

#endif
