/*
mlp.cuh -- mlp.h on the GPU.

    fch (N, gates F) = inp fc^T + bias
    act (N, F)       = activation of fch (activation.h); matmuls may do GELU (matmul.cuh)
    out (N, C)       = residual + act proj^T + bias

The gradient of proj's bias is the sum of dout over its rows. It is computed where dout is made, but
for experts.

With experts, all of them are computed together (expert_matmul.cuh), as are the matmuls of the
router: a token takes the same experts in every batch. The gradient of the router's logits is
rounded to floatX.

If several ranks cut the matrices (tensor_parallel.cuh), inp, residual and out are the rows of this
rank's tokens; else of all.

If ranks divide the experts (expert_parallel.cuh), a rank has E / e of them, and computes the rows
of one rank at a time, as mlp.h says.
*/
#ifndef LLMC_MLP_CUH
#define LLMC_MLP_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/linear.cuh"
#include "llmc/layers/pass.h"
#include "llmc/ops/expert_bias.cuh"
#include "llmc/ops/experts.cuh"
#include "llmc/ops/router.cuh"
#include "llmc/parallel/expert_parallel.cuh"
#include "llmc/parallel/zero.cuh"

// Experts of a block; router.E = 0: none.
typedef struct {
    Router router;
    const floatX* routerw;     // (E, C)
    const floatX* logits_bias; // (E), or NULL
    Weight fc, proj;           // of the MLP that all tokens take
    floatX *fch, *act;         // (N, gates Fs), (N, Fs); NULL without it
    floatX *in, *out;          // (M, C)
    ExpertParallelGpu parallel;
} ExpertsGpu;

typedef struct {
    ActivationKind kind;
    int N;
    Weight fc, proj;   // (gates F, C), (C, F); of expert 0
    floatX *fch, *act; // (N, gates F), (N, F); of experts M rows
    LinearGpu* linear;
    ExpertsGpu experts;
    TensorParallelGpu tensor;
    const floatX* proj_bias; // (C), or NULL
} MlpGpu;

// Gradients of parameters, without data if frozen, which the backward pass sets or adds to as
// `mode` says; dinp (N, C), which it sets; and memory that it uses.
typedef struct {
    floatX* dinp;
    Gradient dfcw, dfcb, dfcprojw;
    GradientMode mode;
    floatX* dfch;      // (M, gates F)
    size_t neighbor;   // elements from the gradients on one rank's tokens to those on the next's
    Gradient dfcprojb; // of experts
    // of the router, and of the MLP that all tokens take
    Gradient drouterw, dlogits_bias, dshared_fcw, dshared_projw;
    floatX* dlogits; // (N, E)
    float* dscale;   // (M)
    RouterLosses losses;
    double* statistics; // of the router, on the GPU; NULL: not counted
} MlpGradientsGpu;

// Returns the MLP of a layer; `router_bias` (E) is of its router, or NULL.
static inline MlpGpu mlp_of(const LayerPassGpu* layer, const GroupGpu* expert_group,
                            const ExpertTrafficGpu* traffic, const float* router_bias) {
    const ModelConfig cfg = layer->cfg;
    const LayerWeights* w = &layer->weights;
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const Pass* pass = layer->pass;
    const int has_experts = model_layer_has(cfg, LAYERS_EXPERTS, layer->l);
    const Router router = {model_architecture(cfg.arch)->router,
                           pass->B,
                           pass->T,
                           has_experts ? cfg.E : 0,
                           cfg.E_used,
                           cfg.expert_groups,
                           cfg.expert_groups_used,
                           model_router_factor(cfg),
                           has_experts ? router_bias : NULL,
                           a->router_logits,
                           a->chosen,
                           a->expert_rows,
                           a->expert_order,
                           a->expert_first,
                           a->expert_scale,
                           pass_counted(pass)};
    const ExpertRowsGpu arrived = {a->arrived_in, a->arrived_out, a->arrived_scale, a->darrived_scale};
    const ExpertParallelGpu parallel = {
        has_experts && model_divides_experts(cfg) ? expert_group : NULL,
        a->expert_counts,
        traffic->counts ? traffic->counts + (size_t)layer->l * cfg.part.expert_ranks * cfg.E : NULL,
        {arrived, traffic->next},
        pass->cached ? 1 : (int)EXPERT_SETS,
        a->arrived_order,
        a->arrived_first,
        traffic,
        layer->linear->gpu};
    const ExpertsGpu experts = {router,  p->routerw,  p->routerwb,  w->shared_fc,  w->shared_fcproj,
                                a->sfch, a->sfch_act, a->expert_in, a->expert_out, parallel};
    return {model_activation(cfg),
            pass_tokens(pass),
            w->fc,
            w->fcproj,
            has_experts ? a->efch : a->fch,
            has_experts ? a->efch_act : a->fch_act,
            layer->linear,
            experts,
            layer->tensor,
            p->fcprojb};
}

// Returns the gradients of a layer: `d` has its parameters' gradients, `a` has memory.
static inline MlpGradientsGpu mlp_gradients_of(const ModelGradients* d, const ModelActivations* a,
                                               GradientMode mode, size_t neighbor, RouterLosses losses,
                                               double* statistics) {
    // a layer has one of both, unless it is frozen
    return {a->branch,
            d->fcw.data ? d->fcw : d->efcw,
            d->fcb.data ? d->fcb : d->efcb,
            d->fcprojw.data ? d->fcprojw : d->efcprojw,
            mode,
            a->dfch,
            neighbor,
            d->fcprojb.data ? d->fcprojb : d->efcprojb,
            d->routerw,
            d->routerwb,
            d->sfcw,
            d->sfcprojw,
            (floatX*)(void*)a->drouter_logits,
            a->dexpert_scale,
            losses,
            statistics};
}

// ---- one MLP ----

static inline void mlp_one_activation_(const MlpGpu* mlp) {
    activation_forward(mlp->act, mlp->fch, mlp->N, mlp->proj.C, mlp->kind, mlp->linear->gpu);
}

static inline void mlp_one_hidden_(const MlpGpu* mlp, const floatX* inp) {
    if (mlp->kind == ACTIVATION_GELU) {
        linear_forward_gelu(mlp->act, mlp->fch, inp, &mlp->fc, mlp->N, mlp->linear);
    } else {
        linear_forward(mlp->fch, inp, &mlp->fc, mlp->N, mlp->linear);
        linear_activation_forward(mlp->act, mlp->fch, &mlp->proj, mlp->N, mlp->kind, mlp->linear);
    }
}

static inline void mlp_one_forward_residual_(floatX* out, const floatX* residual, const MlpGpu* mlp) {
    linear_forward_residual(out, residual, mlp->act, &mlp->proj, mlp->N, mlp->linear);
}

// Sets dfch and dfcb.
static inline void mlp_one_backward_hidden_(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout) {
    const Weight* proj = &mlp->proj;
    floatX* dact = mlp->act; // act is no longer read
    if (mlp->kind == ACTIVATION_GELU) {
        linear_backward_input_gelu(d->dfch, {d->dfcb, d->mode}, dout, proj, mlp->fch, mlp->N, mlp->linear);
        return;
    }
    linear_backward_input(dact, dout, proj, mlp->N, mlp->linear);
    linear_activation_backward(d->dfch, dact, mlp->fch, &mlp->fc, mlp->N, mlp->kind, mlp->linear);
    if (d->dfcb.data) {
        matmul_backward_bias(d->dfcb, d->dfch, mlp->N, mlp->fc.OC, d->mode, mlp->linear->matmul);
    }
}

static inline void mlp_one_backward_(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout,
                                     const floatX* inp) {
    LinearGpu* linear = mlp->linear;
    linear_backward_weight({d->dfcprojw, d->mode}, dout, mlp->act, &mlp->proj, mlp->N, linear);
    mlp_one_backward_hidden_(mlp, d, dout);
    linear_backward(d->dinp, {d->dfcw, d->mode}, d->dfch, inp, &mlp->fc, mlp->N, linear);
}

// ---- experts ----

static inline int mlp_has_experts_(const MlpGpu* mlp) { return mlp->experts.router.E > 0; }

// Returns the MLP that all tokens take; it has no rows if the model has none.
static inline MlpGpu mlp_shared_(const MlpGpu* mlp) {
    const ExpertsGpu* x = &mlp->experts;
    return {mlp->kind, x->fch ? mlp->N : 0, x->fc, x->proj, x->fch, x->act, mlp->linear, {}, {}, NULL};
}

// Returns the rows of the matmuls of the router: all tokens.
static inline ExpertRows mlp_tokens_(const MlpGpu* mlp) {
    return {NULL, 1, mlp->N, mlp->N, EXPERT_BY_DEFAULT};
}

static inline void mlp_experts_activation_(const MlpGpu* mlp) {
    experts_activate(mlp->act, mlp->fch, &mlp->experts.router, mlp->proj.C, mlp->kind, mlp->linear->gpu);
}

// Sets fch and act of the rows of this rank's experts.
static inline void mlp_own_hidden_(const MlpGpu* mlp) {
    const ExpertRows rows = experts_rows(&mlp->experts.router);
    linear_experts_forward(mlp->fch, mlp->experts.in, &mlp->fc, &rows, mlp->linear);
    if (mlp->fc.bias) {
        expert_bias_forward(mlp->fch, mlp->fc.bias, NULL, &rows, mlp->fc.OC, mlp->linear->gpu);
    }
    mlp_experts_activation_(mlp);
}

// Sets the rows of their output.
static inline void mlp_own_forward_(const MlpGpu* mlp) {
    const ExpertRows rows = experts_rows(&mlp->experts.router);
    linear_experts_forward(mlp->experts.out, mlp->act, &mlp->proj, &rows, mlp->linear);
    if (mlp->proj.bias) {
        expert_bias_forward(mlp->experts.out, mlp->proj.bias, mlp->experts.router.scale, &rows, mlp->proj.OC,
                            mlp->linear->gpu);
    }
}

static inline int mlp_divides_experts_(const MlpGpu* mlp) {
    return expert_parallel_ranks(&mlp->experts.parallel) > 1;
}

// Returns the experts of this rank, with the rows that arrive from another one, in this set.
static inline MlpGpu mlp_arrived_(const MlpGpu* mlp, int from, int set) {
    const ExpertParallelGpu* parallel = &mlp->experts.parallel;
    MlpGpu arrived = *mlp;
    arrived.experts.router = expert_arrived(parallel, &mlp->experts.router, from, set);
    arrived.experts.in = (floatX*)parallel->rows[set].in;
    arrived.experts.out = (floatX*)parallel->rows[set].out;
    return arrived;
}

static inline int mlp_has_rows_(const MlpGpu* mlp) {
    return mlp->experts.router.B * mlp->experts.router.T > 0;
}

// Return arrays of rows that travel: the experts' inputs, their outputs, and numbers.
static inline ExpertArrayGpu mlp_in_rows_(const MlpGpu* mlp) {
    const ExpertRowsGpu* rows = mlp->experts.parallel.rows;
    return {mlp->experts.in, {rows[0].in, rows[1].in}, (size_t)mlp->fc.C * sizeof(floatX)};
}
static inline ExpertArrayGpu mlp_out_rows_(const MlpGpu* mlp) {
    const ExpertRowsGpu* rows = mlp->experts.parallel.rows;
    return {mlp->experts.out, {rows[0].out, rows[1].out}, (size_t)mlp->fc.C * sizeof(floatX)};
}
static inline ExpertArrayGpu mlp_scale_rows_(const MlpGpu* mlp) {
    const ExpertRowsGpu* rows = mlp->experts.parallel.rows;
    return {mlp->experts.router.scale, {rows[0].scale, rows[1].scale}, sizeof(float)};
}
static inline ExpertArrayGpu mlp_dscale_rows_(const MlpGpu* mlp, float* dscale) {
    const ExpertRowsGpu* rows = mlp->experts.parallel.rows;
    return {dscale, {rows[0].dscale, rows[1].dscale}, sizeof(float)};
}

// Sets the experts' outputs for this rank's tokens, and computes outputs for other ranks' tokens.
static inline void mlp_divided_forward_(const MlpGpu* mlp) {
    const ExpertsGpu* x = &mlp->experts;
    const ExpertMoves sent = {{mlp_in_rows_(mlp), mlp_scale_rows_(mlp)}, 2},
                      returned = {{mlp_out_rows_(mlp)}, 1};
    expert_counts(&x->parallel, &x->router);
    expert_rounds(&x->parallel, &x->router, &sent, &returned, [&](int from, int set) {
        const MlpGpu arrived = mlp_arrived_(mlp, from, set);
        if (mlp_has_rows_(&arrived)) {
            mlp_own_hidden_(&arrived);
            mlp_own_forward_(&arrived);
        }
    });
}

static inline void mlp_experts_hidden_(const MlpGpu* mlp, const floatX* inp) {
    const ExpertsGpu* x = &mlp->experts;
    const Gpu* gpu = mlp->linear->gpu;
    const MlpGpu shared = mlp_shared_(mlp);
    const ExpertRows tokens = mlp_tokens_(mlp);
    assert(activation_gates(mlp->kind) == 2);
    if (mlp->N == 0) {
        router_without_tokens(&x->router, gpu);
        return;
    }
    expert_matmul_forward(x->router.logits, inp, x->routerw, &tokens, {mlp->fc.C, x->router.E}, gpu);
    if (x->logits_bias) {
        expert_bias_forward(x->router.logits, x->logits_bias, NULL, &tokens, x->router.E, gpu);
    }
    router_forward(&x->router, gpu);
    experts_gather(x->in, inp, &x->router, mlp->fc.C, gpu);
    if (!mlp_divides_experts_(mlp)) {
        mlp_own_hidden_(mlp);
    }
    if (shared.N > 0) {
        mlp_one_hidden_(&shared, inp);
    }
}

static inline void mlp_experts_forward_residual_(floatX* out, const floatX* residual, const MlpGpu* mlp) {
    const ExpertsGpu* x = &mlp->experts;
    const MlpGpu shared = mlp_shared_(mlp);
    (mlp_divides_experts_(mlp) ? mlp_divided_forward_ : mlp_own_forward_)(mlp);
    if (shared.N > 0) {
        mlp_one_forward_residual_(out, residual, &shared);
    }
    if (mlp->N > 0) {
        experts_sum(out, shared.N > 0 ? (const floatX*)out : residual, x->out, &x->router, mlp->fc.C,
                    mlp->linear->gpu);
    }
}

// ---- gradients of experts ----

// Goes back through the biases of the experts, after the activation: sets or adds to their
// gradients, and adds to dscale.
static inline void mlp_biases_backward_(const MlpGpu* mlp, const MlpGradientsGpu* d, const ExpertRows* rows) {
    const ExpertsGpu* x = &mlp->experts;
    const Weight *fc = &mlp->fc, *proj = &mlp->proj;
    const Gpu* gpu = mlp->linear->gpu;
    if (d->dfcprojb.data) {
        expert_bias_backward(d->dfcprojb, (const floatX*)x->out, x->router.scale, rows, proj->OC, d->mode,
                             gpu);
    }
    if (d->dfcb.data) {
        expert_bias_backward(d->dfcb, (const floatX*)d->dfch, NULL, rows, fc->OC, d->mode, gpu);
    }
    if (proj->bias && mlp_has_rows_(mlp)) {
        expert_bias_scale(d->dscale, (const floatX*)x->out, proj->bias, rows, proj->OC, gpu);
    }
}

// Replaces `out`, the gradient of the experts' outputs, by the gradient of their inputs; sets
// dscale. Experts without rows also set or add to their gradients.
static inline void mlp_own_backward_(const MlpGpu* mlp, const MlpGradientsGpu* d) {
    const ExpertsGpu* x = &mlp->experts;
    const Weight *fc = &mlp->fc, *proj = &mlp->proj;
    const ExpertRows rows = experts_rows(&x->router);
    const Gpu* gpu = mlp->linear->gpu;
    const int has_rows = mlp_has_rows_(mlp);
    floatX* dact = mlp->act; // act is no longer read
    linear_experts_backward_weight(d->dfcprojw, x->out, mlp->act, proj, &rows, d->mode, mlp->linear);
    if (has_rows) {
        expert_matmul_backward_input(dact, x->out, proj->data, &rows, {proj->C, proj->OC}, GRADIENT_SET, gpu);
        experts_activate_backward(d->dfch, d->dscale, dact, mlp->fch, &x->router, proj->C, mlp->kind, gpu);
    }
    mlp_biases_backward_(mlp, d, &rows);
    linear_experts_backward_weight(d->dfcw, d->dfch, x->in, fc, &rows, d->mode, mlp->linear);
    if (has_rows) {
        expert_matmul_backward_input(x->out, d->dfch, fc->data, &rows, {fc->C, fc->OC}, GRADIENT_SET, gpu);
    }
}

// Returns a gradient this many elements after another one.
static inline Gradient mlp_gradient_at_(Gradient d, size_t elements) {
    return {d.data ? (char*)d.data + elements * dtype_bytes(d.dtype) : NULL, d.dtype};
}

// Returns the gradients of this rank's experts on the rows that arrive from another one, in this
// set.
static inline MlpGradientsGpu mlp_arrived_gradients_(const MlpGpu* mlp, const MlpGradientsGpu* all, int from,
                                                     int set) {
    const size_t at = (size_t)from * all->neighbor;
    MlpGradientsGpu arrived = *all;
    arrived.dfcw = mlp_gradient_at_(all->dfcw, at);
    arrived.dfcb = mlp_gradient_at_(all->dfcb, at);
    arrived.dfcprojw = mlp_gradient_at_(all->dfcprojw, at);
    arrived.dfcprojb = mlp_gradient_at_(all->dfcprojb, at);
    arrived.dscale = mlp->experts.parallel.rows[set].dscale;
    return arrived;
}

// With divided experts: this rank's experts also process other ranks' rows, as in the
// forward pass.
static inline void mlp_divided_backward_(const MlpGpu* mlp, const MlpGradientsGpu* all) {
    const ExpertsGpu* x = &mlp->experts;
    const ExpertMoves sent = {{mlp_in_rows_(mlp), mlp_out_rows_(mlp), mlp_scale_rows_(mlp)}, 3},
                      returned = {{mlp_out_rows_(mlp), mlp_dscale_rows_(mlp, all->dscale)}, 2};
    expert_rounds(&x->parallel, &x->router, &sent, &returned, [&](int from, int set) {
        const MlpGpu arrived = mlp_arrived_(mlp, from, set);
        const MlpGradientsGpu d = mlp_arrived_gradients_(mlp, all, from, set);
        if (mlp_has_rows_(&arrived)) {
            mlp_own_hidden_(&arrived);
        }
        mlp_own_backward_(&arrived, &d);
    });
}

// Sets x->out to the gradient of the experts' inputs, from dout, the gradient of the tokens'
// outputs; sets dscale.
static inline void mlp_rows_backward_(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout,
                                      const floatX* inp) {
    const ExpertsGpu* x = &mlp->experts;
    const int C = mlp->fc.C, divides = mlp_divides_experts_(mlp);
    if (mlp->N > 0) {
        experts_gather(x->out, dout, &x->router, C, mlp->linear->gpu);
    }
    if (mlp->N > 0 && (d->dfcw.data || divides)) {
        experts_gather(x->in, inp, &x->router, C, mlp->linear->gpu);
    }
    (divides ? mlp_divided_backward_ : mlp_own_backward_)(mlp, d);
}

// Sets dinp to the gradient through the MLP that all tokens take. Returns 0 if the model has none.
static inline int mlp_shared_backward_(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout,
                                       const floatX* inp) {
    const MlpGpu shared = mlp_shared_(mlp);
    MlpGradientsGpu own = *d;
    own.dfcw = d->dshared_fcw;
    own.dfcprojw = d->dshared_projw;
    if (shared.N > 0) {
        mlp_one_backward_(&shared, &own, dout, inp);
    }
    return shared.N > 0;
}

// Sets or adds to dinp the gradient through the router, and to the gradients of its parameters.
static inline void mlp_router_backward_(const MlpGpu* mlp, const MlpGradientsGpu* d, GradientMode mode,
                                        const floatX* inp) {
    const ExpertsGpu* x = &mlp->experts;
    const ExpertRows tokens = mlp_tokens_(mlp);
    const int C = mlp->fc.C, E = x->router.E;
    const Gpu* gpu = mlp->linear->gpu;
    float* entropies = (float*)(void*)x->in; // the rows are no longer read
    router_backward(d->dlogits, entropies, d->dscale, &x->router, d->losses, gpu);
    if (d->statistics) {
        router_statistics_add(d->statistics, entropies, &x->router, gpu);
    }
    if (d->drouterw.data) {
        expert_matmul_backward_weight(d->drouterw, d->dlogits, inp, &tokens, {C, E}, d->mode, gpu);
    }
    if (d->dlogits_bias.data) {
        expert_bias_backward(d->dlogits_bias, (const floatX*)d->dlogits, NULL, &tokens, E, d->mode, gpu);
    }
    expert_matmul_backward_input(d->dinp, d->dlogits, x->routerw, &tokens, {C, E}, mode, gpu);
}

static inline void mlp_experts_backward_(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout,
                                         const floatX* inp) {
    const ExpertsGpu* x = &mlp->experts;
    mlp_rows_backward_(mlp, d, dout, inp);
    if (mlp->N == 0) {
        return;
    }
    const int has_shared = mlp_shared_backward_(mlp, d, dout, inp);
    mlp_router_backward_(mlp, d, has_shared ? GRADIENT_ADD : GRADIENT_SET, inp);
    experts_sum(d->dinp, (const floatX*)d->dinp, x->out, &x->router, mlp->fc.C, mlp->linear->gpu);
}

// ---- either ----

// Returns true in a pass over no tokens that has no part in the experts' work either. All ranks
// that cut the matrices have such a pass together.
static inline int mlp_is_idle_(const MlpGpu* mlp) { return mlp->N == 0 && !mlp_divides_experts_(mlp); }

// Sets fch and act; with experts, routes the tokens. If ranks divide the experts, it only routes; a
// rank without tokens (N = 0) makes the same calls as the others. Collective.
static inline void mlp_hidden(const MlpGpu* mlp, const floatX* inp) {
    if (mlp_is_idle_(mlp)) {
        return;
    }
    const floatX* all = tensor_gather(&mlp->tensor, 0, inp);
    (mlp_has_experts_(mlp) ? mlp_experts_hidden_ : mlp_one_hidden_)(mlp, all);
}

// Sets out, which is not residual, after mlp_hidden. Collective.
static inline void mlp_forward_residual(floatX* out, const floatX* residual, const MlpGpu* mlp) {
    const TensorParallelGpu* tensor = &mlp->tensor;
    if (mlp_is_idle_(mlp)) {
        return;
    }
    (mlp_has_experts_(mlp) ? mlp_experts_forward_residual_ : mlp_one_forward_residual_)(
        tensor_part(tensor, out), tensor_residual(tensor, residual), mlp);
    tensor_sum(tensor, out, residual, mlp->proj_bias);
}

// Sets act from fch again, for a backward pass that needs it.
static inline void mlp_activation(const MlpGpu* mlp) {
    const MlpGpu shared = mlp_shared_(mlp);
    if (!mlp_divides_experts_(mlp) && mlp->N > 0) {
        (mlp_has_experts_(mlp) ? mlp_experts_activation_ : mlp_one_activation_)(mlp);
    }
    if (shared.N > 0) {
        mlp_one_activation_(&shared);
    }
}

// Sets and adds to gradients. act and dfch are undefined afterwards. Collective.
static inline void mlp_backward(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout,
                                const floatX* inp) {
    const TensorParallelGpu* tensor = &mlp->tensor;
    if (mlp_is_idle_(mlp)) {
        return;
    }
    const floatX *all_dout = tensor_gather(tensor, 0, dout), *all_inp = tensor_gather(tensor, 1, inp);
    MlpGradientsGpu part = *d;
    part.dinp = tensor_part(tensor, d->dinp);
    (mlp_has_experts_(mlp) ? mlp_experts_backward_ : mlp_one_backward_)(mlp, &part, all_dout, all_inp);
    tensor_sum(tensor, d->dinp, NULL, NULL);
}

#endif
