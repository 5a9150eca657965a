/*
mixer.cuh -- a mixer (mixer_config.h) on the GPU: out (N, C) = residual + y out^T.
*/
#ifndef LLMC_MIXER_CUH
#define LLMC_MIXER_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/linear.cuh"
#include "llmc/layers/mixer_config.h"
#include "llmc/ops/delta_step.cuh"
#include "llmc/ops/gated_norm.cuh"
#include "llmc/ops/norm.cuh"
#include "llmc/ops/short_conv.cuh"

typedef struct {
    DeltaScratchGpu<floatX> delta;
    float* partial; // sums of parameters' gradients
} MixerScratchGpu;

// The mixer of a layer; without one its kind is MIXER_NONE.
typedef struct {
    MixerKind kind;
    LayerPassGpu layer;
    ShortConvGpu<floatX> conv;
    DeltaPassGpu<floatX> delta;
    GatedNormGpu<floatX> norm;
    float* inputs; // kept for the next token of each sequence; or NULL
    MixerScratchGpu* scratch;
} MixerGpu;

// Opens scratch for passes of up to B sequences of T tokens, or as many tokens in shorter ones.
static inline void mixer_gpu_open(MixerScratchGpu* scratch, Memory* memory, ModelConfig cfg, int B, int T,
                                  int trains) {
    const ModelMixer m = cfg.mixer;
    const int has_heads = mixer_parts(model_mixer(cfg)).has_heads;
    if (model_mixer(cfg) == MIXER_NONE) {
        return;
    }
    if (has_heads) {
        delta_rule_gpu_open(&scratch->delta, memory, mixer_config_sizes(cfg, B, T), trains);
    }
    if (trains) {
        const size_t conv = short_conv_partial(B * T, model_mixer_channels(cfg), m.taps),
                     norm = has_heads ? gated_norm_partial(B * T * m.value_heads, m.value_size) : 0;
        scratch->partial = (float*)memory_take_unset(memory, "scratch: sums of mixers", MEMORY_DEVICE,
                                                     (conv > norm ? conv : norm) * sizeof(float));
    }
}

static inline MixerGpu mixer_of(const LayerPassGpu* layer, MixerScratchGpu* scratch) {
    const ModelConfig cfg = layer->cfg;
    const ModelMixer m = cfg.mixer;
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const Pass* pass = layer->pass;
    const MixerKind kind = mixer_config_kind(cfg, layer->l);
    const DeltaSizes sizes = mixer_config_sizes(cfg, pass->B, pass->T);
    const ShortConvGpu<floatX> conv = {
        mixer_parts(kind).conv, pass->B,     pass->T, model_mixer_channels(cfg), m.taps,
        pass->starts,           p->mixconvw, NULL};
    const DeltaPassGpu<floatX> delta = {
        sizes,       pass->starts, a->mixconv, a->mixba,
        p->mixdecay, p->mixstep,   a->mixo,    mixer_config_state(a, cfg, pass)};
    const GatedNormGpu<floatX> norm = {
        model_norm_eps(cfg), a->mixz, p->mixnormw, a->mix_rstd, pass_tokens(pass) * m.value_heads,
        m.value_size};
    return {kind, *layer, conv, delta, norm, mixer_config_inputs(a, cfg, pass), scratch};
}

// Sets `out` to the convolution of mix, and what the next token needs.
static inline void mixer_convolve_(floatX* out, const MixerGpu* m) {
    const ModelActivations* a = &m->layer.a;
    const Gpu* gpu = m->layer.linear->gpu;
    if (pass_is_step(m->layer.pass)) {
        short_conv_step(out, m->inputs, (const floatX*)a->mix, &m->conv, gpu);
        return;
    }
    short_conv_forward(out, (const floatX*)a->mix, &m->conv, gpu);
    if (m->inputs) {
        short_conv_store(m->inputs, (const floatX*)a->mix, &m->conv, gpu);
    }
}

// Sets y of the delta rule.
static inline void mixer_delta_forward_(const MixerGpu* m, const floatX* inp) {
    const LayerPassGpu* layer = &m->layer;
    const ModelActivations* a = &layer->a;
    const Gpu* gpu = layer->linear->gpu;
    linear_forward(a->mixz, inp, &layer->weights.mixz, pass_tokens(layer->pass), layer->linear);
    linear_forward(a->mixba, inp, &layer->weights.mixba, pass_tokens(layer->pass), layer->linear);
    mixer_convolve_(a->mixconv, m);
    if (pass_is_step(layer->pass)) {
        delta_rule_step(&m->delta, gpu);
    } else {
        delta_rule_forward(&m->delta, &m->scratch->delta, gpu);
    }
    gated_norm_forward(a->mixy, (const floatX*)a->mixo, &m->norm, gpu);
}

// Sets out, which is not residual. A pass over no tokens calls no library.
static inline void mixer_forward_residual(floatX* out, const floatX* residual, const MixerGpu* m,
                                          const floatX* inp) {
    const LayerPassGpu* layer = &m->layer;
    const int N = pass_tokens(layer->pass);
    if (N == 0) {
        return;
    }
    linear_forward(layer->a.mix, inp, &layer->weights.mix, N, layer->linear);
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
    linear_forward_residual(out, residual, layer->a.mixy, &layer->weights.mixout, N, layer->linear);
}

// Sets branch from dout, the gradient of the convolution's output.
static inline void mixer_convolve_backward_(const MixerGpu* m, const ModelGradients* d, GradientMode mode,
                                            const floatX* dout, const floatX* inp) {
    const LayerPassGpu* layer = &m->layer;
    const ModelActivations* a = &layer->a;
    const ShortConvGradientsGpu dconv = {d->mixconvw, {NULL, d->mixconvw.dtype}, mode, m->scratch->partial};
    short_conv_backward(a->dmix, &dconv, dout, (const floatX*)a->mix, &m->conv, layer->linear->gpu);
    linear_backward(a->branch, {d->mixw, mode}, a->dmix, inp, &layer->weights.mix, pass_tokens(layer->pass),
                    layer->linear);
}

// Adds the gradient of inp through a linear layer beside the convolution to branch.
static inline void mixer_linear_backward_(const MixerGpu* m, LinearGradient d, const floatX* dout,
                                          const floatX* inp, const Weight* weight) {
    const ModelActivations* a = &m->layer.a;
    const int N = pass_tokens(m->layer.pass);
    linear_backward(a->dpart, d, dout, inp, weight, N, m->layer.linear);
    residual_sum(a->branch, (const floatX*)a->branch, (const floatX*)a->dpart, 1,
                 (size_t)N * (size_t)weight->C, m->layer.linear->gpu);
}

// Sets branch from dmixy, which becomes the gradient of o.
static inline void mixer_delta_backward_(const MixerGpu* m, const ModelGradients* d, GradientMode mode,
                                         const floatX* inp) {
    const ModelActivations* a = &m->layer.a;
    const LayerWeights* w = &m->layer.weights;
    const Gpu* gpu = m->layer.linear->gpu;
    const GatedNormGradientsGpu dnorm = {d->mixnormw, mode, m->scratch->partial};
    const DeltaGradientsGpu<floatX> ddelta = {a->dmixy,    a->dmixconv, a->dmixba,
                                              d->mixdecay, d->mixstep,  mode};
    gated_norm_backward(a->dmixy, a->dmixz, &dnorm, (const floatX*)a->dmixy, (const floatX*)a->mixo, &m->norm,
                        gpu);
    delta_rule_backward(&ddelta, &m->delta, &m->scratch->delta, gpu);
    mixer_convolve_backward_(m, d, mode, a->dmixconv, inp);
    mixer_linear_backward_(m, {d->mixzw, mode}, a->dmixz, inp, &w->mixz);
    mixer_linear_backward_(m, {d->mixbaw, mode}, a->dmixba, inp, &w->mixba);
}

// Sets branch (N, C), the gradient of inp, and sets or adds to `d`, the gradients of the layer's
// parameters, without data if frozen, as `mode` says. inp (N, C) as in the forward pass.
static inline void mixer_backward(const MixerGpu* m, const ModelGradients* d, GradientMode mode,
                                  const floatX* dout, const floatX* inp) {
    const LayerPassGpu* layer = &m->layer;
    const ModelActivations* a = &layer->a;
    if (pass_tokens(layer->pass) == 0) {
        return;
    }
    linear_backward(a->dmixy, {d->mixoutw, mode}, dout, a->mixy, &layer->weights.mixout,
                    pass_tokens(layer->pass), layer->linear);
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
