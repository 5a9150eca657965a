/*
mlp.h -- the MLP of a block on the CPU, with whatever matmuls the model's linear layers have (linear.h).

    fch (N, F) = inp fcw^T + fcb        gelu (N, F) = GELU(fch)        out (N, C) = gelu fcprojw^T + fcprojb

With matmuls in bf16, and N and F that are multiples of 32, its hidden layer is kept as mlp_bf16.h does it.
*/
#ifndef LLMC_MLP_H
#define LLMC_MLP_H

#include "llmc/ops/activation.h"
#include "llmc/layers/linear.h"
#include "llmc/bf16/mlp_bf16.h"

typedef struct {
    int N, C, F;
    const float *fcw, *fcb, *fcprojw, *fcprojb; // (F, C), (F), (C, F), (C)
    float *fch, *gelu;                          // (N, F) each
    Linear* linear;
} Mlp;

static inline int mlp_is_packed_(const Mlp* mlp) {
    return mlp->linear->is_bf16 && mlp_bf16_fits((size_t)mlp->N, (size_t)mlp->F);
}

static inline MlpBf16 mlp_packed_(const Mlp* mlp) {
    const Linear* linear = mlp->linear;
    return (MlpBf16){mlp->N,
                     mlp->C,
                     mlp->F,
                     mlp->fch,
                     (uint32_t*)(void*)mlp->gelu,
                     linear_packed(linear, mlp->fcw, PACKED_FORWARD),
                     linear_packed(linear, mlp->fcprojw, PACKED_FORWARD),
                     linear_packed(linear, mlp->fcw, PACKED_BACKWARD),
                     linear_packed(linear, mlp->fcprojw, PACKED_BACKWARD),
                     mlp->fcb,
                     mlp->fcprojb};
}

// Sets fch and gelu.
static inline void mlp_hidden_cpu(const Mlp* mlp, const float* inp) {
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_hidden_cpu(&packed, inp, &mlp->linear->bf16);
    } else {
        linear_forward_cpu(mlp->fch, inp, mlp->fcw, mlp->fcb, mlp->N, mlp->C, mlp->F, mlp->linear);
        gelu_forward_cpu(mlp->gelu, mlp->fch, (size_t)mlp->N * mlp->F);
    }
}

// Sets out (N, C), after mlp_hidden_cpu.
static inline void mlp_forward_cpu(float* out, const Mlp* mlp) {
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_forward_cpu(out, &packed, &mlp->linear->bf16);
    } else {
        linear_forward_cpu(out, mlp->gelu, mlp->fcprojw, mlp->fcprojb, mlp->N, mlp->F, mlp->C, mlp->linear);
    }
}

// Sets gelu from fch again, for a backward pass that needs it.
static inline void mlp_gelu_cpu(const Mlp* mlp) {
    if (!mlp_is_packed_(mlp)) {
        gelu_forward_cpu(mlp->gelu, mlp->fch, (size_t)mlp->N * mlp->F);
    }
}

// dout and inp are (N, C). gelu and dfch are undefined afterwards.
static inline void mlp_backward_cpu(const Mlp* mlp, const MlpGradients* d, const float* dout,
                                    const float* inp) {
    const int N = mlp->N, C = mlp->C, F = mlp->F;
    Linear* linear = mlp->linear;
    if (mlp_is_packed_(mlp)) {
        const MlpBf16 packed = mlp_packed_(mlp);
        mlp_bf16_backward_cpu(&packed, d, dout, inp, &linear->bf16);
        return;
    }
    linear_backward_weight_cpu(d->dfcprojw, d->dfcprojb, dout, mlp->gelu, N, F, C, d->mode, linear);
    linear_backward_input_cpu(d->dfch, dout, mlp->fcprojw, N, F, C, linear);
    gelu_backward_cpu(d->dfch, d->dfch, mlp->fch, (size_t)N * F);
    linear_backward_weight_cpu(d->dfcw, d->dfcb, d->dfch, inp, N, C, F, d->mode, linear);
    linear_backward_input_cpu(d->dinp, d->dfch, mlp->fcw, N, C, F, linear);
}

#endif
