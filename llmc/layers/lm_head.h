/*
lm_head.h -- the language-modeling head on the CPU, with the matmuls of linear.h: from the last
hidden state to losses and gradients.

    logits (N, Vp) = hidden weight^T          losses and dlogits as cross_entropy.h says

    hidden, dhidden   (N, C)      weight, dweight   (Vp, C)      targets, losses, is_top   (N)

weight is the token embedding, or a matrix of the head's own.

If tensor ranks cut the vocabulary (tensor_parallel.h), hidden has all tokens, dhidden the rows of
this rank, and weight, logits and dweight are this rank's slice. What each slice keeps of a token is
gathered (cross_entropy.h); losses and is_top are then in every rank.

With a teacher the gradient is that of distill.h; its logits have a chunk of memory of their own.

Only a chunk of tokens has its logits in memory at a time. With matmuls in bf16 no logits are
stored (cross_entropy_bf16.h), except to find the most likely token, and with a teacher.
*/
#ifndef LLMC_LM_HEAD_H
#define LLMC_LM_HEAD_H

#include "llmc/base/sizes.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/ops/distill.h"
#include "llmc/bf16/cross_entropy_bf16.h"
#include "llmc/ops/gradient.h"
#include "llmc/layers/linear.h"
#include "llmc/parallel/tensor_parallel.h"

typedef struct LmHead LmHead;

// A teacher on the tokens of a head: another model, after its forward pass.
typedef struct {
    Distill how;
    const LmHead* head; // of that model
    float* divergence;  // (N) result
    DistillSlice* sums; // (t, chunk) sums of all slices; of a whole vocabulary unused
} Teaching;

struct LmHead {
    const float* hidden;
    Weight weight;
    const int* targets;
    float* logits;         // (chunk, Vp), which gradients overwrite
    int N, V;              // tokens; the whole vocabulary
    int chunk;             // tokens that have logits in memory
    float softcap, z_loss; // 0: none (cross_entropy.h)
    Linear* linear;
    CrossEntropyBf16Scratch* bf16; // with matmuls in bf16
    const Teaching* teaching;      // for gradients; NULL: none
    TensorParallel tensor;         // ranks that cut the vocabulary
    CrossEntropySlice* rows;       // (t, chunk) what all slices keep
    float* all;                    // (2, tokens, whole vocabulary), for lm_head_all_logits_cpu
};

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

// Returns the tokens that have logits in memory, also those of a teacher.
static inline int lm_head_step_(const LmHead* head) {
    const Teaching* t = head->teaching;
    return t ? int_min(head->chunk, t->head->chunk) : head->chunk;
}

static inline CrossEntropy lm_head_chunk_(const LmHead* head, int first) {
    return (CrossEntropy){int_min(lm_head_step_(head), head->N - first), head->V, head->weight.OC,
                          head->softcap, head->z_loss};
}

// ---- a cut vocabulary ----

// Returns the first vocabulary row of this rank's slice, and its chunk: the rows that are not
// padding.
static inline int lm_head_first_(const LmHead* head) { return head->tensor.cut.rank * head->weight.OC; }

static inline CrossEntropy lm_head_own_chunk_(const LmHead* head, int first) {
    CrossEntropy chunk = lm_head_chunk_(head, first);
    chunk.V = int_max(0, int_min(head->V - lm_head_first_(head), head->weight.OC));
    return chunk;
}

// cross_entropy_slice_cpu or cross_entropy_slice_exp_cpu.
typedef void (*LmHeadKeep_)(CrossEntropySlice* rows, float* logits, const int* target, int first,
                            CrossEntropy of);

// Computes this rank's logits of a chunk of tokens from `first` on, gathers what each slice keeps
// of them, and sets the losses.
static inline void lm_head_keep_(float* losses, int* is_top, const LmHead* head, int first,
                                 LmHeadKeep_ keep) {
    const TensorParallel* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_chunk_(head, first);
    lm_head_logits_cpu(head, first, chunk.N);
    keep(head->rows + (size_t)tp->cut.rank * (size_t)chunk.N, head->logits, head->targets + first,
         lm_head_first_(head), lm_head_own_chunk_(head, first));
    tensor_gather_all_cpu(tp, head->rows, (size_t)chunk.N * sizeof(CrossEntropySlice) / sizeof(float));
    cross_entropy_combine_cpu(losses + first, is_top ? is_top + first : NULL, head->rows, tp->cut.ranks,
                              head->targets + first, chunk);
}

// Returns the teacher, with the logits of the present chunk.
static inline DistillTeacher lm_head_teacher_(const Teaching* t) {
    return (DistillTeacher){t->head->logits, t->head->weight.OC, t->head->softcap};
}

static inline DistillSlices lm_head_distill_slices_(const float* losses, const LmHead* head, int first) {
    return (DistillSlices){head->tensor.cut.ranks, head->rows, head->teaching->sums, losses + first,
                           head->targets + first};
}

// Sets the divergences of a chunk of tokens from `first` on, whose losses are known.
static inline void lm_head_diverge_(const float* losses, const LmHead* head, int first, CrossEntropy chunk) {
    const TensorParallel* tp = &head->tensor;
    const Teaching* t = head->teaching;
    const DistillSlices slices = lm_head_distill_slices_(losses, head, first);
    lm_head_logits_cpu(t->head, first, chunk.N);
    distill_slice_cpu(&slices, tp->cut.rank, head->logits, lm_head_teacher_(t),
                      lm_head_own_chunk_(head, first), t->how);
    tensor_gather_all_cpu(tp, t->sums, (size_t)chunk.N * sizeof(DistillSlice) / sizeof(float));
    distill_combine_cpu(t->divergence + first, &slices, chunk, t->how);
}

// Sets the losses of a chunk of tokens from `first` on, and turns its logits into their gradients.
static inline void lm_head_cut_dlogits_(float* losses, const LmHead* head, int first, float dloss) {
    const TensorParallel* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_own_chunk_(head, first);
    const Teaching* t = head->teaching;
    lm_head_keep_(losses, NULL, head, first, t ? cross_entropy_slice_cpu : cross_entropy_slice_exp_cpu);
    if (t) {
        const DistillSlices slices = lm_head_distill_slices_(losses, head, first);
        lm_head_diverge_(losses, head, first, lm_head_chunk_(head, first));
        distill_slice_backward_cpu(&slices, head->logits, lm_head_teacher_(t), lm_head_first_(head), dloss,
                                   chunk, t->how);
    } else {
        cross_entropy_slice_backward_cpu(head->logits, head->rows, tp->cut.ranks, tp->cut.rank,
                                         head->targets + first, lm_head_first_(head), dloss, chunk);
    }
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
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        if (tensor_is_cut(head->tensor.cut)) {
            lm_head_keep_(losses, is_top, head, n, cross_entropy_slice_cpu);
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
static inline void lm_head_dlogits_(float* losses, const LmHead* head, int first, float dloss,
                                    CrossEntropy chunk) {
    const Teaching* t = head->teaching;
    const int* targets = head->targets + first;
    if (tensor_is_cut(head->tensor.cut)) {
        lm_head_cut_dlogits_(losses, head, first, dloss);
        return;
    }
    lm_head_logits_cpu(head, first, chunk.N);
    if (!t) {
        cross_entropy_backward_cpu(losses + first, head->logits, targets, dloss, chunk);
    } else {
        lm_head_logits_cpu(t->head, first, chunk.N);
        distill_logits_cpu(losses + first, t->divergence + first, head->logits,
                           (DistillTeacher){t->head->logits, t->head->weight.OC, t->head->softcap},
                           (DistillTokens){targets, dloss, chunk, t->how});
    }
}

// Sets the losses and dhidden, and sets or adds to dweight, unless NULL, as `mode` says. dloss is
// the gradient of the loss of each token. Collective.
static inline void lm_head_gradients_cpu(float* losses, float* dhidden, float* dweight, const LmHead* head,
                                         float dloss, GradientMode mode) {
    float* part = tensor_part(&head->tensor, dhidden);
    if (head->linear->is_bf16 && !head->teaching) {
        const CrossEntropyBf16 classifier = lm_head_bf16_(head);
        cross_entropy_bf16_gradients_cpu(losses, part, dweight, &classifier, dloss, mode, head->bf16,
                                         &head->linear->bf16);
        tensor_sum_cpu(&head->tensor, dhidden, NULL);
        return;
    }
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        const size_t at = (size_t)n * head->weight.C;
        float* dlogits = head->logits; // (chunk.N, Vp), in place
        lm_head_dlogits_(losses, head, n, dloss, chunk);
        linear_backward_cpu(part + at, dweight, NULL, dlogits, head->hidden + at, &head->weight, chunk.N,
                            n == 0 ? mode : GRADIENT_ADD, head->linear);
    }
    tensor_sum_cpu(&head->tensor, dhidden, NULL);
}

#endif
