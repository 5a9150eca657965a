/*
mlp.cuh -- mlp.h on the GPU.

    fch (N, gates F) = inp fc^T + bias
    act (N, F)       = activation of fch (activation.h); matmuls may do GELU (matmul.cuh)
    out (N, C)       = residual + act proj^T + bias

The gradient of proj's bias is the sum of dout over its rows. It is computed where dout is made.
*/
#ifndef LLMC_MLP_CUH
#define LLMC_MLP_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/linear.cuh"

typedef struct {
    ActivationKind kind;
    int N;
    Weight fc, proj;   // (gates F, C), (C, F)
    floatX *fch, *act; // (N, gates F), (N, F)
    LinearGpu* linear;
} MlpGpu;

// Sets act from fch again, for a backward pass that needs it.
static inline void mlp_activation(const MlpGpu* mlp) {
    activation_forward(mlp->act, mlp->fch, mlp->N, mlp->proj.C, mlp->kind, mlp->linear->gpu);
}

// Sets fch and act.
static inline void mlp_hidden(const MlpGpu* mlp, const floatX* inp) {
    if (mlp->kind == ACTIVATION_GELU) {
        linear_forward_gelu(mlp->act, mlp->fch, inp, &mlp->fc, mlp->N, mlp->linear);
    } else {
        linear_forward(mlp->fch, inp, &mlp->fc, mlp->N, mlp->linear);
        mlp_activation(mlp);
    }
}

// Sets out (N, C), which is not residual (N, C), after mlp_hidden.
static inline void mlp_forward_residual(floatX* out, const floatX* residual, const MlpGpu* mlp) {
    linear_forward_residual(out, residual, mlp->act, &mlp->proj, mlp->N, mlp->linear);
}

// Gradients of parameters, without data if frozen, which the backward pass sets or adds to as
// `mode` says; dinp (N, C), which it sets; and memory that it uses.
typedef struct {
    floatX* dinp;
    Gradient dfcw, dfcb, dfcprojw;
    GradientMode mode;
    floatX* dfch; // (N, gates F)
} MlpGradientsGpu;

// Sets dfch and dfcb.
static inline void mlp_backward_hidden_(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout) {
    const Weight* proj = &mlp->proj;
    MatmulGpu* matmul = mlp->linear->matmul;
    floatX* dact = mlp->act; // nobody reads act any more
    if (mlp->kind == ACTIVATION_GELU) {
        matmul_backward_input_gelu(d->dfch, d->dfcb, dout, proj->data, mlp->fch, mlp->N, proj->C, proj->OC,
                                   d->mode, matmul);
        return;
    }
    matmul_backward_input(dact, dout, proj->data, mlp->N, proj->C, proj->OC, matmul);
    activation_backward(d->dfch, dact, mlp->fch, mlp->N, proj->C, mlp->kind, mlp->linear->gpu);
    if (d->dfcb.data) {
        matmul_backward_bias(d->dfcb, d->dfch, mlp->N, mlp->fc.OC, d->mode, matmul);
    }
}

// Sets and adds to gradients. dout and inp are (N, C). act and dfch are undefined afterwards.
static inline void mlp_backward(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout,
                                const floatX* inp) {
    LinearGpu* linear = mlp->linear;
    linear_backward_weight(d->dfcprojw, dout, mlp->act, &mlp->proj, mlp->N, d->mode, linear);
    mlp_backward_hidden_(mlp, d, dout);
    linear_backward(d->dinp, d->dfcw, d->dfch, inp, &mlp->fc, mlp->N, d->mode, linear);
}

#endif
