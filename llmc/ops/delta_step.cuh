/*
delta_step.cuh -- a step of generation with the delta rule (delta_rule.cuh) on the GPU.
*/
#ifndef LLMC_DELTA_STEP_CUH
#define LLMC_DELTA_STEP_CUH

#include "llmc/ops/delta_rule.cuh"

enum { DELTA_STEP_ROWS = 8 };

// A block updates 32 columns of the state of a value head, and sets out there. Thread (x, y) has
// column x of rows y, y + 8, ...
// grid   ceil(dv/32), Hv, B      block   (32, 8)      shared   3 KiB
// moves  dk*32 fp32 in, twice but once from L2, and out. Bound by memory.
// order  fixed
template <class X> __global__ void delta_step_kernel(DeltaPassGpu<X> pass) {
    SMEM_ARRAY(float, q, [DELTA_RULE_WIDEST]);
    SMEM_ARRAY(float, k, [DELTA_RULE_WIDEST]);
    SMEM_ARRAY(float, sum, [DELTA_STEP_ROWS][32]);
    const DeltaSizes s = pass.sizes;
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, x = (int)threadIdx.x, y = (int)threadIdx.y,
              c = (int)blockIdx.x * 32 + x, R = 2 * s.Hk * s.dk + s.Hv * s.dv;
    const X* row = pass.qkv + (size_t)b * R;
    float* state = pass.state + ((size_t)b * s.Hv + h) * s.dk * s.dv + c;
    DeltaPlace at = delta_place(s, b, h, 0);
    at.t0 = 1; // no start of a document
    at.count = 1;
    const DeltaTokenGates gates = delta_token_gates(pass, at, 0);
    for (int is_key = 0; is_key < 2; is_key++) {
        const X* from = row + (size_t)(is_key * s.Hk + delta_key_head(s, h)) * s.dk;
        float square = 0.0f;
        for (int i = x; i < s.dk; i += 32) {
            square += to_float(from[i]) * to_float(from[i]);
        }
        const float r = rsqrtf(warp_sum(square) + DELTA_RULE_EPS) * (is_key ? 1.0f : rsqrtf((float)s.dk));
        for (int i = x + 32 * y; i < s.dk; i += 32 * DELTA_STEP_ROWS) {
            (is_key ? k : q)[i] = r * to_float(from[i]);
        }
    }
    __syncthreads();
    float known = 0.0f, out = 0.0f;
    for (int i = y; i < s.dk && c < s.dv; i += DELTA_STEP_ROWS) {
        known += k[i] * state[(size_t)i * s.dv];
    }
    sum[y][x] = known;
    __syncthreads();
    known = 0.0f;
    for (int i = 0; i < DELTA_STEP_ROWS; i++) {
        known += sum[i][x];
    }
    __syncthreads();
    const float v = c < s.dv ? to_float(row[2 * s.Hk * s.dk + h * s.dv + c]) : 0.0f,
                u = gates.beta * (v - gates.f * known);
    for (int i = y; i < s.dk && c < s.dv; i += DELTA_STEP_ROWS) {
        float& to = state[(size_t)i * s.dv];
        to = gates.f * to + k[i] * u;
        out += q[i] * to;
    }
    sum[y][x] = out;
    __syncthreads();
    if (y == 0 && c < s.dv) {
        out = 0.0f;
        for (int i = 0; i < DELTA_STEP_ROWS; i++) {
            out += sum[i][x];
        }
        pass.out[((size_t)b * s.Hv + h) * s.dv + c] = from_float<X>(out);
    }
}

template <class X> static inline void delta_rule_step(const DeltaPassGpu<X>* pass, const Gpu* gpu) {
    const DeltaSizes s = pass->sizes;
    assert(s.T == 1 && s.Hv % s.Hk == 0);
    launch(delta_step_kernel<X>, dim3((unsigned)ceil_div(s.dv, 32), (unsigned)s.Hv, (unsigned)s.B),
           dim3(32, DELTA_STEP_ROWS), 0, gpu, *pass);
}

#endif
