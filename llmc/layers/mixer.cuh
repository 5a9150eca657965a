/*
mixer.cuh -- mixer.h on the GPU: what a block has in the place of attention in layers of another
kind, the gated delta rule, or a short convolution.

    MIXER_DELTA   mix (N, R)          = inp in^T     R = 2 Hk dk + Hv dv: of queries, keys, values
                  conv (N, R)         = short convolution of mix, with SiLU (short_conv.cuh)
                  z (N, Hv dv), ba (N, 2 Hv) = inp z^T, inp ba^T
                  o, y (N, Hv dv)     = delta rule of conv and ba (delta_rule.cuh); its norm, gated
                                        by z (gated_norm.cuh)
    MIXER_CONV    mix (N, 3C)         = inp in^T
                  y (N, C)            = gated short convolution of mix

    out (N, C) = residual + y out^T
*/
#ifndef LLMC_MIXER_CUH
#define LLMC_MIXER_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/layers/linear.cuh"
#include "llmc/ops/delta_step.cuh"
#include "llmc/ops/gated_norm.cuh"
#include "llmc/ops/norm.cuh"
#include "llmc/ops/short_conv.cuh"

typedef struct {
    DeltaScratchGpu<floatX> delta;
    float* partial; // sums of parameters' gradients
} MixerScratchGpu;

typedef struct {
    MixerKind kind;
    Weight in, z, ba, out;
    ShortConvGpu<floatX> conv;
    DeltaSizes sizes;
    GatedNormGpu<floatX> norm;
    const floatX *A_log, *dt_bias;
    floatX *mix, *conv_out, *z_out, *ba_out, *o, *y;
    float *inputs, *state; // kept for the next token of each sequence, of this layer; or NULL
    int is_step;
    MixerScratchGpu* scratch;
    LinearGpu* linear;
} MixerGpu;

// Returns the sizes of the delta rule.
static inline DeltaSizes mixer_sizes(ModelConfig cfg, int B, int T) {
    const ModelMixer m = cfg.mixer;
    return {B, T, m.key_heads, m.value_heads, m.key_size, m.value_size};
}

// Opens scratch for passes of up to B sequences of T tokens, or as many tokens in shorter ones.
static inline void mixer_gpu_open(MixerScratchGpu* scratch, Memory* memory, ModelConfig cfg, int B, int T,
                                  int trains) {
    const ModelMixer m = cfg.mixer;
    const int is_delta = model_mixer(cfg) == MIXER_DELTA, N = B * T;
    const size_t conv = short_conv_partial(N, model_mixer_channels(cfg), m.taps),
                 norm = is_delta ? gated_norm_partial(N * m.value_heads, m.value_size) : 0;
    if (model_mixer(cfg) == MIXER_NONE) {
        return;
    }
    if (is_delta) {
        delta_rule_gpu_open(&scratch->delta, memory, mixer_sizes(cfg, B, T), trains);
    }
    if (trains) {
        scratch->partial = (float*)memory_take_unset(memory, "scratch: sums of mixers", MEMORY_DEVICE,
                                                     (conv > norm ? conv : norm) * sizeof(float));
    }
}

// Returns the mixer of a layer; without one its kind is MIXER_NONE.
static inline MixerGpu mixer_of(const LayerPassGpu* layer, MixerScratchGpu* scratch) {
    const ModelConfig cfg = layer->cfg;
    const ModelParameters* p = &layer->p;
    const ModelActivations* a = &layer->a;
    const LayerWeights* w = &layer->weights;
    const Pass* pass = layer->pass;
    const int is_delta = model_mixer(cfg) == MIXER_DELTA, channels = model_mixer_channels(cfg);
    const size_t inputs = (size_t)(cfg.mixer.taps - 1) * (size_t)channels, sequence = (size_t)pass->sequence;
    MixerGpu m = {};
    if (!model_layer_has(cfg, LAYERS_MIXED, layer->l)) {
        return m;
    }
    m.kind = model_mixer(cfg);
    m.in = w->mix, m.z = w->mixz, m.ba = w->mixba, m.out = w->mixout;
    m.conv = {is_delta ? SHORT_CONV_SILU : SHORT_CONV_GATED,
              pass->B,
              pass->T,
              channels,
              cfg.mixer.taps,
              pass->starts,
              p->mixconvw,
              NULL};
    m.sizes = mixer_sizes(cfg, pass->B, pass->T);
    m.norm = {model_norm_eps(cfg), a->mixz, p->mixnormw, a->mix_rstd, pass_tokens(pass) * m.sizes.Hv,
              m.sizes.dv};
    m.A_log = p->mixdecay, m.dt_bias = p->mixstep;
    m.mix = a->mix, m.conv_out = a->mixconv, m.z_out = a->mixz, m.ba_out = a->mixba;
    m.o = a->mixo, m.y = a->mixy;
    m.inputs = a->mix_inputs ? a->mix_inputs + sequence * inputs : NULL;
    m.state = a->mix_state ? a->mix_state + sequence * delta_rule_state_size(m.sizes) : NULL;
    m.is_step = pass_is_step(pass);
    m.scratch = scratch;
    m.linear = layer->linear;
    return m;
}

static inline int mixer_tokens_(const MixerGpu* m) { return m->conv.B * m->conv.T; }

// Sets `out` to the convolution of mix, and what the next token needs.
static inline void mixer_convolve_(floatX* out, const MixerGpu* m) {
    const Gpu* gpu = m->linear->gpu;
    if (m->is_step) {
        short_conv_step(out, m->inputs, (const floatX*)m->mix, &m->conv, gpu);
        return;
    }
    short_conv_forward(out, (const floatX*)m->mix, &m->conv, gpu);
    if (m->inputs) {
        short_conv_store(m->inputs, (const floatX*)m->mix, &m->conv, gpu);
    }
}

static inline DeltaPassGpu<floatX> mixer_delta_(const MixerGpu* m) {
    return {m->sizes, m->conv.starts, m->conv_out, m->ba_out, m->A_log, m->dt_bias, m->o, m->state};
}

// Sets y from inp (N, C).
static inline void mixer_heads_(const MixerGpu* m, const floatX* inp) {
    const int N = mixer_tokens_(m);
    const Gpu* gpu = m->linear->gpu;
    linear_forward(m->mix, inp, &m->in, N, m->linear);
    if (m->kind != MIXER_DELTA) {
        mixer_convolve_(m->y, m);
        return;
    }
    const DeltaPassGpu<floatX> delta = mixer_delta_(m);
    linear_forward(m->z_out, inp, &m->z, N, m->linear);
    linear_forward(m->ba_out, inp, &m->ba, N, m->linear);
    mixer_convolve_(m->conv_out, m);
    if (m->is_step) {
        delta_rule_step(&delta, gpu);
    } else {
        delta_rule_forward(&delta, &m->scratch->delta, gpu);
    }
    gated_norm_forward(m->y, (const floatX*)m->o, &m->norm, gpu);
}

// Sets out, which is not residual. A pass over no tokens calls no library.
static inline void mixer_forward_residual(floatX* out, const floatX* residual, const MixerGpu* m,
                                          const floatX* inp) {
    const int N = mixer_tokens_(m);
    if (N > 0) {
        mixer_heads_(m, inp);
        linear_forward_residual(out, residual, m->y, &m->out, N, m->linear);
    }
}

// Gradients of parameters, without data if frozen, which a backward pass sets or adds to as `mode`
// says; dinp, which it sets; and memory that it uses, of the sizes of the activations.
typedef struct {
    floatX* dinp;
    Gradient dinw, dzw, dbaw, dconvw, dA_log, ddt_bias, dnormw, doutw;
    GradientMode mode;
    floatX *dmix, *dconv, *dz, *dba, *dy; // dy becomes the gradient of o
    floatX* part;                         // (N, C)
} MixerGradientsGpu;

// Returns the gradients of a layer: `d` has its parameters' gradients, `a` has memory.
static inline MixerGradientsGpu mixer_gradients_of(const ModelGradients* d, const ModelActivations* a,
                                                   GradientMode mode) {
    return {a->branch,  d->mixw, d->mixzw, d->mixbaw,   d->mixconvw, d->mixdecay, d->mixstep, d->mixnormw,
            d->mixoutw, mode,    a->dmix,  a->dmixconv, a->dmixz,    a->dmixba,   a->dmixy,   a->dpart};
}

// Sets dmix from dout, the gradient of the convolution's output.
static inline void mixer_convolve_backward_(const MixerGpu* m, const MixerGradientsGpu* d,
                                            const floatX* dout) {
    const ShortConvGradientsGpu dconv = {d->dconvw, {NULL, d->dconvw.dtype}, d->mode, m->scratch->partial};
    short_conv_backward(d->dmix, &dconv, dout, (const floatX*)m->mix, &m->conv, m->linear->gpu);
}

// Sets dmix, dz and dba from dy.
static inline void mixer_delta_backward_(const MixerGpu* m, const MixerGradientsGpu* d) {
    const Gpu* gpu = m->linear->gpu;
    const DeltaPassGpu<floatX> delta = mixer_delta_(m);
    const GatedNormGradientsGpu dnorm = {d->dnormw, d->mode, m->scratch->partial};
    const DeltaGradientsGpu<floatX> ddelta = {d->dy, d->dconv, d->dba, d->dA_log, d->ddt_bias, d->mode};
    gated_norm_backward(d->dy, d->dz, &dnorm, (const floatX*)d->dy, (const floatX*)m->o, &m->norm, gpu);
    delta_rule_backward(&ddelta, &delta, &m->scratch->delta, gpu);
    mixer_convolve_backward_(m, d, d->dconv);
}

// Sets and adds to the gradient of a layer that reads inp, and adds to dinp.
static inline void mixer_linear_backward_(const MixerGpu* m, const MixerGradientsGpu* d, Gradient dweight,
                                          const Weight* weight, const floatX* dout, const floatX* inp) {
    const int N = mixer_tokens_(m);
    linear_backward(d->part, {dweight, d->mode}, dout, inp, weight, N, m->linear);
    residual_sum(d->dinp, (const floatX*)d->dinp, (const floatX*)d->part, 1, (size_t)N * (size_t)weight->C,
                 m->linear->gpu);
}

// Sets dinp (N, C) and the gradients of parameters; inp (N, C) as in the forward pass.
static inline void mixer_backward(const MixerGpu* m, const MixerGradientsGpu* d, const floatX* dout,
                                  const floatX* inp) {
    const int N = mixer_tokens_(m);
    if (N == 0) {
        return;
    }
    linear_backward(d->dy, {d->doutw, d->mode}, dout, m->y, &m->out, N, m->linear);
    if (m->kind == MIXER_DELTA) {
        mixer_delta_backward_(m, d);
    } else {
        mixer_convolve_backward_(m, d, d->dy);
    }
    linear_backward(d->dinp, {d->dinw, d->mode}, d->dmix, inp, &m->in, N, m->linear);
    if (m->kind == MIXER_DELTA) {
        mixer_linear_backward_(m, d, d->dzw, &m->z, d->dz, inp);
        mixer_linear_backward_(m, d, d->dbaw, &m->ba, d->dba, inp);
    }
}

#endif
