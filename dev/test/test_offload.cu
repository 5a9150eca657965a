// test_offload.cu -- an update with its state on the host has the bits of one without, chunk by chunk.
#define OFFLOAD_CHUNK ((size_t)3072) // many chunks, and a smaller one at the end
#include "llmc/offload.cuh"
#include "gpu_ops.h"

enum { UPDATES = 3 };
static const GPT2Config SMALL = {5, 60, 64, 3, 2, 20};

// Parameters, master weights, m and v.
typedef struct {
    size_t n;
    float *params, *master, *m, *v; // fp32, in host memory
} State;

// A value is a function of its place: the padding is updated like everything else.
static State state_open(size_t n) {
    const State s = {n, ops_normal(n, 1), ops_normal(n, 1), ops_normal(n, 0.1f), ops_normal(n, 0.1f)};
    for (size_t i = 0; i < n; i++) {
        s.v[i] = fabsf(s.v[i]);
    }
    return s;
}

static float* pinned(const float* x, size_t n) {
    float* memory;
    CUDA_CHECK(cudaMallocHost((void**)&memory, n * sizeof(float)));
    memcpy(memory, x, n * sizeof(float));
    return memory;
}

static AdamW adamw_of(int update) {
    const AdamW opt = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, update};
    return opt;
}

// The state after some updates by way of the host. A gradient stays as it is.
template <class T>
static State by_host(State s, Gradient grads, const AdamWPlan* plan, int has_master, const Gpu* gpu) {
    Offload offload;
    offload_open(&offload);
    T* params = upload<T>(ops_copy(s.params, s.n), s.n, 0, gpu);
    float *master = has_master ? pinned(s.master, s.n) : NULL, *m = pinned(s.m, s.n), *v = pinned(s.v, s.n);
    for (int t = 1; t <= UPDATES; t++) {
        offload_adamw_update(&offload, params, master, grads, m, v, plan, adamw_of(t), 7, gpu);
    }
    offload_wait(&offload);
    const State after = {s.n, download(params, s.n, gpu), has_master ? ops_copy(master, s.n) : s.master,
                         ops_copy(m, s.n), ops_copy(v, s.n)};
    CUDA_CHECK(cudaFreeHost(v));
    CUDA_CHECK(cudaFreeHost(m));
    CUDA_CHECK(cudaFreeHost(master));
    gpu_free(params);
    offload_close(&offload);
    return after;
}

// And with all of it on the GPU.
template <class T>
static State by_gpu(State s, Gradient grads, const AdamWPlan* plan, int has_master, const Gpu* gpu) {
    T* params = upload<T>(ops_copy(s.params, s.n), s.n, 0, gpu);
    float *master = has_master ? upload<float>(s.master, s.n, 0, gpu) : NULL,
          *m = upload<float>(s.m, s.n, 0, gpu), *v = upload<float>(s.v, s.n, 0, gpu);
    for (int t = 1; t <= UPDATES; t++) {
        adamw_update(params, master, grads, m, v, plan, adamw_of(t), 7, gpu);
    }
    const State after = {s.n, download(params, s.n, gpu), has_master ? download(master, s.n, gpu) : s.master,
                         download(m, s.n, gpu), download(v, s.n, gpu)};
    gpu_free(v);
    gpu_free(m);
    gpu_free(master);
    gpu_free(params);
    return after;
}

template <class T>
static void test_same_bits(const char* what, int stage, int size, int has_master, const Gpu* gpu) {
    TensorRow rows[GPT2_PARAMETER_ROWS];
    const ZeroPlan zero = zero_plan(SMALL, stage, 0, size);
    const size_t n = zero_owned_elements(&zero);
    AdamWPlan plan;
    gpt2_sharded_rows_of(rows, SMALL, 1, size);
    adamw_open(&plan, &zero, rows);
    EXPECT(n > 6 * OFFLOAD_CHUNK && n % OFFLOAD_CHUNK, "%s: %zu elements are no test", what, n);
    const State s = state_open(n);
    float* gradient = upload<float>(ops_normal(n, 1), n, 0, gpu);
    const Gradient grads = {gradient, DTYPE_FP32};
    const State got = by_host<T>(s, grads, &plan, has_master, gpu),
                want = by_gpu<T>(s, grads, &plan, has_master, gpu);
    EXPECT(ops_same_bits(got.params, want.params, n), "%s: parameters", what);
    EXPECT(ops_same_bits(got.master, want.master, n), "%s: master weights", what);
    EXPECT(ops_same_bits(got.m, want.m, n) && ops_same_bits(got.v, want.v, n), "%s: m or v", what);
    EXPECT(!ops_same_bits(got.params, s.params, n) && !ops_same_bits(got.m, s.m, n),
           "%s: nothing was updated", what);
    gpu_free(gradient);
    adamw_close(&plan);
    ops_close(what);
}

int main(void) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_same_bits<float>("fp32", 0, 1, 0, &gpu);
    test_same_bits<bf16>("bf16 with master weights", 0, 1, 1, &gpu);
    test_same_bits<bf16>("bf16, rounded stochastically", 0, 1, 0, &gpu);
    test_same_bits<bf16>("a shard of stage 3", 3, 1, 1, &gpu);
    gpu_close(&gpu);
    return test_done("offload");
}
