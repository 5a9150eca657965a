/*
part.h -- the part of a model that a process has: some slices of each tensor, and some layers.

A run may cut the model into s slices. Slice i has

    heads of queries i NH/s, ..., and their heads of keys    rows of qkvw, qkvb; columns of attprojw
    hidden units i F/s, ... of the MLP                       rows of each gate of fcw, fcb;
                                                             columns of fcprojw
    words i Vp/s, ...                                        rows of wte, head

With fewer heads of keys than slices, s / KV slices in a row have a copy of the same head. All else
is whole in every process. A slice is a matrix of its own in memory, and the same calls process it
whichever process has it.

A run with experts may instead divide these: rank i of e has experts i E/e, ..., which are rows of
fcw and fcprojw.

A slice of some layers is a smaller model: model_part_of returns its sizes. The files of a model,
and its first random values, are always those of the whole.

    whole    laid out by the rows of the whole model: a block has all tensors of a layer
    part     laid out by the rows of the part: tensors that are not cut lie in group 0 (model.h)
*/
#ifndef LLMC_PART_H
#define LLMC_PART_H

#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the sizes of a part of the model `whole`, as a model of its own. `part` names slices and
// layers that exist.
ModelConfig model_part_of(ModelConfig whole, ModelPart part);

// Returns the sizes of the model that a part belongs to, but for its windows.
ModelConfig model_of_part(ModelConfig own);

// Returns how many slices in a row, out of s, have copies of the same heads of keys.
int part_keys_share(ModelConfig whole, int s);

// Returns what keeps a model from being cut into s slices of a multiple of `unit` columns, in
// words; NULL: nothing. `text` (room) is memory for them.
const char* part_unsliced(char* text, size_t room, ModelConfig whole, int s, int unit);

// ---- elements ----

// Neighbors in a copy of a part's tensor that are neighbors in the whole tensor, too; both counted
// from the begin of the tensor of a layer.
typedef struct {
    size_t part, whole, count;
} PartRun;

// Returns the run that begins at element `at` of copy k of a part's tensor. `row` is the tensor's
// row in the part.
PartRun part_run(const TensorRow* row, ModelConfig whole, ModelPart part, int k, size_t at);

// Returns the run that begins at element `at` of a tensor of the whole model, of s slices. Its
// `part` counts as if a process had all slices, one after the other. `row` is the tensor's row in
// the whole.
PartRun part_place(const TensorRow* row, ModelConfig whole, int s, size_t at);

// ---- groups ----

typedef enum { PART_TAKE, PART_PUT } PartCopy;

// A group of parameters in memory that has only this group, laid out by `rows`, which say how large
// elements are.
typedef struct {
    const TensorRow* rows;
    int group;
    void* memory;
} PartGroup;

// Copies the tensors that a group of a part and a group of the whole model have in common: takes
// them from the whole, or puts them into it.
void part_copy_group(PartCopy direction, PartGroup part, ModelPart which, PartGroup whole, ModelConfig cfg);

#ifdef __cplusplus
}
#endif

#ifdef PART_IMPLEMENTATION

#include <stdio.h>
#include <string.h>

// ---- sizes ----

static void part_shift_windows_(ModelConfig* cfg, ModelPart part) {
    const ModelConfig whole = *cfg;
    memset(cfg->windows, 0, sizeof(cfg->windows));
    for (int l = 0; l < part.layers; l++) {
        const int from = part.first_layer + l, has_window = whole.windows[from / 8] >> from % 8 & 1;
        cfg->windows[l / 8] |= (uint8_t)(has_window << l % 8);
    }
}

int part_keys_share(ModelConfig whole, int s) {
    const int KV = model_key_heads(whole);
    return KV < s ? s / KV : 1;
}

ModelConfig model_part_of(ModelConfig whole, ModelPart part) {
    ModelConfig cfg = whole;
    const int s = part.of_slices, KV = model_key_heads(whole);
    if (s > 1) {
        cfg.HS = model_head_size(whole);
        cfg.KV = KV > s ? KV / s : 1;
        cfg.NH = whole.NH / s;
        cfg.F = model_hidden(whole) / s;
        cfg.Vp = whole.Vp / s;
    }
    if (part.layers > 0) {
        cfg.L = part.layers;
        part_shift_windows_(&cfg, part);
    }
    cfg.part = part;
    cfg.part.keys_share = s > 1 ? part_keys_share(whole, s) : 0;
    return cfg;
}

ModelConfig model_of_part(ModelConfig own) {
    ModelConfig cfg = own;
    const int s = own.part.of_slices, share = own.part.keys_share;
    if (s > 1) {
        cfg.KV = share > 1 ? s / share : model_key_heads(own) * s;
        cfg.NH = own.NH * s;
        cfg.F = own.F * s;
        cfg.Vp = own.Vp * s;
    }
    cfg.L = model_layers(own);
    memset(&cfg.part, 0, sizeof(cfg.part));
    return cfg;
}

const char* part_unsliced(char* text, size_t room, ModelConfig whole, int s, int unit) {
    const int KV = model_key_heads(whole), Q = model_heads(whole), F = model_hidden(whole);
    if (s == 1) {
        return NULL;
    }
    if (whole.E > 0) {
        return "experts are not sliced";
    }
    if (model_architecture(whole.arch)->heads == HEADS_ROW_NORM) {
        return "a norm over all heads is not sliced";
    }
    if (s > MODEL_MAX_SLICES) {
        snprintf(text, room, "at most %d", MODEL_MAX_SLICES);
        return text;
    }
    if (s < 1 || whole.NH % s != 0 || (KV % s != 0 && s % KV != 0)) {
        const int has_heads = s > 0 && whole.NH % s == 0;
        snprintf(text, room, "%d heads%s", has_heads ? KV : whole.NH, has_heads ? " of keys" : "");
    } else if (F % s != 0) {
        snprintf(text, room, "%d hidden units", F);
    } else if (Q / s % unit != 0 || F / s % unit != 0) {
        const int is_heads = Q / s % unit != 0;
        snprintf(text, room, "slices of %d %s, no multiple of %d", is_heads ? Q / s : F / s,
                 is_heads ? "channels" : "hidden units", unit);
    } else {
        return NULL;
    }
    return text;
}

// ---- elements ----

// The cut of a tensor: lines of `cols` elements, which a vector has one of each; of the lines that
// lie one below the other, slice i has those from `first` on in each of `matrices`.
typedef struct {
    int matrices, slices;
    size_t cols;
    size_t lines[3], of_slice[3]; // of each matrix, and of a slice of it
    int share;                    // slices in a row that have the same lines of matrices 1 and 2
} PartLines_;

static PartLines_ part_lines_(TensorSplit split, int is_vector, ModelConfig whole, int s, size_t cols) {
    PartLines_ lines = {1, s, is_vector ? 1 : cols, {0, 0, 0}, {0, 0, 0}, 1};
    const int HS = model_head_size(whole);
    size_t rows[3] = {(size_t)whole.Vp, 0, 0};
    if (split == SPLIT_HEADS) {
        lines.matrices = 3;
        rows[0] = (size_t)model_heads(whole);
        rows[1] = rows[2] = (size_t)model_keys(whole);
        lines.share = part_keys_share(whole, s);
    } else if (split == SPLIT_ROWS) {
        lines.matrices = model_gates(whole);
        rows[0] = rows[1] = (size_t)model_hidden(whole);
    }
    for (int m = 0; m < lines.matrices; m++) {
        lines.lines[m] = rows[m];
        lines.of_slice[m] = m > 0 && lines.share > 1 ? (size_t)HS : rows[m] / (size_t)s;
    }
    return lines;
}

// Returns the first line of a slice in matrix m.
static size_t part_first_line_(const PartLines_* lines, int m, int slice) {
    return (size_t)(m > 0 ? slice / lines->share : slice) * lines->of_slice[m];
}

// The rows of experts are neighbors in the whole tensor, too.
static PartRun part_run_of_experts_(const TensorRow* row, ModelPart part, size_t at) {
    const size_t elements = tensor_layer_elements(row);
    const PartRun run = {at, (size_t)part.expert_rank * elements + at, elements - at};
    return run;
}

static PartRun part_run_of_cols_(const TensorRow* row, int s, int slice, size_t at) {
    const size_t cols = row->cols, r = at / cols, c = at % cols;
    const PartRun run = {at, (r * (size_t)s + (size_t)slice) * cols + c, cols - c};
    return run;
}

PartRun part_run(const TensorRow* row, ModelConfig whole, ModelPart part, int k, size_t at) {
    const int s = part.of_slices, slice = part.first_slice + tensor_slice(row, k);
    size_t begin = 0, of_whole = 0; // of the matrix
    if (row->split == SPLIT_EXPERTS) {
        return part_run_of_experts_(row, part, at);
    }
    if (s <= 1 || row->split == SPLIT_NONE) {
        const PartRun all = {at, at, tensor_layer_elements(row) - at};
        return all;
    }
    if (row->split == SPLIT_COLS) {
        return part_run_of_cols_(row, s, slice, at);
    }
    const PartLines_ lines = part_lines_(row->split, row->rows == 1, whole, s, row->cols);
    int m = 0;
    while (at >= begin + lines.of_slice[m] * lines.cols) {
        begin += lines.of_slice[m] * lines.cols;
        of_whole += lines.lines[m] * lines.cols;
        m++;
    }
    const PartRun run = {at, of_whole + part_first_line_(&lines, m, slice) * lines.cols + (at - begin),
                         begin + lines.of_slice[m] * lines.cols - at};
    return run;
}

static PartRun part_place_in_cols_(const TensorRow* row, int s, size_t at) {
    const size_t cols = row->cols / (size_t)s, r = at / row->cols, slice = at % row->cols / cols,
                 c = at % row->cols % cols;
    const PartRun run = {(slice * row->rows + r) * cols + c, at, cols - c};
    return run;
}

PartRun part_place(const TensorRow* row, ModelConfig whole, int s, size_t at) {
    size_t begin = 0, in_slice = 0, elements = 0; // of the matrix; of a slice
    // words keep their order
    if (s <= 1 || row->split == SPLIT_NONE || row->split == SPLIT_WORDS) {
        const PartRun all = {at, at, tensor_layer_elements(row) - at};
        return all;
    }
    if (row->split == SPLIT_COLS) {
        return part_place_in_cols_(row, s, at);
    }
    const PartLines_ lines = part_lines_(row->split, row->rows == 1, whole, s, row->cols);
    for (int m = 0; m < lines.matrices; m++) {
        elements += lines.of_slice[m] * lines.cols;
    }
    int m = 0;
    while (at >= begin + lines.lines[m] * lines.cols) {
        begin += lines.lines[m] * lines.cols;
        in_slice += lines.of_slice[m] * lines.cols;
        m++;
    }
    const size_t of_slice = lines.of_slice[m] * lines.cols, inside = (at - begin) % of_slice,
                 slice = (at - begin) / of_slice * (size_t)(m > 0 ? lines.share : 1);
    const PartRun run = {slice * elements + in_slice + inside, at, of_slice - inside};
    return run;
}

// ---- groups ----

static void part_copy_tensor_(PartCopy direction, const TensorRow* row, char* part, char* whole,
                              ModelConfig cfg, ModelPart which, int k) {
    const size_t bytes = row->element_bytes;
    for (size_t at = 0; at < tensor_layer_elements(row);) {
        const PartRun run = part_run(row, cfg, which, k, at);
        char *a = part + run.part * bytes, *b = whole + run.whole * bytes;
        memcpy(direction == PART_TAKE ? a : b, direction == PART_TAKE ? b : a, run.count * bytes);
        at += run.count;
    }
}

void part_copy_group(PartCopy direction, PartGroup part, ModelPart which, PartGroup whole, ModelConfig cfg) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow *row = &part.rows[i], *from = &whole.rows[i];
        const int first = tensor_first_copy_in_group(row, part.group),
                  copies = tensor_is_in_group(row, part.group) ? tensor_copies_in_group(row) : 0;
        for (int k = first; k < first + copies; k++) {
            const int l = which.first_layer + tensor_lowest_layer(row, k);
            char* tensor = (char*)tensor_in_group(row, part.memory) + (size_t)(k - first) * row->layer_bytes;
            if (tensor_group(from, from->in_block ? l : 0) == whole.group) {
                part_copy_tensor_(direction, row, tensor, (char*)tensor_in_group(from, whole.memory), cfg,
                                  which, k);
            }
        }
    }
}

#endif // PART_IMPLEMENTATION

#endif
