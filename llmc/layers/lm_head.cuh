/*
lm_head.cuh -- lm_head.h on the GPU: from the last hidden state to losses and gradients.

    logits (N, Vp) = hidden weight^T          losses and dlogits as cross_entropy.h says

    hidden, dhidden   (N, C)      weight, dweight   (Vp, C)      targets, losses, is_top   (N)

With slices of the vocabulary (tensor_parallel.cuh), hidden has all tokens, dhidden the rows of this
process, and weight, logits and dweight are those of its first slice. The numbers of each slice are
gathered (cross_entropy.cuh); losses and is_top are then in every process.

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
    DistillSlice* sums;    // (of, chunk) sums of all slices; without slices unused
} TeachingGpu;

struct LmHeadGpu {
    const floatX* hidden;
    Weight weight;
    const int* targets;
    floatX* logits;        // (chunk, Vp), which gradients overwrite
    int N, V;              // tokens; words of the vocabulary
    int chunk;             // tokens that have logits in memory
    float softcap, z_loss; // 0: none (cross_entropy.h)
    LinearGpu* linear;
    const TeachingGpu* teaching; // for gradients; NULL: none
    TensorParallelGpu tensor;    // slices of the words
    size_t slice_bytes;          // from the matrix of a slice to the next one's
    void* sums;                  // (of, chunk) CrossEntropySum of all slices, or CrossEntropyTop
    floatX* all;                 // (2, tokens, all words), for lm_head_all_logits
};

// Returns the head of slice i of this process: its words and their logits.
static inline LmHeadGpu lm_head_slice_(const LmHeadGpu* head, int i) {
    const int words = head->weight.OC, first = (head->tensor.cut.first + i) * words;
    LmHeadGpu slice = *head;
    slice.weight.data = (const floatX*)(const void*)((const char*)head->weight.data + i * head->slice_bytes);
    slice.logits = head->logits + (size_t)i * head->chunk * words;
    slice.V = int_max(0, int_min(head->V - first, words));
    return slice;
}

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

// Returns the logits (count, Vp) of all words: of the tokens `first`, first + 1, ... Collective.
static inline const floatX* lm_head_all_logits(const LmHeadGpu* head, int first, int count) {
    const TensorParallelGpu* tp = &head->tensor;
    const int of = tp->cut.of;
    const size_t words = (size_t)head->weight.OC, slice = count * words, row_bytes = words * sizeof(floatX);
    floatX* all = head->all + of * slice;
    if (!tensor_is_sliced(tp)) {
        lm_head_logits(head, first, count);
        return head->logits;
    }
    for (int i = 0; i < tp->cut.slices; i++) {
        LmHeadGpu of_slice = lm_head_slice_(head, i);
        of_slice.logits = head->all + (tp->cut.first + i) * slice;
        lm_head_logits(&of_slice, first, count);
    }
    tensor_gather_slices(tp, head->all, slice * sizeof(floatX));
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

// ---- slices ----

// Computes the logits of a chunk of tokens from `first` on in the slices of this process, and sets
// the losses from the numbers of all slices, of which the first place then has those of whole rows.
static inline void lm_head_sums_(float* losses, const LmHeadGpu* head, int first, int count) {
    const TensorParallelGpu* tp = &head->tensor;
    CrossEntropySum* sums = (CrossEntropySum*)head->sums;
    for (int i = 0; i < tp->cut.slices; i++) {
        const LmHeadGpu slice = lm_head_slice_(head, i);
        const int number = tp->cut.first + i;
        lm_head_logits(&slice, first, count);
        cross_entropy_slice(sums + (size_t)number * count, (const floatX*)slice.logits, head->targets + first,
                            number * slice.weight.OC, lm_head_chunk_(&slice, first), tp->gpu);
    }
    tensor_gather_slices(tp, sums, (size_t)count * sizeof(CrossEntropySum));
    cross_entropy_combine(losses + first, sums, sums, head->targets + first, tp->cut.of, count, tp->gpu);
}

// Sets is_top of a chunk of tokens from `first` on, whose logits lm_head_sums_ has set.
static inline void lm_head_tops_(int* is_top, const LmHeadGpu* head, int first, int count) {
    const TensorParallelGpu* tp = &head->tensor;
    CrossEntropyTop* tops = (CrossEntropyTop*)head->sums;
    for (int i = 0; i < tp->cut.slices; i++) {
        const LmHeadGpu slice = lm_head_slice_(head, i);
        const int number = tp->cut.first + i;
        cross_entropy_slice_top(tops + (size_t)number * count, (const floatX*)slice.logits,
                                number * slice.weight.OC, lm_head_chunk_(&slice, first), tp->gpu);
    }
    tensor_gather_slices(tp, tops, (size_t)count * sizeof(CrossEntropyTop));
    cross_entropy_combine_top(is_top + first, tops, head->targets + first, tp->cut.of, count, tp->gpu);
}

static inline void lm_head_slices_losses_(float* losses, int* is_top, const LmHeadGpu* head) {
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const int count = lm_head_chunk_(head, n).N;
        lm_head_sums_(losses, head, n, count);
        if (is_top) {
            lm_head_tops_(is_top, head, n, count);
        }
    }
}

// Returns the teacher of slice i of this process, with the logits of the present chunk.
static inline DistillTeacherGpu<floatX> lm_head_teacher_(const TeachingGpu* t, int i) {
    const LmHeadGpu slice = lm_head_slice_(t->head, i);
    return DistillTeacherGpu<floatX>{slice.logits, slice.weight.OC, slice.softcap};
}

// Returns the tokens of a chunk from `first` on, with its sizes, after lm_head_sums_.
static inline DistillTokensGpu lm_head_tokens_(const float* losses, const LmHeadGpu* head, int first,
                                               float dloss, CrossEntropy of) {
    return {head->targets + first, losses + first, (const CrossEntropySum*)head->sums, dloss, of,
            head->teaching->how};
}

// Sets the divergences of a chunk of tokens from `first` on, after lm_head_sums_.
static inline void lm_head_diverge_(const float* losses, const LmHeadGpu* head, int first,
                                    CrossEntropy chunk) {
    const TensorParallelGpu* tp = &head->tensor;
    const TeachingGpu* t = head->teaching;
    for (int i = 0; i < tp->cut.slices; i++) {
        const LmHeadGpu slice = lm_head_slice_(head, i), teacher = lm_head_slice_(t->head, i);
        const int number = tp->cut.first + i;
        lm_head_logits(&teacher, first, chunk.N);
        distill_slice(t->sums + (size_t)number * chunk.N, (const floatX*)slice.logits, lm_head_teacher_(t, i),
                      lm_head_tokens_(losses, head, first, 1, lm_head_chunk_(&slice, first)), tp->gpu);
    }
    tensor_gather_slices(tp, t->sums, (size_t)chunk.N * sizeof(DistillSlice));
    distill_combine(t->divergence + first, t->sums, tp->cut.of,
                    lm_head_tokens_(losses, head, first, 1, chunk), tp->gpu);
}

// Turns the logits of slice i, on the tokens of a chunk, into their gradients.
static inline void lm_head_slice_dlogits_(const float* losses, const LmHeadGpu* head, int i, int first,
                                          float dloss) {
    const TensorParallelGpu* tp = &head->tensor;
    const LmHeadGpu slice = lm_head_slice_(head, i);
    const CrossEntropy chunk = lm_head_chunk_(&slice, first);
    const CrossEntropySum* whole = (const CrossEntropySum*)head->sums;
    const int word = (tp->cut.first + i) * slice.weight.OC;
    const int* targets = head->targets + first;
    const TeachingGpu* t = head->teaching;
    if (t) {
        distill_slice_backward(slice.logits, lm_head_teacher_(t, i), (const DistillSlice*)t->sums, word,
                               lm_head_tokens_(losses, head, first, dloss, chunk), tp->gpu);
    } else {
        cross_entropy_slice_backward(slice.logits, whole, targets, word, dloss, chunk, tp->gpu);
    }
}

// Sets the part of slice i of dhidden, and sets or adds to its dweight, for the tokens of a chunk.
static inline void lm_head_slice_gradients_(const float* losses, Gradient dweight, const LmHeadGpu* head,
                                            int i, int first, float dloss, GradientMode mode) {
    const TensorParallelGpu* tp = &head->tensor;
    const LmHeadGpu slice = lm_head_slice_(head, i);
    const int count = lm_head_chunk_(head, first).N;
    const size_t at = (size_t)first * slice.weight.C, own = i * head->slice_bytes / sizeof(floatX);
    if (dweight.data) {
        dweight.data = (char*)dweight.data + own * dtype_bytes(dweight.dtype);
    }
    lm_head_slice_dlogits_(losses, head, i, first, dloss);
    linear_backward(tensor_part(tp, i, NULL) + at, dweight, slice.logits, head->hidden + at, &slice.weight,
                    count, mode, head->linear);
}

static inline void lm_head_slices_gradients_(float* losses, floatX* dhidden, Gradient dweight,
                                             const LmHeadGpu* head, float dloss, GradientMode mode) {
    const TensorParallelGpu* tp = &head->tensor;
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        lm_head_sums_(losses, head, n, chunk.N);
        if (head->teaching) {
            lm_head_diverge_(losses, head, n, chunk);
        }
        for (int i = 0; i < tp->cut.slices; i++) {
            lm_head_slice_gradients_(losses, dweight, head, i, n, dloss, n == 0 ? mode : GRADIENT_ADD);
        }
    }
    tensor_sum(tp, dhidden, NULL, NULL);
}

// ---- losses and gradients ----

// Sets the losses, without gradients; and is_top, unless NULL: whether each target was the most
// likely token.
static inline void lm_head_losses(float* losses, int* is_top, const LmHeadGpu* head) {
    const Gpu* gpu = head->linear->gpu;
    if (tensor_is_sliced(&head->tensor)) {
        lm_head_slices_losses_(losses, is_top, head);
        return;
    }
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        lm_head_logits(head, n, chunk.N);
        cross_entropy_loss(losses + n, head->logits, head->targets + n, chunk, gpu);
        if (is_top) {
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
// says. dloss is the gradient of the loss of each token.
static inline void lm_head_gradients(float* losses, floatX* dhidden, Gradient dweight, const LmHeadGpu* head,
                                     float dloss, GradientMode mode) {
    const Weight* weight = &head->weight;
    if (tensor_is_sliced(&head->tensor)) {
        lm_head_slices_gradients_(losses, dhidden, dweight, head, dloss, mode);
        return;
    }
    for (int n = 0; n < head->N; n += lm_head_step_(head)) {
        const CrossEntropy chunk = lm_head_chunk_(head, n);
        const size_t at = (size_t)n * weight->C;
        floatX* dlogits = head->logits; // (chunk.N, Vp), in place
        lm_head_logits(head, n, chunk.N);
        lm_head_dlogits_(losses, head, n, dloss, chunk);
        linear_backward(dhidden + at, dweight, dlogits, head->hidden + at, weight, chunk.N,
                        n == 0 ? mode : GRADIENT_ADD, head->linear);
    }
}

#endif
