/*
experts.cuh -- experts.h on the GPU: the same functions on X = float, bf16 or fp16, computed in
fp32.

    experts_sum   out[n] = add[n] + sum over the rows m of n of rows[m]     add: NULL, or out

experts_activate_backward sets dfch and dscale of padding to 0: the matmuls and biases of experts
read them. C and F are multiples of EXPERT_PACK. Biases are in expert_bias.cuh.
*/
#ifndef LLMC_EXPERTS_CUH
#define LLMC_EXPERTS_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/activation.cuh"
#include "llmc/ops/expert_rows.cuh"
#include "llmc/ops/experts.h"

enum { EXPERTS_WARPS = 8, EXPERTS_THREADS = 32 * EXPERTS_WARPS };

// Returns the row, or token, of a warp.
__device__ inline int experts_row_(void) { return (int)(blockIdx.x * EXPERTS_WARPS + threadIdx.x / 32); }

// A warp copies a row.
// grid   ceil(most rows / 8)      block   256 = 8 rows      shared   none
// moves  M*C in, from L2 for the second time on, and out. Bound by memory.
// order  fixed: no sums.
template <class X>
__global__ void __launch_bounds__(EXPERTS_THREADS)
    experts_gather_kernel(X* rows, const X* tokens, Router r, int C) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int m = experts_row_(), lane = (int)threadIdx.x % 32;
    if (m >= r.first[r.E]) {
        return;
    }
    const int place = r.order[m];
    const X* from = tokens + (size_t)(place < 0 ? 0 : place / r.used) * C;
    for (int c = lane * SIZE; c < C; c += 32 * SIZE) {
        store_pack(rows + (size_t)m * C + c, place < 0 ? Pack<X>{} : load_pack(from + c));
    }
}

// A warp adds up the rows of a token.
// grid   ceil(N / 8)      block   256 = 8 tokens      shared   none
// moves  N*used*C in, N*C in if added to, N*C out. Bound by memory.
// order  fixed: as in `chosen`
template <class X>
__global__ void __launch_bounds__(EXPERTS_THREADS)
    experts_sum_kernel(X* out, const X* add, const X* rows, Router r, int C) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int n = experts_row_(), lane = (int)threadIdx.x % 32;
    if (n >= r.B * r.T) {
        return;
    }
    for (int c = lane * SIZE; c < C; c += 32 * SIZE) {
        float sum[SIZE] = {}, x[SIZE];
        Pack<X> pack;
        if (add) {
            unpack(sum, load_pack(add + (size_t)n * C + c));
        }
        for (int k = 0; k < r.used; k++) {
            unpack(x, load_pack_once(rows + (size_t)r.rows[(size_t)n * r.used + k] * C + c));
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                sum[i] += x[i];
            }
        }
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            pack[i] = from_float<X>(sum[i]);
        }
        store_pack(out + (size_t)n * C + c, pack);
    }
}

// A warp computes a row.
// grid   ceil(most rows / 8)      block   256 = 8 rows      shared   none
// moves  2*M*F in, M*F out. Bound by memory.
// order  fixed: no sums.
template <class X, class ACTIVATION>
__global__ void __launch_bounds__(EXPERTS_THREADS)
    experts_activate_kernel(X* act, const X* fch, Router r, int F) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int m = experts_row_(), lane = (int)threadIdx.x % 32;
    if (m >= r.first[r.E]) {
        return;
    }
    const float scale = r.scale[m];
    const int is_padding = r.order[m] < 0;
    const X* gates = fch + (size_t)m * 2 * F;
    for (int f = lane * SIZE; f < F; f += 32 * SIZE) {
        const Pack<X> gate = load_pack_once(gates + f), up = load_pack_once(gates + F + f);
        Pack<X> out;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const float y = scale * ACTIVATION::at(to_float(gate[i]), to_float(up[i])).out;
            out[i] = from_float<X>(is_padding ? 0.0f : y);
        }
        store_pack(act + (size_t)m * F + f, out);
    }
}

// A warp computes both gradients of a row, and the gradient of its scale.
// grid   ceil(most rows / 8)      block   256 = 8 rows      shared   none
// moves  3*M*F in, 2*M*F out, M fp32 out. Bound by memory.
// order  fixed
template <class X, class ACTIVATION>
__global__ void __launch_bounds__(EXPERTS_THREADS)
    experts_activate_backward_kernel(X* dfch, float* dscale, const X* dact, const X* fch, Router r, int F) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int m = experts_row_(), lane = (int)threadIdx.x % 32;
    if (m >= r.first[r.E]) {
        return;
    }
    const float scale = r.scale[m];
    const int is_padding = r.order[m] < 0;
    const size_t first = (size_t)m * 2 * F;
    float sum = 0.0f;
    for (int f = lane * SIZE; f < F; f += 32 * SIZE) {
        const Pack<X> gate = load_pack_once(fch + first + f), up = load_pack_once(fch + first + F + f),
                      dacts = load_pack_once(dact + (size_t)m * F + f);
        Pack<X> dgate, dup;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const GatedGpu y = ACTIVATION::at(to_float(gate[i]), to_float(up[i]));
            const float d = to_float(dacts[i]);
            sum += d * y.out;
            dgate[i] = from_float<X>(is_padding ? 0.0f : scale * d * y.by_gate);
            dup[i] = from_float<X>(is_padding ? 0.0f : scale * d * y.by_up);
        }
        store_pack(dfch + first + f, dgate);
        store_pack(dfch + first + F + f, dup);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        dscale[m] = is_padding ? 0.0f : sum;
    }
}

// ---- launchers ----

// Return the blocks for all rows, and for all tokens.
static inline unsigned experts_row_blocks_(const Router* r, int columns) {
    const size_t rows = router_rows((size_t)r->B * (size_t)r->T, r->E, r->used);
    assert(columns % EXPERT_PACK == 0);
    return (unsigned)ceil_div(rows, (size_t)EXPERTS_WARPS);
}
static inline unsigned experts_token_blocks_(const Router* r, int columns) {
    assert(columns % EXPERT_PACK == 0);
    return (unsigned)ceil_div(r->B * r->T, (int)EXPERTS_WARPS);
}

template <class X>
static inline void experts_gather(X* rows, const X* tokens, const Router* r, int C, const Gpu* gpu) {
    launch(experts_gather_kernel<X>, experts_row_blocks_(r, C), EXPERTS_THREADS, 0, gpu, rows, tokens, *r, C);
}

template <class X>
static inline void experts_sum(X* out, const X* add, const X* rows, const Router* r, int C, const Gpu* gpu) {
    launch(experts_sum_kernel<X>, experts_token_blocks_(r, C), EXPERTS_THREADS, 0, gpu, out, add, rows, *r,
           C);
}

template <class X>
static inline void experts_activate(X* act, const X* fch, const Router* r, int F, ActivationKind kind,
                                    const Gpu* gpu) {
    switch (kind) { // with a gate
#define EXPERTS_LAUNCH_(KIND, word, name, ...)                                                               \
    case KIND:                                                                                               \
        launch(experts_activate_kernel<X, name##_activation_>, experts_row_blocks_(r, F), EXPERTS_THREADS,   \
               0, gpu, act, fch, *r, F);                                                                     \
        break;
        ACTIVATIONS_GATED(EXPERTS_LAUNCH_)
#undef EXPERTS_LAUNCH_
        ACTIVATIONS_PLAIN(ACTIVATION_CASE)
        break;
    }
}

template <class X>
static inline void experts_activate_backward(X* dfch, float* dscale, const X* dact, const X* fch,
                                             const Router* r, int F, ActivationKind kind, const Gpu* gpu) {
    switch (kind) {
#define EXPERTS_LAUNCH_(KIND, word, name, ...)                                                               \
    case KIND:                                                                                               \
        launch(experts_activate_backward_kernel<X, name##_activation_>, experts_row_blocks_(r, F),           \
               EXPERTS_THREADS, 0, gpu, dfch, dscale, dact, fch, *r, F);                                     \
        break;
        ACTIVATIONS_GATED(EXPERTS_LAUNCH_)
#undef EXPERTS_LAUNCH_
        ACTIVATIONS_PLAIN(ACTIVATION_CASE)
        break;
    }
}

// Returns the rows of a router for matmuls of experts.
static inline ExpertRows experts_rows(const Router* r) {
    const int N = r->B * r->T;
    return {r->first, r->E, N * r->used, (int)router_rows((size_t)N, r->E, r->used), EXPERT_BY_DEFAULT};
}

#endif
