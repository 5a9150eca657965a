/*
teaching.h -- a head that also learns from a teacher's, another model that has read the same tokens
(distill.h), on the CPU.

    teaching_gradients_cpu    losses, dhidden, dweight of the head, as lm_head_gradients_cpu does it
                              without a teacher; and the divergence of each token

The logits of both have a chunk of memory of their own. If tensor ranks cut the vocabulary, both
heads have the same rows of it.
*/
#ifndef LLMC_TEACHING_H
#define LLMC_TEACHING_H

#include "llmc/base/memory.h"
#include "llmc/base/wide_sum.h"
#include "llmc/layers/lm_head.h"
#include "llmc/ops/distill.h"

typedef struct {
    Distill how;
    LmHead teacher;     // after its forward pass
    float* divergence;  // (N) result
    DistillSlice* sums; // (t, chunk) sums of all slices; of a whole vocabulary unused
} Teaching;

// Opens it for N tokens, with logits of one chunk at a time.
static inline void teaching_open(Teaching* t, Memory* memory, Distill how, ModelConfig cfg, size_t N,
                                 size_t chunk) {
    t->how = how;
    t->divergence = (float*)memory_take(memory, "divergences", MEMORY_DEVICE, N * sizeof(float));
    if (model_is_cut(cfg)) {
        t->sums = (DistillSlice*)memory_take(memory, "divergences", MEMORY_DEVICE,
                                             (size_t)cfg.part.tensor_ranks * chunk * sizeof(DistillSlice));
    }
}

// Turns this rank's logits of a chunk, whose losses are known, into their gradients.
static inline void teaching_cut_dlogits_(const float* losses, const Teaching* t, const LmHead* head,
                                         int first, float dloss) {
    const TensorParallel* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_chunk(head, first), own = lm_head_own_chunk(head, first);
    const DistillSlices slices = {tp->cut.ranks, head->rows, t->sums, losses + first, head->targets + first};
    const DistillTeacher teacher = {t->teacher.logits, t->teacher.weight.OC, t->teacher.softcap};
    distill_slice_cpu(&slices, tp->cut.rank, head->logits, teacher, own, t->how);
    tensor_gather_all_cpu(tp, t->sums, (size_t)chunk.N * sizeof(DistillSlice) / sizeof(float));
    distill_combine_cpu(t->divergence + first, &slices, chunk, t->how);
    distill_slice_backward_cpu(&slices, head->logits, teacher, lm_head_first(head), dloss, own, t->how);
}

// Sets the losses and divergences of a chunk of tokens from `first` on, and turns its logits into
// their gradients.
static inline void teaching_dlogits_(float* losses, const Teaching* t, const LmHead* head, int first,
                                     float dloss) {
    const LmHead* teacher = &t->teacher;
    const CrossEntropy chunk = lm_head_chunk(head, first);
    if (tensor_is_cut(head->tensor.cut)) {
        lm_head_keep(losses, NULL, head, first, cross_entropy_slice_cpu);
        lm_head_logits_cpu(teacher, first, chunk.N);
        teaching_cut_dlogits_(losses, t, head, first, dloss);
    } else {
        lm_head_logits_cpu(head, first, chunk.N);
        lm_head_logits_cpu(teacher, first, chunk.N);
        distill_logits_cpu(losses + first, t->divergence + first, head->logits,
                           (DistillTeacher){teacher->logits, teacher->weight.OC, teacher->softcap},
                           (DistillTokens){head->targets + first, dloss, chunk, t->how});
    }
}

// Sets the losses, divergences and dhidden, and sets or adds to dweight, unless NULL, as `mode`
// says. Collective.
static inline void teaching_gradients_cpu(float* losses, float* dhidden, float* dweight, const Teaching* t,
                                          LmHead head, float dloss, GradientMode mode) {
    head.chunk = int_min(head.chunk, t->teacher.chunk);
    for (int n = 0; n < head.N; n += head.chunk) {
        teaching_dlogits_(losses, t, &head, n, dloss);
        lm_head_backward(dhidden, dweight, &head, n, mode);
    }
    tensor_sum_cpu(&head.tensor, dhidden, NULL);
}

// Adds the divergences of N tokens; without a teacher there are none.
static inline void teaching_add_cpu(WideSum* sum, const Teaching* t, int N) {
    for (int n = 0; t->divergence && n < N; n++) {
        wide_sum_add(sum, t->divergence[n]);
    }
}

#endif
