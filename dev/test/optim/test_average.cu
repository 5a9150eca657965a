// test_average.cu -- the average of the weights on the GPU has the bits of the CPU's, for all kinds
// of master weights, and parameters are set to it.
#include "llmc/optim/optimizer.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/map_ops.h"

static const ModelConfig SMALL = {5, 60, 64, 3, 2, 20, SHARE_OFF};

// A model's parameters and state on the device, and the state on the host, whose average is the
// CPU's.
template <class T> struct Averaged {
    const Map* map;
    OptimizerState state, host;
    OptimizerPlan plan;
    Memory memory;
    OptimizerUpdate<T> u;
    size_t kept;              // elements of the parameters in memory
    float *widened, *on_host; // (kept) on the device, and on the host
};

// Returns n elements of a space on the device: random, and padding of zeros.
template <class T> static T* random_elements(const Map* map, MapSpace space, size_t n, const Gpu* gpu) {
    float *x = ops_floats(n), *random = ops_normal(n, 1);
    memset(x, 0, n * sizeof(float));
    for (int i = 0; i < map->num_buckets; i++) {
        MapRange range = {};
        while (map_next_range(map, &map->buckets[i], space, &range)) {
            const size_t at = map_range_at(map, &range, space);
            memcpy(x + at, random + at, range.count * sizeof(float));
        }
    }
    return upload<T>(x, n, 0, gpu);
}

template <class T>
static void averaged_open(Averaged<T>* a, const Map* map, Optimizer optimizer, const Gpu* gpu) {
    a->map = map;
    optimizer_state_open(&a->state, optimizer, map);
    a->memory = memory_on_gpu();
    optimizer_open<T>(&a->plan, &a->memory, &a->state);
    optimizer_state_take(&a->state, &a->memory);
    a->host = a->state;
    a->host.memory = ops_floats(a->state.bytes / sizeof(float) + 1);
    memset(a->host.memory, 0, a->state.bytes);
    a->kept = map->totals.elements[MAP_PARAMETERS];
    a->widened = (float*)gpu_alloc(a->kept, sizeof(float), "test");
    a->on_host = ops_floats(a->kept);
    a->u = OptimizerUpdate<T>{random_elements<T>(map, MAP_KEPT, a->kept, gpu),
                              {NULL, DTYPE_FP32},
                              {NULL},
                              &a->plan,
                              {},
                              7,
                              NULL,
                              NULL,
                              0};
    a->u.grads.data = random_elements<float>(map, map_update_space(map), a->kept, gpu);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        a->u.slots[slot] = state_slot_array(&a->state, slot);
    }
}

template <class T> static void averaged_close(Averaged<T>* a) {
    CUDA_CHECK(cudaDeviceSynchronize());
    gpu_free(a->u.grads.data);
    gpu_free(a->u.params);
    gpu_free(a->widened);
    memory_close(&a->memory);
}

// Returns the weights of a range.
template <class T> static float* weights_of(const Averaged<T>* a, const MapRange* range, const Gpu* gpu) {
    const Weights<T> weights = weights_from(update_weights(a->u), map_range_at(a->map, range, MAP_KEPT),
                                            map_range_at(a->map, range, MAP_OWNED));
    weights_widen(a->widened, weights, ceil_div(range->count, (size_t)WEIGHTS_PIECE) * WEIGHTS_PIECE, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaMemcpy(a->on_host, a->widened, range->count * sizeof(float), cudaMemcpyDeviceToHost));
    return a->on_host;
}

template <class T> static T* params_of(const Averaged<T>* a, const Gpu* gpu) {
    T* params = (T*)ops_floats(a->kept);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaMemcpy((void*)params, a->u.params, a->kept * sizeof(T), cudaMemcpyDeviceToHost));
    return params;
}

// Makes an update on the device, and adds the same weights on the host.
template <class T> static void make_update(Averaged<T>* a, int t, const Gpu* gpu) {
    a->u.update = Update{0.01f,           0.9f,  0.95f, 1e-8f,         0.1f, 0.5f, t, DECAY_ALL, 0.75f,
                         ADAFACTOR_FIXED, 0.02f, 0,     MUON_SPECTRAL, 2,    t};
    optimizer_update(a->u, gpu);
    for (int i = 0; i < a->map->num_buckets; i++) {
        const Bucket* b = &a->map->buckets[i];
        MapRange range = {};
        while (b->kind == MAP_TRAINED && map_next_range(a->map, b, MAP_OWNED, &range)) {
            optimizer_average_cpu(&a->host, &range, weights_of(a, &range, gpu), a->u.update);
        }
    }
}

template <class T> static void expect_average(const char* what, const Averaged<T>* a) {
    const StateSlot* slot = &a->state.slots[STATE_AVERAGE];
    char* got = (char*)ops_floats(slot->bytes / sizeof(float) + 1);
    CUDA_CHECK(cudaMemcpy(got, a->u.slots[STATE_AVERAGE], slot->bytes, cudaMemcpyDeviceToHost));
    EXPECT(slot->bytes > 0 && memcmp(got, state_slot_array(&a->host, STATE_AVERAGE), slot->bytes) == 0,
           "%s: the average after update %d", what, (int)a->u.update.t);
}

template <class T> static T rounded_as(MasterWeights master, float x) {
    if constexpr (DTYPE_OF(T) == DTYPE_BF16) {
        return master == MASTER_SPLIT ? split_float<uint16_t>(x).upper
               : master == MASTER_24  ? split_float<int8_t>(x).upper
                                      : from_float<T>(x);
    }
    return from_float<T>(x);
}

// The parameters are the average where there is one, and else as before.
template <class T> static void expect_shown(const char* what, Averaged<T>* a, const Gpu* gpu) {
    T* before = params_of(a, gpu);
    a->u.shows_average = 1;
    optimizer_update(a->u, gpu);
    T *after = params_of(a, gpu), *want = before;
    size_t shown = 0;
    for (int i = 0; i < a->map->num_buckets; i++) {
        const Bucket* b = &a->map->buckets[i];
        MapRange range = {};
        while (b->kind == MAP_TRAINED && map_next_range(a->map, b, MAP_OWNED, &range)) {
            const size_t kept = map_range_at(a->map, &range, MAP_KEPT);
            optimizer_show_average_cpu(&a->host, &range, a->on_host);
            for (size_t k = 0; k < range.count; k++) {
                want[kept + k] = rounded_as<T>(a->state.optimizer.master, a->on_host[k]);
            }
            shown += range.count;
        }
    }
    EXPECT(shown > 0 && memcmp((void*)after, (void*)want, a->kept * sizeof(T)) == 0,
           "%s: the average is shown", what);
}

template <class T>
static void test_average(const char* what, MasterWeights master, int stage, const char* frozen,
                         const Gpu* gpu) {
    Averaged<T> a;
    Optimizer optimizer = optimizer_of(OPTIMIZER_ADAMW, 0, master);
    const Freeze freeze = freeze_of(SMALL, frozen);
    optimizer.frozen = freeze.rows;
    EXPECT(average_parse(&optimizer.average, "ema:0.9"), "an average");
    const MapOf of = map_ops_of(SMALL, optimizer, stage, stage > 0 ? 3 : 1, &freeze);
    averaged_open(&a, map_ops(&of, stage > 0 ? 1 : 0), optimizer, gpu);
    for (int t = 1; t <= 5; t++) {
        make_update(&a, t, gpu);
        expect_average(what, &a);
    }
    expect_shown(what, &a, gpu);
    averaged_close(&a);
    ops_close(what);
}

TEST(average) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    UNSANITIZED(test_average<float>("fp32", MASTER_NONE, 0, "", &gpu));
    test_average<bf16>("rounded stochastically", MASTER_NONE, 0, "", &gpu);
    test_average<bf16>("fp32 master weights, a shard", MASTER_FP32, 1, "", &gpu);
    test_average<bf16>("split master weights, frozen ones", MASTER_SPLIT, 0, "wpe,fcw,blocks[0]", &gpu);
    test_average<bf16>("master weights of 24 bits", MASTER_24, 0, "wpe,fcw,blocks[0]", &gpu);
    test_average<bf16>("some frozen in one block only", MASTER_FP32, 0, "wpe,attention[1]", &gpu);
    gpu_close(&gpu);
}
