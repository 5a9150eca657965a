/*
gate.h -- gates of the output of attention's heads: the contract, and the CPU version.

    out  = x s        s = sigmoid(gate)
    dx   = dout s     dgate = dout x s (1 - s)

All arrays have n elements; out may be x, and dx may be dout.

Qiu et al., "Gated attention for large language models", 2025.
*/
#ifndef LLMC_GATE_H
#define LLMC_GATE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

void gate_forward_cpu(float* out, const float* x, const float* gate, size_t n);

void gate_backward_cpu(float* dx, float* dgate, const float* dout, const float* x, const float* gate,
                       size_t n);

#ifdef __cplusplus
}
#endif

#ifdef GATE_IMPLEMENTATION

#include <math.h>

void gate_forward_cpu(float* out, const float* x, const float* gate, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        out[i] = x[i] / (1.0f + expf(-gate[i]));
    }
}

void gate_backward_cpu(float* dx, float* dgate, const float* dout, const float* x, const float* gate,
                       size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float s = 1.0f / (1.0f + expf(-gate[i])), d = dout[i];
        dgate[i] = d * x[i] * s * (1.0f - s);
        dx[i] = d * s;
    }
}

#endif // GATE_IMPLEMENTATION

#endif
