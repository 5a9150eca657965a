/*
mixer.h -- a mixer (mixer_config.h) on the CPU, with the matmuls of linear.h.
*/
#ifndef LLMC_MIXER_H
#define LLMC_MIXER_H

#include "llmc/layers/linear.h"
#include "llmc/layers/mixer_config.h"
#include "llmc/ops/delta_rule.h"
#include "llmc/ops/gated_norm.h"
#include "llmc/ops/short_conv.h"

// The mixer of a layer; without one its kind is MIXER_NONE.
typedef struct {
    MixerKind kind;
    LayerPass layer;
    ShortConv conv;
    DeltaPass delta;
    GatedNorm norm;
    float* inputs; // kept for the next token of each sequence; or NULL
    DeltaScratch* scratch;
} Mixer;

// Opens scratch for passes of up to B sequences of T tokens; T = 0: without a backward pass.
static inline void mixer_open(DeltaScratch* scratch, Memory* memory, ModelConfig cfg, int B, int T) {
    if (mixer_parts(model_mixer(cfg)).has_heads) {
        delta_rule_open(scratch, memory, mixer_config_sizes(cfg, B, T));
    }
}

static inline Mixer mixer_of(const LayerPass* layer, DeltaScratch* scratch) {
    const ModelConfig cfg = layer->cfg;
    const ModelMixer m = cfg.mixer;
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const Pass* pass = layer->pass;
    const MixerKind kind = mixer_config_kind(cfg, layer->l);
    const DeltaSizes sizes = mixer_config_sizes(cfg, pass->B, pass->T);
    const ShortConv conv = {mixer_parts(kind).conv, pass->B,     pass->T, model_mixer_channels(cfg), m.taps,
                            pass->starts,           p->mixconvw, NULL};
    const DeltaPass delta = {sizes,       pass->starts, a->mixconv, a->mixba,
                             p->mixdecay, p->mixstep,   a->mixo,    mixer_config_state(a, cfg, pass)};
    const GatedNorm norm = {
        model_norm_eps(cfg), a->mixz, p->mixnormw, a->mix_rstd, pass_tokens(pass) * m.value_heads,
        m.value_size};
    return (Mixer){kind, *layer, conv, delta, norm, mixer_config_inputs(a, cfg, pass), scratch};
}

// Sets `out` to the convolution of mix, and what the next token needs.
static inline void mixer_convolve_(float* out, const Mixer* m) {
    const ModelActivations* a = &m->layer.a;
    if (pass_is_step(m->layer.pass)) {
        short_conv_step_cpu(out, m->inputs, a->mix, &m->conv);
        return;
    }
    short_conv_forward_cpu(out, a->mix, &m->conv);
    if (m->inputs) {
        short_conv_store_cpu(m->inputs, a->mix, &m->conv);
    }
}

// Sets y of the delta rule.
static inline void mixer_delta_forward_(const Mixer* m, const float* inp) {
    const LayerPass* layer = &m->layer;
    const ModelActivations* a = &layer->a;
    linear_forward_cpu(a->mixz, inp, &layer->weights.mixz, pass_tokens(layer->pass), layer->linear);
    linear_forward_cpu(a->mixba, inp, &layer->weights.mixba, pass_tokens(layer->pass), layer->linear);
    mixer_convolve_(a->mixconv, m);
    if (pass_is_step(layer->pass)) {
        delta_rule_step_cpu(&m->delta);
    } else {
        delta_rule_forward_cpu(&m->delta, m->scratch);
    }
    gated_norm_forward_cpu(a->mixy, a->mixo, &m->norm);
}

// Sets out (N, C).
static inline void mixer_forward_cpu(float* out, const Mixer* m, const float* inp) {
    const LayerPass* layer = &m->layer;
    const int N = pass_tokens(layer->pass);
    linear_forward_cpu(layer->a.mix, inp, &layer->weights.mix, N, layer->linear);
    switch (m->kind) {
    case MIXER_NONE:
        break;
    case MIXER_DELTA:
        mixer_delta_forward_(m, inp);
        break;
    case MIXER_CONV:
        mixer_convolve_(layer->a.mixy, m);
        break;
    }
    linear_forward_cpu(out, layer->a.mixy, &layer->weights.mixout, N, layer->linear);
}

// Sets branch from dout, the gradient of the convolution's output.
static inline void mixer_convolve_backward_(const Mixer* m, const ModelParameters* d, GradientMode mode,
                                            const float* dout, const float* inp) {
    const LayerPass* layer = &m->layer;
    const ModelActivations* a = &layer->a;
    short_conv_backward_cpu(a->dmix, d->mixconvw, NULL, dout, a->mix, &m->conv, mode);
    linear_backward_cpu(a->branch, (LinearGradients){d->mixw, NULL, mode}, a->dmix, inp, &layer->weights.mix,
                        pass_tokens(layer->pass), layer->linear);
}

// Adds the gradient of inp through a linear layer beside the convolution to branch.
static inline void mixer_linear_backward_(const Mixer* m, LinearGradients d, const float* dout,
                                          const float* inp, const Weight* weight) {
    const ModelActivations* a = &m->layer.a;
    const int N = pass_tokens(m->layer.pass);
    linear_backward_cpu(a->dpart, d, dout, inp, weight, N, m->layer.linear);
    residual_forward_cpu(a->branch, a->branch, a->dpart, (size_t)N * (size_t)weight->C);
}

// Sets branch from dmixy, which becomes the gradient of o.
static inline void mixer_delta_backward_(const Mixer* m, const ModelParameters* d, GradientMode mode,
                                         const float* inp) {
    const ModelActivations* a = &m->layer.a;
    const LayerWeights* w = &m->layer.weights;
    const DeltaGradients gradients = {a->dmixy, a->dmixconv, a->dmixba, d->mixdecay, d->mixstep, mode};
    gated_norm_backward_cpu(a->dmixy, a->dmixz, d->mixnormw, a->dmixy, a->mixo, &m->norm, mode);
    delta_rule_backward_cpu(&gradients, &m->delta, m->scratch);
    mixer_convolve_backward_(m, d, mode, a->dmixconv, inp);
    mixer_linear_backward_(m, (LinearGradients){d->mixzw, NULL, mode}, a->dmixz, inp, &w->mixz);
    mixer_linear_backward_(m, (LinearGradients){d->mixbaw, NULL, mode}, a->dmixba, inp, &w->mixba);
}

// Sets branch (N, C), the gradient of inp, and sets or adds to `d`, the gradients of the layer's
// parameters, or NULL, as `mode` says. inp (N, C) as in the forward pass.
static inline void mixer_backward_cpu(const Mixer* m, const ModelParameters* d, GradientMode mode,
                                      const float* dout, const float* inp) {
    const LayerPass* layer = &m->layer;
    const ModelActivations* a = &layer->a;
    linear_backward_cpu(a->dmixy, (LinearGradients){d->mixoutw, NULL, mode}, dout, a->mixy,
                        &layer->weights.mixout, pass_tokens(layer->pass), layer->linear);
    switch (m->kind) {
    case MIXER_NONE:
        break;
    case MIXER_DELTA:
        mixer_delta_backward_(m, d, mode, inp);
        break;
    case MIXER_CONV:
        mixer_convolve_backward_(m, d, mode, a->dmixy, inp);
        break;
    }
}

#endif
