/*
mlp.h -- the MLP of a block on the CPU, with the matmuls of linear.h.

    fch (N, gates F) = inp fc^T + bias
    act (N, F)       = activation of fch (activation.h)
    out (N, C)       = act proj^T + bias

With matmuls in bf16, and N and F that are multiples of 32, its hidden layer is kept as mlp_bf16.h
does it.
*/
#ifndef LLMC_MLP_H
#define LLMC_MLP_H

#include "llmc/ops/activation.h"
#include "llmc/layers/linear.h"
#include "llmc/bf16/mlp_bf16.h"

typedef struct {
    ActivationKind kind;
    int N;
    Weight fc, proj;  // (gates F, C), (C, F)
    float *fch, *act; // (N, gates F), (N, F)
    Linear* linear;
} Mlp;

static inline int mlp_is_packed_(const Mlp* mlp) {
    const Linear* linear = mlp->linear;
    return linear->is_bf16 && !linear->few && mlp_bf16_fits((size_t)mlp->N, (size_t)mlp->proj.C);
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

// Sets fch and act.
static inline void mlp_hidden_cpu(const Mlp* mlp, const float* inp) {
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_hidden_cpu(&packed, inp, &mlp->linear->bf16);
    } else {
        linear_forward_cpu(mlp->fch, inp, &mlp->fc, mlp->N, mlp->linear);
        mlp_activate_(mlp);
    }
}

// Sets out (N, C), after mlp_hidden_cpu.
static inline void mlp_forward_cpu(float* out, const Mlp* mlp) {
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_forward_cpu(out, &packed, &mlp->linear->bf16);
    } else {
        linear_forward_cpu(out, mlp->act, &mlp->proj, mlp->N, mlp->linear);
    }
}

// Sets act from fch again, for a backward pass that needs it.
static inline void mlp_activation_cpu(const Mlp* mlp) {
    if (!mlp_is_packed_(mlp)) {
        mlp_activate_(mlp);
    }
}

// Sets and adds to gradients, as MlpGradients says. dout and inp are (N, C). act and dfch are
// undefined afterwards.
static inline void mlp_backward_cpu(const Mlp* mlp, const MlpGradients* d, const float* dout,
                                    const float* inp) {
    Linear* linear = mlp->linear;
    float* dact = mlp->act; // dfcprojw, which reads act, comes first
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_backward_cpu(&packed, d, dout, inp, &linear->bf16);
        return;
    }
    linear_backward_cpu(dact, d->dfcprojw, d->dfcprojb, dout, mlp->act, &mlp->proj, mlp->N, d->mode, linear);
    activation_backward_cpu(d->dfch, dact, mlp->fch, (size_t)mlp->N, (size_t)mlp->proj.C, mlp->kind);
    linear_backward_cpu(d->dinp, d->dfcw, d->dfcb, d->dfch, inp, &mlp->fc, mlp->N, d->mode, linear);
}

#endif
