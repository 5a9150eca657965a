/*
router_bias.h -- how an update moves the biases of a model's routers (router.h), on the CPU and the
GPU. Layers that share a router add up their tokens.
*/
#ifndef LLMC_ROUTER_BIAS_H
#define LLMC_ROUTER_BIAS_H

#include <stddef.h>

#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/ops/router.h"

// Returns 1 if routers have biases.
static inline int router_bias_exists(ModelConfig cfg) {
    return model_architecture(cfg.arch)->router == ROUTER_SIGMOID;
}

// Returns 1 if layer l is the first of those that share a router with a bias, which is not frozen.
static inline int router_bias_moves(ModelConfig cfg, const Freeze* freeze, int l) {
    const int routerw = (int)(offsetof(ModelParameters, routerw) / sizeof(floatX*));
    return router_bias_exists(cfg) && model_layer_has(cfg, LAYERS_EXPERTS, l) &&
           model_group_layer(cfg, model_group(cfg, l)) == l && !freeze_has(freeze, routerw, l);
}

// Adds the tokens that took each expert of the router of layer l, given the statistics of all
// routers of the whole model.
static inline void router_bias_add_taken_(double* taken, ModelConfig cfg, int l, const double* statistics) {
    const double* of = router_statistics_of((double*)statistics, cfg.part.first_layer + l, cfg.E);
    for (int e = 0; e < cfg.E; e++) {
        taken[e] += of[e];
    }
}

// Moves the bias (E) of layer l after an update.
static inline void router_bias_move(float* bias, ModelConfig cfg, int l, const double* statistics,
                                    float rate) {
    double taken[ROUTER_MAX_EXPERTS] = {0};
    for (int other = l; other < cfg.L; other++) {
        if (model_group(cfg, other) == model_group(cfg, l)) {
            router_bias_add_taken_(taken, cfg, other, statistics);
        }
    }
    router_move_bias(bias, taken, cfg.E, rate);
}

#endif
