/*
branch.h -- how the branches of a block, attention and the MLP, leave the residual stream and come
back to it, on the CPU.

    in  (R, C) = norm before of the stream; without that norm, the stream itself
    out (R, C) = the branch, of in
    sum (R, C) = stream + factor out; with a norm after it, stream + factor norm of out; in training
                 the second term with dropout (dropout.h)

A norm that the model lacks has no rstd. An architecture has one of the two norms, or both
(NormsPlace). Of the tokens of a tensor group, R rows are here: a norm after the branch follows the
sum over its ranks. The next branch's norm before is computed in the same pass as the sum.

With a norm after the branch, `out` is kept for the backward pass.
*/
#ifndef LLMC_BRANCH_H
#define LLMC_BRANCH_H

#include "llmc/layers/linear.h"
#include "llmc/ops/norm.h"

typedef struct {
    Norm before, after;
    float factor;        // 1: no factor
    const float* stream; // (R, C) before the branch
    float *in, *out;     // (R, C)
    float* sum;          // (R, C) the stream after it
    Dropout dropout;
} Branch;

// Parameters and activations of a branch.
typedef struct {
    const float *weight, *bias, *after_weight;
    float *in, *mean, *rstd;
    float *out, *after_rstd;
    int number; // of the branch in its block
} BranchTensors;

static inline int branch_has_norm_(const Norm* norm) { return norm->rstd != NULL; }

static inline Branch branch_of_(const LayerPass* layer, const BranchTensors* t, const float* stream,
                                float* sum) {
    Branch b;
    b.before = layer_norm(layer, t->weight, t->bias, t->mean, t->rstd);
    b.after = layer_norm(layer, t->after_weight, NULL, NULL, t->after_rstd);
    b.after.factor = b.factor = model_residual_factor(layer->cfg);
    b.stream = stream;
    b.in = branch_has_norm_(&b.before) ? t->in : (float*)stream;
    b.out = branch_has_norm_(&b.after) ? t->out : layer->a.branch;
    b.sum = sum;
    b.dropout = layer_dropout(layer, dropout_of_branch(layer_depth(layer), t->number));
    return b;
}

// Return the branches of a layer: attention, from the stream that enters the block to residual2;
// the MLP, from there to `out`.
static inline Branch branch_of_attention(const LayerPass* layer, const float* inp) {
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const BranchTensors t = {p->ln1w,     p->ln1b,       p->ln1postw,     a->ln1, a->ln1_mean,
                             a->ln1_rstd, a->ln1post_in, a->ln1post_rstd, 0};
    return branch_of_(layer, &t, inp, a->residual2);
}
static inline Branch branch_of_mlp(const LayerPass* layer, float* out) {
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const BranchTensors t = {p->ln2w,     p->ln2b,       p->ln2postw,     a->ln2, a->ln2_mean,
                             a->ln2_rstd, a->ln2post_in, a->ln2post_rstd, 1};
    return branch_of_(layer, &t, a->residual2, out);
}

// Returns 1 if the backward pass reads out.
static inline int branch_keeps_out(const Branch* b) { return branch_has_norm_(&b->after); }

// Sets in.
static inline void branch_enter_cpu(const Branch* b) {
    if (branch_has_norm_(&b->before)) {
        norm_forward_cpu(b->in, b->stream, &b->before);
    }
}

// Sets sum from out, and `in` of the next branch of the block, or of none (NULL).
static inline void branch_leave_cpu(const Branch* b, const Branch* next) {
    const ResidualSum sum = {b->stream, b->out, b->factor, branch_has_norm_(&b->after) ? &b->after : NULL,
                             b->dropout};
    if (next && branch_has_norm_(&next->before)) {
        residual_norm_forward_cpu(b->sum, next->in, &sum, &next->before);
    } else {
        residual_sum_cpu(b->sum, &sum, b->before.N, b->before.C);
    }
}

// Gradients of the weights of a branch's norms, or NULL, set or added to as `mode` says.
typedef struct {
    float *dweight, *dbias, *dafter_weight;
    GradientMode mode;
    float *dout, *dadded; // (R, C) memory for the gradients of out, and of a norm with dropout
} BranchGradients;

// Return the gradients of the two branches of a block: `d` has its parameters', `a` has memory.
static inline BranchGradients branch_gradients_of_attention(const ModelParameters* d,
                                                            const ModelActivations* a, GradientMode mode) {
    return (BranchGradients){d->ln1w, d->ln1b, d->ln1postw, mode, a->dbranch, a->branch};
}
static inline BranchGradients branch_gradients_of_mlp(const ModelParameters* d, const ModelActivations* a,
                                                      GradientMode mode) {
    return (BranchGradients){d->ln2w, d->ln2b, d->ln2postw, mode, a->dbranch, a->branch};
}

// Returns the gradient of out, given that of sum: the same array, if nothing is between them.
static inline const float* branch_leave_backward_cpu(const Branch* b, const BranchGradients* d,
                                                     const float* dsum) {
    const int N = b->before.N, C = b->before.C, has_norm = branch_has_norm_(&b->after);
    if (dropout_is_on(&b->dropout)) {
        float* dadded = has_norm ? d->dadded : d->dout;
        dropout_cpu(dadded, dsum, &b->dropout, has_norm ? 1 : b->factor, N, C);
        dsum = dadded;
    }
    if (has_norm) {
        norm_backward_cpu(d->dout, d->dafter_weight, NULL, dsum, b->out, &b->after, GRADIENT_SET, d->mode);
        return d->dout;
    }
    if (b->factor != 1 && !dropout_is_on(&b->dropout)) {
        residual_scale_cpu(d->dout, dsum, b->factor, (size_t)N * (size_t)C);
        return d->dout;
    }
    return dsum;
}

// Adds the gradient through the branch, of `din`, to dstream.
static inline void branch_enter_backward_cpu(float* dstream, const Branch* b, const BranchGradients* d,
                                             const float* din) {
    if (branch_has_norm_(&b->before)) {
        norm_backward_cpu(dstream, d->dweight, d->dbias, din, b->stream, &b->before, GRADIENT_ADD, d->mode);
    } else {
        residual_forward_cpu(dstream, dstream, din, (size_t)b->before.N * (size_t)b->before.C);
    }
}

#endif
