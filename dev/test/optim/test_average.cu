// test_average.cu -- the average of the weights on the GPU has the bits of the CPU's, for all kinds
// of master weights, and parameters are set to it.
#include "llmc/optim/optimizer.cuh"
#include "dev/test/lib/gpu_ops.h"

static const ModelConfig SMALL = {5, 60, 64, 3, 2, 20, SHARE_OFF};

// A model's parameters and state on the device, and the state on the host, whose average is the
// CPU's.
template <class T> struct Averaged {
    ZeroPlan zero;
    OptimizerState state, host;
    OptimizerPlan plan;
    Memory memory;
    OptimizerUpdate<T> u;
    size_t kept, pieces; // elements of the parameters in memory; of the largest piece
    float* widened;      // (pieces) on the device
};

template <class T>
static void averaged_open(Averaged<T>* a, ZeroPlan zero, Optimizer optimizer, const Gpu* gpu) {
    a->zero = zero;
    optimizer_state_open(&a->state, optimizer, &a->zero, SMALL);
    a->memory = memory_on_gpu();
    optimizer_open<T>(&a->plan, &a->memory, &a->zero, &a->state);
    optimizer_state_take(&a->state, &a->memory);
    a->host = a->state;
    a->host.memory = ops_floats(a->state.bytes / sizeof(float) + 1);
    memset(a->host.memory, 0, a->state.bytes);
    a->kept = zero_group_begin(&zero, zero.groups);
    a->pieces = zero_largest_group(&zero);
    a->widened = (float*)gpu_alloc(a->pieces, sizeof(float), "test");
    a->u = OptimizerUpdate<T>{upload<T>(ops_normal(a->kept, 1), a->kept, 0, gpu),
                              {NULL, DTYPE_FP32},
                              {NULL},
                              &a->plan,
                              {},
                              7,
                              NULL,
                              NULL,
                              0};
    a->u.grads.data = upload<float>(ops_normal(a->kept, 1), a->kept, 0, gpu);
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

// Returns this rank's weights of group g.
template <class T> static float* weights_of(const Averaged<T>* a, int g, const Gpu* gpu) {
    const ZeroPiece piece = zero_piece(&a->zero, g, ZERO_TRAINED);
    float* weights = ops_floats(piece.count + 1);
    if (piece.count > 0) {
        weights_widen(a->widened, weights_from(update_weights_(a->u), piece.kept, piece.owned), piece.count,
                      gpu);
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        CUDA_CHECK(cudaMemcpy(weights, a->widened, piece.count * sizeof(float), cudaMemcpyDeviceToHost));
    }
    return weights;
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
    for (int g = 0; g < a->zero.groups; g++) {
        optimizer_average_cpu(&a->host, weights_of(a, g, gpu), g, a->u.update);
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
    for (int g = 0; g < a->zero.groups; g++) {
        const ZeroPiece piece = zero_piece(&a->zero, g, ZERO_TRAINED);
        float* mean = ops_floats(piece.count + 1);
        for (size_t i = 0; i < piece.count; i++) {
            mean[i] = NAN;
        }
        optimizer_show_average_cpu(&a->host, mean, g);
        for (size_t i = 0; i < piece.count; i++) {
            const int has_one = mean[i] == mean[i];
            want[piece.kept + i] =
                has_one ? rounded_as<T>(a->state.optimizer.master, mean[i]) : before[piece.kept + i];
            shown += has_one;
        }
    }
    EXPECT(shown > 0 && memcmp((void*)after, (void*)want, a->kept * sizeof(T)) == 0,
           "%s: the average is shown", what);
}

template <class T>
static void test_average(const char* what, MasterWeights master, ZeroPlan zero, const Gpu* gpu) {
    Averaged<T> a;
    Optimizer optimizer = optimizer_of(OPTIMIZER_ADAMW, 0, master);
    optimizer.frozen = zero.frozen;
    EXPECT(average_parse(&optimizer.average, "ema:0.9"), "an average");
    averaged_open(&a, zero, optimizer, gpu);
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
    const ZeroPlan whole = zero_plan(SMALL, 0, 0, 1), shard = zero_plan(SMALL, 1, 1, 3);
    ZeroPlan frozen = whole;
    zero_plan_freeze(&frozen, SMALL, freeze_of(SMALL, "wpe,fcw").rows, 1);
    UNSANITIZED(test_average<float>("fp32", MASTER_NONE, whole, &gpu));
    test_average<bf16>("rounded stochastically", MASTER_NONE, whole, &gpu);
    test_average<bf16>("fp32 master weights, a shard", MASTER_FP32, shard, &gpu);
    test_average<bf16>("split master weights, frozen ones", MASTER_SPLIT, frozen, &gpu);
    test_average<bf16>("master weights of 24 bits", MASTER_24, frozen, &gpu);
    gpu_close(&gpu);
}
