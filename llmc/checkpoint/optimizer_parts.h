/*
optimizer_parts.h -- the optimizer's state in a checkpoint: optimizer.<i>of<n>.safetensors.

All elements of the parameters are numbered in the order of their table, without padding: a space of
`total` elements. Each rank writes the elements that it updates to its own file; the metadata
`ranges`, for example "0-98304,196608-200000", says which they are. Each slot of the state
(optimizer.h) is a tensor with the values of these elements, in their order. Means of rows and
columns belong to the last element of their matrix. The reader accepts any files that together fill
the space, so a run can be resumed with any number of ranks.

If the run changes its optimizer, the saved state is not read: all state starts as zeros.
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
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// The part of the parameters that a rank updates.
typedef struct {
    OptimizerState state; // layout of its state in memory
    ModelConfig cfg;
    ZeroRange* ranges; // its elements, in the order of files
    int num_ranges;
    size_t total; // number of elements in the space
} CheckpointPart;

void checkpoint_part_open(CheckpointPart* part, Optimizer optimizer, ModelConfig cfg, const ZeroPlan* zero);
void checkpoint_part_close(CheckpointPart* part);

// ---- writing ----

// Returns the number of ranks that write a part: all, or only the first if all have the same state.
static inline int checkpoint_part_writers(const ZeroPlan* zero) { return zero->stage == 0 ? 1 : zero->size; }

// Returns the bytes that this rank writes, in memory laid out by optimizer_state_open: the saved
// slots.
size_t checkpoint_part_bytes(Optimizer optimizer, ModelConfig cfg, const ZeroPlan* zero);

void checkpoint_part_name(char name[64], int rank, int writers);

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
    int is_new;                                  // true: no state is read, all starts as zeros
    CheckpointPart own;                          // part that this rank needs
} CheckpointParts;

// Returns true if a saved state of this model is of this optimizer and has the same slots; else all
// state starts as zeros.
int checkpoint_state_fits(const SavedState* s, Optimizer optimizer, ModelConfig cfg);

// Opens the files that `s` lists. Ends the program unless they fill the space.
void checkpoint_parts_open(CheckpointParts* parts, const SavedState* s, const char* directory,
                           Optimizer optimizer, ModelConfig cfg, const ZeroPlan* zero);

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

void checkpoint_part_open(CheckpointPart* part, Optimizer optimizer, ModelConfig cfg, const ZeroPlan* zero) {
    part->cfg = cfg;
    optimizer_state_open(&part->state, optimizer, zero, cfg);
    part->ranges =
        (ZeroRange*)check_alloc((size_t)zero_max_ranges(cfg), sizeof(ZeroRange), "ranges of a checkpoint");
    part->num_ranges = zero_ranges(zero, part->state.rows, cfg, part->ranges);
    part->total = zero_logical_elements(part->state.rows, cfg);
}

void checkpoint_part_close(CheckpointPart* part) { free(part->ranges); }

// Returns true if checkpoints have a slot of this state.
static int checkpoint_has_slot_(const OptimizerState* state, int slot) {
    return state->slots[slot].name && state->slots[slot].bytes > 0;
}

// Returns how many elements of a slot belong to the elements before `element` of the space.
static size_t checkpoint_slot_place_(const CheckpointPart* part, int slot, size_t element) {
    size_t place = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &part->state.rows[i];
        const size_t layer = model_rows_in_files(row, part->cfg) * row->cols;
        const size_t all = (size_t)row->layers * layer, before = element < all ? element : all;
        if (layer == 0) {
            continue; // absent
        }
        place += before / layer * state_slot_elements(&part->state, slot, i, layer) +
                 state_slot_elements(&part->state, slot, i, before % layer);
        element -= before;
    }
    return place;
}

// ---- writing ----

size_t checkpoint_part_bytes(Optimizer optimizer, ModelConfig cfg, const ZeroPlan* zero) {
    OptimizerState state;
    optimizer_state_open(&state, optimizer, zero, cfg);
    return zero->rank < checkpoint_part_writers(zero) ? state.saved_bytes : 0;
}

void checkpoint_part_name(char name[64], int rank, int writers) {
    snprintf(name, 64, "optimizer.%dof%d.safetensors", rank + 1, writers);
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
    return checkpoint_slot_place_(part, slot, range->logical + range->count) -
           checkpoint_slot_place_(part, slot, range->logical);
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

uint64_t checkpoint_part_write(const CheckpointPart* part, const char* path, const void* optimizer) {
    char number[32], *ranges = checkpoint_ranges_text_(part);
    SafeTensorsWriter writer;
    snprintf(number, sizeof(number), "%zu", part->total);
    safetensors_writer_open(&writer, path);
    safetensors_writer_metadata(&writer, "ranges", ranges);
    safetensors_writer_metadata(&writer, "total", number);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        if (checkpoint_has_slot_(&part->state, slot)) {
            checkpoint_declare_slot_(&writer, part, slot);
        }
    }
    safetensors_writer_begin(&writer);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        if (checkpoint_has_slot_(&part->state, slot)) {
            checkpoint_write_slot_(&writer, part, slot, optimizer);
        }
    }
    free(ranges);
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
    CHECK(begin <= end && end <= parts->own.total, "%s: elements %zu to %zu of %zu", file->path, begin, end,
          parts->own.total);
    checkpoint_put_slice_(&parts->space, slice);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        slice.begin = checkpoint_slot_place_(&parts->own, slot, begin);
        slice.end = checkpoint_slot_place_(&parts->own, slot, end);
        slice.at = checkpoint_next_at_(&parts->slots[slot], file);
        checkpoint_put_slice_(&parts->slots[slot], slice);
    }
}

// Adds the ranges in the metadata of a file: `ranges`, or in older files one from `begin` to `end`.
static void checkpoint_add_file_(CheckpointParts* parts, const SafeTensors* file) {
    const size_t total = checkpoint_metadata_(file, "total");
    CHECK(total == parts->own.total, "%s: a part of %zu elements, wanted %zu for this model", file->path,
          total, parts->own.total);
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
    CHECK(at == parts->own.total, "%s: optimizer state of %zu elements, wanted %zu", directory, at,
          parts->own.total);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        safetensors_sort(parts->slots[slot].slices, parts->slots[slot].count, sizeof(CheckpointSlice_),
                         checkpoint_by_begin_);
    }
}

// Opens the files of a checkpoint. Ends the program unless they have all slots.
static void checkpoint_open_files_(CheckpointParts* parts, const SavedState* s, const char* directory) {
    char path[PATH_MAX];
    parts->files = (SafeTensors*)check_alloc((size_t)s->num_files + 1, sizeof(SafeTensors), directory);
    for (int i = 0; i < s->num_files; i++) {
        if (checkpoint_is_part_(s->files[i].name)) {
            SafeTensors* file = &parts->files[parts->num_files++];
            file_join(path, directory, s->files[i].name);
            safetensors_open(file, path);
            checkpoint_add_file_(parts, file);
        }
    }
    checkpoint_check_slices_(parts, directory);
    for (size_t i = 0; i < parts->num_files; i++) {
        for (int slot = 0; slot < STATE_SLOTS; slot++) {
            if (checkpoint_has_slot_(&parts->own.state, slot)) {
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

int checkpoint_state_fits(const SavedState* s, Optimizer optimizer, ModelConfig cfg) {
    const char* name = state_option(s, "optimizer");
    return !name ||
           (strcmp(name, optimizer_word(optimizer.name)) == 0 &&
            checkpoint_frozen_rows_(s, cfg) == optimizer.frozen && checkpoint_same_sides_(s, optimizer) &&
            checkpoint_has_optional_(s, optimizer.name) == optimizer.has_optional);
}

void checkpoint_parts_open(CheckpointParts* parts, const SavedState* s, const char* directory,
                           Optimizer optimizer, ModelConfig cfg, const ZeroPlan* zero) {
    memset(parts, 0, sizeof(*parts));
    checkpoint_part_open(&parts->own, optimizer, cfg, zero);
    parts->is_new = !checkpoint_state_fits(s, optimizer, cfg);
    if (!parts->is_new) {
        checkpoint_open_files_(parts, s, directory);
    }
}

// Returns the elements of a slot that this rank keeps for a range: the whole matrix, if the slot is
// kept whole, else the range.
static ZeroRange checkpoint_kept_range_(const CheckpointPart* part, int slot, const ZeroRange* range) {
    const TensorRow* row = &part->state.rows[range->row];
    ZeroRange kept = *range;
    if (state_slot_is_whole(&part->state, slot, range->row)) {
        kept.logical -= range->before;
        kept.count = model_rows_in_files(row, part->cfg) * row->cols;
    }
    return kept;
}

void checkpoint_parts_read(const CheckpointParts* parts, int slot, int g, void* group) {
    const CheckpointPart* own = &parts->own;
    const StateSlot* s = &own->state.slots[slot];
    memset(group, 0, state_group_elements(s, g) * s->element_bytes);
    for (int i = 0; i < own->num_ranges && !parts->is_new && s->name; i++) {
        const ZeroRange range = checkpoint_kept_range_(own, slot, &own->ranges[i]);
        if (range.group == g && state_slot_has(&own->state, slot, range.row) &&
            state_group_elements(s, g) > 0) {
            const size_t begin = checkpoint_slot_place_(own, slot, range.logical);
            checkpoint_read_elements_(parts, slot, begin,
                                      begin + checkpoint_range_elements_(own, slot, &range),
                                      (char*)group + s->begin[range.row] * s->element_bytes);
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
