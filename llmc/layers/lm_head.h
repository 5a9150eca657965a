/*
lm_head.h -- the language-modeling head on the CPU, with the matmuls of linear.h: from the last
hidden state to losses and gradients.

    logits (N, Vp) = hidden wte^T          losses and dlogits as cross_entropy.h says

    hidden, dhidden   (N, C)      wte, dwte   (Vp, C)      targets, losses, is_top   (N)

Only a chunk of tokens has its logits in memory at a time. With matmuls in bf16 no logits are
stored (cross_entropy_bf16.h), except to find the most likely token.
*/
#ifndef LLMC_LM_HEAD_H
#define LLMC_LM_HEAD_H

#include "llmc/base/sizes.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/bf16/cross_entropy_bf16.h"
#include "llmc/ops/gradient.h"
#include "llmc/layers/linear.h"

typedef struct {
    const float* hidden;
    Weight wte;
    const int* targets;
    float* logits; // (chunk, Vp), which gradients overwrite
    int N, V;      // tokens; words of the vocabulary
    int chunk;     // tokens that have logits in memory
    Linear* linear;
    CrossEntropyBf16Scratch* bf16; // with matmuls in bf16
} LmHead;

// Sets the logits (count, Vp) of the tokens `first`, first + 1, ...: at most a chunk.
static inline void lm_head_logits_cpu(const LmHead* head, int first, int count) {
    linear_forward_cpu(head->logits, head->hidden + (size_t)first * head->wte.C, &head->wte, count,
                       head->linear);
}

static inline CrossEntropyBf16 lm_head_bf16_(const LmHead* head) {
    const Weight* wte = &head->wte;
    return (CrossEntropyBf16){head->hidden, wte->data, wte->forward, wte->backward, head->targets,
                              head->N,      wte->C,    head->V,      wte->OC};
}

// Sets the losses, without gradients; and is_top, unless NULL: whether each target was the most
// likely token.
static inline void lm_head_losses_cpu(float* losses, int* is_top, const LmHead* head) {
    if (head->linear->is_bf16 && !is_top) {
        const CrossEntropyBf16 classifier = lm_head_bf16_(head);
        cross_entropy_bf16_losses_cpu(losses, &classifier, head->bf16, &head->linear->bf16);
        return;
    }
    for (int n = 0; n < head->N; n += head->chunk) {
        const int count = int_min(head->chunk, head->N - n), V = head->V, Vp = head->wte.OC;
        lm_head_logits_cpu(head, n, count);
        cross_entropy_loss_cpu(losses + n, head->logits, head->targets + n, count, V, Vp);
        if (is_top) {
            cross_entropy_top_cpu(is_top + n, head->logits, head->targets + n, count, V, Vp);
        }
    }
}

// Sets the losses and dhidden, and sets or adds to dwte, unless NULL, as `mode` says. dloss is the
// gradient of the loss of each token.
static inline void lm_head_gradients_cpu(float* losses, float* dhidden, float* dwte, const LmHead* head,
                                         float dloss, GradientMode mode) {
    const int C = head->wte.C, V = head->V, Vp = head->wte.OC;
    if (head->linear->is_bf16) {
        const CrossEntropyBf16 classifier = lm_head_bf16_(head);
        cross_entropy_bf16_gradients_cpu(losses, dhidden, dwte, &classifier, dloss, mode, head->bf16,
                                         &head->linear->bf16);
        return;
    }
    for (int n = 0; n < head->N; n += head->chunk) {
        const int count = int_min(head->chunk, head->N - n);
        const size_t at = (size_t)n * C;
        float* dlogits = head->logits; // (count, Vp), in place
        lm_head_logits_cpu(head, n, count);
        cross_entropy_backward_cpu(losses + n, dlogits, head->targets + n, dloss, count, V, Vp);
        linear_backward_cpu(dhidden + at, dwte, NULL, dlogits, head->hidden + at, &head->wte, count,
                            n == 0 ? mode : GRADIENT_ADD, head->linear);
    }
}

#endif
