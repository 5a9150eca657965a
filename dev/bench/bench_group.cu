/*
bench_group.cu -- communication between the GPUs of a run (comm_nccl.cuh, tensor_parallel.cuh): time
and bandwidth by size.

    mpirun -n 8 --bind-to none build/cuda/<arch>-BF16/bench_group              4 KiB to 256 MiB
    mpirun -n 8 --bind-to none build/cuda/<arch>-BF16/bench_group 65536 65536  one size, in bytes
    ... bench_group 67108864 67108864 beside     also beside matmuls on another stream

A size is that of an array on each GPU: gathers receive it, the other operations send it.

    tensor-gather     rows of the stream of each GPU: an all-gather, by sends and receives
    tensor-sum        parts of all GPUs added up, rows by rows: what a reduce-scatter computes, but
                      by sends and receives, and a kernel that adds in fp32 in order
    stage-exchange    each GPU sends its stream to the next one, and receives another, as stages do

Each line of the table is the median of the rounds, on the slowest GPU; a round is many calls, one
after the other, between two events. GB/s is what a GPU sends, and receives at the same time:
(n-1)/n of the array; in a stage-exchange all of it. Beside matmuls of 8192 x 8192 (64 x 64 if
arrays are small, for tests): the time of a call, and how many times as long a matmul takes. Both
depend on NCCL_MAX_P2P_NCHANNELS and NCCL_MAX_CTAS, the multiprocessors that NCCL takes.
*/
#include "llmc/comm/comm.h"
#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/matmul.cuh"
#include "llmc/parallel/tensor_parallel.cuh"
#include "llmc/setup/launcher.h"
#include "llmc/setup/options.h"

enum { ROUNDS = 7, CALLS_MOST = 50 };
// bytes that a round moves at least, up to CALLS_MOST calls
static const size_t ROUND_BYTES = (size_t)1 << 30;

typedef enum {
    ALL_TO_ALL,
    ALL_GATHER,
    REDUCE_SCATTER,
    TENSOR_GATHER,
    TENSOR_SUM,
    STAGE_EXCHANGE,
    OPERATIONS
} Operation;
static const char* const NAMES[OPERATIONS] = {"all-to-all",    "all-gather", "reduce-scatter",
                                              "tensor-gather", "tensor-sum", "stage-exchange"};
enum { CHANNELS = 4096 }; // of the stream, at most

// Matmuls on a stream of their own.
typedef struct {
    int side; // of all matrices; 0: no matmuls
    Gpu gpu;
    MatmulGpu matmul;
    Memory memory;
    cudaEvent_t start, stop;
    floatX *out, *inp, *weight;
    double ms; // of one that is alone
} Beside;

typedef struct {
    Comm comm;
    Gpu gpu;
    GroupGpu group;
    cudaEvent_t start, stop;
    void *send, *recv, *sum;
    Beside beside;
} Bench;

// Returns a tensor group of all ranks, for `count` elements of the stream in each.
static TensorParallelGpu tensor_of(const Bench* b, size_t count) {
    const int C = (int)(count < (size_t)CHANNELS ? count : (size_t)CHANNELS), rows = (int)(count / C);
    const TensorCut cut = {b->group.rank, b->group.size, rows * b->group.size, C, 1};
    return TensorParallelGpu{cut, &b->group, (floatX*)b->recv, (floatX*)b->send, (floatX*)b->recv, &b->gpu};
}

// Sends the stream to the next rank, and receives another from the rank before.
static void exchange_stages(const Bench* b, size_t bytes) {
    const int n = b->group.size, next = (b->group.rank + 1) % n, before = (b->group.rank + n - 1) % n;
    const GroupMove moves[] = {{next, b->send, bytes, 1}, {before, b->recv, bytes, 0}};
    group_exchange(moves, 2, &b->group, b->gpu.stream);
}

// Makes a call in which each rank has `count` elements for each.
static void call(const Bench* b, Operation operation, size_t count) {
    const TensorParallelGpu tensor = tensor_of(b, count);
    switch (operation) {
    case ALL_TO_ALL:
        group_all_to_all(b->recv, b->send, count, DTYPE_OF(floatX), &b->group, b->gpu.stream);
        break;
    case ALL_GATHER:
        group_all_gather(b->recv, b->send, count, DTYPE_OF(floatX), &b->group, b->gpu.stream);
        break;
    case REDUCE_SCATTER:
        group_reduce_scatter(b->recv, b->send, count, DTYPE_OF(floatX), &b->group, b->gpu.stream);
        break;
    case TENSOR_GATHER:
        tensor_gather(&tensor, 0, (const floatX*)b->send);
        break;
    case TENSOR_SUM:
        tensor_sum(&tensor, (floatX*)b->sum, NULL, NULL);
        break;
    default:
        exchange_stages(b, count * b->group.size * sizeof(floatX));
        break;
    }
}

// Returns the milliseconds of one call on this rank: the mean of `calls`.
static double round_ms(const Bench* b, Operation operation, size_t count, int calls) {
    float ms;
    comm_barrier((Comm*)&b->comm);
    CUDA_CHECK(cudaEventRecord(b->start, b->gpu.stream));
    for (int i = 0; i < calls; i++) {
        call(b, operation, count);
    }
    CUDA_CHECK(cudaEventRecord(b->stop, b->gpu.stream));
    CUDA_CHECK(cudaEventSynchronize(b->stop));
    CUDA_CHECK(cudaEventElapsedTime(&ms, b->start, b->stop));
    return ms / calls;
}

static int by_size(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Returns the largest value of all ranks.
static double slowest(Bench* b, double mine) {
    double* all = (double*)check_alloc((size_t)b->comm.size, sizeof(double), "times");
    comm_all_gather(&b->comm, all, &mine, sizeof(mine));
    for (int r = 0; r < b->comm.size; r++) {
        mine = all[r] > mine ? all[r] : mine;
    }
    free(all);
    return mine;
}

// ---- matmuls ----

static void matmuls_begin(Beside* m, int count) {
    CUDA_CHECK(cudaEventRecord(m->start, m->gpu.stream));
    for (int i = 0; i < count; i++) {
        matmul_forward(m->out, (const floatX*)m->inp, (const floatX*)m->weight, (const floatX*)NULL,
                       {m->side, m->side, m->side}, &m->matmul);
    }
    CUDA_CHECK(cudaEventRecord(m->stop, m->gpu.stream));
}

// Returns the milliseconds of each.
static double matmuls_end(Beside* m, int count) {
    float ms;
    CUDA_CHECK(cudaEventSynchronize(m->stop));
    CUDA_CHECK(cudaEventElapsedTime(&ms, m->start, m->stop));
    return ms / count;
}

static void matmuls_open(Beside* m, const Gpu* gpu, size_t most) {
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, 0, 0};
    const size_t large = (size_t)1 << 20;
    m->side = most < large ? 64 : 8192;
    m->gpu = *gpu;
    m->memory = memory_on_gpu();
    CUDA_CHECK(cudaStreamCreateWithFlags(&m->gpu.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&m->start));
    CUDA_CHECK(cudaEventCreate(&m->stop));
    matmul_gpu_open(&m->matmul, &m->memory, &m->gpu, settings);
    floatX** const arrays[] = {&m->out, &m->inp, &m->weight};
    for (floatX** array : arrays) {
        *array = (floatX*)memory_take(&m->memory, "matrices", MEMORY_DEVICE,
                                      (size_t)m->side * m->side * sizeof(floatX));
    }
    for (int i = 0; i < 2; i++) { // the first time loads kernels
        matmuls_begin(m, 20);
        m->ms = matmuls_end(m, 20);
    }
}

static void matmuls_close(Beside* m) {
    if (m->side > 0) {
        matmul_gpu_close(&m->matmul);
        CUDA_CHECK(cudaEventDestroy(m->stop));
        CUDA_CHECK(cudaEventDestroy(m->start));
        CUDA_CHECK(cudaStreamDestroy(m->gpu.stream));
        memory_close(&m->memory);
    }
}

// Prints the time of a call, of `ms` alone, beside matmuls, and how much longer these take.
static void bench_beside(Bench* b, Operation operation, size_t count, int calls, double ms) {
    const int matmuls = (int)(calls * ms / b->beside.ms) + 2;
    comm_barrier(&b->comm);
    matmuls_begin(&b->beside, matmuls);
    const double call_ms = slowest(b, round_ms(b, operation, count, calls)),
                 matmul_ms = slowest(b, matmuls_end(&b->beside, matmuls));
    printf(" %.1f | %.2f |", 1e3 * call_ms, matmul_ms / b->beside.ms);
}

// Prints a line of the table.
static void bench_operation(Bench* b, Operation operation, size_t bytes) {
    double ms[ROUNDS];
    const size_t count = bytes / sizeof(floatX) / (size_t)b->comm.size;
    const int enough = (int)(ROUND_BYTES / bytes) + 1, calls = enough < CALLS_MOST ? enough : CALLS_MOST;
    comm_progress(&b->comm, COMM_UPDATE, (int64_t)bytes, NAMES[operation]);
    round_ms(b, operation, count, 1); // opens connections
    for (int i = 0; i < ROUNDS; i++) {
        ms[i] = slowest(b, round_ms(b, operation, count, calls));
    }
    qsort(ms, ROUNDS, sizeof(ms[0]), by_size);
    const int others = b->comm.size - (operation != STAGE_EXCHANGE);
    const double moved = (double)(sizeof(floatX) * count) * others;
    printf("| %s | %.3g | %.1f | %.2f |", NAMES[operation], (double)bytes / (1 << 20), 1e3 * ms[ROUNDS / 2],
           moved / (1e6 * ms[ROUNDS / 2]));
    if (b->beside.side > 0) {
        bench_beside(b, operation, count, calls, ms[ROUNDS / 2]);
    }
    printf("\n");
    fflush(stdout);
}

static void bench_open(Bench* b, const Options* options, size_t most) {
    const Launcher launched = launcher_find(options);
    comm_open(&b->comm, launched.place, &launched.meeting, options->ranks.timeout);
    if (b->comm.size < 2) {
        die_usage("1 process; wanted several, each with a GPU: mpirun -n 8 bench_group");
    }
    gpu_open(&b->gpu, gpu_device_of_rank(&b->comm, OPTION_AUTO));
    group_gpu_open(&b->group, &b->comm, GROUP_ONE_STREAM);
    CUDA_CHECK(cudaEventCreate(&b->start));
    CUDA_CHECK(cudaEventCreate(&b->stop));
    b->send = gpu_alloc(most, 1, "sent data"); // zeros: links do not care
    b->recv = gpu_alloc(most, 1, "received data");
    b->sum = gpu_alloc(most, 1, "sums");
}

static void bench_close(Bench* b) {
    matmuls_close(&b->beside);
    gpu_free(b->sum);
    gpu_free(b->recv);
    gpu_free(b->send);
    CUDA_CHECK(cudaEventDestroy(b->stop));
    CUDA_CHECK(cudaEventDestroy(b->start));
    group_gpu_close(&b->group);
    gpu_close(&b->gpu);
    comm_close(&b->comm);
}

static size_t bytes_of(const char* text) {
    char* end;
    const double bytes = strtod(text, &end);
    if (*end || !(bytes >= 1024 && bytes <= 1e11)) {
        die_usage("%s: wanted bytes, from 1024 to 1e11", text);
    }
    return (size_t)bytes;
}

int main(int argc, char** argv) {
    const int has_sizes = argc > 2 && argv[1][0] != '-',
              is_beside = has_sizes && argc > 3 && strcmp(argv[3], "beside") == 0,
              words = 2 * has_sizes + is_beside;
    Bench bench;
    Options options;
    memset((void*)&bench, 0, sizeof(bench));
    comm_expect(&bench.comm, launcher_expect());
    const size_t least = has_sizes ? bytes_of(argv[1]) : (size_t)4 << 10,
                 most = has_sizes ? bytes_of(argv[2]) : (size_t)256 << 20;
    const OptionsProgram program = {OPTION_GPU, LLMC_VERSION};
    options_parse(&options, argc - words, argv + words, program);
    bench_open(&bench, &options, most);
    if (is_beside) {
        matmuls_open(&bench.beside, &bench.gpu, most);
    }
    printf("%d x %s, %s, %s\n\n| operation | MiB | us | GB/s |%s\n|---|---:|---:|---:|%s\n", bench.comm.size,
           bench.gpu.name, bench.group.library, dtype_name(DTYPE_OF(floatX)),
           is_beside ? " us beside | matmuls: times |" : "", is_beside ? "---:|---:|" : "");
    for (int operation = 0; operation < OPERATIONS; operation++) {
        for (size_t bytes = least; bytes <= most; bytes *= 4) {
            bench_operation(&bench, (Operation)operation, bytes);
        }
    }
    bench_close(&bench);
    return EXIT_SUCCESS;
}
