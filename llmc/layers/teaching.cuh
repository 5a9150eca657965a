/*
teaching.cuh -- teaching.h on the GPU: a head that also learns from a teacher's.
*/
#ifndef LLMC_TEACHING_CUH
#define LLMC_TEACHING_CUH

#include "llmc/layers/lm_head.cuh"
#include "llmc/ops/distill.cuh"

typedef struct {
    Distill how;
    LmHeadGpu teacher;  // after its forward pass
    float* divergence;  // (N) result
    DistillSlice* sums; // (t, chunk) sums of all slices; of a whole vocabulary unused
} TeachingGpu;

// Opens it for N tokens, with logits of one chunk at a time.
static inline void teaching_open(TeachingGpu* t, Memory* memory, Distill how, ModelConfig cfg, size_t N,
                                 size_t chunk) {
    t->how = how;
    t->divergence = (float*)memory_take(memory, "divergences", MEMORY_DEVICE, N * sizeof(float));
    if (model_is_cut(cfg)) {
        t->sums = (DistillSlice*)memory_take(memory, "divergences", MEMORY_DEVICE,
                                             (size_t)cfg.part.tensor_ranks * chunk * sizeof(DistillSlice));
    }
}

// Returns the tokens of a chunk from `first` on; `of` has the sizes of the chunk, or of its slice.
static inline DistillTokensGpu teaching_tokens_(const float* losses, const TeachingGpu* t,
                                                const LmHeadGpu* head, int first, float dloss,
                                                CrossEntropy of) {
    return {head->targets + first, losses + first, (const CrossEntropySum*)head->sums, dloss, of, t->how};
}

static inline DistillTeacherGpu<floatX> teaching_teacher_(const TeachingGpu* t) {
    return {t->teacher.logits, t->teacher.weight.OC, t->teacher.softcap};
}

// Turns this rank's logits of a chunk, whose losses are known, into their gradients.
static inline void teaching_cut_dlogits_(const float* losses, const TeachingGpu* t, const LmHeadGpu* head,
                                         int first, float dloss) {
    const TensorParallelGpu* tp = &head->tensor;
    const CrossEntropy chunk = lm_head_chunk(head, first);
    const DistillTeacherGpu<floatX> teacher = teaching_teacher_(t);
    const DistillTokensGpu all = teaching_tokens_(losses, t, head, first, dloss, chunk),
                           own = teaching_tokens_(losses, t, head, first, dloss,
                                                  lm_head_own_chunk(head, first));
    distill_slice(t->sums + (size_t)tp->cut.rank * chunk.N, (const floatX*)head->logits, teacher, own,
                  tp->gpu);
    tensor_gather_all(tp, t->sums, (size_t)chunk.N * sizeof(DistillSlice));
    distill_combine(t->divergence + first, t->sums, tp->cut.ranks, all, tp->gpu);
    distill_slice_backward(head->logits, teacher, (const DistillSlice*)t->sums, lm_head_first(head), own,
                           tp->gpu);
}

// Sets the losses and divergences of a chunk of tokens from `first` on, and turns its logits into
// their gradients.
static inline void teaching_dlogits_(float* losses, const TeachingGpu* t, const LmHeadGpu* head, int first,
                                     float dloss) {
    const CrossEntropy chunk = lm_head_chunk(head, first);
    if (tensor_is_cut(head->tensor.cut)) {
        lm_head_sums(losses, head, first);
        lm_head_logits(&t->teacher, first, chunk.N);
        teaching_cut_dlogits_(losses, t, head, first, dloss);
    } else {
        lm_head_logits(head, first, chunk.N);
        lm_head_logits(&t->teacher, first, chunk.N);
        distill_logits(losses + first, t->divergence + first, head->logits, teaching_teacher_(t),
                       teaching_tokens_(losses, t, head, first, dloss, chunk), head->linear->gpu);
    }
}

// Sets the losses, divergences and dhidden, and sets or adds to dweight, unless it has no data, as
// `mode` says. Collective.
static inline void teaching_gradients(float* losses, floatX* dhidden, Gradient dweight, const TeachingGpu* t,
                                      LmHeadGpu head, float dloss, GradientMode mode) {
    head.chunk = int_min(head.chunk, t->teacher.chunk);
    for (int n = 0; n < head.N; n += head.chunk) {
        teaching_dlogits_(losses, t, &head, n, dloss);
        lm_head_backward(dhidden, dweight, &head, n, mode);
    }
    tensor_sum(&head.tensor, dhidden, NULL, NULL);
}

// Adds the divergences of N tokens; without a teacher there are none.
static inline void teaching_add(WideSum* sum, const TeachingGpu* t, int N) {
    if (t->divergence) {
        sum_divergences(sum, t->divergence, N, t->teacher.linear->gpu);
    }
}

#endif
