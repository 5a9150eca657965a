/*
router_bias.cuh -- the biases of a model's routers on the GPU: in fp32, in an array beside the
parameters, whatever floatX is. 16 bits would round away what an update moves them by.

All ranks have the biases of all their layers, and move them alike. They are files' tensors as the
parameters are: transfer.cuh sets and copies them. A run without master weights saves its weights in
16 bits; there each move rounds the biases, too, stochastically as an update rounds weights
(master_weights.cuh).
*/
#ifndef LLMC_ROUTER_BIAS_CUH
#define LLMC_ROUTER_BIAS_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/base/memory.h"
#include "llmc/base/rand.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/master_weights.cuh"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/router_bias.h"

typedef struct {
    float *host, *device; // (copies, E), the same; NULL: no router has any
    int copies, E;
    int is_narrow;         // they are rounded to floatX
    uint64_t seed, stream; // of the random words of rounding
} RouterBiasesGpu;

static inline void router_biases_open(RouterBiasesGpu* b, Memory* memory, const Map* map, int is_narrow,
                                      uint64_t seed) {
    const ModelConfig cfg = map->cfg;
    const TensorRow* row = &map->rows[offsetof(ModelParameters, routerb) / sizeof(floatX*)];
    *b = {NULL, NULL, router_bias_exists(cfg) ? model_copies(cfg) : 0, cfg.E, is_narrow, seed, row->stream};
    const size_t bytes = (size_t)b->copies * b->E * sizeof(float);
    if (bytes > 0) {
        b->host = (float*)memory_take(memory, "biases of routers", MEMORY_HOST, bytes);
        b->device = (float*)memory_take(memory, "biases of routers", MEMORY_DEVICE, bytes);
    }
}

// Return the bias (E) of layer l on the GPU, or NULL; and on the host, which exists.
static inline const float* router_biases_at(const RouterBiasesGpu* b, ModelConfig cfg, int l) {
    return b->device ? b->device + (size_t)model_copy(cfg, l) * b->E : NULL;
}
static inline float* router_biases_host(const RouterBiasesGpu* b, ModelConfig cfg, int l) {
    return b->host + (size_t)model_copy(cfg, l) * b->E;
}

// Copies the biases to the GPU, after all work that is queued there.
static inline void router_biases_send(const RouterBiasesGpu* b, const Gpu* gpu) {
    if (b->device) {
        gpu_copy(b->device, b->host, (size_t)b->copies * b->E * sizeof(float), gpu);
    }
}

// Sets biases on the host, `to` among them.
static inline void router_biases_set(const RouterBiasesGpu* b, float* to, const float* from, size_t count) {
    for (size_t i = 0; i < count; i++) {
        to[i] = b->is_narrow ? to_float(from_float<floatX>(from[i])) : from[i];
    }
}

// Moves the biases after an update, given the statistics of all routers of the whole model.
static inline void router_biases_move(RouterBiasesGpu* b, ModelConfig cfg, const Freeze* freeze,
                                      const double* statistics, Update update, const Gpu* gpu) {
    for (int l = 0; l < cfg.L; l++) {
        if (!router_bias_moves(cfg, freeze, l)) {
            continue;
        }
        float* bias = router_biases_host(b, cfg, l);
        router_bias_move(bias, cfg, l, statistics, update.router_bias_rate);
        for (int e = 0; e < b->E && b->is_narrow; e++) {
            const uint64_t word = ((uint64_t)(cfg.part.first_layer + l) << STATE_WORD_LAYER) + (uint64_t)e;
            const RandBlock random = rand_block(b->seed, b->stream + (uint64_t)update.t, word / 4);
            bias[e] = to_float(round_stochastic<floatX>(bias[e], random.word[word % 4]));
        }
    }
    router_biases_send(b, gpu);
}

#endif
