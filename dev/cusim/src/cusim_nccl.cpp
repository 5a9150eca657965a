// cusim_nccl.cpp -- NCCL's collectives between processes of one machine, over POSIX shared memory. Sums are
// made in double, in rank order, and rounded once, so all ranks get the same bits.
//
// NCCL hangs or corrupts memory when ranks disagree. Here every collective is announced first, and compared:
// ranks that call different ones are told so, and who does not come in time is named.
#if __has_include(<nccl.h>) // else programs that use it do not link
#include "cusim_internal.h"

#include <algorithm>
#include <atomic>
#include <ctime>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

enum { MAX_RANKS = 32, CHUNK_BYTES = 1 << 20 };
typedef enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE } Collective;
const char* const collective_names[] = {"AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Reduce"};

struct Call {
    Collective collective;
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int root;
    size_t count;
};

// What the ranks share. `data` holds a chunk for each rank.
struct Shared {
    std::atomic<unsigned> joined, arrived, generation, dead;
    std::atomic<unsigned> barriers[MAX_RANKS]; // how many each rank has come to
    Call call[MAX_RANKS];
    alignas(64) unsigned char data[1];
};

} // namespace

struct ncclComm {
    int rank, ranks;
    Shared* shared;
    size_t shared_bytes;
    unsigned long calls;
    char name[64];
};

namespace {

unsigned char* chunk_of(const ncclComm* comm, int rank) {
    return comm->shared->data + (size_t)rank * CHUNK_BYTES;
}

// ---- ranks wait for each other ----

void wait_for_change(std::atomic<unsigned>* at, unsigned value) { // at most 0.1 s
    timespec time = {0, 100000000};
    syscall(SYS_futex, at, FUTEX_WAIT, value, &time, nullptr, 0);
}
void wake_all(std::atomic<unsigned>* at) { syscall(SYS_futex, at, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

long timeout_s() {
    static const long seconds = (long)environment_number("CUSIM_NCCL_TIMEOUT", 60, 1, 86400);
    return seconds;
}

void exit_because_late(ncclComm* comm) {
    Shared* shared = comm->shared;
    shared->dead = 1;
    fprintf(stderr, "CUSIM ERROR: NCCL %s #%lu on rank %d: timed out; ranks not in it:",
            collective_names[shared->call[comm->rank].collective], comm->calls, comm->rank);
    for (int r = 0; r < comm->ranks; r++) {
        if (shared->barriers[r] != shared->barriers[comm->rank]) {
            fprintf(stderr, " %d", r);
        }
    }
    fprintf(stderr, "\n");
    _exit(3);
}

void meet(ncclComm* comm) {
    Shared* shared = comm->shared;
    const unsigned generation = shared->generation.load();
    shared->barriers[comm->rank]++;
    if (shared->arrived.fetch_add(1) + 1 == (unsigned)comm->ranks) {
        shared->arrived = 0;
        shared->generation++;
        wake_all(&shared->generation);
        return;
    }
    const time_t start = time(nullptr);
    while (shared->generation.load() == generation) {
        wait_for_change(&shared->generation, generation);
        if (shared->dead) {
            fprintf(stderr, "CUSIM ERROR: rank %d: another rank aborted\n", comm->rank);
            _exit(3);
        }
        if (time(nullptr) - start > timeout_s()) {
            exit_because_late(comm);
        }
    }
}

void compare_calls(const ncclComm* comm) {
    const Call& mine = comm->shared->call[comm->rank];
    for (int r = 0; r < comm->ranks; r++) {
        const Call& other = comm->shared->call[r];
        if (mine.collective != other.collective || mine.type != other.type ||
            mine.reduction != other.reduction || mine.root != other.root || mine.count != other.count) {
            comm->shared->dead = 1;
            cusim_die("NCCL call #%lu differs: rank %d %s count %zu type %d, rank %d %s count %zu type %d",
                      comm->calls, comm->rank, collective_names[mine.collective], mine.count, (int)mine.type,
                      r, collective_names[other.collective], other.count, (int)other.type);
        }
    }
}

// ---- reductions ----

size_t type_bytes(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        cusim_die("NCCL data type %d is not supported", (int)type);
    }
}

double load(const unsigned char* from, size_t i, ncclDataType_t type) {
    switch (type) {
    case ncclFloat32:
        return ((const float*)from)[i];
    case ncclFloat64:
        return ((const double*)from)[i];
    case ncclBfloat16:
        return __bfloat162float(((const __nv_bfloat16*)from)[i]);
    case ncclFloat16:
        return __half2float(((const __half*)from)[i]);
    case ncclInt32:
        return ((const int*)from)[i];
    default:
        cusim_die("reduction of NCCL data type %d is not supported", (int)type);
    }
}

void store(void* to, size_t i, ncclDataType_t type, double x) {
    switch (type) {
    case ncclFloat32:
        ((float*)to)[i] = (float)x;
        break;
    case ncclFloat64:
        ((double*)to)[i] = x;
        break;
    case ncclBfloat16:
        ((__nv_bfloat16*)to)[i] = __float2bfloat16_rn((float)x);
        break;
    case ncclFloat16:
        ((__half*)to)[i] = __float2half_rn((float)x);
        break;
    default:
        ((int*)to)[i] = (int)x;
        break;
    }
}

double combine(double a, double b, ncclRedOp_t reduction) {
    switch (reduction) {
    case ncclMax:
        return b > a ? b : a;
    case ncclMin:
        return b < a ? b : a;
    case ncclProd:
        return a * b;
    default:
        return a + b;
    }
}

// Elements [first, first + count) of the ranks' chunks.
void reduce(void* to, const ncclComm* comm, size_t first, size_t count, const Call& call) {
    for (size_t i = 0; i < count; i++) {
        double x = load(chunk_of(comm, 0), first + i, call.type);
        for (int r = 1; r < comm->ranks; r++) {
            x = combine(x, load(chunk_of(comm, r), first + i, call.type), call.reduction);
        }
        store(to, i, call.type, call.reduction == ncclAvg ? x / comm->ranks : x);
    }
}

// ---- collectives, chunk by chunk ----

// Every rank puts its elements into its chunk, all meet, every rank takes its results.

// Elements [first, first + count) of all are in the chunks.
void take_results(const ncclComm* comm, char* receive, size_t first, size_t count, const Call& call) {
    const size_t bytes = type_bytes(call.type);
    switch (call.collective) {
    case ALL_REDUCE:
        reduce(receive + first * bytes, comm, 0, count, call);
        break;
    case REDUCE:
        if (comm->rank == call.root) {
            reduce(receive + first * bytes, comm, 0, count, call);
        }
        break;
    case REDUCE_SCATTER: { // the part of the chunk that lies in this rank's share
        const size_t share = call.count * (size_t)comm->rank;
        const size_t low = std::max(first, share), high = std::min(first + count, share + call.count);
        if (low < high) {
            reduce(receive + (low - share) * bytes, comm, low - first, high - low, call);
        }
        break;
    }
    case ALL_GATHER:
        for (int r = 0; r < comm->ranks; r++) {
            memcpy(receive + ((size_t)r * call.count + first) * bytes, chunk_of(comm, r), count * bytes);
        }
        break;
    case BROADCAST:
        memcpy(receive + first * bytes, chunk_of(comm, call.root), count * bytes);
        break;
    }
}

void run(ncclComm* comm, const void* send, void* receive, const Call& call) {
    const size_t bytes = type_bytes(call.type);
    comm->calls++;
    comm->shared->call[comm->rank] = call;
    meet(comm);
    compare_calls(comm);
    const size_t total = call.collective == REDUCE_SCATTER ? call.count * (size_t)comm->ranks : call.count;
    const bool sends = call.collective != BROADCAST || comm->rank == call.root;
    for (size_t first = 0; first < total; first += CHUNK_BYTES / bytes) {
        const size_t count = std::min(CHUNK_BYTES / bytes, total - first);
        if (sends) {
            memcpy(chunk_of(comm, comm->rank), (const char*)send + first * bytes, count * bytes);
        }
        meet(comm);
        take_results(comm, (char*)receive, first, count, call);
        meet(comm);
    }
}

// Within a group, calls wait for its end.
struct Pending {
    cudaStream_t stream;
    std::function<void()> work;
};
int group_depth = 0;
std::vector<Pending>& pending() {
    static auto* list = new std::vector<Pending>;
    return *list;
}

ncclResult_t enqueue(ncclComm* comm, const void* send, void* receive, const Call& call, cudaStream_t stream) {
    if (call.root < 0 || call.root >= comm->ranks) {
        return ncclInvalidArgument;
    }
    if (call.count == 0) {
        return ncclSuccess;
    }
    const bool sends = call.collective != BROADCAST || comm->rank == call.root;
    const bool receives = call.collective != REDUCE || comm->rank == call.root;
    const void* self = (const void*)&ncclAllReduce; // a name for the message
    cusim_check_kernel_pointer(sends ? send : nullptr, 0, self);
    cusim_check_kernel_pointer(receives ? receive : nullptr, 1, self);
    auto work = [=] { run(comm, send, receive, call); };
    if (group_depth) {
        pending().push_back({stream, work});
    } else {
        cusim_enqueue(stream, true, work);
    }
    return ncclSuccess;
}

} // namespace

// ---- the interface ----

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess           ? "no error"
           : result == ncclInvalidArgument ? "invalid argument"
           : result == ncclSystemError     ? "unhandled system error"
                                           : "NCCL error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    memset(id, 0, sizeof(*id));
    snprintf(id->internal, sizeof(id->internal), "/cusim-nccl-%d-%lx", (int)getpid(),
             (unsigned long)time.tv_nsec + (unsigned long)time.tv_sec * 1000000000ul);
    return ncclSuccess;
}

// The id is the name of the shared memory, which lives until all have come.
ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
    if (ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks) {
        return ncclInvalidArgument;
    }
    ncclComm* comm = new ncclComm();
    comm->rank = rank;
    comm->ranks = ranks;
    comm->shared_bytes = sizeof(Shared) + (size_t)ranks * CHUNK_BYTES;
    snprintf(comm->name, sizeof(comm->name), "%.*s", (int)sizeof(comm->name) - 1, id.internal);
    const int file = shm_open(comm->name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)comm->shared_bytes)) {
        return ncclSystemError;
    }
    void* memory = mmap(nullptr, comm->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) {
        return ncclSystemError;
    }
    comm->shared = (Shared*)memory;
    comm->shared->joined++;
    for (const time_t start = time(nullptr); comm->shared->joined.load() < (unsigned)ranks;) {
        usleep(1000);
        if (time(nullptr) - start > timeout_s()) {
            return ncclSystemError;
        }
    }
    meet(comm);
    if (rank == 0) {
        shm_unlink(comm->name);
    }
    *out = comm;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    cudaDeviceSynchronize();
    munmap(comm->shared, comm->shared_bytes);
    delete comm;
    return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) { // the other ranks end in their next collective
    comm->shared->dead = 1;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) {
    *ranks = comm->ranks;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    if (group_depth == 0) {
        return ncclInvalidUsage;
    }
    if (--group_depth == 0) {
        for (const Pending& call : pending()) {
            cusim_enqueue(call.stream, true, call.work);
        }
        pending().clear();
    }
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {ALL_REDUCE, type, reduction, 0, count}, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {REDUCE_SCATTER, type, reduction, 0, count}, stream);
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {ALL_GATHER, type, ncclSum, 0, count}, stream);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {BROADCAST, type, ncclSum, root, count}, stream);
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {REDUCE, type, reduction, root, count}, stream);
}
}

#endif
