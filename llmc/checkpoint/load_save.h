/*
load_save.h -- moves a model between memory and files.

The files are its initial weights (initial_weights.h), the optimizer's state in a checkpoint
(optimizer_parts.h), and exports (export.h). They hold the whole model, whatever part of it a rank
has (model_files.h).
*/
#ifndef LLMC_LOAD_SAVE_H
#define LLMC_LOAD_SAVE_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/checkpoint/model_files.h"
#include "llmc/checkpoint/more_tokens.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/formats/hf_adapter.h"
#include "llmc/formats/hf_model.h"
#include "llmc/formats/tensor_types.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_tokens.h"

#ifdef __cplusplus
extern "C" {
#endif

// Weights to set: of the model in `path`, NULL: random ones, from the seed; `which`: the last ones
// or their average. `more`: vocabulary rows that the files do not have, or NULL. `merged`: the
// directory of an adapter that is added to the matrices, or NULL.
typedef struct {
    const char* path;
    HfWeights which;
    uint64_t seed;
    const MoreTokens* more;
    const char* merged;
} LoadFrom;

// Sets the weights, and *checksum, unless NULL, to a checksum of the whole model's weights in fp32,
// whatever part this rank has.
void load_model(const ModelFiles* m, LoadFrom from, uint64_t* checksum);

// Returns the bytes that loading needs temporarily, unless the weights are in place: one group in
// fp32.
size_t load_bytes(const MapOf* of);

// Sets the weights and the optimizer's state from the checkpoint in the directory `path`. `saved`
// is its state.
void load_checkpoint(const ModelFiles* m, const char* path, const SavedState* saved);

// Writes the files of --export-llmc and --export-gguf, if any. Collective; rank 0 writes.
void export_model(const ModelFiles* m, const Options* options, const RunData* data);

#ifdef __cplusplus
}
#endif

#ifdef LOAD_SAVE_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/checkpoint/export.h"
#include "llmc/checkpoint/initial_weights.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/ops/checksum.h"

size_t load_bytes(const MapOf* of) {
    const WholeGroups whole = whole_groups(of, sizeof(float));
    return whole_groups_largest(&whole);
}

// Returns memory for any whole group; NULL: groups are in place.
static void* load_room_(const ModelFiles* m) {
    return model_files_in_place(m) ? NULL : check_alloc(load_bytes(&m->map->of), 1, "a group of parameters");
}

// Reads this rank's shards of a whole group, and what is never trained: a GPU has that apart.
static void load_shards_(const ModelFiles* m, FirstWeights* weights, const TensorRow* rows, int g,
                         float* group) {
    const Map* map = m->map;
    const MapBuckets buckets = map_buckets(map, g == 0 ? -1 : model_group_layer(map->cfg, g));
    for (int b = buckets.first; b < buckets.end; b++) {
        const MapSpan owned = map->buckets[b].in[MAP_OWNED];
        const size_t begin = map->buckets[b].begin + owned.from;
        if (owned.count > 0) {
            weights_read_part(weights, rows, g, begin, begin + owned.count, group);
        }
        const Shard* first = map->shards + map->buckets[b].first;
        for (const Shard* s = first; s < first + map->buckets[b].count; s++) {
            const size_t at = map->buckets[b].begin + s->offset;
            if (map->rows[s->tensor].kind == KIND_FIXED) {
                weights_read_part(weights, rows, g, at, at + s->piece.count, group);
            }
        }
    }
}

// Reads whole group g. Reads only this rank's shards of it, unless the group is in place, the rank
// has a part of the model, or something is added.
static void load_group_(const ModelFiles* m, FirstWeights* weights, const MoreTokens* more,
                        const HfAdapter* merged, const WholeGroups* whole, int g, float* group) {
    const int in_place = model_files_in_place(m);
    if (!in_place) { // including the gaps between tensors
        memset(group, 0, whole_group_bytes(whole, g));
    }
    if (in_place || more || merged || !map_is_plain(&m->map->of)) {
        weights_read(weights, whole->rows, g, group);
    } else {
        load_shards_(m, weights, whole->rows, g, group);
    }
    if (more) {
        more_tokens_set(more, whole->rows, g, group);
    }
    if (merged) {
        hf_adapter_merge(merged, whole->rows, g, group);
    }
}

// Returns a group's contribution to the checksum of the weights (checksum.h). Its words are the
// elements, numbered by tensor, so it does not depend on where a tensor lies in memory.
static uint64_t load_checksum_(const TensorRow* rows, ModelConfig cfg, int g, const float* group) {
    uint64_t sum = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const uint32_t* words = (const uint32_t*)tensor_in_group(&rows[i], group);
        const size_t count = tensor_is_in_group(&rows[i], g)
                                 ? model_rows_in_files(&rows[i], cfg) * rows[i].cols
                                 : 0,
                     first = (size_t)(g * MODEL_PARAMETER_ROWS + i) << 40;
#pragma omp parallel for schedule(static) reduction(+ : sum)
        for (size_t e = 0; e < count; e++) {
            sum += checksum_word(words[e], first + e);
        }
    }
    return sum;
}

static void load_weights_(const ModelFiles* m, LoadFrom from, uint64_t* checksum) {
    const ModelConfig cfg = m->map->of.whole;
    FirstWeights weights;
    HfAdapter adapter, *merged = from.merged ? &adapter : NULL;
    PartGroups parts;
    void* room = load_room_(m);
    part_groups_open_to_set(&parts, m);
    weights_open(&weights, from.more ? more_tokens_config(from.more, cfg) : cfg, from.path, from.which,
                 from.seed, m->state->optimizer.mup);
    if (merged) {
        hf_adapter_open(merged, from.merged, cfg);
    }
    for (int g = 0; g < model_groups(cfg); g++) {
        if (model_files_have(cfg, m->map->cfg.part, g)) {
            void* group = room ? room : m->access.get_group(m->model, g, NULL);
            load_group_(m, &weights, from.more, merged, &parts.whole, g, (float*)group);
            if (checksum) {
                *checksum += load_checksum_(parts.whole.rows, cfg, g, (const float*)group);
            }
            part_groups_set(&parts, g, group);
        }
    }
    part_groups_set_last(&parts);
    if (merged) {
        hf_adapter_close(merged);
    }
    weights_close(&weights);
    part_groups_close(&parts);
    free(room);
}

void load_model(const ModelFiles* m, LoadFrom from, uint64_t* checksum) {
    if (checksum) {
        *checksum = 0;
    }
    load_weights_(m, from, checksum);
    m->access.loaded(m->model, NULL);
}

// Sets a slot of this rank's state to zeros.
static void load_zeros_(const ModelFiles* m, int slot) {
    static const char zeros[1 << 16];
    const size_t bytes = m->state->slots[slot].bytes;
    for (size_t at = 0; at < bytes; at += sizeof(zeros)) {
        const size_t some = bytes - at < sizeof(zeros) ? bytes - at : sizeof(zeros);
        if (m->in_place) {
            memset(m->access.get_state(m->model, slot, at, NULL, some), 0, some);
        } else {
            m->access.set_state(m->model, slot, at, zeros, some);
        }
    }
}

// Reads one slot of state, for this rank's elements of a tensor.
static void load_entry_(const ModelFiles* m, const CheckpointParts* parts, const StateEntry* own, int slot) {
    const size_t element = state_slot_of(slot).element_bytes, at = own->at[slot] * element,
                 bytes = checkpoint_parts_count(parts, own, slot) * element;
    if (bytes > 0) {
        void* values = m->in_place ? m->access.get_state(m->model, slot, at, NULL, bytes)
                                   : check_alloc(bytes, 1, "the optimizer's state of a tensor");
        checkpoint_parts_read(parts, own, slot, values);
        m->access.set_state(m->model, slot, at, values, bytes);
        free(m->in_place ? NULL : values);
    }
}

static void load_state_(const ModelFiles* m, const char* path, const SavedState* saved) {
    CheckpointParts parts;
    checkpoint_parts_open(&parts, saved, path, m->state, m->map);
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        load_zeros_(m, slot);
        for (size_t i = 0; i < parts.own.count; i++) {
            load_entry_(m, &parts, &parts.own.all[i], slot);
        }
    }
    checkpoint_parts_close(&parts);
}

void load_checkpoint(const ModelFiles* m, const char* path, const SavedState* saved) {
    load_weights_(m, (LoadFrom){.path = path, .which = HF_LAST}, NULL);
    load_state_(m, path, saved);
    m->access.loaded(m->model, path);
}

void export_model(const ModelFiles* m, const Options* options, const RunData* data) {
    const int is_writer = m->comm->rank == 0;
    const WholeGroups whole = whole_groups(&m->map->of, sizeof(float));
    const ModelConfig cfg = m->map->of.whole;
    ModelExport files;
    PartGroups parts;
    if (!options_exports(options)) {
        return;
    }
    void* room = is_writer ? load_room_(m) : NULL;
    if (is_writer) {
        export_open(&files, cfg, options, data);
    }
    part_groups_open_to_get(&parts, m);
    for (int g = 0; g < model_groups(cfg); g++) {
        void* group = part_groups_get(&parts, g, 0, room);
        if (is_writer) {
            safetensors_widen(group, m->dtype, whole_group_bytes(&whole, g) / sizeof(float));
            export_group(&files, whole.rows, g, group);
        }
    }
    part_groups_close(&parts);
    if (is_writer) {
        export_close(&files);
    }
    free(room);
}

#endif // LOAD_SAVE_IMPLEMENTATION

#endif
