/*
model_files.h -- a model as its files need it: whole groups of parameters (model.h) on the host, one
at a time.

The trainer has functions that get and set the groups of its model. On the host, a group of a rank's
part is alone in memory: its buckets (map.h), one after the other. If the model's own memory has
this layout, it is read and written in place; else memory for one group is allocated.

A rank that has only a part of the model takes its shards from whole groups, and whole groups are
put together again in the rank that writes them. Each bucket that has something of a group moves
there, and the map of the rank that it comes from says where its elements go:

    data group                     parts of a bucket, gathered (get_group)
    tensor group, expert group     from ranks with other parts, to the one with the writer's place
    pipeline                       from there to the writer

If ranks divide experts, group 0 of a part has the dense tensors of all its layers, so that group
stays in memory until all whole groups are done.
*/
#ifndef LLMC_MODEL_FILES_H
#define LLMC_MODEL_FILES_H

#include <stddef.h>

#include "llmc/comm/comm.h"
#include "llmc/comm/group.h"
#include "llmc/formats/tensor_types.h"
#include "llmc/model/map.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

// Functions of a trainer that get and set the tensors of its model, between updates. All except
// `move` are collective in the data group.
typedef struct {
    // Copies the weights of group g as they are saved: master weights, if any. `group` is NULL in
    // ranks that do not want them, and for tensors in place (ModelFiles): then it returns their
    // address.
    void* (*get_group)(Model* model, int g, void* group);
    // Sets this rank's part of group g; reads only that part of `group`, which is fp32, and what is
    // never trained.
    void (*set_group)(Model* model, int g, const float* group);
    // Get and set `bytes` of this rank's array of a slot of the optimizer's state, from byte `at`.
    void* (*get_state)(Model* model, int slot, size_t at, void* state, size_t bytes);
    void (*set_state)(Model* model, int slot, size_t at, const void* state, size_t bytes);
    // Is called after all groups are set. `checkpoint` is the directory they came from; NULL: none.
    void (*loaded)(Model* model, const char* checkpoint);
    // Gathers the trained part of group g, in fp32: each rank has set the piece that it updates,
    // and gets all others.
    void (*gather)(Model* model, int g, float* group);
    // Sends host memory to a rank of the tensor group, the expert group or the pipeline, or
    // receives it.
    void (*move)(Model* model, GridGroup group, GroupMove move);
    // Return the map, which says what this rank has, and its optimizer's state.
    const Map* (*map)(const Model* model);
    const OptimizerState* (*state)(const Model* model);
} ModelAccess;

// A model, as needed to read and write its files.
typedef struct {
    Model* model;
    ModelAccess access;
    const Map* map;
    const OptimizerState* state;
    SafeTensorsDtype dtype; // type of the weights as they are saved
    int in_place;           // true: weights and state are on the host in the layout of files
    Comm* comm;
    int is_average; // true: weights are got as their average, in fp32
} ModelFiles;

// Returns the type of the elements of whole groups.
static inline SafeTensorsDtype model_files_dtype(const ModelFiles* m) {
    return m->is_average ? SAFETENSORS_F32 : m->dtype;
}

// Returns the same model, with the average of its weights in place of the weights.
static inline ModelFiles model_files_of_average(const ModelFiles* m) {
    ModelFiles files = *m;
    files.in_place = 0;
    files.is_average = 1;
    return files;
}

// True if whole groups are in the model's own memory.
static inline int model_files_in_place(const ModelFiles* m) {
    return m->in_place && map_is_plain(&m->map->of);
}

// True if a part of a model has tensors of a whole group.
int model_files_have(ModelConfig whole, ModelPart which, int g);

// Layout of whole groups on the host. Each has memory of its own; offsets are as if all groups lay
// one after another.
typedef struct {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    size_t once, block; // bytes of group 0, and of each other one
} WholeGroups;

WholeGroups whole_groups(const MapOf* of, size_t element_bytes);

static inline size_t whole_group_bytes(const WholeGroups* w, int g) { return g == 0 ? w->once : w->block; }

// Returns where group g starts among all groups; for g = their number, the end of the last.
static inline size_t whole_group_begin(const WholeGroups* w, int g) {
    return g == 0 ? 0 : w->once + (size_t)(g - 1) * w->block;
}

static inline size_t whole_groups_largest(const WholeGroups* w) {
    return w->once > w->block ? w->once : w->block;
}

// Returns the elements of the largest group of a rank's part.
size_t part_groups_largest(const MapOf* of, int rank);

// Converts the groups of a rank's part from and to whole groups. Does nothing if the model has
// whole groups.
typedef struct {
    const ModelFiles* files;
    MapOf of; // as if each data rank wrote
    WholeGroups whole;
    size_t element_bytes;
    // memory for group 0 of the part, and for one more group; NULL: they are in place
    void *once, *block;
    // addresses of gathered groups: of group 0, and of the group with number `group` (0: none)
    const void *gathered_once, *gathered;
    int has_once, group;
    void* mail; // memory for a bucket of another rank
    size_t mail_bytes;
} PartGroups;

// ---- setting a model, in fp32 ----

void part_groups_open_to_set(PartGroups* p, const ModelFiles* files);

// Sets this rank's part of a whole group, which is fp32. A group in place is already set.
void part_groups_set(PartGroups* p, int g, void* group);

// Sets the tensors that had to wait for all groups.
void part_groups_set_last(PartGroups* p);

// ---- getting a model, in the type of its files; collective ----

void part_groups_open_to_get(PartGroups* p, const ModelFiles* files);

// Puts a whole group together in memory of one rank, `writer`; `group` is NULL in all others, and
// for tensors in place: then it returns their address.
void* part_groups_get(PartGroups* p, int g, int writer, void* group);

void part_groups_close(PartGroups* p);

#ifdef __cplusplus
}
#endif

#ifdef MODEL_FILES_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

int model_files_have(ModelConfig whole, ModelPart which, int g) {
    const int l = model_group_layer(whole, g), first = which.first_layer, end = first + which.layers;
    return which.of_layers == 0 || (g > 0 ? first <= l && l < end : first == 0 || end == which.of_layers);
}

// Returns the layout of a model whose groups are cut into `shards`.
static WholeGroups groups_of_(ModelConfig cfg, size_t element_bytes, int shards, TensorSet frozen) {
    WholeGroups w;
    const size_t all = model_sharded_rows_of(w.rows, cfg, element_bytes, shards, frozen);
    w.once = tensor_group_offset_bytes(w.rows, 1);
    w.block = (all - w.once) / (size_t)(model_groups(cfg) - 1);
    return w;
}

WholeGroups whole_groups(const MapOf* of, size_t element_bytes) {
    // a rank with all of the model has the padding and the frozen parts of its own groups
    const int is_own = map_is_plain(of) && of->trains;
    return groups_of_(of->whole, element_bytes, is_own ? of->data : 1,
                      is_own && of->stage < 3 ? of->freeze.rows : 0);
}

size_t part_groups_largest(const MapOf* of, int rank) {
    const ModelConfig cfg = map_part(of, rank);
    const Freeze freeze = freeze_of_part(&of->freeze, cfg);
    const WholeGroups own = groups_of_(cfg, 1, of->data, of->stage < 3 ? freeze.rows : 0);
    return whole_groups_largest(&own);
}

// ---- groups of the part ----

// Returns the bytes of the largest group from `first` to `end`.
static size_t part_groups_bytes_(const PartGroups* p, int first, int end) {
    size_t most = 0;
    for (int g = first; g < end; g++) {
        const size_t elements = map_group_elements(p->files->map, g);
        most = elements > most ? elements : most;
    }
    return array_bytes(most, p->element_bytes);
}

static int part_is_plain_(const PartGroups* p) { return map_is_plain(&p->files->map->of); }

static void* part_groups_room_(const PartGroups* p, int first, int end) {
    void* room = check_alloc(part_groups_bytes_(p, first, end), 1, "a group of parameters");
    return memset(room, 0, part_groups_bytes_(p, first, end)); // including the gaps between tensors
}

static void part_groups_open_(PartGroups* p, const ModelFiles* files, size_t element_bytes) {
    memset((void*)p, 0, sizeof(*p));
    p->files = files;
    p->of = files->map->of;
    p->of.stage = p->of.stage == 0 ? 1 : p->of.stage;
    p->element_bytes = element_bytes;
    p->whole = whole_groups(&p->of, element_bytes);
    if (!part_is_plain_(p) && !files->in_place) {
        p->once = part_groups_room_(p, 0, 1);
        p->block = part_groups_room_(p, 1, model_groups(p->files->map->cfg));
    }
}

// Returns the whole group of a shard of a part whose first layer is `first_layer`.
static int part_whole_group_(const PartGroups* p, const Shard* s, int first_layer) {
    return tensor_group(&p->whole.rows[s->tensor], s->layer < 0 ? 0 : first_layer + s->layer);
}

typedef enum { PART_FROM_WHOLE_, PART_TO_WHOLE_ } PartDirection_;

// Copies a shard between its bucket and a whole group: takes it from there, or puts it there.
static void part_copy_(const PartGroups* p, PartDirection_ direction, const Shard* s, void* bucket,
                       void* group) {
    const TensorRow* row = &p->whole.rows[s->tensor];
    const size_t bytes = p->element_bytes, all = tensor_layer_elements(row);
    const MapPiece whole = {0, all, 0, all, 0};
    MapMeet meet = {0, 0, 0};
    while (map_meet(&s->piece, &whole, &meet)) {
        char *a = (char*)bucket + (s->offset + meet.in_a) * bytes,
             *b = (char*)tensor_in_group(row, group) + meet.in_b * bytes;
        memcpy(direction == PART_FROM_WHOLE_ ? a : b, direction == PART_FROM_WHOLE_ ? b : a,
               meet.count * bytes);
    }
}

// ---- setting ----

void part_groups_open_to_set(PartGroups* p, const ModelFiles* files) {
    part_groups_open_(p, files, sizeof(float));
}

// Returns where group g of the part goes.
static void* part_groups_memory_(const PartGroups* p, int g) {
    const ModelFiles* m = p->files;
    return m->in_place ? m->access.get_group(m->model, g, NULL) : g == 0 ? p->once : p->block;
}

// Copies the elements of group g of the part from a whole group; returns 1 if it has any.
static int part_groups_take_(PartGroups* p, int g, int whole_g, void* whole) {
    const Map* m = p->files->map;
    const MapBuckets buckets = map_group(m, g);
    void* memory = part_groups_memory_(p, g);
    int any = 0;
    for (int b = buckets.first; b < buckets.end; b++) {
        const Bucket* bucket = &m->buckets[b];
        void* at = (char*)memory + bucket->begin * p->element_bytes;
        for (const Shard* s = m->shards + bucket->first; s < m->shards + bucket->first + bucket->count; s++) {
            if (part_whole_group_(p, s, m->cfg.part.first_layer) == whole_g) {
                part_copy_(p, PART_FROM_WHOLE_, s, at, whole);
                any = 1;
            }
        }
    }
    return any;
}

void part_groups_set(PartGroups* p, int g, void* group) {
    const ModelFiles* m = p->files;
    if (part_is_plain_(p)) {
        m->access.set_group(m->model, g, (const float*)group);
        return;
    }
    for (int own = 0; own < model_groups(m->map->cfg); own++) {
        if (part_groups_take_(p, own, g, group) && own > 0) {
            m->access.set_group(m->model, own, (const float*)part_groups_memory_(p, own));
        }
    }
}

void part_groups_set_last(PartGroups* p) {
    if (!part_is_plain_(p)) {
        p->files->access.set_group(p->files->model, 0, (const float*)part_groups_memory_(p, 0));
    }
}

// ---- the average of the weights ----

// Gathers the averages of group g in `room`, where the group's are zero.
static void model_gather_average_(const ModelFiles* m, int g, float* room) {
    const MapBuckets buckets = map_group(m->map, g);
    for (const Shard* s = m->map->shards; s < m->map->shards + m->map->num_shards; s++) {
        if (buckets.first <= s->bucket && s->bucket < buckets.end && s->slot[STATE_AVERAGE] != MAP_NONE) {
            m->access.get_state(m->model, STATE_AVERAGE, s->slot[STATE_AVERAGE] * sizeof(float),
                                room + m->map->buckets[s->bucket].begin + s->offset,
                                s->piece.count * sizeof(float));
        }
    }
    m->access.gather(m->model, g, room);
}

// Copies group g in fp32 as get_group does: the average of each weight, or the weight if it has
// none.
static void* model_get_average_(const ModelFiles* m, int g, void* group) {
    const Map* map = m->map;
    const MapBuckets buckets = map_group(map, g);
    const size_t elements = map_group_elements(map, g);
    float* room = (float*)check_alloc(elements, sizeof(float), "the average of a group of parameters");
    m->access.get_group(m->model, g, group);
    model_gather_average_(m, g, room);
    if (group) {
        safetensors_widen(group, m->dtype, elements);
    }
    for (const Shard* s = map->shards; s < map->shards + map->num_shards && group; s++) {
        if (buckets.first <= s->bucket && s->bucket < buckets.end &&
            map->buckets[s->bucket].kind == MAP_TRAINED && map->of.slots[s->tensor] >> STATE_AVERAGE & 1) {
            const size_t at = map->buckets[s->bucket].begin + s->offset;
            memcpy((float*)group + at, room + at, s->piece.count * sizeof(float));
        }
    }
    free(room);
    return group;
}

// ---- getting ----

void part_groups_open_to_get(PartGroups* p, const ModelFiles* files) {
    part_groups_open_(p, files, safetensors_dtype_bytes(model_files_dtype(files)));
}

// Gets group g of the part, as access.get_group does.
static void* model_get_group_(const ModelFiles* m, int g, void* group) {
    return m->is_average ? model_get_average_(m, g, group) : m->access.get_group(m->model, g, group);
}

// A peer's shards of a whole group on their way to the writer.
typedef struct {
    PartGroups* p;
    int g;
    void* whole; // in the writer
    MapPlace here, writer, peer, relay;
    int first_layer;  // of the peer's stage
    int bucket;       // of the peer, by number
    int has_moved;    // true: it has moved to the writer,
    const void* data; // where it is here
} PartMove_;

// Returns the ranks that have the other parts, or the other experts.
static GridGroup part_sharers_(const MapOf* of) { return of->experts > 1 ? GRID_EXPERTS : GRID_TENSOR; }

// Returns the rank in that group for a place in the grid.
static int part_sharer_(const MapOf* of, MapPlace place) {
    return of->experts > 1 ? place.data % of->experts : place.tensor;
}

// Returns this rank's group g, gathered in its data group, if it is the peer or near the writer.
static const char* part_gathered_(const PartMove_* move, int g) {
    PartGroups* p = move->p;
    const int e = p->of.experts, wants = move->here.data / e == move->writer.data / e;
    if (g == 0 && !p->has_once) {
        p->gathered_once = model_get_group_(p->files, 0, wants ? p->once : NULL);
        p->has_once = 1;
    } else if (g > 0 && g != p->group) {
        p->gathered = model_get_group_(p->files, g, wants ? p->block : NULL);
        p->group = g;
    }
    return (const char*)(g == 0 ? p->gathered_once : p->gathered);
}

// Sends or receives a bucket; returns where it is.
static const void* part_exchange_(PartGroups* p, GridGroup group, int peer, const void* data, size_t bytes) {
    const ModelFiles* m = p->files;
    if (!data && p->mail_bytes < bytes) {
        free(p->mail);
        p->mail = check_alloc(bytes, 1, "a bucket of parameters");
        p->mail_bytes = bytes;
    }
    const GroupMove move = {peer, data ? (void*)data : p->mail, bytes, data != NULL};
    m->access.move(m->model, group, move);
    return move.data;
}

// Moves a bucket from the peer to the rank of its stage with the writer's place, and to the writer.
static void part_move_bucket_(PartMove_* move, const Bucket* b) {
    PartGroups* p = move->p;
    const MapOf* of = &p->of;
    const int here = map_rank(of, move->here), peer = map_rank(of, move->peer),
              relay = map_rank(of, move->relay), writer = map_rank(of, move->writer);
    const size_t bytes = array_bytes(b->elements, p->element_bytes);
    const void* data = NULL;
    if (move->here.stage == move->peer.stage && move->here.tensor == move->peer.tensor) {
        const Map* m = p->files->map;
        const int g = b->layer < 0 ? 0 : 1 + model_copy(m->cfg, b->layer);
        const char* group = part_gathered_(move, g);
        data = here == peer ? group + b->begin * p->element_bytes : NULL;
    }
    if (peer != relay && (here == peer || here == relay)) {
        data = part_exchange_(p, part_sharers_(of), part_sharer_(of, here == peer ? move->relay : move->peer),
                              data, bytes);
    }
    if (relay != writer && (here == relay || here == writer)) {
        data =
            part_exchange_(p, GRID_PIPE, here == relay ? move->writer.stage : move->peer.stage, data, bytes);
    }
    move->data = data;
}

// Puts a shard of the peer into the whole group, if the peer writes it. Buckets that all expert
// ranks have come from the one with the writer's place.
static void part_take_moved_(void* context, const Bucket* b, const Shard* s) {
    PartMove_* move = (PartMove_*)context;
    const MapOf* of = &move->p->of;
    if (!s) {
        move->bucket++;
        move->has_moved = 0;
        return;
    }
    const int is_others = of->experts > 1 && b->ranks == of->data &&
                          part_sharer_(of, move->peer) != part_sharer_(of, move->writer);
    if (!(s->flags & SHARD_WRITES) || is_others ||
        part_whole_group_(move->p, s, move->first_layer) != move->g) {
        return;
    }
    if (!move->has_moved) {
        part_move_bucket_(move, b);
        move->has_moved = 1;
    }
    if (move->whole) {
        part_copy_(move->p, PART_TO_WHOLE_, s, (void*)move->data, move->whole);
    }
}

void* part_groups_get(PartGroups* p, int g, int writer, void* group) {
    const ModelFiles* m = p->files;
    const MapOf* of = &p->of;
    PartMove_ move = {.p = p, .g = g, .whole = group};
    if (part_is_plain_(p)) {
        return model_get_group_(m, g, group);
    }
    move.here = map_place(of, m->map->rank);
    move.writer = move.relay = map_place(of, writer);
    for (int stage = 0; stage < of->pipeline; stage++) {
        for (int i = 0; i < of->experts * of->tensor; i++) { // one of them is 1
            move.relay.stage = stage;
            move.peer = move.relay;
            move.peer.tensor = of->experts > 1 ? move.peer.tensor : i;
            move.peer.data += of->experts > 1 ? i - part_sharer_(of, move.peer) : 0;
            move.first_layer = map_part(of, map_rank(of, move.peer)).part.first_layer;
            move.bucket = -1;
            if (move.here.stage == stage || m->map->rank == writer) {
                map_walk(of, map_rank(of, move.peer), part_take_moved_, &move);
            }
        }
    }
    return group;
}

void part_groups_close(PartGroups* p) {
    free(p->mail);
    free(p->block);
    free(p->once);
}

#endif // MODEL_FILES_IMPLEMENTATION

#endif
