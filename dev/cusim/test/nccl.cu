/*
nccl.cu -- the NCCL twin between processes.

    nccl            every collective on three ranks, against sums made here
    nccl list       planted bugs
    nccl NAME       a program of two ranks with this bug: exit status 0 if nothing was noticed
*/
#include "llmc/gpu.cuh"
#include "dev/test/test.h"
#include <nccl.h>

enum { MORE_THAN_A_CHUNK = 300000 }; // elements of 4 bytes; the twin sends 1 MiB at a time

#define NCCL_OK(call) EXPECT((call) == ncclSuccess, "%s", #call)

template <class T> static ncclDataType_t nccl_type();
template <> ncclDataType_t nccl_type<float>() { return ncclFloat32; }
template <> ncclDataType_t nccl_type<bf16>() { return ncclBfloat16; }
template <> ncclDataType_t nccl_type<fp16>() { return ncclFloat16; }

static void wait_for_all(const Gpu* gpu) { CUDA_CHECK(cudaStreamSynchronize(gpu->stream)); }

// Small integers, so that all sums are exact in every type.
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

// Element i of `data` must be want(i).
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

// In place, two in a group, in a captured graph.
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

static void test_rank(ncclUniqueId id, int rank, int ranks) {
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
static void receive_buffer_too_small(const Rank* r) { // only AddressSanitizer can see it
    ncclAllGather(r->small, r->large, 257, ncclFloat32, r->comm, r->gpu->stream);
}

// clang-format off
static const struct {
    const char *name, *noticed_by;
    void (*run)(const Rank*);
} bugs[] = {
    {"counts_differ", "up", counts_differ},
    {"types_differ", "up", types_differ},
    {"rank_missing", "up", rank_missing},
    {"orders_differ", "up", orders_differ},
    {"receive_buffer_too_small", "asan", receive_buffer_too_small},
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
        const bool ok = run_ranks(3, [](ncclUniqueId id, int rank) { test_rank(id, rank, 3); });
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
