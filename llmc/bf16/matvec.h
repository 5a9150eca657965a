/*
matvec.h -- the linear layer of matmul.h for the few rows of a decoding step.

    out[n][o] = sum_c inp[n][c] weight[o][c] + bias[o]

    out      (N, OC)   one row per sequence
    inp      (N, C)
    weight   (OC, C)
    bias     (OC)      may be NULL

Its time is that of reading the weights, once for all rows. A core reads fastest from several places
far apart, each from front to end, without prefetch instructions (measured: dev/LOG.md). So the rows
of the weight are cut into MATVEC_STREAMS runs. A thread walks down its part of each run, and
multiplies all rows of the input with one row of every run at a time. Each result is one sum in a
fixed order, so its bits depend neither on the threads nor on the other rows.

matvec_bf16_forward_cpu rounds inp and weight to bf16 and reads half the bytes: the copy of the
weight that matmul_bf16.h packs for its forward pass. Its runs consist of panels, 32 columns each.
*/
#ifndef LLMC_MATVEC_H
#define LLMC_MATVEC_H

#include <stdint.h>
#include <stddef.h>

#include "llmc/ops/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MATVEC_STREAMS = 4 };

// Returns the bytes that a matmul reads.
static inline double matvec_bytes(double C, double OC) { return 4 * C * OC; }

// Sets out (N, OC).
void matvec_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                        MatmulSizes sizes);

// ---- bf16 ----

static inline double matvec_bf16_bytes(double C, double OC) { return 2 * C * OC; }

// Sets out (N, OC).
void matvec_bf16_forward_cpu(float* out, const float* inp, const uint32_t* packed, const float* bias,
                             MatmulSizes sizes);

#ifdef __cplusplus
}
#endif

#ifdef MATVEC_IMPLEMENTATION

#include <string.h>

#include "llmc/base/sizes.h"
#include "llmc/base/vec.h"
#include "llmc/bf16/tile_kernels.h"

// Sets out[i * apart] to the product of row i * apart of the weight with inp (C), for i < rows.
// `rows` is a constant at every call.
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

void matvec_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                        MatmulSizes sizes) {
    const int N = sizes.N, C = sizes.C, OC = sizes.OC;
    // rows of a run, and after the last run
    const int run = OC / MATVEC_STREAMS, rest = OC % MATVEC_STREAMS;
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

enum {
    // rows of the input that meet a piece of a panel while it is in the L1 cache
    MATVEC_BF16_ROWS_ = 8,
    // pairs of a panel that are read before those of the next run: 512 bytes
    MATVEC_BF16_PAIRS_ = 4,
    MATVEC_BF16_K_ = 128 // values of the input that are rounded at a time
};

typedef struct {
    float* out;
    const float* inp;
    const uint32_t* packed;
    const float* bias;
    int N, C, OC;
} MatvecBf16_;

// Sums of a row of the input with the columns of a panel. Even and odd values of k are summed
// separately.
typedef struct {
    float even[BF16_TILE], odd[BF16_TILE];
} MatvecBf16Sums_;

// Adds MATVEC_BF16_PAIRS_ pairs to the sums of a panel.
ALWAYS_INLINE void matvec_bf16_add_(MatvecBf16Sums_* sums, const float* x, const uint32_t* pairs) {
    Vec even[BF16_TILE / LANES], odd[BF16_TILE / LANES];
    for (int v = 0; v < BF16_TILE / LANES; v++) {
        even[v] = vec_load(sums->even + v * LANES);
        odd[v] = vec_load(sums->odd + v * LANES);
    }
    for (int p = 0; p < MATVEC_BF16_PAIRS_; p++) {
#pragma GCC unroll 8
        for (int v = 0; v < BF16_TILE / LANES; v++) {
            const VecBits pair = vec_load_bits(pairs + p * BF16_TILE + v * LANES);
            even[v] += (Vec)(pair << 16) * x[2 * p];
            odd[v] += (Vec)(pair & 0xffff0000) * x[2 * p + 1];
        }
    }
    for (int v = 0; v < BF16_TILE / LANES; v++) {
        vec_store(sums->even + v * LANES, even[v]);
        vec_store(sums->odd + v * LANES, odd[v]);
    }
}

// Adds MATVEC_BF16_PAIRS_ pairs of a panel of each run, `apart` pairs from each other. Not inlined:
// otherwise gcc expands the pairs once for all rows, into memory, and is slower.
static __attribute__((noinline)) void matvec_bf16_add_runs_(MatvecBf16Sums_ sums[MATVEC_STREAMS],
                                                            const float* x, const uint32_t* pairs,
                                                            size_t apart, int runs) {
    for (int r = 0; r < runs; r++) {
        matvec_bf16_add_(&sums[r], x, pairs + r * apart);
    }
}

// Stores the columns of a panel of the result.
static void matvec_bf16_store_(const MatvecBf16_* m, int n, int panel, const MatvecBf16Sums_* sums) {
    const int o = panel * BF16_TILE, cols = int_min(BF16_TILE, m->OC - o);
    for (int i = 0; i < cols; i++) {
        const float sum = sums->even[i] + sums->odd[i];
        m->out[(size_t)n * m->OC + o + i] = sum + (m->bias ? m->bias[o + i] : 0.0f);
    }
}

// Computes rows n0 ... n0 + rows - 1, at most MATVEC_BF16_ROWS_, for a panel of each of `runs`
// runs, which are `apart` panels from each other.
static void matvec_bf16_rows_(const MatvecBf16_* m, int n0, int rows, int panel, int apart, int runs) {
    const size_t panel_pairs = (size_t)bf16_steps(m->C) * BF16_STEP_PAIRS;
    MatvecBf16Sums_ sums[MATVEC_BF16_ROWS_][MATVEC_STREAMS];
    float x[MATVEC_BF16_ROWS_][MATVEC_BF16_K_];
    memset(sums, 0, (size_t)rows * sizeof(sums[0]));
    for (int k0 = 0; k0 < m->C; k0 += MATVEC_BF16_K_) {
        const int k = int_min(MATVEC_BF16_K_, m->C - k0);
        for (int n = 0; n < rows; n++) {
            // zeros, as after the end of the weight
            memset(x[n] + k, 0, (size_t)(MATVEC_BF16_K_ - k) * sizeof(float));
            bf16_round_row(x[n], m->inp + (size_t)(n0 + n) * m->C + k0, k);
        }
        for (int p = 0; p < int_ceil_div(k, 2); p += MATVEC_BF16_PAIRS_) {
            const uint32_t* pairs = m->packed + panel * panel_pairs + (size_t)(k0 / 2 + p) * BF16_TILE;
            for (int n = 0; n < rows; n++) {
                matvec_bf16_add_runs_(sums[n], x[n] + 2 * p, pairs, apart * panel_pairs, runs);
            }
        }
    }
    for (int n = 0; n < rows; n++) {
        for (int r = 0; r < runs; r++) {
            matvec_bf16_store_(m, n0 + n, panel + r * apart, &sums[n][r]);
        }
    }
}

void matvec_bf16_forward_cpu(float* out, const float* inp, const uint32_t* packed, const float* bias,
                             MatmulSizes sizes) {
    const int N = sizes.N, OC = sizes.OC;
    const MatvecBf16_ m = {out, inp, packed, bias, N, sizes.C, OC};
    const int panels = int_ceil_div(OC, BF16_TILE), run = panels / MATVEC_STREAMS,
              rest = panels % MATVEC_STREAMS; // panels of a run, and after the last run
#pragma omp parallel for schedule(static)
    for (int i = 0; i < run + rest; i++) {
        for (int n = 0; n < N; n += MATVEC_BF16_ROWS_) {
            const int rows = int_min(MATVEC_BF16_ROWS_, N - n);
            if (i < run) {
                matvec_bf16_rows_(&m, n, rows, i, run, MATVEC_STREAMS);
            } else {
                matvec_bf16_rows_(&m, n, rows, i + (MATVEC_STREAMS - 1) * run, 0, 1);
            }
        }
    }
}

#endif // MATVEC_IMPLEMENTATION

#endif
