/*
config.h -- what a model is: its architecture, and its sizes.

An architecture is one row of ARCHITECTURES, which gives each operation its kind. A kind decides
which tensors exist and which formula a module uses; only the modules ask for it.

    B  sequences in a micro-batch     T   tokens of a sequence      N = B*T
    C  channels                       L   layers (blocks)
    NH heads of queries               KV  heads of keys, and of values; NH / KV queries share one
    HS size of a head                 Q = NH*HS                     QKV = Q + 2 KV*HS
    F  hidden units of the MLP        G   columns into each: gate and up (2), or 1
    E  experts, each an MLP           M   rows of their hidden layers (model_expert_rows)
    V  vocabulary size                Vp = V rounded up to 128

GPT-2: Radford et al., "Language models are unsupervised multitask learners", 2019; pre-norm blocks,
learned positions, GELU in tanh form, the token embedding shared with the classifier.
Llama: Touvron et al., 2023; rotary positions, RMS norms, SwiGLU, no biases. Grouped keys: Ainslie
et al., "GQA", 2023. Latent attention: DeepSeek-AI, "DeepSeek-V2", 2024 (latent.h).
*/
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "llmc/base/check.h"
#include "llmc/base/enum_words.h"
#include "llmc/model/tensors.h"
#include "llmc/ops/activation.h"
#include "llmc/ops/adapter.h"
#include "llmc/ops/heads.h"
#include "llmc/ops/norm.h"
#include "llmc/ops/rope.h"
#include "llmc/ops/router.h"
#include "llmc/ops/short_conv.h"
#include "llmc/ops/value_embedding.h"

// Layers that share parameters: none; two consecutive layers; or a loop of blocks is repeated.
// Memory has one copy of shared parameters, files have every layer (share_layers.h).
typedef enum { SHARE_OFF, SHARE_PAIRS, SHARE_LOOP } ShareLayers;

// Purposes of an open model.
typedef enum {
    USE_TRAIN,
    USE_EVALUATE, // also exports: no gradients, no optimizer, nothing to save
    USE_GENERATE
} ModelUse;

typedef enum { POSITIONS_LEARNED, POSITIONS_ROPE } PositionsKind;

// Norms of a branch of a block: before it; after it, of what it adds to the stream; both.
typedef enum { NORMS_BEFORE, NORMS_AFTER, NORMS_BOTH } NormsPlace;

// Embedding of a token: as in its table; with a norm of its own; times sqrt(C), rounded to floatX.
typedef enum { EMBEDDING_PLAIN, EMBEDDING_NORM, EMBEDDING_ROOT } EmbeddingKind;

// Linear layers with a bias: all; only the one for queries, keys and values; none.
typedef enum { BIASES_ALL, BIASES_QKV, BIASES_NONE } BiasesKind;

// Layers that may have a window: none; all of them, or none; any.
typedef enum { WINDOWS_NONE, WINDOWS_ALL, WINDOWS_ANY } WindowsKind;

// clang-format off
// Mixers, which layers of a hybrid have in the place of attention (mixer_config.h): none, all layers
// have attention; the gated delta rule; a short convolution with gates. In --layer-types, the word of
// a layer that has it, and the layers of a new model. Its convolution; whether heads with a state
// follow; whether attention has gates in the other layers.
//  mixer           word     new model       convolution       heads gates
#define MIXERS(X) \
  X(MIXER_NONE,     "",      "",             SHORT_CONV_SILU,  0,    0) \
  X(MIXER_DELTA,    "delta", "3xdelta,full", SHORT_CONV_SILU,  1,    1) \
  X(MIXER_CONV,     "conv",  "2xconv,full",  SHORT_CONV_GATED, 0,    0)
// clang-format on
typedef enum { MIXERS(WORDS_VALUE) } MixerKind;

typedef struct {
    const char *word, *layers;
    ShortConvKind conv;
    int has_heads, has_gates;
} MixerParts;

static inline MixerParts mixer_parts(MixerKind kind) {
#define MIXER_ROW_(kind, ...) {__VA_ARGS__},
    static const MixerParts rows[] = {MIXERS(MIXER_ROW_)};
#undef MIXER_ROW_
    return rows[kind];
}

// Random weights of a new model: N(0, std), smaller for projections into the residual stream; or
// zero for these, and for an output layer of its own.
typedef enum { INITIAL_GPT2, INITIAL_ZERO_OUT } InitialWeights;

// clang-format off
// Architectures: the word of --arch, and the kinds of their operations. For a new model: whether the
// classifier has a matrix of its own, the cap of logits (0: the architecture has none), the random
// weights. Additions: whether it may have scales of the residual stream and value embeddings, which
// transformers' class has not.
//  architecture   word        positions          norm            of branches   queries, keys    activation         biases       windows       router          embedding        head cap random weights sinks mixer       additions
#define ARCHITECTURES(X) \
  X(ARCH_GPT2,     "gpt2",     POSITIONS_LEARNED, NORM_LAYER,     NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_GELU,   BIASES_ALL,  WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_LLAMA,    "llama",    POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 1) \
  X(ARCH_MISTRAL,  "mistral",  POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_ALL,  ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_QWEN2,    "qwen2",    POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_QKV,  WINDOWS_ANY,  ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_QWEN3,    "qwen3",    POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_NORM,      ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_ANY,  ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_ARCEE,    "arcee",    POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_RELU2,  BIASES_NONE, WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_NANOCHAT, "nanochat", POSITIONS_ROPE,    NORM_RMS_ALONE, NORMS_BEFORE, HEADS_UNIT_NORM, ACTIVATION_RELU2,  BIASES_NONE, WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_NORM,    1, 15, INITIAL_ZERO_OUT, 0, MIXER_NONE, 1) \
  X(ARCH_MIXTRAL,  "mixtral",  POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_ALL,  ROUTER_CHOSEN,  EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_QWEN3MOE, "qwen3moe", POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_NORM,      ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_ALL,  ROUTER_CHOSEN,  EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_OLMOE,    "olmoe",    POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_ROW_NORM,  ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_NONE, ROUTER_SOFTMAX, EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_GLM4MOE,  "glm4moe",  POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_NORM,      ACTIVATION_SWIGLU, BIASES_QKV,  WINDOWS_NONE, ROUTER_SIGMOID, EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_OLMO2,    "olmo2",    POSITIONS_ROPE,    NORM_RMS,       NORMS_AFTER,  HEADS_ROW_NORM,  ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   1,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_GEMMA2,   "gemma2",   POSITIONS_ROPE,    NORM_RMS_PLUS,  NORMS_BOTH,   HEADS_PLAIN,     ACTIVATION_GEGLU,  BIASES_NONE, WINDOWS_ANY,  ROUTER_NONE,    EMBEDDING_ROOT,    0, 30, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_GRANITE,  "granite",  POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_SMOLLM3,  "smollm3",  POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_ANY,  ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_OLMO3,    "olmo3",    POSITIONS_ROPE,    NORM_RMS,       NORMS_AFTER,  HEADS_ROW_NORM,  ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_ANY,  ROUTER_NONE,    EMBEDDING_PLAIN,   1,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_EXAONE4,  "exaone4",  POSITIONS_ROPE,    NORM_RMS,       NORMS_AFTER,  HEADS_NORM,      ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_ANY,  ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_GRANITE4, "granite4", POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_GEMMA3,   "gemma3",   POSITIONS_ROPE,    NORM_RMS_PLUS,  NORMS_BOTH,   HEADS_NORM,      ACTIVATION_GEGLU,  BIASES_NONE, WINDOWS_ANY,  ROUTER_NONE,    EMBEDDING_ROOT,    0,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_PHI3,     "phi3",     POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_ALL,  ROUTER_NONE,    EMBEDDING_PLAIN,   1,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_GLM4,     "glm4",     POSITIONS_ROPE,    NORM_RMS,       NORMS_BOTH,   HEADS_PLAIN,     ACTIVATION_SWIGLU, BIASES_QKV,  WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   1,  0, INITIAL_GPT2, 0, MIXER_NONE, 0) \
  X(ARCH_GPTOSS,   "gptoss",   POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_PLAIN,     ACTIVATION_CLAMPED, BIASES_ALL, WINDOWS_ANY,  ROUTER_CHOSEN,  EMBEDDING_PLAIN,   1,  0, INITIAL_GPT2, 1, MIXER_NONE, 0) \
  X(ARCH_QWEN35,   "qwen35",   POSITIONS_ROPE,    NORM_RMS_PLUS,  NORMS_BEFORE, HEADS_NORM,      ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_DELTA, 0) \
  X(ARCH_LFM2,     "lfm2",     POSITIONS_ROPE,    NORM_RMS,       NORMS_BEFORE, HEADS_NORM,      ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_NONE, ROUTER_NONE,    EMBEDDING_PLAIN,   0,  0, INITIAL_GPT2, 0, MIXER_CONV, 0) \
  X(ARCH_DEEPSEEK3, "deepseek3", POSITIONS_ROPE,  NORM_RMS,       NORMS_BEFORE, HEADS_LATENT,    ACTIVATION_SWIGLU, BIASES_NONE, WINDOWS_NONE, ROUTER_SIGMOID, EMBEDDING_PLAIN,   1,  0, INITIAL_GPT2, 0, MIXER_NONE, 0)
// clang-format on
typedef enum { ARCHITECTURES(WORDS_VALUE) ARCH_COUNT } Arch;

typedef struct {
    const char* word;
    PositionsKind positions;
    NormKind norm;
    NormsPlace norms;
    HeadsKind heads;
    ActivationKind activation;
    BiasesKind biases;
    WindowsKind windows;
    RouterKind router;
    EmbeddingKind embedding;
    int has_head;
    float softcap;
    InitialWeights initial;
    int has_sinks; // sinks.h
    MixerKind mixer;
    int has_additions;
} Architecture;

static inline const Architecture* model_architecture(Arch arch) {
#define ARCH_ROW_(value, ...) {__VA_ARGS__},
    static const Architecture rows[] = {ARCHITECTURES(ARCH_ROW_)};
#undef ARCH_ROW_
    assert(0 <= (int)arch && arch < ARCH_COUNT);
    return &rows[arch];
}

// Returns the architecture that differs from a dense one only in its experts; without one, itself.
static inline Arch model_arch_with_experts(Arch dense) {
    return dense == ARCH_LLAMA || dense == ARCH_MISTRAL ? ARCH_MIXTRAL
           : dense == ARCH_QWEN3                        ? ARCH_QWEN3MOE
                                                        : dense;
}

enum { MODEL_MAX_TENSOR_RANKS = 128 };

// The part of a model that a process has (part.h); all zero: the whole model.
typedef struct {
    int tensor_rank, tensor_ranks;      // number of this rank; ranks that cut matrices; 0: one
    int first_layer, layers, of_layers; // layers of this process, of the whole model; 0: all
    int places;                         // micro-batches whose activations it keeps; 0: one
    // ranks that divide the experts of each layer evenly, and this one's number; 0 or 1: none do
    int expert_ranks, expert_rank;
} ModelPart;

// Sizes of the mixers of a hybrid: taps of the convolution; heads of keys and of values, and their
// sizes, 0 without heads.
typedef struct {
    int taps, key_heads, value_heads, key_size, value_size;
} ModelMixer;

// Sizes of latent attention (latent.h): columns of the queries' latent, 0: they have none; of that
// of keys and values; of a value. rope_dims channels of a head turn, those of all heads' key alike.
typedef struct {
    int query_rank, rank, value;
    int in_halves; // order of channels that turn in files: halves, not pairs
} ModelLatent;

// Matrices of a block that an adapter may change.
typedef enum { ADAPT_QKV, ADAPT_ATTPROJ, ADAPT_FC, ADAPT_FCPROJ, ADAPT_MATRICES } AdaptedMatrix;

// All rows of a matrix are one part; without this bit, bit p stands for part p: queries, keys and
// values; or gate and up.
enum { ADAPTER_WHOLE = 1 << ADAPTER_MAX_PARTS, MODEL_MAX_RANK = 1024 };

// An adapter (adapter.h) of a frozen model; all zero: none. It is all that is trained.
typedef struct {
    int rank[ADAPT_MATRICES]; // 0: the matrix has none
    int parts[ADAPT_MATRICES];
    float alpha[ADAPT_MATRICES];
    int by_root; // the factor is alpha / sqrt(rank), else alpha / rank
} ModelAdapter;

typedef struct {
    int max_T; // context: the longest sequence, the rows of wpe
    int V, Vp;
    int L, NH, C;
    int share; // SHARE_...; for a loop, SHARE_LOOP + its number of blocks

    // All that follows is 0 in GPT-2. Read it through the functions below, which know what 0 means.
    Arch arch;
    int KV, HS, F;                            // 0: NH, C / NH, 4 C
    int has_head;                             // the classifier has a matrix of its own, not wte
    int E, E_used;                            // experts, and how many process a token; 0: none
    int dense_layers;                         // the first ones, which have an MLP and no experts
    int expert_groups, expert_groups_used;    // in which a token chooses (router.h); 0: one
    int Fe, Fs;                               // hidden units of an expert, 0: F; of the shared one
    float router_factor;                      // of the experts' weights, ROUTER_SIGMOID; 0: 1
    int window;                               // keys that a query sees in layers with a window
    uint8_t windows[LAYER_SET_BYTES];         // layers that have the window
    float norm_eps;                           // 0: 1e-5
    float softcap;                            // 0: none
    float embedding_factor, residual_factor;  // of embeddings, of what a branch adds; 0: 1
    float logits_divisor;                     // 0: 1
    float attention_scale, attention_softcap; // of scores; 0: 1 / sqrt(HS); none
    float rope_base;                          // 0: 10000
    int rope_dims;                            // channels of a head that turn; 0: all
    RopeScaling scaling;
    RopeFactors rope_factors;           // ROPE_LONG: of the pairs that turn
    float window_rope_base;             // of layers with a window; 0: all have the same
    RopeScaling window_scaling;         // with it
    uint8_t unrotated[LAYER_SET_BYTES]; // layers without rotary positions
    ModelMixer mixer;                   // of layers without attention
    uint8_t mixed[LAYER_SET_BYTES];     // layers that have a mixer in the place of attention
    ModelLatent latent;                 // HEADS_LATENT
    int has_scales;                     // of the residual stream in each block (stream_scale.h)
    int has_values;                     // value embeddings in every other layer (value_embedding.h)
    InitialWeights initial;             // random weights; files do not have it
    ModelPart part;                     // of a larger model; files do not have it
    ModelAdapter adapter;               // files of the model do not have it
    // probabilities of dropout in training (dropout.h); files of the model do not have them
    float dropout, attention_dropout;
} ModelConfig;

// Return the number of blocks of parameters in memory (copy 0, 1, ...), and the number of
// consecutive layers that share one.
static inline int model_copies(ModelConfig cfg) {
    return cfg.share == SHARE_PAIRS ? cfg.L / 2 : cfg.share >= SHARE_LOOP ? cfg.share - SHARE_LOOP : cfg.L;
}
static inline int model_copy_repeats(ModelConfig cfg) { return cfg.share == SHARE_PAIRS ? 2 : 1; }

// Return 1 if tensor ranks cut the matrices of each layer, and how many do.
static inline int model_is_cut(ModelConfig cfg) { return cfg.part.tensor_ranks > 1; }
static inline int model_tensor_ranks(ModelConfig cfg) {
    return model_is_cut(cfg) ? cfg.part.tensor_ranks : 1;
}

// Return 1 if this process has the first layer, or the last one.
static inline int model_has_first(ModelConfig cfg) { return cfg.part.first_layer == 0; }
static inline int model_has_last(ModelConfig cfg) {
    return cfg.part.first_layer + cfg.part.layers == cfg.part.of_layers;
}

// Return 1 if the layers are divided into stages, perhaps a single one; 1 if there are several; the
// number of layers of all stages; and of micro-batches whose activations a stage keeps.
static inline int model_is_staged(ModelConfig cfg) { return cfg.part.of_layers > 0; }
static inline int model_is_stage(ModelConfig cfg) { return cfg.part.layers < cfg.part.of_layers; }
static inline int model_layers(ModelConfig cfg) { return model_is_staged(cfg) ? cfg.part.of_layers : cfg.L; }
static inline int model_places(ModelConfig cfg) { return cfg.part.places > 0 ? cfg.part.places : 1; }

// Return 1 if ranks divide the experts of a layer among themselves, and how many do.
static inline int model_divides_experts(ModelConfig cfg) { return cfg.part.expert_ranks > 1; }
static inline int model_expert_ranks(ModelConfig cfg) {
    return model_divides_experts(cfg) ? cfg.part.expert_ranks : 1;
}

// Returns the number of rows that a process has of the residual stream of N tokens.
static inline size_t model_stream_rows(ModelConfig cfg, size_t N) {
    const size_t t = (size_t)model_tensor_ranks(cfg);
    return (N + t - 1) / t;
}

// Returns the copy that layer l uses.
static inline int model_copy(ModelConfig cfg, int l) {
    return l / model_copy_repeats(cfg) % model_copies(cfg);
}

// Return sizes: of a head; columns of all queries (Q), of all keys (as of all values), and of both.
static inline int model_head_size(ModelConfig cfg) { return cfg.HS > 0 ? cfg.HS : cfg.C / cfg.NH; }
static inline int model_key_heads(ModelConfig cfg) { return cfg.KV > 0 ? cfg.KV : cfg.NH; }
static inline int model_heads(ModelConfig cfg) { return cfg.NH * model_head_size(cfg); }
static inline int model_keys(ModelConfig cfg) { return model_key_heads(cfg) * model_head_size(cfg); }
static inline int model_qkv_size(ModelConfig cfg) { return model_heads(cfg) + 2 * model_keys(cfg); }

// Return 1 if queries, keys and values come from latents; then columns of the first matrix for the
// queries, and for keys and values; columns of each head out of the latent; and of both caches.
static inline int model_has_latent(ModelConfig cfg) {
    return heads_parts(model_architecture(cfg.arch)->heads).has_latent;
}
static inline int model_latent_queries(ModelConfig cfg) {
    return cfg.latent.query_rank > 0 ? cfg.latent.query_rank : model_heads(cfg);
}
static inline int model_latent_keys(ModelConfig cfg) { return cfg.latent.rank + cfg.rope_dims; }
static inline int model_latent_up(ModelConfig cfg) {
    return cfg.NH * (model_head_size(cfg) - cfg.rope_dims + cfg.latent.value);
}

// Return the rows of the first matrix of attention, the columns of its result, and those that
// generation keeps of each token.
static inline int model_attention_rows(ModelConfig cfg) {
    return model_has_latent(cfg) ? model_latent_queries(cfg) + model_latent_keys(cfg) : model_qkv_size(cfg);
}
static inline int model_attention_values(ModelConfig cfg) {
    return model_has_latent(cfg) ? cfg.NH * cfg.latent.value : model_heads(cfg);
}
static inline int model_kept_keys(ModelConfig cfg) {
    return model_has_latent(cfg) ? model_latent_keys(cfg) : 2 * model_keys(cfg);
}

// Return the hidden units (F), the activation, and the columns into each unit (G).
static inline int model_hidden(ModelConfig cfg) { return cfg.F > 0 ? cfg.F : 4 * cfg.C; }
static inline ActivationKind model_activation(ModelConfig cfg) {
    return model_architecture(cfg.arch)->activation;
}
static inline int model_gates(ModelConfig cfg) { return activation_gates(model_activation(cfg)); }

// Layers that have a tensor, or a part of the model: none, it lies outside of the blocks; all;
// those with one MLP; those with experts; those with attention; those with a mixer in its place;
// those with a value embedding.
typedef enum {
    LAYERS_ONCE,
    LAYERS_ALL,
    LAYERS_DENSE,
    LAYERS_EXPERTS,
    LAYERS_ATTENTION,
    LAYERS_MIXED,
    LAYERS_VALUES
} LayersKind;

// Return 1 if layer l is one of these, and how many are.
static inline int model_layer_has(ModelConfig cfg, LayersKind kind, int l) {
    const int has_experts = cfg.E > 0 && l >= cfg.dense_layers, is_mixed = layer_is_in(cfg.mixed, l);
    switch (kind) {
    case LAYERS_ONCE:
        return 0;
    case LAYERS_ALL:
        return 1;
    case LAYERS_DENSE:
        return !has_experts;
    case LAYERS_EXPERTS:
        return has_experts;
    case LAYERS_ATTENTION:
        return !is_mixed;
    case LAYERS_MIXED:
        return is_mixed;
    case LAYERS_VALUES:
        return cfg.has_values && (cfg.L - 1 - l) % 2 == 0; // the last one has it
    }
    return 0;
}
static inline int model_layers_of(ModelConfig cfg, LayersKind kind) {
    int layers = 0;
    for (int l = 0; l < cfg.L; l++) {
        layers += model_layer_has(cfg, kind, l);
    }
    return layers;
}

// Return the mixer of the layers that have one; the columns of its result, the channels of its
// convolution, and the rows of its first matrix, 0 without a mixer.
static inline MixerKind model_mixer(ModelConfig cfg) { return model_architecture(cfg.arch)->mixer; }
static inline int model_mixer_values(ModelConfig cfg) {
    const ModelMixer m = cfg.mixer;
    switch (model_mixer(cfg)) {
    case MIXER_NONE:
        return 0;
    case MIXER_DELTA:
        return m.value_heads * m.value_size;
    case MIXER_CONV:
        return cfg.C;
    }
    return 0;
}
static inline int model_mixer_channels(ModelConfig cfg) {
    return 2 * cfg.mixer.key_heads * cfg.mixer.key_size + model_mixer_values(cfg);
}
static inline int model_mixer_rows(ModelConfig cfg) {
    return short_conv_columns(mixer_parts(model_mixer(cfg)).conv) * model_mixer_channels(cfg);
}

// ---- an adapter ----

// Returns 1 if a frozen model has an adapter: then the tables of parameters have only the
// adapter's, and those of model_of_base have all others.
static inline int model_has_adapter(ModelConfig cfg) {
    int rank = 0;
    for (int m = 0; m < ADAPT_MATRICES; m++) {
        rank |= cfg.adapter.rank[m];
    }
    return rank > 0;
}

// Returns the layers that have such a matrix.
static inline LayersKind model_adapted_layers(AdaptedMatrix m) {
    switch (m) {
    case ADAPT_QKV:
    case ADAPT_ATTPROJ:
        return LAYERS_ATTENTION;
    case ADAPT_FC:
    case ADAPT_FCPROJ:
    case ADAPT_MATRICES:
        break;
    }
    return LAYERS_DENSE;
}

// Returns the model without its adapter.
static inline ModelConfig model_of_base(ModelConfig cfg) {
    const ModelAdapter none = {{0}, {0}, {0}, 0};
    cfg.adapter = none;
    return cfg;
}

// Sets the rows of the parts that a matrix could have; returns their number.
static inline int model_matrix_parts_(ModelConfig cfg, AdaptedMatrix m, int rows[ADAPTER_MAX_PARTS]) {
    switch (m) {
    case ADAPT_QKV:
        rows[0] = model_heads(cfg);
        rows[1] = rows[2] = model_keys(cfg);
        return 3;
    case ADAPT_FC:
        rows[0] = rows[1] = model_hidden(cfg);
        return model_gates(cfg);
    case ADAPT_ATTPROJ:
    case ADAPT_FCPROJ:
    case ADAPT_MATRICES:
        break;
    }
    rows[0] = cfg.C;
    return 1;
}

// Returns the shape of a matrix's adapter; rank 0: it has none.
static inline AdapterShape model_adapter_shape(ModelConfig cfg, AdaptedMatrix m) {
    const ModelAdapter* of = &cfg.adapter;
    const float R = (float)of->rank[m];
    int rows[ADAPTER_MAX_PARTS], first = 0;
    const int count = model_matrix_parts_(cfg, m, rows), is_whole = of->parts[m] == ADAPTER_WHOLE;
    AdapterShape s = {of->rank[m], 0, {0, {0}, {0}}};
    for (int p = 0; p < count; p++) {
        if (s.rank > 0 && (is_whole ? p == 0 : of->parts[m] >> p & 1)) {
            s.parts.first[s.parts.count] = first;
            s.parts.rows[s.parts.count++] = rows[p];
        }
        first += rows[p];
    }
    s.parts.rows[0] = is_whole ? first : s.parts.rows[0];
    s.factor = s.rank > 0 ? of->alpha[m] / (of->by_root ? sqrtf(R) : R) : 0;
    return s;
}

// Return the most rows of a first factor of the adapter, 0 without, and the most columns of the
// input or output of a matrix that has one.
static inline size_t model_adapter_rows(ModelConfig cfg) {
    int most = 0;
    for (int m = 0; m < ADAPT_MATRICES; m++) {
        const int rows = adapter_a_rows(model_adapter_shape(cfg, (AdaptedMatrix)m));
        most = rows > most ? rows : most;
    }
    return (size_t)most;
}
static inline size_t model_adapter_widest(ModelConfig cfg) {
    const int hidden = model_gates(cfg) * model_hidden(cfg), first = model_attention_rows(cfg),
              out = model_attention_values(cfg), most = hidden > first ? hidden : first;
    return (size_t)(most > out && most > cfg.C ? most : out > cfg.C ? out : cfg.C);
}

// Returns the hidden units of an expert.
static inline int model_expert_hidden(ModelConfig cfg) { return cfg.Fe > 0 ? cfg.Fe : model_hidden(cfg); }

// Return the MLPs of a block in a process, and the rows of hidden layers for N tokens: N; with
// experts, a row for each expert that a token takes, and up to 31 rows of padding for each expert
// (router.h).
static inline int model_mlps(ModelConfig cfg) { return cfg.E > 0 ? cfg.E / model_expert_ranks(cfg) : 1; }
static inline size_t model_expert_rows(ModelConfig cfg, size_t N) {
    return cfg.E > 0 ? router_rows(N, cfg.E, cfg.E_used) : N;
}

// Returns the most rows that N tokens can have in the experts of one rank: the rows of hidden
// layers in memory. If ranks divide the experts, they process the tokens of one rank at a time
// (expert_parallel.h).
static inline size_t model_hidden_rows(ModelConfig cfg, size_t N) {
    const int own = model_mlps(cfg), used = cfg.E_used < own ? cfg.E_used : own;
    return cfg.E > 0 ? router_rows(N, own, used) : N;
}
static inline float model_router_factor(ModelConfig cfg) {
    return cfg.router_factor > 0 ? cfg.router_factor : 1;
}

// Returns the most hidden units of any MLP.
static inline int model_most_hidden(ModelConfig cfg) {
    const int F = model_hidden(cfg), Fe = model_expert_hidden(cfg), most = F > Fe ? F : Fe;
    return most > cfg.Fs ? most : cfg.Fs;
}

// Returns the elements of the largest matrix out of a latent, or of values: 0 without latents.
static inline size_t model_largest_latent_(ModelConfig cfg) {
    const size_t queries = (size_t)model_heads(cfg) * (size_t)cfg.latent.query_rank,
                 keys = (size_t)model_latent_up(cfg) * (size_t)cfg.latent.rank,
                 most = queries > keys ? queries : keys;
    return model_has_latent(cfg) ? most : 0;
}

// Returns the elements of the largest matrix of a block; each expert's is a matrix of its own.
static inline size_t model_largest_matrix(ModelConfig cfg) {
    const int hidden = model_gates(cfg) * model_most_hidden(cfg), first = model_attention_rows(cfg),
              mix = model_mixer_rows(cfg), most = mix > first ? mix : first;
    const size_t elements = (size_t)cfg.C * (size_t)(hidden > most ? hidden : most),
                 latent = model_largest_latent_(cfg);
    return latent > elements ? latent : elements;
}

// Returns the most columns of a matrix.
static inline int model_widest(ModelConfig cfg) {
    const int Q = model_heads(cfg), hidden = model_most_hidden(cfg), most = Q > hidden ? Q : hidden,
              values = model_mixer_values(cfg),
              rank = cfg.latent.query_rank > cfg.latent.rank ? cfg.latent.query_rank : cfg.latent.rank,
              other = rank > values ? rank : values, C = cfg.C;
    return most > C && most > other ? most : other > C ? other : C;
}

// Returns the most columns that a norm has of a token's stream or latents.
static inline int model_widest_norm(ModelConfig cfg) {
    const int of_queries = cfg.latent.query_rank, rank = cfg.latent.rank,
              most = of_queries > rank ? of_queries : rank;
    return most > cfg.C ? most : cfg.C;
}

static inline NormKind model_norm(ModelConfig cfg) { return model_architecture(cfg.arch)->norm; }
static inline float model_norm_eps(ModelConfig cfg) { return cfg.norm_eps > 0 ? cfg.norm_eps : 1e-5f; }

// Return what is added to each weight of a norm, and 1 if branches have a norm before them, or
// after.
static inline float model_norm_offset(ModelConfig cfg) { return (float)norm_parts(model_norm(cfg)).offset; }
static inline int model_has_norms_before(ModelConfig cfg) {
    return model_architecture(cfg.arch)->norms != NORMS_AFTER;
}
static inline int model_has_norms_after(ModelConfig cfg) {
    return model_architecture(cfg.arch)->norms != NORMS_BEFORE;
}

// Return the factors of embeddings, before rounding, of what a branch adds to the stream, and of
// logits.
static inline float model_embedding_factor(ModelConfig cfg) {
    return model_architecture(cfg.arch)->embedding == EMBEDDING_ROOT ? sqrtf((float)cfg.C)
           : cfg.embedding_factor > 0                                ? cfg.embedding_factor
                                                                     : 1;
}
static inline float model_residual_factor(ModelConfig cfg) {
    return cfg.residual_factor > 0 ? cfg.residual_factor : 1;
}
static inline float model_logits_factor(ModelConfig cfg) {
    return cfg.logits_divisor > 0 ? 1 / cfg.logits_divisor : 1;
}
static inline float model_rope_base(ModelConfig cfg) { return cfg.rope_base > 0 ? cfg.rope_base : 10000.0f; }
static inline int model_rope_dims(ModelConfig cfg) {
    return cfg.rope_dims > 0 ? cfg.rope_dims : model_head_size(cfg);
}

// Return the number of the value embedding of layer l, and the columns of the input that make its
// gates.
static inline int model_value_number(ModelConfig cfg, int l) {
    int number = 0;
    for (int below = 0; below < l; below++) {
        number += model_layer_has(cfg, LAYERS_VALUES, below);
    }
    return number;
}
static inline int model_value_gates(ModelConfig cfg) {
    return cfg.C < VALUE_GATE_COLUMNS ? cfg.C : VALUE_GATE_COLUMNS;
}

// Returns the most columns of a table that is looked up by tokens.
static inline int model_widest_embedding(ModelConfig cfg) {
    const int K = cfg.has_values ? model_keys(cfg) : 0;
    return K > cfg.C ? K : cfg.C;
}

// Returns 1 if a model has what no class of transformers has.
static inline int model_has_additions(ModelConfig cfg) { return cfg.has_scales || cfg.has_values; }

// Returns the option that gave it the first of these.
static inline const char* model_addition_word(ModelConfig cfg) {
    return cfg.has_scales ? "residual-scales" : cfg.has_values ? "value-embeddings" : "";
}

// Returns the keys that a query of layer l sees; 0: all before it.
static inline int model_window(ModelConfig cfg, int l) {
    return layer_is_in(cfg.windows, l) ? cfg.window : 0;
}

// ---- checks ----

#define MODEL_VOCAB_ALIGN 128

static inline int model_padded_vocab(int V) {
    return (V + MODEL_VOCAB_ALIGN - 1) / MODEL_VOCAB_ALIGN * MODEL_VOCAB_ALIGN;
}

// Returns the padded vocabulary of a model that t ranks cut into multiples of 16 rows.
static inline int model_padded_vocab_of_ranks(int V, int t) {
    int step = MODEL_VOCAB_ALIGN;
    while (step % (16 * t)) {
        step += MODEL_VOCAB_ALIGN;
    }
    return (V + step - 1) / step * step;
}

// Returns 1 if the rotary positions are possible for a model.
static inline int model_check_rope_(ModelConfig cfg, const char* path, char* error) {
    const int dims = model_rope_dims(cfg);
    if (dims % 2 || dims > model_head_size(cfg)) {
        return error_set(error, path,
                         "rotary positions turn %d of %d channels of a head, wanted an even number", dims,
                         model_head_size(cfg));
    }
    if (cfg.window_scaling.kind == ROPE_LONG ||
        (cfg.scaling.kind == ROPE_LONG && dims > 2 * ROPE_MAX_FACTORS)) {
        return error_set(
            error, path,
            "longrope turns %d channels of a head, or those of layers with a window only; wanted "
            "at most %d in all layers",
            dims, 2 * ROPE_MAX_FACTORS);
    }
    const int is_scaled = rope_attention(cfg.scaling) != 1 || rope_attention(cfg.window_scaling) != 1;
    return !is_scaled || !heads_parts(model_architecture(cfg.arch)->heads).keeps_rstd ||
           error_set(error, path,
                     "rotary positions with an attention factor, which the norm of queries and keys in %s "
                     "does not allow",
                     model_architecture(cfg.arch)->word);
}

// Returns 1 if the sizes of the heads are possible for a model.
static inline int model_check_heads_(ModelConfig cfg, const char* path, char* error) {
    const int KV = model_key_heads(cfg);
    if (cfg.HS == 0 && cfg.C % cfg.NH) {
        return error_set(error, path, "%d channels in %d heads, wanted a multiple", cfg.C, cfg.NH);
    }
    if (cfg.HS < 0 || cfg.HS > 65536) {
        return error_set(error, path, "heads of %d channels, wanted 1 to 65536", cfg.HS);
    }
    if (cfg.KV < 0 || KV > cfg.NH || cfg.NH % KV) {
        return error_set(error, path, "%d heads with %d heads of keys, wanted a multiple", cfg.NH, KV);
    }
    return model_architecture(cfg.arch)->positions != POSITIONS_ROPE || model_check_rope_(cfg, path, error);
}

// Returns 1 if the experts are possible for a model of this architecture.
static inline int model_check_experts_(ModelConfig cfg, const char* path, char* error) {
    const int has_router = model_architecture(cfg.arch)->router != ROUTER_NONE;
    if (!has_router && (cfg.E || cfg.E_used || cfg.Fs)) {
        return error_set(error, path, "%d experts in a model of %s, wanted none", cfg.E,
                         model_architecture(cfg.arch)->word);
    }
    if (has_router && (cfg.E < 1 || cfg.E > ROUTER_MAX_EXPERTS)) {
        return error_set(error, path, "%d experts, wanted 1 to %d", cfg.E, ROUTER_MAX_EXPERTS);
    }
    if (has_router && (cfg.E_used < 1 || cfg.E_used > cfg.E || cfg.E_used > ROUTER_MAX_USED)) {
        return error_set(error, path, "a token takes %d of %d experts, wanted 1 to %d", cfg.E_used, cfg.E,
                         cfg.E < ROUTER_MAX_USED ? cfg.E : ROUTER_MAX_USED);
    }
    if (cfg.Fs > 0 && model_architecture(cfg.arch)->biases == BIASES_ALL) {
        return error_set(error, path, "a shared expert of %d hidden units in a model of %s, wanted none",
                         cfg.Fs, model_architecture(cfg.arch)->word);
    }
    const int groups = cfg.expert_groups, groups_used = cfg.expert_groups_used;
    if (groups && (groups < 2 || groups > ROUTER_MAX_GROUPS || cfg.E % groups || cfg.E < 2 * groups ||
                   groups_used < 1 || groups_used > groups || cfg.E / groups * groups_used < cfg.E_used ||
                   model_architecture(cfg.arch)->router != ROUTER_SIGMOID)) {
        return error_set(
            error, path,
            "%d of %d groups of the %d experts of %s, wanted groups of two or more that have the %d "
            "experts of a token",
            groups_used, groups, cfg.E, model_architecture(cfg.arch)->word, cfg.E_used);
    }
    if (cfg.Fs < 0 || cfg.Fs > 1 << 20 || cfg.Fe < 0 || cfg.Fe > 1 << 20) {
        return error_set(error, path, "an expert of %d hidden units, a shared one of %d, wanted 0 to %d",
                         cfg.Fe, cfg.Fs, 1 << 20);
    }
    return cfg.dense_layers == 0 || (has_router && 0 < cfg.dense_layers && cfg.dense_layers < cfg.L) ||
           error_set(error, path, "%d layers without experts, wanted 0 to %d", cfg.dense_layers,
                     has_router ? cfg.L - 1 : 0);
}

// Returns 1 if the sizes of the mixer are possible for a model.
static inline int model_check_mixer_(ModelConfig cfg, const char* path, char* error) {
    const ModelMixer m = cfg.mixer;
    const MixerKind kind = model_mixer(cfg);
    if (kind != MIXER_NONE && (m.taps < 2 || m.taps > 8)) {
        return error_set(error, path, "a convolution of %d taps, wanted 2 to 8", m.taps);
    }
    if (!mixer_parts(kind).has_heads) {
        assert(!m.key_heads && !m.value_heads && !m.key_size && !m.value_size);
        return 1;
    }
    if (m.key_heads < 1 || m.value_heads > 1024 || m.value_heads < 1 || m.value_heads % m.key_heads) {
        return error_set(error, path, "a delta rule of %d heads of values and %d of keys, wanted a multiple",
                         m.value_heads, m.key_heads);
    }
    const int is_possible = 0 < m.key_size && m.key_size <= 256 && 0 < m.value_size && m.value_size <= 256;
    return (is_possible && m.key_size % 8 == 0 && m.value_size % 8 == 0) ||
           error_set(
               error, path,
               "a delta rule with keys of %d channels and values of %d, wanted multiples of 8 up to 256",
               m.key_size, m.value_size);
}

// Returns 1 if the sizes of latents are possible for a model.
static inline int model_check_latent_(ModelConfig cfg, const char* path, char* error) {
    const ModelLatent m = cfg.latent;
    const int HS = model_head_size(cfg), most = 65536;
    if (!model_has_latent(cfg)) {
        return 1;
    }
    if (m.rank < 1 || m.rank > most || m.query_rank < 0 || m.query_rank > most) {
        return error_set(error, path, "latents of %d channels of keys and %d of queries, wanted up to %d",
                         m.rank, m.query_rank, most);
    }
    if (cfg.rope_dims < 2 || cfg.rope_dims >= HS || m.value < 1 || m.value > HS) {
        return error_set(error, path,
                         "heads of %d channels of which %d turn, with values of %d; wanted others besides, "
                         "and values of 1 to %d",
                         HS, cfg.rope_dims, m.value, HS);
    }
    return model_key_heads(cfg) == cfg.NH ||
           error_set(error, path, "%d heads with %d heads of keys, wanted as many: they share a latent",
                     cfg.NH, model_key_heads(cfg));
}

// Returns 1 if sizes read from the file `path` are possible for a model; if not, 0 and the reason
// in `error`.
static inline int model_check_config(ModelConfig cfg, const char* path, char* error) {
    static const char* const names[7] = {"context",  "vocabulary",        "layers",      "heads",
                                         "channels", "padded vocabulary", "hidden units"};
    static const int max[7] = {1 << 20, 10000000, MODEL_MAX_LAYERS, 1024, 65536, 10000000 + MODEL_VOCAB_ALIGN,
                               1 << 20};
    const int sizes[7] = {cfg.max_T, cfg.V, cfg.L, cfg.NH, cfg.C, cfg.Vp, cfg.F ? cfg.F : 1};
    for (int i = 0; i < 7; i++) {
        if (sizes[i] < 1 || sizes[i] > max[i]) {
            return error_set(error, path, "%s of %d, wanted 1 to %d", names[i], sizes[i], max[i]);
        }
    }
    if (cfg.Vp < cfg.V) {
        return error_set(error, path, "padded vocabulary of %d below the vocabulary of %d", cfg.Vp, cfg.V);
    }
    return model_check_heads_(cfg, path, error) && model_check_experts_(cfg, path, error) &&
           model_check_mixer_(cfg, path, error) && model_check_latent_(cfg, path, error);
}

#endif
