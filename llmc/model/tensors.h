/*
tensors.h -- tables of tensors: one row for each tensor of a model, and where it lies in memory.

A row is one line of a table of model.h with its sizes filled in. Struct members, memory, sharding, files and
reports are loops over rows; nothing here knows a tensor by its name.

    layers   copies of a tensor in memory, which layers of the model may share or take in turn
    groups   parameters that are gathered, reduced and updated together: group 0 has what memory has once,
             group 1 + k block k
*/
#ifndef LLMC_TENSORS_H
#define LLMC_TENSORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/check.h"

typedef enum {
    INIT_ZERO,
    INIT_ONE,
    INIT_NORMAL,       // N(0, std), std = 0.02, more in narrow models (model_initial_std_)
    INIT_VOCAB,        // the same for the V rows of the vocabulary, zero for its padding
    INIT_NORMAL_SCALED // N(0, std / sqrt(2L)): projections into the residual stream, which adds up 2L of them
} TensorInit;

// What a parameter is: optimizers have rules for each kind (optimizer.h).
typedef enum {
    KIND_MATRIX,    // of a product
    KIND_EMBEDDING, // a table of rows; wte is the classifier's matrix, too
    KIND_VECTOR,    // a bias, or of a norm
    TENSOR_KINDS
} TensorKind;

// Where the model has a parameter: outside of the blocks, or in the attention or the MLP of each, with the norm before it.
typedef enum { PART_OUTSIDE, PART_ATTENTION, PART_MLP } TensorPart;

// Where memory has it: once, or in each block of parameters.
typedef enum { PLACE_ONCE, PLACE_BLOCK } TensorPlace;

typedef enum { LIVE_ALWAYS, LIVE_BLOCK, LIVE_CLASSIFIER } TensorLife;

typedef enum {
    FILE_VECTOR, // (cols)
    FILE_TABLE,  // (rows, cols); of the vocabulary, only the rows that have a token
    FILE_CONV1D  // (cols, rows): GPT-2's code computes x W, ours x W^T
} TensorInFiles;

// One row of a table, with the sizes filled in. Tensors start at multiples of TENSOR_ALIGN elements.
#define TENSOR_ALIGN 128
typedef struct {
    const char* name;
    const char *hf_name, *gguf_name; // parameters only
    int layers;                      // copies in memory: 1 when all layers share one, 2 when they take turns
    int repeats;                     // layers in a row that have the same copy
    int uses;                        // parameters only: layers of the model that have one of the copies
    int first_layer;                 // that has copy 0, with those below it: they are not kept
    size_t rows, cols;               // of one layer
    size_t element_bytes;            //
    TensorInit init;                 // parameters only
    int decay;                       // parameters only
    TensorKind kind;                 // parameters only
    TensorPart part;                 // parameters only
    TensorPlace place;               // parameters only
    TensorInFiles form;              // parameters only
    TensorLife life;                 //
    size_t offset_bytes;             // in the allocation: of layer 0
    size_t group_bytes;              // parameters only: where the group of layer 0 begins
    size_t layer_bytes;              // from a layer to the next; 0 if there is one
    size_t member;                   // offset of the pointer in the struct
    uint64_t stream;                 // parameters only: of their first values
} TensorRow;

static inline size_t tensor_layer_elements(const TensorRow* row) { return row->rows * row->cols; }
static inline size_t tensor_elements(const TensorRow* row) {
    return row->layers * tensor_layer_elements(row);
}

// Lays the rows of one life out from `at`; returns the end.
static inline size_t tensor_rows_place_(TensorRow* rows, int count, TensorLife life, size_t at) {
    for (int i = 0; i < count; i++) {
        const size_t align = TENSOR_ALIGN * rows[i].element_bytes;
        if (rows[i].life == life) {
            rows[i].offset_bytes = (at + align - 1) / align * align;
            rows[i].layer_bytes =
                rows[i].layers > 1 ? tensor_layer_elements(&rows[i]) * rows[i].element_bytes : 0;
            at = rows[i].offset_bytes + array_bytes(tensor_elements(&rows[i]), rows[i].element_bytes);
        }
    }
    return at;
}

// Fills in the offsets; returns the bytes of the whole allocation.
static inline size_t tensor_rows_layout(TensorRow* rows, int count) {
    const size_t always = tensor_rows_place_(rows, count, LIVE_ALWAYS, 0);
    const size_t block = tensor_rows_place_(rows, count, LIVE_BLOCK, always);
    const size_t classifier = tensor_rows_place_(rows, count, LIVE_CLASSIFIER, always);
    const size_t end = block > classifier ? block : classifier, align = TENSOR_ALIGN * sizeof(float);
    return (end + align - 1) / align * align;
}

enum { TENSOR_SHARD_UNIT = 1024 }; // elements

static inline size_t tensor_units_(size_t elements, size_t unit) { return (elements + unit - 1) / unit; }

// What a tensor takes in memory, with the padding behind it.
static inline size_t tensor_room_(const TensorRow* row) {
    return tensor_units_(tensor_layer_elements(row), TENSOR_ALIGN) * TENSOR_ALIGN;
}

// Places the trained tensors of one group (below) from element `at` on; returns the end of the last one. They lie as if
// nothing were frozen, without the whole units between them: norms add up gradients unit by unit (adamw.h), and get the same bits.
static inline size_t tensor_place_trained_(TensorRow* rows, int count, TensorPlace place, unsigned frozen,
                                           size_t at) {
    size_t next = 0, end = 0; // as if none was frozen: of the next tensor, and of the last trained one
    size_t left_out = 0;
    for (int i = 0; i < count; i++) {
        const size_t room = rows[i].place == place ? tensor_room_(&rows[i]) : 0;
        if (room > 0 && !(frozen >> i & 1)) {
            const size_t from = tensor_units_(end, TENSOR_SHARD_UNIT), to = next / TENSOR_SHARD_UNIT;
            left_out += from < to ? (to - from) * TENSOR_SHARD_UNIT : 0;
            rows[i].offset_bytes = array_bytes(at + next - left_out, rows[i].element_bytes);
            end = next + room;
        }
        next += room;
    }
    return at + end - left_out;
}

// And the frozen ones, one after the other.
static inline size_t tensor_place_frozen_(TensorRow* rows, int count, TensorPlace place, unsigned frozen,
                                          size_t at) {
    for (int i = 0; i < count; i++) {
        if (rows[i].place == place && frozen >> i & 1) {
            rows[i].offset_bytes = array_bytes(at, rows[i].element_bytes);
            at += tensor_room_(&rows[i]);
        }
    }
    return at;
}

// Places a group; returns its end.
static inline size_t tensor_place_group_(TensorRow* rows, int count, TensorPlace place, unsigned frozen,
                                         size_t begin, int shards) {
    const size_t unit = (size_t)shards * TENSOR_SHARD_UNIT;
    const size_t trained = tensor_place_trained_(rows, count, place, frozen, begin) - begin,
                 middle = begin + tensor_units_(trained, unit) * unit;
    return middle +
           tensor_units_(tensor_place_frozen_(rows, count, place, frozen, middle) - middle, unit) * unit;
}

// Places all groups, with so many blocks; returns the bytes of the allocation.
static inline size_t tensor_place_groups(TensorRow* rows, int count, int copies, unsigned frozen,
                                         int shards) {
    const size_t bytes = rows[0].element_bytes;
    const size_t blocks = tensor_place_group_(rows, count, PLACE_ONCE, frozen, 0, shards);
    const size_t block = tensor_place_group_(rows, count, PLACE_BLOCK, frozen, blocks, shards) - blocks;
    for (int i = 0; i < count; i++) {
        rows[i].group_bytes = rows[i].place == PLACE_BLOCK ? blocks * bytes : 0;
        rows[i].layer_bytes = rows[i].layers > 1 ? block * bytes : 0;
    }
    return array_bytes(blocks + (size_t)copies * block, bytes);
}

// Points every member of `pointers` (a ModelParameters or ModelActivations) at its tensor in `memory`; NULL: at nothing.
static inline void tensor_rows_bind(void* pointers, const TensorRow* rows, int count, void* memory) {
    for (int i = 0; i < count; i++) {
        char* tensor = memory ? (char*)memory + rows[i].offset_bytes : NULL;
        memcpy((char*)pointers + rows[i].member, &tensor, sizeof(tensor));
    }
}

// Copy k of a tensor in `memory`: layer k's if layers share none; the one copy if there is only one.
static inline void* tensor_at_layer(const TensorRow* row, const void* memory, int k) {
    return (char*)memory + row->offset_bytes + (size_t)k * row->layer_bytes;
}

// The copy of a tensor that layer l has, counted from first_layer.
static inline int tensor_copy(const TensorRow* row, int l) {
    const int kept = l > row->first_layer ? l - row->first_layer : 0;
    return kept / row->repeats % row->layers;
}

// And the lowest layer that has copy k.
static inline int tensor_lowest_layer(const TensorRow* row, int k) { return k * row->repeats; }

// ---- groups of parameters ----

// Group 0 has the tensors that memory has once, group 1 + k the block k of tensors.
static inline int tensor_group_copy(int g) { return g > 0 ? g - 1 : 0; }

static inline int tensor_is_in_group(const TensorRow* row, int g) {
    return (row->place == PLACE_BLOCK) == (g > 0);
}

// The group that has a parameter of layer l.
static inline int tensor_group(const TensorRow* row, int l) {
    return row->place == PLACE_BLOCK ? 1 + tensor_copy(row, l) : 0;
}

// Where group g begins in memory laid out by the rows of the parameters.
static inline size_t tensor_group_offset_bytes(const TensorRow* rows, int g) {
    int i = 0;
    while (!tensor_is_in_group(&rows[i], g)) {
        i++;
    }
    return rows[i].group_bytes + (size_t)tensor_group_copy(g) * rows[i].layer_bytes;
}

// Where a parameter begins in its group; and the parameter, in memory that has only that group, or that of another layer.
static inline size_t tensor_offset_in_group(const TensorRow* row) {
    return row->offset_bytes - row->group_bytes;
}
static inline void* tensor_in_group(const TensorRow* row, const void* group) {
    return (char*)group + tensor_offset_in_group(row);
}

// Moves the pointer of a row in `pointers` from copy 0 to copy k.
static inline void tensor_advance(void* pointers, const TensorRow* row, int k) {
    char* tensor;
    memcpy(&tensor, (char*)pointers + row->member, sizeof(tensor));
    tensor += (size_t)k * row->layer_bytes;
    memcpy((char*)pointers + row->member, &tensor, sizeof(tensor));
}

#endif
