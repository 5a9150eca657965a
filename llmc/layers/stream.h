/*
stream.h -- what a block reads of the residual stream, on the CPU: the stream itself, or with scales
(stream_scale.h) a sum of it and of the embedding.

    out (R, C) = inp, or a inp + b first        inp, first   (R, C)

All layers share the memory of the sum: the backward pass computes it again.
*/
#ifndef LLMC_STREAM_H
#define LLMC_STREAM_H

#include "llmc/layers/linear.h"
#include "llmc/ops/stream_scale.h"

typedef struct {
    StreamScale scale; // no scales: out is inp
    float* out;
} Stream;

// Returns the stream of a layer whose block gets inp.
static inline Stream stream_of(const LayerPass* layer, float* inp) {
    const ModelActivations* a = &layer->a;
    const size_t n = (size_t)tensor_rows(layer->tensor.cut).count * (size_t)layer->cfg.C;
    return (Stream){{inp, a->encoded, layer->p.scales, n}, layer->p.scales ? a->scaled : inp};
}

static inline int stream_has_scales(const Stream* s) { return s->scale.scales != NULL; }

// Sets out.
static inline void stream_enter_cpu(const Stream* s) {
    if (stream_has_scales(s)) {
        stream_scale_forward_cpu(s->out, &s->scale);
    }
}

// Turns dresidual of `a`, the gradient of out, into that of inp. Adds to that of the embedding, or
// sets it in the last layer, and sets or adds to dscales, or NULL, as `mode` says.
static inline void stream_enter_backward_cpu(const Stream* s, float* dscales, const ModelActivations* a,
                                             int is_last, GradientMode mode) {
    if (stream_has_scales(s)) {
        stream_scale_backward_cpu(a->dresidual, a->dfirst, dscales, a->scale_parts, &s->scale,
                                  is_last ? GRADIENT_SET : GRADIENT_ADD, mode);
    }
}

// Adds the gradient that all blocks have of the embedding, (R, C), to dresidual of `a`.
static inline void stream_leave_backward_cpu(const ModelActivations* a, size_t n) {
    if (a->dfirst) {
        residual_forward_cpu(a->dresidual, a->dresidual, a->dfirst, n);
    }
}

#endif
