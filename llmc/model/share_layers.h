/*
share_layers.h -- --share-layers: layers with the same parameters.

    off          each layer has its own
    all          all have the same
    attention    all have the same attention, with the norm before it; each its own MLP
    mlp          all have the same MLP, with the norm before it; each its own attention
    pairs        layers 0 and 1 have the same, 2 and 3, ...
    loop:K       layers 0 ... K-1 are repeated: layer l has what layer l mod K has

The computation is that of a model whose layers have equal parameters; the gradient of a parameter is the sum over its
layers. Memory, optimizer state and traffic count each parameter once. Files of models have every layer.

Lan et al., "ALBERT", 2019: all, attention, mlp. Liu et al., "MobileLLM", 2024: pairs.

needs:   nothing
*/
#ifndef LLMC_SHARE_LAYERS_H
#define LLMC_SHARE_LAYERS_H

#include "llmc/model/model.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- the option ----

// Sets ModelConfig's `share` from the option, for a model of L layers. Returns 0 and the reason in `error` if it means nothing
// there.
int share_parse(int* share, int L, const char* text, char* error);

// ---- the backward pass ----

// Whether several blocks are repeated: between two layers with the same parameters there are others.
static inline int share_is_loop(ModelConfig cfg) {
    return cfg.share > SHARE_LOOP + 1 && cfg.share < SHARE_LOOP + cfg.L;
}

// Whether the pass comes to layer l before all others with the same parameters of this part: it is the highest.
static inline int share_is_highest_(ModelConfig cfg, TensorPart part, int l) {
    const int repeats = model_copy_repeats(cfg),
              is_last_round = l / repeats + model_copies(cfg) >= cfg.L / repeats;
    return model_place(cfg, part) == PLACE_ONCE ? l == cfg.L - 1
                                                : l % repeats == repeats - 1 && is_last_round;
}

// How the gradients of a part of layer l are left, where `mode` is that of the pass: they are added to those of the layers
// above with the same parameters.
static inline GradientMode share_gradient_mode(ModelConfig cfg, TensorPart part, int l, GradientMode mode) {
    return share_is_highest_(cfg, part, l) ? mode : GRADIENT_ADD;
}

#ifdef __cplusplus
}
#endif

#ifdef SHARE_LAYERS_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

// K of "loop:K", 0 if the text is nothing like it.
static int share_loop_(const char* text) {
    const char *prefix = "loop:", *number = text + strlen(prefix);
    const int is_loop = strncmp(text, prefix, strlen(prefix)) == 0;
    const size_t digits = is_loop ? strspn(number, "0123456789") : 0;
    return 0 < digits && digits < 5 && !number[digits] ? atoi(number) : 0;
}

int share_parse(int* share, int L, const char* text, char* error) {
    static const char* const words[] = {"off", "attention", "mlp", "pairs"}; // of SHARE_OFF, ...
    const int blocks = strcmp(text, "all") == 0 ? 1 : share_loop_(text);
    int word = SHARE_OFF;
    *share = SHARE_OFF;
    while (word < SHARE_LOOP && strcmp(text, words[word]) != 0) {
        word++;
    }
    if (word == SHARE_LOOP && blocks == 0) {
        return error_set(error, "--share-layers",
                         "'%s'; wanted off, all, attention, mlp, pairs or loop:K with K of 1 or more", text);
    }
    if ((word == SHARE_PAIRS && L % 2) || (word == SHARE_LOOP && L % blocks)) {
        return error_set(error, "--share-layers", "%s with %d layers; wanted a multiple of %d", text, L,
                         word == SHARE_PAIRS ? 2 : blocks);
    }
    *share = word == SHARE_LOOP ? SHARE_LOOP + blocks : word;
    return 1;
}

#endif // SHARE_LAYERS_IMPLEMENTATION

#endif
