/*
lm_head.h -- the language-modeling head on the CPU, with the matmuls of linear.h: from the last
hidden state to losses and gradients.

    logits (N, Vp) = hidden weight^T          losses and dlogits as cross_entropy.h says

    hidden, dhidden   (N, C)      weight, dweight   (Vp, C)      targets, losses, is_top   (N)

weight is the token embedding, or a matrix of the head's own.

With slices of the vocabulary (tensor_parallel.h), hidden has all tokens, dhidden the rows of this
process, and weight, logits and dweight are those of its first slice. What a slice keeps of each
token is gathered (cross_entropy.h); losses and is_top are then in every process.

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
    DistillSlice* sums; // (of, chunk) sums of all slices; without slices unused
} Teaching;

struct LmHead {
    const float* hidden;
    Weight weight;
    const int* targets;
    float* logits;         // (chunk, Vp), which gradients overwrite
    int N, V;              // tokens; words of the vocabulary
    int chunk;             // tokens that have logits in memory
    float softcap, z_loss; // 0: none (cross_entropy.h)
    Linear* linear;
    CrossEntropyBf16Scratch* bf16; // with matmuls in bf16
    const Teaching* teaching;      // for gradients; NULL: none
    TensorParallel tensor;         // slices of the words
    size_t slice_bytes;            // from the matrix of a slice to the next one's
    CrossEntropySlice* rows;       // (of, chunk) what all slices keep
    float* all;                    // (2, tokens, all words), for lm_head_all_logits_cpu
};

// Returns the head of slice i of this process: its words and their logits.
static inline LmHead lm_head_slice_(const LmHead* head, int i) {
    LmHead slice = *head;
    slice.weight = linear_slice(&head->weight, i, head->slice_bytes);
    slice.logits = head->logits + (size_t)i * (size_t)head->chunk * (size_t)head->weight.OC;
    slice.V = int_max(0, int_min(head->V - (head->tensor.first + i) * head->weight.OC, head->weight.OC));
    return slice;
}

// Sets the logits (count, Vp) of the tokens `first`, first + 1, ...: at most a chunk.
static inline void lm_head_logits_cpu(const LmHead* head, int first, int count) {
    linear_forward_cpu(head->logits, head->hidden + (size_t)first * head->weight.C, &head->weight, count,
                       head->linear);
}

// Returns the logits (count, Vp) of all words: of the tokens `first`, first + 1, ... Collective.
static inline const float* lm_head_all_logits_cpu(const LmHead* head, int first, int count) {
    const TensorParallel* tp = &head->tensor;
    const size_t words = (size_t)head->weight.OC, slice = (size_t)count * words, of = (size_t)tp->of;
    float *gathered = head->all, *all = head->all + of * slice;
    if (!tensor_is_sliced(tp)) {
        lm_head_logits_cpu(head, first, count);
        return head->logits;
    }
    for (int i = 0; i < tp->slices; i++) {
        LmHead of_slice = lm_head_slice_(head, i);
        of_slice.logits = gathered + (size_t)(tp->first + i) * slice;
        lm_head_logits_cpu(&of_slice, first, count);
    }
    tensor_gather_slices_cpu(tp, gathered, slice);
    for (size_t n = 0; n < (size_t)count * of; n++) { // token n / of, slice n % of
        memcpy(all + n * words, gathered + n % of * slice + n / of * words, words * sizeof(float));
    }
    return all;
}

static inline CrossEntropyBf16 lm_head_bf16_(const LmHead* head) {
    const Weight* w = &head->weight;
    const TensorParallel* tp = &head->tensor;
    return (CrossEntropyBf16){
        head->hidden,  w->data,
        w->forward,    w->backward,
        head->targets, head->N,
        w->C,          head->V,
        w->OC,         head->softcap,
        head->z_loss,  {tp->first, tp->slices, tp->of, head->slice_bytes / sizeof(float), tp->group}};
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

// ---- slices ----

// cross_entropy_slice_cpu or cross_entropy_slice_exp_cpu.
typedef void (*LmHeadKeep_)(CrossEntropySlice* rows, float* logits, const int* target, int first,
                            CrossEntropy of);

// Computes the logits of `count` tokens from `first` on in the slices of this process, and gathers
// what each slice keeps of them.
static inline void lm_head_keep_(const LmHead* head, int first, int count, LmHeadKeep_ keep) {
    const TensorParallel* tp = &head->tensor;
    for (int i = 0; i < tp->slices; i++) {
        const LmHead slice = lm_head_slice_(head, i);
        const int number = tp->first + i;
        CrossEntropy chunk = lm_head_chunk_(&slice, first);
        lm_head_logits_cpu(&slice, first, count);
        keep(head->rows + (size_t)number * (size_t)count, slice.logits, head->targets + first,
             number * slice.weight.OC, chunk);
    }
    tensor_gather_slices_cpu(tp, head->rows, (size_t)count * sizeof(CrossEntropySlice) / sizeof(float));
}

static inline void lm_head_slices_losses_(float* losses, int* is_top, const LmHead* head) {
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        lm_head_keep_(head, n, chunk.N, cross_entropy_slice_cpu);
        cross_entropy_combine_cpu(losses + n, is_top ? is_top + n : NULL, head->rows, head->tensor.of,
                                  head->targets + n, chunk);
    }
}

// Returns the teacher of slice i of this process, with the logits of the present chunk.
static inline DistillTeacher lm_head_teacher_(const Teaching* t, int i) {
    const LmHead slice = lm_head_slice_(t->head, i);
    return (DistillTeacher){slice.logits, slice.weight.OC, slice.softcap};
}

static inline DistillSlices lm_head_distill_slices_(const float* losses, const LmHead* head, int first) {
    return (DistillSlices){head->tensor.of, head->rows, head->teaching->sums, losses + first,
                           head->targets + first};
}

// Sets the divergences of a chunk of tokens from `first` on, whose losses are known.
static inline void lm_head_diverge_(const float* losses, const LmHead* head, int first, CrossEntropy chunk) {
    const TensorParallel* tp = &head->tensor;
    const Teaching* t = head->teaching;
    const DistillSlices slices = lm_head_distill_slices_(losses, head, first);
    for (int i = 0; i < tp->slices; i++) {
        const LmHead slice = lm_head_slice_(head, i), teacher = lm_head_slice_(t->head, i);
        lm_head_logits_cpu(&teacher, first, chunk.N);
        distill_slice_cpu(&slices, tp->first + i, slice.logits, lm_head_teacher_(t, i),
                          lm_head_chunk_(&slice, first), t->how);
    }
    tensor_gather_slices_cpu(tp, t->sums, (size_t)chunk.N * sizeof(DistillSlice) / sizeof(float));
    distill_combine_cpu(t->divergence + first, &slices, chunk, t->how);
}

// Turns the logits of slice i, on the tokens of a chunk, into their gradients.
static inline void lm_head_slice_dlogits_(const float* losses, const LmHead* head, int i, int first,
                                          float dloss) {
    const TensorParallel* tp = &head->tensor;
    const LmHead slice = lm_head_slice_(head, i);
    const CrossEntropy chunk = lm_head_chunk_(&slice, first);
    const int number = tp->first + i, word = number * slice.weight.OC;
    const Teaching* t = head->teaching;
    if (t) {
        const DistillSlices slices = lm_head_distill_slices_(losses, head, first);
        distill_slice_backward_cpu(&slices, slice.logits, lm_head_teacher_(t, i), word, dloss, chunk, t->how);
    } else {
        cross_entropy_slice_backward_cpu(slice.logits, head->rows, tp->of, number, head->targets + first,
                                         word, dloss, chunk);
    }
}

// Sets the part of slice i of dhidden, and sets or adds to its dweight, for the tokens of a chunk.
static inline void lm_head_slice_gradients_(const float* losses, float* dweight, const LmHead* head, int i,
                                            int first, float dloss, GradientMode mode) {
    const TensorParallel* tp = &head->tensor;
    const LmHead slice = lm_head_slice_(head, i);
    const int count = lm_head_chunk_(head, first).N;
    const size_t at = (size_t)first * (size_t)slice.weight.C,
                 own = (size_t)i * head->slice_bytes / sizeof(float);
    lm_head_slice_dlogits_(losses, head, i, first, dloss);
    linear_backward_cpu(tensor_part(tp, i, NULL) + at, dweight ? dweight + own : NULL, NULL, slice.logits,
                        head->hidden + at, &slice.weight, count, mode, head->linear);
}

static inline void lm_head_slices_gradients_(float* losses, float* dhidden, float* dweight,
                                             const LmHead* head, float dloss, GradientMode mode) {
    const TensorParallel* tp = &head->tensor;
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        lm_head_keep_(head, n, chunk.N,
                      head->teaching ? cross_entropy_slice_cpu : cross_entropy_slice_exp_cpu);
        cross_entropy_combine_cpu(losses + n, NULL, head->rows, tp->of, head->targets + n, chunk);
        if (head->teaching) {
            lm_head_diverge_(losses, head, n, chunk);
        }
        for (int i = 0; i < tp->slices; i++) {
            lm_head_slice_gradients_(losses, dweight, head, i, n, dloss, n == 0 ? mode : GRADIENT_ADD);
        }
    }
    tensor_sum_cpu(tp, dhidden, NULL);
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
    if (tensor_is_sliced(&head->tensor)) {
        lm_head_slices_losses_(losses, is_top, head);
        return;
    }
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
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
// the gradient of the loss of each token.
static inline void lm_head_gradients_cpu(float* losses, float* dhidden, float* dweight, const LmHead* head,
                                         float dloss, GradientMode mode) {
    if (head->linear->is_bf16 && !head->teaching) {
        const CrossEntropyBf16 classifier = lm_head_bf16_(head);
        cross_entropy_bf16_gradients_cpu(losses, tensor_part(&head->tensor, 0, dhidden), dweight, &classifier,
                                         dloss, mode, head->bf16, &head->linear->bf16);
        tensor_sum_cpu(&head->tensor, dhidden, NULL);
        return;
    }
    if (tensor_is_sliced(&head->tensor)) {
        lm_head_slices_gradients_(losses, dhidden, dweight, head, dloss, mode);
        return;
    }
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        const size_t at = (size_t)n * head->weight.C;
        float* dlogits = head->logits; // (chunk.N, Vp), in place
        lm_head_logits_cpu(head, n, chunk.N);
        lm_head_dlogits_(losses, head, n, dloss, chunk);
        linear_backward_cpu(dhidden + at, dweight, NULL, dlogits, head->hidden + at, &head->weight, chunk.N,
                            n == 0 ? mode : GRADIENT_ADD, head->linear);
    }
}

#endif
