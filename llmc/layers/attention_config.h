/*
attention_config.h -- attention of a model: its sizes, and the settings of its rotary positions.
*/
#ifndef LLMC_ATTENTION_CONFIG_H
#define LLMC_ATTENTION_CONFIG_H

#include "llmc/base/token_chunks.h"
#include "llmc/model/model.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/rope.h"

static inline AttentionSizes attention_config_sizes(ModelConfig cfg, int B, int T) {
    AttentionSizes sizes = attention_sizes(B, T, cfg.NH, model_key_heads(cfg), model_head_size(cfg));
    sizes.root = cfg.attention_scale > 0 ? 1.0f / cfg.attention_scale : sizes.root;
    sizes.cap = cfg.attention_softcap;
    return sizes;
}

// Returns the sizes for a rank's T tokens of each sequence.
static inline AttentionSizes attention_config_chunks(ModelConfig cfg, int B, int T, TokenChunks chunks) {
    AttentionSizes sizes = attention_config_sizes(cfg, B, T);
    sizes.chunks = chunks;
    return sizes;
}

// Returns true if queries and keys have rotary positions.
static inline int attention_config_has_rope(ModelConfig cfg) {
    return model_architecture(cfg.arch)->positions == POSITIONS_ROPE;
}

// Returns the settings of the table for up to T tokens.
static inline RopeSettings attention_config_rope(ModelConfig cfg, int T) {
    const RopeSettings settings = {T, model_head_size(cfg), model_rope_dims(cfg), model_rope_base(cfg),
                                   cfg.scaling};
    return settings;
}

#endif
