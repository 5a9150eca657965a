/*
cost.h -- how long a training step takes, planned from its operations.

The passes follow the trainers, at the sizes of a process of the run; layer_cost.h knows the layers,
and cost_transfers.h what processes wait for.

    time = (M + P - 1) passes of a micro-batch, with the transfers of its tensor and context group
           + transfers of ZeRO that the passes do not hide + the update

M micro-batches go through P stages; in a stage P - 1 of the passes are idle. All stages are planned
to be as slow as this one, so the slowest one of a run counts.
*/
#ifndef LLMC_COST_H
#define LLMC_COST_H

#include <math.h>
#include <string.h>

#include "llmc/layers/layer_cost.h"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/optim/muon.h"
#include "llmc/optim/soap.h"
#include "llmc/optim/optimizer.h"
#include "llmc/cost/cost_transfers.h"
#include "llmc/setup/settled.h"

static inline double cost_total_s(const CostUpdate* update) {
    double total = 0;
    for (int kind = 0; kind < COST_KINDS; kind++) {
        total += update->s[kind];
    }
    return total;
}

// ---- passes ----

// Adds the forward pass of a block, up to the hidden layer of its MLP.
static inline void cost_hidden_(const CostWalk* w) {
    cost_stream(w);
    cost_branch(w);
    cost_self_attention(w);
    cost_branch(w);
    cost_mlp_hidden(w);
}

static inline void cost_forward_(CostWalk* w, const Grid* grid) {
    if (grid_is_first_stage(grid)) {
        cost_embedding(w);
    }
    for (w->l = 0; w->l < w->cfg.L; w->l++) {
        cost_hidden_(w);
        cost_mlp(w);
    }
    if (grid_is_last_stage(grid)) {
        cost_norm(w);
    }
}

// Adds the recomputation of a block in the backward pass.
static inline void cost_recompute_(const CostWalk* w, int level) {
    if (level == RECOMPUTE_BLOCK) {
        cost_hidden_(w);
        if (model_has_norms_after(w->cfg)) { // the norm reads its input
            cost_mlp(w);
        }
        return;
    }
    if (level >= RECOMPUTE_NORMS) {
        cost_branch(w);
        cost_branch(w);
    }
    if (level == RECOMPUTE_MLP) {
        cost_mlp_hidden(w);
    } else if (level >= RECOMPUTE_ACTIVATION) {
        cost_mlp_activation(w);
    }
}

static inline void cost_backward_(CostWalk* w, const Grid* grid, double chunk, int level) {
    if (grid_is_last_stage(grid)) {
        cost_lm_head(w, chunk);
        cost_norm_backward(w);
    }
    for (w->l = w->cfg.L - 1; w->l >= w->freeze->first_block; w->l--) {
        cost_recompute_(w, level);
        cost_mlp_backward(w);
        cost_branch_backward(w);
        cost_self_attention_backward(w);
        cost_branch_backward(w);
        cost_stream_backward(w);
    }
    if (grid_is_first_stage(grid)) {
        cost_embedding_backward(w);
    }
}

// Adds the forward pass of a teacher, with all layers, on the micro-batches of a walk.
static inline void cost_teacher_(const CostWalk* w, ModelConfig teacher, double chunk) {
    const Grid whole = grid_of_data(0, 1);
    ModelPart part = w->cfg.part;
    CostWalk t = *w;
    part.first_layer = part.layers = part.of_layers = part.places = 0;
    if (model_is_cut(w->cfg)) {
        teacher.Vp = w->cfg.Vp * part.tensor_ranks; // ranks have the same vocabulary rows
    }
    t.cfg = model_part_of(teacher, part);
    model_parameter_rows(t.rows, t.cfg);
    cost_forward_(&t, &whole);
    cost_teaching(&t, chunk);
}

// ---- the update ----

// Returns the operations of the matmuls of Muon or SOAP for a matrix.
static inline double cost_rule_flops_(const OptimizerState* state, const Matrices* m, int soap_every) {
    const double rows = (double)m->rows, cols = (double)m->cols;
    switch (state->rule[m->row]) {
    case RULE_MUON:
        return muon_flops(rows, cols);
    case RULE_SOAP:
        return soap_flops(rows, cols, sqrt((double)state_square(state, m->rows)),
                          sqrt((double)state_square(state, m->cols)), soap_every);
    case RULE_ADAMW:
    case RULE_ADAMW8:
    case RULE_FACTORED:
    case RULE_FULL:
    case RULE_LION:
    case RULE_SGD:
    case RULE_NONE:
        break; // no matmuls
    }
    return 0;
}

// Adds the matmuls of the update, of the matrices that a rank owns.
static inline void cost_rules_(const CostWalk* w, const OptimizerState* state, int soap_every) {
    for (int k = 0; k < state->num_matrices; k++) {
        const Matrices* m = &state->matrices[k];
        cost_add(w, COST_MATMULS,
                 (double)matrices_all(m) / m->owners * cost_rule_flops_(state, m, soap_every), 0);
    }
}

// Returns the bytes that travel in a tensor group in one direction: this rank's share of the
// matrices.
static inline double cost_whole_bytes_(const OptimizerState* state) {
    double elements = 0;
    for (int k = 0; k < state->num_matrices && model_is_cut(state->cfg); k++) {
        const Matrices* m = &state->matrices[k];
        elements += (double)matrices_all(m) * (double)m->rows * (double)m->cols / m->owners;
    }
    return elements * sizeof(float);
}

static inline double cost_whole_s_(const OptimizerState* state, const Settled* s) {
    const Links links = cost_links(s);
    const LinksGroup group = links_group(&links, s->ranks.grid.shape.tensor, 1);
    const double bytes = cost_whole_bytes_(state);
    return bytes > 0 ? 2 * links_exchange_s(&links, group, bytes) : 0;
}

// Adds the norm of the gradient, and the update of the parameters that this rank owns.
static inline void cost_optimizer_(const CostWalk* w, const Settled* s) {
    const size_t gradient_bytes = s->gradient_bytes;
    OptimizerState state;
    Map map;
    settled_state(&state, &map, s);
    const double owned = (double)map.totals.elements[MAP_OWNED], updated = (double)map.totals.updated,
                 all_frozen = owned * freeze_count(&s->freeze, s->cfg) / model_count_stored(s->cfg),
                 // frozen parameters among the updated
        frozen = fmax(all_frozen - (owned - updated), 0);
    cost_add(w, COST_MEMORY, 0, updated * (double)gradient_bytes);
    cost_add(w, COST_UPDATE, 0,
             optimizer_bytes(&state, (size_t)w->size, gradient_bytes) -
                 frozen * ((double)gradient_bytes + 2 * w->size));
    cost_rules_(w, &state, s->options.optimizer.soap_every);
    w->sum->s[COST_TENSOR] += cost_whole_s_(&state, s);
}

// Returns the tokens that the classifier processes at a time.
static inline double cost_chunk_(const Settled* s, double N) {
    const Options* o = &s->options;
    return o->program.trainer == OPTION_GPU && o->memory.logits_chunk > 0
               ? fmin(o->memory.logits_chunk, N)
               : (double)model_classifier_chunk(s->cfg, (size_t)N);
}

// Adds the matmuls of the adapters in all layers: `passes` for both of their products.
static inline void cost_adapters_(const CostWalk* w, double passes) {
    const int in[ADAPT_MATRICES] = {w->cfg.C, model_attention_values(w->cfg), w->cfg.C, model_hidden(w->cfg)},
              out[ADAPT_MATRICES] = {model_attention_rows(w->cfg), w->cfg.C,
                                     model_gates(w->cfg) * model_hidden(w->cfg), w->cfg.C};
    for (int m = 0; m < ADAPT_MATRICES; m++) {
        const double columns = adapter_a_rows(model_adapter_shape(w->cfg, (AdaptedMatrix)m)),
                     layers = model_layers_of(w->cfg, model_adapted_layers((AdaptedMatrix)m));
        cost_add(w, COST_MATMULS, passes * layers * matmul_flops(w->N, in[m] + out[m], columns), 0);
    }
}

// Returns a walk over the operations of a process; the walk adds to *sum.
static inline CostWalk cost_walk_(const Settled* s, const CostRates* rates, CostUpdate* sum) {
    const Options* o = &s->options;
    const GridShape shape = s->ranks.grid.shape;
    CostWalk w;
    w.cfg = s->part;
    w.freeze = &s->freeze;
    w.rates = rates;
    model_parameter_rows(w.rows, model_of_base(s->part));
    w.times = ceil((double)o->batch.total / o->batch.seq_len / o->batch.size / shape.data);
    // a data rank with any work has at least one sequence
    w.N = fmax((double)o->batch.total / shape.data / w.times, o->batch.seq_len) / shape.context;
    w.T = o->batch.seq_len;
    w.stream = w.N / shape.tensor;
    w.tensor_ranks = shape.tensor;
    w.size = (double)s->element_bytes;
    w.gradient_bytes = (double)s->gradient_bytes;
    w.is_fused = o->program.trainer == OPTION_GPU;
    w.l = 0;
    w.sum = sum;
    return w;
}

// Returns the micro-batch of a walk as the processes of the grid exchange it.
static inline CostTransfers cost_exchanged_(const CostWalk* w, const Settled* s) {
    const GridShape shape = s->ranks.grid.shape;
    const CostTransfers x = {
        cost_links(s), shape, s->part, w->N, w->N * shape.context, w->size, s->options.memory.recompute};
    return x;
}

// Adds the time that the processes wait for transfers, in a step with passes of these lengths.
static inline void cost_transfers_(const CostWalk* w, const Settled* s, const double pass_s[COST_PASSES]) {
    const GridShape shape = s->ranks.grid.shape;
    const CostTransfers x = cost_exchanged_(w, s);
    double each_s[COST_PASSES], beside_s[COST_PASSES]; // a pass of a micro-batch; what it hides
    for (int pass = 0; pass < COST_PASSES; pass++) {
        const double tensor = cost_tensor_s(&x, (CostPass)pass), context = cost_context_s(&x, (CostPass)pass),
                     experts = cost_expert_s(&x, (CostPass)pass);
        w->sum->s[COST_EXPERTS] += w->times * experts;
        w->sum->s[COST_TENSOR] += w->times * tensor;
        w->sum->s[COST_CONTEXT] += w->times * context;
        each_s[pass] = pass_s[pass] / w->times + tensor + context + experts;
        // CPUs wait for all messages
        beside_s[pass] = s->options.program.trainer == OPTION_GPU ? each_s[pass] : 0;
    }
    const MapOf of = settled_map(s, 1);
    w->sum->s[COST_DATA] +=
        cost_data_s(&x, &of, grid_rank(&s->ranks.grid), w->gradient_bytes, w->times, beside_s);
    w->sum->s[COST_PIPELINE] += (w->times + shape.pipeline - 1) * 2 * cost_send_s(&x) +
                                (shape.pipeline - 1) * (each_s[COST_FORWARD] + each_s[COST_BACKWARD]);
}

// Returns the bytes that a process sends in a step, without ZeRO's (zero_traffic).
static inline CostTraffic cost_traffic(const Settled* s) {
    const CostWalk w = cost_walk_(s, NULL, NULL);
    const CostTransfers x = cost_exchanged_(&w, s);
    CostTraffic traffic = cost_traffic_of(&x, w.times);
    OptimizerState state;
    Map map;
    settled_state(&state, &map, s);
    traffic.tensor += 2 * links_moved(cost_tensor_group_(&x), cost_whole_bytes_(&state));
    return traffic;
}

// Returns the planned time of a step on one rank, with its share of the sequences.
static inline CostUpdate cost_update(const Settled* s, const CostRates* rates) {
    const Grid* grid = &s->ranks.grid;
    CostUpdate sum;
    memset(&sum, 0, sizeof(sum));
    CostWalk w = cost_walk_(s, rates, &sum);
    const double chunk = cost_chunk_(s, w.N);
    double pass_s[COST_PASSES];
    cost_forward_(&w, grid);
    if (settled_has_teacher(s)) {
        cost_teacher_(&w, s->teacher, chunk);
    }
    cost_adapters_(&w, 1);
    pass_s[COST_FORWARD] = cost_total_s(&sum);
    cost_backward_(&w, grid, chunk, s->options.memory.recompute);
    cost_adapters_(&w, 2.5); // gradients of both factors and of the input; half of the first pass
    pass_s[COST_BACKWARD] = cost_total_s(&sum) - pass_s[COST_FORWARD];
    cost_transfers_(&w, s, pass_s);
    w.times = 1;
    cost_optimizer_(&w, s);
    return sum;
}

#endif
