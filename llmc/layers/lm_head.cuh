/*
lm_head.cuh -- lm_head.h on the GPU: from the last hidden state to losses and gradients.

    logits (N, Vp) = hidden weight^T          losses and dlogits as cross_entropy.h says

    hidden, dhidden   (N, C)      weight, dweight   (Vp, C)      targets, losses, is_top   (N)

If tensor ranks cut the vocabulary (tensor_parallel.cuh), hidden has all tokens, dhidden the rows of
this rank, and weight, logits and dweight are this rank's slice. The numbers of each slice are
gathered (cross_entropy.cuh); losses and is_top are then in every rank.

Only a chunk of tokens has its logits in memory at a time. With a teacher the gradient is that of
distill.h; its logits have a chunk of memory of their own.
*/
#ifndef LLMC_LM_HEAD_CUH
#define LLMC_LM_HEAD_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/base/sizes.h"
#include "llmc/layers/linear.cuh"
#include "llmc/ops/cross_entropy.cuh"
#include "llmc/ops/distill.cuh"
#include "llmc/parallel/tensor_parallel.cuh"

typedef struct LmHeadGpu LmHeadGpu;

// A teacher on the tokens of a head: another model, after its forward pass.
typedef struct {
    Distill how;
    const LmHeadGpu* head; // of that model
    float* divergence;     // (N) result
    DistillSlice* sums;    // (t, chunk) sums of all slices; of a whole vocabulary unused
} TeachingGpu;

struct LmHeadGpu {
    const floatX* hidden;
    Weight weight;
    const int* targets;
    floatX* logits;        // (chunk, Vp), which gradients overwrite
    int N, V;              // tokens; the whole vocabulary
    int chunk;             // tokens that have logits in memory
    float softcap, z_loss; // 0: none (cross_entropy.h)
    LinearGpu* linear;
    const TeachingGpu* teaching; // for gradients; NULL: none
    TensorParallelGpu tensor;    // ranks that cut the vocabulary
    void* sums;                  // (t, chunk) CrossEntropySum of all slices, or CrossEntropyTop
    floatX* all;                 // (2, tokens, whole vocabulary), for lm_head_all_logits
};

// Sets the logits (count, Vp) of the tokens `first`, first + 1, ...: at most a chunk. With
// --quantize a few at a time, since the matrix in floatX would take more memory than its blocks
// save.
static inline void lm_head_logits(const LmHeadGpu* head, int first, int count) {
    const Weight* weight = &head->weight;
    const int most = head->linear->is_quantized ? QUANTIZED_ROWS : count;
    for (int n = 0; n < count; n += most) {
        linear_forward(head->logits + (size_t)n * weight->OC, head->hidden + (size_t)(first + n) * weight->C,
                       weight, int_min(most, count - n), head->linear);
    }
}

// Returns the logits (count, Vp) of the whole vocabulary: of the tokens `first`, first + 1, ...
// Collective.
static inline const floatX* lm_head_all_logits(const LmHeadGpu* head, int first, int count) {
    const TensorParallelGpu* tp = &head->tensor;
    const int of = tp->cut.ranks;
    const size_t words = (size_t)head->weight.OC, slice = count * words, row_bytes = words * sizeof(floatX);
    floatX* all = head->all + of * slice;
    LmHeadGpu own = *head;
    if (!tensor_is_cut(tp->cut)) {
        lm_head_logits(head, first, count);
        return head->logits;
    }
    own.logits = head->all + tp->cut.rank * slice;
    lm_head_logits(&own, first, count);
    tensor_gather_all(tp, head->all, slice * sizeof(floatX));
    for (int i = 0; i < of; i++) {
        CUDA_CHECK(cudaMemcpy2DAsync(all + i * words, of * row_bytes, head->all + i * slice, row_bytes,
                                     row_bytes, (size_t)count, cudaMemcpyDeviceToDevice, tp->gpu->stream));
    }
    return all;
}

// Returns the tokens that have logits in memory, also those of a teacher.
static inline int lm_head_step_(const LmHeadGpu* head) {
    const TeachingGpu* t = head->teaching;
    return t ? int_min(head->chunk, t->head->chunk) : head->chunk;
}

static inline CrossEntropy lm_head_chunk_(const LmHeadGpu* head, int first) {
    return CrossEntropy{int_min(lm_head_step_(head), head->N - first), head->V, head->weight.OC,
                        head->softcap, head->z_loss};
}

// ---- a cut vocabulary ----

// Returns the first vocabulary row of this rank's slice, and its chunk: the rows that are not
// padding.
static inline int lm_head_first_(const LmHeadGpu* head) { return head->tensor.cut.rank * head->weight.OC; }

static inline CrossEntropy lm_head_own_chunk_(const LmHeadGpu* head, int first) {
    CrossEntropy chunk = lm_head_chunk_(head, first);
    chunk.V = int_max(0, int_min(head->V - lm_head_first_(head), head->weight.OC));
    return chunk;
}

// Computes this rank's logits of a chunk of tokens from `first` on, and sets the losses from the
// numbers of all slices, of which the first place then has those of whole rows.
static inline void lm_head_sums_(float* losses, const LmHeadGpu* head, int first) {
    const TensorParallelGpu* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_own_chunk_(head, first);
    CrossEntropySum* sums = (CrossEntropySum*)head->sums;
    lm_head_logits(head, first, chunk.N);
    cross_entropy_slice(sums + (size_t)tp->cut.rank * chunk.N, (const floatX*)head->logits,
                        head->targets + first, lm_head_first_(head), chunk, tp->gpu);
    tensor_gather_all(tp, sums, (size_t)chunk.N * sizeof(CrossEntropySum));
    cross_entropy_combine(losses + first, sums, sums, head->targets + first, tp->cut.ranks, chunk.N, tp->gpu);
}

// Sets is_top of a chunk of tokens from `first` on, whose logits lm_head_sums_ has set.
static inline void lm_head_tops_(int* is_top, const LmHeadGpu* head, int first) {
    const TensorParallelGpu* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_own_chunk_(head, first);
    CrossEntropyTop* tops = (CrossEntropyTop*)head->sums;
    cross_entropy_slice_top(tops + (size_t)tp->cut.rank * chunk.N, (const floatX*)head->logits,
                            lm_head_first_(head), chunk, tp->gpu);
    tensor_gather_all(tp, tops, (size_t)chunk.N * sizeof(CrossEntropyTop));
    cross_entropy_combine_top(is_top + first, tops, head->targets + first, tp->cut.ranks, chunk.N, tp->gpu);
}

// Returns the teacher, with the logits of the present chunk.
static inline DistillTeacherGpu<floatX> lm_head_teacher_(const TeachingGpu* t) {
    return DistillTeacherGpu<floatX>{t->head->logits, t->head->weight.OC, t->head->softcap};
}

// Returns the tokens of a chunk from `first` on, with its sizes, after lm_head_sums_.
static inline DistillTokensGpu lm_head_tokens_(const float* losses, const LmHeadGpu* head, int first,
                                               float dloss, CrossEntropy of) {
    return {head->targets + first, losses + first, (const CrossEntropySum*)head->sums, dloss, of,
            head->teaching->how};
}

// Sets the divergences of a chunk of tokens from `first` on, after lm_head_sums_.
static inline void lm_head_diverge_(const float* losses, const LmHeadGpu* head, int first) {
    const TensorParallelGpu* tp = &head->tensor;
    const TeachingGpu* t = head->teaching;
    const CrossEntropy chunk = lm_head_chunk_(head, first), own = lm_head_own_chunk_(head, first);
    lm_head_logits(t->head, first, chunk.N);
    distill_slice(t->sums + (size_t)tp->cut.rank * chunk.N, (const floatX*)head->logits, lm_head_teacher_(t),
                  lm_head_tokens_(losses, head, first, 1, own), tp->gpu);
    tensor_gather_all(tp, t->sums, (size_t)chunk.N * sizeof(DistillSlice));
    distill_combine(t->divergence + first, t->sums, tp->cut.ranks,
                    lm_head_tokens_(losses, head, first, 1, chunk), tp->gpu);
}

// Sets the losses of a chunk of tokens from `first` on, and turns its logits into their gradients.
static inline void lm_head_cut_dlogits_(float* losses, const LmHeadGpu* head, int first, float dloss) {
    const TensorParallelGpu* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_own_chunk_(head, first);
    const CrossEntropySum* whole = (const CrossEntropySum*)head->sums;
    const int word = lm_head_first_(head);
    const int* targets = head->targets + first;
    const TeachingGpu* t = head->teaching;
    lm_head_sums_(losses, head, first);
    if (t) {
        lm_head_diverge_(losses, head, first);
        distill_slice_backward(head->logits, lm_head_teacher_(t), (const DistillSlice*)t->sums, word,
                               lm_head_tokens_(losses, head, first, dloss, chunk), tp->gpu);
    } else {
        cross_entropy_slice_backward(head->logits, whole, targets, word, dloss, chunk, tp->gpu);
    }
}

// ---- losses and gradients ----

// Sets the losses, without gradients; and is_top, unless NULL: whether each target was the most
// likely token.
static inline void lm_head_losses(float* losses, int* is_top, const LmHeadGpu* head) {
    const Gpu* gpu = head->linear->gpu;
    const int is_cut = tensor_is_cut(head->tensor.cut);
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        if (is_cut) {
            lm_head_sums_(losses, head, n);
        } else {
            lm_head_logits(head, n, chunk.N);
            cross_entropy_loss(losses + n, head->logits, head->targets + n, chunk, gpu);
        }
        if (is_top && is_cut) {
            lm_head_tops_(is_top, head, n);
        } else if (is_top) {
            cross_entropy_top(is_top + n, head->logits, head->targets + n, chunk, gpu);
        }
    }
}

// Sets the losses of a chunk of tokens from `first` on, and turns its logits into their gradients.
static inline void lm_head_dlogits_(float* losses, const LmHeadGpu* head, int first, float dloss,
                                    CrossEntropy chunk) {
    const Gpu* gpu = head->linear->gpu;
    const TeachingGpu* t = head->teaching;
    const int* targets = head->targets + first;
    if (tensor_is_cut(head->tensor.cut)) {
        lm_head_cut_dlogits_(losses, head, first, dloss);
        return;
    }
    lm_head_logits(head, first, chunk.N);
    if (!t) {
        cross_entropy_backward(losses + first, head->logits, targets, dloss, chunk, gpu);
    } else {
        lm_head_logits(t->head, first, chunk.N);
        distill_logits(losses + first, t->divergence + first, head->logits,
                       {t->head->logits, t->head->weight.OC, t->head->softcap},
                       lm_head_tokens_(losses, head, first, dloss, chunk), gpu);
    }
}

// Sets the losses and dhidden, and sets or adds to dweight, unless it has no data, as `mode`
// says. dloss is the gradient of the loss of each token. Collective.
static inline void lm_head_gradients(float* losses, floatX* dhidden, Gradient dweight, const LmHeadGpu* head,
                                     float dloss, GradientMode mode) {
    const Weight* weight = &head->weight;
    floatX* part = tensor_part(&head->tensor, dhidden);
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        const size_t at = (size_t)n * weight->C;
        floatX* dlogits = head->logits; // (chunk.N, Vp), in place
        lm_head_dlogits_(losses, head, n, dloss, chunk);
        linear_backward(part + at, dweight, dlogits, head->hidden + at, weight, chunk.N,
                        n == 0 ? mode : GRADIENT_ADD, head->linear);
    }
    tensor_sum(&head->tensor, dhidden, NULL, NULL);
}

#endif
