/*
grid.h -- the grid of processes: which of them have the same parts of matrices, the same part of
sequences, the same micro-batches, the same stage of the model. Only arithmetic, no communication.

    tensor    t processes cut the matrices of each layer into as many parts
    context   c processes share the tokens of each sequence
    data      D processes share the micro-batches of an update
    experts   e neighbors among these share the experts of each layer: each has E / e
    pipeline  P processes share the layers; the part of one process is its stage

    rank = ((stage D + data_rank) c + context_rank) t + tensor_rank       t c D P processes

So the processes of a tensor group are neighbors, and stages are farthest apart. The group in which
ZeRO divides (GRID_DATA) has the D c processes with the same parts and stage; each of them sees
different tokens.
*/
#ifndef LLMC_GRID_H
#define LLMC_GRID_H

#include <stddef.h>

#include "llmc/base/token_chunks.h"
#include "llmc/model/config.h"
#include "llmc/model/part.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int tensor, context, data, pipeline; // processes of a group of each kind: t, c, D, P
    int experts;                         // e, which divides D; 0 is 1
} GridShape;

// Place of a process.
typedef struct {
    GridShape shape;
    int tensor_rank, context_rank, data_rank, stage; // j, q, d, p
} Grid;

// Returns t c D P.
static inline int grid_size(GridShape shape) {
    return shape.tensor * shape.context * shape.data * shape.pipeline;
}

Grid grid_of(GridShape shape, int rank);

// Returns the place of a rank in a run that divides only the data.
static inline Grid grid_of_data(int rank, int size) {
    const GridShape shape = {1, 1, size, 1, 1};
    return grid_of(shape, rank);
}

int grid_rank(const Grid* grid);

// Returns e.
static inline int grid_experts(GridShape shape) { return shape.experts > 1 ? shape.experts : 1; }

// True if only data is divided: the processes have whole models.
static inline int grid_is_plain(GridShape shape) {
    return shape.tensor == 1 && shape.context == 1 && shape.pipeline == 1 && grid_experts(shape) == 1;
}

static inline int grid_is_first_stage(const Grid* grid) { return grid->stage == 0; }
static inline int grid_is_last_stage(const Grid* grid) { return grid->stage == grid->shape.pipeline - 1; }

// True if this process reports the losses, the FLOP and the counts of its tokens; the others report
// zeros. One of each tensor group of the last stage does.
static inline int grid_tells(const Grid* grid) { return grid->tensor_rank == 0 && grid_is_last_stage(grid); }

// True if the layers of a forward pass wait for other processes.
static inline int grid_forward_waits(const Grid* grid) {
    return grid->shape.tensor > 1 || grid->shape.context > 1 || grid_experts(grid->shape) > 1;
}

// True if processes exchange data on several streams of a GPU: layers do in groups of their own,
// while data groups or stages use the stream of communication.
static inline int grid_has_several_streams(GridShape shape) {
    const int in_layers = shape.tensor > 1 || shape.context > 1 || grid_experts(shape) > 1;
    return in_layers && (shape.data * shape.context > 1 || shape.pipeline > 1);
}

// Returns which tokens of each sequence this process has.
static inline TokenChunks grid_chunks(const Grid* grid) {
    const TokenChunks chunks = {grid->shape.context - 1, grid->context_rank};
    return chunks;
}

// ---- groups ----

// Groups that a process is in, in the order in which they are opened. The last two divide the data
// group: ranks that share the experts of a layer, and ranks that have the same experts. Without
// divided experts both have one rank.
typedef enum {
    GRID_TENSOR,
    GRID_CONTEXT,
    GRID_DATA,
    GRID_PIPE,
    GRID_EXPERTS,
    GRID_SAME_EXPERTS,
    GRID_GROUPS
} GridGroup;

// A group of a process: its rank in the group, the group's size, and the lowest rank of its
// processes among all, which identifies the group.
typedef struct {
    int rank, size, first;
} GridMember;

GridMember grid_member(const Grid* grid, GridGroup group);

// True if a group of GPUs can use the communicator of all processes: it has all of them, and its
// exchanges are on the same stream as the data group's. On another stream they would wait, since
// NCCL lets an operation wait for all earlier ones of its communicator, on any stream.
int grid_is_of_all(const Grid* grid, GridGroup group);

// Sets text to the place in the dimensions above 1, "tensor 1, stage 2", or to "".
void grid_place(char* text, size_t room, const Grid* grid);

// ---- legal grids ----

enum {
    GRID_ERROR_BYTES = 256,
    GRID_UNIT = 8 // rows of a part start at multiples of 16 bytes, in 16 bits
};

// The run that a grid must suit.
typedef struct {
    ModelConfig cfg; // the whole model; no layers: not known yet, only processes are compared
    int T;           // 0: not known yet
    int ranks;       // processes in all
    int node_ranks;  // processes of a machine: the most that grid_next puts into a tensor group
    int unit;        // heads and hidden units of a part are a multiple of it, in columns: GRID_UNIT
} GridRun;

// Returns 1 if a run can be divided this way. If not, returns 0 and sets `error` to what was asked
// and the nearest shape that works. shape.data is ignored: it follows from the other members.
int grid_check(GridShape shape, const GridRun* run, char error[GRID_ERROR_BYTES]);

// Returns the number that must divide the tokens of a sequence: a part for each tensor rank, and in
// a context group two chunks for each of its processes.
int grid_tokens_unit(GridShape shape);

// Returns a shape that has passed grid_check, with its data ranks filled in.
GridShape grid_complete(GridShape shape, int ranks);

// Sets the next legal shape of all processes of a run, complete; returns 0 after the last. Start
// with all zeros. P counts slowest, then c (powers of 2), and t (at most node_ranks) fastest.
int grid_next(GridShape* shape, const GridRun* run);

#ifdef __cplusplus
}
#endif

#ifdef GRID_IMPLEMENTATION

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/sizes.h"

Grid grid_of(GridShape shape, int rank) {
    const int q = rank / shape.tensor, d = q / shape.context, p = d / shape.data;
    const Grid grid = {shape, rank % shape.tensor, q % shape.context, d % shape.data, p};
    return grid;
}

int grid_rank(const Grid* grid) {
    const GridShape shape = grid->shape;
    return ((grid->stage * shape.data + grid->data_rank) * shape.context + grid->context_rank) *
               shape.tensor +
           grid->tensor_rank;
}

GridMember grid_member(const Grid* grid, GridGroup group) {
    const GridShape shape = grid->shape;
    const int e = grid_experts(shape);
    Grid first = *grid;
    GridMember member = {0, 1, 0};
    switch (group) {
    case GRID_TENSOR:
        member.rank = grid->tensor_rank, member.size = shape.tensor;
        first.tensor_rank = 0;
        break;
    case GRID_CONTEXT:
        member.rank = grid->context_rank, member.size = shape.context;
        first.context_rank = 0;
        break;
    case GRID_DATA:
        member.rank = grid->data_rank * shape.context + grid->context_rank;
        member.size = shape.data * shape.context;
        first.data_rank = first.context_rank = 0;
        break;
    case GRID_PIPE:
        member.rank = grid->stage, member.size = shape.pipeline;
        first.stage = 0;
        break;
    case GRID_EXPERTS:
        member.rank = grid->data_rank % e, member.size = e;
        first.data_rank -= member.rank;
        break;
    case GRID_SAME_EXPERTS:
        if (e > 1) {
            member.rank = grid->data_rank / e, member.size = shape.data / e;
            first.data_rank %= e;
        }
        break;
    case GRID_GROUPS:
        assert(!"a group");
        break;
    }
    member.first = grid_rank(&first);
    return member;
}

int grid_is_of_all(const Grid* grid, GridGroup group) {
    const int in_layers = group == GRID_TENSOR || group == GRID_CONTEXT || group == GRID_EXPERTS;
    return grid_member(grid, group).size == grid_size(grid->shape) &&
           !(in_layers && grid_has_several_streams(grid->shape));
}

void grid_place(char* text, size_t room, const Grid* grid) {
    const struct {
        const char* word;
        int rank, size;
    } places[] = {{"tensor", grid->tensor_rank, grid->shape.tensor},
                  {"context", grid->context_rank, grid->shape.context},
                  {"data", grid->data_rank, grid_is_plain(grid->shape) ? 1 : grid->shape.data},
                  {"experts", grid_member(grid, GRID_EXPERTS).rank, grid_experts(grid->shape)},
                  {"stage", grid->stage, grid->shape.pipeline}};
    size_t at = 0;
    *text = '\0';
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        if (places[i].size > 1 && at < room) {
            at += (size_t)snprintf(text + at, room - at, "%s%s %d", at ? ", " : "", places[i].word,
                                   places[i].rank);
        }
    }
}

// ---- legal grids ----

// Returns why t ranks cannot cut a model, in `text`; NULL if they can.
static const char* grid_uncut_(char text[GRID_ERROR_BYTES], int t, const GridRun* run) {
    return run->cfg.L > 0 ? part_uncut(text, GRID_ERROR_BYTES, run->cfg, t, run->unit) : NULL;
}

// Rules: each allows a member of the shape or not, whatever the members below it are.
typedef int (*GridRule_)(GridShape shape, const GridRun* run);

static int grid_allows_tensor_(GridShape shape, const GridRun* run) {
    char text[GRID_ERROR_BYTES];
    return run->ranks % shape.tensor == 0 && !grid_uncut_(text, shape.tensor, run);
}

static int grid_allows_context_(GridShape shape, const GridRun* run) {
    return run->ranks % (shape.tensor * shape.context) == 0;
}

// Returns the most stages: each has a layer, or two that share their parameters.
static int grid_most_stages_(const GridRun* run) {
    return run->cfg.L > 0 ? run->cfg.L / model_copy_repeats(run->cfg) : run->ranks;
}

static int grid_allows_pipeline_(GridShape shape, const GridRun* run) {
    return run->ranks % (shape.tensor * shape.context * shape.pipeline) == 0 &&
           shape.pipeline <= grid_most_stages_(run);
}

// Expert groups are neighbors in the data group, and all their ranks have equally many experts.
static int grid_allows_experts_(GridShape shape, const GridRun* run) {
    const int e = grid_experts(shape), E = run->cfg.E;
    return grid_allows_pipeline_(shape, run) &&
           run->ranks / (shape.tensor * shape.context * shape.pipeline) % e == 0 &&
           (e == 1 || run->cfg.L == 0 || (E > 0 && E % e == 0));
}

int grid_tokens_unit(GridShape shape) { return shape.tensor * (shape.context > 1 ? 2 * shape.context : 1); }

static int grid_allows_(GridShape shape, const GridRun* run) {
    return grid_allows_tensor_(shape, run) && grid_allows_context_(shape, run) &&
           grid_allows_experts_(shape, run) && run->T % grid_tokens_unit(shape) == 0;
}

// Appends "; wanted 2 or 4": the nearest values of *member, a member of *shape, that a rule allows,
// up to `most`. 1 is named only if no other is.
static void grid_append_nearest_(char* error, GridShape* shape, int* member, int most, GridRule_ rule,
                                 const GridRun* run) {
    const int asked = *member;
    const size_t at = strlen(error);
    int below = asked - 1, above = asked + 1;
    for (*member = below; below > 1 && !rule(*shape, run); *member = --below) {
    }
    for (*member = above; above <= most && !rule(*shape, run); *member = ++above) {
    }
    *member = asked;
    if (below > 1 && above <= most) {
        snprintf(error + at, GRID_ERROR_BYTES - at, "; wanted %d or %d", below, above);
    } else {
        snprintf(error + at, GRID_ERROR_BYTES - at, "; wanted %d", above <= most ? above : int_max(below, 1));
    }
}

static void grid_refuse_tensor_(char* error, GridShape shape, const GridRun* run) {
    char text[GRID_ERROR_BYTES];
    const int at = snprintf(error, GRID_ERROR_BYTES, "--tensor-parallel %d, ", shape.tensor);
    char* reason = error + at;
    const size_t room = GRID_ERROR_BYTES - (size_t)at;
    if (run->ranks % shape.tensor != 0) {
        snprintf(reason, room, "%d process%s", run->ranks, run->ranks == 1 ? "" : "es");
    } else {
        snprintf(reason, room, "%.150s", grid_uncut_(text, shape.tensor, run));
    }
    grid_append_nearest_(error, &shape, &shape.tensor, run->ranks, grid_allows_tensor_, run);
}

// Sets error to "--context-parallel 3, 8 processes in groups of 2".
static void grid_refuse_ranks_(char* error, const char* option, int value, const GridRun* run, int group) {
    const int at = snprintf(error, GRID_ERROR_BYTES, "%s %d, %d process%s", option, value, run->ranks,
                            run->ranks == 1 ? "" : "es");
    if (group > 1) {
        snprintf(error + at, GRID_ERROR_BYTES - (size_t)at, " in groups of %d", group);
    }
}

static void grid_refuse_pipeline_(char* error, GridShape shape, const GridRun* run) {
    const int group = shape.tensor * shape.context;
    if (shape.pipeline > grid_most_stages_(run)) {
        snprintf(error, GRID_ERROR_BYTES, "--pipeline-parallel %d, %d layers%s", shape.pipeline, run->cfg.L,
                 model_copy_repeats(run->cfg) > 1 ? " that share their parameters in pairs" : "");
    } else {
        grid_refuse_ranks_(error, "--pipeline-parallel", shape.pipeline, run, group);
    }
    // more stages may be more than the layers, if these are not known yet
    const int most = run->cfg.L > 0 ? run->ranks : shape.pipeline;
    grid_append_nearest_(error, &shape, &shape.pipeline, most, grid_allows_pipeline_, run);
}

static void grid_refuse_experts_(char* error, GridShape shape, const GridRun* run) {
    const int group = shape.tensor * shape.context * shape.pipeline;
    if (run->cfg.L > 0 && run->cfg.E == 0) {
        snprintf(error, GRID_ERROR_BYTES, "--expert-parallel %d, a model without experts", shape.experts);
    } else if (run->ranks / group % shape.experts == 0) {
        snprintf(error, GRID_ERROR_BYTES, "--expert-parallel %d, %d experts", shape.experts, run->cfg.E);
    } else {
        grid_refuse_ranks_(error, "--expert-parallel", shape.experts, run, group);
    }
    grid_append_nearest_(error, &shape, &shape.experts, run->ranks, grid_allows_experts_, run);
}

static void grid_refuse_tokens_(char* error, GridShape shape, const GridRun* run) {
    int at = snprintf(error, GRID_ERROR_BYTES, "--seq-len %d", run->T);
    if (shape.context > 1) {
        at += snprintf(error + at, GRID_ERROR_BYTES - (size_t)at, ", --context-parallel %d", shape.context);
    }
    if (shape.tensor > 1) {
        at += snprintf(error + at, GRID_ERROR_BYTES - (size_t)at, ", --tensor-parallel %d", shape.tensor);
    }
    snprintf(error + at, GRID_ERROR_BYTES - (size_t)at, "; wanted a multiple of %d", grid_tokens_unit(shape));
}

int grid_check(GridShape shape, const GridRun* run, char error[GRID_ERROR_BYTES]) {
    if (!grid_allows_tensor_(shape, run)) {
        grid_refuse_tensor_(error, shape, run);
    } else if (!grid_allows_context_(shape, run)) {
        grid_refuse_ranks_(error, "--context-parallel", shape.context, run, shape.tensor);
        grid_append_nearest_(error, &shape, &shape.context, run->ranks, grid_allows_context_, run);
    } else if (!grid_allows_pipeline_(shape, run)) {
        grid_refuse_pipeline_(error, shape, run);
    } else if (!grid_allows_experts_(shape, run)) {
        grid_refuse_experts_(error, shape, run);
    } else if (run->T % grid_tokens_unit(shape) != 0) {
        grid_refuse_tokens_(error, shape, run);
    } else {
        *error = '\0';
    }
    return *error == '\0';
}

GridShape grid_complete(GridShape shape, int ranks) {
    shape.data = ranks / (shape.tensor * shape.context * shape.pipeline);
    shape.experts = grid_experts(shape);
    return shape;
}

// Sets the next shape within the bounds, legal or not; returns 0 after the last.
static int grid_count_(GridShape* shape, const GridRun* run) {
    if (shape->tensor == 0) {
        shape->tensor = shape->context = shape->pipeline = 1;
    } else if (shape->tensor < run->node_ranks) {
        shape->tensor++;
    } else if (2 * shape->context <= run->ranks) {
        shape->tensor = 1, shape->context *= 2;
    } else {
        shape->tensor = shape->context = 1, shape->pipeline++;
    }
    return shape->pipeline <= int_min(run->ranks, grid_most_stages_(run));
}

int grid_next(GridShape* shape, const GridRun* run) {
    while (grid_count_(shape, run)) {
        if (grid_allows_(*shape, run)) {
            *shape = grid_complete(*shape, run->ranks);
            return 1;
        }
    }
    return 0;
}

#endif // GRID_IMPLEMENTATION

#endif
