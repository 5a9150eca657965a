/*
bf16_weights.h -- copies of a model's matrices as factors in bf16 (matmul_bf16.h), for --matmul
bf16 on the CPU.

    forward     of (OC, C): the right factor of out = inp weight^T
    backward    the right factor of dinp = dout weight; only for training

The embedding has copies only if it is also the classifier: a token's row is read in fp32. The
matrix of each expert has factors of its own, one after the other; its sizes are multiples of
BF16_TILE. The matrices themselves stay fp32. After a change they are packed again; until then all
passes read the old copies.
*/
#ifndef LLMC_BF16_WEIGHTS_H
#define LLMC_BF16_WEIGHTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/memory.h"
#include "llmc/model/model.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/layers/weight.h"

typedef enum { PACKED_FORWARD, PACKED_BACKWARD, PACKED_KINDS } PackedFor;

typedef struct {
    const TensorRow* rows; // layout of the parameters in fp32
    void* params;          // the parameters
    int kinds;             // 1: only for the forward pass
    int has_head;          // the classifier has a matrix of its own
    Bf16Pack pack;
    size_t at[MODEL_PARAMETER_ROWS][PACKED_KINDS]; // of layer 0, in `memory`
    uint32_t* memory;
} Bf16Weights;

// Returns true if row i of the table is a matrix that matmuls read.
static inline int bf16_weights_has(const Bf16Weights* w, int i) {
    const TensorRow* row = &w->rows[i];
    return quantized_is_matrix(row) && !(row->kind == KIND_EMBEDDING && w->has_head);
}

// Returns C or F, whichever is not a whole number of tiles, or 0. No expert's matrix may start
// inside a tile of another.
static inline int bf16_weights_unfit(ModelConfig cfg) {
    const int F = model_expert_hidden(cfg);
    return cfg.E == 0 ? 0 : cfg.C % BF16_TILE ? cfg.C : F % BF16_TILE ? F : 0;
}

// Returns the rows of the matrix of an expert.
static inline int bf16_weights_expert_rows_(const TensorRow* row) { return (int)row->rows / row->experts; }

// Returns the size of a copy of an expert.
static inline size_t bf16_weights_expert_pairs_(const TensorRow* row, int kind) {
    const int OC = bf16_weights_expert_rows_(row), C = (int)row->cols;
    return kind == PACKED_FORWARD ? matmul_bf16_pairs(OC, C) : matmul_bf16_pairs(C, OC);
}

// Returns the size of a copy of one layer.
static inline size_t bf16_weights_pairs_(const TensorRow* row, int kind) {
    return (size_t)row->experts * bf16_weights_expert_pairs_(row, kind);
}

// Sets the places of copies; returns the bytes of all.
static inline size_t bf16_weights_place_(Bf16Weights* w) {
    size_t at = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int kind = 0; kind < w->kinds && bf16_weights_has(w, i); kind++) {
            w->at[i][kind] = at;
            at += w->rows[i].layers * bf16_weights_pairs_(&w->rows[i], kind);
        }
    }
    return at * sizeof(uint32_t);
}

// Opens copies of parameters in fp32, laid out by `rows`; both stay the caller's.
static inline void bf16_weights_open(Bf16Weights* w, Memory* memory, const TensorRow* rows, void* params,
                                     int kinds, Bf16Pack pack) {
    w->rows = rows;
    w->params = params;
    w->kinds = kinds;
    w->pack = pack;
    w->has_head = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        w->has_head |= rows[i].kind == KIND_HEAD && !tensor_is_absent(&rows[i]);
    }
    w->memory = (uint32_t*)memory_take(memory, "packed in bf16", MEMORY_DEVICE, bf16_weights_place_(w));
}

static inline uint32_t* bf16_weights_at_(const Bf16Weights* w, int row, int layer, int kind) {
    return w->memory + w->at[row][kind] + layer * bf16_weights_pairs_(&w->rows[row], kind);
}

// Packs `count` rows of expert e of a layer of a matrix, from `first` on.
static inline void bf16_weights_pack_expert_(Bf16Weights* w, int row, int layer, int e, int first,
                                             int count) {
    const TensorRow* r = &w->rows[row];
    const int OC = bf16_weights_expert_rows_(r), C = (int)r->cols;
    const float* weight =
        (const float*)tensor_at_layer(r, w->params, layer) + (size_t)e * (size_t)OC * (size_t)C;
    uint32_t* forward = bf16_weights_at_(w, row, layer, PACKED_FORWARD) +
                        (size_t)e * bf16_weights_expert_pairs_(r, PACKED_FORWARD);
    bf16_pack_right(w->pack, forward + matmul_bf16_pairs(first, C), matmul_bf16_pairs(1, C),
                    matrix_at(matmul_bf16_forward_weight(weight, C), 0, first), C, count);
    if (w->kinds > PACKED_BACKWARD) {
        uint32_t* backward = bf16_weights_at_(w, row, layer, PACKED_BACKWARD) +
                             (size_t)e * bf16_weights_expert_pairs_(r, PACKED_BACKWARD);
        bf16_pack_right(w->pack, backward + matmul_bf16_pairs(1, first), matmul_bf16_pairs(1, OC),
                        matrix_at(matmul_bf16_backward_weight(weight, C), first, 0), count, C);
    }
}

// Packs `count` rows of a layer of a matrix from `first` on, a multiple of 32, on one thread.
// Other threads may pack other rows.
static inline void bf16_weights_pack_rows(Bf16Weights* w, int row, int layer, int first, int count) {
    const int OC = bf16_weights_expert_rows_(&w->rows[row]);
    while (count > 0) { // by expert
        const int part = int_min(count, OC - first % OC);
        bf16_weights_pack_expert_(w, row, layer, first / OC, first % OC, part);
        first += part;
        count -= part;
    }
}

// Packs all matrices, on all cores.
static inline void bf16_weights_pack(Bf16Weights* w) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &w->rows[i];
        for (int l = 0; l < row->layers && bf16_weights_has(w, i); l++) {
#pragma omp parallel for schedule(static)
            for (int o = 0; o < (int)row->rows; o += BF16_TILE) {
                bf16_weights_pack_rows(w, i, l, o, int_min(BF16_TILE, (int)row->rows - o));
            }
        }
    }
}

// Returns the copies of layer l; NULL for matrices without copies, and for kinds that are not kept.
static inline PackedParameters bf16_weights_at_layer(const Bf16Weights* w, int l, PackedFor kind) {
    PackedParameters copies;
    memset(&copies, 0, sizeof(copies));
    for (int i = 0; i < MODEL_PARAMETER_ROWS && (int)kind < w->kinds; i++) {
        const TensorRow* row = &w->rows[i];
        if (bf16_weights_has(w, i)) {
            const uint32_t* copy = bf16_weights_at_(w, i, tensor_copy(row, l), kind);
            memcpy((char*)&copies + row->member, &copy, sizeof(copy)); // all members are pointers
        }
    }
    return copies;
}

#endif
