/*
qkv_bf16.h -- the linear layer before attention with matmuls in bf16, on the CPU: queries, keys and
values leave its matmul rounded and packed for attention (attention_bf16.h), and their gradient
arrives packed from there.

    qkv (N, QKV) = inp qkvw^T + qkvb        dinp = dqkv qkvw
    dqkvw = dqkv^T inp                     dqkvb = sum_n dqkv

Queries and keys may be turned by rotary positions (rope.h) on the way, and their gradient is turned
back. Neither qkv nor dqkv is written in fp32. N = B T; T and the size of a head are multiples of
32.
*/
#ifndef LLMC_QKV_BF16_H
#define LLMC_QKV_BF16_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/bf16/attention_bf16.h"
#include "llmc/ops/gradient.h"
#include "llmc/bf16/matmul_bf16.h"

#ifdef __cplusplus
extern "C" {
#endif

// The linear layer. Weights are packed: for the forward pass, and for dinp.
typedef struct {
    AttentionSizes sizes;
    int C;
    const uint32_t *qkvw, *qkvw_backward;
    const float* qkvb; // or NULL
    Rope rope;         // without a table: no turn
} QkvBf16;

// Sets qkv, memory of (N, QKV) floats, packed; inp (N, C).
void qkv_bf16_forward_cpu(uint32_t* qkv, const QkvBf16* layer, const float* inp, MatmulBf16Scratch* scratch);

// Results of the backward pass. It sets dinp (N, C), and sets or adds to the gradients of
// parameters, according to `mode`; these may be NULL.
typedef struct {
    float *dinp, *dqkvw, *dqkvb;
    GradientMode mode;
} QkvBf16Gradients;

// Computes the gradients from attention's dqkv and inp (N, C).
void qkv_bf16_backward_cpu(const QkvBf16* layer, const QkvBf16Gradients* d, AttentionBf16Gradient dqkv,
                           const float* inp, MatmulBf16Scratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef QKV_BF16_IMPLEMENTATION

#include "llmc/base/vec.h"

typedef struct {
    const QkvBf16* layer;
    const Bf16Kernel* kernel;
    uint32_t* qkv;
} QkvBf16Forward_;

// Adds the bias to rows begin ... end-1 of a tile.
static void qkv_bf16_add_bias_(const MatmulBf16Tile* tile, const float* qkvb, int begin, int end) {
    for (int i = begin * BF16_TILE; i < end * BF16_TILE; i += LANES) {
        const Vec bias = vec_load(qkvb + tile->col + i % BF16_TILE);
        vec_store(tile->sums + i, vec_load(tile->sums + i) + bias);
    }
}

// Turns rows begin ... end-1 of a tile of queries or keys. No pair crosses the border of a tile.
static void qkv_bf16_turn_(const MatmulBf16Tile* tile, const QkvBf16* layer, int begin, int end) {
    for (int i = begin; i < end; i++) {
        const float* angles = rope_at(layer->rope, (tile->row + i) % layer->sizes.T);
        rope_turn(tile->sums + i * BF16_TILE, angles + tile->col % layer->sizes.HS, BF16_TILE);
    }
}

// Bf16Finish that adds the bias, turns the tile and packs it.
static void qkv_bf16_tile_(const void* of, int begin, int end) {
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const QkvBf16Forward_* forward = (const QkvBf16Forward_*)tile->context;
    const QkvBf16* layer = forward->layer;
    if (layer->qkvb) {
        qkv_bf16_add_bias_(tile, layer->qkvb, begin, end);
    }
    if (layer->rope.table && tile->col < attention_query_key_size(layer->sizes)) {
        qkv_bf16_turn_(tile, layer, begin, end);
    }
    if (end == BF16_TILE) {
        attention_bf16_pack_qkv(forward->kernel, forward->qkv, tile->sums, tile->row, tile->col,
                                layer->sizes);
    }
}

void qkv_bf16_forward_cpu(uint32_t* qkv, const QkvBf16* layer, const float* inp, MatmulBf16Scratch* scratch) {
    const AttentionSizes sizes = layer->sizes;
    const QkvBf16Forward_ forward = {layer, &scratch->kernel, qkv};
    const int C = layer->C;
    MatmulBf16 m =
        matmul_bf16_of(NULL, matmul_bf16_matrix((Matrix){inp, (size_t)C, 1}),
                       matmul_bf16_packed(layer->qkvw, C), sizes.B * sizes.T, attention_qkv_size(sizes), C);
    m.finish = qkv_bf16_tile_;
    m.context = &forward;
    matmul_bf16_product_cpu(m, scratch);
}

void qkv_bf16_backward_cpu(const QkvBf16* layer, const QkvBf16Gradients* d, AttentionBf16Gradient dqkv,
                           const float* inp, MatmulBf16Scratch* scratch) {
    const int N = layer->sizes.B * layer->sizes.T, C = layer->C, QKV = attention_qkv_size(layer->sizes);
    const MatmulBf16Factor by_token = matmul_bf16_packed(dqkv.packed, QKV),
                           by_channel = matmul_bf16_packed(dqkv.packed + matmul_bf16_pairs(N, QKV), N);
    if (d->dqkvw) {
        MatmulBf16 m =
            matmul_bf16_of(d->dqkvw, by_channel, matmul_bf16_matrix((Matrix){inp, (size_t)C, 1}), QKV, C, N);
        m.mode = d->mode;
        matmul_bf16_product_cpu(m, scratch);
    }
    if (d->dqkvb) { // from a row of sums per sequence
        matmul_backward_bias_cpu(d->dqkvb, dqkv.sums, layer->sizes.B, QKV, d->mode);
    }
    matmul_bf16_product_cpu(
        matmul_bf16_of(d->dinp, by_token, matmul_bf16_packed(layer->qkvw_backward, QKV), N, C, QKV), scratch);
}

#endif // QKV_BF16_IMPLEMENTATION

#endif
