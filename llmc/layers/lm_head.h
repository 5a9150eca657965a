/*
lm_head.h -- the language-modeling head on the CPU, with the matmuls of linear.h: from the last
hidden state to losses and gradients.

    logits (N, Vp) = hidden weight^T          losses and dlogits as cross_entropy.h says

    hidden, dhidden   (N, C)      weight, dweight   (Vp, C)      targets, losses, is_top   (N)

weight is the token embedding, or a matrix of the head's own.

If tensor ranks cut the vocabulary (tensor_parallel.h), hidden has all tokens, dhidden the rows of
this rank, and weight, logits and dweight are this rank's part. What each part keeps of a token is
gathered (cross_entropy.h); losses and is_top are then in every rank.

Only a chunk of tokens has its logits in memory at a time. With matmuls in bf16 no logits are
stored (cross_entropy_bf16.h), but to find the most likely token, and with a teacher (teaching.h).
*/
#ifndef LLMC_LM_HEAD_H
#define LLMC_LM_HEAD_H

#include "llmc/base/sizes.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/bf16/cross_entropy_bf16.h"
#include "llmc/ops/gradient.h"
#include "llmc/layers/linear.h"
#include "llmc/parallel/tensor_parallel.h"

typedef struct {
    const float* hidden;
    Weight weight;
    const int* targets;
    float* logits;         // (chunk, Vp), which gradients overwrite
    int N, V;              // tokens; the whole vocabulary
    int chunk;             // tokens that have logits in memory
    float softcap, z_loss; // 0: none (cross_entropy.h)
    Linear* linear;
    CrossEntropyBf16Scratch* bf16; // with matmuls in bf16
    TensorParallel tensor;         // ranks that cut the vocabulary
    CrossEntropySlice* rows;       // (t, chunk) numbers of all slices
    float* all;                    // (2, tokens, whole vocabulary), for lm_head_all_logits_cpu
} LmHead;

// Returns the head on lnf, given any layer in the pass. Gathers lnf (N, C). Collective.
static inline LmHead lm_head_of(const LayerPass* layer, int chunk, float z_loss,
                                CrossEntropyBf16Scratch* bf16) {
    const ModelActivations* a = &layer->a;
    return (LmHead){.hidden = tensor_gather_cpu(&layer->tensor, 0, a->lnf),
                    .weight = layer->weights.head,
                    .targets = layer->pass->targets,
                    .logits = a->logits,
                    .N = pass_tokens(layer->pass),
                    .V = layer->cfg.V,
                    .chunk = chunk,
                    .softcap = layer->cfg.softcap,
                    .z_loss = z_loss,
                    .linear = layer->linear,
                    .bf16 = bf16,
                    .tensor = layer->tensor,
                    .rows = (CrossEntropySlice*)(void*)a->word_rows,
                    .all = a->all_logits};
}

// Sets the logits (count, Vp) of the tokens `first`, first + 1, ...: at most a chunk.
static inline void lm_head_logits_cpu(const LmHead* head, int first, int count) {
    linear_forward_cpu(head->logits, head->hidden + (size_t)first * head->weight.C, &head->weight, count,
                       head->linear);
}

// Returns the logits (count, Vp) of the whole vocabulary: of the tokens `first`, first + 1, ...
// Collective.
static inline const float* lm_head_all_logits_cpu(const LmHead* head, int first, int count) {
    const TensorParallel* tp = &head->tensor;
    const size_t words = (size_t)head->weight.OC, slice = (size_t)count * words, of = (size_t)tp->cut.ranks;
    float *gathered = head->all, *all = head->all + of * slice;
    LmHead own = *head;
    if (!tensor_is_cut(tp->cut)) {
        lm_head_logits_cpu(head, first, count);
        return head->logits;
    }
    own.logits = gathered + (size_t)tp->cut.rank * slice;
    lm_head_logits_cpu(&own, first, count);
    tensor_gather_all_cpu(tp, gathered, slice);
    for (size_t n = 0; n < (size_t)count * of; n++) { // token n / of, slice n % of
        memcpy(all + n * words, gathered + n % of * slice + n / of * words, words * sizeof(float));
    }
    return all;
}

static inline CrossEntropyBf16 lm_head_bf16_(const LmHead* head) {
    const Weight* w = &head->weight;
    const TensorParallel* tp = &head->tensor;
    return (CrossEntropyBf16){head->hidden, w->data, w->forward, w->backward,   head->targets, head->N,
                              w->C,         head->V, w->OC,      head->softcap, head->z_loss,  tp->group};
}

static inline CrossEntropy lm_head_chunk(const LmHead* head, int first) {
    return (CrossEntropy){int_min(head->chunk, head->N - first), head->V, head->weight.OC, head->softcap,
                          head->z_loss};
}

// ---- a cut vocabulary ----

// Returns the first vocabulary row of this rank's slice, and its chunk: the rows that are not
// padding.
static inline int lm_head_first(const LmHead* head) { return head->tensor.cut.rank * head->weight.OC; }

static inline CrossEntropy lm_head_own_chunk(const LmHead* head, int first) {
    CrossEntropy chunk = lm_head_chunk(head, first);
    chunk.V = int_max(0, int_min(head->V - lm_head_first(head), head->weight.OC));
    return chunk;
}

// cross_entropy_slice_cpu or cross_entropy_slice_exp_cpu.
typedef void (*LmHeadKeep_)(CrossEntropySlice* rows, float* logits, const int* target, int first,
                            CrossEntropy of);

// Computes this rank's logits of a chunk of tokens from `first` on, gathers what each slice keeps
// of them, and sets the losses.
static inline void lm_head_keep(float* losses, int* is_top, const LmHead* head, int first, LmHeadKeep_ keep) {
    const TensorParallel* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_chunk(head, first);
    lm_head_logits_cpu(head, first, chunk.N);
    keep(head->rows + (size_t)tp->cut.rank * (size_t)chunk.N, head->logits, head->targets + first,
         lm_head_first(head), lm_head_own_chunk(head, first));
    tensor_gather_all_cpu(tp, head->rows, (size_t)chunk.N * sizeof(CrossEntropySlice) / sizeof(float));
    cross_entropy_combine_cpu(losses + first, is_top ? is_top + first : NULL, head->rows, tp->cut.ranks,
                              head->targets + first, chunk);
}

// ---- losses and gradients ----

// Sets the losses, without gradients; and is_top, unless NULL: whether each target was the most
// likely token.
static inline void lm_head_losses_cpu(float* losses, int* is_top, const LmHead* head) {
    if (head->linear->is_bf16 && !is_top) {
        const CrossEntropyBf16 classifier = lm_head_bf16_(head);
        cross_entropy_bf16_losses_cpu(losses, &classifier, head->bf16, &head->linear->bf16);
        return;
    }
    for (int n = 0; n < head->N; n += head->chunk) {
        const CrossEntropy chunk = lm_head_chunk(head, n);
        if (tensor_is_cut(head->tensor.cut)) {
            lm_head_keep(losses, is_top, head, n, cross_entropy_slice_cpu);
            continue;
        }
        lm_head_logits_cpu(head, n, chunk.N);
        cross_entropy_loss_cpu(losses + n, head->logits, head->targets + n, chunk);
        if (is_top) {
            cross_entropy_top_cpu(is_top + n, head->logits, head->targets + n, chunk);
        }
    }
}

// Sets the losses of a chunk of tokens from `first` on, and turns its logits into their gradients.
static inline void lm_head_dlogits_(float* losses, const LmHead* head, int first, float dloss) {
    const TensorCut cut = head->tensor.cut;
    const int* targets = head->targets + first;
    if (tensor_is_cut(cut)) {
        lm_head_keep(losses, NULL, head, first, cross_entropy_slice_exp_cpu);
        cross_entropy_slice_backward_cpu(head->logits, head->rows, cut.ranks, cut.rank, targets,
                                         lm_head_first(head), dloss, lm_head_own_chunk(head, first));
    } else {
        const CrossEntropy chunk = lm_head_chunk(head, first);
        lm_head_logits_cpu(head, first, chunk.N);
        cross_entropy_backward_cpu(losses + first, head->logits, targets, dloss, chunk);
    }
}

// Sets the rows of a chunk of tokens from `first` on of this rank's part of dhidden, from the
// gradients of their logits, and sets or adds to dweight.
static inline void lm_head_backward(float* dhidden, float* dweight, const LmHead* head, int first,
                                    GradientMode mode) {
    const size_t at = (size_t)first * head->weight.C;
    linear_backward_cpu(tensor_part(&head->tensor, dhidden) + at,
                        (LinearGradients){dweight, NULL, first == 0 ? mode : GRADIENT_ADD}, head->logits,
                        head->hidden + at, &head->weight, lm_head_chunk(head, first).N, head->linear);
}

// Sets the losses and dhidden, and sets or adds to dweight, unless NULL, as `mode` says. dloss is
// the gradient of the loss of each token. Collective.
static inline void lm_head_gradients_cpu(float* losses, float* dhidden, float* dweight, const LmHead* head,
                                         float dloss, GradientMode mode) {
    if (head->linear->is_bf16) {
        const CrossEntropyBf16 classifier = lm_head_bf16_(head);
        cross_entropy_bf16_gradients_cpu(losses, tensor_part(&head->tensor, dhidden), dweight, &classifier,
                                         dloss, mode, head->bf16, &head->linear->bf16);
    } else {
        for (int n = 0; n < head->N; n += head->chunk) {
            lm_head_dlogits_(losses, head, n, dloss);
            lm_head_backward(dhidden, dweight, head, n, mode);
        }
    }
    tensor_sum_cpu(&head->tensor, dhidden, NULL);
}

#endif
