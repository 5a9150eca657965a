/*
matvec.h -- the linear layer of matmul.h for the few rows of a step of generation.

    out[n][o] = sum_c inp[n][c] weight[o][c] + bias[o]

    out      (N, OC)   one row for each text
    inp      (N, C)
    weight   (OC, C)
    bias     (OC)      may be NULL

Its time is that of reading the weights, once for all rows: a thread takes a range of them and lets all rows pass
by MATVEC_ROWS at a time. Each result is one sum in a fixed order, so its bits depend neither on the threads nor
on the other rows.

defines: matvec_forward_cpu, matvec_bytes
*/
#ifndef LLMC_MATVEC_H
#define LLMC_MATVEC_H

#include <stddef.h>

#include "llmc/base/int.h"
#include "llmc/base/vec.h"

enum {
    MATVEC_ROWS = 4,   // rows of the weight at a time
    MATVEC_AHEAD = 512 // floats from the one in use to the one that is fetched from memory
};

static inline double matvec_bytes(double C, double OC) { return 4 * C * OC; } // that a product reads

// Sets out[0 .. rows) to the products of rows of the weight with inp (C). `rows` is a constant at every call.
ALWAYS_INLINE void matvec_rows_(float* out, const float* inp, const float* weight, const float* bias, int C,
                                const int rows) {
    Vec sum[MATVEC_ROWS];
    int c = 0;
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        sum[i] = vec_all(0.0f);
    }
    for (; c + LANES <= C; c += LANES) {
        const Vec x = vec_load(inp + c);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const float* w = weight + (size_t)i * C + c;
            __builtin_prefetch(w + MATVEC_AHEAD);
            sum[i] += vec_load(w) * x;
        }
    }
    for (int i = 0; i < rows; i++) {
        float total = vec_hsum(sum[i]);
        for (int k = c; k < C; k++) {
            total += weight[(size_t)i * C + k] * inp[k];
        }
        out[i] = total + (bias ? bias[i] : 0.0f);
    }
}

// Sets out (N, OC).
static inline void matvec_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                                      int N, int C, int OC) {
#pragma omp parallel for schedule(static)
    for (int block = 0; block < int_ceil_div(OC, MATVEC_ROWS); block++) {
        const int o = block * MATVEC_ROWS, rows = int_min(MATVEC_ROWS, OC - o);
        const float* w = weight + (size_t)o * C;
        for (int n = 0; n < N; n++) {
            float* to = out + (size_t)n * OC + o;
            const float* x = inp + (size_t)n * C;
            if (rows == MATVEC_ROWS) {
                matvec_rows_(to, x, w, bias ? bias + o : NULL, C, MATVEC_ROWS);
            }
            for (int i = 0; i < rows && rows < MATVEC_ROWS; i++) {
                matvec_rows_(to + i, x, w + (size_t)i * C, bias ? bias + o + i : NULL, C, 1);
            }
        }
    }
}

#endif
