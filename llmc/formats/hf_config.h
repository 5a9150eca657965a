/*
hf_config.h -- config.json, which describes a model in a Hugging Face directory: its family
(model_type), its sizes, its kinds and its rotary positions (hf_rope.h). A missing key has the value
that the family's class in transformers gives it.

A model that also sees pictures has the language model's values as its text_config: only they are
read.

A config.json may ask for more than we compute (other activations, scales by layer, other rotary
positions): it is refused by the key's name. Dropout, which belongs to training, is ignored with a
note on stderr.
*/
#ifndef LLMC_HF_CONFIG_H
#define LLMC_HF_CONFIG_H

#include "llmc/formats/safetensors.h"
#include "llmc/model/config.h"

#ifdef __cplusplus
extern "C" {
#endif

// Reads the sizes of the model in a directory.
ModelConfig hf_config_read(const char* directory);

// Returns the largest dropout of its configuration.
double hf_config_dropout(const char* directory);

// Returns the fields of a directory's config.json that this program ignores, as text for
// hf_config_write: a model that is trained further keeps them. The caller frees it.
char* hf_config_kept(const char* directory);

#ifdef __cplusplus
}
#endif

#ifdef HF_CONFIG_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"
#include "llmc/formats/hf_config_families.h"
#include "llmc/formats/hf_config_layers.h"
#include "llmc/formats/hf_rope.h"
#include "llmc/formats/hf_values.h"
#include "llmc/model/families.h"

#define HF_MAX_CONFIG_ ((size_t)1 << 20) // largest config.json

// ---- values ----

typedef enum {
    HF_SIZE_,
    HF_SIZE_OR_NULL_,     // null: 0
    HF_POSITIVE_,         // float
    HF_POSITIVE_OR_NULL_, // null: 0
    HF_BOOL_,
    HF_TRUE_, // what we compute
    HF_FALSE_,
    HF_UNUSED_,  // null, false or 1: something that we do not compute is switched off
    HF_NONE_,    // null, 0 or []
    HF_EXPERTS_, // size that several keys may have
    HF_TURNED_,
    HF_SCORING_,
    HF_TOPK_,
    HF_FP8_, // how published weights are stored, which is refused
    HF_DROPOUT_,
    HF_ACTIVATION_,
    HF_ROPE_,
    HF_ROTATED_,
    HF_POSITIONS_,
    HF_PATTERN_,
    HF_LAYER_TYPES_,
    HF_ATTENDS_,
    HF_LIMIT_, // of clamped SwiGLU; its slope
    HF_SLOPE_,
    HF_MXFP4_, // how the experts are stored: hf_model.h reads both ways
    // the value that we support, although a missing key means another one
    HF_MUST_BE_TRUE_,
    HF_MUST_BE_NONE_,
    HF_MUST_BE_TYPES_
} HfValue_;

typedef struct {
    int files; // FAMILY_...
    const char* key;
    HfValue_ value;
    size_t member; // of HfConfig_, if the value is kept
} HfKey_;

// clang-format off
#define HF_MEMBER_(member) offsetof(HfConfig_, member)
static const HfKey_ hf_keys_[] = {
    {FAMILY_ALL, "vocab_size", HF_SIZE_, HF_MEMBER_(cfg.V)},
    {FAMILY_ALL, "tie_word_embeddings", HF_BOOL_, HF_MEMBER_(is_tied)},
    {FAMILY_ALL & ~FAMILY_GPTOSS & ~FAMILY_DEEPSEEK, "quantization_config", HF_UNUSED_, 0},
    {FAMILY_DEEPSEEK, "quantization_config", HF_FP8_, 0},
    {FAMILY_GPTOSS, "quantization_config", HF_MXFP4_, 0},
    {FAMILY_ALL, "add_cross_attention", HF_FALSE_, 0},

    {FAMILY_GPT2, "n_layer", HF_SIZE_, HF_MEMBER_(cfg.L)},
    {FAMILY_GPT2, "n_head", HF_SIZE_, HF_MEMBER_(cfg.NH)},
    {FAMILY_GPT2, "n_embd", HF_SIZE_, HF_MEMBER_(cfg.C)},
    {FAMILY_GPT2, "n_positions", HF_SIZE_, HF_MEMBER_(cfg.max_T)},
    {FAMILY_GPT2, "n_inner", HF_SIZE_OR_NULL_, HF_MEMBER_(cfg.F)},
    {FAMILY_GPT2, "layer_norm_epsilon", HF_POSITIVE_, HF_MEMBER_(cfg.norm_eps)},
    {FAMILY_GPT2, "activation_function", HF_ACTIVATION_, 0},
    {FAMILY_GPT2, "scale_attn_weights", HF_TRUE_, 0},
    {FAMILY_GPT2, "scale_attn_by_inverse_layer_idx", HF_FALSE_, 0},
    {FAMILY_GPT2, "resid_pdrop", HF_DROPOUT_, 0},
    {FAMILY_GPT2, "embd_pdrop", HF_DROPOUT_, 0},
    {FAMILY_GPT2, "attn_pdrop", HF_DROPOUT_, 0},

    {FAMILY_ROPE, "num_hidden_layers", HF_SIZE_, HF_MEMBER_(cfg.L)},
    {FAMILY_ROPE, "num_attention_heads", HF_SIZE_, HF_MEMBER_(cfg.NH)},
    {FAMILY_ROPE, "num_key_value_heads", HF_SIZE_OR_NULL_, HF_MEMBER_(cfg.KV)},
    {FAMILY_ROPE & ~FAMILY_DEEPSEEK, "head_dim", HF_SIZE_OR_NULL_, HF_MEMBER_(cfg.HS)},
    {FAMILY_ROPE, "hidden_size", HF_SIZE_, HF_MEMBER_(cfg.C)},
    {FAMILY_ROPE & ~FAMILY_OWN_HIDDEN, "intermediate_size", HF_SIZE_, HF_MEMBER_(cfg.F)},
    {FAMILY_SHARED, "intermediate_size", HF_SIZE_, HF_MEMBER_(cfg.F)},
    {FAMILY_MOE_HIDDEN, "moe_intermediate_size", HF_SIZE_, HF_MEMBER_(cfg.Fe)},
    {FAMILY_GRANITE4, "shared_intermediate_size", HF_SIZE_, HF_MEMBER_(cfg.F)},
    {FAMILY_ROPE, "max_position_embeddings", HF_SIZE_, HF_MEMBER_(cfg.max_T)},
    {FAMILY_RMS_EPS, "rms_norm_eps", HF_POSITIVE_, HF_MEMBER_(cfg.norm_eps)},
    {FAMILY_ROPE, "hidden_act", HF_ACTIVATION_, 0},
    {FAMILY_GEMMA, "hidden_activation", HF_ACTIVATION_, 0},
    {FAMILY_ROPE, "rope_theta", HF_POSITIVE_, HF_MEMBER_(base)},
    {FAMILY_ROPE, "rope_parameters", HF_ROPE_, HF_MEMBER_(rope)},
    {FAMILY_ROPE, "rope_scaling", HF_ROPE_, HF_MEMBER_(old_rope)},
    {FAMILY_ROPE, "rope_local_base_freq", HF_POSITIVE_, HF_MEMBER_(window_base)},
    {FAMILY_ROPE, "original_max_position_embeddings", HF_SIZE_OR_NULL_, HF_MEMBER_(original_context)},
    {FAMILY_ROPE, "no_rope_layers", HF_ROTATED_, 0},
    {FAMILY_ROPE, "no_rope_layer_interval", HF_SIZE_, HF_MEMBER_(unrotated_every)},
    {FAMILY_ROPE, "partial_rotary_factor", HF_TURNED_, HF_MEMBER_(turned)},
    {FAMILY_ROPE, "attention_dropout", HF_DROPOUT_, 0},
    {FAMILY_PHI3, "resid_pdrop", HF_DROPOUT_, 0},
    {FAMILY_PHI3, "embd_pdrop", HF_DROPOUT_, 0},
    {FAMILY_GRANITE4, "position_embedding_type", HF_POSITIONS_, 0},
    {FAMILY_GRANITE4, "layer_types", HF_MUST_BE_TYPES_, 0},
    {FAMILY_ROPE & ~FAMILY_GRANITE4, "layer_types", HF_LAYER_TYPES_, 0},
    {FAMILY_EXAONE4 | FAMILY_GEMMA3, "sliding_window_pattern", HF_PATTERN_, HF_MEMBER_(full_every)},
    {FAMILY_WINDOWS, "sliding_window", HF_SIZE_OR_NULL_, HF_MEMBER_(cfg.window)},
    {FAMILY_SWITCHED, "use_sliding_window", HF_BOOL_, HF_MEMBER_(has_windows)},
    {FAMILY_SWITCHED, "max_window_layers", HF_SIZE_, HF_MEMBER_(full_layers)},
    {FAMILY_CAPPED, "final_logit_softcapping", HF_POSITIVE_OR_NULL_, HF_MEMBER_(cfg.softcap)},
    {FAMILY_GEMMA2, "attn_logit_softcapping", HF_POSITIVE_OR_NULL_, HF_MEMBER_(cfg.attention_softcap)},
    {FAMILY_GEMMA, "query_pre_attn_scalar", HF_POSITIVE_, HF_MEMBER_(query_scalar)},
    {FAMILY_GRANITE, "attention_multiplier", HF_POSITIVE_, HF_MEMBER_(cfg.attention_scale)},
    {FAMILY_GRANITE, "embedding_multiplier", HF_POSITIVE_, HF_MEMBER_(cfg.embedding_factor)},
    {FAMILY_GRANITE, "residual_multiplier", HF_POSITIVE_, HF_MEMBER_(cfg.residual_factor)},
    {FAMILY_GRANITE, "logits_scaling", HF_POSITIVE_, HF_MEMBER_(cfg.logits_divisor)},

    // our own: hf_config_write.h gives such a model another model_type
    {FAMILY_ADDITIONS, "residual_scales", HF_BOOL_, HF_MEMBER_(cfg.has_scales)},
    {FAMILY_ADDITIONS, "value_embeddings", HF_BOOL_, HF_MEMBER_(cfg.has_values)},
    {FAMILY_ROPE & ~FAMILY_ADDITIONS, "residual_scales", HF_FALSE_, 0},
    {FAMILY_ROPE & ~FAMILY_ADDITIONS, "value_embeddings", HF_FALSE_, 0},

    // latents
    {FAMILY_DEEPSEEK, "q_lora_rank", HF_SIZE_OR_NULL_, HF_MEMBER_(cfg.latent.query_rank)},
    {FAMILY_DEEPSEEK, "kv_lora_rank", HF_SIZE_, HF_MEMBER_(cfg.latent.rank)},
    {FAMILY_DEEPSEEK, "qk_rope_head_dim", HF_SIZE_, HF_MEMBER_(cfg.rope_dims)},
    {FAMILY_DEEPSEEK, "qk_nope_head_dim", HF_SIZE_, HF_MEMBER_(resting)},
    {FAMILY_DEEPSEEK, "v_head_dim", HF_SIZE_, HF_MEMBER_(cfg.latent.value)},
    {FAMILY_DEEPSEEK, "rope_interleave", HF_BOOL_, HF_MEMBER_(in_pairs)},

    // layers without attention
    {FAMILY_QWEN35, "full_attention_interval", HF_SIZE_, HF_MEMBER_(attention_every)},
    {FAMILY_QWEN35, "linear_conv_kernel_dim", HF_SIZE_, HF_MEMBER_(cfg.mixer.taps)},
    {FAMILY_QWEN35, "linear_num_key_heads", HF_SIZE_, HF_MEMBER_(cfg.mixer.key_heads)},
    {FAMILY_QWEN35, "linear_num_value_heads", HF_SIZE_, HF_MEMBER_(cfg.mixer.value_heads)},
    {FAMILY_QWEN35, "linear_key_head_dim", HF_SIZE_, HF_MEMBER_(cfg.mixer.key_size)},
    {FAMILY_QWEN35, "linear_value_head_dim", HF_SIZE_, HF_MEMBER_(cfg.mixer.value_size)},
    {FAMILY_QWEN35, "attn_output_gate", HF_TRUE_, 0},
    {FAMILY_LFM2, "norm_eps", HF_POSITIVE_, HF_MEMBER_(cfg.norm_eps)},
    {FAMILY_LFM2, "full_attn_idxs", HF_ATTENDS_, 0},
    {FAMILY_LFM2, "conv_L_cache", HF_SIZE_, HF_MEMBER_(cfg.mixer.taps)},
    {FAMILY_LFM2, "conv_bias", HF_FALSE_, 0},
    {FAMILY_LFM2, "tie_embedding", HF_BOOL_, HF_MEMBER_(ties)},
    {FAMILY_LFM2, "block_ff_dim", HF_SIZE_, HF_MEMBER_(block_hidden)},
    {FAMILY_LFM2, "block_multiple_of", HF_SIZE_, HF_MEMBER_(hidden_multiple)},
    {FAMILY_LFM2, "block_ffn_dim_multiplier", HF_POSITIVE_, HF_MEMBER_(hidden_factor)},
    {FAMILY_LFM2, "block_auto_adjust_ff_dim", HF_BOOL_, HF_MEMBER_(adjusts_hidden)},

    // experts; in transformers 5 the first two are the same in all of these families
    {FAMILY_EXPERTS, "num_experts", HF_EXPERTS_, HF_MEMBER_(cfg.E)},
    {FAMILY_EXPERTS, "num_local_experts", HF_EXPERTS_, HF_MEMBER_(cfg.E)},
    {FAMILY_GRANITE4, "num_local_experts", HF_MUST_BE_NONE_, 0},
    {FAMILY_SHARED, "n_routed_experts", HF_EXPERTS_, HF_MEMBER_(cfg.E)},
    {FAMILY_EXPERTS, "num_experts_per_tok", HF_SIZE_, HF_MEMBER_(cfg.E_used)},
    {FAMILY_SHARED, "n_shared_experts", HF_SIZE_, HF_MEMBER_(shared_experts)},
    {FAMILY_SHARED, "routed_scaling_factor", HF_POSITIVE_, HF_MEMBER_(cfg.router_factor)},
    {FAMILY_QWEN3MOE, "norm_topk_prob", HF_MUST_BE_TRUE_, 0},
    {FAMILY_SHARED, "norm_topk_prob", HF_TRUE_, 0},
    {FAMILY_OLMOE, "norm_topk_prob", HF_FALSE_, 0},
    {FAMILY_GLM, "attention_bias", HF_MUST_BE_TRUE_, 0},
    {FAMILY_GLM, "use_qk_norm", HF_MUST_BE_TRUE_, 0},
    {FAMILY_SHARED, "first_k_dense_replace", HF_SIZE_, HF_MEMBER_(cfg.dense_layers)},
    {FAMILY_SHARED, "n_group", HF_SIZE_OR_NULL_, HF_MEMBER_(cfg.expert_groups)},
    {FAMILY_SHARED, "topk_group", HF_SIZE_OR_NULL_, HF_MEMBER_(cfg.expert_groups_used)},
    {FAMILY_EXPERTS, "scoring_func", HF_SCORING_, 0},
    {FAMILY_DEEPSEEK, "topk_method", HF_TOPK_, 0},
    {FAMILY_DEEPSEEK, "moe_layer_freq", HF_UNUSED_, 0},
    {FAMILY_EXPERTS, "decoder_sparse_step", HF_UNUSED_, 0},
    {FAMILY_EXPERTS, "mlp_only_layers", HF_NONE_, 0},
    {FAMILY_EXPERTS, "clip_qkv", HF_NONE_, 0},
    {FAMILY_EXPERTS, "router_jitter_noise", HF_NONE_, 0},
    {FAMILY_OLMOE | FAMILY_SHARED, "sliding_window", HF_NONE_, 0},
    {FAMILY_GEMMA3, "use_bidirectional_attention", HF_UNUSED_, 0},
    {FAMILY_GLM4 | FAMILY_GPTOSS, "attention_bias", HF_TRUE_, 0},
    {FAMILY_GPTOSS, "swiglu_limit", HF_LIMIT_, 0},
    {FAMILY_GPTOSS, "swiglu_alpha", HF_SLOPE_, 0},

    // keys of models that differ from the family they claim to be
    {FAMILY_ROPE & ~FAMILY_CAPPED, "final_logit_softcapping", HF_UNUSED_, 0},
    {FAMILY_ROPE & ~FAMILY_BIASES, "attention_bias", HF_FALSE_, 0},
    {FAMILY_ROPE, "mlp_bias", HF_FALSE_, 0},
    {FAMILY_ROPE & ~FAMILY_GEMMA2, "attn_logit_softcapping", HF_UNUSED_, 0},
    {FAMILY_ROPE & ~FAMILY_GEMMA, "query_pre_attn_scalar", HF_UNUSED_, 0},
    {FAMILY_ROPE & ~FAMILY_GRANITE, "attention_multiplier", HF_UNUSED_, 0},
    {FAMILY_ROPE & ~FAMILY_GRANITE, "embedding_multiplier", HF_UNUSED_, 0},
    {FAMILY_ROPE & ~FAMILY_GRANITE, "residual_multiplier", HF_UNUSED_, 0},
    {FAMILY_ROPE & ~FAMILY_GRANITE, "logits_scaling", HF_UNUSED_, 0},
    {FAMILY_ROPE, "logit_scale", HF_UNUSED_, 0},
    {FAMILY_ROPE & ~FAMILY_GLM, "use_qk_norm", HF_UNUSED_, 0},
    {FAMILY_ROPE, "is_causal", HF_TRUE_, 0},
};
// clang-format on

// Reads the number of experts, which has several names.
static int hf_read_experts_(JsonReader* text, const char* key, HfConfig_* config) {
    int count;
    if (!hf_read_size(text, &count)) {
        return 0;
    }
    if (config->experts_key && count != config->cfg.E) {
        return error_set(text->error, text->path, "%s is %d, but %s is %d; wanted only one of them", key,
                         count, config->experts_key, config->cfg.E);
    }
    config->cfg.E = count;
    config->experts_key = key;
    return 1;
}

// Reads how experts are scored, which the family fixes.
static int hf_read_scoring_(JsonReader* text, const char* key, RouterKind router) {
    const char *word, *wanted = router == ROUTER_SIGMOID ? "sigmoid" : "softmax";
    return json_name(text, &word) &&
           (strcmp(word, wanted) == 0 ||
            error_set(text->error, text->path, "%s is %s, wanted %s", key, word, wanted));
}

// Reads how experts are chosen by their scores.
static int hf_read_topk_(JsonReader* text, const char* key) {
    const char* word;
    return json_name(text, &word) &&
           (strcmp(word, "noaux_tc") == 0 ||
            error_set(text->error, text->path, "%s is %s, wanted noaux_tc: by groups, and with biases", key,
                      word));
}

// Refuses weights in fp8 with a scale for each block.
static int hf_read_fp8_(JsonReader* text, const char* key) {
    return json_peek(text) == 'n' ? json_skip(text)
                                  : error_set(text->error, text->path,
                                              "%s: weights in fp8 are not read; wanted bf16, which the "
                                              "publisher's fp8_cast_bf16.py makes of them",
                                              key);
}

static int hf_read_dropout_(JsonReader* text, HfConfig_* config) {
    double dropout;
    if (!json_number(text, &dropout)) {
        return 0;
    }
    config->dropout = fmax(config->dropout, dropout);
    return 1;
}

static int hf_read_activation_(JsonReader* text, const char* key, const HfFamily* family) {
    const char* word;
    if (!json_name(text, &word)) {
        return 0;
    }
    for (int i = 0; i < 3 && family->activations[i]; i++) {
        if (strcmp(word, family->activations[i]) == 0) {
            return 1;
        }
    }
    return error_set(text->error, text->path, "%s is %s, wanted %s", key, word, family->activations[0]);
}

// ---- rotary positions ----

// Reads rope_parameters or rope_scaling. In a family whose layers with a window have positions of
// their own, rope_parameters has an object of each type of layers; transformers does not read
// `truncate` in these.
static int hf_read_rope_(JsonReader* text, HfRope* rope, HfConfig_* config) {
    static const char* const types[2] = {"full_attention", "sliding_attention"};
    const char* key;
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &key)) {
        const int w = strcmp(key, types[0]) == 0 ? 0 : strcmp(key, types[1]) == 0 ? 1 : -1;
        if (w < 0 || rope != &config->rope || config->family->window_base == 0) {
            walk.ok = hf_rope_read(text, key, rope);
        } else {
            config->rope_of[w].is_given = 1;
            walk.ok = hf_read_rope_(text, &config->rope_of[w], config);
            config->rope_of[w].scaling.is_exact = 0;
        }
    }
    return walk.ok;
}

// Reads which layers turn, 1, and which do not, 0.
static int hf_read_rotated_(JsonReader* text, const char* key, HfConfig_* config) {
    size_t turns;
    if (config->family->unrotated_every == 0) {
        return hf_read_unused(text, key);
    }
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    JsonWalk walk = json_walk(text, '[');
    while (json_step(&walk, NULL)) {
        if (!json_natural(text, &turns)) {
            return 0;
        }
        if (config->num_rotated < MODEL_MAX_LAYERS) {
            config->rotated[config->num_rotated] = turns != 0;
        }
        config->num_rotated++;
    }
    return walk.ok;
}

// Reads the kind of positions: rope, or null and other words, with which no layer turns.
static int hf_read_positions_(JsonReader* text, int* never_turns) {
    const char* word;
    *never_turns = 1;
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    const int ok = json_name(text, &word);
    *never_turns = ok && strcmp(word, "rope") != 0;
    return ok &&
           (!*never_turns || strcmp(word, "nope") == 0 ||
            error_set(text->error, text->path, "position_embedding_type is %s, wanted rope or nope", word));
}

// Chooses the object of all layers, or of those without a window, among its places.
static int hf_config_choose_rope_(HfConfig_* config, const char* path, char* error) {
    HfRope *rope = &config->rope, *old = &config->old_rope, *of = config->rope_of;
    if (config->family->window_base > 0) {
        const int is_exact = rope->scaling.is_exact;
        if (rope->base > 0 || rope->scaling.kind != ROPE_PLAIN) {
            return error_set(
                error, path,
                "rope_parameters has positions of all layers, wanted those of full_attention and "
                "sliding_attention");
        }
        of[0].scaling.is_exact = of[0].scaling.kind == ROPE_YARN && is_exact;
        of[1].scaling.is_exact = of[1].scaling.kind == ROPE_YARN && is_exact;
        *rope = of[0];
    }
    for (int i = 0; i < 3; i++) {
        HfRope* each = i == 0 ? rope : i == 1 ? old : &of[1];
        if (!hf_rope_complete(each, config->cfg.max_T, config->original_context, path, error)) {
            return 0;
        }
    }
    return !rope->is_given || !old->is_given || hf_rope_is_same(rope, old) ||
           error_set(error, path, "rope_parameters and rope_scaling differ, wanted only one of them");
}

// Decides the rotary positions.
static int hf_config_rope_(HfConfig_* config, const char* path, char* error) {
    ModelConfig* cfg = &config->cfg;
    const HfFamily* family = config->family;
    const HfRope *rope = &config->rope, *old = &config->old_rope, *window = &config->rope_of[1];
    if (!hf_config_choose_rope_(config, path, error)) {
        return 0;
    }
    if (FAMILY_GPTOSS >> cfg->arch & 1 && !rope->is_given && !old->is_given) {
        return error_set(error, path, "no rope_parameters or rope_scaling, wanted one of them");
    }
    cfg->scaling = rope->is_given ? rope->scaling : old->scaling;
    cfg->rope_factors = rope->is_given ? rope->factors : old->factors;
    cfg->rope_base = rope->base > 0 ? rope->base : old->base > 0 ? old->base : config->base;
    if (config->base != 0 && config->base != cfg->rope_base) {
        return error_set(error, path, "rope_theta is %g, but %g in rope_parameters; wanted only one of them",
                         (double)config->base, (double)cfg->rope_base);
    }
    cfg->rope_base = cfg->rope_base > 0 ? cfg->rope_base : family->rope_base;
    if (family->window_base > 0) {
        cfg->window_scaling = window->scaling;
        cfg->window_rope_base = window->base > 0          ? window->base
                                : config->window_base > 0 ? config->window_base
                                                          : family->window_base;
    }
    return 1;
}

// Decides how many channels of a head are rotated. transformers rounds down.
static int hf_config_turned_(HfConfig_* config, const char* path, char* error) {
    ModelConfig* cfg = &config->cfg;
    const HfRope *rope = &config->rope, *old = &config->old_rope, *used = rope->is_given ? rope : old;
    const int HS = model_head_size(*cfg);
    const double part = rope->turned > 0     ? rope->turned
                        : old->turned > 0    ? old->turned
                        : config->turned > 0 ? config->turned
                                             : 1;
    const int is_partial = config->family->turned > 0,
              dims = model_has_latent(*cfg) ? cfg->rope_dims : (int)(HS * part); // or a key has it
    if (!is_partial && part != 1) {
        return error_set(error, path,
                         "partial_rotary_factor changes what the model computes, which is not supported");
    }
    if (is_partial && (dims == 0 || dims % 2)) {
        return error_set(error, path,
                         "partial_rotary_factor %g turns %d of %d channels of a head, wanted an even number",
                         part, dims, HS);
    }
    cfg->rope_dims = dims == HS ? 0 : dims;
    return cfg->scaling.kind != ROPE_LONG || (used->near == dims / 2 && used->far == dims / 2) ||
           error_set(error, path, "short_factor and long_factor have %d and %d numbers, wanted %d",
                     used->near, used->far, dims / 2);
}

// ---- experts ----

static int hf_by_name_(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

// Refuses missing keys whose defaults are not what we compute.
static int hf_config_check_given_(const HfConfig_* config, const char* path, char* error) {
    for (size_t i = 0; i < sizeof(hf_keys_) / sizeof(hf_keys_[0]); i++) {
        const HfKey_* key = &hf_keys_[i];
        if (key->files >> config->cfg.arch & 1 && key->value >= HF_MUST_BE_TRUE_ &&
            !bsearch(&key->key, config->keys, config->num_keys, sizeof(key->key), hf_by_name_)) {
            return error_set(error, path, "%s is missing, wanted %s: transformers has another default",
                             key->key,
                             key->value == HF_MUST_BE_TRUE_   ? "true"
                             : key->value == HF_MUST_BE_NONE_ ? "0"
                                                              : "full_attention for each layer");
        }
    }
    return 1;
}

// Decides the sizes of the experts: F is theirs if all layers have them.
static int hf_config_experts_(HfConfig_* config, const char* path, char* error) {
    ModelConfig* cfg = &config->cfg;
    if (FAMILY_MOE_HIDDEN >> cfg->arch & 1 && cfg->Fe == 0) {
        return error_set(error, path, "no moe_intermediate_size");
    }
    if (cfg->dense_layers == 0 && cfg->Fe > 0) {
        cfg->F = cfg->Fe, cfg->Fe = 0;
    }
    if (model_architecture(cfg->arch)->router != ROUTER_SIGMOID) {
        return 1;
    }
    if (cfg->expert_groups <= 1) {
        cfg->expert_groups = cfg->expert_groups_used = 0;
    } else if (cfg->expert_groups_used == 0) {
        cfg->expert_groups_used = 1; // the class's default
    }
    if (config->shared_experts < 1 || config->shared_experts > ROUTER_MAX_EXPERTS) {
        return error_set(error, path, "n_shared_experts is %d, wanted 1 to %d", config->shared_experts,
                         ROUTER_MAX_EXPERTS);
    }
    const double hidden = (double)config->shared_experts * model_expert_hidden(*cfg);
    cfg->Fs = hidden < INT_MAX ? (int)hidden : INT_MAX;
    return 1;
}

// Decides the sizes of heads whose keys come from a latent, and the factor of their scores, which
// yarn has in the key mscale_all_dim.
static void hf_config_latent_(HfConfig_* config) {
    ModelConfig* cfg = &config->cfg;
    const HfRope* used = config->rope.is_given ? &config->rope : &config->old_rope;
    if (!model_has_latent(*cfg)) {
        return;
    }
    cfg->HS = cfg->rope_dims + config->resting;
    cfg->latent.in_halves = !config->in_pairs;
    if (used->scaling.kind == ROPE_YARN && used->mscale_all > 0) {
        cfg->attention_scale = hf_rope_score_scale(cfg->HS, used->scaling.factor, used->mscale_all);
    }
}

// Decides the hidden units of LFM2: two thirds of a number, times a factor, up to a multiple.
static int hf_config_hidden_(HfConfig_* config, const char* path, char* error) {
    const int given = config->block_hidden > 0 ? config->block_hidden : config->cfg.F,
              multiple = config->hidden_multiple;
    if (!(FAMILY_LFM2 >> config->cfg.arch & 1)) {
        return 1;
    }
    if (config->adjusts_hidden && multiple < 1) {
        return error_set(error, path, "block_multiple_of is %d, wanted 1 or more", multiple);
    }
    const double part = trunc(2.0 * given / 3), all = trunc((double)config->hidden_factor * part),
                 adjusted = config->adjusts_hidden ? ceil(all / multiple) * multiple : given;
    config->cfg.F = adjusted < INT_MAX ? (int)adjusted : INT_MAX;
    return 1;
}

// ---- reading ----

static int hf_config_value_(JsonReader* text, const HfKey_* key, HfConfig_* config) {
    char* member = (char*)config + key->member;
    const int is_null = json_peek(text) == 'n';
    switch (key->value) {
    case HF_SIZE_:
        return hf_read_size(text, (int*)(void*)member);
    case HF_SIZE_OR_NULL_:
        *(int*)(void*)member = 0;
        return is_null ? json_skip(text) : hf_read_counted(text, key->key, (int*)(void*)member);
    case HF_POSITIVE_:
        return hf_read_positive(text, key->key, (float*)(void*)member);
    case HF_POSITIVE_OR_NULL_:
        *(float*)(void*)member = 0;
        return is_null ? json_skip(text) : hf_read_positive(text, key->key, (float*)(void*)member);
    case HF_BOOL_:
        return json_bool(text, (int*)(void*)member);
    case HF_TRUE_:
    case HF_MUST_BE_TRUE_:
        return hf_read_switch(text, key->key, 1);
    case HF_FALSE_:
        return hf_read_switch(text, key->key, 0);
    case HF_UNUSED_:
        return hf_read_unused(text, key->key);
    case HF_NONE_:
    case HF_MUST_BE_NONE_:
        return hf_read_none(text, key->key);
    case HF_EXPERTS_:
        return hf_read_experts_(text, key->key, config);
    case HF_TURNED_:
        return hf_rope_read_part(text, key->key, (double*)(void*)member);
    case HF_SCORING_:
        return hf_read_scoring_(text, key->key, model_architecture(config->cfg.arch)->router);
    case HF_TOPK_:
        return hf_read_topk_(text, key->key);
    case HF_FP8_:
        return hf_read_fp8_(text, key->key);
    case HF_DROPOUT_:
        return hf_read_dropout_(text, config);
    case HF_ACTIVATION_:
        return hf_read_activation_(text, key->key, config->family);
    case HF_ROPE_:
        return hf_read_rope_(text, (HfRope*)(void*)member, config);
    case HF_ROTATED_:
        return hf_read_rotated_(text, key->key, config);
    case HF_POSITIONS_:
        return hf_read_positions_(text, &config->never_turns);
    case HF_PATTERN_:
        return hf_read_pattern_(text, key->key, (int*)(void*)member);
    case HF_ATTENDS_:
        return hf_read_attends_(text, config);
    case HF_LIMIT_:
        return hf_read_constant(text, key->key, CLAMPED_LIMIT);
    case HF_SLOPE_:
        return hf_read_constant(text, key->key, CLAMPED_SLOPE);
    case HF_MXFP4_:
        return hf_read_mxfp4(text, key->key);
    case HF_LAYER_TYPES_:
    case HF_MUST_BE_TYPES_:
        return hf_read_layer_types_(text, config);
    }
    return 0;
}

// Returns what we know of a key in a family's config.json; NULL: nothing.
static const HfKey_* hf_key_(const char* name, Arch arch) {
    for (size_t i = 0; i < sizeof(hf_keys_) / sizeof(hf_keys_[0]); i++) {
        if (hf_keys_[i].files >> arch & 1 && strcmp(hf_keys_[i].key, name) == 0) {
            return &hf_keys_[i];
        }
    }
    return NULL;
}

// Finds the family of a model_type, and whether it is the text_config that has its values.
static int hf_family_(JsonReader* text, Arch* arch, int* is_wrapped) {
    char known[512] = "";
    const char* type;
    if (!json_name(text, &type)) {
        return 0;
    }
    const size_t own = strlen(HF_OWN_TYPE);
    for (int i = 0; i < ARCH_COUNT; i++) {
        const int is_own = FAMILY_ADDITIONS >> i & 1 && strncmp(type, HF_OWN_TYPE, own) == 0;
        *is_wrapped = hf_defaults[i].wrapper && strcmp(type, hf_defaults[i].wrapper) == 0;
        if (*is_wrapped || strcmp(type + (is_own ? own : 0), hf_families[i].type) == 0) {
            *arch = (Arch)i;
            return 1;
        }
        const size_t used = strlen(known);
        snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", hf_families[i].type);
    }
    return error_set(text->error, text->path, "model_type is %s, wanted one of %s", type, known);
}

// Refuses keys that come twice.
static int hf_config_check_keys_(JsonReader* text, HfConfig_* config) {
    safetensors_sort(config->keys, config->num_keys, sizeof(config->keys[0]), hf_by_name_);
    for (size_t i = 1; i < config->num_keys; i++) {
        if (strcmp(config->keys[i - 1], config->keys[i]) == 0) {
            return error_set(text->error, text->path, "key %s appears twice", config->keys[i]);
        }
    }
    return 1;
}

// Sets the architecture from model_type, which must be known before the values are read, and where
// they are.
static int hf_config_find_family_(JsonReader* text, HfConfig_* config) {
    const char* name;
    int has_family = 0, is_wrapped = 0;
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &name)) {
        const int is_type = strcmp(name, "model_type") == 0, is_text = strcmp(name, "text_config") == 0;
        json_peek(text);
        config->text_begin = is_text ? text->at : config->text_begin;
        walk.ok = is_type ? hf_family_(text, &config->cfg.arch, &is_wrapped) : json_skip(text);
        config->text_end = is_text ? text->at : config->text_end;
        has_family |= is_type;
    }
    if (is_wrapped && !config->text_end) {
        return error_set(text->error, text->path, "no text_config");
    }
    config->text_end = is_wrapped ? config->text_end : 0;
    return walk.ok && (has_family || error_set(text->error, text->path, "no model_type"));
}

// Reads all values.
static int hf_config_read_values_(JsonReader* text, HfConfig_* config) {
    const char* name;
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &name)) {
        const HfKey_* key = hf_key_(name, config->cfg.arch);
        config->keys = (const char**)check_grow(config->keys, config->num_keys, sizeof(name), "list of keys");
        config->keys[config->num_keys++] = name;
        walk.ok = key ? hf_config_value_(text, key, config) : json_skip(text);
    }
    return walk.ok && json_end(text) && hf_config_check_keys_(text, config);
}

// Sets the values of keys that may be missing.
static void hf_config_default_(HfConfig_* config) {
    const HfFamily* family = config->family;
    const HfDefaults* defaults = &hf_defaults[config->cfg.arch];
    config->cfg.V = defaults->V, config->cfg.NH = defaults->NH, config->cfg.max_T = defaults->max_T;
    config->original_context = defaults->original_context;
    config->cfg.norm_eps = family->norm_eps;
    config->cfg.KV = family->KV;
    config->cfg.HS = family->HS;
    config->cfg.window = family->window;
    config->cfg.softcap = family->softcap;
    config->cfg.attention_softcap = family->attention_softcap;
    config->query_scalar = family->query_scalar;
    config->cfg.attention_scale = family->attention_scale;
    config->cfg.E = family->E;
    config->cfg.E_used = family->E_used;
    config->is_tied = family->is_tied;
    config->has_windows = !(FAMILY_SWITCHED >> config->cfg.arch & 1);
    config->full_layers = HF_FULL_LAYERS;
    config->full_every = family->full_every;
    config->never_turns = FAMILY_GRANITE4 >> config->cfg.arch & 1;
    config->shared_experts = 1;
    config->cfg.dense_layers = family->dense_layers;
    config->turned = family->turned;
    config->cfg.mixer = family->mixer;
    config->attention_every = 4;
    config->cfg.latent = family->latent.sizes;
    config->cfg.rope_dims = family->latent.turning, config->resting = family->latent.resting;
    config->in_pairs = 1;
    config->cfg.expert_groups = family->groups, config->cfg.expert_groups_used = family->groups_used;
    config->cfg.router_factor = family->router_factor;
    config->ties = -1;
    config->hidden_multiple = 256, config->hidden_factor = 1, config->adjusts_hidden = 1;
}

// Refuses a GPT-2 that its class can hold and we do not compute.
static int hf_check_gpt2_(const HfConfig_* config, const char* path, char* error) {
    const ModelConfig cfg = config->cfg;
    if (cfg.F && cfg.F != 4 * (double)cfg.C) {
        return error_set(error, path, "n_inner is %d, wanted 4 x n_embd = %.0f", cfg.F, 4 * (double)cfg.C);
    }
    if (cfg.norm_eps != hf_families[ARCH_GPT2].norm_eps) {
        return error_set(error, path, "layer_norm_epsilon is %g, wanted %g", (double)cfg.norm_eps,
                         (double)hf_families[ARCH_GPT2].norm_eps);
    }
    return config->is_tied || error_set(error, path, "tie_word_embeddings is false, wanted true");
}

// Returns the configuration that a model's options give: GPT-2 implies its sizes, others name them.
static ModelConfig hf_settled_config_(ModelConfig cfg) {
    const int is_gpt2 = cfg.arch == ARCH_GPT2;
    cfg.F = is_gpt2 ? 0 : cfg.F;
    cfg.norm_eps = is_gpt2 ? 0 : cfg.norm_eps;
    cfg.KV = is_gpt2 ? 0 : model_key_heads(cfg);
    cfg.HS = is_gpt2 ? 0 : model_head_size(cfg);
    cfg.rope_base = is_gpt2 ? 0 : model_rope_base(cfg);
    return cfg;
}

// Returns a copy of a text, because a reader decodes strings in place; the caller frees it.
static char* hf_copy_(const JsonReader* text) {
    char* copy = (char*)check_alloc(text->bytes + 1, 1, text->path);
    memcpy(copy, text->text, text->bytes);
    return copy;
}

// Decides rotary positions, and heads that depend on them.
static int hf_config_heads_(HfConfig_* config, const char* path, char* error) {
    const int ok = hf_config_rope_(config, path, error);
    hf_config_latent_(config);
    return ok;
}

// Reads the text of config.json of a known family.
static int hf_config_parse_as_(JsonReader* text, HfConfig_* config) {
    ModelConfig* cfg = &config->cfg;
    hf_config_default_(config);
    if (!hf_config_read_values_(text, config)) {
        return 0;
    }
    cfg->Vp = cfg->V < INT_MAX - MODEL_VOCAB_ALIGN ? model_padded_vocab(cfg->V) : cfg->V;
    cfg->has_head = !(config->ties >= 0 ? config->ties : config->is_tied);
    cfg->attention_scale = config->query_scalar > 0 ? 1 / sqrtf(config->query_scalar) : cfg->attention_scale;
    if (!hf_config_experts_(config, text->path, text->error) ||
        !hf_config_hidden_(config, text->path, text->error)) {
        return 0;
    }
    if (cfg->arch != ARCH_GPT2 && cfg->F == 0) {
        return error_set(text->error, text->path, "no %s",
                         cfg->dense_layers > 0 || !config->family->hidden ? "intermediate_size"
                                                                          : config->family->hidden);
    }
    if ((cfg->arch == ARCH_GPT2 && !hf_check_gpt2_(config, text->path, text->error)) ||
        !hf_config_check_given_(config, text->path, text->error) ||
        !hf_config_heads_(config, text->path, text->error) ||
        !model_check_config(*cfg, text->path, text->error) ||
        !hf_config_turned_(config, text->path, text->error) ||
        !hf_config_rotated_(config, text->path, text->error) ||
        !hf_config_windows_(config, text->path, text->error)) {
        return 0;
    }
    hf_config_mixed_(config);
    *cfg = hf_settled_config_(*cfg);
    return 1;
}

// Reads the text of config.json; returns 0 with text->error set if we do not compute such a model.
static int hf_config_parse_(JsonReader* text, HfConfig_* config) {
    ModelConfig* cfg = &config->cfg;
    char* copy = hf_copy_(text);
    JsonReader first = json_reader(text->path, copy, text->bytes, text->error);
    const int is_known = hf_config_find_family_(&first, config);
    free(copy);
    config->family = &hf_families[cfg->arch];
    if (config->text_end) {
        *text = (JsonReader){text->path,
                             text->error,
                             text->text + config->text_begin,
                             config->text_end - config->text_begin,
                             0,
                             config->text_begin};
    }
    return is_known && hf_config_parse_as_(text, config);
}

// Opens the config.json in a directory; the caller frees reader.text.
static JsonReader hf_config_open_(const char* directory, char path[PATH_MAX], char error[ERROR_BYTES]) {
    char* text;
    size_t bytes;
    file_join(path, directory, "config.json");
    CHECK(byte_order_text(path, HF_MAX_CONFIG_, &text, &bytes, error), "%s", error);
    return json_reader(path, text, bytes, error);
}

static HfConfig_ hf_config_load_(const char* directory) {
    char path[PATH_MAX], error[ERROR_BYTES];
    HfConfig_ config;
    memset(&config, 0, sizeof(config));
    JsonReader text = hf_config_open_(directory, path, error);
    unsigned char* whole = text.text;
    CHECK(hf_config_parse_(&text, &config), "%s", error);
    free(config.keys);
    free(whole);
    return config;
}

ModelConfig hf_config_read(const char* directory) { return hf_config_load_(directory).cfg; }

double hf_config_dropout(const char* directory) { return hf_config_load_(directory).dropout; }

// True for fields that change nothing that we compute, and are kept for other readers.
static int hf_config_is_kept_(const char* key) {
    static const char* const keys[] = {
        "initializer_range",       "pad_token_id",           "use_cache",
        "reorder_and_upcast_attn", "summary_type",           "summary_use_proj",
        "summary_activation",      "summary_proj_to_labels", "summary_first_dropout",
        "task_specific_params",    "output_router_logits",   "router_aux_loss_coef"};
    size_t i = 0;
    while (i < sizeof(keys) / sizeof(keys[0]) && strcmp(key, keys[i]) != 0) {
        i++;
    }
    return i < sizeof(keys) / sizeof(keys[0]);
}

char* hf_config_kept(const char* directory) {
    char path[PATH_MAX], error[ERROR_BYTES];
    const char* key;
    TextBuffer kept;
    JsonReader reader = hf_config_open_(directory, path, error);
    char* written = hf_copy_(&reader);
    text_buffer_open(&kept, path);
    JsonWalk walk = json_walk(&reader, '{');
    while (json_step(&walk, &key)) {
        json_peek(&reader);
        const size_t begin = reader.at;
        const int is_kept = hf_config_is_kept_(key);
        walk.ok = json_skip(&reader);
        if (is_kept) {
            fprintf(kept.file, "  \"%s\": %.*s,\n", key, (int)(reader.at - begin), written + begin);
        }
    }
    CHECK(walk.ok, "%s", error);
    free(written);
    free(reader.text);
    return text_buffer_close(&kept);
}

#endif // HF_CONFIG_IMPLEMENTATION

#endif
