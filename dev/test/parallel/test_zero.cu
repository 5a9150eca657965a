// test_zero.cu -- traffic between GPUs in every ZeRO stage: after some updates, the parameters of a
// toy model equal those of a loop on the host, on ranks of gpu_ranks.h.
//
// The toy computes with whole numbers below 16, so that sums are exact in every type and order. Its
// passes make the same calls as those of train_gpt2.cu, in the same order. All of it is trained, or
// only a part of each group and the upper blocks. A layer has one block, or two.
#include "llmc/comm/comm.h"
#include "llmc/parallel/zero.cuh"
#include "dev/test/lib/gpu_ranks.h"
#include "dev/test/lib/test.h"

enum {
    BLOCKS = 6,
    UPDATES = 4,
    MICRO_BATCHES = 5, // of an update: with 2 or 4 ranks some have fewer
    THREADS = 64,
    PER_THREAD = 16
};
// its groups are all of one size,
static const ModelConfig CFG = {4, 1152, 1152, BLOCKS, 2, 8, SHARE_OFF};
enum { MOST = 16384 }; // elements at most
// rows before fcb, except wpe: the groups again have one size
#define ROW_(name) (offsetof(ModelParameters, name) / sizeof(floatX*))
static const TensorSet FROZEN = (((TensorSet)1 << ROW_(fcb)) - 1) & ~((TensorSet)1 << ROW_(wpe));

// Returns the settings of the map of a plan.
static MapOf map_of(ModelConfig cfg, const ZeroPlan* plan) {
    MapOf of = map_of_model(cfg);
    of.data = plan->size;
    of.replica = plan->shards;
    of.stage = plan->stage;
    of.ring_gradients = plan->stage >= 2 ? ZERO_LAYERS_IN_MEMORY : 0;
    of.ring_parameters = plan->stage >= 3 ? ZERO_LAYERS_IN_MEMORY : 0;
    return of;
}

// Freezes some rows, and the blocks below `first_block`.
static void freeze(MapOf* of, TensorSet rows, int first_block) {
    of->freeze.rows = rows;
    for (int l = 0; l < of->whole.L; l++) {
        of->freeze.in_block[l] = l < first_block ? ~(TensorSet)0 : rows;
    }
}

// Returns the elements of a group of parameters, and of its trained bucket.
static size_t group_elements(const Map* m, int g) {
    size_t elements = 0;
    for (int i = map_group(m, g).first; i < map_group(m, g).end; i++) {
        elements += m->buckets[i].elements;
    }
    return elements;
}
static size_t trained_elements(const Map* m, int g) {
    return map_trained(m, g) ? map_trained(m, g)->elements : 0;
}

static size_t most_elements(const Map* m) {
    size_t most = 0;
    for (int i = 0; i < m->num_buckets; i++) {
        most = m->buckets[i].elements > most ? m->buckets[i].elements : most;
    }
    return most;
}

__host__ __device__ static inline float mix(float a, float b, float c) {
    return (float)(((int)a * 5 + (int)b * 3 + (int)c + 1) % 16);
}

// ---- the loop on the host ----

typedef struct {
    size_t N;              // elements of a group
    const Map* map;        // says which of them are trained
    float *params, *grads; // (1 + BLOCKS, N)
    float acts[1 + BLOCKS][MOST],
        rest[MOST]; // in front of each block and after the last one; in the backward pass
} Loop;

// Element i of what micro-batch k of the run consists of.
static float batch_element(int k, size_t i) { return (float)((7 * (size_t)k + i) % 16); }

static void loop_mix(const Loop* loop, float* out, const float* a, const float* b, const float* c) {
    for (size_t i = 0; i < loop->N; i++) {
        out[i] = mix(a[i], b[i], c[i]);
    }
}

static void loop_add(Loop* loop, int g) {
    for (size_t i = 0; i < loop->N; i++) {
        loop->grads[g * loop->N + i] += loop->rest[i];
    }
}

static void loop_forward(Loop* loop, int k) {
    for (size_t i = 0; i < loop->N; i++) {
        loop->acts[0][i] = mix(loop->params[i], batch_element(k, i), 0);
    }
    for (int l = 0; l < BLOCKS; l++) {
        loop_mix(loop, loop->acts[l + 1], loop->acts[l], loop->params + (1 + l) * loop->N, loop->acts[0]);
    }
}

static void loop_backward(Loop* loop) {
    loop_mix(loop, loop->rest, loop->acts[BLOCKS], loop->params, loop->acts[0]);
    loop_add(loop, 0);
    for (int l = BLOCKS - 1; l >= 0; l--) {
        loop_mix(loop, loop->rest, loop->rest, loop->params + (1 + l) * loop->N, loop->acts[l]);
        loop_add(loop, 1 + l);
    }
    loop_add(loop, 0);
}

static void loop_update(Loop* loop) {
    for (int g = 0; g < 1 + BLOCKS; g++) {
        for (size_t i = g * loop->N; i < g * loop->N + trained_elements(loop->map, g); i++) {
            loop->params[i] = (float)((int)(loop->params[i] + loop->grads[i]) % 16);
        }
    }
    memset(loop->grads, 0, (1 + BLOCKS) * loop->N * sizeof(float));
}

// The first weights.
static float first_weight(size_t i) { return (float)(i % 13); }

// After all updates, and the forward pass of micro-batch 0.
static Loop* loop_run(const Map* map) {
    const size_t N = group_elements(map, 0);
    Loop* loop = (Loop*)check_alloc(1, sizeof(Loop), "loop");
    loop->N = N;
    loop->map = map;
    loop->params = (float*)check_alloc((1 + BLOCKS) * N, sizeof(float), "parameters");
    loop->grads = (float*)check_alloc((1 + BLOCKS) * N, sizeof(float), "gradients");
    for (size_t i = 0; i < (1 + BLOCKS) * N; i++) {
        loop->params[i] = first_weight(i);
    }
    for (int u = 0; u < UPDATES; u++) {
        for (int k = 0; k < MICRO_BATCHES; k++) {
            loop_forward(loop, u * MICRO_BATCHES + k);
            loop_backward(loop);
        }
        loop_update(loop);
    }
    loop_forward(loop, 0);
    return loop;
}

static void loop_close(Loop* loop) {
    free(loop->grads);
    free(loop->params);
    free(loop);
}

// ---- the same on a GPU ----

template <class T> struct Toy {
    Memory memory; // of `map` and `zero`
    Map map;
    GridGroupsGpu groups;
    ZeroGpu zero;
    Gpu gpu;
    size_t N;
    T *params, *grads;                     // as zero.cuh lays them out
    T *acts, *rest;                        // (1 + BLOCKS, N); (N)
    T *batch, *batches;                    // (N); those of the run, (UPDATES * MICRO_BATCHES, N)
    float* master;                         // a second copy of the parameters that this rank updates
    int is_idle;                           // this rank has no micro-batch: its pass adds nothing
    int times[ZERO_VARIANTS];              // that a micro-step was done,
    cudaGraphExec_t graphs[ZERO_VARIANTS]; // and what replays it
};

// Each element on its own, as mix() says. No two arrays overlap, or they are the same.
template <class T> __global__ void mix_kernel(T* out, const T* a, const T* b, const T* c) {
    const size_t first = ((size_t)blockIdx.x * THREADS + threadIdx.x) * PER_THREAD;
    for (size_t i = first; i < first + PER_THREAD; i++) {
        out[i] = from_float<T>(mix(to_float(a[i]), to_float(b[i]), c ? to_float(c[i]) : 0.0f));
    }
}

template <class T> __global__ void add_kernel(T* grads, const T* rest, int is_first) {
    const size_t first = ((size_t)blockIdx.x * THREADS + threadIdx.x) * PER_THREAD;
    for (size_t i = first; i < first + PER_THREAD; i++) {
        grads[i] = from_float<T>((is_first ? 0.0f : to_float(grads[i])) + to_float(rest[i]));
    }
}

template <class T, class G> __global__ void update_kernel(T* params, float* master, const G* grads) {
    const size_t first = ((size_t)blockIdx.x * THREADS + threadIdx.x) * PER_THREAD;
    for (size_t i = first; i < first + PER_THREAD; i++) {
        master[i] = (float)((int)(master[i] + to_float(grads[i])) % 16);
        params[i] = from_float<T>(master[i]);
    }
}

static dim3 grid_of(size_t count) { return dim3((unsigned)(count / (THREADS * PER_THREAD))); }

template <class T> static T* alloc(size_t count) { return (T*)gpu_alloc(count, sizeof(T), "test"); }

template <class T> static void toy_upload_batches(Toy<T>* toy) {
    const size_t count = UPDATES * MICRO_BATCHES * toy->N;
    T* host = (T*)check_alloc(count, sizeof(T), "batches");
    for (size_t i = 0; i < count; i++) {
        host[i] = from_float<T>(batch_element((int)(i / toy->N), i % toy->N));
    }
    CUDA_CHECK(
        cudaMemcpyAsync(toy->batches, host, count * sizeof(T), cudaMemcpyHostToDevice, toy->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(toy->gpu.stream));
    free(host);
}

// Sets what this rank has of the first weights, on its GPU, and collects the others'.
template <class T> static void toy_first_weights(Toy<T>* toy) {
    T* const kept = (T*)zero_update_parameters(&toy->zero);
    size_t begin = 0; // of a bucket among all parameters
    for (const Bucket* b = toy->map.buckets; b < toy->map.buckets + toy->map.num_buckets; b++) {
        const MapSpan own = b->in[MAP_OWNED];
        T* weights = (T*)check_alloc(own.count, sizeof(T), "weights");
        float* master = (float*)check_alloc(own.count, sizeof(float), "weights");
        for (size_t i = 0; i < own.count; i++) {
            master[i] = first_weight(begin + own.from + i);
            weights[i] = from_float<T>(master[i]);
        }
        gpu_copy(kept + zero_owned_in_kept(b), weights, own.count * sizeof(T), &toy->gpu);
        gpu_copy(toy->master + own.begin, master, own.count * sizeof(float), &toy->gpu);
        free(master);
        free(weights);
        begin += b->elements;
    }
    zero_gather_all_parameters(&toy->zero);
}

template <class T>
static void toy_open(Toy<T>* toy, ZeroPlan plan, const MapOf* of, ZeroShards place, Comm* comm,
                     const Gpu* gpu) {
    const DType type = DTYPE_OF(T);
    const size_t* elements = toy->map.totals.elements;
    memset((void*)toy, 0, sizeof(*toy));
    toy->gpu = *gpu;
    toy->memory = memory_on_gpu();
    map_open(&toy->map, &toy->memory, MEMORY_HOST, of, comm->rank);
    toy->N = group_elements(&toy->map, 0);
    toy->params = alloc<T>(elements[MAP_PARAMETERS]);
    toy->grads = alloc<T>(elements[MAP_GRADIENTS]);
    toy->acts = alloc<T>((1 + BLOCKS) * toy->N);
    toy->rest = alloc<T>(toy->N);
    toy->batch = alloc<T>(toy->N);
    toy->batches = alloc<T>(UPDATES * MICRO_BATCHES * toy->N);
    toy->master = alloc<float>(elements[MAP_OWNED]);
    const Grid grid = grid_of_data(comm->rank, comm->size);
    if (plan.stage == 2) { // as a run does; else the groups are opened by themselves
        zero_connect(&plan, of, grid, type, comm, gpu);
    }
    grid_groups_gpu_take(&toy->groups, grid, &plan, comm);
    zero_open(&toy->zero, &toy->memory, plan, &toy->map, place, 1, toy->params, type,
              Gradient{toy->grads, type}, &toy->groups, gpu);
    toy_upload_batches(toy);
    toy_first_weights(toy);
}

template <class T> static void toy_close(Toy<T>* toy) {
    for (cudaGraphExec_t graph : toy->graphs) {
        if (graph) {
            CUDA_CHECK(cudaGraphExecDestroy(graph));
        }
    }
    zero_close(&toy->zero);
    grid_groups_gpu_close(&toy->groups);
    memory_close(&toy->memory);
    for (void* memory : {(void*)toy->master, (void*)toy->batches, (void*)toy->batch, (void*)toy->rest,
                         (void*)toy->acts, (void*)toy->grads, (void*)toy->params}) {
        gpu_free(memory);
    }
}

template <class T> static void toy_mix(Toy<T>* toy, T* out, const T* a, const T* b, const T* c) {
    launch(mix_kernel<T>, grid_of(toy->N), THREADS, 0, &toy->gpu, out, a, b, c);
}

// The gradient of group g, as train_gpt2.cu sees it.
template <class T> static void toy_add(Toy<T>* toy, int g, int is_first) {
    const Bucket* b = map_trained(&toy->map, g);
    if (b && !toy->is_idle) {
        launch(add_kernel<T>, grid_of(b->elements), THREADS, 0, &toy->gpu,
               toy->grads + b->in[MAP_GRADIENTS].begin, toy->rest, is_first);
    }
}

template <class T> static const T* toy_block(const Toy<T>* toy, int k) {
    return toy->params + toy->map.buckets[map_group(&toy->map, 1 + k).first].in[MAP_PARAMETERS].begin;
}

template <class T> static void toy_forward(Toy<T>* toy) {
    zero_begin_forward(&toy->zero);
    toy_mix<T>(toy, toy->acts, toy->params, toy->batch, NULL);
    for (int k = 0; k < BLOCKS; k++) {
        zero_parameters(&toy->zero, k, 1);
        toy_mix<T>(toy, toy->acts + (1 + k) * toy->N, toy->acts + k * toy->N, toy_block(toy, k), toy->acts);
    }
}

template <class T> static void toy_backward(Toy<T>* toy, MicroStep step) {
    const int is_first = toy->zero.plan.stage >= 2 || step.number == 0;
    zero_wait_for_buffer(&toy->zero, -1);
    toy_mix<T>(toy, toy->rest, toy->acts + BLOCKS * toy->N, toy->params, toy->acts);
    toy_add(toy, 0, is_first);
    for (int k = BLOCKS - 1; k >= 0; k--) {
        zero_parameters(&toy->zero, k, -1);
        zero_wait_for_buffer(&toy->zero, k);
        toy_mix<T>(toy, toy->rest, toy->rest, toy_block(toy, k), toy->acts + k * toy->N);
        toy_add(toy, 1 + k, is_first);
        zero_group_done<T>(&toy->zero, 1 + k, step);
    }
    toy_add(toy, 0, 0); // below the blocks that are frozen, too
}

template <class T> static void toy_work(Toy<T>* toy, MicroStep step) {
    zero_begin(&toy->zero, step);
    toy_forward(toy);
    toy_backward(toy, step);
    zero_join(&toy->zero, step);
}

template <class T> static cudaGraphExec_t toy_capture(Toy<T>* toy, MicroStep step) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamBeginCapture(toy->gpu.stream, cudaStreamCaptureModeThreadLocal));
    toy_work(toy, step);
    CUDA_CHECK(cudaStreamEndCapture(toy->gpu.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return executable;
}

template <class T> static void toy_load(Toy<T>* toy, int k) {
    CUDA_CHECK(cudaMemcpyAsync(toy->batch, toy->batches + (size_t)k * toy->N, toy->N * sizeof(T),
                               cudaMemcpyDeviceToDevice, toy->gpu.stream));
}

// A micro-step of update u: plainly the first time, later as a graph where all ranks have a
// micro-batch.
template <class T> static void toy_micro_step(Toy<T>* toy, int u, MicroStep step) {
    const ZeroPlan* plan = &toy->zero.plan;
    const int variant = zero_variant(plan, step), k = plan->rank + plan->size * (int)step.number;
    toy->is_idle = plan->rank >= step.active;
    if (!toy->is_idle) {
        toy_load(toy, u * MICRO_BATCHES + k);
    }
    if (step.active < plan->size || toy->times[variant]++ == 0) {
        toy_work(toy, step);
    } else {
        toy->graphs[variant] = toy->graphs[variant] ? toy->graphs[variant] : toy_capture(toy, step);
        CUDA_CHECK(cudaGraphLaunch(toy->graphs[variant], toy->gpu.stream));
        zero_replayed(&toy->zero);
    }
    zero_group_done<T>(&toy->zero, 0, step);
}

// The shards of trained buckets that this rank updates; then all collect them.
template <class T> static void toy_update(Toy<T>* toy) {
    const Gradient grads = zero_update_gradient(&toy->zero);
    for (int g = 0; g < 1 + BLOCKS; g++) {
        const Bucket* b = map_trained(&toy->map, g);
        if (b) {
            const size_t at = b->in[map_update_space(&toy->map)].begin;
            GRADIENT_DISPATCH(grads, T,
                              launch(update_kernel<T, G>, grid_of(b->in[MAP_OWNED].count), THREADS, 0,
                                     &toy->gpu,
                                     (T*)zero_update_parameters(&toy->zero) + zero_owned_in_kept(b),
                                     toy->master + b->in[MAP_OWNED].begin, (const G*)grads.data + at));
        }
    }
    zero_gather_parameters(&toy->zero);
}

// Every second update comes after a forward pass, as after a validation.
template <class T> static void toy_run(Toy<T>* toy) {
    const ZeroPlan* plan = &toy->zero.plan;
    for (int u = 0; u < UPDATES; u++) {
        if (u % 2) {
            toy_forward(toy);
        }
        MicroSteps steps = micro_steps(MICRO_BATCHES, 1, plan->size);
        for (MicroStep step; micro_steps_next(&steps, &step);) {
            toy_micro_step(toy, u, step);
        }
        zero_wait_for_gradient(&toy->zero);
        toy_update(toy);
    }
}

// ---- the two compared ----

template <class T>
static void expect_values(const char* what, const T* got, const float* want, size_t count) {
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        wrong += !(to_float(got[i]) == want[i]);
    }
    EXPECT(wrong == 0, "%s: %zu of %zu are wrong", what, wrong, count);
}

template <class T>
static void expect_on_gpu(const char* what, const Toy<T>* toy, const T* got, const float* want,
                          size_t count) {
    T* host = (T*)check_alloc(count, sizeof(T), "host");
    CUDA_CHECK(cudaMemcpyAsync(host, got, count * sizeof(T), cudaMemcpyDeviceToHost, toy->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(toy->gpu.stream));
    expect_values(what, host, want, count);
    free(host);
}

// Each bucket of an array of what each rank updates is whole in the last rank.
template <class T, class A>
static void toy_expect_collected(const char* what, Toy<T>* toy, const A* owned, const float* want) {
    const ZeroPlan* plan = &toy->zero.plan;
    A* all = plan->rank == plan->size - 1 ? (A*)check_alloc(toy->N, sizeof(A), "collected") : NULL;
    for (const Bucket* b = toy->map.buckets; b < toy->map.buckets + toy->map.num_buckets; b++) {
        const size_t at =
            (const void*)owned == toy->zero.params_slices ? zero_owned_in_kept(b) : b->in[MAP_OWNED].begin;
        zero_collect(&toy->zero, b, all, owned + at, DTYPE_OF(A));
        expect_values(what, all, want, all ? b->elements : 0);
        want += b->elements;
    }
    free(all);
}

template <class T> static void toy_expect(const char* what, Toy<T>* toy, const Loop* want) {
    ZeroGpu* zero = &toy->zero;
    toy_expect_collected(what, toy, toy->master,
                         want->params); // by way of memory in which parameters may come
    zero_wait_for_parameters(zero);
    expect_on_gpu<T>(what, toy, toy->params, want->params,
                     zero->params_slices ? toy->N : toy->map.totals.elements[MAP_PARAMETERS]);
    if (zero->params_slices) {
        toy_expect_collected(what, toy, (T*)zero->params_slices, want->params);
    }
    toy_load(toy, 0);
    toy_forward(toy);
    expect_on_gpu<T>(what, toy, toy->acts + BLOCKS * toy->N, want->acts[BLOCKS], toy->N);
}

template <class T>
static void test_stage(ZeroPlan plan, const MapOf* of, ZeroShards place, Comm* comm, const Gpu* gpu) {
    Toy<T> toy;
    char what[128];
    snprintf(what, sizeof(what), "%s, stage %d%s, rank %d of %d, shards of %d, %d rows frozen",
             dtype_name(DTYPE_OF(T)), plan.stage, place == ZERO_SHARDS_ON_HOST ? " on the host" : "",
             plan.rank, plan.size, plan.shards, of->freeze.rows != 0);
    toy_open(&toy, plan, of, place, comm, gpu);
    Loop* want = loop_run(&toy.map);
    EXPECT(group_elements(&toy.map, 1) == toy.N && toy.N <= MOST, "%s: no toy", what);
    toy_run(&toy);
    toy_expect(what, &toy, want);
    toy_close(&toy);
    loop_close(want);
}

static void test_stages(int shards, Comm* comm, const Gpu* gpu) {
    for (int stage = 0; stage <= 3; stage++) {
        const ZeroPlan plan = {stage, comm->rank, comm->size, shards, 1};
        const MapOf of = map_of(CFG, &plan);
        MapOf frozen = of;
        freeze(&frozen, FROZEN, 2);
        test_stage<bf16>(plan, &of, ZERO_SHARDS_ON_GPU, comm, gpu);
        if (stage <= 2) {
            test_stage<bf16>(plan, &frozen, ZERO_SHARDS_ON_GPU, comm, gpu);
        }
        if (stage >= 2) {
            test_stage<float>(plan, &of, stage == 3 ? ZERO_SHARDS_ON_HOST : ZERO_SHARDS_ON_GPU, comm, gpu);
        }
    }
}

// ---- ranks ----

// With updates during the backward pass, the other stream has a block's gradient after the kernel
// that wrote it and before the one that overwrites it; and what follows the join comes after all of
// them. Where only one of the streams is waited for, it must be right, too: the main one, or the
// other one.
static void test_in_backward(int waits_for_other, Comm* comm, const Gpu* gpu) {
    ZeroGpu z;
    GridGroupsGpu groups;
    const ZeroPlan plan = {0, 0, 1, 1, 1};
    MapOf of = map_of(CFG, &plan);
    Map map;
    Memory memory = memory_on_gpu();
    of.ring_gradients = ZERO_LAYERS_IN_MEMORY;
    map_open(&map, &memory, MEMORY_HOST, &of, 0);
    const size_t N = group_elements(&map, 1);
    float *params = alloc<float>(map.totals.elements[MAP_PARAMETERS]), *seen = alloc<float>(BLOCKS * N);
    float *grads = alloc<float>(map.totals.elements[MAP_GRADIENTS]),
          *host = (float*)check_alloc(BLOCKS, sizeof(float), "values");
    grid_groups_gpu_open(&groups, grid_of_data(comm->rank, comm->size), &plan, comm);
    zero_open(&z, &memory, plan, &map, ZERO_SHARDS_ON_GPU, 1, params, DTYPE_FP32, Gradient{grads, DTYPE_FP32},
              &groups, gpu);
    for (int l = BLOCKS - 1; l >= 0; l--) {
        const Gradient group = zero_group_gradient(&z, 1 + l);
        zero_wait_for_buffer(&z, l);
        CUDA_CHECK(cudaMemsetAsync(group.data, 1 + l, N * sizeof(float), gpu->stream));
        const Gpu* beside = zero_begin_update(&z);
        CUDA_CHECK(cudaMemcpyAsync(seen + l * N, group.data, N * sizeof(float), cudaMemcpyDeviceToDevice,
                                   beside->stream));
        zero_end_update(&z, 1 + l);
    }
    if (waits_for_other) {
        CUDA_CHECK(cudaStreamSynchronize(z.comm.stream));
    }
    zero_join_updates(&z);
    for (int l = 0; l < BLOCKS; l++) {
        CUDA_CHECK(cudaMemcpyAsync(&host[l], seen + l * N + N - 1, sizeof(float), cudaMemcpyDeviceToHost,
                                   gpu->stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int l = 0; l < BLOCKS; l++) {
        EXPECT(*(char*)&host[l] == 1 + l, "gradient of block %d: %g", l, host[l]);
    }
    CUDA_CHECK(cudaStreamSynchronize(z.comm.stream));
    zero_close(&z);
    grid_groups_gpu_close(&groups);
    memory_close(&memory);
    free(host);
    gpu_free(grads);
    gpu_free(seen);
    gpu_free(params);
}

// ---- the gradient of the embedding apart ----

enum { APART_STEPS = 3 };

// Element i of what rank r adds in a micro-step to the gradient of wte, as the classifier's matrix
// or as the embedding. Sums of these depend on their order.
static float apart_element(int r, int step, int is_embedding, size_t i) {
    const uint32_t mixed =
        (uint32_t)(i * 2654435761u) ^ (uint32_t)(1000003 * (r + 5 * step + 17 * is_embedding + 1));
    return ldexpf((float)(mixed % 1021) - 510, (int)(mixed % 7) - 5);
}

// Rounds to a type of gradients.
template <class G> static float apart_rounded(float x) { return to_float(from_float<G>(x)); }

// Returns element i of one of the two sums of an update, by a loop over the micro-batches in order:
// in fp32 where ranks reduce them, else in G, as the backward pass adds up.
template <class G> static float apart_sum(const ZeroPlan* plan, int is_embedding, size_t i) {
    float sum = 0, own[4] = {};
    for (int step = 0; step < APART_STEPS; step++) {
        for (int r = 0; r < plan->size; r++) {
            const float x = apart_rounded<G>(apart_element(r, step, is_embedding, i));
            own[r] = apart_rounded<G>(own[r] + x);
            sum += x;
        }
    }
    for (int r = 0; r < plan->size && plan->stage < 2; r++) {
        sum = r == 0 ? own[0] : sum + own[r];
    }
    return sum;
}

// Returns element i of the gradient of wte, which the ranks reduce: the embedding's sum travels as
// G.
template <class G> static float apart_wanted(const ZeroPlan* plan, size_t i) {
    const float head = apart_sum<G>(plan, 0, i), embedding = apart_rounded<G>(apart_sum<G>(plan, 1, i));
    const int is_narrow = plan->stage == 0 || (plan->stage == 1 && plan->size == 1);
    return is_narrow ? apart_rounded<G>(apart_rounded<G>(head) + embedding) : head + embedding;
}

// Sets or adds to the gradients of group g as a backward pass does, rounding to G.
template <class G> static void apart_backward(ZeroGpu* z, int step, int is_embedding, G* host, size_t count) {
    const int adds = step > 0 && z->plan.stage < 2;
    for (size_t i = 0; i < count; i++) {
        const float x = apart_rounded<G>(apart_element(z->plan.rank, step, is_embedding, i));
        host[i] = from_float<G>(adds ? to_float(host[i]) + x : x);
    }
    zero_wait_for_buffer(z, -1);
    gpu_copy(zero_group_gradient(z, is_embedding ? model_groups(z->map->cfg) : 0).data, host,
             count * sizeof(G), &z->main);
}

// All ranks compute both gradients, in the last stage of a pipeline; then each has its part of the
// sum.
template <class G> static void test_apart(int stage, int shards, Comm* comm, const Gpu* gpu) {
    const ZeroPlan plan = {stage, comm->rank, comm->size, shards, 1};
    MapOf of = map_of(CFG, &plan);
    of.pipeline = 2, of.layers[0] = of.layers[1] = BLOCKS / 2;
    ZeroGpu z;
    GridGroupsGpu groups;
    Memory memory = memory_on_gpu();
    Map map;
    map_open(&map, &memory, MEMORY_HOST, &of, map_rank(&of, MapPlace{1, comm->rank, 0}));
    map.cfg.part.first_layer = 0; // as if it were the first stage, too
    const size_t count = zero_embedding_elements(&map), all = map.totals.elements[MAP_GRADIENTS];
    float* params = alloc<float>(map.totals.elements[MAP_PARAMETERS]);
    G *grads = alloc<G>(all), *host[2];
    CUDA_CHECK(cudaMemsetAsync(grads, 0, all * sizeof(G), gpu->stream));
    grid_groups_gpu_open(&groups, grid_of_data(comm->rank, comm->size), &plan, comm);
    zero_open(&z, &memory, plan, &map, ZERO_SHARDS_ON_GPU, 1, params, DTYPE_FP32,
              Gradient{grads, DTYPE_OF(G)}, &groups, gpu);
    for (int is_embedding = 0; is_embedding < 2; is_embedding++) {
        host[is_embedding] = (G*)check_alloc(count, sizeof(G), "gradients");
    }
    MicroSteps steps = micro_steps(APART_STEPS * comm->size, 1, comm->size);
    for (MicroStep step; micro_steps_next(&steps, &step);) {
        for (int is_embedding = 0; is_embedding < 2; is_embedding++) {
            apart_backward(&z, (int)step.number, is_embedding, host[is_embedding], count);
        }
        zero_group_done<G>(&z, model_groups(map.cfg), step);
        zero_group_done<G>(&z, 0, step);
    }
    zero_add_embedding<G>(&z);
    const Gradient got = zero_update_gradient(&z);
    const MapRange own = map_range(&map, 0, -1, map_update_space(&map)); // of wte, the first row
    const size_t in_got = own.count > 0 ? map_range_at(&map, &own, map_update_space(&map)) : 0;
    float* sums = (float*)check_alloc(count, sizeof(float), "sums");
    int wrong = 0;
    gpu_copy(sums, (char*)got.data + in_got * dtype_bytes(got.dtype), own.count * dtype_bytes(got.dtype),
             gpu);
    for (size_t i = 0; i < own.count; i++) {
        const float sum = got.dtype == DTYPE_FP32 ? sums[i] : to_float(((const G*)(const void*)sums)[i]);
        wrong += sum != apart_wanted<G>(&plan, own.before + i);
    }
    EXPECT(wrong == 0, "%s, stage %d, rank %d of %d: %d of %zu sums are wrong", dtype_name(DTYPE_OF(G)),
           stage, plan.rank, plan.size, wrong, own.count);
    CUDA_CHECK(cudaStreamSynchronize(z.comm.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    zero_close(&z);
    grid_groups_gpu_close(&groups);
    memory_close(&memory);
    free(sums);
    free(host[1]);
    free(host[0]);
    gpu_free(grads);
    gpu_free(params);
}

// ---- divided experts ----

enum { EXPERT_STEPS = 3 };

// A rank with a part of the experts, and an update.
template <class G> struct Experts {
    ZeroGpu zero;
    Map map;
    int64_t batches; // of the update: the last micro-step has too few for all ranks
    G* host;         // a gradient or the parameters
};

// Element i of the gradient of group g on the micro-batch of rank r, of part `part` of the experts.
static float experts_element(int r, int step, int g, int part, size_t i) {
    return apart_element(r, step, 8 * g + part, i);
}

// Returns the element that a rank leaves in a step, which adds up in G in stages 0 and 1.
template <class G> static float experts_left(int stage, int r, int step, int g, int part, size_t i) {
    float sum = 0;
    for (int s = stage < 2 ? 0 : step; s <= step; s++) {
        sum = apart_rounded<G>(sum + apart_rounded<G>(experts_element(r, s, g, part, i)));
    }
    return sum;
}

// Returns element i of the sum of group g, in the order of ranks.
template <class G>
static float experts_wanted(const ZeroPlan* plan, int64_t batches, int g, int part, size_t i) {
    const int steps = ((int)batches + plan->size - 1) / plan->size;
    float sum = 0;
    for (int step = 0; step < steps && plan->stage == 2; step++) {
        for (int r = 0; r < plan->size && step * plan->size + r < batches; r++) {
            sum += experts_left<G>(2, r, step, g, part, i);
        }
    }
    for (int r = 0; r < plan->size && r < batches && plan->stage < 2; r++) {
        sum += experts_left<G>(1, r, (int)((batches - 1 - r) / plan->size), g, part, i);
    }
    return sum;
}

// Leaves the gradient of group g on the micro-batch of rank r. If that has none, it stays as
// it is, or is no number if nobody may read it.
template <class G> static void experts_backward(Experts<G>* x, int g, int r, MicroStep step) {
    ZeroGpu* z = &x->zero;
    const ZeroPlan* plan = &z->plan;
    const int has_batch = r < step.active, is_kept = plan->stage < 2 && step.number > 0,
              part = g > 0 ? x->map.cfg.part.expert_rank : 0;
    const Bucket* b = map_trained(&x->map, g);
    const size_t count = b->elements, before = (size_t)(r % b->copies) * b->elements;
    for (size_t i = 0; i < count; i++) {
        const float value = experts_left<G>(plan->stage, r, (int)step.number, g, part, i);
        x->host[i] = from_float<G>(has_batch ? value : NAN);
    }
    if (has_batch || !is_kept) {
        gpu_copy((G*)zero_group_gradient(z, g).data + before, x->host, count * sizeof(G), &z->main);
    }
}

// Does what the backward passes of a rank and its neighbors leave, and reduces it.
template <class G> static void experts_micro_step(Experts<G>* x, MicroStep step) {
    const ZeroPlan* plan = &x->zero.plan;
    const int e = x->map.of.experts, first = plan->rank - plan->rank % e;
    for (int k = BLOCKS - 1; k >= 0; k--) {
        zero_wait_for_buffer(&x->zero, k);
        for (int r = first; r < first + e; r++) {
            experts_backward(x, 1 + k, r, step);
        }
        zero_group_done<G>(&x->zero, 1 + k, step);
    }
    zero_wait_for_buffer(&x->zero, -1);
    experts_backward(x, 0, plan->rank, step);
    zero_join(&x->zero, step);
    zero_group_done<G>(&x->zero, 0, step);
}

// The sums of this rank's pieces are right, and become its parameters.
template <class G> static void experts_update(Experts<G>* x) {
    const ZeroPlan* plan = &x->zero.plan;
    const Gradient got = zero_update_gradient(&x->zero);
    float* sums = (float*)check_alloc(most_elements(&x->map), sizeof(float), "sums");
    int wrong = 0;
    for (int g = 0; g < 1 + BLOCKS; g++) {
        const Bucket* b = map_trained(&x->map, g);
        const MapSpan own = b->in[MAP_OWNED];
        const size_t bytes = dtype_bytes(got.dtype), at = b->in[map_update_space(&x->map)].begin;
        gpu_copy(sums, (char*)got.data + at * bytes, own.count * bytes, &x->zero.main);
        for (size_t i = 0; i < own.count; i++) {
            const float wanted =
                experts_wanted<G>(plan, x->batches, g, g > 0 ? x->map.cfg.part.expert_rank : 0, own.from + i);
            const float sum = got.dtype == DTYPE_FP32 ? sums[i] : to_float(((const G*)(const void*)sums)[i]);
            wrong += sum != (got.dtype == DTYPE_FP32 ? wanted : apart_rounded<G>(wanted));
            x->host[i] = from_float<G>(wanted);
        }
        gpu_copy((G*)zero_update_parameters(&x->zero) + zero_owned_in_kept(b), x->host, own.count * sizeof(G),
                 &x->zero.main);
    }
    EXPECT(wrong == 0, "%s, stage %d, rank %d of %d, %d share experts: %d sums are wrong",
           dtype_name(DTYPE_OF(G)), plan->stage, plan->rank, plan->size, x->map.of.experts, wrong);
    free(sums);
    zero_gather_parameters(&x->zero);
}

// Every rank has the sums of all ranks; the host gets them from the pieces, too.
template <class G> static void experts_expect(Experts<G>* x) {
    const ZeroPlan* plan = &x->zero.plan;
    G* collected = (G*)check_alloc(most_elements(&x->map), sizeof(G), "collected");
    int wrong = 0;
    zero_wait_for_parameters(&x->zero);
    for (int g = 0; g < 1 + BLOCKS; g++) {
        const Bucket* b = map_trained(&x->map, g);
        const size_t count = b->elements;
        const G* params = (const G*)x->zero.params + b->in[MAP_PARAMETERS].begin;
        zero_collect(&x->zero, b, collected, params + b->in[MAP_OWNED].from, DTYPE_OF(G));
        gpu_copy(x->host, params, count * sizeof(G), &x->zero.main);
        for (size_t i = 0; i < count; i++) {
            const float wanted = apart_rounded<G>(
                experts_wanted<G>(plan, x->batches, g, g > 0 ? x->map.cfg.part.expert_rank : 0, i));
            wrong += to_float(x->host[i]) != wanted || to_float(collected[i]) != wanted;
        }
    }
    EXPECT(wrong == 0, "%s, stage %d, rank %d of %d, %d share experts: %d parameters are wrong",
           dtype_name(DTYPE_OF(G)), plan->stage, plan->rank, plan->size, x->map.of.experts, wrong);
    free(collected);
}

// Updates of which the last micro-step, or the only one, leaves the last rank without a batch.
template <class G> static void test_experts(int stage, int e, Comm* comm, const Gpu* gpu) {
    const GridShape shape = {1, 1, comm->size, 1, e};
    ModelConfig whole = CFG;
    whole.arch = ARCH_MIXTRAL;
    whole.E = 4, whole.E_used = 2;
    const ZeroPlan plan = {stage, comm->rank, comm->size, comm->size, 1};
    MapOf of = map_of(whole, &plan);
    of.experts = e;
    Experts<G> x = {};
    GridGroupsGpu groups;
    Memory memory = memory_on_gpu();
    map_open(&x.map, &memory, MEMORY_HOST, &of, comm->rank);
    const size_t all = x.map.totals.elements[MAP_GRADIENTS];
    G *params = alloc<G>(x.map.totals.elements[MAP_PARAMETERS]), *grads = alloc<G>(all);
    x.host = (G*)check_alloc(most_elements(&x.map), sizeof(G), "host");
    CUDA_CHECK(cudaMemsetAsync(grads, 0, all * sizeof(G), gpu->stream));
    grid_groups_gpu_open(&groups, grid_of(shape, comm->rank), &plan, comm);
    zero_open(&x.zero, &memory, plan, &x.map, ZERO_SHARDS_ON_GPU, 1, params, DTYPE_OF(G),
              Gradient{grads, DTYPE_OF(G)}, &groups, gpu);
    for (int64_t u = 0; u < 2; u++) {
        x.batches = (u == 0 ? EXPERT_STEPS : 1) * comm->size - 1;
        MicroSteps steps = micro_steps(x.batches, 1, comm->size);
        for (MicroStep step; micro_steps_next(&steps, &step);) {
            experts_micro_step(&x, step);
        }
        zero_wait_for_gradient(&x.zero);
        experts_update(&x);
        experts_expect(&x);
    }
    CUDA_CHECK(cudaStreamSynchronize(x.zero.comm.stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    zero_close(&x.zero);
    grid_groups_gpu_close(&groups);
    memory_close(&memory);
    free(x.host);
    gpu_free(grads);
    gpu_free(params);
}

// The sums of replicas are added up in fp32 in the order of the replicas: 1e8 + 1 - 1e8 + 1 is 1,
// in other orders also 0 or 2.
static void test_replicas_order(ZeroShards location, Comm* comm, const Gpu* gpu) {
    static const float of_replica[] = {1e8f, 1, -1e8f, 1};
    const ZeroPlan plan = {3, comm->rank, 4, 1, 1};
    const MapOf of = map_of(CFG, &plan);
    Memory memory = memory_on_gpu();
    Map map;
    map_open(&map, &memory, MEMORY_HOST, &of, comm->rank);
    const Bucket* b = map_trained(&map, 1);
    const size_t count = b->in[MAP_REDUCED].count, all = b->in[MAP_SUMS].count;
    float *params = alloc<float>(map.totals.elements[MAP_PARAMETERS]),
          *grads = alloc<float>(map.totals.elements[MAP_GRADIENTS]),
          *host = (float*)check_alloc(all, sizeof(float), "sums");
    ZeroGpu z;
    GridGroupsGpu groups;
    int wrong = 0;
    grid_groups_gpu_open(&groups, grid_of_data(comm->rank, 4), &plan, comm);
    zero_open(&z, &memory, plan, &map, location, 1, params, DTYPE_FP32, Gradient{grads, DTYPE_FP32}, &groups,
              gpu);
    for (size_t i = 0; i < all; i++) {
        host[i] = of_replica[comm->rank];
    }
    gpu_copy(zero_sums_of_(&z, b), host, all * sizeof(float), gpu);
    zero_reduce_replicas_(&z, b);
    CUDA_CHECK(cudaStreamSynchronize(z.comm.stream));
    gpu_copy(host, zero_reduced_of_(&z, b), count * sizeof(float), gpu);
    for (size_t i = 0; i < count; i++) {
        wrong += host[i] != 1;
    }
    EXPECT(wrong == 0, "sums of replicas: %d of %zu, the first %g", wrong, count, host[0]);
    zero_close(&z);
    grid_groups_gpu_close(&groups);
    memory_close(&memory);
    free(host);
    gpu_free(grads);
    gpu_free(params);
}

static void experts_rank_test(Comm* comm, const Gpu* gpu) {
    for (int stage = 0; stage <= 2; stage++) {
        for (int e = 2; e <= comm->size; e *= 2) {
            test_experts<bf16>(stage, e, comm, gpu);
            test_experts<float>(stage, e, comm, gpu);
        }
    }
}

static void rank_test(Comm* comm, const Gpu* gpu) {
    for (int stage = 0; stage <= 2; stage++) {
        test_apart<bf16>(stage, comm->size, comm, gpu);
        test_apart<float>(stage, comm->size, comm, gpu);
    }
    for (int shards = comm->size == 4 ? 2 : 1; shards <= comm->size; shards *= 2) {
        test_stages(shards, comm, gpu);
    }
    if (comm->size == 4) {
        test_replicas_order(ZERO_SHARDS_ON_GPU, comm, gpu);
        test_replicas_order(ZERO_SHARDS_ON_HOST, comm, gpu);
    }
    if (comm->size == 1) {
        test_in_backward(0, comm, gpu);
        test_in_backward(1, comm, gpu);
    }
}

TEST(zero) { gpu_ranks_test(rank_test); }

TEST(zero_experts) { gpu_ranks_test(experts_rank_test); }
