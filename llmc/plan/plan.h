/*
plan.h -- prints the needs of a run: tensors and their sizes, memory by kind, disk, work and time.
*/
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include <stddef.h>
#include <stdio.h>

#include "llmc/base/memory.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/setup/settled.h"
#include "llmc/cost/cost.h"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/optim/loss_scale.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/owners.h"
#include "llmc/parallel/zero.h"
#include "llmc/cost/mfu.h"

#ifdef __cplusplus
extern "C" {
#endif

// Rate between the GPU and the host, each way: PCIe 5 x16. dev/bench/hardware.py also assumes it.
#define PLAN_BUS_BYTES_PER_S 50e9
// Rate of a drive. dev/bench/hardware.py also assumes it.
#define PLAN_DRIVE_BYTES_PER_S 6e9

// A dry ledger of all that a model takes.
typedef struct {
    Memory memory;
    int chunk;           // tokens that the classifier processes at a time
    size_t logits_bytes; // their logits, part of the activations; 0: no classifier in this stage
} ModelPlan;

// Sets the plan of a model with these settings. It needs no device.
typedef void (*PlanModel)(ModelPlan* plan, const Settled* s);

// Everything that a run takes, and the rates of its device.
typedef struct {
    ModelPlan model;         // including everything else that the run takes
    char device[256];        // name of the device
    char device_kind[64];    // addition to its name: " (sm_90), BF16"
    double peak;             // peak of the device, FLOP/s
    MfuMeasure measure_peak; // function that measures the peak again (mfu.h); NULL: none
    int in_place;            // true: weights and state are on the host in the layout of files
    CheckpointMemory copy;   // functions that pin the copy of a save
    LossScale loss_scale;    // loss scale of a new run
    CostRates rates;         // rates of the operations, for --plan and --fit only
    int64_t eval_sequences;  // sequences of a validation, for --plan only
} TrainerPlan;

// Returns the plan of a model, with the copy that its checkpoints are written from.
ModelPlan plan_model(PlanModel model, const Settled* s);

// Moves between a place and the device in a step, and their time if nothing hides it. The bus works
// in both directions at once, a drive in one.
typedef struct {
    double bytes, in, out; // bytes that move at all; moves to the device, and back
    double s;
} PlanMoves;
PlanMoves plan_moves(const Memory* memory, MemoryPlace place);

// Returns the planned time of a step on one rank, including the moves of the ledger.
CostUpdate plan_update(const Settled* s, const CostRates* rates, const Memory* memory);

// Prints "planned: " and the memory by place and kind, without a newline.
void plan_print_kinds(FILE* file, const Memory* memory);

// Prints a line on the model, one on what --freeze freezes, if anything, and one on the memory.
void plan_print_memory(FILE* file, const Settled* s, const Memory* memory);

// Prints how much each rank sends in a step, if several ranks train.
void plan_print_traffic(FILE* file, const Settled* s);

// Prints the memory in MiB as members of a JSON object, each after a comma; `memory` is a Memory.
void plan_print_json(FILE* file, const void* memory);

// Prints the plan: memory, disk, work and time.
void plan_print(FILE* file, const Settled* s, const TrainerPlan* plan);

#ifdef __cplusplus
}
#endif

#ifdef PLAN_IMPLEMENTATION

#include <math.h>
#include <stdlib.h>

#include "llmc/base/text_buffer.h"
#include "llmc/base/units.h"
#include "llmc/base/enum_words.h"
#include "llmc/checkpoint/load_save.h"
#include "llmc/log/text_wrap.h"
#include "llmc/setup/resolve.h"

// Counts the copy that checkpoints are written from. On a GPU each save needs it; on the host only
// a save that the run does not wait for.
static void plan_count_copy_(Memory* memory, const Settled* s) {
    const Options* o = &s->options;
    const int is_gpu = o->program.trainer == OPTION_GPU,
              copies = is_gpu ? o->output.dir[0] && s->use == USE_TRAIN : checkpoints_copy(o);
    OptimizerState state;
    Map map;
    settled_state(&state, &map, s);
    if (copies) {
        memory_count(memory, is_gpu ? "pinned copy to save" : "copy to save",
                     is_gpu ? MEMORY_HOST : MEMORY_DEVICE,
                     checkpoints_bytes(&map.of, map.rank, &state, s->saved_dtype, o->output.model_file_gb));
    }
    if (o->output.dir[0] && s->use == USE_TRAIN) {
        memory_count(memory, "average to save", is_gpu ? MEMORY_HOST : MEMORY_DEVICE,
                     checkpoints_average_bytes(&map.of, map.rank, s->saved_dtype, o->output.model_file_gb));
    }
}

// Returns the bytes of a group in fp32 that a host needs while it loads weights that it does not
// have as files have them: in 8 bits, or a part.
static size_t plan_load_bytes_(const Settled* s) {
    const MapOf of = settled_map(s, 1);
    return settled_has_blocks(s) || !map_is_plain(&of) ? load_bytes(&of) : 0;
}

static void plan_count_load_(Memory* memory, const Settled* s) {
    size_t bytes = plan_load_bytes_(s);
    if (settled_has_teacher(s)) {
        const Settled teacher = setup_teacher(s);
        const size_t of_teacher = plan_load_bytes_(&teacher);
        bytes = bytes > of_teacher ? bytes : of_teacher;
    }
    if (model_has_adapter(s->cfg)) {
        const Settled base = setup_base(s);
        const size_t of_base = plan_load_bytes_(&base);
        bytes = bytes > of_base ? bytes : of_base;
    }
    if (bytes > 0 && s->options.program.trainer == OPTION_CPU) {
        memory_count(memory, "weights to load", MEMORY_DEVICE, bytes);
    }
}

ModelPlan plan_model(PlanModel model, const Settled* s) {
    ModelPlan plan;
    model(&plan, s);
    plan_count_load_(&plan.memory, s);
    plan_count_copy_(&plan.memory, s);
    return plan;
}

static double plan_mib_(size_t bytes) { return (double)bytes / (1 << 20); }

// Prints `words` and the memory at a place by kind; prints nothing if the place is empty.
static void plan_print_place_(FILE* file, const Memory* memory, MemoryPlace place, const char* words) {
    const size_t total = memory_bytes(memory, place);
    const char* joint = " = ";
    if (total) {
        fprintf(file, "%s%.1f MiB", words, plan_mib_(total));
    }
    for (int i = 0; i < memory->num_entries; i++) {
        const MemoryEntry* kind = &memory->entries[i];
        if (kind->place == place && kind->bytes) {
            fprintf(file, "%s%s %.1f", joint, kind->kind, plan_mib_(kind->bytes));
            joint = " + ";
        }
    }
}

static void plan_print_places_(FILE* file, const Memory* memory) {
    plan_print_place_(file, memory, MEMORY_DEVICE, "");
    plan_print_place_(file, memory, MEMORY_HOST, "; on the host: ");
    plan_print_place_(file, memory, MEMORY_DISK, "; on disk: ");
}

void plan_print_kinds(FILE* file, const Memory* memory) {
    fprintf(file, "planned: ");
    plan_print_places_(file, memory);
}

// Prints how much is frozen, and where the backward pass ends.
static void plan_print_freeze_(FILE* file, const Settled* s) {
    const Freeze* freeze = &s->freeze;
    const int first = freeze->first_block, L = s->cfg.L;
    if (s->options.optimizer.freeze[0] == '\0') {
        return;
    }
    fprintf(file, "freeze: %s of %s parameters are frozen",
            units_parameters(freeze_count(freeze, s->cfg)).text,
            units_parameters(model_count_stored(s->cfg)).text);
    if (freeze_has_classifier(freeze, s->cfg)) {
        fprintf(file, ", including the output layer%s", s->cfg.has_head ? "" : " (tied to wte)");
    }
    if (first > 0) {
        fprintf(file, "; the backward pass ends %s %d", first < L ? "at block" : "above block",
                first < L ? first : L - 1);
    }
    fputc('\n', file);
}

// Prints the architecture and the sizes that GPT-2 does not choose.
static void plan_print_architecture_(FILE* file, ModelConfig cfg) {
    if (cfg.arch == ARCH_GPT2) {
        return;
    }
    int with_window = 0;
    fprintf(file, "architecture: %s, heads of %d, %d of keys, %d hidden units%s",
            model_architecture(cfg.arch)->word, model_head_size(cfg), model_key_heads(cfg), model_hidden(cfg),
            cfg.has_head ? ", own output layer" : "");
    if (cfg.E > 0) {
        fprintf(file, ", %d experts, %d for each token", cfg.E, cfg.E_used);
    }
    if (cfg.dense_layers > 0) {
        fprintf(file, ", each of %d hidden units; none in the first %d layer%s", model_expert_hidden(cfg),
                cfg.dense_layers, words_s(cfg.dense_layers));
    }
    if (cfg.Fs > 0) {
        fprintf(file, ", one more of %d hidden units for all tokens", cfg.Fs);
    }
    for (int l = 0; l < cfg.L; l++) {
        with_window += model_window(cfg, l) > 0;
    }
    if (with_window > 0) {
        fprintf(file, ", a window of %d in %d layer%s", cfg.window, with_window, words_s(with_window));
    }
    fputc('\n', file);
}

// Prints the adapter, which is all that is trained.
static void plan_print_adapter_(FILE* file, ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const char* separator = "adapter: ";
    model_parameter_rows(rows, cfg);
    for (int m = 0; m < ADAPT_MATRICES; m++) {
        if (cfg.adapter.rank[m] > 0) {
            fprintf(file, "%srank %d of %s", separator, cfg.adapter.rank[m],
                    rows[model_adapted_row((AdaptedMatrix)m)].name);
            separator = ", ";
        }
    }
    if (model_has_adapter(cfg)) {
        fprintf(file, ": %s parameters; the model's are frozen\n",
                units_parameters(model_count_parameters(cfg)).text);
    }
}

// Prints that the average of the weights is a copy of them.
static void plan_print_average_(FILE* file, const Settled* s) {
    if (s->optimizer.average.is_kept) {
        fprintf(file, "average: %s keeps a copy of the weights in fp32%s\n", s->options.optimizer.average,
                s->options.memory.offload_optimizer ? ", with the optimizer's state" : "");
    }
}

static void plan_describe_(FILE* file, const Settled* s, const Memory* memory) {
    const ModelConfig cfg = s->cfg;
    const char* each = s->options.program.trainer == OPTION_GPU ? " per GPU" : " per process";
    fprintf(file,
            "model: %d layer%s, %d channel%s, %d head%s, context %d, vocabulary %d (padded to %d): %s "
            "parameters",
            cfg.L, words_s(cfg.L), cfg.C, words_s(cfg.C), cfg.NH, words_s(cfg.NH), cfg.max_T, cfg.V, cfg.Vp,
            units_parameters(model_count_parameters(model_of_base(cfg))).text);
    if (cfg.E > 0) {
        fprintf(file, ", %s active", units_parameters(model_count_active(cfg)).text);
    }
    if (cfg.share != SHARE_OFF) {
        fprintf(file, ", %s in memory (--share-layers %s)", units_parameters(model_count_stored(cfg)).text,
                s->options.model.share_layers);
    }
    fputc('\n', file);
    plan_print_architecture_(file, cfg);
    plan_print_adapter_(file, cfg);
    plan_print_freeze_(file, s);
    plan_print_average_(file, s);
    fprintf(file, "memory%s: ", ranks_size(&s->ranks) > 1 ? each : "");
    plan_print_places_(file, memory);
    fputc('\n', file);
}

void plan_print_memory(FILE* file, const Settled* s, const Memory* memory) {
    TextBuffer lines;
    text_buffer_open(&lines, "the plan");
    plan_describe_(lines.file, s, memory);
    char* text = text_buffer_close(&lines);
    text_wrap_lines(file, text);
    free(text);
}

// Returns the bytes of matrices that a rank sends in a step, to their owners and back.
static double plan_operand_bytes_(const Settled* s) {
    OptimizerState state;
    Map map;
    settled_state(&state, &map, s);
    return owners_bytes(&state);
}

// Prints the bytes that a process sends for ZeRO.
static void plan_print_zero_traffic_(FILE* file, const Settled* s) {
    const int shards = s->ranks.shards;
    const MicroSteps steps = zero_micro_steps(&s->zero, s->sequences, s->options.batch.size);
    const MapOf of = settled_map(s, 1);
    const ZeroTraffic traffic = zero_traffic(&of, grid_rank(&s->ranks.grid), micro_steps_count(&steps),
                                             s->gradient_bytes, s->element_bytes, plan_operand_bytes_(s));
    fprintf(file, " %.1f MiB", traffic.within / (1 << 20));
    if (shards < ranks_data(&s->ranks).size) {
        fprintf(file, " within its %d, and %.1f MiB to the other replicas", shards,
                traffic.between / (1 << 20));
    } else if (!grid_is_plain(s->ranks.grid.shape)) {
        fprintf(file, " to its data group");
    }
}

void plan_print_traffic(FILE* file, const Settled* s) {
    if (grid_size(s->ranks.grid.shape) == 1 || s->use != USE_TRAIN) {
        return;
    }
    const CostTraffic traffic = cost_traffic(s);
    const struct {
        double bytes;
        const char* to;
    } parts[] = {{traffic.tensor, "its tensor group"},
                 {traffic.context, "its context group"},
                 {traffic.experts, "its expert group"},
                 {traffic.pipeline, "other stages"}};
    const char* separator = "";
    fprintf(file, "each update: every %s sends",
            s->options.program.trainer == OPTION_GPU ? "GPU" : "process");
    if (ranks_data(&s->ranks).size > 1) {
        plan_print_zero_traffic_(file, s);
        separator = ",";
    }
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (parts[i].bytes > 0) {
            fprintf(file, "%s %.1f MiB to %s", separator, parts[i].bytes / (1 << 20), parts[i].to);
            separator = ",";
        }
    }
    fputc('\n', file);
}

PlanMoves plan_moves(const Memory* memory, MemoryPlace place) {
    PlanMoves moves = {0, 0, 0, 0};
    for (int i = 0; i < memory->num_entries; i++) {
        const MemoryEntry* kind = &memory->entries[i];
        if (kind->place == place) {
            moves.bytes += kind->in > 0 ? (double)kind->bytes : 0;
            moves.in += kind->in * (double)kind->bytes;
            moves.out += kind->out * (double)kind->bytes;
        }
    }
    moves.s = place == MEMORY_DISK ? (moves.in + moves.out) / PLAN_DRIVE_BYTES_PER_S
                                   : fmax(moves.in, moves.out) / PLAN_BUS_BYTES_PER_S;
    return moves;
}

CostUpdate plan_update(const Settled* s, const CostRates* rates, const Memory* memory) {
    CostUpdate update = cost_update(s, rates);
    update.s[COST_MOVES] = plan_moves(memory, MEMORY_HOST).s + plan_moves(memory, MEMORY_DISK).s;
    return update;
}

static void plan_print_moves_(FILE* file, const Memory* memory, MemoryPlace place) {
    const PlanMoves moves = plan_moves(memory, place);
    const double gib = 1 << 30;
    if (moves.in > 0 && place == MEMORY_HOST) {
        fprintf(
            file,
            "offload: %.1f GiB on the host; an update moves %.1f GiB to the GPU and %.1f GiB back: %.3g s at "
            "%.0f GB/s each way (PCIe 5 x16), less what the GPU's work hides\n",
            moves.bytes / gib, moves.in / gib, moves.out / gib, moves.s, PLAN_BUS_BYTES_PER_S * 1e-9);
    } else if (moves.in > 0) {
        fprintf(
            file,
            "offload: %.1f GiB on disk; an update reads %.1f GiB and writes %.1f GiB: %.3g s at %.0f GB/s, "
            "if no other process uses the drive\n",
            moves.bytes / gib, moves.in / gib, moves.out / gib, moves.s, PLAN_DRIVE_BYTES_PER_S * 1e-9);
    }
}

// Prints how many tokens of a micro-batch have logits in memory at a time.
static void plan_print_classifier_(FILE* file, const Settled* s, const ModelPlan* plan) {
    if (plan->logits_bytes > 0 && s->use != USE_GENERATE) {
        fprintf(file, "classifier: %d of %zu tokens at a time, in %.1f MiB of the activations\n", plan->chunk,
                settled_pass_tokens(s), plan_mib_(plan->logits_bytes));
    }
}

// Prints the disk space of the checkpoints that the run leaves.
static void plan_print_disk_(FILE* file, const Settled* s) {
    const Options* o = &s->options;
    const int copies = 1 + s->optimizer.average.is_kept; // of fp32 weights
    const double bytes =
        copies * 4.0 * model_count_parameters(s->cfg) + optimizer_saved_bytes(s->optimizer, s->cfg);
    const double kept = checkpoints_kept(o, 0);
    if (kept > 0 && o->batch.steps > 0) {
        fprintf(file, "disk: %.0f checkpoint%s of at most %.1f MiB = %.1f MiB\n", kept, words_s(kept),
                bytes / (1 << 20), kept * bytes / (1 << 20));
    }
}

// Prints the planned speed and time of a step, and each kind that takes at least 1 % of it.
static void plan_print_update_(FILE* file, const CostUpdate* update, double tokens,
                               ActivationKind activation) {
    const double total = cost_total_s(update);
    const char* joint = ": ";
    fprintf(file, "speed: %.*f tok/s planned, %.3g s an update", tokens / total < 10, tokens / total, total);
    for (int kind = 0; kind < COST_KINDS; kind++) {
        if (update->s[kind] >= 0.01 * total) {
            fprintf(file, "%s%s %.0f %%", joint, cost_word((CostKind)kind, activation),
                    100 * update->s[kind] / total);
            joint = ", ";
        }
    }
    fputc('\n', file);
}

// Prints the rates behind the planned time, without kinds that have the rate of COST_MEMORY.
static void plan_print_rates_(FILE* file, const CostRates* rates, ActivationKind activation) {
    fprintf(file, "rates: %s:", rates->basis);
    for (int kind = 0; kind < COST_RATES; kind++) {
        if (kind == COST_MEMORY || rates->per_s[kind] != rates->per_s[COST_MEMORY]) {
            fprintf(file, "%s %s %s", kind ? "," : "", cost_word((CostKind)kind, activation),
                    units_rate(rates->per_s[kind], cost_has_flops((CostKind)kind) ? "FLOP" : "B").text);
        }
    }
    if (rates->fp8_per_s > 0) {
        fprintf(file, ", matmuls in fp8 %s", units_rate(rates->fp8_per_s, "FLOP").text);
    }
    fprintf(file, "; %.2g us a launch\n", rates->launch_s * 1e6);
}

// Prints the work of training and validation, and its time.
static void plan_print_work_(FILE* file, const Settled* s, const TrainerPlan* plan) {
    const Options* o = &s->options;
    const int ranks = ranks_size(&s->ranks);
    const double flops = freeze_flops_per_token(&s->freeze, s->cfg, o->batch.seq_len),
                 update = (double)o->batch.total;
    const CostUpdate speed = plan_update(s, &plan->rates, &plan->model.memory);
    if (o->batch.steps == OPTION_AUTO) {
        fprintf(file, "work: %.4g FLOP per token; how many tokens is known once the text is encoded\n",
                flops);
    } else {
        const Stages batches = settled_batches(o);
        const double tokens = stages_sum(&batches, o->batch.steps);
        const double at = o->eval.every > 0 ? floor((double)o->batch.steps / o->eval.every) : 0,
                     of_average = s->optimizer.average.is_kept ? at : 0,
                     validations = (o->eval.every > 0) + at + of_average;
        const double seen = validations * (double)plan->eval_sequences * o->batch.seq_len,
                     all = tokens + seen / 3;
        fprintf(
            file,
            "work: %.4g tokens x %.4g FLOP = %.4g FLOP; plus %.0f validation%s on %.4g tokens in total, at a "
            "third of the cost per token\n",
            tokens, flops, tokens * flops, validations, words_s(validations), seen);
        fprintf(file, "time: %s planned; %s at the peak of %s (%s%s)\n",
                units_time(all / update * cost_total_s(&speed)).text,
                units_time(all * flops / plan->peak / ranks).text, units_rate(plan->peak, "FLOP").text,
                plan->device, ranks > 1 ? ", each" : "");
    }
    plan_print_update_(file, &speed, update, model_activation(s->cfg));
    plan_print_rates_(file, &plan->rates, model_activation(s->cfg));
}

void plan_print(FILE* file, const Settled* s, const TrainerPlan* plan) {
    fputc('\n', file);
    plan_print_memory(file, s, &plan->model.memory);
    plan_print_classifier_(file, s, &plan->model);
    plan_print_moves_(file, &plan->model.memory, MEMORY_HOST);
    plan_print_moves_(file, &plan->model.memory, MEMORY_DISK);
    plan_print_disk_(file, s);
    if (s->use == USE_TRAIN) {
        plan_print_work_(file, s, plan);
    }
}

// Prints the kinds at one place as an object named `key`; prints nothing if the place is empty.
static void plan_print_json_of_(FILE* file, const Memory* memory, const char* key, MemoryPlace place) {
    int count = 0;
    for (int i = 0; i < memory->num_entries; i++) {
        const MemoryEntry* kind = &memory->entries[i];
        if (kind->place == place && kind->bytes > 0) {
            if (count == 0) {
                fprintf(file, ",\"%s\":{", key);
            }
            fprintf(file, "%s\"%s\":%.9g", count++ ? "," : "", kind->kind, plan_mib_(kind->bytes));
        }
    }
    fputs(count ? "}" : "", file);
}

void plan_print_json(FILE* file, const void* memory) {
    plan_print_json_of_(file, (const Memory*)memory, "mem_mb", MEMORY_DEVICE);
    plan_print_json_of_(file, (const Memory*)memory, "host_mem_mb", MEMORY_HOST);
    plan_print_json_of_(file, (const Memory*)memory, "disk_mb", MEMORY_DISK);
}

#endif // PLAN_IMPLEMENTATION

#endif
