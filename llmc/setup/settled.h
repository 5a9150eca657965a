/*
settled.h -- the settings of a run: every option with its decided value, and what follows from them.

    Options    input: the command line, the file of --config, the checkpoint to resume; read-only
    settle     decides each "auto" once, in a fixed order (resolve.h)
    Settled    the result: all later code reads it

Settings that depend on the memory of the device are decided last, by functions that return a new
Settled (plan/fit.h, plan/memory_limit.h).
*/
#ifndef LLMC_SETTLED_H
#define LLMC_SETTLED_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/data/mixture.h"
#include "llmc/formats/tensor_types.h"
#include "llmc/model/freeze.h"
#include "llmc/model/map_walk.h"
#include "llmc/model/config.h"
#include "llmc/model/part.h"
#include "llmc/ops/distill.h"
#include "llmc/optim/stages.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/pipeline.h"
#include "llmc/parallel/zero.h"
#include "llmc/setup/launcher.h"
#include "llmc/setup/options.h"

typedef struct {
    Options options; // with decided values
    ModelUse use;
    Ranks ranks;            // which rank this is, and how the run is divided
    SafeTensorsDtype dtype; // type of the parameters in memory
    ModelConfig cfg;        // the whole model
    ModelConfig teacher;    // of --teacher; no layers: none

    // facts that follow
    ModelConfig part; // of the model, in this process: what memory and passes have (part.h)
    Freeze freeze;
    ZeroPlan zero;       // in a run that does not train, each rank has the whole model
    Optimizer optimizer; // with its master weights
    size_t element_bytes, gradient_bytes;
    SafeTensorsDtype saved_dtype; // type of the weights in a checkpoint: of master weights, if any
    int64_t sequences;            // number of sequences in the last step, which has the most
    int64_t micro_batches;        // number of micro-batches in that step, on all data ranks
    int sources;                  // of the training data, if it is a mixture; else 0
    // sequences generated at a time; 1 in training, which samples one by one
    int decode_batch;

    size_t nccl_bytes; // GPU memory that NCCL was found to use
} Settled;

// ---- facts that follow from options ----

// Returns the momentum of SGD or Adafactor; 0 for other optimizers.
static inline float settled_momentum(const Options* o) {
    return o->optimizer.name == OPTIMIZER_SGD         ? o->optimizer.sgd_momentum
           : o->optimizer.name == OPTIMIZER_ADAFACTOR ? o->optimizer.adafactor_beta1
                                                      : 0;
}

// Returns the batch of each step: --total-batch, unless stages are given.
static inline Stages settled_batches(const Options* o) {
    Stages s;
    const int has_stages = o->batch.schedule && stages_parse(&s, o->batch.schedule);
    return has_stages ? s : stages_constant(o->batch.total);
}

// Returns the length of the sequences of each step: --seq-len, unless stages are given.
static inline Stages settled_lengths(const Options* o) {
    Stages s;
    const int has_stages = o->batch.seq_len_schedule && stages_parse(&s, o->batch.seq_len_schedule);
    return has_stages ? s : stages_constant(o->batch.seq_len);
}

// Returns the window of each step, in layers that have one: --window, unless stages are given.
static inline Stages settled_windows(const Options* o) {
    Stages s;
    const int has_stages = o->model.window_schedule && stages_parse(&s, o->model.window_schedule);
    return has_stages ? s : stages_constant(o->model.window);
}

// True if matrices have state in blocks of 8-bit numbers, which must not cross rows.
static inline int settled_state_in_8_bits(const Options* o) {
    return o->optimizer.name == OPTIMIZER_ADAMW8BIT ||
           (o->optimizer.name == OPTIMIZER_MUON && o->optimizer.muon_momentum == MUON_8BIT);
}

static inline MasterWeights settled_master_(const Settled* s) {
    const int choice = s->options.memory.master_weights;
    return !choice || s->dtype == SAFETENSORS_F32 ? MASTER_NONE
           : s->dtype == SAFETENSORS_F16          ? MASTER_FP32
           : choice == MASTER_WEIGHTS_24          ? MASTER_24
                                                  : MASTER_SPLIT;
}

static inline Optimizer settled_optimizer_(const Settled* s) {
    const Options* o = &s->options;
    const int has_optional =
        o->optimizer.name == OPTIMIZER_MUON ? o->optimizer.muon_rows : settled_momentum(o) > 0;
    Optimizer optimizer = optimizer_of((OptimizerName)o->optimizer.name, has_optional, settled_master_(s));
    optimizer.frozen = s->freeze.rows;
    optimizer.lr_scale[KIND_EMBEDDING] = o->optimizer.embedding_lr_scale;
    optimizer.lr_scale[KIND_VECTOR] = o->optimizer.vector_lr_scale;
    optimizer.lr_scale[KIND_HEAD] = 1;
    if (o->optimizer.mup && o->optimizer.mup[0]) {
        mup_parse(&optimizer.mup, o->optimizer.mup);
    }
    optimizer.muon_momentum = (MuonMomentum)o->optimizer.muon_momentum;
    optimizer.soap_max_side = o->optimizer.soap_max_side;
    optimizer.sums_weights = o->optimizer.adafactor_scale;
    if (s->use == USE_TRAIN) {
        average_parse(&optimizer.average, o->optimizer.average);
    }
    optimizer.by_block = o->ranks.zero >= 2 || o->memory.offload_optimizer || o->memory.update_in_backward;
    return optimizer;
}

// Sets the layers of all stages: as --pipeline-layers says, or dealt out evenly.
static inline void settled_all_layers_(const Settled* s, int layers[MODEL_MAX_LAYERS]) {
    const int P = s->ranks.grid.shape.pipeline;
    char error[ERROR_BYTES];
    const char* list = s->options.ranks.pipeline_layers;
    if (!list || !list[0] || !pipeline_parse_layers(layers, s->cfg, P, list, error)) {
        pipeline_cut(layers, s->cfg, P);
    }
}

// Sets the layers of a stage.
static inline void settled_layers_(const Settled* s, ModelPart* part) {
    const Grid* grid = &s->ranks.grid;
    const int P = grid->shape.pipeline, D = grid->shape.data;
    int layers[MODEL_MAX_LAYERS];
    settled_all_layers_(s, layers);
    for (int p = 0; p < grid->stage; p++) {
        part->first_layer += layers[p];
    }
    part->layers = layers[grid->stage];
    part->of_layers = s->cfg.L;
    part->places = s->use == USE_TRAIN ? pipeline_places(P, grid->stage, (s->micro_batches + D - 1) / D) : 1;
}

// Returns the vocabulary with its padding: tensor ranks have equal parts of it.
static inline int settled_padded_vocab(const Settled* s) {
    const int t = s->ranks.grid.shape.tensor, is_equal = t <= 1 || s->cfg.Vp % (16 * t) == 0;
    return is_equal ? s->cfg.Vp : model_padded_vocab_of_ranks(s->cfg.V, t);
}

// Returns the part of the model that this process has, as a model of its own.
static inline ModelConfig settled_own_(const Settled* s) {
    const Grid* grid = &s->ranks.grid;
    const GridShape shape = grid->shape;
    ModelPart part;
    memset(&part, 0, sizeof(part));
    if (shape.tensor > 1) {
        part.tensor_ranks = shape.tensor;
        part.tensor_rank = grid->tensor_rank;
    }
    if (grid_experts(shape) > 1) {
        const GridMember experts = grid_member(grid, GRID_EXPERTS);
        part.expert_ranks = experts.size;
        part.expert_rank = experts.rank;
    }
    if (shape.pipeline > 1) {
        settled_layers_(s, &part);
    }
    return model_part_of(s->cfg, part);
}

// Returns the tensors that are frozen in this process.
static inline Freeze settled_own_freeze(const Settled* s) { return freeze_of_part(&s->freeze, s->part); }

static inline ZeroPlan settled_zero_(const Settled* s) {
    const GridMember data = ranks_data(&s->ranks);
    const ZeroPlan plan = {s->options.ranks.zero, data.rank, data.size, s->ranks.shards,
                           s->ranks.grid.shape.context},
                   alone = {0, 0, 1, 1, 1};
    return s->use == USE_TRAIN ? plan : alone;
}

// Returns the tokens of a sequence that this process has.
static inline int settled_rank_length(const Settled* s) {
    return s->options.batch.seq_len / s->ranks.grid.shape.context;
}

// Returns the most tokens of a pass: those of a micro-batch; in a run that generates, a prompt's or
// one for each sequence.
static inline size_t settled_pass_tokens(const Settled* s) {
    const int B = s->options.batch.size, T = settled_rank_length(s);
    return s->use == USE_GENERATE ? (size_t)(B > T ? B : T) : (size_t)B * (size_t)T;
}

// Returns the sources of the training data; 0 if it has no more than one.
static inline int settled_sources_(const Options* o) {
    const int sources = o->data.train && o->data.train[0] ? mixture_count(o->data.train) : 0;
    return sources > 1 ? sources : 0;
}

// Sets the facts that follow from everything above them in the struct and from `freeze`.
static inline void settled_conclude(Settled* s) {
    const Options* o = &s->options;
    s->sequences = o->batch.total / o->batch.seq_len;
    s->micro_batches = (s->sequences + o->batch.size - 1) / o->batch.size;
    s->sources = settled_sources_(o);
    s->cfg.Vp = settled_padded_vocab(s);
    s->part = settled_own_(s);
    s->zero = settled_zero_(s);
    s->optimizer = settled_optimizer_(s);
    s->element_bytes = safetensors_dtype_bytes(s->dtype);
    s->gradient_bytes = o->memory.gradients ? sizeof(float) : s->element_bytes;
    s->saved_dtype = o->memory.master_weights && s->use != USE_EVALUATE ? SAFETENSORS_F32 : s->dtype;
    s->decode_batch = s->use == USE_GENERATE ? o->batch.size : 1;
}

// Returns the inputs of the map of elements (map.h). `places`: how many layers have memory at a
// time, where layers take turns in it.
static inline MapOf settled_map(const Settled* s, int places) {
    const GridShape shape = s->ranks.grid.shape;
    const int trains = s->use == USE_TRAIN;
    MapOf of;
    memset((void*)&of, 0, sizeof(of));
    of.whole = s->cfg;
    of.freeze = s->freeze;
    of.trains = trains;
    of.tensor = shape.tensor;
    of.data = shape.data * shape.context;
    of.pipeline = shape.pipeline;
    of.experts = grid_experts(shape);
    of.replica = trains ? s->ranks.shards : of.data;
    of.stage = trains ? s->options.ranks.zero : 0;
    of.ring_gradients = of.stage >= 2 || (trains && s->options.memory.update_in_backward) ? places : 0;
    of.ring_parameters = of.stage >= 3 ? places : 0;
    if (shape.pipeline > 1) {
        settled_all_layers_(s, of.layers);
    }
    optimizer_set_map(&of, s->optimizer);
    return of;
}

// Opens the state of the optimizer with a map that has sizes alone.
static inline void settled_state(OptimizerState* state, Map* map, const Settled* s) {
    Memory dry = memory_dry();
    const MapOf of = settled_map(s, 1);
    map_open(map, &dry, MEMORY_HOST, &of, grid_rank(&s->ranks.grid));
    optimizer_state_open(state, s->optimizer, map);
}

// Returns the settings for options without any "auto"; settle() is for the others.
static inline Settled settled_of(const Options* options, ModelConfig cfg, ModelUse use, Ranks ranks,
                                 SafeTensorsDtype dtype) {
    Settled s;
    memset((void*)&s.teacher, 0, sizeof(s.teacher));
    s.options = *options;
    s.use = use;
    s.ranks = ranks;
    s.dtype = dtype;
    s.cfg = cfg;
    s.freeze = freeze_of(cfg, options->optimizer.freeze);
    s.nccl_bytes = 0;
    settled_conclude(&s);
    return s;
}

// Returns true if the matrices of this model are in 8 bits; those of an adapter never are, only its
// base's.
static inline int settled_has_blocks(const Settled* s) {
    return s->options.texts.quantize && !model_has_adapter(s->cfg);
}

// ---- the teacher ----

static inline int settled_has_teacher(const Settled* s) { return s->teacher.L > 0; }

static inline Distill settled_distill(const Settled* s) {
    const Distill how = {s->options.teacher.weight, s->options.teacher.temperature};
    return how;
}

// ---- other ways to run the same steps ----

// Returns the settings with a micro-batch `parts` times smaller, another level of recomputation and
// another place for the optimizer's state. A validation keeps its number of sequences.
static inline Settled settled_with(const Settled* s, int parts, int recompute, int offload_optimizer) {
    Settled other = *s;
    options_divide_batch(&other.options, parts);
    other.options.memory.recompute = recompute;
    other.options.memory.offload_optimizer = offload_optimizer;
    settled_conclude(&other);
    return other;
}

// Returns the settings of a process in another grid, with another stage of ZeRO and another number
// of processes that share a replica.
static inline Settled settled_in_grid(const Settled* s, Grid grid, int zero, int shards) {
    Settled other = *s;
    Options* o = &other.options;
    other.ranks.grid = grid;
    other.ranks.zero = o->ranks.zero = zero;
    other.ranks.shards = shards;
    o->ranks.tensor = grid.shape.tensor;
    o->ranks.context = grid.shape.context;
    o->ranks.experts = grid_experts(grid.shape);
    o->ranks.pipeline = grid.shape.pipeline;
    settled_conclude(&other);
    return other;
}

#endif
