/*
attention_config.h -- attention of a model: its sizes, and the rotary positions of its layers.
*/
#ifndef LLMC_ATTENTION_CONFIG_H
#define LLMC_ATTENTION_CONFIG_H

#include <string.h>

#include "llmc/base/token_chunks.h"
#include "llmc/model/config.h"
#include "llmc/model/part.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/latent.h"
#include "llmc/ops/rope.h"
#include "llmc/ops/value_embedding.h"

static inline AttentionSizes attention_config_sizes(ModelConfig cfg, int B, int T) {
    AttentionSizes sizes = attention_sizes(B, T, cfg.NH, model_key_heads(cfg), model_head_size(cfg));
    sizes.root = cfg.attention_scale > 0 ? 1.0f / cfg.attention_scale : sizes.root;
    sizes.cap = cfg.attention_softcap;
    return sizes;
}

// Returns the numbers (NH) of the heads of layer l of a part, among those of a whole model (layers,
// heads).
static inline double* attention_config_scores_at(double* all, ModelConfig part, int l) {
    const size_t heads = (size_t)model_of_part(part).NH, layer = (size_t)(part.part.first_layer + l);
    return all + layer * heads + (size_t)part.part.tensor_rank * (size_t)part.NH;
}

// Returns the sizes of latents for N tokens; rank 0: the model has none.
static inline LatentSizes attention_config_latents(ModelConfig cfg, int N) {
    const LatentSizes sizes = {N,
                               cfg.NH,
                               model_head_size(cfg),
                               cfg.rope_dims,
                               cfg.latent.value,
                               cfg.latent.query_rank,
                               model_has_latent(cfg) ? cfg.latent.rank : 0};
    return sizes;
}

// Returns the sizes for a rank's T tokens of each sequence.
static inline AttentionSizes attention_config_chunks(ModelConfig cfg, int B, int T, TokenChunks chunks) {
    AttentionSizes sizes = attention_config_sizes(cfg, B, T);
    sizes.chunks = chunks;
    return sizes;
}

// Return the sizes of value embeddings for N tokens, and the first element of layer l's table among
// those of all layers.
static inline ValueSizes attention_config_values(ModelConfig cfg, int N) {
    const ValueSizes sizes = {
        N, cfg.C, model_qkv_size(cfg), model_key_heads(cfg), model_head_size(cfg), model_value_gates(cfg)};
    return sizes;
}
static inline size_t attention_config_table(ModelConfig cfg, int l) {
    return (size_t)model_value_number(cfg, l) * (size_t)cfg.V * (size_t)model_keys(cfg);
}

// Return 1 if queries and keys of layer l turn, and if they do so by the window's own settings.
static inline int attention_config_rotates(ModelConfig cfg, int l) {
    return model_architecture(cfg.arch)->positions == POSITIONS_ROPE && !layer_is_in(cfg.unrotated, l);
}
static inline int attention_config_by_window(ModelConfig cfg, int l) {
    return cfg.window_rope_base > 0 && model_window(cfg, l) > 0;
}

// Returns the position at which a sequence being decoded is read again, with other angles; 0: none.
static inline int attention_config_rereads_at(ModelConfig cfg) {
    return cfg.scaling.kind == ROPE_LONG ? cfg.scaling.original_context : 0;
}

// Tables of rotary positions of a model: of all its layers, or of those without a window and those
// with one.
typedef struct {
    RopeTables all, windows;
} ModelRopes;

// Returns the settings of a table for up to T tokens, or of the table of layers with a window. They
// point into cfg.
static inline RopeSettings attention_config_rope(const ModelConfig* cfg, int is_window, int T) {
    const RopeSettings settings = {T,
                                   model_head_size(*cfg),
                                   model_rope_dims(*cfg),
                                   is_window ? cfg->window_rope_base : model_rope_base(*cfg),
                                   is_window ? cfg->window_scaling : cfg->scaling,
                                   &cfg->rope_factors};
    return settings;
}

// Opens the tables that the layers of a process need, for up to T tokens; `open` as in
// rope_tables_open.
static inline void attention_config_open_ropes(ModelRopes* ropes, Memory* memory, ModelConfig cfg, int T,
                                               void (*open)(Rope*, Memory*, RopeSettings)) {
    int has[2] = {0, 0}; // layers of all, of windows
    for (int l = 0; l < cfg.L; l++) {
        has[attention_config_by_window(cfg, l)] |= attention_config_rotates(cfg, l);
    }
    memset(ropes, 0, sizeof(*ropes));
    for (int w = 0; w < 2; w++) {
        if (has[w]) {
            rope_tables_open(w ? &ropes->windows : &ropes->all, memory, attention_config_rope(&cfg, w, T),
                             open);
        }
    }
}

// Returns the rotary positions of layer l in a pass whose sequences have `tokens` tokens; 0: a step
// of decoding.
static inline Rope attention_config_layer_rope(const ModelRopes* ropes, ModelConfig cfg, int l, int tokens) {
    const Rope none = {NULL, model_head_size(cfg)};
    const RopeTables* tables = attention_config_by_window(cfg, l) ? &ropes->windows : &ropes->all;
    return attention_config_rotates(cfg, l) ? rope_of_pass(tables, tokens) : none;
}

#endif
