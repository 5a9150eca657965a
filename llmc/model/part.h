/*
part.h -- the part of a model that a process has: a part of each matrix, and some layers.

Rank i of t tensor ranks has

    heads of queries i NH/t, ..., and their heads of keys    rows of qkvw, qkvb; columns of attprojw
                                                             and of norms of all heads together
    hidden units i F/t, ... of the MLP                       rows of each gate of fcw, fcb;
                                                             columns of fcprojw
    vocabulary rows i Vp/t, ...                              of wte, head

All else is whole in every rank. A rank's part of a matrix is a matrix of its own in memory.

A run may instead divide the experts: rank i of e has experts i E/e, ..., which are rows of efcw and
efcprojw.

Such a part of some layers is a smaller model: model_part_of returns its sizes. The files of a
model, and its first random values, are always those of the whole.
*/
#ifndef LLMC_PART_H
#define LLMC_PART_H

#include "llmc/model/config.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the sizes of a part of the model `whole`, as a model of its own. `part` names ranks and
// layers that exist.
ModelConfig model_part_of(ModelConfig whole, ModelPart part);

// Returns the sizes of the model that a part belongs to, except its lists of layers: only the kinds
// of the part's layers are right.
ModelConfig model_of_part(ModelConfig own);

// Returns the reason why t ranks cannot cut a model into parts of a multiple of `unit` columns;
// NULL: they can. `text` (room) is memory for it.
const char* part_uncut(char* text, size_t room, ModelConfig whole, int t, int unit);

// ---- elements ----

// Elements that are consecutive in a part's tensor and in the whole tensor; both counted from the
// start of the tensor of a layer.
typedef struct {
    size_t part, whole, count;
} PartRun;

// Returns the run that starts at element `at` of a part's tensor. `row` is the tensor's row in the
// part.
PartRun part_run(const TensorRow* row, ModelConfig whole, ModelPart part, size_t at);

#ifdef __cplusplus
}
#endif

#ifdef PART_IMPLEMENTATION

#include <stdio.h>
#include <string.h>

// ---- sizes ----

// Keeps the bits of the part's layers in a list of layers.
static void part_shift_layers_(uint8_t layers[LAYER_SET_BYTES], ModelPart part) {
    uint8_t own[LAYER_SET_BYTES] = {0};
    for (int l = 0; l < part.layers; l++) {
        own[l / 8] |= (uint8_t)(layer_is_in(layers, part.first_layer + l) << l % 8);
    }
    memcpy(layers, own, sizeof(own));
}

ModelConfig model_part_of(ModelConfig whole, ModelPart part) {
    ModelConfig cfg = whole;
    const int t = part.tensor_ranks;
    if (t > 1) {
        cfg.HS = model_head_size(whole);
        cfg.KV = model_key_heads(whole) / t;
        cfg.NH = whole.NH / t;
        cfg.F = model_hidden(whole) / t;
        cfg.Vp = whole.Vp / t;
    }
    if (part.layers > 0) {
        cfg.L = part.layers;
        part_shift_layers_(cfg.windows, part);
        part_shift_layers_(cfg.unrotated, part);
        part_shift_layers_(cfg.mixed, part);
        const int dense = whole.dense_layers - part.first_layer;
        cfg.dense_layers = dense < 0 ? 0 : dense < part.layers ? dense : part.layers;
    }
    cfg.part = part;
    return cfg;
}

ModelConfig model_of_part(ModelConfig own) {
    ModelConfig cfg = own;
    const int t = own.part.tensor_ranks;
    if (t > 1) {
        cfg.KV = model_key_heads(own) * t;
        cfg.NH = own.NH * t;
        cfg.F = own.F * t;
        cfg.Vp = own.Vp * t;
    }
    cfg.L = model_layers(own);
    cfg.dense_layers += own.dense_layers > 0 ? own.part.first_layer : 0;
    memset(&cfg.part, 0, sizeof(cfg.part));
    return cfg;
}

const char* part_uncut(char* text, size_t room, ModelConfig whole, int t, int unit) {
    const int KV = model_key_heads(whole), Q = model_heads(whole), F = model_hidden(whole);
    if (t == 1) {
        return NULL;
    }
    if (whole.E > 0) {
        return "experts are not cut";
    }
    if (model_mixer(whole) != MIXER_NONE) {
        return "layers with a delta rule or a short convolution are not cut";
    }
    if (model_has_latent(whole)) {
        return "matrices of latents are not cut";
    }
    if (t > MODEL_MAX_TENSOR_RANKS) {
        snprintf(text, room, "at most %d", MODEL_MAX_TENSOR_RANKS);
        return text;
    }
    if (t < 1 || KV % t != 0) { // NH is a multiple of KV
        snprintf(text, room, "%d heads%s", KV, KV < whole.NH ? " of keys" : "");
    } else if (F % t != 0) {
        snprintf(text, room, "%d hidden units", F);
    } else if (Q / t % unit != 0 || F / t % unit != 0) {
        const int is_heads = Q / t % unit != 0;
        snprintf(text, room, "parts of %d %s, no multiple of %d", is_heads ? Q / t : F / t,
                 is_heads ? "channels" : "hidden units", unit);
    } else {
        return NULL;
    }
    return text;
}

// ---- elements ----

// A cut of a tensor that consists of `matrices`, one below the other. Matrix m has lines[m] lines
// of `cols` elements (a vector: of 1), of which a rank has of_rank[m] consecutive ones.
typedef struct {
    int matrices;
    size_t cols;
    size_t lines[3], of_rank[3];
} PartLines_;

static PartLines_ part_lines_(const TensorRow* row, ModelConfig whole, int t) {
    PartLines_ lines = {1, row->rows == 1 ? 1 : row->cols, {(size_t)whole.Vp, 0, 0}, {0, 0, 0}};
    if (row->split == SPLIT_HEADS) {
        lines.matrices = 3;
        lines.lines[0] = (size_t)model_heads(whole);
        lines.lines[1] = lines.lines[2] = (size_t)model_keys(whole);
    } else if (row->split == SPLIT_ROWS) {
        lines.matrices = model_gates(whole);
        lines.lines[0] = lines.lines[1] = (size_t)model_hidden(whole);
    }
    for (int m = 0; m < lines.matrices; m++) {
        lines.of_rank[m] = lines.lines[m] / (size_t)t;
    }
    return lines;
}

// The rows of experts are also neighbors in the whole tensor.
static PartRun part_run_of_experts_(const TensorRow* row, ModelPart part, size_t at) {
    const size_t elements = tensor_layer_elements(row);
    const PartRun run = {at, (size_t)part.expert_rank * elements + at, elements - at};
    return run;
}

static PartRun part_run_of_cols_(const TensorRow* row, ModelPart part, size_t at) {
    const size_t cols = row->cols, r = at / cols, c = at % cols;
    const PartRun run = {at, (r * (size_t)part.tensor_ranks + (size_t)part.tensor_rank) * cols + c, cols - c};
    return run;
}

PartRun part_run(const TensorRow* row, ModelConfig whole, ModelPart part, size_t at) {
    size_t begin = 0, of_whole = 0; // of the matrix
    if (row->split == SPLIT_EXPERTS) {
        return part_run_of_experts_(row, part, at);
    }
    if (part.tensor_ranks <= 1 || row->split == SPLIT_NONE) {
        const PartRun all = {at, at, tensor_layer_elements(row) - at};
        return all;
    }
    if (row->split == SPLIT_COLS) {
        return part_run_of_cols_(row, part, at);
    }
    const PartLines_ lines = part_lines_(row, whole, part.tensor_ranks);
    int m = 0;
    while (at >= begin + lines.of_rank[m] * lines.cols) {
        begin += lines.of_rank[m] * lines.cols;
        of_whole += lines.lines[m] * lines.cols;
        m++;
    }
    const size_t elements = lines.of_rank[m] * lines.cols;
    const PartRun run = {at, of_whole + (size_t)part.tensor_rank * elements + (at - begin),
                         begin + elements - at};
    return run;
}

#endif // PART_IMPLEMENTATION

#endif
