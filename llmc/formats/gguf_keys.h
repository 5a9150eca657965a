/*
gguf_keys.h -- a model's configuration as the keys of a GGUF file: one table, for the writer
(gguf.h) and the reader (gguf_config.h).

llama.cpp does not know the windows of most models' layers, so the context in a file is the window:
up to there both are the same model.
*/
#ifndef LLMC_GGUF_KEYS_H
#define LLMC_GGUF_KEYS_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "llmc/formats/gguf_arch.h"

typedef enum {
    GGUF_WHOLE, // int, u32 in files
    GGUF_REAL,  // float
    GGUF_SWITCH,
    GGUF_SCALING, // word of a RopeScalingKind
    GGUF_LAYERS   // a truth value of each layer: has a window; n: all but every n-th
} GgufKeyKind;

// Values of keys; 0: the file does not have it.
typedef struct {
    ModelConfig cfg;                  // of its members, those in the table
    int value_size;                   // of a head
    int key_size_mla, value_size_mla; // of heads; the others are latents' then
    float log_multiplier;             // a tenth of yarn's mscale_all_dim
    int full_every;
    float layer_eps; // of a norm that also subtracts the mean
    int expert_hidden, shared_experts, dense_layers;
    int gating; // 1: softmax, 2: sigmoid
    int gates_normed;
} GgufValues;

typedef struct {
    const char* key; // after the architecture's name
    GgufKeyKind kind;
    size_t member; // of GgufValues
    int always;    // FAMILY_... whose files have it also with 0
} GgufKey;

// clang-format off
#define GGUF_MEMBER(member) offsetof(GgufValues, member)
static const GgufKey gguf_keys[] = { // in the order of our files
    {"context_length", GGUF_WHOLE, GGUF_MEMBER(cfg.max_T), 0},
    {"embedding_length", GGUF_WHOLE, GGUF_MEMBER(cfg.C), 0},
    {"block_count", GGUF_WHOLE, GGUF_MEMBER(cfg.L), 0},
    {"feed_forward_length", GGUF_WHOLE, GGUF_MEMBER(cfg.F), 0},
    {"attention.head_count", GGUF_WHOLE, GGUF_MEMBER(cfg.NH), 0},
    {"attention.layer_norm_epsilon", GGUF_REAL, GGUF_MEMBER(layer_eps), 0},
    {"attention.layer_norm_rms_epsilon", GGUF_REAL, GGUF_MEMBER(cfg.norm_eps), 0},
    {"attention.head_count_kv", GGUF_WHOLE, GGUF_MEMBER(cfg.KV), 0},
    {"attention.key_length", GGUF_WHOLE, GGUF_MEMBER(cfg.HS), 0},
    {"attention.value_length", GGUF_WHOLE, GGUF_MEMBER(value_size), 0},
    {"attention.key_length_mla", GGUF_WHOLE, GGUF_MEMBER(key_size_mla), 0},
    {"attention.value_length_mla", GGUF_WHOLE, GGUF_MEMBER(value_size_mla), 0},
    {"attention.q_lora_rank", GGUF_WHOLE, GGUF_MEMBER(cfg.latent.query_rank), 0},
    {"attention.kv_lora_rank", GGUF_WHOLE, GGUF_MEMBER(cfg.latent.rank), 0},
    {"rope.dimension_count", GGUF_WHOLE, GGUF_MEMBER(cfg.rope_dims), 0},
    {"rope.freq_base", GGUF_REAL, GGUF_MEMBER(cfg.rope_base), 0},
    {"rope.freq_base_swa", GGUF_REAL, GGUF_MEMBER(cfg.window_rope_base), 0},
    {"rope.scaling.type", GGUF_SCALING, GGUF_MEMBER(cfg.scaling.kind), 0},
    {"rope.scaling.factor", GGUF_REAL, GGUF_MEMBER(cfg.scaling.factor), 0},
    {"rope.scaling.original_context_length", GGUF_WHOLE, GGUF_MEMBER(cfg.scaling.original_context), 0},
    {"rope.scaling.attn_factor", GGUF_REAL, GGUF_MEMBER(cfg.scaling.attention), 0},
    {"rope.scaling.yarn_beta_fast", GGUF_REAL, GGUF_MEMBER(cfg.scaling.high_freq_factor), 0},
    {"rope.scaling.yarn_beta_slow", GGUF_REAL, GGUF_MEMBER(cfg.scaling.low_freq_factor), 0},
    {"rope.scaling.yarn_log_multiplier", GGUF_REAL, GGUF_MEMBER(log_multiplier), 0},
    {"attention.sliding_window", GGUF_WHOLE, GGUF_MEMBER(cfg.window), FAMILY_PHI3},
    {"attention.sliding_window_pattern", GGUF_LAYERS, GGUF_MEMBER(full_every), 0},
    {"expert_count", GGUF_WHOLE, GGUF_MEMBER(cfg.E), 0},
    {"expert_used_count", GGUF_WHOLE, GGUF_MEMBER(cfg.E_used), 0},
    {"expert_feed_forward_length", GGUF_WHOLE, GGUF_MEMBER(expert_hidden), 0},
    {"expert_gating_func", GGUF_WHOLE, GGUF_MEMBER(gating), 0},
    {"expert_weights_norm", GGUF_SWITCH, GGUF_MEMBER(gates_normed), FAMILY_EXPERTS},
    {"expert_weights_scale", GGUF_REAL, GGUF_MEMBER(cfg.router_factor), 0},
    {"expert_shared_count", GGUF_WHOLE, GGUF_MEMBER(shared_experts), 0},
    {"leading_dense_block_count", GGUF_WHOLE, GGUF_MEMBER(dense_layers), FAMILY_SHARED},
    {"attention.scale", GGUF_REAL, GGUF_MEMBER(cfg.attention_scale), 0},
    {"embedding_scale", GGUF_REAL, GGUF_MEMBER(cfg.embedding_factor), 0},
    {"residual_scale", GGUF_REAL, GGUF_MEMBER(cfg.residual_factor), 0},
    {"logit_scale", GGUF_REAL, GGUF_MEMBER(cfg.logits_divisor), 0},
    {"attn_logit_softcapping", GGUF_REAL, GGUF_MEMBER(cfg.attention_softcap), 0},
    {"final_logit_softcapping", GGUF_REAL, GGUF_MEMBER(cfg.softcap), 0},
};
// clang-format on
enum { GGUF_KEYS = sizeof(gguf_keys) / sizeof(gguf_keys[0]) };

static inline double gguf_value(const GgufValues* values, const GgufKey* key) {
    const char* member = (const char*)values + key->member;
    return key->kind == GGUF_REAL ? (double)*(const float*)(const void*)member
                                  : *(const int*)(const void*)member;
}

// Returns the word of a kind of scaling; NULL: none.
static inline const char* gguf_scaling_word(RopeScalingKind kind) {
    static const char* const words[ROPE_KINDS] = {"none", "linear", NULL, "yarn", "longrope"};
    return words[kind];
}

// llama.cpp multiplies yarn's attention factor by 1 + ln(factor) / 10.
static inline double gguf_own_attention(RopeScalingKind kind, double factor) {
    return kind == ROPE_YARN ? 1 + 0.1 * log(factor) : 1;
}

// Returns a scaling as the keys have it; llama3's is a tensor.
static inline RopeScaling gguf_scaling_(RopeScaling scaling, int has_latent) {
    RopeScaling s;
    memset(&s, 0, sizeof(s));
    if (scaling.kind == ROPE_PLAIN || scaling.kind == ROPE_LLAMA3) {
        return s;
    }
    s.kind = scaling.kind;
    s.factor = scaling.kind == ROPE_LONG ? 0 : scaling.factor;
    if (scaling.kind >= ROPE_YARN) {
        const double own = gguf_own_attention(scaling.kind, (double)scaling.factor);
        s.original_context = scaling.original_context;
        s.attention = has_latent ? 0 : (float)((double)rope_attention(scaling) / own); // 0: it is 1
    }
    if (scaling.kind == ROPE_YARN) {
        s.high_freq_factor = scaling.high_freq_factor;
        s.low_freq_factor = fmaxf(scaling.low_freq_factor, FLT_MIN); // it may be 0
    }
    return s;
}

// Sets the sizes of latents: in GGUF their cache is that of one head of keys.
static inline void gguf_set_latent_(GgufValues* v, ModelConfig cfg) {
    v->cfg.latent.query_rank = cfg.latent.query_rank, v->cfg.latent.rank = cfg.latent.rank;
    v->cfg.KV = 1;
    v->cfg.HS = model_latent_keys(cfg), v->value_size = cfg.latent.rank;
    v->key_size_mla = model_head_size(cfg), v->value_size_mla = cfg.latent.value;
    v->log_multiplier = cfg.attention_scale > 0 ? gguf_log_multiplier(cfg) : 0;
}

static inline void gguf_set_rope_(GgufValues* v, ModelConfig cfg) {
    v->cfg.KV = model_key_heads(cfg);
    v->cfg.HS = v->value_size = model_head_size(cfg);
    if (model_has_latent(cfg)) {
        gguf_set_latent_(v, cfg);
    }
    v->cfg.rope_dims = model_rope_dims(cfg);
    v->cfg.rope_base = model_rope_base(cfg);
    v->cfg.scaling = gguf_scaling_(cfg.scaling, model_has_latent(cfg));
    if (gguf_archs[cfg.arch].window_rope == GGUF_ROPE_OWN) {
        v->cfg.window_rope_base = cfg.window_rope_base > 0 ? cfg.window_rope_base : model_rope_base(cfg);
    }
    v->full_every = gguf_full_every(cfg);
    // Phi's must be there, and is not used
    v->cfg.window = v->full_every > 0 || FAMILY_PHI3 >> cfg.arch & 1 ? cfg.window : 0;
}

static inline void gguf_set_experts_(GgufValues* v, ModelConfig cfg) {
    const RouterKind router = model_architecture(cfg.arch)->router;
    v->cfg.E = cfg.E, v->cfg.E_used = cfg.E_used;
    v->expert_hidden = model_expert_hidden(cfg);
    v->dense_layers = cfg.dense_layers;
    v->gating = router == ROUTER_SIGMOID ? 2 : 1;
    v->gates_normed = router != ROUTER_SOFTMAX;
    v->cfg.router_factor = router == ROUTER_SIGMOID ? model_router_factor(cfg) : 0;
    v->shared_experts = cfg.Fs / model_expert_hidden(cfg);
}

// Returns the values of a model's file.
static inline GgufValues gguf_values(ModelConfig cfg) {
    const Architecture* kinds = model_architecture(cfg.arch);
    GgufValues v;
    memset(&v, 0, sizeof(v));
    const int is_cut = cfg.window > 0 && gguf_full_every(cfg) == 0;
    v.cfg.max_T = is_cut && cfg.window < cfg.max_T ? cfg.window : cfg.max_T;
    v.cfg.C = cfg.C, v.cfg.L = cfg.L, v.cfg.NH = cfg.NH;
    v.cfg.F = model_hidden(cfg);
    *(kinds->norm == NORM_LAYER ? &v.layer_eps : &v.cfg.norm_eps) = model_norm_eps(cfg);
    if (kinds->positions == POSITIONS_ROPE) {
        gguf_set_rope_(&v, cfg);
    }
    if (kinds->router != ROUTER_NONE) {
        gguf_set_experts_(&v, cfg);
    }
    if (FAMILY_GRANITE >> cfg.arch & 1) { // all four must be there
        v.cfg.attention_scale =
            cfg.attention_scale > 0 ? cfg.attention_scale : 1 / sqrtf((float)model_head_size(cfg));
        v.cfg.embedding_factor = model_embedding_factor(cfg);
        v.cfg.residual_factor = model_residual_factor(cfg);
        v.cfg.logits_divisor = cfg.logits_divisor > 0 ? cfg.logits_divisor : 1;
    }
    if (gguf_archs[cfg.arch].has_caps) {
        v.cfg.attention_softcap = cfg.attention_softcap, v.cfg.softcap = cfg.softcap;
    }
    return v;
}

// ---- factors of rotary positions ----

// Tensors of such factors: those of llama3; or of longrope, far and near.
enum { GGUF_FACTORS = 2 };

// Returns the name of such a tensor, which has a number for each pair that turns; NULL: none.
static inline const char* gguf_factors_name(RopeScalingKind kind, int i) {
    static const char* const far_near[GGUF_FACTORS] = {"rope_factors_long.weight",
                                                       "rope_factors_short.weight"};
    return kind == ROPE_LONG ? far_near[i] : kind == ROPE_LLAMA3 && i == 0 ? "rope_freqs.weight" : NULL;
}

// Returns the number by which the frequency of pair k is divided.
static inline float gguf_factor(ModelConfig cfg, int i, int k) {
    if (cfg.scaling.kind == ROPE_LONG) {
        return (i == 0 ? cfg.rope_factors.far : cfg.rope_factors.near)[k];
    }
    RopeSettings s = {0, model_head_size(cfg), model_rope_dims(cfg), model_rope_base(cfg), cfg.scaling, NULL};
    const float scaled = rope_frequency(s, k, 0);
    s.scaling.kind = ROPE_PLAIN;
    return rope_frequency(s, k, 0) / scaled;
}

#endif
