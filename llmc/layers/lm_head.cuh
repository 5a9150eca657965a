/*
lm_head.cuh -- lm_head.h on the GPU: from the last hidden state to losses and gradients.

    logits (N, Vp) = hidden weight^T          losses and dlogits as cross_entropy.h says

    hidden, dhidden   (N, C)      weight, dweight   (Vp, C)      targets, losses, is_top   (N)

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

typedef struct LmHeadGpu LmHeadGpu;

// A teacher on the tokens of a head: another model, after its forward pass, or its kept tokens.
typedef struct {
    Distill how;
    const LmHeadGpu* head; // of that model; NULL: kept tokens
    KeptTokens kept;       // (N, k)
    float* divergence;     // (N) result
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

// Returns the tokens that have logits in memory, also those of a teacher.
static inline int lm_head_step_(const LmHeadGpu* head) {
    const TeachingGpu* t = head->teaching;
    return t && t->head ? int_min(head->chunk, t->head->chunk) : head->chunk;
}

static inline CrossEntropy lm_head_chunk_(const LmHeadGpu* head, int first) {
    return CrossEntropy{int_min(lm_head_step_(head), head->N - first), head->V, head->weight.OC,
                        head->softcap, head->z_loss};
}

// Sets the losses, without gradients; and is_top, unless NULL: whether each target was the most
// likely token.
static inline void lm_head_losses(float* losses, int* is_top, const LmHeadGpu* head) {
    const Gpu* gpu = head->linear->gpu;
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
    } else if (t->head) {
        lm_head_logits(t->head, first, chunk.N);
        distill_logits(losses + first, t->divergence + first, head->logits, (const floatX*)t->head->logits,
                       t->head->weight.OC, t->head->softcap, targets, dloss, chunk, t->how, gpu);
    } else {
        distill_kept(losses + first, t->divergence + first, head->logits, kept_tokens_from(t->kept, first),
                     targets, dloss, chunk, t->how, gpu);
    }
}

// Sets the losses and dhidden, and sets or adds to dweight, unless it has no data, as `mode`
// says. dloss is the gradient of the loss of each token.
static inline void lm_head_gradients(float* losses, floatX* dhidden, Gradient dweight, const LmHeadGpu* head,
                                     float dloss, GradientMode mode) {
    const Weight* weight = &head->weight;
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
