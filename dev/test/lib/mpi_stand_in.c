// mpi_stand_in.c -- a library to put before MPI's (LD_PRELOAD): the functions that comm_mpi.h and
// group.h call, between processes of one machine that a script has started (ranks.sh). They share
// the file LLMC_RANKS_FILE, and ranks that wait sleep. mpirun takes 0.1 s of CPU time to start, and
// MPI's ranks wait by polling, which costs more than small models on few cores.
//
// Collectives are for all ranks. Messages between two ranks arrive in the order in which they
// were sent. A rank that waits for a minute ends all.
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <mpi.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, CHUNK = 1 << 14, RING = 1 << 16, REQUESTS = 1 << 12, GROUPS = 64, WAIT_S = 60 };

// Bytes from one rank to another: written and read count all of them, modulo 2^32.
typedef struct {
    _Atomic uint32_t written, read;
    char data[RING];
} Ring;

typedef struct {
    _Atomic int end;                 // 1 + the exit status with which all end; 0: they run
    _Atomic uint32_t changes[RANKS]; // a rank sleeps on its own
    _Atomic int sleeps[RANKS];
    _Atomic uint32_t meetings[RANKS]; // that each rank has reached
    char chunks[RANKS][CHUNK];
    Ring rings[RANKS][RANKS];
} Shared;

// Ranks of a communicator, in their order.
typedef struct {
    int size, rank, members[RANKS];
} Members;

// Message under way: first its header, then the data.
typedef struct {
    uint64_t communicator, bytes;
} Header;

typedef struct {
    int peer, sends, has_header;
    Header header;
    char* data;
    size_t done;
} Request;

static Shared* shared;
static int rank, size, is_initialized;
static Members groups[GROUPS]; // 0: all
static int num_groups = 1;
static Request requests[REQUESTS];
static int num_requests, num_waited;

// ---- waiting ----

static void tell(int other) {
    shared->changes[other]++;
    if (shared->sleeps[other]) {
        syscall(SYS_futex, &shared->changes[other], FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

static void tell_all(void) {
    for (int r = 0; r < size; r++) {
        tell(r);
    }
}

__attribute__((noreturn)) static void end_all(int status) {
    int none = 0;
    atomic_compare_exchange_strong(&shared->end, &none, status + 1);
    tell_all();
    _exit(shared->end - 1);
}

__attribute__((noreturn)) static void fail(const char* what) {
    fprintf(stderr, "error: MPI's stand-in, rank %d of %d: %s\n", rank, size, what);
    end_all(1);
}

// Sleeps until something has changed since `seen`.
static void sleep_since(uint32_t seen) {
    const struct timespec limit = {WAIT_S, 0};
    shared->sleeps[rank] = 1;
    const long result = syscall(SYS_futex, &shared->changes[rank], FUTEX_WAIT, seen, &limit, NULL, 0);
    const int is_late = result != 0 && errno == ETIMEDOUT;
    shared->sleeps[rank] = 0;
    if (shared->end) {
        _exit(shared->end - 1);
    }
    if (is_late) {
        fail("has waited a minute");
    }
}

// Waits until all ranks have called it as often.
static void meet(void) {
    const uint32_t here = ++shared->meetings[rank];
    tell_all();
    for (int r = 0; r < size; r++) {
        for (;;) {
            const uint32_t seen = shared->changes[rank];
            if ((int32_t)(shared->meetings[r] - here) >= 0) {
                break;
            }
            sleep_since(seen);
        }
    }
}

// Gathers all (size, bytes) from each rank's mine.
static void gather(char* all, const char* mine, size_t bytes) {
    for (size_t at = 0; at < bytes; at += CHUNK) {
        const size_t part = bytes - at < CHUNK ? bytes - at : CHUNK;
        memcpy(shared->chunks[rank], mine + at, part);
        meet();
        for (int r = 0; r < size; r++) {
            memcpy(all + (size_t)r * bytes + at, shared->chunks[r], part);
        }
        meet();
    }
}

// ---- the start and the end ----

int MPI_Initialized(int* flag) {
    *flag = is_initialized;
    return MPI_SUCCESS;
}

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
    const char* path = getenv("LLMC_RANKS_FILE");
    (void)argc, (void)argv;
    rank = atoi(getenv("OMPI_COMM_WORLD_RANK"));
    size = atoi(getenv("OMPI_COMM_WORLD_SIZE"));
    const int file = path && size <= RANKS ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) {
        fprintf(stderr, "error: MPI's stand-in: LLMC_RANKS_FILE=%s, %d ranks\n", path ? path : "", size);
        _exit(1);
    }
    shared = (Shared*)mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) {
        perror("error: MPI's stand-in: mmap");
        _exit(1);
    }
    groups[0].size = size;
    groups[0].rank = rank;
    for (int r = 0; r < size; r++) {
        groups[0].members[r] = r;
    }
    *provided = required;
    is_initialized = 1;
    meet();
    return MPI_SUCCESS;
}

int MPI_Finalize(void) {
    meet();
    return MPI_SUCCESS;
}

int MPI_Abort(MPI_Comm all, int status) {
    (void)all;
    end_all(status);
}

int MPI_Get_library_version(char* version, int* length) {
    *length = sprintf(version, "Open MPI v0.0.0, a stand-in");
    return MPI_SUCCESS;
}

int MPI_Error_string(int error, char* text, int* length) {
    *length = sprintf(text, "error %d", error);
    return MPI_SUCCESS;
}

// ---- communicators: numbers of groups; every other one is MPI's own, of all ranks ----

static MPI_Comm communicator(int group) { return (MPI_Comm)(intptr_t)group; }

static int group_number(MPI_Comm c) {
    const intptr_t number = (intptr_t)c;
    return number > 0 && number < num_groups ? (int)number : 0;
}

int MPI_Comm_rank(MPI_Comm c, int* of) {
    *of = groups[group_number(c)].rank;
    return MPI_SUCCESS;
}

int MPI_Comm_size(MPI_Comm c, int* of) {
    *of = groups[group_number(c)].size;
    return MPI_SUCCESS;
}

static int new_group(void) {
    if (num_groups == GROUPS) {
        fail("too many communicators");
    }
    return num_groups++;
}

int MPI_Comm_dup(MPI_Comm c, MPI_Comm* copy) {
    const int group = new_group();
    groups[group] = groups[group_number(c)];
    *copy = communicator(group);
    return MPI_SUCCESS;
}

// Ranks without a color get a communicator, too, so that numbers agree; nobody uses it.
int MPI_Comm_split(MPI_Comm all, int color, int key, MPI_Comm* part) {
    int mine[2] = {color, key}, of[RANKS][2];
    const int group = new_group();
    Members* m = &groups[group];
    (void)all;
    gather((char*)of, (const char*)mine, sizeof(mine));
    for (int r = 0; r < size; r++) {
        int at = m->size;
        if (of[r][0] == color) {
            for (; at > 0 && of[m->members[at - 1]][1] > of[r][1]; at--) {
                m->members[at] = m->members[at - 1];
            }
            m->members[at] = r;
            m->size++;
        }
    }
    for (int i = 0; i < m->size; i++) {
        m->rank = m->members[i] == rank ? i : m->rank;
    }
    *part = communicator(group);
    return MPI_SUCCESS;
}

int MPI_Comm_free(MPI_Comm* c) {
    (void)c;
    return MPI_SUCCESS;
}

int MPI_Comm_set_errhandler(MPI_Comm c, MPI_Errhandler handler) {
    (void)c, (void)handler;
    return MPI_SUCCESS;
}

// ---- collectives ----

// Data in bytes, from rank 0.
int MPI_Bcast(void* data, int bytes, MPI_Datatype type, int root, MPI_Comm all) {
    (void)type, (void)root, (void)all;
    for (int at = 0; at < bytes; at += CHUNK) {
        const size_t part = bytes - at < CHUNK ? (size_t)(bytes - at) : CHUNK;
        if (rank == 0) {
            memcpy(shared->chunks[0], (char*)data + at, part);
        }
        meet();
        memcpy((char*)data + at, shared->chunks[0], part);
        meet();
    }
    return MPI_SUCCESS;
}

// Data in bytes.
int MPI_Allgather(const void* mine, int bytes, MPI_Datatype type, void* all, int each, MPI_Datatype of_all,
                  MPI_Comm c) {
    (void)type, (void)each, (void)of_all, (void)c;
    gather((char*)all, (const char*)mine, (size_t)bytes);
    return MPI_SUCCESS;
}

// One int, the bits that any rank has set.
int MPI_Allreduce(const void* mine, void* any, int count, MPI_Datatype type, MPI_Op op, MPI_Comm c) {
    int all[RANKS], bits = 0;
    (void)count, (void)type, (void)op, (void)c;
    gather((char*)all, (const char*)mine, sizeof(int));
    for (int r = 0; r < size; r++) {
        bits |= all[r];
    }
    *(int*)any = bits;
    return MPI_SUCCESS;
}

// ---- messages ----

// Copies bytes to or from a ring, from a count on.
static void ring_copy(Ring* ring, uint32_t at, char* data, size_t bytes, int writes) {
    for (size_t done = 0; done < bytes;) {
        const size_t begin = (at + done) % RING,
                     part = bytes - done < RING - begin ? bytes - done : RING - begin;
        memcpy(writes ? ring->data + begin : data + done, writes ? data + done : ring->data + begin, part);
        done += part;
    }
}

// Moves what can be moved without waiting.
static void request_continue(Request* r) {
    Ring* ring = r->sends ? &shared->rings[rank][r->peer] : &shared->rings[r->peer][rank];
    _Atomic uint32_t* at = r->sends ? &ring->written : &ring->read;
    const uint32_t before = *at;
    size_t room = r->sends ? RING - (ring->written - ring->read) : ring->written - ring->read;
    if (!r->has_header && room >= sizeof(Header)) {
        Header header = r->header;
        ring_copy(ring, *at, (char*)&header, sizeof(Header), r->sends);
        if (memcmp(&header, &r->header, sizeof(Header)) != 0) {
            fail("a message of another group, or of another size");
        }
        *at += sizeof(Header);
        r->has_header = 1;
        room -= sizeof(Header);
    }
    const size_t left = r->header.bytes - r->done, part = left < room ? left : room;
    if (r->has_header && part > 0) {
        ring_copy(ring, *at, r->data + r->done, part, r->sends);
        *at += (uint32_t)part;
        r->done += part;
    }
    if (*at != before) {
        tell(r->peer);
    }
}

static int request_is_done(const Request* r) { return r->has_header && r->done == r->header.bytes; }

// Continues, for each peer and direction, the first message that is not complete.
static void requests_continue(void) {
    int is_busy[2][RANKS] = {0};
    for (int i = 0; i < num_requests; i++) {
        Request* r = &requests[i];
        if (!request_is_done(r) && !is_busy[r->sends][r->peer]) {
            request_continue(r);
            is_busy[r->sends][r->peer] = !request_is_done(r);
        }
    }
}

static int request_start(void* data, int bytes, int peer, MPI_Comm c, MPI_Request* request, int sends) {
    const int group = group_number(c);
    if (num_requests == REQUESTS) {
        fail("too many messages");
    }
    const Request r = {groups[group].members[peer],        sends,       0,
                       {(uint64_t)group, (uint64_t)bytes}, (char*)data, 0};
    *request = (MPI_Request)(intptr_t)(num_requests + 1);
    requests[num_requests++] = r;
    requests_continue();
    return MPI_SUCCESS;
}

int MPI_Isend(const void* data, int bytes, MPI_Datatype type, int peer, int tag, MPI_Comm c,
              MPI_Request* request) {
    (void)type, (void)tag;
    return request_start((void*)data, bytes, peer, c, request, 1);
}

int MPI_Irecv(void* data, int bytes, MPI_Datatype type, int peer, int tag, MPI_Comm c, MPI_Request* request) {
    (void)type, (void)tag;
    return request_start(data, bytes, peer, c, request, 0);
}

int MPI_Wait(MPI_Request* request, MPI_Status* status) {
    const Request* r = &requests[(intptr_t)*request - 1];
    (void)status;
    for (;;) {
        const uint32_t seen = shared->changes[rank];
        requests_continue();
        if (request_is_done(r)) {
            break;
        }
        sleep_since(seen);
    }
    num_waited++;
    if (num_waited == num_requests) {
        num_waited = num_requests = 0;
    }
    return MPI_SUCCESS;
}
