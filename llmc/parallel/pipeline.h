/*
pipeline.h -- the layers of a model divided among P stages, and the order in which a stage works on
the M micro-batches of an update.

    stage 0:     forward 0  forward 1  forward 2  forward 3  backward 0  ...
    stage 3:                                      forward 0  backward 0  forward 1  backward 1  ...

Stage p makes P-1-p forward passes ahead, then forward and backward passes in turns, and at the end
the backward passes that are left (1F1B). So both kinds of passes take micro-batches in order, sums
over micro-batches have the same order as in one process, and a stage keeps the activations of at
most min(P-p, M) micro-batches, each in its place. An update takes as long as M + P - 1
micro-batches.

The residual stream enters a stage and leaves it; its gradient goes the other way. A stage sends its
last results and receives its next inputs in one exchange: with separate messages, two stages could
wait for each other.

Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021 (PipeDream-Flush).
*/
#ifndef LLMC_PIPELINE_H
#define LLMC_PIPELINE_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/comm/group.h"
#include "llmc/model/model.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- the cut ----

// Sets the layers of each of P stages so that the largest load is least. The classifier adds to the
// load of the last stage. Layers that share parameters in pairs stay together.
void pipeline_cut(int* layers, ModelConfig cfg, int P);

// Sets the layers of P stages from a list, "9,9,8,6". Returns 0 and the reason in `error` if it
// does not suit the model.
int pipeline_parse_layers(int* layers, ModelConfig cfg, int P, const char* list, char* error);

// ---- the order ----

typedef enum { PIPELINE_NOTHING, PIPELINE_FORWARD, PIPELINE_BACKWARD } PipelinePass;

// A pass over a micro-batch.
typedef struct {
    PipelinePass pass;
    int64_t micro_step;
    int tokens; // of its micro-batch; the caller sets it
} PipelineAction;

static inline PipelineAction pipeline_rest(void) {
    const PipelineAction none = {PIPELINE_NOTHING, 0, 0};
    return none;
}

// Sets action i of stage p in an update of M micro-batches; returns 0 after the last.
int pipeline_action(int P, int p, int64_t M, int64_t i, PipelineAction* action);

// Returns the micro-batches whose activations stage p keeps at a time.
static inline int pipeline_places(int P, int p, int64_t M) { return P - p < M ? P - p : (int)M; }

// ---- messages ----

// The residual stream, (tokens, C) in rows of `row_bytes`, where it enters and leaves a stage.
typedef struct {
    const void *out, *dinp; // made by the action before: the stream; the gradient of what entered
    void *inp, *dout;       // needed by the next action
    size_t row_bytes;
} PipelineStream;

enum { PIPELINE_MOVES = 2 }; // at most

// Sets the messages of stage p between two actions, and returns their number. Ranks of the pipe
// group are its stages. An empty micro-batch has no messages.
int pipeline_moves(GroupMove moves[PIPELINE_MOVES], int P, int p, PipelineAction before, PipelineAction next,
                   PipelineStream stream);

// Tells the watchdog which of these messages the stage waits for.
void pipeline_watch(Comm* comm, const GroupMove* moves, int count, PipelineAction before,
                    PipelineAction next);

// Sends what the action before has made and receives what the next one needs, as one exchange.
void pipeline_exchange_cpu(Group* pipe, PipelineAction before, PipelineAction next, PipelineStream stream);

// ---- a stage's turns ----

// The activations of a stage, and its last action, whose results it has not sent yet.
typedef struct {
    ModelConfig cfg;
    int first_block;       // lowest layer that the backward pass reaches
    const TensorRow* rows; // of the activations
    void* memory;
    PipelineAction last;
} PipelineStage;

// Returns the activations of a micro-batch.
ModelActivations stage_activations(const PipelineStage* s, int64_t micro_step);

// Sets *acts to the activations of the next action, and returns the streams to send and to receive
// before it.
PipelineStream stage_turn(const PipelineStage* s, ModelActivations* acts, PipelineAction next);

// Sends what the last action has made, receives what the next one needs, and sets *acts to its
// activations.
static inline void stage_enter_cpu(PipelineStage* s, Group* pipe, ModelActivations* acts,
                                   PipelineAction next) {
    pipeline_exchange_cpu(pipe, s->last, next, stage_turn(s, acts, next));
    s->last = next;
}

// Sends what the last action has made.
static inline void stage_leave_cpu(PipelineStage* s, Group* pipe, ModelActivations* acts) {
    stage_enter_cpu(s, pipe, acts, pipeline_rest());
}

// ---- a token embedding that is also the classifier's matrix ----

// Moves data from one stage to another; the others do nothing.
void pipeline_hand_over_cpu(Group* pipe, int from, int to, void* data, size_t bytes);

// Adds the embedding's gradient of the first stage to the classifier's in the last one, if the two
// are kept separately: once a step.
void stage_join_embedding_cpu(Zero* zero, Group* pipe);

// Gives the first stage the matrix that the last one has changed.
void stage_share_embedding_cpu(float* wte, const Zero* zero, Group* pipe);

// Sends data of the last stage to all others.
void pipeline_tell_cpu(Group* pipe, void* data, size_t bytes);

#ifdef __cplusplus
}
#endif

#ifdef PIPELINE_IMPLEMENTATION

#include <errno.h>
#include <limits.h>
#include <stdlib.h>

// ---- the cut ----

// Returns how many layers the classifier costs as much as: by the elements of their matrices.
static double pipeline_head_load_(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double layer = 0;
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (rows[i].in_block && rows[i].rows > 1) {
            layer += rows[i].uses * model_multiplied_elements(&rows[i], cfg) / cfg.L;
        }
    }
    return (double)cfg.Vp * cfg.C / layer;
}

// Deals out `units` of layers evenly to the stages. Of the stages before the last one, later ones
// get more, because they keep fewer micro-batches.
static void pipeline_deal_(int* layers, int units, int stages, int unit) {
    for (int p = 0; p < stages; p++) {
        layers[p] = unit * (units / stages + (p >= stages - units % stages));
    }
}

void pipeline_cut(int* layers, ModelConfig cfg, int P) {
    const int unit = model_copy_repeats(cfg), units = cfg.L / unit;
    const double head = pipeline_head_load_(cfg) / unit;
    int last = units;
    double least = P == 1 ? 0 : INFINITY;
    for (int n = 1; n <= units - (P - 1) && P > 1; n++) {
        const int others = (units - n + P - 2) / (P - 1);
        const double load = fmax(n + head, others);
        if (load <= least) {
            least = load;
            last = n;
        }
    }
    layers[P - 1] = last * unit;
    if (P > 1) {
        pipeline_deal_(layers, units - last, P - 1, unit);
    }
}

// Reads the next number of a list, and the comma after it unless it `is_last`. Returns 0 for any
// other text.
static int pipeline_next_number_(const char** text, int is_last, long* number) {
    char* end;
    errno = 0;
    *number = strtol(*text, &end, 10);
    const int is_number = end > *text && **text >= '0' && **text <= '9' && errno == 0,
              ends_well = *end == (is_last ? '\0' : ',');
    *text = end + (*end == ',');
    return is_number && ends_well && *number <= INT_MAX;
}

int pipeline_parse_layers(int* layers, ModelConfig cfg, int P, const char* list, char* error) {
    const int unit = model_copy_repeats(cfg);
    const char* text = list;
    long sum = 0, number;
    for (int p = 0; p < P; p++) {
        if (!pipeline_next_number_(&text, p == P - 1, &number)) {
            return error_set(error, "--pipeline-layers", "%s; wanted %d numbers, like 3,2 for two stages",
                             list, P);
        }
        if (number < 1 || number % unit != 0) {
            return error_set(error, "--pipeline-layers", "%s: a stage of %ld layers; wanted a multiple of %d",
                             list, number, unit);
        }
        layers[p] = (int)number;
        sum += number;
    }
    if (sum != cfg.L) {
        return error_set(error, "--pipeline-layers", "%s, %ld layers; wanted the model's %d", list, sum,
                         cfg.L);
    }
    return 1;
}

// ---- the order ----

int pipeline_action(int P, int p, int64_t M, int64_t i, PipelineAction* action) {
    const int64_t ahead = P - 1 - p < M ? P - 1 - p : M, turn = i - ahead, in_turns = 2 * (M - ahead);
    const int is_forward = turn < 0 || (turn < in_turns && turn % 2 == 0);
    action->pass = i >= 2 * M ? PIPELINE_NOTHING : is_forward ? PIPELINE_FORWARD : PIPELINE_BACKWARD;
    action->micro_step = turn < 0          ? i
                         : turn < in_turns ? turn / 2 + (is_forward ? ahead : 0)
                                           : turn - in_turns / 2;
    action->tokens = 0;
    return i < 2 * M;
}

// ---- messages ----

int pipeline_moves(GroupMove moves[PIPELINE_MOVES], int P, int p, PipelineAction before, PipelineAction next,
                   PipelineStream stream) {
    const size_t made = (size_t)before.tokens * stream.row_bytes,
                 needed = (size_t)next.tokens * stream.row_bytes;
    const GroupMove sends_out = {p + 1, (void*)stream.out, made, 1},
                    sends_dinp = {p - 1, (void*)stream.dinp, made, 1},
                    receives_inp = {p - 1, stream.inp, needed, 0},
                    receives_dout = {p + 1, stream.dout, needed, 0};
    int count = 0;
    if (before.pass == PIPELINE_FORWARD && p < P - 1 && made > 0) {
        moves[count++] = sends_out;
    } else if (before.pass == PIPELINE_BACKWARD && p > 0 && made > 0) {
        moves[count++] = sends_dinp;
    }
    if (next.pass == PIPELINE_FORWARD && p > 0 && needed > 0) {
        moves[count++] = receives_inp;
    } else if (next.pass == PIPELINE_BACKWARD && p < P - 1 && needed > 0) {
        moves[count++] = receives_dout;
    }
    return count;
}

void pipeline_watch(Comm* comm, const GroupMove* moves, int count, PipelineAction before,
                    PipelineAction next) {
    const GroupMove* last = &moves[count - 1]; // what is received, if anything
    if (count > 0 && last->sends) {
        comm_exchanges(comm, "micro-batch %lld to stage %lld", before.micro_step, last->peer);
    } else if (count > 0) {
        comm_exchanges(comm, "micro-batch %lld from stage %lld", next.micro_step, last->peer);
    }
}

void pipeline_exchange_cpu(Group* pipe, PipelineAction before, PipelineAction next, PipelineStream stream) {
    GroupMove moves[PIPELINE_MOVES];
    const int count = pipeline_moves(moves, pipe->size, pipe->rank, before, next, stream);
    pipeline_watch(pipe->comm, moves, count, before, next);
    if (count > 0) {
        group_exchange_cpu(pipe, moves, count);
    }
}

void pipeline_hand_over_cpu(Group* pipe, int from, int to, void* data, size_t bytes) {
    const int sends = pipe->rank == from;
    const GroupMove move = {sends ? to : from, data, bytes, sends};
    if (sends || pipe->rank == to) {
        group_exchange_cpu(pipe, &move, 1);
    }
}

// ---- a stage's turns ----

ModelActivations stage_activations(const PipelineStage* s, int64_t micro_step) {
    ModelActivations all;
    tensor_rows_bind(&all, s->rows, MODEL_ACTIVATION_ROWS, s->memory);
    return model_activations_of(all, s->rows, micro_step);
}

PipelineStream stage_turn(const PipelineStage* s, ModelActivations* acts, PipelineAction next) {
    const ModelActivations made = stage_activations(s, s->last.micro_step);
    const size_t row_bytes = (size_t)s->cfg.C * s->rows[0].element_bytes; // encoded is row 0
    *acts = stage_activations(s, next.micro_step);
    const PipelineStream stream = {model_stream_into(&made, s->rows, s->first_block, s->cfg.L),
                                   made.dresidual, acts->encoded, acts->dresidual, row_bytes};
    return stream;
}

void stage_join_embedding_cpu(Zero* zero, Group* pipe) {
    float* embedding = zero_embedding_gradient_cpu(zero);
    if (embedding) {
        pipeline_hand_over_cpu(pipe, 0, pipe->size - 1, embedding,
                               zero_embedding_elements(zero->map) * sizeof(float));
    }
    if (embedding && pipe->rank == pipe->size - 1) {
        zero_add_embedding_cpu(zero);
    }
}

void stage_share_embedding_cpu(float* wte, const Zero* zero, Group* pipe) {
    if (map_embedding(zero->map)) {
        pipeline_hand_over_cpu(pipe, pipe->size - 1, 0, wte,
                               zero_embedding_elements(zero->map) * sizeof(float));
    }
}

void pipeline_tell_cpu(Group* pipe, void* data, size_t bytes) {
    for (int p = 0; p < pipe->size - 1; p++) {
        pipeline_hand_over_cpu(pipe, pipe->size - 1, p, data, bytes);
    }
}

#endif // PIPELINE_IMPLEMENTATION

#endif
