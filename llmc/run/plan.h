/*
plan.h -- what a run takes: the tensors of the model with their sizes, memory by kind, work and time.

defines: PlanMemory, PLAN_KINDS, plan_add, plan_add_host, plan_add_state, plan_add_text, plan_bytes, plan_print_memory,
         plan_print_traffic, plan_print, plan_print_json
*/
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include <stddef.h>
#include <stdio.h>

#include "llmc/run/options.h"
#include "llmc/gpt2.h"
#include "llmc/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// One allocation, by name. A list ends with a name of NULL.
typedef struct {
    const char* name;
    size_t bytes;
    int is_host; // on the host, beside a run on another device
} PlanMemory;

enum { PLAN_KINDS = 9 + GPT2_STATE_ROWS }; // room for a list

// Adds an allocation to the end of a list, which is empty if its first name is NULL.
void plan_add(PlanMemory plan[PLAN_KINDS], const char* name, size_t bytes);
// The same, on the host beside a run on another device.
void plan_add_host(PlanMemory plan[PLAN_KINDS], const char* name, size_t bytes);

// Adds the optimizer's state that one process has, on the device or on the host beside it.
void plan_add_state(PlanMemory plan[PLAN_KINDS], GPT2Config cfg, const ZeroPlan* zero, int is_on_host);

// Adds the activations of generation, `bytes` that are laid out by `rows`.
void plan_add_text(PlanMemory plan[PLAN_KINDS], const TensorRow rows[GPT2_ACTIVATION_ROWS], size_t bytes);

// The memory of the device that the run is on.
size_t plan_bytes(const PlanMemory* memory);

// Two lines: the model, and its memory.
void plan_print_memory(FILE* file, GPT2Config cfg, const Options* options, const PlanMemory* memory);

// With several processes, a line: what each of them sends in an update. An element of a gradient, and of a parameter, has
// so many bytes.
void plan_print_traffic(FILE* file, GPT2Config cfg, const Options* options, size_t gradient_bytes,
                        size_t parameter_bytes);

// The memory as members of a JSON object, in MiB, each with a comma before it; `memory` is a list.
void plan_print_json(FILE* file, const void* memory);

// All of it, for --plan. `flops_per_s` is the most that the device, described in words, can do.
void plan_print(FILE* file, GPT2Config cfg, const Options* options, const TensorRow* parameters,
                const TensorRow* activations, const PlanMemory* memory, double flops_per_s,
                const char* device);

#ifdef __cplusplus
}
#endif

#ifdef PLAN_IMPLEMENTATION

#include <assert.h>
#include <math.h>

static void plan_append_(PlanMemory plan[PLAN_KINDS], PlanMemory kind) {
    const PlanMemory end = {NULL, 0, 0};
    int count = 0;
    while (plan[count].name) {
        count++;
    }
    assert(count + 1 < PLAN_KINDS);
    plan[count] = kind;
    plan[count + 1] = end;
}

void plan_add(PlanMemory plan[PLAN_KINDS], const char* name, size_t bytes) {
    const PlanMemory kind = {name, bytes, 0};
    plan_append_(plan, kind);
}

void plan_add_host(PlanMemory plan[PLAN_KINDS], const char* name, size_t bytes) {
    const PlanMemory kind = {name, bytes, 1};
    plan_append_(plan, kind);
}

void plan_add_state(PlanMemory plan[PLAN_KINDS], GPT2Config cfg, const ZeroPlan* zero, int is_on_host) {
    StateRow states[GPT2_STATE_ROWS];
    zero_state_rows(states, zero, cfg);
    for (int s = 0; s < GPT2_STATE_ROWS; s++) {
        (is_on_host ? plan_add_host : plan_add)(plan, states[s].label, states[s].bytes);
    }
}

void plan_add_text(PlanMemory plan[PLAN_KINDS], const TensorRow rows[GPT2_ACTIVATION_ROWS], size_t bytes) {
    size_t kv = 0;
    for (int i = 0; i < GPT2_ACTIVATION_ROWS; i++) {
        kv += rows[i].member == offsetof(GPT2Activations, kv)
                  ? tensor_elements(&rows[i]) * rows[i].element_bytes
                  : 0;
    }
    plan_add(plan, "keys and values", kv);
    plan_add(plan, "activations", bytes - kv);
}

size_t plan_bytes(const PlanMemory* memory) {
    size_t total = 0;
    for (const PlanMemory* kind = memory; kind->name; kind++) {
        total += kind->is_host ? 0 : kind->bytes;
    }
    return total;
}

static double plan_mib_(size_t bytes) { return (double)bytes / (1 << 20); }

void plan_print_memory(FILE* file, GPT2Config cfg, const Options* options, const PlanMemory* memory) {
    const char* each = options->program.trainer == OPTION_GPU ? " per GPU" : " per process";
    fprintf(file,
            "model: %d layers, %d channels, %d heads, context %d, vocabulary %d (padded to %d): %.2fM "
            "parameters\nmemory%s: %.1f MiB",
            cfg.L, cfg.C, cfg.NH, cfg.max_T, cfg.V, cfg.Vp, gpt2_count_parameters(cfg) / 1e6,
            options->processes > 1 ? each : "", plan_mib_(plan_bytes(memory)));
    int hosts = 0;
    for (const PlanMemory* kind = memory; kind->name; kind++) { // those on the host come last
        const char* host = hosts == 0 ? "; on the host: " : " + ";
        if (kind->bytes) {
            fprintf(file, "%s%s %.1f",
                    kind == memory  ? " = "
                    : kind->is_host ? host
                                    : " + ",
                    kind->name, plan_mib_(kind->bytes));
            hosts += kind->is_host;
        }
    }
    fputc('\n', file);
}

void plan_print_traffic(FILE* file, GPT2Config cfg, const Options* o, size_t gradient_bytes,
                        size_t parameter_bytes) {
    const ZeroPlan zero = zero_plan_two_levels(cfg, o->zero, o->process, o->processes, o->shards);
    const ZeroTraffic traffic =
        zero_traffic(&zero, o->total_batch / o->seq_len, o->batch, gradient_bytes, parameter_bytes);
    if (o->processes > 1) {
        fprintf(file, "each update: every %s sends %.1f MiB",
                o->program.trainer == OPTION_GPU ? "GPU" : "process", traffic.within / (1 << 20));
        if (o->shards < o->processes) {
            fprintf(file, " within its %d, and %.1f MiB to the other replicas", o->shards,
                    traffic.between / (1 << 20));
        }
        fputc('\n', file);
    }
}

static void plan_print_rows_(FILE* file, const TensorRow* rows, int count) {
    static const char* const life_mark[] = {"", "  b", "  c"}; // of TensorLife
    for (int i = 0; i < count; i++) {
        const TensorRow* row = &rows[i];
        if (tensor_elements(row) > 0) {
            fprintf(file, "  %-11s %4d x %8zu x %-6zu %10.2f MiB%s\n", row->name, row->layers, row->rows,
                    row->cols, plan_mib_(tensor_elements(row) * row->element_bytes), life_mark[row->life]);
        }
    }
}

// Disk space of checkpoints.
static void plan_print_disk_(FILE* file, GPT2Config cfg, const Options* o) {
    const double bytes = 4.0 * gpt2_count_parameters(cfg) + gpt2_count_state_bytes(cfg); // fp32 weights
    if (o->save_every > 0 && o->steps > 0) {
        const double saves = ceil((double)o->steps / o->save_every);
        const double major = o->keep && o->keep_major ? floor((double)o->steps / o->keep_major) : 0;
        const double kept = o->keep && o->keep < saves ? fmin(saves, o->keep + major) : saves;
        fprintf(file, "disk: %.0f checkpoint%s of at most %.1f MiB = %.1f MiB\n", kept, kept == 1 ? "" : "s",
                bytes / (1 << 20), kept * bytes / (1 << 20));
    }
}

// The work of training and validation, and the minimum time it takes.
static void plan_print_work_(FILE* file, GPT2Config cfg, const Options* o, double flops_per_s,
                             const char* device) {
    const double flops = gpt2_flops_per_token(cfg, o->seq_len);
    if (o->steps == OPTION_AUTO) {
        fprintf(file, "work: %.4g FLOP per token; how many tokens is known once the text is encoded\n",
                flops);
    } else {
        const double tokens = (double)o->total_batch * (double)o->steps;
        const double validations = o->eval_every > 0 ? 1 + floor((double)o->steps / o->eval_every) : 0;
        const double seen = validations * o->eval_batches * o->batch * o->seq_len,
                     all = (tokens + seen / 3) * flops;
        fprintf(
            file,
            "work: %.4g tokens x %.4g FLOP = %.4g FLOP; plus %.0f validations on %.4g tokens in total, at a "
            "third of the cost per token\n",
            tokens, flops, tokens * flops, validations, seen);
        fprintf(
            file,
            "time: %.2f hours at the peak of %.0f GFLOP/s (%s); %.2f at 50 %% of it, which is more typical\n",
            all / flops_per_s / 3600, flops_per_s * 1e-9, device, 2 * all / flops_per_s / 3600);
    }
    fprintf(file, "speed: at most %.0f tok/s\n", flops_per_s / flops);
}

void plan_print(FILE* file, GPT2Config cfg, const Options* options, const TensorRow* parameters,
                const TensorRow* activations, const PlanMemory* memory, double flops_per_s,
                const char* device) {
    fputc('\n', file);
    plan_print_memory(file, cfg, options, memory);
    plan_print_disk_(file, cfg, options);
    plan_print_work_(file, cfg, options, flops_per_s, device);
    fprintf(file, "\nparameters   layers x rows x columns (%s)\n",
            options->quantize ? "of matrices: blocks of 32" : "the same for gradients and optimizer state");
    plan_print_rows_(file, parameters, GPT2_PARAMETER_ROWS);
    fprintf(file,
            "\nactivations   layers x tokens x columns (b: only used inside a block; shares memory with c, "
            "the classifier's)\n");
    plan_print_rows_(file, activations, GPT2_ACTIVATION_ROWS);
}

// The kinds of one place, if there are any.
static void plan_print_json_of_(FILE* file, const PlanMemory* kinds, const char* key, int is_host) {
    int count = 0;
    for (; kinds->name; kinds++) {
        if (kinds->is_host == is_host && kinds->bytes > 0) {
            if (count == 0) {
                fprintf(file, ",\"%s\":{", key);
            }
            fprintf(file, "%s\"%s\":%.9g", count++ ? "," : "", kinds->name, (double)kinds->bytes / (1 << 20));
        }
    }
    fputs(count ? "}" : "", file);
}

void plan_print_json(FILE* file, const void* memory) {
    plan_print_json_of_(file, (const PlanMemory*)memory, "mem_mb", 0);
    plan_print_json_of_(file, (const PlanMemory*)memory, "host_mem_mb", 1);
}

#endif // PLAN_IMPLEMENTATION

#endif
