/*
optimizer_parts.h -- the optimizer's state in a checkpoint: optimizer.<i>of<n>.safetensors.

All elements of the parameters are numbered in the order of their table, without padding: a space of
`total` elements. Each rank writes the elements that it updates to its own file; the metadata
`ranges`, for example "0-98304,196608-200000", says which they are. Each slot of the state
(optimizer.h) is a tensor with the values of these elements, in their order. Means of rows and
columns belong to the last element of their matrix. The reader accepts any files that together fill
the space, so a run can be resumed with any number of ranks.

Tensor ranks that cut matrices into parts (part.h) number the elements of each layer part by part,
row-major in a part; the metadata `tensor` has the number of these ranks, and is missing if that is
1. Of a tensor that every rank of a tensor group has, the first one writes the state; of a token
embedding that is also the classifier's matrix, the last stage. A run with another number of tensor
ranks looks up where its elements are in the files. Experts that ranks divide have the numbers that
they have in the whole layer. Files of a run with --tensor-slices above 1, of earlier versions, are
refused.

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
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/rank_part.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// The numbers of the elements of a model that this many tensor ranks cut.
typedef struct {
    int tensor;
    OptimizerState state;                   // of the whole model
    size_t layer[MODEL_PARAMETER_ROWS];     // elements of a layer
    size_t begin[MODEL_PARAMETER_ROWS + 1]; // of a row; then the number of all elements
} CheckpointSpace;

// The part of the parameters that a rank updates.
typedef struct {
    RankPart of;
    OptimizerState state;  // layout of its state in memory
    CheckpointSpace space; // of this run
    // its elements, in the order of files; `logical` is their number in the space
    ZeroRange* ranges;
    int num_ranges;
} CheckpointPart;

void checkpoint_part_open(CheckpointPart* part, Optimizer optimizer, const RankPart* of);
void checkpoint_part_close(CheckpointPart* part);

// ---- writing ----

// Returns the number of ranks that write a part: all, or one of each data group if all of it have
// the same state.
int checkpoint_part_writers(const RankPart* of);

// Returns the rank that writes part i.
int checkpoint_part_rank(const RankPart* of, int i);

// Returns the number of the part that this rank writes; -1: none.
int checkpoint_part_number(const RankPart* of);

// Returns the bytes that this rank writes, in memory laid out by optimizer_state_open: the saved
// slots.
size_t checkpoint_part_bytes(Optimizer optimizer, const RankPart* of);

// Returns the bytes of the values in all parts.
double checkpoint_optimizer_bytes(const CheckpointPart* part);

void checkpoint_part_name(char name[64], int i, int writers);

// Writes this rank's part, completely or not at all. Returns its checksum.
uint64_t checkpoint_part_write(const CheckpointPart* part, const char* path, const void* optimizer);

// ---- reading ----

// The elements begin ... end-1 of a slot, or of the space. In the file they start at element `at`.
typedef struct {
    const SafeTensors* file;
    size_t begin, end, at;
} CheckpointSlice_;

typedef struct {
    CheckpointSlice_* slices;
    size_t count;
} CheckpointSlices_;

// The files of the optimizer's state, and their contents.
typedef struct {
    SafeTensors* files;
    size_t num_files;
    CheckpointSlices_ space, slots[STATE_SLOTS]; // sorted
    CheckpointSpace numbers;                     // of the files
    int is_new;                                  // true: no state is read, all starts as zeros
    int has_average;                             // true: the average continues
    CheckpointPart own;                          // part that this rank needs
} CheckpointParts;

// Returns true if a saved state of this model is of this optimizer and has the same slots; else all
// state starts as zeros.
int checkpoint_state_fits(const SavedState* s, Optimizer optimizer, const RankPart* of);

// Returns true if the saved state has the average of the weights that this optimizer keeps, too.
int checkpoint_average_fits(const SavedState* s, Optimizer optimizer, const RankPart* of);

// Opens the files that `s` lists. Ends the program unless they fill the space.
void checkpoint_parts_open(CheckpointParts* parts, const SavedState* s, const char* directory,
                           Optimizer optimizer, const RankPart* of);

// Sets `group` to this rank's elements of group g in a slot: state_group_elements of them, with
// zeros as padding. A slot that is not saved is set to zeros.
void checkpoint_parts_read(const CheckpointParts* parts, int slot, int g, void* group);

void checkpoint_parts_close(CheckpointParts* parts);

#ifdef __cplusplus
}
#endif

#ifdef OPTIMIZER_PARTS_IMPLEMENTATION

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/model/part.h"

// ---- numbers of elements ----

static void checkpoint_space_open_(CheckpointSpace* space, Optimizer optimizer, const RankPart* of, int t) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const ModelConfig whole = of->whole;
    const ZeroPlan one = zero_plan(whole, 0, 0, 1);
    space->tensor = t;
    optimizer.frozen = of->frozen;
    optimizer_state_open(&space->state, optimizer, &one, whole);
    model_parameter_rows_of(rows, whole, 1);
    space->begin[0] = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &rows[i];
        space->layer[i] = row->layers > 0 ? model_rows_in_files(row, whole) * row->cols : 0;
        space->begin[i + 1] = space->begin[i] + (size_t)row->layers * space->layer[i];
    }
}

static size_t checkpoint_total_(const CheckpointSpace* space) { return space->begin[MODEL_PARAMETER_ROWS]; }

// True if parts of a tensor have their own parts of a slot of this shape.
static int checkpoint_is_of_elements_(SlotShape shape) {
    return shape == SLOT_ELEMENTS || shape == SLOT_BLOCKS;
}

// Returns how many elements of a slot belong to the first elements of a layer. What belongs to a
// whole matrix is its last element's.
static size_t checkpoint_slot_in_layer_(const CheckpointSpace* space, int slot, int row, size_t elements) {
    const SlotShape shape = space->state.slots[slot].shape;
    const int has_any = checkpoint_is_of_elements_(shape) || elements == space->layer[row];
    return has_any ? state_slot_elements(&space->state, slot, row, elements) : 0;
}

// Returns how many elements of a slot belong to the elements before `element` of the space.
static size_t checkpoint_slot_place_(const CheckpointSpace* space, int slot, size_t element) {
    size_t place = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS && element > space->begin[i]; i++) {
        const size_t layer = space->layer[i], end = space->begin[i + 1],
                     before = (element < end ? element : end) - space->begin[i];
        if (layer > 0) { // not absent
            place += before / layer * checkpoint_slot_in_layer_(space, slot, i, layer) +
                     checkpoint_slot_in_layer_(space, slot, i, before % layer);
        }
    }
    return place;
}

// Returns the number of the first element of a copy's layer.
static size_t checkpoint_layer_begin_(const CheckpointSpace* space, const CheckpointPart* part,
                                      const ZeroRange* range) {
    const int l =
        part->of.own.part.first_layer + tensor_lowest_layer(&part->state.rows[range->row], range->copy);
    return space->begin[range->row] +
           (size_t)tensor_copy(&space->state.rows[range->row], l) * space->layer[range->row];
}

// Returns the number of the first element of a range in the space of its run.
static size_t checkpoint_number_of_(const CheckpointPart* part, const ZeroRange* range) {
    const TensorRow* row = &part->state.rows[range->row];
    const ModelPart which = part->of.own.part;
    const int rank = row->split == SPLIT_NONE      ? 0
                     : row->split == SPLIT_EXPERTS ? which.expert_rank
                                                   : which.tensor_rank;
    return checkpoint_layer_begin_(&part->space, part, range) + (size_t)rank * tensor_layer_elements(row) +
           range->before;
}

void checkpoint_part_open(CheckpointPart* part, Optimizer optimizer, const RankPart* of) {
    const ModelConfig cfg = of->own;
    part->of = *of;
    optimizer_state_open(&part->state, optimizer, &of->zero, cfg);
    checkpoint_space_open_(&part->space, optimizer, of, model_tensor_ranks(cfg));
    part->ranges =
        (ZeroRange*)check_alloc((size_t)zero_max_ranges(cfg), sizeof(ZeroRange), "ranges of a checkpoint");
    part->num_ranges = zero_ranges(&of->zero, part->state.rows, cfg, part->ranges);
    for (int i = 0; i < part->num_ranges; i++) {
        part->ranges[i].logical = checkpoint_number_of_(part, &part->ranges[i]);
    }
}

void checkpoint_part_close(CheckpointPart* part) { free(part->ranges); }

// Returns true if checkpoints have a slot of this state.
static int checkpoint_has_slot_(const OptimizerState* state, int slot) {
    return state->slots[slot].name && state->slots[slot].bytes > 0;
}

// ---- writing ----

// Returns the ranks of a data group that write: all, or if they have the same state one of them; of
// divided experts one for each part.
static int checkpoint_writers_of_data_(const RankPart* of) {
    return of->zero.stage == 0 ? of->zero.experts : of->zero.size;
}

int checkpoint_part_writers(const RankPart* of) {
    return of->grid.shape.tensor * of->grid.shape.pipeline * checkpoint_writers_of_data_(of);
}

// Parts have the order of ranks.
int checkpoint_part_rank(const RankPart* of, int i) {
    const GridShape shape = of->grid.shape;
    const int t = shape.tensor, data = shape.context * shape.data, writers = checkpoint_writers_of_data_(of),
              j = i % t, r = i / t % writers, stage = i / t / writers;
    return (stage * data + r) * t + j;
}

int checkpoint_part_number(const RankPart* of) {
    const GridMember data = grid_member(&of->grid, GRID_DATA);
    const int writers = checkpoint_writers_of_data_(of);
    return data.rank < writers
               ? (of->grid.stage * writers + data.rank) * of->grid.shape.tensor + of->grid.tensor_rank
               : -1;
}

size_t checkpoint_part_bytes(Optimizer optimizer, const RankPart* of) {
    OptimizerState state;
    optimizer_state_open(&state, optimizer, &of->zero, of->own);
    return checkpoint_part_number(of) >= 0 ? state.saved_bytes : 0;
}

double checkpoint_optimizer_bytes(const CheckpointPart* part) {
    const CheckpointSpace* space = &part->space;
    double bytes = 0;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        if (checkpoint_has_slot_(&space->state, slot)) {
            bytes += (double)checkpoint_slot_place_(space, slot, checkpoint_total_(space)) *
                     (double)space->state.slots[slot].element_bytes;
        }
    }
    return bytes;
}

void checkpoint_part_name(char name[64], int i, int writers) {
    snprintf(name, 64, "optimizer.%dof%d.safetensors", i + 1, writers);
}

// Returns true if this rank, of all that have a tensor, writes its state.
static int checkpoint_writes_(const CheckpointPart* part, const ZeroRange* range) {
    const ModelConfig own = part->of.own;
    const TensorRow* row = &part->state.rows[range->row];
    const int is_tied = row->member == offsetof(ModelParameters, wte) && !own.has_head,
              has_others =
                  part->of.zero.stage > 0 || own.part.expert_rank == 0 || row->split == SPLIT_EXPERTS;
    return has_others && (row->split != SPLIT_NONE || own.part.tensor_rank == 0) &&
           (!is_tied || model_has_last(own));
}

// Returns a part with the ranges that this rank writes.
static CheckpointPart checkpoint_written_(const CheckpointPart* part) {
    CheckpointPart written = *part;
    written.ranges =
        (ZeroRange*)check_alloc((size_t)part->num_ranges + 1, sizeof(ZeroRange), "ranges of a checkpoint");
    written.num_ranges = 0;
    for (int i = 0; i < part->num_ranges; i++) {
        written.ranges[written.num_ranges] = part->ranges[i];
        written.num_ranges += checkpoint_writes_(part, &part->ranges[i]);
    }
    return written;
}

// Returns the ranges as text, adjacent ones merged. The caller frees it.
static char* checkpoint_ranges_text_(const CheckpointPart* part) {
    const size_t room = 48 * ((size_t)part->num_ranges + 1);
    char* text = (char*)check_alloc(room, 1, "ranges of a checkpoint");
    size_t used = 0;
    for (int i = 0; i < part->num_ranges;) {
        const size_t begin = part->ranges[i].logical;
        size_t end = begin;
        for (; i < part->num_ranges && part->ranges[i].logical == end; i++) {
            end += part->ranges[i].count;
        }
        used += (size_t)snprintf(text + used, room - used, "%s%zu-%zu", used ? "," : "", begin, end);
    }
    return text;
}

// Returns how many elements of a slot files have for a range.
static size_t checkpoint_range_elements_(const CheckpointPart* part, int slot, const ZeroRange* range) {
    return checkpoint_slot_place_(&part->space, slot, range->logical + range->count) -
           checkpoint_slot_place_(&part->space, slot, range->logical);
}

static SafeTensorsDtype checkpoint_dtype_(const StateSlot* slot) {
    return slot->element_bytes == 1 ? SAFETENSORS_U8 : SAFETENSORS_F32;
}

static void checkpoint_declare_slot_(SafeTensorsWriter* writer, const CheckpointPart* part, int slot) {
    size_t elements = 0;
    for (int i = 0; i < part->num_ranges; i++) {
        elements += checkpoint_range_elements_(part, slot, &part->ranges[i]);
    }
    const StateSlot* s = &part->state.slots[slot];
    safetensors_writer_declare(writer, s->name, checkpoint_dtype_(s), 1, &elements);
}

// Writes zeros for a frozen block, which has no state in memory.
static void checkpoint_write_zeros_(SafeTensorsWriter* writer, size_t bytes) {
    static const char zeros[1 << 16];
    for (size_t at = 0; at < bytes; at += sizeof(zeros)) {
        safetensors_write_raw(writer, zeros, bytes - at < sizeof(zeros) ? bytes - at : sizeof(zeros));
    }
}

static void checkpoint_write_slot_(SafeTensorsWriter* writer, const CheckpointPart* part, int slot,
                                   const void* optimizer) {
    OptimizerState state = part->state;
    state.memory = (void*)optimizer; // only read
    for (int i = 0; i < part->num_ranges; i++) {
        const ZeroRange* range = &part->ranges[i];
        const size_t bytes =
            checkpoint_range_elements_(part, slot, range) * part->state.slots[slot].element_bytes;
        const void* array = state_array(&state, slot, range);
        if (array) {
            safetensors_write_raw(writer, array, bytes);
        } else {
            checkpoint_write_zeros_(writer, bytes);
        }
    }
}

static void checkpoint_write_metadata_(SafeTensorsWriter* writer, const CheckpointPart* part) {
    char number[32], *ranges = checkpoint_ranges_text_(part);
    safetensors_writer_metadata(writer, "ranges", ranges);
    if (part->space.tensor > 1) {
        snprintf(number, sizeof(number), "%d", part->space.tensor);
        safetensors_writer_metadata(writer, "tensor", number);
    }
    snprintf(number, sizeof(number), "%zu", checkpoint_total_(&part->space));
    safetensors_writer_metadata(writer, "total", number);
    free(ranges);
}

uint64_t checkpoint_part_write(const CheckpointPart* part, const char* path, const void* optimizer) {
    CheckpointPart written = checkpoint_written_(part);
    SafeTensorsWriter writer;
    safetensors_writer_open(&writer, path);
    checkpoint_write_metadata_(&writer, &written);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        if (checkpoint_has_slot_(&written.state, slot)) {
            checkpoint_declare_slot_(&writer, &written, slot);
        }
    }
    safetensors_writer_begin(&writer);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        if (checkpoint_has_slot_(&written.state, slot)) {
            checkpoint_write_slot_(&writer, &written, slot, optimizer);
        }
    }
    checkpoint_part_close(&written);
    return safetensors_writer_commit(&writer);
}

// ---- reading ----

// Reads a number at *text and moves *text past it.
static size_t checkpoint_number_(const SafeTensors* file, const char* key, const char** text) {
    const size_t digits = *text ? strspn(*text, "0123456789") : 0;
    CHECK(digits > 0 && digits < 19, "%s: %s: \"%.40s\", wanted a number", file->path, key,
          *text ? *text : "missing");
    const size_t number = (size_t)strtoull(*text, NULL, 10);
    *text += digits;
    return number;
}

static size_t checkpoint_metadata_(const SafeTensors* file, const char* key) {
    const char* text = safetensors_metadata(file, key);
    const size_t number = checkpoint_number_(file, key, &text);
    CHECK(!*text, "%s: %s: \"%.40s\" after the number", file->path, key, text);
    return number;
}

// Returns the number of tensor ranks of the run that wrote a file.
static size_t checkpoint_tensor_of_(const SafeTensors* file) {
    CHECK(!safetensors_metadata(file, "slices") || checkpoint_metadata_(file, "slices") == 1,
          "%s: optimizer state in %s slices, which only versions up to commit 5e8cb2dd read: let such a "
          "version "
          "resume it with --tensor-slices 1 and save, or start from its weights alone with --model",
          file->path, safetensors_metadata(file, "slices"));
    return safetensors_metadata(file, "tensor") ? checkpoint_metadata_(file, "tensor") : 1;
}

// Opens the numbers that the first file has.
static void checkpoint_open_numbers_(CheckpointParts* parts, const SafeTensors* file, Optimizer optimizer) {
    const ModelConfig whole = parts->own.of.whole;
    char text[128];
    const size_t t = checkpoint_tensor_of_(file);
    CHECK(t <= (size_t)whole.NH, "%s: tensor: %zu, wanted at most the number of heads, %d", file->path, t,
          whole.NH);
    const char* reason = part_uncut(text, sizeof(text), whole, (int)t, 1);
    CHECK(!reason, "%s: tensor: %zu, into which the model cannot be cut: %s", file->path, t, reason);
    checkpoint_space_open_(&parts->numbers, optimizer, &parts->own.of, (int)t);
}

static void checkpoint_put_slice_(CheckpointSlices_* to, CheckpointSlice_ slice) {
    to->slices =
        (CheckpointSlice_*)check_grow(to->slices, to->count, sizeof(CheckpointSlice_), slice.file->path);
    to->slices[to->count++] = slice;
}

// Returns where the next slice of a file starts in it.
static size_t checkpoint_next_at_(const CheckpointSlices_* s, const SafeTensors* file) {
    const CheckpointSlice_* last = s->count ? &s->slices[s->count - 1] : NULL;
    return last && last->file == file ? last->at + (last->end - last->begin) : 0;
}

// Adds a range of the space, and its elements in each slot. All ranges of a file come before those
// of the next.
static void checkpoint_add_slice_(CheckpointParts* parts, const SafeTensors* file, size_t begin, size_t end) {
    CheckpointSlice_ slice = {file, begin, end, checkpoint_next_at_(&parts->space, file)};
    const size_t total = checkpoint_total_(&parts->numbers);
    CHECK(begin <= end && end <= total, "%s: elements %zu to %zu of %zu", file->path, begin, end, total);
    checkpoint_put_slice_(&parts->space, slice);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        slice.begin = checkpoint_slot_place_(&parts->numbers, slot, begin);
        slice.end = checkpoint_slot_place_(&parts->numbers, slot, end);
        slice.at = checkpoint_next_at_(&parts->slots[slot], file);
        checkpoint_put_slice_(&parts->slots[slot], slice);
    }
}

// Adds the ranges in the metadata of a file: `ranges`, or in older files one from `begin` to `end`.
static void checkpoint_add_file_(CheckpointParts* parts, const SafeTensors* file) {
    const size_t total = checkpoint_metadata_(file, "total"), t = checkpoint_tensor_of_(file),
                 wanted = checkpoint_total_(&parts->numbers);
    CHECK(t == (size_t)parts->numbers.tensor, "%s: tensor: %zu, wanted %d as in the file before it",
          file->path, t, parts->numbers.tensor);
    CHECK(total == wanted, "%s: a part of %zu elements, wanted %zu for this model", file->path, total,
          wanted);
    const char* text = safetensors_metadata(file, "ranges");
    if (!text) {
        const size_t begin = checkpoint_metadata_(file, "begin"), end = checkpoint_metadata_(file, "end");
        checkpoint_add_slice_(parts, file, begin, end);
        return;
    }
    while (*text) {
        const size_t begin = checkpoint_number_(file, "ranges", &text);
        CHECK(*text == '-', "%s: ranges: \"%.40s\", wanted -", file->path, text);
        text++;
        const size_t end = checkpoint_number_(file, "ranges", &text);
        CHECK(!*text || (*text == ',' && text[1]), "%s: ranges: \"%.40s\", wanted a comma", file->path, text);
        text += *text == ',';
        checkpoint_add_slice_(parts, file, begin, end);
    }
}

static int checkpoint_by_begin_(const void* a, const void* b) {
    const CheckpointSlice_ *x = (const CheckpointSlice_*)a, *y = (const CheckpointSlice_*)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : (x->end > y->end) - (x->end < y->end);
}

// Returns true if a file has optimizer state: optimizer.<i>of<n>.safetensors.
static int checkpoint_is_part_(const char* name) {
    int i, n, end = 0;
    return sscanf(name, "optimizer.%dof%d.safetensors%n", &i, &n, &end) == 2 && end && !name[end];
}

// Returns how many elements of a slot a file has.
static size_t checkpoint_part_elements_(const CheckpointSlices_* s, const SafeTensors* file) {
    size_t count = 0;
    for (size_t i = 0; i < s->count; i++) {
        count += s->slices[i].file == file ? s->slices[i].end - s->slices[i].begin : 0;
    }
    return count;
}

// Ends the program if a file lacks the elements of a slot that its ranges promise. If they promise
// none, it needs no tensor.
static void checkpoint_check_part_(const CheckpointParts* parts, const SafeTensors* file, int slot) {
    const StateSlot* s = &parts->own.state.slots[slot];
    const size_t count = checkpoint_part_elements_(&parts->slots[slot], file);
    if (count == 0) {
        return;
    }
    const SafeTensorsView* view = safetensors_require(file, s->name, 1, &count);
    CHECK(view->dtype == checkpoint_dtype_(s), "%s: tensor %s is %s, wanted %s", file->path, s->name,
          safetensors_dtype_name(view->dtype), safetensors_dtype_name(checkpoint_dtype_(s)));
}

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

// Returns the index of the first slice that ends after `begin`.
static size_t checkpoint_find_slice_(const CheckpointSlices_* s, size_t begin) {
    size_t i = 0, step = s->count;
    for (; step > 0; step /= 2) {
        while (i + step <= s->count && s->slices[i + step - 1].end <= begin) {
            i += step;
        }
    }
    return i;
}

// Reads the elements begin ... end-1 of a slot from the slices that have them.
static void checkpoint_read_elements_(const CheckpointParts* parts, int slot, size_t begin, size_t end,
                                      char* out) {
    const StateSlot* s = &parts->own.state.slots[slot];
    const CheckpointSlices_* slices = &parts->slots[slot];
    for (size_t i = checkpoint_find_slice_(slices, begin); i < slices->count && slices->slices[i].begin < end;
         i++) {
        const CheckpointSlice_* slice = &slices->slices[i];
        const size_t from = begin > slice->begin ? begin : slice->begin,
                     to = end < slice->end ? end : slice->end, at = slice->at + (from - slice->begin);
        if (from < to) {
            const SafeTensorsView* view = safetensors_find(slice->file, s->name);
            char* values = out + (from - begin) * s->element_bytes;
            memcpy(values, view->data + at * s->element_bytes, (to - from) * s->element_bytes);
            safetensors_release(view, at, to - from);
            checkpoint_check_state_(slice->file->path, s, values, at, to - from);
        }
    }
}

// Sorts the slices. Ends the program unless they fill the space.
static void checkpoint_check_slices_(CheckpointParts* parts, const char* directory) {
    size_t at = 0;
    CheckpointSlices_* s = &parts->space;
    safetensors_sort(s->slices, s->count, sizeof(CheckpointSlice_), checkpoint_by_begin_);
    for (size_t i = 0; i < s->count; i++) {
        CHECK(s->slices[i].begin == at,
              "%s: elements from %zu on, wanted those from %zu: the parts do not fit",
              s->slices[i].file->path, s->slices[i].begin, at);
        at = s->slices[i].end;
    }
    const size_t total = checkpoint_total_(&parts->numbers);
    CHECK(at == total, "%s: optimizer state of %zu elements, wanted %zu", directory, at, total);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        safetensors_sort(parts->slots[slot].slices, parts->slots[slot].count, sizeof(CheckpointSlice_),
                         checkpoint_by_begin_);
    }
}

// Returns true if a slot is read: not a new average.
static int checkpoint_reads_slot_(const CheckpointParts* parts, int slot) {
    return checkpoint_has_slot_(&parts->own.state, slot) && !parts->is_new &&
           (slot != STATE_AVERAGE || parts->has_average);
}

// Opens the files of a checkpoint. Ends the program unless they have all slots.
static void checkpoint_open_files_(CheckpointParts* parts, const SavedState* s, const char* directory,
                                   Optimizer optimizer) {
    char path[PATH_MAX];
    parts->files = (SafeTensors*)check_alloc((size_t)s->num_files + 1, sizeof(SafeTensors), directory);
    for (int i = 0; i < s->num_files; i++) {
        if (checkpoint_is_part_(s->files[i].name)) {
            SafeTensors* file = &parts->files[parts->num_files++];
            file_join(path, directory, s->files[i].name);
            safetensors_open(file, path);
            if (parts->num_files == 1) {
                checkpoint_open_numbers_(parts, file, optimizer);
            }
            checkpoint_add_file_(parts, file);
        }
    }
    CHECK(parts->num_files > 0, "%s: no files of the optimizer's state", directory);
    checkpoint_check_slices_(parts, directory);
    for (size_t i = 0; i < parts->num_files; i++) {
        for (int slot = 0; slot < STATE_SLOTS; slot++) {
            if (checkpoint_reads_slot_(parts, slot)) {
                checkpoint_check_part_(parts, &parts->files[i], slot);
            }
        }
    }
}

// Returns the rows of the parameters that the saved run had frozen in all blocks.
static unsigned checkpoint_frozen_rows_(const SavedState* s, ModelConfig cfg) {
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

int checkpoint_state_fits(const SavedState* s, Optimizer optimizer, const RankPart* of) {
    const char* name = state_option(s, "optimizer");
    return !name ||
           (strcmp(name, optimizer_word(optimizer.name)) == 0 &&
            checkpoint_frozen_rows_(s, of->whole) == of->frozen && checkpoint_same_sides_(s, optimizer) &&
            checkpoint_has_optional_(s, optimizer.name) == optimizer.has_optional);
}

int checkpoint_average_fits(const SavedState* s, Optimizer optimizer, const RankPart* of) {
    Average saved;
    return average_parse(&saved, state_option(s, "average")) && average_is_same(saved, optimizer.average) &&
           checkpoint_state_fits(s, optimizer, of);
}

void checkpoint_parts_open(CheckpointParts* parts, const SavedState* s, const char* directory,
                           Optimizer optimizer, const RankPart* of) {
    memset(parts, 0, sizeof(*parts));
    checkpoint_part_open(&parts->own, optimizer, of);
    parts->is_new = !checkpoint_state_fits(s, optimizer, of);
    parts->has_average = checkpoint_average_fits(s, optimizer, of);
    if (!parts->is_new) {
        checkpoint_open_files_(parts, s, directory, optimizer);
    }
}

// Returns the elements of a slot that this rank keeps for a range: its part of the matrix, if the
// slot is kept whole, else the range.
static ZeroRange checkpoint_kept_range_(const CheckpointPart* part, int slot, const ZeroRange* range) {
    const TensorRow* row = &part->state.rows[range->row];
    ZeroRange kept = *range;
    if (state_slot_is_whole(&part->state, slot, range->row)) {
        kept.logical -= range->before;
        kept.before = 0;
        kept.count = model_rows_of_part(row, part->of.own) * row->cols;
    }
    return kept;
}

// Returns how many of the first elements of a range are neighbors in the files, too, and sets
// their number there.
static size_t checkpoint_find_run_(const CheckpointParts* parts, const ZeroRange* range, size_t* number) {
    const RankPart* of = &parts->own.of;
    const int t = parts->numbers.tensor;
    *number = range->logical;
    if (t == parts->own.space.tensor) {
        return range->count;
    }
    const PartRun own = part_run(&parts->own.state.rows[range->row], of->whole, of->own.part, range->before),
                  file = part_place(&parts->numbers.state.rows[range->row], of->whole, t, own.whole);
    const size_t count = own.count < file.count ? own.count : file.count;
    *number = checkpoint_layer_begin_(&parts->numbers, &parts->own, range) + file.part;
    return count < range->count ? count : range->count;
}

// Reads the elements of a slot that belong to a range.
static void checkpoint_read_range_(const CheckpointParts* parts, int slot, ZeroRange range, char* out) {
    while (range.count > 0) {
        size_t number;
        const size_t run = checkpoint_find_run_(parts, &range, &number),
                     begin = checkpoint_slot_place_(&parts->numbers, slot, number),
                     end = checkpoint_slot_place_(&parts->numbers, slot, number + run);
        checkpoint_read_elements_(parts, slot, begin, end, out);
        out += (end - begin) * parts->own.state.slots[slot].element_bytes;
        range.logical += run;
        range.before += run;
        range.count -= run;
    }
}

// Reads a slot of the whole matrix of a range: each part has all of it.
static void checkpoint_read_matrix_(const CheckpointParts* parts, int slot, const ZeroRange* range,
                                    char* out) {
    const size_t first = checkpoint_layer_begin_(&parts->numbers, &parts->own, range),
                 begin = checkpoint_slot_place_(&parts->numbers, slot, first),
                 end =
                     checkpoint_slot_place_(&parts->numbers, slot, first + parts->numbers.layer[range->row]);
    checkpoint_read_elements_(parts, slot, begin, end, out);
}

void checkpoint_parts_read(const CheckpointParts* parts, int slot, int g, void* group) {
    const OptimizerState* state = &parts->own.state;
    const StateSlot* s = &state->slots[slot];
    memset(group, 0, state_group_elements(s, g) * s->element_bytes);
    for (int i = 0; i < parts->own.num_ranges && checkpoint_reads_slot_(parts, slot); i++) {
        const ZeroRange range = checkpoint_kept_range_(&parts->own, slot, &parts->own.ranges[i]);
        if (range.group == g && state_slot_has(state, slot, range.row) && state_group_elements(s, g) > 0) {
            const size_t at = state_begin(state, slot, &range) - state_group_begin(s, g);
            char* out = (char*)group + at * s->element_bytes;
            if (checkpoint_is_of_elements_(s->shape)) {
                checkpoint_read_range_(parts, slot, range, out);
            } else {
                checkpoint_read_matrix_(parts, slot, &range, out);
            }
        }
    }
}

void checkpoint_parts_close(CheckpointParts* parts) {
    for (size_t i = 0; i < parts->num_files; i++) {
        safetensors_close(&parts->files[i]);
    }
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        free(parts->slots[slot].slices);
    }
    free(parts->space.slices);
    free(parts->files);
    checkpoint_part_close(&parts->own);
}

#endif // OPTIMIZER_PARTS_IMPLEMENTATION

#endif
