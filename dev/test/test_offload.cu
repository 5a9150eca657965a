// test_offload.cu -- an update with its state on the host, or on a disk, has the bits of one without, chunk by chunk; and a
// residual stream that goes out and comes back is the same as before.
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

static Update update_of(int t) {
    const Update update = {{0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, t}, 0.9f};
    return update;
}

static const int SLOTS[] = {STATE_M, STATE_V, STATE_MASTER};

// The array in host memory that belongs to a slot.
static float* array_of(State* s, int slot) {
    return slot == STATE_M ? s->m : slot == STATE_V ? s->v : s->master;
}

// Moves all slots to the host or the disk, or back, in two pieces that end in the middle of a chunk, and of a unit of the
// disk.
static void move_slots(Offload* offload, State* s, int is_back) {
    for (int i = 0; i < 3; i++) {
        const size_t bytes = offload->layout.state->slots[SLOTS[i]].bytes,
                     first = bytes / 2 - bytes / 2 % 512 - 4;
        char* array = (char*)array_of(s, SLOTS[i]);
        for (int part = 0; part < 2 && bytes > 0; part++) {
            const size_t at = part ? first : 0, count = part ? bytes - first : first;
            if (is_back) {
                offload_read(offload, array + at, SLOTS[i], at, count);
            } else {
                offload_write(offload, array + at, SLOTS[i], at, count);
            }
        }
    }
}

// The state after some updates by way of the host, or of a disk in this directory. A gradient stays as it is.
template <class T>
static State by_host(State s, Gradient grads, const OptimizerPlan* plan, const ZeroPlan* zero,
                     const char* directory, const Gpu* gpu) {
    Offload offload;
    T *params = upload<T>(ops_copy(s.params, s.n), s.n, 0, gpu),
      *other = upload<T>(ops_copy(s.params, s.n), s.n, 0, gpu);
    offload_open(&offload, plan->state, zero, directory);
    // what an update wrote is overwritten, as by a rollback
    offload_update(&offload, OptimizerUpdate<T>{other, grads, {NULL}, plan, update_of(1), 7}, gpu);
    move_slots(&offload, &s, 0);
    for (int t = 1; t <= UPDATES; t++) {
        offload_update(&offload, OptimizerUpdate<T>{params, grads, {NULL}, plan, update_of(t), 7}, gpu);
    }
    State after = {s.n, NULL, ops_copy(s.master, s.n), ops_copy(s.m, s.n), ops_copy(s.v, s.n)};
    move_slots(&offload, &after, 1);
    // closed while an update is still written
    offload_update(&offload, OptimizerUpdate<T>{other, grads, {NULL}, plan, update_of(1), 7}, gpu);
    offload_close(&offload);
    after.params = download(params, s.n, gpu);
    gpu_free(other);
    gpu_free(params);
    return after;
}

// And with all of it on the GPU.
template <class T> static State by_gpu(State s, Gradient grads, const OptimizerPlan* plan, const Gpu* gpu) {
    OptimizerUpdate<T> u = {upload<T>(ops_copy(s.params, s.n), s.n, 0, gpu), grads, {NULL}, plan, {}, 7};
    for (int i = 0; i < 3; i++) {
        if (plan->state->slots[SLOTS[i]].bytes) {
            u.slots[SLOTS[i]] = upload<float>(array_of(&s, SLOTS[i]), s.n, 0, gpu);
        }
    }
    for (int t = 1; t <= UPDATES; t++) {
        u.update = update_of(t);
        optimizer_update(u, gpu);
    }
    State after = {s.n, download(u.params, s.n, gpu), s.master, s.m, s.v};
    after.m = u.slots[STATE_M] ? download((float*)u.slots[STATE_M], s.n, gpu) : s.m;
    after.v = u.slots[STATE_V] ? download((float*)u.slots[STATE_V], s.n, gpu) : s.v;
    after.master = u.slots[STATE_MASTER] ? download((float*)u.slots[STATE_MASTER], s.n, gpu) : s.master;
    for (int i = 0; i < 3; i++) {
        gpu_free(u.slots[SLOTS[i]]);
    }
    gpu_free(u.params);
    return after;
}

static void expect_same_bits(const char* what, const char* where, State got, State want) {
    EXPECT(ops_same_bits(got.params, want.params, want.n), "%s, %s: parameters", what, where);
    EXPECT(ops_same_bits(got.master, want.master, want.n), "%s, %s: master weights", what, where);
    EXPECT(ops_same_bits(got.m, want.m, want.n), "%s, %s: m", what, where);
    EXPECT(ops_same_bits(got.v, want.v, want.n), "%s, %s: v", what, where);
}

template <class T>
static void test_same_bits(const char* what, Optimizer optimizer, int stage, int size, const Gpu* gpu) {
    const ZeroPlan zero = zero_plan(SMALL, stage, 0, size);
    const size_t n = zero_owned_elements(&zero);
    OptimizerState state;
    OptimizerPlan plan;
    optimizer_state_open(&state, optimizer, &zero, SMALL);
    optimizer_open(&plan, &zero, &state);
    EXPECT(n > 6 * OFFLOAD_CHUNK && n % OFFLOAD_CHUNK, "%s: %zu elements are no test", what, n);
    const State s = state_open(n);
    float* gradient = upload<float>(ops_normal(n, 1), n, 0, gpu);
    const Gradient grads = {gradient, DTYPE_FP32};
    const State want = by_gpu<T>(s, grads, &plan, gpu);
    expect_same_bits(what, "host", by_host<T>(s, grads, &plan, &zero, NULL, gpu), want);
    expect_same_bits(what, "disk", by_host<T>(s, grads, &plan, &zero, test_tmpdir(), gpu), want);
    EXPECT(!ops_same_bits(want.params, s.params, n) && !ops_same_bits(want.m, s.m, n),
           "%s: nothing was updated", what);
    gpu_free(gradient);
    optimizer_close(&plan);
    ops_close(what);
}

// ---- the residual stream ----

enum { RESIDUAL = 3000, MICRO_STEPS = 4 }; // elements

__global__ void forward_kernel(float* out, const float* in, int l) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    out[i] = in[i] * 0.75f + (float)(l + 1);
}

__global__ void backward_kernel(float* sum, const float* residual, int l) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    sum[i] = sum[i] * 0.5f + residual[i] * (float)(l + 1);
}

// What a pass works on: `copies` of the stream, the first of which is `encoded`.
typedef struct {
    int L, copies, count; // elements of a micro-batch
    float *encoded, *stream, *sum;
    OffloadResiduals residuals;
} Passes;

static float* stream_into(const Passes* p, int l) {
    return l == 0 ? p->encoded : p->stream + (size_t)((l - 1) % p->copies) * RESIDUAL;
}

static void both_passes(Passes* p, const Gpu* gpu) {
    const size_t bytes = (size_t)p->count * sizeof(float);
    const int blocks = p->count / 100;
    for (int l = 0; l < p->L; l++) {
        offload_residual_wait(&p->residuals, l - OFFLOAD_RESIDUALS, gpu);
        launch(forward_kernel, blocks, 100, 0, gpu, stream_into(p, l + 1), stream_into(p, l), l);
        offload_residual_out(&p->residuals, l, stream_into(p, l + 1), bytes, gpu);
    }
    for (int l = p->L; l >= 0; l--) { // block L is what comes after them
        offload_residual_wait(&p->residuals, l - 1, gpu);
        launch(backward_kernel, blocks, 100, 0, gpu, p->sum, stream_into(p, l), l);
        if (l > OFFLOAD_RESIDUALS) {
            offload_residual_in(&p->residuals, l - 1 - OFFLOAD_RESIDUALS,
                                stream_into(p, l - OFFLOAD_RESIDUALS), bytes, gpu);
        }
    }
    launch(forward_kernel, blocks, 100, 0, gpu, p->encoded, p->encoded, p->L); // another batch
}

static void passes_as_graph(Passes* p, const Gpu* gpu) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    both_passes(p, gpu);
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaGraphLaunch(executable, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaGraphExecDestroy(executable));
}

// The sum after some micro-steps, the second of fewer elements, the last as a graph.
static float* sum_of_passes(const float* encoded, int L, int is_offloaded, const Gpu* gpu) {
    Passes p;
    memset((void*)&p, 0, sizeof(p));
    p.L = L;
    p.copies = is_offloaded ? OFFLOAD_RESIDUALS : L;
    p.encoded = upload<float>(ops_copy(encoded, RESIDUAL), RESIDUAL, 0, gpu);
    p.stream = (float*)gpu_alloc((size_t)p.copies * RESIDUAL, sizeof(float), "test");
    p.sum = (float*)gpu_alloc(RESIDUAL, sizeof(float), "test");
    if (is_offloaded) {
        offload_residuals_open(&p.residuals, L, RESIDUAL * sizeof(float));
    }
    for (int m = 0; m < MICRO_STEPS; m++) {
        p.count = m == 1 ? RESIDUAL / 2 : RESIDUAL;
        (m + 1 < MICRO_STEPS ? both_passes : passes_as_graph)(&p, gpu);
    }
    float* sum = download(p.sum, RESIDUAL, gpu);
    CUDA_CHECK(cudaDeviceSynchronize());
    offload_residuals_close(&p.residuals);
    gpu_free(p.sum);
    gpu_free(p.stream);
    gpu_free(p.encoded);
    return sum;
}

static void test_residuals(const Gpu* gpu) {
    for (int L = 1; L <= 7; L += L < 3 ? 1 : 2) {
        const float *encoded = ops_normal(RESIDUAL, 1), *want = sum_of_passes(encoded, L, 0, gpu);
        EXPECT(ops_same_bits(sum_of_passes(encoded, L, 1, gpu), want, RESIDUAL), "the stream of %d blocks",
               L);
        EXPECT(want[0] != 0 && want[0] != want[1], "the sum of %d blocks is %g, %g", L, want[0], want[1]);
    }
    ops_close("residuals");
}

int main(void) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    const Optimizer adamw = {OPTIMIZER_ADAMW, 0, MASTER_NONE}, master = {OPTIMIZER_ADAMW, 0, MASTER_FP32},
                    lion = {OPTIMIZER_LION, 0, MASTER_FP32};
    test_same_bits<float>("fp32", adamw, 0, 1, &gpu);
    test_same_bits<bf16>("bf16 with master weights", master, 0, 1, &gpu);
    test_same_bits<bf16>("bf16, rounded stochastically", adamw, 0, 1, &gpu);
    test_same_bits<bf16>("a shard of stage 3", master, 3, 1, &gpu);
    test_same_bits<bf16>("lion", lion, 0, 1, &gpu);
    test_residuals(&gpu);
    gpu_close(&gpu);
    return test_done("offload");
}
