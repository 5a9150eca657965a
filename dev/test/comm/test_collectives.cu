// test_collectives.cu -- collectives between GPUs. Alone: a group of one, without and with NCCL's
// communicator. Under mpirun (test_ranks.sh):
//
//     test_collectives [device N]                checks the results in each rank, all on device N
//     test_collectives MODE [--option ...]       ends all ranks by one of these:
//         check    group_gpu_check, if NCCL has noticed an error
//         wait     the watchdog: the others do not call the all-gather that rank 0 waits for
#include "llmc/base/check.h"
#include "llmc/comm/comm.h"
#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/parallel/context_parallel.cuh"
#include "llmc/setup/launcher.h"
#include "llmc/setup/options.h"

#include "dev/test/lib/test.h"

// Returns element i of the piece from one rank to another. Sums of them are exact in 16 bits.
static float value_of(int from, int to, size_t i) { return (float)((from * 5 + to * 3 + i) % 13); }

// Element i of a tensor as rank `from` fills it: pieces of `count` for ranks 0, 1, ...
static float filled(int from, size_t count, size_t i) { return value_of(from, (int)(i / count), i % count); }

template <class T, class F> static void fill(T* device, size_t count, const Gpu* gpu, F value) {
    T* host = (T*)check_alloc(count, sizeof(T), "host");
    for (size_t i = 0; i < count; i++) {
        host[i] = from_float<T>(value(i));
    }
    CUDA_CHECK(cudaMemcpyAsync(device, host, count * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(host);
}

template <class T, class F>
static void expect_all(const T* device, size_t count, const Gpu* gpu, const char* what, F value) {
    T* host = (T*)check_alloc(count, sizeof(T), "host");
    CUDA_CHECK(cudaMemcpyAsync(host, device, count * sizeof(T), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        wrong += !(to_float(host[i]) == value(i));
    }
    EXPECT(wrong == 0, "%s of %zu %s: %zu are wrong", what, count, dtype_name(DTYPE_OF(T)), wrong);
    free(host);
}

static float sum_of(int size, int to, size_t i) {
    float sum = 0;
    for (int r = 0; r < size; r++) {
        sum += value_of(r, to, i);
    }
    return sum;
}

// ---- each operation ----

template <class T> static void test_operations(const GroupGpu* g, const Gpu* gpu, size_t count) {
    const size_t all = g->size * count;
    const int rank = g->rank, size = g->size;
    const DType type = DTYPE_OF(T);
    T* send = (T*)gpu_alloc(all, sizeof(T), "send");
    T* recv = (T*)gpu_alloc(all, sizeof(T), "recv");
    fill(send, all, gpu, [=](size_t i) { return filled(rank, count, i); });
    group_all_to_all(recv, send, count, type, g, gpu->stream);
    expect_all(recv, all, gpu, "all-to-all",
               [=](size_t i) { return value_of((int)(i / count), rank, i % count); });
    group_all_gather(recv, send, count, type, g, gpu->stream);
    expect_all(recv, all, gpu, "all-gather",
               [=](size_t i) { return value_of((int)(i / count), 0, i % count); });
    group_reduce_scatter(recv, send, count, type, g, gpu->stream);
    expect_all(recv, count, gpu, "reduce-scatter", [=](size_t i) { return sum_of(size, rank, i); });
    expect_all(send, all, gpu, "what was sent", [=](size_t i) { return filled(rank, count, i); });
    group_reduce_scatter(send + rank * count, send, count, type, g, gpu->stream);
    group_all_gather(send, send + rank * count, count, type, g, gpu->stream);
    expect_all(send, all, gpu, "in place",
               [=](size_t i) { return sum_of(size, (int)(i / count), i % count); });
    gpu_free(send);
    gpu_free(recv);
}

static void test_sizes(const GroupGpu* g, const Gpu* gpu) {
    const size_t counts[] = {0, 1, 31, 1024, 300001};
    for (size_t count : counts) {
        test_operations<float>(g, gpu, count);
    }
    test_operations<bf16>(g, gpu, 33);
    test_operations<fp16>(g, gpu, 70001);
}

// Every second rank, and what these move among themselves.
static void test_split(const GroupGpu* all, const Gpu* gpu) {
    GroupGpu half;
    group_gpu_split(&half, all, all->rank % 2, "half");
    EXPECT(half.size == (all->size + 1 - all->rank % 2) / 2 && half.rank == all->rank / 2, "rank %d of %d",
           half.rank, half.size);
    test_operations<float>(&half, gpu, 1000);
    group_gpu_close_part(&half);
}

// ---- streams and graphs ----

// Two streams, with work in between on a third.
typedef struct {
    const GroupGpu* g;
    Gpu main, side;
    cudaEvent_t fork, join;
    float *a, *b, *c; // (size, COUNT)
} Streams;

enum { COUNT = 1000 };

static void streams_open(Streams* s, const GroupGpu* g, const Gpu* gpu) {
    s->g = g;
    s->main = s->side = *gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&s->main.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&s->side.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&s->fork, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&s->join, cudaEventDisableTiming));
    s->a = (float*)gpu_alloc(g->size * COUNT, sizeof(float), "a");
    s->b = (float*)gpu_alloc(g->size * COUNT, sizeof(float), "b");
    s->c = (float*)gpu_alloc(g->size * COUNT, sizeof(float), "c");
}

static void streams_close(Streams* s) {
    CUDA_CHECK(cudaStreamDestroy(s->main.stream));
    CUDA_CHECK(cudaStreamDestroy(s->side.stream));
    CUDA_CHECK(cudaEventDestroy(s->fork));
    CUDA_CHECK(cudaEventDestroy(s->join));
    gpu_free(s->a);
    gpu_free(s->b);
    gpu_free(s->c);
}

// b = pieces of a, c = sums of them in all ranks, on the side; a = the other way round, after that.
static void streams_work(Streams* s) {
    const int rank = s->g->rank;
    CUDA_CHECK(cudaEventRecord(s->fork, s->main.stream));
    CUDA_CHECK(cudaStreamWaitEvent(s->side.stream, s->fork, 0));
    group_all_to_all(s->b, s->a, COUNT, DTYPE_FP32, s->g, s->side.stream);
    group_reduce_scatter(s->c + rank * COUNT, s->a, COUNT, DTYPE_FP32, s->g, s->side.stream);
    CUDA_CHECK(cudaEventRecord(s->join, s->side.stream));
    CUDA_CHECK(cudaStreamWaitEvent(s->main.stream, s->join, 0));
    group_all_to_all(s->a, s->b, COUNT, DTYPE_FP32, s->g, s->main.stream);
    group_all_gather(s->c, s->c + rank * COUNT, COUNT, DTYPE_FP32, s->g, s->main.stream);
}

// Expects the results. The contents of `a` are exchanged twice, so they are as before.
static void streams_expect(Streams* s) {
    const int rank = s->g->rank, size = s->g->size;
    const size_t all = size * COUNT;
    expect_all(s->a, all, &s->main, "a", [=](size_t i) { return filled(rank, COUNT, i); });
    expect_all(s->b, all, &s->main, "b",
               [=](size_t i) { return value_of((int)(i / COUNT), rank, i % COUNT); });
    expect_all(s->c, all, &s->main, "c", [=](size_t i) { return sum_of(size, (int)(i / COUNT), i % COUNT); });
}

// Does the work as a graph and then outside of it, three times. Where events keep the order of
// exchanges, none can be captured.
template <class F> static void repeat_work(const GroupGpu* g, const Gpu* gpu, F work) {
    cudaGraphExec_t graph = NULL;
    if (!g->last) {
        graph_capture_begin(gpu);
        work();
        graph = graph_capture_end(gpu);
    }
    for (int i = 0; i < 3; i++) {
        if (graph) {
            CUDA_CHECK(cudaGraphLaunch(graph, gpu->stream));
        }
        work();
    }
    if (graph) {
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        CUDA_CHECK(cudaGraphExecDestroy(graph));
    }
}

static void test_streams(const GroupGpu* g, const Gpu* gpu) {
    Streams s;
    const int rank = g->rank;
    streams_open(&s, g, gpu);
    fill(s.a, g->size * COUNT, gpu, [=](size_t i) { return filled(rank, COUNT, i); });
    streams_work(&s);
    streams_expect(&s);
    repeat_work(g, &s.main, [&] {
        CUDA_CHECK(cudaMemsetAsync(s.b, 0, g->size * COUNT * sizeof(float), s.main.stream));
        streams_work(&s);
    });
    streams_expect(&s);
    streams_close(&s);
}

// ---- sends and receives of any sizes ----

enum { MOST_BYTES = 500000, MOST_MOVES = 64 };

// Returns the bytes of a message: others for each pair of ranks, none from 0 to 1.
static size_t bytes_of_pair(int from, int to) {
    return from == 0 && to == 1 ? 0 : (size_t)(100003 * from + 1009 * to + 1) % MOST_BYTES;
}

static unsigned char byte_of(int from, int to, size_t i) {
    return (unsigned char)(from * 31 + to * 7 + (int)(i % 251));
}

// Messages of this rank. Each has its own buffer: sent is byte_of, received must be.
typedef struct {
    const GroupGpu* g;
    GroupMove moves[MOST_MOVES];
    int count;
} Messages;

// Copies a message to the GPU, or bytes that are wrong everywhere.
static void message_write(const GroupMove* move, int from, int to, int wrong) {
    unsigned char* host = (unsigned char*)check_alloc(move->bytes + 1, 1, "host");
    for (size_t i = 0; i < move->bytes; i++) {
        host[i] = (unsigned char)(byte_of(from, to, i) + wrong);
    }
    CUDA_CHECK(cudaMemcpy(move->data, host, move->bytes, cudaMemcpyHostToDevice));
    free(host);
}

static void messages_add(Messages* m, int peer, size_t bytes, int sends) {
    const GroupMove move = {peer, gpu_alloc(bytes + 1, 1, "message"), bytes, sends};
    m->moves[m->count++] = move;
}

static void messages_reset(const Messages* m) {
    for (int i = 0; i < m->count; i++) {
        const GroupMove* move = &m->moves[i];
        message_write(move, move->sends ? m->g->rank : move->peer, move->sends ? move->peer : m->g->rank,
                      !move->sends);
    }
}

static void messages_expect(const Messages* m, const char* what) {
    for (int k = 0; k < m->count; k++) {
        const GroupMove* move = &m->moves[k];
        const int rank = m->g->rank, peer = move->peer;
        unsigned char* host = (unsigned char*)check_alloc(move->bytes + 1, 1, "host");
        size_t wrong = 0;
        CUDA_CHECK(cudaMemcpy(host, move->data, move->bytes, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < move->bytes; i++) {
            wrong += host[i] != (move->sends ? byte_of(rank, peer, i) : byte_of(peer, rank, i));
        }
        EXPECT(wrong == 0, "%s: %zu of %zu bytes %s %d are wrong", what, wrong, move->bytes,
               move->sends ? "to" : "from", peer);
        free(host);
    }
}

static void messages_free(Messages* m) {
    for (int i = 0; i < m->count; i++) {
        gpu_free(m->moves[i].data);
    }
}

// Two messages from each rank to each, itself too, which keep their order.
static Messages messages_of_all(const GroupGpu* g) {
    Messages m = {g, {}, 0};
    for (int peer = 0; peer < g->size; peer++) {
        messages_add(&m, peer, bytes_of_pair(peer, g->rank), 0);
        messages_add(&m, peer, bytes_of_pair(g->rank, peer), 1);
        messages_add(&m, peer, 3, 0);
        messages_add(&m, peer, 3, 1);
    }
    return m;
}

// Both neighbors in a row of ranks: one at its ends, none if it is alone.
static Messages messages_of_neighbors(const GroupGpu* g) {
    Messages m = {g, {}, 0};
    for (int peer = g->rank - 1; peer <= g->rank + 1; peer += 2) {
        if (peer >= 0 && peer < g->size) {
            messages_add(&m, peer, 70001, 1);
            messages_add(&m, peer, 70001, 0);
        }
    }
    return m;
}

static void test_exchange(const GroupGpu* g, const Gpu* gpu) {
    Messages both[] = {messages_of_all(g), messages_of_neighbors(g)};
    for (Messages& m : both) {
        messages_reset(&m);
        group_exchange(m.moves, m.count, g, gpu->stream);
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        messages_expect(&m, "exchange");
        messages_free(&m);
    }
}

// ---- several groups ----

// Groups as in a grid: pairs of neighbors; every second rank; all in a row. Each has its own data.
typedef struct {
    GroupGpu tensor, data;
    Messages pipe;
    Streams on_tensor, on_data;
    cudaEvent_t fork, join;
} Several;

static void several_open(Several* s, const GroupGpu* all, const Gpu* gpu) {
    group_gpu_split(&s->tensor, all, all->rank / 2, "tensor");
    group_gpu_split(&s->data, all, all->rank % 2, "data");
    s->pipe = messages_of_neighbors(all);
    streams_open(&s->on_tensor, &s->tensor, gpu);
    streams_open(&s->on_data, &s->data, gpu);
    CUDA_CHECK(cudaEventCreateWithFlags(&s->fork, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&s->join, cudaEventDisableTiming));
}

static void several_close(Several* s) {
    CUDA_CHECK(cudaEventDestroy(s->fork));
    CUDA_CHECK(cudaEventDestroy(s->join));
    streams_close(&s->on_data);
    streams_close(&s->on_tensor);
    messages_free(&s->pipe);
    group_gpu_close_part(&s->data);
    group_gpu_close_part(&s->tensor);
}

// Queues operations of all three groups: those of the data group beside the others.
static void several_work(Several* s, const GroupGpu* all) {
    const cudaStream_t main = s->on_tensor.main.stream;
    CUDA_CHECK(cudaEventRecord(s->fork, main));
    CUDA_CHECK(cudaStreamWaitEvent(s->on_data.main.stream, s->fork, 0));
    streams_work(&s->on_data);
    CUDA_CHECK(cudaEventRecord(s->join, s->on_data.main.stream));
    streams_work(&s->on_tensor);
    group_exchange(s->pipe.moves, s->pipe.count, all, main);
    CUDA_CHECK(cudaStreamWaitEvent(main, s->join, 0));
}

static void several_expect(Several* s) {
    CUDA_CHECK(cudaStreamSynchronize(s->on_tensor.main.stream));
    streams_expect(&s->on_tensor);
    streams_expect(&s->on_data);
    messages_expect(&s->pipe, "exchange beside other groups");
}

// Tests them one by one, then in a graph and between its launches.
static void test_several(const GroupGpu* all, const Gpu* gpu) {
    Several s;
    several_open(&s, all, gpu);
    for (Streams* streams : {&s.on_tensor, &s.on_data}) {
        const int rank = streams->g->rank;
        fill(streams->a, streams->g->size * COUNT, gpu, [=](size_t i) { return filled(rank, COUNT, i); });
    }
    messages_reset(&s.pipe);
    several_work(&s, all);
    several_expect(&s);
    messages_reset(&s.pipe);
    repeat_work(all, &s.on_tensor.main, [&] { several_work(&s, all); });
    several_expect(&s);
    several_close(&s);
}

static void test_group(const GroupGpu* g, const Gpu* gpu) {
    test_sizes(g, gpu);
    test_split(g, gpu);
    test_exchange(g, gpu);
    test_several(g, gpu);
    test_streams(g, gpu);
    group_gpu_check(g);
}

// One process needs no communicator, but NCCL has groups of one.
static void test_group_of_one(const Comm* c, const Gpu* gpu) {
#ifdef HAVE_NCCL
    GroupGpu g = {0, 1, NULL, (Comm*)c, "", NULL};
    ncclUniqueId id;
    NCCL_CHECK(ncclGetUniqueId(&id));
    NCCL_CHECK(ncclCommInitRank(&g.communicator, 1, id, 0));
    test_group(&g, gpu);
    group_gpu_close(&g);
    EXPECT(!g.communicator);
#endif
    (void)c, (void)gpu;
}

// ---- sequences that are divided among all ranks ----

static float* filled_floats(size_t count, int from) {
    float* x = (float*)check_alloc(count, sizeof(float), "host");
    for (size_t i = 0; i < count; i++) {
        x[i] = filled(from, 7, i) / 3; // sums depend on their order
    }
    return x;
}

static float* on_gpu(const float* x, size_t count, const Gpu* gpu) {
    float* device = (float*)gpu_alloc(count, sizeof(float), "device");
    fill(device, count, gpu, [x](size_t i) { return x[i]; });
    return device;
}

static void expect_like_cpu(const float* device, const float* host, size_t count, const Gpu* gpu,
                            const char* what) {
    expect_all(device, count, gpu, what, [host](size_t i) { return host[i]; });
}

// Compares context_parallel.cuh with context_parallel.h, in fp32: keys and values, the sums of
// their gradients, and words of tokens have the same bits.
static void test_context(const GroupGpu* g, const Gpu* gpu) {
    Comm* comm = g->comm;
    const AttentionSizes sizes = {2, 6, 4, 2, 5, 1, {g->size - 1, g->rank}};
    const size_t N = 12, qkv_count = N * (size_t)attention_qkv_size(sizes),
                 kv_count = context_elements(sizes);
    Memory host = memory_on_host(), device = memory_on_gpu();
    Group cpu;
    ContextParallel want;
    ContextParallelGpu<float> got;
    group_open(&cpu, comm, 0, comm->rank);
    context_open_cpu(&want, &host, sizes, &cpu);
    context_open(&got, &device, sizes, g);
    float *qkv = filled_floats(qkv_count, g->rank), *dkv = filled_floats(kv_count, g->rank + 1),
          *losses = filled_floats(N * (size_t)g->size, 0), *gathered = filled_floats(N * (size_t)g->size, 0);
    float *d_qkv = on_gpu(qkv, qkv_count, gpu), *d_own = on_gpu(qkv, N, gpu);
    expect_like_cpu(context_gather(&got, (const float*)d_qkv, sizes, gpu),
                    context_gather_cpu(&want, qkv, sizes), kv_count, gpu, "context_gather");
    memcpy(want.dkv, dkv, kv_count * sizeof(float));
    fill(got.dkv, kv_count, gpu, [dkv](size_t i) { return dkv[i]; });
    context_sum_cpu(qkv, &want, sizes);
    context_sum(d_qkv, &got, sizes, gpu);
    expect_like_cpu(d_qkv, qkv, qkv_count, gpu, "context_sum");
    context_gather_tokens_cpu(losses, &want, qkv, sizes);
    fill(d_own, N, gpu, [qkv](size_t i) { return qkv[i]; });
    context_gather_tokens(gathered, &got, d_own, sizes, gpu);
    EXPECT(memcmp(gathered, losses, N * (size_t)g->size * sizeof(float)) == 0, "context_gather_tokens");
    gpu_free(d_own);
    gpu_free(d_qkv);
    for (float* x : {qkv, dkv, losses, gathered}) {
        free(x);
    }
    group_close(&cpu);
    memory_close(&device);
    memory_close(&host);
}

// ---- devices ----

#ifdef CUSIM
static void too_few_devices(const void* c) { gpu_device_of_rank((const Comm*)c, -1); }
#endif

static void test_devices(const Comm* c) {
    Comm other = *c;
    other.local_rank = 1;
    other.local_size = 3;
    EXPECT(gpu_device_of_rank(&other, 5) == 5);
#ifdef CUSIM
    setenv("CUSIM_DEVICES", "3", 1);
    EXPECT(gpu_device_of_rank(&other, -1) == 1);
    setenv("CUSIM_DEVICES", "1", 1);
    EXPECT(gpu_device_of_rank(&other, -1) == 0, "the only one that it sees");
    setenv("CUSIM_DEVICES", "2", 1);
    EXPECT(test_dies(too_few_devices, &other, EXIT_FAILURE, "3 processes on|has 2 GPUs"));
    unsetenv("CUSIM_DEVICES");
#endif
}

// ---- the ends ----

static void end_check(const GroupGpu* g, const Gpu* gpu) {
    float* data = (float*)gpu_alloc(g->size, sizeof(float), "data");
    comm_progress(g->comm, COMM_UPDATE, 12, "the GPU's work");
    group_all_gather(data, data + g->rank, 1, DTYPE_FP32, g, gpu->stream);
    group_all_gather(data, data + g->rank, 1, DTYPE_FP32, g, gpu->stream);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    group_gpu_check(g);
    comm_barrier(g->comm);
    gpu_free(data);
}

static void end_wait(const GroupGpu* g, const Gpu* gpu) {
    comm_progress(g->comm, COMM_BACKWARD, 12, "reduce of block 7");
    if (g->rank == 0) {
        end_check(g, gpu);
    }
    comm_barrier(g->comm);
}

static void run_mode(const char* mode, const GroupGpu* g, const Gpu* gpu) {
    comm_progress(g->comm, COMM_FORWARD, 11, "block 1");
    usleep(600000); // long enough for the watchdog to see a whole step
    if (strcmp(mode, "check") == 0) {
        end_check(g, gpu);
    } else if (strcmp(mode, "wait") == 0) {
        end_wait(g, gpu);
    } else {
        die_usage("unknown mode %s", mode);
    }
}

static void run_tests(const GroupGpu* g, const Gpu* gpu) {
    const Comm* c = g->comm;
    EXPECT(g->rank == c->rank && g->size == c->size && !g->communicator == (c->size == 1));
    EXPECT(!*g->library == (c->size == 1), "%s", g->library);
    test_devices(c);
    test_group(g, gpu);
    if (c->size == 1) {
        test_group_of_one(c, gpu);
    } else {
#ifdef HAVE_MPI // else CPUs have no groups
        test_context(g, gpu);
#endif
    }
}

int main(int argc, char** argv) {
    const char* mode = argc > 1 && argv[1][0] != '-' ? argv[1] : NULL;
    const int takes_device = mode && strcmp(mode, "device") == 0, words = !!mode + takes_device;
    const int device = takes_device && argc > 2 ? atoi(argv[2]) : -1;
    Comm comm;
    Gpu gpu;
    GroupGpu group;
    Options options;
    comm_expect(&comm, launcher_expect());
    options_parse(&options, argc - words, argv + words, options_program(OPTION_GPU));
    const Launcher launched = launcher_find(&options);
    comm_open(&comm, launched.place, &launched.meeting, options.ranks.timeout);
    gpu_open(&gpu, gpu_device_of_rank(&comm, device));
    group_gpu_open(&group, &comm, GROUP_SEVERAL_STREAMS);
    if (mode && !takes_device) {
        run_mode(mode, &group, &gpu);
    } else {
        run_tests(&group, &gpu);
    }
    group_gpu_close(&group);
    gpu_close(&gpu);
    comm_agree(&comm, "the results of test_collectives", test_failures_ > 0,
               test_failures_ ? "failures" : "ok");
    comm_close(&comm);
    return test_done("test_collectives");
}
