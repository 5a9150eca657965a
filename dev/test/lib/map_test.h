/*
map_test.h -- random models and grids for tests of the map, and the optimizer's state in one.
*/
#ifndef DEV_MAP_TEST_H
#define DEV_MAP_TEST_H

#include "llmc/base/rand.h"
#include "llmc/model/map.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"

static inline int map_test_below(Rand* random, int n) { return (int)rand_below(random, (uint32_t)n); }

static inline int map_test_one_of(Rand* random, const int* values, int count) {
    return values[map_test_below(random, count)];
}

// Returns a tiny model of any architecture.
static inline ModelConfig map_test_model(Rand* random) {
    static const int heads[] = {4, 8}, words[] = {100, 517, 1000};
    ModelConfig cfg;
    memset(&cfg, 0, sizeof(cfg));
    cfg.arch = (Arch)map_test_below(random, ARCH_COUNT);
    cfg.L = 1 + map_test_below(random, 6);
    cfg.max_T = 40;
    cfg.NH = map_test_one_of(random, heads, 2);
    cfg.KV = map_test_below(random, 2) ? 4 : 0;
    cfg.C = cfg.NH * 8;
    cfg.F = 32 * (1 + map_test_below(random, 3));
    cfg.V = map_test_one_of(random, words, 3);
    cfg.has_head = map_test_below(random, 2);
    if (model_architecture(cfg.arch)->router != ROUTER_NONE) {
        cfg.E = 12;
        cfg.E_used = 2;
        cfg.Fs = map_test_below(random, 2) ? 32 : 0;
    }
    if (model_has_latent(cfg)) {
        cfg.KV = 0, cfg.rope_dims = 4, cfg.latent = (ModelLatent){map_test_below(random, 2) * 24, 16, 6, 0};
    }
    cfg.share = cfg.L % 2 == 0 && map_test_below(random, 4) == 0 ? SHARE_PAIRS : SHARE_OFF;
    if (model_architecture(cfg.arch)->router == ROUTER_SIGMOID && map_test_below(random, 3)) {
        cfg.dense_layers = map_test_below(random, cfg.L);
        cfg.dense_layers -= cfg.dense_layers % model_copy_repeats(cfg);
        cfg.Fe = cfg.dense_layers > 0 ? 32 : 0;
    }
    return cfg;
}

// Returns settings of a model that pass the checks of grids.
static inline MapOf map_test_grid(Rand* random, ModelConfig cfg) {
    static const int tensors[] = {1, 1, 2, 4}, data[] = {1, 2, 3, 4, 6};
    static const char* const lists[] = {"", "", "wte", "*b", "blocks", "ln*", "attention,mlp"};
    MapOf of = map_of_model(cfg);
    of.tensor = cfg.E > 0 ? 1 : map_test_one_of(random, tensors, 4);
    of.whole.Vp = model_padded_vocab_of_ranks(cfg.V, of.tensor);
    of.data = of.replica = map_test_one_of(random, data, 5);
    of.stage = map_test_below(random, 4);
    if (cfg.E > 0 && of.stage < 3 && of.data % 2 == 0 && map_test_below(random, 2)) {
        of.experts = 2;
    } else if (of.data % 2 == 0 && map_test_below(random, 3) == 0) {
        of.replica = of.data / 2;
    }
    const int unit = model_copy_repeats(cfg);
    if (of.stage < 3 && cfg.L >= 2 * unit && map_test_below(random, 2)) {
        of.pipeline = 2;
        of.layers[0] = unit * (1 + map_test_below(random, cfg.L / unit - 1));
        of.layers[1] = cfg.L - of.layers[0];
    }
    char error[ERROR_BYTES];
    if (!freeze_parse(&of.freeze, of.whole, lists[map_test_below(random, 7)], error)) {
        of.freeze = freeze_of(of.whole, "");
    }
    of.ring_gradients = of.stage >= 2 ? 1 + map_test_below(random, 2) : 0;
    of.ring_parameters = of.stage == 3 ? 2 : 0;
    return of;
}

static inline MapOf map_test_settings(Rand* random) { return map_test_grid(random, map_test_model(random)); }

static inline int map_test_ranks(const MapOf* of) { return of->tensor * of->data * of->pipeline; }

// Returns the settings of `size` data ranks in replicas of `replica`.
static inline MapOf map_test_data(ModelConfig cfg, int stage, int size, int replica) {
    MapOf of = map_of_model(cfg);
    of.stage = stage;
    of.data = size;
    of.replica = replica;
    return of;
}

// Returns how a rank of a map takes part in ZeRO.
static inline ZeroPlan map_test_plan(const MapOf* of, int rank) {
    const ZeroPlan plan = {of->stage, map_place(of, rank).data, of->data, of->replica, 1};
    return plan;
}

// Opens the state of an optimizer in a rank, with its map.
static inline void map_test_state(OptimizerState* s, Map* m, Memory* memory, MapOf of, int rank,
                                  Optimizer optimizer) {
    optimizer.frozen |= of.freeze.rows;
    optimizer_set_map(&of, optimizer);
    map_open(m, memory, MEMORY_HOST, &of, rank);
    optimizer_state_open(s, optimizer, m);
}

#endif
