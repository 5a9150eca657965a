/*
tensors.h -- tables of tensors: one row for each tensor of a model, and its place in memory.

A row is one line of a table of model.h with its sizes filled in. Struct members, memory, sharding,
files and reports are loops over rows; nothing here knows a tensor by its name.

    copies   of a tensor in memory; layers may share one, or take turns with several
    groups   parameters that are gathered, reduced and updated together: group 0 is everything
             outside of blocks, group 1 + k is block k
    blocks   parameters of a layer

Layers need not be alike: a row lists those that have its tensor. All blocks of parameters have the
same size and offsets, so tensors that no layer has together share a place: a block of few tensors
leaves a part of its memory unused. Outside of that, only layers that have a tensor have a copy.
*/
#ifndef LLMC_TENSORS_H
#define LLMC_TENSORS_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/check.h"

typedef enum {
    INIT_ZERO,
    INIT_ZERO_INTO, // zero: biases into the residual stream
    INIT_ONE,       // one, with what its norm adds to weights
    INIT_UNIT,      // one
    INIT_SCALES,    // one, and zeros after it
    INIT_DECAY,     // log of a uniform number: decays of the delta rule
    INIT_NORMAL,    // N(0, std), std = 0.02, more in narrow models (model_initial_std)
    INIT_ADAPTER,   // uniform up to 1 / sqrt(columns)
    INIT_VOCAB,     // like INIT_NORMAL for the V rows of the vocabulary; zero for its padding
    // N(0, std / sqrt(2L)): projections into the residual stream, which adds up 2L of them
    INIT_NORMAL_SCALED
} TensorInit;

// Kinds of parameters. Optimizers have a rule for each (optimizer.h).
typedef enum {
    KIND_MATRIX,    // the weight of a linear layer
    KIND_EMBEDDING, // a table of rows; without a head, wte is also the classifier's matrix
    KIND_HEAD,      // a matrix of the classifier's own
    KIND_ROUTER,    // the matrix that chooses experts
    KIND_VECTOR,    // a bias, or a parameter of a norm
    KIND_FIXED,     // never trained
    KIND_ADAPTER,   // a factor of a low-rank product (adapter.h)
    TENSOR_KINDS
} TensorKind;

// A set of tensors: bit i is row i of their table.
typedef uint64_t TensorSet;
enum { TENSOR_SET_MOST = 64 };

static inline TensorSet tensor_bit(int i) { return (TensorSet)1 << i; }
static inline int tensor_is_in(TensorSet set, int i) { return (int)(set >> i & 1); }

// A set of layers: bit l % 8 of byte l / 8 is layer l.
enum { MODEL_MAX_LAYERS = 1000, LAYER_SET_BYTES = (MODEL_MAX_LAYERS + 7) / 8 };

static inline int layer_is_in(const uint8_t set[LAYER_SET_BYTES], int l) { return set[l / 8] >> l % 8 & 1; }
static inline void layer_add(uint8_t set[LAYER_SET_BYTES], int l) { set[l / 8] |= (uint8_t)(1 << l % 8); }

// Places in memory: outside of blocks, or in each block of parameters.
typedef enum { PLACE_ONCE, PLACE_BLOCK } TensorPlace;

// Cuts of a tensor among tensor ranks: none; by heads, in each of its matrices of queries, keys and
// values; by rows of each of its equal matrices; by columns; by rows of the vocabulary. In a model
// whose experts are divided: none, or whole experts.
typedef enum { SPLIT_NONE, SPLIT_HEADS, SPLIT_ROWS, SPLIT_COLS, SPLIT_WORDS, SPLIT_EXPERTS } TensorSplit;

// Lifetimes: always, for activations until the backward pass; or only inside a block or the
// classifier, which use the same memory; or inside a pass over the model; or until it has been
// sent, while the next one arrives.
typedef enum { LIVE_ALWAYS, LIVE_BLOCK, LIVE_CLASSIFIER, LIVE_PASS, LIVE_SENT } TensorLife;

// One row of a table, with the sizes filled in. Activations start at multiples of TENSOR_ALIGN
// elements. A tensor that a model does not have is absent: no elements, layers and uses are 0, its
// pointer is NULL, and its offset is where it would be.
#define TENSOR_ALIGN 128
typedef struct {
    const char* name;
    int layers; // copies in memory: 1 if all layers share one, 2 if they take turns
    // copies if all layers had the tensor; true: some have not, and which
    int blocks, is_partial;
    uint8_t without[LAYER_SET_BYTES];
    // activations only: micro-batches that need it at a time (pipeline.h), which take turns; each
    // has copies of all layers
    int places;
    int repeats; // consecutive layers that share a copy
    // parameters only: layers of the model that use one of the copies (tensor_layer); 1 outside of
    // them
    int uses;
    // layer that uses copy 0; so do those below it, which keep nothing
    int first_layer;
    size_t rows, cols; // sizes of one layer
    // parameters only: matrices of a layer that are updated one by one: `parts` equal ones, below
    // one of `apart` rows, unless that is 0
    size_t apart;
    int parts;
    int experts; // parameters only: equal parts of the rows, one for each expert; 1 without experts
    size_t element_bytes;
    TensorInit init;   // parameters only
    int decay;         // parameters only
    TensorKind kind;   // parameters only
    int in_block;      // parameters only: layers have it, not the model
    TensorPlace place; // parameters only; a tensor of a block that is not cut may lie outside of it
    TensorSplit split; // parameters only
    TensorLife life;
    size_t offset_bytes; // offset of layer 0 in the allocation
    size_t group_bytes;  // parameters only: offset of the group of layer 0
    size_t block_bytes;  // parameters only: distance from a block to the next
    size_t layer_bytes;  // distance from a copy to the next; 0 if memory has only one
    int by_block;        // true: from a block to the next, which may have no copy
    size_t member;       // offset of the pointer in the struct
    uint64_t stream;     // parameters only: random stream of the first values
} TensorRow;

static inline size_t tensor_layer_elements(const TensorRow* row) { return row->rows * row->cols; }
static inline size_t tensor_elements(const TensorRow* row) {
    return row->layers * tensor_layer_elements(row);
}

// Equal matrices of a layer, one below the other: `count` of `rows` rows, from row `first` on.
typedef struct {
    size_t first, rows;
    int count;
} TensorRun;

enum { TENSOR_RUNS = 2 }; // at most

// Return the number of runs that a layer consists of, and run i.
static inline int tensor_runs(const TensorRow* row) { return row->apart > 0 ? 2 : 1; }

static inline TensorRun tensor_run(const TensorRow* row, int i) {
    TensorRun run;
    const int is_apart = i == 0 && row->apart > 0;
    run.first = is_apart ? 0 : row->apart;
    run.rows = is_apart ? row->apart : (row->rows - row->apart) / (size_t)row->parts;
    run.count = is_apart ? 1 : row->parts;
    return run;
}

// Return the number of matrices of a layer, of all its runs, and matrix m alone.
static inline int tensor_matrices(const TensorRow* row) { return row->parts + (row->apart > 0); }

static inline TensorRun tensor_matrix(const TensorRow* row, int m) {
    const int is_first = m == 0 && row->apart > 0;
    TensorRun run = tensor_run(row, row->apart > 0 && m > 0);
    run.first += is_first ? 0 : (size_t)(m - (row->apart > 0)) * run.rows;
    run.count = 1;
    return run;
}

// Returns the distance from a place to the next.
static inline size_t tensor_place_bytes(const TensorRow* row) {
    return (tensor_elements(row) + TENSOR_ALIGN - 1) / TENSOR_ALIGN * TENSOR_ALIGN * row->element_bytes;
}

static inline int tensor_is_absent(const TensorRow* row) { return tensor_layer_elements(row) == 0; }

// Lays out the rows of one life from `at` on; returns the end.
static inline size_t tensor_rows_place_(TensorRow* rows, int count, TensorLife life, size_t at) {
    for (int i = 0; i < count; i++) {
        const size_t align = TENSOR_ALIGN * rows[i].element_bytes;
        if (rows[i].life == life) {
            rows[i].offset_bytes = (at + align - 1) / align * align;
            rows[i].by_block = 0;
            rows[i].layer_bytes =
                rows[i].layers > 1 ? tensor_layer_elements(&rows[i]) * rows[i].element_bytes : 0;
            at = rows[i].offset_bytes + (size_t)(rows[i].places - 1) * tensor_place_bytes(&rows[i]) +
                 array_bytes(tensor_elements(&rows[i]), rows[i].element_bytes);
        }
    }
    return at;
}

// Fills in the offsets; returns the bytes of the whole allocation.
static inline size_t tensor_rows_layout(TensorRow* rows, int count) {
    const size_t kept = tensor_rows_place_(rows, count, LIVE_ALWAYS, 0),
                 passes = tensor_rows_place_(rows, count, LIVE_PASS, kept),
                 always = tensor_rows_place_(rows, count, LIVE_SENT, passes);
    const size_t block = tensor_rows_place_(rows, count, LIVE_BLOCK, always);
    const size_t classifier = tensor_rows_place_(rows, count, LIVE_CLASSIFIER, always);
    const size_t end = block > classifier ? block : classifier, align = TENSOR_ALIGN * sizeof(float);
    return (end + align - 1) / align * align;
}

// Unit, in elements: parameters start at multiples of it, and shards are multiples of it. So a unit
// belongs to one tensor, and sums made unit by unit (gradient_norm.h) do not depend on a tensor's
// place.
enum { TENSOR_SHARD_UNIT = 1024 };

static inline size_t tensor_units_(size_t elements, size_t unit) { return (elements + unit - 1) / unit; }

// Returns the elements that a parameter occupies in memory, with the padding behind it.
static inline size_t tensor_room_(const TensorRow* row) {
    return tensor_units_(tensor_layer_elements(row), TENSOR_SHARD_UNIT) * TENSOR_SHARD_UNIT;
}

// Returns the elements that the copies of a tensor in one group occupy: all copies if it lies
// outside of blocks.
static inline size_t tensor_room_in_group(const TensorRow* row) {
    return tensor_room_(row) * (size_t)(row->place == PLACE_ONCE ? row->layers : 1);
}

static inline size_t tensor_bytes_in_group(const TensorRow* row) {
    return tensor_room_in_group(row) * row->element_bytes;
}

// ---- layers that have a tensor ----

static inline int tensor_has_layer(const TensorRow* row, int l) {
    return !row->is_partial || !layer_is_in(row->without, l);
}

// Returns the lowest layer of the layers that share copy number k of those that all layers would
// have.
static inline int tensor_block_layer_(const TensorRow* row, int k) {
    return row->first_layer + k * row->repeats;
}

// Returns how many of the first `count` of these copies exist.
static inline int tensor_copies_before(const TensorRow* row, int count) {
    int copies = 0;
    for (int k = 0; k < count && row->is_partial; k++) {
        copies += tensor_has_layer(row, tensor_block_layer_(row, k));
    }
    return row->is_partial ? copies : count;
}

// Returns the number that copy k would have if all layers had one.
static inline int tensor_copy_block(const TensorRow* row, int k) {
    int block = k;
    for (; row->is_partial && tensor_copies_before(row, block + 1) <= k;) {
        block++;
    }
    return block;
}

// Returns 1 if blocks j and k of parameters have the same tensors.
static inline int tensor_blocks_match(const TensorRow* rows, int count, int j, int k) {
    int match = 1;
    for (int i = 0; i < count; i++) {
        match &= tensor_has_layer(&rows[i], tensor_block_layer_(&rows[i], j)) ==
                 tensor_has_layer(&rows[i], tensor_block_layer_(&rows[i], k));
    }
    return match;
}

// True if some layer has both tensors, which exist.
static inline int tensors_meet_(const TensorRow* a, const TensorRow* b) {
    int meet = !a->is_partial || !b->is_partial;
    if (tensor_is_absent(a) || tensor_is_absent(b)) {
        return 0;
    }
    for (int i = 0; i < LAYER_SET_BYTES && !meet; i++) {
        meet = (uint8_t) ~(a->without[i] | b->without[i]) != 0;
    }
    return meet;
}

// ---- places of parameters ----

// Places the tensors of one group (below) in `part` from element `at` on, each behind those before
// it that a layer has with it; returns their end.
static inline size_t tensor_place_part_(TensorRow* rows, int count, TensorPlace place, TensorSet part,
                                        size_t at) {
    size_t ends[TENSOR_SET_MOST], end = at;
    assert(count <= TENSOR_SET_MOST);
    for (int i = 0; i < count; i++) {
        size_t begin = at;
        ends[i] = at;
        if (rows[i].place != place || !tensor_is_in(part, i)) {
            continue;
        }
        for (int k = 0; k < i; k++) {
            const int is_before =
                ends[k] > begin && (place == PLACE_ONCE || tensors_meet_(&rows[k], &rows[i]));
            begin = is_before ? ends[k] : begin;
        }
        rows[i].offset_bytes = array_bytes(begin, rows[i].element_bytes);
        ends[i] = begin + tensor_room_in_group(&rows[i]);
        end = ends[i] > end ? ends[i] : end;
    }
    return end;
}

// Places a group from element `begin` on: its trained tensors, then its frozen ones, both padded to
// whole shards. Returns its end.
static inline size_t tensor_place_group_(TensorRow* rows, int count, TensorPlace place, TensorSet frozen,
                                         size_t begin, int shards) {
    const size_t unit = (size_t)shards * TENSOR_SHARD_UNIT,
                 trained = tensor_place_part_(rows, count, place, ~frozen, begin) - begin,
                 middle = begin + tensor_units_(trained, unit) * unit,
                 still = tensor_place_part_(rows, count, place, frozen, middle) - middle;
    return middle + tensor_units_(still, unit) * unit;
}

// Places all groups, with `copies` blocks; returns the bytes of the allocation.
static inline size_t tensor_place_groups(TensorRow* rows, int count, int copies, TensorSet frozen,
                                         int shards) {
    const size_t bytes = rows[0].element_bytes;
    const size_t blocks = tensor_place_group_(rows, count, PLACE_ONCE, frozen, 0, shards);
    const size_t block = tensor_place_group_(rows, count, PLACE_BLOCK, frozen, blocks, shards) - blocks;
    for (int i = 0; i < count; i++) {
        const int is_block = rows[i].place == PLACE_BLOCK,
                  has_more = !tensor_is_absent(&rows[i]) && (is_block ? copies : rows[i].layers) > 1;
        rows[i].by_block = is_block;
        rows[i].group_bytes = is_block ? blocks * bytes : 0;
        rows[i].block_bytes = block * bytes;
        rows[i].layer_bytes = has_more ? (is_block ? block : tensor_room_(&rows[i])) * bytes : 0;
    }
    return array_bytes(blocks + (size_t)copies * block, bytes);
}

// Points every member of `pointers` (a ModelParameters or ModelActivations) at its tensor in
// `memory`; if that is NULL or the tensor absent, at NULL.
static inline void tensor_rows_bind(void* pointers, const TensorRow* rows, int count, void* memory) {
    for (int i = 0; i < count; i++) {
        const int has_tensor = memory && !tensor_is_absent(&rows[i]);
        char* tensor = has_tensor ? (char*)memory + rows[i].offset_bytes : NULL;
        memcpy((char*)pointers + rows[i].member, &tensor, sizeof(tensor));
    }
}

// Returns the distance of copy k from offset_bytes.
static inline size_t tensor_copy_bytes_(const TensorRow* row, int k) {
    return (size_t)(row->by_block ? tensor_copy_block(row, k) : k) * row->layer_bytes;
}

// Returns copy k of a tensor in `memory`: layer k's if all layers have one of their own.
static inline void* tensor_at_layer(const TensorRow* row, const void* memory, int k) {
    return (char*)memory + row->offset_bytes + tensor_copy_bytes_(row, k);
}

// Returns the block of parameters of layer l, or the copy that it would use if all layers had one,
// counted from first_layer.
static inline int tensor_block(const TensorRow* row, int l) {
    const int kept = l > row->first_layer ? l - row->first_layer : 0;
    return row->blocks > 0 ? kept / row->repeats % row->blocks : 0;
}

// Returns the copy of a tensor that layer l uses, which has it; 0 if it is absent.
static inline int tensor_copy(const TensorRow* row, int l) {
    return row->layers > 1 ? tensor_copies_before(row, tensor_block(row, l)) : 0;
}

// Returns the lowest layer that uses copy k.
static inline int tensor_lowest_layer(const TensorRow* row, int k) {
    return tensor_copy_block(row, k) * row->repeats;
}

// Returns layer number n of those that use a parameter; 0 outside of the blocks.
static inline int tensor_layer(const TensorRow* row, int n) {
    int l = row->is_partial ? 0 : n;
    for (int before = 0; row->is_partial && (before < n || !tensor_has_layer(row, l)); l++) {
        before += tensor_has_layer(row, l);
    }
    return l;
}

// ---- groups of parameters ----

// Returns the block of parameters that is group g; 0 for group 0.
static inline int tensor_group_copy(int g) { return g > 0 ? g - 1 : 0; }

static inline int tensor_is_in_group(const TensorRow* row, int g) {
    return (row->place == PLACE_BLOCK) == (g > 0) &&
           (g == 0 || tensor_has_layer(row, tensor_block_layer_(row, tensor_group_copy(g))));
}

// Returns the number of copies of a tensor in each group that has it, and the first one in group g.
static inline int tensor_copies_in_group(const TensorRow* row) {
    return row->place == PLACE_BLOCK ? row->layers > 0 : row->layers;
}
static inline int tensor_first_copy_in_group(const TensorRow* row, int g) {
    return row->place == PLACE_BLOCK ? tensor_copies_before(row, tensor_group_copy(g)) : 0;
}

// Returns the group of a parameter of layer l.
static inline int tensor_group(const TensorRow* row, int l) {
    return row->place == PLACE_BLOCK ? 1 + tensor_block(row, l) : 0;
}

// Returns the offset of group g in memory laid out by the rows of the parameters.
static inline size_t tensor_group_offset_bytes(const TensorRow* rows, int g) {
    int i = 0;
    if (g == 0) {
        return 0; // a stage of layers may have nothing in it
    }
    while (rows[i].place != PLACE_BLOCK) {
        i++;
    }
    return rows[i].group_bytes + (size_t)tensor_group_copy(g) * rows[i].block_bytes;
}

// Returns the offset of a parameter in its group.
static inline size_t tensor_offset_in_group(const TensorRow* row) {
    return row->offset_bytes - row->group_bytes;
}
// Returns the parameter in memory that holds only one group, of any layer.
static inline void* tensor_in_group(const TensorRow* row, const void* group) {
    return (char*)group + tensor_offset_in_group(row);
}

// Moves the pointer of a row in `pointers` by this many bytes.
static inline void tensor_move(void* pointers, const TensorRow* row, size_t bytes) {
    char* tensor;
    memcpy(&tensor, (char*)pointers + row->member, sizeof(tensor));
    tensor = tensor ? tensor + bytes : NULL;
    memcpy((char*)pointers + row->member, &tensor, sizeof(tensor));
}

// Sets the pointer of a row in `pointers` to NULL.
static inline void tensor_clear(void* pointers, const TensorRow* row) {
    char* const none = NULL;
    memcpy((char*)pointers + row->member, &none, sizeof(none));
}

// Moves the pointer of a row in `pointers` from copy 0 to copy k.
static inline void tensor_advance(void* pointers, const TensorRow* row, int k) {
    tensor_move(pointers, row, tensor_copy_bytes_(row, k));
}

#endif
