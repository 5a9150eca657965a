/*
stream.cuh -- stream.h on the GPU: what a block reads of the residual stream.
*/
#ifndef LLMC_STREAM_CUH
#define LLMC_STREAM_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/linear.cuh"
#include "llmc/ops/norm.cuh"
#include "llmc/ops/stream_scale.cuh"

typedef struct {
    StreamScaleGpu<floatX> scale; // no scales: out is inp
    floatX* out;
    const Gpu* gpu;
} StreamGpu;

// Returns the stream of a layer whose block gets inp.
static inline StreamGpu stream_of(const LayerPassGpu* layer, floatX* inp) {
    const ModelActivations* a = &layer->a;
    const size_t n = (size_t)tensor_rows(layer->tensor.cut).count * (size_t)layer->cfg.C;
    return {{inp, a->encoded, layer->p.scales, n}, layer->p.scales ? a->scaled : inp, layer->linear->gpu};
}

static inline int stream_has_scales(const StreamGpu* s) { return s->scale.scales != NULL; }

// Sets out.
static inline void stream_enter(const StreamGpu* s) {
    if (stream_has_scales(s) && s->scale.n > 0) {
        stream_scale_forward(s->out, s->scale, s->gpu);
    }
}

// Turns dresidual of `a` into the gradient of inp, and sets or adds to others, as in stream.h.
static inline void stream_enter_backward(const StreamGpu* s, Gradient dscales, const ModelActivations* a,
                                         int is_last, GradientMode mode) {
    if (stream_has_scales(s)) {
        stream_scale_backward(a->dresidual, a->dfirst, dscales, a->scale_parts, s->scale,
                              is_last ? GRADIENT_SET : GRADIENT_ADD, mode, s->gpu);
    }
}

static inline void stream_leave_backward(const ModelActivations* a, size_t n, const Gpu* gpu) {
    if (a->dfirst && n > 0) {
        residual_sum(a->dresidual, (const floatX*)a->dresidual, (const floatX*)a->dfirst, 1, n, gpu);
    }
}

#endif
