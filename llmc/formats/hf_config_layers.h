/*
hf_config_layers.h -- the values of a config.json (hf_config.h), and which layers these give rotary
positions, a window, or a mixer in the place of attention.
*/
#ifndef LLMC_HF_CONFIG_LAYERS_H
#define LLMC_HF_CONFIG_LAYERS_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/json.h"
#include "llmc/formats/hf_config_families.h"
#include "llmc/formats/hf_rope.h"
#include "llmc/formats/hf_values.h"

typedef struct {
    ModelConfig cfg;
    const HfFamily* family;
    int is_tied;
    float base, window_base;           // rope_theta, rope_local_base_freq
    double turned;                     // partial_rotary_factor
    int original_context;              // original_max_position_embeddings
    HfRope rope, old_rope, rope_of[2]; // rope_of: of layers without a window, and with one
    int never_turns;                   // position_embedding_type
    int unrotated_every, num_rotated;  // no_rope_layer_interval; numbers in no_rope_layers
    uint8_t rotated[MODEL_MAX_LAYERS];
    float query_scalar;           // its root divides scores; 0: the family has a scale of its own
    int has_windows, full_layers; // use_sliding_window, max_window_layers
    int full_every;               // every n-th layer has no window; -1: letters say which
    int num_layer_types;
    uint8_t slides[MODEL_MAX_LAYERS]; // of layer_types; so are mixes
    uint8_t mixes[MODEL_MAX_LAYERS];
    int attention_every;               // full_attention_interval
    uint8_t attends[LAYER_SET_BYTES];  // full_attn_idxs
    int has_attends;                   // it was given
    int ties;                          // tie_embedding; -1: not given
    int block_hidden, hidden_multiple; // block_ff_dim, block_multiple_of
    int adjusts_hidden;                // block_auto_adjust_ff_dim
    float hidden_factor;               // block_ffn_dim_multiplier
    const char* experts_key;           // key that gave the number of experts
    int shared_experts;
    int resting, in_pairs;       // qk_nope_head_dim, rope_interleave
    double dropout;              // largest one
    size_t text_begin, text_end; // of a text_config; 0: it has none, or is not needed
    const char** keys;           // all keys read so far, in the text
    size_t num_keys;
} HfConfig_;

// ---- rotary positions ----

// Decides which layers do not turn, by no_rope_layers or its interval.
static inline int hf_config_rotated_(HfConfig_* config, const char* path, char* error) {
    ModelConfig* cfg = &config->cfg;
    const int every = config->unrotated_every > 0 ? config->unrotated_every : config->family->unrotated_every,
              is_listed = config->num_rotated > 0;
    if (is_listed && config->num_rotated != cfg->L) {
        return error_set(error, path, "no_rope_layers has %d layers, wanted %d", config->num_rotated, cfg->L);
    }
    for (int l = 0; l < cfg->L; l++) {
        const int rests = config->family->unrotated_every == 0 ? config->never_turns
                          : is_listed                          ? !config->rotated[l]
                                                               : (l + 1) % every == 0;
        cfg->unrotated[l / 8] |= (uint8_t)(rests << l % 8);
    }
    return 1;
}

// ---- windows ----

// Reads which layers have no window: every n-th, or a text of letters for each.
static inline int hf_read_pattern_(JsonReader* text, const char* key, int* every) {
    const char first = (char)json_peek(text);
    *every = first == '"' ? -1 : *every;
    return first == '"' || first == 'n' ? json_skip(text) : hf_read_counted(text, key, every);
}

// Returns the kinds of layers that a family may have, for a message.
static inline const char* hf_layer_words_(const HfFamily* family, char text[64]) {
    snprintf(text, 64, "full_attention and %s",
             family->mixed_type ? family->mixed_type : "sliding_attention");
    return text;
}

// attention is the old name of full_attention.
static inline int hf_read_layer_types_(JsonReader* text, HfConfig_* config) {
    const char* word;
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    JsonWalk walk = json_walk(text, '[');
    while (json_step(&walk, NULL)) {
        if (!json_name(text, &word)) {
            return 0;
        }
        const char* mixed = config->family->mixed_type;
        const int mixes = mixed && strcmp(word, mixed) == 0,
                  slides = !mixed && strcmp(word, "sliding_attention") == 0;
        if (!slides && !mixes && strcmp(word, "full_attention") != 0 && strcmp(word, "attention") != 0) {
            char known[64];
            return error_set(text->error, text->path, "layer_types has %s, wanted %s", word,
                             hf_layer_words_(config->family, known));
        }
        if (config->num_layer_types < MODEL_MAX_LAYERS) {
            config->slides[config->num_layer_types] = (uint8_t)slides;
            config->mixes[config->num_layer_types] = (uint8_t)mixes;
        }
        config->num_layer_types++;
    }
    return walk.ok;
}

// Returns 1 if a layer has a window though no key says so: the last ones, those that do not turn,
// or all but every n-th one.
static inline int hf_slides_by_default_(const HfConfig_* config, int l) {
    return config->family->unrotated_every > 0 ? layer_is_in(config->cfg.unrotated, l)
           : config->full_every > 0            ? (l + 1) % config->full_every != 0
                                               : l >= config->full_layers;
}

// Forgets positions of layers with a window if there are none, or if all layers have the same.
static inline void hf_config_settle_window_rope_(ModelConfig* cfg) {
    const int is_same = cfg->window_rope_base == cfg->rope_base &&
                        memcmp(&cfg->window_scaling, &cfg->scaling, sizeof(cfg->scaling)) == 0;
    if (cfg->window == 0 || is_same) {
        cfg->window_rope_base = 0;
        memset(&cfg->window_scaling, 0, sizeof(cfg->window_scaling));
    }
}

// Decides which layers have a window; a missing list of layer_types follows from older keys.
static inline int hf_config_windows_(HfConfig_* config, const char* path, char* error) {
    ModelConfig* cfg = &config->cfg;
    const WindowsKind kind = model_architecture(cfg->arch)->windows;
    const int W = config->has_windows ? cfg->window : 0;
    const int has_types = config->num_layer_types > 0;
    int any = 0;
    if (has_types && config->num_layer_types != cfg->L) {
        return error_set(error, path, "layer_types has %d layers, wanted %d", config->num_layer_types,
                         cfg->L);
    }
    if (!has_types && W > 0 && config->full_every < 0) {
        return error_set(error, path,
                         "sliding_window_pattern has letters, wanted layer_types, too, or a number");
    }
    for (int l = 0; l < cfg->L; l++) {
        const int by_size = W > 0 && (kind == WINDOWS_ALL || hf_slides_by_default_(config, l));
        const int slides = has_types ? config->slides[l] : by_size;
        if (has_types && (kind == WINDOWS_ANY ? slides && W == 0 : slides != by_size)) {
            return error_set(error, path, "layer %d is %s in layer_types, but %s", l,
                             slides ? "sliding_attention" : "full_attention",
                             W > 0 ? "all layers have the sliding_window"
                                   : "the model has no sliding_window");
        }
        const int rests = config->family->rests_without_window && W > 0 && !slides;
        cfg->windows[l / 8] |= (uint8_t)(slides << l % 8);
        cfg->unrotated[l / 8] |= (uint8_t)(rests << l % 8);
        any |= slides;
    }
    cfg->window = any ? W : 0;
    hf_config_settle_window_rope_(cfg);
    return 1;
}

// ---- layers without attention ----

// Reads the numbers of the layers with attention.
static inline int hf_read_attends_(JsonReader* text, HfConfig_* config) {
    size_t l;
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    config->has_attends = 1;
    JsonWalk walk = json_walk(text, '[');
    while (json_step(&walk, NULL)) {
        if (!json_natural(text, &l)) {
            return 0;
        }
        if (l < MODEL_MAX_LAYERS) {
            layer_add(config->attends, (int)l);
        }
    }
    return walk.ok;
}

// Decides which layers have a mixer; hf_config_windows_ checks the length of layer_types.
static inline void hf_config_mixed_(HfConfig_* config) {
    ModelConfig* cfg = &config->cfg;
    for (int l = 0; l < cfg->L && config->family->mixed_type; l++) {
        const int every = config->attention_every,
                  by_interval = cfg->arch == ARCH_QWEN35 && (l + 1) % every != 0,
                  by_list = config->has_attends && !layer_is_in(config->attends, l);
        if (config->num_layer_types > 0 ? config->mixes[l] : by_interval || by_list) {
            layer_add(cfg->mixed, l);
        }
    }
}

#endif
