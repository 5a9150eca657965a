/*
checkpoint_parts.h -- the optimizer's state in a checkpoint: optimizer.<i>of<n>.safetensors.

Each row of the state (gpt2.h) is a tensor in one space: the elements of the parameters in the order of their table,
without padding, `total` of them. Each process writes what it updates into a file of its own; the metadata `ranges`,
"0-98304,196608-200000" for example, says which elements it has. The reader takes any files that fill the space, so a
run can be continued by any number of processes.

defines: CheckpointPart, checkpoint_part_open, checkpoint_part_close, checkpoint_part_writers, checkpoint_part_bytes,
         checkpoint_part_name, checkpoint_part_write, CheckpointParts, checkpoint_parts_open, checkpoint_parts_read,
         checkpoint_parts_close
*/
#ifndef LLMC_CHECKPOINT_PARTS_H
#define LLMC_CHECKPOINT_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/formats/safetensors.h"
#include "llmc/run/state.h"
#include "llmc/gpt2.h"
#include "llmc/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// What a process updates.
typedef struct {
    StateRow states[GPT2_STATE_ROWS]; // where it lies in memory
    ZeroRange* ranges;                // which elements it is, in the order of files
    int num_ranges;
    size_t total; // elements of the space
} CheckpointPart;

void checkpoint_part_open(CheckpointPart* part, GPT2Config cfg, const ZeroPlan* zero);
void checkpoint_part_close(CheckpointPart* part);

// ---- writing ----

// Processes that write a part: all, or the first one if all have the same.
static inline int checkpoint_part_writers(const ZeroPlan* zero) { return zero->stage == 0 ? 1 : zero->size; }

// Bytes of what this process writes, in memory laid out by zero_state_rows.
size_t checkpoint_part_bytes(GPT2Config cfg, const ZeroPlan* zero);

void checkpoint_part_name(char name[64], int rank, int writers);

// Writes the part of this process, whole or not at all. Returns the checksum.
uint64_t checkpoint_part_write(const CheckpointPart* part, const char* path, const void* optimizer);

// ---- reading ----

// Elements begin ... end-1 of the optimizer's space, in a file from its element `at` on.
typedef struct {
    const SafeTensors* file;
    size_t begin, end, at;
} CheckpointSlice_;

// The files of the optimizer's state, and what they have, in the order of the space.
typedef struct {
    SafeTensors* files;
    CheckpointSlice_* slices;
    size_t num_files, num_slices;
    CheckpointPart own; // what this process wants
    ZeroPlan zero;
} CheckpointParts;

// Opens the files that `s` lists; ends the program unless they fill the space.
void checkpoint_parts_open(CheckpointParts* parts, const SavedState* s, const char* directory, GPT2Config cfg,
                           const ZeroPlan* zero);

// Sets what this process updates of group g (zero_piece), of a row of the state.
void checkpoint_parts_read(const CheckpointParts* parts, int state, int g, float* piece);

void checkpoint_parts_close(CheckpointParts* parts);

#ifdef __cplusplus
}
#endif

#ifdef CHECKPOINT_PARTS_IMPLEMENTATION

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

void checkpoint_part_open(CheckpointPart* part, GPT2Config cfg, const ZeroPlan* zero) {
    TensorRow rows[GPT2_PARAMETER_ROWS];
    gpt2_sharded_rows_of(rows, cfg, sizeof(float), zero->size);
    zero_state_rows(part->states, zero, cfg);
    part->ranges =
        (ZeroRange*)check_alloc((size_t)zero_max_ranges(cfg), sizeof(ZeroRange), "ranges of a checkpoint");
    part->num_ranges = zero_ranges(zero, rows, cfg, part->ranges);
    part->total = zero_logical_elements(rows, cfg);
}

void checkpoint_part_close(CheckpointPart* part) { free(part->ranges); }

// ---- writing ----

size_t checkpoint_part_bytes(GPT2Config cfg, const ZeroPlan* zero) {
    StateRow states[GPT2_STATE_ROWS];
    return zero->rank < checkpoint_part_writers(zero) ? zero_state_rows(states, zero, cfg) : 0;
}

void checkpoint_part_name(char name[64], int rank, int writers) {
    snprintf(name, 64, "optimizer.%dof%d.safetensors", rank + 1, writers);
}

// The ranges in words, neighbors as one; the caller frees them.
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

static size_t checkpoint_own_elements_(const CheckpointPart* part) {
    size_t total = 0;
    for (int i = 0; i < part->num_ranges; i++) {
        total += part->ranges[i].count;
    }
    return total;
}

uint64_t checkpoint_part_write(const CheckpointPart* part, const char* path, const void* optimizer) {
    const size_t elements = checkpoint_own_elements_(part);
    char number[32], *ranges = checkpoint_ranges_text_(part);
    SafeTensorsWriter writer;
    snprintf(number, sizeof(number), "%zu", part->total);
    safetensors_writer_open(&writer, path);
    safetensors_writer_metadata(&writer, "ranges", ranges);
    safetensors_writer_metadata(&writer, "total", number);
    for (int s = 0; s < GPT2_STATE_ROWS; s++) {
        safetensors_writer_declare(&writer, part->states[s].name, SAFETENSORS_F32, 1, &elements);
    }
    safetensors_writer_begin(&writer);
    for (int s = 0; s < GPT2_STATE_ROWS; s++) {
        const float* state = (const float*)((const char*)optimizer + part->states[s].offset_bytes);
        for (int i = 0; i < part->num_ranges; i++) {
            safetensors_write_raw(&writer, state + part->ranges[i].owned,
                                  part->ranges[i].count * sizeof(float));
        }
    }
    free(ranges);
    return safetensors_writer_commit(&writer);
}

// ---- reading ----

// Reads a number at *text and moves behind it.
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

static void checkpoint_add_slice_(CheckpointParts* parts, CheckpointSlice_ slice) {
    CHECK(slice.begin <= slice.end && slice.end <= parts->own.total, "%s: elements %zu to %zu of %zu",
          slice.file->path, slice.begin, slice.end, parts->own.total);
    parts->slices = (CheckpointSlice_*)check_grow(parts->slices, parts->num_slices, sizeof(CheckpointSlice_),
                                                  slice.file->path);
    parts->slices[parts->num_slices++] = slice;
}

// Adds what a file says it has: `ranges`, or one range from `begin` to `end`, as older programs wrote it.
static void checkpoint_add_file_(CheckpointParts* parts, const SafeTensors* file) {
    CheckpointSlice_ slice = {file, 0, 0, 0};
    const size_t total = checkpoint_metadata_(file, "total");
    CHECK(total == parts->own.total, "%s: a part of %zu elements, wanted %zu for this model", file->path,
          total, parts->own.total);
    const char* text = safetensors_metadata(file, "ranges");
    if (!text) {
        slice.begin = checkpoint_metadata_(file, "begin");
        slice.end = checkpoint_metadata_(file, "end");
        checkpoint_add_slice_(parts, slice);
        return;
    }
    while (*text) {
        slice.begin = checkpoint_number_(file, "ranges", &text);
        CHECK(*text == '-', "%s: ranges: \"%.40s\", wanted -", file->path, text);
        text++;
        slice.end = checkpoint_number_(file, "ranges", &text);
        CHECK(!*text || (*text == ',' && text[1]), "%s: ranges: \"%.40s\", wanted a comma", file->path, text);
        text += *text == ',';
        checkpoint_add_slice_(parts, slice);
        slice.at += slice.end - slice.begin;
    }
}

static int checkpoint_by_begin_(const void* a, const void* b) {
    const CheckpointSlice_ *x = (const CheckpointSlice_*)a, *y = (const CheckpointSlice_*)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : (x->end > y->end) - (x->end < y->end);
}

// Whether a file holds optimizer state: optimizer.<i>of<n>.safetensors.
static int checkpoint_is_part_(const char* name) {
    int i, n, end = 0;
    return sscanf(name, "optimizer.%dof%d.safetensors%n", &i, &n, &end) == 2 && end && !name[end];
}

// The elements that a file has.
static size_t checkpoint_part_elements_(const CheckpointParts* parts, const SafeTensors* file) {
    size_t count = 0;
    for (size_t i = 0; i < parts->num_slices; i++) {
        count += parts->slices[i].file == file ? parts->slices[i].end - parts->slices[i].begin : 0;
    }
    return count;
}

// Ends the program if a file has not what it says.
static void checkpoint_check_part_(const CheckpointParts* parts, const SafeTensors* file,
                                   const StateRow* state) {
    const size_t count = checkpoint_part_elements_(parts, file);
    const SafeTensorsView* view = safetensors_require(file, state->name, 1, &count);
    CHECK(view->dtype == SAFETENSORS_F32, "%s: tensor %s is %s, wanted F32", file->path, state->name,
          safetensors_dtype_name(view->dtype));
}

// Ends the program if no optimizer can have made these values: NaN, or below the least of the state.
static void checkpoint_check_state_(const char* path, const StateRow* state, const float* values,
                                    size_t first, size_t count) {
    char wanted[64] = "a number";
    if (isfinite(state->least)) {
        snprintf(wanted, sizeof(wanted), "%g or more", (double)state->least);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(values[i] >= state->least, "%s: element %zu of %s is %f, wanted %s", path, first + i,
              state->name, (double)values[i], wanted);
    }
}

// Sets the elements of a range from the slices that have them.
static void checkpoint_read_range_(const CheckpointParts* parts, const StateRow* state,
                                   const ZeroRange* range, float* out) {
    const size_t begin = range->logical, end = begin + range->count;
    size_t i = 0;
    for (size_t step = parts->num_slices; step > 0;
         step /= 2) { // the first slice that ends after the range begins
        while (i + step <= parts->num_slices && parts->slices[i + step - 1].end <= begin) {
            i += step;
        }
    }
    for (; i < parts->num_slices && parts->slices[i].begin < end; i++) {
        const CheckpointSlice_* slice = &parts->slices[i];
        const size_t from = begin > slice->begin ? begin : slice->begin,
                     to = end < slice->end ? end : slice->end, at = slice->at + (from - slice->begin);
        if (from < to) {
            const SafeTensorsView* view = safetensors_find(slice->file, state->name);
            safetensors_read_f32_part(view, at, to - from, out + (from - begin));
            safetensors_release(view, at, to - from);
            checkpoint_check_state_(slice->file->path, state, out + (from - begin), at, to - from);
        }
    }
}

// The slices fill the space.
static void checkpoint_check_slices_(CheckpointParts* parts, const char* directory) {
    size_t at = 0;
    qsort(parts->slices, parts->num_slices, sizeof(CheckpointSlice_), checkpoint_by_begin_);
    for (size_t i = 0; i < parts->num_slices; i++) {
        CHECK(parts->slices[i].begin == at,
              "%s: elements from %zu on, wanted those from %zu: the parts do not fit",
              parts->slices[i].file->path, parts->slices[i].begin, at);
        at = parts->slices[i].end;
    }
    CHECK(at == parts->own.total, "%s: optimizer state of %zu elements, wanted %zu", directory, at,
          parts->own.total);
}

void checkpoint_parts_open(CheckpointParts* parts, const SavedState* s, const char* directory, GPT2Config cfg,
                           const ZeroPlan* zero) {
    char path[PATH_MAX];
    memset(parts, 0, sizeof(*parts));
    checkpoint_part_open(&parts->own, cfg, zero);
    parts->zero = *zero;
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
        for (int k = 0; k < GPT2_STATE_ROWS; k++) {
            checkpoint_check_part_(parts, &parts->files[i], &parts->own.states[k]);
        }
    }
}

void checkpoint_parts_read(const CheckpointParts* parts, int state, int g, float* piece) {
    const size_t begin = zero_piece(&parts->zero, g).owned;
    for (int i = 0; i < parts->own.num_ranges; i++) {
        const ZeroRange* range = &parts->own.ranges[i];
        if (range->group == g) {
            checkpoint_read_range_(parts, &parts->own.states[state], range, piece + (range->owned - begin));
        }
    }
}

void checkpoint_parts_close(CheckpointParts* parts) {
    for (size_t i = 0; i < parts->num_files; i++) {
        safetensors_close(&parts->files[i]);
    }
    free(parts->slices);
    free(parts->files);
    checkpoint_part_close(&parts->own);
}

#endif // CHECKPOINT_PARTS_IMPLEMENTATION

#endif
