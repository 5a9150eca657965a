/*
stream_scale.h -- scales of the residual stream before a block: the contract, and the CPU version.

    out = a x + b x0

    dx = a dout     dx0 (+)= b dout     da (+)= sum(dout x)     db (+)= sum(dout x0)

    out, x, x0      (n)      the stream, and the embedding that entered the first block
    scales, dscales (2)      a, b; dscales may be NULL
    dx              (n)      has dout, which it replaces
    dx0             (n)      set or added to as `first` says, dscales as `mode` says
    parts           (STREAM_PARTS, 2)     scratch: sums of equal parts, in order

Karpathy's nanochat has them ("resid_lambdas", "x0_lambdas"), after Jordan et al., "modded-nanogpt",
2024.
*/
#ifndef LLMC_STREAM_SCALE_H
#define LLMC_STREAM_SCALE_H

#include <stddef.h>

#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { STREAM_PARTS = 256 };

// Elements of both passes, and what they read.
typedef struct {
    const float *x, *x0, *scales;
    size_t n;
} StreamScale;

// Return the bytes of memory traffic.
static inline double stream_scale_bytes(double n, double element_bytes) { return 3 * n * element_bytes; }
static inline double stream_scale_backward_bytes(double n, double element_bytes) {
    return 6 * n * element_bytes;
}

void stream_scale_forward_cpu(float* out, const StreamScale* s);

void stream_scale_backward_cpu(float* dx, float* dx0, float* dscales, double* parts, const StreamScale* s,
                               GradientMode first, GradientMode mode);

#ifdef __cplusplus
}
#endif

#ifdef STREAM_SCALE_IMPLEMENTATION

void stream_scale_forward_cpu(float* out, const StreamScale* s) {
    const float a = s->scales[0], b = s->scales[1];
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < s->n; i++) {
        out[i] = a * s->x[i] + b * s->x0[i];
    }
}

// Does the elements [begin, end), and sets their sums.
static void stream_scale_part_(float* dx, float* dx0, double sums[2], const StreamScale* s, size_t begin,
                               size_t end, GradientMode first) {
    const float a = s->scales[0], b = s->scales[1];
    double of_x = 0, of_x0 = 0;
    for (size_t i = begin; i < end; i++) {
        const float d = dx[i];
        of_x += (double)d * (double)s->x[i];
        of_x0 += (double)d * (double)s->x0[i];
        dx0[i] = (first == GRADIENT_ADD ? dx0[i] : 0) + b * d;
        dx[i] = a * d;
    }
    sums[0] = of_x, sums[1] = of_x0;
}

void stream_scale_backward_cpu(float* dx, float* dx0, float* dscales, double* parts, const StreamScale* s,
                               GradientMode first, GradientMode mode) {
    const size_t each = (s->n + STREAM_PARTS - 1) / STREAM_PARTS;
#pragma omp parallel for schedule(static)
    for (int p = 0; p < STREAM_PARTS; p++) {
        const size_t begin = (size_t)p * each, end = begin + each < s->n ? begin + each : s->n;
        stream_scale_part_(dx, dx0, parts + 2 * p, s, begin, end, first);
    }
    for (int i = 0; i < 2 && dscales; i++) {
        double sum = mode == GRADIENT_ADD ? (double)dscales[i] : 0;
        for (int p = 0; p < STREAM_PARTS; p++) {
            sum += parts[2 * p + i];
        }
        dscales[i] = (float)sum;
    }
}

#endif // STREAM_SCALE_IMPLEMENTATION

#endif
