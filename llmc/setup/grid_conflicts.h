/*
grid_conflicts.h -- refuses grids of processes (grid.h) into which a run cannot be divided: for the
user, with what would work, and for the search of --fit.
*/
#ifndef LLMC_GRID_CONFLICTS_H
#define LLMC_GRID_CONFLICTS_H

#include "llmc/parallel/grid.h"
#include "llmc/setup/settled.h"

#ifdef __cplusplus
extern "C" {
#endif

// Ends the program if the model or the run cannot be divided into its grid, and says which option
// was given and what would work.
void setup_check_grid(const Settled* s);

// Returns the sizes of a run that its grid must suit.
GridRun setup_grid_run(const Settled* s);

// Returns 1 if setup_check_grid accepts the run in a grid of this shape. A plan may have grids that
// the trainer cannot run yet.
int setup_allows_grid(const Settled* s, GridShape shape);

#ifdef __cplusplus
}
#endif

#ifdef GRID_CONFLICTS_IMPLEMENTATION

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/sizes.h"
#include "llmc/bf16/tile_layout.h"
#include "llmc/data/dataloader.h"
#include "llmc/layers/weight.h"
#include "llmc/ops/q8_amx.h"
#include "llmc/ops/attention.h"
#include "llmc/parallel/pipeline.h"
#include "llmc/setup/options_values.h"
#include "llmc/setup/resolve.h"

// Each check below returns 1 if a run suits its grid. If not, it returns 0 and sets `error`, of
// ERROR_BYTES, to a line for the user.

__attribute__((format(printf, 2, 3))) static int grid_refuses_(char* error, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, ERROR_BYTES, format, args);
    va_end(args);
    return 0;
}

static const OptionRow* grid_option_(const char* name) {
    int i = 0;
    while (strcmp(OPTION_TABLE[i].name, name) != 0) {
        i++;
    }
    return &OPTION_TABLE[i];
}

// Checks that the trainer can run such a grid.
static int grid_suits_trainer_(char* error, const Settled* s) {
    const Options* o = &s->options;
    const GridShape shape = s->ranks.grid.shape;
    if (o->program.trainer == OPTION_CPU || s->use != USE_TRAIN) {
        return 1;
    }
    return shape.pipeline == 1 || !o->teacher.path[0] ||
           grid_refuses_(error, "--pipeline-parallel %d, --teacher: only the CPU trainer has both; wanted 1",
                         shape.pipeline);
}

// Returns the unit of the columns of a part: whole vectors, and whole blocks of 8-bit numbers.
static int grid_part_unit_(const Options* o) {
    const int blocks = o->texts.quantize ? QUANTIZED_BLOCK : GRID_UNIT;
    return settled_state_in_8_bits(o) && !o->generates ? int_max(blocks, OPTIMIZER_BLOCK) : blocks;
}

// Returns the tile of the chunks that attention processes: a chunk is whole tiles.
static int grid_chunk_tile_(const Options* o) {
    return o->program.trainer == OPTION_GPU                   ? ATTENTION_ROW_ALIGN
           : (MatmulPrecision)o->memory.matmul == MATMUL_BF16 ? BF16_TILE
                                                              : 1;
}

// Returns the number that must divide all sequence lengths in a grid.
static int grid_lengths_unit_(const Options* o, GridShape shape) {
    const int unit = grid_tokens_unit(shape), tile = grid_chunk_tile_(o), tiles = 2 * shape.context * tile;
    return shape.context == 1 ? unit : tiles % unit == 0 ? tiles : unit * tile;
}

// Checks that the ranks of tensor and context groups can share sequences, which can have
// several lengths.
static int grid_suits_lengths_(char* error, const Settled* s) {
    const Options* o = &s->options;
    const GridShape shape = s->ranks.grid.shape;
    const Stages lengths = settled_lengths(o);
    const int unit = grid_lengths_unit_(o, shape), is_context = shape.context > 1;
    if (o->batch.seq_len % unit != 0) {
        return grid_refuses_(error,
                             "--seq-len %d, --context-parallel %d; wanted a multiple of %d: two chunks for "
                             "each process, in whole tiles of %d tokens",
                             o->batch.seq_len, shape.context, unit, grid_chunk_tile_(o));
    }
    if ((o->data.pack == PACK_DYNAMIC || o->data.pack == PACK_UNIFORM) && DATALOADER_WIDTH % unit != 0) {
        char pack[OPTION_TEXT_BYTES];
        return grid_refuses_(error, "--pack %s, --%s %d: batches are multiples of %d tokens wide; wanted %s",
                             option_text(o, grid_option_("pack"), pack),
                             is_context ? "context-parallel" : "tensor-parallel",
                             is_context ? shape.context : shape.tensor, DATALOADER_WIDTH,
                             is_context ? "--pack stream" : "2, 4 or 8");
    }
    for (int i = 0; i < lengths.count; i++) {
        if (lengths.stage[i].value % unit != 0) {
            return grid_refuses_(error, "--seq-len-schedule %s: %lld tokens; wanted multiples of %d",
                                 o->batch.seq_len_schedule, (long long)lengths.stage[i].value, unit);
        }
    }
    return 1;
}

// Checks for options that need all tokens of a sequence in each process.
static int grid_suits_chunks_(char* error, const Settled* s) {
    const Options* o = &s->options;
    const int c = s->ranks.grid.shape.context;
    if (c > 1 && o->memory.update_in_backward) {
        return grid_refuses_(error, "--context-parallel %d, --update-in-backward on; wanted off", c);
    }
    if (c > 1 && model_mixer(s->cfg) != MIXER_NONE) {
        return grid_refuses_(
            error,
            "--context-parallel %d, --arch %s, whose layers without attention need a whole text; wanted 1", c,
            model_architecture(s->cfg.arch)->word);
    }
    return c == 1 || s->cfg.E == 0 || o->optimizer.router_balance == 0 ||
           grid_refuses_(error,
                         "--context-parallel %d, --router-balance %g, which is a loss of all tokens of a "
                         "micro-batch; wanted 0",
                         c, (double)o->optimizer.router_balance);
}

// Checks for options that need a complete gradient before the end of the backward pass.
static int grid_suits_tensor_(char* error, const Settled* s) {
    const Options* o = &s->options;
    const int t = s->ranks.grid.shape.tensor;
    if (t > 1 && s->cfg.has_values) {
        return grid_refuses_(error,
                             "--tensor-parallel %d, --value-embeddings on, whose tables are not cut; wanted "
                             "--tensor-parallel 1",
                             t);
    }
    if (t == 1 || s->use != USE_TRAIN) {
        return 1;
    }
    return !o->memory.update_in_backward ||
           grid_refuses_(error,
                         "--tensor-parallel %d, --update-in-backward on; wanted off: the gradients of norms "
                         "are complete at the end of a step",
                         t);
}

// Checks for options that need all layers in each process.
static int grid_suits_stages_(char* error, const Settled* s) {
    const Options* o = &s->options;
    const int P = s->ranks.grid.shape.pipeline;
    if (P == 1) {
        return 1;
    }
    if (o->ranks.zero == 3) {
        return grid_refuses_(error,
                             "--pipeline-parallel %d, --zero 3, which would gather the parameters in every "
                             "micro-step; wanted --zero 1",
                             P);
    }
    if (s->cfg.share != SHARE_OFF && s->cfg.share != SHARE_PAIRS) {
        return grid_refuses_(error,
                             "--pipeline-parallel %d, --share-layers %s; wanted pairs or off: stages share "
                             "no parameters",
                             P, o->model.share_layers);
    }
    if (model_has_additions(s->cfg)) {
        return grid_refuses_(error,
                             "--pipeline-parallel %d, --%s on, with which blocks of all stages read the "
                             "embedding; wanted --pipeline-parallel 1",
                             P, model_addition_word(s->cfg));
    }
    if (s->freeze.first_block > 0) {
        return grid_refuses_(error,
                             "--pipeline-parallel %d, --freeze %s; wanted --pipeline-parallel 1, since the "
                             "backward pass ends at block %d",
                             P, o->optimizer.freeze, s->freeze.first_block);
    }
    if (o->memory.offload_residuals || o->memory.update_in_backward) {
        return grid_refuses_(error, "--pipeline-parallel %d, --%s on; wanted off", P,
                             o->memory.offload_residuals ? "offload-residuals" : "update-in-backward");
    }
    return o->memory.graph != 1 ||
           grid_refuses_(error,
                         "--pipeline-parallel %d, --graph on; wanted auto: a stage has other "
                         "passes between the two of a micro-step",
                         P);
}

// Checks for options that have not been tried with divided experts, or that need a whole model.
static int grid_suits_experts_(char* error, const Settled* s) {
    static const char* const beside[] = {"tensor-parallel",  "context-parallel", "pipeline-parallel",
                                         "share-layers",     "freeze",           "update-in-backward",
                                         "teacher",          "offload-params",   "offload-optimizer",
                                         "offload-residuals"};
    const Options* o = &s->options;
    const int e = grid_experts(s->ranks.grid.shape);
    for (size_t i = 0; i < sizeof(beside) / sizeof(beside[0]) && e > 1; i++) {
        const OptionRow* row = grid_option_(beside[i]);
        char value[OPTION_TEXT_BYTES];
        if (options_changed(o, row->name)) {
            return grid_refuses_(error, "--expert-parallel %d, --%s %s; wanted --expert-parallel 1", e,
                                 row->name, option_text(o, row, value));
        }
    }
    if (e > 1 && o->ranks.shards != OPTION_AUTO && o->ranks.shards != ranks_data(&s->ranks).size) {
        return grid_refuses_(error, "--expert-parallel %d, --shard-ranks %d; wanted auto: all processes", e,
                             o->ranks.shards);
    }
    if (e > 1 && o->ranks.zero == 3) {
        return grid_refuses_(error,
                             "--expert-parallel %d, --zero 3, which would gather the experts in every "
                             "micro-step; wanted --zero 2",
                             e);
    }
    if (e > 1 && o->memory.graph == 1) {
        return grid_refuses_(error,
                             "--expert-parallel %d, --graph on; wanted auto: the host waits for the number "
                             "of rows in each layer",
                             e);
    }
    return e == 1 || s->use != USE_TRAIN || o->optimizer.name != OPTIMIZER_ADAFACTOR ||
           grid_refuses_(error,
                         "--expert-parallel %d, --optimizer adafactor, which updates all experts of a layer "
                         "together; wanted another optimizer",
                         e);
}

// Checks that --pipeline-layers gives each stage its layers.
static int grid_suits_layers_(char* error, const Settled* s) {
    int layers[MODEL_MAX_LAYERS];
    const char* list = s->options.ranks.pipeline_layers;
    return !list[0] || pipeline_parse_layers(layers, s->cfg, s->ranks.grid.shape.pipeline, list, error);
}

// Checks that a teacher can be divided like its student. The student's last stage has the whole
// teacher.
static int grid_suits_teacher_(char* error, const Settled* s) {
    const Options* o = &s->options;
    char of_teacher[GRID_ERROR_BYTES];
    if (!settled_has_teacher(s)) {
        return 1;
    }
    const int words = settled_padded_vocab(s);
    const Settled teacher = setup_teacher(s);
    const GridRun run = setup_grid_run(&teacher);
    if (!grid_check(teacher.ranks.grid.shape, &run, of_teacher)) {
        return grid_refuses_(error, "--teacher %s: %s", o->teacher.path, of_teacher);
    }
    return s->ranks.grid.shape.tensor == 1 || teacher.cfg.Vp == words ||
           grid_refuses_(
               error,
               "--tensor-parallel %d, --teacher %s with %d words, %d with padding; wanted %d, as the "
               "model has: ranks have the same vocabulary rows",
               s->ranks.grid.shape.tensor, o->teacher.path, teacher.cfg.V, teacher.cfg.Vp, words);
}

// Checks that one tensor group generates text.
static int grid_suits_use_(char* error, const Settled* s) {
    const GridShape shape = s->ranks.grid.shape;
    const int divides = shape.context > 1 || shape.pipeline > 1;
    return s->use != USE_GENERATE || (!divides && shape.data == 1) ||
           grid_refuses_(error,
                         "%d processes, --tensor-parallel %d: text is generated by one tensor group; wanted "
                         "mpirun -n %d ... --tensor-parallel %d",
                         grid_size(shape), shape.tensor, shape.tensor, shape.tensor);
}

// Checks the model and the processes.
static int grid_suits_model_(char* error, const Settled* s) {
    const GridRun run = setup_grid_run(s);
    return grid_check(s->ranks.grid.shape, &run, error);
}

static int grid_suits_run_(char* error, const Settled* s) {
    return grid_suits_model_(error, s) && grid_suits_layers_(error, s) && grid_suits_lengths_(error, s) &&
           grid_suits_teacher_(error, s) && grid_suits_use_(error, s) && grid_suits_chunks_(error, s) &&
           grid_suits_tensor_(error, s) && grid_suits_stages_(error, s) && grid_suits_experts_(error, s);
}

GridRun setup_grid_run(const Settled* s) {
    const Options* o = &s->options;
    const GridRun run = {s->cfg, o->batch.seq_len, ranks_size(&s->ranks), s->ranks.node_ranks,
                         grid_part_unit_(o)};
    return run;
}

void setup_check_grid(const Settled* s) {
    char error[ERROR_BYTES];
    if (!grid_suits_run_(error, s) || !grid_suits_trainer_(error, s)) {
        die_usage("%s", error);
    }
}

int setup_allows_grid(const Settled* s, GridShape shape) {
    char error[ERROR_BYTES];
    const Options* o = &s->options;
    const int zero = options_given(o, "zero") || shape.pipeline == 1 ? o->ranks.zero : 1;
    const Settled there =
        settled_in_grid(s, grid_of(shape, ranks_rank(&s->ranks)), zero, shape.data * shape.context);
    return grid_suits_run_(error, &there) && (o->plan || grid_suits_trainer_(error, &there));
}

#endif // GRID_CONFLICTS_IMPLEMENTATION

#endif
