/*
cost.h -- how long an update takes, planned from its operations.

    time = sum over operations of max(FLOP / rate, bytes / bandwidth) + a launch each

The operations are those of the trainers, at the sizes of a run; their FLOP and bytes are the functions beside them. What
passes between processes is left out, and so is what a GPU fuses: GELU is a pass of its own.

needs:   the sizes of batches are decided; the run trains
*/
#ifndef LLMC_COST_H
#define LLMC_COST_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "llmc/ops/attention.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/ops/embedding.h"
#include "llmc/model/freeze.h"
#include "llmc/ops/activation.h"
#include "llmc/model/model.h"
#include "llmc/ops/norm.h"
#include "llmc/ops/matmul.h"
#include "llmc/optim/muon.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"
#include "llmc/setup/options.h"
#include "llmc/setup/resolve.h"

// clang-format off
// Kinds of operations, with their names. The first two have FLOP, the others bytes only; a launch has neither, and
// what offloading moves is added by plan.h.
#define SPEED_WORDS(X) \
    X(SPEED_PRODUCTS, "products") \
    X(SPEED_ATTENTION, "attention") \
    X(SPEED_NORMS, "norms") \
    X(SPEED_GELU, "GELU") \
    X(SPEED_CLASSIFIER, "losses") \
    X(SPEED_MEMORY, "other passes over memory") \
    X(SPEED_UPDATE, "update") \
    X(SPEED_LAUNCHES, "launches") \
    X(SPEED_MOVES, "offloading")
// clang-format on
typedef enum { SPEED_WORDS(WORDS_VALUE) SPEED_KINDS } SpeedKind;
enum { SPEED_RATES = SPEED_LAUNCHES };

// What a device reaches: FLOP or bytes a second, by kind.
typedef struct {
    double per_s[SPEED_RATES];
    double launch_s;
    char basis[128]; // where the figures come from, in words
} SpeedRates;

typedef struct {
    SpeedRates rates;
    size_t element_bytes, gradient_bytes; // of weights and activations; of the parameters' gradients
    MasterWeights master;
} SpeedDevice;

// Seconds of an update, by kind.
typedef struct {
    double s[SPEED_KINDS];
} SpeedUpdate;

static inline const char* speed_word(SpeedKind kind) {
    static const char* const words[] = {SPEED_WORDS(WORDS_NAME)};
    return words[kind];
}

static inline int speed_has_flops(SpeedKind kind) { return kind <= SPEED_ATTENTION; }

static inline double speed_total_s(const SpeedUpdate* update) {
    double total = 0;
    for (int kind = 0; kind < SPEED_KINDS; kind++) {
        total += update->s[kind];
    }
    return total;
}

// ---- operations ----

typedef struct {
    GPT2Config cfg;
    const Options* o;
    const SpeedDevice* device;
    Freeze freeze;
    TensorRow rows[GPT2_PARAMETER_ROWS];
    double times, N;  // micro-batches of an update, and the tokens of one
    double size;      // bytes of an element
    SpeedUpdate* sum; // is added to
} SpeedWalk_;

static inline void speed_add_(const SpeedWalk_* w, SpeedKind kind, double flops, double bytes) {
    const SpeedRates* r = &w->device->rates;
    const double by_bytes = bytes / r->per_s[speed_has_flops(kind) ? SPEED_MEMORY : kind];
    const double by_flops = speed_has_flops(kind) ? flops / r->per_s[kind] : 0;
    w->sum->s[kind] += w->times * fmax(by_flops, by_bytes);
    w->sum->s[SPEED_LAUNCHES] += w->times * r->launch_s;
}

// The row of a parameter, by its place in GPT2Parameters.
static inline const TensorRow* speed_row_(const SpeedWalk_* w, size_t member) {
    int i = 0;
    while (w->rows[i].member != member) {
        i++;
    }
    return &w->rows[i];
}

// A GPU adds biases, residuals and the gradients of biases where it has the numbers at hand.
static inline int speed_is_cpu_(const SpeedWalk_* w) { return w->o->program.trainer == OPTION_CPU; }

// out = inp weight^T, or the gradient of inp.
static inline void speed_product_(const SpeedWalk_* w, const TensorRow* weight) {
    const double in = (double)weight->cols, out = (double)weight->rows;
    speed_add_(w, SPEED_PRODUCTS, matmul_flops(w->N, in, out), w->size * (w->N * (in + out) + in * out));
}

// The gradients of a weight and its bias; the second micro-batch adds to those of the first.
static inline void speed_gradient_(const SpeedWalk_* w, const TensorRow* weight) {
    const double in = (double)weight->cols, out = (double)weight->rows;
    const double touched = (w->times > 1 ? 2 : 1) * in * out * (double)w->device->gradient_bytes;
    speed_add_(w, SPEED_PRODUCTS, matmul_flops(w->N, in, out), w->size * w->N * (in + out) + touched);
    if (speed_is_cpu_(w) && weight->kind == KIND_MATRIX) {
        speed_add_(w, SPEED_MEMORY, 0, w->size * w->N * out);
    }
}

static inline void speed_norm_(const SpeedWalk_* w) {
    speed_add_(w, SPEED_NORMS, 0, layernorm_forward_bytes(w->N, w->cfg.C, w->size));
}

static inline void speed_norm_backward_(const SpeedWalk_* w) {
    speed_add_(w, SPEED_NORMS, 0, layernorm_backward_bytes(w->N, w->cfg.C, w->size, 0));
}

static inline void speed_gelu_(const SpeedWalk_* w) {
    speed_add_(w, SPEED_GELU, 0, gelu_forward_bytes(w->N * gpt2_hidden(w->cfg), w->size));
}

static inline void speed_residual_(const SpeedWalk_* w) {
    if (speed_is_cpu_(w)) {
        speed_add_(w, SPEED_MEMORY, 0, 3 * w->N * w->cfg.C * w->size);
    }
}

// ---- passes ----

// A block up to the hidden layer of its MLP.
static inline void speed_hidden_(const SpeedWalk_* w) {
    const GPT2Config cfg = w->cfg;
    const double T = w->o->seq_len, B = w->N / T;
    const TensorRow* last = speed_row_(w, offsetof(GPT2Parameters, fcprojw));
    speed_norm_(w);
    speed_norm_(w);
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        if (w->rows[i].kind == KIND_MATRIX && &w->rows[i] != last) {
            speed_product_(w, &w->rows[i]);
        }
    }
    speed_add_(w, SPEED_ATTENTION, attention_flops(B, T, cfg.C),
               attention_forward_bytes(B, T, cfg.C, cfg.NH, w->size));
    speed_residual_(w);
    speed_gelu_(w);
}

static inline void speed_forward_(const SpeedWalk_* w) {
    speed_add_(w, SPEED_MEMORY, 0, encoder_forward_bytes(w->N, w->cfg.C, w->size));
    for (int l = 0; l < w->cfg.L; l++) {
        speed_hidden_(w);
        speed_product_(w, speed_row_(w, offsetof(GPT2Parameters, fcprojw)));
        speed_residual_(w);
    }
    speed_norm_(w);
}

// What the backward pass computes again of a block.
static inline void speed_recompute_(const SpeedWalk_* w) {
    const int level = w->o->recompute;
    if (level == RECOMPUTE_BLOCK) {
        speed_hidden_(w);
        return;
    }
    if (level == RECOMPUTE_MLP) {
        speed_product_(w, speed_row_(w, offsetof(GPT2Parameters, fcw)));
    }
    if (level >= RECOMPUTE_NORMS) {
        speed_norm_(w);
        speed_norm_(w);
    }
    if (level >= RECOMPUTE_GELU) {
        speed_gelu_(w);
    }
}

static inline void speed_block_backward_(const SpeedWalk_* w, int l) {
    const GPT2Config cfg = w->cfg;
    const double T = w->o->seq_len, B = w->N / T;
    speed_recompute_(w);
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &w->rows[i];
        if (row->kind == KIND_MATRIX) {
            speed_product_(w, row);
        }
        if (row->kind == KIND_MATRIX && !freeze_has(&w->freeze, i, l)) {
            speed_gradient_(w, row);
        }
    }
    speed_add_(w, SPEED_GELU, 0, gelu_backward_bytes(w->N * gpt2_hidden(cfg), w->size));
    speed_norm_backward_(w);
    speed_norm_backward_(w);
    speed_add_(w, SPEED_ATTENTION, attention_backward_flops(B, T, cfg.C),
               attention_backward_bytes(B, T, cfg.C, cfg.NH, w->size));
}

// The classifier, some tokens at a time, forward and backward.
static inline void speed_classifier_(const SpeedWalk_* w) {
    const size_t chunk = gpt2_classifier_chunk(w->cfg, (size_t)w->N);
    const double tokens = w->o->program.trainer == OPTION_GPU && w->o->logits_chunk > 0
                              ? fmin(w->o->logits_chunk, w->N)
                              : (double)chunk;
    SpeedWalk_ part = *w;
    const TensorRow* wte = speed_row_(w, offsetof(GPT2Parameters, wte));
    part.times = w->times * ceil(w->N / tokens);
    part.N = w->N * w->times / part.times;
    speed_product_(&part, wte);
    speed_add_(&part, SPEED_CLASSIFIER, 0, classifier_backward_bytes(part.N, w->cfg.Vp, w->size));
    speed_product_(&part, wte);
    if (!freeze_has_classifier(&w->freeze)) {
        speed_gradient_(&part, wte);
    }
}

static inline void speed_backward_(const SpeedWalk_* w) {
    speed_classifier_(w);
    speed_norm_backward_(w);
    for (int l = w->cfg.L - 1; l >= w->freeze.first_block; l--) {
        speed_block_backward_(w, l);
    }
    if (!freeze_has_classifier(&w->freeze)) {
        const double ids = fmin(w->N, w->cfg.V);
        speed_add_(w, SPEED_MEMORY, 0,
                   encoder_backward_bytes(w->N, w->cfg.C, ids, w->size, (double)w->device->gradient_bytes));
    }
}

// ---- the update ----

// Muon's products, of one process.
static inline void speed_muon_(const SpeedWalk_* w, const OptimizerState* state) {
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &w->rows[i];
        const double parts = (double)optimizer_parts(row), rows = (double)row->rows / parts;
        for (int k = 0; k < row->layers && state->rule[i] == RULE_MUON; k++) {
            speed_add_(w, SPEED_PRODUCTS, parts * muon_flops(rows, (double)row->cols), 0);
        }
    }
}

// The norm of the gradient, and the update of what this process owns.
static inline void speed_optimizer_(const SpeedWalk_* w) {
    const Options* o = w->o;
    const size_t gradient_bytes = w->device->gradient_bytes;
    Optimizer optimizer = setup_optimizer(o);
    OptimizerState state;
    const ZeroPlan zero = setup_zero(w->cfg, o, o->shards);
    optimizer.master = w->device->master;
    optimizer_state_open(&state, optimizer, &zero, w->cfg);
    const double owned = (double)zero_owned_elements(&zero), updated = (double)zero_updated_elements(&zero),
                 all_frozen = owned * freeze_count(&w->freeze, w->cfg) / gpt2_count_stored(w->cfg),
                 frozen = fmax(all_frozen - (owned - updated), 0); // among those that are updated
    speed_add_(w, SPEED_MEMORY, 0, updated * (double)gradient_bytes);
    speed_add_(w, SPEED_UPDATE, 0,
               optimizer_bytes(&state, &zero, (size_t)w->size, gradient_bytes) -
                   frozen * ((double)gradient_bytes + 2 * w->size));
    speed_muon_(w, &state);
}

// An update of one process, which has its share of the sequences.
static inline SpeedUpdate speed_update(GPT2Config cfg, const Options* o, const SpeedDevice* device) {
    SpeedUpdate sum;
    SpeedWalk_ w;
    memset(&sum, 0, sizeof(sum));
    w.cfg = cfg;
    w.o = o;
    w.device = device;
    w.freeze = freeze_of(cfg.L, o->freeze);
    gpt2_parameter_rows(w.rows, cfg);
    w.times = ceil((double)o->total_batch / o->seq_len / o->batch / o->processes);
    // of one that has anything to do
    w.N = fmax((double)o->total_batch / o->processes / w.times, o->seq_len);
    w.size = (double)device->element_bytes;
    w.sum = &sum;
    speed_forward_(&w);
    speed_backward_(&w);
    w.times = 1;
    speed_optimizer_(&w);
    return sum;
}

#endif
