/*
mixer_config.h -- what a block has in the place of attention in layers of another kind, the gated
delta rule or a short convolution: the contract of mixer.h and mixer.cuh, and what both know of it.

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
#ifndef LLMC_MIXER_CONFIG_H
#define LLMC_MIXER_CONFIG_H

#include "llmc/layers/pass.h"
#include "llmc/model/config.h"
#include "llmc/ops/delta_rule.h"

// Returns the mixer of layer l; MIXER_NONE: it has attention.
static inline MixerKind mixer_config_kind(ModelConfig cfg, int l) {
    return model_layer_has(cfg, LAYERS_MIXED, l) ? model_mixer(cfg) : MIXER_NONE;
}

// Returns the sizes of the delta rule.
static inline DeltaSizes mixer_config_sizes(ModelConfig cfg, int B, int T) {
    const ModelMixer m = cfg.mixer;
    const DeltaSizes sizes = {B, T, m.key_heads, m.value_heads, m.key_size, m.value_size};
    return sizes;
}

// Return what a layer, whose activations are `a`, keeps of the sequence of a pass and those after
// it: the last inputs of the convolution, and states; or NULL.
static inline float* mixer_config_inputs(const ModelActivations* a, ModelConfig cfg, const Pass* pass) {
    const size_t size = (size_t)(cfg.mixer.taps - 1) * (size_t)model_mixer_channels(cfg);
    return a->mix_inputs ? a->mix_inputs + (size_t)pass->sequence * size : NULL;
}
static inline float* mixer_config_state(const ModelActivations* a, ModelConfig cfg, const Pass* pass) {
    const size_t size = delta_rule_state_size(mixer_config_sizes(cfg, 1, 1));
    return a->mix_state ? a->mix_state + (size_t)pass->sequence * size : NULL;
}

#endif
