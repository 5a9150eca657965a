/*
map_test.h -- random models and grids for tests of the map.
*/
#ifndef DEV_MAP_TEST_H
#define DEV_MAP_TEST_H

#include "llmc/base/rand.h"
#include "llmc/model/map_walk.h"

static inline int below(Rand* random, int n) { return (int)rand_below(random, (uint32_t)n); }

static inline int one_of(Rand* random, const int* values, int count) { return values[below(random, count)]; }

// Returns a tiny model of any architecture.
static inline ModelConfig random_model(Rand* random) {
    static const int heads[] = {4, 8}, words[] = {100, 517, 1000};
    ModelConfig cfg;
    memset(&cfg, 0, sizeof(cfg));
    cfg.arch = (Arch)below(random, ARCH_COUNT);
    cfg.L = 1 + below(random, 6);
    cfg.max_T = 40;
    cfg.NH = one_of(random, heads, 2);
    cfg.KV = below(random, 2) ? 4 : 0;
    cfg.C = cfg.NH * 8;
    cfg.F = 32 * (1 + below(random, 3));
    cfg.V = one_of(random, words, 3);
    cfg.has_head = below(random, 2);
    if (model_architecture(cfg.arch)->router != ROUTER_NONE) {
        cfg.E = 12;
        cfg.E_used = 2;
        cfg.Fs = below(random, 2) ? 32 : 0;
    }
    cfg.share = cfg.L % 2 == 0 && below(random, 4) == 0 ? SHARE_PAIRS : SHARE_OFF;
    return cfg;
}

// Returns settings of a model that pass the checks of grids.
static inline MapOf random_grid(Rand* random, ModelConfig cfg) {
    static const int tensors[] = {1, 1, 2, 4}, data[] = {1, 2, 3, 4, 6};
    static const char* const lists[] = {"", "", "wte", "*b", "blocks", "ln*", "attention,mlp"};
    MapOf of = map_of_model(cfg);
    const HeadsKind heads = model_architecture(cfg.arch)->heads;
    of.tensor = cfg.E > 0 || heads == HEADS_ROW_NORM ? 1 : one_of(random, tensors, 4);
    of.whole.Vp = model_padded_vocab_of_ranks(cfg.V, of.tensor);
    of.data = of.replica = one_of(random, data, 5);
    of.stage = below(random, 4);
    if (cfg.E > 0 && of.stage < 3 && of.data % 2 == 0 && below(random, 2)) {
        of.experts = 2;
    } else if (of.data % 2 == 0 && below(random, 3) == 0) {
        of.replica = of.data / 2;
    }
    const int unit = model_copy_repeats(cfg);
    if (of.stage < 3 && cfg.L >= 2 * unit && below(random, 2)) {
        of.pipeline = 2;
        of.layers[0] = unit * (1 + below(random, cfg.L / unit - 1));
        of.layers[1] = cfg.L - of.layers[0];
    }
    char error[ERROR_BYTES];
    if (!freeze_parse(&of.freeze, of.whole, lists[below(random, 7)], error)) {
        of.freeze = freeze_of(of.whole, "");
    }
    of.ring_gradients = of.stage >= 2 ? 1 + below(random, 2) : 0;
    of.ring_parameters = of.stage == 3 ? 2 : 0;
    return of;
}

static inline MapOf random_of(Rand* random) { return random_grid(random, random_model(random)); }

static inline int ranks_of(const MapOf* of) { return of->tensor * of->data * of->pipeline; }

#endif
