/*
comm_nccl.cuh -- chooses the GPU of a rank, and moves bulk data between the GPUs of a run, by NCCL.

Everything but gpu_device_of_rank and group_gpu_check is collective: all ranks call it in the same
order, across all streams; group_exchange only the two ranks of a move. Transfers are queued on
`stream`, which may be captured: all ranks then replay it together. Counts are elements of `type`
per rank. recv and send must not overlap unless a comment says so.

    group_exchange        sends and receives of any bytes, which all start together (group.h)
    group_all_to_all      chunk j of send goes to rank j, chunk i of recv is from rank i; both
                          (size, count)
    group_all_gather      recv (size, count), send (count). In place: send = recv + rank * count
    group_reduce_scatter  recv (count), chunk `rank` of the sum of all ranks' send (size, count),
                          added in the library's order. In place: recv = send + rank * count

NCCL keeps no order between communicators. Where a GPU has no room for two operations at a time, or
their streams share a queue of the hardware, ranks whose streams get to run in other orders wait for
each other for ever. A process with exchanges on several streams opens its groups with
GROUP_SEVERAL_STREAMS, and all start in the order of the calls: by NCCL_LAUNCH_ORDER_IMPLICIT=1, or
if NCCL is older than 2.26 or the user has set it to 0, by an event: an exchange waits for the end
of the one before if that is on another stream, and none may be captured.

With one rank there is no communicator and NCCL is not initialized: data is copied if it has to
move. NCCL is used if the program was built with it (HAVE_NCCL); otherwise a run has one rank.

needs:   NCCL 2.18, for more than one rank
*/
#ifndef LLMC_COMM_NCCL_CUH
#define LLMC_COMM_NCCL_CUH

#include "llmc/base/check.h"
#include "llmc/base/xxh64.h"
#include "llmc/comm/comm.h"
#include "llmc/comm/group.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/gpu/graph.cuh"

#ifdef HAVE_NCCL
#include <nccl.h>

#define NCCL_CHECK(call)                                                                                     \
    do {                                                                                                     \
        const ncclResult_t error_ = (call);                                                                  \
        CHECK_CALL(error_ == ncclSuccess, "NCCL: %s: %s. %s", #call, ncclGetErrorString(error_),             \
                   error_ == ncclSuccess ? "" : ncclGetLastError(NULL));                                     \
    } while (0)
#endif

// Streams of the exchanges of a process, in all of its groups.
typedef enum { GROUP_ONE_STREAM, GROUP_SEVERAL_STREAMS } GroupStreams;

// Last exchange of a process: its stream, and an event at its end.
typedef struct {
    cudaStream_t stream; // NULL: none yet
    cudaEvent_t end;
} GroupLast;

// Ordered set of ranks, each with its GPU.
typedef struct {
    int rank, size;
    struct ncclComm* communicator; // NULL with one rank
    Comm* comm;
    char library[32]; // "NCCL 2.28.9"; empty with one rank
    GroupLast* last;  // of all groups that were split from the same one; NULL: NCCL keeps the order
} GroupGpu;

// Returns the group of this rank alone, which has nothing to close.
static inline GroupGpu group_gpu_alone(Comm* c) {
    const GroupGpu one = {0, 1, NULL, c, "", NULL};
    return one;
}

// Returns the device of this rank: `wanted`, or if that is -1, its local rank, or the only device
// that it sees.
static inline int gpu_device_of_rank(const Comm* c, int wanted) {
    int devices = 0;
    CUDA_CHECK(cudaGetDeviceCount(&devices));
    if (wanted < 0 && devices > 1) {
        CHECK(c->local_size <= devices,
              "%d processes on %s, which has %d GPUs; wanted one GPU for each process", c->local_size,
              c->host, devices);
        wanted = c->local_rank;
    }
    return wanted < 0 ? 0 : wanted;
}

// Moves the data of a group of one.
static inline void group_gpu_copy_(void* recv, const void* send, size_t count, DType type,
                                   cudaStream_t stream) {
    if (recv != send && count) {
        CUDA_CHECK(cudaMemcpyAsync(recv, send, count * dtype_bytes(type), cudaMemcpyDeviceToDevice, stream));
    }
}

// Exchanges the moves of a rank with itself.
static inline void group_gpu_exchange_alone_(const GroupMove* moves, int count, cudaStream_t stream) {
    int from = 0;
    for (int to = 0; to < count; to++) {
        if (!moves[to].sends) {
            while (!moves[from].sends) {
                from++;
            }
            CUDA_CHECK(cudaMemcpyAsync(moves[to].data, moves[from].data, moves[to].bytes,
                                       cudaMemcpyDeviceToDevice, stream));
            from++;
        }
    }
}

#ifdef HAVE_NCCL

// Identity of a GPU. LLMC_NODES simulates machines, so the node is part of it.
typedef struct {
    int node;
    char bus_id[20], host[64];
} GpuPlace_;

// Refuses ranks that share a GPU: NCCL would wait, or fail without naming a rank. All ranks find
// the same.
static inline void group_gpu_compare_places_(Comm* c) {
    GpuPlace_ mine, *all = (GpuPlace_*)check_alloc((size_t)c->size, sizeof(mine), "places of GPUs");
    int device;
    memset(&mine, 0, sizeof(mine));
    mine.node = c->node;
    snprintf(mine.host, sizeof(mine.host), "%s", c->host);
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(mine.bus_id, sizeof(mine.bus_id), device));
    comm_all_gather(c, all, &mine, sizeof(mine));
    for (int r = 1; r < c->size; r++) {
        for (int other = 0; other < r; other++) {
            CHECK(memcmp(&all[r], &all[other], sizeof(mine)) != 0,
                  "ranks %d and %d have the same GPU, %s of %s; wanted one GPU for each process", other, r,
                  all[r].bus_id, all[r].host);
        }
    }
    free(all);
}

// Warns if the GPUs differ: other GPUs round differently, and the slowest one sets the pace.
static inline void group_gpu_compare_models_(Comm* c) {
    struct cudaDeviceProp properties;
    int device;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    comm_agree(c, "the model of the GPU", xxh64(properties.name, strlen(properties.name)), properties.name);
}

// Checks that all ranks have loaded the same version, and returns it.
static inline int group_gpu_find_library_(GroupGpu* g) {
    int version;
    NCCL_CHECK(ncclGetVersion(&version));
    snprintf(g->library, sizeof(g->library), "NCCL %d.%d.%d", version / 10000, version / 100 % 100,
             version % 100);
    comm_agree(g->comm, "the version of NCCL", (uint64_t)version, g->library);
    return version;
}

// Makes the exchanges of the process start in the order of the calls. Before NCCL reads the
// variable, which it does once.
static inline void group_gpu_keep_order_(GroupGpu* g, int version) {
    const char name[] = "NCCL_LAUNCH_ORDER_IMPLICIT";
    setenv(name, "1", 0);
    if (version < 22600 || atoi(getenv(name)) == 0) {
        g->last = (GroupLast*)check_alloc(1, sizeof(GroupLast), "the order of exchanges");
        CUDA_CHECK(cudaEventCreateWithFlags(&g->last->end, cudaEventDisableTiming));
    }
}

// Returns the configuration of a group with this name, which must stay valid. NCCL's messages have
// it, from 2.27 on.
static inline ncclConfig_t group_gpu_config_(const char* name) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    config.commName = name;
#else
    (void)name;
#endif
    return config;
}

// Opens the group of all ranks of c. Collective; the rank's device must be current. The
// communicator blocks: a nonblocking one uses an extra thread for every group of calls, and the
// watchdog ends a rank that hangs in here anyway.
static inline void group_gpu_open(GroupGpu* g, Comm* c, GroupStreams streams) {
    const GroupGpu group = {c->rank, c->size, NULL, c, "", NULL};
    *g = group;
    if (c->size > 1) {
        ncclUniqueId id;
        ncclConfig_t config = group_gpu_config_("all");
        const int version = group_gpu_find_library_(g);
        if (streams == GROUP_SEVERAL_STREAMS) {
            group_gpu_keep_order_(g, version);
        }
        group_gpu_compare_models_(c);
        group_gpu_compare_places_(c);
        memset(&id, 0, sizeof(id));
        if (c->rank == 0) {
            NCCL_CHECK(ncclGetUniqueId(&id));
        }
        comm_broadcast(c, &id, sizeof(id));
        comm_progress(c, COMM_SETUP, -1, "opening NCCL");
        NCCL_CHECK(ncclCommInitRankConfig(&g->communicator, c->size, id, c->rank, &config));
    }
}

// Opens the group of ranks of `all` with the same color, in the order of their ranks. `all` must
// stay open as long.
static inline void group_gpu_split(GroupGpu* g, const GroupGpu* all, int color, const char* name) {
    *g = *all;
    if (all->communicator) {
        ncclConfig_t config = group_gpu_config_(name);
        NCCL_CHECK(ncclCommSplit(all->communicator, color, all->rank, &g->communicator, &config));
        NCCL_CHECK(ncclCommUserRank(g->communicator, &g->rank));
        NCCL_CHECK(ncclCommCount(g->communicator, &g->size));
    }
}

// Closes a group that was split from another one. Waits for queued work.
static inline void group_gpu_close_part(GroupGpu* g) {
    if (g->communicator) {
        NCCL_CHECK(ncclCommFinalize(g->communicator));
        NCCL_CHECK(ncclCommDestroy(g->communicator));
        gpu_library_gives(g->communicator);
        g->communicator = NULL;
    }
}

// Closes the group of all ranks, after its parts.
static inline void group_gpu_close(GroupGpu* g) {
    group_gpu_close_part(g);
    if (g->last) {
        CUDA_CHECK(cudaEventDestroy(g->last->end));
        free(g->last);
        g->last = NULL;
    }
}

// Ends all ranks if NCCL has reported an error of the network or a peer. Cheap; not during the
// capture of a stream.
static inline void group_gpu_check(const GroupGpu* g) {
    if (g->communicator) {
        ncclResult_t error = ncclSuccess;
        NCCL_CHECK(ncclCommGetAsyncError(g->communicator, &error));
        CHECK(error == ncclSuccess, "NCCL: %s. %s", ncclGetErrorString(error),
              ncclGetLastError(g->communicator));
    }
}

static inline ncclDataType_t group_gpu_type_(DType type) {
    static const ncclDataType_t types[] = {ncclFloat32, ncclBfloat16, ncclFloat16};
    return types[type];
}

// Stand around the calls of an exchange, which then is in the order of the process.
static inline void group_gpu_begin_(const GroupGpu* g, cudaStream_t stream) {
    if (g->last && g->last->stream && g->last->stream != stream) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, g->last->end, 0));
    }
    NCCL_CHECK(ncclGroupStart());
}
static inline void group_gpu_end_(const GroupGpu* g, cudaStream_t stream) {
    NCCL_CHECK(ncclGroupEnd());
    if (g->last) {
        assert(!graph_is_capturing(stream));
        CUDA_CHECK(cudaEventRecord(g->last->end, stream));
        g->last->stream = stream;
    }
}

static inline void group_exchange(const GroupMove* moves, int count, const GroupGpu* g, cudaStream_t stream) {
    int is_alone = 1;
    for (int i = 0; i < count; i++) {
        is_alone = is_alone && moves[i].peer == g->rank;
    }
    if (is_alone) { // copies need no channel of NCCL
        group_gpu_exchange_alone_(moves, count, stream);
        return;
    }
    group_gpu_begin_(g, stream);
    for (int i = 0; i < count; i++) {
        const GroupMove* m = &moves[i];
        if (m->sends) {
            NCCL_CHECK(ncclSend(m->data, m->bytes, ncclInt8, m->peer, g->communicator, stream));
        } else {
            NCCL_CHECK(ncclRecv(m->data, m->bytes, ncclInt8, m->peer, g->communicator, stream));
        }
    }
    group_gpu_end_(g, stream);
}

static inline void group_all_to_all(void* recv, const void* send, size_t count, DType type, const GroupGpu* g,
                                    cudaStream_t stream) {
    const size_t bytes = count * dtype_bytes(type);
    if (!g->communicator) {
        group_gpu_copy_(recv, send, count, type, stream);
        return;
    }
    group_gpu_begin_(g, stream);
    for (int r = 0; r < g->size; r++) {
        const ncclDataType_t nccl_type = group_gpu_type_(type);
        NCCL_CHECK(ncclSend((const char*)send + r * bytes, count, nccl_type, r, g->communicator, stream));
        NCCL_CHECK(ncclRecv((char*)recv + r * bytes, count, nccl_type, r, g->communicator, stream));
    }
    group_gpu_end_(g, stream);
}

static inline void group_all_gather(void* recv, const void* send, size_t count, DType type, const GroupGpu* g,
                                    cudaStream_t stream) {
    if (!g->communicator) {
        group_gpu_copy_(recv, send, count, type, stream);
        return;
    }
    group_gpu_begin_(g, stream);
    NCCL_CHECK(ncclAllGather(send, recv, count, group_gpu_type_(type), g->communicator, stream));
    group_gpu_end_(g, stream);
}

static inline void group_reduce_scatter(void* recv, const void* send, size_t count, DType type,
                                        const GroupGpu* g, cudaStream_t stream) {
    if (!g->communicator) {
        group_gpu_copy_(recv, send, count, type, stream);
        return;
    }
    group_gpu_begin_(g, stream);
    NCCL_CHECK(ncclReduceScatter(send, recv, count, group_gpu_type_(type), ncclSum, g->communicator, stream));
    group_gpu_end_(g, stream);
}

#else // without NCCL a run has one rank

static inline void group_gpu_open(GroupGpu* g, Comm* c, GroupStreams streams) {
    const GroupGpu group = {c->rank, c->size, NULL, c, "", NULL};
    (void)streams;
    *g = group;
    if (c->size > 1) {
        die_usage("%d processes, but this program was built without NCCL: install libnccl-dev from NVIDIA's "
                  "package repository, and make again",
                  c->size);
    }
}

static inline void group_gpu_split(GroupGpu* g, const GroupGpu* all, int color, const char* name) {
    (void)color, (void)name;
    *g = *all;
}

static inline void group_gpu_close_part(GroupGpu* g) { (void)g; }

static inline void group_gpu_close(GroupGpu* g) { (void)g; }

static inline void group_gpu_check(const GroupGpu* g) { (void)g; }

static inline void group_exchange(const GroupMove* moves, int count, const GroupGpu* g, cudaStream_t stream) {
    (void)g;
    group_gpu_exchange_alone_(moves, count, stream);
}

static inline void group_all_to_all(void* recv, const void* send, size_t count, DType type, const GroupGpu* g,
                                    cudaStream_t stream) {
    (void)g;
    group_gpu_copy_(recv, send, count, type, stream);
}

static inline void group_all_gather(void* recv, const void* send, size_t count, DType type, const GroupGpu* g,
                                    cudaStream_t stream) {
    (void)g;
    group_gpu_copy_(recv, send, count, type, stream);
}

static inline void group_reduce_scatter(void* recv, const void* send, size_t count, DType type,
                                        const GroupGpu* g, cudaStream_t stream) {
    (void)g;
    group_gpu_copy_(recv, send, count, type, stream);
}

#endif

#endif
