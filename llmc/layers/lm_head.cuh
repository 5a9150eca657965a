/*
lm_head.cuh -- lm_head.h on the GPU: from the last hidden state to losses and gradients.

    logits (N, Vp) = hidden weight^T          losses and dlogits as cross_entropy.h says

    hidden, dhidden   (N, C)      weight, dweight   (Vp, C)      targets, losses, is_top   (N)

If tensor ranks cut the vocabulary (tensor_parallel.cuh), hidden has all tokens, dhidden the rows of
this rank, and weight, logits and dweight are this rank's slice. The numbers of each slice are
gathered (cross_entropy.cuh); losses and is_top are then in every rank.

Only a chunk of tokens has its logits in memory at a time. teaching.cuh is about heads with a
teacher.
*/
#ifndef LLMC_LM_HEAD_CUH
#define LLMC_LM_HEAD_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/base/sizes.h"
#include "llmc/layers/linear.cuh"
#include "llmc/ops/cross_entropy.cuh"
#include "llmc/parallel/tensor_parallel.cuh"

typedef struct {
    const floatX* hidden;
    Weight weight;
    const int* targets;
    floatX* logits;        // (chunk, Vp), which gradients overwrite
    int N, V;              // tokens; the whole vocabulary
    int chunk;             // tokens that have logits in memory
    float softcap, z_loss; // 0: none (cross_entropy.h)
    LinearGpu* linear;
    TensorParallelGpu tensor; // ranks that cut the vocabulary
    void* sums;               // (t, chunk) CrossEntropySum of all slices, or CrossEntropyTop
    floatX* all;              // (2, tokens, whole vocabulary), for lm_head_all_logits
} LmHeadGpu;

// Returns the head on lnf, given any layer in the pass. Gathers lnf (N, C). Collective.
static inline LmHeadGpu lm_head_of(const LayerPassGpu* layer, int chunk, float z_loss) {
    const ModelActivations* a = &layer->a;
    const ModelConfig cfg = layer->cfg;
    const floatX* hidden = tensor_gather(&layer->tensor, 0, a->lnf);
    return {hidden,
            layer->weights.head,
            layer->pass->targets,
            a->logits,
            pass_tokens(layer->pass),
            cfg.V,
            chunk,
            cfg.softcap,
            z_loss,
            layer->linear,
            layer->tensor,
            a->word_rows,
            a->all_logits};
}

// Sets the logits (count, Vp) of the tokens `first`, first + 1, ...: at most a chunk. With
// --quantize a few at a time, since the matrix in floatX would take more memory than its blocks
// save; an adapter has that memory (linear_gpu_open).
static inline void lm_head_logits(const LmHeadGpu* head, int first, int count) {
    const Weight* weight = &head->weight;
    const int is_few = head->linear->is_quantized && !head->linear->adapter.h,
              most = is_few ? QUANTIZED_ROWS : count;
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

static inline CrossEntropy lm_head_chunk(const LmHeadGpu* head, int first) {
    return CrossEntropy{int_min(head->chunk, head->N - first), head->V, head->weight.OC, head->softcap,
                        head->z_loss};
}

// ---- a cut vocabulary ----

// Returns the first vocabulary row of this rank's slice, and its chunk: the rows that are not
// padding.
static inline int lm_head_first(const LmHeadGpu* head) { return head->tensor.cut.rank * head->weight.OC; }

static inline CrossEntropy lm_head_own_chunk(const LmHeadGpu* head, int first) {
    CrossEntropy chunk = lm_head_chunk(head, first);
    chunk.V = int_max(0, int_min(head->V - lm_head_first(head), head->weight.OC));
    return chunk;
}

// Computes this rank's logits of a chunk of tokens from `first` on, and sets the losses from the
// numbers of all slices. The numbers of whole rows then replace the first slice's.
static inline void lm_head_sums(float* losses, const LmHeadGpu* head, int first) {
    const TensorParallelGpu* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_own_chunk(head, first);
    CrossEntropySum* sums = (CrossEntropySum*)head->sums;
    lm_head_logits(head, first, chunk.N);
    cross_entropy_slice(sums + (size_t)tp->cut.rank * chunk.N, (const floatX*)head->logits,
                        head->targets + first, lm_head_first(head), chunk, tp->gpu);
    tensor_gather_all(tp, sums, (size_t)chunk.N * sizeof(CrossEntropySum));
    cross_entropy_combine(losses + first, sums, sums, head->targets + first, tp->cut.ranks, chunk.N, tp->gpu);
}

// Sets is_top of a chunk of tokens from `first` on, whose logits lm_head_sums has set.
static inline void lm_head_tops_(int* is_top, const LmHeadGpu* head, int first) {
    const TensorParallelGpu* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_own_chunk(head, first);
    CrossEntropyTop* tops = (CrossEntropyTop*)head->sums;
    cross_entropy_slice_top(tops + (size_t)tp->cut.rank * chunk.N, (const floatX*)head->logits,
                            lm_head_first(head), chunk, tp->gpu);
    tensor_gather_all(tp, tops, (size_t)chunk.N * sizeof(CrossEntropyTop));
    cross_entropy_combine_top(is_top + first, tops, head->targets + first, tp->cut.ranks, chunk.N, tp->gpu);
}

// ---- losses and gradients ----

// Sets the losses, without gradients; and is_top, unless NULL: whether each target was the most
// likely token.
static inline void lm_head_losses(float* losses, int* is_top, const LmHeadGpu* head) {
    const Gpu* gpu = head->linear->gpu;
    const int is_cut = tensor_is_cut(head->tensor.cut);
    for (int n = 0; n < head->N; n += head->chunk) {
        const CrossEntropy chunk = lm_head_chunk(head, n);
        if (is_cut) {
            lm_head_sums(losses, head, n);
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
static inline void lm_head_dlogits_(float* losses, const LmHeadGpu* head, int first, float dloss) {
    const Gpu* gpu = head->linear->gpu;
    const int* targets = head->targets + first;
    if (tensor_is_cut(head->tensor.cut)) {
        lm_head_sums(losses, head, first);
        cross_entropy_slice_backward(head->logits, (const CrossEntropySum*)head->sums, targets,
                                     lm_head_first(head), dloss, lm_head_own_chunk(head, first), gpu);
    } else {
        const CrossEntropy chunk = lm_head_chunk(head, first);
        lm_head_logits(head, first, chunk.N);
        cross_entropy_backward(losses + first, head->logits, targets, dloss, chunk, gpu);
    }
}

// Sets the rows of a chunk of tokens from `first` on of this rank's part of dhidden, from the
// gradients of their logits, and sets or adds to dweight.
static inline void lm_head_backward(floatX* dhidden, Gradient dweight, const LmHeadGpu* head, int first,
                                    GradientMode mode) {
    const size_t at = (size_t)first * head->weight.C;
    linear_backward(tensor_part(&head->tensor, dhidden) + at, {dweight, first == 0 ? mode : GRADIENT_ADD},
                    head->logits, head->hidden + at, &head->weight, lm_head_chunk(head, first).N,
                    head->linear);
}

// Sets the losses and dhidden, and sets or adds to dweight, unless it has no data, as `mode`
// says. dloss is the gradient of the loss of each token. Collective.
static inline void lm_head_gradients(float* losses, floatX* dhidden, Gradient dweight, const LmHeadGpu* head,
                                     float dloss, GradientMode mode) {
    for (int n = 0; n < head->N; n += head->chunk) {
        lm_head_dlogits_(losses, head, n, dloss);
        lm_head_backward(dhidden, dweight, head, n, mode);
    }
    tensor_sum(&head->tensor, dhidden, NULL, NULL);
}

#endif
