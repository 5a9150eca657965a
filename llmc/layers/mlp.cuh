/*
mlp.cuh -- mlp.h on the GPU.

    fch (N, F)  = inp fc^T + bias        gelu (N, F) = GELU(fch)
    out (N, C)  = residual + gelu proj^T + bias

The gradient of proj's bias is the sum of dout over its rows. It is computed where dout is made.
*/
#ifndef LLMC_MLP_CUH
#define LLMC_MLP_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/linear.cuh"

typedef struct {
    int N;
    Weight fc, proj;    // (F, C), (C, F)
    floatX *fch, *gelu; // (N, F) each
    LinearGpu* linear;
} MlpGpu;

// Sets fch and gelu.
static inline void mlp_hidden(const MlpGpu* mlp, const floatX* inp) {
    linear_forward_gelu(mlp->gelu, mlp->fch, inp, &mlp->fc, mlp->N, mlp->linear);
}

// Sets out (N, C), which is not residual (N, C), after mlp_hidden.
static inline void mlp_forward_residual(floatX* out, const floatX* residual, const MlpGpu* mlp) {
    linear_forward_residual(out, residual, mlp->gelu, &mlp->proj, mlp->N, mlp->linear);
}

// Sets gelu from fch again, for a backward pass that needs it.
static inline void mlp_gelu(const MlpGpu* mlp) {
    gelu_forward(mlp->gelu, mlp->fch, (size_t)mlp->N * mlp->fc.OC, mlp->linear->gpu);
}

// Gradients of parameters, without data if frozen, which the backward pass sets or adds to as
// `mode` says; dinp (N, C), which it sets; and memory that it uses.
typedef struct {
    floatX* dinp;
    Gradient dfcw, dfcb, dfcprojw;
    GradientMode mode;
    floatX* dfch; // (N, F)
} MlpGradientsGpu;

// Sets and adds to gradients. dout and inp are (N, C).
static inline void mlp_backward(const MlpGpu* mlp, const MlpGradientsGpu* d, const floatX* dout,
                                const floatX* inp) {
    const Weight *fc = &mlp->fc, *proj = &mlp->proj;
    LinearGpu* linear = mlp->linear;
    linear_backward_weight(d->dfcprojw, dout, mlp->gelu, proj, mlp->N, d->mode, linear);
    matmul_backward_input_gelu(d->dfch, d->dfcb, dout, proj->data, mlp->fch, mlp->N, proj->C, proj->OC,
                               d->mode, linear->matmul);
    linear_backward(d->dinp, d->dfcw, d->dfch, inp, fc, mlp->N, d->mode, linear);
}

#endif
