/*
mlp_bf16.h -- the MLP of a block with matmuls in bf16, on the CPU: its hidden layer leaves one
matmul in the form in which it enters the next, rounded and packed.

    fch (N, F) = inp fcw^T + fcb            gelu (N, F) = GELU(fch)
    out (N, C) = gelu fcprojw^T + fcprojb
    dfch       = (dout fcprojw) GELU'(fch)  dinp        = dfch fcw
    dfcprojw   = dout^T gelu                dfcw        = dfch^T inp

GELU and its derivative process a tile of a matmul while it is in a cache. Neither gelu nor dfch is
written in fp32; fch is, tile after tile (matmul_bf16_tile_at). The backward pass recomputes gelu
from it.

N and F are multiples of 32. A packed array occupies half the memory of fp32, so an array of N F
floats holds two of them.
*/
#ifndef LLMC_MLP_BF16_H
#define LLMC_MLP_BF16_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/ops/gradient.h"
#include "llmc/bf16/matmul_bf16.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline int mlp_bf16_fits(size_t N, size_t F) { return N % BF16_TILE == 0 && F % BF16_TILE == 0; }

// The MLP of a layer. Weights are packed: for the forward pass, and for the gradients of its
// inputs.
typedef struct {
    int N, C, F;
    float* fch;     // (N, F) in tiles
    uint32_t* gelu; // memory of (N, F) floats; after the forward pass a left factor, tokens over F
    const uint32_t *fcw, *fcprojw, *fcw_backward, *fcprojw_backward;
    const float *fcb, *fcprojb;
} MlpBf16;

// ---- forward ----

// Sets fch and gelu.
void mlp_bf16_hidden_cpu(const MlpBf16* mlp, const float* inp, MatmulBf16Scratch* scratch);

// Sets out (N, C), after mlp_bf16_hidden_cpu.
void mlp_bf16_forward_cpu(float* out, const MlpBf16* mlp, MatmulBf16Scratch* scratch);

// ---- backward ----

// Results of the backward pass, and memory that it uses. It sets dinp, and sets or adds to the
// gradients of parameters, according to `mode`; these may be NULL.
typedef struct {
    float *dinp, *dfcw, *dfcb, *dfcprojw, *dfcprojb;
    GradientMode mode;
    float* dfch; // (N, F)
    float* sums; // (N / 32, F): sums of tiles of dfch over tokens
} MlpGradients;

// Computes the gradients from dout (N, C) and inp (N, C). gelu is undefined afterwards.
void mlp_bf16_backward_cpu(const MlpBf16* mlp, const MlpGradients* d, const float* dout, const float* inp,
                           MatmulBf16Scratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef MLP_BF16_IMPLEMENTATION

#include "llmc/base/vec.h"
#include "llmc/ops/activation.h"

// Return the offset of a tile in a factor packed over F (left, tokens), and in one packed over
// tokens.
static size_t mlp_bf16_over_f_(const MlpBf16* mlp, int row, int col) {
    return (row / BF16_TILE) * matmul_bf16_pairs(1, mlp->F) + matmul_bf16_pairs(1, col);
}

static size_t mlp_bf16_over_tokens_(const MlpBf16* mlp, int row, int col) {
    return (col / BF16_TILE) * matmul_bf16_pairs(1, mlp->N) + matmul_bf16_pairs(1, row);
}

typedef struct {
    const MlpBf16* mlp;
    const Bf16Kernel* kernel;
} MlpBf16Forward_;

// Bf16Finish that writes fch past the caches, and packs GELU of it.
static void mlp_bf16_gelu_tile_(const void* of, int begin, int end) {
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const MlpBf16Forward_* forward = (const MlpBf16Forward_*)tile->context;
    const MlpBf16* mlp = forward->mlp;
    float* fch = mlp->fch + matmul_bf16_tile_at(mlp->N, tile->row, tile->col);
    for (int i = begin * BF16_TILE; i < end * BF16_TILE; i += LANES) {
        const Vec x = vec_load(tile->sums + i) + vec_load(mlp->fcb + tile->col + i % BF16_TILE);
        vec_stream(fch + i, x);
        vec_store(tile->sums + i, gelu_vec(x).out);
    }
    if (end == BF16_TILE) {
        const Bf16TilePacked to = {mlp->gelu + mlp_bf16_over_f_(mlp, tile->row, tile->col), NULL, NULL, NULL};
        forward->kernel->pack_tile(&to, tile->sums);
    }
}

void mlp_bf16_hidden_cpu(const MlpBf16* mlp, const float* inp, MatmulBf16Scratch* scratch) {
    const MlpBf16Forward_ forward = {mlp, &scratch->kernel};
    const MatmulBf16Factor left = matmul_bf16_matrix((Matrix){inp, (size_t)mlp->C, 1});
    MatmulBf16 m = matmul_bf16_of(NULL, left, matmul_bf16_packed(mlp->fcw, mlp->C), mlp->N, mlp->F, mlp->C);
    m.finish = mlp_bf16_gelu_tile_;
    m.context = &forward;
    matmul_bf16_product_cpu(m, scratch);
}

void mlp_bf16_forward_cpu(float* out, const MlpBf16* mlp, MatmulBf16Scratch* scratch) {
    MatmulBf16 m = matmul_bf16_of(out, matmul_bf16_packed(mlp->gelu, mlp->F),
                                  matmul_bf16_packed(mlp->fcprojw, mlp->F), mlp->N, mlp->C, mlp->F);
    m.bias = mlp->fcprojb;
    matmul_bf16_product_cpu(m, scratch);
}

typedef struct {
    const MlpBf16* mlp;
    const Bf16Kernel* kernel;
    float* sums;
    // left, tokens over F; left, F over tokens; right, tokens over F
    uint32_t *dfch, *dfch_by_f, *gelu_by_f;
} MlpBf16Backward_;

// Sets the sums of the columns of a tile.
static void mlp_bf16_sum_tile_(float* sums, const float* tile) {
    for (int j = 0; j < BF16_TILE; j += LANES) {
        Vec sum = vec_load(tile + j);
        for (int i = 1; i < BF16_TILE; i++) {
            sum += vec_load(tile + i * BF16_TILE + j);
        }
        vec_store(sums + j, sum);
    }
}

// Bf16Finish that turns dgelu into dfch, and packs it for both matmuls; packs gelu, too.
static void mlp_bf16_derive_tile_(const void* of, int begin, int end) {
    // of the current tile
    static __thread __attribute__((aligned(64))) float gelu[BF16_TILE * BF16_TILE];
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const MlpBf16Backward_* backward = (const MlpBf16Backward_*)tile->context;
    const MlpBf16* mlp = backward->mlp;
    const float* fch = mlp->fch + matmul_bf16_tile_at(mlp->N, tile->row, tile->col);
    for (int i = begin * BF16_TILE; i < end * BF16_TILE; i += LANES) {
        const ActivationVec y = gelu_vec(vec_load(fch + i));
        vec_store(tile->sums + i, vec_load(tile->sums + i) * y.derivative);
        vec_store(gelu + i, y.out);
    }
    if (end == BF16_TILE) {
        const size_t over_f = mlp_bf16_over_f_(mlp, tile->row, tile->col),
                     over_tokens = mlp_bf16_over_tokens_(mlp, tile->row, tile->col);
        const Bf16TilePacked dfch_to = {backward->dfch + over_f, backward->dfch_by_f + over_tokens, NULL,
                                        NULL},
                             gelu_to = {NULL, NULL, backward->gelu_by_f + over_tokens, NULL};
        backward->kernel->pack_tile(&dfch_to, tile->sums);
        backward->kernel->pack_tile(&gelu_to, gelu);
        mlp_bf16_sum_tile_(backward->sums + (size_t)tile->row / BF16_TILE * mlp->F + tile->col, tile->sums);
    }
}

// Sets dfch and gelu, packed, and the sums of dfch.
static void mlp_bf16_derive_(const MlpBf16Backward_* backward, MatmulBf16Factor dout,
                             MatmulBf16Scratch* scratch) {
    const MlpBf16* mlp = backward->mlp;
    MatmulBf16 m =
        matmul_bf16_of(NULL, dout, matmul_bf16_packed(mlp->fcprojw_backward, mlp->C), mlp->N, mlp->F, mlp->C);
    m.finish = mlp_bf16_derive_tile_;
    m.context = backward;
    m.read = mlp->fch;
    matmul_bf16_product_cpu(m, scratch);
}

void mlp_bf16_backward_cpu(const MlpBf16* mlp, const MlpGradients* d, const float* dout, const float* inp,
                           MatmulBf16Scratch* scratch) {
    const int N = mlp->N, C = mlp->C, F = mlp->F;
    uint32_t* dfch = (uint32_t*)(void*)d->dfch;
    const MlpBf16Backward_ backward = {
        mlp, &scratch->kernel, d->sums, dfch, dfch + matmul_bf16_pairs(N, F), mlp->gelu};
    mlp_bf16_derive_(&backward, matmul_bf16_matrix((Matrix){dout, (size_t)C, 1}), scratch);
    if (d->dfcprojw) {
        const MatmulBf16Factor dout_by_channel = matmul_bf16_matrix((Matrix){dout, 1, (size_t)C});
        MatmulBf16 m =
            matmul_bf16_of(d->dfcprojw, dout_by_channel, matmul_bf16_packed(backward.gelu_by_f, N), C, F, N);
        m.row_sums = d->dfcprojb;
        m.mode = d->mode;
        matmul_bf16_product_cpu(m, scratch);
    } else if (d->dfcprojb) {
        matmul_backward_bias_cpu(d->dfcprojb, dout, N, C, d->mode);
    }
    if (d->dfcw) {
        MatmulBf16 m = matmul_bf16_of(d->dfcw, matmul_bf16_packed(backward.dfch_by_f, N),
                                      matmul_bf16_matrix((Matrix){inp, (size_t)C, 1}), F, C, N);
        m.mode = d->mode;
        matmul_bf16_product_cpu(m, scratch);
    }
    if (d->dfcb) { // from a row of sums per row of tiles
        matmul_backward_bias_cpu(d->dfcb, d->sums, N / BF16_TILE, F, d->mode);
    }
    matmul_bf16_product_cpu(matmul_bf16_of(d->dinp, matmul_bf16_packed(dfch, F),
                                           matmul_bf16_packed(mlp->fcw_backward, F), N, C, F),
                            scratch);
}

#endif // MLP_BF16_IMPLEMENTATION

#endif
