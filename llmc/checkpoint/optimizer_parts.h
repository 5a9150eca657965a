/*
optimizer_parts.h -- the optimizer's state in a checkpoint: optimizer.<i>of<n>.safetensors.

Each rank writes the state of the elements that it updates, and of the matrices that it owns
(matrices.h), to its own file. The metadata say which they are:

    shards     "wte:0:0+65536@0/98304/0,...": elements first+count of a piece (MapPiece) of a tensor
               of a layer, by name and number: element e of the piece is element
               logical + e / run * stride + e % run of the whole tensor
    matrices   "qkvw:3:4096,...": matrices that a rule updates as a whole, by their first elements

Each slot of the state (optimizer.h) is a tensor with the values of these shards, then of these
matrices, in their order. The reader looks up what it needs, by tensor, layer and element, in all
files; so a run can be resumed with any number of ranks, in any grid.

Older files number all elements of the parameters in the order of their table, without padding; the
metadata `ranges`, for example "0-98304,196608-200000", says which they have. What a matrix has for
each of its elements comes with them there, as m and v; all else belongs to the last element of the
tensor. Files of a run with --tensor-slices number them in another way, and are refused.

If the run changes its optimizer, the saved state is not read: all state starts as zeros. If it
changes its average of the weights (average.h), that alone does.
*/
#ifndef LLMC_OPTIMIZER_PARTS_H
#define LLMC_OPTIMIZER_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/formats/safetensors.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/model/freeze.h"
#include "llmc/model/map.h"
#include "llmc/model/model.h"
#include "llmc/optim/matrices.h"
#include "llmc/optim/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

// State of a run of elements, or of a matrix, in a file or in memory.
typedef struct {
    int tensor, layer;       // row of the table of the whole model; lowest layer that uses it, or 0
    const Matrices* of;      // in the whole model, of a matrix; else NULL
    MapPiece piece;          // of the whole tensor; all elements of a matrix
    const SafeTensors* file; // NULL: in memory
    size_t at[MAP_SLOTS];    // begin in the tensor, or the array, of a slot; MAP_NONE: none
} StateEntry;

typedef struct {
    StateEntry* all;
    size_t count;
} StateEntries;

// ---- writing ----

// Returns the number of ranks that write a part: all, or one of each data group if all of it have
// the same state.
int checkpoint_part_writers(const MapOf* of);

// Returns the rank that writes part i.
int checkpoint_part_rank(const MapOf* of, int i);

// Returns the number of the part that a rank writes; -1: none.
int checkpoint_part_number(const MapOf* of, int rank);

// Returns the bytes of all slots that a rank writes, each with its padding.
size_t checkpoint_part_bytes(const MapOf* of, int rank, const OptimizerState* state);

void checkpoint_part_name(char name[64], int i, int writers);

// Writes this rank's part, completely or not at all. `slots` are its arrays. Returns its checksum.
uint64_t checkpoint_part_write(const Map* m, const OptimizerState* state, const char* path,
                               const void* const slots[MAP_SLOTS]);

// ---- reading ----

// The files of the optimizer's state, and their contents.
typedef struct {
    const Map* map;
    OptimizerState whole; // of the whole model, without memory
    SafeTensors* files;
    size_t num_files;
    StateEntries saved; // of all files, sorted
    StateEntries own;   // what this rank needs, where it has it in memory
    int is_new;         // true: no state is read, all starts as zeros
    int has_average;    // true: the average continues
} CheckpointParts;

// Returns true if a saved state of this model is of this optimizer and has the same slots; else all
// state starts as zeros.
int checkpoint_state_fits(const SavedState* s, Optimizer optimizer, const MapOf* of);

// Returns true if the saved state also has the average of the weights that this optimizer keeps.
int checkpoint_average_fits(const SavedState* s, Optimizer optimizer, const MapOf* of);

// Opens the files that `s` lists.
void checkpoint_parts_open(CheckpointParts* parts, const SavedState* s, const char* directory,
                           const OptimizerState* state, const Map* m);

// Returns the elements of a slot that the files have for an entry of this rank; 0 if the slot
// starts as zeros.
size_t checkpoint_parts_count(const CheckpointParts* parts, const StateEntry* own, int slot);

// Sets `values` to them. Ends the program if no file has some of them.
void checkpoint_parts_read(const CheckpointParts* parts, const StateEntry* own, int slot, void* values);

void checkpoint_parts_close(CheckpointParts* parts);

#ifdef __cplusplus
}
#endif

#ifdef OPTIMIZER_PARTS_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

// ---- entries ----

// Returns the state of the whole model.
static OptimizerState parts_whole_(const OptimizerState* state, const Map* m) {
    Optimizer optimizer = state->optimizer;
    OptimizerState whole;
    optimizer.frozen = m->of.freeze.rows;
    optimizer_layout(&whole, optimizer, m->of.whole);
    return whole;
}

// Returns the elements of a slot of an entry. Matrices have the slots that belong to whole ones,
// and shards all others.
static size_t parts_entry_elements_(const OptimizerState* whole, const StateEntry* e, int slot) {
    return e->of ? state_matrix_elements(whole, slot, e->of)
           : state_slot_is_whole(whole, slot, e->tensor)
               ? 0
               : state_slot_elements(whole, slot, e->tensor, e->piece.count);
}

// Returns matrix k of a tensor of the whole model, without places.
static StateEntry parts_matrix_(const Matrices* of, int layer, size_t k) {
    const size_t count = of->rows * of->cols;
    const StateEntry matrix = {of->row, layer, of, {0, count, of->first * of->cols + k * count, count, 0},
                               NULL,    {0}};
    return matrix;
}

static void parts_add_(StateEntries* to, StateEntry entry) {
    to->all = (StateEntry*)check_grow(to->all, to->count, sizeof(StateEntry), "entries of a checkpoint");
    to->all[to->count++] = entry;
}

// Returns the layer of the whole model that a layer of this rank is.
static int parts_layer_(const Map* m, int tensor, int l) {
    const TensorRow* row = &m->whole[tensor];
    return l < 0 || !row->in_block ? 0
                                   : tensor_lowest_layer(row, tensor_copy(row, m->cfg.part.first_layer + l));
}

static void parts_add_shard_(StateEntries* to, const OptimizerState* whole, const Map* m, const Shard* s) {
    StateEntry e = {s->tensor, parts_layer_(m, s->tensor, s->layer), NULL, s->piece, NULL, {0}};
    int has = 0;
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        e.at[slot] = s->slot[slot];
        has |= parts_entry_elements_(whole, &e, slot) > 0;
    }
    if (has) {
        parts_add_(to, e);
    }
}

// Adds a matrix of this rank, if it has slots; without places if it is not trained.
static void parts_add_matrix_(StateEntries* to, const OptimizerState* whole, const OptimizerState* state,
                              const Map* m, OwnedMatrix x) {
    const TensorRow* row = &state->rows[x.of->row];
    const int before = row->split == SPLIT_EXPERTS ? m->cfg.part.expert_rank * x.of->count : 0,
              is_trained = x.copy >= x.of->first_copy;
    const Matrices* of = whole->matrices;
    int has = 0;
    while (of->row != x.of->row || of->run != x.of->run) {
        of++;
    }
    StateEntry e = parts_matrix_(of, parts_layer_(m, x.of->row, tensor_lowest_layer(row, x.copy)),
                                 (size_t)(before + x.number));
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const int has_slot = parts_entry_elements_(whole, &e, slot) > 0;
        e.at[slot] = has_slot && is_trained ? state_matrix_begin(state, slot, x) : MAP_NONE;
        has |= has_slot;
    }
    if (has) {
        parts_add_(to, e);
    }
}

// Returns true if this rank, of all that own a matrix of a tensor, writes its state.
static int parts_writes_(const Map* m, const TensorRow* row) {
    const int is_tied = row->member == offsetof(ModelParameters, wte) && !m->cfg.has_head,
              has_others = m->of.stage > 0 || m->cfg.part.expert_rank == 0 || row->split == SPLIT_EXPERTS;
    return has_others && (!is_tied || model_has_last(m->cfg));
}

// Adds the matrices that this rank owns. If it `writes`, owner 0 also adds those in frozen blocks.
static void parts_add_matrices_(StateEntries* to, const OptimizerState* whole, const OptimizerState* state,
                                const Map* m, int writes) {
    for (const Matrices* of = state->matrices; of < state->matrices + state->num_matrices; of++) {
        const TensorRow* row = &state->rows[of->row];
        const int end = writes && !parts_writes_(m, row) ? 0 : row->layers;
        for (int copy = 0; copy < end; copy++) {
            for (int k = 0; k < of->count; k++) {
                const OwnedMatrix x = {of, copy, k};
                if (copy < of->first_copy ? writes && of->owner == 0 : matrix_is_owned(x)) {
                    parts_add_matrix_(to, whole, state, m, x);
                }
            }
        }
    }
}

// Sets the entries of this rank, with their places in memory: shards first, then matrices. If it
// `writes`, they are what it writes; a frozen block then has entries without places.
static StateEntries parts_own_(const OptimizerState* whole, const OptimizerState* state, const Map* m,
                               int writes) {
    StateEntries own = {NULL, 0};
    for (const Shard* s = m->shards; s < m->shards + m->num_shards; s++) {
        if (map_has(m, s, MAP_OWNED) && m->buckets[s->bucket].kind != MAP_EMBEDDING &&
            (!writes || s->flags & SHARD_WRITES)) {
            parts_add_shard_(&own, whole, m, s);
        }
    }
    parts_add_matrices_(&own, whole, state, m, writes);
    return own;
}

// ---- writing ----

// Returns the ranks of a data group that write: all, or if they have the same state one of them; of
// divided experts one for each part.
static int checkpoint_writers_of_data_(const MapOf* of) { return of->stage == 0 ? of->experts : of->data; }

int checkpoint_part_writers(const MapOf* of) {
    return of->tensor * of->pipeline * checkpoint_writers_of_data_(of);
}

// Parts have the order of ranks.
int checkpoint_part_rank(const MapOf* of, int i) {
    const int t = of->tensor, writers = checkpoint_writers_of_data_(of);
    const MapPlace place = {i / t / writers, i / t % writers, i % t};
    return map_rank(of, place);
}

int checkpoint_part_number(const MapOf* of, int rank) {
    const MapPlace place = map_place(of, rank);
    const int writers = checkpoint_writers_of_data_(of);
    return place.data < writers ? (place.stage * writers + place.data) * of->tensor + place.tensor : -1;
}

size_t checkpoint_part_bytes(const MapOf* of, int rank, const OptimizerState* state) {
    return checkpoint_part_number(of, rank) >= 0 ? state->saved_bytes : 0;
}

void checkpoint_part_name(char name[64], int i, int writers) {
    snprintf(name, 64, "optimizer.%dof%d.safetensors", i + 1, writers);
}

// Returns true if a shard is the next one of the same piece.
static int parts_follows_(const StateEntry* e, const StateEntry* before) {
    const MapPiece *a = &before->piece, *b = &e->piece;
    return !e->of && before->tensor == e->tensor && before->layer == e->layer && a->logical == b->logical &&
           a->run == b->run && a->stride == b->stride && a->first + a->count == b->first;
}

// Writes the shards, neighbors merged, or the matrices as text. The caller frees it.
static char* parts_text_(const Map* m, const StateEntries* entries, int is_matrix) {
    const size_t room = 160 * (entries->count + 1);
    char* text = (char*)check_alloc(room, 1, "entries of a checkpoint");
    size_t used = 0;
    for (size_t i = 0; i < entries->count; i++) {
        StateEntry e = entries->all[i];
        for (; i + 1 < entries->count && parts_follows_(&entries->all[i + 1], &e); i++) {
            e.piece.count += entries->all[i + 1].piece.count;
        }
        const MapPiece* p = &e.piece;
        if ((e.of != NULL) != is_matrix) {
            continue;
        }
        used += (size_t)snprintf(text + used, room - used, "%s%s:%d:", used ? "," : "",
                                 m->whole[e.tensor].name, e.layer);
        used += is_matrix ? (size_t)snprintf(text + used, room - used, "%zu", p->logical)
                          : (size_t)snprintf(text + used, room - used, "%zu+%zu@%zu/%zu/%zu", p->first,
                                             p->count, p->logical, p->run, p->stride);
    }
    return text;
}

static SafeTensorsDtype checkpoint_dtype_(const StateSlot* slot) {
    return slot->element_bytes == 1 ? SAFETENSORS_U8 : SAFETENSORS_F32;
}

// Writes zeros for a frozen block, which has no state in memory.
static void checkpoint_write_zeros_(SafeTensorsWriter* writer, size_t bytes) {
    static const char zeros[1 << 16];
    for (size_t at = 0; at < bytes; at += sizeof(zeros)) {
        safetensors_write_raw(writer, zeros, bytes - at < sizeof(zeros) ? bytes - at : sizeof(zeros));
    }
}

static void checkpoint_write_slot_(SafeTensorsWriter* writer, const OptimizerState* whole,
                                   const StateEntries* entries, int slot, const void* array) {
    const size_t element = state_slot_of(slot).element_bytes;
    for (const StateEntry* e = entries->all; e < entries->all + entries->count; e++) {
        const size_t bytes = parts_entry_elements_(whole, e, slot) * element;
        if (bytes > 0 && e->at[slot] != MAP_NONE) {
            safetensors_write_raw(writer, (const char*)array + e->at[slot] * element, bytes);
        } else {
            checkpoint_write_zeros_(writer, bytes);
        }
    }
}

// Declares the slots that have any elements.
static void checkpoint_declare_slots_(SafeTensorsWriter* writer, const OptimizerState* whole,
                                      const StateEntries* entries) {
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const StateSlot s = state_slot_of(slot);
        size_t elements = 0;
        for (size_t i = 0; i < entries->count; i++) {
            elements += parts_entry_elements_(whole, &entries->all[i], slot);
        }
        if (elements > 0) {
            safetensors_writer_declare(writer, s.name, checkpoint_dtype_(&s), 1, &elements);
        }
    }
}

uint64_t checkpoint_part_write(const Map* m, const OptimizerState* state, const char* path,
                               const void* const slots[MAP_SLOTS]) {
    const OptimizerState whole = parts_whole_(state, m);
    StateEntries entries = parts_own_(&whole, state, m, 1);
    char *shards = parts_text_(m, &entries, 0), *matrices = parts_text_(m, &entries, 1);
    SafeTensorsWriter writer;
    safetensors_writer_open(&writer, path);
    safetensors_writer_metadata(&writer, "matrices", matrices);
    safetensors_writer_metadata(&writer, "shards", shards);
    checkpoint_declare_slots_(&writer, &whole, &entries);
    safetensors_writer_begin(&writer);
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        checkpoint_write_slot_(&writer, &whole, &entries, slot, slots[slot]);
    }
    free(shards);
    free(matrices);
    free(entries.all);
    return safetensors_writer_commit(&writer);
}

// ---- reading: the header of a file ----

enum { PARTS_ITEM_ = 160 }; // bytes of an item of a list

// Copies the next item of a list with commas, and moves on; returns 0 after the last.
static int parts_item_(const char** text, char item[PARTS_ITEM_]) {
    const size_t length = strcspn(*text, ",");
    snprintf(item, PARTS_ITEM_, "%.*s", (int)(length < PARTS_ITEM_ ? length : PARTS_ITEM_), *text);
    const int has = **text != '\0';
    *text += length + ((*text)[length] == ',');
    return has;
}

static size_t parts_number_(const SafeTensors* file, const char* key) {
    const char* text = safetensors_metadata(file, key);
    size_t number = 0;
    int end = 0;
    CHECK(text && sscanf(text, "%zu%n", &number, &end) == 1 && !text[end],
          "%s: %s: \"%.40s\", wanted a number", file->path, key, text ? text : "missing");
    return number;
}

// True if all elements of a piece are below `all`, and ascend.
static int parts_is_piece_(const MapPiece* p, size_t all) {
    if (p->count == 0 || p->run == 0 || p->first > all || p->count > all || p->logical > all ||
        p->stride > all) {
        return 0;
    }
    const size_t last = p->first + p->count - 1, line = last / p->run;
    return (line == 0 || (p->stride >= p->run && line <= all / p->stride)) &&
           p->logical + line * p->stride + last % p->run < all;
}

// Sets the matrix of a tensor that begins at an element; returns 0 if none does.
static int parts_find_matrix_(StateEntry* e, const OptimizerState* whole, size_t begin) {
    for (const Matrices* of = whole->matrices; of < whole->matrices + whole->num_matrices; of++) {
        const size_t first = of->first * of->cols, count = of->rows * of->cols, k = (begin - first) / count;
        if (of->row == e->tensor && begin >= first && (begin - first) % count == 0 && k < (size_t)of->count) {
            *e = parts_matrix_(of, e->layer, k);
            return 1;
        }
    }
    return 0;
}

// Sets an entry from its text; returns 0 if it is none of this model.
static int parts_parse_(StateEntry* e, const CheckpointParts* parts, const char* item, int is_matrix) {
    const Map* m = parts->map;
    const SafeTensors* file = e->file;
    MapPiece* p = &e->piece;
    char name[32];
    int at = 0, end = 0;
    if (sscanf(item, "%31[a-z0-9_]:%d:%n", name, &e->layer, &at) != 2 || at == 0) {
        return 0;
    }
    while (e->tensor < MODEL_PARAMETER_ROWS && strcmp(m->whole[e->tensor].name, name) != 0) {
        e->tensor++;
    }
    if (e->tensor == MODEL_PARAMETER_ROWS || e->layer < 0 ||
        e->layer >= (m->whole[e->tensor].in_block ? m->of.whole.L : 1)) {
        return 0;
    }
    if (is_matrix) {
        const int is_number = sscanf(item + at, "%zu%n", &p->logical, &end) == 1 && !item[at + end],
                  found = is_number && parts_find_matrix_(e, &parts->whole, p->logical);
        e->file = file;
        return found;
    }
    return sscanf(item + at, "%zu+%zu@%zu/%zu/%zu%n", &p->first, &p->count, &p->logical, &p->run, &p->stride,
                  &end) == 5 &&
           !item[at + end] &&
           parts_is_piece_(p,
                           model_rows_in_files(&m->whole[e->tensor], m->of.whole) * m->whole[e->tensor].cols);
}

// Adds an entry whose slots come next in its file.
static void parts_add_next_(CheckpointParts* parts, StateEntry e, size_t at[MAP_SLOTS]) {
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const size_t count = parts_entry_elements_(&parts->whole, &e, slot);
        e.at[slot] = count > 0 ? at[slot] : MAP_NONE;
        at[slot] += count;
    }
    parts_add_(&parts->saved, e);
}

// Adds the shards or the matrices of a file; `at` counts the elements of each slot.
static void parts_read_list_(CheckpointParts* parts, const SafeTensors* file, int is_matrix,
                             size_t at[MAP_SLOTS]) {
    const char *key = is_matrix ? "matrices" : "shards", *text = safetensors_metadata(file, key);
    char item[PARTS_ITEM_];
    CHECK(text, "%s: %s: missing", file->path, key);
    while (parts_item_(&text, item)) {
        StateEntry e = {0, 0, NULL, {0, 0, 0, 0, 0}, file, {0}};
        CHECK(parts_parse_(&e, parts, item, is_matrix), "%s: %s: \"%s\", wanted elements of this model",
              file->path, key, item);
        parts_add_next_(parts, e, at);
    }
}

// ---- reading: older files ----

// Returns the slot whose tensor in the file has a slot of an entry: in older files m and v of
// matrices come with their elements.
static int parts_slot_in_file_(const StateEntry* e, int slot) {
    return e->of ? slot : slot == STATE_MATRIX_M ? STATE_M : slot == STATE_MATRIX_V ? STATE_V : slot;
}

// Adds elements of a tensor, which come next.
static void parts_add_old_elements_(CheckpointParts* parts, StateEntry e, size_t at[MAP_SLOTS]) {
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const int has = parts->whole.slots[slot].shape <= SLOT_MATRIX;
        const size_t count = has ? state_slot_elements(&parts->whole, slot, e.tensor, e.piece.count) : 0;
        size_t* next = &at[parts_slot_in_file_(&e, slot)];
        e.at[slot] = count > 0 ? *next : MAP_NONE;
        *next += count;
    }
    parts_add_(&parts->saved, e);
}

// Returns the begin of a slot of matrix k among the matrices of a tensor.
static size_t parts_in_tensor_(const OptimizerState* whole, int slot, const Matrices* of, int k) {
    const SlotShape shape = whole->slots[slot].shape;
    return shape == SLOT_ROWS   ? of->first + (size_t)k * of->rows
           : shape == SLOT_COLS ? 0
                                : state_square_begin(whole, shape, of->row, of->run) +
                                      (size_t)k * state_matrix_elements(whole, slot, of);
}

// Adds what the matrices of a tensor have for rows, columns and squares, which comes next. The
// vocabulary has `words` rows with padding.
static void parts_add_old_matrices_(CheckpointParts* parts, const StateEntry* tensor, size_t words,
                                    size_t at[MAP_SLOTS]) {
    const OptimizerState* whole = &parts->whole;
    const TensorRow* row = &whole->rows[tensor->tensor];
    for (const Matrices* of = whole->matrices; of < whole->matrices + whole->num_matrices; of++) {
        for (int k = 0; k < of->count && of->row == tensor->tensor; k++) {
            StateEntry matrix = parts_matrix_(of, tensor->layer, (size_t)k);
            matrix.file = tensor->file;
            for (int slot = 0; slot < MAP_SLOTS; slot++) {
                const int has =
                    whole->slots[slot].shape > SLOT_MATRIX && parts_entry_elements_(whole, &matrix, slot) > 0;
                matrix.at[slot] = has ? at[slot] + parts_in_tensor_(whole, slot, of, k) : MAP_NONE;
            }
            parts_add_(&parts->saved, matrix);
        }
    }
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        const SlotShape shape = whole->slots[slot].shape;
        const int has = shape > SLOT_MATRIX && state_slot_has(whole, slot, tensor->tensor);
        at[slot] += !has                 ? 0
                    : shape == SLOT_COLS ? row->cols
                    : shape != SLOT_ROWS ? state_square_begin(whole, shape, tensor->tensor, tensor_runs(row))
                    : row->init == INIT_VOCAB ? words
                                              : row->rows;
    }
}

// Adds elements begin ... end - 1 of all, if `end` is not beyond them; returns the number of all.
static size_t parts_add_range_(CheckpointParts* parts, const SafeTensors* file, const SavedState* s,
                               size_t begin, size_t end, size_t at[MAP_SLOTS]) {
    const Map* m = parts->map;
    size_t first = 0; // element of the copy
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &m->whole[i];
        const size_t layer = model_rows_in_files(row, m->of.whole) * row->cols;
        for (int k = 0; k < row->layers; k++) {
            const size_t from = begin > first ? begin - first : 0,
                         to = end < first + layer ? end - (end < first ? end : first) : layer;
            const int l = row->in_block ? tensor_lowest_layer(row, k) : 0;
            const StateEntry e = {i, l, NULL, {from, to - from, 0, layer, 0}, file, {0}};
            if (from < to) {
                parts_add_old_elements_(parts, e, at);
            }
            if (from < to && to == layer) {
                parts_add_old_matrices_(parts, &e, (size_t)s->padded_vocab, at);
            }
            first += layer;
        }
    }
    return first;
}

// Adds the ranges in the metadata of a file: `ranges`, or in the oldest ones one from `begin` to
// `end`.
static void parts_read_ranges_(CheckpointParts* parts, const SafeTensors* file, const SavedState* s,
                               size_t at[MAP_SLOTS]) {
    const size_t total = parts_number_(file, "total"), wanted = parts_add_range_(parts, file, s, 0, 0, at);
    const char* text = safetensors_metadata(file, "ranges");
    char item[PARTS_ITEM_];
    CHECK(total == wanted, "%s: a part of %zu elements, wanted %zu for this model", file->path, total,
          wanted);
    if (!text) {
        parts_add_range_(parts, file, s, parts_number_(file, "begin"), parts_number_(file, "end"), at);
        return;
    }
    while (parts_item_(&text, item)) {
        size_t begin, end;
        int length = 0;
        CHECK(sscanf(item, "%zu-%zu%n", &begin, &end, &length) == 2 && !item[length] && begin <= end &&
                  end <= total,
              "%s: ranges: \"%s\", wanted some of %zu elements", file->path, item, total);
        parts_add_range_(parts, file, s, begin, end, at);
    }
}

// Refuses the state of slices, and says what to do.
static void parts_refuse_slices_(const SafeTensors* file, const char* directory) {
    CHECK(!safetensors_metadata(file, "slices"),
          "%s: state of a run with --tensor-slices above 1, which is no longer read: save it with "
          "--tensor-slices 1 of commit 5e8cb2dd, or start a run from its weights alone: --model %s",
          file->path, directory);
}

// ---- reading: all files ----

// Returns true if a slot is read: not a new average.
static int checkpoint_reads_slot_(const CheckpointParts* parts, int slot) {
    return !parts->is_new && (slot != STATE_AVERAGE || parts->has_average);
}

// Ends the program if a file lacks the elements of a slot that its header promises. If it promises
// none, it needs no tensor.
static void checkpoint_check_part_(const SafeTensors* file, int slot, size_t count) {
    const StateSlot s = state_slot_of(slot);
    if (count > 0) {
        const SafeTensorsView* view = safetensors_require(file, s.name, 1, &count);
        CHECK(view->dtype == checkpoint_dtype_(&s), "%s: tensor %s is %s, wanted %s", file->path, s.name,
              safetensors_dtype_name(view->dtype), safetensors_dtype_name(checkpoint_dtype_(&s)));
    }
}

static void checkpoint_add_file_(CheckpointParts* parts, const SafeTensors* file, const SavedState* s,
                                 const char* directory) {
    size_t at[MAP_SLOTS] = {0};
    if (safetensors_metadata(file, "shards")) {
        parts_read_list_(parts, file, 0, at);
        parts_read_list_(parts, file, 1, at);
    } else {
        parts_refuse_slices_(file, directory);
        parts_read_ranges_(parts, file, s, at);
    }
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        checkpoint_check_part_(file, slot, checkpoint_reads_slot_(parts, slot) ? at[slot] : 0);
    }
}

// Returns true if a file has optimizer state: optimizer.<i>of<n>.safetensors.
static int checkpoint_is_part_(const char* name) {
    int i, n, end = 0;
    return sscanf(name, "optimizer.%dof%d.safetensors%n", &i, &n, &end) == 2 && end && !name[end];
}

static int parts_compare_(const void* a, const void* b) {
    const StateEntry *x = (const StateEntry*)a, *y = (const StateEntry*)b;
    return x->tensor != y->tensor ? x->tensor - y->tensor : x->layer - y->layer;
}

// Opens the files of a checkpoint, and sorts their contents.
static void checkpoint_open_files_(CheckpointParts* parts, const SavedState* s, const char* directory) {
    char path[PATH_MAX];
    parts->files = (SafeTensors*)check_alloc((size_t)s->num_files + 1, sizeof(SafeTensors), directory);
    for (int i = 0; i < s->num_files; i++) {
        if (checkpoint_is_part_(s->files[i].name)) {
            SafeTensors* file = &parts->files[parts->num_files++];
            file_join(path, directory, s->files[i].name);
            safetensors_open(file, path);
            checkpoint_add_file_(parts, file, s, directory);
        }
    }
    CHECK(parts->num_files > 0, "%s: no files of the optimizer's state", directory);
    safetensors_sort(parts->saved.all, parts->saved.count, sizeof(StateEntry), parts_compare_);
}

// Returns the rows of the parameters that the saved run had frozen in all blocks.
static TensorSet checkpoint_frozen_rows_(const SavedState* s, ModelConfig cfg) {
    return freeze_of(cfg, state_option(s, "freeze")).rows;
}

// Returns true if an option of the saved run added state to its optimizer.
static int checkpoint_has_optional_(const SavedState* s, OptimizerName name) {
    const char *sgd = state_option(s, "sgd-momentum"), *adafactor = state_option(s, "adafactor-beta1"),
               *rows = state_option(s, "muon-rows");
    return name == OPTIMIZER_SGD         ? sgd && strtof(sgd, NULL) > 0
           : name == OPTIMIZER_ADAFACTOR ? adafactor && strtof(adafactor, NULL) > 0
           : name == OPTIMIZER_MUON      ? rows && strcmp(rows, "on") == 0
                                         : 0;
}

// Returns true if SOAP turned the sides that this run turns.
static int checkpoint_same_sides_(const SavedState* s, Optimizer optimizer) {
    const char* side = state_option(s, "soap-max-side");
    return optimizer.name != OPTIMIZER_SOAP || (side && atoi(side) == optimizer.soap_max_side);
}

// Returns true if Muon's momentum was kept as this run keeps it.
static int checkpoint_same_momentum_(const SavedState* s, Optimizer optimizer) {
    const char* momentum = state_option(s, "muon-momentum"); // older files have none: fp32
    const int was_8bit = momentum && strcmp(momentum, "8bit") == 0;
    return optimizer.name != OPTIMIZER_MUON || was_8bit == (optimizer.muon_momentum == MUON_8BIT);
}

int checkpoint_state_fits(const SavedState* s, Optimizer optimizer, const MapOf* of) {
    const char* name = state_option(s, "optimizer");
    return !name || (strcmp(name, optimizer_word(optimizer.name)) == 0 &&
                     checkpoint_frozen_rows_(s, of->whole) == of->freeze.rows &&
                     checkpoint_same_sides_(s, optimizer) && checkpoint_same_momentum_(s, optimizer) &&
                     checkpoint_has_optional_(s, optimizer.name) == optimizer.has_optional);
}

int checkpoint_average_fits(const SavedState* s, Optimizer optimizer, const MapOf* of) {
    Average saved;
    return average_parse(&saved, state_option(s, "average")) && average_is_same(saved, optimizer.average) &&
           checkpoint_state_fits(s, optimizer, of);
}

void checkpoint_parts_open(CheckpointParts* parts, const SavedState* s, const char* directory,
                           const OptimizerState* state, const Map* m) {
    memset((void*)parts, 0, sizeof(*parts));
    parts->map = m;
    parts->whole = parts_whole_(state, m);
    parts->own = parts_own_(&parts->whole, state, m, 0);
    parts->is_new = !checkpoint_state_fits(s, state->optimizer, &m->of);
    parts->has_average = checkpoint_average_fits(s, state->optimizer, &m->of);
    if (!parts->is_new) {
        checkpoint_open_files_(parts, s, directory);
    }
}

// ---- reading: values ----

// Ends the program at a value that no optimizer can have written: NaN, or below the slot's least.
// Every code of an 8-bit slot is legal.
static void checkpoint_check_state_(const char* path, const StateSlot* slot, const void* values, size_t first,
                                    size_t count) {
    char wanted[64] = "a number";
    if (isfinite(slot->least)) {
        snprintf(wanted, sizeof(wanted), "%g or more", (double)slot->least);
    }
    for (size_t i = 0; i < count && checkpoint_dtype_(slot) == SAFETENSORS_F32; i++) {
        const float value = ((const float*)values)[i];
        CHECK(value >= slot->least, "%s: element %zu of %s is %f, wanted %s", path, first + i, slot->name,
              (double)value, wanted);
    }
}

// Copies `count` elements of a slot of an entry in a file.
static void parts_copy_(const StateEntry* saved, int slot, size_t first, size_t count, char* to) {
    const StateSlot s = state_slot_of(parts_slot_in_file_(saved, slot));
    const SafeTensorsView* view = safetensors_find(saved->file, s.name);
    const size_t at = saved->at[slot] + first;
    memcpy(to, view->data + at * s.element_bytes, count * s.element_bytes);
    safetensors_release(view, at, count);
    checkpoint_check_state_(saved->file->path, &s, to, at, count);
}

// Copies the elements of a slot that two entries have in common; returns their number.
static size_t parts_copy_common_(const CheckpointParts* parts, const StateEntry* own, const StateEntry* saved,
                                 int slot, char* to) {
    const StateSlot s = state_slot_of(slot);
    const size_t unit = parts->map->of.shapes[slot] == SLOT_BLOCKS ? MAP_BLOCK : 1;
    MapMeet meet = {0, 0, 0};
    size_t count = 0;
    while (map_meet(&own->piece, &saved->piece, &meet)) {
        CHECK((meet.in_a | meet.in_b | meet.count) % unit == 0, "%s: shards end inside of a block of %s",
              saved->file->path, s.name);
        parts_copy_(saved, slot, meet.in_b / unit, meet.count / unit,
                    to + meet.in_a / unit * s.element_bytes);
        count += meet.count / unit;
    }
    return count;
}

size_t checkpoint_parts_count(const CheckpointParts* parts, const StateEntry* own, int slot) {
    return own->at[slot] != MAP_NONE && checkpoint_reads_slot_(parts, slot)
               ? parts_entry_elements_(&parts->whole, own, slot)
               : 0;
}

void checkpoint_parts_read(const CheckpointParts* parts, const StateEntry* own, int slot, void* values) {
    const StateSlot s = state_slot_of(slot);
    const StateEntries* saved = &parts->saved;
    const size_t wanted = checkpoint_parts_count(parts, own, slot);
    size_t found = 0, i = 0;
    for (size_t step = saved->count; step > 0; step /= 2) { // the first entry of the tensor
        while (i + step <= saved->count && parts_compare_(&saved->all[i + step - 1], own) < 0) {
            i += step;
        }
    }
    for (; i < saved->count && parts_compare_(&saved->all[i], own) == 0; i++) {
        const StateEntry* e = &saved->all[i];
        if (e->at[slot] == MAP_NONE) {
            continue;
        }
        if (!e->of) {
            found += parts_copy_common_(parts, own, e, slot, (char*)values);
        } else if (e->of == own->of && e->piece.logical == own->piece.logical) {
            parts_copy_(e, slot, 0, wanted, (char*)values);
            found += wanted;
        }
    }
    CHECK(found == wanted, "%s: the files have %zu elements of %s for %zu of %s, layer %d",
          parts->files[0].path, found, s.name, wanted, parts->map->whole[own->tensor].name, own->layer);
}

void checkpoint_parts_close(CheckpointParts* parts) {
    for (size_t i = 0; i < parts->num_files; i++) {
        safetensors_close(&parts->files[i]);
    }
    free(parts->files);
    free(parts->saved.all);
    free(parts->own.all);
}

#endif // OPTIMIZER_PARTS_IMPLEMENTATION

#endif
