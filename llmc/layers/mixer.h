/*
mixer.h -- what a block has in the place of attention in layers of another kind, on the CPU: the
gated delta rule, or a short convolution.

    MIXER_DELTA   mix (N, R)          = inp in^T     R = 2 Hk dk + Hv dv: of queries, keys, values
                  conv (N, R)         = short convolution of mix, with SiLU (short_conv.h)
                  z (N, Hv dv), ba (N, 2 Hv) = inp z^T, inp ba^T
                  o, y (N, Hv dv)     = delta rule of conv and ba (delta_rule.h); its norm, gated by
                                        z (gated_norm.h)
    MIXER_CONV    mix (N, 3C)         = inp in^T
                  y (N, C)            = gated short convolution of mix

    out (N, C) = y out^T

A document of a batch does not see the one before it. With a cache, the last inputs of the
convolution and the state of the delta rule are kept for each sequence, and a step of decoding reads
one more token.
*/
#ifndef LLMC_MIXER_H
#define LLMC_MIXER_H

#include "llmc/layers/linear.h"
#include "llmc/ops/delta_rule.h"
#include "llmc/ops/gated_norm.h"
#include "llmc/ops/short_conv.h"

typedef struct {
    MixerKind kind;
    Weight in, z, ba, out;
    ShortConv conv;
    DeltaSizes sizes;
    GatedNorm norm;
    const float *A_log, *dt_bias;
    float *mix, *conv_out, *ba_out, *o, *y; // z's is norm.gate
    float* z_out;
    float *inputs, *state; // kept for the next token of each sequence, of this layer; or NULL
    int is_step;
    DeltaScratch* scratch;
    Linear* linear;
} Mixer;

// Returns the sizes of the delta rule.
static inline DeltaSizes mixer_sizes(ModelConfig cfg, int B, int T) {
    const ModelMixer m = cfg.mixer;
    return (DeltaSizes){B, T, m.key_heads, m.value_heads, m.key_size, m.value_size};
}

// Opens scratch for passes of up to B sequences of T tokens; T = 0: without a backward pass.
static inline void mixer_open(DeltaScratch* scratch, Memory* memory, ModelConfig cfg, int B, int T) {
    if (model_mixer(cfg) == MIXER_DELTA) {
        delta_rule_open(scratch, memory, mixer_sizes(cfg, B, T));
    }
}

// Returns the mixer of a layer; without one its kind is MIXER_NONE.
static inline Mixer mixer_of(const LayerPass* layer, DeltaScratch* scratch) {
    const ModelConfig cfg = layer->cfg;
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const LayerWeights* w = &layer->weights;
    const Pass* pass = layer->pass;
    const int is_delta = model_mixer(cfg) == MIXER_DELTA, heads = cfg.mixer.value_heads,
              channels = model_mixer_channels(cfg);
    const ShortConv conv = {is_delta ? SHORT_CONV_SILU : SHORT_CONV_GATED,
                            pass->B,
                            pass->T,
                            channels,
                            cfg.mixer.taps,
                            pass->starts,
                            p->mixconvw,
                            NULL};
    const DeltaSizes sizes = mixer_sizes(cfg, pass->B, pass->T);
    const size_t inputs = (size_t)(cfg.mixer.taps - 1) * (size_t)channels,
                 state = is_delta ? delta_rule_state_size(sizes) : 0, sequence = (size_t)pass->sequence;
    return (Mixer){.kind = model_layer_has(cfg, LAYERS_MIXED, layer->l) ? model_mixer(cfg) : MIXER_NONE,
                   .in = w->mix,
                   .z = w->mixz,
                   .ba = w->mixba,
                   .out = w->mixout,
                   .conv = conv,
                   .sizes = sizes,
                   .norm = {model_norm_eps(cfg), a->mixz, p->mixnormw, a->mix_rstd, pass_tokens(pass) * heads,
                            cfg.mixer.value_size},
                   .A_log = p->mixdecay,
                   .dt_bias = p->mixstep,
                   .mix = a->mix,
                   .conv_out = a->mixconv,
                   .ba_out = a->mixba,
                   .o = a->mixo,
                   .y = a->mixy,
                   .z_out = a->mixz,
                   .inputs = a->mix_inputs ? a->mix_inputs + sequence * inputs : NULL,
                   .state = a->mix_state ? a->mix_state + sequence * state : NULL,
                   .is_step = pass_is_step(pass),
                   .scratch = scratch,
                   .linear = layer->linear};
}

static inline int mixer_tokens_(const Mixer* m) { return m->conv.B * m->conv.T; }

// Sets `out` to the convolution of mix, and what the next token needs.
static inline void mixer_convolve_(float* out, const Mixer* m) {
    if (m->is_step) {
        short_conv_step_cpu(out, m->inputs, m->mix, &m->conv);
        return;
    }
    short_conv_forward_cpu(out, m->mix, &m->conv);
    if (m->inputs) {
        short_conv_store_cpu(m->inputs, m->mix, &m->conv);
    }
}

static inline DeltaPass mixer_delta_(const Mixer* m) {
    return (DeltaPass){m->sizes, m->conv.starts, m->conv_out, m->ba_out,
                       m->A_log, m->dt_bias,     m->o,        m->state};
}

// Sets out (N, C).
static inline void mixer_forward_cpu(float* out, const Mixer* m, const float* inp) {
    const int N = mixer_tokens_(m);
    linear_forward_cpu(m->mix, inp, &m->in, N, m->linear);
    if (m->kind == MIXER_DELTA) {
        const DeltaPass delta = mixer_delta_(m);
        linear_forward_cpu(m->z_out, inp, &m->z, N, m->linear);
        linear_forward_cpu(m->ba_out, inp, &m->ba, N, m->linear);
        mixer_convolve_(m->conv_out, m);
        if (m->is_step) {
            delta_rule_step_cpu(&delta);
        } else {
            delta_rule_forward_cpu(&delta, m->scratch);
        }
        gated_norm_forward_cpu(m->y, m->o, &m->norm);
    } else {
        mixer_convolve_(m->y, m);
    }
    linear_forward_cpu(out, m->y, &m->out, N, m->linear);
}

// Gradients of parameters, or NULL, which a backward pass sets or adds to as `mode` says; dinp,
// which it sets; and memory that it uses, of the sizes of the activations.
typedef struct {
    float *dinp, *dinw, *dzw, *dbaw, *dconvw, *dA_log, *ddt_bias, *dnormw, *doutw;
    GradientMode mode;
    float *dmix, *dconv, *dz, *dba, *dy; // dy becomes the gradient of o
    float* part;                         // (N, C)
} MixerGradients;

// Returns the gradients of a layer: `d` has its parameters' gradients, `a` has memory.
static inline MixerGradients mixer_gradients_of(const ModelParameters* d, const ModelActivations* a,
                                                GradientMode mode) {
    return (MixerGradients){.dinp = a->branch,
                            .dinw = d->mixw,
                            .dzw = d->mixzw,
                            .dbaw = d->mixbaw,
                            .dconvw = d->mixconvw,
                            .dA_log = d->mixdecay,
                            .ddt_bias = d->mixstep,
                            .dnormw = d->mixnormw,
                            .doutw = d->mixoutw,
                            .mode = mode,
                            .dmix = a->dmix,
                            .dconv = a->dmixconv,
                            .dz = a->dmixz,
                            .dba = a->dmixba,
                            .dy = a->dmixy,
                            .part = a->dpart};
}

// Sets dmix, dz and dba from dy.
static inline void mixer_delta_backward_(const Mixer* m, const MixerGradients* d) {
    const DeltaPass delta = mixer_delta_(m);
    const DeltaGradients gradients = {d->dy, d->dconv, d->dba, d->dA_log, d->ddt_bias, d->mode};
    gated_norm_backward_cpu(d->dy, d->dz, d->dnormw, d->dy, m->o, &m->norm, d->mode);
    delta_rule_backward_cpu(&gradients, &delta, m->scratch);
    short_conv_backward_cpu(d->dmix, d->dconvw, NULL, d->dconv, m->mix, &m->conv, d->mode);
}

// Sets dinp (N, C) and the gradients of parameters; inp (N, C) as in the forward pass.
static inline void mixer_backward_cpu(const Mixer* m, const MixerGradients* d, const float* dout,
                                      const float* inp) {
    const int N = mixer_tokens_(m);
    const size_t elements = (size_t)N * (size_t)m->in.C;
    linear_backward_cpu(d->dy, (LinearGradients){d->doutw, NULL, d->mode}, dout, m->y, &m->out, N, m->linear);
    if (m->kind == MIXER_DELTA) {
        mixer_delta_backward_(m, d);
    } else {
        short_conv_backward_cpu(d->dmix, d->dconvw, NULL, d->dy, m->mix, &m->conv, d->mode);
    }
    linear_backward_cpu(d->dinp, (LinearGradients){d->dinw, NULL, d->mode}, d->dmix, inp, &m->in, N,
                        m->linear);
    if (m->kind == MIXER_DELTA) {
        linear_backward_cpu(d->part, (LinearGradients){d->dzw, NULL, d->mode}, d->dz, inp, &m->z, N,
                            m->linear);
        residual_forward_cpu(d->dinp, d->dinp, d->part, elements);
        linear_backward_cpu(d->part, (LinearGradients){d->dbaw, NULL, d->mode}, d->dba, inp, &m->ba, N,
                            m->linear);
        residual_forward_cpu(d->dinp, d->dinp, d->part, elements);
    }
}

#endif
