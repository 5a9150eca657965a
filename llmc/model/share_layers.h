/*
share_layers.h -- --share-layers: layers that share parameters.

    off          each layer has its own parameters
    all          all layers share all parameters
    pairs        layers 0 and 1 share all parameters, and so do 2 and 3, ...
    loop:K       layers 0 ... K-1 are repeated: layer l has the parameters of layer l mod K

The computation is that of a model whose layers have equal parameters; the gradient of a parameter
is the sum over its layers. Memory, optimizer state and traffic count each parameter once. Files of
models have every layer.

Lan et al., "ALBERT", 2019: all. Liu et al., "MobileLLM", 2024: pairs.
*/
#ifndef LLMC_SHARE_LAYERS_H
#define LLMC_SHARE_LAYERS_H

#include "llmc/model/model.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- the option ----

// Sets ModelConfig's `share` from the option, for a model of L layers. Returns 0 and the reason in
// `error` if the text is invalid, or does not fit L.
int share_parse(int* share, int L, const char* text, char* error);

// Returns 1 if layers that share parameters have the same ones; if not, 0 and why in `error`.
int share_check(ModelConfig cfg, char* error);

// ---- the backward pass ----

// Returns 1 if several blocks are repeated: other layers lie between two that share parameters.
static inline int share_is_loop(ModelConfig cfg) {
    return cfg.share > SHARE_LOOP + 1 && cfg.share < SHARE_LOOP + cfg.L;
}

// Returns the mode for the gradients of layer l, in a pass with `mode`: they are added to the
// gradients of the layers above that share the parameters, which the backward pass reaches first.
static inline GradientMode share_gradient_mode(ModelConfig cfg, int l, GradientMode mode) {
    const int repeats = model_copy_repeats(cfg),
              is_last_round = l / repeats + model_copies(cfg) >= cfg.L / repeats;
    return l % repeats == repeats - 1 && is_last_round ? mode : GRADIENT_ADD;
}

#ifdef __cplusplus
}
#endif

#ifdef SHARE_LAYERS_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

// Returns the K of "loop:K", 0 for any other text.
static int share_loop_(const char* text) {
    const char *prefix = "loop:", *number = text + strlen(prefix);
    const int is_loop = strncmp(text, prefix, strlen(prefix)) == 0;
    const size_t digits = is_loop ? strspn(number, "0123456789") : 0;
    return 0 < digits && digits < 5 && !number[digits] ? atoi(number) : 0;
}

int share_parse(int* share, int L, const char* text, char* error) {
    const int is_off = strcmp(text, "off") == 0, is_pairs = strcmp(text, "pairs") == 0,
              is_gone = strcmp(text, "attention") == 0 || strcmp(text, "mlp") == 0,
              blocks = strcmp(text, "all") == 0 ? 1 : share_loop_(text),
              multiple = is_off     ? 1
                         : is_pairs ? 2
                                    : blocks;
    *share = is_off ? SHARE_OFF : is_pairs ? SHARE_PAIRS : SHARE_LOOP + blocks;
    if (multiple == 0) {
        return error_set(error, "--share-layers",
                         "'%s'; wanted off, all, pairs or loop:K with K of 1 or more%s", text,
                         is_gone ? "; all shares attention and MLP, and --model reads the weights of a run "
                                   "that shared one of them"
                                 : "");
    }
    return L % multiple == 0 || error_set(error, "--share-layers",
                                          "%s with %d layers; wanted a multiple of %d", text, L, multiple);
}

int share_check(ModelConfig cfg, char* error) {
    for (int l = 0; l < cfg.L; l++) {
        static const LayersKind kinds[] = {LAYERS_EXPERTS, LAYERS_ATTENTION, LAYERS_VALUES};
        static const char* const words[] = {"experts", "attention", "a value embedding"};
        const int lowest = model_group_layer(cfg, model_group(cfg, l));
        for (int i = 0; i < 3; i++) {
            const int has = model_layer_has(cfg, kinds[i], l);
            if (has != model_layer_has(cfg, kinds[i], lowest)) {
                return error_set(error, "--share-layers",
                                 "layers %d and %d would share parameters, but only layer %d has %s", lowest,
                                 l, has ? l : lowest, words[i]);
            }
        }
    }
    return 1;
}

#endif // SHARE_LAYERS_IMPLEMENTATION

#endif
