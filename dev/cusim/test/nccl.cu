/*
nccl.cu -- the NCCL twin between processes.

    nccl            every collective on three ranks, against sums made here; pipelines
    nccl list       planted bugs
    nccl NAME       a program of two ranks with this bug: exit status 0 if nothing was noticed

Both are tried with any number of operations at a time, then with one (CUSIM_NCCL_SERIAL=1).
*/
#include "llmc/gpu/gpu.cuh"
#include "llmc/parallel/pipeline.h"
#include "dev/test/lib/test.h"
#include <nccl.h>

enum { MORE_THAN_A_CHUNK = 300000 }; // elements of 4 bytes; the twin sends 1 MiB at a time

#define NCCL_OK(call) EXPECT((call) == ncclSuccess, "%s", #call)

template <class T> static ncclDataType_t nccl_type();
template <> ncclDataType_t nccl_type<float>() { return ncclFloat32; }
template <> ncclDataType_t nccl_type<bf16>() { return ncclBfloat16; }
template <> ncclDataType_t nccl_type<fp16>() { return ncclFloat16; }

static void wait_for_all(const Gpu* gpu) { CUDA_CHECK(cudaStreamSynchronize(gpu->stream)); }

// Returns small integers, so that all sums are exact in every type.
static float element(int rank, int i) { return (float)((i * 3 + rank * 5) % 7); }

template <class T> static T* to_device(const Gpu* gpu, int rank, int n) {
    T *host = (T*)malloc((size_t)n * sizeof(T)), *data = (T*)gpu_alloc((size_t)n, sizeof(T), "data");
    for (int i = 0; i < n; i++) {
        host[i] = from_float<T>(element(rank, i));
    }
    CUDA_CHECK(cudaMemcpyAsync(data, host, (size_t)n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    wait_for_all(gpu);
    free(host);
    return data;
}

// Expects element i of `data` to be want(i).
template <class T, class F>
static void expect_all(const Gpu* gpu, const T* data, int n, F want, const char* what) {
    T* host = (T*)malloc((size_t)n * sizeof(T));
    CUDA_CHECK(cudaMemcpyAsync(host, data, (size_t)n * sizeof(T), cudaMemcpyDeviceToHost, gpu->stream));
    wait_for_all(gpu);
    int wrong = 0;
    for (int i = 0; i < n; i++) {
        wrong += to_float(host[i]) != want(i);
    }
    EXPECT(wrong == 0, "%s of %s: %d of %d elements", what, dtype_name(DTYPE_OF(T)), wrong, n);
    free(host);
}

template <class T> static void test_collectives(const Gpu* gpu, ncclComm_t comm, int rank, int ranks, int n) {
    const ncclDataType_t type = nccl_type<T>();
    T *send = to_device<T>(gpu, rank, n * ranks), *receive = to_device<T>(gpu, 0, n * ranks);
    auto sum = [=](int i) {
        float x = 0;
        for (int r = 0; r < ranks; r++) {
            x += element(r, i);
        }
        return x;
    };
    NCCL_OK(ncclAllReduce(send, receive, (size_t)n, type, ncclSum, comm, gpu->stream));
    expect_all(gpu, receive, n, sum, "all-reduce");
    NCCL_OK(ncclAllReduce(send, receive, (size_t)n, type, ncclMax, comm, gpu->stream));
    auto largest = [=](int i) { return fmaxf(element(0, i), fmaxf(element(1, i), element(2, i))); };
    expect_all(gpu, receive, n, largest, "largest");
    NCCL_OK(ncclReduceScatter(send, receive, (size_t)n, type, ncclSum, comm, gpu->stream));
    expect_all(
        gpu, receive, n, [=](int i) { return sum(rank * n + i); }, "reduce-scatter");
    NCCL_OK(ncclAllGather(send, receive, (size_t)n, type, comm, gpu->stream));
    expect_all(
        gpu, receive, n * ranks, [=](int i) { return element(i / n, i % n); }, "all-gather");
    NCCL_OK(ncclBroadcast(send, receive, (size_t)n, type, 1, comm, gpu->stream));
    expect_all(
        gpu, receive, n, [=](int i) { return element(1, i); }, "broadcast");
    NCCL_OK(ncclReduce(send, receive, (size_t)n, type, ncclSum, 2, comm, gpu->stream));
    expect_all(
        gpu, receive, n, [=](int i) { return rank == 2 ? sum(i) : element(1, i); }, "reduce");
    gpu_free(send);
    gpu_free(receive);
}

// Tests in place, two in a group, in a captured graph.
static void test_in_place(const Gpu* gpu, ncclComm_t comm, int rank) {
    float *a = to_device<float>(gpu, rank, 8), *b = to_device<float>(gpu, rank + 1, 8);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(a, a, 8, ncclFloat32, ncclAvg, comm, gpu->stream));
    NCCL_OK(ncclAllReduce(b, b, 8, ncclFloat32, ncclMin, comm, gpu->stream));
    NCCL_OK(ncclGroupEnd());
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphLaunch(executable, gpu->stream));
    expect_all(
        gpu, a, 8, [](int i) { return (float)((double)(element(0, i) + element(1, i) + element(2, i)) / 3); },
        "mean");
    expect_all(
        gpu, b, 8, [](int i) { return fminf(element(1, i), fminf(element(2, i), element(3, i))); },
        "smallest");
    CUDA_CHECK(cudaGraphExecDestroy(executable));
    CUDA_CHECK(cudaGraphDestroy(graph));
    gpu_free(a);
    gpu_free(b);
}

// Returns the elements that rank `from` sends to rank `to`: a different number for each pair.
static int pair_count(int from, int to) { return 100 * from + 10 * to + (from == 2 ? MORE_THAN_A_CHUNK : 1); }

// Tests sends from every rank to every rank, of different sizes, two messages each, which keep
// their order; then a ring, in a group of two calls.
static void test_send(const Gpu* gpu, ncclComm_t comm, int rank, int ranks) {
    const int most = 2 * pair_count(2, 2);
    float *send = to_device<float>(gpu, rank, most), *receive[3];
    NCCL_OK(ncclGroupStart());
    for (int r = 0; r < ranks; r++) {
        const size_t out = (size_t)pair_count(rank, r), in = (size_t)pair_count(r, rank);
        receive[r] = to_device<float>(gpu, 0, most);
        NCCL_OK(ncclRecv(receive[r], in, ncclFloat32, r, comm, gpu->stream));
        NCCL_OK(ncclRecv(receive[r] + in, 1, ncclFloat32, r, comm, gpu->stream));
        NCCL_OK(ncclSend(send, out, ncclFloat32, r, comm, gpu->stream));
        NCCL_OK(ncclSend(send + 7 + r, 1, ncclFloat32, r, comm, gpu->stream));
    }
    NCCL_OK(ncclGroupEnd());
    for (int r = 0; r < ranks; r++) {
        const int in = pair_count(r, rank);
        expect_all(
            gpu, receive[r], in + 1, [=](int i) { return element(r, i < in ? i : 7 + rank); }, "receive");
        gpu_free(receive[r]);
    }
    gpu_free(send);
}

static void test_all_to_all(const Gpu* gpu, ncclComm_t comm, int rank, int ranks, int n) {
    float *send = to_device<float>(gpu, rank, n * ranks), *receive = to_device<float>(gpu, 0, n * ranks);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
    NCCL_OK(ncclAlltoAll(send, receive, (size_t)n, ncclFloat32, comm, gpu->stream));
    expect_all(
        gpu, receive, n * ranks, [=](int i) { return element(i / n, rank * n + i % n); }, "all-to-all");
#endif
    gpu_free(send);
    gpu_free(receive);
}

static void wait_until_ready(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
        NCCL_OK(ncclCommGetAsyncError(comm, &state));
    }
    EXPECT(state == ncclSuccess, "%s", ncclGetErrorString(state));
}

// Tests a communicator that is opened without waiting. It accepts no work before all have joined.
static void test_nonblocking(const Gpu* gpu, ncclUniqueId id, int rank, int ranks) {
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    EXPECT(ncclCommInitRankConfig(&comm, ranks, id, rank, &config) == ncclInProgress, "rank %d", rank);
    wait_until_ready(comm);
    test_all_to_all(gpu, comm, rank, ranks, 5);
    EXPECT(ncclCommFinalize(comm) == ncclInProgress, "rank %d", rank);
    wait_until_ready(comm);
    NCCL_OK(ncclCommDestroy(comm));
    config.magic = 0;
    EXPECT(ncclCommInitRankConfig(&comm, ranks, id, rank, &config) == ncclInvalidArgument, "rank %d", rank);
}

// Tests a split: ranks 2 and 0, in this order; rank 1 is in no group. Then all.
static void test_split(const Gpu* gpu, ncclComm_t comm, int rank, int ranks) {
    ncclComm_t half, all;
    int count = 0, place = -1;
    NCCL_OK(ncclCommSplit(comm, rank == 1 ? NCCL_SPLIT_NOCOLOR : 7, -rank, &half, NULL));
    NCCL_OK(ncclCommSplit(comm, 7, rank, &all, NULL));
    EXPECT((half == NULL) == (rank == 1), "rank %d", rank);
    if (half) {
        NCCL_OK(ncclCommCount(half, &count));
        NCCL_OK(ncclCommUserRank(half, &place));
        EXPECT(count == 2 && place == (rank == 0), "%d of %d", place, count);
        test_all_to_all(gpu, half, place, 2, 3);
        NCCL_OK(ncclCommDestroy(half));
    }
    test_all_to_all(gpu, all, rank, ranks, 3);
    NCCL_OK(ncclCommDestroy(all));
}

// Opens the ranks with the same color as a communicator with this name.
static ncclComm_t split(ncclComm_t all, const char* name, int color, int key) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    config.commName = name;
#endif
    NCCL_OK(ncclCommSplit(all, color, key, &comm, &config));
    return comm;
}

// Queues what test_several_graph expects: one group of the sends and receives of two communicators,
// a gather in a third one on another stream at the same time, and a sum of all it gives.
static void several_communicators(const Gpu* gpu, const Gpu* side, cudaEvent_t events[2],
                                  const ncclComm_t comms[3], float* data[4], int rank, int ranks) {
    const int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    CUDA_CHECK(cudaEventRecord(events[0], gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(side->stream, events[0], 0));
    NCCL_OK(ncclAllGather(data[0], data[3], 8, ncclFloat32, comms[2], side->stream));
    CUDA_CHECK(cudaEventRecord(events[1], side->stream));
    NCCL_OK(ncclGroupStart());
    for (int i = 0; i < 2; i++) { // once around, then the other way
        const size_t count = (size_t)(8 + 16 * i);
        NCCL_OK(ncclSend(data[0], count, ncclFloat32, i ? last : next, comms[i], gpu->stream));
        NCCL_OK(ncclRecv(data[1 + i], count, ncclFloat32, i ? next : last, comms[i], gpu->stream));
    }
    NCCL_OK(ncclGroupEnd());
    CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, events[1], 0));
    NCCL_OK(ncclAllReduce(data[3], data[3], 24, ncclFloat32, ncclSum, comms[0], gpu->stream));
}

// Tests three communicators in a graph, and between its launches.
static void test_several_in_graph(const Gpu* gpu, ncclComm_t comm, int rank, int ranks) {
    const ncclComm_t comms[3] = {comm, split(comm, "second", 0, rank), split(comm, "third", 0, rank)};
    float* data[4];
    cudaEvent_t events[2];
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    Gpu side = *gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
    for (int i = 0; i < 4; i++) {
        data[i] = to_device<float>(gpu, i ? 0 : rank, 24);
        if (i < 2) {
            CUDA_CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
        }
    }
    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    several_communicators(gpu, &side, events, comms, data, rank, ranks);
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 3; i++) {
        for (int k = 1; k < 4; k++) {
            CUDA_CHECK(cudaMemsetAsync(data[k], 0, 24 * sizeof(float), gpu->stream));
        }
        if (i == 1) {
            several_communicators(gpu, &side, events, comms, data, rank, ranks);
        } else {
            CUDA_CHECK(cudaGraphLaunch(executable, gpu->stream));
        }
    }
    expect_all(
        gpu, data[1], 24, [=](int i) { return i < 8 ? element((rank + ranks - 1) % ranks, i) : 0; }, "ring");
    expect_all(
        gpu, data[2], 24, [=](int i) { return element((rank + 1) % ranks, i); }, "ring back");
    expect_all(
        gpu, data[3], 24, [=](int i) { return (float)ranks * element(i / 8, i % 8); },
        "sum of what is gathered");
    for (int i = 0; i < 4; i++) {
        gpu_free(data[i]);
        if (i < 2) {
            CUDA_CHECK(cudaEventDestroy(events[i]));
        }
    }
    CUDA_CHECK(cudaGraphExecDestroy(executable));
    CUDA_CHECK(cudaGraphDestroy(graph));
    NCCL_OK(ncclCommDestroy(comms[1]));
    NCCL_OK(ncclCommDestroy(comms[2]));
    CUDA_CHECK(cudaStreamDestroy(side.stream));
}

// Tests two communicators on two streams, for which the ranks wait in other orders: no problem for
// a GPU.
static void test_two_streams(const Gpu* gpu, ncclComm_t comm, int rank) {
    ncclComm_t other;
    Gpu side = *gpu;
    float *a = to_device<float>(gpu, rank, 8), *b = to_device<float>(gpu, rank, 8);
    auto sum = [](int i) { return element(0, i) + element(1, i) + element(2, i); };
    NCCL_OK(ncclCommSplit(comm, 0, rank, &other, NULL));
    CUDA_CHECK(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
    NCCL_OK(ncclAllReduce(a, a, 8, ncclFloat32, ncclSum, comm, gpu->stream));
    NCCL_OK(ncclAllReduce(b, b, 8, ncclFloat32, ncclSum, other, side.stream));
    if (rank == 0) {
        expect_all(gpu, a, 8, sum, "first");
    }
    expect_all(&side, b, 8, sum, "second");
    expect_all(gpu, a, 8, sum, "first");
    // One communicator on two streams: in the order of the calls, which could not be exchanged.
    NCCL_OK(ncclAllReduce(a, a, 8, ncclFloat32, ncclMax, comm, gpu->stream));
    NCCL_OK(ncclAllReduce(b, b, 7, ncclFloat32, ncclMax, comm, side.stream));
    expect_all(rank ? &side : gpu, rank ? b : a, 8, sum, "one communicator");
    expect_all(rank ? gpu : &side, rank ? a : b, 8, sum, "one communicator");
    NCCL_OK(ncclCommDestroy(other));
    CUDA_CHECK(cudaStreamDestroy(side.stream));
    gpu_free(a);
    gpu_free(b);
}

static void test_rank(ncclUniqueId id, ncclUniqueId other_id, int rank, int ranks) {
    ncclComm_t comm;
    Gpu gpu;
    int count = 0;
    gpu_open(&gpu, rank);
    NCCL_OK(ncclCommInitRank(&comm, ranks, id, rank));
    NCCL_OK(ncclCommCount(comm, &count));
    EXPECT(count == ranks, "%d", count);
    test_collectives<float>(&gpu, comm, rank, ranks, 33);
    test_collectives<float>(&gpu, comm, rank, ranks, MORE_THAN_A_CHUNK);
    test_collectives<bf16>(&gpu, comm, rank, ranks, 31);
    test_collectives<fp16>(&gpu, comm, rank, ranks, 1);
    test_in_place(&gpu, comm, rank);
    test_send(&gpu, comm, rank, ranks);
    test_all_to_all(&gpu, comm, rank, ranks, MORE_THAN_A_CHUNK);
    test_nonblocking(&gpu, other_id, rank, ranks);
    test_split(&gpu, comm, rank, ranks);
    test_several_in_graph(&gpu, comm, rank, ranks);
    test_two_streams(&gpu, comm, rank);
    NCCL_OK(ncclCommDestroy(comm));
    gpu_close(&gpu);
}

// ---- pipelines (pipeline.h) beside operations of tensor and data groups ----

enum { ROW = 64 }; // elements of a micro-batch's activation

typedef struct {
    int stages, tensor, data; // ranks of a group of each kind
} Shape;

// Rank of a pipeline. A pass, forward or backward, is a sum over the tensor group: it multiplies by
// the size of the group.
typedef struct {
    Shape shape;
    int stage, micro_steps, is_planned; // planned: sends and receives between passes are one group
    ncclComm_t tensor, data, pipe;
    Gpu gpu, side; // two streams
    cudaEvent_t passed;
    float *acts, *grads, *sums; // (micro_steps, ROW)
} Stage;

// Opens the groups of rank (stage D + d) t + j, in one order.
static void stage_open(Stage* s, Shape shape, int micro_steps, ncclComm_t all, const Gpu* gpu, int rank) {
    const int in_stage = shape.tensor * shape.data, j = rank % shape.tensor;
    *s = {shape, rank / in_stage, micro_steps, 1, NULL, NULL, NULL, *gpu, *gpu, NULL, NULL, NULL, NULL};
    s->tensor = split(all, "tensor", rank / shape.tensor, rank);
    s->data = split(all, "data", s->stage * shape.tensor + j, rank);
    s->pipe = split(all, "pipe", rank % in_stage, rank);
    CUDA_CHECK(cudaStreamCreateWithFlags(&s->side.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&s->passed, cudaEventDisableTiming));
    for (float** data : {&s->acts, &s->grads, &s->sums}) {
        *data = (float*)gpu_alloc((size_t)micro_steps * ROW, sizeof(float), "micro-batches");
    }
    std::vector<float> host((size_t)micro_steps * ROW);
    for (size_t i = 0; i < host.size(); i++) {
        host[i] = (float)(i / ROW + 1);
    }
    CUDA_CHECK(cudaMemcpyAsync(s->acts, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice,
                               gpu->stream));
    wait_for_all(gpu);
}

static void stage_close(Stage* s) {
    for (ncclComm_t comm : {s->pipe, s->data, s->tensor}) {
        NCCL_OK(ncclCommDestroy(comm));
    }
    CUDA_CHECK(cudaStreamDestroy(s->side.stream));
    CUDA_CHECK(cudaEventDestroy(s->passed));
    for (float* data : {s->acts, s->grads, s->sums}) {
        gpu_free(data);
    }
}

// Queues sends and receives as one group.
static void stage_move(Stage* s, const GroupMove* moves, int count) {
    NCCL_OK(ncclGroupStart());
    for (int i = 0; i < count; i++) {
        if (moves[i].sends) {
            NCCL_OK(ncclSend(moves[i].data, ROW, ncclFloat32, moves[i].peer, s->pipe, s->gpu.stream));
        } else {
            NCCL_OK(ncclRecv(moves[i].data, ROW, ncclFloat32, moves[i].peer, s->pipe, s->gpu.stream));
        }
    }
    NCCL_OK(ncclGroupEnd());
}

// Sends what the pass before has made, and receives what the next one needs.
static void stage_exchange(Stage* s, PipelineAction before, PipelineAction next) {
    const size_t made = (size_t)before.micro_step * ROW, needed = (size_t)next.micro_step * ROW;
    const PipelineStream stream = {s->acts + made, s->grads + made, s->acts + needed, s->grads + needed,
                                   ROW * sizeof(float)};
    GroupMove moves[PIPELINE_MOVES];
    const int count = pipeline_moves(moves, s->shape.stages, s->stage, before, next, stream);
    if (s->is_planned) {
        stage_move(s, moves, count);
    } else {
        for (int i = 0; i < count; i++) {
            stage_move(s, &moves[i], 1);
        }
    }
}

// Adds gradients to those of the data group, while the stage continues.
static void stage_reduce(Stage* s, int64_t micro) {
    CUDA_CHECK(cudaEventRecord(s->passed, s->gpu.stream));
    CUDA_CHECK(cudaStreamWaitEvent(s->side.stream, s->passed, 0));
    NCCL_OK(ncclAllReduce(s->grads + micro * ROW, s->sums + micro * ROW, ROW, ncclFloat32, ncclSum, s->data,
                          s->side.stream));
}

static void stage_pass(Stage* s, PipelineAction now) {
    float *act = s->acts + now.micro_step * ROW, *grad = s->grads + now.micro_step * ROW;
    float* data = now.pass == PIPELINE_FORWARD ? act : grad;
    if (now.pass == PIPELINE_BACKWARD && s->stage == s->shape.stages - 1) {
        CUDA_CHECK(cudaMemcpyAsync(grad, act, ROW * sizeof(float), cudaMemcpyDeviceToDevice, s->gpu.stream));
    }
    NCCL_OK(ncclAllReduce(data, data, ROW, ncclFloat32, ncclSum, s->tensor, s->gpu.stream));
    if (now.pass == PIPELINE_BACKWARD) {
        stage_reduce(s, now.micro_step);
    }
}

static void stage_update(Stage* s) {
    PipelineAction before = {PIPELINE_NOTHING, 0, 0}, now;
    for (int64_t i = 0; pipeline_action(s->shape.stages, s->stage, s->micro_steps, i, &now); i++) {
        now.tokens = 1;
        stage_exchange(s, before, now);
        stage_pass(s, now);
        before = now;
    }
    stage_exchange(s, before, {PIPELINE_NOTHING, 0, 0});
}

static void stage_expect(Stage* s) {
    const int all = s->micro_steps * ROW, passes = 2 * s->shape.stages - s->stage;
    const float t = (float)s->shape.tensor, D = (float)s->shape.data;
    expect_all(
        &s->side, s->sums, all, [=](int i) { return (float)(i / ROW + 1) * powf(t, (float)passes) * D; },
        "sums of gradients");
    expect_all(
        &s->gpu, s->acts, all, [=](int i) { return (float)(i / ROW + 1) * powf(t, (float)s->stage + 1); },
        "activations");
}

static void test_pipeline(ncclUniqueId id, int rank, Shape shape) {
    ncclComm_t all;
    Gpu gpu;
    gpu_open(&gpu, rank);
    NCCL_OK(ncclCommInitRank(&all, shape.stages * shape.tensor * shape.data, id, rank));
    for (int micro_steps : {1, shape.stages, 2 * shape.stages + 1}) {
        Stage s;
        stage_open(&s, shape, micro_steps, all, &gpu, rank);
        stage_update(&s);
        stage_expect(&s);
        stage_close(&s);
    }
    NCCL_OK(ncclCommDestroy(all));
    gpu_close(&gpu);
}

// ---- collectives ----

typedef struct {
    float *small, *large; // 256 and 512 elements
    ncclComm_t comm;
    const Gpu* gpu;
    int rank;
} Rank;

static void reduce(const Rank* r, size_t count) {
    ncclAllReduce(r->small, r->small, count, ncclFloat32, ncclSum, r->comm, r->gpu->stream);
}
static void gather(const Rank* r) {
    ncclAllGather(r->small, r->large, 256, ncclFloat32, r->comm, r->gpu->stream);
}

static void counts_differ(const Rank* r) { reduce(r, r->rank ? 255 : 256); }
static void types_differ(const Rank* r) {
    ncclAllReduce(r->small, r->small, 128, r->rank ? ncclFloat32 : ncclBfloat16, ncclSum, r->comm,
                  r->gpu->stream);
}
static void rank_missing(const Rank* r) {
    if (r->rank == 0) {
        reduce(r, 256);
    } else {
        sleep(3); // alive, but busy elsewhere
    }
}
static void orders_differ(const Rank* r) {
    if (r->rank) {
        gather(r);
    }
    reduce(r, 256);
    if (!r->rank) {
        gather(r);
    }
}
static void receive_buffer_too_small(const Rank* r) {
    ncclAllGather(r->small, r->large, 257, ncclFloat32, r->comm, r->gpu->stream);
}

static void send_without_receive(const Rank* r) {
    ncclGroupStart();
    ncclSend(r->small, 256, ncclFloat32, 1 - r->rank, r->comm, r->gpu->stream);
    if (r->rank) {
        ncclRecv(r->large, 256, ncclFloat32, 0, r->comm, r->gpu->stream);
    }
    ncclGroupEnd();
}
static void receive_without_send(const Rank* r) {
    ncclRecv(r->large, 256, ncclFloat32, 1 - r->rank, r->comm, r->gpu->stream);
}
static void send_count_differs(const Rank* r) {
    if (r->rank) {
        ncclSend(r->small, 255, ncclFloat32, 0, r->comm, r->gpu->stream);
    } else {
        ncclRecv(r->large, 256, ncclFloat32, 1, r->comm, r->gpu->stream);
    }
}
static void sends_without_group(const Rank* r) { // each waits for its receive, which comes after it
    ncclSend(r->small, 256, ncclFloat32, 1 - r->rank, r->comm, r->gpu->stream);
    ncclRecv(r->large, 256, ncclFloat32, 1 - r->rank, r->comm, r->gpu->stream);
}
static void all_to_all_in_place(const Rank* r) {
    ncclGroupStart();
    for (int other = 0; other < 2; other++) {
        ncclSend(r->large + 256 * other, 256, ncclFloat32, other, r->comm, r->gpu->stream);
        ncclRecv(r->large + 256 * other, 256, ncclFloat32, other, r->comm, r->gpu->stream);
    }
    ncclGroupEnd();
}
static void gather_overlaps(const Rank* r) { // in place would be rank * 256
    ncclAllGather(r->large, r->large, 256, ncclFloat32, r->comm, r->gpu->stream);
}
static void captured_on_one_rank(const Rank* r) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    if (r->rank) {
        reduce(r, 256);
        return;
    }
    CUDA_CHECK(cudaStreamBeginCapture(r->gpu->stream, cudaStreamCaptureModeThreadLocal));
    reduce(r, 256);
    CUDA_CHECK(cudaStreamEndCapture(r->gpu->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphLaunch(executable, r->gpu->stream));
}
static void split_on_one_rank(const Rank* r) {
    ncclComm_t other;
    if (r->rank) {
        ncclCommSplit(r->comm, 0, 0, &other, NULL);
    } else {
        sleep(3);
    }
}

// Two communicators on two streams, in another order on rank 1: both run if the GPU has room for
// two operations at a time.
static void communicators_in_two_orders(const Rank* r) {
    Gpu other = *r->gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&other.stream, cudaStreamNonBlocking));
    ncclComm_t comms[2] = {split(r->comm, "tensor", 0, r->rank), split(r->comm, "data", 0, r->rank)};
    for (int i = 0; i < 2; i++) {
        const int k = i ^ r->rank;
        NCCL_OK(ncclAllReduce(r->small + 128 * k, r->large + 128 * k, 128, ncclFloat32, ncclSum, comms[k],
                              k ? other.stream : r->gpu->stream));
    }
    wait_for_all(&other);
}
static void communicators_in_two_orders_serial(const Rank* r) {
    setenv("CUSIM_NCCL_SERIAL", "1", 1);
    communicators_in_two_orders(r);
}

// Sends the second message to rank 1 before a gather, and receives it after that.
static void message_in_two_orders(const Rank* r) {
    Gpu other = *r->gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&other.stream, cudaStreamNonBlocking));
    const ncclComm_t tensor = split(r->comm, "tensor", 0, r->rank), pipe = split(r->comm, "pipe", 0, r->rank);
    for (int i = 0; i < 4; i++) {
        if (i == (r->rank ? 1 : 2)) {
            NCCL_OK(ncclAllGather(r->small, r->large, 128, ncclFloat32, tensor, other.stream));
        } else if (r->rank) {
            NCCL_OK(ncclRecv(r->small + 128, 128, ncclFloat32, 0, pipe, r->gpu->stream));
        } else {
            NCCL_OK(ncclSend(r->small, 128, ncclFloat32, 1, pipe, r->gpu->stream));
        }
    }
    wait_for_all(&other);
}

// A communicator for each direction: rank 0 sends, then receives; rank 1 alike.
static void send_then_receive(const Rank* r) {
    Gpu other = *r->gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&other.stream, cudaStreamNonBlocking));
    const ncclComm_t comms[2] = {split(r->comm, "up", 0, r->rank), split(r->comm, "down", 0, r->rank)};
    setenv("CUSIM_NCCL_SERIAL", "1", 1);
    NCCL_OK(ncclSend(r->small, 256, ncclFloat32, 1 - r->rank, comms[r->rank], r->gpu->stream));
    NCCL_OK(ncclRecv(r->large, 256, ncclFloat32, 1 - r->rank, comms[1 - r->rank], other.stream));
    wait_for_all(&other);
}

// Stages send what they have made before they receive what they need.
static void pipeline_sends_then_receives(const Rank* r) {
    Stage s;
    setenv("CUSIM_NCCL_SERIAL", "1", 1);
    stage_open(&s, {2, 1, 1}, 4, r->comm, r->gpu, r->rank);
    s.is_planned = 0;
    stage_update(&s);
    stage_expect(&s);
}

// Bug: NCCL is given pinned memory of the host, which only kernels can read.
static void pinned_memory(const Rank* r) {
    float* pinned = (float*)gpu_alloc_pinned(512, sizeof(float), "pinned");
    NCCL_OK(ncclAllGather(r->small, pinned, 256, ncclFloat32, r->comm, r->gpu->stream));
}

// The second call of rank 1 fails, because of CUSIM_NCCL_FAULT.
static void fault(const Rank* r, const char* what) {
    ncclResult_t error = ncclSuccess;
    setenv("CUSIM_NCCL_FAULT", what, 1);
    reduce(r, 256);
    reduce(r, 256);
    wait_for_all(r->gpu);
    ncclCommGetAsyncError(r->comm, &error);
    _exit(error == ncclSuccess ? 0 : 4);
}
static void fault_die(const Rank* r) { fault(r, "1:2:die"); }
static void fault_hang(const Rank* r) {
    if (r->rank) {
        alarm(3); // no other rank ends it here
    }
    fault(r, "1:2:hang");
}
static void fault_error(const Rank* r) { fault(r, "1:2:error"); }

// Only the communicator with this name fails.
static void fault_by_name(const Rank* r) {
    Rank tensor = *r;
    ncclResult_t errors[2];
    tensor.comm = split(r->comm, "tensor", 0, -r->rank); // in it, rank 1 is the first one
    setenv("CUSIM_NCCL_FAULT", "1:2:error@tensor", 1);
    for (int i = 0; i < 2; i++) {
        reduce(r, 256);
        reduce(&tensor, 256);
    }
    wait_for_all(r->gpu);
    ncclCommGetAsyncError(r->comm, &errors[0]);
    ncclCommGetAsyncError(tensor.comm, &errors[1]);
    printf("rank %d: errors %d, of tensor %d\n", r->rank, errors[0], errors[1]);
    fflush(stdout);
    _exit(4);
}

// clang-format off
static const struct {
    const char *name, *message; // a regular expression
    void (*run)(const Rank*);
} bugs[] = {
    {"counts_differ", "NCCL call #1 differs: rank [01] AllReduce count 25[56] type 7, rank [01]", counts_differ},
    {"types_differ", "NCCL call #1 differs", types_differ},
    {"rank_missing", "NCCL call #1 on rank 0: AllReduce timed out; ranks not in it: 1$", rank_missing},
    {"orders_differ", "NCCL call #1 differs: rank [01] All(Reduce|Gather)", orders_differ},
    {"receive_buffer_too_small", "AllGather: 1028 bytes, but only 1024", receive_buffer_too_small},
    {"send_without_receive", "NCCL call #1 on rank 1: Send count 256 type 7 to rank 0 timed out, without its Recv", send_without_receive},
    {"receive_without_send", "Recv count 256 type 7 from rank [01] timed out, without its Send", receive_without_send},
    {"send_count_differs", "NCCL call #1 differs: rank 0 Recv count 256 type 7, rank 1 Send count 255", send_count_differs},
    {"sends_without_group", "Send count 256 type 7 to rank [01] timed out", sends_without_group},
    {"all_to_all_in_place", "overlap", all_to_all_in_place},
    {"gather_overlaps", "overlap", gather_overlaps},
    {"pinned_memory", "not device memory", pinned_memory},
    {"communicators_in_two_orders", "NCCL order: rank (0 issues call #1 of tensor before collective #1 of data, rank 1|1 issues call #1 of data before collective #1 of tensor, rank 0) after it$", communicators_in_two_orders},
    {"communicators_in_two_orders_serial", "NCCL call #1 of (tensor on rank 0|data on rank 1): AllReduce timed out; ranks not in it: [01]$", communicators_in_two_orders_serial},
    {"message_in_two_orders", "NCCL order: rank (1 issues call #1 of tensor before message #2 of pipe from 0 to 1, rank 0|0 issues call #2 of pipe before collective #1 of tensor, rank 1) after it$", message_in_two_orders},
    {"send_then_receive", "NCCL call #1 of (up on rank 0: .* to rank 1|down on rank 1: .* to rank 0) timed out, without its Recv", send_then_receive},
    {"pipeline_sends_then_receives", "NCCL call #2 of pipe on rank [01]: Send .* timed out, without its Recv", pipeline_sends_then_receives},
    {"captured_on_one_rank", "NCCL call #1 differs: .*, captured", captured_on_one_rank},
    {"split_on_one_rank", "NCCL CommSplit on rank 1: timed out; ranks not in it: 0$", split_on_one_rank},
    {"fault_die", "", fault_die},
    {"fault_hang", "AllReduce timed out; ranks not in it: 1$", fault_hang},
    {"fault_error", "", fault_error},
    {"fault_by_name", "rank 1: errors 0, of tensor 6$", fault_by_name},
};
// clang-format on

static void run_bug(int bug, ncclUniqueId id, int rank) {
    Gpu gpu;
    Rank r = {NULL, NULL, NULL, &gpu, rank};
    gpu_open(&gpu, rank);
    r.small = (float*)gpu_alloc(256, sizeof(float), "small");
    r.large = (float*)gpu_alloc(512, sizeof(float), "large");
    NCCL_OK(ncclCommInitRank(&r.comm, 2, id, rank));
    bugs[bug].run(&r);
    wait_for_all(&gpu);
}

// Runs `rank_main` in a process for each rank; true if all ended well.
template <class F> static bool run_ranks(int ranks, F rank_main) {
    ncclUniqueId id;
    bool ok = ncclGetUniqueId(&id) == ncclSuccess;
    for (int rank = 0; rank < ranks; rank++) {
        if (fork() == 0) {
            rank_main(id, rank);
            fflush(stdout);
            _exit(test_failures_ != 0);
        }
    }
    for (int rank = 0; rank < ranks; rank++) {
        int status;
        wait(&status);
        ok = ok && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    return ok;
}

// Tests with this value of CUSIM_NCCL_SERIAL.
static void test_all(const char* serial) {
    const Shape shapes[] = {{2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {2, 2, 1}, {2, 1, 2}, {2, 2, 2}};
    ncclUniqueId other;
    setenv("CUSIM_NCCL_SERIAL", serial, 1);
    NCCL_OK(ncclGetUniqueId(&other));
    const bool ok = run_ranks(3, [=](ncclUniqueId id, int rank) { test_rank(id, other, rank, 3); });
    EXPECT(ok, "a rank failed, CUSIM_NCCL_SERIAL=%s", serial);
    for (Shape shape : shapes) {
        const bool runs = run_ranks(shape.stages * shape.tensor * shape.data,
                                    [=](ncclUniqueId id, int rank) { test_pipeline(id, rank, shape); });
        EXPECT(runs, "%d stages, tensor %d, data %d, CUSIM_NCCL_SERIAL=%s", shape.stages, shape.tensor,
               shape.data, serial);
    }
}

int main(int argc, char** argv) {
    if (argc == 1) {
        test_all("0");
        test_all("1");
        return test_done("nccl");
    }
    for (size_t i = 0; i < sizeof(bugs) / sizeof(bugs[0]); i++) {
        if (strcmp(argv[1], "list") == 0) {
            printf("%s up %s\n", bugs[i].name, bugs[i].message);
        } else if (strcmp(argv[1], bugs[i].name) == 0) {
            return run_ranks(2, [i](ncclUniqueId id, int rank) { run_bug((int)i, id, rank); }) ? 0 : 2;
        }
    }
    return 0;
}
