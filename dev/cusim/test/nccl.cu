/*
nccl.cu -- the NCCL twin between processes.

    nccl            every collective on three ranks, against sums made here
    nccl list       planted bugs
    nccl NAME       a program of two ranks with this bug: exit status 0 if nothing was noticed
*/
#include "llmc/gpu/gpu.cuh"
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

// Tests two communicators on two streams, for which the ranks wait in other orders: no problem for
// a GPU.
static void test_two_streams(const Gpu* gpu, ncclComm_t comm, int rank) {
    ncclComm_t other;
    Gpu side = *gpu;
    float *a = to_device<float>(gpu, rank, 8), *b = to_device<float>(gpu, rank, 8);
    auto sum = [](int i) { return element(0, i) + element(1, i) + element(2, i); };
    NCCL_OK(ncclCommSplit(comm, 0, rank, &other, NULL));
    CUDA_CHECK(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
    if (rank != 1) {
        NCCL_OK(ncclAllReduce(a, a, 8, ncclFloat32, ncclSum, comm, gpu->stream));
    }
    NCCL_OK(ncclAllReduce(b, b, 8, ncclFloat32, ncclSum, other, side.stream));
    if (rank == 1) {
        NCCL_OK(ncclAllReduce(a, a, 8, ncclFloat32, ncclSum, comm, gpu->stream));
    }
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
    test_two_streams(&gpu, comm, rank);
    NCCL_OK(ncclCommDestroy(comm));
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
    ncclComm_t comms[2] = {r->comm, NULL};
    NCCL_OK(ncclCommSplit(r->comm, 0, r->rank, &comms[1], NULL));
    setenv("CUSIM_NCCL_SERIAL", "1", 1);
    for (int i = 0; i < 2; i++) {
        const int k = i ^ r->rank;
        NCCL_OK(ncclAllReduce(r->small + 128 * k, r->large + 128 * k, 128, ncclFloat32, ncclSum, comms[k],
                              k ? other.stream : r->gpu->stream));
    }
    wait_for_all(&other);
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

// clang-format off
static const struct {
    const char *name, *noticed_by;
    void (*run)(const Rank*);
} bugs[] = {
    {"counts_differ", "up", counts_differ},
    {"types_differ", "up", types_differ},
    {"rank_missing", "up", rank_missing},
    {"orders_differ", "up", orders_differ},
    {"receive_buffer_too_small", "up", receive_buffer_too_small},
    {"send_without_receive", "up", send_without_receive},
    {"receive_without_send", "up", receive_without_send},
    {"send_count_differs", "up", send_count_differs},
    {"sends_without_group", "up", sends_without_group},
    {"all_to_all_in_place", "up", all_to_all_in_place},
    {"gather_overlaps", "up", gather_overlaps},
    {"pinned_memory", "up", pinned_memory},
    {"communicators_in_two_orders", "up", communicators_in_two_orders},
    {"captured_on_one_rank", "up", captured_on_one_rank},
    {"split_on_one_rank", "up", split_on_one_rank},
    {"fault_die", "up", fault_die},
    {"fault_hang", "up", fault_hang},
    {"fault_error", "up", fault_error},
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

int main(int argc, char** argv) {
    if (argc == 1) {
        ncclUniqueId other;
        NCCL_OK(ncclGetUniqueId(&other));
        const bool ok = run_ranks(3, [=](ncclUniqueId id, int rank) { test_rank(id, other, rank, 3); });
        EXPECT(ok, "a rank failed");
        return test_done("nccl");
    }
    for (size_t i = 0; i < sizeof(bugs) / sizeof(bugs[0]); i++) {
        if (strcmp(argv[1], "list") == 0) {
            printf("%s %s\n", bugs[i].name, bugs[i].noticed_by);
        } else if (strcmp(argv[1], bugs[i].name) == 0) {
            return run_ranks(2, [i](ncclUniqueId id, int rank) { run_bug((int)i, id, rank); }) ? 0 : 2;
        }
    }
    return 0;
}
