/*
mlp_bf16.h -- the MLP of a block with matmuls in bf16, on the CPU: its hidden layer leaves one
matmul in the form in which it enters the next, rounded and packed.

    fch (N, gates F) = inp fcw^T + fcb         act (N, F) = activation of fch (activation.h)
    out (N, C)       = act fcprojw^T + fcprojb
    dfch             = (dout fcprojw) act'(fch)       dinp = dfch fcw
    dfcprojw         = dout^T act                     dfcw = dfch^T inp

The activation and its derivative process a tile of a matmul while it is in a cache. Neither act nor
dfch is written in fp32; fch is, tile after tile (matmul_bf16_tile_at). The backward pass recomputes
act from it. With two gates, a panel of the gate and the panel of the same columns of up follow each
other, so a tile of up finds its gate in a cache.

A SwiGLU may have rows that count `scale` times (N), like the rows of experts (experts.h):

    act = scale activation of fch     dfch = scale (dout fcprojw) act'(fch)
    dscale = (dout fcprojw) . activation of fch

in parts, the sums of 32 columns each.

N and F are multiples of 32. A packed array occupies half the memory of fp32, so an array of N F
floats holds two of them.
*/
#ifndef LLMC_MLP_BF16_H
#define LLMC_MLP_BF16_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/ops/activation.h"
#include "llmc/ops/gradient.h"
#include "llmc/bf16/matmul_bf16.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline int mlp_bf16_fits(size_t N, size_t F) { return N % BF16_TILE == 0 && F % BF16_TILE == 0; }

// The MLP of a layer. Weights are packed: for the forward pass, and for the gradients of its
// inputs.
typedef struct {
    ActivationKind kind;
    int N, C, F;
    float* fch;    // (N, gates F) in tiles
    uint32_t* act; // memory of (N, F) floats; after the forward pass a left factor, tokens over F
    const uint32_t *fcw, *fcprojw, *fcw_backward, *fcprojw_backward;
    const float *fcb, *fcprojb; // or NULL
    const float* scale;         // (N) of SwiGLU, or NULL
} MlpBf16;

// ---- forward ----

// Sets fch and act.
void mlp_bf16_hidden_cpu(const MlpBf16* mlp, const float* inp, MatmulBf16Scratch* scratch);

// Sets out (N, C), after mlp_bf16_hidden_cpu.
void mlp_bf16_forward_cpu(float* out, const MlpBf16* mlp, MatmulBf16Scratch* scratch);

// ---- backward ----

// Results of the backward pass, and memory that it uses. It sets dinp, and sets or adds to the
// gradients of parameters, according to `mode`; these may be NULL.
typedef struct {
    float *dinp, *dfcw, *dfcb, *dfcprojw, *dfcprojb;
    GradientMode mode;
    float* dfch;   // (N, gates F)
    float* sums;   // (N / 32, gates F): sums of tiles of dfch over tokens, for dfcb
    float* dscale; // (F / 32, N) parts, which it sets; with `scale` only
} MlpGradients;

// Computes the gradients from dout (N, C) and inp (N, C). act is undefined afterwards. dinp may be
// dout.
void mlp_bf16_backward_cpu(const MlpBf16* mlp, const MlpGradients* d, const float* dout, const float* inp,
                           MatmulBf16Scratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef MLP_BF16_IMPLEMENTATION

#include "llmc/base/vec.h"

static int mlp_bf16_hidden_(const MlpBf16* mlp) { return activation_gates(mlp->kind) * mlp->F; }

// Return the offset of a tile in a factor packed over its `cols` columns (left, tokens), and in one
// packed over tokens.
static size_t mlp_bf16_over_cols_(int cols, int row, int col) {
    return (row / BF16_TILE) * matmul_bf16_pairs(1, cols) + matmul_bf16_pairs(1, col);
}

static size_t mlp_bf16_over_tokens_(const MlpBf16* mlp, int row, int col) {
    return (col / BF16_TILE) * matmul_bf16_pairs(1, mlp->N) + matmul_bf16_pairs(1, row);
}

static float* mlp_bf16_fch_(const MlpBf16* mlp, int row, int col) {
    return mlp->fch + matmul_bf16_tile_at(mlp->N, row, col);
}

// Returns the biases of 32 columns.
static const float* mlp_bf16_bias_(const MlpBf16* mlp, int col) {
    static const float none[BF16_TILE] = {0};
    return mlp->fcb ? mlp->fcb + col : none;
}

typedef struct {
    const MlpBf16* mlp;
    const Bf16Kernel* kernel;
} MlpBf16Forward_;

// Packs a tile of act at `col`.
static void mlp_bf16_pack_act_(const MlpBf16Forward_* forward, const float* act, int row, int col) {
    const MlpBf16* mlp = forward->mlp;
    const Bf16TilePacked to = {mlp->act + mlp_bf16_over_cols_(mlp->F, row, col), NULL, NULL, NULL};
    forward->kernel->pack_tile(&to, act);
}

// Writes rows [begin, end) of a tile of fch past the caches, then packs the activation of all.
ALWAYS_INLINE void mlp_bf16_activate_tile_(const void* of, int begin, int end,
                                           ActivationVec (*activate)(Vec)) {
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const MlpBf16Forward_* forward = (const MlpBf16Forward_*)tile->context;
    float* fch = mlp_bf16_fch_(forward->mlp, tile->row, tile->col);
    const float* bias = mlp_bf16_bias_(forward->mlp, tile->col);
    for (int i = begin * BF16_TILE; i < end * BF16_TILE; i += LANES) {
        const Vec x = vec_load(tile->sums + i) + vec_load(bias + i % BF16_TILE);
        vec_stream(fch + i, x);
        vec_store(tile->sums + i, activate(x).out);
    }
    if (end == BF16_TILE) {
        mlp_bf16_pack_act_(forward, tile->sums, tile->row, tile->col);
    }
}

// Bf16Finish of each kind.
#define MLP_BF16_TILES_(kind, word, name)                                                                    \
    static void mlp_bf16_##name##_tile_(const void* of, int begin, int end) {                                \
        mlp_bf16_activate_tile_(of, begin, end, name##_vec);                                                 \
    }
ACTIVATIONS_PLAIN(MLP_BF16_TILES_)

// A tile of the gate is written into the caches, where the tile of up finds it: it comes soon,
// after other rows of the gate.
ALWAYS_INLINE void mlp_bf16_gated_tile_(const void* of, int begin, int end, GatedVec (*gated)(Vec, Vec),
                                        int has_scale) {
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const MlpBf16Forward_* forward = (const MlpBf16Forward_*)tile->context;
    const int up = tile->col - forward->mlp->F; // column of act; below 0: a tile of the gate
    float *fch = mlp_bf16_fch_(forward->mlp, tile->row, tile->col),
          *gate = up < 0 ? fch : mlp_bf16_fch_(forward->mlp, tile->row, up);
    const float* bias = mlp_bf16_bias_(forward->mlp, tile->col);
    for (int i = begin * BF16_TILE; i < end * BF16_TILE; i += LANES) {
        const Vec x = vec_load(tile->sums + i) + vec_load(bias + i % BF16_TILE);
        if (up < 0) {
            vec_store(gate + i, x);
        } else {
            const Vec act = gated(vec_load(gate + i), x).out;
            vec_stream(fch + i, x);
            vec_store(tile->sums + i, has_scale ? forward->mlp->scale[tile->row + i / BF16_TILE] * act : act);
        }
    }
    if (end == BF16_TILE && up >= 0) {
        mlp_bf16_pack_act_(forward, tile->sums, tile->row, up);
    }
}

#define MLP_BF16_GATED_TILES_(kind, word, name, ...)                                                         \
    static void mlp_bf16_##name##_tile_(const void* of, int begin, int end) {                                \
        mlp_bf16_gated_tile_(of, begin, end, name##_vec, 0);                                                 \
    }                                                                                                        \
    static void mlp_bf16_scaled_##name##_tile_(const void* of, int begin, int end) {                         \
        mlp_bf16_gated_tile_(of, begin, end, name##_vec, 1);                                                 \
    }
ACTIVATIONS_GATED(MLP_BF16_GATED_TILES_)

void mlp_bf16_hidden_cpu(const MlpBf16* mlp, const float* inp, MatmulBf16Scratch* scratch) {
#define MLP_BF16_FINISH_(kind, word, name, ...) [kind] = mlp_bf16_##name##_tile_,
#define MLP_BF16_SCALED_(kind, word, name, ...) [kind] = mlp_bf16_scaled_##name##_tile_,
    static const Bf16Finish finishes[] = {ACTIVATIONS_PLAIN(MLP_BF16_FINISH_)
                                              ACTIVATIONS_GATED(MLP_BF16_FINISH_)},
                            scaled[] = {ACTIVATIONS_GATED(MLP_BF16_SCALED_)};
    const MlpBf16Forward_ forward = {mlp, &scratch->kernel};
    const MatmulBf16Factor left = matmul_bf16_matrix((Matrix){inp, (size_t)mlp->C, 1});
    MatmulBf16 m = matmul_bf16_of(NULL, left, matmul_bf16_packed(mlp->fcw, mlp->C), mlp->N,
                                  mlp_bf16_hidden_(mlp), mlp->C);
    m.finish = (mlp->scale ? scaled : finishes)[mlp->kind];
    m.context = &forward;
    m.paired = activation_gates(mlp->kind) == 2 ? mlp->F / BF16_TILE : 0;
    matmul_bf16_product_cpu(m, scratch);
}

void mlp_bf16_forward_cpu(float* out, const MlpBf16* mlp, MatmulBf16Scratch* scratch) {
    MatmulBf16 m = matmul_bf16_of(out, matmul_bf16_packed(mlp->act, mlp->F),
                                  matmul_bf16_packed(mlp->fcprojw, mlp->F), mlp->N, mlp->C, mlp->F);
    m.bias = mlp->fcprojb;
    matmul_bf16_product_cpu(m, scratch);
}

typedef struct {
    const MlpBf16* mlp;
    const Bf16Kernel* kernel;
    float *sums, *dscale; // or NULL
    // left, tokens over gates F; left, gates F over tokens; right, tokens over F
    uint32_t *dfch, *dfch_by_f, *act_by_f;
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

// Packs a tile of dfch for both matmuls, and sums it.
static void mlp_bf16_pack_dfch_(const MlpBf16Backward_* backward, const float* dfch, int row, int col) {
    const MlpBf16* mlp = backward->mlp;
    const int hidden = mlp_bf16_hidden_(mlp);
    const Bf16TilePacked to = {backward->dfch + mlp_bf16_over_cols_(hidden, row, col),
                               backward->dfch_by_f + mlp_bf16_over_tokens_(mlp, row, col), NULL, NULL};
    backward->kernel->pack_tile(&to, dfch);
    if (backward->sums) {
        mlp_bf16_sum_tile_(backward->sums + (size_t)row / BF16_TILE * hidden + col, dfch);
    }
}

static void mlp_bf16_pack_act_by_f_(const MlpBf16Backward_* backward, const float* act, int row, int col) {
    const Bf16TilePacked to = {NULL, NULL,
                               backward->act_by_f + mlp_bf16_over_tokens_(backward->mlp, row, col), NULL};
    backward->kernel->pack_tile(&to, act);
}

// Turns rows [begin, end) of a tile of dact into dfch, then packs the tile and act.
ALWAYS_INLINE void mlp_bf16_derive_tile_(const void* of, int begin, int end, ActivationVec (*activate)(Vec)) {
    // of the current tile
    static __thread __attribute__((aligned(64))) float act[BF16_TILE * BF16_TILE];
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const MlpBf16Backward_* backward = (const MlpBf16Backward_*)tile->context;
    const float* fch = mlp_bf16_fch_(backward->mlp, tile->row, tile->col);
    for (int i = begin * BF16_TILE; i < end * BF16_TILE; i += LANES) {
        const ActivationVec y = activate(vec_load(fch + i));
        vec_store(tile->sums + i, vec_load(tile->sums + i) * y.derivative);
        vec_store(act + i, y.out);
    }
    if (end == BF16_TILE) {
        mlp_bf16_pack_dfch_(backward, tile->sums, tile->row, tile->col);
        mlp_bf16_pack_act_by_f_(backward, act, tile->row, tile->col);
    }
}

// Bf16Finish of each kind.
#define MLP_BF16_BACKWARD_TILES_(kind, word, name)                                                           \
    static void mlp_bf16_##name##_backward_tile_(const void* of, int begin, int end) {                       \
        mlp_bf16_derive_tile_(of, begin, end, name##_vec);                                                   \
    }
ACTIVATIONS_PLAIN(MLP_BF16_BACKWARD_TILES_)

// Sets the parts of dscale of rows [begin, end) of a tile, from products of dact and act.
static void mlp_bf16_sum_dscale_(const MlpBf16Backward_* backward, const float* products, int row, int col,
                                 int begin, int end) {
    float* dscale = backward->dscale + (size_t)(col / BF16_TILE) * backward->mlp->N + row;
    for (int i = begin; i < end; i++) {
        const float* p = products + (size_t)i * BF16_TILE;
        Vec sum = vec_load(p);
        for (int j = LANES; j < BF16_TILE; j += LANES) {
            sum += vec_load(p + j);
        }
        dscale[i] = vec_hsum(sum);
    }
}

// Gives two tiles of dfch.
ALWAYS_INLINE void mlp_bf16_gated_backward_tile_(const void* of, int begin, int end,
                                                 GatedVec (*gated)(Vec, Vec), int has_scale) {
    // of the current tile
    static __thread __attribute__((aligned(64))) float act[BF16_TILE * BF16_TILE], dup[BF16_TILE * BF16_TILE],
        dscale[BF16_TILE * BF16_TILE];
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const MlpBf16Backward_* backward = (const MlpBf16Backward_*)tile->context;
    const MlpBf16* mlp = backward->mlp;
    const int row = tile->row, col = tile->col;
    const float *gate = mlp_bf16_fch_(mlp, row, col), *up = mlp_bf16_fch_(mlp, row, mlp->F + col);
    for (int i = begin * BF16_TILE; i < end * BF16_TILE; i += LANES) {
        const GatedVec y = gated(vec_load(gate + i), vec_load(up + i));
        const Vec dact = vec_load(tile->sums + i);
        if (has_scale) {
            const float scale = mlp->scale[row + i / BF16_TILE];
            vec_store(dscale + i, dact * y.out);
            vec_store(tile->sums + i, scale * dact * y.by_gate);
            vec_store(dup + i, scale * dact * y.by_up);
            vec_store(act + i, scale * y.out);
        } else {
            vec_store(tile->sums + i, dact * y.by_gate);
            vec_store(dup + i, dact * y.by_up);
            vec_store(act + i, y.out);
        }
    }
    if (has_scale) {
        mlp_bf16_sum_dscale_(backward, dscale, row, col, begin, end);
    }
    if (end == BF16_TILE) {
        mlp_bf16_pack_dfch_(backward, tile->sums, row, col);
        mlp_bf16_pack_dfch_(backward, dup, row, mlp->F + col);
        mlp_bf16_pack_act_by_f_(backward, act, row, col);
    }
}

#define MLP_BF16_GATED_BACKWARD_TILES_(kind, word, name, ...)                                                \
    static void mlp_bf16_##name##_backward_tile_(const void* of, int begin, int end) {                       \
        mlp_bf16_gated_backward_tile_(of, begin, end, name##_vec, 0);                                        \
    }                                                                                                        \
    static void mlp_bf16_scaled_##name##_backward_tile_(const void* of, int begin, int end) {                \
        mlp_bf16_gated_backward_tile_(of, begin, end, name##_vec, 1);                                        \
    }
ACTIVATIONS_GATED(MLP_BF16_GATED_BACKWARD_TILES_)

// Sets dfch and act, packed, and the sums of dfch.
static void mlp_bf16_derive_(const MlpBf16Backward_* backward, MatmulBf16Factor dout,
                             MatmulBf16Scratch* scratch) {
#define MLP_BF16_BACKWARD_FINISH_(kind, word, name, ...) [kind] = mlp_bf16_##name##_backward_tile_,
#define MLP_BF16_BACKWARD_SCALED_(kind, word, name, ...) [kind] = mlp_bf16_scaled_##name##_backward_tile_,
    static const Bf16Finish finishes[] = {ACTIVATIONS_PLAIN(MLP_BF16_BACKWARD_FINISH_)
                                              ACTIVATIONS_GATED(MLP_BF16_BACKWARD_FINISH_)},
                            scaled[] = {ACTIVATIONS_GATED(MLP_BF16_BACKWARD_SCALED_)};
    const MlpBf16* mlp = backward->mlp;
    MatmulBf16 m =
        matmul_bf16_of(NULL, dout, matmul_bf16_packed(mlp->fcprojw_backward, mlp->C), mlp->N, mlp->F, mlp->C);
    m.finish = (mlp->scale ? scaled : finishes)[mlp->kind];
    m.context = backward;
    m.read = mlp->fch;
    matmul_bf16_product_cpu(m, scratch);
}

void mlp_bf16_backward_cpu(const MlpBf16* mlp, const MlpGradients* d, const float* dout, const float* inp,
                           MatmulBf16Scratch* scratch) {
    const int N = mlp->N, C = mlp->C, F = mlp->F, hidden = mlp_bf16_hidden_(mlp);
    uint32_t* dfch = (uint32_t*)(void*)d->dfch;
    const MlpBf16Backward_ backward = {mlp,
                                       &scratch->kernel,
                                       d->dfcb ? d->sums : NULL,
                                       d->dscale,
                                       dfch,
                                       dfch + matmul_bf16_pairs(N, hidden),
                                       mlp->act};
    mlp_bf16_derive_(&backward, matmul_bf16_matrix((Matrix){dout, (size_t)C, 1}), scratch);
    if (d->dfcprojw) {
        const MatmulBf16Factor dout_by_channel = matmul_bf16_matrix((Matrix){dout, 1, (size_t)C});
        MatmulBf16 m =
            matmul_bf16_of(d->dfcprojw, dout_by_channel, matmul_bf16_packed(backward.act_by_f, N), C, F, N);
        m.row_sums = d->dfcprojb;
        m.mode = d->mode;
        matmul_bf16_product_cpu(m, scratch);
    } else if (d->dfcprojb) {
        matmul_backward_bias_cpu(d->dfcprojb, dout, N, C, d->mode);
    }
    if (d->dfcw) {
        MatmulBf16 m = matmul_bf16_of(d->dfcw, matmul_bf16_packed(backward.dfch_by_f, N),
                                      matmul_bf16_matrix((Matrix){inp, (size_t)C, 1}), hidden, C, N);
        m.mode = d->mode;
        matmul_bf16_product_cpu(m, scratch);
    }
    if (d->dfcb) { // from a row of sums per row of tiles
        matmul_backward_bias_cpu(d->dfcb, d->sums, N / BF16_TILE, hidden, d->mode);
    }
    matmul_bf16_product_cpu(matmul_bf16_of(d->dinp, matmul_bf16_packed(dfch, hidden),
                                           matmul_bf16_packed(mlp->fcw_backward, hidden), N, C, hidden),
                            scratch);
}

#endif // MLP_BF16_IMPLEMENTATION

#endif
