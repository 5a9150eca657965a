/*
mup.h -- muP, with the depth of CompleteP: factors of each tensor with which a model trains like a
smaller one, at the smaller one's learning rate (--mup C0:L0).

The small model has C0 channels and L0 layers, and heads of the same size; m = C / C0, d = L / L0.
The papers divide what a layer adds to the residual stream by d, and logits by m. Here the weights
contain these divisors: multiplying a tensor by s in the forward pass is the same as other first
values, rate, decay and eps, if the size of its update does not depend on the size of its gradient.
So files hold a plain model. With w = m for tensors whose columns grow with the width, the factors
are

    first values   s / sqrt(w)       of the small model's
    rate           s / w
    decay          w / s
    eps            1 / (m s), in a block 1 / (m d s)        as large as the gradient

    s = 1 / d      weights and biases into the residual stream
        1 / m      the head; without one, the last norm; the router of experts
        1          all else
    w = m          matrices of blocks
        1          all else

Muon makes updates that fit any width by itself: its matrices keep their rate and decay.

Yang et al., "Tensor Programs V", arXiv:2203.03466; Dey et al., "Don't be lazy: CompleteP enables
compute-efficient deep transformers", arXiv:2505.01618.
*/
#ifndef LLMC_MUP_H
#define LLMC_MUP_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int C, L; // channels and layers of the small model; 0: no muP
} Mup;

// Factors of a tensor's random first values, learning rate, weight decay and eps.
typedef struct {
    float init, rate, decay, eps;
} MupFactors;

// Sets the small model from text, as 256:4. Returns 0 if it is none.
static inline int mup_parse(Mup* mup, const char* text) {
    int end = 0;
    const int is_text = strspn(text, "0123456789:") == strlen(text),
              found = sscanf(text, "%6d:%4d%n", &mup->C, &mup->L, &end);
    return is_text && found == 2 && !text[end] && mup->C > 0 && mup->L > 0;
}

static inline MupFactors mup_factors(Mup mup, ModelConfig cfg, const TensorRow* row) {
    MupFactors f = {1, 1, 1, 1};
    if (mup.C == 0) {
        return f;
    }
    ModelConfig small = cfg;
    small.C = mup.C, small.L = mup.L;
    const double m = (double)cfg.C / mup.C, d = (double)model_layers(cfg) / mup.L;
    const int is_in_block = row->in_block,
              is_last = cfg.has_head ? row->kind == KIND_HEAD : !is_in_block && row->kind == KIND_VECTOR;
    const double s = model_adds_to_residual(row)           ? 1 / d
                     : is_last || row->kind == KIND_ROUTER ? 1 / m
                                                           : 1,
                 w = row->kind == KIND_MATRIX ? m : 1;
    const double std =
        row->init == INIT_ONE ? 1 : model_initial_std(row, small) / model_initial_std(row, cfg);
    f.init = (float)(s / sqrt(w) * std);
    f.rate = (float)(s / w);
    f.decay = (float)(w / s);
    f.eps = (float)(1 / (m * (is_in_block ? d : 1) * s));
    return f;
}

// Multiplies the random tensors of group g, in fp32, by their factors.
static inline void mup_scale_group(Mup mup, const TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                   int g, void* group) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const float factor = mup_factors(mup, cfg, &rows[i]).init;
        if (factor == 1 || !tensor_is_in_group(&rows[i], g)) {
            continue;
        }
        float* tensor = (float*)tensor_in_group(&rows[i], group);
        for (size_t k = 0; k < tensor_layer_elements(&rows[i]); k++) {
            tensor[k] *= factor;
        }
    }
}

#ifdef __cplusplus
}
#endif

#endif
