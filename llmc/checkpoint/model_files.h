/*
model_files.h -- a model as its files need it: whole groups of parameters (model.h) on the host, one
at a time.

The trainer has functions that get and set the groups of its model. On the host, a group is alone in
memory, laid out like the groups of full arrays (zero_parameter_rows). If the model's own memory has
this layout, it is read and written in place; else memory for one group is allocated.

A rank that has only a part of the model (rank_part.h) takes its parts from whole groups, and whole
groups are put together again in the rank that writes them:

    data group      the parts of a group of a rank's own part, as of a whole model (get_group)
    tensor group    parts of matrices, sent to the rank that writes
    expert group    experts, likewise
    pipeline        a stage has its layers; group 0 comes from the first and the last stage

Tensors that are not cut lie in group 0 of a part, for all of its layers, so that group stays in
memory until all whole groups are done.
*/
#ifndef LLMC_MODEL_FILES_H
#define LLMC_MODEL_FILES_H

#include <stddef.h>

#include "llmc/comm/comm.h"
#include "llmc/comm/group.h"
#include "llmc/formats/safetensors.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/rank_part.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// Functions of a trainer that get and set the tensors of its model, between updates. Collective in
// the data group, but for `move`.
typedef struct {
    // Copies the weights of group g as they are saved: master weights, if any. `group` is NULL in
    // ranks that do not want them, and for tensors in place (ModelFiles): then it returns their
    // address.
    void* (*get_group)(Model* model, int g, void* group);
    // Sets this rank's part of group g; reads only that part of `group`, which is fp32.
    void (*set_group)(Model* model, int g, const float* group);
    // Get and set `bytes` of this rank's array of a slot of the optimizer's state, from byte `at`.
    void* (*get_state)(Model* model, int slot, size_t at, void* state, size_t bytes);
    void (*set_state)(Model* model, int slot, size_t at, const void* state, size_t bytes);
    // Is called after all groups are set. `checkpoint` is the directory they came from; NULL: none.
    void (*loaded)(Model* model, const char* checkpoint);
    // Gathers the trained part of group g, of which each rank that updates some of it has set its
    // piece, in fp32, in all of them.
    void (*gather)(Model* model, int g, float* group);
    // Sends host memory to a rank of the tensor group, the expert group or the pipeline, or
    // receives it.
    void (*move)(Model* model, GridGroup group, GroupMove move);
} ModelAccess;

// The average of a model's weights, as needed to write its files.
typedef struct {
    OptimizerState state;   // layout of this rank's
    SafeTensorsDtype dtype; // type of weights without an average
} ModelAverage;

// A model, as needed to read and write its files.
typedef struct {
    Model* model;
    ModelAccess access;
    RankPart part; // of the model, in this rank
    Optimizer optimizer;
    SafeTensorsDtype dtype; // type of the weights as they are saved
    int in_place;           // true: weights and state are on the host in the layout of files
    Comm* comm;
    const ModelAverage* average; // weights are got as their average, in fp32; NULL: as they are
} ModelFiles;

// Returns the files of the average of a model's weights, which refer to `average`. Sets all of it
// but the step.
ModelFiles model_files_of_average(const ModelFiles* m, ModelAverage* average);

// Returns how whole groups lie on the host.
ZeroPlan model_files_plan(const RankPart* part);

// True if whole groups are in the model's own memory.
static inline int model_files_in_place(const ModelFiles* m) {
    return m->in_place && rank_part_is_whole(&m->part);
}

// True if a part of a model has tensors of a whole group.
int model_files_have(ModelConfig whole, ModelPart which, int g);

// Groups of a rank's part on their way from and to whole groups. If the model has the whole groups,
// it has nothing to do.
typedef struct {
    const ModelFiles* files;
    size_t element_bytes;
    TensorRow whole_rows[MODEL_PARAMETER_ROWS], rows[MODEL_PARAMETER_ROWS];
    // memory for group 0 of the part, and for one more group; NULL: they are in place
    void *once, *block;
    void *mail, *whole_mail; // memory for a group of another rank, and of another stage
    ModelPart* stages;       // parts of the stages; NULL: one stage
} PartGroups;

// ---- setting a model, in fp32 ----

void part_groups_open_to_set(PartGroups* p, const ModelFiles* files);

// Sets what this rank has of a whole group, which is fp32. In place it is set already.
void part_groups_set(PartGroups* p, int g, void* group);

// Sets the tensors that had to wait.
void part_groups_set_last(PartGroups* p);

// ---- getting a model, in the type of its files; collective ----

void part_groups_open_to_get(PartGroups* p, const ModelFiles* files);

// Puts a whole group together in memory of one rank, `writer`; `group` is NULL in all others, and
// for tensors in place: then it returns their address.
void* part_groups_get(PartGroups* p, int g, const Grid* writer, void* group);

void part_groups_close(PartGroups* p);

#ifdef __cplusplus
}
#endif

#ifdef MODEL_FILES_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/model/part.h"

ZeroPlan model_files_plan(const RankPart* part) {
    return rank_part_is_whole(part) ? part->zero : zero_plan(part->whole, 0, 0, 1);
}

// Returns the whole group that a block of a part belongs to.
static int part_groups_whole_(const RankPart* part, int g) {
    return model_group(part->whole, part->own.part.first_layer + model_group_layer(part->own, g));
}

int model_files_have(ModelConfig whole, ModelPart which, int g) {
    const int l = model_group_layer(whole, g), first = which.first_layer, end = first + which.layers;
    return which.of_layers == 0 || (g > 0 ? first <= l && l < end : first == 0 || end == which.of_layers);
}

// ---- the average of the weights ----

ModelFiles model_files_of_average(const ModelFiles* m, ModelAverage* average) {
    ModelFiles files = *m;
    average->dtype = m->dtype;
    optimizer_state_open(&average->state, m->optimizer, &m->part.zero, m->part.own);
    files.dtype = SAFETENSORS_F32;
    files.in_place = 0;
    files.average = average;
    return files;
}

// Gathers the averages of group g in `room`, where those of the group are zero.
static void model_gather_average_(const ModelFiles* m, int g, float* room) {
    const OptimizerState* state = &m->average->state;
    float* piece =
        room + (zero_piece(&m->part.zero, g, ZERO_TRAINED).full - zero_group_begin(&m->part.zero, g));
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const StateAverage of = state_average(state, g, i);
        if (of.count > 0) {
            m->access.get_state(m->model, STATE_AVERAGE, of.at * sizeof(float), piece + of.begin,
                                of.count * sizeof(float));
        }
    }
    m->access.gather(m->model, g, room);
}

// Copies the average of group g in fp32, and the weights that have none, as get_group does.
static void* model_get_average_(const ModelFiles* m, int g, void* group) {
    const OptimizerState* state = &m->average->state;
    const size_t elements = zero_group_elements(&m->part.zero, g);
    float* room = (float*)check_alloc(elements, sizeof(float), "the average of a group of parameters");
    m->access.get_group(m->model, g, group);
    model_gather_average_(m, g, room);
    if (group) {
        safetensors_widen(group, m->average->dtype, elements);
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS && group && zero_has_gradient(&m->part.zero, g); i++) {
        if (state_slot_has(state, STATE_AVERAGE, i) && tensor_is_in_group(&state->rows[i], g)) {
            const size_t begin = tensor_offset_in_group(&state->rows[i]);
            memcpy((float*)group + begin, room + begin, state->room[i] * sizeof(float));
        }
    }
    free(room);
    return group;
}

// Gets group g of the part's own, as access.get_group does.
static void* model_get_group_(const ModelFiles* m, int g, void* group) {
    return m->average ? model_get_average_(m, g, group) : m->access.get_group(m->model, g, group);
}

// ---- the part's own groups ----

static int part_groups_are_parts_(const PartGroups* p) { return !rank_part_is_whole(&p->files->part); }

static size_t part_group_bytes_(const PartGroups* p, int g) {
    return array_bytes(zero_group_elements(&p->files->part.zero, g), p->element_bytes);
}

static void* part_groups_room_(const PartGroups* p, int g) {
    void* room = check_alloc(part_group_bytes_(p, g), 1, "a group of parameters");
    return memset(room, 0, part_group_bytes_(p, g)); // including the gaps between tensors
}

static void part_groups_open_(PartGroups* p, const ModelFiles* files, size_t element_bytes) {
    const RankPart* part = &files->part;
    const ZeroPlan whole = model_files_plan(part);
    memset(p, 0, sizeof(*p));
    p->files = files;
    p->element_bytes = element_bytes;
    zero_parameter_rows(p->whole_rows, &whole, part->whole, element_bytes);
    zero_parameter_rows(p->rows, &part->zero, part->own, element_bytes);
    if (part_groups_are_parts_(p) && !files->in_place) {
        p->once = part_groups_room_(p, 0);
        p->block = part_groups_room_(p, 1);
    }
}

// Returns where group g of the part is, or goes.
static void* part_groups_memory_(const PartGroups* p, int g) {
    const ModelFiles* m = p->files;
    return m->in_place ? m->access.get_group(m->model, g, NULL) : g == 0 ? p->once : p->block;
}

// Copies what group g of a part, which may be another rank's, has in common with a whole group.
static void part_groups_copy_(const PartGroups* p, PartCopy direction, ModelPart which, int g, void* memory,
                              int whole_g, void* whole) {
    const PartGroup part = {p->rows, g, memory}, group = {p->whole_rows, whole_g, whole};
    part_copy_group(direction, part, which, group, p->files->part.whole);
}

// ---- setting ----

void part_groups_open_to_set(PartGroups* p, const ModelFiles* files) {
    part_groups_open_(p, files, sizeof(float));
}

void part_groups_set(PartGroups* p, int g, void* group) {
    const ModelFiles* m = p->files;
    const ModelPart which = m->part.own.part;
    if (!part_groups_are_parts_(p)) {
        m->access.set_group(m->model, g, (const float*)group);
        return;
    }
    part_groups_copy_(p, PART_TAKE, which, 0, part_groups_memory_(p, 0), g, group);
    for (int block = 1; block < model_groups(m->part.own); block++) {
        if (part_groups_whole_(&m->part, block) == g) {
            void* memory = part_groups_memory_(p, block);
            part_groups_copy_(p, PART_TAKE, which, block, memory, g, group);
            m->access.set_group(m->model, block, (const float*)memory);
        }
    }
}

void part_groups_set_last(PartGroups* p) {
    if (part_groups_are_parts_(p)) {
        p->files->access.set_group(p->files->model, 0, (const float*)part_groups_memory_(p, 0));
    }
}

// ---- getting ----

// Returns the ranks that have the other parts, or the other experts.
static GridGroup part_groups_sharers_(const RankPart* part) {
    return grid_experts(part->grid.shape) > 1 ? GRID_EXPERTS : GRID_TENSOR;
}

// Returns 1 if these ranks have the other parts of group g: of blocks, and of words.
static int part_groups_shares_(const RankPart* part, int g) {
    return g > 0 || part_groups_sharers_(part) == GRID_TENSOR;
}

// Returns 1 if this rank has the writer's place, or shares group g with the rank that has it.
static int part_groups_is_near_(const RankPart* part, int g, const Grid* writer) {
    const GridGroup sharers = part_groups_sharers_(part);
    Grid there = *writer;
    there.stage = part->grid.stage;
    return part_groups_shares_(part, g)
               ? grid_member(&part->grid, sharers).first == grid_member(&there, sharers).first
               : grid_rank(&part->grid) == grid_rank(&there);
}

// Finds the parts of all stages.
static void part_groups_open_stages_(PartGroups* p) {
    const ModelFiles* m = p->files;
    const ZeroPlan whole = model_files_plan(&m->part);
    const int P = m->part.grid.shape.pipeline;
    const size_t ranks = (size_t)m->comm->size;
    ModelPart* all = (ModelPart*)check_alloc(ranks, sizeof(ModelPart), "parts of ranks");
    comm_all_gather(m->comm, all, &m->part.own.part, sizeof(ModelPart));
    p->stages = (ModelPart*)check_alloc((size_t)P, sizeof(ModelPart), "parts of stages");
    for (int stage = 0; stage < P; stage++) {
        Grid place = m->part.grid;
        place.stage = stage;
        p->stages[stage] = all[grid_rank(&place)];
    }
    free(all);
    p->whole_mail = check_alloc(zero_largest_group(&whole), p->element_bytes, "a group of parameters");
    memset(p->whole_mail, 0, zero_largest_group(&whole) * p->element_bytes);
}

void part_groups_open_to_get(PartGroups* p, const ModelFiles* files) {
    part_groups_open_(p, files, safetensors_dtype_bytes(files->dtype));
    if (p->once) {
        model_get_group_(files, 0, p->once);
    }
    if (grid_member(&files->part.grid, part_groups_sharers_(&files->part)).size > 1) {
        const size_t once = part_group_bytes_(p, 0), block = part_group_bytes_(p, 1);
        p->mail = check_alloc(once > block ? once : block, 1, "a group of parameters");
    }
    if (files->part.grid.shape.pipeline > 1) {
        part_groups_open_stages_(p);
    }
}

// Puts group g of the parts of the ranks that share it into a whole group, in the one that writes.
static void part_groups_put_(PartGroups* p, int g, const Grid* writer, int whole_g, void* memory,
                             void* whole) {
    const ModelFiles* m = p->files;
    const GridGroup sharers = part_groups_sharers_(&m->part);
    const GridMember here = grid_member(&m->part.grid, sharers);
    const int to = grid_member(writer, sharers).rank;
    ModelPart which = m->part.own.part;
    if (here.rank != to) {
        const GroupMove send = {to, memory, part_group_bytes_(p, g), 1};
        m->access.move(m->model, sharers, send);
        return;
    }
    part_groups_copy_(p, PART_PUT, which, g, memory, whole_g, whole);
    for (int from = 0; from < here.size && part_groups_shares_(&m->part, g); from++) {
        const GroupMove receive = {from, p->mail, part_group_bytes_(p, g), 0};
        which.tensor_rank = from;
        which.expert_rank = from;
        if (from != here.rank) {
            m->access.move(m->model, sharers, receive);
            part_groups_copy_(p, PART_PUT, which, g, p->mail, whole_g, whole);
        }
    }
}

// Puts this stage's tensors of a whole group together, in the rank with the writer's place.
static void part_groups_gather_(PartGroups* p, int g, const Grid* writer, void* whole) {
    const ModelFiles* m = p->files;
    const RankPart* part = &m->part;
    if (part_groups_is_near_(part, 0, writer) && g == 0) {
        part_groups_put_(p, 0, writer, g, part_groups_memory_(p, 0), whole);
    } else if (whole) { // tensors that are not cut: every rank has them
        part_groups_copy_(p, PART_PUT, part->own.part, 0, part_groups_memory_(p, 0), g, whole);
    }
    for (int block = 1; block < model_groups(part->own); block++) {
        if (part_groups_whole_(part, block) == g) {
            const int is_here = part_groups_is_near_(part, block, writer);
            void* memory = model_get_group_(m, block, is_here ? p->block : NULL);
            if (is_here) {
                part_groups_put_(p, block, writer, g, memory, whole);
            }
        }
    }
}

// Copies the tensors that a stage has of a whole group.
static void part_groups_merge_(PartGroups* p, int g, ModelPart stage, void* whole) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(rows, model_part_of(p->files->part.whole, stage), 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &p->whole_rows[i];
        if (tensor_is_in_group(row, g) && !tensor_is_absent(&rows[i])) {
            memcpy(tensor_in_group(row, whole), tensor_in_group(row, p->whole_mail),
                   array_bytes(tensor_layer_elements(row), p->element_bytes));
        }
    }
}

// Moves a whole group, as far as another stage has it, from the rank there with the writer's place.
static void part_groups_move_(PartGroups* p, int g, int stage, const Grid* writer, void* whole) {
    const ModelFiles* m = p->files;
    const ZeroPlan plan = model_files_plan(&m->part);
    const int sends = m->part.grid.stage == stage;
    const GroupMove move = {sends ? writer->stage : stage, p->whole_mail,
                            array_bytes(zero_group_elements(&plan, g), p->element_bytes), sends};
    m->access.move(m->model, GRID_PIPE, move);
    if (whole) {
        part_groups_merge_(p, g, p->stages[stage], whole);
    }
}

void* part_groups_get(PartGroups* p, int g, const Grid* writer, void* group) {
    const ModelFiles* m = p->files;
    const Grid* here = &m->part.grid;
    Grid at_stage = *writer; // the rank of this stage with the writer's place
    at_stage.stage = here->stage;
    const int is_place = grid_rank(&at_stage) == grid_rank(here);
    if (!part_groups_are_parts_(p)) {
        return model_get_group_(m, g, group);
    }
    // in the order of stages: the last one's token embedding counts, if the first has it, too
    for (int stage = 0; stage < here->shape.pipeline; stage++) {
        const int is_here = stage == here->stage, moves = stage != writer->stage;
        if (!model_files_have(m->part.whole, p->stages ? p->stages[stage] : m->part.own.part, g)) {
            continue;
        }
        if (is_here) {
            part_groups_gather_(p, g, writer, moves && is_place ? p->whole_mail : group);
        }
        if (moves && is_place && (is_here || group)) {
            part_groups_move_(p, g, stage, writer, group);
        }
    }
    return group;
}

void part_groups_close(PartGroups* p) {
    free(p->stages);
    free(p->whole_mail);
    free(p->mail);
    free(p->block);
    free(p->once);
}

#endif // MODEL_FILES_IMPLEMENTATION

#endif
