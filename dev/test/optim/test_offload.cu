// test_offload.cu -- an update with its state on the host or a disk has the same bits as one on the
// GPU, chunk by chunk; a residual stream that is moved out and back is unchanged.
#define OFFLOAD_CHUNK ((size_t)12288) // some chunks, and a smaller one at the end
#include "llmc/optim/offload.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/map_ops.h"

enum { UPDATES = 3 };
static const ModelConfig SMALL = {5, 60, 64, 3, 2, 20, SHARE_OFF};

// Parameters, and all slots as bytes.
typedef struct {
    size_t n;
    float* params; // fp32, in host memory
    char* slots[STATE_SLOTS];
} State;

static char* bytes_copy(const char* from, size_t bytes) {
    char* copy = (char*)ops_floats(bytes / sizeof(float) + 1);
    memcpy(copy, from, bytes);
    return copy;
}

// A value is a function of its place: the padding is updated like everything else. All codes are
// right.
static State state_open(const OptimizerState* state, size_t n) {
    State s = {n, ops_normal(n, 1), {NULL}};
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const StateSlot* to = &state->slots[slot];
        float* values = ops_normal(to->bytes / sizeof(float) + 1, 0.1f);
        for (size_t i = 0; i < to->bytes / sizeof(float) && to->least == 0; i++) {
            values[i] = fabsf(values[i]);
        }
        s.slots[slot] = (char*)values;
        for (size_t i = 0; i < to->bytes && to->element_bytes < sizeof(float); i++) {
            s.slots[slot][i] = (char)(i * i >> 3);
        }
    }
    return s;
}

static Update update_of(int t) {
    return Update{0.01f,           0.9f,  0.95f, 1e-8f,         0.1f, 0.5f, t, DECAY_ALL, 0.75f,
                  ADAFACTOR_FIXED, 0.02f, 0,     MUON_SPECTRAL, 2,    t};
}

// Moves all slots to the host or the disk, or back, each in two pieces that end in the middle of a
// chunk, and of a unit of the disk.
static void move_slots(Offload* offload, const State* s, int is_back) {
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t bytes = offload->layout.state->slots[slot].bytes, first = bytes / 3 + 1;
        for (int part = 0; part < 2 && bytes > 0; part++) {
            const size_t at = part ? first : 0, count = part ? bytes - first : first;
            if (is_back) {
                offload_read(offload, s->slots[slot] + at, slot, at, count);
            } else {
                offload_write(offload, s->slots[slot] + at, slot, at, count);
            }
        }
    }
}

// The state after some updates by way of the host, or of a disk in this directory. A gradient stays
// as it is.
template <class T>
static State by_host(const State* s, Gradient grads, const OptimizerPlan* plan, MatmulGpu* matmul,
                     const char* directory, const Gpu* gpu) {
    Offload offload;
    T *params = upload<T>(ops_copy(s->params, s->n), s->n, 0, gpu),
      *other = upload<T>(ops_copy(s->params, s->n), s->n, 0, gpu);
    Memory memory = memory_on_gpu();
    offload_open(&offload, &memory, plan->state, directory);
    // what an update wrote is overwritten, as by a rollback
    offload_update(&offload, OptimizerUpdate<T>{other, grads, {NULL}, plan, update_of(1), 7, matmul, NULL},
                   gpu);
    move_slots(&offload, s, 0);
    for (int t = 1; t <= UPDATES; t++) {
        offload_update(&offload,
                       OptimizerUpdate<T>{params, grads, {NULL}, plan, update_of(t), 7, matmul, NULL}, gpu);
    }
    State after = state_open(plan->state, s->n);
    move_slots(&offload, &after, 1);
    // closed while an update is still written
    offload_update(&offload, OptimizerUpdate<T>{other, grads, {NULL}, plan, update_of(1), 7, matmul, NULL},
                   gpu);
    offload_close(&offload);
    memory_close(&memory);
    after.params = download(params, s->n, gpu);
    gpu_free(other);
    gpu_free(params);
    return after;
}

// Returns the state after an update with all of it on the GPU.
template <class T>
static State by_gpu(const State* s, Gradient grads, const OptimizerPlan* plan, MatmulGpu* matmul,
                    const Gpu* gpu) {
    OptimizerUpdate<T> u = {
        upload<T>(ops_copy(s->params, s->n), s->n, 0, gpu), grads, {NULL}, plan, {}, 7, matmul, NULL};
    State after = *s;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t bytes = plan->state->slots[slot].bytes;
        if (bytes > 0) {
            u.slots[slot] = gpu_alloc(bytes, 1, "test");
            gpu_upload(u.slots[slot], s->slots[slot], bytes);
        }
    }
    for (int t = 1; t <= UPDATES; t++) {
        u.update = update_of(t);
        optimizer_update(u, gpu);
    }
    after.params = download(u.params, s->n, gpu); // waits
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t bytes = plan->state->slots[slot].bytes;
        after.slots[slot] = bytes_copy(s->slots[slot], bytes);
        if (bytes > 0) {
            CUDA_CHECK(cudaMemcpy(after.slots[slot], u.slots[slot], bytes, cudaMemcpyDeviceToHost));
            gpu_free(u.slots[slot]);
        }
    }
    gpu_free(u.params);
    return after;
}

static void expect_same_bits(const char* what, const char* where, const OptimizerState* state, State got,
                             State want) {
    EXPECT(ops_same_bits(got.params, want.params, want.n), "%s, %s: parameters", what, where);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        EXPECT(memcmp(got.slots[slot], want.slots[slot], state->slots[slot].bytes) == 0, "%s, %s: %s", what,
               where, state->slots[slot].label);
    }
}

// Every slot was changed by the updates.
static void expect_updated(const char* what, const OptimizerState* state, State after, State before) {
    EXPECT(!ops_same_bits(after.params, before.params, before.n), "%s: nothing was updated", what);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t bytes = state->slots[slot].bytes;
        EXPECT(bytes == 0 || memcmp(after.slots[slot], before.slots[slot], bytes) != 0, "%s: %s is as it was",
               what, state->slots[slot].label);
    }
}

// A dry run, whose map has no ranges, finds the same chunks.
static void expect_same_layout(const char* what, const OptimizerState* state) {
    Memory dry = memory_dry();
    Map map;
    OptimizerState planned = *state;
    OffloadLayout want, got;
    map_open(&map, &dry, MEMORY_HOST, &state->map->of, state->map->rank);
    planned.map = &map;
    offload_layout_open(&want, state);
    offload_layout_open(&got, &planned);
    EXPECT(got.chunks == want.chunks && got.bytes == want.bytes &&
               memcmp(got.room, want.room, sizeof(got.room)) == 0,
           "%s: %zu chunks of %zu bytes, a dry run has %zu of %zu", what, want.chunks, want.bytes, got.chunks,
           got.bytes);
    offload_layout_close(&got);
    offload_layout_close(&want);
}

template <class T>
static void test_same_bits(const char* what, ModelConfig cfg, Optimizer optimizer, int stage,
                           const char* frozen, const Gpu* gpu) {
    const Freeze freeze = freeze_of(cfg, frozen);
    optimizer.frozen = freeze.rows;
    const MapOf of = map_ops_of(cfg, optimizer, stage, 1, &freeze);
    const Map* map = map_ops(&of, 0);
    const size_t n = map->totals.elements[MAP_OWNED];
    OptimizerState state;
    OptimizerPlan plan;
    optimizer_state_open(&state, optimizer, map);
    Memory memory = memory_on_gpu();
    optimizer_open<T>(&plan, &memory, &state);
    EXPECT(n > 4 * OFFLOAD_CHUNK && map->totals.updated % OFFLOAD_CHUNK, "%s: %zu elements are no test", what,
           n);
    expect_same_layout(what, &state);
    const State s = state_open(&state, n);
    float* gradient = upload<float>(ops_normal(n, 1), n, 0, gpu);
    const Gradient grads = {gradient, DTYPE_FP32};
    MatmulGpu matmul;
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 0, 0};
    matmul_gpu_open(&matmul, &memory, gpu, settings);
    const State want = by_gpu<T>(&s, grads, &plan, &matmul, gpu);
    expect_same_bits(what, "host", &state, by_host<T>(&s, grads, &plan, &matmul, NULL, gpu), want);
    expect_same_bits(what, "disk", &state, by_host<T>(&s, grads, &plan, &matmul, test_tmpdir(), gpu), want);
    expect_updated(what, &state, want, s);
    matmul_gpu_close(&matmul);
    gpu_free(gradient);
    memory_close(&memory);
    ops_close(what);
}

static void test_optimizers(const Gpu* gpu) {
    static const ModelConfig wide = {5, 60, 64, 1, 2, 64, SHARE_OFF}; // blocks of 64
    const Optimizer adamw = optimizer_of(OPTIMIZER_ADAMW, 0, MASTER_NONE),
                    master = optimizer_of(OPTIMIZER_ADAMW, 0, MASTER_FP32),
                    split = optimizer_of(OPTIMIZER_ADAMW, 0, MASTER_SPLIT),
                    in_8 = optimizer_of(OPTIMIZER_ADAMW8BIT, 0, MASTER_24),
                    lion = optimizer_of(OPTIMIZER_LION, 0, MASTER_FP32),
                    muon = optimizer_of(OPTIMIZER_MUON, 1, MASTER_SPLIT),
                    soap = optimizer_of(OPTIMIZER_SOAP, 0, MASTER_24),
                    adafactor = optimizer_of(OPTIMIZER_ADAFACTOR, 1, MASTER_NONE);
    UNSANITIZED(test_same_bits<float>("fp32", SMALL, adamw, 0, "", gpu));
    test_same_bits<bf16>("bf16 with split master weights", SMALL, split, 0, "", gpu);
    test_same_bits<bf16>("bf16, rounded stochastically", SMALL, adamw, 0, "", gpu);
    test_same_bits<bf16>("a shard of stage 3", SMALL, master, 3, "", gpu);
    test_same_bits<bf16>("adamw8bit beside weights of 24 bits", wide, in_8, 0, "", gpu);
    test_same_bits<bf16>("lion", SMALL, lion, 0, "", gpu);
    test_same_bits<bf16>("muon, whose blocks are a chunk each", SMALL, muon, 0, "", gpu);
    Optimizer muon8 = muon;
    muon8.muon_momentum = MUON_8BIT;
    test_same_bits<bf16>("muon with its momentum in 8 bits", wide, muon8, 0, "", gpu);
    test_same_bits<bf16>("soap, whose blocks are a chunk each", SMALL, soap, 0, "", gpu);
    test_same_bits<bf16>("adafactor, whose groups are a chunk each", SMALL, adafactor, 2, "", gpu);
    Optimizer average = split;
    EXPECT(average_parse(&average.average, "ema:0.9"), "an average");
    test_same_bits<bf16>("frozen parameters, of which no update moves bits", SMALL, split, 0, "wte,fcw", gpu);
    test_same_bits<bf16>("muon with frozen parameters", SMALL, muon, 2, "wpe,ln1w,qkvw", gpu);
    test_same_bits<bf16>("an average", SMALL, average, 0, "", gpu);
    test_same_bits<bf16>("an average beside frozen parameters", SMALL, average, 0, "wte,fcw", gpu);
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

// Memory of a pass: `copies` of the stream, the first of which is `encoded`.
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
    Memory memory = memory_on_gpu();
    if (is_offloaded) {
        offload_residuals_open(&p.residuals, &memory, L, RESIDUAL * sizeof(float), MICRO_STEPS);
    }
    for (int m = 0; m < MICRO_STEPS; m++) {
        p.count = m == 1 ? RESIDUAL / 2 : RESIDUAL;
        (m + 1 < MICRO_STEPS ? both_passes : passes_as_graph)(&p, gpu);
    }
    float* sum = download(p.sum, RESIDUAL, gpu);
    CUDA_CHECK(cudaDeviceSynchronize());
    offload_residuals_close(&p.residuals);
    memory_close(&memory);
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

TEST(offload) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_optimizers(&gpu);
    test_residuals(&gpu);
    gpu_close(&gpu);
}
