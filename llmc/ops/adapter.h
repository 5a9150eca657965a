/*
adapter.h -- low-rank products that are added to a frozen linear layer (LoRA): the contract, and the
CPU version. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.

    h   (N, P R)             = inp a^T
    out (N, rows of part p) += factor h_p b_p^T         h_p: columns p R ... p R + R - 1 of h

    inp, dinp   (N, C)     out, dout   (N, OC)
    a, da       (P R, C)   b, db       (rows of all parts, R), one part below the other

The layer's matrix (OC, C) may be several ones of other programs, one below the other: each of these
parts has a product of its own, or none. Parts have one rank R.

The forward pass adds to out. The backward pass is in two: adapter_backward_weights_cpu sets or adds
to da and db, and keeps the gradient of h in the scratch, from which adapter_backward_input_cpu adds
to dinp. So dinp may be in the place of inp.

b is spread over the columns of all parts, with zeros elsewhere: so every product is one matmul.
*/
#ifndef LLMC_ADAPTER_H
#define LLMC_ADAPTER_H

#include <string.h>

#include "llmc/base/memory.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/matmul.h"

enum { ADAPTER_MAX_PARTS = 3 };

// Rows of the layer's matrix that each part has.
typedef struct {
    int count, first[ADAPTER_MAX_PARTS], rows[ADAPTER_MAX_PARTS];
} AdapterParts;

typedef struct {
    int rank; // R; 0: there is no adapter
    float factor;
    AdapterParts parts;
} AdapterShape;

// Returns the rows of a, and those of b.
static inline int adapter_a_rows(AdapterShape s) { return s.parts.count * s.rank; }
static inline int adapter_b_rows(AdapterShape s) {
    int rows = 0;
    for (int p = 0; p < s.parts.count; p++) {
        rows += s.parts.rows[p];
    }
    return rows;
}

// Memory for products of up to N rows, with up to `most` rows of a, and up to `widest` columns.
typedef struct {
    MatmulScratch* matmul;
    float *h, *dh;        // (P R, N)
    float *spread, *wide; // (P R, widest)
} AdapterScratch;

static inline void adapter_open(AdapterScratch* x, Memory* memory, MatmulScratch* matmul, size_t N,
                                size_t most, size_t widest) {
    const size_t rows = most * N, wide = most * widest;
    float* at =
        (float*)memory_take(memory, "scratch: adapter", MEMORY_DEVICE, 2 * (rows + wide) * sizeof(float));
    x->matmul = matmul;
    x->h = at;
    x->dh = at ? at + rows : NULL;
    x->spread = at ? at + 2 * rows : NULL;
    x->wide = at ? at + 2 * rows + wide : NULL;
}

// Returns where element (o, r) of part p is in rows (P R, OC), and o's row of b.
static inline size_t adapter_spread_at(AdapterShape s, int OC, int p, int o, int r) {
    return (size_t)(p * s.rank + r) * (size_t)OC + (size_t)(s.parts.first[p] + o);
}

// Sets `spread` (P R, OC) to b's transpose times the factor.
static inline void adapter_spread_(float* spread, const float* b, AdapterShape s, int OC) {
    memset(spread, 0, (size_t)adapter_a_rows(s) * (size_t)OC * sizeof(float));
    for (int p = 0; p < s.parts.count; p++) {
#pragma omp parallel for schedule(static)
        for (int o = 0; o < s.parts.rows[p]; o++) {
            for (int r = 0; r < s.rank; r++) {
                spread[adapter_spread_at(s, OC, p, o, r)] =
                    s.factor * b[(size_t)o * (size_t)s.rank + (size_t)r];
            }
        }
        b += (size_t)s.parts.rows[p] * (size_t)s.rank;
    }
}

// Sets or adds to db from its transpose (P R, OC), which lacks the factor.
static inline void adapter_collect_(float* db, const float* wide, AdapterShape s, int OC, GradientMode mode) {
    for (int p = 0; p < s.parts.count; p++) {
#pragma omp parallel for schedule(static)
        for (int o = 0; o < s.parts.rows[p]; o++) {
            for (int r = 0; r < s.rank; r++) {
                float* to = db + (size_t)o * (size_t)s.rank + (size_t)r;
                const float value = s.factor * wide[adapter_spread_at(s, OC, p, o, r)];
                *to = mode == GRADIENT_ADD ? *to + value : value;
            }
        }
        db += (size_t)s.parts.rows[p] * (size_t)s.rank;
    }
}

static inline void adapter_forward_cpu(float* out, const float* inp, const float* a, const float* b,
                                       AdapterShape s, MatmulSizes sizes, const AdapterScratch* x) {
    const int rows = adapter_a_rows(s);
    matmul_forward_cpu(x->h, a, inp, NULL, (MatmulSizes){rows, sizes.C, sizes.N}, x->matmul);
    adapter_spread_(x->spread, b, s, sizes.OC);
    matmul_backward_weight_cpu(out, x->h, x->spread, (MatmulSizes){rows, sizes.OC, sizes.N}, GRADIENT_ADD,
                               x->matmul);
}

static inline void adapter_backward_weights_cpu(float* da, float* db, const float* dout, const float* inp,
                                                const float* a, const float* b, AdapterShape s,
                                                MatmulSizes sizes, GradientMode mode,
                                                const AdapterScratch* x) {
    const int rows = adapter_a_rows(s);
    const size_t elements = (size_t)rows * (size_t)sizes.C;
    matmul_forward_cpu(x->h, a, inp, NULL, (MatmulSizes){rows, sizes.C, sizes.N}, x->matmul);
    matmul_backward_input_cpu(x->wide, x->h, dout, (MatmulSizes){rows, sizes.OC, sizes.N}, x->matmul);
    adapter_collect_(db, x->wide, s, sizes.OC, mode);
    adapter_spread_(x->spread, b, s, sizes.OC);
    matmul_forward_cpu(x->dh, x->spread, dout, NULL, (MatmulSizes){rows, sizes.OC, sizes.N}, x->matmul);
    matmul_backward_input_cpu(x->wide, x->dh, inp, (MatmulSizes){rows, sizes.C, sizes.N}, x->matmul);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < elements; i++) {
        da[i] = mode == GRADIENT_ADD ? da[i] + x->wide[i] : x->wide[i];
    }
}

static inline void adapter_backward_input_cpu(float* dinp, const float* a, AdapterShape s, MatmulSizes sizes,
                                              const AdapterScratch* x) {
    matmul_backward_weight_cpu(dinp, x->dh, a, (MatmulSizes){adapter_a_rows(s), sizes.C, sizes.N},
                               GRADIENT_ADD, x->matmul);
}

enum { ADAPTER_PIECE_ = 256 }; // columns that are added at a time

// Adds columns c ... c + count - 1 of part p's product to a row of the matrix: `b` is row o of b.
static inline void adapter_merge_piece_(float* row, const float* a, const float* b, AdapterShape s, int C,
                                        int c, int count) {
    float sum[ADAPTER_PIECE_] = {0};
    for (int r = 0; r < s.rank; r++) {
        for (int i = 0; i < count; i++) {
            sum[i] += b[r] * a[(size_t)r * (size_t)C + (size_t)(c + i)];
        }
    }
    for (int i = 0; i < count; i++) {
        row[c + i] += s.factor * sum[i];
    }
}

// Adds the products to the matrix itself: weight (OC, C) += factor b_p a_p.
static inline void adapter_merge_cpu(float* weight, const float* a, const float* b, AdapterShape s, int C) {
    for (int p = 0; p < s.parts.count; p++) {
        const float* of_part = a + (size_t)(p * s.rank) * (size_t)C;
#pragma omp parallel for schedule(static)
        for (int o = 0; o < s.parts.rows[p]; o++) {
            float* row = weight + (size_t)(s.parts.first[p] + o) * (size_t)C;
            for (int c = 0; c < C; c += ADAPTER_PIECE_) {
                adapter_merge_piece_(row, of_part, b + (size_t)o * (size_t)s.rank, s, C, c,
                                     C - c < ADAPTER_PIECE_ ? C - c : ADAPTER_PIECE_);
            }
        }
        b += (size_t)s.parts.rows[p] * (size_t)s.rank;
    }
}

#endif
