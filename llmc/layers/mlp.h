/*
mlp.h -- the MLP of a block, or its experts, on the CPU, with the matmuls of linear.h.

    fch (N, gates F) = inp fc^T + bias
    act (N, F)       = activation of fch (activation.h)
    out (N, C)       = act proj^T + bias

With matmuls in bf16, and N and F that are multiples of 32, its hidden layer is kept as mlp_bf16.h
does it.

With experts, the router (router.h) chooses E_used of them for each token. They are MLPs with gates,
and M rows in all (experts.h):

    logits (N, E) = inp router^T + bias
    in (M, C)     = the rows of inp that each expert takes
    fch, act      = as above, of the rows of each expert; act times the weight of its row
    out (N, C)    = sum of each token's rows of act proj^T, plus the bias times that weight, and the
                    MLP that all tokens take

In fp32 and in 8 bits only rows with a token are computed, in bf16 all: their number is a multiple
of 32. Experts that no token takes are not read.

If several ranks cut the matrices (tensor_parallel.h), inp and out are the rows of this rank's
tokens; else of all.

If ranks divide the experts (expert_parallel.h), a rank has E / e of them, and computes the rows of
one rank at a time. fch and act belong to the last such rows; the backward pass sets them again.
*/
#ifndef LLMC_MLP_H
#define LLMC_MLP_H

#include <assert.h>
#include <string.h>

#include "llmc/ops/activation.h"
#include "llmc/ops/experts.h"
#include "llmc/ops/matmul.h"
#include "llmc/ops/norm.h"
#include "llmc/ops/router.h"
#include "llmc/layers/linear.h"
#include "llmc/layers/pass.h"
#include "llmc/parallel/expert_parallel.h"
#include "llmc/bf16/mlp_bf16.h"

// Experts of a block; router.E = 0: none.
typedef struct {
    Router router;
    const float *routerw, *logits_bias; // (E, C), (E) or NULL; always fp32
    Weight fc, proj;                    // of the MLP that all tokens take
    float *fch, *act;                   // (N, gates Fs), (N, Fs); NULL without it
    float *in, *out;                    // (M, C)
    ExpertParallel parallel;
} Experts;

typedef struct {
    ActivationKind kind;
    int N;
    Weight fc, proj;  // (gates F, C), (C, F); of expert 0
    float *fch, *act; // (N, gates F), (N, F); of experts M rows
    Linear* linear;
    Experts experts;
    TensorParallel tensor;
    const float* proj_bias; // (C), or NULL
} Mlp;

// Gradients of a block's MLP or experts, of the router (`of_router`) and of the MLP that all tokens
// take, and the memory that they need.
typedef struct {
    MlpGradients mlp; // dinp (N, C); dfch (M, gates F)
    size_t neighbor;  // elements from the gradients on one rank's tokens to those on the next's
    float *drouterw, *dlogits_bias, *dshared_fcw, *dshared_projw;
    float *dlogits, *dscale; // (N, E); (M, 1 + F / 32)
    RouterLosses losses;
    double* statistics; // of the router; NULL: not counted
} MlpLayerGradients;

// Returns the MLP of a layer.
static inline Mlp mlp_of(const LayerPass* layer, Group* expert_group) {
    const ModelConfig cfg = layer->cfg;
    const LayerWeights* w = &layer->weights;
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const Pass* pass = layer->pass;
    const Architecture* kinds = model_architecture(cfg.arch);
    const int has_experts = model_layer_has(cfg, LAYERS_EXPERTS, layer->l);
    const Router router = {.kind = kinds->router,
                           .B = pass->B,
                           .T = pass->T,
                           .E = has_experts ? cfg.E : 0,
                           .used = cfg.E_used,
                           .groups = cfg.expert_groups,
                           .groups_used = cfg.expert_groups_used,
                           .factor = model_router_factor(cfg),
                           .bias = p->routerb,
                           .logits = a->router_logits,
                           .chosen = a->chosen,
                           .rows = a->expert_rows,
                           .order = a->expert_order,
                           .first = a->expert_first,
                           .scale = a->expert_scale,
                           .counted = pass_counted(pass)};
    const ExpertParallel parallel = {has_experts && model_divides_experts(cfg) ? expert_group : NULL,
                                     a->expert_counts,
                                     a->arrived_in,
                                     a->arrived_out,
                                     a->arrived_scale,
                                     a->darrived_scale,
                                     a->arrived_order,
                                     a->arrived_first};
    const Experts experts = {router,  p->routerw,  p->routerwb,  w->shared_fc,  w->shared_fcproj,
                             a->sfch, a->sfch_act, a->expert_in, a->expert_out, parallel};
    return (Mlp){.kind = model_activation(cfg),
                 .N = pass_tokens(pass),
                 .fc = w->fc,
                 .proj = w->fcproj,
                 .fch = has_experts ? a->efch : a->fch,
                 .act = has_experts ? a->efch_act : a->fch_act,
                 .linear = layer->linear,
                 .experts = experts,
                 .tensor = layer->tensor,
                 .proj_bias = p->fcprojb}; // of experts: proj.bias
}

// Returns the gradients of a layer: `d` has its parameters' gradients, `a` has memory.
static inline MlpLayerGradients mlp_gradients_of(const ModelParameters* d, const ModelActivations* a,
                                                 GradientMode mode, size_t neighbor, RouterLosses losses,
                                                 double* statistics) {
    // a layer has one of both, unless it is frozen
    return (MlpLayerGradients){.mlp = {.dinp = a->branch,
                                       .dfcw = d->fcw ? d->fcw : d->efcw,
                                       .dfcb = d->fcb ? d->fcb : d->efcb,
                                       .dfcprojw = d->fcprojw ? d->fcprojw : d->efcprojw,
                                       .dfcprojb = d->fcprojb ? d->fcprojb : d->efcprojb,
                                       .mode = mode,
                                       .dfch = a->dfch,
                                       .sums = a->dqkv},
                               .neighbor = neighbor,
                               .drouterw = d->routerw,
                               .dlogits_bias = d->routerwb,
                               .dshared_fcw = d->sfcw,
                               .dshared_projw = d->sfcprojw,
                               .dlogits = a->drouter_logits,
                               .dscale = a->dexpert_scale,
                               .losses = losses,
                               .statistics = statistics};
}

// ---- one MLP ----

static inline int mlp_is_packed_(const Mlp* mlp) {
    const Linear* linear = mlp->linear;
    return linear->is_bf16 && !linear->few && !weight_has_adapter(&mlp->fc.adapter) &&
           !weight_has_adapter(&mlp->proj.adapter) && mlp_bf16_fits((size_t)mlp->N, (size_t)mlp->proj.C);
}

static inline MlpBf16 mlp_packed_(const Mlp* mlp) {
    const Weight *fc = &mlp->fc, *proj = &mlp->proj;
    return (MlpBf16){.kind = mlp->kind,
                     .N = mlp->N,
                     .C = fc->C,
                     .F = proj->C,
                     .fch = mlp->fch,
                     .act = (uint32_t*)(void*)mlp->act,
                     .fcw = fc->forward,
                     .fcprojw = proj->forward,
                     .fcw_backward = fc->backward,
                     .fcprojw_backward = proj->backward,
                     .fcb = fc->bias,
                     .fcprojb = proj->bias};
}

static inline void mlp_activate_(const Mlp* mlp) {
    activation_forward_cpu(mlp->act, mlp->fch, (size_t)mlp->N, (size_t)mlp->proj.C, mlp->kind);
}

static inline void mlp_one_hidden_(const Mlp* mlp, const float* inp) {
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_hidden_cpu(&packed, inp, &mlp->linear->bf16);
    } else {
        linear_forward_cpu(mlp->fch, inp, &mlp->fc, mlp->N, mlp->linear);
        mlp_activate_(mlp);
    }
}

static inline void mlp_one_forward_(float* out, const Mlp* mlp) {
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_forward_cpu(out, &packed, &mlp->linear->bf16);
    } else {
        linear_forward_cpu(out, mlp->act, &mlp->proj, mlp->N, mlp->linear);
    }
}

static inline void mlp_one_activation_(const Mlp* mlp) {
    if (!mlp_is_packed_(mlp)) {
        mlp_activate_(mlp);
    }
}

static inline void mlp_one_backward_(const Mlp* mlp, const MlpGradients* d, const float* dout,
                                     const float* inp) {
    Linear* linear = mlp->linear;
    float* dact = mlp->act; // dfcprojw, which reads act, comes first
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_backward_cpu(&packed, d, dout, inp, &linear->bf16);
        return;
    }
    linear_backward_cpu(dact, (LinearGradients){d->dfcprojw, d->dfcprojb, d->mode}, dout, mlp->act,
                        &mlp->proj, mlp->N, linear);
    activation_backward_cpu(d->dfch, dact, mlp->fch, (size_t)mlp->N, (size_t)mlp->proj.C, mlp->kind);
    linear_backward_cpu(d->dinp, (LinearGradients){d->dfcw, d->dfcb, d->mode}, d->dfch, inp, &mlp->fc, mlp->N,
                        linear);
}

// ---- experts ----

static inline int mlp_has_experts_(const Mlp* mlp) { return mlp->experts.router.E > 0; }

// Returns the MLP that all tokens take; it has no rows if the model has none.
static inline Mlp mlp_shared_(const Mlp* mlp) {
    const Experts* x = &mlp->experts;
    return (Mlp){.kind = mlp->kind,
                 .N = x->fch ? mlp->N : 0,
                 .fc = x->fc,
                 .proj = x->proj,
                 .fch = x->fch,
                 .act = x->act,
                 .linear = mlp->linear};
}

// The rows of experts are multiples of 32, so F decides.
static inline int mlp_experts_are_packed_(const Mlp* mlp) {
    return mlp->linear->is_bf16 && !mlp->linear->few && mlp_bf16_fits(ROUTER_TILE, (size_t)mlp->proj.C);
}

// Returns the MLP of expert e and its rows: in fp32 and 8 bits only those with a token. Its output
// lacks the bias, which has a weight in each row.
static inline Mlp mlp_expert_(const Mlp* mlp, int e) {
    const Router* r = &mlp->experts.router;
    const size_t first = (size_t)r->first[e];
    Weight proj = linear_expert(mlp->linear, &mlp->proj, e);
    proj.bias = NULL;
    return (Mlp){.kind = mlp->kind,
                 .N = mlp_experts_are_packed_(mlp) ? r->first[e + 1] - r->first[e] : router_count(r, e),
                 .fc = linear_expert(mlp->linear, &mlp->fc, e),
                 .proj = proj,
                 .fch = mlp->fch + first * (size_t)mlp->fc.OC,
                 .act = mlp->act + first * (size_t)mlp->proj.C,
                 .linear = mlp->linear};
}

// Returns the rows of expert e of (M, C).
static inline float* mlp_rows_(float* rows, const Mlp* mlp, int e) {
    return rows + (size_t)mlp->experts.router.first[e] * (size_t)mlp->fc.C;
}

// Sets fch of an expert, and in bf16 act; in fp32 and 8 bits experts_activate_cpu sets act.
static inline void mlp_expert_hidden_(const Mlp* mlp, int e) {
    const Mlp expert = mlp_expert_(mlp, e);
    const float* in = mlp_rows_(mlp->experts.in, mlp, e);
    if (expert.N == 0) {
        return;
    }
    if (mlp_experts_are_packed_(mlp)) {
        MlpBf16 packed = mlp_packed_(&expert);
        packed.scale = mlp->experts.router.scale + mlp->experts.router.first[e];
        mlp_bf16_hidden_cpu(&packed, in, &mlp->linear->bf16);
    } else {
        linear_forward_cpu(expert.fch, in, &expert.fc, expert.N, mlp->linear);
    }
}

static inline void mlp_experts_activation_(const Mlp* mlp) {
    if (!mlp_experts_are_packed_(mlp)) {
        experts_activate_cpu(mlp->act, mlp->fch, &mlp->experts.router, mlp->proj.C, mlp->kind);
    }
}

// Sets fch and act of the rows of this rank's experts.
static inline void mlp_own_hidden_(const Mlp* mlp) {
    for (int e = 0; e < mlp->experts.router.E; e++) {
        mlp_expert_hidden_(mlp, e);
    }
    mlp_experts_activation_(mlp);
}

// Sets the rows of their output.
static inline void mlp_own_forward_(const Mlp* mlp) {
    for (int e = 0; e < mlp->experts.router.E; e++) {
        const Mlp expert = mlp_expert_(mlp, e);
        if (expert.N > 0) {
            mlp_one_forward_(mlp_rows_(mlp->experts.out, mlp, e), &expert);
        }
    }
    if (mlp->proj.bias) {
        experts_bias_cpu(mlp->experts.out, mlp->proj.bias, &mlp->experts.router, mlp->proj.OC);
    }
}

static inline int mlp_divides_experts_(const Mlp* mlp) {
    return expert_parallel_ranks(&mlp->experts.parallel) > 1;
}

// Returns the experts of this rank, with the rows that arrive from another one.
static inline Mlp mlp_arrived_(const Mlp* mlp, int from) {
    const ExpertParallel* parallel = &mlp->experts.parallel;
    Mlp arrived = *mlp;
    arrived.experts.router = expert_arrived_cpu(parallel, &mlp->experts.router, from);
    arrived.experts.in = parallel->in;
    arrived.experts.out = parallel->out;
    return arrived;
}

// Sets the experts' outputs for this rank's tokens, and computes outputs for other ranks' tokens.
static inline void mlp_divided_forward_(const Mlp* mlp) {
    const Experts* x = &mlp->experts;
    const ExpertParallel* parallel = &x->parallel;
    const int C = mlp->fc.C;
    const ExpertArray sent[] = {{x->in, parallel->in, C}, {x->router.scale, parallel->scale, 1}},
                      returned = {x->out, parallel->out, C};
    expert_counts_cpu(parallel, &x->router);
    for (int k = 0; k < expert_parallel_ranks(parallel); k++) {
        const ExpertRound round = expert_round(parallel->group->rank, expert_parallel_ranks(parallel), k);
        const Mlp arrived = mlp_arrived_(mlp, round.from);
        expert_send_cpu(parallel, &x->router, round, sent, 2);
        mlp_own_hidden_(&arrived);
        mlp_own_forward_(&arrived);
        expert_return_cpu(parallel, &x->router, round, &returned, 1);
    }
}

static inline void mlp_experts_hidden_(const Mlp* mlp, const float* inp) {
    const Experts* x = &mlp->experts;
    const Mlp shared = mlp_shared_(mlp);
    assert(activation_gates(mlp->kind) == 2);
    if (mlp->N > 0) {
        matmul_forward_cpu(x->router.logits, inp, x->routerw, x->logits_bias,
                           (MatmulSizes){mlp->N, mlp->fc.C, x->router.E}, &mlp->linear->matmul);
    }
    router_forward_cpu(&x->router);
    experts_gather_cpu(x->in, inp, &x->router, mlp->fc.C);
    if (!mlp_divides_experts_(mlp)) {
        mlp_own_hidden_(mlp);
    }
    if (shared.N > 0) {
        mlp_one_hidden_(&shared, inp);
    }
}

static inline void mlp_experts_forward_(float* out, const Mlp* mlp) {
    const Experts* x = &mlp->experts;
    const Mlp shared = mlp_shared_(mlp);
    (mlp_divides_experts_(mlp) ? mlp_divided_forward_ : mlp_own_forward_)(mlp);
    if (shared.N > 0) {
        mlp_one_forward_(out, &shared);
    }
    experts_sum_cpu(out, x->out, &x->router, mlp->fc.C, shared.N > 0 ? GRADIENT_ADD : GRADIENT_SET);
}

// ---- gradients of experts ----

static inline size_t mlp_elements_(const Weight* w) { return (size_t)w->OC * (size_t)w->C; }

// Returns the gradients of expert e, parts of the gradients of all experts, without the second
// bias.
static inline MlpGradients mlp_gradients_of_expert_(const Mlp* mlp, const MlpGradients* d, int e) {
    const size_t fc = (size_t)e * mlp_elements_(&mlp->fc), proj = (size_t)e * mlp_elements_(&mlp->proj);
    return (MlpGradients){.dinp = mlp_rows_(mlp->experts.out, mlp, e),
                          .dfcw = d->dfcw ? d->dfcw + fc : NULL,
                          .dfcb = d->dfcb ? d->dfcb + (size_t)e * (size_t)mlp->fc.OC : NULL,
                          .dfcprojw = d->dfcprojw ? d->dfcprojw + proj : NULL,
                          .mode = d->mode,
                          .dfch = d->dfch + (size_t)mlp->experts.router.first[e] * (size_t)mlp->fc.OC};
}

// Sets the gradients of an expert without rows.
static inline void mlp_expert_clear_(const Mlp* mlp, const MlpGradients* d) {
    if (d->dfcw && d->mode == GRADIENT_SET) {
        memset(d->dfcw, 0, mlp_elements_(&mlp->fc) * sizeof(float));
    }
    if (d->dfcb && d->mode == GRADIENT_SET) {
        memset(d->dfcb, 0, (size_t)mlp->fc.OC * sizeof(float));
    }
    if (d->dfcprojw && d->mode == GRADIENT_SET) {
        memset(d->dfcprojw, 0, mlp_elements_(&mlp->proj) * sizeof(float));
    }
}

// Adds `parts` (F / 32, rows) to dscale of the rows of an expert, in order.
static inline void mlp_sum_dscale_(float* dscale, const float* parts, int rows, int F) {
    for (int m = 0; m < rows; m++) {
        float sum = dscale[m];
        for (int i = 0; i < F / BF16_TILE; i++) {
            sum += parts[(size_t)i * (size_t)rows + (size_t)m];
        }
        dscale[m] = sum;
    }
}

// Goes back through the bias of the experts' outputs: adds to dscale.
static inline void mlp_proj_bias_backward_(const Mlp* mlp, const MlpLayerGradients* all) {
    const Experts* x = &mlp->experts;
    if (mlp->proj.bias) {
        experts_bias_backward_cpu(all->mlp.dfcprojb, all->dscale, x->out, mlp->proj.bias, &x->router,
                                  mlp->proj.OC, all->mlp.mode);
    }
}

// Replaces `out`, the gradient of the experts' outputs, by the gradient of their inputs; sets
// dscale. In bf16, with memory for its parts.
static inline void mlp_experts_backward_packed_(const Mlp* mlp, const MlpLayerGradients* all, float* parts) {
    const Experts* x = &mlp->experts;
    const Router* r = &x->router;
    const int F = mlp->proj.C;
    memset(all->dscale, 0, (size_t)r->first[r->E] * sizeof(float));
    mlp_proj_bias_backward_(mlp, all);
    for (int e = 0; e < r->E; e++) {
        const Mlp expert = mlp_expert_(mlp, e);
        MlpGradients d = mlp_gradients_of_expert_(mlp, &all->mlp, e);
        MlpBf16 packed = mlp_packed_(&expert);
        packed.scale = r->scale + r->first[e];
        d.dscale = parts;
        d.sums = expert.act + matmul_bf16_pairs(expert.N, F); // packed rows leave half of it free
        if (expert.N > 0) {
            mlp_bf16_backward_cpu(&packed, &d, d.dinp, mlp_rows_(x->in, mlp, e), &mlp->linear->bf16);
            mlp_sum_dscale_(all->dscale + r->first[e], parts, expert.N, F);
        } else {
            mlp_expert_clear_(mlp, &d);
        }
    }
}

// Computes them in fp32.
static inline void mlp_experts_backward_unpacked_(const Mlp* mlp, const MlpLayerGradients* all) {
    const Experts* x = &mlp->experts;
    const Router* r = &x->router;
    Linear* linear = mlp->linear;
    for (int e = 0; e < r->E; e++) { // dact takes the place of act
        const Mlp expert = mlp_expert_(mlp, e);
        const MlpGradients d = mlp_gradients_of_expert_(mlp, &all->mlp, e);
        if (expert.N > 0) {
            linear_backward_cpu(expert.act, (LinearGradients){d.dfcprojw, NULL, d.mode}, d.dinp, expert.act,
                                &expert.proj, expert.N, linear);
        } else {
            mlp_expert_clear_(mlp, &d);
        }
    }
    experts_activate_backward_cpu(all->mlp.dfch, all->dscale, mlp->act, mlp->fch, r, mlp->proj.C, mlp->kind);
    mlp_proj_bias_backward_(mlp, all);
    for (int e = 0; e < r->E; e++) {
        const Mlp expert = mlp_expert_(mlp, e);
        const MlpGradients d = mlp_gradients_of_expert_(mlp, &all->mlp, e);
        if (expert.N > 0) {
            linear_backward_cpu(d.dinp, (LinearGradients){d.dfcw, d.dfcb, d.mode}, d.dfch,
                                mlp_rows_(x->in, mlp, e), &expert.fc, expert.N, linear);
        }
    }
}

static inline void mlp_own_backward_(const Mlp* mlp, const MlpLayerGradients* all, float* parts) {
    if (mlp_experts_are_packed_(mlp)) {
        mlp_experts_backward_packed_(mlp, all, parts);
    } else {
        mlp_experts_backward_unpacked_(mlp, all);
    }
}

// Returns the gradients of this rank's experts on the rows that arrive from another one.
static inline MlpLayerGradients mlp_arrived_gradients_(const Mlp* mlp, const MlpLayerGradients* all,
                                                       int from) {
    const size_t at = (size_t)from * all->neighbor;
    MlpLayerGradients arrived = *all;
    arrived.mlp.dfcw += all->mlp.dfcw ? at : 0;
    arrived.mlp.dfcb += all->mlp.dfcb ? at : 0;
    arrived.mlp.dfcprojw += all->mlp.dfcprojw ? at : 0;
    arrived.mlp.dfcprojb += all->mlp.dfcprojb ? at : 0;
    arrived.dscale = mlp->experts.parallel.dscale;
    return arrived;
}

// With divided experts: this rank's experts also process other ranks' rows.
static inline void mlp_divided_backward_(const Mlp* mlp, const MlpLayerGradients* all, float* parts) {
    const Experts* x = &mlp->experts;
    const ExpertParallel* parallel = &x->parallel;
    const int C = mlp->fc.C;
    const ExpertArray sent[] = {{x->in, parallel->in, C},
                                {x->out, parallel->out, C},
                                {x->router.scale, parallel->scale, 1}},
                      returned[] = {{x->out, parallel->out, C}, {all->dscale, parallel->dscale, 1}};
    for (int k = 0; k < expert_parallel_ranks(parallel); k++) {
        const ExpertRound round = expert_round(parallel->group->rank, expert_parallel_ranks(parallel), k);
        const Mlp arrived = mlp_arrived_(mlp, round.from);
        const MlpLayerGradients d = mlp_arrived_gradients_(mlp, all, round.from);
        expert_send_cpu(parallel, &x->router, round, sent, 3);
        mlp_own_hidden_(&arrived);
        mlp_own_backward_(&arrived, &d, parts);
        expert_return_cpu(parallel, &x->router, round, returned, 2);
    }
}

// Adds the gradient of the MLP that all tokens take to dinp.
static inline void mlp_shared_backward_(const Mlp* mlp, const MlpLayerGradients* all, const float* dout,
                                        const float* inp) {
    const Mlp shared = mlp_shared_(mlp);
    float *dinp = all->mlp.dinp, *own = mlp->experts.in; // (N, C)
    const MlpGradients d = {.dinp = own,
                            .dfcw = all->dshared_fcw,
                            .dfcprojw = all->dshared_projw,
                            .mode = all->mlp.mode,
                            .dfch = all->mlp.dfch};
    if (shared.N > 0) {
        mlp_one_backward_(&shared, &d, dout, inp);
        residual_forward_cpu(dinp, dinp, own, (size_t)mlp->N * (size_t)mlp->fc.C);
    }
}

// Sets dinp to the gradient through the router, and sets or adds to its parameters' gradients.
static inline void mlp_router_backward_(const Mlp* mlp, const MlpLayerGradients* all, const float* inp) {
    const Experts* x = &mlp->experts;
    const int N = mlp->N, C = mlp->fc.C, E = x->router.E;
    MatmulScratch* scratch = &mlp->linear->matmul;
    router_backward_cpu(all->dlogits, all->dscale, &x->router, all->losses);
    if (N == 0) {
        return;
    }
    if (all->drouterw) {
        matmul_backward_weight_cpu(all->drouterw, all->dlogits, inp, (MatmulSizes){N, C, E}, all->mlp.mode,
                                   scratch);
    }
    if (all->dlogits_bias) {
        matmul_backward_bias_cpu(all->dlogits_bias, all->dlogits, N, E, all->mlp.mode);
    }
    matmul_backward_input_cpu(all->mlp.dinp, all->dlogits, x->routerw, (MatmulSizes){N, C, E}, scratch);
    if (all->statistics) {
        router_statistics_add_cpu(all->statistics, &x->router);
    }
}

static inline void mlp_experts_backward_(const Mlp* mlp, const MlpLayerGradients* d, const float* dout,
                                         const float* inp) {
    const Experts* x = &mlp->experts;
    const int C = mlp->fc.C;
    float* parts = d->dscale + router_rows((size_t)mlp->N, x->router.E, x->router.used);
    experts_gather_cpu(x->out, dout, &x->router, C);
    experts_gather_cpu(x->in, inp, &x->router, C);
    (mlp_divides_experts_(mlp) ? mlp_divided_backward_ : mlp_own_backward_)(mlp, d, parts);
    mlp_router_backward_(mlp, d, inp);
    experts_sum_cpu(d->mlp.dinp, x->out, &x->router, C, GRADIENT_ADD);
    mlp_shared_backward_(mlp, d, dout, inp);
}

// ---- either ----

// Sets fch and act; with experts, routes the tokens. If ranks divide the experts, it only routes; a
// rank without tokens (N = 0) makes the same calls as the others. Collective.
static inline void mlp_hidden_cpu(const Mlp* mlp, const float* inp) {
    const float* all = tensor_gather_cpu(&mlp->tensor, 0, inp);
    (mlp_has_experts_(mlp) ? mlp_experts_hidden_ : mlp_one_hidden_)(mlp, all);
}

// Sets out, after mlp_hidden_cpu. Collective.
static inline void mlp_forward_cpu(float* out, const Mlp* mlp) {
    float* part = tensor_part(&mlp->tensor, out);
    (mlp_has_experts_(mlp) ? mlp_experts_forward_ : mlp_one_forward_)(part, mlp);
    tensor_sum_cpu(&mlp->tensor, out, mlp->proj_bias);
}

// Sets act from fch again, for a backward pass that needs it.
static inline void mlp_activation_cpu(const Mlp* mlp) {
    const Mlp shared = mlp_shared_(mlp);
    if (!mlp_divides_experts_(mlp)) {
        (mlp_has_experts_(mlp) ? mlp_experts_activation_ : mlp_one_activation_)(mlp);
    }
    if (shared.N > 0) {
        mlp_one_activation_(&shared);
    }
}

// Sets and adds to gradients. act and dfch are undefined afterwards. Collective.
static inline void mlp_backward_cpu(const Mlp* mlp, const MlpLayerGradients* d, const float* dout,
                                    const float* inp) {
    const TensorParallel* tensor = &mlp->tensor;
    const float *all_dout = tensor_gather_cpu(tensor, 0, dout), *all_inp = tensor_gather_cpu(tensor, 1, inp);
    MlpLayerGradients part = *d;
    part.mlp.dinp = tensor_part(tensor, d->mlp.dinp);
    part.mlp.dfcprojb = tensor_is_cut(tensor->cut) ? NULL : d->mlp.dfcprojb;
    tensor_bias_backward_cpu(tensor, d->mlp.dfcprojb, dout, d->mlp.mode);
    if (mlp_has_experts_(mlp)) {
        mlp_experts_backward_(mlp, &part, all_dout, all_inp);
    } else {
        mlp_one_backward_(mlp, &part.mlp, all_dout, all_inp);
    }
    tensor_sum_cpu(tensor, d->mlp.dinp, NULL);
}

#endif
