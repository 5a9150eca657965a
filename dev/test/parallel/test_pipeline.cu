// test_pipeline.cu -- a toy of P stages on as many GPUs: what comes out of a pipeline, forward and
// backward, equals a loop on the host.
//
// Numbers are whole and small, so that sums are exact. Each pass writes where the one before it
// reads: kept streams take turns in the places of a stage, gradients of the stream in two.
#include "llmc/comm/comm.h"
#include "llmc/parallel/groups.cuh"
#include "llmc/parallel/pipeline.cuh"
#include "dev/test/lib/gpu_ranks.h"
#include "dev/test/lib/test.h"

enum { ROWS = 64, COLUMNS = 64, N = ROWS * COLUMNS, MOST = 9, UPDATES = 2, THREADS = 64, PER_THREAD = 16 };

// ---- the loop on the host ----

__host__ __device__ static inline float mix(float a, float b, float c) {
    return (float)(((int)a * 5 + (int)b * 3 + (int)c + 1) % 16);
}

// Element i of micro-batch k of update u.
__host__ __device__ static inline float batch_element(int u, int64_t k, size_t i) {
    return (float)((7 * (size_t)k + 3 * (size_t)u + i) % 16);
}

// Sets the streams after each of P stages of micro-batch k, and the gradients before each.
static void loop_micro_step(float streams[][N], float gradients[][N], int P, int u, int64_t k) {
    for (size_t i = 0; i < N; i++) {
        float x = batch_element(u, k, i);
        for (int p = 0; p < P; p++) {
            x = streams[p][i] = mix(x, (float)p, (float)u);
        }
        for (int p = P - 1; p >= 0; p--) {
            x = gradients[p][i] = mix(x, streams[p][i], (float)p);
        }
    }
}

// ---- the same on a GPU ----

// A stage: `out` and `inp` are in its places, `gradient` in two. An entry of `seen` is all that one
// backward pass makes.
typedef struct {
    int P, p, places;
    int64_t M;
    Gpu gpu, comm;
    PipelineGpu pipeline;
    float *inp, *out, *gradient, *seen; // (places, N), (places, N), (2, N), (M, N)
} Toy;

__global__ void batch_kernel(float* inp, int u, int64_t k) {
    const size_t first = ((size_t)blockIdx.x * THREADS + threadIdx.x) * PER_THREAD;
    for (size_t i = first; i < first + PER_THREAD; i++) {
        inp[i] = batch_element(u, k, i);
    }
}

// out = mix(a, b, c); b NULL: of `number`.
__global__ void mix_kernel(float* out, const float* a, const float* b, float number, float c) {
    const size_t first = ((size_t)blockIdx.x * THREADS + threadIdx.x) * PER_THREAD;
    for (size_t i = first; i < first + PER_THREAD; i++) {
        out[i] = mix(a[i], b ? b[i] : number, c);
    }
}

static float* toy_at(float* array, int64_t k, int places) { return array + (size_t)(k % places) * N; }

static void toy_open(Toy* toy, const GridGroupsGpu* groups, int64_t M, const Gpu* gpu) {
    memset((void*)toy, 0, sizeof(*toy));
    toy->P = groups->pipe.size, toy->p = groups->pipe.rank;
    toy->M = M, toy->places = pipeline_places(toy->P, toy->p, M);
    toy->gpu = toy->comm = *gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&toy->comm.stream, cudaStreamNonBlocking));
    pipeline_open(&toy->pipeline, &groups->pipe, &toy->gpu, &toy->comm);
    toy->inp = (float*)gpu_alloc((size_t)toy->places * N, sizeof(float), "test");
    toy->out = (float*)gpu_alloc((size_t)toy->places * N, sizeof(float), "test");
    toy->gradient = (float*)gpu_alloc(2 * N, sizeof(float), "test");
    toy->seen = (float*)gpu_alloc((size_t)M * N, sizeof(float), "test");
}

static void toy_close(Toy* toy) {
    CUDA_CHECK(cudaStreamSynchronize(toy->comm.stream));
    CUDA_CHECK(cudaStreamSynchronize(toy->gpu.stream));
    pipeline_close(&toy->pipeline);
    for (float* memory : {toy->seen, toy->gradient, toy->out, toy->inp}) {
        gpu_free(memory);
    }
    CUDA_CHECK(cudaStreamDestroy(toy->comm.stream));
}

static void toy_mix(const Toy* toy, float* out, const float* a, const float* b, float number, float c) {
    launch(mix_kernel, N / (THREADS * PER_THREAD), THREADS, 0, &toy->gpu, out, a, b, number, c);
}

static void toy_forward(const Toy* toy, int u, int64_t k) {
    float* inp = toy_at(toy->inp, k, toy->places);
    if (toy->p == 0) {
        launch(batch_kernel, N / (THREADS * PER_THREAD), THREADS, 0, &toy->gpu, inp, u, k);
    }
    toy_mix(toy, toy_at(toy->out, k, toy->places), inp, NULL, (float)toy->p, (float)u);
}

// In place, as the residual stream's gradient is.
static void toy_backward(const Toy* toy, int64_t k) {
    const float* out = toy_at(toy->out, k, toy->places);
    float* gradient = toy_at(toy->gradient, k, 2);
    toy_mix(toy, gradient, toy->p == toy->P - 1 ? out : gradient, out, 0, (float)toy->p);
    toy_mix(toy, toy_at(toy->seen, k, (int)toy->M), gradient, gradient, 0, 0);
}

static void toy_passes(const Toy* toy, PipelineAction before, PipelineAction next) {
    const PipelineStream stream = {toy_at(toy->out, before.micro_step, toy->places),
                                   toy_at(toy->gradient, before.micro_step, 2),
                                   toy_at(toy->inp, next.micro_step, toy->places),
                                   toy_at(toy->gradient, next.micro_step, 2), COLUMNS * sizeof(float)};
    pipeline_exchange(&toy->pipeline, before, next, stream);
}

// The last micro-batch is empty, as for a data rank that has one less.
static void toy_update(const Toy* toy, int u) {
    PipelineAction before = {PIPELINE_NOTHING, 0, 0}, now;
    for (int64_t i = 0; pipeline_action(toy->P, toy->p, toy->M, i, &now); before = now, i++) {
        now.tokens = now.micro_step < toy->M - 1 ? ROWS : 0;
        toy_passes(toy, before, now);
        if (now.tokens > 0 && now.pass == PIPELINE_FORWARD) {
            toy_forward(toy, u, now.micro_step);
        } else if (now.tokens > 0) {
            toy_backward(toy, now.micro_step);
        }
    }
    toy_passes(toy, before, now);
}

// ---- the two compared ----

static void expect_on_gpu(const Toy* toy, const char* what, int64_t k, const float* got, const float* want) {
    float* host = (float*)check_alloc(N, sizeof(float), "host");
    int wrong = 0;
    CUDA_CHECK(cudaMemcpyAsync(host, got, N * sizeof(float), cudaMemcpyDeviceToHost, toy->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(toy->gpu.stream));
    for (size_t i = 0; i < N; i++) {
        wrong += host[i] != want[i];
    }
    EXPECT(wrong == 0, "stage %d of %d, %s of micro-batch %lld of %lld: %d of %d are wrong", toy->p, toy->P,
           what, (long long)k, (long long)toy->M, wrong, N);
    free(host);
}

static void toy_expect(const Toy* toy, int u) {
    static float streams[8][N], gradients[8][N], seen[N];
    for (int64_t k = 0; k < toy->M - 1; k++) {
        loop_micro_step(streams, gradients, toy->P, u, k);
        for (size_t i = 0; i < N; i++) {
            seen[i] = mix(gradients[toy->p][i], gradients[toy->p][i], 0);
        }
        expect_on_gpu(toy, "the gradient", k, toy_at(toy->seen, k, (int)toy->M), seen);
    }
}

// All stages get what the last one tells, and the first one what is handed over to it; both are
// overwritten at once where they came from.
static void test_messages(Toy* toy) {
    const int P = toy->P, is_last = toy->p == P - 1;
    float want[N];
    for (int round = 0; round < 3; round++) {
        if (is_last) {
            launch(batch_kernel, N / (THREADS * PER_THREAD), THREADS, 0, &toy->gpu, toy->out, round,
                   (int64_t)1);
            launch(batch_kernel, N / (THREADS * PER_THREAD), THREADS, 0, &toy->gpu, toy->inp, round,
                   (int64_t)2);
        }
        pipeline_tell(&toy->pipeline, toy->out, N * sizeof(float));
        pipeline_hand_over(&toy->pipeline, P - 1, 0, toy->inp, N * sizeof(float));
        for (int k = 1; k <= 2; k++) {
            for (size_t i = 0; i < N; i++) {
                want[i] = batch_element(round, k, i);
            }
            if (k == 1 || toy->p == 0) {
                toy_mix(toy, toy->gradient, k == 1 ? toy->out : toy->inp, NULL, 0, 0);
                for (size_t i = 0; i < N; i++) {
                    want[i] = mix(want[i], 0, 0);
                }
                expect_on_gpu(toy, k == 1 ? "what is told" : "what is handed over", round, toy->gradient,
                              want);
            }
        }
    }
}

static void rank_test(Comm* comm, const Gpu* gpu) {
    GridShape shape = grid_of_data(0, 1).shape;
    shape.pipeline = comm->size;
    const ZeroPlan plan = {0, 0, 1, 1, 1};
    GridGroupsGpu groups;
    grid_groups_gpu_open(&groups, grid_of(shape, comm->rank), &plan, comm);
    for (int64_t M = 2; M <= MOST; M++) {
        Toy toy;
        toy_open(&toy, &groups, M, gpu);
        for (int u = 0; u < UPDATES; u++) {
            toy_update(&toy, u);
            toy_expect(&toy, u);
        }
        if (M == 2) {
            test_messages(&toy);
        }
        toy_close(&toy);
    }
    grid_groups_gpu_close(&groups);
}

TEST(pipeline) { gpu_ranks_test(rank_test); }
