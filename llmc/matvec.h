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

matvec_bf16_forward_cpu is the same with inp and weight rounded to bf16: it reads half the bytes, from the copy of the
weight that matmul_bf16.h packs for its forward pass.

defines: matvec_forward_cpu, matvec_bytes, matvec_bf16_forward_cpu, matvec_bf16_bytes
*/
#ifndef LLMC_MATVEC_H
#define LLMC_MATVEC_H

#include <stddef.h>

#include "llmc/base/int.h"
#include "llmc/base/vec.h"
#include "llmc/bf16_tile.h"

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

// ---- bf16 ----

static inline double matvec_bf16_bytes(double C, double OC) { return 2 * C * OC; }

enum { MATVEC_BF16_K = 16 * BF16_STEP }; // of the input, that are rounded at a time

// Sets out[0 .. cols): a panel of 32 columns times inp (C). Even and odd values of k are summed apart.
static inline void matvec_bf16_panel_(float* out, const float* inp, const uint32_t* panel, const float* bias,
                                      int C, int cols) {
    Vec even[BF16_TILE / LANES], odd[BF16_TILE / LANES];
    float sum[BF16_TILE], x[MATVEC_BF16_K];
    for (int v = 0; v < BF16_TILE / LANES; v++) {
        even[v] = odd[v] = vec_all(0.0f);
    }
    for (int k0 = 0; k0 < C; k0 += MATVEC_BF16_K) {
        const int k = int_min(MATVEC_BF16_K, C - k0);
        bf16_round_row(x, inp + k0, k);
        for (int p = 0; p < int_ceil_div(k, 2); p++) {
            const uint32_t* pairs = panel + (size_t)(k0 / 2 + p) * BF16_TILE;
#pragma GCC unroll 8
            for (int v = 0; v < BF16_TILE / LANES; v++) {
                const VecBits pair = vec_load_bits(pairs + v * LANES);
                even[v] += (Vec)(pair << 16) * x[2 * p];
                odd[v] += (Vec)(pair & 0xffff0000) * x[2 * p + 1];
            }
        }
    }
    for (int v = 0; v < BF16_TILE / LANES; v++) {
        vec_store(sum + v * LANES, even[v] + odd[v]);
    }
    for (int i = 0; i < cols; i++) {
        out[i] = sum[i] + (bias ? bias[i] : 0.0f);
    }
}

// Sets out (N, OC).
static inline void matvec_bf16_forward_cpu(float* out, const float* inp, const uint32_t* packed,
                                           const float* bias, int N, int C, int OC) {
#pragma omp parallel for schedule(static)
    for (int o = 0; o < OC; o += BF16_TILE) {
        const uint32_t* panel = packed + (size_t)(o / BF16_TILE) * bf16_steps(C) * BF16_STEP_PAIRS;
        for (int n = 0; n < N; n++) {
            matvec_bf16_panel_(out + (size_t)n * OC + o, inp + (size_t)n * C, panel, bias ? bias + o : NULL,
                               C, int_min(BF16_TILE, OC - o));
        }
    }
}

#endif
