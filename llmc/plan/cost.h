/*
cost.h -- how long an update takes, planned from its operations.

    time = sum over operations of max(FLOP / rate, bytes / bandwidth) + a launch each

The operations are those of the trainers, at the sizes of a run. Functions beside the operations
count their FLOP and bytes. Communication is left out, and GELU counts as a pass of its own, even
where a GPU fuses it into a matmul.
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
#include "llmc/setup/settled.h"

// clang-format off
// Kinds of operations and their names. The first two have FLOP and bytes, the others up to UPDATE
// only bytes. LAUNCHES is the time to start operations; plan.h adds MOVES.
#define COST_WORDS(X) \
    X(COST_MATMULS, "matmuls") \
    X(COST_ATTENTION, "attention") \
    X(COST_NORMS, "norms") \
    X(COST_GELU, "GELU") \
    X(COST_CLASSIFIER, "losses") \
    X(COST_MEMORY, "other passes over memory") \
    X(COST_UPDATE, "update") \
    X(COST_LAUNCHES, "launches") \
    X(COST_MOVES, "offloading")
// clang-format on
typedef enum { COST_WORDS(WORDS_VALUE) COST_KINDS } CostKind;
enum { COST_RATES = COST_LAUNCHES };

// Rates that a device reaches: FLOP/s or bytes/s, by kind.
typedef struct {
    double per_s[COST_RATES];
    double launch_s;
    char basis[128]; // source of the rates, in words
} CostRates;

// Time of an update in seconds, by kind.
typedef struct {
    double s[COST_KINDS];
} CostUpdate;

static inline const char* cost_word(CostKind kind) {
    static const char* const words[] = {COST_WORDS(WORDS_NAME)};
    return words[kind];
}

static inline int cost_has_flops(CostKind kind) { return kind <= COST_ATTENTION; }

static inline double cost_total_s(const CostUpdate* update) {
    double total = 0;
    for (int kind = 0; kind < COST_KINDS; kind++) {
        total += update->s[kind];
    }
    return total;
}

// ---- operations ----

typedef struct {
    const Settled* s;
    const CostRates* rates;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double times, N; // micro-batches of an update; tokens of one
    double size;     // bytes of an element
    CostUpdate* sum; // result so far
} CostWalk_;

// Adds the time of an operation, once per micro-batch.
static inline void cost_add_(const CostWalk_* w, CostKind kind, double flops, double bytes) {
    const CostRates* r = w->rates;
    const double by_bytes = bytes / r->per_s[cost_has_flops(kind) ? COST_MEMORY : kind];
    const double by_flops = cost_has_flops(kind) ? flops / r->per_s[kind] : 0;
    w->sum->s[kind] += w->times * fmax(by_flops, by_bytes);
    w->sum->s[COST_LAUNCHES] += w->times * r->launch_s;
}

// Returns the row of the parameter at this offset in ModelParameters.
static inline const TensorRow* cost_row_(const CostWalk_* w, size_t member) {
    int i = 0;
    while (w->rows[i].member != member) {
        i++;
    }
    return &w->rows[i];
}

// Returns the row of the classifier's weight.
static inline const TensorRow* cost_head_(const CostWalk_* w) {
    return cost_row_(w,
                     w->s->cfg.has_head ? offsetof(ModelParameters, head) : offsetof(ModelParameters, wte));
}

// Returns 1 for the CPU trainer. Only there do residuals and gradients of biases cost extra passes:
// the GPU trainer fuses them into other operations.
static inline int cost_is_cpu_(const CostWalk_* w) { return w->s->options.program.trainer == OPTION_CPU; }

// Adds out = inp weight^T, or the gradient of inp.
static inline void cost_matmul_(const CostWalk_* w, const TensorRow* weight) {
    const double in = (double)weight->cols, out = (double)weight->rows;
    cost_add_(w, COST_MATMULS, matmul_flops(w->N, in, out), w->size * (w->N * (in + out) + in * out));
}

// Adds the gradients of a weight and its bias. With several micro-batches, a gradient is read, too.
static inline void cost_gradient_(const CostWalk_* w, const TensorRow* weight) {
    const double in = (double)weight->cols, out = (double)weight->rows;
    const double touched = (w->times > 1 ? 2 : 1) * in * out * (double)w->s->gradient_bytes;
    cost_add_(w, COST_MATMULS, matmul_flops(w->N, in, out), w->size * w->N * (in + out) + touched);
    if (cost_is_cpu_(w) && weight->kind == KIND_MATRIX) {
        cost_add_(w, COST_MEMORY, 0, w->size * w->N * out);
    }
}

static inline void cost_norm_(const CostWalk_* w) {
    cost_add_(w, COST_NORMS, 0, norm_forward_bytes(w->N, w->s->cfg.C, w->size));
}

static inline void cost_norm_backward_(const CostWalk_* w) {
    cost_add_(w, COST_NORMS, 0, norm_backward_bytes(w->N, w->s->cfg.C, w->size, 0));
}

static inline void cost_gelu_(const CostWalk_* w) {
    cost_add_(w, COST_GELU, 0,
              activation_forward_bytes(w->N * model_hidden(w->s->cfg), w->size, ACTIVATION_GELU));
}

static inline void cost_residual_(const CostWalk_* w) {
    if (cost_is_cpu_(w)) {
        cost_add_(w, COST_MEMORY, 0, 3 * w->N * w->s->cfg.C * w->size);
    }
}

// ---- passes ----

static inline AttentionSizes cost_attention_sizes_(const CostWalk_* w) {
    const ModelConfig cfg = w->s->cfg;
    const int T = w->s->options.seq_len;
    return attention_sizes((int)(w->N / T), T, cfg.NH, cfg.NH, model_head_size(cfg));
}

// Adds the forward pass of a block, up to the hidden layer of its MLP.
static inline void cost_hidden_(const CostWalk_* w) {
    const AttentionSizes attention = cost_attention_sizes_(w);
    const TensorRow* last = cost_row_(w, offsetof(ModelParameters, fcprojw));
    cost_norm_(w);
    cost_norm_(w);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (w->rows[i].kind == KIND_MATRIX && &w->rows[i] != last) {
            cost_matmul_(w, &w->rows[i]);
        }
    }
    cost_add_(w, COST_ATTENTION, attention_forward_flops(attention),
              attention_forward_bytes(attention, w->size));
    cost_residual_(w);
    cost_gelu_(w);
}

static inline void cost_forward_(const CostWalk_* w) {
    cost_add_(w, COST_MEMORY, 0, embedding_forward_bytes(w->N, w->s->cfg.C, w->size));
    for (int l = 0; l < w->s->cfg.L; l++) {
        cost_hidden_(w);
        cost_matmul_(w, cost_row_(w, offsetof(ModelParameters, fcprojw)));
        cost_residual_(w);
    }
    cost_norm_(w);
}

// Adds the recomputation of a block in the backward pass.
static inline void cost_recompute_(const CostWalk_* w) {
    const int level = w->s->options.recompute;
    if (level == RECOMPUTE_BLOCK) {
        cost_hidden_(w);
        return;
    }
    if (level == RECOMPUTE_MLP) {
        cost_matmul_(w, cost_row_(w, offsetof(ModelParameters, fcw)));
    }
    if (level >= RECOMPUTE_NORMS) {
        cost_norm_(w);
        cost_norm_(w);
    }
    if (level >= RECOMPUTE_ACTIVATION) {
        cost_gelu_(w);
    }
}

static inline void cost_block_backward_(const CostWalk_* w, int l) {
    const ModelConfig cfg = w->s->cfg;
    const AttentionSizes attention = cost_attention_sizes_(w);
    cost_recompute_(w);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &w->rows[i];
        if (row->kind == KIND_MATRIX) {
            cost_matmul_(w, row);
        }
        if (row->kind == KIND_MATRIX && !freeze_has(&w->s->freeze, i, l)) {
            cost_gradient_(w, row);
        }
    }
    cost_add_(w, COST_GELU, 0, activation_backward_bytes(w->N * model_hidden(cfg), w->size, ACTIVATION_GELU));
    cost_norm_backward_(w);
    cost_norm_backward_(w);
    cost_add_(w, COST_ATTENTION, attention_backward_flops(attention),
              attention_backward_bytes(attention, w->size));
}

// Adds both passes of the classifier, chunk by chunk.
static inline void cost_classifier_(const CostWalk_* w) {
    const size_t chunk = model_classifier_chunk(w->s->cfg, (size_t)w->N);
    const double tokens = w->s->options.program.trainer == OPTION_GPU && w->s->options.logits_chunk > 0
                              ? fmin(w->s->options.logits_chunk, w->N)
                              : (double)chunk;
    CostWalk_ part = *w;
    const TensorRow* weight = cost_head_(w);
    part.times = w->times * ceil(w->N / tokens);
    part.N = w->N * w->times / part.times;
    cost_matmul_(&part, weight);
    cost_add_(&part, COST_CLASSIFIER, 0, cross_entropy_backward_bytes(part.N, w->s->cfg.Vp, w->size));
    cost_matmul_(&part, weight);
    if (!freeze_has_classifier(&w->s->freeze, w->s->cfg)) {
        cost_gradient_(&part, weight);
    }
}

static inline void cost_backward_(const CostWalk_* w) {
    cost_classifier_(w);
    cost_norm_backward_(w);
    for (int l = w->s->cfg.L - 1; l >= w->s->freeze.first_block; l--) {
        cost_block_backward_(w, l);
    }
    if (!freeze_has_classifier(&w->s->freeze, w->s->cfg)) {
        const double ids = fmin(w->N, w->s->cfg.V);
        cost_add_(w, COST_MEMORY, 0,
                  embedding_backward_bytes(w->N, w->s->cfg.C, ids, w->size, (double)w->s->gradient_bytes));
    }
}

// ---- the update ----

// Adds the matmuls of Muon, for all its matrices.
static inline void cost_muon_(const CostWalk_* w, const OptimizerState* state) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &w->rows[i];
        const double parts = row->parts, rows = (double)row->rows / parts;
        for (int k = 0; k < row->layers && state->rule[i] == RULE_MUON; k++) {
            cost_add_(w, COST_MATMULS, parts * muon_flops(rows, (double)row->cols), 0);
        }
    }
}

// Adds the norm of the gradient, and the update of the parameters that this rank owns.
static inline void cost_optimizer_(const CostWalk_* w) {
    const ZeroPlan* zero = &w->s->zero;
    const size_t gradient_bytes = w->s->gradient_bytes;
    OptimizerState state;
    optimizer_state_open(&state, w->s->optimizer, zero, w->s->cfg);
    const double owned = (double)zero_count(zero, ZERO_OWNED),
                 updated = (double)zero_count(zero, ZERO_UPDATED),
                 all_frozen = owned * freeze_count(&w->s->freeze, w->s->cfg) / model_count_stored(w->s->cfg),
                 // frozen parameters among the updated
        frozen = fmax(all_frozen - (owned - updated), 0);
    cost_add_(w, COST_MEMORY, 0, updated * (double)gradient_bytes);
    cost_add_(w, COST_UPDATE, 0,
              optimizer_bytes(&state, zero, (size_t)w->size, gradient_bytes) -
                  frozen * ((double)gradient_bytes + 2 * w->size));
    cost_muon_(w, &state);
}

// Returns the planned time of an update on one rank, with its share of the sequences.
static inline CostUpdate cost_update(const Settled* s, const CostRates* rates) {
    const Options* o = &s->options;
    const double ranks = s->ranks.size;
    CostUpdate sum;
    CostWalk_ w;
    memset(&sum, 0, sizeof(sum));
    w.s = s;
    w.rates = rates;
    model_parameter_rows(w.rows, s->cfg);
    w.times = ceil((double)o->total_batch / o->seq_len / o->batch / ranks);
    // a rank with any work has at least one sequence
    w.N = fmax((double)o->total_batch / ranks / w.times, o->seq_len);
    w.size = (double)s->element_bytes;
    w.sum = &sum;
    cost_forward_(&w);
    cost_backward_(&w);
    w.times = 1;
    cost_optimizer_(&w);
    return sum;
}

#endif
