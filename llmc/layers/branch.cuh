/*
branch.cuh -- branch.h on the GPU: how attention and the MLP leave the residual stream and come back
to it.

    in  (R, C) = norm before of the stream; without that norm, the stream itself
    sum (R, C) = stream + out; with a norm after it, or a factor, stream + factor norm of out; in
                 training the second term with dropout (dropout.h)

A plain branch adds `stream` in its last matmul, which sets `sum`: branch_to and branch_residual are
these two. Else the matmul sets `out`, and branch_leave makes the sum.
*/
#ifndef LLMC_BRANCH_CUH
#define LLMC_BRANCH_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/linear.cuh"
#include "llmc/ops/dropout.cuh"
#include "llmc/ops/norm_backward.cuh"

typedef struct {
    NormGpu<floatX> before, after;
    float factor;         // 1: no factor
    const floatX* stream; // (R, C) before the branch
    floatX *in, *out;     // (R, C)
    floatX* sum;          // (R, C) the stream after it
    Dropout dropout;
    LinearGpu* linear;
} BranchGpu;

// Parameters and activations of a branch.
typedef struct {
    const floatX *weight, *bias, *after_weight;
    floatX* in;
    float *mean, *rstd;
    floatX* out;
    float* after_rstd;
    int number; // of the branch in its block
} BranchTensorsGpu;

static inline int branch_has_norm_(const NormGpu<floatX>* norm) { return norm->rstd != NULL; }

static inline BranchGpu branch_of_(const LayerPassGpu* layer, const BranchTensorsGpu* t, const floatX* stream,
                                   floatX* sum) {
    BranchGpu b;
    b.before = layer_norm(layer, t->weight, t->bias, t->mean, t->rstd);
    b.after = layer_norm(layer, t->after_weight, NULL, NULL, t->after_rstd);
    b.after.factor = b.factor = model_residual_factor(layer->cfg);
    b.stream = stream;
    b.in = branch_has_norm_(&b.before) ? t->in : (floatX*)stream;
    b.out = branch_has_norm_(&b.after) ? t->out : layer->a.branch;
    b.sum = sum;
    b.dropout = layer_dropout(layer, dropout_of_branch(layer_depth(layer), t->number));
    b.linear = layer->linear;
    return b;
}

// Return the branches of a layer, as in branch.h.
static inline BranchGpu branch_of_attention(const LayerPassGpu* layer, const floatX* inp) {
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const BranchTensorsGpu t = {p->ln1w,     p->ln1b,       p->ln1postw,     a->ln1, a->ln1_mean,
                                a->ln1_rstd, a->ln1post_in, a->ln1post_rstd, 0};
    return branch_of_(layer, &t, inp, a->residual2);
}
static inline BranchGpu branch_of_mlp(const LayerPassGpu* layer, floatX* out) {
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const BranchTensorsGpu t = {p->ln2w,     p->ln2b,       p->ln2postw,     a->ln2, a->ln2_mean,
                                a->ln2_rstd, a->ln2post_in, a->ln2post_rstd, 1};
    return branch_of_(layer, &t, a->residual2, out);
}

// Return 1 if the backward pass reads out; and if nothing is between out and the sum.
static inline int branch_keeps_out(const BranchGpu* b) { return branch_has_norm_(&b->after); }
static inline int branch_is_plain(const BranchGpu* b) {
    return !branch_has_norm_(&b->after) && b->factor == 1 && !dropout_is_on(&b->dropout);
}

// Return what the branch sets, and what it adds there; NULL: nothing.
static inline floatX* branch_to(const BranchGpu* b) { return branch_is_plain(b) ? b->sum : b->out; }
static inline const floatX* branch_residual(const BranchGpu* b) {
    return branch_is_plain(b) ? b->stream : NULL;
}

static inline size_t branch_elements_(const BranchGpu* b) {
    return (size_t)b->before.N * (size_t)b->before.C;
}

// Sets in, which the matmul of `reader` reads next, on N rows.
static inline void branch_enter(const BranchGpu* b, const Weight* reader, int N) {
    if (branch_has_norm_(&b->before)) {
        linear_norm_forward(b->in, b->stream, &b->before, reader, N, b->linear);
    }
}

// Sets in again, for a backward pass that needs it.
static inline void branch_enter_again(const BranchGpu* b) {
    if (branch_has_norm_(&b->before)) {
        norm_forward(b->in, b->stream, &b->before, b->linear->gpu);
    }
}

// Sets sum, if the branch has not done so.
static inline void branch_leave(const BranchGpu* b) {
    const Gpu* gpu = b->linear->gpu;
    const int has_norm = branch_has_norm_(&b->after);
    if (dropout_is_on(&b->dropout)) {
        if (has_norm) {
            norm_forward(b->sum, (const floatX*)b->out, &b->after, gpu);
        }
        dropout_sum(b->sum, b->stream, (const floatX*)(has_norm ? b->sum : b->out), &b->dropout,
                    has_norm ? 1 : b->factor, b->before.N, b->before.C, gpu);
    } else if (has_norm) {
        norm_forward_residual(b->sum, b->stream, (const floatX*)b->out, &b->after, gpu);
    } else if (!branch_is_plain(b)) {
        residual_sum(b->sum, b->stream, (const floatX*)b->out, b->factor, branch_elements_(b), gpu);
    }
}

// Gradients of a branch: of the weights of its norms; of the bias that was last added to the
// stream, and codes of its gradient (NormGradients); with dropout, of the branch's own last bias;
// memory.
typedef struct {
    NormGradients before;
    Gradient dafter_weight;
    Gradient dbias;
    GradientMode bias_mode;
    floatX *dout, *dadded; // (R, C) memory for the gradients of out, and of a norm with dropout
    NormScratch* scratch;
} BranchGradientsGpu;

// Returns `bias` if this is true, else none.
static inline Gradient branch_bias_if(int is_there, Gradient bias) {
    bias.data = is_there ? bias.data : NULL;
    return bias;
}

// Returns the gradient of out, given that of sum: the same array, if nothing is between them.
static inline const floatX* branch_leave_backward(const BranchGpu* b, const BranchGradientsGpu* d,
                                                  const floatX* dsum) {
    const Gpu* gpu = b->linear->gpu;
    const Gradient none = {NULL, d->dafter_weight.dtype};
    const NormGradients dafter = {d->dafter_weight, none, d->before.mode, none, d->before.mode, {}};
    if (branch_is_plain(b)) {
        return dsum;
    }
    if (dropout_is_on(&b->dropout)) {
        const int N = b->before.N, C = b->before.C, has_norm = branch_has_norm_(&b->after);
        floatX* dadded = has_norm ? d->dadded : d->dout;
        dropout_sum(dadded, (const floatX*)NULL, dsum, &b->dropout, has_norm ? 1 : b->factor, N, C, gpu);
        if (!has_norm) {
            norm_dinp_sum(d->dbias, d->bias_mode, (const floatX*)dadded, N, C, d->scratch, gpu);
            return dadded;
        }
        dsum = dadded;
    }
    if (branch_has_norm_(&b->after)) {
        norm_backward(d->dout, GRADIENT_SET, &dafter, dsum, (const floatX*)b->out, &b->after, d->scratch,
                      gpu);
    } else {
        residual_sum(d->dout, (const floatX*)NULL, dsum, b->factor, branch_elements_(b), gpu);
    }
    return d->dout;
}

// Adds the gradient through the branch, of `din`, to dstream.
static inline void branch_enter_backward(floatX* dstream, const BranchGpu* b, const BranchGradientsGpu* d,
                                         const floatX* din) {
    const Gpu* gpu = b->linear->gpu;
    if (branch_has_norm_(&b->before)) {
        norm_backward(dstream, GRADIENT_ADD, &d->before, din, b->stream, &b->before, d->scratch, gpu);
    } else {
        residual_sum(dstream, (const floatX*)dstream, din, 1, branch_elements_(b), gpu);
    }
}

#endif
