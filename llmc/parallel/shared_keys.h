/*
shared_keys.h -- the gradients of heads of keys that several slices have (part.h), on the CPU.

With fewer heads of keys than slices, `share` slices in a row have copies of the rows of qkvw and
qkvb that make a head's keys and values. The backward pass of a slice sets the gradient that comes
from its own queries; the gradient of the head is the sum over its copies, in the order of slices.

    add    first copy = copy_0 + copy_1 + ...,  other copies = 0     before the gradient's norm
    copy   other copies = first copy                                 after it

So the norm counts each head once, all copies get the same update, and the bits do not depend on the
number of processes. Both steps are made once an update, on the shards of the reduced gradient
(zero.h): all slices of a layer are laid out alike, so a rank of a data group has the same elements
of each, and sends 1/D of them. To add up dk and dv of the tokens instead would send N rows for each
micro-batch.
*/
#ifndef LLMC_SHARED_KEYS_H
#define LLMC_SHARED_KEYS_H

#include "llmc/base/memory.h"
#include "llmc/comm/group.h"
#include "llmc/model/model.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { SHARED_KEYS_ADD, SHARED_KEYS_COPY } SharedKeysStep;

typedef struct {
    int share;       // slices that have copies of the same heads; 1: none do
    ModelConfig cfg; // of the part that this process has
    ZeroPlan plan;
    const TensorRow* rows; // of the model's gradients
    float* arrived;        // (copies, room) from other processes, of a layer
    size_t room;
} SharedKeys;

// Opens them for gradients laid out by `rows`; `rows` must outlive them.
void shared_keys_open(SharedKeys* k, Memory* memory, ModelConfig cfg, const ZeroPlan* plan,
                      const TensorRow* rows);

// Makes a step on the reduced gradient of an update. Collective.
void shared_keys_step_cpu(const SharedKeys* k, SharedKeysStep step, Zero* z, Group* tensor);

// ---- for both trainers ----

// The gradients of a layer's shared heads in an array that has a part of each group.
typedef struct {
    char* array;
    size_t element_bytes;
    ZeroCut cut;
    int copy; // of the layer
} SharedKeysLayer;

enum { SHARED_KEYS_MOVES = 4 * MODEL_MAX_SLICES }; // at most

// True if row i has heads of keys that are shared.
int shared_keys_has_row(const SharedKeys* k, int i);

// Returns the part of the shared heads of a row, in slice i of this process, that an array has, and
// sets its place there. The part is the same in all slices.
size_t shared_keys_piece(const SharedKeys* k, const SharedKeysLayer* layer, int row, int i, char** piece);

// Returns the place of the copy of slice j, which another process has, after its arrival.
char* shared_keys_arrived(const SharedKeys* k, const SharedKeysLayer* layer, int row, int j);

// Sets the messages of a step for a layer, and returns their number, at most SHARED_KEYS_MOVES.
int shared_keys_moves(const SharedKeys* k, SharedKeysStep step, const SharedKeysLayer* layer,
                      GroupMove* moves);

#ifdef __cplusplus
}
#endif

#ifdef SHARED_KEYS_IMPLEMENTATION

#include <string.h>

#include "llmc/base/sizes.h"

// Returns the place of the shared heads in a slice of a row, and the number of their elements.
static ZeroSpan shared_keys_in_slice_(const SharedKeys* k, const TensorRow* row) {
    const size_t cols = row->rows == 1 ? 1 : row->cols;
    const ZeroSpan keys = {(size_t)model_heads(k->cfg) * cols, 2 * (size_t)model_keys(k->cfg) * cols};
    return keys;
}

int shared_keys_has_row(const SharedKeys* k, int i) {
    const TensorRow* row = &k->rows[i];
    return k->share > 1 && row->split == SPLIT_HEADS && row->place == PLACE_BLOCK && row->layers > 0 &&
           zero_has_row(&k->plan, i);
}

void shared_keys_open(SharedKeys* k, Memory* memory, ModelConfig cfg, const ZeroPlan* plan,
                      const TensorRow* rows) {
    memset(k, 0, sizeof(*k));
    k->share = int_max(cfg.part.keys_share, 1);
    k->cfg = cfg;
    k->plan = *plan;
    k->rows = rows;
    const int others = int_min(k->share - 1, cfg.part.of_slices - model_slices(cfg));
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        k->room += shared_keys_has_row(k, i) ? shared_keys_in_slice_(k, &rows[i]).count : 0;
    }
    if (k->room > 0 && others > 0) {
        k->arrived = (float*)memory_take(memory, "gradients: shared keys", MEMORY_DEVICE,
                                         (size_t)others * k->room * sizeof(float));
    }
}

size_t shared_keys_piece(const SharedKeys* k, const SharedKeysLayer* layer, int row, int i, char** piece) {
    const TensorRow* r = &k->rows[row];
    const int g = 1 + layer->copy * model_slices(k->cfg) + i;
    const ZeroSpan keys = shared_keys_in_slice_(k, r);
    const size_t parts = (size_t)layer->cut.parts, count = zero_trained_elements(&k->plan, g) / parts,
                 first = (size_t)layer->cut.part * count,
                 begin = tensor_offset_in_group(r) / r->element_bytes + keys.begin, end = begin + keys.count,
                 from = begin > first ? begin : first, to = end < first + count ? end : first + count;
    if (piece && from < to) {
        *piece =
            layer->array + (zero_gradient_begin(&k->plan, g) / parts + from - first) * layer->element_bytes;
    }
    return from < to ? to - from : 0;
}

char* shared_keys_arrived(const SharedKeys* k, const SharedKeysLayer* layer, int row, int j) {
    const int other = j - (k->cfg.part.first_slice + model_slices(k->cfg));
    size_t at = (size_t)other * k->room;
    for (int i = 0; i < row; i++) {
        at += shared_keys_has_row(k, i) ? shared_keys_in_slice_(k, &k->rows[i]).count : 0;
    }
    return (char*)k->arrived + at * layer->element_bytes;
}

// Sets the messages about slice i of this process and a row.
static int shared_keys_moves_of_(const SharedKeys* k, SharedKeysStep step, const SharedKeysLayer* layer,
                                 int row, int i, GroupMove* moves) {
    const int slices = model_slices(k->cfg), own = k->cfg.part.first_slice, slice = own + i,
              first = slice - slice % k->share;
    char* piece = NULL;
    const size_t bytes = shared_keys_piece(k, layer, row, i, &piece) * layer->element_bytes;
    int count = 0;
    if (first < own && bytes > 0) {
        const GroupMove with_first = {first / slices, piece, bytes, step == SHARED_KEYS_ADD};
        moves[count++] = with_first;
    }
    for (int j = own + slices; slice == first && j < first + k->share && bytes > 0; j++) {
        const GroupMove with_other = {j / slices,
                                      step == SHARED_KEYS_ADD ? shared_keys_arrived(k, layer, row, j) : piece,
                                      bytes, step == SHARED_KEYS_COPY};
        moves[count++] = with_other;
    }
    return count;
}

int shared_keys_moves(const SharedKeys* k, SharedKeysStep step, const SharedKeysLayer* layer,
                      GroupMove* moves) {
    int count = 0;
    for (int row = 0; row < MODEL_PARAMETER_ROWS; row++) {
        for (int i = 0; i < model_slices(k->cfg) && shared_keys_has_row(k, row); i++) {
            count += shared_keys_moves_of_(k, step, layer, row, i, moves + count);
        }
    }
    return count;
}

static void shared_keys_add_(float* sum, const float* copy, size_t count) {
#pragma omp parallel for simd schedule(static)
    for (size_t e = 0; e < count; e++) {
        sum[e] += copy[e];
    }
}

// Adds the copies of a row to the first one, slice i of this process, and clears them.
static void shared_keys_add_copies_(const SharedKeys* k, const SharedKeysLayer* layer, int row, int i) {
    const int own = k->cfg.part.first_slice, slices = model_slices(k->cfg);
    char *first = NULL, *copy = NULL;
    const size_t count = shared_keys_piece(k, layer, row, i, &first);
    for (int j = i + 1; j < i + k->share && count > 0; j++) {
        if (j < slices) {
            shared_keys_piece(k, layer, row, j, &copy);
        } else {
            copy = shared_keys_arrived(k, layer, row, own + j);
        }
        shared_keys_add_((float*)(void*)first, (const float*)(const void*)copy, count);
    }
}

// Sets the copies of slice i in this process behind it: to zeros, or to the copy of slice i.
static void shared_keys_set_copies_(const SharedKeys* k, SharedKeysStep step, const SharedKeysLayer* layer,
                                    int row, int i) {
    char *first = NULL, *copy = NULL;
    const size_t bytes = shared_keys_piece(k, layer, row, i, &first) * sizeof(float);
    for (int j = i + 1; j < int_min(i + k->share, model_slices(k->cfg)) && bytes > 0; j++) {
        shared_keys_piece(k, layer, row, j, &copy);
        if (step == SHARED_KEYS_COPY) {
            memcpy(copy, first, bytes);
        } else {
            memset(copy, 0, bytes);
        }
    }
}

// Makes a step on a row, after the exchange.
static void shared_keys_row_(const SharedKeys* k, SharedKeysStep step, const SharedKeysLayer* layer,
                             int row) {
    const int own = k->cfg.part.first_slice, slices = model_slices(k->cfg);
    for (int i = 0; i < slices; i++) {
        const int is_first = (own + i) % k->share == 0;
        if (is_first && step == SHARED_KEYS_ADD) {
            shared_keys_add_copies_(k, layer, row, i);
        }
        if (is_first) {
            shared_keys_set_copies_(k, step, layer, row, i);
        } else if (own + i - (own + i) % k->share < own && step == SHARED_KEYS_ADD) {
            char* piece = NULL;
            const size_t count = shared_keys_piece(k, layer, row, i, &piece);
            memset(piece, 0, count * sizeof(float));
        }
    }
}

static void shared_keys_array_(const SharedKeys* k, SharedKeysStep step, float* array, ZeroCut cut,
                               Group* tensor) {
    GroupMove moves[SHARED_KEYS_MOVES];
    for (int copy = 0; copy < model_copies(k->cfg); copy++) {
        const SharedKeysLayer layer = {(char*)array, sizeof(float), cut, copy};
        const int count = shared_keys_moves(k, step, &layer, moves);
        group_exchange_cpu(tensor, moves, count);
        for (int row = 0; row < MODEL_PARAMETER_ROWS; row++) {
            if (shared_keys_has_row(k, row)) {
                shared_keys_row_(k, step, &layer, row);
            }
        }
    }
}

void shared_keys_step_cpu(const SharedKeys* k, SharedKeysStep step, Zero* z, Group* tensor) {
    const ZeroCut all = {1, 0};
    if (k->share == 1) {
        return;
    }
    shared_keys_array_(k, step, z->shard, zero_shard_of(&z->plan, 1, z->plan.rank), tensor);
    if (z->plan.stage == 0 && z->shard != z->grads) { // which the update reads
        shared_keys_array_(k, step, z->grads, all, tensor);
    }
}

#endif // SHARED_KEYS_IMPLEMENTATION

#endif
