/*
matvec.h -- the linear layer of matmul.h for the few rows of a step of generation.

    out[n][o] = sum_c inp[n][c] weight[o][c] + bias[o]

    out      (N, OC)   one row for each text
    inp      (N, C)
    weight   (OC, C)
    bias     (OC)      may be NULL

Its time is that of reading the weights, once for all rows. A core reads fastest from several places far apart, each
from front to end, and without prefetch instructions (measured: dev/LOG.md). So the rows of the weight are cut into
MATVEC_STREAMS runs. A thread walks down its part of each run, and all rows of the input meet one row of every run at a
time. Each result is one sum in a fixed order, so its bits depend neither on the threads nor on the other rows.

defines: matvec_forward_cpu, matvec_bytes
*/
#ifndef LLMC_MATVEC_H
#define LLMC_MATVEC_H

#include <stddef.h>

#include "llmc/base/vec.h"

enum { MATVEC_STREAMS = 4 };

static inline double matvec_bytes(double C, double OC) { return 4 * C * OC; } // that a product reads

// Sets out[i * apart] to the product of row i * apart of the weight with inp (C), for i < rows. `rows` is a constant at
// every call.
ALWAYS_INLINE void matvec_rows_(float* out, const float* inp, const float* weight, const float* bias, int C,
                                size_t apart, const int rows) {
    Vec sum[MATVEC_STREAMS];
    int c = 0;
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        sum[i] = vec_all(0.0f);
    }
    for (; c + LANES <= C; c += LANES) {
        const Vec x = vec_load(inp + c);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            sum[i] += vec_load(weight + i * apart * C + c) * x;
        }
    }
    for (int i = 0; i < rows; i++) {
        const float* w = weight + i * apart * C;
        float total = vec_hsum(sum[i]);
        for (int k = c; k < C; k++) {
            total += w[k] * inp[k];
        }
        out[i * apart] = total + (bias ? bias[i * apart] : 0.0f);
    }
}

// Sets out (N, OC).
static inline void matvec_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                                      int N, int C, int OC) {
    const int run = OC / MATVEC_STREAMS, rest = OC % MATVEC_STREAMS; // rows: of a run, and behind the last
#pragma omp parallel for schedule(static)
    for (int i = 0; i < run + rest; i++) {
        const int o = i < run ? i : i + (MATVEC_STREAMS - 1) * run;
        const float *w = weight + (size_t)o * C, *b = bias ? bias + o : NULL;
        for (int n = 0; n < N; n++) {
            float* to = out + (size_t)n * OC + o;
            const float* x = inp + (size_t)n * C;
            if (i < run) {
                matvec_rows_(to, x, w, b, C, (size_t)run, MATVEC_STREAMS);
            } else {
                matvec_rows_(to, x, w, b, C, 0, 1);
            }
        }
    }
}

#endif
